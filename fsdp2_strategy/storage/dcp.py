"""A backend for `torch.distributed.checkpoint` whose files are a Hugging Face folder: one pass, no gather, no pickle.

Input: state dicts of any program, nested, with tensors and DTensors. Output: safetensors files that all ranks write in
parallel, and any number of ranks can read::

    dcp.save(state, storage_writer=SafetensorsWriter(path), planner=LocalSavePlanner())
    dcp.load(state, storage_reader=SafetensorsReader(path), planner=LocalLoadPlanner())

The phases are those of DCP. `LocalSavePlanner` makes the plan of a rank from names, shapes, dtypes and placements, and
sends a digest instead: the plans of all ranks on one rank would cost ranks times tensors. A tensor that several ranks
hold is written once, by one of them; plain tensors by the first rank. What is not a tensor is in ``values.json``.

The folder:

    model.safetensors, or model-00001-of-0000n.safetensors and model.safetensors.index.json
    values.json                    the values that are no tensors, by name
    checksums/rank00000.json       the checksums of what each rank wrote
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from fsdp2_strategy.distributed.process_group import rank, world_size
from fsdp2_strategy.errors import CheckpointError, DamageError, did_you_mean, some
from fsdp2_strategy.model.boxes import row_major
from fsdp2_strategy.model.placeholders import values_of
from fsdp2_strategy.model.shards import local_shard
from fsdp2_strategy.storage.checksum_manifests import CHECKSUMS_BYTES, checksum_manifest, parse_checksums
from fsdp2_strategy.storage.checksums import Block, Checksums, blocks_of
from fsdp2_strategy.storage.component import Component
from fsdp2_strategy.storage.file_reads import read_file
from fsdp2_strategy.storage.json_files import write_text
from fsdp2_strategy.storage.json_values import as_json_values, from_json_values
from fsdp2_strategy.storage.output_files import check_shared_folder, create_files, index_of
from fsdp2_strategy.storage.regions import Piece, Region
from fsdp2_strategy.storage.safetensors_format import Entry, read_header_and_metadata
from fsdp2_strategy.storage.schema import InvalidError, parse_json
from fsdp2_strategy.storage.shares import Share
from fsdp2_strategy.storage.staged_folder import StagedFolder
from fsdp2_strategy.storage.verified_read import Reader, ReadRequest
from fsdp2_strategy.storage.write import WriteRequest, force_to_disk, write_all

VALUES = "values.json"
CHECKSUMS = "checksums"
_INDEX = "model.safetensors.index.json"
_VALUES_BYTES = 1 << 30
_OF_TORCH = "DCP_SHARDING_INFO"
"""Key of a header's metadata: the offsets of the parts of tensors that torch's own Hugging Face writer stores."""
_OF_A_SAVE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_TUPLE, _BYTES = "__tuple__", "__bytes__"

Path_ = tuple[str | int, ...]
"""The keys and indices that lead to a value of a nested state dict."""


# --- state dicts -----------------------------------------------------------------------------------------------------


@dataclass
class _Flat:
    """A nested state dict as names, which are its keys joined by dots."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path_] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[Any, Any], action: str) -> _Flat:
        """Flatten a state dict.

        Raises:
            CheckpointError: two values have the same name.
        """
        found = cls()
        for path, value in _leaves((), state):
            name = ".".join(map(str, path))
            if name in found.paths:
                raise CheckpointError(
                    f"cannot {action}: two values of the state dict have the name {name!r}, expected different names "
                    "after keys are joined by dots. Rename a key."
                )
            found.paths[name] = path
            (found.tensors if isinstance(value, torch.Tensor) else found.values)[name] = value
        return found


def _leaves(path: Path_, value: Any) -> Iterator[tuple[Path_, Any]]:
    """Yield tensors, and values that contain no tensors, with their paths."""
    if isinstance(value, Mapping) and (value or not path):
        for key, each in value.items():
            yield from _leaves((*path, key), each)
    elif isinstance(value, list | tuple) and any(isinstance(leaf, torch.Tensor) for _, leaf in _within(value)):
        for index, each in enumerate(value):
            yield from _leaves((*path, index), each)
    else:
        yield path, value


