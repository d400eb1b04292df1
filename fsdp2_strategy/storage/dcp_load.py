"""Load with `torch.distributed.checkpoint`: each rank reads the byte ranges of its own shards.

Input: a folder of safetensors files, of any writer; or read requests. Output: filled tensors of a state dict::

    dcp.load(state, storage_reader=SafetensorsReader(path), planner=LocalLoadPlanner())

What a rank reads follows from its state dict and the headers, so ranks plan alone; see [Note: local plans] in
`dcp_save`.
"""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from fsdp2_strategy.distributed.process_group import rank
from fsdp2_strategy.errors import CheckpointError, DamageError, did_you_mean, some
from fsdp2_strategy.model.boxes import Box, row_major
from fsdp2_strategy.model.placeholders import values_of
from fsdp2_strategy.model.shards import local_shard
from fsdp2_strategy.storage.checksum_manifests import CHECKSUMS_BYTES, parse_checksums
from fsdp2_strategy.storage.checksums import Block, Checksums
from fsdp2_strategy.storage.dcp_save import CHECKSUMS, VALUES
from fsdp2_strategy.storage.file_reads import read_file
from fsdp2_strategy.storage.nested_states import FlatState, from_json, set_value
from fsdp2_strategy.storage.regions import Piece, Region
from fsdp2_strategy.storage.safetensors_format import Entry, read_header_and_metadata
from fsdp2_strategy.storage.schema import InvalidError, parse_json
from fsdp2_strategy.storage.verified_read import Reader, ReadRequest

_VALUES_BYTES = 1 << 30
_OF_TORCH = "DCP_SHARDING_INFO"
"""Key of a header's metadata: the offsets of the parts of tensors that torch's own Hugging Face writer stores."""


@dataclass(frozen=True)
class _Stored:
    """Where the tensors are, and the JSON of values, by name."""

    regions: Mapping[str, Region]
    values: Mapping[str, str]


class Reads(list[ReadRequest]):
    """What this rank reads, in place of a state dict's values: names and shapes are matched already."""

    def by_key(self) -> dict[str, ReadRequest]:
        """Return the requests by a key of their own; several may have the same name."""
        return {f"{number} {request.name}": request for number, request in enumerate(self)}


class RegionReader(StorageReader):
    """Read boxes of regions; each rank reads its byte ranges directly into its shards."""

    def __init__(self, regions: Mapping[str, Region], checksums: Checksums | None, label: str) -> None:
        self._stored = _Stored(regions, {})
        self._checksums, self._label = checksums, label

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Begin a load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return no metadata: the caller has matched names and shapes; not collective."""
        return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the regions are known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Carry out the read items, and compare checksums."""
        requests, filled = [], []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                if not isinstance(planner, LocalLoadPlanner):  # torch's own planner would unpickle it
                    raise CheckpointError(
                        f"cannot load {name}: it is a value that is not a tensor, and the planner is a "
                        f"{type(planner).__name__}, expected planner=LocalLoadPlanner(). Pass it to dcp.load."
                    )
                planner.load_bytes(item, io.BytesIO(self._stored.values[name].encode()))
                continue
            target = planner.resolve_tensor(item)
            at = item.storage_index.offset or [0] * len(item.lengths)
            begins = (a + b for a, b in zip(at, item.storage_offsets, strict=True))
            box = tuple(zip(begins, item.lengths, strict=True))
            requests.append(ReadRequest(name, self._stored.regions[name], box, target.detach()))
            filled.append((item, target))
        with Reader(self._label, self._checksums) as reader:
            reader.read(requests)
        for item, target in filled:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Return False: DCP selects this reader only if it is passed."""
        return False


class SafetensorsReader(RegionReader):
    """Read a folder of safetensors files; each rank reads the byte ranges of its own shards.

    The folder may be one that `SafetensorsWriter` or torch's ``HuggingFaceStorageWriter`` has written, or any model's.

    Args:
        path: the folder. None if ``checkpoint_id`` names it.
        verify: compare the checksums, if the folder has any.
    """

    def __init__(self, path: str | PathLike[str] | None = None, *, verify: bool = True) -> None:
        super().__init__({}, None, "loading")
        self.path = None if path is None else Path(path).expanduser()
        self.verify = verify

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Begin a load, from ``checkpoint_id`` if it is given."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id).expanduser()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return names, shapes and dtypes of all tensors, from the headers, and the names of values; not collective.

        An error is raised by `set_up_storage_reader`, because torch 2.11 replaces those of this method.
        """
        self._error: CheckpointError | None = None
        try:
            return self._read_metadata()
        except CheckpointError as error:
            self._error = error
            return Metadata({})

    def _read_metadata(self) -> Metadata:
        if self.path is None:
            raise CheckpointError(
                "cannot load: there is no folder, expected one. Pass SafetensorsReader(path), or checkpoint_id=path."
            )
        parts = _parts_in(self.path)
        values = _read_values(self.path)
        if not parts and not values:
            raise CheckpointError(
                f"cannot load {self.path}: it has no safetensors files, expected a folder with at least one. Check the "
                "path."
            )
        found: dict[str, Any] = {name: BytesStorageMetadata() for name in values}
        for name, of_tensor in parts.items():
            chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(entry.shape)) for at, entry in of_tensor]
            properties = TensorProperties(of_tensor[0][1].dtype)
            found[name] = TensorStorageMetadata(properties, torch.Size(_shape_of(of_tensor)), chunks)
        return Metadata(found, storage_data=_Stored({n: _region_of(n, p) for n, p in parts.items()}, values))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep where the tensors are; not collective.

        Raises:
            CheckpointError: there is no safetensors file, or a header is invalid.
            DamageError: a file is corrupt, or a part of a tensor is missing.
        """
        if self._error is not None:
            raise self._error
        assert self.path is not None
        self._stored = metadata.storage_data
        self._checksums = _checksums_in(self.path) if self.verify else None


_Parts = list[tuple[tuple[int, ...], Entry]]
"""The parts of one tensor, each with its offsets in the full tensor."""


def _parts_in(folder: Path) -> dict[str, _Parts]:
    """Return the parts of each tensor in a folder's safetensors files."""
    parts: dict[str, _Parts] = {}
    for path in sorted(folder.glob("*.safetensors")):
        entries, metadata = read_header_and_metadata(path)
        offsets = _offsets_of_torch(path, metadata)
        for name, entry in entries.items():
            known = parts.setdefault(name, [])
            at = offsets.get(name, (0,) * len(entry.shape))
            if known and (not offsets or len(at) != len(entry.shape)):
                raise CheckpointError(
                    f"cannot load {folder}: {name} is in {known[0][1].path.name} and in {path.name}, expected it in "
                    "one file. Remove the file that does not belong to it."
                )
            known.append((at, entry))
    return parts


