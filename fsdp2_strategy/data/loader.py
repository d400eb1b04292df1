"""A loader whose data order is a formula: it goes on exactly, on any number of ranks, from a few numbers.

Input: a data set with a length. Output: this rank's part of every global batch, fetched by torch's DataLoader.

Global batches follow from seed, length, batch size and pool alone. A rank takes a contiguous cut of each, so that any
number of ranks sees the same batches; workers fetch ahead, and only what the trainer got counts.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from fsdp2_strategy.data.audit import Audit
from fsdp2_strategy.data.batches import Anchor, BatchPlan, Tail
from fsdp2_strategy.data.bijection import Indices
from fsdp2_strategy.data.order import EpisodeOrder, GlobalOrder, MixtureOrder, Order
from fsdp2_strategy.errors import DataError

_VERSION = 1
_TAILS = ("carry", "pad", "drop")

Key = tuple[int, int]
"""An epoch, and a sample."""


class ResumableLoader:
    """Give out this rank's part of every global batch, epoch after epoch; not collective.

    Each ``for batch in loader`` goes on to the end of the epoch; the next one is the next epoch, and one that was left
    in the middle goes on there. A batch belongs to the epoch in which it begins.

    Before a sample is fetched, the generators of torch (CPU), NumPy and Python are seeded from seed, epoch and sample,
    so that its augmentation is the same wherever it is fetched; the trainer's own generators are not touched.

    Args:
        dataset: has a length, and samples by index. With ``pool`` it also has ``episode_lengths``; with ``weights`` it
            is a `ConcatDataset`.
        global_batch_size: samples of a batch over all ranks, at least one each. Ranks' parts differ by one at most.
        seed: of order and augmentation.
        dp_rank: number of this rank among those that share the data; by default its rank in the process group.
        dp_size: how many share it; by default all ranks.
        num_workers: processes that fetch; 0 fetches in this one.
        tail: what becomes of an epoch's last samples that fill no batch. ``"carry"`` fills it with the next epoch's
            first, each sample exactly once an epoch. ``"pad"`` fills it with samples that do not count: a batch that is
            a mapping gets ``"sample_mask"`` (bool, this rank's samples), any other comes as (batch, mask).
            ``"drop"`` leaves them out.
        pool: mix the frames of so many episodes at a time; see `EpisodeOrder`. Without it all samples are mixed.
        collate_fn: makes a batch of a list of samples; by default torch's.
        pin_memory: copy batches to pinned memory.
        prefetch_factor: batches that each worker fetches ahead.
        lanes: trades mixing for locality; see `EpisodeOrder`.
        weights: how often samples of each data set are drawn; see `MixtureOrder`.

    Raises:
        DataError: an argument does not fit the data set or the ranks.

    Example:
        >>> loader = ResumableLoader(range(10), 4)
        >>> len(loader), [len(batch) for batch in loader]
        (3, [4, 4, 4])
        >>> position = loader.state_dict()
        >>> other = ResumableLoader(range(10), 4)
        >>> other.load_state_dict(position)
        >>> other.epoch, bool((other.peek(4) == loader.peek(4)).all())
        (1, True)
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        *,
        seed: int = 0,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        num_workers: int = 0,
        tail: Tail = "carry",
        pool: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        lanes: int = 1,
        weights: Sequence[float] | None = None,
    ) -> None:
        in_group = dist.is_initialized()
        self.dp_size = dp_size if dp_size is not None else dist.get_world_size() if in_group else 1
        self.dp_rank = dp_rank if dp_rank is not None else dist.get_rank() if in_group else 0
        self.dataset, self.global_batch_size, self.seed = dataset, int(global_batch_size), int(seed)
        self.tail = tail
        self._check()
        self._fingerprint, make_order = _order_of(
            dataset, self.global_batch_size, self.seed, tail=tail, pool=pool, lanes=lanes, weights=weights
        )
        self._plan = BatchPlan(lru_cache(maxsize=4)(make_order), self.global_batch_size, tail)
        self._fetch: dict[str, Any] = {
            "collate_fn": _Collate(collate_fn or default_collate),
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor if num_workers else None,
        }
        self._batches = 0  # delivered
        self._samples = 0  # delivered, over all ranks, without padding
        self._began = 0  # the first batch of this epoch
        self._end = self._plan.end_of(0)
        self._audit = Audit()
        self._in_flight: Iterator[Any] | None = None
        self._has_begun = False

    # --- how far it is -------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._plan.epoch_of(self._batches)

    @property
    def batches(self) -> int:
        """Batches that the trainer got."""
        return self._batches

    @property
    def batches_left(self) -> int:
        """Batches that the next ``for`` gives; the same on every rank."""
        return self._plan.end_of(self.epoch) - self._batches

    @property
    def consumed_samples(self) -> int:
        """Samples that all ranks' trainers got together, padding left out."""
        return self._samples

    @property
    def skipped(self) -> tuple[int, ...]:
        """Samples that are left out, in ascending order."""
        return tuple(self._plan.skipped)

    def __len__(self) -> int:
        """Return the batches of the whole epoch; the same on every rank."""
        epoch = self.epoch
        return self._plan.end_of(epoch) - (self._began if self._batches < self._end else self._batches)

    def peek(self, k: int) -> Indices:
        """Return the next ``k`` samples of all ranks together, as indices of the data set: int64 of shape (k,)."""
        found = [np.empty(0, dtype=np.int64)]
        for batch in itertools.count(self._batches):
            if sum(map(len, found)) >= k:
                return np.concatenate(found)[:k]
            found += [self._plan.samples(stretch) for stretch in self._plan.stretches(batch)]
        raise AssertionError

    # --- iteration -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._batches >= self._end:
            self._began, self._end = self._batches, self._plan.end_of(self.epoch)
        while self._batches < self._end:
            self._has_begun = True
            if self._in_flight is None:
                self._in_flight = iter(self._loader())
            try:
                keys, batch = next(self._in_flight)
            except BaseException:
                self.close()  # what was fetched ahead is fetched again
                raise
            mask = self._deliver(keys)
            yield batch if mask is None else _with_mask(batch, mask)

    def _loader(self) -> DataLoader[Any]:
        return DataLoader(
            _Samples(self.dataset, self.seed),
            batch_sampler=_Parts(self._plan, self._batches, self.dp_rank, self.dp_size),
            generator=torch.Generator().manual_seed(self.seed),  # it draws a seed, else from the trainer's generator
            **self._fetch,
        )

    def _deliver(self, keys: Sequence[Key]) -> torch.Tensor | None:
        """Count a batch as delivered; return which of its samples count, where some may not.

        Raises:
            DataError: the workers gave other samples than were asked for, or an epoch ended that lacks some.
        """
        plan, batch = self._plan, self._batches
        stretches = plan.stretches(batch)
        part = slice(*_cut(self.global_batch_size, self.dp_rank, self.dp_size))
        samples = _padded([(s.epoch, plan.samples(s)) for s in stretches], self.global_batch_size)
        fetched = [tuple(key) for key in keys]
        if fetched != samples[part]:
            raise DataError(
                f"cannot deliver batch {batch}: the workers fetched {fetched[:3]}…, expected {samples[part][:3]}…. "
                "Load a checkpoint, and report this: the loader is broken."
            )
        for stretch in stretches:
            self._audit.add(stretch.epoch, plan.slots(stretch))
        real = sum(map(len, stretches))
        self._batches += 1
        self._samples += real
        for epoch in self._audit.begun():
            if epoch < self.epoch:
                self._audit.close(epoch, len(plan.order_of(epoch)), plan.left_out(epoch))
        if self.tail != "pad":
            return None
        return torch.arange(self.global_batch_size)[part] < real

    def close(self) -> None:
        """End the workers, and drop what they have fetched ahead; the next ``for`` starts new ones."""
        in_flight, self._in_flight = self._in_flight, None
        # Left to the garbage collector, a worker may be waited for.
        if shut_down := getattr(in_flight, "_shutdown_workers", None):
            shut_down()

    # --- resuming ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return how far the trainer is, as JSON: the same on every rank, whatever workers have fetched ahead."""
        anchor = self._plan.anchor
        return {
            "version": _VERSION,
            "fingerprint": self._fingerprint,
            "batches": self._batches,
            "samples": self._samples,
            "began": self._began,
            "end": self._end,
            "anchor": [anchor.batch, anchor.epoch, anchor.position],
            "skipped": list(self._plan.skipped),
            "audit": self._audit.state(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise where a state cannot be loaded.

        Raises:
            DataError: it is of another order, naming what differs; or the loader has begun.
        """
        if self._has_begun:
            raise DataError(
                "cannot load a data position: the loader has delivered batches, expected one that has not begun. Load "
                "before the first batch, or make a new loader."
            )
        known = {**self._fingerprint, "version": _VERSION}
        given = {**state.get("fingerprint", {}), "version": state.get("version")}
        if wrong := [name for name in known | given if given.get(name) != known.get(name)]:
            texts = [f"{name} {given.get(name)!r}, expected {known.get(name)!r}" for name in wrong]
            raise DataError(
                f"cannot load a data position: it was saved with {'; '.join(texts)}. Samples would be repeated or left "
                "out: use the data set and arguments of the run that goes on."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, on any number of ranks; before the first batch.

        Raises:
            DataError: see `check_state`.
        """
        self.check_state(state)
        self._replan(state["skipped"], Anchor(*state["anchor"]))
        self._batches, self._samples = state["batches"], state["samples"]
        self._began, self._end = state["began"], state["end"]
        self._audit = Audit(state["audit"])

    def skip(self, samples: Iterable[int]) -> None:
        """Leave samples out from now on, in this epoch and all others; call it alike on every rank.

        The samples behind them move up, so batches stay full; it is part of the state.

        Raises:
            DataError: one is no sample of the data set, or nothing would be left.
        """
        plan, epoch = self._plan, self.epoch
        at_epoch, position = plan.position_of(self._batches)
        gaps = plan.gaps(at_epoch)
        self._replan(sorted({*plan.skipped, *map(int, samples)}), Anchor(self._batches, at_epoch, position))
        if passed := gaps[gaps < position].tolist():
            self._audit.add(at_epoch, plan.slots_at(at_epoch, np.asarray(passed)))
        if self._batches < self._end:
            still = self._plan.epoch_of(self._batches) == epoch
            self._end = self._plan.end_of(epoch) if still else self._batches
        self.close()

    def _replan(self, skipped: Sequence[int], anchor: Anchor) -> None:
        old = self._plan
        self._plan = BatchPlan(old.order_of, old.batch, old.tail, tuple(skipped), anchor)

    def _check(self) -> None:
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__"):
            raise DataError(
                f"cannot load {type(self.dataset).__name__}: it has no length, expected samples by index. Give a "
                "map-style data set."
            )
        if not 0 <= self.dp_rank < self.dp_size <= self.global_batch_size:
            raise DataError(
                f"cannot cut batches: dp_rank is {self.dp_rank}, dp_size {self.dp_size}, global_batch_size "
                f"{self.global_batch_size}, expected a rank below the size, and a sample for each. Raise the batch."
            )
        if self.tail not in _TAILS:
            raise DataError(f"cannot end an epoch: tail is {self.tail!r}, expected one of {', '.join(_TAILS)}.")


def _order_of(
    dataset: Any,
    batch: int,
    seed: int,
    *,
    tail: str,
    pool: int | None,
    lanes: int,
    weights: Sequence[float] | None,
) -> tuple[dict[str, Any], Callable[[int], Order]]:
    """Return what an order follows from, as JSON, and what makes the order of an epoch."""
    n = len(dataset)
    facts: dict[str, Any] = {"n": n, "seed": seed, "global_batch_size": batch, "tail": tail}
    if (pool is None and lanes != 1) or (pool is not None and weights is not None):
        raise DataError(
            f"cannot order samples: pool is {pool}, lanes {lanes}, weights {weights}, expected a pool of episodes with "
            "lanes if you like, or weights, or neither. Drop one."
        )
    if pool is not None:
        lengths = _episode_lengths(dataset, n)
        facts |= {"pool": pool, "lanes": lanes, "episodes": _digest(lengths.tobytes())}
        carries = tail == "carry"
        return facts, lambda epoch: EpisodeOrder(
            lengths, seed, epoch, pool, lanes=lanes, batch=batch, offset=epoch * n % batch if carries else 0
        )
    if weights is not None:
        if not isinstance(dataset, ConcatDataset):
            raise DataError(
                f"cannot mix: the data set is a {type(dataset).__name__}, expected a ConcatDataset, a weight for each "
                "of its data sets. Put them into one."
            )
        parts = [len(part) for part in dataset.datasets]  # type: ignore[arg-type]
        facts |= {"lengths": parts, "weights": [float(w) for w in weights]}
        return facts, lambda epoch: MixtureOrder(parts, weights, seed, epoch)
    return facts, lambda epoch: GlobalOrder(n, seed, epoch)


def _episode_lengths(dataset: Any, n: int) -> Indices:
    given = getattr(dataset, "episode_lengths", None)
    lengths = np.asarray([] if given is None else given, dtype=np.int64)
    if lengths.sum() != n:
        raise DataError(
            f"cannot pool episodes: episode_lengths of {type(dataset).__name__} add up to {lengths.sum()}, expected "
            f"its {n} samples. Give it that attribute, the length of each episode in order."
        )
    return lengths


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _cut(batch: int, rank: int, size: int) -> tuple[int, int]:
    """Return where a rank's part of a batch begins and ends."""
    return rank * batch // size, (rank + 1) * batch // size


def _padded(pieces: Sequence[tuple[int, Indices]], batch: int) -> list[Key]:
    """Return the samples of a batch, the first one repeated for want of others."""
    keys = [(epoch, sample) for epoch, samples in pieces for sample in samples.tolist()]
    return keys + keys[:1] * (batch - len(keys))


def _with_mask(batch: Any, mask: torch.Tensor) -> Any:
    return {**batch, "sample_mask": mask} if isinstance(batch, Mapping) else (batch, mask)


class _Parts:
    """A rank's part of every batch from one on, without end."""

    def __init__(self, plan: BatchPlan, first: int, rank: int, size: int) -> None:
        self.plan, self.first = plan, first
        self.low, self.high = _cut(plan.batch, rank, size)

    def __iter__(self) -> Iterator[list[Key]]:
        for batch in itertools.count(self.first):
            stretches = self.plan.stretches(batch)
            if sum(map(len, stretches)) < self.plan.batch:
                pieces = [(s.epoch, self.plan.samples(s)) for s in stretches]
                yield _padded(pieces, self.plan.batch)[self.low : self.high]
                continue
            begin = 0
            pieces = []
            for s in stretches:
                low, high = (min(max(place - begin, 0), len(s)) for place in (self.low, self.high))
                pieces.append((s.epoch, self.plan.samples(type(s)(s.epoch, s.begin + low, s.begin + high))))
                begin += len(s)
            yield _padded(pieces, self.high - self.low)


class _Samples(Dataset[Any]):
    """Fetch the samples of a part, each under its own seed."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, keys: list[Key]) -> tuple[list[Key], list[Any]]:
        with _own_generators():
            return keys, [self._fetched(*key) for key in keys]

    def _fetched(self, epoch: int, sample: int) -> Any:
        facts = f"{self.seed}/{epoch}/{sample}".encode()
        word = int.from_bytes(hashlib.blake2b(facts, digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(word)
        np.random.seed(word & 0xFFFFFFFF)  # noqa: NPY002  the generator that data sets draw from
        random.seed(word)
        return self.dataset[sample]


@contextmanager
def _own_generators() -> Iterator[None]:
    """Leave the trainer's generators as they are; a worker has its own."""
    if get_worker_info() is not None:
        yield
        return
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)


class _Collate:
    """Make a batch, and say of which samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, fetched: tuple[list[Key], list[Any]]) -> tuple[list[Key], Any]:
        keys, samples = fetched
        return keys, self.collate(samples)
