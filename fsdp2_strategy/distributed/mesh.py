"""Build the device meshes that models are sharded over.

Input: the process group, a shard size and a tensor-parallel size. Output: a mesh with the axis "shard", along which
`fully_shard` splits parameters. For HSDP, the mesh also has a first axis, "replicate", along which parameters are
replicated; for tensor parallelism, a last axis, "tp", along which layers are split.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.process_group import (
    current_device,
    group_among,
    group_in_use,
    group_timeout,
    ranks_of,
    world_size,
)
from fsdp2_strategy.distributed.torch_internals import forget_sharding_rules, root_mesh_of, set_timeout
from fsdp2_strategy.errors import MeshError

# One mesh for each group and shape. A new mesh for each call would leak: the threads and file descriptors of a mesh's
# process groups outlive the mesh. The first element of each key is the default group at the time of the entry.
_meshes: dict[tuple[object, ...], DeviceMesh] = {}
_groups: dict[tuple[object, ...], dist.ProcessGroup] = {}

TENSOR_PARALLEL = "tp"
"""Name of the mesh axis along which layers are split."""
EXPERT_PARALLEL = "ep"
"""Name of the mesh axis along which experts are divided."""


@collective
def build_mesh(shard_size: int = -1, *, device_type: str | None = None, tensor_parallel_size: int = 1) -> DeviceMesh:
    """Build a mesh of all ranks of the group in use, with ``shard_size`` ranks along its axis "shard"; collective.

    The group in use is the open strategy's ``process_group``, else the default group, unless `on_group` sets another:
    see [Note: group in use] in `process_group`.

    Args:
        shard_size: number of ranks that `fully_shard` splits a parameter over; it must divide the number of data
            parallel ranks, which is the world size / ``tensor_parallel_size``. -1 means all data parallel ranks.
        device_type: "cpu", or the type of an accelerator, such as "cuda"; by default the type of `current_device`.
        tensor_parallel_size: number of successive ranks that share each layer; it must divide the world size.

    Returns:
        A mesh with the axes ("replicate", "shard", "tp"). The axis "replicate" is left out if the shard size is the
        number of data parallel ranks, and "tp" if layers are not split. Equal calls return the same mesh.

    Raises:
        MeshError: there is no process group, or a size does not divide the number of ranks.
    """
    if not dist.is_initialized():
        raise MeshError("cannot build a mesh: there is no process group. Construct FSDPV2Strategy first, or start one.")
    size = world_size()
    if not isinstance(tensor_parallel_size, int):
        raise MeshError(
            f"cannot build a mesh: tensor_parallel_size is {tensor_parallel_size!r}, expected an integer of at least 1."
        )
    shard_size = check_shard_size(shard_size, size, tensor_parallel_size)
    device_type = device_type or current_device().type
    group = group_in_use()
    _forget_outdated()
    key = (dist.group.WORLD, group, device_type, shard_size, tensor_parallel_size)
    if key not in _meshes:
        replicas = size // tensor_parallel_size // shard_size
        sizes = {"replicate": replicas, "shard": shard_size, TENSOR_PARALLEL: tensor_parallel_size}
        sizes = {axis: length for axis, length in sizes.items() if length > 1 or axis == "shard"}
        axes, shape = tuple(sizes), tuple(sizes.values())
        if group is None:
            _meshes[key] = init_device_mesh(device_type, shape, mesh_dim_names=axes)
            if (timeout := group_timeout()) is not None:  # groups of a mesh with several axes have torch's default
                for of_axis in _meshes[key].get_all_groups():
                    set_timeout(of_axis, timeout)
        elif len(shape) == 1:
            _meshes[key] = DeviceMesh.from_group(group, device_type, mesh_dim_names=axes)
        else:
            layout = torch.tensor(ranks_of(group)).view(shape)
            groups = [group_of(ranks) for ranks in _ranks_along_axes(layout, dist.get_rank())]
            _meshes[key] = DeviceMesh.from_group(groups, device_type, layout, mesh_dim_names=axes)
    return _meshes[key]


def _ranks_along_axes(layout: torch.Tensor, rank: int) -> list[list[int]]:
    """Return, for each axis of a mesh, the ranks that differ from ``rank`` along this axis only, and ``rank``."""
    position = (layout == rank).nonzero()[0].tolist()
    return [layout[(*position[:axis], slice(None), *position[axis + 1 :])].tolist() for axis in range(layout.ndim)]


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes of a mesh that `fully_shard` uses: all but "tp" and "ep"; not collective."""
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis not in (TENSOR_PARALLEL, EXPERT_PARALLEL))
    return mesh if axes == (mesh.mesh_dim_names or ()) else mesh[axes]


def tensor_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis of a mesh along which layers are split; None if there is none; not collective."""
    return mesh[TENSOR_PARALLEL] if TENSOR_PARALLEL in (mesh.mesh_dim_names or ()) else None


def mesh_of_this_rank(device_type: str) -> DeviceMesh:
    """Return a mesh of this rank alone, with the axis "tp"; not collective."""
    return DeviceMesh.from_group(group_of([dist.get_rank()]), device_type, mesh_dim_names=(TENSOR_PARALLEL,))


def model_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of all ranks that hold a model, from that of a parameter, which lacks "tp" if it is not split."""
    axes, root = mesh.mesh_dim_names or (), root_mesh_of(mesh)
    if TENSOR_PARALLEL in axes or TENSOR_PARALLEL not in (root.mesh_dim_names or ()):
        return mesh
    of_model = (*axes, TENSOR_PARALLEL)
    return root if of_model == root.mesh_dim_names else root[of_model]


