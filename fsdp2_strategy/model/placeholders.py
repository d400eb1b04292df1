"""Where a tensor's values are: in its own memory, away in host memory, or nowhere until they are computed.

Input: tensors, and what stands behind them. Output: placeholders on the meta device, and the values behind those.

[Note: away] While values are away in host memory (`offload`), their tensors stand on the meta device: nothing computes
with them, and nothing reads garbage. `values_of` finds the values, so that files are written from there and read to
there without a byte on the accelerator.

Values may also be nowhere until somebody asks for them (weights with adapters merged into them): `computed` makes the
tensor that stands for these.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import finalize

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.torch_internals import dtensor_like, local_of, storage_address
from fsdp2_strategy.model.shards import sharded_like

# Host memory that stands behind a meta tensor: by the address of the tensor's storage.
_away: dict[int, torch.Tensor] = {}


def stand_in(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the form of ``like`` that stands for values in host memory; see [Note: away].

    Args:
        values: all elements of the storage, in one dimension.
        like: what it stands for.
    """
    meta = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
    key = storage_address(meta)
    _away[key] = values
    finalize(meta, _away.pop, key, None)
    return meta


# What computes the values behind a meta tensor: by the address of the tensor's storage.
_computed: dict[int, Callable[[], torch.Tensor]] = {}


def computed(compute: Callable[[], torch.Tensor], like: torch.Tensor) -> nn.Parameter:
    """Return a parameter in the form of ``like`` whose values are computed each time that `values_of` asks for them.

    Args:
        compute: gives this rank's part; not collective.
        like: the form; sharded or not.
    """
    local = local_of(like)
    meta = torch.empty(local.size(), dtype=local.dtype, device="meta")
    parameter = nn.Parameter(sharded_like(like, meta), requires_grad=False)
    key = storage_address(local_of(parameter))
    _computed[key] = compute
    finalize(parameter, _computed.pop, key, None)
    return parameter


def is_computed(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's values are computed when somebody asks for them."""
    return bool(_computed) and storage_address(local_of(tensor)) in _computed


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor where its values are: in host memory while they are away."""
    local = local_of(tensor)
    if local.is_meta and (values := _away.get(storage_address(local))) is not None:
        offset = values.storage_offset() + local.storage_offset()
        return values.as_strided(local.size(), local.stride(), offset)
    if local.is_meta and (compute := _computed.get(storage_address(local))) is not None:
        return compute()
    return local.detach()


def is_away(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's values are in host memory."""
    local = local_of(tensor)
    return local.is_meta and storage_address(local) in _away


def anything_is_away() -> bool:
    """Say whether any tensor's values are."""
    return bool(_away)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor, wherever its values are; collective where it is sharded."""
    if not isinstance(tensor, DTensor):
        return values_of(tensor)
    if not local_of(tensor).is_meta:
        return tensor.full_tensor().detach()
    return dtensor_like(tensor, values_of(tensor).to(tensor.device_mesh.device_type)).full_tensor()
