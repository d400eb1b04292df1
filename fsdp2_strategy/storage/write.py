"""Execute write requests: cast boxes of tensors and write them into files in parallel, with optional checksums.

Input: write requests (`WriteRequest`): a tensor, and the box of a file's entry that the tensor fills. Output: bytes in
files, and their checksums. Independent of models.

[Note: write order] The kernel admits one writer at a time per file. Every rank writes to all files, because it holds a
shard of every tensor. So each rank begins at a different file, and so does each thread of a rank. If there are fewer
files than writers, some writers wait.

[Note: ends of blocks] A load reads complete checksum blocks, also those of which a rank needs only a part. So blocks
end where the parts that ranks read end: before and after each large part of a tensor, and between split tensors and
those that all ranks read, such as the ``step`` of AdamW. In a large part, blocks also end where shards end if 2, 3, 4,
6, 8, 12 ... ranks split the tensor, down to an eighth of the part: another number of ranks may load it. A small part of
a split tensor shares a block with adjacent ones, because a block takes about 50 bytes of the checksum manifest.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.device_order import DeviceOrder
from fsdp2_strategy.distributed.process_group import current_device, rank, world_size
from fsdp2_strategy.model.boxes import Box
from fsdp2_strategy.storage.checksums import Block, BlockHash, strided_block
from fsdp2_strategy.storage.safetensors_format import Entry, memory_of, write_from

_THREADS = 4


@dataclass(frozen=True, eq=False)
class WriteRequest:
    """A write request: fill the box of an entry with the values of ``tensor``, which has the shape of the box."""

    entry: Entry
    box: Box
    tensor: torch.Tensor
    separate_blocks: bool = False
    """Whether this request gets checksum blocks of its own, without bytes of other requests. True for gathered tensors:
    a synchronous save writes each in its own call of `write_all`, an asynchronous save all in one call. Both must write
    the same checksum blocks."""
    is_in_grid: bool = False
    """Whether the boxes that all ranks write to the entry form a grid, so that those of the same rows have all columns.
    Then short runs get strided blocks; see [Note: strided blocks] in `checksums`."""
    is_replicated: bool = False
    """Whether all ranks hold all values of the entry; see [Note: ends of blocks]."""


@dataclass(eq=False, slots=True)
class _Run:
    """Rows of a tensor that fill consecutive bytes of a file, or, with a stride, a run of bytes each."""

    path: Path
    offset: int
    dtype: torch.dtype
    tensor: torch.Tensor
    separate_blocks: bool
    is_replicated: bool
    cuts: Sequence[int] = ()
    """File offsets within the run at which a checksum block ends."""
    stride: int = 0
    """Distance in bytes between the rows in the file; 0 if they are consecutive."""
    nbytes: int = field(init=False)
    """Number of bytes that are written."""
    end: int = field(init=False)
    """The file offset at which the run ends."""

    def __post_init__(self) -> None:
        self.nbytes = self.tensor.numel() * self.dtype.itemsize
        self.end = self.offset + self.nbytes
        if self.stride:
            count = len(self.tensor)
            self.end = self.offset + (count - 1) * self.stride + self.nbytes // count


def write_all(
    requests: Sequence[WriteRequest], *, hashed: bool = False, create: bool = False, is_signed: bool = False
) -> dict[Path, list[Block]]:
    """Execute write requests; return the checksums of what was written to each file, if ``hashed``.

    Unless ``create``, a missing file is an error: the folder is not shared with the rank that created the file.
    """
    of_file: dict[Path, list[_Run]] = {}
    for run in itertools.chain.from_iterable(map(_runs, requests)):
        of_file.setdefault(run.path, []).append(run)
    queues: dict[Path, deque[list[_Run]]] = {}
    for path in sorted(of_file):
        queues[path] = deque(_group_adjacent(sorted(of_file[path], key=lambda run: run.offset)))
    written: dict[Path, list[Block]] = {path: [] for path in queues}
    scratch = threading.local()

    def work(path: Path, groups: deque[list[_Run]]) -> None:
        with torch.no_grad(), opened(path, os.O_WRONLY | (os.O_CREAT if create else 0)) as fd:
            while True:
                try:
                    group = groups.popleft()
                except IndexError:
                    return
                written[path].extend(_write(fd, group, scratch, hashed=hashed, is_signed=is_signed))

    _process_queues(work, queues)
    return written


def force_to_disk(paths: Iterable[Path]) -> None:
    """Flush files to disk with fsync."""

    def force(path: Path, queue: deque[Path]) -> None:
        queue.clear()
        with opened(path, os.O_WRONLY) as fd:
            os.fsync(fd)

    _process_queues(force, {path: deque([path]) for path in paths})


def _process_queues(work: Callable[[Path, deque[Any]], None], queues: Mapping[Path, deque[Any]]) -> None:
    """Call ``work`` with files and their queues until all queues are empty, in threads; see [Note: write order]."""
    untaken = deque(queues)
    untaken.rotate(-(rank() * len(untaken) // world_size()))
    lock = threading.Lock()

    def next_file() -> Path:
        """Return a file that no thread of this rank has taken; if all are taken, the file with the longest queue."""
        with lock:
            return untaken.popleft() if untaken else max(queues, key=lambda path: len(queues[path]))

    def take_files() -> None:
        while queues[path := next_file()]:
            work(path, queues[path])

    threads = min(_THREADS, sum(map(len, queues.values())))
    if not threads:
        return
    with ThreadPoolExecutor(threads, initializer=DeviceOrder.of_this_thread().enter) as pool:
        workers = [pool.submit(take_files) for _ in range(threads)]
        try:
            wait(workers, return_when=FIRST_EXCEPTION)
        finally:  # after an error, or an interrupt of this thread: stop the workers
            for queue in queues.values():
                queue.clear()
    for worker in workers:
        worker.result()


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file, and add its path to errors inside the block."""
    fd = os.open(path, flags, 0o666)
    try:
        yield fd
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)


