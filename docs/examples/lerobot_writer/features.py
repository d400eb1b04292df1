"""Check the features and values of a data set before they are written, and convert the values to table columns.

Input: a caller's features and their values. Output: checked features and values, a schema, and columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fsdp2_strategy.errors import DataError
from lerobot_writer.mp4 import encode_png

Feature = dict[str, Any]

CAMERAS = ("video", "image")

# Columns that every data set has.
STANDARD_COLUMNS: dict[str, Feature] = {
    name: {"dtype": dtype, "shape": [1], "names": None}
    for name, dtype in {
        "timestamp": "float32",
        "frame_index": "int64",
        "episode_index": "int64",
        "index": "int64",
        "task_index": "int64",
    }.items()
}

_TYPES: dict[str, pa.DataType] = {
    name: pa.type_for_alias(name) for name in ("float32", "float64", "int32", "int64", "uint8", "bool", "string")
}
_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def checked_feature(name: str, feature: Mapping[str, Any]) -> Feature:
    """Return a feature in the form of ``meta/info.json``.

    Raises:
        DataError: the name is empty, reserved or contains "/", or the dtype or shape is not supported.
    """
    dtype, shape = feature.get("dtype"), [int(n) for n in feature.get("shape", ())]
    cannot = f"cannot write a data set: feature {name!r}"
    if name in STANDARD_COLUMNS or "/" in name or not name:
        raise DataError(f"{cannot} has a name that is empty, reserved or contains '/', expected another. Rename it.")
    if dtype not in (*_TYPES, *CAMERAS):
        raise DataError(f"{cannot} has dtype {dtype!r}, expected one of {[*_TYPES, *CAMERAS]}. Convert it.")
    if dtype in CAMERAS:
        is_image = len(shape) == 3 and 3 in (shape[0], shape[-1]) and min(shape) > 0
        if not is_image or (dtype == "video" and any(n % 2 for n in size_of(shape))):
            raise DataError(
                f"{cannot} has shape {tuple(shape)}, expected (height, width, 3) or (3, height, width); "
                "videos need an even height and width. Crop or scale the images."
            )
    elif len(shape) != 1 or shape[0] < 1 or (dtype == "string" and shape != [1]):
        raise DataError(f"{cannot} has shape {tuple(shape)}, expected (n,), or (1,) for strings. Flatten it.")
    return {"dtype": dtype, "shape": shape, "names": feature.get("names")}


def checked_values(name: str, feature: Feature, value: Any) -> Any:
    """Return the values of a feature as a list of strings or an array; images are returned with their channels last.

    Raises:
        DataError: the values have another dtype or shape than the feature.
    """
    dtype, shape = feature["dtype"], tuple(feature["shape"])
    if dtype == "string":
        if isinstance(value, str) or not all(isinstance(text, str) for text in value):
            raise DataError(
                f"cannot add an episode: {name!r} is not a sequence of strings, expected one string per frame. "
                "Convert it."
            )
        return list(value)
    array = np.asarray(value)
    stored = "uint8" if dtype in CAMERAS else dtype
    if array.dtype != stored or (array.shape[1:] != shape and (shape != (1,) or array.ndim != 1)):
        raise DataError(
            f"cannot add an episode: {name!r} is {array.dtype} of shape {array.shape}, expected {stored} of shape "
            f"{('T', *shape)}. Convert it."
        )
    if dtype in CAMERAS:
        return array if shape[-1] == 3 else np.moveaxis(array, 1, -1)
    return array.reshape(-1) if shape == (1,) else array


def size_of(shape: list[int]) -> tuple[int, int]:
    """Return (height, width) of images with this shape, channels first or last."""
    height, width = shape[:2] if shape[-1] == 3 else shape[1:]
    return height, width


def schema_of(features: Mapping[str, Feature]) -> pa.Schema:
    """Return the schema of the tables, with the metadata of Hugging Face datasets."""
    fields: list[tuple[str, pa.DataType]] = []
    described: dict[str, Any] = {}
    for name, feature in features.items():
        dtype, (n, *_) = feature["dtype"], feature["shape"]
        scalar = {"dtype": dtype, "_type": "Value"}
        if dtype == "video":
            continue
        if dtype == "image":
            fields.append((name, _IMAGE))
            described[name] = {"_type": "Image"}
        elif n == 1:
            fields.append((name, _TYPES[dtype]))
            described[name] = scalar
        else:
            fields.append((name, pa.list_(_TYPES[dtype], n)))
            described[name] = {"feature": scalar, "length": n, "_type": "List"}
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": described}})})


def column(values: Any, kind: pa.DataType) -> pa.Array:
    """Convert checked values to a column of the schema."""
    if kind == _IMAGE:
        files = [{"bytes": png, "path": f"frame-{i:06d}.png"} for i, png in enumerate(encode_png(values))]
        return pa.array(files, type=kind)
    if pa.types.is_fixed_size_list(kind):
        flat: NDArray[Any] = np.ascontiguousarray(values).reshape(-1)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat, type=kind.value_type), type=kind)
    return pa.array(values, type=kind)
