"""Measure the limit of the machine: each rank writes its bytes to its own file and reads them from there.

Input: the tensors of a rank. Output: one file per rank, and memory filled from it. This is the best that the machine
can do for the same bytes on the same ranks: large sequential calls, no length set in advance, and no waiting for other
ranks. It runs no collectives; the barriers before and after its turn are on the harness's process group.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp2_strategy.storage.safetensors_format import memory_of

CALL_BYTES = 16 << 20
CALL_BUFFERS = 1024
"""Maximum number of buffers in one vectored call: the limit of Linux."""
WRITERS = 1
"""Write threads per rank. Linux locks a file during a write, so more threads would wait for each other."""
READERS = 4
"""Maximum number of read threads per rank; its share of the cores is another limit."""

Call = tuple[int, list[memoryview]]
"""The file offset of a vectored call, and the memory that it writes or fills."""
_Vectored = Callable[[int, list[memoryview], int], int]
"""``os.pwritev`` or ``os.preadv``."""


def calls_of(tensors: Sequence[torch.Tensor]) -> list[Call]:
    """Split the memory of consecutive tensors into vectored calls, before the timed part."""
    calls: list[Call] = []
    offset, space = 0, 0
    for memory in (memory_of(tensor) for tensor in tensors if tensor.numel()):
        rest = memory
        while rest:
            if not space or len(calls[-1][1]) == CALL_BUFFERS:
                calls.append((offset, []))
                space = CALL_BYTES
            part, rest = rest[:space], rest[space:]
            calls[-1][1].append(part)
            offset, space = offset + len(part), space - len(part)
    return calls


def write(calls: Sequence[Call], folder: Path, *, threads: int = WRITERS) -> None:
    """Write this rank's file, and force it to disk."""
    fd = os.open(path_in(folder), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        _run_calls(os.pwritev, fd, calls, threads)
        os.fsync(fd)
    finally:
        os.close(fd)


def read(calls: Sequence[Call], folder: Path, *, threads: int | None = None) -> None:
    """Fill memory from this rank's file."""
    fd = os.open(path_in(folder), os.O_RDONLY)
    share = len(os.sched_getaffinity(0)) // dist.get_world_size()
    try:
        _run_calls(os.preadv, fd, calls, threads or min(READERS, max(1, share)))
    finally:
        os.close(fd)


def path_in(folder: Path) -> Path:
    """Return the path of this rank's file."""
    return folder / f"bare-{dist.get_rank()}-of-{dist.get_world_size()}"


def _run_calls(function: _Vectored, fd: int, calls: Sequence[Call], threads: int) -> None:
    if threads == 1:
        for offset, buffers in calls:
            _transfer(function, fd, offset, buffers)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda call: _transfer(function, fd, *call), calls))


def _transfer(function: _Vectored, fd: int, offset: int, buffers: list[memoryview]) -> None:
    """Repeat a call until all bytes are transferred: the kernel may transfer fewer at once."""
    while buffers:
        count = function(fd, buffers, offset)
        if not count:
            raise OSError(f"{Path(f'/proc/self/fd/{fd}').readlink()} ends at byte {offset}, expected more")
        offset += count
        buffers = _skip_bytes(buffers, count)


def _skip_bytes(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers without their first ``count`` bytes."""
    for i, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[i + 1 :]]
        count -= len(buffer)
    return []
