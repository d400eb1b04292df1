"""Initialise new modules and computed buffers that no file contains, as their constructors and init functions would.

Input: a model whose tensors have memory, and a list of those without values. Output: the same tensors, filled.

A tensor's values come from the first of these that applies:

1. the recorded operations, if one of them changed the tensor and transformers did not initialise it afterwards;
2. ``_init_weights`` of a transformers model;
3. the recorded operations of the constructor;
4. ``reset_parameters`` of the module, if no operations were recorded.

[Note: lazy initialisation] Init functions draw full tensors and change them in place. They run on a skeleton of the
model in which a `_LazyTensor` replaces each tensor without values. The first operation on it allocates a full tensor on
every rank, and all ranks draw from the same random state. When the init function returns, each rank keeps its rows and
frees the full tensor. So the values are those of the unsharded model at every world size. Full tensors start with a
marker value, so that tensors that no init function writes are detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.agreement import all_or_none, from_rank_0
from fsdp2_strategy.distributed.generators import drawing_from, torch_states
from fsdp2_strategy.distributed.torch_internals import (
    local_of,
    storage_address,
    tree_map,
    without_torch_function,
    wrapper_subclass,
)
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.library_internals import mark_initialized, replace_initialization
from fsdp2_strategy.hf.meta.plain_tensors import PlainTensor, exchange
from fsdp2_strategy.hf.meta.recorded_init import (
    RecordedTensor,
    Recording,
    are_equal,
    recorded_tensor,
    view_like,
    written_arguments,
)
from fsdp2_strategy.hf.peft.merge import gather_full
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.hf.transformers_models import is_transformers_model
from fsdp2_strategy.model.shards import local_shard

_INIT_FUNCTIONS = ("reset_parameters", "_reset_parameters")


@dataclass(frozen=True, eq=False)
class TensorWithoutValues:
    """A tensor without values: its name, and every module and key under which it is registered."""

    name: str
    tensor: torch.Tensor
    registrations: Sequence[tuple[nn.Module, str]]
    dtype: torch.dtype | None
    """The dtype in which values are drawn; None for the tensor's own, which may be wider (master weights)."""

    @property
    def recorded(self) -> RecordedTensor | None:
        """The tensor's `RecordedTensor`; None if its operations were not recorded."""
        return next((found for module, key in self.registrations if (found := recorded_tensor(module, key))), None)


@dataclass(frozen=True, eq=False)
class PlainWithoutValues:
    """A plain tensor without values: how it was made, and all references to it; see [Note: plain tensors]."""

    recorded: RecordedTensor
    references: list[PlainTensor]

    @property
    def draws(self) -> bool:
        """Whether its values depend on random numbers."""
        return self.recorded.recording.draws(storage_address(self.recorded.meta))


@torch.no_grad()
def initialize(
    model: nn.Module,
    empty: Sequence[TensorWithoutValues],
    device: torch.device,
    plain: Sequence[PlainWithoutValues] = (),
) -> list[str]:
    """Initialise tensors with the values that they would have if their modules were built with memory; collective.

    Return the names of the tensors that nothing initialises.
    """
    # Init functions may read plain tensors, so those that draw nothing are computed first.
    _, lost = _run_recorded(Recording.compute, [each for each in plain if not each.draws], device)
    drawn = [each for each in plain if each.draws]
    with _random_states_of_rank_0(device):
        # Tensors that were added or changed after transformers had initialised the model get replayed values below.
        waiting = [e for e in empty if e.recorded is None or not e.recorded.changed_since_init]
        filled = _run_init_weights(model, waiting, device)
        waiting = [e for e in empty if id(e.tensor) not in filled]
        replayed, more = _run_recorded(Recording.replay, [*waiting, *drawn], device)
        filled |= replayed
        waiting = [e for e in empty if id(e.tensor) not in filled and e.recorded is None]
        filled |= _run_reset_parameters(model, waiting, device)
    return [*(e.name for e in empty if id(e.tensor) not in filled), *lost, *more]


def recording_digests(empty: Sequence[TensorWithoutValues], plain: Sequence[PlainWithoutValues] = ()) -> list[str]:
    """Return a digest of each recording's operations for tensors without values, to compare them across ranks."""
    recordings = _by_recording([*empty, *plain])
    return [recording.digest(set(by_storage)) for recording, by_storage in recordings.items()]


