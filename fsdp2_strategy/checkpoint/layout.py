"""Decide what the layout of a checkpoint's directory decides: names, folders and files for other programs.

Input: a sharded model and the checkpoint's paths. Output: the components to write, and JSON files. `Layout` is our own
layout; an integration whose trainers expect another one has a subclass. `paths` detects the layout on disk.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import ClassVar, Self

import torch
from torch import nn

from fsdp2_strategy.checkpoint.components import ModelComponents
from fsdp2_strategy.checkpoint.listing import LATEST
from fsdp2_strategy.checkpoint.paths import CheckpointPaths, LayoutKind


class Layout:
    """Our own layout, and the methods that another layout overrides."""

    kind: ClassVar[LayoutKind] = "own"
    newest_name: ClassVar[str] = LATEST
    """The entry of the directory of a run that names the newest checkpoint; no checkpoint can have this name."""
    needs_adapters_only: ClassVar[bool] = False
    """Whether a model with adapters is saved as with ``only_trainable``."""
    is_collective: ClassVar[bool] = False
    """Whether `components` makes collective calls."""

    def tag(self, step: int) -> str:
        """Return the default name of the checkpoint of a step."""
        return f"global_step{step}"

    def of_run(self, *, batch_size: int, gradient_accumulation_steps: int) -> Self:  # noqa: ARG002  for other layouts
        """Return the layout with what a strategy knows of its run in place of what is not given."""
        return self

    def shared_values(self) -> object:
        """Return the values that all ranks must have in common."""
        return self.kind

    def components(
        self,
        root: nn.Module,
        paths: CheckpointPaths,
        left_out: Container[str] | None,
        ema: Mapping[str, torch.Tensor] | None,  # noqa: ARG002  for other layouts
    ) -> ModelComponents:
        """Lay out a model without the weights that ``left_out`` names. ``ema`` has averages by name."""
        return ModelComponents.of(root, paths, left_out)

    def json_files(self, step: int, world_size: int, shard_size: int) -> dict[str, str]:  # noqa: ARG002
        """Return the layout's JSON files in the directory of the training state: content by name."""
        return {}
