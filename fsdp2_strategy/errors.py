"""The exceptions of this package.

    FSDP2StrategyError
    ├── ConfigError      (ValueError)    a field, argument or file of the configuration
    │   ├── ArgumentError  (TypeError)   an argument that does not exist, or is of the wrong kind
    │   └── MissingPackageError  (ImportError)   an optional package that is not installed
    ├── MeshError        (ValueError)    process group, device mesh, shard sizes
    ├── ShardError       (ValueError)    which modules become units, and how
    ├── OptimizerError   (ValueError)    parameter groups, schedules
    ├── DataError        (ValueError)    data order, data positions, access to data sets
    │   └── CorruptDataError             files of a data set that cannot be parsed or decoded
    ├── StepError        (RuntimeError)  training steps, ranks that run different units
    ├── OffloadError     (RuntimeError)  offloaded models and optimizers that are needed on the device
    ├── CheckpointError  (RuntimeError)  saving, finding and loading checkpoints
    │   └── DamageError                  corrupt checkpoint files
    ├── RolloutError     (RuntimeError)  inference engines, and the transfer of weights to them
    └── LogProbError     (ValueError)    log-probabilities that cannot be computed in chunks

Each message names the operation that failed, the actual value, the expected value and a fix. If one rank fails inside
`all_or_none`, which most collective functions use, every rank raises an error that names the failing rank.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sequence


class FSDP2StrategyError(Exception):
    """Base class of every error that this package raises on purpose."""

    is_agreed = False
    """Whether every rank raises this error at the same point."""


class ConfigError(FSDP2StrategyError, ValueError):
    """A configuration value that cannot be used."""


class ArgumentError(ConfigError, TypeError):
    """An argument that a function does not have, or that is of the wrong kind."""


class MissingPackageError(ConfigError, ImportError):
    """An optional package that is not installed; the message has the command that installs it."""


class MeshError(FSDP2StrategyError, ValueError):
    """A process group or device mesh that cannot be built or used."""


class ShardError(FSDP2StrategyError, ValueError):
    """A model that cannot be sharded with the given options."""


class OptimizerError(FSDP2StrategyError, ValueError):
    """An optimizer or schedule that cannot be built or used with the given options."""


class DataError(FSDP2StrategyError, ValueError):
    """A data order that cannot be made, a data position that cannot be loaded, or samples that cannot be read."""


class CorruptDataError(DataError):
    """A file of a data set whose content cannot be parsed or decoded.

    Attributes:
        location: path or address of the file; empty if the content of several files is contradictory.
    """

    def __init__(self, message: str, location: str = "") -> None:
        super().__init__(message)
        self.location = location


class StepError(FSDP2StrategyError, RuntimeError):
    """A training step that cannot be run, or ranks that run different units."""


class OffloadError(FSDP2StrategyError, RuntimeError):
    """A model or optimizer that is needed on the device but is offloaded, or that cannot be offloaded."""


class CheckpointError(FSDP2StrategyError, RuntimeError):
    """A checkpoint that cannot be saved, found or loaded."""


class DamageError(CheckpointError):
    """A checkpoint whose files are corrupt."""


class RolloutError(FSDP2StrategyError, RuntimeError):
    """Weights that cannot be transferred to an inference engine, or a request that an engine cannot serve."""


class SequenceError(FSDP2StrategyError, ValueError):
    """Sequences cannot be split over ranks: the model, the batch, or their arguments do not allow it."""


class LogProbError(FSDP2StrategyError, ValueError):
    """A model or an argument for which log-probabilities cannot be computed."""


def counted(count: int, what: str, plural: str = "s") -> str:
    """Return a number with a noun in singular or plural."""
    return f"{count:,} {what if count == 1 else what + plural}"


def dtype_text(dtype: object) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def size_text(size_bytes: float) -> str:
    """Return a number of bytes with a unit, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:  # rounds to three digits
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.4g} TB"


def some(names: Sequence[str], what: str = "name") -> str:
    """Return a text with the number of names and the first three names."""
    listed = f"{', '.join(map(shortened, names[:3]))}{', …' if len(names) > 3 else ''}"
    return f"{counted(len(names), what)} ({listed})" if names else f"no {what}"


def shortened(text: str, limit: int = 200) -> str:
    """Return a text of at most ``limit`` characters: the middle of a longer one is left out."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} … {text[3 - half :]}"


def shown(value: object, limit: int = 80) -> str:
    """Return the ``repr`` of a value from a file for a message, shortened to about ``limit`` characters.

    A long or deeply nested value is not formatted in full.
    """
    return shortened(_REPR.repr(value), limit)


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 70, 70, 40


def did_you_mean(name: str, known: Iterable[str], *, least_similarity: float = 0.6) -> str:
    """Return `` Did you mean 'x'?`` for the known name most similar to ``name``, or "" if none is similar."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=least_similarity)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
