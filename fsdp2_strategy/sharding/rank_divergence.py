"""Write the gathers and reductions of a model's units to the log that ranks compare.

Input: a sharded model. Output: hooks around each gather and reduction, which raise an error on every rank if the ranks
run different units; see [Note: same units on all ranks] in `distributed.unit_log`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import nn

from fsdp2_strategy.distributed.spent_time import device_wait, other_ranks
from fsdp2_strategy.distributed.torch_internals import (
    begins_gather,
    choose_root,
    device_of,
    fsdp_state_of,
    gathering_ranks,
    gradient_ranks,
    has_unreduced_gradient,
    module_of,
    original_call,
    parameters_of,
    reduces_gradients,
    reset_param_group,
    set_zero_gradient,
    shard_of,
    unsharded_of,
)
from fsdp2_strategy.distributed.unit_log import UnitLog, begin_log
from fsdp2_strategy.model.fsdp_state import class_name, parameter_groups
from fsdp2_strategy.model.names import clean
from fsdp2_strategy.model.unit_hooks import register_hook


def watch_units(root: nn.Module) -> None:
    """Register hooks that compare which units ranks gather and reduce; collective at the first call for a group."""
    log = begin_log()
    names = {module: clean(name) for name, module in root.named_modules()}
    log.models += 1
    key = f"{log.models}"
    for param_group in parameter_groups(root):
        name = names[module_of(param_group)] or "the root unit"
        own = ref(param_group)
        if gathering_ranks(param_group) > 1:
            text = f"gathers {name} of {class_name(root)}"
            entry = log.register(text, key, functools.partial(_help_to_gather, ref(root), own))
            register_hook(param_group, "gather", "divergence", functools.partial(_gather, log, entry))
            register_hook(param_group, "finish gather", "time", _finish_gather)
        if gradient_ranks(param_group) > 1:
            text = f"reduces the gradients of {name} of {class_name(root)}"
            entry = log.register(text, key, functools.partial(_help_to_reduce, own))
            register_hook(param_group, "reduce", "divergence", functools.partial(_reduce, log, entry))


def _gather(log: UnitLog, entry: int, param_group: Any, gather: Callable[..., None], async_op: bool = False) -> None:
    if begins_gather(param_group):
        log.run(entry, functools.partial(gather, async_op))
    else:
        gather(async_op)


def _finish_gather(param_group: Any, finish: Callable[[], None]) -> None:
    """Measure how long this rank waits for an all-gather that was begun before; [Note: time spent waiting]."""
    device = device_of(param_group)
    with other_ranks if device.type == "cpu" else device_wait(device):
        finish()


def _reduce(log: UnitLog, entry: int, param_group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    if reduces_gradients(param_group) and any(map(has_unreduced_gradient, parameters_of(param_group))):
        log.run(entry, functools.partial(reduce, *unused))
    else:
        reduce(*unused)


def _help_to_gather(root: ref[nn.Module], own: ref[Any]) -> bool:
    """Take part in the gather of a unit without using the result; return whether this was possible."""
    model, param_group = root(), own()
    if model is None or param_group is None:
        return False
    choose_root(fsdp_state_of(model))  # this rank may not have run the model yet
    reset_param_group(param_group)
    original_call(param_group, "gather")(False)
    reset_param_group(param_group)
    return True


@torch.no_grad()
def _help_to_reduce(own: ref[Any]) -> bool:
    """Take part in the reduction of a unit with zeros; return whether this was possible."""
    if (param_group := own()) is None:
        return False
    for parameter in parameters_of(param_group):
        if shard_of(parameter).requires_grad and not has_unreduced_gradient(parameter):
            if unsharded_of(parameter) is None:
                return False
            set_zero_gradient(parameter)
    original_call(param_group, "reduce")()
    return True
