"""Reject unknown keyword arguments of the strategies' methods, and suggest the name that was meant.

Input: a strategy class. Output: the same class, whose public methods raise ArgumentError for an unknown keyword.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from fsdp2_strategy.errors import ArgumentError, did_you_mean

T = TypeVar("T")


def check_keywords(cls: type[T]) -> type[T]:
    """Wrap the constructor and the public methods of a class, so that an unknown keyword argument raises ArgumentError.

    Methods that accept any keyword are not wrapped.
    """
    for name, function in list(vars(cls).items()):
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, _checked(function))
    return cls


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function
    known = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL][1:]  # without self

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= set(known):
            name = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
            keyword = next(keyword for keyword in kwargs if keyword not in known)
            raise ArgumentError(
                f"cannot call {name}: {keyword!r} is not an argument, expected one of {', '.join(known)}."
                f"{did_you_mean(keyword, known)}"
            )
        return function(*args, **kwargs)

    return call
