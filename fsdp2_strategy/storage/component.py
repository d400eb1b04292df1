"""Lay out a folder of safetensors files, and find this rank's share of them.

Input: tensors of any model, and the regions of the files. Output: a `Component`: the files, and this rank's write
requests.

[Note: layout cache] A layout contains no values, and a run saves the same models and optimizers many times. So the most
recently used layouts are cached. The key contains everything that a layout depends on: the arguments of
`FileLayout.of`, the rank and the limits in `sizes`; of the tensors only names, shapes, dtypes and placements.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch.distributed.tensor import DTensor

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.process_group import is_rank_0, rank, world_size
from fsdp2_strategy.distributed.torch_internals import specs_of
from fsdp2_strategy.storage.checksums import Block, blocks_of
from fsdp2_strategy.storage.json_files import write_text
from fsdp2_strategy.storage.output_files import File, create_files, file_bytes, files_for, index_of
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.safetensors_format import CONVERTED, Entry
from fsdp2_strategy.storage.shares import (
    Share,
    needs_gather,
    own_shares,
    values_of_shares,
    write_requests,
)
from fsdp2_strategy.storage.write import WritePlan, WriteRequest, force_to_disk, write_planned


@dataclass(frozen=True)
class FileLayout:
    """The files of a folder, and this rank's share of them; does not depend on the tensors' values."""

    regions: Mapping[str, Region]
    """All tensors of the files, by name in the files; their sources are names in `Component.tensors`."""
    files: Sequence[File]
    """Paths are relative to the folder."""
    gathered: Mapping[str, Region]
    """The regions that are written from gathered full tensors; ranks write the others without a gather."""
    shares: Sequence[Share]
    """The boxes of the other regions that this rank writes."""
    write_plan: WritePlan
    """How the values of the shares are written."""
    derived: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
    """What a planner derives from the layout, by keys of its own: the next save of the same layout uses it again."""

    @cached_property
    def digest(self) -> str:
        """A digest of the headers of all files: equal on all ranks if names, shapes and dtypes are."""
        headers = hashlib.sha256()
        for file in self.files:
            headers.update(str(file.path).encode() + file.header)
        return headers.hexdigest()

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        regions: Mapping[str, Region] | None,
        stem: str,
        max_file_bytes: int | None,
        metadata: Mapping[str, str],
    ) -> FileLayout:
        """Return the layout of a folder, from the cache if possible; see [Note: layout cache]."""
        of_files = (sizes.FILE_COUNT, sizes.FILE_BYTES, sizes.MIN_FILE_LIMIT_BYTES)
        of_runs = (sizes.SHORTEST_RUN_BYTES, sizes.BLOCK_BYTES, sizes.SMALL_BLOCK_BYTES, sizes.SMALL_WRITE_BYTES)
        limits = (*of_files, *of_runs, sizes.STRIDED_ROW_BYTES)
        kind = (stem, max_file_bytes, *metadata.items(), *limits, rank(), id(regions))
        seen = _Seen(tensors)
        last = _last_seen.get((*kind, *seen.first))
        if last is not None and last[0].is_same(seen):
            return last[1][1]
        key = (*kind, *_layout_key(tensors))
        known = _layouts.pop(key, None)
        if known is None:
            _limit(_layouts)
            given = regions
            if regions is None:
                regions = {name: Region.of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
            regions = dict(sorted(regions.items()))
            files = files_for(Path(), stem, regions, max_file_bytes or file_bytes(regions), metadata=metadata)
            direct = {name: region for name, region in regions.items() if not needs_gather(region, tensors)}
            gathered = {name: region for name, region in regions.items() if name not in direct}
            shares = own_shares(direct, tensors)
            entries = {name: entry for file in files for name, entry in file.entries.items()}
            plan = WritePlan(write_requests([(each, _meta_values(each, tensors)) for each in shares], entries))
            known = given, cls(regions, files, gathered, shares, plan)
        _layouts[key] = known  # most recently used last
        _last_seen.pop((*kind, *seen.first), None)
        _limit(_last_seen)
        _last_seen[*kind, *seen.first] = seen, known
        return known[1]


def _meta_values(share: Share, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor like the values of a share, without values."""
    return torch.empty([length for _, length in share.box], dtype=tensors[share.source].dtype, device="meta")


def _limit(cache: dict[Any, Any]) -> None:
    """Make room for another entry."""
    while len(cache) >= _MAX_LAYOUTS:
        del cache[next(iter(cache))]


