"""Match each tensor of a model to its values in files, and check that shapes and ties fit.

Input: a model, and the origin of each module's values. Output: a `Target` for each tensor, and a report. Reads only
headers, except to compare tied weights, and does not change the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fsdp2_strategy.distributed.torch_internals import non_persistent_buffers
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.conversions import Recipe, recipe_for
from fsdp2_strategy.hf.meta.recorded_init import recorded_tensor
from fsdp2_strategy.hf.mismatches import LOAD_WEIGHTS, Advice, Shapes, describe_shapes
from fsdp2_strategy.hf.weights_folder import WeightsSource, read_headers
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.names import clean, tied_names
from fsdp2_strategy.storage.regions import Region, sources_of
from fsdp2_strategy.storage.replicated_reads import read_requests_for
from fsdp2_strategy.storage.verified_read import Reader, ReadRequest


@dataclass(frozen=True)
class LoadReport:
    """The result of a load; tensors have the model's own names."""

    loaded: list[str] = field(default_factory=list)
    """Parameters and buffers that were read from files."""
    missing: list[str] = field(default_factory=list)
    """Parameters and buffers that no file contains: initialised, or left unchanged if they had values."""
    unexpected: list[str] = field(default_factory=list)
    """Tensors in the files that the model does not have."""
    cast: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    """Loaded tensors whose dtype differs: the dtype in the file, and the dtype in the model."""


