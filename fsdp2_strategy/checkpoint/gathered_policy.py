"""Gather a policy into the host memory of rank 0, and save it with its own `save_pretrained`.

Input: a sharded policy. Output: an unsharded copy on rank 0, and the folder that the copy's `save_pretrained` writes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.peft.merge import has_adapters
from fsdp2_strategy.hf.skeleton import original_class, twin
from fsdp2_strategy.model.names import clean
from fsdp2_strategy.model.placeholders import values_of


def gathered_policy(root: nn.Module) -> nn.Module | None:
    """Return an unsharded copy of a policy in host memory on rank 0, and None on other ranks; collective.

    Tensors are gathered one at a time: rank 0 needs memory for the copy and one full tensor, others for one shard.

    Raises:
        CheckpointError: on every rank: the policy has adapters or no `save_pretrained`, or memory runs out.
    """
    with all_or_none("gather a policy", CheckpointError):
        name = original_class(root).__name__
        if has_adapters(root):
            raise CheckpointError(
                f"cannot save {name} by its own save_pretrained: it has adapters, expected none, for peft saves those "
                "alone. Leave gather_for_save_pretrained out."
            )
        if not hasattr(root, "save_pretrained"):
            raise CheckpointError(
                f"cannot save {name} by its own save_pretrained: it has none, expected save_pretrained(folder, "
                "state_dict=...). Leave gather_for_save_pretrained out."
            )
    whole: dict[int, torch.Tensor] = {}
    for name, tensor in _tensors(root):
        if id(tensor) not in whole:
            with all_or_none(f"gather {name}", CheckpointError):  # agree per tensor: each gather needs all ranks
                whole[id(tensor)] = _whole_on_rank_0(tensor)
    if not is_rank_0():
        return None
    policy = twin(root, lambda tensor: whole[id(tensor)])
    if hasattr(policy, "config"):
        policy.config = copy.deepcopy(policy.config)  # the original may change during an asynchronous save
    return policy


def save_by_itself(policy: Any, folder: Path) -> None:
    """Save an unsharded policy with its own `save_pretrained`; not collective: one rank calls it."""
    state = {clean(name): tensor for name, tensor in policy.state_dict().items()}
    policy.save_pretrained(folder, state_dict=state)


def _tensors(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = root.named_parameters(remove_duplicate=False)
    return [*parameters, *root.named_buffers(remove_duplicate=False)]


@torch.no_grad()
def _whole_on_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor on rank 0, an empty tensor on other ranks; collective if the tensor is sharded."""
    nothing = torch.empty(0)
    if not isinstance(tensor, DTensor):
        return values_of(tensor).to("cpu", copy=True) if is_rank_0() else nothing
    *replica, index = tensor.device_mesh.get_coordinate() or [0]
    if any(replica):
        return nothing  # rank 0 is in the first replica
    [*_, placement] = tensor.placements
    dim: int = placement.dim  # type: ignore[attr-defined]
    count, length = tensor.device_mesh.size(-1), tensor.shape[dim]
    rows = max(1, -(-length // count))
    own = values_of(tensor).to(tensor.device_mesh.device_type)
    sent = own.new_zeros([*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :]])
    sent.narrow(dim, 0, own.shape[dim]).copy_(own)
    parts = [torch.empty_like(sent) for _ in range(count)] if index == 0 else None
    in_bytes = [part.view(torch.uint8) for part in parts] if parts else None  # every backend can gather uint8
    dist.gather(sent.view(torch.uint8), in_bytes, group=tensor.device_mesh.get_group(-1), group_dst=0)
    if parts is None:
        return nothing
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for begin, part in zip(range(0, length, rows), parts, strict=False):  # shards of the last ranks may be empty
        held = min(rows, length - begin)
        whole.narrow(dim, begin, held).copy_(part.narrow(dim, 0, held))
    return whole
