"""Clear all gradients of a model, and average the gradients of parameters that are not sharded.

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
    shard_of,
    unsharded_of,
)
from fsdp2_strategy.model.fsdp_state import parameter_groups


def clear_gradients(model: nn.Module) -> None:
    """Clear all gradients, including gradients that FSDP2 keeps between micro-batches; not collective.

    FSDP2 keeps gradients that ``zero_grad`` does not clear. Accumulation without communication keeps unsharded
    gradients in ``FSDPParam``. A deferred all-reduce keeps reduce-scattered gradients in ``FSDPParamGroup``.
    """
    for parameter in model.parameters():
        parameter.grad = None
    for param_group in parameter_groups(model):
        drop_deferred_all_reduce(param_group)
        for parameter in parameters_of(param_group):
            drop_accumulated_gradient(parameter)
            shard_of(parameter).grad = None  # not a parameter of the model while the unit is gathered
            if (unsharded := unsharded_of(parameter)) is not None:
                unsharded.grad = None


def average_gradient(parameter: nn.Parameter) -> None:
    """Register a hook that averages the gradient of an unsharded parameter over the ranks; not collective.

    The hook all-reduces over the group in use at the time of this call. Each backward pass adds an averaged gradient,
    so accumulation needs no extra step. A parameter that is not floating-point gets no hook.
    """
    if not parameter.is_floating_point():
        return
    group = group_in_use()  # autograd may run the hook on a thread that has no group in use

    def average(grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total, group=group)
        return total / dist.get_world_size(group)

    trained = parameter.requires_grad
    parameter.requires_grad_(True).register_hook(average)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trained)  # frozen parameters get a hook too: they may be trained later
