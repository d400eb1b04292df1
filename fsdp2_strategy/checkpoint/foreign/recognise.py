"""Recognise the checkpoints of other systems from names of files and JSON, and describe a folder without ours.

Input: a path. Output: a `Foreign`, which says who wrote the checkpoint and which files hold which part. This module
imports no torch and reads no pickle.

[Note: newest checkpoint of another system] Of several checkpoints in a directory, ``last`` or ``latest`` is the newest;
else the one with the highest step in its name, if all names have a step; else that with the highest number, if the
names are equal but for it and say that they are checkpoints, such as ``epoch_1``. Otherwise it is an error that lists
them: the wrong run, or an old step, would go on silently.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from fsdp2_strategy.checkpoint.foreign.folders import NOT_WEIGHTS, RUN_FILE, in_folder, is_torch_file, of_file
from fsdp2_strategy.checkpoint.foreign.sources import PICKLES, Foreign, step_of
from fsdp2_strategy.checkpoint.paths import exists, is_directory, names_in
from fsdp2_strategy.errors import CheckpointError, some

__all__ = [
    "FILE_ENDINGS",
    "Foreign",
    "below",
    "candidates_in",
    "choose",
    "describe_contents",
    "incomplete_after",
    "newest_in",
    "readable_candidates_in",
    "recognise",
]

_PART = re.compile(r"optim|sched|rng|random|data|scaler|args|buffer", re.IGNORECASE)
"""Names of files that hold only a part of a checkpoint."""
FILE_ENDINGS = (*PICKLES, ".tar", ".safetensors")
"""Endings of the names of checkpoints that are files."""
_LAST = re.compile(r"last|latest", re.IGNORECASE)
_NUMBERED = re.compile(r"(?:.*(?:ckpt|checkpoint|model|weights|state|epoch|save|step|iter)|ep?|)[_=.-]*", re.IGNORECASE)
"""What may stand before the number in names of the checkpoints of one run."""
_MOST_FOLDERS = 200
"""How many folders are looked into for checkpoints below a directory without any."""
_UNSUPPORTED = {
    "a checkpoint of DeepSpeed": (
        r"zero_to_fp32\.py|mp_rank_\d+_model_states\.pt|.*zero_pp_rank_\d+.*\.pt",
        "Convert it with the script that DeepSpeed wrote into it, zero_to_fp32.py, and load the result.",
    ),
    "a checkpoint of Megatron-LM": (
        r"mp_rank_\d+(_\d+)*|latest_checkpointed_iteration\.txt",
        "Convert it to a Hugging Face folder with Megatron's tools, and load the result.",
    ),
}
"""Kinds that cannot be loaded: a pattern of names in their folders, and what to do."""


def recognise(path: Path) -> Foreign | None:
    """Return the checkpoint of another system at a path: that of the folder or file itself; else None."""
    if not is_directory(path):
        return of_file(path) if exists(path) else None
    return in_folder(path, names_in(path))


def candidates_in(path: Path, *, any_name: bool = False) -> list[Foreign]:
    """Return the checkpoint at a path, else those among a directory's entries, oldest first as far as names tell.

    Hugging Face folders among the entries are not checkpoints of a run: a run may also export models there. Files of
    ``torch.save`` whose names do not say that they are checkpoints count with ``any_name``, if there are no others.
    """
    own = recognise(path)
    if own is not None or not is_directory(path):
        return [own] if own is not None else []
    found, unnamed = [], []
    for name in sorted(names_in(path)):
        is_folder = is_directory(path / name)
        if name.startswith(".") or (not is_folder and _PART.search(name)):
            continue
        if not is_folder and not (RUN_FILE.search(name) and name.endswith((*PICKLES, ".safetensors"))):
            unnamed.append(name)
            continue
        each = recognise(path / name)
        if each is not None and not each.is_hugging_face:
            found.append(each)
    if any_name and not found:
        found = [each for name in unnamed if is_torch_file(path / name) and (each := of_file(path / name)) is not None]
    return sorted(found, key=_age)


def _age(foreign: Foreign) -> tuple[int, bool, tuple[int, int], str]:
    # VITRA can save the same step twice: the checkpoint from the end of the epoch is the newer one.
    return foreign.step, foreign.path.name.endswith(".end.ckpt"), foreign.order, foreign.path.name


def newest_in(path: Path) -> Foreign | None:
    """Return the last of `candidates_in`; None if there is none."""
    return next(reversed(candidates_in(path)), None)


def choose(path: Path, *, any_name: bool = False) -> Foreign | None:
    """Return the newest of `candidates_in`; None if there is none.

    Raises:
        CheckpointError: names do not tell which is the newest; see [Note: newest checkpoint of another system].
    """
    found = candidates_in(path, any_name=any_name)
    if len(found) < 2:
        return found[0] if found else None
    last = [each for each in found if _LAST.fullmatch(_stem(each.path))]
    if len(last) == 1:
        return last[0]
    steps = [each.named_step for each in found]
    if None not in steps:
        if _age(found[-1])[:2] != _age(found[-2])[:2]:
            return found[-1]
    elif set(steps) == {None}:
        names = [re.fullmatch(r"(.*?)(\d+)", _stem(each.path)) for each in found]
        prefixes = {match and match[1] for match in names}
        numbers = [int(match[2]) for match in names if match]
        if len(prefixes) == 1 and len({*numbers}) == len(found) and _NUMBERED.fullmatch(prefixes.pop() or ""):
            return found[numbers.index(max(numbers))]
    raise CheckpointError(
        f"cannot choose a checkpoint in {path}: it holds {some([each.path.name for each in found], 'checkpoint')} of "
        "other systems, and their names do not tell which is the newest, expected a step in each. Give the path of one."
    )


def _stem(path: Path) -> str:
    """Return the name without the endings of a file, such as ``.pth.tar``."""
    return path.name if is_directory(path) else path.name.partition(".")[0]


def incomplete_after(path: Path, chosen: Foreign) -> list[str]:
    """Return the names of folders in a directory that have a higher step than a checkpoint, and are none themselves."""
    if chosen.path == path or not is_directory(path) or chosen.named_step is None:
        return []
    known = {each.path.name for each in candidates_in(path)}
    names = [name for name in sorted(names_in(path)) if name not in known and is_directory(path / name)]
    return [name for name in names if (step := step_of(path / name)) is not None and step > chosen.named_step]


def readable_candidates_in(path: Path) -> list[Foreign]:
    """Return `candidates_in` a directory other than the one to load; none if it cannot be read, or lacks files."""
    with contextlib.suppress(CheckpointError):
        return candidates_in(path)
    return []


def _readable_names_in(path: Path) -> list[str]:
    with contextlib.suppress(CheckpointError):
        return sorted(names_in(path))
    return []


def below(path: Path) -> list[Path]:
    """Return the directories with checkpoints of other systems one level below a directory, else two levels below."""
    level = [path]
    for _ in range(2):
        level = [each / name for each in level for name in _readable_names_in(each) if not name.startswith(".")]
        level = [each for each in level[:_MOST_FOLDERS] if is_directory(each)]
        found = [each for each in level if any(not foreign.is_hugging_face for foreign in readable_candidates_in(each))]
        if found:
            return found
    return []


def describe_contents(path: Path) -> str | None:
    """Describe in one sentence what a path without checkpoints of this package holds, and what loads it.

    None if nothing there looks like weights or a checkpoint, as in the directory of a run that has not begun.
    """
    if (found := choose(path)) is not None:
        trust = ", trust=True" if found.needs_trust else ""
        only = ", load_module_only=True" if found.is_hugging_face else ""
        what = found.kind if found.path == path else f"{found.kind} in {found.path.name}"
        return f"{path} holds {what}. Load it with load_ckpt(model, {str(found.path)!r}{trust}{only})."
    names = sorted(names_in(path)) if is_directory(path) else [path.name] if exists(path) else []
    names = [name for name in names if not name.startswith(".")]
    for kind, (pattern, advice) in _UNSUPPORTED.items():
        below = [name for each in names if is_directory(path / each) for name in names_in(path / each)]
        if any(re.fullmatch(pattern, name) for name in (*names, *below)):
            return f"{path} holds {kind}, which cannot be loaded. {advice}"
    weights = [name for name in names if _looks_like_weights(name)]
    if weights:
        listed = ", ".join(weights[:3]) + (", …" if len(weights) > 3 else "")
        return (
            f"{path} holds files that look like weights ({listed}), of no known kind. Pass the path of the file or "
            "folder to load, or an empty directory to start afresh."
        )
    return None


def _looks_like_weights(name: str) -> bool:
    if name in NOT_WEIGHTS:
        return False
    if name.endswith((".safetensors", ".distcp", ".gguf", ".ckpt")):
        return True
    return name.endswith(PICKLES) and re.match(r"(pytorch_)?model|weights|optim|checkpoint|ckpt", name) is not None
