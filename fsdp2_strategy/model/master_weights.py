"""Register the optimizers that keep fp32 master weights, and find the master weights of a model.

Input: optimizers that register at construction. Output: the master weights of a model. They can be refreshed after new
weights were loaded into the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp2_strategy.model.placeholders import values_of

MASTER = "master"
"""Key of the fp32 master weights in the optimizer's state of a parameter."""

_optimizers: WeakSet[Optimizer] = WeakSet()


def register_masters(optimizer: Optimizer) -> None:
    """Register an optimizer, by a weak reference, so that `masters_of` and `refresh_masters_of` find it."""
    _optimizers.add(optimizer)


def masters_of(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return the fp32 master weights of a model's parameters, by the ``id`` of the parameter; not collective."""
    return {id(parameter): master for parameter, master in _parameters_with_masters(model)}


@torch.no_grad()
def refresh_masters_of(model: nn.Module) -> None:
    """Copy a model's parameters into their master weights, after new weights were loaded; not collective."""
    for parameter, master in _parameters_with_masters(model):
        values_of(master).copy_(values_of(parameter))


def _parameters_with_masters(model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in list(_optimizers):
        for parameter, state in optimizer.state.items():
            if id(parameter) in own and MASTER in state:
                yield parameter, state[MASTER]
