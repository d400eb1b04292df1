"""Commit and delete checkpoints in a run's directory of checkpoints, and clean the directory up after a crash.

Input: files that ranks wrote into a ``.partial`` directory. Output: a committed checkpoint.

[Note: commit] A save writes its files into ``.partial``. It fsyncs the files, then the manifest, then the directories.
The commit renames ``.partial`` to the tag. So a crash at any time leaves a complete checkpoint or none. If a checkpoint
with this tag exists, it is first renamed to ``.replaced``. If a crash prevents the commit, `recover` renames it back.
The sequence numbers in the manifests give the order of the commits. What follows the commit (``latest``, the deletion
of the old checkpoint, rotation) logs a warning if it fails, because the checkpoint is committed.

[Note: hidden names] ``.<tag>.partial`` is a save in flight, ``.<tag>.replaced`` the old checkpoint of its tag, and
``.<tag>.removed`` a checkpoint that is being deleted. What cannot be deleted (a file that another host holds open, a
mount point) keeps its name until a later save can delete it; meanwhile, ``..2.<tag>.partial`` and so on are used. Only
directories that this package made are deleted; links and other directories with such names are left alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from fsdp2_strategy.checkpoint.deletion import bytes_in, delete, delete_partial, hide, write_new
from fsdp2_strategy.checkpoint.file_schemas import MAX_SEQUENCE, read_small_file
from fsdp2_strategy.checkpoint.listing import (
    FORMAT,
    FORMAT_VERSION,
    FORMAT_VERSION_OF_SEVERAL,
    LAST,
    LATEST,
    PARTIAL,
    REMOVED,
    REPLACED,
    checkpoints_with_manifest,
    digest_of_manifest,
    hidden_in,
    is_last,
    is_own_directory,
    read_checkpoint,
    read_manifest,
    tag_of,
)
from fsdp2_strategy.checkpoint.lock import LOCK
from fsdp2_strategy.checkpoint.paths import (
    CHECKSUMS,
    TRAINABLE,
    WRAPPER,
    CheckpointPaths,
    exists,
    has_only_checkpoint_entries,
    model_folders,
)
from fsdp2_strategy.checkpoint.signature import SIGNATURE, sha256_of, signature_of
from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage.checksum_manifests import CHECKSUMS_BYTES, checksum_manifest, parse_checksums
from fsdp2_strategy.storage.checksums import Block, digest_of
from fsdp2_strategy.storage.json_files import fsync, write_bytes, write_json

NOT_CHECKPOINTS = (LOCK, *(f".*{suffix}/*" for suffix in (PARTIAL, REPLACED, REMOVED)))
"""Patterns of the other files in a directory of checkpoints: the lock, saves in flight, and deletions."""


def partial_path(save_dir: Path, tag: str) -> Path:
    """Return the directory that a save of ``tag`` writes to before the commit, unless an earlier one is left there."""
    return save_dir / f".{tag}{PARTIAL}"


def check_replaceable(save_dir: Path, tag: str, partial: CheckpointPaths) -> None:
    """Raise if a save would replace a file, link or directory that this package did not create; rank 0 calls it."""
    path = save_dir / tag
    if path.is_symlink():
        raise CheckpointError(
            f"cannot save: {path} is a symbolic link, expected a new name or a checkpoint to replace, because a save "
            "never writes through a link. Choose another tag, or remove the link."
        )
    if exists(path) and not is_own_directory(path):
        raise CheckpointError(
            f"cannot save: {path} exists and is not a checkpoint of this package, expected a new name or a checkpoint "
            "to replace. Choose another tag."
        )
    path = save_dir / LAST
    if partial.is_lerobot and exists(path) and not is_last(path):
        raise CheckpointError(
            f"cannot save: {path} exists and is not a link, expected a link to the newest checkpoint or nothing. "
            "Rename it."
        )
    if exists(partial.root, follow_symlinks=False):
        raise CheckpointError(
            f"cannot save: {partial.root} exists since this save began, expected that only this run saves here. Save "
            "again."
        )


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents; fsync the parent of each, so that they survive a power loss."""
    if not path.is_dir():
        make_directory(path.absolute().parent)
        path.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # a directory without read permission cannot be fsynced
            fsync(path.absolute().parent)


def recover(save_dir: Path) -> None:
    """Rename each ``.replaced`` checkpoint back if nothing has its tag; rank 0 calls it while no save runs.

    On a file system that is mounted read-only, the checkpoint is listed and loaded under its hidden name.
    """
    for path, tag in _replaced_in(save_dir):
        final = save_dir / tag
        if not exists(final, follow_symlinks=False):
            try:
                path.rename(final)
            except OSError as error:
                logger.debug("cannot rename %s to %s: %s", path, final, error)


