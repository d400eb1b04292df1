"""Compute the log-probability of each token of sequences, with the logits of only a few rows at a time.

Input: a causal language model, sharded or not, and token ids. Output: differentiable log-probabilities, and the
entropies of the distributions.

[Note: chunks] A batch of 8 x 4,096 tokens with a vocabulary of 128,000 has 17 GB of fp32 logits, but only one number
per token is needed. So the head's forward is replaced for one pass. The new forward computes the logits of one chunk of
rows (tokens) at a time, and keeps only their log-probabilities; backward computes the logits again. The head remains a
module with FSDP2's hooks, in its own unit or in the root unit. These hooks run when the module is called and when its
output gets a gradient, so the head's parameters are gathered for forward and again for backward.

On a CPU, the passes over a chunk of full rows would take about as long as the matrix product that computes it, because
they read it from memory, and each allocation gets new pages from the system. So a chunk has fewer tokens of the
vocabulary and more rows, and stays in the processor's cache. The maxima and the sums of exponentials of these parts are
combined. Ranks that share the head compute the logits of their own part, and combine their sums in the same way. In
bf16, chunks always have full rows: the products of parts would be rounded before they are summed.

[Note: after the head] Some models apply a function to the logits of their head: a scale or a soft cap. An additional
forward pass measures this function: the head returns known numbers, and the function follows from the logits that the
model returns for them. The function is not read from the configuration; docs/decisions.md says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear, pad

from fsdp2_strategy import sizes
from fsdp2_strategy.config.arguments import accepts, check_inputs, check_number
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.generators import restored_generators
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.torch_internals import all_gather_single, moved_to
from fsdp2_strategy.errors import LogProbError
from fsdp2_strategy.hf.packed_rows import ARGUMENT, with_documents_apart
from fsdp2_strategy.model.fsdp_state import class_name, device_of, is_sharded
from fsdp2_strategy.model.ranks import on_ranks_of, sequence_group_of
from fsdp2_strategy.model.state import Slot, measured_pass, model_state
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.sharding.features import feature

_OPTIONS = ("attention_mask", "last", "temperature", "entropy", "chunk_bytes")
"""The optional arguments of `token_log_probs`, which could be misspelled."""


@collective
def token_log_probs(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    last: int | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_bytes: int | None = None,
    **inputs: Any,
) -> Any:
    """Return the log-probability of each token, given the tokens before it; collective for a sharded model.

    Values and gradients are those of ``log_softmax(model(...).logits.float() / temperature)`` at the tokens, but only
    the logits of one chunk of rows exist at a time: [Note: chunks]. Many models count the padding on the left of a
    sequence as positions. For these, pass ``position_ids``, as ``generate`` does. The first call runs an additional
    forward pass: [Note: after the head].

    If ranks share sequences (``sequence_parallel_size``), each of them passes the same full sequences, computes a part
    of them, and gets all log-probabilities. From these, all of them compute the same loss.

    Arguments in other memory are moved to the device that the model computes on, as FSDP2 does in a forward pass.

    Args:
        model: a causal language model or its wrapper; it may be sharded, and may take images.
        input_ids: [batch, length], int64.
        attention_mask: [batch, length], passed to the model.
        last: number of tokens at the end of each sequence whose log-probabilities are returned; by default and at most
            length - 1.
        temperature: the logits are divided by this number.
        entropy: also return the entropies, in nats.
        chunk_bytes: maximum size of the fp32 logits of one chunk, by default 256 MiB; a chunk has at least one row.
            Forward and backward need about twice this memory, three times if the model scales or caps its logits. On a
            CPU, larger chunks in fp32 are divided into parts of 2 MiB, which stay in the processor's cache.
        **inputs: other arguments of the model's forward (``position_ids``, ``pixel_values``).

    Returns:
        Log-probabilities [batch, last] in fp32 (float64 for a float64 model), also for padding. With ``entropy``, a
        pair: log-probabilities, and entropies of the same shape.

    Raises:
        LogProbError: the model is not a causal language model, or ``input_ids`` is not a tensor of integers; its head
            is not an `nn.Linear` that is called once per pass; it changes the logits of the head by more than a fixed
            scale and a soft cap; or an argument is out of range.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, pad_token_id=0)
        >>> ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 1]])
        >>> token_log_probs(LlamaForCausalLM(config), ids, last=2).shape
        torch.Size([2, 2])
    """
    if not isinstance(model, nn.Module):
        raise LogProbError(
            f"cannot compute log-probabilities: the model is a {type(model).__name__}, expected a language model. "
            "Call token_log_probs(model, input_ids); from hidden states, call linear_log_probs."
        )
    root: Any = unwrap_model(model)
    with ExitStack() as stack:
        if is_sharded(root):
            stack.enter_context(on_ranks_of(root))
            stack.enter_context(all_or_none("compute log-probabilities", LogProbError))
        last = _check_arguments(
            input_ids, attention_mask, inputs, last=last, temperature=temperature, chunk_bytes=chunk_bytes
        )
        check_inputs(inputs, _OPTIONS, root, "compute log-probabilities", LogProbError)
        head = _head_of(root)
        input_ids, inputs = moved_to(
            device_of(root), (input_ids, {"input_ids": input_ids, "attention_mask": attention_mask, **inputs})
        )
        inputs = _inputs_of(root, inputs)
    rows, shard = _Rows.of(input_ids, last), None
    if (group := sequence_group_of(root)) is not None:
        inputs = feature("sequence.shard").shard_sequence(inputs, group)
        shard = inputs[ARGUMENT]
        rows = rows.in_part(shard.begin, shard.begin + shard.local_length)
    shape = _logit_shape_of(root, head, inputs)

    def compute(hidden: torch.Tensor) -> torch.Tensor:
        expected = input_ids.shape if shard is None else (len(input_ids), shard.local_length)
        if hidden.shape[:2] != expected:
            raise LogProbError(
                f"cannot compute log-probabilities: the head of {class_name(root)} got hidden states for "
                f"{list(hidden.shape[:2])} tokens, expected {list(expected)}. Use a model that adds no tokens."
            )
        weight, bias, group = _parts_of(head)
        found = linear_log_probs(
            hidden[:, rows.begin : rows.end],
            weight,
            rows.targets,
            bias,
            temperature=temperature,
            entropy=entropy,
            chunk_bytes=chunk_bytes,
            shape=shape,
            group=group,
        )
        return torch.stack(found) if isinstance(found, tuple) else found[None]

    found = _run_with_head(root, head, compute, inputs)
    if shard is not None:  # [1 or 2, batch, rows of this part] -> [1 or 2, batch, last]
        of_part = pad(found, (rows.begin, shard.local_length - rows.end))
        end = input_ids.shape[1] - 1
        found = feature("sequence.exchange").gather_results(of_part, shard.ranks, dim=2)[..., end - last : end]
    return (found[0], found[1]) if entropy else found[0]


@dataclass(frozen=True)
class _Rows:
    """The hidden states whose next tokens are scored: from ``begin`` to ``end`` along the sequence."""

    begin: int
    end: int
    targets: torch.Tensor
    """[batch, end - begin]: the next tokens."""

    @classmethod
    def of(cls, input_ids: torch.Tensor, last: int) -> _Rows:
        """Return the rows of the last tokens of full sequences."""
        return cls(input_ids.shape[1] - last - 1, input_ids.shape[1] - 1, input_ids[:, -last:])

    def in_part(self, begin: int, end: int) -> _Rows:
        """Return the rows that lie in a part of the sequences, counted from its begin; there may be none."""
        first, stop = min(max(self.begin, begin), end), max(min(self.end, end), begin)
        stop = max(first, stop)
        return _Rows(
            first - begin, stop - begin, self.targets[:, max(first - self.begin, 0) : max(stop - self.begin, 0)]
        )


@collective
def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_bytes: int | None = None,
    shape: LogitShape | None = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Compute log-probabilities under a linear head, one chunk of rows at a time; collective only with ``group``.

    The head's parameters must be full tensors on this rank. In the forward of a prepared model, and of a wrapper that
    was passed to `prepare_model`, ``lm_head.weight`` is. With ``group``, they are this rank's part of the vocabulary,
    and the call and its backward are collective over the group; all its ranks pass the same hidden states and targets,
    and get the same results.

    Args:
        hidden: [..., width].
        weight: [vocabulary, width].
        targets: [...], int64.
        bias: [vocabulary].
        temperature: as for `token_log_probs`.
        entropy: as for `token_log_probs`.
        chunk_bytes: as for `token_log_probs`.
        shape: the function that the model applies to its logits.
        group: ranks that hold successive parts of the vocabulary.

    Returns:
        Log-probabilities [...] in fp32, or in float64 for float64 inputs. With ``entropy``, a pair: log-probabilities,
        and entropies of the same shape. Backward accumulates the gradients of weight and bias over the chunks in the
        same dtype, and casts the sums to the dtype of the weight.

    Raises:
        LogProbError: the weight is sharded, or it is not on the device of the hidden states, to which the targets are
            moved.
    """
    if isinstance(weight, DTensor):
        raise LogProbError(
            f"cannot compute log-probabilities: the weight is a DTensor of shape {list(weight.shape)}, because it is "
            "used outside of a pass of its model, expected the full weight. Use it within the model's forward. Pass "
            "the wrapper whose forward calls it to prepare_model; or call token_log_probs(model, input_ids)."
        )
    _check_tensors(hidden, weight, targets, temperature)
    _check_devices(hidden, weight=weight, bias=bias)
    targets = targets.to(hidden.device)
    device = hidden.device.type
    chunk_bytes = sizes.LOGITS_BYTES if chunk_bytes is None else chunk_bytes
    vocabulary = _Vocabulary.of(weight, group)
    _check_range(targets, vocabulary)
    autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    is_cached = device == "cpu" and hidden.dtype == _at_least_fp32(hidden) and not autocast[-1]
    row_bytes = vocabulary.size * _at_least_fp32(hidden).itemsize
    rows, columns = _chunk_shape(targets.numel(), vocabulary.size, row_bytes, chunk_bytes, is_cached=is_cached)
    settings = _Settings(
        temperature=temperature,
        vocabulary=vocabulary,
        rows=rows,
        columns=columns,
        shape=shape or LogitShape(),
        entropy=entropy,
        autocast=autocast,
    )
    flat = hidden.reshape(-1, hidden.shape[-1])
    apply: Any = _LinearLogProbs.apply
    log_probs, entropies = apply(flat, weight, bias, targets.reshape(-1), settings)
    log_probs = log_probs.view(targets.shape)
    return (log_probs, entropies.view(targets.shape)) if entropy else log_probs


