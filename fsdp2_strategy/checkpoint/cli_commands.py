"""Implement the commands of the command line: list, verify and export checkpoints.

Input: parsed arguments. Output: tables, reports or Hugging Face folders, and an exit status.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from fsdp2_strategy.checkpoint import list_checkpoints, verify_checkpoint
from fsdp2_strategy.checkpoint.foreign_formats import export_foreign, find_foreign
from fsdp2_strategy.checkpoint.paths import TRAINABLE, WRAPPER, CheckpointPaths
from fsdp2_strategy.checkpoint.reader import open_checkpoint
from fsdp2_strategy.checkpoint.storage import stored_in
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.copy_folder import copy_folder


def ls(parsed: argparse.Namespace) -> int:
    """Print the committed checkpoints of a directory, one per line; return 0."""
    for checkpoint in list_checkpoints(parsed.directory):
        paths = CheckpointPaths.found_in(checkpoint.path)
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(paths.manifest.stat().st_mtime))
        notes = ["protected"] if checkpoint.protected else []
        notes += ["trainable weights only"] if (paths.state / TRAINABLE).is_dir() else []
        notes += [f"metric {checkpoint.metric:g}"] if checkpoint.metric is not None else []
        size = f"{checkpoint.total_bytes / 1e9:.3f} GB"
        sys.stdout.write(
            f"{checkpoint.sequence:>4}  {checkpoint.tag:<24} step {checkpoint.step:<8} {size:>12}  {saved}"
            f"{'  ' + ', '.join(notes) if notes else ''}\n"
        )
    return 0


def verify(parsed: argparse.Namespace) -> int:
    """Verify a checkpoint, or all checkpoints in a directory; return 1 if any has a problem, else 0.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    path: Path = parsed.checkpoint
    paths = [path] if CheckpointPaths.found_in(path).manifest.exists() else [c.path for c in list_checkpoints(path)]
    if not paths:
        raise CheckpointError(
            f"cannot verify {path}: it contains no checkpoint, expected at least one. Pass another directory."
        )
    has_problems = False
    for each in paths:
        report = verify_checkpoint(each)
        has_problems |= not report.ok
        sys.stdout.write(f"{each}: {'ok' if report.ok else f'{len(report.problems)} problems'}\n")
        for problem in report.problems:
            sys.stdout.write(f"  {problem}\n")
    return int(has_problems)


def export(parsed: argparse.Namespace) -> int:
    """Export a checkpoint to a Hugging Face folder; return 0.

    Raises:
        CheckpointError: the checkpoint has only trainable weights, has adapters, or is corrupt; or another system wrote
            it, and ``--trust`` is missing.
    """
    path, dtype = parsed.checkpoint, getattr(torch, parsed.dtype) if parsed.dtype else None
    paths = CheckpointPaths.found_in(path)
    foreign = None if paths.manifest.exists() else find_foreign(path, trust=parsed.trust)
    if foreign is not None:
        export_foreign(foreign, parsed.output, dtype, parsed.beside)
    else:
        opened = open_checkpoint(path)
        if (paths.state / TRAINABLE).is_dir():
            raise CheckpointError(
                f"cannot export {path}: it contains only trainable weights, expected the full model. Load it into a "
                "model, and call save_model."
            )
        if any(".lora_" in name or ".modules_to_save." in name for name in stored_in(paths.state / WRAPPER)):
            raise CheckpointError(
                f"cannot export {path}: it contains adapters, expected none. Load it into a model with adapters, and "
                "call save_model, which merges them."
            )
        copy_folder(paths.model, parsed.output, dtype, opened.checksums)
    sys.stdout.write(f"exported {foreign.path if foreign else path} to {parsed.output}\n")
    return 0
