"""Decide what ``zero_grad`` does to gradients that no optimizer step has used yet.

Input: calls of ``zero_grad`` of an optimizer or a model, and passes that raised. Output: gradients that are kept or
dropped, and the accumulation state that goes with them.

[Note: zero_grad] Loops call ``optimizer.zero_grad()`` after each step, or at their top. Under accumulation, a call at
the top comes between the micro-batches of a step, and would drop the gradients of all but the last one. It would not
even do that reliably: FSDP2 keeps unreduced gradients that ``zero_grad`` does not see. So:

1. Between the micro-batches of a step, ``zero_grad`` of the optimizer or the model keeps the gradients, and says so
   once. `discard_gradients` drops them on purpose.
2. If a step has one micro-batch, the call drops the gradients, as in plain torch, and the step begins again.
3. After a pass that raised, the call resets the units, and drops the gradients and the micro-batches of the step. So
   does the next call of ``backward`` after a backward pass that raised within the model, because its gradients are
   incomplete. After another pass that raised, ``backward`` keeps the earlier micro-batches.
4. After a step, also after a direct ``optimizer.step()``, and without `optim.step.backward`, the call is torch's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import MethodType
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.torch_internals import is_in_backward
from fsdp2_strategy.errors import counted
from fsdp2_strategy.model.failed_passes import failed_pass, reset_after_failed_pass
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.gradients import clear_gradients
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.optim.accumulation import accumulation_of

_MODEL = Slot[ref[nn.Module]]("the model that an optimizer steps")
_IS_WATCHED = Slot[bool]("zero_grad of the model is watched")
_HAS_SAID = Slot[set[str]]("what was said about zero_grad")


def discard_gradients(model: nn.Module) -> None:
    """Drop the gradients of the micro-batches since the last optimizer step; not collective, but call it on all ranks.

    The next backward pass begins a new step. If a pass has raised, the units are reset, too.

    Args:
        model: the model, or its wrapper.
    """
    root = unwrap_model(model)
    reset_after_failed_pass(root)
    clear_gradients(root)
    accumulation_of(root).reset()


def discard_after_failed_pass(model: nn.Module, *, in_forward: bool) -> bool:
    """Discard the gradients of a step if one of its passes has raised; return whether one has; not collective.

    A failed forward pass counts only ``in_forward``: it leaves the gradients of earlier passes intact.
    """
    root = unwrap_model(model)
    failed = failed_pass(root)
    if failed is None or (failed == "forward" and not in_forward):
        return False
    own = accumulation_of(root)
    lost = own.micro_batches + bool(own.backward_passes)
    discard_gradients(root)
    message = "%s: a pass has raised; its units are reset, and the gradients of this step are discarded (%s)"
    log(message, class_name(root), counted(lost, "earlier micro-batch", "es"), level=logging.WARNING)
    return True


def watch_model(model: nn.Module) -> None:
    """Make ``zero_grad`` of a model, of its wrapper and of a wrapped model follow [Note: zero_grad]; not collective."""
    root = unwrap_model(model)
    for each in (root, model, getattr(root, "model", None)):
        if isinstance(each, nn.Module) and not model_state(each).get(_IS_WATCHED) and unwrap_model(each) is root:
            model_state(each).set(_IS_WATCHED, True)
            # A bound method, not a closure: a deep copy of the module must not clear the gradients of the original.
            each.zero_grad = MethodType(_zero_grad_of_model, each)  # type: ignore[method-assign]


def watch_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Make ``zero_grad`` of an optimizer follow [Note: zero_grad], unless it is not torch's; not collective."""
    if not isinstance(optimizer, Optimizer):
        return
    state = model_state(optimizer)
    is_watched = state.get(_MODEL) is not None
    state.set(_MODEL, ref(unwrap_model(model)))
    if is_watched:
        return
    weakly = ref(optimizer)  # a bound method would keep the optimizer alive until a garbage collection

    def zero_grad(set_to_none: bool = True) -> None:
        if (own := weakly()) is not None:
            parameters = (parameter for group in own.param_groups for parameter in group["params"])
            _zero_grad(_model_of(own), parameters, lambda: type(own).zero_grad(own, set_to_none))

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    optimizer.register_step_post_hook(_after_step)


def _zero_grad_of_model(model: nn.Module, set_to_none: bool = True) -> None:
    """Reset the gradients of the model's parameters; see [Note: zero_grad]."""
    root = unwrap_model(model)
    _zero_grad(root, model.parameters(), lambda: type(model).zero_grad(model, set_to_none))


def _zero_grad(root: nn.Module | None, parameters: Iterable[torch.Tensor], clear: Callable[[], None]) -> None:
    if root is None or is_in_backward():
        clear()
        return
    own = accumulation_of(root)
    if discard_after_failed_pass(root, in_forward=True) or not own.is_pending:
        clear()
    elif own.size_of_step == 1:
        clear()
        cleared = {id(parameter) for parameter in parameters}
        if all(parameter.grad is None or id(parameter) in cleared for parameter in root.parameters()):
            discard_gradients(root)
            _say_once(root, "%s: zero_grad has discarded the gradients of a backward pass that no step has used")
    else:
        _say_once(
            root,
            "%s: zero_grad is ignored between the micro-batches of a step, and their gradients are kept. To drop them, "
            "call strategy.discard_gradients(model)",
        )


def _say_once(root: nn.Module, message: str) -> None:
    said = model_state(root).setdefault(_HAS_SAID, set())
    if message not in said:
        said.add(message)
        log(message, class_name(root), level=logging.WARNING)


def _model_of(optimizer: Optimizer) -> nn.Module | None:
    reference = model_state(optimizer).get(_MODEL)
    return None if reference is None else reference()


def _after_step(optimizer: Optimizer, *_: object) -> None:
    """Forget the micro-batches of a step that was taken, also if the program took it with ``optimizer.step()``."""
    if (root := _model_of(optimizer)) is not None:
        accumulation_of(root).reset()
