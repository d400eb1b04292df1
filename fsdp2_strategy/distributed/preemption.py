"""Catch SIGTERM and report it to all ranks between two steps.

Input: SIGTERM from a scheduler, an ending torchrun or an operator. Output: a bool that is the same on every rank.

A process that is killed loses the steps since its last checkpoint. To save first, all ranks must learn of the signal at
the same point of the training loop, and a checkpoint must be possible there.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from fsdp2_strategy.distributed.agreement import any_rank
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.errors import StepError

_Handler = Callable[[int, FrameType | None], Any] | int | None


class _Watch:
    """The SIGTERM handler of this process, shared by all `Preemption` objects."""

    def __init__(self) -> None:
        self.users = 0
        self.signalled = self.told = False
        self._process = 0
        self._before: _Handler = None

    def begin(self) -> None:
        if not self.users:
            self._before = signal.signal(signal.SIGTERM, self._hear)
            self._process = os.getpid()
        self.users += 1

    def end(self) -> None:
        self.users -= 1
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not self.users:
            self.signalled = self.told = False
            if in_main_thread and signal.getsignal(signal.SIGTERM) == self._hear:
                signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._process and self.users:
            self.signalled = True
        else:  # a forked child, or no `Preemption` is open any more: use the default action
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_watch = _Watch()


class Preemption:
    """Whether this run received SIGTERM."""

    def __init__(self) -> None:
        self._watching = self._ended = False

    def said(self) -> bool:
        """Return whether any rank has received SIGTERM since the first call; collective, the same on every rank.

        The first call installs a handler; SIGTERM no longer ends this process. Repeated signals have no further effect:
        a process may receive several, because schedulers signal every process and torchrun forwards its own.

        Raises:
            StepError: `close` was called, or the first call is not in the main thread, where Python requires signal
                handlers to be installed.
        """
        if self._ended:
            raise StepError("cannot ask whether to stop: the strategy is closed, expected an open one. Ask before.")
        if not self._watching:
            if threading.current_thread() is not threading.main_thread():
                raise StepError(
                    "cannot watch for SIGTERM: this is not the main thread, expected it, for Python lets no other "
                    "handle signals. Call preempted() there once, before the first step."
                )
            _watch.begin()
            self._watching = True
        if not _watch.told and any_rank(_watch.signalled):
            _watch.told = True
            log("told to stop: save, and leave", level=logging.WARNING)
        return _watch.told

    def close(self) -> None:
        """Stop watching; the last open `Preemption` of the process restores the previous signal handler."""
        if self._watching:
            _watch.end()
        self._watching, self._ended = False, True
