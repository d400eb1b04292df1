"""Compute and compare checksums: one hash per block of a file, so that a range can be checked on its own.

Input: bytes that are written to a file or were read from a file. Output: blocks, and an error if bytes do not match the
digest of their block. Independent of models and of other ranks.

[Note: strided blocks] A block covers the bytes that one rank wrote. If ranks hold columns of a tensor, a rank writes a
short run of bytes in each row. One block per run would need a digest for every few kilobytes. So a block may consist of
the runs of many rows: ``run_bytes`` bytes of every ``stride`` bytes, where the stride is a row of the full tensor. The
blocks of several ranks together then cover complete rows.

The hash is xxh3. If checkpoints are signed, each block also has a SHA-256 digest, and a load with the key compares it
instead: [Note: signature] in `checkpoint.signature`.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fsdp2_strategy import sizes
from fsdp2_strategy.errors import DamageError

ALGORITHM = "xxh3_64"
_SHA256_DIGITS = 64


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """The digest of bytes [begin, end) of a file, or of runs of bytes in this range; see [Note: strided blocks]."""

    begin: int
    end: int
    digest: str
    run_bytes: int = 0
    """Length of each run; 0 if the block has all bytes."""
    stride: int = 0
    """Distance between the first bytes of two runs."""
    sha256: str = ""
    """The SHA-256 digest of the same bytes, if the checkpoint is signed."""


class BlockHash:
    """Hash the bytes of adjacent blocks while they are written, in their order."""

    def __init__(self, begin: int, ends: Sequence[int], *, is_signed: bool) -> None:
        """Begin at byte ``begin`` of a file; each block ends where the next one begins."""
        self._at, self._ends, self._is_signed = begin, deque(ends), is_signed
        self.blocks: list[Block] = []
        """The blocks whose bytes were all hashed."""
        self._begin_block()

    def _begin_block(self) -> None:
        self._begin = self._at
        self._xxh3, self._sha256 = xxhash.xxh3_64(), hashlib.sha256() if self._is_signed else None

    def update(self, part: memoryview) -> None:
        """Hash the next bytes."""
        while self._at + len(part) > self._ends[0]:
            length = self._ends[0] - self._at
            self.update(part[:length])
            part = part[length:]
        self._xxh3.update(part)
        if self._sha256 is not None:
            self._sha256.update(part)
        self._at += len(part)
        if self._at == self._ends[0]:
            sha256 = self._sha256.hexdigest() if self._sha256 is not None else ""
            self.blocks.append(Block(self._begin, self._ends.popleft(), self._xxh3.hexdigest(), sha256=sha256))
            if self._ends:
                self._begin_block()


class StridedBlockHash:
    """Hash the runs of a strided block while they are written, in their order; see `Block`."""

    def __init__(self, begin: int, run_bytes: int, stride: int, *, is_signed: bool) -> None:
        """Begin at byte ``begin`` of a file."""
        self._begin, self._run_bytes, self._stride, self._nbytes = begin, run_bytes, stride, 0
        self._xxh3, self._sha256 = xxhash.xxh3_64(), hashlib.sha256() if is_signed else None

    def update(self, part: memoryview) -> None:
        """Hash the next runs."""
        self._xxh3.update(part)
        if self._sha256 is not None:
            self._sha256.update(part)
        self._nbytes += len(part)

    def block(self) -> Block:
        """Return the block of all runs."""
        end = self._begin + (self._nbytes // self._run_bytes - 1) * self._stride + self._run_bytes
        sha256 = self._sha256.hexdigest() if self._sha256 is not None else ""
        return Block(self._begin, end, self._xxh3.hexdigest(), self._run_bytes, self._stride, sha256)


@dataclass(frozen=True, slots=True)
class CheckedRange:
    """Bytes [begin, end) of a file, and the blocks that together have the digests of all these bytes, and no others."""

    begin: int
    end: int
    blocks: tuple[Block, ...]
    """One block without a stride, or several strided blocks with the same stride."""

    def check(self, content: bytes | memoryview, path: Path, what: str) -> None:
        """Compare the digests of the range's bytes, read from ``path``, with those of its blocks."""
        hasher = Hasher([self])
        hasher.update(memoryview(content))
        hasher.check(path, what)


