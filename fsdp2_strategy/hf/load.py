"""Safetensors files -> a model's own memory: each rank reads the byte ranges of its shard, and nothing else.

Input: a model on meta or in memory, sharded or not, and where its values are. Output: the same model with values, and a
report.

Order of work: headers -> recipe (what comes from where) -> agree with the other ranks -> memory -> parallel positional
reads -> broadcast over the replicas -> init functions for what no file holds. All that headers can tell is checked
before anything is touched.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.conversions import Recipe, recipe_for
from fsdp2_strategy.hf.folder import CONFIG, Origin, is_transformers_model, open_folder, origin_of, read_headers
from fsdp2_strategy.hf.initialize import Empty, initialize
from fsdp2_strategy.hf.read import Reader, Wish
from fsdp2_strategy.hf.region import Region, sources_of
from fsdp2_strategy.hf.tape import forget
from fsdp2_strategy.hf.twin import original_class
from fsdp2_strategy.names import clean
from fsdp2_strategy.ranks import agree, all_or_none, current_device, log
from fsdp2_strategy.residency import local_box, materialize, reshard, unwrap_model

_BROADCAST_BYTES = 32 << 20


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
class _Broadcast:
    """Tensors, as bytes, that one rank of a group gives the others."""

    group: dist.ProcessGroup
    source: int
    """The rank within the group that has them."""
    tensors: list[torch.Tensor]


@dataclass(frozen=True, eq=False)
class _Target:
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
        module, key = self.places[0]
        found = module._parameters.get(key)
        return found if found is not None else module._buffers[key]  # type: ignore[return-value]


def load_weights(model: nn.Module, path: str | Path | None = None, *, strict: bool = True) -> LoadReport:
    """Fill a model from safetensors files, each rank reading its own slices into its own shard; collective.

    What lies on the meta device gets memory first. What the files do not hold, in modules that were never loaded from a
    folder, is initialised by the modules' own init functions, alike at every world size.

    Args:
        model: sharded or not, or a wrapper; plain tensors are read whole.
        path: a folder, a safetensors file or an index; None for the folders that `init_on_meta` remembered.
        strict: names must agree in both directions.

    Returns:
        What was loaded, missing, unexpected and cast.

    Raises:
        CheckpointError: on every rank, before anything is changed, where files or names do not fit: a truncated or
            missing file, a wrong shape, an unknown dtype, a wrong index, tied names with different values, or (strict)
            names. Later only for what cannot be told before: a failing disk, a tensor that nothing gives values to.
    """
    return _load(model, path, may_miss="nothing" if strict else "anything")


def load_remembered(model: nn.Module) -> LoadReport:
    """Make a model real that was built under `init_on_meta`, as ``from_pretrained`` would have; collective.

    What the files lack is initialised and named in the log where it is a head, a pooler or the like; a missing layer of
    the base model, or part of one, is an error.
    """
    return _load(model, None, may_miss="heads")


def is_on_meta(model: nn.Module) -> bool:
    """Say whether any parameter or buffer of the model has no memory yet."""
    return any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers()))


def _load(model: nn.Module, path: str | Path | None, *, may_miss: str) -> LoadReport:
    root = unwrap_model(model)
    name = original_class(root).__name__
    with all_or_none(f"load {name}", CheckpointError):
        reshard(root)
        targets, report, origins = _plan(root, path, may_miss)
        with Reader("comparing tied weights") as reader:
            _check_ties(targets, reader)
    facts = [
        (t.name, t.tensor.is_meta, [(s.name, s.offset, s.dtype, s.shape) for r in t.regions for s in sources_of(r)])
        for t in targets
    ]
    agree(f"load {name}", facts, CheckpointError, "the same files everywhere. Give every rank the same folder.")
    afresh = [t for t in targets if not t.regions and t.tensor.is_meta]
    with all_or_none(f"load {name}", CheckpointError):
        materialize(root, current_device())
        wishes, broadcasts = _wishes([t for t in targets if t.regions])
        with Reader(f"loading {name}") as reader:
            reader.read(wishes)
    for shared in broadcasts:
        dist._broadcast_coalesced(shared.group, shared.tensors, _BROADCAST_BYTES, shared.source)  # type: ignore[attr-defined]
    if afresh:
        with all_or_none(f"load {name}", CheckpointError):
            empty = [Empty(t.name, t.tensor, t.places) for t in afresh]
            unknown = initialize(root, empty, current_device())
            if unknown:
                raise CheckpointError(
                    f"cannot make {name} real: nothing gives values to {', '.join(unknown[:4])} ({len(unknown)} in "
                    "all), expected a file, what a constructor did under init_on_meta, or a reset_parameters. Build "
                    "that module under init_on_meta, or give it one."
                )
    forget(root)
    where = ", ".join(origin.where for origin in origins) or "no folder"
    log("%s: %d tensors from %s, %d initialised afresh", name, len(report.loaded), where, len(afresh))
    return report


def _plan(root: nn.Module, path: str | Path | None, may_miss: str) -> tuple[list[_Target], LoadReport, list[Origin]]:
    """Decide for every tensor where its values come from, and check all that headers can tell."""
    known = _origins(root, path)
    if path is None and not known and not is_on_meta(root):
        raise CheckpointError(
            f"cannot load {original_class(root).__name__}: no folder is remembered and it has values already, expected "
            "a path, or a model that from_pretrained built under init_on_meta. Pass the folder."
        )
    recipes: dict[Origin, Recipe] = {}
    for origin, _ in known.values():
        if origin not in recipes:
            recipes[origin] = recipe_for(origin, read_headers(origin))
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
    return targets, report, list(recipes)


def _origins(root: nn.Module, path: str | Path | None) -> dict[nn.Module, tuple[Origin, str]]:
    """Return for each module whose values some files hold, those files and its name there."""
    known = {module: origin for module in root.modules() if (origin := origin_of(module))}
    if path is None:
        return known
    outermost = [module for module, (_, name) in known.items() if not name]
    if len(outermost) == 1 and is_transformers_model(outermost[0]):
        # The model was built for another folder; its modules keep the names that they had there.
        old = known[outermost[0]][0]
        new = open_folder(old.model, path)
        return {module: (new, name) for module, (own, name) in known.items() if own is old}
    within = root
    if not is_transformers_model(root) and (Path(path) / CONFIG).is_file():
        models = list(_outermost_models(root))
        within = models[0] if len(models) == 1 else root
    given = open_folder(within, path)
    return {module: (given, name) for name, module in within.named_modules()}


def _outermost_models(module: nn.Module) -> Iterator[nn.Module]:
    if is_transformers_model(module):
        yield module
        return
    for child in module.children():
        yield from _outermost_models(child)


def _targets(
    root: nn.Module, known: dict[nn.Module, tuple[Origin, str]], recipes: dict[Origin, Recipe]
) -> list[_Target]:
    found: dict[int, _Target] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        origin, there = known.get(module, (None, ""))
        for key, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            if tensor is None:
                continue
            computed = key in module._non_persistent_buffers_set
            target = found.get(id(tensor))
            if target is None:
                name = clean(f"{path}.{key}" if path else key)
                full = f"{there}.{key}" if there else key
                target = found[id(tensor)] = _Target(name, [], computed, [], origin, full)
            target.places.append((module, key))
            if origin is not None and not computed:
                region = recipes[origin].regions.get(f"{there}.{key}" if there else key)
                if region is not None and not any(r is region for r in target.regions):
                    target.regions.append(region)
    return list(found.values())


def _check_shapes(target: _Target) -> None:
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
    root: nn.Module, targets: Sequence[_Target], report: LoadReport, recipes: dict[Origin, Recipe], may_miss: str
) -> None:
    """Raise where names do not agree and that matters; say in the log what is initialised instead."""
    name = original_class(root).__name__

    def is_optional(target: _Target) -> bool:
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


def _is_part_of_a_layer(target: _Target, targets: Sequence[_Target]) -> bool:
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


def _wishes(targets: Sequence[_Target]) -> tuple[list[Wish], list[_Broadcast]]:
    """Return what this rank reads, and what is then broadcast over the replicas.

    Where parameters have replicas, each replica reads as many bytes as the others, and all of them end with all.
    """
    wishes: list[Wish] = []
    replicated: dict[dist.ProcessGroup, list[Wish]] = {}
    for target in targets:
        wish, group = _wish(target)
        if group is None:
            wishes.append(wish)
        else:
            replicated.setdefault(group, []).append(wish)
    broadcasts = []
    for group, shared in replicated.items():
        replicas = dist.get_world_size(group)
        total = sum(wish.tensor.nbytes for wish in shared)
        before = 0
        by_reader: dict[int, list[Wish]] = {}
        for wish in shared:
            by_reader.setdefault(before * replicas // max(1, total), []).append(wish)
            before += wish.tensor.nbytes
        for reader, theirs in by_reader.items():
            if reader == dist.get_rank(group):
                wishes += theirs
            tensors = [w.tensor.reshape(-1).view(torch.uint8) for w in theirs if w.tensor.numel()]
            broadcasts.append(_Broadcast(group, reader, tensors))
    return wishes, broadcasts


def _wish(target: _Target) -> tuple[Wish, dist.ProcessGroup | None]:
    """Return what this rank needs of a tensor, and the group of ranks that need the same, where there are several."""
    tensor = target.tensor.detach()
    if not isinstance(tensor, DTensor):
        return Wish(target.name, target.regions[0], local_box(tensor), tensor), None
    copies = [
        axis for axis, p in enumerate(tensor.placements) if p.is_replicate() and tensor.device_mesh.size(axis) > 1
    ]
    group = tensor.device_mesh.get_group(copies[0]) if copies else None
    return Wish(target.name, target.regions[0], local_box(tensor), tensor.to_local()), group


def _check_ties(targets: Sequence[_Target], reader: Reader) -> None:
    """Compare what files hold for one tensor under two names.

    Raises:
        CheckpointError: they hold different values.
    """
    for target in targets:
        for region in target.regions[1:]:
            wish, _ = _wish(target)
            wishes = [
                Wish(target.name, r, wish.box, torch.empty(wish.tensor.shape, dtype=wish.tensor.dtype))
                for r in (target.regions[0], region)
            ]
            reader.read(wishes)
            if not torch.equal(wishes[0].tensor, wishes[1].tensor):
                raise CheckpointError(
                    f"cannot load {target.name}: the files hold different values for the names that it is tied to, "
                    "expected one value. Set tie_word_embeddings=False where the model is built."
                )
