"""Convert names and layout between Hugging Face files and a model, with transformers' own code.

Loading: from file headers to a region for each tensor of the model. Saving: from a model's tensors to a region for each
tensor of the files.

transformers renames, merges and transposes tensors between a checkpoint and a model. Its loading and saving functions
run here on descriptions instead of values (see [Note: regions] in `regions`). So every architecture that transformers
supports is converted by the rules of transformers, and no data is read or gathered.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.library_internals import adjust_load_report, optional_name_patterns, set_conversions
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.hf.weights_folder import WeightsSource, source_of_weights
from fsdp2_strategy.model.boxes import row_major
from fsdp2_strategy.model.names import clean
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.safetensors_format import Entry


@dataclass(frozen=True)
class Recipe:
    """The regions of a model's tensors in files, by the model's own names."""

    regions: Mapping[str, Region]
    unexpected: tuple[str, ...]
    """Converted names of tensors that are in the files but not in the model."""
    may_be_missing: re.Pattern[str] | None


def recipe_for(origin: WeightsSource, entries: Mapping[str, Entry]) -> Recipe:
    """Return the region of each tensor of ``origin.model``; read no values.

    A region has the dtype of its tensor in the origin's model: values are cast to it first, then to that of the target.
    """
    sources = {name: Region.of(entry, entry.shape, entry.dtype) for name, entry in entries.items()}
    if origin.conversions is None:
        wanted = {clean(name): tensor for name, tensor in origin.model.state_dict(keep_vars=True).items()}
        regions = {name: region.to(wanted[name].dtype) for name, region in sources.items() if name in wanted}
        return Recipe(regions, tuple(name for name in sources if name not in wanted), None)
    return _converted(origin, sources)


def _converted(origin: WeightsSource, sources: Mapping[str, Region]) -> Recipe:
    from transformers import core_model_loading, modeling_utils  # noqa: PLC0415

    regions: dict[str, Region] = {}

    def keep(_model: object, name: str, value: Region, *_rest: object, **_more: object) -> None:
        regions[name] = value

    model: Any = origin.model
    settings = modeling_utils.LoadStateDictConfig(weight_mapping=copy.deepcopy(origin.conversions))
    with (
        patch.object(core_model_loading, "set_param_for_module", keep),
        patch.object(core_model_loading, "tqdm", lambda items, **_: items),
    ):
        convert = core_model_loading.convert_and_load_state_dict_in_model
        plan: dict[str, Any] = {"tp_plan": None} if "tp_plan" in inspect.signature(convert).parameters else {}
        info, _ = convert(model, dict(sources), settings, **plan)  # before version 5.16 it requires a plan
    if info.conversion_errors:
        name, text = next(iter(info.conversion_errors.items()))
        reason = text.strip().splitlines()
        raise CheckpointError(
            f"cannot load {origin.where}: its tensors cannot be converted to {name}: {'; '.join(reason[-2:])}. Check "
            "that configuration and files belong together."
        )
    info.missing_keys = set()
    adjust_load_report(model, info)
    ignored = optional_name_patterns(model)
    pattern = re.compile("|".join(f"({p})" for p in ignored)) if ignored else None
    return Recipe(regions, tuple(sorted(info.unexpected_keys)), pattern)


def renames(model: nn.Module, described: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, str]:
    """Map given names to the model's names, without tensors that transformers also splits, merges or transposes."""
    origin = source_of_weights(meta_skeleton(model))
    entries = {name: Entry(name, Path(), 0, dtype, shape) for name, (shape, dtype) in described.items()}
    found = {}
    for name, region in recipe_for(origin, entries).regions.items():
        piece = region.only_piece
        if piece is None or not isinstance(piece.source, Entry):
            continue
        if (piece.shape, piece.strides) == (piece.source.shape, row_major(piece.source.shape)):
            found[piece.source.name] = name
    return found


def hub_regions(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, Region]:
    """Return the regions of a transformers model's tensors, in the Hugging Face names and layout; read no values."""
    from transformers import core_model_loading  # noqa: PLC0415
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415

    # Leave out prefixes that are optional in files: the model does not record whether its files had them, and files
    # without them load, too.
    conversions = [
        conversion
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(conversion, getattr(core_model_loading, "PrefixChange", ()))  # early versions have none
    ]
    set_conversions(model, conversions)
    described: Any = {name: Region.of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    return dict(core_model_loading.revert_weight_conversion(model, described))
