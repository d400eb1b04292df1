"""Run a unit that a rank skips as the identity, so that the rank takes part in the collectives of the other ranks.

Input: a sharded model and its units. Output: hooks around the modules that contain units.

[Note: skipped units] A unit is gathered when it runs. If the ranks run different units (layerdrop, a head for each
robot, experts in a ModuleList, an early exit), their collectives would be paired by position: a rank would get the
weights of another unit. So a unit that a rank skips runs as the identity: it is gathered and freed, and backward
gathers it again and reduces gradients of zeros ([Note: missing gradients] in `missing_gradients`). All ranks then run
the same units in the same order. If no rank skips a unit, the hooks only compare a few objects; nothing is
communicated.

A module with a forward is the *owner* of its *parts*: the entries of its ModuleLists and ModuleDicts that are or
contain units, and its direct children that are units chosen by size or class name. In a call of the owner, parts run in
an order, at first that of the modules. When a part runs, the parts before it that have not run are skipped; at the end
of the owner's forward, all others are. If a part runs after it was taken for skipped, the order was wrong: this pass
has gathered it once more than necessary, and the owner uses the order of this pass from then on.

A rank that runs a unit, but does not use its output, would not run the unit's backward. transformers drops the outputs
of layers in this way if layerdrop is set, and a loss may use one of several heads. So an output that the next part does
not depend on is attached to the input of this part, without a gradient. Parts that are parallel, as heads are (they get
the same input, or are entries of a ModuleDict), have their outputs attached to each other at the end, and their input
requires a gradient on all ranks: otherwise the order of reductions would depend on which of them a rank runs.

Inputs and outputs may be nested, also in dataclasses. A part may get no floating tensor, as a table of embeddings for
each robot, or no input at all. What precedes it is then attached to the next tensor, and its gradients are reduced at
the end of backward on all ranks.

What cannot be corrected is noticed by `distributed.unit_log`: parts in different orders, or a module of which only some
ranks call the forward.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import nn

from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.distributed.torch_internals import (
    IS_MANAGED,
    begin_forward,
    changes_of,
    end_forward,
    fsdp_state_of,
    gather,
    has_forward_hook,
    is_in_backward,
    param_groups_of,
    pre_backward_hook,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from fsdp2_strategy.model.fsdp_state import reshard_without_backward

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_KINDS_OF_CHILDREN = ("block", "size")
"""The kinds of units that are parts if they are no entries of a container. Embeddings and heads are not: many callers
use them outside of the forward of the model that contains them."""
_NOT_SKIPPED = ("vision", "shared", "root")
"""The kinds of units that ranks need not run equally often, or that have several places."""
_MOST_NODES = 64
"""How many nodes of an autograd graph are searched for an output."""
_LEAVES = {torch.Tensor, nn.Parameter, type(None), bool, int, float, str}
"""Types of values that contain no others."""
_MOST_DATACLASSES = 3
"""How many dataclasses within each other are searched for tensors: they may refer to each other."""

_Tensors = tuple[torch.Tensor, ...]


def layerdrop_of(module: nn.Module) -> float:
    """Return the probability with which a transformers model skips each of its layers in training; 0 for others."""
    config = getattr(module, "config", None)
    names = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    given = [getattr(module, "layerdrop", 0.0), *(getattr(config, name, 0.0) for name in names)]
    return max(float(value) for value in given if isinstance(value, int | float))


@dataclass(eq=False)
class _Unit:
    """A unit, and the units inside it."""

    module: nn.Module
    inner: list[_Unit]


@dataclass(eq=False)
class _Part:
    """A module that its owner runs at most once in a call, as a rule."""

    module: nn.Module
    units: list[_Unit]
    container: nn.Module | None
    """The ModuleList or ModuleDict that it is an entry of."""
    is_excluded: bool = False
    """Whether it runs outside of its owner's forward, or its own forward is bypassed."""
    has_trained_input: bool | None = None
    """Whether its input required a gradient when it last ran; None if it never ran with gradients."""
    has_input: bool = True
    """Whether its inputs contain a floating tensor, as far as is known: a table of embeddings gets integers only."""


