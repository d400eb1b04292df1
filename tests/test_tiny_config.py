"""Tiny configurations keep the structure of the model: its modules, heads, kinds of layers, windows, experts, flags."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from helpers.architectures import default_config
from helpers.worlds import some
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.parallel.tiny_config import MAX_EXPERTS, MAX_HEADS, ORDINARY_TOKENS, VOCABULARY, WINDOW, tiny_config

USUAL = (
    "llama", "qwen2", "qwen3_next", "mixtral", "deepseek_v3", "gemma3_text", "gpt_oss", "gpt2", "gpt_neox", "bloom",
    "falcon", "jamba", "mamba2", "llama4_text", "minimax", "zamba2", "modernbert-decoder", "cohere2",
)  # fmt: skip

NOT_RUN = {"gemma4_unified_assistant", "reformer"}
"""The first needs the keys and values of another model, the second sequences of an exact length for gradients."""

if transformers.__version__.startswith("5.5."):
    NOT_RUN.add("dbrx")  # its router cannot be multiplied with hidden states in this version

MORE_HEADS = {"gpt_neox", "got_ocr2"}
"""gpt_neox has 64 heads of dimension 8, because a quarter of it is rotated; got_ocr2 has a convolutional adapter."""


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def structure(model):
    """Return the names of parameters without numbers, and the classes of modules."""
    names = {re.sub(r"\.\d+(?=\.|$)", ".N", name) for name, _ in model.named_parameters()}
    return names, {type(module).__name__ for module in model.modules()}


def run(config, model_class=AutoModelForCausalLM):
    """Build a model of a tiny configuration, check its logits and gradients, and return it."""
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = model_class.from_config(config).float().eval()
    tokens = torch.randint(5, ORDINARY_TOKENS, (2, 24))
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
    assert logits.shape[:2] == tokens.shape
    assert logits.isfinite().all()
    logits.square().mean().backward()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())
    return model


def value(config, name):
    """Return an attribute of a configuration; some that differ between layers raise errors of their own."""
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001
        return None


ALL = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *USUAL})


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # what one version of it deprecates, and uses
@pytest.mark.parametrize("name", some(ALL, USUAL[::2], full={*ALL[::3], *USUAL}))
def test_a_tiny_model_has_the_structure_of_the_large_one(name):
    try:
        large = default_config(name)
        expected = structure(on_meta(large))
    except Exception as error:
        if name in USUAL:
            raise
        pytest.skip(f"transformers cannot build its own default configuration: {error}"[:200])
    tiny = tiny_config(large)
    assert type(tiny) is type(large)
    if name != "blt":  # one of its projections exists only if two sizes differ
        assert structure(on_meta(tiny)) == expected
    for attribute in ("tie_word_embeddings", "use_sliding_window", "alibi", "is_decoder", "dtype", "hidden_act"):
        assert value(tiny, attribute) == value(large, attribute)
    if (heads := value(large, "num_attention_heads")) and isinstance(heads, int) and heads <= MAX_HEADS:
        assert value(tiny, "num_attention_heads") == heads
        assert value(tiny, "num_key_value_heads") == value(large, "num_key_value_heads")
    if isinstance(value(large, "layer_types"), list):
        assert set(tiny.layer_types) == set(large.layer_types)
    if (window := value(large, "sliding_window")) is not None:
        assert value(tiny, "sliding_window") == min(window, WINDOW)
    if name in NOT_RUN:
        return
    model = run(tiny)
    assert sum(p.numel() for p in model.parameters()) < (2.5e6 if name in MORE_HEADS else 2e6)


def llama_70b():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return transformers.LlamaConfig(
        hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, num_hidden_layers=80, vocab_size=128256,
        rope_scaling={**scaling, "original_max_position_embeddings": 8192}, max_position_embeddings=131072,
        bos_token_id=128000, eos_token_id=[128001, 128008], pad_token_id=128004, attn_implementation="eager",
    )  # fmt: skip


def test_special_tokens_and_the_rotary_scaling_are_in_range():
    large = llama_70b()
    tiny = tiny_config(large)
    special = [tiny.bos_token_id, *tiny.eos_token_id, tiny.pad_token_id]
    assert len(set(special)) == 4
    assert all(ORDINARY_TOKENS <= token < VOCABULARY == tiny.vocab_size for token in special)
    assert (tiny.num_attention_heads, tiny.num_key_value_heads, tiny.num_hidden_layers) == (64, 8, 2)
    assert tiny.rope_parameters == large.rope_parameters
    assert tiny._attn_implementation == "eager"
    run(tiny)


def test_the_original_is_not_changed():
    large = transformers.Qwen3NextConfig()
    before = large.to_dict()
    tiny_config(large)
    assert large.to_dict() == before


def test_windows_of_the_last_layers_are_kept():
    large = transformers.Qwen2Config(
        num_attention_heads=28, num_key_value_heads=4, hidden_size=3584, num_hidden_layers=28, use_sliding_window=True,
        sliding_window=32768, max_window_layers=20,
    )  # fmt: skip
    tiny = tiny_config(large)
    assert tiny.layer_types == ["full_attention", "sliding_attention"]
    assert (tiny.sliding_window, tiny.max_window_layers) == (WINDOW, 1)
    run(tiny)


def test_the_factors_of_longrope_follow_the_dimension_of_heads():
    scaling = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    large = transformers.Phi3Config(
        rope_scaling=scaling, max_position_embeddings=131072, original_max_position_embeddings=4096
    )
    tiny = tiny_config(large)
    pairs = tiny.hidden_size // tiny.num_attention_heads // 2
    assert tiny.rope_parameters["long_factor"] == [2.0] * pairs
    run(tiny)


def test_sections_of_multimodal_rotary_embeddings_follow_the_dimension_of_heads():
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    text = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "rope_scaling": rope}
    large = transformers.Qwen2VLConfig(text_config=text, vision_config={"hidden_size": 3584})
    tiny = tiny_config(large)
    sections = tiny.text_config.rope_parameters["mrope_section"]
    assert 2 * sum(sections) == tiny.text_config.hidden_size // 28
    assert tiny.vision_config.hidden_size == tiny.text_config.hidden_size
    run(tiny, AutoModelForImageTextToText)


def test_implementations_of_attention_are_kept_at_each_level():
    large = transformers.LlavaConfig(attn_implementation={"text_config": "sdpa", "vision_config": "eager"})
    tiny = tiny_config(large)
    for part in ("text_config", "vision_config"):
        assert getattr(tiny, part)._attn_implementation == getattr(large, part)._attn_implementation
    assert tiny.vision_config._attn_implementation == "eager"


def test_experts_and_their_groups_are_consistent():
    tiny = tiny_config(transformers.DeepseekV3Config())
    assert tiny.n_routed_experts == MAX_EXPERTS
    per_group = tiny.n_routed_experts // tiny.n_group
    assert per_group >= 2, "the score of a group is that of its two best experts"
    assert tiny.num_experts_per_tok <= per_group * tiny.topk_group
    assert tiny.topk_group < tiny.n_group
    assert (tiny.first_k_dense_replace, tiny.num_hidden_layers) == (1, 2), "a dense layer and a sparse one"
    mixtral = tiny_config(transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=3))
    assert (mixtral.num_local_experts, mixtral.num_experts_per_tok) == (4, 3)


def test_more_heads_are_divided_together_with_those_of_keys():
    large = transformers.FalconConfig(
        hidden_size=14848, num_attention_heads=232, num_kv_heads=8, new_decoder_architecture=True, num_hidden_layers=80
    )
    tiny = tiny_config(large)
    assert (tiny.num_attention_heads, tiny.num_kv_heads) == (58, 2)
    run(tiny)


def test_a_class_that_rejects_small_sizes_is_named():
    class LargeConfig(transformers.LlamaConfig):
        model_type = "only_large"

        def __post_init__(self, **kwargs):
            super().__post_init__(**kwargs)
            if self.hidden_size < 1024:
                raise ValueError("hidden_size must be at least 1024")

    with pytest.raises(ConfigError, match=r"LargeConfig of model type 'only_large' rejects .*at least 1024"):
        tiny_config(LargeConfig())
