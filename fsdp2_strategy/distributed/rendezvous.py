"""Where the ranks of one attempt meet, whatever earlier attempts left behind.

Input: the key-value store that torchrun gives to its workers. Output: the same store under a prefix that belongs to
this attempt alone.

[Note: stale addresses] torchrun restarts the workers of a run, but keeps its store. gloo's ranks publish their
addresses there under fixed keys, so a restarted rank may find the address of a dead one, connect to it and wait until
its time-out (seen in one of three restarts on two ranks). The number of the restart cannot tell attempts apart: hosts
count it each for itself. So the ranks agree on a prefix first. Each of them says hello with a number that it made up;
rank 0 invites those that it reads, under a fresh token; a rank accepts an invitation that holds its own number; when
all have accepted the token stands. A dead rank's hello is never accepted, and is replaced by its successor's.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fsdp2_strategy.errors import MeshError

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.2  # seconds


def fresh_store(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return ``store`` under a prefix that only the living ranks of this attempt know; collective.

    Args:
        store: any `torch.distributed.Store` that all ranks reach.
        rank: number of this rank.
        world_size: number of ranks that meet.
        timeout: time after which ranks that never came are given up.

    Raises:
        MeshError: not all ranks came in time.
    """
    number = uuid.uuid4().hex
    meeting = dist.PrefixStore("fsdp2_strategy/meeting", store)  # type: ignore[attr-defined]
    pause = _Pause(timeout)
    token = _host(meeting, world_size, pause) if rank == 0 else _join(meeting, rank, number, pause)
    return dist.PrefixStore(f"fsdp2_strategy/{token}", store)  # type: ignore[attr-defined]


def _host(meeting: Any, world_size: int, pause: _Pause) -> str:
    """Invite until all have accepted; return the token."""
    hello_keys = [f"hello/{rank}" for rank in range(1, world_size)]
    invited: list[str] | None = None
    token = ""
    while True:
        if not hello_keys or meeting.check(hello_keys):
            hellos = [value.decode() for value in meeting.multi_get(hello_keys)] if hello_keys else []
            if hellos != invited:
                invited, token = hellos, uuid.uuid4().hex
                for rank, number in enumerate(hellos, 1):
                    meeting.set(f"invitation/{rank}", f"{number} {token}")
            accepted = [f"accepted/{token}/{rank}" for rank in range(1, world_size)]
            if not accepted or meeting.check(accepted):
                meeting.set(f"begun/{token}", "")
                return token
        pause("rank 0 waits for the others")


def _join(meeting: Any, rank: int, number: str, pause: _Pause) -> str:
    """Say hello, accept the invitation that holds our number, and return its token once all have."""
    meeting.set(f"hello/{rank}", number)
    accepted = ""
    while True:
        if accepted and meeting.check([f"begun/{accepted}"]):
            return accepted
        if meeting.check([f"invitation/{rank}"]):
            invited, token = meeting.get(f"invitation/{rank}").decode().split()
            if invited == number and token != accepted:
                meeting.set(f"accepted/{token}/{rank}", "")
                accepted = token
        pause(f"rank {rank} waits for rank 0")


class _Pause:
    """Wait between two looks at the store, a little longer each time, until a deadline."""

    def __init__(self, timeout: timedelta) -> None:
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._seconds = _SHORTEST_PAUSE

    def __call__(self, what: str) -> None:
        """Wait.

        Raises:
            MeshError: the time is up.
        """
        if time.monotonic() > self._deadline:
            raise MeshError(
                f"cannot start the process group: {what} beyond the time-out, expected all ranks. Check that every "
                "rank was started and reaches the store of torchrun."
            )
        time.sleep(self._seconds)
        self._seconds = min(self._seconds * 1.2, _LONGEST_PAUSE)
