"""Describe and read the tensors of other systems' checkpoints, whole or in shards, each rank its own elements.

Input: the sources of a `Foreign`. Output: trees of `StoredTensor`s and plain values, and tensors filled from them.

[Note: trees] The content of a source is a tree of dictionaries: lists with tensors or dictionaries in them are
dictionaries with the keys 0, 1, .... Dots in keys are no levels. The tree of files per rank has each tensor once, with
the shards of all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fsdp2_strategy.checkpoint.foreign.dcp_files import load_dcp, metadata_of
from fsdp2_strategy.checkpoint.foreign.pickles import PickledShards, UnknownObject, unpickle_file, unreadable
from fsdp2_strategy.checkpoint.foreign.sources import Source
from fsdp2_strategy.distributed.torch_internals import local_of
from fsdp2_strategy.errors import CheckpointError, FSDP2StrategyError
from fsdp2_strategy.model.boxes import Box, box_of, shard_at
from fsdp2_strategy.model.shards import local_shard
from fsdp2_strategy.storage.file_reads import read_file
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.safetensors_format import Entry, read_header
from fsdp2_strategy.storage.verified_read import Reader, ReadRequest

Tree = dict[str | int, Any]
"""See [Note: trees]."""

_MOST_JSON_BYTES = 64 << 20
_MOST_DEPTH = 32


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a checkpoint of another system."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_number(self) -> bool:
        """Whether it has one element, and so is the value of a setting or a counter."""
        return self.shape in ((), (1,))


@dataclass(frozen=True, eq=False)
class PickledTensor(StoredTensor):
    """A tensor in files of ``torch.save``, as boxes of the full tensor."""

    parts: tuple[tuple[Box, torch.Tensor], ...]
    of_ranks: tuple[torch.Tensor, ...] = ()
    """The tensor of each rank's file, if these are plain tensors in several files."""

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy the elements that this rank holds of a tensor."""
        local = local_of(target)
        for own in local_shard(target).boxes:
            for box, stored in self.parts:
                common = _intersection(own.full, box)
                if common is not None:
                    inside = box_of(local, own.local)
                    box_of(inside, _relative(common, own.full)).copy_(box_of(stored, _relative(common, box)))


@dataclass(frozen=True, eq=False)
class DcpTensor(StoredTensor):
    """A tensor in a folder of ``torch.distributed.checkpoint``."""

    folder: Path
    name: str


@dataclass(frozen=True, eq=False)
class SafetensorsTensor(StoredTensor):
    """A tensor in a safetensors file."""

    entry: Entry


def read_into(pairs: Sequence[tuple[StoredTensor, torch.Tensor]], *, no_dist: bool = False) -> None:
    """Read stored values into tensors, each rank its own elements; collective unless ``no_dist``."""
    of_folder: dict[Path, dict[str, torch.Tensor]] = {}
    requests = []
    for stored, target in pairs:
        if isinstance(stored, DcpTensor):
            of_folder.setdefault(stored.folder, {})[stored.name] = target
        elif isinstance(stored, PickledTensor):
            stored.copy_to(target)
        elif isinstance(stored, SafetensorsTensor):
            region = Region.of(stored.entry, stored.shape, target.dtype)
            local = local_of(target)
            requests += [
                ReadRequest(stored.entry.name, region, own.full, box_of(local, own.local))
                for own in local_shard(target).boxes
            ]
    if requests:
        with Reader("loading") as reader:
            reader.read(requests)
    for folder, state in of_folder.items():
        load_dcp(folder, dict(state), no_dist=no_dist)


def values_of(tensors: Sequence[StoredTensor]) -> list[Any]:
    """Return the values of tensors with one element as numbers; not collective."""
    read = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    read_into(list(zip(tensors, read, strict=True)), no_dist=True)
    return [tensor.item() for tensor in read]


def read_tree(source: Source) -> Tree:
    """Return the content of a source below the key of its role; not collective.

    Raises:
        CheckpointError: a file is missing or corrupt.
    """
    path = source.paths[0]
    try:
        if source.form == "dcp":
            tree = _dcp_tree(path)
        elif source.form == "weights":
            tree = _weights_tree(path)
        elif source.form == "json":
            tree = _json_tree(path)
        else:
            merged = _merged([unpickle_file(each) for each in source.paths], path)
            tree = merged if isinstance(merged, dict) else {"value": merged}
    except (FSDP2StrategyError, MemoryError):
        raise
    except Exception as error:  # corrupt bytes can be a pickle of anything
        raise unreadable(path, error) from error
    return {source.role: tree} if source.role else tree


def _json_tree(path: Path) -> Tree:
    try:
        content = json.loads(read_file(path, _MOST_JSON_BYTES, follow_link=True))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}, expected JSON. Copy the file again.") from error
    return dict(content) if isinstance(content, dict) else {"value": content}


def _weights_tree(path: Path) -> Tree:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    entries = {name: entry for file in files for name, entry in read_header(file).items()}
    return {name: SafetensorsTensor(entry.shape, entry.dtype, entry) for name, entry in entries.items()}


def _dcp_tree(folder: Path) -> Tree:
    metadata = metadata_of(folder)
    entries = metadata.state_dict_metadata
    planned = metadata.planner_data or {}
    names = [*(name for name in planned if name in entries), *(name for name in entries if name not in planned)]
    values = {name: None for name in names if isinstance(entries[name], BytesStorageMetadata)}
    read = load_dcp(folder, dict(values), no_dist=True) if values else {}
    tree: Tree = {}
    for name in names:
        entry = entries[name]
        path = planned.get(name, (name,))
        if isinstance(entry, TensorStorageMetadata):
            _put(tree, path, DcpTensor(tuple(entry.size), entry.properties.dtype, folder, name))
        else:
            _put(tree, path, _merged([read[name]], folder))
    return tree


def _put(tree: Tree, path: Iterable[str | int], value: Any) -> None:
    *parents, last = path
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _merged(of_ranks: Sequence[Any], where: Path, depth: int = 0) -> Any:
    """Return the tree of values of the same place in the files of all ranks; plain values are those of rank 0."""
    first = of_ranks[0]
    if depth > _MOST_DEPTH:
        raise CheckpointError(f"cannot read {where}: its dictionaries are nested deeper than {_MOST_DEPTH} levels.")
    if isinstance(first, torch.Tensor | PickledShards):
        return _tensor_of(of_ranks, where)
    if isinstance(first, UnknownObject) or (is_dataclass(first) and not isinstance(first, type)):
        return _merged([vars(each) for each in of_ranks], where, depth)
    if isinstance(first, Mapping):
        for each in of_ranks:
            if not isinstance(each, Mapping):
                raise _differ(where)
        keys = list(dict.fromkeys(key for each in of_ranks for key in each))
        plain: Tree = {}
        for key in keys:
            plain[key if isinstance(key, int | str) else str(key)] = _merged(
                [each[key] for each in of_ranks if key in each], where, depth + 1
            )
        return plain
    if isinstance(first, list | tuple) and any(isinstance(e, Mapping | torch.Tensor | UnknownObject) for e in first):
        lengths = {len(each) for each in of_ranks}
        if len(lengths) > 1:
            raise _differ(where)
        return {index: _merged([each[index] for each in of_ranks], where, depth + 1) for index in range(len(first))}
    return first


def _tensor_of(of_ranks: Sequence[Any], where: Path) -> PickledTensor:
    first = of_ranks[0]
    parts: list[tuple[Box, torch.Tensor]] = []
    if isinstance(first, PickledShards):
        for each in of_ranks:
            for shard in each.shards:
                offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                parts.append((tuple(zip(offsets, sizes, strict=True)), shard.tensor.detach()))
        shape = first.shape
        dtype = parts[0][1].dtype if parts else torch.float32
    elif isinstance(first, DTensor):
        for index, each in enumerate(of_ranks):
            parts += _boxes_of_dtensor(each, index, len(of_ranks))
        shape, dtype = tuple(first.shape), first.dtype
    else:
        shape, dtype = tuple(first.shape), first.dtype
        parts = [(tuple((0, length) for length in shape), first.detach())]
    is_plain = len(of_ranks) > 1 and not isinstance(first, PickledShards | DTensor)
    tensor = PickledTensor(shape, dtype, tuple(parts), tuple(of_ranks) if is_plain else ())
    _check_covered(tensor, where)
    return tensor


def _boxes_of_dtensor(tensor: DTensor, rank: int, ranks: int) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes of the DTensor in the file of a rank; a replica of another rank's is left out by the reader."""
    mesh = tensor.device_mesh.mesh
    position = (mesh == rank).nonzero()
    if not len(position):  # a mesh of some of the ranks
        position = (mesh == mesh.flatten()[rank * mesh.numel() // ranks]).nonzero()
    shard = shard_at(tuple(tensor.shape), tuple(mesh.shape), tuple(position[0].tolist()), tensor.placements)
    local = local_of(tensor.detach())
    return [(box.full, box_of(local, box.local)) for box in shard.boxes]


def _check_covered(tensor: PickledTensor, where: Path) -> None:
    boxes = {box for box, _ in tensor.parts}
    stored = sum(torch.Size([length for _, length in box]).numel() for box in boxes)
    if stored < torch.Size(tensor.shape).numel():
        raise CheckpointError(
            f"cannot read {where}: the files have {stored:,} of {torch.Size(tensor.shape).numel():,} elements of a "
            "tensor, expected all. Pass the folder with the files of all ranks."
        )


def _differ(where: Path) -> CheckpointError:
    return CheckpointError(
        f"cannot read {where}: the files of the ranks have different content, expected the same names in all. Copy the "
        "files of one save."
    )


def _intersection(first: Box, second: Box) -> Box | None:
    found = []
    for (a, n), (b, m) in zip(first, second, strict=True):
        begin, end = max(a, b), min(a + n, b + m)
        if end <= begin:
            return None
        found.append((begin, end - begin))
    return tuple(found)


def _relative(box: Box, outer: Box) -> Box:
    return tuple((begin - start, length) for (begin, length), (start, _) in zip(box, outer, strict=True))
