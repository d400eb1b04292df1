"""Iterate over the epochs of any loader, and resume exactly at a checkpoint, even during gradient accumulation.

Input: a loader. Output: its batches, epoch by epoch, and the data position and random state of the last optimizer step.

[Note: position] A micro-batch is pending until an optimizer step uses its gradients. Checkpoints do not contain these
gradients. If micro-batches are pending at a save (at the end of an epoch), the checkpoint contains the data position
and random state of the last optimizer step. The resumed run then computes the pending micro-batches again.

[Note: plain loaders] A ResumableLoader and a loader with ``state_dict`` restore their position themselves. Any other
loader is "plain". To resume it, its epoch is started again under a random state that depends only on seed, rank and
epoch, and the batches before the position are drawn and discarded. Its persistent workers are restarted in each epoch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from fsdp2_strategy.checkpoint import Loader
from fsdp2_strategy.checkpoint.random_state import derive_seed, load_rng, rng_content
from fsdp2_strategy.distributed import spent_time
from fsdp2_strategy.distributed.agreement import all_or_none, any_rank
from fsdp2_strategy.distributed.generators import restored_generators
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.process_group import rank, world_size
from fsdp2_strategy.distributed.torch_internals import forget_workers
from fsdp2_strategy.errors import CheckpointError, DataError, counted

Kind = Literal["formula", "state", "count"]


@dataclass(frozen=True, kw_only=True)
class Position:
    """The data position of a run; checkpoints contain it as a JSON object with these fields as keys."""

    epoch: int
    batch: int
    """Number of micro-batches of the epoch that are done."""
    kind: Kind
    """How the loader resumes: "formula" if it computes its order (ResumableLoader), "state" if it has a ``state_dict``
    per rank, "count" if it resumes by ``batch`` only."""
    ranks: int
    """Number of ranks of the saved run."""
    placed: bool = False
    """Whether the caller set the sampler's position in the epoch; ``batch`` then counts from this position."""
    batch_size: int | None = None
    """Samples of a rank's micro-batch, if ``kind`` is "count" and the loader knows it."""


_END = object()

