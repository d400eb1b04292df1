"""Decide which boxes of which tensors this rank writes, and find their values.

Input: the regions of files, and the tensors of any model that they are made of, sharded or not. Output: write requests
for `write`. All follows from names, shapes, dtypes and placements, so ranks plan without communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.process_group import rank, world_size
from fsdp2_strategy.distributed.torch_internals import local_of
from fsdp2_strategy.model.boxes import Box, LocalShard, ShardBox, is_split, row_major
from fsdp2_strategy.model.placeholders import any_placeholders, full_tensor_of, is_computed, values_of
from fsdp2_strategy.model.shards import local_shard, replica_of
from fsdp2_strategy.storage.regions import Computed, Region, assemble, sources_of
from fsdp2_strategy.storage.safetensors_format import Entry
from fsdp2_strategy.storage.write import WriteRequest


def needs_gather(region: Region, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether to gather a region before it is written: ranks cannot write it in long byte ranges from shards."""
    if is_identity(region, tensors):
        return False
    for piece in region.pieces:
        if isinstance(piece.source, Computed):
            return True
        strides = [s for s, n in zip(piece.strides, piece.shape, strict=True) if n > 1]
        run = region.dtype.itemsize
        for length, full_length in zip(reversed(piece.shape), reversed(region.shape), strict=True):
            run *= length
            if length != full_length:
                break
        in_order = strides == sorted(strides, reverse=True)
        if not in_order or run < min(sizes.SHORTEST_RUN_BYTES, math.prod(piece.shape) * region.dtype.itemsize):
            return True
    return False


