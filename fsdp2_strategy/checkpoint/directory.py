"""Commit and delete checkpoints in a run's directory of checkpoints, and clean the directory up after a crash.

Input: files that ranks wrote into a ``.partial`` directory. Output: a committed checkpoint.

[Note: commit] A save writes its files into ``.partial``. It fsyncs the files, then the manifest, then the directories.
The commit renames ``.partial`` to the tag. So a crash at any time leaves a complete checkpoint or none. If a checkpoint
with this tag exists, it is first renamed to ``.replaced``. If a crash prevents the commit, `recover` renames it back.
The sequence numbers in the manifests give the order of the commits.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from threading import Thread
from typing import Any

from fsdp2_strategy import sizes
from fsdp2_strategy.checkpoint.layout import (
    FORMAT,
    FORMAT_VERSION,
    FORMAT_VERSION_OF_SEVERAL,
    LAST,
    LATEST,
    checkpoints_with_manifest,
    digest_of_manifest,
    is_last,
    read_manifest,
)
from fsdp2_strategy.checkpoint.lock import LOCK
from fsdp2_strategy.checkpoint.paths import (
    CHECKSUMS,
    TRAINABLE,
    TRAINING_STATE,
    WRAPPER,
    CheckpointPaths,
    has_only_checkpoint_entries,
    model_folders,
)
from fsdp2_strategy.checkpoint.signature import SIGNATURE, sha256_of, signature_of
from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.checksums import ALGORITHM, Block, digest_of
from fsdp2_strategy.hf.json_files import fsync, write_bytes, write_json

_PARTIAL = ".partial"
_REPLACED = ".replaced"
_REMOVED = ".removed"

NOT_CHECKPOINTS = (LOCK, *(f".*{suffix}/*" for suffix in (_PARTIAL, _REPLACED, _REMOVED)))
"""Patterns of the other files in a directory of checkpoints: the lock, saves in flight, and deletions."""


def partial_path(save_dir: Path, tag: str) -> Path:
    """Return the directory that a save of ``tag`` writes to before the commit."""
    return save_dir / f".{tag}{_PARTIAL}"


def check_replaceable(save_dir: Path, tag: str, partial: CheckpointPaths) -> None:
    """Raise if a save would replace a file or directory that this package did not create; rank 0 calls it.

    Raises:
        CheckpointError: ``tag`` exists and is not a checkpoint of this package; or, in LeRobot's layout, ``last``
            exists and is not a link.
    """
    path = save_dir / tag
    if is_last(path) or (path.exists() and not has_only_checkpoint_entries(path)):
        raise CheckpointError(
            f"cannot save: {path} exists and is not a checkpoint of this package, expected a new name or a checkpoint "
            "to replace. Choose another tag."
        )
    path = save_dir / LAST
    if partial.is_lerobot and path.exists() and not is_last(path):
        raise CheckpointError(
            f"cannot save: {path} exists and is not a link, expected a link to the newest checkpoint or nothing. "
            "Rename it."
        )


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents; fsync the parent of each, so that they survive a power loss."""
    if not path.is_dir():
        make_directory(path.absolute().parent)
        path.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # a directory without read permission cannot be fsynced
            fsync(path.absolute().parent)


def recover(save_dir: Path) -> None:
    """Rename each ``.replaced`` checkpoint back if its tag does not exist; rank 0 calls it while no save runs."""
    for replaced in _leftovers(save_dir, _REPLACED):
        final = save_dir / replaced.name[1 : -len(_REPLACED)]
        if not final.exists():
            replaced.rename(final)


def delete_leftovers(save_dir: Path) -> None:
    """Call `recover`, then delete the leftovers of crashed saves and deletions; rank 0 calls it while no save runs."""
    recover(save_dir)
    for suffix in (_REPLACED, _PARTIAL, _REMOVED):
        for path in _leftovers(save_dir, suffix):
            delete(path)


def _leftovers(save_dir: Path, suffix: str) -> list[Path]:
    return [path for path in save_dir.glob(f".*{suffix}") if has_only_checkpoint_entries(path)]


