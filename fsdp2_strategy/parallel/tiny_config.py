"""Shrink a transformers configuration: a model of the same structure that a CPU builds and runs in under a second.

Input: the configuration of a language or image-text model of any size. Output: a configuration of the same class with
the same flags, heads, kinds of layers and experts, but small dimensions, few layers and a small vocabulary.

[Note: tiny configurations] The rules go by attribute names, because the configurations of transformers share no
description of their sizes. `config.attribute_map` and `_SYNONYMS` reduce the names to common ones. Attributes that no
rule names are kept, except sizes that equal a product of known sizes (`2 * hidden_size`, `heads * head_dim`): they
become the same product of the new sizes. `_SPECIAL` has the values, by model type, that no rule yields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.hf.library_internals import copy_implementations
from fsdp2_strategy.parallel.layer_kinds import (
    changes_of_layer,
    choose_values,
    is_number,
    layers_of_each_kind,
    names_layers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VOCABULARY = 96
"""Vocabulary size of tiny configurations."""

ORDINARY_TOKENS = 64
"""Token ids from here on are those of special tokens, if the original ids are not smaller."""

MAX_HEADS = 96
"""Numbers of heads up to this are kept; larger ones are divided, together with the number of key/value heads."""

MAX_EXPERTS = 8

WINDOW = 6
"""Size of attention windows and chunks, so that short sequences cross them."""

_SYNONYMS = {
    "hidden_size": "n_embd|d_model|dim|embed_dim|emb_dim|embedding_dim|model_dim",
    "num_attention_heads": "n_head|n_heads|num_heads|attention_heads|decoder_attention_heads|encoder_attention_heads",
    "num_key_value_heads": "num_kv_heads|kv_n_heads|n_kv_heads|multi_query_group_num",
    "num_hidden_layers": "n_layer|n_layers|num_layers|decoder_layers|num_decoder_layers|num_blocks|depth",
    "head_dim": "dim_head|d_kv|d_head|kv_channels|attention_head_size|attention_head_dim",
}
_COMMON_NAME = {synonym: name for name, synonyms in _SYNONYMS.items() for synonym in synonyms.split("|")}

_OUTERMOST = ("_name_or_path", "output_attentions")
"""Attributes that some classes of inner configurations reject, although `to_dict` returns them."""

_OTHER_SIZES = re.compile("(?!.*(image|patch|block|crop|kernel)).*(size|dim|width|hidden|rank|inner|channels)(_.*)?")
_SIZES_OF_OTHERS = re.compile(".*(text|lm|out|proj|adapter|global).*")


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Copy the configuration of a causal or image-text language model with small sizes and the same structure.

    Kept are the class, all flags, the numbers of heads (up to `MAX_HEADS`), one layer of each kind and at least two
    layers, up to `MAX_EXPERTS` experts, windows (of `WINDOW` tokens), the kind of rotary scaling, and tied embeddings.

    >>> from transformers import Qwen2Config
    >>> tiny = tiny_config(Qwen2Config())
    >>> tiny.num_attention_heads, tiny.hidden_size, tiny.num_hidden_layers, tiny.vocab_size
    (32, 128, 2, 96)
    """
    try:
        tiny = type(config).from_dict(_Level(config.to_dict(), config.attribute_map, None).shrunk())
    except Exception as error:  # each configuration class raises its own errors
        raise ConfigError(
            f"cannot make a tiny configuration: {type(config).__name__} of model type {config.model_type!r} rejects "
            f"the reduced sizes ({error}). Add the sizes that it accepts to `_SPECIAL` in {__name__}."
        ) from error
    copy_implementations(config, tiny)
    return tiny


@dataclass(frozen=True, slots=True)
class _Sizes:
    """New sizes, in relation to the old ones."""

    hidden: int
    fewer: int
    """Divisor of the numbers of heads."""
    scale: float
    """New by old dimension of heads."""
    rotated: int
    """Part of the new dimension of heads that rotary embeddings rotate."""
    products: dict[int, int]
    """Maps multiples of the old hidden size, and heads times their dimension, to the new values."""


