"""Tell whether standard error is a terminal, and write text above the progress bars that are on it.

Input: a stream. Output: the bars of tqdm are cleared while a block writes, and drawn again below its text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

_bars: WeakSet[Any] = WeakSet()
"""The bars that this process has drawn."""
# A child that is forked would draw its parent's bars, and wait for a lock that another thread may have held.
os.register_at_fork(after_in_child=_bars.clear)


def is_terminal() -> bool:
    """Return whether standard error is a terminal with columns, on which a progress bar can be drawn."""
    if not sys.stderr.isatty():
        return False
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        return True


def drawn(bar: Any) -> Any:
    """Note that this process draws a bar of tqdm, and return it."""
    _bars.add(bar)
    return bar


@contextmanager
def above_bars(stream: Any) -> Iterator[None]:
    """Write to a stream in this block without mixing its text with the bars of this package."""
    bar = next((bar for bar in list(_bars) if not bar.disable), None)
    if bar is None:
        yield
        return
    with bar.external_write_mode(file=stream):
        yield
