"""Agree on a fresh key prefix in a store that outlives the ranks, so that keys of an earlier attempt are not read.

Input: the key-value store that torchrun gives to its workers, or that of a `RendezvousServer`. Output: the same store
under a prefix that only this attempt uses.

[Note: stale addresses] torchrun restarts the workers of a run, but keeps its store. gloo publishes the address of each
rank in the store under a fixed key. So a restarted rank may read the address of a dead rank, and try to connect to it
until the time-out. With two ranks, this happened in one of three restarts. The restart count cannot serve as the
prefix, because each host has its own count. So the ranks agree on a new prefix before they use the store:

1. Each rank writes a random number, its hello.
2. When the hellos of all ranks exist, rank 0 writes an invitation for each of them: the number and a new token.
3. A rank accepts an invitation only if it contains the number that this rank has written.
4. When all ranks have accepted, rank 0 writes that the attempt has begun, and the token becomes the prefix.

If a hello was written by a rank that is dead now, nobody accepts its invitation. When the successor of this rank writes
a new hello, rank 0 invites all ranks again, with a new token. A process that still waits when another one writes the
hello of the same rank raises an error.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from hmac import compare_digest
from typing import Any

import torch.distributed as dist

from fsdp2_strategy.distributed.shared_secret import SharedSecret
from fsdp2_strategy.errors import MeshError, some

_MAC_BYTES = 32
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.2  # seconds


def fresh_store(store: Any, rank: int, world_size: int, timeout: timedelta, secret: SharedSecret | None = None) -> Any:
    """Return ``store`` under a prefix that only the ranks of this attempt use; collective; see [Note: stale addresses].

    ``secret`` signs what the ranks write until they have agreed, and selects the prefix; None for a store that only
    they can reach.
    """
    number = uuid.uuid4().hex
    handshake: Any = dist.PrefixStore("fsdp2_strategy/handshake", store)  # type: ignore[attr-defined]
    handshake = handshake if secret is None else SignedStore(handshake, secret)
    handshake.set(f"hello/{rank}", number)
    pause = _Pause(handshake, rank, number, timeout)
    token = _invite_ranks(handshake, world_size, pause) if rank == 0 else _accept(handshake, rank, number, pause)
    prefix = token if secret is None else secret.mac(b"prefix", token.encode()).hex()
    return dist.PrefixStore(f"fsdp2_strategy/{prefix}", store)  # type: ignore[attr-defined]


class SignedStore:
    """A store whose values are accepted only from processes that have a secret."""

    def __init__(self, store: Any, secret: SharedSecret) -> None:
        self._store, self._secret = store, secret

    def set(self, key: str, value: str) -> None:
        """Write a value and its MAC."""
        self._store.set(key, self._mac(key, value.encode()) + value.encode())

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value; raise if it was written by a process without the secret."""
        return self._checked(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys; see `get`."""
        return [self._checked(key, value) for key, value in zip(keys, self._store.multi_get(keys), strict=True)]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._store.check(keys))

    def _mac(self, key: str, value: bytes) -> bytes:
        return self._secret.mac(b"value of the store", key.encode(), value)

    def _checked(self, key: str, signed: bytes) -> bytes:
        mac, value = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not compare_digest(mac, self._mac(key, value)):
            raise MeshError(
                f"cannot start the process group: the value of {key!r} in the store was written by a process without "
                "the secret of this rendezvous, expected values of its ranks. Check who can reach the server's port, "
                "and pass the same secret to each Rendezvous."
            )
        return value


def _invite_ranks(handshake: Any, world_size: int, pause: _Pause) -> str:
    """Invite all ranks, again whenever a hello changes; when all have accepted, return the token."""
    others = range(1, world_size)
    invited: list[str] = []
    token = uuid.uuid4().hex
    while others:
        missing = _without(handshake, "hello", others)
        if not missing:
            hellos = [value.decode() for value in handshake.multi_get([f"hello/{rank}" for rank in others])]
            if hellos != invited:
                invited, token = hellos, uuid.uuid4().hex
                for rank, number in enumerate(hellos, 1):
                    handshake.set(f"invitation/{rank}", f"{number} {token}")
            missing = _without(handshake, f"accepted/{token}", others)
            if not missing:
                handshake.set(f"begun/{token}", "")
                break
        pause(missing)
    return token


def _without(handshake: Any, key: str, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have not written their key."""
    if handshake.check([f"{key}/{rank}" for rank in ranks]):
        return []
    return [rank for rank in ranks if not handshake.check([f"{key}/{rank}"])]


def _accept(handshake: Any, rank: int, number: str, pause: _Pause) -> str:
    """Accept the invitations that contain ``number``; when all ranks have accepted, return the token."""
    accepted = ""
    while True:
        if accepted and handshake.check([f"begun/{accepted}"]):
            return accepted
        if handshake.check([f"invitation/{rank}"]):
            invited, token = handshake.get(f"invitation/{rank}").decode().split()
            if invited == number and token != accepted:
                handshake.set(f"accepted/{token}/{rank}", "")
                accepted = token
        pause([0])


class _Pause:
    """Sleep between polls of the store, with increasing pauses, until a deadline."""

    def __init__(self, handshake: Any, rank: int, number: str, timeout: timedelta) -> None:
        self._handshake, self._rank, self._number = handshake, rank, number
        self._timeout_seconds = timeout.total_seconds()
        self._deadline = time.monotonic() + self._timeout_seconds
        self._seconds = _SHORTEST_PAUSE

    def __call__(self, missing: Sequence[int]) -> None:
        """Sleep once; raise after the deadline, naming ``missing``, or if another process has the same rank."""
        if self._handshake.get(f"hello/{self._rank}").decode() != self._number:
            raise MeshError(
                f"cannot start the process group: another process has started as rank {self._rank}, expected one "
                "process for each rank. Number the processes from 0."
            )
        if time.monotonic() > self._deadline:
            names = some(list(map(str, missing)), "rank")
            raise MeshError(
                f"cannot start the process group: rank {self._rank} still waits for {names} after "
                f"{self._timeout_seconds:g} s, expected all ranks to answer in time. Check that every rank was "
                "started, with the same world size, and can reach the store."
            )
        time.sleep(self._seconds)
        self._seconds = min(self._seconds * 1.2, _LONGEST_PAUSE)
