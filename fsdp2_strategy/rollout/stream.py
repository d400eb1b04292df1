"""A sharded model -> its weights under their hub names, whole, one after the other, on every rank.

Input: a model, sharded or not, away or not. Output: an iterator for an inference engine, and checksums of what an
iterator gives.

Order of work: names and arrangement, as an export has them -> items, each the tensors that some regions are made of ->
buckets of items -> while the tensors of a bucket are given out, the next bucket is on its way.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.agreement import agree, all_or_none
from fsdp2_strategy.errors import CheckpointError, RolloutError
from fsdp2_strategy.hf.peft.merge import Merged, without_adapters
from fsdp2_strategy.hf.regions import Computed, Region, assemble, sources_of
from fsdp2_strategy.hf.safetensors_format import memory_of
from fsdp2_strategy.hf.save_plan import is_identity, regions_to_write, tensors_to_write
from fsdp2_strategy.hf.skeleton import original_class, twin
from fsdp2_strategy.model.failed_loads import check_usable
from fsdp2_strategy.model.fsdp_state import reshard
from fsdp2_strategy.model.ranks import on_ranks_of
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.rollout.bucket import Bucket, Buffers, Part, Route, routes_of


def stream_weights(
    model: nn.Module, *, dtype: torch.dtype | None = torch.bfloat16, bucket_bytes: int | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Give out a model's weights under their hub names, each whole and once; collective over the model's ranks.

    Every rank iterates, also one that has no use for the tensors: it runs through them. One that leaves the loop early
    takes part in the rest without looking at it, so the others get theirs: at once where nobody else holds the iterator
    (``for … in stream_weights(…)``), else when it is closed (``contextlib.closing``).

    A tensor is contiguous, on this rank's device, and stays as it is for as long as somebody holds it, whatever becomes
    of the model. Letting go of each before asking for the next bounds the extra memory: two buckets, of which one is
    read and one on its way. What the hub arranges otherwise than the model is copied out, which comes on top. Reading
    on another stream of the device: hold the tensor until that is through, and wait for the current stream first.

    Args:
        model: sharded or not, or a wrapper; it may be away in host memory. Nothing is collective for a plain model.
        dtype: of the floating parameters; None for that of the shards. What the model keeps in fp32 stays so, and
            buffers keep theirs. Shards are cast before they travel.
        bucket_bytes: of a bucket; by default 512 MiB. A tensor that is larger is a bucket of its own, which then
            counts; one that is larger than two thirds of it is not fetched while the one before is read.

    Yields:
        Name and tensor, as in the files that `save_model` writes, adapters merged; buffers come last, with rank 0's
        values.

    Raises:
        RolloutError: on every rank: the model has no values, adapters that cannot be merged, or the ranks call
            differently.
    """
    root = unwrap_model(model)
    if not any(isinstance(parameter, DTensor) for parameter in root.parameters()):
        try:
            merged, loads, buffers = _prepared(root, dtype, bucket_bytes)
            merged.gather()
        except CheckpointError as error:
            raise RolloutError(str(error)) from error
        yield from _run(loads, buffers)
        return
    action = f"stream {original_class(root).__name__}"
    with on_ranks_of(root):  # not around what follows: the caller's loop runs between its steps
        with all_or_none(action, RolloutError):
            reshard(root)
            merged, loads, buffers = _prepared(root, dtype, bucket_bytes)
        agree(action, [load.facts() for load in loads], RolloutError, "the same model and arguments. Call it alike.")
        if merged.adapters:
            with all_or_none(action, RolloutError):
                merged.gather()
    yield from _run(loads, buffers)


def _prepared(
    root: nn.Module, dtype: torch.dtype | None, bucket_bytes: int | None
) -> tuple[Merged, list[_Load], Buffers]:
    bucket_bytes = sizes.BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    if bucket_bytes < 1:
        raise RolloutError(f"cannot stream: bucket_bytes is {bucket_bytes}, expected at least 1. Use 512 * 2**20, say.")
    check_usable(root)
    merged = without_adapters(root)
    plan = _plan(merged.model, dtype, bucket_bytes) if merged.adapters else _planned(root, dtype, bucket_bytes)
    loads = [copy.copy(load) for load in plan]  # what a bucket is doing belongs to one stream
    return merged, loads, Buffers(loads, bucket_bytes)


def _run(loads: Sequence[_Load], buffers: Buffers) -> Iterator[tuple[str, torch.Tensor]]:
    """Give out what is in the buckets, while the next one is on its way; collective."""
    waiting = deque(loads)
    begun: deque[_Load] = deque()

    def begin(at_most: int) -> None:
        while waiting and len(begun) < at_most:
            begun.append(waiting.popleft())
            begun[-1].start(buffers.next())

    def end() -> None:
        load = begun.popleft()
        load.wait()
        load.end()

    begin(1)
    while begun:
        if buffers.may_begin_early:
            begin(2)
        begun[0].wait()
        try:
            for name, make in begun[0].outputs():
                yield name, make()
                begin(2)  # the tensor before is let go of by now
        except BaseException:  # the loop was left: the other ranks go on
            while begun:
                end()
                begin(1)
            raise
        end()
        begin(1)


