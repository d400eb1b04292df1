"""Cast the inputs and outputs of modules that compute in another dtype than the modules around them.

Input: a module, and the inputs that a plan casts. Output: hooks that cast.

[Note: inputs] FSDP2 casts every floating input of a unit. A transformers model runs in bf16 without these casts, and
passes some values to its blocks in fp32 on purpose: the rotary tables of a vision encoder, the residual stream of a
state space model. So within a transformers model only the first input of a unit is cast: the hidden state or the
pixels. (Model code casts these to the dtype of a weight, which it sees as the fp32 master weight.) If the configuration
keeps the residual in fp32, no input of a block is cast. The results are bitwise equal to those of the unsharded bf16
model. All inputs are cast for the root, for units outside of transformers models, and in models with several compute
dtypes, so that for example an fp32 buffer that was added to a hidden state does not raise.
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
    """Return which inputs of a unit must be cast; see [Note: inputs]."""
    around = tree.transformers_around(module)
    if not all(around):
        return "all"
    fp32_residual = all(getattr(getattr(m, "config", None), "residual_in_fp32", False) for m, *_ in around)
    return "none" if fp32_residual and kind == "block" else "first"


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast all floating inputs of a module's forward to one dtype, as FSDP2 does for a unit."""
    module.register_forward_pre_hook(lambda _, args, kwargs: cast_floating((args, kwargs), dtype), with_kwargs=True)


def cast_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast all floating outputs of a module's forward to one dtype, as FSDP2 does for a unit."""
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
