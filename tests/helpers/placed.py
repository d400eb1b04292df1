"""Models whose weights are split along two axes of a mesh by hand: as by tensor parallelism and `fully_shard`.

Their forward does not run. Every rank builds the full model, so what a rank holds is known without a collective.
"""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp2_strategy.distributed.torch_internals import local_of
from fsdp2_strategy.model.shards import sharded_like
from helpers.models import build

AXES = ("replicate", "shard", "tp")

_ATTENTION = {r"[qkv]_proj\.weight$": Shard(0), r"[qkv]_proj\.bias$": Shard(0), r"o_proj\.weight$": Shard(1)}
_ENDS = {r"embed_tokens\.weight$": Shard(0), r"lm_head\.weight$": Shard(0)}
_DENSE = {r"(gate|up)_proj\.weight$": Shard(0), r"down_proj\.weight$": Shard(1)}
_FUSED = {r"gate_up_proj(\.weight)?$": _StridedShard(-2, split_factor=2), r"down_proj(\.weight)?$": Shard(-1)}
PLANS = {
    "llama": {**_ATTENTION, **_DENSE, **_ENDS},
    "llama_tied": {**_ATTENTION, **_DENSE, **_ENDS},
    "phi3": {**_FUSED, r"qkv_proj\.weight$": Shard(0), r"o_proj\.weight$": Shard(1), **_ENDS},
    "mixtral": {**_ATTENTION, **_FUSED, **_ENDS},
    "mixtral experts": {r"experts\.\w+$": Shard(0)},
    "gpt_oss": {**_ATTENTION, r"experts\.\w+$": Shard(0)},
    "qwen2": {**_ATTENTION, **_DENSE},
}
"""For each model, patterns of names of parameters, and how tensor or expert parallelism places them."""
SHAPES = {
    "tp": (1, 1, 2),
    "tp x shard": (1, 2, 2),
    "hsdp x tp": (2, 1, 2),
    "tp of 3": (1, 1, 3),
    "shard of 3": (1, 3, 1),
    "one rank": (1, 1, 1),
}
"""Shapes of meshes with the axes `AXES`."""


def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=AXES)


def place(model, mesh, plan):
    """Split a model's parameters in place: along the axis "tp" by a plan, then by `fully_shard`."""
    placed = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        placement = next((p for pattern, p in plan.items() if re.search(pattern, name)), None)
        if placement is None or mesh.size(2) == 1:
            continue
        if id(parameter) not in placed:
            dim = placement.dim % parameter.ndim
            fused = isinstance(placement, _StridedShard)
            own = _StridedShard(dim, split_factor=placement.split_factor) if fused else Shard(dim)
            values = distribute_tensor(parameter.detach(), mesh["tp"], [own], src_data_rank=None)
            placed[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, placed[id(parameter)])
    of_data = mesh["replicate", "shard"] if mesh.size(0) > 1 else mesh["shard"]
    for layer in getattr(getattr(model, "model", model), "layers", []):
        fully_shard(layer, mesh=of_data)
    fully_shard(model, mesh=of_data)
    return model


def placed_model(name, shape, seed=0):
    """Build a model of `PLANS`, split on a mesh of this shape."""
    return place(build(name.split()[0], seed), mesh_of(shape), PLANS[name])


def with_gradients(model, name, shape, seed):
    """Give each parameter a gradient: the parameter of a model that was built with another seed."""
    for own, other in zip(model.parameters(), placed_model(name, shape, seed).parameters(), strict=True):
        own.grad = sharded_like(own, local_of(other.detach()).clone())


def locals_of(tensors):
    return {name: local_of(tensor).detach().clone() for name, tensor in tensors.items()}


def differing(actual, expected):
    """Return the names of tensors that differ."""
    assert actual.keys() == expected.keys()
    return [name for name in expected if not torch.equal(actual[name], expected[name])]
