"""Describe a checkpoint in the layout of transformers' ``Trainer``.

Input: the files that a trainer writes next to the weights. Output: the same, for `save_checkpoint`, which writes them
into the checkpoint's directory. `checkpoint.paths` defines the paths of all other files.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import nn

from fsdp2_strategy.checkpoint.components import ModelComponents, adapter_components
from fsdp2_strategy.checkpoint.layout import Layout
from fsdp2_strategy.checkpoint.paths import CheckpointPaths, LayoutKind
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.peft.files import AdapterFiles
from fsdp2_strategy.hf.peft.merge import is_peft_model


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerLayout(Layout):
    """The layout of transformers' ``Trainer``: the directory of a checkpoint is itself a Hugging Face folder.

    So ``from_pretrained("output/checkpoint-500")`` loads the model. For a PEFT model, the directory contains the
    adapters instead of the weights. ``training_state/`` contains the rest of the state that a run resumes from.
    """

    kind: ClassVar[LayoutKind] = "trainer"
    needs_adapters_only: ClassVar[bool] = True
    is_collective: ClassVar[bool] = True
    files: Mapping[str, str] = field(default_factory=dict)
    """Text files to write next to the weights, such as ``trainer_state.json``: content by name."""

    def tag(self, step: int) -> str:
        """Return the Trainer's name for the checkpoint of a step."""
        return f"checkpoint-{step}"

    def components(
        self,
        root: nn.Module,
        paths: CheckpointPaths,
        left_out: Container[str] | None,
        ema: Mapping[str, torch.Tensor] | None,
    ) -> ModelComponents:
        """Lay out a model as transformers' ``Trainer`` does; collective; see `Layout.components`.

        Raises:
            CheckpointError: on every rank: the model trains other parameters in addition to its adapters.
        """
        adapters, tensors = AdapterFiles.of(root) if is_peft_model(root) else (None, {})
        with all_or_none("lay out a model", CheckpointError):
            model = ModelComponents.of(root, paths, left_out)
            components = [*model.components, *adapter_components(adapters, tensors, paths.model)]
            return ModelComponents(components, replace(model.sidecars, adapters=adapters, texts=dict(self.files)))
