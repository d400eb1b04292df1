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

[Note: values on meta] Some creation functions return tensors with memory, because transformers' context makes
``torch.linspace`` do so, or because the code names a device. An operation on both kinds of tensors runs on meta, and is
recorded like any other. Three kinds of operations cannot wait for a replay: those that change a tensor with memory,
those whose result is a number or has a shape that depends on values (``item``, ``nonzero``, a mask as an index), and
copies to a device. For these, the values of their meta tensors are computed at once, by a replay on the CPU. This is
exact if they depend on no random numbers and on no file, as for indices, masks and tables. Otherwise, the operation
raises an error.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fsdp2_strategy.distributed.generators import drawing_from, torch_states
from fsdp2_strategy.distributed.torch_internals import (
    INIT_WITHOUT_OPERATIONS,
    TorchDispatchMode,
    changes_of,
    copy_operator,
    negated_view,
    remember_device_constructors,
    schema_of,
    storage_address,
    tree_leaves,
    tree_map,
)
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.meta.plain_tensors import plain_tensors
from fsdp2_strategy.hf.weights_folder import WeightsSource
from fsdp2_strategy.model.names import clean
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
_TO_DEVICE = {"aten::_to_copy", "aten::_copy_from", "aten::_copy_from_and_resize"}
_BY_INDICES = {"aten::index", "aten::_unsafe_index"}


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
        default, before = torch.get_default_dtype(), torch_states(device)
        torch.set_default_dtype(self.default_dtype)
        try:
            with drawing_from(self.random_states, device):
                results = tree_leaves(self.function(*args, **kwargs))
        finally:
            torch.set_default_dtype(default)
        if not (self.sets_random_state or self.random_states or are_equal(before, torch_states(device))):
            self.random_states = before
        return results


