"""Check the options of a save: directory, tag, limits of rotation, layout.

Input: the arguments of `save_checkpoint`. Output: the checked arguments, and values for the manifest and JSON files.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from fsdp2_strategy.checkpoint import directory
from fsdp2_strategy.checkpoint.layout import Layout
from fsdp2_strategy.checkpoint.listing import check_tag
from fsdp2_strategy.checkpoint.paths import META, CheckpointPaths
from fsdp2_strategy.checkpoint.rotation import check_limits
from fsdp2_strategy.checkpoint.several_models import ONLY
from fsdp2_strategy.distributed.agreement import check_equal, from_rank_0
from fsdp2_strategy.distributed.process_group import is_rank_0, world_size
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage.json_files import as_json, check_json


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """The arguments of `save_checkpoint` without the objects to save. `save_checkpoint` documents them."""

    save_dir: Path
    tag: str
    steps: Mapping[str, int]
    """Optimizer steps of each model; see `several_models`."""
    max_num: int | None
    max_mem: float | None
    save_latest: bool
    protect: bool
    metric: float | None
    higher_is_better: bool
    async_save: bool
    only_trainable: bool
    meta: Mapping[str, Any] | None
    layout: Layout
    key_file: str | Path | None = None
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

    def agree_between_ranks(self, loss_scales: object, objects: Sequence[object]) -> None:
        """Raise if the ranks request different saves, or an object is None on some ranks only; collective."""
        others = {name: value for name, value in vars(self).items() if name not in ("save_dir", "layout")}
        arguments = (
            str(self.save_dir),
            self.layout.shared_values(),
            others,
            loss_scales,
            tuple(given is None for given in objects),
        )
        expected = "the same directory, tag, step, limits and objects to save on all ranks. Pass the same arguments."
        check_equal("save", arguments, CheckpointError, expected)

    def check(self, tokenizers: Iterable[object]) -> None:
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
        if self.only_trainable and any(each is not None for each in tokenizers) and self.layout.kind == "own":
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
        """Copy the layout's objects on rank 0, which writes them when the trainer may have changed the originals."""
        return replace(self, layout=copy.deepcopy(self.layout)) if is_rank_0() else self

    def resolved(self) -> Self:
        """Return a request for the real path: a link may change while a background save writes; collective."""
        save_dir = Path(os.path.realpath(self.save_dir))
        free = directory.free_partial_path(save_dir, self.tag).name if is_rank_0() else ""
        return replace(self, save_dir=save_dir, partial=from_rank_0(free))

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
