"""Registry of the optimizers that keep fp32 master weights.

Input: such optimizers, registered at construction. Output: the master weights of a model, which can also be refreshed
after new weights were loaded into the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

MASTER = "master"
"""Key of the fp32 master weights in the optimizer's state of a parameter."""


class KeepsMasters(Protocol):
    """An optimizer that keeps fp32 master weights in its state."""

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The optimizer's state of each parameter."""

    def refresh_masters(self, own: Collection[int] | None = None) -> None:
        """Copy the parameters into their master weights; ``own``: the ``id`` of each parameter, None for all."""


_alive: WeakSet[Any] = WeakSet()


def register_masters(optimizer: KeepsMasters) -> None:
    """Register an optimizer for `masters_of` and `refresh_masters_of`, by a weak reference."""
    _alive.add(optimizer)


def masters_of(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return the fp32 master weights of a model's parameters, by the ``id`` of the parameter; not collective."""
    own = {id(parameter) for parameter in model.parameters()}
    return {
        id(parameter): state[MASTER]
        for optimizer in list(_alive)
        for parameter, state in optimizer.state.items()
        if id(parameter) in own and MASTER in state
    }


def refresh_masters_of(model: nn.Module) -> None:
    """Copy a model's parameters into their master weights, after new weights were loaded; not collective."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in list(_alive):
        optimizer.refresh_masters(own)
