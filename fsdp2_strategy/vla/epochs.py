"""Epochs over any loader that go on exactly where a checkpoint left them, also in the middle of an accumulation.

Input: a loader. Output: its batches, epoch after epoch, and how far the run is at its last optimizer step.

[Note: position] Gradients of micro-batches that no step has used yet are not in a checkpoint. So where one is saved
between two steps, at an epoch's end, it holds data position and random state of the step before, and the run that goes
on computes those micro-batches again.

[Note: plain loaders] A loader that knows its place (ResumableLoader, or one with ``state_dict``) goes on there. Any
other is begun again in its epoch, under a random state that follows from seed, rank and epoch alone, and its batches
are drawn up to that place and thrown away. Workers that would live on from epoch to epoch are started anew.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from fsdp2_strategy.checkpoint import Loader
from fsdp2_strategy.checkpoint.random_state import forked_rng, load_rng, rng_content
from fsdp2_strategy.distributed.agreement import all_or_none, any_rank
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.process_group import rank, world_size
from fsdp2_strategy.distributed.torch_internals import forget_workers
from fsdp2_strategy.errors import CheckpointError, DataError

Kind = Literal["formula", "state", "count"]


@dataclass(frozen=True, kw_only=True)
class Position:
    """Say how far a run is in its data, as JSON holds it."""

    epoch: int
    batch: int
    """Micro-batches of that epoch that are done."""
    kind: Kind
    """What knows its place: the loader by a formula, the loader by a state of each rank, or this count alone."""
    ranks: int
    placed: bool = False
    """Whether the caller had brought a sampler to its place in that epoch, from where ``batch`` counts."""

    def as_json(self) -> dict[str, Any]:
        """Return it for a checkpoint."""
        return asdict(self)


_END = object()

# What the generators of plain loaders and samplers were seeded with before they were seeded here.
_first_seeds: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class Epochs:
    """Draw the batches of epoch after epoch; every rank does the same.

    Args:
        loader: any iterable of batches; see [Note: plain loaders].
        seed: of the order of plain loaders.
        start: where to go on; a loader that knows its place is there already.
        epoch: where to begin otherwise.
        may_be_placed: whether the caller may have brought a sampler to its place in that epoch.
        keeps_marks: whether steps are of several micro-batches, so that a save may have to go back to the last one.

    Raises:
        CheckpointError: the position is that of another kind of loader, or of another number of ranks.
    """

    def __init__(
        self, loader: Any, *, seed: int, start: Position | None, epoch: int, may_be_placed: bool, keeps_marks: bool
    ) -> None:
        self._loader, self._seed, self._keeps_marks = loader, seed, keeps_marks
        self.kind: Kind = kind_of(loader)
        if start is not None:
            self._check(start)
        self._start = start
        self._must_be_placed = start is not None and start.placed
        self._may_be_placed, self._is_placed = may_be_placed or self._must_be_placed, self._must_be_placed
        self.epoch, self._batch = (start.epoch, start.batch) if start else (epoch, 0)
        self._marked: tuple[Position, bytes, Any] | None = None
        self.mark()

    def batches(self, epoch: int) -> Iterator[Any]:
        """Give what is left of an epoch; collective, batch by batch.

        Raises:
            DataError: on every rank: the loader fails, gives nothing, has batches left on some ranks alone, or is not
                where the caller had brought it before.
        """
        goes_on = self._start is not None and self._start.epoch == epoch and self._batch > 0
        self.epoch, self._batch, self._start = epoch, self._batch if goes_on else 0, None
        if goes_on and getattr(self._loader, "at_epoch_end", False):
            return
        with all_or_none(f"begin epoch {epoch}", DataError):
            drawn = self._begin(epoch, goes_on=goes_on)
        while True:
            with all_or_none("draw a batch", DataError):
                batch = next(drawn, _END)
                if batch is _END and not self._batch:
                    raise DataError(
                        f"cannot train: the {type(self._loader).__name__} gives no batch in epoch {epoch}, expected "
                        "some. Give a loader that begins anew with each epoch, not an iterator."
                    )
            if self._has_ended(batch is _END):
                return
            self._batch += 1
            yield batch

    def _begin(self, epoch: int, *, goes_on: bool) -> Iterator[Any]:
        parts = self._parts()
        self._is_placed = self._may_be_placed and any(_stands_in(part, epoch) for part in parts)
        if self._must_be_placed and not self._is_placed:
            raise DataError(
                f"cannot go on in epoch {epoch}: the caller had brought its sampler to a place before, not now, "
                "expected the same. Call its set_epoch(epoch, place), or load with load_data_position=False."
            )
        self._may_be_placed = self._must_be_placed = False
        for part in parts:
            stays = self._is_placed and _stands_in(part, epoch)
            if callable(set_epoch := getattr(part, "set_epoch", None)) and not stays:
                set_epoch(epoch)
        with forked_rng(_hashed(self._seed, rank(), epoch)):
            if self.kind == "count":
                self._seed_generators(epoch)
                if getattr(self._loader, "persistent_workers", False):
                    forget_workers(self._loader)  # workers that live on are in a state that no resume brings back
            drawn = iter(self._loader)
            if self.kind == "count" and self._batch and not self._is_placed:
                log("drawing %d batches of epoch %d again, to go on behind them", self._batch, epoch)
                for _ in islice(drawn, self._batch):
                    pass
            # Samplers draw their order with the first batch.
            return drawn if goes_on else chain(list(islice(drawn, 1)), drawn)

    def _has_ended(self, here: bool) -> bool:
        """Say whether an epoch is through, alike on all ranks; a formula is alike by itself."""
        if self.kind == "formula" or not any_rank(here):
            return here
        if any_rank(not here):
            raise DataError(
                f"cannot go on: after {self._batch} batches of epoch {self.epoch} some ranks have none left and others "
                "have, expected as many on every rank. Use ResumableLoader, or a sampler that gives ranks the same."
            )
        return True

    def mark(self) -> None:
        """Say that an optimizer step ends here: what is saved from now on goes on here."""
        if self._keeps_marks:
            state = copy.deepcopy(self._loader.state_dict()) if self.kind != "count" else None
            self._marked = (self._position(), rng_content(), state)

    def end_epoch(self) -> None:
        """Say that the epoch has ended with nothing pending: the run goes on with the next."""
        self.epoch, self._batch, self._is_placed = self.epoch + 1, 0, False
        self.mark()

    @contextmanager
    def as_marked(self) -> Iterator[tuple[Position, Loader | None]]:
        """Bring the random state to that of the mark; give position and loader as they were there."""
        if self._marked is None:
            yield self._position(), self._loader if self.kind != "count" else None
            return
        position, rng, state = self._marked
        now = rng_content()
        load_rng(rng)
        try:
            yield position, _at(self._loader, state) if self.kind != "count" else None
        finally:
            load_rng(now)

    def _position(self) -> Position:
        return Position(epoch=self.epoch, batch=self._batch, kind=self.kind, ranks=world_size(), placed=self._is_placed)

    def _check(self, start: Position) -> None:
        if start.kind != self.kind or (self.kind != "formula" and start.ranks != world_size()):
            raise CheckpointError(
                f"cannot go on in the data: the position is that of {_KINDS[start.kind]} on {start.ranks} ranks, "
                f"expected {_KINDS[self.kind]} on {world_size()}. Use the loader of the run that goes on "
                "(ResumableLoader goes on at any number of ranks), or load with load_data_position=False."
            )

    def _parts(self) -> list[Any]:
        """Return a loader, and what of it may decide its order."""
        loader = self._loader
        own = [getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler")]
        return [loader, *own, getattr(own[-1], "sampler", None)]

    def _seed_generators(self, epoch: int) -> None:
        """Seed the generators that a plain loader was given; those that were alike on all ranks stay so."""
        seeded: set[int] = set()
        for part in self._parts():
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator) and id(generator) not in seeded:
                seeded.add(id(generator))
                generator.manual_seed(_hashed(_first_seeds.setdefault(part, generator.initial_seed()), epoch))


def kind_of(loader: Any) -> Kind:
    """Say what knows how far a loader is."""
    if hasattr(loader, "check_state"):
        return "formula"
    return "state" if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") else "count"


_KINDS: dict[Kind, str] = {
    "formula": "a ResumableLoader",
    "state": "a loader with state_dict",
    "count": "a loader without state_dict",
}


def _stands_in(part: Any, epoch: int) -> bool:
    """Say whether a part of a loader is in an epoch, at a place that it was told of."""
    set_epoch = getattr(part, "set_epoch", None)
    takes_a_place = callable(set_epoch) and len(inspect.signature(set_epoch).parameters) > 1
    return takes_a_place and getattr(part, "epoch", None) == epoch


def _at(loader: Any, state: Any) -> Loader:
    """Return what stands for a loader as it was."""
    own = {name: getattr(loader, name) for name in ("load_state_dict", "check_state") if hasattr(loader, name)}
    return SimpleNamespace(state_dict=lambda: state, **own)


def _hashed(*parts: int) -> int:
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
