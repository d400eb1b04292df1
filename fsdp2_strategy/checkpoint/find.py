"""Find the checkpoint that a path means: one of this package, one of another system, or none for a fresh start.

Input: the path that the user gives, and a tag. Output: paths; or a `Foreign`; or nothing, if nothing there looks like a
checkpoint. Rank 0 alone looks, and the other ranks get what it has found.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from fsdp2_strategy.checkpoint.directory import recover
from fsdp2_strategy.checkpoint.foreign.recognise import (
    FILE_ENDINGS,
    Foreign,
    below,
    candidates_in,
    choose,
    describe_contents,
    incomplete_after,
    newest_in,
    readable_candidates_in,
)
from fsdp2_strategy.checkpoint.foreign.sources import step_of
from fsdp2_strategy.checkpoint.listing import (
    REPLACED,
    Checkpoint,
    checkpoints_nearby,
    checkpoints_with_manifest,
    describe_missing,
    hidden_in,
    is_checkpoint,
    is_last,
    lacks_training_state,
    latest_tag,
    linked_tag,
    problem_of,
    step_in_name,
    without_manifest,
)
from fsdp2_strategy.checkpoint.lock import is_held_elsewhere
from fsdp2_strategy.checkpoint.paths import CheckpointPaths, exists, is_directory, names_in
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.errors import CheckpointError, DamageError, did_you_mean, some
from fsdp2_strategy.storage.file_reads import repeated


def find_checkpoint(
    load_dir: Path, tag: str | None, *, fallback: bool, trust: bool
) -> tuple[list[Path], Foreign | None]:
    """Return the checkpoint to load, followed by its fallbacks, newest first; or a checkpoint of another system.

    Neither means a fresh start. Rank 0 calls it.

    Raises:
        CheckpointError: see `load_checkpoint`.
    """
    _check_reachable(load_dir)
    foreign_path = load_dir if tag is None else load_dir / tag
    if tag is None and _is_link_to_checkpoint(load_dir):
        load_dir, tag = load_dir.parent, load_dir.name
    if tag is None and exists(CheckpointPaths.found_in(load_dir).manifest) and is_checkpoint(load_dir):
        return [load_dir], None
    is_in_checkpoint = is_checkpoint(load_dir.parent)  # the folder of one of several models
    if tag is None and not is_in_checkpoint and load_dir in without_manifest(load_dir.parent):
        raise DamageError(
            f"cannot load {load_dir}: {problem_of(load_dir)}. Load another checkpoint, such as the newest intact one: "
            f"pass {load_dir.parent}, with fallback=True."
        )
    if exists(load_dir) and (paths := _committed(load_dir, tag, fallback=fallback)):
        return paths, None
    foreign = choose(foreign_path, any_name=trust)
    if foreign is None or foreign.is_hugging_face:  # it may be the folder of the model in one of our checkpoints
        _check_nearby(load_dir)
    if foreign is None:
        if tag is None:
            _check_fresh_start(load_dir)
        return [], None
    if foreign.needs_trust and not trust:
        raise CheckpointError(
            f"cannot load {foreign.path}: it is {foreign.kind}, and it contains pickles, which can run any code when "
            "they are read, expected permission to read them. Pass trust=True if you trust its source."
        )
    return [], foreign


def log_choice(directory: Path, foreign: Foreign) -> None:
    """Log which of several checkpoints of other systems is loaded, and which look newer but are incomplete."""
    for name in incomplete_after(directory, foreign):
        message = "cannot load %s: it has no complete checkpoint of a known kind. %s is loaded"
        log(message, directory / name, foreign.path, level=logging.WARNING)
    if foreign.path != directory and (count := len(candidates_in(directory))) > 1:
        log("of %d checkpoints of other systems in %s, %s is the newest", count, directory, foreign.path.name)


def _check_fresh_start(load_dir: Path) -> None:
    """Raise if a path without a checkpoint was meant to be one, or if there are weights or checkpoints within."""
    if content := describe_contents(load_dir):
        raise CheckpointError(f"no checkpoint to load: {content}")
    if others := below(load_dir):
        listed = f"{' and in '.join(map(str, others[:3]))}{', …' if len(others) > 3 else ''}"
        raise CheckpointError(
            f"no checkpoint to load: {load_dir} has none, but there are checkpoints of other systems in {listed}. Pass "
            "the directory that you mean."
        )
    if exists(load_dir) and not is_directory(load_dir):
        raise CheckpointError(f"no checkpoint to load: {describe_missing(load_dir)} Pass the path of a checkpoint.")
    if not exists(load_dir):
        parent = load_dir.absolute().parent
        is_file = load_dir.suffix in FILE_ENDINGS
        may_be_step = is_file or step_of(load_dir) is not None
        siblings = [each.path.name for each in readable_candidates_in(parent)] if may_be_step else []
        if is_file or siblings:
            there = f" {parent} has {some(siblings, 'checkpoint')}." if siblings else ""
            raise CheckpointError(
                f"no checkpoint to load: {load_dir} does not exist, expected the checkpoint that its name means."
                f"{there} Correct the path."
            )


def describe_fresh_start(load_dir: Path, *, trust: bool) -> tuple[str, int]:
    """Return why nothing is loaded, and the level of the log for it. Rank 0 calls it."""
    expects = logging.WARNING if trust else logging.INFO  # trust is for a checkpoint that another system has written
    if not exists(load_dir):
        return f"{load_dir} does not exist", expects
    names = sorted(name for name in names_in(load_dir) if not name.startswith(".") and name != "lost+found")
    if not names:
        return f"no checkpoint in {load_dir}, which is empty", expects
    listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"no checkpoint in {load_dir}, which contains {listed}", logging.WARNING


def _check_reachable(path: Path) -> None:
    """Raise if nobody can say whether a directory exists: a run that starts afresh would overwrite its checkpoints."""
    try:
        repeated(path, path.stat)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"cannot load from {path}: it cannot be looked at ({problem}), expected a directory, or nothing. Check the "
            "path, its permissions, and the file system."
        ) from error


def _is_link_to_checkpoint(path: Path) -> bool:
    """Return whether a path is ``last``, or a link to another checkpoint in the same directory."""
    target = linked_tag(path.parent, path.name)
    if target is None or target == path.name:
        return False
    # The target may be missing until `recover`.
    return is_last(path) or is_checkpoint(path) or any(tag == target for _, tag in hidden_in(path.parent, REPLACED))


def newest_committed(load_dir: Path) -> Path | None:
    """Return the checkpoint of a directory that was saved last, or None; rank 0 calls it."""
    paths = _committed(load_dir, None, fallback=False) if exists(load_dir) else []
    return paths[0] if paths else None


def _committed(load_dir: Path, tag: str | None, *, fallback: bool) -> list[Path]:
    """Return the checkpoint to load from a directory, followed by its fallbacks; nothing if another system wrote it."""
    if not is_held_elsewhere(load_dir):  # a run that saves there may be in the middle of a commit
        recover(load_dir)
    committed = checkpoints_with_manifest(load_dir)[::-1]
    tags = [checkpoint.tag for checkpoint in committed]
    if tag is not None and (load_dir / tag).is_symlink():
        target = linked_tag(load_dir, tag)
        if target not in tags and is_checkpoint(load_dir / tag):
            return [load_dir / tag]  # outside of the directory: its place among these checkpoints is unknown
        tag = target if target in tags else tag
    if tag in tags:
        committed = committed[tags.index(tag) :]
    elif (
        tag is not None
        and newest_in(load_dir / tag)
        and (_is_foreign(load_dir / tag) or load_dir / tag not in without_manifest(load_dir))
    ):
        return []
    elif tag is not None:
        path = load_dir / tag
        problem = f" ({problem_of(path)})" if is_checkpoint(path) or path in without_manifest(load_dir) else ""
        known = tags[::-1] or [each.path.name for each in candidates_in(load_dir) if each.path != load_dir]
        raise CheckpointError(
            f"cannot load: {tag!r} is not a committed checkpoint in {load_dir}{problem}, expected one of {known}."
            f"{did_you_mean(tag, known)}"
        )
    else:
        _check_unreadable(load_dir, committed, fallback=fallback)
    return [checkpoint.path for checkpoint in committed][: None if fallback else 1]


def _check_unreadable(load_dir: Path, committed: Sequence[Checkpoint], *, fallback: bool) -> None:
    """Log a warning for each checkpoint without a valid manifest; raise if it is the newest, or the only one.

    It is the newest if ``latest`` or ``last`` names it. If neither exists, a checkpoint in another system's layout that
    lacks its training state is the newest if its name has the highest step.
    """
    latest = latest_tag(load_dir)
    for path in without_manifest(load_dir):
        if _is_foreign(path) and not is_checkpoint(path):
            continue
        text = f"cannot load {path}: {problem_of(path)}."
        is_last_step = latest is None and lacks_training_state(path)
        is_last_step = is_last_step and all(step_in_name(path) > each.step for each in committed)
        if not fallback and (not committed or latest == path.name or is_last_step):
            other = "Pass fallback=True to load an older checkpoint" if committed else "There is no older checkpoint"
            raise DamageError(f"{text} {other}, or delete this one.")
        log("%s It is ignored.", text, level=logging.WARNING)


def _is_foreign(path: Path) -> bool:
    """Return whether a directory without a manifest is the checkpoint of another system, with more than weights."""
    found = newest_in(path)
    return found is not None and found.needs_trust


def other_tags(paths: Sequence[Path]) -> list[str]:
    """Return the tags of the other checkpoints in the directory of the one to load; none if fallbacks are given."""
    if len(paths) != 1:
        return []
    with contextlib.suppress(CheckpointError):
        return [each.tag for each in checkpoints_with_manifest(paths[0].parent) if each.path.name != paths[0].name]
    return []


def _check_nearby(load_dir: Path) -> None:
    """Raise if a directory without checkpoints is one level off; log a warning if its name is only similar."""
    nearby = checkpoints_nearby(load_dir)
    if exists(load_dir):
        nearby = [path for path in nearby if path != load_dir.absolute().parent or is_checkpoint(path)]
    if nearby:
        raise CheckpointError(f"no checkpoint to load: {describe_missing(load_dir)} Pass the directory that you mean.")
    parent = load_dir.absolute().parent
    if not exists(load_dir):
        siblings = []
        for path in (parent / name for name in sorted(names_in(parent))):
            with contextlib.suppress(CheckpointError):  # directories that this process may not read
                siblings += [path.name] if is_directory(path) and checkpoints_with_manifest(path) else []
        if hint := did_you_mean(load_dir.name, siblings):
            log("%s does not exist.%s", load_dir, hint, level=logging.WARNING)
