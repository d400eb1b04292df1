"""Weights on their way from a sharded model to an inference engine, and the engine.

`stream_weights` and `weight_checksums` are what others call; `engine` holds the protocol of an engine, one that runs
wherever transformers does, and the `Rollout` behind the facade; `remote` one that another process runs.
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
