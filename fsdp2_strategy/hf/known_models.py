"""Build a model that transformers knows on meta from its configuration, to know names and shapes of its tensors.

Input: a folder with ``config.json``. Output: a model on the meta device, or None if transformers has no such class; an
error if given tensors are those of another model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.errors import CheckpointError, shown
from fsdp2_strategy.hf.conversions import Recipe, recipe_for
from fsdp2_strategy.hf.library_internals import build_from_config
from fsdp2_strategy.hf.meta.init_on_meta import init_on_meta
from fsdp2_strategy.hf.weights_folder import CONFIG, source_of_weights
from fsdp2_strategy.model.names import saved_tensors
from fsdp2_strategy.storage.file_reads import read_file
from fsdp2_strategy.storage.safetensors_format import Entry

_CONFIG_BYTES = 64 << 20


def build_known(folder: Path) -> nn.Module | None:
    """Build the model of a folder's ``config.json`` on meta; None if transformers itself does not have its class."""
    config = read_configuration(folder)
    names = config.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and "model_type" in config):
        return None
    import transformers  # noqa: PLC0415  slow to import

    found: object = getattr(transformers, names[0], None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)) or "auto_map" in config:
        return None
    kind: Any = found
    try:
        with init_on_meta():
            model = build_from_config(kind, kind.config_class.from_dict(dict(config)))
        model.config = kind.config_class.from_dict(dict(config))  # the constructor has changed dtypes in the other
        return model
    except (AttributeError, ImportError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot build {names[0]} from {folder / CONFIG}: {error}. Use the version of transformers that wrote it."
        ) from error


def read_configuration(folder: Path) -> Mapping[str, Any]:
    """Return the content of a folder's ``config.json``, in which numbers may be infinite; empty if there is none."""
    try:
        config = json.loads(read_file(folder / CONFIG, _CONFIG_BYTES, follow_link=True))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {folder / CONFIG}: {error}, expected JSON. Copy it again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"cannot read {folder / CONFIG}: it is {shown(config)}, expected an object. Copy it.")
    return config


def check_configuration(folder: Path, described: Mapping[str, tuple[tuple[int, ...], torch.dtype]], what: str) -> None:
    """Raise if a folder's ``config.json`` is that of another model than the one with these shapes and dtypes by name.

    The names are those of Hugging Face or those of the model. If transformers does not have the class, only the sizes
    of the vocabulary and of the hidden states are compared. ``what`` names the tensors, for the message.
    """
    config, model = read_configuration(folder), build_known(folder)
    if model is None:
        differences = _different_sizes(config, described)
    else:
        entries = {name: Entry(name, Path(), 0, dtype, shape) for name, (shape, dtype) in described.items()}
        differences = _differences(model, recipe_for(source_of_weights(model), entries))
    if differences:
        more = f"; {len(differences) - 3:,} more" if len(differences) > 3 else ""
        raise CheckpointError(
            f"cannot use {folder / CONFIG} for {what}: {'; '.join(differences[:3])}{more}, expected the configuration "
            "of the model that was saved. Pass the folder of that model to --sidecars."
        )


def _differences(model: nn.Module, recipe: Recipe) -> list[str]:
    """Return how the tensors in files differ from those of a model."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    found = []
    for name, tensor in saved_tensors(model).items():
        region = next((recipe.regions[each] for each in names[id(tensor)] if each in recipe.regions), None)
        if region is not None and tuple(region.shape) != tuple(tensor.shape):
            found.append(f"{name} has shape {list(region.shape)}, and {list(tensor.shape)} by the configuration")
        elif region is None and not (recipe.may_be_missing and recipe.may_be_missing.search(name)):
            found.append(f"{name} is missing")
    return found + [f"{type(model).__name__} has no {name}" for name in recipe.unexpected]


def _different_sizes(
    config: Mapping[str, Any], described: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> list[str]:
    """Return the sizes of a configuration that no matrix has."""
    found = {length for shape, _ in described.values() if len(shape) > 1 for length in shape}
    sizes = {key: config.get(key) for key in ("vocab_size", "hidden_size")}
    return [
        f"{key} is {size}, which no matrix there has"
        for key, size in sizes.items()
        if isinstance(size, int) and size not in found
    ]
