"""Turn arguments and results into JSON content and tensors, and back; check what another process describes.

Input: values, or what another process sent. Output: JSON content and tensors, or values.

Nothing is pickled, and nothing names a class: what arrives is a number, a text, None, a tensor, or a list, tuple or
mapping of them. Counts, nesting and sizes have limits, so that a short message cannot cause much work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.errors import RolloutError, dtype_text, shown

_DEEPEST = 64
"""Maximum nesting of a value."""
_MOST_DIMENSIONS = 64
_MOST_BYTES = 1 << 42
"""Maximum size of the tensors of a message."""
_DTYPES = {
    dtype_text(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")  # quantized tensors also have scales
}


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be sent as dtype, shape and bytes: dense, not on meta, not quantized, no subclass."""
    is_dense = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    return is_dense and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def describe(tensors: Sequence[torch.Tensor]) -> list[tuple[str, list[int]]]:
    """Return the dtypes and shapes of tensors, as they are sent; raise if they are too many for one message."""
    if len(tensors) > sizes.MESSAGE_TENSORS:
        raise RolloutError(
            f"cannot send a message: it has {len(tensors)} tensors, expected at most {sizes.MESSAGE_TENSORS}. Stack "
            "tensors of equal shape."
        )
    return [(dtype_text(tensor.dtype), list(tensor.shape)) for tensor in tensors]


def described(header: Mapping[str, Any], count: int) -> list[tuple[torch.dtype, list[int]]]:
    """Return the ``count`` dtypes and shapes in a received header; raise ValueError if they are malformed."""
    given = header.get("tensors", [])
    if not isinstance(given, list) or len(given) != count:
        found = f"{len(given)} tensors" if isinstance(given, list) else f"a {type(given).__name__} of tensors"
        raise ValueError(f"{found} in a header, expected {count}")
    tensors, total = [], 0
    for each in given:
        if not isinstance(each, list) or len(each) != 2 or not isinstance(each[0], str) or each[0] not in _DTYPES:
            raise ValueError(f"a tensor with the description {shown(each)}")
        dtype, shape = _DTYPES[each[0]], checked_shape(each[1])
        total += math.prod(shape) * dtype.itemsize
        if total > _MOST_BYTES:
            raise ValueError(f"tensors of {total} bytes, expected at most {_MOST_BYTES}")
        tensors.append((dtype, shape))
    return tensors


def checked_shape(shape: object) -> list[int]:
    """Return a received shape; raise ValueError if it is malformed or too large."""
    is_shape = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS
    if not is_shape or any(type(size) is not int or not 0 <= size < 1 << 62 for size in shape):  # type: ignore[attr-defined]
        raise ValueError(f"the shape {shown(shape)}")
    if math.prod(shape) >= 1 << 62 or math.prod(filter(None, shape)) >= 1 << 62:  # type: ignore[call-overload]
        raise ValueError(f"the shape {shown(shape)}")  # torch multiplies the strides of empty tensors, too
    return shape  # type: ignore[return-value]


def to_json(value: Any, what: str, tensors: list[torch.Tensor], depth: int = 0) -> Any:
    """Return a value as JSON content, and append its tensors to ``tensors``; ``what`` is its name in errors."""
    if depth > _DEEPEST:
        raise RolloutError(
            f"cannot send {what[:100]}: it is nested more than {_DEEPEST} times, expected at most that. Pass flat "
            "lists, or tensors."
        )
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor) and is_plain(value):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        keys = [to_json(key, f"a key of {what}", tensors, depth + 1) for key in value]
        values = [to_json(inner, f"{what}[{key!r}]", tensors, depth + 1) for key, inner in value.items()]
        return {"dict": list(zip(keys, values, strict=True))}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [to_json(v, f"{what}[{i}]", tensors, depth + 1) for i, v in enumerate(value)]}
    raise RolloutError(
        f"cannot send {what}: it is a {type(value).__name__}, expected numbers, strings, None, plain dense tensors, "
        "and lists, tuples and mappings of them. Convert it (a DTensor with full_tensor()), because nothing is pickled."
    )


def from_json(value: Any, tensors: Sequence[torch.Tensor], depth: int = 0) -> Any:
    """Return the value given to `to_json`, on this device; raise LookupError, TypeError or ValueError if malformed."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth > _DEEPEST:
        raise ValueError(f"a value that is nested more than {_DEEPEST} times")
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"the value {shown(value)}")
    [(kind, inner)] = value.items()
    if kind == "tensor":
        if type(inner) is not int or not 0 <= inner < len(tensors):
            raise IndexError(f"tensor {shown(inner)} of {len(tensors)}")
        return tensors[inner].to(current_device())
    if kind not in ("dict", "list", "tuple") or not isinstance(inner, list):
        raise ValueError(f"the value {shown(value)}")
    if kind == "dict":
        return {from_json(k, tensors, depth + 1): from_json(v, tensors, depth + 1) for k, v in inner}
    return (list if kind == "list" else tuple)(from_json(v, tensors, depth + 1) for v in inner)
