"""Translate accelerate's configuration file to fields of StrategyConfig.

Input: the YAML or JSON file that ``accelerate config`` writes and ``accelerate launch --config_file`` reads. Output:
fields as a plain dict, for `strategy_config`, and one log record about settings that work differently here.

`key_table` defines the meaning of each single key; this module derives the fields that depend on several keys.
accelerate reads ``fsdp_config`` and ``parallelism_config`` only if ``distributed_type`` is FSDP, and the options of
torch.compile only if ``dynamo_backend`` is set. This module ignores these keys in the same cases.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp2_strategy.config.aliases import read_mapping
from fsdp2_strategy.distributed.accelerator import accelerator_type
from fsdp2_strategy.distributed.log import log, show_log
from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.integrations.accelerate import key_table as table

_DEFAULT_MIN_UNIT_PARAMS = 100_000_000  # the launcher's default


def fields_of(path: str | Path) -> dict[str, Any]:
    """Return the fields of StrategyConfig that accelerate's file sets; log on rank 0 what differs from accelerate."""
    try:
        settings = {name: value for name, value in _flatten(read_mapping(path)).items() if value is not None}
        ignored = _ignored(settings)
        used = {name: _read(name, value) for name, value in settings.items() if name not in ignored}
        if used.get("use_cpu") and (device := accelerator_type()):
            raise _InvalidError(
                f"use_cpu is True, but there is an accelerator ({device}), expected False. {table.KEYS['use_cpu'].fix}"
            )
        fields = {key.sets: used[name] for name, key in table.KEYS.items() if key.sets and name in used}
        precision = used.get("mixed_precision", "FP16" if used.get("fp16") else "NO")
        backend = used.get("dynamo_backend", "NO")
        fields |= {"bf16": precision == "BF16", "fp16": precision == "FP16"}
        fields |= {"compile_blocks": {"NO": False, "INDUCTOR": True}.get(backend, backend.lower())}
        fields |= _sharding(used) | _units(used)
    except _InvalidError as error:
        raise ConfigError(f"cannot configure from {path}: {error}") from None
    _log_differences(path, used, ignored)
    return fields


class _InvalidError(Exception):
    """An invalid setting; the message contains the key, the value, the expected values and a fix, but not the path."""


