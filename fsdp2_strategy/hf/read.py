"""Carry out reads: boxes of regions into memory, in parallel, each byte once, with the cast on the way.

Input: wishes, which name a region, a box of it, and the memory to fill. Output: filled memory. Knows nothing of models.

What is dense on both sides and of one dtype is read straight into place. The rest passes through a scratch buffer of a
few MiB a thread, so that the memory needed does not grow with the model.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from tqdm import tqdm

from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.container import Entry, memory_of, read_into
from fsdp2_strategy.hf.region import Box, Computed, Piece, Region, target_of, value_of
from fsdp2_strategy.ranks import adopt_device, current_device, is_rank_0

SCRATCH_BYTES = 8 << 20
_DIRECT_BYTES = 16 << 20
_SMALL_READ = 64 << 10
_THREADS = 4


@dataclass(frozen=True, eq=False)
class Wish:
    """Ask for a box of a region in a tensor of the box's shape; values take the region's dtype, then the tensor's."""

    name: str
    region: Region
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Read:
    """One piece of one wish: a strided view of one entry of a file, and where it goes."""

    entry: Entry
    piece: Piece
    target: torch.Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.piece.shape) * self.entry.dtype.itemsize


class Reader:
    """Read from any number of files, each opened once; use it in a ``with`` block.

    Args:
        what: label of rank 0's progress bar.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._files: dict[Path, int] = {}
        self._scratch = threading.local()
        self._computed: tuple[Computed, torch.Tensor] | None = None
        self.bytes_read = 0
        self._counting = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        self._computed = None

    def read(self, wishes: Sequence[Wish]) -> None:
        """Fill the memory of all wishes.

        Raises:
            CheckpointError: a file cannot be read; the message names tensor and file.
        """
        reads: list[_Read] = []
        computed: list[tuple[Wish, Piece]] = []
        for wish in wishes:
            for piece in wish.region.pieces:
                part = piece.within(wish.box)
                if part is None:
                    continue
                if isinstance(part.source, Computed):
                    computed.append((wish, part))
                else:
                    target = target_of(wish.tensor, part)
                    reads += _cut(_Read(part.source, part, target, wish.region.dtype))
        reads.sort(
            key=lambda read: (read.entry.path, read.entry.offset + read.piece.offset * read.entry.dtype.itemsize)
        )
        for read in reads:
            self._open(read.entry.path)
        self._carry_out_all(reads)
        for wish, part in computed:
            value = self._value(part)
            view = value.as_strided(part.shape, part.strides, part.offset)
            target_of(wish.tensor, part).copy_(view.to(wish.region.dtype))

    def _carry_out_all(self, reads: Sequence[_Read]) -> None:
        """Let a few threads take one read after the other, until all are done or one fails."""
        waiting = deque(reads)
        total = sum(read.nbytes for read in reads)
        silent = not (total and is_rank_0())
        with tqdm(total=total, desc=self._what, unit="B", unit_scale=True, disable=silent, leave=False) as bar:

            def work() -> None:
                while True:
                    try:
                        read = waiting.popleft()
                    except IndexError:
                        return
                    try:
                        self._carry_out(read)
                    except BaseException:
                        waiting.clear()
                        raise
                    bar.update(read.nbytes)

            with ThreadPoolExecutor(_THREADS, initializer=adopt_device, initargs=(current_device(),)) as pool:
                workers = [pool.submit(work) for _ in range(_THREADS)]
            for worker in workers:
                worker.result()

    def read_whole(self, entry: Entry) -> torch.Tensor:
        """Return a whole tensor of a file."""
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self._open(entry.path)
        region = Region.of(entry, entry.shape, entry.dtype)
        for read in _cut(_Read(entry, region.pieces[0], tensor, entry.dtype)):
            self._carry_out(read)
        return tensor

    def _value(self, piece: Piece) -> torch.Tensor:
        """Return the value of a computed source; the last one is kept, since several tensors may come from it."""
        if self._computed is None or self._computed[0] is not piece.source:
            self._computed = None
            self._computed = (piece.source, value_of(piece.source, self.read_whole))
        return self._computed[1]

    def _open(self, path: Path) -> None:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error.strerror}. Complete the folder.") from error

    @torch.no_grad()
    def _carry_out(self, read: _Read) -> None:
        try:
            entry, piece = read.entry, read.piece
            direct = read.dtype == entry.dtype == read.target.dtype and read.target.device.type == "cpu"
            if direct and _is_dense(piece) and read.target.is_contiguous():
                self._read_at(entry, piece.offset, memory_of(read.target))
            else:
                order = sorted(range(len(piece.shape)), key=lambda d: -piece.strides[d])
                self._through_scratch(read, _permuted(piece, order), read.target.permute(order))
        except OSError as error:
            text = error.strerror or str(error)
            raise CheckpointError(
                f"cannot read {read.entry.name} from {read.entry.path}: {text}. Check the disk, and the file's length."
            ) from error

    def _read_at(self, entry: Entry, offset: int, memory: memoryview) -> None:
        count = len(memory)
        read_into(self._files[entry.path], entry.offset + offset * entry.dtype.itemsize, memory)
        with self._counting:
            self.bytes_read += count

    def _through_scratch(self, read: _Read, piece: Piece, target: torch.Tensor) -> None:
        """Read a view whose dimensions are in the file's order, as much at once as fits into the scratch buffer."""
        for part in _fitting(piece, read.entry.dtype.itemsize):
            span = _span(part)
            scratch = self._buffer()[: span * read.entry.dtype.itemsize]
            self._read_at(read.entry, part.offset, memory_of(scratch))
            view = scratch.view(read.entry.dtype).as_strided(part.shape, part.strides)
            if read.dtype not in (read.entry.dtype, target.dtype):
                view = view.to(read.dtype)
            target_of(target, part).copy_(view)

    def _buffer(self) -> torch.Tensor:
        buffer: torch.Tensor | None = getattr(self._scratch, "buffer", None)
        if buffer is None:
            buffer = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            self._scratch.buffer = buffer
        return buffer


