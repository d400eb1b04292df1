"""Generate with a trainer's engine: split images and videos by prompt, call the engine, and share its outputs.

Input: prompts as token ids, or as texts with images and videos. Output: one `Generation` for each prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from fsdp2_strategy.errors import RolloutError, counted

T = TypeVar("T")

_PLACEHOLDERS = re.compile(r"<\|vision_start\|>(?:(?:<\|image_pad\|>)+|(?:<\|video_pad\|>)+)<\|vision_end\|>")


@dataclass(slots=True)
class Generation:
    """The engine's output for one prompt."""

    prompt_token_ids: list[int] | None
    """The prompt; None if the engine tokenized a text and does not return its tokens."""
    output_token_ids: list[int]
    """The generated tokens."""


def prompts_with_media(
    all_prompts: Sequence[str],
    all_images: Sequence[Any] | None,
    images_num: Sequence[int] | None,
    all_videos: Sequence[Any] | None,
    videos_num: Sequence[int] | None,
) -> list[dict[str, Any]]:
    """Return for each prompt a dict with "prompt" and, for images or videos, "multi_modal_data"; not collective.

    Images are a list for each prompt, or those of all prompts in one list; ``images_num`` counts those of each prompt.
    In a text without images and videos, their placeholders are removed.
    """
    images_of = _split(all_images, images_num, len(all_prompts))
    videos_of = _split(all_videos, videos_num, len(all_prompts))
    inputs: list[dict[str, Any]] = []
    for prompt, own_images, own_videos in zip(all_prompts, images_of, videos_of, strict=True):
        media = {name: own for name, own in (("image", own_images), ("video", own_videos)) if own}
        inputs.append(
            {"prompt": prompt, "multi_modal_data": media} if media else {"prompt": _PLACEHOLDERS.sub("", prompt)}
        )
    return inputs


def _split(media: Sequence[Any] | None, counts: Sequence[int] | None, prompt_count: int) -> list[list[Any]]:
    """Return the images (or videos) of each prompt, from a list of lists or one list of all."""
    if media is None or counts is None:
        return [[] for _ in range(prompt_count)]
    split = []
    start = 0
    for index, count in enumerate(counts):
        given = media[index] if index < len(media) else None
        own = given if isinstance(given, list) and len(given) == count else list(media[start : start + count])
        split.append(own if own and own[0] is not None else [])
        start += count
    return split


def generate(
    engine: Any,
    engine_type: str | None,
    sampling_params: Any,
    *,
    token_ids: Sequence[list[int]] | None = None,
    inputs: Sequence[dict[str, Any]] | None = None,
) -> list[Generation]:
    """Call an engine with prompts as token ids, or with texts and images; not collective.

    An engine of the type "vllm" is called as vLLM is, any other as SGLang is, which returns dicts with "output_ids".
    """
    if (token_ids is None) == (inputs is None):
        given = "neither" if token_ids is None else "both"
        raise RolloutError(
            f"cannot generate: {given} of prompt_token_ids and multi_modal_inputs are given, expected one. Pass token "
            "ids for prompts without images, else texts with images."
        )
    prompts: Sequence[Any] = token_ids if token_ids is not None else inputs or ()
    if not prompts:
        return []
    if engine_type == "vllm":
        outputs = engine.generate(sampling_params=sampling_params, prompts=prompts, use_tqdm=False)
        results = [Generation(list(out.prompt_token_ids), list(out.outputs[0].token_ids)) for out in outputs]
    elif token_ids is not None:
        outputs = engine.generate(sampling_params=sampling_params, input_ids=token_ids, image_data=None)
        results = [Generation(ids, list(out["output_ids"])) for ids, out in zip(token_ids, outputs, strict=False)]
    else:
        texts = [given["prompt"] for given in prompts]
        images = [_image_data(given) for given in prompts]
        outputs = engine.generate(sampling_params=sampling_params, prompt=texts, image_data=images)
        results = [Generation(None, list(out["output_ids"])) for out in outputs]
    if len(outputs) != len(prompts):
        raise RolloutError(
            f"cannot use the engine's output: it returned {counted(len(outputs), 'output')} for "
            f"{counted(len(prompts), 'prompt')}, expected one for each. Use sampling parameters with n=1."
        )
    return results


def _image_data(given: dict[str, Any]) -> Any:
    """Return the images of a prompt as SGLang expects them: None, one image, or a list of images."""
    media = given.get("multi_modal_data", {})
    if "video" in media:
        raise RolloutError(
            "cannot generate: a prompt has a video, expected images only, because LightRFT passes no videos to this "
            "engine. Use the engine 'vllm'."
        )
    images = media.get("image")
    return images[0] if images and len(images) == 1 else images


def gather_lists(items: list[T], group: dist.ProcessGroup) -> list[list[T]]:
    """Return the lists of all ranks of a group, in rank order; collective over the group."""
    gathered: list[Any] = [items] * dist.get_world_size(group)
    if len(gathered) > 1:
        dist.all_gather_object(gathered, items, group=group)
    return gathered


class LengthStatistics:
    """Summarize the lengths of outputs in each ``every``-th step; the group has one rank of each engine."""

    def __init__(self, group: dist.ProcessGroup, every: int) -> None:
        self.group = group
        self.every = every
        self.lengths: list[int] = []
        """The lengths of all outputs of the last step in which they were collected."""

    def collect(self, outputs: Sequence[Generation], step: int) -> dict[str, Any] | None:
        """Return statistics of lengths in tokens; None in a step that collects none; collective over the group."""
        if self.every > 0 and step % self.every:
            return None
        of_ranks = gather_lists([len(output.output_token_ids) for output in outputs], self.group)
        self.lengths = lengths = [length for own in of_ranks for length in own]
        if not lengths:
            return {"total_samples": 0}
        values = np.asarray(lengths)
        return {
            "total_samples": len(lengths),
            "min_length": int(values.min()),
            "max_length": int(values.max()),
            "mean_length": float(values.mean()),
            "median_length": float(np.median(values)),
            "percentiles": {at: round(float(np.percentile(values, at))) for at in (50, 80)},
        }
