"""Name checkpoints as LeRobot does, and write the sidecar files of a policy.

Input: the trainer's configurations and processors. Output: files in ``pretrained_model/``, and values for
``training_state/training_step.json``. `checkpoint.paths` defines the paths of all other files.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Container, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, ClassVar, Self

import torch
from torch import nn

from fsdp2_strategy.checkpoint.components import (
    ModelComponents,
    SidecarFiles,
    adapter_components,
    cached_tensor_layout,
)
from fsdp2_strategy.checkpoint.layout import Layout
from fsdp2_strategy.checkpoint.listing import LAST
from fsdp2_strategy.checkpoint.paths import MODEL, TRAINING_STEP, CheckpointPaths, LayoutKind
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.errors import CheckpointError, ConfigError
from fsdp2_strategy.hf.peft.files import AdapterFiles
from fsdp2_strategy.hf.peft.merge import is_peft_model, without_adapter_modules
from fsdp2_strategy.hf.save_plan import TensorLayout, choose_layout, tensors_to_write
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.hf.transformers_models import is_transformers_model
from fsdp2_strategy.hf.weights_folder import folder_of
from fsdp2_strategy.integrations.lerobot.gathered_policy import gathered_policy, save_with_own_method
from fsdp2_strategy.model.master_weights import masters_of
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.storage.component import Component
from fsdp2_strategy.storage.json_files import as_json, check_json, write_json
from fsdp2_strategy.storage.regions import Region

TRAIN_CONFIG = "train_config.json"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeRobotLayout(Layout):
    """LeRobot's layout of checkpoints: folders ``005000/{pretrained_model, training_state}``, and a link ``last``.

    ``pretrained_model/`` is the folder that a robot loads. It contains one ``model.safetensors`` of any size, which all
    ranks write in parallel, and the sidecar files that the fields below describe. For a PEFT model it contains the
    adapters instead of the base weights, and a load reads ``training_state/trainable/``. ``training_state/`` contains
    the rest of the state that a run resumes from.

    Raises:
        ConfigError: a number is less than 1, or an object cannot be saved.
    """

    kind: ClassVar[LayoutKind] = "lerobot"
    newest_name: ClassVar[str] = LAST
    needs_adapters_only: ClassVar[bool] = True
    is_collective: ClassVar[bool] = True
    total_steps: int
    """Optimizer steps of the whole run. Names of checkpoints have as many digits as this number, but at least six."""
    batch_size: int | None = None
    """Samples per batch of one process; saved in ``training_step.json``. None: `micro_train_batch_size` of the strategy
    that saves."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step, for ``training_step.json``, whose step counts micro-batches. None: those of the
    strategy that saves."""
    micro_batches: int | None = None
    """Micro-batches that the run has trained on, if the trainer counts them; by default those of the optimizer steps,
    without steps that were skipped because of their gradients."""
    train_config: Any = None
    """Content of ``train_config.json``: an object with ``save_pretrained``, a mapping or a dataclass."""
    preprocessor: Any = None
    """An object with ``save_pretrained``, which writes its files; or None."""
    postprocessor: Any = None
    """An object with ``save_pretrained``, which writes its files; or None."""
    gather_for_save_pretrained: bool = False
    """Write ``pretrained_model/`` with the policy's own ``save_pretrained``, for policies that need it. The full
    parameters are gathered one by one into the host memory of rank 0. Rank 0 then calls
    ``save_pretrained(folder, state_dict=...)`` of an unsharded copy. The weights are on disk twice, because the run
    resumes from separate files in ``training_state/model/``."""

    def __post_init__(self) -> None:
        for name in ("total_steps", "batch_size", "gradient_accumulation_steps"):
            value = getattr(self, name)
            if value is None and name != "total_steps":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"cannot create the checkpoint layout: {name} is {value!r}, expected an integer of at least 1. "
                    "Pass the run's optimizer steps as total_steps, and one process's samples per batch as batch_size."
                )
        check_sidecars(self.train_config, self.preprocessor, self.postprocessor)

    def of_run(self, *, batch_size: int, gradient_accumulation_steps: int) -> Self:
        """Return the layout with the numbers of a run in place of those that are not given."""
        return dataclasses.replace(
            self,
            batch_size=self.batch_size or batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps or gradient_accumulation_steps,
        )

    def training_step(self, step: int, world_size: int, shard_size: int) -> dict[str, Any]:
        """Return the content of ``training_step.json`` after an optimizer step."""
        if self.batch_size is None:
            raise ConfigError(
                "cannot save a policy: batch_size of LeRobotLayout is None, expected the samples of one process's "
                "batch. Pass it, or save with a strategy's save_ckpt, which knows it."
            )
        accumulated = self.gradient_accumulation_steps or 1
        return {
            "step": step * accumulated if self.micro_batches is None else self.micro_batches,
            "num_processes": world_size,  # what LeRobot read before version 0.6
            "dp_world_size": world_size,
            "batch_size": self.batch_size,
            "grad_accum_steps": accumulated,
            "parallelism": {
                "dp_replicate": world_size // shard_size,
                "dp_shard": shard_size,
                "ring_degree": 1,
                "ulysses_degree": 1,
            },
        }

    def tag(self, step: int) -> str:
        """Return LeRobot's name for the checkpoint of a step."""
        return f"{step:0{max(6, len(str(self.total_steps)))}d}"

    def shared_values(self) -> object:
        """Return the values that all ranks must have in common."""
        return self.batch_size, self.gather_for_save_pretrained

    def json_files(self, step: int, world_size: int, shard_size: int) -> dict[str, str]:
        """Return ``training_step.json``."""
        return {TRAINING_STEP: as_json(self.training_step(step, world_size, shard_size))}

    def components(
        self,
        root: nn.Module,
        paths: CheckpointPaths,
        left_out: Container[str] | None,
        ema: Mapping[str, torch.Tensor] | None,
    ) -> ModelComponents:
        """Lay out a policy as LeRobot does; collective.

        There is one file for the full policy, wrapper included. If there are averages, the policy is laid out twice:
        with its parameters, and in another folder with the averages. The second folder is left out for a policy with
        adapters, whose folder contains only the adapters, and for one that writes itself.

        Args:
            root, paths, left_out, ema: see `Layout.components`.

        Raises:
            CheckpointError: on every rank: the policy trains other parameters in addition to its adapters; or its own
                `save_pretrained` was requested and cannot be used.
        """
        writes_itself = self.gather_for_save_pretrained
        adapters, tensors = AdapterFiles.of(root) if is_peft_model(root) else (None, {})
        full_policy = gathered_policy(root) if writes_itself else None
        with all_or_none("lay out a policy", CheckpointError):
            base = root if adapters is None else without_adapter_modules(root)
            regions: Mapping[str, Region] = {}
            has_averaged_folder = False
            if left_out is None:
                own = tensors_to_write(base)
                layout = cached_tensor_layout(root, base, own)
                regions = layout.regions
                components = [_in_one_file(paths.state / MODEL if writes_itself else paths.model, own, layout)]
                if has_averaged_folder := bool(ema) and adapters is None and not writes_itself:
                    averaged = _averaged(root, own, ema or {})
                    layout = choose_layout(meta_skeleton(base), averaged)
                    components.append(_in_one_file(paths.averaged, averaged, layout))
            else:
                components = ModelComponents.of(root, paths, left_out).components
            components += adapter_components(adapters, tensors, paths.model)
            further = PolicySidecars.of(base, self.train_config, self.preprocessor, self.postprocessor)
            sidecars = dataclasses.replace(
                SidecarFiles.of(paths.model, base, regions, folder_of(root)),
                adapters=adapters,
                further=dataclasses.replace(further, full_policy=full_policy),
                also_in=paths.averaged if has_averaged_folder else None,
            )
        return ModelComponents(components, sidecars)


