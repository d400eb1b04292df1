"""Wrap each private name of torch that this package uses in a small function or a constant.

Input: torch's objects. Output: the values of their private attributes. Other modules of this package use no private
name of torch except `_parameters`, `_buffers`, `_modules` and `_foreach_...`. tests/test_internals.py checks this, and
reports the names that a new version of torch lacks. docs/versions.md has the versions that the module is tested with,
docs/private_names.md a table of the names.

[Note: FSDP2's objects] `fully_shard` creates a *state* (``FSDPState``) for each unit, with hooks around the module's
forward. A state has *parameter groups* (``FSDPParamGroup``, ``param_group`` in the code), usually one, which all-gather
parameters and reduce gradients. A parameter group has *parameters* (``FSDPParam``). Each of them contains a sharded and
an unsharded parameter. The sharded one is registered on the module between passes; the unsharded one replaces it while
the unit is gathered.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, _cast_fp_tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.distributed.utils import _apply_to_tensors
from torch.utils import _device, _python_dispatch, _pytree

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Context in which operations do not call ``__torch_function__`` of subclasses of tensors."""
DisableTorchFunction, DisableTorchDispatch = torch._C.DisableTorchFunction, torch._C._DisableTorchDispatch
"""Contexts in which operations call no Python of modes or of subclasses of tensors."""
TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Base class of modes that see each operator."""
StridedShard = _StridedShard
"""Placement of a dimension that several axes of a mesh split, the inner axis first, as `fully_shard` makes it."""
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
"""Take nested values apart, and put them together."""
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map
"""Read and change the leaves of nested values."""

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renames the function, and warns about calls by the earlier name."""
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

T = TypeVar("T")

# --- FSDP2: a state -------------------------------------------------------------------------------------------------


def fsdp_state_of(module: nn.Module) -> Any:
    """Return FSDP2's state of a module that `fully_shard` was called on; see [Note: FSDP2's objects]."""
    return module._get_fsdp_state()  # type: ignore[operator]


def param_groups_of(state: FSDPState) -> list[Any]:
    """Return the parameter groups of a state; before torch 2.12 it has at most one."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def choose_root(state: FSDPState) -> None:
    """Initialise FSDP2 with this state as the root, if not done yet; else the first unit that runs becomes the root."""
    if state._is_root is None:
        state._lazy_init()


def run_pre_forward(state: FSDPState, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Run FSDP2's pre-forward hook of a module; return the cast inputs."""
    return state._pre_forward(module, args, kwargs)


def run_post_forward(state: FSDPState, module: nn.Module, args: Any, output: Any) -> Any:
    """Run FSDP2's post-forward hook of a module; return the output, with backward hooks registered on it."""
    return state._post_forward(module, args, output)


def pre_backward_hook(state: FSDPState) -> Callable[..., Any]:
    """Return FSDP2's hook on a unit's outputs, which all-gathers the unit for backward."""
    return state._pre_backward


def is_gathered_for_backward(state_or_param_group: Any) -> bool:
    """Return whether a unit's pre-backward hook has run in the current backward pass, and its reduction has not."""
    return bool(state_or_param_group._training_state == TrainingState.PRE_BACKWARD)


def has_forward_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Return whether a function is a forward hook of a module."""
    return hook in module._forward_hooks.values()


def mark_idle(state_or_param_group: Any) -> None:
    """Mark a state or a parameter group as idle: neither in a forward nor in a backward pass."""
    state_or_param_group._training_state = TrainingState.IDLE


def forget_forward_root(state: FSDPState) -> None:
    """Clear the root of the current forward pass: FSDP2 would treat the pass after a failed one as a part of it."""
    state._state_ctx.iter_forward_root = None


def run_after_backward(state: FSDPState, function: Callable[[], None]) -> None:
    """Run a function at the end of each backward pass of a root state, after the gradients of all units are reduced."""
    finish = state._root_post_backward_final_callback

    def finish_and_run() -> None:
        finish()
        function()

    state.__dict__["_root_post_backward_final_callback"] = finish_and_run


# --- FSDP2: a parameter group ---------------------------------------------------------------------------------------


UNIT_CALLS = {
    "gather": "unshard",
    "finish gather": "wait_for_unshard",
    "gather for forward": "pre_forward",
    "hook inputs for reduce": "_register_post_backward_hook",
    "reduce": "post_backward",
    "choose gradient dtypes": "_init_mp_dtypes",
    "record forward order": "_record_post_forward",
}
"""Purpose and name of each method of a parameter group that other modules may replace."""


def original_call(param_group: FSDPParamGroup, call: str) -> Callable[..., Any]:
    """Return FSDP2's own method for a purpose in `UNIT_CALLS`, even if the method was replaced."""
    function: Callable[..., Any] = getattr(type(param_group), UNIT_CALLS[call]).__get__(param_group)
    return function


