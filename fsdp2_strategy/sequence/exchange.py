"""Exchange parts of tensors between the ranks that share sequences, with gradients.

Input: this rank's part of tensors. Output: other parts of the same tensors. Each operation is linear, and its backward
is its adjoint: an exchange sends the gradients back, and a gather sums the gradients of all ranks.

[Note: shared losses] Ranks that share sequences may each compute the loss of their part, or all compute the loss of
full sequences from gathered results. For a mean over ranks, both are the same. A sum over ranks would count the second
kind once per rank. `shared_loss` notices it in the backward pass, because its gradient passes through `gather_results`,
and divides it by the number of these ranks. So tokens of the data count once in both kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2_strategy.sequence.ranks import SequenceRanks


def to_heads(tensors: Sequence[torch.Tensor], ranks: SequenceRanks) -> list[torch.Tensor]:
    """Exchange a part of the sequence with all heads for the full sequence with a part of the heads; collective.

    All tensors travel in one all-to-all.

    Args:
        tensors: each [batch, heads, length / ranks, width], with a number of heads that the ranks divide. Heads and
            widths may differ; the dtype must be the same.
        ranks: the ranks that share the sequences.

    Returns:
        Tensors [batch, heads / ranks, length, width].
    """
    apply: Any = _Exchange.apply
    return list(apply(ranks, True, *tensors))


def to_sequence(tensors: Sequence[torch.Tensor], ranks: SequenceRanks) -> list[torch.Tensor]:
    """Reverse `to_heads`; collective."""
    apply: Any = _Exchange.apply
    return list(apply(ranks, False, *tensors))


def gather_sequence(tensor: torch.Tensor, ranks: SequenceRanks, dim: int = 1) -> torch.Tensor:
    """Concatenate the parts of all ranks along the dimension of the sequence; collective.

    Each rank may use the result in another loss: backward sums the gradients of all ranks.
    """
    apply: Any = _Gather.apply
    full: torch.Tensor = apply(tensor, ranks, dim)
    return full


def gather_results(tensor: torch.Tensor, ranks: SequenceRanks, dim: int = 1) -> torch.Tensor:
    """Gather results from which all ranks compute the same loss; collective; see [Note: shared losses]."""
    apply: Any = _GatherResults.apply
    full: torch.Tensor = apply(tensor, ranks, dim)
    return full


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


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: SequenceRanks, is_to_heads: bool, *tensors: torch.Tensor) -> Any:
        ctx.ranks, ctx.is_to_heads = ranks, is_to_heads
        return _exchange(tensors, ranks, is_to_heads=is_to_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *_exchange(gradients, ctx.ranks, is_to_heads=not ctx.is_to_heads)


def _exchange(tensors: Sequence[torch.Tensor], ranks: SequenceRanks, *, is_to_heads: bool) -> tuple[torch.Tensor, ...]:
    """Split each tensor [batch, heads, length, width] along one of the two inner dimensions, and join the other."""
    split, joined = (1, 2) if is_to_heads else (2, 1)
    parts = [torch.unflatten(tensor, split, (ranks.count, -1)).movedim(split, 0) for tensor in tensors]
    received = ranks.all_to_all(torch.cat([part.reshape(ranks.count, -1) for part in parts], dim=1))
    flat = torch.split(received, [part[0].numel() for part in parts], dim=1)
    # Row i of the received tensors is the part of rank i of the dimension that is joined.
    return tuple(
        own.reshape(part.shape).movedim(0, joined).flatten(joined, joined + 1)
        for own, part in zip(flat, parts, strict=True)
    )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: SequenceRanks, dim: int) -> torch.Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return ranks.all_gather(tensor.movedim(dim, 0).contiguous()).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        part = ctx.ranks.reduce_scatter(gradient.movedim(ctx.dim, 0).contiguous())
        return part.movedim(0, ctx.dim), None, None


class _GatherResults(_Gather):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        part, *rest = _Gather.backward(ctx, gradient)
        if _running:
            _running[-1].copies = ctx.ranks.count
            if _running[-1].is_summed:
                part = part / ctx.ranks.count
        return part, *rest
