"""Describe tensors that differ between a model and stored files, and advise what to do.

Input: names and shapes. Output: parts of error messages. The advice depends on the caller of the load, because callers
have different options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp2_strategy.errors import counted

Shapes = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What the caller of a load can do if model and files do not match, for error messages."""

    other_shape: str
    other_vocabulary: str
    """If only vocabularies differ; ``{size}`` stands for the size in the files."""
    missing: str
    unexpected: str

    def for_shapes(self, different: Mapping[str, Shapes]) -> str:
        """Return the advice for tensors of other shapes, given the stored and the model's shape of each."""
        sizes = {stored[0] for name, (stored, own) in different.items() if _is_vocabulary(name, stored, own)}
        only_vocabularies = all(_is_vocabulary(name, stored, own) for name, (stored, own) in different.items())
        if only_vocabularies and len(sizes) == 1:
            return self.other_vocabulary.format(size=sizes.pop())
        return self.other_shape


_BELONG_TOGETHER = "Check that configuration and files belong together"
LOAD_WEIGHTS = Advice(
    other_shape=f"{_BELONG_TOGETHER}.",
    other_vocabulary="If embeddings are resized after from_pretrained, build the model outside of init_on_meta. "
    "Otherwise, call resize_token_embeddings({size}) before the model is sharded.",
    missing=f"{_BELONG_TOGETHER}. Or load with strict=False: such tensors keep their values, or are initialised if "
    "they have none.",
    unexpected=f"{_BELONG_TOGETHER}. Or load with strict=False, which ignores such tensors.",
)
PREPARE_MODEL = Advice(
    other_shape=f"{_BELONG_TOGETHER}.",
    other_vocabulary="If embeddings are resized after from_pretrained, build the model outside of init_on_meta.",
    missing=f"{_BELONG_TOGETHER}: the files may be of a smaller model, or incomplete. To initialise these tensors, "
    "build the model outside of init_on_meta.",
    unexpected=f"{_BELONG_TOGETHER}.",
)
CHECKPOINT = Advice(
    other_shape="Build the model from the configuration that it was saved with.",
    other_vocabulary="The saved model has another vocabulary: call resize_token_embeddings({size}) before "
    "prepare_model.",
    missing="Build the same model.",
    unexpected="Build the same model.",
)


def _is_vocabulary(name: str, stored: tuple[int, ...], own: tuple[int, ...]) -> bool:
    is_embedding = any(part in name for part in ("embed", "wte", "lm_head", "shared.weight"))
    return is_embedding and len(stored) == len(own) == 2 and stored[1] == own[1]


def describe_shapes(different: Mapping[str, Shapes], where: str) -> str:
    """Return a text with the first three tensors whose shapes differ; ``where`` is the place of the stored ones."""
    shown = [f"{name} is {list(stored)} there, expected {list(own)}" for name, (stored, own) in different.items()]
    more = f"; {counted(len(shown) - 3, 'more tensor')}" if len(shown) > 3 else ""
    return f"{counted(len(shown), 'tensor')} of {where} {'has' if len(shown) == 1 else 'have'} another shape: " + (
        f"{'; '.join(shown[:3])}{more}"
    )
