"""VITRA's training loop: micro-batches, optimizer steps, metrics and saves, until the end or a request to stop.

Input: a strategy after its set-up, and epochs of batches. Output: a trained model, checkpoints, metric records.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.preemption import Preemption
from fsdp2_strategy.errors import StepError
from fsdp2_strategy.model.gradients import clear_gradients
from fsdp2_strategy.optim.step import StepResult
from fsdp2_strategy.vla.epochs import Epochs
from fsdp2_strategy.vla.metrics import VLAMetrics
from fsdp2_strategy.vla.parameter_groups import GROUPS

# The metrics' names for the learning rates of the groups.
_RATES = dict(
    zip(GROUPS, ("backbone_decay_lr", "backbone_no_decay_lr", "action_decay_lr", "action_no_decay_lr"), strict=True)
)


class Trains(Protocol):
    """The strategy that a loop calls: a model with its optimizer and schedule, and the methods of a step."""

    vla: nn.Module
    stage: str
    epochs: int
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    grad_accumulation_steps: int
    async_save: bool
    pending_micro_batches: int

    def is_through(self) -> bool:
        """Return whether all steps are taken."""

    def global_step(self, model: nn.Module, /) -> int:
        """Return the number of optimizer steps taken."""

    def forward_inputs(self, batch: Mapping[str, Any], /) -> dict[str, Any]:
        """Return the arguments of the model's forward for a batch."""

    def backward(self, loss: Any, model: nn.Module, optimizer: Optimizer, /) -> None:
        """Compute the gradients of a micro-batch and accumulate them."""

    def optimizer_step(
        self, optimizer: Optimizer, model: nn.Module, scheduler: LRScheduler, /, *, name: str
    ) -> StepResult:
        """Take an optimizer step if this micro-batch is the last of its step."""

    def save_checkpoint(
        self,
        run_dir: str | Path,
        global_step: int,
        epoch: int,
        only_trainable: bool = True,
        is_epoch_end: bool = False,
        *,
        async_save: bool = False,
    ) -> Path:
        """Save a checkpoint."""


@dataclass(kw_only=True)
class Loop:
    """The training loop; every rank runs it."""

    strategy: Trains
    data: Epochs
    metrics: VLAMetrics
    bar: Any
    """A progress bar that counts optimizer steps."""
    stop: Preemption
    save_interval: int | None
    epoch_save_interval: int | None
    save_full_model: bool
    _unsaved: bool = False
    """Whether steps were taken since the last checkpoint."""

    def run(self) -> bool:
        """Train, and return True at the end of the run, or False if a signal stopped it before."""
        for epoch in range(self.data.epoch, self.strategy.epochs):
            self.strategy.vla.train()
            for batch in self.data.batches(epoch):
                result = self._micro_batch(batch)
                if result.stepped or result.skipped:
                    self.data.mark()
                if result.stepped:
                    self._unsaved = True
                    self._report(epoch)
                if result.stepped or result.skipped:
                    through, told = self.strategy.is_through(), self._is_told_to_stop()
                    on_interval = result.stepped and self.save_interval and result.step % self.save_interval == 0
                    if through or told or on_interval:
                        self._save(epoch, is_epoch_end=False)
                    if through or told:
                        return through
            if not self.strategy.pending_micro_batches:
                self.data.end_epoch()
            on_interval = self.epoch_save_interval and epoch % self.epoch_save_interval == 0
            is_last = epoch == self.strategy.epochs - 1
            if on_interval or (is_last and self._unsaved and (self.save_interval or self.epoch_save_interval)):
                self._save(epoch, is_epoch_end=True)
        self._drop_what_is_pending()
        return True

    def _micro_batch(self, batch: Mapping[str, Any]) -> StepResult:
        strategy = self.strategy
        prediction = strategy.vla(**strategy.forward_inputs(batch))
        is_mapping = isinstance(prediction, Mapping)
        numbers = {name: value for name, value in prediction.items() if _is_number(value)} if is_mapping else {}
        if "loss" not in numbers:
            returned = ", ".join(prediction) if is_mapping else f"a {type(prediction).__name__}"
            raise StepError(
                f"cannot train {type(strategy.vla).__name__}: its forward returned {returned or 'nothing'}, expected a "
                "mapping with a 'loss' of one element. Return one."
            )
        self.metrics.commit(**numbers)
        strategy.backward(numbers["loss"], strategy.vla, strategy.optimizer)
        return strategy.optimizer_step(strategy.optimizer, strategy.vla, strategy.lr_scheduler, name=strategy.stage)

    def _report(self, epoch: int) -> None:
        rates = self._rates()
        step = self.strategy.global_step(self.strategy.vla)
        self.metrics.commit(
            update_step_time=True, global_step=step, epoch=epoch, lr=rates["backbone_decay_lr"], **rates
        )
        with all_or_none("track metrics", StepError):
            status = self.metrics.push()
        self.bar.set_description(status, refresh=False)
        self.bar.update()

    def _rates(self) -> dict[str, float]:
        """Return the learning rate of each of the four groups.

        A group without parameters gets the learning rate of the other group of its half (backbone or other), or 0 if
        that group has no parameters either.
        """
        found = {group["name"]: group["lr"] for group in self.strategy.optimizer.param_groups}
        of_half = {name.partition("_")[0]: rate for name, rate in found.items()}
        return {_RATES[name]: found.get(name, of_half.get(name.partition("_")[0], 0.0)) for name in GROUPS}

    def _save(self, epoch: int, *, is_epoch_end: bool) -> None:
        step = self.strategy.global_step(self.strategy.vla)
        self.strategy.save_checkpoint(
            self.metrics.run_dir,
            step,
            epoch,
            only_trainable=not self.save_full_model,
            is_epoch_end=is_epoch_end,
            async_save=self.strategy.async_save,
        )
        self._unsaved = False

    def _is_told_to_stop(self) -> bool:
        # Only the main thread can handle signals.
        return threading.current_thread() is threading.main_thread() and self.stop.requested()

    def _drop_what_is_pending(self) -> None:
        strategy = self.strategy
        if pending := strategy.pending_micro_batches:
            message = "the last %d micro-batches fill no step of %d, and are dropped"
            log(message, pending, strategy.grad_accumulation_steps)
            clear_gradients(strategy.vla)
            strategy.pending_micro_batches = 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
