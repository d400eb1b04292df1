"""Write small files (strict JSON, text, bytes) and fsync them.

Input: plain values. Output: files, or an error that names the key of a value that JSON cannot represent.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from fsdp2_strategy.errors import CheckpointError, shortened
from fsdp2_strategy.storage.schema import MAX_DEPTH


def write_json(path: Path, content: Any) -> None:
    """Write a value as strict JSON and fsync the file."""
    write_text(path, as_json(content))


def as_json(content: Any) -> str:
    """Return a value as strict JSON text, indented by one blank for each level."""
    return _indented(content, "\n") + "\n"


def _indented(value: Any, newline: str) -> str:
    """Return what ``json.dumps`` with ``indent=1`` does, which calls a generator for each value and level.

    A list or dict without inner lists and dicts is encoded by one call of json's encoder in C.
    """
    if not value or not isinstance(value, dict | list | tuple):
        return json.dumps(value, allow_nan=False)
    inner = newline + " "
    begin, end = "{}" if isinstance(value, dict) else "[]"
    values = value.values() if isinstance(value, dict) else value
    if any(issubclass(each, dict | list | tuple) for each in set(map(type, values))):
        parts = [_indented(each, inner) for each in values]
        if isinstance(value, dict):
            keys = [json.dumps({key: 0})[1:-1].removesuffix("0") for key in value]  # a key that is a number is quoted
            parts = [key + part for key, part in zip(keys, parts, strict=True)]
        return begin + inner + ("," + inner).join(parts) + newline + end
    text = json.dumps(value, separators=("," + inner, ": "), allow_nan=False)
    return text[0] + inner + text[1:-1] + newline + text[-1]


def write_text(path: Path, text: str) -> None:
    """Write a text file and fsync it."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and fsync it."""
    path.write_bytes(content)
    fsync(path)


def fsync(path: Path) -> None:
    """Flush a file or folder from the page cache to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_json(value: Any, where: str, levels: int = MAX_DEPTH) -> None:
    """Raise if JSON cannot represent ``value``; tuples are allowed, but are read back as lists."""
    problem = ""
    if isinstance(value, dict | list | tuple) and not levels:
        where, problem = shortened(where), f"is nested more than {MAX_DEPTH} levels deep, expected fewer"
    elif isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                problem = f"has the key {key!r} of type {type(key).__name__}, expected a string"
                break
            check_json(entry, f"{where}[{key!r}]", levels - 1)
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            check_json(entry, f"{where}[{i}]", levels - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        problem = f"is {value}, expected a finite number"
    elif not (value is None or type(value) in (bool, int, float, str)):
        problem = f"is a {type(value).__name__}, expected a type that JSON supports"
    if problem:
        raise CheckpointError(
            f"cannot save: {where} {problem}. Checkpoints do not pickle objects: store numbers, strings, lists and "
            "dictionaries (tensor.tolist(), str(path))."
        )
