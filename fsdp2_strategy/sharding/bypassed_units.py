"""Gather units whose forward is bypassed, because their submodules or another method of the model are called directly.

Input: a model that is not sharded yet, and its units. Output: hooks that gather and free a unit whose forward is not
called. FSDP2's own hooks run only when the forward is called.

[Note: bypassed units] FSDP2 gathers a unit before its forward. Some policies never call the forward of their blocks:
pi0 and smolvla run the layers of two decoders in pairs, in a function that calls the norms and projections of the
layers directly. So each module with direct parameters has a forward pre-hook that checks the units around the module.
If the forward of one of these units is not running, the hook opens the unit: it gathers the unit's parameters. The unit
stays open until another unit of the same container (such as a ModuleList) is opened, or until the forward pass of the
model ends. For backward, hooks on the outputs of the unit's submodules gather the unit again, as FSDP2's hooks on the
outputs of a unit do. The unit's gradients are reduced when the gradient of the input of the first submodule that ran is
computed. If this input needs no gradient, they are reduced at the end of the backward pass. If activation checkpointing
runs the submodules again in backward, the pre-hooks gather the unit for backward, unless it is gathered already.

[Note: observed pass] Most models call the forward of every block and need none of these hooks. So the hooks are
registered only during the first pass of each kind. A kind consists of the method that is called, the mode
(training or evaluation), and whether gradients are enabled. The hooks stay registered permanently in each of these
cases:
  - in the first pass of a kind, a unit is bypassed, or the hooks cast an input of a module
  - the model has several decoders, and a pass with gradients passes a cache to a block
  - the policy is known to bypass its blocks
Otherwise the hooks are removed after the pass. If a later pass of the same kind bypasses a unit, this pass raises an
error, and the hooks are registered again, permanently.

[Note: cache outputs] A block that fills a cache has more outputs than it returns. In transformers' pi0, the action
expert attends to the keys and values of the language model, and the last block of the language model gets gradients
only through these. So in a model with several decoders, if a block receives a cache, the outputs of all modules within
the block get the hooks that gather it for backward.

[Note: wrappers] The forward of a wrapper that adds no parameters may use the model's modules and weights before, after
or without a call of the model: a chunked loss calls the decoder, and then uses the weight of the head. So the first
such use in the wrapper's forward begins a pass of the model, which ends with the wrapper's forward. A wrapper that only
calls the model begins none.

[Note: fp32 inputs] Policies create noise, time steps and tables in fp32, and a projection in half precision would raise
an error for them. So in a model with half-precision units, inputs of modules that accept only the dtype of their
parameters are cast to this dtype, unless autocast is enabled. Within a bypassed unit, the inputs of all modules are
cast to the unit's compute dtype.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp2_strategy.distributed.generators import restored_generators
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.torch_internals import (
    base_of,
    begin_forward,
    choose_root,
    end_forward,
    forget_forward_root,
    fsdp_state_of,
    gather,
    is_gathered_for_backward,
    is_in_backward,
    mark_idle,
    param_groups_of,
    pre_backward_hook,
    run_post_forward,
    run_pre_forward,
    tree_leaves,
)
from fsdp2_strategy.errors import ShardError, some
from fsdp2_strategy.model.failed_passes import record_failed_pass, reset_after_failed_forward
from fsdp2_strategy.sharding.activation_checkpointing import decoders, is_cache
from fsdp2_strategy.sharding.own_dtype import cast_inputs_to, cast_to_own, needs_own_dtype
from fsdp2_strategy.sharding.prefetch import PrefetchOrder

_PassKind = tuple[str, bool, bool]
"""The kind of a pass: its method, whether the model is in training mode, whether gradients are enabled."""

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_DIFFERENT_DTYPES = re.compile("same d?type|should be the same|expected scalar type")
"""Parts of torch's errors about tensors of two dtypes."""
_ABOUT_DTYPES = (
    "An input of a model in half precision is cast where a module with weights gets it (docs/numerics.md). If it meets "
    "a weight in another way, cast it in the model, or name the input of the model in cast_inputs of the configuration."
)


