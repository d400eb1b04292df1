"""Modules that are not sharded: which of them a user means, and how values go in and out of one in another dtype.

Input: a model, and regular expressions over the names of its modules. Output: modules, for `plan`, and hooks, for
`shard`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.torch_internals import cast_floating
from fsdp2_strategy.errors import ShardError, did_you_mean
from fsdp2_strategy.model.names import clean


def find_ignored(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Return the outermost modules whose whole dotted names match any of ``patterns``; only reads.

    Raises:
        ShardError: a pattern matches no module, or the model itself.
    """
    names = [(clean(name), module) for name, module in model.named_modules(remove_duplicate=False)]
    for pattern in patterns:
        found = [name for name, _ in names if re.fullmatch(pattern, name)]
        if "" in found or not found:
            what = "the model itself" if found else f"no module of {type(model).__name__}"
            within = [name for name, _ in names if name]
            raise ShardError(
                f"cannot ignore modules: the pattern {pattern!r} matches {what}, expected a regular expression for "
                f"whole names of modules within it. They begin with {', '.join(within[:3])}."
                f"{did_you_mean(pattern, within)}"
            )
    matched = dict.fromkeys(m for name, m in names if any(re.fullmatch(pattern, name) for pattern in patterns))
    within_matched = {m for outer in matched for m in outer.modules() if m is not outer}
    return [module for module in matched if module not in within_matched]


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Let all floating inputs of a module's forward come in one dtype, as FSDP2 does for a unit."""

    def cast_all(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    module.register_forward_pre_hook(cast_all, with_kwargs=True)


def cast_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Let all floating outputs of a module's forward come in one dtype, as FSDP2 does for a unit."""
    module.register_forward_hook(lambda _module, _inputs, output: cast_floating(output, dtype))
