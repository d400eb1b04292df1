"""Where a run of VITRA's keeps its checkpoints, and where it goes on from one.

Input: a run's directory, or what a checkpoint says of its place. Output: names, and the epoch that goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fsdp2_strategy.checkpoint.random_state import rng_content
from fsdp2_strategy.distributed.agreement import from_rank_0
from fsdp2_strategy.errors import CheckpointError, ConfigError
from fsdp2_strategy.vla.epochs import Position

CHECKPOINTS = "checkpoints"
"""The folder of a run's directory that holds them."""


def tag_of(epoch: int, global_step: int, *, is_epoch_end: bool) -> str:
    """Return the name of a checkpoint."""
    return f"epoch={epoch}-step={global_step}{'.end' if is_epoch_end else ''}.ckpt"


def directory_to_load(folder: Path) -> Path:
    """Return where the checkpoints of a run are, or the folder itself where that is a checkpoint; collective."""
    return folder / CHECKPOINTS if from_rank_0((folder / CHECKPOINTS).is_dir()) else folder


def check_may_be_empty(folder: Path, run_dir: Path) -> None:
    """Raise on every rank where a folder without a checkpoint is not that of a run that begins; collective.

    Raises:
        CheckpointError: a checkpoint was named, or the folder is not there.
    """
    is_fresh = folder.is_dir() or folder.absolute() == run_dir.absolute()
    if folder.suffix == ".ckpt" or not from_rank_0(is_fresh):
        raise CheckpointError(
            f"cannot load {folder}: there is no checkpoint, expected one that was committed. Name another, or "
            "the run's directory for its newest."
        )


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What was loaded."""

    path: Path
    epoch: int
    """The epoch that ran when it was saved."""
    ended: bool
    """Whether it was saved at that epoch's end."""
    position: Position | None
    rng: bytes
    """The random state then."""

    @classmethod
    def of(cls, path: str, client_state: Mapping[str, Any], *, with_position: bool) -> Self:
        """Take note of a checkpoint that was loaded just now, whose random state is that of this process."""
        position = client_state.get("position") if with_position else None
        return cls(
            path=Path(path),
            epoch=client_state.get("epoch", 0),
            ended=path.endswith(".end.ckpt"),
            position=Position(**position) if position else None,
            rng=rng_content(),
        )

    @property
    def begins(self) -> int:
        """The epoch that goes on."""
        return self.position.epoch if self.position else self.epoch + self.ended

    def check_start(self, epoch: int, step: int, steps_taken: int) -> None:
        """Compare where the caller means to start with what was loaded; 0 means there.

        Raises:
            ConfigError: they differ.
        """
        if epoch not in (0, self.epoch, self.begins) or step not in (0, steps_taken):
            raise ConfigError(
                f"cannot train: start_epoch is {epoch} and start_global_step {step}, expected {self.epoch} and "
                f"{steps_taken}, where {self.path} goes on. Leave them out."
            )