def _check_tensors(hidden: Any, weight: Any, targets: Any, temperature: Any) -> None:
    """Raise LogProbError unless hidden states, weight and targets of `linear_log_probs` fit."""
    action = "compute log-probabilities"
    for name, tensor in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        if not isinstance(tensor, torch.Tensor):
            raise LogProbError(
                f"cannot {action}: {name} is a {type(tensor).__name__}, expected a tensor. Check the order of the "
                "arguments: linear_log_probs(hidden, weight, targets)."
            )
    is_fit = hidden.ndim > 0 and weight.ndim == 2 and hidden.shape[-1] == weight.shape[1]
    if not is_fit or hidden.shape[:-1] != targets.shape or targets.is_floating_point():
        raise LogProbError(
            f"cannot {action}: hidden is {list(hidden.shape)}, weight {list(weight.shape)}, targets "
            f"{list(targets.shape)} of {targets.dtype}, expected [..., width], [vocabulary, width], [...] of int64. "
            "Check their order and shapes."
        )
    check_number(action, "temperature", temperature, LogProbError, above=0)


@dataclass(frozen=True)
class LogitShape:
    """The function that a model applies to the logits of its head.

    It is ``cap * tanh(scale * logits / cap)`` with a soft cap, else ``scale * logits``.
    """

    scale: float = 1.0
    cap: float = math.inf

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits that the model returns for these logits of its head, computed in the same dtype."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if math.isinf(self.cap) else torch.tanh(logits / self.cap) * self.cap

    def derivative(self, shaped: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of the function where its value is ``shaped``; this may overwrite ``shaped``."""
        if math.isinf(self.cap):
            return self.scale
        return shaped.div_(self.cap).square_().neg_().add_(1.0).mul_(self.scale)


def _check_range(targets: torch.Tensor, vocabulary: _Vocabulary) -> None:
    """Raise LogProbError if a target on the CPU is not in the vocabulary; on an accelerator, the host would wait."""
    if targets.device.type == "cpu" and targets.numel():
        for target in (int(targets.min()), int(targets.max())):
            if not 0 <= target < vocabulary.total:
                raise LogProbError(
                    f"cannot compute log-probabilities: a target is {target}, expected 0 to {vocabulary.total - 1}. "
                    "Replace the targets that are not scored by any token, and mask their results."
                )


@dataclass(frozen=True)
class _Vocabulary:
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
    def of(cls, weight: torch.Tensor, group: dist.ProcessGroup | None) -> _Vocabulary:
        """Return the part for the weight of a head; collective over the group."""
        size = weight.shape[0]
        if group is None:
            return cls(None, 0, size, size)
        counts = weight.new_zeros(dist.get_world_size(group), dtype=torch.int64)
        counts[dist.get_rank(group)] = size
        dist.all_reduce(counts, group=group)
        sizes = counts.tolist()
        return cls(group, sum(sizes[: dist.get_rank(group)]), size, sum(sizes))

    def combine(self, sums: _Sums) -> _Sums:
        """Return the sums over the full vocabulary for those over this rank's part; collective over the group."""
        if self.group is None:
            return sums
        packed = sums.pack()
        parts = packed.new_empty((dist.get_world_size(self.group) * len(packed), *packed.shape[1:]))
        all_gather_single(parts, packed, group=self.group)
        return _Sums.combine([_Sums(*part) for part in parts.view(-1, *packed.shape)])


def _chunk_shape(count: int, vocabulary: int, row_bytes: int, chunk_bytes: int, *, is_cached: bool) -> tuple[int, int]:
    """Return how many rows and how many tokens of the vocabulary a chunk has: [Note: chunks].

    Without a cache, it has all tokens, so that one kernel normalises it. In the processor's cache, it has twice as many
    rows as tokens: then the products that compute it and its gradients read the operands as rarely as possible.
    """
    if not is_cached or min(chunk_bytes, count * row_bytes) <= sizes.CACHED_LOGITS_BYTES:
        return max(1, chunk_bytes // max(1, row_bytes)), vocabulary
    elements = max(1, sizes.CACHED_LOGITS_BYTES * vocabulary // row_bytes)
    rows = min(count, math.isqrt(2 * elements))
    columns = min(vocabulary, max(1, elements // rows))
    return max(1, elements // columns), columns


@dataclass(frozen=True)
class _Settings:
    """The settings of `_LinearLogProbs`."""

    temperature: float
    vocabulary: _Vocabulary
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
        values = shaped.to(_at_least_fp32(hidden), copy=self.shape != LogitShape())
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


@dataclass(frozen=True)
class _Sums:
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
    def over(cls, logits: torch.Tensor, targets: torch.Tensor, *, entropy: bool) -> _Sums:
        """Compute the sums over a chunk of logits, and overwrite it; targets are counted from its first token."""
        at, is_inside = _positions(targets, logits.shape[1])
        target = logits.gather(-1, at).squeeze(-1).masked_fill_(~is_inside, -math.inf)
        largest = logits.amax(dim=-1).clamp_(min=torch.finfo(logits.dtype).min)
        _subtract(logits, largest[:, None])
        exponentials = logits.exp() if entropy else logits.exp_()
        sums = exponentials.sum(dim=-1)
        weighted = exponentials.mul_(logits).sum(dim=-1) if entropy else torch.zeros_like(sums)
        return cls(largest, sums, weighted, target)

    @classmethod
    def over_none(cls, like: torch.Tensor) -> _Sums:
        """Return the sums over no token, each like ``like``."""
        zeros, lowest = torch.zeros_like(like), torch.full_like(like, torch.finfo(like.dtype).min)
        return cls(lowest, zeros, zeros, torch.full_like(like, -math.inf))

    @classmethod
    def combine(cls, parts: Sequence[_Sums]) -> _Sums:
        """Return the sums over all tokens for those over successive parts of them."""
        largest, exponentials, weighted, target = torch.stack([part.pack() for part in parts]).unbind(dim=1)
        total = largest.amax(dim=0)
        below = _subtract(largest, total)
        scale = below.exp()
        weighted = scale * weighted + below * scale * exponentials
        return cls(total, (scale * exponentials).sum(dim=0), weighted.sum(dim=0), target.amax(dim=0))

    def pack(self) -> torch.Tensor:
        """Return all sums as one tensor [4, rows]."""
        return torch.stack([self.largest, self.exponentials, self.weighted, self.target])


def _positions(targets: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the targets are in a chunk [rows, 1], and whether they are in it [rows]."""
    return targets.clamp(0, width - 1)[:, None], (targets >= 0) & (targets < width)


def _subtract(logits: torch.Tensor, *amounts: torch.Tensor) -> torch.Tensor:
    """Subtract numbers from logits in place, but keep their exponentials normal numbers; return the logits.

    Computing with subnormal ones takes up to a hundred times as long on a CPU. Those that are raised are smaller than
    the rounding of the sum by many orders of magnitude.
    """
    for amount in amounts:
        logits -= amount
    return logits.clamp_(min=math.log(torch.finfo(logits.dtype).tiny) / 2)


class _LinearLogProbs(torch.autograd.Function):
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
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        compute = _of_full_rows if settings.has_full_rows else _of_parts
        found, entropies, *normalizers = compute(hidden, weight, bias, targets, settings)
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, *normalizers)
        ctx.settings = settings
        return found, entropies.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropies: torch.Tensor) -> Any:
        hidden, weight, bias, targets, entropies, *normalizers = ctx.saved_tensors
        settings: _Settings = ctx.settings
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], settings)
        for rows in settings.row_chunks(len(targets)):
            for tokens in settings.token_chunks():
                logits = settings.logits(hidden[rows], weight[tokens], None if bias is None else bias[tokens])
                if settings.has_full_rows:
                    logits.values = logits.values.log_softmax(dim=-1)
                else:
                    _subtract(logits.values, *(each[rows, None] for each in normalizers))
                at = targets[rows] - settings.vocabulary.first - tokens.start
                of_entropies = (entropies[rows], grad_entropies[rows]) if settings.entropy else None
                grad_raw = _gradient_of_logits(logits, at, grad_log_probs[rows], of_entropies, settings)
                del logits
                gradients.add(rows, tokens, grad_raw)
                del grad_raw  # before the logits of the next chunk are allocated
        return *gradients.results(), None, None


def _of_full_rows(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, settings: _Settings
) -> list[torch.Tensor]:
    """Return log-probabilities and entropies, from chunks that have all tokens of the vocabulary."""
    found, entropies = (hidden.new_zeros(len(targets), dtype=_at_least_fp32(hidden)) for _ in range(2))
    for rows in settings.row_chunks(len(targets)):
        log_probs = settings.logits(hidden[rows], weight, bias).values.log_softmax(dim=-1)
        found[rows] = log_probs.gather(-1, targets[rows, None]).squeeze(-1)
        if settings.entropy:
            entropies[rows] = -log_probs.mul_(log_probs.exp()).sum(dim=-1)
        del log_probs  # before the logits of the next chunk are allocated
    return [found, entropies]


def _of_parts(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, settings: _Settings
) -> list[torch.Tensor]:
    """Return log-probabilities and entropies, and the two numbers per row that normalise the logits in backward."""
    sums = _Sums.over_none(hidden.new_empty(len(targets), dtype=_at_least_fp32(hidden))).pack()
    for rows in settings.row_chunks(len(targets)):
        parts = [_Sums(*sums[:, rows])]
        for tokens in settings.token_chunks():
            logits = settings.logits(hidden[rows], weight[tokens], None if bias is None else bias[tokens]).values
            at = targets[rows] - settings.vocabulary.first - tokens.start
            parts.append(_Sums.over(logits, at, entropy=settings.entropy))
            del logits
        sums[:, rows] = _Sums.combine(parts).pack()
    total = settings.vocabulary.combine(_Sums(*sums))
    log_sums = total.exponentials.log()
    entropies = log_sums - total.weighted / total.exponentials if settings.entropy else torch.zeros_like(log_sums)
    return [total.target - total.largest - log_sums, entropies, total.largest, log_sums]


def _gradient_of_logits(
    logits: _Logits,
    targets: torch.Tensor,
    grad_log_probs: torch.Tensor,
    of_entropies: tuple[torch.Tensor, torch.Tensor] | None,
    settings: _Settings,
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
    at, is_inside = _positions(targets, gradient.shape[1])
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
        settings: _Settings,
    ) -> None:
        self._inputs, self._settings = (hidden, weight, bias), settings
        dtype = _at_least_fp32(hidden)
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


def _at_least_fp32(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, is_first: bool) -> None:
    """Add a matrix product to ``total``, which has no values yet if the product is the first."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=0 if is_first else 1)
    elif is_first:
        total.copy_(a @ b)
    else:
        total += a @ b


# --- the model around the head ---------------------------------------------------------------------------------------


def _check_devices(hidden: torch.Tensor, **parameters: torch.Tensor | None) -> None:
    """Raise LogProbError if a parameter of the head is not on the device of the hidden states."""
    for name, parameter in parameters.items():
        if parameter is not None and parameter.device != hidden.device:
            raise LogProbError(
                f"cannot compute log-probabilities: the {name} is on {parameter.device}, expected {hidden.device}, the "
                "device of the hidden states. Move either to the device of the other."
            )


def _check_arguments(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    inputs: Mapping[str, Any],
    *,
    last: int | None,
    temperature: float,
    chunk_bytes: int | None,
) -> int:
    """Check the arguments; return ``last``, or its default if it is None."""
    if unsupported := [name for name in ("labels", "logits_to_keep") if name in inputs]:
        raise LogProbError(
            f"cannot compute log-probabilities: {unsupported[0]} is among the inputs, expected only inputs that the "
            "hidden states are computed from. Omit it; last selects the tokens."
        )
    action = "compute log-probabilities"
    for name, ids in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        is_given = isinstance(ids, torch.Tensor) and (name != "input_ids" or not ids.is_floating_point())
        if not (is_given or (name == "attention_mask" and ids is None)):
            shown = f"a tensor of {ids.dtype}" if isinstance(ids, torch.Tensor) else f"a {type(ids).__name__}"
            raise LogProbError(f"cannot {action}: {name} is {shown}, expected a tensor of integers. Pass token ids.")
    for name, number in (("last", last), ("chunk_bytes", chunk_bytes)):
        if number is not None:
            check_number(action, name, number, LogProbError, integer=True)
    check_number(action, "temperature", temperature, LogProbError)
    if input_ids.ndim != 2 or input_ids.shape[1] < 2:
        raise LogProbError(
            f"cannot compute log-probabilities: input_ids has the shape {list(input_ids.shape)}, expected "
            "[batch, length] with at least two tokens. Add the batch dimension, or pass longer sequences."
        )
    longest = input_ids.shape[1] - 1
    last = longest if last is None else last
    for name, value, valid, expected in (
        ("last", last, 1 <= last <= longest, f"1 to {longest}, because the first token is not predicted"),
        ("temperature", temperature, 0 < temperature < math.inf, "a finite number above 0"),
        ("chunk_bytes", chunk_bytes, chunk_bytes is None or chunk_bytes >= 1, "at least 1"),
    ):
        if not valid:
            raise LogProbError(
                f"cannot compute log-probabilities: {name} is {value}, expected {expected}. Omit it for its default."
            )
    return last


def _head_of(root: Any) -> nn.Linear:
    """Return the linear layer that computes the logits; raise LogProbError if the model has none."""
    model = root if hasattr(root, "get_output_embeddings") else getattr(root, "model", root)
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        head = None
    generates = not hasattr(model, "can_generate") or model.can_generate()
    causal = generates and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if causal and isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return head
    raise LogProbError(
        f"cannot compute log-probabilities: the head of {class_name(model)} is a {type(head).__name__}, expected "
        "the nn.Linear that get_output_embeddings of a causal language model returns. Use such a model, add no adapter "
        "to its head, or call linear_log_probs in its forward."
    )


def _inputs_of(root: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward pass without a key-value cache, which would only use memory.

    Raise LogProbError if the forward does not accept the tokens by their usual name.
    """
    if not accepts(root.forward, "input_ids"):
        raise LogProbError(
            f"cannot compute log-probabilities: {class_name(root)}.forward has no argument input_ids, expected the "
            "forward of a causal language model. Pass the inner model, or set is_actor = True on a wrapper of one."
        )
    without_cache = {**({"use_cache": False} if accepts(root.forward, "use_cache") else {}), **inputs}
    return with_documents_apart(without_cache, has_cache=False) or without_cache


def _parts_of(head: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None, dist.ProcessGroup | None]:
    """Return weight and bias of a gathered head, or this rank's parts of them and the ranks that share the head."""
    if not isinstance(head.weight, DTensor):
        return head.weight, head.bias, None
    (placed,) = head.weight.placements
    if placed != Shard(0):
        raise LogProbError(
            f"cannot compute log-probabilities: the weight of the head has the placement {placed}, expected a head "
            "whose outputs are split. Use the style colwise_gather_output for the head."
        )
    bias = head.bias.to_local() if isinstance(head.bias, DTensor) else head.bias
    return head.weight.to_local(), bias, head.weight.device_mesh.get_group()


def _run_with_head(
    root: nn.Module,
    head: nn.Module,
    compute: Callable[[torch.Tensor], torch.Tensor],
    inputs: Mapping[str, Any],
    *,
    with_output: bool = False,
) -> Any:
    """Run a model with ``compute`` as the forward of its head; collective for a sharded model.

    Returns:
        The head's output. It has passed through FSDP2's hooks of the head and of the root unit, so backward gathers
        both units. With ``with_output``, a pair: the head's output and the model's output.
    """
    made: list[torch.Tensor] = []
    forward = root.forward

    def forward_of_root(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if len(made) != 1:
            raise LogProbError(
                f"cannot compute log-probabilities: {class_name(root)} called its head {len(made)} times, expected "
                "one call in a forward pass. Use a causal language model."
            )
        return output if with_output else made[0]

    with (
        _replaced_forward(head, compute),
        head.register_forward_hook(lambda _module, _inputs, output: made.append(output)),
        _replaced_forward(root, forward_of_root),
    ):
        output = root(**inputs)
    return (made[0], output) if with_output else output


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward while the context is active; the module's hooks still run."""
    own = vars(module).pop("forward", None)
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own


# --- the function of the logits after the head ------------------------------------------------------------------------

_SHAPE = Slot[tuple[bool, LogitShape]]("logit shape")
"""Whether the model was sharded when the function was measured, and the function.

The function is measured again after sharding. The forward pass is then collective, so all ranks must run it, including
ranks that measured the function before sharding.
"""


def _logit_shape_of(root: nn.Module, head: nn.Linear, inputs: Mapping[str, Any]) -> LogitShape:
    """Return the function that a model applies to its logits, measured at first use: [Note: after the head]."""
    cached = model_state(root).get(_SHAPE)
    if cached is None or cached[0] != is_sharded(root):
        cached = model_state(root).set(_SHAPE, (is_sharded(root), _measure_logit_shape(root, head, inputs)))
    return cached[1]


def _measure_logit_shape(root: nn.Module, head: nn.Linear, inputs: Mapping[str, Any]) -> LogitShape:
    """Run the model with a head that returns known numbers, and fit the function to the logits of the model."""
    device = inputs["input_ids"].device
    known = torch.linspace(-1, 1, head.out_features, device=device) ** 3 * 2000

    def return_known(_hidden: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(True)  # so that logits require grad if a trained factor scales them
        return known.clone().view(1, 1, -1)  # a copy: `known` must stay the same if the model changes logits in place

    with measured_pass(), torch.no_grad(), restored_generators():
        from_head, output = _run_with_head(root, head, return_known, inputs, with_output=True)
    logits = getattr(output, "logits", torch.empty(0))
    comparable = logits.shape == (1, 1, len(known)) and not logits.requires_grad
    if comparable and torch.equal(from_head[0, 0].to(known.dtype), known):
        measured = logits[0, 0].to(known.dtype)
        for shape in _candidates(known, measured):
            if torch.allclose(shape.apply(known), measured, rtol=8 * torch.finfo(logits.dtype).eps, atol=1e-6):
                return shape
    raise LogProbError(
        f"cannot compute log-probabilities: {class_name(root)} or one of its hooks changes the logits of its head, "
        "expected at most a fixed factor and a soft cap. Call linear_log_probs in its forward."
    )


def _candidates(known: torch.Tensor, measured: torch.Tensor) -> Iterator[LogitShape]:
    """Yield functions that may map ``known`` to ``measured``; the last known value is large enough to reach the cap."""
    largest = measured[-1].item()
    yield LogitShape(scale=largest / known[-1].item())
    half = (measured / largest - 0.5).abs().argmin()
    ratio = measured[half].item() / largest if largest else 0.0
    if 0 < ratio < 1:
        scale = math.atanh(ratio) * largest / known[half].item()
        yield LogitShape(float(f"{scale:.4g}"), largest)  # exact if the configured scale has 4 digits or fewer
        yield LogitShape(scale, largest)
