"""Gather sharded tensors into full tensors: many small tensors, or one large tensor, in one collective.

Input: this rank's shards, as parts. Output: full tensors, from buckets that gather the shards of all ranks.

[Note: buckets] A bucket's buffer has one row of bytes per rank. Each rank writes its shards into its own row, one after
another, cast to the dtype in which they are sent. A collective then copies every row to all ranks. The rows of all
ranks have the same length: each shard is padded to the length of the longest shard of its tensor, and then to a
multiple of 16 bytes.

FSDP2 splits a dimension into chunks of equal length; only the last chunks may be shorter or empty. So the padded chunks
of a tensor, joined in rank order, are the tensor followed by padding. In a bucket with one sharded tensor, these chunks
are adjacent in the buffer. If the tensor is split along its first dimension, and its chunks need no padding to 16
bytes, the full tensor is therefore a view of the buffer. Otherwise, and in a bucket with several sharded tensors, each
full tensor is copied. If several axes of a mesh split a tensor, each shard is copied box by box: see [Note: boxes] in
`boxes`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.process_group import current_device, group_in_use
from fsdp2_strategy.distributed.torch_internals import all_gather_single
from fsdp2_strategy.model.boxes import LocalShard
from fsdp2_strategy.model.placeholders import full_tensor_of, values_of
from fsdp2_strategy.model.shards import ShardGroup, shard_group_of

_ALIGNMENT = 16


@dataclass(frozen=True)
class Route:
    """How the values of a tensor are sent to every rank."""

    holders: ShardGroup | None = None
    """The ranks that hold the shards; None if the tensor is not sharded, or is gathered alone."""
    from_rank_0_of: Any = None
    """The group whose rank 0 broadcasts the values, if values may differ between ranks; otherwise None."""
    is_gathered_alone: bool = False
    """Whether the tensor has a collective of its own, because tensors that are needed with it have other routes."""
    _shards: dict[torch.Size, list[LocalShard]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def group(self) -> Any:
        """The group of ``holders``, or None."""
        return None if self.holders is None else self.holders.group

    def shards(self, tensor: torch.Tensor) -> list[LocalShard]:
        """Return the elements of a sharded tensor that each rank holds; tensors of one shape share the result."""
        assert self.holders is not None
        if tensor.shape not in self._shards:
            self._shards[tensor.shape] = self.holders.shards(tensor)
        return self._shards[tensor.shape]

    @cached_property
    def ranks(self) -> int:
        """Number of ranks that write a row of the buffer."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @cached_property
    def key(self) -> tuple[int, int]:
        """The route's process groups, by ``id``; tensors with equal keys can share a bucket."""
        return id(self.group), id(self.from_rank_0_of)


