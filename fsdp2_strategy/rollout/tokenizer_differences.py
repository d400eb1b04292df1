"""Compare the tokenizers, chat templates and prompts of a trainer and an engine.

Input: two tokenizers; the token ids of prompts. Output: evidence for each difference, by cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp2_strategy.errors import RolloutError, counted
from fsdp2_strategy.rollout.compared_sequences import ACTION, ComparedSequences

_PROBE = "The sum of 12 and 7.5 is 19.5;\n\tça va? 你好 <b>x</b> def f(x): return x**2"
"""Text with digits, white space, accents, markup and another script, on which tokenizers differ."""


def text_causes(
    tokenizers: tuple[Any, Any] | None, engine_prompts: Sequence[Sequence[int]] | None, compared: ComparedSequences
) -> dict[str, str]:
    """Compare tokenizers, chat templates, and the tokens of prompts; not collective."""
    found: dict[str, str] = {}
    if tokenizers is not None:
        own, of_engine = (_loaded(tokenizer) for tokenizer in tokenizers)
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


def _loaded(tokenizer: Any) -> Any:
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(tokenizer)