@dataclass(eq=False)
class _Call:
    """A call of an owner's forward that is running."""

    inputs: _Tensors
    """The inputs of the owner that require a gradient."""
    handled: BaseException | None
    """The error that the caller was handling when it called the owner."""
    done: dict[_Part, bool] = field(default_factory=dict)
    """The parts that have run (True) or were skipped (False), in order."""
    was_out_of_order: bool = False
    outputs: tuple[_Tensors, ...] = ()
    """The outputs of the part that ran last, and of parts without floating inputs before it."""
    numbers: _Tensors = ()
    """What `_run_skipped` returned, while there was no tensor to attach it to."""
    input: ref[torch.Tensor] | None = None
    """The input of that part."""
    has_gradients: bool = False
    """Whether gradients were enabled when one of its parts ran: a forward may disable them for itself."""
    calls_forward: bool = False
    """Whether a method runs that has called the forward, as one that generates does: the parts are run there."""
    copied: tuple[torch.Tensor, torch.Tensor] | None = None
    """The input of the part that runs, and the copy that it got in its place."""
    results: list[tuple[nn.Module, ref[torch.Tensor], list[ref[torch.Tensor]]]] = field(default_factory=list)
    """The container, the input and the outputs of each part that is an entry of a container."""
    has_trained_input: bool = False
    """Whether an output of the part that ran last requires a gradient; before the first one, an input of the owner."""

    def not_reached_from(self, values: Any) -> _Tensors:
        """Return the numbers and outputs, not attached yet, that nested values do not depend on."""
        leaves = _leaves(values) if self.outputs else []
        return self.numbers + tuple(each for group in self.outputs if not _depends(leaves, group) for each in group)


