"""Notice forward and backward passes that raised, and reset the units before the next pass.

Input: a sharded model. Output: hooks on its forward, and whether a pass has failed since the last reset.

If a program catches the error of a pass and goes on, FSDP2 still holds the state of that pass: see `reset_units`. A
pass that a program has not caught needs no reset, so the reset waits for the next forward pass, or for the next call of
``zero_grad`` or ``backward``; see [Note: zero_grad] in `optim.zero_grad`.
"""

from __future__ import annotations

import logging
from typing import Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.torch_internals import (
    fsdp_state_of,
    is_backward_unfinished,
    is_in_backward,
    is_in_forward,
    is_pass_unfinished,
)
from fsdp2_strategy.model.fsdp_state import class_name, reset_units
from fsdp2_strategy.model.state import Slot, model_state

Pass = Literal["forward", "backward"]

_FAILED = Slot[Pass]("the kind of a pass that raised")
_IS_RESET = Slot[bool]("units were reset after the pass that raised")


def watch_passes(root: nn.Module) -> None:
    """Register hooks that notice a failed forward pass, and reset the units before the next one; not collective."""
    root.register_forward_pre_hook(_before_forward, prepend=True)
    root.register_forward_hook(_after_forward, always_call=True)


def record_failed_backward(root: nn.Module) -> None:
    """Record that a backward pass of a model's loss has raised; not collective.

    If it raised before it reached the model, it counts as a failed forward pass: the gradients are intact.
    """
    is_in_model = not isinstance(root, FSDPModule) or is_backward_unfinished(fsdp_state_of(root))
    record_failed_pass(root, "backward" if is_in_model else "forward")


def record_failed_pass(root: nn.Module, kind: Pass) -> None:
    """Record that a pass of a model has raised; not collective."""
    state = model_state(root)
    # Of two failed passes, the backward pass counts: it leaves incomplete gradients.
    state.set(_FAILED, "backward" if "backward" in {kind, state.get(_FAILED)} else "forward")
    state.set(_IS_RESET, False)


def failed_pass(root: nn.Module) -> Pass | None:
    """Return the kind of the pass that raised since the last reset, None if none did; call it outside of passes."""
    if (known := model_state(root).get(_FAILED)) is not None:
        return known
    if not isinstance(root, FSDPModule) or is_in_backward():
        return None
    root_state = fsdp_state_of(root)
    if is_backward_unfinished(root_state):
        return "backward"
    return "forward" if is_pass_unfinished(root_state) else None


def reset_after_failed_pass(root: nn.Module) -> Pass | None:
    """Reset the units after a failed pass; return its kind. The caller drops the gradients of a backward pass."""
    failed, state = failed_pass(root), model_state(root)
    if failed is not None and not state.get(_IS_RESET):
        reset_units(root)
    state.pop(_FAILED)
    state.pop(_IS_RESET)
    return failed


def reset_after_failed_forward(root: nn.Module) -> None:
    """Reset the units if a pass has failed, before another forward pass begins; not collective.

    A failed backward pass is remembered until `reset_after_failed_pass`, because its gradients must be dropped.
    """
    state = model_state(root)
    if (failed := state.get(_FAILED)) is None or state.get(_IS_RESET):
        return
    reset_units(root)
    if failed == "forward":
        state.pop(_FAILED)
        log("%s: a pass has raised; its units are reset", class_name(root), level=logging.WARNING)
    else:
        state.set(_IS_RESET, True)


def _before_forward(root: nn.Module, *_: object) -> None:
    if not isinstance(root, FSDPModule):  # a copy that is not sharded
        return
    if is_backward_unfinished(fsdp_state_of(root)) and not is_in_backward():  # of a backward pass of the caller
        record_failed_pass(root, "backward")
    reset_after_failed_forward(root)


def _after_forward(root: nn.Module, *_: object) -> None:
    """Record a failed pass: FSDP2's own hook, which ends the pass, has not run before this hook, which always runs."""
    if isinstance(root, FSDPModule) and is_in_forward(fsdp_state_of(root)):
        record_failed_pass(root, "forward")
