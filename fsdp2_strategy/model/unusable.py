"""Models and optimizers that a failed load left with values of nothing: unusable until a load succeeds.

Input: a model, an optimizer. Output: the same, refusing to compute, to step and to be saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from fsdp2_strategy.errors import CheckpointError

_marked: WeakKeyDictionary[nn.Module | Optimizer, tuple[str, Any]] = WeakKeyDictionary()


def mark_unusable(subject: nn.Module | Optimizer, why: str) -> None:
    """Let a model refuse its forward pass, or an optimizer its step."""
    mark_usable(subject)

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise CheckpointError(_message(subject, why))

    if isinstance(subject, nn.Module):
        handle: Any = subject.register_forward_pre_hook(refuse, prepend=True)
    else:
        handle = subject.register_step_pre_hook(refuse)
    _marked[subject] = (why, handle)


def mark_usable(subject: nn.Module | Optimizer) -> None:
    """Take the mark away."""
    if subject in _marked:
        _marked.pop(subject)[1].remove()


def check_usable(subject: nn.Module | Optimizer) -> None:
    """Raise where a subject is marked.

    Raises:
        CheckpointError: its values are those of a load that failed midway.
    """
    if subject in _marked:
        raise CheckpointError(_message(subject, _marked[subject][0]))


@contextmanager
def unusable_unless_done(subjects: Sequence[nn.Module | Optimizer]) -> Iterator[None]:
    """Mark the subjects where the block fails, and take their marks away where it succeeds."""
    try:
        yield
    except CheckpointError as error:
        for subject in subjects:
            mark_unusable(subject, str(error))
        raise
    for subject in subjects:
        mark_usable(subject)


def _message(subject: nn.Module | Optimizer, why: str) -> str:
    return (
        f"cannot use this {type(subject).__name__}: a load failed midway and left a mix of values ({why}). Load a "
        "checkpoint that is whole."
    )
