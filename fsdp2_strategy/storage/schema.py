"""Parse JSON that other programs may have written, and check it against a schema.

Input: the bytes of a file, and a schema made of the functions below. Output: the value, or `InvalidError`, whose text
names the entry, the actual value in short form, and what was expected. This module does not import torch.

A schema is a function that raises `InvalidError` for a value that does not fit:

    record({"step": integer(0), "metric": optional(number())})
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from fsdp2_strategy.errors import shown

Schema = Callable[[Any], None]

MAX_DEPTH = 400
"""Maximum nesting of lists and dictionaries in a file; Python's own functions for JSON fail at about twice as many."""
MAX_INTEGER = 1 << 62
_MAX_NAME = 1000
"""Maximum length of the names of files and tensors."""


class InvalidError(ValueError):
    """A value that does not fit its schema."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.keys: list[object] = []
        """The keys that lead to the value, the innermost first."""

    def __str__(self) -> str:
        """Return the text, with the place of the value."""
        if not self.keys:
            return f"it {self.args[0]}"
        first, *others = (shown(key, 60) for key in reversed(self.keys))
        return f"its entry {first}{''.join(f'[{key}]' for key in others[:6])} {self.args[0]}"


def parse_json(content: bytes | str, schema: Schema | None = None) -> Any:
    """Return the value of a JSON text."""
    try:
        value = json.loads(content, object_pairs_hook=_without_repeated_keys, parse_constant=_refuse)
    except RecursionError:
        raise InvalidError(_TOO_DEEP) from None
    except InvalidError:
        raise
    except ValueError as error:
        raise InvalidError(f"is not JSON ({error})") from error
    (schema or json_value())(value)
    return value


_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep"


def _without_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        repeated = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise InvalidError(f"is ambiguous: a name occurs twice: {shown(repeated)}")
    return found


def _refuse(constant: str) -> object:
    raise InvalidError(f"has the number {constant}, expected only finite numbers")


def _expected(value: object, expected: str) -> InvalidError:
    return InvalidError(f"is {shown(value)}, expected {expected}")


def integer(low: int = 0, high: int = MAX_INTEGER) -> Schema:
    """Return the schema of an integer in a range."""

    def check(value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise _expected(value, f"an integer from {low} to {high}")

    return check


def number(value: Any) -> None:
    """Check that a value is a finite number in the range of a float."""
    if type(value) in (int, float):
        try:
            if math.isfinite(float(value)):
                return
        except OverflowError:
            pass
    raise _expected(value, "a finite number")


def flag(value: Any) -> None:
    """Check that a value is true, false, 1 or 0."""
    if type(value) not in (bool, int) or value not in (0, 1):
        raise _expected(value, "true or false")


def text(max_length: int = _MAX_NAME) -> Schema:
    """Return the schema of a text of limited length."""

    def check(value: Any) -> None:
        if not isinstance(value, str) or len(value) > max_length or "\0" in value:
            raise _expected(value, f"a text of at most {max_length} characters without NUL")

    return check


def hexadecimal(value: Any) -> None:
    """Check that a value has 16 hexadecimal digits, such as a checksum."""
    if not isinstance(value, str) or len(value) != 16 or not _HEXADECIMAL.issuperset(value):
        raise _expected(value, "16 hexadecimal digits")


_HEXADECIMAL = frozenset("0123456789abcdef")


def file_name(value: Any) -> None:
    """Check that a value is the relative path of a file, without ``..``."""
    is_name = isinstance(value, str) and len(value) <= _MAX_NAME and _CONTROL_CHARACTERS.isdisjoint(value)
    if is_name and _NO_PARTS.isdisjoint(value.split("/")):
        try:
            os.fsencode(value)
        except UnicodeEncodeError:
            pass
        else:
            return
    raise _expected(value, "the relative path of a file, without '..'")


def tensor_name(value: Any) -> None:
    """Check that a value can be the name of a tensor: a text of printable characters."""
    if not isinstance(value, str) or len(value) > _MAX_NAME or not value.isprintable():
        raise _expected(value, f"a name of at most {_MAX_NAME} printable characters")


_CONTROL_CHARACTERS = frozenset(map(chr, (*range(32), 127)))
_NO_PARTS = frozenset(("", ".", ".."))
"""What is not between the slashes of a relative path, in the form in which this package writes it."""


def optional(schema: Schema) -> Schema:
    """Return the schema of a value that may be null."""

    def check(value: Any) -> None:
        if value is not None:
            schema(value)

    return check


def list_of(schema: Schema) -> Schema:
    """Return the schema of a list."""

    def check(value: Any) -> None:
        if not isinstance(value, list):
            raise _expected(value, "a list")
        for at, each in enumerate(value):
            _check_entry(at, each, schema)

    return check


def mapping(key: Schema, value: Schema, *, is_empty_allowed: bool = True) -> Schema:
    """Return the schema of a dictionary with any number of entries."""

    def check(found: Any) -> None:
        if not isinstance(found, dict) or not (found or is_empty_allowed):
            raise _expected(found, "a dictionary" if is_empty_allowed else "a dictionary with entries")
        for name, entry in found.items():
            try:
                key(name)
            except InvalidError as error:
                raise InvalidError(f"has a key that {error.args[0]}") from None
            _check_entry(name, entry, value)

    return check


def record(required: Mapping[str, Schema], others: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of a dictionary with known keys; other keys may have any JSON value."""
    known = {**required, **(others or {})}
    any_value = json_value()

    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise _expected(value, "a dictionary")
        if missing := [key for key in required if key not in value]:
            raise InvalidError(f"lacks the key {missing[0]}")
        for key, entry in value.items():
            _check_entry(key, entry, known.get(key, any_value))

    return check


def json_value(max_depth: int = MAX_DEPTH) -> Schema:
    """Return the schema of any JSON value that is not nested too deeply."""

    def check(value: Any) -> None:
        level = [value]
        for _ in range(max_depth):
            level = [
                inner
                for outer in level
                if isinstance(outer, dict | list)
                for inner in (outer.values() if isinstance(outer, dict) else outer)
                if isinstance(inner, dict | list)
            ]
            if not level:
                return
        raise InvalidError(_TOO_DEEP)

    return check


def json_object(value: Any) -> None:
    """Check that a value is a dictionary that is not nested too deeply."""
    if not isinstance(value, dict):
        raise _expected(value, "a dictionary")
    json_value()(value)


def _check_entry(key: object, value: Any, schema: Schema) -> None:
    try:
        schema(value)
    except InvalidError as error:
        error.keys.append(key)
        raise
