"""Measure why the log-probabilities of a trainer and an engine differ.

Input: the actor, the engine, sequences, and the engine's log-probabilities of them. Output: differences over the tokens
of all ranks; evidence by cause.

[Note: causes] Each cause is measured, as far as the engine reports what is needed:

- weights: checksums of the actor's weights, cast to the engine's dtypes, against those of the engine's weights;
- dtype: the dtypes of the engine's weights against those that the actor sends, if the cast weights are equal;
- temperature: the actor's log-probabilities at other temperatures, of which one may agree with the engine's;
- router: the experts that both choose for each token. If the choices are the cause, tokens after equal choices agree;
- tokenizer, chat template, prompts: compared as given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.agreement import all_or_none, any_rank
from fsdp2_strategy.distributed.collectives import all_reduce
from fsdp2_strategy.distributed.process_group import rank, sequence_size
from fsdp2_strategy.errors import RolloutError, counted, dtype_text, some
from fsdp2_strategy.logprob import token_log_probs
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.rollout.compared_sequences import ACTION, ComparedSequences
from fsdp2_strategy.rollout.experts import chosen_experts, has_routers
from fsdp2_strategy.rollout.log_prob_differences import LogProbDifferences, log_prob_differences
from fsdp2_strategy.rollout.protocol import Engine
from fsdp2_strategy.rollout.sampling import loaded_tokenizer
from fsdp2_strategy.rollout.stream import stream_weights, weight_checksums

_TEMPERATURES = (1.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 2.0)
"""Temperatures at which the engine may have computed its log-probabilities."""
_PROBE = "The sum of 12 and 7.5 is 19.5;\n\tça va? 你好 <b>x</b> def f(x): return x**2"
"""Text with digits, white space, accents, markup and another script, on which tokenizers differ."""
_FEW_TOKENS = 0.1
_MOST_OF_THE_DIFFERENCE = 0.8


@dataclass
class Comparison:
    """Compare an actor and its engine on sequences; all methods are collective; `differences` comes first."""

    actor: nn.Module
    engine: Engine | None
    sequences: ComparedSequences
    of_engine: torch.Tensor | None
    """[batch, n]: the engine's log-probabilities of this rank's answers; None if this rank has none."""
    temperature: float
    sent_dtype: torch.dtype | None
    not_measured: dict[str, str] = field(default_factory=dict)
    """Why a cause could not be measured on this rank, by cause."""

    @property
    def _mask(self) -> torch.Tensor:
        """The tokens that this rank counts: none without an engine; ranks that share sequences count once."""
        counts = self.of_engine is not None and rank() % sequence_size() == 0
        return self.sequences.answer_mask & counts

    def differences(self, ratio_band: tuple[float, float]) -> LogProbDifferences:
        """Return the differences over the tokens of all ranks."""
        own, of_engine = self._log_probs_at(self.temperature)
        self._absolute = (own.double() - of_engine.double()).abs()
        return log_prob_differences(own, of_engine, self._mask, ratio_band).over_ranks()

    def _log_probs_at(self, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the actor's log-probabilities, and the engine's; without those, the actor's again."""
        own = self._log_probs_of_actor(temperature)
        return own, own if self.of_engine is None else self.of_engine

    def weight_causes(self, steps_since_update: int, *, is_required: bool) -> dict[str, str]:
        """Find the causes "weights" and "dtype"; with ``is_required``, an engine must compute checksums."""
        stepped = f"the actor has taken {counted(steps_since_update, 'optimizer step')} since its weights were sent"
        held, dtypes = self._weights_of_engine(is_required=is_required)
        if not any_rank(held is not None):
            found = self._dtype_of_construction()
            return found | ({"weights": f"{stepped}. Call update_engine_weights."} if steps_since_update else {})
        differing: list[str] = []
        in_other_dtype: dict[str, str] = {}
        count = 0
        stream: Any = stream_weights(self.actor, dtype=self.sent_dtype)
        with all_or_none(ACTION, RolloutError), closing(stream):
            for name, tensor in stream:
                if held is None:
                    continue
                count += 1
                sent_as = dtype_text(tensor.dtype)
                held_as = dtypes.get(name, sent_as)
                same = held.get(name) == weight_checksums([(name, tensor.to(getattr(torch, held_as)))])[name]
                if not same:
                    differing.append(name)
                if held_as != sent_as:
                    in_other_dtype[name] = f"{held_as}, expected {sent_as}, in which the actor sends them"
        found = {}
        if differing:
            reason = (
                f"; {stepped}. Call update_engine_weights."
                if steps_since_update
                else "; no optimizer step since its weights were sent is known, so a checkpoint was loaded, or "
                "something else changed the engine's weights. Call update_engine_weights, with by_difference also "
                "verify=True."
            )
            found["weights"] = f"{some(differing, 'weight')} of {count} differ from the actor's{reason}"
        if cast := in_other_dtype.keys() - differing:
            equal = "they are" if len(cast) == len(in_other_dtype) else f"{len(cast):,} of them are"
            found["dtype"] = (
                f"the engine holds {some(list(in_other_dtype), 'weight')} of {count} in "
                f"{next(iter(in_other_dtype.values()))}; cast, {equal} equal. Build the engine in that dtype, or "
                "set bf16 or fp16 of the strategy to the engine's."
            )
        return found

    def temperature_cause(self, mean: float, tolerance: float) -> dict[str, str]:
        """Search a temperature of the actor's logits at which the mean difference is within the tolerance."""
        means = {
            candidate: log_prob_differences(*self._log_probs_at(candidate), self._mask, (1.0, 1.0)).over_ranks().mean
            for candidate in _TEMPERATURES
            if candidate != self.temperature
        }
        best = min(means, key=means.__getitem__)
        if not means[best] <= min(tolerance, mean / 4):  # also if it is NaN
            return {}
        return {
            "temperature": (
                f"the differences fall to {means[best]:.3g} on average if the trainer's logits are divided by {best:g} "
                f"instead of {self.temperature:g}. Use the temperature of the engine's log-probabilities."
            )
        }

    def router_cause(self, tolerance: float, *, is_last_candidate: bool) -> dict[str, str]:
        """Compare the chosen experts; without those of the engine, look for few large differences."""
        if not self.has_routers:
            return {}
        own, of_engine = self._experts()
        if any_rank(own is not None and of_engine is not None):
            return self._differing_experts(own, of_engine, tolerance, is_last_candidate=is_last_candidate)
        reason = "the engine does not report the experts that it chooses"
        if any_rank(own is None):
            reason = "the experts that the actor chooses cannot be recorded"
        self.not_measured["router"] = reason
        absolute = self._absolute[self._mask].sort(descending=True).values
        few = absolute[: max(1, round(_FEW_TOKENS * len(absolute)))].sum()
        of_few, total = all_reduce(torch.stack([few, absolute.sum()]), "sum").tolist()
        if not is_last_candidate or not _MOST_OF_THE_DIFFERENCE * total <= of_few < math.inf:
            return {}
        return {
            "router": (
                f"{_FEW_TOKENS:.0%} of the tokens have {of_few / total:.0%} of the differences, as if the routers "
                f"chose other experts for them; {reason}. Compare the choices of both."
            )
        }

    @property
    def has_routers(self) -> bool:
        """Whether the actor has routers that choose experts."""
        return has_routers(self.actor)

    def _log_probs_of_actor(self, temperature: float) -> torch.Tensor:
        sequences = self.sequences
        with _evaluating(self.actor):
            log_probs = token_log_probs(
                self.actor, sequences.ids, sequences.mask, temperature=temperature, **sequences.inputs
            )
        return sequences.in_given_layout(log_probs)

    def _weights_of_engine(self, *, is_required: bool) -> tuple[dict[str, str] | None, Mapping[str, str]]:
        """Return the checksums and dtypes of the engine's weights; None for checksums that it does not compute."""
        with all_or_none(ACTION, RolloutError):
            if self.engine is None:
                return None, {}
            try:
                if (held := self.engine.weight_checksums()) is None:
                    raise RolloutError(
                        f"cannot compare weights: {self.engine.class_name} has no weight_checksums, expected a "
                        "method that returns them. Add it, or omit compare_weights."
                    )
            except RolloutError as error:
                if is_required:
                    raise
                self.not_measured["weights"] = str(error).removesuffix(".")
                return None, {}
            dtypes = self.engine.weight_dtypes() or {}
            return held, {name: dtype_text(dtype) for name, dtype in dtypes.items()}

    def _dtype_of_construction(self) -> dict[str, str]:
        """Compare the dtype that this rank's engine was built in with those that the actor sends; not collective."""
        built_in = dtype_text(self.engine.dtype or "") if self.engine else ""
        own = {p.dtype for p in unwrap_model(self.actor).parameters() if p.is_floating_point()}
        sent = sorted(dtype_text(dtype) for dtype in ({self.sent_dtype} if self.sent_dtype else own))
        if not isinstance(getattr(torch, built_in, None), torch.dtype) or built_in in sent:
            return {}
        return {
            "dtype": (
                f"the engine was built in {built_in}, and the actor sends {', '.join(sent)}. Build the engine in that "
                "dtype, or set bf16 or fp16 of the strategy to the engine's."
            )
        }

    def _experts(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the experts [layers, batch, longest, k] that the actor and the engine choose; None if unknown."""
        sequences = self.sequences
        own = chosen_experts(self.actor, lambda: self._log_probs_of_actor(self.temperature))
        with all_or_none(ACTION, RolloutError):
            of_engine = None
            if self.engine is not None:
                of_engine = self.engine.routed_experts(sequences.ids, sequences.mask, **sequences.inputs)
            if own is not None and of_engine is not None and own.shape[:3] != of_engine.shape[:3]:
                raise RolloutError(
                    f"cannot {ACTION}: routed_experts of the engine returned the shape {list(of_engine.shape)}, "
                    f"expected {list(own.shape[:3])} and the number of experts. Correct it."
                )
        return own, None if of_engine is None else of_engine.to(sequences.ids.device)

    def _differing_experts(
        self, own: torch.Tensor | None, of_engine: torch.Tensor | None, tolerance: float, *, is_last_candidate: bool
    ) -> dict[str, str]:
        """Name the router if the tokens before which all choices are equal agree, and others do not."""
        sums, ks = torch.zeros(6, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        if own is not None and of_engine is not None:
            ks += ks.new_tensor([own.shape[-1], of_engine.shape[-1]])
            valid = self.sequences.mask.bool()
            differ = valid
            if own.shape[-1] == of_engine.shape[-1]:
                differ = (own.sort(-1).values != of_engine.sort(-1).values).any(-1).any(0) & valid  # in any layer
            affected = self.sequences.follow_any(differ)
            for i, chosen in enumerate((affected & self._mask, ~affected & self._mask)):
                sums[2 * i], sums[2 * i + 1] = chosen.sum(), self._absolute[chosen].sum()
            sums[4], sums[5] = differ.sum(), valid.sum()
        affected_count, of_affected, other_count, of_others, differing, tokens = all_reduce(sums, "sum").tolist()
        own_k, engine_k = all_reduce(ks, "max").tolist()
        if own_k != engine_k:
            experts = counted(int(engine_k), "expert")
            return {"router": f"the engine chooses {experts} for each token, the trainer {own_k:g}."}
        if not affected_count:
            return {}
        mean_affected = of_affected / affected_count
        shown = (
            f"other experts are chosen for {differing / tokens:.1%} of the tokens; from there on, log-probabilities "
            f"differ by {mean_affected:.3g} on average"
        )
        advice = "Compute the routers of both in fp32, or use the engine's choices in the trainer."
        if not other_count:
            return {"router": f"{shown}. {advice}"} if is_last_candidate else {}
        mean_of_others = of_others / other_count
        if mean_of_others <= tolerance < mean_affected:
            return {"router": f"{shown}, and all others by {mean_of_others:.3g}. {advice}"}
        return {}


def text_causes(
    tokenizers: tuple[Any, Any] | None, engine_prompts: Sequence[Sequence[int]] | None, compared: ComparedSequences
) -> dict[str, str]:
    """Compare tokenizers, chat templates, and the tokens of prompts; not collective."""
    found: dict[str, str] = {}
    if tokenizers is not None:
        own, of_engine = (loaded_tokenizer(tokenizer) for tokenizer in tokenizers)
        if evidence := _differing_tokens(own, of_engine):
            found["tokenizer"] = evidence
        templates = [getattr(tokenizer, "chat_template", None) for tokenizer in (own, of_engine)]
        if templates[0] != templates[1]:
            lengths = [f"{len(text):,} characters" if text else "none" for text in templates]
            found["chat template"] = (
                f"those of trainer ({lengths[0]}) and engine ({lengths[1]}) differ. Use the same tokenizer folder."
            )
    if engine_prompts is not None:
        own_prompts = compared.prompts()
        if len(engine_prompts) != len(own_prompts):
            raise RolloutError(
                f"cannot {ACTION}: engine_prompts has {len(engine_prompts)} prompts, expected {len(own_prompts)}, one "
                "for each sequence. Pass those of these sequences."
            )
        wrong = [i for i, (a, b) in enumerate(zip(own_prompts, engine_prompts, strict=True)) if a != list(b)]
        if wrong:
            first = wrong[0]
            a, b = own_prompts[first], list(engine_prompts[first])
            same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found["prompts"] = (
                f"{counted(len(wrong), 'prompt')} of {len(own_prompts)} differ; that of sequence {first} has "
                f"{len(a)} tokens in the trainer and {len(b)} in the engine, of which the first {same} are equal. Pass "
                "token ids to the engine, not texts."
            )
    return found


def _differing_tokens(own: Any, of_engine: Any) -> str | None:
    vocabularies = [tokenizer.get_vocab() for tokenizer in (own, of_engine)]
    if vocabularies[0] != vocabularies[1]:
        token = min(token for token, _ in vocabularies[0].items() ^ vocabularies[1].items())
        ids = [vocabulary.get(token, "no id") for vocabulary in vocabularies]
        sizes = [len(vocabulary) for vocabulary in vocabularies]
        return (
            f"the trainer's has {sizes[0]:,} tokens, the engine's {sizes[1]:,}; {token!r} is {ids[0]} in the first and "
            f"{ids[1]} in the second. Use the same tokenizer folder."
        )
    encoded = [list(tokenizer(_PROBE)["input_ids"]) for tokenizer in (own, of_engine)]
    if encoded[0] != encoded[1]:
        return (
            f"they have the same tokens, but encode a text as {len(encoded[0])} and {len(encoded[1])} tokens, which "
            "differ. Use the same tokenizer folder."
        )
    return None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to eval mode, and restore the mode of each module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
