"""How far a run is in its data: one position for all ranks, or a state for each.

Input: a loader. Output: JSON in ``trainer_state.json`` where the loader's state is the same on every rank
(``ResumableLoader``); else a safetensors file a rank, its header the tree and its tensors the leaves. And the way back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load, save

from fsdp2_strategy.checkpoint.training_state import require
from fsdp2_strategy.distributed.process_group import world_size
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.json_files import check_json

_TREE = "tree"


class Loader(Protocol):
    """What knows how far it is. One that has ``check_state``, too, has the same state on every rank, as JSON."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return how far it is."""

    def load_state_dict(self, state: Any) -> object:
        """Go on there."""


class Later(Enum):
    """Stands for a loader that another load brings to its place."""

    LATER = "later"


LATER = Later.LATER


@dataclass(frozen=True, kw_only=True)
class DataPosition:
    """How far a loader is."""

    facts: dict[str, Any]
    """What is the same on every rank."""
    of_rank: bytes | None
    """Content of this rank's file, where it has one."""

    @classmethod
    def of(cls, loader: Any) -> DataPosition:
        """Ask a loader.

        Raises:
            CheckpointError: it cannot say, or its state holds what is no data.
        """
        if not hasattr(loader, "state_dict") or not hasattr(loader, "load_state_dict"):
            raise CheckpointError(
                f"cannot save: the data loader is a {type(loader).__name__}, expected one with state_dict and "
                "load_state_dict. Use ResumableLoader, or leave dataloader out."
            )
        state = loader.state_dict()
        if _is_shared(loader):
            check_json(state, "dataloader")
            return cls(facts={"state": dict(state)}, of_rank=None)
        return cls(facts={"ranks": world_size()}, of_rank=_packed(state))


def check_position(loader: Any, saved: Mapping[str, Any] | None, path: Path) -> None:
    """Raise where a loader cannot go on from what a checkpoint holds.

    Raises:
        CheckpointError: it holds nothing, or was saved by another kind of loader, or on another number of ranks.
        DataError: the position is one in another order.
    """
    require(saved, "data position", "dataloader=None", path)
    saved = saved or {}
    if _is_shared(loader) != ("state" in saved):
        raise CheckpointError(
            f"cannot load the data position: {path} was saved with another kind of loader than "
            f"{type(loader).__name__}, expected the same. Use the loader of the run that goes on."
        )
    if "state" in saved:
        loader.check_state(saved["state"])
    elif saved["ranks"] != world_size():
        raise CheckpointError(
            f"cannot load the data position: {path} was saved on {saved['ranks']} ranks by a loader with a state for "
            f"each, and there are {world_size()} now, expected as many. Use ResumableLoader, which goes on at "
            "any number, or pass dataloader=None and find the place by hand."
        )


def restore_position(loader: Any, saved: Mapping[str, Any], of_rank: bytes | None) -> None:
    """Let a loader go on where it was."""
    loader.load_state_dict(saved["state"] if of_rank is None else _unpacked(of_rank))


def _is_shared(loader: Any) -> bool:
    return hasattr(loader, "check_state")


def _packed(state: Any) -> bytes:
    tensors: dict[str, torch.Tensor] = {}

    def packed(value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, np.bool | np.integer | np.float32 | np.float64):
            return value.item()
        plain = isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative
        dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
        if plain or dense or isinstance(value, bytes):
            return {type(value).__name__: _kept(value, tensors)}
        if isinstance(value, Mapping):
            return {"dict": [[packed(k, where), packed(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [packed(v, f"{where}[{i}]") for i, v in enumerate(value)]}
        raise CheckpointError(
            f"cannot save: {where} is a {type(value).__name__}, expected numbers, text, bytes, arrays, tensors, and "
            "lists and mappings of them. Checkpoints hold no pickled objects."
        )

    tree = packed(state, "dataloader")
    return save(tensors, metadata={_TREE: json.dumps(tree)})


def _kept(value: Any, tensors: dict[str, torch.Tensor]) -> str:
    """Put a plain array, a dense tensor or bytes among the tensors; return its name there."""
    if isinstance(value, bytes):
        value = np.frombuffer(value, dtype=np.uint8)
    tensor = torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value.detach().cpu().clone()
    name = str(len(tensors))
    tensors[name] = tensor.contiguous()
    return name


def _unpacked(content: bytes) -> Any:
    tensors = load(content)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    tree = json.loads(header["__metadata__"][_TREE])

    def unpacked(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        [(kind, inner)] = value.items()
        if kind == "dict":
            return {unpacked(k): unpacked(v) for k, v in inner}
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(map(unpacked, inner))
        tensor = tensors[inner]
        if kind == "bytes":
            return tensor.numpy().tobytes()
        return tensor.numpy() if kind == "ndarray" else tensor

    return unpacked(tree)
