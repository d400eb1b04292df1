"""What LeRobot wants of a checkpoint: how it is named, what it tells, and what lies beside a policy's weights.

Input: what the trainer has: configurations, processors. Output: files in ``pretrained_model/`` and
``training_state/training_step.json``. Where what else there is lies, `paths` says.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Self

from torch import nn

from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.hf.json_files import check_json, write_json
from fsdp2_strategy.hf.transformers_models import is_transformers_model

TRAIN_CONFIG = "train_config.json"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeRobotLayout:
    """Lay a checkpoint out as LeRobot does: ``005000/{pretrained_model, training_state}``, and a link ``last``.

    ``pretrained_model/`` is what a robot loads: one ``model.safetensors``, whatever its size, that all ranks write at
    once, and beside it what the fields say. A model of peft has its adapters there instead, and no weights of its base.
    ``training_state/`` has all that a run goes on from.

    Raises:
        ConfigError: a number is under 1, or an object cannot be saved.
    """

    total_steps: int
    """Steps of the whole run: names of checkpoints have as many digits, and six at least."""
    batch_size: int
    """Samples that one process takes at once, for ``training_step.json``."""
    train_config: Any = None
    """For ``train_config.json``: an object with ``save_pretrained``, a mapping or a dataclass."""
    preprocessor: Any = None
    """With ``save_pretrained``, which writes its files."""
    postprocessor: Any = None
    """With ``save_pretrained``, which writes its files."""
    gather_for_save_pretrained: bool = False
    """Let the policy write ``pretrained_model/`` itself, for one that insists: rank 0 gathers it, parameter by
    parameter, in host memory, and calls ``save_pretrained(folder, state_dict=...)`` of a copy that is not sharded. It
    costs rank 0 the model's memory, and the disk the bytes twice: the weights that a run goes on from lie in
    ``training_state/model/``."""

    def __post_init__(self) -> None:
        for name in ("total_steps", "batch_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"cannot lay out checkpoints: {name} is {value!r}, expected a whole number of at least 1. Count "
                    "optimizer steps of the run, and samples of one process."
                )
        check_beside(self.train_config, self.preprocessor, self.postprocessor)

    def tag(self, step: int) -> str:
        """Return LeRobot's name for the checkpoint of a step."""
        return f"{step:0{max(6, len(str(self.total_steps)))}d}"


def check_beside(train_config: Any, preprocessor: Any, postprocessor: Any) -> None:
    """Raise where something cannot be saved beside a policy's weights.

    Raises:
        ConfigError: it has no ``save_pretrained``, and is no mapping and no dataclass where these would do.
    """
    for name, value in (("preprocessor", preprocessor), ("postprocessor", postprocessor)):
        if value is not None and not hasattr(value, "save_pretrained"):
            raise ConfigError(
                f"cannot save a policy: {name} is a {type(value).__name__}, expected an object with save_pretrained. "
                "Pass LeRobot's pipeline, or leave it out."
            )
    is_plain = isinstance(train_config, Mapping) or dataclasses.is_dataclass(train_config)
    if train_config is not None and not (is_plain or hasattr(train_config, "save_pretrained")):
        raise ConfigError(
            f"cannot save a policy: train_config is a {type(train_config).__name__}, expected an object with "
            "save_pretrained, a mapping or a dataclass. Pass one of these, or leave it out."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BesidePolicy:
    """What lies beside a policy's weights."""

    config: Any
    """The policy's own, where it has one that is not transformers'; as it is now, whatever becomes of the policy's."""
    train_config: Any
    preprocessor: Any
    postprocessor: Any

    @classmethod
    def of(cls, policy: nn.Module, train_config: Any, preprocessor: Any, postprocessor: Any) -> Self:
        """Collect it.

        Args:
            policy: without adapters.
            train_config: as in `LeRobotLayout`, like the next two.
            preprocessor: what prepares its inputs.
            postprocessor: what makes actions of its outputs.

        Raises:
            ConfigError: something cannot be saved.
            CheckpointError: ``train_config`` holds what JSON does not.
        """
        check_beside(train_config, preprocessor, postprocessor)
        config = None if is_transformers_model(policy) else getattr(policy, "config", None)
        if not hasattr(train_config, "save_pretrained"):
            train_config = _plain(train_config)
            check_json(train_config, "train_config")
        return cls(
            config=copy.deepcopy(config) if hasattr(config, "save_pretrained") else None,
            train_config=train_config,
            preprocessor=preprocessor,
            postprocessor=postprocessor,
        )

    def write(self, folder: Path) -> None:
        """Write its files; one rank calls it."""
        for item in (self.config, self.train_config, self.preprocessor, self.postprocessor):
            if hasattr(item, "save_pretrained"):
                item.save_pretrained(folder)
        if self.train_config is not None and not hasattr(self.train_config, "save_pretrained"):
            write_json(folder / TRAIN_CONFIG, self.train_config)


def _plain(value: Any) -> Any:
    """Return what JSON holds of a configuration: paths as text, choices by their values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, PurePath):
        return str(value)
    return value.value if isinstance(value, Enum) else value
