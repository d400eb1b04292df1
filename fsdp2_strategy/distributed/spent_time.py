"""Measure how long this process waits for data, for saves and for other ranks.

Input: blocks of code that wait, marked where they are. Output: seconds since the start of the process.

[Note: time spent waiting] Each kind of wait has a `Timer` that only grows; a reader remembers the value of before. In
host memory, a collective blocks, so its time is the time of the host in it. On an accelerator, the host only queues it,
and the stream of the computation waits. Events before and after this wait are recorded in one of `MEASURED` steps, and
read when the host has waited for the stream anyway, so that reading them never blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")

MEASURED = 8
"""On an accelerator, one in so many steps is measured: events cost a few microseconds for each unit."""


class Timer:
    """Seconds that threads have spent in blocks ``with timer:``; a block within another one counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_used = False
        """Whether anything was measured so far."""
        self._inside = threading.local()

    def __enter__(self) -> None:
        inside = vars(self._inside)
        inside["depth"] = inside.get("depth", 0) + 1
        if inside["depth"] == 1:
            inside["begin"] = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        inside = vars(self._inside)
        inside["depth"] -= 1
        if not inside["depth"]:
            self.seconds += time.perf_counter() - inside["begin"]
            self.is_used = True

    def timed(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items, and measure the time that each takes to come."""
        with self:
            iterator = iter(items)
        return self._timed(iterator)

    def _timed(self, iterator: Iterator[T]) -> Iterator[T]:
        while True:
            with self:
                item: Any = next(iterator, _END)
            if item is _END:
                return
            yield item


_END = object()

data = Timer()
"""Waits of the training loop for its next batch."""
saves = Timer()
"""Calls that save a checkpoint, or wait for one that is written in the background."""
other_ranks = Timer()
"""Collectives in host memory that wait for other ranks; and on an accelerator, what `read_device_waits` adds."""

_pairs: list[tuple[Any, Any]] = []
_spare: list[Any] = []
_measuring = 0
"""How many readers measure the current step."""


def measure_device_waits(*, is_measured: bool) -> None:
    """Begin to measure waits of an accelerator, or end it; several readers may do so. [Note: time spent waiting]"""
    global _measuring  # noqa: PLW0603  the steps of all models run in one process
    _measuring += 1 if is_measured else -1


@contextmanager
def device_wait(device: torch.device) -> Iterator[None]:
    """Measure how long the current stream of an accelerator waits for what this block queues."""
    if not _measuring or device.type in ("cpu", "meta"):
        yield
        return
    before, after = _event(device), _event(device)
    before.record()
    try:
        yield
    finally:
        after.record()
        _pairs.append((before, after))


def read_device_waits() -> None:
    """Add the waits that have ended to `other_ranks`; does not wait for the accelerator."""
    unfinished = []
    for before, after in _pairs:
        if before.query() and after.query():
            other_ranks.seconds += before.elapsed_time(after) / 1000
            _spare.extend((before, after))
        else:
            unfinished.append((before, after))
    _pairs[:] = unfinished


def _event(device: torch.device) -> Any:
    return _spare.pop() if _spare else torch.Event(device.type, enable_timing=True)