@dataclass(frozen=True, eq=False)
class Target:
    """One tensor of the model, with every module and key under which it is registered."""

    name: str
    registrations: list[tuple[nn.Module, str]]
    is_non_persistent: bool
    """Whether the tensor is a non-persistent buffer, which files do not contain."""
    regions: list[Region]
    """The tensor's values in the files; several regions if the files contain a tied tensor under several names."""
    origin: WeightsSource | None
    """The files of the module, and the model that they belong to; None if its values are in no files."""
    name_in_origin: str
    """The tensor's name in the origin's model, which may be a part of this model."""
    may_be_missing: bool
    """Whether files may lack the tensor in any case: it has no origin, or transformers says so."""

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is registered now; materialising a model replaces its tensors."""
        return tensor_at(self.registrations)


def tensor_at(registrations: Sequence[tuple[nn.Module, str]]) -> torch.Tensor:
    """Return the tensor that is registered in these modules under these keys."""
    module, key = registrations[0]
    found = module._parameters.get(key)
    return found if found is not None else module._buffers[key]  # type: ignore[return-value]


def match_tensors(
    root: nn.Module,
    known: Mapping[nn.Module, tuple[WeightsSource, str]],
    advice: Advice = LOAD_WEIGHTS,
    *,
    is_folder_given: bool = False,
) -> tuple[list[Target], LoadReport]:
    """Find the values of every tensor in the files, and check shapes; read only headers.

    Args:
        root: the model.
        known: for each module whose values are in files, their origin, and the module's name in the origin's model.
        advice: the ends of error messages.
        is_folder_given: whether the files are others than those that the model was built from. A copy of a tensor then
            gets its values from these files, under its own name.
    """
    recipes: dict[WeightsSource, Recipe] = {}
    for origin, _ in (*known.values(), *(() if is_folder_given else _copied(root))):
        if origin not in recipes:
            recipes[origin] = recipe_for(*read_headers(origin))
    targets = _targets(root, known, recipes)
    report = LoadReport(unexpected=[name for recipe in recipes.values() for name in recipe.unexpected])
    if different := _other_shapes(targets):
        raise CheckpointError(
            f"cannot load {class_name(root)}: {describe_shapes(different, 'the files')}. {advice.for_shapes(different)}"
        )
    for target in targets:
        if target.regions:
            report.loaded.append(target.name)
            stored = sources_of(target.regions[0])[0].dtype
            if stored != target.tensor.dtype:
                report.cast[target.name] = (stored, target.tensor.dtype)
        elif not target.is_non_persistent:
            report.missing.append(target.name)
    return targets, report


def _targets(
    root: nn.Module, known: Mapping[nn.Module, tuple[WeightsSource, str]], recipes: Mapping[WeightsSource, Recipe]
) -> list[Target]:
    found: dict[int, Target] = {}
    ties: dict[WeightsSource, dict[str, list[str]]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        origin, path_in_origin = known.get(module, (None, ""))
        for key, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            if tensor is None:
                continue
            is_non_persistent = key in non_persistent_buffers(module)
            name_in_origin = clean(f"{path_in_origin}.{key}" if path_in_origin else key)
            target = found.get(id(tensor))
            if target is None:
                name = clean(f"{path}.{key}" if path else key)
                optional = origin is None or _may_be_missing(origin, recipes[origin], name_in_origin)
                target = found[id(tensor)] = Target(name, [], is_non_persistent, [], origin, name_in_origin, optional)
            target.registrations.append((module, key))
            if origin is not None and not is_non_persistent:
                region = recipes[origin].regions.get(name_in_origin)
                if region is not None and not any(r is region for r in target.regions):
                    target.regions.append(region)
    for target in found.values():
        if not (target.regions or target.is_non_persistent):
            target.regions.extend(_regions_of_source(target, recipes, ties))
    return list(found.values())


def _may_be_missing(origin: WeightsSource, recipe: Recipe, name: str) -> bool:
    pattern = recipe.may_be_missing
    return origin.ignore_mismatched_sizes or bool(pattern and pattern.search(name))


def _copied(root: nn.Module) -> Iterator[tuple[WeightsSource, str]]:
    """Yield the files and names of the tensors that were copied to other tensors of a model on meta."""
    for module in root.modules():
        for key in (*module._parameters, *module._buffers):
            recorded = recorded_tensor(module, key)
            if recorded is not None and recorded.copied_from is not None:
                yield recorded.copied_from


def _regions_of_source(
    target: Target, recipes: Mapping[WeightsSource, Recipe], ties: dict[WeightsSource, dict[str, list[str]]]
) -> Iterator[Region]:
    """Yield the region of the tensor that a target was tied to in the model of the files, or is a recorded copy of."""
    recorded = [found for module, key in target.registrations if (found := recorded_tensor(module, key))]
    sources = [found.copied_from for found in recorded if found.copied_from is not None]
    if target.origin is not None and all(each.copied_from or not each.changed_since_init for each in recorded):
        sources.append((target.origin, target.name_in_origin))
    for origin, name in sources:
        if origin not in ties:
            ties[origin] = tied_names(origin.model)
        for each in (name, *ties[origin].get(name, ())):
            region = recipes[origin].regions.get(each) if origin in recipes else None
            if region is not None and tuple(region.shape) == tuple(target.tensor.shape):
                yield region
                return


def _other_shapes(targets: Sequence[Target]) -> dict[str, Shapes]:
    """Return the stored and the model's shape of each tensor for which they differ, unless that was requested."""
    different: dict[str, Shapes] = {}
    for target in targets:
        for region in list(target.regions):
            stored, own = tuple(region.shape), tuple(target.tensor.shape)
            if stored != own and target.origin is not None and target.origin.ignore_mismatched_sizes:
                target.regions.remove(region)
            elif stored != own:
                different[target.name] = (stored, own)
    return different


def check_ties(targets: Sequence[Target], reader: Reader) -> None:
    """Compare the values of tensors that the files contain under several names, on this rank's shards."""
    for target in targets:
        for region in target.regions[1:]:
            for own in read_requests_for(target.name, region, target.tensor):
                requests = [
                    ReadRequest(target.name, r, own.box, torch.empty(own.tensor.shape, dtype=own.tensor.dtype))
                    for r in (target.regions[0], region)
                ]
                reader.read(requests)
                if not torch.equal(requests[0].tensor, requests[1].tensor):
                    raise CheckpointError(
                        f"cannot load {target.name}: the files contain different values for the names that it is tied "
                        "to, expected the same. Build the model with tie_word_embeddings=False."
                    )
