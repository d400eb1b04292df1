"""Wrappers: an actor that holds a model, and which of the two is sharded as a whole.

Input: a model or its wrapper. Output: the module that is sharded.
"""

from __future__ import annotations

from weakref import ref

from torch import nn

from fsdp2_strategy.model.state import Slot, model_state

_WRAPPER = Slot[ref[nn.Module]]("wrapper")
"""Of an inner model, the wrapper that was sharded as a whole."""


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module that is sharded as a whole: the inner model of an actor wrapper, else the model itself.

    A wrapper that says ``is_actor`` holds the model as ``.model``. It is peeled off where it owns no parameter or
    buffer of its own; one that does (a fresh value head) is sharded as a whole, and its inner model then stands for it.
    """
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


def remember_wrapper(root: nn.Module) -> None:
    """Let the inner model of a wrapper that was sharded as a whole mean the wrapper."""
    inner = getattr(root, "model", None)
    if getattr(root, "is_actor", False) and isinstance(inner, nn.Module):
        model_state(inner).set(_WRAPPER, ref(root))
