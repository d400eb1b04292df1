"""Write and read this rank's byte ranges of safetensors files, with `torch.distributed.checkpoint`.

Input: `Component`s, each a folder of files and the tensors to write to it; for a load, read requests. Output: the
files and checksums; for a load, filled tensors.

[Note: local plans] torch's planners gather the plans of all ranks on one rank, and the cost grows with the number of
ranks times the number of tensors. So these planners get an empty state dict here, and each rank plans its own writes.
Offsets follow from names, shapes and dtypes, which are the same on all ranks. A rank sends only a digest of the file
headers, and the coordinator compares the digests. torch runs the phases, and raises errors on all ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from fsdp2_strategy.checkpoint.paths import CheckpointPaths
from fsdp2_strategy.distributed.agreement import all_or_none, error_text
from fsdp2_strategy.distributed.process_group import group_in_use, rank, world_size
from fsdp2_strategy.errors import CheckpointError, DamageError, some
from fsdp2_strategy.hf.mismatches import CHECKPOINT, describe_shapes
from fsdp2_strategy.storage.checksums import Block, Checksums, blocks_of
from fsdp2_strategy.storage.component import Component
from fsdp2_strategy.storage.file_reads import repeated
from fsdp2_strategy.storage.output_files import check_shared_folder, create_files, index_of
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.safetensors_format import Entry, read_header
from fsdp2_strategy.storage.shares import (
    gathered_write_requests,
)
from fsdp2_strategy.storage.verified_read import Reader, ReadRequest
from fsdp2_strategy.storage.write import WriteRequest, force_to_disk, write_all

LoadTargets = Sequence[tuple[str, Region, torch.Tensor]]
"""Tensors to fill, each with its name and the location of its values in files."""


class ComponentWriter(StorageWriter):
    """Write components; each rank writes its byte ranges directly into the shared files.

    Args:
        components: the components to write.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self._components = components
        self.blocks: dict[Path, list[Block]] = {}
        """Checksums of the tensors' bytes that this rank wrote; on rank 0, also those of the headers of all files."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is used for one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `prepare_global_plan` creates the folders."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add a digest of the file headers to the plan, for the coordinator."""
        headers = hashlib.sha256()
        for component in self._components:
            for file in component.files:
                headers.update(str(file.path).encode() + file.header)
        return replace(plan, storage_data=headers.hexdigest())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Compare the ranks' digests, and create the folders; the coordinator calls it.

        Raises:
            CheckpointError: names, shapes or dtypes of the tensors differ between ranks.
        """
        different = [rank for rank, plan in enumerate(plans) if plan.storage_data != plans[0].storage_data]
        if different:
            raise CheckpointError(
                f"cannot save: names, shapes or dtypes of the tensors on ranks {different} differ from those on rank "
                "0, expected the same on all ranks. Save the same model and optimizer on all ranks."
            )
        for component in self._components:
            component.folder.mkdir(parents=True, exist_ok=True)
            signed = component.is_signed
            self.blocks |= {file.path: blocks_of(file.header, is_signed=signed) for file in component.files}
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Create some of the files, write this rank's ranges of all files, and fsync what it created or wrote."""
        files = [file for component in self._components for file in component.files]
        first, end = (n * len(files) // world_size() for n in (rank(), rank() + 1))
        own = files[first:end]
        create_files(own)
        requests = [request for component in self._components for request in component.write_requests()]
        is_signed = any(component.is_signed for component in self._components)
        written = write_all(requests, hashed=True, create=True, is_signed=is_signed)
        self.add_blocks(written)
        force_to_disk({*written, *(file.path for file in own)})  # other files may not exist yet
        if rank() == 0:
            for component in self._components:
                if len(component.files) > 1:
                    index = component.folder / f"{component.stem}.safetensors.index.json"
                    index.write_text(json.dumps(index_of(component.files), indent=2) + "\n")
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def add_blocks(self, blocks: Mapping[Path, Sequence[Block]]) -> None:
        """Add checksums of bytes that this rank wrote."""
        for path, written in blocks.items():
            self.blocks.setdefault(path, []).extend(written)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that the files have the expected headers, which other ranks wrote; the coordinator calls it.

        Raises:
            CheckpointError: a file or its header is missing: the ranks do not share the folder.
        """
        for component in self._components:
            check_shared_folder(component.files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: the components have their own folders."""
        return False


class RequestReader(StorageReader):
    """Carry out read requests; each rank reads its byte ranges directly into its shards.

    Args:
        requests: this rank's read requests.
        checksums: checksums to verify the bytes with; None to read without verification.
        label: label of the progress bar.
    """

    def __init__(self, requests: Sequence[ReadRequest], checksums: Checksums | None, label: str) -> None:
        self._requests, self._checksums, self._label = requests, checksums, label

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader is used for one load."""

    def read_metadata(self) -> Metadata:
        """Return no metadata: the requests contain the location of the tensors."""
        return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Carry out the read requests.

        Raises:
            CheckpointError: a file cannot be read, or its bytes do not match their checksum.
        """
        with Reader(self._label, self._checksums) as reader:
            reader.read(self._requests)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: the requests contain the paths."""
        return False


def stored_in(folder: Path, paths: CheckpointPaths | None = None) -> dict[str, Entry]:
    """Return the location of every tensor in a folder's safetensors files, by name; not collective.

    Args:
        folder: the folder.
        paths: the checkpoint's paths; files that its manifest does not list are not read.

    Raises:
        CheckpointError: a header is invalid, or two files contain the same name.
    """
    entries: dict[str, Entry] = {}
    for path in repeated(folder, lambda: sorted(folder.glob("*.safetensors"))):
        if paths is not None and not paths.lists(path):
            continue
        for name, entry in read_header(path).items():
            if name in entries:
                raise CheckpointError(
                    f"cannot read {folder}: {name} is in {entries[name].path.name} and in {path.name}, expected it in "
                    "one file. Remove the file that does not belong to the checkpoint."
                )
            entries[name] = entry
    return entries


def targets_by_name(what: str, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Entry]) -> LoadTargets:
    """Pair tensors with the stored tensors of the same names.

    Raises:
        CheckpointError: a tensor is not stored, or is stored in another shape.
    """
    check_shapes(what, tensors, {name: (entry.shape, entry.dtype) for name, entry in stored.items()})
    return [(n, Region.of(stored[n], stored[n].shape, stored[n].dtype), tensor) for n, tensor in tensors.items()]


def write_components(components: Sequence[Component]) -> dict[Path, list[Block]]:
    """Write components and fsync their files; collective.

    Returns:
        The checksums of the tensors' bytes that this rank wrote, by file; on rank 0, also those of all headers.
    """
    writer = ComponentWriter(components)
    with convert_dcp_errors():
        save({}, storage_writer=writer, process_group=group_in_use(), no_dist=not dist.is_initialized())
    for component in components:
        if component.staged is None:
            for name, requests in _gather_regions(component):
                with all_or_none(f"write {name}", CheckpointError):
                    writer.add_blocks(write_all(requests, hashed=True, is_signed=component.is_signed))
                    force_to_disk([component.entries[name].path])
    return writer.blocks


CopyToHost = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Copies tensors to host buffers that are valid until the save ends."""


def stage_local(components: Sequence[Component], copy_to_host: CopyToHost) -> list[Component]:
    """Return the components with copies of all values that this rank writes without a gather; not collective."""
    values = [component.values() for component in components]
    copies = iter(copy_to_host([tensor for own in values for tensor in own]))
    return [
        replace(component, staged=list(itertools.islice(copies, len(own))))
        for component, own in zip(components, values, strict=True)
    ]


def stage_gathered(components: Sequence[Component], copy_to_host: CopyToHost) -> list[Component]:
    """Return the components with copies of their gathered values, and without references to the model's tensors.

    Collective if a region is gathered.
    """
    staged = []
    for component in components:
        gathered: list[WriteRequest] = []
        for name, requests in _gather_regions(component):
            with all_or_none(f"copy {name}", CheckpointError):
                tensors = copy_to_host([request.tensor for request in requests])
                gathered += [replace(request, tensor=tensor) for request, tensor in zip(requests, tensors, strict=True)]
        # Drop the references, so that tensors that the trainer replaces or offloads during the write are freed.
        staged.append(replace(component, staged_gathered=gathered, tensors={}))
    return staged


def _gather_regions(component: Component) -> Iterator[tuple[str, list[WriteRequest]]]:
    """Gather the regions that need it, one at a time, and yield this rank's write requests for each; collective."""
    gathered: dict[str, torch.Tensor] = {}
    for name, region in component.layout.gathered.items():
        with all_or_none(f"gather {name}", CheckpointError):  # one phase per region: the next gather needs every rank
            requests = gathered_write_requests(region, component.tensors, gathered, component.entries[name])
        yield name, requests


def read_all(requests: Sequence[ReadRequest], checksums: Checksums | None, label: str) -> None:
    """Carry out this rank's read requests; collective.

    Raises:
        DamageError: on every rank: a file cannot be read, or its bytes do not match their checksum.
    """
    reader = RequestReader(requests, checksums, label)
    with convert_dcp_errors(DamageError):
        load({}, storage_reader=reader, process_group=group_in_use(), no_dist=not dist.is_initialized())


@contextmanager
def convert_dcp_errors(kind: type[CheckpointError] = CheckpointError) -> Iterator[None]:
    """Convert torch's CheckpointException, a BaseException that it raises on every rank, to our error class."""
    try:
        yield
    except CheckpointException as report:
        texts = {rank: error_text(cause) for rank, (cause, _) in sorted(report.failures.items())}
        if len(set(texts.values())) == 1 and len(texts) == world_size():
            raise kind(texts[0]) from None
        failed = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        raise kind(f"cannot read or write the checkpoint: {failed}") from None


def check_shapes(
    what: str, tensors: Mapping[str, torch.Tensor], layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """Check that all tensors are stored, in the same shapes; ``layout`` contains the stored shapes and dtypes.

    Raises:
        CheckpointError: a tensor is not in the checkpoint, or has another shape there.
    """
    if missing := [name for name in tensors if name not in layout]:
        raise CheckpointError(
            f"cannot load the {what}: the checkpoint lacks {some(missing, 'tensor')}, expected all. Build the model "
            "from the configuration that it was saved with."
        )
    different = {n: (layout[n][0], tuple(t.shape)) for n, t in tensors.items() if tuple(t.shape) != layout[n][0]}
    if different:
        shapes = describe_shapes(different, "the checkpoint")
        raise CheckpointError(f"cannot load the {what}: {shapes}. {CHECKPOINT.for_shapes(different)}")
