"""Raise an error if the ranks run different units, instead of hanging in a collective.

Input: a sharded model. Output: an error on every rank that names the unit and the rank.

Before each gather and each reduction, and after each forward pass, a rank writes a note about it to the store of the
process group, and reads the notes of all ranks. If the notes differ, all ranks raise at once. If a rank writes no note
in time, the other ranks raise an error with the last note of that rank. The notes are not exchanged in a collective,
because a collective would hang, too. Each comparison costs a few messages to the store, so the check is meant for
debugging.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
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
from fsdp2_strategy.model.unit_hooks import register_hook

_exchanges = itertools.count()


def detect_divergence(root: nn.Module, seconds: float) -> None:
    """Register hooks that compare which units the ranks gather and reduce; collective.

    Every later forward and backward pass of the model is then collective over all ranks, including replicas.

    Args:
        root: the sharded model.
        seconds: maximum time to wait for the note of a rank before an error is raised.
    """
    exchange = _NoteExchange(seconds)
    names = {module: clean(name) for name, module in root.named_modules()}
    for param_group in parameter_groups(root):
        name = names[module_of(param_group)] or "the root unit"
        register_hook(param_group, "gather", "divergence", functools.partial(_gather, exchange, name))
        register_hook(param_group, "reduce", "divergence", functools.partial(_reduce, exchange, name))
    root.register_forward_hook(lambda *_: exchange.compare("finished its forward pass"))


def _gather(
    exchange: _NoteExchange, name: str, param_group: Any, gather: Callable[..., None], async_op: bool = False
) -> None:
    if not is_gathered(param_group) and gathering_ranks(param_group) > 1:
        exchange.compare(f"gathers {name}")
    gather(async_op)


def _reduce(exchange: _NoteExchange, name: str, param_group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    trained = [p for p in parameters_of(param_group) if shard_of(p).requires_grad]
    missing = [name_of(p) for p in trained if not has_unreduced_gradient(p)]
    if reduces_gradients(param_group) and len(missing) < len(trained):
        # The ranks must also reduce the gradients of the same parameters.
        without = f" without {some(missing, 'gradient')}" if missing else ""
        exchange.compare(f"reduces {name}{without}")
    reduce(*unused)


class _NoteExchange:
    """Exchange notes about one model between all ranks."""

    def __init__(self, seconds: float) -> None:
        prefix = from_rank_0(f"units/{dist.get_rank()}/{next(_exchanges)}")
        self._store = PrefixStore(prefix, default_store())
        self._timeout = timedelta(seconds=seconds)
        self._rank = dist.get_rank(group_in_use())
        self._ranks = range(dist.get_world_size(group_in_use()))
        self._turn = 0

    def compare(self, note: str) -> None:
        """Write a note, wait for the notes of all ranks, and compare them; collective.

        Raises:
            StepError: on every rank, if the notes differ. If a rank wrote no note in time, the other ranks raise, and
                the late rank raises when it arrives.
        """
        turn, self._turn = self._turn, self._turn + 1
        self._store.set(f"last/{self._rank}", note)
        self._store.set(f"{turn}/{self._rank}", note)
        try:
            self._store.wait([f"{turn}/{rank}" for rank in self._ranks], self._timeout)
            outcome = "complete"
        except RuntimeError:  # time-out of the store
            outcome = "timed out"
        # The first rank that gets here decides for all: a late rank finds all notes, but the others have timed out.
        if self._store.add(f"{turn}/claims", 1) == 1:
            self._store.set(f"{turn}/outcome", outcome)
        if self._store.get(f"{turn}/outcome").decode() != "complete":
            raise StepError(self._time_out_text(turn, note))
        notes = [self._store.get(f"{turn}/{rank}").decode() for rank in self._ranks]
        if len(set(notes)) > 1:
            each = ", ".join(f"rank {rank} {text}" for rank, text in enumerate(notes))
            raise StepError(
                f"cannot continue: the ranks run different units: {each}, expected the same unit on every rank. "
                "Compare the batches of the ranks. If only some ranks have images, set mixed_mm_data. If only some "
                "ranks have labels, run the head on all ranks, and multiply the loss by zero on ranks without labels."
            )
        if turn > 1:  # every rank has read the notes of `turn - 2`, because it wrote one for `turn`
            self._store.delete_key(f"{turn - 2}/{self._rank}")
            if self._rank == 0:
                self._store.delete_key(f"{turn - 2}/outcome")
                self._store.delete_key(f"{turn - 2}/claims")

    def _time_out_text(self, turn: int, note: str) -> str:
        missing = [rank for rank in self._ranks if not self._store.check([f"{turn}/{rank}"])]
        last = [
            f"rank {rank} (last: {self._store.get(f'last/{rank}').decode()})"
            if self._store.check([f"last/{rank}"])
            else f"rank {rank} (nothing so far)"
            for rank in missing
        ]
        seconds = f"{self._timeout.total_seconds():g} s"
        if last:
            what = f"within {seconds}, no unit was gathered or reduced by {', '.join(last)}"
            fix = "Find out what the missing ranks run instead."
        else:
            what = f"the other ranks timed out after waiting {seconds} for it"
            fix = "Find out what this rank ran in the meantime."
        return f"cannot continue: rank {self._rank} {note}, but {what}, expected the same unit on every rank. {fix}"
