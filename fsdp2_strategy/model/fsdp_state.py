"""FSDP2's own records of a model: its units' parameter groups, resharded or reset.

Input: a model that went through `shard_model`, or not. Output: its parameters registered in sharded form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp2_strategy.distributed.torch_internals import (
    drop_gather_in_flight,
    forget_forward_root,
    mark_idle,
    records_of,
    reset_record,
    state_of,
)
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
            yield from records_of(state_of(module))


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
            for record in records_of(state_of(module)):
                drop_gather_in_flight(record)


def settle(model: nn.Module) -> None:
    """Bring FSDP2's records to rest, all units sharded, also after a pass that raised midway; not collective.

    A pass that raises leaves units in the middle of a forward pass: they would stay gathered, and the next pass would
    not count as one that begins.
    """
    for record in parameter_groups(model):
        reset_record(record)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            mark_idle(state_of(module))
            forget_forward_root(state_of(module))
