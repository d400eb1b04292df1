"""Values for what no file holds: fresh modules and computed buffers, by the model's own init functions.

Input: a model whose tensors have memory, and which of them have no values. Output: the same tensors, filled.

[Note: fresh values] Init functions draw whole tensors and change them in place. They run on a twin of the model in
which a `_Slot` stands for each tensor without values. The first operation on a slot makes a full tensor on every rank,
under the same random state; when the init function returns, each rank keeps its rows and the full tensor goes. So the
values are those of the unsharded model at every world size, and what no init function writes is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map

from fsdp2_strategy.hf.folder import is_transformers_model, origin_of
from fsdp2_strategy.hf.twin import twin
from fsdp2_strategy.ranks import from_rank_0

_INIT_FUNCTIONS = ("reset_parameters", "_reset_parameters")


@torch.no_grad()
def initialize(model: nn.Module, without_values: Mapping[int, str], device: torch.device) -> list[str]:
    """Give values to tensors by the init functions of the modules that own them; collective where they are sharded.

    A transformers model initialises all of its modules, any other module itself by ``reset_parameters``, inner ones
    first; a module put into a transformers model after ``from_pretrained`` counts as other.

    Args:
        model: its tensors have memory on ``device``.
        without_values: the tensors to fill: names by identity.
        device: where values are drawn.

    Returns:
        The names of those that no init function writes.
    """
    slots = _Slots(device)

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in without_values:
            return slots.add(tensor)
        known = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return nn.Parameter(known, requires_grad=False) if isinstance(tensor, nn.Parameter) else known

    copy = twin(model, stand_in)
    for tensor in (*copy.parameters(), *copy.buffers()):
        if not isinstance(tensor, _Slot):
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    with _same_draws(device):
        _initialize_added(model, copy, slots, inside=False)
        _initialize_tree(copy, slots)
    _take_over_assigned(model, copy, slots)
    return [without_values[id(slot.original)] for slot in slots.all if not slot.written]


def _initialize_added(original: nn.Module, copy: nn.Module, slots: _Slots, *, inside: bool) -> None:
    """Initialise the modules that were put into a model after from_pretrained."""
    known = origin_of(original) is not None
    for name, child in original.named_children():
        _initialize_added(child, copy._modules[name], slots, inside=inside or known)  # type: ignore[arg-type]
    if inside and not known:
        _reset(copy, slots)


def _initialize_tree(module: nn.Module, slots: _Slots) -> None:
    if is_transformers_model(module):
        for part in module.modules():
            if is_transformers_model(part):
                part._initialize_weights = _keeping(part._initialize_weights, slots)  # type: ignore[assignment,arg-type]
        module.initialize_weights()  # type: ignore[operator]
        return
    for child in module.children():
        _initialize_tree(child, slots)
    _reset(module, slots)


def _keeping(function: Callable[..., None], slots: _Slots) -> Callable[..., None]:
    def initialize_and_keep(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        slots.keep()

    return initialize_and_keep


def _reset(module: nn.Module, slots: _Slots) -> None:
    """Run a module's own init function, if it has one and anything in it is to be initialised."""
    reset = next((getattr(module, name) for name in _INIT_FUNCTIONS if callable(getattr(module, name, None))), None)
    tensors = [*module.parameters(), *module.buffers()]
    if reset is not None and any(isinstance(tensor, _Slot) for tensor in tensors):
        reset()
        slots.keep()
        for tensor in tensors:
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def _take_over_assigned(original: nn.Module, copy: nn.Module, slots: _Slots) -> None:
    """Copy the buffers that an init function replaced instead of changing."""
    by_original = {id(slot.original): slot for slot in slots.all}
    for name, module in original.named_modules():
        for key, buffer in module._buffers.items():
            slot, new = by_original.get(id(buffer)), copy.get_submodule(name)._buffers.get(key)
            if slot is None or slot.written or buffer is None or new is None or new is slot:
                continue
            if not new.is_meta and new.shape == buffer.shape:
                buffer.copy_(new)
                slot.written = True