class SkippedUnits:
    """Register hooks that let ranks skip different parts of a sharded model; see [Note: skipped units]."""

    def __init__(self, root: nn.Module, kinds: Mapping[nn.Module, str], ignored: Iterable[nn.Module]) -> None:
        self.skipped: set[nn.Module] = set()
        """The units that ran as the identity in the running pass, and have not run since."""
        self._kinds = kinds
        self._ignored = set(ignored)
        self._parts: dict[nn.Module, _Part] = {}
        self._owners: dict[nn.Module, _Owner] = {}
        paths: dict[nn.Module, int] = {}
        for _, module in root.named_modules(remove_duplicate=False):
            paths[module] = paths.get(module, 0) + 1
        self._repeated = {module for module, count in paths.items() if count > 1}
        for module in root.modules():
            if not isinstance(module, _CONTAINERS) and (parts := list(self._parts_of(module))):
                self._owners[module] = _Owner(root, module, parts, self.skipped)
                if module is not root and layerdrop_of(module):
                    # transformers would run all layers of a module that FSDP2 manages, and use their outputs.
                    setattr(module, IS_MANAGED, False)
                self._parts |= {part.module: part for part in parts}

    def exclude(self, unit: nn.Module) -> None:
        """Treat a unit as one that need not run, from now on: its forward is bypassed, so no hook sees it run."""
        for part in self._parts.values():
            if unit in part.module.modules():
                part.is_excluded = True

    def run_method(self, owner: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method of a module as if it were the module's forward."""
        if owner not in self._owners:
            return method(*args, **kwargs)
        return self._owners[owner].run(method, *args, **kwargs)

    def _parts_of(self, module: nn.Module, container: nn.Module | None = None) -> Iterator[_Part]:
        for child in module.children():
            if child in self._ignored or child in self._repeated:
                continue
            if isinstance(child, _CONTAINERS):
                yield from self._parts_of(child, child)
            elif container is not None or self._kinds.get(child) in _KINDS_OF_CHILDREN:
                inside = {self._kinds[m] for m in child.modules() if m in self._kinds}
                if inside and not inside.intersection(_NOT_SKIPPED):
                    has_input = not isinstance(child, nn.Embedding | nn.EmbeddingBag)
                    yield _Part(child, list(self._units_in(child)), container, has_input=has_input)

    def _units_in(self, module: nn.Module) -> Iterator[_Unit]:
        inner = [unit for child in module.children() for unit in self._units_in(child)]
        if module in self._kinds:
            yield _Unit(module, inner)
        else:
            yield from inner


class _Owner:
    """A module that runs parts."""

    def __init__(self, root: nn.Module, module: nn.Module, parts: list[_Part], skipped: set[nn.Module]) -> None:
        self._root = root
        self._skipped = skipped
        self._order = parts
        self._parallel: set[nn.Module] = {part.container for part in parts if isinstance(part.container, nn.ModuleDict)}
        """Containers whose entries get the same input."""
        self._calls: list[_Call] = []
        module.register_forward_pre_hook(self._begin, with_kwargs=True)
        module.register_forward_hook(self._end, prepend=True, always_call=True)
        for part in parts:  # these hooks run around those of FSDP2
            part.module.register_forward_pre_hook(functools.partial(self._before, part), prepend=True, with_kwargs=True)
            part.module.register_forward_hook(functools.partial(self._after, part))

    def run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method of the module as its forward."""
        self._begin(None, args, kwargs)
        own = self._calls[-1]
        try:
            output = method(*args, **kwargs)
        except BaseException:
            self._calls.pop()
            raise
        # A method that ran no part may be one that does not run the model, as one that returns stored actions.
        if own.calls_forward or not own.done:
            self._calls.pop()
            return output
        changed = self._end(None, args, output)
        return output if changed is None else changed

    def _begin(self, _module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = _with_gradient(_leaves((args, kwargs))) if torch.is_grad_enabled() else ()
        for call in self._calls[-1:]:
            call.calls_forward = True
        self._calls.append(_Call(inputs=inputs, handled=sys.exc_info()[1], has_trained_input=bool(inputs)))

    def _before(self, part: _Part, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if part.is_excluded or not self._calls:
            return None if part.is_excluded else _as_in_forward(part, args, kwargs)
        call = self._calls[-1]
        self._skipped.difference_update(_modules_of(part.units))
        skipped = self._skipped_before(part, call)
        found = _first_input(args, kwargs)
        call.input = None if found is None else ref(found[0])
        call.copied = None
        call.has_gradients |= torch.is_grad_enabled()
        if not torch.is_grad_enabled():
            self._run_skipped(skipped, ())
            return None
        self._note_input(part, has_input=found is not None)
        if found is None:
            if skipped:
                others = tuple(each for group in call.outputs for each in group)
                call.numbers += self._run_skipped(skipped, (*others, *call.inputs))
                call.outputs = ()
            return None
        tensor, replace = found
        before = (tensor,) if tensor.requires_grad else ()
        others = call.not_reached_from((args, kwargs))
        call.outputs = call.numbers = ()
        part.has_trained_input = tensor.requires_grad
        if not skipped and not others and (before or not self._needs_gradient(part)):
            return None
        if skipped:
            others = (*others, *call.inputs)
        after = self._run_skipped(skipped, (*before, *others), then=part)
        if not after:
            return None
        part.has_trained_input = True
        (changed,) = _attach((tensor,), after)
        call.copied = tensor, changed
        return replace(changed)

    def _note_input(self, part: _Part, *, has_input: bool) -> None:
        """Note whether a part has a floating input; other entries of a ModuleDict get the same kind of inputs."""
        if part.has_input != has_input:
            for other in self._order:
                if other is part or (other.container is part.container and part.container in self._parallel):
                    other.has_input = has_input

    def _run_skipped(self, skipped: Sequence[_Part], before: _Tensors, then: _Part | None = None) -> _Tensors:
        """Run skipped parts as the identity of a number; its backward runs theirs, and then that of ``before``.

        Return the numbers whose backward does so: the input of the part ``then``, and those of parts without inputs.
        """
        number = torch.zeros((), device=current_device())  # its backward runs on the thread of the units' backward
        if before:
            (number,) = _attach((number,), before)
        numbers = []
        for part in skipped:
            own = self._for_part(part, number) if part.has_input else torch.zeros_like(number)
            for unit in part.units:
                own = _run_as_identity(unit, own)
            if part.has_input:
                number = own
            else:
                numbers.append(own)
            self._skipped.update(_modules_of(part.units))
        if then is not None:
            number = self._for_part(then, number)
        return _with_gradient([number, *reversed(numbers)])

    def _for_part(self, part: _Part, number: torch.Tensor) -> torch.Tensor:
        """Make the input of a part require a gradient, if it may require one on another rank."""
        if number.requires_grad or not torch.is_grad_enabled() or not self._needs_gradient(part):
            return number
        return _attach((number,), (_leaf(number),))[0]

    def _needs_gradient(self, part: _Part) -> bool:
        """Return whether the input of a part must require a gradient, even if it does not depend on a parameter.

        Otherwise, ranks whose input requires none would reduce the part's gradients later, at the end of backward.
        """
        if part.container in self._parallel:
            return self._is_trained()
        inside = {id(p) for other in self._order for p in other.module.parameters()}
        return self._is_trained() and any(p.requires_grad and id(p) not in inside for p in self._root.parameters())

    def _after(self, part: _Part, _module: nn.Module, _inputs: object, output: Any) -> None:
        if self._calls and not part.is_excluded and torch.is_grad_enabled():
            call = self._calls[-1]
            if call.copied is not None and changes_of(call.copied[1]):
                call.copied[0].copy_(call.copied[1])  # the part has changed its input in place
            call.copied = None
            outputs = _with_gradient(_leaves(output))
            call.outputs += (outputs,) if outputs else ()
            call.has_trained_input = bool(outputs)
            if part.container is not None and call.input is not None:
                call.results.append((part.container, call.input, [ref(tensor) for tensor in outputs]))

    def _end(self, _module: object, _inputs: object, output: Any) -> Any:
        if not self._calls:
            return None
        call = self._calls.pop()
        if sys.exc_info()[1] is not call.handled:
            return None
        skipped = [part for part in self._order if part not in call.done and not part.is_excluded]
        if call.was_out_of_order:
            self._order = _merged([part for part, has_run in call.done.items() if has_run], self._order)
        is_without = bool(call.done) and not call.has_gradients and not _with_gradient(_leaves(output))
        if is_without or not torch.is_grad_enabled():
            with torch.no_grad():
                self._run_skipped(skipped, ())
            return None
        if len(call.results) > 1:
            self._find_parallel(call, output)
        is_joined = sum(container in self._parallel for container, *_ in call.results) > 1
        others = call.not_reached_from(output)
        if not skipped and not others and not is_joined:
            return None
        return self._attach_to_output(output, call, skipped, others, is_joined=is_joined)

    def _attach_to_output(
        self, output: Any, call: _Call, skipped: Sequence[_Part], others: _Tensors, *, is_joined: bool
    ) -> Any:
        """Run skipped parts, and return the owner's output, with which backward reaches them and ``others``.

        If ``is_joined``, backward from any tensor of the output reaches all of these tensors.
        """
        leaves, rebuild = _flatten(output)
        floating = [i for i, leaf in enumerate(leaves) if _is_floating(leaf)]
        places = [i for i in floating if leaves[i].requires_grad] or floating[:1]
        if len(places) < 2 and not skipped and not others:
            return output
        tensors = tuple(leaves[i] for i in places)
        # Without a trained input, backward does not reach the first parts on ranks that run them.
        before: _Tensors = ()
        first = next((part for part in skipped if part.has_input), None)
        if first is not None and self._has_trained_input(first, call):
            before = (*_with_gradient(tensors), *call.inputs)
        if skipped:
            others = self._run_skipped(skipped, (*before, *others))
        for i, tensor in zip(places, _attach(tensors, others) if others or is_joined else tensors, strict=True):
            leaves[i] = tensor
        return rebuild(leaves)

    def _skipped_before(self, part: _Part, call: _Call) -> list[_Part]:
        """Note that a part runs, and return the parts before it that have not run in this call."""
        skipped: list[_Part] = []
        if part not in call.done:
            before = self._order[: self._order.index(part)]
            skipped = [other for other in before if other not in call.done and not other.is_excluded]
            call.done |= dict.fromkeys(skipped, False)
        elif not call.done[part]:
            call.was_out_of_order = True
            del call.done[part]  # it runs after those that have run
        call.done[part] = True
        return skipped

    def _has_trained_input(self, part: _Part, call: _Call) -> bool:
        """Return whether a part that was skipped would have got an input that requires a gradient."""
        if any(call.done.values()):
            return call.has_trained_input
        return call.has_trained_input or self._needs_gradient(part) or bool(part.has_trained_input)

    def _find_parallel(self, call: _Call, output: Any) -> None:
        """Note the containers of which several parts got one input, and returned outputs that the owner returns."""
        returned = {id(leaf) for leaf in _leaves(output)}
        inputs: dict[nn.Module, list[object]] = {}
        for container, given, outputs in call.results:
            if (tensor := given()) is not None and returned.intersection(id(own()) for own in outputs):
                inputs.setdefault(container, []).append(tensor)
        for container, tensors in inputs.items():
            if len(tensors) > len({id(tensor) for tensor in tensors}):
                self._parallel.add(container)

    def _is_trained(self) -> bool:
        return any(p.requires_grad for part in self._order for p in part.module.parameters())


def _merged(ran: Sequence[_Part], order: Sequence[_Part]) -> list[_Part]:
    """Return ``order`` with the parts that ran in the order of ``ran``; others stay behind the same predecessor."""
    merged = list(ran)
    for before, part in zip([None, *order], order, strict=False):
        if part not in merged:
            merged.insert(0 if before is None else merged.index(before) + 1, part)
    return merged


def _modules_of(units: Iterable[_Unit]) -> Iterator[nn.Module]:
    for unit in units:
        yield unit.module
        yield from _modules_of(unit.inner)


def _run_as_identity(unit: _Unit, number: torch.Tensor) -> torch.Tensor:
    """Gather and free a unit as if it ran; return a number whose backward gathers and reduces it; collective."""
    state = fsdp_state_of(unit.module)
    if is_in_backward():  # a recomputation
        for param_group in param_groups_of(state):
            gather(param_group)
        for inner in unit.inner:
            number = _run_as_identity(inner, number)
        return number
    (number,), _ = begin_forward(state, unit.module, (number,), {})
    for inner in unit.inner:
        number = _run_as_identity(inner, number)
    end_forward(state, unit.module)
    if not torch.is_grad_enabled():
        if has_forward_hook(unit.module, reshard_without_backward):
            reshard_without_backward(unit.module)
        return number
    if not number.requires_grad and not any(p.requires_grad for p in unit.module.parameters()):
        return number
    (number,) = _attach((number,), () if number.requires_grad else (_leaf(number),))
    number.register_hook(pre_backward_hook(state))  # type: ignore[no-untyped-call]
    return number


def _as_in_forward(part: _Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the input of a part require a gradient in a recomputation if it did so in the forward."""
    if not (part.has_trained_input and is_in_backward() and torch.is_grad_enabled()):
        return None
    found = _first_input(args, kwargs)
    if found is None or found[0].requires_grad:
        return None
    tensor, replace = found
    return replace(*_attach((tensor,), (_leaf(tensor),)))


def _first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Callable[..., Any]] | None:
    """Return the first floating tensor among the inputs, preferably one that requires a gradient; None without one.

    With it comes a function that returns the inputs with another tensor in its place.
    """
    inputs: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in inputs:
        if _is_floating(value) and value.requires_grad:
            return value, functools.partial(with_input, args, kwargs, place)
    leaves, rebuild = _flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if _is_floating(leaf)]
    first = next((i for i in places if leaves[i].requires_grad), next(iter(places), None))
    if first is None:
        return None
    return leaves[first], lambda changed: rebuild([*leaves[:first], changed, *leaves[first + 1 :]])


