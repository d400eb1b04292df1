"""Plan a save: the names and layout of a model's tensors in files, and the byte ranges that this rank writes.

Input: a model, sharded or not. Output: the regions of the files, from which `storage.output_files` creates the files.
The plan follows from names, shapes, dtypes and placements alone, so ranks plan without communication.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.torch_internals import non_persistent_buffers, state_dict_hooks
from fsdp2_strategy.errors import CheckpointError, some
from fsdp2_strategy.hf.conversions import hub_regions
from fsdp2_strategy.hf.library_internals import dtype_plan, names_not_saved
from fsdp2_strategy.hf.round_trip import round_trips
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.hf.transformers_models import is_transformers_model
from fsdp2_strategy.model.materialize import is_uninitialised
from fsdp2_strategy.model.names import named_parameters, persistent_buffers
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.storage.regions import Region, sources_of
from fsdp2_strategy.storage.safetensors_format import CONVERTED, OWN_NAMES
from fsdp2_strategy.storage.shares import needs_gather


def tensors_to_write(root: nn.Module, skeleton: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors to write, each once; a tied tensor gets the name that loading expects."""
    structure, held = _structure_of(root)
    cached = model_state(root).get(_NAMES)
    if cached is not None and cached[0] == structure:
        found = {name: held[position] for name, position in cached[1].items()}
    else:
        found = _find_tensors(root, skeleton)
        positions = {id(tensor): position for position, tensor in enumerate(held)}
        if all(id(tensor) in positions for tensor in found.values()):
            names = {name: positions[id(tensor)] for name, tensor in found.items()}
            model_state(root).set(_NAMES, (structure, names))
    if lost := [name for name, tensor in found.items() if is_uninitialised(tensor)]:
        raise CheckpointError(
            f"cannot write the model: {some(lost, 'tensor')} have no values yet, expected values for all. Prepare the "
            "model, or load its weights, first."
        )
    return found


_NAMES = Slot[tuple[list[object], dict[str, int]]]("names in files")
"""A model's structure, and for each name in its files the index of the tensor in the list of `_structure_of`."""


def _structure_of(root: nn.Module) -> tuple[list[object], list[torch.Tensor]]:
    """Return the facts that decide the names of a model's tensors in files, and its tensors in a fixed order.

    Names are cached until a fact changes: comparing facts is much cheaper than a meta skeleton and two state dicts.
    """
    structure: list[object] = []
    held: list[torch.Tensor] = []
    waiting = [("", root)]
    while waiting:
        module_name, module = waiting.pop()
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        waiting += children
        structure += (module_name, len(children), names_not_saved(module), state_dict_hooks(module))
        structure.append(frozenset(non_persistent_buffers(module)))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                structure += (name, id(tensor))
                held.append(tensor)
    return structure, held


def _find_tensors(root: nn.Module, skeleton: Any) -> dict[str, torch.Tensor]:
    """Return the tensors to write; transformers' own rules select those of a transformers model."""
    if not is_transformers_model(root):
        return {**named_parameters(root), **persistent_buffers(root)}
    from transformers.modeling_utils import remove_tied_weights_from_state_dict  # noqa: PLC0415

    skeleton = skeleton or meta_skeleton(root)
    state = skeleton.state_dict()
    for name in names_not_saved(skeleton):
        state.pop(name, None)
    real, tensors = root.state_dict(keep_vars=True), skeleton.state_dict(keep_vars=True)
    # Early versions of transformers look up buffers with get_parameter, too.
    with patch.object(skeleton, "get_parameter", tensors.__getitem__):
        return {name: real[name] for name in remove_tied_weights_from_state_dict(state, skeleton)}


def regions_to_write(
    skeleton: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None, *, hub_names: bool = True
) -> dict[str, Region]:
    """Return the region of each tensor in the files, by its name there, which is the model's own without ``hub_names``.

    Floating-point parameters are cast to ``dtype``, except those that transformers keeps in a fixed dtype.
    """
    transformers_model = is_transformers_model(skeleton)
    if transformers_model and hub_names:
        regions = hub_regions(skeleton, tensors)
    else:
        regions = {name: Region.of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    if dtype is None:
        return regions
    kept = dtype_plan(skeleton, dtype) if transformers_model else {}
    parameters = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    written = {}
    for name, region in regions.items():
        sources = sources_of(region)
        fixed = [kept[pattern] for pattern in kept for source in sources if re.search(pattern, source)]
        cast = region.dtype.is_floating_point and all(source in parameters for source in sources)
        written[name] = region.to(fixed[0] if fixed else dtype) if cast else region
    return written


@dataclass(frozen=True)
class TensorLayout:
    """The tensors of a model's files, by their names there; `files_for` distributes them over the files."""

    regions: dict[str, Region]
    metadata: Mapping[str, str]
    """Metadata of the files' headers: whether a load applies transformers' conversions."""


def choose_layout(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> TensorLayout:
    """Choose names and layout of a checkpoint's files: guaranteed to load, and written without a gather if possible.

    Return the first of these that passes `round_trips`:

    1. Hugging Face names for tensors that need no gather, the model's own names for the others;
    2. Hugging Face names for all tensors, which may need a gather;
    3. the model's own names;
    4. the model's own names, and a mark in the headers that disables conversions. ``from_pretrained`` ignores the mark.
    """
    hub = regions_to_write(skeleton, tensors)
    own = {name: Region.of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    regions = dict(hub)
    while gathered := {name for name, region in regions.items() if needs_gather(region, tensors)}:
        sources = {source for name in gathered for source in sources_of(regions[name])}
        replaced = {name for name, region in regions.items() if sources.intersection(sources_of(region))}
        sources |= {source for name in replaced for source in sources_of(regions[name])}
        kept = {name: region for name, region in regions.items() if name not in replaced}
        regions = kept | {name: own[name] for name in sources}
    for candidate in (regions, hub, own):
        if round_trips(skeleton, candidate, tensors):
            return TensorLayout(candidate, CONVERTED)
    if not round_trips(skeleton, own, tensors, converted=False):
        raise CheckpointError(
            f"cannot save {type(skeleton).__name__}: a load would not restore its tensors, expected the names of "
            "named_parameters in state_dict. Remove the hooks that rename them."
        )
    message = (
        "%s: transformers' conversions do not restore its tensors, so from_pretrained cannot load the saved files; "
        "load_ckpt and load_weights can"
    )
    log(message, type(skeleton).__name__, level=logging.WARNING)
    return TensorLayout(own, OWN_NAMES)
