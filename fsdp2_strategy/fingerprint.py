"""Whether tensors hold the same values, told by one number each, on any number of ranks and without a gather.

Input: tensors, sharded or not. Output: a fingerprint for each.

[Note: fingerprint] Each element, as bfloat16 where it is floating, is an integer; it is multiplied with a weight that
follows from its position in the whole tensor, and all products are summed modulo 2^64. A sum does not ask how the
elements are spread over ranks, and bfloat16 does not ask in which precision a run stores what it does not train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2_strategy.ranks import control_device, group_in_use
from fsdp2_strategy.residency import local_box, values_of

_AT_ONCE = 1 << 22
# Odd constants without structure: that of the golden ratio, and one of splitmix64's, as signed integers.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


def local_fingerprints(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return what this rank's elements add to the fingerprints: int64, one a tensor; not collective."""
    sums = [_sum(tensor) if _counts_here(tensor) else torch.zeros((), dtype=torch.int64) for tensor in tensors.values()]
    return torch.stack([s.to(control_device()) for s in sums]) if sums else torch.zeros(0, dtype=torch.int64)


def add_over_ranks(local: torch.Tensor) -> list[str]:
    """Return the fingerprints as 16 hexadecimal digits each; collective."""
    if local.numel():
        dist.all_reduce(local, group=group_in_use())
    return [f"{value % (1 << 64):016x}" for value in local.tolist()]


def _counts_here(tensor: torch.Tensor) -> bool:
    """Say whether this rank is the one of its replicas that counts."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    mesh = tensor.device_mesh
    return all(mesh.get_local_rank(axis) == 0 for axis, p in enumerate(tensor.placements) if p.is_replicate())


@torch.no_grad()
def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over this rank's elements; see [Note: fingerprint]."""
    values, box = values_of(tensor), local_box(tensor)
    if not values.numel():
        return torch.zeros((), dtype=torch.int64)
    rows = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
    begins = _begins(tuple(tensor.shape), box).to(rows.device)  # of each row, in the whole tensor
    columns = torch.arange(rows.shape[1], device=rows.device) + (box[-1][0] if box else 0)
    at_once = max(1, _AT_ONCE // rows.shape[1])
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    for i in range(0, rows.shape[0], at_once):
        positions = begins[i : i + at_once, None] + columns
        weights = (positions * _STRIDE) ^ ((positions + 1) * _MIX >> 29)
        total += (_as_integers(rows[i : i + at_once]) * weights).sum()
    return total


def _begins(shape: tuple[int, ...], box: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Return where in the whole tensor each row of a box begins, counted in elements."""
    begins = torch.zeros(1, dtype=torch.int64)
    for dim, (begin, length) in enumerate(box[:-1]):
        stride = math.prod(shape[dim + 1 :])
        begins = (begins[:, None] + (torch.arange(length) + begin) * stride).reshape(-1)
    return begins


def _as_integers(values: torch.Tensor) -> torch.Tensor:
    if values.is_floating_point():
        return values.to(torch.bfloat16).view(torch.int16).to(torch.int64) * 2 + 1
    return values.to(torch.int64) * 2 + 1