def _within(value: Sequence[Any]) -> Iterator[tuple[Path_, Any]]:
    return itertools.chain.from_iterable(_leaves((), each) for each in value)


def _set(state: Any, path: Path_, value: Any) -> None:
    """Set a value of a nested state dict; a tuple around it is replaced."""
    *outer, last = path
    holder = functools.reduce(lambda each, key: each[key], outer, state)
    if isinstance(holder, tuple):
        _set(state, tuple(outer), tuple(value if i == last else each for i, each in enumerate(holder)))
    else:
        holder[last] = value


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {_TUPLE: [_as_json(each) for each in value]}
    if isinstance(value, list):
        return [_as_json(each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        if value.keys() & {_TUPLE, _BYTES}:
            raise TypeError(f"the keys {_TUPLE} and {_BYTES} are reserved")
        return {key: _as_json(each) for key, each in value.items()}
    return as_json_values(value)


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_BYTES}:
        return base64.b64decode(value[_BYTES], validate=True)
    if value.keys() == {_TUPLE}:
        return tuple(_from_json(each) for each in value[_TUPLE])
    decoded = from_json_values(value)
    return {key: _from_json(each) for key, each in value.items()} if decoded == value else decoded


def _encoded(name: str, value: Any) -> str:
    try:
        return json.dumps(_as_json(value), allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot save {name}: its value is a {type(value).__name__} ({error}), expected a tensor, or what JSON can "
            "represent, because nothing is pickled. Leave it out, or convert it."
        ) from None


# --- saves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Summary:
    """What a rank sends instead of its plan."""

    digest: str
    """Of the headers of all files."""
    values: Mapping[str, str]
    """JSON by name: only what is not a tensor."""


@dataclass(frozen=True)
class _Files:
    """The files of a save, and this rank's shares, one for each write item of a tensor."""

    component: Component
    shares: Sequence[Share]
    values: Mapping[str, str]
    """On the coordinator, the values of all ranks."""


class LocalSavePlanner(SavePlanner):
    """Plan the writes of this rank without the other ranks; only digests and values that are no tensors travel.

    All ranks must have the same names of tensors, with the same shapes and dtypes. Names of other values may be on some
    ranks only; a name on several ranks must have one value.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state dict, and find this rank's shares of its tensors; not collective.

        Raises:
            CheckpointError: two values have one name, a value is neither a tensor nor JSON, or a dtype is unknown.
        """
        flat = _Flat.of(state_dict, "save")
        self._component = Component.of(Path(), flat.tensors)
        self._values = {name: _encoded(name, value) for name, value in flat.values.items()}

    def create_local_plan(self) -> SavePlan:
        """Return a digest of the files in place of a plan, for the coordinator."""
        headers = hashlib.sha256()
        for file in self._component.files:
            headers.update(file.name.encode() + file.header)
        return SavePlan([], planner_data=_Summary(headers.hexdigest(), self._values))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Compare the digests of the ranks, and merge their values; the coordinator calls it.

        Raises:
            CheckpointError: tensors differ in name, shape or dtype between ranks, or a value has two contents.
        """
        summaries: list[_Summary] = [plan.planner_data for plan in all_plans]
        digest = summaries[0].digest
        if different := [f"rank {number}" for number, one in enumerate(summaries) if one.digest != digest]:
            raise CheckpointError(
                f"cannot save: names, shapes or dtypes of the tensors on {', '.join(different)} differ from those on "
                "rank 0, expected the same on all ranks. Save the same state on all ranks."
            )
        merged: dict[str, str] = {}
        for one in summaries:
            for name, text in one.values.items():
                if merged.setdefault(name, text) != text:
                    raise CheckpointError(
                        f"cannot save {name}: its value differs between ranks, expected one value. Give the values of "
                        "ranks different names."
                    )
        found: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(entry.dtype),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size([0] * len(entry.shape)), torch.Size(entry.shape))],
            )
            for name, entry in self._component.entries.items()
        }
        found |= {name: BytesStorageMetadata() for name in merged}
        first, *others = all_plans
        return [replace(first, planner_data=merged), *(replace(o, planner_data={}) for o in others)], Metadata(found)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's plan: an item for each box that it writes; on the coordinator, also for each value."""
        component, merged = self._component, new_plan.planner_data
        tensors = [_write_item(share, component.entries[share.name]) for share in component.layout.shares]
        values = [
            WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, BytesIOWriteData(len(text)))
            for name, text in merged.items()
        ]
        self._of_item = dict(zip((item.index for item in tensors), range(len(tensors)), strict=True))
        self._tensors = component.values()
        self._merged = merged
        return SavePlan(
            [*tensors, *values],
            storage_data=new_plan.storage_data,
            planner_data=_Files(component, component.layout.shares, merged),
        )

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the values of an item: a view of this rank's part of a tensor, or JSON."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._merged[write_item.index.fqn].encode())
        return self._tensors[self._of_item[write_item.index]]


