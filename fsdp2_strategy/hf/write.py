"""Carry out writes: parts of tensors into their places in files, in parallel, hashed, with the cast on the way.

Input: jobs, which name a part of a tensor and the box of a file's entry that it is. Output: bytes in files, and their
checksums. Knows nothing of models.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from fsdp2_strategy.hf.checksum import BLOCK_BYTES, IN_CACHE_BYTES, Block
from fsdp2_strategy.hf.container import Entry, memory_of, write_from
from fsdp2_strategy.hf.region import Box
from fsdp2_strategy.ranks import adopt_device, current_device

_THREADS = 4


@dataclass(frozen=True, eq=False)
class Job:
    """Write ``tensor`` to a box of an entry, which has its shape."""

    entry: Entry
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Run:
    """Rows of a tensor that go to consecutive bytes of a file."""

    path: Path
    offset: int
    dtype: torch.dtype
    tensor: torch.Tensor


def write_all(jobs: Sequence[Job], *, hashed: bool = False) -> dict[Path, list[Block]]:
    """Write all jobs into files that exist in their full length.

    Returns:
        For each file the checksums of what was written to it; none unless ``hashed``.

    Raises:
        OSError: a file cannot be written; its name is in the error.
    """
    runs = sorted(itertools.chain.from_iterable(map(_runs, jobs)), key=lambda run: (run.path, run.offset))
    files = {path: os.open(path, os.O_WRONLY) for path in dict.fromkeys(run.path for run in runs)}
    scratch = threading.local()
    written: dict[Path, list[Block]] = {path: [] for path in files}
    try:
        with ThreadPoolExecutor(_THREADS, initializer=adopt_device, initargs=(current_device(),)) as pool:
            try:
                blocks = pool.map(lambda run: _write(files[run.path], run, scratch, hashed=hashed), runs)
                for run, block in zip(runs, blocks, strict=True):
                    if block is not None:
                        written[run.path].append(block)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, ", ".join(str(path) for path in files)) from error
    finally:
        for fd in files.values():
            os.close(fd)
    return written


def force_to_disk(paths: Sequence[Path]) -> None:
    """Return when what this rank wrote to the files is on disk.

    Raises:
        OSError: it cannot be written.
    """
    for path in paths:
        fd = os.open(path, os.O_WRONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _runs(job: Job) -> Iterator[_Run]:
    """Cut a job into parts that are consecutive in the file, and each fit into one block."""
    shape, itemsize = job.entry.shape, job.entry.dtype.itemsize
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    # Dimensions after `whole` are covered in full: a range of indices of `whole` is one run.
    whole = len(shape) - 1
    while whole > 0 and job.box[whole] == (0, shape[whole]):
        whole -= 1
    leading = [range(begin, begin + length) for begin, length in job.box[: max(whole, 0)]]
    for index in itertools.product(*leading):
        offset = job.entry.offset + itemsize * sum(i * s for i, s in zip(index, strides, strict=False))
        part = job.tensor
        for i, (begin, _) in zip(index, job.box, strict=False):
            part = part[i - begin]
        if not shape:
            yield _Run(job.entry.path, offset, job.entry.dtype, part.reshape(1))
            continue
        begin, length = job.box[whole]
        row = strides[whole] * itemsize
        at_once = max(1, BLOCK_BYTES // max(1, row))
        for at in range(0, length, at_once):
            rows = part.narrow(0, at, min(at_once, length - at))
            yield from _small_enough(_Run(job.entry.path, offset + (begin + at) * row, job.entry.dtype, rows))


def _small_enough(run: _Run) -> Iterator[_Run]:
    """Cut a single row that is larger than the scratch buffer along its next dimensions."""
    if run.tensor.numel() * run.dtype.itemsize <= BLOCK_BYTES or run.tensor.ndim < 2:
        if run.tensor.numel():
            yield run
        return
    inner = run.tensor[0]
    row = math.prod(inner.shape[1:]) * run.dtype.itemsize
    at_once = max(1, BLOCK_BYTES // max(1, row))
    for at in range(0, len(inner), at_once):
        yield from _small_enough(_Run(run.path, run.offset + at * row, run.dtype, inner[at : at + at_once]))


@torch.no_grad()
def _write(fd: int, run: _Run, scratch: threading.local, *, hashed: bool) -> Block | None:
    tensor = run.tensor
    if tensor.device.type != "cpu" or tensor.dtype != run.dtype or not tensor.is_contiguous():
        size = tensor.numel() * run.dtype.itemsize
        buffer: torch.Tensor | None = getattr(scratch, "buffer", None)
        if buffer is None:
            pin = torch.cuda.is_available()
            buffer = scratch.buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pin)
        tensor = buffer[:size].view(run.dtype).view(tensor.shape).copy_(tensor)
    memory = memory_of(tensor)
    if not hashed:
        write_from(fd, run.offset, memory)
        return None
    digest = xxhash.xxh3_64()
    for at in range(0, len(memory), IN_CACHE_BYTES):
        part = memory[at : at + IN_CACHE_BYTES]
        digest.update(part)
        write_from(fd, run.offset + at, part)
    return Block(run.offset, run.offset + len(memory), digest.hexdigest())
