"""Compute which elements of a full tensor a rank holds, from shapes, placements and coordinates alone.

Input: the shape of a full tensor, its placements, and a coordinate in a mesh. Output: a `LocalShard`. Independent of
process groups.

[Note: boxes] A shard is the product of index ranges, one list of ranges for each dimension. `fully_shard` alone gives
one range of rows. Tensor parallelism adds a range of rows or columns, or, for a weight that consists of several fused
ones, a range in each of them. So a shard consists of one or more *boxes*. The shard's local tensor has the ranges of a
dimension one after another.

[Note: order of splits] If two axes of a mesh split the same dimension, the result depends on their order. Placements
are read from left to right, except for `_StridedShard`: `fully_shard` puts its axes to the left of those of tensor
parallelism, but splits the local tensor, so it splits last. It marks this with a `_StridedShard` whose split factor
is the number of shards on its right. A multiple of that number, such as 2 for a fused gate and up projection with none
on its right, means that the dimension is first divided into as many parts, each of which is then split.

``DTensor.full_tensor`` does not follow this rule: for a fused weight that `fully_shard` splits, too, torch 2.13 returns
rows in another order, and torch 2.11 raises an error. Use `gather_full`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp2_strategy.distributed.torch_internals import StridedShard
from fsdp2_strategy.errors import ShardError

Range = tuple[int, int]
"""The first index and the length of a range of indices."""
Box = tuple[Range, ...]
"""For each dimension, the first index and the length of a box."""


@dataclass(frozen=True, slots=True)
class ShardBox:
    """A box of a full tensor that a rank holds, and the box of its local tensor that has the same values."""

    full: Box
    local: Box


@dataclass(frozen=True)
class LocalShard:
    """The elements of a full tensor that a rank holds; see [Note: boxes]."""

    full_shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]
    """For each dimension, the ranges of indices in the order of the local tensor; none if it is empty."""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return tuple(sum(length for _, length in of_dim) for of_dim in self.ranges)

    @cached_property
    def boxes(self) -> tuple[ShardBox, ...]:
        """The boxes of the shard, in the order of its elements; none if it is empty."""
        found = []
        for full in itertools.product(*self.ranges):
            local = []
            for of_dim, one in zip(self.ranges, full, strict=True):
                before = of_dim[: of_dim.index(one)]
                local.append((sum(length for _, length in before), one[1]))
            found.append(ShardBox(full, tuple(local)))
        return tuple(found)

    @property
    def is_row_range(self) -> bool:
        """Whether the elements are one range of the flattened full tensor that consists of complete rows."""
        return all(of_dim == ((0, n),) for of_dim, n in zip(self.ranges[1:], self.full_shape[1:], strict=True)) and (
            len(self.boxes) <= 1
        )

    def indices(self, dim: int) -> torch.Tensor:
        """Return the index in the full tensor of each index [n] of a dimension of the local tensor, int64."""
        ranges = [torch.arange(begin, begin + length) for begin, length in self.ranges[dim]]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Return the shard's elements of a full tensor: a view if the shard is one box, else a copy."""
        for dim, ranges in enumerate(self.ranges):
            parts = [full.narrow(dim, *one) for one in ranges] or [full.narrow(dim, 0, 0)]
            full = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return full

    def copy_to(self, full: torch.Tensor, local: torch.Tensor) -> None:
        """Copy a local tensor to the shard's elements of a full tensor."""
        for box in self.boxes:
            box_of(full, box.full).copy_(box_of(local, box.local))


def box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of a box of a tensor."""
    for dim, (begin, length) in enumerate(box):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, length)
    return tensor


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@lru_cache(maxsize=65536)
def shard_at(
    shape: tuple[int, ...], sizes: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> LocalShard:
    """Return the elements that the rank at a coordinate of a mesh of these sizes holds; ShardError if undefined."""
    splits: dict[int, list[tuple[int, int, int]]] = {}
    for size, index, placement in zip(sizes, coordinate, placements, strict=True):
        if isinstance(placement, Shard | StridedShard):
            factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
            splits.setdefault(placement.dim % len(shape), []).append((size, index, factor))
        elif not placement.is_replicate():
            raise ShardError(
                f"cannot find this rank's part of a tensor: its placements are {placements}, expected shards and "
                "replicas. Use a mesh from build_mesh."
            )
    ranges = []
    for dim, length in enumerate(shape):
        of_dim: tuple[Range, ...] = ((0, length),)
        for size, index, parts in _in_order(splits.get(dim, []), placements):
            of_dim = _split(of_dim, size, index, parts)
        ranges.append(of_dim)
    return LocalShard(shape, tuple(ranges))


def _in_order(splits: list[tuple[int, int, int]], placements: tuple[Placement, ...]) -> list[tuple[int, int, int]]:
    """Return the splits of a dimension in the order in which they were made; see [Note: order of splits].

    Each has a number of shards, the index of one, and the number of parts that are split separately. The input has the
    split factor instead of the last.
    """
    if all(factor == 1 for _, _, factor in splits):
        return splits
    ordered = []
    on_the_right = 1
    for size, index, factor in reversed(splits):
        parts, rest = divmod(factor, on_the_right) if factor > 1 else (1, 0)
        if rest:
            raise ShardError(
                f"cannot find this rank's part of a tensor: its placements are {placements}, expected split factors "
                "that are multiples of the number of shards on their right. Use a mesh from build_mesh."
            )
        ordered.append((size, index, parts))
        on_the_right *= size
    return ordered


def _split(ranges: tuple[Range, ...], size: int, index: int, parts: int) -> tuple[Range, ...]:
    """Divide consecutive indices into parts, split each part as `torch.chunk` does, and return one shard of each."""
    total = sum(length for _, length in ranges)
    found: list[Range] = []
    step = -(-total // parts)
    for begin in range(0, total, step or 1):
        length = min(step, total - begin)
        chunk = -(-length // size)
        first = begin + min(index * chunk, length)
        last = begin + min((index + 1) * chunk, length)
        for one in _sub_ranges(ranges, first, last):
            if found and sum(found[-1]) == one[0]:
                found[-1] = (found[-1][0], found[-1][1] + one[1])
            else:
                found.append(one)
    return tuple(found)


def _sub_ranges(ranges: tuple[Range, ...], first: int, last: int) -> list[Range]:
    """Return positions [first, last) of the indices in consecutive ranges, as ranges of indices."""
    found = []
    for begin, length in ranges:
        low, high = max(first, 0), min(last, length)
        if low < high:
            found.append((begin + low, high - low))
        first, last = first - length, last - length
    return found


def is_split(placement: Placement) -> bool:
    """Return whether a placement splits a dimension; ``Placement.is_shard`` is false for `_StridedShard`."""
    return isinstance(placement, Shard | StridedShard)
