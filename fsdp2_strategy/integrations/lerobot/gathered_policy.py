"""Gather a policy into the host memory of rank 0, and save it with its own `save_pretrained`.

Input: a sharded policy. Output: an unsharded copy on rank 0, and the folder that the copy's `save_pretrained` writes.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.peft.merge import is_peft_model
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.names import clean
from fsdp2_strategy.model.placeholders import values_of
from fsdp2_strategy.model.shards import replica_of, shard_group_of


def gathered_policy(root: nn.Module) -> nn.Module | None:
    """Return an unsharded copy of a policy in host memory on rank 0, and None on other ranks; collective.

    Tensors are gathered one at a time. Rank 0 needs host memory for the full copy, and device memory for one full
    tensor. Other ranks need device memory for one shard.
    """
    with all_or_none("gather a policy", CheckpointError):
        problem = "it has no save_pretrained, expected save_pretrained(folder, state_dict=...)"
        if is_peft_model(root):
            problem = "it has adapters, expected none, because peft saves only the adapters"
        if is_peft_model(root) or not hasattr(root, "save_pretrained"):
            raise CheckpointError(
                f"cannot save {class_name(root)} with its own save_pretrained: {problem}. "
                "Omit gather_for_save_pretrained."
            )
    gathered: dict[int, torch.Tensor] = {}
    parameters = root.named_parameters(remove_duplicate=False)
    for name, tensor in [*parameters, *root.named_buffers(remove_duplicate=False)]:
        if id(tensor) not in gathered:
            # The ranks agree after each tensor, because the next gather needs all of them.
            with all_or_none(f"gather {name}", CheckpointError):
                gathered[id(tensor)] = _gather_to_rank_0(tensor)
    if not is_rank_0():
        return None
    policy = meta_skeleton(root, lambda tensor: gathered[id(tensor)])
    if hasattr(policy, "config"):
        policy.config = copy.deepcopy(policy.config)  # the original may change during an asynchronous save
    return policy


def save_with_own_method(policy: Any, folder: Path) -> None:
    """Save an unsharded policy with its own `save_pretrained`; only rank 0 calls it."""
    state = {clean(name): tensor for name, tensor in policy.state_dict().items()}
    policy.save_pretrained(folder, state_dict=state)


@torch.no_grad()
def _gather_to_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor on rank 0, an empty tensor on other ranks; collective if the tensor is sharded."""
    nothing = torch.empty(0)
    if not isinstance(tensor, DTensor):
        return values_of(tensor).to("cpu", copy=True) if is_rank_0() else nothing
    if replica_of(tensor)[0]:
        return nothing  # only the first replica, which contains rank 0, gathers
    local = values_of(tensor).to(tensor.device_mesh.device_type)
    holders = shard_group_of(tensor)
    if holders is None:
        return local.to("cpu", copy=True) if is_rank_0() else nothing
    shards = holders.shards(tensor)
    sent = torch.zeros(max(math.prod(shard.shape) for shard in shards), dtype=local.dtype, device=local.device)
    sent[: local.numel()].copy_(local.reshape(-1))
    received = [torch.empty_like(sent) for _ in shards] if is_rank_0() else []
    in_bytes = [each.view(torch.uint8) for each in received] or None  # every backend can gather uint8
    dist.gather(sent.view(torch.uint8), in_bytes, group=holders.group, group_dst=0)
    if not received:
        return nothing
    full = torch.empty(tensor.shape, dtype=tensor.dtype)
    for shard, each in zip(shards, received, strict=True):
        shard.copy_to(full, each[: math.prod(shard.shape)].view(shard.shape))
    return full
