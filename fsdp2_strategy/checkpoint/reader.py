"""Open a checkpoint for reading: check its structure, and read each checksum manifest when it is first needed.

Input: a checkpoint's directory. Output: its manifest, its small files, and checksums for any range of its files.

[Note: checksum manifests] In a save, each rank writes a checksum manifest of the blocks that it wrote. The total size
of these manifests grows with the number of ranks times the number of tensors. So a rank that loads reads them in the
order below, and stops when their blocks cover the byte range that it needs.

1. the manifest of rank 0, which covers headers and sidecar files
2. its own manifest, which usually suffices if the number of ranks is unchanged
3. the manifests of the ranks that saved replicas of its shard, if the number of ranks is unchanged
4. the manifests of the ranks whose shards probably contain the range
5. all other manifests

Each checksum manifest records its maximum block size.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp2_strategy import sizes
from fsdp2_strategy.checkpoint.layout import models_in, read_manifest
from fsdp2_strategy.checkpoint.paths import CHECKSUMS, EMA, MODEL, OPTIMIZER, TRAINABLE, WRAPPER, CheckpointPaths
from fsdp2_strategy.checkpoint.signature import SIGNATURE, check_signature, sha256_of
from fsdp2_strategy.errors import CheckpointError, DamageError
from fsdp2_strategy.hf.checksums import ALGORITHM, Block, CheckedRange, Checksums, digest_of
from fsdp2_strategy.hf.safetensors_format import Entry, read_header, read_into

_THREADS = 4
_DEFAULT_BLOCK_BYTES = 16 << 20
"""Maximum block size of old checksum manifests, which do not record it."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint that is open for reading. `check_structure` has compared its files with its manifest."""

    paths: CheckpointPaths
    manifest: dict[str, Any]
    checksums: Checksums

    def lists(self, path: Path) -> bool:
        """Return whether a file is one of the checkpoint's, and not one that was added to its directory."""
        return path.is_relative_to(self.paths.root) and self.paths.name_of(path) in self.manifest["files"]

    def read(self, path: Path) -> bytes:
        """Read a small file, and verify its checksums.

        Raises:
            DamageError: the file cannot be read, or a checksum differs.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DamageError(f"cannot read {path}: {error.strerror}. Load another checkpoint.") from error
        for checked in self.checksums.covering(path, 0, len(content)):
            checked.check(memoryview(content)[checked.begin : checked.end], path, self.paths.name_of(path))
        return content

    def read_json(self, path: Path) -> dict[str, Any]:
        """Read a JSON file, and verify its checksums.

        Raises:
            DamageError: the file cannot be read, or a checksum differs.
        """
        content: dict[str, Any] = json.loads(self.read(path))
        return content

    def check_headers(self) -> None:
        """Verify the checksums of all safetensors headers and of the indexes that list which tensor is in which file.

        Raises:
            DamageError: a checksum differs.
        """
        for name, size in self.manifest["files"].items():
            path = self.paths.root / name
            if path.name.endswith(".safetensors.index.json"):
                self.read(path)
            if path.suffix == ".safetensors" and path.parent not in self.paths.per_rank_folders:
                with path.open("rb") as file:
                    length = 8 + int.from_bytes(file.read(8), "little")
                    file.seek(0)
                    for checked in self.checksums.covering(path, 0, min(length, size)):
                        checked.check(file.read(checked.end - checked.begin), path, "the header")

    def check_files(self, names: Iterable[str], *, share: int = 0, shares: int = 1) -> None:
        """Verify the checksums of all bytes of some files, or of a share of their blocks.

        Args:
            names: the files, by their names in the manifest.
            share: number of the share that this process verifies.
            shares: number of shares that the blocks are divided into.

        Raises:
            DamageError: a file cannot be read, or a checksum differs.
        """
        ranges = [
            (self.paths.root / name, checked)
            for name in names
            if name not in self.manifest["checksums"]
            for checked in self.checksums.covering(self.paths.root / name, 0, self.manifest["files"][name])
        ]
        with ThreadPoolExecutor(_THREADS) as pool:
            for problem in pool.map(lambda one: problem_in(*one), ranges[share::shares]):
                if problem:
                    raise DamageError(f"cannot load {self.paths.root}: {problem}. Load another checkpoint.")

    def read_checksum_manifests(self, ranges: Iterable[tuple[Path, int, int]]) -> None:
        """Read the checksum manifests that are needed for byte ranges, which are tuples of file, begin and end.

        Raises:
            DamageError: a checksum manifest is corrupt, or does not belong to these files.
        """
        for path, begin, end in ranges:
            self.checksums.covering(path, begin, end)


def problem_in(path: Path, checked: CheckedRange) -> str:
    """Read a range and compare its checksums; return the problem, or "" if there is none."""
    hasher, memory = checked.hasher(), bytearray(sizes.CACHED_BYTES)
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            for at in range(checked.begin, checked.end, sizes.CACHED_BYTES):
                part = memoryview(memory)[: checked.end - at]
                read_into(fd, at, part)
                hasher.update(part)
        finally:
            os.close(fd)
    except OSError as error:
        return f"bytes {checked.begin} to {checked.end} of {path} cannot be read: {error.strerror or error}"
    return hasher.problem(path)


def check_structure(path: Path, key: bytes | None = None) -> dict[str, Any]:
    """Compare a checkpoint's manifest with its files. Not collective: one rank calls it for all ranks.

    Args:
        path: the checkpoint's directory.
        key: check the signature with this key; None to accept a checkpoint without one.

    Returns:
        The manifest.

    Raises:
        DamageError: the manifest is invalid, a file is missing or has another length, a tensor file is not listed, or
            the key did not sign the manifest.
    """
    manifest, paths = read_manifest(path), CheckpointPaths.found_in(path)
    try:
        if key is not None:
            check_signature(path, manifest, key)
            _check_folders(paths, manifest)
        for name, size in manifest["files"].items():
            actual = (path / name).stat().st_size
            if actual != size:
                raise DamageError(
                    f"cannot read {path / name}: it is {actual} bytes long, expected {size}. Load another checkpoint."
                )
        for file in path.rglob("*.safetensors"):
            if file.relative_to(path).as_posix() not in manifest["files"]:
                raise DamageError(f"cannot read {path}: {file} is not listed in its manifest. Remove that file.")
        ranks = range(len(manifest["checksums"]))
        if list(manifest["checksums"]) != [paths.name_of(paths.rank_file(CHECKSUMS, rank)) for rank in ranks]:
            raise ValueError("it does not list one checksum manifest per rank")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamageError(
            f"cannot read {path}: its manifest is invalid ({error!r}). Load another checkpoint."
        ) from error
    except OSError as error:
        raise DamageError(f"cannot read {error.filename}: {error.strerror}. Load another checkpoint.") from error
    return manifest


def _check_folders(paths: CheckpointPaths, manifest: Mapping[str, Any]) -> None:
    """Raise if there is a component that the manifest does not have: a load decides by the folders that exist.

    Raises:
        DamageError: the message names the folder.
    """
    for own in paths.of_models(models_in(manifest)).values():
        for folder in (own.state / name for name in (MODEL, WRAPPER, TRAINABLE, OPTIMIZER, EMA)):
            prefix = f"{paths.name_of(folder)}/"
            if os.path.lexists(folder) and not any(name.startswith(prefix) for name in manifest["files"]):
                raise DamageError(
                    f"cannot trust {paths.root}: {folder} was added after it was signed, expected only the components "
                    "of its manifest. Remove the folder."
                )


def open_checkpoint(
    path: Path,
    manifest: Mapping[str, Any] | None = None,
    *,
    rank: int | None = None,
    key: bytes | None = None,
    is_signed: bool = False,
) -> Opened:
    """Open a checkpoint; not collective.

    Args:
        path: the checkpoint's directory.
        manifest: the manifest that `check_structure` returned; None to call `check_structure` here.
        rank: this rank, if the checkpoint was saved on as many ranks as now; else None.
        key: check the signature with this key, and verify the digests that it signed.
        is_signed: verify these digests; with ``manifest``, whose signature has been checked.

    Raises:
        DamageError: see `check_structure`.
    """
    manifest = dict(manifest or check_structure(path, key))
    signed = manifest[SIGNATURE]["checksums"] if is_signed or key is not None else None
    shard_size = manifest.get("shard_size", len(manifest["checksums"]))
    paths = CheckpointPaths.found_in(path)
    return Opened(
        paths, manifest, Checksums(_ChecksumManifests(paths, manifest["checksums"], shard_size, rank, signed))
    )


def opened_around(folder: Path) -> Opened | None:
    """Open the checkpoint that a folder belongs to, such as ``model/``; None if it belongs to none; not collective.

    Raises:
        DamageError: see `check_structure`.
    """
    folder = folder.absolute()
    for root in (folder, folder.parent, folder.parent.parent):  # the layout of Trainer, the others, several models
        if CheckpointPaths.found_in(root).manifest.exists():
            return open_checkpoint(root)
    return None


@dataclass
class _ChecksumManifests:
    """A `ManifestReader` that reads each checksum manifest once; see [Note: checksum manifests]."""

    paths: CheckpointPaths
    digests: Mapping[str, str]
    shard_size: int
    rank: int | None
    signed: Mapping[str, str] | None = None
    """The SHA-256 digests of the checksum manifests, which are then compared, as are those of blocks."""
    _read: set[int] = field(default_factory=set)
    _headers: dict[Path, list[Entry]] = field(default_factory=dict)

    def __call__(self, path: Path, begin: int, end: int) -> Iterator[dict[Path, list[Block]]]:
        """Yield the blocks of the checksum manifests that were not read before, in the order of the note."""
        for ranks in self._ranks_to_read(path, begin, end):
            unread = sorted(set(ranks) - self._read)  # reading a manifest twice would duplicate its blocks
            if unread:
                blocks = self._read_blocks(unread)
                self._read.update(unread)
                yield blocks

    def _ranks_to_read(self, path: Path, begin: int, end: int) -> Iterator[Iterable[int]]:
        """Yield the ranks whose checksum manifests to read for a byte range, in the order of the note."""
        ranks = len(self.digests)
        yield [0] if self.rank is None else [0, self.rank]
        if self.rank is not None:
            yield range(self.rank % self.shard_size, ranks, self.shard_size)
        shards = self._shards_with(path, begin, end)
        yield [replica + shard for replica in range(0, ranks, self.shard_size) for shard in shards]
        yield range(ranks)

    def _shards_with(self, path: Path, begin: int, end: int) -> range:
        """Guess which shards contain a byte range: assume that each tensor in the file is sharded on dim 0."""
        if path.suffix != ".safetensors":
            return range(0)
        if path not in self._headers:
            try:
                self._headers[path] = sorted(read_header(path).values(), key=lambda entry: entry.offset)
            except CheckpointError:
                self._headers[path] = []  # `check_headers` reports a corrupt header
        at = bisect.bisect_right(self._headers[path], begin, key=lambda entry: entry.offset) - 1
        entry = self._headers[path][at] if at >= 0 else None
        if entry is None or not entry.shape or end > entry.offset + entry.nbytes:
            return range(0)
        rows = entry.shape[0]
        bytes_of_shard = -(-rows // self.shard_size) * (entry.nbytes // rows)
        first, last = ((byte - entry.offset) // bytes_of_shard for byte in (begin, end - 1))
        return range(first, last + 1)

    def _with_signed_digests(self, blocks: list[Block], listed: Mapping[str, Any], file: str) -> list[Block]:
        """Return the blocks of a file with their SHA-256 digests, if those are compared."""
        if self.signed is None:
            return blocks
        return [replace(b, digest=digest) for b, digest in zip(blocks, listed["sha256"][file], strict=True)]

    def _check(self, name: str, content: bytes) -> None:
        """Compare a checksum manifest with its digests in the manifest.

        Raises:
            DamageError: a digest differs.
        """
        if (digest := digest_of(content)) != self.digests[name]:
            raise DamageError(
                f"cannot verify {self.paths.root}: {name} has the checksum {digest}, expected "
                f"{self.digests[name]}, as in the manifest. Load another checkpoint."
            )
        if self.signed is not None and sha256_of(content) != self.signed[name]:
            raise DamageError(
                f"cannot trust {self.paths.root}: {name} is not the file that was signed. Load another checkpoint."
            )

    def _read_blocks(self, ranks: Iterable[int]) -> dict[Path, list[Block]]:
        """Read the checksum manifests of the given ranks.

        Raises:
            DamageError: a checksum manifest cannot be read, is corrupt, or uses another algorithm.
        """
        blocks: dict[Path, list[Block]] = {}
        for path in (self.paths.rank_file(CHECKSUMS, rank) for rank in ranks):
            name = self.paths.name_of(path)
            try:
                content = path.read_bytes()
            except OSError as error:
                raise DamageError(f"cannot read {path}: {error.strerror}. Load another checkpoint.") from error
            self._check(name, content)
            try:
                listed = json.loads(content)
                max_bytes = listed.get("block_bytes", _DEFAULT_BLOCK_BYTES)
                for file, of_file in listed["blocks"].items():
                    found = self._with_signed_digests([Block(*block) for block in of_file], listed, file)
                    if not all(0 < block.end - block.begin <= max_bytes for block in found):
                        raise ValueError(f"a block of {file} is empty, or has more than {max_bytes} bytes")
                    if not all(0 < block.run_bytes <= block.stride for block in found if block.stride):
                        raise ValueError(f"a block of {file} has runs that are empty, or overlap")
                    blocks.setdefault(self.paths.root / file, []).extend(found)
                if listed["algorithm"] != ALGORITHM:
                    raise ValueError(f"its checksums are {listed['algorithm']}, expected {ALGORITHM}")
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise DamageError(
                    f"cannot verify {self.paths.root}: {name} is invalid ({error!r}). Load another checkpoint."
                ) from error
        return blocks