@contextmanager
def _same_draws(device: torch.device) -> Iterator[None]:
    """Draw on every rank what rank 0 draws; a rank whose generators stood elsewhere gets them back."""

    def state() -> list[bytes]:
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return [bytes(s.numpy()) for s in states]

    def restore(states: list[bytes]) -> None:
        tensors = [torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in states]
        torch.set_rng_state(tensors[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(tensors[1], device)

    own = state()
    shared = from_rank_0(own)
    restore(shared)
    try:
        yield
    finally:
        if own != shared:
            restore(own)


class _Slots:
    """All slots of a twin, and those that have full tensors now."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.all: list[_Slot] = []
        self.open: dict[int, tuple[_Slot, torch.Tensor]] = {}

    def add(self, original: torch.Tensor) -> _Slot:
        slot = _Slot(original, self)
        self.all.append(slot)
        return slot

    def full(self, slot: _Slot) -> torch.Tensor:
        """Return the full tensor of a slot, with the values that it has so far."""
        if id(slot) not in self.open:
            if slot.written:
                full = _gathered(slot.original, self.device)
            else:
                # What is left of the filling was not initialised.
                filling = float("nan") if slot.dtype.is_floating_point else 0
                full = torch.full(slot.shape, filling, dtype=slot.dtype, device=self.device)
            self.open[id(slot)] = (slot, full)
        return self.open[id(slot)][1]

    def keep(self) -> None:
        """Let each rank keep its part of what was written, and drop the rest."""
        for slot, full in self.open.values():
            if not slot.changed or full.isnan().any():
                continue
            _local(slot.original).copy_(_own_part(full, slot.original))
            slot.written = True
        self.open.clear()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _own_part(full: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Return the view of a full tensor that this rank's shard is."""
    if isinstance(original, DTensor):
        shape, offset = compute_local_shape_and_global_offset(original.shape, original.device_mesh, original.placements)
        for dim, (begin, length) in enumerate(zip(offset, shape, strict=True)):
            full = full.narrow(dim, min(begin, full.shape[dim]), length)
    return full


def _gathered(original: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the full tensor; `full_tensor` itself does not run below a dispatch of ours on torch 2.11."""
    full = torch.zeros(original.shape, dtype=original.dtype, device=device)
    _own_part(full, original).copy_(_local(original))
    if isinstance(original, DTensor):
        # Bytes of which all but one are zero add up without rounding.
        dist.all_reduce(full.reshape(-1).view(torch.uint8), group=original.device_mesh.get_group(-1))
    return full


class _Slot(torch.Tensor):
    """Stands for a tensor without values; see [Note: fresh values]."""

    original: torch.Tensor
    slots: _Slots
    changed: bool
    """Whether an operation wrote to it, or returned a view of it that others may write to."""
    written: bool
    """Whether all of it has values."""
    _is_param: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, original: torch.Tensor, slots: _Slots) -> _Slot:
        slot: _Slot = torch.Tensor._make_wrapper_subclass(
            cls, original.shape, dtype=original.dtype, device=slots.device, requires_grad=False
        )
        slot.original, slot.slots, slot.changed, slot.written = original, slots, False, False
        slot._is_param = isinstance(original, nn.Parameter)
        return slot

    def __init__(self, original: torch.Tensor, slots: _Slots) -> None:
        """Leave all to ``__new__``."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"_Slot({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        slot_of: dict[int, _Slot] = {}
        changes = any(argument.alias_info is not None for argument in function._schema.arguments)

        def full(value: Any) -> Any:
            if not isinstance(value, _Slot):
                return value
            tensor = value.slots.full(value)
            slot_of[id(tensor)] = value
            value.changed |= changes
            return tensor

        result = function(*tree_map(full, args), **tree_map(full, kwargs or {}))
        return tree_map(lambda value: slot_of.get(id(value), value), result)