def replace_call(param_group: FSDPParamGroup, call: str, function: Callable[..., Any] | None) -> None:
    """Replace a parameter group's method for a purpose in `UNIT_CALLS`; None restores FSDP2's own method."""
    if function is None:
        param_group.__dict__.pop(UNIT_CALLS[call], None)
    else:
        param_group.__dict__[UNIT_CALLS[call]] = function


def hook_inputs(param_group: FSDPParamGroup, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Apply FSDP2's hook on a unit's inputs, which reduces the unit in backward, with another autograd function."""
    own = _fsdp_param_group.RegisterPostBackwardFunction
    _fsdp_param_group.RegisterPostBackwardFunction = function  # type: ignore[misc]
    try:
        return original_call(param_group, "hook inputs for reduce")(args, kwargs)  # type: ignore[no-any-return]
    finally:
        _fsdp_param_group.RegisterPostBackwardFunction = own  # type: ignore[misc]


def module_of(param_group: FSDPParamGroup) -> nn.Module:
    """Return the module that `fully_shard` was called on."""
    return param_group.modules[0]


def mesh_of(param_group: FSDPParamGroup) -> Any:
    """Return the mesh that a unit is sharded over."""
    return param_group.mesh_info.mesh


def device_of(param_group: FSDPParamGroup) -> torch.device:
    """Return the device that a unit computes on."""
    return param_group.device


def parameters_of(param_group: FSDPParamGroup) -> list[Any]:
    """Return the parameters of a parameter group; see [Note: FSDP2's objects]."""
    return param_group.fsdp_params


def trained_parameters_of(param_group: FSDPParamGroup) -> list[Any]:
    """Return the parameters of a parameter group that require gradients."""
    return [each for each in param_group.fsdp_params if each.sharded_param.requires_grad]


def begins_gather(param_group: FSDPParamGroup) -> bool:
    """Return whether a gather of this unit begins an all-gather.

    It does not if the unit is gathered, if an all-gather is in flight, or if backward needs no weight of the unit.
    """
    if param_group._all_gather_result is not None or param_group.is_unsharded:
        return False
    return gathers_in_backward(param_group) or not is_gathered_for_backward(param_group)


def gathers_in_backward(param_group: FSDPParamGroup) -> bool:
    """Return whether FSDP2 gathers a unit before its backward."""
    return param_group.unshard_in_backward


def has_full_parameters(param_group: FSDPParamGroup) -> bool:
    """Return whether a unit is gathered, and not only its all-gather in flight."""
    return param_group.is_unsharded


def gathering_ranks(param_group: FSDPParamGroup) -> int:
    """Return how many ranks take part in a unit's all-gather."""
    return param_group._all_gather_process_group.size()


def gradient_ranks(param_group: FSDPParamGroup) -> int:
    """Return over how many ranks a unit's gradients are reduced: its shards and replicas."""
    return int(param_group.mesh_info.mesh.size())


def gather(param_group: FSDPParamGroup) -> None:
    """All-gather a unit, and wait until its parameters are gathered."""
    param_group.unshard()
    param_group.wait_for_unshard()


def drop_gather_in_flight(param_group: FSDPParamGroup) -> None:
    """Wait for an all-gather that is in flight, and free the gathered parameters."""
    if param_group._all_gather_result is not None:
        param_group.wait_for_unshard()
        param_group._to_sharded()  # type: ignore[no-untyped-call]


def reset_param_group(param_group: FSDPParamGroup) -> None:
    """Free a unit's gathered parameters and mark it idle; callable at any point of a pass."""
    if param_group._all_gather_result is not None:
        param_group.wait_for_unshard()
    mark_idle(param_group)
    param_group._to_sharded()  # type: ignore[no-untyped-call]


def begin_forward(state: FSDPState, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """All-gather a unit as before its forward, until `end_forward`, and start its prefetches.

    Return the inputs of a module within it with the backward hook that reduces the unit's gradients.
    """
    state._training_state = TrainingState.FORWARD
    for param_group in param_groups_of(state):
        args, kwargs = param_group.pre_forward(module, args, kwargs)
    for ahead in state._states_to_forward_prefetch:
        for param_group in param_groups_of(ahead):
            param_group._prefetch_unshard(param_group, "forward")
    return args, kwargs


def end_forward(state: FSDPState, module: nn.Module) -> None:
    """Free the gathered parameters of a unit as after its forward, without hooks for its backward."""
    for param_group in param_groups_of(state):
        param_group.post_forward(module, None, None)
    mark_idle(state)


def reduce_gradients(param_group: FSDPParamGroup) -> None:
    """Reduce a unit's gradients, as FSDP2 does when those of its inputs are computed."""
    param_group.post_backward()


def reduces_gradients(param_group: FSDPParamGroup) -> bool:
    """Return whether the next backward reduces a unit's gradients, instead of accumulating them unreduced."""
    return param_group.reduce_grads


def lacks_gradient_dtypes(param_group: Any) -> bool:
    """Return whether FSDP2 has chosen no dtypes for a unit's gradients, because all its parameters are frozen.

    From torch 2.15 on, it chooses them for each parameter, also for frozen ones.
    """
    return hasattr(param_group, "_orig_dtype") and param_group._orig_dtype is None


def set_gradient_dtype(param_group: Any, dtype: torch.dtype) -> None:
    """Set the dtype that gradients are cast to after the reduction; from torch 2.15 on, that is ``grad_dtype``."""
    if hasattr(param_group, "_orig_dtype"):
        param_group._orig_dtype = dtype


def set_gradient_dtypes_of(param_group: Any, parameter: FSDPParam) -> None:
    """Set the dtypes of a unit's gradients, during and after the reduction, to those of ``parameter``."""
    param_group._orig_dtype, param_group._reduce_dtype = parameter.orig_dtype, parameter.reduce_dtype


def has_deferred_all_reduce(param_group: FSDPParamGroup) -> bool:
    """Return whether a unit has gradients that are reduced over its shards but not yet over its replicas."""
    return param_group._partial_reduce_output is not None


def drop_deferred_all_reduce(param_group: FSDPParamGroup) -> None:
    """Drop the gradients that are not yet all-reduced over the replicas."""
    param_group._partial_reduce_output = None


# --- FSDP2: a parameter ---------------------------------------------------------------------------------------------


def name_of(parameter: FSDPParam) -> str:
    """Return the fqn of a parameter; FSDP2 sets it in the first pass."""
    return parameter._param_fqn  # type: ignore[return-value]


def shard_of(parameter: FSDPParam) -> nn.Parameter:
    """Return the sharded parameter, a DTensor."""
    return parameter.sharded_param


def flat_shard_of(parameter: FSDPParam) -> torch.Tensor:
    """Return this rank's shard, flattened and padded to the size of the largest shard."""
    return parameter._sharded_param_data


def set_flat_shard(parameter: FSDPParam, flat: torch.Tensor) -> None:
    """Set a parameter's flat shard; make the sharded parameter's local tensor a view of its first elements."""
    shown: Any = parameter.sharded_param
    parameter._sharded_param_data = flat
    shown._local_tensor = flat[: shown._local_tensor.numel()].view(shown._local_tensor.size())


def reset_sharded_parameter(parameter: FSDPParam) -> None:
    """Make FSDP2 read the sharded parameter from the module again; call this after replacing or materialising it."""
    parameter.reset_sharded_param()  # type: ignore[no-untyped-call]


def is_offloaded_to_cpu(parameter: FSDPParam) -> bool:
    """Return whether FSDP2 keeps the shard in host memory (``CPUOffloadPolicy``)."""
    return parameter.offload_to_cpu


def unsharded_of(parameter: FSDPParam) -> torch.Tensor | None:
    """Return the unsharded parameter; None before the first all-gather."""
    return getattr(parameter, "_unsharded_param", None)


def keep_gradients_in(parameter: Any, dtype: torch.dtype) -> None:
    """Make a sharded parameter take gradients of another dtype than its own; call this before FSDP2 chooses dtypes.

    Before torch 2.15, `set_gradient_dtype` of its unit has to follow.
    """
    shard = shard_of(parameter)
    shard.grad_dtype = dtype
    if hasattr(parameter, "_capture_grad_dtype_policy"):
        parameter._capture_grad_dtype_policy(shard)


def _accumulated_gradient(parameter: Any) -> torch.Tensor | None:
    """Return the gradient that was accumulated over micro-batches without communication; None if there is none.

    From torch 2.15 on, autograd accumulates it in the unsharded parameter's ``grad``, and nothing else holds one.
    """
    return cast("torch.Tensor | None", vars(parameter).get("unsharded_accumulated_grad"))


def has_unreduced_gradient(parameter: FSDPParam) -> bool:
    """Return whether a parameter has a gradient on this rank that is not reduced yet."""
    unsharded = unsharded_of(parameter)
    return _accumulated_gradient(parameter) is not None or (unsharded is not None and unsharded.grad is not None)


def trained_without_gradient(param_group: FSDPParamGroup) -> list[int]:
    """Return the places of a unit's trained parameters that have no gradient on this rank that is not reduced yet."""
    return [
        place
        for place, each in enumerate(param_group.fsdp_params)
        if each.sharded_param.requires_grad
        and each.__dict__.get("unsharded_accumulated_grad") is None
        and ((unsharded := each.__dict__.get("_unsharded_param")) is None or unsharded.grad is None)
    ]


def drop_unreduced_gradient(parameter: Any) -> None:
    """Drop the gradient that is not reduced yet."""
    if _accumulated_gradient(parameter) is not None:
        parameter.unsharded_accumulated_grad = None
    if (unsharded := unsharded_of(parameter)) is not None:
        unsharded.grad = None


def set_zero_gradient(parameter: FSDPParam) -> None:
    """Set the unsharded gradient of a parameter that has been gathered to zeros, in the dtype autograd would use."""
    unsharded: Any = unsharded_of(parameter)
    unsharded.grad = torch.zeros_like(unsharded, dtype=unsharded.grad_dtype)


def unify_gradient_dtypes(parameters: Sequence[Any]) -> None:
    """Cast the unreduced gradients of a unit to ``reduce_dtype`` if one was accumulated in that dtype.

    Before torch 2.15, all gradients of one reduction must have the same dtype.
    """
    if [each for each in parameters if each.__dict__.get("unsharded_accumulated_grad") is not None]:
        for parameter in parameters:
            if _accumulated_gradient(parameter) is None and unsharded_of(parameter) is not None:
                parameter.to_accumulated_grad_if_needed()


# --- DTensor --------------------------------------------------------------------------------------------------------


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor, without autograd and synchronisation; return other tensors unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def specs_of(tensors: Iterable[torch.Tensor]) -> list[object]:
    """Return the spec of each DTensor, which has its mesh, placements and shape; None for a plain tensor."""
    return [tensor._spec if isinstance(tensor, DTensor) else None for tensor in tensors]


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of tensors of one dtype and device, one after the other, in one call."""
    flat: torch.Tensor = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def with_placements(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, Any, tuple[Any, ...]]]:
    """Return the local tensor, mesh and placements of each tensor; a plain tensor has no mesh: (tensor, None, ())."""
    return [
        (t._local_tensor, t._spec.mesh, t._spec.placements) if isinstance(t, DTensor) else (t, None, ())
        for t in tensors
    ]


def set_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor."""
    tensor._local_tensor = local


def dtensor_like(source: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor laid out as ``source``; ``from_local`` would move ``local`` to the device of the mesh."""
    meta = TensorMeta(source.shape, source.stride(), local.dtype)
    spec = DTensorSpec(source.device_mesh, source.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def root_mesh_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a mesh was taken from by the names of its axes; the mesh itself if it is not a part."""
    return mesh._get_root_mesh()


def forget_sharding_rules() -> None:
    """Clear DTensor's sharding cache: its keys contain meshes, and equal meshes may have different process groups."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: PLC0415  (it loads the compiler)

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors in nested values, as FSDP2 casts the inputs and outputs of a unit."""
    return _apply_to_tensors(lambda tensor: _cast_fp_tensor(dtype, tensor), values)


def moved_to(device: torch.device, values: Any) -> Any:
    """Move the tensors in nested values to a device; return tensors that are there unchanged."""
    return _apply_to_tensors(lambda tensor: tensor.to(device), values)


# --- process groups -------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """Return the store of the default process group."""
    return distributed_c10d._get_default_store()


def is_of_default_store(group: dist.ProcessGroup) -> bool:
    """Return whether a group was made with the default group's store, as by `new_group`, so its ranks are known."""
    store = distributed_c10d._world.pg_map.get(group, (None, None))[1]
    return store is None or _innermost(store) == _innermost(default_store())


def _innermost(store: Any) -> object:
    """Return an identifier of what several stores with prefixes have in common."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return (store.host, store.port) if hasattr(store, "port") else id(store)


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups of this process."""
    return list(distributed_c10d._world.pg_map)


def new_named_group(ranks: list[int], name: str, **options: Any) -> dist.ProcessGroup:
    """Make a process group of ``ranks`` with a given name; collective over ``ranks`` only.

    If the default group is bound to a device (``device_id`` of ``init_process_group``), torch would split the default
    group's communicator, at once. NCCL's split is collective over all ranks of the default group, but those outside of
    ``ranks`` return without it (``use_local_synchronization``), so that the others would wait for them. So the group is
    made as if no device were bound: with a communicator of its own, which starts at its first collective.
    """
    default: Any = dist.group.WORLD
    bound = getattr(default, "bound_device_id", None)
    if bound is not None:
        default.bound_device_id = None
    try:
        with patch.object(distributed_c10d, "_hash_ranks_to_str", lambda _: name):
            group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True, **options)
    finally:
        if bound is not None:
            default.bound_device_id = bound
    return group


def timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """Return the time-out of a group's collectives for a device type; None if the backend does not report one."""
    return getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)


def set_timeout(group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Set the time-out of a group's collectives; ``group=None`` means the default group."""
    if hasattr(dist, "set_timeout"):  # torch 2.14, which warns about calls by the earlier name
        dist.set_timeout(timeout, group)
    else:
        distributed_c10d._set_pg_timeout(timeout, group)


def broadcast_coalesced(group: dist.ProcessGroup, tensors: list[torch.Tensor], bucket_bytes: int, source: int) -> None:
    """Broadcast tensors from rank ``source`` of a group, in buckets; collective over the group."""
    dist._broadcast_coalesced(group, tensors, bucket_bytes, source)  # type: ignore[attr-defined]


current_frames = sys._current_frames
"""Return the innermost frame of each thread, by the thread's identifier; for `thread_stacks` only, which says why."""


def sequence_number(group: Any) -> int:
    """Return how many collectives a group has begun; 0 if its backend does not count them."""
    with contextlib.suppress(RuntimeError):
        return int(group._get_sequence_number_for_group())
    return 0


def collectives_begun(group: Any, device: torch.device) -> int | None:
    """Return how many collectives a group has begun on a device; None if its backend does not count them."""
    with contextlib.suppress(RuntimeError):
        return int(group._get_backend(device)._get_sequence_number_for_group())
    return None


def flight_record() -> bytes | None:
    """Return torch's flight record, for ``torch.distributed.flight_recorder``; None if it is off, empty or missing."""
    internals = torch._C._distributed_c10d
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        if hasattr(internals, name) and b'"entries"' in getattr(internals, f"{name}_json")(True, False):
            return bytes(getattr(internals, name)(True, True, False))
    return None


# --- tensors, autograd and memory -----------------------------------------------------------------------------------


def changes_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; -1 if torch does not count, because of inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def storage_address(tensor: torch.Tensor) -> int:
    """Return an identifier of an existing storage, also of those of meta tensors, whose data pointers are 0."""
    return int(tensor.untyped_storage()._cdata)


def free_pinned_memory() -> None:
    """Release the pinned host memory that torch caches."""
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRecorder:
    """How torch records the allocations of a type of accelerator."""

    record: Callable[[bool], None]
    """Start to record, or stop."""
    dump: Callable[[str], None]
    """Write the recorded allocations and the current ones to a file."""
    on_out_of_memory: Callable[[Callable[..., None]], None]
    """Call a function when memory cannot be allocated, before torch raises; it cannot be removed."""


def memory_recorder(device_type: str) -> MemoryRecorder | None:
    """Return the functions that record allocations of a type of accelerator; None if torch does not have all."""
    memory: Any = getattr(torch.get_device_module(device_type), "memory", None)
    observe = getattr(torch._C, f"_{device_type}_attachOutOfMemoryObserver", None)
    if observe is None or not (hasattr(memory, "_record_memory_history") and hasattr(memory, "_dump_snapshot")):
        return None

    def record(is_on: bool) -> None:
        memory._record_memory_history("all" if is_on else None, stacks="python", max_entries=_RECORDED_ALLOCATIONS)

    return MemoryRecorder(record=record, dump=memory._dump_snapshot, on_out_of_memory=observe)


_RECORDED_ALLOCATIONS = 100_000


def is_profiling() -> bool:
    """Return whether torch's profiler records in this process."""
    return torch.autograd.profiler._is_profiler_enabled


def is_compiled(module: nn.Module) -> bool:
    """Return whether the call or the forward of a module was compiled by ``torch.compile``."""
    is_wrapper = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    return is_wrapper or module._compiled_call_impl is not None


def operator_of(overload: Any) -> Any:
    """Return the operator of one of its overloads, by which FLOP formulas are listed; None for higher-order ones."""
    return getattr(overload, "_overloadpacket", None)


def attention_on_cpu() -> tuple[Any, Any]:
    """Return the operators of attention on a CPU, forward and backward, which torch's FLOP counter does not list."""
    operators = torch.ops.aten
    forward = operators._scaled_dot_product_flash_attention_for_cpu
    return forward, operators._scaled_dot_product_flash_attention_for_cpu_backward


def grouped_product() -> Any:
    """Return the operator that multiplies groups of rows, as experts do; torch's FLOP counter does not list it."""
    return torch.ops.aten._grouped_mm


def has_fake_tensors(types: Iterable[type]) -> bool:
    """Return whether an operator gets fake tensors: DTensor infers shapes with them, and nothing is computed."""
    return any(issubclass(each, FakeTensor) for each in types)


def is_in_backward() -> bool:
    """Return whether autograd runs a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the base that autograd records for a view; None if ``tensor`` is not a view."""
    return tensor._base


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the negative bit set: its elements are negated when read."""
    return torch._neg_view(tensor)


def wrapper_subclass(cls: type, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of a subclass that has a shape, dtype and device, but no storage."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=False)


without_torch_function: Any = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a tensor subclass that only uses ``__torch_dispatch__``."""


@contextmanager
def without_modes() -> Iterator[None]:
    """Disable ``__torch_function__`` and ``__torch_dispatch__`` of all modes and subclasses within the block."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def remember_device_constructors() -> None:
    """Fill torch's cache of what a ``torch.device`` context overrides; call this before patching such a function."""
    _device._device_constructors()


def schema_of(operator: Any) -> Any:
    """Return the schema of a torch operator, which marks the arguments that it writes to; None for other functions."""
    return getattr(operator, "_schema", None)


DEVICE_MODULES = ("torch.accelerator", "torch.cuda", "torch.xpu", "torch.mps", "torch.mtia")
"""Modules of torch for types of accelerators."""

# --- modules, optimizers and loaders --------------------------------------------------------------------------------

APPLY = "_apply"
"""The method of a module through which ``to``, ``half``, ``cuda`` and the like change its tensors."""
IS_MANAGED = "_is_fsdp_managed_module"
"""Attribute that `fully_shard` sets on the modules of a unit; transformers reads it."""
ATTRIBUTES_OF_FSDP = (IS_MANAGED, "_compiled_call_impl")
"""Attributes that torch sets on a module, and that a copy of the module must not have."""
STATE_OF_FSDP = "__composable_api_state_key"
"""Prefix of the attribute in which `fully_shard` stores a module's state."""
INIT_WITHOUT_OPERATIONS = ("_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_")
"""Functions of `torch.nn.init` that have no effect on meta tensors."""

FUSED_ADAM_DEVICES = ("cpu", "cuda", "xpu", "mps")
"""Types of devices with a kernel for the fused Adam; torch's own list has others, whose packages bring the kernel or
not."""
BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._NormBase,)
"""Base classes of all batch norms."""
CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.modules.conv._ConvNd,)
"""Base classes of all convolutions."""


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that are not in its state dict."""
    return module._non_persistent_buffers_set


def state_dict_hooks(module: nn.Module) -> tuple[object, ...]:
    """Return the identifiers of the hooks that change a module's state dict."""
    return (*module._state_dict_hooks, *module._state_dict_pre_hooks)


def is_driven_by_schedule(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a learning-rate scheduler was created for an optimizer."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def end_workers(iterator: object) -> None:
    """End the worker processes of a DataLoader's iterator, if it has any."""
    if end := getattr(iterator, "_shutdown_workers", None):
        end()


def forget_workers(loader: Any) -> None:
    """Drop a DataLoader's persistent workers, so that its next iterator starts new ones."""
    loader._iterator = None


def copy_operator() -> Any:
    """Return the operator that copies a tensor to a device or dtype."""
    return torch.ops.aten._to_copy.default


# --- FSDP2: passes that raised --------------------------------------------------------------------------------------


def is_in_forward(state: FSDPState) -> bool:
    """Return whether a unit's pre-forward hook has run, and its post-forward hook has not."""
    return state._training_state == TrainingState.FORWARD


def is_pass_unfinished(state: FSDPState) -> bool:
    """Return whether FSDP2 has begun a forward or backward pass of a unit's root, and has not ended it."""
    return state._state_ctx.iter_forward_root is not None or is_backward_unfinished(state)


def is_backward_unfinished(state: FSDPState) -> bool:
    """Return whether FSDP2 has begun a backward pass of a unit's root, and has not ended it."""
    return state._state_ctx.post_backward_final_callback_queued


def forget_pass(state: FSDPState) -> None:
    """Clear what FSDP2 records of a pass: its root, the order of units, and buffers of collectives; keep gradients.

    Otherwise FSDP2 would not end the backward pass after one that raised, so its last gradients would be lost.
    `FSDPModule.reset_iter_state` of torch 2.13 and later also drops gradients that the caller may have accumulated.
    """
    if state._is_root is None:  # no pass has begun
        return
    context, messages, stream = state._state_ctx, state._comm_ctx, state._device_handle.current_stream()
    context.iter_forward_root, context.post_backward_final_callback_queued = None, False
    messages.post_forward_order.clear()
    # torch 2.13 keeps a list of reduce-scatter buffers; earlier versions have one buffer, and fewer events.
    held = [*getattr(messages, "reduce_scatter_states", ()), getattr(messages, "reduce_scatter_state", None)]
    held += [messages.all_gather_state, *(group._all_reduce_state for group in param_groups_of(state))]
    events = [getattr(each, "event", None) for each in held]
    events += [*getattr(messages, "_last_post_reduce_events", {}).values()]
    events += [group._post_reduce_event for group in param_groups_of(state)]
    for event in events:
        if event is not None:
            stream.wait_event(event)
    _set_where_present(messages, reduce_scatter_states=[], reduce_scatter_state=None, _last_post_reduce_events={})
    messages.all_gather_state = None
    # torch 2.15 can leave the end of a backward pass to the caller.
    _set_where_present(context, manual_backward_finalization_active=None, gradient_reduction_pending=False)
    _set_where_present(messages, active_gradient_reduction=None)
    for param_group in param_groups_of(state):
        param_group._post_reduce_event = param_group._all_reduce_state = None
        param_group._post_forward_indices.clear()
        if hasattr(param_group, "_set_unsharded_grad_dtypes"):  # torch 2.15 defers casts while a pass runs
            param_group._set_unsharded_grad_dtypes(defer_upcast=False)


def _set_where_present(owner: object, **values: object) -> None:
    """Set those attributes that an object has in this version of torch."""
    for name, value in values.items():
        if hasattr(owner, name):
            setattr(owner, name, value)
