"""Implement the commands of the command line: list, verify and export checkpoints.

Input: parsed arguments. Output: tables, reports and Hugging Face folders; an exit status.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from fsdp2_strategy.checkpoint import list_checkpoints, verify_checkpoint
from fsdp2_strategy.checkpoint.foreign_formats import export_foreign, find_foreign
from fsdp2_strategy.checkpoint.paths import TRAINABLE, WRAPPER, Places
from fsdp2_strategy.checkpoint.reader import open_checkpoint
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.copy_folder import copy_folder
from fsdp2_strategy.hf.safetensors_format import read_header

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


def ls(parsed: argparse.Namespace) -> int:
    """Print the committed checkpoints of a directory, one per line; return 0."""
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


def verify(parsed: argparse.Namespace) -> int:
    """Verify a checkpoint, or all checkpoints in a directory; return 1 if any has a problem, else 0.

    Raises:
        CheckpointError: there is no checkpoint.
    """
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


def export(parsed: argparse.Namespace) -> int:
    """Export a checkpoint to a Hugging Face folder; return 0.

    Raises:
        CheckpointError: the checkpoint holds trainable weights only, has adapters, is corrupt, or is not trusted.
    """
    path, dtype = parsed.checkpoint, DTYPES.get(parsed.dtype)
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
