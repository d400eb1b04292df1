"""Record the operations of constructors on meta tensors, and replay them for tensors that no file contains.

Input: the tensor operations of a ``with`` block in which modules are built on the meta device. Output: for each
parameter and buffer of those modules, the operations that compute its values. `initialize` replays them.

[Note: recorded initialisation] Code that builds a model also sets values, in ``reset_parameters`` or directly, for
example with ``self.head.weight.data.normal_(std=0.01)``, ``nn.Parameter(torch.ones(4))`` or
``register_buffer("mask", ...)``. On meta tensors, these operations store no values. A `Recording` contains each
operation that creates or changes a meta tensor. Tensors are identified by their storage, so that views, ``.data`` and a
parameter made from a tensor count as the same memory. A replay runs the operations that the requested tensors depend
on, each once, in the recorded order. After the last operation on a tensor, its values are passed to the caller and its
memory is freed. An operation cannot be replayed if it reads a tensor whose values are in files, or a tensor that was
built outside the block. The tensors that such an operation changes get no values.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fsdp2_strategy.distributed.torch_internals import (
    INIT_WITHOUT_OPERATIONS,
    TorchDispatchMode,
    negated_view,
    remember_device_constructors,
    schema_of,
    storage_address,
    tree_leaves,
    tree_map,
)
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.model.state import Slot, attach, attached, remove_attached

_RECORDED = Slot[dict[str, "RecordedTensor"]]("how its tensors were made")
"""The recorded tensors of a module, by name; stored with `attach`, so that copies of the module have them too."""
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
    changes: frozenset[int] = frozenset()
    """Storages that the operation wrote to or created."""
    reads: frozenset[int] = frozenset()
    """Storages of its arguments."""
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Meta tensors that the operation returned in new storages, by their position among the results."""
    sets_random_state: bool = False
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    random_states: list[torch.Tensor] | None = None
    """The random states before the first replay, if the operation drew random numbers. Later replays (for copied
    modules) start from the same states."""

    @property
    def name(self) -> str:
        """Name of the operator or function."""
        schema = schema_of(self.function)
        return str(schema.name if schema else self.function.__name__)

    @property
    def may_draw(self) -> bool:
        """Whether the operation may draw random numbers."""
        tags = getattr(self.function, "tags", None)
        return tags is None or torch.Tag.nondeterministic_seeded in tags

    def run(self, args: Any, kwargs: Any, device: torch.device) -> list[Any]:
        """Run the operation with the default dtype of the recording; a second run draws the same random numbers."""
        default, before = torch.get_default_dtype(), random_states(device)
        torch.set_default_dtype(self.default_dtype)
        try:
            with drawing_from(self.random_states, device):
                results = tree_leaves(self.function(*args, **kwargs))
        finally:
            torch.set_default_dtype(default)
        if not (self.sets_random_state or self.random_states or are_equal(before, random_states(device))):
            self.random_states = before
        return results


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Return the random state of the CPU and, if ``device`` is a CUDA device, that of the device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def are_equal(states: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return whether random states are the same."""
    return all(map(torch.equal, states, others))


@contextmanager
def drawing_from(states: list[torch.Tensor] | None, device: torch.device) -> Iterator[None]:
    """Set these random states inside the block, and restore the previous ones after it; a no-op for None."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=states is not None):
        if states is not None:
            torch.set_rng_state(states[0])
            for each in devices:
                torch.cuda.set_rng_state(states[1], each)
        yield


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations on meta tensors of one block; see [Note: recorded initialisation]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.changed_since_init: dict[int, bool] = {}
        """For each recorded storage: True if an operation created or changed it, and transformers did not initialise it
        afterwards. A copy has the flag of the tensor that it was copied from."""
        self.in_files: set[int] = set()
        """Storages whose values are in files."""
        self._replayed: dict[torch.Tensor, torch.Tensor] = {}
        """For each tensor that `get_rng_state` returned, the random state of the replay at that point."""

    def recorded(self, init: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap an init function: record calls on meta tensors, on which the original has no effect."""

        def wrapped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not tensor.is_meta:
                return init(tensor, *args, **kwargs)
            storage = frozenset({storage_of(tensor)})
            self._add(_Operation(init, (tensor.detach(), *args), kwargs, changes=storage, reads=storage))
            return tensor

        return wrapped

    def manual_seed(self, seed: int) -> torch.Generator:
        """Record a call of ``torch.manual_seed`` and run it."""
        self._add(_Operation(_manual_seed, (seed,), {}, sets_random_state=True))
        return _manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """Record a call of ``torch.get_rng_state`` and run it; a replay stores its own random state at this point."""
        state, replayed = _get_rng_state(), self._replayed
        self._add(_Operation(lambda: replayed.update({state: _get_rng_state()}), (), {}, sets_random_state=True))
        return state

    def set_rng_state(self, new_state: torch.Tensor) -> None:
        """Record a call of ``torch.set_rng_state`` and run it; a replay restores the state that it stored itself."""
        replayed = self._replayed

        def restore(state: torch.Tensor) -> None:
            _set_rng_state(replayed.get(state, state))

        self._add(_Operation(restore, (new_state,), {}, sets_random_state=True))
        _set_rng_state(new_state)

    def _add(self, operation: _Operation) -> None:
        self.operations.append(operation)
        self.changed_since_init |= dict.fromkeys(operation.changes, True)

    def mark_initialized(self, model: nn.Module, *, in_files: bool = False) -> None:
        """Record that transformers has initialised a model, so that later changes of its tensors are detected.

        Args:
            model: a model on meta.
            in_files: whether the values of its parameters and persistent buffers are in files.
        """
        # Only recorded storages, because the operations keep them alive. The addresses of other storages may be reused.
        known = self.changed_since_init.keys()
        self.changed_since_init |= dict.fromkeys(known & _storages_of([*model.parameters(), *model.buffers()]), False)
        if in_files:
            self.in_files |= known & _storages_of([*model.state_dict(keep_vars=True).values()])

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = _storages_of((args, kwargs))
        written = _storages_of(written_arguments(function, args, kwargs))
        for earlier in _recordings:
            if not written.isdisjoint(earlier.changed_since_init):
                raise CheckpointError(
                    f"cannot build on meta: {function} changes a tensor of a module that was built in an earlier "
                    "init_on_meta block, expected tensors of this block, because the change would be lost. Build and "
                    "change the module in the same block."
                )
        kept_args, kept_kwargs = tree_map(_snapshot, (tuple(args), kwargs))
        result = function(*args, **kwargs)
        # A detached alias refers to this storage, even if the parameter's ``.data`` is assigned later.
        outputs = {
            i: t.detach()
            for i, t in enumerate(tree_leaves(result))
            if isinstance(t, torch.Tensor) and t.is_meta and storage_of(t) not in read
        }
        changes = written.union(map(storage_of, outputs.values()))
        if changes:
            operation = _Operation(function, kept_args, kept_kwargs, changes, read, outputs)
            self._add(operation)
            if operation.name in _COPIES and read:
                self.changed_since_init |= dict.fromkeys(
                    changes, any(self.changed_since_init.get(storage) for storage in read)
                )
        return result

    @torch.no_grad()
    def replay(self, wanted: Mapping[int, Callable[[torch.Tensor], None]], device: torch.device) -> None:
        """Run the operations that the wanted storages depend on; skip storages whose values cannot be computed.

        Args:
            wanted: for each storage, a function that receives the values of the storage as a flat tensor of bytes.
            device: the device on which values are computed.
        """
        operations, computed = self._needed_for(set(wanted))
        last = {storage: i for i, op in enumerate(operations) for storage in op.changes | op.reads}
        memory: dict[int, torch.Tensor] = {}

        def with_values(argument: Any) -> Any:
            if isinstance(argument, torch.Tensor) and argument.is_meta:
                return view_like(argument, memory[storage_of(argument)])
            return device if isinstance(argument, torch.device) and argument.type == "meta" else argument

        for i, operation in enumerate(operations):
            args, kwargs = tree_map(with_values, (operation.args, operation.kwargs))
            results = operation.run(args, kwargs, device)
            memory |= {storage_of(meta): _bytes_of(results[at], meta) for at, meta in operation.outputs.items()}
            for storage in operation.changes | operation.reads:
                if last[storage] == i:
                    values = memory.pop(storage)
                    if storage in wanted and storage in computed:
                        wanted[storage](values)

    def _needed_for(self, wanted: set[int]) -> tuple[list[_Operation], set[int]]:
        """Return the operations to replay for the wanted storages, and the storages that get values.

        A storage gets no values if one of its operations cannot run, or if all of them only allocate memory.
        """
        needed, operations = set(wanted), []
        for operation in reversed(self.operations):
            if operation.changes & needed or operation.sets_random_state:
                needed |= operation.reads
                operations.append(operation)
        possible: list[_Operation] = []
        computable: set[int] = set()
        with_values: set[int] = set()
        for operation in reversed(operations):
            # An operation with its own generator cannot be replayed: the generator's state is not recorded.
            own_generator = any(isinstance(a, torch.Generator) for a in (*operation.args, *operation.kwargs.values()))
            if operation.reads <= computable and not own_generator:
                possible.append(operation)
                computable |= operation.changes - (self.in_files - wanted)
                if operation.name not in _WITHOUT_VALUES:
                    with_values |= operation.changes
            else:
                computable -= operation.changes
        return possible, computable & with_values

    def digest(self, wanted: set[int]) -> str:
        """Return a hash of the operations that the wanted storages depend on, and of their constant arguments.

        A seed is part of it if random numbers are drawn after it.
        """
        numbers: dict[int, int] = {}

        def described(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return repr(value)
            facts = (value.dtype, tuple(value.shape))
            if not value.is_meta:
                return (*facts, value.flatten().tolist())
            number = numbers.setdefault(storage_of(value), len(numbers))
            return (*facts, number, value.stride(), value.storage_offset())

        digest, seed = hashlib.sha256(), None
        for operation in self._needed_for(wanted)[0]:
            if operation.function is _manual_seed:
                seed = operation.args
            elif not operation.sets_random_state:
                if seed is not None and operation.may_draw:
                    digest.update(repr(seed).encode())
                    seed = None
                arguments = tree_map(described, (operation.args, operation.kwargs))
                digest.update(repr((operation.name, arguments)).encode())
        return digest.hexdigest()


class _Constants(TorchFunctionMode):
    """Create tensors from Python numbers on the CPU, then copy them to meta; the recorded copy keeps the CPU tensor."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device, numbers = dict(kwargs or {}), "meta", args
        if function is torch.Tensor.new_tensor:
            device, numbers = args[0].device, args[1:]
        elif function not in (torch.tensor, torch.as_tensor, torch.asarray):
            return function(*args, **kwargs)
        is_on_meta = torch.device(kwargs.get("device") or device).type == "meta"
        if not is_on_meta or any(isinstance(value, torch.Tensor) for value in tree_leaves(numbers)):
            return function(*args, **kwargs)
        grad = kwargs.pop("requires_grad", False)
        return function(*args, **{**kwargs, "device": "cpu"}).to("meta").requires_grad_(grad)


def _bytes_of(value: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a storage that holds ``value`` with the strides and offset of the meta tensor."""
    size = meta.untyped_storage().nbytes()
    if value.is_contiguous() and meta.is_contiguous() and value.nbytes == size:
        return value.reshape(-1).view(torch.uint8)
    memory = torch.empty(size, dtype=torch.uint8, device=value.device)
    view_like(meta, memory).copy_(value)
    return memory


def view_like(meta: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return the view of a storage's bytes that corresponds to a meta tensor."""
    view = memory.view(meta.dtype).as_strided(meta.shape, meta.stride(), meta.storage_offset())
    view = view.conj() if meta.is_conj() else view
    return negated_view(view) if meta.is_neg() else view


def _snapshot(argument: Any) -> Any:
    """Detach a meta tensor; copy any other tensor, because a constructor may change it later."""
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.detach() if argument.is_meta else argument.detach().clone()


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identifier of a tensor's storage."""
    return storage_address(tensor)


def _storages_of(values: Any) -> frozenset[int]:
    """Return the storages of the meta tensors among nested values."""
    return frozenset(storage_of(t) for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.is_meta)


def written_arguments(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to."""
    return [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(schema_of(function).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


@dataclass(frozen=True, eq=False)
class RecordedTensor:
    """A tensor of a module, and the recording of the operations that made it."""

    recording: Recording
    meta: torch.Tensor
    """The tensor at the end of the block. It keeps its storage alive; the recording identifies tensors by storage."""

    def __deepcopy__(self, _memo: object) -> Self:
        return self  # the same operations produce the tensors of a copied module

    @property
    def changed_since_init(self) -> bool:
        """Whether an operation created or changed the tensor, and transformers did not initialise it afterwards."""
        return self.recording.changed_since_init[storage_of(self.meta)]


_recordings: WeakSet[Recording] = WeakSet()
"""The recordings of earlier blocks to which modules still refer."""
_recording_lock = threading.Lock()
_recording_threads: set[int] = set()


@contextmanager
def record() -> Iterator[Recording]:
    """Build modules on meta inside this block, and record the operations on their tensors.

    Raises:
        CheckpointError: another recording is active, or the block changes a tensor that was built in an earlier block.
    """
    if not _recording_lock.acquire(blocking=False):
        raise CheckpointError(
            "cannot build on meta: another thread is in an init_on_meta block, expected one at a time. Build the "
            "models one after the other."
        )
    recording = Recording()
    _recording_threads.add(threading.get_ident())
    built: WeakSet[nn.Module] = WeakSet()
    try:
        remember_device_constructors()  # torch caches them at first use; the cache must not contain patched functions
        with ExitStack() as stack:
            for target, name, value in _patches(recording, built):
                stack.enter_context(patch.object(target, name, value))
            for mode in (recording, torch.device("meta"), _Constants()):
                stack.enter_context(mode)
            yield recording
        _recordings.add(recording)
        for module in {module for root in built for module in root.modules()}:
            _attach(recording, module)
    finally:
        _recording_threads.clear()
        _recording_lock.release()


def is_recording() -> bool:
    """Return whether this thread is in a `record` block."""
    return threading.get_ident() in _recording_threads


def _patches(recording: Recording, built: WeakSet[nn.Module]) -> Iterator[tuple[Any, str, Any]]:
    """Yield patches for functions that no mode intercepts: seeding, construction, and some init functions.

    Without a patch, these init functions have no effect on meta. They are patched in all Python modules that imported
    them by name.
    """
    for function in (recording.manual_seed, recording.get_rng_state, recording.set_rng_state):
        yield torch, function.__name__, function
    for name in ("__init__", "__setstate__"):
        yield nn.Module, name, _collecting(getattr(nn.Module, name), built)
    for name in INIT_WITHOUT_OPERATIONS:
        init = getattr(nn.init, name)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is init:
                yield module, name, recording.recorded(init)  # type: ignore[arg-type]


def _collecting(construct: Callable[..., None], built: WeakSet[nn.Module]) -> Callable[..., None]:
    """Wrap a constructor, so that the modules that it builds are added to ``built``."""

    def build(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        construct(module, *args, **kwargs)
        built.add(module)

    return build


def _attach(recording: Recording, module: nn.Module) -> None:
    """Attach a module's recorded tensors to it.

    A tensor that this recording did not change keeps the `RecordedTensor` of an earlier recording.
    """
    earlier = attached(module, _RECORDED) or {}
    recorded = dict(earlier)
    for name, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is not None and tensor.is_meta:
            changed = recording.changed_since_init.get(storage_of(tensor))
            if changed or (changed is not None and name not in recorded):
                recorded[name] = RecordedTensor(recording, tensor.detach())
    if recorded:
        attach(module, _RECORDED, recorded)


def forget(model: nn.Module) -> None:
    """Remove the recorded tensors of all modules of a model; a recording is freed once no module refers to it."""
    for module in model.modules():
        remove_attached(module, _RECORDED)


def recorded_tensor(module: nn.Module, name: str) -> RecordedTensor | None:
    """Return the `RecordedTensor` of a module's parameter or buffer; None if it was not recorded."""
    return (attached(module, _RECORDED) or {}).get(name)
