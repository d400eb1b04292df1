"""Read boxes of regions from safetensors files into tensors, in parallel; verify checksums and cast.

Input: read requests, each with a region, a box of it, and the tensor to fill. Output: filled tensors.

A contiguous range of a file is read directly into a CPU tensor of the same dtype. All other ranges are read into one
scratch buffer per thread, so the memory needed does not grow with the model. A computed region is an exception: the
full tensors that it is computed from are read, one region at a time. If there are checksums, each checksum block is
read in full, even if only a part of it is requested; [Note: ends of blocks] in `write` keeps that rare.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.agreement import to_rank_0
from fsdp2_strategy.distributed.device_order import DeviceOrder
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.process_group import current_device, is_rank_0
from fsdp2_strategy.distributed.progress import Progress
from fsdp2_strategy.errors import CheckpointError, DamageError, counted
from fsdp2_strategy.model.boxes import Box
from fsdp2_strategy.storage.checksums import Block, CheckedRange, Checksums, Hasher, adjacent_ranges
from fsdp2_strategy.storage.file_reads import SourceFile, read_repeats
from fsdp2_strategy.storage.new_memory import populate
from fsdp2_strategy.storage.regions import Computed, Piece, Region, sources_of, target_of, value_of
from fsdp2_strategy.storage.safetensors_format import Entry, memory_of, read_parts_into

_THREADS = 4


@dataclass(frozen=True, eq=False)
class ReadRequest:
    """A read request for a box of a region; values are cast to the region's dtype, then to the tensor's."""

    name: str
    region: Region
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class _View:
    """One piece of a read request: a strided view of one file entry, and the tensor to fill."""

    entry: Entry
    piece: Piece
    target: torch.Tensor
    dtype: torch.dtype
    """The region's dtype, to which values are cast first."""

    @property
    def begin(self) -> int:
        """Offset in the file, in bytes."""
        return self.entry.offset + self.piece.offset * self.entry.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.piece.shape) * self.entry.dtype.itemsize


@dataclass(eq=False, slots=True)
class _Range:
    """Contiguous elements of one file entry, and the tensor to fill."""

    entry: Entry
    begin: int
    """Offset in the file, in bytes."""
    end: int
    """Offset in the file after the last byte."""
    target: torch.Tensor
    """Also contiguous."""
    dtype: torch.dtype
    """The region's dtype, to which values are cast first."""

    @property
    def is_direct(self) -> bool:
        """Whether the file's bytes can be read directly into the target: no cast, and CPU memory."""
        return self.dtype == self.entry.dtype == self.target.dtype and self.target.device.type == "cpu"


@dataclass(eq=False, slots=True)
class _Ranges:
    """All requested ranges of some adjacent ranges with checksums, or one range without a checksum."""

    entry: Entry
    """The entry of the first range."""
    checked: list[CheckedRange]
    """Empty if there is no checksum."""
    ranges: list[_Range]
    begin: int = field(init=False)
    """Offset in the file of the first byte to read."""
    end: int = field(init=False)
    """Offset in the file after the last byte to read."""
    is_direct: bool = field(init=False)
    """Whether the ranges cover the checked ranges without gaps and can be read directly into their targets."""

    def __post_init__(self) -> None:
        first, last = (self.checked or self.ranges)[0], (self.checked or self.ranges)[-1]
        self.begin, self.end = first.begin, last.end
        at = self.begin
        for each in self.ranges:
            self.is_direct = each.begin == at and each.is_direct
            if not self.is_direct:
                return
            at = each.end
        self.is_direct = at == self.end

    @property
    def nbytes(self) -> int:
        return sum(each.end - each.begin for each in self.ranges)


@dataclass(frozen=True, eq=False)
class _Columns:
    """A strided block, and the tensor [rows, columns] that has its elements; see [Note: strided blocks] in `checksums`.

    The other blocks of the same rows belong to ranks that hold other columns. They are not read, so a rank that loads
    its own columns reads no others.
    """

    entry: Entry
    checked: CheckedRange
    block: Block
    target: torch.Tensor
    dtype: torch.dtype
    """The region's dtype, to which values are cast first."""

    @property
    def begin(self) -> int:
        """Offset of the block in the file, in bytes."""
        return self.block.begin

    @property
    def nbytes(self) -> int:
        return self.target.numel() * self.entry.dtype.itemsize


