"""Create the output files of a save: weights, which `write` fills, and the content of their index.

Input: the regions to write, by their names in the files. Output: files of full length with their headers. Not
collective: callers decide which rank creates which file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fsdp2_strategy import sizes
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.safetensors_format import CONVERTED, Entry, lay_out, write_from
from fsdp2_strategy.storage.write import opened


@dataclass(frozen=True)
class File:
    """A file to create: its header and the locations of its tensors, which follow the header."""

    path: Path
    name: str
    header: bytes
    entries: dict[str, Entry]
    """By name, in the order of the file."""

    @property
    def nbytes(self) -> int:
        """Length of the file in bytes."""
        last = next(reversed(self.entries.values()), None)
        return last.offset + last.nbytes if last is not None else len(self.header)

    def moved_to(self, folder: Path) -> File:
        """Return a copy of the file with its paths in a folder."""
        path = folder / self.path
        entries = {n: Entry(n, path, e.offset, e.dtype, e.shape) for n, e in self.entries.items()}
        return replace(self, path=path, entries=entries)


def files_for(
    folder: Path,
    stem: str,
    regions: Mapping[str, Region],
    max_bytes: int,
    *,
    metadata: Mapping[str, str] = CONVERTED,
) -> list[File]:
    """Distribute tensors, in their order, over files of limited size; a tensor above the limit gets its own file."""
    groups: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    size = 0
    for name, region in regions.items():
        nbytes = region.numel() * region.dtype.itemsize
        if groups[-1] and size + nbytes > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = (region.dtype, tuple(region.shape))
        size += nbytes
    files = []
    for i, group in enumerate(groups, 1):
        number = f"-{i:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        name = f"{stem}{number}.safetensors"
        path = folder / name
        files.append(File(path, name, *lay_out(path, group, metadata)))
    return files


def file_bytes(regions: Mapping[str, Region], least_bytes: int | None = None) -> int:
    """Return a size limit of files that is small enough for ranks and threads to write several in parallel.

    ``least_bytes`` is its lower bound, by default that of a checkpoint's files.
    """
    total = sum(region.numel() * region.dtype.itemsize for region in regions.values())
    least_bytes = sizes.MIN_FILE_LIMIT_BYTES if least_bytes is None else least_bytes
    return min(sizes.FILE_BYTES, max(least_bytes, -(-total // sizes.FILE_COUNT)))


def index_of(files: Sequence[File]) -> dict[str, Any]:
    """Return the content of the index, which maps each tensor to its file."""
    entries = [(name, entry, file) for file in files for name, entry in file.entries.items()]
    return {
        "metadata": {
            "total_parameters": sum(math.prod(entry.shape) for _, entry, _ in entries),
            "total_size": sum(entry.nbytes for _, entry, _ in entries),
        },
        "weight_map": {name: file.name for name, _, file in sorted(entries, key=lambda e: e[0])},
    }


def create_files(files: Iterable[File]) -> None:
    """Create files with their full length and their header; bytes that other ranks have written already are kept."""
    for file in files:
        with opened(file.path, os.O_WRONLY | os.O_CREAT) as fd:
            os.ftruncate(fd, file.nbytes)
            write_from(fd, 0, memoryview(file.header))


def check_shared_folder(files: Iterable[File]) -> None:
    """Check that this rank sees the files that another rank created."""
    for file in files:
        try:
            with file.path.open("rb") as stream:
                found = stream.read(len(file.header))
        except FileNotFoundError:
            found = b""
        if found != file.header:
            raise CheckpointError(
                f"cannot save: {file.path} is missing or differs from the file that another rank created, expected a "
                "folder that all ranks see. Save to a shared file system."
            )
