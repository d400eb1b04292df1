"""Sum the losses and tokens of an optimizer step over micro-batches and ranks, for `StepResult`.

Input: the loss and the numbers of tokens that `backward` gets in each micro-batch. Output: the numbers that the
all-reduce of the gradient norm carries, and the loss and tokens that follow from their sums.

[Note: values of a step] Loss and tokens of a step are sums over micro-batches and ranks. `backward` adds them up on the
device, in `MicroBatchSums`, and `optimizer_step` sends them with the gradient norm: one all-reduce of a few numbers and
one host synchronisation, as for the norm alone. The reported loss is the function whose gradient the step uses.

[Note: shared losses] Ranks that share sequences may each compute the loss of their part, or all compute the loss of
full sequences from gathered results. For a mean over ranks, both are the same. A sum over ranks would count the second
kind once per rank. It is noticed in the backward pass, because its gradient passes through the gather, which calls
`computed_by` and divides the gradient. So tokens of the data count once in both kinds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2_strategy.errors import StepError, counted


@dataclass
class MicroBatchSums:
    """Sums over this rank's micro-batches of one step; see [Note: values of a step]."""

    loss: torch.Tensor | None = None
    """Sum of loss x factor, without the loss scale; one element, on the device of the loss."""
    tokens: float | torch.Tensor | None = None
    """Sum of the ``num_tokens`` that were given; None if none were."""
    items: float | torch.Tensor | None = None
    """The last ``num_items_in_batch``; None if there was none. A tensor if it is on an accelerator, where it stays."""
    passed_items: tuple[float | None, ...] = ()
    """The ``num_items_in_batch`` of each backward pass, NaN for a tensor of an accelerator; () if none was given."""
    own_items: float | torch.Tensor | None = None
    """Sum of the ``num_items`` that were given; None if none were."""

    @property
    def has_items(self) -> bool:
        """Whether ``num_items`` was given."""
        return self.own_items is not None

    @torch.no_grad()
    def add(
        self,
        loss: torch.Tensor,
        factor: float | torch.Tensor,
        num_tokens: int | torch.Tensor | None,
        items: float | torch.Tensor | None,
        num_items: int | torch.Tensor | None,
        *,
        copies: int = 1,
    ) -> None:
        """Add one micro-batch that ``copies`` ranks have computed; does not synchronise with the device."""
        is_summed = items is not None or num_items is not None
        loss = loss.detach().reshape(()).double() * (factor / copies if is_summed else factor)
        self.loss = loss if self.loss is None else self.loss + loss
        self.tokens = _plus(self.tokens, num_tokens, copies)
        self.own_items = _plus(self.own_items, num_items, copies)
        if items is not None or self.passed_items:
            self.passed_items += (math.nan if isinstance(items, torch.Tensor) else items,)
        self.items = self.items if items is None else items

    def values(self) -> list[float | torch.Tensor]:
        """Return the numbers that `totals` needs the sums of, over all ranks."""
        return [
            math.nan if self.loss is None else self.loss,
            0 if self.tokens is None else self.tokens,
            self.tokens is not None,
            0.0 if self.items is None else self.items,
            self.items is not None,
            0.0 if self.items is None else self.items * self.items,
            0 if self.own_items is None else self.own_items,
            self.own_items is not None,
            math.nan if self.loss is None else self.loss * self.loss,
        ]

    @staticmethod
    def are_losses_equal(sums: Sequence[float], ranks: int) -> bool:
        """Return whether the loss was the same on all ranks, and not 0, from the sums of `values` over them.

        By the Cauchy-Schwarz inequality, (number of ranks) x sum(loss²) = sum(loss)² only if all losses are equal. The
        tolerance is for rounding: losses of different batches differ by more.
        """
        total, squares = sums[0], sums[-1]
        return ranks > 1 and total != 0 and math.isclose(ranks * squares, total**2, rel_tol=1e-13)

    @staticmethod
    def totals(sums: Sequence[float], ranks: int, copies: int = 1) -> tuple[float, int | None, float]:
        """Return the loss, tokens and gradient divisor of the step; see [Note: gradient scale] in `optim.step`.

        ``sums`` are those of `values` over ``ranks`` ranks; ``copies`` ranks, which share layers, computed each batch.
        """
        loss, tokens, ranks_with_tokens, items, ranks_with_items, squares, own_items, ranks_with_own_items, _ = sums
        divisor = 1.0
        if ranks_with_items:
            # Numbers of the host are compared before; of tensors, only the sums are known: Cauchy-Schwarz, as above.
            mean, is_equal = items / ranks_with_items, math.isclose(ranks_with_items * squares, items**2, rel_tol=1e-13)
            if not (0 < mean < math.inf and is_equal):
                raise StepError(
                    f"cannot step: the mean of num_items_in_batch over the ranks is {mean:g}, and the numbers are "
                    f"{'' if is_equal else 'not '}equal, expected the same number on all ranks, more than 0 and "
                    "finite: that of the items in all micro-batches of all ranks in this step. Sum it over the ranks "
                    "first, for example with strategy.all_reduce(items, 'sum')."
                )
        if ranks_with_own_items:
            if ranks_with_own_items != ranks or not own_items > 0:
                raise StepError(
                    f"cannot step: num_items was passed on {ranks_with_own_items:.0f} of {counted(ranks, 'rank')}, and "
                    f"its sum is {own_items / copies:.0f}, expected all ranks and more than 0. Pass it on every rank, "
                    "0 where a micro-batch has no items."
                )
            divisor = own_items / ranks
        loss /= ranks * divisor
        if ranks_with_tokens:
            return loss, round(tokens / copies) if ranks_with_tokens == ranks else None, divisor
        if ranks_with_own_items:
            return loss, round(own_items / copies), divisor
        return loss, round(items / ranks_with_items) if ranks_with_items else None, divisor