_Read = _View | _Ranges | _Columns


def ranges_of(requests: Iterable[ReadRequest]) -> Iterator[tuple[Path, int, int]]:
    """Yield the file ranges that read requests need, as (path, begin, end) in bytes; reads nothing."""
    for _, part in _requested_pieces(requests):
        if isinstance(part.source, Computed):
            for entry in itertools.chain.from_iterable(map(sources_of, part.source.regions())):
                yield entry.path, entry.offset, entry.offset + entry.nbytes
        elif math.prod(part.shape):
            begin = part.source.offset + part.offset * part.source.dtype.itemsize
            yield part.source.path, begin, begin + part.span * part.source.dtype.itemsize


def log_repeated_reads(before: int) -> None:
    """Log how often all ranks have repeated reads since `read_repeats` returned ``before``; collective."""
    if total := sum(to_rank_0(read_repeats() - before)):
        log("read again: %s", counted(total, "time"), level=logging.WARNING)


def _requested_pieces(requests: Iterable[ReadRequest]) -> Iterator[tuple[ReadRequest, Piece]]:
    """Yield the parts of all pieces that lie in the box of a request, each with its request."""
    for request in requests:
        for piece in request.region.pieces:
            part = piece.within(request.box)
            if part is not None:
                yield request, part


class Reader:
    """Read from any number of files and open each file once; use it in a ``with`` block.

    With ``total_bytes``, all reads of the block have one `Progress`; with 0 none; else each call of `read` its own.
    With ``fills_new_memory``, tensors have no pages yet; see `new_memory`.
    """

    def __init__(
        self,
        what: str,
        checksums: Checksums | None = None,
        total_bytes: int | None = None,
        *,
        fills_new_memory: bool = False,
    ) -> None:
        self._what = what
        self._fills_new_memory = fills_new_memory
        self._progress = None if total_bytes is None else self._begin_progress(total_bytes)
        self._checksums = checksums
        self._checked: set[tuple[Path, int]] = set()
        self._files: dict[Path, SourceFile] = {}
        self._scratch = threading.local()
        self._computed: tuple[Computed, torch.Tensor] | None = None
        self.bytes_read = 0
        self._counting = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._computed = None
        if self._progress is not None:
            self._progress.close()

    def _begin_progress(self, total_bytes: int) -> Progress:
        return Progress(self._what, total_bytes, is_shown=total_bytes > 0 and is_rank_0())

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Fill the tensors of all read requests."""
        views: list[_View] = []
        computed: list[tuple[ReadRequest, Piece]] = []
        for request, part in _requested_pieces(requests):
            if isinstance(part.source, Computed):
                computed.append((request, part))
            else:
                views.append(_View(part.source, part, target_of(request.tensor, part), request.region.dtype))
        reads = _by_block(itertools.chain.from_iterable(map(self._split_into_reads, views)))
        for read in reads:
            self._open(read.entry.path)
        self._execute_all(reads)
        for request, part in computed:
            value = self._value(part)
            view = value.as_strided(part.shape, part.strides, part.offset)
            target_of(request.tensor, part).copy_(view.to(request.region.dtype))

    @torch.no_grad()
    def read_full(self, entry: Entry) -> torch.Tensor:
        """Return the full tensor of a file entry."""
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self._open(entry.path)
        region = Region.of(entry, entry.shape, entry.dtype)
        for read in self._split_into_reads(_View(entry, region.pieces[0], tensor, entry.dtype)):
            self._execute(read)
        return tensor

    def _split_into_reads(self, view: _View) -> Iterator[_Read]:
        """Split a view into separate reads: by range with a checksum, by strided block, or by rows."""
        if not view.nbytes:
            return
        if not (_is_dense(view.piece) and view.target.is_contiguous()):
            yield from self._own_columns(view) or _rows(view)
            return
        entry, target = view.entry, view.target.view(-1)
        begin, end, itemsize = view.begin, view.begin + view.nbytes, entry.dtype.itemsize
        spans: Iterable[list[CheckedRange]] = [[]] * -(-view.nbytes // sizes.BLOCK_BYTES)
        if self._checksums:
            spans = _spans(self._checksums.covering(entry.path, begin, end), begin, end)
        for checked in spans:
            stop = min(end, checked[-1].end if checked else begin + sizes.BLOCK_BYTES)
            if (stop - view.begin) % itemsize:
                raise DamageError(
                    f"cannot check {entry.name}: a checksum block ends at byte {stop} of {entry.path}, expected the "
                    f"end of an element of {itemsize} bytes. The checksum manifests do not belong to this file: load "
                    "another checkpoint."
                )
            part = target[(begin - view.begin) // itemsize : (stop - view.begin) // itemsize]
            yield _Ranges(entry, checked, [_Range(entry, begin, stop, part, view.dtype)])
            begin = stop

    def _own_columns(self, view: _View) -> list[_Columns]:
        """Return the reads of a view whose elements are those of strided blocks; none if they are not."""
        if not self._checksums or not view.target.is_contiguous() or (rows := _as_rows(view.piece)) is None:
            return []
        itemsize = view.entry.dtype.itemsize
        count, columns, stride = rows[0], rows[1], rows[2] * itemsize
        target = view.target.view(count, columns)
        end = view.begin + (count - 1) * stride + columns * itemsize
        found = []
        for checked in self._checksums.covering(view.entry.path, view.begin, end):
            of_view = (b for b in checked.blocks if (b.run_bytes, b.stride) == (columns * itemsize, stride))
            block = next((b for b in of_view if (b.begin - view.begin) % stride == 0), None)
            if block is None or block.begin < view.begin or block.end > end:
                return []
            first, last = (block.begin - view.begin) // stride, (block.end - view.begin) // stride + 1
            found.append(_Columns(view.entry, checked, block, target[first:last], view.dtype))
        return found

    def _execute_all(self, reads: Sequence[_Read]) -> None:
        """Execute all reads in a few threads; no read starts after one has failed."""
        waiting = deque(reads)
        progress = self._progress or self._begin_progress(sum(read.nbytes for read in reads))
        with nullcontext() if self._progress else progress:

            @torch.no_grad()
            def work() -> None:
                while True:
                    try:
                        read = waiting.popleft()
                    except IndexError:
                        return
                    try:
                        self._execute(read)
                    except BaseException:
                        waiting.clear()
                        raise
                    progress.update(read.nbytes)

            with ThreadPoolExecutor(_THREADS, initializer=DeviceOrder.of_this_thread().enter) as pool:
                workers = [pool.submit(work) for _ in range(_THREADS)]
            for worker in workers:
                worker.result()

    def _value(self, piece: Piece) -> torch.Tensor:
        """Return the value of a computed source; the last one is cached because several tensors may need it."""
        if self._computed is None or self._computed[0] is not piece.source:
            self._computed = None
            self._computed = (piece.source, value_of(piece.source, self.read_full))
        return self._computed[1]

    def _open(self, path: Path) -> None:
        if path not in self._files:
            try:
                self._files[path] = SourceFile(path)
            except OSError as error:
                text = error.strerror or str(error)
                raise CheckpointError(f"cannot read {path}: {text}. Check the folder.") from error

    def _execute(self, read: _Read) -> None:
        try:
            if isinstance(read, _Ranges):
                self._read_ranges(read)
            elif isinstance(read, _Columns):
                self._read_columns(read)
            else:
                self._check_around(read)
                order = sorted(range(len(read.piece.shape)), key=lambda d: -read.piece.strides[d])
                self._read_view(read, _permuted(read.piece, order), read.target.permute(order))
        except OSError as error:
            text = error.strerror or str(error)
            raise CheckpointError(
                f"cannot read {read.entry.name} from {read.entry.path}: {text}. Check the disk, and the file's length."
            ) from error

    def _read_ranges(self, reads: _Ranges) -> None:
        """Read directly into the targets, or through the scratch buffer for casts, other devices or partial blocks."""
        begin, end = reads.begin, reads.end
        if self._fills_new_memory:
            for each in reads.ranges:
                populate(each.target)
        if reads.is_direct:
            self._read_checked(reads, reads.checked, begin, [memory_of(read.target) for read in reads.ranges])
            return
        scratch = self._buffer(end - begin)
        self._read_checked(reads, reads.checked, begin, [memory_of(scratch)])
        for read in reads.ranges:
            part = scratch[read.begin - begin : read.end - begin]
            aligned = part.storage_offset() % read.entry.dtype.itemsize == 0
            values = (part if aligned else part.clone()).view(read.entry.dtype)
            read.target.copy_(values if read.dtype in (read.entry.dtype, read.target.dtype) else values.to(read.dtype))

    def _read_columns(self, read: _Columns) -> None:
        """Read the runs of a strided block; if they are short, read the complete rows in one piece."""
        block = read.block
        if block.run_bytes < sizes.SHORT_READ_BYTES:
            begin, end = read.checked.begin, read.checked.end
            memory = self._buffer(end - begin)
            self._read_checked(read, [read.checked], begin, [memory_of(memory)])
            size = (len(read.target), block.run_bytes)
            own = memory.as_strided(size, (block.stride, 1), block.begin - begin).contiguous()
        else:
            own = self._buffer(read.nbytes).view(len(read.target), -1)
            self._read_runs(read.entry.path, block.begin, block.stride, own)
            runs = CheckedRange(0, own.numel(), (replace(block, run_bytes=0, stride=0),))
            runs.check(memory_of(own), read.entry.path, read.entry.name)
        values = own.view(read.entry.dtype)
        read.target.copy_(values if read.dtype in (read.entry.dtype, read.target.dtype) else values.to(read.dtype))

    def _check_around(self, view: _View) -> None:
        """Verify all checked ranges that a strided view touches; the caller reads the view's bytes again."""
        if self._checksums is None:
            return
        path, end = view.entry.path, view.begin + view.piece.span * view.entry.dtype.itemsize
        ranges = self._checksums.covering(path, view.begin, end)
        for together in adjacent_ranges(c for c in ranges if (path, c.begin) not in self._checked):
            begin = together[0].begin
            self._read_checked(view, together, begin, [memory_of(self._buffer(together[-1].end - begin))])
            self._checked.update((path, checked.begin) for checked in together)

    def _read_view(self, read: _View, piece: Piece, target: torch.Tensor) -> None:
        """Read a view, whose strides must be descending, in parts that fit into the scratch buffer."""
        rows, itemsize = _as_rows(piece), read.entry.dtype.itemsize
        if rows and rows[1] * itemsize >= sizes.SHORT_READ_BYTES and rows[2] > rows[1]:
            count, columns, stride = rows
            memory = self._buffer(count * columns * itemsize).view(count, -1)
            self._read_runs(read.entry.path, read.begin, stride * itemsize, memory)
            values = memory.view(read.entry.dtype).view(piece.shape)
            target.copy_(values if read.dtype in (read.entry.dtype, target.dtype) else values.to(read.dtype))
            return
        for part in _split_to_fit_scratch(piece, read.entry.dtype.itemsize):
            span = part.span
            scratch = self._buffer(span * read.entry.dtype.itemsize)
            begin = read.entry.offset + part.offset * read.entry.dtype.itemsize
            self._read_bytes(read.entry.path, begin, [memory_of(scratch)], None)
            view = scratch.view(read.entry.dtype).as_strided(part.shape, part.strides)
            if read.dtype not in (read.entry.dtype, target.dtype):
                view = view.to(read.dtype)
            target_of(target, part).copy_(view)

    def _read_checked(
        self, read: _Read, checked: Sequence[CheckedRange], begin: int, parts: Sequence[memoryview]
    ) -> None:
        """Fill parts of memory with a file's bytes from an offset on; verify the ranges, if any, that begin there."""
        hasher = Hasher(checked) if checked else None
        self._read_bytes(read.entry.path, begin, parts, hasher)
        if hasher is not None:
            names = [r.entry.name for r in read.ranges] if isinstance(read, _Ranges) else [read.entry.name]
            more = f" and {counted(len(names) - 1, 'other')}" if len(names) > 1 else ""
            hasher.check(read.entry.path, f"{names[0]}{more}")

    def _read_bytes(self, path: Path, begin: int, parts: Sequence[memoryview], hasher: Hasher | None) -> None:
        """Read bytes of a file, and hash them while they are in the processor's cache."""
        file = self._files[path]
        for batch, nbytes in _batches(parts, sizes.CACHED_BYTES if hasher else sizes.BLOCK_BYTES):
            _read_into(file, begin, batch)
            begin += nbytes
            if hasher is not None:
                for part in batch:
                    hasher.update(part)
            with self._counting:
                self.bytes_read += nbytes

    def _read_runs(self, path: Path, begin: int, stride: int, rows: torch.Tensor) -> None:
        """Fill rows of bytes, which are contiguous in memory, with runs of a file at equal distances."""
        file, memory, length = self._files[path], memory_of(rows), rows.shape[1]
        for number in range(len(rows)):
            _read_into(file, begin + number * stride, [memory[number * length : (number + 1) * length]])
        with self._counting:
            self.bytes_read += len(memory)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """Return this thread's scratch buffer; it grows if a file has blocks larger than `BLOCK_BYTES`."""
        buffer: torch.Tensor | None = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            size = max(sizes.BLOCK_BYTES, nbytes)
            pinned = current_device().type != "cpu"
            buffer = self._scratch.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return buffer[:nbytes]


