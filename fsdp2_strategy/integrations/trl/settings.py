"""Translate the Trainer's arguments to a `StrategyConfig`, and refuse those that contradict it.

Input: ``TrainingArguments``, and the options of `with_fsdp2`. Output: a configuration, and the settings of checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env

from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.errors import ConfigError, did_you_mean

_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of ``optim`` whose optimizers work on sharded parameters."""

_SHARES_BATCHES = {"sequence_parallel_size": "shard_sequence", "tensor_parallel_size": "dp_rank"}
"""Settings with which successive ranks get the same batch, and what a loop that divides batches uses."""

_OF_ARGUMENTS = {
    "seed": "seed",
    "bf16": "bf16",
    "fp16": "fp16",
    "max_norm": "max_grad_norm",
    "micro_train_batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size and gradient_accumulation_steps",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "accumulation": "gradient_accumulation_steps",
    "compile_blocks": "no argument: compilation was not tried with this trainer",
}
"""Fields of `StrategyConfig` that follow from the Trainer's arguments, and which ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a trainer that are not in ``TrainingArguments``."""

    config: Mapping[str, Any]
    """Fields of `StrategyConfig`."""
    async_save: bool = False
    """Write checkpoints in the background."""
    max_mem: float | None = None
    """Maximum total size of the checkpoints in GB (10^9 bytes)."""
    save_dtype: torch.dtype | None = None
    """The dtype of the weights that `save_model` writes; by default that of the shards."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        """Divide the options of `with_fsdp2` into settings of checkpoints and fields of `StrategyConfig`."""
        own = {field.name for field in fields(cls)} - {"config"}
        config = {name: value for name, value in options.items() if name not in own}
        known = {field.name for field in fields(StrategyConfig)}
        for name, value in config.items():
            if name in _SHARES_BATCHES and value != 1:
                raise ConfigError(
                    f"cannot use FSDP2 with this trainer: {name} is {value!r}, expected 1, because the Trainer "
                    f"divides its batches between all ranks. Write the loop with FSDPV2Strategy and "
                    f"{_SHARES_BATCHES[name]}."
                )
            if name in _OF_ARGUMENTS:
                raise ConfigError(
                    f"cannot use FSDP2 with this trainer: {name} was passed, expected {_OF_ARGUMENTS[name]} of "
                    "TrainingArguments. Set it there."
                )
            if name not in known:
                raise ConfigError(
                    f"cannot use FSDP2 with this trainer: {name} is unknown, expected a field of StrategyConfig or one "
                    f"of {', '.join(sorted(own))}.{did_you_mean(name, [*known, *own])}"
                )
        return cls(config=config, **{name: value for name, value in options.items() if name in own})


def strategy_config(args: Any, settings: Settings) -> StrategyConfig:
    """Return the configuration for ``TrainingArguments``; the Trainer clips, and scales the losses."""
    return StrategyConfig(
        seed=args.seed,
        max_norm=0.0,
        micro_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        bf16=args.bf16,
        fp16=args.fp16,
        loss_reduction="sum",
        **settings.config,
    )


def may_reduce_once(args: Any, settings: Settings) -> bool:
    """Return whether the program leaves open how micro-batches communicate; [Note: reduced once] in `accelerator`."""
    given = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    return "grad_sync" not in settings.config and not given.get("sync_each_batch")


def check_supported(args: Any, *, chooses_optimizer: bool) -> None:
    """Raise if the arguments contradict sharding with this package, or request what it lacks."""
    requested = {
        "fsdp": bool(args.fsdp),
        "deepspeed": bool(args.deepspeed),
        "parallelism_config": getattr(args, "parallelism_config", None) is not None,
        "torch_compile": bool(args.torch_compile),
        "auto_find_batch_size": bool(args.auto_find_batch_size),
        "fp16_full_eval": bool(args.fp16_full_eval),
        "bf16_full_eval": bool(args.bf16_full_eval),
        "save_on_each_node": bool(args.save_on_each_node),
        "ACCELERATE_USE_FSDP (set by accelerate launch)": parse_flag_from_env("ACCELERATE_USE_FSDP"),
        "ACCELERATE_USE_DEEPSPEED (set by accelerate launch)": parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"),
    }
    if conflicts := [name for name, is_requested in requested.items() if is_requested]:
        raise ConfigError(
            f"cannot use FSDP2 with this trainer: its arguments set {', '.join(conflicts)}, expected none of these, "
            "because this package shards the model. Leave them out."
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"cannot use FSDP2 with this trainer: this process uses {args.n_gpu} GPUs, expected one per process. Start "
            f"it with torchrun --nproc-per-node {args.n_gpu}."
        )
    optim = getattr(args.optim, "value", args.optim)
    if chooses_optimizer and optim not in _OPTIMIZERS:
        raise ConfigError(
            f"cannot use FSDP2 with this trainer: optim is {optim!r}, expected one of {', '.join(_OPTIMIZERS)}: others "
            "do not work on sharded parameters, or were not tried. Pass one of these, or an optimizer of your own as "
            "optimizers."
        )
