"""Find transformers models within a module, and write their configuration.

Input: a module. Output: whether it is a transformers model, the transformers models that it contains, or files.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fsdp2_strategy.errors import dtype_text
from fsdp2_strategy.storage.regions import Region


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a module is a transformers model."""
    if "config" not in model.__dict__ and not hasattr(type(model), "config"):  # the lookup in a module is slow
        return False
    from transformers import PreTrainedModel  # noqa: PLC0415

    return isinstance(model, PreTrainedModel)


def inner_model(root: nn.Module) -> nn.Module:
    """Return the only transformers model within a module; the module itself if it contains none or several."""
    models = list(outermost_models(root).values())
    return models[0] if len(models) == 1 else root


def outermost_models(root: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """Map dotted names to the outermost transformers models within a module, which may be the module itself."""
    if is_transformers_model(root):
        return {name: root}
    found: dict[str, nn.Module] = {}
    for child_name, child in root.named_children():
        found |= outermost_models(child, f"{name}.{child_name}" if name else child_name)
    return found


def write_configuration(folder: Path, skeleton: Any, regions: Mapping[str, Region]) -> None:
    """Write the configuration files that ``from_pretrained`` reads; no-op if it is not a transformers model."""
    if not is_transformers_model(skeleton):
        return
    config = copy.deepcopy(skeleton.config)
    floating = [region.dtype for region in regions.values() if region.dtype.is_floating_point]
    config.dtype = dtype_text(floating[0]) if floating else config.dtype
    config.architectures = [type(skeleton).__name__]
    if skeleton.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save  # noqa: PLC0415

        custom_object_save(skeleton, folder, config=config)
    config.save_pretrained(folder)
    if skeleton.can_generate():
        skeleton.generation_config.save_pretrained(folder)
