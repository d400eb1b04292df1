"""The package logs by the habits of the ecosystem: a level that the program sets is kept, and prints go to stdout."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fsdp2_strategy import StrategyConfig

SCRIPT = """
import logging
{before}
from fsdp2_strategy import FSDPV2Strategy
with FSDPV2Strategy(bf16=False{arguments}) as strategy:
    strategy.print("reward", 0.5)
"""


def run(before="", arguments=""):
    """Run a program on one rank; return what it wrote to standard output and standard error."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    code = SCRIPT.format(before=before, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("before", "arguments", "shows"),
    [
        ("", "", True),
        ("", ", log_level='WARNING'", False),
        ("logging.getLogger('fsdp2_strategy').setLevel(logging.WARNING)", "", False),
        ("logging.basicConfig(level=logging.WARNING)", "", False),
        ("logging.basicConfig(level=logging.INFO)", "", True),
    ],
)
def test_the_level_is_what_the_program_says(before, arguments, shows):
    out, err = run(before, arguments)
    assert out == "reward 0.5\n"
    assert ("strategy on 1 rank: bf16 = False" in err) == shows, err


def test_changes_are_the_settings_that_differ_from_their_defaults():
    assert StrategyConfig().changes() == ""
    assert StrategyConfig(max_norm=1.0, bf16=False).changes() == "max_norm = 1.0, bf16 = False"
