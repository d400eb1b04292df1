"""Save with `torch.distributed.checkpoint`: safetensors files, one pass, no gather, no pickle.

Input: state dicts of any program, nested, with tensors and DTensors. Output: safetensors files that
all ranks write in parallel, and any number of ranks can read::

    dcp.save(state, storage_writer=SafetensorsWriter(path), planner=LocalSavePlanner())

The folder of a state dict:

    model.safetensors, or model-00001-of-0000n.safetensors and model.safetensors.index.json
    values.json                    the values that are no tensors, by name
    checksums/rank00000.json       the checksums of what each rank wrote

[Note: local plans] torch's planners gather the plans of all ranks on one rank, and the cost grows with the number of
ranks times the number of tensors. But what a rank writes follows from names, shapes, dtypes and placements, which are
the same on all ranks. So a rank plans its own writes, and sends only a digest of the file headers, which the
coordinator compares. Nor does it send a result for each item. A tensor that several ranks hold is written once, by one
of them; plain tensors by the first rank.
"""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fsdp2_strategy.distributed.process_group import rank
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage.checksum_manifests import checksum_manifest
from fsdp2_strategy.storage.checksums import Block
from fsdp2_strategy.storage.component import Component, write_files
from fsdp2_strategy.storage.json_files import write_bytes, write_text
from fsdp2_strategy.storage.nested_states import FlatState, to_json
from fsdp2_strategy.storage.output_files import check_shared_folder
from fsdp2_strategy.storage.staged_folder import StagedFolder
from fsdp2_strategy.storage.write import WriteRequest, write_all

VALUES = "values.json"
CHECKSUMS = "checksums"
_INDEX = "model.safetensors.index.json"
_OF_A_SAVE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True)
class _Summary:
    """What a rank sends instead of its plan."""

    digest: str
    """Of the headers of all files."""
    values: Mapping[str, str]
    """JSON by name: only what is not a tensor."""


class LocalSavePlanner(SavePlanner):
    """Plan the writes of this rank without the other ranks; only digests and values that are no tensors travel.

    All ranks must have the same names of tensors, with the same shapes and dtypes. Names of other values may be on some
    ranks only; a name on several ranks must have one value.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Lay out the files of the state dict; not collective.

        Raises:
            CheckpointError: two values have one name, a value is neither a tensor nor JSON, or a dtype is unknown.
        """
        flat = FlatState.of(state_dict, "save")
        self._component = Component.of(Path(), flat.tensors)
        self._values = {name: to_json(name, value) for name, value in flat.values.items()}

    def create_local_plan(self) -> SavePlan:
        """Return a digest of the files in place of a plan, for the coordinator; see [Note: local plans]."""
        return SavePlan([], planner_data=_Summary(self._component.layout.digest, self._values))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Compare the digests of the ranks, and merge their values; the coordinator calls it.

        Raises:
            CheckpointError: tensors differ in name, shape or dtype between ranks, or a value has two contents.
        """
        summaries: list[_Summary] = [plan.planner_data for plan in all_plans]
        different = [f"rank {n}" for n, one in enumerate(summaries) if one.digest != summaries[0].digest]
        if different:
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
        values = [merged, *({} for _ in summaries[1:])]
        each = zip(all_plans, summaries, values, strict=True)
        plans = [replace(plan, planner_data=replace(one, values=own)) for plan, one, own in each]
        return plans, Metadata(dict(self._metadata(merged)))

    def _metadata(self, values: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
        derived = self._component.layout.derived
        if "metadata" not in derived:
            derived["metadata"] = list(_metadata_of(self._component))
        yield from derived["metadata"]
        for name in values:
            yield name, BytesStorageMetadata()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's plan: an item for each box that it writes; on the coordinator, also for each value."""
        requests = self._component.write_requests()
        derived = self._component.layout.derived
        if "items" not in derived:  # those of the same layout are the same in the next save
            derived["items"] = [_write_item(request) for request in requests]
        items: list[WriteItem] = derived["items"]
        self._tensors = {item.index: request.tensor for item, request in zip(items, requests, strict=True)}
        self._texts: Mapping[str, str] = new_plan.planner_data.values
        values = [
            WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, BytesIOWriteData(len(text)))
            for name, text in self._texts.items()
        ]
        planned = _Planned(self._component, requests)
        return SavePlan([*items, *values], storage_data=new_plan.storage_data, planner_data=planned)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the values of an item: a view of this rank's part of a tensor, or JSON."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._texts[write_item.index.fqn].encode())
        return self._tensors[write_item.index]


