"""Check that a trainer and its inference engine give sampled tokens the same log-probabilities, and find out why not.

Input: the actor, the engine, a few sampled sequences. Output: figures over the tokens of all ranks, and causes. See
[Note: causes] in `disagreement`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fsdp2_strategy.config.arguments import check_inputs
from fsdp2_strategy.distributed.agreement import all_or_none, check_equal
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.process_group import group_in_use, world_size
from fsdp2_strategy.errors import RolloutError, counted
from fsdp2_strategy.model.fsdp_state import device_of
from fsdp2_strategy.model.ranks import on_ranks_of
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.rollout.compared_sequences import ACTION, ComparedSequences
from fsdp2_strategy.rollout.disagreement import Comparison, text_causes
from fsdp2_strategy.rollout.protocol import Engine, RolloutEngine, engine_of

_OPTIONS = (
    "attention_mask",
    "engine_log_probs",
    "temperature",
    "ratio_band",
    "tolerance",
    "on_disagreement",
    "compare_weights",
    "tokenizers",
    "engine_prompts",
)
"""The optional arguments, which could be misspelled."""

_FP32_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.05
"""Mean absolute differences of log-probabilities, in nats, that rounding explains: in fp32, and in half precision."""


@dataclass(frozen=True)
class EngineAgreement:
    """How far the log-probabilities of a trainer and an engine differ, over the compared tokens of all ranks.

    Equal on every rank. Differences are those of log-probabilities, in nats.
    """

    mean_difference: float
    """Mean of the absolute differences."""
    largest_difference: float
    kl: float
    """Estimate of KL(engine || trainer): the mean of r - 1 - log r, with r the trainer's probability / the engine's."""
    share_outside_band: float
    """Share of the tokens whose r is outside ``ratio_band``."""
    tokens: int
    """Number of compared tokens."""
    tolerance: float
    """The largest mean difference that counts as agreement."""
    causes: Mapping[str, str] = field(default_factory=dict)
    """Evidence by cause: "weights", "dtype", "temperature", "router", "tokenizer", "chat template", "prompts", or
    "unknown"; empty if trainer and engine agree."""

    @property
    def agrees(self) -> bool:
        """Whether the mean difference is within the tolerance, and no comparison found a difference."""
        return self.mean_difference <= self.tolerance and not self.causes

    def metrics(self) -> dict[str, float]:
        """Return the figures with the names of docs/metrics.md; not collective."""
        return {
            "engine_difference": self.mean_difference,
            "engine_difference_largest": self.largest_difference,
            "engine_kl": self.kl,
            "engine_share_outside": self.share_outside_band,
        }

    def __str__(self) -> str:
        """Return the figures and the causes as a text."""
        causes = "".join(f" Likely cause: {name}: {evidence}" for name, evidence in self.causes.items())
        return (
            f"the log-probabilities of {counted(self.tokens, 'token')} differ by {self.mean_difference:.3g} on average "
            f"(largest {self.largest_difference:.3g}, KL {self.kl:.3g}, {self.share_outside_band:.1%} of the ratios "
            f"outside the band), expected at most {self.tolerance:.3g}.{causes}"
        )


@collective
@torch.no_grad()
def check_engine_agreement(
    actor: nn.Module,
    engine: RolloutEngine | None,
    sequences: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    answer_mask: torch.Tensor,
    engine_log_probs: torch.Tensor | None = None,
    temperature: float = 1.0,
    ratio_band: tuple[float, float] = (0.8, 1.25),
    tolerance: float | None = None,
    on_disagreement: Literal["warn", "raise"] = "warn",
    compare_weights: bool = False,
    tokenizers: tuple[Any, Any] | None = None,
    engine_prompts: Sequence[Sequence[int]] | None = None,
    sent_dtype: torch.dtype | None = None,
    steps_since_update: int = 0,
    **inputs: Any,
) -> EngineAgreement:
    """Compare the log-probabilities of sampled tokens by an actor and its engine; collective over the actor's ranks.

    The actor computes in eval mode, without gradients; its modes are restored. It runs once. If the figures disagree,
    it runs up to 14 times more, and its weights are gathered once. A rank without an engine and without
    ``engine_log_probs`` takes part in the collectives, and adds no tokens. The sequences of the ranks may differ in
    number and length; ranks that share sequences pass the same ones, and they count once.

    Args:
        actor: the trained model, or its wrapper.
        engine: the engine; None on ranks without one.
        sequences: [batch, length], int64: prompts and answers. A few are enough. They and the other tensors are moved
            to the device that the actor computes on.
        attention_mask: [batch, length]; padding may be on the left, on the right, and between prompt and answer. None
            if there is no padding.
        answer_mask: [batch, n], bool or 0 and 1: which of the last n tokens of the sequences are compared.
        engine_log_probs: [batch, n], in nats: those that the engine returned when it sampled (`sampled_log_probs`). By
            default, the engine's method ``log_probs`` computes them.
        temperature: temperature of the trainer's log-probabilities; it should be that of the engine's.
        ratio_band: ratios of probabilities from the first to the second number are inside the band.
        tolerance: largest mean difference that counts as agreement, in nats; by default 0.001, or 0.05 if the actor
            computes in half precision.
        on_disagreement: "warn" logs a warning on rank 0; "raise" raises RolloutError on every rank.
        compare_weights: compare the checksums of the weights in any case; a difference is a disagreement.
        tokenizers: the trainer's and the engine's tokenizer, or their folders; a difference is a disagreement.
        engine_prompts: for each sequence, the token ids of the prompt that the engine used (``prompt_token_ids`` of
            vLLM's outputs); a difference from the prompt in ``sequences`` is a disagreement.
        sent_dtype: dtype in which the actor's weights are sent to the engine; None for that of the shards.
        steps_since_update: number of optimizer steps of the actor since its weights were last sent.
        **inputs: further arguments of the models' forward, such as ``pixel_values``; tensors of the shape
            [batch, length, …] are moved with the tokens.

    Raises:
        RolloutError: on every rank, if an argument is invalid, no rank has log-probabilities of an engine, or, with
            "raise", trainer and engine disagree.
    """
    called = None if engine is None else engine_of(engine)
    with on_ranks_of(actor):
        with all_or_none(ACTION, RolloutError):
            _check_settings(ratio_band, tolerance, on_disagreement, inputs)
            check_inputs(inputs, _OPTIONS, unwrap_model(actor), ACTION, RolloutError)
            # An engine may have returned the sequences in host memory; all comparisons are made on the actor's device.
            sequences = sequences.to(device_of(unwrap_model(actor)))
            compared = ComparedSequences.of(sequences, attention_mask, answer_mask, inputs)
            tolerance = _tolerance(actor, sent_dtype) if tolerance is None else tolerance
        settings = (temperature, ratio_band, tolerance, on_disagreement, compare_weights, sent_dtype)
        check_equal(ACTION, settings, RolloutError, "the same settings on every rank. Pass the same ones.")
        with all_or_none(ACTION, RolloutError):
            of_engine = _engine_log_probs(called, engine_log_probs, compared, temperature)
            found = text_causes(tokenizers, engine_prompts, compared)
        comparison = Comparison(actor, called, compared, of_engine, temperature, sent_dtype)
        if engine_log_probs is not None:
            comparison.not_measured["order"] = (
                "whether engine_log_probs are those of the last n tokens of sequences, in their order"
            )
        differences = comparison.differences(ratio_band)
        tokens, total, kl, outside, *_ = differences.sums.tolist()
        if not tokens:
            raise RolloutError(
                f"cannot {ACTION}: no rank has an engine and a token that answer_mask selects, expected at least one. "
                "Set up an engine, or pass engine_log_probs."
            )
        has_figures_to_explain = not total / tokens <= tolerance
        if compare_weights or has_figures_to_explain:
            found |= comparison.weight_causes(steps_since_update, is_required=compare_weights)
        found = _of_all_ranks(found)
        if has_figures_to_explain:
            found |= _explain(comparison, total / tokens, tolerance, found)
        result = EngineAgreement(
            total / tokens, differences.largest.item(), kl / tokens, outside / tokens, int(tokens), tolerance, found
        )
    if not result.agrees:
        message = f"cannot rely on the engine's samples: {result}"
        if on_disagreement == "raise":
            error = RolloutError(message)
            error.is_agreed = True
            raise error
        log("%s", message, level=logging.WARNING)
    return result


def _explain(comparison: Comparison, mean: float, tolerance: float, found: Mapping[str, str]) -> dict[str, str]:
    """Return further causes of a mean difference besides those found; "unknown" if there is none; collective."""
    within = max(tolerance, _HALF_TOLERANCE) if "dtype" in found else tolerance
    causes = comparison.temperature_cause(mean, within)
    causes |= comparison.router_cause(within, is_last_candidate=not found and not causes)
    if found or causes:
        return causes
    not_measured = _of_all_ranks(comparison.not_measured)
    measured = {"weights": "weights and their dtypes", "temperature": "temperature"}
    measured |= {"router": "chosen experts"} if comparison.has_routers else {}
    excluded = [text for name, text in measured.items() if name not in not_measured]
    reasons = "".join(f" Not measured: {reason}." for reason in not_measured.values())
    return {"unknown": f"excluded by measurement: {', '.join(excluded)}.{reasons}"}


def _check_settings(
    ratio_band: tuple[float, float], tolerance: float | None, on_disagreement: str, inputs: Mapping[str, Any]
) -> None:
    low, high = ratio_band
    for is_wrong, name, value, expected in (
        (on_disagreement not in ("warn", "raise"), "on_disagreement", on_disagreement, "'warn' or 'raise'"),
        (not 0 <= low <= 1 <= high, "ratio_band", ratio_band, "two numbers around 1"),
        (tolerance is not None and not tolerance >= 0, "tolerance", tolerance, "a number that is at least 0"),
    ):
        if is_wrong:
            raise RolloutError(f"cannot {ACTION}: {name} is {value!r}, expected {expected}. Change it.")
    if "position_ids" in inputs:
        raise RolloutError(
            f"cannot {ACTION}: position_ids is among the inputs, expected none, because positions are computed from "
            "attention_mask. Omit it."
        )


def _tolerance(actor: nn.Module, sent_dtype: torch.dtype | None) -> float:
    dtypes = {p.dtype for p in unwrap_model(actor).parameters() if p.is_floating_point()}
    narrowest = min((dtype.itemsize for dtype in ({sent_dtype} if sent_dtype else dtypes)), default=4)
    return _HALF_TOLERANCE if narrowest < torch.float32.itemsize else _FP32_TOLERANCE


def _engine_log_probs(
    engine: Engine | None, given: torch.Tensor | None, compared: ComparedSequences, temperature: float
) -> torch.Tensor | None:
    """Return the engine's log-probabilities [batch, n] of this rank's answers; None on a rank without any."""
    if given is None:
        if engine is None:
            return None
        computed = engine.log_probs(compared.ids, compared.mask, temperature=temperature, **compared.inputs)
        if computed is None:
            raise RolloutError(
                f"cannot {ACTION}: {engine.class_name} has no log_probs, and engine_log_probs is None, expected "
                "one of them. Pass those that it returned with the samples; see sampled_log_probs."
            )
        _check_result(computed, (compared.ids.shape[0], compared.ids.shape[1] - 1), "log_probs of the engine returned")
        given = compared.in_given_layout(computed.to(compared.ids.device))
    _check_result(given, tuple(compared.answer_mask.shape), "engine_log_probs has")
    given = given.to(compared.ids.device)
    if (wrong := given[compared.answer_mask]).isnan().any() or (wrong > _FP32_TOLERANCE).any():
        raise RolloutError(
            f"cannot {ACTION}: the engine's log-probabilities contain NaN or a number above 0, expected "
            "log-probabilities in nats. Check which values the engine returns."
        )
    return given


def _check_result(values: object, shape: tuple[int, ...], subject: str) -> None:
    if not isinstance(values, torch.Tensor):
        raise RolloutError(
            f"cannot {ACTION}: {subject} the type {type(values).__name__}, expected a tensor {list(shape)}. Make one "
            "of the engine's outputs with sampled_log_probs."
        )
    if tuple(values.shape) != shape:
        raise RolloutError(
            f"cannot {ACTION}: {subject} the shape {list(values.shape)}, expected {list(shape)}. Pass one number for "
            "each token."
        )


def _of_all_ranks(own: dict[str, str]) -> dict[str, str]:
    """Return the union of the causes that the ranks found; the evidence is that of the first rank; collective."""
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, own, group=group_in_use())
    return {name: evidence for of_rank in reversed(gathered) for name, evidence in of_rank.items()}
