"""FSDP2 for RLHF and VLA trainers: shard models, train, save and resume.

Each public name is imported when it is first used, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.import_paths import install_old_paths, lazy_exports
from fsdp2_strategy.versions import check_versions

if TYPE_CHECKING:
    from fsdp2_strategy.checkpoint.data_position import LATER as LATER
    from fsdp2_strategy.checkpoint.data_position import Loader as Loader
    from fsdp2_strategy.checkpoint.layout import Checkpoint as Checkpoint
    from fsdp2_strategy.checkpoint.layout import list_checkpoints as list_checkpoints
    from fsdp2_strategy.checkpoint.load import load_checkpoint as load_checkpoint
    from fsdp2_strategy.checkpoint.random_state import seed_everything as seed_everything
    from fsdp2_strategy.checkpoint.save import end_saving as end_saving
    from fsdp2_strategy.checkpoint.save import save_checkpoint as save_checkpoint
    from fsdp2_strategy.checkpoint.save import wait_for_save as wait_for_save
    from fsdp2_strategy.checkpoint.training_state import LoadedCheckpoint as LoadedCheckpoint
    from fsdp2_strategy.checkpoint.verify import VerifyReport as VerifyReport
    from fsdp2_strategy.checkpoint.verify import verify_checkpoint as verify_checkpoint
    from fsdp2_strategy.config.strategy_config import GradSync as GradSync
    from fsdp2_strategy.config.strategy_config import MixedData as MixedData
    from fsdp2_strategy.config.strategy_config import ShardSize as ShardSize
    from fsdp2_strategy.config.strategy_config import StrategyConfig as StrategyConfig
    from fsdp2_strategy.data.loader import ResumableLoader as ResumableLoader
    from fsdp2_strategy.data.order import EpisodeOrder as EpisodeOrder
    from fsdp2_strategy.data.order import GlobalOrder as GlobalOrder
    from fsdp2_strategy.data.order import MixtureOrder as MixtureOrder
    from fsdp2_strategy.data.order import Order as Order
    from fsdp2_strategy.distributed.agreement import all_or_none as all_or_none
    from fsdp2_strategy.distributed.collectives import all_gather as all_gather
    from fsdp2_strategy.distributed.collectives import all_reduce as all_reduce
    from fsdp2_strategy.distributed.log import log as log
    from fsdp2_strategy.distributed.memory import report_memory as report_memory
    from fsdp2_strategy.distributed.mesh import auto_shard_size as auto_shard_size
    from fsdp2_strategy.distributed.mesh import build_mesh as build_mesh
    from fsdp2_strategy.distributed.preemption import Preemption as Preemption
    from fsdp2_strategy.distributed.tcp_rendezvous import Rendezvous as Rendezvous
    from fsdp2_strategy.distributed.tcp_rendezvous import RendezvousServer as RendezvousServer
    from fsdp2_strategy.errors import ArgumentError as ArgumentError
    from fsdp2_strategy.errors import CheckpointError as CheckpointError
    from fsdp2_strategy.errors import ConfigError as ConfigError
    from fsdp2_strategy.errors import CorruptDataError as CorruptDataError
    from fsdp2_strategy.errors import DamageError as DamageError
    from fsdp2_strategy.errors import DataError as DataError
    from fsdp2_strategy.errors import FSDP2StrategyError as FSDP2StrategyError
    from fsdp2_strategy.errors import LogProbError as LogProbError
    from fsdp2_strategy.errors import MeshError as MeshError
    from fsdp2_strategy.errors import OffloadError as OffloadError
    from fsdp2_strategy.errors import OptimizerError as OptimizerError
    from fsdp2_strategy.errors import RolloutError as RolloutError
    from fsdp2_strategy.errors import SequenceError as SequenceError
    from fsdp2_strategy.errors import ShardError as ShardError
    from fsdp2_strategy.errors import StepError as StepError
    from fsdp2_strategy.hf.export import save_model as save_model
    from fsdp2_strategy.hf.load import load_weights as load_weights
    from fsdp2_strategy.hf.load_plan import LoadReport as LoadReport
    from fsdp2_strategy.hf.meta.init_on_meta import init_on_meta as init_on_meta
    from fsdp2_strategy.hf.trainer_layout import TrainerLayout as TrainerLayout
    from fsdp2_strategy.lerobot.checkpoint_layout import LeRobotLayout as LeRobotLayout
    from fsdp2_strategy.lerobot.policy_export import save_policy as save_policy
    from fsdp2_strategy.logprob import linear_log_probs as linear_log_probs
    from fsdp2_strategy.logprob import token_log_probs as token_log_probs
    from fsdp2_strategy.model.offload import is_offloaded as is_offloaded
    from fsdp2_strategy.model.offload import offload as offload
    from fsdp2_strategy.model.offload import reload as reload
    from fsdp2_strategy.model.wrappers import unwrap_model as unwrap_model
    from fsdp2_strategy.optim.accumulation import accumulation_of as accumulation_of
    from fsdp2_strategy.optim.ema import EMA as EMA
    from fsdp2_strategy.optim.groups import build_optimizer as build_optimizer
    from fsdp2_strategy.optim.groups import rebind_optimizer as rebind_optimizer
    from fsdp2_strategy.optim.masters import FSDPadaptOptimizer as FSDPadaptOptimizer
    from fsdp2_strategy.optim.masters import is_mp_optimizer as is_mp_optimizer
    from fsdp2_strategy.optim.schedule import build_scheduler as build_scheduler
    from fsdp2_strategy.optim.schedule import (
        get_constant_schedule_with_freeze_warmup as get_constant_schedule_with_freeze_warmup,
    )
    from fsdp2_strategy.optim.step import StepResult as StepResult
    from fsdp2_strategy.optim.step import backward as backward
    from fsdp2_strategy.optim.step import clip_grad_norm as clip_grad_norm
    from fsdp2_strategy.optim.step import optimizer_step as optimizer_step
    from fsdp2_strategy.optim.step import set_gradient_sync as set_gradient_sync
    from fsdp2_strategy.optim.step import take_step as take_step
    from fsdp2_strategy.optim.zero_grad import discard_gradients as discard_gradients
    from fsdp2_strategy.rollout.agreement import EngineAgreement as EngineAgreement
    from fsdp2_strategy.rollout.agreement import check_engine_agreement as check_engine_agreement
    from fsdp2_strategy.rollout.connection import listen_at_free_port as listen_at_free_port
    from fsdp2_strategy.rollout.difference import TensorDifference as TensorDifference
    from fsdp2_strategy.rollout.engine import ENGINES as ENGINES
    from fsdp2_strategy.rollout.engine import Rollout as Rollout
    from fsdp2_strategy.rollout.engine import WeightUpdate as WeightUpdate
    from fsdp2_strategy.rollout.importance import ImportanceInputs as ImportanceInputs
    from fsdp2_strategy.rollout.importance import importance_inputs as importance_inputs
    from fsdp2_strategy.rollout.importance import sampled_log_probs as sampled_log_probs
    from fsdp2_strategy.rollout.log_prob_differences import LogProbDifferences as LogProbDifferences
    from fsdp2_strategy.rollout.protocol import RolloutEngine as RolloutEngine
    from fsdp2_strategy.rollout.remote import RemoteEngine as RemoteEngine
    from fsdp2_strategy.rollout.remote import serve as serve
    from fsdp2_strategy.rollout.sglang_engine import SGLangEngine as SGLangEngine
    from fsdp2_strategy.rollout.stream import WeightStream as WeightStream
    from fsdp2_strategy.rollout.stream import stream_adapter as stream_adapter
    from fsdp2_strategy.rollout.stream import stream_weights as stream_weights
    from fsdp2_strategy.rollout.stream import weight_checksums as weight_checksums
    from fsdp2_strategy.rollout.transformers_engine import TransformersEngine as TransformersEngine
    from fsdp2_strategy.rollout.vllm_engine import VLLMEngine as VLLMEngine
    from fsdp2_strategy.routing.recorded import Routing as Routing
    from fsdp2_strategy.routing.replay import record_routing as record_routing
    from fsdp2_strategy.routing.replay import replay_routing as replay_routing
    from fsdp2_strategy.sequence.shard import shard_sequence as shard_sequence
    from fsdp2_strategy.sharding.blocks import find_blocks as find_blocks
    from fsdp2_strategy.sharding.blocks import (
        manual_transformer_cls_names_to_wrap as manual_transformer_cls_names_to_wrap,
    )
    from fsdp2_strategy.sharding.explain import explain as explain
    from fsdp2_strategy.sharding.known_policies import register_policy as register_policy
    from fsdp2_strategy.sharding.shard import shard_model as shard_model
    from fsdp2_strategy.strategy import FSDPV2Strategy as FSDPV2Strategy
    from fsdp2_strategy.strategy import ModelOptimPair as ModelOptimPair
    from fsdp2_strategy.strategy import ModelOrModelOptimPair as ModelOrModelOptimPair
    from fsdp2_strategy.tracking.metrics import Metrics as Metrics
    from fsdp2_strategy.tracking.trackers import JSONLinesTracker as JSONLinesTracker
    from fsdp2_strategy.tracking.trackers import TensorBoardTracker as TensorBoardTracker
    from fsdp2_strategy.tracking.trackers import Tracker as Tracker
    from fsdp2_strategy.tracking.trackers import WeightsBiasesTracker as WeightsBiasesTracker
    from fsdp2_strategy.training import TrainingStrategy as TrainingStrategy
    from fsdp2_strategy.vla.metrics import VLAMetrics as VLAMetrics
    from fsdp2_strategy.vla.parameter_groups import GROUPS as GROUPS
    from fsdp2_strategy.vla.parameter_groups import split_modality_collator as split_modality_collator
    from fsdp2_strategy.vla.parameter_groups import vla_parameter_groups as vla_parameter_groups
    from fsdp2_strategy.vla.schedule import MultiGroupLRScheduler as MultiGroupLRScheduler
    from fsdp2_strategy.vla.shortages import shortages as shortages
    from fsdp2_strategy.vla.shortages import warn_of_shortages as warn_of_shortages
    from fsdp2_strategy.vla.strategy import VLAFSDPStrategy as VLAFSDPStrategy
    from fsdp2_strategy.vla.throughput import Rates as Rates
    from fsdp2_strategy.vla.throughput import Throughput as Throughput

__version__ = "0.2.0"

check_versions()
install_old_paths()
__getattr__, __dir__, __all__ = lazy_exports(__name__)
