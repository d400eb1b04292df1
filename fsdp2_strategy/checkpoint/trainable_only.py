"""What a checkpoint of trainable weights leaves out: frozen weights that can be had again.

Input: a sharded model. Output: JSON for ``trainer_state.json`` that tells which weights were left out, and where from
they can be had; and the other way round, a model that has those again, or an error.

[Note: had again] A frozen weight is left out where the program that builds the model gives it: it was frozen when the
model was sharded, and is what it was then; or where the folder that the model came from holds those very values. Any
other (it was trained before it was frozen, it came out of an earlier run's checkpoint) is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2_strategy import sizes
from fsdp2_strategy.checkpoint.storage import Wanted
from fsdp2_strategy.distributed.agreement import agree, all_or_none, any_rank
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.process_group import group_in_use, world_size
from fsdp2_strategy.errors import CheckpointError, DamageError, some
from fsdp2_strategy.hf.load_plan import match
from fsdp2_strategy.hf.peft.merge import names_without_adapters
from fsdp2_strategy.hf.regions import Region
from fsdp2_strategy.hf.replicated_reads import shares
from fsdp2_strategy.hf.transformers_models import outermost_models
from fsdp2_strategy.hf.verified_read import Reader
from fsdp2_strategy.hf.weights_folder import folder_of, open_folder
from fsdp2_strategy.model.fingerprint import Fingerprint, changed_since_built, fingerprints, local_sums
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.model.placeholders import values_of
from fsdp2_strategy.model.shards import sharded_like
from fsdp2_strategy.model.state import Slot, model_state

_COMPARED = Slot[tuple[frozenset[str], frozenset[str]]]("weights that its folders hold")
"""Of which values and files that was said, and the names."""

_ELEMENTS_UNSAID = 1 << 16
"""Of a block of fingerprints, where a checkpoint is older than what it says of that."""


@dataclass(frozen=True)
class LeftOut:
    """Name the weights that are not in a checkpoint."""

    weights: dict[str, Fingerprint] = field(default_factory=dict)
    """By name."""
    folders: dict[str, str] = field(default_factory=dict)
    """Where the models within came from, by their names in the whole one."""
    elements: int = field(default_factory=lambda: sizes.FINGERPRINT_ELEMENTS)
    """Of a block of the fingerprints."""

    @classmethod
    def of(cls, root: nn.Module) -> LeftOut:
        """Choose what of a model is left out; collective. See [Note: had again]."""
        with all_or_none("save", CheckpointError):
            parameters = named_parameters(root)
            frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
            if len(frozen) == len(parameters):
                raise CheckpointError(
                    f"cannot save the trainable weights of {type(root).__name__}: none is trainable, expected some. "
                    "Save the whole model."
                )
            own = outermost_models(root).items()
            found = {name: str(folder.resolve()) for name, model in own if (folder := folder_of(model))}
            local = local_sums(frozen)
        folders = _seen_by_all(found)
        changed = changed_since_built(root, frozen, local)
        prints = fingerprints(frozen, local)
        kept = set(changed) - _in_folders(root, changed, prints, folders)
        if kept:
            log("frozen weights that nothing else holds are saved, too: %s", some(sorted(kept)))
        return cls({name: fingerprint for name, fingerprint in prints.items() if name not in kept}, folders)

    @classmethod
    def from_json(cls, content: Mapping[str, Any] | None) -> LeftOut:
        """Read what a checkpoint says; one of the whole model says nothing."""
        if not content:
            return cls()
        weights = {name: Fingerprint(**fingerprint) for name, fingerprint in content["weights"].items()}
        return cls(weights, dict(content["folders"]), content.get("elements", _ELEMENTS_UNSAID))

    def as_json(self) -> dict[str, Any]:
        """Return it for a checkpoint."""
        return asdict(self)

    def find_others(self, root: nn.Module, path: Path, *, strict: bool) -> Wanted:
        """Say where the frozen weights are that a model has other values for; collective.

        Raises:
            CheckpointError: on every rank: strict, and the model lacks one; or its folder is not there, or lacks it.
        """
        others = self._others(root, path, strict=strict)
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
        _read(others)
        if differing := self._others(root, path, strict=False):
            raise DamageError(
                f"cannot load {path}: the frozen weights that it was saved beside are no longer in {folders}: "
                f"{some(differing)} differ there. Restore that folder, or load a checkpoint of the whole model."
            )

    def _others(self, root: nn.Module, path: Path, *, strict: bool) -> list[str]:
        """Return the names of those that have other values in a model; collective."""
        with all_or_none(f"load {path}", CheckpointError):
            parameters = named_parameters(root)
            lost = [name for name in self.weights if name not in parameters]
            if lost and strict:
                raise CheckpointError(
                    f"cannot load {path}: it was saved beside frozen weights that {type(root).__name__} lacks: "
                    f"{some(lost)}, expected the same model. Build it as it was, or pass load_module_strict=False."
                )
            there = {name: parameters[name] for name in self.weights if name in parameters}
            local = local_sums(there, self.elements)
        fits = {name: now.fits(self.weights[name]) for name, now in fingerprints(there, local).items()}
        if unknown := [name for name, verdict in fits.items() if verdict is None]:
            raise CheckpointError(
                f"cannot load {path}: it was saved beside frozen weights in {self.weights[unknown[0]].dtype}, and "
                f"{type(root).__name__} has {some(unknown)} in {there[unknown[0]].dtype}, which cannot be compared, "
                "expected float16 in both or in none. Prepare the model in the precision that it was saved in."
            )
        return [name for name, verdict in fits.items() if not verdict]

    def _find(self, root: nn.Module, names: Sequence[str], path: Path) -> Wanted:
        """Say where in their folders weights are; headers are read, and nothing else."""
        found = _wanted(root, names, self.folders)
        if lost := [name for name in names if name not in {name for name, _, _ in found}]:
            raise CheckpointError(
                f"cannot load {path}: it holds the trainable weights alone, and the frozen ones of "
                f"{type(root).__name__} are not those that it was saved with: {some(lost)}. They came from "
                f"{', '.join(self.folders.values()) or 'no folder'}, expected to find them there. Build the model with "
                "those weights, or load a checkpoint of the whole."
            )
        return found


def _seen_by_all(folders: dict[str, str]) -> dict[str, str]:
    """Return the folders that every rank sees under the same name; collective."""
    of_ranks: list[Any] = [None] * world_size()
    dist.all_gather_object(of_ranks, folders, group=group_in_use())
    return {name: folder for name, folder in folders.items() if all(o.get(name) == folder for o in of_ranks)}


def _in_folders(
    root: nn.Module, names: Sequence[str], found: Mapping[str, Fingerprint], folders: Mapping[str, str]
) -> set[str]:
    """Return the names of those weights that folders hold as they are now; collective, and read once.

    What cannot be compared is not there: a folder without safetensors files, a weight of another shape, a broken file.
    """
    if not names:
        return set()
    with all_or_none("save", CheckpointError):
        state = frozenset([*(f"{name} {found[name].exact}" for name in names), *_versions_of(folders)])
    known = model_state(root).get(_COMPARED)
    if not any_rank(known is None or known[0] != state) and known is not None:
        return set(known[1])
    held: list[set[str]] = []
    for where, folder in folders.items():
        equal: set[str] = set()
        try:
            with all_or_none(f"compare with {folder}", CheckpointError):
                wanted = _wanted(root, names, {where: folder})
            agree(f"compare with {folder}", [n for n, _, _ in wanted], CheckpointError, "the same files everywhere.")
            for name, region, tensor in wanted:  # one at a time: no second model in memory
                there = {name: sharded_like(tensor, torch.empty_like(values_of(tensor)))}
                _read([(name, region, there[name])])
                if fingerprints(there, local_sums(there))[name] == found[name]:
                    equal.add(name)
        except CheckpointError as error:  # alike on all ranks
            log("frozen weights are not compared with %s, and saved: %s", folder, error, level=logging.WARNING)
        held.append(equal)
    known = model_state(root).set(_COMPARED, (state, frozenset(set().union(*held))))
    return set(known[1])


def _versions_of(folders: Mapping[str, str]) -> list[str]:
    """Say what tells whether the files of folders are still those that were compared."""
    files = sorted(file for folder in folders.values() for file in Path(folder).glob("*.safetensors"))
    return [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]


def _wanted(
    root: nn.Module, names: Sequence[str], folders: Mapping[str, str]
) -> list[tuple[str, Region, torch.Tensor]]:
    """Return where in the folders of the models within a model weights are; those that are not there are left out."""
    found: list[tuple[str, Region, torch.Tensor]] = []
    for where, folder in folders.items():
        within = {name for name in names if name.startswith(f"{where}." if where else "")}
        if within and Path(folder).is_dir():
            model = root.get_submodule(where)
            origin = open_folder(model, folder)
            known = {module: (origin, name) for module, name in names_without_adapters(model).items()}
            targets, _ = match(root, known, "anything")
            found += [(t.name, t.regions[0], t.tensor) for t in targets if t.name in within and t.regions]
    return found


def _read(wanted: Wanted) -> None:
    """Fill tensors from their folders; collective."""
    wishes, broadcasts = shares(wanted)
    with all_or_none("read frozen weights", DamageError), Reader("reading frozen weights") as reader:
        reader.read(wishes)
    for shared in broadcasts:
        shared.carry_out()
