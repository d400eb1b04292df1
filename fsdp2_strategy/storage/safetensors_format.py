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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp2_strategy.errors import CheckpointError, DamageError, shown
from fsdp2_strategy.storage.file_reads import SourceFile
from fsdp2_strategy.storage.schema import InvalidError, parse_json, tensor_name

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
ROOT_NAMES = {"format": "pt", "names": "root"}
"""The same, if the names are those of the whole model, with all wrappers around a transformers model."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header, including the 8 bytes of its length; that of the library safetensors."""
_MAX_DIMS = 64
"""Maximum number of dimensions of a tensor; that of torch."""
_MAX_ELEMENTS = 1 << 62


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
    """Return the location of each tensor of a file; check that header and file length agree."""
    return read_header_and_metadata(path)[0]


def read_header_and_metadata(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the location of each tensor of a file, and the header's metadata."""
    try:
        with SourceFile(path) as file:
            size = file.size
            start = 8 + int.from_bytes(file.read(lambda fd: os.pread(fd, 8, 0)), "little")
            _check_start(path, start, size)
            content = bytearray(start - 8)
            file.read(lambda fd: read_into(fd, 8, memoryview(content)))
    except OSError as error:
        text = error.strerror or str(error)
        raise CheckpointError(f"cannot read {path}: {text}. Add the file, or name another folder.") from error
    return _parse(path, bytes(content), size)


def tensors_in(content: bytes, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata in the content of a file that was read from ``path``."""
    start = 8 + int.from_bytes(content[:8], "little")
    try:
        _check_start(path, start, len(content))
        entries, metadata = _parse(path, content[8:start], len(content))
    except CheckpointError as error:
        raise DamageError(str(error)) from error
    tensors = {}
    for name, entry in entries.items():
        tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
        memory_of(tensors[name])[:] = memoryview(content)[entry.offset : entry.offset + entry.nbytes]
    return tensors, metadata


def _check_start(path: Path, start: int, size: int) -> None:
    if not 10 <= start <= min(size, MAX_HEADER_BYTES):
        raise _invalid(path, f"its header would end at byte {start}, but the file has {size} bytes")


def _parse(path: Path, content: bytes, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the entries and the metadata of a header, which is ``content`` without the 8 bytes before it."""
    start = 8 + len(content)
    try:
        header = parse_json(content)
    except InvalidError as error:
        raise _invalid(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _invalid(path, "its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _invalid(path, f"the metadata in its header are {shown(metadata)}")
    entries = {name: _entry(path, name, facts, start) for name, facts in header.items()}
    end = start
    for begin, stop, name in sorted((e.offset, e.offset + e.nbytes, name) for name, e in entries.items()):
        if begin != end:
            raise _invalid(path, f"{name} begins at byte {begin}, but the tensor before it ends at {end}")
        end = stop
    if end != size:
        raise _invalid(path, f"it is {size} bytes long, but its header describes {end} bytes")
    return entries, metadata


def _entry(path: Path, name: str, facts: object, start: int) -> Entry:
    try:
        tensor_name(name)
    except InvalidError as error:
        raise _invalid(path, f"the name of a tensor {error}") from error
    if not isinstance(facts, dict) or facts.keys() != {"dtype", "shape", "data_offsets"}:
        raise _invalid(path, f"the header's entry of {name} is {shown(facts)}")
    dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"cannot read {path}: {name} has the dtype {shown(dtype)}, expected one of {', '.join(DTYPES)}. Convert "
            "the file, or load it with the library that wrote it."
        )
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2 or len(shape) > _MAX_DIMS:
        raise _invalid(path, f"the header's entry of {name} is {shown(facts)}")
    if any(type(n) is not int or not 0 <= n < 1 << 64 for n in (*shape, *offsets)):
        raise _invalid(path, f"the header's entry of {name} is {shown(facts)}")
    if math.prod(n for n in shape if n) > _MAX_ELEMENTS:
        raise _invalid(path, f"{name} has the shape {shown(shape)}, which has too many elements")
    entry = Entry(name, path, start + offsets[0], DTYPES[dtype], tuple(shape))
    if entry.nbytes != offsets[1] - offsets[0]:
        needed = f"{offsets[1] - offsets[0]} bytes, but its shape {shown(shape)} needs {entry.nbytes}"
        raise _invalid(path, f"{name} has {needed}")
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


def read_parts_into(fd: int, offset: int, parts: Sequence[memoryview]) -> None:
    """Fill each of ``parts`` with the bytes after those of the one before it, with one system call if possible."""
    count = os.preadv(fd, parts, offset) if len(parts) > 1 else 0
    for part in parts:
        if count < len(part):  # the first part, or the system read less than was requested
            read_into(fd, offset + count, part[count:])
        offset, count = offset + len(part), max(0, count - len(part))


def read_into(fd: int, offset: int, memory: memoryview) -> None:
    """Fill ``memory`` from byte ``offset`` of an open file; threads may share the descriptor."""
    while memory:
        count = os.preadv(fd, [memory], offset)
        if not count:
            raise OSError(f"the file ends at byte {offset}, expected {len(memory)} bytes more")
        memory, offset = memory[count:], offset + count


def write_from(fd: int, offset: int, memory: memoryview) -> None:
    """Write all of ``memory`` at byte ``offset`` of an open file; threads may share the descriptor."""
    while (count := os.pwritev(fd, (memory,), offset)) < len(memory):
        memory, offset = memory[count:], offset + count
