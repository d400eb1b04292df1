"""Agree on a fresh key prefix in torchrun's store, so that keys of an earlier attempt are not read.

Input: the key-value store that torchrun gives to its workers. Output: the same store under a prefix that only this
attempt uses.

[Note: stale addresses] torchrun restarts the workers of a run, but keeps its store. gloo publishes the address of each
rank in the store under a fixed key. So a restarted rank may read the address of a dead rank, and try to connect to it
until the time-out. With two ranks, this happened in one of three restarts. The restart count cannot serve as the
prefix, because each host has its own count. So the ranks agree on a new prefix before they use the store:

1. Each rank except 0 writes a random number, its hello.
2. When the hellos of all ranks exist, rank 0 writes an invitation for each of them: the number and a new token.
3. A rank accepts an invitation only if it contains the number that this rank has written.
4. When all ranks have accepted, rank 0 writes that the attempt has begun, and the token becomes the prefix.

If a hello was written by a rank that is dead now, nobody accepts its invitation. When the successor of this rank writes
a new hello, rank 0 invites all ranks again, with a new token.
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
    """Return ``store`` under a new prefix that only the ranks of this attempt use; collective.

    See [Note: stale addresses].

    Args:
        store: a `torch.distributed.Store` that all ranks can reach.
        rank: this rank.
        world_size: number of ranks.
        timeout: how long to wait for all ranks.

    Raises:
        MeshError: another rank did not answer in time.
    """
    number = uuid.uuid4().hex
    handshake = dist.PrefixStore("fsdp2_strategy/handshake", store)  # type: ignore[attr-defined]
    pause = _Pause(timeout)
    token = _invite_ranks(handshake, world_size, pause) if rank == 0 else _accept(handshake, rank, number, pause)
    return dist.PrefixStore(f"fsdp2_strategy/{token}", store)  # type: ignore[attr-defined]


def _invite_ranks(handshake: Any, world_size: int, pause: _Pause) -> str:
    """Invite all ranks, again whenever a hello changes; when all have accepted, return the token."""
    others = range(1, world_size)
    hello_keys = [f"hello/{rank}" for rank in others]
    invited: list[str] = []
    token = uuid.uuid4().hex
    while others:
        if handshake.check(hello_keys):
            hellos = [value.decode() for value in handshake.multi_get(hello_keys)]
            if hellos != invited:
                invited, token = hellos, uuid.uuid4().hex
                for rank, number in enumerate(hellos, 1):
                    handshake.set(f"invitation/{rank}", f"{number} {token}")
            if handshake.check([f"accepted/{token}/{rank}" for rank in others]):
                handshake.set(f"begun/{token}", "")
                break
        pause("rank 0 still waits for another rank")
    return token


def _accept(handshake: Any, rank: int, number: str, pause: _Pause) -> str:
    """Write a hello, accept the invitations that contain ``number``; when all ranks have accepted, return the token."""
    handshake.set(f"hello/{rank}", number)
    accepted = ""
    while True:
        if accepted and handshake.check([f"begun/{accepted}"]):
            return accepted
        if handshake.check([f"invitation/{rank}"]):
            invited, token = handshake.get(f"invitation/{rank}").decode().split()
            if invited == number and token != accepted:
                handshake.set(f"accepted/{token}/{rank}", "")
                accepted = token
        pause(f"rank {rank} still waits for rank 0")


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
                f"cannot start the process group: {waiting} after the time-out, expected all ranks to answer in time. "
                "Check that every rank was started and can reach the store of torchrun."
            )
        time.sleep(self._seconds)
        self._seconds = min(self._seconds * 1.2, _LONGEST_PAUSE)
