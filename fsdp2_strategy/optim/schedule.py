"""Build learning-rate schedules by name.

Input: an optimizer and the length of the run. Output: a torch scheduler that is stepped once per optimizer step.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fsdp2_strategy.config.arguments import check_number
from fsdp2_strategy.errors import FSDP2StrategyError, OptimizerError, StepError, did_you_mean

# Schedule names of VLA trainers -> the schedule's name and options in transformers.
_ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear-warmup+cosine-decay": ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "warmup_cosine": ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "linear-warmup+constant": ("constant_with_warmup", {}),
    "warmup_constant": ("constant_with_warmup", {}),
}

BACKBONE_FREEZE = "backbone-freeze-warmup"

# Schedules whose `step` needs a metric.
_NEED_METRICS = ("reduce_lr_on_plateau", "greedy")


def build_scheduler(
    optimizer: Optimizer,
    name: str,
    *,
    num_training_steps: int | None = None,
    num_warmup_steps: int | None = None,
    warmup_ratio: float | None = None,
    **scheduler_specific_kwargs: Any,
) -> LRScheduler:
    """Build a learning-rate schedule by its name in transformers or in VLA trainers; not collective.

    Args:
        optimizer: any torch optimizer; the schedule scales the learning rate of each group.
        name: a name in transformers ("cosine", "linear", "constant_with_warmup", …), or a name in VLA trainers:
            "linear-warmup+cosine-decay" or "warmup_cosine" (decay to a tenth of the peak), "linear-warmup+constant" or
            "warmup_constant", or "backbone-freeze-warmup". The last one is constant, except that groups whose name
            begins with "backbone" have learning rate 0 for the first ``llm_freeze_step`` steps.
        num_training_steps: number of optimizer steps of the run; needed only if the schedule depends on it.
        num_warmup_steps: number of steps of the linear warm-up from 0.
        warmup_ratio: an alternative to ``num_warmup_steps``: the warm-up has int(num_training_steps * warmup_ratio)
            steps.
        **scheduler_specific_kwargs: further options of the schedule, as in transformers.

    Returns:
        A scheduler to step once per optimizer step.

    Raises:
        OptimizerError: the name is unknown; an option is missing or invalid; or both num_warmup_steps and
            warmup_ratio are given.
    """
    _check_is_optimizer(optimizer)
    check_schedule_name(name)
    for option, value in (("num_training_steps", num_training_steps), ("num_warmup_steps", num_warmup_steps)):
        if value is not None:
            check_number("build a schedule", option, value, OptimizerError, minimum=0)
    if warmup_ratio is not None:
        check_number("build a schedule", "warmup_ratio", warmup_ratio, OptimizerError)
        if num_warmup_steps is not None or num_training_steps is None or not 0 <= warmup_ratio <= 1:
            raise OptimizerError(
                f"cannot build a schedule: warmup_ratio is {warmup_ratio} with num_warmup_steps {num_warmup_steps} and "
                f"num_training_steps {num_training_steps}, expected a ratio from 0 to 1, num_training_steps, and no "
                "num_warmup_steps. Give only one of warmup_ratio and num_warmup_steps."
            )
        num_warmup_steps = int(num_training_steps * warmup_ratio)
    if name == BACKBONE_FREEZE:
        return _freeze_backbone(optimizer, **scheduler_specific_kwargs)
    from transformers import get_scheduler  # noqa: PLC0415  imports seconds of libraries, peft among them

    kind, options = _ALIASES.get(name, (name, {}))
    try:
        scheduler: LRScheduler = get_scheduler(
            kind,
            optimizer,
            num_warmup_steps=num_warmup_steps or 0,
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs={**options, **scheduler_specific_kwargs},
        )
    except (TypeError, ValueError) as error:
        given = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
        raise OptimizerError(
            f"cannot build the schedule {name!r}: the options are {given | scheduler_specific_kwargs}, expected those "
            f"of transformers.get_scheduler ({error}). Change the options."
        ) from None
    return scheduler


def _check_is_optimizer(optimizer: object) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise OptimizerError(
            f"cannot build a schedule: the optimizer is a {type(optimizer).__name__}, expected a torch optimizer. "
            "Check the order of the arguments: create_scheduler(optimizer, name)."
        )


def check_schedule_name(name: str) -> None:
    """Raise if a schedule name is unknown; not collective."""
    from transformers import SchedulerType  # noqa: PLC0415  as above

    known = [kind.value for kind in SchedulerType if kind.value not in _NEED_METRICS]
    known += [*_ALIASES, BACKBONE_FREEZE]
    if name in _NEED_METRICS:
        raise OptimizerError(
            f"cannot build a schedule: {name!r} is unknown, because its steps need a metric, expected a schedule "
            "that is stepped with the optimizer. Construct it yourself, step it after each evaluation, and pass "
            "scheduler= to save_ckpt and load_ckpt."
        )
    if name not in known:
        raise OptimizerError(
            f"cannot build a schedule: {name!r} is unknown, expected one of {', '.join(known)}."
            f"{did_you_mean(str(name), known)}"
        )


def check_schedule_of(
    scheduler: LRScheduler | None, optimizer: Optimizer | None, action: str, error: type[FSDP2StrategyError]
) -> None:
    """Raise if a schedule sets the learning rates of another optimizer, or if one of them is none; not collective."""
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise error(
            f"cannot {action}: the optimizer is a {type(optimizer).__name__}, expected a torch optimizer. Check the "
            "order of the arguments."
        )
    if scheduler is None:
        return
    if isinstance(scheduler, Optimizer | nn.Module) or not callable(getattr(scheduler, "state_dict", None)):
        raise error(
            f"cannot {action}: the schedule is a {type(scheduler).__name__}, expected a learning-rate schedule. Check "
            "the order of the arguments."
        )
    if optimizer is None or drives(scheduler, optimizer):
        return
    raise error(
        f"cannot {action}: the {type(scheduler).__name__} sets the learning rates of another "
        f"{type(scheduler.optimizer).__name__}, expected a schedule of the optimizer that is passed or in use. Create "
        "it again with create_scheduler, for this optimizer."
    )


def drives(scheduler: LRScheduler, optimizer: Optimizer) -> bool:
    """Return whether a schedule sets the learning rates of an optimizer; True if the schedule does not say."""
    own = getattr(scheduler, "optimizer", None)
    # Wrappers of an optimizer, such as accelerate's, share its groups.
    groups = getattr(own, "param_groups", None)
    return groups is None or own is optimizer or groups is getattr(optimizer, "param_groups", None)


def check_steps_without_metric(scheduler: LRScheduler) -> None:
    """Raise if a schedule cannot be stepped with the optimizer, because its steps need a metric; not collective."""
    required = [
        name
        for name, parameter in inspect.signature(scheduler.step).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    ]
    if required:
        raise StepError(
            f"cannot step the {type(scheduler).__name__} with the optimizer: its step needs {', '.join(required)}, "
            "expected a schedule that is stepped once per optimizer step. Leave it out of optimizer_step, step it "
            "yourself after each evaluation, and pass scheduler= to save_ckpt and load_ckpt."
        )


def get_constant_schedule_with_freeze_warmup(
    optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """Build a schedule whose learning rate is 0 for the first steps, then constant; not collective.

    Args:
        optimizer: any torch optimizer.
        num_warmup_steps: number of optimizer steps with learning rate 0.
        last_epoch: number of steps already taken, minus 1, as in torch.
    """
    check_number("build a schedule", "num_warmup_steps", num_warmup_steps, OptimizerError, minimum=0)
    _check_is_optimizer(optimizer)
    return LambdaLR(optimizer, partial(_zero_before, num_warmup_steps), last_epoch)


def _freeze_backbone(optimizer: Optimizer, **options: Any) -> LambdaLR:
    freeze_steps = options.get("llm_freeze_step")
    if options.keys() != {"llm_freeze_step"} or not isinstance(freeze_steps, int) or freeze_steps < 0:
        raise OptimizerError(
            f"cannot build a schedule: the options of {BACKBONE_FREEZE!r} are {options}, expected only "
            "llm_freeze_step, a number of steps. Pass it to create_scheduler."
        )
    names = [str(group.get("name", "")) for group in optimizer.param_groups]
    # Accept names that all begin with "other": the backbone has no trainable parameters, so its groups were left out.
    if not any(name.startswith("backbone") for name in names) and not all(name.startswith("other") for name in names):
        raise OptimizerError(
            f"cannot build a schedule: the names of the parameter groups are {names}, expected one that begins with "
            f"'backbone', which {BACKBONE_FREEZE!r} freezes. Build the optimizer with vla_parameter_groups."
        )
    frozen_for = [freeze_steps if name.startswith("backbone") else 0 for name in names]
    return LambdaLR(optimizer, [partial(_zero_before, steps) for steps in frozen_for])


def _zero_before(first: int, step: int) -> float:
    return float(step >= first)
