"""Agree on a fresh key prefix in torchrun's store, so that keys of an earlier attempt are not read.

Input: the key-value store that torchrun gives to its workers. Output: the same store under a prefix that only this
attempt uses.

[Note: stale addresses] torchrun restarts the workers of a run, but keeps its store. gloo publishes the address of each
rank in the store under a fixed key. So a restarted rank may read the address of a dead rank, try to connect and wait
until its time-out; with two ranks this was measured in one of three restarts. The restart count cannot serve as the
prefix, because each host has its own count. So the ranks agree on a prefix first. Each rank except 0 writes a random
number, its hello. Rank 0 answers each hello with an invitation: the number of the hello and a new token. A rank accepts
an invitation only if it contains the rank's own number. When all ranks have accepted, the token becomes the prefix. The
invitation to a dead rank is never accepted. When the successor of a dead rank writes a new hello, rank 0 invites all
ranks again under a new token.
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
    """Return ``store`` under a prefix that only the live ranks of this attempt know; collective.

    Args:
        store: a `torch.distributed.Store` that all ranks can reach.
        rank: this rank.
        world_size: number of ranks.
        timeout: how long to wait for all ranks.

    Raises:
        MeshError: not all ranks answered in time.
    """
    number = uuid.uuid4().hex
    meeting = dist.PrefixStore("fsdp2_strategy/meeting", store)  # type: ignore[attr-defined]
    pause = _Pause(timeout)
    token = _host(meeting, world_size, pause) if rank == 0 else _join(meeting, rank, number, pause)
    return dist.PrefixStore(f"fsdp2_strategy/{token}", store)  # type: ignore[attr-defined]


def _host(meeting: Any, world_size: int, pause: _Pause) -> str:
    """Invite all ranks until all have accepted, and return the token; invite again whenever a hello changes."""
    others = range(1, world_size)
    hello_keys = [f"hello/{rank}" for rank in others]
    invited: list[str] = []
    token = uuid.uuid4().hex
    while others:
        if meeting.check(hello_keys):
            hellos = [value.decode() for value in meeting.multi_get(hello_keys)]
            if hellos != invited:
                invited, token = hellos, uuid.uuid4().hex
                for rank, number in enumerate(hellos, 1):
                    meeting.set(f"invitation/{rank}", f"{number} {token}")
            if meeting.check([f"accepted/{token}/{rank}" for rank in others]):
                meeting.set(f"begun/{token}", "")
                break
        pause("rank 0 waits for the others")
    return token


def _join(meeting: Any, rank: int, number: str, pause: _Pause) -> str:
    """Write a hello, accept the invitation that contains ``number``, and return its token when all have accepted."""
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
    """Sleep between polls of the store, with increasing pauses, until a deadline."""

    def __init__(self, timeout: timedelta) -> None:
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._seconds = _SHORTEST_PAUSE

    def __call__(self, waiting: str) -> None:
        """Sleep once.

        Args:
            waiting: who waits for whom, for the message.

        Raises:
            MeshError: the deadline has passed.
        """
        if time.monotonic() > self._deadline:
            raise MeshError(
                f"cannot start the process group: {waiting} beyond the time-out, expected answers of all ranks. Check "
                "that every rank was started and can reach the store of torchrun."
            )
        time.sleep(self._seconds)
        self._seconds = min(self._seconds * 1.2, _LONGEST_PAUSE)
