"""Read settings from a trainer's namespace or a file, and rename foreign arguments to fields of `StrategyConfig`.

Input: a namespace, a mapping or a YAML or JSON file. Output: a plain dict, for `strategy_config`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from fsdp2_strategy.errors import ConfigError

# Argument name of trainers -> field of StrategyConfig.
FOREIGN_NAMES = {
    "fsdp_cpu_offload": "cpu_offload",
}


def known_values(args: object, fields: Collection[str]) -> dict[str, Any]:
    """Return the values in a trainer's namespace or mapping that belong to ``fields``; ignore all other names.

    A value of ``None`` is ignored, because argparse stores it for an option that is not given. The name of the field
    takes precedence over a foreign name for it.

    Raises:
        ConfigError: ``args`` is neither a namespace nor a mapping.
    """
    if not isinstance(args, Mapping) and not hasattr(args, "__dict__"):
        raise ConfigError(
            f"cannot configure: args is a {type(args).__name__}, expected a namespace, a mapping or a StrategyConfig. "
            "Pass what argparse returned."
        )
    given = args if isinstance(args, Mapping) else vars(args)
    translated = {ours: given[theirs] for theirs, ours in FOREIGN_NAMES.items() if theirs in given}
    own = {name: given[name] for name in fields if name in given}
    return {name: value for name, value in {**translated, **own}.items() if value is not None}


def read_mapping(path: str | Path) -> Mapping[str, Any]:
    """Return the top-level mapping of a YAML file, or of a JSON file if it ends in ``.json``; an empty file gives {}.

    Raises:
        ConfigError: the file cannot be read, or its top level is not a mapping.
    """
    kind, parse = ("JSON", json.loads) if str(path).endswith(".json") else ("YAML", yaml.safe_load)
    try:
        content = parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration: {path}: {error.strerror}. Check the path.") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: invalid JSON, or not UTF-8
        raise ConfigError(f"cannot read the configuration: {path} is no {kind}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"cannot read the configuration: {path} holds a {type(content).__name__}, expected a mapping. "
            "Write one 'field: value' a line."
        )
    return content
