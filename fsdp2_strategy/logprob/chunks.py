"""Compute a linear head, the log-softmax and the selection of targets as one operation, chunk by chunk.

Input: hidden states, the head's parameters, targets, and the shape of a chunk. Output: log-probabilities and entropies,
and their gradients. [Note: chunks] in `linear` says how large a chunk is, and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from fsdp2_strategy import sizes
from fsdp2_strategy.logprob.logit_shape import LogitShape
from fsdp2_strategy.logprob.vocabulary import Sums, Vocabulary, positions, subtract


@dataclass(frozen=True)
class Settings:
    """How log-probabilities are computed."""

    temperature: float
    vocabulary: Vocabulary
    rows: int
    """Number of rows in a chunk."""
    columns: int
    """Number of tokens of the vocabulary in a chunk."""
    shape: LogitShape
    entropy: bool
    autocast: tuple[str, torch.dtype, bool]
    """Arguments of `torch.autocast` in forward; backward passes the same ones, so that it computes equal logits."""

    @property
    def has_full_rows(self) -> bool:
        """Whether a chunk has the logits of all tokens."""
        return self.vocabulary.group is None and self.columns == self.vocabulary.size

    def row_chunks(self, count: int) -> Iterator[slice]:
        """Return the rows of each chunk."""
        return (slice(first, first + self.rows) for first in range(0, count, self.rows))

    def token_chunks(self) -> Iterator[slice]:
        """Return the tokens of each chunk, counted from the first one of this rank."""
        size = self.vocabulary.size
        return (slice(first, min(first + self.columns, size)) for first in range(0, size, max(1, self.columns)))

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> _Logits:
        """Return the logits of some rows and some tokens, in fp32 or float64 and divided by the temperature."""
        with torch.autocast(*self.autocast):
            shaped = self.shape.apply(linear(hidden, weight, bias))
        values = shaped.to(at_least_fp32(hidden), copy=self.shape != LogitShape())
        if self.temperature != 1.0:
            values /= self.temperature
        return _Logits(values, shaped.dtype, None if self.shape == LogitShape() else shaped)


@dataclass
class _Logits:
    """The logits of a chunk; nothing else holds the tensors, so they may be overwritten."""

    values: torch.Tensor
    """[rows, tokens]: divided by the temperature."""
    dtype: torch.dtype
    """The dtype that the head computes in."""
    shaped: torch.Tensor | None
    """[rows, tokens]: as the model returns them; None if it returns those of its head."""


def chunk_shape(count: int, vocabulary: int, row_bytes: int, chunk_bytes: int, *, is_cached: bool) -> tuple[int, int]:
    """Return how many rows and how many tokens of the vocabulary a chunk has: [Note: chunks] in `linear`.

    Without a cache, it has all tokens, so that one kernel normalises it. In the processor's cache, it has twice as many
    rows as tokens: then the products that compute it and its gradients read the operands as rarely as possible.
    """
    if not is_cached or min(chunk_bytes, count * row_bytes) <= sizes.CACHED_LOGITS_BYTES:
        return max(1, chunk_bytes // max(1, row_bytes)), vocabulary
    elements = max(1, sizes.CACHED_LOGITS_BYTES * vocabulary // row_bytes)
    rows = min(count, math.isqrt(2 * elements))
    columns = min(vocabulary, max(1, elements // rows))
    return max(1, elements // columns), columns


class LinearLogProbs(torch.autograd.Function):
    """Compute the head, the log-softmax and the selection of targets as one operation, chunk by chunk.

    With z the logits, p their softmax and t the target: d log p_t / dz = (onehot_t - p) / temperature, and
    d entropy / dz = -p (log p + entropy) / temperature.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes by position
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        settings: Settings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies, both [rows]."""
        compute = _of_full_rows if settings.has_full_rows else _of_parts
        found, entropies, *normalizers = compute(hidden, weight, bias, targets, settings)
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, *normalizers)
        ctx.settings = settings
        return found, entropies.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropies: torch.Tensor) -> Any:
        """Return the gradients of hidden states, weight and bias."""
        hidden, weight, bias, targets, entropies, *normalizers = ctx.saved_tensors
        settings: Settings = ctx.settings
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], settings)
        for rows in settings.row_chunks(len(targets)):
            for tokens in settings.token_chunks():
                logits = settings.logits(hidden[rows], weight[tokens], None if bias is None else bias[tokens])
                if settings.has_full_rows:
                    logits.values = logits.values.log_softmax(dim=-1)
                else:
                    subtract(logits.values, *(each[rows, None] for each in normalizers))
                at = targets[rows] - settings.vocabulary.first - tokens.start
                of_entropies = (entropies[rows], grad_entropies[rows]) if settings.entropy else None
                grad_raw = _gradient_of_logits(logits, at, grad_log_probs[rows], of_entropies, settings)
                del logits
                gradients.add(rows, tokens, grad_raw)
                del grad_raw  # before the logits of the next chunk are allocated
        return *gradients.results(), None, None


def _of_full_rows(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, settings: Settings
) -> list[torch.Tensor]:
    """Return log-probabilities and entropies, from chunks that have all tokens of the vocabulary."""
    found, entropies = (hidden.new_zeros(len(targets), dtype=at_least_fp32(hidden)) for _ in range(2))
    for rows in settings.row_chunks(len(targets)):
        log_probs = settings.logits(hidden[rows], weight, bias).values.log_softmax(dim=-1)
        found[rows] = log_probs.gather(-1, targets[rows, None]).squeeze(-1)
        if settings.entropy:
            entropies[rows] = -log_probs.mul_(log_probs.exp()).sum(dim=-1)
        del log_probs  # before the logits of the next chunk are allocated
    return [found, entropies]


def _of_parts(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, settings: Settings
) -> list[torch.Tensor]:
    """Return log-probabilities and entropies, and the two numbers per row that normalise the logits in backward."""
    sums = Sums.over_none(hidden.new_empty(len(targets), dtype=at_least_fp32(hidden))).pack()
    for rows in settings.row_chunks(len(targets)):
        parts = [Sums(*sums[:, rows])]
        for tokens in settings.token_chunks():
            logits = settings.logits(hidden[rows], weight[tokens], None if bias is None else bias[tokens]).values
            at = targets[rows] - settings.vocabulary.first - tokens.start
            parts.append(Sums.over(logits, at, entropy=settings.entropy))
            del logits
        sums[:, rows] = Sums.combine(parts).pack()
    total = settings.vocabulary.combine(Sums(*sums))
    log_sums = total.exponentials.log()
    entropies = log_sums - total.weighted / total.exponentials if settings.entropy else torch.zeros_like(log_sums)
    return [total.target - total.largest - log_sums, entropies, total.largest, log_sums]


def _gradient_of_logits(
    logits: _Logits,
    targets: torch.Tensor,
    grad_log_probs: torch.Tensor,
    of_entropies: tuple[torch.Tensor, torch.Tensor] | None,
    settings: Settings,
) -> torch.Tensor:
    """Return the gradient of the logits of the head in a chunk, given log-probabilities, which are overwritten."""
    log_probs, logits.values = logits.values, torch.empty(0)
    if of_entropies is None:
        gradient = log_probs.exp_()
        gradient *= -grad_log_probs[:, None]
    else:
        entropies, grad_entropies = of_entropies
        gradient = log_probs.exp()
        log_probs += entropies[:, None]
        log_probs *= -grad_entropies[:, None]
        log_probs -= grad_log_probs[:, None]
        gradient *= log_probs
    del log_probs
    at, is_inside = positions(targets, gradient.shape[1])
    gradient.scatter_add_(-1, at, (grad_log_probs * is_inside)[:, None])
    if logits.shaped is not None:
        gradient *= settings.shape.derivative(logits.shaped.to(gradient.dtype))
    if settings.temperature != 1.0:
        gradient /= settings.temperature
    return gradient.to(logits.dtype)


class _Gradients:
    """The gradients of the hidden states, the weight and the bias, summed over chunks."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: Sequence[bool],
        settings: Settings,
    ) -> None:
        self._inputs, self._settings = (hidden, weight, bias), settings
        dtype = at_least_fp32(hidden)
        dtypes = (hidden.dtype, dtype, dtype)
        new = torch.empty_like if len(hidden) and len(weight) else torch.zeros_like  # each element is in a chunk
        self._sums = [
            None if each is None or not is_wanted else new(each, dtype=its_dtype)
            for each, its_dtype, is_wanted in zip(self._inputs, dtypes, wanted, strict=True)
        ]

    def add(self, rows: slice, tokens: slice, gradient: torch.Tensor) -> None:
        """Add what follows from the gradient of the logits of a chunk."""
        hidden, weight, _ = self._inputs
        of_hidden, of_weight, of_bias = self._sums
        if of_hidden is not None:
            _add_product(of_hidden[rows], gradient, weight[tokens].to(gradient.dtype), is_first=not tokens.start)
        if of_weight is not None:
            _add_product(of_weight[tokens], gradient.T, hidden[rows].to(gradient.dtype), is_first=not rows.start)
        if of_bias is not None:
            total = gradient.sum(dim=0, dtype=of_bias.dtype)
            of_bias[tokens] = total if not rows.start else of_bias[tokens] + total

    def results(self) -> tuple[torch.Tensor | None, ...]:
        """Return the sums in the dtypes of the inputs; collective over the ranks that share the head."""
        of_hidden, group = self._sums[0], self._settings.vocabulary.group
        if of_hidden is not None and group is not None:
            dist.all_reduce(of_hidden, group=group)
        return tuple(
            None if total is None or each is None else total.to(each.dtype)
            for total, each in zip(self._sums, self._inputs, strict=True)
        )


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, is_first: bool) -> None:
    """Add a matrix product to ``total``, which has no values yet if the product is the first."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=0 if is_first else 1)
    elif is_first:
        total.copy_(a @ b)
    else:
        total += a @ b


def at_least_fp32(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that logits of a tensor are normalised in: fp32, or float64."""
    return torch.promote_types(tensor.dtype, torch.float32)
