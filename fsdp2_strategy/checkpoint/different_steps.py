"""Warn if models that were loaded one after the other come from different steps of a run.

Input: the checkpoint that each model was resumed from. Output: a warning that names both models.

Actor and critic that are saved by one call each can be at different steps after a kill between the two calls. Models
that are saved by one call are always of the same moment, so models of one checkpoint are not compared.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fsdp2_strategy.checkpoint.several_models import ONLY
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.state import Slot, model_state, states_with
from fsdp2_strategy.model.wrappers import unwrap_model


@dataclass(frozen=True)
class _Resumed:
    """The checkpoint that a model was resumed from."""

    what: str
    path: Path
    step: int

    def differs_from(self, other: _Resumed) -> bool:
        """Return whether two models are from other checkpoints, and at other steps."""
        return self.path != other.path and self.step != other.step


_RESUMED = Slot[_Resumed]("checkpoint that a model was resumed from")


def record_resume(root: nn.Module, name: str, path: Path, step: int) -> None:
    """Record the checkpoint of a model; warn if another model has one of the same directory at another step."""
    own = _Resumed(class_name(root) if name == ONLY else f"the model {name!r}", path.absolute(), step)
    model_state(root).set(_RESUMED, own)
    if _of_other_steps(own, root):
        gc.collect()  # models that the program no longer has
    _warn(own, _of_other_steps(own, root))


def _of_other_steps(own: _Resumed, root: nn.Module) -> list[_Resumed]:
    others = [each for model, each in states_with(_RESUMED) if model is not root]
    return [each for each in others if each.path.parent == own.path.parent and each.differs_from(own)]


def compare_with_next_directories(model: nn.Module, others: Collection[nn.Module]) -> None:
    """Warn if another model of the trainer was resumed at another step, from a directory next to this model's."""
    own = model_state(unwrap_model(model)).get(_RESUMED)
    if own is not None:
        found = [each for other in others if (each := model_state(other).get(_RESUMED)) is not None]
        next_to = [each for each in found if each.path.parent != own.path.parent]
        siblings = [each for each in next_to if each.path.parent.parent == own.path.parent.parent]
        _warn(own, [each for each in siblings if each.differs_from(own)])


def _warn(own: _Resumed, others: Sequence[_Resumed]) -> None:
    for other in others[-1:]:
        log(
            "%s was loaded at step %d (%s), and %s at step %d (%s). If they are saved by one call each, a kill between "
            "the calls leaves them at different steps: save and load them by one call, as in "
            "save_ckpt({'actor': actor, 'critic': critic}, ...), or load the same step with tag=",
            other.what,
            other.step,
            other.path,
            own.what,
            own.step,
            own.path,
            level=logging.WARNING,
        )
