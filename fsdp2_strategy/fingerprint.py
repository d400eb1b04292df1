"""Whether tensors hold the same values, told by one number each, on any number of ranks and without a gather.

Input: tensors, sharded or not. Output: a fingerprint for each.

[Note: fingerprint] Each element, as bfloat16 where it is floating, is an integer of 16 bits; it is multiplied with a
weight of its position in the whole tensor, and all products are summed modulo 2^64. A sum does not ask how elements are
spread over ranks, and bfloat16 does not ask in which precision a run stores what it does not train. The weight of
position p is one of 65,536, by p's place in its block of so many, times one of the block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2_strategy.ranks import control_device, group_in_use
from fsdp2_strategy.residency import local_box, values_of

_BLOCK = 1 << 16
_BLOCKS_AT_ONCE = 8
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
    values = values_of(tensor)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    if not values.numel():
        return total
    of_place = _weights(torch.arange(_BLOCK, device=values.device))
    for begin, run in _runs(values, tuple(tensor.shape), local_box(tensor)):
        for first, last in _cuts(begin, begin + len(run)):
            part = _as_integers(run[first - begin : last - begin])
            block, place = divmod(first, _BLOCK)
            if (last - first) % _BLOCK:
                sums = part.mul_(of_place[place : place + len(part)]).sum().reshape(1)
            else:
                sums = part.view(-1, _BLOCK).mul_(of_place).sum(dim=1)
            total += sums.mul_(_weights(torch.arange(block, block + len(sums), device=values.device))).sum()
    return total


def _weights(numbers: torch.Tensor) -> torch.Tensor:
    """Return an odd weight for each number."""
    return (numbers * _STRIDE) ^ ((numbers + 1) * _MIX >> 29) | 1


def _runs(
    values: torch.Tensor, shape: tuple[int, ...], box: tuple[tuple[int, int], ...]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Return the flat runs of a box that lie in a row in the whole tensor, and where there they begin."""
    cut = max((dim for dim, part in enumerate(box) if part != (0, shape[dim])), default=0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for index in itertools.product(*(range(length) for _, length in box[:cut])):
        at = [i + begin for i, (begin, _) in zip(index, box[:cut], strict=True)] + [box[cut][0] if box else 0]
        yield sum(i * strides[dim] for dim, i in enumerate(at) if box), values[index].reshape(-1)


def _cuts(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut a run at the ends of blocks: parts of a block, and some whole ones at once."""
    while begin < end:
        whole = 0 if begin % _BLOCK else min((end - begin) // _BLOCK, _BLOCKS_AT_ONCE)
        cut = begin + whole * _BLOCK if whole else min(end, begin + _BLOCK - begin % _BLOCK)
        yield begin, cut
        begin = cut


def _as_integers(values: torch.Tensor) -> torch.Tensor:
    if values.is_floating_point():
        values = values.to(torch.bfloat16).view(torch.int16)
    return values.to(torch.int64, copy=True)
