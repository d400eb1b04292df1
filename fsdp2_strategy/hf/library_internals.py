"""Define functions and constants for the private names of transformers, peft and TRL that this package uses.

Input: models and modules of these libraries. Output: values of private attributes, or changes to them. No other file
of the package uses such a name (tests/test_internals.py checks it).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any

import torch
from torch import nn

ATTRIBUTES_OF_AN_INSTANCE = ("_is_hf_initialized", "_compiled_call", "_last_compile_config")
"""Attributes that transformers sets on a module, and that copies of the module must not have."""

LOADING_STEP = "_load_pretrained_model"
"""The static method of PreTrainedModel that reads the files in ``from_pretrained``."""
LAST_STEP = "_finalize_model_loading"
"""The static method of PreTrainedModel that initialises missing weights and ties weights in ``from_pretrained``."""


def names_not_saved(model: Any) -> tuple[str, ...]:
    """Return the names of a model's tensors that are not saved."""
    return tuple(getattr(model, "_keys_to_ignore_on_save", None) or ())


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


def reset_caches(layer: Any) -> None:
    """Give a copied peft layer its own empty cache."""
    layer._caches = {}


# --- recorded outputs -----------------------------------------------------------------------------------------------

_lock = Lock()
_users: dict[str, int] = {}
"""For each class that was given the entry of another class: the number of its forward passes that are running."""


def recorded_outputs(cls: type[nn.Module]) -> Any:
    """Return the registry entry of a class: which outputs transformers can record; None if there is no entry."""
    return dict.get(_registry(), str(cls))


def register_recorded_outputs(cls: type[nn.Module], original: type[nn.Module]) -> None:
    """Give ``cls`` the entry of ``original`` if it has none, until `unregister_recorded_outputs` is called."""
    with _lock:
        if str(cls) in _users or recorded_outputs(cls) is None:
            _users[str(cls)] = _users.get(str(cls), 0) + 1
            dict.__setitem__(_registry(), str(cls), recorded_outputs(original))


def unregister_recorded_outputs(cls: type[nn.Module]) -> None:
    """Undo one call of `register_recorded_outputs`; undoing the last call removes the entry."""
    with _lock:
        if str(cls) in _users:
            _users[str(cls)] -= 1
            if not _users[str(cls)]:
                del _users[str(cls)]
                _registry().pop(str(cls), None)


def set_weights_of_engine(engine: Any, weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
    """Make an engine of TRL (``VLLMGeneration``) read the weights that it synchronises from an iterator."""
    engine._iter_named_params = weights


def _registry() -> dict[str, Any]:
    loaded: Any = sys.modules.get("transformers.modeling_utils")
    return getattr(loaded, "_CAN_RECORD_REGISTRY", {})
