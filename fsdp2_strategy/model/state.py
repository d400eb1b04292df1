"""Store data of this package per model, optimizer or unit: a `ModelState` for each, with slots that other files define.

Input: a model, an optimizer, or the ``FSDPParamGroup`` of a unit. Output: its `ModelState`.

[Note: per-model state] A Python file that stores data per model defines a `Slot` at its top, with a name and a type.
States are kept in a WeakKeyDictionary. So a value must not reference its model, not even through a submodule, a bound
method or a hook: the model would never be freed. Use `attach` for data that deep copies of an ``nn.Module`` must keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

T = TypeVar("T")


class Slot(Generic[T]):
    """The typed key of one value in a `ModelState`, with a unique name; see [Note: per-model state]."""

    names: ClassVar[set[str]] = set()

    def __init__(self, name: str) -> None:
        if name in self.names:
            raise ValueError(f"cannot define the slot {name!r}: the name is already used, expected another name")
        self.names.add(name)
        self.name = name


class ModelState:
    """The slot values of one model, optimizer or unit."""

    def __init__(self) -> None:
        self._values: dict[Slot[Any], Any] = {}

    def get(self, slot: Slot[T]) -> T | None:
        """Return the value of a slot; None if it is not set."""
        value: T | None = self._values.get(slot)
        return value

    def set(self, slot: Slot[T], value: T) -> T:
        """Set the value of a slot, and return it."""
        self._values[slot] = value
        return value

    def setdefault(self, slot: Slot[T], default: T) -> T:
        """Return the value of a slot; if it is not set, set it to ``default`` first."""
        value: T = self._values.setdefault(slot, default)
        return value

    def pop(self, slot: Slot[T]) -> T | None:
        """Remove the value of a slot, and return it; None if it is not set."""
        value: T | None = self._values.pop(slot, None)
        return value

    def __repr__(self) -> str:
        return f"ModelState({', '.join(sorted(slot.name for slot in self._values))})"


_states: WeakKeyDictionary[object, ModelState] = WeakKeyDictionary()


def model_state(subject: object) -> ModelState:
    """Return the state of a model, an optimizer or an ``FSDPParamGroup``, created on first use; not collective."""
    return _states.setdefault(subject, ModelState())


def states_with(slot: Slot[T]) -> list[tuple[Any, T]]:
    """Return each model, optimizer or ``FSDPParamGroup`` that has a value of a slot, with the value."""
    found = [(subject, state.get(slot)) for subject, state in _states.items()]
    return [(subject, value) for subject, value in found if value is not None]


ATTACHED = "_fsdp2_strategy_carried"
"""Name of the module attribute that holds attached values."""


def attach(module: nn.Module, slot: Slot[T], value: T) -> None:
    """Store a value on a module itself, so that deep copies and sharding keep it."""
    module.__dict__.setdefault(ATTACHED, {})[slot.name] = value


def attached(module: nn.Module, slot: Slot[T]) -> T | None:
    """Return the value that `attach` stored on a module; None if there is none."""
    value: T | None = module.__dict__.get(ATTACHED, {}).get(slot.name)
    return value


def remove_attached(module: nn.Module, slot: Slot[Any]) -> None:
    """Remove a value that `attach` stored on a module; copies of the module keep theirs."""
    module.__dict__.get(ATTACHED, {}).pop(slot.name, None)


_is_measured: ContextVar[bool] = ContextVar("measured pass", default=False)


@contextmanager
def measured_pass() -> Iterator[None]:
    """Run forward passes that only measure a model, and are neither recorded nor replayed."""
    token = _is_measured.set(True)
    try:
        yield
    finally:
        _is_measured.reset(token)


def is_measured_pass() -> bool:
    """Return whether the running forward pass only measures a model."""
    return _is_measured.get()