# For each plain loader, data set or sampler: the seed that its generator had before `_seed_generators` changed it.
_original_seeds: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class Epochs:
    """The epochs of a loader; every rank must make the same calls.

    A loader that is not plain must already be at ``start``. ``epoch`` is the first epoch without ``start``.
    ``any_batch_size`` accepts a ``start`` that was saved with another batch size, for a ResumableLoader only.
    """

    def __init__(
        self,
        loader: Any,
        *,
        seed: int,
        start: Position | None,
        any_batch_size: bool = False,
        epoch: int,
        sampler_may_be_positioned: bool,
        accumulates: bool,
    ) -> None:
        self._loader, self._seed, self._accumulates = loader, seed, accumulates
        self.kind: Kind = kind_of(loader)
        if start is not None:
            self._check(start, any_batch_size=any_batch_size)
        self._start = start
        self._is_positioned = self._must_be_positioned = start is not None and start.placed
        self._may_be_positioned = sampler_may_be_positioned or self._must_be_positioned
        self.epoch, self._batch = (start.epoch, start.batch) if start else (epoch, 0)
        self._last_step: tuple[Position, bytes, Any] | None = None
        self.record_step()

    def batches(self, epoch: int) -> Iterator[Any]:
        """Yield the remaining batches of an epoch; collective for each batch."""
        resumes = self._start is not None and self._start.epoch == epoch and self._batch > 0
        self.epoch, self._batch, self._start = epoch, self._batch if resumes else 0, None
        if resumes and getattr(self._loader, "at_epoch_end", False):
            return
        with all_or_none(f"start epoch {epoch}", DataError):
            batches = self._start_epoch(epoch, resumes=resumes)
        while True:
            with all_or_none("draw a batch", DataError):
                with spent_time.data:
                    batch = next(batches, _END)
                if batch is _END and not self._batch:
                    raise DataError(
                        f"cannot train: the {type(self._loader).__name__} yields no batch in epoch {epoch}, expected "
                        "at least one. Pass a loader that starts again in each epoch, not an iterator."
                    )
            if self._has_ended(batch is _END):
                return
            self._batch += 1
            yield batch

    def _start_epoch(self, epoch: int, *, resumes: bool) -> Iterator[Any]:
        sources = self._order_sources()
        positioned = [s for s in sources if _is_positioned_in(s, epoch)] if self._may_be_positioned else []
        self._is_positioned = bool(positioned)
        if self._must_be_positioned and not positioned:
            raise DataError(
                f"cannot resume in epoch {epoch}: the position of the sampler is not set, expected it to "
                "be set, as it was before the checkpoint. Call the sampler's set_epoch(epoch, position), or load with "
                "load_data_position=False."
            )
        self._may_be_positioned = self._must_be_positioned = False
        for source in sources:
            if callable(set_epoch := getattr(source, "set_epoch", None)) and source not in positioned:
                set_epoch(epoch)
        with restored_generators(derive_seed(self._seed, rank(), epoch)):
            if self.kind == "count":
                self._seed_generators(epoch)
                if getattr(self._loader, "persistent_workers", False):
                    forget_workers(self._loader)  # a resumed run cannot restore their random state
            batches = iter(self._loader)
            if self.kind == "count" and self._batch and not self._is_positioned:
                done = counted(self._batch, "batch", "es")
                log("resuming in epoch %d: drawing and discarding its first %s", epoch, done)
                for _ in islice(batches, self._batch):
                    pass
            # Samplers draw their order when the first batch is drawn: draw it now, under this random state.
            return batches if resumes else chain(list(islice(batches, 1)), batches)

    def _has_ended(self, on_this_rank: bool) -> bool:
        """Return whether the epoch has ended on all ranks; collective, except for a ResumableLoader."""
        if self.kind == "formula" or not any_rank(on_this_rank):
            return on_this_rank
        if any_rank(not on_this_rank):
            raise DataError(
                f"cannot continue: after {self._batch} batches of epoch {self.epoch} some ranks have none left and "
                "others have more, expected the same number on every rank. Use ResumableLoader, or a sampler that "
                "yields the same number on every rank."
            )
        return True

    def record_step(self) -> None:
        """Record the position and random state at the end of an optimizer step; checkpoints contain them."""
        if self._accumulates:
            state = copy.deepcopy(self._loader.state_dict()) if self.kind != "count" else None
            self._last_step = (self._position(), rng_content(), state)

    def end_epoch(self) -> None:
        """Set the position to the start of the next epoch; no micro-batch may be pending."""
        self.epoch, self._batch, self._is_positioned = self.epoch + 1, 0, False
        self.record_step()

    @contextmanager
    def state_of_last_step(self) -> Iterator[tuple[Position, Loader | None]]:
        """Restore the random state of the last optimizer step in the block, and yield its position and loader state."""
        if self._last_step is None:
            yield self._position(), self._loader if self.kind != "count" else None
            return
        position, rng, state = self._last_step
        now = rng_content()
        load_rng(rng)
        try:
            yield position, _with_state(self._loader, state) if self.kind != "count" else None
        finally:
            load_rng(now)

    def _position(self) -> Position:
        return Position(
            epoch=self.epoch,
            batch=self._batch,
            kind=self.kind,
            ranks=world_size(),
            placed=self._is_positioned,
            batch_size=self._batch_size(),
        )

    def _batch_size(self) -> int | None:
        size = getattr(self._loader, "batch_size", None) if self.kind == "count" else None
        return size if isinstance(size, int) else None

    def _check(self, start: Position, *, any_batch_size: bool) -> None:
        if start.kind != self.kind or (self.kind != "formula" and start.ranks != world_size()):
            raise CheckpointError(
                f"cannot resume: the data position was saved with {_KINDS[start.kind]} on {start.ranks} ranks, "
                f"expected {_KINDS[self.kind]} on {world_size()}. Use the loader of the saved run (ResumableLoader "
                "resumes on any number of ranks), or load with load_data_position=False."
            )
        if any_batch_size and self.kind != "formula":
            raise CheckpointError(
                f"cannot resume with load_data_position='samples': the loader is {_KINDS[self.kind]}, expected a "
                "ResumableLoader, which knows the order of all samples. Pass True, and keep the batch size."
            )
        own = self._batch_size()
        if None not in (own, start.batch_size) and own != start.batch_size:
            raise CheckpointError(
                f"cannot resume: the data position was saved with a batch_size of {start.batch_size}, expected {own}, "
                "that of the loader, because its batches are drawn again. Use the batch size of the saved run, or load "
                "with load_data_position=False."
            )

    def _order_sources(self) -> list[Any]:
        """Return the objects that may determine the order of samples: the loader, its data set and its samplers."""
        loader = self._loader
        own = [getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler")]
        return [loader, *own, getattr(own[-1], "sampler", None)]

    def _seed_generators(self, epoch: int) -> None:
        """Seed the generators of a plain loader from their original seeds and the epoch, but not from the rank."""
        seeded: set[int] = set()
        for source in self._order_sources():
            generator = getattr(source, "generator", None)
            if isinstance(generator, torch.Generator) and id(generator) not in seeded:
                seeded.add(id(generator))
                generator.manual_seed(derive_seed(_original_seeds.setdefault(source, generator.initial_seed()), epoch))


def kind_of(loader: Any) -> Kind:
    """Return how a loader resumes; see ``kind`` in `Position`."""
    if hasattr(loader, "check_state"):
        return "formula"
    return "state" if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") else "count"


_KINDS: dict[Kind, str] = {
    "formula": "a ResumableLoader",
    "state": "a loader with state_dict",
    "count": "a loader without state_dict",
}


def _is_positioned_in(source: Any, epoch: int) -> bool:
    """Return whether the caller has positioned a loader or sampler by ``set_epoch(epoch, position)`` in this epoch."""
    set_epoch = getattr(source, "set_epoch", None)
    accepts_position = callable(set_epoch) and len(inspect.signature(set_epoch).parameters) > 1
    return accepts_position and getattr(source, "epoch", None) == epoch


def _with_state(loader: Any, state: Any) -> Loader:
    """Return a proxy of a loader whose ``state_dict`` returns an earlier state."""
    own = {name: getattr(loader, name) for name in ("load_state_dict", "check_state") if hasattr(loader, name)}
    return SimpleNamespace(state_dict=lambda: state, **own)
