"""Hold and check the arguments of a save.

Input: the arguments of `save_checkpoint`. Output: the checked arguments, and values for the manifest and JSON files.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.checkpoint.data_position import Loader
from fsdp2_strategy.checkpoint.layout import Layout
from fsdp2_strategy.checkpoint.listing import PARTIAL, check_tag, free_number, numbered_path
from fsdp2_strategy.checkpoint.paths import META, CheckpointPaths
from fsdp2_strategy.checkpoint.rotation import check_limits
from fsdp2_strategy.checkpoint.several_models import ONLY, Models, arguments_by_model
from fsdp2_strategy.distributed.agreement import Terms
from fsdp2_strategy.distributed.process_group import is_rank_0, world_size
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage.json_files import as_json, check_json


@dataclass(frozen=True, kw_only=True)
class ModelObjects:
    """A model, and what is saved with it; `save_checkpoint` documents the fields."""

    model: nn.Module
    step: int
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    tokenizer: Any
    ema: Mapping[str, torch.Tensor] | None
    loss_scale: dict[str, Any] | None


def objects_of_models(models: Models, **given: Any) -> dict[str, ModelObjects]:
    """Return what is saved with each model, by its name; see `several_models`."""
    of_each = arguments_by_model("save", models, ("step", "tokenizer"), given)
    return {name: ModelObjects(**own | {"step": own["step"] or 0}) for name, own in of_each.items()}


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """The arguments of `save_checkpoint`."""

    models: Mapping[str, ModelObjects]
    """What is saved with each model, by its name; empty once the content of the checkpoint is collected."""
    steps: Mapping[str, int]
    """Optimizer steps of each model."""
    dataloader: Loader | None
    """The loader whose position is saved."""
    client_state: dict[str, Any]
    """JSON content, of which rank 0's is saved."""
    seed: int
    """A load on another number of ranks derives the random state from it."""
    save_dir: Path
    """Directory of all checkpoints of the run."""
    tag: str
    """Name of the checkpoint."""
    max_num: int | None
    """Maximum number of unprotected checkpoints in ``save_dir``."""
    max_mem: float | None
    """Maximum total size of the checkpoints in ``save_dir``, in GB (10^9 bytes)."""
    save_latest: bool
    """Whether to point ``latest`` or ``last`` to the checkpoint."""
    protect: bool
    """Whether to exclude the checkpoint from rotation."""
    metric: float | None
    """Quality of the checkpoint."""
    higher_is_better: bool
    """Whether a higher ``metric`` is better."""
    async_save: bool
    """Whether to write, commit and rotate in a background thread."""
    only_trainable: bool
    """Whether to omit frozen weights that a load can restore from elsewhere."""
    meta: Mapping[str, Any] | None
    """JSON content of ``meta.json``."""
    layout: Layout
    """The layout, with the further files to save."""
    key_file: str | Path | None
    """The key to sign with, which only rank 0 reads."""
    partial: str = ""
    """Name of the directory that the ranks write to before the commit; see [Note: hidden names] in `directory`."""

    @property
    def step(self) -> int:
        """The largest number of optimizer steps of a model."""
        return max(self.steps.values())

    @property
    def path(self) -> Path:
        """The checkpoint's directory after the commit."""
        return self.save_dir / self.tag

    @property
    def is_signed(self) -> bool:
        """Whether the checkpoint is signed."""
        return self.key_file is not None

    def agree_between_ranks(self, terms: Terms) -> None:
        """Require that all ranks request the same save, and that an object is None on all ranks or on none."""
        models = self.models.values()
        own_to_ranks = ("save_dir", "layout", "models", "dataloader", "client_state", "seed")
        objects = [self.dataloader, *(each for own in models for each in (own.optimizer, own.scheduler, own.ema))]
        arguments = (
            str(self.save_dir),
            self.layout.shared_values(),
            {name: value for name, value in vars(self).items() if name not in own_to_ranks},
            [own.loss_scale for own in models],
            [given is None for given in objects],
        )
        expected = "the same directory, tag, step, limits and objects to save on all ranks. Pass the same arguments."
        terms.require_equal(arguments, expected)

    def check(self) -> None:
        """Check the options that do not depend on the model."""
        if self.layout.kind != "own" and ONLY not in self.steps:
            raise CheckpointError(
                f"cannot save the models {', '.join(self.steps)} in the layout of {type(self.layout).__name__}: it has "
                "one model, expected our own layout. Omit layout, or save the model alone."
            )
        check_tag(self.tag, reserved=self.layout.newest_name)
        check_limits(self.max_num, self.max_mem)
        if self.metric is not None and not math.isfinite(self.metric):
            raise CheckpointError(f"cannot save: metric is {self.metric}, expected a finite number. Pass metric=None.")
        has_tokenizer = any(own.tokenizer is not None for own in self.models.values())
        if self.only_trainable and has_tokenizer and self.layout.kind == "own":
            raise CheckpointError(
                "cannot save the tokenizer: only_trainable is True, expected a checkpoint with a folder for "
                "from_pretrained. Omit the tokenizer, or save the full model."
            )
        if not isinstance(self.meta, Mapping | None):
            raise CheckpointError(
                f"cannot save: meta is a {type(self.meta).__name__}, expected a dictionary. Pass the content of "
                "meta.json."
            )
        check_json(self.meta, "meta")

    def snapshot(self) -> Self:
        """Copy the tokenizers and the layout on rank 0, which writes them when the trainer may have changed them."""
        kept = copy.deepcopy if is_rank_0() else lambda _: None
        models = {name: replace(own, tokenizer=kept(own.tokenizer)) for name, own in self.models.items()}
        return replace(self, models=models, layout=copy.deepcopy(self.layout) if is_rank_0() else self.layout)

    def without_objects(self) -> Self:
        """Drop the references to the objects, so that a background save does not keep them in memory."""
        return replace(self, models={}, dataloader=None, client_state={})

    def resolved(self) -> Self:
        """Return a request for the real path: a link may change while a background save writes."""
        return replace(self, save_dir=Path(os.path.realpath(self.save_dir)))

    def free_number(self) -> int:
        """Return the number of the first hidden name of the tag that nothing has; rank 0 calls it."""
        return free_number(self.save_dir, self.tag, PARTIAL)

    def with_partial(self, number: int) -> Self:
        """Return a request that writes to the hidden directory with rank 0's number."""
        return replace(self, partial=numbered_path(self.save_dir, self.tag, PARTIAL, number).name)

    @property
    def partial_paths(self) -> CheckpointPaths:
        """The paths under ``.partial``, where the files are written before the commit."""
        return CheckpointPaths.of(self.save_dir / self.partial, self.layout.kind)

    def manifest_entries(self, shard_sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return the request's values for the manifest, from the shard size of each model."""
        entries = {
            "step": self.step,
            "protected": self.protect,
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "shard_size": max(shard_sizes.values()),
        }
        if ONLY in self.steps:
            return entries
        models = {name: {"step": step, "shard_size": shard_sizes[name]} for name, step in self.steps.items()}
        return {**entries, "models": models}

    def json_files(self, shard_size: int) -> dict[str, str]:
        """Return the JSON files for other programs: content by file name."""
        files = {} if self.meta is None else {META: as_json(self.meta)}
        return files | self.layout.json_files(self.step, world_size(), shard_size)
