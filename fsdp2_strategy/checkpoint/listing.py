"""List the checkpoints of a directory, read their manifests, and say why a checkpoint is missing or unusable.

Input: a directory. Output: its committed checkpoints and their manifests. `directory` writes and deletes them.
"What is in a checkpoint directory" in docs/checkpoints.md has the files, and `paths` their names.

[Note: links] A symbolic link in the directory is never one of its checkpoints: it is not listed, counted, renamed or
deleted, except for ``last``. A load may name a link; it then reads the checkpoint that the link leads to.

[Note: kept manifests] A save lists the checkpoints in its directory several times, and the next save again. So lists
keep the manifests that they have parsed, until the file has another inode, size or time. A load always reads the file.

[Note: neighbours] Other people's files and directories may be in the directory. Those that cannot be read are ignored.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from textwrap import shorten
from typing import Any

from fsdp2_strategy.checkpoint.file_schemas import MANIFEST as MANIFEST_SCHEMA
from fsdp2_strategy.checkpoint.file_schemas import MANIFEST_BYTES, read_small_file
from fsdp2_strategy.checkpoint.paths import (
    CHECKSUMS,
    MANIFEST,
    PRETRAINED_MODEL,
    RNG,
    ROTATED,
    TRAINER_STATE,
    TRAINING_STATE,
    CheckpointPaths,
    as_path,
    exists,
    has_only_checkpoint_entries,
    is_directory,
    names_in,
)
from fsdp2_strategy.checkpoint.signature import check_signature, read_key
from fsdp2_strategy.errors import CheckpointError, DamageError, shown
from fsdp2_strategy.storage.checksum_manifests import damage
from fsdp2_strategy.storage.checksums import digest_of
from fsdp2_strategy.storage.file_reads import read_file, size_of_file
from fsdp2_strategy.storage.schema import InvalidError, parse_json

_logger = logging.getLogger("fsdp2_strategy")  # not from `distributed.log`, which imports torch

LATEST = "latest"
LAST = "last"

PARTIAL = ".partial"
REPLACED = ".replaced"
REMOVED = ".removed"

_HIDDEN_NAME = re.compile(r"\.(?:\.[0-9]+\.)?(?P<tag>[^.].*)(?P<suffix>\.partial|\.replaced|\.removed)", re.DOTALL)
_SCANS = 3
"""How often a directory is listed if checkpoints vanish from it meanwhile."""
_MAX_LATEST_BYTES = 4096
_MOST_KEPT = 16
"""How many manifests are kept; see [Note: kept manifests]."""
_TICK_NS = 100_000_000
"""More than the time between two values of a file system's clock."""

FORMAT = "fsdp2_strategy"
FORMAT_VERSION = 2
FORMAT_VERSION_OF_SEVERAL = 3
"""Of checkpoints of several models: a reader that knows only one model names the version, and not a missing folder."""

_OF_RANK_0 = (f"{CHECKSUMS}/rank00000.json", f"{RNG}/rank00000.safetensors")
_TYPICAL = tuple(f"{state}{name}" for state in ("", f"{TRAINING_STATE}/") for name in (TRAINER_STATE, *_OF_RANK_0))
"""Files that a directory of another kind hardly has."""


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
    is_copy: bool = False
    """Whether somebody copied or renamed it: its directory has another name than the save gave it. Rotation neither
    counts nor deletes it."""


def list_checkpoints(save_dir: str | Path, *, key_file: str | Path | None = None) -> list[Checkpoint]:
    """Return the committed checkpoints in a directory, oldest first; not collective.

    A checkpoint is committed if it has its final name and a valid manifest, and all files exist with the sizes in the
    manifest. Other directories and links are ignored. The list is empty if the directory is missing.

    Args:
        save_dir: the directory.
        key_file: list only checkpoints whose manifests this key signed; see `read_key`.

    Raises:
        CheckpointError: ``save_dir`` is not a path, or cannot be read; or the key file cannot be used.
    """
    key = read_key(key_file) if key_file is not None else None
    return [
        checkpoint
        for checkpoint in checkpoints_with_manifest(as_path(save_dir, "list checkpoints"))
        if not problem_of(checkpoint.path, key)
    ]


