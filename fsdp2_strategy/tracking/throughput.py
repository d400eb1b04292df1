"""Measure frames per second and the share of time spent waiting for data, per rank and over all ranks.

Input: the batches of a loader, and their numbers of frames. Output: rates, which are the same on every rank.

The first step is warm-up: workers start, files are opened, and the first forward and backward allocate memory. The time
spent waiting for the first batch is reported separately. All other times, and the frames, are counted from the request
for the second batch on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from fsdp2_strategy.distributed import spent_time
from fsdp2_strategy.distributed.collectives import all_gather
from fsdp2_strategy.distributed.lost_ranks import collective

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRates:
    """Frames and times of one rank in an interval."""

    frames: int
    seconds: float
    waiting_seconds: float
    """Part of ``seconds`` that was spent waiting for batches."""
    first_batch_seconds: float
    """Time spent waiting for the first batch of the run; not part of ``seconds`` or ``waiting_seconds``."""

    @property
    def frames_per_second(self) -> float:
        """Frames per second of this rank; 0 if no time has passed."""
        return self.frames / self.seconds if self.seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """Fraction of its time that this rank spent waiting for data, 0 to 1."""
        return self.waiting_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Frames and times of all ranks in an interval."""

    ranks: tuple[RankRates, ...]

    @property
    def frames_per_second(self) -> float:
        """Frames of all ranks, divided by the time of the slowest rank; 0 if no time has passed."""
        seconds = max(rank.seconds for rank in self.ranks)
        return sum(rank.frames for rank in self.ranks) / seconds if seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """Largest waiting share of any rank, because all other ranks wait for this rank in the next collective."""
        return max(rank.waiting_share for rank in self.ranks)

    @property
    def first_batch_seconds(self) -> float:
        """Longest time that any rank waited for its first batch."""
        return max(rank.first_batch_seconds for rank in self.ranks)

    def __str__(self) -> str:
        if not any(rank.seconds for rank in self.ranks):
            return "no rate before the second step"
        each = [rank.frames_per_second for rank in self.ranks]
        return (
            f"{self.frames_per_second:.1f} frames/s in total, {min(each):.1f} to {max(each):.1f} a rank, "
            f"{self.waiting_share:.0%} of the time waiting for data"
        )


class Throughput:
    """A meter of frames per second and of the time spent waiting for data, on every rank.

    Args:
        clock: function that returns the time in seconds.

    Example:
        >>> meter = Throughput()
        >>> for batch in meter.over([[1, 2], [3, 4], [5, 6]]):
        ...     meter.count(len(batch))
        >>> meter.frames  # without those of the first step
        4
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._first_batch_seconds: float | None = None
        self._start: float | None = None
        self._waited = 0.0
        self.frames = 0
        self._lap: tuple[int, float, float] | None = None  # frames, waiting seconds and time at the end of the last lap

    def over(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches, and measure the time spent waiting for each; not collective."""
        iterator = iter(batches)
        while True:
            requested = self._clock()
            if self._first_batch_seconds is not None and self._start is None:
                self._start = requested
            try:
                with spent_time.data:
                    batch = next(iterator)
            except StopIteration:
                return
            waited = self._clock() - requested
            if self._first_batch_seconds is None:
                self._first_batch_seconds = waited
            else:
                self._waited += waited
            yield batch

    def count(self, frames: int) -> None:
        """Add the frames of a batch; call it after the step with this batch; not collective."""
        if self._start is not None:
            self.frames += frames

    @collective
    def lap(self) -> Rates:
        """Return the rates since the previous call; collective.

        On an accelerator, call it after an operation that synchronises with the device, such as ``loss.item()``.
        """
        now = self._clock()
        rates = self._since(self._lap, now)
        self._lap = None if self._start is None else (self.frames, self._waited, now)
        return rates

    @collective
    def total(self) -> Rates:
        """Return the rates since the request for the second batch; collective."""
        return self._since(None, self._clock())

    def _since(self, lap: tuple[int, float, float] | None, now: float) -> Rates:
        frames, waited, start = lap or (0, 0.0, now if self._start is None else self._start)
        own = {
            "frames": self.frames - frames,
            "seconds": now - start,
            "waiting_seconds": self._waited - waited,
            "first_batch_seconds": self._first_batch_seconds or 0.0,
        }
        rows = zip(*(values.tolist() for values in all_gather(own).values()), strict=True)
        return Rates(ranks=tuple(RankRates(**dict(zip(own, row, strict=True))) for row in rows))
