"""Pause Python's cyclic garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector inside the block, for all threads.

    A save plan consists of many small objects without cycles. Allocating them triggers collections, and each collection
    traverses all objects of the process. In a save of 5,000 small tensors, the collections take a quarter of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
