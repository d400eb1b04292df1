"""Checksums: one xxh3 for every block of at most 16 MiB, so that any range of a file can be checked by itself.

Input: bytes on their way to a file, or from one. Output: blocks, and an error where bytes are not those of their block.
Knows nothing of models or of other ranks.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from fsdp2_strategy.errors import DamageError

BLOCK_BYTES = 16 << 20
ALGORITHM = "xxh3_64"
# Bytes that are hashed while they are still in the processor's cache from being copied, or will be.
IN_CACHE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """Say that bytes [begin, end) of a file hash to ``digest``."""

    begin: int
    end: int
    digest: str


def digest_of(data: bytes | memoryview) -> str:
    """Return the checksum of some bytes, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def blocks_of(content: bytes) -> list[Block]:
    """Return the blocks of a file's beginning."""
    view = memoryview(content)
    ends = [*range(BLOCK_BYTES, len(view), BLOCK_BYTES), len(view)]
    begins = [0, *ends[:-1]]
    return [Block(begin, end, digest_of(view[begin:end])) for begin, end in zip(begins, ends, strict=True) if end]


class Checksums:
    """The blocks of some files.

    Args:
        blocks: the blocks of each file.

    Raises:
        DamageError: the blocks of a file overlap, or leave bytes out.
    """

    def __init__(self, blocks: Mapping[Path, Iterable[Block]]) -> None:
        self._blocks = {path: sorted(of_file) for path, of_file in blocks.items()}
        for path, of_file in self._blocks.items():
            end = 0
            for block in of_file:
                if block.begin != end or not 0 < block.end - block.begin <= BLOCK_BYTES:
                    raise DamageError(
                        f"cannot check {path}: its next checksum is of bytes {block.begin} to {block.end}, expected at "
                        f"most {BLOCK_BYTES} from {end}. The lists of checksums do not belong to these files."
                    )
                end = block.end

    def paths(self) -> Sequence[Path]:
        """Return the files."""
        return list(self._blocks)

    def covering(self, path: Path, begin: int, end: int) -> list[Block]:
        """Return the blocks that bytes [begin, end) of a file touch.

        Raises:
            DamageError: not all of them have a checksum.
        """
        blocks = self._blocks.get(path, [])
        first = bisect.bisect_right(blocks, begin, key=lambda block: block.begin) - 1
        last = bisect.bisect_left(blocks, end, key=lambda block: block.begin)
        if begin < end and (first < 0 or blocks[last - 1].end < end):
            raise DamageError(
                f"cannot check {path}: there is no checksum for bytes {begin} to {end}. The lists of checksums do not "
                "belong to this file."
            )
        return blocks[max(first, 0) : last]

    def length_of(self, path: Path) -> int:
        """Return the length of a file, as its checksums have it."""
        blocks = self._blocks.get(path)
        return blocks[-1].end if blocks else 0


def check(path: Path, block: Block, digest: str, what: str) -> None:
    """Compare the digest of bytes that were read with that of their block.

    Raises:
        DamageError: they differ; names what lies there, the file and the range.
    """
    if digest != block.digest:
        raise DamageError(
            f"cannot read {what}: bytes {block.begin} to {block.end} of {path} have the checksum {digest}, expected "
            f"{block.digest}. The file is damaged: load another checkpoint."
        )
