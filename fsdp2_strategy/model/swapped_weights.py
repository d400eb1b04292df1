"""Mark models whose parameters are replaced by averages for a block, and refuse what needs their own weights.

Input: a model within the block of `EMA.swapped_in`. Output: an error from each call that would take the averages for
the weights, or whose result the end of the block would undo.

[Note: swapped weights] In the block, a model is evaluated, exported and streamed with the averages. A save would store
the averages as the weights, and an optimizer step or a load would be undone at the end of the block. These calls, and
those that compute gradients, averages or master weights from the weights, raise an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp2_strategy.distributed.torch_internals import tree_leaves
from fsdp2_strategy.errors import FSDP2StrategyError, StepError
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.model.wrappers import unwrap_model

_IS_SWAPPED = Slot[bool]("averages replace the parameters")


@contextmanager
def marked_as_swapped(model: nn.Module) -> Iterator[None]:
    """Mark a model for a block in which averages replace its parameters; blocks may be nested; not collective."""
    root = unwrap_model(model)
    state = model_state(root)
    is_over = False

    def refuse_step(optimizer: Optimizer, *_: Any) -> None:
        own = {id(parameter) for parameter in root.parameters()}
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise swapped_error(root, "step", StepError)

    def refuse_gradients(_gradient: torch.Tensor) -> None:
        if is_over:
            raise StepError(
                f"cannot run backward: the forward pass of {class_name(root)} had the averages of a block of "
                "ema.swapped_in that has ended, expected its own weights. Compute the loss again."
            )

    def watch_outputs(_module: nn.Module, _inputs: object, outputs: object) -> None:
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(refuse_gradients)  # type: ignore[no-untyped-call]

    handles: list[Any] = [register_optimizer_step_pre_hook(refuse_step), root.register_forward_hook(watch_outputs)]
    was_swapped = is_swapped(root)
    state.set(_IS_SWAPPED, True)
    try:
        yield
    finally:
        is_over = True
        state.set(_IS_SWAPPED, was_swapped)
        for handle in handles:
            handle.remove()


def is_swapped(model: nn.Module) -> bool:
    """Return whether averages replace a model's parameters; not collective."""
    return model_state(unwrap_model(model)).get(_IS_SWAPPED) or False


def check_own_weights(model: nn.Module, action: str, error: type[FSDP2StrategyError]) -> None:
    """Raise ``error`` "cannot ``action``" if averages replace a model's parameters; see [Note: swapped weights]."""
    if is_swapped(model):
        raise swapped_error(unwrap_model(model), action, error)


def swapped_error(root: nn.Module, action: str, error: type[FSDP2StrategyError]) -> FSDP2StrategyError:
    """Return the error of `check_own_weights`."""
    return error(
        f"cannot {action}: the parameters of {class_name(root)} are the averages of ema.swapped_in, expected its own "
        "weights. Leave the block first; within it, you can evaluate, export and stream the averages."
    )
