"""Run a module on full sequences, in a model whose sequences are split over several ranks.

Input: a module that computes each token from others in another way than attention: a state-space layer, linear
attention, a convolution over time. Output: the same module with hooks that gather its inputs and keep this rank's part
of its output. Every rank then computes the module for all tokens: this is exact, but saves nothing within the module.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.torch_internals import tree_leaves, tree_map
from fsdp2_strategy.hf.library_internals import attention_implementation, set_attention_implementation
from fsdp2_strategy.hf.packed_rows import running_shard
from fsdp2_strategy.parallel.sequence.attention import configured_name, is_split_name
from fsdp2_strategy.parallel.sequence.exchange import gather_sequence
from fsdp2_strategy.parallel.sequence.shard import SequenceShard, check_recomputed, current_shard, is_sequence


def run_on_full_sequences(module: nn.Module) -> None:
    """Register hooks so that a module gets and computes full sequences; its calls are then collective.

    While the module runs, no shard is current, so attention within it is not split. Its own configuration names the
    attention function that was configured.
    """
    for inner in module.modules():
        config: Any = getattr(inner, "config", None)
        name = attention_implementation(config)
        if is_split_name(name):
            inner.config = copy.copy(config)
            set_attention_implementation(inner.config, configured_name(name))
    running: list[tuple[SequenceShard | None, Any]] = []
    names = tuple(inspect.signature(module.forward).parameters)

    def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shard = current_shard()
        check_recomputed(_module, shard)
        running.append((shard, running_shard.set(None)))
        return None if shard is None else _full_arguments(shard, names, args, kwargs)

    def end(_module: nn.Module, _args: object, output: Any) -> Any:
        shard, token = running.pop()
        running_shard.reset(token)
        return None if shard is None or output is None else tree_map(lambda value: _part_of(value, shard), output)

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end, always_call=True)


def _full_arguments(
    shard: SequenceShard, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a module's arguments for full sequences.

    A mask of padding may be a wrong part of the full mask, because models cut masks at their end; it is replaced. The
    models' own rule for leaving it out, that there is no padding, has been applied to the full mask.
    """

    def full(name: str, value: Any) -> Any:
        if value is shard:
            return None
        if name.endswith("mask"):
            return tree_map(lambda inner: shard.attention_mask if _is_padding_mask(inner) else full("", inner), value)
        return tree_map(lambda inner: _gathered(inner, shard), value)

    positional = [full(name, value) for name, value in zip(names, args, strict=False)]
    return (*positional, *args[len(names) :]), {name: full(name, value) for name, value in kwargs.items()}


def _is_padding_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2


def _gathered(value: Any, shard: SequenceShard) -> Any:
    return gather_sequence(value, shard.ranks) if is_sequence(value, shard.local_length) else value


def _part_of(value: Any, shard: SequenceShard) -> Any:
    return shard.local(value).contiguous() if is_sequence(value, shard.length) else value


def computes_parts(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], length: int) -> bool:
    """Return whether a module computes the second half of sequences from the second half of its arguments."""

    def half(value: Any) -> Any:
        return value[:, length // 2 :] if is_sequence(value, length) else value

    with torch.no_grad():
        expected = tree_map(half, module(*args, **kwargs))
        try:
            found = module(*tree_map(half, args), **tree_map(half, kwargs))
        except (RuntimeError, IndexError):  # shapes that do not fit
            return False
    pairs = zip(tree_leaves(expected), tree_leaves(found), strict=True)
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6)
        for a, b in pairs
        if isinstance(a, torch.Tensor)
    )


def mixes_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a change of one token changes a module's output for other tokens; the module is run twice.

    The first floating tensor of three dimensions is the hidden states [batch, length, width].
    """
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    hidden = next((name for name, value in arguments.items() if _is_hidden(value)), None)
    if hidden is None:
        return False
    length = arguments[hidden].shape[1]
    changed = arguments[hidden].clone()
    changed[:, length // 2] += torch.linspace(1, 2, changed.shape[-1], dtype=changed.dtype)
    outputs = []
    with torch.no_grad():
        for tensor in (arguments[hidden], changed):
            given = arguments | {hidden: tensor}
            output = module(*(given[i] for i in range(len(args))), **{name: given[name] for name in kwargs})
            outputs.append(
                next((v for v in (output if isinstance(output, tuple) else (output,)) if _is_hidden(v)), None)
            )
    before, after = outputs
    if before is None or after is None or before.shape[1] != length:
        return False
    others = torch.arange(length) != length // 2
    # Experts compute groups of tokens, partly in float32: rounding depends on the other tokens of a group.
    return bool((before - after)[:, others].abs().max() > 1e-5 * before.abs().max())


def _is_hidden(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 3 and value.is_floating_point()
