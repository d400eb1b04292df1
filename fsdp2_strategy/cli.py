"""Parse the command line ``fsdp2-strategy ls | verify | export``, and run its commands in one process.

Input: checkpoint directories. Output: tables, reports, Hugging Face folders.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp2_strategy.errors import FSDP2StrategyError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 for success, 1 for a corrupt checkpoint, 2 for any other error."""
    parser = argparse.ArgumentParser(prog="fsdp2-strategy", description="List, verify and export checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("ls", help="list the committed checkpoints of a directory, oldest first")
    command.add_argument("directory", type=Path)
    command = commands.add_parser("verify", help="read every byte of a checkpoint and compare it with its checksums")
    command.add_argument("checkpoint", type=Path, help="a checkpoint, or a directory with checkpoints")
    command = commands.add_parser("export", help="make a Hugging Face folder from a checkpoint")
    command.add_argument("checkpoint", type=Path)
    command.add_argument("output", type=Path)
    command.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="dtype of floating-point tensors; by default that of the checkpoint",
    )
    command.add_argument("--trust", action="store_true", help="unpickle files of other systems (.distcp, .pt, .bin)")
    command.add_argument(
        "--beside", type=Path, help="folder to copy configuration and tokenizer from, for files of other systems"
    )
    parsed = parser.parse_args(arguments)
    from fsdp2_strategy.checkpoint import cli_commands  # noqa: PLC0415  ``--help`` need not import torch

    try:
        status: int = getattr(cli_commands, parsed.command)(parsed)
    except FSDP2StrategyError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return status