def _offsets_of_torch(path: Path, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the offsets of each tensor of a file of torch's Hugging Face writer, which has parts of tensors."""
    if _OF_TORCH not in metadata:
        return {}
    try:
        saved = json.loads(metadata[_OF_TORCH])
        return {name: tuple(map(int, one["saved_offsets"])) for name, one in saved.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamageError(f"cannot read {path}: the offsets in its header are invalid. Load another folder.") from error


def _shape_of(parts: _Parts) -> tuple[int, ...]:
    ends = ([a + n for a, n in zip(at, entry.shape, strict=True)] for at, entry in parts)
    return tuple(map(max, zip(*ends, strict=True))) if parts[0][1].shape else ()


def _region_of(name: str, parts: _Parts) -> Region:
    """Return where the values of a tensor are."""
    if sum(math.prod(entry.shape) for _, entry in parts) != math.prod(_shape_of(parts)):
        raise DamageError(
            f"cannot load {name}: the files have {len(parts)} of its parts, which do not add up to the shape "
            f"{list(_shape_of(parts))}, expected all parts. Copy the missing files."
        )
    if len(parts) == 1 and not any(parts[0][0]):
        return Region.of(parts[0][1], parts[0][1].shape, parts[0][1].dtype)
    pieces = tuple(Piece(entry, at, entry.shape, row_major(entry.shape), 0) for at, entry in parts)
    return Region(_shape_of(parts), parts[0][1].dtype, pieces)


def _read_values(folder: Path) -> dict[str, str]:
    path = folder / VALUES
    if not path.exists():
        return {}
    try:
        found = json.loads(read_file(path, _VALUES_BYTES))
    except (ValueError, OSError, RecursionError) as error:
        raise DamageError(f"cannot read {path}: {error}. Load another folder.") from error
    if not isinstance(found, dict):
        raise DamageError(f"cannot read {path}: it is not an object of names and values. Load another folder.")
    return {name: json.dumps(value) for name, value in found.items()}


def _checksums_in(folder: Path) -> Checksums | None:
    """Return the checksums of a folder's files; None if it has none."""
    manifests = sorted((folder / CHECKSUMS).glob("rank*.json"))
    if not manifests:
        return None
    lengths = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}

    own = f"rank{rank():05d}.json"  # it has all that this rank needs if the number of ranks is unchanged
    waiting = [[m for m in manifests if m.name == own], [m for m in manifests if m.name != own]]

    def read(_path: Path, _begin: int, _end: int) -> Iterator[dict[Path, list[Block]]]:
        while waiting:
            found: dict[Path, list[Block]] = {}
            for manifest in waiting.pop(0):
                listed = parse_checksums(read_file(manifest, CHECKSUMS_BYTES), manifest, lengths)["blocks"]
                for name, blocks in listed.items():
                    found.setdefault(folder / name, []).extend(Block(*block) for block in blocks)
            yield found

    return Checksums(read)


class LocalLoadPlanner(LoadPlanner):
    """Plan the reads of this rank without the other ranks; a state dict may ask for some of the tensors only.

    Args:
        rename: the name in the folder of each name of the state dict: a function, or a mapping of prefixes, such as
            ``{"policy.": "model."}``.
        strict: whether a name that the folder lacks is an error; if False, its value is left unchanged.
    """

    def __init__(self, *, rename: Callable[[str], str] | Mapping[str, str] | None = None, strict: bool = True) -> None:
        self._rename = functools.partial(_with_prefix, dict(rename)) if isinstance(rename, Mapping) else rename
        self._strict = strict

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state dict; not collective. `Reads` in place of values say what to read.

        Raises:
            CheckpointError: two values have one name.
        """
        reads = [value for value in state_dict.values() if isinstance(value, Reads)]
        self._requests = reads[0].by_key() if reads else {}
        self._state, self._flat = state_dict, FlatState.of({} if reads else state_dict, "load")
        self._stored = metadata.state_dict_metadata if metadata else {}

    def create_local_plan(self) -> LoadPlan:
        """Match names and shapes, and return an empty plan: the other ranks need nothing of it.

        Raises:
            CheckpointError: a name is missing in the folder, or has another shape there.
        """
        self._plan = LoadPlan(list(self._items()))
        return LoadPlan([])

    def _items(self) -> Iterator[ReadItem]:
        missing = []
        for key, request in self._requests.items():
            yield _read_item(key, key, request.box, [0] * len(request.box))
        for name in self._flat.paths:
            stored = self._rename(name) if self._rename else name
            kind = TensorStorageMetadata if name in self._flat.tensors else BytesStorageMetadata
            if not isinstance(self._stored.get(stored), kind):
                missing.append(stored)
            elif kind is BytesStorageMetadata:
                none = torch.Size()
                index = MetadataIndex(stored)
                yield ReadItem(LoadItemType.BYTE_IO, MetadataIndex(name), none, index, none, none)
            else:
                yield from self._of_tensor(name, stored)
        if missing and self._strict:
            hint = did_you_mean(missing[0], list(self._stored))
            raise CheckpointError(
                f"cannot load: the folder lacks {some(missing, 'value')} of the state dict, expected all.{hint} Pass "
                "LocalLoadPlanner(strict=False) to leave them unchanged, or rename= if they have other names."
            )

    def _of_tensor(self, name: str, stored: str) -> Iterator[ReadItem]:
        tensor, found = self._flat.tensors[name], self._stored[stored]
        assert isinstance(found, TensorStorageMetadata)
        if tuple(found.size) != tuple(tensor.shape):
            raise CheckpointError(
                f"cannot load {name}: its shape is {list(tensor.shape)}, and {list(found.size)} in the folder, "
                "expected the same. Build the model from the configuration that it was saved with."
            )
        for box in local_shard(tensor).boxes:
            yield _read_item(name, stored, box.full, [begin for begin, _ in box.local])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan of this rank."""
        return self._plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set a value of the state dict from JSON.

        Raises:
            DamageError: it is not what `LocalSavePlanner` writes.
        """
        name = read_item.dest_index.fqn
        try:
            decoded = from_json(parse_json(value.read()))
        except (InvalidError, ValueError, TypeError) as error:
            raise DamageError(f"cannot load {name}: its value is invalid: {error}. Load another folder.") from error
        set_value(self._state, self._flat.paths[name], decoded)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the box of this rank's part of a tensor that an item fills."""
        name = read_item.dest_index.fqn
        if name in self._requests:
            return self._requests[name].tensor
        local = values_of(self._flat.tensors[name])
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            local = local.narrow(dim, begin, length)
        return local

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the values are read into the tensor itself."""


def _read_item(name: str, stored: str, box: Box, local: Sequence[int]) -> ReadItem:
    """Return the item that reads a box of a stored tensor to an offset of this rank's part."""
    begins, lengths = (torch.Size([each[i] for each in box]) for i in (0, 1))
    origin = MetadataIndex(stored, torch.Size([0] * len(box)))
    return ReadItem(LoadItemType.TENSOR, MetadataIndex(name, begins), torch.Size(local), origin, begins, lengths)


def _with_prefix(prefixes: Mapping[str, str], name: str) -> str:
    """Replace the longest of the given prefixes that a name has."""
    found = max((old for old in prefixes if name.startswith(old)), key=len, default=None)
    return name if found is None else prefixes[found] + name[len(found) :]
