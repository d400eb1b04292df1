"""Read folders of ``torch.distributed.checkpoint`` that other systems wrote; an error names the file.

Input: a folder. Output: its metadata, and tensors and values filled from its files.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from fsdp2_strategy.checkpoint.foreign.pickles import unpickle, unreadable
from fsdp2_strategy.checkpoint.storage import convert_dcp_errors
from fsdp2_strategy.distributed.agreement import error_text
from fsdp2_strategy.distributed.process_group import group_in_use
from fsdp2_strategy.errors import CheckpointError


def metadata_of(folder: Path) -> Metadata:
    """Return the metadata of a folder.

    Raises:
        CheckpointError: it is missing or corrupt.
    """
    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise unreadable(folder / ".metadata", error) from error


def load_dcp(folder: Path, state: dict[str, Any], *, no_dist: bool) -> dict[str, Any]:
    """Fill tensors and values by their names in a folder, in place, and return them; collective unless ``no_dist``.

    Raises:
        CheckpointError: a file is missing or corrupt.
    """
    with _own_errors() if no_dist else convert_dcp_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(
            state,
            storage_reader=_Reader(folder),
            planner=_Planner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=None if no_dist else group_in_use(),
            no_dist=no_dist or not dist.is_initialized(),
        )
    return state


@contextmanager
def _own_errors() -> Iterator[None]:
    """Convert torch's CheckpointException of a load by this rank alone."""
    try:
        yield
    except CheckpointException as report:
        cause, _ = next(iter(report.failures.values()))
        raise CheckpointError(error_text(cause)) from None


class _Reader(FileSystemReader):
    """Read file by file, so that an error names the file."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        of_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            of_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in of_file.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except Exception as error:
                raise unreadable(Path(self.path) / name, error) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Planner(DefaultLoadPlanner):
    """Read values that are not tensors with `unpickle`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = unpickle(value)
