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

from fsdp2_strategy.checkpoint.foreign.folders import RUN_FILE
from fsdp2_strategy.checkpoint.foreign.recognise import (
    Foreign,
    choose,
    describe_contents,
    newest_in,
    recognise,
)
from fsdp2_strategy.checkpoint.listing import describe_missing, is_checkpoint
from fsdp2_strategy.checkpoint.paths import exists, is_directory, names_in
from fsdp2_strategy.cli.output import time_text
from fsdp2_strategy.errors import CheckpointError

_ENDINGS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
ANY_SYSTEM = "of this package or another system"
_LOOKED_FOR = (
    "Looked for a folder of torch.distributed.checkpoint (.metadata, *.distcp), files of "
    "torch.save (such as model.pt and optimizer.pt, ckpt_100.pt, or one per rank), a folder of accelerate, of "
    "transformers' Trainer, of Lightning, verl or prime-rl, or a Hugging Face folder; or a directory of these."
)


def foreign_at(path: Path, known: Collection[Path]) -> tuple[list[Foreign], dict[Path, str]]:
    """Find the checkpoints of other systems at a path, else those among a directory's entries.

    Returns:
        The checkpoints, by step; and why others cannot be used, by path. Those in ``known`` are ours. Of the files in
        a directory, only those with the name of a checkpoint count: ``train.pt`` may be a data set.
    """
    found: list[Foreign] = []
    problems: dict[Path, str] = {}
    if path in known or is_checkpoint(path):
        return found, problems
    entries = [path / name for name in sorted(names_in(path)) if not name.startswith(".")]
    for each in [path, *(entry for entry in entries if is_directory(entry) or _may_be_checkpoint(entry.name))]:
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
    path = path if tag is None else path / tag
    foreign = choose(path, any_name=True)
    if foreign is None:
        if content := describe_contents(path):
            raise CheckpointError(f"no checkpoint to {action}: {content}")
        if action != "convert":
            raise CheckpointError(f"no checkpoint to {action}: {describe_missing(path, ANY_SYSTEM)}")
        raise CheckpointError(f"no checkpoint to convert: {describe_missing(path, 'of another system')} {_LOOKED_FOR}")
    if foreign.needs_trust and not trust:
        raise CheckpointError(
            f"cannot {action} {foreign.path}: it is {foreign.kind}, and it contains pickles, which can run any code "
            "when they are read, expected permission to read them. Pass --trust if you trust its source."
        )
    return foreign


def no_own_checkpoint(path: Path) -> CheckpointError:
    """Return the error that a path has no checkpoint of this package; it names the command that converts another's."""
    if (foreign := newest_in(path)) is not None:
        return CheckpointError(
            f"cannot read {foreign.path}: it is {foreign.kind}, expected a checkpoint of this package. Convert it "
            f"first: {convert_command(foreign)}"
        )
    return CheckpointError(f"no checkpoint to read: {describe_missing(path)}")


def facts_of(foreign: Foreign) -> dict[str, Any]:
    """Return what names, sizes and JSON tell about a checkpoint."""
    modified = max((each.stat().st_mtime for each in _files_of(foreign) if exists(each)), default=0.0)
    return {
        "path": str(foreign.path),
        "written_by": foreign.kind,
        "step": foreign.named_step,
        "bytes": sum(each.stat().st_size for each in _files_of(foreign) if exists(each)),
        "modified": time_text(modified),
        "needs_trust": foreign.needs_trust,
        "convert": convert_command(foreign),
    }


def convert_command(foreign: Foreign) -> str:
    """Return the command that converts a checkpoint."""
    trust = " --trust" if foreign.needs_trust else ""
    return f"fsdp2-strategy convert {shlex.quote(str(foreign.path))} TARGET{trust}"


def _may_be_checkpoint(name: str) -> bool:
    return name.endswith(_ENDINGS) and RUN_FILE.search(name) is not None


def _files_of(foreign: Foreign) -> Iterator[Path]:
    """Yield the files of a checkpoint: all below its folder, or the only one."""
    if not is_directory(foreign.path):
        yield foreign.path
        return
    for folder, _, names in os.walk(foreign.path):
        with contextlib.suppress(OSError):
            yield from (Path(folder) / name for name in names)
