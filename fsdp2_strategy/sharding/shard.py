"""Shard a model: plan its units, check the plan on all ranks, and apply `fully_shard` with all options.

Input: a model that is the same on every rank, and a mesh. Output: the same model with DTensor parameters.

Order of work: compare the plan between ranks -> cast -> split layers -> activation checkpointing -> compile ->
fully_shard, inner units first -> prefetch order -> entry points.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.distributed.agreement import all_or_none, check_equal
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.lost_ranks import after_forward, collective
from fsdp2_strategy.distributed.mesh import (
    EXPERT_PARALLEL,
    build_mesh,
    data_parallel_mesh,
    expert_mesh,
    mesh_of_this_rank,
    tensor_parallel_mesh,
)
from fsdp2_strategy.distributed.torch_internals import module_of
from fsdp2_strategy.distributed.wait_log import ensure_wait_log
from fsdp2_strategy.errors import MeshError, ShardError, counted, some
from fsdp2_strategy.hf.peft.methods import check_trainable_adapters
from fsdp2_strategy.model.buffers import remember_buffers
from fsdp2_strategy.model.failed_passes import watch_passes
from fsdp2_strategy.model.fingerprint import store_initial_sums
from fsdp2_strategy.model.fsdp_state import class_name, is_sharded, parameter_groups, reshard
from fsdp2_strategy.model.names import clean
from fsdp2_strategy.model.ranks import on_ranks_of, ranks_per_layer, set_ranks_per_layer
from fsdp2_strategy.model.state import Slot, attach, attached, model_state
from fsdp2_strategy.model.wrappers import register_wrapper, unwrap_model
from fsdp2_strategy.sharding.activation_checkpointing import recompute_activations
from fsdp2_strategy.sharding.blocks import has_forward
from fsdp2_strategy.sharding.bypassed_units import BypassHooks, clone_view_outputs
from fsdp2_strategy.sharding.direct_use import DirectUses
from fsdp2_strategy.sharding.features import feature
from fsdp2_strategy.sharding.gradient_dtypes import fix_gradient_dtypes
from fsdp2_strategy.sharding.guarded_calls import guard_calls, guard_state_dict
from fsdp2_strategy.sharding.input_casts import (
    cast_all,
    cast_first,
    cast_outputs,
    cast_unit_inputs,
    cast_where_weights_are,
    check_selected,
)
from fsdp2_strategy.sharding.missing_gradients import fill_missing_gradients
from fsdp2_strategy.sharding.own_dtype import cast_to_own, needs_own_dtype
from fsdp2_strategy.sharding.plan import ShardPlan, modules_to_recompute, plan_units
from fsdp2_strategy.sharding.prefetch import PrefetchOrder
from fsdp2_strategy.sharding.rank_divergence import watch_units
from fsdp2_strategy.sharding.same_weights import check_same_everywhere
from fsdp2_strategy.sharding.skipped_units import SkippedUnits
from fsdp2_strategy.sharding.units import check_config, check_reshard, shard_size_for, shard_units

if TYPE_CHECKING:
    from fsdp2_strategy.parallel.tensor.plan import TensorPlan

_IS_FOR_TRAINING = Slot[bool]("sharded for training")
_SETTINGS = Slot[StrategyConfig]("settings of a sharded model")
_HALF = (torch.float16, torch.bfloat16)
_HOOKS = Slot[BypassHooks]("hooks on passes")
_DTYPES = Slot[list[tuple[weakref.ref[nn.Module], str, str, torch.dtype]]]("dtypes of shards for training")
"""For each parameter: its module, its name there and in the model, and its dtype."""


@collective
def shard_model(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    config: StrategyConfig | None = None,
    *,
    is_training: bool = False,
) -> nn.Module:
    """Shard ``model`` in place, unit by unit; collective. A model that is already sharded is returned unchanged.

    Each block, the input embedding and the output head become units; tied weights usually belong to the root unit.
    Parameters are cast to the dtype of their shards: by default fp32 if they are trained, otherwise the compute dtype.
    Then `fully_shard` is called on each unit, inner units first, and last on the model itself. The model is the root
    unit, which holds all other parameters.

    In forward, FSDP2 all-gathers a unit's parameters in the compute dtype before the unit runs, and frees them after it
    (see ``reshard_after_forward``). In backward, FSDP2 gathers them again, and reduce-scatters the unit's gradients. If
    the mesh has replicas, it then all-reduces the gradients over the replicas. By default, the root unit stays gathered
    from its forward to the end of backward.

    Every rank must hold the same weights: build the model with the same seed, or load the same files.

    Args:
        model: any module, or an actor wrapper (``is_actor`` is true, and ``.model`` is the model).
        mesh: a mesh from `build_mesh`; by default, that of the sizes in ``config``. If it has the axis "tp", layers are
            split over this axis, and then `fully_shard` splits each rank's parameters over the others.
        config: the settings; by default those of `StrategyConfig()`. If there is a mesh, its sizes are used, and a
            ``shard_size`` or ``tensor_parallel_size`` that is set must be equal.
        is_training: shard for training: trainable parameters are stored as fp32 master weights.

    Returns:
        ``model`` itself.

    Raises:
        MeshError: a size of ``config`` contradicts the mesh, or ``expert_parallel_size`` does not fit it, or differs
            between ranks.
        ShardError: the model has no parameters, a class name or pattern matches nothing, an ignored module is tied to
            one that is not ignored, ``reshard_after_forward`` does not divide the shard size, the layers cannot be
            split over the axis "tp" (see `plan_tensor_parallel` and `check_tensor_plan`), the experts cannot be divided
            (see `plan_experts`), the ranks hold different models, the model was sharded for inference before and
            ``is_training`` is set, or it was sharded with other sizes or another plan of tensor or expert parallelism.
    """
    config = StrategyConfig() if config is None else config
    check_config(config, "shard")
    _check_mesh(mesh, config)
    root = unwrap_model(model)
    if is_sharded(root):
        _check_sharded(root, mesh, config, is_training=is_training)
        watch_wrapper(model)
        return model
    mesh = mesh or mesh_for(model, config, is_training=is_training)
    ensure_wait_log()
    with on_ranks_of(mesh):
        decision = _decide(root, mesh, config, is_training=is_training)
        _carry_out(model, decision, mesh, config)
        model_state(root).set(_IS_FOR_TRAINING, is_training)
        # A plan for layers that are not split has no effect.
        model_state(root).set(_SETTINGS, config if decision.layers else replace(config, tensor_parallel_plan=None))
        _finish(root, decision.layers, is_training=is_training)
        units = counted(len(decision.plan.units), "unit")
        log("sharded %s over %s: %s, %s", type(root).__name__, _shape(mesh), units, decision.plan.source)
    return model


@dataclass(frozen=True, kw_only=True)
class _Decision:
    """How a model is sharded: decided without modifying it, and the same on all ranks."""

    plan: ShardPlan
    reshard: bool | int
    recomputed: dict[str, nn.Module]
    experts: Mapping[str, nn.Module]
    expert_view: DeviceMesh | None
    layers: TensorPlan | None


def _decide(root: nn.Module, mesh: DeviceMesh, config: StrategyConfig, *, is_training: bool) -> _Decision:
    """Decide how a model is sharded, and compare the decision between the ranks; collective."""
    data_mesh, layer_mesh = data_parallel_mesh(mesh), tensor_parallel_mesh(mesh)
    name, of_experts = type(root).__name__, config.expert_parallel_size
    check_equal(f"shard {name}", of_experts, MeshError, "the same expert_parallel_size on all ranks.")
    expert_view = expert_mesh(mesh, of_experts) if of_experts != 1 else None
    with all_or_none(f"shard {name}", ShardError):
        if is_training:
            check_trainable_adapters(root)
        reshard = check_reshard(config.reshard_after_forward, data_mesh.size(data_mesh.ndim - 1))
        experts = feature("experts").plan_experts(root, of_experts) if expert_view is not None else {}
        plan = plan_units(root, config, is_training=is_training, experts=experts.values())
        recomputed = modules_to_recompute(plan, config.activation_checkpointing)
        check_selected(root, config.cast_inputs)
        _check_experts(plan, experts)
        others = {
            "compile_blocks": config.compile_blocks,
            "an integer as reshard_after_forward": not isinstance(reshard, bool),
        }
        layers = _plan_layers(plan, layer_mesh, config.tensor_parallel_plan, experts, others)
    if layers is not None:  # corrected by what a tiny model shows
        with all_or_none(f"split the layers of {name}", ShardError):
            layers = feature("tensor.check").check_tensor_plan(root, layers, layer_mesh)
    options = _shape(mesh), of_experts, reshard, config.cpu_offload, tuple(recomputed), config.cast_inputs
    check_same_everywhere(name, (plan.signature(), options, layers), plan.parameters())
    for warning in plan.warnings():
        log("%s: warning: %s", name, warning)
    return _Decision(
        plan=plan, reshard=reshard, recomputed=recomputed, experts=experts, expert_view=expert_view, layers=layers
    )


def _carry_out(model: nn.Module, decision: _Decision, mesh: DeviceMesh, config: StrategyConfig) -> None:
    """Shard a model as decided. The order of the steps matters: each comment says why a step stands where it does."""
    plan, layer_mesh = decision.plan, tensor_parallel_mesh(mesh)
    root = plan.model
    # Before any split: tied parameters are cast in place, so that they stay tied.
    _cast(plan)
    # Layers and experts are split first: `fully_shard` then splits each rank's parts.
    _split_layers(plan, decision.layers, layer_mesh)
    _divide_experts(plan, decision.experts, decision.expert_view, layer_mesh)
    # Recomputation wraps the forward that a compiled block compiles.
    recompute_activations(root, decision.recomputed)
    compiled = _compile_blocks(plan, config.compile_blocks)
    # Hooks on inputs and outputs are registered before those of FSDP2, so that they run before its casts.
    _add_cast_hooks(plan)
    hooks = BypassHooks(
        root,
        plan.names,
        casts={unit.module: unit.compute_dtype for unit in plan.units if unit.cast_inputs != "none"},
        never_bypassed=compiled,
        ignored=[unit.module for unit in plan.ignored],
        is_bypassed=bool(plan.policy and plan.policy.bypassed),
    )
    if (half := plan.precision.half) is not None:
        units = {unit.module for unit in (*plan.units, *plan.ignored)}
        is_policy = plan.policy is not None
        hooks.cast_inputs(cast_where_weights_are(root, units, half, config.cast_inputs, is_policy=is_policy))
    # The modules that hold parameters are found while these are still those of the plan.
    watched = _read_directly(plan, compiled)
    data_mesh = data_parallel_mesh(mesh)
    shard_units(plan, data_mesh, decision.expert_view, decision.reshard, cpu_offload=config.cpu_offload)
    # All that follows hangs on FSDP2's parameter groups, which exist now. Gradients get their dtypes before other hooks
    # see them.
    for param_group in parameter_groups(root) if plan.precision.is_training else ():
        fix_gradient_dtypes(param_group, masters_in_optimizer=plan.precision.use_mp_opt)
    _add_collective_hooks(plan)
    skipped = _add_hooks_for_skipped(plan, hooks)
    # Entry points last: they call what the hooks above have wrapped.
    prefetched = [unit.module for unit in plan.units if unit.kind not in ("root", "vision")]
    prefetch = None if config.prefetch_depth is None else PrefetchOrder(prefetched, config.prefetch_depth)
    hooks.add_entry_points((*config.forward_methods, *plan.entry_points), prefetch)
    uses = DirectUses(watched, hooks.begin_pass, hooks.on_bypass, skipped)
    hooks.at_start, hooks.at_end = uses.start_pass, uses.end_pass
    attach(root, _HOOKS, hooks)
    watch_wrapper(model)


def mesh_for(model: nn.Module, config: StrategyConfig, *, is_training: bool) -> DeviceMesh:
    """Return the mesh of the sizes in a configuration; collective; MeshError if a size does not fit the ranks."""
    return build_mesh(
        shard_size_for(model, config, is_training=is_training), tensor_parallel_size=config.tensor_parallel_size
    )


def _check_mesh(mesh: object, config: StrategyConfig) -> None:
    """Raise if the mesh is of another kind, or contradicts a size of the configuration."""
    if not isinstance(mesh, DeviceMesh | None):
        raise ShardError(f"cannot shard a model: the mesh is {mesh!r}, expected a mesh. Pass build_mesh(shard_size).")
    if mesh is None:
        return
    data_mesh, layer_mesh = data_parallel_mesh(mesh), tensor_parallel_mesh(mesh)
    sizes = {
        "shard_size": (config.shard_size, (-1, "auto"), data_mesh.size(data_mesh.ndim - 1)),
        "tensor_parallel_size": (config.tensor_parallel_size, (1,), 1 if layer_mesh is None else layer_mesh.size()),
    }
    for name, (size, defaults, of_mesh) in sizes.items():
        if size not in (*defaults, of_mesh):
            raise MeshError(
                f"cannot shard a model: {name} of the configuration is {size}, and {of_mesh} in the mesh, expected one "
                "size. Leave the mesh out, or build it with the same sizes."
            )


def watch_wrapper(model: nn.Module) -> None:
    """Register hooks with which a wrapper's forward can use parts of the sharded models in it; [Note: wrappers]."""
    waiting = [] if isinstance(model, FSDPModule) else list(model.children())
    while waiting:
        module = waiting.pop()
        if (hooks := attached(module, _HOOKS)) is not None:
            hooks.add_wrapper(model)
            guard_state_dict(model)
        else:  # the forward of a sharded model around another one is a pass of its own
            waiting += module.children()


