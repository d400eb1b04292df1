"""Which episodes are in: fetched by threads before workers ask for them, and let go once no sample of theirs is left.

Input: the episodes of the present block of the order and of the next, as the loader tells. Output: calls that fetch an
episode or let it go, each episode's in this order.
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
    """Hold episodes.

    Args:
        want: is told all episodes that are to be fetched.
        fetch: gets an episode; called on threads. What fails there is left to the worker that reads the episode.
        let_go: gives up an episode.
        bytes_on_disk: how much is held.
        most_bytes: from where on nothing is fetched ahead; None for no limit.
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
        """Let go of all other episodes, and fetch these, the present ones first; returns at once.

        Raises:
            DataError: the present ones take more room than there may be.
        """
        if self._error is not None:
            raise self._error
        if self._is_open and (now, soon) == (self._now, self._soon):
            return
        with self._changed:
            gone = self._held.union(self._now, self._soon)  # workers fetch what threads were too late for
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
        """End the threads when they are through with what they fetch; the next `hold` starts others.

        One that waits for a server for more than some seconds is left to end by itself, so that an error of the
        trainer's is not kept back.
        """
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        until = time.monotonic() + _LAST_SECONDS
        while self._threads:
            self._threads.pop().join(max(0.0, until - time.monotonic()))

    def end_with(self, owner: object) -> None:
        """End the threads when something is gone, or the interpreter ends: it must not find them at work."""
        weakref.finalize(owner, _end, self, os.getpid())

    def _run(self) -> None:
        while (episode := self._next()) is not None:
            try:
                self._fetch(episode)
            except CorruptDataError:
                pass  # whoever reads the episode says so
            except Exception as error:  # noqa: BLE001  whoever reads the episode meets it again, and raises it
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
        except DataError as error:  # it is deleted with the folder
            logger.warning("cannot let go of episode %d: %s", episode, error)

    def _next(self) -> int | None:
        """Return an episode to fetch, once there is one; None where there is nothing to do any more."""
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
