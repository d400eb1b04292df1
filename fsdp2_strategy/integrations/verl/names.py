"""Name everything of verl that this package uses: what it imports, and the methods that it calls and overrides.

Input: the installed version of verl. Output: its names, for the other modules of this package. A contract test compares
`CALLED`, `OVERRIDDEN` and `ATTRIBUTES` with the installed version.
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

CALLED = {
    "_build_lora_module": ("self", "module"),
    "_build_lr_scheduler": ("self", "optimizer"),
    "forward_step": ("self", "micro_batch", "loss_function", "forward_only"),
    "get_data_parallel_group": ("self",),
    "get_data_parallel_size": ("self",),
}
"""Methods of `FSDPEngineWithLMHead` that `StrategyEngine` calls, and their arguments."""

OVERRIDDEN = {
    "initialize": ("self",),
    "_build_module": ("self",),
    "train_mode": ("self", "kwargs"),
    "eval_mode": ("self", "kwargs"),
    "to": ("self", "device", "model", "optimizer", "grad"),
    "forward_backward_batch": ("self", "data", "loss_function", "forward_only"),
    "optimizer_zero_grad": ("self",),
    "optimizer_step": ("self",),
    "get_per_tensor_param": ("self", "layered_summon", "base_sync_done", "kwargs"),
    "get_per_tensor_param_shard": ("self", "kwargs"),
    "get_per_tensor_param_delta_shard": ("self", "kwargs"),
    "save_checkpoint": ("self", "local_path", "hdfs_path", "global_step", "max_ckpt_to_keep", "kwargs"),
    "load_checkpoint": ("self", "local_path", "hdfs_path", "del_local_after_load", "kwargs"),
}
"""Methods of `FSDPEngineWithLMHead` that `StrategyEngine` replaces, and their arguments."""

INHERITED = (
    "get_data_parallel_rank",
    "infer_batch",
    "is_mp_src_rank_with_outputs",
    "is_optimizer_offload_enabled",
    "is_param_offload_enabled",
    "disable_adapter",
    "lr_scheduler_step",
    "prepare_model_inputs",
    "prepare_model_outputs",
    "train_batch",
)
"""Methods and properties of `FSDPEngineWithLMHead` that verl calls on `StrategyEngine`, and that stay verl's."""

ATTRIBUTES = {
    "__init__": (
        "_autocast_dtype",
        "_is_lora",
        "_is_offload_optimizer",
        "_is_offload_param",
        "mode",
        "use_remove_padding",
    ),
    "_build_module": ("_verl_strip_modules",),
    "_build_model_optimizer": ("lr_scheduler", "module", "optimizer", "pass_packed_cu_seqlens"),
}
"""Attributes of `FSDPEngineWithLMHead` that `StrategyEngine` reads or sets, by the method of verl's that contains them;
``_verl_strip_modules`` is an attribute of a model."""

__all__ = [
    "ATTRIBUTES",
    "CALLED",
    "INHERITED",
    "OVERRIDDEN",
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
