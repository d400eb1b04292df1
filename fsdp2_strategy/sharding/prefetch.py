"""Prefetch units in the order in which the model runs them.

Input: the units of a sharded model, and how many to gather ahead. Output: FSDP2's prefetch lists of these units, which
are set when a pass starts or ends.

[Note: prefetch order] The order of the modules in a model is not always the order in which they run: pi0 runs layer 0
of two decoders, then layer 1 of both. A unit that is gathered ahead but does not run next costs an extra all-gather. So
the first pass of each kind (see [Note: observed pass] in `bypassed_units`) prefetches nothing, and records in which
order the units run. Later passes of this kind prefetch in this order. If a unit runs several times in a pass, only the
units that follow each time are prefetched. The backward pass prefetches in the reverse order of the last forward pass
with gradients. All ranks record the same order, because they must run the same units anyway; units that some ranks do
not run are not prefetched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp2_strategy.distributed.torch_internals import fsdp_state_of, module_of, param_groups_of
from fsdp2_strategy.model.unit_hooks import register_hook

_Order = tuple[FSDPModule, ...]
"""The units that a pass runs; a unit that runs several times is in it several times."""


class PrefetchOrder:
    """Record the order in which units run, and prefetch ``depth`` units ahead of the running one accordingly."""

    def __init__(self, units: Sequence[nn.Module], depth: int) -> None:
        self._depth = depth
        self._orders: dict[Hashable, _Order] = {}
        """The order of each kind of pass."""
        self._forward: _Order = ()
        self._backward: _Order = ()
        """The orders that FSDP2's lists are set to at present."""
        self._running = _RunningPass()
        record = functools.partial(_record, self._running)
        for unit in units:
            for param_group in param_groups_of(fsdp_state_of(unit)):
                register_hook(param_group, "gather for forward", "prefetch order", record)

    def start_pass(self, kind: Hashable) -> None:
        """Prefetch in the order of this kind of pass; record the order if this is the first pass of its kind."""
        order = self._orders.get(kind)
        self._running.units = [] if order is None else None
        if self._forward != (order := order or ()):
            for unit, ahead in _lists(self._forward, order, self._depth):
                unit.set_modules_to_forward_prefetch(ahead)
            self._forward = order

    def end_pass(self, kind: Hashable, *, completed: bool, has_gradients: bool) -> None:
        """Store the recorded order of a completed pass, and prefetch in reverse order in its backward."""
        units, self._running.units = self._running.units, None
        if not completed:
            return
        if units is not None:
            self._orders[kind] = tuple(units)
        if has_gradients and self._backward != (order := self._orders[kind][::-1]):
            for unit, ahead in _lists(self._backward, order, self._depth):
                unit.set_modules_to_backward_prefetch(ahead)
            self._backward = order


def _lists(old: _Order, new: _Order, depth: int) -> Iterable[tuple[FSDPModule, list[FSDPModule]]]:
    """Return each unit of two orders with those to gather ahead of it in the new one; none if it is only in the old."""
    following: dict[FSDPModule, list[FSDPModule]] = {}
    for i, unit in enumerate(new):
        ahead = [other for other in new[i + 1 : i + 1 + depth] if other is not unit]
        following[unit] = [other for other in following.get(unit, ahead) if other in ahead]
    return {**{unit: [] for unit in old}, **following}.items()


class _RunningPass:
    """The units that have run in the running pass, in order; None if they are not recorded.

    Hooks of the units hold it, so it references no units after the pass: [Note: per-model state] in `model.state`.
    """

    units: list[FSDPModule] | None = None


def _record(running: _RunningPass, param_group: Any, proceed: Callable[..., Any], *inputs: Any) -> Any:
    unit = cast(FSDPModule, module_of(param_group))
    if running.units is not None and running.units[-1:] != [unit]:
        running.units.append(unit)
    return proceed(*inputs)
