"""Correct a policy gradient for the difference between the engine that sampled and the trainer.

Input: the engine's outputs, and log-probabilities of the sampled tokens by trainer and engine. Output: the engine's
log-probabilities as a tensor; importance weights, masks and ratios for a loss.

[Note: importance weights] The engine samples from its own distribution, which differs from the trainer's in precision,
kernels and sometimes weights. A gradient that ignores this is biased. Multiplying the loss of each token by the ratio
of the trainer's probability before the update ("old") to the engine's removes the bias, at the cost of variance, so the
weights are limited: truncated importance sampling (Ionides 2008, https://doi.org/10.1198/106186008X320456; for RL of
language models Yao et al. 2025, https://fengyao.notion.site/off-policy-rl). Tokens or sequences with a large ratio may
also be left out ("mask"; IcePop in https://arxiv.org/abs/2510.18855, which limits the ratio on both sides). The ratio
of a sequence is the product of those of its tokens, or its geometric mean, as in GSPO
(https://arxiv.org/abs/2507.18071).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.rollout.log_prob_differences import LogProbDifferences, log_prob_differences

Level = Literal["token", "sequence", "geometric"]
Limit = Literal["truncate", "mask"]


@dataclass(frozen=True)
class ImportanceInputs:
    """The tensors that a policy loss needs, each [batch, tokens]; only `new_log_probs` and `log_ratio` have gradients.

    Values outside of ``mask`` are 0.
    """

    new_log_probs: torch.Tensor
    """Log-probabilities by the model that is updated."""
    old_log_probs: torch.Tensor
    """Log-probabilities by the trainer's model before the updates of this batch."""
    engine_log_probs: torch.Tensor
    """Log-probabilities by the engine that sampled the tokens."""
    mask: torch.Tensor
    """bool: the tokens that count."""
    log_ratio: torch.Tensor
    """new - old: the exponent of the ratio that PPO and GRPO clip."""
    weights: torch.Tensor
    """Importance weights: the limited ratios of the old probability to the engine's; see [Note: importance weights]."""
    limited: torch.Tensor
    """bool: the tokens whose weight was truncated, or set to 0."""
    differences: LogProbDifferences
    """Differences between old and engine; add those of several micro-batches, and call ``metrics()``."""


def importance_inputs(
    new_log_probs: torch.Tensor,
    old_log_probs: torch.Tensor | None,
    engine_log_probs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: Level = "token",
    limit: Limit = "truncate",
    cap: float = 2.0,
    floor: float = 0.0,
    ratio_band: tuple[float, float] = (0.8, 1.25),
) -> ImportanceInputs:
    """Compute the inputs of a policy loss with importance weights; not collective: [Note: importance weights].

    The weights are constants: no gradient flows through them. With clipping, the objective of a token is
    ``weights * min(ratio * advantage, ratio.clamp(...) * advantage)``, with ``ratio = log_ratio.exp()``. The other
    tensors are moved to the device of ``new_log_probs``. The check of the values waits for the device.

    Args:
        new_log_probs: [batch, tokens], in nats, by the model that is updated.
        old_log_probs: the same by the trainer's model when the batch was sampled; None for those of ``new_log_probs``,
            if the batch is used for one update only.
        engine_log_probs: the same by the engine, at the same temperature; see `sampled_log_probs`.
        mask: [batch, tokens], bool or 0 and 1: the tokens that count.
        level: "token": a weight for each token. "sequence": the product of the ratios of a sequence's tokens, for all
            of them. "geometric": their geometric mean.
        limit: "truncate": weights above ``cap`` become ``cap``, those below ``floor`` become ``floor``. "mask": weights
            outside of ``floor`` to ``cap`` become 0.
        cap: the largest weight.
        floor: the smallest weight.
        ratio_band: the band of ``differences``.

    Raises:
        RolloutError: an argument has another shape or an unknown value; a log-probability of a token that counts is
            NaN or above 0.

    Example:
        >>> engine = torch.tensor([[-1.0, -2.0]])
        >>> old = torch.tensor([[-1.0, -0.5]])
        >>> inputs = importance_inputs(old, None, engine, torch.ones(1, 2))
        >>> inputs.weights, inputs.limited
        (tensor([[1., 2.]]), tensor([[False,  True]]))
    """
    _check_settings(level, limit, cap, floor)
    mask = mask.bool()
    old_log_probs = new_log_probs.detach() if old_log_probs is None else old_log_probs
    named = {"new_log_probs": new_log_probs, "old_log_probs": old_log_probs, "engine_log_probs": engine_log_probs}
    for name, values in named.items():
        if not isinstance(values, torch.Tensor):
            raise RolloutError(
                f"cannot compute importance weights: {name} is a {type(values).__name__}, expected a tensor "
                f"{list(mask.shape)}. Make the engine's of its outputs with sampled_log_probs."
            )
        if values.shape != mask.shape:
            raise RolloutError(
                f"cannot compute importance weights: {name} has the shape {list(values.shape)}, expected "
                f"{list(mask.shape)}, that of mask. Pass the log-probabilities of the same tokens."
            )
    mask = mask.to(new_log_probs.device)
    named = {name: values.to(new_log_probs.device) for name, values in named.items()}
    old_log_probs, engine_log_probs = named["old_log_probs"], named["engine_log_probs"]
    _check_values(named, mask)
    new = torch.where(mask, new_log_probs, 0.0)
    old, engine = (
        torch.where(mask, values.detach(), 0.0).to(new.dtype) for values in (old_log_probs, engine_log_probs)
    )
    exponent = old - engine
    if level != "token":
        exponent = exponent.sum(dim=-1, keepdim=True)
        if level == "geometric":
            exponent = exponent / mask.sum(dim=-1, keepdim=True).clamp(min=1)
        exponent = exponent.expand(mask.shape)
    ratio = exponent.exp()
    limited = ((ratio > cap) | (ratio < floor)) & mask
    weights = torch.where(limited, 0.0, ratio) if limit == "mask" else ratio.clamp(floor, cap)
    weights = torch.where(mask, weights, 0.0)
    differences = log_prob_differences(old, engine, mask, ratio_band, weights=weights, limited=limited)
    return ImportanceInputs(new, old, engine, mask, new - old, weights, limited, differences)


