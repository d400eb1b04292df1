"""Stream the weights of a sharded model as full tensors under Hugging Face names, one at a time, on every rank.

Input: a model, sharded or not, offloaded or not. Output: an iterator for an inference engine, and checksums of the
tensors of an iterator.

Steps: determine names and regions, as an export does; group regions that are made of the same tensors into items; put
items into buckets; yield the tensors of one bucket while the next bucket is gathered.
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
from fsdp2_strategy.distributed.agreement import all_or_none, check_equal
from fsdp2_strategy.errors import CheckpointError, RolloutError
from fsdp2_strategy.hf.peft.files import AdapterFiles
from fsdp2_strategy.hf.peft.merge import Merged, gather_full, without_adapter_modules, without_adapters
from fsdp2_strategy.hf.regions import Computed, Region, assemble, sources_of
from fsdp2_strategy.hf.safetensors_format import memory_of
from fsdp2_strategy.hf.save_plan import is_identity, regions_to_write, tensors_to_write
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.model.failed_loads import check_usable
from fsdp2_strategy.model.fsdp_state import class_name, reshard
from fsdp2_strategy.model.ranks import on_ranks_of
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.rollout.bucket import Bucket, Part, Route, may_start_early, routes_of


def stream_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    bucket_bytes: int | None = None,
    merge_adapters: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's weights as full tensors under Hugging Face names, each once; collective over the model's ranks.

    Every rank must iterate, even if it does not use the tensors. If a rank leaves the loop early, the iterator runs the
    remaining collectives when it is closed. In ``for … in stream_weights(…)``, Python closes the iterator as soon as
    the loop ends. If a variable refers to the iterator, close it yourself, for example with ``contextlib.closing``.

    A tensor is contiguous and on this rank's device. It does not change while it is held, even if the model does.
    Release each tensor before you request the next: the additional memory is then limited to two buckets, one being
    read and one being gathered. A tensor whose layout in Hugging Face files differs from the model's is copied, which
    takes further memory. To read a tensor on another CUDA stream, make that stream wait for the current stream
    first, and hold the tensor until the read is complete.

    Args:
        model: sharded or not, offloaded or not, or a wrapper. For a model without sharded parameters, the call is not
            collective.
        dtype: dtype of the floating-point parameters; None for the dtypes of the shards. Parameters that the model
            keeps in fp32, and buffers, are not cast. Shards are cast before they are gathered, unless values have to be
            computed from them.
        bucket_bytes: half of the limit on the additional memory; by default 512 MiB. A tensor of 16 MiB or more has its
            own bucket; if that is larger than ``bucket_bytes``, the limit is twice its size. If three consecutive
            buckets would exceed the limit, the next bucket is gathered only after the first tensor of the current
            bucket has been used.
        merge_adapters: merge the adapters of a peft model into the weights; if false, yield the base model's weights
            without them. `stream_adapter` yields an adapter alone.

    Yields:
        Name and tensor, as in the files that `save_model` writes. The buffers of a sharded model follow its parameters,
        with rank 0's values.

    Raises:
        RolloutError: on every rank, if the model has no values, its adapters cannot be merged, or the ranks pass
            different models or arguments.
    """
    root = unwrap_model(model)
    if not any(isinstance(parameter, DTensor) for parameter in root.parameters()):
        try:
            merged, buckets, is_early = _prepare(root, dtype, bucket_bytes, merge_adapters=merge_adapters)
            merged.gather()
        except CheckpointError as error:
            raise RolloutError(str(error)) from error
        yield from _run(buckets, is_early=is_early)
        return
    action = f"stream {class_name(root)}"
    with on_ranks_of(root):  # not around `_run`: code of the caller runs between its steps
        with all_or_none(action, RolloutError):
            reshard(root)
            merged, buckets, is_early = _prepare(root, dtype, bucket_bytes, merge_adapters=merge_adapters)
        facts = [bucket.facts() for bucket in buckets]
        check_equal(action, facts, RolloutError, "the same model and arguments on every rank. Pass the same ones.")
        if merged.adapters:
            with all_or_none(action, RolloutError):
                merged.gather()
    yield from _run(buckets, is_early=is_early)


