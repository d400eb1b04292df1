"""Choose the checkpoints that rotation deletes, among all checkpoints on disk, also those from before a restart.

Input: the committed checkpoints of a directory, and limits. Output: the checkpoints to delete, never the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdp2_strategy.checkpoint.listing import Checkpoint
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage.staged_folder import check_free_space

GB = 10**9


def checkpoints_to_delete(
    checkpoints: Sequence[Checkpoint], *, max_num: int | None, max_mem: float | None, leftover_bytes: int = 0
) -> list[Checkpoint]:
    """Return the checkpoints to delete, oldest first, so that the kept ones are within both limits if possible.

    ``checkpoints`` are all of a directory, oldest first. The newest one, the best by metric, and protected ones are
    always kept. Protected ones do not count towards ``max_num``. All checkpoints and ``leftover_bytes`` count towards
    ``max_mem`` (GB, 10^9 bytes), except for copies that somebody made, which are not ours.
    """
    checkpoints = [c for c in checkpoints if not c.is_copy]
    # The newest checkpoint with a metric decides whether higher is better. Of equal metrics, the newest counts as best.
    measured = [c for c in checkpoints if c.metric is not None]
    sign = 1 if measured and measured[-1].higher_is_better else -1
    best = max(measured, key=lambda c: (sign * (c.metric or 0.0), c.sequence), default=None)
    unprotected = [c for c in checkpoints if not c.protected]
    too_many = [] if max_num is None else unprotected[:-max_num]
    total = leftover_bytes + sum(c.total_bytes for c in checkpoints)
    to_delete: list[Checkpoint] = []
    for checkpoint in unprotected:
        too_large = max_mem is not None and total > max_mem * GB
        if checkpoint not in (best, checkpoints[-1]) and (checkpoint in too_many or too_large):
            to_delete.append(checkpoint)
            total -= checkpoint.total_bytes
    return to_delete


def check_limits(max_num: int | None, max_mem: float | None) -> None:
    """Raise if ``max_num`` is no integer of at least 1, or ``max_mem`` no number above 0."""
    if max_num is not None and (not isinstance(max_num, int) or isinstance(max_num, bool) or max_num < 1):
        raise CheckpointError(
            f"cannot save: max_num is {max_num!r}, expected an integer of at least 1. Pass None for no limit."
        )
    if max_mem is not None and (isinstance(max_mem, bool) or not isinstance(max_mem, int | float) or not max_mem > 0):
        raise CheckpointError(
            f"cannot save: max_mem is {max_mem!r}, expected a number above 0, in GB (10^9 bytes). Pass None for no "
            "limit."
        )


def check_space(save_dir: Path, needed_bytes: int, max_mem: float | None) -> None:
    """Check that a checkpoint fits, before its files are written; rank 0 calls it."""
    if max_mem is not None and needed_bytes > max_mem * GB:
        raise CheckpointError(
            f"cannot save: the checkpoint takes {needed_bytes / GB:.3f} GB, expected at most max_mem = {max_mem} GB. "
            "Increase max_mem, or save without the optimizer."
        )
    check_free_space(save_dir, needed_bytes)