def write_checksums(partial: CheckpointPaths, rank: int, blocks: Mapping[Path, Sequence[Block]]) -> tuple[str, str]:
    """Write the checksum manifest of one rank into ``.partial``, and fsync it.

    Returns:
        The digest of the checksum manifest, and its SHA-256 digest.
    """
    manifest: dict[str, Any] = {
        "algorithm": ALGORITHM,
        "block_bytes": sizes.BLOCK_BYTES,
        "blocks": {
            partial.name_of(path): [list(astuple(b)[: 5 if b.stride else 3]) for b in sorted(of_file)]
            for path, of_file in sorted(blocks.items())
        },
    }
    if any(block.sha256 for of_file in blocks.values() for block in of_file):
        manifest["sha256"] = {partial.name_of(path): [b.sha256 for b in sorted(of)] for path, of in blocks.items()}
    content = (json.dumps(manifest, separators=(",", ":")) + "\n").encode()
    write_bytes(partial.rank_file(CHECKSUMS, rank), content)
    return digest_of(content), sha256_of(content)


def shared_files(partial: CheckpointPaths) -> list[Path]:
    """Return all files under ``.partial`` except those in the folders with one file per rank."""
    top = {*partial.root.iterdir(), *partial.state.iterdir()} - {partial.state, *partial.per_rank_folders}
    return [path for entry in top for path in [entry, *entry.rglob("*")] if path.is_file()]


def commit(
    partial: CheckpointPaths,
    tag: str,
    entries: Mapping[str, Any],
    digests: Sequence[tuple[str, str]],
    key: bytes | None = None,
) -> None:
    """Commit the checkpoint under ``.partial``; rank 0 calls it after all ranks have written. See [Note: commit].

    Args:
        partial: the checkpoint's paths under ``.partial``.
        tag: name of the checkpoint.
        entries: entries to add to the manifest.
        digests: the results of `write_checksums`, in the order of ranks.
        key: the key to sign the manifest with, or None.

    Raises:
        CheckpointError: rank 0 does not see the checksum manifest of another rank.
    """
    save_dir, final = partial.root.parent, partial.root.with_name(tag)
    for path in shared_files(partial):  # each rank has already fsynced its own files in the per-rank folders
        fsync(path)
    files = sorted(path for path in partial.root.rglob("*") if path.is_file())
    checksums = [partial.rank_file(CHECKSUMS, rank) for rank in range(len(digests))]
    if unseen := {*checksums} - {*files}:
        raise CheckpointError(
            f"cannot commit {final}: rank 0 does not see {partial.name_of(min(unseen))}, which another rank wrote "
            f"({len(unseen)} of {len(checksums)} such files are missing), expected one directory for all ranks. Save "
            "into a file system that all hosts share."
        )
    sequence = max((c.sequence for c in checkpoints_with_manifest(save_dir)), default=0) + 1
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION_OF_SEVERAL if "models" in entries else FORMAT_VERSION,
        "sequence": sequence,
        "tag": tag,
        **entries,
        "files": {partial.name_of(path): path.stat().st_size for path in files},
        "checksums": {partial.name_of(path): digest for path, (digest, _) in zip(checksums, digests, strict=True)},
    }
    if key is not None:
        sha256 = {partial.name_of(path): digest for path, (_, digest) in zip(checksums, digests, strict=True)}
        manifest[SIGNATURE] = signature_of(manifest, sha256, key)
    write_json(partial.manifest, manifest | {"digest": digest_of_manifest(manifest)})
    for directory in [*(path for path in partial.root.rglob("*") if path.is_dir()), partial.root]:
        fsync(directory)
    replaced = save_dir / f".{tag}{_REPLACED}"
    if final.exists():
        final.rename(replaced)
    partial.root.rename(final)
    fsync(save_dir)
    if replaced.exists():
        delete(replaced)


