"""Stream the weights of a sharded model as full tensors under Hugging Face names, one at a time, on every rank.

Input: a model, sharded or not, offloaded or not. Output: an iterator for an inference engine, and checksums of the
tensors of an iterator.

Steps: determine names and regions, as an export does; group regions that are made of the same tensors into items; put
items into buckets; yield the tensors of one bucket while the next bucket is gathered.

[Note: changes during a stream] A stream has the weights of the call. A bucket has the values of the time at which it is
gathered, so weights must not change before the last bucket is gathered. Each rank checks the tensors of a bucket when
it gathers the bucket. If they have changed, it takes part in the remaining collectives, and raises instead of yielding
the next tensor. At the end of the stream, the ranks exchange whether one of them has found a change, and all raise.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.agreement import all_or_none, any_rank, check_equal, from_rank_0
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.torch_internals import local_of, storage_address
from fsdp2_strategy.errors import CheckpointError, RolloutError
from fsdp2_strategy.hf.peft.files import AdapterFiles
from fsdp2_strategy.hf.peft.merge import Merged, gather_full, without_adapter_modules, without_adapters
from fsdp2_strategy.model.failed_loads import check_usable
from fsdp2_strategy.model.fsdp_state import class_name, reshard
from fsdp2_strategy.model.placeholders import values_of
from fsdp2_strategy.model.ranks import on_ranks_of
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.model.weight_versions import WeightWatch
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.rollout.bucket import may_start_early
from fsdp2_strategy.rollout.changed_buckets import ChangesBucket, decide
from fsdp2_strategy.rollout.changed_elements import Retain, Retained
from fsdp2_strategy.rollout.difference import Change
from fsdp2_strategy.rollout.stream_plan import Item, RegionBucket, cached_items, facts_of, make_items, pack
from fsdp2_strategy.storage.regions import sources_of
from fsdp2_strategy.storage.safetensors_format import memory_of

T = TypeVar("T")


class WeightStream(Iterator[tuple[str, T]], Generic[T]):
    """The iterator that `stream_weights` returns."""

    def __init__(self, pairs: Generator[tuple[str, T], None, None]) -> None:
        self._pairs = pairs
        self.is_full = True
        """Whether all weights are sent."""
        self.version: str | None = None
        """Name of the version that the receiver has after the stream; None without ``since``."""
        self.full_bytes = 0
        """Number of bytes of all weights, in the dtypes in which they are sent; 0 without ``since``."""
        self.retained_bytes = 0
        """Number of bytes that this rank retains to find the next changes."""

        self._is_started = False

    def __next__(self) -> tuple[str, T]:
        self._is_started = True
        return next(self._pairs)

    @collective
    def close(self) -> None:
        """Run the remaining collectives of the stream, also if no tensor was requested; collective."""
        if not self._is_started:  # closing a generator that has not started runs none of its code
            next(self, None)
        self._pairs.close()


@overload
def stream_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = ...,
    bucket_bytes: int | None = ...,
    merge_adapters: bool = ...,
    since: None = None,
    retain: Retain = ...,
) -> WeightStream[torch.Tensor]: ...


@overload
def stream_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = ...,
    bucket_bytes: int | None = ...,
    merge_adapters: bool = ...,
    since: str,
    retain: Retain = ...,
) -> WeightStream[Change]: ...


def stream_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    bucket_bytes: int | None = None,
    merge_adapters: bool = True,
    since: str | None = None,
    retain: Retain = "copy",
) -> WeightStream[torch.Tensor] | WeightStream[Change]:
    """Yield a model's weights as full tensors under Hugging Face names, each once; collective over the model's ranks.

    Every rank must iterate, even if it does not use the tensors. If a rank leaves the loop early, the iterator runs the
    remaining collectives when it is closed: at the end of ``for … in stream_weights(…)``; if a variable refers to the
    iterator, close it yourself, for example with ``contextlib.closing``.

    All tensors have the weights of the call. If the weights change before all of them are gathered (an optimizer step,
    a load, averages of `EMA.swapped_in`), the next tensor is an error. Offloading and reloading the model is allowed.
    PyTorch does not count changes through ``parameter.data``, so these are not noticed.

    A tensor is contiguous, on this rank's device, and does not change while it is held. Release each tensor before you
    request the next: the additional memory is then limited to two buckets, one being read and one being gathered, and
    copies of tensors whose layout in Hugging Face files differs from the model's. To read a tensor on another CUDA
    stream, make that stream wait for the current stream first, and hold the tensor until the read is complete.

    With ``since``, only the weights that have changed are sent, and ranks compare their shards in this call. The first
    such stream, and each whose ``since`` is not the version of the last complete one, sends all (``is_full``).

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
        since: the version that the receiver has, from ``version`` of the stream that it received; ``""`` if it has
            none. None: send all weights, and retain nothing.
        retain: what a rank retains of its shards to find the next changes: "copy", in the dtype in which they are sent,
            or "hashes" of blocks of 128 bytes, which take a sixteenth of that; a block is then sent in full. See
            ``retained_bytes``. Only used with ``since``.

    Yields:
        Name and tensor, as in the files that `save_model` writes. The buffers of a sharded model follow its parameters,
        with rank 0's values. With ``since``, a `TensorDifference` instead of a tensor if that takes fewer bytes, and
        nothing for a tensor that has not changed.

    Raises:
        RolloutError: on every rank, if the model has no values, its adapters cannot be merged, the ranks pass different
            models or arguments, or the weights have changed since the call.
    """
    source = _Source(model)
    bucket_bytes = sizes.BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    if since is None:
        return WeightStream(_stream_all(source, dtype, bucket_bytes, merge_adapters=merge_adapters))
    return _stream_changes(source, dtype, bucket_bytes, since=since, retain=retain, merge_adapters=merge_adapters)


def weight_metadata(
    model: nn.Module, *, dtype: torch.dtype | None, bucket_bytes: int | None, merge_adapters: bool
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return name, dtype and shape of each tensor of `stream_weights`, in its order; collective, but gathers nothing.

    Adapters that are to be merged are gathered.
    """
    source = _Source(model)
    bucket_bytes = sizes.BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    with on_ranks_of(source.root):
        items = _begin(source, dtype, bucket_bytes, [], merge_adapters=merge_adapters)
    regions = [pair for bucket in pack(items, bucket_bytes) for pair in bucket.regions.items()]
    return [(name, region.dtype, tuple(region.shape)) for name, region in regions]


