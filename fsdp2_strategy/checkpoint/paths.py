"""Where the parts of a checkpoint lie in its directory: by our own layout, or by LeRobot's.

Input: the directory. Output: the paths of its parts.

    <tag>/ of ours                 <tag>/ of LeRobot's
      model/                         pretrained_model/
      wrapper/ ... manifest.json     training_state/
                                       wrapper/ ... manifest.json
                                       training_step.json
                                       model/              where the policy itself wrote pretrained_model/
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

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
TRAINING_STATE = "training_state"
TRAINING_STEP = "training_step.json"

_OF_RANKS = (RNG, DATA, CHECKSUMS)
_PARTS = {MODEL, WRAPPER, TRAINABLE, OPTIMIZER, EMA, *_OF_RANKS, TRAINER_STATE, META, MANIFEST, TRAINING_STEP}


@dataclass(frozen=True)
class Places:
    """Where the parts of one checkpoint lie."""

    root: Path
    """The checkpoint's directory."""
    model: Path
    """The folder that others open."""
    state: Path
    """What holds all that a run goes on from."""

    @classmethod
    def of_ours(cls, root: Path) -> Self:
        """Name the places of a checkpoint in our own layout."""
        return cls(root, root / MODEL, root)

    @classmethod
    def of_lerobot(cls, root: Path) -> Self:
        """Name the places of a checkpoint in LeRobot's layout."""
        return cls(root, root / PRETRAINED_MODEL, root / TRAINING_STATE)

    @classmethod
    def found_in(cls, root: Path) -> Self:
        """Name the places of a checkpoint on disk, by where its manifest is."""
        of_lerobot = cls.of_lerobot(root)
        return of_lerobot if of_lerobot.manifest.exists() else cls.of_ours(root)

    def moved_to(self, root: Path) -> Self:
        """Name the places of the same checkpoint in another directory."""
        return type(self).of_lerobot(root) if self.is_lerobot else type(self).of_ours(root)

    @property
    def is_lerobot(self) -> bool:
        """Whether it is LeRobot's layout."""
        return self.state != self.root

    @property
    def weights(self) -> Path:
        """The folder that a run reads its weights from: where others wrote ``model``, one of our own."""
        own = self.state / MODEL
        return own if own.is_dir() else self.model

    @property
    def manifest(self) -> Path:
        """What makes it a checkpoint."""
        return self.state / MANIFEST

    @property
    def of_ranks(self) -> frozenset[Path]:
        """Folders that every rank writes a file of its own into."""
        return frozenset(self.state / name for name in _OF_RANKS)

    def of_rank(self, folder: str, rank: int) -> Path:
        """Return a rank's file in one of the folders of all ranks."""
        return self.state / folder / f"rank{rank:05d}.{'json' if folder == CHECKSUMS else 'safetensors'}"

    def name_of(self, path: Path) -> str:
        """Return what the manifest calls a file."""
        return path.relative_to(self.root).as_posix()


def holds_parts_alone(root: Path) -> bool:
    """Say whether nothing is in a directory but what a checkpoint is made of: whole, half-written or half-removed."""
    if not root.is_dir():
        return False
    top = {entry.name for entry in root.iterdir()}
    if TRAINING_STATE not in top:
        return top <= _PARTS
    state = {entry.name for entry in (root / TRAINING_STATE).iterdir()}
    return top <= {PRETRAINED_MODEL, TRAINING_STATE} and state <= _PARTS