def _read_into(file: SourceFile, begin: int, parts: Sequence[memoryview]) -> None:
    file.read(lambda fd: read_parts_into(fd, begin, parts))


_MAX_PARTS = 256
"""Maximum number of parts of memory that one system call fills; the kernel allows 1,024."""


def _batches(parts: Iterable[memoryview], max_bytes: int) -> Iterator[tuple[list[memoryview], int]]:
    """Group adjacent parts into batches of at most ``max_bytes``, and split longer ones; each with its size."""
    batch: list[memoryview] = []
    size = 0
    for memory in parts:
        for at in range(0, len(memory), max_bytes):
            part = memory[at : at + max_bytes]
            if batch and (size + len(part) > max_bytes or len(batch) == _MAX_PARTS):
                yield batch, size
                batch, size = [], 0
            batch.append(part)
            size += len(part)
    if batch:
        yield batch, size


def _spans(ranges: Sequence[CheckedRange], begin: int, end: int) -> Iterator[list[CheckedRange]]:
    """Group the checked ranges of bytes [begin, end), which may begin earlier and end later: these stand alone."""
    first = 1 if ranges and ranges[0].begin < begin else 0
    last = len(ranges) - 1 if len(ranges) > first and ranges[-1].end > end else len(ranges)
    yield from ([each] for each in ranges[:first])
    yield from adjacent_ranges(ranges[first:last])
    yield from ([each] for each in ranges[last:])


