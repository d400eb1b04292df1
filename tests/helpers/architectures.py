"""Default configurations of the model types of transformers, with the values that published models have."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

_INDEXER = {
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}

_CONVOLUTIONS = {"layer_types": [*["conv", "conv", "full_attention"] * 10, "conv", "conv"]}

ADDED = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"use_mamba_kernels": False},
}
"""Values that published models have, and without which the default configuration of a class cannot be used."""


def default_config(name: str) -> Any:
    """Return the configuration of a model type that a model can be built from."""
    config = AutoConfig.for_model(name)
    for attribute, value in ADDED.get(name, {}).items():
        setattr(getattr(config, "text_config", config), attribute, value)
    if name == "dbrx":
        config.d_model, config.n_heads = 6144, 48  # as in `ffn_config`
        config.attn_config.rope_theta, config.attn_config.clip_qkv = 5e5, 8
    return config
