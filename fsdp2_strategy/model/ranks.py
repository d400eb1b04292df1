"""The ranks of a model: collectives inside a call reach those that share the model's mesh.

Input: a model, a mesh or tensors. Output: the process group in use, for a block of code or a function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.mesh import group_of
from fsdp2_strategy.distributed.process_group import group_in_use, on_group, ranks_of
from fsdp2_strategy.distributed.torch_internals import mesh_of
from fsdp2_strategy.model.fsdp_state import parameter_groups
from fsdp2_strategy.model.wrappers import unwrap_model

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def on_ranks_of(subject: DeviceMesh | nn.Module | Iterable[torch.Tensor]) -> Iterator[None]:
    """Let what this thread says to other ranks reach those that share a mesh, a model or tensors, inside.

    Nothing changes where these are the ranks of the group in use, or where nothing is sharded. Collective the first
    time, for a mesh of two axes on some of the ranks.
    """
    mesh = subject if isinstance(subject, DeviceMesh) else _mesh_of(subject)
    group = group_in_use()
    if mesh is None or (group is None and mesh.size() == dist.get_world_size()):
        yield
        return
    ranks = sorted(mesh.mesh.flatten().tolist())
    if ranks == ranks_of(group):
        yield
        return
    with on_group(mesh.get_group() if mesh.ndim == 1 else group_of(ranks)):
        yield


def on_its_ranks(function: F) -> F:
    """Let a function, whose first parameter is ``model``, run `on_ranks_of` that model."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with on_ranks_of(args[0] if args else kwargs["model"]):
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def _mesh_of(subject: nn.Module | Iterable[torch.Tensor]) -> DeviceMesh | None:
    """Return the mesh of a model or of tensors, the largest of several; None where nothing is sharded."""
    meshes: dict[int, DeviceMesh] = {}
    if isinstance(subject, nn.Module):
        root = unwrap_model(subject)
        for record in parameter_groups(root):  # it knows while parameters are gathered, too
            meshes[id(mesh_of(record))] = mesh_of(record)
        subject = () if meshes else root.parameters()
    for tensor in subject:
        if isinstance(tensor, DTensor):
            meshes[id(tensor.device_mesh)] = tensor.device_mesh
    return max(meshes.values(), key=DeviceMesh.size, default=None)
