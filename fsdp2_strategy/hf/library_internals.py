"""Define functions and constants for the private names of transformers, peft and TRL that this package uses.

Input: models and modules of these libraries. Output: values of private attributes, or changes to them. No other file
of the package uses such a name (tests/test_internals.py checks it).
"""

from __future__ import annotations

import contextvars
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

ATTRIBUTES_OF_AN_INSTANCE = ("_is_hf_initialized", "_compiled_call", "_last_compile_config")
"""Attributes that transformers sets on a module, and that copies of the module must not have."""

LOADING_STEP = "_load_pretrained_model"
"""The static method of PreTrainedModel that reads the files in ``from_pretrained``."""
LAST_STEP = "_finalize_model_loading"
"""The static method of PreTrainedModel that initialises missing weights and ties weights in ``from_pretrained``."""


def build_from_config(kind: Any, config: Any) -> nn.Module:
    """Build a model of transformers of a given class, as ``from_config`` does for the class that it chooses."""
    model: nn.Module = kind._from_config(config)
    return model


def names_not_saved(model: Any) -> tuple[str, ...]:
    """Return the names of a model's tensors that are not saved."""
    name = "_keys_to_ignore_on_save"
    # Most modules have none, and the lookup in a module is slow if it fails.
    return tuple(model.__dict__.get(name) or getattr(type(model), name, None) or ())


def optional_name_patterns(model: Any) -> tuple[str, ...]:
    """Return name patterns of the tensors that files may lack."""
    return tuple(model._keys_to_ignore_on_load_missing or ())


def adjust_load_report(model: Any, info: Any) -> None:
    """Remove from transformers' load report the names that the model allows to be missing or unexpected."""
    model._adjust_missing_and_unexpected_keys(info)


def set_conversions(model: Any, conversions: list[Any]) -> None:
    """Set the weight conversions that transformers reverses when it saves the model."""
    model._weight_conversions = conversions


