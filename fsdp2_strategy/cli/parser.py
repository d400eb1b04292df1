"""Parse the arguments of ``fsdp2-strategy``, and run one command.

Input: command-line arguments. Output: what the command writes, and an exit status.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fsdp2_strategy.cli.output import Output, printable
from fsdp2_strategy.errors import FSDP2StrategyError

_PATH = "a checkpoint, or a directory of checkpoints"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of the command line; not collective.

    Args:
        arguments: the arguments after the program's name; by default those of this process.

    Returns:
        The exit status. 0: success. 1: a checkpoint is unusable, or two checkpoints differ. 2: any other error.
    """
    parsed = _parser().parse_args(arguments)
    output = Output(as_json=parsed.json, is_quiet=parsed.quiet)
    command = import_module(f"fsdp2_strategy.cli.{parsed.command.replace('-', '_')}")
    try:
        status: int = command.run(parsed, output)
        output.finish()
    except FSDP2StrategyError as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        return 2
    except OSError as error:
        text = error.strerror or str(error)
        sys.stderr.write(
            f"cannot run {parsed.command}: {error.filename}: {text}. Check the path, and its permissions.\n"
        )
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdp2-strategy",
        description="List, verify, inspect, compare, export and convert checkpoints.",
        epilog="Exit status: 0 success; 1 a checkpoint is unusable, or two checkpoints differ; 2 any other error.",
    )
    text = f"%(prog)s {version('fsdp2_strategy')}"
    parser.add_argument("--version", action="version", version=text, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = _add(commands, "ls", "list the checkpoints of a directory, oldest first, and the unusable ones")
    command.add_argument("path", type=_path, help=_PATH)
    command.add_argument("--trust", action="store_true", help="read the steps that are in other systems' pickles")
    command = _add(commands, "verify", "read every byte of a checkpoint and compare it with its checksums")
    command.add_argument("path", type=_path, help=f"{_PATH}; all checkpoints of a directory are verified")
    command = _add(
        commands, "inspect", "print a summary of a checkpoint: writer, step, sizes, optimizer, data position"
    )
    command.add_argument("path", type=_path, help=f"{_PATH}; the newest checkpoint of a directory is printed")
    command.add_argument("--tag", help="name of the checkpoint in the directory; by default the newest")
    text = "print each tensor instead, or only those whose names match, such as --tensors '*norm*'"
    command.add_argument("--trust", action="store_true", help="unpickle the files of another system's checkpoint")
    command.add_argument("--tensors", nargs="?", const="*", metavar="GLOB", help=text)
    command = _add(commands, "diff", "compare the tensors of two checkpoints, and print which differ and by how much")
    command.add_argument("a", type=_path, help=f"{_PATH}; the newest checkpoint of a directory is compared")
    command.add_argument("b", type=_path, help="the checkpoint to compare with")
    command = _add(commands, "export", "make a Hugging Face folder from a checkpoint")
    command.add_argument("path", type=_path, help=f"{_PATH}; the newest checkpoint of a directory is exported")
    command.add_argument("output", type=_path, help="the folder to write; it must not exist, or be empty")
    command.add_argument("--tag", help="name of the checkpoint in the directory; by default the newest")
    command.add_argument("--model", help="name of the model in a checkpoint of several models")
    command.add_argument(
        "--dtype",
        choices=["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"],
        help="dtype of floating-point tensors; by default that of the checkpoint",
    )
    command.add_argument("--merge-adapters", action="store_true", help="merge LoRA adapters into the weights")
    command.add_argument("--trust", action="store_true", help="unpickle files of other systems (.distcp, .pt, .bin)")
    text = (
        "folder to copy configuration and tokenizer from, by default the checkpoint; with --merge-adapters, folder of "
        "the adapters' configuration"
    )
    command.add_argument("--sidecars", type=_path, metavar="DIR", help=text)
    command = _add(commands, "convert", "make a checkpoint of this package from one of another system, without a GPU")
    text = "the checkpoint, or a directory with checkpoints, of which the newest is converted"
    command.add_argument("path", metavar="source", type=_path, help=text)
    command.add_argument("output", metavar="target", type=_path, help="the directory to create, for load_ckpt")
    command.add_argument("--tag", help="name of the checkpoint in the directory; by default the newest")
    command.add_argument("--trust", action="store_true", help="unpickle its files, which can run any code")
    text = "folder to copy configuration and tokenizer from, by default the source; its config.json names the class"
    command.add_argument("--sidecars", type=_path, metavar="DIR", help=text)
    command = _add(commands, "to-dcp", "write a checkpoint for plain torch.distributed.checkpoint, without a GPU")
    command.add_argument("path", type=_path, help=f"{_PATH}; the newest checkpoint of a directory is written")
    command.add_argument("output", type=_path, help="the folder to write; it must not exist, or be empty")
    command.add_argument("--tag", help="name of the checkpoint in the directory; by default the newest")
    return parser


def _path(text: str) -> Path:
    """Return a path of the command line; a shell does not replace ``~`` within ``--option=~/...``."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _add(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    text_of_key = "the key that must have signed the checkpoints; a file of this user with mode 0600"
    command.add_argument("--key-file", type=Path, help=text_of_key)
    command.add_argument("-q", "--quiet", action="store_true", help="print problems only, and no progress")
    command.add_argument("--json", action="store_true", help="print one JSON document")
    return command
