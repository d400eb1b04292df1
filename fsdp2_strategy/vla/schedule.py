"""Two schedules over one optimizer: one for the groups of the backbone, one for the rest.

Input: an optimizer whose groups are named as `vla_parameter_groups` names them, and two schedules. Output: what stands
for one schedule: it steps, it is saved, and it resumes.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.errors import OptimizerError
from fsdp2_strategy.vla.parameter_groups import GROUPS


class MultiGroupLRScheduler:
    """Drive the rates of one optimizer by two schedules, from its first step on.

    Args:
        optimizer: its groups are named as those of `vla_parameter_groups`, some of which may be missing.
        backbone_scheduler: over an optimizer of its own with the backbone's groups (decay, no decay), or one group.
        action_model_scheduler: the same for the rest.

    Raises:
        OptimizerError: a group has another name.
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
        """Go on by one optimizer step."""
        with warnings.catch_warnings():
            # The optimizers that they are made over lend them their rates, and never step.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.backbone_scheduler.step()
            self.action_model_scheduler.step()
        self._apply()

    def rates(self) -> dict[str, float]:
        """Return the rate of each of the four groups, also of those that have no parameters."""
        rates: dict[str, float] = {}
        for scheduler, names in ((self.backbone_scheduler, GROUPS[:2]), (self.action_model_scheduler, GROUPS[2:])):
            last = [float(rate) for rate in scheduler.get_last_lr()]
            rates |= dict(zip(names, (last[0], last[min(1, len(last) - 1)]), strict=True))
        return rates

    def get_last_lr(self) -> list[float]:
        """Return the rate of each group of the optimizer; four where all have parameters, of one dtype and mesh."""
        rates = self.rates()
        return [rates[group["name"]] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return how far both schedules are, as JSON."""
        return {
            "backbone": self.backbone_scheduler.state_dict(),
            "action_model": self.action_model_scheduler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state."""
        self.backbone_scheduler.load_state_dict(state_dict["backbone"])
        self.action_model_scheduler.load_state_dict(state_dict["action_model"])
        self._apply()

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = rate
