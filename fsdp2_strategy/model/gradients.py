"""Gradients: dropped wherever FSDP2 keeps them, and averaged over the ranks where a parameter is not sharded.

Input: a model, a parameter. Output: gradients cleared; a hook that averages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from fsdp2_strategy.distributed.process_group import group_in_use
from fsdp2_strategy.distributed.torch_internals import (
    drop_accumulated_gradient,
    drop_deferred_all_reduce,
    parameters_of,
    unsharded_of,
)
from fsdp2_strategy.model.fsdp_state import parameter_groups


def clear_gradients(model: nn.Module) -> None:
    """Drop all gradients, also those that FSDP2 holds back between micro-batches; not collective.

    Accumulation without communication keeps unsharded sums on FSDP2's parameters, and a deferred all-reduce keeps
    reduced ones on its groups: `zero_grad` sees neither.
    """
    for parameter in model.parameters():
        parameter.grad = None
    for record in parameter_groups(model):
        drop_deferred_all_reduce(record)
        for parameter in parameters_of(record):
            drop_accumulated_gradient(parameter)
            if (unsharded := unsharded_of(parameter)) is not None:
                unsharded.grad = None


def average_gradient(parameter: nn.Parameter) -> None:
    """Let a parameter that every rank holds whole add the same averaged gradient everywhere.

    So accumulation over micro-batches needs no further care. Those ranks are the group in use now. One that can have no
    gradient is left alone.
    """
    if not parameter.is_floating_point():
        return
    group = group_in_use()  # a backward pass may run on threads that know none

    def average(grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total, group=group)
        return total / dist.get_world_size(group)

    trained = parameter.requires_grad
    parameter.requires_grad_(True).register_hook(average)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trained)  # one that is frozen now may be trained later
