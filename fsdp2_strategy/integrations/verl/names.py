"""Import every name of verl that the other modules of this package use.

tests/test_compat_verl.py lists the methods and attributes of verl's engine that `StrategyEngine` relies on.
"""

from __future__ import annotations

from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils import tensordict_utils
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.utils.model import get_hf_auto_model_class
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import FSDPEngineConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine import BaseEngine, EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

STRIPPED_MODULES = "_verl_strip_modules"
"""Attribute of a model: the modules that verl removes from it before it trains it."""

__all__ = [
    "STRIPPED_MODULES",
    "BaseEngine",
    "EngineRegistry",
    "FSDPEngineConfig",
    "FSDPEngineWithLMHead",
    "PrecisionType",
    "apply_monkey_patch",
    "build_optimizer",
    "get_device_id",
    "get_device_name",
    "get_hf_auto_model_class",
    "postprocess_batch_func",
    "prepare_micro_batches",
    "replace_lora_wrapper",
    "tensordict_utils",
]
