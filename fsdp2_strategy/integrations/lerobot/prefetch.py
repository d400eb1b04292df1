"""Fetch episodes on threads before workers need them, and release episodes that are no longer needed.

Input: the current and the next episodes, from the loader. Output: calls that fetch and release episodes. An episode is
never released while a thread fetches it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable

from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.errors import CorruptDataError, DataError, counted

_THREADS = 4
_PAUSE_SECONDS = 5.0


class EpisodePrefetcher:
    """Threads that fetch episodes; `hold` sets the episodes to fetch, and releases the others.

    ``set_wanted`` gets all current and next episodes before they are fetched. Errors of ``fetch`` are not raised,
    because the worker that reads the episode raises them. Above ``max_bytes``, the next episodes are not fetched.
    """

    def __init__(
        self,
        set_wanted: Callable[[Iterable[int]], None],
        fetch: Callable[[int], None],
        release: Callable[[int], None],
        used_bytes: Callable[[], int],
        max_bytes: int | None,
    ) -> None:
        self._set_wanted, self._fetch, self._release = set_wanted, fetch, release
        self._used_bytes, self._max_bytes = used_bytes, max_bytes
        self._now: list[int] = []
        self._soon: list[int] = []
        self._started: set[int] = set()
        """Episodes that threads have fetched or are fetching, and that are not released."""
        self._in_progress: set[int] = set()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._is_open = False
        self._error: DataError | None = None

    def hold(self, now: list[int], soon: list[int]) -> None:
        """Release all other episodes, and start to fetch these, the current ones first; see `LeRobotDataset.hold`."""
        if self._error is not None:
            raise self._error
        if self._is_open and (now, soon) == (self._now, self._soon):
            return
        with self._changed:
            before = self._started.union(self._now, self._soon)  # also those that only workers fetched
            self._now, self._soon = now, soon
            self._set_wanted([*now, *soon])
            for episode in before.difference(now, soon) - self._in_progress:
                self._release_episode(episode)
            self._is_open = True
            self._changed.notify_all()
        while len(self._threads) < _THREADS:
            self._threads.append(threading.Thread(target=self._run, name="fetch episodes", daemon=True))
            self._threads[-1].start()

    def pause(self) -> None:
        """End the threads; wait only for a few seconds for their fetches, so as not to delay errors of the trainer."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        until = time.monotonic() + _PAUSE_SECONDS
        while self._threads:
            self._threads.pop().join(max(0.0, until - time.monotonic()))

    def end_with(self, owner: object) -> None:
        """End the threads when ``owner`` is garbage-collected or the interpreter exits."""
        weakref.finalize(owner, self._end, os.getpid())

    def _end(self, process: int) -> None:
        if process == os.getpid():  # not in a forked child, which has none of the threads
            self.pause()

    def _run(self) -> None:
        while (episode := self._next()) is not None:
            try:
                self._fetch(episode)
            except CorruptDataError:
                pass  # the worker that reads the episode raises or logs it
            except Exception as error:  # noqa: BLE001  the worker that reads the episode raises it
                if self._is_open:
                    logger.warning("cannot fetch episode %d ahead of time: %s", episode, error)
            with self._changed:
                self._in_progress.remove(episode)
                if episode not in self._now and episode not in self._soon:
                    self._release_episode(episode)
                self._changed.notify_all()

    def _release_episode(self, episode: int) -> None:
        self._started.discard(episode)
        try:
            self._release(episode)
        except DataError as error:  # the files are deleted later, with the folder
            logger.warning("cannot delete the cached data of episode %d: %s", episode, error)

    def _next(self) -> int | None:
        """Wait for an episode to fetch, and return it; return None after `pause`."""
        with self._changed:
            while self._is_open:
                if (episode := self._missing()) is not None:
                    self._started.add(episode)
                    self._in_progress.add(episode)
                    return episode
                self._changed.wait()
            return None

    def _missing(self) -> int | None:
        for episode in self._now:
            if episode not in self._started:
                return episode
        if self._max_bytes is not None and (used := self._used_bytes()) > self._max_bytes:
            if not self._started.intersection(self._soon) and not self._in_progress and self._error is None:
                self._error = DataError(
                    f"cannot cache {counted(len(self._now), 'episode')}: this takes {used / 1e6:.0f} MB on the disk, "
                    f"expected at most the {self._max_bytes / 1e6:.0f} MB of disk_bytes. Lower pool, or raise "
                    "disk_bytes."
                )
            return None
        return next((episode for episode in self._soon if episode not in self._started), None)