def warn_of_other_weights(partial: CheckpointPaths, final: Path, step: int) -> None:
    """Log a warning if a save replaces a checkpoint of the same step that has other weights; rank 0 calls it.

    Only the checksums of the bytes that rank 0 wrote are compared, and only if the number of ranks is unchanged.
    """
    old = CheckpointPaths.found_in(final)
    try:
        manifest = read_manifest(final)
        ranks = len(list(partial.rank_file(CHECKSUMS, 0).parent.iterdir()))
        if manifest["step"] != step or len(manifest["checksums"]) != ranks:
            return
        before, after = (_weight_blocks(paths) for paths in (old, partial))
    except (CheckpointError, OSError, ValueError, KeyError):  # it does not exist, or is unusable
        return
    if before != after:
        message = (
            "%s is replaced by a checkpoint of the same step %d with other weights: only steps of "
            "strategy.optimizer_step are counted"
        )
        logger.warning(message, final, step)


def _weight_blocks(paths: CheckpointPaths) -> dict[str, Any]:
    """Return the blocks of weights in rank 0's checksum manifest, by file."""
    blocks = json.loads(paths.rank_file(CHECKSUMS, 0).read_bytes())["blocks"]
    parts = [paths, *(paths.of_model(folder.name) for folder in model_folders(paths.root))]
    folders = {paths.name_of(f) for of in parts for f in (of.model, of.state / WRAPPER, of.state / TRAINABLE)}
    return {
        name: of_file
        for name, of_file in blocks.items()
        if Path(name).suffix == ".safetensors" and Path(name).parent.as_posix() in folders
    }


def update_latest(newest: CheckpointPaths) -> None:
    """Point the file ``latest``, or in LeRobot's layout the link ``last``, to a checkpoint, by an atomic rename.

    The other layout's ``last`` or ``latest`` is deleted, because it names an older checkpoint.
    """
    save_dir, tag = newest.root.parent, newest.root.name
    name, other = (LAST, LATEST) if newest.is_lerobot else (LATEST, LAST)
    temporary = save_dir / f".{name}.new"
    if newest.is_lerobot:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(tag)
    else:
        temporary.write_text(tag + "\n", encoding="utf-8")
        fsync(temporary)
    temporary.replace(save_dir / name)
    if is_last(save_dir / other) or (other == LATEST and (save_dir / other).is_file()):
        (save_dir / other).unlink()
    fsync(save_dir)


def removed_path(path: Path) -> Path:
    """Return the name under which a checkpoint's directory is deleted."""
    return path.with_name(f".{path.name}{_REMOVED}")


def remove(checkpoints: Sequence[Path], leftovers: Sequence[Path] = ()) -> None:
    """Rename checkpoints to ``.removed``, then delete them in a background thread.

    The rename ensures that no incomplete checkpoint is listed.

    Args:
        checkpoints: directories of checkpoints.
        leftovers: renamed directories to delete as well, which an interrupted deletion left.
    """
    removed = [*leftovers, *(path.rename(removed_path(path)) for path in checkpoints)]
    if removed:
        thread = Thread(target=_delete_all, args=(removed,), name="remove checkpoints")
        _removals.append(thread)
        thread.start()


_removals: list[Thread] = []


def _delete_all(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            delete(path)
        except OSError as error:
            logger.warning("cannot delete %s: %s. The next save tries again.", path, error)


def delete(path: Path) -> None:
    """Delete a checkpoint's directory.

    Files for other programs and the folders of several models are deleted first, and ``training_state/`` last. So
    `has_only_checkpoint_entries` is also true after an interrupted deletion, and the next save deletes the rest.
    """
    for folder in model_folders(path):
        shutil.rmtree(folder)
    if (path / TRAINING_STATE).is_dir():
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink() and entry.name != TRAINING_STATE:
                shutil.rmtree(entry)
            elif entry.name != TRAINING_STATE:
                entry.unlink()
    shutil.rmtree(path)


def finish_removals() -> None:
    """Wait for the threads that delete checkpoints."""
    while _removals:
        _removals.pop().join()
