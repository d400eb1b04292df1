"""Compare the log-probabilities of a trainer and of an inference engine, token by token.

Input: log-probabilities of the same tokens, and a mask. Output: sums that can be added, and metrics over all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fsdp2_strategy.distributed.collectives import all_reduce
from fsdp2_strategy.distributed.lost_ranks import collective


@dataclass(frozen=True)
class LogProbDifferences:
    """Sums of the differences between a trainer's and an engine's log-probabilities over some tokens of this rank.

    Add the objects of several micro-batches with ``+``. Neither the sum nor the constructor waits for the device;
    `metrics` does, once.
    """

    sums: torch.Tensor
    """[6], float64: number of tokens; sums of the absolute differences, of the estimates of KL(engine || trainer), of
    the tokens whose probability ratio is outside the band, of the importance weights, and of the limited weights."""
    largest: torch.Tensor
    """[], float64: the largest absolute difference; 0 without tokens."""
    has_weights: bool = False
    """Whether there are importance weights."""

    def __add__(self, other: LogProbDifferences) -> LogProbDifferences:
        """Return the sums over the tokens of both."""
        largest = torch.maximum(self.largest, other.largest)
        return LogProbDifferences(self.sums + other.sums, largest, self.has_weights or other.has_weights)

    @property
    def mean(self) -> float:
        """Mean of the absolute differences; NaN without tokens."""
        tokens, total, *_ = self.sums.tolist()
        return total / tokens if tokens else math.nan

    @collective
    def over_ranks(self) -> LogProbDifferences:
        """Return the sums over the tokens of all ranks; collective."""
        return LogProbDifferences(all_reduce(self.sums, "sum"), all_reduce(self.largest, "max"), self.has_weights)

    @collective
    def metrics(self) -> dict[str, float]:
        """Return the means over the tokens of all ranks, with the names of docs/metrics.md; collective.

        The values are NaN if no rank has a token. Ranks that share sequences may all add the same tokens.
        """
        reduced = self.over_ranks()
        tokens, *sums = reduced.sums.tolist()
        names = ["engine_difference", "engine_kl", "engine_share_outside"]
        names += ["importance_weight", "importance_share_limited"] if self.has_weights else []
        found = {name: total / tokens if tokens else math.nan for name, total in zip(names, sums, strict=False)}
        return found | {"engine_difference_largest": reduced.largest.item()}


@torch.no_grad()
def log_prob_differences(
    trainer: torch.Tensor,
    engine: torch.Tensor,
    mask: torch.Tensor,
    ratio_band: tuple[float, float],
    *,
    weights: torch.Tensor | None = None,
    limited: torch.Tensor | None = None,
) -> LogProbDifferences:
    """Sum the differences of log-probabilities over the tokens of a bool mask; not collective.

    With r the ratio of the trainer's probability to the engine's, the estimate of KL(engine || trainer) of a token that
    the engine sampled is r - 1 - log r: the estimator k3 of http://joschu.net/blog/kl-approx.html.
    """
    log_ratio = trainer.detach()[mask].double() - engine.detach()[mask].double()
    ratio = log_ratio.exp()
    low, high = ratio_band
    sums = log_ratio.new_zeros(6)
    sums[0] = log_ratio.numel()
    sums[1] = log_ratio.abs().sum()
    sums[2] = (ratio - 1 - log_ratio).sum()
    sums[3] = ((ratio < low) | (ratio > high)).sum()
    if weights is not None and limited is not None:
        sums[4], sums[5] = weights.detach()[mask].double().sum(), limited[mask].sum()
    largest = log_ratio.abs().max() if log_ratio.numel() else log_ratio.new_zeros(())
    return LogProbDifferences(sums, largest, weights is not None)
