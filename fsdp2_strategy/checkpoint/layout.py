"""List the checkpoints of a directory, read their manifests, and say why a checkpoint is missing or unusable.

    <save_dir>/
      global_step100/            committed: final name and a valid manifest
        model/                   a Hugging Face folder, or plain safetensors
        wrapper/                 other tensors of a wrapper around that model, and adapters
        trainable/               instead of these two: what ``only_trainable`` saves, plain safetensors
        optimizer/               the optimizer's state, safetensors
        ema/                     averages of the parameters, if any
        trainer_state.json       step, schedule, hyper-parameters, client state
        meta.json                values for other programs, if the trainer passes any
        rng/                     states of the random generators, one file per rank
        data/                    states of a data loader if they differ between ranks, one file per rank
        checksums/               one checksum manifest per rank, with the blocks that it wrote
        manifest.json            sequence number, size of every file, digests of the checksum manifests; written last
      global_step105/            a checkpoint of several models
        actor/                   model/, wrapper/, trainable/, optimizer/, ema/ and trainer_state.json of one model
        critic/                  the same of another one
        trainer_state.json       client state and data position of the run
        manifest.json ...        meta.json, rng/, data/ and checksums/ as above
      005000/                    the same in LeRobot's layout: see `paths`
      latest                     name of the newest checkpoint, for people and scripts; a load ignores it
      last                       in LeRobot's layout, instead of ``latest``: a link to the newest checkpoint
      .lock                      locked by the run that saves here
      .global_step110.partial/   a save in flight, or the files of a save that crashed
      .global_step100.replaced/  the old checkpoint of a tag that is being saved again
      .global_step90.removed/    a checkpoint that rotation is deleting

Input: a directory. Output: its committed checkpoints and their manifests. `directory` writes and deletes them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from fsdp2_strategy.checkpoint.paths import (
    CHECKSUMS,
    MANIFEST,
    RNG,
    TRAINER_STATE,
    TRAINING_STATE,
    CheckpointPaths,
    as_path,
    has_only_checkpoint_entries,
)
from fsdp2_strategy.checkpoint.signature import check_signature, read_key
from fsdp2_strategy.errors import CheckpointError, DamageError
from fsdp2_strategy.hf.checksums import digest_of

LATEST = "latest"
LAST = "last"

FORMAT = "fsdp2_strategy"
FORMAT_VERSION = 2
FORMAT_VERSION_OF_SEVERAL = 3
"""Of checkpoints of several models: a reader that knows only one model names the version, and not a missing folder."""

_TYPICAL = (TRAINER_STATE, CHECKSUMS, RNG, f"{TRAINING_STATE}/{TRAINER_STATE}", f"{TRAINING_STATE}/{CHECKSUMS}")
"""Entries that a directory of another kind hardly has."""

_KEYS = {"sequence", "tag", "step", "protected", "metric", "higher_is_better", "files", "checksums"}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint on disk."""

    path: Path
    tag: str
    sequence: int
    """Position in the order of commits."""
    step: int
    total_bytes: int
    protected: bool = False
    """Whether it is excluded from rotation."""
    metric: float | None = None
    """Quality of the checkpoint; rotation never deletes the best checkpoint."""
    higher_is_better: bool = True
    models: tuple[str, ...] = ()
    """Names of the models; empty for a checkpoint of one model."""


def list_checkpoints(save_dir: str | Path, *, key_file: str | Path | None = None) -> list[Checkpoint]:
    """Return the committed checkpoints in a directory, oldest first; not collective.

    A checkpoint is committed if it has its final name and a valid manifest, and all files exist with the sizes in the
    manifest. Other directories are ignored. The list is empty if the directory is missing.

    Args:
        save_dir: the directory.
        key_file: list only checkpoints whose manifests this key signed; see `read_key`.

    Raises:
        CheckpointError: ``save_dir`` is not a path, or the key file cannot be used.
    """
    key = read_key(key_file) if key_file is not None else None
    return [
        checkpoint
        for checkpoint in checkpoints_with_manifest(as_path(save_dir, "list checkpoints"))
        if not problem_of(checkpoint.path, key)
    ]


def checkpoints_with_manifest(save_dir: Path) -> list[Checkpoint]:
    """Return all checkpoints with a valid manifest, including those with missing or truncated files, oldest first."""
    if not save_dir.is_dir():
        return []
    paths = [path for path in save_dir.iterdir() if not path.name.startswith(".") and not is_last(path)]
    return sorted((c for path in paths if (c := read_checkpoint(path))), key=lambda c: c.sequence)


