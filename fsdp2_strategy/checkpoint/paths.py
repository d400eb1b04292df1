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
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.file_reads import repeated

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

    @classmethod
    def of(cls, root: Path, kind: LayoutKind) -> Self:
        """Return the paths of a checkpoint in a layout."""
        if kind == "own":
            return cls(root, root / MODEL, root, kind)
        return cls(root, root / PRETRAINED_MODEL if kind == "lerobot" else root, root / TRAINING_STATE, kind)

    @classmethod
    def found_in(cls, root: Path) -> Self:
        """Return the paths of a checkpoint on disk; detect the layout from the folders that exist."""
        if not repeated(root, (root / TRAINING_STATE / MANIFEST).exists):
            return cls.of(root, "own")
        return cls.of(root, "lerobot" if (root / PRETRAINED_MODEL).is_dir() else "trainer")

    def of_model(self, name: str) -> Self:
        """Return the paths of one of several models; those of the run (manifest, per-rank folders) have no meaning."""
        return replace(self, model=self.root / name / MODEL, state=self.root / name)

    def of_models(self, names: Collection[str]) -> dict[str, Self]:
        """Return the paths of each of several models by name; without names, those of the only model, as ``""``."""
        return {name: self.of_model(name) for name in names} or {"": self}

    def moved_to(self, root: Path) -> Self:
        """Return the paths of the same checkpoint in another directory."""
        return self.of(root, self.kind)

    @property
    def is_lerobot(self) -> bool:
        """Whether the layout is LeRobot's."""
        return self.kind == "lerobot"

    @property
    def weights(self) -> Path:
        """The folder that a load reads the weights from.

        This is ``training_state/model/`` if the policy wrote ``pretrained_model/`` itself, else ``model``.
        """
        own = self.state / MODEL
        return own if own.is_dir() else self.model

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

    def name_of(self, path: Path) -> str:
        """Return a file's name in the manifest."""
        return path.relative_to(self.root).as_posix()


def has_only_checkpoint_entries(root: Path) -> bool:
    """Return whether all names in a directory are names of a checkpoint's entries.

    This is also true for a checkpoint that is partly written or partly deleted. In the Trainer's layout, the files
    next to ``training_state/`` may have any names, so only the names within it are compared.
    """
    if not root.is_dir():
        return False
    top = {entry.name for entry in root.iterdir()}
    if TRAINING_STATE not in top:
        # The folders of several models are created after those of the run, and are deleted before them.
        models = [root / name for name in top - _ENTRIES]
        return not models or (bool(top & _ENTRIES) and all(map(_has_only_entries_of_a_model, models)))
    state = {entry.name for entry in (root / TRAINING_STATE).iterdir()}
    if PRETRAINED_MODEL in top or AVERAGED_MODEL in top or top == {TRAINING_STATE}:
        return top <= {PRETRAINED_MODEL, AVERAGED_MODEL, TRAINING_STATE} and state <= _ENTRIES
    return bool(state) and state <= _ENTRIES


def _has_only_entries_of_a_model(path: Path) -> bool:
    if not is_model_name(path.name) or not path.is_dir() or path.is_symlink():
        return False
    return {entry.name for entry in path.iterdir()} <= _MODEL_ENTRIES


def model_folders(root: Path) -> list[Path]:
    """Return the folders of a checkpoint that are named by models, complete or not; none in other layouts."""
    if not root.is_dir() or (root / TRAINING_STATE).exists():
        return []
    return [path for path in root.iterdir() if path.name not in _ENTRIES and _has_only_entries_of_a_model(path)]


def is_model_name(name: object) -> bool:
    """Return whether a value can be the name of one of several models, and so of a folder in a checkpoint."""
    if not isinstance(name, str) or not name or name != Path(name).name or name.startswith("."):
        return False
    return name not in _ENTRIES | {PRETRAINED_MODEL, AVERAGED_MODEL, TRAINING_STATE} and "\0" not in name


def as_path(value: object, action: str) -> Path:
    """Return a directory's name as a path.

    Raises:
        CheckpointError: it is neither text nor a path.
    """
    if not isinstance(value, str | os.PathLike):
        shown = "None" if value is None else f"a {type(value).__name__}"
        raise CheckpointError(
            f"cannot {action}: the directory is {shown}, expected a path. Check the order of the arguments."
        )
    return Path(value)
