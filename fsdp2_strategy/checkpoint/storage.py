"""Tensors by name -> a directory, and back, through `torch.distributed.checkpoint`.

Input: a flat mapping of names to DTensors and plain tensors. Output: the files of one directory. Plain tensors are
taken from one rank; sharded ones are written by the ranks that hold them, and read back under any other sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fsdp2_strategy.errors import CheckpointError


def write_tensors(tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write tensors and force them to disk; collective.

    One thread a rank: with more, torch swallows their errors. Plain tensors are the lowest rank's: by default torch
    takes each from the rank that has least to write, and batch-norm statistics of several ranks get mixed.
    """
    writer = FileSystemWriter(directory, thread_count=1, sync_files=True)
    with _one_error():
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        save(dict(tensors), storage_writer=writer, planner=planner, no_dist=not dist.is_initialized())


@contextmanager
def _one_error() -> Iterator[None]:
    """Turn torch's report of all failing ranks, a BaseException that it raises on every rank, into an error of ours."""
    try:
        yield
    except CheckpointException as report:
        texts = [
            f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(report.failures.items())
        ]
        raise CheckpointError("cannot go on with the checkpoint: " + "; ".join(texts)) from report


def read_layout(directory: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every tensor in a directory; not collective."""
    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Fill tensors in place from a directory that holds them all; collective."""
    if not tensors:
        return
    with _one_error():
        load(dict(tensors), storage_reader=FileSystemReader(directory), no_dist=not dist.is_initialized())


def check_shapes(
    what: str, tensors: Mapping[str, torch.Tensor], layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """Compare shapes before a byte is copied.

    Raises:
        CheckpointError: a tensor has another shape in the checkpoint.
    """
    for name, tensor in tensors.items():
        shape = layout[name][0]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"cannot load the {what}: {name} is {list(shape)} in the checkpoint, expected {list(tensor.shape)}. "
                "Build the model from the configuration that it was saved with."
            )


def total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of all tensors, unsharded."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
