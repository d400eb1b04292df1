"""Find the checkpoints that a path on the command line means.

Input: the path of a checkpoint or of a run's directory. Output: checkpoints, including unusable ones, and what makes
them unusable. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from fsdp2_strategy.checkpoint.listing import (
    Checkpoint,
    checkpoints_with_manifest,
    extra_entries,
    is_checkpoint,
    problem_of,
    read_checkpoint,
    read_manifest,
    without_manifest,
)
from fsdp2_strategy.checkpoint.paths import EMA, OPTIMIZER, TRAINABLE, WRAPPER, CheckpointPaths, exists
from fsdp2_strategy.checkpoint.signature import read_key
from fsdp2_strategy.cli.foreign import no_own_checkpoint
from fsdp2_strategy.errors import CheckpointError, did_you_mean

T = TypeVar("T")

_LISTS = 3
"""How often a directory is listed if checkpoints vanish from it meanwhile."""

Found = tuple[Path, Checkpoint | None, str]
"""The directory of a checkpoint; the checkpoint, or None if its manifest is invalid; what makes it unusable, or ""."""


def checkpoints_at(path: Path, key_file: Path | None = None, *, may_be_empty: bool = False) -> list[Found]:
    """Return the checkpoint at ``path``, or all in the directory, oldest first, the unusable ones last."""
    key = key_of(key_file)
    if is_checkpoint(path):
        return [(path, read_checkpoint(path), problem_of(path, key))]
    for _ in range(_LISTS):
        found: list[Found] = [(c.path, c, problem_of(c.path, key)) for c in checkpoints_with_manifest(path)]
        found += [(each, None, problem_of(each)) for each in without_manifest(path)]
        if all(exists(each) for each, _, _ in found):
            break
    found = [each for each in found if exists(each[0])]
    if not found and not may_be_empty:
        raise no_own_checkpoint(path)
    return found


def extra_in(path: Path) -> list[str]:
    """Return what others have put into a checkpoint; see `extra_entries`."""
    try:
        return extra_entries(path, read_manifest(path)["files"])
    except CheckpointError:
        return []


def extra_text(extra: Collection[str]) -> str:
    """Return the names of extra files as the end of a line."""
    return f"  (extra files: {', '.join(extra)})" if extra else ""


def key_of(key_file: Path | None) -> bytes | None:
    """Return the key of the option ``--key-file``; None without it."""
    return None if key_file is None else read_key(key_file)


def components_in(paths: CheckpointPaths, models: Collection[str]) -> dict[str, Path]:
    """Return the folders of a checkpoint's components by name; those of several models as ``<model>/<component>``."""
    folders = {}
    for model, own in paths.of_models(models).items():
        prefix = f"{model}/" if model else ""
        folders[f"{prefix}model"] = own.weights
        folders |= {f"{prefix}{name}": own.state / name for name in (WRAPPER, TRAINABLE, OPTIMIZER, EMA)}
    return folders


def read_newest(path: Path, tag: str | None, read: Callable[[Path], T]) -> T:
    """Read the checkpoint that `newest_at` returns; if a run deletes it meanwhile, read the one that is newest then."""
    chosen = newest_at(path, tag)
    try:
        return read(chosen)
    except (CheckpointError, OSError):
        if exists(chosen):
            raise
    return read(newest_at(path, tag))


def newest_at(path: Path, tag: str | None = None) -> Path:
    """Return the checkpoint at ``path``; or, in a directory of checkpoints, the one named ``tag``, or the newest."""
    if is_checkpoint(path):
        return path
    committed = checkpoints_with_manifest(path)
    tags = [checkpoint.tag for checkpoint in committed]
    if tag is not None and tag not in tags:
        if is_checkpoint(path / tag):
            return path / tag  # a link
        if tags:
            raise CheckpointError(f"no checkpoint {tag!r} in {path}, expected one of {tags}.{did_you_mean(tag, tags)}")
    if not committed:
        raise no_own_checkpoint(path if tag is None else path / tag)
    return committed[-1 if tag is None else tags.index(tag)].path
