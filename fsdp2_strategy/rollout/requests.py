"""Check the requests of a trainer in another process, before an engine gets them.

Input: the name of a call and its arguments, as they were received. Output: none, or an error that the trainer gets.

[Note: allowed arguments] Engines pass their keyword arguments on, in the end to ``generate`` of transformers, vLLM or
SGLang, where some of them name code, files or models to load. So an argument is passed on only if it is named here, or
in the process that serves: by the engine's own method, as a parameter, or by ``serve(..., allowed_arguments=...)``.
Whatever is named here also has a type and bounds. What names code, a file, a model, a tokenizer or a template cannot be
allowed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2_strategy.errors import RolloutError, did_you_mean, shown

CALLS = ("weight_checksums", "weight_dtypes", "sleep", "wake_up", "generate", "log_probs", "routed_experts")
"""Methods of an engine that a trainer may call."""
_LARGEST = 2**31 - 1
_MOST_COPIES = 1 << 16
"""Maximum number of sequences or beams for a prompt."""
_MOST_CHARACTERS = 1 << 24
_IMAGE_TEXT = "data:image/"
"""Beginning of the text of an image; other texts are paths or addresses, which the engine would open."""


@dataclass(frozen=True)
class _Kind:
    """The values that an argument may have, besides None."""

    text: str
    """For messages."""
    allows: Callable[[Any], bool]


def _is_integer(value: Any, least: int = -_LARGEST, most: int = _LARGEST) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST  # not infinite, not NaN


def _is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= _MOST_CHARACTERS


def _nested(allows: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a function that allows values, None, and nested lists of them."""

    def allows_nested(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return all(map(allows_nested, value))
        return value is None or allows(value)

    return allows_nested


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(name in _OF_A_PROMPT and _OF_A_PROMPT[name].allows(inner) for name, inner in value.items())
    return _is_text(value) or _is_integer(value)


def _is_media(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        kind in ("image", "video", "audio") and _TENSORS.allows(inner) for kind, inner in value.items()
    )


def _are_sampling_params(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_are_sampling_params, value))
    return isinstance(value, Mapping)  # what it contains is checked by name


_FLAG = _Kind("a bool", lambda value: type(value) is bool)
_COUNT = _Kind(f"an integer from 0 to {_LARGEST}", lambda value: _is_integer(value, 0))
_INTEGER = _Kind(f"an integer of at most {_LARGEST}", _is_integer)
_SEED = _Kind("an integer of 64 bits", lambda value: _is_integer(value, -(2**63), 2**64 - 1))
_COPIES = _Kind(f"an integer from 1 to {_MOST_COPIES}", lambda value: _is_integer(value, 1, _MOST_COPIES))
_NUMBER = _Kind("a finite number", _is_number)
_EARLY_STOPPING = _Kind("a bool or 'never'", lambda value: type(value) is bool or value == "never")
_TOKENS = _Kind("token ids, or a tensor of them", _nested(lambda value: _is_integer(value) or _is_tensor(value)))
_TEXTS = _Kind("a text, or lists of texts", _nested(_is_text))
_TENSORS = _Kind(
    "a tensor, or lists of tensors and numbers", _nested(lambda value: _is_tensor(value) or _is_number(value))
)
_PROMPTS = _Kind("texts, token ids, or mappings with prompt, prompt_token_ids or multi_modal_data", _nested(_is_prompt))
_IMAGES = _Kind(
    f"tensors, or texts that begin with {_IMAGE_TEXT!r}",
    _nested(lambda value: _is_tensor(value) or (_is_text(value) and value.startswith(_IMAGE_TEXT))),
)
_PARAMETERS = _Kind("a mapping, or a list of mappings", _are_sampling_params)
_TOKEN_BIAS = _Kind(
    "a mapping from token ids to numbers",
    lambda value: (
        isinstance(value, Mapping)
        and all((_is_integer(key) or (_is_text(key) and key.isdecimal())) and _is_number(v) for key, v in value.items())
    ),
)

_OF_A_PROMPT = {
    "prompt": _TEXTS,
    "prompt_token_ids": _TOKENS,
    "multi_modal_data": _Kind("a mapping", _is_media),
}


def _all(kind: _Kind, names: str) -> dict[str, _Kind]:
    """Return the kind of each of several names, which spaces separate."""
    return dict.fromkeys(names.split(), kind)


