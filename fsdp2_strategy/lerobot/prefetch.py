"""Fetch episodes on threads before workers need them, and release them when none of their samples is needed any more.

Input: the present and the next episodes of the order, from the loader. Output: calls that fetch and release episodes;
an episode is never released while a thread fetches it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable

from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.errors import CorruptDataError, DataError

_THREADS = 4
_LAST_SECONDS = 5.0


class Staging:
    """Fetch episodes on threads, and release them; see `hold`.

    Args:
        want: called with all present and next episodes, before they are fetched.
        fetch: fetches an episode; called on threads. Errors are not raised here: the worker that reads the episode
            meets them again.
        let_go: releases an episode.
        bytes_on_disk: returns the disk space that is used.
        most_bytes: disk space above which the next episodes are not fetched; None for no limit.
    """

    def __init__(
        self,
        want: Callable[[Iterable[int]], None],
        fetch: Callable[[int], None],
        let_go: Callable[[int], None],
        bytes_on_disk: Callable[[], int],
        most_bytes: int | None,
    ) -> None:
        self._want, self._fetch, self._let_go = want, fetch, let_go
        self._bytes_on_disk, self._most_bytes = bytes_on_disk, most_bytes
        self._now: list[int] = []
        self._soon: list[int] = []
        self._held: set[int] = set()
        self._busy: set[int] = set()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._is_open = False
        self._error: DataError | None = None

    def hold(self, now: list[int], soon: list[int]) -> None:
        """Release all other episodes, and start to fetch these, the present ones first; does not wait for the threads.

        Raises:
            DataError: the present episodes of an earlier call took more disk space than allowed.
        """
        if self._error is not None:
            raise self._error
        if self._is_open and (now, soon) == (self._now, self._soon):
            return
        with self._changed:
            gone = self._held.union(self._now, self._soon)  # workers may have fetched those that are not held
            self._now, self._soon = now, soon
            self._want([*now, *soon])
            for episode in gone.difference(now, soon) - self._busy:
                self._end(episode)
            self._is_open = True
            self._changed.notify_all()
        while len(self._threads) < _THREADS:
            self._threads.append(threading.Thread(target=self._run, name="fetch episodes", daemon=True))
            self._threads[-1].start()

    def pause(self) -> None:
        """End the threads after their current fetches; the next `hold` starts new ones.

        The call waits only a few seconds, so that an error of the trainer is not delayed. A thread that needs longer,
        because it waits for a server, ends later.
        """
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        until = time.monotonic() + _LAST_SECONDS
        while self._threads:
            self._threads.pop().join(max(0.0, until - time.monotonic()))

    def end_with(self, owner: object) -> None:
        """End the threads when an object is garbage-collected or the interpreter exits, before Python is torn down."""
        weakref.finalize(owner, _end, self, os.getpid())

    def _run(self) -> None:
        while (episode := self._next()) is not None:
            try:
                self._fetch(episode)
            except CorruptDataError:
                pass  # the worker that reads the episode reports it
            except Exception as error:  # noqa: BLE001  the worker that reads the episode raises it
                if self._is_open:
                    logger.warning("cannot fetch episode %d ahead of time: %s", episode, error)
            with self._changed:
                self._busy.remove(episode)
                if episode not in self._now and episode not in self._soon:
                    self._end(episode)
                self._changed.notify_all()

    def _end(self, episode: int) -> None:
        self._held.discard(episode)
        try:
            self._let_go(episode)
        except DataError as error:  # its files are deleted with the folder
            logger.warning("cannot let go of episode %d: %s", episode, error)

    def _next(self) -> int | None:
        """Wait for an episode to fetch, and return it; return None after `pause`."""
        with self._changed:
            while self._is_open:
                if (episode := self._missing()) is not None:
                    self._held.add(episode)
                    self._busy.add(episode)
                    return episode
                self._changed.wait()
            return None

    def _missing(self) -> int | None:
        for episode in self._now:
            if episode not in self._held:
                return episode
        is_full = self._most_bytes is not None and self._bytes_on_disk() > self._most_bytes
        if is_full and not self._held.intersection(self._soon) and not self._busy and self._error is None:
            self._error = DataError(
                f"cannot hold {len(self._now)} episodes: they take {self._bytes_on_disk() / 1e6:.0f} MB on the disk, "
                f"expected at most the {(self._most_bytes or 0) / 1e6:.0f} MB of disk_bytes. Lower pool, or raise it."
            )
        return None if is_full else next((e for e in self._soon if e not in self._held), None)


def _end(staging: Staging, process: int) -> None:
    if process == os.getpid():
        staging.pause()
