"""List the checkpoints of a directory, the command ``ls``; this module does not import torch.

Input: a directory. Output: a table with one line for each checkpoint, with the reason if it is unusable, or with the
command that converts it if another system wrote it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp2_strategy.checkpoint.foreign.sources import Foreign
from fsdp2_strategy.checkpoint.listing import Checkpoint, describe_missing
from fsdp2_strategy.checkpoint.paths import TRAINABLE, CheckpointPaths, exists, is_directory
from fsdp2_strategy.cli.foreign import ANY_SYSTEM, facts_of, foreign_at
from fsdp2_strategy.cli.found import checkpoints_at, extra_in, extra_text
from fsdp2_strategy.cli.output import Output, time_text, to_minutes
from fsdp2_strategy.errors import CheckpointError, size_text


def run(parsed: argparse.Namespace, output: Output) -> int:
    """Print the checkpoints of a directory, one per line, then those of other systems; return 1 if one is unusable."""
    status = 0
    own = checkpoints_at(parsed.path, parsed.key_file, may_be_empty=True)
    others, problems = foreign_at(parsed.path, [path for path, _, _ in own])
    if not own and not others and not problems:
        raise CheckpointError(f"no checkpoint to list: {describe_missing(parsed.path, ANY_SYSTEM)}")
    output.line(_row("seq", "checkpoint", "step", "size", "modified", ""))
    for path, checkpoint, problem in own:
        modified = _modified(path)
        if modified is None and not exists(path):
            continue  # a run has deleted it meanwhile
        extra = extra_in(path) if checkpoint is not None else []
        entry = _entry(path, checkpoint, problem, modified or 0) | {"extra": extra}
        output.values.append(entry)
        notes = (", ".join(_notes(checkpoint, problem)) + extra_text(extra)).strip()
        output.line(_row_of(entry, path.name, notes), is_problem=bool(problem))
        status |= bool(problem)
    has_unread = False
    for foreign in others:
        facts = facts_of(foreign)
        if facts["step"] is None and parsed.trust:
            try:
                facts["step"] = _step_in(foreign)
            except CheckpointError as error:
                problems[foreign.path] = str(error)
                continue
        has_unread |= facts["step"] is None and foreign.needs_trust and not parsed.trust
        output.values.append(facts)
        output.line(_row_of(facts, foreign.path.name, f"{facts['written_by']}: {facts['convert']}"))
    for path, problem in problems.items():
        output.values.append({"path": str(path), "problem": problem})
        output.line(_row_of({}, path.name, f"UNUSABLE: {problem}"), is_problem=True)
    if has_unread:
        output.line("Names do not tell a step that is -. Pass --trust to read it from pickles, which can run any code.")
    return status or int(bool(problems))


def _row(*columns: object) -> str:
    """Return a line of the table: sequence number, name, step, size, time, notes."""
    return "{:>4}  {:<24} {:>9} {:>9}  {:<16}  {}".format(*columns).rstrip()


def _row_of(entry: Mapping[str, Any], name: str, notes: str) -> str:
    if "bytes" not in entry:
        return f"   -  {name:<24} {notes}"
    sequence, step = (entry[key] if entry.get(key) is not None else "-" for key in ("sequence", "step"))
    tag = entry.get("tag", name)
    return _row(sequence, tag, step, size_text(entry["bytes"]), to_minutes(entry["modified"]), notes)


def _step_in(foreign: Foreign) -> int | None:
    """Return the step that the content of a checkpoint tells; None if it does not."""
    from fsdp2_strategy.checkpoint.foreign.contents import read_contents  # noqa: PLC0415  imports torch

    contents = read_contents(foreign)
    return contents.step if contents.is_step_recorded else None


def _entry(path: Path, checkpoint: Checkpoint | None, problem: str, modified: float) -> dict[str, Any]:
    tag = path.name if checkpoint is None else checkpoint.tag
    entry: dict[str, Any] = {"path": str(path), "tag": tag, "problem": problem or None}
    if checkpoint is not None:
        entry |= {
            "sequence": checkpoint.sequence,
            "step": checkpoint.step,
            "bytes": checkpoint.total_bytes,
            "modified": time_text(modified),
            "protected": checkpoint.protected,
            "metric": checkpoint.metric,
            "higher_is_better": checkpoint.higher_is_better,
            "only_trainable": _is_only_trainable(checkpoint),
            "models": list(checkpoint.models),
        }
    return entry


def _notes(checkpoint: Checkpoint | None, problem: str) -> list[str]:
    """Return the notes on a checkpoint of this package."""
    unusable = [f"UNUSABLE: {problem}"] if problem else []
    if checkpoint is None:
        return unusable
    notes = ["protected"] if checkpoint.protected else []
    notes += [f"models {', '.join(checkpoint.models)}"] if checkpoint.models else []
    notes += ["copied or renamed"] if checkpoint.is_copy else []
    notes += ["trainable weights only"] if _is_only_trainable(checkpoint) else []
    notes += [f"metric {checkpoint.metric:g}"] if checkpoint.metric is not None else []
    return [*notes, *unusable]


def _modified(path: Path) -> float | None:
    """Return when the manifest of a checkpoint was written, or copied; None if there is none."""
    try:
        return CheckpointPaths.found_in(path).manifest.stat().st_mtime
    except OSError:
        return None


def _is_only_trainable(checkpoint: Checkpoint) -> bool:
    paths = CheckpointPaths.found_in(checkpoint.path)
    return any(is_directory(each.state / TRAINABLE) for each in paths.of_models(checkpoint.models).values())
