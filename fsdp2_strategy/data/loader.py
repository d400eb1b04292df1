"""Load data, and resume at the exact sample, on any number of ranks, from a few saved numbers.

Input: a map-style data set. Output: this rank's part of every global batch, fetched by torch's DataLoader.

The global batches are computed from seed, data set length, batch size and the options of the order; they do not depend
on the number of ranks. Each rank takes a contiguous part of each batch. The state counts the batches that the trainer
has received, not those that workers have prefetched.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import astuple, fields, replace
from functools import lru_cache
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from fsdp2_strategy.config.arguments import check_number
from fsdp2_strategy.data.batches import Anchor, BatchPlan, Key, Tail
from fsdp2_strategy.data.needed_episodes import EpisodeAnnouncer
from fsdp2_strategy.data.order_fingerprint import LaneLayout, choose_order
from fsdp2_strategy.data.orders import Order
from fsdp2_strategy.data.permutation import Indices
from fsdp2_strategy.data.sample_fetcher import SampleFetcher, identity, ignore_foreign_sigterm
from fsdp2_strategy.distributed import spent_time
from fsdp2_strategy.distributed.agreement import check_equal
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.process_group import data_rank, data_size
from fsdp2_strategy.distributed.torch_internals import end_workers
from fsdp2_strategy.errors import DataError, counted, shortened, shown

_VERSION = 1
_VERSION_WITH_LAYOUT = 2  # earlier versions of this package would ignore the layout


class ResumableLoader:
    """Iterate over this rank's part of every global batch, one epoch per ``for`` loop; not collective.

    A ``for batch in loader`` loop ends with the epoch, and the next loop starts the next epoch. If a loop is left
    early, the next loop continues the same epoch. A batch belongs to the epoch in which it begins.

    Before each sample is fetched, the generators of torch (CPU), NumPy and Python are seeded from the loader's seed,
    the epoch and the sample's index. So a sample's augmentation is the same in every process. Before ``collate_fn`` is
    called, they are seeded from the first sample of this rank's part. The trainer's own generators are left unchanged.
    Samples are fetched one by one, not by ``__getitems__``.

    Args:
        dataset: a map-style data set. ``pool`` requires its attribute ``episode_lengths``. With ``pool``, a method
            ``hold`` of the data set is called with the episodes that are needed now and next; see
            `fsdp2_strategy.data.needed_episodes`. ``weights`` requires a `ConcatDataset`.
        global_batch_size: number of samples of a batch over all ranks, at least one per rank. If the ranks do not
            divide it, the parts of two ranks differ by one sample; without ``tail="pad"``, a warning says so.
        seed: seed of the order and the augmentation.
        dp_rank: rank of this process among those that share the data; by default its rank in the process group.
        dp_size: number of ranks that share the data; by default all ranks.
        num_workers: number of worker processes; 0 fetches in this process.
        tail: how to treat the samples at the end of an epoch that do not fill a batch. ``"carry"`` fills the batch with
            the first samples of the next epoch; each sample is used exactly once per epoch. ``"pad"`` fills it with
            padding and adds a bool mask with one element per sample of this rank, false for padding. If the batch is a
            mapping, the mask is stored as ``"sample_mask"``; an existing mask is combined with it by logical and. For
            other batches the loader yields (batch, mask). ``"drop"`` leaves these samples out.
        shuffle: permute the samples by seed and epoch. If false, each epoch has the order of the data set; without
            ``pool`` and ``weights`` only.
        pool: shuffle the frames of this many episodes at a time; see `EpisodeOrder`. None shuffles all samples.
        collate_fn: function that makes a batch from a list of samples; by default torch's `default_collate`.
        pin_memory: copy batches to pinned memory.
        prefetch_factor: number of batches that each worker prefetches.
        lanes: number of spans of a batch, each with its own episodes; see `EpisodeOrder`.
        weights: relative share of each data set; see `MixtureOrder`.

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
        shuffle: bool = True,
        pool: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        lanes: int = 1,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.is_shared_by_all_ranks = dp_rank is None and dp_size is None and dist.is_initialized()
        """Whether all ranks that train have a part of each batch."""
        for name, number, least in (
            ("global_batch_size", global_batch_size, 1),
            ("seed", seed, None),
            ("dp_rank", dp_rank, 0),
            ("dp_size", dp_size, 1),
            ("num_workers", num_workers, 0),
            ("prefetch_factor", prefetch_factor, 1),
        ):
            if number is not None or name not in {"dp_rank", "dp_size", "prefetch_factor"}:
                check_number("load batches", name, number, DataError, integer=True, minimum=least)
        if collate_fn is not None and not callable(collate_fn):
            raise DataError(
                f"cannot load batches: collate_fn is a {type(collate_fn).__name__}, expected a function from a list of "
                "samples to a batch."
            )
        if not isinstance(shuffle, bool | np.bool_):
            raise DataError(f"cannot load batches: shuffle is {shuffle!r}, expected True or False. Pass a bool.")
        self.dp_rank, self.dp_size = _rank_and_size(dp_rank, dp_size)
        self.dataset, self.tail = dataset, tail
        self.global_batch_size, self.seed = operator.index(global_batch_size), operator.index(seed)
        self._check()
        self._fingerprint, self._make_order = choose_order(
            dataset,
            self.global_batch_size,
            self.seed,
            tail=tail,
            shuffle=shuffle,
            pool=pool,
            lanes=lanes,
            weights=weights,
        )
        # Layouts of the lanes: of the current epoch, and of the next one if it is another. Loading a position that was
        # saved with another batch size adds a layout.
        self._layouts = [LaneLayout(0, self.global_batch_size, 0)]
        self._plan = BatchPlan(self._order_of(self._layouts), self.global_batch_size, tail)
        # This rank's part of every batch: the samples from ``_low`` to ``_high - 1``.
        self._low, self._high = (r * self.global_batch_size // self.dp_size for r in (self.dp_rank, self.dp_rank + 1))
        self._collate = collate_fn or default_collate
        self._fetch: dict[str, Any] = {
            "collate_fn": identity,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor if num_workers else None,
        }
        self._batches = 0  # number of delivered batches
        self._samples = 0  # number of delivered samples, over all ranks, without padding
        self._began = 0  # index of the first batch of this epoch
        self._end = self._plan.end_of(0)
        self._in_flight: Iterator[Any] | None = None
        self._announcer: EpisodeAnnouncer | None = None
        self._has_begun = False

    # --- position ------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._plan.epoch_of(self._batches)

    @property
    def batches(self) -> int:
        """Number of batches that the trainer has received."""
        return self._batches

    @property
    def at_epoch_end(self) -> bool:
        """Whether the current epoch is complete, so that the next ``for`` loop starts a new one."""
        return self._batches >= self._end

    @property
    def consumed_samples(self) -> int:
        """Number of samples that all ranks have received together, without padding."""
        return self._samples

    @property
    def skipped(self) -> tuple[int, ...]:
        """Indices of the samples that are left out, in ascending order."""
        return tuple(self._plan.skipped)

    def __len__(self) -> int:
        """Return the number of batches of the current epoch, or of the next one if the current one is complete.

        It is the same on every rank.
        """
        epoch = self.epoch
        return self._plan.end_of(epoch) - (self._began if self._batches < self._end else self._batches)

    def peek(self, k: int) -> Indices:
        """Return the indices of the next ``k`` samples of all ranks together: int64 of shape (k,)."""
        found, missing, batch = [np.empty(0, dtype=np.int64)], k, self._batches
        while missing > 0:
            spans = self._plan.spans(batch)
            found += map(self._plan.samples, spans)
            missing -= sum(map(len, spans))
            batch += 1
        return np.concatenate(found)[:k]

    # --- iteration -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._batches >= self._end:
            self._begin_epoch()
        began = self._began
        while self._began == began and self._batches < self._end:
            if self._in_flight is None:
                with spent_time.data:  # workers start
                    self._in_flight = iter(self._make_data_loader())
                    self._announcer = self._make_announcer()
            try:
                with spent_time.data:
                    if self._announcer is not None:
                        self._announcer.announce(self._batches)
                    keys, batch = next(self._in_flight)
                if isinstance(batch, DataError):
                    raise batch
            except BaseException:
                self.close()  # the next loop fetches the prefetched batches again
                raise
            mask = self._deliver(keys)
            yield batch if mask is None else _with_mask(batch, mask)

    def _begin_epoch(self) -> None:
        if self._plan.skipped:  # move the anchor here, so that locating a batch does not iterate over earlier epochs
            self._replan(self._plan.skipped)
        self._began, self._end = self._batches, self._plan.end_of(self.epoch)

    def _make_data_loader(self) -> DataLoader[Any]:
        plan = self._plan
        return DataLoader(
            SampleFetcher(self.dataset, self.seed, self._collate),
            batch_sampler=(plan.keys(batch, self._low, self._high) for batch in itertools.count(self._batches)),
            generator=torch.Generator().manual_seed(0),  # else DataLoader draws a seed from the trainer's generator
            worker_init_fn=ignore_foreign_sigterm,
            **self._fetch,
        )

    def _make_announcer(self) -> EpisodeAnnouncer | None:
        """Return the object that announces episodes to the data set; None without ``pool`` or ``hold``."""
        if "pool" not in self._fingerprint or not hasattr(self.dataset, "hold"):
            return None
        in_flight = self._fetch["num_workers"] * (self._fetch["prefetch_factor"] or 0)
        return EpisodeAnnouncer(
            self.dataset, lambda batch: self._plan.episodes(batch, self._low, self._high), in_flight
        )

    def _deliver(self, keys: Sequence[Key]) -> torch.Tensor | None:
        """Count a batch as delivered; with ``tail="pad"``, return the mask of samples that are not padding."""
        requested, fetched = self._plan.keys(self._batches, self._low, self._high), [tuple(key) for key in keys]
        if fetched != requested:
            raise DataError(
                f"cannot deliver batch {self._batches}: the workers fetched {fetched[:3]}…, expected "
                f"{requested[:3]}…. Report this bug of the loader, and resume from a checkpoint."
            )
        real = sum(map(len, self._plan.spans(self._batches)))
        self._has_begun = True
        self._batches += 1
        self._samples += real
        return torch.arange(self._low, self._high) < real if self.tail == "pad" else None

    def close(self) -> None:
        """End the workers and drop the batches that they have prefetched; the next ``for`` loop starts new workers."""
        in_flight, self._in_flight = self._in_flight, None
        # The garbage collector would end them as well, but may block until a worker exits.
        end_workers(in_flight)
        if pause := getattr(self.dataset, "pause", None):
            pause()

    # --- resuming ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's position as JSON values, equal on every rank; prefetched batches are not counted."""
        state = {
            "version": _VERSION,
            "fingerprint": self._fingerprint,
            "batches": self._batches,
            "samples": self._samples,
            "began": self._began,
            "end": self._end,
            "anchor": list(astuple(self._plan.anchor)),
            "skipped": list(self._plan.skipped),
        }
        if self._layouts != [LaneLayout(0, self.global_batch_size, 0)]:
            state |= {"version": _VERSION_WITH_LAYOUT, "layouts": [list(astuple(layout)) for layout in self._layouts]}
        return state

    def facts_of_data(self) -> str:
        """Return a digest of the data set, as far as it can be read without side effects; not collective.

        It covers the length, the indices of subsets, and samples of data that is in memory.
        """
        return hashlib.blake2b(repr(_facts_of(self.dataset)).encode(), digest_size=8).hexdigest()

    def check_state(self, state: Mapping[str, Any], *, any_batch_size: bool = False) -> None:
        """Raise if a state cannot be loaded.

        Args:
            state: a result of `state_dict`.
            any_batch_size: accept a state that was saved with another ``global_batch_size``.

        Raises:
            DataError: the state belongs to another data order (the message names the differences), or the loader has
                already delivered batches.
        """
        if self._has_begun:
            raise DataError(
                "cannot load a data position: the loader has delivered batches, expected a loader that has delivered "
                "none. Load before the first batch, or create a new loader."
            )
        if missing := [name for name in self.state_dict() if name not in state and name != "layouts"]:
            raise DataError(
                f"cannot load a data position: it has no {', '.join(missing)}, expected all keys of state_dict(). Load "
                "it with the version of this package that saved it."
            )
        if wrong_type := _entry_of_wrong_type(state):
            raise DataError(
                f"cannot load a data position: its {wrong_type} is {shown(state[wrong_type])}, expected what "
                "state_dict() returns. Load it with the version of this package that saved it."
            )
        version = state["version"] if state["version"] in (_VERSION, _VERSION_WITH_LAYOUT) else None
        known = {**self._fingerprint, "version": version or _VERSION}
        given = {**state["fingerprint"], "version": state["version"]}
        wrong = [name for name in known | given if given.get(name) != known.get(name)]
        if any_batch_size and "global_batch_size" in wrong:
            wrong.remove("global_batch_size")
        if wrong:
            texts = [f"{shortened(name)} {shown(given.get(name))}, expected {known.get(name)!r}" for name in wrong[:9]]
            fix = "use the data set and arguments of the run that is resumed"
            if wrong == ["global_batch_size"]:
                fix += (
                    ". To continue at the same sample with another batch size, load with load_data_position='samples' "
                    "(load_state_dict: any_batch_size=True)"
                )
            raise DataError(
                f"cannot load a data position: it was saved with {'; '.join(texts)}. Samples would be repeated or left "
                f"out: {fix}."
            )

    def load_state_dict(self, state: Mapping[str, Any], *, any_batch_size: bool = False) -> None:
        """Continue at the position of a `state_dict`, on any number of ranks; call it before the first batch.

        Samples that were skipped on this loader before the call stay skipped.

        Args:
            state: a result of `state_dict`.
            any_batch_size: if the state was saved with another ``global_batch_size``, continue at the same sample: the
                next batch begins with the sample that would have come next. Otherwise, such a state is an error. An
                epoch that has begun keeps the lanes of the old batches, so ranks may share episodes until its end.

        Raises:
            DataError: see `check_state`.
        """
        self.check_state(state, any_batch_size=any_batch_size)
        also_skipped = set(self.skipped) - set(state["skipped"])
        batch = state["fingerprint"]["global_batch_size"]
        self._layouts = [LaneLayout(*layout) for layout in state.get("layouts", [(0, batch, 0)])]
        self._plan = replace(
            self._plan,
            order_of=self._order_of(self._layouts),
            batch=batch,
            skipped=tuple(state["skipped"]),
            anchor=Anchor(*state["anchor"]),
        )
        self._batches, self._samples = state["batches"], state["samples"]
        self._began, self._end = state["began"], state["end"]
        if batch != self.global_batch_size:
            self._change_batch_size()
        if also_skipped:
            self.skip(also_skipped)

    def _change_batch_size(self) -> None:
        """Continue with batches of ``global_batch_size`` at the sample with which the plan's next batch begins."""
        epoch, position = self._plan.position_of(self._batches)
        log(
            "the global batch size changes from %d to %d: continuing in epoch %d after %s in all",
            self._plan.batch,
            self.global_batch_size,
            self.epoch,
            counted(self._samples, "sample"),
        )
        # An epoch that has begun must keep its order, or samples would be repeated and left out.
        first = epoch + (position > 0)
        offset = (len(self._plan.order_of(epoch)) - position) % self.global_batch_size if position else 0
        kept = [layout for layout in self._layouts if layout.epoch < first]
        self._layouts = [*kept[-1:], LaneLayout(first, self.global_batch_size, offset)]
        self._replan(self._plan.skipped)
        self._plan = replace(self._plan, order_of=self._order_of(self._layouts), batch=self.global_batch_size)
        self._update_end(epoch)

    def _order_of(self, layouts: Sequence[LaneLayout]) -> Callable[[int], Order]:
        @lru_cache(maxsize=4)
        def order_of(epoch: int) -> Order:
            return self._make_order(epoch, next(each for each in reversed(layouts) if each.epoch <= epoch))

        return order_of

    @collective
    def skip(self, samples: Iterable[int]) -> None:
        """Leave samples out from now on; collective unless ``dp_rank`` and ``dp_size`` were given.

        They are left out in this epoch and all later ones. Batches stay full: the samples that follow in the order move
        up. The skipped samples are part of the state. All ranks must have received the same number of
        batches. If one rank failed to fetch its part, the others are one batch ahead: load a checkpoint first.

        Raises:
            DataError: on every rank, if a sample is not in the data set, if no samples would be left, or if the ranks
                have received different numbers of batches or skip different samples.
        """
        skipped = sorted({*self._plan.skipped, *map(operator.index, samples)})
        if self.is_shared_by_all_ranks:
            expected = (
                "the same number of delivered batches and the same samples on every rank. Load a checkpoint, and skip "
                "before the first batch."
            )
            check_equal("skip samples", (self._batches, skipped), DataError, expected)
        epoch = self.epoch
        self._replan(skipped)
        self._update_end(epoch)
        self.close()

    def _replan(self, skipped: Sequence[int]) -> None:
        """Skip ``skipped`` from the next batch on."""
        anchor = Anchor(self._batches, *self._plan.position_of(self._batches))
        self._plan = replace(self._plan, skipped=tuple(skipped), anchor=anchor)

    def _update_end(self, epoch: int) -> None:
        """Compute the end of the current epoch again, after a change of the plan, unless the epoch is complete."""
        if self._batches < self._end:
            has_batches_left = self.epoch == epoch
            self._end = self._plan.end_of(epoch) if has_batches_left else self._batches

    def _check(self) -> None:
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__"):
            raise DataError(
                f"cannot load batches: the data set is a {type(self.dataset).__name__}, expected a map-style data set. "
                "Use a data set with __len__ and __getitem__."
            )
        if not 0 <= self.dp_rank < self.dp_size <= self.global_batch_size:
            raise DataError(
                f"cannot divide batches between ranks: dp_rank is {self.dp_rank}, dp_size {self.dp_size}, "
                f"global_batch_size {self.global_batch_size}, expected 0 <= dp_rank < dp_size <= global_batch_size."
            )
        if self.tail not in get_args(Tail):
            raise DataError(f"cannot end an epoch: tail is {self.tail!r}, expected one of {', '.join(get_args(Tail))}.")
        if self.global_batch_size % self.dp_size and self.tail != "pad":  # with padding, the mask tells what to count
            log(
                "batches of %d samples on %d ranks: some ranks get a sample more than others. A mean loss per rank "
                "gives samples different weights: pass a sum, and num_items_in_batch, to backward, or use a multiple "
                "of %d.",
                self.global_batch_size,
                self.dp_size,
                self.dp_size,
                level=logging.WARNING,
            )


def _facts_of(dataset: Any) -> object:
    if isinstance(dataset, Subset):
        return "subset", _facts_of(dataset.dataset), list(map(int, dataset.indices))
    if isinstance(dataset, ConcatDataset):
        return "concatenation", [_facts_of(each) for each in dataset.datasets]
    count = len(dataset)
    # Reading a sample of another data set may open files, which worker processes would then share.
    is_in_memory = isinstance(dataset, list | tuple | range | np.ndarray | torch.Tensor | TensorDataset)
    return count, [repr(dataset[i]) for i in (0, count // 2, count - 1)] if is_in_memory and count else None


def _with_mask(batch: Any, mask: torch.Tensor) -> Any:
    if not isinstance(batch, MutableMapping):
        return batch, mask
    own = batch.get("sample_mask", mask)
    if not isinstance(own, torch.Tensor) or own.shape != mask.shape or own.dtype != torch.bool:
        raise DataError(
            "cannot deliver a padded batch: its 'sample_mask' is not a bool tensor with one element per sample, "
            "expected such a mask or none. Rename that key of the batch."
        )
    batch["sample_mask"] = mask & own
    return batch


def _rank_and_size(dp_rank: int | None, dp_size: int | None) -> tuple[int, int]:
    """Return ``dp_rank`` and ``dp_size``, by default those of the open strategy, else of the process group."""
    if dp_rank is not None and dp_size is not None:
        return operator.index(dp_rank), operator.index(dp_size)
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if dp_rank is not None or dp_size is not None or launched:
        raise DataError(
            f"cannot divide batches between ranks: dp_rank is {dp_rank}, dp_size {dp_size}, and there is "
            f"{'a' if dist.is_initialized() else 'no'} process group, expected both numbers, or neither and a process "
            "group. Pass both numbers, or construct the strategy first."
        )
    return data_rank(), data_size()


def _entry_of_wrong_type(state: Mapping[str, Any]) -> str:
    """Return the name of an entry of a data position that has another type than in a `state_dict`, or ""."""
    wrong = [name for name in ("batches", "samples", "began", "end") if not _are_counts([state[name]], 1)]
    wrong += [] if isinstance(state["fingerprint"], Mapping) else ["fingerprint"]
    wrong += [] if _are_counts(state["anchor"], len(fields(Anchor))) else ["anchor"]
    wrong += [] if _are_counts(state["skipped"], None) else ["skipped"]
    layouts = state.get("layouts", [[0, 1, 0]])
    is_list = isinstance(layouts, list | tuple) and len(layouts) > 0
    if not is_list or not all(_are_counts(each, len(fields(LaneLayout))) and each[1] for each in layouts):
        wrong.append("layouts")
    return wrong[0] if wrong else ""


def _are_counts(values: object, length: int | None) -> bool:
    return (
        isinstance(values, list | tuple)
        and (length is None or len(values) == length)
        and all(isinstance(value, int) and 0 <= value < 1 << 62 for value in values)
    )
