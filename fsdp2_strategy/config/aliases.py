"""Read settings from a trainer's namespace or a file, as fields of `StrategyConfig`.

Input: a namespace, a mapping or a YAML or JSON file. Output: a plain dict, for `strategy_config`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from fsdp2_strategy.errors import ConfigError


def known_values(args: object, fields: Collection[str]) -> dict[str, Any]:
    """Return the values in a trainer's namespace or mapping that belong to ``fields``; ignore all other names.

    A value of ``None`` is ignored, because argparse stores ``None`` for an option that is not given.
    ``fsdp_cpu_offload`` is another name for ``cpu_offload``; if both are given, ``cpu_offload`` takes precedence.

    Raises:
        ConfigError: ``args`` is neither a namespace nor a mapping.
    """
    if not isinstance(args, Mapping) and not hasattr(args, "__dict__"):
        raise ConfigError(
            f"cannot configure: args is a {type(args).__name__}, expected a namespace, a mapping or a StrategyConfig. "
            "Pass the result of argparse."
        )
    given = args if isinstance(args, Mapping) else vars(args)
    values = {"cpu_offload": given.get("fsdp_cpu_offload")}
    values |= {name: given[name] for name in fields if given.get(name) is not None}
    return {name: value for name, value in values.items() if value is not None}


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
        raise ConfigError(f"cannot read the configuration: {path}: {error.strerror}. Check the path.") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: invalid JSON, or not UTF-8
        raise ConfigError(f"cannot read the configuration: {path} is not {kind}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"cannot read the configuration: {path} contains a {type(content).__name__}, expected a mapping. "
            "Write each field as 'field: value' on its own line."
        )
    return content
