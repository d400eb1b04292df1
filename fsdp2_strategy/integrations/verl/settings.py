"""Translate verl's configuration of an engine to a `StrategyConfig`, and refuse what this package lacks.

Input: verl's configurations of model, engine, optimizer and checkpoints. Output: a configuration of the strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.integrations.verl.names import STRIPPED_MODULES, FSDPEngineConfig, PrecisionType

BACKEND = "fsdp2_strategy"
"""The name of the engine in verl's registry: the ``strategy`` of verl's configuration."""

CONTENTS = {"model", "optimizer", "extra", "hf_model"}
"""What verl saves in a checkpoint: ``save_contents`` and ``load_contents``."""


@dataclass
class EngineConfig(FSDPEngineConfig):  # type: ignore[misc]
    """verl's ``FSDPEngineConfig`` for `StrategyEngine`, where verl's checks that the strategy is one of its own.

    verl's trainers for RLHF set the strategy of the actor after this check and do not need this class. Its trainer for
    supervised fine-tuning needs it as ``engine._target_``.
    """

    strategy: str = BACKEND

    def __post_init__(self) -> None:
        if self.strategy != BACKEND:
            raise ConfigError(
                f"cannot configure the engine: strategy is {self.strategy!r}, expected {BACKEND!r}. Set "
                "engine.strategy to it, or leave out engine._target_ to use verl's own engine."
            )


def param_dtype(engine: Any) -> torch.dtype:
    """Return the dtype in which an engine computes."""
    dtype: torch.dtype = PrecisionType.to_dtype((engine.mixed_precision or {}).get("param_dtype", "bf16"))
    return dtype


def strategy_config(model: Any, engine: Any, optimizer: Any) -> StrategyConfig:
    """Return the configuration of the strategy; ``optimizer`` is None for an engine that does not train."""
    dtype = param_dtype(engine)
    reduce_dtype = PrecisionType.to_dtype((engine.mixed_precision or {}).get("reduce_dtype", "fp32"))
    blocks = (engine.wrap_policy or {}).get("transformer_layer_cls_to_wrap") or ()
    return StrategyConfig(
        seed=engine.seed,
        max_norm=0.0 if optimizer is None else optimizer.clip_grad,
        accumulation="backward",
        loss_reduction="sum",  # verl's losses are divided by the tokens or samples of the whole batch
        grad_sync="last" if engine.use_no_sync_for_gradient_accumulation else "defer_all_reduce",
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        reduce_in_full_precision=reduce_dtype == torch.float32,
        shard_size=-1 if engine.fsdp_size < 0 else engine.fsdp_size,
        reshard_after_forward=engine.reshard_after_forward,
        cpu_offload=engine.offload_policy,
        block_class_names=(blocks,) if isinstance(blocks, str) else tuple(blocks),
        activation_checkpointing=model.enable_gradient_checkpointing and not engine.forward_only,
    )


def check_supported(model: Any, engine: Any, optimizer: Any, checkpoint: Any) -> None:
    """Raise if verl's configuration requests what this package lacks."""
    policy = engine.wrap_policy or {}
    stored = PrecisionType.to_dtype(engine.model_dtype or "fp32")
    requested = {
        "engine.ulysses_sequence_parallel_size > 1": engine.ulysses_sequence_parallel_size > 1,
        "engine.qat.enable": engine.qat.enable,
        "engine.wrap_policy.min_num_params": bool(policy.get("min_num_params")),
        "engine.full_determinism": engine.full_determinism,
        "engine.router_replay": engine.router_replay.mode != "disabled",
        "engine.model_dtype other than fp32, for training": stored != torch.float32 and not engine.forward_only,
        "model.use_liger": model.use_liger,
        "model.enable_activation_offload": model.enable_activation_offload,
        "model.tiled_mlp.enabled": bool((model.tiled_mlp or {}).get("enabled")),
        "model.mtp.enable": model.mtp.enable,
        "model.model_type other than language_model": model.model_type != "language_model",
        "optim.clip_grad: null": optimizer is not None and optimizer.clip_grad is None,
    }
    if conflicts := [name for name, is_requested in requested.items() if is_requested]:
        raise ConfigError(
            f"cannot use the engine {BACKEND!r}: the configuration sets {', '.join(conflicts)}, expected none of "
            "these, which this package lacks. Remove them from the configuration, or use verl's own engine."
        )
    saved, loaded = set(checkpoint.save_contents), set(checkpoint.load_contents)
    if not saved & {"model", "hf_model"} or (saved | loaded) - CONTENTS:
        raise ConfigError(
            f"cannot save checkpoints: save_contents is {sorted(saved)} and load_contents is {sorted(loaded)}, "
            f"expected some of {', '.join(sorted(CONTENTS))}, with model or hf_model in save_contents. Remove other "
            "names, and add model to checkpoint.save_contents."
        )


def check_full_model(module: Any) -> None:
    """Raise if verl removes modules of a model before it trains it."""
    if getattr(module, STRIPPED_MODULES, None):
        raise ConfigError(
            f"cannot use the engine {BACKEND!r}: verl removes modules of {type(module).__name__}, expected a model "
            "that is trained as a whole. Use verl's own engine."
        )


def no_shards() -> ConfigError:
    """Return the error for a request of shards instead of full tensors."""
    return ConfigError(
        "cannot export shards: get_per_tensor_param_shard is not supported, expected a checkpoint engine that reads "
        "full tensors. Set rollout.checkpoint_engine.backend to one other than delta_sharded."
    )
