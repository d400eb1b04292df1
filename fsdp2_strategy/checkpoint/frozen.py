"""What a checkpoint of trainable weights leaves out: the frozen ones, which come back from where they came.

Input: a sharded model. Output: JSON for ``trainer_state.json`` that tells which frozen weights a model had, and from
which folders; and the other way round, a model that has those again, or an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.checkpoint.storage import Wanted, read_wishes
from fsdp2_strategy.errors import CheckpointError, DamageError, some
from fsdp2_strategy.fingerprint import add_over_ranks, local_fingerprints
from fsdp2_strategy.hf.folder import folder_of, open_folder, outermost_models
from fsdp2_strategy.hf.match import match
from fsdp2_strategy.hf.region import Region
from fsdp2_strategy.hf.share import shares
from fsdp2_strategy.names import named_parameters
from fsdp2_strategy.ranks import all_or_none, log


@dataclass(frozen=True)
class LeftOut:
    """Name the weights that are not in a checkpoint."""

    fingerprints: dict[str, str] = field(default_factory=dict)
    """By name; see [Note: fingerprint]."""
    folders: dict[str, str] = field(default_factory=dict)
    """Where the models within came from, by their names in the whole one."""

    @classmethod
    def of(cls, root: nn.Module) -> LeftOut:
        """Describe the frozen weights of a model; collective."""
        tensors = frozen_parameters(root)
        with all_or_none("save", CheckpointError):
            if len(tensors) == len(named_parameters(root)):
                raise CheckpointError(
                    f"cannot save the trainable weights of {type(root).__name__}: none is trainable, expected some. "
                    "Save the whole model."
                )
            local = local_fingerprints(tensors)
            models = outermost_models(root).items()
            folders = {name: str(folder.resolve()) for name, model in models if (folder := folder_of(model))}
        return cls(dict(zip(tensors, add_over_ranks(local), strict=True)), folders)

    @classmethod
    def from_json(cls, content: Mapping[str, Any] | None) -> LeftOut:
        """Read what a checkpoint says; one of the whole model says nothing."""
        return cls(**(content or {}))

    def as_json(self) -> dict[str, Any]:
        """Return it for a checkpoint."""
        return asdict(self)

    def find_others(self, root: nn.Module, path: Path) -> Wanted:
        """Say where the frozen weights are that a model has other values for; collective.

        Raises:
            CheckpointError: on every rank: the model lacks one, or its folder is not there, or lacks it.
        """
        others = self._others(root, path)
        with all_or_none(f"load {path}", CheckpointError):
            return self._find(root, others, path) if others else []

    def restore(self, root: nn.Module, others: Wanted, path: Path) -> None:
        """Read what `find_others` found; collective.

        Raises:
            DamageError: on every rank: a file cannot be read, or the folders hold other weights now.
        """
        if not others:
            return
        folders = ", ".join(self.folders.values())
        log("%d frozen weights are read from %s", len(others), folders)
        wishes, broadcasts = shares(others)
        read_wishes(path, wishes, None, f"loading the frozen weights of {path.name}")
        for shared in broadcasts:
            shared.carry_out()
        if differing := self._others(root, path):
            raise DamageError(
                f"cannot load {path}: the frozen weights that it was saved beside are no longer in {folders}: "
                f"{some(differing)} differ there. Restore that folder, or load a checkpoint of the whole model."
            )

    def _others(self, root: nn.Module, path: Path) -> list[str]:
        """Return the names of those that have other values in a model; collective."""
        with all_or_none(f"load {path}", CheckpointError):
            there = named_parameters(root)
            if lost := [name for name in self.fingerprints if name not in there]:
                raise CheckpointError(
                    f"cannot load {path}: it was saved beside frozen weights that {type(root).__name__} lacks: "
                    f"{some(lost)}, expected the same model. Build it as it was."
                )
            local = local_fingerprints({name: there[name] for name in self.fingerprints})
        found = zip(self.fingerprints.items(), add_over_ranks(local), strict=True)
        return [name for (name, expected), now in found if now != expected]

    def _find(self, root: nn.Module, names: Sequence[str], path: Path) -> Wanted:
        """Say where in their folders weights are; headers are read, and nothing else."""
        found: list[tuple[str, Region, torch.Tensor]] = []
        for where, folder in self.folders.items():
            model = root.get_submodule(where)
            within = {name for name in names if name.startswith(f"{where}." if where else "")}
            if within and Path(folder).is_dir():
                origin = open_folder(model, folder)
                known = {module: (origin, name) for name, module in model.named_modules()}
                targets, _ = match(root, known, "anything")
                found += [(t.name, t.regions[0], t.tensor) for t in targets if t.name in within and t.regions]
        if lost := [name for name in names if name not in {name for name, _, _ in found}]:
            raise CheckpointError(
                f"cannot load {path}: it holds the trainable weights alone, and the frozen ones of "
                f"{type(root).__name__} are not those that it was saved with: {some(lost)}. They came from "
                f"{', '.join(self.folders.values()) or 'no folder'}, expected to find them there. Build the model with "
                "those weights, or load a checkpoint of the whole."
            )
        return found


def frozen_parameters(root: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a model that are not trained."""
    return {name: parameter for name, parameter in named_parameters(root).items() if not parameter.requires_grad}
