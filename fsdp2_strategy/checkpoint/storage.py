"""Write the components of a checkpoint, or call `torch.distributed.checkpoint` with read requests.

Input: `Component`s, each a folder of files and the tensors to write to it; for a load, read requests. Output: the
files and checksums; for a load, filled tensors.

A save has its own phases, since DCP's are eight collectives more: what a rank writes follows from its layouts, whose
digests the ranks compare with the arguments of the save. A tensor whose values in the files are not this rank's own (a
conversion that cuts across shards) is gathered after the others are written, one tensor at a time.

In a load, DCP runs the phases, and raises errors on all ranks; planner and reader are in `storage.dcp_load`. Ranks that
hold the same shards divide the reads; they broadcast what they read after DCP's `load`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from fsdp2_strategy.checkpoint.paths import CheckpointPaths
from fsdp2_strategy.distributed.agreement import all_or_none, error_text
from fsdp2_strategy.distributed.process_group import group_in_use, world_size
from fsdp2_strategy.errors import CheckpointError, DamageError, some
from fsdp2_strategy.hf.mismatches import CHECKPOINT, describe_shapes
from fsdp2_strategy.storage.checksums import Block, Checksums
from fsdp2_strategy.storage.component import Component, write_local
from fsdp2_strategy.storage.dcp_load import LocalLoadPlanner, Reads, RegionReader
from fsdp2_strategy.storage.file_reads import repeated
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.safetensors_format import Entry, read_header
from fsdp2_strategy.storage.shares import gathered_write_requests
from fsdp2_strategy.storage.verified_read import ReadRequest
from fsdp2_strategy.storage.write import WriteRequest, force_to_disk, write_all

SAME_TENSORS = "the same names, shapes and dtypes of tensors on all ranks. Save the same state on all ranks."
"""What `Component.digest` shows of a save; the end of an error."""

LoadTargets = Sequence[tuple[str, Region, torch.Tensor]]
"""Tensors to fill, each with its name and the location of its values in files."""


def stored_in(folder: Path, paths: CheckpointPaths | None = None) -> dict[str, Entry]:
    """Locate the tensors in a folder's safetensors files, of those that the manifest of ``paths`` lists; by name."""
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
    """Pair tensors with the stored tensors of the same names; raise if one is missing or has another shape."""
    check_shapes(what, tensors, {name: (entry.shape, entry.dtype) for name, entry in stored.items()})
    return [(n, Region.of(stored[n], stored[n].shape, stored[n].dtype), tensor) for n, tensor in tensors.items()]


def write_components(components: Sequence[Component]) -> dict[Path, list[Block]]:
    """Write components and fsync their files; return the checksums of the bytes that this rank wrote.

    Their folders exist. Collective if regions are gathered: the next gather needs every rank.
    """
    gathers = [component for component in components if component.staged is None and component.layout.gathered]
    if not gathers:
        return write_local(components)
    with all_or_none("write a checkpoint", CheckpointError):
        blocks = write_local(components)
    for component in gathers:
        for name, requests in _gather_regions(component):
            with all_or_none(f"write {name}", CheckpointError):
                written = write_all(requests, hashed=True, is_signed=component.is_signed)
                force_to_disk([component.entries[name].path])
            for path, of_file in written.items():
                blocks.setdefault(path, []).extend(of_file)
    return blocks


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
    """Return the components with copies of gathered values, and without the model's tensors; collective."""
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
    """Carry out this rank's read requests; collective. ``label`` names the load in the progress bar."""
    reads = Reads(requests)
    regions = {key: request.region for key, request in reads.by_key().items()}
    with convert_dcp_errors(DamageError):
        load(
            {"reads": reads},
            storage_reader=RegionReader(regions, checksums, label),
            planner=LocalLoadPlanner(),
            process_group=group_in_use(),
            no_dist=not dist.is_initialized(),
        )


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
    """Raise if a tensor is not among the stored shapes and dtypes of ``layout``, or has another shape there."""
    if missing := [name for name in tensors if name not in layout]:
        raise CheckpointError(
            f"cannot load the {what}: the checkpoint lacks {some(missing, 'tensor')}, expected all. Build the model "
            "from the configuration that it was saved with."
        )
    different = {n: (layout[n][0], tuple(t.shape)) for n, t in tensors.items() if tuple(t.shape) != layout[n][0]}
    if different:
        shapes = describe_shapes(different, "the checkpoint")
        raise CheckpointError(f"cannot load the {what}: {shapes}. {CHECKPOINT.for_shapes(different)}")
