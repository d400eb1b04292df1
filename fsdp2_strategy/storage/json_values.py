"""Represent the values of schedules and optimizers that JSON lacks, exactly.

Input: a state with infinite floats, keys that are not strings, or tensors of a few numbers. Output: the same state as
strict JSON, in which each of these is a dictionary with one key (a tag), and back.

For example, ReduceLROnPlateau holds inf until its first metric, MultiStepLR a Counter with integer keys, and an
optimizer for CUDA graphs a tensor as its learning rate. Other values are represented as before, so tuples become lists.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fsdp2_strategy.errors import dtype_text, shown
from fsdp2_strategy.storage.schema import InvalidError

_FLOAT, _DICT, _COUNTER, _TENSOR = (f"__{name}__" for name in ("float", "dict", "counter", "tensor"))
_TAGS = {_FLOAT, _DICT, _COUNTER, _TENSOR}
_MAX_ELEMENTS = 1024
"""Larger tensors do not belong into a small file; `check_json` names them."""


def as_json_values(value: Any) -> Any:
    """Return a value with tags in place of what JSON lacks; unknown objects are returned unchanged."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.Tensor) and value.numel() <= _MAX_ELEMENTS and not value.is_complex():
        local = value.detach().cpu()
        listed = as_json_values(local.double().tolist() if local.is_floating_point() else local.tolist())
        return {_TENSOR: listed, "dtype": dtype_text(local.dtype)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, list | tuple):
        return [as_json_values(each) for each in value]
    return _tagged(value) if isinstance(value, dict) else value


def _tagged(value: dict[Any, Any]) -> dict[str, Any]:
    pairs = [[as_json_values(key), as_json_values(entry)] for key, entry in value.items()]
    if isinstance(value, Counter):
        return {_COUNTER: pairs}
    is_plain = all(isinstance(key, str) for key in value) and not _TAGS & value.keys()
    return dict(pairs) if is_plain else {_DICT: pairs}


def from_json_values(value: Any) -> Any:
    """Return a value that `as_json_values` represented; tuples have become lists."""
    if isinstance(value, list):
        return [from_json_values(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_FLOAT}:
        if value[_FLOAT] not in ("inf", "-inf", "nan"):
            raise _not_written(value)
        return float(value[_FLOAT])
    if value.keys() == {_TENSOR, "dtype"}:
        return _tensor(value)
    for tag, kind in ((_DICT, dict), (_COUNTER, Counter)):
        if value.keys() == {tag}:
            return kind(dict(_pairs(value, tag)))
    return {key: from_json_values(entry) for key, entry in value.items()}


def _tensor(value: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, value["dtype"], None) if isinstance(value["dtype"], str) else None
    if not isinstance(dtype, torch.dtype):
        raise _not_written(value)
    try:
        return torch.tensor(from_json_values(value[_TENSOR]), dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _not_written(value) from error


def _pairs(value: dict[str, Any], tag: str) -> Iterator[tuple[Any, Any]]:
    for pair in value[tag] if isinstance(value[tag], list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise _not_written(value)
        key = from_json_values(pair[0])
        key = tuple(key) if isinstance(key, list) else key
        try:
            hash(key)
        except TypeError as error:
            raise _not_written(value) from error
        yield key, from_json_values(pair[1])


def _not_written(value: object) -> InvalidError:
    return InvalidError(f"has the entry {shown(value)}, which this package does not write")
