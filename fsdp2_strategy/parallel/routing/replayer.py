"""Replace the choices of routers by recorded ones.

Input: a `Routing`, and the passes that a `Session` opens. Output: the results of topk for the recorded choices.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.torch_internals import is_in_backward
from fsdp2_strategy.errors import RolloutError, some
from fsdp2_strategy.model.fsdp_state import is_sharded
from fsdp2_strategy.model.ranks import on_ranks_of
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.parallel.routing.passes import Batch, topk_result
from fsdp2_strategy.parallel.routing.recorded import Routing


class Replayer:
    """Open passes that replay a routing."""

    def __init__(self, model: nn.Module, routing: Routing) -> None:
        self.model, self.routing = model, routing
        largest = torch.stack([choices.max().long() for choices in routing.layers.values()]).tolist()
        self.largest = dict(zip(routing.layers, largest, strict=True))
        """The largest index of each layer."""
        self.passes = 0

    def open(self, batch: Batch) -> _ReplayedPass:
        """Return a new pass."""
        self.passes += 1
        return _ReplayedPass(self, batch)


class _ReplayedPass:
    """Choices of one forward pass, taken from a routing.

    A problem on this rank is kept, and the pass goes on with the model's own choices, because the other ranks wait for
    the collectives of the pass. All ranks raise the error at its end.
    """

    def __init__(self, replayer: Replayer, batch: Batch) -> None:
        self.routing, self.largest, self.batch = replayer.routing, replayer.largest, batch
        self._model: nn.Module | None = replayer.model
        self.problem: RolloutError | None = None
        self.is_wrong: list[torch.Tensor] = []
        self.ran: set[str] = set()
        try:
            self.columns = self._columns()
        except RolloutError as error:
            self.problem = error

    def _columns(self) -> torch.Tensor:
        """Return [size, length]: the place of each token's choice along the recorded sequence."""
        batch, total = self.batch, self.batch.past + self.batch.length
        mask = batch.attention_mask
        if mask is None:
            mask = torch.ones(batch.size, total, dtype=torch.bool, device=batch.device)
        ids = None if batch.past else batch.input_ids
        return self.routing.columns_for(ids, mask)[:, batch.past :]

    def choose(self, name: str, scores: torch.Tensor, own: Any) -> Any:
        if self.problem is None and not is_in_backward():
            self.problem = self._problem(name, scores, own)
            self.ran.add(name)
        if self.problem is not None:
            return topk_result(scores, own.indices)
        recorded = self._recorded(name, scores, own.indices.shape[-1])
        return topk_result(scores, torch.where(recorded >= 0, recorded, own.indices))

    def groups(self, name: str, scores: torch.Tensor, count: int, experts: int) -> torch.Tensor | None:
        choices = self.routing.layers.get(name)
        if choices is None or self.problem is not None or scores.shape[:-1].numel() != self.columns.numel():
            return None
        with torch.no_grad():
            group_count = scores.shape[-1]
            recorded = self._recorded(name, scores, choices.shape[-1])
            groups = torch.where(recorded >= 0, recorded * group_count // experts, group_count).clamp(max=group_count)
            is_needed = pad(torch.zeros_like(scores, dtype=torch.bool), (0, 1)).scatter(-1, groups, True)[..., :-1]
            if not is_in_backward():
                self.is_wrong.append((is_needed.sum(-1) > count).any())
            return scores.masked_fill(is_needed, torch.inf)

    def _recorded(self, name: str, scores: torch.Tensor, count: int) -> torch.Tensor:
        """Return the recorded choices [..., k], int64, for scores [..., experts or groups]."""
        choices = pad(self.routing.layers[name].to(scores.device), (0, 0, 0, 1), value=-1)
        columns = self.columns.to(scores.device)[..., None].expand(-1, -1, choices.shape[-1])
        return choices.gather(1, columns).long().view(*scores.shape[:-1], count)

    def _problem(self, name: str, scores: torch.Tensor, own: Any) -> RolloutError | None:
        rows, (experts, count) = scores.shape[:-1].numel(), (scores.shape[-1], own.indices.shape[-1])
        choices = self.routing.layers.get(name)
        if choices is None:
            return mismatch(f"{name} is not in the routing", f"the routers {some(sorted(self.routing.layers))} only")
        if name in self.ran or rows != self.columns.numel():
            what = "a second choice" if name in self.ran else f"choices for {rows} tokens"
            return mismatch(f"{name} makes {what} in a pass", f"one for each of {self.columns.numel()} tokens")
        if choices.shape[-1] != count:
            return mismatch(f"{name} has {choices.shape[-1]} experts for each token", f"{count}, as the model chooses")
        if self.largest[name] >= experts:
            return mismatch(f"{name} has the expert {self.largest[name]}", f"indices below {experts}")
        return None

    def end(self) -> None:
        """Raise the problem of this pass on every rank."""
        model, self._model = self._model, None
        if model is None:
            return
        with ExitStack() as stack:
            agree_on_ranks_of(stack, model, "replay routing")
            if self.problem is not None:
                raise self.problem
            if missing := sorted(self.routing.layers.keys() - self.ran):
                raise mismatch(f"{some(missing, 'router')} of the routing ran in no forward", "a choice of each")
            if self.is_wrong and bool(torch.stack(self.is_wrong).any()):
                raise mismatch(
                    "the experts of a token are in more groups than the router chooses", "experts that it can choose"
                )


def mismatch(actual: str, expected: str) -> RolloutError:
    """Return the error for a routing of another model."""
    return RolloutError(
        f"cannot replay routing: {actual}, expected {expected}. Replay the routing of a model with the same "
        "configuration."
    )


def agree_on_ranks_of(stack: ExitStack, model: nn.Module, action: str) -> None:
    """Make all ranks of a sharded model raise if one of them raises in the rest of the stack."""
    if is_sharded(model):
        stack.enter_context(on_ranks_of(unwrap_model(model)))
        stack.enter_context(all_or_none(action, RolloutError))
