"""Offload models and optimizers to host memory, and reload them unchanged.

Input: a sharded model, or the optimizer of a sharded model. Output: the same object. `offload` replaces its tensors by
placeholders ([Note: offloaded values] in `placeholders`). `reload` copies the values back to the device, bitwise equal.

Values are copied into large host buffers. The buffers are pinned, and the next offload reuses them. Copies are queued
on a separate stream. `offload` waits once, until all copies are complete, and then registers the placeholders, which
frees memory of the device. If anything fails before, nothing has changed. `reload` returns at once, and kernels that
are launched later wait for the copies. Gradients are moved with their parameters. Tensors of one element (Adam's
``step``) are not moved.

Without an accelerator, the values are in host memory already. Then placeholders refer to the tensors themselves, and
`reload` registers these again: no value is copied, and no memory is allocated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from operator import setitem
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
    reset_sharded_parameter,
    set_flat_shard,
    set_local,
    shard_of,
    storage_address,
)
from fsdp2_strategy.errors import OffloadError
from fsdp2_strategy.model.fsdp_state import parameter_groups, reset_units
from fsdp2_strategy.model.placeholders import any_offloaded, is_offloaded_tensor, placeholder_for, values_of
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.model.unit_hooks import register_hook, remove_hook
from fsdp2_strategy.model.wrappers import unwrap_model

_ALIGNMENT = 512


@dataclass(eq=False)
class _Item:
    """A tensor to offload or reload, and the functions that register another tensor in its place."""

    tensor: torch.Tensor
    """The tensor that is registered now; while the values are offloaded, the placeholder."""
    setters: list[Callable[[torch.Tensor], None]]

    @property
    def length(self) -> int:
        """Number of elements of the tensor's storage from its first element to its last."""
        if not self.tensor.numel():
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.tensor.size(), self.tensor.stride(), strict=True))

    @property
    def nbytes(self) -> int:
        """The same in bytes."""
        return self.length * self.tensor.element_size()

    def replace(self, tensor: torch.Tensor) -> None:
        """Register ``tensor`` in place of the current one."""
        self.tensor = tensor
        for setter in self.setters:
            setter(tensor)


_BUFFERS = Slot[list[torch.Tensor]]("host buffers of offloaded values")
"""Set on the ``FSDPParamGroup`` of an offloaded unit, or on an offloaded optimizer. The placeholders are not stored
here, because other code may replace some of them before the reload."""


def offload(subject: nn.Module | Optimizer) -> None:
    """Move a sharded model's parameters and gradients, or an optimizer's state, to host memory; not collective.

    Until `reload`, a forward pass or a step raises OffloadError. Saving, loading and exporting use the host memory
    directly. Units and optimizers that are already offloaded are skipped. Buffers, parameters that are not sharded, and
    tensors of one element stay on the device.

    Args:
        subject: a prepared model or its wrapper, or the optimizer of a prepared model.

    Raises:
        OffloadError: the model has gradients that FSDP2 has not reduced yet, or the host is out of memory. In both
            cases this call offloads nothing.
    """
    owners = [owner for owner in _owners(subject) if not _is_offloaded(owner)]
    if isinstance(subject, nn.Module) and owners:
        for param_group in owners:
            _check_between_steps(param_group)
        reset_units(unwrap_model(subject))
    try:
        _offload(owners)
    except (RuntimeError, MemoryError) as error:
        raise OffloadError(
            f"cannot offload this {type(subject).__name__}: {type(error).__name__}: {error}. Nothing was offloaded. If "
            "the host is out of memory, offload less, or use a host with more memory."
        ) from error


def reload(subject: nn.Module | Optimizer) -> None:
    """Copy offloaded tensors back to the device; not collective. Other tensors are not changed."""
    was_offloaded = is_offloaded(subject)
    _reload(_owners(subject))
    _unguard_steps()
    if was_offloaded and isinstance(subject, nn.Module):
        reset_units(unwrap_model(subject))  # a forward pass that raised left units in their forward state


