"""Saves behind the trainer's back: one copy of what this rank writes, and a thread that does the rest.

Input: what to write, as tensors that go on changing; and the work that follows. Output: the same in host memory of our
own, the work done on a thread, and its failure at the next call.

[Note: behind the trainer] The thread talks to those of the other ranks on a process group of its own, so that their
collectives never mix with the trainer's. One save is in flight at a time. What fails there fails on every rank alike
([Note: one decision] in `agreement`), and is raised where the trainer next comes by: at a save, a load, `wait` or
`close`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.distributed.process_group import (
    adopt_device,
    current_device,
    group_among,
    group_in_use,
    group_timeout,
    is_rank_0,
    on_group,
    ranks_of,
)
from fsdp2_strategy.errors import CheckpointError, FSDP2StrategyError
from fsdp2_strategy.model.offload import CopyQueue

_ALIGNMENT = 64


class _End(NamedTuple):
    """Where the last copy ends."""

    slab: int
    filled: int


class Staging:
    """Host memory for one copy of what a rank writes, kept from one save to the next, whichever model it is of."""

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._end = _End(0, 0)
        self._buffers: list[tuple[torch.Tensor, _End]] = []
        """Of this save, and from `_given` on those of the save before; each with where it ends."""
        self._given = 0

    def begin(self) -> None:
        """Overwrite the copies of the save before."""
        self._end, self._given = _End(0, 0), 0

    def copies_of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of tensors as they are now, whatever becomes of these."""
        copies = [self._buffer_for(tensor) for tensor in tensors]
        with CopyQueue() as queue:
            queue.copy_all(copies, tensors)
        return copies

    def clear(self) -> None:
        """Give the memory back."""
        self._slabs.clear()
        self._buffers.clear()
        self.begin()

    def _buffer_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for a copy: the view of the save before, as long as shapes and dtypes are in the same order."""
        if self._given < len(self._buffers):
            buffer, end = self._buffers[self._given]
            if buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
                self._given, self._end = self._given + 1, end
                return buffer
            del self._buffers[self._given :]
        buffer = self._new_buffer_for(tensor)
        self._buffers.append((buffer, self._end))
        self._given += 1
        return buffer

    def _new_buffer_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory in the slab that is being filled, or the next one that has room."""
        (slab, begin), nbytes = self._end, tensor.nbytes
        while slab < len(self._slabs) and begin + nbytes > self._slabs[slab].numel():
            slab, begin = slab + 1, 0
        if slab == len(self._slabs):
            size = max(sizes.STAGING_BYTES, nbytes)
            self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
        self._end = _End(slab, begin + -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        return self._slabs[slab][begin : begin + nbytes].view(tensor.dtype).view(tensor.shape)


class _Save:
    """A save in flight."""

    def __init__(self, name: str, work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
        self._error: BaseException | None = None
        self._work: Callable[[], None] | None = work
        self._name, self._group, self._device = name, group, current_device()
        self._ended = threading.Event()  # a `Thread.join` that is interrupted takes its thread for ended (Python 3.11)
        threading.Thread(target=self._run, name=f"save {name}").start()

    def _run(self) -> None:
        assert self._work is not None
        try:
            adopt_device(self._device)
            with on_group(self._group):
                self._work()
        except BaseException as error:  # noqa: BLE001  torch's report of failing ranks is one; all are raised by `result`
            self._error = error
            if is_rank_0() or not isinstance(error, FSDP2StrategyError):  # else all ranks have the same
                message = "saving %s failed, which the next save, load, wait or close raises: %s"
                logger.error(message, self._name, error)
        finally:
            self._work = None  # it holds what was saved
            self._ended.set()

    def join(self) -> None:
        """Return when it has ended."""
        self._ended.wait()

    def result(self) -> None:
        """Raise its failure.

        Raises:
            CheckpointError: it has failed; also where another rank is gone.
        """
        if isinstance(self._error, Exception) and not isinstance(self._error, FSDP2StrategyError):
            raise CheckpointError(f"cannot save {self._name}: {self._error}") from self._error
        if self._error is not None:
            raise self._error


def _at_exit() -> None:
    """Wait before the interpreter ends its thread pools: a program that ends by itself gets what it asked for."""
    with contextlib.suppress(Exception):  # it is in the log
        wait()


# Ahead of that of concurrent.futures, which was registered before; atexit comes after both.
threading._register_atexit(_at_exit)  # type: ignore[attr-defined]

_staging = Staging()
_in_flight: list[_Save] = []
_groups: dict[dist.ProcessGroup | None, dist.ProcessGroup] = {}
_default_groups: list[Any] = []
"""The default group that they belong to."""


def staging() -> Staging:
    """Return this process's memory for copies; free once `wait` has returned."""
    return _staging


def behind(name: str, work: Callable[[], None]) -> None:
    """Do work on a thread, on a process group of its own; collective the first time. See [Note: behind the trainer]."""
    wait()
    _in_flight.append(_Save(name, work, _own_group()))


def wait() -> None:
    """Return when no save is in flight; not collective, but the same on every rank.

    Raises:
        CheckpointError: the one that was has failed; it is raised once.
    """
    while _in_flight:
        save = _in_flight[0]
        save.join()  # one that is interrupted here is still in flight
        _in_flight.remove(save)
        save.result()


def end() -> None:
    """Wait, and give the memory back.

    Raises:
        CheckpointError: see `wait`.
    """
    try:
        wait()
    finally:
        if not _in_flight:
            _staging.clear()


def forget_groups() -> None:
    """Drop the groups of these threads, which end with the default one, before that does; not collective."""
    _groups.clear()
    _default_groups.clear()


def _own_group() -> dist.ProcessGroup:
    """Return the group of these threads: the ranks of the group in use, and its time-out."""
    if any(group is not dist.group.WORLD for group in _default_groups):
        forget_groups()
    _default_groups[:] = [dist.group.WORLD]
    group = group_in_use()
    if group not in _groups:
        options: dict[str, Any] = {"backend": "gloo", "timeout": group_timeout()}
        _groups[group] = dist.new_group(**options) if group is None else group_among(ranks_of(group), **options)
    return _groups[group]
