"""Everything this package raises on purpose, one small tree.

    FSDP2StrategyError
    ├── ConfigError      (ValueError)    a field, argument or file of the configuration
    ├── MeshError        (ValueError)    process group, device mesh, shard sizes
    ├── ShardError       (ValueError)    which modules become units, and how
    ├── OptimizerError   (ValueError)    parameter groups, schedules
    ├── DataError        (ValueError)    the order of samples, how far a loader is in it, and where samples come from
    │   └── CorruptDataError             files of a data set that cannot be parsed or decoded
    ├── StepError        (RuntimeError)  backward and optimizer steps
    ├── OffloadError     (RuntimeError)  what is in host memory while it is needed on the device
    ├── CheckpointError  (RuntimeError)  saving, finding and loading checkpoints
    │   └── DamageError                  files that are not what was written
    ├── RolloutError     (RuntimeError)  weights on their way to an inference engine, and the engine
    └── LogProbError     (ValueError)    log-probabilities that cannot be computed in chunks

Each message says what cannot be done, what the subject is, what it should be, and what to do. An error that one
rank alone meets inside a collective call is raised on every rank, naming that rank.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class FSDP2StrategyError(Exception):
    """Base class of every error that this package raises on purpose."""

    is_agreed = False
    """Whether every rank raises it at this point."""


class ConfigError(FSDP2StrategyError, ValueError):
    """A configuration value that cannot be used."""


class MeshError(FSDP2StrategyError, ValueError):
    """A process group or device mesh that cannot be built."""


class ShardError(FSDP2StrategyError, ValueError):
    """A model that cannot be sharded as asked."""


class OptimizerError(FSDP2StrategyError, ValueError):
    """An optimizer or schedule that cannot be built as asked."""


class DataError(FSDP2StrategyError, ValueError):
    """An order of samples that cannot be made, a loader that cannot go on in it, or samples that cannot be had."""


class CorruptDataError(DataError):
    """A file of a data set whose content cannot be parsed or decoded.

    Attributes:
        location: where the file is; empty where several are at odds.
    """

    def __init__(self, message: str, location: str = "") -> None:
        super().__init__(message)
        self.location = location


class StepError(FSDP2StrategyError, RuntimeError):
    """A backward pass or optimizer step that cannot be taken."""


class OffloadError(FSDP2StrategyError, RuntimeError):
    """A model or optimizer that is in host memory while it is needed on the device, or cannot go there."""


class CheckpointError(FSDP2StrategyError, RuntimeError):
    """A checkpoint that cannot be saved, found or loaded."""


class DamageError(CheckpointError):
    """A checkpoint whose files are not what was written."""


class RolloutError(FSDP2StrategyError, RuntimeError):
    """Weights that cannot reach an inference engine, or an engine that cannot do what it is asked to."""


class LogProbError(FSDP2StrategyError, ValueError):
    """A model or an argument of which no log-probabilities can be computed."""


def some(names: Sequence[str], what: str = "name") -> str:
    """Return how many names there are, and the first of them."""
    shown = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
    return f"{len(names)} {what}s ({shown})" if names else f"no {what}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the known name nearest to ``name``, or nothing."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