def is_identity(region: Region, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a region equals one tensor, so that a shard of the tensor is the same box of the region."""
    piece = region.only_piece
    if piece is None or isinstance(piece.source, Computed):
        return False
    is_row_major = not piece.offset and piece.strides == row_major(region.shape)
    return is_row_major and region.shape == tensors[piece.source].shape


@dataclass(frozen=True, slots=True)
class Share:
    """A box of a region that this rank writes, and the view of a local tensor that contains its values."""

    name: str
    """Name of the region."""
    box: Box
    source: str
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None
    """Shape, strides and offset of the view, in elements of the local tensor; None for the local tensor itself."""
    is_in_grid: bool
    """Whether the boxes of all ranks form a grid; see `WriteRequest`."""
    is_replicated: bool
    """Whether all ranks hold all values of the region; see `WriteRequest`."""
    rows: tuple[int, int] | None = None
    """First row and number of rows, within the view or local tensor; None for all."""

    def cut(self, region: Region) -> Iterator[Share]:
        """Split the share by rows into shares that fit into one checksum block, but have at least one row.

        `write_all` splits in the same rows, so the checksum blocks are the same without the split.
        """
        length = self.box[0][1] if self.box else 0
        row_bytes = math.prod(region.shape[1:]) * region.dtype.itemsize
        step = max(1, sizes.BLOCK_BYTES // max(1, row_bytes))
        if length <= step:
            yield self
            return
        for at in range(0, length, step):
            rows = (at, min(step, length - at))
            yield replace(self, box=((self.box[0][0] + at, rows[1]), *self.box[1:]), rows=rows)


def own_shares(regions: Mapping[str, Region], tensors: Mapping[str, torch.Tensor]) -> list[Share]:
    """Return this rank's shares of the regions; ranks that hold the same values divide the regions evenly.

    Not collective: the result follows from names, shapes, dtypes and placements.
    """
    held = _held_shards(tensors)
    total = sum(region.numel() for region in regions.values())
    before = 0
    shares: list[Share] = []
    for name, region in _by_source(regions, tensors):
        is_grid = _is_grid(region, held)
        is_replicated = not any(held[piece.source].is_split for piece in region.pieces)
        fraction = before / max(1, total)
        before += region.numel()
        for piece in region.pieces:
            own = held[piece.source]
            if int(fraction * own.replicas) != own.replica:
                continue
            if is_identity(region, tensors):
                for local in own.shard.boxes:
                    view = _view_of(local, own.shard)
                    shares += Share(name, local.full, piece.source, view, True, is_replicated).cut(region)
                continue
            for part in piece.in_shard(own.shard):
                box = tuple(zip(part.start, part.shape, strict=True))
                view = (part.shape, part.strides, part.offset)
                shares += Share(name, box, piece.source, view, is_grid, is_replicated).cut(region)
    return shares


def values_of_shares(
    shares: Iterable[Share], tensors: Mapping[str, torch.Tensor]
) -> Iterator[list[tuple[Share, torch.Tensor]]]:
    """Yield shares with this rank's values: one list, or several if values are computed.

    The computed values of a list take at most `sizes.COMPUTED_BYTES`, or belong to one tensor. A list is cleared before
    the values of the next one are computed.
    """
    held: dict[str, torch.Tensor] = {}
    found: list[tuple[Share, torch.Tensor]] = []
    computed_bytes = 0
    has_placeholders = any_placeholders()
    for share in shares:
        if not has_placeholders and share.view is None and share.rows is None:  # nearly all, if there are many
            local = local_of(tensors[share.source])
            found.append((share, local.detach() if local.requires_grad else local))
            continue
        values = held.get(share.source)
        if values is None:
            tensor = tensors[share.source]
            if is_computed(tensor):
                nbytes = local_of(tensor).nbytes
                if computed_bytes and computed_bytes + nbytes > sizes.COMPUTED_BYTES:
                    yield found
                    found.clear()
                    held.clear()
                    computed_bytes = 0
                computed_bytes += nbytes
            values = held[share.source] = values_of(tensor)
        if share.view is not None:
            shape, strides, offset = share.view
            flat = values.reshape(-1)
            values = flat.as_strided(shape, strides, flat.storage_offset() + offset)
        if share.rows is not None:
            values = values.narrow(0, *share.rows)
        found.append((share, values))
    yield found


def write_requests(shares: Iterable[tuple[Share, torch.Tensor]], entries: Mapping[str, Entry]) -> list[WriteRequest]:
    """Return the write requests for shares and their values."""
    return [
        WriteRequest(
            entries[share.name], share.box, values, is_in_grid=share.is_in_grid, is_replicated=share.is_replicated
        )
        for share, values in shares
    ]


def _is_grid(region: Region, held: Mapping[str, _HeldShard]) -> bool:
    """Return whether the boxes of all ranks form a grid in each piece, and the pieces are groups of rows of the region.

    Equal on every rank: it follows from the pieces and the shapes of the full tensors.
    """
    return all(
        piece.shape[1:] == tuple(region.shape[1:]) and piece.is_aligned(held[piece.source].shard.full_shape)
        for piece in region.pieces
    )


def _by_source(regions: Mapping[str, Region], tensors: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, Region]]:
    """Return the regions; if values are computed, sort them so that regions of one source are adjacent."""
    if not any(map(is_computed, tensors.values())):
        return regions.items()
    first: dict[str, int] = {}
    for region in regions.values():
        for source in sources_of(region):
            first.setdefault(source, len(first))
    return sorted(regions.items(), key=lambda item: [first[source] for source in sources_of(item[1])])


def _view_of(box: ShardBox, shard: LocalShard) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Return the view of a local tensor that has the values of one of its boxes, as in `Share`."""
    if len(shard.boxes) == 1:
        return None
    strides = row_major(shard.shape)
    offset = sum(begin * stride for (begin, _), stride in zip(box.local, strides, strict=True))
    return tuple(length for _, length in box.local), strides, offset


@dataclass(frozen=True)
class _HeldShard:
    """The elements of a tensor that this rank holds, the index of its replica, and the number of replicas."""

    shard: LocalShard
    is_split: bool
    """Whether a placement splits the tensor, also if only one rank has a part."""
    replica: int
    replicas: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _HeldShard:
        # Rank 0 writes all plain tensors: buffers, which may differ between ranks (batch-norm statistics), and
        # parameters that are not sharded.
        if not isinstance(tensor, DTensor):
            return cls(local_shard(tensor), False, rank(), 1)
        return cls(local_shard(tensor), any(map(is_split, tensor.placements)), *replica_of(tensor))


def _held_shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, _HeldShard]:
    """Return what this rank holds of each tensor; tensors of the same shape and placements share one object."""
    known: dict[object, _HeldShard] = {}
    held = {}
    for name, tensor in tensors.items():
        like = (id(tensor.device_mesh), tensor.placements) if isinstance(tensor, DTensor) else None
        if (like, tensor.shape) not in known:
            known[like, tensor.shape] = _HeldShard.of(tensor)
        held[name] = known[like, tensor.shape]
    return held


def gathered_write_requests(
    region: Region, tensors: Mapping[str, torch.Tensor], gathered: dict[str, torch.Tensor], entry: Entry
) -> list[WriteRequest]:
    """Gather a region's sources, and return write requests for this rank's part of the region; collective.

    All ranks have parts of about the same size. Each request is one checksum block. ``gathered`` are full sources of
    earlier regions, which may be needed again; those that are not are removed.
    """
    needed = sources_of(region)
    for source in [source for source in gathered if source not in needed]:
        del gathered[source]
    for source in needed:
        if source not in gathered:
            tensor = tensors[source]
            gathered[source] = full_tensor_of(tensor).contiguous()
    stored = Region(region.shape, tensors[needed[0]].dtype, region.pieces)
    flat = assemble(stored, gathered.__getitem__).reshape(-1)
    begin, end = (i * len(flat) // world_size() for i in (rank(), rank() + 1))
    line = Entry(entry.name, entry.path, entry.offset, entry.dtype, (len(flat),))
    step = max(1, sizes.BLOCK_BYTES // entry.dtype.itemsize)
    parts = [(at, min(step, end - at)) for at in range(begin, end, step)]
    return [WriteRequest(line, (part,), flat.narrow(0, *part), separate_blocks=True) for part in parts]
