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
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdp2_strategy import sizes
from fsdp2_strategy.checkpoint.file_schemas import (
    STATE_BYTES,
    STATE_OF_MODEL,
    STATE_OF_ONLY_MODEL,
    STATE_OF_RUN,
    parse_state,
    read_small_file,
)
from fsdp2_strategy.checkpoint.listing import models_in, read_manifest
from fsdp2_strategy.checkpoint.paths import (
    CHECKSUMS,
    EMA,
    MODEL,
    OPTIMIZER,
    TRAINABLE,
    TRAINER_STATE,
    WRAPPER,
    CheckpointPaths,
)
from fsdp2_strategy.checkpoint.signature import SIGNATURE, check_signature, sha256_of
from fsdp2_strategy.errors import CheckpointError, DamageError
from fsdp2_strategy.hf.weights_folder import INDEX_BYTES
from fsdp2_strategy.storage.checksum_manifests import CHECKSUMS_BYTES, damage, parse_checksums
from fsdp2_strategy.storage.checksums import Block, CheckedRange, Checksums, Hasher, adjacent_ranges, digest_of
from fsdp2_strategy.storage.file_reads import SourceFile, size_of_file
from fsdp2_strategy.storage.json_values import from_json_values
from fsdp2_strategy.storage.safetensors_format import MAX_HEADER_BYTES, Entry, read_header, read_into
from fsdp2_strategy.storage.schema import InvalidError

_THREADS = 4


@dataclass(frozen=True)
class Opened:
    """A checkpoint that is open for reading. `check_structure` has compared its files with its manifest."""

    paths: CheckpointPaths
    manifest: dict[str, Any]
    checksums: Checksums

    def lists(self, path: Path) -> bool:
        """Return whether a file is one of the checkpoint's, and not one that was added to its directory."""
        return path.is_relative_to(self.paths.root) and self.paths.name_of(path) in self.manifest["files"]

    def read(self, path: Path, max_bytes: int) -> bytes:
        """Read a small file, and verify its checksums."""
        content = read_small_file(path, max_bytes)
        for checked in self.checksums.covering(path, 0, len(content)):
            checked.check(memoryview(content)[checked.begin : checked.end], path, self.paths.name_of(path))
        return content

    def state_of(self, model: str = "") -> dict[str, Any]:
        """Read and check the ``trainer_state.json`` of one of several models; without a name, that of the run."""
        of_run = STATE_OF_RUN if "models" in self.manifest else STATE_OF_ONLY_MODEL
        path = self.paths.of_model(model).state / TRAINER_STATE
        state = parse_state(self.read(path, STATE_BYTES), path, STATE_OF_MODEL if model else of_run)
        hyper = state.get("optimizer") or {}
        try:
            for coded in (state.get("scheduler"), hyper.get("settings"), hyper.get("values")):
                from_json_values(coded)
        except InvalidError as error:
            raise damage(path, f"its content is invalid: {error}") from error
        return state

    def check_headers(self) -> None:
        """Check all safetensors headers and their checksums, and those of the indexes."""
        per_rank = tuple(f"{self.paths.name_of(folder)}/" for folder in self.paths.per_rank_folders)
        shared = (name for name in self.manifest["files"] if not name.startswith(per_rank))
        for name in shared:
            path = self.paths.root / name
            if path.name.endswith(".safetensors.index.json"):
                self.read(path, INDEX_BYTES)
            if path.suffix == ".safetensors":
                self._check_header(path, self.manifest["files"][name])

    def _check_header(self, path: Path, size: int) -> None:
        try:
            with SourceFile(path) as file:
                length = 8 + int.from_bytes(file.read(lambda fd: os.pread(fd, 8, 0)), "little")
                for checked in self.checksums.covering(path, 0, min(length, MAX_HEADER_BYTES, size)):
                    content = memoryview(bytearray(checked.end - checked.begin))
                    file.read(partial(read_into, offset=checked.begin, memory=content))
                    checked.check(content, path, "the header")
        except OSError as error:
            raise damage(path, error.strerror or str(error)) from error
        try:
            read_header(path)
        except DamageError:
            raise
        except CheckpointError as error:
            raise DamageError(str(error)) from error

    def check_files(self, names: Iterable[str], *, share: int = 0, shares: int = 1) -> None:
        """Verify all blocks of some files, or one of ``shares`` parts of them, that with number ``share``."""
        tasks = [
            (self.paths.root / name, together)
            for name in names
            if name not in self.manifest["checksums"]
            for together in adjacent_ranges(
                self.checksums.covering(self.paths.root / name, 0, self.manifest["files"][name])
            )
        ]
        with ThreadPoolExecutor(_THREADS) as pool:
            for problems in pool.map(lambda task: problems_in(*task), tasks[share::shares]):
                for _, problem in problems:
                    raise DamageError(f"cannot load {self.paths.root}: {problem}. Load another checkpoint.")


def problems_in(path: Path, together: Sequence[CheckedRange]) -> list[tuple[CheckedRange, str]]:
    """Read adjacent ranges of a file and compare their checksums; return the problem of each range that has one."""
    begin, end = together[0].begin, together[-1].end
    memory = memoryview(bytearray(min(end - begin, sizes.CACHED_BYTES)))
    hasher = Hasher(together)
    try:
        with SourceFile(path) as file:
            for at in range(begin, end, sizes.CACHED_BYTES):
                part = memory[: end - at]
                file.read(partial(read_into, offset=at, memory=part))
                hasher.update(part)
    except OSError as error:
        why = error.strerror or error
        return [(c, f"bytes {c.begin} to {c.end} of {path} cannot be read: {why}") for c in together]
    return hasher.problems(path)


