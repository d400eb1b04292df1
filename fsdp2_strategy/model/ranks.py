"""Run collectives on the process group of a model's mesh, for a block of code or a function.

Input: a model, a mesh or tensors. Output: their process group as the group in use; see [Note: group in use] in
`process_group`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fsdp2_strategy.distributed.mesh import group_of, model_mesh
from fsdp2_strategy.distributed.process_group import group_in_use, on_group, ranks_of
from fsdp2_strategy.distributed.torch_internals import (
    fsdp_state_of,
    mesh_of,
    param_groups_of,
    parameters_of,
    shard_of,
    with_placements,
)
from fsdp2_strategy.errors import ArgumentError
from fsdp2_strategy.model.fsdp_state import parameter_groups
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.model.wrappers import unwrap_model

F = TypeVar("F", bound=Callable[..., Any])

_RANKS_PER_LAYER = Slot[int]("ranks that share layers")
_SEQUENCE_GROUP = Slot[dist.ProcessGroup]("ranks that share sequences")


def set_ranks_per_layer(root: nn.Module, count: int) -> None:
    """Store how many ranks share each layer of a model, and compute the same batch; not collective."""
    model_state(root).set(_RANKS_PER_LAYER, count)


def ranks_per_layer(model: nn.Module) -> int:
    """Return how many ranks share each layer of a model; 1 if its layers are not split; not collective."""
    return model_state(unwrap_model(model)).get(_RANKS_PER_LAYER) or 1


def set_sequence_group(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Store the ranks that share the sequences of a model; not collective."""
    model_state(root).set(_SEQUENCE_GROUP, group)


def sequence_group_of(root: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that share the sequences of a sharded model; None if it computes full sequences only."""
    return model_state(root).get(_SEQUENCE_GROUP)


@contextmanager
def on_ranks_of(subject: DeviceMesh | nn.Module | Iterable[torch.Tensor]) -> Iterator[None]:
    """Run this block's collectives on the ranks of a mesh, or of the mesh of a model or tensors.

    The group in use does not change if it has the same ranks, or if no tensor is sharded. Otherwise, the first call for
    a mesh with several axes creates a process group, which is collective over the mesh.
    """
    mesh = subject if isinstance(subject, DeviceMesh) else _mesh_of(subject)
    group = group_in_use()
    if mesh is None or (group is None and mesh.size() == dist.get_world_size()):
        yield
        return
    ranks = _ranks_in(mesh)
    if ranks == ranks_of(group):
        yield
        return
    with on_group(mesh.get_group() if mesh.ndim == 1 else group_of(ranks)):
        yield


@overload
def on_model_ranks(function: F) -> F: ...
@overload
def on_model_ranks(*, takes_several: bool) -> Callable[[F], F]: ...
def on_model_ranks(function: F | None = None, *, takes_several: bool = False) -> F | Callable[[F], F]:
    """Decorate a function whose first parameter is ``model``: run it within `on_ranks_of` that model.

    With ``takes_several``, ``model`` may also be a mapping of models by name, which must be on the same ranks. The
    function raises ArgumentError for anything else.
    """
    if function is None:
        return functools.partial(on_model_ranks, takes_several=takes_several)
    called, name = function, function.__name__

    @functools.wraps(called)
    def run(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs["model"]
        if takes_several and isinstance(model, Mapping):
            subject = _first_of_same_ranks(name, model)
        elif isinstance(model, nn.Module):
            subject = model
        else:
            raise ArgumentError(
                f"cannot call {name}: the model is a {type(model).__name__}, expected an nn.Module. Check the order of "
                "the arguments."
            )
        with on_ranks_of(subject):
            return called(*args, **kwargs)

    return run


def _first_of_same_ranks(name: str, models: Mapping[str, nn.Module]) -> nn.Module | tuple[()]:
    """Return one of several sharded models, which must be on the same ranks; nothing if none is sharded."""
    ranks = {}
    for key, model in models.items():
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                f"cannot call {name}: the model {key!r} is a {type(model).__name__}, expected an nn.Module. Pass "
                "models by name."
            )
        if (mesh := _mesh_of(model)) is not None:
            ranks[key] = _ranks_in(mesh)
    if len({tuple(each) for each in ranks.values()}) > 1:
        on = "; ".join(f"{key!r} is on the ranks {each}" for key, each in ranks.items())
        raise ArgumentError(
            f"cannot call {name}: {on}, expected models on the same ranks. Call it for the models of the same ranks "
            "only."
        )
    return next((models[key] for key in ranks), ())


def _ranks_in(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return sorted(ranks)


def _mesh_of(subject: nn.Module | Iterable[torch.Tensor]) -> DeviceMesh | None:
    """Return the largest mesh of a model or tensors, with the axis "tp" if layers are split; None if not sharded."""
    meshes: dict[int, DeviceMesh] = {}
    tensors: list[torch.Tensor] = []
    if isinstance(subject, nn.Module):
        root = unwrap_model(subject)
        for param_group in param_groups_of(fsdp_state_of(root)) if isinstance(root, FSDPModule) else ():
            if mesh_of(param_group).size() == dist.get_world_size():  # none is larger: spare a walk in every call
                return model_mesh(mesh_of(param_group))
        for param_group in parameter_groups(root):  # these have the mesh even while parameters are unsharded
            meshes[id(mesh_of(param_group))] = mesh_of(param_group)
            # The mesh of a parameter has the axes of tensor parallelism, too.
            tensors += [shard_of(parameter) for parameter in parameters_of(param_group)]
        subject = tensors if meshes else root.parameters()
    meshes |= {id(mesh): mesh for _, mesh, _ in with_placements([*subject]) if mesh is not None}
    largest = max(meshes.values(), key=DeviceMesh.size, default=None)
    return None if largest is None else model_mesh(largest)
