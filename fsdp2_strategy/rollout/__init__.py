"""Stream weights from a sharded model to an inference engine, and generate with the engine.

`stream` and `bucket` gather the weights. `engine` contains the protocol of an engine, an engine that uses transformers,
and `Rollout`, which the strategy calls. `remote` connects the trainer to an engine in another process.
"""

from fsdp2_strategy.rollout.engine import ENGINES, Rollout, RolloutEngine, TransformersEngine
from fsdp2_strategy.rollout.remote import RemoteEngine, serve
from fsdp2_strategy.rollout.stream import stream_weights, weight_checksums

__all__ = [
    "ENGINES",
    "RemoteEngine",
    "Rollout",
    "RolloutEngine",
    "TransformersEngine",
    "serve",
    "stream_weights",
    "weight_checksums",
]
