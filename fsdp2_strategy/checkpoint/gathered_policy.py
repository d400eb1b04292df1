"""A whole policy in the host memory of rank 0, for one that insists on writing itself.

Input: a sharded policy. Output: on rank 0 a twin of it that is not sharded, with all values; and what that writes.
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
    """Return a policy unsharded, its values in host memory, on rank 0; None on the others; collective.

    Tensors travel one after the other: beside the policy rank 0 holds one of them at a time, the others a shard of it.

    Raises:
        CheckpointError: on every rank: it does not write itself, or there is no room for it.
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
            with all_or_none(f"gather {name}", CheckpointError):  # a phase each: the next one needs every rank
                whole[id(tensor)] = _whole_on_rank_0(tensor)
    if not is_rank_0():
        return None
    policy = twin(root, lambda tensor: whole[id(tensor)])
    if hasattr(policy, "config"):
        policy.config = copy.deepcopy(policy.config)  # the sharded one's may change behind a save
    return policy


def save_by_itself(policy: Any, folder: Path) -> None:
    """Let a policy that is not sharded write its folder; one rank calls it."""
    state = {clean(name): tensor for name, tensor in policy.state_dict().items()}
    policy.save_pretrained(folder, state_dict=state)


def _tensors(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = root.named_parameters(remove_duplicate=False)
    return [*parameters, *root.named_buffers(remove_duplicate=False)]


@torch.no_grad()
def _whole_on_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole on rank 0, something empty elsewhere; collective where it is sharded."""
    nothing = torch.empty(0)
    if not isinstance(tensor, DTensor):
        return values_of(tensor).to("cpu", copy=True) if is_rank_0() else nothing
    *replica, index = tensor.device_mesh.get_coordinate() or [0]
    if any(replica):
        return nothing  # the first replica is rank 0's
    [*_, placement] = tensor.placements
    dim: int = placement.dim  # type: ignore[attr-defined]
    count, length = tensor.device_mesh.size(-1), tensor.shape[dim]
    rows = max(1, -(-length // count))
    own = values_of(tensor).to(tensor.device_mesh.device_type)
    sent = own.new_zeros([*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :]])
    sent.narrow(dim, 0, own.shape[dim]).copy_(own)
    parts = [torch.empty_like(sent) for _ in range(count)] if index == 0 else None
    in_bytes = [part.view(torch.uint8) for part in parts] if parts else None  # which every backend takes
    dist.gather(sent.view(torch.uint8), in_bytes, group=tensor.device_mesh.get_group(-1), group_dst=0)
    if parts is None:
        return nothing
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for begin, part in zip(range(0, length, rows), parts, strict=False):  # the last ranks may hold nothing
        held = min(rows, length - begin)
        whole.narrow(dim, begin, held).copy_(part.narrow(dim, 0, held))
    return whole
