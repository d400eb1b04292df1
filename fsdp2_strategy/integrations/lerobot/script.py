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
    replacements = _Replacements(script)
    missing = [name for name in replacements.functions if not hasattr(script, name)]
    config = getattr(script, "TrainPipelineConfig", None)
    if not hasattr(config, "_validate_distributed"):
        missing.append("TrainPipelineConfig._validate_distributed")
    if missing:
        raise ConfigError(
            f"cannot run {script.__name__}: it lacks {', '.join(missing)}, expected the training script of LeRobot "
            "0.6.2 or newer. Install LeRobot from its repository if no package is as new."
        )
    with contextlib.ExitStack() as stack:
        for name, function in replacements.functions.items():
            stack.enter_context(patch.object(script, name, function))
        validate = _validate_distributed(config._validate_distributed)  # type: ignore[union-attr]
        stack.enter_context(patch.object(config, "_validate_distributed", validate))
        script.main()


class _Replacements:
    """The functions that replace those of a script, by name."""

    def __init__(self, script: ModuleType) -> None:
        self._evaluate = getattr(script, "eval_policy_all", None)
        self._accelerator: Accelerator | None = None
        self.functions: dict[str, Callable[..., Any]] = {
            "make_accelerator": self._make_accelerator,
            "set_fsdp_wrap_modules": _nothing,
            "finalize_sharded_policy": _nothing,
            "save_checkpoint": save_checkpoint,
            "update_last_checkpoint": _nothing,
            "resume_before_prepare": resume_before_prepare,
            "resume_after_prepare": resume_after_prepare,
            "eval_policy_all": self._evaluate_with_all_ranks,
        }

    def _make_accelerator(self, cfg: Any) -> Accelerator:
        """Resolve the configured parallelism for the launched ranks, and return the accelerator; collective."""
        from lerobot.configs.parallelism import world_size_from_env  # noqa: PLC0415  not a dependency

        cfg.parallelism.resolve(world_size_from_env())
        self._accelerator = Accelerator(cfg)
        return self._accelerator

    def _evaluate_with_all_ranks(self, *, policy: Any, **arguments: Any) -> Any:
        """Evaluate a policy on rank 0, while the other ranks wait and take part."""
        assert self._accelerator is not None and self._accelerator.evaluation is not None
        with self._accelerator.evaluation.leading(policy):
            return self._evaluate(policy=policy, **arguments)  # type: ignore[misc]


def _nothing(*_arguments: Any) -> None:
    """Replace a step of the script that the strategy does itself."""


def _validate_distributed(validate: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return LeRobot's check of a configuration, without its refusal of adapters and environments when sharding."""

    def check(cfg: Any) -> None:
        with patch.object(cfg, "peft", None), patch.object(cfg, "env", None):
            validate(cfg)

    return check
