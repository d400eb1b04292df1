"""Which episodes a data set needs at hand: those of the batches in flight, and those that come next.

Input: the episodes of a rank's part of each batch, as the order says. Output: calls of a data set's ``hold``, in the
trainer's process, before it gets a batch.

[Note: hold] A data set that is costly to open has ``hold``. Samples of other episodes than ``now`` are not asked for
before the next call; those of ``soon`` are the next to come. Both are in ascending order. It also has ``pause``, which
ends its threads: workers are forked next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

_FARTHEST = 1 << 20
"""Batches to look ahead for the next episodes."""


class Holder(Protocol):
    """See [Note: hold]."""

    def hold(self, now: Sequence[int], soon: Sequence[int]) -> None:
        """Have episodes at hand, and no others."""

    def pause(self) -> None:
        """End all threads."""


class Ahead:
    """Tell a data set what is to come.

    Args:
        dataset: see [Note: hold].
        episodes: gives those of a rank's part of a batch.
        in_flight: batches that are fetched before the trainer asks.
    """

    def __init__(self, dataset: Holder, episodes: Callable[[int], frozenset[int]], in_flight: int) -> None:
        self._dataset, self._in_flight = dataset, in_flight
        self._episodes = lru_cache(maxsize=in_flight + 1)(episodes)
        self._now: frozenset[int] = frozenset()
        self._soon: frozenset[int] = frozenset()
        self._change = -1

    def at(self, batch: int) -> None:
        """Tell the data set that a batch is the next that the trainer gets."""
        now = self._span(batch)
        if now != self._now or batch >= self._change:
            self._change = self._first_change(batch, now)
            self._now, self._soon = now, self._span(self._change) - now
        self._dataset.hold(sorted(self._now), sorted(self._soon))

    def _span(self, batch: int) -> frozenset[int]:
        """Return the episodes of a batch, and of those that are in flight behind it."""
        return frozenset().union(*(self._episodes(b) for b in range(batch, batch + self._in_flight + 1)))

    def _first_change(self, batch: int, now: frozenset[int]) -> int:
        """Return the first batch with other episodes: after steps twice as long each, halving the last one.

        Where they change and are the same again within one step, as in epochs of a few batches, it may be a later one.
        """
        same, other = batch, batch + 1
        while self._span(other) == now:
            if other - batch > _FARTHEST:
                return other
            same, other = other, 2 * other - batch
        while other - same > 1:
            middle = (same + other) // 2
            same, other = (middle, other) if self._span(middle) == now else (same, middle)
        return other