def _cut(read: _Read) -> Iterator[_Read]:
    """Cut a large read along its leading dimension, so that threads share it."""
    piece = read.piece
    rows = piece.shape[0] if piece.shape else 1
    at_once = max(1, rows * _DIRECT_BYTES // max(1, read.nbytes))
    if at_once >= rows:
        if read.nbytes:
            yield read
        return
    for begin in range(0, rows, at_once):
        length = min(at_once, rows - begin)
        yield _Read(read.entry, piece.narrow(0, begin, length), read.target.narrow(0, begin, length), read.dtype)


def _fitting(piece: Piece, itemsize: int) -> Iterator[Piece]:
    """Cut a view, its strides descending, into parts of at most the scratch buffer's span, with little between them.

    Starts of the parts are relative to the view.
    """
    piece = Piece(piece.source, (0,) * len(piece.shape), piece.shape, piece.strides, piece.offset)
    waiting = [piece]
    while waiting:
        part = waiting.pop()
        span, needed = _span(part), math.prod(part.shape)
        if not needed:
            continue
        if span * itemsize <= (SCRATCH_BYTES if span <= 2 * needed else _SMALL_READ):
            yield part
            continue
        dim = next(d for d, n in enumerate(part.shape) if n > 1)
        row = part.narrow(dim, 0, 1)
        apart = span > 2 * needed and needed // part.shape[dim] * itemsize >= 4096
        fitting = max(1, (SCRATCH_BYTES // itemsize - _span(row)) // part.strides[dim] + 1)
        if not apart and fitting >= part.shape[dim]:
            yield part  # many short runs: reading what lies between them costs less than as many calls
            continue
        step = 1 if apart or _span(row) * itemsize > SCRATCH_BYTES else fitting
        waiting += [
            part.narrow(dim, begin, min(step, part.shape[dim] - begin)) for begin in range(0, part.shape[dim], step)
        ][::-1]


def _permuted(piece: Piece, order: Sequence[int]) -> Piece:
    def pick(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[d] for d in order)

    return Piece(piece.source, pick(piece.start), pick(piece.shape), pick(piece.strides), piece.offset)


def _span(piece: Piece) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(piece.shape, piece.strides, strict=True))


def _is_dense(piece: Piece) -> bool:
    expected = 1
    for length, stride in zip(reversed(piece.shape), reversed(piece.strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
