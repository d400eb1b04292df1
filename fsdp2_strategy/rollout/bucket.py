"""Sharded tensors -> whole tensors: many small ones, or a large one, in one collective.

Input: parts, which are tensors as this rank holds them. Output: buckets that fill one flat buffer with the shards of
all ranks, and give out whole tensors from it.

[Note: buckets] The buffer holds one row of bytes a rank, and each row the rank's shards one after the other, cast,
padded to the same length. Each rank writes its row, the collective brings the others. FSDP2 cuts along a dimension into
chunks of equal length, but for the last ones: so the chunks of a tensor, padded, one after the other are the tensor and
some padding behind it. A bucket of one tensor that is cut along its first dimension thus *is* that tensor, and nothing
is copied.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from fsdp2_strategy.distributed.process_group import current_device, group_in_use
from fsdp2_strategy.distributed.torch_internals import storage_uses
from fsdp2_strategy.model.placeholders import values_of, whole_of

_ALIGNMENT = 16


@dataclass(frozen=True)
class Route:
    """How the values of a tensor reach every rank."""

    group: Any = None
    """The ranks that hold its shards, or None where every rank has all of it."""
    dim: int = 0
    """The dimension that is cut."""
    from_rank_0_of: Any = None
    """The ranks that each have values, of which those of rank 0 count; None where all have the same."""
    is_gathered_alone: bool = False
    """It is cut along several axes of its mesh, so that DTensor gathers it."""

    @cached_property
    def ranks(self) -> int:
        """Rows of a buffer that it fills."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @cached_property
    def key(self) -> tuple[int, int]:
        """What tensors that travel together have in common."""
        return id(self.group), id(self.from_rank_0_of)


def routes_of(tensors: Mapping[str, torch.Tensor], differing: Collection[int]) -> dict[str, Route]:
    """Say how the values of tensors reach every rank.

    Args:
        tensors: as this rank holds them, by name.
        differing: identities of those of which ranks may hold other values (statistics of a batch norm).
    """
    alike: dict[object, Route] = {}  # most are sharded as the one before: asking torch takes its time
    routes = {}
    for name, tensor in tensors.items():
        differs = id(tensor) in differing
        kind = (id(tensor.device_mesh), tensor.placements) if isinstance(tensor, DTensor) else differs
        if kind not in alike:
            alike[kind] = _route_of(tensor, differs=differs)
        routes[name] = alike[kind]
    return routes


