"""What a save does in the directory of all checkpoints: begin, commit, sweep what crashes left, remove.

Input: files that ranks wrote into a ``.partial`` directory. Output: a committed checkpoint, the others as they were.

[Note: commit] A save writes into ``.partial``, forces every file to disk, then the manifest, then the directories, and
only then renames. A checkpoint is therefore whole or absent whenever the machine stops. Where the tag exists, the old
directory steps aside first and comes back if the new one never arrives. Order is the manifest's sequence number.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from fsdp2_strategy import sizes
from fsdp2_strategy.checkpoint.layout import (
    FORMAT,
    FORMAT_VERSION,
    LAST,
    LATEST,
    Checkpoint,
    digest_of_manifest,
    is_last,
    with_manifest,
)
from fsdp2_strategy.checkpoint.paths import CHECKSUMS, PRETRAINED_MODEL, Places, holds_parts_alone
from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.checksums import ALGORITHM, Block, digest_of
from fsdp2_strategy.hf.json_files import _fsync, write_bytes, write_json

_PARTIAL = ".partial"
_REPLACED = ".replaced"
_REMOVED = ".removed"


def partial_path(save_dir: Path, tag: str) -> Path:
    """Return where a save of ``tag`` is written before it is committed."""
    return save_dir / f".{tag}{_PARTIAL}"


def check_replaceable(save_dir: Path, tag: str, partial: Places) -> None:
    """Raise where ``tag``, or the link to it, would take the place of what this package did not make; rank 0 calls it.

    Raises:
        CheckpointError: it exists, and is no checkpoint of ours, or no link.
    """
    path = save_dir / tag
    if is_last(path) or (path.exists() and not holds_parts_alone(path)):
        raise CheckpointError(
            f"cannot save: {path} exists and is no checkpoint of ours, expected a free name or a checkpoint to "
            "replace. Choose another tag."
        )
    path = save_dir / LAST
    if partial.is_lerobot and path.exists() and not is_last(path):
        raise CheckpointError(
            f"cannot save: {path} exists and is no link, expected a free name for the link to the newest checkpoint. "
            "Rename it."
        )


def make_directory(path: Path) -> None:
    """Make a directory with its parents, so that it outlives a power loss as the checkpoints in it do."""
    if not path.is_dir():
        make_directory(path.absolute().parent)
        path.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # one may make directories where one may not look
            _fsync(path.absolute().parent)


def recover(save_dir: Path) -> None:
    """Put back checkpoints that stepped aside for one that never arrived; rank 0 calls it, with no save in flight."""
    for aside in _left_behind(save_dir, _REPLACED):
        final = save_dir / aside.name[1 : -len(_REPLACED)]
        if not final.exists():
            aside.rename(final)


def sweep(save_dir: Path) -> None:
    """Recover, and remove what a crash left half-done; rank 0 calls it, with no save in flight."""
    recover(save_dir)
    for suffix in (_REPLACED, _PARTIAL, _REMOVED):
        for path in _left_behind(save_dir, suffix):
            delete(path)


def _left_behind(save_dir: Path, suffix: str) -> list[Path]:
    return [path for path in save_dir.glob(f".*{suffix}") if holds_parts_alone(path)]


def write_checksums(partial: Places, rank: int, blocks: Mapping[Path, Sequence[Block]]) -> str:
    """Write one rank's list of what it wrote under ``.partial``, and force it to disk.

    Returns:
        The list's digest.
    """
    content = {
        "algorithm": ALGORITHM,
        "block_bytes": sizes.BLOCK_BYTES,
        "blocks": {
            partial.name_of(path): [[b.begin, b.end, b.digest] for b in sorted(of_file)]
            for path, of_file in sorted(blocks.items())
        },
    }
    written = (json.dumps(content, separators=(",", ":")) + "\n").encode()
    write_bytes(partial.of_rank(CHECKSUMS, rank), written)
    return digest_of(written)


def not_of_ranks(partial: Places) -> list[Path]:
    """Return the files under ``.partial`` but those that each rank has of its own."""
    top = {*partial.root.iterdir(), *partial.state.iterdir()} - {partial.state, *partial.of_ranks}
    return [path for entry in top for path in [entry, *entry.rglob("*")] if path.is_file()]


def commit(partial: Places, tag: str, facts: Mapping[str, Any], digests: Sequence[str]) -> None:
    """Turn the files under ``.partial`` into a checkpoint; rank 0 calls it once all ranks have written.

    See [Note: commit].

    Args:
        partial: what was written.
        tag: name of the checkpoint.
        facts: what else the manifest says.
        digests: of the ranks' lists of checksums.
    """
    save_dir, final = partial.root.parent, partial.root.with_name(tag)
    for path in not_of_ranks(partial):  # those their writers force to disk
        _fsync(path)
    files = sorted(path for path in partial.root.rglob("*") if path.is_file())
    lists = [partial.of_rank(CHECKSUMS, rank) for rank in range(len(digests))]
    if unseen := {*lists} - {*files}:
        raise CheckpointError(
            f"cannot commit {final}: rank 0 does not see {partial.name_of(min(unseen))} and {len(unseen) - 1} others, "
            "which their ranks wrote, expected one directory for all. Save into a file system that all hosts share."
        )
    sequence = max((c.sequence for c in with_manifest(save_dir)), default=0) + 1
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "sequence": sequence,
        "tag": tag,
        **facts,
        "files": {partial.name_of(path): path.stat().st_size for path in files},
        "checksums": {partial.name_of(path): digest for path, digest in zip(lists, digests, strict=True)},
    }
    write_json(partial.manifest, manifest | {"digest": digest_of_manifest(manifest)})
    for directory in [*(path for path in partial.root.rglob("*") if path.is_dir()), partial.root]:
        _fsync(directory)
    aside = save_dir / f".{tag}{_REPLACED}"
    if final.exists():
        final.rename(aside)
    partial.root.rename(final)
    _fsync(save_dir)
    if aside.exists():
        delete(aside)


def point_latest(newest: Places) -> None:
    """Let ``latest`` name a checkpoint, replacing the file in one step; or ``last``, where it is in LeRobot's layout.

    The other one, which would go on naming an older checkpoint, goes.
    """
    save_dir, tag = newest.root.parent, newest.root.name
    name, other = (LAST, LATEST) if newest.is_lerobot else (LATEST, LAST)
    temporary = save_dir / f".{name}.new"
    if newest.is_lerobot:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(tag)
    else:
        temporary.write_text(tag + "\n", encoding="utf-8")
        _fsync(temporary)
    temporary.replace(save_dir / name)
    if is_last(save_dir / other) or (other == LATEST and (save_dir / other).is_file()):
        (save_dir / other).unlink()
    _fsync(save_dir)


def remove(checkpoints: Sequence[Checkpoint]) -> None:
    """Delete checkpoints: renamed at once, so that nothing looks whole, and removed on a thread of their own."""
    aside = []
    for checkpoint in checkpoints:
        aside.append(checkpoint.path.with_name(f".{checkpoint.tag}{_REMOVED}"))
        checkpoint.path.rename(aside[-1])
    if aside:
        thread = Thread(target=_remove, args=(aside,), name="remove checkpoints")
        _removals.append(thread)
        thread.start()


_removals: list[Thread] = []


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            delete(path)
        except OSError as error:
            logger.warning("cannot remove %s: %s; the next save tries again", path, error)


def delete(path: Path) -> None:
    """Delete a checkpoint's directory, what others would open first: half of it is still known to be ours."""
    if (path / PRETRAINED_MODEL).is_dir():
        shutil.rmtree(path / PRETRAINED_MODEL)
    shutil.rmtree(path)


def finish_removals() -> None:
    """Wait until checkpoints that were deleted are gone."""
    while _removals:
        _removals.pop().join()
