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
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike

from fsdp2_strategy.config.arguments import check_number
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
    """Permute ``n`` samples by seed and epoch; the time and memory for a slice do not grow with ``n``.

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
        self.n, self.seed, self.epoch = _checked_length(n), *_checked_key(seed, epoch)
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


class SequentialOrder:
    """The samples in the order of the data set, in every epoch."""

    def __init__(self, n: int) -> None:
        self.n = _checked_length(n)

    def __len__(self) -> int:
        return self.n

    def indices(self, start: int, stop: int) -> Indices:
        """Return the samples at positions ``start`` to ``stop``."""
        return _within(start, stop, self.n)

    def positions(self, samples: ArrayLike) -> Indices:
        """Return the positions of samples, in ascending order."""
        return np.sort(_checked(samples, self.n))


class EpisodeOrder:
    """Permute the frames of episodes so that few episodes are open at a time.

    The episodes are permuted and divided into blocks of ``pool`` episodes. The frames of each block are permuted. A
    reader needs the episodes of one block at a time, or of several where a slice crosses a block boundary.

    Without ``lanes`` every rank reads frames of every episode, because the frames of a block are spread over all ranks.
    ``lanes`` splits each batch into that many contiguous spans, the lanes. Each lane has its own episodes, and mixes
    ``pool // lanes`` of them at a time. A rank reads a contiguous part of each batch, so it reads only the episodes of
    the lanes in this part; `episodes_touched` returns the number of these episodes. The order is the same on any number
    of ranks. A batch still mixes about ``pool`` episodes.

    Args:
        lengths: number of frames of each episode, in the order of the data set. Frames are numbered consecutively.
        seed: any integer.
        epoch: any integer.
        pool: number of episodes that are mixed at a time.
        lanes: number of lanes of a batch; choose a multiple of each number of ranks that the run may use.
        batch: number of samples of a global batch; needed if ``lanes`` is more than 1.
        offset: index of the epoch's first sample within its batch; above 0 if that batch begins in the epoch before.

    Raises:
        DataError: the episodes have no frames, or an argument is out of range.
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
        given = np.asarray(lengths)
        is_integral = given.dtype.kind in "iu" or (given.dtype.kind == "f" and not (given % 1).any())
        if given.ndim != 1 or not is_integral:
            raise DataError(
                f"cannot order frames: lengths is {lengths!r}, expected a list of integers. Pass the number of "
                "frames of each episode."
            )
        self.lengths = given.astype(np.int64)
        batch = lanes if batch is None else batch
        for name, number in (("pool", pool), ("lanes", lanes), ("batch", batch), ("offset", offset)):
            check_number("order frames", name, number, DataError, integer=True)
        if not self.lengths.size or self.lengths.min() < 0 or not self.lengths.sum():
            raise DataError(
                f"cannot order frames: the episode lengths are {self.lengths[:5].tolist()}…, expected none below 0 and "
                "at least one above 0. Pass the number of frames of each episode."
            )
        if pool < 1 or not 1 <= lanes <= min(pool, batch) or not 0 <= offset < batch:
            raise DataError(
                f"cannot order frames: pool is {pool}, lanes {lanes}, batch {batch}, offset {offset}, expected "
                "1 <= lanes <= min(pool, batch) and 0 <= offset < batch. Use fewer lanes, or a larger pool."
            )
        self.pool, self.lanes, self._batch = int(pool), int(lanes), int(batch)
        self._key = _checked_key(seed, epoch)
        self._first_frames = _starts_of(self.lengths)  # first frame of each episode, in the data set
        self._episodes = GlobalOrder(len(self.lengths), seed, epoch).indices(0, len(self.lengths))
        # The episode sequence consists of the frames of the permuted episodes, one episode after another. Episodes,
        # lanes and blocks are ranges of it; the arrays ``_*_starts`` contain where they start.
        self._episode_starts = _starts_of(self.lengths[self._episodes])
        self.n = int(self._episode_starts[-1])
        # With lanes, the sequence is: the frames that complete the last batch of the epoch before; then the frames of
        # each lane; then the rest, which is less than a batch.
        self._head = min(-offset % batch, self.n) if lanes > 1 else 0
        self._cuts = np.arange(lanes + 1) * batch // lanes  # start of each lane within a batch
        self._batches = (self.n - self._head) // batch if lanes > 1 else 0
        self._lane_starts = self._head + self._batches * self._cuts
        self._block_starts = self._find_block_starts()

    def __len__(self) -> int:
        return self.n

    def indices(self, start: int, stop: int) -> Indices:
        """Return the frames at positions ``start`` to ``stop``, int64 of shape (stop - start,).

        Raises:
            DataError: the positions are not within 0 to the number of frames.
        """
        positions = _within(start, stop, self.n)
        in_sequence = self._permute_in_blocks(self._to_sequence(positions), Bijection.values)
        i = np.searchsorted(self._episode_starts, in_sequence, side="right") - 1
        frames: Indices = self._first_frames[self._episodes[i]] + in_sequence - self._episode_starts[i]
        return frames

    def positions(self, samples: ArrayLike) -> Indices:
        """Return the positions of frames, in ascending order."""
        frames = _checked(samples, self.n)
        episode = np.searchsorted(self._first_frames, frames, side="right") - 1
        starts = self._episode_starts[np.argsort(self._episodes)[episode]]
        in_sequence = starts + frames - self._first_frames[episode]
        return np.sort(self._to_positions(self._permute_in_blocks(in_sequence, Bijection.positions)))

    def episodes_at(self, positions: Indices) -> Indices:
        """Return the episodes that a reader of these positions needs: all episodes of the blocks of the positions."""
        blocks = np.unique(np.searchsorted(self._block_starts, self._to_sequence(positions), side="right") - 1)
        first = np.searchsorted(self._episode_starts, self._block_starts[blocks], side="right") - 1
        last = np.searchsorted(self._episode_starts, self._block_starts[blocks + 1], side="left")
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
            begin, end = (self._lane_starts[first], self._lane_starts[last]) if self.lanes > 1 else (0, self.n)
            overlaps = np.minimum(self._episode_starts[1:], end) > np.maximum(self._episode_starts[:-1], begin)
            touched.append(int(overlaps.sum()) if high > low else 0)
        return touched

    def _to_sequence(self, positions: Indices) -> Indices:
        """Return the index in the episode sequence of each position, before frames are permuted within blocks."""
        row, column = np.divmod(positions - self._head, self._batch)
        lane = np.searchsorted(self._cuts, column, side="right") - 1
        width = np.diff(self._cuts)[lane]
        in_lanes = (row >= 0) & (row < self._batches)
        return np.where(in_lanes, self._lane_starts[lane] + row * width + column - self._cuts[lane], positions)

    def _to_positions(self, in_sequence: Indices) -> Indices:
        """Return the position of each index in the episode sequence; the inverse of `_to_sequence`."""
        in_lanes = (in_sequence >= self._lane_starts[0]) & (in_sequence < self._lane_starts[-1])
        lane = np.where(in_lanes, np.searchsorted(self._lane_starts, in_sequence, side="right") - 1, 0)
        row, column = np.divmod(in_sequence - self._lane_starts[lane], np.diff(self._cuts)[lane])
        return np.where(in_lanes, self._head + row * self._batch + self._cuts[lane] + column, in_sequence)

    def _find_block_starts(self) -> Indices:
        """Return where blocks of up to ``pool // lanes`` episodes of one lane start in the episode sequence, then n."""
        lane_starts = self._lane_starts.tolist() if self.lanes > 1 else []
        edges = np.unique(np.asarray([0, *lane_starts, self.n]))
        step = self.pool // self.lanes
        starts = [edges]
        for begin, end in itertools.pairwise(edges):
            first = np.searchsorted(self._episode_starts, begin, side="right") - 1
            inside = self._episode_starts[first + step :: step]
            starts.append(inside[(inside > begin) & (inside < end)])
        return np.unique(np.concatenate(starts))

    def _permute_in_blocks(self, in_sequence: Indices, permute: Callable[[Bijection, Indices], Indices]) -> Indices:
        """Permute indices within their blocks, by `Bijection.values`, or by `Bijection.positions` for the inverse."""
        block = np.searchsorted(self._block_starts, in_sequence, side="right") - 1
        by_block = np.argsort(block, kind="stable")
        result = np.empty_like(in_sequence)
        for chosen in np.split(by_block, np.flatnonzero(np.diff(block[by_block])) + 1) if len(in_sequence) else ():
            i = int(block[chosen[0]])
            begin, end = self._block_starts[i : i + 2]
            bijection = _cached_bijection(int(end - begin), "frames", *self._key, i)
            result[chosen] = begin + permute(bijection, in_sequence[chosen] - begin)
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
        DataError: the numbers of lengths and weights differ, a length or weight is not positive, or a data set gets no
            position.
    """

    def __init__(
        self, lengths: Sequence[int], weights: Sequence[float], seed: int = 0, epoch: int = 0, n: int | None = None
    ) -> None:
        self.lengths = checked_list("mix data sets", "lengths", lengths, integers=True)
        weights = checked_list("mix data sets", "weights", weights, integers=False)
        sound = all(w > 0 and math.isfinite(w) for w in weights) and min(self.lengths, default=0) > 0
        if len(weights) != len(self.lengths) or not sound:
            raise DataError(
                f"cannot mix data sets: lengths are {self.lengths} and weights {list(weights)}, expected one weight "
                "for each length, and all above 0. Leave out data sets without samples or weight."
            )
        self.n = sum(self.lengths) if n is None else _checked_length(n)
        self.seed, self.epoch = _checked_key(seed, epoch)
        check_number("mix data sets", "epoch", epoch, DataError, integer=True, minimum=0)
        ends = np.round(np.cumsum(np.asarray(weights, dtype=np.float64)) / np.sum(weights) * self.n)
        self._shares = np.concatenate([[0], ends]).astype(np.int64)
        if (np.diff(self._shares) == 0).any():
            raise DataError(
                f"cannot mix data sets: with weights {list(weights)}, a data set gets none of the {self.n} positions "
                "of an epoch, expected at least one for each data set. Raise its weight, or leave the data set out."
            )
        self._begins = _starts_of(np.asarray(self.lengths))  # first sample of each data set
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
            for partial in self._partial_passes(i):  # full passes need no permutation: draws are permuted
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


def _checked_length(n: int) -> int:
    check_number("order samples", "n", n, DataError, integer=True)
    if not 1 <= n < _MAX_SAMPLES:
        raise DataError(f"cannot order samples: n is {n}, expected 1 to 2^61 - 1. Use a data set with samples.")
    return operator.index(n)


def _checked_key(seed: int, epoch: int) -> tuple[int, int]:
    """Return seed and epoch as int; raise if one of them is not an integer."""
    for name, value in (("seed", seed), ("epoch", epoch)):
        check_number("order samples", name, value, DataError, integer=True)
    return operator.index(seed), operator.index(epoch)


def checked_list(action: str, name: str, values: Any, *, integers: bool) -> list[Any]:
    """Return a sequence of numbers as a list; raise if it is not one."""
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__") or getattr(values, "ndim", 1) != 1:
        raise DataError(f"cannot {action}: {name} is {values!r}, expected a list of numbers. Pass a list.")
    listed = values.tolist() if isinstance(values, np.ndarray | torch.Tensor) else list(values)
    for value in listed:
        check_number(action, f"an element of {name}", value, DataError, integer=integers)
    return listed


def _within(start: int, stop: int, n: int) -> Indices:
    """Return the positions of a slice; raise if it is not within 0 to ``n``."""
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
            f"cannot find samples: their indices range from {numbers.min()} to {numbers.max()}, expected 0 to {n - 1}. "
            "Pass indices of the data set."
        )
    return numbers


def _starts_of(lengths: Indices) -> Indices:
    """Return the starts of consecutive ranges of these lengths, and the end of the last one."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
