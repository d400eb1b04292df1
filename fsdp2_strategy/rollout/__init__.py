"""Stream weights from a sharded model to an inference engine, and generate with the engine.

`stream` and `bucket` gather the weights. `protocol` defines an engine; `transformers_engine`, `sglang_engine` and
`vllm_engine`, which updates its worker with `vllm_transfer`, are engines. `vllm_source` is for trainers that send to a
server of vLLM. `agreement` compares an engine with the trainer, and `importance` corrects a loss for the difference.
`engine` contains `Rollout`, which the strategy calls. `remote` connects the trainer to an engine in another process,
over the sockets of `connection`; `handshake` authenticates both ends, and `requests` checks what a trainer asks for.
"""

from fsdp2_strategy.rollout.agreement import EngineAgreement, check_engine_agreement
from fsdp2_strategy.rollout.connection import listen_at_free_port
from fsdp2_strategy.rollout.difference import TensorDifference
from fsdp2_strategy.rollout.engine import ENGINES, Rollout, WeightUpdate
from fsdp2_strategy.rollout.importance import ImportanceInputs, importance_inputs, sampled_log_probs
from fsdp2_strategy.rollout.log_prob_differences import LogProbDifferences
from fsdp2_strategy.rollout.protocol import Engine, RolloutEngine
from fsdp2_strategy.rollout.remote import RemoteEngine, serve
from fsdp2_strategy.rollout.sglang_engine import SGLangEngine
from fsdp2_strategy.rollout.stream import WeightStream, stream_adapter, stream_weights, weight_checksums
from fsdp2_strategy.rollout.transformers_engine import TransformersEngine
from fsdp2_strategy.rollout.vllm_engine import VLLMEngine
from fsdp2_strategy.rollout.vllm_source import vllm_patches, vllm_weight_source

__all__ = [
    "ENGINES",
    "Engine",
    "EngineAgreement",
    "ImportanceInputs",
    "LogProbDifferences",
    "RemoteEngine",
    "Rollout",
    "RolloutEngine",
    "SGLangEngine",
    "TensorDifference",
    "TransformersEngine",
    "VLLMEngine",
    "WeightStream",
    "WeightUpdate",
    "check_engine_agreement",
    "importance_inputs",
    "listen_at_free_port",
    "sampled_log_probs",
    "serve",
    "stream_adapter",
    "stream_weights",
    "vllm_patches",
    "vllm_weight_source",
    "weight_checksums",
]
