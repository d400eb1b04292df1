"""Create meta tensors as placeholders for values that are offloaded to host memory, or computed on demand.

Input: values in host memory, or a function that computes values. Output: placeholders, and the values of any tensor.

[Note: offloaded values] `offload` copies values to host memory and replaces their tensors by meta tensors, so that no
code can read freed device memory. For such a placeholder, `values_of` returns the values in host memory, so saving and
loading need no device memory.

A placeholder from `computed` has no stored values; each call of `values_of` computes them. Merging adapters uses this.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import finalize

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.torch_internals import local_of, storage_address
from fsdp2_strategy.model.shards import gather_full, sharded_like

# Host values of offloaded tensors, by the storage address of the placeholder.
_offloaded: dict[int, torch.Tensor] = {}


def placeholder_for(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Create a meta tensor like ``like`` for 1-d host values in its storage order; see [Note: offloaded values]."""
    meta = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
    key = storage_address(meta)
    _offloaded[key] = values
    finalize(meta, _offloaded.pop, key, None)
    return meta


# Functions that compute values, and the tensors they compute them from, by the storage address of the placeholder.
_computed: dict[int, tuple[Callable[[], torch.Tensor], torch.Tensor]] = {}


def computed(compute: Callable[[], torch.Tensor], like: torch.Tensor) -> nn.Parameter:
    """Create a meta parameter, sharded like ``like``, whose values are computed at each call of `values_of`.

    ``compute`` returns this rank's shard, is computed from ``like``, and must not be collective.
    """
    local = local_of(like)
    meta = torch.empty(local.size(), dtype=local.dtype, device="meta")
    parameter = nn.Parameter(sharded_like(like, meta), requires_grad=False)
    key = storage_address(local_of(parameter))
    _computed[key] = compute, like
    finalize(parameter, _computed.pop, key, None)
    return parameter


def is_computed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a placeholder from `computed`; not collective."""
    if not _computed:
        return False
    return storage_address(local_of(tensor)) in _computed


def source_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a placeholder from `computed` is computed from, or any other tensor itself."""
    return _computed[storage_address(local_of(tensor))][1] if is_computed(tensor) else tensor


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor: its values on its device, in host memory, or computed; not collective."""
    local = local_of(tensor)
    if local.is_meta and (values := _offloaded.get(storage_address(local))) is not None:
        offset = values.storage_offset() + local.storage_offset()
        return values.as_strided(local.size(), local.stride(), offset)
    if local.is_meta and (compute := _computed.get(storage_address(local))) is not None:
        return compute[0]()
    return local.detach()


def is_offloaded_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a placeholder for offloaded values; not collective."""
    local = local_of(tensor)
    return local.is_meta and storage_address(local) in _offloaded


def any_offloaded() -> bool:
    """Return whether any tensor of this process is offloaded; not collective."""
    return bool(_offloaded)


def any_placeholders() -> bool:
    """Return whether values of any tensor of this process are offloaded or computed; not collective."""
    return bool(_offloaded or _computed)


def full_tensor_of(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor, also from placeholders; collective if the tensor is a DTensor."""
    if not isinstance(tensor, DTensor):
        return values_of(tensor)
    return gather_full(tensor, values_of(tensor).to(tensor.device_mesh.device_type))
