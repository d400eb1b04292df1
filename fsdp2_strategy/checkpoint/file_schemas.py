"""Define the schema and the size limit of each JSON file of a checkpoint, and read a file according to both.

Input: the path or the content of a file. Output: its value, or a `DamageError`. Keys that this version does not know
may have any value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp2_strategy.checkpoint.paths import is_model_name
from fsdp2_strategy.errors import shown
from fsdp2_strategy.storage.checksum_manifests import damage
from fsdp2_strategy.storage.file_reads import read_file
from fsdp2_strategy.storage.schema import (
    InvalidError,
    Schema,
    file_name,
    flag,
    hexadecimal,
    integer,
    json_object,
    list_of,
    mapping,
    number,
    optional,
    parse_json,
    record,
    tensor_name,
    text,
)

MANIFEST_BYTES = 256 << 20
"""Maximum size of a manifest: 4,096 ranks have about 12,000 files, which take 2 MB."""
STATE_BYTES = 1 << 30
"""Maximum size of a ``trainer_state.json``."""
RANK_FILE_BYTES = 16 << 30
"""Maximum size of a rank's file with the state of its data loader."""

MAX_SEQUENCE = 1 << 62
"""Maximum sequence number of a checkpoint."""


def _model_name(value: Any) -> None:
    if not is_model_name(value) or len(value) > 255 or not value.isprintable():
        raise InvalidError(f"is {shown(value)}, expected the name of a model")


_ranks = integer(1, 1 << 32)
MANIFEST = record(
    {
        "sequence": integer(0, MAX_SEQUENCE),
        "tag": text(),
        "step": integer(),
        "protected": flag,
        "metric": optional(number),
        "higher_is_better": flag,
        "files": mapping(file_name, integer()),
        "checksums": mapping(file_name, hexadecimal, is_empty_allowed=False),
    },
    {
        "shard_size": _ranks,
        "models": mapping(_model_name, record({}, {"step": integer(), "shard_size": _ranks}), is_empty_allowed=False),
    },
)

_fingerprint = record({"dtype": text(), "exact": hexadecimal, "as_bfloat16": hexadecimal})
_of_model: Mapping[str, Schema] = {
    "step": integer(),
    "scheduler": optional(json_object),
    "optimizer": optional(
        record(
            {
                "class": text(),
                "settings": list_of(json_object),
                "of_parameter": mapping(tensor_name, integer()),
                "values": mapping(tensor_name, json_object),
            }
        )
    ),
}
_may_be_missing: Mapping[str, Schema] = {
    "loss_scale": optional(json_object),
    "left_out": optional(
        record(
            {"weights": mapping(tensor_name, _fingerprint), "folders": mapping(tensor_name, text(4096))},
            {"elements": integer(1, 1 << 24)},
        )
    ),
}
_of_run: Mapping[str, Schema] = {
    "step": integer(),
    "seed": integer(-(1 << 63), 1 << 64),
    "world_size": _ranks,
    "client_state": json_object,
}
_of_run_only: Mapping[str, Schema] = {
    "data": optional(record({}, {"state": json_object, "ranks": _ranks})),
    "versions": optional(mapping(text(), text())),
}

STATE_OF_RUN = record(_of_run, _of_run_only)
"""The ``trainer_state.json`` of a checkpoint of several models."""
STATE_OF_MODEL = record(_of_model, _may_be_missing)
"""The ``trainer_state.json`` of one of several models."""
STATE_OF_ONLY_MODEL = record({**_of_run, **_of_model}, {**_of_run_only, **_may_be_missing})
"""The ``trainer_state.json`` of a checkpoint of one model."""


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """Read a file of a checkpoint, or raise a `DamageError`; symbolic links are not followed."""
    try:
        return read_file(path, max_bytes)
    except OSError as error:
        raise damage(path, error.strerror or str(error)) from error
    except MemoryError as error:
        raise damage(path, "it does not fit into memory") from error


def parse_state(content: bytes, path: Path, schema: Schema) -> dict[str, Any]:
    """Return the value of the ``trainer_state.json`` at ``path``, or raise a `DamageError`."""
    try:
        state: dict[str, Any] = parse_json(content, schema)
        _check_optimizer(state.get("optimizer"))
        _check_data(state)
    except InvalidError as error:
        raise damage(path, f"its content is invalid: {error}") from error
    return state


def _check_optimizer(hyper: Mapping[str, Any] | None) -> None:
    if hyper is None:
        return
    settings = hyper["settings"]
    if any(index >= len(settings) for index in hyper["of_parameter"].values()):
        raise InvalidError(f"has parameters whose settings are not among the {len(settings)} in the list")
    if any("params" in group for group in settings):
        raise InvalidError("has settings with the key 'params', expected only hyper-parameters")


def _check_data(state: Mapping[str, Any]) -> None:
    data = state.get("data")
    if data is None:
        return
    if ("state" in data) == ("ranks" in data):
        raise InvalidError("has a data position that is neither one state for all ranks, nor one per rank")
    if "ranks" in data and state["world_size"] % data["ranks"]:
        raise InvalidError(f"has data positions of {data['ranks']} ranks, which do not divide the number of ranks")