_WithoutValues = TensorWithoutValues | PlainWithoutValues
_ByStorage = dict[int, list[tuple[torch.Tensor, _WithoutValues]]]
"""For each recorded storage: pairs of a meta tensor in this storage and what to fill with its values."""


def _by_recording(tensors: Sequence[_WithoutValues]) -> dict[Recording, _ByStorage]:
    found: dict[Recording, _ByStorage] = {}
    for e in tensors:
        if e.recorded is not None:
            meta = e.recorded.meta
            found.setdefault(e.recorded.recording, {}).setdefault(storage_address(meta), []).append((meta, e))
    return found


def _run_init_weights(model: nn.Module, empty: Sequence[TensorWithoutValues], device: torch.device) -> set[int]:
    """Run the init functions of all transformers models in a model; return the ids of the tensors that they fill."""
    lazy = _LazyTensors(empty, device)
    skeleton = lazy.skeleton_of(model)
    inner: set[int] = set()
    for part in skeleton.modules():
        if is_transformers_model(part):
            replace_initialization(part, lazy.stored_after)
    for part in skeleton.modules():
        if is_transformers_model(part) and id(part) not in inner:
            inner |= {id(module) for module in part.modules()}
            part.initialize_weights()  # type: ignore[operator]
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            new = skeleton.get_submodule(name)._buffers.get(key)
            replaced = lazy.by_id.get(id(buffer))
            if replaced is not None and new is not None and not isinstance(new, _LazyTensor) and not new.is_meta:
                replaced.store(new)  # an init function replaced the buffer
    return lazy.filled


def _run_recorded(
    run: Callable[[Recording, Mapping[int, Callable[[torch.Tensor], None]], torch.device], None],
    tensors: Sequence[_WithoutValues],
    device: torch.device,
) -> tuple[set[int], list[str]]:
    """Run recorded operations; return ids of tensors that get values, and names of plain tensors that get none."""
    filled: set[int] = set()
    values: list[tuple[list[PlainTensor], torch.Tensor]] = []

    def store_in(tensors: list[tuple[torch.Tensor, _WithoutValues]]) -> Callable[[torch.Tensor], None]:
        def store(memory: torch.Tensor) -> None:
            for meta, each in tensors:
                if isinstance(each, PlainWithoutValues):
                    values.append((each.references, view_like(meta, memory).detach()))
                    continue
                local_of(each.tensor).copy_(local_shard(each.tensor).of(view_like(meta, memory)))
                filled.add(id(each.tensor))

        return store

    for recording, by_storage in _by_recording(tensors).items():
        run(recording, {storage: store_in(each) for storage, each in by_storage.items()}, device)
    return filled, exchange(values)


def _run_reset_parameters(model: nn.Module, empty: Sequence[TensorWithoutValues], device: torch.device) -> set[int]:
    """Run ``reset_parameters`` of modules with tensors without values; return the ids of the tensors that it fills."""
    lazy = _LazyTensors(empty, device)

    def reset(module: nn.Module) -> None:
        function = next((getattr(module, name) for name in _INIT_FUNCTIONS if hasattr(module, name)), None)
        if callable(function) and any(isinstance(t, _LazyTensor) for t in (*module.parameters(), *module.buffers())):
            lazy.stored_after(function)()

    if empty:
        lazy.skeleton_of(model).apply(reset)  # inner modules first
    return lazy.filled


@contextmanager
def _random_states_of_rank_0(device: torch.device) -> Iterator[None]:
    """Use rank 0's random states on every rank; afterwards, restore the states of ranks that had others."""
    own = torch_states(device)
    shared = from_rank_0(own)
    with drawing_from(None if are_equal(own, shared) else shared, device):
        yield