def with_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str, value: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a module with a tensor in the place of one of them."""
    if isinstance(place, int):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, place: value}


def _leaves(values: Any, depth: int = 0) -> list[Any]:
    """Return the leaves of nested values, those of dataclasses included; it runs for each unit in each pass."""
    found: list[Any] = []
    waiting = [values]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind is tuple or kind is list:
            waiting.extend(reversed(value))
        elif kind is dict:
            waiting.extend(reversed(value.values()))
        elif kind in _LEAVES:
            found.append(value)
        elif len(inner := tree_leaves(value)) != 1 or inner[0] is not value:
            waiting.extend(reversed(inner))
        elif _is_nested(value, depth):
            found += _leaves(_fields(value), depth + 1)
        else:
            found.append(value)
    return found


def _flatten(values: Any, depth: int = 0) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of nested values, and a function that builds the values of other leaves."""
    nodes, structure = tree_flatten(values)
    inner = [_flatten(_fields(node), depth + 1) if _is_nested(node, depth) else ([node], None) for node in nodes]

    def rebuild(leaves: list[Any]) -> Any:
        waiting, found = iter(leaves), []
        for node, (own, build) in zip(nodes, inner, strict=True):
            changed = [next(waiting) for _ in own]
            found.append(changed[0] if build is None else _with_fields(node, build(changed)))
        return tree_unflatten(found, structure)

    return [leaf for own, _ in inner for leaf in own], rebuild


