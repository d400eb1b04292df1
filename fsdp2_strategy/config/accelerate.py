"""Translate accelerate's configuration file to fields of StrategyConfig.

Input: the YAML or JSON file that ``accelerate config`` writes and ``accelerate launch --config_file`` reads. Output:
fields as a plain dict, for `strategy_config`, and one log record about settings that work differently here.

`accelerate_keys` defines the meaning of each single key; this module derives the fields that depend on several keys.
accelerate reads ``fsdp_config`` and ``parallelism_config`` only if its distributed type is FSDP, and the options of
torch.compile only if there is a backend. Keys that accelerate ignores are ignored here, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fsdp2_strategy.config.accelerate_keys import DYNAMO, FSDP, KEYS, PARALLELISM, SECTIONS, TOP, UnreadableError, where
from fsdp2_strategy.config.aliases import read_mapping
from fsdp2_strategy.distributed.log import log, show_log
from fsdp2_strategy.errors import ConfigError

_LEAST_OF_A_SIZE_BASED_UNIT = 100_000_000  # the launcher's default


def fields_of(path: str | Path) -> dict[str, Any]:
    """Return the fields of StrategyConfig that accelerate's file sets; log on rank 0 what works differently here.

    Raises:
        ConfigError: the file is missing or malformed, a key is unknown, or a value is invalid or not supported.
    """
    given = read_mapping(path)
    try:
        values = {name: _read(name, value) for name, value in _flat(given).items() if value is not None}
        unseen = _unseen(values)
        seen = {name: value for name, value in values.items() if name not in unseen}
        _refuse(seen)
        fields = {key.sets: seen[name] for name, key in KEYS.items() if key.sets and name in seen}
        fields |= _precision(seen) | _sharding(seen) | _units(seen) | _compilation(seen)
    except _WrongError as error:
        raise ConfigError(f"cannot configure from {path}: {error}") from error
    _report(path, seen, unseen)
    return fields


class _WrongError(Exception):
    """An invalid setting; the message contains the key, the value, the expected values and a fix, but not the path."""


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of the file by full key, including those of nested mappings; raise if a key is unknown."""
    flat: dict[str, Any] = {}
    unknown = []
    for name, value in given.items():
        prefix, known = SECTIONS.get(name, ("", TOP))
        inner = value or {} if name in SECTIONS else {name: value}
        if not isinstance(inner, Mapping):
            raise _WrongError(f"{name} is {value!r}, expected a mapping. Write one 'key: value' a line below it.")
        for given_key, one in inner.items():
            key = str(given_key)
            whole_name = key if key.startswith(prefix) else prefix + key
            if whole_name in known:
                flat[whole_name] = one
            else:
                unknown.append(f"{key!r}.{where(whole_name)}")
    if unknown:
        raise _WrongError(
            "it has unknown keys, expected those of accelerate, as docs/coming_from_accelerate.md lists them. Correct "
            f"or remove {' '.join(unknown)}"
        )
    return flat


def _read(name: str, value: object) -> Any:
    try:
        return KEYS[name].read(value)
    except UnreadableError as error:
        raise _WrongError(f"{name} is {value!r}, expected {error}. Write one of these, or leave it out.") from error


def _unseen(values: Mapping[str, Any]) -> set[str]:
    """Return the given keys that accelerate ignores."""
    if "distributed_type" not in values:
        raise _WrongError("distributed_type is missing, expected it, as accelerate does. Write distributed_type: FSDP.")
    idle = {*FSDP, *PARALLELISM} if values["distributed_type"] != "FSDP" else set()
    if values.get("dynamo_backend", "NO") == "NO":
        idle |= {*DYNAMO}
    return idle & {*values}


def _refuse(seen: Mapping[str, Any]) -> None:
    for name, value in seen.items():
        key = KEYS[name]
        if key.only is not None and value not in key.only:
            can_be_had = [str(one) for one in key.only if one is not None]
            expected = f"one of {', '.join(can_be_had)}" if can_be_had else "nothing"
            raise _WrongError(f"{name} is {value!r}, expected {expected}. {key.way_out or key.says}")
    if seen.get("use_cpu") and torch.cuda.is_available():
        raise _WrongError(f"use_cpu is True, expected False beside a CUDA device. {KEYS['use_cpu'].way_out}")


