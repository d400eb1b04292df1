"""Gradients: clear all that FSDP2 keeps, and average those of parameters that are not sharded.

Input: a model or a parameter. Output: the model without gradients; the parameter with an all-reduce hook.
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
    """Clear all gradients, also those that FSDP2 keeps between micro-batches; not collective.

    `zero_grad` does not clear them: accumulation without communication keeps unsharded gradients in ``FSDPParam``, and
    a deferred all-reduce keeps reduce-scattered gradients in ``FSDPParamGroup``.
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
    """Register a hook that averages the gradient of an unsharded parameter over the ranks; not collective.

    The ranks are those of the group in use at this call. Each backward pass adds an averaged gradient, so accumulation
    needs no extra step. A parameter that is not floating-point gets no hook.
    """
    if not parameter.is_floating_point():
        return
    group = group_in_use()  # autograd may run the hook on a thread without it

    def average(grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total, group=group)
        return total / dist.get_world_size(group)

    trained = parameter.requires_grad
    parameter.requires_grad_(True).register_hook(average)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trained)  # a frozen parameter may be trained later
