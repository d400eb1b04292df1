"""Define `Profile`, which records torch's profiler trace of some optimizer steps of any training loop.

Input: the number of optimizer steps taken, after each of them. Output: one trace per rank, a file that
https://ui.perfetto.dev and ``chrome://tracing`` show.

[Note: profiled steps] A trace of the steps a to b begins when a - 1 steps have been taken, and ends when b have. So it
has all that the loop does for these steps: loading of batches, generation, forward, backward and optimizer step. Each
rank begins and ends with its own calls, and writes its own file, so there is no collective. A trace that has begun is
written when the run ends, too: by `Profile.close`, or at the end of the process. Ranges of the trace have the names of
the steps, and of the collective calls of this package (`lost_ranks.collective`).
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist

from fsdp2_strategy.config.strategy_config import profiled_steps
from fsdp2_strategy.distributed.agreement import all_or_none, defer_error, error_text, withdraw_error
from fsdp2_strategy.distributed.log import log, logger
from fsdp2_strategy.distributed.process_end import call_at_end
from fsdp2_strategy.distributed.torch_internals import is_profiling
from fsdp2_strategy.errors import ConfigError, StepError
from fsdp2_strategy.optim.step import StepResult

_running: set[Profile] = set()
"""Profiles whose trace has begun and is not written yet."""


class Profile:
    """Record the trace of some optimizer steps on every rank, in a loop without a strategy; collective.

    With a strategy, set ``profile`` of the configuration instead: the strategy makes all calls. See [Note: profiled
    steps] for what a trace has.

    Args:
        steps: first and last step, as in ``"10-13"`` or ``(10, 13)``; steps are counted as by `StepResult`.
        folder: directory of the traces, which is created; each is ``steps_<first>-<last>_rank<n>.pt.trace.json.gz``.
        steps_taken: optimizer steps before the block, those of a checkpoint that was loaded.

    Raises:
        ConfigError: on every rank: the steps are not two numbers in order, or a rank cannot write into the folder.

    Example::

        with Profile("10-13", "runs/sft/profile") as profile:
            for batch in loader:
                backward(model(**batch).loss, model)
                profile.step(optimizer_step(optimizer, model))
    """

    def __init__(
        self, steps: str | tuple[int, int], folder: str | Path = "profile", *, steps_taken: int | None = None
    ) -> None:
        self.folder = Path(folder)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        with all_or_none("profile", ConfigError) if dist.is_initialized() else nullcontext():
            self.first, self.last = profiled_steps(steps)
            check_writable(self.folder, self._rank)
        self._steps_taken = steps_taken or 0
        self._begun = self._latest = 0
        self._is_done = False
        self._profiler: torch.profiler.profile | None = None
        self._range = ExitStack()

    def step(self, result: StepResult) -> None:
        """Count the step of a result; call it after each `optimizer_step`; not collective.

        Raises:
            StepError: on every rank, by the next optimizer step: a rank cannot record or write its trace.
        """
        self.reached(result.step)

    def reached(self, steps: int) -> None:
        """Begin or end the trace if so many optimizer steps have been taken; not collective."""
        if self._profiler is not None:
            if steps >= self.last:
                self._end(steps)
            elif steps > self._latest:
                self._latest = steps
                self._begin_range(steps + 1)
        elif not self._is_done and self.first - 1 <= steps < self.last:
            self._begin(steps)
        elif not self._is_done and steps >= self.last:
            self._is_done = True
            log(
                "profile: the run has taken %d optimizer steps, so the steps %d to %d are not recorded again",
                steps,
                self.first,
                self.last,
                level=logging.WARNING,
            )

    def loaded(self, steps: int) -> None:
        """Begin the trace again if a checkpoint with so many optimizer steps was loaded before the first recorded step.

        Not collective.
        """
        if self._profiler is not None and self._latest == self._begun != steps:
            self._stop()
        self.reached(steps)

    def close(self) -> None:
        """End a trace that has begun, and write the steps that were recorded; not collective.

        An error is logged only: no step follows that could raise it on every rank.
        """
        if self._profiler is not None and (error := self._end(self._latest)) is not None:
            withdraw_error(error)
        self._is_done = True

    def __enter__(self) -> Self:
        self.reached(self._steps_taken)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, steps: int) -> None:
        if is_profiling():  # torch would end the process
            self._fail("begin", "another profiler runs in this process", "Use one of them at a time.")
            return
        self._begun = self._latest = steps
        activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()
        _running.add(self)
        self._begin_range(steps + 1)
        log("profile: recording the optimizer steps %d to %d", steps + 1, self.last)

    def _begin_range(self, number: int) -> None:
        self._range.close()
        self._range.enter_context(torch.profiler.record_function(f"optimizer step {number}"))

    def _stop(self) -> torch.profiler.profile | None:
        profiler, self._profiler = self._profiler, None
        _running.discard(self)
        self._range.close()
        if profiler is not None:
            profiler.stop()
        return profiler

    def _end(self, steps: int) -> StepError | None:
        """Write the trace, first under another name, so that a file with its own name is complete."""
        self._is_done = True
        first, last = self._begun + 1, max(steps, self._begun + 1)
        name = f"steps_{first}-{last}_rank%s.pt.trace.json.gz"
        path = self.folder / (name % self._rank)
        partial = path.with_name(f"partial_{path.name}")
        if not is_profiling():
            self._stop()
            return self._fail("write", "another profiler has run since it began", "Use one of them at a time.")
        try:
            if (profiler := self._stop()) is not None:
                profiler.export_chrome_trace(str(partial))
                partial.replace(path)
        except (OSError, RuntimeError) as error:
            return self._fail("write", error_text(error), "Correct the cause, or profile no steps.")
        is_short = steps < self.last
        log(
            "profile: %s to %s, one file per rank; https://ui.perfetto.dev shows them",
            f"the run has ended before step {self.last}; wrote the trace from step {first} on"
            if is_short
            else f"wrote the trace of the optimizer steps {first} to {last}",
            self.folder / (name % "<n>"),
        )
        return None

    def _fail(self, action: str, cause: str, fix: str) -> StepError:
        self._is_done = True
        error = StepError(
            f"cannot {action} the profile of the steps {self.first} to {self.last} on rank {self._rank}: {cause}, "
            f"expected torch's profiler to record them and to write into {self.folder}. {fix}"
        )
        logger.error("%s", error)
        defer_error(error)
        return error


def check_writable(folder: Path, rank: int) -> None:
    """Create a folder, and raise ConfigError unless this rank can write into it; not collective."""
    probe = folder / f".rank{rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot profile: profile_dir {folder} is not writable ({error.strerror}), expected a folder that every "
            "rank can create and write. Set profile_dir to one."
        ) from None


def _end_running() -> None:
    for profile in list(_running):
        profile.close()


call_at_end(_end_running)
