"""Write tensors to safetensors files in their final location, and read them, with `torch.distributed.checkpoint`.

Input: `Part`s, each a folder of files and the tensors to write to it; or a state dict. Output: the files, and the
checksums of the bytes that this rank wrote; for a load, filled tensors.

[Note: local plans] torch's planners gather the plans of all ranks on one rank, which grows with ranks times tensors.
Here each rank plans on its own, because offsets follow from names, shapes and dtypes, which are the same on all ranks.
A rank sends only an empty plan with a digest of the file headers, and the coordinator compares the digests. torch runs
the phases, and raises errors on all ranks.

[Note: layout cache] A layout contains no values, and a run saves the same models and optimizers many times. So the most
recently used layouts are cached. The key is all that determines a layout: names, shapes, dtypes, placements and sizes.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.process_group import group_in_use, rank, world_size
from fsdp2_strategy.errors import CheckpointError, DamageError, FSDP2StrategyError
from fsdp2_strategy.hf.checksums import Block, Checksums, blocks_of
from fsdp2_strategy.hf.regions import Region
from fsdp2_strategy.hf.replicated_reads import wish_for
from fsdp2_strategy.hf.safetensors_format import CONVERTED, Entry, read_header
from fsdp2_strategy.hf.save_plan import (
    File,
    Share,
    check_shared,
    create,
    file_bytes,
    files_for,
    gathered_jobs,
    index_of,
    is_direct,
    jobs_of,
    own_shares,
    values_of_shares,
)
from fsdp2_strategy.hf.verified_read import Reader, Wish
from fsdp2_strategy.hf.write import Job, force_to_disk, write_all

Wanted = Sequence[tuple[str, Region, torch.Tensor]]
"""Tensors to fill, each with its name and the location of its values in files."""


@dataclass(frozen=True)
class Layout:
    """The files of a folder, and this rank's share of them; depends only on names, shapes, dtypes and placements."""

    regions: Mapping[str, Region]
    """All tensors of the files, by name in the files; their sources are names of tensors of the model."""
    files: Sequence[File]
    """Paths are relative to the folder."""
    gathered: Mapping[str, Region]
    """The regions that are written from gathered full tensors; ranks write the others without a gather."""
    shares: Sequence[Share]
    """The boxes that this rank writes of the other regions."""

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        regions: Mapping[str, Region] | None,
        stem: str,
        most_bytes: int | None,
        metadata: Mapping[str, str],
    ) -> Layout:
        """Return the layout of a folder, from the cache if possible; see [Note: layout cache]."""
        kind = (stem, most_bytes, *metadata.items(), sizes.FILES, sizes.FILE_BYTES, sizes.LEAST_FILE_BYTES)
        key = (*kind, sizes.SHORTEST_RUN_BYTES, sizes.BLOCK_BYTES, rank(), id(regions), *_likeness(tensors))
        if key in _layouts:
            _layouts[key] = _layouts.pop(key)  # most recently used last
        else:
            while len(_layouts) >= _LAYOUTS:
                del _layouts[next(iter(_layouts))]
            given = regions
            if regions is None:
                regions = {name: Region.of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
            regions = dict(sorted(regions.items()))
            files = files_for(Path(), stem, regions, most_bytes or file_bytes(regions), metadata=metadata)
            direct = {name: region for name, region in regions.items() if is_direct(region, tensors)}
            gathered = {name: region for name, region in regions.items() if name not in direct}
            _layouts[key] = given, cls(regions, files, gathered, own_shares(direct, tensors))
        return _layouts[key][1]


_LAYOUTS = 16
"""Size of the cache, in folders of models, optimizers and averages; a layout takes about a kilobyte per tensor."""
_layouts: dict[object, tuple[object, Layout]] = {}
"""The cache; each layout with the regions passed in, so that their `id`, which is in the key, is not reused."""


def _likeness(tensors: Mapping[str, torch.Tensor]) -> Iterator[object]:
    """Yield the properties of the tensors that determine a layout."""
    places: dict[int, object] = {}
    for name, tensor in tensors.items():
        yield name, tensor.shape, tensor.dtype
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            if id(mesh) not in places:
                places[id(mesh)] = (mesh.shape, tuple(mesh.get_coordinate() or ()))
            yield places[id(mesh)], tensor.placements


@dataclass(frozen=True)
class Part:
    """One component of a checkpoint: a folder of files, and the tensors to write to it."""

    folder: Path
    stem: str
    tensors: Mapping[str, torch.Tensor]
    layout: Layout
    staged: Sequence[torch.Tensor] | None = None
    """Copies of the values of the layout's shares, in an asynchronous save."""
    staged_gathered: Sequence[Job] = ()
    """Write requests for this rank's share of the gathered regions, with copied values, in an asynchronous save."""

    @classmethod
    def of(
        cls,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        regions: Mapping[str, Region] | None = None,
        *,
        stem: str = "model",
        most_bytes: int | None = None,
        metadata: Mapping[str, str] = CONVERTED,
    ) -> Part:
        """Lay out a folder. Only names and full sizes decide which tensor is in which file.

        Args:
            folder: the folder of the files.
            tensors: by name.
            regions: the tensors of the files, by name in the files; by default ``tensors`` unchanged.
            stem: prefix of the file names.
            most_bytes: limit for the tensors in one file; by default small enough for ranks to write in parallel.
            metadata: metadata of the file headers.
        """
        return cls(folder, stem, tensors, Layout.of(tensors, regions, stem, most_bytes, metadata))

    @cached_property
    def files(self) -> list[File]:
        """The files, with paths in the folder."""
        return [file.moved_to(self.folder) for file in self.layout.files]

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The location of each tensor in the files, by name in the files."""
        return {name: entry for file in self.files for name, entry in file.entries.items()}

    def values(self) -> Sequence[torch.Tensor]:
        """Return the values of the layout's shares, in their order."""
        if self.staged is not None:
            return self.staged
        return [values for found in values_of_shares(self.layout.shares, self.tensors) for _, values in found]

    def jobs(self) -> list[Job]:
        """Return the write requests of this rank that need no gather, or whose values are already gathered."""
        shares = zip(self.layout.shares, self.values(), strict=True)
        return [*jobs_of(shares, self.entries), *self.staged_gathered]

    @property
    def total_bytes(self) -> int:
        """Total size of the files."""
        return sum(file.nbytes for file in self.layout.files)

    def header_blocks(self) -> dict[Path, list[Block]]:
        """Return the checksums of the file headers."""
        return {file.path: blocks_of(file.header) for file in self.files}


class LocalSavePlanner(SavePlanner):
    """Plan a save on each rank, without communication; see [Note: local plans]."""

    tensors: Mapping[str, torch.Tensor]

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Store the tensors of the state dict.

        Raises:
            CheckpointError: a value is not a tensor, and would have to be pickled.
        """
        for name, value in state_dict.items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"cannot save {name}: it is a {type(value).__name__}, expected a tensor. Checkpoints hold no "
                    "pickled objects: keep it in client_state."
                )
        self.tensors = dict(state_dict)

    def create_local_plan(self) -> SavePlan:
        """Return an empty plan that passes the tensors to this rank's writer."""
        return SavePlan([], planner_data=self.tensors)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans unchanged."""
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return the tensor of an item."""
        return self.tensors[write_item.index.fqn]


class SafetensorsWriter(StorageWriter):
    """Write safetensors files; each rank writes its byte ranges directly to the final files.

    Args:
        folder: the folder of a state dict.
        parts: components to write instead of the state dict.
    """

    def __init__(self, folder: str | Path, parts: Sequence[Part] = ()) -> None:
        self.parts: Sequence[Part] = ()
        self._given = parts
        self.blocks: dict[Path, list[Block]] = {}
        """Checksums of the bytes that this rank wrote."""
        self._folder = Path(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set another folder, if one is given."""
        self._folder = Path(checkpoint_id) if checkpoint_id is not None else self._folder

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Clear the checksums of an earlier save."""
        self.blocks = {}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Lay out the files; return a plan with only a digest of their headers, for the coordinator."""
        self.parts = self._given or [Part.of(self._folder, plan.planner_data or {})]
        headers = hashlib.sha256()
        for part in self.parts:
            for file in part.files:
                headers.update(str(file.path).encode() + file.header)
        return SavePlan([], storage_data=headers.hexdigest())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Compare the ranks' digests, and create the folders; the coordinator calls it.

        Raises:
            CheckpointError: ranks have different names, shapes or dtypes.
        """
        odd = [rank for rank, plan in enumerate(plans) if plan.storage_data != plans[0].storage_data]
        if odd:
            raise CheckpointError(
                f"cannot save: ranks {odd} hold other names, shapes or dtypes than rank 0, expected the same "
                "everywhere. Save the same model and optimizer on all ranks."
            )
        for part in self.parts:
            part.folder.mkdir(parents=True, exist_ok=True)
            whole = f"{part.stem}.safetensors"
            for pattern in (whole, f"{whole}.index.json", f"{part.stem}-*-of-*.safetensors"):
                for earlier in part.folder.glob(pattern):  # of an earlier save into the same folder
                    earlier.unlink()
            self.blocks |= part.header_blocks()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Create this rank's share of the files, write its ranges of all files, and fsync them."""
        files = [file for part in self.parts for file in part.files]
        first, end = (n * len(files) // world_size() for n in (rank(), rank() + 1))
        own = files[first:end]
        create(own)
        written = write_all([job for part in self.parts for job in part.jobs()], hashed=True, create=True)
        self.keep(written)
        force_to_disk({*written, *(file.path for file in own)})  # other files may not exist yet
        if rank() == 0:
            for part in (part for part in self.parts if len(part.files) > 1):
                index = part.folder / f"{part.stem}.safetensors.index.json"
                index.write_text(json.dumps(index_of(part.files), indent=2) + "\n")
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def keep(self, blocks: Mapping[Path, Sequence[Block]]) -> None:
        """Add checksums of bytes that this rank wrote."""
        for path, written in blocks.items():
            self.blocks.setdefault(path, []).extend(written)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that the files have the expected headers, which other ranks wrote; the coordinator calls it.

        Raises:
            CheckpointError: a file or its header is missing: the ranks do not share the folder.
        """
        for part in self.parts:
            check_shared(part.files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path."""
        return isinstance(checkpoint_id, str | os.PathLike)


class LocalLoadPlanner(LoadPlanner):
    """Plan a load on each rank, without communication; see [Note: local plans].

    Args:
        wishes: this rank's read requests, instead of a state dict, whose names torch would gather from all ranks.
    """

    def __init__(self, wishes: Sequence[Wish] | None = None) -> None:
        self._wishes = wishes
        self._tensors: Mapping[str, torch.Tensor] = {}

    def set_up_planner(
        self, state_dict: Mapping[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Store the tensors of the state dict."""
        self._tensors = dict(state_dict)

    def wishes(self, stored: Mapping[str, Entry]) -> Sequence[Wish]:
        """Return this rank's read requests.

        Raises:
            CheckpointError: a tensor of the state dict is not stored, or is stored in another shape.
        """
        if self._wishes is not None:
            return self._wishes
        check_shapes("state", self._tensors, {name: (entry.shape, entry.dtype) for name, entry in stored.items()})
        return [
            wish_for(name, Region.of(stored[name], stored[name].shape, stored[name].dtype), tensor)
            for name, tensor in self._tensors.items()
        ]

    def create_local_plan(self) -> LoadPlan:
        """Return an empty plan."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raise: these checkpoints contain only tensors."""
        raise CheckpointError("cannot load bytes: checkpoints hold tensors alone. Load it with the planner it is of.")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor of an item."""
        return self._tensors[read_item.dest_index.fqn]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: tensors are read in place."""


class SafetensorsReader(StorageReader):
    """Read safetensors files; each rank reads its byte ranges directly into its shards.

    Args:
        folder: the folder of the files.
        checksums: checksums to verify the bytes with; None to read without verification.
        what: label of the progress bar.
    """

    def __init__(self, folder: str | Path, checksums: Checksums | None = None, what: str = "loading") -> None:
        self._folder = Path(folder)
        self._checksums, self._what = checksums, what

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set another folder, if one is given."""
        self._folder = Path(checkpoint_id) if checkpoint_id is not None else self._folder

    def read_metadata(self) -> Metadata:
        """Return the tensors of the file headers, each as one chunk."""
        entries = stored_in(self._folder)
        described = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=entry.dtype),
                size=torch.Size(entry.shape),
                chunks=[ChunkStorageMetadata(torch.Size([0] * len(entry.shape)), torch.Size(entry.shape))],
            )
            for name, entry in entries.items()
        }
        return Metadata(dict(described), storage_data={MetadataIndex(name): e for name, e in entries.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store the location of each tensor."""
        self._entries: dict[str, Entry] = {index.fqn: entry for index, entry in metadata.storage_data.items()}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Carry out this rank's read requests.

        Raises:
            CheckpointError: the planner is not a `LocalLoadPlanner`, or a file cannot be read.
        """
        if not isinstance(planner, LocalLoadPlanner):
            raise CheckpointError(
                f"cannot load: the planner is a {type(planner).__name__}, expected a LocalLoadPlanner. Pass "
                "planner=LocalLoadPlanner()."
            )
        with Reader(self._what, self._checksums) as reader:
            reader.read(planner.wishes(self._entries))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path."""
        return isinstance(checkpoint_id, str | os.PathLike)


def stored_in(folder: Path) -> dict[str, Entry]:
    """Return the location of every tensor in a folder's safetensors files, by name; not collective.

    Raises:
        CheckpointError: a header is invalid, or two files contain the same name.
    """
    entries: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in read_header(path).items():
            if name in entries:
                raise CheckpointError(
                    f"cannot read {folder}: {entries[name].path.name} and {path.name} both hold {name}, expected it "
                    "once. Remove the file that does not belong there."
                )
            entries[name] = entry
    return entries


def by_name(what: str, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Entry]) -> Wanted:
    """Pair tensors with the stored tensors of the same names.

    Raises:
        CheckpointError: a tensor is not stored, or is stored in another shape.
    """
    check_shapes(what, tensors, {name: (entry.shape, entry.dtype) for name, entry in stored.items()})
    regions = {name: Region.of(stored[name], stored[name].shape, stored[name].dtype) for name in tensors}
    return [(name, regions[name], tensor) for name, tensor in tensors.items()]


def write_parts(folder: Path, parts: Sequence[Part]) -> dict[Path, list[Block]]:
    """Write components and fsync their files; collective.

    Returns:
        The checksums of the bytes that this rank wrote, by file.
    """
    writer = SafetensorsWriter(folder, parts)
    with one_error():
        save(
            {},
            storage_writer=writer,
            planner=LocalSavePlanner(),
            process_group=group_in_use(),
            no_dist=not dist.is_initialized(),
        )
    for part in (part for part in parts if part.staged is None):
        for name, jobs in _gathered_jobs(part):
            with all_or_none(f"write {name}", CheckpointError):
                writer.keep(write_all(jobs, hashed=True))
                force_to_disk([part.entries[name].path])
    return writer.blocks


Copies = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Copies tensors to host buffers that are valid until the save ends."""


def copied(parts: Sequence[Part], copies_of: Copies) -> list[Part]:
    """Return the parts with copies of all values that this rank writes without a gather; not collective."""
    values = [part.values() for part in parts]
    copies = iter(copies_of([tensor for own in values for tensor in own]))
    return [
        replace(part, staged=list(itertools.islice(copies, len(own)))) for part, own in zip(parts, values, strict=True)
    ]


def copied_gathered(parts: Sequence[Part], copies_of: Copies) -> list[Part]:
    """Return the parts with copies of their gathered values and without tensors; collective if a region is gathered."""
    found = []
    for part in parts:
        gathered: list[Job] = []
        for name, jobs in _gathered_jobs(part):
            with all_or_none(f"copy {name}", CheckpointError):
                tensors = copies_of([job.tensor for job in jobs])
                gathered += [replace(job, tensor=tensor) for job, tensor in zip(jobs, tensors, strict=True)]
        # No references, so that tensors that are replaced or offloaded during the write can be freed.
        found.append(replace(part, staged_gathered=gathered, tensors={}))
    return found


def _gathered_jobs(part: Part) -> Iterator[tuple[str, list[Job]]]:
    """Gather the regions that need it, one at a time, and yield this rank's write requests for each; collective."""
    gathered: dict[str, torch.Tensor] = {}
    for name, region in part.layout.gathered.items():
        with all_or_none(f"gather {name}", CheckpointError):  # a phase each: the next gather needs every rank
            jobs = gathered_jobs(region, part.tensors, gathered, part.entries[name])
        yield name, jobs


def read_wishes(folder: Path, wishes: Sequence[Wish], checksums: Checksums | None, what: str) -> None:
    """Carry out read requests on a folder's files; collective.

    Raises:
        DamageError: on every rank: a file cannot be read, or its bytes do not match their checksum.
    """
    with one_error(DamageError):
        reader = SafetensorsReader(folder, checksums, what)
        load(
            {},
            storage_reader=reader,
            planner=LocalLoadPlanner(wishes),
            process_group=group_in_use(),
            no_dist=not dist.is_initialized(),
        )


@contextmanager
def one_error(kind: type[CheckpointError] = CheckpointError) -> Iterator[None]:
    """Convert torch's CheckpointException, a BaseException that it raises on every rank, to our error class."""
    try:
        yield
    except CheckpointException as report:
        texts = {rank: _text(cause) for rank, (cause, _) in sorted(report.failures.items())}
        if len(set(texts.values())) == 1 and len(texts) == world_size():
            raise kind(texts[0]) from report
        failed = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        raise kind(f"cannot go on with the checkpoint: {failed}") from report


def _text(cause: BaseException) -> str:
    return str(cause) if isinstance(cause, FSDP2StrategyError) else f"{type(cause).__name__}: {cause}"


def check_shapes(
    what: str, tensors: Mapping[str, torch.Tensor], layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """Check that all tensors are stored, in the same shapes; ``layout`` contains the stored shapes and dtypes.

    Raises:
        CheckpointError: a tensor is not in the checkpoint, or has another shape there.
    """
    for name, tensor in tensors.items():
        shape = layout[name][0] if name in layout else None
        if tuple(tensor.shape) != shape:
            there = "not" if shape is None else str(list(shape))
            raise CheckpointError(
                f"cannot load the {what}: {name} is {there} in the checkpoint, expected {list(tensor.shape)}. "
                "Build the model from the configuration that it was saved with."
            )
