"""Notice from a thread that ranks wait for each other, and end it with an error that names what each rank does.

Input: the log of units of each rank. Output: nothing, or the connections of this rank are closed, so that every rank
raises an error whose text is in the store of the process group.

[Note: watched logs] A rank that makes no progress for a few seconds, because it waits in a collective or does something
else, publishes its log in the store. Only the first rank of the group reads the logs, when one has changed. If two of
them differ, the ranks cannot continue. If all ranks wait, but not in the same collective, neither can they, unless a
log is from a wait that has ended meanwhile: so the first rank asks, and all must answer that they still wait there.
While nothing changes, a rank that waits sends two requests to the store per second, also on a thousand ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch.distributed as dist

from fsdp2_strategy.distributed.background_store import background_store
from fsdp2_strategy.distributed.lost_ranks import disconnect, report_divergence, reported_divergence

if TYPE_CHECKING:
    from fsdp2_strategy.distributed.unit_log import UnitLog

WATCH_SECONDS = 1.0
"""How often a rank checks whether it makes progress."""
PATIENCE = 4
"""After how many checks without progress a rank publishes its log."""


@dataclass(frozen=True)
class PublishedLog:
    """What a rank publishes of its log."""

    epoch: int
    """How often the entries were emptied; logs of different epochs are not compared."""
    count: int
    """Number of entries so far."""
    first: int
    """Number of entries of this epoch before ``entries``."""
    entries: list[int]
    texts: dict[str, str]
    """The texts of the entries."""
    waits_in: str | None
    """The collective that the rank waits in; None if it does something else."""
    call: str | None
    """The call of this package in which the rank has added its last entry; None if it was in none."""


class Watcher:
    """The thread that watches a log; see [Note: watched logs]."""

    def __init__(self, log: UnitLog) -> None:
        self._log = ref(log)
        self._process = 0

    def start(self) -> None:
        """Start the thread, unless it runs in this process."""
        if self._process != os.getpid():
            self._process = os.getpid()
            threading.Thread(target=_watch, args=(self._log,), name="fsdp2_strategy units", daemon=True).start()


def _watch(log: ref[UnitLog]) -> None:
    before: tuple[int, bool] | None = None
    unchanged = 0
    publisher, reader = _Publisher(), _Reader()
    while True:
        time.sleep(WATCH_SECONDS)
        known = log()
        if known is None or not known.has_group() or not dist.is_initialized() or sys.is_finalizing():
            return
        now = known.look()
        unchanged = unchanged + 1 if now == before else 0
        before = now
        with contextlib.suppress(Exception), background_store() as store:  # the store may be lost, too
            if unchanged >= PATIENCE * (2 if known.is_releasing else 1):
                publisher.publish(store, known, now)
            if known.own == 0:
                reader.compare(store, known)
        del known


class _Publisher:
    """Publish the log of this rank when it makes no progress, and answer the first rank."""

    def __init__(self) -> None:
        self._published: tuple[int, bool] | None = None
        self._answered = 0

    def publish(self, store: Any, log: UnitLog, now: tuple[int, bool]) -> None:
        """Publish the log, unless this has been done; break off if another rank has found that the logs differ."""
        prefix = _prefix(log)
        if now != self._published:
            store.set(f"{prefix}/log/{log.own}", json.dumps(asdict(log.to_publish())))
            store.add(f"{prefix}/version", 1)
            self._published = now
        count, waits = now
        if not waits:
            return
        if reported_divergence(wait=False):
            disconnect()
        question = store.add(f"{prefix}/question", 0)
        if question > self._answered:
            self._answered = question
            store.set(f"{prefix}/answer/{log.own}", f"{question} {count}")


class _Reader:
    """Compare the logs of all ranks, on the first one."""

    def __init__(self) -> None:
        self._version = 0
        self._suspected: tuple[str, dict[int, int]] | None = None
        """The message if all ranks wait for each other, and the number of entries of each."""

    def compare(self, store: Any, log: UnitLog) -> None:
        """Read the logs that have been published, and break off if they differ, or if all ranks wait for each other."""
        prefix = _prefix(log)
        version = store.add(f"{prefix}/version", 0)
        if version != self._version:
            self._version, self._suspected = version, None
            keys = {i: f"{prefix}/log/{i}" for i in range(len(log.ranks))}
            logs = {i: PublishedLog(**json.loads(store.get(key))) for i, key in keys.items() if store.check([key])}
            epoch = log.to_publish().epoch
            logs = {i: each for i, each in logs.items() if each.epoch == epoch}
            if text := log.difference(logs):
                _break_off(text)
            elif len(logs) == len(log.ranks) and len({each.count for each in logs.values()}) > 1:
                self._suspect(store, log, logs)
        elif self._suspected is not None:
            text, counts = self._suspected
            question = store.add(f"{prefix}/question", 0)
            answers = {f"{prefix}/answer/{i}": f"{question} {count}".encode() for i, count in counts.items()}
            if store.check([*answers]) and all(store.get(key) == answer for key, answer in answers.items()):
                _break_off(text)

    def _suspect(self, store: Any, log: UnitLog, logs: Mapping[int, PublishedLog]) -> None:
        if None in [each.waits_in for each in logs.values()]:
            return
        waiting = ", ".join(f"rank {log.ranks[i]} waits in {each.waits_in}" for i, each in sorted(logs.items()))
        self._suspected = (
            f"cannot continue: all ranks wait for each other: {waiting}, expected all ranks in the same call. "
            "Check conditions such as 'if rank == 0' around collective calls, and the passes on each rank.",
            {i: each.count for i, each in logs.items()},
        )
        store.add(f"{_prefix(log)}/question", 1)


def _prefix(log: UnitLog) -> str:
    return f"fsdp2_strategy/units/{log.name}"


def _break_off(text: str) -> None:
    report_divergence(text)
    disconnect()
