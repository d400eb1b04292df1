"""Load and export Hugging Face folders; each rank reads and writes its own byte ranges.

Loading: `weights_folder` -> `conversions` -> `load_plan` -> `missing_tensors` -> `load`. Saving: `save_plan` ->
`export`. Both use `regions` (descriptions of tensors) and `safetensors_format`. Loads read with
`verified_read`; saves write with `write`. `meta` builds models on the meta device, and `peft` handles adapters. Only
this package imports transformers' model code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from fsdp2_strategy.hf.load_plan import LoadReport as LoadReport

_MODULE_OF = {"LoadReport": "load_plan"}
"""The module of each public name."""

__all__ = list(_MODULE_OF)
__getattr__, __dir__ = lazy_imports(__name__, _MODULE_OF)
