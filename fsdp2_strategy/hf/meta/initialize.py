"""Initialise new modules and computed buffers that no file contains, as their constructors and init functions would.

Input: a model whose tensors have memory, and a list of those without values. Output: the same tensors, filled.

A tensor's values come from the first of these that applies: the recorded operations, if some of them changed it after
transformers had initialised it; ``_init_weights`` of a transformers model; the recorded operations of the constructor;
``reset_parameters`` of the module, if no operations were recorded.

[Note: lazy initialisation] Init functions draw full tensors and change them in place. They run on a skeleton of the
model in which a `_Slot`, a lazily initialised tensor, replaces each tensor without values. The first operation on a
`_Slot` allocates a full tensor on every rank, and all ranks draw from the same random state. When the init function
returns, each rank keeps its rows and frees the full tensor. So the values are those of the unsharded model at every
world size, and tensors that no init function writes are detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.agreement import all_or_none, from_rank_0
from fsdp2_strategy.distributed.torch_internals import schema_of, tree_map, without_torch_function, wrapper_subclass
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.library_internals import mark_initialized, replace_initialization
from fsdp2_strategy.hf.meta.recorded_init import Note, Tape, note_of, seen_as, storage_of
from fsdp2_strategy.hf.skeleton import twin
from fsdp2_strategy.hf.transformers_models import is_transformers_model
from fsdp2_strategy.model.shards import local_box

_INIT_FUNCTIONS = ("reset_parameters", "_reset_parameters")


@dataclass(frozen=True, eq=False)
class Empty:
    """A tensor without values: its name, and every module and key under which it is registered."""

    name: str
    tensor: torch.Tensor
    places: Sequence[tuple[nn.Module, str]]
    dtype: torch.dtype | None
    """The requested dtype, in which transformers draws the values; the tensor's may be wider (master weights)."""

    @property
    def note(self) -> Note | None:
        """The record of how it was made, if there is one."""
        return next((note for module, key in self.places if (note := note_of(module, key))), None)


@torch.no_grad()
def initialize(model: nn.Module, empty: Sequence[Empty], device: torch.device) -> list[str]:
    """Initialise tensors as the code that built their modules would have; collective.

    Args:
        model: the model, whose tensors have memory.
        empty: the tensors to fill.
        device: the device on which values are drawn.

    Returns:
        The names of the tensors that nothing initialises.
    """
    slots = _Slots(device)
    with _same_draws(device):
        _by_transformers(model, [e for e in empty if e.note is None or not e.note.was_changed_later], slots)
        waiting = [e for e in empty if not slots.of(e.tensor).written]
        filled = _by_constructors([e for e in waiting if e.note is not None], device)
        waiting = [e for e in waiting if id(e.tensor) not in filled]
        slots = _Slots(device)
        _by_reset(model, [e for e in waiting if e.note is None], slots)
    return [e.name for e in waiting if e.note is not None or not slots.of(e.tensor).written]


def recorded_for(empty: Sequence[Empty]) -> list[str]:
    """Return digests of the operations that were recorded for tensors without values, to compare across ranks."""
    wanted: dict[Tape, set[int]] = {}
    for e in empty:
        if e.note is not None:
            wanted.setdefault(e.note.tape, set()).add(storage_of(e.note.meta))
    return [tape.digest(storages) for tape, storages in wanted.items()]


def _slotted(model: nn.Module, empty: Sequence[Empty], slots: _Slots) -> nn.Module:
    """Return a skeleton with a `_Slot` for each empty tensor; all other tensors are marked as initialised."""
    drawn_in = {id(e.tensor): e.dtype for e in empty}

    def known(tensor: torch.Tensor) -> torch.Tensor:
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        new = nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
        mark_initialized(new)
        return new

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        return slots.of(tensor, drawn_in[id(tensor)]) if id(tensor) in drawn_in else known(tensor)

    copy = twin(model, stand_in)
    seen: set[int] = set()
    for module in copy.modules():
        both: tuple[Any, Any] = (module._parameters, module._buffers)
        for tensors in both:
            for name, tensor in tensors.items():
                if isinstance(tensor, _Slot) and id(tensor) in seen:
                    # Tied: transformers initialises each occurrence, and then ties all to the first.
                    tensors[name] = _Slot(tensor.original, slots, tensor.dtype, is_kept=False)
                seen.add(id(tensor))
    return copy


def _by_transformers(model: nn.Module, empty: Sequence[Empty], slots: _Slots) -> None:
    """Run the init functions of each transformers model within the model on its empty tensors.

    The caller leaves out tensors that were added or changed after transformers had initialised the model.
    """
    copy = _slotted(model, empty, slots)
    inner: set[int] = set()
    for part in copy.modules():
        if is_transformers_model(part):
            replace_initialization(part, lambda function: _keeping(function, slots))
    for part in copy.modules():
        if is_transformers_model(part) and id(part) not in inner:
            inner |= {id(module) for module in part.modules()}
            part.initialize_weights()  # type: ignore[operator]
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            new = copy.get_submodule(name)._buffers.get(key)
            slot = slots.all.get(id(buffer))
            if slot is not None and new is not None and not isinstance(new, _Slot) and not new.is_meta:
                slot.fill(new)  # an init function replaced the buffer