class _Source:
    """A model whose weights are streamed as they are now; see [Note: changes during a stream]."""

    def __init__(self, model: nn.Module) -> None:
        self.root = unwrap_model(model)
        reshard(self.root)
        self._watch = WeightWatch(self.root)
        self.is_collective = any(isinstance(parameter, DTensor) for parameter in self.root.parameters())
        self.action = f"stream {class_name(self.root)}"
        self._has_changed = False

    def all_or_none(self) -> AbstractContextManager[object]:
        """Raise an error of this block on all ranks of the model."""
        return all_or_none(self.action, RolloutError) if self.is_collective else nullcontext()

    def begin(self) -> None:
        """Reshard the model again, and raise if a weight has changed since the call; not collective."""
        reshard(self.root)
        self._has_changed = self._watch.any_changed()
        self.check()

    def add(self, bucket: RegionBucket) -> None:
        """Check the tensors of a bucket whose values were just read; not collective."""
        self._has_changed |= self._watch.any_changed(part.tensor for part in bucket.parts.values())

    def check(self) -> None:
        """Raise if values that this rank has read are not those of the call; not collective."""
        if self._has_changed:
            raise self._changed()

    def checked(self, pairs: Generator[tuple[str, T], None, None]) -> Generator[tuple[str, T], None, None]:
        """Yield the pairs; when they end, raise on every rank if the weights of any rank have changed; collective."""
        try:
            yield from pairs
        except GeneratorExit:
            self._has_changed_anywhere()  # the other ranks may read on
            raise
        except RolloutError:
            if self._has_changed:
                self._has_changed_anywhere()
            raise
        if self._has_changed_anywhere():
            raise self._changed()

    def _has_changed_anywhere(self) -> bool:
        if not self.is_collective:
            return self._has_changed
        with on_ranks_of(self.root):
            return any_rank(self._has_changed)

    def _changed(self) -> RolloutError:
        return RolloutError(
            f"cannot {self.action}: its weights have changed since the stream began, expected the weights of the call "
            "for all tensors. Read the stream to its end before the next optimizer step or load, or begin a new one."
        )