def expert_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Return a mesh of the same ranks on which ``size`` successive ranks together hold all experts; collective.

    Its axes are ("replicate", "expert_shard", "ep"), without "replicate" if ``mesh`` has none. Along "expert_shard",
    `fully_shard` splits the experts of a rank. Equal calls return the same mesh.
    """
    layers = 1 if (of_layers := tensor_parallel_mesh(mesh)) is None else of_layers.size()
    axes = mesh.mesh_dim_names or ()
    replicas = mesh["replicate"].size() if "replicate" in axes else 1
    ranks = mesh.size() // replicas
    check_expert_size(size, ranks, layers)
    _forget_outdated()
    key = (dist.group.WORLD, group_in_use(), mesh.device_type, replicas, layers, size)
    if key not in _meshes:
        shape = (replicas, ranks // size, size)
        layout = mesh.mesh.reshape(shape if "replicate" in axes else shape[1:])
        names = ("replicate", "expert_shard", EXPERT_PARALLEL)[-layout.ndim :]
        groups = [group_of(each) for each in _ranks_along_axes(layout, dist.get_rank())]
        _meshes[key] = DeviceMesh.from_group(groups, mesh.device_type, layout, mesh_dim_names=names)
    return _meshes[key]


def check_expert_size(size: int, ranks: int, tensor_parallel_size: int) -> None:
    """Raise if experts cannot be divided among ``size`` of the ``ranks`` that hold one replica of a model."""
    if size < 1 or ranks % size or size % tensor_parallel_size:
        fitting = [each for each in divisors_of(ranks) if each % tensor_parallel_size == 0]
        of_layers = (
            f"a multiple of tensor_parallel_size {tensor_parallel_size}, and " if tensor_parallel_size > 1 else ""
        )
        raise MeshError(
            f"cannot build a mesh: expert_parallel_size is {size}, expected {of_layers}a divisor of the {ranks} ranks "
            f"that hold one replica of the model. Use one of {fitting}."
        )


def set_timeouts(timeout: timedelta) -> None:
    """Set the time-out of the group in use, and of all groups of this module's meshes; not collective."""
    set_timeout(group_in_use(), timeout)
    _forget_outdated()
    for group in {*_groups.values()}.union(*(mesh.get_all_groups() for mesh in _meshes.values())):
        set_timeout(group, timeout)


def group_of(ranks: list[int]) -> dist.ProcessGroup:
    """Return a cached group with the time-out of the group in use; the first call is collective over ``ranks`` only."""
    _forget_outdated()
    key = (dist.group.WORLD, group_in_use(), tuple(ranks))
    if key not in _groups:
        _groups[key] = group_among(ranks, timeout=group_timeout())
    return _groups[key]


def groups_that_share(size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's group of ``size`` successive ranks, and that of its position in each of them; collective."""
    ranks = ranks_of(group_in_use())
    index = ranks.index(dist.get_rank())
    return group_of(ranks[index // size * size :][:size]), group_of(ranks[index % size :: size])


def _forget_outdated() -> None:
    """Clear the caches if they were filled under another default group."""
    if any(key[0] is not dist.group.WORLD for key in (*_meshes, *_groups)):
        forget_meshes()


def check_shard_size(shard_size: int, world_size: int, tensor_parallel_size: int = 1) -> int:
    """Return ``shard_size`` with -1 replaced by the number of data parallel ranks; raise if a size does not divide."""
    if world_size % tensor_parallel_size:
        raise MeshError(
            f"cannot build a mesh: tensor_parallel_size is {tensor_parallel_size}, expected a divisor of the world "
            f"size {world_size}. Use one of {divisors_of(world_size)}."
        )
    data_size = world_size // tensor_parallel_size
    if shard_size == -1:
        return data_size
    is_integer = isinstance(shard_size, int) and not isinstance(shard_size, bool)
    if not is_integer or shard_size < 1 or data_size % shard_size:
        every = f"the world size {world_size}"
        fix = f"Use one of {divisors_of(data_size)}, or -1 for all ranks."
        if tensor_parallel_size > 1:
            every = f"the {data_size} data parallel ranks (world size {world_size} / tp {tensor_parallel_size})"
            fix = f"Use one of {divisors_of(data_size)}, or -1 for all of them."
            if is_integer and shard_size > 0:
                step = shard_size * tensor_parallel_size
                nearest = max(1, world_size // step) * step
                worlds = ", ".join(map(str, range(nearest, nearest + 3 * step, step)))
                fix += f" World sizes that have this shard size: {worlds}, …"
        raise MeshError(f"cannot build a mesh: shard_size is {shard_size!r}, expected a divisor of {every}. {fix}")
    return shard_size


def divisors_of(size: int) -> list[int]:
    """Return all divisors of a positive number, the smallest first."""
    return [n for n in range(1, size + 1) if size % n == 0]


def auto_shard_size(parameter_count: int, *, is_training: bool, world_size: int) -> int:
    """Return a shard size for a model of this size, by thresholds common in RLHF trainers; not collective.

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
