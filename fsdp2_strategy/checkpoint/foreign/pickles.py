"""Read pickles of other systems, also those with classes that are not installed here.

Input: a file of ``torch.save`` that the user trusts. Output: its content. A file without objects of other classes is
read with ``weights_only=True``. In other files, objects of classes that cannot be imported, such as the dataclass of
another trainer, become `UnknownObject`s with their attributes; and the parts of a ``ShardedTensor``, which torch only
reads on as many ranks as wrote it, become `PickledShards`.
"""

from __future__ import annotations

import errno
import logging
import pickle
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch

from fsdp2_strategy.errors import CheckpointError, shortened

_SHARDED_TENSOR = ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")


class UnknownObject:
    """An object of a class that cannot be imported; its attributes are those that were pickled."""

    def __init__(self, *_arguments: Any, **_named: Any) -> None:
        """Accept the arguments of any constructor."""

    def __setstate__(self, state: Any) -> None:
        """Keep the pickled attributes."""
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, Mapping):
                vars(self).update(part)


class PickledShards:
    """A rank's part of a ``ShardedTensor``: each shard has ``tensor`` and ``metadata``, with offsets and sizes."""

    ProcessGroupState = UnknownObject
    """The nested class of ``ShardedTensor`` with the ranks that wrote it."""

    shards: list[Any]
    shape: tuple[int, ...]

    def __init__(self, *_arguments: Any, **_named: Any) -> None:
        """Accept the arguments of ``ShardedTensor``; the state follows."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Keep the shards and the full shape."""
        self.shards, metadata = state[0], state[1]
        self.shape = tuple(metadata.size)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _SHARDED_TENSOR:
            return PickledShards
        try:
            found = super().find_class(module, name)
        except (ImportError, AttributeError):
            return UnknownObject
        return _rebuilding_shards(found) if name.startswith("_rebuild_from_type") else found


def _rebuilding_shards(rebuild: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function by which torch unpickles its subclasses of tensors: `PickledShards` is none."""

    def rebuilt(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        if kind is not PickledShards:
            return rebuild(function, kind, arguments, state)
        shards = PickledShards()
        shards.__setstate__(state)
        return shards

    return rebuilt


_PICKLE = types.ModuleType("pickle_with_unknown_classes")
vars(_PICKLE).update(vars(pickle))
vars(_PICKLE)["Unpickler"] = _Unpickler


def unpickle_file(path: Path) -> Any:
    """Return the content of a file of ``torch.save``; tensors are memory-mapped where its format allows.

    Raises:
        CheckpointError: it is missing or corrupt.
    """
    try:
        return unpickle(path)
    except MemoryError:
        raise
    except Exception as error:  # corrupt bytes can raise any error
        raise unreadable(path, error) from error


def unpickle(file: Path | IO[bytes]) -> Any:
    """Return the content of a file, or of bytes, of ``torch.save``; raise whatever the bytes raise."""
    ways: list[dict[str, Any]] = [{"weights_only": True}, {"weights_only": False, "pickle_module": _PICKLE}]
    if isinstance(file, Path):
        ways = [{**ways[0], "mmap": True}, {**ways[1], "mmap": True}, ways[1]]
    with warnings.catch_warnings(), _without_mesh_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        for options in ways[:-1]:
            # It may have other classes, or a format that cannot be mapped.
            with suppress(pickle.UnpicklingError, RuntimeError, ValueError, EOFError):
                return _load(file, **options)
        return _load(file, **ways[-1])


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file that cannot be read, with the reason and what to do."""
    advice = "Copy the checkpoint again, or load another one."
    if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.EINVAL):
        advice = "Check the file's permissions and its file system."
    return CheckpointError(f"cannot read {path}: {_reason(error)}, expected the file that torch wrote. {advice}")


def _reason(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, FileNotFoundError):
        return "it is missing"
    if isinstance(error, EOFError) or "central directory" in text or getattr(error, "errno", None) == errno.EINVAL:
        return "it is truncated"  # EINVAL: torch looks for a position before the start of a short file
    if isinstance(error, OSError):
        return error.strerror or text
    if isinstance(error, pickle.UnpicklingError) or "Weights only load" in text:  # torch's advice is for other files
        return "its bytes are corrupt"
    return f"its bytes are corrupt ({type(error).__name__}: {shortened(text)})"


@contextmanager
def _without_mesh_warnings() -> Iterator[None]:
    """Silence what torch logs for each DTensor that is read without the process groups that wrote it."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _load(file: Path | IO[bytes], **options: Any) -> Any:
    if not isinstance(file, Path):
        file.seek(0)
    return torch.load(file, map_location="cpu", **options)