def _keeping(function: Callable[..., None], slots: _Slots) -> Callable[..., None]:
    def initialize_and_keep(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        slots.keep()

    return initialize_and_keep


def _by_constructors(empty: Sequence[Empty], device: torch.device) -> set[int]:
    """Replay the operations that were recorded for some tensors; return the identities of those that got values."""
    filled: set[int] = set()
    by_tape: dict[Tape, dict[int, list[tuple[Empty, Note]]]] = {}
    for e in empty:
        if e.note is not None:
            by_tape.setdefault(e.note.tape, {}).setdefault(storage_of(e.note.meta), []).append((e, e.note))

    def taker(wanting: list[tuple[Empty, Note]]) -> Callable[[torch.Tensor], None]:
        def take(memory: torch.Tensor) -> None:
            for e, note in wanting:
                _local(e.tensor).copy_(_own_part(seen_as(note.meta, memory), e.tensor))
                filled.add(id(e.tensor))

        return take

    for tape, wanted in by_tape.items():
        tape.replay({storage: taker(wanting) for storage, wanting in wanted.items()}, device)
    return filled


def _by_reset(model: nn.Module, empty: Sequence[Empty], slots: _Slots) -> None:
    """Run ``reset_parameters`` of the modules that have empty tensors, innermost first."""
    if not empty:
        return
    for module in _inner_first(_slotted(model, empty, slots)):
        reset = next((getattr(module, name) for name in _INIT_FUNCTIONS if hasattr(module, name)), None)
        if callable(reset) and any(isinstance(tensor, _Slot) for tensor in (*module.parameters(), *module.buffers())):
            reset()
            slots.keep()


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _inner_first(child)
    yield module


@contextmanager
def _same_draws(device: torch.device) -> Iterator[None]:
    """Use rank 0's random state on every rank; ranks whose own state differed get it back at the end."""

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
    """All `_Slot` tensors of a skeleton; ``open`` contains those that currently have a full tensor."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.all: dict[int, _Slot] = {}
        self.open: dict[int, tuple[_Slot, torch.Tensor]] = {}

    def of(self, original: torch.Tensor, dtype: torch.dtype | None = None) -> _Slot:
        """Return the slot that replaces a tensor; create it at the first call."""
        if id(original) not in self.all:
            self.all[id(original)] = _Slot(original, self, dtype or original.dtype)
        return self.all[id(original)]

    def full(self, slot: _Slot) -> torch.Tensor:
        """Return the full tensor of a slot, with its current values."""
        if id(slot) not in self.open:
            if slot.written:
                with all_or_none("initialise", CheckpointError):
                    """Gather only if no rank has failed before."""
                full = _gathered(slot.original, self.device).to(slot.dtype)
            else:
                full = torch.full(slot.shape, _filling(slot.dtype), dtype=slot.dtype, device=self.device)
            self.open[id(slot)] = (slot, full)
        return self.open[id(slot)][1]

    def keep(self) -> None:
        """Store this rank's shard of each tensor that was written in full, and free the full tensors."""
        for slot, full in self.open.values():
            only_seen = not slot.changed and bool((full == _filling(slot.dtype)).all())
            if not (only_seen or full.isnan().any()):
                slot.fill(full)
        self.open.clear()


def _filling(dtype: torch.dtype) -> float:
    """Return the value that marks elements of a full tensor as not initialised."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype in (torch.bool, torch.uint8) else torch.iinfo(dtype).min


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _own_part(full: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Return the view of a full tensor that corresponds to this rank's shard."""
    for dim, (begin, length) in enumerate(local_box(original)):
        full = full.narrow(dim, begin, length)
    return full


def _gathered(original: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the full tensor; ``full_tensor`` does not work inside our ``__torch_dispatch__`` on torch 2.11."""
    full = torch.zeros(original.shape, dtype=original.dtype, device=device)
    _own_part(full, original).copy_(_local(original))
    if isinstance(original, DTensor):
        # Each byte is zero on all ranks but one, so the sum is exact.
        dist.all_reduce(full.reshape(-1).view(torch.uint8), group=original.device_mesh.get_group(-1))
    return full


class _Slot(torch.Tensor):
    """A lazily initialised tensor that replaces one without values; see [Note: lazy initialisation]."""

    original: torch.Tensor
    slots: _Slots
    changed: bool
    """Whether an operation wrote to it directly; writes to views of it are not noted here."""
    written: bool
    """Whether all its elements have values."""
    is_kept: bool
    """Whether its values are stored in the original tensor; otherwise they are drawn and dropped."""
    _is_param: bool

    __torch_function__ = without_torch_function

    @staticmethod
    def __new__(cls, original: torch.Tensor, slots: _Slots, dtype: torch.dtype, *, is_kept: bool = True) -> _Slot:
        slot: _Slot = wrapper_subclass(cls, original.shape, dtype, slots.device)
        slot.original, slot.slots, slot.changed, slot.written = original, slots, False, False
        slot._is_param, slot.is_kept = isinstance(original, nn.Parameter), is_kept
        return slot

    def __init__(self, original: torch.Tensor, slots: _Slots, dtype: torch.dtype, *, is_kept: bool = True) -> None:
        """Do nothing: ``__new__`` sets all attributes."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"_Slot({list(self.shape)}, {self.dtype})"

    def fill(self, value: torch.Tensor) -> None:
        """Store this rank's shard of a full value."""
        if self.is_kept:
            _local(self.original).copy_(_own_part(value, self.original))
        self.written = self.is_kept

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        slot_of: dict[int, _Slot] = {}
        kwargs = kwargs or {}

        def full(value: Any) -> Any:
            if not isinstance(value, _Slot):
                return value
            tensor = value.slots.full(value)
            slot_of[id(tensor)] = value
            return tensor

        for i, argument in enumerate(schema_of(function).arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if isinstance(value, _Slot) and argument.alias_info is not None and argument.alias_info.is_write:
                value.changed = True
        result = function(*tree_map(full, args), **tree_map(full, kwargs))
        return tree_map(lambda value: slot_of.get(id(value), value), result)