class _LazyTensors:
    """The lazy tensors of a model; ``full`` contains those that have a full tensor now, by their ids."""

    def __init__(self, empty: Sequence[TensorWithoutValues], device: torch.device) -> None:
        self.device = device
        self.by_id = {id(e.tensor): _LazyTensor(e.tensor, self, e.dtype or e.tensor.dtype) for e in empty}
        self.full: dict[int, tuple[_LazyTensor, torch.Tensor]] = {}
        self.filled: set[int] = set()
        """The ids of the original tensors whose elements all have values."""

    def skeleton_of(self, model: nn.Module) -> nn.Module:
        """Return a skeleton of a model with the lazy tensors; mark all other tensors as initialised."""

        def replacement(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in self.by_id:
                return self.by_id[id(tensor)]
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            new = nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
            mark_initialized(new)
            return new

        skeleton = meta_skeleton(model, replacement)
        seen: set[int] = set()
        for module in skeleton.modules():
            both: tuple[Any, Any] = (module._parameters, module._buffers)
            for tensors in both:
                for name, tensor in tensors.items():
                    if isinstance(tensor, _LazyTensor) and id(tensor) in seen:
                        # Tied: transformers initialises each occurrence, but keeps only the first.
                        tensors[name] = _LazyTensor(tensor.original, self, tensor.dtype, is_kept=False)
                    seen.add(id(tensor))
        return skeleton

    def full_of(self, lazy: _LazyTensor) -> torch.Tensor:
        """Return the full tensor of a lazy tensor; on first use, gather its values or fill it with the marker."""
        if id(lazy) not in self.full:
            original = lazy.original
            if lazy.is_kept and id(original) in self.filled:
                with all_or_none("initialise", CheckpointError):
                    pass  # gather only if no rank has failed before
                # `full_tensor` does not work inside our ``__torch_dispatch__`` on torch 2.11.
                full = gather_full({0: original})[0].to(lazy.dtype)
            else:
                full = torch.full(lazy.shape, _unwritten_marker(lazy.dtype), dtype=lazy.dtype, device=self.device)
            self.full[id(lazy)] = (lazy, full)
        return self.full[id(lazy)][1]

    def stored_after(self, function: Callable[..., None]) -> Callable[..., None]:
        """Wrap an init function: when it returns, store this rank's shards of written tensors; free full tensors."""

        def run(*args: Any, **kwargs: Any) -> None:
            function(*args, **kwargs)
            for lazy, full in self.full.values():
                only_read = not lazy.changed and bool((full == _unwritten_marker(lazy.dtype)).all())
                if not (only_read or full.isnan().any()):
                    lazy.store(full)
            self.full.clear()

        return run


def _unwritten_marker(dtype: torch.dtype) -> float:
    """Return the value that marks elements of a full tensor as not initialised."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype in (torch.bool, torch.uint8) else torch.iinfo(dtype).min


class _LazyTensor(torch.Tensor):
    """A lazily initialised tensor that replaces one without values; see [Note: lazy initialisation]."""

    original: torch.Tensor
    tensors: _LazyTensors
    changed: bool
    """Whether an operation wrote to the tensor itself; writes to its views do not count."""
    is_kept: bool
    """Whether the values are stored in the original tensor; otherwise they are drawn and dropped."""
    _is_param: bool

    __torch_function__ = without_torch_function

    @staticmethod
    def __new__(
        cls, original: torch.Tensor, tensors: _LazyTensors, dtype: torch.dtype, *, is_kept: bool = True
    ) -> _LazyTensor:
        lazy: _LazyTensor = wrapper_subclass(cls, original.shape, dtype, tensors.device)
        lazy.original, lazy.tensors, lazy.changed, lazy.is_kept = original, tensors, False, is_kept
        lazy._is_param = isinstance(original, nn.Parameter)
        return lazy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"_LazyTensor({list(self.shape)}, {self.dtype})"

    def store(self, full: torch.Tensor) -> None:
        """Store this rank's shard of a full tensor."""
        if self.is_kept:
            local_of(self.original).copy_(local_shard(self.original).of(full))
            self.tensors.filled.add(id(self.original))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        lazy_of: dict[int, _LazyTensor] = {}
        kwargs = kwargs or {}

        def full(value: Any) -> Any:
            if not isinstance(value, _LazyTensor):
                return value
            tensor = value.tensors.full_of(value)
            lazy_of[id(tensor)] = value
            return tensor

        for value in written_arguments(function, args, kwargs):
            if isinstance(value, _LazyTensor):
                value.changed = True
        result = function(*tree_map(full, args), **tree_map(full, kwargs))
        return tree_map(lambda value: lazy_of.get(id(value), value), result)
