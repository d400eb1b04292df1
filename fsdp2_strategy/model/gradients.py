"""Clear all gradients of a model, and average the gradients of parameters that are not sharded.

Input: a model and its parameters. Output: the model without gradients; hooks that average gradients over the ranks.

[Note: replicated gradients] FSDP2 does not reduce the gradients of parameters that are not sharded: ignored modules,
and parameters without dimensions. A hook on each of these parameters collects its gradients. At the end of the backward
pass, one all-reduce averages all of them, with zeros for parameters that this rank did not use. So the ranks may use
different ones of these parameters, in any order. A parameter that no rank used gets a gradient of zeros, too, until the
optimizer step: see [Note: missing gradients] in `sharding.missing_gradients`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp2_strategy.distributed.process_group import group_in_use
from fsdp2_strategy.distributed.torch_internals import (
    drop_deferred_all_reduce,
    drop_unreduced_gradient,
    fsdp_state_of,
    parameters_of,
    run_after_backward,
    shard_of,
)
from fsdp2_strategy.model.fsdp_state import parameter_groups
from fsdp2_strategy.model.state import Slot, model_state

_MAY_BE_UNEQUAL = Slot[bool]("unequal gradients")


def set_unequal_gradients(model: nn.Module) -> None:
    """Store that micro-batches of a sharded model may have gradients of different parameters; not collective."""
    model_state(model).set(_MAY_BE_UNEQUAL, True)


def may_have_unequal_gradients(model: nn.Module) -> bool:
    """Return whether micro-batches of a sharded model may have gradients of different parameters."""
    return model_state(model).get(_MAY_BE_UNEQUAL) is True


def clear_gradients(model: nn.Module) -> None:
    """Clear all gradients, including those that FSDP2 keeps between micro-batches; not collective.

    ``zero_grad`` clears neither unsharded gradients (``FSDPParam``) nor those of a deferred all-reduce.
    """
    for parameter in model.parameters():
        parameter.grad = None
    for param_group in parameter_groups(model):
        drop_deferred_all_reduce(param_group)
        for parameter in parameters_of(param_group):
            drop_unreduced_gradient(parameter)
            shard_of(parameter).grad = None  # not a parameter of the model while the unit is gathered
    if (replicated := replicated_gradients(model)) is not None:
        replicated.forget()


class ReplicatedGradients:
    """Average the gradients of parameters that every rank holds in full; see [Note: replicated gradients].

    The group of ranks is stored: autograd may run on a thread that has no group in use.
    """

    def __init__(self, ranks: dist.ProcessGroup | None) -> None:
        self._ranks = ranks
        self._parameters: list[nn.Parameter] = []
        self._own: dict[int, torch.Tensor] = {}
        """The gradients of the running backward pass, not averaged yet, by position."""
        self.unused: set[int] = set()
        """Positions of the parameters whose gradient consists of zeros of this rank only."""

    def add(self, parameter: nn.Parameter, *, instead_of: torch.Tensor | None = None) -> None:
        """Average a parameter's gradients from now on; it may take the place of one that was on the meta device."""
        if not parameter.is_floating_point():
            return
        places = [i for i, other in enumerate(self._parameters) if other is instead_of]
        place = places[0] if places else len(self._parameters)
        self._parameters[place : place + 1] = [parameter]
        trained = parameter.requires_grad
        parameter.requires_grad_(True).register_hook(functools.partial(self._collect, place))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trained)  # frozen parameters get a hook too: they may be trained later

    def _collect(self, place: int, gradient: torch.Tensor) -> torch.Tensor:
        own = self._own.get(place)
        self._own[place] = gradient.clone() if own is None else own + gradient
        return torch.zeros_like(gradient)

    def forget(self) -> None:
        """Drop the gradients of a backward pass that did not end."""
        self._own.clear()

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are zeros because this rank did not use them."""
        return [self._parameters[i] for i in self.unused]

    @torch.no_grad()
    def average(self) -> None:
        """Add the averages of this backward pass to the gradients; collective, one all-reduce for each dtype."""
        own, self._own = self._own, {}
        by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
        for i, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                by_dtype[parameter.dtype].append(i)
                if i in own:
                    self.unused.discard(i)
                elif parameter.grad is None:
                    self.unused.add(i)
        for places in by_dtype.values():
            gradients = [own[i] if i in own else torch.zeros_like(self._parameters[i]) for i in places]
            total = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(total, group=self._ranks)
            total /= dist.get_world_size(self._ranks)
            averages = torch.split(total, [gradient.numel() for gradient in gradients])
            for i, average in zip(places, averages, strict=True):
                parameter = self._parameters[i]
                if i in self.unused and parameter.device.type == "cpu" and not average.any():
                    continue  # as for sharded parameters, see [Note: missing gradients]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad += average.view_as(parameter)


_REPLICATED = Slot[ReplicatedGradients]("gradients of parameters that are not sharded")


def average_gradients(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Average the gradients of a root's parameters that are not sharded, in each backward pass; not collective."""
    gradients = model_state(model).set(_REPLICATED, ReplicatedGradients(group_in_use()))
    for parameter in parameters:
        gradients.add(parameter)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # the unit whose backward begins first ends the pass, usually the root
            run_after_backward(fsdp_state_of(module), gradients.average)


def replicated_gradients(model: nn.Module) -> ReplicatedGradients | None:
    """Return what averages the gradients of a root's parameters that are not sharded; None if all are sharded."""
    return model_state(model).get(_REPLICATED)
