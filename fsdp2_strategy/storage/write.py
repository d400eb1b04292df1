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
from fsdp2_strategy.distributed.torch_internals import flattened
from fsdp2_strategy.model.boxes import Box
from fsdp2_strategy.storage.checksums import Block, BlockHash, StridedBlockHash, digest_of
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


@dataclass(eq=False, slots=True)
class _Packed:
    """Small tensors whose bytes are those of the file: they are copied into one buffer, and written from there."""

    nbytes: int
    dtype: torch.dtype
    spans: Sequence[tuple[int, int, int, Sequence[int]]]
    """Of adjacent tensors: their file offset, their begin and end in the buffer, the offsets where blocks end."""
    tensors: Sequence[torch.Tensor]


_Group = list[_Run] | _Packed


def _nbytes(group: _Group) -> int:
    return group.nbytes if isinstance(group, _Packed) else sum(run.nbytes for run in group)


class WritePlan:
    """Requests without their values: the groups of adjacent runs, which are the same in each save of a layout.

    Of many small tensors, most of the work is done here, once, and not for each tensor in each save.
    """

    def __init__(self, requests: Sequence[WriteRequest]) -> None:
        """Plan requests whose tensors are on the meta device, and whose paths are relative to a folder."""
        self._requests = requests
        runs = [(run, (number, i)) for number, each in enumerate(requests) for i, run in enumerate(_runs(each))]
        place = {id(run): number_and_index for run, number_and_index in runs}
        self._packed: dict[Path, list[tuple[_Packed, list[int]]]] = {}
        """By relative path: small tensors, and the numbers of their requests."""
        self._groups: dict[Path, list[list[tuple[int, int]]]] = {}
        """By relative path: of each run of another group the number of its request, and of the run there."""
        for path, groups in _groups_by_path(run for run, _ in runs).items():
            small = [group for group in groups if self._is_small(group, place)]
            self._packed[path] = [
                (_pack(part), [place[id(run)][0] for group in part for run in group]) for part in _parts(small)
            ]
            is_packed = {id(group) for group in small}
            self._groups[path] = [[place[id(run)] for run in group] for group in groups if id(group) not in is_packed]
        nothing = torch.empty(0, device="meta")
        self._requests = [replace(request, tensor=nothing) for request in requests]  # which takes less memory

    def _is_small(self, group: list[_Run], place: Mapping[int, tuple[int, int]]) -> bool:
        """Return whether each run of a group is a small tensor that is stored as it is."""
        return all(
            run.nbytes <= sizes.SMALL_WRITE_BYTES
            and run.tensor.dtype == run.dtype == group[0].dtype
            and run.tensor.numel() == self._requests[place[id(run)][0]].tensor.numel()
            and not run.stride
            for run in group
        )

    def with_values(self, folder: Path, values: Sequence[torch.Tensor]) -> dict[Path, list[_Group]]:
        """Return the groups with values, one for each request, by path in a folder."""
        found: dict[Path, list[_Group]] = {}
        runs: dict[int, list[_Run]] = {}

        def runs_of(number: int, path: Path) -> list[_Run]:
            if number not in runs:
                request = self._requests[number]
                entry = replace(request.entry, path=path)
                runs[number] = list(_runs(replace(request, entry=entry, tensor=values[number])))
            return runs[number]

        for relative, of_path in self._packed.items():
            path = folder / relative
            groups = found[path] = []
            for packed, numbers in of_path:
                tensors = [values[number] for number in numbers]
                if len({tensor.device for tensor in tensors}) == 1:
                    groups.append(replace(packed, tensors=tensors))
                else:  # the step of AdamW may be in host memory
                    groups += _groups_by_path(runs_of(number, path)[0] for number in numbers)[path]
            groups += [[runs_of(number, path)[i] for number, i in group] for group in self._groups[relative]]
        return found


def _parts(groups: Iterable[list[_Run]]) -> Iterator[list[list[_Run]]]:
    """Divide groups of runs into parts of one dtype that fit into one buffer."""
    part: list[list[_Run]] = []
    size = 0
    for group in sorted(groups, key=lambda group: str(group[0].dtype)):
        nbytes = _nbytes(group)
        if part and (size + nbytes > sizes.BLOCK_BYTES or group[0].dtype != part[0][0].dtype):
            yield part
            part, size = [], 0
        part.append(group)
        size += nbytes
    if part:
        yield part


def _pack(groups: Sequence[list[_Run]]) -> _Packed:
    """Return a plan to write groups from one buffer, without their tensors."""
    ends = list(itertools.accumulate(map(_nbytes, groups)))
    spans = [
        (group[0].offset, end - _nbytes(group), end, _ends_of_blocks(group))
        for group, end in zip(groups, ends, strict=True)
    ]
    return _Packed(ends[-1], groups[0][0].dtype, spans, ())


def write_all(
    requests: Sequence[WriteRequest], *, hashed: bool = False, create: bool = False, is_signed: bool = False
) -> dict[Path, list[Block]]:
    """Execute write requests; return the checksums of what was written to each file, if ``hashed``.

    Unless ``create``, a missing file is an error: the folder is not shared with the rank that created the file.
    """
    runs = itertools.chain.from_iterable(map(_runs, requests))
    queues: dict[Path, deque[_Group]] = {path: deque(groups) for path, groups in _groups_by_path(runs).items()}
    return _write_queues(queues, hashed=hashed, create=create, is_signed=is_signed)


