"""Run LeRobot's own training script with this package, which replaces its accelerator and its checkpoints.

Input: the script's configuration and the objects that it builds. Output: its loop, on a policy that `FSDPV2Strategy`
shards, with checkpoints in LeRobot's layout. `run` replaces names in the script's module; nothing of it is edited:

    make_accelerator                          `Accelerator`, which owns a strategy
    set_fsdp_wrap_modules,                    nothing: the strategy finds the blocks, and gathers parameters for the
    finalize_sharded_policy                   policy's entry points
    save_checkpoint, update_last_checkpoint   `FSDPV2Strategy.save_ckpt`, which also sets the link ``last``
    resume_before_prepare                     the step of ``training_step.json``
    resume_after_prepare                      `FSDPV2Strategy.load_ckpt`

Source of the names: LeRobot 0.6.2, ``lerobot/scripts/lerobot_train.py`` and ``lerobot/distributed``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp2_strategy.checkpoint.paths import TRAINING_STATE, TRAINING_STEP
from fsdp2_strategy.checkpoint.random_state import load_rng, rng_content
from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.distributed.collectives import all_reduce
from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.lerobot.checkpoint_layout import LeRobotLayout
from fsdp2_strategy.strategy import FSDPV2Strategy


class Accelerator:
    """The part of accelerate's ``Accelerator`` that LeRobot's training script uses, over an `FSDPV2Strategy`.

    Args:
        cfg: LeRobot's ``TrainPipelineConfig``. ``parallelism.dp_shard``, ``accelerator.mixed_precision``,
            ``accelerator.gradient_accumulation`` and ``accelerator.fsdp`` become the configuration of the strategy.

    Raises:
        ConfigError: the configuration requests what this class lacks: EMA, environments in the loop, a reward model,
            compilation, activation checkpointing, or context parallelism; or it saves within an optimizer step.
    """

    def __init__(self, cfg: Any) -> None:
        _check_supported(cfg)
        settings, sharding = cfg.accelerator, cfg.accelerator.fsdp
        self.strategy = FSDPV2Strategy(
            config=StrategyConfig(
                seed=cfg.seed or 0,
                max_norm=0.0,  # the script clips
                bf16=settings.mixed_precision == "bf16",
                fp16=settings.mixed_precision == "fp16",
                gradient_accumulation_steps=settings.gradient_accumulation.steps,
                accumulation="optimizer_step",
                shard_size=cfg.parallelism.dp_shard,
                reshard_after_forward=sharding.reshard_after_forward,
                block_class_names=tuple(sharding.wrap_modules or ()),
                min_unit_params=sharding.min_num_params,
                cpu_offload=sharding.cpu_offload,
            )
        )
        self.num_processes, self.process_index = self.strategy.world_size, dist.get_rank()
        self.device, self.is_main_process = self.strategy.device, self.strategy.is_rank_0()
        self.sync_gradients = False
        self._micro_batches = 0
        self.loader: _ResumedLoader | None = None
        self._policy: Any = None
        self._optimizer: Any = None

    def prepare(
        self, policy: nn.Module, optimizer: Optimizer, loader: Any, schedule: Any, *others: Any
    ) -> tuple[Any, ...]:
        """Shard the policy, give the optimizer its sharded parameters, and divide batches between ranks; collective.

        Returns:
            The arguments, in this order. ``step`` of the optimizer calls the strategy.
        """
        if schedule is None:
            self._policy, self._optimizer = self.strategy.prepare((policy, optimizer))
        else:
            self._policy, self._optimizer, schedule = self.strategy.prepare((policy, optimizer, schedule))
        self.loader = _ResumedLoader(self._divided(loader))
        return self._policy, _SteppingOptimizer(self), self.loader, schedule, *(self._divided(each) for each in others)

    def _divided(self, loader: Any) -> Any:
        """Return a loader of this rank's batches, as accelerate makes it; LeRobot derives its data position from it."""
        from accelerate.data_loader import prepare_data_loader  # noqa: PLC0415  LeRobot requires it

        ranks = {"num_processes": self.num_processes, "process_index": self.process_index}
        return prepare_data_loader(loader, self.device, **ranks, put_on_device=True, even_batches=True)

    @contextlib.contextmanager
    def accumulate(self, _policy: nn.Module) -> Iterator[None]:
        """Count a micro-batch; ``sync_gradients`` is True in the last one of an optimizer step."""
        self._micro_batches += 1
        self.sync_gradients = self._micro_batches % self.strategy.accumulated_gradient == 0
        yield

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Compute in the half-precision dtype where torch's autocast does."""
        config = self.strategy.config
        dtype = torch.float16 if config.fp16 else torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=config.bf16 or config.fp16)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of one micro-batch; collective."""
        self.strategy.backward(loss, self._policy, self._optimizer)

    def clip_grad_norm_(self, _parameters: Any, max_norm: float) -> torch.Tensor:
        """Clip the policy's gradients, and return their norm before; collective."""
        return torch.tensor(self.strategy.clip_grad_norm(self._policy, max_norm))

    def unwrap_model(self, policy: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
        """Return the policy without wrappers; not collective."""
        return self.strategy.unwrap_model(policy)

    def reduce(self, tensor: torch.Tensor, reduction: Literal["sum", "mean"] = "sum") -> torch.Tensor:
        """Return the sum or the mean over all ranks; collective."""
        reduced: torch.Tensor = all_reduce(tensor, reduction)
        return reduced

    def wait_for_everyone(self) -> None:
        """Wait for all ranks; collective."""
        dist.barrier()

    def end_training(self) -> None:
        """Wait for the last save, and close the strategy; collective."""
        self.strategy.close()


class _ResumedLoader:
    """A loader whose first pass in a resumed run does not change the random state.

    An iterator draws a seed for its workers. The uninterrupted run drew it before the checkpoint, and would otherwise
    get other random numbers than the resumed run, which draws it after the load.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.random_state: bytes | None = None
        """Random state after the load of a checkpoint; None if there was none, or after the first batch."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if self.random_state is not None:
                load_rng(self.random_state)
                self.random_state = None
            yield batch

    def __len__(self) -> int:
        return len(self._loader)


class _SteppingOptimizer:
    """The optimizer as LeRobot's script uses it: steps with the strategy, which also clears the gradients."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self.optimizer = accelerator, accelerator._optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def step(self) -> None:
        """End a micro-batch; after the last one, step the optimizer and clear the gradients; collective."""
        self._accelerator.strategy.optimizer_step(self.optimizer, self._accelerator._policy)

    def zero_grad(self) -> None:
        """Do nothing: after a step the gradients are cleared, and before it they accumulate."""


def _check_supported(cfg: Any) -> None:
    settings, topology = cfg.accelerator, cfg.parallelism
    requested = {
        "--ema.enable": cfg.ema.enable,
        "--env.type": cfg.env is not None,
        "--peft": cfg.peft is not None,
        "a reward model": cfg.is_reward_model_training,
        "--accelerator.compile.enabled": settings.compile.enabled,
        "--accelerator.activation_checkpointing.mode": settings.activation_checkpointing.mode.value != "none",
        "--parallelism.context_parallel": topology.cp_size > 1,
        "--accelerator.fsdp.ignored_modules": settings.fsdp.ignored_modules is not None,
    }
    if lacking := [name for name, is_requested in requested.items() if is_requested]:
        raise ConfigError(
            f"cannot run LeRobot's training script: its configuration requests {', '.join(lacking)}, expected none of "
            "these. Leave them out, or write the loop with FSDPV2Strategy: docs/vla.md, 'Moving a LeRobot loop over'."
        )
    micro_batches = settings.gradient_accumulation.steps
    if cfg.save_checkpoint and (cfg.steps % micro_batches or (cfg.save_freq > 0 and cfg.save_freq % micro_batches)):
        raise ConfigError(
            f"cannot save checkpoints: --steps is {cfg.steps}, --save_freq is {cfg.save_freq}, expected multiples of "
            f"{micro_batches}, because an optimizer step accumulates over {micro_batches} of LeRobot's steps. Change "
            "them, or pass --save_checkpoint=false."
        )
    if settings.mixed_precision not in {"no", "bf16", "fp16"}:
        raise ConfigError(
            f"cannot run LeRobot's training script: --accelerator.mixed_precision is {settings.mixed_precision!r}, "
            "expected 'no', 'bf16' or 'fp16'. Pass one of these."
        )


def make_accelerator(cfg: Any) -> Accelerator:
    """Resolve the configured parallelism for the launched ranks, and return the accelerator; collective."""
    from lerobot.configs.parallelism import world_size_from_env  # noqa: PLC0415  not a dependency

    cfg.parallelism.resolve(world_size_from_env())
    return Accelerator(cfg)


def save_checkpoint(
    checkpoint_dir: Path,
    step: int,
    cfg: Any,
    policy: nn.Module,
    optimizer: _SteppingOptimizer,
    scheduler: Any = None,
    preprocessor: Any = None,
    postprocessor: Any = None,
    accelerator: Any = None,
) -> None:
    """Save a checkpoint in LeRobot's layout, and set the link ``last``; collective.

    Arguments are those of LeRobot's function of this name; ``step`` counts micro-batches.

    Raises:
        CheckpointError: see `FSDPV2Strategy.save_ckpt`.
    """
    layout = LeRobotLayout(
        total_steps=cfg.steps,
        batch_size=cfg.batch_size,
        gradient_accumulation_steps=accelerator.strategy.accumulated_gradient,
        micro_batches=step,
        train_config=cfg,
        preprocessor=preprocessor,
        postprocessor=postprocessor,
    )
    accelerator.strategy.save_ckpt(
        policy,
        checkpoint_dir.parent,
        checkpoint_dir.name,
        max_num=None,
        max_mem=None,
        optimizer=optimizer.optimizer,
        scheduler=scheduler,
        layout=layout,
    )


def resume_before_prepare(cfg: Any) -> int:
    """Return the number of micro-batches that a checkpoint's run has trained on."""
    recorded = json.loads((cfg.checkpoint_path / TRAINING_STATE / TRAINING_STEP).read_text())
    return int(recorded["step"])


def resume_after_prepare(
    cfg: Any, accelerator: Accelerator, policy: nn.Module, _optimizer: Any, scheduler: Any
) -> None:
    """Load a checkpoint's weights, optimizer, schedule and random state; collective."""
    path = Path(cfg.checkpoint_path).resolve()
    accelerator.strategy.load_ckpt(policy, path.parent, accelerator._optimizer, scheduler, tag=path.name)
    if accelerator.loader is not None:
        accelerator.loader.random_state = rng_content()


def _nothing(*_arguments: Any) -> None:
    """Replace a step of the script that the strategy does itself."""


_REPLACED = {
    "make_accelerator": make_accelerator,
    "set_fsdp_wrap_modules": _nothing,
    "finalize_sharded_policy": _nothing,
    "save_checkpoint": save_checkpoint,
    "update_last_checkpoint": _nothing,
    "resume_before_prepare": resume_before_prepare,
    "resume_after_prepare": resume_after_prepare,
}


def run(script: ModuleType) -> None:
    """Run a training script with its accelerator and its checkpoints replaced.

    Args:
        script: the module ``lerobot.scripts.lerobot_train``, or an edited copy that has its names.

    Raises:
        ConfigError: the script lacks one of the names that are replaced.
    """
    if missing := [name for name in _REPLACED if not hasattr(script, name)]:
        raise ConfigError(
            f"cannot run {script.__name__}: it lacks {', '.join(missing)}, expected LeRobot 0.6's training script. "
            "Install LeRobot 0.6."
        )
    with contextlib.ExitStack() as stack:
        for name, value in _REPLACED.items():
            stack.enter_context(patch.object(script, name, value))
        script.main()