def _in_one_file(folder: Path, tensors: Mapping[str, torch.Tensor], layout: TensorLayout) -> Component:
    return Component.of(folder, tensors, layout.regions, max_file_bytes=sys.maxsize, metadata=layout.metadata)


def _averaged(
    root: nn.Module, tensors: Mapping[str, torch.Tensor], ema: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return a policy's tensors to write, with the averages in place of the parameters and their master weights."""
    masters, average_of = masters_of(root), {}
    for name, parameter in named_parameters(root).items():
        if name in ema:
            average_of[id(parameter)] = average_of[id(masters.get(id(parameter), parameter))] = ema[name]
    return {name: average_of.get(id(tensor), tensor) for name, tensor in tensors.items()}


def check_sidecars(train_config: Any, preprocessor: Any, postprocessor: Any) -> None:
    """Raise unless each object is None or has ``save_pretrained``, or ``train_config`` is a mapping or a dataclass."""
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
class PolicySidecars:
    """The objects that are saved as sidecar files of a policy."""

    config: Any
    """A copy of the policy's configuration. None if it has no ``save_pretrained``, and for transformers models."""
    train_config: Any
    preprocessor: Any
    postprocessor: Any
    full_policy: nn.Module | None = None
    """On rank 0, the unsharded policy, if its own `save_pretrained` writes weights and configuration."""

    @classmethod
    def of(cls, policy: nn.Module, train_config: Any, preprocessor: Any, postprocessor: Any) -> Self:
        """Check the objects, and copy the configuration of the policy, which has no adapters."""
        check_sidecars(train_config, preprocessor, postprocessor)
        config = None if is_transformers_model(policy) else getattr(policy, "config", None)
        if not hasattr(train_config, "save_pretrained"):
            train_config = _to_json(train_config)
            check_json(train_config, "train_config")
        return cls(
            config=copy.deepcopy(config) if hasattr(config, "save_pretrained") else None,
            train_config=train_config,
            preprocessor=preprocessor,
            postprocessor=postprocessor,
        )

    @property
    def total_bytes(self) -> int:
        """Size of the weights that the policy's own `save_pretrained` writes; 0 on ranks without the full policy."""
        return sum(p.nbytes for p in self.full_policy.parameters()) if self.full_policy is not None else 0

    def write(self, folder: Path) -> None:
        """Write the sidecar files to a folder; call it on one rank only."""
        for item in (self.config, self.train_config, self.preprocessor, self.postprocessor):
            if hasattr(item, "save_pretrained"):
                item.save_pretrained(folder)
        if self.train_config is not None and not hasattr(self.train_config, "save_pretrained"):
            write_json(folder / TRAIN_CONFIG, self.train_config)
        if self.full_policy is not None:  # last, because it replaces the configuration that was written above
            save_with_own_method(self.full_policy, folder)


def _to_json(value: Any) -> Any:
    """Convert a configuration to JSON values: dataclasses to dicts, paths to strings, enum members to their values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(entry) for entry in value]
    if isinstance(value, PurePath):
        return str(value)
    return value.value if isinstance(value, Enum) else value
