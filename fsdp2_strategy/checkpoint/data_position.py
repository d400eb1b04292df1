"""Save and restore the state of a data loader: one state for all ranks, or one per rank.

Input: a loader. Output: JSON in ``trainer_state.json`` if the loader's state is the same on every rank
(``ResumableLoader``). The state of another loader is saved in one safetensors file per rank. The file contains the
tensors of the state. Its header contains the nested structure and all other values as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from safetensors.torch import save

from fsdp2_strategy.checkpoint.paths import DATA
from fsdp2_strategy.checkpoint.training_state import require_saved
from fsdp2_strategy.distributed.process_group import data_size
from fsdp2_strategy.errors import CheckpointError, shown
from fsdp2_strategy.storage.checksum_manifests import damage
from fsdp2_strategy.storage.json_files import check_json
from fsdp2_strategy.storage.safetensors_format import tensors_in
from fsdp2_strategy.storage.schema import InvalidError, json_value, parse_json

_TREE = "tree"

DataPositionMode = bool | Literal["samples"]
"""Whether the data position is loaded; "samples": even if it was saved with another global batch size."""


class Loader(Protocol):
    """A loader that can be resumed.

    If it has a method ``check_state``, its state is JSON, the same on every rank. ``check_state`` and
    ``load_state_dict`` then have the arguments of those of ``ResumableLoader``.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position in the data."""

    def load_state_dict(self, state: Any) -> object:
        """Continue from a position."""


class Later(Enum):
    """The type of `LATER`, which is passed to a load as ``dataloader`` if a later load restores the data position."""

    LATER = "later"


LATER = Later.LATER
"""Pass this as ``dataloader`` to a load if a later load restores the data position, for which no loader exists yet."""


@dataclass(frozen=True, kw_only=True)
class DataPosition:
    """The state of a loader, as a checkpoint stores it."""

    entry: dict[str, Any]
    """The entry in ``trainer_state.json``, the same on every rank."""
    rank_file: bytes | None
    """The content of this rank's safetensors file, if it has one."""

    @classmethod
    def of(cls, loader: Any) -> DataPosition:
        """Read the state of a loader, or raise if only pickle could store it."""
        if not hasattr(loader, "state_dict") or not hasattr(loader, "load_state_dict"):
            raise CheckpointError(
                f"cannot save: the data loader is a {type(loader).__name__}, expected one with state_dict and "
                "load_state_dict. Use ResumableLoader, or omit dataloader."
            )
        state = loader.state_dict()
        if _is_shared(loader):
            check_json(state, "dataloader")
            return cls(entry={"state": dict(state)}, rank_file=None)
        return cls(entry={"ranks": data_size()}, rank_file=_serialize(state))


def check_position(loader: Any, saved: Mapping[str, Any] | None, path: Path, *, any_batch_size: bool) -> None:
    """Check that a loader can continue from the data position in a checkpoint."""
    saved = require_saved(saved, "data position", "dataloader=None", path)
    if _is_shared(loader) != ("state" in saved):
        raise CheckpointError(
            f"cannot load the data position: {path} was saved with another kind of loader than "
            f"{type(loader).__name__}, expected the same kind. Use the loader of the run that is resumed."
        )
    if "state" in saved:
        loader.check_state(saved["state"], **_options(any_batch_size))
    elif any_batch_size:
        raise CheckpointError(
            "cannot load the data position with load_data_position='samples': the loader is a "
            f"{type(loader).__name__}, expected a ResumableLoader, which knows the order of all samples. "
            "Pass True, and keep the batch size."
        )
    elif saved["ranks"] != data_size():
        raise CheckpointError(
            f"cannot load the data position: {path} was saved by a loader with one state per rank, on "
            f"{saved['ranks']} ranks, and this run has {data_size()}, expected the same number. Use ResumableLoader, "
            "which resumes on any number of ranks, or pass dataloader=None and set the position yourself."
        )


