"""FSDP2's own records of a model: its units' parameter groups, resharded or reset.

Input: a model that went through `shard_model`, or not. Output: its parameters registered in sharded form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from fsdp2_strategy.model.wrappers import unwrap_model


def is_sharded(model: nn.Module) -> bool:
    """Say whether the model went through ``shard_model``."""
    return isinstance(unwrap_model(model), FSDPModule)


def has_unsharded_parameters(model: nn.Module) -> bool:
    """Say whether any parameter lies outside the sharded modules within ``model``."""
    if isinstance(model, FSDPModule):
        return False
    own = any(True for _ in model.parameters(recurse=False))
    return own or any(has_unsharded_parameters(child) for child in model.children())


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
