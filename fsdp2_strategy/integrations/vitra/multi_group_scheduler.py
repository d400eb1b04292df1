"""Set the learning rates of one optimizer from two schedules: one for the backbone's groups, one for the others.

Input: an optimizer with the group names of `vla_parameter_groups`, and two schedules. Output: an object that is
stepped, saved and loaded like one schedule.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.errors import OptimizerError
from fsdp2_strategy.integrations.vitra.parameter_groups import GROUPS


class MultiGroupLRScheduler:
    """Set the learning rates of one optimizer from two schedules, at construction and after each step.

    Args:
        optimizer: an optimizer whose groups have the names in `GROUPS`; some of the four may be missing.
        backbone_scheduler: the schedule of the two backbone groups. It is built on a separate optimizer with two groups
            (first with, then without weight decay), or with one group for both.
        action_model_scheduler: the schedule of the two other groups, built in the same way.

    Raises:
        OptimizerError: a group has a name that is not in `GROUPS`.
    """

    def __init__(
        self, optimizer: Optimizer, backbone_scheduler: LRScheduler, action_model_scheduler: LRScheduler
    ) -> None:
        if odd := [group.get("name") for group in optimizer.param_groups if group.get("name") not in GROUPS]:
            raise OptimizerError(
                f"cannot schedule the group {odd[0]!r}: expected one of {', '.join(GROUPS)}. Build the optimizer from "
                "vla_parameter_groups."
            )
        self.optimizer = optimizer
        self.backbone_scheduler, self.action_model_scheduler = backbone_scheduler, action_model_scheduler
        self._apply()

    def step(self) -> None:
        """Advance both schedules by one optimizer step."""
        with warnings.catch_warnings():
            # torch warns if a schedule's optimizer has not stepped; the separate optimizers never step.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.backbone_scheduler.step()
            self.action_model_scheduler.step()
        self._apply()

    def rates(self) -> dict[str, float]:
        """Return the learning rate of each of the four groups, including those without parameters."""
        rates: dict[str, float] = {}
        for scheduler, names in ((self.backbone_scheduler, GROUPS[:2]), (self.action_model_scheduler, GROUPS[2:])):
            last = [float(rate) for rate in scheduler.get_last_lr()]
            rates |= dict(zip(names, (last[0], last[min(1, len(last) - 1)]), strict=True))
        return rates

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each of the optimizer's groups; several groups may have the same name."""
        rates = self.rates()
        return [rates[group["name"]] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both schedules, as JSON values if those schedules return JSON values."""
        return {
            "backbone": self.backbone_scheduler.state_dict(),
            "action_model": self.action_model_scheduler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of both schedules, and set the learning rates of the optimizer."""
        self.backbone_scheduler.load_state_dict(state_dict["backbone"])
        self.action_model_scheduler.load_state_dict(state_dict["action_model"])
        self._apply()

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = rate