class _Level:
    """One level of a configuration: the configuration itself, or one within it."""

    def __init__(self, values: dict[str, Any], attribute_map: dict[str, str], outer: _Level | None) -> None:
        self.values = values
        self.outer = outer
        self.tokens: dict[int, int] = outer.tokens if outer else {}
        self.aliases = {actual: alias for alias, actual in attribute_map.items()}
        self.layer_count = self.number("num_hidden_layers") or len(values.get("layers_block_type") or ())
        self.layers = layers_of_each_kind(values, self.layer_count)
        self.expand = int(values.get("expand") or values.get("mamba_expand") or 1)
        self.sizes = self._choose_sizes()
        self.inner = self.sizes.hidden * self.expand  # of state spaces

    def shrunk(self) -> dict[str, Any]:
        """Return the values of this level with small sizes."""
        special = _SPECIAL.get(self.values.get("model_type") or "")
        kept = {name: v for name, v in self.values.items() if v or not self.outer or name not in _OUTERMOST}
        new = {name: self._shrink(name, value) for name, value in kept.items()}
        return new | (special(self) if special else {})

    def common_name(self, name: str) -> str:
        """Return the common name of an attribute, which may be the alias that the configuration class gives it."""
        if name in _SYNONYMS:
            return name
        alias = self.aliases.get(name, name)
        return _COMMON_NAME.get(alias, alias)

    def number(self, common: str) -> int:
        """Return a size, or 0 if this level does not have it."""
        named = (v for name, v in self.values.items() if self.common_name(name) == common)
        return next((int(v) for v in named if is_number(v) and v), 0)

    def _choose_sizes(self) -> _Sizes:
        """Choose the new sizes; a level without its own has those of the outer level or of the language model."""
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        others = self.outer or self._text_level()
        if others and (not hidden or (not heads and hidden == others.number("hidden_size"))):
            return others.sizes
        latent_dim, given_dim = self.values.get("qk_rope_head_dim") or 0, self.number("head_dim")
        head_dim = latent_dim or given_dim or hidden // (heads or 1)
        kv_heads = self.number("num_key_value_heads") or heads
        fewer = _divisor(heads, kv_heads)
        new_heads = heads // fewer or 8
        new_dim, rotated = (4, 4) if latent_dim else self._new_head_dim(head_dim, new_heads)
        width = heads * head_dim
        if latent_dim or not heads or (given_dim and width not in (hidden, hidden * self.expand)):
            new_hidden = new_heads * 2 * math.ceil(16 / new_heads)
        else:
            new_hidden = new_heads * new_dim // (width // hidden or 1)
        products = {k * head_dim: k // fewer * new_dim for k in (kv_heads, heads)}
        products |= {times * hidden: times * new_hidden for times in (4, 3, 2, 1)}
        return _Sizes(new_hidden, fewer, new_dim / (head_dim or new_dim), rotated, products)

    def _text_level(self) -> _Level | None:
        """Return the level of the language model, whose sizes a configuration of several models refers to."""
        inner = {name: value for name, value in self.values.items() if isinstance(value, dict)}
        found = [inner[name] for name in ("text_config", "llm_config", "decoder", "global_config") if name in inner]
        return _Level(found[0], _attribute_map(found[0].get("model_type")), None) if found else None

    def _new_head_dim(self, head_dim: int, heads: int) -> tuple[int, int]:
        """Choose a small dimension of heads, of which rotary embeddings rotate an even part, and return both."""
        smallest = 2 * max((len(s) for s in _found(self.values, "mrope_section")), default=1)
        parts = [1.0, *_found(self.values, "partial_rotary_factor"), *_found(self.values, "rotary_pct")]
        parts += [dim / head_dim for dim in _found(self.values, "rotary_dim") if head_dim]
        for new in range(4 if heads > 8 else 8, 129, 2):
            rotated = [int(new * part) for part in parts]
            if all(r % 2 == 0 and r >= smallest for r in rotated):
                return new, min(rotated)
        return head_dim, head_dim

    def _shrink(self, name: str, value: Any) -> Any:
        """Return the new value of one attribute."""
        if isinstance(value, dict):
            return self._shrink_dict(name, value)
        if isinstance(value, list | tuple):
            return self._shrink_list(name, list(value))
        return self._shrink_number(name, value) if is_number(value) else value

    def _shrink_dict(self, name: str, value: dict[Any, Any]) -> dict[Any, Any]:
        if name == "per_layer_config":
            changes = [changes_of_layer(value, i) for i in self.layers]
            return {i: {k: self._shrink(k, v) for k, v in c.items()} for i, c in enumerate(changes) if c}
        if name in ("rope_parameters", "rope_scaling") or name.endswith("_attention"):
            return {key: self._shrink(key, part) for key, part in value.items()}
        if name in ("id2label", "label2id") or not all(isinstance(key, str) for key in value):
            return value
        return _Level(value, _attribute_map(value.get("model_type")), self).shrunk()

    def _shrink_list(self, name: str, value: list[Any]) -> list[Any]:
        if name in ("short_factor", "long_factor"):
            return value[: self.sizes.rotated // 2]
        if name == "mrope_section":
            return [self.sizes.rotated // 2 - len(value) + 1, *[1] * (len(value) - 1)]
        chosen: list[Any] = choose_values(name, value, self.layers, self.layer_count)
        return chosen if names_layers(name) else [self._shrink_number(name, v) if is_number(v) else v for v in chosen]

    def _shrink_number(self, name: str, value: int) -> int:
        common = self.common_name(name)
        if common == "num_hidden_layers" and value == self.layer_count:
            return len(self.layers)
        if names_layers(name):
            return int(choose_values(name, value, self.layers, self.layer_count))
        for pattern, rule in _RULES.items():
            if re.fullmatch(pattern, common) or re.fullmatch(pattern, name):
                return rule(self, value)
        return self.known_size(name, value) if _OTHER_SIZES.fullmatch(name) else value

    def known_size(self, name: str, value: int) -> int:
        """Return the new value of a size that equals one of this level or, for an output, of the outer level."""
        own, others = self.sizes.products, self.outer.sizes.products if self.outer else {}
        known = own | others if _SIZES_OF_OTHERS.fullmatch(name) else others | own
        return known.get(value, value)

    def hidden_size(self, value: int) -> int:
        """Return the new hidden size: a second one in a level is that of the outer level if their values agree."""
        outer = self.known_size("out_hidden_size", value)
        return self.sizes.hidden if outer == value or value == self.number("hidden_size") else outer

    def token(self, value: int) -> int:
        """Return a special token's new id: large ids become one of the last ids, each its own as long as there are."""
        if value < ORDINARY_TOKENS:
            return value
        return self.tokens.setdefault(value, max(ORDINARY_TOKENS, VOCABULARY - 1 - len(self.tokens)))

    def scaled(self, dim: int) -> int:
        """Return the new value of a dimension of heads: all of them are scaled by the same factor."""
        return max(2, 2 * round(dim * self.sizes.scale / 2)) if dim else 0

    def heads(self, heads: int) -> int:
        """Return a new number of heads; kinds of heads other than the usual ones may need another divisor."""
        fewer = self.sizes.fewer if heads % self.sizes.fewer == 0 else 1
        return heads // fewer // _divisor(heads // fewer, heads // fewer)

    def state_heads(self, heads: int) -> int:
        """Return the new number of state-space heads, which divides the inner dimension."""
        numbers = range(1, min(heads, MAX_HEADS, self.inner // 2) + 1)
        return max(n for n in numbers if heads % n == self.inner % n == 0)

    def state_head_dim(self, dim: int) -> int:
        """Return the new dimension of state-space heads: if their product was the inner dimension, it stays so."""
        heads = next((v for n, v in self.values.items() if re.fullmatch(_STATE_HEADS, n) and v), 0)
        return self.inner // self.state_heads(heads) if heads else self.scaled(dim)

    def chosen_experts(self, chosen: int) -> int:
        """Return how many experts each token is routed to: as before, or two if there are fewer experts."""
        counts = [v for n, v in self.values.items() if re.fullmatch(_EXPERTS, self.common_name(n)) and is_number(v)]
        return chosen if max(counts, default=0) <= MAX_EXPERTS else min(chosen, 2)

    def positions(self, count: int) -> int:
        """Return the new number of positions, which scaled rotary embeddings compare with the original one."""
        kinds = {*_found(self.values, "rope_type"), *_found(self.values, "type")}
        return count if kinds - {"default"} else min(count, 256)


_EXPERTS = "(num|n)_(local_|routed_)?experts|moe_num_experts"
_STATE_HEADS = "(mamba_)?n_heads|mamba_num_heads|n_mamba_heads"
_RULES: dict[str, Callable[[_Level, int], int]] = {
    "hidden_size": _Level.hidden_size,
    "mamba_n_heads|mamba_num_heads": _Level.state_heads,
    "mamba_d_ssm": lambda level, _: level.inner,
    "mamba_d_head|mamba_head_dim|mamba_headdim": _Level.state_head_dim,
    ".*(num|n)_.*heads(_per_layer)?|num_query_groups|n_mamba_heads": _Level.heads,
    ".*(head_dim|rotary_dim)": _Level.scaled,
    "(encoder|decoder|num_encoder|num_decoder|num_hidden)_layers": lambda _, n: min(n, 2),
    "(.*_)?vocab(_size(_.*)?)?": lambda _, n: min(n, VOCABULARY),
    ".*token_(id|index|idx)s?|.*_tokens": _Level.token,
    _EXPERTS: lambda _, n: min(n, MAX_EXPERTS),
    "zero_expert_num": lambda _, n: min(n, 4),
    "num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts": _Level.chosen_experts,
    "n_group|num_expert_group": lambda _, n: min(n, 4),
    "topk_group": lambda _, n: min(n, 2),
    ".*(window|window_size|window_len|chunk_size|local_attention|index_topk)": lambda _, n: (
        min(n, WINDOW) if n > 0 else n
    ),
    "floor_scale|log_scaling_n_floor": lambda _, n: min(n, WINDOW),
    "index_block_size|index_topk_blocks|index_kpool": lambda _, n: min(n, 2),
    ".*(expert|moe).*(intermediate|hidden)_size": lambda _, n: min(n, 24),
    ".*(intermediate_size.*|ffn_dim|ffn_hidden_size|dim_ff|d_ff|dff|d_inner|mlp_dim|feed_forward_size)": (
        lambda level, n: level.sizes.products[n] if n == level.expand * level.number("hidden_size") else min(n, 48)
    ),
    ".*lora_rank": lambda _, n: min(n, 16),
    ".*(d_state|state_size)": lambda _, n: min(n, 8),
    ".*(dt_rank|time_step_rank)": lambda _, n: min(n, 4),
    "max_position_embeddings|.*n_positions|n_ctx|max_seq_len|max_.*_positions|context_length": _Level.positions,
}
"""Patterns of common names, and the new value of a number with such a name; the first match counts."""

_SPECIAL: dict[str, Callable[[_Level], dict[str, Any]]] = {
    "deepseek_v4": lambda level: {"compress_rates": dict.fromkeys(level.values["compress_rates"] or {}, 4)},
    "dory": lambda _: {
        "num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neo": lambda level: {"attention_types": [[[level.values["attention_layers"][i] for i in level.layers], 1]]},
    "inkling2_text": lambda _: {"n_layers_per_attn_res_block": 2},
    "inkling2_loop_text": lambda _: {"n_layers_per_attn_res_block": 1},
    "minimax": lambda _: {"block_size": WINDOW},
    "reformer": lambda level: {"axial_pos_embds_dim": [8, level.sizes.hidden - 8]},
}  # fmt: skip
"""By model type, values that no rule yields."""


def _divisor(heads: int, kv_heads: int) -> int:
    """Return the smallest number that divides both numbers of heads and makes them small enough."""
    both = math.gcd(heads, kv_heads)
    return next((d for d in range(1, both + 1) if both % d == 0 and heads // d <= MAX_HEADS), both or 1)


def _attribute_map(model_type: str | None) -> dict[str, str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    return dict(CONFIG_MAPPING[model_type].attribute_map) if model_type and model_type in CONFIG_MAPPING else {}


def _found(values: dict[str, Any], name: str) -> list[Any]:
    """Return the values of an attribute of the level and of its rotary scalings."""
    found = [values[name]] if values.get(name) else []
    return found + [v for key in values for v in (_found(values[key], name) if isinstance(values[key], dict) else ())]
