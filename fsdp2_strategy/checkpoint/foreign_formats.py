"""Load and export checkpoints of other systems: sharded ``.distcp`` folders of torch, and ``.pt`` or ``.bin`` files.

Input: a path. Output: a loaded model and optimizer, or a Hugging Face folder. Checkpoints of other systems contain
pickles, and reading a pickle can run code. No pickle is read unless the user passes ``trust=True``.

These folders are supported:

- LightRFT: the model in the folder itself, ``optim_states``, ``client_state.pt``
- accelerate and LeRobot: ``pytorch_model_fsdp_0``, ``optimizer_0``
- VITRA: ``weights.pt``, ``optimizer.pt``, ``meta.json``
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy import sizes
from fsdp2_strategy.checkpoint.load_options import NO_OPTIMIZER, NO_SCHEDULER, NOT_STRICT
from fsdp2_strategy.checkpoint.paths import exists, is_directory, names_in
from fsdp2_strategy.checkpoint.storage import check_shapes, convert_dcp_errors
from fsdp2_strategy.checkpoint.training_state import (
    LoadedCheckpoint,
    advance_scheduler,
    allocate_optimizer_state,
    check_restored,
    require_saved,
    restore_optimizer,
    restore_scheduler,
    unwrap_and_reshard,
)
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.process_group import group_in_use
from fsdp2_strategy.distributed.torch_internals import local_of
from fsdp2_strategy.errors import CheckpointError, some
from fsdp2_strategy.hf.conversions import renames
from fsdp2_strategy.hf.copy_folder import new_folder, sidecars_in
from fsdp2_strategy.hf.known_models import check_configuration
from fsdp2_strategy.hf.transformers_models import outermost_models
from fsdp2_strategy.model.failed_loads import unusable_unless_done
from fsdp2_strategy.model.gradients import clear_gradients
from fsdp2_strategy.model.master_weights import refresh_masters_of
from fsdp2_strategy.model.names import clean, named_parameters, saved_tensors
from fsdp2_strategy.model.offloading import check_resident
from fsdp2_strategy.model.shards import local_shard
from fsdp2_strategy.model.weight_versions import count_change
from fsdp2_strategy.storage.file_reads import read_file

Described = dict[str, tuple[tuple[int, ...], torch.dtype]]

_MODEL_FOLDERS = (".", "pytorch_model_fsdp_0", "model")
_OPTIMIZER_FOLDERS = ("optim_states", "optimizer_0", "optimizer")
_SCHEDULE_FILES = ("scheduler_state.pt", "scheduler.pt", "scheduler.bin")
_MODEL_FILES = ("pytorch_model_fsdp.bin", "pytorch_model.bin", "model.pt", "model.bin", "weights.pt")
_OPTIMIZER_FILES = ("optimizer.pt",)
_SUFFIXES = (".pt", ".pth", ".bin")
_META = "meta.json"


@dataclass(frozen=True)
class Foreign:
    """The paths of another system's checkpoint."""

    path: Path
    model: Path
    """A folder with ``.metadata``, or a file."""
    optimizer: Path | None
    """A folder with ``.metadata``, or a file; None if the checkpoint has no optimizer state."""

    @property
    def step(self) -> int:
        """The step in ``meta.json``, else the number at the end of the name (``global_step100``), else 0."""
        match = re.search(r"(\d+)$", self.path.stem)
        return self.recorded_step or (int(match[1]) if match else 0)

    @property
    def recorded_step(self) -> int | None:
        """The step in ``meta.json``, or None."""
        step = self._meta.get("global_step")
        return step if isinstance(step, int) else None

    @property
    def training_state(self) -> list[str]:
        """Which of "optimizer" and "scheduler" have state in the checkpoint."""
        has_schedule = _first_of(self.path, (), _SCHEDULE_FILES) is not None
        return [*(["optimizer"] if self.optimizer else []), *(["scheduler"] if has_schedule else [])]

    def schedule(self) -> dict[str, Any] | None:
        """Unpickle the state of the schedule; return None if the checkpoint has none."""
        path = _first_of(self.path, (), _SCHEDULE_FILES)
        return torch.load(path, map_location="cpu", weights_only=False) if path else None

    def client_state(self) -> dict[str, Any]:
        """Unpickle the trainer's ``client_state.pt``; without that file, return the content of ``meta.json``."""
        path = self.path / "client_state.pt"
        state = torch.load(path, map_location="cpu", weights_only=False) if path.is_file() else self._meta
        return dict(state) if isinstance(state, Mapping) else {}

    @cached_property
    def _meta(self) -> dict[str, Any]:
        try:
            content = json.loads(read_file(self.path / _META, 64 << 20, follow_link=True))
        except OSError:
            return {}
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"cannot read {self.path / _META}: {error}, expected JSON. Copy the file again."
            ) from error
        return content if isinstance(content, dict) else {}


