"""Compare batches and losses between ranks that must have the same ones.

Input: the batches or losses of this and other ranks. Output: the facts about batches that are compared, and an error on
every rank if they differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.lost_ranks import agreed_error
from fsdp2_strategy.distributed.process_group import control_device, group_in_use, ranks_of, world_size

_LOSS_TOLERANCE = {"rtol": 1e-2, "atol": 1e-4}
"""The second is for losses that are nearly zero, such as those of a policy whose advantages have the mean zero."""


def facts_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return shape, dtype and checksum of each tensor, and numbers as they are; not collective."""
    numbers = {name: value for name, value in sorted(batch.items()) if isinstance(value, int | float)}
    tensors = {name: value for name, value in sorted(batch.items()) if _is_plain(value)}
    sums = torch.stack([_checksum(tensor) for tensor in tensors.values()]).tolist() if tensors else []
    of_tensors = zip(tensors.items(), sums, strict=True)
    return {name: (tuple(t.shape), str(t.dtype), own) for (name, t), own in of_tensors} | numbers


def check_batches_of_groups(batch: Mapping[str, Any], size: int) -> None:
    """Raise on every rank if a batch differs within a group of ``size`` successive ranks; collective."""
    facts = facts_of(batch)
    digest = hashlib.sha256(repr(facts).encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(control_device())
    groups = _gathered(own).view(-1, size, len(own))
    if bool((groups == groups[:, :1]).all()):
        return
    of_ranks: list[dict[str, Any]] = [{}] * world_size()
    dist.all_gather_object(of_ranks, facts, group=group_in_use())
    ranks = ranks_of(group_in_use())
    for begin in range(0, len(ranks), size):
        first = of_ranks[begin]
        for rank, other in zip(ranks[begin : begin + size], of_ranks[begin : begin + size], strict=True):
            names = differing_names(first, other)
            if names:
                shared = ", ".join(map(str, ranks[begin : begin + size]))
                raise agreed_error(
                    f"cannot compute a batch: {', '.join(names)} of rank {rank} differ from those of rank "
                    f"{ranks[begin]}, expected the same batch on the ranks {shared}, which share layers. Draw batches "
                    "by strategy.dp_rank and strategy.dp_size."
                )


def check_losses_of_groups(loss: torch.Tensor, size: int) -> None:
    """Raise on every rank if the loss differs by more than rounding within ``size`` successive ranks; collective."""
    own = loss.detach().reshape(1).to(control_device(), torch.float64)
    groups = _gathered(own).view(-1, size)
    is_close = torch.isclose(groups, groups[:, :1], **_LOSS_TOLERANCE, equal_nan=True)
    if bool(is_close.all()):
        return
    ranks = ranks_of(group_in_use())
    first = int((~is_close).any(dim=1).nonzero()[0])
    sharing = ranks[first * size :][:size]
    raise agreed_error(
        f"cannot run backward: the losses of the ranks {', '.join(map(str, sharing))} are "
        f"{', '.join(f'{value:.6g}' for value in groups[first].tolist())}, expected equal losses, because these ranks "
        "share layers. Compute the loss from the same labels, advantages and masks on these ranks: draw data by "
        "strategy.dp_rank and strategy.dp_size."
    )


def _gathered(own: torch.Tensor) -> torch.Tensor:
    """Return the one-dimensional tensors of all ranks of the group in use, stacked; collective."""
    gathered = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(gathered, own, group=group_in_use())
    return torch.stack(gathered)


def differing_names(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names whose facts differ."""
    return [name for name in {**first, **other} if first.get(name) != other.get(name)]


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not value.is_meta


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that changes if a value or the order of the values changes."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.detach().reshape(-1).view(kinds[tensor.element_size()]).to(torch.int64)
    return (bits * (torch.arange(len(bits), device=bits.device) % 65521 + 1)).sum()
