"""Call `fully_shard` on the units of a plan, with their precision, offload and resharding, and set their prefetching.

Input: a plan, and a mesh. Output: units with DTensor parameters, and hooks that average the gradients of parameters
that are not sharded.
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
    """Call `fully_shard` on each unit of a plan: the deepest units first, the root last."""
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()
    shard = functools.partial(fully_shard, mesh=mesh, offload_policy=offload, ignored_params=_replicate(plan))
    root_policy = MixedPrecisionPolicy()
    for unit in sorted(plan.units, key=lambda unit: -unit.depth):
        policy = _policy(unit, plan.precision)
        reshard = False if unit.stays_gathered else reshard_after_forward
        if unit.module is plan.model:
            root_policy = policy
        elif unit.kind == "vision":
            shard(unit.module, mesh=build_mesh(1), mp_policy=policy, reshard_after_forward=bool(reshard))
        else:
            shard(unit.module, mp_policy=policy, reshard_after_forward=reshard)
    # With None, FSDP2 keeps the root gathered from the start of forward to the end of backward.
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
    """Cast the parameters that are not sharded, move them to the device, and register hooks that average gradients.

    Returns:
        The parameters that are not sharded.
    """
    dtypes = {p: unit.compute_dtype for unit in plan.ignored for p in unit.parameters.values()}
    for name, parameter in plan.replicated.items():
        dtype = plan.precision.stored_dtype(parameter, plan.precision.compute_dtype(name, parameter))
        if plan.precision.is_training and parameter.requires_grad:
            dtype = torch.promote_types(dtype, torch.float32)  # fp32 even with `masters_in_optimizer`
        dtypes[parameter] = dtype
    for parameter, dtype in dtypes.items():
        device = parameter.device if parameter.is_meta else current_device()
        parameter.data = parameter.data.to(device, dtype if parameter.is_floating_point() else None)
        average_gradient(parameter)
    return set(dtypes)


def prefetch(units: list[nn.Module], depth: int) -> None:
    """Make each unit prefetch the next ``depth`` units in forward, and the previous ``depth`` units in backward."""
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for i, unit in enumerate(sharded):
        unit.set_modules_to_forward_prefetch(sharded[i + 1 : i + 1 + depth])
        unit.set_modules_to_backward_prefetch(sharded[max(0, i - depth) : i][::-1])
