"""What is known of a model beside the model itself: one state for each, in slots that other modules register.

Input: a model, or what belongs to one: its optimizer, FSDP2's record of a unit. Output: its `ModelState`.

[Note: slots] A module that remembers something of a model makes a `Slot` at its top, and so says its name and type. The
table of states is keyed weakly. So a value must not reach its model again, by a module, a bound method or a hook: it
would keep the model for ever. What has to follow deep copies of a module is carried by the module: `carry`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

T = TypeVar("T")


class Slot(Generic[T]):
    """One thing that a module of this package remembers of a model.

    Args:
        name: what it is, in words; each name is taken once.

    Raises:
        ValueError: another slot has the name.
    """

    names: ClassVar[set[str]] = set()

    def __init__(self, name: str) -> None:
        if name in self.names:
            raise ValueError(f"cannot register the slot {name!r}: there is one of that name, expected another name")
        self.names.add(name)
        self.name = name

    def __repr__(self) -> str:
        return f"Slot({self.name!r})"


class ModelState:
    """Hold the values of one model's slots."""

    def __init__(self) -> None:
        self._values: dict[Slot[Any], Any] = {}

    def get(self, slot: Slot[T]) -> T | None:
        """Return what a slot holds; None where nothing was set."""
        value: T | None = self._values.get(slot)
        return value

    def set(self, slot: Slot[T], value: T) -> T:
        """Put a value into a slot, and return it."""
        self._values[slot] = value
        return value

    def pop(self, slot: Slot[T]) -> T | None:
        """Empty a slot, and return what it held."""
        value: T | None = self._values.pop(slot, None)
        return value

    def __repr__(self) -> str:
        return f"ModelState({', '.join(sorted(slot.name for slot in self._values))})"


_states: WeakKeyDictionary[object, ModelState] = WeakKeyDictionary()


def model_state(subject: object) -> ModelState:
    """Return the state of a model, an optimizer or a unit; a fresh one the first time."""
    state = _states.get(subject)
    if state is None:
        state = _states[subject] = ModelState()
    return state


CARRIED = "_fsdp2_strategy_carried"
"""The one attribute that this package gives to modules."""


def carry(module: nn.Module, slot: Slot[T], value: T) -> None:
    """Store a value on a module itself, so that deep copies and sharding keep it."""
    module.__dict__.setdefault(CARRIED, {})[slot.name] = value


def carried(module: nn.Module, slot: Slot[T]) -> T | None:
    """Return what a module carries; None where it carries nothing of that name."""
    value: T | None = module.__dict__.get(CARRIED, {}).get(slot.name)
    return value


def put_down(module: nn.Module, slot: Slot[Any]) -> None:
    """Remove a value that a module carries; copies that were made of it keep theirs."""
    module.__dict__.get(CARRIED, {}).pop(slot.name, None)
