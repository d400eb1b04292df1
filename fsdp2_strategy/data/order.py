"""The order of an epoch's samples as a formula: any slice of it, from a seed and an epoch alone.

Input: how many samples there are, or how long each episode is, or how much each data set weighs. Output: indices of
samples. No order knows of ranks: they cut what it gives.

[Note: orders] An order has ``len`` positions, ``indices(start, stop)`` for the samples that stand there, and
``positions(samples)`` for the way back. Its ``slots_at(positions)`` are a permutation of the numbers below ``len``: the
samples themselves where each comes once, so that what was delivered can be compared with a closed form.
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

_MOST_SAMPLES = 1 << 61


class Order(Protocol):
    """See [Note: orders]."""

    def __len__(self) -> int: ...

    def indices(self, start: int, stop: int) -> Indices:
        """Return the samples at positions ``start`` to ``stop``."""

    def positions(self, samples: ArrayLike) -> Indices:
        """Return the positions of samples, in ascending order."""

    def slots_at(self, positions: Indices) -> Indices:
        """Return the numbers below ``len`` that stand for positions."""


class GlobalOrder:
    """Permute ``n`` samples by seed and epoch; any slice takes time for its own length, and memory for nothing else.

    Args:
        n: samples, at least 1.
        seed: any integer.
        epoch: any integer; each has an order of its own.

    Example:
        >>> order = GlobalOrder(10**12, seed=0, epoch=3)
        >>> bool((order.indices(5, 9) == order.indices(0, 100)[5:9]).all())
        True
    """

    def __init__(self, n: int, seed: int = 0, epoch: int = 0) -> None:
        if not 1 <= n < _MOST_SAMPLES:
            raise DataError(f"cannot order samples: n is {n}, expected 1 to 2^61. Give a data set that is not empty.")
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

    def slots_at(self, positions: Indices) -> Indices:
        """Return the samples at positions."""
        return self._bijection.values(positions)

    def positions(self, samples: ArrayLike) -> Indices:
        """Return the positions of samples, in ascending order."""
        return np.sort(self._bijection.positions(_checked(samples, self.n)))


class EpisodeOrder:
    """Permute the frames of episodes so that few episodes are open at a time.

    Episodes are permuted and cut into blocks of ``pool``; the frames of a block are permuted. A reader needs the
    episodes of one block at a time (two, where a slice crosses from one to the next).

    Locality: each rank touches every episode, for the frames of a block go to all ranks. ``lanes`` splits each batch
    into as many stretches, each fed by episodes of its own, ``pool // lanes`` at a time: a rank that reads a contiguous
    cut of each batch then touches the episodes of its own lanes, as `episodes_touched` says. The order is the same on
    any number of ranks; each batch mixes as many episodes as before, but a lane only its own.

    Args:
        lengths: frames of each episode, in the order of the data set; frames are numbered through.
        seed: any integer.
        epoch: any integer.
        pool: episodes that are mixed.
        lanes: stretches of a batch; a multiple of all numbers of ranks that you may want to run on.
        batch: samples of a global batch; needed for what lanes are good for.
        offset: place of the epoch's first sample in its batch, where a batch spans two epochs.

    Raises:
        DataError: there is no frame, or an argument is out of range.
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
                "Give the length of each episode."
            )
        if pool < 1 or not 1 <= lanes <= min(pool, batch) or not 0 <= offset < batch:
            raise DataError(
                f"cannot order frames: pool is {pool}, lanes {lanes}, batch {batch}, offset {offset}, expected lanes "
                "of at least one episode of the pool and one sample of a batch each. Lower lanes, or raise pool."
            )
        self.pool, self.lanes, self._batch = int(pool), int(lanes), int(batch)
        self._key = int(seed), int(epoch)
        self._begins = _running(self.lengths)  # of each episode, in the data set
        self._episodes = GlobalOrder(len(self.lengths), seed, epoch).indices(0, len(self.lengths))
        self._line = _running(self.lengths[self._episodes])  # the episodes, as permuted, one after the other
        self.n = int(self._line[-1])
        # [head: what the epoch before left of a batch][a stretch a lane: its part of each whole batch][the rest]
        self._head = min(-offset % batch, self.n) if lanes > 1 else 0
        self._cuts = np.arange(lanes + 1) * batch // lanes
        self._batches = (self.n - self._head) // batch if lanes > 1 else 0
        self._stretches = self._head + self._batches * self._cuts
        self._blocks = self._block_begins()

    def __len__(self) -> int:
        return self.n

    def indices(self, start: int, stop: int) -> Indices:
        """Return the frames at positions ``start`` to ``stop``, int64 of shape (stop - start,).

        Raises:
            DataError: the positions are not within 0 to the number of frames.
        """
        return self.slots_at(_within(start, stop, self.n))

    def slots_at(self, positions: Indices) -> Indices:
        """Return the frames at positions."""
        on_line = self._in_blocks(self._to_line(positions), Bijection.values)
        place = np.searchsorted(self._line, on_line, side="right") - 1
        frames: Indices = self._begins[self._episodes[place]] + on_line - self._line[place]
        return frames

    def positions(self, samples: ArrayLike) -> Indices:
        """Return the positions of frames, in ascending order."""
        frames = _checked(samples, self.n)
        episode = np.searchsorted(self._begins, frames, side="right") - 1
        place = np.argsort(self._episodes)[episode]
        on_line = self._line[place] + frames - self._begins[episode]
        return np.sort(self._from_line(self._in_blocks(on_line, Bijection.positions)))

    def episodes_at(self, positions: Indices) -> Indices:
        """Return the episodes of the blocks in which positions lie: what a reader of them needs at hand."""
        on_line = self._to_line(positions)
        blocks = np.unique(np.searchsorted(self._blocks, on_line, side="right") - 1)
        begins, ends = self._blocks[blocks], self._blocks[blocks + 1]
        first = np.searchsorted(self._line, begins, side="right") - 1
        last = np.searchsorted(self._line, ends, side="left")
        places = [np.arange(*span) for span in zip(first, last, strict=True)]
        return np.unique(self._episodes[np.concatenate(places)]) if places else np.empty(0, dtype=np.int64)

    def episodes_touched(self, dp_size: int) -> list[int]:
        """Return how many episodes each of ``dp_size`` ranks may touch in this epoch.

        The first and last frames of an epoch, which do not fill a batch, are left out where there are lanes.
        """
        touched = []
        for rank in range(dp_size):
            low, high = (self._batch * r // dp_size for r in (rank, rank + 1))
            first = np.searchsorted(self._cuts, low, side="right") - 1
            last = np.searchsorted(self._cuts, high, side="left")
            begin, end = (self._stretches[first], self._stretches[last]) if self.lanes > 1 else (0, self.n)
            held = np.minimum(self._line[1:], end) > np.maximum(self._line[:-1], begin)
            touched.append(int(held.sum()) if high > low else 0)
        return touched

    def _to_line(self, positions: Indices) -> Indices:
        """Return which frame of the line, before blocks are permuted, stands at each position."""
        turn, place = np.divmod(positions - self._head, self._batch)
        lane = np.searchsorted(self._cuts, place, side="right") - 1
        width = np.diff(self._cuts)[lane]
        in_lanes = (turn >= 0) & (turn < self._batches)
        return np.where(in_lanes, self._stretches[lane] + turn * width + place - self._cuts[lane], positions)

    def _from_line(self, on_line: Indices) -> Indices:
        in_lanes = (on_line >= self._stretches[0]) & (on_line < self._stretches[-1])
        lane = np.searchsorted(self._stretches, on_line, side="right") - 1
        lane = np.where(in_lanes, lane, 0)
        turn, place = np.divmod(on_line - self._stretches[lane], np.diff(self._cuts)[lane])
        return np.where(in_lanes, self._head + turn * self._batch + self._cuts[lane] + place, on_line)

    def _block_begins(self) -> Indices:
        """Return where on the line each block begins: every so many episodes within a stretch."""
        edges = np.unique(np.concatenate([[0], self._stretches if self.lanes > 1 else [], [self.n]]).astype(np.int64))
        step = self.pool // self.lanes
        begins = [edges]
        for begin, end in itertools.pairwise(edges):
            first = np.searchsorted(self._line, begin, side="right") - 1
            inside = self._line[first + step :: step]
            begins.append(inside[(inside > begin) & (inside < end)])
        return np.unique(np.concatenate(begins))

    def _in_blocks(self, on_line: Indices, change: Callable[[Bijection, Indices], Indices]) -> Indices:
        """Permute frames of the line within their blocks, or back."""
        block = np.searchsorted(self._blocks, on_line, side="right") - 1
        by_block = np.argsort(block, kind="stable")
        result = np.empty_like(on_line)
        for chosen in np.split(by_block, np.flatnonzero(np.diff(block[by_block])) + 1) if len(on_line) else ():
            i = int(block[chosen[0]])
            begin, end = self._blocks[i : i + 2]
            bijection = _kept_bijection(int(end - begin), "frames", *self._key, i)
            result[chosen] = begin + change(bijection, on_line[chosen] - begin)
        return result


class MixtureOrder:
    """Mix data sets by weight; samples are numbered through, as ``torch.utils.data.ConcatDataset`` does.

    In an epoch of ``n`` samples each data set has its share of the positions, to the nearest whole number. Its draws
    are counted on from epoch to epoch, and each of its samples is drawn as often as any other, up to one: what an
    epoch's share has beyond whole passes through the data set is a permuted part of a pass, whose rest the next epoch
    draws.

    Args:
        lengths: samples of each data set.
        weights: how often samples of each are drawn, to any scale.
        seed: any integer.
        epoch: 0 or more.
        n: positions of an epoch; by default as many as there are samples.

    Raises:
        DataError: lengths and weights do not fit each other, are not positive, or leave a data set without a share.
    """

    def __init__(
        self, lengths: Sequence[int], weights: Sequence[float], seed: int = 0, epoch: int = 0, n: int | None = None
    ) -> None:
        self.lengths = [int(length) for length in lengths]
        sound = all(w > 0 and math.isfinite(w) for w in weights) and min(self.lengths, default=0) > 0
        if len(weights) != len(self.lengths) or not sound:
            raise DataError(
                f"cannot mix: lengths are {self.lengths} and weights {list(weights)}, expected as many, all above 0. "
                "Leave out a data set that is not to be drawn from."
            )
        self.n = sum(self.lengths) if n is None else int(n)
        self.seed, self.epoch = int(seed), int(epoch)
        ends = np.round(np.cumsum(np.asarray(weights, dtype=np.float64)) / np.sum(weights) * self.n)
        self._shares = _running(np.diff(np.concatenate([[0], ends])).astype(np.int64))
        if (np.diff(self._shares) == 0).any():
            raise DataError(
                f"cannot mix: of {self.n} positions the weights {list(weights)} leave none to one of the data sets, "
                "expected one each. Raise its weight, or leave it out."
            )
        self._begins = _running(np.asarray(self.lengths))
        self._slots = GlobalOrder(self.n, seed, epoch)

    def __len__(self) -> int:
        return self.n

    def slots_at(self, positions: Indices) -> Indices:
        """Return the numbers below ``n`` that stand for positions: the data sets' shares, one after the other."""
        return self._slots.slots_at(positions)

    def indices(self, start: int, stop: int) -> Indices:
        """Return the samples at positions ``start`` to ``stop``, int64 of shape (stop - start,).

        Raises:
            DataError: the positions are not within 0 to n.
        """
        slots = self.slots_at(_within(start, stop, self.n))
        result = np.empty_like(slots)
        for i, length in enumerate(self.lengths):
            chosen = np.flatnonzero((slots >= self._shares[i]) & (slots < self._shares[i + 1]))
            turn, place = np.divmod(slots[chosen] - self._shares[i] + self._drawn_before(i), length)
            for partial in self._partial_passes(i):  # in a whole one the positions are permuted already
                now = np.flatnonzero(turn == partial)
                place[now] = self._pass(i, partial).values(place[now])
            result[chosen] = self._begins[i] + place
        return result

    def positions(self, samples: ArrayLike) -> Indices:
        """Return all positions of samples, in ascending order; one that is drawn twice has two."""
        samples = _checked(samples, int(self._begins[-1]))
        slots = [np.empty(0, dtype=np.int64)]
        for i, length in enumerate(self.lengths):
            own = samples[(samples >= self._begins[i]) & (samples < self._begins[i + 1])] - self._begins[i]
            if not own.size:
                continue
            low, share = self._drawn_before(i), int(self._shares[i + 1] - self._shares[i])
            partial = self._partial_passes(i)
            whole = np.setdiff1d(np.arange(low // length, (low + share - 1) // length + 1), partial)
            drawn = [(whole[:, None] * length + own).reshape(-1) - low]
            drawn += [turn * length + self._pass(i, turn).positions(own) - low for turn in partial]
            found = np.concatenate(drawn)
            slots.append(self._shares[i] + found[(found >= 0) & (found < share)])
        return self._slots.positions(np.concatenate(slots))

    def _drawn_before(self, i: int) -> int:
        return self.epoch * int(self._shares[i + 1] - self._shares[i])

    def _partial_passes(self, i: int) -> list[int]:
        """Return the passes through a data set of which this epoch draws a part."""
        low, length = self._drawn_before(i), self.lengths[i]
        high = low + int(self._shares[i + 1] - self._shares[i])
        return sorted({turn for turn, cut in ((low // length, low % length), (high // length, high % length)) if cut})

    def _pass(self, i: int, turn: int) -> Bijection:
        return _kept_bijection(self.lengths[i], "pass", self.seed, i, turn)


# Their tables are made once, however many slices are asked for.
_kept_bijection = lru_cache(maxsize=128)(Bijection)


def _within(start: int, stop: int, n: int) -> Indices:
    """Return the positions of a slice.

    Raises:
        DataError: it is not within an order.
    """
    if not 0 <= start <= stop <= n:
        raise DataError(
            f"cannot list samples: the slice is {start} to {stop}, expected it within 0 to {n}. Begin another epoch "
            "for what comes after."
        )
    return np.arange(start, stop)


def _checked(samples: ArrayLike, n: int) -> Indices:
    given = np.asarray(samples, dtype=np.int64).reshape(-1)
    if given.size and not 0 <= given.min() <= given.max() < n:
        raise DataError(f"cannot find samples: they reach from {given.min()} to {given.max()}, expected 0 to {n - 1}.")
    return given


def _running(lengths: Indices) -> Indices:
    """Return where each of consecutive stretches begins, and where the last one ends."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
