"""Raise an error on every rank if the ranks run different units, instead of mixing their values or waiting forever.

Input: a call before and after each gather and reduction of a unit, and each of this package's own all-reduces. Output:
nothing, or an error on every rank that names the units and the ranks.

[Note: same units on all ranks] Collectives are paired by position. If one rank gathers a unit while another gathers or
reduces a different one, the values of both are wrong, or the ranks wait for each other until the time-out. So each rank
keeps a log of the units that it gathers and reduces. It is compared in three ways, none of which is a collective:

1. Ranks of one host share a *board* in memory. Before a collective, a rank writes its entry on the board and reads
   those of the other ranks. If an entry differs, the collective does not begin. A rank that already waits in its own
   collective is released: the others take part in it, and then all raise.
2. Ranks of several hosts compare a digest of the log, which travels with the next all-reduce that this package makes:
   that of the gradient norm, or that of an agreement (`agreement.any_rank`), for example before a checkpoint is saved.
3. A rank that makes no progress for a few seconds publishes its log in the store of the process group. If the logs of
   two ranks differ, or all ranks wait in different calls, they close their connections, so that every rank raises:
   [Note: watched logs] in `unit_watcher`.

Of an accelerator, ranks that are ahead have queued collectives that the others never join, so an error of 1. or 2.
leaves the groups unusable: [Note: groups after a failure] in `unusable_groups`. If a rank fails between the entry and
its collective, because memory runs out, it adds an entry that no other rank has.

A rank that is slow, because it loads data or compiles, causes no error: its log is a part of the logs of the others,
and it does not wait in a collective.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import ref

import torch
import torch.distributed as dist

from fsdp2_strategy.distributed.equal_values import digest_numbers, is_equal
from fsdp2_strategy.distributed.lost_ranks import (
    agreed_error,
    collective_in_progress,
    current_call,
    disconnect,
    is_lost_rank,
    names_of_calls,
    report_divergence,
    reported_divergence,
)
from fsdp2_strategy.distributed.process_group import control_device, group_in_use, ranks_of
from fsdp2_strategy.distributed.spent_time import other_ranks
from fsdp2_strategy.distributed.unit_watcher import PublishedLog, Watcher
from fsdp2_strategy.distributed.unusable_groups import check_groups, is_asynchronous, mark_unusable
from fsdp2_strategy.errors import StepError

_LENGTH = 1024
"""How many entries of each rank the board holds."""
_MOST_ENTRIES = 50_000
"""From this number on, a digest takes the place of earlier entries, in programs that make no comparison for long."""
_MOST_PUBLISHED = 2000
_ENTERED, _REFUSED = 1, 2
_SECONDS_AFTER_FAILURE = 10.0

Action = Literal["takes an optimizer step", "makes another collective call, or has failed"]
"""What this package's own all-reduces are for, as a predicate of "rank 1"."""

OtherAction = Literal[
    "compares values with the other ranks", "gathers values on rank 0", "gets a value from rank 0", "waits in a barrier"
]
"""Other collectives of this package that may be the first of a call, as predicates of "rank 1"."""
_DIGEST_BYTES = hashlib.sha256().digest_size
"""How many bytes ranks compare in `agreement.check_equal`."""