def write_planned(
    planned: Iterable[tuple[Path, WritePlan, Sequence[torch.Tensor]]],
    further: Sequence[WriteRequest],
    *,
    is_signed: bool,
) -> dict[Path, list[Block]]:
    """Write values as plans say, each into a folder, and further requests; return the checksums of each file."""
    queues: dict[Path, deque[_Group]] = {}
    with torch.no_grad():
        for folder, plan, values in planned:
            for path, groups in plan.with_values(folder, values).items():
                queues.setdefault(path, deque()).extend(groups)
    for path, others in _groups_by_path(itertools.chain.from_iterable(map(_runs, further))).items():
        queues.setdefault(path, deque()).extend(others)
    return _write_queues(dict(sorted(queues.items())), hashed=True, create=True, is_signed=is_signed)


def _groups_by_path(runs: Iterable[_Run]) -> dict[Path, list[list[_Run]]]:
    """Return the groups of adjacent runs of each file, sorted by path and offset."""
    of_file: dict[Path, list[_Run]] = {}
    for run in runs:
        of_file.setdefault(run.path, []).append(run)
    return {path: list(_group_adjacent(sorted(of_file[path], key=lambda run: run.offset))) for path in sorted(of_file)}


def _write_queues(
    queues: dict[Path, deque[_Group]], *, hashed: bool, create: bool, is_signed: bool
) -> dict[Path, list[Block]]:
    written: dict[Path, list[Block]] = {path: [] for path in queues}
    scratch = threading.local()

    def work(path: Path, groups: deque[_Group]) -> None:
        with torch.no_grad(), opened(path, os.O_WRONLY | (os.O_CREAT if create else 0)) as fd:
            while True:
                try:
                    group = groups.popleft()
                except IndexError:
                    return
                if isinstance(group, _Packed):
                    written[path].extend(_write_packed(fd, group, scratch, hashed=hashed, is_signed=is_signed))
                else:
                    written[path].extend(_write(fd, group, scratch, hashed=hashed, is_signed=is_signed))

    total = sum(_nbytes(group) for groups in queues.values() for group in groups)
    # Starting a thread takes as long as writing a few megabytes.
    _process_queues(work, queues, min(_THREADS, sum(map(len, queues.values())), -(-total // sizes.BLOCK_BYTES)))
    return written


def force_to_disk(paths: Iterable[Path]) -> None:
    """Flush files to disk with fsync."""

    def force(path: Path, queue: deque[Path]) -> None:
        queue.clear()
        with opened(path, os.O_WRONLY) as fd:
            os.fsync(fd)

    queues = {path: deque([path]) for path in paths}
    _process_queues(force, queues, min(_THREADS, len(queues)))


def _process_queues(work: Callable[[Path, deque[Any]], None], queues: Mapping[Path, deque[Any]], threads: int) -> None:
    """Call ``work`` with files and their queues until all queues are empty, in threads; see [Note: write order]."""
    if not queues:
        return
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

    if threads <= 1:
        take_files()
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
        tensor, size, as_stored = run.tensor, run.nbytes, _is_as_stored(run)
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


def _write_packed(
    fd: int, group: _Packed, scratch: threading.local, *, hashed: bool, is_signed: bool
) -> Sequence[Block]:
    """Write small tensors from one buffer."""
    flat = flattened(group.tensors).to(group.dtype)
    if flat.device.type != "cpu":
        flat = _buffer(scratch)[: group.nbytes].view(group.dtype).copy_(flat)
    memory = memory_of(flat)
    blocks: list[Block] = []
    for offset, begin, end, ends in group.spans:
        part = memory[begin:end]
        if hashed and len(ends) == 1 and end - begin <= sizes.CACHED_BYTES and not is_signed:
            blocks.append(Block(offset, ends[0], digest_of(part)))
            write_from(fd, offset, part)
            continue
        digest = BlockHash(offset, ends, is_signed=is_signed) if hashed else None
        _write_bytes(fd, offset, part, digest)
        blocks += digest.blocks if digest is not None else ()
    return blocks


def _write_rows(fd: int, run: _Run, scratch: threading.local, *, hashed: bool, is_signed: bool) -> Sequence[Block]:
    """Write rows with gaps between them: from the tensor's memory if possible, else from a scratch buffer."""
    values = run.tensor
    if not _is_as_stored(run):
        values = _buffer(scratch)[: run.nbytes].view(run.dtype).view(run.tensor.shape)
        values.copy_(run.tensor)
    memory, count = memory_of(values), len(run.tensor)
    row_bytes = run.nbytes // count
    digest = StridedBlockHash(run.offset, row_bytes, run.stride, is_signed=is_signed) if hashed else None
    part_bytes = max(1, sizes.CACHED_BYTES // row_bytes) * row_bytes
    offset = run.offset
    for begin in range(0, run.nbytes, part_bytes):
        part = memory[begin : begin + part_bytes]
        if digest is not None:
            digest.update(part)
        for at in range(0, len(part), row_bytes):  # the kernel has no call for ranges with gaps
            write_from(fd, offset, part[at : at + row_bytes])
            offset += run.stride
    return [digest.block()] if digest is not None else ()


def _is_as_stored(run: _Run) -> bool:
    """Return whether the bytes of a run's tensor are those of the file."""
    tensor = run.tensor
    return tensor.device.type == "cpu" and tensor.dtype == run.dtype and tensor.is_contiguous()


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
