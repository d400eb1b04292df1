"""Send what changed in the weights of a sharded model since the last stream, on every rank.

Input: the items of a stream, and what this rank retains of its shards. Output: an iterator over Hugging Face names,
with a `TensorDifference` or a full tensor.

Steps: each rank compares its shards with what it retains, without communication. All ranks gather the sizes of all
changes in one collective, so that all decide the same: an item without changes is left out; an item whose changes take
fewer bytes than its tensors, between ranks and to an engine, is sent as changes; the others are gathered in full, as in
a full stream. The changes of several items travel in one collective. Positions in shards become positions in full
tensors, and these become positions in the tensors of the files, by the pieces of their regions (see [Note: regions] in
`regions`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fsdp2_strategy.distributed.process_group import (
    control_device,
    current_device,
    group_in_use,
    rank,
    ranks_of,
    world_size,
)
from fsdp2_strategy.model.boxes import row_major
from fsdp2_strategy.rollout.bucket import Part, gather_rows
from fsdp2_strategy.rollout.changed_elements import ShardChanges
from fsdp2_strategy.rollout.difference import TensorDifference, from_gaps
from fsdp2_strategy.rollout.stream_plan import Item

_ALIGNMENT = 16
_FULL = -1
"""Instead of a size: the changes of a shard would take as many bytes as the shard."""


def decide(
    items: Sequence[Item],
    changes: Sequence[Mapping[str, ShardChanges | None]],
    bucket_bytes: int,
    *,
    is_collective: bool,
) -> tuple[list[Item], list[ChangesBucket]]:
    """Return the items to send in full, and those to send as this rank's ``changes`` of their parts; collective."""
    own = [
        [_FULL, 0] if of_part is None else [len(of_part.gaps), len(of_part.values)]
        for of_item in changes
        for of_part in of_item.values()
    ]
    sizes_of_ranks = _gathered(own) if is_collective else [own]
    full, changed = [], []
    at = 0
    for item, of_item in zip(items, changes, strict=True):
        rows = _rows_of(item, is_collective=is_collective)
        counts = {name: [sizes_of_ranks[row][at + i] for row in rows] for i, name in enumerate(of_item)}
        at += len(of_item)
        if not any(size for of_part in counts.values() for size, _ in of_part):
            continue
        kept = {name: of_part for name, of_part in of_item.items() if of_part is not None}
        one = _ChangedItem(item, kept, counts)
        takes_fewer_bytes = not one.is_full_on_a_rank and one.nbytes < item.nbytes and one.is_short_for_receivers
        if takes_fewer_bytes and _is_rearranged(item):
            changed.append(one)
        else:
            full.append(item)
    return full, _pack(changed, bucket_bytes)


def _gathered(own: list[list[int]]) -> list[list[list[int]]]:
    """Return the sizes of all ranks; collective."""
    sent = torch.tensor(own, dtype=torch.int64, device=control_device())
    received = [torch.empty_like(sent) for _ in range(world_size())]
    dist.all_gather(received, sent, group=group_in_use())
    return [tensor.tolist() for tensor in received]


def _rows_of(item: Item, *, is_collective: bool) -> list[int]:
    """Return the ranks, by their position in the group in use, whose changes make up the changes of an item."""
    route = item.route
    if not is_collective or route.from_rank_0_of is not None:
        return [0]
    if route.is_gathered_alone:
        return list(range(world_size()))
    if route.group is None:
        return [rank()]
    positions = {number: position for position, number in enumerate(ranks_of(group_in_use()))}
    return [positions[number] for number in dist.get_process_group_ranks(route.group)]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _is_rearranged(item: Item) -> bool:
    """Return whether each element of an item's regions is an element of a shard, in the dtype in which it is sent."""
    if item.is_computed or item.route.is_gathered_alone or item.route.from_rank_0_of is not None:
        return False
    dtypes = {part.dtype for part in item.parts.values()}
    regions = item.regions.values()
    return all(
        {region.dtype} == dtypes and all(piece.has_distinct_elements for piece in region.pieces) for region in regions
    )


# --- collectives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _ChangedItem:
    """An item, this rank's changes of its parts, and the sizes of the changes of each rank of its route."""

    item: Item
    changes: Mapping[str, ShardChanges]
    counts: Mapping[str, list[list[int]]]

    @property
    def is_full_on_a_rank(self) -> bool:
        """Whether the changes of a rank would take as many bytes as its shard."""
        return any(size == _FULL for of_part in self.counts.values() for size, _ in of_part)

    @property
    def nbytes(self) -> int:
        """Number of bytes in the rows of all ranks."""
        return sum(self.row_bytes(number) for number in range(self.item.route.ranks))

    @property
    def is_short_for_receivers(self) -> bool:
        """Whether its differences, which have a position for each element of a block, are shorter than its tensors."""
        elements = {name: sum(values for _, values in of_part) for name, of_part in self.counts.items()}
        nbytes = sum(elements[name] * (2 + part.dtype.itemsize) for name, part in self.item.parts.items())
        return nbytes < sum(region.numel() * region.dtype.itemsize for region in self.item.regions.values())

    def row_bytes(self, number: int) -> int:
        sizes = ((part.dtype.itemsize, *self.counts[name][number]) for name, part in self.item.parts.items())
        return sum(_padded(2 * size) + _padded(values * itemsize) for itemsize, size, values in sizes)