class UnitLog:
    """The log of one process group; see [Note: same units on all ranks]. To create one is collective.

    `begin`, `end`, `run` and `all_reduce` raise a `StepError` on every rank if another rank does something else.
    """

    def __init__(self, group: Any) -> None:
        self._group = ref(group)
        self.ranks = ranks_of(group)
        self.own = dist.get_rank(group)
        """The place of this rank in ``ranks``."""
        self._texts: dict[int, str] = {}
        self._helpers: dict[int, Callable[[], bool]] = {}
        self._entries = _Entries(0)
        """Entries since the last comparison of digests."""
        self._count = 0
        """Number of entries so far."""
        self._call: str | None = None
        """The call of this package in which this rank has added its last entry, if it was in one."""
        self._is_inside = False
        """Whether this rank is in the collective of its last entry."""
        self._failed_at: int | None = None
        """The place of a failure of this rank that the other ranks may not have reached yet."""
        self._handled = 0
        """Number of entries up to the last error."""
        self._actions = {action: self.register(action, "", lambda: False) for action in get_args(Action)}
        self._others = {
            action: self.register(action, "", functools.partial(_join, action, self._group))
            for action in get_args(OtherAction)
        }
        self._board = _Board.shared_by(group)
        self._watcher = Watcher(self) if len(self.ranks) > 1 else None
        token = [secrets.token_hex(8)]
        dist.broadcast_object_list(token, group_src=0, group=group)
        self.name = token[0]
        """A name that no other log has."""
        self.models = 0
        """Number of models whose units the log has; the ranks have prepared them in the same order."""
        if self._watcher is not None:
            self._watcher.start()

    def register(self, text: str, key: str, help_others: Callable[[], bool]) -> int:
        """Return the entry of an action, such as "gathers layers.0 of Llama", which is equal on all ranks.

        ``key`` distinguishes actions of the same text. ``help_others`` takes part in this collective without using its
        result, for ranks that have begun it, and returns whether it could.
        """
        entry = _hash(f"{text}/{key}")
        self._texts[entry] = text
        self._texts[_failure_of(entry)] = f"has failed where it {text}"
        self._helpers[entry] = help_others
        return entry

    def all_reduce(self, total: torch.Tensor, action: Action) -> None:
        """All-reduce numbers in float64 over the ranks of the group, noted in the log as an action."""
        reduce = functools.partial(dist.all_reduce, total, group=self._group())
        self.run(self._actions[action], reduce, length=len(total))

    def begin(self, entry: int, length: int = 0) -> None:
        """Note that this rank begins a collective, which sums ``length`` numbers if it is an `all_reduce`."""
        check_groups("continue")
        place, self._call = self._count, current_call()
        self._count += 1
        if len(self._entries) == _MOST_ENTRIES:
            self._entries = _Entries(self._entries.epoch + 1, [_hash(repr(list(self._entries)))])
        self._entries.append(entry)
        self._is_inside = True
        if self._watcher is not None:
            self._watcher.start()
        if self._board is None:
            return
        if self._failed_at is not None:  # the others may find out, before this rank queues another collective
            self._board.wait_for_all(self._failed_at, _SECONDS_AFTER_FAILURE)
            self._failed_at = None
        earlier = self._board.conflict
        call = 0 if self._call is None else _hash_of_call(self._call)
        if not self._board.enter(place, entry, length, call, after=self._handled):
            if self._handled < earlier <= place and is_asynchronous(self._group()):  # this rank is ahead of others
                self._is_inside = False
                self._raise_conflict(earlier - 1)
            self._refuse(place)

    def end(self) -> None:
        """Note that this rank's collective has ended."""
        self._is_inside = False
        # Ranks that are ahead may have a conflict in a collective that this rank has yet to begin.
        if self._board is not None and self._handled < self._board.conflict <= self._count:
            self._raise_conflict(self._board.conflict - 1)

    def run(self, entry: int, collective: Callable[[], Any], length: int = 0) -> Any:
        """Run a collective between `begin` and `end`."""
        try:
            self.begin(entry, length)
            with nullcontext() if is_asynchronous(self._group()) else other_ranks:
                result = collective()
        except RuntimeError as error:
            self._is_inside = False
            if is_asynchronous(self._group()) and not getattr(error, "is_agreed", False):
                self._note_failure(entry)
            if not isinstance(error, StepError) and is_lost_rank(error) and (text := reported_divergence(wait=True)):
                raise agreed_error(text) from error
            raise
        self.end()
        return result

    def _note_failure(self, entry: int) -> None:
        """Add an entry for a collective that this rank has failed in, and that the other ranks may have queued."""
        failed = _failure_of(entry)
        self._entries.append(failed)
        if self._board is not None:
            self._board.enter(self._count, failed, 0, 0, after=self._handled)
            self._board.refuse(self._count)
            self._failed_at = self._count
        self._count += 1

    # --- comparison of digests --------------------------------------------------------------------------------------

    def numbers(self) -> list[float]:
        """Return the numbers to sum over the ranks for `check`."""
        return digest_numbers(self._entries)

    def check(self, sums: list[float]) -> None:
        """Raise if the ranks' entries since the last call differ, by the sums of `numbers`; collective if they do."""
        entries = list(self._entries)
        self._entries = _Entries(self._entries.epoch + 1)
        if is_equal(sums, len(self.ranks)):
            return
        logs: list[list[int]] = [[]] * len(self.ranks)
        dist.all_gather_object(logs, entries, group=self._group())
        texts: list[dict[int, str]] = [{}] * len(self.ranks)
        dist.all_gather_object(texts, self._texts, group=self._group())
        self._texts = {entry: text for of_rank in texts for entry, text in of_rank.items()}
        place = next(i for i in range(max(map(len, logs))) if len({tuple(log[i : i + 1]) for log in logs}) > 1)
        raise self._error(self._message([log[place] if place < len(log) else None for log in logs]))

    # --- the board --------------------------------------------------------------------------------------------------

    def _refuse(self, place: int) -> None:
        """Release ranks that have begun a collective which this rank does not take part in, and raise."""
        assert self._board is not None
        self._is_inside = False
        begun = self._board.begun(place)
        if begun is not None:
            self._is_inside = True  # the watcher ends this if a rank never comes
            if not self._help(*begun):
                report_divergence(self._message(self._board.entries(place), self._board.calls()))
                disconnect()
            self._is_inside = False
        self._raise_conflict(place)

    def _help(self, entry: int, length: int) -> bool:
        """Take part in a collective without using its result; return whether this was possible."""
        if length:
            device = control_device()
            dist.all_reduce(torch.zeros(length, dtype=torch.float64, device=device), group=self._group())
            return True
        help_others = self._helpers.get(entry)
        return help_others is not None and help_others()

    def _raise_conflict(self, place: int) -> None:
        assert self._board is not None
        self._board.wait_for_all(place)
        entries, calls = self._board.entries(place), self._board.calls()
        self._handled = place + 1
        self._entries = _Entries(self._entries.epoch + 1)
        raise self._error(self._message(entries, calls))

    def _error(self, text: str) -> StepError:
        """Return the error of ranks that run different units, after which groups of an accelerator are unusable."""
        if is_asynchronous(self._group()):
            mark_unusable(text.removeprefix("cannot continue: ").partition(", expected")[0])
        return agreed_error(text)

    def _message(self, entries: list[int | None], calls: Sequence[str | None] = ()) -> str:
        """Return the text of an error, by the entry of each rank, and the call of this package that each is in."""
        are_calls = {*self._others.values(), self._actions["makes another collective call, or has failed"]}
        calls = calls or [None] * len(entries)

        def text(entry: int | None, call: str | None) -> str:
            if entry is None:
                return "ran nothing further"
            found = self._texts.get(entry, "runs a unit of another model")
            return f"{found} in {call}" if call is not None and entry in are_calls else found

        of_ranks = list(zip(self.ranks, entries, calls, strict=True))
        each = ", ".join(f"rank {rank} {text(entry, call)}" for rank, entry, call in of_ranks)
        if are_calls.intersection(entries):
            named = sorted({call for _, entry, call in of_ranks if call is not None and entry in are_calls})
            return (
                f"cannot continue: the ranks make different calls: {each}, expected the same calls in the same order "
                f"on every rank. Call {', '.join(named) or 'it'} on every rank: look for a condition such as 'if rank "
                "== 0' around the call, and for a rank that runs fewer steps."
            )
        return (
            f"cannot continue: the ranks run different units: {each}, expected the same units in the same order on "
            "every rank, and equally many passes. Ranks may skip different entries of a ModuleList or ModuleDict, if "
            "all ranks run them in one order. For other modules that only some ranks run, set conditional_modules. If "
            "only some ranks have images, set mixed_mm_data."
        )

    # --- the watcher ------------------------------------------------------------------------------------------------

    def has_group(self) -> bool:
        """Return whether the process group still exists."""
        return self._group() is not None

    def look(self) -> tuple[int, bool]:
        """Return the number of entries, and whether the main thread waits in a collective; for the watcher."""
        return self._count, self._is_inside or collective_in_progress(self.ranks) is not None

    @property
    def is_releasing(self) -> bool:
        """Whether ranks of this host are being released from a collective, which a slow rank may delay."""
        return self._board is not None and self._board.conflict > self._handled

    def to_publish(self) -> PublishedLog:
        """Return what other ranks need of this log."""
        known = self._entries
        length = len(known)  # the main thread may add entries meanwhile, or empty the log
        first = max(0, length - _MOST_PUBLISHED)
        entries = known[first:length]
        return PublishedLog(
            epoch=known.epoch,
            count=self._count,
            first=first,
            entries=entries,
            texts={str(entry): self._texts[entry] for entry in set(entries) & self._texts.keys()},
            waits_in=collective_in_progress(self.ranks) or ("a collective" if self._is_inside else None),
            call=self._call,
        )

    def difference(self, logs: Mapping[int, PublishedLog]) -> str | None:
        """Return the message for the first entry that differs between logs that have it; None if there is none."""
        if not logs:
            return None
        for each in logs.values():
            self._texts |= {int(entry): text for entry, text in each.texts.items()}
        first = max(log.first for log in logs.values())
        last = max(log.first + len(log.entries) for log in logs.values())
        for place in range(first, last):
            entries: list[int | None] = [None] * len(self.ranks)
            for i, log in logs.items():
                if place - log.first < len(log.entries):
                    entries[i] = log.entries[place - log.first]
            if len(set(entries) - {None}) > 1:
                return self._message(entries, [logs[i].call if i in logs else None for i in range(len(self.ranks))])
        return None


