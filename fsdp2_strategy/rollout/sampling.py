"""Generate with transformers from the sampling parameters of SGLang and vLLM.

Input: prompts as token ids, and sampling parameters. Output: the generated token ids of each prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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

_HANDLED = {"n", "stop_token_ids", "ignore_eos", "truncate_prompt_tokens"}

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
class CompletionOutput:
    """One generated sequence, with vLLM's names."""

    token_ids: list[int]


@dataclass(slots=True)
class RequestOutput:
    """The generated sequences of one prompt, with vLLM's names."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


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


def plan(sampling_params: object, end_tokens: Sequence[int]) -> SamplingPlan:
    """Translate sampling parameters.

    Args:
        sampling_params: a mapping with SGLang's or vLLM's names, or vLLM's ``SamplingParams``; None for the defaults.
        end_tokens: the model's own end-of-sequence tokens.

    Raises:
        RolloutError: transformers has no equal of a parameter, or its name is unknown.
    """
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
    options["top_k"] = max(options["top_k"], 0)  # -1: all tokens
    options["do_sample"] = options["temperature"] > 0
    if not options["do_sample"]:
        options |= {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None}  # unused; the values of no warning
    ends = [] if given.get("ignore_eos") else list(end_tokens)
    ends += given.get("stop_token_ids") or []
    count = given.get("n")
    return SamplingPlan(options, 1 if count is None else count, tuple(ends), given.get("truncate_prompt_tokens"))


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
def generate_tokens(model: Any, prompts: Sequence[Sequence[int]], sampling_params: object) -> list[list[list[int]]]:
    """Generate for prompts of any lengths; not collective.

    Prompts of equal length are generated together, so there is no padding before a prompt, and no prompt affects
    another one. The end-of-sequence token is included.

    Args:
        model: a transformers model.
        prompts: token ids of each prompt.
        sampling_params: see `plan`. With several sequences for each prompt (``n``), they are samples.

    Returns:
        For each prompt, the token ids of its sequences.

    Raises:
        RolloutError: see `plan`; or a prompt is empty.
    """
    own_ends = model.generation_config.eos_token_id
    ends = [] if own_ends is None else own_ends if isinstance(own_ends, list) else [own_ends]
    planned = plan(sampling_params, ends)
    shortened = [
        list(prompt)[-planned.longest_prompt :] if planned.longest_prompt else list(prompt) for prompt in prompts
    ]
    if empty := [index for index, prompt in enumerate(shortened) if not prompt]:
        raise RolloutError(f"cannot generate: prompt {empty[0]} has no tokens, expected at least one. Remove it.")
    of_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(shortened):
        of_length.setdefault(len(prompt), []).append(index)
    results: list[list[list[int]]] = [[] for _ in prompts]
    for length, indices in of_length.items():
        repeated = [index for index in indices for _ in range(planned.sequence_count)]
        tokens = torch.tensor([shortened[index] for index in repeated], device=model.device)
        generated = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            eos_token_id=list(planned.end_tokens) or [-1],  # -1: no token; None would mean the model's own
            pad_token_id=planned.end_tokens[0] if planned.end_tokens else 0,
            **planned.options,
        )
        for index, sequence in zip(repeated, generated[:, length:].tolist(), strict=True):
            results[index].append(_until_end(sequence, planned.end_tokens))
    return results


def _until_end(sequence: list[int], end_tokens: Sequence[int]) -> list[int]:
    """Return a sequence up to its first end token, which is included."""
    for index, token in enumerate(sequence):
        if token in end_tokens:
            return sequence[: index + 1]
    return sequence
