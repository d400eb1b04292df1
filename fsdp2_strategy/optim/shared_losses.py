"""Count a loss that several ranks compute once in a sum over ranks.

Input: a backward pass, and what runs in it. Output: how many ranks have computed its loss.

[Note: shared losses] Ranks that share sequences may each compute the loss of their part, or all compute the loss of
full sequences from gathered results. For a mean over ranks, both are the same. A sum over ranks would count the second
kind once per rank. It is noticed in the backward pass, because its gradient passes through the gather, which calls
`computed_by` and divides the gradient. So tokens of the data count once in both kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


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