def _by_block(reads: Iterable[_Read]) -> list[_Read]:
    """Merge the ranges of each checked range, and small adjacent reads, and sort all reads by path and offset."""
    of_file: dict[Path, list[_Read]] = {}
    of_blocks: dict[tuple[Path, int, int], list[_Ranges]] = {}
    for read in reads:
        if isinstance(read, _Ranges) and read.checked:
            of_blocks.setdefault((read.entry.path, read.begin, read.end), []).append(read)
        else:
            of_file.setdefault(read.entry.path, []).append(read)
    for (path, _, _), same in of_blocks.items():
        read = same[0]
        if len(same) > 1:
            ranges = sorted((each for one in same for each in one.ranges), key=lambda each: each.begin)
            read = _Ranges(ranges[0].entry, read.checked, ranges)
        of_file.setdefault(path, []).append(read)
    return [read for path in sorted(of_file) for read in _merge_adjacent(of_file[path])]


def _merge_adjacent(reads: Iterable[_Read]) -> Iterator[_Read]:
    """Sort reads of a file; merge adjacent ranges that are both direct, or both not, up to `sizes.BLOCK_BYTES`."""
    group: list[_Ranges] = []
    for read in sorted(reads, key=lambda read: read.begin):
        if isinstance(read, _Ranges) and read.checked and (not group or _may_join(group, read)):
            group.append(read)
            continue
        if group:
            yield _merged(group)
            group = []
        if isinstance(read, _Ranges) and read.checked:
            group = [read]
        else:
            yield read
    if group:
        yield _merged(group)


