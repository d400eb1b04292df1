"""Turn the namespace of LightRFT's parser into a `StrategyConfig`.

Input: a namespace or mapping. Output: a configuration in which each name that LightRFT's trainers read has a value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.errors import ConfigError

FIELDS: dict[str, Any] = {
    "accumulation": "optimizer_step",
    "adam_offload": False,
    "max_norm": 1.0,
    "timeout_minutes": 60.0,
    "train_batch_size": 128,
}
"""LightRFT's defaults of our fields, where they differ from ours."""

OPTIONS: dict[str, Any] = {
    "actor_learning_rate": 1e-5,
    "critic_learning_rate": 1e-5,
    "adam_betas": (0.9, 0.95),
    "l2": 0.0,
    "lr_warmup_ratio": 0.03,
    "fsdp": True,
    "fsdp_cpu_offload": False,
    "fused_linear_logprob": False,
    "local_rank": -1,
    "sp_size": 1,
    "zero_stage": 2,
    "zpg": 1,
    "overlap_comm": False,
    "grad_accum_dtype": None,
    "engine_type": "vllm",
    "engine_tp_size": 1,
    "enable_engine_sleep": False,
    "critic_pretrain": False,
    "remote_rm_url": None,
    "pretrain_data": None,
    "micro_rollout_batch_size": 2,
    "n_samples_per_prompt": 8,
    "advantage_estimator": "group_norm",
    "advantages_norm": False,
    "advantage_clip": 0.0,
    "reward_running_norm": False,
    "reward_running_norm_minus_mean": False,
    "reward_clip": 0.0,
    "overlong_buffer": False,
    "overlong_buffer_len": 1024,
    "overlong_buffer_penalty_factor": 1.0,
    "dynamic_sampling": False,
    "use_kl_loss": False,
    "kl_estimator": "k3",
    "plot_every": -1,
    "use_tensorboard": False,
}
"""Options that LightRFT's trainers read from ``strategy.config``, and LightRFT's defaults."""


def settings_of(args: object, **settings: Any) -> StrategyConfig:
    """Return the configuration for LightRFT's arguments, a namespace or mapping; ``settings`` override them."""
    given = dict(args) if isinstance(args, Mapping) else {} if args is None else vars(args)
    if not given.get("fsdp", True):
        raise ConfigError(
            "cannot make a strategy: fsdp is false, which selects DeepSpeed in LightRFT, expected true, because this "
            "package trains with FSDP2. Pass --fsdp."
        )
    config = StrategyConfig.resolve(args if args is not None else {}, None)
    absent = {name: value for name, value in FIELDS.items() if given.get(name) is None}
    return with_options(config.replace(**{**absent, **settings}))


def with_options(config: StrategyConfig) -> StrategyConfig:
    """Return a copy of a configuration in which each of `OPTIONS` has a value."""
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"cannot make a strategy: tensor_parallel_size is {config.tensor_parallel_size}, expected 1, because "
            "LightRFT's trainers draw other batches on each rank. Use FSDPV2Strategy and a loop of your own."
        )
    given = {**config.extra, "sp_size": config.sequence_parallel_size}
    return dataclasses.replace(config, extra={**OPTIONS, **given})
