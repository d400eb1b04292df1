"""Divide more than parameters: layers, experts and sequences over ranks, vision encoders, recorded routing.

Each is a feature that plans, splits, adds hooks, and refuses what it does not support.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from fsdp2_strategy.parallel.routing.recorded import Routing as Routing
    from fsdp2_strategy.parallel.routing.replay import record_routing as record_routing
    from fsdp2_strategy.parallel.routing.replay import replay_routing as replay_routing
    from fsdp2_strategy.parallel.sequence.shard import shard_sequence as shard_sequence

_MODULE_OF = {
    "Routing": "routing.recorded",
    "record_routing": "routing.replay",
    "replay_routing": "routing.replay",
    "shard_sequence": "sequence.shard",
}
"""The module of each public name."""

__all__ = list(_MODULE_OF)
__getattr__, __dir__ = lazy_imports(__name__, _MODULE_OF)
