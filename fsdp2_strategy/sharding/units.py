"""Hand the units of a plan to `fully_shard`, each with its precision, offload and resharding, and order their gathers.

Input: a plan, and a mesh. Output: units whose parameters are DTensors; what is not sharded is averaged over the ranks.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from fsdp2_strategy.distributed.mesh import build_mesh
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.hf.skeleton import keep_recorded_outputs
from fsdp2_strategy.model.gradients import average_gradient
from fsdp2_strategy.sharding.plan import ShardPlan, Unit
from fsdp2_strategy.sharding.precision import Precision


def shard_units(plan: ShardPlan, mesh: DeviceMesh, reshard_after_forward: bool | int, *, cpu_offload: bool) -> None:
    """Hand the units to FSDP2, inner ones first, the root last."""
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()
    shard = functools.partial(fully_shard, mesh=mesh, offload_policy=offload, ignored_params=_replicate(plan))
    root_policy = MixedPrecisionPolicy()
    for unit in sorted(plan.units, key=lambda unit: -unit.depth):
        policy = _policy(unit, plan.precision)
        if unit.module is plan.model:
            root_policy = policy
        else:
            reshard = False if unit.stays_gathered else reshard_after_forward
            if unit.kind == "tower":
                shard(unit.module, mesh=build_mesh(1), mp_policy=policy, reshard_after_forward=bool(reshard))
                continue
            shard(unit.module, mp_policy=policy, reshard_after_forward=reshard)
    # The root is gathered from the start of forward to the end of backward: None says so to FSDP2.
    root_reshard = None if reshard_after_forward is True else reshard_after_forward
    shard(plan.model, mp_policy=root_policy, reshard_after_forward=root_reshard)
    for module in (plan.model, *(unit.module for unit in plan.units)):
        keep_recorded_outputs(module)


def _policy(unit: Unit, precision: Precision) -> MixedPrecisionPolicy:
    if precision.half is None and not precision.is_training:
        return MixedPrecisionPolicy(output_dtype=unit.parent_dtype)
    reduce_dtype = precision.reduce_dtype(unit.compute_dtype) if precision.is_training else None
    return MixedPrecisionPolicy(
        param_dtype=unit.compute_dtype,
        reduce_dtype=reduce_dtype,
        output_dtype=unit.parent_dtype,
        cast_forward_inputs=unit.cast_inputs == "all",
    )


def _replicate(plan: ShardPlan) -> set[nn.Parameter]:
    """Keep 0-d parameters, and those of ignored modules, whole on every rank, average their gradients; return them."""
    dtypes = {p: unit.compute_dtype for unit in plan.ignored for p in unit.parameters.values()}
    for name, parameter in plan.replicated.items():
        dtype = plan.precision.stored_dtype(parameter, plan.precision.compute_dtype(name, parameter))
        if plan.precision.is_training and parameter.requires_grad:
            dtype = torch.promote_types(dtype, torch.float32)  # computed with as it is, wherever masters are kept
        dtypes[parameter] = dtype
    for parameter, dtype in dtypes.items():
        device = parameter.device if parameter.is_meta else current_device()
        parameter.data = parameter.data.to(device, dtype if parameter.is_floating_point() else None)
        average_gradient(parameter)
    return set(dtypes)


def prefetch(units: list[nn.Module], depth: int) -> None:
    """Fix which units are gathered ahead: the next ``depth`` in forward, the ones before in backward."""
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for i, unit in enumerate(sharded):
        unit.set_modules_to_forward_prefetch(sharded[i + 1 : i + 1 + depth])
        unit.set_modules_to_backward_prefetch(sharded[max(0, i - depth) : i][::-1])
