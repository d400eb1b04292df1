"""What this package runs around FSDP2's own calls for a unit: every feature in one declared order.

Input: FSDP2's record of a unit ([Note: FSDP2's objects] in `torch_internals`), one of its calls, a feature, and what it
does around the call. Output: the record, whose call runs all features in `ORDER`, and then FSDP2's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fsdp2_strategy.distributed.torch_internals import UNIT_CALLS, original_call, replace_call
from fsdp2_strategy.model.state import Slot, model_state

Around = Callable[..., Any]
"""Called with the record, the rest of the chain, and the call's own arguments."""

ORDER: dict[str, tuple[str, ...]] = {
    # What is offloaded refuses before ranks tell each other of it.
    "gather": ("offload", "divergence"),
    # Zeros for parameters that only others used come first: then there is something to reduce, and to compare.
    "reduce": ("unequal use", "units that never ran", "divergence"),
    # Masters in the optimizer want fp32 gradients of whatever dtype was chosen.
    "choose gradient dtypes": ("masters in the optimizer", "units that are frozen at first"),
    "note the order of forward": ("replicated encoder",),
}
"""For each call of a unit the features that may hang on it, the outermost first."""

_AROUND = Slot[dict[str, dict[str, Around]]]("what hangs on the calls of a unit")
"""By call and feature; a function gets the record, and holds none."""


def hang(record: Any, call: str, feature: str, around: Around) -> None:
    """Run ``around(record, proceed, *arguments)`` in place of a call of a unit; not collective.

    Args:
        record: of the unit.
        call: a key of `ORDER`.
        feature: one that `ORDER` lists for the call; it takes the place of what it hung there before.
        around: runs ``proceed(*arguments)`` for the rest, or does not.

    Raises:
        KeyError: the order of the feature is not declared.
    """
    if feature not in ORDER[call]:
        raise KeyError(f"{feature} is not declared in the order of {call}")
    _hung_on(record, call)[feature] = around
    _install(record, call)


def take_off(record: Any, call: str, feature: str) -> None:
    """Take away what a feature hung on a call; the others stay."""
    if _hung_on(record, call).pop(feature, None) is not None:
        _install(record, call)


def _hung_on(record: Any, call: str) -> dict[str, Around]:
    state = model_state(record)
    around = state.get(_AROUND)
    return (state.set(_AROUND, {}) if around is None else around).setdefault(call, {})


def _install(record: Any, call: str) -> None:
    hung = _hung_on(record, call)
    chain = None
    for feature in reversed(ORDER[call]):
        if feature in hung:
            chain = functools.partial(hung[feature], record, chain or original_call(record, call))
    replace_call(record, call, chain)


assert ORDER.keys() == UNIT_CALLS.keys()
