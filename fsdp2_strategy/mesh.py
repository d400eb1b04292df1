"""Device meshes: how the ranks of the process group are arranged for sharding.

Input: the process group and a shard size. Output: a mesh whose last axis, "shard", splits parameters and whose first,
"replicate", where there is one, holds copies of them (HSDP).
"""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from fsdp2_strategy.errors import MeshError
from fsdp2_strategy.ranks import current_device

ShardSize = int | Literal["auto"]

# Meshes own process groups, whose threads and file descriptors outlive them: one mesh a shape, for each group.
_meshes: dict[tuple[str, int], tuple[dist.ProcessGroup | None, DeviceMesh]] = {}


def build_mesh(shard_size: int = -1, *, device_type: str | None = None) -> DeviceMesh:
    """Arrange all ranks for parameters that are split over ``shard_size`` of them; collective.

    Args:
        shard_size: ranks that a parameter is split over; it must divide the world size. -1 means all of them.
        device_type: "cpu" or "cuda"; by default the kind that this rank computes on.

    Returns:
        A mesh with the axis ("shard",), or ("replicate", "shard") of shape (world / shard_size, shard_size) where the
        shard size is smaller than the world. Equal calls return the same mesh.

    Raises:
        MeshError: there is no process group, or the shard size does not divide the world size.
    """
    if not dist.is_initialized():
        raise MeshError("cannot build a mesh: no process group exists. Construct FSDPV2Strategy, or start one, first.")
    world_size = dist.get_world_size()
    shard_size = check_shard_size(shard_size, world_size)
    device_type = device_type or current_device().type
    key, group = (device_type, shard_size), dist.group.WORLD
    if any(its_group is not group for its_group, _ in _meshes.values()):
        forget_meshes()
    if key not in _meshes:
        hybrid = shard_size < world_size
        shape = (world_size // shard_size, shard_size) if hybrid else (world_size,)
        axes = ("replicate", "shard") if hybrid else ("shard",)
        _meshes[key] = (group, init_device_mesh(device_type, shape, mesh_dim_names=axes))
    return _meshes[key][1]


def check_shard_size(shard_size: int, world_size: int) -> int:
    """Return ``shard_size`` with -1 resolved.

    Raises:
        MeshError: it does not divide the world size.
    """
    if shard_size == -1:
        return world_size
    whole = isinstance(shard_size, int) and not isinstance(shard_size, bool)
    if not whole or shard_size < 1 or world_size % shard_size:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise MeshError(
            f"cannot build a mesh: shard_size is {shard_size!r}, expected a divisor of the world size {world_size}. "
            f"Use one of {divisors}, or -1 for all ranks."
        )
    return shard_size


def auto_shard_size(parameter_count: int, *, is_training: bool, world_size: int) -> int:
    """Choose how many ranks to split over, as RLHF trainers do: the fewest that a model of this size needs.

    Training splits over all ranks. For inference a model under 10 billion parameters is replicated, one under 80
    billion is split over 8 ranks (or the most below that divide the world size), a larger one over all.
    """
    if is_training or parameter_count >= 80e9:
        return -1
    if parameter_count < 10e9:
        return 1
    return max(n for n in range(1, 9) if world_size % n == 0)


def forget_meshes() -> None:
    """Drop the cached meshes, whose process groups end with the default one.

    DTensor remembers results by meshes that compare equal though their groups are others; those go, too. It must come
    before new groups are made: old ones that die late take the names of new ones with them.
    """
    _meshes.clear()
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
