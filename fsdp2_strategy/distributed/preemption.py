"""Being told to stop: a signal that reaches some ranks at some moment, as one answer that all ranks give alike.

Input: SIGTERM, from a scheduler, from torchrun on its way out, or from an operator. Output: yes or no, between steps.

A process that is killed loses the steps since its last checkpoint. One that is asked first can save, if it hears the
question at a point where a checkpoint can be taken, and if all ranks hear it at the same point.
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
    """What this process knows of the signal, for all that ask: signals come to processes."""

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
        else:  # a child that was forked off, or nobody asks any more: it means what it meant before
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_watch = _Watch()


class Preemption:
    """Whether this run was told to stop."""

    def __init__(self) -> None:
        self._watching = self._ended = False

    def said(self) -> bool:
        """Say whether any rank was told to stop, now or before; collective, the same on every rank.

        From the first call on, SIGTERM no longer ends this process. More of them change nothing: schedulers signal
        every process, and torchrun hands on what it gets.

        Raises:
            StepError: the first call is not in the main thread, which alone may watch for signals; or it was ended.
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
        """Let the signal do what it did before, once nobody asks any more."""
        if self._watching:
            _watch.end()
        self._watching, self._ended = False, True