def _replaced_in(save_dir: Path) -> list[tuple[Path, str]]:
    """Return the ``.replaced`` checkpoints with their tags; of several with one tag, the newest comes first."""
    found = [each for each in hidden_in(save_dir, REPLACED) if _is_own(each[0])]
    read = {path: read_checkpoint(path) for path, _ in found}
    return sorted(found, key=lambda each: -(checkpoint.sequence if (checkpoint := read[each[0]]) else 0))


def delete_leftovers(save_dir: Path) -> None:
    """Call `recover`, then delete the leftovers of crashed saves and deletions; rank 0 calls it while no save runs."""
    recover(save_dir)
    for path, tag in _replaced_in(save_dir):
        if read_checkpoint(save_dir / tag) is not None and not (save_dir / tag).is_symlink():
            _discard(path, save_dir / tag)
        else:
            logger.warning("keeping %s, because %s is not a checkpoint that replaces it", path, save_dir / tag)
    for path, _ in hidden_in(save_dir, PARTIAL):
        delete_partial(path)
    for path, tag in hidden_in(save_dir, REMOVED):
        if _is_own(path):
            delete(path, save_dir / tag)


def leftover_bytes(save_dir: Path) -> int:
    """Return how much space the hidden directories take that could not be deleted; rank 0 calls it."""
    found = [path for suffix in (PARTIAL, REPLACED, REMOVED) for path, _ in hidden_in(save_dir, suffix)]
    return sum(bytes_in(path) for path in found if _is_own(path))


def _is_own(path: Path) -> bool:
    return is_own_directory(path) or has_only_checkpoint_entries(path)


def write_checksums(partial: CheckpointPaths, rank: int, blocks: Mapping[Path, Sequence[Block]]) -> tuple[str, str]:
    """Write and fsync the checksum manifest of one rank, and return its digest and its SHA-256 digest."""
    content = checksum_manifest({partial.name_of(path): of_file for path, of_file in blocks.items()})
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

    ``entries`` go into the manifest, which ``key`` signs; ``digests`` are the results of `write_checksums` by rank.
    """
    save_dir, final = partial.root.parent, partial.root.with_name(tag)
    for path in shared_files(partial):  # each rank has already fsynced its own files in the per-rank folders
        fsync(path)
    folders, files = _walk(partial.root)
    checksums = partial.rank_names(CHECKSUMS, len(digests))
    if unseen := {*checksums} - {*files}:
        raise CheckpointError(
            f"cannot commit {final}: rank 0 does not see {min(unseen)}, which another rank wrote "
            f"({len(unseen)} of {len(checksums)} such files are missing), expected one directory for all ranks. Save "
            "into a file system that all hosts share."
        )
    newest = max(checkpoints_with_manifest(save_dir), key=lambda c: c.sequence, default=None)
    if newest is not None and newest.sequence >= MAX_SEQUENCE:
        raise CheckpointError(
            f"cannot commit {final}: {newest.path} has the sequence number {newest.sequence}, expected a smaller one. "
            "Move it to another directory."
        )
    sequence = newest.sequence + 1 if newest else 1
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION_OF_SEVERAL if "models" in entries else FORMAT_VERSION,
        "sequence": sequence,
        "tag": tag,
        **entries,
        "files": files,
        "checksums": {name: digest for name, (digest, _) in zip(checksums, digests, strict=True)},
    }
    if key is not None:
        sha256 = {name: digest for name, (_, digest) in zip(checksums, digests, strict=True)}
        manifest[SIGNATURE] = signature_of(manifest, sha256, key)
    write_json(partial.manifest, manifest | {"digest": digest_of_manifest(manifest)})
    for folder in [*folders, partial.root]:
        fsync(folder)
    replaced = hide(final, tag, REPLACED) if exists(final, follow_symlinks=False) else None
    try:
        partial.root.rename(final)
    except OSError:
        if replaced is not None:
            replaced.rename(final)
        raise
    fsync(save_dir)


def _walk(root: Path) -> tuple[list[Path], dict[str, int]]:
    """Return the folders in a directory, and the sizes of its files by their sorted names; there may be many."""
    folders: list[Path] = []
    found: list[tuple[list[str], int]] = []
    waiting = [(root, "")]
    while waiting:
        folder, prefix = waiting.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(folder / entry.name)
                    waiting += [] if entry.is_symlink() else [(folders[-1], f"{prefix}{entry.name}/")]
                elif entry.is_file():
                    found.append((f"{prefix}{entry.name}".split("/"), entry.stat().st_size))
    return folders, {"/".join(parts): size for parts, size in sorted(found)}


def delete_replaced(save_dir: Path, tag: str) -> None:
    """Delete the old checkpoint of a tag after the commit of the new one, which gets the files of others."""
    for path, of_tag in _replaced_in(save_dir):
        if of_tag == tag:
            _discard(path, save_dir / tag)


def _discard(replaced: Path, final: Path) -> None:
    """Delete a ``.replaced`` checkpoint under another name, so that `recover` never renames it back half deleted."""
    try:
        hidden = hide(replaced, final.name, REMOVED)
    except OSError as error:
        logger.warning("cannot delete %s: %s. The next save tries again.", replaced, error)
    else:
        delete(hidden, final)


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
    except (CheckpointError, OSError):  # it does not exist, or is unusable
        return
    # Blocks with other ends, as earlier versions wrote them, tell nothing; a file begins with the block of its header.
    if any(after.get(place) != digest for place, digest in before.items() if place in after or place[1] == 0):
        message = (
            "%s is replaced by a checkpoint of the same step %d with other weights: only steps of "
            "strategy.optimizer_step are counted"
        )
        logger.warning(message, final, step)


def _weight_blocks(paths: CheckpointPaths) -> dict[tuple[Any, ...], str]:
    """Return the digests of weights in rank 0's checksum manifest, by file, begin and end of their blocks."""
    file = paths.rank_file(CHECKSUMS, 0)
    sizes_of_files = {paths.name_of(path): path.stat().st_size for path in paths.root.rglob("*")}
    blocks = parse_checksums(read_small_file(file, CHECKSUMS_BYTES), file, sizes_of_files)["blocks"]
    parts = [paths, *(paths.of_model(folder.name) for folder in model_folders(paths.root))]
    folders = {paths.name_of(f) for of in parts for f in (of.model, of.state / WRAPPER, of.state / TRAINABLE)}
    return {
        (name, begin, end, *strided): digest
        for name, of_file in blocks.items()
        if Path(name).suffix == ".safetensors" and Path(name).parent.as_posix() in folders
        for begin, end, digest, *strided in of_file
    }


