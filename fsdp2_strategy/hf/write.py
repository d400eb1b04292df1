"""Carry out writes: parts of tensors into their places in files, in parallel, hashed, with the cast on the way.

Input: jobs, which name a part of a tensor and the box of a file's entry that it is. Output: bytes in files, and their
checksums. Knows nothing of models.

[Note: in turn] The kernel lets one writer at a time into a file, and every rank writes to all files, for it holds a
part of every tensor. So ranks begin at different files, and threads of a rank at different ones again. With fewer files
than writers, some wait.
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
    """Write ``tensor`` to a box of an entry, which has its shape."""

    entry: Entry
    box: Box
    tensor: torch.Tensor
    alone: bool = False
    """Whether it shares no block with what lies beside it: what is written before or after others."""


@dataclass(frozen=True, eq=False)
class _Run:
    """Rows of a tensor that go to consecutive bytes of a file."""

    path: Path
    offset: int
    dtype: torch.dtype
    tensor: torch.Tensor
    alone: bool

    @property
    def end(self) -> int:
        """Where it ends in the file."""
        return self.offset + self.tensor.numel() * self.dtype.itemsize


def write_all(jobs: Sequence[Job], *, hashed: bool = False, create: bool = False) -> dict[Path, list[Block]]:
    """Write all jobs into files.

    Args:
        jobs: what to write.
        hashed: return checksums.
        create: make files that are not there yet. Otherwise such a file is an error: it is one that another rank has
            made in a folder of the same name, which is not this one.

    Returns:
        For each file the checksums of what was written to it; none unless ``hashed``.

    Raises:
        OSError: a file cannot be written, or is not there; its name is in the error.
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
                except IndexError:  # another thread has taken the last one
                    return
                block = _write(fd, group, scratch, hashed=hashed)
                if block is not None:
                    written[path].append(block)

    _in_turn(work, waiting)
    return written


def force_to_disk(paths: Iterable[Path]) -> None:
    """Return when what this rank wrote to the files is on disk.

    Raises:
        OSError: it cannot be written.
    """

    def force(path: Path, waiting: deque[Path]) -> None:
        waiting.clear()
        with _opened(path, os.O_WRONLY) as fd:
            os.fsync(fd)

    _in_turn(force, {path: deque([path]) for path in paths})


def _in_turn(work: Callable[[Path, deque[Any]], None], waiting: Mapping[Path, deque[Any]]) -> None:
    """Let a few threads work through what waits for files; see [Note: in turn]."""
    nobodys = deque(waiting)
    nobodys.rotate(-(rank() * len(nobodys) // world_size()))
    choosing = threading.Lock()

    def next_file() -> Path:
        """Return a file that no thread of ours works in; where there is none, the one with the most to do."""
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
        except BaseException:  # of a thread, or what interrupts this one
            stop()
            raise


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file; an error names it."""
    fd = os.open(path, flags, 0o666)
    try:
        yield fd
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)


def _together(runs: Sequence[_Run]) -> Iterator[list[_Run]]:
    """Group runs, in the order of the file, that follow each other without a gap and fit into one block."""
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
    """Cut a job into parts that are consecutive in the file, and each fit into one block."""
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
    """Return a dimension, such that those after it are covered in full: a range of its indices is one run."""
    whole = len(job.entry.shape) - 1
    while whole > 0 and job.box[whole] == (0, job.entry.shape[whole]):
        whole -= 1
    return whole


def _small_enough(run: _Run) -> Iterator[_Run]:
    """Cut a single row that is larger than the scratch buffer along its next dimensions."""
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
    """Write runs that follow each other; small ones meet in the scratch buffer and are written at once."""
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
    """Write bytes of a file; hash them while they are in the processor's cache."""
    if digest is None:
        write_from(fd, offset, memory)
        return
    for at in range(0, len(memory), sizes.CACHED_BYTES):
        part = memory[at : at + sizes.CACHED_BYTES]
        digest.update(part)
        write_from(fd, offset + at, part)