def without_manifest(save_dir: Path) -> list[Path]:
    """Return the directories that have the files of a checkpoint but no valid manifest, sorted by name."""
    if not save_dir.is_dir():
        return []
    paths = (path for path in save_dir.iterdir() if not path.name.startswith(".") and not is_last(path))
    return sorted(path for path in paths if is_checkpoint(path) and read_checkpoint(path) is None)


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory is a checkpoint of this package, usable or not.

    It is one if it has a manifest, or if all its entries are those of a checkpoint and some occur nowhere else.
    """
    if CheckpointPaths.found_in(path).manifest.exists():
        return True
    return any((path / entry).exists() for entry in _TYPICAL) and has_only_checkpoint_entries(path)


def problem_of(path: Path, key: bytes | None = None) -> str:
    """Return why a checkpoint is unusable, or "" if it is usable, without reading the content of its files.

    A checkpoint is unusable if its manifest is invalid, if files are missing or have another length, or if there is a
    key that did not sign its manifest.
    """
    try:
        manifest = read_manifest(path)
        if key is not None:
            check_signature(path, manifest, key)
        for name, size in manifest["files"].items():
            actual = (path / name).stat().st_size
            if actual != size:
                return f"{name} is {actual} bytes long, expected {size}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(path)} is missing"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except DamageError as error:
        return str(error).removeprefix(f"cannot read {path}/").removesuffix(". Load another checkpoint.")
    except (TypeError, AttributeError) as error:
        return f"{MANIFEST} is invalid ({error!r})"
    return ""


def describe_missing(path: Path) -> str:
    """Describe a path that has no checkpoint: what it is, what it contains, and where there are checkpoints nearby."""
    if not path.exists():
        text = f"{path} does not exist."
    elif not path.is_dir():
        text = f"{path} is a file, expected a directory."
    else:
        names = sorted(entry.name for entry in path.iterdir())
        content = f"it contains {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else "it is empty"
        text = f"{path} has no checkpoint of this package: {content}."
    nearby = checkpoints_nearby(path)
    return f"{text} There are checkpoints in {' and in '.join(map(str, nearby[:3]))}." if nearby else text


def checkpoints_nearby(path: Path) -> list[Path]:
    """Return the directories one level above or below ``path`` that contain checkpoints, and a checkpoint around it."""
    path = path.absolute()
    if is_checkpoint(path.parent):
        return [path.parent]
    below = sorted(each for each in path.iterdir() if each.is_dir()) if path.is_dir() else []
    nearby = []
    for each in [*below, path.parent]:
        with contextlib.suppress(OSError):  # a directory of another user, such as lost+found
            nearby += [each] if checkpoints_with_manifest(each) else []
    return nearby


def is_last(path: Path) -> bool:
    """Return whether a path is the link ``last``."""
    return path.name == LAST and path.is_symlink()


def latest_tag(save_dir: Path) -> str | None:
    """Return the tag that ``last`` or ``latest`` names; None if neither exists."""
    try:
        if is_last(save_dir / LAST):
            return (save_dir / LAST).readlink().name
        return (save_dir / LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Return the checkpoint at ``path``, or None if it has no valid manifest."""
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
        models=models_in(manifest),
    )


def models_in(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the models of a checkpoint, sorted; empty if it has one model."""
    return tuple(sorted(manifest.get("models", {})))


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint at ``path``, and check its digest, format and keys.

    Raises:
        DamageError: the manifest is missing or corrupt, or has another format.
    """
    file = CheckpointPaths.found_in(path).manifest
    try:
        manifest = json.loads(file.read_bytes())
    except OSError as error:
        raise _manifest_error(file, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _manifest_error(file, f"it is not JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _manifest_error(file, f"it is not a manifest of {FORMAT}")
    version = manifest.get("format_version")
    if version not in (FORMAT_VERSION, FORMAT_VERSION_OF_SEVERAL):
        expected = f"{FORMAT_VERSION} or {FORMAT_VERSION_OF_SEVERAL}"
        raise _manifest_error(file, f"its format is version {version!r}, expected {expected}")
    if manifest.get("digest") != digest_of_manifest(manifest):
        raise _manifest_error(file, "its digest does not match its content")
    if missing := _KEYS - manifest.keys():
        raise _manifest_error(file, f"it lacks the key {min(missing)}")
    if (version == FORMAT_VERSION_OF_SEVERAL) != isinstance(manifest.get("models"), dict):
        raise _manifest_error(file, f"its format is version {version!r}, and its models are {manifest.get('models')!r}")
    return manifest


def _manifest_error(file: Path, problem: str) -> DamageError:
    return DamageError(f"cannot read {file}: {problem}. Load another checkpoint.")


def digest_of_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest without its entry ``digest``."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return digest_of(json.dumps(content, sort_keys=True).encode())


def check_tag(tag: str, *, reserved: str) -> None:
    """Check that ``tag`` can name a checkpoint.

    Args:
        tag: the name.
        reserved: ``last`` in LeRobot's layout, else ``latest``. ``latest`` is always reserved.

    Raises:
        CheckpointError: the tag is empty, reserved, a path, or begins with a dot.
    """
    if not isinstance(tag, str):
        raise CheckpointError(
            f"cannot name a checkpoint: tag is {shorten(repr(tag), 60)}, expected a str. Pass others by keyword."
        )
    if not tag or tag != Path(tag).name or tag.startswith(".") or tag in (LATEST, reserved):
        raise CheckpointError(
            f"cannot name a checkpoint: tag is {tag!r}, expected a plain directory name other than {reserved!r} that "
            "does not begin with a dot. Use something like 'global_step100'."
        )
