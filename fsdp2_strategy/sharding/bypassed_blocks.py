"""Gather what runs, however it is run: by a method beside forward, or by a function that walks through a unit.

Input: a model that is about to be sharded, and its units. Output: hooks that do what FSDP2 does around a forward, where
that forward is not called.

[Note: bypassed units] FSDP2 gathers a unit ahead of its forward. Some policies never call that: pi0 and smolvla run the
layers of two decoders in pairs, through a function that calls the layers' norms and projections itself. So a module
with parameters looks, when it runs, at the units around it. One whose own forward is not running is opened: gathered,
and left open until the walk goes on to a unit of the same list, or the pass of the whole model ends. For the backward
pass what its modules put out gathers it again, as a unit's outputs do, and the input of the first module that ran says
when its gradients are complete; where that input has no gradient, the end of the backward pass does. A function that
runs again in backward, under activation checkpointing, finds the unit as backward has gathered it.

[Note: the look] Most models call every block's forward, and need none of this. So modules have hooks until the first
pass has ended, and for the first of every other kind: through forward or another method, in training or not, with
gradients or without. Where that pass bypasses a block, casts what a module gets, or fills a cache, the hooks stay; else
they go. They stay in any case where the policy is known to bypass its blocks. A later pass of a kind that was looked at
and bypasses a block after all is an error, behind which the hooks are back.

[Note: side outputs] A block that fills a cache gives out more than what it returns: in transformers' pi0 the action
expert attends to the keys and values of the language model, whose last block has no other gradient. So the modules
within a block that is given a cache gather it for backward as well, where the model has several decoders.

[Note: fp32 among half] Policies make noise, times and tables of their own, in fp32, which a projection in half
precision would refuse. Modules that want one dtype get it, whatever comes; where autocast is on, it decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.torch_internals import (
    CONVOLUTIONS,
    base_of,
    choose_root,
    forget_forward_root,
    gather,
    is_gathered_for_backward,
    is_in_backward,
    mark_forward,
    mark_idle,
    pre_backward_hook,
    prefetch_for_forward,
    record_post_forward,
    record_pre_forward,
    records_of,
    run_post_forward,
    run_pre_forward,
    state_of,
    tree_leaves,
)
from fsdp2_strategy.errors import ShardError
from fsdp2_strategy.sharding.activation_checkpointing import decoders, is_cache

_Kind = tuple[str, bool, bool]
"""Of a pass: the method that is called, whether the model trains, and whether gradients are wanted."""

_Call = tuple[tuple[Any, ...], dict[str, Any]]

# Modules that refuse inputs of another dtype than their parameters have.
_ONE_DTYPE = (nn.Linear, nn.Bilinear, *CONVOLUTIONS, nn.MultiheadAttention, nn.LayerNorm, nn.GroupNorm)


class Walk:
    """Know which units of a model are running, and gather those that are walked through instead.

    Args:
        root: the model, not sharded yet, so that FSDP2's hooks come around these.
        units: its units and their names; the root may be among them.
        casts: units that cast their inputs, and to what; of one that is walked through, each module within does.
        left_alone: units whose own forward is sure to run.
        ignored: modules that need nothing gathered, whatever unit they stand in.
        is_bypassed: whether the model is known to bypass its blocks; else the first passes tell: [Note: the look].
    """

    def __init__(
        self,
        root: nn.Module,
        units: Mapping[nn.Module, str],
        *,
        casts: Mapping[nn.Module, torch.dtype],
        left_alone: Iterable[nn.Module] = (),
        ignored: Iterable[nn.Module] = (),
        is_bypassed: bool = False,
    ) -> None:
        self._root: Any = root
        self._name = type(root).__name__  # FSDP2 renames it
        self._casts = casts
        self._in_half = any(dtype.itemsize < torch.float32.itemsize for dtype in casts.values())
        self._depth = 0
        self._open: list[_Unit] = []
        self._seen: set[str] | None = set()
        """Units that were walked through, until the log has named them."""
        units = {module: name for module, name in units.items() if module is not root}
        self._units = units
        self._places, made = _units_around(root, units, left_alone, ignored)
        self._handles: list[RemovableHandle] = []
        """Hooks of the modules within units, while they are there."""
        self._is_needed = is_bypassed
        self._is_through: set[_Kind] = set()
        """Kinds of passes that were looked at, and need no hooks."""
        self._kind: _Kind | None = None
        """The kind of the pass that runs, if it is looked at."""
        for module, around in self._places.items():
            if not around:
                module.register_forward_pre_hook(self._check_entered)
        shares_caches = len(decoders(root)) > 1
        for unit in made:
            unit.watch(self._see_cache if shares_caches else None)
        self._hang()
        root.register_forward_pre_hook(functools.partial(self._enter, "forward"))
        root.register_forward_hook(self._leave, always_call=True)

    def add_entry_points(self, methods: Sequence[str]) -> None:
        """Let methods of the root, sharded by now, gather it; and its forward, called by name.

        Args:
            methods: names, of which it may lack some.
        """
        for unit in self._units:
            unit.register_forward_pre_hook(self._begin_at_the_root, prepend=True)
        for name in methods:
            if name != "forward" and callable(method := getattr(self._root, name, None)):
                setattr(self._root, name, functools.wraps(method)(functools.partial(self._run, name, method)))
        forward = self._root.forward
        call = functools.partial(self._run_forward, forward)
        self._root.forward = functools.wraps(forward)(call)

    def _run(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method of the root; one that another has called finds everything gathered."""
        if self._depth:
            return method(*args, **kwargs)
        state = state_of(self._root)
        args, kwargs = run_pre_forward(state, self._root, args, kwargs)
        try:
            with self._entered(name):
                output = self._checked(method, *args, **kwargs)
        except BaseException:
            for each in (state, *records_of(state)):  # else the next pass would not count as one that begins
                mark_idle(each)
            forget_forward_root(state)
            raise
        return run_post_forward(state, self._root, args, output)

    def _begin_at_the_root(self, *_: object) -> None:
        """Tell FSDP2 which module is the root, ahead of a unit that is run alone: it would take that for it."""
        choose_root(state_of(self._root))

    def _run_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the root's forward with its hooks, also where somebody calls it by name."""
        return self._checked(forward, *args, **kwargs) if self._depth else self._root(*args, **kwargs)

    def _checked(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a pass, and say in words what fails where a block is bypassed that was not when its kind was looked at.

        Raises:
            ShardError: a block is.
        """
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if self._handles or "DTensor" not in str(error):
                raise
            self._is_needed = True
            self._hang()
            raise ShardError(
                f"cannot run {self._name}: a module met parameters that are sharded, since this pass bypasses the "
                "forward of a block, expected the blocks that earlier passes of its kind ran. Run it again: from now "
                "on what runs within a block gathers it. register_policy(..., bypassed=True) says so beforehand."
            ) from error

    @contextmanager
    def _entered(self, method: str) -> Iterator[None]:
        self._enter(method)
        output: object = None
        try:
            yield
            output = True
        finally:
            self._leave(self._root, (), output)

    def _enter(self, method: str, *_: object) -> None:
        self._depth += 1
        kind = (method, self._root.training, torch.is_grad_enabled())
        if self._depth == 1 and not self._is_needed and kind not in self._is_through:
            self._kind = kind
            self._hang()

    def _hang(self) -> None:
        """Hang hooks on the modules within units, ahead of FSDP2's where these free what was gathered."""
        if self._handles:
            return
        for module, around in self._places.items():
            before = functools.partial(self._before, around)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            if around:
                after = functools.partial(self._after, around)
                self._handles.append(module.register_forward_hook(after, prepend=True))

    def _end_look(self, *, has_ended: bool) -> None:
        kind, self._kind = self._kind, None
        if kind is None or self._is_needed:
            return
        if has_ended:
            self._is_through.add(kind)
        while self._handles:
            self._handles.pop().remove()

    def _see_cache(self) -> None:
        """Note that a block is given a cache: [Note: side outputs]."""
        if torch.is_grad_enabled():
            self._is_needed = True
            self._hang()

    def _leave(self, _root: object, _inputs: object, output: object) -> None:
        self._depth = max(0, self._depth - 1)  # where a hook ahead of these raises, nothing was entered
        if self._depth:
            return
        while self._open:
            self._open.pop(0).close()
        if self._seen:
            names = sorted(self._seen)
            what = f"{names[0]} and {len(names) - 1} others" if len(names) > 1 else names[0]
            log("%s: the forward of %s is bypassed: what runs within gathers them", self._name, what)
            self._seen = None
        self._end_look(has_ended=output is not None)

    def _before(self, around: Sequence[_Unit], module: nn.Module, args: Any, kwargs: Any) -> _Call | None:
        changed: _Call | None = None
        for unit in around:
            if unit.is_running or unit.is_open:
                continue
            if is_in_backward():
                self._is_needed = True
                unit.gather_in_backward()
                continue
            if not self._depth:
                self._check_entered(module)
                continue
            changed = args, kwargs = self._walk_into(unit, module, args, kwargs)
        if module in self._units:  # FSDP2 has cast what goes into a unit
            return changed
        if around and around[-1].is_walked:
            dtype = self._casts.get(around[-1].module)
        else:
            dtype = _dtype_wanted(module) if self._in_half else None
        cast = None if dtype is None else _cast(dtype, args, kwargs)
        self._is_needed |= cast is not None
        return cast or changed

    def _after(self, around: Sequence[_Unit], module: nn.Module, args: Any, output: Any) -> Any:
        units = [unit for unit in around if (unit.is_open and not unit.is_running) or unit.fills_cache]
        if units and torch.is_grad_enabled():
            output = own_outputs(module, args, output)
            for unit in units:
                unit.gather_for_gradients_of(output)
        return output

    def _walk_into(self, unit: _Unit, module: nn.Module, args: Any, kwargs: Any) -> _Call:
        left = {other for other in self._open if other.lane is not None and other.lane is unit.lane}
        for other in [other for other in self._open if other in left or left.intersection(other.outer)]:
            other.close()
            self._open.remove(other)
        self._open.append(unit)
        self._is_needed = True
        if self._seen is not None:
            self._seen.add(unit.name)
        return unit.open(module, args, kwargs)

    def _check_entered(self, module: nn.Module, *_: object) -> None:
        """Say in words what would fail as a mix of tensors and DTensors.

        Raises:
            ShardError: the module's parameters are sharded, and no pass runs.
        """
        if self._depth or is_in_backward() or not any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            return
        name = next(name for name, m in self._root.named_modules() if m is module)
        raise ShardError(
            f"cannot run {name} of {self._name}: its parameters are sharded, expected the model's "
            "forward, or a method that gathers them, to be running. Call the model, or name the method that runs it "
            "in forward_methods."
        )


class _Unit:
    """One unit, seen from what runs within it."""

    def __init__(self, module: nn.Module, name: str, lane: nn.Module | None, outer: Sequence[_Unit]) -> None:
        self.module, self.name = module, name
        self.outer = outer
        """The units around it."""
        self.lane = lane
        """The list that it stands in: of those there one is open at a time."""
        self.is_running = False
        self.is_open = False
        self.is_walked = False
        """Whether it was walked through when it ran last: what runs again in backward does as it did before."""
        self.fills_cache = False
        """Whether it runs with a cache that others read; see [Note: side outputs]."""
        self._see_cache: Callable[[], None] | None = None

    def watch(self, see_cache: Callable[[], None] | None = None) -> list[RemovableHandle]:
        """Know from now on whether it runs; ``see_cache`` is called where it is given a cache that others read."""
        self._see_cache = see_cache
        return [
            self.module.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.module.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self.is_running, self.is_walked = True, False
        if self._see_cache is not None and any(map(is_cache, (*args, *kwargs.values()))):
            self.fills_cache = True
            self._see_cache()

    def _end(self, *_: object) -> None:
        self.is_running = self.fills_cache = False
        self.is_open = False  # FSDP2 frees it behind this

    @property
    def _state(self) -> Any:
        return state_of(self.module)

    def open(self, module: nn.Module, args: Any, kwargs: Any) -> _Call:
        """Gather it, as ahead of its forward; ``module`` is the first within that runs, on these inputs."""
        state = self._state
        mark_forward(state)
        for record in records_of(state):
            args, kwargs = record_pre_forward(record, module, args, kwargs)
        prefetch_for_forward(state)
        self.is_open = self.is_walked = True
        return args, kwargs

    def close(self) -> None:
        """Free what was gathered, as behind its forward, where that has not been called since."""
        if not self.is_open:
            return
        self.is_open = False
        state = self._state
        for record in records_of(state):
            record_post_forward(record, self.module)
        mark_idle(state)

    def gather_for_gradients_of(self, output: Any) -> None:
        """Let it be gathered once gradients of an output come."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(pre_backward_hook(self._state))  # type: ignore[no-untyped-call]

    def gather_in_backward(self) -> None:
        """Gather it where a pass runs again within backward."""
        state = self._state
        if not is_gathered_for_backward(state):
            pre_backward_hook(state)(None)
        for record in records_of(state):
            gather(record)


def _dtype_wanted(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that a module's inputs need; see [Note: fp32 among half]."""
    if not isinstance(module, _ONE_DTYPE):
        return None
    parameter = next(p for p in module._parameters.values() if p is not None)
    return None if torch.is_autocast_enabled(parameter.device.type) else parameter.dtype


def _cast(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    """Return inputs whose floating tensors have one dtype, None where they have it."""

    def differs(value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype != dtype and value.is_floating_point()

    if not any(map(differs, args)) and not any(map(differs, kwargs.values())):
        return None
    named = {name: value.to(dtype) if differs(value) else value for name, value in kwargs.items()}
    return tuple(value.to(dtype) if differs(value) else value for value in args), named


def _units_around(
    root: nn.Module, units: Mapping[nn.Module, str], left_alone: Iterable[nn.Module], ignored: Iterable[nn.Module]
) -> tuple[dict[nn.Module, list[_Unit]], list[_Unit]]:
    """Return for each module with parameters the units around it in every place, the root aside; and all units."""
    alone, apart = set(left_alone), set(ignored)
    made: dict[nn.Module, _Unit] = {}
    around: dict[nn.Module, list[_Unit]] = {}

    def visit(module: nn.Module, parent: nn.Module | None, outer: list[_Unit]) -> None:
        if module in around:
            outer = [unit for unit in around[module] if unit in outer]
            if len(outer) == len(around[module]):
                return
        around[module] = outer
        if module in alone:
            return
        inner = outer
        if module in units:
            lane = parent if isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential) else None
            made[module] = made.get(module) or _Unit(module, units[module], lane, outer)
            inner = [*outer, made[module]]
        for child in module.children():
            if child not in apart:
                visit(child, module, inner)

    visit(root, None, [])
    own = {module: found for module, found in around.items() if any(True for _ in module.parameters(recurse=False))}
    return own, list(made.values())


def own_outputs(_module: nn.Module, _inputs: object, output: Any) -> Any:
    """Copy outputs of a unit that are views, ahead of FSDP2's own hook.

    FSDP2 hangs the gathering for backward on a unit's outputs. Where an output is a view and the code around changes it
    in place (``logits.div_(temperature)``), autograd drops that hook without a word.
    """
    if isinstance(output, torch.Tensor):
        return output.clone() if base_of(output) is not None and output.requires_grad else output
    if isinstance(output, dict):
        for key, value in output.items():
            if (owned := own_outputs(_module, _inputs, value)) is not value:
                output[key] = owned
    elif isinstance(output, list | tuple):
        owned = [own_outputs(_module, _inputs, value) for value in output]
        if any(new is not old for new, old in zip(owned, output, strict=True)):
            return type(output)(*owned) if hasattr(output, "_fields") else type(output)(owned)
    return output


def bypassed_units(
    root: nn.Module,
    units: Mapping[nn.Module, str],
    run: Callable[[nn.Module], object],
    *,
    ignored: Iterable[nn.Module] = (),
) -> list[str]:
    """Run an unsharded model, and return the names of units whose own forward did not run while modules within did.

    Args:
        root: the model; its hooks are as before afterwards.
        units: its units and their names.
        run: calls the model as its trainer does.
        ignored: modules that need nothing gathered.
    """
    found: dict[str, None] = {}

    def before(around: Sequence[_Unit], *_: object) -> None:
        found.update((unit.name, None) for unit in around if not unit.is_running)

    units = {module: name for module, name in units.items() if module is not root}
    around, made = _units_around(root, units, (), ignored)
    handles = [module.register_forward_pre_hook(functools.partial(before, a)) for module, a in around.items()]
    handles += [handle for unit in made for handle in unit.watch()]
    try:
        with torch.random.fork_rng(), torch.no_grad():
            run(root)
    finally:
        for handle in handles:
            handle.remove()
    return list(found)
