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
To read a dtype or a device is no use. So a parameter that was read is of the class `_Read` until the unit's forward or
the end of the pass, and notices the first operation that computes with it. A compiled kernel may get a weight without
an operation of torch. For it, the node that accumulates the weight's gradient is marked, and kept until the unit's
forward: if the mark is left then, a graph refers to the node. This alone does not tell, because a graph of an earlier
pass may still exist on one rank only, if another thread or a traceback keeps frames, and all ranks must do the same. So
nodes of earlier passes are marked, too, and no frame of Python refers to a node, nor does a mode see the view that
finds it. A frozen weight has no such node, so reading one counts as a use. A unit that was used directly once counts as
used in each pass.

Parameters of blocks are not watched: a block's weights are used in its forward, and to keep a block gathered would cost
what sharding saves.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.torch_internals import (
    DisableTorchDispatch,
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    fsdp_state_of,
    gather,
    gathers_in_backward,
    has_full_parameters,
    is_in_backward,
    module_of,
    param_groups_of,
    parameters_of,
    tree_leaves,
    unsharded_of,
)
from fsdp2_strategy.model.unit_hooks import register_hook

_MARK = "fsdp2_strategy: of a pass"
_METADATA, _EDGES = operator.attrgetter("metadata"), operator.attrgetter("grad_fn.next_functions")
_FIRST = operator.itemgetter(0)


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
        self._reads = _Reads()
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
        # A backward that computes activations again reads what the forward has read; others may report gradients, but
        # without enabling them. It also runs units whose weights backward itself does not need.
        recomputes = is_in_backward() and (
            unit in self._read_before or (torch.is_grad_enabled() and not all(map(gathers_in_backward, groups)))
        )
        if not (recomputes or self._begin_pass()):
            return
        if recomputes:  # from now on before the recomputation, as other units
            unit.set_unshard_in_backward(True)  # type: ignore[operator]
        self.skipped.discard(unit)
        self._read[unit] = None
        if self._on_use is not None and unit not in self._read_before:
            self._on_use(unit)
        self._read_before.add(unit)
        for group in groups:
            if not has_full_parameters(group):
                gather(group)
            # Hooks of a unit must not refer to its modules.
            register_hook(group, "gather for forward", "direct use", functools.partial(_begin_forward, self._reads))
        if torch.is_grad_enabled() and not is_in_backward():
            self._reads.begin(unit)

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
        self._reads.end_pass()
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


class _Reads:
    """The units whose parameters were read in this pass, and those that were used in any; see [Note: direct use]."""

    def __init__(self) -> None:
        self.used: WeakSet[nn.Module] = WeakSet()
        self._watched: dict[nn.Module, list[_Read]] = {}
        self._nodes: dict[nn.Module, list[Any]] = {}
        """The marked nodes of each watched unit's parameters, unless one is of an earlier pass."""
        self._of_forwards: dict[nn.Module, list[Any]] = {}
        """The marked nodes of units whose forward has begun in this pass, so that their graphs refer to these nodes."""

    def begin(self, unit: nn.Module) -> None:
        """Watch the parameters of a gathered unit, until `end`."""
        if unit in self.used or unit in self._watched:
            return
        parameters = _unsharded(unit)
        # A kernel may use a frozen weight, and nothing would show it. A layer that is split over ranks has own classes.
        if not any(p.requires_grad for p in parameters) or not all(type(p) is nn.Parameter for p in parameters):
            self.used.add(unit)
            return
        if not _is_marked(parameters):
            self._nodes[unit] = _nodes_of(parameters)
            _mark(self._nodes, unit)
        watched: list[Any] = list(parameters)
        for read in watched:
            read.__class__, read.is_used = _Read, False
        self._watched[unit] = watched

    def end(self, unit: nn.Module) -> None:
        """Stop watching the parameters of a unit, and note whether one was used."""
        watched = self._watched.pop(unit, [])
        is_first = self._nodes.pop(unit, None) is not None  # and release the nodes that no graph refers to
        for parameter in watched:
            read: Any = parameter
            read.__class__ = nn.Parameter  # before the next line, which would be a use
            if read.is_used or (is_first and _is_marked([parameter])):
                self.used.add(unit)

    def begin_forward(self, unit: nn.Module) -> None:
        """Mark the nodes that a gathered unit's forward is going to use."""
        self._of_forwards[unit] = _nodes_of(_unsharded(unit))
        _mark(self._of_forwards, unit)

    def end_pass(self) -> None:
        """Call `end` for all units."""
        for unit in list(self._watched):
            self.end(unit)
        self._of_forwards.clear()


def _unsharded(unit: nn.Module) -> list[torch.Tensor]:
    """Return the unsharded parameters of a gathered unit."""
    groups = param_groups_of(fsdp_state_of(unit))
    found = (unsharded_of(parameter) for group in groups for parameter in parameters_of(group))
    return [parameter for parameter in found if parameter is not None]


def _nodes_of(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Return the nodes that accumulate the gradients of plain parameters; a node lasts while something refers to it.

    No function of Python, whose frame would refer to a node, runs meanwhile, nor does one of a mode: the program's, or
    the one that counts FLOPs.
    """
    trained = [each for each in parameters if each.requires_grad and type(each) is nn.Parameter]
    with torch.inference_mode(False), DisableTorchFunction(), DisableTorchDispatch():
        return list(map(_FIRST, map(_FIRST, map(_EDGES, map(torch.Tensor.view_as, trained, trained)))))


def _mark(nodes: Mapping[nn.Module, list[Any]], unit: nn.Module) -> None:
    """Mark the nodes of a unit; no variable refers to them."""
    deque(map(dict.__setitem__, map(_METADATA, nodes[unit]), repeat(_MARK), repeat(True)), maxlen=0)


def _is_marked(parameters: Sequence[torch.Tensor]) -> bool:
    return True in map(dict.get, map(_METADATA, _nodes_of(parameters)), repeat(_MARK))


class _Read(nn.Parameter):
    """A parameter that was read, and notices whether an operation computes with it."""

    is_used: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note the parameters that it computes with; a dtype or a shape is no tensor."""
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if any(isinstance(each, torch.Tensor) for each in tree_leaves(result)):
            for each in tree_leaves((args, kwargs)):
                if type(each) is cls:
                    each.is_used = True
        return result


def _begin_forward(reads: _Reads, param_group: Any, proceed: Callable[..., Any], *inputs: Any) -> Any:
    """Begin the forward of a unit whose weights may have been used in the same graph; see [Note: direct use]."""
    unit = module_of(param_group)
    reads.end(unit)
    found = proceed(*inputs)
    if not torch.is_grad_enabled() or is_in_backward():
        return found
    if unit not in reads.used:
        reads.begin_forward(unit)
        return found
    unit.set_reshard_after_forward(False, recurse=False)  # type: ignore[operator]
    return inputs[1:]  # without the hook that reduces the unit's gradients when those of its inputs are computed