def _stream_all(
    source: _Source, dtype: torch.dtype | None, bucket_bytes: int, *, merge_adapters: bool
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield all weights, as they were when ``source`` was made; collective."""
    with on_ranks_of(source.root):  # not around `_run`: code of the caller runs between its steps
        items = _begin(source, dtype, bucket_bytes, [], merge_adapters=merge_adapters)
    yield from source.checked(_run(items, bucket_bytes, source))


def _stream_changes(
    source: _Source, dtype: torch.dtype | None, bucket_bytes: int, *, since: str, retain: Retain, merge_adapters: bool
) -> WeightStream[Change]:
    """Return a stream of what has changed since a version; collective."""
    root, is_collective = source.root, source.is_collective
    with on_ranks_of(root):
        arguments = [dtype, merge_adapters, since, retain]
        items = _begin(source, dtype, bucket_bytes, arguments, merge_adapters=merge_adapters)
        if retain not in ("copy", "hashes"):  # on every rank: the arguments are equal
            raise RolloutError(
                f"cannot stream weights: retain is {retain!r}, expected 'copy' or 'hashes'. Pass either."
            )
        parts = {name: part for item in items for name, part in item.parts.items()}
        facts = [retain, *((name, p.dtype, p.route, local_of(p.tensor).shape) for name, p in parts.items())]
        last = model_state(root).get(_LAST)
        is_unknown = last is None or last.facts != facts or since != last.version
        # One rank that has lost its memory, or did not complete the last stream, makes all ranks send everything.
        is_full = any_rank(is_unknown) if is_collective else is_unknown
        origin = secrets.token_hex(8)
        if is_full and is_collective:
            origin = from_rank_0(origin)
        with source.all_or_none():
            if is_full or last is None:
                last = model_state(root).set(_LAST, _Last(facts, Retained(retain), origin))
                for name, part in parts.items():
                    last.retained.store(name, part)
            else:
                last.is_complete = False
                retained = last.retained
                changes = [{name: retained.changes(name, part) for name, part in i.parts.items()} for i in items]
        full: list[Item] = items
        buckets: list[ChangesBucket] = []
        if not is_full:
            full, buckets = decide(items, changes, bucket_bytes, is_collective=is_collective)
    last.count += 1
    stream = WeightStream(_run_changes(full, buckets, bucket_bytes, last, source))
    stream.is_full, stream.version, stream.retained_bytes = is_full, last.next_version, last.retained.nbytes
    stream.full_bytes = sum(r.numel() * r.dtype.itemsize for item in items for r in item.regions.values())
    return stream


@dataclass
class _Last:
    """What is known of the last stream of changes from a model."""

    facts: object
    retained: Retained
    origin: str
    """Random, so that no two runs have equal versions."""
    count: int = 0
    is_complete: bool = False

    @property
    def next_version(self) -> str:
        """The version of the weights after the current stream."""
        return f"{self.origin}-{self.count}"

    @property
    def version(self) -> str | None:
        """The version that a receiver of the last stream has; None if that stream was not complete."""
        return self.next_version if self.is_complete else None


_LAST = Slot[_Last]("last stream of changes")


def forget_changes(model: nn.Module) -> None:
    """Release what this rank retains of the last stream of changes; the next one sends all weights; not collective."""
    model_state(unwrap_model(model)).pop(_LAST)


def _begin(
    source: _Source,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    arguments: Sequence[object],
    *,
    merge_adapters: bool,
) -> list[Item]:
    """Return the items of a stream, and gather the adapters that are merged; collective if the model is sharded."""
    root = source.root
    try:
        with source.all_or_none():
            source.begin()
            if bucket_bytes < 1:
                raise RolloutError(
                    f"cannot stream weights: bucket_bytes is {bucket_bytes}, expected at least 1. For example, use "
                    "512 * 2**20."
                )
            check_usable(root)
            merged = without_adapters(root) if merge_adapters else Merged(without_adapter_modules(root))
            items = (cached_items if merged.model is root else make_items)(merged.model, dtype)
        if source.is_collective:
            facts = [*arguments, bucket_bytes, *facts_of(items)]
            expected = "the same model and arguments on every rank. Pass the same ones."
            check_equal(source.action, facts, RolloutError, expected)
        if merged.adapters:
            with source.all_or_none():
                merged.gather()
    except CheckpointError as error:  # of a model that is not sharded
        raise RolloutError(str(error)) from error
    return items


def stream_adapter(model: nn.Module, adapter: str = "default") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a peft model's adapter as full tensors, under the names of peft's files; collective.

    The adapter is gathered when the first tensor is requested; later requests run no collectives. Every rank must
    request the first tensor. All tensors have the weights of the call, and do not change while they are held.

    Args:
        model: a peft model, sharded or not, offloaded or not, or a wrapper.
        adapter: name of the adapter.

    Yields:
        Name and tensor, as in ``adapter_model.safetensors``, in the dtype of the shards.

    Raises:
        RolloutError: on every rank, if the model has no such adapter, trains more than its adapters, or has changed
            between the call and the request of the first tensor.
    """
    return _stream_adapter(_Source(model), adapter)


def _stream_adapter(source: _Source, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an adapter, as they were when ``source`` was made; collective."""
    root = source.root
    with on_ranks_of(root):
        with source.all_or_none():
            source.begin()
        try:
            files, tensors = AdapterFiles.of(root)
        except CheckpointError as error:
            raise RolloutError(f"cannot stream the adapter {adapter!r}: {error}") from error
        if adapter not in files.regions:
            raise RolloutError(
                f"cannot stream an adapter: {adapter!r} is not in {class_name(root)}, expected one of "
                f"{', '.join(map(repr, files.regions))}. Pass adapter= with one of these names."
            )
        sources = {name: tensors[sources_of(region)[0]] for name, region in files.regions[adapter].items()}
        by_id = {id(tensor): tensor for tensor in sources.values()}
        with torch.no_grad():
            gathered = gather_full(by_id)
            for key, tensor in by_id.items():
                if storage_address(gathered[key]) == storage_address(values_of(tensor)):  # not gathered: one rank
                    gathered[key] = gathered[key].clone()
    for name, tensor in sources.items():
        yield name, gathered[id(tensor)].detach()


def _run_changes(
    full: Sequence[Item], buckets: Sequence[ChangesBucket], bucket_bytes: int, last: _Last, source: _Source
) -> Generator[tuple[str, Change], None, None]:
    """Yield what `decide` returned; collective. When all of it was requested, the version of the stream is known."""
    yield from source.checked(_run_decided(full, buckets, bucket_bytes, source))
    last.is_complete = True


def _run_decided(
    full: Sequence[Item], buckets: Sequence[ChangesBucket], bucket_bytes: int, source: _Source
) -> Generator[tuple[str, Change], None, None]:
    """Yield the differences, which were found at the call, and then the full tensors; collective."""
    waiting = deque(buckets)
    try:
        while waiting:
            yield from waiting.popleft().outputs()
    except BaseException:  # the caller left the loop: take part in the remaining collectives
        for bucket in waiting:
            bucket.gather()
        with suppress(RolloutError):  # of `source`, after the collectives
            for _ in _run(full, bucket_bytes, source):
                pass
        raise
    yield from _run(full, bucket_bytes, source)


def _run(items: Sequence[Item], bucket_bytes: int, source: _Source) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the tensors of one bucket in full while the next bucket is gathered; collective."""
    waiting = deque(pack(items, bucket_bytes))
    started: deque[RegionBucket] = deque()
    # Whether to start the next bucket before the first tensor of the current bucket is yielded. At that time, the
    # caller may still hold a tensor of the previous bucket.
    is_early = may_start_early(waiting, bucket_bytes)

    def start(at_most: int) -> None:
        while waiting and len(started) < at_most:
            started.append(waiting.popleft())
            started[-1].start()
            source.add(started[-1])

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
                source.check()
                yield name, make()
                start(2)  # the caller has released the last tensor of the previous bucket
        except BaseException:  # the caller left the loop, or weights changed: take part in the remaining collectives
            while started:
                finish()
                start(1)
            raise
        finish()
        start(1)


def weight_checksums(stream: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the xxh3 checksum of each tensor by name, to compare sent and received weights; not collective.

    Args:
        stream: pairs of name and tensor of an engine, a mapping of them, or `stream_weights`, which is collective. Both
            sides need the same dtypes: pass ``dtype`` to `stream_weights` if the engine does not hold bfloat16.
    """
    if isinstance(stream, nn.Module) or not isinstance(stream, Iterable):
        raise RolloutError(
            f"cannot compute checksums: got a {type(stream).__name__}, expected pairs of name and tensor. Pass "
            "stream_weights(model)."
        )
    pairs = stream.items() if isinstance(stream, Mapping) else stream
    return {name: _checksum(tensor) for name, tensor in pairs}


def _checksum(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(memory_of(tensor.detach().cpu().reshape(-1)))
