"""Where parameters are: on meta, in memory or away, gathered or sharded, and which module of a wrapper holds them.

Input: a model, wrapped or not. Output: the module that is sharded, and its parameters in sharded form.

[Note: away] While values are away in host memory (`offload`), their tensors stand on the meta device: nothing computes
with them, and nothing reads garbage. `values_of` finds the values, so that files are written from there and read to
there without a byte on the accelerator.

Values may also be nowhere until somebody asks for them (weights with adapters merged into them): `computed` makes the
tensor that stands for these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp2_strategy.distributed.process_group import group_in_use
from fsdp2_strategy.errors import ShardError

# Inner models of wrappers that are sharded as a whole.
_wrapper_of: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module that is sharded as a whole: the inner model of an actor wrapper, else the model itself.

    A wrapper that says ``is_actor`` holds the model as ``.model``. It is peeled off where it owns no parameter or
    buffer of its own; one that does (a fresh value head) is sharded as a whole, and its inner model then stands for it.
    """
    wrapper = _wrapper_of[model]() if model in _wrapper_of else None
    if wrapper is not None:
        return wrapper
    inner = getattr(model, "model", None)
    if not getattr(model, "is_actor", False) or not isinstance(inner, nn.Module):
        return model
    inside = {id(t) for t in (*inner.parameters(), *inner.buffers())}
    if any(id(t) not in inside for t in (*model.parameters(), *model.buffers())):
        return model
    return unwrap_model(inner)


def remember_wrapper(root: nn.Module) -> None:
    """Let the inner model of a wrapper that was sharded as a whole mean the wrapper."""
    inner = getattr(root, "model", None)
    if getattr(root, "is_actor", False) and isinstance(inner, nn.Module):
        _wrapper_of[inner] = ref(root)


def is_sharded(model: nn.Module) -> bool:
    """Say whether the model went through ``shard_model``."""
    return isinstance(unwrap_model(model), FSDPModule)


def has_unsharded_parameters(model: nn.Module) -> bool:
    """Say whether any parameter lies outside the sharded modules within ``model``."""
    if isinstance(model, FSDPModule):
        return False
    own = any(True for _ in model.parameters(recurse=False))
    return own or any(has_unsharded_parameters(child) for child in model.children())


# Host memory that stands behind a meta tensor: by the address of the tensor's storage.
_away: dict[int, torch.Tensor] = {}


