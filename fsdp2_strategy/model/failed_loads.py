"""Mark models and optimizers that a failed load left inconsistent as unusable, until a load succeeds.

Input: a model or an optimizer. Output: the same object; its forward pass or step raises, and so does a save.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.model.state import Slot, model_state

_FAILED_LOAD = Slot[tuple[str, Any]]("failed load")
"""The error text of the failed load, and the handle of the hook that raises."""


def mark_unusable(subject: nn.Module | Optimizer, why: str) -> None:
    """Register a hook that raises before a model's forward pass or an optimizer's step, with the error of the load."""
    mark_usable(subject)

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise CheckpointError(_message(subject, why))

    if isinstance(subject, nn.Module):
        handle: Any = subject.register_forward_pre_hook(refuse, prepend=True)
    else:
        handle = subject.register_step_pre_hook(refuse)
    model_state(subject).set(_FAILED_LOAD, (why, handle))


def mark_usable(subject: nn.Module | Optimizer) -> None:
    """Remove the hook that `mark_unusable` registered, if any; not collective."""
    if mark := model_state(subject).pop(_FAILED_LOAD):
        mark[1].remove()


def check_usable(subject: nn.Module | Optimizer) -> None:
    """Raise CheckpointError if a model or optimizer is marked as unusable; not collective."""
    if mark := model_state(subject).get(_FAILED_LOAD):
        raise CheckpointError(_message(subject, mark[0]))


@contextmanager
def unusable_unless_done(subjects: Sequence[nn.Module | Optimizer]) -> Iterator[None]:
    """Mark the subjects as unusable if the block raises CheckpointError, and as usable if it succeeds."""
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
        f"cannot use this {type(subject).__name__}: its values are inconsistent because a load failed midway, expected "
        f"a complete load. Load an intact checkpoint. The load failed with: {why}"
    )
