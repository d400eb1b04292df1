"""Move bytes between files and shards of any model: the safetensors format, regions, checksums, reads and writes.

`dcp_save` and `dcp_load` make them a backend of `torch.distributed.checkpoint`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from fsdp2_strategy.storage.dcp_load import LocalLoadPlanner as LocalLoadPlanner
    from fsdp2_strategy.storage.dcp_load import SafetensorsReader as SafetensorsReader
    from fsdp2_strategy.storage.dcp_save import LocalSavePlanner as LocalSavePlanner
    from fsdp2_strategy.storage.dcp_save import SafetensorsWriter as SafetensorsWriter

_MODULE_OF = {
    "LocalLoadPlanner": "dcp_load",
    "LocalSavePlanner": "dcp_save",
    "SafetensorsReader": "dcp_load",
    "SafetensorsWriter": "dcp_save",
}
"""The module of each public name."""

__all__ = list(_MODULE_OF)
__getattr__, __dir__ = lazy_imports(__name__, _MODULE_OF)
