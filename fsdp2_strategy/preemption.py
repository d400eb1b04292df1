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

from fsdp2_strategy.errors import StepError
from fsdp2_strategy.ranks import any_rank, log

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """Whether this run was told to stop."""

    def __init__(self) -> None:
        self._told = self._signalled = self._watching = False
        self._before: _Handler = None
        self._process = 0

    def said(self) -> bool:
        """Say whether any rank was told to stop, now or before; collective, the same on every rank.

        From the first call on, SIGTERM no longer ends this process. More of them change nothing: schedulers signal
        every process, and torchrun hands on what it gets.

        Raises:
            StepError: the first call is not in the main thread, which alone may watch for signals.
        """
        if not self._watching:
            self._watch()
        if self._told:
            return True  # it was agreed on
        self._told = any_rank(self._signalled)
        if self._told:
            log("told to stop: save, and leave", level=logging.WARNING)
        return self._told

    def end(self) -> None:
        """Let the signal do what it did before."""
        if self._watching and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
            self._watching = False

    def _watch(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise StepError(
                "cannot watch for SIGTERM: this is not the main thread, expected it, for Python lets no other handle "
                "signals. Call preempted() there once, before the first step."
            )
        self._before = signal.signal(signal.SIGTERM, self._hear)
        self._watching, self._process = True, os.getpid()

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._signalled = True
        else:  # a child that was forked off, whose parent means it to end
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
