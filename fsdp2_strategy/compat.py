"""Argument names of other systems -> ours, as plain dicts for ``config``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

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