def _flatten(content: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the nested mappings into one dict with full keys; raise if an unsupported key is set."""
    flat: dict[str, Any] = {}
    unsupported = []
    for name, value in content.items():
        prefix, known = table.SECTIONS.get(name, ("", table.TOP))
        section = value or {} if name in table.SECTIONS else {name: value}
        if not isinstance(section, Mapping):
            raise _InvalidError(
                f"{name} is {value!r}, expected a mapping. Write each key as 'key: value' on its own line."
            )
        for given_key, setting in section.items():
            key = str(given_key)
            full_key = key if key.startswith(prefix) else prefix + key
            if setting is None:
                continue  # accelerate writes unset options as null
            if full_key in known:
                flat[full_key] = setting
            elif name in table.SECTIONS or full_key in table.KEYS or not table.is_off(setting):
                unsupported.append(
                    f"{key} is {setting!r}, which is not supported: leave it out.{table.hint_for(full_key)}"
                )
    if unsupported:
        raise _InvalidError(f"{' '.join(unsupported)} docs/coming_from_accelerate.md lists the supported keys.")
    return flat


def _read(name: str, value: object) -> Any:
    key = table.KEYS[name]
    try:
        return key.read(value)
    except table.UnreadableError as error:
        fix = key.text if key.kind == "refused" else key.fix or "Correct the value, or remove the key."
        raise _InvalidError(f"{name} is {value!r}, expected {error}. {fix}") from None


def _ignored(settings: Mapping[str, Any]) -> set[str]:
    """Return the keys of ``settings`` that accelerate ignores."""
    if "distributed_type" not in settings:
        raise _InvalidError(
            "distributed_type is missing, expected a value, which accelerate requires. Add distributed_type: FSDP."
        )
    without_effect: set[str] = set()
    if _read("distributed_type", settings["distributed_type"]) != "FSDP":
        without_effect |= {*table.FSDP, *table.PARALLELISM}
    if _read("dynamo_backend", settings.get("dynamo_backend", "NO")) == "NO":
        without_effect |= {*table.DYNAMO}
    return without_effect & {*settings}


def _sharding(used: Mapping[str, Any]) -> dict[str, Any]:
    if used["distributed_type"] != "FSDP":
        return {"shard_size": 1, "reshard_after_forward": False}
    fsdp1_strategy = None if _is_strategy_ignored(used) else used.get("fsdp_sharding_strategy")
    reshard = used.get("fsdp_reshard_after_forward", fsdp1_strategy or True)
    strategy = reshard if isinstance(reshard, str) else fsdp1_strategy
    if fsdp1_strategy not in (None, strategy):
        raise _InvalidError(
            f"fsdp_reshard_after_forward is {reshard} and fsdp_sharding_strategy is {fsdp1_strategy}, expected one "
            "strategy. Leave one of them out."
        )
    reshards = reshard if isinstance(reshard, bool) else reshard in ("FULL_SHARD", "HYBRID_SHARD")
    sharding = {"shard_size": _shard_size(used, strategy), "reshard_after_forward": reshards}
    return sharding | {"sequence_parallel_size": _sequence_parallel_size(used)}


def _is_strategy_ignored(used: Mapping[str, Any]) -> bool:
    """Return whether ``fsdp_sharding_strategy`` is a leftover of version 1, which accelerate ignores in version 2."""
    return used.get("fsdp_version") == "2" and "fsdp_sharding_strategy" in used


def _sequence_parallel_size(used: Mapping[str, Any]) -> int:
    sizes = {axis: int(used.get(f"parallelism_config_{axis}_size", 1)) for axis in ("sp", "cp")}
    if min(sizes.values()) > 1:
        raise _InvalidError(
            f"parallelism_config_sp_size is {sizes['sp']} and parallelism_config_cp_size is {sizes['cp']}, expected 1 "
            "for one of them, because both split sequences. Multiply them, and set only parallelism_config_sp_size."
        )
    return max(sizes.values())


def _shard_size(used: Mapping[str, Any], strategy: str | None) -> int:
    # accelerate, too, splits parameters over the ranks that share sequences.
    size = used.get("parallelism_config_dp_shard_size", 1) * _sequence_parallel_size(used)
    replicas = used.get("parallelism_config_dp_replicate_size", 1)
    if size > 1:
        return int(size)
    if replicas > 1:
        raise _InvalidError(
            f"parallelism_config_dp_replicate_size is {replicas} and parallelism_config_dp_shard_size is {size}, "
            "expected a shard size of more than 1. Increase it, or use distributed_type: MULTI_GPU to replicate the "
            "model on every rank."
        )
    if strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2"):
        return _ranks_of_a_machine(used)
    return 1 if strategy == "NO_SHARD" else -1


def _ranks_of_a_machine(used: Mapping[str, Any]) -> int:
    machines, processes = used.get("num_machines", 1), used.get("num_processes", -1)
    if machines == 1:
        return -1
    if processes < 1 or processes % machines:
        raise _InvalidError(
            f"num_processes is {used.get('num_processes', 'missing')} on {machines} machines, expected a multiple of "
            "the number of machines, because HYBRID_SHARD shards over the ranks of one machine. Set num_processes, or "
            "parallelism_config_dp_shard_size."
        )
    layers = int(used.get("parallelism_config_tp_size", 1))
    if (processes // machines) % layers:
        raise _InvalidError(
            f"parallelism_config_tp_size is {layers}, and there are {processes // machines} processes on a machine, "
            "expected a divisor of this number, because HYBRID_SHARD shards over the ranks of one machine. Change "
            "parallelism_config_tp_size."
        )
    return int(processes // machines // layers)


def _units(used: Mapping[str, Any]) -> dict[str, Any]:
    policy = used.get("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    if policy == "SIZE_BASED_WRAP":
        return {"min_unit_params": used.get("fsdp_min_num_params", _DEFAULT_MIN_UNIT_PARAMS) or None}
    named = used.get("fsdp_transformer_layer_cls_to_wrap", ())
    return {"block_class_names": named if policy == "TRANSFORMER_BASED_WRAP" else ()}


def _log_differences(path: str | Path, used: Mapping[str, Any], ignored: set[str]) -> None:
    """Log in one record which settings have another name or effect here, and which keys are ignored without FSDP.

    The level is WARNING if the effect of a setting is not the requested one, or if a key is ignored.
    """
    warnings = [name for name, value in used.items() if value in table.KEYS[name].warning_values]
    logged = [name for name, value in used.items() if name in warnings or value in table.KEYS[name].info_values]
    lines = [f"{name} ({used[name]}): {table.KEYS[name].text}" for name in logged]
    if _is_strategy_ignored(used):
        name = "fsdp_sharding_strategy"
        lines[logged.index(name)] = (
            f"{name} ({used[name]}): ignored as by accelerate, because fsdp_version is 2; `fsdp_reshard_after_forward` "
            "and `parallelism_config` set the sharding. Leave it out, or set distributed_type: MULTI_GPU to replicate "
            "the model"
        )
        warnings += [name] if used[name] != "FULL_SHARD" else []
    if without_fsdp := sorted(ignored & {*table.FSDP, *table.PARALLELISM}):
        warnings += without_fsdp
        reason = f"distributed_type is {used['distributed_type']}, not FSDP"
        lines.append(f"{', '.join(without_fsdp)}: ignored, because {reason}")
    if lines:
        show_log()
        level = logging.WARNING if warnings else logging.INFO
        log("settings of %s and their replacements:\n  %s", path, "\n  ".join(lines), level=level)
