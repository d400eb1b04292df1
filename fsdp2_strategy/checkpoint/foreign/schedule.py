"""Restore a schedule from the checkpoint of another system, also from the state of another kind of schedule.

Input: a schedule, the saved state and position. Output: the schedule at this position. Not collective.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fsdp2_strategy.checkpoint.load_options import NO_SCHEDULER
from fsdp2_strategy.checkpoint.training_state import advance_scheduler, restore_scheduler
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.errors import CheckpointError, shown

_SCHEDULE_FLAGS = {"_is_initial", "_get_lr_called_within_step", "verbose", "_initial_step", "lr_lambdas"}
"""Entries of a schedule that some versions of torch do not save."""


def restore_foreign_schedule(
    scheduler: LRScheduler, saved: Mapping[str, Any] | None, position: int, *, has_new_rates: bool
) -> None:
    """Restore a schedule, or advance it to the saved position if the saved state is of another kind.

    Logs a warning if the schedule has other learning rates at this position than the optimizer had.

    Args:
        scheduler: the schedule.
        saved: the saved state; None if there is none.
        position: the number of steps of the saved schedule.
        has_new_rates: whether the learning rates of the optimizer's groups were restored.
    """
    saved_rates = [float(group["lr"]) for group in scheduler.optimizer.param_groups] if has_new_rates else None
    _restore_schedule(scheduler, saved, position, has_new_rates=has_new_rates)
    if saved_rates is not None:
        _check_rates(scheduler, saved_rates, position)


def _restore_schedule(
    scheduler: LRScheduler, saved: Mapping[str, Any] | None, position: int, *, has_new_rates: bool
) -> None:
    own = scheduler.state_dict()
    is_same = saved is not None and own.keys() - _SCHEDULE_FLAGS <= saved.keys() and position == saved["last_epoch"]
    groups = scheduler.optimizer.param_groups
    has_rates = has_new_rates and all("initial_lr" in group for group in groups)
    if saved is None or not is_same:
        if has_rates:
            _set_base_lrs(scheduler, [float(group["initial_lr"]) for group in groups])
        advance_scheduler(scheduler, position)
        return
    state = {key: value for key, value in saved.items() if key in own}
    if "lr_lambdas" in own:
        lambdas = state.get("lr_lambdas")
        is_plain = isinstance(lambdas, list) and all(each is None or isinstance(each, Mapping) for each in lambdas)
        state["lr_lambdas"] = lambdas if is_plain else [None] * len(own["lr_lambdas"])
    if has_rates:
        # By parameter, where the groups may have another order.
        state["base_lrs"] = [float(group["initial_lr"]) for group in groups]
        state["_last_lr"] = [float(group["lr"]) for group in groups]
    for key, value in state.items():
        if isinstance(value, str) and not isinstance(own.get(key), str):
            raise CheckpointError(
                f"cannot load the schedule: its {key} is {shown(value)}, expected a value such as {shown(own.get(key))}"
                f". Use the schedule of the saved run, or pass {NO_SCHEDULER}."
            )
    restore_scheduler(scheduler, state)


def _check_rates(scheduler: LRScheduler, saved: Sequence[float], position: int) -> None:
    """Log a warning if a schedule has other learning rates at its position than the saved ones."""
    rates = [group["lr"] for group in scheduler.optimizer.param_groups]
    if isinstance(scheduler, LambdaLR):  # its functions are not in the saved state
        with warnings.catch_warnings(action="ignore"):  # torch warns outside of a step
            rates = scheduler.get_lr()
    own = [float(rate) for rate in rates]
    tolerance = 1e-6 * max([*own, *saved])
    different = [pair for pair in zip(own, saved, strict=True) if abs(pair[0] - pair[1]) > tolerance]
    if different:
        message = (
            "the schedule gives the learning rate %.6g at step %d, where the saved optimizer had %.6g: the run goes on "
            "with that of the schedule. Create the schedule of the saved run to go on with its learning rates"
        )
        log(message, different[0][0], position, different[0][1], level=logging.WARNING)


def _set_base_lrs(scheduler: LRScheduler, rates: list[float]) -> None:
    """Set the learning rates that a schedule multiplies, also in the schedules that it consists of."""
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = list(rates)
    for inner in vars(scheduler).get("_schedulers", ()):
        _set_base_lrs(inner, rates)