@dataclass(frozen=True)
class _Planned:
    """The component of a save, and a request for each write item of a tensor; the planner resolves its values."""

    component: Component
    requests: Sequence[WriteRequest]


def _metadata_of(component: Component) -> Iterator[tuple[str, TensorStorageMetadata]]:
    for name, entry in component.entries.items():
        shape = torch.Size(entry.shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
        yield name, TensorStorageMetadata(TensorProperties(entry.dtype), shape, [chunk])


def _write_item(request: WriteRequest) -> WriteItem:
    offsets, lengths = (torch.Size([each[i] for each in request.box]) for i in (0, 1))
    shape, properties = torch.Size(request.entry.shape), TensorProperties(request.entry.dtype)
    data = TensorWriteData(ChunkStorageMetadata(offsets, lengths), properties, shape)
    return WriteItem(MetadataIndex(request.entry.name, offsets), WriteItemType.SHARD, tensor_data=data)


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
        self._is_coordinator = is_coordinator
        if self.path is None:
            raise CheckpointError(
                "cannot save: there is no folder, expected one. Pass SafetensorsWriter(path), or checkpoint_id=path."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
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
        """Write this rank's ranges of all files, its checksums, and on the coordinator the values; fsync them."""
        planned: _Planned = plan.planner_data
        folder = Path(plan.storage_data)
        component = self._component = replace(planned.component, folder=folder)
        in_folder = functools.cache(folder.joinpath)
        requests = []
        for request, item in zip(planned.requests, plan.items, strict=False):  # items of values follow
            values: Any = planner.resolve_data(item)
            entry = replace(request.entry, path=in_folder(request.entry.path))
            requests.append(replace(request, entry=entry, tensor=values))
        write = functools.partial(write_all, requests, hashed=True, create=True)
        blocks = write_files(component.files, write, is_signed=False, has_headers=self._is_coordinator)
        (folder / CHECKSUMS).mkdir(exist_ok=True)
        by_name: dict[str, Sequence[Block]] = {path.name: found for path, found in blocks.items()}
        write_bytes(folder / CHECKSUMS / f"rank{rank():05d}.json", checksum_manifest(by_name))
        texts = {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                json_text: Any = planner.resolve_data(item)
                texts[item.index.fqn] = json_text.read().decode()
        if texts:
            content = ",\n".join(f"{json.dumps(name)}: {text}" for name, text in sorted(texts.items()))
            write_text(folder / VALUES, "{\n" + content + "\n}\n")
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, and replace the files of an earlier save; the coordinator calls it.

        Raises:
            CheckpointError: a file is missing: the ranks do not share the folder.
        """
        assert self.path is not None
        with _staged.pop(self.path) as staged:
            check_shared_folder(self._component.files)
            self._component.write_index()
            staged.publish(_earlier_files(self.path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Return False: DCP selects this writer only if it is passed."""
        return False


_staged: dict[Path, StagedFolder] = {}
"""The hidden folders of saves in progress, on their coordinators; a writer itself can be sent to another process."""


def _earlier_files(path: Path) -> list[str]:
    """Return the names of the files of an earlier save in a folder; other safetensors files are not among them."""
    tensors = (file for file in path.glob("model*.safetensors") if _OF_A_SAVE.fullmatch(file.name))
    found = [*tensors, *path.glob(f"{CHECKSUMS}/rank*.json"), path / _INDEX, path / VALUES]
    return [file.relative_to(path).as_posix() for file in found if file.exists()]
