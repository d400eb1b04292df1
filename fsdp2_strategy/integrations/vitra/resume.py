"""Decide where a VITRA run resumes.

Input: the path and the client state of the loaded checkpoint. Output: the epoch in which training continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fsdp2_strategy.checkpoint.data_position import DataPositionMode
from fsdp2_strategy.checkpoint.random_state import rng_content
from fsdp2_strategy.distributed.agreement import from_rank_0
from fsdp2_strategy.errors import CheckpointError, ConfigError
from fsdp2_strategy.integrations.vitra.epochs import Position


def check_new_run(folder: Path, run_dir: Path) -> None:
    """Raise on every rank if a folder without a checkpoint cannot be the directory of a new run; collective."""
    may_be_new = folder.is_dir() or folder.absolute() == run_dir.absolute()
    if folder.suffix == ".ckpt" or not from_rank_0(may_be_new):
        raise CheckpointError(
            f"cannot resume: {folder} is neither a committed checkpoint nor the directory of a run, expected one of "
            "them. Correct the path."
        )


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The loaded checkpoint from which a run resumes."""

    path: Path
    epoch: int
    """The epoch in which it was saved."""
    start_epoch: int
    """The epoch in which training continues."""
    position: Position | None
    """The data position to resume at; None to start at the beginning of an epoch."""
    load_data_position: DataPositionMode
    """Whether the position may have been saved with another global batch size ("samples")."""
    rng: bytes
    """The random state of the checkpoint."""

    @classmethod
    def of(cls, path: str, client_state: Mapping[str, Any], *, load_data_position: DataPositionMode) -> Self:
        """Describe the checkpoint that was just loaded; read its random state from this process's generators."""
        saved = client_state.get("position") if load_data_position else None
        position = Position(**saved) if saved else None
        epoch = client_state.get("epoch", 0)
        return cls(
            path=Path(path),
            epoch=epoch,
            start_epoch=position.epoch if position else epoch + path.endswith(".end.ckpt"),
            position=position,
            load_data_position=load_data_position,
            rng=rng_content(),
        )

    def check_start(self, epoch: int, step: int, steps_taken: int) -> None:
        """Raise if the caller's start arguments are neither 0 nor those of the checkpoint."""
        if epoch not in (0, self.epoch, self.start_epoch) or step not in (0, steps_taken):
            raise ConfigError(
                f"cannot train: start_epoch is {epoch} and start_global_step {step}, expected {self.epoch} and "
                f"{steps_taken}, as in {self.path}. Omit both."
            )
