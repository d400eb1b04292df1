"""Call `fully_shard` on the units of a plan, with their precision, offload and resharding.

Input: a plan, and a mesh. Output: units with DTensor parameters, and hooks that average the gradients of parameters
that are not sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.distributed import process_group
from fsdp2_strategy.distributed.mesh import auto_shard_size, build_mesh, data_parallel_mesh
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.errors import ShardError
from fsdp2_strategy.model.fsdp_state import keep_class_name, parameter_groups, reshard_without_backward
from fsdp2_strategy.model.gradients import average_gradients
from fsdp2_strategy.model.unit_hooks import register_hook
from fsdp2_strategy.sharding.blocks import parameter_count
from fsdp2_strategy.sharding.plan import ShardPlan, Unit
from fsdp2_strategy.sharding.precision import Precision


def check_config(config: object, action: str) -> None:
    """Raise ShardError if the settings are not a `StrategyConfig`."""
    if not isinstance(config, StrategyConfig):
        raise ShardError(
            f"cannot {action} a model: the configuration is {config!r}, expected a StrategyConfig. Construct one."
        )


def shard_size_for(
    model: nn.Module, config: StrategyConfig, *, is_training: bool, world_size: int | None = None
) -> int:
    """Return the shard size of a configuration, which is chosen by the size of the model if it is "auto"."""
    if config.shard_size != "auto":
        return config.shard_size
    ranks = (world_size or process_group.world_size()) // config.tensor_parallel_size
    return auto_shard_size(parameter_count(model), is_training=is_training, world_size=ranks)


def shard_units(
    plan: ShardPlan,
    mesh: DeviceMesh,
    expert_view: DeviceMesh | None,
    reshard_after_forward: bool | int,
    *,
    cpu_offload: bool,
) -> None:
    """Call `fully_shard` on each unit of a plan: the deepest units first, the root last.

    Units of the kind "experts" are sharded on ``expert_view``, a mesh from `expert_mesh`.
    """
    offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if cpu_offload else OffloadPolicy()
    replicated = _replicate(plan)
    shard = functools.partial(fully_shard, offload_policy=offload, ignored_params=set(replicated))
    of_experts = mesh if expert_view is None else data_parallel_mesh(expert_view)
    root_policy = MixedPrecisionPolicy()
    for unit in sorted(plan.units, key=lambda unit: -unit.depth):
        policy = _policy(unit, plan.precision)
        if unit.module is plan.model:
            root_policy = policy
            continue
        needs_weight = _needs_weight_in_backward(unit)  # `fully_shard` changes the class of the module
        own_mesh = build_mesh(1) if unit.kind == "vision" else of_experts if unit.kind == "experts" else mesh
        reshard = reshard_of(unit, plan, reshard_after_forward)
        shard(unit.module, mesh=own_mesh, mp_policy=policy, reshard_after_forward=reshard)
        unit.module.set_unshard_in_backward(needs_weight)  # type: ignore[operator]
        if unit.kind == "head" and unit.stays_gathered and reshard_after_forward:
            unit.module.register_forward_hook(reshard_without_backward)
    shard(plan.model, mesh=mesh, mp_policy=root_policy, reshard_after_forward=_reshard_of_root(reshard_after_forward))
    if replicated:
        average_gradients(plan.model, replicated)
    for module in (plan.model, *(unit.module for unit in plan.units)):
        keep_class_name(module)
    for param_group in parameter_groups(plan.model):
        register_hook(param_group, "finish gather", "inference mode", _outside_inference_mode)


def check_reshard(reshard_after_forward: bool | int, shard_size: int) -> bool | int:
    """Return ``reshard_after_forward`` with groups of one rank replaced by False, and of the shard size by True."""
    if isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if not isinstance(reshard_after_forward, int) or reshard_after_forward < 1 or shard_size % reshard_after_forward:
        raise ShardError(
            f"cannot reshard: reshard_after_forward is {reshard_after_forward!r}, expected true, false or a divisor of "
            f"the shard size {shard_size}. Use the number of ranks of a node, or true."
        )
    # With groups of one rank, parameters stay gathered (False); groups of the shard size are the default (True).
    return {1: False, shard_size: True}.get(reshard_after_forward, reshard_after_forward)


def reshard_of(unit: Unit, plan: ShardPlan, reshard_after_forward: bool | int) -> bool | int | None:
    """Return the argument ``reshard_after_forward`` of `fully_shard` for a unit, given what `check_reshard` returned.

    It is None for the root unit if the other units are resharded to all ranks.
    """
    if unit.module is plan.model:
        return _reshard_of_root(reshard_after_forward)
    if unit.stays_gathered:
        return False
    return bool(reshard_after_forward) if unit.kind in ("vision", "experts") else reshard_after_forward


def _needs_weight_in_backward(unit: Unit) -> bool:
    """Return whether a unit is gathered for backward; the gradient of a plain lookup needs the indices only.

    Its weight may be read nevertheless, when backward computes activations again: [Note: direct use] in `direct_use`.
    """
    module = unit.module
    if unit.kind == "block" or type(module) is not nn.Embedding or "forward" in vars(module):
        return True
    return module.max_norm is not None or module.sparse or isinstance(module.weight, DTensor)


def _outside_inference_mode(_param_group: object, proceed: Callable[[], None]) -> None:
    """Finish an all-gather outside of inference mode; a hook on the call "finish gather".

    FSDP2 allocates a unit's gathered parameters once: from inference mode, they could not be used in training.
    """
    if not torch.is_inference_mode_enabled():
        return proceed()
    with torch.inference_mode(mode=False), torch.no_grad():  # the former enables gradients
        return proceed()


def _reshard_of_root(reshard_after_forward: bool | int) -> bool | int | None:
    # With None, FSDP2 keeps the root gathered from the start of forward to the end of backward.
    return None if reshard_after_forward is True else reshard_after_forward


def _policy(unit: Unit, precision: Precision) -> MixedPrecisionPolicy:
    if precision.half is None and not precision.is_training:
        return MixedPrecisionPolicy(output_dtype=unit.parent_dtype)
    reduce_dtype = precision.reduce_dtype(unit.compute_dtype) if precision.is_training else None
    return MixedPrecisionPolicy(
        param_dtype=unit.compute_dtype,
        reduce_dtype=reduce_dtype,
        output_dtype=unit.parent_dtype,
        # In half precision, other hooks cast: [Note: inputs] in `input_casts`.
        cast_forward_inputs=unit.cast_inputs == "all" and unit.compute_dtype.itemsize >= torch.float32.itemsize,
    )


def _replicate(plan: ShardPlan) -> list[nn.Parameter]:
    """Cast the parameters that are not sharded, move them to the device, and return them in the plan's order."""
    dtypes = {p: unit.compute_dtype for unit in plan.ignored for p in unit.parameters.values()}
    for name, parameter in plan.replicated.items():
        dtype = plan.precision.stored_dtype(parameter, plan.precision.compute_dtype(name, parameter))
        if plan.precision.is_training and parameter.requires_grad:
            dtype = torch.promote_types(dtype, torch.float32)  # fp32 even with `masters_in_optimizer`
        dtypes[parameter] = dtype
    for parameter, dtype in dtypes.items():
        device = parameter.device if parameter.is_meta else current_device()
        parameter.data = parameter.data.to(device, dtype if parameter.is_floating_point() else None)
    return list(dtypes)
