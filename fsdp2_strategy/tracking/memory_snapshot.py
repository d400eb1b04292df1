"""Write a snapshot of the accelerator's memory when it is full.

Input: the allocations that torch records. Output: a file that https://docs.pytorch.org/memory_viz shows, which the log
and the error name. It is written before torch raises, so it has the tensors that filled the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from fsdp2_strategy.distributed.accelerator import accelerator_type
from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.distributed.out_of_memory import forget_snapshot, has_snapshot, remember_snapshot
from fsdp2_strategy.distributed.torch_internals import memory_recorder
from fsdp2_strategy.errors import ConfigError, size_text

_folders: list[Path] = []
"""The folder of the process's snapshots while allocations are recorded."""
_observed: set[str] = set()
"""Types of accelerators to which the observer is attached; torch cannot remove it."""


def record_allocations(folder: Path) -> None:
    """Record this rank's allocations, and write a snapshot into ``folder`` the first time that memory is full.

    Not collective. The file is ``out_of_memory_rank<n>.pickle``.

    Raises:
        ConfigError: there is no accelerator, or torch cannot record the allocations of its type.
    """
    device_type = accelerator_type()
    recorder = None if device_type is None else memory_recorder(device_type)
    if device_type is None or recorder is None:
        found = "there is none" if device_type is None else f"it is {device_type!r}"
        raise ConfigError(
            f"cannot record memory for memory_snapshot: the accelerator must be one whose allocations torch records, "
            f"and {found}, expected 'cuda'. Set memory_snapshot=False."
        )
    forget_snapshot()
    _folders[:] = [folder]
    if device_type not in _observed:
        _observed.add(device_type)
        dump = recorder.dump
        recorder.on_out_of_memory(lambda _, wanted_bytes, *__: _write(dump, wanted_bytes))
    recorder.record(True)


def stop_recording() -> None:
    """Undo `record_allocations`; without it, do nothing."""
    device_type = accelerator_type() if _folders else None
    _folders.clear()
    if device_type is not None and (recorder := memory_recorder(device_type)) is not None:
        recorder.record(False)


def _write(dump: Callable[[str], None], wanted_bytes: int) -> None:
    """Write the snapshot of the first allocation that failed; torch calls this before it raises."""
    if not _folders or has_snapshot():
        return
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = _folders[0] / f"out_of_memory_rank{rank}.pickle"
    message = "rank %d is out of memory: %s could not be allocated"
    try:
        dump(str(path))
    except OSError as error:
        # torch's own error follows, and an error raised here would replace it.
        logger.error(message + ", and no snapshot could be written: %s", rank, size_text(wanted_bytes), error)
        return
    remember_snapshot(path)
    logger.error(
        message + "; the memory snapshot is %s, which https://docs.pytorch.org/memory_viz shows",
        rank,
        size_text(wanted_bytes),
        path,
    )
