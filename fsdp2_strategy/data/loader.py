"""A loader whose data order is a formula: it goes on exactly, on any number of ranks, from a few numbers.

Input: a data set with a length. Output: this rank's part of every global batch, fetched by torch's DataLoader.

Global batches follow from seed, length, batch size and pool alone. A rank takes a contiguous cut of each, so that any
number of ranks sees the same batches; workers fetch ahead, and only what the trainer got counts.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate

from fsdp2_strategy.data.audit import Audit
from fsdp2_strategy.data.batches import Anchor, BatchPlan, Tail
from fsdp2_strategy.data.dataset_order import order_of
from fsdp2_strategy.data.permutation import Indices
from fsdp2_strategy.data.prefetch import Ahead
from fsdp2_strategy.data.workers import Key, Parts, Refusal, Samples, as_it_is, keys_of, outlive_sigterm, part_of
from fsdp2_strategy.distributed.agreement import agree
from fsdp2_strategy.distributed.process_group import rank, world_size
from fsdp2_strategy.distributed.torch_internals import end_workers
from fsdp2_strategy.errors import DataError

_VERSION = 1
_TAILS = ("carry", "pad", "drop")


class ResumableLoader:
    """Give out this rank's part of every global batch, epoch after epoch; not collective.

    Each ``for batch in loader`` goes on to the end of the epoch; the next one is the next epoch, and one that was left
    in the middle goes on there. A batch belongs to the epoch in which it begins.

    Before a sample is fetched, the generators of torch (CPU), NumPy and Python are seeded from seed, epoch and sample,
    so that its augmentation is the same wherever it is fetched; ``collate_fn`` runs under a seed of the part's first
    sample. The trainer's own generators are not touched. Samples are fetched one by one, never by ``__getitems__``.

    Args:
        dataset: has a length, and samples by index. With ``pool`` it also has ``episode_lengths``, and may have
            ``hold``, which is told what comes next (`fsdp2_strategy.data.prefetch`); with ``weights`` it is a
            `ConcatDataset`.
        global_batch_size: samples of a batch over all ranks, at least one each. Ranks' parts differ by one at most.
        seed: of order and augmentation.
        dp_rank: number of this rank among those that share the data; by default its rank in the process group.
        dp_size: how many share it; by default all ranks.
        num_workers: processes that fetch; 0 fetches in this one.
        tail: what becomes of an epoch's last samples that fill no batch. ``"carry"`` fills it with the next epoch's
            first, each sample exactly once an epoch. ``"pad"`` fills it with samples that do not count: a batch that is
            a mapping gets ``"sample_mask"`` (bool, this rank's samples; one that it has counts, too), any other comes
            as (batch, mask).
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
        self._is_of_all_ranks = dp_rank is None and dp_size is None and dist.is_initialized()
        self.dp_rank, self.dp_size = _rank_and_size(dp_rank, dp_size)
        self.dataset, self.tail = dataset, tail
        self.global_batch_size, self.seed = operator.index(global_batch_size), operator.index(seed)
        self._check()
        self._fingerprint, make_order = order_of(
            dataset, self.global_batch_size, self.seed, tail=tail, pool=pool, lanes=lanes, weights=weights
        )
        self._plan = BatchPlan(lru_cache(maxsize=4)(make_order), self.global_batch_size, tail)
        self._collate = collate_fn or default_collate
        self._fetch: dict[str, Any] = {
            "collate_fn": as_it_is,
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
        self._ahead: Ahead | None = None
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
    def at_epoch_end(self) -> bool:
        """Whether the next ``for`` begins an epoch, because the one before is through."""
        return self._batches >= self._end

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
        found, missing = [np.empty(0, dtype=np.int64)], k
        for batch in itertools.count(self._batches):
            if missing <= 0:
                break
            found += [self._plan.samples(stretch) for stretch in self._plan.stretches(batch)]
            missing -= sum(map(len, self._plan.stretches(batch)))
        return np.concatenate(found)[:k]

    # --- iteration -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._batches >= self._end:
            self._begin_epoch()
        began = self._began
        while self._began == began and self._batches < self._end:
            if self._in_flight is None:
                self._in_flight = iter(self._loader())
                self._ahead = self._look_ahead()
            try:
                if self._ahead is not None:
                    self._ahead.at(self._batches)
                keys, batch = next(self._in_flight)
                if isinstance(batch, Refusal):
                    raise batch.error(batch.text)
            except BaseException:
                self.close()  # what was fetched ahead is fetched again
                raise
            mask = self._deliver(keys)
            yield batch if mask is None else _with_mask(batch, mask)

    def _begin_epoch(self) -> None:
        if self._plan.skipped:  # so that nothing is counted through from long ago
            self._replan(self._plan.skipped)
        self._began, self._end = self._batches, self._plan.end_of(self.epoch)

    def _loader(self) -> DataLoader[Any]:
        return DataLoader(
            Samples(self.dataset, self.seed, self._collate),
            batch_sampler=Parts(self._plan, self._batches, self.dp_rank, self.dp_size),
            generator=torch.Generator().manual_seed(0),  # it draws a seed, else from the trainer's generator
            worker_init_fn=outlive_sigterm,
            **self._fetch,
        )

    def _look_ahead(self) -> Ahead | None:
        """Return what tells the data set which episodes to hold, where it wants to know."""
        if "pool" not in self._fingerprint or not hasattr(self.dataset, "hold"):
            return None
        in_flight = self._fetch["num_workers"] * (self._fetch["prefetch_factor"] or 0)
        low, high = part_of(self.global_batch_size, self.dp_rank, self.dp_size)
        return Ahead(self.dataset, lambda batch: self._plan.episodes(batch, low, high), in_flight)

    def _deliver(self, keys: Sequence[Key]) -> torch.Tensor | None:
        """Count a batch as delivered; return which of its samples count, where some may not.

        Raises:
            DataError: the workers gave other samples than were asked for, or an epoch ended that lacks some.
        """
        plan, batch = self._plan, self._batches
        low, high = part_of(self.global_batch_size, self.dp_rank, self.dp_size)
        asked, fetched = keys_of(plan, batch, low, high), [tuple(key) for key in keys]
        if fetched != asked:
            raise DataError(
                f"cannot deliver batch {batch}: the workers fetched {fetched[:3]}…, expected {asked[:3]}…. Load a "
                "checkpoint, and report this: the loader is broken."
            )
        stretches = plan.stretches(batch)
        for stretch in stretches:
            self._audit.add(stretch.epoch, plan.slots(stretch))
        real = sum(map(len, stretches))
        self._has_begun = True
        self._batches += 1
        self._samples += real
        self._close_epochs(self.epoch)
        return torch.arange(low, high) < real if self.tail == "pad" else None

    def _close_epochs(self, epoch: int) -> None:
        """Audit the epochs before one."""
        for ended in self._audit.begun():
            if ended < epoch:
                self._audit.close(ended, len(self._plan.order_of(ended)), self._plan.left_out(ended))

    def close(self) -> None:
        """End the workers, and drop what they have fetched ahead; the next ``for`` starts new ones."""
        in_flight, self._in_flight = self._in_flight, None
        # Left to the garbage collector, a worker may be waited for.
        end_workers(in_flight)
        if pause := getattr(self.dataset, "pause", None):
            pause()

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
        if lacking := [name for name in self.state_dict() if name not in state]:
            raise DataError(
                f"cannot load a data position: it lacks {', '.join(lacking)}, expected what state_dict gave. Load it "
                "with the version of this package that saved it."
            )
        known = {**self._fingerprint, "version": _VERSION}
        given = {**state["fingerprint"], "version": state["version"]}
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
        asked_for = set(self.skipped) - set(state["skipped"])
        self._plan = self._plan.moved(state["skipped"], Anchor(*state["anchor"]))
        self._batches, self._samples = state["batches"], state["samples"]
        self._began, self._end = state["began"], state["end"]
        self._audit = Audit(state["audit"])
        if asked_for:
            self.skip(asked_for)

    def skip(self, samples: Iterable[int]) -> None:
        """Leave samples out from now on, in this epoch and all others; collective where the ranks are all ranks.

        The samples behind them move up, so batches stay full; it is part of the state. All ranks must have got the same
        batches: where one could not fetch its part, the step of the others is lost, so load a checkpoint first.

        Raises:
            DataError: on every rank: one is no sample of the data set, nothing would be left, or the ranks are not
                equally far.
        """
        chosen = sorted({*self._plan.skipped, *map(operator.index, samples)})
        if self._is_of_all_ranks:
            expected = "the same batches and samples everywhere. Load a checkpoint, and skip before the first batch."
            agree("skip samples", (self._batches, chosen), DataError, expected)
        epoch = self.epoch
        self._replan(chosen)
        if self._batches < self._end:
            still = self._plan.epoch_of(self._batches) == epoch
            self._end = self._plan.end_of(epoch) if still else self._batches
        self.close()

    def _replan(self, skipped: Sequence[int]) -> None:
        """Let a plan without samples hold from the next batch on; what the old one passed over is accounted for."""
        old = self._plan
        epoch, position = old.position_of(self._batches)
        self._close_epochs(epoch)
        self._plan = old.moved(skipped, Anchor(self._batches, epoch, position))
        gaps = old.gaps(epoch)
        if (passed := gaps[gaps < position]).size:
            self._audit.add(epoch, old.order_of(epoch).slots_at(passed))

    def _check(self) -> None:
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__"):
            raise DataError(
                f"cannot load {type(self.dataset).__name__}: it has no length, expected samples by index. Give a "
                "map-style data set."
            )
        if not 0 <= self.dp_rank < self.dp_size <= self.global_batch_size:
            raise DataError(
                f"cannot cut batches: dp_rank is {self.dp_rank}, dp_size {self.dp_size}, global_batch_size "
                f"{self.global_batch_size}, expected a rank below the size, and a sample for each rank."
            )
        if self.tail not in _TAILS:
            raise DataError(f"cannot end an epoch: tail is {self.tail!r}, expected one of {', '.join(_TAILS)}.")


def _with_mask(batch: Any, mask: torch.Tensor) -> Any:
    if not isinstance(batch, MutableMapping):
        return batch, mask
    own = batch.get("sample_mask", mask)
    if not isinstance(own, torch.Tensor) or own.shape != mask.shape or own.dtype != torch.bool:
        raise DataError(
            "cannot deliver a padded batch: its 'sample_mask' is something else, expected a bool for each sample, or "
            "that name to be free. Rename it."
        )
    batch["sample_mask"] = mask & own
    return batch


def _rank_and_size(dp_rank: int | None, dp_size: int | None) -> tuple[int, int]:
    """Return this rank among those that share the data: as given, or of the process group."""
    if dp_rank is not None and dp_size is not None:
        return operator.index(dp_rank), operator.index(dp_size)
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if dp_rank is not None or dp_size is not None or launched:
        raise DataError(
            f"cannot cut batches: dp_rank is {dp_rank}, dp_size {dp_size}, and there is "
            f"{'a' if dist.is_initialized() else 'no'} process group, expected both numbers, or neither and a group. "
            "Construct the strategy first."
        )
    return rank(), world_size()