def stream_adapter(model: nn.Module, adapter: str = "default") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a peft model's adapter as full tensors, under the names of peft's files; collective.

    The adapter is gathered when the first tensor is requested; later requests run no collectives. Every rank must
    request the first tensor.

    Args:
        model: a peft model, sharded or not, offloaded or not, or a wrapper.
        adapter: name of the adapter.

    Yields:
        Name and tensor, as in ``adapter_model.safetensors``, in the dtype of the shards.

    Raises:
        RolloutError: on every rank, if the model has no such adapter, or trains more than its adapters.
    """
    root = unwrap_model(model)
    reshard(root)
    with on_ranks_of(root):
        try:
            files, tensors = AdapterFiles.of(root)
        except CheckpointError as error:
            raise RolloutError(str(error)) from error
        if adapter not in files.regions:
            raise RolloutError(
                f"cannot stream an adapter: {adapter!r} is not in {class_name(root)}, expected one of "
                f"{', '.join(map(repr, files.regions))}."
            )
        sources = {name: tensors[sources_of(region)[0]] for name, region in files.regions[adapter].items()}
        with torch.no_grad():
            gathered = gather_full({id(tensor): tensor for tensor in sources.values()})
    for name, tensor in sources.items():
        yield name, gathered[id(tensor)].detach()


def _prepare(
    root: nn.Module, dtype: torch.dtype | None, bucket_bytes: int | None, *, merge_adapters: bool
) -> tuple[Merged, list[_RegionBucket], bool]:
    bucket_bytes = sizes.BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    if bucket_bytes < 1:
        raise RolloutError(
            f"cannot stream weights: bucket_bytes is {bucket_bytes}, expected at least 1. For example, use 512 * 2**20."
        )
    check_usable(root)
    merged = without_adapters(root) if merge_adapters else Merged(without_adapter_modules(root))
    plan = (_cached_plan if merged.model is root else _make_plan)(merged.model, dtype, bucket_bytes)
    buckets = [copy.copy(bucket) for bucket in plan]  # the plan is cached; the buffers belong to one stream
    return merged, buckets, may_start_early(buckets, bucket_bytes)


def _run(buckets: Sequence[_RegionBucket], *, is_early: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of one bucket while the next bucket is gathered; collective.

    Args:
        buckets: the buckets in their order.
        is_early: whether to start the next bucket before the first tensor of the current bucket is yielded. At that
            time, the caller may still hold a tensor of the previous bucket.
    """
    waiting = deque(buckets)
    started: deque[_RegionBucket] = deque()

    def start(at_most: int) -> None:
        while waiting and len(started) < at_most:
            started.append(waiting.popleft())
            started[-1].start()

    def finish() -> None:
        bucket = started.popleft()
        bucket.wait()
        bucket.release()

    start(1)
    while started:
        if is_early:
            start(2)
        started[0].wait()
        try:
            for name, make in started[0].outputs():
                yield name, make()
                start(2)  # the caller has released the last tensor of the previous bucket
        except BaseException:  # the caller left the loop: take part in the remaining collectives
            while started:
                finish()
                start(1)
            raise
        finish()
        start(1)


def weight_checksums(stream: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the xxh3 checksum of each tensor by name, to compare sent and received weights; not collective.

    Args:
        stream: names and tensors of an engine, or those of `stream_weights`, which is collective.
    """
    return {name: _checksum(tensor) for name, tensor in stream}


def _checksum(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(memory_of(tensor.detach().cpu().reshape(-1)))


# --- planning --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Item:
    """Tensors of the model, and the regions that are made of these tensors only."""

    sources: dict[str, torch.Tensor] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)

    @property
    def largest_bytes(self) -> int:
        """Size of its largest region."""
        return max(region.numel() * region.dtype.itemsize for region in self.regions.values())

    def parts(self, routes: Mapping[str, Route]) -> dict[str, Part]:
        """Return the tensors as parts that can share a bucket.

        If all regions have one dtype and none is computed, the tensors are cast to it before they are gathered.
        """
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


class _RegionBucket(Bucket):
    """A bucket, and the regions that are made of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: dict[str, Region] = {}
        self.largest_bytes = 0
        """Size of its largest region."""

    def add_item(self, parts: Mapping[str, Part], item: _Item) -> None:
        """Add an item."""
        for name, part in parts.items():
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

    def facts(self) -> list[object]:
        """Return the facts that must be equal on every rank."""
        return [self.nbytes, *((name, tuple(r.shape), r.dtype) for name, r in self.regions.items())]


_PLAN = Slot[tuple[object, list[_RegionBucket]]]("plan of the last stream")
"""The arguments, the ids and dtypes of the model's tensors at that time, and the buckets."""


def _cached_plan(root: nn.Module, dtype: torch.dtype | None, bucket_bytes: int) -> list[_RegionBucket]:
    """Return the plan of a stream; the plan of the last stream is reused if only values have changed since.

    A plan refers to its tensors, so no new tensor can get the id of one of them.
    """
    tensors = [t for m in root.modules() for of in (m._parameters, m._buffers) for t in of.values()]
    held = [(id(t), t.dtype if t is not None else None) for t in tensors]  # casts in place keep the id
    asked = (dtype, bucket_bytes, sizes.LARGE_BYTES, held)
    known = model_state(root).get(_PLAN)
    if known is None or known[0] != asked:
        known = model_state(root).set(_PLAN, (asked, _make_plan(root, dtype, bucket_bytes)))
    return known[1]


def _make_plan(root: nn.Module, dtype: torch.dtype | None, bucket_bytes: int) -> list[_RegionBucket]:
    """Put a model's tensors into buckets; names, shapes, dtypes and placements determine the result on every rank."""
    copied = meta_skeleton(root)
    tensors = tensors_to_write(root, copied)
    regions = regions_to_write(copied, tensors, dtype)
    is_sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    buffers = {id(buffer) for buffer in root.buffers()} if is_sharded else set()
    routes = routes_of(tensors, buffers)
    buckets: list[_RegionBucket] = []
    filling: dict[tuple[int, int], _RegionBucket] = {}
    for item in _items(regions, tensors):
        parts = item.parts(routes)
        route = next(iter(parts.values())).route
        nbytes = sum(part.row_bytes for part in parts.values()) * route.ranks
        bucket = filling.get(route.key)
        if nbytes >= sizes.LARGE_BYTES:
            buckets.append(_RegionBucket())
            buckets[-1].add_item(parts, item)
            continue
        if not bucket or bucket.nbytes + nbytes + max(bucket.largest_bytes, item.largest_bytes) > bucket_bytes * 2 // 3:
            bucket = filling[route.key] = _RegionBucket()
            buckets.append(bucket)
        bucket.add_item(parts, item)
    return sorted(buckets, key=lambda bucket: bucket.route.from_rank_0_of is not None)


def _items(regions: Mapping[str, Region], tensors: Mapping[str, torch.Tensor]) -> list[_Item]:
    """Group regions that need the same tensor of the model, so that each tensor is gathered once."""
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
