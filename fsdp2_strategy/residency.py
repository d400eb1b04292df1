"""Where parameters are: gathered or sharded, and which module of a wrapper holds them.

Input: a model, wrapped or not. Output: the module that is sharded, and its parameters in sharded form.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.distributed.fsdp import FSDPModule

# Inner models of wrappers that are sharded as a whole.
_wrapper_of: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module that is sharded as a whole: the inner model of an actor wrapper, else the model itself.

    A wrapper that says ``is_actor`` holds the model as ``.model``. It is peeled off where it owns no parameter of its
    own; one that does (a fresh value head) is sharded as a whole, and its inner model then stands for it.
    """
    wrapper = _wrapper_of[model]() if model in _wrapper_of else None
    if wrapper is not None:
        return wrapper
    inner = getattr(model, "model", None)
    if not getattr(model, "is_actor", False) or not isinstance(inner, nn.Module):
        return model
    inside = {id(p) for p in inner.parameters()}
    if any(id(p) not in inside for p in model.parameters()):
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


def clear_gradients(model: nn.Module) -> None:
    """Drop all gradients, also those that FSDP2 holds back between micro-batches; not collective.

    Accumulation without communication keeps unsharded sums on FSDP2's parameters, and a deferred all-reduce keeps
    reduced ones on its groups: `zero_grad` sees neither.
    """
    for parameter in model.parameters():
        parameter.grad = None
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in filter(None, groups):
                group._partial_reduce_output = None
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None


def reshard(model: nn.Module) -> None:
    """Register the sharded parameters wherever a forward pass left gathered ones; not collective.

    FSDP2 keeps the root gathered after a forward pass, because a backward pass usually follows. After one that none
    follows (evaluation, generation) the modules would show full parameters to an optimizer or a checkpoint, and the
    next forward pass would compute with values from before the step.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
