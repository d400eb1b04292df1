"""Plan a stream of weights: which tensors of the model make which tensors of the files, and what is gathered together.

Input: a model, sharded or not. Output: items, and buckets of items. A plan follows from names, shapes, dtypes and
placements alone, so ranks plan without communication, and it is reused while only values change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy import sizes
from fsdp2_strategy.hf.save_plan import regions_to_write, tensors_to_write
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.rollout.bucket import Bucket, Part, Route, routes_of
from fsdp2_strategy.storage.regions import Computed, Region, assemble, sources_of
from fsdp2_strategy.storage.shares import is_identity


@dataclass(eq=False)
class Item:
    """Tensors of the model, and the regions that are made of these tensors only."""

    sources: dict[str, torch.Tensor] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    """The sources as parts that can share a bucket."""

    @property
    def largest_bytes(self) -> int:
        """Size of its largest region."""
        return max(region.numel() * region.dtype.itemsize for region in self.regions.values())

    @property
    def route(self) -> Route:
        """The route of its first part; the routes of the other parts have the same key."""
        return next(iter(self.parts.values())).route

    @property
    def nbytes(self) -> int:
        """Number of bytes that its parts take in a bucket."""
        return sum(part.row_bytes for part in self.parts.values()) * self.route.ranks

    @property
    def is_computed(self) -> bool:
        """Whether values have to be computed from the sources, rather than copied."""
        return any(isinstance(piece.source, Computed) for region in self.regions.values() for piece in region.pieces)

    def make_parts(self, routes: Mapping[str, Route]) -> None:
        """Set ``parts``; sources are cast before they are gathered, if all regions have one dtype and are copies."""
        dtypes = {region.dtype for region in self.regions.values()}
        keeps_dtype = self.is_computed or len(dtypes) > 1
        own = {source: routes[source] for source in self.sources}
        together = len({route.key for route in own.values()}) == 1
        self.parts = {
            source: Part(
                tensor,
                tensor.dtype if keeps_dtype else next(iter(dtypes)),
                own[source] if together else Route(is_gathered_alone=True),
            )
            for source, tensor in self.sources.items()
        }


class RegionBucket(Bucket):
    """A bucket, and the regions that are made of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: dict[str, Region] = {}
        self.largest_bytes = 0
        """Size of its largest region."""

    def add_item(self, item: Item) -> None:
        """Add an item."""
        for name, part in item.parts.items():
            self.add(name, part)
        self.regions |= item.regions
        self.largest_bytes = max(self.largest_bytes, item.largest_bytes)

    def outputs(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Yield each name with a function that returns its tensor."""
        tensors = {name: part.tensor for name, part in self.parts.items()}
        sources: dict[str, torch.Tensor] = {}  # of the last region: the next one may need the same
        for name, region in self.regions.items():
            needed = sources_of(region)
            if is_identity(region, tensors) and self.parts[needed[0]].dtype == region.dtype:
                sources.clear()
                yield name, partial(self.full_tensor, needed[0])
                continue
            sources = {s: sources[s] if s in sources else self.full_tensor(s) for s in needed}
            yield name, partial(assemble, region, sources.__getitem__)


def facts_of(items: Sequence[Item]) -> list[object]:
    """Return the facts of a plan that must be equal on every rank."""
    return [(item.nbytes, *((name, tuple(r.shape), r.dtype) for name, r in item.regions.items())) for item in items]


def pack(items: Sequence[Item], bucket_bytes: int) -> list[RegionBucket]:
    """Put items into buckets, in which they are gathered; equal on every rank for equal items."""
    buckets: list[RegionBucket] = []
    filling: dict[tuple[int, int], RegionBucket] = {}
    for item in items:
        if item.nbytes >= sizes.LARGE_BYTES:
            buckets.append(RegionBucket())
            buckets[-1].add_item(item)
            continue
        bucket = filling.get(item.route.key)
        largest = max(bucket.largest_bytes if bucket else 0, item.largest_bytes)
        if not bucket or bucket.nbytes + item.nbytes + largest > bucket_bytes * 2 // 3:
            bucket = filling[item.route.key] = RegionBucket()
            buckets.append(bucket)
        bucket.add_item(item)
    return sorted(buckets, key=lambda bucket: bucket.route.from_rank_0_of is not None)


_PLAN = Slot[tuple[object, list[Item]]]("plan of the last stream")
"""The dtype, the ids and dtypes of the model's tensors at that time, and the items."""


def cached_items(root: nn.Module, dtype: torch.dtype | None) -> list[Item]:
    """Return the items of a stream; those of the last stream are reused if only values have changed since.

    A plan refers to its tensors, so no new tensor can get the id of one of them.
    """
    tensors = [t for m in root.modules() for of in (m._parameters, m._buffers) for t in of.values()]
    held = [(id(t), t.dtype if t is not None else None) for t in tensors]  # casts in place keep the id
    known = model_state(root).get(_PLAN)
    if known is None or known[0] != (dtype, held):
        known = model_state(root).set(_PLAN, ((dtype, held), make_items(root, dtype)))
    return known[1]


def make_items(root: nn.Module, dtype: torch.dtype | None) -> list[Item]:
    """Group a model's tensors into items; names, shapes, dtypes and placements determine the result on every rank."""
    copied = meta_skeleton(root)
    tensors = tensors_to_write(root, copied)
    regions = regions_to_write(copied, tensors, dtype)
    is_sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    buffers = {id(buffer) for buffer in root.buffers()} if is_sharded else set()
    routes = routes_of(tensors, buffers)
    items = _items(regions, tensors)
    for item in items:
        item.make_parts(routes)
    return items


def _items(regions: Mapping[str, Region], tensors: Mapping[str, torch.Tensor]) -> list[Item]:
    """Group regions that need the same tensor of the model, so that each tensor is gathered once."""
    item_of: dict[str, Item] = {}
    for name, region in regions.items():
        sources = dict.fromkeys(sources_of(region))
        item, *others = {id(i): i for s in sources if (i := item_of.get(s))}.values() or [Item()]
        for other in others:
            item.sources |= other.sources
            item.regions |= other.regions
        item.sources |= {source: tensors[source] for source in sources}
        item.regions[name] = region
        item_of |= dict.fromkeys(item.sources if others else sources, item)
    return list({id(item): item for item in item_of.values()}.values())
