"""Reject unknown keyword arguments of the strategies' methods, and arguments that are no such number or choice.

Input: a strategy class. Output: the same class, whose public methods raise ArgumentError for an unknown keyword.
`check_inputs` is for functions that pass further keywords on to a model.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import nn

from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.errors import ArgumentError, FSDP2StrategyError, did_you_mean

T = TypeVar("T")

_MISSPELLED = 0.75
"""Similarity above which a name is a misspelled option; names of inputs of transformers' models reach 0.67."""


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
                f"{_as_a_field(keyword, known) or did_you_mean(keyword, known)}"
            )
        return function(*args, **kwargs)

    return call


def _as_a_field(keyword: str, known: Sequence[str]) -> str:
    """Return how to pass a keyword that is a field of the configuration, if there is a ``config``; otherwise ""."""
    if "config" not in known or keyword not in {field.name for field in fields(StrategyConfig)}:
        return ""
    return f" It is a field of StrategyConfig. Pass config=StrategyConfig({keyword}=…), or set it in args."


def check_number(
    action: str,
    name: str,
    value: object,
    error: type[FSDP2StrategyError],
    *,
    integer: bool = False,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Raise ``error`` unless an argument is a finite number in a range.

    Args:
        action: the operation, for the message.
        name: name of the argument.
        value: its value; a tensor or array of one element is accepted unread, because reading may synchronise.
        error: the class of the error.
        integer: whether only integers are accepted.
        minimum: the smallest number that is accepted.
        above: a number below all that are accepted.
        below: a number above all that are accepted.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return
    kind: type = numbers.Integral if integer else numbers.Real
    if isinstance(value, kind) and not isinstance(value, bool):
        number = float(value)  # type: ignore[arg-type]
        fits = math.isfinite(number) and (minimum is None or number >= minimum)
        if fits and (above is None or number > above) and (below is None or number < below):
            return
    bounds = [(minimum, "at least"), (above, "above"), (below, "below")]
    limits = " and ".join(f"{text} {bound:g}" for bound, text in bounds if bound is not None)
    expected = f"{'an integer' if integer else 'a finite number'}{f' {limits}' if limits else ''}"
    fix = (
        "Convert the text to a number (YAML reads 1e-4 as text, and 1.0e-4 as a number)."
        if isinstance(value, str)
        else ""
    )
    raise error(f"cannot {action}: {name} is {value!r}, expected {expected}. {fix or 'Pass such a number.'}")


def check_choice(
    action: str, name: str, value: object, choices: Sequence[str], error: type[FSDP2StrategyError]
) -> None:
    """Raise ``error`` unless an argument is one of several strings."""
    if value not in choices:
        hint = did_you_mean(str(value), choices)
        raise error(f"cannot {action}: {name} is {value!r}, expected one of {', '.join(choices)}.{hint}")


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has an argument of this name, or accepts any keyword."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def check_inputs(
    inputs: Mapping[str, Any], options: Sequence[str], model: nn.Module, action: str, error: type[FSDP2StrategyError]
) -> None:
    """Raise ``error`` for an input of a model that is probably a misspelled option of the function that passes it on.

    Many models accept any keyword, and ignore those that they do not know. An input is rejected if its name is similar
    to an option, and the model's forward has no parameter of this name.

    Args:
        inputs: the keyword arguments that are not options.
        options: the names of the options.
        model: the model that gets the inputs.
        action: the operation, for the message.
        error: the class of the error.
    """
    own = inspect.signature(model.forward).parameters
    for name in inputs.keys() - own.keys():
        is_longer = any(name.endswith(f"_{option}") for option in options)  # pixel_attention_mask
        if not is_longer and (hint := did_you_mean(name, options, least_similarity=_MISSPELLED)):
            raise error(
                f"cannot {action}: {name!r} is neither an option of this function nor an argument of the model's "
                f"forward, expected one of these.{hint}"
            )
