"""Memory for models that were built on the meta device, and which of their tensors have no values yet.

Input: a model with parameters or buffers on meta. Output: memory on a device; marks of what is still empty.
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
"""Tensors that have memory and no values yet; a tensor is known here by what it is, and not by what it holds."""


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give memory, but no values, to all parameters and buffers on the meta device; ties are kept; not collective.

    They count as empty until `has_values_now` says otherwise. A sharded model gets the memory of its shards alone, in
    host memory where they are offloaded; FSDP2 pads and pins them as it needs.
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
    """Say whether a tensor is on meta, or got memory from `materialize` and nothing else yet."""
    stands_for_none = tensor.is_meta and not is_away(tensor) and not is_computed(tensor)
    return stands_for_none or (len(_empty) > 0 and tensor in _empty)


def is_unreal(model: nn.Module) -> bool:
    """Say whether any parameter or buffer of the model has no values yet."""
    return any(lacks_values(tensor) for module in model.modules() for _, tensor in _own_tensors(module))


def has_values_now(model: nn.Module) -> None:
    """Note that all parameters and buffers got their values."""
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
