"""Build a `StrategyConfig` from YAML, a mapping, a trainer's namespace or accelerate's configuration file."""

from __future__ import annotations

from fsdp2_strategy.config.strategy_config import GradSync, MixedData, ShardSize, StrategyConfig

__all__ = ["GradSync", "MixedData", "ShardSize", "StrategyConfig"]