def find_foreign(path: Path, *, trust: bool) -> Foreign | None:
    """Return the foreign checkpoint at a path, else the one with the highest step in its subfolders, else None."""
    foreign = _look_for(path)
    if foreign is not None and not trust:
        raise CheckpointError(
            f"cannot load {foreign.path}: another system wrote it, and it contains pickles, which can run any code "
            "when they are read. Pass trust=True if you trust its source."
        )
    return foreign


def is_foreign(path: Path) -> bool:
    """Return whether a path or one of its subfolders is a foreign checkpoint, without reading a pickle."""
    return _look_for(path) is not None


def _look_for(path: Path) -> Foreign | None:
    if not is_directory(path):
        return Foreign(path, path, None) if exists(path) and path.suffix in _SUFFIXES else None
    folders = [path, *(path / name for name in sorted(names_in(path)))]
    found = [foreign for folder in folders if (foreign := _in_folder(folder))]
    # VITRA can save the same step twice: the checkpoint from the end of the epoch is the newer one.
    return max(found, key=lambda f: (f.path == path, f.step, f.path.name.endswith(".end.ckpt")), default=None)


def _in_folder(path: Path) -> Foreign | None:
    model = _first_of(path, _MODEL_FOLDERS, _MODEL_FILES)
    return Foreign(path, model, _first_of(path, _OPTIMIZER_FOLDERS, _OPTIMIZER_FILES)) if model else None


def _first_of(path: Path, folders: Iterable[str], files: Iterable[str]) -> Path | None:
    """Return the first named folder that contains ``.metadata``, else the first named file that exists, else None."""
    found = [path / name for name in folders if exists(path / name / ".metadata")]
    found += [path / name for name in files if exists(path / name)]
    return found[0] if found else None


def load_foreign(
    model: nn.Module,
    foreign: Foreign,
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
    *,
    load_model: bool,
    strict: bool,
    must_restore: Collection[str] = (),
) -> LoadedCheckpoint:
    """Load a foreign checkpoint: weights, optimizer state by parameter name, schedule and client state; collective.

    A schedule without saved state is advanced to the step in ``meta.json``.
    """
    path = foreign.path
    report: dict[str, Any] = {}
    check_resident(model, f"load {path}")
    if optimizer is not None:
        check_resident(optimizer, f"load {path}")
    with all_or_none(f"load {path}", CheckpointError):
        check_restored(must_restore, {"optimizer": optimizer, "scheduler": scheduler}, foreign.training_state, path)
        root = unwrap_and_reshard(model)
        stored_model, own_names = _open_model(root, foreign)
        if load_model:
            tensors, report = _match_model(root, stored_model, path, strict=strict)
        if optimizer is not None:
            stored = require_saved(foreign.optimizer, "optimizer", NO_OPTIMIZER, path)
            stored_state, state, flat = _match_optimizer(root, stored, optimizer, own_names, strict=strict)
        schedule = foreign.schedule() if scheduler is not None else None
        if scheduler is not None and foreign.recorded_step is None:
            require_saved(schedule, "scheduler", NO_SCHEDULER, path)
        client_state = foreign.client_state()
    touched: list[nn.Module | Optimizer] = [*([root] if load_model else []), *([optimizer] if optimizer else [])]
    with unusable_unless_done(touched), all_or_none(f"load {path}", CheckpointError), torch.no_grad():
        clear_gradients(root)
        if load_model:
            count_change(root)
            stored_model.read(tensors)
        if optimizer is not None:
            stored_state.read(flat)
            restore_optimizer(model, optimizer, state, [{}] * len(optimizer.param_groups), {})
        if load_model:
            refresh_masters_of(root)  # foreign checkpoints hold no master weights
        if scheduler is not None and schedule is not None:
            restore_scheduler(scheduler, schedule)
        elif scheduler is not None:
            advance_scheduler(scheduler, foreign.recorded_step or 0)
    log("loaded %s, a checkpoint of another system (step %d)", path, foreign.step)
    return LoadedCheckpoint(path=path, step=foreign.step, client_state=client_state, **report)


