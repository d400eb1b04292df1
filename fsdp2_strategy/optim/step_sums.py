"""Sum the losses and tokens of an optimizer step over micro-batches and ranks, for `StepResult`.

Input: the loss and the numbers of tokens that `backward` gets in each micro-batch. Output: the numbers that the
all-reduce of the gradient norm carries, and the loss and tokens that follow from their sums.

[Note: values of a step] Loss and tokens of a step are sums over micro-batches and ranks. `backward` adds them up on the
device, in `MicroBatchSums`, and `optimizer_step` sends them with the gradient norm: one all-reduce of a few numbers and
one host synchronisation, as for the norm alone. The reported loss is the function whose gradient the step uses.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2_strategy.errors import StepError


@dataclass
class MicroBatchSums:
    """Sums over this rank's micro-batches of one step; see [Note: values of a step]."""

    loss: torch.Tensor | None = None
    """Sum of loss x factor, without the loss scale; one element, on the device of the loss."""
    tokens: int | torch.Tensor | None = None
    """Sum of the ``num_tokens`` that were given; None if none were."""
    items: float | None = None
    """The last ``num_items_in_batch``; None if there was none."""

    @torch.no_grad()
    def add(
        self, loss: torch.Tensor, factor: float, num_tokens: int | torch.Tensor | None, items: float | None
    ) -> None:
        """Add one micro-batch; not collective, and does not synchronise with the device."""
        loss = loss.detach().reshape(()).double() * factor
        self.loss = loss if self.loss is None else self.loss + loss
        if isinstance(num_tokens, torch.Tensor):
            num_tokens = num_tokens.detach().reshape(()).to(torch.int64, copy=True)  # the caller may reuse it
        if num_tokens is not None:
            self.tokens = num_tokens if self.tokens is None else self.tokens + num_tokens
        self.items = self.items if items is None else items

    def values(self) -> list[float | torch.Tensor]:
        """Return the numbers that `totals` needs the sums of, over all ranks."""
        return [
            math.nan if self.loss is None else self.loss,
            0 if self.tokens is None else self.tokens,
            self.tokens is not None,
            self.items or 0.0,
            self.items is not None,
        ]

    @staticmethod
    def totals(sums: Sequence[float], ranks: int) -> tuple[float, int | None]:
        """Return loss and tokens of the step, from the sums of `values` over ``ranks`` ranks."""
        loss, tokens, ranks_with_tokens, items, ranks_with_items = sums
        if ranks_with_tokens:
            return loss / ranks, round(tokens) if ranks_with_tokens == ranks else None
        return loss / ranks, round(items / ranks_with_items) if ranks_with_items else None


def checked_tokens(num_tokens: Any) -> int | torch.Tensor | None:
    """Return a number of tokens as an int, or a tensor unchanged: reading its value would synchronise with the device.

    Raises:
        StepError: it is not an integer of at least 0 or a tensor of one element.
    """
    if num_tokens is None:
        return None
    if isinstance(num_tokens, torch.Tensor):
        if num_tokens.numel() == 1:
            return num_tokens
        shown = f"a tensor of the shape {list(num_tokens.shape)}"
    else:
        try:
            if (count := operator.index(num_tokens)) >= 0:
                return int(count)
        except TypeError:
            pass
        shown = repr(num_tokens)
    raise StepError(
        f"cannot count the tokens: num_tokens is {shown}, expected the number of tokens of this rank's micro-batch, an "
        "integer of at least 0 or a tensor of one element. Pass attention_mask.sum(), for example."
    )
