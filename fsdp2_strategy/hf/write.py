"""Execute write requests: cast boxes of tensors and write them into files in parallel, with optional checksums.

Input: write requests (`Job`): a tensor, and the box of a file's entry that it fills. Output: bytes in files, and their
checksums. Independent of models.

[Note: write order] The kernel admits one writer at a time per file. Every rank writes to all files, because it holds a
shard of every tensor. So each rank begins at a different file, and so does each thread of a rank. If there are fewer
files than writers, some of them wait.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.process_group import adopt_device, current_device, rank, world_size
from fsdp2_strategy.hf.checksums import Block
from fsdp2_strategy.hf.regions import Box
from fsdp2_strategy.hf.safetensors_format import Entry, memory_of, write_from

_THREADS = 4


@dataclass(frozen=True, eq=False)
class Job:
    """A request to write ``tensor`` to a box of an entry; tensor and box have the same shape."""

    entry: Entry
    box: Box
    tensor: torch.Tensor
    alone: bool = False
    """Whether to write it as a block of its own, because adjacent bytes may be written in another call."""


@dataclass(frozen=True, eq=False)
class _Run:
    """Rows of a tensor that fill consecutive bytes of a file."""

    path: Path
    offset: int
    dtype: torch.dtype
    tensor: torch.Tensor
    alone: bool

    @property
    def end(self) -> int:
        """Offset of its end in the file."""
        return self.offset + self.tensor.numel() * self.dtype.itemsize


def write_all(jobs: Sequence[Job], *, hashed: bool = False, create: bool = False) -> dict[Path, list[Block]]:
    """Execute write requests.

    Args:
        jobs: the requests.
        hashed: return checksums.
        create: create missing files. If false, a missing file is an error: another rank created it in a folder that
            this rank does not see.

    Returns:
        For each file the checksums of the blocks written to it; empty lists unless ``hashed``.

    Raises:
        OSError: a file is missing or cannot be written; the error names it.
    """
    runs = sorted(itertools.chain.from_iterable(map(_runs, jobs)), key=lambda run: (run.path, run.offset))
    waiting: dict[Path, deque[list[_Run]]] = {}
    for group in _together(runs):
        waiting.setdefault(group[0].path, deque()).append(group)
    written: dict[Path, list[Block]] = {path: [] for path in waiting}
    scratch = threading.local()

    def work(path: Path, groups: deque[list[_Run]]) -> None:
        with _opened(path, os.O_WRONLY | (os.O_CREAT if create else 0)) as fd:
            while groups:
                try:
                    group = groups.popleft()
                except IndexError:  # another thread took the last one
                    return
                block = _write(fd, group, scratch, hashed=hashed)
                if block is not None:
                    written[path].append(block)

    _in_turn(work, waiting)
    return written


def force_to_disk(paths: Iterable[Path]) -> None:
    """Flush files to disk with fsync.

    Raises:
        OSError: a file is missing or cannot be flushed.
    """

    def force(path: Path, waiting: deque[Path]) -> None:
        waiting.clear()
        with _opened(path, os.O_WRONLY) as fd:
            os.fsync(fd)

    _in_turn(force, {path: deque([path]) for path in paths})


def _in_turn(work: Callable[[Path, deque[Any]], None], waiting: Mapping[Path, deque[Any]]) -> None:
    """Process the queues of the files in a few threads; see [Note: write order]."""
    nobodys = deque(waiting)
    nobodys.rotate(-(rank() * len(nobodys) // world_size()))
    choosing = threading.Lock()

    def next_file() -> Path:
        """Return a file that no thread of this rank has taken; if there is none, the one with the longest queue."""
        with choosing:
            return nobodys.popleft() if nobodys else max(waiting, key=lambda path: len(waiting[path]))

    def stop() -> None:
        for left in waiting.values():
            left.clear()

    def work_in_turn() -> None:
        try:
            while waiting[path := next_file()]:
                work(path, waiting[path])
        except BaseException:
            stop()
            raise

    threads = min(_THREADS, sum(map(len, waiting.values())))
    if not threads:
        return
    with ThreadPoolExecutor(threads, initializer=adopt_device, initargs=(current_device(),)) as pool:
        workers = [pool.submit(work_in_turn) for _ in range(threads)]
        try:
            for worker in workers:
                worker.result()
        except BaseException:  # raised by a worker, or an interrupt of this thread
            stop()
            raise


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file, and add its name to errors."""
    fd = os.open(path, flags, 0o666)
    try:
        yield fd
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)


