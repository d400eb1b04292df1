"""Decide which modules become units, and their dtypes, before memory is allocated.

Input: a model (on any device, meta included) and its blocks. Output: a `ShardPlan`, which `shard` executes and
`explain` prints.

[Note: units] A unit is a module that is passed to `fully_shard`: its parameters are gathered together before its
forward, and their gradients are reduced together in backward. A parameter belongs to the innermost unit around it. The
root unit, which is the model itself, contains all remaining parameters. A plan keeps three invariants:
  1. A parameter that several modules share (tied weights) belongs to one unit. If the modules that hold it (its owners)
     are in several units, the deepest of these is split, until one unit contains all owners, possibly the root unit. A
     unit that is split is no longer a unit: its larger children that contain no owner become units, and its other
     parameters belong to the unit around it. An embedding that is tied to the head then usually belongs to the root
     unit. This does not raise peak memory over that of a separate unit, because the end of the forward pass needs the
     weight anyway. A module object that is registered in several blocks becomes a unit itself.
  2. A unit computes in one dtype. A module that computes in another dtype becomes a unit within it.
     A normalisation that keeps statistics of its inputs (BatchNorm) computes in fp32, as its statistics are: in half
     precision, torch refuses to compute it with fp32 statistics.
  3. Only a module that can be gathered becomes a unit. It has a forward; or it has no forward and no direct parameters,
     and is not a container such as a ModuleList. In the second case, it is gathered when its submodules run
     ([Note: bypassed units] in `bypassed_units`). The head of a model whose forward was replaced is no unit, because
     the new forward may use its weight directly.

[Note: ignored] An ignored module is not part of any unit: its parameters stay plain, full tensors on every rank.
Modules that share them must be ignored, too. FSDP2 does not cast ignored parameters, so an ignored module computes in
the dtype in which it is stored: fp32 if any of its parameters is trained or kept in fp32, otherwise the compute dtype.
Inputs of its forward are cast to this dtype as for a unit, and outputs to the compute dtype of the unit around it.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp2_strategy.config.strategy_config import MixedData, StrategyConfig
from fsdp2_strategy.errors import ShardError, did_you_mean, some
from fsdp2_strategy.model.buffers import keeps_statistics
from fsdp2_strategy.model.names import clean, matches
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.sharding.blocks import (
    can_be_unit,
    choose_blocks,
    has_forward,
    modules_of_class,
    parameter_count,
    vocabulary_modules,
)
from fsdp2_strategy.sharding.features import feature
from fsdp2_strategy.sharding.input_casts import CastInputs, inputs_to_cast
from fsdp2_strategy.sharding.known_policies import ENTRY_POINTS, Policy, policy_of
from fsdp2_strategy.sharding.module_tree import ModuleTree, matching_modules
from fsdp2_strategy.sharding.precision import Precision
from fsdp2_strategy.sharding.skipped_units import layerdrop_of

if TYPE_CHECKING:
    from fsdp2_strategy.parallel.vision_encoders import VisionEncoder


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One unit of a plan; see [Note: units]."""

    name: str
    """Dotted name of the module; empty for the root."""
    kind: str
    """Why the module is a unit:

    - "block": a repeated module, chosen by class name or from a ModuleList
    - "size": chosen by its number of parameters
    - "embedding", "head": an input embedding, an output head
    - "shared": a module object that is registered in several places
    - "split": a child of a unit that was split because of tied weights
    - "dtype": its compute dtype differs from that of the unit around it
    - "vision": the replicated vision encoder
    - "experts": experts that are divided among ranks; see `parallel.experts`
    - "root": the model itself
    - "ignored": not a unit; see [Note: ignored]
    """
    module: nn.Module
    depth: int
    """Length of its longest path from the root; deeper units are sharded first."""
    parameters: dict[str, nn.Parameter]
    """The parameters that belong to it, by name; a tied parameter is under its first name."""
    compute_dtype: torch.dtype
    parent_dtype: torch.dtype | None = None
    """For kinds "dtype" and "ignored": the dtype that outputs are cast to, which is that of the unit around it; None if
    the two dtypes are equal."""
    cast_inputs: CastInputs = "all"
    """Which floating inputs are cast to its compute dtype; see [Note: inputs] in `input_casts`."""
    stays_gathered: bool = False
    """Whether it stays gathered from forward to backward: the head of a model that is trained, whose backward comes
    right after its forward, and an embedding whose weight the model may use directly as its head."""