def checkpoints_with_manifest(save_dir: Path) -> list[Checkpoint]:
    """Return all checkpoints with a valid manifest, including those with missing or truncated files, oldest first.

    The old checkpoint of a tag is listed under its hidden name as long as no directory has the tag: between the two
    renames of a save, or if a crash left it in a directory that this process cannot write to.
    """
    found: list[Checkpoint] = []
    for _ in range(_SCANS):
        folders = folders_in(save_dir)
        found = [checkpoint for path in folders if (checkpoint := read_checkpoint(path))]
        for path, tag in hidden_in(save_dir, REPLACED):
            if not exists(save_dir / tag, follow_symlinks=False) and (old := read_checkpoint(path)):
                found.append(replace(old, tag=tag, is_copy=False))
        if all(exists(path) for path in folders):
            break  # else a run has deleted or committed checkpoints meanwhile
    return sorted(found, key=lambda checkpoint: (checkpoint.sequence, not checkpoint.is_copy))


def folders_in(save_dir: Path) -> list[Path]:
    """Return the directories that may be checkpoints: those with a plain name, and no links. See [Note: links]."""
    paths = (path for path in _entries_of(save_dir) if not path.name.startswith("."))
    return [path for path in paths if is_directory(path, follow_symlinks=False)]


def hidden_in(save_dir: Path, suffix: str) -> list[tuple[Path, str]]:
    """Return the hidden directories with a suffix, such as `PARTIAL`, each with its tag; links are ignored."""
    found = []
    for path in _entries_of(save_dir):
        name = _HIDDEN_NAME.fullmatch(path.name)
        if name and name["suffix"] == suffix and is_directory(path, follow_symlinks=False):
            found.append((path, name["tag"]))
    return found


def tag_of(path: Path) -> str:
    """Return the tag of a checkpoint's directory, also of a hidden one."""
    name = _HIDDEN_NAME.fullmatch(path.name)
    return name["tag"] if name else path.name


def hidden_path(save_dir: Path, tag: str, suffix: str) -> Path:
    """Return a hidden name for a directory of a checkpoint that nothing has yet."""
    return numbered_path(save_dir, tag, suffix, free_number(save_dir, tag, suffix))


def free_number(save_dir: Path, tag: str, suffix: str) -> int:
    """Return the number of the first of the hidden names of a tag that nothing has yet."""
    number = 1
    while exists(numbered_path(save_dir, tag, suffix, number), follow_symlinks=False):
        number += 1
    return number


def numbered_path(save_dir: Path, tag: str, suffix: str, number: int) -> Path:
    """Return one of the hidden names of a tag, which are numbered from 1 on."""
    return save_dir / (f".{tag}{suffix}" if number == 1 else f"..{number}.{tag}{suffix}")


def _entries_of(save_dir: Path) -> list[Path]:
    """Return what is in a directory, sorted by name; nothing if there is no directory."""
    try:
        return sorted(save_dir.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot read {save_dir}: {error.strerror or error}, expected a directory of checkpoints. Check its "
            "permissions and its file system."
        ) from error


