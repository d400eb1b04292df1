"""Move bytes between files and shards of any model: the safetensors format, regions, checksums, reads and writes.

`dcp` makes them a backend of `torch.distributed.checkpoint`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from fsdp2_strategy.storage.dcp import LocalLoadPlanner as LocalLoadPlanner
    from fsdp2_strategy.storage.dcp import LocalSavePlanner as LocalSavePlanner
    from fsdp2_strategy.storage.dcp import SafetensorsReader as SafetensorsReader
    from fsdp2_strategy.storage.dcp import SafetensorsWriter as SafetensorsWriter

_MODULE_OF = {
    "LocalLoadPlanner": "dcp",
    "LocalSavePlanner": "dcp",
    "SafetensorsReader": "dcp",
    "SafetensorsWriter": "dcp",
}
"""The module of each public name."""

__all__ = list(_MODULE_OF)
__getattr__, __dir__ = lazy_imports(__name__, _MODULE_OF)
