"""The arguments of VITRA's strategy, which are also its attributes.

Input: the arguments of `VLAFSDPStrategy`. Output: the same, checked, with defaults that depend on other arguments.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Literal

import torch
from torch import nn

from fsdp2_strategy.config.arguments import check_keywords
from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.integrations.lerobot.layout import LeRobotLayout
from fsdp2_strategy.optim.schedule import check_schedule_name

RESHARDS = {"shard-grad-op": False, "full-shard": True}


@check_keywords
@dataclass(eq=False, repr=False)
class VLASettings:
    """The arguments of `VLAFSDPStrategy`, in this order; those up to ``optimizer_betas`` are VITRA's.

    Not frozen, because a loop may train in parts: it sets ``max_steps`` before each call of `run_training`.
    """

    vla: nn.Module
    """A model with "backbone" in the names of its backbone's parameters. Parameters that do not require gradients stay
    frozen."""
    device_id: int | torch.device | None
    """This rank's accelerator; ignored without CUDA."""
    stage: str
    """Name of the training stage, for the log."""
    epochs: int
    """Number of epochs."""
    max_steps: int | None
    """Optimizer steps after which training ends, or None."""
    global_batch_size: int
    """Samples per optimizer step, on all ranks together."""
    per_device_batch_size: int
    """Samples per micro-batch on each rank."""
    learning_rate: float
    """Learning rate of the backbone; see `vla_parameter_groups`."""
    weight_decay: float
    """Weight decay of the backbone; see `vla_parameter_groups`."""
    max_grad_norm: float | None
    """Maximum global norm of the gradients; 0 or None for no clipping."""
    lr_scheduler_type: str
    """One of "linear-warmup+cosine-decay", "constant", "linear-warmup+constant", their aliases, and
    "backbone-freeze-warmup"; see `build_scheduler`."""
    warmup_ratio: float | None
    """For schedules with a warm-up, its length as a fraction of all steps; None for no warm-up."""
    enable_gradient_checkpointing: bool = True
    """Recompute the activations of the classes passed to `run_setup`."""
    enable_mixed_precision_training: bool = True
    """Compute in bf16 with fp32 master weights; otherwise compute in fp32."""
    reduce_in_full_precision: bool = False
    """With mixed precision, reduce gradients and keep buffers in fp32 (if true) or bf16 (if false)."""
    action_model_learning_rate: float | None = None
    """Learning rate of all other parameters; by default ``learning_rate``."""
    action_model_weight_decay: float | None = None
    """Weight decay of all other parameters; by default ``weight_decay``."""
    mixed_precision_dtype: torch.dtype = torch.bfloat16
    """``torch.bfloat16``, or ``torch.float32`` to disable mixed precision."""
    sharding_strategy: str = "shard-grad-op"
    """With "shard-grad-op", parameters stay all-gathered from forward to backward; with "full-shard", they are
    resharded after forward and all-gathered again in backward."""
    state_dict_type: object = None
    """Ignored; all ranks write checkpoints in parallel, to files that contain full tensors."""
    cognition_token_weight_decay: bool = False
    """Decay the cognition token; see `vla_parameter_groups`."""
    llm_freeze_step: int = 0
    """Steps for which "backbone-freeze-warmup" keeps the backbone's learning rate at 0."""
    move_word_embedding_to_action_model: bool = False
    """Treat the word embedding as a part of the action model; see `vla_parameter_groups`."""
    optimizer_betas: tuple[float, float] = (0.9, 0.999)
    """Adam's betas."""
    _: KW_ONLY
    as_flattened: bool = False
    """Decay only the cognition token (if requested), as VITRA does; see `vla_parameter_groups`."""
    cast_buffers: bool | Literal["all"] = True
    """Cast buffers to the dtype of gradient reduction, except statistics of data (of BatchNorm, of normalisers, or
    named mean, std, min, max, q01, ...), which bf16 would round. "all" casts statistics, too, as VITRA does. bf16
    rounds rotary frequencies."""
    shard_size: int | None = None
    """Number of ranks that a parameter is sharded over. By default, shard within each node and replicate across
    nodes."""
    max_num: int | None = 3
    """Maximum number of checkpoints to keep; None for all."""
    max_mem: float | None = 1000
    """Maximum total size of all checkpoints in GB (10^9 bytes); None for no limit."""
    async_save: bool = True
    """Whether `run_training` writes checkpoints in the background."""
    layout: LeRobotLayout | None = None
    """Write checkpoints in LeRobot's layout and under its names, such as ``005000``, into the same directory. Its batch
    size and accumulation must be those of this strategy."""
    config: InitVar[StrategyConfig | None] = None
    """Further settings; the arguments above take precedence."""

    def __post_init__(self, config: StrategyConfig | None) -> None:
        _check_choice("sharding_strategy", self.sharding_strategy, RESHARDS)
        _check_choice("cast_buffers", self.cast_buffers, (True, False, "all"))
        _check_choice("mixed_precision_dtype", self.mixed_precision_dtype, (torch.bfloat16, torch.float32))
        check_schedule_name(self.lr_scheduler_type)
        for name, value, least in (
            ("epochs", self.epochs, 1),
            ("max_steps", self.max_steps, 1),
            ("llm_freeze_step", self.llm_freeze_step, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(
                    f"cannot configure: {name} is {value}, expected at least {least}. Pass a larger number."
                )
        if self.action_model_learning_rate is None:
            self.action_model_learning_rate = self.learning_rate
        if self.action_model_weight_decay is None:
            self.action_model_weight_decay = self.weight_decay


def _check_choice(name: str, value: object, choices: Collection[object]) -> None:
    if value not in choices:
        known = " or ".join(map(str, choices))
        raise ConfigError(f"cannot configure: {name} is {value!r}, expected {known}. Use one of them.")