MODEL_INPUTS = _all(
    _TENSORS,
    """
    attention_mask decoder_attention_mask decoder_input_ids decoder_inputs_embeds inputs_embeds position_ids
    token_type_ids mm_token_type_ids cache_position padding_mask pixel_values pixel_mask pixel_attention_mask
    pixel_values_videos pixel_values_images image_grid_thw video_grid_thw image_grid_hw second_per_grid_ts rope_deltas
    image_sizes image_attention_mask image_embeds image_features image_position_ids video_position_ids aspect_ratio_ids
    aspect_ratio_mask cross_attention_mask spatial_shapes target_sizes images_per_sample batch_num_images num_crops
    num_local_patches high_res_pixel_values pixel_values_local num_soft_tokens_per_image num_frames_per_video num_tiles
    target_sizes_videos image_num_crops image_token_pooling image_grids video_token_pooling video_grids
    video_merge_sizes video_compression_mask num_chunks_per_video patches_grid flattened_patches image_pixel_values bbox
    input_values input_values_mask input_features input_features_mask feature_attention_mask audio_input_features
    audio_embed_sizes audio_attention_mask audio_values state states actions negative_prompt_ids
    negative_prompt_attention_mask
    """,
)
"""Inputs of a model's forward, which are tensors."""

SAMPLING = {
    **_all(_COUNT, "max_new_tokens max_tokens min_new_tokens min_tokens logprobs prompt_logprobs"),
    **_all(_COPIES, "n best_of"),
    **_all(_INTEGER, "top_k truncate_prompt_tokens"),
    **_all(_SEED, "seed sampling_seed"),
    **_all(_NUMBER, "temperature top_p min_p repetition_penalty frequency_penalty presence_penalty length_penalty"),
    **_all(_FLAG, "ignore_eos skip_special_tokens spaces_between_special_tokens include_stop_str_in_output"),
    **_all(_FLAG, "no_stop_trim detokenize"),
    **_all(_TEXTS, "stop bad_words"),
    **_all(_TOKENS, "stop_token_ids allowed_token_ids"),
    "logit_bias": _TOKEN_BIAS,
}
"""Sampling parameters of vLLM and SGLang."""

GENERATE = {
    **MODEL_INPUTS,
    **_all(_TOKENS, "inputs input_ids"),
    **_all(_COUNT, "max_new_tokens max_length min_new_tokens min_length top_k no_repeat_ngram_size"),
    **_all(_COUNT, "encoder_no_repeat_ngram_size top_logprobs_num"),
    "logprob_start_len": _INTEGER,
    "seed": _SEED,
    **_all(_COPIES, "num_beams num_beam_groups num_return_sequences"),
    **_all(_NUMBER, "temperature top_p min_p top_h typical_p epsilon_cutoff eta_cutoff penalty_alpha"),
    **_all(_NUMBER, "repetition_penalty encoder_repetition_penalty length_penalty diversity_penalty"),
    **_all(_NUMBER, "guidance_scale max_time"),
    **_all(_FLAG, "do_sample use_cache renormalize_logits remove_invalid_values return_dict_in_generate"),
    **_all(_FLAG, "output_scores output_logits output_attentions output_hidden_states return_routing"),
    **_all(_FLAG, "return_logprob return_hidden_states use_tqdm"),
    **_all(_TOKENS, "eos_token_id pad_token_id bos_token_id decoder_start_token_id forced_bos_token_id"),
    **_all(_TOKENS, "forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids force_words_ids"),
    "early_stopping": _EARLY_STOPPING,
    **_all(_TEXTS, "stop_strings prompt"),
    "prompts": _PROMPTS,
    "image_data": _IMAGES,
    "sampling_params": _PARAMETERS,
}
"""Arguments of ``generate``, as transformers, vLLM and SGLang name them."""

_SCORES = {**MODEL_INPUTS, "sequences": _TENSORS, "temperature": _NUMBER}
_ARGUMENTS: dict[str, dict[str, _Kind]] = {"generate": GENERATE, "log_probs": _SCORES, "routed_experts": _SCORES}

_NEVER = frozenset(
    """
    custom_generate trust_remote_code generation_config logits_processor logits_processors stopping_criteria
    prefix_allowed_tokens_fn assistant_model assistant_tokenizer tokenizer processor streamer use_model_defaults
    synced_gpus past_key_values cache_implementation cache_config compile_config watermarking_config
    continuous_batching_config lora_request lora_path custom_logit_processor custom_params chat_template
    tokenization_kwargs mm_processor_kwargs extra_args model model_path tokenizer_path revision code_revision cache_dir
    hub_kwargs token audio_data video_data
    """.split()  # noqa: SIM905
)
"""Arguments that name or are code, files, models, tokenizers or templates; see [Note: allowed arguments]."""
_LIBRARIES = ("transformers", "vllm", "sglang", "torch", "peft")
"""Packages whose methods' parameters were not chosen by who serves."""
_LEAST_POSITIONS = 2
"""Arguments that a user's engine takes by position if it has ``*args``; those that name code have later positions."""


