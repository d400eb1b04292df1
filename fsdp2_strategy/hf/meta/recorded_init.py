"""What constructors would have computed: recorded on meta, carried out later for what no file holds.

Input: the tensor operations of a ``with`` block in which modules are built on the meta device. Output: for each
parameter and buffer of those modules the operations that make its values, which `initialize` replays.

[Note: the tape] Code that builds a model sets values as it goes: ``reset_parameters``, but also
``self.head.weight.data.normal_(std=0.01)``, ``nn.Parameter(torch.ones(4))`` or ``register_buffer("mask", ...)``. On
meta all of it runs without effect. The tape notes each operation that makes or changes a meta tensor. Tensors are told
apart by their storage, so that views, ``.data`` and a parameter around a tensor mean the same memory. A replay carries
out what the wanted tensors need, in the order of the recording, once, and hands each tensor on (and drops it) after the
last operation that touches it. A tensor of whose operations only some can be carried out is not handed on at all: one
of them reads what only files hold, or what was built elsewhere.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp2_strategy.distributed.torch_internals import (
    INIT_WITHOUT_OPERATIONS,
    TorchDispatchMode,
    negated_view,
    past_modes,
    remember_device_constructors,
    schema_of,
    storage_address,
    tree_flatten,
    tree_map,
)
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.model.state import Slot, carried, carry, put_down

_NOTES = Slot[dict[str, "Note"]]("how its tensors were made")
"""Of a module, by tensor; carried, so that copies have them, too."""
_manual_seed, _get_rng_state, _set_rng_state = torch.manual_seed, torch.get_rng_state, torch.set_rng_state
_COPIES = {"aten::_to_copy", "aten::clone"}
_WITHOUT_VALUES = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}


@dataclass(eq=False)
class _Operation:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: tuple[torch.Tensor, ...]
    """Meta tensors that it returned in memory of their own."""
    changes: frozenset[int]
    """Storages that it wrote to, those that it made among them."""
    reads: frozenset[int]
    """Storages of its arguments."""
    seeds: bool = False
    """Whether it changes the random state, for all that follows."""

    def __post_init__(self) -> None:
        self.default_dtype = torch.get_default_dtype()
        self.random_state: torch.Tensor | None = None
        """The random state in which it was carried out, where it drew: tensors copied from what it made draw alike."""

    @property
    def name(self) -> str:
        """What it is."""
        schema = schema_of(self.function)
        return str(schema.name if schema else getattr(self.function, "__name__", self.function))


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record operations on meta tensors; see [Note: the tape]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.last_change: dict[int, int] = {}
        """For each storage the position after the last operation that wrote to it."""
        self.settled: dict[int, int] = {}
        """For each storage the position when transformers was done with it."""
        self.in_files: set[int] = set()
        """Storages whose values files hold."""
        self._replayed: MutableMapping[torch.Tensor, list[torch.Tensor]] = WeakTensorKeyDictionary()
        """For each random state that was asked for, the one that a replay had there."""
        self.is_paused = False
        self.thread = threading.get_ident()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let what is built inside pass by the tape, and by the block's device."""
        self.is_paused = True
        try:
            with past_modes():
                yield
        finally:
            self.is_paused = False

    def __deepcopy__(self, _memo: object) -> Self:
        return self  # a copied module was made by the same operations

    def recorded(self, init: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return an init function that is recorded as a whole where it would do nothing, on meta."""

        def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not tensor.is_meta:
                return init(tensor, *args, **kwargs)
            storage = frozenset({storage_of(tensor)})
            self._add(_Operation(init, (tensor.detach(), *args), kwargs, (), storage, storage))
            return tensor

        return record

    def manual_seed(self, seed: int) -> torch.Generator:
        """Stand in for ``torch.manual_seed``."""
        self._seed(_manual_seed, seed)
        return _manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """Stand in for ``torch.get_rng_state``: the state that a replay has reached may be wanted again."""
        state = _get_rng_state()
        replayed: list[torch.Tensor] = []
        self._replayed[state] = replayed
        self._seed(lambda: replayed.append(_get_rng_state()))
        return state

    def set_rng_state(self, new_state: torch.Tensor) -> None:
        """Stand in for ``torch.set_rng_state``."""
        replayed = self._replayed.get(new_state)
        self._seed(lambda: _set_rng_state(replayed.pop() if replayed else new_state))
        _set_rng_state(new_state)

    def _seed(self, function: Callable[..., Any], *args: Any) -> None:
        self._add(_Operation(function, args, {}, (), frozenset(), frozenset(), seeds=True))

    def _add(self, operation: _Operation) -> None:
        self.operations.append(operation)
        self.last_change |= dict.fromkeys(operation.changes, len(self.operations))

    def settle(self, model: nn.Module, *, in_files: bool = False) -> None:
        """Note that transformers is done with a model's tensors: what changes them from here on is somebody's wish.

        Args:
            model: on meta.
            in_files: its parameters and persistent buffers have their values in files.
        """
        tensors = (*model.parameters(), *model.buffers())
        self.settled |= {storage_of(tensor): len(self.operations) for tensor in tensors if tensor.is_meta}
        if in_files:
            self.in_files |= {storage_of(t) for t in model.state_dict(keep_vars=True).values() if t.is_meta}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {storage_of(tensor) for tensor in _meta_tensors((args, tuple(kwargs.values())))}
        written = {storage_of(tensor) for tensor in _written(function, args, kwargs)}
        for tape in _tapes:
            if tape is not self and not written.isdisjoint(tape.last_change):
                raise CheckpointError(
                    f"cannot build on meta: {function} changes a tensor of a module that was built in an earlier "
                    "init_on_meta block, which would be lost. Build both in one block."
                )
        kept_args, kept_kwargs = tree_map(_kept, (tuple(args), kwargs))
        result = function(*args, **kwargs)
        made = tuple(tensor for tensor in _meta_tensors(result) if storage_of(tensor) not in known)
        changes = frozenset(written.union(map(storage_of, made)))
        if changes:
            # Aliases: what a parameter's ``.data`` is replaced by later is other memory.
            aliases = tuple(tensor.detach() for tensor in made)
            operation = _Operation(function, kept_args, kept_kwargs, aliases, changes, frozenset(known))
            self._add(operation)
            if operation.name in _COPIES and known and all(self.is_settled(storage) for storage in known):
                self.settled |= dict.fromkeys(changes, len(self.operations))
        return result

    def is_settled(self, storage: int) -> bool:
        """Whether nothing changed it after transformers was done with it."""
        return self.last_change.get(storage, 0) <= self.settled.get(storage, -1)

    @torch.no_grad()
    def replay(self, wanted: Mapping[int, Callable[[torch.Tensor], None]], device: torch.device) -> None:
        """Carry out what the wanted storages need; those that need what is not on the tape are left out.

        Args:
            wanted: for each storage what takes its memory, as a flat tensor of bytes.
            device: where values are computed.
        """
        operations, lost = self._needed_for(set(wanted))
        last = {storage: i for i, op in enumerate(operations) for storage in op.changes | op.reads}
        memory: dict[int, torch.Tensor] = {}

        def real(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_meta:
                return seen_as(value, memory[storage_of(value)])
            return device if isinstance(value, torch.device) and value.type == "meta" else value

        for i, operation in enumerate(operations):
            args, kwargs = tree_map(real, operation.args), tree_map(real, operation.kwargs)
            with _as_recorded(operation, device):
                result = operation.function(*args, **kwargs)
            outputs = [tensor for tensor in tree_flatten(result)[0] if isinstance(tensor, torch.Tensor)]
            for meta in operation.makes:
                value = next((o for o in outputs if o.shape == meta.shape and o.dtype == meta.dtype), None)
                if value is None:
                    raise CheckpointError(
                        f"cannot repeat what a constructor did: {operation.name} gave no tensor of {list(meta.shape)} "
                        f"and {meta.dtype} this time, which it did on meta. Build that module outside of init_on_meta."
                    )
                outputs = [o for o in outputs if o is not value]
                memory[storage_of(meta)] = _as_bytes(value, meta)
            for storage in operation.changes | operation.reads:
                if last[storage] == i:
                    bytes_ = memory.pop(storage, None)
                    if storage in wanted and bytes_ is not None and storage not in lost:
                        wanted[storage](bytes_)

    def _needed_for(self, wanted: set[int]) -> tuple[list[_Operation], set[int]]:
        """Return the operations that wanted storages need and that can be carried out, in order.

        And the storages of which not all operations can be, or none gives them values.
        """
        needed, operations = set(wanted), []
        for operation in reversed(self.operations):
            if operation.changes & needed or operation.seeds:
                needed |= operation.reads
                operations.append(operation)
        possible: list[_Operation] = []
        made: set[int] = set()
        lost = self.in_files - wanted
        with_values: set[int] = set()
        for operation in reversed(operations):
            if operation.reads <= made and lost.isdisjoint(operation.reads):
                made |= operation.changes
                possible.append(operation)
                if operation.name not in _WITHOUT_VALUES:
                    with_values |= operation.changes
            else:
                lost |= operation.changes
        return possible, lost | (made - with_values)

    def makes(self, tensor: torch.Tensor) -> bool:
        """Say whether a replay gives values to a meta tensor."""
        wanted = storage_of(tensor)
        return wanted in self.last_change and wanted not in self._needed_for({wanted})[1]

    def digest(self, wanted: set[int]) -> str:
        """Return what tells apart what ranks have recorded for some storages, constants included."""
        numbers: dict[int, int] = {}

        def told(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return repr(value)
            if value.is_meta:
                storage = numbers.setdefault(storage_of(value), len(numbers))
                return (storage, value.dtype, tuple(value.shape), value.stride(), value.storage_offset())
            return (value.dtype, tuple(value.shape), value.flatten().tolist())

        sums = hashlib.sha256()
        for operation in self._needed_for(wanted)[0]:
            facts = (operation.name, tree_map(told, operation.args), tree_map(told, operation.kwargs))
            sums.update(repr(("seed",) if operation.seeds else facts).encode())
        return sums.hexdigest()


@contextmanager
def _as_recorded(operation: _Operation, device: torch.device) -> Iterator[None]:
    """Carry an operation out under the default dtype of its time, and draw as it drew before, if it did."""
    default, before = torch.get_default_dtype(), _random_state(device)
    torch.set_default_dtype(operation.default_dtype)
    if operation.random_state is not None and not operation.seeds:
        _set_random_state(device, operation.random_state)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        if operation.random_state is not None and not operation.seeds:
            _set_random_state(device, before)
        elif not torch.equal(before, _random_state(device)):
            operation.random_state = before


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class _Constants(TorchFunctionMode):
    """Make tensors from numbers where their values are kept, and then bring them to meta before the tape's eyes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        from_numbers = function in (torch.tensor, torch.as_tensor, torch.asarray) and not _hold_tensors(args)
        if function is torch.Tensor.new_tensor and args[0].is_meta and not _hold_tensors(args[1:]):
            kwargs = {"dtype": args[0].dtype} | kwargs
            function, args, from_numbers = torch.tensor, args[1:], True
        if not from_numbers or torch.device(kwargs.get("device") or "meta").type != "meta":
            return function(*args, **kwargs)
        grad = kwargs.pop("requires_grad", False)
        return function(*args, **{**kwargs, "device": "cpu"}).to("meta").requires_grad_(grad)


def _hold_tensors(values: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in tree_flatten(values)[0])


def _as_bytes(value: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """Return memory laid out as the meta tensor's, with the value in it."""
    size = meta.untyped_storage().nbytes()
    if value.is_contiguous() and meta.is_contiguous() and value.nbytes == size:
        return value.reshape(-1).view(torch.uint8)
    memory = torch.empty(size, dtype=torch.uint8, device=value.device)
    if size:
        memory.view(meta.dtype).as_strided(meta.shape, meta.stride(), meta.storage_offset()).copy_(value)
    return memory


def _kept(value: Any) -> Any:
    """Return an argument as it is now: a constructor may change its constants later."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach() if value.is_meta else value.detach().clone()


def seen_as(meta: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return what a meta tensor is of its storage's bytes."""
    view = memory.view(meta.dtype).as_strided(meta.shape, meta.stride(), meta.storage_offset())
    view = view.conj() if meta.is_conj() else view
    return negated_view(view) if meta.is_neg() else view


def storage_of(tensor: torch.Tensor) -> int:
    """Return what identifies a tensor's memory."""
    return storage_address(tensor)


def _meta_tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        if values.is_meta:
            yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _meta_tensors(value)


def _written(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for i, argument in enumerate(schema_of(function).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _meta_tensors(args[i] if i < len(args) else kwargs.get(argument.name))


@dataclass(frozen=True, eq=False)
class Note:
    """Say where a tensor of a module lay when its values were recorded."""

    tape: Tape
    meta: torch.Tensor
    """As it was on leaving the block; it keeps the storage alive."""

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    @property
    def was_changed_later(self) -> bool:
        """Whether anything changed it after transformers was done with it."""
        storage = storage_of(self.meta)
        return storage in self.tape.last_change and not self.tape.is_settled(storage)


_tapes: WeakSet[Tape] = WeakSet()
_recording = threading.Lock()
_active: list[Tape] = []


@contextmanager
def recording() -> Iterator[Tape]:
    """Build on meta inside, record what is done to tensors there, and leave a note on each module that is built.

    Raises:
        CheckpointError: another thread is in such a block; torch's functions can stand aside for one only.
    """
    if not _recording.acquire(blocking=False):
        raise CheckpointError(
            "cannot build on meta: another thread is in an init_on_meta block, expected one at a time. Build in turns."
        )
    tape = Tape()
    _active.append(tape)
    built: WeakSet[nn.Module] = WeakSet()

    def built_here(function: Callable[..., None]) -> Callable[..., None]:
        def build(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            function(self, *args, **kwargs)
            if not tape.is_paused:
                built.add(self)

        return build

    try:
        remember_device_constructors()  # cached at first use, which must not see transformers' stand-ins
        with ExitStack() as stack:
            for target, name, value in _stand_ins(tape):
                stack.enter_context(patch.object(target, name, value))
            for name in ("__init__", "__setstate__"):
                stack.enter_context(patch.object(nn.Module, name, built_here(getattr(nn.Module, name))))
            for mode in (tape, torch.device("meta"), _Constants()):
                stack.enter_context(mode)
            yield tape
        _tapes.add(tape)
        for part in {part for module in built for part in module.modules()}:
            _leave_notes(part, tape)
    finally:
        _active.clear()
        _recording.release()


def is_recording() -> bool:
    """Say whether this thread is in such a block."""
    return any(tape.thread == threading.get_ident() for tape in _active)


def _stand_ins(tape: Tape) -> Iterator[tuple[Any, str, Any]]:
    """Return what stands in for functions that no mode sees: seeds, and init functions that do nothing on meta.

    Those may be known by their names in any module that imported them.
    """
    for function in (tape.manual_seed, tape.get_rng_state, tape.set_rng_state):
        yield torch, function.__name__, function
    for name in INIT_WITHOUT_OPERATIONS:
        init = getattr(nn.init, name)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is init:
                yield module, name, tape.recorded(init)  # type: ignore[arg-type]


def _leave_notes(module: nn.Module, tape: Tape) -> None:
    """Note how a module's tensors were made; one that was copied from an earlier block keeps what it knows."""
    earlier = carried(module, _NOTES) or {}
    notes = {}
    for name, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is not None and tensor.is_meta:
            note = Note(tape, tensor.detach())
            old = earlier.get(name)
            notes[name] = old if old is not None and old.tape is not tape and not tape.makes(note.meta) else note
    if notes:
        carry(module, _NOTES, notes)


def forget(model: nn.Module) -> None:
    """Drop the notes of all modules, and with the last of them the tape."""
    for module in model.modules():
        put_down(module, _NOTES)


def note_of(module: nn.Module, name: str) -> Note | None:
    """Return how a tensor of a module was made; None where nobody recorded it."""
    return (carried(module, _NOTES) or {}).get(name)