def dtype_plan(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the fixed dtypes that a model keeps for some parameters when it is cast to ``dtype``, by name pattern."""
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    return plan


def mark_initialized(tensor: torch.Tensor) -> None:
    """Mark a tensor as initialised, so that transformers' init functions skip it."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def replace_initialization(model: Any, make: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Wrap the model's function that initialises one module: replace it by ``make(function)``."""
    model._initialize_weights = make(model._initialize_weights)


def no_split_class_names(module: Any) -> tuple[str, ...]:
    """Return the class names of a model's blocks, which ``device_map`` must not split."""
    return tuple(getattr(module, "_no_split_modules", None) or ())


def lists_blocks(module: nn.Module) -> bool:
    """Return whether a module's class has a list of blocks, as transformers models have."""
    return hasattr(type(module), "_no_split_modules")


def encodes_images_before_forward(model: Any) -> bool:
    """Return whether ``generate`` encodes images before the first forward pass."""
    return bool(getattr(model, "_supports_mm_encoder_outputs", lambda: False)())


def copy_implementations(config: Any, other: Any) -> None:
    """Give a configuration, and those within it, the implementations of attention and experts that another one has."""
    other._attn_implementation = config._attn_implementation
    other._experts_implementation = config._experts_implementation
    for name in config.sub_configs:
        if getattr(config, name, None) is not None and getattr(other, name, None) is not None:
            copy_implementations(getattr(config, name), getattr(other, name))


def reset_caches(layer: Any) -> None:
    """Give a copied peft layer its own empty cache."""
    layer._caches = {}


# --- trainers and blocks ----------------------------------------------------------------------------------------------


def set_weights_of_engine(engine: Any, weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
    """Make an engine of TRL (``VLLMGeneration``) read the weights that it synchronises from an iterator."""
    engine._iter_named_params = weights


def drop_casts_of_embeddings(model: nn.Module) -> None:
    """Remove the hook with which TRL's ``cast_lm_head_to_fp32`` casts the outputs of a tied embedding."""
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__name__", "") == "cast_outputs_to_original_dtype":
                del module._forward_hooks[key]


def recompute_in_context(block: Any) -> None:
    """Make backward recompute a block with the context variables of its forward, if transformers checkpoints it."""
    checkpoint = getattr(block, "_gradient_checkpointing_func", None)
    if checkpoint is None or getattr(checkpoint, "is_wrapped", False):
        return

    def checkpoint_in_context(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        context = contextvars.copy_context()

        def run(*args: Any, **kwargs: Any) -> Any:
            return context.copy().run(forward, *args, **kwargs)

        return checkpoint(run, *args, **kwargs)

    checkpoint_in_context.is_wrapped = True  # type: ignore[attr-defined]
    block._gradient_checkpointing_func = checkpoint_in_context


# --- tensor parallelism ---------------------------------------------------------------------------------------------


def parallel_styles() -> Mapping[str, Any]:
    """Return transformers' styles of tensor parallelism by name; none if they do not split all sizes into DTensors."""
    try:
        styles = importlib.import_module("transformers.distributed.tensor_parallel")
    except ImportError:  # before version 5.16
        return {}
    layer = getattr(styles, "TensorParallelLayer", None)
    return styles.ALL_PARALLEL_STYLES if hasattr(layer, "_from_local_last_dim_shard") else {}


def dispatch_to_experts() -> Any:
    """Return transformers' class that sends tokens to the ranks of their experts; None if it has none."""
    try:
        experts = importlib.import_module("transformers.distributed.expert_parallel")
    except ImportError:
        return None
    return getattr(experts, "AllToAllEP", None)


ATTRIBUTES_OF_EXPERTS = ("num_experts", "_is_expert_parallel")
"""Attributes of a module with experts that transformers changes if the experts are divided among ranks."""


def set_tensor_parallel_size(model: Any, size: int) -> None:
    """Tell a model over how many ranks its layers are split; ``generate`` sizes its caches by it."""
    model._tp_size = size


def forget_tensor_parallel_size(model: Any) -> None:
    """Hide from peft that layers are split: it would gather the tensors of a state dict, which may be on meta."""
    if "_tp_size" in vars(model):
        model._tp_size = None


# --- attention ------------------------------------------------------------------------------------------------------


def attention_function(implementation: str) -> Callable[..., Any] | None:
    """Return the attention function of a name in transformers' registry; None if there is none."""
    return _registry_of("AttentionInterface").get(implementation)


def mask_function(implementation: str) -> Callable[..., Any] | None:
    """Return the function that builds masks for an attention implementation; None if it needs no masks."""
    return _registry_of("AttentionMaskInterface").get(implementation)


def register_attention(name: str, attend: Callable[..., Any], make_mask: Callable[..., Any] | None) -> None:
    """Register an attention function in transformers, and the function that builds its masks."""
    _registry_of("AttentionInterface")[name] = attend
    if make_mask is not None:
        _registry_of("AttentionMaskInterface")[name] = make_mask


def _registry_of(interface: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = getattr(sys.modules["transformers"], interface)._global_mapping
    return found


def attention_implementation(config: Any) -> str:
    """Return the attention implementation of a configuration; "" if it has none."""
    return getattr(config, "_attn_implementation", None) or ""


def supports_sdpa(cls: type[nn.Module]) -> bool:
    """Return whether a model class can compute attention with torch's function for it."""
    return bool(getattr(cls, "_supports_sdpa", False))


def set_attention_implementation(config: Any, name: str) -> None:
    """Set the attention implementation of one configuration, and not of those within it."""
    config._attn_implementation_internal = name


def set_attention_implementations(config: Any, name: str) -> None:
    """Set the attention implementation of a configuration, and of those within it."""
    config._attn_implementation = name


def set_experts_implementation(config: Any, name: str) -> None:
    """Set how a model computes its experts, if its configuration has this setting."""
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = name


def resume_generations(trainer: Any, micro_batches: int) -> None:
    """Set a trainer of TRL that reuses generated batches to a position in an epoch; others are left as they are.

    The trainer counts micro-batches to know when to generate. After a resume it would count from 0, so it would use a
    generation that the saved run had begun for the prompts of the next one, too, and skip some of these. An epoch is a
    whole number of generations. The next step generates again, because the saved run's completions are lost.
    """
    if hasattr(trainer, "_buffered_inputs") and hasattr(trainer, "_step"):
        trainer._step = micro_batches
        trainer._buffered_inputs = None
