"""Build the meta skeleton of a model: the same module tree with the original classes, unsharded, without values.

Input: a model, sharded or not. Output: a copy of its module tree on the meta device. Code of other libraries that
depends on classes, names or shapes (transformers' conversions, initialisation, saving) does not handle `fully_shard`,
which replaces classes and makes parameters DTensors. It may inspect and change the copy instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fsdp2_strategy.distributed.torch_internals import ATTRIBUTES_OF_FSDP, STATE_OF_FSDP, non_persistent_buffers
from fsdp2_strategy.hf.library_internals import ATTRIBUTES_OF_AN_INSTANCE
from fsdp2_strategy.model.fsdp_state import original_class
from fsdp2_strategy.model.state import ATTACHED

# These attributes are not copied: they change initialisation and generation, or may refer to the original model.
_LEFT_OUT = (ATTACHED, "__deepcopy__", *ATTRIBUTES_OF_FSDP, *ATTRIBUTES_OF_AN_INSTANCE)


def meta_skeleton(model: nn.Module, replacement_of: Callable[[torch.Tensor], torch.Tensor] | None = None) -> nn.Module:
    """Copy a module tree, and replace each tensor, by default by a meta tensor of its global shape; keep ties."""
    tensors: dict[int, torch.Tensor] = {}

    def tensor(original: torch.Tensor | None) -> torch.Tensor | None:
        if original is None:
            return None
        if id(original) not in tensors:
            new = (replacement_of or _on_meta)(original)
            if isinstance(original, nn.Parameter) and not isinstance(new, nn.Parameter):
                new = nn.Parameter(new, requires_grad=original.requires_grad)
            tensors[id(original)] = new
        return tensors[id(original)]

    return _copy_tree(model, tensor, {})


def copy_module_shell(module: nn.Module) -> nn.Module:
    """Copy one module without its parameters, buffers, children and hooks; share its other attributes."""
    cls = original_class(module)
    new = cls.__new__(cls)
    nn.Module.__init__(new)  # without the hooks, which may refer to the original
    for name, value in module.__dict__.items():
        if name not in new.__dict__ and _is_copied(name, value, cls):
            new.__dict__[name] = value
    return new


# Not nested in `meta_skeleton`: a recursive closure is a reference cycle, which keeps tensors until garbage collection.
def _copy_tree(
    module: nn.Module, tensor: Callable[[torch.Tensor | None], torch.Tensor | None], modules: dict[int, nn.Module]
) -> nn.Module:
    if id(module) not in modules:
        new = modules[id(module)] = copy_module_shell(module)
        # Not by `Module.__setattr__`: it inspects each value, which would take longer than the rest of the copy.
        new.__dict__ |= {
            "_parameters": {name: tensor(p) for name, p in module._parameters.items()},
            "_buffers": {name: tensor(b) for name, b in module._buffers.items()},
            "_modules": {
                name: None if child is None else _copy_tree(child, tensor, modules)
                for name, child in module._modules.items()
            },
            "_non_persistent_buffers_set": set(non_persistent_buffers(module)),
            "training": module.training,
        }
    return modules[id(module)]


def _is_copied(name: str, value: object, cls: type[nn.Module]) -> bool:
    """Return whether an attribute is copied; a callable that shadows a method may be bound to the original."""
    shadows = callable(value) and callable(getattr(cls, name, None))
    return not (name in _LEFT_OUT or name.startswith(STATE_OF_FSDP) or shadows)


def _on_meta(original: torch.Tensor) -> torch.Tensor:
    return torch.empty(original.shape, dtype=original.dtype, device="meta")