def is_offloaded(subject: nn.Module | Optimizer) -> bool:
    """Return whether any tensor of the model or optimizer is offloaded; not collective."""
    return any(map(_is_offloaded, _owners(subject)))


def check_resident(subject: nn.Module | Optimizer, action: str) -> None:
    """Raise OffloadError "cannot ``action``" if any tensor of the model or optimizer is offloaded; not collective."""
    if is_offloaded(subject):
        call = "maybe_load_optimizer" if isinstance(subject, Optimizer) else "reload_model"
        raise OffloadError(
            f"cannot {action}: this {type(subject).__name__} is in host memory, expected it on the device. Call {call} "
            "first."
        )


def copies_on_host(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield a copy of each tensor in host memory, in order; the device is waited for once per ``OFFLOAD_BYTES``.

    A copy is valid until the next one is requested. Not collective.
    """
    for members, nbytes in _pack(_Item(tensor, []) for tensor in tensors):
        buffer = _host_buffers.take(nbytes)
        copies = [
            _shaped_like(item.tensor, buffer[begin : begin + item.nbytes].view(item.tensor.dtype))
            for item, begin in members
        ]
        with CopyQueue() as queue:
            queue.copy_all(copies, [item.tensor for item, _ in members])
        yield from copies
        _host_buffers.release(buffer)


def copy_from_host(targets: Sequence[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy tensors in host memory to tensors of the device, without waiting for the device; not collective."""
    remaining = iter(sources)
    for members, nbytes in _pack(_Item(tensor, []) for tensor in targets):
        buffer = _host_buffers.take(nbytes)
        with CopyQueue() as queue:
            for item, begin in members:
                values = _shaped_like(item.tensor, buffer[begin : begin + item.nbytes].view(item.tensor.dtype))
                queue.copy(item.tensor, values.copy_(next(remaining)))
            _host_buffers.release(buffer, queue.event())


def _shaped_like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a view of flat values with the shape and strides of a tensor."""
    return values.as_strided(tensor.size(), tensor.stride(), values.storage_offset())


def free_host_buffers() -> None:
    """Free the pinned host buffers that are kept for the next offload; not collective."""
    _host_buffers.clear()
    _unguard_steps()


def _owners(subject: nn.Module | Optimizer) -> list[Any]:
    """Return the objects that are offloaded one by one: the optimizer, or each ``FSDPParamGroup`` of the model."""
    return [subject] if isinstance(subject, Optimizer) else list(parameter_groups(unwrap_model(subject)))


def _is_offloaded(owner: Any) -> bool:
    return model_state(owner).get(_BUFFERS) is not None


def _offload(owners: Sequence[Any]) -> None:
    """Offload units or optimizers; if a copy fails, the tensors of all of them are unchanged."""
    found: list[tuple[Any, list[torch.Tensor], list[tuple[_Item, torch.Tensor]]]] = []  # owner, buffers, values
    with CopyQueue() as queue:
        for owner in owners:
            for parameter in () if isinstance(owner, Optimizer) else parameters_of(owner):
                reset_sharded_parameter(parameter)  # the module's parameter may have been replaced since it was sharded
            found.append((owner, *_values_on_host(owner, queue)))
    placeholders = [[placeholder_for(values, item.tensor) for item, values in pairs] for *_, pairs in found]
    for (owner, buffers, pairs), of_owner in zip(found, placeholders, strict=True):  # from here on, nothing can fail
        for (item, _), placeholder in zip(pairs, of_owner, strict=True):
            item.replace(placeholder)
        model_state(owner).set(_BUFFERS, buffers)
        if not isinstance(owner, Optimizer):
            register_hook(owner, "gather", "offload", _refuse_gather)
        _guard_steps()


def _values_on_host(owner: Any, queue: CopyQueue) -> tuple[list[torch.Tensor], list[tuple[_Item, torch.Tensor]]]:
    """Queue copies of an owner's tensors; return the host buffers, and the 1-d values of each tensor."""
    items = [item for item in _items(owner) if _is_offloadable(item.tensor)]
    if not _needs_copies():
        return [], [(item, item.tensor.detach().as_strided((item.length,), (1,))) for item in items]
    buffers: list[torch.Tensor] = []
    pairs: list[tuple[_Item, torch.Tensor]] = []
    for members, nbytes in _pack(items):
        buffers.append(_host_buffers.take(nbytes))
        for item, begin in members:
            values = buffers[-1][begin : begin + item.nbytes].view(item.tensor.dtype)
            queue.copy(_shaped_like(item.tensor, values), item.tensor)
            pairs.append((item, values))
    return buffers, pairs


def _needs_copies() -> bool:
    """Return whether the device has other memory than the host."""
    return current_device().type != "cpu"


def _reload(owners: Sequence[Any]) -> None:
    """Reload the given units or optimizers; skip those that are not offloaded."""
    with CopyQueue() as queue:
        for owner in owners:
            if (buffers := model_state(owner).get(_BUFFERS)) is None:
                continue
            items_in: dict[int, list[_Item]] = defaultdict(list)
            for item in _items(owner):
                if is_offloaded_tensor(item.tensor):
                    items_in[storage_address(values_of(item.tensor))].append(item)
            while buffers:  # one by one: if device memory runs out, the remaining buffers stay valid
                for item in items_in.pop(storage_address(buffers[-1]), []):
                    like = item.tensor
                    new = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=current_device())
                    queue.copy(new, values_of(like))
                    item.replace(new)
                _host_buffers.release(buffers.pop(), queue.event())
            for item in chain.from_iterable(items_in.values()):  # they were not copied
                item.replace(values_of(item.tensor))
            model_state(owner).pop(_BUFFERS)
            if not isinstance(owner, Optimizer):
                remove_hook(owner, "gather", "offload")


