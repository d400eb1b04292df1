"""Gather a unit when the model reads one of its parameters directly, outside of the unit's forward.

Input: a sharded model and its units. Output: modules whose attributes ``weight``, ``bias``, ... gather the unit that
holds them while a pass of the model is running.

[Note: direct use] ``F.linear(hidden, self.lm_head.weight)`` uses a weight without a call of its module: chunked losses
and models whose head is the embedding do so. FSDP2 gathers a unit only when its forward is called, so the weight would
be a DTensor. Here, reading a parameter of a unit that is not gathered gathers the unit, if a pass of the model is
running, or a backward that computes activations again. Outside of passes, an attribute is the sharded parameter, as
ever. All ranks must read the same weights in the same order, as they must call the same modules.

After a pass with gradients, the unit stays gathered until its backward, as the head and the root unit do: the graph
refers to its full weight. Then its gradients are reduced at the end of backward, since autograd reports only the
gradients of a forward's inputs, and the direct use may come after these in backward. So if the weight is used before
the unit's forward in a pass, the unit is not reduced by the hook on its inputs, and not resharded after its forward.
To read a dtype or a device is no use. So the node that accumulates the weight's gradient is marked when the weight is
read, and kept until the unit's forward: then the mark is left only if a graph refers to the node.

Parameters of blocks are not watched: a block's weights are used in its forward, and to keep a block gathered would cost
what sharding saves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.torch_internals import (
    fsdp_state_of,
    gather,
    has_full_parameters,
    is_in_backward,
    module_of,
    param_groups_of,
    parameters_of,
    unsharded_of,
)
from fsdp2_strategy.model.unit_hooks import register_hook

_MARK = "fsdp2_strategy: used directly"


class DirectUses:
    """Watch the parameters of units, and gather the unit of one that is read while a pass is running.

    ``begin_pass`` returns whether a pass is running, and may begin one. ``skipped`` has the units that are gathered in
    the running pass, although they have not run; [Note: skipped units].
    """

    def __init__(
        self,
        units: Mapping[nn.Module, list[nn.Module]],
        begin_pass: Callable[[], bool],
        on_use: Callable[[nn.Module], None] | None,
        skipped: set[nn.Module],
    ) -> None:
        self.skipped = skipped
        self._begin_pass = begin_pass
        self._on_use = on_use
        self._read: dict[nn.Module, None] = {}
        """Units that were gathered because a parameter was read, in the running pass."""
        self._read_before: WeakSet[nn.Module] = WeakSet()
        """Units that were gathered for this reason in any pass."""
        self._nodes: dict[nn.Module, list[Any]] = {}
        """The marked nodes of the parameters of units that were read, until their forward or the end of the pass."""
        self._units = list(units)
        self._may_be_gathered = False
        """Whether a pass without gradients may have left units gathered (with ``reshard_after_forward=False``)."""
        for unit, modules in units.items():
            for module in modules:
                if type(module).__setattr__ is nn.Module.__setattr__:  # others (nn.LSTM) read what FSDP2 sets
                    module._parameters = _Watched(module._parameters, self, unit)

    def gather(self, unit: nn.Module) -> None:
        """Gather a unit whose parameter is read, if a pass is running; collective then."""
        groups = param_groups_of(fsdp_state_of(unit))
        if unit not in self.skipped and all(map(has_full_parameters, groups)):
            return
        # A backward that computes activations again reads what the forward has read; others may report gradients.
        if not ((is_in_backward() and unit in self._read_before) or self._begin_pass()):
            return
        self.skipped.discard(unit)
        self._read[unit] = None
        if self._on_use is not None and unit not in self._read_before:
            self._on_use(unit)
        self._read_before.add(unit)
        for group in groups:
            if not has_full_parameters(group):
                gather(group)
            # Hooks of a unit must not refer to its modules.
            register_hook(group, "gather for forward", "direct use", functools.partial(_begin_forward, self._nodes))
        if torch.is_grad_enabled() and not is_in_backward():
            self._nodes[unit] = list(map(_node_of, _trained(unit)))
            for node in self._nodes[unit]:
                node.metadata[_MARK] = True

    def start_pass(self) -> None:
        """Free the units that passes without gradients left gathered: in these, direct uses are not noticed."""
        if self._may_be_gathered and torch.is_grad_enabled():
            self._may_be_gathered = False
            for unit in self._units:
                unit.reshard()  # type: ignore[operator]

    def end_pass(self) -> None:
        """Free the units that were gathered in a pass without gradients; those with gradients wait for backward."""
        if not torch.is_grad_enabled():
            self._may_be_gathered = True
            for unit in self._read:
                unit.reshard()  # type: ignore[operator]
        self._read.clear()
        self._nodes.clear()
        self.skipped.clear()


class _Watched(dict[str, Any]):
    """A module's parameters, which are gathered when one is read by its name, as an attribute of the module is."""

    def __init__(self, parameters: Mapping[str, Any], uses: DirectUses, unit: nn.Module) -> None:
        super().__init__(parameters)
        self._uses, self._unit = uses, unit

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        # Otherwise, it is gathered; a gathered part of a layer is a DTensor, too.
        if isinstance(value, DTensor) or self._unit in self._uses.skipped:
            self._uses.gather(self._unit)
            value = super().__getitem__(name)
        return value

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy of a module is not sharded by us


def _trained(unit: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the unsharded parameters of a gathered unit that require gradients."""
    for group in param_groups_of(fsdp_state_of(unit)):
        for parameter in parameters_of(group):
            unsharded = unsharded_of(parameter)
            if unsharded is not None and unsharded.requires_grad:
                yield unsharded


def _node_of(parameter: torch.Tensor) -> Any:
    """Return the node that accumulates a parameter's gradient; it lasts as long as something refers to it."""
    return torch.autograd.graph.get_gradient_edge(parameter).node


def _begin_forward(
    nodes: dict[nn.Module, list[Any]], param_group: Any, proceed: Callable[..., Any], *inputs: Any
) -> Any:
    """Begin the forward of a unit whose weights may have been used in the same graph; see [Note: direct use]."""
    unit = module_of(param_group)
    is_read = nodes.pop(unit, None) is not None  # and release the nodes that no graph refers to
    found = proceed(*inputs)
    if not torch.is_grad_enabled() or is_in_backward():
        return found
    trained = list(_trained(unit))
    is_used = any(_MARK in _node_of(parameter).metadata for parameter in trained)
    if not (is_used or (is_read and not trained)):  # the node of a frozen parameter cannot be marked
        return found
    unit.set_reshard_after_forward(False, recurse=False)  # type: ignore[operator]
    return inputs[1:]  # without the hook that reduces the unit's gradients when those of its inputs are computed
