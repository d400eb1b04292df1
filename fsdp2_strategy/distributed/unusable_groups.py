"""Refuse further collectives after a failure that may have left collectives of an accelerator without a partner.

Input: how many collectives each rank has begun, exchanged after a failed call. Output: an error at the next call that
needs the groups.

[Note: groups after a failure] Collectives of gloo return when they are complete, so if a rank fails, the others wait,
and all ranks can agree on an error and go on. Those of an accelerator return when they are queued. If one rank runs out
of memory before a gather, the other ranks have queued theirs. If the ranks then agree on an error, and the trainer
catches it and goes on, each later collective of the failed rank is paired with the one before it of the other ranks:
values are wrong, or the ranks wait for each other until the time-out. So where the ranks agree on a failure, they also
compare how many collectives each has begun in each group of an accelerator. If the numbers differ, the groups are
marked as unusable on every rank. A backend that does not count its collectives is marked after every error that is not
one of this package, whose errors are raised between collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp2_strategy.distributed.process_group import current_device, ranks_of
from fsdp2_strategy.distributed.torch_internals import collectives_begun, process_groups
from fsdp2_strategy.errors import StepError

Begun = Mapping[str, int | None]
"""Number of collectives that a rank has begun, by group; None where the backend does not count them."""

# The reason, by the default group in which the failure occurred.
_reasons: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def is_asynchronous(group: dist.ProcessGroup | None) -> bool:
    """Return whether collectives of a group on this rank's device return before they are complete; not collective."""
    device = current_device()
    return device.type != "cpu" and f"{device.type}:" in dist.get_backend_config(group)


def begun_collectives() -> Begun:
    """Return how many collectives this rank has begun in each asynchronous group of several ranks; not collective."""
    return {
        f"{group.group_name} of the ranks {ranks_of(group)}": collectives_begun(group, current_device())
        for group in process_groups()
        if dist.get_world_size(group) > 1 and is_asynchronous(group)
    }


def unpaired_group(of_ranks: Sequence[Begun], *, is_foreign: bool) -> str | None:
    """Return the name of a group in which ranks have begun different numbers of collectives; None if there is none.

    Args:
        of_ranks: the result of `begun_collectives` of each rank.
        is_foreign: whether an error that is not one of this package has caused the failure.
    """
    for name in dict.fromkeys(name for begun in of_ranks for name in begun):
        counts = {begun[name] for begun in of_ranks if name in begun}
        if len(counts) > 1 or (is_foreign and counts == {None}):
            return name
    return None


def mark_unusable(reason: str) -> None:
    """Refuse further calls that need the process groups, because of a failure; not collective."""
    _reasons.setdefault(dist.group.WORLD, reason)


def check_groups(action: str) -> None:
    """Raise StepError if the process groups are unusable: "cannot ``action``"; not collective."""
    if not _reasons or not dist.is_initialized() or (reason := _reasons.get(dist.group.WORLD)) is None:
        return
    error = StepError(
        f"cannot {action}: the process groups are unusable since a call failed ({reason}), expected groups in which "
        "all ranks have begun the same collectives. Start the run again from its last checkpoint. To stay in this "
        "process, destroy the process group on every rank, start it again, and prepare the models again."
    )
    error.is_agreed = True
    raise error