def weight_checksums(stream: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the xxh3 of each tensor's bytes by its name, to compare what was sent with what arrived; not collective.

    Args:
        stream: names and tensors: what `stream_weights` gives (then collective), or those of an engine.
    """
    return {name: _checksum(tensor) for name, tensor in stream}


def _checksum(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(memory_of(tensor.detach().cpu().reshape(-1)))


# --- planning --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Item:
    """Tensors of the model, and what is made of them and of nothing else."""

    sources: dict[str, torch.Tensor] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)

    @property
    def largest_bytes(self) -> int:
        """Of what is made."""
        return max(region.numel() * region.dtype.itemsize for region in self.regions.values())

    def parts(self, routes: Mapping[str, Route]) -> dict[str, Part]:
        """Say how the tensors travel: together, and in the dtype of what is made of them where it is one."""
        computed = any(
            isinstance(piece.source, Computed) for region in self.regions.values() for piece in region.pieces
        )
        dtypes = {region.dtype for region in self.regions.values()}
        own = {source: routes[source] for source in self.sources}
        together = len({route.key for route in own.values()}) == 1
        return {
            source: Part(
                tensor,
                tensor.dtype if computed or len(dtypes) > 1 else next(iter(dtypes)),
                own[source] if together else Route(is_gathered_alone=True),
            )
            for source, tensor in self.sources.items()
        }


class _Load(Bucket):
    """A bucket, and what is made of the tensors in it."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: dict[str, Region] = {}
        self.largest_bytes = 0
        """Of what is made."""

    def take(self, parts: Mapping[str, Part], item: _Item) -> None:
        """Take an item in."""
        for name, part in parts.items():
            self.add(name, part)
        self.regions |= item.regions
        self.largest_bytes = max(self.largest_bytes, item.largest_bytes)

    def outputs(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Return names, and what makes the tensor of each."""
        tensors = {name: part.tensor for name, part in self.parts.items()}
        sources: dict[str, torch.Tensor] = {}  # of the region before: several come from one
        for name, region in self.regions.items():
            needed = sources_of(region)
            if is_identity(region, tensors) and self.parts[needed[0]].dtype == region.dtype:
                sources.clear()
                yield name, partial(self.whole, needed[0])
                continue
            sources = {s: sources[s] if s in sources else self.whole(s) for s in needed}
            yield name, partial(assemble, region, sources.__getitem__)

    def facts(self) -> list[object]:
        """Return what must be the same on every rank."""
        return [self.nbytes, *((name, tuple(r.shape), r.dtype) for name, r in self.regions.items())]


_PLAN = Slot[tuple[object, list[_Load]]]("plan of the last stream")
"""What it was asked for, the model's tensors then, and the buckets."""


def _planned(root: nn.Module, dtype: torch.dtype | None, bucket_bytes: int) -> list[_Load]:
    """Return the plan of a stream: that of the last one, where nothing but values has changed since.

    A plan holds the tensors that it is about, so that another one never has the address of one of them.
    """
    held = [id(t) for m in root.modules() for of in (m._parameters, m._buffers) for t in of.values()]
    asked = (dtype, bucket_bytes, sizes.LARGE_BYTES, held)
    known = model_state(root).get(_PLAN)
    if known is None or known[0] != asked:
        known = model_state(root).set(_PLAN, (asked, _plan(root, dtype, bucket_bytes)))
    return known[1]


def _plan(root: nn.Module, dtype: torch.dtype | None, bucket_bytes: int) -> list[_Load]:
    """Put a model's tensors into buckets; it follows from names, shapes and placements, which every rank knows."""
    copied = twin(root)
    tensors = tensors_to_write(root, copied)
    regions = regions_to_write(copied, tensors, dtype)
    is_shared = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    buffers = {id(buffer) for buffer in root.buffers()} if is_shared else set()
    routes = routes_of(tensors, buffers)
    loads: list[_Load] = []
    filling: dict[tuple[int, int], _Load] = {}
    for item in _items(regions, tensors):
        parts = item.parts(routes)
        route = next(iter(parts.values())).route
        nbytes = sum(part.row_bytes for part in parts.values()) * route.ranks
        load = filling.get(route.key)
        if nbytes >= sizes.LARGE_BYTES:
            loads.append(_Load())
            loads[-1].take(parts, item)
            continue
        if not load or load.nbytes + nbytes + max(load.largest_bytes, item.largest_bytes) > bucket_bytes * 2 // 3:
            load = filling[route.key] = _Load()
            loads.append(load)
        load.take(parts, item)
    return sorted(loads, key=lambda load: load.route.from_rank_0_of is not None)


def _items(regions: Mapping[str, Region], tensors: Mapping[str, torch.Tensor]) -> list[_Item]:
    """Join regions that need the same tensor of the model, so that each tensor travels once."""
    item_of: dict[str, _Item] = {}
    for name, region in regions.items():
        sources = dict.fromkeys(sources_of(region))
        item, *others = {id(i): i for s in sources if (i := item_of.get(s))}.values() or [_Item()]
        for other in others:
            item.sources |= other.sources
            item.regions |= other.regions
        item.sources |= {source: tensors[source] for source in sources}
        item.regions[name] = region
        item_of |= dict.fromkeys(item.sources if others else sources, item)
    return list({id(item): item for item in item_of.values()}.values())
