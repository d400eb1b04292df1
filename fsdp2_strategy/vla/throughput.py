"""How fast a trainer gets its data, and how much of its time it waits for it, on each rank and over all.

Input: the batches that a loader gives, and how many frames each has. Output: rates, the same on every rank.

The first step is warm-up: workers start, files are opened, the model's first pass allocates. The time to its batch is
told for itself; frames and times count from when the second batch is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from fsdp2_strategy.distributed.collectives import all_gather

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRates:
    """What one rank did in a stretch of time."""

    frames: int
    seconds: float
    waiting_seconds: float
    """Part of ``seconds`` that passed between asking for a batch and having it."""
    first_batch_seconds: float
    """Between asking for the first batch of all and having it; not part of the above."""

    @property
    def frames_per_second(self) -> float:
        """Frames of this rank in a second; 0 where no time has passed."""
        return self.frames / self.seconds if self.seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """Part of the time in which this rank waited for data, 0 to 1."""
        return self.waiting_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What all ranks did in a stretch of time."""

    ranks: tuple[RankRates, ...]

    @property
    def frames_per_second(self) -> float:
        """Frames of all ranks over the longest of their times: what the run gets done."""
        seconds = max(rank.seconds for rank in self.ranks)
        return sum(rank.frames for rank in self.ranks) / seconds if seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """Largest share of the ranks: the others wait for that one in their next collective."""
        return max(rank.waiting_share for rank in self.ranks)

    @property
    def first_batch_seconds(self) -> float:
        """Longest time to the first batch."""
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
    """Measure how a trainer gets its data.

    Args:
        clock: gives seconds.

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
        self._began: float | None = None
        self._waited = 0.0
        self.frames = 0
        self._lap: tuple[int, float, float] | None = None  # frames, seconds waited and time when the last one ended

    def over(self, batches: Iterable[T]) -> Iterator[T]:
        """Give batches on, and measure how long each is waited for; not collective."""
        iterator = iter(batches)
        while True:
            asked = self._clock()
            if self._first_batch_seconds is not None and self._began is None:
                self._began = asked
            try:
                batch = next(iterator)
            except StopIteration:
                return
            waited = self._clock() - asked
            if self._first_batch_seconds is None:
                self._first_batch_seconds = waited
            else:
                self._waited += waited
            yield batch

    def count(self, frames: int) -> None:
        """Count the frames of a batch once its step is through; not collective."""
        if self._began is not None:
            self.frames += frames

    def lap(self) -> Rates:
        """Return the rates since the last lap; collective.

        On an accelerator call it after something that waits for the device, such as reading the loss.
        """
        now = self._clock()
        began = (0, 0.0, now if self._began is None else self._began)
        rates = self._since(self._lap or began, now)
        self._lap = None if self._began is None else (self.frames, self._waited, now)
        return rates

    def total(self) -> Rates:
        """Return the rates since the second batch was asked for; collective."""
        now = self._clock()
        return self._since((0, 0.0, now if self._began is None else self._began), now)

    def _since(self, mark: tuple[int, float, float], now: float) -> Rates:
        frames, waited, begin = mark
        own = {
            "frames": self.frames - frames,
            "seconds": now - begin,
            "waiting_seconds": self._waited - waited,
            "first_batch_seconds": self._first_batch_seconds or 0.0,
        }
        of_ranks = {name: values.tolist() for name, values in all_gather(own).items()}
        rows = zip(*of_ranks.values(), strict=True)
        return Rates(ranks=tuple(RankRates(**dict(zip(own, row, strict=True))) for row in rows))
