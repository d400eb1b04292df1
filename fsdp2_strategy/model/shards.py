"""Find this rank's shard of a DTensor, its replicas and the ranks with the other shards; gather full tensors.

Input: DTensors with any placements that shard or replicate, or plain tensors, which count as replicated on all ranks.
Output: the elements that ranks hold, as in [Note: boxes] in `boxes`; DTensors, and full tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2_strategy.distributed.mesh import group_of
from fsdp2_strategy.distributed.process_group import group_in_use, ranks_of
from fsdp2_strategy.distributed.torch_internals import dtensor_like, root_mesh_of
from fsdp2_strategy.model.boxes import LocalShard, is_split, shard_at


def local_shard(tensor: torch.Tensor, coordinate: Sequence[int] | None = None) -> LocalShard:
    """Return which elements of the full tensor a rank holds, by default this rank; not collective."""
    if not isinstance(tensor, DTensor):
        return shard_at(tuple(tensor.shape), (), (), ())
    mesh = tensor.device_mesh
    if coordinate is None:
        coordinate = tuple(mesh.get_local_rank(axis) for axis in range(mesh.ndim))
    return shard_at(tuple(tensor.shape), tuple(mesh.shape), tuple(coordinate), tuple(tensor.placements))


def sharded_like(source: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Build a tensor that is sharded like ``source`` from this rank's shard, on the shard's device; not collective."""
    return dtensor_like(source, local) if isinstance(source, DTensor) else local


def shard_size_of(tensor: torch.Tensor) -> int:
    """Return the number of ranks over which a tensor is sharded; 1 for a plain tensor; not collective."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if is_split(placement))


def shard_size_of_model(model: nn.Module) -> int:
    """Return the shard size of a model's first sharded parameter; 1 if none is sharded; not collective."""
    return next((shard_size_of(p) for p in model.parameters() if isinstance(p, DTensor)), 1)


def replica_of(tensor: DTensor) -> tuple[int, int]:
    """Return which replica of its shard this rank holds, and the number of replicas; not collective.

    The mesh of a tensor may have only some ranks of the group in use, such as those with the same rank in tensor
    parallelism. Then the others hold replicas, too.
    """
    index, count = _copy_of(tensor.device_mesh)
    for axis, placement in enumerate(tensor.placements):
        if not is_split(placement):
            size = tensor.device_mesh.size(axis)
            index = index * size + tensor.device_mesh.get_local_rank(axis)
            count *= size
    return index, count


def _copy_of(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the index of a mesh among the equal meshes of the other ranks of the group in use, and their number."""
    ranks = ranks_of(group_in_use())
    if len(ranks) == mesh.size():
        return 0, 1
    root = root_mesh_of(mesh)
    inside = torch.isin(root.mesh, mesh.mesh).nonzero()
    in_use = torch.isin(root.mesh, torch.tensor(ranks)).nonzero()
    index, count = 0, 1
    for axis, own in enumerate(root.get_coordinate() or ()):
        if bool((inside[:, axis] == own).all()):
            others = sorted(set(in_use[:, axis].tolist()))
            index, count = index * len(others) + others.index(own), count * len(others)
    return index, count


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that together hold all elements of a tensor, one replica of each shard."""

    group: dist.ProcessGroup
    coordinates: tuple[tuple[int, ...], ...]
    """The coordinate in the tensor's mesh of each rank of the group."""
    dim: int | None
    """The dimension that is split, if only one axis splits the tensor, in ranges of equal length; otherwise None."""

    def shards(self, tensor: torch.Tensor) -> list[LocalShard]:
        """Return the elements that each rank of the group holds; not collective."""
        return [local_shard(tensor, coordinate) for coordinate in self.coordinates]


def shard_group_of(tensor: torch.Tensor) -> ShardGroup | None:
    """Return the ranks that hold the shards of a tensor, this rank among them; None if each rank holds all elements.

    The first call for a tensor that is split along several axes is collective over these ranks.
    """
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    axes = [axis for axis, placement in enumerate(tensor.placements) if is_split(placement) and mesh.size(axis) > 1]
    if not axes:
        return None
    own = [mesh.get_local_rank(axis) for axis in range(mesh.ndim)]
    members = mesh.mesh[tuple(slice(None) if axis in axes else own[axis] for axis in range(mesh.ndim))]
    along = itertools.product(*(range(mesh.size(axis)) if axis in axes else (own[axis],) for axis in range(mesh.ndim)))
    coordinate_of = dict(zip(members.flatten().tolist(), along, strict=True))
    group = mesh.get_group(axes[0]) if len(axes) == 1 else group_of(sorted(coordinate_of))
    placement = tensor.placements[axes[0]]
    dim = placement.dim % tensor.ndim if len(axes) == 1 and isinstance(placement, Shard) else None
    return ShardGroup(group, tuple(coordinate_of[rank] for rank in dist.get_process_group_ranks(group)), dim)


@torch.no_grad()
def gather_full(tensor: DTensor, local: torch.Tensor) -> torch.Tensor:
    """Gather a full tensor from the ranks' shards; collective over these; ``local`` is on the collective's device."""
    group = shard_group_of(tensor)
    if group is None:
        return local
    if group.dim is not None:
        return dtensor_like(tensor, local).full_tensor()
    shards = group.shards(tensor)
    longest = max(math.prod(shard.shape) for shard in shards)
    sent = torch.zeros(longest * local.element_size(), dtype=torch.uint8, device=local.device)
    sent[: local.nbytes].copy_(local.contiguous().view(-1).view(torch.uint8))
    received = [torch.empty_like(sent) for _ in shards]
    dist.all_gather(received, sent, group=group.group)
    full = local.new_empty(tensor.shape)
    for shard, memory in zip(shards, received, strict=True):
        nbytes = math.prod(shard.shape) * local.element_size()
        shard.copy_to(full, memory[:nbytes].view(local.dtype).view(shard.shape))
    return full