class _Entries(list[int]):
    """Entries since the log was emptied, and how often it was; another thread finds that both belong together."""

    def __init__(self, epoch: int, entries: Iterable[int] = ()) -> None:
        super().__init__(entries)
        self.epoch = epoch


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


_hash_of_call = functools.cache(_hash)


def _join(action: OtherAction, group_in_use: ref[Any]) -> bool:
    """Take part in a collective of `run_noted` without using its result, for ranks that have begun it."""
    group = group_in_use()
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    match action:
        case "compares values with the other ranks":
            digest = torch.zeros(_DIGEST_BYTES, dtype=torch.uint8, device=control_device())
            dist.all_gather([torch.empty_like(digest) for _ in range(ranks)], digest, group=group)
        case "gathers values on rank 0":
            dist.gather_object(None, None if own else [None] * ranks, group_dst=0, group=group)
        case "gets a value from rank 0":
            dist.broadcast_object_list([None], group_src=0, group=group, device=control_device())
        case "waits in a barrier":
            dist.barrier(group=group)
    return True


def _failure_of(entry: int) -> int:
    """Return the entry of a rank that has failed between an entry and its collective."""
    return _hash(f"failed/{entry}")


class _Board:
    """Memory that the ranks of one host share: how far each rank is, and its last entries."""

    # Number of entries; status of the last one; its length, if it is an all-reduce of numbers; hash of its call.
    _FIELDS = 4

    def __init__(self, memory: mmap.mmap, own: int, ranks: int) -> None:
        self._memory = memory
        self._numbers = memoryview(memory).cast("q")
        self._own, self._ranks = own, ranks
        self._others = [i for i in range(ranks) if i != own]

    @staticmethod
    def size(ranks: int) -> int:
        return 8 * (1 + ranks * (_Board._FIELDS + _LENGTH))

    @staticmethod
    def shared_by(group: Any) -> _Board | None:
        """Return the board of a group, all ranks of which are on one host; None if they are not; collective."""
        ranks, own = dist.get_world_size(group), dist.get_rank(group)
        if ranks == 1:
            return None
        offer: list[Any] = [None]
        path = None
        if own == 0:
            with contextlib.suppress(OSError):
                folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
                handle, path = tempfile.mkstemp(prefix="fsdp2_strategy-", dir=folder)
                try:
                    # Not a sparse file: if the memory were full, writing to it later would end the process.
                    os.posix_fallocate(handle, 0, _Board.size(ranks))
                finally:
                    os.close(handle)
                offer = [(path, Path(path).stat().st_ino, _boot())]
        dist.broadcast_object_list(offer, group_src=0, group=group)
        memory = None if offer[0] is None else _Board._opened(*offer[0], size=_Board.size(ranks))
        opened: list[bool] = [False] * ranks
        dist.all_gather_object(opened, memory is not None, group=group)
        if path is not None:
            Path(path).unlink(missing_ok=True)
        return _Board(memory, own, ranks) if memory is not None and all(opened) else None

    @staticmethod
    def _opened(path: str, inode: int, boot: str, *, size: int) -> mmap.mmap | None:
        if boot != _boot():
            return None
        with contextlib.suppress(OSError, ValueError):
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = os.fstat(handle)
                if found.st_ino == inode and found.st_size == size and found.st_uid == os.getuid():
                    return mmap.mmap(handle, size)
            finally:
                os.close(handle)
        return None

    def _place_of(self, rank: int) -> int:
        return 1 + rank * (self._FIELDS + _LENGTH)

    @property
    def conflict(self) -> int:
        """Number of entries up to the last one that differed between ranks; 0 if none did."""
        return self._numbers[0]

    def enter(self, place: int, entry: int, length: int, call: int, *, after: int) -> bool:
        """Write this rank's entry at ``place``; return whether all other ranks that have got as far have the same one.

        A conflict up to ``after`` entries is over.
        """
        numbers, own = self._numbers, self._place_of(self._own)
        numbers[own + self._FIELDS + place % _LENGTH] = entry
        numbers[own + 2], numbers[own + 3] = length, call
        numbers[own] = place + 1
        is_same = not after < numbers[0] <= place + 1
        for rank in self._others:
            other = self._place_of(rank)
            ahead = numbers[other] - place
            if 0 < ahead < _LENGTH and numbers[other + self._FIELDS + place % _LENGTH] != entry:
                is_same = False
        if not is_same:
            numbers[0] = max(numbers[0], place + 1)
        numbers[own + 1] = 4 * place + (_ENTERED if is_same else _REFUSED)
        return is_same

    def refuse(self, place: int) -> None:
        """Write that this rank takes part in no collective at a place."""
        self._numbers[self._place_of(self._own) + 1] = 4 * place + _REFUSED

    def begun(self, place: int) -> tuple[int, int] | None:
        """Return entry and length of a collective at this place that another rank has begun; None if none has."""
        until = time.monotonic() + 5
        for rank in self._others:
            other = self._place_of(rank)
            while self._numbers[other] > place and self._numbers[other + 1] < 4 * place + _ENTERED:
                if time.monotonic() > until:
                    break
                time.sleep(0.001)
            if self._numbers[other] > place and self._numbers[other + 1] == 4 * place + _ENTERED:
                return self._numbers[other + self._FIELDS + place % _LENGTH], self._numbers[other + 2]
        return None

    def wait_for_all(self, place: int, seconds: float = 2) -> None:
        """Wait a moment for the other ranks, whose entries are parts of the message."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and None in self.entries(place):
            time.sleep(0.005)

    def entries(self, place: int) -> list[int | None]:
        """Return the entry of each rank at a place; None where a rank has not got as far."""
        return [
            self._numbers[begin + self._FIELDS + place % _LENGTH] if self._numbers[begin] > place else None
            for begin in map(self._place_of, range(self._ranks))
        ]

    def calls(self) -> list[str | None]:
        """Return the name of the call of this package in which each rank has added its last entry."""
        names = {_hash_of_call(name): name for name in names_of_calls}
        return [names.get(self._numbers[self._place_of(rank) + 3]) for rank in range(self._ranks)]


@functools.cache
def _boot() -> str:
    """Return an identifier of this host since it was started."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text() if file.exists() else os.uname().nodename


_logs: dict[int, UnitLog] = {}
"""By the identity of the process group."""


def current_log() -> UnitLog | None:
    """Return the log of the group in use; None if `begin_log` was not called for it; not collective."""
    group = _current_group()
    log = _logs.get(id(group))
    return log if log is not None and log._group() is group else None


def begin_log() -> UnitLog:
    """Return the log of the group in use; collective at the first call for a group."""
    log = current_log()
    if log is None:
        for key in [key for key, other in _logs.items() if other._group() is None]:
            del _logs[key]
        group = _current_group()
        log = _logs[id(group)] = UnitLog(group)
    return log


def run_noted(action: OtherAction, collective: Callable[[], object]) -> None:
    """Run a collective of the group in use, noted in its log if there is one; raises as `UnitLog` does."""
    log = current_log()
    if log is None:
        collective()
    else:
        log.run(log._others[action], collective)


def _current_group() -> Any:
    return group_in_use() or dist.group.WORLD