def _route_of(tensor: torch.Tensor, *, differs: bool) -> Route:
    if not isinstance(tensor, DTensor):
        return Route(from_rank_0_of=(group_in_use() or dist.group.WORLD) if differs else None)
    mesh = tensor.device_mesh
    cut = [(axis, p) for axis, p in enumerate(tensor.placements) if not p.is_replicate() and mesh.size(axis) > 1]
    if not cut:
        return Route()
    [(axis, placement), *more] = cut
    if more or type(placement) is not Shard:
        return Route(is_gathered_alone=True)
    return Route(group=mesh.get_group(axis), dim=placement.dim)


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor that travels, in the dtype in which it does."""

    tensor: torch.Tensor
    dtype: torch.dtype
    route: Route

    @cached_property
    def padded(self) -> list[int]:
        """The shape of the longest chunk, as which every rank's travels."""
        shape = list(self.tensor.shape)
        if self.route.group is not None:
            shape[self.route.dim] = -(-shape[self.route.dim] // self.route.ranks)
        return shape

    @cached_property
    def row_bytes(self) -> int:
        """What it takes of a row; something even where it is empty, since torch views no rows without bytes."""
        return -(-max(1, prod(self.padded)) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def write(self, row: torch.Tensor) -> None:
        """Write this rank's chunk to its place in its row; collective for what is gathered alone."""
        local = whole_of(self.tensor) if self.route.is_gathered_alone else values_of(self.tensor)
        room = self._values_in(row)
        if local.device != room.device:  # fewer bytes travel, and none lie in another dtype on the device
            local = local.to(self.dtype)
        for dim, length in enumerate(local.shape):
            room = room.narrow(dim, 0, length) if length != room.shape[dim] else room
        room.copy_(local, non_blocking=True)

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor from its place in all rows: contiguous, and a view where it can be."""
        chunks = self._values_in(rows)
        if self.route.group is None:
            return chunks[0]
        dim = self.route.dim
        together = chunks.movedim(0, dim).flatten(dim, dim + 1)
        return together.narrow(dim, 0, self.tensor.shape[dim]).contiguous()

    def _values_in(self, rows: torch.Tensor) -> torch.Tensor:
        used = rows[..., : prod(self.padded) * self.dtype.itemsize]
        return used.view(self.dtype).view((*rows.shape[:-1], *self.padded))


class Bucket:
    """Parts that travel together; see [Note: buckets]."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self._places: dict[str, slice] = {}
        self._row_bytes = 0
        self._rows: torch.Tensor | None = None
        self._works: Sequence[dist.Work] = ()

    def add(self, name: str, part: Part) -> None:
        """Take in a part, whose route has the key of the others'."""
        self.parts[name] = part
        self._places[name] = slice(self._row_bytes, self._row_bytes + part.row_bytes)
        self._row_bytes += part.row_bytes

    @property
    def route(self) -> Route:
        """How its parts travel."""
        return next(iter(self.parts.values())).route

    @property
    def nbytes(self) -> int:
        """Length of the buffer that it fills."""
        return self._row_bytes * self.route.ranks

    def start(self, buffer: torch.Tensor) -> None:
        """Write this rank's row and begin to fetch the others'; collective.

        Args:
            buffer: bytes, at least ``nbytes``, which are this bucket's until `end`.
        """
        route = self.route
        rows = self._rows = buffer[: self.nbytes].view(route.ranks, self._row_bytes)
        own = 0 if route.group is None else dist.get_rank(route.group)
        for name, part in self.parts.items():
            part.write(rows[own, self._places[name]])
        if route.from_rank_0_of is not None:
            self._works = [dist.broadcast(rows, group_src=0, group=route.from_rank_0_of, async_op=True)]
        elif route.group is not None:
            self._works = _gather(rows, own, route.group)

    def wait(self) -> None:
        """Return when all rows are there, as the device counts time."""
        for work in self._works:
            work.wait()
        self._works = ()

    def whole(self, name: str) -> torch.Tensor:
        """Return a part's whole tensor, contiguous; it may be a view of the buffer."""
        assert self._rows is not None
        return self.parts[name].read(self._rows[:, self._places[name]])

    def end(self) -> None:
        """Let go of the buffer."""
        self._rows = None


def _gather(rows: torch.Tensor, own: int, group: Any) -> list[dist.Work]:
    """Fetch the other ranks' rows in place."""
    if rows.is_cuda:
        # torch 2.13 renames it.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return [gather(rows.view(-1), rows[own], group=group, async_op=True)]
    # On gloo an all-gather passes through a second buffer, and takes three times as long.
    return [dist.broadcast(row, group_src=i, group=group, async_op=True) for i, row in enumerate(rows)]


class Buffers:
    """Buffers in turn, so that a bucket fills while the one before is read.

    Three, for a loop holds the last tensor of one bucket while it asks for the first of the next; two where three would
    be too much, and then a bucket is begun only after the first tensor of the one before is out. A buffer that somebody
    still looks into when its turn comes is left to them, and another takes its place: what was given out stays as it is
    for as long as it is held.
    """

    def __init__(self, buckets: Sequence[Bucket], bucket_bytes: int) -> None:
        sizes = [bucket.nbytes for bucket in buckets]
        largest = [max(sizes[turn::3], default=0) for turn in range(3)]
        self.may_begin_early = sum(largest) <= 2 * max(bucket_bytes, *largest)
        count = 3 if self.may_begin_early else 2
        self._sizes = [max(sizes[turn::count], default=0) for turn in range(count)]
        self._held = [self._new(size) for size in self._sizes]
        self._turn = 0

    def _new(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=current_device())

    def next(self) -> torch.Tensor:
        """Return the buffer whose turn it is."""
        turn = self._turn
        self._turn = (turn + 1) % len(self._held)
        if is_looked_into(self._held[turn]):
            self._held[turn] = self._new(self._sizes[turn])
        return self._held[turn]


def is_looked_into(buffer: torch.Tensor) -> bool:
    """Say whether other tensors share a buffer's memory; gloo's threads let go of it a moment after the end."""
    for _ in range(10):
        if storage_uses(buffer) <= _USES_ALONE:
            return False
        time.sleep(0.002)
    return True


_USES_ALONE = storage_uses(torch.empty(1))
