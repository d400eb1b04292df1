"""Log that this rank has long waited for other ranks: in which call, since when, and what they last reported.

Input: the positions of this process's threads, which a thread looks at. Output: one line in the log for each wait that
exceeds a limit, and one when it ends; a file of torch's flight recorder.

[Note: reports of ranks] Every rank writes what it does to the store of the process group, four times within the limit:
the call that it waits in, or where its main thread is. A rank that has waited for the limit reads the reports of the
others, in two requests to the store unless a rank has never reported. A rank that is stopped reports nothing, so its
report is old.

A thread waits if it is in a collective of torch, and its group has begun no other one since. Another wait is one in a
collective call of this package that stays at the same instruction, as with an accelerator, whose collectives return at
once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import torch.distributed as dist

from fsdp2_strategy.distributed.background_store import background_store
from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.distributed.lost_ranks import call_of, collective_of, report_key
from fsdp2_strategy.distributed.process_group import ranks_of
from fsdp2_strategy.distributed.thread_stacks import Stack, stack_of_main_thread, stacks_of_threads
from fsdp2_strategy.distributed.torch_internals import flight_record, sequence_number

_LIBRARIES = tuple({str(Path(__file__).parent.parent), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))})
WAIT_WARNING_SECONDS = 60.0
"""The default limit."""
_STORE_SECONDS = 5.0
"""How long a rank waits for the reports of the others."""
_MOST_NAMED = 8
"""How many different reports a line contains."""


@dataclass(frozen=True)
class _Wait:
    """What a thread waits in."""

    identity: Hashable
    """Equal as long as the wait is the same one."""
    text: str
    ranks: tuple[int, ...]
    """The ranks that it may wait for, of the default group."""


_started: _WaitLog | None = None
"""What the last call of `begin_wait_log` made, also without a limit."""


def begin_wait_log(seconds: float | None) -> None:
    """Log waits of more than ``seconds`` (None: none) until the group is destroyed; a later call replaces the limit."""
    global _started  # noqa: PLW0603
    if _started is not None and _runs():
        _started.ended.set()
    _started = _WaitLog(math.inf if seconds is None else seconds) if dist.is_initialized() else None
    if _started is not None and seconds is not None and dist.get_world_size() > 1:
        threading.Thread(target=_started.run, name="fsdp2_strategy waits", daemon=True).start()


def ensure_wait_log() -> None:
    """Call `begin_wait_log` with the default limit, unless it was called for this process group; not collective."""
    if not _runs():
        begin_wait_log(WAIT_WARNING_SECONDS)


def _runs() -> bool:
    return _started is not None and _started.process == os.getpid() and _started.group() is dist.group.WORLD


class _WaitLog:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.process, self.group = os.getpid(), ref(dist.group.WORLD)
        self.ended = threading.Event()
        """Ends the thread."""
        self._waits: dict[int, tuple[_Wait, float]] = {}
        """The wait of each thread, and since when it lasts."""
        self._logged: dict[int, _Wait] = {}
        self._reported = -seconds

    def run(self) -> None:
        """Look at the threads until the process group is destroyed."""
        while not self.ended.wait(min(1.0, self._seconds / 4)) and not sys.is_finalizing():
            if not dist.is_initialized() or self.group() is not dist.group.WORLD:
                return
            with contextlib.suppress(Exception):  # the group may be destroyed meanwhile, and the store may be lost
                self._look()

    def _look(self) -> None:
        now = time.monotonic()
        found = waits()
        before, self._waits = self._waits, {}
        for thread, wait in found.items():
            earlier = before.get(thread, (wait, now))
            self._waits[thread] = earlier if earlier[0].identity == wait.identity else (wait, now)
        for thread, logged in list(self._logged.items()):
            if thread not in self._waits or self._waits[thread][0] is not logged:
                del self._logged[thread]
                waited = now - before[thread][1]
                logger.warning("rank %d no longer waits in %s, after %.0f s", dist.get_rank(), logged.text, waited)
        for thread, (wait, since) in self._waits.items():
            if now - since >= self._seconds and thread not in self._logged:
                self._logged[thread] = wait
                self._log(wait, now - since)
        if now - self._reported >= self._seconds / 4:
            self._reported = now
            self._report(now)

    def _report(self, now: float) -> None:
        main = threading.main_thread().ident or 0
        if main in self._waits:
            wait, since = self._waits[main]
            text = f"waits in {wait.text} since {now - since:.0f} s"
        else:
            text = position()
        with background_store() as store:
            store.set(_key(dist.get_rank()), json.dumps({"time": time.time(), "text": text}))

    def _log(self, wait: _Wait, seconds: float) -> None:
        own = dist.get_rank()
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        others = _reports_in_time([rank for rank in wait.ranks if rank != own])
        record = _dump(own)
        logger.warning(
            "rank %d waits in %s since %s (%.0f s). Other ranks: %s.%s The time-out ends the wait.",
            own,
            wait.text,
            since,
            seconds,
            others,
            f" torch's record of its collectives is in {record}." if record else "",
        )


def waits() -> dict[int, _Wait]:
    """Return what each other thread of this process waits in."""
    found = {thread: _wait_of(stack) for thread, stack in stacks_of_threads().items()}
    return {thread: wait for thread, wait in found.items() if wait is not None}


def _wait_of(stack: Stack) -> _Wait | None:
    """Return what a thread waits in."""
    call = call_of(stack)
    if (inner := collective_of(stack)) is not None:
        group = inner.group if isinstance(inner.group, dist.ProcessGroup) else dist.group.WORLD
        ranks = ranks_of(group)
        if len(ranks) == 1:
            return None
        name = f"{call.name} ({inner.name})" if call else inner.name
        place = call.place if call else inner.place
        text = f"{name}, called at {place}" if place else name
        return _Wait((text, sequence_number(group)), text, tuple(ranks))
    if call is None:
        return None
    innermost = stack.positions[0]
    text = f"{call.name} (at {Path(innermost.file).name}:{innermost.line}), called at {call.place}"
    return _Wait((text, stack.innermost, innermost.instruction), text, tuple(ranks_of(None)))


def position() -> str:
    """Return where the main thread is in the user's program, as text: "in train at train.py:12"."""
    stack = stack_of_main_thread()
    if stack is None:
        return "at its end"
    of_program = (each for each in stack.positions if not each.file.startswith((*_LIBRARIES, "<")))
    found = next(of_program, stack.positions[0])
    call = call_of(stack)
    place = f"{Path(found.file).name}:{found.line}"
    return f"in {call.name}, called at {place}" if call else f"in {found.function} at {place}"


