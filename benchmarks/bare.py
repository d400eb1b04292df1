"""The bare contestant: each rank writes its bytes to a file of its own, and reads them back from there.

Input: the tensors of a rank. Output: a file for each rank, and memory filled from it. This is the best that the machine
can do for the same bytes on the same ranks: large sequential calls, no length set beforehand, and no step in which a
rank waits for another. There is no collective in it; the barriers around its turn are on the harness's process group.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp2_strategy.hf.safetensors_format import memory_of

CALL_BYTES = 16 << 20
CALL_BUFFERS = 1024
"""Buffers of one vectored call: Linux's limit."""
WRITERS = 1
"""Threads of a rank that write. Linux locks a file while it is written to, so more threads wait for each other."""
READERS = 4
"""Threads of a rank that read, at most; no more than its share of the cores."""

Call = tuple[int, list[memoryview]]
"""Where in the file one vectored call begins, and the memory that it writes or fills."""
_Vectored = Callable[[int, list[memoryview], int], int]
"""``os.pwritev`` or ``os.preadv``."""


def calls_of(tensors: Sequence[torch.Tensor]) -> list[Call]:
    """Cut the memory of tensors, one after the other, into vectored calls: Python's work, done before the turn."""
    calls: list[Call] = []
    at, room = 0, 0
    for memory in (memory_of(tensor) for tensor in tensors if tensor.numel()):
        left = memory
        while left:
            if not room or len(calls[-1][1]) == CALL_BUFFERS:
                calls.append((at, []))
                room = CALL_BYTES
            part, left = left[:room], left[room:]
            calls[-1][1].append(part)
            at, room = at + len(part), room - len(part)
    return calls


def write(calls: Sequence[Call], folder: Path, *, threads: int = WRITERS) -> None:
    """Write this rank's file and force it to disk."""
    fd = os.open(path_in(folder), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        _carry_out(os.pwritev, fd, calls, threads)
        os.fsync(fd)
    finally:
        os.close(fd)


def read(calls: Sequence[Call], folder: Path, *, threads: int | None = None) -> None:
    """Fill memory from this rank's file."""
    fd = os.open(path_in(folder), os.O_RDONLY)
    share = len(os.sched_getaffinity(0)) // dist.get_world_size()
    try:
        _carry_out(os.preadv, fd, calls, threads or min(READERS, max(1, share)))
    finally:
        os.close(fd)


def path_in(folder: Path) -> Path:
    """Return this rank's file."""
    return folder / f"bare-{dist.get_rank()}-of-{dist.get_world_size()}"


def _carry_out(function: _Vectored, fd: int, calls: Sequence[Call], threads: int) -> None:
    if threads == 1:
        for offset, buffers in calls:
            _repeat(function, fd, offset, buffers)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda call: _repeat(function, fd, *call), calls))


def _repeat(function: _Vectored, fd: int, offset: int, buffers: list[memoryview]) -> None:
    """Call until all bytes are moved: the kernel may stop early."""
    while buffers:
        count = function(fd, buffers, offset)
        if not count:
            raise OSError(f"{Path(f'/proc/self/fd/{fd}').readlink()} ends at byte {offset}, expected more")
        offset += count
        buffers = _without(buffers, count)


def _without(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers that are left after their first bytes."""
    for i, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[i + 1 :]]
        count -= len(buffer)
    return []
