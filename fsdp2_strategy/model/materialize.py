"""Allocate memory for models that were built on the meta device, and track which tensors are uninitialised.

Input: a model with parameters or buffers on meta. Output: the model on a device; a record of uninitialised tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

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
    shard_of,
    take_over_shard,
)
from fsdp2_strategy.model.fsdp_state import is_sharded, parameter_groups
from fsdp2_strategy.model.gradients import average_gradient
from fsdp2_strategy.model.placeholders import is_away, is_computed

_empty: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()
"""Tensors that were allocated but not filled yet; keyed by identity, not by value."""


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate all parameters and buffers that are on the meta device, without values; not collective.

    Tied tensors stay tied. The new tensors count as uninitialised until `has_values_now`. Of sharded parameters only
    this rank's shards are allocated, in host memory under ``CPUOffloadPolicy``; FSDP2 pads and pins them.
    """
    sharded = is_sharded(model)
    offloaded = {
        id(shard_of(p)) for record in parameter_groups(model) for p in parameters_of(record) if is_offloaded_to_cpu(p)
    }
    new: dict[int, torch.Tensor] = {}

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in new:
            new[id(tensor)] = _with_memory(tensor, torch.device("cpu") if id(tensor) in offloaded else device)
            _empty[new[id(tensor)]] = True
            if sharded and isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor):
                average_gradient(new[id(tensor)])  # type: ignore[arg-type]
        return new[id(tensor)]

    for module in model.modules():
        on_meta = {name: t for name, t in _own_tensors(module) if t.is_meta}
        for name, tensor in on_meta.items():
            (module._parameters if name in module._parameters else module._buffers)[name] = real(tensor)  # type: ignore[assignment]
    for record in parameter_groups(model):
        for parameter in parameters_of(record):
            if flat_shard_of(parameter).is_meta:
                take_over_shard(parameter)


def lacks_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is uninitialised: on meta and not a placeholder, or allocated but not filled."""
    stands_for_none = tensor.is_meta and not is_away(tensor) and not is_computed(tensor)
    return stands_for_none or (len(_empty) > 0 and tensor in _empty)


def is_unreal(model: nn.Module) -> bool:
    """Return whether any parameter or buffer of the model is uninitialised; not collective."""
    return any(lacks_values(tensor) for module in model.modules() for _, tensor in _own_tensors(module))


def has_values_now(model: nn.Module) -> None:
    """Record that all parameters and buffers of the model are initialised; not collective."""
    for module in model.modules():
        for _, tensor in _own_tensors(module):
            _empty.pop(tensor, None)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def _with_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    local = local_of(tensor)
    if local.is_contiguous():
        new = torch.empty(local.shape, dtype=local.dtype, device=device)
    else:
        new = torch.empty_like(local, device=device)
    if isinstance(tensor, DTensor):
        new = dtensor_like(tensor, new)
    return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
