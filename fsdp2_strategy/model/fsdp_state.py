"""Iterate over the ``FSDPParamGroup`` objects of a model's units, reshard units, and reset units.

Input: a model, sharded by `shard_model` or not. Output: the model with its sharded parameters registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.distributed.torch_internals import (
    drop_gather_in_flight,
    forget_pass,
    fsdp_state_of,
    mark_idle,
    param_groups_of,
    reset_param_group,
)
from fsdp2_strategy.model.names import named_modules
from fsdp2_strategy.model.wrappers import unwrap_model


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model, or the model in a wrapper, was sharded by ``shard_model``; not collective."""
    return isinstance(unwrap_model(model), FSDPModule)


def device_of(model: nn.Module) -> torch.device:
    """Return the device that a model computes on, where its shards may be in host memory; not collective."""
    first = next(model.parameters(), None)
    if first is None:
        return current_device()
    if not isinstance(first, DTensor):
        return first.device
    own = current_device()
    return own if own.type == first.device_mesh.device_type else torch.device(first.device_mesh.device_type)


def parameters_outside_units(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of ``model`` that belong to no unit; not collective."""
    if not isinstance(model, FSDPModule):
        yield from model.parameters(recurse=False)
        for child in model.children():
            yield from parameters_outside_units(child)


def parameter_groups(model: nn.Module) -> Iterator[Any]:
    """Yield the ``FSDPParamGroup`` of each unit that has parameters; not collective."""
    for unit in _units_of(model):
        yield from param_groups_of(fsdp_state_of(unit))


def _units_of(model: nn.Module) -> list[Any]:
    """Return the units in the order of ``model.modules()``."""
    return [module for _, module in named_modules(model) if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free unsharded parameters that a forward pass has left, and register the sharded parameters; not collective.

    FSDP2 keeps the root unit unsharded for a backward pass. Without one, as in evaluation, an optimizer or a checkpoint
    would find unsharded parameters, and the next forward pass would use old values. Units that were prefetched but did
    not run are resharded, too.
    """
    for unit in _units_of(model):
        unit.reshard()
        for param_group in param_groups_of(fsdp_state_of(unit)):
            drop_gather_in_flight(param_group)


def reshard_without_backward(unit: nn.Module, *_: object) -> None:
    """Reshard a unit that stays gathered for backward, if no backward will follow; a forward hook."""
    if isinstance(unit, FSDPModule) and not torch.is_grad_enabled():
        unit.reshard()


def reset_units(model: nn.Module) -> None:
    """Reshard all units and mark them idle, even if a forward or backward pass raised; not collective.

    Otherwise, they would stay unsharded, and FSDP2 would treat the next forward pass as a part of the failed pass, and
    not end the next backward pass. Gradients that are complete, or accumulated, are kept.
    """
    for param_group in parameter_groups(model):
        reset_param_group(param_group)
    for unit in _units_of(model):
        mark_idle(fsdp_state_of(unit))
        forget_pass(fsdp_state_of(unit))


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before `fully_shard` replaced it by a subclass."""
    cls = type(module)
    return cls.__mro__[2] if cls.__mro__[1] is FSDPModule else cls


def class_name(module: nn.Module) -> str:
    """Return the name of the class that a module had before `fully_shard` replaced it by a subclass."""
    return original_class(module).__name__


def keep_class_name(module: nn.Module) -> None:
    """Give the class that `fully_shard` has made for a module the names of the module's own class; not collective.

    [Note: class names] `fully_shard` makes a subclass for each class: ``FSDPLlamaForCausalLM``, of a module of torch.
    Other libraries decide by these names: transformers' Trainer whether label smoothing shifts the labels, transformers
    whether a model is custom code, which conversions its files need, which outputs it records and which attention it
    can use; integrations whether a model has adapters. FSDP2 itself only uses ``isinstance``, and the position of the
    own class among the bases. The names are set after the subclass was made, so that a class that registers its
    subclasses by name does not register this one under the name of another.
    """
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(type(module), name, getattr(original_class(module), name))
