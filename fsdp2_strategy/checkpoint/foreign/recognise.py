"""Recognise the checkpoints of other systems from names of files and JSON, and describe a folder without ours.

Input: a path. Output: a `Foreign`, which says who wrote the checkpoint and which files hold which part. This module
imports no torch and reads no pickle.
"""

from __future__ import annotations

import re
from pathlib import Path

from fsdp2_strategy.checkpoint.foreign.folders import NOT_WEIGHTS, RUN_FILE, in_folder, of_file
from fsdp2_strategy.checkpoint.foreign.sources import PICKLES, Foreign
from fsdp2_strategy.checkpoint.paths import exists, is_directory, names_in

__all__ = ["Foreign", "describe_contents", "newest_in", "recognise"]

_PART = re.compile(r"optim|sched|rng|random|data|scaler|args|buffer", re.IGNORECASE)
"""Names of files that hold only a part of a checkpoint."""
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


def newest_in(path: Path) -> Foreign | None:
    """Return the checkpoint at a path, else the one with the highest step among a directory's entries, else None.

    Hugging Face folders among the entries are not checkpoints of a run: a run may also export models there.
    """
    own = recognise(path)
    if own is not None or not is_directory(path):
        return own
    found = []
    for name in sorted(names_in(path)):
        is_folder = is_directory(path / name)
        if name.startswith(".") or (not is_folder and (_PART.search(name) or not RUN_FILE.search(name))):
            continue
        each = recognise(path / name)
        if each is not None and not each.is_hugging_face:
            found.append(each)
    # VITRA can save the same step twice: the checkpoint from the end of the epoch is the newer one.
    return max(found, key=lambda f: (f.step, f.path.name.endswith(".end.ckpt"), f.order), default=None)


def describe_contents(path: Path) -> str | None:
    """Describe in one sentence what a path without checkpoints of this package holds, and what loads it.

    None if nothing there looks like weights or a checkpoint, as in the directory of a run that has not begun.
    """
    if (found := newest_in(path)) is not None:
        trust = ", trust=True" if found.needs_trust else ""
        only = ", load_module_only=True" if found.is_hugging_face else ""
        what = found.kind if found.path == path else f"{found.kind} in {found.path.name}"
        return f"{path} holds {what}. Load it with load_ckpt(model, {str(found.path)!r}{trust}{only})."
    names = sorted(names_in(path)) if is_directory(path) else [path.name] if exists(path) else []
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
