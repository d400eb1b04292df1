"""Compute fingerprints of tensors: short hashes that do not depend on the number of ranks, and need no all-gather.

Input: tensors, sharded or not. Output: a `Fingerprint` of each tensor.

[Note: fingerprint] The bits of each element are read as an integer and multiplied by a weight, which depends on the
element's position in the full tensor. The products are summed modulo 2^64. So the sum does not depend on the sharding.
The weight of a position is the product of two weights: one for the index of its block of elements, and one for the
offset in that block. Another run may store the same frozen tensor in another dtype. To compare such tensors, a second
sum is computed over the elements rounded to bfloat16.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.process_group import control_device, group_in_use, is_rank_0
from fsdp2_strategy.model.boxes import Box, box_of, row_major
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.model.placeholders import values_of
from fsdp2_strategy.model.shards import local_shard, replica_of
from fsdp2_strategy.model.state import Slot, model_state

_INITIAL_SUMS = Slot[dict[str, torch.Tensor]]("initial sums of the frozen parameters")
"""`local_sums` of frozen parameters by name, stored after the model was sharded and loaded."""

# Odd 64-bit hash constants as signed integers: 2^64 / golden ratio, and a multiplier of splitmix64.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of one tensor; see [Note: fingerprint]."""

    dtype: str
    exact: str
    """Weighted sum over the elements as stored, as 16 hexadecimal digits."""
    as_bfloat16: str
    """Weighted sum over the elements rounded to bfloat16; equal to ``exact`` for bfloat16 and non-floating dtypes."""

    def has_same_values(self, other: Fingerprint) -> bool | None:
        """Return whether two tensors have the same values; if their dtypes differ, compare them rounded to bfloat16.

        Return None, for unknown, if the dtypes differ and one is float16. A value that was rounded to float16 may round
        to another bfloat16 value than the original does.
        """
        if self.dtype == other.dtype:
            return self.exact == other.exact
        if "torch.float16" in (self.dtype, other.dtype):
            return None
        return self.as_bfloat16 == other.as_bfloat16


def local_sums(tensors: Mapping[str, torch.Tensor], elements: int | None = None) -> torch.Tensor:
    """Return the fingerprint sums over this rank's elements: int64 of shape (number of tensors, 2); not collective.

    They depend on ``elements``, the number per block, by default ``sizes.FINGERPRINT_ELEMENTS``.
    """
    offset_weights = _weights(torch.arange(elements or sizes.FINGERPRINT_ELEMENTS))
    sums = [_sums(t, offset_weights).to(control_device()) for t in tensors.values()]
    return torch.stack(sums) if sums else torch.zeros(0, 2, dtype=torch.int64, device=control_device())


def store_initial_sums(model: nn.Module) -> None:
    """Store `local_sums` of a partly frozen model's frozen parameters, unless any is on meta; not collective."""
    parameters = named_parameters(model)
    frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
    if 0 < len(frozen) < len(parameters) and not any(p.is_meta for p in frozen.values()):
        model_state(model).set(_INITIAL_SUMS, dict(zip(frozen, local_sums(frozen), strict=True)))


def changed_since_initial(model: nn.Module, names: Iterable[str], local: torch.Tensor) -> list[str]:
    """Return which of the named tensors have changed on any rank since `store_initial_sums`; collective.

    ``local`` contains the current `local_sums` of these tensors. One without stored sums counts as changed.
    """
    before = model_state(model).get(_INITIAL_SUMS) or {}
    names = list(names)
    differs = [name not in before or not torch.equal(before[name], own) for name, own in zip(names, local, strict=True)]
    flags = torch.tensor(differs, dtype=torch.int64, device=control_device())
    if differs:
        dist.all_reduce(flags, group=group_in_use())
    return [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]


def fingerprints(tensors: Mapping[str, torch.Tensor], local: torch.Tensor) -> dict[str, Fingerprint]:
    """All-reduce `local_sums` in place, and return the fingerprints of their tensors; collective."""
    if local.numel():
        dist.all_reduce(local, group=group_in_use())
    digits = [[f"{value % (1 << 64):016x}" for value in pair] for pair in local.tolist()]
    return {name: Fingerprint(str(t.dtype), *pair) for (name, t), pair in zip(tensors.items(), digits, strict=True)}


