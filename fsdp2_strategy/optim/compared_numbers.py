"""Compare the numbers of an optimizer step between the ranks, in the all-reduce of its gradient norm.

Input: the arguments and hyper-parameters that a rank uses in a step. Output: the numbers that the all-reduce carries,
and an error on every rank if a rank uses other values. Otherwise each rank would update its shards in its own way, and
nothing would show it: norm and loss are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fsdp2_strategy.distributed.equal_values import is_equal
from fsdp2_strategy.distributed.process_group import group_in_use, ranks_of, world_size
from fsdp2_strategy.errors import StepError
from fsdp2_strategy.optim.accumulation import Accumulation

_DIGITS = 9
"""Schedules may compute rates with another mathematical library on another host: their last digits may differ."""


def numbers_of_step(own: Accumulation, optimizer: Optimizer | None, max_norm: float) -> dict[str, object]:
    """Return the numbers that must be equal on all ranks in an optimizer step, by their names; not collective."""
    numbers: dict[str, object] = {
        "max_norm": _rounded(max_norm),
        "num_items_in_batch": own.sums.passed_items,
        "the number of micro-batches": own.size_of_step,
        "the number of backward passes": (own.micro_batches, own.backward_passes),
    }
    for index, group in enumerate([] if optimizer is None else optimizer.param_groups):
        name = f"parameter group {index} ({group.get('name', 'no name')})"
        numbers |= {f"{key} of {name}": _rounded(value) for key, value in group.items() if _is_compared(key, value)}
    return numbers


def check_equal_numbers(sums: Sequence[float], numbers: Mapping[str, object]) -> None:
    """Raise on every rank if the sums of their digests show that numbers differ; collective only in that case."""
    if is_equal(sums, world_size()):
        return
    of_ranks: list[Mapping[str, object]] = [numbers] * world_size()
    dist.all_gather_object(of_ranks, numbers, group=group_in_use())
    names = list(dict.fromkeys(name for each in of_ranks for name in each))
    first = next(name for name in names if len({repr(each.get(name)) for each in of_ranks}) > 1)
    ranks = ranks_of(group_in_use())
    values = [f"{_shown(each.get(first))} on rank {rank}" for rank, each in zip(ranks, of_ranks, strict=True)]
    error = StepError(
        f"cannot step: {first} is {', '.join(values[:8])}{', …' if len(values) > 8 else ''}, expected the same on all "
        f"ranks. {_FIXES.get(first, 'Start all ranks with the same settings.')}"
    )
    error.is_agreed = True
    raise error


_FIXES = {
    "num_items_in_batch": "Sum the number of items over all ranks before you pass it, for example with "
    "strategy.all_reduce(items, 'sum'); or pass num_items, which each rank counts for itself.",
    "the number of micro-batches": "Declare the same number of micro-batches on all ranks.",
    "the number of backward passes": "Call backward equally often on all ranks, also if a rank has no data.",
}


def _is_compared(key: str, value: object) -> bool:
    if key == "params" or isinstance(value, str):
        return False
    return isinstance(value, int | float | tuple | list | torch.Tensor) or value is None


def _rounded(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            return None  # reading a value of an accelerator would synchronise with it
        value = value.item()
    if isinstance(value, tuple | list):
        return tuple(_rounded(each) for each in value)
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        different = list(dict.fromkeys(value))
        return str(different[0]) if len(different) == 1 else str(value)
    return str(value)