class BypassHooks:
    """Register hooks that track which units are running, and gather units whose forward is bypassed.

    The root must not be sharded yet, so that FSDP2's post-forward hooks run after these hooks. ``casts`` has the dtype
    of each unit's inputs; if a unit is bypassed, the inputs of each module within it are cast to this dtype instead.
    With ``is_bypassed``, the hooks stay registered; see [Note: observed pass].
    """

    def __init__(
        self,
        root: nn.Module,
        units: Mapping[nn.Module, str],
        *,
        casts: Mapping[nn.Module, torch.dtype],
        never_bypassed: Iterable[nn.Module],
        ignored: Iterable[nn.Module],
        is_bypassed: bool,
    ) -> None:
        self._root: Any = root
        self._name = type(root).__name__  # `fully_shard` changes the name of the class
        self._casts = casts
        self._has_half_precision = any(dtype.itemsize < torch.float32.itemsize for dtype in casts.values())
        self._depth = 0
        """Number of nested calls of the root's forward and entry points."""
        self._open: list[_Unit] = []
        self._bypassed_names: set[str] | None = set()
        """Names of bypassed units; None after they have been logged."""
        self._units = {module: name for module, name in units.items() if module is not root}
        self._units_around, made = _find_units_around(root, self._units, never_bypassed, ignored)
        self._handles: list[RemovableHandle] = []
        """Hooks on modules with direct parameters; empty while these hooks are not registered."""
        self._are_hooks_needed = is_bypassed
        self._kinds_without_hooks: set[_PassKind] = set()
        """Kinds of passes that were observed and do not need the hooks."""
        self._kind: _PassKind | None = None
        """The kind of the running pass; None if none is running."""
        self._prefetch: PrefetchOrder | None = None
        self.around_method: Callable[..., Any] = lambda _root, method, *args, **kwargs: method(*args, **kwargs)
        """Is called with the root, one of its methods and the arguments, and runs it."""
        self.on_bypass: Callable[[nn.Module], None] | None = None
        """Is called with each unit whose forward is bypassed."""
        self.at_start: Callable[[], None] = lambda: None
        """Is called at the start of a pass, or of a wrapper's forward that may begin one."""
        self.at_end: Callable[[], None] = lambda: None
        """Is called at the end of a pass, before FSDP2's hooks."""
        self._wrappers: WeakSet[nn.Module] = WeakSet()
        self._wrapper_depth = 0
        """Number of nested forwards of wrappers that are running; see [Note: wrappers]."""
        self._has_wrapper_begun = False
        """Whether a wrapper's forward has begun the running pass."""
        self._cast_inputs: Callable[..., _Inputs] | None = None
        for module, around in self._units_around.items():
            if not around:
                module.register_forward_pre_hook(self._check_running)
        shares_caches = len(decoders(root)) > 1
        for unit in made:
            unit.track(self._keep_hooks if shares_caches else None)
        self._register_hooks()
        root.register_forward_pre_hook(functools.partial(self._enter, "forward"))
        root.register_forward_hook(self._leave, always_call=True)

    def add_entry_points(self, methods: Sequence[str], prefetch: PrefetchOrder | None = None) -> None:
        """Wrap methods of the sharded root, so that calling one gathers the root unit; missing methods are skipped.

        ``forward`` is wrapped, too, because a direct call of ``model.forward(...)`` runs no hooks.
        """
        self._prefetch = prefetch
        for unit in self._units:
            unit.register_forward_pre_hook(self._init_root, prepend=True)
        for name in methods:
            if name != "forward" and callable(method := getattr(self._root, name, None)):
                setattr(self._root, name, functools.wraps(method)(functools.partial(self._run_method, name, method)))
        forward = self._root.forward
        self._root.forward = functools.wraps(forward)(functools.partial(self._run_forward, forward))

    def cast_inputs(self, cast: Callable[..., _Inputs]) -> None:
        """Cast the inputs of the root, also those of its entry points; call this before the root is sharded."""
        self._cast_inputs = cast
        self._root.register_forward_pre_hook(cast, with_kwargs=True)

    def add_wrapper(self, wrapper: nn.Module) -> None:
        """Make the forward of a wrapper of the sharded root a pass, if it uses parts of the root; [Note: wrappers]."""
        if wrapper is self._root or wrapper in self._wrappers:
            return
        self._wrappers.add(wrapper)
        wrapper.register_forward_pre_hook(self._enter_wrapper, prepend=True)
        wrapper.register_forward_hook(self._leave_wrapper, always_call=True)

    def begin_pass(self) -> bool:
        """Return whether a pass is running; begin one if the forward of a wrapper is running."""
        if not self._depth and self._wrapper_depth:
            # Without the wrapper's inputs: FSDP2 casts the inputs of the root.
            run_pre_forward(fsdp_state_of(self._root), self._root, (), {})
            self._enter("forward of a wrapper")
            self._has_wrapper_begun = True
        return self._depth > 0

    def _enter_wrapper(self, *_: object) -> None:
        choose_root(fsdp_state_of(self._root))  # it reads all parameters, before the first pass
        self._wrapper_depth += 1
        if self._wrapper_depth == 1 and not self._depth:
            self.at_start()

    def _leave_wrapper(self, _wrapper: nn.Module, _inputs: object, output: Any) -> Any:
        """End the pass that a wrapper's forward has begun; ``output`` is None if the forward raised."""
        self._wrapper_depth = max(0, self._wrapper_depth - 1)
        if self._wrapper_depth or not self._has_wrapper_begun:
            return None
        self._has_wrapper_begun = False
        self._leave(self._root, (), output)
        if output is None:
            self._forget_pass()
            return None
        return run_post_forward(fsdp_state_of(self._root), self._root, (), clone_view_outputs(_wrapper, (), output))

    def _forget_pass(self) -> None:
        """Make FSDP2 treat the next pass as a new pass, after one that raised."""
        state = fsdp_state_of(self._root)
        for each in (state, *param_groups_of(state)):
            mark_idle(each)
        forget_forward_root(state)

    def _run_method(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method of the root between FSDP2's pre- and post-forward hooks, unless a pass is running already."""
        if self._depth:
            return method(*args, **kwargs)
        reset_after_failed_forward(self._root)
        state = fsdp_state_of(self._root)
        args, kwargs = run_pre_forward(state, self._root, args, kwargs)
        if self._cast_inputs is not None:
            args, kwargs = self._cast_inputs(self._root, args, kwargs)
        self._enter(name)
        try:
            output = self._run_pass(self.around_method, self._root, method, *args, **kwargs)
            self._leave(self._root, args, True)
        except BaseException:
            self._leave(self._root, args, None)
            self._forget_pass()
            record_failed_pass(self._root, "forward")
            raise
        return run_post_forward(state, self._root, args, output)

    def _init_root(self, *_: object) -> None:
        """Initialise FSDP2's root before a unit runs on its own; otherwise FSDP2 would make that unit the root."""
        choose_root(fsdp_state_of(self._root))
        self.begin_pass()

    def _run_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the root's forward with its hooks, even if the caller calls ``model.forward(...)`` directly."""
        return self._run_pass(forward, *args, **kwargs) if self._depth else self._root(*args, **kwargs)

    def _run_pass(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a pass; if it fails because it bypasses a unit, raise a ShardError with this cause."""
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if self._has_half_precision and _DIFFERENT_DTYPES.search(str(error)):
                error.add_note(_ABOUT_DTYPES)
            if "DTensor" not in str(error):
                raise
            if self._handles:
                if "mixed torch.Tensor and DTensor" not in str(error):
                    raise
                raise ShardError(
                    f"cannot run {self._name}: a parameter is used outside of the forward of its block or unit, "
                    "where it is sharded, expected parameters of a block to be used in the block's forward. Move the "
                    "computation into the forward of the module that holds the parameter; or pass the module in "
                    "ignored_modules, so that every rank holds its parameters in full."
                ) from error
            self._keep_hooks()
            raise ShardError(
                f"cannot run {self._name}: this pass bypasses the forward of a block, so the block's parameters are "
                "not gathered, expected a call of the block, as in the first pass of this kind. Run it again: from now "
                "on, hooks on submodules gather the blocks. To avoid this error, call register_policy(..., "
                "bypassed=True) before the model is sharded."
            ) from error

    def _keep_hooks(self) -> None:
        """Register the hooks permanently; see [Note: observed pass]."""
        self._are_hooks_needed = True
        self._register_hooks()

    def _enter(self, method: str, *_: object) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self.at_start()
        self._kind = (method, self._root.training, torch.is_grad_enabled())
        if not self._are_hooks_needed and self._kind not in self._kinds_without_hooks:
            self._register_hooks()
        if self._prefetch is not None:
            self._prefetch.start_pass(self._kind)

    def _register_hooks(self) -> None:
        """Register hooks on the modules with direct parameters, before FSDP2's, which free the parameters."""
        if self._handles:
            return
        for module, around in self._units_around.items():
            before = functools.partial(self._before_submodule, around)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            if around:
                after = functools.partial(self._after_submodule, around)
                self._handles.append(module.register_forward_hook(after, prepend=True))

    def _leave(self, _root: object, _inputs: object, output: object) -> None:
        """Close all units at the end of a pass, and remove unneeded hooks; ``output`` is None if it raised."""
        self._depth = max(0, self._depth - 1)  # `_enter` has not run if an earlier pre-hook raised
        if self._depth:
            return
        while self._open:
            self._open.pop(0).close()
        self.at_end()
        if self._bypassed_names:
            names = some(sorted(self._bypassed_names), "unit")
            log("%s: the forward of %s is bypassed; their submodules gather them", self._name, names)
            self._bypassed_names = None
        kind, self._kind = self._kind, None
        if kind is None:
            return
        if self._prefetch is not None:
            self._prefetch.end_pass(kind, completed=output is not None, has_gradients=kind[2])
        if self._are_hooks_needed:
            return
        if output is not None:
            self._kinds_without_hooks.add(kind)
        while self._handles:
            self._handles.pop().remove()

    def _before_submodule(self, around: Sequence[_Unit], module: nn.Module, args: Any, kwargs: Any) -> _Inputs | None:
        changed: _Inputs | None = None
        for unit in around:
            if unit.is_running or unit.is_open:
                continue
            if is_in_backward():
                self._are_hooks_needed = True
                unit.gather_in_backward()
            elif self._depth:
                changed = args, kwargs = self._open_unit(unit, module, args, kwargs)
            else:
                self._check_running(module)
        if module in self._units:  # FSDP2 or `cast_first` casts the inputs of a unit
            return changed
        if around and around[-1].was_bypassed:
            dtype = self._casts.get(around[-1].module)
            cast = None if dtype is None else cast_inputs_to(dtype, args, kwargs)
        else:
            is_cast = self._has_half_precision and needs_own_dtype(module)
            cast = cast_to_own(module, args, kwargs) if is_cast else None
        self._are_hooks_needed |= cast is not None
        return cast or changed

    def _after_submodule(self, around: Sequence[_Unit], module: nn.Module, args: Any, output: Any) -> Any:
        units = [unit for unit in around if (unit.is_open and not unit.is_running) or unit.fills_cache]
        if units and torch.is_grad_enabled():
            output = clone_view_outputs(module, args, output)
            for unit in units:
                unit.gather_for_gradients_of(output)
        return output

    def _open_unit(self, unit: _Unit, module: nn.Module, args: Any, kwargs: Any) -> _Inputs:
        """Open a bypassed unit, and close the open unit of the same ModuleList and all units within that unit."""
        done = {other for other in self._open if other.container is not None and other.container is unit.container}
        for other in [other for other in self._open if other in done or done.intersection(other.outer)]:
            other.close()
            self._open.remove(other)
        self._open.append(unit)
        self._are_hooks_needed = True
        if self.on_bypass is not None and not unit.was_bypassed:
            self.on_bypass(unit.module)
        if self._bypassed_names is not None:
            self._bypassed_names.add(unit.name)
        return unit.open(module, args, kwargs)

    def _check_running(self, module: nn.Module, *_: object) -> None:
        """Raise ShardError if a module with sharded parameters runs outside of passes."""
        if self._depth or is_in_backward() or not any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            return
        if self.begin_pass():
            return
        name = next(name for name, m in self._root.named_modules() if m is module)
        raise ShardError(
            f"cannot run {name} of {self._name}: its parameters are sharded, expected it to be called within the "
            "model's forward or a method that gathers them. Call the model, or add the calling method to "
            "forward_methods; or pass the wrapper whose forward calls it to prepare_model."
        )


class _Unit:
    """A unit, with the state of its current forward pass: whether it is running or bypassed."""

    def __init__(self, module: nn.Module, name: str, container: nn.Module | None, outer: Sequence[_Unit]) -> None:
        self.module, self.name = module, name
        self.outer = outer
        """The units around this one."""
        self.container = container
        """The ModuleList, ModuleDict or Sequential that contains this unit, if any. It has one open unit at most."""
        self.is_running = False
        self.is_open = False
        self.was_bypassed = False
        """Whether its last run bypassed its forward; a recomputation in backward must cast the same inputs."""
        self.fills_cache = False
        """Whether it is running with a cache that another decoder may read; see [Note: cache outputs]."""
        self._on_cache: Callable[[], None] | None = None

    def track(self, on_cache: Callable[[], None] | None) -> list[RemovableHandle]:
        """Register hooks that track whether the unit runs, and call ``on_cache`` if it gets a cache in training."""
        self._on_cache = on_cache
        return [
            self.module.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.module.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self.is_running, self.was_bypassed = True, False
        if self._on_cache is not None and any(map(is_cache, (*args, *kwargs.values()))):
            self.fills_cache = True
            if torch.is_grad_enabled():
                self._on_cache()

    def _end(self, *_: object) -> None:
        self.is_running = self.fills_cache = False
        self.is_open = False  # FSDP2 frees the parameters after this hook

    @property
    def _state(self) -> Any:
        return fsdp_state_of(self.module)

    def open(self, module: nn.Module, args: Any, kwargs: Any) -> _Inputs:
        """Gather the unit before its first submodule runs, and return the inputs with FSDP2's backward hook."""
        args, kwargs = begin_forward(self._state, module, args, kwargs)
        self.is_open = self.was_bypassed = True
        return args, kwargs

    def close(self) -> None:
        """Free the gathered parameters as FSDP2 does after a forward, unless a forward has freed them already."""
        if self.is_open:
            self.is_open = False
            end_forward(self._state, self.module)

    def gather_for_gradients_of(self, output: Any) -> None:
        """Register hooks on an output's tensors; in backward, these hooks all-gather the unit."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(pre_backward_hook(self._state))  # type: ignore[no-untyped-call]

    def gather_in_backward(self) -> None:
        """Gather the unit for submodules that activation checkpointing runs again in backward."""
        state = self._state
        if not is_gathered_for_backward(state):
            pre_backward_hook(state)(None)
        for param_group in param_groups_of(state):
            gather(param_group)


def _find_units_around(
    root: nn.Module, units: Mapping[nn.Module, str], never_bypassed: Iterable[nn.Module], ignored: Iterable[nn.Module]
) -> tuple[dict[nn.Module, list[_Unit]], list[_Unit]]:
    """Return the units on all paths of each module with direct parameters; and all units that can be bypassed."""
    never_bypassed, ignored = set(never_bypassed), set(ignored)
    made: dict[nn.Module, _Unit] = {}
    around: dict[nn.Module, list[_Unit]] = {}

    def visit(module: nn.Module, parent: nn.Module | None, outer: list[_Unit]) -> None:
        if module in around:
            outer = [unit for unit in around[module] if unit in outer]
            if len(outer) == len(around[module]):
                return
        around[module] = outer
        if module in never_bypassed:
            return
        inner = outer
        if module in units:
            container = parent if isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential) else None
            made[module] = made.get(module) or _Unit(module, units[module], container, outer)
            inner = [*outer, made[module]]
        for child in module.children():
            if child not in ignored:
                visit(child, module, inner)

    visit(root, None, [])
    with_parameters = {m: found for m, found in around.items() if any(True for _ in m.parameters(recurse=False))}
    return with_parameters, list(made.values())


def clone_view_outputs(_module: nn.Module, _inputs: object, output: Any) -> Any:
    """Copy outputs of a unit that are views, before FSDP2's own hook runs.

    FSDP2 registers hooks on the outputs of a unit; in backward, these hooks gather the unit. If an output is a view and
    is changed in place later (``logits.div_(temperature)``), autograd silently drops the hook on this output.
    """
    if isinstance(output, torch.Tensor):
        return output.clone() if base_of(output) is not None and output.requires_grad else output
    if isinstance(output, dict):
        for key, value in output.items():
            if (new := clone_view_outputs(_module, _inputs, value)) is not value:
                output[key] = new
    elif isinstance(output, list | tuple):
        values = [clone_view_outputs(_module, _inputs, value) for value in output]
        if any(new is not old for new, old in zip(values, output, strict=True)):
            return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    return output


def find_bypassed_units(
    root: nn.Module, units: Mapping[nn.Module, str], run: Callable[[nn.Module], object], *, ignored: Iterable[nn.Module]
) -> list[str]:
    """Run an unsharded model, and return the names of the units whose submodules ran outside the unit's forward."""
    found: dict[str, None] = {}

    def before(around: Sequence[_Unit], *_: object) -> None:
        found.update((unit.name, None) for unit in around if not unit.is_running)

    units = {module: name for module, name in units.items() if module is not root}
    around, made = _find_units_around(root, units, (), ignored)
    handles = [module.register_forward_pre_hook(functools.partial(before, a)) for module, a in around.items()]
    handles += [handle for unit in made for handle in unit.track(None)]
    try:
        with restored_generators(), torch.no_grad():
            run(root)
    finally:
        for handle in handles:
            handle.remove()
    return list(found)