def _together(runs: Sequence[_Run]) -> Iterator[list[_Run]]:
    """Group sorted runs: those of a group are adjacent in the file and fit into one block."""
    group: list[_Run] = []
    for run in runs:
        follows = group and (run.path, run.offset, False) == (group[-1].path, group[-1].end, run.alone)
        if group and not (follows and not group[-1].alone and run.end - group[0].offset <= sizes.BLOCK_BYTES):
            yield group
            group = []
        group.append(run)
    if group:
        yield group


def _runs(job: Job) -> Iterator[_Run]:
    """Split a request into runs: consecutive bytes of the file, at most one block each."""
    shape, itemsize = job.entry.shape, job.entry.dtype.itemsize
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    whole = _whole_from(job)
    leading = [range(begin, begin + length) for begin, length in job.box[: max(whole, 0)]]
    for index in itertools.product(*leading):
        offset = job.entry.offset + itemsize * sum(i * s for i, s in zip(index, strides, strict=False))
        part = job.tensor
        for i, (begin, _) in zip(index, job.box, strict=False):
            part = part[i - begin]
        if not shape:
            yield _Run(job.entry.path, offset, job.entry.dtype, part.reshape(1), job.alone)
            continue
        begin, length = job.box[whole]
        row = strides[whole] * itemsize
        at_once = max(1, sizes.BLOCK_BYTES // max(1, row))
        for at in range(0, length, at_once):
            rows = part.narrow(0, at, min(at_once, length - at))
            run = _Run(job.entry.path, offset + (begin + at) * row, job.entry.dtype, rows, job.alone)
            yield from _small_enough(run)


def _whole_from(job: Job) -> int:
    """Return the outermost dimension such that the box covers all later ones: a range of its indices is one run."""
    whole = len(job.entry.shape) - 1
    while whole > 0 and job.box[whole] == (0, job.entry.shape[whole]):
        whole -= 1
    return whole


def _small_enough(run: _Run) -> Iterator[_Run]:
    """Split a run of one row that is larger than a block along its next dimensions."""
    if run.tensor.numel() * run.dtype.itemsize <= sizes.BLOCK_BYTES or run.tensor.ndim < 2:
        if run.tensor.numel():
            yield run
        return
    inner = run.tensor[0]
    row = math.prod(inner.shape[1:]) * run.dtype.itemsize
    at_once = max(1, sizes.BLOCK_BYTES // max(1, row))
    for at in range(0, len(inner), at_once):
        part = inner[at : at + at_once]
        yield from _small_enough(_Run(run.path, run.offset + at * row, run.dtype, part, run.alone))


@torch.no_grad()
def _write(fd: int, runs: Sequence[_Run], scratch: threading.local, *, hashed: bool) -> Block | None:
    """Write adjacent runs: directly if large, on the CPU and without a cast, else through the scratch buffer."""
    digest = xxhash.xxh3_64() if hashed else None
    begin, filled = runs[0].offset, 0
    for run in runs:
        tensor, size = run.tensor, run.end - run.offset
        as_it_is = tensor.device.type == "cpu" and tensor.dtype == run.dtype and tensor.is_contiguous()
        if as_it_is and size > sizes.SMALL_WRITE_BYTES:
            _write_bytes(fd, begin, memory_of(_buffer(scratch)[:filled]), digest)
            _write_bytes(fd, run.offset, memory_of(tensor), digest)
            begin, filled = run.end, 0
        else:
            room = _buffer(scratch)[filled : filled + size]
            if as_it_is:
                room.copy_(tensor.reshape(-1).view(torch.uint8))
            elif filled % run.dtype.itemsize == 0:
                room.view(run.dtype).view(tensor.shape).copy_(tensor)
            else:
                room.copy_(tensor.to(run.dtype).reshape(-1).view(torch.uint8))
            filled += size
    _write_bytes(fd, begin, memory_of(_buffer(scratch)[:filled]), digest)
    return Block(runs[0].offset, runs[-1].end, digest.hexdigest()) if digest else None


def _buffer(scratch: threading.local) -> torch.Tensor:
    buffer: torch.Tensor | None = getattr(scratch, "buffer", None)
    if buffer is None:
        buffer = scratch.buffer = torch.empty(
            sizes.BLOCK_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
        )
    return buffer


def _write_bytes(fd: int, offset: int, memory: memoryview, digest: xxhash.xxh3_64 | None) -> None:
    """Write bytes to a file; hash them in chunks that fit into the processor's cache."""
    if digest is None:
        write_from(fd, offset, memory)
        return
    for at in range(0, len(memory), sizes.CACHED_BYTES):
        part = memory[at : at + sizes.CACHED_BYTES]
        digest.update(part)
        write_from(fd, offset + at, part)
