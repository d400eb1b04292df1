"""fp32 masters of a model's parameters, wherever optimizers keep them.

Input: optimizers that keep masters, as they are made. Output: the masters of a model; masters refreshed after its
weights came from elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

MASTER = "master"
"""Key of a master in the optimizer's state of its parameter."""


class KeepsMasters(Protocol):
    """An optimizer that keeps fp32 masters in its state."""

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The optimizer's state of each parameter."""

    def refresh_masters(self, own: Collection[int] | None = None) -> None:
        """Take the masters' values from the parameters; ``own``: identities of those that are meant, None for all."""


_alive: WeakSet[Any] = WeakSet()


def register_masters(optimizer: KeepsMasters) -> None:
    """Register an optimizer for `masters_of` and `refresh_masters_of`, as long as it lives."""
    _alive.add(optimizer)


def masters_of(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return the fp32 masters that optimizers keep of a model's parameters, by the identity of the parameter."""
    own = {id(parameter) for parameter in model.parameters()}
    return {
        id(parameter): state[MASTER]
        for optimizer in list(_alive)
        for parameter, state in optimizer.state.items()
        if id(parameter) in own and MASTER in state
    }


def refresh_masters_of(model: nn.Module) -> None:
    """Note that a model's weights came from elsewhere: masters of them take their values; not collective."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in list(_alive):
        optimizer.refresh_masters(own)
