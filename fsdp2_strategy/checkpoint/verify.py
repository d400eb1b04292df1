"""Whether a checkpoint is what was written: its structure at a glance, its bytes block by block.

Input: a checkpoint's directory. Output: its manifest and checksums, checked against each other; or all that is wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from tqdm import tqdm

from fsdp2_strategy.checkpoint import layout
from fsdp2_strategy.errors import CheckpointError, DamageError
from fsdp2_strategy.hf.checksum import ALGORITHM, IN_CACHE_BYTES, Block, Checksums, check, digest_of
from fsdp2_strategy.hf.container import Entry, read_header, read_into

_THREADS = 4


@dataclass(frozen=True)
class VerifyReport:
    """Say whether a checkpoint is what was written."""

    ok: bool
    problems: list[str]
    """Each names tensor, file and byte range, as far as they are known."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose manifest, file lengths and lists of checksums fit each other."""

    path: Path
    manifest: dict[str, Any]
    checksums: Checksums

    def read(self, name: str) -> bytes:
        """Return a small file, checked.

        Raises:
            DamageError: its bytes are not what was written.
        """
        path = self.path / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DamageError(f"cannot read {path}: {error.strerror}. Load another checkpoint.") from error
        for block in self.checksums.covering(path, 0, len(content)):
            check(path, block, digest_of(memoryview(content)[block.begin : block.end]), name)
        return content

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file, checked.

        Raises:
            DamageError: its bytes are not what was written.
        """
        content: dict[str, Any] = json.loads(self.read(name))
        return content

    def check_headers(self) -> None:
        """Compare the files' headers with their checksums.

        Raises:
            DamageError: one is not what was written.
        """
        for path in self.checksums.paths():
            if path.suffix == ".safetensors":
                with path.open("rb") as file:
                    length = 8 + int.from_bytes(file.read(8), "little")
                    file.seek(0)
                    for block in self.checksums.covering(path, 0, min(length, self.checksums.length_of(path))):
                        check(path, block, digest_of(file.read(block.end - block.begin)), "the header")


def open_checkpoint(path: Path) -> Opened:
    """Read a checkpoint's manifest and lists of checksums, and compare them with the files' lengths; not collective.

    Raises:
        DamageError: they do not fit.
    """
    manifest = layout.read_manifest(path)
    try:
        _check_lengths(path, manifest["files"])
        checksums = _read_lists(path, manifest["checksums"])
        for name, size in manifest["files"].items():
            covered = checksums.length_of(path / name)
            if name not in manifest["checksums"] and covered != size:
                raise DamageError(
                    f"cannot check {path / name}: its checksums cover {covered} bytes, expected {size}. Load another "
                    "checkpoint."
                )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamageError(
            f"cannot check {path}: its manifest or its lists of checksums are not as they are written ({error!r}). "
            "Load another checkpoint."
        ) from error
    except OSError as error:
        raise DamageError(f"cannot read {error.filename}: {error.strerror}. Load another checkpoint.") from error
    return Opened(path, manifest, checksums)


def _check_lengths(path: Path, files: dict[str, int]) -> None:
    for name, size in files.items():
        actual = (path / name).stat().st_size
        if actual != size:
            raise DamageError(
                f"cannot read {path / name}: it is {actual} bytes long, expected {size}. Load another checkpoint."
            )
    for file in path.rglob("*.safetensors"):
        if file.relative_to(path).as_posix() not in files:
            raise DamageError(f"cannot read {path}: {file} does not belong to it. Remove that file.")


def _read_lists(path: Path, digests: dict[str, str]) -> Checksums:
    blocks: dict[Path, list[Block]] = {}
    for name, digest in digests.items():
        content = (path / name).read_bytes()
        if digest_of(content) != digest:
            raise DamageError(
                f"cannot check {path}: {name} is not the list of checksums that the manifest means: it is damaged, or "
                "the manifest is another checkpoint's. Load another checkpoint."
            )
        listed = json.loads(content)
        if listed["algorithm"] != ALGORITHM:
            raise DamageError(f"cannot check {path}: its checksums are {listed['algorithm']}, expected {ALGORITHM}.")
        for file, of_file in listed["blocks"].items():
            blocks.setdefault(path / file, []).extend(Block(*block) for block in of_file)
    return Checksums(blocks)


def verify_checkpoint(path: str | Path) -> VerifyReport:
    """Read every byte of a checkpoint and compare it with what was written; not collective.

    Args:
        path: the checkpoint's directory.

    Returns:
        Whether it is whole, and each problem by tensor, file and byte range. Damage never raises.
    """
    path = Path(path)
    try:
        opened = open_checkpoint(path)
    except CheckpointError as error:
        return VerifyReport(False, [str(error)])
    problems: list[str] = []
    tensors: dict[Path, list[Entry]] = {}
    for file in opened.checksums.paths():
        if file.suffix == ".safetensors":
            try:
                tensors[file] = list(read_header(file).values())
            except CheckpointError as error:
                problems.append(str(error))
    blocks = [
        (file, block)
        for file in opened.checksums.paths()
        for block in opened.checksums.covering(file, 0, opened.checksums.length_of(file))
    ]
    total = sum(block.end - block.begin for _, block in blocks)
    with (
        ThreadPoolExecutor(_THREADS) as pool,
        tqdm(total=total, desc=f"verifying {path.name}", unit="B", unit_scale=True, leave=False, disable=None) as bar,
    ):
        for (file, block), problem in zip(blocks, pool.map(lambda job: _problem(*job), blocks), strict=True):
            bar.update(block.end - block.begin)
            if problem:
                problems.append(f"{_what(tensors.get(file, []), block)}: {problem}")
    return VerifyReport(not problems, problems)


def _problem(path: Path, block: Block) -> str:
    digest, memory = xxhash.xxh3_64(), bytearray(IN_CACHE_BYTES)
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            for at in range(block.begin, block.end, IN_CACHE_BYTES):
                part = memoryview(memory)[: block.end - at]
                read_into(fd, at, part)
                digest.update(part)
        finally:
            os.close(fd)
    except OSError as error:
        return f"bytes {block.begin} to {block.end} of {path} cannot be read: {error.strerror or error}"
    if digest.hexdigest() != block.digest:
        return f"bytes {block.begin} to {block.end} of {path} are not what was written"
    return ""


def _what(entries: list[Entry], block: Block) -> str:
    """Name the tensors that lie in a block."""
    names = list(_within(entries, block))
    if not names:
        return "a header" if entries else "a file"
    return f"{names[0]}{f' and {len(names) - 1} others' if len(names) > 1 else ''}"


def _within(entries: list[Entry], block: Block) -> Iterator[str]:
    for entry in entries:
        if entry.offset < block.end and block.begin < entry.offset + entry.nbytes:
            yield entry.name
