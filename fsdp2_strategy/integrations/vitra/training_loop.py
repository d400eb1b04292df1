"""VITRA's training loop: micro-batches, optimizer steps, metrics and saves, until the last step or SIGTERM.

Input: a strategy that is set up, and epochs of batches. Output: a trained model, checkpoints, metric records.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.preemption import Preemption
from fsdp2_strategy.distributed.progress import Progress
from fsdp2_strategy.distributed.terminal import is_terminal
from fsdp2_strategy.errors import StepError, counted
from fsdp2_strategy.integrations.vitra.epochs import Epochs
from fsdp2_strategy.integrations.vitra.metrics import VLAMetrics
from fsdp2_strategy.integrations.vitra.parameter_groups import GROUPS
from fsdp2_strategy.optim.step import StepResult
from fsdp2_strategy.optim.zero_grad import discard_gradients

if TYPE_CHECKING:
    from fsdp2_strategy.integrations.vitra.strategy import VLAFSDPStrategy

# The metric of each parameter group's learning rate.
_METRIC_NAMES = dict(
    zip(GROUPS, ("backbone_decay_lr", "backbone_no_decay_lr", "action_decay_lr", "action_no_decay_lr"), strict=True)
)


@dataclass(kw_only=True)
class Loop:
    """The training loop; every rank runs it."""

    strategy: VLAFSDPStrategy
    data: Epochs
    metrics: VLAMetrics
    progress: Progress
    """Counts optimizer steps."""
    stop: Preemption
    save_interval: int | None
    epoch_save_interval: int | None
    save_full_model: bool
    _unsaved: bool = False
    """Whether steps were taken since the last checkpoint."""
    _numbers: str = ""
    """The numbers of the last steps, for the bar."""

    def run(self) -> bool:
        """Train, and return True at the end of the run, or False if SIGTERM stopped it before its end."""
        for epoch in range(self.data.epoch, self.strategy.epochs):
            self.strategy.vla.train()
            for batch in self.data.batches(epoch):
                result = self._micro_batch(batch)
                if not (result.stepped or result.skipped):
                    continue
                self.data.record_step()
                if result.stepped:
                    self._unsaved = True
                    self._report(epoch)
                finished, stop = self.strategy.is_finished(), self._stop_requested()
                on_interval = result.stepped and self.save_interval and result.step % self.save_interval == 0
                if finished or stop or on_interval:
                    self._save(epoch, is_epoch_end=False)
                if finished or stop:
                    return finished
            if not self.strategy.pending_micro_batches:
                self.data.end_epoch()
            on_interval = self.epoch_save_interval and epoch % self.epoch_save_interval == 0
            is_last = epoch == self.strategy.epochs - 1
            if on_interval or (is_last and self._unsaved and (self.save_interval or self.epoch_save_interval)):
                self._save(epoch, is_epoch_end=True)
        self._drop_pending_micro_batches()
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
                "mapping with a 'loss' of one element. Return such a mapping."
            )
        self.metrics.commit(**numbers)
        strategy.backward(numbers["loss"], strategy.vla, strategy.optimizer)
        return strategy.optimizer_step(strategy.optimizer, strategy.vla, strategy.lr_scheduler, name=strategy.stage)

    def _report(self, epoch: int) -> None:
        rates = self._learning_rates()
        step = self.strategy.global_step(self.strategy.vla)
        self.metrics.commit(
            update_step_time=True, global_step=step, epoch=epoch, lr=rates["backbone_decay_lr"], **rates
        )
        with all_or_none("track metrics", StepError):
            status = self.metrics.push()
        if is_terminal():
            self._numbers = self.strategy.step_text() or self._numbers
            status = f"{status} - {self._numbers}" if self._numbers else status
        self.progress.describe(status)
        self.progress.update()

    def _learning_rates(self) -> dict[str, float]:
        """Return the rates by metric; a group without parameters gets that of the group with the same first word."""
        found = {group["name"]: group["lr"] for group in self.strategy.optimizer.param_groups}
        by_first_word = {name.partition("_")[0]: rate for name, rate in found.items()}
        return {_METRIC_NAMES[name]: found.get(name, by_first_word.get(name.partition("_")[0], 0.0)) for name in GROUPS}

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

    def _stop_requested(self) -> bool:
        # `requested` installs a signal handler, which only the main thread can do.
        return threading.current_thread() is threading.main_thread() and self.stop.requested()

    def _drop_pending_micro_batches(self) -> None:
        strategy = self.strategy
        if pending := strategy.pending_micro_batches:
            message = "dropping the last %s: an optimizer step needs %d"
            log(message, counted(pending, "micro-batch", "es"), strategy.grad_accumulation_steps)
            discard_gradients(strategy.vla)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
