"""Announce to a data set which episodes the prefetched batches need, and which episodes are needed after them.

Input: the episodes of this rank's part of each batch. Output: calls of the data set's ``hold``, in the trainer's
process, before each batch.

[Note: needed episodes] A data set whose episodes are expensive to open has a method ``hold(now, soon)``. Until the next
call, only samples of the episodes in ``now`` are requested; the episodes in ``soon`` are needed after them. Both lists
are in ascending order. An optional method ``pause`` ends the data set's threads, so that workers can be forked safely.
`ResumableLoader.close` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

_MAX_DISTANCE = 1 << 20
"""The search for the next change of episodes ends at the first probe that is more batches ahead than this."""


class EpisodeAnnouncer:
    """Call ``hold`` of a data set before each batch; see [Note: needed episodes].

    ``episodes`` returns the episodes of this rank's part of a batch; ``in_flight`` batches are prefetched.
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
            self._change = self._find_change(batch, now)
            self._now, self._soon = now, self._needed(self._change) - now
        self._dataset.hold(sorted(self._now), sorted(self._soon))

    def _needed(self, batch: int) -> frozenset[int]:
        """Return the episodes of a batch and of the batches that are prefetched after it."""
        return frozenset().union(*(self._episodes(b) for b in range(batch, batch + self._in_flight + 1)))

    def _find_change(self, batch: int, now: frozenset[int]) -> int:
        """Search for a later batch whose needed episodes differ from ``now``, by exponential search and bisection.

        It is the first such batch, unless the episodes change and change back between two probes of the search. This
        happens in epochs of a few batches. If no probe differs up to `_MAX_DISTANCE`, return the last probe.
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
