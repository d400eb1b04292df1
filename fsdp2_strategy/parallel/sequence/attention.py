"""Compute attention over full sequences whose parts are on several ranks.

Input: the queries, keys and values of this rank's part. Output: the attention's result for this part. For each
attention function of transformers (eager, sdpa, flash, flex), a function of this file is registered under another name,
which the configuration of a model selects. It exchanges parts of the sequence for parts of the heads, calls the
function of transformers for full sequences and some heads, and exchanges back. If the ranks do not divide the query
heads, each rank instead attends from its own queries to the gathered keys and values.

Masks are built for full sequences, too. transformers would derive packed documents from the positions that a rank has,
and miss a document that begins at the first token of a part.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.errors import SequenceError
from fsdp2_strategy.hf.library_internals import attention_function, mask_function, register_attention
from fsdp2_strategy.hf.packed_rows import ARGUMENT
from fsdp2_strategy.parallel.sequence.exchange import gather_sequence, to_heads, to_sequence
from fsdp2_strategy.parallel.sequence.shard import SequenceShard, check_recomputed, current_shard

_PREFIX = "sequence_parallel_"
_PER_HEAD = {"position_bias": 1, "s_aux": 0, "sinks": 0}
"""Arguments of attention functions that have one entry per query head, and the dimension of the heads."""


_callers: ContextVar[set[nn.Module] | None] = ContextVar("callers", default=None)


@contextmanager
def calling_modules() -> Iterator[set[nn.Module]]:
    """Collect the modules that call our attention functions in the block."""
    callers: set[nn.Module] = set()
    token = _callers.set(callers)
    try:
        yield callers
    finally:
        _callers.reset(token)


def split_name(implementation: str) -> str:
    """Register our functions around those of an attention implementation, and return their name."""
    name = _PREFIX + implementation
    make_mask = mask_function(implementation)
    register_attention(
        name,
        functools.partial(_attend, implementation),
        None if make_mask is None else functools.partial(_mask_of_full, make_mask),
    )
    return name


def configured_name(implementation: str) -> str:
    """Return the name of the attention implementation that `split_name` was called with; others are unchanged."""
    return implementation.removeprefix(_PREFIX)


def is_split_name(implementation: str | None) -> bool:
    """Return whether `split_name` has returned a name."""
    return (implementation or "").startswith(_PREFIX)


def _mask_of_full(make_mask: Callable[..., Any], **arguments: Any) -> Any:
    """Build the mask of full sequences, from the arguments that transformers passes for a part."""
    shard = current_shard()
    if shard is None:
        return make_mask(**arguments)
    is_causal = arguments.get("allow_is_causal_skip", True) and "allow_is_bidirectional_skip" not in arguments
    if shard.documents is not None:
        arguments["mask_function"] = _within_documents(arguments["mask_function"], shard)
        arguments["allow_is_causal_skip"] = False
    padding = shard.attention_mask if is_causal else shard.padding_mask
    padding = None if padding is None else padding.bool()
    arguments |= {"attention_mask": padding, "q_length": shard.length, "kv_length": shard.length}
    return make_mask(**arguments | {"q_offset": 0, "kv_offset": 0})


def _within_documents(allows: Callable[..., Any], shard: SequenceShard) -> Callable[..., Any]:
    """Restrict a mask function to pairs of tokens in the same document; it gets positions within documents."""
    documents, positions = shard.documents, shard.position_ids
    assert documents is not None and positions is not None
    positions = (positions[0] if positions.ndim == 3 else positions).expand(len(documents), -1)

    def within(batch: Any, head: Any, query: Any, key: Any) -> Any:
        is_same = documents[batch, query] == documents[batch, key]
        return is_same & allows(batch, head, positions[batch, query], positions[batch, key])

    return within


def _attend(  # noqa: PLR0917  transformers passes by position
    implementation: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **arguments: Any,
) -> tuple[torch.Tensor, Any]:
    """Call the attention function of an implementation for full sequences; collective if there is a current shard.

    Arguments and result are those of transformers' attention functions: [batch, heads, length, width], and
    [batch, length, heads, width] with no attention weights.
    """
    arguments.pop(ARGUMENT, None)
    if (callers := _callers.get()) is not None:
        callers.add(module)
    shard = current_shard()
    check_recomputed(module, shard)
    call = _Call(module, implementation, attention_mask, arguments)
    if shard is None:
        return call.run(query, key, value)
    if arguments.get("position_ids") is not None:
        arguments["position_ids"] = shard.position_ids
    if key.shape[2] != query.shape[2] or "cross_attention_states" in inspect.signature(module.forward).parameters:
        # The keys are those of images, which every rank has in full.
        call.mask = call.rows(call.mask, shard)
        return call.run(query, key, value)
    if call.mask is None and not call.is_causal:
        call.mask = _mask_of_padding(shard, implementation, query.dtype)
    if query.shape[1] % shard.ranks.count == 0:
        return _attend_with_some_heads(call, shard, query, key, value), None
    return _attend_to_gathered_keys(call, shard, query, key, value), None


class _Call:
    """A call of an attention function of transformers for one module, with the mask in the form that it takes."""

    def __init__(self, module: nn.Module, implementation: str, mask: Any, arguments: dict[str, Any]) -> None:
        self.module, self.implementation, self.mask, self.arguments = module, implementation, mask, arguments

    @property
    def is_causal(self) -> bool:
        """Whether a query sees no later keys if there is no mask."""
        given = self.arguments.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if given is None else given)

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **changed: Any
    ) -> tuple[torch.Tensor, Any]:
        """Call the function with a module some of whose attributes are ``changed``."""
        function = _function_of(self.module, self.implementation)
        view = _View(self.module, self.implementation, **changed)
        result: tuple[torch.Tensor, Any] = function(view, query, key, value, self.mask, **self.arguments)
        return result

    @staticmethod
    def rows(of_full: Any, shard: SequenceShard) -> Any:
        """Return the rows of this rank's queries of a tensor [..., length, keys]; other values are unchanged."""
        if not isinstance(of_full, torch.Tensor) or of_full.ndim < 3 or of_full.shape[-2] != shard.length:
            return of_full
        return shard.local(of_full, dim=of_full.ndim - 2)

    def refusal(self, subject: str, shard: SequenceShard) -> SequenceError:
        """Return an error for what works only if the ranks divide the heads."""
        return SequenceError(
            f"cannot attend to split sequences: {type(self.module).__name__} gets {subject}, expected a number of "
            f"query heads that {shard.ranks.count} ranks divide. Use another sequence_parallel_size."
        )


