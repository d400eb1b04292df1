"""Checkpoints that others wrote: torch's sharded ``.distcp`` folders, and whole ``.pt`` or ``.bin`` files.

Input: a path. Output: tensors of a model and an optimizer, filled. Both forms are pickles, which run code as they are
read, so the user has to say that they are to be trusted; nothing is read before that.

Known are the folders of LightRFT (the model in the folder itself, ``optim_states``, ``client_state.pt``) and of
accelerate and LeRobot (``pytorch_model_fsdp_0``, ``optimizer_0``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2_strategy.checkpoint.state import allocate_optimizer_state
from fsdp2_strategy.checkpoint.storage import check_shapes, one_error
from fsdp2_strategy.errors import CheckpointError, some
from fsdp2_strategy.names import named_parameters, persistent_buffers
from fsdp2_strategy.residency import local_box

Described = dict[str, tuple[tuple[int, ...], torch.dtype]]

_MODEL_FOLDERS = (".", "pytorch_model_fsdp_0", "model")
_OPTIMIZER_FOLDERS = ("optim_states", "optimizer_0", "optimizer")
_SCHEDULES = ("scheduler_state.pt", "scheduler.pt", "scheduler.bin")
_WHOLE_FILES = ("pytorch_model_fsdp.bin", "pytorch_model.bin", "model.pt", "model.bin")
_WHOLE = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class Foreign:
    """Where another system's checkpoint lies."""

    path: Path
    model: Path
    """A folder with ``.metadata``, or a file."""
    optimizer: Path | None

    @property
    def step(self) -> int:
        """The number at the end of its name, as in ``global_step100`` or ``005000``."""
        match = re.search(r"(\d+)$", self.path.stem)
        return int(match[1]) if match else 0

    def schedule(self) -> dict[str, Any] | None:
        """Return the state of the schedule, where there is one."""
        found = [self.path / name for name in _SCHEDULES if (self.path / name).is_file()]
        return torch.load(found[0], map_location="cpu", weights_only=False) if found else None

    def client_state(self) -> dict[str, Any]:
        """Return what the trainer kept beside it."""
        path = self.path / "client_state.pt"
        state = torch.load(path, map_location="cpu", weights_only=False) if path.is_file() else {}
        return dict(state) if isinstance(state, Mapping) else {}


def find_foreign(path: Path) -> Foreign | None:
    """Return the foreign checkpoint at a path, or the newest by number of those within; None where there is none."""
    if path.is_file():
        return Foreign(path, path, None) if path.suffix in _WHOLE else None
    if not path.is_dir():
        return None
    found = [foreign for folder in (path, *path.iterdir()) if (foreign := _in_folder(folder))]
    return max(found, key=lambda foreign: (foreign.path == path, foreign.step), default=None)


def _in_folder(path: Path) -> Foreign | None:
    if not path.is_dir():
        return None
    sharded = [path / name for name in _MODEL_FOLDERS if (path / name / ".metadata").is_file()]
    whole = [path / name for name in _WHOLE_FILES if (path / name).is_file()]
    optimizer = [path / name for name in _OPTIMIZER_FOLDERS if (path / name / ".metadata").is_file()]
    if not (sharded or whole):
        return None
    return Foreign(path, (sharded or whole)[0], optimizer[0] if optimizer else None)


def match_model_tensors(
    root: nn.Module, foreign: Foreign, *, strict: bool
) -> tuple[ForeignTensors, dict[str, torch.Tensor], tuple[str, ...], tuple[str, ...]]:
    """Return where a model's tensors are, those that are there, and names that are missing and unexpected.

    Raises:
        CheckpointError: shapes do not agree; or strict, and names do not.
    """
    tensors: dict[str, torch.Tensor] = {**named_parameters(root), **persistent_buffers(root)}
    stored = ForeignTensors(foreign.model, tensors)
    aliases = set(root.state_dict())
    missing = tuple(name for name in tensors if name not in stored.described)
    unexpected = tuple(name for name in stored.described if name not in tensors and name not in aliases)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"cannot load {foreign.path}: it lacks {some(missing)} and holds {some(unexpected)} that the model does "
            "not have, expected the same names. Build the same model, or pass load_module_strict=False."
        )
    shared = {name: tensor for name, tensor in tensors.items() if name in stored.described}
    check_shapes("model", shared, stored.described)
    return stored, shared, missing, unexpected


def match_optimizer_tensors(
    root: nn.Module, foreign: Foreign, optimizer: Optimizer, *, strict: bool
) -> tuple[ForeignTensors, dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return where an optimizer's state is, and room for it, by parameter and by stored name.

    Raises:
        CheckpointError: shapes do not agree; or strict, and there is state of other parameters.
    """
    keys = ("exp_avg", "step", "momentum_buffer")
    wanted = [f"state.{name}.{key}" for name in named_parameters(root) for key in keys]
    stored = ForeignTensors(foreign.optimizer or foreign.path, wanted)
    described = {name: facts for name, facts in stored.described.items() if name.startswith("state.")}
    slots, flat = allocate_optimizer_state(root, optimizer, described, strict=strict)
    check_shapes("optimizer", flat, described)
    return stored, slots, flat


class ForeignTensors:
    """The tensors of one folder or file, by the names that a model or an optimizer gives them.

    Args:
        path: a folder with ``.metadata``, or a file.
        wanted: names that are looked for; what stands before them in the checkpoint (``model.``, ``module.``) is found
            out.
    """

    def __init__(self, path: Path, wanted: Iterable[str]) -> None:
        self._path = path
        self._whole = _whole_tensors(path) if path.is_file() else None
        stored: Described = {}
        if self._whole is not None:
            stored = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._whole.items()}
        else:
            for name, entry in FileSystemReader(path).read_metadata().state_dict_metadata.items():
                if isinstance(entry, TensorStorageMetadata):
                    stored[name] = (tuple(entry.size), entry.properties.dtype)
        self._prefix = _prefix(stored, set(wanted))
        self.described: Described = {
            name.removeprefix(self._prefix): facts for name, facts in stored.items() if name.startswith(self._prefix)
        }

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors, each rank its own part; collective."""
        if self._whole is None:
            state = {self._prefix + name: tensor for name, tensor in tensors.items()}
            with one_error():
                load(state, storage_reader=FileSystemReader(self._path), no_dist=not dist.is_initialized())
            return
        for name, tensor in tensors.items():
            part = self._whole[self._prefix + name]
            for dim, (begin, length) in enumerate(local_box(tensor)):
                part = part.narrow(dim, begin, length)
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).copy_(part)


def _whole_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, mapped and not read, by dotted names."""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except (RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"cannot read {path}: {error}. Expected a file that torch.save wrote.") from error
    found: dict[str, torch.Tensor] = {}

    def collect(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value.detach()
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                collect(inner, f"{name}.{key}" if name else str(key))

    collect(content, "")
    return found


def _prefix(stored: Iterable[str], wanted: set[str]) -> str:
    """Return what stands before most of the wanted names."""
    prefixes: Counter[str] = Counter()
    for name in stored:
        for at in (0, *(match.end() for match in re.finditer(r"\.", name))):
            if name[at:] in wanted:
                prefixes[name[:at]] += 1
                break
    return prefixes.most_common(1)[0][0] if prefixes else ""
