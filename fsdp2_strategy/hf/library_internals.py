"""Every private name of transformers and peft that this package relies on, behind one small function each.

Input: models and modules of these libraries. Output: what their private attributes hold, or a change of it. Nothing
else in the package touches such a name (tests/test_internals.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import nn

ATTRIBUTES_OF_AN_INSTANCE = ("_is_hf_initialized", "_compiled_call", "_last_compile_config")
"""Attributes that transformers sets on a module, and that no copy of it may have."""

LOADING_STEP = "_load_pretrained_model"
"""The static method of PreTrainedModel that reads files in ``from_pretrained``."""
LAST_STEP = "_finalize_model_loading"
"""The static method of PreTrainedModel that initialises what no file holds, and ties weights."""


def names_not_saved(model: Any) -> tuple[str, ...]:
    """Return the names of a model's tensors that no file holds."""
    return tuple(getattr(model, "_keys_to_ignore_on_save", None) or ())


def patterns_not_missed(model: Any) -> tuple[str, ...]:
    """Return patterns of names that files may lack."""
    return tuple(model._keys_to_ignore_on_load_missing or ())


def adjust_load_report(model: Any, info: Any) -> None:
    """Take from transformers' record of a load what the model expects to be missing, or too many."""
    model._adjust_missing_and_unexpected_keys(info)


def set_conversions(model: Any, conversions: list[Any]) -> None:
    """Set the conversions whose reverse gives the names under which a model is saved."""
    model._weight_conversions = conversions


def dtype_plan(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return patterns of names of the parameters that a model keeps in another dtype, and that dtype."""
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    return plan


def mark_initialized(tensor: torch.Tensor) -> None:
    """Mark a tensor as initialised, so that transformers' init functions skip it."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def replace_initialization(model: Any, make: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Replace the function that initialises one module by what ``make`` returns for it."""
    model._initialize_weights = make(model._initialize_weights)


def blocks_that_stay_whole(module: Any) -> tuple[str, ...]:
    """Return the class names of a model's layers, as it lists them for placing layers on devices."""
    return tuple(getattr(module, "_no_split_modules", None) or ())


def lists_blocks(module: nn.Module) -> bool:
    """Say whether a module is a model that may list its layers: one of transformers, or written like one."""
    return hasattr(type(module), "_no_split_modules")


def encodes_images_before_forward(model: Any) -> bool:
    """Say whether generation makes features of images before the first forward pass."""
    return bool(getattr(model, "_supports_mm_encoder_outputs", lambda: False)())


def forget_caches(layer: Any) -> None:
    """Give a copied layer of peft an empty cache of its own."""
    layer._caches = {}


# --- recorded outputs -----------------------------------------------------------------------------------------------

_lock = Lock()
_lent: dict[str, int] = {}
"""For each class that was lent another's entry, how many of its forward passes run."""


def recorded_outputs(cls: type[nn.Module]) -> Any:
    """Return what a model class may record of its layers' outputs; None where it is in no registry."""
    return dict.get(_registry(), str(cls))


def lend_recorded_outputs(cls: type[nn.Module], original: type[nn.Module]) -> None:
    """Add another class's registry entry for a class, until `take_back_recorded_outputs` was called as often."""
    with _lock:
        if str(cls) in _lent or recorded_outputs(cls) is None:
            _lent[str(cls)] = _lent.get(str(cls), 0) + 1
            dict.__setitem__(_registry(), str(cls), recorded_outputs(original))


def take_back_recorded_outputs(cls: type[nn.Module]) -> None:
    """End what `lend_recorded_outputs` began."""
    with _lock:
        if str(cls) in _lent:
            _lent[str(cls)] -= 1
            if not _lent[str(cls)]:
                del _lent[str(cls)]
                _registry().pop(str(cls), None)


def _registry() -> dict[str, Any]:
    loaded: Any = sys.modules.get("transformers.modeling_utils")
    return getattr(loaded, "_CAN_RECORD_REGISTRY", {})
