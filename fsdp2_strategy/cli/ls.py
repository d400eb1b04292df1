"""List the checkpoints of a directory, the command ``ls``; this module does not import torch.

Input: a directory. Output: one line for each checkpoint, with the reason if it is unusable, or with the command that
converts it if another system wrote it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fsdp2_strategy.checkpoint.listing import Checkpoint
from fsdp2_strategy.checkpoint.paths import TRAINABLE, CheckpointPaths, exists, is_directory
from fsdp2_strategy.cli.foreign import facts_of, foreign_at, line_for
from fsdp2_strategy.cli.found import checkpoints_at, extra_in, extra_text
from fsdp2_strategy.cli.output import Output, time_text
from fsdp2_strategy.errors import size_text


def run(parsed: argparse.Namespace, output: Output) -> int:
    """Print the checkpoints of a directory, one per line, then those of other systems; return 1 if one is unusable."""
    status = 0
    own = checkpoints_at(parsed.path, parsed.key_file, may_be_empty=True)
    others, problems = foreign_at(parsed.path, [path for path, _, _ in own])
    own = own if others or problems else checkpoints_at(parsed.path, parsed.key_file)
    for path, checkpoint, problem in own:
        saved = _saved(path)
        if saved is None and not exists(path):
            continue  # a run has deleted it meanwhile
        extra = extra_in(path) if checkpoint is not None else []
        output.values.append(_entry(path, checkpoint, problem, saved or 0) | {"extra": extra})
        if checkpoint is None:
            output.line(f"   -  {path.name:<24} UNUSABLE: {problem}", is_problem=True)
        else:
            output.line(_line(checkpoint, problem, saved or 0) + extra_text(extra), is_problem=bool(problem))
        status |= bool(problem)
    for foreign in others:
        facts = facts_of(foreign)
        output.values.append(facts)
        output.line(line_for(facts))
    for path, problem in problems.items():
        output.values.append({"path": str(path), "problem": problem})
        output.line(f"   -  {path.name:<24} UNUSABLE: {problem}", is_problem=True)
    return status or int(bool(problems))


def _entry(path: Path, checkpoint: Checkpoint | None, problem: str, saved: float) -> dict[str, Any]:
    tag = path.name if checkpoint is None else checkpoint.tag
    entry: dict[str, Any] = {"path": str(path), "tag": tag, "problem": problem or None}
    if checkpoint is not None:
        entry |= {
            "sequence": checkpoint.sequence,
            "step": checkpoint.step,
            "bytes": checkpoint.total_bytes,
            "saved": time_text(saved, "%Y-%m-%dT%H:%M:%S%z"),
            "protected": checkpoint.protected,
            "metric": checkpoint.metric,
            "higher_is_better": checkpoint.higher_is_better,
            "only_trainable": _is_only_trainable(checkpoint),
            "models": list(checkpoint.models),
        }
    return entry


def _line(checkpoint: Checkpoint, problem: str, saved: float) -> str:
    date = time_text(saved)
    notes = ["protected"] if checkpoint.protected else []
    notes += [f"models {', '.join(checkpoint.models)}"] if checkpoint.models else []
    notes += ["copied or renamed"] if checkpoint.is_copy else []
    notes += ["trainable weights only"] if _is_only_trainable(checkpoint) else []
    notes += [f"metric {checkpoint.metric:g}"] if checkpoint.metric is not None else []
    notes += [f"UNUSABLE: {problem}"] if problem else []
    size = size_text(checkpoint.total_bytes)
    return (
        f"{checkpoint.sequence:>4}  {checkpoint.tag:<24} step {checkpoint.step:<8} {size:>12}  {date}"
        f"{'  ' + ', '.join(notes) if notes else ''}"
    )


def _saved(path: Path) -> float | None:
    """Return the time when a checkpoint was saved; None if it has no manifest."""
    try:
        return CheckpointPaths.found_in(path).manifest.stat().st_mtime
    except OSError:
        return None


def _is_only_trainable(checkpoint: Checkpoint) -> bool:
    paths = CheckpointPaths.found_in(checkpoint.path)
    return any(is_directory(each.state / TRAINABLE) for each in paths.of_models(checkpoint.models).values())
