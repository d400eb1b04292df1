"""Define the paths of a checkpoint's components, in our own layout, in LeRobot's and in that of transformers' Trainer.

Input: a checkpoint's directory. Output: the paths.

    <tag>/ in our own layout       <tag>/ in LeRobot's layout
      model/                         pretrained_model/
                                     pretrained_model_ema/   if there are averages: the policy with them
      wrapper/ ... manifest.json     training_state/
                                       wrapper/ ... manifest.json
                                       training_step.json
                                       model/              only if the policy wrote pretrained_model/ itself

    <tag>/ in the Trainer's layout
      model.safetensors, config.json, trainer_state.json, ...    the files that Trainer writes
      training_state/
        wrapper/ ... manifest.json

A checkpoint of several models has one folder for each model, with the folders of our own layout; see
[Note: several models] in `several_models`.

    <tag>/
      actor/
        model/ ... trainer_state.json    step, schedule and hyper-parameters of this model
      critic/
        model/ ... trainer_state.json
      trainer_state.json  rng/  data/  checksums/  manifest.json  meta.json    of the run
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage.file_reads import repeated

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
ROTATED = "rotated.json"
"""Says, in a directory with files of others, that rotation deleted the checkpoint that they were in."""

PRETRAINED_MODEL = "pretrained_model"
AVERAGED_MODEL = "pretrained_model_ema"
TRAINING_STATE = "training_state"
TRAINING_STEP = "training_step.json"

LayoutKind = Literal["own", "lerobot", "trainer"]

_PER_RANK_FOLDERS = (RNG, DATA, CHECKSUMS)
_MODEL_ENTRIES = {MODEL, WRAPPER, TRAINABLE, OPTIMIZER, EMA, TRAINER_STATE}
_ENTRIES = {*_MODEL_ENTRIES, *_PER_RANK_FOLDERS, META, MANIFEST, TRAINING_STEP}


@dataclass(frozen=True)
class CheckpointPaths:
    """The paths of one checkpoint's components."""

    root: Path
    """The checkpoint's directory."""
    model: Path
    """The folder that other programs load the model from."""
    state: Path
    """The directory of the other components: the root in our layout, ``training_state/`` in the others."""
    kind: LayoutKind
    listed: frozenset[str] | None = None
    """Names of the files in the manifest, if it was read: other files in the directory are not read."""

    @classmethod
    def of(cls, root: Path, kind: LayoutKind) -> Self:
        """Return the paths of a checkpoint in a layout."""
        if kind == "own":
            return cls(root, root / MODEL, root, kind)
        return cls(root, root / PRETRAINED_MODEL if kind == "lerobot" else root, root / TRAINING_STATE, kind)

    @classmethod
    def found_in(cls, root: Path) -> Self:
        """Return the paths of a checkpoint on disk; detect the layout from the files that exist."""
        state = root / TRAINING_STATE
        if not exists(state / MANIFEST):
            return cls.of(root, "own")
        if exists(state / TRAINING_STEP):
            return cls.of(root, "lerobot")
        return cls.of(root, "lerobot" if is_directory(root / PRETRAINED_MODEL) else "trainer")

    def of_model(self, name: str) -> Self:
        """Return the paths of one of several models, without those of the run; of the only one, ``""``, all paths."""
        return replace(self, model=self.root / name / MODEL, state=self.root / name) if name else self

    def of_models(self, names: Collection[str]) -> dict[str, Self]:
        """Return the paths of each of several models by name; without names, those of the only model, ``""``."""
        return {name: self.of_model(name) for name in names or ("",)}

    @property
    def is_lerobot(self) -> bool:
        """Whether the layout is LeRobot's."""
        return self.kind == "lerobot"

    @property
    def weights(self) -> Path:
        """The folder to load weights from: ``training_state/model/`` if the policy wrote ``model`` itself."""
        own = self.state / MODEL
        return own if is_directory(own) else self.model

    @property
    def averaged(self) -> Path:
        """The folder that other programs load the averaged policy from, in LeRobot's layout."""
        return self.root / AVERAGED_MODEL

    @property
    def manifest(self) -> Path:
        """The manifest, which is written last. A directory without a manifest is not a checkpoint."""
        return self.state / MANIFEST

    @property
    def per_rank_folders(self) -> frozenset[Path]:
        """The folders that contain one file per rank."""
        return frozenset(self.state / name for name in _PER_RANK_FOLDERS)

    def rank_file(self, folder: str, rank: int) -> Path:
        """Return the path of a rank's file; ``folder`` is the name of a folder with one file per rank."""
        return self.state / folder / f"rank{rank:05d}.{'json' if folder == CHECKSUMS else 'safetensors'}"

    def rank_names(self, folder: str, ranks: int) -> list[str]:
        """Return the names in the manifest of the files of that many ranks; see `rank_file`."""
        before, _, after = self.name_of(self.rank_file(folder, 0)).rpartition("rank00000")
        return [f"{before}rank{rank:05d}{after}" for rank in range(ranks)]

    def name_of(self, path: Path) -> str:
        """Return a file's name in the manifest."""
        return path.relative_to(self.root).as_posix()

    def lists(self, path: Path) -> bool:
        """Return whether a file belongs to the checkpoint; true for every file if the manifest was not read."""
        return self.listed is None or self.name_of(path) in self.listed


