"""Weights on their way from a sharded model to an inference engine, and the engine.

`stream_weights` and `weight_checksums` are what others call; `engine` holds the protocol of an engine, one that runs
wherever transformers does, and the `Rollout` behind the facade.
"""

from fsdp2_strategy.rollout.engine import ENGINES, Rollout, RolloutEngine, TransformersEngine
from fsdp2_strategy.rollout.stream import stream_weights, weight_checksums

__all__ = ["ENGINES", "Rollout", "RolloutEngine", "TransformersEngine", "stream_weights", "weight_checksums"]
