"""Choose the frozen weights that a checkpoint of the trainable weights leaves out, and restore them in a load.

Input: a sharded model. Output of a save: JSON for ``trainer_state.json``, with the fingerprints of the left-out weights
and the folders that they came from. Output of a load: the model with the values of the left-out weights, or an error.

[Note: reloadable weights] A checkpoint leaves out the frozen weights that are reloadable. A frozen weight is reloadable
in two cases:

1. It was frozen when the model was sharded, and has not changed since. The program that builds the model gives it
   the same value again.
2. The folder that the model was loaded from contains its present value.

All other frozen weights are saved, for example weights that were trained before they were frozen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2_strategy import sizes
from fsdp2_strategy.checkpoint.load_options import NOT_STRICT
from fsdp2_strategy.checkpoint.storage import LoadTargets
from fsdp2_strategy.distributed.agreement import all_or_none, any_rank, check_equal
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.process_group import group_in_use, world_size
from fsdp2_strategy.errors import CheckpointError, DamageError, counted, some
from fsdp2_strategy.hf.load_plan import match_tensors
from fsdp2_strategy.hf.mismatches import CHECKPOINT
from fsdp2_strategy.hf.peft.merge import names_without_adapters
from fsdp2_strategy.hf.transformers_models import outermost_models
from fsdp2_strategy.hf.weights_folder import folder_of, open_folder
from fsdp2_strategy.model.fingerprint import Fingerprint, changed_since_initial, fingerprints, local_sums
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.model.placeholders import values_of
from fsdp2_strategy.model.shards import sharded_like
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.replicated_reads import divide_reads
from fsdp2_strategy.storage.verified_read import Reader

_LAST_COMPARISON = Slot[tuple[frozenset[str], frozenset[str]]]("last comparison of frozen weights with folders")
"""The input of the last comparison (fingerprints, and sizes and times of files), and its result: names of weights."""

_DEFAULT_ELEMENTS = 1 << 16
"""Block size of the fingerprints in old checkpoints, which do not record their block size."""


@dataclass(frozen=True)
class LeftOut:
    """The frozen weights that a checkpoint leaves out."""

    weights: dict[str, Fingerprint] = field(default_factory=dict)
    """Fingerprints by name."""
    folders: dict[str, str] = field(default_factory=dict)
    """For each transformers model within the model: the folder that it was loaded from, by module name."""
    elements: int = field(default_factory=lambda: sizes.FINGERPRINT_ELEMENTS)
    """Block size of the fingerprints, in elements."""

    @classmethod
    def of(cls, root: nn.Module) -> LeftOut:
        """Choose the frozen weights to leave out; collective. See [Note: reloadable weights]."""
        with all_or_none("save", CheckpointError):
            parameters = named_parameters(root)
            frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
            if len(frozen) == len(parameters):
                raise CheckpointError(
                    f"cannot save the trainable weights of {class_name(root)}: it has no trainable weights, "
                    "expected at least one. Save the full model."
                )
            own = outermost_models(root).items()
            found = {name: str(folder.resolve()) for name, model in own if (folder := folder_of(model))}
        # Sums are added by position, so they need the same weights on all ranks.
        expected = "the same frozen weights on all ranks. Freeze the same parameters on every rank."
        check_equal("save the trainable weights", list(frozen), CheckpointError, expected)
        with all_or_none("save", CheckpointError):
            local = local_sums(frozen)
        folders = _same_on_all_ranks(found)
        changed = changed_since_initial(root, frozen, local)
        weights = fingerprints(frozen, local)
        saved = set(changed) - _names_in_folders(root, changed, weights, folders)
        if saved:
            log("saving frozen weights that a load cannot restore from elsewhere: %s", some(sorted(saved)))
        return cls({name: fingerprint for name, fingerprint in weights.items() if name not in saved}, folders)

    @classmethod
    def from_json(cls, content: Mapping[str, Any] | None) -> LeftOut:
        """Parse the entry of ``trainer_state.json``, which has these fields; None if no weights are left out."""
        if not content:
            return cls()
        weights = {
            name: Fingerprint(saved["dtype"], saved["exact"], saved["as_bfloat16"])
            for name, saved in content["weights"].items()
        }
        return cls(weights, dict(content["folders"]), content.get("elements", _DEFAULT_ELEMENTS))

    def find_differing(self, root: nn.Module, path: Path, *, strict: bool) -> LoadTargets:
        """Locate the left-out weights that differ in the model, in the folders they came from; collective."""
        differing = self._differing(root, path, strict=strict)
        if not differing:
            return []
        with all_or_none(f"load {path}", CheckpointError):
            found = _locate(root, differing, self.folders)
            located = {name for name, _, _ in found}
            if lost := [name for name in differing if name not in located]:
                raise CheckpointError(
                    f"cannot load {path}: it contains only trainable weights, and {class_name(root)} has other "
                    f"frozen values in {some(lost)}, expected those of the saved model. They are not in the folders "
                    f"that the saved model was loaded from ({', '.join(self.folders.values()) or 'none'}). Build the "
                    "model with the same frozen weights, or load a checkpoint of the full model."
                )
            return found

    def restore(self, root: nn.Module, found: LoadTargets, path: Path) -> None:
        """Read the weights that `find_differing` found, and compare them with the fingerprints; collective."""
        if not found:
            return
        folders = ", ".join(self.folders.values())
        log("reading %s from %s", counted(len(found), "frozen weight"), folders)
        _read_weights(found)
        if differing := self._differing(root, path, strict=False):
            raise DamageError(
                f"cannot load {path}: the frozen weights of the saved model are no longer in {folders}: "
                f"{some(differing)} differ there. Restore that folder, or load a checkpoint of the full model."
            )

    def _differing(self, root: nn.Module, path: Path, *, strict: bool) -> list[str]:
        """Return the names of the left-out weights whose values in the model differ from the saved ones; collective."""
        with all_or_none(f"load {path}", CheckpointError):
            parameters = named_parameters(root)
            lost = [name for name in self.weights if name not in parameters]
            if lost and strict:
                raise CheckpointError(
                    f"cannot load {path}: the saved model had frozen weights that {class_name(root)} lacks: "
                    f"{some(lost)}, expected the same model. Build the same model, or pass {NOT_STRICT}."
                )
            present = {name: parameters[name] for name in self.weights if name in parameters}
            local = local_sums(present, self.elements)
        matches = {name: now.has_same_values(self.weights[name]) for name, now in fingerprints(present, local).items()}
        if unknown := [name for name, verdict in matches.items() if verdict is None]:
            raise CheckpointError(
                f"cannot load {path}: the saved model had frozen weights in {self.weights[unknown[0]].dtype}, and "
                f"{class_name(root)} has {some(unknown)} in {present[unknown[0]].dtype}, which cannot be compared, "
                "expected float16 in both or in neither. Prepare the model in the precision of the saved model."
            )
        return [name for name, verdict in matches.items() if not verdict]


def _same_on_all_ranks(folders: dict[str, str]) -> dict[str, str]:
    """Return the folders that have the same path on every rank; collective."""
    of_ranks: list[Any] = [None] * world_size()
    dist.all_gather_object(of_ranks, folders, group=group_in_use())
    return {name: folder for name, folder in folders.items() if all(o.get(name) == folder for o in of_ranks)}


def _names_in_folders(
    root: nn.Module, names: Sequence[str], found: Mapping[str, Fingerprint], folders: Mapping[str, str]
) -> frozenset[str]:
    """Return the names of the weights whose current values are in the files of the folders; collective.

    The result is cached until weights or files change. It omits weights that cannot be read or compared.
    """
    if not names:
        return frozenset()
    with all_or_none("save", CheckpointError):  # `stat` fails if a file is deleted at this moment
        files = [(file, file.stat()) for folder in folders.values() for file in Path(folder).glob("*.safetensors")]
        versions = [f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in files]
        state = frozenset([*(f"{name} {found[name].exact}" for name in names), *versions])
    cached = model_state(root).get(_LAST_COMPARISON)
    if not any_rank(cached is None or cached[0] != state) and cached is not None:
        return cached[1]
    equal: set[str] = set()
    for module_name, folder in folders.items():
        try:
            with all_or_none(f"compare with {folder}", CheckpointError):
                located = _locate(root, names, {module_name: folder})
            check_equal(
                f"compare with {folder}", [n for n, _, _ in located], CheckpointError, "the same files everywhere."
            )
            for name, region, tensor in located:  # one at a time: together they can be as large as the model
                stored = {name: sharded_like(tensor, torch.empty_like(values_of(tensor)))}
                _read_weights([(name, region, stored[name])])
                if fingerprints(stored, local_sums(stored))[name] == found[name]:
                    equal.add(name)
        except CheckpointError as error:  # raised on all ranks
            log("comparing frozen weights with %s failed, so they are saved: %s", folder, error, level=logging.WARNING)
    return model_state(root).set(_LAST_COMPARISON, (state, frozenset(equal)))[1]


def _locate(root: nn.Module, names: Sequence[str], folders: Mapping[str, str]) -> LoadTargets:
    """Locate the named weights in the folders' files; omit weights that are not found."""
    found: list[tuple[str, Region, torch.Tensor]] = []
    for module_name, folder in folders.items():
        within = {name for name in names if name.startswith(f"{module_name}." if module_name else "")}
        if within and Path(folder).is_dir():
            model = root.get_submodule(module_name)
            origin = open_folder(model, folder)
            known = {module: (origin, name) for module, name in names_without_adapters(model).items()}
            targets, _ = match_tensors(root, known, CHECKPOINT)
            found += [(t.name, t.regions[0], t.tensor) for t in targets if t.name in within and t.regions]
    return found


def _read_weights(located: LoadTargets) -> None:
    """Read located tensors into the model; collective."""
    requests, broadcasts = divide_reads(located)
    with all_or_none("read frozen weights", DamageError), Reader("reading frozen weights") as reader:
        reader.read(requests)
    for broadcast in broadcasts:
        broadcast.run()
