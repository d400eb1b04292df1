"""Count the micro-batches of an optimizer step, and decide when the step is due.

Input: the calls of ``backward`` and ``optimizer_step`` for a model. Output: whether the next backward pass is in the
last micro-batch of a step, and whether ``optimizer_step`` must step.

[Note: micro-batches] Training loops differ in where a micro-batch ends. Take a step of four micro-batches:

1. ``backward``, then ``optimizer_step``, four times. Each call of ``optimizer_step`` ends a micro-batch.
2. ``backward`` twice, for two losses, then ``optimizer_step``; all of this four times. Again, each call of
   ``optimizer_step`` ends a micro-batch.
3. ``backward`` four times, then ``optimizer_step`` once. Each call of ``backward`` is a micro-batch.

By default, a micro-batch ends at ``optimizer_step``. But in the third loop, the first call of ``optimizer_step`` finds
as many backward passes as a step has micro-batches; so it would in the second loop, if there were four losses. To guess
would change the batch size silently, so this is an error. It names the two ways to say what is meant:
`TrainingStrategy.accumulate` for the third loop, and the rule ``"optimizer_step"`` for the second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.config.strategy_config import AccumulationRule
from fsdp2_strategy.errors import CheckpointError, StepError, shown
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.optim.step_sums import MicroBatchSums


@dataclass
class LossScale:
    """Loss scale for float16: doubles after ``interval`` successive finite steps, halves after any other step."""

    value: float = 2.0**16
    interval: int = 2000
    good_steps: int = 0
    """Successive finite steps since the scale last changed."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> LossScale:
        """Return the scale that a checkpoint has, in the form of ``asdict``."""
        value, counts = saved.get("value"), [saved.get("interval"), saved.get("good_steps")]
        is_scale = type(value) in (int, float) and value is not None and 0 < value < math.inf
        are_counts = all(type(count) is int and 0 <= count < 1 << 62 for count in counts)
        if saved.keys() != {"value", "interval", "good_steps"} or not is_scale or not are_counts:
            raise CheckpointError(
                f"cannot restore the loss scale: it is {shown(saved)}, expected value, interval and good_steps. Load "
                "another checkpoint."
            )
        return cls(**saved)

    def update(self, *, finite: bool) -> None:
        """Adapt the scale to one step; not collective: the gradient norm, and so the scale, is equal on all ranks."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, 1.0)
        elif self.good_steps == self.interval:
            self.value, self.good_steps = self.value * 2, 0


@dataclass(frozen=True, kw_only=True)
class ReducedStep:
    """What ranks exchange for an optimizer step, in one all-reduce."""

    norm: float
    """Global norm of the gradients before clipping, with a loss scale divided by it."""
    divisor: float
    """The sum of ``num_items`` over all ranks, per rank; 1 if it was not passed."""
    loss: float
    tokens: int | None
    have_buffers_changed: bool
    has_equal_losses: bool


class Measurements(Protocol):
    """Numbers of a step that its all-reduce sums over the ranks, in addition to those that the step needs."""

    def numbers(self) -> list[float]:
        """Return this rank's numbers, equally many on all ranks; called within the ranks of the model."""

    def receive(self, sums: Sequence[float]) -> None:
        """Take the sums of `numbers` over the ranks."""