def reports_of(ranks: Sequence[int]) -> str:
    """Return what other ranks last reported, ranks with equal reports together; see [Note: reports of ranks]."""
    now = time.time()
    with background_store() as store:
        ends = _read(store, {rank: report_key(rank) for rank in ranks})
        reports = _read(store, {rank: _key(rank) for rank in ranks})
    texts: dict[str, list[int]] = {}
    for rank in ranks:
        if rank in ends:
            text = ends[rank].decode()
        elif rank in reports:
            report = json.loads(reports[rank])
            text = f"{report['text']} (reported {max(now - report['time'], 0):.0f} s ago)"
        else:
            text = "no report"
        texts.setdefault(text, []).append(rank)
    named = [f"{_ranks(of)}: {text}" for text, of in list(texts.items())[:_MOST_NAMED]]
    more = sum(len(of) for of in list(texts.values())[_MOST_NAMED:])
    return "; ".join([*named, *([f"{more} more"] if more else [])])


def _reports_in_time(ranks: Sequence[int]) -> str:
    """Return `reports_of`, or why there is no answer: the rank that has the store may be the one that is stopped."""
    found: list[str] = []

    def read() -> None:
        with contextlib.suppress(Exception):  # the store may be lost
            found.append(reports_of(ranks))

    thread = threading.Thread(target=read, name="fsdp2_strategy reports", daemon=True)
    thread.start()
    thread.join(_STORE_SECONDS)
    return found[0] if found else "unknown, because the store of the process group does not answer"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{', …' if len(ranks) > _MOST_NAMED else ''}"


def _read(store: Any, keys: Mapping[int, str]) -> dict[int, bytes]:
    """Return the values of the keys that exist; in two requests if all or none of a part of them exist."""
    ranks = list(keys)
    if not ranks or (len(ranks) == 1 and not store.check([keys[ranks[0]]])):
        return {}
    if store.check([keys[rank] for rank in ranks]):
        return dict(zip(ranks, store.multi_get([keys[rank] for rank in ranks]), strict=True))
    middle = len(ranks) // 2
    halves = ({rank: keys[rank] for rank in part} for part in (ranks[:middle], ranks[middle:]))
    return {rank: value for half in halves for rank, value in _read(store, half).items()}


def _dump(rank: int) -> Path | None:
    """Write torch's flight recorder to a file, unless it is off; return the file."""
    with contextlib.suppress(Exception):  # the folder may be missing or full: the line in the log must not depend on it
        if (record := flight_record()) is None:
            return None
        named = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        path = Path(f"{named or cache / 'torch' / 'comm_lib_trace_rank_'}{rank}")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(record)
        return path
    return None


def _key(rank: int) -> str:
    return f"fsdp2_strategy/waits/{rank}"
