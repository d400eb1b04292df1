"""Exchange parts of tensors between the ranks that share sequences, with gradients.

Input: this rank's part of tensors. Output: other parts of the same tensors. Each operation is linear, and its backward
is its adjoint: an exchange sends the gradients back, and a gather sums the gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp2_strategy.optim.step_sums import computed_by
from fsdp2_strategy.parallel.sequence.ranks import SequenceRanks


def to_heads(tensors: Sequence[torch.Tensor], ranks: SequenceRanks) -> list[torch.Tensor]:
    """Exchange a part of the sequence with all heads for the full sequence with a part of the heads; collective.

    From [batch, heads, length / ranks, width] to [batch, heads / ranks, length, width]. Heads and widths may differ
    between the tensors; the dtype must be the same: all of them travel in one all-to-all.
    """
    return list(_Exchange.apply(ranks, True, *tensors))  # type: ignore[no-untyped-call]


def to_sequence(tensors: Sequence[torch.Tensor], ranks: SequenceRanks) -> list[torch.Tensor]:
    """Reverse `to_heads`; collective."""
    return list(_Exchange.apply(ranks, False, *tensors))  # type: ignore[no-untyped-call]


def gather_sequence(tensor: torch.Tensor, ranks: SequenceRanks, dim: int = 1) -> torch.Tensor:
    """Concatenate the parts of all ranks along the dimension of the sequence; collective.

    Each rank may use the result in another loss: backward sums the gradients of all ranks.
    """
    full: torch.Tensor = _Gather.apply(tensor, ranks, dim)  # type: ignore[no-untyped-call]
    return full


def gather_results(tensor: torch.Tensor, ranks: SequenceRanks, dim: int = 1) -> torch.Tensor:
    """Gather results from which all ranks compute the same loss; collective; see `optim.step_sums`."""
    full: torch.Tensor = _GatherResults.apply(tensor, ranks, dim)  # type: ignore[no-untyped-call]
    return full


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
        return part / computed_by(ctx.ranks.count), *rest