def stand_in(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the form of ``like`` that stands for values in host memory; see [Note: away].

    Args:
        values: all elements of the storage, in one dimension.
        like: what it stands for.
    """
    meta = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
    key = meta.untyped_storage()._cdata
    _away[key] = values
    finalize(meta, _away.pop, key, None)
    return meta


# What computes the values behind a meta tensor: by the address of the tensor's storage.
_computed: dict[int, Callable[[], torch.Tensor]] = {}


def computed(compute: Callable[[], torch.Tensor], like: torch.Tensor) -> nn.Parameter:
    """Return a parameter in the form of ``like`` whose values are computed each time that `values_of` asks for them.

    Args:
        compute: gives this rank's part; not collective.
        like: the form; sharded or not.
    """
    local = like._local_tensor if isinstance(like, DTensor) else like
    meta = torch.empty(local.size(), dtype=local.dtype, device="meta")
    parameter = nn.Parameter(sharded_like(like, meta), requires_grad=False)
    key = _storage_behind(parameter)
    _computed[key] = compute
    finalize(parameter, _computed.pop, key, None)
    return parameter


def is_computed(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's values are computed when somebody asks for them."""
    return bool(_computed) and _storage_behind(tensor) in _computed


def _storage_behind(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    address: int = local.untyped_storage()._cdata
    return address


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor where its values are: in host memory while they are away."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if local.is_meta and (values := _away.get(local.untyped_storage()._cdata)) is not None:
        offset = values.storage_offset() + local.storage_offset()
        return values.as_strided(local.size(), local.stride(), offset)
    if local.is_meta and (compute := _computed.get(local.untyped_storage()._cdata)) is not None:
        return compute()
    return local.detach()


def is_away(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's values are in host memory."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.is_meta and local.untyped_storage()._cdata in _away


def anything_is_away() -> bool:
    """Say whether any tensor's values are."""
    return bool(_away)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor, wherever its values are; collective where it is sharded."""
    if not isinstance(tensor, DTensor):
        return values_of(tensor)
    local = tensor._local_tensor
    if not local.is_meta:
        return tensor.full_tensor().detach()
    there = values_of(tensor).to(tensor.device_mesh.device_type)
    back = DTensor(there, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return back.full_tensor()


def clear_gradients(model: nn.Module) -> None:
    """Drop all gradients, also those that FSDP2 holds back between micro-batches; not collective.

    Accumulation without communication keeps unsharded sums on FSDP2's parameters, and a deferred all-reduce keeps
    reduced ones on its groups: `zero_grad` sees neither.
    """
    for parameter in model.parameters():
        parameter.grad = None
    for group in parameter_groups(model):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def parameter_groups(model: nn.Module) -> Iterator[Any]:
    """Return FSDP2's own record of each unit's parameters; not collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from groups_of(module._get_fsdp_state())


def groups_of(state: Any) -> list[Any]:
    """Return FSDP2's records of parameters behind its state of one module, whichever version of torch it is."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def reshard(model: nn.Module) -> None:
    """Register the sharded parameters wherever a forward pass left gathered ones; not collective.

    FSDP2 keeps the root gathered after a forward pass, because a backward pass usually follows. After one that none
    follows (evaluation, generation) the modules would show full parameters to an optimizer or a checkpoint, and the
    next forward pass would compute with values from before the step. So it would
    with what was gathered ahead for a unit that did not run any more.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            for group in groups_of(module._get_fsdp_state()):
                if group._all_gather_result is not None:
                    group.wait_for_unshard()
                    group._to_sharded()


def settle(model: nn.Module) -> None:
    """Bring FSDP2's records to rest, all units sharded, also after a pass that raised midway; not collective.

    A pass that raises leaves units in the middle of a forward pass: they would stay gathered, and the next pass would
    not count as one that begins.
    """
    for group in parameter_groups(model):
        if group._all_gather_result is not None:
            group.wait_for_unshard()
        group._training_state = TrainingState.IDLE
        group._to_sharded()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._training_state = TrainingState.IDLE
            state._state_ctx.iter_forward_root = None


def sharded_like(source: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded as ``source`` is, from this rank's part of it, on whatever device that lies."""
    if not isinstance(source, DTensor):
        return local
    # Built by hand: `from_local` would move it to the device of the mesh.
    meta = TensorMeta(source.shape, source.stride(), local.dtype)
    spec = DTensorSpec(source.device_mesh, source.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_box(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Return which part of the whole tensor this rank holds: for each dimension where it begins, and its length."""
    box = [(0, length) for length in tensor.shape]
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                begin, length = box[placement.dim]
                size = tensor.device_mesh.size(axis)
                chunk = -(-length // size)
                offset = min(tensor.device_mesh.get_local_rank(axis) * chunk, length)
                box[placement.dim] = (begin + offset, min(chunk, length - offset))
            elif not placement.is_replicate():
                raise ShardError(
                    f"cannot say which part of a tensor this rank holds: its placements are {tensor.placements}, "
                    "expected shards and replicas. Use a mesh from build_mesh."
                )
    return tuple(box)


def shard_count(model: nn.Module) -> int:
    """Return how many parts a model's parameters are cut into; 1 where none is."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            return math.prod(size for size, placement in sizes if isinstance(placement, Shard))
    return 1


def cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Give a model's floating buffers a dtype; those that modules share they share still; not collective."""
    cast: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = cast.setdefault(id(buffer), buffer.to(dtype))


def average_gradient(parameter: nn.Parameter) -> None:
    """Let a parameter that every rank holds whole add the same averaged gradient everywhere.

    So accumulation over micro-batches needs no further care. Those ranks are the group in use now. One that can have no
    gradient is left alone.
    """
    if not parameter.is_floating_point():
        return
    group = group_in_use()  # a backward pass may run on threads that know none

    def average(grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total, group=group)
        return total / dist.get_world_size(group)

    trained = parameter.requires_grad
    parameter.requires_grad_(True).register_hook(average)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trained)  # one that is frozen now may be trained later


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give memory, but no values, to all parameters and buffers on the meta device; ties are kept; not collective.

    They count as empty until `has_values_now` says otherwise. A sharded model gets the memory of its shards alone, in
    host memory where they are offloaded; FSDP2 pads and pins them as it needs.
    """
    sharded = is_sharded(model)
    offloaded = {
        id(p.sharded_param) for group in parameter_groups(model) for p in group.fsdp_params if p.offload_to_cpu
    }
    new: dict[int, torch.Tensor] = {}

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in new:
            new[id(tensor)] = _with_memory(tensor, torch.device("cpu") if id(tensor) in offloaded else device)
            new[id(tensor)]._has_no_values = True  # type: ignore[attr-defined]
            if sharded and isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor):
                average_gradient(new[id(tensor)])  # type: ignore[arg-type]
        return new[id(tensor)]

    for module in model.modules():
        on_meta = {name: t for name, t in _own_tensors(module) if t.is_meta}
        for name, tensor in on_meta.items():
            (module._parameters if name in module._parameters else module._buffers)[name] = real(tensor)  # type: ignore[assignment]
    for group in parameter_groups(model):
        for parameter in group.fsdp_params:
            if parameter._sharded_param_data.is_meta:
                parameter.reset_sharded_param()


def lacks_values(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is on meta, or got memory from `materialize` and nothing else yet."""
    stands_for_none = tensor.is_meta and not is_away(tensor) and not is_computed(tensor)
    return stands_for_none or getattr(tensor, "_has_no_values", False)


def is_unreal(model: nn.Module) -> bool:
    """Say whether any parameter or buffer of the model has no values yet."""
    return any(lacks_values(tensor) for module in model.modules() for _, tensor in _own_tensors(module))


def has_values_now(model: nn.Module) -> None:
    """Note that all parameters and buffers got their values."""
    for module in model.modules():
        for _, tensor in _own_tensors(module):
            tensor.__dict__.pop("_has_no_values", None)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def _with_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if local.is_contiguous():
        new = torch.empty(local.shape, dtype=local.dtype, device=device)
    else:
        new = torch.empty_like(local, device=device)
    if isinstance(tensor, DTensor):
        new = DTensor(new, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
