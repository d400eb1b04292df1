"""Offload models and optimizers to host memory, and reload them unchanged.

Input: a sharded model, or an optimizer over one. Output: the same object, with its large tensors replaced by
placeholders ([Note: offloaded values] in `placeholders`), or reloaded to the device with bitwise equal values.

Values are copied into large host buffers, which are pinned if there is an accelerator and are reused by the next
offload. Copies are queued on a separate stream. `offload` waits for them. `reload` does not: later kernels wait for
them on the device. Tensors of one element (Adam's ``step``) are not moved. Gradients are moved with their parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.distributed.torch_internals import (
    flat_shard_of,
    free_pinned_memory,
    has_deferred_all_reduce,
    has_unreduced_gradient,
    local_of,
    name_of,
    parameters_of,
    set_flat_shard,
    set_local,
    shard_of,
    storage_address,
    take_over_shard,
)
from fsdp2_strategy.errors import OffloadError
from fsdp2_strategy.model.fsdp_state import parameter_groups, settle
from fsdp2_strategy.model.placeholders import anything_is_away, is_away, stand_in, values_of
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.model.unit_hooks import hang, take_off
from fsdp2_strategy.model.wrappers import unwrap_model

_ALIGNMENT = 512

Put = Callable[[torch.Tensor], None]


@dataclass(eq=False)
class _Item:
    """One tensor to offload, and the functions that register a replacement for it."""

    tensor: torch.Tensor
    """The placeholder while the values are offloaded."""
    places: list[Put]

    @property
    def span(self) -> int:
        """Number of storage elements from the tensor's first to its last, both included."""
        return 1 + sum((n - 1) * s for n, s in zip(self.tensor.size(), self.tensor.stride(), strict=True))

    def put(self, tensor: torch.Tensor) -> None:
        """Register another tensor in place of the present one."""
        self.tensor = tensor
        for place in self.places:
            place(tensor)


@dataclass(frozen=True, eq=False)
class _Trip:
    """The record of the offloaded tensors of one unit or optimizer."""

    slabs: list[torch.Tensor]
    """Host buffers that hold the values."""
    let_in: Callable[[Any], None]
    """Removes the hook that raises while the unit or optimizer is offloaded."""


_TRIP = Slot[_Trip]("what is away of it")
"""Slot of an ``FSDPParamGroup`` or an optimizer. It does not hold the placeholders, because some may be replaced before
the reload."""


def offload(subject: nn.Module | Optimizer) -> None:
    """Move a sharded model's parameters and gradients, or an optimizer's state, to host memory; not collective.

    Until `reload`, a forward pass or a step raises OffloadError; saving, loading and exporting use the host memory.
    Tensors that are already offloaded are left where they are. Buffers, parameters that are not sharded, and tensors of
    one element stay on the device.

    Args:
        subject: a prepared model or its wrapper, or an optimizer over one.

    Raises:
        OffloadError: FSDP2 keeps gradients of a micro-batch that are not reduced yet; or the host is out of memory. In
            both cases nothing is offloaded by this call.
    """
    if isinstance(subject, Optimizer):
        if not _is_away(subject):
            _send(subject, _guard_steps)
        return
    root = unwrap_model(subject)
    groups = [group for group in parameter_groups(root) if not _is_away(group)]
    for group in groups:
        _check_between_steps(group)
    if groups:
        settle(root)
    try:
        for group in groups:
            _send(group, _guard_gathers)
    except OffloadError:
        _fetch(groups)
        _end_watch()
        raise


def reload(subject: nn.Module | Optimizer) -> None:
    """Copy offloaded tensors back to the device; not collective. Tensors on the device are left as they are."""
    away = [key for key in _keys(subject) if _is_away(key)]
    _fetch(away)
    _end_watch()
    if away and isinstance(subject, nn.Module):
        settle(unwrap_model(subject))  # a forward pass that raised left FSDP2 in the middle of it


def _keys(subject: nn.Module | Optimizer) -> list[Any]:
    """Return the objects that have a `_TRIP` slot: the optimizer, or each ``FSDPParamGroup`` of the model."""
    return [subject] if isinstance(subject, Optimizer) else list(parameter_groups(unwrap_model(subject)))


def _fetch(keys: Sequence[Any]) -> None:
    """Reload the given units or optimizers; skip those that are not offloaded."""
    with CopyQueue() as queue:
        for key in filter(_is_away, keys):
            trip = model_state(key).get(_TRIP)
            assert trip is not None
            of_slab: dict[int, list[_Item]] = defaultdict(list)
            for item in _items_of(key):
                if is_away(item.tensor):
                    of_slab[storage_address(values_of(item.tensor))].append(item)
            while trip.slabs:  # one by one: if device memory runs out, the other buffers stay valid
                for item in of_slab[storage_address(trip.slabs[-1])]:
                    like = item.tensor
                    back = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=current_device())
                    queue.copy(back, values_of(like))
                    item.put(back)
                _slabs.give_back(trip.slabs.pop(), queue.event())
            model_state(key).pop(_TRIP)
            trip.let_in(key)


