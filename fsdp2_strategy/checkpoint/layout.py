"""What a checkpoint directory looks like, and when it counts.

    <save_dir>/
      global_step100/            committed: final name and a valid manifest
        model/                   a Hugging Face folder, or plain safetensors
        wrapper/                 what a wrapper around that model has beside it, and adapters
        trainable/               instead of both: the trainable weights alone, plain safetensors
        optimizer/               the optimizer's state, in the same container
        ema/                     averages of the parameters, where there are any
        trainer_state.json       step, schedule, hyper-parameters, client state
        meta.json                a few facts under the trainer's own names, where it gives any
        rng/                     generator states, one file a rank
        checksums/               one list a rank of what it wrote, block by block
        manifest.json            sequence number, every file with its bytes, digests of the lists; written last
      latest                     names the newest committed checkpoint: a hint for people and scripts
      .lock                      held by the run that saves here
      .global_step110.partial/   a save in flight, or what a crash left of one
      .global_step100.replaced/  the old checkpoint of a tag that is being saved again
      .global_step90.removed/    a checkpoint that rotation is deleting

[Note: commit] A save writes into ``.partial``, forces every file to disk, then the manifest, then the directories, and
only then renames. A checkpoint is therefore whole or absent whenever the machine stops. Where the tag exists, the old
directory steps aside first and comes back if the new one never arrives. Order is the manifest's sequence number.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from fsdp2_strategy.errors import CheckpointError, DamageError
from fsdp2_strategy.hf.checksum import ALGORITHM, Block, digest_of
from fsdp2_strategy.ranks import logger

MODEL = "model"
WRAPPER = "wrapper"
TRAINABLE = "trainable"
OPTIMIZER = "optimizer"
EMA = "ema"
RNG = "rng"
DATA = "data"
CHECKSUMS = "checksums"
TRAINER_STATE = "trainer_state.json"
META = "meta.json"
MANIFEST = "manifest.json"
LATEST = "latest"

OF_RANKS = {RNG, DATA, CHECKSUMS}
"""Folders that every rank writes a file of its own into."""
_PARTS = {MODEL, WRAPPER, TRAINABLE, OPTIMIZER, EMA, RNG, DATA, CHECKSUMS, TRAINER_STATE, META, MANIFEST}

FORMAT = "fsdp2_strategy"
FORMAT_VERSION = 2

_KEYS = {"sequence", "tag", "step", "protected", "metric", "higher_is_better", "files", "checksums"}

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
    protected: bool = False
    """Whether rotation leaves it alone."""
    metric: float | None = None
    """What it was measured at, the best of which rotation leaves alone."""
    higher_is_better: bool = True


def list_checkpoints(save_dir: str | Path) -> list[Checkpoint]:
    """Return the committed checkpoints in a directory, oldest first; not collective.

    Committed means: final name, and a manifest whose files are all there with their sizes. Directories that this
    package did not make are never listed; a missing directory has none.
    """
    return [checkpoint for checkpoint in with_manifest(Path(save_dir)) if _has_its_files(checkpoint.path)]


def with_manifest(save_dir: Path) -> list[Checkpoint]:
    """Return the checkpoints in a directory that were committed, also those that lost files since; oldest first."""
    if not save_dir.is_dir():
        return []
    found = [read_checkpoint(path) for path in save_dir.iterdir() if not path.name.startswith(".")]
    return sorted((c for c in found if c), key=lambda c: c.sequence)


def _has_its_files(path: Path) -> bool:
    try:
        return all((path / name).stat().st_size == size for name, size in read_manifest(path)["files"].items())
    except (OSError, DamageError, TypeError, AttributeError):
        return False


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Return what the manifest at ``path`` says, or None where there is none, or none of ours."""
    try:
        manifest = read_manifest(path)
    except DamageError:
        return None
    return Checkpoint(
        path=path,
        tag=path.name,
        sequence=manifest["sequence"],
        step=manifest["step"],
        total_bytes=sum(manifest["files"].values()) if isinstance(manifest["files"], dict) else 0,
        protected=manifest["protected"],
        metric=manifest["metric"],
        higher_is_better=manifest["higher_is_better"],
    )


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint at ``path``, whole and of our format.

    Raises:
        DamageError: it is missing, damaged, or of another format.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except OSError as error:
        raise _bad_manifest(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _bad_manifest(path, f"it is no JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _bad_manifest(path, "it is not ours")
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise _bad_manifest(path, f"its format is version {version!r}, expected {FORMAT_VERSION}")
    if manifest.get("digest") != _digest(manifest):
        raise _bad_manifest(path, "its digest is not that of its content")
    if missing := _KEYS - manifest.keys():
        raise _bad_manifest(path, f"it lacks {sorted(missing)[0]}")
    return manifest


def _bad_manifest(path: Path, what: str) -> DamageError:
    return DamageError(f"cannot read {path / MANIFEST}: {what}. Load another checkpoint.")


def _digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest, of all but its own entry."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return digest_of(json.dumps(content, sort_keys=True).encode())


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


def make_directory(path: Path) -> None:
    """Make a directory with its parents, so that it outlives a power loss as the checkpoints in it do."""
    if not path.is_dir():
        make_directory(path.absolute().parent)
        path.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # one may make directories where one may not look
            _fsync(path.absolute().parent)


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


def write_checksums(partial: Path, rank: int, blocks: Mapping[Path, Sequence[Block]]) -> str:
    """Write one rank's list of what it wrote under ``.partial``, and force it to disk.

    Returns:
        The list's digest.
    """
    content = {
        "algorithm": ALGORITHM,
        "blocks": {
            path.relative_to(partial).as_posix(): [[b.begin, b.end, b.digest] for b in sorted(of_file)]
            for path, of_file in sorted(blocks.items())
        },
    }
    written = (json.dumps(content, separators=(",", ":")) + "\n").encode()
    write_bytes(partial / list_of(rank), written)
    return digest_of(written)


def not_of_ranks(partial: Path) -> list[Path]:
    """Return the files under ``.partial`` but those that each rank has of its own."""
    top = [path for path in partial.iterdir() if path.name not in OF_RANKS]
    return [path for root in top for path in [root, *root.rglob("*")] if path.is_file()]


def list_of(rank: int) -> str:
    """Return where the list of what a rank wrote lies."""
    return f"{CHECKSUMS}/rank{rank:05d}.json"


def commit(save_dir: Path, tag: str, facts: Mapping[str, Any], digests: Sequence[str]) -> None:
    """Turn the files under ``.partial`` into a checkpoint; rank 0 calls it once all ranks have written.

    See [Note: commit].

    Args:
        save_dir: directory of all checkpoints.
        tag: name of this one.
        facts: what else the manifest says.
        digests: of the ranks' lists of checksums.
    """
    partial, final = partial_path(save_dir, tag), save_dir / tag
    for path in not_of_ranks(partial):  # those their writers force to disk
        _fsync(path)
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    if unseen := {list_of(rank) for rank in range(len(digests))} - {p.relative_to(partial).as_posix() for p in files}:
        raise CheckpointError(
            f"cannot commit {final}: rank 0 does not see {min(unseen)} and {len(unseen) - 1} others, which their ranks "
            "wrote, expected one directory for all. Save into a file system that all hosts share."
        )
    sequence = max((c.sequence for c in with_manifest(save_dir)), default=0) + 1
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "sequence": sequence,
        "tag": tag,
        **facts,
        "files": {path.relative_to(partial).as_posix(): path.stat().st_size for path in files},
        "checksums": {list_of(rank): digest for rank, digest in enumerate(digests)},
    }
    write_json(partial / MANIFEST, manifest | {"digest": _digest(manifest)})
    for directory in [*(path for path in partial.rglob("*") if path.is_dir()), partial]:
        _fsync(directory)
    aside = save_dir / f".{tag}{_REPLACED}"
    if final.exists():
        final.rename(aside)
    partial.rename(final)
    _fsync(save_dir)
    if aside.exists():
        shutil.rmtree(aside)


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
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("cannot remove %s: %s; the next save tries again", path, error)


def finish_removals() -> None:
    """Wait until checkpoints that were deleted are gone."""
    while _removals:
        _removals.pop().join()


def write_json(path: Path, content: Any) -> None:
    """Write strict JSON and force it to disk."""
    write_text(path, as_json(content))


def as_json(content: Any) -> str:
    """Return strict JSON."""
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a file and force it to disk."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and force it to disk."""
    path.write_bytes(content)
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
