"""Write and parse checksum manifests: JSON files with the blocks that one rank wrote to each file.

Input: blocks by the name of their file. Output: the content of a manifest, and back, checked against a schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from fsdp2_strategy import sizes
from fsdp2_strategy.errors import DamageError, shown
from fsdp2_strategy.storage.checksums import ALGORITHM, Block
from fsdp2_strategy.storage.schema import InvalidError, hexadecimal, integer, json_object, parse_json, record, text

CHECKSUMS_BYTES = 512 << 20
"""Maximum size of a checksum manifest: a block takes about 60 bytes, and 100,000 tensors have as many blocks."""
_MAX_BLOCK_BYTES = 1 << 28
_OLD_BLOCK_BYTES = 16 << 20
"""Maximum block size of old checksum manifests, which do not record it."""
_MAX_RUNS = 1 << 16
"""Maximum number of runs of a strided block: 16 MiB have 4,096 runs of at least 4 KiB."""
_MEAN_BLOCK_BYTES = 32
_FEW_BLOCKS = 1024
"""A file has more than this number of blocks in one manifest only if their mean size is at least `_MEAN_BLOCK_BYTES`: a
rank writes one block per tensor, whose entry in the header alone is longer, or runs of kilobytes."""

_CHECKSUMS = record({"algorithm": text(), "blocks": json_object}, {"block_bytes": integer(1, _MAX_BLOCK_BYTES)})


_range_of = attrgetter("begin", "end")


def checksum_manifest(blocks: Mapping[str, Sequence[Block]]) -> bytes:
    """Return the content of the checksum manifest of one rank, from the blocks of each file by its name."""
    ordered = {name: sorted(of_file, key=_range_of) for name, of_file in sorted(blocks.items())}
    manifest: dict[str, Any] = {
        "algorithm": ALGORITHM,
        "block_bytes": sizes.BLOCK_BYTES,
        "blocks": {
            name: [[b.begin, b.end, b.digest, *([b.run_bytes, b.stride] if b.stride else [])] for b in of_file]
            for name, of_file in ordered.items()
        },
    }
    if any(block.sha256 for of_file in ordered.values() for block in of_file):
        manifest["sha256"] = {name: [b.sha256 for b in of_file] for name, of_file in ordered.items()}
    return (json.dumps(manifest, separators=(",", ":")) + "\n").encode()


def parse_checksums(content: bytes, path: Path, sizes_of_files: Mapping[str, int]) -> dict[str, Any]:
    """Return the value of a checksum manifest."""
    try:
        listed: dict[str, Any] = parse_json(content, _CHECKSUMS)
        if listed["algorithm"] != ALGORITHM:
            raise InvalidError(f"has checksums of the kind {shown(listed['algorithm'])}, expected {ALGORITHM}")
        for name, blocks in listed["blocks"].items():
            if name not in sizes_of_files:
                raise InvalidError(f"has blocks of {shown(name)}, which is not a file of the checkpoint")
            _check_blocks(name, blocks, sizes_of_files[name], listed.get("block_bytes", _OLD_BLOCK_BYTES))
    except InvalidError as error:
        raise damage(path, f"its content is invalid: {error}") from error
    return listed


def _check_blocks(name: str, blocks: Any, size: int, max_bytes: int) -> None:
    if not isinstance(blocks, list):
        raise InvalidError(f"has blocks of {shown(name)} that are not a list")
    most = size // _MEAN_BLOCK_BYTES + _FEW_BLOCKS
    if len(blocks) > most:
        raise InvalidError(f"has {len(blocks):,} blocks of {shown(name)}, expected at most {most:,}")
    for block in blocks:
        problem = _problem_of_block(block, size, max_bytes) if isinstance(block, list) else "is not a list"
        if problem:
            raise InvalidError(f"has the block {shown(block)} of {shown(name)}, which {problem}")


def _problem_of_block(block: list[Any], size: int, max_bytes: int) -> str:
    if len(block) not in (3, 5):
        return "does not have 3 or 5 entries"
    begin, end, digest, *strided = block
    if type(begin) is not int or type(end) is not int or not 0 <= begin < end <= size:
        return f"does not begin and end in the file's {size:,} bytes"
    if end - begin > max_bytes:
        return f"has more than {max_bytes} bytes"
    try:
        hexadecimal(digest)
    except InvalidError:
        return "has no digest of 16 hexadecimal digits"
    return _problem_of_runs(end - begin, *strided) if strided else ""


def _problem_of_runs(length: int, run_bytes: Any, stride: Any) -> str:
    if type(run_bytes) is not int or type(stride) is not int or not 0 < run_bytes <= stride:
        return "has runs that are empty, or overlap"
    runs, rest = divmod(length - run_bytes, stride)
    return f"does not consist of at most {_MAX_RUNS:,} complete runs" if rest or not 0 <= runs < _MAX_RUNS else ""


def damage(path: Path, problem: str) -> DamageError:
    """Return an error for a file of a checkpoint that cannot be used."""
    return DamageError(f"cannot read {path}: {problem}. Load another checkpoint.")
