"""What a checkpoint directory looks like, and when it counts.

    <save_dir>/
      global_step100/            committed: final name and a valid manifest
        model/  optimizer/       tensors
        trainer_state.json       step, schedule, hyper-parameters, client state
        rng/                     generator states, one file a rank
        manifest.json            sequence number and every file with its bytes; written last
      latest                     names the newest committed checkpoint: a hint for people and scripts
      .global_step110.partial/   a save in flight, or what a crash left of one
      .global_step100.replaced/  the old checkpoint of a tag that is being saved again
      .global_step90.removed/    a checkpoint that rotation is deleting

[Note: commit] A save writes into ``.partial``, forces every file to disk, then the manifest, then the directories, and
only then renames. A checkpoint is therefore whole or absent whenever the machine stops. Where the tag exists, the old
directory steps aside first and comes back if the new one never arrives. Order is the manifest's sequence number.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2_strategy.errors import CheckpointError

MODEL = "model"
OPTIMIZER = "optimizer"
RNG = "rng"
TRAINER_STATE = "trainer_state.json"
MANIFEST = "manifest.json"
LATEST = "latest"

_PARTS = {MODEL, OPTIMIZER, RNG, TRAINER_STATE, MANIFEST}

FORMAT = "fsdp2_strategy"
FORMAT_VERSION = 1

_PARTIAL = ".partial"
_REPLACED = ".replaced"
_REMOVED = ".removed"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Name a committed checkpoint on disk."""

    path: Path
    tag: str
    sequence: int
    """Position in the order of commits."""
    step: int
    total_bytes: int


def list_checkpoints(save_dir: str | Path) -> list[Checkpoint]:
    """Return the committed checkpoints in a directory, oldest first; not collective.

    Committed means: final name, and a manifest whose files are all there with their sizes. Directories that this
    package did not make are never listed; a missing directory has none.
    """
    save_dir = Path(save_dir)
    if not save_dir.is_dir():
        return []
    found = [read_checkpoint(path) for path in save_dir.iterdir() if not path.name.startswith(".")]
    return sorted((c for c in found if c), key=lambda c: c.sequence)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Return the committed checkpoint at ``path``, or None where there is none."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or manifest["format_version"] != FORMAT_VERSION:
            return None
        if any((path / name).stat().st_size != size for name, size in manifest["files"].items()):
            return None
        return Checkpoint(
            path=path,
            tag=path.name,
            sequence=int(manifest["sequence"]),
            step=int(manifest["step"]),
            total_bytes=sum(manifest["files"].values()),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def check_tag(tag: str) -> str:
    """Return ``tag`` where it can name a checkpoint.

    Raises:
        CheckpointError: it is empty, hidden, reserved or a path.
    """
    if not isinstance(tag, str) or not tag or tag != Path(tag).name or tag.startswith(".") or tag == LATEST:
        raise CheckpointError(
            f"cannot name a checkpoint: tag is {tag!r}, expected a plain directory name other than {LATEST!r} that "
            "does not begin with a dot. Use something like 'global_step100'."
        )
    return tag


def check_replaceable(save_dir: Path, tag: str) -> None:
    """Raise where ``tag`` names something that this package did not make; rank 0 calls it.

    Raises:
        CheckpointError: it exists and holds no manifest of ours.
    """
    path = save_dir / tag
    if path.exists() and not _is_ours(path):
        raise CheckpointError(
            f"cannot save: {path} exists and is no checkpoint of ours, expected a free name or a checkpoint to "
            "replace. Choose another tag."
        )


def partial_path(save_dir: Path, tag: str) -> Path:
    """Return where a save of ``tag`` is written before it is committed."""
    return save_dir / f".{tag}{_PARTIAL}"


def recover(save_dir: Path) -> None:
    """Put back checkpoints that stepped aside for one that never arrived; rank 0 calls it, with no save in flight."""
    for aside in filter(_is_ours, save_dir.glob(f".*{_REPLACED}")):
        final = save_dir / aside.name[1 : -len(_REPLACED)]
        if not final.exists():
            aside.rename(final)


def sweep(save_dir: Path) -> None:
    """Recover, and remove what a crash left half-done; rank 0 calls it, with no save in flight."""
    recover(save_dir)
    for suffix in (_REPLACED, _PARTIAL, _REMOVED):
        for path in filter(_is_ours, save_dir.glob(f".*{suffix}")):
            shutil.rmtree(path)


def commit(save_dir: Path, tag: str, *, step: int) -> Checkpoint:
    """Turn the files under ``.partial`` into a checkpoint; rank 0 calls it once all ranks have written.

    See [Note: commit].
    """
    partial, final = partial_path(save_dir, tag), save_dir / tag
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    for path in files:
        _fsync(path)
    sequence = max((c.sequence for c in list_checkpoints(save_dir)), default=0) + 1
    sizes = {path.relative_to(partial).as_posix(): path.stat().st_size for path in files}
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "sequence": sequence,
        "tag": tag,
        "step": step,
        "files": sizes,
    }
    write_json(partial / MANIFEST, manifest)
    for directory in [*(path for path in partial.rglob("*") if path.is_dir()), partial]:
        _fsync(directory)
    aside = save_dir / f".{tag}{_REPLACED}"
    if final.exists():
        final.rename(aside)
    partial.rename(final)
    _fsync(save_dir)
    if aside.exists():
        shutil.rmtree(aside)
    return Checkpoint(path=final, tag=tag, sequence=sequence, step=step, total_bytes=sum(sizes.values()))


def point_latest(save_dir: Path, tag: str) -> None:
    """Let ``latest`` name a checkpoint, replacing the file in one step."""
    temporary = save_dir / f".{LATEST}.new"
    temporary.write_text(tag + "\n", encoding="utf-8")
    _fsync(temporary)
    temporary.replace(save_dir / LATEST)
    _fsync(save_dir)


def named_latest(save_dir: Path) -> str | None:
    """Return what ``latest`` names, None where there is none."""
    try:
        return (save_dir / LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def remove(checkpoint: Checkpoint) -> None:
    """Delete a checkpoint: renamed first, so that a crash leaves nothing that looks whole."""
    aside = checkpoint.path.with_name(f".{checkpoint.tag}{_REMOVED}")
    checkpoint.path.rename(aside)
    shutil.rmtree(aside)


def write_json(path: Path, content: Any) -> None:
    """Write strict JSON and force it to disk."""
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    _fsync(path)


def _is_ours(path: Path) -> bool:
    """Say whether a directory holds nothing but what a checkpoint is made of: whole, half-written or half-removed."""
    return path.is_dir() and {entry.name for entry in path.iterdir()} <= _PARTS


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
