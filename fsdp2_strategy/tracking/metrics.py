"""Define `Metrics`, which writes one record per optimizer step of any training loop.

Input: the `StepResult` of each step, and further values. Output: records on rank 0, in one or several trackers.

[Note: errors of trackers] Writing is not collective, because an agreement in each step would cost an all-reduce and
wait for the slowest rank. An error while writing is deferred: it is logged at once, and the next optimizer step raises
it on every rank, with the all-reduce of its gradient norm. `Metrics.close` raises an error of the last record. So no
rank waits for a rank that has ended, and no record is lost silently.
"""

from __future__ import annotations

import dataclasses
import logging
import numbers
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.distributed.agreement import all_or_none, defer_error, error_text, withdraw_error
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.errors import ArgumentError, StepError
from fsdp2_strategy.optim.step import StepResult
from fsdp2_strategy.tracking.trackers import Tracker, start_trackers

_MEASURED = (
    "samples",
    "samples_per_second",
    "mfu",
    "model_flops",
    "hardware_flops",
    "data_seconds",
    "save_seconds",
    "memory_allocated_bytes",
    "memory_reserved_bytes",
)
"""Numbers of a strategy's steps, by their names in `StepResult`."""
_OWN = ("step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "seconds_per_step", "skipped", *_MEASURED)


class Metrics:
    """Write one record per optimizer step to trackers; every rank must construct one, and rank 0 writes.

    The constructor and `close` are collective if there is a process group; `log` is not. As a context manager, it
    closes the trackers. In a resumed run, trackers continue the files of the earlier process.

    Args:
        trackers: "jsonl", "tensorboard", "wandb", or `Tracker` objects; one or several.
        run_id: name of the run, and of its files.
        run_dir: directory of the files.
        hparams: settings of the run, which trackers write once: a mapping; or a StrategyConfig, of which all fields are
            written, because defaults may differ in other versions, and the trainer's arguments in ``extra``.
        wandb_project, wandb_entity: as for `WeightsBiasesTracker`.

    Raises:
        ConfigError: on every rank: a tracker is unknown or cannot start.

    Example:
        >>> with Metrics([], run_id="doc", run_dir="runs") as metrics:
        ...     metrics.log(StepResult(step=1, stepped=True, skipped=False, grad_norm=0.5, loss=2.0, lr=0.1), reward=1)
    """

    def __init__(
        self,
        trackers: str | Tracker | Sequence[str | Tracker],
        *,
        run_id: str,
        run_dir: str | Path,
        hparams: Mapping[str, Any] | StrategyConfig | None = None,
        wandb_project: str | None = None,
        wandb_entity: str | None = None,
    ) -> None:
        self.trackers = start_trackers(
            trackers,
            run_id,
            run_dir,
            _settings(hparams) if isinstance(hparams, StrategyConfig) else (hparams or {}),
            wandb_project=wandb_project,
            wandb_entity=wandb_entity,
        )
        self._is_closed = False
        self._error: StepError | None = None
        self._last_record = time.monotonic()

    def log(self, result: StepResult, /, **values: float | torch.Tensor) -> None:
        """Write a record if this result is of a step that was taken or skipped; not collective.

        A record consists of ``step``, ``loss``, ``lr``, ``grad_norm`` and ``tokens`` of the result (see `StepResult`);
        ``skipped``, 0 or 1; ``seconds_per_step``, the wall-clock time since the previous record or the construction,
        including evaluation and saves; ``tokens_per_second``; what a strategy measures of its steps, such as ``mfu``
        and ``memory_allocated_bytes`` (docs/metrics.md); and the further values. Unknown numbers are omitted. A skipped
        step has the number that it would have had if it had been taken.

        Args:
            result: what `optimizer_step` returned.
            **values: further values by name, each a number or a tensor of one element; those of rank 0 are written.
                Reading a tensor synchronises rank 0 with its device.

        Raises:
            ArgumentError: a further value has the name of another number of the record, or is not a number.
            StepError: these metrics are closed. An error while writing is raised by the next optimizer step, or by
                `close`, on every rank; see [Note: errors of trackers].
        """
        self._check(values)
        if not (result.stepped or result.skipped):
            return
        now = time.monotonic()
        seconds, self._last_record = now - self._last_record, now
        if not is_rank_0():
            return
        step = result.step + result.skipped
        known = {
            "step": step,
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens": result.tokens,
            "tokens_per_second": result.tokens / seconds if result.tokens is not None and seconds else None,
            "seconds_per_step": seconds,
            "skipped": int(result.skipped),
            **{name: getattr(result, name) for name in _MEASURED},
        }
        try:
            record = {name: value for name, value in known.items() if value is not None}
            record |= {name: v if isinstance(v, int | float) else v.item() for name, v in values.items()}
            for tracker in self.trackers:
                tracker.write(step, record)
        except Exception as error:  # noqa: BLE001  a tracker may be any class
            self._defer(error, step)

    @collective
    def close(self) -> None:
        """Close the trackers; collective if there is a process group. Repeated calls have no effect.

        Raises:
            StepError: on every rank: a tracker cannot be closed, or the last record could not be written.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with all_or_none("close trackers", StepError) if dist.is_initialized() else nullcontext():
            errors = [error for tracker in self.trackers if (error := _finalize(tracker)) is not None]
            if self._error is not None and withdraw_error(self._error):
                errors.insert(0, self._error)
            if errors:
                raise errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # The other ranks may be elsewhere, so this is not collective; and the block's own error matters more.
        self._is_closed = True
        if self._error is not None:
            withdraw_error(self._error)
        for tracker in self.trackers:
            _finalize(tracker)

    def _check(self, values: Mapping[str, Any]) -> None:
        if self._is_closed:
            raise StepError("cannot log metrics: they are closed, expected open ones. Call close after the last step.")
        for name, value in values.items():
            if name in _OWN:
                raise ArgumentError(
                    f"cannot log {name!r}: the record has a number of this name, expected another name. The names "
                    f"{', '.join(_OWN)} are those of the step."
                )
            if not (value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, numbers.Real)):
                shape = f" of the shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
                raise ArgumentError(
                    f"cannot log {name!r}: it is a {type(value).__name__}{shape}, expected a number or a tensor of one "
                    "element. Take its mean."
                )

    def _defer(self, cause: Exception, step: int) -> None:
        error = StepError(
            f"cannot write the metrics of step {step}: {error_text(cause)}, expected trackers that can write. Correct "
            "the cause, or remove the tracker."
        )
        error.__cause__ = cause
        log("%s", error, level=logging.ERROR)
        if self._error is None or not withdraw_error(self._error):
            self._error = error
        defer_error(self._error)


def _finalize(tracker: Tracker) -> Exception | None:
    try:
        tracker.finalize()
    except Exception as error:  # noqa: BLE001  a tracker may be any class
        return error
    return None


def _settings(config: StrategyConfig) -> dict[str, Any]:
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name != "extra"}
    return {**fields, **config.extra}