def _write_item(share: Share, entry: Entry) -> WriteItem:
    offsets, sizes = (torch.Size([each[i] for each in share.box]) for i in (0, 1))
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(entry.dtype), torch.Size(entry.shape))
    return WriteItem(MetadataIndex(share.name, offsets), WriteItemType.SHARD, tensor_data=data)


class SafetensorsWriter(StorageWriter):
    """Write a state dict as a Hugging Face folder; each rank writes its byte ranges into the shared files.

    The folder is replaced all at once when all ranks have written: a kill before it leaves the earlier files.

    Args:
        path: the folder, on a file system that all ranks share. None if ``checkpoint_id`` names it.
        overwrite: replace an earlier save; if False, a folder that has one is an error.
    """

    def __init__(self, path: str | PathLike[str] | None = None, *, overwrite: bool = True) -> None:
        self.path = None if path is None else Path(path).expanduser()
        self.overwrite = overwrite

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Begin a save, to ``checkpoint_id`` if it is given."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id).expanduser()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that there is a folder to write to; not collective.

        Raises:
            CheckpointError: neither ``path`` nor ``checkpoint_id`` was given.
        """
        if self.path is None:
            raise CheckpointError(
                "cannot save: there is no folder, expected one. Pass SafetensorsWriter(path), or checkpoint_id=path."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged.

        Raises:
            CheckpointError: it is not one of `LocalSavePlanner`.
        """
        if not isinstance(plan.planner_data, _Summary):
            raise CheckpointError(
                "cannot save: the plan is not one of LocalSavePlanner, which lays out the files, expected planner="
                "LocalSavePlanner(). Pass it to dcp.save."
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the hidden folder that all ranks write to; the coordinator calls it.

        Raises:
            CheckpointError: another process saves there, or there is an earlier save and ``overwrite`` is False.
        """
        assert self.path is not None
        if not self.overwrite and _earlier_files(self.path):
            raise CheckpointError(
                f"cannot save to {self.path}: it has safetensors files, and overwrite is False, expected a folder "
                "without. Choose another folder, or pass overwrite=True."
            )
        if (left := _staged.pop(self.path, None)) is not None:  # of a save of this process that failed
            left.__exit__(None, None, None)
        staged = _staged[self.path] = StagedFolder(self.path)
        staged.create()
        return [replace(plan, storage_data=str(staged.path)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Create some of the files, write this rank's ranges of all files and its checksums, and fsync them."""
        files: _Files = plan.planner_data
        folder = Path(plan.storage_data)
        component = replace(files.component, folder=folder)
        first, end = (n * len(component.files) // world_size() for n in (rank(), rank() + 1))
        own = component.files[first:end]
        create_files(own)
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        requests = []
        for share, item in zip(files.shares, tensors, strict=True):
            values: Any = planner.resolve_data(item)
            entry = component.entries[share.name]
            requests.append(WriteRequest(entry, share.box, values, is_in_grid=share.is_in_grid))
        blocks = write_all(requests, hashed=True, create=True)
        for file in own:
            blocks.setdefault(file.path, []).extend(blocks_of(file.header))
        force_to_disk(blocks)
        (folder / CHECKSUMS).mkdir(exist_ok=True)
        by_name: dict[str, Sequence[Block]] = {path.name: found for path, found in blocks.items()}
        (folder / CHECKSUMS / f"rank{rank():05d}.json").write_bytes(checksum_manifest(by_name))
        texts = {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                json_text: Any = planner.resolve_data(item)
                texts[item.index.fqn] = json_text.read().decode()
        if texts:
            content = ",\n".join(f"{json.dumps(name)}: {text}" for name, text in sorted(texts.items()))
            write_text(folder / VALUES, "{\n" + content + "\n}\n")
        self._component = component
        sizes = [WriteResult(item.index, _nbytes(item), None) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(sizes)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, and replace the files of an earlier save; the coordinator calls it.

        Raises:
            CheckpointError: a file is missing: the ranks do not share the folder.
        """
        assert self.path is not None
        with _staged.pop(self.path) as staged:
            check_shared_folder(self._component.files)
            if len(self._component.files) > 1:
                write_text(staged.path / _INDEX, json.dumps(index_of(self._component.files), indent=2) + "\n")
            staged.publish(_earlier_files(self.path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Return False: DCP selects this writer only if it is passed."""
        return False


_staged: dict[Path, StagedFolder] = {}
"""The hidden folders of saves in progress, on their coordinators; a writer itself can be sent to another process."""


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return item.bytes_io_data.nbytes if item.bytes_io_data else 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _earlier_files(path: Path) -> list[str]:
    """Return the names of the files of an earlier save in a folder; other safetensors files are not among them."""
    tensors = (file for file in path.glob("model*.safetensors") if _OF_A_SAVE.fullmatch(file.name))
    found = [*tensors, *path.glob(f"{CHECKSUMS}/rank*.json"), path / _INDEX, path / VALUES]
    return [file.relative_to(path).as_posix() for file in found if file.exists()]


# --- loads -----------------------------------------------------------------------------------------------------------


class SafetensorsReader(StorageReader):
    """Read a folder of safetensors files; each rank reads the byte ranges of its own shards.

    The folder may be one that `SafetensorsWriter` or torch's ``HuggingFaceStorageWriter`` has written, or any model's.

    Args:
        path: the folder. None if ``checkpoint_id`` names it.
        verify: compare the checksums, if the folder has any.
    """

    def __init__(self, path: str | PathLike[str] | None = None, *, verify: bool = True) -> None:
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
        self._stored: _Stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Carry out the read items, and compare checksums.

        Raises:
            DamageError: a file cannot be read, or its bytes do not match their checksum.
        """
        assert self.path is not None
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
        with Reader("loading", _checksums_in(self.path) if self.verify else None) as reader:
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


@dataclass(frozen=True)
class _Stored:
    """Where the tensors of a folder are, and the JSON of its values."""

    regions: Mapping[str, Region]
    values: Mapping[str, str]


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
    """Return where the values of a tensor are.

    Raises:
        DamageError: its parts do not add up to the tensor: a file is missing.
    """
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

    def read(_path: Path, _begin: int, _end: int) -> Iterator[dict[Path, list[Block]]]:
        while manifests:
            manifest = manifests.pop(0)
            listed = parse_checksums(read_file(manifest, CHECKSUMS_BYTES), manifest, lengths)["blocks"]
            yield {folder / name: [Block(*block) for block in blocks] for name, blocks in listed.items()}

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
        """Flatten the state dict; not collective.

        Raises:
            CheckpointError: two values have one name.
        """
        self._state, self._flat = state_dict, _Flat.of(state_dict, "load")
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
            begins, lengths = (torch.Size([each[i] for each in box.full]) for i in (0, 1))
            local = torch.Size([begin for begin, _ in box.local])
            index = MetadataIndex(name, begins)
            origin = MetadataIndex(stored, torch.Size([0] * tensor.ndim))
            yield ReadItem(LoadItemType.TENSOR, index, local, origin, begins, lengths)

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
            decoded = _from_json(parse_json(value.read()))
        except (InvalidError, ValueError, TypeError) as error:
            raise DamageError(f"cannot load {name}: its value is invalid: {error}. Load another folder.") from error
        _set(self._state, self._flat.paths[name], decoded)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the box of this rank's part of a tensor that an item fills."""
        local = values_of(self._flat.tensors[read_item.dest_index.fqn])
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            local = local.narrow(dim, begin, length)
        return local

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the values are read into the tensor itself."""


def _with_prefix(prefixes: Mapping[str, str], name: str) -> str:
    """Replace the longest of the given prefixes that a name has."""
    found = max((old for old in prefixes if name.startswith(old)), key=len, default=None)
    return name if found is None else prefixes[found] + name[len(found) :]
