"""Read switches and numbers that a shell or YAML passes as text.

Input: a value of a configuration. Output: a bool, an int or a float if the value can mean nothing else; otherwise the
value itself, which `StrategyConfig` then refuses.

YAML 1.1 reads ``1e-3`` as text, because it has no dot. A parser without ``type=`` passes all values as text.
"""

from __future__ import annotations

import numbers
import re

import numpy as np

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INTEGER = re.compile(r"[+-]?(0|[1-9]\d*)")  # not 010, which is 8 in YAML 1.1
_REAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")


def switch_of(value: object) -> object:
    """Return the bool that a value means: 1 and 0, a bool of NumPy, and true, yes, on, false, no and off as text."""
    if isinstance(value, str):
        text = value.strip().lower()
        return text == "1" if text in ("0", "1") else _WORDS.get(text, value)
    is_bool = isinstance(value, np.bool_) or (isinstance(value, numbers.Integral) and value in (0, 1))
    return bool(value) if is_bool else value


def word_of(value: object) -> object:
    """Return the bool that a word or a bool of NumPy means; for fields in which 1 is a number."""
    is_number = isinstance(value, str) and value.strip() in ("0", "1")
    return switch_of(value) if isinstance(value, str | np.bool_) and not is_number else value


def integer_of(value: object) -> object:
    """Return the integer that a text or an integer of NumPy means."""
    if isinstance(value, str):
        return int(value) if _INTEGER.fullmatch(value.strip()) else value
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def number_of(value: object) -> object:
    """Return the number that a text or a number of NumPy means; numbers with a dot or an exponent are floats."""
    if isinstance(value, str) and _REAL.fullmatch(value.strip()):
        return float(value)
    return float(value) if isinstance(value, np.floating) else integer_of(value)
