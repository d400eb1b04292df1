"""Observe or replace the choices of routers while a model runs.

Input: a model, its routers, and an object that decides what to do with each choice. Output: hooks on the model and on
its routers, which are removed when nothing needs them.

[Note: intercepted choices] A router chooses experts with ``torch.topk`` over scores of all experts. A TorchFunctionMode
is active while the router's forward runs. It returns the replayed indices, and the scores at these indices as values.
All else is the model's own code: it normalises and scales the values, or gathers others at the indices. So gradients
reach the router by the rule of the model, and no rule is repeated here.

[Note: groups of experts] Some routers choose groups of experts first, and mask the scores of all others. Only the last
choice is recorded, because inference engines return no other. In a replay, the groups of the recorded experts are
chosen first, and the remaining ones by their scores. If the recorded choice is the router's own, these are its groups.

[Note: recomputed choices] A block whose activations are recomputed runs its router again in backward, maybe after the
context manager has ended. `recompute_activations` recomputes with the context variables of the forward pass, and the
pass is such a variable. Hooks hold no choices, and are removed when the last pass that needs them is freed. The
checkpointing of transformers is wrapped, so that it does the same.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.hf.library_internals import recompute_in_context
from fsdp2_strategy.model.fsdp_state import class_name, original_class
from fsdp2_strategy.model.state import is_measured_pass
from fsdp2_strategy.sharding.activation_checkpointing import is_cache

TOPK = (torch.topk, torch.Tensor.topk)


@dataclass(frozen=True, kw_only=True)
class RouterKind:
    """How the routers of one class choose experts."""

    choice_call: int
    """Index of the call of topk that chooses experts, among the calls of one forward."""
    experts_attribute: str | None = None
    """Name of the module's attribute with the number of experts; None if no groups are chosen before."""


@dataclass(frozen=True)
class Router:
    """A module that chooses experts."""

    module: nn.Module
    kind: RouterKind


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the arguments of a forward pass say of its tokens."""

    size: int
    """Number of sequences."""
    length: int
    """Number of tokens of each sequence that this pass computes."""
    past: int
    """Number of tokens before them, whose keys and values are cached."""
    input_ids: torch.Tensor | None
    """[size, length]; None if the model gets embeddings."""
    attention_mask: torch.Tensor | None
    """[size, past + length], bool; None if the model gets none, or one of another shape."""
    device: torch.device

    @classmethod
    def of(cls, root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        """Return what the arguments of a model's forward say; raise without input_ids and inputs_embeds."""
        # The forward of the instance may be replaced by one with other parameters.
        names = [name for name in inspect.signature(original_class(root).forward).parameters if name != "self"]
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
        tokens = ids if ids is not None else embeddings
        if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
            raise RolloutError(
                f"cannot follow the routing of {class_name(root)}: its forward got no input_ids [batch, length], "
                "expected them or inputs_embeds. Pass them by name."
            )
        length, mask = tokens.shape[1], given.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.shape[1] < length:
            mask = None
        past = _cached_tokens(given) if mask is None else mask.shape[1] - length
        return cls(
            size=tokens.shape[0],
            length=length,
            past=past,
            input_ids=ids,
            attention_mask=None if mask is None else mask.bool(),
            device=tokens.device,
        )


class Pass(Protocol):
    """One forward pass of a model, and what happens to its choices."""

    def choose(self, name: str, scores: torch.Tensor, own: Any) -> Any:
        """Return the result of topk in place of the router's own one; scores are [..., experts]."""

    def groups(self, name: str, scores: torch.Tensor, count: int, experts: int) -> torch.Tensor | None:
        """Return scores of groups [..., groups] of which the first ``count`` are chosen; None for those given."""

    def end(self) -> None:
        """Raise an error if something was wrong in this pass."""


_running: ContextVar[tuple[tuple[Session, Pass], ...]] = ContextVar("routing_passes", default=())
"""The passes that are running, each with its session: so the hooks of the routers live as long."""


class Session:
    """Hooks that open a pass when a model runs, and intercept the choices of its routers, which are given by name."""

    def __init__(self, root: nn.Module, routers: Mapping[str, Router], open_pass: Callable[[Batch], Pass]) -> None:
        self._handles: list[RemovableHandle] = []
        self._passes: list[Pass] = []
        self._open_pass = open_pass
        self._root_handles = [
            root.register_forward_pre_hook(self._begin, with_kwargs=True),
            root.register_forward_hook(self._check),
            root.register_forward_hook(self._end, always_call=True),
        ]
        for block in root.modules():
            recompute_in_context(block)
        for name, router in routers.items():
            self._handles += _intercept(id(self), name, router)
        weakref.finalize(self, _remove, self._handles)

    def close(self) -> None:
        """Remove the hooks of the model; those of routers stay while a block may be recomputed."""
        _remove(self._root_handles)

    def _begin(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_measured_pass():
            return
        one = self._open_pass(Batch.of(root, args, kwargs))
        self._passes.append(one)
        _running.set((*_running.get(), (self, one)))

    def _check(self, _root: nn.Module, _args: object, _output: object) -> None:
        if self._passes and not is_measured_pass():
            self._passes[-1].end()

    def _end(self, _root: nn.Module, _args: object, _output: object) -> None:
        if self._passes and not is_measured_pass():
            ended = self._passes.pop()
            _running.set(tuple(entry for entry in _running.get() if entry[1] is not ended))


def _intercept(key: int, name: str, router: Router) -> list[RemovableHandle]:
    """Register the hooks of a router; they act on passes of the session with this key only."""
    active: list[ChoiceMode | None] = []
    kind = router.kind

    def enter(module: nn.Module, _args: object) -> None:
        one = {id(session): each for session, each in _running.get()}.get(key)
        mode = None if one is None else ChoiceMode(name, kind, getattr(module, kind.experts_attribute or "", 0), one)
        active.append(mode)
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(_module: nn.Module, _args: object, _output: object) -> None:
        mode = active.pop() if active else None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    return [
        router.module.register_forward_pre_hook(enter),
        router.module.register_forward_hook(leave, always_call=True, prepend=True),
    ]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class ChoiceMode(TorchFunctionMode):
    """Pass the choice of a router to a pass, and return the choice of the pass; see [Note: intercepted choices]."""

    def __init__(self, name: str, kind: RouterKind, experts: int, one: Pass) -> None:
        super().__init__()
        self.name, self.kind, self.experts, self.one = name, kind, experts, one
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in TOPK:
            return func(*args, **kwargs)
        call, self.calls = self.calls, self.calls + 1
        scores, count = topk_arguments(args, kwargs)
        if call == self.kind.choice_call:
            with torch.no_grad():
                own = func(*args, **kwargs)
            return self.one.choose(self.name, scores, own)
        is_group = call < self.kind.choice_call and scores.shape[-1] < self.experts
        if is_group:
            forced = self.one.groups(self.name, scores, count, self.experts)
            if forced is not None:
                indices = forced.topk(count, dim=-1).indices
                return topk_result(scores, indices)
        return func(*args, **kwargs)


def topk_result(scores: torch.Tensor, indices: torch.Tensor) -> Any:
    """Return the result of topk with other indices: the scores at the indices as values."""
    return torch.return_types.topk((scores.gather(-1, indices), indices))


def topk_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
    """Return the scores and the number of largest ones of a call of topk."""
    named = dict(zip(("input", "k"), args, strict=False)) | dict(kwargs)
    return named["input"], named["k"]


def _cached_tokens(given: Mapping[str, Any]) -> int:
    cache = next((value for value in given.values() if is_cache(value)), None)
    return 0 if cache is None else int(cache.get_seq_length())
