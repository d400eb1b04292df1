"""Files and a model, tensor by tensor: where each one's values come from, and whether that fits.

Input: a model, and which files hold the values of which of its modules. Output: a `Target` for each tensor, and a
report. Reads headers, and touches nothing.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.torch_internals import non_persistent_buffers
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.conversions import Recipe, recipe_for
from fsdp2_strategy.hf.regions import Region, sources_of
from fsdp2_strategy.hf.replicated_reads import wish_for
from fsdp2_strategy.hf.skeleton import original_class
from fsdp2_strategy.hf.verified_read import Reader, Wish
from fsdp2_strategy.hf.weights_folder import Origin, read_headers
from fsdp2_strategy.model.names import clean


@dataclass(frozen=True)
class LoadReport:
    """What a load did, by the model's own names."""

    loaded: list[str] = field(default_factory=list)
    """Parameters and buffers that got values from files."""
    missing: list[str] = field(default_factory=list)
    """Those that no file holds: initialised afresh, or left alone where they had values."""
    unexpected: list[str] = field(default_factory=list)
    """What the files hold beyond the model."""
    cast: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    """Those whose dtype changed on the way: from that of the file, to that of the model."""


@dataclass(frozen=True, eq=False)
class Target:
    """One tensor of the model, at all the places where it is registered."""

    name: str
    places: list[tuple[nn.Module, str]]
    computed: bool
    """Whether it is a buffer that no file is expected to hold."""
    regions: list[Region]
    """What the files hold for it; several where they hold a tied tensor under several names."""
    origin: Origin | None
    there: str
    """Its name in the model of the files."""

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, as it is registered now."""
        return tensor_at(self.places)


def tensor_at(places: Sequence[tuple[nn.Module, str]]) -> torch.Tensor:
    """Return the tensor that is registered at some places."""
    module, key = places[0]
    found = module._parameters.get(key)
    return found if found is not None else module._buffers[key]  # type: ignore[return-value]


def match(
    root: nn.Module, known: Mapping[nn.Module, tuple[Origin, str]], may_miss: str
) -> tuple[list[Target], LoadReport]:
    """Decide for every tensor where its values come from, and check all that headers can tell; reads headers alone.

    Args:
        root: the model.
        known: for each module whose values some files hold, those files and its name there.
        may_miss: ``"nothing"``, ``"anything"``, or ``"heads"``: what lies outside of a base model's layers.

    Raises:
        CheckpointError: files are missing or broken; names or shapes do not agree.
    """
    recipes: dict[Origin, Recipe] = {}
    for origin, _ in known.values():
        if origin not in recipes:
            recipes[origin] = recipe_for(*read_headers(origin))
    targets = _targets(root, known, recipes)
    report = LoadReport(unexpected=[name for recipe in recipes.values() for name in recipe.unexpected])
    for target in targets:
        _check_shapes(target)
        if target.regions:
            report.loaded.append(target.name)
            stored = sources_of(target.regions[0])[0].dtype
            if stored != target.tensor.dtype:
                report.cast[target.name] = (stored, target.tensor.dtype)
        elif not target.computed:
            report.missing.append(target.name)
    _check_names(root, targets, report, recipes, may_miss)
    return targets, report


def _targets(
    root: nn.Module, known: Mapping[nn.Module, tuple[Origin, str]], recipes: Mapping[Origin, Recipe]
) -> list[Target]:
    found: dict[int, Target] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        origin, there = known.get(module, (None, ""))
        for key, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            if tensor is None:
                continue
            computed = key in non_persistent_buffers(module)
            full = clean(f"{there}.{key}" if there else key)
            target = found.get(id(tensor))
            if target is None:
                name = clean(f"{path}.{key}" if path else key)
                target = found[id(tensor)] = Target(name, [], computed, [], origin, full)
            target.places.append((module, key))
            if origin is not None and not computed:
                region = recipes[origin].regions.get(full)
                if region is not None and not any(r is region for r in target.regions):
                    target.regions.append(region)
    return list(found.values())


def _check_shapes(target: Target) -> None:
    for region in list(target.regions):
        if tuple(region.shape) != tuple(target.tensor.shape):
            if target.origin is not None and target.origin.ignore_mismatched_sizes:
                target.regions.remove(region)
                continue
            raise CheckpointError(
                f"cannot load {target.name}: it is {list(region.shape)} in the files, expected "
                f"{list(target.tensor.shape)}. Check that configuration and files belong together; a model that was "
                "resized after from_pretrained is built outside of init_on_meta."
            )


def _check_names(
    root: nn.Module, targets: Sequence[Target], report: LoadReport, recipes: dict[Origin, Recipe], may_miss: str
) -> None:
    """Raise where names do not agree and that matters; say in the log what is initialised instead."""
    name = original_class(root).__name__

    def is_optional(target: Target) -> bool:
        pattern = recipes[target.origin].may_be_missing if target.origin else None
        return (
            target.origin is None
            or target.origin.ignore_mismatched_sizes
            or bool(pattern and pattern.search(target.there))
        )

    wanted = [t for t in targets if not t.computed and not t.regions and not is_optional(t)]
    if may_miss == "heads":
        layers = [t for t in wanted if _is_part_of_a_layer(t, targets)]
        if wanted and not layers:
            text = "%s: not in the files, initialised afresh: %s"
            log(text, name, ", ".join(t.name for t in wanted), level=logging.WARNING)
        if report.unexpected:
            log("%s: in the files, not used: %s", name, ", ".join(report.unexpected))
        wanted = layers
    if may_miss != "anything" and wanted:
        raise CheckpointError(
            f"cannot load {name}: the files lack {len(wanted)} of its tensors, {wanted[0].name} first, "
            "expected all. Check that configuration and files belong together, or load with strict=False."
        )
    if may_miss == "nothing" and report.unexpected:
        raise CheckpointError(
            f"cannot load {name}: the files hold {len(report.unexpected)} tensors that it does not "
            f"have, {report.unexpected[0]} first, expected none. Check that configuration and files belong together, "
            "or load with strict=False."
        )


def _is_part_of_a_layer(target: Target, targets: Sequence[Target]) -> bool:
    """Say whether a tensor belongs to what a base model is made of, and not to a head or a pooler.

    That is a numbered layer of it, or a module of it that the files hold in part.
    """
    model = target.origin.model if target.origin else None
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and hasattr(model, prefix) and not target.there.startswith(f"{prefix}."):
        return False
    modules = {module for module, _ in target.places}
    in_part = any(t.regions and modules.intersection(module for module, _ in t.places) for t in targets)
    return in_part or any(part.isdigit() for part in target.there.split("."))


def check_ties(targets: Sequence[Target], reader: Reader) -> None:
    """Compare what files hold for one tensor under two names.

    Raises:
        CheckpointError: they hold different values.
    """
    for target in targets:
        for region in target.regions[1:]:
            own = wish_for(target.name, region, target.tensor)
            wishes = [
                Wish(target.name, r, own.box, torch.empty(own.tensor.shape, dtype=own.tensor.dtype))
                for r in (target.regions[0], region)
            ]
            reader.read(wishes)
            if not torch.equal(wishes[0].tensor, wishes[1].tensor):
                raise CheckpointError(
                    f"cannot load {target.name}: the files hold different values for the names that it is tied to, "
                    "expected one value. Set tie_word_embeddings=False where the model is built."
                )
