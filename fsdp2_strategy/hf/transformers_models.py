"""Find transformers models within a module.

Input: a module. Output: whether it is a transformers model, or the transformers models that it contains.
"""

from __future__ import annotations

from torch import nn


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a module is a transformers model."""
    if not hasattr(model, "config"):
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
