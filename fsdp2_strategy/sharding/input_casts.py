"""Choose which inputs of units and ignored modules are cast, and register hooks for casts that FSDP2 does not make.

Input: a module and a dtype. Output: the choice which inputs to cast, for `plan`; and hooks that cast.

[Note: inputs] By default, FSDP2 casts every floating input of a unit. A transformers model runs in bf16 without these
casts, and passes some values to its blocks in fp32 on purpose: the rotary tables of a vision encoder, or the residual
stream of a state space model. So within a transformers model, only the first floating input of a unit is cast: the
hidden state or the pixels. This cast is necessary because model code casts pixels to the dtype of a weight that is not
gathered yet, which is fp32 in training. If ``residual_in_fp32`` is set in the model's configuration, no input of a
block is cast. The results are bitwise equal to those of the unsharded bf16 model.

All floating inputs are cast for units outside of transformers models, and for all units of a model with several compute
dtypes. Otherwise, an fp32 input other than the first, such as a buffer, could raise an error in a unit that computes in
half precision. Exceptions are numbers of a sample (tensors with fewer than two dimensions, such as time steps or
advantages): bf16 would round the time step 998.4 to 1000.

[Note: inputs of the model] The inputs of a model are of all kinds: pixels and states, but also actions, noise, time
steps and advantages, whose values and losses need fp32. So in half precision they are not cast when the model is
called, but where they meet a weight: the modules of the root unit cast their inputs if they need the dtype of their
weights ([Note: fp32 inputs] in `bypassed_units`), and the other units cast theirs. There are three exceptions, in which
inputs with two or more dimensions are cast at once, except those whose names say that they are for the loss or a time:
  - a model of transformers, also within another model, whose code compares dtypes of pixels and masks with those of
    weights
  - a known policy of LeRobot, whose code computes in the dtype of its images
  - a model that holds weights itself, outside of its submodules, because its forward may multiply inputs by them
The user can name inputs that are cast at once, or have all of them cast (``cast_inputs`` of the configuration).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence, Set
from typing import Any, Literal

import torch
from torch import nn

from fsdp2_strategy.distributed.torch_internals import cast_floating
from fsdp2_strategy.errors import ShardError, did_you_mean
from fsdp2_strategy.hf.library_internals import lists_blocks
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.sharding.module_tree import ModuleTree
from fsdp2_strategy.sharding.own_dtype import cast_to_own, needs_own_dtype
from fsdp2_strategy.sharding.skipped_units import with_input

_FOR_LOSS_OR_TIME = re.compile(r"(labels?|targets?|advantages?|returns|rewards?|log_?probs|timesteps?|sigmas?)$")
"""Names of inputs that models compute a loss or an embedding of times with."""

CastInputs = Literal["all", "first", "none"]
"""Which floating inputs of a unit are cast."""


def inputs_to_cast(tree: ModuleTree, module: nn.Module, kind: str) -> CastInputs:
    """Return which floating inputs of a unit must be cast; see [Note: inputs]."""
    around = tree.transformers_around(module)
    if not all(around):
        return "all"
    fp32_residual = all(getattr(getattr(m, "config", None), "residual_in_fp32", False) for m, *_ in around)
    return "none" if fp32_residual and kind == "block" else "first"


_Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], _Inputs]
"""A forward pre-hook that returns the inputs that it casts."""


def cast_where_weights_are(
    root: nn.Module, units: Set[nn.Module], half: torch.dtype, selected: Sequence[str] | bool, *, is_policy: bool
) -> Hook:
    """Register hooks that cast inputs of modules of the root unit; return the hook for the inputs of the model.

    See [Note: inputs of the model]. The model is not sharded yet; ``units`` has the ignored modules, too.
    """
    waiting = [(child, lists_blocks(root)) for child in root.children()]
    while waiting:
        module, of_transformers = waiting.pop()
        if module in units:
            continue
        inside = of_transformers or lists_blocks(module)
        waiting += [(child, inside) for child in module.children()]
        if inside and not of_transformers and not is_policy:
            module.register_forward_pre_hook(_cast_root_inputs(module, half, ()), with_kwargs=True)
        if needs_own_dtype(module):
            module.register_forward_pre_hook(cast_to_own, with_kwargs=True)
        elif holds_weights(module) and not of_transformers and not isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(cast_unit_inputs(half), with_kwargs=True)
    return _cast_root_inputs(root, half, selected, is_policy=is_policy)


def _cast_root_inputs(
    root: nn.Module, dtype: torch.dtype, selected: Sequence[str] | bool, *, is_policy: bool = False
) -> Hook:
    """Return a hook that casts inputs of the model to a half-precision dtype; see [Note: inputs of the model].

    ``selected`` has the names of arguments that are cast in any case; True stands for all floating inputs.
    """
    names = _argument_names(root)
    casts_matrices = is_policy or lists_blocks(root) or holds_weights(root)

    def cast(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inputs:
        def cast_one(name: str, value: Any) -> Any:
            if selected is True or (not isinstance(selected, bool) and name in selected):
                return cast_floating(value, dtype)
            is_cast = casts_matrices and not _FOR_LOSS_OR_TIME.search(name)
            return _cast_matrices(value, dtype) if is_cast else value

        named = zip((*names, *[""] * len(args)), args, strict=False)
        return tuple(cast_one(*each) for each in named), {name: cast_one(name, value) for name, value in kwargs.items()}

    return cast


def cast_unit_inputs(dtype: torch.dtype) -> Hook:
    """Return a hook that casts all floating inputs of a unit but numbers of a sample; see [Note: inputs]."""
    return lambda _, args, kwargs: (_cast_matrices(args, dtype), _cast_matrices(kwargs, dtype))


def holds_weights(module: nn.Module) -> bool:
    """Return whether a module has direct parameters that its forward may multiply inputs by."""
    return any(p.ndim > 1 and p.is_floating_point() for p in module.parameters(recurse=False))


def check_selected(root: nn.Module, selected: Sequence[str] | bool) -> None:
    """Raise ShardError if the model's forward has no argument of a name in ``selected``."""
    names = _argument_names(root)
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(root.forward).parameters.values())
    for name in () if isinstance(selected, bool) or accepts_any else selected:
        if name not in names:
            raise ShardError(
                f"cannot cast the input {name!r}: the forward of {class_name(root)} has no such argument, expected one "
                f"of {', '.join(names)}.{did_you_mean(name, names)} Correct cast_inputs."
            )


def _argument_names(root: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, p in inspect.signature(root.forward).parameters.items() if p.kind in kinds]


def _cast_matrices(values: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors in nested values that have two or more dimensions."""
    if isinstance(values, torch.Tensor):
        return values.to(dtype) if values.ndim > 1 and values.is_floating_point() else values
    if isinstance(values, dict) and type(values) is dict:
        return {name: _cast_matrices(value, dtype) for name, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(_cast_matrices(value, dtype) for value in values)
    return values


def cast_all(module: nn.Module, dtype: torch.dtype) -> None:
    """Register a hook that casts all floating inputs of a module's forward, as FSDP2 does for a unit."""
    module.register_forward_pre_hook(lambda _, args, kwargs: cast_floating((args, kwargs), dtype), with_kwargs=True)


def cast_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Register a hook that casts all floating outputs of a module's forward, as FSDP2 does for a unit."""
    module.register_forward_hook(lambda _module, _inputs, output: cast_floating(output, dtype))


def cast_first(dtype: torch.dtype) -> Hook:
    """Return a hook that casts the first floating input of a module; see [Note: inputs]."""

    def cast(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inputs:
        inputs: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for place, value in inputs:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return with_input(args, kwargs, place, value.to(dtype))
        return args, kwargs

    return cast