def _is_nested(value: object, depth: int) -> bool:
    return depth < _MOST_DATACLASSES and dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if hasattr(value, each.name)}


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    different = {name: own for name, own in fields.items() if getattr(value, name) is not own}
    if not different:
        return value
    changed = copy.copy(value)
    for name, own in different.items():
        if type(value).__dataclass_params__.frozen:
            object.__setattr__(changed, name, own)
        else:
            setattr(changed, name, own)
    return changed


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _with_gradient(values: Iterable[Any]) -> _Tensors:
    return tuple(value for value in values if isinstance(value, torch.Tensor) and value.requires_grad)


def _depends(values: Iterable[Any], on: _Tensors) -> bool:
    """Return whether a value is one of the tensors, or is computed from one within a few operations."""
    tensors = _with_gradient(values)
    if any(tensor is other for tensor in tensors for other in on):
        return True
    nodes = {other.grad_fn for other in on}
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    for node in waiting:
        if node in nodes:
            return True
        for before, _ in node.next_functions:
            if before is not None and before not in seen and len(seen) < _MOST_NODES:
                seen.add(before)
                waiting.append(before)
    return False


def _leaf(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like, requires_grad=True)


def _attach(tensors: _Tensors, others: _Tensors) -> _Tensors:
    """Return copies of tensors whose backward also runs the backward of each other tensor."""
    attached: _Tensors = _Attach.apply(len(tensors), *tensors, *others)  # type: ignore[no-untyped-call]
    return attached


class _Attach(torch.autograd.Function):
    """Copy some tensors; the backward of each copy also runs the backward of all inputs, without a gradient."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> _Tensors:
        ctx.set_materialize_grads(False)
        ctx.others = len(tensors) - count
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, *gradients, *[None] * ctx.others