def update_latest(newest: CheckpointPaths) -> bool:
    """Point the file ``latest``, or in LeRobot's layout the link ``last``, to a checkpoint, by an atomic rename.

    The other layout's name is deleted, because it names an older checkpoint. A failure is only logged, and returned as
    False: the checkpoint is committed, and a load does not need the name.
    """
    save_dir, tag = newest.root.parent, newest.root.name
    name, other = (LAST, LATEST) if newest.is_lerobot else (LATEST, LAST)
    temporary = save_dir / f".{name}.new"
    try:
        temporary.unlink(missing_ok=True)
        if newest.is_lerobot:
            temporary.symlink_to(tag)
        else:
            write_new(temporary, f"{tag}\n".encode())
        temporary.replace(save_dir / name)
        if _is_our_name(save_dir / other):
            (save_dir / other).unlink()
        fsync(save_dir)
    except OSError as error:
        logger.warning("%s is saved, but %s cannot be updated: %s", newest.root, save_dir / name, error)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        return False
    return True


def _is_our_name(path: Path) -> bool:
    """Return whether a path is a file ``latest`` or a link ``last`` as we write them, and not somebody else's link."""
    if path.name == LAST:
        return is_last(path) and path.readlink().parts == (path.readlink().name,)
    return path.is_file() and not path.is_symlink()


def removed_path(path: Path) -> Path:
    """Return the first of the names under which a checkpoint's directory is deleted."""
    return path.with_name(f".{path.name}{REMOVED}")


def remove(checkpoints: Sequence[Path], leftovers: Sequence[Path] = ()) -> list[Path]:
    """Rename checkpoints to ``.removed``, and return those; then delete them and ``leftovers`` in a background thread.

    The rename ensures that no incomplete checkpoint is listed. A failure is only logged: the next save tries again.
    """
    renamed: dict[Path, Path] = {}
    for path in checkpoints:
        try:
            renamed[path] = hide(path, tag_of(path), REMOVED)
        except OSError as error:
            logger.warning("cannot delete %s: %s. The next save tries again.", path, error)
    to_delete = [*leftovers, *renamed.values()]
    if to_delete:
        thread = Thread(target=_delete_all, args=(to_delete,), name="remove checkpoints")
        _removals.append(thread)
        thread.start()
    return list(renamed)


_removals: list[Thread] = []


def _delete_all(paths: Sequence[Path]) -> None:
    for path in paths:
        if _is_own(path):
            delete(path, path.with_name(tag_of(path)))


def finish_removals() -> None:
    """Wait for the threads that delete checkpoints."""
    while _removals:
        _removals.pop().join()
