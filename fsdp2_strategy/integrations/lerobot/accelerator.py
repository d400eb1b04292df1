"""Give LeRobot's training script an accelerator over `FSDPV2Strategy`.

Input: the script's configuration, and the policy, optimizer and loaders that it builds. Output: the methods of
accelerate's ``Accelerator`` that the script calls.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp2_strategy.checkpoint.random_state import load_rng
from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.distributed import spent_time
from fsdp2_strategy.distributed.collectives import all_reduce
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.integrations.lerobot.evaluation import Evaluation
from fsdp2_strategy.optim.ema import EMA
from fsdp2_strategy.strategy import FSDPV2Strategy
from fsdp2_strategy.tracking.step_log import Output


class Accelerator:
    """The part of accelerate's ``Accelerator`` that LeRobot's training script uses, over an `FSDPV2Strategy`.

    Args:
        cfg: LeRobot's ``TrainPipelineConfig``. ``parallelism.dp_shard``, ``accelerator.mixed_precision``,
            ``accelerator.gradient_accumulation`` and ``accelerator.fsdp`` become the configuration of the strategy.

    Raises:
        ConfigError: the configuration requests what this class lacks: a reward model, EMA of adapters, compilation,
            activation checkpointing, or context parallelism; or it saves within an optimizer step.
    """

    def __init__(self, cfg: Any) -> None:
        _check_supported(cfg)
        self._cfg = cfg
        settings, sharding = cfg.accelerator, cfg.accelerator.fsdp
        self.strategy = ScriptStrategy(
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
                log_every_seconds=StrategyConfig.log_every_seconds if cfg.log_freq > 0 else 0.0,
            )
        )
        self.num_processes, self.process_index = self.strategy.world_size, dist.get_rank()
        self.device, self.is_main_process = self.strategy.device, self.strategy.is_rank_0()
        self.sync_gradients = False
        self._micro_batches = 0
        self.loader: ResumedLoader | None = None
        self.optimizer: Any = None
        """The optimizer that checkpoints save, and that the script's optimizer steps."""
        self.averages: Averages | None = None
        """Averaged weights, with ``--ema.enable``."""
        self.evaluation: Evaluation | None = None
        """Evaluations in an environment, with ``--env.type``."""
        if cfg.env is not None:
            self.evaluation = Evaluation(self.device, self._evaluated_weights, self.autocast)
        self._policy: Any = None

    def prepare(
        self, policy: nn.Module, optimizer: Optimizer, loader: Any, schedule: Any, *others: Any
    ) -> tuple[Any, ...]:
        """Shard the policy, give the optimizer its sharded parameters, and divide batches between ranks; collective.

        Returns:
            The arguments, in this order. ``step`` of the optimizer calls the strategy.
        """
        if schedule is None:
            self._policy, self.optimizer = self.strategy.prepare((policy, optimizer))
        else:
            self._policy, self.optimizer, schedule = self.strategy.prepare((policy, optimizer, schedule))
        self.strategy.set_total_steps(self._policy, self._cfg.steps // self.strategy.accumulated_gradient)
        if self._cfg.ema.enable:
            self._average(self._cfg.ema)
        self.loader = ResumedLoader(self._divided(loader))
        return self._policy, SteppingOptimizer(self), self.loader, schedule, *(self._divided(each) for each in others)

    def _average(self, options: Any) -> None:
        """Average the weights here, and hide the option from the script, which refuses it for a sharded policy."""
        self.averages = Averages(self._policy, options)
        self._cfg.ema = copy.copy(options)
        self._cfg.ema.enable = False
        log("averaging the weights (--ema.enable); checkpoints have them in pretrained_model_ema")
        if getattr(self._cfg.policy, "push_to_hub", False):
            log(
                "--policy.push_to_hub publishes the trained weights only; to publish their averages, upload the folder "
                "pretrained_model_ema of the last checkpoint",
                level=logging.WARNING,
            )

    @property
    def config(self) -> Any:
        """LeRobot's configuration as it was given."""
        config = copy.copy(self._cfg)
        if self.averages is not None:
            config.ema = self.averages.options
        return config

    def _evaluated_weights(self) -> contextlib.AbstractContextManager[Any]:
        if self.averages is None or not self.averages.options.use_for_eval:
            return contextlib.nullcontext()
        return self.averages.ema.swapped_in(self._policy)

    def _divided(self, loader: Any) -> Any:
        """Return a loader of this rank's batches, as accelerate makes it; LeRobot derives its data position from it."""
        from accelerate.data_loader import prepare_data_loader  # noqa: PLC0415  LeRobot requires it

        ranks = {"num_processes": self.num_processes, "process_index": self.process_index}
        return prepare_data_loader(loader, self.device, **ranks, put_on_device=True, even_batches=True)

    @contextlib.contextmanager
    def accumulate(self, _policy: nn.Module) -> Iterator[None]:
        """Count a micro-batch, and set ``sync_gradients`` in the last one of an optimizer step; not collective."""
        self._micro_batches += 1
        self.sync_gradients = self._micro_batches % self.strategy.accumulated_gradient == 0
        yield

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Compute in the half-precision dtype where torch's autocast does; not collective."""
        config = self.strategy.config
        dtype = torch.float16 if config.fp16 else torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=config.bf16 or config.fp16)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of one micro-batch; collective."""
        self.strategy.backward(loss, self._policy, self.optimizer)

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
        """Wait for all ranks, and take part in the evaluations of rank 0 until then; collective."""
        if self.evaluation is None:
            dist.barrier()
        else:
            self.evaluation.wait(None if self._policy is None else self.unwrap_model(self._policy))

    def end_training(self) -> None:
        """Wait for the last save, and close the strategy; collective."""
        self.strategy.close()


class ScriptStrategy(FSDPV2Strategy):
    """An `FSDPV2Strategy` for the script, which shows a bar of its own, and knows the number of steps."""

    def _step_output(self) -> Output:
        return "lines"

    def set_total_steps(self, policy: nn.Module, steps: int) -> None:
        """Set the number of optimizer steps at the end of the run, for the log; not collective."""
        self._state_of(policy).meter.log.total_steps = steps


class Averages:
    """The averages of a policy's trainable parameters, and the schedule of their decay, with ``--ema.enable``.

    The script itself keeps the averages on one rank, and refuses sharded policies. Source of the schedule: ``EMAModel``
    of diffusers 0.38, which LeRobot 0.6 uses.
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