def _plus(
    total: float | torch.Tensor | None, count: int | torch.Tensor | None, copies: int
) -> float | torch.Tensor | None:
    """Add a count of which each of ``copies`` ranks adds a fraction; None means that nothing was counted."""
    added: float | torch.Tensor | None = count
    if isinstance(count, torch.Tensor):
        # A copy, because the caller may reuse it. Ranks that share sequences have fractions of the number.
        is_fraction = count.is_floating_point() or copies > 1
        added = count.detach().reshape(()).to(torch.float64 if is_fraction else torch.int64, copy=True)
    if added is None:
        return total
    added = added if copies == 1 else added / copies
    return added if total is None else total + added


def checked_tokens(num_tokens: Any, name: str = "num_tokens") -> int | torch.Tensor | None:
    """Return a number of tokens as an int, or a tensor unchanged: reading its value would synchronise."""
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
        f"cannot count the tokens: {name} is {shown}, expected the number of tokens of this rank's micro-batch, an "
        "integer of at least 0 or a tensor of one element. Pass attention_mask.sum(), for example."
    )


@dataclass
class SharedLoss:
    """What is known of the loss of a backward pass; see [Note: shared losses]."""

    is_summed: bool
    """Whether the losses of all ranks are summed; if not, their mean is taken."""
    copies: int = 1
    """Number of ranks that have computed this loss; known after the backward pass."""


_running: list[SharedLoss] = []


@contextmanager
def shared_loss(*, is_summed: bool) -> Iterator[SharedLoss]:
    """Run a backward pass in this block, so that a loss that several ranks have computed counts once in a sum."""
    loss = SharedLoss(is_summed)
    _running.append(loss)  # no context variable: autograd has threads of its own
    try:
        yield loss
    finally:
        _running.pop()


def computed_by(count: int) -> int:
    """Note that several ranks have computed the running loss; return the number that its gradient is divided by."""
    if not _running:
        return 1
    _running[-1].copies = count
    return count if _running[-1].is_summed else 1