@dataclass
class Accumulation:
    """The gradient accumulation state of a model; see [Note: micro-batches].

    Methods take the ``rule``, and ``count``, the number of micro-batches of a step in the configuration.
    """

    micro_batches: int = 0
    """Complete micro-batches of the coming step."""
    backward_passes: int = 0
    """Backward passes of the current micro-batch, if `optimizer_step` ends it."""
    declared: int | None = None
    """Number of micro-batches of the coming step, in a block of `TrainingStrategy.accumulate`."""
    size_of_step: int | None = 1
    """Number of micro-batches of the step of the latest backward pass; None if the caller decides when to step."""
    steps: int = 0
    scale: LossScale | None = None
    """Loss scale of float16 training; None for other dtypes."""
    checked_optimizer: ref[Optimizer] | None = None
    """The optimizer that last passed the check of its parameters."""
    stepped_schedule: tuple[ref[LRScheduler], int | None] | None = None
    """The schedule of the latest step, and its position after it; None without a schedule, or after a load."""
    has_said_stepped_twice: bool = False
    steps_with_equal_losses: int = 0
    """Successive steps in which all ranks had the same loss, though their batches should differ."""
    has_said_equal_losses: bool = False
    last_sync: bool | None = None
    """The ``is_last`` of the latest `_set_gradient_sync` in `backward`; None (no call yet) acts like True."""
    sums: MicroBatchSums = field(default_factory=MicroBatchSums)
    """Loss and tokens of these micro-batches; the first backward pass of a step starts new sums."""
    reduced: ReducedStep | None = None
    """What ranks have exchanged for the coming step, if gradients were clipped since the last backward pass."""
    measurements: Measurements | None = None
    """What a strategy measures of each step; None without a strategy."""

    @property
    def loss_scale(self) -> float:
        """The factor that the loss scale adds to the loss; 1 without one."""
        return self.scale.value if self.scale else 1.0

    @property
    def is_pending(self) -> bool:
        """Whether there were backward passes since the last optimizer step."""
        return bool(self.micro_batches or self.backward_passes)

    @property
    def is_incomplete(self) -> bool:
        """Whether some, but not all, of the declared micro-batches were run."""
        return self.is_pending and (self.declared is None or self.micro_batches < self.declared)

    def reset(self) -> None:
        """Forget the backward passes since the last optimizer step."""
        self.micro_batches, self.backward_passes, self.declared, self.sums = 0, 0, None, MicroBatchSums()
        self.reduced = None

    def size(self, rule: AccumulationRule, count: int) -> int | None:
        """Return the number of micro-batches of the coming step; None if the caller decides when to step."""
        if self.declared is not None:
            return self.declared
        return None if rule == "caller" else count

    def is_last(self, rule: AccumulationRule, count: int) -> bool:
        """Return whether the next backward pass is in the last micro-batch of a step."""
        size = self.size(rule, count)
        return size is None or (self.micro_batches + 1) % size == 0

    def check_declared(self) -> None:
        """Raise StepError if all micro-batches that `accumulate` declared have been run."""
        if self.declared is not None and self.micro_batches >= self.declared:
            raise StepError(
                f"cannot run backward: all {self.declared} micro-batches that accumulate declared were run, expected "
                "optimizer_step. Call it, or declare the right number."
            )

    def add_backward(self, rule: AccumulationRule) -> None:
        """Count a backward pass."""
        self.reduced = None
        if self._ends_with_backward(rule):
            self.micro_batches += 1
        else:
            self.backward_passes += 1

    def end_micro_batch(self, rule: AccumulationRule, count: int, name: str) -> bool:
        """Count a call of ``optimizer_step``, and return whether it must step; raise if that cannot be known."""
        size = self.size(rule, count)
        if not self._ends_with_backward(rule):
            if not self.backward_passes:
                since = "the last call of optimizer_step" if self.micro_batches else "its last step"
                raise _no_backward(name, since)
            if rule == "auto" and count > 1 and not self.micro_batches and self.backward_passes % count == 0:
                passes = self.backward_passes
                raise StepError(
                    f"cannot step {name!r}: backward was called {passes} times before optimizer_step, and a step has "
                    f"{count} micro-batches: these may be {passes} micro-batches, or {passes} losses of one, expected "
                    f"to know which. For micro-batches, put the loop into 'with strategy.accumulate({passes}):', or "
                    "set accumulation='backward'. For losses, set accumulation='optimizer_step'."
                )
            if self.is_last(rule, count):
                return True  # counted by `reset` after the step, so that a step that fails can be called again
            self.micro_batches, self.backward_passes = self.micro_batches + 1, 0
            return False
        if not self.micro_batches:
            raise _no_backward(name, "its last step")
        return size is None or self.micro_batches % size == 0

    def _ends_with_backward(self, rule: AccumulationRule) -> bool:
        return rule == "backward" or (self.declared is not None and rule != "optimizer_step")


def _no_backward(name: str, since: str) -> StepError:
    return StepError(
        f"cannot step {name!r}: no backward pass since {since}, expected at least one. Call "
        "strategy.backward(loss, model, optimizer) instead of loss.backward()."
    )


_ACCUMULATION = Slot[Accumulation]("accumulation")


def accumulation_of(model: nn.Module) -> Accumulation:
    """Return the accumulation state of a model or wrapper, created on first use; not collective."""
    return model_state(unwrap_model(model)).setdefault(_ACCUMULATION, Accumulation())


def begin_accumulation(model: nn.Module, scale: LossScale | None = None) -> Accumulation:
    """Reset the accumulation state of a model or wrapper, with a loss scale for float16 training; not collective."""
    return model_state(unwrap_model(model)).set(_ACCUMULATION, Accumulation(scale=scale))