def export_foreign(foreign: Foreign, output: Path, dtype: torch.dtype | None, sidecar_folder: Path | None) -> None:
    """Export a foreign checkpoint to a Hugging Face folder, a few tensors at a time; for a single process."""
    stored = ForeignTensors(foreign.model)
    if not stored.described:
        raise CheckpointError(
            f"cannot export {foreign.path}: it contains no tensors, expected those of a model. Export another "
            "checkpoint."
        )
    if sidecar_folder is not None:
        check_configuration(sidecar_folder, stored.described, str(foreign.path))
    with new_folder(output, stored.described, dtype) as folder:
        batch: dict[str, torch.Tensor] = {}
        last = list(stored.described)[-1]
        for name, (shape, stored_dtype) in stored.described.items():
            batch[name] = torch.empty(shape, dtype=stored_dtype)
            if name == last or sum(tensor.nbytes for tensor in batch.values()) > sizes.CONVERSION_BYTES:
                stored.read(batch)
                folder.write(batch)
                batch = {}
        folder.finish(sidecars_in(sidecar_folder) if sidecar_folder else [])


def _open_model(root: nn.Module, foreign: Foreign) -> tuple[ForeignTensors, dict[str, str]]:
    """Open the model under the names of the installed transformers, and return also the new names by stored name."""
    own = saved_tensors(root)
    stored = ForeignTensors(foreign.model, own)
    names: dict[str, str] = {}
    for name, model in outermost_models(root).items() if own.keys() - stored.described.keys() else ():
        prefix = f"{clean(name)}." if name else ""
        described = {n.removeprefix(prefix): d for n, d in stored.described.items() if n.startswith(prefix)}
        names |= {prefix + old: prefix + new for old, new in renames(model, described).items() if old != new}
    stored.rename(names)
    return stored, names


def _match_model(
    root: nn.Module, stored: ForeignTensors, path: Path, *, strict: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the model's tensors whose names are stored, and fields of the `LoadedCheckpoint`."""
    tensors = saved_tensors(root)
    aliases = set(root.state_dict())
    missing = tuple(name for name in tensors if name not in stored.described)
    unexpected = tuple(name for name in stored.described if name not in tensors and name not in aliases)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"cannot load {path}: it lacks {some(missing)} and holds {some(unexpected)} that the model does "
            f"not have, expected the same names. Build the same model, or pass {NOT_STRICT}."
        )
    shared = {name: tensor for name, tensor in tensors.items() if name in stored.described}
    check_shapes("model", shared, stored.described)
    cast = tuple(name for name, tensor in shared.items() if stored.described[name][1] != tensor.dtype)
    return shared, {"missing": missing, "unexpected": unexpected, "cast": cast}