def _read_directly(plan: ShardPlan, compiled: Collection[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """Return the modules, not sharded yet, whose parameters may be used without a call, by unit; [Note: direct use]."""
    found: dict[nn.Module, list[nn.Module]] = {}
    for unit in plan.units:
        if unit.kind not in ("block", "experts", "vision") and unit.module not in compiled:
            own = {id(parameter) for parameter in unit.parameters.values()}
            holds = [m for m in unit.module.modules() if any(id(p) in own for p in m.parameters(recurse=False))]
            found |= {unit.module: holds} if holds else {}
    return found


def _finish(root: nn.Module, layers: TensorPlan | None, *, is_training: bool) -> None:
    """Store what later calls need to know of a model that is sharded, and add the hooks that check its passes."""
    if is_training:
        dtypes = [
            (weakref.ref(module), name, f"{prefix}.{name}".lstrip("."), parameter.dtype)
            for prefix, module in root.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]
        model_state(root).set(_DTYPES, dtypes)
    root.register_forward_hook(partial(after_forward, class_name(root)), always_call=True)
    watch_passes(root)
    register_wrapper(root)
    guard_calls(root, [module for module in root.modules() if isinstance(module, FSDPModule)])
    store_initial_sums(root)
    if layers is not None:  # ranks that share layers compute the same batch
        feature("tensor.split").check_batches(root, layers.size)
    remember_buffers(root)


def _check_sharded(root: nn.Module, mesh: DeviceMesh | None, config: StrategyConfig, *, is_training: bool) -> None:
    """Raise if a sharded model was not sharded as `shard_model` is asked to; not collective."""
    state = model_state(root)
    if is_training and state.get(_IS_FOR_TRAINING) is False:
        raise ShardError(
            f"cannot shard {class_name(root)} for training: it is already sharded for inference, without fp32 "
            "master weights, expected a model that is not sharded. Pass is_training=True in the first call."
        )
    settings = state.get(_SETTINGS) or StrategyConfig()
    compared: dict[str, tuple[Any, Any]] = {}
    if mesh is not None:
        layer_mesh = tensor_parallel_mesh(mesh)
        compared["tensor_parallel_size"] = ranks_per_layer(root), 1 if layer_mesh is None else layer_mesh.size()
        compared["expert_parallel_size"] = settings.expert_parallel_size, config.expert_parallel_size
    if config.tensor_parallel_plan is not None:
        compared["tensor_parallel_plan"] = settings.tensor_parallel_plan, config.tensor_parallel_plan
    for name, (before, asked) in compared.items():
        if before != asked:
            raise ShardError(
                f"cannot shard {class_name(root)}: it is already sharded with {name}={before!r}, expected {asked!r}. "
                f"Build the model again, or prepare it with the same {name}."
            )


def is_for_training(model: nn.Module) -> bool:
    """Return whether a model was sharded for training; if `shard_model` did not shard it, whether it has gradients."""
    root = unwrap_model(model)
    known = model_state(root).get(_IS_FOR_TRAINING)
    return any(p.requires_grad for p in root.parameters()) if known is None else known


def check_dtypes(model: nn.Module) -> None:
    """Free unsharded parameters, and raise if a shard no longer has the dtype that `shard_model` gave it."""
    root = unwrap_model(model)
    reshard(root)
    for owner, own_name, name, dtype in model_state(root).get(_DTYPES) or ():
        module = owner()
        parameter = None if module is None else module._parameters.get(own_name)
        if parameter is not None and parameter.dtype != dtype:
            raise ShardError(
                f"cannot train {class_name(root)}: {name} is {parameter.dtype} since prepare_model, expected "
                f"{dtype}. Do not cast the model after prepare_model: the compute dtype is a setting (bf16 "
                "or fp16)."
            )


def _check_experts(plan: ShardPlan, experts: Mapping[str, nn.Module]) -> None:
    """Raise if the experts of a model are not units of their own; not collective."""
    units = {unit.module: unit.kind for unit in plan.units}
    if wrong := [name for name, module in experts.items() if units.get(module) != "experts"]:
        raise ShardError(
            f"cannot divide the experts of {wrong[0]}: they are ignored, tied to other modules, or kept in another "
            "dtype, expected experts of which all parameters have one dtype and belong to them only. Change "
            "ignored_modules or keep_fp32, or set expert_parallel_size=1."
        )


def _plan_layers(
    plan: ShardPlan,
    mesh: DeviceMesh | None,
    given: Mapping[str, str] | None,
    experts: Mapping[str, nn.Module],
    others: Mapping[str, object],
) -> TensorPlan | None:
    """Return how layers are split over the axis "tp"; ``others`` says which options are set that forbid it."""
    if mesh is None:
        return None
    layers: TensorPlan = feature("tensor.plan").plan_tensor_parallel(plan.model, mesh.size(), given, without=experts)
    for option, is_set in {**others, "mixed_mm_data='replicate'": plan.mixed_mm_data == "replicate"}.items():
        if is_set:
            raise ShardError(
                f"cannot split the layers of {class_name(plan.model)}: {option} was passed, which does not combine "
                "with split layers, expected models without it. Leave it out, or set tensor_parallel_size=1."
            )
    ignored = {name for unit in plan.ignored for name in unit.parameters}
    if split := sorted(ignored.intersection(map(clean, layers.split_dims(plan.model)))):
        raise ShardError(
            f"cannot ignore {some(split, 'parameter')} of {class_name(plan.model)}: the tensor-parallel plan splits "
            "them, expected modules outside of the plan. Remove a pattern from ignored_modules."
        )
    return layers


def _split_layers(plan: ShardPlan, layers: TensorPlan | None, mesh: DeviceMesh | None) -> None:
    """Split the layers of a model over the axis "tp" of a mesh."""
    if layers is None or mesh is None:
        return
    of_layers = counted(len(layers.split_dims(plan.model)), "parameter")
    plan.replace_parameters(feature("tensor.split").split_layers(plan.model, layers, mesh))
    set_ranks_per_layer(plan.model, layers.size)
    tied = f"; not split, because they are tied: {', '.join(layers.not_split)}" if layers.not_split else ""
    log("%s: %s split over %d ranks that share layers%s", class_name(plan.model), of_layers, layers.size, tied)


def _divide_experts(
    plan: ShardPlan, experts: Mapping[str, nn.Module], expert_view: DeviceMesh | None, layer_mesh: DeviceMesh | None
) -> None:
    """Divide the experts of a model along the axis "ep" of a mesh; not collective."""
    if expert_view is None:
        return
    mesh = expert_view[EXPERT_PARALLEL]
    of_layers = mesh_of_this_rank(mesh.device_type) if layer_mesh is None else layer_mesh
    plan.replace_parameters(feature("experts").divide_experts(experts, mesh, of_layers))
    of_experts = counted(len(experts), "module")
    log("%s: the experts of %s divided among %d ranks", class_name(plan.model), of_experts, mesh.size())


def _add_collective_hooks(plan: ShardPlan) -> None:
    """Register the hooks for ranks without images, and those that detect ranks that run different units."""
    watch_units(plan.model)
    encoder = plan.vision_encoder
    # Units that the vision encoder may belong to exchange which gradients exist, before each reduction.
    of_images = {plan.model, encoder.module} if encoder is not None else set()
    fill_missing_gradients(group for group in parameter_groups(plan.model) if module_of(group) not in of_images)
    if encoder is not None:
        feature("vision_encoders").add_hooks(plan.model, encoder, plan.mixed_mm_data)


def _add_hooks_for_skipped(plan: ShardPlan, hooks: BypassHooks) -> set[nn.Module]:
    """Register the hooks of units that some ranks skip; return the set of units skipped in the running pass."""
    if plan.policy and plan.policy.bypassed:
        return set()
    kinds = {unit.module: unit.kind for unit in plan.units}
    units = SkippedUnits(plan.model, kinds, [unit.module for unit in plan.ignored])
    hooks.on_bypass = units.exclude
    hooks.around_method = units.run_method
    return units.skipped


def _add_cast_hooks(plan: ShardPlan) -> None:
    """Register hooks that cast inputs and outputs, and copy outputs that are views; FSDP2's hooks run after them."""
    for unit in plan.ignored:
        if unit.cast_inputs == "all":
            cast_all(unit.module, unit.compute_dtype)
        if unit.parent_dtype is not None:
            cast_outputs(unit.module, unit.parent_dtype)
    for module in dict.fromkeys((*(unit.module for unit in plan.units), plan.model)):
        module.register_forward_hook(clone_view_outputs)
    for unit in (*plan.units, *plan.ignored):
        if unit.cast_inputs == "first":
            unit.module.register_forward_pre_hook(cast_first(unit.compute_dtype), with_kwargs=True)
    for unit in plan.units:
        if unit.cast_inputs == "all" and unit.kind != "root" and unit.compute_dtype in _HALF:
            # A module that needs the dtype of its weights may get numbers of a sample, too.
            of_all = needs_own_dtype(unit.module)
            cast = cast_to_own if of_all else cast_unit_inputs(unit.compute_dtype)
            unit.module.register_forward_pre_hook(cast, with_kwargs=True)


def _shape(mesh: DeviceMesh) -> str:
    axes = mesh.mesh_dim_names or ("replicate", "shard")[-mesh.ndim :]
    return " x ".join(f"{axis} {size}" for axis, size in zip(axes, mesh.shape, strict=True))


@torch.no_grad()
def _cast(plan: ShardPlan) -> None:
    """Cast each parameter to the dtype of its shard in place, so that tied parameters stay tied."""
    for unit in plan.units:
        for parameter in unit.parameters.values():
            parameter.data = parameter.data.to(plan.stored_dtype(unit, parameter)).contiguous()


def _compile_blocks(plan: ShardPlan, backend: bool | str) -> list[nn.Module]:
    """Compile the forward of each block, if asked to, and return the blocks."""
    # The submodules of a compiled block have no hooks to gather it.
    if not backend or (plan.policy and plan.policy.bypassed):
        return []
    blocks = [u.module for u in plan.units if u.kind in ("block", "size") and has_forward(u.module)]
    for module in blocks:
        module.forward = torch.compile(module.forward, backend=backend if isinstance(backend, str) else "inductor")
    return blocks