def _precision(seen: Mapping[str, Any]) -> dict[str, Any]:
    wanted = seen.get("mixed_precision", "FP16" if seen.get("fp16") else "NO")
    return {"bf16": wanted == "BF16", "fp16": wanted == "FP16"}


def _sharding(seen: Mapping[str, Any]) -> dict[str, Any]:
    if seen["distributed_type"] != "FSDP":
        return {"shard_size": 1, "reshard_after_forward": False}
    of_fsdp1 = seen.get("fsdp_sharding_strategy")
    reshard = seen.get("fsdp_reshard_after_forward", of_fsdp1 or True)
    strategy = reshard if isinstance(reshard, str) else of_fsdp1
    if of_fsdp1 not in (None, strategy):
        raise _WrongError(
            f"fsdp_reshard_after_forward is {reshard} and fsdp_sharding_strategy is {of_fsdp1}, expected one strategy. "
            "Leave one of them out."
        )
    reshards = reshard if isinstance(reshard, bool) else reshard in ("FULL_SHARD", "HYBRID_SHARD")
    return {"shard_size": _shard_size(seen, strategy), "reshard_after_forward": reshards}


def _shard_size(seen: Mapping[str, Any], strategy: str | None) -> int:
    size = seen.get("parallelism_config_dp_shard_size", 1)
    replicas = seen.get("parallelism_config_dp_replicate_size", 1)
    if size > 1:
        return int(size)
    if replicas > 1:
        raise _WrongError(
            f"parallelism_config_dp_replicate_size is {replicas} and parallelism_config_dp_shard_size is {size}, "
            "expected a larger one. Write it, or distributed_type: MULTI_GPU for whole models on every rank."
        )
    if strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2"):
        return _ranks_of_a_machine(seen)
    return 1 if strategy == "NO_SHARD" else -1


def _ranks_of_a_machine(seen: Mapping[str, Any]) -> int:
    machines, processes = seen.get("num_machines", 1), seen.get("num_processes", -1)
    if machines == 1:
        return -1
    if processes < 1 or processes % machines:
        raise _WrongError(
            f"num_processes is {processes} on {machines} machines, expected a multiple: HYBRID_SHARD splits over the "
            "ranks of one machine. Write num_processes, or parallelism_config_dp_shard_size."
        )
    return int(processes // machines)


def _units(seen: Mapping[str, Any]) -> dict[str, Any]:
    policy = seen.get("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    if policy == "SIZE_BASED_WRAP":
        least = seen.get("fsdp_min_num_params", _LEAST_OF_A_SIZE_BASED_UNIT)
        return {"min_unit_params": least or None}
    named = seen.get("fsdp_transformer_layer_cls_to_wrap", ())
    return {"block_class_names": named if policy == "TRANSFORMER_BASED_WRAP" else ()}


def _compilation(seen: Mapping[str, Any]) -> dict[str, Any]:
    backend = seen.get("dynamo_backend", "NO")
    return {"compile_blocks": {"NO": False, "INDUCTOR": True}.get(backend, backend.lower())}


def _report(path: str | Path, seen: Mapping[str, Any], unseen: set[str]) -> None:
    told = {name: value for name, value in seen.items() if value in (*KEYS[name].noted, *KEYS[name].warned)}
    lines = [f"{name} ({value}): {KEYS[name].says}" for name, value in told.items()]
    level = logging.WARNING if any(value in KEYS[name].warned for name, value in told.items()) else logging.INFO
    if asleep := sorted(unseen & {*FSDP, *PARALLELISM}):
        level = logging.WARNING
        lines.append(f"{', '.join(asleep)}: nothing, for distributed_type is {seen['distributed_type']}, not FSDP")
    if lines:
        show_log()
        log("what stands for keys of %s:\n  %s", path, "\n  ".join(lines), level=level)