def parse_rank_state(content: bytes, path: Path) -> Any:
    """Return the state of a loader from the content of a rank's file, or raise a `DamageError`."""
    try:
        return _deserialize(content, path)
    except InvalidError as error:
        raise damage(path, f"the state of the loader is invalid: {error}") from error
    except RecursionError:
        raise damage(path, "the state of the loader is nested too deeply") from None


_MAX_DEPTH = 900
"""Each list or dictionary of a state has two or three levels in the file."""


def restore_position(loader: Any, saved: Mapping[str, Any], rank_state: Any, *, any_batch_size: bool) -> None:
    """Load a saved position into a loader: ``rank_state``, if each rank has a state of its own."""
    loader.load_state_dict(saved.get("state", rank_state), **_options(any_batch_size))


def _options(any_batch_size: bool) -> dict[str, bool]:
    return {"any_batch_size": True} if any_batch_size else {}


def _is_shared(loader: Any) -> bool:
    return hasattr(loader, "check_state")


def _serialize(state: Any) -> bytes:
    tensors: dict[str, torch.Tensor] = {}

    def convert(value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, np.bool | np.integer | np.float32 | np.float64):
            return value.item()
        kind, tensor = _as_tensor(value)
        if tensor is not None:
            name = str(len(tensors))
            tensors[name] = tensor
            return {kind: name}
        if isinstance(value, Mapping):
            return {"dict": [[convert(k, where), convert(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [convert(v, f"{where}[{i}]") for i, v in enumerate(value)]}
        raise CheckpointError(
            f"cannot save: {where} is a {type(value).__name__}, expected numbers, strings, bytes, numeric arrays, "
            "dense tensors, and lists and mappings of them. Checkpoints contain no pickled objects."
        )

    try:
        text = json.dumps(convert(state, "dataloader"))
    except RecursionError:
        raise CheckpointError(
            "cannot save: the state of the data loader is nested too deeply, expected a few levels of lists and "
            "mappings. Return a flatter state from state_dict."
        ) from None
    return save(tensors, metadata={_TREE: text})


def _as_tensor(value: Any) -> tuple[str, torch.Tensor | None]:
    """Return the kind of bytes, a numeric array or a dense tensor, and a copy as a tensor; None for all others."""
    if isinstance(value, bytes):
        return "bytes", torch.from_numpy(np.frombuffer(value, dtype=np.uint8).copy())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative:
        return "ndarray", torch.from_numpy(np.array(value, order="C"))
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return "Tensor", value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return "", None


def _deserialize(content: bytes, path: Path = Path(DATA)) -> Any:
    tensors, metadata = tensors_in(content, path)

    def convert(value: Any) -> Any:
        if not isinstance(value, dict | list):
            return value
        kind, inner = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
        if kind == "dict" and isinstance(inner, list):
            return dict(map(convert_pair, inner))
        if kind in ("list", "tuple") and isinstance(inner, list):
            return (list if kind == "list" else tuple)(map(convert, inner))
        tensor = tensors.get(inner) if isinstance(inner, str) else None
        if kind == "bytes" and tensor is not None and tensor.dtype == torch.uint8:
            return tensor.numpy().tobytes()
        if kind not in ("ndarray", "Tensor") or tensor is None or (kind == "ndarray" and not _has_numpy_dtype(tensor)):
            raise InvalidError(f"has the entry {shown(value)}, which this package does not write")
        return tensor.numpy() if kind == "ndarray" else tensor

    def convert_pair(pair: Any) -> tuple[Any, Any]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise InvalidError(f"has {shown(pair)} in a dictionary, expected a key and a value")
        key = convert(pair[0])
        try:
            hash(key)
        except TypeError:
            raise InvalidError(f"has the key {shown(key)}, which cannot be one") from None
        return key, convert(pair[1])

    return convert(parse_json(metadata.get(_TREE, ""), json_value(_MAX_DEPTH)))


def _has_numpy_dtype(tensor: torch.Tensor) -> bool:
    try:
        tensor.numpy()
    except TypeError:
        return False
    return True
