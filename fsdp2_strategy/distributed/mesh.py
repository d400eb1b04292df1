"""Build the device meshes that models are sharded over.

Input: the process group and a shard size. Output: a mesh whose last axis, "shard", is the one that parameters are split
over. For HSDP, the mesh also has a first axis, "replicate", along which parameters are replicated.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2_strategy.distributed.process_group import (
    current_device,
    group_among,
    group_in_use,
    group_timeout,
    ranks_of,
    world_size,
)
from fsdp2_strategy.distributed.torch_internals import forget_sharding_rules, set_timeout
from fsdp2_strategy.errors import MeshError

# One mesh for each group and shape. A new mesh for each call would leak: the threads and file descriptors of a mesh's
# process groups outlive the mesh. The first element of each key is the default group at the time of the entry.
_meshes: dict[tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, str, int], DeviceMesh] = {}
_groups: dict[tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, tuple[int, ...]], dist.ProcessGroup] = {}


def build_mesh(shard_size: int = -1, *, device_type: str | None = None) -> DeviceMesh:
    """Build a mesh of all ranks of the group in use, with ``shard_size`` ranks along its axis "shard"; collective.

    The group in use is the open strategy's ``process_group``, else the default group, unless `on_group` sets another:
    see [Note: group in use] in `process_group`.

    Args:
        shard_size: number of ranks that a parameter is split over; it must divide the world size. -1 means all ranks.
        device_type: "cpu" or "cuda"; by default the type of `current_device`.

    Returns:
        A mesh with the axis ("shard",), or ("replicate", "shard") of shape (world / shard_size, shard_size) if the
        shard size is smaller than the world size. Equal calls return the same mesh.

    Raises:
        MeshError: there is no process group, or the shard size does not divide the world size.
    """
    if not dist.is_initialized():
        raise MeshError("cannot build a mesh: there is no process group. Construct FSDPV2Strategy first, or start one.")
    size = world_size()
    shard_size = check_shard_size(shard_size, size)
    device_type = device_type or current_device().type
    group = group_in_use()
    _forget_outdated()
    key = (dist.group.WORLD, group, device_type, shard_size)
    if key not in _meshes:
        shape = (size // shard_size, shard_size) if shard_size < size else (size,)
        axes = ("replicate", "shard")[-len(shape) :]
        if group is None:
            _meshes[key] = init_device_mesh(device_type, shape, mesh_dim_names=axes)
            if (timeout := group_timeout()) is not None:  # groups of a mesh with two axes have torch's default
                for of_axis in _meshes[key].get_all_groups():
                    set_timeout(of_axis, timeout)
        elif len(shape) == 1:
            _meshes[key] = DeviceMesh.from_group(group, device_type, mesh_dim_names=axes)
        else:
            ranks = ranks_of(group)
            row, column = divmod(ranks.index(dist.get_rank()), shard_size)
            groups = [group_of(ranks[column::shard_size]), group_of(ranks[row * shard_size :][:shard_size])]
            layout = torch.tensor(ranks).view(shape)
            _meshes[key] = DeviceMesh.from_group(groups, device_type, layout, mesh_dim_names=axes)
    return _meshes[key]


def set_timeouts(timeout: timedelta) -> None:
    """Set the time-out of the group in use, and of all groups of this module's meshes; not collective."""
    set_timeout(group_in_use(), timeout)
    _forget_outdated()
    for group in {*(group for mesh in _meshes.values() for group in mesh.get_all_groups()), *_groups.values()}:
        set_timeout(group, timeout)


def group_of(ranks: list[int]) -> dist.ProcessGroup:
    """Return a cached process group of ``ranks``, with the time-out of the group in use.

    The first call is collective over ``ranks``; other ranks need not call it.
    """
    _forget_outdated()
    key = (dist.group.WORLD, group_in_use(), tuple(ranks))
    if key not in _groups:
        _groups[key] = group_among(ranks, timeout=group_timeout())
    return _groups[key]


def _forget_outdated() -> None:
    """Clear the caches if they were filled under another default group."""
    if any(key[0] is not dist.group.WORLD for key in (*_meshes, *_groups)):
        forget_meshes()


def check_shard_size(shard_size: int, world_size: int) -> int:
    """Return ``shard_size`` with -1 replaced by the world size.

    Raises:
        MeshError: ``shard_size`` does not divide the world size.
    """
    if shard_size == -1:
        return world_size
    is_integer = isinstance(shard_size, int) and not isinstance(shard_size, bool)
    if not is_integer or shard_size < 1 or world_size % shard_size:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise MeshError(
            f"cannot build a mesh: shard_size is {shard_size!r}, expected a divisor of the world size {world_size}. "
            f"Use one of {divisors}, or -1 for all ranks."
        )
    return shard_size


def auto_shard_size(parameter_count: int, *, is_training: bool, world_size: int) -> int:
    """Return a shard size for a model of this size, by thresholds that are common in RLHF trainers.

    In training, a model is sharded over all ranks (-1). In inference, a model of less than 10 billion parameters is
    replicated. A model of less than 80 billion is sharded over n ranks, where n is the largest divisor of the world
    size up to 8. A larger model is sharded over all ranks.
    """
    if is_training or parameter_count >= 80e9:
        return -1
    if parameter_count < 10e9:
        return 1
    return max(n for n in range(1, 9) if world_size % n == 0)


def forget_meshes() -> None:
    """Clear the caches of meshes and groups, which become invalid when the default group is destroyed.

    DTensor's sharding cache is cleared too: its keys contain meshes, and meshes compare equal even if their groups
    differ. Call this before new groups are made: a cached old group would be freed later, and would then unregister a
    new group that has the same name.
    """
    _meshes.clear()
    _groups.clear()
    forget_sharding_rules()