def _attend_with_some_heads(
    call: _Call, shard: SequenceShard, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Exchange parts of the sequence for parts of the heads, attend, and exchange back."""
    heads, count = query.shape[1], shard.ranks.count
    groups = heads // key.shape[1]
    if (repeats := _repeats(key.shape[1], groups, count)) > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        groups //= repeats
    query, key, value = to_heads([query, key, value], shard.ranks)

    def of_heads(tensor: Any, dim: int) -> Any:
        is_per_head = isinstance(tensor, torch.Tensor) and tensor.ndim > dim and tensor.shape[dim] == heads > 1
        return tensor.narrow(dim, shard.ranks.rank * (heads // count), heads // count) if is_per_head else tensor

    call.mask = of_heads(call.mask, 1)
    call.arguments |= {
        name: of_heads(call.arguments[name], dim) for name, dim in _PER_HEAD.items() if name in call.arguments
    }
    changed = {"num_key_value_groups": groups}
    if (sinks := getattr(call.module, "sinks", None)) is not None:
        changed["sinks"] = of_heads(sinks, 0)
    output, _ = call.run(query, key, value, **changed)
    (part,) = to_sequence([output.transpose(1, 2)], shard.ranks)
    return part.transpose(1, 2).contiguous()


def _repeats(key_heads: int, groups: int, count: int) -> int:
    """Return how often key heads are repeated, so that each rank gets the key heads of its query heads."""
    repeats = count // math.gcd(key_heads, count)
    return repeats if groups % repeats == 0 else groups


def _attend_to_gathered_keys(
    call: _Call, shard: SequenceShard, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attend from this rank's queries to the keys and values of all ranks."""
    key, value = (gather_sequence(tensor, shard.ranks, dim=2) for tensor in (key, value))
    end = shard.begin + shard.local_length
    if "flash" in call.implementation:
        if shard.documents is not None or "cu_seq_lens_q" in call.arguments:
            raise call.refusal("packed documents with flash attention", shard)
        # Flash attention aligns the last query with the last key.
        key, value, call.arguments["position_ids"] = key[:, :, :end], value[:, :, :end], None
        call.mask = None if call.mask is None else call.mask[:, :end]
    elif call.mask is None and call.is_causal:
        positions = torch.arange(shard.length, device=query.device)
        call.mask = (shard.local(positions, dim=0)[:, None] >= positions)[None, None]
    elif call.mask is not None and not isinstance(call.mask, torch.Tensor):
        raise call.refusal(f"a mask of {type(call.mask).__name__}", shard)
    call.mask = call.rows(call.mask, shard)
    if "position_bias" in call.arguments:
        call.arguments["position_bias"] = call.rows(call.arguments["position_bias"], shard)
    return call.run(query, key, value)[0]


def _mask_of_padding(shard: SequenceShard, implementation: str, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask for attention that sees all tokens but padding, in the form that an attention function takes."""
    if shard.padding_mask is None or "flash" in implementation:
        return shard.padding_mask
    is_token = shard.padding_mask.bool()[:, None, None]
    if implementation == "eager":  # adds its mask
        return torch.zeros_like(is_token, dtype=dtype).masked_fill(~is_token, torch.finfo(dtype).min)
    return is_token


def _function_of(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """Return an attention function of transformers; the eager one is that of the model's own Python module."""
    if (registered := attention_function(implementation)) is not None:
        return registered
    for cls in type(module).__mro__:
        own: Callable[..., Any] | None = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if own is not None:
            return own
    raise SequenceError(
        f"cannot attend to split sequences: the Python module of {type(module).__name__} has no "
        "eager_attention_forward, expected one. Load the model with attn_implementation='sdpa'."
    )


class _View:
    """Reads like a module, but some of its attributes have other values."""

    def __init__(self, module: Any, implementation: str | None = None, **changed: Any) -> None:
        if (config := getattr(module, "config", None)) is not None and implementation is not None:
            changed["config"] = _View(config, _attn_implementation=implementation)
        vars(self).update(changed, _viewed=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_viewed"], name)
