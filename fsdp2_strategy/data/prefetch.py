"""Announce to a data set which episodes the batches in flight need, and which are needed next.

Input: the episodes of this rank's part of each batch. Output: calls of the data set's ``hold``, in the trainer's
process, before each batch.

[Note: needed episodes] A data set whose episodes are expensive to open has a method ``hold(now, soon)``. Until the next
call, only samples of the episodes in ``now`` are requested; the episodes in ``soon`` are needed after them. Both lists
are in ascending order. A second method, ``pause``, ends the data set's threads. `ResumableLoader.close` calls it,
before new workers are forked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

_MAX_DISTANCE = 1 << 20
"""Maximum number of batches to search ahead for the next change of episodes."""


class EpisodeAnnouncer:
    """Call ``hold`` of a data set before each batch, with the episodes that are needed now and soon.

    Args:
        dataset: see [Note: needed episodes].
        episodes: function that returns the episodes of this rank's part of a batch, given the batch's index.
        in_flight: number of batches that are prefetched.
    """

    def __init__(self, dataset: Any, episodes: Callable[[int], frozenset[int]], in_flight: int) -> None:
        self._dataset, self._in_flight = dataset, in_flight
        self._episodes = lru_cache(maxsize=in_flight + 1)(episodes)
        self._now: frozenset[int] = frozenset()
        self._soon: frozenset[int] = frozenset()
        self._change = -1

    def announce(self, batch: int) -> None:
        """Call ``hold`` for the batch that the trainer receives next."""
        now = self._needed(batch)
        if now != self._now or batch >= self._change:
            self._change = self._first_change(batch, now)
            self._now, self._soon = now, self._needed(self._change) - now
        self._dataset.hold(sorted(self._now), sorted(self._soon))

    def _needed(self, batch: int) -> frozenset[int]:
        """Return the episodes of a batch and of the batches that are prefetched after it."""
        return frozenset().union(*(self._episodes(b) for b in range(batch, batch + self._in_flight + 1)))

    def _first_change(self, batch: int, now: frozenset[int]) -> int:
        """Return the first batch whose episodes differ from ``now``, by exponential search and bisection.

        The result may be a later change if the episodes change and change back between two probes of the search. This
        happens in epochs of a few batches.
        """
        same, other = batch, batch + 1
        while self._needed(other) == now:
            if other - batch > _MAX_DISTANCE:
                return other
            same, other = other, 2 * other - batch
        while other - same > 1:
            middle = (same + other) // 2
            same, other = (middle, other) if self._needed(middle) == now else (same, middle)
        return other
