"""Compute log-probabilities under a linear head, with the logits of only a few rows at a time.

Input: hidden states, the head's parameters and the tokens. Output: differentiable log-probabilities, and the entropies
of the distributions.

[Note: chunks] A batch of 8 x 4,096 tokens with a vocabulary of 128,000 has 17 GB of fp32 logits, but only one number
per token is needed. So the head's forward is replaced for one pass. The new forward computes the logits of one chunk of
rows (tokens) at a time, and keeps only their log-probabilities; backward computes the logits again.

On a CPU, the passes over a chunk of full rows would take about as long as the matrix product that computes it, because
they read it from memory, and each allocation gets new pages from the system. So a chunk has fewer tokens of the
vocabulary and more rows, and stays in the processor's cache. The maxima and the sums of exponentials of these parts are
combined. Ranks that share the head compute the logits of their own part, and combine their sums in the same way. In
bf16, chunks always have full rows: the products of parts would be rounded before they are summed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2_strategy import sizes
from fsdp2_strategy.config.arguments import check_number
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.errors import LogProbError
from fsdp2_strategy.logprob.chunks import LinearLogProbs, Settings, at_least_fp32, chunk_shape
from fsdp2_strategy.logprob.logit_shape import LogitShape
from fsdp2_strategy.logprob.vocabulary import Vocabulary


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
    vocabulary = Vocabulary.of(weight, group)
    _check_range(targets, vocabulary)
    autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    is_cached = device == "cpu" and hidden.dtype == at_least_fp32(hidden) and not autocast[-1]
    row_bytes = vocabulary.size * at_least_fp32(hidden).itemsize
    rows, columns = chunk_shape(targets.numel(), vocabulary.size, row_bytes, chunk_bytes, is_cached=is_cached)
    settings = Settings(
        temperature=temperature,
        vocabulary=vocabulary,
        rows=rows,
        columns=columns,
        shape=shape or LogitShape(),
        entropy=entropy,
        autocast=autocast,
    )
    flat = hidden.reshape(-1, hidden.shape[-1])
    apply: Any = LinearLogProbs.apply
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


def _check_devices(hidden: torch.Tensor, **parameters: torch.Tensor | None) -> None:
    """Raise LogProbError if a parameter of the head is not on the device of the hidden states."""
    for name, parameter in parameters.items():
        if parameter is not None and parameter.device != hidden.device:
            raise LogProbError(
                f"cannot compute log-probabilities: the {name} is on {parameter.device}, expected {hidden.device}, the "
                "device of the hidden states. Move either to the device of the other."
            )


def _check_range(targets: torch.Tensor, vocabulary: Vocabulary) -> None:
    """Raise LogProbError if a target on the CPU is not in the vocabulary; on an accelerator, the host would wait."""
    if targets.device.type == "cpu" and targets.numel():
        for target in (int(targets.min()), int(targets.max())):
            if not 0 <= target < vocabulary.total:
                raise LogProbError(
                    f"cannot compute log-probabilities: a target is {target}, expected 0 to {vocabulary.total - 1}. "
                    "Replace the targets that are not scored by any token, and mask their results."
                )