class Hasher:
    """Hash the bytes of adjacent ranges in their order, and compare the digests with those of their blocks."""

    def __init__(self, ranges: Sequence[CheckedRange]) -> None:
        self._ranges = deque(ranges)
        self._at = ranges[0].begin
        self._wrong: list[tuple[CheckedRange, Block, str]] = []
        self._hashes = _hashes_of(ranges[0])

    def update(self, part: memoryview) -> None:
        """Hash the next bytes."""
        while part:
            checked = self._ranges[0]
            length = min(len(part), checked.end - self._at)
            self._update_range(checked, part if length == len(part) else part[:length])
            self._at += length
            if self._at == checked.end:
                self._compare(self._ranges.popleft())
                self._hashes = _hashes_of(self._ranges[0]) if self._ranges else []
            part = part[length:]

    def _update_range(self, checked: CheckedRange, part: memoryview) -> None:
        first = checked.blocks[0]
        if not first.stride:
            self._hashes[0].update(part)
            return
        at, done = self._at - checked.begin, 0
        while done < len(part):
            place = (at + done) % first.stride
            for block, own in zip(checked.blocks, self._hashes, strict=True):
                if place < block.run_bytes:
                    length = min(block.run_bytes - place, len(part) - done)
                    own.update(part[done : done + length])
                    done += length
                    break
                place -= block.run_bytes

    def _compare(self, checked: CheckedRange) -> None:
        for block, own in zip(checked.blocks, self._hashes, strict=True):
            if (digest := own.hexdigest()) != block.digest:
                self._wrong.append((checked, block, digest))
                return

    def problems(self, path: Path) -> list[tuple[CheckedRange, str]]:
        """Return the ranges whose bytes do not match a digest, each with a text, when all bytes were hashed."""
        found = []
        for checked, block, digest in self._wrong:
            runs = f" ({block.run_bytes} of every {block.stride})" if block.stride else ""
            range_ = f"bytes {block.begin} to {block.end}{runs} of {path}"
            found.append((checked, f"{range_} have the checksum {digest}, expected {block.digest}"))
        return found

    def check(self, path: Path, what: str) -> None:
        """Compare the digests with those of the blocks."""
        for _, problem in self.problems(path):
            raise DamageError(f"cannot read {what}: {problem}. The file is corrupt: load another checkpoint.")


def adjacent_ranges(ranges: Iterable[CheckedRange]) -> Iterator[list[CheckedRange]]:
    """Yield successive ranges of a file in groups of adjacent ones, of at most `sizes.BLOCK_BYTES` if possible."""
    group: list[CheckedRange] = []
    for checked in ranges:
        if group and (checked.end - group[0].begin > sizes.BLOCK_BYTES or checked.begin != group[-1].end):
            yield group
            group = []
        group.append(checked)
    if group:
        yield group


def _hashes_of(checked: CheckedRange) -> list[Any]:
    """Return a hash object for each block of a range, of the kind of its digest."""
    return [hashlib.sha256() if len(b.digest) == _SHA256_DIGITS else xxhash.xxh3_64() for b in checked.blocks]