def without_manifest(save_dir: Path) -> list[Path]:
    """Return the directories that have the files of a checkpoint but no valid manifest, sorted by name.

    In the layouts of LeRobot and of transformers' ``Trainer``, these are also the checkpoints without
    ``training_state/``; and, in all layouts, a directory that ``latest`` or ``last`` names, if there are checkpoints.
    """
    valid = checkpoints_with_manifest(save_dir)
    of_valid = {checkpoint.path for checkpoint in valid}
    latest = latest_tag(save_dir)
    found = []
    for path in folders_in(save_dir):
        if path not in of_valid and exists(path) and not _is_rotated(path):
            lost_state = lacks_training_state(path) and (bool(valid) or path.name == latest)
            code = _unreadable(path)
            is_named = path.name == latest and (bool(valid) or code is not None)
            if is_checkpoint(path) or lost_state or is_named:
                found.append(path)
            elif code is not None:
                is_private = code in (errno.EACCES, errno.EPERM)  # lost+found, for example, and no broken disk
                level = logging.DEBUG if is_private else logging.WARNING
                _logger.log(level, "ignoring %s, which cannot be read: %s", path, os.strerror(code))
    return found


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory is a checkpoint of this package, usable or not.

    It is one if it has a valid manifest, or if it has entries that occur nowhere else, and either a manifest, too, or
    no other entries than those of a checkpoint.
    """
    if any(exists(path / entry) for entry in _TYPICAL):
        if exists(CheckpointPaths.found_in(path).manifest) or has_only_checkpoint_entries(path.resolve()):
            return True
        return any(exists(path / state / _OF_RANK_0[0]) for state in ("", TRAINING_STATE))
    return read_checkpoint(path) is not None


def lacks_training_state(path: Path) -> bool:
    """Return whether a directory looks like a checkpoint in LeRobot's or the Trainer's layout without its state."""
    if exists(path / TRAINING_STATE, follow_symlinks=False) or _is_rotated(path):
        return False
    if path.name.isdecimal():
        return is_directory(path / PRETRAINED_MODEL)
    if not re.fullmatch(r"checkpoint-[0-9]+", path.name):
        return False
    names = names_in(path)
    is_model = bool(names & {"config.json", "adapter_config.json", "model.safetensors"})
    return is_model and "training_args.bin" not in names  # checkpoints that Trainer itself wrote have this pickle


def step_in_name(path: Path) -> int:
    """Return the step that a directory is named after; -1 if its name has none."""
    digits = re.search(r"[0-9]+$", path.name)
    return int(digits[0]) if digits else -1


def is_own_directory(path: Path) -> bool:
    """Return whether this package made a directory, so that a save may replace it, and may delete its own files in it.

    It must not be a link, and be empty, have a valid manifest or the file `ROTATED`, or have only the entries of a
    checkpoint, some of which occur nowhere else.
    """
    if not is_directory(path, follow_symlinks=False):
        return False
    if _is_rotated(path) or read_checkpoint(path) is not None:
        return True
    if not has_only_checkpoint_entries(path):
        return False
    return not names_in(path) or any(exists(path / entry) for entry in _TYPICAL)


def _is_rotated(path: Path) -> bool:
    """Return whether a directory has only files of others, which were in a checkpoint that rotation deleted."""
    return exists(path / ROTATED, follow_symlinks=False) and not exists(CheckpointPaths.found_in(path).manifest)


def _unreadable(path: Path) -> int | None:
    """Return the error number if a directory cannot be read, else None."""
    try:
        with os.scandir(path):
            return None
    except OSError as error:
        return None if isinstance(error, FileNotFoundError) else error.errno


def extra_entries(path: Path, files: Iterable[str]) -> list[str]:
    """Return what is in a checkpoint besides ``files``: names of files, and of directories with a slash at the end."""
    own = {*files, CheckpointPaths.found_in(path).manifest.relative_to(path).as_posix()}
    folders = {parent.as_posix() for name in own for parent in PurePosixPath(name).parents}

    def walk(folder: Path, prefix: str) -> Iterable[str]:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                name = prefix + entry.name
                if name in folders and entry.is_dir(follow_symlinks=False):
                    yield from walk(folder / entry.name, f"{name}/")
                elif name not in own and name not in folders:
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if not is_folder or names_in(folder / entry.name):  # a save also makes folders without files
                        yield f"{name}/" if is_folder else name

    return list(walk(path, ""))


def problem_of(path: Path, key: bytes | None = None) -> str:
    """Return why a checkpoint is unusable, or "": by its manifest, its files' lengths, and the signature by ``key``."""
    try:
        manifest = _listed_manifest(path)
        if key is not None:
            check_signature(path, manifest, key)
        for name, size in manifest["files"].items():
            actual = size_of_file(path / name)
            if actual != size:
                return f"{name} is {actual} bytes long, expected {size}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(path)} is missing"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except DamageError as error:
        is_lost = lacks_training_state(path) and not exists(path / MANIFEST)
        text = f"{TRAINING_STATE}/ is missing" if is_lost else str(error)
        return text.removeprefix(f"cannot read {path}/").removesuffix(". Load another checkpoint.")
    return ""


def describe_missing(path: Path, writer: str = "of this package") -> str:
    """Describe a path that has no checkpoint: what it is, what it contains, and where ours are nearby."""
    if not exists(path, follow_symlinks=False):
        text = f"{path} does not exist."
    elif not exists(path):
        text = f"{path} is a symbolic link to something that is missing, or it cannot be read."
    elif not is_directory(path):
        text = f"{path} is a file, expected a directory."
    elif _unreadable(path) is not None:
        text = f"{path} cannot be read: {os.strerror(_unreadable(path) or 0)}."
    else:
        names = sorted(names_in(path))
        content = f"it contains {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else "it is empty"
        text = f"{path} has no checkpoint {writer}: {content}."
    nearby = checkpoints_nearby(path)
    own = "" if "this package" in writer else " of this package"
    return f"{text} There are checkpoints{own} in {' and in '.join(map(str, nearby[:3]))}." if nearby else text


def checkpoints_nearby(path: Path) -> list[Path]:
    """Return the directories one level above or below ``path`` that contain checkpoints, and a checkpoint around it."""
    path = path.absolute()
    if is_checkpoint(path.parent):
        return [path.parent]
    names = sorted(name for name in names_in(path) if not name.startswith("."))  # a killed save leaves hidden ones
    below = [each for name in names if is_directory(each := path / name)]
    nearby = []
    for each in [*below, path.parent]:
        with contextlib.suppress(CheckpointError):  # a directory of another user, such as lost+found
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
        content = read_file(save_dir / LATEST, _MAX_LATEST_BYTES)
    except OSError:
        return None
    return content.decode(errors="replace").strip() or None


