"""Write metric records to a JSON lines file, TensorBoard or Weights & Biases, on rank 0.

Input: the settings of a run, and one record per optimizer step. Output: files in the run's directory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

import torch.distributed as dist

from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.errors import ConfigError, did_you_mean
from fsdp2_strategy.extras import check_installed


@runtime_checkable
class Tracker(Protocol):
    """A destination of metric records."""

    def write_hyperparameters(self) -> None:
        """Write the settings of the run."""

    def write(self, global_step: int, metrics: Mapping[str, float]) -> None:
        """Write one record."""

    def finalize(self) -> None:
        """Write the remaining records, and close the tracker; not collective."""


class JSONLinesTracker:
    """Write the run's settings to ``run-metrics.jsonl`` and its records to ``{run_id}.jsonl``; only on rank 0.

    A resumed run appends to the file of records, after it removes a last line that a crash left incomplete. The file
    contains repeated steps twice.

    Args:
        run_id: name of the run.
        run_dir: directory of both files.
        hparams: settings of the run; values that JSON cannot represent are written as strings.
    """

    def __init__(self, run_id: str, run_dir: str | Path, hparams: Mapping[str, Any]) -> None:
        self.run_id, self.run_dir, self.hparams = run_id, Path(run_dir), hparams
        self._file: IO[bytes] | None = None

    def write_hyperparameters(self) -> None:
        """Write the settings to ``run-metrics.jsonl``."""
        if is_rank_0():
            self.run_dir.mkdir(parents=True, exist_ok=True)
            content = _to_line({"run_id": self.run_id, "hparams": dict(self.hparams)})
            (self.run_dir / "run-metrics.jsonl").write_bytes(content)

    def write(self, global_step: int, metrics: Mapping[str, float]) -> None:
        """Append a record without buffering. NaN and infinity are written as null."""
        if is_rank_0():
            self._file = self._file or _open_for_append(self.run_dir / f"{self.run_id}.jsonl")
            finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            self._file.write(_to_line(finite))

    def finalize(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoardTracker:
    """Write settings and records for TensorBoard, only on rank 0; requires the extra ``tracking``.

    The files are in ``{run_dir}/tensorboard/{run_id}``; ``tensorboard --logdir {run_dir}/tensorboard`` shows them. Each
    value of a record is a scalar under its name; the settings are a text. If a resumed run repeats steps, TensorBoard
    shows the repeated ones only: the first record of each process discards older records from its step on.

    Args:
        run_id, run_dir, hparams: as for `JSONLinesTracker`.

    Raises:
        ConfigError: the package tensorboard is not installed.
    """

    def __init__(self, run_id: str, run_dir: str | Path, hparams: Mapping[str, Any]) -> None:
        check_installed("tensorboard", "track with 'tensorboard'")
        self.run_id, self.run_dir, self.hparams = run_id, Path(run_dir), hparams
        self._writer: Any = None

    def write_hyperparameters(self) -> None:
        """Write the settings as the text ``hparams``."""
        if is_rank_0():
            lines = json.dumps(dict(self.hparams), indent=2, sort_keys=True, default=str).splitlines()
            writer = self._open()
            writer.add_text("hparams", "\n".join(f"    {line}" for line in lines), 0)  # Markdown for code
            writer.close()

    def write(self, global_step: int, metrics: Mapping[str, float]) -> None:
        """Write a record and flush it, so that a process that is killed leaves no gap before its last checkpoint."""
        if is_rank_0():
            self._writer = self._writer or self._open(purge_step=global_step)
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, global_step)
            self._writer.flush()

    def finalize(self) -> None:
        """Close the file."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _open(self, purge_step: int | None = None) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  an extra, and slow to import

        return SummaryWriter(self.run_dir / "tensorboard" / self.run_id, purge_step=purge_step)


class WeightsBiasesTracker:
    """Write settings and records to Weights & Biases, only on rank 0; requires the extra ``tracking``.

    With ``WANDB_MODE=offline`` in the environment, wandb writes to disk only. A restarted process starts another W&B
    run of the same name, unless wandb's own variables ``WANDB_RUN_ID`` and ``WANDB_RESUME=allow`` are set.

    Args:
        run_id, run_dir, hparams: as for `JSONLinesTracker`.
        project: Weights & Biases project; by default wandb's: ``WANDB_PROJECT``, or "uncategorized".
        entity: user or team that owns the project; by default the default entity of the account.
        group: name of the group of runs.

    Raises:
        ConfigError: the package wandb is not installed.
    """

    def __init__(
        self,
        run_id: str,
        run_dir: str | Path,
        hparams: Mapping[str, Any],
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
    ) -> None:
        check_installed("wandb", "track with 'wandb'")
        self.run_id, self.run_dir, self.hparams = run_id, Path(run_dir), hparams
        self._run: Any = None
        if is_rank_0():
            import wandb  # noqa: PLC0415  an extra, and slow to import

            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                name=run_id, dir=str(self.run_dir), config=dict(hparams), project=project, entity=entity, group=group
            )

    def write_hyperparameters(self) -> None:
        """Do nothing: the constructor has already passed the settings to ``wandb.init``."""

    def write(self, global_step: int, metrics: Mapping[str, float]) -> None:
        """Log a record; wandb sends it in the background."""
        if self._run is not None:
            self._run.log(dict(metrics), step=global_step)

    def finalize(self) -> None:
        """Send the remaining records and finish the run."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


def start_trackers(
    trackers: str | Tracker | Sequence[str | Tracker],
    run_id: str,
    run_dir: str | Path,
    hparams: Mapping[str, Any],
    *,
    wandb_project: str | None = None,
    wandb_entity: str | None = None,
    wandb_group: str | None = None,
) -> list[Tracker]:
    """Create trackers by name, and write the run's settings to all of them; collective if there is a group.

    If one is unknown or cannot start, those that have started are closed, and every rank raises.
    """
    known: dict[str, Callable[[], Tracker]] = {
        "jsonl": partial(JSONLinesTracker, run_id, run_dir, hparams),
        "tensorboard": partial(TensorBoardTracker, run_id, run_dir, hparams),
        "wandb": partial(WeightsBiasesTracker, run_id, run_dir, hparams, wandb_project, wandb_entity, wandb_group),
    }
    started: list[Tracker] = []
    try:
        with all_or_none("start trackers", ConfigError) if dist.is_initialized() else nullcontext():
            for given in trackers if isinstance(trackers, list | tuple) else (trackers,):
                if given not in known if isinstance(given, str) else not isinstance(given, Tracker):
                    hint = did_you_mean(given, known) if isinstance(given, str) else ""
                    raise ConfigError(
                        f"cannot track with {given!r}: expected one of {', '.join(known)}, or a Tracker object.{hint}"
                    )
                started.append(known[given]() if isinstance(given, str) else given)
                started[-1].write_hyperparameters()
    except Exception:
        for tracker in started:
            with suppress(Exception):
                tracker.finalize()
        raise
    return started


def _to_line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, default=str).encode() + b"\n"


def _open_for_append(path: Path) -> IO[bytes]:
    """Open a file of lines to append without buffering; remove a last line that a crash left incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+", buffering=0)
    file.seek(0)
    written = file.read()
    if not written.endswith(b"\n"):
        file.truncate(written.rfind(b"\n") + 1)
    return file
