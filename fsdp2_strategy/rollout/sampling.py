"""Generate with transformers from the sampling parameters of SGLang and vLLM.

Input: prompts as token ids, and sampling parameters. Output: the generated token ids of each prompt, and their
log-probabilities if they are requested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fsdp2_strategy.errors import RolloutError, did_you_mean

_TOKEN_LIMIT = {"max_new_tokens": 128, "max_tokens": 16}
"""Names of the largest number of generated tokens, and their defaults: SGLang's, vLLM's."""

_SAME = {
    "max_new_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "min_tokens": "min_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
"""Parameters that have the same meaning in transformers, and their names there."""

_NO_TOKEN = 2**31 - 1
"""A token id that no vocabulary has. transformers warns of a negative one."""

_HANDLED = {"n", "stop_token_ids", "ignore_eos", "truncate_prompt_tokens", "logprobs"}

LogProbs = Literal["raw", "sampled"]
"""Which log-probabilities of generated tokens are computed: "raw" at temperature 1, as vLLM does by default; "sampled"
at the sampling temperature, as SGLang does. Neither contains top_p, top_k, min_p and the repetition penalty."""

_ABOUT_TEXT = {
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "no_stop_trim",
    "detokenize",
}
"""Parameters about the text of an output. The outputs here are token ids."""

_NEUTRAL = {"frequency_penalty": 0, "presence_penalty": 0, "best_of": 1}
"""Parameters that transformers lacks, and the values with which they have no effect."""


@dataclass(slots=True)
class Logprob:
    """The log-probability of a token, with vLLM's name."""

    logprob: float


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence, with vLLM's names."""

    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token, its log-probability by token id; None unless the sampling parameters have ``logprobs=0``."""


@dataclass(slots=True)
class RequestOutput:
    """The generated sequences of one prompt, with vLLM's names."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