def checked_names(allowed_arguments: Collection[str]) -> frozenset[str]:
    """Return the names of additional arguments that a server allows; raise if one cannot be allowed."""
    names = [allowed_arguments] if isinstance(allowed_arguments, str) else list(allowed_arguments)
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name in _NEVER:
            raise RolloutError(
                f"cannot serve: allowed_arguments has {shown(name)}, expected names of arguments that are values, "
                "because a trainer must not choose code, files or models of this process. Set it in the engine."
            )
    return frozenset(names)


def check_arguments(
    method: Callable[..., Any], call: str, args: Sequence[Any], kwargs: Mapping[Any, Any], allowed: Collection[str]
) -> None:
    """Raise if a trainer may not pass these arguments to an engine; see [Note: allowed arguments]."""
    own, positions = _own_parameters(method)
    known = _ARGUMENTS.get(call, {})
    is_scoring = known is _SCORES
    most = 2 if is_scoring else positions if known else 0
    if len(args) > most:
        raise RolloutError(
            f"cannot call {call}: {len(args)} arguments were passed by position, expected at most {most}. Pass "
            "arguments by name."
        )
    for index, value in enumerate(args if is_scoring else ()):
        if value is not None and not _is_tensor(value):
            raise _wrong_value(call, f"argument {index}", value, "a tensor")
    others = sorted((own | set(allowed)) - known.keys() - _NEVER) if known else []
    if unknown := [name for name in kwargs if name not in known and name not in others]:
        listed = [*others, *(name for name in known if name not in MODEL_INPUTS)]
        expected = f"a tensor of the model such as pixel_values, or one of {', '.join(listed)}" if listed else "none"
        raise RolloutError(
            f"cannot call {call}: the argument {shown(unknown[0])} was passed, expected {expected}."
            f"{did_you_mean(str(unknown[0]), [*known, *others])} Other arguments must be allowed where the engine is "
            "served: serve(..., allowed_arguments=[...])."
        )
    for name in kwargs.keys() & known.keys():
        if kwargs[name] is not None and not known[name].allows(kwargs[name]):
            raise _wrong_value(call, f"the argument {name}", kwargs[name], known[name].text)
    for parameters in _each(kwargs.get("sampling_params")):
        _check_sampling(call, parameters)


def _check_sampling(call: str, parameters: Mapping[Any, Any]) -> None:
    for name, value in parameters.items():
        if name not in SAMPLING:
            raise RolloutError(
                f"cannot call {call}: the sampling parameter {shown(name)} was passed, expected one of "
                f"{', '.join(SAMPLING)}.{did_you_mean(str(name), SAMPLING)} Set others in the engine that is served."
            )
        if value is not None and not SAMPLING[name].allows(value):
            raise _wrong_value(call, f"the sampling parameter {name}", value, SAMPLING[name].text)


def _each(parameters: Any) -> Sequence[Mapping[Any, Any]]:
    """Return the mappings in sampling parameters."""
    if isinstance(parameters, list | tuple):
        return [mapping for inner in parameters for mapping in _each(inner)]
    return [parameters] if isinstance(parameters, Mapping) else []


def _wrong_value(call: str, what: str, value: Any, expected: str) -> RolloutError:
    found = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
    return RolloutError(f"cannot call {call}: {what} is {found}, expected {expected}. Pass that.")


def _own_parameters(method: Callable[..., Any]) -> tuple[set[str], int]:
    """Return the names of a method's parameters, and how many arguments it takes by position.

    Those of methods of transformers, vLLM and SGLang do not count, because nobody has chosen them for a server.
    """
    module = str(getattr(method, "__module__", "")).split(".")[0]
    if module in _LIBRARIES:
        return set(), 1
    try:
        parameters = inspect.signature(method).parameters.values()
    except (ValueError, TypeError):  # without a signature
        return set(), 1
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    by_position = sum(p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters)
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        by_position = max(by_position, 1 if module == __package__.split(".")[0] else _LEAST_POSITIONS)
    return by_name, by_position
