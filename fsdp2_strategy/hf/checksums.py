"""Compute and compare checksums: one xxh3 hash per block of a file, so that a range can be checked on its own.

Input: bytes that are written to a file or were read from a file. Output: blocks, and an error if bytes do not match the
digest of their block. Independent of models and of other ranks.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from fsdp2_strategy import sizes
from fsdp2_strategy.errors import DamageError

ALGORITHM = "xxh3_64"


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """The digest of bytes [begin, end) of a file."""

    begin: int
    end: int
    digest: str


def digest_of(data: bytes | memoryview) -> str:
    """Return the checksum of bytes as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def blocks_of(content: bytes) -> list[Block]:
    """Return the blocks of ``content``, which begins at the first byte of a file."""
    view, size = memoryview(content), sizes.BLOCK_BYTES
    parts = [(begin, view[begin : begin + size]) for begin in range(0, len(view), size)]
    return [Block(begin, begin + len(part), digest_of(part)) for begin, part in parts]


def blocks_of_file(path: Path) -> list[Block]:
    """Return the blocks of an entire file; only one block is in memory at a time."""
    found: list[Block] = []
    with path.open("rb") as file:
        while content := file.read(sizes.BLOCK_BYTES):
            begin = found[-1].end if found else 0
            found.append(Block(begin, begin + len(content), digest_of(content)))
    return found


ManifestReader = Callable[[Path, int, int], Iterable[Mapping[Path, Sequence[Block]]]]
"""Called with a path and a byte range; reads checksum manifests that it has not read yet and yields their blocks by
path. The manifests that probably cover the range are read first."""


class Checksums:
    """The blocks of some files; checksum manifests are read only when a requested range needs them.

    Args:
        read_manifests: reads checksum manifests; see `ManifestReader`.
    """

    def __init__(self, read_manifests: ManifestReader) -> None:
        self._read_manifests = read_manifests
        self._blocks: dict[Path, list[Block]] = {}
        self._lock = threading.Lock()

    def covering(self, path: Path, begin: int, end: int) -> list[Block]:
        """Return the blocks that contain bytes [begin, end) of a file.

        Raises:
            DamageError: blocks overlap, or some of the bytes have no checksum.
        """
        if begin >= end:
            return []
        with self._lock:
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
        return found

    def _known(self, path: Path, begin: int, end: int) -> list[Block]:
        blocks = self._blocks.get(path, [])
        first = bisect.bisect_right(blocks, begin, key=lambda block: block.begin) - 1
        last = bisect.bisect_left(blocks, end, key=lambda block: block.begin)
        return blocks[max(first, 0) : last]


def _cover(blocks: Sequence[Block], begin: int, end: int) -> bool:
    """Return whether blocks cover bytes [begin, end) without gaps or overlaps."""
    ends = [blocks[0].begin, *(block.end for block in blocks)] if blocks else [0]
    in_a_row = all(b.begin == at and b.begin < b.end for b, at in zip(blocks, ends, strict=False))
    return bool(blocks) and in_a_row and blocks[0].begin <= begin and end <= ends[-1]


def check(path: Path, block: Block, digest: str, what: str) -> None:
    """Compare the digest of bytes that were read with the digest of their block.

    Raises:
        DamageError: the digests differ; the message contains ``what``, the file and the range.
    """
    if digest != block.digest:
        raise DamageError(
            f"cannot read {what}: bytes {block.begin} to {block.end} of {path} have the checksum {digest}, expected "
            f"{block.digest}. The file is corrupt: load another checkpoint."
        )
