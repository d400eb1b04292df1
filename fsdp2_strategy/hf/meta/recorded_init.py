"""Record the operations of constructors on meta tensors, and replay them for tensors that no file contains.

Input: the tensor operations of a ``with`` block in which modules are built on the meta device. Output: for each
parameter and buffer of those modules, the operations that compute its values, which `initialize` replays.

[Note: recorded initialisation] Code that builds a model also sets values: in ``reset_parameters``, but also with
``self.head.weight.data.normal_(std=0.01)``, ``nn.Parameter(torch.ones(4))`` or ``register_buffer("mask", ...)``. On
meta, these have no effect. A `Tape` records each operation that creates or changes a meta tensor. Tensors are
identified by their storage, so that views, ``.data`` and a parameter made from a tensor count as the same memory. A
replay runs the operations that the requested tensors depend on, each once, in the recorded order. After the last
operation on a tensor, its values are passed to the caller and its memory is freed. If an operation reads a tensor whose
values are in files, or that was built outside the block, it cannot run; the tensors that it changes get no values.
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
"""The notes of a module, by tensor name; stored with `carry`, so that copies of the module have them too."""
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
    """Meta tensors that it returned in new storages."""
    changes: frozenset[int]
    """Storages that it wrote to or created."""
    reads: frozenset[int]
    """Storages of its arguments."""
    seeds: bool = False
    """Whether it sets the random state for the operations after it."""

    def __post_init__(self) -> None:
        self.default_dtype = torch.get_default_dtype()
        self.random_state: torch.Tensor | None = None
        """The random state at its first replay, if it drew numbers; replays for copied modules start from it too."""

    @property
    def name(self) -> str:
        """Name of the operator or function."""
        schema = schema_of(self.function)
        return str(schema.name if schema else getattr(self.function, "__name__", self.function))


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record operations on meta tensors; see [Note: recorded initialisation]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.last_change: dict[int, int] = {}
        """For each storage, the number of operations up to the last one that wrote to it."""
        self.settled: dict[int, int] = {}
        """For each storage, the number of operations when transformers had initialised it, or when it was copied."""
        self.in_files: set[int] = set()
        """Storages whose values are in files."""
        self._replayed: MutableMapping[torch.Tensor, list[torch.Tensor]] = WeakTensorKeyDictionary()
        """For each result of `get_rng_state`, the random state of the replay at that operation."""
        self.is_paused = False
        self.thread = threading.get_ident()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disable recording and the default device within the block."""
        self.is_paused = True
        try:
            with past_modes():
                yield
        finally:
            self.is_paused = False

    def __deepcopy__(self, _memo: object) -> Self:
        return self  # a copied module was made by the same operations

    def recorded(self, init: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return an init function that records its call for meta tensors, on which the original has no effect."""

        def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not tensor.is_meta:
                return init(tensor, *args, **kwargs)
            storage = frozenset({storage_of(tensor)})
            self._add(_Operation(init, (tensor.detach(), *args), kwargs, (), storage, storage))
            return tensor

        return record

    def manual_seed(self, seed: int) -> torch.Generator:
        """Replace ``torch.manual_seed``."""
        self._seed(_manual_seed, seed)
        return _manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """Replace ``torch.get_rng_state``: a replay saves its own state here, for a later `set_rng_state`."""
        state = _get_rng_state()
        replayed: list[torch.Tensor] = []
        self._replayed[state] = replayed
        self._seed(lambda: replayed.append(_get_rng_state()))
        return state

    def set_rng_state(self, new_state: torch.Tensor) -> None:
        """Replace ``torch.set_rng_state``."""
        replayed = self._replayed.get(new_state)
        self._seed(lambda: _set_rng_state(replayed.pop() if replayed else new_state))
        _set_rng_state(new_state)

    def _seed(self, function: Callable[..., Any], *args: Any) -> None:
        self._add(_Operation(function, args, {}, (), frozenset(), frozenset(), seeds=True))

    def _add(self, operation: _Operation) -> None:
        self.operations.append(operation)
        self.last_change |= dict.fromkeys(operation.changes, len(self.operations))

    def settle(self, model: nn.Module, *, in_files: bool = False) -> None:
        """Record that transformers has initialised a model, so that later changes of its tensors are recognised.

        Args:
            model: a model on meta.
            in_files: whether the values of its parameters and persistent buffers are in files.
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
            # Detached aliases keep this storage, even if ``.data`` of the parameter is assigned later.
            aliases = tuple(tensor.detach() for tensor in made)
            operation = _Operation(function, kept_args, kept_kwargs, aliases, changes, frozenset(known))
            self._add(operation)
            if operation.name in _COPIES and known and all(self.is_settled(storage) for storage in known):
                self.settled |= dict.fromkeys(changes, len(self.operations))
        return result

    def is_settled(self, storage: int) -> bool:
        """Return whether transformers has initialised a storage, and no operation changed it since."""
        return self.last_change.get(storage, 0) <= self.settled.get(storage, -1)

    @torch.no_grad()
    def replay(self, wanted: Mapping[int, Callable[[torch.Tensor], None]], device: torch.device) -> None:
        """Run the operations that storages depend on; skip storages whose values cannot be computed.

        Args:
            wanted: for each storage, a function that is called with its values as a flat tensor of bytes.
            device: the device on which values are computed.
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
        """Return the operations that can run and that the storages depend on, and the storages that get no values.

        A storage gets no values if one of its operations cannot run, or if all of them only allocate memory.
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
        """Return whether a replay computes the values of a meta tensor."""
        wanted = storage_of(tensor)
        return wanted in self.last_change and wanted not in self._needed_for({wanted})[1]

    def digest(self, wanted: set[int]) -> str:
        """Return a hash of the operations that storages depend on, constants included, to compare across ranks."""
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
    """Set the default dtype of the recording and, if the operation was replayed before, the same random state."""
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
    """Create tensors from Python numbers on the CPU, then copy them to meta; the recorded copy keeps the values."""

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
    """Return a value as the bytes of a storage with the strides and offset of the meta tensor."""
    size = meta.untyped_storage().nbytes()
    if value.is_contiguous() and meta.is_contiguous() and value.nbytes == size:
        return value.reshape(-1).view(torch.uint8)
    memory = torch.empty(size, dtype=torch.uint8, device=value.device)
    if size:
        memory.view(meta.dtype).as_strided(meta.shape, meta.stride(), meta.storage_offset()).copy_(value)
    return memory


def _kept(value: Any) -> Any:
    """Return a snapshot of an argument: a constructor may change its constants later."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach() if value.is_meta else value.detach().clone()


def seen_as(meta: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return the view of a storage's bytes that corresponds to a meta tensor."""
    view = memory.view(meta.dtype).as_strided(meta.shape, meta.stride(), meta.storage_offset())
    view = view.conj() if meta.is_conj() else view
    return negated_view(view) if meta.is_neg() else view


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identifier of a tensor's storage."""
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
    """The record of how one tensor of a module was made."""

    tape: Tape
    meta: torch.Tensor
    """The tensor at the end of the block; keeps the storage alive, which identifies it in the recording."""

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    @property
    def was_changed_later(self) -> bool:
        """Whether an operation changed the tensor after transformers had initialised it, or without that."""
        storage = storage_of(self.meta)
        return storage in self.tape.last_change and not self.tape.is_settled(storage)


_tapes: WeakSet[Tape] = WeakSet()
_recording = threading.Lock()
_active: list[Tape] = []


@contextmanager
def recording() -> Iterator[Tape]:
    """Build modules on meta inside this block, record operations on their tensors, and store notes on the modules.

    Raises:
        CheckpointError: another recording is active; functions of torch can be patched for only one at a time.
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
        remember_device_constructors()  # torch caches them at first use; the cache must not contain patched functions
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
    """Return whether this thread is in a `recording` block."""
    return any(tape.thread == threading.get_ident() for tape in _active)


def _stand_ins(tape: Tape) -> Iterator[tuple[Any, str, Any]]:
    """Return patches for functions that no mode intercepts: seeding, and init functions without effect on meta.

    Init functions are patched in all modules that imported them by name.
    """
    for function in (tape.manual_seed, tape.get_rng_state, tape.set_rng_state):
        yield torch, function.__name__, function
    for name in INIT_WITHOUT_OPERATIONS:
        init = getattr(nn.init, name)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is init:
                yield module, name, tape.recorded(init)  # type: ignore[arg-type]


def _leave_notes(module: nn.Module, tape: Tape) -> None:
    """Store a note for each meta tensor of a module; one whose values come from an earlier block keeps its note."""
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
    """Remove the notes of all modules of a model; a recording is freed with its last note."""
    for module in model.modules():
        put_down(module, _NOTES)


def note_of(module: nn.Module, name: str) -> Note | None:
    """Return the record of how a tensor of a module was made; None if it was not recorded."""
    return (carried(module, _NOTES) or {}).get(name)
