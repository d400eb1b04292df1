"""Decide for an actor wrapper whether the wrapper or its inner model is the root module of sharding.

Input: a model or its wrapper. Output: the module that is passed to `shard_model`.
"""

from __future__ import annotations

from weakref import ref

from torch import nn

from fsdp2_strategy.errors import ArgumentError
from fsdp2_strategy.model.state import Slot, model_state

_WRAPPER = Slot[ref[nn.Module]]("wrapper")
"""The wrapper of an inner model, if the wrapper was sharded."""


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the root module of sharding for a model or its wrapper; not collective.

    A wrapper is a module whose ``is_actor`` is true and whose inner model is ``.model``. If the wrapper has parameters
    or buffers outside the inner model, such as a value head, the wrapper is the root. Otherwise the inner model is the
    root. After a wrapper was sharded as the root, this function also returns the wrapper for the inner model.

    Raises:
        ArgumentError: ``model`` is not an nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"cannot use this model: it is {'None' if model is None else f'a {type(model).__name__}'}, expected an "
            "nn.Module. Pass the model itself, not its parameters or state, and check the order of the arguments."
        )
    reference = model_state(model).get(_WRAPPER)
    if reference is not None and (wrapper := reference()) is not None:
        return wrapper
    inner = getattr(model, "model", None)
    if not getattr(model, "is_actor", False) or not isinstance(inner, nn.Module):
        return model
    inside = {id(t) for t in (*inner.parameters(), *inner.buffers())}
    if any(id(t) not in inside for t in (*model.parameters(), *model.buffers())):
        return model
    return unwrap_model(inner)


def register_wrapper(root: nn.Module) -> None:
    """Make `unwrap_model` map the inner model of a sharded wrapper to the wrapper; not collective."""
    inner = getattr(root, "model", None)
    if getattr(root, "is_actor", False) and isinstance(inner, nn.Module):
        model_state(inner).set(_WRAPPER, ref(root))
