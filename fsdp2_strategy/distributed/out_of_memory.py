"""Name the snapshot of a device's memory in the errors about it.

Input: the file that `tracking.memory_snapshot` has written. Output: a note of the error on this rank, and the text with
which this rank reports the error to the others.
"""

from __future__ import annotations

from pathlib import Path

import torch

_snapshots: list[Path] = []


def remember_snapshot(path: Path) -> None:
    """Name this file in the errors of this process that report a full memory; not collective."""
    _snapshots[:] = [path]


def has_snapshot() -> bool:
    """Return whether a snapshot was written in this process since recording began; not collective."""
    return bool(_snapshots)


def forget_snapshot() -> None:
    """Undo `remember_snapshot`."""
    _snapshots.clear()


def snapshot_text(error: BaseException) -> str:
    """Return a sentence with the file of the snapshot; "" if the error is another one, or there is none."""
    if not isinstance(error, torch.OutOfMemoryError) or not _snapshots:
        return ""
    return f"The memory snapshot of this rank is {_snapshots[0]}."


def add_snapshot_note(error: BaseException) -> None:
    """Add the sentence of `snapshot_text` to an error as a note, which Python prints below its message."""
    text = snapshot_text(error)
    if text and text not in getattr(error, "__notes__", ()):
        error.add_note(text)