def exists(path: Path, *, follow_symlinks: bool = True) -> bool:
    """Return whether a path exists and can be looked at; an unreadable directory of another user raises nothing."""
    try:
        repeated(path, lambda: path.stat(follow_symlinks=follow_symlinks))
    except (OSError, ValueError):
        return False
    return True


def is_directory(path: Path, *, follow_symlinks: bool = True) -> bool:
    """Return whether a path is a directory; False if it cannot be looked at."""
    try:
        return stat.S_ISDIR(repeated(path, lambda: path.stat(follow_symlinks=follow_symlinks)).st_mode)
    except (OSError, ValueError):
        return False


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return what tells a directory from another one of the same name; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def names_in(path: Path) -> set[str]:
    """Return the names in a directory; an empty set if it cannot be read."""
    try:
        return {entry.name for entry in repeated(path, lambda: list(path.iterdir()))}
    except OSError:
        return set()


def has_only_checkpoint_entries(root: Path) -> bool:
    """Return whether all names in a directory are names of a checkpoint's entries; False for a link.

    This is also true for a checkpoint that is partly written or partly deleted. In the Trainer's layout, the files
    next to ``training_state/`` may have any names, so only the names within it are compared.
    """
    try:
        top = {entry.name for entry in root.iterdir()} if is_directory(root, follow_symlinks=False) else None
    except OSError:
        return False
    if top is None:
        return False
    if TRAINING_STATE not in top:
        # The folders of several models are created after those of the run, and are deleted before them.
        models = [root / name for name in top - _ENTRIES]
        return not models or (bool(top & _ENTRIES) and all(map(_has_only_entries_of_a_model, models)))
    state = names_in(root / TRAINING_STATE) if is_directory(root / TRAINING_STATE, follow_symlinks=False) else set()
    if PRETRAINED_MODEL in top or AVERAGED_MODEL in top or top == {TRAINING_STATE}:
        return top <= {PRETRAINED_MODEL, AVERAGED_MODEL, TRAINING_STATE} and state <= _ENTRIES
    return bool(state) and state <= _ENTRIES


def _has_only_entries_of_a_model(path: Path) -> bool:
    if not is_model_name(path.name) or not is_directory(path, follow_symlinks=False):
        return False
    return names_in(path) <= _MODEL_ENTRIES


def model_folders(root: Path) -> list[Path]:
    """Return the folders of a checkpoint that are named by models, complete or not; none in other layouts."""
    top = names_in(root)
    if TRAINING_STATE in top:
        return []
    return [path for name in top - _ENTRIES if _has_only_entries_of_a_model(path := root / name)]


def is_model_name(name: object) -> bool:
    """Return whether a value can be the name of one of several models, and so of a folder in a checkpoint."""
    if not isinstance(name, str) or not name or name != Path(name).name or name.startswith("."):
        return False
    return name not in _ENTRIES | {PRETRAINED_MODEL, AVERAGED_MODEL, TRAINING_STATE} and "\0" not in name


def as_path(value: object, action: str) -> Path:
    """Return a directory's name as a path; ``~`` at its beginning is the home directory."""
    if not isinstance(value, str | os.PathLike):
        shown = "None" if value is None else f"a {type(value).__name__}"
        raise CheckpointError(
            f"cannot {action}: the directory is {shown}, expected a path. Check the order of the arguments."
        )
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise CheckpointError(
            f"cannot {action}: the directory is {str(value)!r}, and {error}. Pass an absolute path."
        ) from error