@torch.no_grad()
def _sums(tensor: torch.Tensor, offset_weights: torch.Tensor) -> torch.Tensor:
    """Return the two weighted sums of one tensor over this rank's elements."""
    values = values_of(tensor)
    totals = torch.zeros(2, dtype=torch.int64, device=values.device)
    is_first_replica = replica_of(tensor)[0] == 0 if isinstance(tensor, DTensor) else is_rank_0()
    if not values.numel() or not is_first_replica:  # only the first replica is summed
        return totals
    rounded = values.is_floating_point() and values.dtype != torch.bfloat16
    offset_weights = offset_weights.to(values.device)

    def add(part: torch.Tensor, weighted: Callable[[torch.Tensor], torch.Tensor]) -> None:
        totals[0] += weighted(_bits(part))
        if rounded:
            totals[1] += weighted(_bits(part.to(torch.bfloat16)))

    for box in local_shard(tensor).boxes:
        own, strides = box_of(values, box.local), row_major(tensor.shape)
        split_dim = _split_dim(box.full, tuple(tensor.shape))
        run_elements = math.prod(length for _, length in box.full[split_dim:])
        if split_dim and run_elements < len(offset_weights):
            at_once = len(offset_weights) * sizes.FINGERPRINT_BLOCKS
            for positions, part in _scattered(own, strides, box.full, at_once):
                add(part, partial(_weighted_at, positions=positions, offset_weights=offset_weights))
            continue
        for begin, run in _runs(own, strides, box.full, split_dim):
            for first, last in _split_at_blocks(begin, begin + len(run), len(offset_weights)):
                part = run[first - begin : last - begin]
                add(part, partial(_weighted, first=first, offset_weights=offset_weights))
    return totals if rounded else totals[:1].expand(2)


def _weighted_at(integers: torch.Tensor, positions: torch.Tensor, offset_weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of integers at any positions of the flattened full tensor, and overwrite them."""
    size = len(offset_weights)
    return integers.mul_(_weights(positions // size)).mul_(offset_weights[positions % size]).sum()


def _weighted(integers: torch.Tensor, first: int, offset_weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of consecutive integers of the full tensor, and overwrite them.

    They are a part of one block, or several complete blocks; ``first`` is the position of the first in the full tensor.
    """
    size = len(offset_weights)
    block, offset = divmod(first, size)
    if offset or len(integers) % size:
        sums = integers.mul_(offset_weights[offset : offset + len(integers)]).sum().reshape(1)
    else:
        sums = integers.view(-1, size).mul_(offset_weights).sum(dim=1)
    return sums.mul_(_weights(torch.arange(block, block + len(sums), device=sums.device))).sum()


def _weights(numbers: torch.Tensor) -> torch.Tensor:
    """Return an odd pseudo-random weight for each number."""
    return (numbers * _STRIDE) ^ ((numbers + 1) * _MIX >> 29) | 1


def _split_dim(box: Box, shape: tuple[int, ...]) -> int:
    """Return the last dimension of which a box has only a part; 0 if there is none."""
    return max((dim for dim, part in enumerate(box) if part != (0, shape[dim])), default=0)


def _runs(values: torch.Tensor, strides: Sequence[int], box: Box, split_dim: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the runs of a box that are contiguous in the full tensor: offset in it, and flattened values."""
    begin = sum(offset * stride for (offset, _), stride in zip(box, strides, strict=True))
    for index in itertools.product(*(range(length) for _, length in box[:split_dim])):
        yield begin + sum(i * stride for i, stride in zip(index, strides, strict=False)), values[index].reshape(-1)


def _scattered(
    values: torch.Tensor, strides: Sequence[int], box: Box, at_once: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield positions in the flattened full tensor, and the values there, of about ``at_once`` elements of a box."""
    if len(box) > 2 and math.prod(length for _, length in box[1:]) > at_once:
        for index in range(box[0][1]):
            for positions, part in _scattered(values[index], strides[1:], box[1:], at_once):
                yield positions + (box[0][0] + index) * strides[0], part
        return
    inside = torch.zeros((), dtype=torch.int64, device=values.device)
    for (begin, length), stride in zip(box[1:], strides[1:], strict=True):
        inside = inside[..., None] + torch.arange(begin, begin + length, device=values.device) * stride
    (first, rows), step = box[0], max(1, at_once // max(1, inside.numel()))
    for at in range(0, rows, step):
        part = values[at : at + step]
        row = torch.arange(first + at, first + at + len(part), device=values.device) * strides[0]
        yield (row[:, None] + inside.reshape(1, -1)).reshape(-1), part.reshape(-1)


def _split_at_blocks(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Split a range of positions at block boundaries; yield parts of a block, and groups of whole blocks."""
    while begin < end:
        full_blocks = 0 if begin % size else min((end - begin) // size, sizes.FINGERPRINT_BLOCKS)
        cut = begin + full_blocks * size if full_blocks else min(end, begin + size - begin % size)
        yield begin, cut
        begin = cut


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return a new int64 tensor with the bits of floating-point values, or with the integer values."""
    if values.is_floating_point():
        values = values.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    return values.to(torch.int64, copy=True)
