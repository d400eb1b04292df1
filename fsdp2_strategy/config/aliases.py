"""Read settings from a trainer's namespace or a file, as fields of `StrategyConfig`.

Input: a namespace, a mapping or a YAML or JSON file. Output: a plain dict, for `strategy_config`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from fsdp2_strategy.config.text_values import number_of
from fsdp2_strategy.errors import ConfigError

_ALIASES = {
    "fsdp_cpu_offload": "cpu_offload",
    "max_grad_norm": "max_norm",
    "sp_size": "sequence_parallel_size",
    "ulysses_sequence_parallel_size": "sequence_parallel_size",
    "tp_size": "tensor_parallel_size",
    "tensor_model_parallel_size": "tensor_parallel_size",
    "ep_size": "expert_parallel_size",
    "expert_model_parallel_size": "expert_parallel_size",
}
"""Other names of fields."""

_SIZE_ONE: tuple[object, ...] = (None, 0, 1)
PARALLEL_SIZES = ("sequence_parallel_size", "tensor_parallel_size", "expert_parallel_size")
_NOT_GIVEN: dict[str, tuple[object, ...]] = dict.fromkeys(PARALLEL_SIZES, _SIZE_ONE)
"""Values in trainers' arguments that mean the default, besides None: trainers have several names of one size."""

_ONE_VALUE = ("max_norm", *PARALLEL_SIZES)
"""Fields whose names must not contradict each other."""

_NUMBERS = {*_ONE_VALUE, *(alias for alias, name in _ALIASES.items() if name in _ONE_VALUE)}
"""Names whose values are compared as numbers."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "ring_attn_size": _SIZE_ONE,
    "cp_size": _SIZE_ONE,
    "context_parallel_size": _SIZE_ONE,
    "ds_tensor_parallel_size": _SIZE_ONE,
    "pp_size": _SIZE_ONE,
    "pipeline_parallel_size": _SIZE_ONE,
    "pipeline_model_parallel_size": _SIZE_ONE,
    "grad_accum_dtype": (None, "fp32", "float32"),
}
"""Names in trainers' arguments that request a capability that this package lacks, and the values that do not."""


def split_arguments(args: object, fields: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a trainer's namespace or mapping into the values of ``fields`` and all other values.

    A field whose value is None is omitted, because argparse stores None for an option that is not given. So is a
    ``sequence_parallel_size``, ``tensor_parallel_size`` or ``expert_parallel_size`` of 0.

    Raises:
        ConfigError: ``args`` is neither a namespace nor a mapping; two names of one field have different values; or a
            name requests a capability that this package lacks.
    """
    if not isinstance(args, Mapping) and not hasattr(args, "__dict__"):
        raise ConfigError(
            f"cannot configure: args is a {type(args).__name__}, expected a namespace, a mapping or a StrategyConfig. "
            "Pass the result of argparse."
        )
    given = dict(args if isinstance(args, Mapping) else vars(args))
    for name, neutral in _NEUTRAL.items():
        if number_of(given.get(name)) not in neutral:
            raise ConfigError(
                f"cannot configure: {name} is {given[name]!r}, expected {' or '.join(map(repr, neutral))}, because "
                "this package does not have this capability. Remove the option."
            )
    resolved = resolve_aliases(given)
    known = {name: value for name, value in resolved.items() if name in fields and not _is_default(name, value)}
    return known, {name: value for name, value in given.items() if name not in fields}


def resolve_aliases(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping in which other names of fields are replaced by the fields' own names.

    ``cpu_offload`` takes precedence over ``fsdp_cpu_offload``. A parallel size of None, 0 or 1 gives way to another
    name's size.

    Raises:
        ConfigError: two names of ``max_norm`` or of one parallel size are given, with different values.
    """
    resolved = {name: number_of(value) if name in _NUMBERS else value for name, value in given.items()}
    for alias, name in _ALIASES.items():
        value = resolved.pop(alias, None)
        own = resolved.get(name)
        if _is_default(name, value) or own == value:
            continue
        if _is_default(name, own):
            resolved[name] = value
        elif name in _ONE_VALUE:
            raise ConfigError(
                f"cannot configure: {name} is {own!r} and {alias} is {value!r}, expected one value. Set only {name}."
            )
    return resolved


def _is_default(name: str, value: object) -> bool:
    return value is None or value in _NOT_GIVEN.get(name, ())


def read_mapping(path: str | Path) -> Mapping[str, Any]:
    """Return the top-level mapping of a YAML file, or of a JSON file if the path ends in ``.json``.

    An empty YAML file is read as an empty mapping.

    Raises:
        ConfigError: the file cannot be read, or its top level is not a mapping.
    """
    kind, parse = ("JSON", json.loads) if str(path).endswith(".json") else ("YAML", yaml.safe_load)
    try:
        content = parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration: {path}: {error.strerror}. Check the path.") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: invalid JSON, or not UTF-8
        raise ConfigError(f"cannot read the configuration: {path} is not {kind}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"cannot read the configuration: {path} contains a {type(content).__name__}, expected a mapping. "
            "Write each field as 'field: value' on its own line."
        )
    return content
