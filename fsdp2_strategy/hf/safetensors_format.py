"""Read and write the safetensors format: headers, offsets, and bytes at given positions.

Input: a path, or names with dtypes and shapes. Output: the location of each tensor in its file, and bytes copied
between files and memory. Independent of models and of other ranks.

A file consists of the header's length in 8 bytes (little endian), a JSON header, and the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format). Here, offsets follow from names, dtypes and shapes alone, so many
writers can fill one file without communication.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp2_strategy.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
CONVERTED = {"format": "pt"}
"""Metadata of a header, as transformers and safetensors write it. Loads apply transformers' conversions."""
OWN_NAMES = {"format": "pt", "names": "model"}
"""Metadata of a header if names and layout are the model's own. Loads apply no conversions."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Entry:
    """The location of a tensor in a file: it is row-major, and begins at byte ``offset`` of ``path``."""

    name: str
    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the full tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Entry]:
    """Return the location of each tensor of a file; check that header and file length agree.

    Raises:
        CheckpointError: the file is missing, truncated, or not a safetensors file; the message names the file.
    """
    return read_header_and_metadata(path)[0]


def read_header_and_metadata(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the location of each tensor of a file, and the header's metadata.

    Raises:
        CheckpointError: see `read_header`.
    """
    header, start, size = _header_of(path)
    metadata = header.pop("__metadata__", None)
    entries = {name: _entry(path, name, facts, start) for name, facts in header.items()}
    end = start
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != end:
            raise _invalid(path, f"{entry.name} begins at byte {entry.offset}, but the tensor before it ends at {end}")
        end = entry.offset + entry.nbytes
    if end != size:
        raise _invalid(path, f"it is {size} bytes long, but its header describes {end} bytes")
    return entries, metadata if isinstance(metadata, dict) else {}


def _header_of(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return a file's header, the offset of the first tensor, and the file's length."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            if not 10 <= start <= min(size, _MAX_HEADER_BYTES):
                raise _invalid(path, f"its header would end at byte {start}, but the file has {size} bytes")
            header = json.loads(file.read(start - 8), object_pairs_hook=_reject_duplicates)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}. Add the file, or name another folder.") from error
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _invalid(path, "its header is not a JSON object")
    return header, start, size


def _reject_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _entry(path: Path, name: str, facts: object, start: int) -> Entry:
    if not isinstance(facts, dict) or facts.keys() != {"dtype", "shape", "data_offsets"}:
        raise _invalid(path, f"the header's entry of {name} is {facts!r}")
    dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"cannot read {path}: {name} has the dtype {dtype!r}, expected one of {', '.join(DTYPES)}. Convert the "
            "file, or load it with the library that wrote it."
        )
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [-1]
    if any(type(n) is not int or n < 0 for n in numbers) or len(offsets) != 2:
        raise _invalid(path, f"the header's entry of {name} is {facts!r}")
    entry = Entry(name, path, start + offsets[0], DTYPES[dtype], tuple(shape))
    if entry.nbytes != offsets[1] - offsets[0]:
        raise _invalid(path, f"{name} has {offsets[1] - offsets[0]} bytes, but its shape {shape} needs {entry.nbytes}")
    return entry


def _invalid(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"cannot read {path}: {reason}, expected a complete safetensors file. Copy or download it again."
    )


def lay_out(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Entry]]:
    """Return the header of a new file, with its length in front, and the location of each tensor; deterministic.

    Tensors are sorted by item size, largest first, then by name. So each tensor is aligned to its item size.

    Raises:
        CheckpointError: the format does not support a dtype.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        dtype, shape = tensors[name]
        if dtype not in _NAMES:
            raise CheckpointError(
                f"cannot write {name}: its dtype is {dtype}, expected one that safetensors supports: "
                f"{', '.join(map(str, _NAMES))}. Pass dtype= to convert floating-point tensors."
            )
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    return prefix, {n: Entry(n, path, len(prefix) + header[n]["data_offsets"][0], *tensors[n]) for n in names}


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without a copy; writing to them changes the tensor."""
    flat = tensor.detach().reshape(-1)
    # A tensor of one element may have any stride, but `view` requires the stride 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


def read_into(fd: int, offset: int, memory: memoryview) -> None:
    """Fill ``memory`` from byte ``offset`` of an open file; threads may share the descriptor.

    Raises:
        OSError: reading failed, or the file ends too early.
    """
    while memory:
        count = os.preadv(fd, [memory], offset)
        if not count:
            raise OSError(f"the file ends at byte {offset}, expected {len(memory)} bytes more")
        memory, offset = memory[count:], offset + count


def write_from(fd: int, offset: int, memory: memoryview) -> None:
    """Write all of ``memory`` at byte ``offset`` of an open file; threads may share the descriptor.

    Raises:
        OSError: writing failed, for example because the disk is full.
    """
    while memory:
        count = os.pwritev(fd, [memory], offset)
        memory, offset = memory[count:], offset + count
