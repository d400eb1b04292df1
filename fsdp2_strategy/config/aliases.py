"""Argument names of other systems -> ours, and files of settings -> plain dicts, for `strategy_config`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from fsdp2_strategy.errors import ConfigError

# What trainers call it -> the field of StrategyConfig.
FOREIGN_NAMES = {
    "fsdp_cpu_offload": "cpu_offload",
}


def known_values(args: object, fields: Collection[str]) -> dict[str, Any]:
    """Pick from a trainer's namespace or mapping what is ours; the rest is left alone.

    ``None`` counts as not given: it is what argparse stores for an option that the user left out. Our own name beats
    a foreign one for the same field.

    Raises:
        ConfigError: ``args`` is neither.
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
    """Return the mapping at the top level of a YAML file, or of a JSON file by its suffix; an empty file holds none.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    kind, parse = ("JSON", json.loads) if str(path).endswith(".json") else ("YAML", yaml.safe_load)
    try:
        content = parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration: {path}: {error.strerror}. Check the path.") from error
    except (yaml.YAMLError, ValueError) as error:  # the last is JSON's, and that of bytes that are no text
        raise ConfigError(f"cannot read the configuration: {path} is no {kind}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"cannot read the configuration: {path} holds a {type(content).__name__}, expected a mapping. "
            "Write one 'field: value' a line."
        )
    return content
