"""Choose one layer of each kind that a transformers configuration describes.

Input: the values of a configuration. Output: the indices of the chosen layers, and the values that describe a model of
these layers only. `tiny_config` shrinks configurations with it.

Configurations describe layers by lists with one value per layer, by lists of layer indices, by a number of first or
last layers, or by a period. Two layers are of the same kind if all of these agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_LAYER_INDICES = re.compile(
    "mlp_only_layers|attn_layer_indices|moe_layers|full_attn_idxs|hybrid_layer_ids|cross_attention_layers|"
    "global_attn_indexes|"
    "fullatt_block_indexes|intermediate_layers_indices|deepstack_visual_indexes|ple_layer_ids"
)
_FIRST_LAYERS = re.compile(
    "first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_start_index|"
    "loop_layer_index_start|loop_layer_index_end"
)
_LAST_LAYERS = re.compile("num_kv_shared_layers")
_SOURCE_LAYERS = "kv_source_layers"
"""Attribute with the index, per layer, of the layer whose keys and values it uses: usually its own index."""

_PERIODS = {
    "attn_layer_period": "layers_block_type",
    "expert_layer_period": "",
    "decoder_sparse_step": "",
    "moe_layer_interval": "",
    "interleave_moe_layer_step": "moe_layers",
    "no_rope_layer_interval": "no_rope_layers",
    "sliding_window_pattern": "layer_types",
    "_sliding_window_pattern": "layer_types",
    "full_attention_interval": "layer_types",
    "global_attn_every_n_layers": "layer_types",
    "layer_group_size": "layer_types",
}
"""Attributes that choose every n-th layer, and the list that takes precedence if the configuration has it."""

_REPEATED = "block_types"
"""Attribute with the kinds of the first layers, which the others repeat."""

_TWO_OF_EACH = ("inkling2_text", "modernbert-decoder", "zamba", "zamba2")
"""Model types that need two layers of each kind: layers share weights, or the first one lacks a module."""


def layers_of_each_kind(values: dict[str, Any], count: int) -> list[int]:
    """Return the indices of one layer of each kind, in order, and of at least two layers if there are as many."""
    periods = {n: p for n, p in values.items() if n in _PERIODS and p and not values.get(_PERIODS[n])}
    kinds = [str(list(_kind_of_layer(values, periods, i, count))) for i in range(count)]
    each = 2 if values.get("model_type") in _TWO_OF_EACH else 1
    chosen = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < each]
    if any(period > 1 for period in periods.values()) or values.get(_REPEATED):
        chosen = list(range(chosen[-1] + 1))  # periods count from the first layer
    if len(chosen) < 2:
        chosen = list(range(min(2, count)))
    return chosen


def names_layers(name: str) -> bool:
    """Return whether the numbers in an attribute are indices or counts of layers."""
    return any(p.fullmatch(name) for p in (_LAYER_INDICES, _FIRST_LAYERS, _LAST_LAYERS)) or name == _SOURCE_LAYERS


def choose_values(name: str, value: Any, layers: list[int], count: int) -> Any:
    """Return the value of an attribute for a model that has only the ``layers`` of these indices, of ``count``."""
    if value is None:
        return None
    if name == _SOURCE_LAYERS:
        own = [old for old in layers if value[old] == old]
        return [layers.index(max(i for i in own if i <= value[old])) for old in layers]
    if _LAYER_INDICES.fullmatch(name):
        return [new for new, old in enumerate(layers) if old in value]
    if _FIRST_LAYERS.fullmatch(name):
        return sum(i < value for i in layers)
    if _LAST_LAYERS.fullmatch(name):
        return sum(i >= count - value for i in layers)
    return [value[i] for i in layers] if _is_per_layer(name, value, count) else value


def _kind_of_layer(values: dict[str, Any], periods: dict[str, int], index: int, count: int) -> Iterator[Any]:
    """Yield all that the configuration says of one layer in particular."""
    for name, value in values.items():
        if isinstance(value, list | tuple):
            yield from _listed(name, value, index, count)
        elif name == "per_layer_config":
            yield changes_of_layer(value, index)
        elif name in periods:
            offset = values.get(name.replace("period", "offset"), -1) if "period" in name else -1
            yield index % value == offset % value
        elif is_number(value) and _FIRST_LAYERS.fullmatch(name):
            yield index < value
        elif is_number(value) and _LAST_LAYERS.fullmatch(name):
            yield index >= count - value


def _listed(name: str, value: list[Any] | tuple[Any, ...], index: int, count: int) -> Iterator[Any]:
    """Yield what a list says of one layer."""
    if name == _REPEATED and value:
        yield value[index % len(value)]
    elif name == _SOURCE_LAYERS:
        yield value[index] == index
    elif _LAYER_INDICES.fullmatch(name):
        yield index in value
    elif _is_per_layer(name, value, count):
        yield value[index]


def changes_of_layer(changes: dict[Any, Any], index: int) -> dict[str, Any]:
    """Return what `per_layer_config` changes for one layer; its keys may be padded with zeros."""
    return next((change for key, change in changes.items() if int(key) == index), {})


def _is_per_layer(name: str, value: list[Any] | tuple[Any, ...], count: int) -> bool:
    """Return whether a list has one value per layer; short lists may have that length by chance."""
    return len(value) == count and (count > 6 or re.search("layer|type|pattern", name) is not None)


def is_number(value: Any) -> bool:
    """Return whether a value is a number of something, in contrast to a flag."""
    return isinstance(value, int) and not isinstance(value, bool)
