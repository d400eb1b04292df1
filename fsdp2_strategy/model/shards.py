"""Compute the index range of this rank's shard, and build DTensors from local shards.

Input: DTensors, or plain tensors, which count as replicated on all ranks. Output: index ranges; DTensors.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2_strategy.distributed.torch_internals import dtensor_like
from fsdp2_strategy.errors import ShardError


def sharded_like(source: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Build a tensor that is sharded like ``source`` from this rank's shard, on the shard's device; not collective."""
    return dtensor_like(source, local) if isinstance(source, DTensor) else local


def shard_ranges(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Return the offset and length of this rank's shard in each dimension of the full tensor; not collective.

    Raises:
        ShardError: a placement is neither Shard nor Replicate.
    """
    box = [(0, length) for length in tensor.shape]
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                begin, length = box[placement.dim]
                size = tensor.device_mesh.size(axis)
                chunk = -(-length // size)
                offset = min(tensor.device_mesh.get_local_rank(axis) * chunk, length)
                box[placement.dim] = (begin + offset, min(chunk, length - offset))
            elif not placement.is_replicate():
                raise ShardError(
                    f"cannot find this rank's part of a tensor: its placements are {tensor.placements}, expected "
                    "shards and replicas. Use a mesh from build_mesh."
                )
    return tuple(box)


def shard_size_of(tensor: torch.Tensor) -> int:
    """Return the number of ranks over which a tensor is sharded; 1 for a plain tensor; not collective."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_shard())


def shard_view(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the view of a full tensor that corresponds to this rank's shard of ``like``; not collective."""
    for dim, (begin, length) in enumerate(shard_ranges(like)):
        full = full.narrow(dim, begin, length)
    return full


def shard_size_of_model(model: nn.Module) -> int:
    """Return the shard size of a model's first sharded parameter; 1 if none is sharded; not collective."""
    return next((shard_size_of(p) for p in model.parameters() if isinstance(p, DTensor)), 1)
