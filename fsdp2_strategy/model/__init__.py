"""What is known of a model: its names, wrappers, shards and state; offload and reload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from fsdp2_strategy.model.offloading import is_offloaded as is_offloaded
    from fsdp2_strategy.model.offloading import offload as offload
    from fsdp2_strategy.model.offloading import reload as reload
    from fsdp2_strategy.model.wrappers import unwrap_model as unwrap_model

_MODULE_OF = {
    "is_offloaded": "offloading",
    "offload": "offloading",
    "reload": "offloading",
    "unwrap_model": "wrappers",
}
"""The module of each public name."""

__all__ = list(_MODULE_OF)
__getattr__, __dir__ = lazy_imports(__name__, _MODULE_OF)
