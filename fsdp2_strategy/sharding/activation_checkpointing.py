"""Recompute the activations of modules in backward, and keep what they leave in a cache.

Input: a model that is about to be sharded, and some of its modules. Output: the same modules, their forward wrapped.

[Note: caches] A decoder's block appends keys and values to a cache that it is given, and would append them once more
when it runs again in backward. Where a model has one decoder, training reads no cache: its blocks run without. Where it
has several, one may read what another left there, as the action expert of transformers' pi0 reads the language model's:
there a recomputed block works on a copy of the cache, and gives out what it added, with its gradients.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_activations(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Recompute the activations of these modules in backward, under the random state that they had.

    The forward is wrapped inside the module, so that FSDP2's hooks stay outside and names stay as they are. A module
    whose gradient checkpointing is switched on already is left to it.

    Args:
        model: the whole model, whose decoders count; see [Note: caches].
        modules: those of its modules whose activations are recomputed.
    """
    shares_caches = len(decoders(model)) > 1
    for module in modules.values():
        if not getattr(module, "gradient_checkpointing", False):
            module.forward = _recomputed(module.forward, shares_caches=shares_caches)


def is_cache(value: object) -> bool:
    """Say whether a value is a key-value cache of transformers."""
    return hasattr(value, "get_seq_length")


def decoders(model: nn.Module) -> set[str]:
    """Return the names of the lists whose blocks take a cache."""
    return {
        name.rpartition(".")[0]
        for name, module in model.named_modules()
        if name.rpartition(".")[2].isdigit() and "past_key_values" in inspect.signature(module.forward).parameters
    }


def _recomputed(forward: Callable[..., Any], *, shares_caches: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Caches of encoder-decoders hold two of these, for a model of one decoder.
        cache = next((v for v in (*args, *kwargs.values()) if is_cache(v) and hasattr(v, "layers")), None)
        if shares_caches and cache is not None:
            return _with_cache(forward, cache, args, kwargs)
        args, kwargs = _replaced(is_cache, None, args, kwargs)
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        return _checkpoint(forward, args, kwargs)

    return recomputed


def _checkpoint(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)


def _with_cache(forward: Callable[..., Any], cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a forward that adds to a cache, now and again in backward, and add to it once."""
    before = _copied(cache)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, list[tuple[Any, ...]]]:
        added: list[tuple[Any, ...]] = []
        own = _copied(before)
        update = own.update

        def note(*entry: Any) -> Any:
            added.append(entry)
            return update(*entry)

        own.update = note
        args, kwargs = _replaced(lambda value: value is cache, own, args, kwargs)
        return forward(*args, **kwargs), added

    output, added = _checkpoint(run, args, kwargs)
    for entry in added:
        cache.update(*entry)
    return output


def _copied(cache: Any) -> Any:
    """Return a cache of the same tensors, to which another one can add."""
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied


def _replaced(
    which: Callable[[Any], bool], by: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    values = {name: by if which(value) else value for name, value in kwargs.items()}
    return tuple(by if which(value) else value for value in args), values