def _match_optimizer(
    root: nn.Module, path: Path, optimizer: Optimizer, own_names: Mapping[str, str], *, strict: bool
) -> tuple[ForeignTensors, dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Match an optimizer's parameters with the stored state, and allocate tensors to load the state into.

    ``own_names`` has the model's names by stored name. Returns the stored tensors; the allocated tensors by parameter
    name and key; and the same tensors by stored name.
    """
    keys = ("exp_avg", "step", "momentum_buffer")
    names = [*named_parameters(root), *own_names]
    stored = ForeignTensors(path, [f"state.{name}.{key}" for name in names for key in keys])
    stored.rename(own_names, before="state.")
    described = {name: layout for name, layout in stored.described.items() if name.startswith("state.")}
    state, flat = allocate_optimizer_state(root, optimizer, described, strict=strict)
    check_shapes("optimizer", flat, described)
    lacking = [name for name, own in state.items() if not own and name not in stored.parameters_in_groups]
    if lacking and strict and stored.parameters_in_groups:
        raise CheckpointError(
            f"cannot load the optimizer: its parameter groups in {path} lack {some(lacking)}, expected all parameters "
            "of this optimizer. Build the optimizer over the same trainable parameters, or pass "
            f"{NOT_STRICT} to start these parameters without state."
        )
    if lacking:
        log("%s has no optimizer state for %s: these start without state", path, some(lacking), level=logging.WARNING)
    return stored, state, flat


class ForeignTensors:
    """The tensors of one folder or file. Names exclude the checkpoint's prefix, such as ``model.`` or ``module.``.

    The prefix is inferred from the names in ``wanted``; without these, it is that of the mapping with the most tensors.
    """

    def __init__(self, path: Path, wanted: Iterable[str] | None = None) -> None:
        self._path = path
        self._full: dict[str, torch.Tensor] | None = None
        """The tensors of a file, memory-mapped; None for a folder."""
        self.parameters_in_groups: frozenset[str] = frozenset()
        """Names of all parameters in the groups of an optimizer file, with or without state."""
        stored: Described = {}
        prefixes: dict[str, str] = {}
        if path.is_file():
            self._full, prefixes, self.parameters_in_groups = _load_file(path)
            stored = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._full.items()}
        else:
            metadata = FileSystemReader(path).read_metadata()
            for name, entry in metadata.state_dict_metadata.items():
                if isinstance(entry, TensorStorageMetadata):
                    stored[name] = (tuple(entry.size), entry.properties.dtype)
                    keys = (metadata.planner_data or {}).get(name, (name,))
                    prefixes[name] = "".join(f"{key}." for key in keys[:-1])
        prefix = _most_frequent_prefix(prefixes) if wanted is None else _prefix_of_wanted(stored, set(wanted))
        self.described: Described = {n.removeprefix(prefix): d for n, d in stored.items() if n.startswith(prefix)}
        self._stored_names = {name: prefix + name for name in self.described}

    def rename(self, names: Mapping[str, str], before: str = "") -> None:
        """Change names; in optimizer state, a parameter's name stands between ``before`` and the key of the state."""
        if before:
            tensors = {}
            for full in self.described:
                name, _, key = full.removeprefix(before).rpartition(".")
                tensors[full] = f"{before}{names[name]}.{key}" if full.startswith(before) and name in names else full
        else:
            tensors = {name: names.get(name, name) for name in self.described}
        self.described = {tensors[name]: layout for name, layout in self.described.items()}
        self._stored_names = {tensors[name]: stored for name, stored in self._stored_names.items()}
        self.parameters_in_groups = frozenset(names.get(name, name) for name in self.parameters_in_groups)

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read stored values into tensors; each rank reads its own shards. Collective if the checkpoint is a folder."""
        if self._full is None:
            state = {self._stored_names[name]: tensor for name, tensor in tensors.items()}
            with convert_dcp_errors(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(
                    state,
                    storage_reader=FileSystemReader(self._path),
                    process_group=group_in_use(),
                    no_dist=not dist.is_initialized(),
                )
            return
        for name, tensor in tensors.items():
            local_of(tensor).copy_(local_shard(tensor).of(self._full[self._stored_names[name]]))


def _load_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str], frozenset[str]]:
    """Return a file's memory-mapped tensors by dotted name, their prefixes, and the names in its ``param_groups``."""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except (RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"cannot read {path}: {error}. Expected a file that torch.save wrote.") from error
    tensors: dict[str, torch.Tensor] = {}
    prefixes: dict[str, str] = {}

    def collect(value: Any, prefix: str, key: str) -> None:
        if isinstance(value, torch.Tensor):
            tensors[prefix + key], prefixes[prefix + key] = value.detach(), prefix
        elif isinstance(value, Mapping):
            for inner_key, inner in value.items():
                collect(inner, f"{prefix}{key}." if key else "", str(inner_key))

    collect(content, "", "")
    groups = content.get("param_groups", ()) if isinstance(content, Mapping) else ()
    return tensors, prefixes, frozenset(name for group in groups for name in group["params"] if isinstance(name, str))


def _prefix_of_wanted(stored: Iterable[str], wanted: set[str]) -> str:
    """Return the prefix with which most of the wanted names are stored; "" if none is stored."""
    found: Counter[str] = Counter()
    for name in stored:
        for at in (0, *(match.end() for match in re.finditer(r"\.", name))):
            if name[at:] in wanted:
                found[name[:at]] += 1
                break
    return found.most_common(1)[0][0] if found else ""


def _most_frequent_prefix(prefixes: Mapping[str, str]) -> str:
    """Return the prefix of the most names that are not optimizer state, with DistributedDataParallel's ``module.``."""
    counted = Counter(prefix for prefix in prefixes.values() if "optim" not in prefix)
    most = counted.most_common(1)[0][0] if counted else ""
    names = [name for name in prefixes if name.startswith(most)]
    wrapped = all(name.startswith(f"{most}module.") for name in names)
    return f"{most}module." if names and wrapped else most
