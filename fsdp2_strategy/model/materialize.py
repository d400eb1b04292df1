"""Allocate memory for models that were built on the meta device, and record which tensors are uninitialised.

Input: a model with parameters or buffers on meta. Output: the model on a device; whether a tensor is uninitialised.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp2_strategy.distributed.torch_internals import (
    dtensor_like,
    flat_shard_of,
    is_offloaded_to_cpu,
    local_of,
    parameters_of,
    reset_sharded_parameter,
    shard_of,
)
from fsdp2_strategy.model.fsdp_state import parameter_groups
from fsdp2_strategy.model.gradients import replicated_gradients
from fsdp2_strategy.model.placeholders import is_computed, is_offloaded_tensor
from fsdp2_strategy.model.wrappers import unwrap_model

_uninitialised: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()
"""Tensors that are allocated but not filled yet; keys are compared by identity."""


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate all parameters and buffers that are on the meta device, without values; not collective.

    Tied tensors stay tied. Of sharded parameters, only this rank's shards are allocated; with ``CPUOffloadPolicy``, in
    host memory. FSDP2 pads and pins the shards.
    """
    replicated = replicated_gradients(unwrap_model(model))
    offloaded = {
        id(shard_of(p)) for each in parameter_groups(model) for p in parameters_of(each) if is_offloaded_to_cpu(p)
    }
    allocated: dict[int, Any] = {}

    def allocate(tensor: torch.Tensor) -> Any:
        if id(tensor) not in allocated:
            new = _empty_like(tensor, torch.device("cpu") if id(tensor) in offloaded else device)
            _uninitialised[new] = True
            if replicated is not None and isinstance(new, nn.Parameter) and not isinstance(tensor, DTensor):
                replicated.add(new, instead_of=tensor)
            allocated[id(tensor)] = new
        return allocated[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: allocate(t) for name, t in tensors.items() if t is not None and t.is_meta})
    for param_group in parameter_groups(model):
        for parameter in parameters_of(param_group):
            if flat_shard_of(parameter).is_meta:
                reset_sharded_parameter(parameter)


def is_uninitialised(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is uninitialised: on meta without being a placeholder, or allocated but not filled."""
    if tensor.is_meta and not is_offloaded_tensor(tensor) and not is_computed(tensor):
        return True
    return bool(_uninitialised) and tensor in _uninitialised


def has_uninitialised_tensors(model: nn.Module) -> bool:
    """Return whether any parameter or buffer of the model is uninitialised; not collective."""
    return any(map(is_uninitialised, chain(model.parameters(), model.buffers())))


def mark_initialised(model: nn.Module) -> None:
    """Record that all parameters and buffers of the model are initialised; not collective."""
    for tensor in chain(model.parameters(), model.buffers()):
        _uninitialised.pop(tensor, None)


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    local = local_of(tensor)
    if local.is_contiguous():
        new = torch.empty(local.shape, dtype=local.dtype, device=device)
    else:
        new = torch.empty_like(local, device=device)
    if isinstance(tensor, DTensor):
        new = dtensor_like(tensor, new)
    return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
