"""Stream weights from a sharded model to an inference engine, and generate with the engine.

`stream` and `bucket` gather the weights. `protocol` defines an engine; `transformers_engine`, `sglang_engine` and
`vllm_engine` are engines. `engine` contains `Rollout`, which the strategy calls. `remote` connects the trainer to an
engine in another process.
"""

from fsdp2_strategy.rollout.engine import ENGINES, Rollout
from fsdp2_strategy.rollout.protocol import RolloutEngine
from fsdp2_strategy.rollout.remote import RemoteEngine, serve
from fsdp2_strategy.rollout.sglang_engine import SGLangEngine
from fsdp2_strategy.rollout.stream import stream_adapter, stream_weights, weight_checksums
from fsdp2_strategy.rollout.transformers_engine import TransformersEngine
from fsdp2_strategy.rollout.vllm_engine import VLLMEngine

__all__ = [
    "ENGINES",
    "RemoteEngine",
    "Rollout",
    "RolloutEngine",
    "SGLangEngine",
    "TransformersEngine",
    "VLLMEngine",
    "serve",
    "stream_adapter",
    "stream_weights",
    "weight_checksums",
]