def is_offloaded(subject: nn.Module | Optimizer) -> bool:
    """Return whether any tensor of the model or optimizer is offloaded; not collective."""
    return any(map(_is_away, _keys(subject)))


def check_resident(subject: nn.Module | Optimizer, action: str) -> None:
    """Raise if any tensor of the model or optimizer is offloaded; not collective.

    Raises:
        OffloadError: it is offloaded. ``action`` begins the error text.
    """
    if is_offloaded(subject):
        raise _error(action, subject)


def forget_slabs() -> None:
    """Free the pinned host buffers that are kept for the next offload; not collective."""
    _slabs.clear()
    _end_watch()


def _is_away(key: Any) -> bool:
    return model_state(key).get(_TRIP) is not None


def _send(key: Any, guard: Callable[[Any], Callable[[Any], None]]) -> None:
    for parameter in () if isinstance(key, Optimizer) else parameters_of(key):
        take_over_shard(parameter)  # the module's parameter may have been replaced since the last pass
    slabs: list[torch.Tensor] = []
    sent: list[tuple[_Item, torch.Tensor]] = []
    try:
        with CopyQueue() as queue:
            for members, nbytes in _packed([item for item in _items_of(key) if _travels(item.tensor)]):
                slabs.append(_slabs.take(nbytes))
                for item, begin in members:
                    like = item.tensor
                    values = slabs[-1][begin : begin + item.span * like.element_size()].view(like.dtype)
                    queue.copy(values.as_strided(like.size(), like.stride(), values.storage_offset()), like)
                    sent.append((item, values))
                    if not queue.is_async:
                        item.put(stand_in(values, like))
    except (RuntimeError, MemoryError) as error:
        for item, values in (pair for pair in sent if pair[0].tensor.is_meta):
            like = item.tensor
            item.put(values.as_strided(like.size(), like.stride(), values.storage_offset()).clone())
        raise OffloadError(
            f"cannot offload: the host has no memory left ({error}), and everything is where it was. Offload less, or "
            "use a larger host."
        ) from error
    for item, values in sent if queue.is_async else ():
        item.put(stand_in(values, item.tensor))  # all copies are complete, so device memory can be freed
    model_state(key).set(_TRIP, _Trip(slabs, guard(key)))
    if not isinstance(key, Optimizer):
        _watch_steps()


def _items_of(key: Any) -> Iterator[_Item]:
    """Yield the tensors of a unit or an optimizer, offloaded or not."""
    return _state_items(key) if isinstance(key, Optimizer) else _unit_items(key)


def _unit_items(record: Any) -> Iterator[_Item]:
    for parameter in parameters_of(record):
        yield _Item(flat_shard_of(parameter), [partial(set_flat_shard, parameter)])
        gradient: Any = shard_of(parameter).grad
        if gradient is not None:
            yield _Item(local_of(gradient), [partial(set_local, gradient)])


def _state_items(optimizer: Optimizer) -> Iterator[_Item]:
    """Yield an optimizer's tensors; a tensor that is registered several times is yielded once."""
    places: dict[int, list[Put]] = defaultdict(list)
    tensors: dict[int, torch.Tensor] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            local = local_of(value)
            put = partial(set_local, value) if isinstance(value, DTensor) else partial(_set, state, key)
            tensors[id(local)] = local
            places[id(local)].append(put)
    for key, tensor in tensors.items():
        yield _Item(tensor, places[key])


def _set(state: dict[str, Any], key: str, value: torch.Tensor) -> None:
    state[key] = value


def _travels(tensor: torch.Tensor) -> bool:
    return tensor.device.type == current_device().type and tensor.numel() > 1


def _check_between_steps(group: Any) -> None:
    if has_deferred_all_reduce(group) or any(map(has_unreduced_gradient, parameters_of(group))):
        raise OffloadError(
            "cannot offload this model: gradients of the last micro-batch are not reduced yet, expected a model "
            "between two steps. Offload it after optimizer_step has stepped, or set grad_sync='every'."
        )


def _guard_gathers(group: Any) -> Callable[[Any], None]:
    """Make every all-gather of a unit raise, in forward, generate, unshard and backward; return the undo function."""
    names = [name_of(parameter) for parameter in parameters_of(group)]

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise OffloadError(
            f"cannot compute with this model: {names[0] if names else 'it'} is in host memory, expected it on the "
            "device. Call reload_model first."
        )

    hang(group, "gather", "offload", refuse)
    return lambda group: take_off(group, "gather", "offload")


