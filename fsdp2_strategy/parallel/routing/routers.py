"""Find the modules of a tiny model that choose experts.

Input: a tiny model. Output: a `RouterPlan`: the classes of its routers, and which of their calls of topk is the choice.

[Note: found routers] The tiny model runs, and each call of topk is recorded with the innermost module whose forward is
running. A router's last call chooses for each token, among as many experts for any length of the sequences. Modules
that choose tokens, such as the indexers of sparse attention, choose among more for longer sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fsdp2_strategy.distributed.generators import restored_generators
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.parallel.routing.passes import TOPK, RouterKind, topk_arguments
from fsdp2_strategy.parallel.tiny_config import ORDINARY_TOKENS

LENGTHS = (13, 17)
"""Lengths of the sequences that the tiny model runs; neither of them, nor their doubles, is a number of experts."""
_BATCH = 2
_SEED = 0

NO_EXPERTS = "has no mixture of experts"


@dataclass(frozen=True, kw_only=True)
class RouterPlan:
    """How a model class chooses experts."""

    kinds: dict[str, RouterKind] = field(default_factory=dict)
    """By class name of the routers; empty if the model is refused."""
    refused: str = ""
    """Why choices cannot be replayed: a predicate whose subject is the model."""


def tiny_batch(tiny: Any, length: int) -> torch.Tensor:
    """Return token ids [2, length] for a tiny model; special tokens have larger ids."""
    end = min(getattr(tiny.config.get_text_config(), "vocab_size", ORDINARY_TOKENS), ORDINARY_TOKENS)
    generator = torch.Generator().manual_seed(_SEED + length)
    return torch.randint(min(3, end - 1), end, (_BATCH, length), generator=generator)


_Calls = list[tuple[tuple[int, ...], int]]
"""The calls of topk in the forwards of one module: the shape of the scores, and how many are chosen."""


class _Log(TorchFunctionMode):
    """Record the calls of topk by the innermost module whose forward is running; its methods are hooks of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.forwards: dict[nn.Module, int] = {}
        self.calls: dict[nn.Module, _Calls] = {}

    def enter(self, module: nn.Module, _args: object) -> None:
        self.running.append(module)
        self.forwards[module] = self.forwards.get(module, 0) + 1

    def leave(self, *_: object) -> None:
        self.running.pop()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in TOPK and self.running:
            scores, count = topk_arguments(args, kwargs or {})
            self.calls.setdefault(self.running[-1], []).append((tuple(scores.shape), count))
        return func(*args, **(kwargs or {}))


def _observe(tiny: Any, length: int) -> _Log:
    log = _Log()
    handles = [module.register_forward_pre_hook(log.enter) for module in tiny.modules()]
    handles += [module.register_forward_hook(log.leave) for module in tiny.modules()]
    with log, torch.no_grad(), restored_generators():
        tiny(input_ids=tiny_batch(tiny, length), use_cache=False)
    for handle in handles:
        handle.remove()
    return log


def find_routers(tiny: Any) -> RouterPlan:
    """Find the routers among the modules that call topk, by the shapes of the scores for two lengths."""
    log = _observe(tiny, LENGTHS[0])
    first, second = log.calls, _observe(tiny, LENGTHS[1]).calls
    kinds: dict[str, set[RouterKind | None]] = {}
    routers = [m for m in first if m is not tiny and _chooses_per_token(first[m], second.get(m))]
    if not routers:
        return RouterPlan(refused=without_routers(tiny))
    tiny.train()
    trained = _observe(tiny, LENGTHS[0]).calls
    tiny.eval()
    for module in routers:
        if log.forwards[module] > 1:
            return RouterPlan(refused=f"runs its routers ({class_name(module)}) several times in a forward pass")
        if trained.get(module) != first[module]:
            return RouterPlan(refused=f"has routers ({class_name(module)}) that choose in another way in training")
        kinds.setdefault(class_name(module), set()).add(_kind_of(module, first[module]))
    known: dict[str, RouterKind] = {}
    for name, found in kinds.items():
        kind = next(iter(found))
        if kind is None or len(found) > 1:
            return RouterPlan(refused=f"has routers ({name}) that choose an expert in several steps")
        known[name] = kind
    return RouterPlan(kinds=known)


def _chooses_per_token(calls: _Calls, other: _Calls | None) -> bool:
    """Return whether the last call chooses, for each token, among as many things for both lengths."""
    if other is None or [count for _, count in calls] != [count for _, count in other]:
        return False
    (shape, _), (other_shape, _) = calls[-1], other[-1]
    has_all_tokens = [_rows(shape), _rows(other_shape)] == [_BATCH * length for length in LENGTHS]
    return has_all_tokens and shape[-1] == other_shape[-1]


def _rows(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1])


def _kind_of(module: nn.Module, calls: _Calls) -> RouterKind | None:
    """Return how a router chooses; None if it calls topk for something else than groups of experts before."""
    last, _ = calls[-1]
    experts, tokens = last[-1], _rows(last)
    has_groups = False
    for shape, _ in calls[:-1]:
        is_within = _rows(shape) % tokens == 0 and _rows(shape) // tokens * shape[-1] == experts
        is_group = _rows(shape) == tokens and shape[-1] < experts and experts % shape[-1] == 0
        if not (is_within or is_group):
            return None
        has_groups |= is_group
    named = [name for name, value in vars(module).items() if "expert" in name and value == experts]
    if has_groups and not named:
        return None
    return RouterKind(choice_call=len(calls) - 1, experts_attribute=named[0] if has_groups else None)


def without_routers(tiny: nn.Module) -> str:
    """Return the reason of refusal of a model in which no routers were found."""
    names = sorted({class_name(module) for module in tiny.modules()})
    routers = [name for name in names if name.lower().endswith(("router", "gate", "gating"))]
    experts = [name for name in names if "expert" in name.lower() or "moe" in name.lower().replace("moel", "")]
    if routers or experts:
        modules = ", ".join(routers or experts)
        return f"chooses experts in another way than with torch.topk over all experts ({modules})"
    return NO_EXPERTS