class ResumedLoader:
    """A loader whose first pass in a resumed run does not change the random state.

    An iterator draws a seed for its workers. The uninterrupted run drew it before the checkpoint, and would otherwise
    get other random numbers than the resumed run, which draws it after the load.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.random_state: bytes | None = None
        """Random state after the load of a checkpoint; None if there was none, or after the first batch."""

    def __iter__(self) -> Iterator[Any]:
        batches = spent_time.data.timed(self._loader)
        for batch in batches:
            if self.random_state is not None:
                load_rng(self.random_state)
                self.random_state = None
            yield batch

    def __len__(self) -> int:
        return len(self._loader)


class SteppingOptimizer:
    """The optimizer as LeRobot's script uses it: steps with the strategy, which also clears the gradients."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self.optimizer = accelerator, accelerator.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups; the script logs their learning rate."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def step(self) -> None:
        """End a micro-batch; after the last one, step the optimizer and clear the gradients; collective."""
        accelerator = self._accelerator
        accelerator.strategy.optimizer_step(self.optimizer, accelerator._policy)
        if accelerator.averages is not None and accelerator.sync_gradients:
            accelerator.averages.update(accelerator._policy)

    def zero_grad(self) -> None:
        """Do nothing: after a step the gradients are cleared, and before it they accumulate."""


def _check_supported(cfg: Any) -> None:
    settings, topology = cfg.accelerator, cfg.parallelism
    requested = {
        "--ema.enable with --peft": cfg.ema.enable and cfg.peft is not None,
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
