"""Print the sharding plan of a model before it is sharded: units, dtypes, ties, buffers, bytes per rank, warnings.

Input: a model on any device, including meta. Output: text.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO

import torch
from torch import nn

from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.distributed import process_group
from fsdp2_strategy.distributed.mesh import check_expert_size, check_shard_size
from fsdp2_strategy.distributed.torch_internals import BATCH_NORMS
from fsdp2_strategy.errors import ShardError, counted, dtype_text, size_text, some
from fsdp2_strategy.model.buffers import unchanged_buffers
from fsdp2_strategy.model.fsdp_state import class_name, is_sharded
from fsdp2_strategy.model.names import clean, generic_name, persistent_buffers
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.sharding.blocks import parameter_count
from fsdp2_strategy.sharding.bypassed_units import find_bypassed_units
from fsdp2_strategy.sharding.features import feature
from fsdp2_strategy.sharding.plan import ShardPlan, Unit, modules_to_recompute, plan_units
from fsdp2_strategy.sharding.units import check_config, check_reshard, reshard_of, shard_size_for

if TYPE_CHECKING:
    from fsdp2_strategy.parallel.tensor.plan import TensorPlan


def explain(
    model: nn.Module,
    config: StrategyConfig | None = None,
    *,
    is_training: bool = False,
    world_size: int | None = None,
    run: Callable[[nn.Module], object] | None = None,
    file: TextIO | None = None,
) -> str:
    """Print how a model would be sharded and how many bytes each rank would hold; not collective.

    The model may be on the meta device. Byte counts are those of the rank that holds the most. The optimizer is counted
    as Adam: two moments in the dtype in which a parameter is stored; or, with ``use_mp_opt``, fp32 master
    weights of half-precision parameters and two fp32 moments. `TrainingStrategy.explain` passes a strategy's settings.

    Args:
        model: any module; it is only read.
        config: the settings; by default those of `StrategyConfig()`. A plan of tensor parallelism is not checked on a
            tiny model, which `shard_model` does.
        is_training: count fp32 master weights, gradients and optimizer state; if False, only compute-dtype weights.
        world_size: number of ranks to plan for; by default those of the process group, or 1.
        run: function that calls the model as training does, with a batch on the model's device (``lambda model:
            model(batch)``). The text then names the units whose forward is bypassed, and the buffers that change. The
            function runs without gradients; torch's RNG state and all buffers are restored afterwards.
        file: file that rank 0 writes the text to; standard output by default.

    Returns:
        The text, on every rank.

    Raises:
        ShardError: the model is already sharded, or `shard_model` would raise because of the model or an argument.
        MeshError: ``shard_size`` or ``tensor_parallel_size`` does not divide the number of ranks.
    """
    if is_sharded(unwrap_model(model)):
        raise ShardError(
            f"cannot explain {class_name(model)}: it is already sharded, expected a model before prepare_model. The "
            "log of prepare_model says how it was sharded."
        )
    config = StrategyConfig() if config is None else config
    check_config(config, "explain")
    world_size = world_size or process_group.world_size()
    of_layers, of_experts = config.tensor_parallel_size, config.expert_parallel_size
    shard_size = shard_size_for(model, config, is_training=is_training, world_size=world_size)
    shard_size = check_shard_size(shard_size, world_size, of_layers)
    experts = {}
    if of_experts != 1:
        check_expert_size(of_experts, shard_size * of_layers, of_layers)
        experts = feature("experts").plan_experts(unwrap_model(model), of_experts)
    plan = plan_units(model, config, is_training=is_training, experts=experts.values())
    recomputed = modules_to_recompute(plan, config.activation_checkpointing)
    layers = None
    if of_layers > 1:
        planner = feature("tensor.plan").plan_tensor_parallel
        layers = planner(plan.model, of_layers, config.tensor_parallel_plan, without=experts)
    shapes = _shapes(plan.model, layers, experts, of_experts)
    ranks = _Ranks(world_size, shard_size, layers, shapes, of_experts)
    reshard = check_reshard(config.reshard_after_forward, shard_size)
    changing = _batch_norm_buffers(plan.model)
    if run is not None:
        with unchanged_buffers(plan.model) as changed:
            found = find_bypassed_units(plan.model, plan.names, run, ignored=[unit.module for unit in plan.ignored])
        plan.bypassed = some(found, "unit") if found else ""
        persistent = persistent_buffers(plan.model)
        changing += [name for name in map(clean, changed) if name in persistent and name not in changing]
    where = ", in host memory" if config.cpu_offload else ""
    text = _report(plan, ranks, reshard=reshard, where=where)
    if recomputed:
        text += f"\nrecomputed {some(list(recomputed), 'module')}: only their inputs are kept from forward to backward"
    if is_training and changing:
        text += f"\nchanging   {some(changing, 'buffer')}: made equal on all ranks at each step, see sync_buffers"
    if process_group.is_rank_0():
        (file or sys.stdout).write(text + "\n")
    return text


@dataclass(frozen=True)
class _Ranks:
    """Over how many ranks a model is split, and how."""

    world_size: int
    shard_size: int
    layers: TensorPlan | None
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of each parameter after layers were split and experts divided, on the rank that has the most of it."""
    per_expert: int = 1
    """Number of ranks among which experts are divided."""

    def of(self, unit: Unit) -> _Ranks:
        """Return the same ranks with the shard size of a unit."""
        if unit.kind in ("vision", "ignored"):
            return replace(self, shard_size=1)
        if unit.kind == "experts":
            layers = 1 if self.layers is None else self.layers.size
            return replace(self, shard_size=self.shard_size * layers // self.per_expert)
        return self

    def shapes_of(self, unit: Unit) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        """Return the parameters of a unit with their shapes before `fully_shard`."""
        return [(p, self.shapes[name]) for name, p in unit.parameters.items()]


def _shapes(
    model: nn.Module, layers: TensorPlan | None, experts: Mapping[str, nn.Module], size: int
) -> dict[str, tuple[int, ...]]:
    shapes = {clean(name): list(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    if layers is not None:
        for name, (dim, _) in layers.split_dims(model).items():
            shapes[clean(name)][dim] = math.ceil(shapes[clean(name)][dim] / layers.size)
    for module_name, module in experts.items():
        for name, _ in module.named_parameters():
            shapes[clean(f"{module_name}.{name}")][0] //= size
    return {name: tuple(shape) for name, shape in shapes.items()}


def _split_lines(model: nn.Module, ranks: _Ranks) -> Iterator[str]:
    """Yield how layers and experts are split: a line for parameters that differ only in the number of their layer."""
    if (layers := ranks.layers) is not None:
        by = "tensor_parallel_plan" if layers.is_given else "the model's own plan"
        splits = layers.split_dims(model)
        yield f"layers     {counted(len(splits), 'parameter')} split over {layers.size} ranks, by {by}"
        shapes = {name: list(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        lines = (
            f"  {generic_name(clean(name))}: {shapes[name]} -> {list(ranks.shapes[clean(name)])}, dimension {dim}"
            f"{' in two halves' if is_packed else ''}, {layers.styles[name]}"
            for name, (dim, is_packed) in splits.items()
        )
        yield from dict.fromkeys(lines)
        if layers.not_split:
            yield f"  not split, because they are tied: {', '.join(layers.not_split)}"
    if ranks.per_expert > 1:
        yield f"experts    divided among {ranks.per_expert} ranks, by the model's own plan"


def _report(plan: ShardPlan, ranks: _Ranks, *, reshard: bool | int, where: str) -> str:
    half = _short(plan.precision.half) if plan.precision.half else None
    reduction = "fp32" if plan.precision.reduce_in_full_precision else half
    precision = f"{half} compute, {reduction} reduction" if half else "compute in the dtype of the parameters"
    if plan.precision.is_training:
        keeper = " in the optimizer" if plan.precision.use_mp_opt else ""
        what = f"training: fp32 master weights of trainable parameters{keeper}, {precision}"
    else:
        what = f"inference: {half or 'unchanged'} weights, no master weights"
    lines = [
        f"{type(plan.model).__name__} on {counted(ranks.world_size, 'rank')}, each parameter split over "
        f"{ranks.shard_size}{'' if ranks.layers is None else f', after layers were split over {ranks.layers.size}'}",
        f"precision  {what}",
        f"blocks     {plan.source}",
        *_split_lines(plan.model, ranks),
        "",
        f"{'unit':<44} {'kind':<10} {'stored':<10} {'compute':<9} {'parameters':>15} {'gathered':>10}",
    ]
    held_bytes = Counter[str]()
    for _, equal in itertools.groupby([*plan.units, *plan.ignored], key=_shape):
        first, *others = group = list(equal)
        stored = "+".join(sorted({_short(plan.stored_dtype(first, p)) for p in first.parameters.values()}))
        count = sum(p.numel() for p in first.parameters.values())
        name = first.name or "(root)"
        if others:
            name += f" … {others[-1].name.rpartition('.')[2]} ({len(group)} equal)"
        gathered = size_text(sum(map(math.prod, dict(ranks.shapes_of(first)).values())) * first.compute_dtype.itemsize)
        dtype = _short(first.compute_dtype)
        lines.append(f"{name:<44} {first.kind:<10} {stored:<10} {dtype:<9} {count:>15,} {gathered:>10}")
        for unit in group:
            of_unit = ranks.of(unit)
            held_bytes.update(_held_bytes(plan, unit, of_unit))
            if unit.kind != "ignored":
                held_bytes["kept"] += _kept_bytes(plan, unit, of_unit, reshard)
    for name, parameter in plan.replicated.items():
        lines.append(f"{name:<44} {'replicated':<10} {_short(parameter.dtype):<10}")
    lines += ["", *_totals(plan, held_bytes, reshard=reshard, where=where)]
    return "\n".join(lines)


def _totals(plan: ShardPlan, held_bytes: Counter[str], *, reshard: bool | int, where: str) -> Iterator[str]:
    trainable = sum(p.numel() for p in plan.model.parameters() if p.requires_grad)
    buffers = list(plan.model.buffers())
    dtypes = ", ".join(sorted({_short(b.dtype) for b in buffers})) or "none"
    parts = ", ".join(f"{size_text(held_bytes[part])} {part}" for part in ("parameters", "gradients", "optimizer"))
    yield f"parameters {parameter_count(plan.model):,}, of which {trainable:,} trainable"
    size = size_text(sum(b.numel() * b.element_size() for b in buffers))
    yield f"buffers    {size} on each rank ({dtypes}), dtype kept"
    yield f"each rank  {parts}{where}"
    which = "the root unit" if reshard is True else "all units"
    if reshard is True and (kinds := sorted({f"{unit.kind}s" for unit in plan.units if unit.stays_gathered})):
        which += f", {', '.join(kinds)}"
    groups = "" if isinstance(reshard, bool) else f", over groups of {reshard} ranks"
    until = "from forward to backward" if plan.precision.is_training else "after forward"
    yield f"gathered   {size_text(held_bytes['kept'])} on each rank stay gathered {until}: {which}{groups}"
    for names in plan.ties:
        yield f"tied       {' = '.join(names)}"
    in_root = [name for unit in plan.units if unit.kind == "root" for name in unit.parameters]
    if in_root:
        yield f"root unit  {', '.join(in_root[:6])}" + (f" … ({len(in_root)})" if len(in_root) > 6 else "")
    for warning in plan.warnings():
        yield f"warning    {warning}"


def _kept_bytes(plan: ShardPlan, unit: Unit, ranks: _Ranks, reshard_after_forward: bool | int) -> int:
    """Return the bytes of a unit's gathered parameters that a rank keeps after the forward of the unit."""
    reshard = reshard_of(unit, plan, reshard_after_forward)
    if reshard is True:
        return 0
    is_cast = plan.precision.half is not None or plan.precision.is_training
    size = 0
    for parameter, (rows, *rest) in ranks.shapes_of(unit):
        dtype = unit.compute_dtype if is_cast and parameter.is_floating_point() else parameter.dtype
        # FSDP2 pads the rows of each rank to equal length.
        size += math.ceil(rows / ranks.shard_size) * ranks.shard_size * math.prod(rest) * dtype.itemsize
    return size // reshard if reshard else size


def _held_bytes(plan: ShardPlan, unit: Unit, ranks: _Ranks) -> dict[str, int]:
    """Return the bytes of a unit's parameters, gradients and optimizer state, on the rank that holds the most of it."""
    held = Counter[str]()
    for parameter, shape in ranks.shapes_of(unit):
        rows, *rest = shape or (1,)
        count = math.ceil(rows / ranks.shard_size) * math.prod(rest)
        size = count * plan.stored_dtype(unit, parameter).itemsize
        held["parameters"] += size
        if plan.precision.is_training and parameter.requires_grad:
            has_master = plan.precision.use_mp_opt and parameter.is_floating_point() and size < 4 * count
            held["gradients"] += 4 * count if has_master else size
            held["optimizer"] += 3 * 4 * count if has_master else 2 * size
    return held


def _batch_norm_buffers(model: nn.Module) -> list[str]:
    """Return the names of the running statistics of batch norm modules, which change in training."""
    norms = [(prefix, module) for prefix, module in model.named_modules() if isinstance(module, BATCH_NORMS)]
    return [clean(name) for prefix, norm in norms for name, _ in norm.named_buffers(prefix, recurse=False)]


def _shape(unit: Unit) -> object:
    """Return a value that is equal for units that differ only in their position in the model."""
    parameters = [(p.shape, p.dtype, p.requires_grad) for p in unit.parameters.values()]
    return unit.kind, type(unit.module), unit.compute_dtype, parameters


def _short(dtype: torch.dtype) -> str:
    return dtype_text(dtype).replace("bfloat", "bf").replace("float", "fp")