@dataclass(eq=False)
class ChangesBucket:
    """The changes of items that are gathered in one collective: a row of bytes per rank, as long as the longest."""

    items: list[_ChangedItem] = field(default_factory=list)
    row_bytes: list[int] = field(default_factory=list)
    """Number of bytes of each rank's row."""

    def add(self, changed: _ChangedItem) -> None:
        """Add an item, whose route has the same key as those of the other items."""
        self.items.append(changed)
        self.row_bytes = self.row_bytes or [0] * changed.item.route.ranks
        for number in range(len(self.row_bytes)):
            self.row_bytes[number] += changed.row_bytes(number)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all rows, which have equal lengths."""
        return max(self.row_bytes, default=0) * len(self.row_bytes)

    def gather(self) -> torch.Tensor:
        """Gather the rows of all ranks; collective."""
        group = self.items[0].item.route.group
        own = 0 if group is None else dist.get_rank(group)
        length = max(self.row_bytes)
        rows = torch.empty((len(self.row_bytes), length), dtype=torch.uint8, device=current_device())
        at = 0
        for changed in self.items:
            for name in changed.item.parts:
                changes = changed.changes[name]
                for tensor in (changes.gaps, changes.values):
                    rows[own, at : at + tensor.nbytes].copy_(tensor.contiguous().view(torch.uint8))
                    at += _padded(tensor.nbytes)
        if group is not None:
            for work in gather_rows(rows, own, group):
                work.wait()
        return rows

    def outputs(self) -> Iterator[tuple[str, TensorDifference]]:
        """Gather the changes, and yield the difference of each tensor of the files that changed; collective."""
        rows = self.gather()
        ends = [0] * len(self.row_bytes)
        for changed in self.items:
            of_sources = {}
            for name, part in changed.item.parts.items():
                width = changed.changes[name].width
                of_sources[name] = _read(rows, ends, changed.counts[name], part, width)
            yield from _differences(changed.item, of_sources)


def _pack(changed: Sequence[_ChangedItem], bucket_bytes: int) -> list[ChangesBucket]:
    buckets: list[ChangesBucket] = []
    filling: dict[tuple[int, int], ChangesBucket] = {}
    for one in changed:
        key = one.item.route.key
        bucket = filling.get(key)
        if bucket is None or bucket.nbytes >= bucket_bytes:
            bucket = filling[key] = ChangesBucket()
            buckets.append(bucket)
        bucket.add(one)
    return buckets


def _read(
    rows: torch.Tensor, ends: list[int], counts: Sequence[Sequence[int]], part: Part, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the changes of a part from the rows of all ranks; return positions in the full tensor, and values.

    ``ends`` is moved to the end of what is read in each row.
    """
    positions, values = [], []
    for number, (size, count) in enumerate(counts):
        begin = ends[number]
        gaps = rows[number, begin : begin + 2 * size].view(torch.int16)
        begin += _padded(2 * size)
        nbytes = count * part.dtype.itemsize
        values.append(rows[number, begin : begin + nbytes].view(part.dtype))
        ends[number] = begin + _padded(nbytes)
        blocks = from_gaps(gaps)
        if width > 1:
            blocks = (blocks[:, None] * width + torch.arange(width, device=blocks.device)).flatten()[:count]
        positions.append(_in_full_tensor(blocks, part, number))
    return torch.cat(positions), torch.cat(values)


def _in_full_tensor(positions: torch.Tensor, part: Part, number: int) -> torch.Tensor:
    """Return the positions in the full tensor, flattened, of positions in the flattened shard of a rank."""
    if part.route.holders is None:
        return positions
    shard, strides = part.route.shards(part.tensor)[number], row_major(part.tensor.shape)
    if shard.is_row_range:
        return positions + (shard.ranges[0][0][0] * strides[0] if shard.ranges[0] else 0)
    found = torch.zeros_like(positions)
    for dim, (own_stride, stride) in enumerate(zip(row_major(shard.shape), strides, strict=True)):
        found += shard.indices(dim).to(positions.device)[positions // own_stride] * stride
        positions = positions % own_stride
    return found


def _differences(
    item: Item, of_sources: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[tuple[str, TensorDifference]]:
    """Yield the difference of each region of an item that has changed elements."""
    for name, region in item.regions.items():
        positions, values = [], []
        for piece in region.pieces:
            of_source, its_values = of_sources[piece.source]
            selected, within = piece.positions(of_source, item.sources[piece.source].numel(), region.shape)
            positions.append(within)
            values.append(its_values if selected is None else its_values[selected])
        if any(len(each) for each in positions):
            yield name, TensorDifference(tuple(region.shape), torch.cat(positions), torch.cat(values))
