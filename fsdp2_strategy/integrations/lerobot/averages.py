"""Average a policy's weights as LeRobot's training script does with ``--ema.enable``, on shards.

Input: the script's ``ema`` options, and the policy after each optimizer step. Output: an `EMA`. The script itself keeps
the averages on one rank, and refuses sharded policies.

Source of the schedule: ``EMAModel`` of diffusers 0.38, which LeRobot 0.6 uses.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp2_strategy.optim.ema import EMA


class Averages:
    """The averages of a policy's trainable parameters, and the schedule of their decay.

    Args:
        policy: a prepared policy.
        options: LeRobot's ``EMAConfig``.
    """

    def __init__(self, policy: nn.Module, options: Any) -> None:
        self.options, self.ema = options, EMA(policy)
        self.steps = 0
        """Optimizer steps that were averaged."""

    def update(self, policy: nn.Module) -> None:
        """Update the averages after an optimizer step; not collective."""
        self.steps += 1
        self.ema.update(policy, self.decay)

    @property
    def decay(self) -> float:
        """The decay of the last step: 0 up to ``update_after_step``, then constant or rising to ``max_decay``."""
        options, step = self.options, self.steps - self.options.update_after_step - 1
        if step <= 0:
            return 0.0
        if options.decay is not None:
            return float(options.decay)
        decay = 1 - (1 + step / options.inv_gamma) ** -options.power
        return float(max(min(decay, options.max_decay), options.min_decay))