def _items(owner: Any) -> Iterable[_Item]:
    """Return the tensors of a unit or an optimizer, offloaded or not."""
    return _state_items(owner) if isinstance(owner, Optimizer) else _unit_items(owner)


def _unit_items(param_group: Any) -> Iterator[_Item]:
    for parameter in parameters_of(param_group):
        yield _Item(flat_shard_of(parameter), [partial(set_flat_shard, parameter)])
        gradient: Any = shard_of(parameter).grad
        if gradient is not None:
            yield _Item(local_of(gradient), [partial(set_local, gradient)])


def _state_items(optimizer: Optimizer) -> Iterable[_Item]:
    """Return one item per tensor of an optimizer's state, also if the tensor is registered under several keys."""
    items: dict[int, _Item] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                local = local_of(value)
                setter = partial(set_local, value) if isinstance(value, DTensor) else partial(setitem, state, key)
                items.setdefault(id(local), _Item(local, [])).setters.append(setter)
    return items.values()


def _is_offloadable(tensor: torch.Tensor) -> bool:
    return tensor.device.type == current_device().type and tensor.numel() > 1


def _check_between_steps(param_group: Any) -> None:
    if has_deferred_all_reduce(param_group) or any(map(has_unreduced_gradient, parameters_of(param_group))):
        raise OffloadError(
            "cannot offload this model: it has gradients of a micro-batch that are not reduced yet, expected a model "
            "between two steps. Offload it after optimizer_step has stepped, or set grad_sync='every'."
        )


def _refuse_gather(param_group: Any, *_args: Any, **_kwargs: Any) -> None:
    """Raise instead of any all-gather of an offloaded unit: in forward, generate, unshard and backward."""
    names = [name_of(parameter) for parameter in parameters_of(param_group)]
    raise OffloadError(
        f"cannot compute with this model: {names[0] if names else 'a unit'} is in host memory, expected it on the "
        "device. Call reload_model first."
    )