def digest_of(data: bytes | memoryview) -> str:
    """Return the checksum of bytes as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def blocks_of(content: bytes, *, is_signed: bool = False) -> list[Block]:
    """Return the blocks of ``content``, which begins at the first byte of a file; see `BlockHash` for ``is_signed``."""
    view, size = memoryview(content), sizes.BLOCK_BYTES
    return [_block_of(begin, view[begin : begin + size], is_signed) for begin in range(0, len(view), size)]


def blocks_of_file(path: Path, *, is_signed: bool = False) -> list[Block]:
    """Return the blocks of an entire file; only one block is in memory at a time."""
    found: list[Block] = []
    with path.open("rb") as file:
        while content := file.read(sizes.BLOCK_BYTES):
            found.append(_block_of(found[-1].end if found else 0, memoryview(content), is_signed))
    return found


def _block_of(begin: int, content: memoryview, is_signed: bool) -> Block:
    hashed = BlockHash(begin, [begin + len(content)], is_signed=is_signed)
    hashed.update(content)
    return hashed.blocks[0]


ManifestReader = Callable[[Path, int, int], Iterable[Mapping[Path, Sequence[Block]]]]
"""Called with a path and a byte range; reads checksum manifests that it has not read yet and yields their blocks by
path. The manifests that probably cover the range are read first."""


class Checksums:
    """The blocks of some files; checksum manifests are read only when a requested range needs them."""

    def __init__(self, read_manifests: ManifestReader) -> None:
        self._read_manifests = read_manifests
        self._blocks: dict[Path, list[Block]] = {}
        self._ranges: dict[Path, tuple[list[CheckedRange], list[int]]] = {}
        """By path: sorted ranges, and where each begins."""
        self._lock = threading.Lock()

    def covering(self, path: Path, begin: int, end: int) -> list[CheckedRange]:
        """Return the ranges with checksums that contain bytes [begin, end) of a file."""
        if begin >= end:
            return []
        with self._lock:
            found = self._known(path, begin, end)
            if _cover(found, begin, end):
                return found
            more = iter(self._read_manifests(path, begin, end))
            while not _cover(found := self._known(path, begin, end), begin, end):
                blocks = next(more, None)
                if blocks is None:
                    raise DamageError(
                        f"cannot check {path}: the checksum blocks of bytes {begin} to {end} overlap or have gaps, "
                        "expected each byte in one block. The checksum manifests do not belong to this file: "
                        "load another checkpoint."
                    )
                for of_path, of_file in blocks.items():
                    known = self._blocks.setdefault(of_path, [])
                    known.extend(of_file)
                    known.sort()
                    ranges = list(_ranges_of(known))
                    self._ranges[of_path] = ranges, [one.begin for one in ranges]
        return found

    def _known(self, path: Path, begin: int, end: int) -> list[CheckedRange]:
        ranges, begins = self._ranges.get(path, ([], []))
        first = bisect.bisect_right(begins, begin) - 1
        return ranges[max(first, 0) : bisect.bisect_left(begins, end)]


def _ranges_of(blocks: Sequence[Block]) -> Iterator[CheckedRange]:
    """Yield the ranges of sorted blocks; strided blocks are left out until all blocks of their rows are known."""
    at = 0
    while at < len(blocks):
        first = blocks[at]
        if not first.stride:
            yield CheckedRange(first.begin, first.end, (first,))
            at += 1
            continue
        after = bisect.bisect_left(blocks, first.begin + first.stride, lo=at, key=lambda block: block.begin)
        together = blocks[at:after]
        at = after
        ends = list(itertools.accumulate((b.run_bytes for b in together), initial=first.begin))
        rows = (first.end - first.begin - first.run_bytes) // first.stride
        if ends[-1] == first.begin + first.stride and all(
            (b.begin, b.end, b.stride) == (begin, begin + rows * b.stride + b.run_bytes, first.stride)
            for b, begin in zip(together, ends, strict=False)
        ):
            yield CheckedRange(first.begin, together[-1].end, tuple(together))


def _cover(ranges: Sequence[CheckedRange], begin: int, end: int) -> bool:
    """Return whether ranges cover bytes [begin, end) without gaps or overlaps."""
    if len(ranges) == 1:
        return ranges[0].begin <= begin and end <= ranges[0].end
    ends = [ranges[0].begin, *(one.end for one in ranges)] if ranges else [0]
    in_a_row = all(one.begin == at and one.begin < one.end for one, at in zip(ranges, ends, strict=False))
    return bool(ranges) and in_a_row and ranges[0].begin <= begin and end <= ends[-1]
