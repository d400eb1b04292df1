"""Options of the examples: help with defaults, options from a YAML file, and the sharding plan of a configuration.

Input: a command line. Output: its options, or the text of `fsdp2_strategy.explain`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from torch import nn

from fsdp2_strategy import StrategyConfig, explain

T = TypeVar("T")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keep the line breaks of descriptions, and append the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        has_default = action.default not in (None, False, argparse.SUPPRESS) and action.option_strings
        return f"{action.help}{' (default: %(default)s)' * bool(has_default)}"


def make_parser(description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)


def parse(
    parser: argparse.ArgumentParser, command_line: Iterable[str] | None = None, also: type | None = None
) -> argparse.Namespace:
    """Parse a command line whose options may also be in the YAML file of ``--config``; the command line wins.

    A key of the file is the name of an option without the dashes at its start, or a field of the dataclass ``also``.
    """
    more = "" if also is None else f", and of fields of {also.__name__}"
    parser.add_argument("--config", type=Path, help=f"YAML file with values of options, by name without '--'{more}")
    line = None if command_line is None else list(command_line)
    path = parser.parse_known_args(line)[0].config
    if path is not None:
        options = {} if also is None else {field.name: field.name for field in dataclasses.fields(also)}
        options |= {
            name.removeprefix("--"): action.dest for action in parser._actions for name in action.option_strings
        }
        values = yaml.safe_load(path.read_text())
        if unknown := sorted(set(values) - set(options)):
            parser.error(f"{path} contains {', '.join(unknown)}, expected names of options{more}; see --help.")
        parser.set_defaults(**{options[name]: value for name, value in values.items()})
    return parser.parse_args(line)


def read_settings(path: Path, sections: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read a YAML file that has exactly these sections, each a mapping."""
    settings = yaml.safe_load(path.read_text())
    if set(settings) != set(sections):
        raise SystemExit(f"cannot read {path}: its sections are {sorted(settings)}, expected {sorted(sections)}.")
    return settings


def from_mapping(cls: type[T], values: Mapping[str, Any], path: Path) -> T:
    """Make a dataclass from a section of a YAML file; an unknown key is an error."""
    fields = [field.name for field in dataclasses.fields(cls)]
    if unknown := sorted(set(values) - set(fields)):
        raise SystemExit(f"cannot read {path}: it contains {', '.join(unknown)}, expected {', '.join(fields)}.")
    return cls(**values)


def print_plan(model: nn.Module, config: StrategyConfig, world_size: int) -> str:
    """Print how a configuration shards a model over this many ranks, and what each holds; needs none of them."""
    return explain(model, config, is_training=True, world_size=world_size)
