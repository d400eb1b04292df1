"""Combine what parts of the vocabulary contribute to a log-softmax: parts in turn, and parts of other ranks.

Input: the logits of some tokens of the vocabulary. Output: sums from which the log-softmax over all tokens follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp2_strategy.distributed.torch_internals import all_gather_single


@dataclass(frozen=True)
class Vocabulary:
    """The part of the vocabulary that this rank holds."""

    group: dist.ProcessGroup | None
    """The ranks that hold successive parts; None if this rank holds the full vocabulary."""
    first: int
    """The first token of this rank's part."""
    size: int
    """Number of tokens in this rank's part."""
    total: int
    """Number of tokens in the vocabulary."""

    @classmethod
    def of(cls, weight: torch.Tensor, group: dist.ProcessGroup | None) -> Vocabulary:
        """Return the part for the weight of a head; collective over the group."""
        size = weight.shape[0]
        if group is None:
            return cls(None, 0, size, size)
        counts = weight.new_zeros(dist.get_world_size(group), dtype=torch.int64)
        counts[dist.get_rank(group)] = size
        dist.all_reduce(counts, group=group)
        sizes = counts.tolist()
        return cls(group, sum(sizes[: dist.get_rank(group)]), size, sum(sizes))

    def combine(self, sums: Sums) -> Sums:
        """Return the sums over the full vocabulary for those over this rank's part; collective over the group."""
        if self.group is None:
            return sums
        packed = sums.pack()
        parts = packed.new_empty((dist.get_world_size(self.group) * len(packed), *packed.shape[1:]))
        all_gather_single(parts, packed, group=self.group)
        return Sums.combine([Sums(*part) for part in parts.view(-1, *packed.shape)])


@dataclass(frozen=True)
class Sums:
    """Sums over some tokens of the vocabulary, from which the log-softmax follows; each [rows]."""

    largest: torch.Tensor
    """The largest logit."""
    exponentials: torch.Tensor
    """The sum of e^(logit - largest)."""
    weighted: torch.Tensor
    """The sum of (logit - largest) e^(logit - largest); 0 if no entropies are computed."""
    target: torch.Tensor
    """The logit of the target, or -inf if it is not among the tokens."""

    @classmethod
    def over(cls, logits: torch.Tensor, targets: torch.Tensor, *, entropy: bool) -> Sums:
        """Compute the sums over a chunk of logits, and overwrite it; targets are counted from its first token."""
        at, is_inside = positions(targets, logits.shape[1])
        target = logits.gather(-1, at).squeeze(-1).masked_fill_(~is_inside, -math.inf)
        largest = logits.amax(dim=-1).clamp_(min=torch.finfo(logits.dtype).min)
        subtract(logits, largest[:, None])
        exponentials = logits.exp() if entropy else logits.exp_()
        sums = exponentials.sum(dim=-1)
        weighted = exponentials.mul_(logits).sum(dim=-1) if entropy else torch.zeros_like(sums)
        return cls(largest, sums, weighted, target)

    @classmethod
    def over_none(cls, like: torch.Tensor) -> Sums:
        """Return the sums over no token, each like ``like``."""
        zeros, lowest = torch.zeros_like(like), torch.full_like(like, torch.finfo(like.dtype).min)
        return cls(lowest, zeros, zeros, torch.full_like(like, -math.inf))

    @classmethod
    def combine(cls, parts: Sequence[Sums]) -> Sums:
        """Return the sums over all tokens for those over successive parts of them."""
        largest, exponentials, weighted, target = torch.stack([part.pack() for part in parts]).unbind(dim=1)
        total = largest.amax(dim=0)
        below = subtract(largest, total)
        scale = below.exp()
        weighted = scale * weighted + below * scale * exponentials
        return cls(total, (scale * exponentials).sum(dim=0), weighted.sum(dim=0), target.amax(dim=0))

    def pack(self) -> torch.Tensor:
        """Return all sums as one tensor [4, rows]."""
        return torch.stack([self.largest, self.exponentials, self.weighted, self.target])


def positions(targets: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the targets are in a chunk [rows, 1], and whether they are in it [rows]."""
    return targets.clamp(0, width - 1)[:, None], (targets >= 0) & (targets < width)


def subtract(logits: torch.Tensor, *amounts: torch.Tensor) -> torch.Tensor:
    """Subtract numbers from logits in place, but keep their exponentials normal numbers; return the logits.

    Computing with subnormal ones takes up to a hundred times as long on a CPU. Those that are raised are smaller than
    the rounding of the sum by many orders of magnitude.
    """
    for amount in amounts:
        logits -= amount
    return logits.clamp_(min=math.log(torch.finfo(logits.dtype).tiny) / 2)