def _may_join(group: Sequence[_Ranges], read: _Ranges) -> bool:
    fits = read.begin == group[-1].end and read.end - group[0].begin <= sizes.BLOCK_BYTES
    return fits and read.is_direct == group[0].is_direct


def _merged(group: Sequence[_Ranges]) -> _Ranges:
    if len(group) == 1:
        return group[0]
    checked, ranges = ([each for one in group for each in getattr(one, part)] for part in ("checked", "ranges"))
    return _Ranges(group[0].entry, checked, ranges)


def _rows(view: _View) -> Iterator[_View]:
    """Split a large view along its leading dimension, so that threads can share it."""
    rows = view.piece.shape[0] if view.piece.shape else 1
    at_once = max(1, rows * sizes.BLOCK_BYTES // view.nbytes)
    for begin in range(0, rows, at_once):
        if at_once >= rows:
            yield view
        else:
            length = min(at_once, rows - begin)
            part = view.piece.narrow(0, begin, length)
            yield _View(view.entry, part, view.target.narrow(0, begin, length), view.dtype)


def _split_to_fit_scratch(piece: Piece, itemsize: int) -> Iterator[Piece]:
    """Split a view with descending strides into parts that fit into the scratch buffer; skip gaps if that is cheaper.

    The ``start`` of each part is relative to the view.
    """
    piece = Piece(piece.source, (0,) * len(piece.shape), piece.shape, piece.strides, piece.offset)
    waiting = [piece]
    while waiting:
        part = waiting.pop()
        span, needed = part.span, math.prod(part.shape)
        if not needed:
            continue
        if span * itemsize <= (sizes.SCRATCH_BYTES if span <= 2 * needed else sizes.SMALL_READ_BYTES):
            yield part
            continue
        dim = next(d for d, n in enumerate(part.shape) if n > 1)
        row = part.narrow(dim, 0, 1)
        apart = span > 2 * needed and needed // part.shape[dim] * itemsize >= sizes.SHORT_READ_BYTES
        fitting = max(1, (sizes.SCRATCH_BYTES // itemsize - row.span) // part.strides[dim] + 1)
        if not apart and fitting >= part.shape[dim]:
            yield part  # many short runs: reading the gaps costs less than one call per run
            continue
        step = 1 if apart or row.span * itemsize > sizes.SCRATCH_BYTES else fitting
        waiting += [
            part.narrow(dim, begin, min(step, part.shape[dim] - begin)) for begin in range(0, part.shape[dim], step)
        ][::-1]


def _permuted(piece: Piece, order: Sequence[int]) -> Piece:
    def pick(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[d] for d in order)

    return Piece(piece.source, pick(piece.start), pick(piece.shape), pick(piece.strides), piece.offset)


def _as_rows(piece: Piece) -> tuple[int, int, int] | None:
    """Return a piece as a matrix: number of rows, length of a row, and stride between rows; None if it is not one."""
    dims = [(n, stride) for n, stride in zip(piece.shape, piece.strides, strict=True) if n > 1]
    columns = 1
    if dims and dims[-1][1] == 1:
        columns = dims.pop()[0]
    if not dims:
        return None
    rows, stride = dims.pop()
    while dims and dims[-1][1] == rows * stride:
        rows *= dims.pop()[0]
    return None if dims else (rows, columns, stride)


def _is_dense(piece: Piece) -> bool:
    expected = 1
    for length, stride in zip(reversed(piece.shape), reversed(piece.strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
