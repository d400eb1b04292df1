"""Register hooks around FSDP2's methods of a unit, such as the all-gather; the hooks run in one declared order.

Input: the ``FSDPParamGroup`` of a unit ([Note: FSDP2's objects] in `torch_internals`), a call (a key of `UNIT_CALLS`,
such as "gather" for FSDP2's method ``unshard``), the name of a feature, and its hook. Output: the same
``FSDPParamGroup``, in which the method is replaced. The new method runs the hooks of all features around FSDP2's own
method, in the order of `ORDER`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fsdp2_strategy.distributed.torch_internals import UNIT_CALLS, original_call, replace_call
from fsdp2_strategy.model.state import Slot, model_state

Around = Callable[..., Any]
"""A hook. It receives the ``FSDPParamGroup``, the next function of the chain, and the arguments of the call."""

ORDER: dict[str, tuple[str, ...]] = {
    # Run the offload hook first: it must raise before the divergence check waits for other ranks.
    "gather": ("offload", "divergence"),
    # Measure innermost: other hooks do not wait for ranks.
    "finish gather": ("inference mode", "time"),
    # Run "direct use" last: it decides which inputs the forward gets.
    "gather for forward": ("direct use", "prefetch order"),
    "hook inputs for reduce": ("missing gradients",),
    # Run "unequal gradients" and "missing gradients" first: they add zero gradients for parameters that only other
    # ranks used, and the other hooks check the gradients to reduce.
    "reduce": ("unequal gradients", "missing gradients", "units that never ran", "divergence"),
    # Master weights in the optimizer need fp32 gradients, so their hook is outermost and overrides the other hook.
    "choose gradient dtypes": ("masters in the optimizer", "units that are frozen at first"),
    "record forward order": ("replicated encoder",),
}
"""Call -> the features that may register a hook on this call, outermost first."""

_HOOKS = Slot[dict[str, dict[str, Around]]]("hooks on the calls of a unit")
"""Hooks by call and feature. A hook must not store its ``FSDPParamGroup``, which it receives as an argument."""


def register_hook(param_group: Any, call: str, feature: str, around: Around) -> None:
    """Register ``around(param_group, proceed, *arguments)`` around a call of a unit; not collective.

    It replaces an earlier hook of the ``feature``, which `ORDER` must list. The hook may call ``proceed(*arguments)``,
    which runs the rest of the chain.
    """
    if feature not in ORDER[call]:
        raise KeyError(f"cannot register a hook: ORDER[{call!r}] does not contain {feature!r}. Add it there.")
    _hooks_of(param_group, call)[feature] = around
    _install(param_group, call)


def remove_hook(param_group: Any, call: str, feature: str) -> None:
    """Remove the hook of a feature from a call of a unit, if any; not collective."""
    _hooks_of(param_group, call).pop(feature, None)
    _install(param_group, call)


def _hooks_of(param_group: Any, call: str) -> dict[str, Around]:
    return model_state(param_group).setdefault(_HOOKS, {}).setdefault(call, {})


def _install(param_group: Any, call: str) -> None:
    hooks = _hooks_of(param_group, call)
    chain = None
    for feature in reversed(ORDER[call]):
        if feature in hooks:
            chain = functools.partial(hooks[feature], param_group, chain or original_call(param_group, call))
    replace_call(param_group, call, chain)


assert ORDER.keys() == UNIT_CALLS.keys()