def are_equal(states: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return whether random states are the same."""
    return all(map(torch.equal, states, others))


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations on meta tensors of one block; see [Note: recorded initialisation]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.changed_since_init: dict[int, bool] = {}
        """For each recorded storage: True if an operation created or changed it, and transformers did not initialise it
        afterwards. A copy has the flag of the tensor that it was copied from."""
        self.in_files: dict[int, tuple[WeightsSource, str]] = {}
        """For each storage whose values are in files: the files, and the tensor's name in the model of the files."""
        self.copies: dict[int, tuple[WeightsSource, str]] = {}
        """For each storage that is a copy of a tensor in files, and was not changed: as for ``in_files``."""
        self._replayed: dict[torch.Tensor, torch.Tensor] = {}
        """For each tensor that `get_rng_state` returned, the random state of the replay at that point."""
        self._values: dict[int, tuple[int, torch.Tensor]] = {}
        """For each storage whose values were computed in the block: the number of operations before, and its bytes."""
        self._last_change: dict[int, int] = {}
        """For each recorded storage: the number of operations after the last one that changed it."""

    def recorded(self, init: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap an init function: record calls on meta tensors, on which the original has no effect."""

        def wrapped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not tensor.is_meta:
                return init(tensor, *args, **kwargs)
            storage = frozenset({storage_address(tensor)})
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
        self._last_change |= dict.fromkeys(operation.changes, len(self.operations))

    def mark_initialized(self, model: nn.Module, origin: WeightsSource | None = None) -> None:
        """Record that transformers has initialised a model, and that ``origin`` has the values of its state dict."""
        # Only recorded storages, because the operations keep them alive. The addresses of other storages may be reused.
        known = self.changed_since_init.keys()
        self.changed_since_init |= dict.fromkeys(known & _storages_of([*model.parameters(), *model.buffers()]), False)
        if origin is not None:
            for name, tensor in model.state_dict(keep_vars=True).items():
                if tensor.is_meta and storage_address(tensor) in known:
                    self.in_files.setdefault(storage_address(tensor), (origin, clean(name)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = _storages_of([*args, *kwargs.values()])
        written = _storages_of(written_arguments(function, args, kwargs))
        for earlier in _recordings:
            if not written.isdisjoint(earlier.changed_since_init):
                raise CheckpointError(
                    f"cannot build on meta: {function} changes a tensor of a module that was built in an earlier "
                    "init_on_meta block, expected tensors of this block, because the change would be lost. Build and "
                    "change the module in the same block."
                )
        if read and _needs_values(function, args, kwargs):
            return self._run_with_values(function, args, kwargs)
        kept_args, kept_kwargs = _mapped(_snapshot, args, kwargs)
        on_meta = _mapped(_on_meta, args, kwargs) if read else (args, kwargs)
        try:
            result = function(*on_meta[0], **on_meta[1])
        except RuntimeError as error:  # also NotImplementedError: some operations do not run on meta
            if not read or written:
                raise
            return self._run_with_values(function, args, kwargs, otherwise=error)
        # A detached alias refers to this storage, even if the parameter's ``.data`` is assigned later.
        outputs = {
            i: t.detach()
            for i, t in enumerate(_leaves([result]))
            if isinstance(t, torch.Tensor) and t.is_meta and storage_address(t) not in read
        }
        changes = written.union(map(storage_address, outputs.values()))
        if changes:
            operation = _Operation(function, kept_args, kept_kwargs, changes, read, outputs)
            self._add(operation)
            if operation.name in _COPIES and read:
                self.changed_since_init |= dict.fromkeys(
                    changes, any(self.changed_since_init.get(storage) for storage in read)
                )
            for storage in changes:
                self.copies.pop(storage, None)
            if operation.name in (*_COPIES, "aten::copy_"):
                self._add_copy(result, args[0] if operation.name in _COPIES else args[1])
        return result

    def _add_copy(self, copy: torch.Tensor, source: torch.Tensor) -> None:
        """Record that a tensor is a copy of one whose values are in files, if it is, and both are full storages."""
        storage = storage_address(source) if source.is_meta else None
        is_full = all(t.nbytes == t.untyped_storage().nbytes() and t.is_contiguous() for t in (copy, source))
        if storage is not None and copy.is_meta and copy.shape == source.shape and is_full:
            found = self.copies.get(storage, self.in_files.get(storage))
            if found is not None and not self.changed_since_init[storage]:
                self.copies[storage_address(copy)] = found

    def _run_with_values(
        self, function: Any, args: Any, kwargs: dict[str, Any], otherwise: RuntimeError | None = None
    ) -> Any:
        """Run an operation at once, with the values of its meta tensors; see [Note: values on meta].

        Tensors that it returns in memory of their own are copied to meta, unless the operation is a copy to a device.

        Raises:
            CheckpointError: the values are not known in the block.
            RuntimeError: the same, if it is given as ``otherwise``; or the operation fails.
        """
        name = str(getattr(schema_of(function), "name", function))

        def with_values(argument: Any) -> Any:
            if not isinstance(argument, torch.Tensor) or not argument.is_meta:
                return argument
            reason, values = self._values_of(argument)
            if values is None:
                if otherwise is not None:
                    raise otherwise
                raise CheckpointError(
                    f"cannot build on meta: {name} needs the values of a tensor of the shape {list(argument.shape)}, "
                    f"which {reason}, expected values that this block computes without random numbers. Run this "
                    "operation after prepare_model, or build the model outside of init_on_meta."
                )
            return values

        written = _leaves(written_arguments(function, args, kwargs))
        if any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in written):
            raise CheckpointError(
                f"cannot build on meta: {name} writes to a tensor on meta, and needs the values of another one, "
                "expected an operation that returns a new tensor. Use the form of the operation without out=, or "
                "build the model outside of init_on_meta."
            )
        given = tree_map(with_values, (tuple(args), kwargs))
        result = function(*given[0], **given[1])
        return result if written or name in _TO_DEVICE else tree_map(self._constant, result)

    def _constant(self, value: Any) -> Any:
        """Return a meta tensor whose recorded values are those of a tensor with memory."""
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return value
        meta = value.to("meta")
        kwargs = {"device": torch.device("meta")}
        changes = frozenset({storage_address(meta)})
        self._add(_Operation(copy_operator(), (value,), kwargs, changes, outputs={0: meta.detach()}))
        return meta

    def _values_of(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor | None]:
        """Return a meta tensor's values at this point of the block, on the CPU; or why they are not known, and None."""
        storage = storage_address(tensor)
        version, memory = self._values.get(storage, (0, None))
        if memory is None or version != self._last_change[storage]:
            if reason := self.unknown(storage):
                return reason, None
            if self.draws(storage):
                return "depend on random numbers", None
            found: list[torch.Tensor] = []
            self.compute({storage: found.append}, torch.device("cpu"))
            memory = found[0]
            self._values[storage] = (self._last_change[storage], memory)
        return "", view_like(tensor.detach(), memory).clone()

    def unknown(self, storage: int) -> str:
        """Return why the recorded operations cannot compute the values of a storage; "" if they can."""
        if storage not in self._last_change:
            return "were computed outside of this block"
        if storage in self.in_files:
            return "are in files, and not loaded yet"
        if storage not in self._needed_for({storage}, files=self.in_files.keys())[1]:
            return "are uninitialised, or depend on tensors that are in files or outside of this block"
        return ""

    @property
    def seeds(self) -> bool:
        """Whether the block called ``torch.manual_seed``."""
        return any(operation.function is _manual_seed for operation in self.operations)

    def draws(self, storage: int) -> bool:
        """Return whether the values of a storage depend on random numbers."""
        operations = self._needed_for({storage}, files=self.in_files.keys())[0]
        return any(operation.may_draw for operation in operations if not operation.sets_random_state)

    def compute(self, wanted: Mapping[int, Callable[[torch.Tensor], None]], device: torch.device) -> None:
        """Replay only operations that draw no random numbers, without a change of the random states."""
        operations = self._needed_for(set(wanted), files=self.in_files.keys())[0]
        self._run([each for each in operations if not each.sets_random_state], wanted, device)

    @torch.no_grad()
    def replay(self, wanted: Mapping[int, Callable[[torch.Tensor], None]], device: torch.device) -> None:
        """Pass the bytes of each wanted storage whose values can be computed to its function."""
        operations, computed = self._needed_for(set(wanted), files=self.in_files.keys() - set(wanted))
        self._run(operations, {s: store for s, store in wanted.items() if s in computed}, device)

    @staticmethod
    @torch.no_grad()
    def _run(
        operations: Sequence[_Operation], wanted: Mapping[int, Callable[[torch.Tensor], None]], device: torch.device
    ) -> None:
        """Run operations in their order, and pass the bytes of the wanted storages on after their last use."""
        last = {storage: i for i, op in enumerate(operations) for storage in op.changes | op.reads}
        memory: dict[int, torch.Tensor] = {}

        def with_values(argument: Any) -> Any:
            if isinstance(argument, torch.Tensor) and argument.is_meta:
                return view_like(argument, memory[storage_address(argument)])
            if isinstance(argument, torch.Tensor) and argument.ndim and is_operator:
                return argument.to(device)  # it was recorded with tensors on meta, whose values are on the device
            return device if isinstance(argument, torch.device) and argument.type == "meta" else argument

        for i, operation in enumerate(operations):
            is_operator = schema_of(operation.function) is not None
            args, kwargs = tree_map(with_values, (operation.args, operation.kwargs))
            results = operation.run(args, kwargs, device)
            memory |= {storage_address(meta): _bytes_of(results[at], meta) for at, meta in operation.outputs.items()}
            for storage in operation.changes | operation.reads:
                if last[storage] == i:
                    values = memory.pop(storage)
                    if storage in wanted:
                        wanted[storage](values)

    def _needed_for(self, wanted: set[int], files: Set[int]) -> tuple[list[_Operation], set[int]]:
        """Return the operations to replay for the wanted storages, and the storages that get values.

        A storage gets none if it is in ``files``, if one of its operations cannot run, or if all only allocate memory.
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
                computable |= operation.changes - files
                if operation.name not in _WITHOUT_VALUES:
                    with_values |= operation.changes
            else:
                computable -= operation.changes
        return possible, computable & with_values

    def digest(self, wanted: set[int]) -> str:
        """Return a hash of the operations that the wanted storages depend on, and of the seeds of those that draw."""
        numbers: dict[int, int] = {}

        def described(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return repr(value)
            facts = (value.dtype, tuple(value.shape))
            if not value.is_meta:
                return (*facts, value.flatten().tolist())
            number = numbers.setdefault(storage_address(value), len(numbers))
            return (*facts, number, value.stride(), value.storage_offset())

        digest, seed = hashlib.sha256(), None
        for operation in self._needed_for(wanted, files=self.in_files.keys() - wanted)[0]:
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
    """Run functions that the recording does not see, because they raise or copy before any operation runs.

    Tensors from Python numbers are created on the CPU, then copied to meta; the recorded copy keeps the CPU tensor.
    Functions that only accept tensors of one device run on meta. See [Note: values on meta].
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in _CREATE_FROM_NUMBERS:
            return _create_from_numbers(function, args, kwargs)
        if function in _READ_VALUES and args[0].is_meta:
            return function(args[0].cpu(), *args[1:], **kwargs)
        if function == _SET_DATA and args[1].is_meta != args[0].is_meta:
            return function(args[0], args[1].to(args[0].device))
        try:
            return function(*args, **kwargs)
        except CheckpointError:
            raise
        except RuntimeError:
            tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            if len({tensor.is_meta for tensor in tensors}) < 2 or _may_write(function, kwargs):
                raise
            args, kwargs = tree_map(_on_meta, (tuple(args), kwargs))
            return function(*args, **kwargs)


_CREATE_FROM_NUMBERS = (torch.Tensor.new_tensor, torch.tensor, torch.as_tensor, torch.asarray)
_READ_VALUES = (torch.Tensor.numpy, torch.Tensor.__array__)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _create_from_numbers(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device, first = ("meta", 0) if function is not torch.Tensor.new_tensor else (args[0].device, 1)
    device = torch.device(kwargs.get("device") or device)
    if any(isinstance(value, torch.Tensor) for value in args[first:]):
        return function(*args, **kwargs)
    # Numbers may be tensors of one element, which `torch.tensor` would read as uninitialised memory.
    numbers = tree_map(lambda value: value.cpu() if isinstance(value, torch.Tensor) else value, args[first:])
    if device.type != "meta":
        return function(*args[:first], *numbers, **kwargs)
    grad = kwargs.pop("requires_grad", False)
    return function(*args[:first], *numbers, **{**kwargs, "device": "cpu"}).to(device).requires_grad_(grad)


def _may_write(function: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function may write to one of its arguments, judging by its name."""
    name = str(getattr(function, "__name__", "_"))
    return name.endswith("_") or "out" in kwargs


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


def _on_meta(argument: Any) -> Any:
    """Return a meta tensor for a tensor with memory, to run an operation on meta that got both kinds."""
    return argument.detach().to("meta") if isinstance(argument, torch.Tensor) and not argument.is_meta else argument


def _needs_values(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation on meta tensors cannot wait for a replay; see [Note: values on meta]."""
    written = _leaves(written_arguments(function, args, kwargs))
    if any(isinstance(tensor, torch.Tensor) and not tensor.is_meta for tensor in written):
        return True
    name = str(getattr(schema_of(function), "name", ""))
    if name in _BY_INDICES:
        indices = (index for index in args[1] if isinstance(index, torch.Tensor))
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    if name in _TO_DEVICE and kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type != "meta"
    tags = getattr(function, "tags", ())
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _storages_of(values: Sequence[Any]) -> frozenset[int]:
    """Return the storages of the meta tensors among nested values."""
    return frozenset(storage_address(t) for t in _leaves(values) if isinstance(t, torch.Tensor) and t.is_meta)


def _is_leaf(value: Any) -> bool:
    """Return whether an argument of an operation is known not to be a container: most are not, and tree_map is slow."""
    return isinstance(value, _LEAVES)


_LEAVES = (torch.Tensor, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)


def _leaves(values: Sequence[Any]) -> list[Any]:
    """Return the leaves of nested values."""
    return [*values] if all(map(_is_leaf, values)) else tree_leaves(values)


def _mapped(
    function: Callable[[Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply a function to the leaves of the arguments of an operation."""

    def mapped(value: Any) -> Any:
        return function(value) if _is_leaf(value) else tree_map(function, value)

    return tuple(map(mapped, args)), {name: mapped(value) for name, value in kwargs.items()}


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
    changes: int = 0
    """How often the tensor had been changed in place."""

    def __deepcopy__(self, _memo: object) -> Self:
        return self  # the same operations produce the tensors of a copied module

    @property
    def copied_from(self) -> tuple[WeightsSource, str] | None:
        """The files and the name of the tensor of which this one is an unchanged copy; None if it is not a copy."""
        return self.recording.copies.get(storage_address(self.meta))

    @property
    def changed_since_init(self) -> bool:
        """Whether an operation created or changed the tensor, and transformers did not initialise it afterwards."""
        return self.recording.changed_since_init[storage_address(self.meta)]


_recordings: WeakSet[Recording] = WeakSet()
"""The recordings of earlier blocks to which modules still refer."""
_recording_lock = threading.Lock()
_recording_threads: set[int] = set()


@contextmanager
def record() -> Iterator[Recording]:
    """Build modules on meta inside this block, and record the operations on their tensors."""
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
        modules = {module for root in built for module in root.modules()}
        for module in modules:
            _attach(recording, module)
        _mark_plain_tensors(recording, modules)
    finally:
        _recording_threads.clear()
        _recording_lock.release()


def is_recording() -> bool:
    """Return whether this thread is in a `record` block."""
    return threading.get_ident() in _recording_threads


def _patches(recording: Recording, built: WeakSet[nn.Module]) -> Iterator[tuple[Any, str, Any]]:
    """Yield patches for what no mode intercepts: seeding, construction, and init functions that do nothing on meta.

    These init functions are patched in all Python modules that imported them by name.
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
    """Attach a module's recorded tensors to it; unchanged ones keep the `RecordedTensor` of an earlier recording."""
    earlier = attached(module, _RECORDED) or {}
    recorded = dict(earlier)
    for name, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is not None and tensor.is_meta:
            changed = recording.changed_since_init.get(storage_address(tensor))
            if changed or (changed is not None and name not in recorded):
                recorded[name] = RecordedTensor(recording, tensor.detach())
    if recorded:
        attach(module, _RECORDED, recorded)


_MARK = "_fsdp2_strategy_recorded"
"""Name of the attribute of plain tensors that holds their `RecordedTensor`; copies of a tensor have it, too."""


def _mark_plain_tensors(recording: Recording, modules: set[nn.Module]) -> None:
    """Attach to plain tensors of modules how they were made; see [Note: plain tensors] in `plain_tensors`."""
    for each in plain_tensors(dict.fromkeys(modules, ""), {id(module) for module in modules}):
        tensor = each.tensor
        if storage_address(tensor) in recording.changed_since_init:
            meta = tensor.detach()
            setattr(tensor, _MARK, RecordedTensor(recording, meta, changes_of(meta)))


def recorded_plain_tensor(tensor: torch.Tensor) -> RecordedTensor | None:
    """Return the `RecordedTensor` of a plain tensor; None if it was not recorded, or changed afterwards."""
    recorded: RecordedTensor | None = getattr(tensor, _MARK, None)
    return recorded if recorded is not None and changes_of(recorded.meta) == recorded.changes else None


def was_recorded(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor, or the one that it is a copy of, was recorded, also if it changed afterwards."""
    return hasattr(tensor, _MARK)


def forget(model: nn.Module) -> None:
    """Remove the recorded tensors of all modules of a model; a recording is freed once no module refers to it."""
    for module in model.modules():
        remove_attached(module, _RECORDED)


def recorded_tensor(module: nn.Module, name: str) -> RecordedTensor | None:
    """Return the `RecordedTensor` of a module's parameter or buffer; None if it was not recorded."""
    return (attached(module, _RECORDED) or {}).get(name)