def _guard_steps(optimizer: Optimizer) -> Callable[[Any], None]:
    handle: Any = optimizer.register_step_pre_hook(_refuse_step)
    return lambda _: handle.remove()


def _refuse_step(optimizer: Optimizer, *_args: Any) -> None:
    raise _error("step", optimizer)


_step_watch: list[Any] = []
"""At most one handle of a step hook on all optimizers: added when a model is offloaded, removed when no tensor is."""


def _watch_steps() -> None:
    """Register a hook on all optimizers that raises before a step of offloaded parameters."""
    if not _step_watch:
        _step_watch.append(register_optimizer_step_pre_hook(_refuse_step_without_model))


def _end_watch() -> None:
    while _step_watch and not anything_is_away():
        _step_watch.pop().remove()


def _refuse_step_without_model(optimizer: Optimizer, *_args: Any) -> None:
    """Raise if an optimizer's parameters are offloaded; on meta tensors a step would silently do nothing."""
    if any(is_away(p) for group in optimizer.param_groups for p in group["params"]):
        raise OffloadError(
            "cannot step: the model that this optimizer steps is in host memory, expected it on the device. Call "
            "reload_model first."
        )


def _error(action: str, subject: nn.Module | Optimizer) -> OffloadError:
    call = "maybe_load_optimizer" if isinstance(subject, Optimizer) else "reload_model"
    return OffloadError(
        f"cannot {action}: this {type(subject).__name__} is in host memory, expected it on the device. Call {call} "
        "first."
    )


def _packed(items: Sequence[_Item]) -> Iterator[tuple[list[tuple[_Item, int]], int]]:
    """Pack items into host buffers; yield for each buffer its items with byte offsets, and its size in bytes."""
    members: list[tuple[_Item, int]] = []
    end = 0
    for item in items:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        nbytes = item.span * item.tensor.element_size()
        if members and begin + nbytes > sizes.OFFLOAD_BYTES:
            yield members, end
            members, begin = [], 0
        members.append((item, begin))
        end = begin + nbytes
    if members:
        yield members, end


class _Slabs:
    """A pool of host buffers. Pinned buffers are kept for the next offload, because they are expensive to allocate."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[torch.Tensor, Any]]] = defaultdict(list)

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least ``nbytes`` bytes."""
        size = 1 << (nbytes - 1).bit_length() if _pins() else nbytes  # torch rounds pinned memory up like this
        if self._free[size]:
            slab, through = self._free[size].pop()
            if through is not None:
                through.synchronize()
            return slab
        return torch.empty(size, dtype=torch.uint8, pin_memory=_pins())

    def give_back(self, slab: torch.Tensor, through: Any) -> None:
        """Return a buffer to the pool; it can be reused once the event ``through`` has completed."""
        if _pins():
            self._free[slab.numel()].append((slab, through))

    def clear(self) -> None:
        """Free all buffers in the pool."""
        for waiting in self._free.values():
            for _, through in waiting:
                if through is not None:
                    through.synchronize()
        self._free.clear()
        if _pins():
            free_pinned_memory()


_slabs = _Slabs()


def _pins() -> bool:
    return torch.cuda.is_available()


class CopyQueue:
    """Copy tensors between host and device, on a separate stream if there is an accelerator.

    At the end of the ``with`` block, the host waits if values were copied to it; else only the current stream waits.
    """

    def __init__(self) -> None:
        self.is_async = current_device().type == "cuda"
        self._to_host = False

    def __enter__(self) -> CopyQueue:
        if self.is_async:
            self._stream = _stream_of(current_device())
            self._stream.wait_stream(torch.cuda.current_stream())
        self._without_gradients = torch.no_grad()
        self._without_gradients.__enter__()
        return self

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue the copy of one tensor."""
        self.copy_all([target], [source])

    def copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Queue the copies of several tensors, without autograd."""
        if not targets:
            return
        if not self.is_async:
            torch._foreach_copy_(targets, sources)
            return
        self._to_host |= any(target.device.type == "cpu" for target in targets)
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def event(self) -> Any:
        """Return an event that completes with all copies queued so far; None if copies are synchronous."""
        return self._stream.record_event() if self.is_async else None

    def __exit__(self, *_: object) -> None:
        self._without_gradients.__exit__(None, None, None)
        if not self.is_async:
            return
        if self._to_host:
            self._stream.synchronize()  # the host will read these values
        else:
            torch.cuda.current_stream().wait_stream(self._stream)


_streams: dict[torch.device, Any] = {}


def _stream_of(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