def check_structure(path: Path, key: bytes | None = None) -> dict[str, Any]:
    """Compare a manifest with the files and their lengths, and return it; one rank calls it for all ranks."""
    manifest, paths = read_manifest(path), CheckpointPaths.found_in(path)
    try:
        if key is not None:
            check_signature(path, manifest, key)
            _check_folders(paths, manifest)
        for name, size in manifest["files"].items():
            actual = size_of_file(path / name)
            if actual != size:
                raise DamageError(
                    f"cannot read {path / name}: it is {actual} bytes long, expected {size}. Load another checkpoint."
                )
    except OSError as error:
        raise DamageError(f"cannot read {error.filename}: {error.strerror}. Load another checkpoint.") from error
    expected = paths.rank_names(CHECKSUMS, len(manifest["checksums"]))
    if list(manifest["checksums"]) != expected or not manifest["files"].keys() >= {*expected}:
        raise damage(paths.manifest, "its content is invalid: it does not list one checksum manifest per rank")
    return manifest


def _check_folders(paths: CheckpointPaths, manifest: Mapping[str, Any]) -> None:
    """Raise if there is a component that the manifest does not have: a load decides by the folders that exist."""
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
    """Open a checkpoint, and call `check_structure` unless ``manifest`` is its result; not collective.

    Args:
        path: the checkpoint's directory.
        manifest: the result of `check_structure`, or None.
        rank: this rank, if the checkpoint was saved on as many ranks as now; else None.
        key: check the signature with this key, and verify the digests that it signed.
        is_signed: verify these digests; with ``manifest``, whose signature has been checked.
    """
    manifest = dict(manifest or check_structure(path, key))
    signed = manifest[SIGNATURE]["checksums"] if is_signed or key is not None else None
    shard_size = manifest.get("shard_size", len(manifest["checksums"]))
    paths = replace(CheckpointPaths.found_in(path), listed=frozenset(manifest["files"]))
    return Opened(paths, manifest, Checksums(_ChecksumManifests(paths, manifest, shard_size, rank, signed)))


def opened_around(folder: Path) -> Opened | None:
    """Open the checkpoint that a folder belongs to, such as ``model/``; None if it belongs to none; not collective."""
    folder = folder.absolute()
    for root in (folder, folder.parent, folder.parent.parent):  # the layout of Trainer, the others, several models
        if CheckpointPaths.found_in(root).manifest.exists():
            return open_checkpoint(root)
    return None


def opened_with_headers(path: Path, key: bytes | None = None) -> Opened:
    """Open a checkpoint, and check the headers and indexes of all its files; not collective."""
    opened = open_checkpoint(path, key=key)
    opened.check_headers()
    return opened


@dataclass
class _ChecksumManifests:
    """A `ManifestReader` that reads each checksum manifest once; see [Note: checksum manifests]."""

    paths: CheckpointPaths
    manifest: Mapping[str, Any]
    shard_size: int
    rank: int | None
    signed: Mapping[str, str] | None = None
    """The SHA-256 digests of the checksum manifests, which are then compared, as are those of blocks."""
    _read: set[int] = field(default_factory=set)
    _failed: dict[Path, str] = field(default_factory=dict)
    """Texts of errors."""
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
        ranks = len(self.manifest["checksums"])
        yield [0] if self.rank is None else [0, self.rank]
        if self.rank is not None:
            yield range(self.rank % self.shard_size, ranks, self.shard_size)
        shards = self._shards_with(path, begin, end)
        found = (replica + shard for replica in range(0, ranks, self.shard_size) for shard in shards)
        yield [each for each in found if each < ranks]
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

    def _read_blocks(self, ranks: Iterable[int]) -> dict[Path, list[Block]]:
        blocks: dict[Path, list[Block]] = {}
        for path in (self.paths.rank_file(CHECKSUMS, rank) for rank in ranks):
            if path in self._failed:  # each file asks again for a manifest that cannot be used
                raise DamageError(self._failed[path])
            try:
                listed = self._read_manifest(path)
            except DamageError as error:
                self._failed[path] = str(error)
                raise
            for file, of_file in listed.items():
                blocks.setdefault(self.paths.root / file, []).extend(of_file)
        return blocks

    def _read_manifest(self, path: Path) -> dict[str, list[Block]]:
        """Return the blocks in a checksum manifest by the names of files, with SHA-256 digests if it is signed."""
        name = self.paths.name_of(path)
        content = read_small_file(path, CHECKSUMS_BYTES)
        expected = self.manifest["checksums"][name]
        if (digest := digest_of(content)) != expected:
            raise DamageError(
                f"cannot verify {self.paths.root}: {name} has the checksum {digest}, expected {expected}, as in the "
                "manifest. Load another checkpoint."
            )
        if self.signed is not None and sha256_of(content) != self.signed.get(name):
            raise DamageError(
                f"cannot trust {self.paths.root}: {name} is not the file that was signed. Load another checkpoint."
            )
        listed = parse_checksums(content, path, self.manifest["files"])
        blocks = {file: [Block(*block) for block in of_file] for file, of_file in listed["blocks"].items()}
        if self.signed is None:
            return blocks
        try:
            return {
                file: [replace(b, digest=digest) for b, digest in zip(of_file, listed["sha256"][file], strict=True)]
                for file, of_file in blocks.items()
            }
        except (KeyError, TypeError, ValueError) as error:
            raise damage(path, "it lacks digests of blocks") from error