def routes_of(tensors: Mapping[str, torch.Tensor], differing: Collection[int]) -> dict[str, Route]:
    """Return each tensor's route; values of ``differing`` (by id) may differ between ranks, as batch statistics do."""
    route_by_layout: dict[object, Route] = {}  # tensors share a few layouts, and `shard_group_of` is slow
    routes = {}
    for name, tensor in tensors.items():
        differs = id(tensor) in differing
        kind = (id(tensor.device_mesh), tensor.placements) if isinstance(tensor, DTensor) else differs
        if kind not in route_by_layout:
            if isinstance(tensor, DTensor):
                route_by_layout[kind] = Route(holders=shard_group_of(tensor))
            else:
                route_by_layout[kind] = Route(from_rank_0_of=(group_in_use() or dist.group.WORLD) if differs else None)
        routes[name] = route_by_layout[kind]
    return routes


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor to gather, and the dtype in which it is sent."""

    tensor: torch.Tensor
    dtype: torch.dtype
    route: Route

    @property
    def _is_split_otherwise(self) -> bool:
        """Whether the tensor is split in another way than in chunks of equal length along one dimension."""
        return self.route.holders is not None and self.route.holders.dim is None

    @property
    def _dim(self) -> int | None:
        """The dimension that is split in chunks of equal length; None if the tensor is split in another way, or not."""
        return self.route.holders.dim if self.route.holders else None

    @cached_property
    def padded(self) -> list[int]:
        """The shape to which the shards of all ranks are padded: that of the longest, flattened if they have boxes."""
        shape = list(self.tensor.shape)
        if self._dim is not None:
            shape[self._dim] = -(-shape[self._dim] // self.route.ranks)
        elif self._is_split_otherwise:
            shape = [max(prod(shard.shape) for shard in self.route.shards(self.tensor))]
        return shape

    @cached_property
    def row_bytes(self) -> int:
        """Number of bytes of the part's slice of a row, at least one element: torch cannot view empty rows."""
        return -(-max(1, prod(self.padded)) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def write(self, row: torch.Tensor) -> None:
        """Write this rank's shard into the part's slice of a row; collective if ``is_gathered_alone``."""
        local = full_tensor_of(self.tensor) if self.route.is_gathered_alone else values_of(self.tensor)
        target = self._values_in(row)
        if local.device != target.device:  # cast first: fewer bytes are copied to the device
            local = local.to(self.dtype)
        if self._is_split_otherwise:
            local = local.reshape(-1)
        for dim, length in enumerate(local.shape):
            target = target.narrow(dim, 0, length) if length != target.shape[dim] else target
        target.copy_(local, non_blocking=True)

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the full tensor from the part's slice of all rows: contiguous, and a view if possible."""
        chunks = self._values_in(rows)
        if self.route.holders is None:
            return chunks[0]
        if (dim := self._dim) is not None:
            together = chunks.movedim(0, dim).flatten(dim, dim + 1)
            return together.narrow(dim, 0, self.tensor.shape[dim]).contiguous()
        full = chunks.new_empty(self.tensor.shape)
        for shard, chunk in zip(self.route.shards(self.tensor), chunks, strict=True):
            shard.copy_to(full, chunk[: prod(shard.shape)].view(shard.shape))
        return full

    def _values_in(self, rows: torch.Tensor) -> torch.Tensor:
        used = rows[..., : prod(self.padded) * self.dtype.itemsize]
        return used.view(self.dtype).view((*rows.shape[:-1], *self.padded))


class Bucket:
    """Gather several parts in one collective; see [Note: buckets]."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self._slices: dict[str, slice] = {}
        self._row_bytes = 0
        self._rows: torch.Tensor | None = None
        self._works: Sequence[dist.Work] = ()

    def add(self, name: str, part: Part) -> None:
        """Add a part, whose route must have the same key as the routes of the other parts."""
        self.parts[name] = part
        self._slices[name] = slice(self._row_bytes, self._row_bytes + part.row_bytes)
        self._row_bytes += part.row_bytes

    @property
    def route(self) -> Route:
        """The route of the first part; the routes of the other parts have the same key."""
        return next(iter(self.parts.values())).route

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._row_bytes * self.route.ranks

    def start(self) -> None:
        """Allocate the buffer, write this rank's row, and start to gather the other rows; collective."""
        route = self.route
        # Do not reuse a buffer: the caller may hold tensors that are views of it.
        rows = torch.empty((route.ranks, self._row_bytes), dtype=torch.uint8, device=current_device())
        self._rows = rows
        own = 0 if route.group is None else dist.get_rank(route.group)
        for name, part in self.parts.items():
            part.write(rows[own, self._slices[name]])
        if route.from_rank_0_of is not None:
            self._works = [dist.broadcast(rows, group_src=0, group=route.from_rank_0_of, async_op=True)]
        elif route.group is not None:
            self._works = gather_rows(rows, own, route.group)

    def wait(self) -> None:
        """Wait until all rows are gathered; on an accelerator, only the current stream waits."""
        for work in self._works:
            work.wait()
        self._works = ()

    def full_tensor(self, name: str) -> torch.Tensor:
        """Return the full tensor of a part: contiguous, possibly a view of the buffer."""
        assert self._rows is not None
        return self.parts[name].read(self._rows[:, self._slices[name]])

    def release(self) -> None:
        """Drop the bucket's reference to its buffer; views that the caller holds stay valid."""
        self._rows = None


def gather_rows(rows: torch.Tensor, own: int, group: Any) -> list[dist.Work]:
    """Start to gather the other ranks' rows in place; return the collectives to wait for; collective."""
    if rows.device.type != "cpu":
        return [all_gather_single(rows.view(-1), rows[own], group=group, async_op=True)]
    # gloo's all-gather copies through a second buffer and takes three times as long.
    return [dist.broadcast(row, group_src=i, group=group, async_op=True) for i, row in enumerate(rows)]


def may_start_early(buckets: Sequence[Bucket], bucket_bytes: int) -> bool:
    """Return whether any three consecutive buckets fit in the memory limit; the same on all ranks.

    A ``for`` loop holds the last tensor of a bucket, and with it the bucket's buffer, until it receives the first
    tensor of the next bucket. If the bucket after the next one is started before that, three buffers are in memory.

    Args:
        buckets: the buckets in the order in which they are gathered.
        bucket_bytes: half of the memory limit. If the largest bucket is larger, the limit is twice that bucket.
    """
    nbytes = [bucket.nbytes for bucket in buckets]
    three = [sum(nbytes[i : i + 3]) for i in range(len(nbytes))]
    return max(three, default=0) <= 2 * max([bucket_bytes, *nbytes])
