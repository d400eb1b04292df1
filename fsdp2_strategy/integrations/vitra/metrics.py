"""Collect the metrics of VLA training on rank 0, and write them to trackers.

Input: values that the training loop commits after each micro-batch and each optimizer step. Output: one record per
optimizer step with VITRA's keys, and a status line for the progress bar.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.tracking.trackers import JSONLinesTracker, Tracker, WeightsBiasesTracker, start_trackers

__all__ = ["JSONLinesTracker", "Tracker", "VLAMetrics", "WeightsBiasesTracker"]


class VLAMetrics:
    """Collect the metrics of a run, and write one record per optimizer step to trackers.

    Every rank must construct one; this is collective if there is a process group. Only rank 0 collects values.

    Args:
        active_trackers: "jsonl", "tensorboard", "wandb", or `Tracker` objects.
        run_id, run_dir, hparams: as for `JSONLinesTracker`.
        wandb_project, wandb_entity: as for `WeightsBiasesTracker`.
        grad_accumulation_steps: micro-batches per optimizer step; ``Loss (Raw)`` is the mean over those of one step.
        window_size: ``Loss`` is the mean over the last ``window_size`` micro-batches, and ``Step Time`` over as many
            optimizer steps.
        resume_step: optimizer steps taken before this run.
        resume_epoch: the epoch in which the run starts.

    Raises:
        ConfigError: on every rank: a tracker is unknown or cannot start.
    """

    def __init__(
        self,
        active_trackers: Sequence[str | Tracker],
        run_id: str,
        run_dir: str | Path,
        hparams: Mapping[str, Any],
        wandb_project: str = "vitra",
        wandb_entity: str | None = None,
        grad_accumulation_steps: int = 1,
        window_size: int = 1,
        resume_step: int | None = None,
        resume_epoch: int | None = None,
    ) -> None:
        self.run_id, self.run_dir, self.hparams = run_id, Path(run_dir), hparams
        self.global_step, self.epoch = resume_step or 0, resume_epoch or 0
        self.trackers = start_trackers(
            active_trackers,
            run_id,
            run_dir,
            hparams,
            wandb_project=wandb_project,
            wandb_entity=wandb_entity,
            wandb_group="vla-train",
        )
        self._step_start = time.monotonic()
        self._learning_rate = 0.0
        self._step_losses: deque[torch.Tensor] = deque(maxlen=grad_accumulation_steps)
        self._window_losses: deque[torch.Tensor] = deque(maxlen=window_size)
        self._seconds: deque[float] = deque(maxlen=window_size)
        self._others: dict[str, deque[torch.Tensor]] = {}

    def commit(
        self,
        *,
        global_step: int | None = None,
        epoch: int | None = None,
        lr: float | None = None,
        update_step_time: bool = False,
        **values: float | torch.Tensor,
    ) -> None:
        """Add values to the next record; not collective, and does not synchronise with the device.

        Args:
            global_step: optimizer steps taken.
            epoch: the current epoch.
            lr: learning rate of the backbone.
            update_step_time: whether an optimizer step has just ended.
            **values: ``loss`` and other values by name, each a number or a tensor of one element.
        """
        self.global_step = self.global_step if global_step is None else global_step
        self.epoch = self.epoch if epoch is None else epoch
        if not is_rank_0():
            return
        self._learning_rate = self._learning_rate if lr is None else lr
        if update_step_time:
            now = time.monotonic()
            self._seconds.append(now - self._step_start)
            self._step_start = now
        for name, value in values.items():
            tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
            if name == "loss":
                self._step_losses.append(tensor)
                self._window_losses.append(tensor)
            else:
                maxlen = 1 if name.endswith("_lr") else self._step_losses.maxlen
                self._others.setdefault(name, deque(maxlen=maxlen)).append(tensor)

    def push(self) -> str:
        """Write the committed values to the trackers as one record, and return the status line; not collective.

        The keys with the prefix ``VLA Train/`` are Step, Epoch, Loss, Loss (Raw), Backbone Learning Rate, Action Model
        Learning Rate and Step Time. All other values have the prefix ``Other/`` and are means over the micro-batches of
        the step, except learning rates (``*_lr``), which are the last values.
        """
        if not is_rank_0():
            return self.get_status()
        others = {name: _mean(values) for name, values in self._others.items()}
        loss = _mean(self._window_losses)
        record: dict[str, float] = {
            "Step": self.global_step,
            "Epoch": self.epoch,
            "Loss": loss,
            "Loss (Raw)": _mean(self._step_losses),
            "Backbone Learning Rate": self._learning_rate,
            "Action Model Learning Rate": others.get("action_decay_lr", self._learning_rate),
            "Step Time": statistics.fmean(self._seconds) if self._seconds else 0.0,
        }
        named = {f"VLA Train/{name}": value for name, value in record.items()}
        self.log(self.global_step, named | {f"Other/{name}": value for name, value in others.items()})
        return self.get_status(loss)

    def log(self, global_step: int, metrics: Mapping[str, float]) -> None:
        """Write one record to every tracker; not collective."""
        for tracker in self.trackers:
            tracker.write(global_step, metrics)

    def get_status(self, loss: float | torch.Tensor | None = None) -> str:
        """Return a line for the progress bar; not collective."""
        line = f"=>> [Epoch {self.epoch:03d}] Global Step {self.global_step:06d} =>> LR :: {self._learning_rate:.6f}"
        return line if loss is None else f"{line} - Loss :: {float(loss):.4f}"

    def finalize(self) -> None:
        """Close the trackers; not collective."""
        for tracker in self.trackers:
            tracker.finalize()


def _mean(values: deque[torch.Tensor]) -> float:
    """Return the mean, or NaN if there are no values; synchronises with the device once."""
    return torch.stack([value.reshape(()).double() for value in values]).mean().item() if values else float("nan")
