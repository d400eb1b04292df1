"""Flatten nested state dicts to names, and encode as JSON what is not a tensor; nothing is pickled.

Input: a state dict of any program. Output: tensors and other values by name, and the way back.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage.json_values import as_json_values, from_json_values

_TUPLE, _BYTES = "__tuple__", "__bytes__"

KeyPath = tuple[str | int, ...]
"""The keys and indices that lead to a value of a nested state dict."""


@dataclass
class FlatState:
    """A nested state dict as names, which are its keys joined by dots."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[Any, Any], action: str) -> FlatState:
        """Flatten a state dict."""
        found = cls()
        for path, value in _leaves((), state):
            name = ".".join(map(str, path))
            if name in found.paths:
                raise CheckpointError(
                    f"cannot {action}: two values of the state dict have the name {name!r}, expected different names "
                    "after keys are joined by dots. Rename a key."
                )
            found.paths[name] = path
            (found.tensors if isinstance(value, torch.Tensor) else found.values)[name] = value
        return found


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield tensors, and values that contain no tensors, with their paths."""
    if isinstance(value, Mapping) and (value or not path):
        for key, each in value.items():
            yield from _leaves((*path, key), each)
    elif isinstance(value, list | tuple) and any(isinstance(leaf, torch.Tensor) for _, leaf in _within(value)):
        for index, each in enumerate(value):
            yield from _leaves((*path, index), each)
    else:
        yield path, value


def _within(value: Sequence[Any]) -> Iterator[tuple[KeyPath, Any]]:
    return itertools.chain.from_iterable(_leaves((), each) for each in value)


def set_value(state: Any, path: KeyPath, value: Any) -> None:
    """Set a value of a nested state dict; a tuple around it is replaced."""
    *outer, last = path
    holder = functools.reduce(lambda each, key: each[key], outer, state)
    if isinstance(holder, tuple):
        set_value(state, tuple(outer), tuple(value if i == last else each for i, each in enumerate(holder)))
    else:
        holder[last] = value


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {_TUPLE: [_as_json(each) for each in value]}
    if isinstance(value, list):
        return [_as_json(each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        if value.keys() & {_TUPLE, _BYTES}:
            raise TypeError(f"the keys {_TUPLE} and {_BYTES} are reserved")
        return {key: _as_json(each) for key, each in value.items()}
    return as_json_values(value)


def from_json(value: Any) -> Any:
    """Return the value that `to_json` encoded, from decoded JSON."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_BYTES}:
        return base64.b64decode(value[_BYTES], validate=True)
    if value.keys() == {_TUPLE}:
        return tuple(from_json(each) for each in value[_TUPLE])
    decoded = from_json_values(value)
    return {key: from_json(each) for key, each in value.items()} if decoded == value else decoded


def to_json(name: str, value: Any) -> str:
    """Return a value as JSON, with tuples, bytes, infinities and integers of any size."""
    try:
        return json.dumps(_as_json(value), allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot save {name}: its value is a {type(value).__name__} ({error}), expected a tensor, or what JSON can "
            "represent, because nothing is pickled. Leave it out, or convert it."
        ) from None
