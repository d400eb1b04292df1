"""Make requests to the store of the process group from a background thread.

Input: a block of requests. Output: a store with a connection of its own, so that the requests do not wait until the
main thread has got what it waits for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp2_strategy.distributed.process_end import call_at_end
from fsdp2_strategy.distributed.torch_internals import default_store

_SECONDS = 5.0
"""How long a thread waits for the requests of another one."""
_uses_store = threading.Lock()
"""Is held while a thread makes requests to the store."""
_stores: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The store of each default group with a connection of its own."""


@contextmanager
def background_store() -> Iterator[Any]:
    """Yield the store of the default process group for requests of a thread; requests of other threads wait.

    Raises a `TimeoutError` if another thread still waits for the store, whose process may be stopped.
    """
    lock = _uses_store
    if not lock.acquire(timeout=_SECONDS):
        raise TimeoutError("the store of the process group does not answer")
    try:
        group = dist.group.WORLD
        if group not in _stores:
            _stores[group] = default_store().clone()
        yield _stores[group]
    finally:
        lock.release()


def _end_requests() -> None:
    """Prevent further requests of all threads: Python would end them within one, and the process with an abort."""
    _uses_store.acquire(timeout=2)


def _forget_lock() -> None:
    """Make a new lock in a forked process, which has no thread that would release the old one."""
    global _uses_store  # noqa: PLW0603
    _uses_store = threading.Lock()


call_at_end(_end_requests)
os.register_at_fork(after_in_child=_forget_lock)