@dataclass(frozen=True, slots=True)
class Sample:
    """One generated sequence."""

    token_ids: list[int]
    log_probs: list[float]
    """The log-probability of each token; empty unless requested."""

    def as_vllm(self) -> CompletionOutput:
        """Return the sequence as in the output of vLLM."""
        pairs = zip(self.token_ids, self.log_probs, strict=False)
        logprobs = [{token: Logprob(log_prob)} for token, log_prob in pairs] if self.log_probs else None
        return CompletionOutput(self.token_ids, logprobs)

    def as_sglang(self, *, has_log_probs: bool) -> dict[str, Any]:
        """Return the sequence as in the output of SGLang."""
        output: dict[str, Any] = {"output_ids": self.token_ids}
        if has_log_probs:
            pairs = zip(self.log_probs, self.token_ids, strict=True)
            output["meta_info"] = {"output_token_logprobs": [(log_prob, token, None) for log_prob, token in pairs]}
        return output


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The arguments of ``generate`` for some sampling parameters."""

    options: dict[str, Any]
    sequence_count: int
    """Number of sequences for each prompt."""
    end_tokens: tuple[int, ...]
    """The tokens that end a sequence; empty if none does."""
    longest_prompt: int | None
    """Number of last tokens of a prompt to use; None for all."""
    has_logprobs: bool
    """Whether ``logprobs=0`` requests the log-probabilities of the generated tokens."""


def plan(sampling_params: object, end_tokens: Sequence[int]) -> SamplingPlan:
    """Translate SGLang's or vLLM's parameters (a mapping or an object; None: the defaults) for ``generate``."""
    given = _as_mapping(sampling_params)
    options: dict[str, Any] = {"max_new_tokens": _TOKEN_LIMIT["max_new_tokens"], "min_new_tokens": 0}
    # All are passed, so that the model's own generation configuration changes none of them.
    options |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    for name, value in given.items():
        if name in _SAME:
            options[_SAME[name]] = value if value is not None else options[_SAME[name]]
        elif value is not None and name not in _HANDLED | _ABOUT_TEXT and _NEUTRAL.get(name) != value:
            raise RolloutError(
                f"cannot generate: the sampling parameter {name} is {value!r}, expected parameters that transformers "
                f"has, too.{did_you_mean(name, [*_SAME, *_HANDLED])} Remove it, or use another engine."
            )
    if given.get("logprobs") not in (None, 0):
        raise RolloutError(
            f"cannot generate: the sampling parameter logprobs is {given['logprobs']!r}, expected 0, for the generated "
            "tokens only. Pass 0, or use another engine."
        )
    options["top_k"] = max(options["top_k"], 0)  # -1: all tokens
    options["do_sample"] = options["temperature"] > 0
    if not options["do_sample"]:
        options |= {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None}  # unused; the values of no warning
    ends = [] if given.get("ignore_eos") else list(end_tokens)
    ends += given.get("stop_token_ids") or []
    count = given.get("n")
    return SamplingPlan(
        options,
        1 if count is None else count,
        tuple(ends),
        given.get("truncate_prompt_tokens"),
        given.get("logprobs") is not None,
    )


def _as_mapping(sampling_params: object) -> Mapping[str, Any]:
    """Return the parameters; of an object, those that differ from the defaults of its class, and the token limit."""
    if sampling_params is None:
        return {}
    if isinstance(sampling_params, Mapping):
        return sampling_params
    kind: Any = type(sampling_params)
    names = getattr(kind, "__struct_fields__", None) or vars(sampling_params)
    default = kind()
    public = [name for name in names if not name.startswith("_")]
    changed = {name: getattr(sampling_params, name) for name in public}
    changed = {name: value for name, value in changed.items() if value != getattr(default, name, None)}
    return {name: getattr(sampling_params, name) for name in _TOKEN_LIMIT if name in public} | changed


@torch.no_grad()
def generate_samples(
    model: Any, prompts: Sequence[Sequence[int]], sampling_params: object, *, log_probs: LogProbs | None = None
) -> list[list[Sample]]:
    """Generate ``n`` samples for each prompt of token ids; not collective.

    Prompts of equal length are generated together, so there is no padding before a prompt, and no prompt affects
    another one. The end-of-sequence token is included. By default, ``logprobs=0`` in the parameters requests "raw".
    """
    own_ends = model.generation_config.eos_token_id
    ends = [] if own_ends is None else own_ends if isinstance(own_ends, list) else [own_ends]
    planned = plan(sampling_params, ends)
    wanted = log_probs or ("raw" if planned.has_logprobs else None)
    shortened = [
        list(prompt)[-planned.longest_prompt :] if planned.longest_prompt else list(prompt) for prompt in prompts
    ]
    if empty := [index for index, prompt in enumerate(shortened) if not prompt]:
        raise RolloutError(f"cannot generate: prompt {empty[0]} has no tokens, expected at least one. Remove it.")
    of_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(shortened):
        of_length.setdefault(len(prompt), []).append(index)
    results: list[list[Sample]] = [[] for _ in prompts]
    for length, indices in of_length.items():
        repeated = [index for index in indices for _ in range(planned.sequence_count)]
        tokens = torch.tensor([shortened[index] for index in repeated], device=model.device)
        recorder = _LogProbRecorder(planned.options["temperature"] if wanted == "sampled" else 1.0)
        with recorder.attached_to(model) if wanted else nullcontext():
            generated = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                eos_token_id=list(planned.end_tokens) or [_NO_TOKEN],  # None would mean the model's own
                pad_token_id=planned.end_tokens[0] if planned.end_tokens else 0,
                stopping_criteria=[recorder] if wanted else None,
                **planned.options,
            )
        found = recorder.log_probs(len(repeated))
        for index, sequence, values in zip(repeated, generated[:, length:].tolist(), found, strict=True):
            own = _until_end(sequence, planned.end_tokens)
            results[index].append(Sample(own, values[: len(own)]))
    return results


class _LogProbRecorder:
    """Record the log-probability of each token that ``generate`` chooses, with the logits of one step in memory.

    A hook of the model's forward records the logits. The object itself is a stopping criterion, which ``generate``
    calls with each new token; it stops nothing.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._logits: torch.Tensor | None = None
        self._steps: list[torch.Tensor] = []

    @contextmanager
    def attached_to(self, model: nn.Module) -> Iterator[None]:
        """Record the logits of the model's forward while the context is active."""
        handle = model.register_forward_hook(self._record_logits)
        try:
            yield
        finally:
            handle.remove()

    def _record_logits(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._logits = output.logits[:, -1]

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        assert self._logits is not None
        all_log_probs = (self._logits.float() / self._temperature).log_softmax(dim=-1)
        self._logits = None
        self._steps.append(all_log_probs.gather(-1, input_ids[:, -1:].to(all_log_probs.device)))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def log_probs(self, batch: int) -> list[list[float]]:
        """Return the log-probabilities of each sequence; empty lists if nothing was recorded."""
        return torch.cat(self._steps, dim=1).tolist() if self._steps else [[] for _ in range(batch)]


def _until_end(sequence: list[int], end_tokens: Sequence[int]) -> list[int]:
    """Return a sequence up to its first end token, which is included."""
    for index, token in enumerate(sequence):
        if token in end_tokens:
            return sequence[: index + 1]
    return sequence


def loaded_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer, which may be given as its folder or name."""
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(tokenizer)