@dataclass(kw_only=True)
class ShardPlan:
    """The units of a model in module order, the root last, with all that is needed to shard and explain them."""

    model: nn.Module
    precision: Precision
    source: str
    """How the blocks were found, as text."""
    units: list[Unit] = field(default_factory=list)
    replicated: dict[str, nn.Parameter] = field(default_factory=dict)
    """0-d parameters, which cannot be split: every rank holds them, and their gradients are averaged."""
    ignored: list[Unit] = field(default_factory=list)
    """Modules that are not sharded, described as units; see [Note: ignored]."""
    vision_encoder: VisionEncoder | None = None
    """The vision encoder, if ``mixed_mm_data`` is set and the model has one."""
    mixed_mm_data: MixedData | None = None
    """How ranks without images take part in the other ranks' collectives; see [Note: unequal ranks] in
    `vision_encoders`."""
    policy: Policy | None = None
    """The model's policy, if it is known."""
    ties: list[tuple[str, ...]] = field(default_factory=list)
    """For each tied parameter, all its names."""
    bypassed: str = ""
    """The units whose forward is bypassed, as text; empty if none is known to be bypassed."""

    @property
    def entry_points(self) -> tuple[str, ...]:
        """The methods other than forward that run the model as a policy."""
        return self.policy.entry_points if self.policy else ENTRY_POINTS

    @property
    def names(self) -> dict[nn.Module, str]:
        """The names of the units, by module."""
        return {unit.module: unit.name for unit in self.units}

    def warnings(self) -> Iterator[str]:
        """Yield a sentence for each property of the plan that costs memory or speed, or that may be a mistake."""
        root = self.units[-1] if self.units[-1].kind == "root" else None
        total = sum(p.numel() for u in self.units for p in u.parameters.values())
        ignored = sum(p.numel() for u in self.ignored for p in u.parameters.values())
        in_root = self._unexpected_in(root) if root else 0
        if len(self.units) == 1 and total:
            yield "the root is the only unit, so the whole model is gathered at once. Pass the class names of blocks."
        elif root and in_root * 10 > total:
            yield (
                f"the root unit, which stays gathered in forward and backward, holds {in_root / total:.0%} of the "
                f"parameters besides embeddings and heads, most of them in {self._largest_in(root)}. Pass the class "
                "names of these blocks as block_class_names, or call register_policy."
            )
        if ignored * 4 > total + ignored:
            yield f"ignored modules hold {ignored / (total + ignored):.0%} of the parameters, in full on every rank."
        if self.mixed_mm_data and self.vision_encoder is None:
            yield "the model has no vision encoder, so mixed_mm_data has no effect."
        if self.precision.is_training and not any(p.requires_grad for p in self.model.parameters()):
            yield "no parameter is trainable."
        if self.precision.is_training:
            yield from self._notes_on_skipped()
        if self.bypassed:
            yield (
                f"the forward of {self.bypassed} is bypassed; their submodules gather them, and "
                "activation_checkpointing and compile_blocks have no effect on them."
            )

    def _notes_on_skipped(self) -> Iterator[str]:
        """Yield a sentence for each kind of modules that ranks may skip; see [Note: skipped units]."""
        units = {unit.module for unit in self.units}
        drops = max(map(layerdrop_of, self.model.modules()))
        if drops:
            yield (
                f"layerdrop is {drops:g}, so ranks skip different layers: each rank also gathers the layers that it "
                "skips. Set it to 0 to save this time."
            )
        for name, module in self.model.named_modules():
            if isinstance(module, nn.ModuleDict) and len(entries := units.intersection(module.children())) > 1:
                yield (
                    f"ranks may use different entries of {clean(name)}: each rank gathers all {len(entries)}, in the "
                    "order of the entries."
                )

    def _unexpected_in(self, root: Unit) -> int:
        """Return the number of the root unit's parameters besides tied ones and those of embeddings and heads."""
        expected = {name for names in self.ties for name in names}
        for module in self.model.modules():
            head = getattr(module, "get_output_embeddings", lambda: None)()
            for inner in (module if isinstance(module, nn.Embedding) else None, head):
                own = {id(p) for p in inner.parameters()} if isinstance(inner, nn.Module) else set()
                expected |= {n for n, p in root.parameters.items() if id(p) in own}
        return sum(p.numel() for name, p in root.parameters.items() if name not in expected)

    def _largest_in(self, root: Unit) -> str:
        """Describe the modules that hold most of the root unit's parameters: the class of repeated layers, or names."""
        own = {id(p) for p in root.parameters.values()}

        def held(module: nn.Module) -> int:
            return sum(p.numel() for p in module.parameters() if id(p) in own)

        name, module = "", self.model
        while not isinstance(module, nn.ModuleList) and (children := dict(module.named_children())):
            largest = max(children, key=lambda child: held(children[child]))
            if held(children[largest]) * 2 <= held(module):
                break
            name, module = f"{name}.{largest}".lstrip("."), children[largest]
        if isinstance(module, nn.ModuleList):
            return ", ".join(sorted({type(layer).__name__ for layer in module}))
        if name:
            return f"{name} ({type(module).__name__})"
        ranked = sorted(module.named_children(), key=lambda child: -held(child[1]))
        return ", ".join(f"{child} ({type(inner).__name__})" for child, inner in ranked[:3] if held(inner)) or "itself"

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters by name: sharded, replicated and ignored ones."""
        return self.replicated | {n: p for unit in (*self.units, *self.ignored) for n, p in unit.parameters.items()}

    def replace_parameters(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Put new parameters in the places of old ones in the units, after the model's parameters were replaced."""
        for unit in self.units:
            unit.parameters.update({name: new.get(p, p) for name, p in unit.parameters.items()})

    def stored_dtype(self, unit: Unit, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype of the parameter's shard."""
        return self.precision.stored_dtype(parameter, unit.compute_dtype)

    def signature(self) -> list[object]:
        """Return facts that must be equal on all ranks: precision, units, names, shapes and dtypes of parameters."""

        def facts(parameters: dict[str, nn.Parameter]) -> list[object]:
            return [(n, tuple(p.shape), p.dtype, p.requires_grad, p.is_meta) for n, p in parameters.items()]

        units = [(u.name, u.kind, u.compute_dtype, facts(u.parameters)) for u in (*self.units, *self.ignored)]
        return [self.precision, self.mixed_mm_data, units, facts(self.replicated)]


def plan_units(
    model: nn.Module, config: StrategyConfig, *, is_training: bool, experts: Collection[nn.Module] = ()
) -> ShardPlan:
    """Decide which modules of ``model`` become units, without modifying it; not collective.

    The modules ``experts`` become units of the kind "experts". Raises ShardError if the settings do not fit the model.
    """
    model, mixed_mm_data = unwrap_model(model), config.mixed_mm_data
    precision = Precision.of(config, is_training=is_training)
    ignored = matching_modules(model, config.ignored_modules, "ignore modules")
    conditional = matching_modules(model, config.conditional_modules, "keep modules out of units of their own")
    blocks = choose_blocks(model, config.block_class_names, config.min_unit_params, ignored)
    tree = ModuleTree(model, ignored)
    if not tree.parameters:
        where, fix = "", "Pass a model with parameters."
        if tree.ignored:
            where, fix = " outside of ignored modules", "Remove a pattern from ignored_modules."
        raise ShardError(
            f"nothing to shard: {type(model).__name__} has no parameters{where}, expected at least one. {fix}"
        )
    _check_ties_of_ignored(tree)
    plan = ShardPlan(model=model, precision=precision, source=blocks.source, mixed_mm_data=mixed_mm_data)
    kinds = {module: blocks.kind for module in blocks.modules.values() if module in tree}
    vocabulary = vocabulary_modules(model, blocks.modules)
    kinds |= {m: kind for m, kind in vocabulary.items() if m in tree and not tree.inside(m, kinds)}
    kinds |= dict.fromkeys((module for module in experts if module in tree), "experts")
    encoder = feature("vision_encoders").find_vision_encoder(model) if mixed_mm_data else None
    if encoder and mixed_mm_data != "dummy":
        _check_ignored(encoder, tree.ignored, is_replicated=mixed_mm_data == "replicate")
        for module in encoder.runs_for_images():  # parts of the root unit or of the encoder's unit
            kinds.pop(module, None)
        if mixed_mm_data == "replicate":
            kinds[encoder.module] = "vision"
    for module in (inner for outer in conditional for inner in outer.modules()):
        kinds.pop(module, None)
    _unify_shared(tree, kinds)
    compute_dtypes, parent_dtypes = _split_by_dtype(tree, kinds, precision)
    if encoder and mixed_mm_data != "dummy":
        _check_vision_encoder(encoder, kinds)
    claimed = tree.parameters_by_unit(kinds) or {model: {}}  # a model of 0-d parameters only: an empty root unit
    mixed = len({compute_dtypes[module] for module in claimed if not _holds_only_statistics(module)}) > 1
    plan.units = [
        Unit(
            name=tree.names[module],
            kind=kinds[module],
            module=module,
            depth=tree.depth(module),
            parameters=claimed[module],
            compute_dtype=compute_dtypes[module],
            parent_dtype=parent_dtypes.get(module),
            cast_inputs=_inputs_to_cast(tree, module, kinds[module], is_mixed=mixed),
            stays_gathered=_stays_gathered(tree, module, kinds[module], precision),
        )
        for module in [*list(tree.names)[1:], model]
        if module in claimed
    ]
    plan.ignored = list(_ignored_units(tree, precision, {module: compute_dtypes[module] for module in claimed}))
    plan.vision_encoder = encoder
    plan.policy = policy_of(model)
    plan.replicated = {n: p for n, p in tree.parameters.items() if not p.ndim}
    plan.ties = [tuple(names) for names in tree.all_names.values() if len(names) > 1]
    if plan.policy and plan.policy.bypassed:
        plan.bypassed = f"the blocks of {plan.policy.name}"
    elif without_forward := [u.name for u in plan.units if u.kind != "root" and not has_forward(u.module)]:
        plan.bypassed = some(without_forward, "unit")
    _check_patterns(tree, precision.keep_fp32, [name for unit in plan.ignored for name in unit.parameters])
    return plan


def _inputs_to_cast(tree: ModuleTree, module: nn.Module, kind: str, *, is_mixed: bool) -> CastInputs:
    if kind == "experts":  # inside of a unit, whose inputs are cast; routers may weight experts in fp32
        return "none"
    return "all" if is_mixed or kind == "dtype" else inputs_to_cast(tree, module, kind)


def _stays_gathered(tree: ModuleTree, module: nn.Module, kind: str, precision: Precision) -> bool:
    if kind == "head":
        return precision.is_training
    return kind == "embedding" and not all(tree.transformers_around(module))


def modules_to_recompute(plan: ShardPlan, selected: Sequence[str] | bool) -> dict[str, nn.Module]:
    """Return the modules whose activations are recomputed in training: those of the given classes, or all blocks."""
    if not plan.precision.is_training:
        return {}
    if not isinstance(selected, bool):
        return modules_of_class(plan.model, selected)
    if not selected:
        return {}
    blocks = {unit.module: unit.name for unit in plan.units if unit.kind in ("block", "size")}
    if not blocks:
        raise ShardError(
            f"cannot recompute activations: no block of {type(plan.model).__name__} is found, expected at least one. "
            "Pass class names as activation_checkpointing."
        )
    # Nested blocks are recomputed with the block around them.
    inner = {module for block in blocks for module in block.modules() if module is not block}
    return {name: module for module, name in blocks.items() if module not in inner}


def _check_ties_of_ignored(tree: ModuleTree) -> None:
    for module in tree.ignored:
        for parameter in module.parameters():
            if parameter in tree.owners:
                other = tree.names[tree.owners[parameter][0]] or "the root"
                raise ShardError(
                    f"cannot ignore {tree.names[module]}: {' = '.join(tree.all_names[parameter])} is tied, and "
                    f"{other}, which also uses it, is not ignored, expected all modules that use it to be ignored, or "
                    "none. Ignore all of them."
                )


def _check_ignored(encoder: VisionEncoder, ignored: Collection[nn.Module], *, is_replicated: bool) -> None:
    for module in set(encoder.runs_for_images()).intersection(ignored):
        if any(p.requires_grad for p in module.parameters()):
            raise ShardError(
                f"cannot train {type(module).__name__} if only some ranks have images: it is ignored, so ranks with "
                "images would wait for the gradients of ranks without images, expected it to be frozen or sharded. Use "
                "mixed_mm_data='dummy', or remove it from ignored_modules."
            )
        if is_replicated and encoder.module in module.modules():
            raise ShardError(
                f"cannot replicate {encoder.name}: it is ignored, and every rank holds the full parameters of ignored "
                "modules already, expected it to be either ignored or replicated. Use mixed_mm_data='root'."
            )


def _check_vision_encoder(encoder: VisionEncoder, kinds: dict[nn.Module, str]) -> None:
    for module in encoder.runs_for_images():
        if kinds.get(module, "vision") != "vision":
            raise ShardError(
                f"cannot shard {encoder.name} and its projector with this mixed_mm_data: {type(module).__name__} is a "
                f"separate unit ({kinds[module]}) that ranks without images would not run, expected no separate unit. "
                "Use mixed_mm_data='dummy', or keep none of their parameters in fp32."
            )
        single = [name for name, p in module.named_parameters(recurse=False) if not p.ndim and p.requires_grad]
        if single:
            raise ShardError(
                f"cannot train {single[0]} of {type(module).__name__} if only some ranks have images: it has 0 "
                "dimensions, expected at least 1. Use mixed_mm_data='dummy', or give it the shape [1]."
            )


def _unify_shared(tree: ModuleTree, kinds: dict[nn.Module, str]) -> None:
    """Split units until each shared parameter belongs to one unit (invariant 1); change ``kinds``."""
    kinds[tree.model] = "root"
    for parameter in tree.owners:
        while True:
            around = set().union(*(tree.units_around(owner, kinds) for owner in tree.owners[parameter]))
            if len(around) == 1:
                break
            if repeated := _repeated_module(tree, tree.owners[parameter]):
                kinds[repeated] = "shared"
                continue
            # Split the deepest unit first: it does not contain all owners, but a unit around it may.
            unit = max(around, key=tree.depth)
            del kinds[unit]
            owners = set(tree.owners[parameter])
            for child in unit.children():
                worthwhile = parameter_count(child) * 16 >= parameter_count(unit)
                if worthwhile and can_be_unit(child) and not owners.intersection(child.modules()):
                    kinds.setdefault(child, "split")


def _repeated_module(tree: ModuleTree, owners: list[nn.Module]) -> nn.Module | None:
    """Return the outermost module with several paths around the owner; None for several owners, or if it is no unit."""
    if len(owners) != 1 or len(tree.paths[owners[0]]) == 1:
        return None
    module = next(m for m in tree.paths[owners[0]][0] if len(tree.paths[m]) > 1)
    return module if can_be_unit(module) else None


def _split_by_dtype(
    tree: ModuleTree, kinds: dict[nn.Module, str], precision: Precision
) -> tuple[dict[nn.Module, torch.dtype], dict[nn.Module, torch.dtype]]:
    """Make modules that compute in another dtype units of their own (invariant 2); change ``kinds``.

    Return the compute dtype of each unit; and for each new unit, that of the unit around it.
    """
    dtypes: dict[nn.Module, torch.dtype] = {}
    for parameter, owners in tree.owners.items():
        dtype = precision.compute_dtype(tree.all_names[parameter][0], parameter)
        if parameter.is_floating_point() and parameter.ndim:
            for owner in map(tree.callable_around, owners):
                if keeps_statistics(owner):
                    dtype = torch.promote_types(dtype, torch.float32)
                # A module's own parameters are in one unit, so it computes in the widest of their dtypes.
                dtypes[owner] = max(dtypes.get(owner, dtype), dtype, key=lambda d: d.itemsize)
    owners_in: dict[nn.Module, list[nn.Module]] = defaultdict(list)
    for owner in dtypes:
        for unit in tree.units_around(owner, kinds):
            owners_in[unit].append(owner)
    tied_owners = {} if precision.half else _tied_owners(tree)
    dtypes_in = functools.cache(lambda module: frozenset(dtypes[m] for m in module.modules() if m in dtypes))
    compute: dict[nn.Module, torch.dtype] = {}
    parents: dict[nn.Module, torch.dtype] = {}
    waiting = list(kinds)
    while waiting:
        unit = waiting.pop()
        inside = owners_in[unit]
        # The unit computes in the dtype of its own parameters, or else in the narrowest dtype within it. If the dtypes
        # are those of the loaded weights, it computes in that of tied weights, because these cannot leave the unit.
        tied = _tied_dtypes(tied_owners, inside, dtypes)
        narrowest = min(tied or (dtypes[owner] for owner in inside), key=lambda d: d.itemsize, default=torch.float32)
        compute[unit] = dtypes.get(unit, narrowest)
        for owner in inside:
            if dtypes[owner] != compute[unit] and unit in tree.units_around(owner, kinds):
                split = _outermost_of_one_dtype(tree, owner, unit, dtypes_in)
                kinds[split], parents[split] = "dtype", compute[unit]
                _check_ties(tree, split, unit)
                within = (m for m in split.modules() if m in dtypes)
                owners_in[split] = [m for m in within if split in tree.units_around(m, kinds)]
                waiting.append(split)  # it may contain modules of a third dtype
    return compute, parents


def _tied_owners(tree: ModuleTree) -> dict[nn.Module, list[set[nn.Module]]]:
    """Return, for each module that uses tied parameters, the set of modules that use each of them."""
    found: dict[nn.Module, list[set[nn.Module]]] = defaultdict(list)
    for owners in tree.owners.values():
        users = set(map(tree.callable_around, owners)) if len(owners) > 1 else set()
        for user in users:
            found[user].append(users)
    return found


def _tied_dtypes(
    tied_owners: Mapping[nn.Module, Sequence[set[nn.Module]]],
    inside: Sequence[nn.Module],
    dtypes: Mapping[nn.Module, torch.dtype],
) -> set[torch.dtype]:
    """Return the dtypes in which modules compute that share a weight with another one of ``inside``."""
    counts = Counter(id(users) for owner in inside for users in tied_owners.get(owner, ()))
    return {dtypes[o] for o in inside if any(counts[id(users)] > 1 for users in tied_owners.get(o, ()))}


def _holds_only_statistics(unit: nn.Module) -> bool:
    """Return whether all parameters of a unit belong to modules that keep statistics, which compute in fp32."""
    return all(keeps_statistics(m) or not any(True for _ in m.parameters(recurse=False)) for m in unit.modules())


def _check_ties(tree: ModuleTree, split: nn.Module, unit: nn.Module) -> None:
    within = set(split.modules())
    for parameter in split.parameters():
        if not within.issuperset(tree.owners[parameter]):
            raise ShardError(
                f"cannot shard {' = '.join(tree.all_names[parameter])}: it is tied, and the modules in "
                f"{tree.names[unit] or 'the root'} that use it compute in different dtypes, expected one dtype. Change "
                "keep_fp32 so that it matches all or none of the parameters of these modules."
            )


def _outermost_of_one_dtype(
    tree: ModuleTree,
    owner: nn.Module,
    unit: nn.Module,
    dtypes_in: Callable[[nn.Module], frozenset[torch.dtype]],
) -> nn.Module:
    """Return the outermost module around the owner, within the unit, in which all modules have one dtype."""
    path = next(path for path in tree.paths[owner] if unit in path)
    for module in path[path.index(unit) + 1 :]:
        if can_be_unit(module) and len(dtypes_in(module)) == 1:
            return module
    return owner


def _ignored_units(
    tree: ModuleTree, precision: Precision, unit_dtypes: Mapping[nn.Module, torch.dtype]
) -> Iterator[Unit]:
    """Yield a `Unit` for each ignored module; ``unit_dtypes`` are the units' compute dtypes. See [Note: ignored]."""
    names = {parameter: clean(name) for name, parameter in tree.model.named_parameters()}
    held = {module: {names[p]: p for p in module.parameters()} for module in tree.ignored}
    dtypes = {module: precision.unsharded_dtype(parameters) for module, parameters in held.items()}
    for module, dtype in dtypes.items():
        if any(map(keeps_statistics, module.modules())):
            dtypes[module] = torch.promote_types(dtype, torch.float32)
    holders: dict[str, list[nn.Module]] = defaultdict(list)
    for module, parameters in held.items():
        for name in parameters:
            holders[name].append(module)
    shared = [modules for modules in holders.values() if len(modules) > 1]
    while wider := {  # modules that share a parameter have the same dtype
        module: widest
        for modules in shared
        for widest in [max((dtypes[m] for m in modules), key=lambda d: d.itemsize)]
        for module in modules
        if dtypes[module].itemsize < widest.itemsize
    }:
        dtypes |= wider
    casts = precision.half is not None or precision.is_training
    for module, parameters in held.items():
        unit = next(m for m in reversed(tree.paths[module][0]) if m in unit_dtypes or m is tree.model)
        outside = unit_dtypes.get(unit, precision.half or dtypes[module])
        is_same = outside == dtypes[module]
        yield Unit(
            name=tree.names[module],
            kind="ignored",
            module=module,
            depth=tree.depth(module),
            parameters=parameters,
            compute_dtype=dtypes[module],
            parent_dtype=None if is_same else outside,
            cast_inputs="none" if not casts else inputs_to_cast(tree, module, "ignored") if is_same else "all",
        )


def _check_patterns(tree: ModuleTree, patterns: Sequence[str], ignored: Sequence[str]) -> None:
    names = [*ignored, *itertools.chain.from_iterable(tree.all_names.values())]
    for pattern in patterns:
        if not any(matches(name, (pattern,)) for name in names):
            raise ShardError(
                f"cannot keep in fp32: the pattern {pattern!r} matches no parameter of {type(tree.model).__name__}. "
                f"Its first parameters are {', '.join(itertools.islice(tree.parameters, 3))}."
                f"{did_you_mean(pattern, names)}"
            )
