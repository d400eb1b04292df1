"""Raise an error if the ranks run different units, instead of hanging in a collective.

Input: a sharded model. Output: an error on every rank that names the unit and the rank.

Before each gather and each reduction, a rank writes a note to the store of the process group and reads the notes of the
other ranks. If they differ, all ranks raise at once. If a rank writes none in time, the other ranks raise an error with
its last note. Notes use the store because a collective would hang, too. This costs a few messages per unit, so it is
meant for debugging.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from fsdp2_strategy.distributed.agreement import from_rank_0
from fsdp2_strategy.distributed.process_group import group_in_use
from fsdp2_strategy.distributed.torch_internals import (
    default_store,
    gathering_ranks,
    has_unreduced_gradient,
    is_gathered,
    module_of,
    name_of,
    parameters_of,
    reduces_gradients,
    shard_of,
)
from fsdp2_strategy.errors import StepError, some
from fsdp2_strategy.model.fsdp_state import parameter_groups
from fsdp2_strategy.model.names import clean
from fsdp2_strategy.model.unit_hooks import hang

_watches = itertools.count()


def watch_units(units: Mapping[nn.Module, str], seconds: float) -> None:
    """Compare what the ranks gather and reduce from now on; collective, as is every later forward pass.

    Args:
        units: the modules that FSDP2 shards, and their names; the root must be one of them.
        seconds: how long to wait for a rank before it is reported as missing.
    """
    (root,) = (module for module, name in units.items() if not name)
    watch = _Watch(seconds)
    names = {module: clean(name) for name, module in root.named_modules()}
    for record in parameter_groups(root):
        name = names[module_of(record)] or "the root unit"
        hang(record, "gather", "divergence", functools.partial(_gather, watch, name))
        hang(record, "reduce", "divergence", functools.partial(_reduce, watch, name))
    root.register_forward_hook(lambda *_: watch.meet("is through with its forward pass"))


def _gather(watch: _Watch, name: str, record: Any, gather: Callable[..., None], async_op: bool = False) -> None:
    if not is_gathered(record) and gathering_ranks(record) > 1:
        watch.meet(f"gathers {name}")
    gather(async_op)


def _reduce(watch: _Watch, name: str, record: Any, reduce: Callable[..., None], *unused: Any) -> None:
    trained = [p for p in parameters_of(record) if shard_of(p).requires_grad]
    lacking = [name_of(p) for p in trained if not has_unreduced_gradient(p)]
    if reduces_gradients(record) and len(lacking) < len(trained):
        # The ranks must also reduce the gradients of the same parameters.
        without = f" without {some(lacking, 'gradient')}" if lacking else ""
        watch.meet(f"reduces {name}{without}")
    reduce(*unused)


class _Watch:
    """Exchanges notes about one model between all ranks."""

    def __init__(self, seconds: float) -> None:
        named = from_rank_0(f"units/{dist.get_rank()}/{next(_watches)}")
        self._store = PrefixStore(named, default_store())
        self._timeout = timedelta(seconds=seconds)
        self._rank = dist.get_rank(group_in_use())
        self._ranks = range(dist.get_world_size(group_in_use()))
        self._met = 0

    def meet(self, note: str) -> None:
        """Write a note and wait for those of all ranks; collective.

        Raises:
            StepError: the notes differ, or a rank wrote none in time; raised on every rank.
        """
        turn, self._met = self._met, self._met + 1
        self._store.set(f"last/{self._rank}", note)
        self._store.set(f"{turn}/{self._rank}", note)
        try:
            self._store.wait([f"{turn}/{rank}" for rank in self._ranks], self._timeout)
            verdict = "met"
        except RuntimeError:  # the store's time-out
            verdict = "given up"
        # The first rank to arrive here decides for all: a late rank must not accept the notes of ranks that gave up.
        if self._store.add(f"{turn}/claims", 1) == 1:
            self._store.set(f"{turn}/verdict", verdict)
        if self._store.get(f"{turn}/verdict").decode() != "met":
            raise StepError(self._who_is_missing(turn, note))
        notes = [self._store.get(f"{turn}/{rank}").decode() for rank in self._ranks]
        if len(set(notes)) > 1:
            each = ", ".join(f"rank {rank} {text}" for rank, text in enumerate(notes))
            raise StepError(
                f"cannot go on: the ranks run different units: {each}, expected the same on each. Look at what differs "
                "between their batches; for images on some ranks only there is mixed_mm_data, and a head runs where "
                "there are no labels, too, its loss times zero."
            )
        if turn > 1:  # every rank has read the notes of two turns ago
            self._store.delete_key(f"{turn - 2}/{self._rank}")
            if self._rank == 0:
                self._store.delete_key(f"{turn - 2}/verdict")
                self._store.delete_key(f"{turn - 2}/claims")

    def _who_is_missing(self, turn: int, note: str) -> str:
        missing = [rank for rank in self._ranks if not self._store.check([f"{turn}/{rank}"])]
        last = [
            f"rank {rank} {self._store.get(f'last/{rank}').decode()} and has not come since"
            if self._store.check([f"last/{rank}"])
            else f"rank {rank} has not begun"
            for rank in missing
        ]
        return (
            f"cannot go on: rank {self._rank} {note}, and in {self._timeout.total_seconds():g} s not every rank came: "
            f"{', '.join(last) or 'the others gave up before'}, expected the same units on each. Look at what that "
            "rank does instead."
        )
