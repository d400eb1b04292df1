"""The FSDP2 layer that an RLHF or VLA trainer drops in: shard, train with right numbers, save, resume."""

from fsdp2_strategy.blocks import find_blocks, manual_transformer_cls_names_to_wrap
from fsdp2_strategy.checkpoint import Checkpoint as Checkpoint
from fsdp2_strategy.checkpoint import VerifyReport as VerifyReport
from fsdp2_strategy.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint, verify_checkpoint
from fsdp2_strategy.config import StrategyConfig
from fsdp2_strategy.ema import EMA as EMA
from fsdp2_strategy.errors import (
    CheckpointError,
    ConfigError,
    FSDP2StrategyError,
    MeshError,
    OptimizerError,
    ShardError,
    StepError,
)
from fsdp2_strategy.errors import LogProbError as LogProbError
from fsdp2_strategy.errors import OffloadError as OffloadError
from fsdp2_strategy.errors import RolloutError as RolloutError
from fsdp2_strategy.explain import explain
from fsdp2_strategy.hf.export import save_model
from fsdp2_strategy.hf.folder import init_on_meta
from fsdp2_strategy.hf.load import load_weights
from fsdp2_strategy.hf.match import LoadReport
from fsdp2_strategy.logprob import linear_log_probs as linear_log_probs
from fsdp2_strategy.logprob import token_log_probs as token_log_probs
from fsdp2_strategy.masters import FSDPadaptOptimizer as FSDPadaptOptimizer
from fsdp2_strategy.masters import is_mp_optimizer as is_mp_optimizer
from fsdp2_strategy.mesh import build_mesh
from fsdp2_strategy.offload import offload, reload
from fsdp2_strategy.optimizer import build_optimizer
from fsdp2_strategy.rollout import stream_weights, weight_checksums
from fsdp2_strategy.schedule import build_scheduler
from fsdp2_strategy.shard import shard_model
from fsdp2_strategy.step import StepResult, clip_grad_norm
from fsdp2_strategy.strategy import FSDPV2Strategy
from fsdp2_strategy.strategy import ModelOptimPair as ModelOptimPair
from fsdp2_strategy.strategy import ModelOrModelOptimPair as ModelOrModelOptimPair

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "FSDP2StrategyError",
    "FSDPV2Strategy",
    "LoadReport",
    "MeshError",
    "OptimizerError",
    "ShardError",
    "StepError",
    "StepResult",
    "StrategyConfig",
    "build_mesh",
    "build_optimizer",
    "build_scheduler",
    "clip_grad_norm",
    "explain",
    "find_blocks",
    "init_on_meta",
    "list_checkpoints",
    "load_checkpoint",
    "load_weights",
    "manual_transformer_cls_names_to_wrap",
    "offload",
    "reload",
    "save_checkpoint",
    "save_model",
    "shard_model",
    "stream_weights",
    "verify_checkpoint",
    "weight_checksums",
]