class _Seen:
    """The tensors that a layout was asked for: for the same objects, it is found without hashing a key."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        specs = specs_of(tensors.values())
        self.first = len(tensors), next(iter(tensors), None), id(next(iter(specs), None))
        """Distinguishes models."""
        self._names, self._dtypes = list(tensors), [tensor.dtype for tensor in tensors.values()]
        self._shapes = [t.shape for t, spec in zip(tensors.values(), specs, strict=True) if spec is None]
        self._specs = [None if spec is None else ref(spec) for spec in specs]
        """They refer to process groups, so they are not kept."""

    def is_same(self, other: _Seen) -> bool:
        """Return whether the names, and what the layout depends on, are the same."""
        of_plain = self._names == other._names and self._dtypes == other._dtypes and self._shapes == other._shapes
        return of_plain and self._specs == other._specs and all(each is None or each() for each in self._specs)


_MAX_LAYOUTS = 16
"""Maximum number of layouts in the cache; each component has one. A layout and what is derived from it take about three
kilobytes per tensor."""
_last_seen: dict[object, tuple[_Seen, tuple[object, FileLayout]]] = {}
"""What the layouts of the cache were last asked for."""
_layouts: dict[object, tuple[object, FileLayout]] = {}
"""The cache. An entry also keeps the regions that were passed in, because their `id` in the key must not be reused."""


def _layout_key(tensors: Mapping[str, torch.Tensor]) -> list[object]:
    """Return the properties of the tensors that determine a layout.

    Placements are replaced by their index among the different ones: hashing them takes a call for each tensor.
    """
    key: list[object] = []
    positions: dict[int, object] = {}
    placements: dict[object, int] = {}
    for name, tensor in tensors.items():
        key += (name, tensor.shape, tensor.dtype)
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            if id(mesh) not in positions:
                positions[id(mesh)] = (mesh.shape, tuple(mesh.get_coordinate() or ()))
            key += (positions[id(mesh)], placements.setdefault(tensor.placements, len(placements)))
    return [*key, *placements]


@dataclass(frozen=True)
class Component:
    """One component of a checkpoint: a folder of files, and the tensors to write to it."""

    folder: Path
    stem: str
    tensors: Mapping[str, torch.Tensor]
    layout: FileLayout
    staged: Sequence[torch.Tensor] | None = None
    """Copies of the values of the layout's shares, in an asynchronous save."""
    staged_gathered: Sequence[WriteRequest] = ()
    """Write requests for this rank's share of the gathered regions, with copied values, in an asynchronous save."""
    is_signed: bool = False
    """Whether blocks get SHA-256 digests, too; see [Note: signature] in `signature`."""

    @classmethod
    def of(
        cls,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        regions: Mapping[str, Region] | None = None,
        *,
        stem: str = "model",
        max_file_bytes: int | None = None,
        metadata: Mapping[str, str] = CONVERTED,
    ) -> Component:
        """Lay out a folder. Only names and full sizes decide which tensor is in which file."""
        return cls(folder, stem, tensors, FileLayout.of(tensors, regions, stem, max_file_bytes, metadata))

    @cached_property
    def files(self) -> list[File]:
        """The files, with paths in the folder; those of their entries are relative to it."""
        return [replace(file, path=self.folder / file.path) for file in self.layout.files]

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The location of each tensor in the files, by name in the files."""
        moved = [file.moved_to(self.folder) for file in self.layout.files]
        return {name: entry for file in moved for name, entry in file.entries.items()}

    def values(self) -> Sequence[torch.Tensor]:
        """Return the values of the layout's shares, in their order."""
        if self.staged is not None:
            return self.staged
        return [values for found in values_of_shares(self.layout.shares, self.tensors) for _, values in found]

    def write_requests(self) -> list[WriteRequest]:
        """Return the write requests of this rank whose values need no gather, or have been gathered already."""
        shares = zip(self.layout.shares, self.values(), strict=True)
        return [*write_requests(shares, self.entries), *self.staged_gathered]

    @property
    def total_bytes(self) -> int:
        """Total size of the files."""
        return sum(file.nbytes for file in self.layout.files)

    @property
    def digest(self) -> str:
        """What all ranks have in common: the name of the folder, and the digest of the layout."""
        return f"{self.folder.name} {self.layout.digest}"

    def write_index(self) -> None:
        """Write the index of the files, if there are several; one rank calls it."""
        if len(self.files) > 1:
            index = json.dumps(index_of(self.files), indent=2) + "\n"
            write_text(self.folder / f"{self.stem}.safetensors.index.json", index)


def write_local(components: Sequence[Component]) -> dict[Path, list[Block]]:
    """Create some of the files, write this rank's ranges of all files, and fsync what it created or wrote.

    Return the checksums of the bytes that this rank wrote; on rank 0, also those of the headers of all files.
    """
    files = [file for component in components for file in component.files]
    is_signed = any(component.is_signed for component in components)

    def write() -> dict[Path, list[Block]]:
        planned = [(each.folder, each.layout.write_plan, each.values()) for each in components]
        gathered = [request for component in components for request in component.staged_gathered]
        return write_planned(planned, gathered, is_signed=is_signed)

    return write_files(files, write, is_signed=is_signed, has_headers=is_rank_0())


def write_files(
    files: Sequence[File], write: Callable[[], dict[Path, list[Block]]], *, is_signed: bool, has_headers: bool
) -> dict[Path, list[Block]]:
    """Do what `write_local` does with files; ``write`` writes this rank's ranges; ``has_headers``: checksum headers."""
    first, end = (n * len(files) // world_size() for n in (rank(), rank() + 1))
    own = files[first:end]
    create_files(own)
    blocks: dict[Path, list[Block]] = {}
    if has_headers:
        blocks = {file.path: blocks_of(file.header, is_signed=is_signed) for file in files}
    written = write()
    for path, of_file in written.items():
        blocks.setdefault(path, []).extend(of_file)
    force_to_disk({*written, *(file.path for file in own)})  # other files may not exist yet
    return blocks