def _runs(request: WriteRequest) -> Iterator[_Run]:
    """Split a request into runs of at most ``BLOCK_BYTES``."""
    entry, tensor = request.entry, request.tensor
    if not tensor.numel():
        return
    of_request = (request.separate_blocks, request.is_replicated)
    if not entry.shape:
        yield _Run(entry.path, entry.offset, entry.dtype, tensor.reshape(1), *of_request)
        return
    (begin, length), inner_box, inner_shape = request.box[0], request.box[1:], entry.shape[1:]
    row_bytes = math.prod(inner_shape) * entry.dtype.itemsize
    if row_bytes <= sizes.BLOCK_BYTES and inner_box == tuple((0, n) for n in inner_shape):
        step = sizes.BLOCK_BYTES // row_bytes
        for at in range(0, length, step):
            first, count = begin + at, min(step, length - at)
            rows = tensor.narrow(0, at, count) if count < length else tensor
            cuts = [entry.offset + row * row_bytes for row in _cut_rows(first, count, entry.shape[0], row_bytes)]
            yield _Run(entry.path, entry.offset + first * row_bytes, entry.dtype, rows, *of_request, cuts)
    elif request.is_in_grid and _gets_strided_blocks(request, row_bytes):
        step = sizes.BLOCK_BYTES // row_bytes
        first = entry.offset + inner_box[0][0] * math.prod(inner_shape[1:]) * entry.dtype.itemsize
        for at in range(0, length, step):
            rows = tensor.narrow(0, at, min(step, length - at))
            offset = first + (begin + at) * row_bytes
            yield _Run(entry.path, offset, entry.dtype, rows, True, request.is_replicated, stride=row_bytes)
    else:
        for i, row in enumerate(tensor.unbind(), begin):
            inner = Entry(entry.name, entry.path, entry.offset + i * row_bytes, entry.dtype, inner_shape)
            yield from _runs(replace(request, entry=inner, box=inner_box, tensor=row))