_step_guard: list[Any] = []
"""The handle of the step hook on all optimizers; empty while no tensor is offloaded."""


def _guard_steps() -> None:
    """Register a hook on all optimizers that raises before a step if its parameters or state are offloaded."""
    if not _step_guard:
        _step_guard.append(register_optimizer_step_pre_hook(_refuse_step))


def _unguard_steps() -> None:
    while _step_guard and not any_offloaded():
        _step_guard.pop().remove()


def _refuse_step(optimizer: Optimizer, *_: Any) -> None:
    """Raise if an optimizer's state or parameters are offloaded: on meta tensors, a step would silently do nothing."""
    check_resident(optimizer, "step")
    if any(is_offloaded_tensor(p) for group in optimizer.param_groups for p in group["params"]):
        raise OffloadError(
            f"cannot step: the parameters of this {type(optimizer).__name__} are in host memory, expected them on the "
            "device. Call reload_model first."
        )


def _pack(items: Iterable[_Item]) -> Iterator[tuple[list[tuple[_Item, int]], int]]:
    """Assign items to host buffers; for each buffer, yield its items with byte offsets, and its size in bytes."""
    members: list[tuple[_Item, int]] = []
    end = 0
    for item in items:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        if members and begin + item.nbytes > sizes.OFFLOAD_BYTES:
            yield members, end
            members, begin = [], 0
        members.append((item, begin))
        end = begin + item.nbytes
    if members:
        yield members, end


class _HostBuffers:
    """A pool of host buffers. Pinned buffers are kept for the next offload, because they are expensive to allocate."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[torch.Tensor, Any]]] = defaultdict(list)

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least ``nbytes`` bytes."""
        pinned = current_device().type != "cpu"
        size = 1 << (nbytes - 1).bit_length() if pinned else nbytes  # torch rounds pinned memory up to powers of two
        if self._free[size]:
            buffer, copied = self._free[size].pop()
            _wait_for(copied)
            return buffer
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def release(self, buffer: torch.Tensor, copied: Any = None) -> None:
        """Return a buffer to the pool if it is pinned; its next user waits for the event ``copied``, if given."""
        if current_device().type != "cpu":
            self._free[buffer.numel()].append((buffer, copied))

    def clear(self) -> None:
        """Free all buffers in the pool."""
        for waiting in self._free.values():
            for _, copied in waiting:
                _wait_for(copied)
        self._free.clear()
        if current_device().type != "cpu":
            free_pinned_memory()


def _wait_for(copied: Any) -> None:
    """Wait for an event, unless it has completed, or there is none."""
    if copied is not None and not copied.query():
        copied.synchronize()


_host_buffers = _HostBuffers()


class CopyQueue:
    """Copy tensors between host and device, on a separate stream if there is an accelerator.

    At the end of the ``with`` block, the host waits for copies to host memory; otherwise only the current stream waits.
    """

    def __init__(self) -> None:
        device = current_device()
        self._stream = None if device.type == "cpu" else _copy_stream(device)
        self._to_host = False

    def __enter__(self) -> CopyQueue:
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())
        return self

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue the copy of one tensor."""
        self.copy_all([target], [source])

    @torch.no_grad()
    def copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Queue the copies of several tensors, without autograd."""
        if not targets:
            return
        if self._stream is None:
            torch._foreach_copy_(targets, sources)
            return
        self._to_host |= any(target.device.type == "cpu" for target in targets)
        with self._stream:
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def event(self) -> Any:
        """Return an event that completes with all copies queued so far; None if copies are synchronous."""
        return None if self._stream is None else self._stream.record_event()

    def __exit__(self, *_: object) -> None:
        if self._stream is None:
            return
        if self._to_host:
            self._stream.synchronize()  # the host will read these values
        else:
            torch.accelerator.current_stream().wait_stream(self._stream)


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
