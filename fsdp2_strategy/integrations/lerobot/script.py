"""Run LeRobot's own training script with this package, which replaces its accelerator and its checkpoints.

Input: the script's configuration and the objects that it builds. Output: its loop, on a policy that `FSDPV2Strategy`
shards, with checkpoints in LeRobot's layout. `run` replaces names in the script's module; nothing of it is edited:

    make_accelerator                          `Accelerator`, which owns a strategy
    set_fsdp_wrap_modules,                    nothing: the strategy finds the blocks, and gathers parameters for the
    finalize_sharded_policy                   policy's entry points
    save_checkpoint, update_last_checkpoint   `FSDPV2Strategy.save_ckpt`, which also sets the link ``last``
    resume_before_prepare                     the step of ``training_step.json``
    resume_after_prepare                      `FSDPV2Strategy.load_ckpt`
    eval_policy_all                           the same, and the ranks that wait take part; see `evaluation`
    TrainPipelineConfig                       the same, but adapters and environments are allowed with a sharded policy

Source of the names: LeRobot 0.6.2, ``lerobot/scripts/lerobot_train.py`` and ``lerobot/distributed``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import patch

from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.integrations.lerobot.accelerator import Accelerator
from fsdp2_strategy.integrations.lerobot.checkpoints import resume_after_prepare, resume_before_prepare, save_checkpoint

__all__ = ["Accelerator", "resume_after_prepare", "resume_before_prepare", "run", "save_checkpoint"]


def run(script: ModuleType) -> None:
    """Run a training script with its accelerator and its checkpoints replaced; collective.

    Args:
        script: the module ``lerobot.scripts.lerobot_train``, or an edited copy that has its names.

    Raises:
        ConfigError: the script lacks one of the names that are replaced.
    """
    replacements = _replacements(script)
    missing = [name for name in replacements if not hasattr(script, name)]
    config = getattr(script, "TrainPipelineConfig", None)
    if not hasattr(config, "_validate_distributed"):
        missing.append("TrainPipelineConfig._validate_distributed")
    if missing:
        raise ConfigError(
            f"cannot run {script.__name__}: it lacks {', '.join(missing)}, expected the training script of LeRobot "
            "0.6.2 or newer. Install LeRobot from its repository if no package is as new."
        )
    with contextlib.ExitStack() as stack:
        for name, function in replacements.items():
            stack.enter_context(patch.object(script, name, function))
        validate = _validate_distributed(config._validate_distributed)  # type: ignore[union-attr]
        stack.enter_context(patch.object(config, "_validate_distributed", validate))
        script.main()


def _replacements(script: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the functions that replace those of a script, by name."""
    evaluate: Any = getattr(script, "eval_policy_all", None)
    accelerator: Accelerator | None = None

    def make_accelerator(cfg: Any) -> Accelerator:
        from lerobot.configs.parallelism import world_size_from_env  # noqa: PLC0415  not a dependency

        nonlocal accelerator
        cfg.parallelism.resolve(world_size_from_env())
        accelerator = Accelerator(cfg)
        return accelerator

    def evaluate_with_all_ranks(*, policy: Any, **arguments: Any) -> Any:  # rank 0 calls it, and the others wait
        assert accelerator is not None and accelerator.evaluation is not None
        with accelerator.evaluation.leading(policy):
            return evaluate(policy=policy, **arguments)

    return {
        "make_accelerator": make_accelerator,
        "set_fsdp_wrap_modules": _nothing,
        "finalize_sharded_policy": _nothing,
        "save_checkpoint": save_checkpoint,
        "update_last_checkpoint": _nothing,
        "resume_before_prepare": resume_before_prepare,
        "resume_after_prepare": resume_after_prepare,
        "eval_policy_all": evaluate_with_all_ranks,
    }


def _nothing(*_arguments: Any) -> None:
    """Replace a step of the script that the strategy does itself."""


def _validate_distributed(validate: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return LeRobot's check of a configuration, without its refusal of adapters and environments when sharding."""

    def check(cfg: Any) -> None:
        with patch.object(cfg, "peft", None), patch.object(cfg, "env", None):
            validate(cfg)

    return check
