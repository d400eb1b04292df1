"""FSDP2 for RLHF and VLA trainers: shard models, train, save and resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.lazy_imports import lazy_imports
from fsdp2_strategy.versions import check_versions

if TYPE_CHECKING:
    from fsdp2_strategy.checkpoint.listing import list_checkpoints as list_checkpoints
    from fsdp2_strategy.checkpoint.load import load_checkpoint as load_checkpoint
    from fsdp2_strategy.checkpoint.save import save_checkpoint as save_checkpoint
    from fsdp2_strategy.checkpoint.verify import verify_checkpoint as verify_checkpoint
    from fsdp2_strategy.config.strategy_config import StrategyConfig as StrategyConfig
    from fsdp2_strategy.data.loader import ResumableLoader as ResumableLoader
    from fsdp2_strategy.distributed.mesh import build_mesh as build_mesh
    from fsdp2_strategy.errors import FSDP2StrategyError as FSDP2StrategyError
    from fsdp2_strategy.hf.export import save_model as save_model
    from fsdp2_strategy.hf.load import load_weights as load_weights
    from fsdp2_strategy.hf.meta.init_on_meta import init_on_meta as init_on_meta
    from fsdp2_strategy.logprob import linear_log_probs as linear_log_probs
    from fsdp2_strategy.logprob import token_log_probs as token_log_probs
    from fsdp2_strategy.model.wrappers import unwrap_model as unwrap_model
    from fsdp2_strategy.optim.ema import EMA as EMA
    from fsdp2_strategy.optim.groups import build_optimizer as build_optimizer
    from fsdp2_strategy.optim.masters import FSDPadaptOptimizer as FSDPadaptOptimizer
    from fsdp2_strategy.optim.masters import is_mp_optimizer as is_mp_optimizer
    from fsdp2_strategy.optim.schedule import build_scheduler as build_scheduler
    from fsdp2_strategy.optim.step import StepResult as StepResult
    from fsdp2_strategy.optim.step import backward as backward
    from fsdp2_strategy.optim.step import clip_grad_norm as clip_grad_norm
    from fsdp2_strategy.optim.step import optimizer_step as optimizer_step
    from fsdp2_strategy.rollout.stream import stream_weights as stream_weights
    from fsdp2_strategy.rollout.stream import weight_checksums as weight_checksums
    from fsdp2_strategy.sharding.blocks import find_blocks as find_blocks
    from fsdp2_strategy.sharding.blocks import (
        manual_transformer_cls_names_to_wrap as manual_transformer_cls_names_to_wrap,
    )
    from fsdp2_strategy.sharding.explain import explain as explain
    from fsdp2_strategy.sharding.shard import shard_model as shard_model
    from fsdp2_strategy.strategy import FSDPV2Strategy as FSDPV2Strategy
    from fsdp2_strategy.strategy import ModelOptimPair as ModelOptimPair
    from fsdp2_strategy.strategy import ModelOrModelOptimPair as ModelOrModelOptimPair
    from fsdp2_strategy.training import TrainingStrategy as TrainingStrategy

__version__ = "0.2.0"

_MODULE_OF = {
    "EMA": "optim.ema",
    "FSDP2StrategyError": "errors",
    "FSDPV2Strategy": "strategy",
    "FSDPadaptOptimizer": "optim.masters",
    "ModelOptimPair": "strategy",
    "ModelOrModelOptimPair": "strategy",
    "ResumableLoader": "data.loader",
    "StepResult": "optim.step",
    "StrategyConfig": "config.strategy_config",
    "TrainingStrategy": "training",
    "backward": "optim.step",
    "build_mesh": "distributed.mesh",
    "build_optimizer": "optim.groups",
    "build_scheduler": "optim.schedule",
    "clip_grad_norm": "optim.step",
    "explain": "sharding.explain",
    "find_blocks": "sharding.blocks",
    "init_on_meta": "hf.meta.init_on_meta",
    "is_mp_optimizer": "optim.masters",
    "linear_log_probs": "logprob",
    "list_checkpoints": "checkpoint.listing",
    "load_checkpoint": "checkpoint.load",
    "load_weights": "hf.load",
    "manual_transformer_cls_names_to_wrap": "sharding.blocks",
    "optimizer_step": "optim.step",
    "save_checkpoint": "checkpoint.save",
    "save_model": "hf.export",
    "shard_model": "sharding.shard",
    "stream_weights": "rollout.stream",
    "token_log_probs": "logprob",
    "unwrap_model": "model.wrappers",
    "verify_checkpoint": "checkpoint.verify",
    "weight_checksums": "rollout.stream",
}
"""The module of each public name."""

__all__ = list(_MODULE_OF)

check_versions()
__getattr__, __dir__ = lazy_imports(__name__, _MODULE_OF)