def _check_settings(level: str, limit: str, cap: float, floor: float) -> None:
    for name, value, known in (
        ("level", level, ("token", "sequence", "geometric")),
        ("limit", limit, ("truncate", "mask")),
    ):
        if value not in known:
            raise RolloutError(
                f"cannot compute importance weights: {name} is {value!r}, expected one of {', '.join(known)}. Use one "
                "of these."
            )
    if not 0 <= floor <= 1 <= cap:
        raise RolloutError(
            f"cannot compute importance weights: floor is {floor} and cap is {cap}, expected 0 <= floor <= 1 <= cap, "
            "because the weight of a token of equal probabilities is 1. Change them."
        )


def _check_values(named: dict[str, torch.Tensor], mask: torch.Tensor) -> None:
    """Raise if a log-probability is NaN or clearly above 0; reads one flag per tensor from the device."""
    wrong = torch.stack([~(values.detach()[mask] <= 1e-3).all() for values in named.values()]).tolist()
    for (name, values), is_wrong in zip(named.items(), wrong, strict=True):
        if is_wrong:
            first = next(value for value in values.detach()[mask].tolist() if not value <= 1e-3)
            raise RolloutError(
                f"cannot compute importance weights: {name} contains {first}, expected log-probabilities, which are at "
                "most 0. Pass log-probabilities in nats, and exclude padding with mask."
            )


def sampled_log_probs(outputs: Any, length: int) -> torch.Tensor:
    """Return the log-probabilities that an engine computed when it sampled; not collective.

    vLLM returns them if the sampling parameters have ``logprobs=0``, SGLang if ``generate`` gets
    ``return_logprob=True``. `TransformersEngine` returns both kinds. vLLM's are those of temperature 1, before all
    sampling parameters (unless its option ``logprobs_mode`` says otherwise). SGLang's are those of the temperature that
    it samples at.

    Args:
        outputs: what vLLM's or SGLang's ``generate`` returned.
        length: number of tokens in each row of the result; no output may have more.

    Returns:
        [outputs, length], fp32, on this rank's device: the generated tokens of each output, in order, then zeros.

    Raises:
        RolloutError: the outputs have no log-probabilities, or more than ``length`` tokens.
    """
    rows = [
        list(row) for output in (outputs if isinstance(outputs, list | tuple) else [outputs]) for row in _rows(output)
    ]
    found = torch.zeros(len(rows), length)
    for number, row in enumerate(rows):
        if len(row) > length:
            raise RolloutError(
                f"cannot read log-probabilities: output {number} has {len(row)} tokens, expected at most {length}. "
                "Pass the largest number of generated tokens as length."
            )
        found[number, : len(row)] = torch.tensor(row)
    return found.to(current_device())


def _rows(output: Any) -> list[list[float]]:
    """Return the log-probabilities of the sequences in one output."""
    if isinstance(output, dict):
        entries = output.get("meta_info", {}).get("output_token_logprobs")
        if entries is not None:
            return [[_number(entry[0]) for entry in entries]]
    elif all(getattr(sequence, "logprobs", None) is not None for sequence in getattr(output, "outputs", [None])):
        return [
            [_number(of_token[token].logprob) for token, of_token in zip(own.token_ids, own.logprobs, strict=True)]
            for own in output.outputs
        ]
    raise RolloutError(
        f"cannot read log-probabilities: an output of type {type(output).__name__} has none, expected those of vLLM or "
        "SGLang. Sample with logprobs=0 in the sampling parameters (vLLM), or with return_logprob=True (SGLang)."
    )


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
