"""The command line: ``fsdp2-strategy ls | verify | export``; one process, no process group.

Input: directories of checkpoints. Output: tables, reports, Hugging Face folders.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fsdp2_strategy.checkpoint import list_checkpoints, verify_checkpoint
from fsdp2_strategy.checkpoint.foreign import export_foreign, find_foreign
from fsdp2_strategy.checkpoint.paths import TRAINABLE, WRAPPER, Places
from fsdp2_strategy.checkpoint.reader import open_checkpoint
from fsdp2_strategy.errors import CheckpointError, FSDP2StrategyError
from fsdp2_strategy.hf.container import read_header
from fsdp2_strategy.hf.copy import copy_folder

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0, 1 where a checkpoint is damaged, 2 where a command cannot be done."""
    parser = argparse.ArgumentParser(prog="fsdp2-strategy", description="Look at, check and export checkpoints.")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("ls", help="list the committed checkpoints of a directory, oldest first")
    command.add_argument("directory", type=Path)
    command.set_defaults(run=_ls)
    command = commands.add_parser("verify", help="read every byte of a checkpoint and compare it with its checksums")
    command.add_argument("checkpoint", type=Path, help="a checkpoint, or a directory: all of its checkpoints")
    command.set_defaults(run=_verify)
    command = commands.add_parser("export", help="make a Hugging Face folder from a checkpoint")
    command.add_argument("checkpoint", type=Path)
    command.add_argument("output", type=Path)
    command.add_argument(
        "--dtype", choices=list(_DTYPES), help="of the floating tensors, by default that of the checkpoint"
    )
    command.add_argument("--trust", action="store_true", help="unpickle what another system wrote (.distcp, .pt, .bin)")
    command.add_argument("--beside", type=Path, help="folder whose configuration and tokenizer go beside such weights")
    command.set_defaults(run=_export)
    parsed = parser.parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except FSDP2StrategyError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return status


def _ls(parsed: argparse.Namespace) -> int:
    for checkpoint in list_checkpoints(parsed.directory):
        places = Places.found_in(checkpoint.path)
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(places.manifest.stat().st_mtime))
        notes = [*(["protected"] if checkpoint.protected else [])]
        notes += ["trainable weights alone"] if (places.state / TRAINABLE).is_dir() else []
        notes += [f"metric {checkpoint.metric:g}"] if checkpoint.metric is not None else []
        size = f"{checkpoint.total_bytes / 1e9:.3f} GB"
        sys.stdout.write(
            f"{checkpoint.sequence:>4}  {checkpoint.tag:<24} step {checkpoint.step:<8} {size:>12}  {saved}"
            f"{'  ' + ', '.join(notes) if notes else ''}\n"
        )
    return 0


def _verify(parsed: argparse.Namespace) -> int:
    path: Path = parsed.checkpoint
    paths = [path] if Places.found_in(path).manifest.exists() else [c.path for c in list_checkpoints(path)]
    if not paths:
        raise CheckpointError(f"cannot verify {path}: it is no checkpoint, and holds none. Name another directory.")
    damaged = False
    for each in paths:
        report = verify_checkpoint(each)
        damaged |= not report.ok
        sys.stdout.write(f"{each}: {'ok' if report.ok else f'{len(report.problems)} problems'}\n")
        for problem in report.problems:
            sys.stdout.write(f"  {problem}\n")
    return int(damaged)


def _export(parsed: argparse.Namespace) -> int:
    path, dtype = parsed.checkpoint, _DTYPES.get(parsed.dtype)
    places = Places.found_in(path)
    foreign = None if places.manifest.exists() else find_foreign(path, trust=parsed.trust)
    if foreign is not None:
        export_foreign(foreign, parsed.output, dtype, parsed.beside)
    else:
        opened = open_checkpoint(path)
        if (places.state / TRAINABLE).is_dir():
            raise CheckpointError(
                f"cannot export {path}: it holds trainable weights alone, expected the whole model. Load it into a "
                "model, and call save_model."
            )
        beside = [name for file in sorted((places.state / WRAPPER).glob("*.safetensors")) for name in read_header(file)]
        if any(".lora_" in name or ".modules_to_save." in name for name in beside):
            raise CheckpointError(
                f"cannot export {path}: it holds adapters beside its model, expected none. Load it into a model with "
                "adapters, and call save_model, which merges them."
            )
        copy_folder(places.model, parsed.output, dtype, opened.checksums)
    sys.stdout.write(f"exported {foreign.path if foreign else path} to {parsed.output}\n")
    return 0
