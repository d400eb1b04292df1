"""Reduce a unit's gradients correctly if the ranks have used different parameters of it.

Input: the units of a sharded model. Output: hooks that add zero gradients before a reduction, and for the next
optimizer step the parameters whose gradient this rank did not compute.

[Note: missing gradients] In a backward pass, FSDP2 reduces the gradients that exist on this rank, as one flat tensor.
If the ranks have used different parameters of a unit (a head for each robot, experts, optional conditions), these
tensors do not fit together: gradients of different parameters are summed, or the collective fails. So if the backward
of a unit has run, each rank adds zeros for trainable parameters that have no gradient. The result is the gradient of
the unsharded model: a rank that did not use a parameter adds nothing to its gradient.

A parameter that no rank used has no gradient in the unsharded model, and its optimizer skips it. Which parameters these
are is known after an exchange only. So until the optimizer step, their gradients are zeros. (On a CPU, gradients of
zeros are taken away until then. On an accelerator, to look at their values would be a synchronisation.) The all-reduce
of the gradient norm carries for each parameter the number of ranks that used it, several numbers in each element
(`optim.step_sums`), and gradients that no rank has computed are removed before the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.torch_internals import (
    gradient_ranks,
    has_deferred_all_reduce,
    hook_inputs,
    is_gathered_for_backward,
    local_of,
    parameters_of,
    reduce_gradients,
    reduces_gradients,
    set_zero_gradient,
    shard_of,
    trained_parameters_of,
    trained_without_gradient,
    unify_gradient_dtypes,
)
from fsdp2_strategy.model.fsdp_state import parameter_groups
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.model.unit_hooks import register_hook


class _UnitGradients:
    """What is known of the gradients of one unit, until its next reduction."""

    def __init__(self) -> None:
        self.has_run = False
        """Whether the backward of the unit has run since its last reduction."""
        self.unused: set[int] = set()
        """Positions of the parameters whose gradient consists of zeros of this rank only."""
        self.hidden: dict[int, torch.Tensor] = {}
        """Gradients of zeros that were taken from their parameters until the next step, by position."""


_GRADIENTS = Slot[_UnitGradients]("gradients that this rank did not compute")


def fill_missing_gradients(param_groups: Iterable[Any]) -> None:
    """Register hooks that add zeros for missing gradients before each reduction; see [Note: missing gradients]."""
    for param_group in param_groups:
        if gradient_ranks(param_group) > 1:
            own = model_state(param_group).set(_GRADIENTS, _UnitGradients())
            register_hook(param_group, "reduce", "missing gradients", functools.partial(_reduce_all, own))
            register_hook(param_group, "hook inputs for reduce", "missing gradients", _hook_inputs)


def restore_gradient(model: nn.Module, parameter: torch.Tensor) -> None:
    """Give a parameter back its gradient of zeros that was taken from it, because another rank used it."""
    for param_group in parameter_groups(model):
        own = model_state(param_group).get(_GRADIENTS)
        for i, gradient in (own.hidden if own is not None else {}).items():
            if shard_of(parameters_of(param_group)[i]) is parameter:
                parameter.grad = gradient
                return
    parameter.grad = torch.zeros_like(parameter)


def unused_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the sharded parameters whose gradients are zeros because this rank did not use them; not collective."""
    for param_group in parameter_groups(model):
        own = model_state(param_group).get(_GRADIENTS)
        if own is not None and own.unused:
            parameters = parameters_of(param_group)
            yield from (shard_of(parameters[i]) for i in own.unused)


@torch.no_grad()
def _reduce_all(own: _UnitGradients, param_group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    own.has_run |= is_gathered_for_backward(param_group)
    if not (own.has_run and reduces_gradients(param_group)):
        reduce(*unused)
        return
    own.has_run = False
    _add_zeros(own, param_group)
    reduce(*unused)
    _hide_zeros(own, param_group)


def _hide_zeros(own: _UnitGradients, param_group: Any) -> None:
    """Take gradients of zeros from parameters that this rank did not use, on CPUs."""
    parameters = parameters_of(param_group)
    for i in own.unused:
        shard = shard_of(parameters[i])
        if shard.grad is not None and shard.grad.device.type == "cpu" and not local_of(shard.grad).any():
            own.hidden[i], shard.grad = shard.grad, None


def _hook_inputs(param_group: Any, _register: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Register the hook that reduces a unit after the gradients of its inputs.

    FSDP2's own turns a missing gradient into zeros: units before one whose output was not used would count as used.
    """
    return hook_inputs(param_group, _Reduce, args, kwargs)


class _Reduce(torch.autograd.Function):
    """Return tensors unchanged; reduce a unit when their gradients are computed, or are known to be missing."""

    @staticmethod
    def forward(ctx: Any, param_group: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.param_group = param_group
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        reduce_gradients(ctx.param_group)
        return None, *gradients


def _add_zeros(own: _UnitGradients, param_group: Any) -> None:
    is_deferred = has_deferred_all_reduce(param_group)
    parameters = parameters_of(param_group)
    missing = trained_without_gradient(param_group)
    own.unused.intersection_update(missing)
    for i in missing:
        if not is_deferred and shard_of(parameters[i]).grad is None:
            own.unused.add(i)
        set_zero_gradient(parameters[i])
    unify_gradient_dtypes(trained_parameters_of(param_group))
