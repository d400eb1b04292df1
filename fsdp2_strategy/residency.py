"""Where parameters are: gathered or sharded, and which module of a wrapper holds them.

Input: a model, wrapped or not. Output: the module that is sharded, and its parameters in sharded form.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module that is sharded as a whole: the inner model of an actor wrapper, else the model itself.

    A wrapper that says ``is_actor`` holds the model as ``.model``. It is peeled off where it owns no parameter of its
    own; one that does (a fresh value head) is sharded as a whole.
    """
    inner = getattr(model, "model", None)
    if not getattr(model, "is_actor", False) or not isinstance(inner, nn.Module):
        return model
    inside = {id(p) for p in inner.parameters()}
    if any(id(p) not in inside for p in model.parameters()):
        return model
    return unwrap_model(inner)


def is_sharded(model: nn.Module) -> bool:
    """Say whether the model went through ``shard_model``."""
    return isinstance(unwrap_model(model), FSDPModule)


def reshard(model: nn.Module) -> None:
    """Register the sharded parameters wherever a forward pass left gathered ones; not collective.

    FSDP2 keeps the root gathered after a forward pass, because a backward pass usually follows. After one that none
    follows (evaluation, generation) the modules would show full parameters to an optimizer or a checkpoint, and the
    next forward pass would compute with values from before the step.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
