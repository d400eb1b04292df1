"""Choose which inputs of units and ignored modules are cast, and register hooks for casts that FSDP2 does not make.

Input: a module and a dtype. Output: the choice which inputs to cast, for `plan`; and hooks that cast.

[Note: inputs] By default, FSDP2 casts every floating input of a unit. A transformers model runs in bf16 without these
casts, and passes some values to its blocks in fp32 on purpose: the rotary tables of a vision encoder, or the residual
stream of a state space model. So within a transformers model, only the first floating input of a unit is cast: the
hidden state or the pixels. This cast is necessary because model code casts pixels to the dtype of a weight that is not
gathered yet, which is fp32 in training. If ``residual_in_fp32`` is set in the model's configuration, no input of a
block is cast. The results are bitwise equal to those of the unsharded bf16 model.

All floating inputs are cast for the root, for units outside of transformers models, and for all units of a model with
several compute dtypes. Otherwise, an fp32 input other than the first, such as a buffer, could raise an error in a unit
that computes in half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from fsdp2_strategy.distributed.torch_internals import cast_floating
from fsdp2_strategy.sharding.module_tree import ModuleTree

CastInputs = Literal["all", "first", "none"]
"""Which floating inputs of a unit are cast."""


def inputs_to_cast(tree: ModuleTree, module: nn.Module, kind: str) -> CastInputs:
    """Return which floating inputs of a unit must be cast; see [Note: inputs]."""
    around = tree.transformers_around(module)
    if not all(around):
        return "all"
    fp32_residual = all(getattr(getattr(m, "config", None), "residual_in_fp32", False) for m, *_ in around)
    return "none" if fp32_residual and kind == "block" else "first"


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Register a hook that casts all floating inputs of a module's forward, as FSDP2 does for a unit."""
    module.register_forward_pre_hook(lambda _, args, kwargs: cast_floating((args, kwargs), dtype), with_kwargs=True)


def cast_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Register a hook that casts all floating outputs of a module's forward, as FSDP2 does for a unit."""
    module.register_forward_hook(lambda _module, _inputs, output: cast_floating(output, dtype))


def cast_first(dtype: torch.dtype) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return a hook that casts the first floating input of a module; see [Note: inputs]."""

    def cast(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for i, value in enumerate(args):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return (*args[:i], value.to(dtype), *args[i + 1 :]), kwargs
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return args, {**kwargs, name: value.to(dtype)}
        return args, kwargs

    return cast
