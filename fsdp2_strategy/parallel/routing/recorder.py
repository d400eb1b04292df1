"""Record the choices of the forward passes of a model.

Input: the choices of routers, in the passes that a `Session` opens. Output: a `Routing`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.torch_internals import is_in_backward
from fsdp2_strategy.errors import RolloutError, counted, some
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.parallel.routing.passes import Batch, topk_result
from fsdp2_strategy.parallel.routing.recorded import Routing, choice_dtype


class Recorder:
    """Collect the passes of a model, and concatenate them."""

    def __init__(self, root: nn.Module) -> None:
        self.name = class_name(root)
        self.batches: list[list[_RecordedPass]] = []

    def open(self, batch: Batch) -> _RecordedPass:
        """Return a new pass, which continues the last batch if keys and values are cached."""
        one = _RecordedPass(self.name, batch)
        if not batch.past:
            self.batches.append([one])
            return one
        recorded = sum(each.batch.length for each in self.batches[-1]) if self.batches else 0
        size = self.batches[-1][0].batch.size if self.batches else 0
        if (recorded, size) != (batch.past, batch.size):
            raise RolloutError(
                f"cannot record routing: a pass continues {counted(batch.past, 'cached token')} of "
                f"{counted(batch.size, 'sequence')}, expected {recorded} of {size}, as recorded so far. Begin to "
                "record before the cache is filled, and generate without an assistant."
            )
        self.batches[-1].append(one)
        return one

    def routing(self) -> Routing:
        """Return the choices of all passes so far."""
        if not self.batches:
            raise RolloutError(
                f"cannot record routing: {self.name} ran no forward pass, expected one at least. Run the model, or "
                "generate, inside of the block of record_routing."
            )
        return Routing.cat([_concatenated(self.name, passes) for passes in self.batches])


class _RecordedPass:
    """The choices of one forward pass."""

    def __init__(self, name: str, batch: Batch) -> None:
        self.name, self.batch = name, batch
        self.layers: dict[str, torch.Tensor] = {}

    def choose(self, name: str, scores: torch.Tensor, own: Any) -> Any:
        """Record the router's own choice, and return it."""
        result = topk_result(scores, own.indices)
        if is_in_backward():
            return result
        rows, expected = scores.shape[:-1].numel(), self.batch.size * self.batch.length
        if name in self.layers or rows != expected:
            what = "a second choice" if name in self.layers else f"choices for {rows} tokens"
            raise RolloutError(
                f"cannot record routing: {name} of {self.name} made {what}, expected one for each of {expected} "
                "tokens. Record one forward pass at a time, of a model that passes all tokens to its routers."
            )
        choices = own.indices.to(choice_dtype(scores.shape[-1]))
        self.layers[name] = choices.reshape(self.batch.size, self.batch.length, -1)
        return result

    def groups(self, *_: object) -> None:
        """Leave the router's own choice of groups."""

    def end(self) -> None:
        """Accept the pass."""


def _concatenated(model_name: str, passes: list[_RecordedPass]) -> Routing:
    """Return the routing of passes that continue each other."""
    last, names = passes[-1].batch, passes[0].layers.keys()
    if not names or any(one.layers.keys() != names for one in passes):
        missing = sorted({name for one in passes for name in one.layers} - set(passes[-1].layers))
        raise RolloutError(
            f"cannot record routing: in the last pass of {model_name}, {some(missing, 'router')} made no choices, "
            "expected the same routers in each pass. Record passes that have run completely."
        )
    layers = {name: torch.cat([one.layers[name] for one in passes], dim=1) for name in names}
    ids = [one.batch.input_ids for one in passes]
    mask = last.attention_mask
    if mask is not None:
        layers = {name: choices.masked_fill(~mask[..., None], -1) for name, choices in layers.items()}
    known = [each for each in ids if each is not None]
    return Routing(layers, torch.cat(known, dim=1) if len(known) == len(ids) else None, mask)
