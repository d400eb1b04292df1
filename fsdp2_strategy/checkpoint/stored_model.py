"""Locate a model's tensors in a checkpoint under the names of its ``state_dict``, without the model.

Input: an open checkpoint. Output: regions of its files by the model's own names.

[Note: own names] The files of `model/` have Hugging Face names. The model's own names differ from these in two ways:

1. transformers renames and merges tensors. So a model that transformers knows is built on meta from its configuration,
   and its tensors are matched as in a load. Other models are saved with their own names.
2. A wrapper around the model, such as a critic or peft's, adds a prefix, and adapters insert ``base_layer``. Both
   follow from the names that the wrapper's tensors and the optimizer's parameters have in the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from fsdp2_strategy.checkpoint.paths import TRAINABLE, WRAPPER, CheckpointPaths
from fsdp2_strategy.checkpoint.storage import stored_in
from fsdp2_strategy.errors import CheckpointError, some
from fsdp2_strategy.hf.known_models import build_known
from fsdp2_strategy.hf.load_plan import match_tensors
from fsdp2_strategy.hf.mismatches import CHECKPOINT
from fsdp2_strategy.hf.weights_folder import has_root_names, open_folder
from fsdp2_strategy.storage.regions import Region, sources_of
from fsdp2_strategy.storage.safetensors_format import Entry
from fsdp2_strategy.storage.verified_read import Reader, ReadRequest

_INSIDE = {"modules_to_save": "original_module", "token_adapter": "token_adapter.base_layer"}
"""The name of the original module in peft's wrappers of modules, by the name of what they train."""


@dataclass(frozen=True)
class StoredModel:
    """The tensors of a model in a checkpoint."""

    regions: Mapping[str, Region]
    """By the model's own names; tied tensors under each of their names."""
    prefix: str = ""
    """What a wrapper puts in front of the names of the model in it."""
    is_partial: bool = False
    """Whether the checkpoint has trainable weights only."""


def stored_model(paths: CheckpointPaths, optimized: Collection[str] = ()) -> StoredModel:
    """Locate the tensors of a model in a checkpoint, from headers; see [Note: own names].

    Args:
        paths: the checkpoint, or one of its models.
        optimized: the own names of the parameters that the optimizer has.

    Raises:
        CheckpointError: the checkpoint does not say what the names are.
    """
    if (paths.state / TRAINABLE).is_dir():
        return StoredModel(_as_regions(stored_in(paths.state / TRAINABLE, paths)), is_partial=True)
    if has_root_names(paths.weights, paths.lists):
        return StoredModel(_as_regions(stored_in(paths.weights, paths)))
    inner = _inner_regions(paths)
    added = stored_in(paths.state / WRAPPER, paths)
    if paths.is_lerobot or not (added or optimized):
        return StoredModel(inner | _as_regions(added))
    prefix = _prefix_of(inner, {*added, *optimized}, paths)
    holders = {name[:at] for name in added for at, letter in enumerate(name) if letter == "."}
    wrapped = {_name_in_wrapper(name, prefix, holders): region for name, region in inner.items()}
    return StoredModel(wrapped | _as_regions(added), prefix)


def read_region(reader: Reader, name: str, region: Region) -> torch.Tensor:
    """Read a complete tensor, and verify its checksums."""
    tensor = torch.empty(region.shape, dtype=region.dtype)
    reader.read([ReadRequest(name, region, tuple((0, n) for n in region.shape), tensor)])
    return tensor


def _as_regions(entries: Mapping[str, Entry]) -> dict[str, Region]:
    return {name: Region.of(entry, entry.shape, entry.dtype) for name, entry in entries.items()}


def _inner_regions(paths: CheckpointPaths) -> dict[str, Region]:
    """Return the tensors of the model without a wrapper and without adapters."""
    model = build_known(paths.weights)
    if model is None:
        return _as_regions(stored_in(paths.weights, paths))
    origin = open_folder(model, paths.weights, belongs=paths.lists)
    known = {module: (origin, name) for name, module in model.named_modules()}
    targets, report = match_tensors(model, known, CHECKPOINT, is_folder_given=True)
    missing = [each.name for each in targets if not (each.regions or each.is_non_persistent)]
    if missing or report.unexpected:
        raise CheckpointError(
            f"cannot read {paths.weights}: it lacks {some(missing, 'tensor')} of {type(model).__name__} and has "
            f"{some(report.unexpected, 'tensor')} more, expected those of its config.json. Use the version of "
            "transformers that the checkpoint was saved with (fsdp2-strategy inspect shows it)."
        )
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {name: _as_stored(each.regions[0]) for each in targets if each.regions for name in names[id(each.tensor)]}


def _as_stored(region: Region) -> Region:
    """Return a region with the dtype of the files, instead of that of the model on meta."""
    sources = sources_of(region)
    return region.to(sources[0].dtype) if sources else region


def _prefix_of(inner: Iterable[str], named: Collection[str], paths: CheckpointPaths) -> str:
    """Return what most names of a wrapper or an optimizer have in front of a name, or module, of ``inner``."""
    known = {*inner}
    owners = {name.rpartition(".")[0] for name in known} - {""}
    found: Counter[str] = Counter()
    for name in named:
        starts = [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")]
        own = next((name[:at] for at in starts if name[at:] in known), None)
        if own is None:  # the name of an adapter: it contains that of a module of the model
            spans = ((begin, end - 1) for begin in starts for end in reversed(starts) if begin < end)
            own = next((name[:begin] for begin, end in spans if name[begin:end] in owners), None)
        if own is not None:
            found[own] += 1
    if not found:
        raise CheckpointError(
            f"cannot name the tensors in {paths.state}: no name in {WRAPPER}/ or of a parameter of the optimizer "
            f"ends with a name in {paths.weights.name}/, expected one that shows where the model is in it. Load the "
            "checkpoint into the model, and save it with its optimizer."
        )
    return found.most_common(1)[0][0]


def _name_in_wrapper(name: str, prefix: str, holders: Collection[str]) -> str:
    """Return the own name of a tensor: with the wrapper's prefix, and with peft's modules around the original one.

    ``holders`` has the names of the modules that hold tensors which only the wrapper has, directly or not.
    """
    owner, _, key = name.rpartition(".")
    parts = owner.split(".") if owner else []
    for end in range(1, len(parts) + 1):
        module = prefix + ".".join(parts[:end])
        inside = next((text for kind, text in _INSIDE.items() if f"{module}.{kind}" in holders), None)
        if inside is not None:
            return ".".join([module, inside, *parts[end:], key])
    full = prefix + owner
    while owner and full in holders:
        full += ".base_layer"
    return f"{full}.{key}" if owner else prefix + key
