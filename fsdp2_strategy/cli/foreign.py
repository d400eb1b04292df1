"""Find and describe the checkpoints of other systems; this module does not import torch.

Input: a path. Output: the checkpoints there, and facts and lines about each.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from fsdp2_strategy.checkpoint.foreign.recognise import Foreign, choose, recognise
from fsdp2_strategy.checkpoint.listing import describe_missing, is_checkpoint
from fsdp2_strategy.checkpoint.paths import exists, is_directory, names_in
from fsdp2_strategy.cli.output import time_text
from fsdp2_strategy.errors import CheckpointError, size_text

_ENDINGS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")


def foreign_at(path: Path, known: Collection[Path]) -> tuple[list[Foreign], dict[Path, str]]:
    """Find the checkpoints of other systems at a path, else those among a directory's entries.

    Returns:
        The checkpoints, by step; and why others cannot be used, by path. Those in ``known`` are ours.
    """
    found: list[Foreign] = []
    problems: dict[Path, str] = {}
    if path in known or is_checkpoint(path):
        return found, problems
    entries = [path / name for name in sorted(names_in(path)) if not name.startswith(".")]
    for each in [path, *(entry for entry in entries if is_directory(entry) or entry.suffix in _ENDINGS)]:
        if each in known or is_checkpoint(each):
            continue
        try:
            foreign = recognise(each)
        except CheckpointError as error:
            problems[each] = str(error)
            continue
        if foreign is not None:
            found.append(foreign)
            if each == path:
                break
    return sorted(found, key=lambda foreign: (foreign.order, foreign.path.name)), problems


def newest_foreign(path: Path, tag: str | None, action: str, *, trust: bool) -> Foreign:
    """Return the checkpoint of another system at a path, or the newest in a directory; raise if it may not be read."""
    foreign = choose(path if tag is None else path / tag, any_name=True)
    if foreign is None:
        raise CheckpointError(f"no checkpoint to {action}: {describe_missing(path)}")
    if foreign.needs_trust and not trust:
        raise CheckpointError(
            f"cannot {action} {foreign.path}: it is {foreign.kind}, and it contains pickles, which can run any code "
            "when they are read, expected permission to read them. Pass --trust if you trust its source."
        )
    return foreign


def facts_of(foreign: Foreign) -> dict[str, Any]:
    """Return what names, sizes and JSON tell about a checkpoint."""
    saved = max((each.stat().st_mtime for each in _files_of(foreign) if exists(each)), default=0.0)
    return {
        "path": str(foreign.path),
        "written_by": foreign.kind,
        "step": foreign.named_step,
        "bytes": sum(each.stat().st_size for each in _files_of(foreign) if exists(each)),
        "saved": time_text(saved),
        "needs_trust": foreign.needs_trust,
        "convert": convert_command(foreign),
    }


def line_for(facts: dict[str, Any]) -> str:
    """Return the line of ``ls`` for a checkpoint of another system."""
    step = "unknown" if facts["step"] is None else facts["step"]
    size, name = size_text(facts["bytes"]), Path(facts["path"]).name
    return f"   -  {name:<24} step {step:<8} {size:>12}  {facts['saved']}  {facts['written_by']}: {facts['convert']}"


def convert_command(foreign: Foreign) -> str:
    """Return the command that converts a checkpoint."""
    trust = " --trust" if foreign.needs_trust else ""
    return f"fsdp2-strategy convert {shlex.quote(str(foreign.path))} TARGET{trust}"


def _files_of(foreign: Foreign) -> Iterator[Path]:
    """Yield the files of a checkpoint: all below its folder, or the only one."""
    if not is_directory(foreign.path):
        yield foreign.path
        return
    for folder, _, names in os.walk(foreign.path):
        with contextlib.suppress(OSError):
            yield from (Path(folder) / name for name in names)
