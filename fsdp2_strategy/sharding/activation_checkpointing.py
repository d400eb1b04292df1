"""Recompute the activations of modules in backward, and keep their key-value caches correct.

Input: a model that is not sharded yet, and some of its modules. Output: the same modules with a wrapped forward.

[Note: caches] A decoder block appends keys and values to the cache that it receives. If the block runs again in
backward, it would append them a second time. In a model with one decoder, training does not read the cache, so the
blocks run without a cache. In a model with several decoders, one decoder may read the cache of another: in
transformers' pi0, the action expert reads the cache of the language model. In such a model, a recomputed block appends
to a copy of the cache. The block returns the new entries as outputs, so gradients flow through them. They are then
appended to the real cache once.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_activations(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Wrap the forward of modules so that backward recomputes their activations, with the RNG state of the forward.

    FSDP2's hooks run outside of the wrapper. The number of the model's decoders determines how caches are handled; see
    [Note: caches]. A module whose own ``gradient_checkpointing`` is enabled is skipped.
    """
    shares_caches = len(decoders(model)) > 1
    for module in modules.values():
        if not getattr(module, "gradient_checkpointing", False):
            module.forward = _recomputed(module.forward, shares_caches=shares_caches)


def is_cache(value: object) -> bool:
    """Return whether a value is a key-value cache of transformers."""
    return hasattr(value, "get_seq_length")


def decoders(model: nn.Module) -> set[str]:
    """Return the names of the module lists whose entries accept a key-value cache."""
    return {
        name.rpartition(".")[0]
        for name, module in model.named_modules()
        if name.rpartition(".")[2].isdigit() and _CACHE_ARGUMENTS & inspect.signature(module.forward).parameters.keys()
    }


_CACHE_ARGUMENTS = {"past_key_values", "cache"}
"""What the blocks of transformers name their cache: ``cache`` since version 5.24."""


def _recomputed(forward: Callable[..., Any], *, shares_caches: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Only caches with `layers` can be copied. Those of encoder-decoder models have none, and need no copy: such a
        # model has one decoder.
        cache = next((v for v in (*args, *kwargs.values()) if is_cache(v) and hasattr(v, "layers")), None)
        if shares_caches and cache is not None:
            return _with_cache(forward, cache, args, kwargs)
        args, kwargs = _replace(is_cache, None, args, kwargs)
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        return _checkpoint(forward, *args, **kwargs)

    return recomputed


def _checkpoint(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a forward; it is recomputed with the same context variables, which may be those of another thread."""
    if torch.compiler.is_compiling():  # a graph cannot contain the copy, and reads no context variables
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
    context = contextvars.copy_context()

    def run(*args: Any, **kwargs: Any) -> Any:
        return context.copy().run(forward, *args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)


def _with_cache(forward: Callable[..., Any], cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Checkpoint a forward that appends to a cache, and append to the real cache only once; see [Note: caches]."""
    before = _copy_cache(cache)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
        added: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        copied = _copy_cache(before)
        update = copied.update

        def record(*entry: Any, **options: Any) -> Any:
            added.append((entry, options))
            return update(*entry, **options)

        copied.update = record
        args, kwargs = _replace(lambda value: value is cache, copied, args, kwargs)
        return forward(*args, **kwargs), added

    output, added = _checkpoint(run, *args, **kwargs)
    for entry, options in added:
        cache.update(*entry, **options)
    return output


def _copy_cache(cache: Any) -> Any:
    """Return a copy of a cache that shares its tensors; appending to the copy does not change the original."""
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied


def _replace(
    is_replaced: Callable[[Any], bool], by: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments, with ``by`` in place of each value for which ``is_replaced`` returns True."""
    named = {name: by if is_replaced(value) else value for name, value in kwargs.items()}
    return tuple(by if is_replaced(value) else value for value in args), named
