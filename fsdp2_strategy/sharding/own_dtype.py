"""Cast the inputs of a module to the dtype of its weights, where torch would raise an error for another dtype.

Input: a module that gets inputs; see [Note: fp32 inputs] in `bypassed_units`. Output: the inputs, cast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.torch_internals import CONVOLUTIONS

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]

# Modules that raise an error if the dtype of an input differs from the dtype of their parameters.
_NEEDS_OWN_DTYPE = (
    *(nn.Linear, nn.Bilinear, *CONVOLUTIONS, nn.MultiheadAttention, nn.LayerNorm, nn.GroupNorm),
    *(nn.RNNBase, nn.RNNCellBase, nn.PReLU, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)


def needs_own_dtype(module: nn.Module) -> bool:
    """Return whether a module raises an error for inputs of another dtype than its weights."""
    return isinstance(module, _NEEDS_OWN_DTYPE)


def cast_to_own(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inputs | None:
    """Cast floating inputs to the dtype of a module's weights, unless autocast is enabled; a forward pre-hook."""
    parameter = next(module.parameters(), None)
    if parameter is None or torch.is_autocast_enabled(parameter.device.type):
        return None
    return cast_inputs_to(parameter.dtype, args, kwargs)


def cast_inputs_to(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inputs | None:
    """Return the inputs with all floating tensors cast to ``dtype``; None if no tensor has another dtype."""

    def differs(value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype != dtype and value.is_floating_point()

    if not any(map(differs, args)) and not any(map(differs, kwargs.values())):
        return None
    named = {name: value.to(dtype) if differs(value) else value for name, value in kwargs.items()}
    return tuple(value.to(dtype) if differs(value) else value for value in args), named
