"""Catch SIGTERM and report it to all ranks between two steps.

Input: SIGTERM from a scheduler, from torchrun or from a person. Output: a bool that is the same on every rank.

A run that is killed loses the steps since its last checkpoint. To save a checkpoint before the end, all ranks must
learn of the signal at the same point of the training loop, between two steps.
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
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.errors import StepError

_Handler = Callable[[int, FrameType | None], Any] | int | None


class _SignalState:
    """The SIGTERM handler of this process, shared by all `Preemption` objects."""

    def __init__(self) -> None:
        self.users = 0
        self.received = False  # by this rank
        self.agreed = False  # received by any rank, and known to all
        self._process = 0
        self._previous: _Handler = None

    def add_user(self) -> None:
        if self._process != os.getpid():
            self.users, self.received, self.agreed = 0, False, False  # those of the process that this was forked from
        if not self.users:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._process = os.getpid()
        self.users += 1

    def remove_user(self) -> None:
        self.users -= 1
        if not self.users:
            self.received = self.agreed = False
            if _is_main_thread() and signal.getsignal(signal.SIGTERM) == self._on_signal:
                signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._process and self.users:
            self.received = True
        else:  # a forked child, or no `Preemption` is open any more: use the default action
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_state = _SignalState()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Preemption:
    """Detect whether a rank of this run has received SIGTERM."""

    def __init__(self) -> None:
        self._is_open = self._is_closed = False

    @collective
    def requested(self) -> bool:
        """Return whether any rank has received SIGTERM since the first call; collective, the same on every rank.

        The first call installs a signal handler. From then until `close`, SIGTERM does not end this process. A process
        may receive SIGTERM several times, because schedulers signal every process and torchrun forwards the signal.
        Only the first SIGTERM has an effect.

        Raises:
            StepError: `close` was called, or the first call is not in the main thread. Python installs signal handlers
                in the main thread only.
        """
        if self._is_closed:
            raise StepError("cannot check for SIGTERM: the strategy is closed. Call preempted() before close().")
        if not self._is_open:
            if not _is_main_thread():
                raise StepError(
                    "cannot install the handler of SIGTERM: signal handlers can only be installed from the main "
                    "thread. Call preempted() there once, before the first step."
                )
            _state.add_user()
            self._is_open = True
        if not _state.agreed and any_rank(_state.received):
            _state.agreed = True
            log("a rank received SIGTERM: save a checkpoint and exit", level=logging.WARNING)
        return _state.agreed

    def close(self) -> None:
        """Stop checking for SIGTERM; the last open `Preemption` of the process restores the previous signal handler."""
        if self._is_open:
            _state.remove_user()
        self._is_open, self._is_closed = False, True
