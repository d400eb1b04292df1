"""Compute any slice of an epoch's data order from the seed and the epoch.

Input: the number of samples, the lengths of episodes, or the lengths and weights of data sets. Output: sample indices.
An order does not depend on the number of ranks.

[Note: orders] An order has ``len`` positions. ``indices(start, stop)`` returns the samples at a range of positions.
``positions(samples)`` returns the positions of samples, sorted.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from fsdp2_strategy.data.permutation import Bijection, Indices
from fsdp2_strategy.errors import DataError

_MAX_SAMPLES = 1 << 61


class Order(Protocol):
    """The interface of data orders; see [Note: orders]."""

    def __len__(self) -> int: ...

    def indices(self, start: int, stop: int) -> Indices:
        """Return the samples at positions ``start`` to ``stop``."""

    def positions(self, samples: ArrayLike) -> Indices:
        """Return the positions of samples, in ascending order."""


class GlobalOrder:
    """Permute ``n`` samples by seed and epoch; the time and memory for a slice depend on the slice's length only.

    Args:
        n: number of samples, at least 1.
        seed: any integer.
        epoch: any integer; each epoch has a different order.

    Raises:
        DataError: ``n`` is out of range.

    Example:
        >>> order = GlobalOrder(10**12, seed=0, epoch=3)
        >>> bool((order.indices(5, 9) == order.indices(0, 100)[5:9]).all())
        True
    """

    def __init__(self, n: int, seed: int = 0, epoch: int = 0) -> None:
        if not 1 <= n < _MAX_SAMPLES:
            raise DataError(f"cannot order samples: n is {n}, expected 1 to 2^61. Use a data set that is not empty.")
        self.n, self.seed, self.epoch = operator.index(n), operator.index(seed), operator.index(epoch)
        self._bijection = Bijection(self.n, "samples", self.seed, self.epoch)

    def __len__(self) -> int:
        return self.n

    def indices(self, start: int, stop: int) -> Indices:
        """Return the samples at positions ``start`` to ``stop``, int64 of shape (stop - start,).

        Raises:
            DataError: the positions are not within 0 to n.
        """
        return self._bijection.values(_within(start, stop, self.n))

    def positions(self, samples: ArrayLike) -> Indices:
        """Return the positions of samples, in ascending order."""
        return np.sort(self._bijection.positions(_checked(samples, self.n)))


class EpisodeOrder:
    """Permute the frames of episodes so that few episodes are open at a time.

    The episodes are permuted and divided into blocks of ``pool`` episodes. The frames of each block are permuted. A
    reader needs the episodes of one block at a time, or of several where a slice crosses a block boundary.

    Without ``lanes`` every rank reads frames of every episode, because the frames of a block are spread over all ranks.
    ``lanes`` splits each batch into that many contiguous spans. Each span takes its frames from its own episodes,
    ``pool // lanes`` at a time. Each rank reads a contiguous part of each batch, so it reads only the episodes of its
    own lanes; `episodes_touched` returns their number. The order is the same on any number of ranks. A batch still
    mixes about ``pool`` episodes, but a lane mixes only its own.

    Args:
        lengths: number of frames of each episode, in the order of the data set. Frames are numbered consecutively.
        seed: any integer.
        epoch: any integer.
        pool: number of episodes that are mixed.
        lanes: number of spans of a batch; choose a multiple of each number of ranks that the run may use.
        batch: number of samples of a global batch; needed if ``lanes`` is more than 1.
        offset: index of the epoch's first sample within its batch; above 0 if that batch begins in the epoch before.

    Raises:
        DataError: there are no frames, or an argument is out of range.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        seed: int = 0,
        epoch: int = 0,
        pool: int = 64,
        *,
        lanes: int = 1,
        batch: int | None = None,
        offset: int = 0,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64).reshape(-1)
        batch = lanes if batch is None else batch
        if not self.lengths.size or self.lengths.min() < 0 or not self.lengths.sum():
            raise DataError(
                f"cannot order frames: lengths are {self.lengths[:5].tolist()}…, expected none below 0 and some above. "
                "Pass the length of each episode."
            )
        if pool < 1 or not 1 <= lanes <= min(pool, batch) or not 0 <= offset < batch:
            raise DataError(
                f"cannot order frames: pool is {pool}, lanes {lanes}, batch {batch}, offset {offset}, expected for "
                "each lane at least one episode of the pool and one sample of the batch, and an offset within the "
                "batch. Use fewer lanes, or a larger pool."
            )
        self.pool, self.lanes, self._batch = int(pool), int(lanes), int(batch)
        self._key = int(seed), int(epoch)
        self._begins = _offsets_of(self.lengths)  # first frame of each episode, in the data set
        self._episodes = GlobalOrder(len(self.lengths), seed, epoch).indices(0, len(self.lengths))
        # First frame of each episode in the concatenation of the permuted episodes. The index of a frame in this
        # concatenation is called its offset.
        self._episode_offsets = _offsets_of(self.lengths[self._episodes])
        self.n = int(self._episode_offsets[-1])
        # Ranges of offsets: [head: completes the last batch of the epoch before][one per lane][tail: less than a batch]
        self._head = min(-offset % batch, self.n) if lanes > 1 else 0
        self._cuts = np.arange(lanes + 1) * batch // lanes
        self._batches = (self.n - self._head) // batch if lanes > 1 else 0
        self._lane_offsets = self._head + self._batches * self._cuts
        self._block_offsets = self._blocks()

    def __len__(self) -> int:
        return self.n

    def indices(self, start: int, stop: int) -> Indices:
        """Return the frames at positions ``start`` to ``stop``, int64 of shape (stop - start,).

        Raises:
            DataError: the positions are not within 0 to the number of frames.
        """
        positions = _within(start, stop, self.n)
        offsets = self._in_blocks(self._to_offsets(positions), Bijection.values)
        i = np.searchsorted(self._episode_offsets, offsets, side="right") - 1
        frames: Indices = self._begins[self._episodes[i]] + offsets - self._episode_offsets[i]
        return frames

    def positions(self, samples: ArrayLike) -> Indices:
        """Return the positions of frames, in ascending order."""
        frames = _checked(samples, self.n)
        episode = np.searchsorted(self._begins, frames, side="right") - 1
        offsets = self._episode_offsets[np.argsort(self._episodes)[episode]] + frames - self._begins[episode]
        return np.sort(self._to_positions(self._in_blocks(offsets, Bijection.positions)))

    def episodes_at(self, positions: Indices) -> Indices:
        """Return the episodes that a reader of these positions needs: all episodes of the blocks of the positions."""
        blocks = np.unique(np.searchsorted(self._block_offsets, self._to_offsets(positions), side="right") - 1)
        first = np.searchsorted(self._episode_offsets, self._block_offsets[blocks], side="right") - 1
        last = np.searchsorted(self._episode_offsets, self._block_offsets[blocks + 1], side="left")
        found = [self._episodes[begin:end] for begin, end in zip(first, last, strict=True)]
        return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *found]))

    def episodes_touched(self, dp_size: int) -> list[int]:
        """Return the number of episodes that each of ``dp_size`` ranks may read in this epoch.

        With ``lanes``, the frames before the first and after the last full batch of the epoch are not counted.
        """
        touched = []
        for rank in range(dp_size):
            low, high = (self._batch * r // dp_size for r in (rank, rank + 1))
            first = np.searchsorted(self._cuts, low, side="right") - 1
            last = np.searchsorted(self._cuts, high, side="left")
            begin, end = (self._lane_offsets[first], self._lane_offsets[last]) if self.lanes > 1 else (0, self.n)
            overlaps = np.minimum(self._episode_offsets[1:], end) > np.maximum(self._episode_offsets[:-1], begin)
            touched.append(int(overlaps.sum()) if high > low else 0)
        return touched

    def _to_offsets(self, positions: Indices) -> Indices:
        """Return the offset of each position, without the permutation within blocks."""
        row, column = np.divmod(positions - self._head, self._batch)
        lane = np.searchsorted(self._cuts, column, side="right") - 1
        width = np.diff(self._cuts)[lane]
        in_lanes = (row >= 0) & (row < self._batches)
        return np.where(in_lanes, self._lane_offsets[lane] + row * width + column - self._cuts[lane], positions)

    def _to_positions(self, offsets: Indices) -> Indices:
        """Return the position of each offset; the inverse of `_to_offsets`."""
        in_lanes = (offsets >= self._lane_offsets[0]) & (offsets < self._lane_offsets[-1])
        lane = np.where(in_lanes, np.searchsorted(self._lane_offsets, offsets, side="right") - 1, 0)
        row, column = np.divmod(offsets - self._lane_offsets[lane], np.diff(self._cuts)[lane])
        return np.where(in_lanes, self._head + row * self._batch + self._cuts[lane] + column, offsets)

    def _blocks(self) -> Indices:
        """Return the first offset of each block, then ``n``; a block has up to ``pool // lanes`` episodes of a lane."""
        lane_offsets = self._lane_offsets.tolist() if self.lanes > 1 else []
        edges = np.unique(np.asarray([0, *lane_offsets, self.n]))
        step = self.pool // self.lanes
        begins = [edges]
        for begin, end in itertools.pairwise(edges):
            first = np.searchsorted(self._episode_offsets, begin, side="right") - 1
            inside = self._episode_offsets[first + step :: step]
            begins.append(inside[(inside > begin) & (inside < end)])
        return np.unique(np.concatenate(begins))

    def _in_blocks(self, offsets: Indices, change: Callable[[Bijection, Indices], Indices]) -> Indices:
        """Permute offsets within their blocks; ``change`` selects the permutation or its inverse."""
        block = np.searchsorted(self._block_offsets, offsets, side="right") - 1
        by_block = np.argsort(block, kind="stable")
        result = np.empty_like(offsets)
        for chosen in np.split(by_block, np.flatnonzero(np.diff(block[by_block])) + 1) if len(offsets) else ():
            i = int(block[chosen[0]])
            begin, end = self._block_offsets[i : i + 2]
            bijection = _cached_bijection(int(end - begin), "frames", *self._key, i)
            result[chosen] = begin + change(bijection, offsets[chosen] - begin)
        return result


class MixtureOrder:
    """Mix data sets by weight; samples are numbered consecutively, as in ``torch.utils.data.ConcatDataset``.

    Each data set gets its share of the ``n`` positions of an epoch, rounded to an integer. Its samples are drawn in
    passes; a pass draws each sample once, in a permuted order. If an epoch ends within a pass, the next epoch continues
    the pass. So after any number of epochs, the draw counts of two samples of a data set differ by at most one.

    Args:
        lengths: number of samples of each data set.
        weights: relative share of each data set; they need not add up to 1.
        seed: any integer.
        epoch: 0 or more.
        n: number of positions of an epoch; by default the number of samples of all data sets.

    Raises:
        DataError: there is not one weight per length, one of them is not positive, or a data set gets no position.
    """

    def __init__(
        self, lengths: Sequence[int], weights: Sequence[float], seed: int = 0, epoch: int = 0, n: int | None = None
    ) -> None:
        self.lengths = [int(length) for length in lengths]
        sound = all(w > 0 and math.isfinite(w) for w in weights) and min(self.lengths, default=0) > 0
        if len(weights) != len(self.lengths) or not sound:
            raise DataError(
                f"cannot mix data sets: lengths are {self.lengths} and weights {list(weights)}, expected one weight "
                "for each length, and all above 0. Leave out data sets without samples or weight."
            )
        self.n = sum(self.lengths) if n is None else int(n)
        self.seed, self.epoch = int(seed), int(epoch)
        ends = np.round(np.cumsum(np.asarray(weights, dtype=np.float64)) / np.sum(weights) * self.n)
        self._shares = np.concatenate([[0], ends]).astype(np.int64)
        if (np.diff(self._shares) == 0).any():
            raise DataError(
                f"cannot mix data sets: with weights {list(weights)}, one of them gets none of the {self.n} positions "
                "of an epoch, expected at least one for each. Raise its weight, or leave it out."
            )
        self._begins = _offsets_of(np.asarray(self.lengths))
        self._draws = GlobalOrder(self.n, seed, epoch)  # the draws of each data set have consecutive numbers

    def __len__(self) -> int:
        return self.n

    def indices(self, start: int, stop: int) -> Indices:
        """Return the samples at positions ``start`` to ``stop``, int64 of shape (stop - start,).

        Raises:
            DataError: the positions are not within 0 to n.
        """
        draws = self._draws.indices(start, stop)
        result = np.empty_like(draws)
        for i, length in enumerate(self.lengths):
            own = np.flatnonzero((draws >= self._shares[i]) & (draws < self._shares[i + 1]))
            number, sample = np.divmod(draws[own] - self._shares[i] + self._drawn_before(i), length)
            for partial in self._partial_passes(i):  # full passes are permuted by the order of the draws
                chosen = np.flatnonzero(number == partial)
                sample[chosen] = self._pass(i, partial).values(sample[chosen])
            result[own] = self._begins[i] + sample
        return result

    def positions(self, samples: ArrayLike) -> Indices:
        """Return all positions of samples, in ascending order; a sample that is drawn twice has two positions."""
        samples = _checked(samples, int(self._begins[-1]))
        draws = [np.empty(0, dtype=np.int64)]
        for i, length in enumerate(self.lengths):
            own = samples[(samples >= self._begins[i]) & (samples < self._begins[i + 1])] - self._begins[i]
            if not own.size:
                continue
            low, share = self._drawn_before(i), int(self._shares[i + 1] - self._shares[i])
            partial = self._partial_passes(i)
            full = np.setdiff1d(np.arange(low // length, (low + share - 1) // length + 1), partial)
            drawn = [(full[:, None] * length + own).reshape(-1) - low]
            drawn += [number * length + self._pass(i, number).positions(own) - low for number in partial]
            found = np.concatenate(drawn)
            draws.append(self._shares[i] + found[(found >= 0) & (found < share)])
        return self._draws.positions(np.concatenate(draws))

    def _drawn_before(self, i: int) -> int:
        return self.epoch * int(self._shares[i + 1] - self._shares[i])

    def _partial_passes(self, i: int) -> list[int]:
        """Return the passes through data set ``i`` of which this epoch draws only a part."""
        low, length = self._drawn_before(i), self.lengths[i]
        high = low + int(self._shares[i + 1] - self._shares[i])
        return sorted({edge // length for edge in (low, high) if edge % length})

    def _pass(self, i: int, number: int) -> Bijection:
        return _cached_bijection(self.lengths[i], "pass", self.seed, i, number)


# Cached, so that all slices share the table of a permutation.
_cached_bijection = lru_cache(maxsize=128)(Bijection)


def _within(start: int, stop: int, n: int) -> Indices:
    """Return the positions of a slice.

    Raises:
        DataError: the slice is not within 0 to ``n``.
    """
    if not 0 <= start <= stop <= n:
        raise DataError(
            f"cannot list samples: the slice is {start} to {stop}, expected it within 0 to {n}. Use the order of the "
            "next epoch for later samples."
        )
    return np.arange(start, stop)


def _checked(samples: ArrayLike, n: int) -> Indices:
    numbers = np.asarray(samples, dtype=np.int64).reshape(-1)
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < n:
        raise DataError(
            f"cannot find samples: they range from {numbers.min()} to {numbers.max()}, expected 0 to {n - 1}."
        )
    return numbers


def _offsets_of(lengths: Indices) -> Indices:
    """Return the starts of consecutive ranges of these lengths, and the end of the last one."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
