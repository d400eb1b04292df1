"""Compute the log-probability of each token of sequences under a causal language model.

Input: a causal language model, sharded or not, and token ids. Output: differentiable log-probabilities, and the
entropies of the distributions.

The head's forward is replaced for one pass by one that computes them in chunks: [Note: chunks] in `linear`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from fsdp2_strategy.config.arguments import accepts, check_inputs, check_number
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.torch_internals import moved_to
from fsdp2_strategy.errors import LogProbError
from fsdp2_strategy.hf.packed_rows import ARGUMENT, with_documents_apart
from fsdp2_strategy.logprob.head import head_of, parts_of, run_with_head
from fsdp2_strategy.logprob.linear import linear_log_probs
from fsdp2_strategy.logprob.logit_shape import logit_shape_of
from fsdp2_strategy.model.fsdp_state import class_name, device_of, is_sharded
from fsdp2_strategy.model.ranks import on_ranks_of, sequence_group_of
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
    the logits of one chunk of rows exist at a time: [Note: chunks] in `linear`. Many models count the padding on the
    left of a sequence as positions. For these, pass ``position_ids``, as ``generate`` does. The first call runs an
    additional forward pass: [Note: after the head] in `logit_shape`.

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
        head = head_of(root)
        input_ids, inputs = moved_to(
            device_of(root), (input_ids, {"input_ids": input_ids, "attention_mask": attention_mask, **inputs})
        )
        inputs = _inputs_of(root, inputs)
    rows, shard = _Rows.of(input_ids, last), None
    if (group := sequence_group_of(root)) is not None:
        inputs = feature("sequence.shard").shard_sequence(inputs, group)
        shard = inputs[ARGUMENT]
        rows = rows.in_part(shard.begin, shard.begin + shard.local_length)
    shape = logit_shape_of(root, head, inputs)

    def compute(hidden: torch.Tensor) -> torch.Tensor:
        expected = input_ids.shape if shard is None else (len(input_ids), shard.local_length)
        if hidden.shape[:2] != expected:
            raise LogProbError(
                f"cannot compute log-probabilities: the head of {class_name(root)} got hidden states for "
                f"{list(hidden.shape[:2])} tokens, expected {list(expected)}. Use a model that adds no tokens."
            )
        weight, bias, group = parts_of(head)
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

    found = run_with_head(root, head, compute, inputs)
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
