"""What constructors would have computed: recorded on meta, carried out later for what no file holds.

Input: the tensor operations of a ``with`` block in which modules are built on the meta device. Output: for each
parameter and buffer of those modules the operations that make its values, which `initialize` replays.

[Note: the tape] Code that builds a model sets values as it goes: ``reset_parameters``, but also
``self.head.weight.data.normal_(std=0.01)``, ``nn.Parameter(torch.ones(4))`` or ``register_buffer("mask", ...)``. On
meta all of it runs without effect. The tape notes each operation that makes or changes a meta tensor. Tensors are told
apart by their storage, so that views, ``.data`` and a parameter around a tensor mean the same memory. A replay carries
out what the wanted tensors need, in the order of the recording, once, and hands each tensor on (and drops it) after the
last operation that touches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

_NOTE = "_values_on_tape"
_NO_OPERATIONS_ON_META = ("_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_")


@dataclass(frozen=True, eq=False)
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


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record operations on meta tensors; see [Note: the tape]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.last_change: dict[int, int] = {}
        """For each storage the position after the last operation that wrote to it."""
        self.settled: dict[int, int] = {}
        """For each storage the position when transformers was done with it."""
        self.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let what is built inside pass by the tape, and by the block's device."""
        self.is_paused = True
        try:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
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
            self._add(_Operation(init, (tensor, *args), kwargs, (), storage, storage))
            return tensor

        return record

    def _add(self, operation: _Operation) -> None:
        self.operations.append(operation)
        self.last_change |= dict.fromkeys(operation.changes, len(self.operations))

    def settle(self, model: nn.Module) -> None:
        """Note that transformers is done with a model's tensors: what changes them from here on is somebody's wish."""
        tensors = (*model.parameters(), *model.buffers())
        self.settled |= {storage_of(tensor): len(self.operations) for tensor in tensors if tensor.is_meta}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        known = {storage_of(tensor) for tensor in _meta_tensors((args, tuple(kwargs.values())))}
        made = tuple(tensor for tensor in _meta_tensors(result) if storage_of(tensor) not in known)
        written = {storage_of(tensor) for tensor in _written(function, args, kwargs)}
        changes = frozenset(written.union(map(storage_of, made)))
        if changes:
            self._add(_Operation(function, args, kwargs, made, changes, frozenset(known)))
        return result

    @torch.no_grad()
    def replay(self, wanted: Mapping[int, Callable[[torch.Tensor], None]], device: torch.device) -> None:
        """Carry out what the wanted storages need; what depends on tensors made elsewhere is left out.

        Args:
            wanted: for each storage what takes its memory, as a flat tensor of bytes.
            device: where values are computed.
        """
        operations = self._needed_for(set(wanted))
        last = {storage: i for i, op in enumerate(operations) for storage in op.changes | op.reads}
        memory: dict[int, torch.Tensor] = {}

        def real(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_meta:
                bytes_ = memory[storage_of(value)]
                return bytes_.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
            return device if isinstance(value, torch.device) and value.type == "meta" else value

        for i, operation in enumerate(operations):
            result = operation.function(*tree_map(real, operation.args), **tree_map(real, operation.kwargs))
            outputs = [tensor for tensor in tree_flatten(result)[0] if isinstance(tensor, torch.Tensor)]
            for meta in operation.makes:
                value = next(o for o in outputs if o.shape == meta.shape and o.dtype == meta.dtype)
                outputs = [o for o in outputs if o is not value]
                memory[storage_of(meta)] = _as_bytes(value, meta)
            for storage in operation.changes | operation.reads:
                if last[storage] == i:
                    bytes_ = memory.pop(storage, None)
                    if storage in wanted and bytes_ is not None:
                        wanted[storage](bytes_)

    def _needed_for(self, wanted: set[int]) -> list[_Operation]:
        """Return the operations that wanted storages need and that can be carried out, in order."""
        needed, operations = set(wanted), []
        for operation in reversed(self.operations):
            if operation.changes & needed:
                needed |= operation.reads
                operations.append(operation)
        possible: list[_Operation] = []
        made: set[int] = set()
        for operation in reversed(operations):
            if operation.reads <= made:
                made |= operation.changes
                possible.append(operation)
            else:
                made -= operation.changes
        return possible


class _Constants(TorchFunctionMode):
    """Make tensors from numbers where their values are kept, and then bring them to meta before the tape's eyes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        from_numbers = function in (torch.tensor, torch.as_tensor) and not _hold_tensors(args)
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


def storage_of(tensor: torch.Tensor) -> int:
    """Return what identifies a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def _meta_tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        if values.is_meta:
            yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _meta_tensors(value)


def _written(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for i, argument in enumerate(function._schema.arguments):
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
        return self.tape.last_change.get(storage, 0) > self.tape.settled.get(storage, 0)

    def value(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor, from the bytes of its storage."""
        return memory.view(self.meta.dtype).as_strided(self.meta.shape, self.meta.stride(), self.meta.storage_offset())


@contextmanager
def recording() -> Iterator[Tape]:
    """Build on meta inside, record what is done to tensors there, and leave a note on each module that is built."""
    tape = Tape()
    built: WeakSet[nn.Module] = WeakSet()
    construct, restore = nn.Module.__init__, nn.Module.__setstate__

    def built_here(function: Callable[..., None]) -> Callable[..., None]:
        def build(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            function(self, *args, **kwargs)
            if not tape.is_paused:
                built.add(self)

        return build

    no_operations_on_meta: Any = {name: tape.recorded(getattr(nn.init, name)) for name in _NO_OPERATIONS_ON_META}
    with (
        patch.multiple(nn.init, **no_operations_on_meta),
        patch.object(nn.Module, "__init__", built_here(construct)),
        patch.object(nn.Module, "__setstate__", built_here(restore)),
        tape,
        torch.device("meta"),
        _Constants(),
    ):
        yield tape
    for module in built:
        tensors = {**module._parameters, **module._buffers}
        notes = {
            name: Note(tape, tensor.detach())
            for name, tensor in tensors.items()
            if tensor is not None and tensor.is_meta
        }
        if notes:
            module.__dict__[_NOTE] = notes


def forget(model: nn.Module) -> None:
    """Drop the notes of all modules, and with the last of them the tape."""
    for module in model.modules():
        module.__dict__.pop(_NOTE, None)


def note_of(module: nn.Module, name: str) -> Note | None:
    """Return how a tensor of a module was made; None where nobody recorded it."""
    notes: dict[str, Note] = module.__dict__.get(_NOTE, {})
    return notes.get(name)