def linked_tag(save_dir: Path, tag: str) -> str | None:
    """Return the name of the directory in ``save_dir`` that a link leads to, also while a save replaces it; or None."""
    try:
        target = (save_dir / tag).readlink()
    except (OSError, ValueError):
        return None
    target = Path(os.path.normpath(save_dir.absolute() / target))
    is_inside = target.parent in (save_dir.absolute(), save_dir.resolve())
    return target.name if is_inside else None


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Return the checkpoint at ``path``, or None if it has no valid manifest."""
    try:
        manifest = _listed_manifest(path)
    except DamageError:
        return None
    return Checkpoint(
        path=path,
        tag=path.name,
        is_copy=manifest["tag"] != path.name,
        sequence=manifest["sequence"],
        step=manifest["step"],
        total_bytes=sum(manifest["files"].values()),
        protected=bool(manifest["protected"]),
        metric=manifest["metric"],
        higher_is_better=bool(manifest["higher_is_better"]),
        models=models_in(manifest),
    )


def models_in(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the models of a checkpoint, sorted; empty if it has one model."""
    return tuple(sorted(manifest.get("models", {})))


_kept_manifests: dict[tuple[int, ...], Mapping[str, Any]] = {}
"""By the identity of the file; see [Note: kept manifests]."""


def _listed_manifest(path: Path) -> Mapping[str, Any]:
    """Do what `read_manifest` does, from memory if the file is known; see [Note: kept manifests]."""
    identity: tuple[int, ...] = ()
    with contextlib.suppress(OSError):  # `read_manifest` tells
        file = CheckpointPaths.found_in(path).manifest.lstat()
        identity = (file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns)
        if time.time_ns() - file.st_ctime_ns < _TICK_NS:  # a change at this moment would not change the time
            identity = ()
    if (kept := _kept_manifests.get(identity)) is not None:
        return kept
    manifest = read_manifest(path)
    if identity:
        while len(_kept_manifests) >= _MOST_KEPT:
            _kept_manifests.pop(next(iter(_kept_manifests)), None)
        _kept_manifests[identity] = manifest
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint at ``path``, and check its digest, format and schema."""
    try:
        file = CheckpointPaths.found_in(path).manifest
    except OSError as error:
        raise damage(path, error.strerror or str(error)) from error
    try:
        manifest = parse_json(read_small_file(file, MANIFEST_BYTES))
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise damage(file, f"it is not a manifest of {FORMAT}")
        version = manifest.get("format_version")
        if type(version) is not int or version not in (FORMAT_VERSION, FORMAT_VERSION_OF_SEVERAL):
            expected = f"{FORMAT_VERSION} or {FORMAT_VERSION_OF_SEVERAL}"
            raise damage(file, f"its format is version {shown(version)}, expected {expected}")
        if manifest.get("digest") != digest_of_manifest(manifest):
            raise damage(file, "its digest does not match its content")
        MANIFEST_SCHEMA(manifest)
    except InvalidError as error:
        raise damage(file, f"its content is invalid: {error}") from error
    if (version == FORMAT_VERSION_OF_SEVERAL) != ("models" in manifest):
        raise damage(file, f"its format is version {version}, and its models are {shown(manifest.get('models'))}")
    _check_shard_sizes(file, manifest)
    return manifest


def _check_shard_sizes(file: Path, manifest: Mapping[str, Any]) -> None:
    ranks = len(manifest["checksums"])
    for of_model in (manifest, *manifest.get("models", {}).values()):
        if of_model.get("shard_size", 1) > ranks:
            raise damage(file, f"its shard size is {of_model['shard_size']}, expected at most its {ranks} ranks")


def digest_of_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest without its entry ``digest``."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return digest_of(json.dumps(content, sort_keys=True).encode())


def check_tag(tag: str, *, reserved: str) -> None:
    """Check that ``tag`` can name a checkpoint; ``reserved`` is ``last`` in LeRobot's layout, else ``latest``."""
    if not isinstance(tag, str):
        raise CheckpointError(
            f"cannot name a checkpoint: tag is {shorten(repr(tag), 60)}, expected a str. Pass others by keyword."
        )
    if not tag or tag != Path(tag).name or tag.startswith(".") or tag in (LATEST, reserved):
        raise CheckpointError(
            f"cannot name a checkpoint: tag is {tag!r}, expected a plain directory name other than {reserved!r} that "
            "does not begin with a dot. Use something like 'global_step100'."
        )