def _cut_rows(begin: int, length: int, full_length: int, row_bytes: int) -> list[int]:
    """Return the rows within ``length`` rows from ``begin`` on where shards begin; see [Note: ends of blocks]."""
    if length * row_bytes < sizes.SMALL_BLOCK_BYTES:
        return []
    found: set[int] = set()
    for first in (2, 3):
        ranks = first
        while ranks < 2 * full_length:  # more ranks would have no row
            shard = -(-full_length // ranks)
            if shard * 8 < length or shard * row_bytes < sizes.SMALL_BLOCK_BYTES:
                break
            found.update(range(begin + shard - begin % shard, begin + length, shard))
            ranks *= 2
    return sorted(found)


def _gets_strided_blocks(request: WriteRequest, row_bytes: int) -> bool:
    """Return whether each row of a request fills one run, and the rows of the entry are short.

    Equal on all ranks that hold a part of the same rows, although their runs may have different lengths.
    """
    box, shape = request.box[1:], request.entry.shape[1:]
    is_one_run = box[1:] == tuple((0, n) for n in shape[1:])
    return is_one_run and row_bytes < min(sizes.STRIDED_ROW_BYTES, sizes.BLOCK_BYTES)


def _group_adjacent(runs: Iterable[_Run]) -> Iterator[list[_Run]]:
    """Group sorted runs; the runs of a group are adjacent in the file, and fit into one block."""
    group: list[_Run] = []
    for run in runs:
        if group:
            first, last = group[0], group[-1]
            adjacent = run.offset == last.end and run.path == last.path
            separate = run.separate_blocks or last.separate_blocks
            if not adjacent or separate or run.end - first.offset > sizes.BLOCK_BYTES:
                yield group
                group = []
        group.append(run)
    if group:
        yield group


def _ends_of_blocks(runs: Sequence[_Run]) -> list[int]:
    """Return the file offsets at which the checksum blocks of adjacent runs end; see [Note: ends of blocks]."""
    ends = list(runs[0].cuts)
    for last, run in itertools.pairwise(runs):
        is_large = max(last.nbytes, run.nbytes) >= sizes.SMALL_BLOCK_BYTES
        if is_large or last.is_replicated != run.is_replicated:
            ends.append(run.offset)
        ends += run.cuts
    return [*ends, runs[-1].end]


def _write(
    fd: int, runs: Sequence[_Run], scratch: threading.local, *, hashed: bool, is_signed: bool
) -> Sequence[Block]:
    """Write adjacent runs: large contiguous CPU tensors without cast directly, others through a scratch buffer."""
    if runs[0].stride:
        return _write_rows(fd, runs[0], scratch, hashed=hashed, is_signed=is_signed)
    begin, filled = runs[0].offset, 0
    digest = BlockHash(begin, _ends_of_blocks(runs), is_signed=is_signed) if hashed else None
    for run in runs:
        tensor, size = run.tensor, run.nbytes
        as_stored = tensor.device.type == "cpu" and tensor.dtype == run.dtype and tensor.is_contiguous()
        if as_stored and (size > sizes.SMALL_WRITE_BYTES or len(runs) == 1):
            if filled:
                _write_bytes(fd, begin, memory_of(_buffer(scratch)[:filled]), digest)
            _write_bytes(fd, run.offset, memory_of(tensor), digest)
            begin, filled = run.end, 0
        else:
            target = _buffer(scratch)[filled : filled + size]
            if as_stored:
                target.copy_(tensor.reshape(-1).view(torch.uint8))
            elif filled % run.dtype.itemsize == 0:
                target.view(run.dtype).view(tensor.shape).copy_(tensor)
            else:
                target.copy_(tensor.to(run.dtype).reshape(-1).view(torch.uint8))
            filled += size
    if filled:
        _write_bytes(fd, begin, memory_of(_buffer(scratch)[:filled]), digest)
    return digest.blocks if digest else ()


def _write_rows(fd: int, run: _Run, scratch: threading.local, *, hashed: bool, is_signed: bool) -> Sequence[Block]:
    """Write rows with gaps between them."""
    rows = _buffer(scratch)[: run.nbytes].view(len(run.tensor), -1)
    rows.view(run.dtype).view(run.tensor.shape).copy_(run.tensor)
    for number, row in enumerate(rows):
        write_from(fd, run.offset + number * run.stride, memory_of(row))
    if not hashed:
        return ()
    return [strided_block(run.offset, memory_of(rows), len(rows), run.stride, is_signed=is_signed)]


def _buffer(scratch: threading.local) -> torch.Tensor:
    buffer: torch.Tensor | None = getattr(scratch, "buffer", None)
    if buffer is None:
        pinned = current_device().type != "cpu"
        buffer = scratch.buffer = torch.empty(sizes.BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned)
    return buffer


def _write_bytes(fd: int, offset: int, memory: memoryview, digest: BlockHash | None) -> None:
    """Write bytes to a file; hash them in chunks that fit into the processor's cache."""
    if digest is None:
        write_from(fd, offset, memory)
        return
    for at in range(0, len(memory), sizes.CACHED_BYTES):
        part = memory[at : at + sizes.CACHED_BYTES]
        digest.update(part)
        write_from(fd, offset + at, part)
