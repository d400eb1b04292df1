"""Asynchronous saves: copy the tensors that this rank writes to host memory, and write them in a background thread.

Input: tensors that the trainer keeps changing, and a function that writes. Output: copies in reused host buffers, and
the function's error, which the next call raises.

[Note: background saves] The background threads of all ranks use a separate process group, so that their collectives
cannot mix with the trainer's. One save is in flight at a time. A save fails on all ranks or on none
([Note: agreed errors] in `agreement`). The next save, load, `wait` or `close` raises its error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.distributed.process_group import (
    current_device,
    group_among,
    group_in_use,
    group_timeout,
    is_rank_0,
    on_group,
    ranks_of,
    set_device,
)
from fsdp2_strategy.errors import CheckpointError, FSDP2StrategyError
from fsdp2_strategy.model.offload import CopyQueue

_ALIGNMENT = 64


class Staging:
    """Host buffers for the copies of one save, reused by the next save of any model."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._views: dict[tuple[int, int, torch.dtype, torch.Size], torch.Tensor] = {}
        """Views of the buffers by buffer, offset, dtype and shape; making them again takes longer than small copies."""
        self._current, self._filled_bytes = 0, 0
        """The buffer that the next copy goes into if it has room, and the bytes in use there."""

    def begin(self) -> None:
        """Start a save: allow the copies of the previous save to be overwritten."""
        self._current, self._filled_bytes = 0, 0

    def copy_to_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to host memory, wait for the copies, and return them."""
        copies = [self._allocate(tensor) for tensor in tensors]
        with CopyQueue() as queue:
            queue.copy_all(copies, tensors)
        return copies

    def clear(self) -> None:
        """Free the host memory."""
        self._buffers.clear()
        self._views.clear()
        self.begin()

    def _allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of unused bytes for a copy; add a buffer if none has enough."""
        index, begin, nbytes = self._current, self._filled_bytes, tensor.nbytes
        while index < len(self._buffers) and begin + nbytes > self._buffers[index].numel():
            index, begin = index + 1, 0
        if index == len(self._buffers):
            size = max(sizes.STAGING_BYTES, nbytes)
            self._buffers.append(torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
        self._current, self._filled_bytes = index, begin + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        key = (index, begin, tensor.dtype, tensor.shape)
        if key not in self._views:
            self._views[key] = self._buffers[index][begin : begin + nbytes].view(tensor.dtype).view(tensor.shape)
        return self._views[key]


class _Save:
    """A save in flight."""

    def __init__(self, name: str, work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
        self._error: BaseException | None = None
        self._work: Callable[[], None] | None = work
        self._name, self._group, self._device = name, group, current_device()
        self.ended = threading.Event()  # after an interrupted `Thread.join`, Python 3.11 reports the thread as ended
        threading.Thread(target=self._run, name=f"save {name}").start()

    def _run(self) -> None:
        assert self._work is not None
        try:
            set_device(self._device)
            with on_group(self._group):
                self._work()
        except BaseException as error:  # noqa: BLE001  torch raises a BaseException (CheckpointException)
            self._error = error
            if is_rank_0() or not isinstance(error, FSDP2StrategyError):  # these are the same on all ranks
                message = "saving %s failed; the next save, load, wait or close raises this error: %s"
                logger.error(message, self._name, error)
        finally:
            self._work = None  # free the copies that it refers to
            self.ended.set()

    def result(self) -> None:
        """Raise the error of the save, if it failed.

        Raises:
            CheckpointError: the save failed, for example because another rank ended.
        """
        if isinstance(self._error, Exception) and not isinstance(self._error, FSDP2StrategyError):
            raise CheckpointError(f"cannot save {self._name}: {self._error}") from self._error
        if self._error is not None:
            raise self._error


def _at_exit() -> None:
    """Wait for the save in flight before the interpreter shuts down its thread pools."""
    with contextlib.suppress(Exception):  # already logged
        wait()


# These functions run in reverse order, so ours runs before that of concurrent.futures. `atexit` functions run later.
threading._register_atexit(_at_exit)  # type: ignore[attr-defined]

_staging = Staging()
_in_flight: list[_Save] = []
_groups: WeakKeyDictionary[Any, dict[dist.ProcessGroup | None, dist.ProcessGroup]] = WeakKeyDictionary()
"""For each default group: the background group of each group in use."""


def staging() -> Staging:
    """Return this process's host buffers for copies; after `wait` they may be overwritten."""
    return _staging


def save_in_background(name: str, work: Callable[[], None]) -> None:
    """Run `work` in a background thread; the first call is collective. See [Note: background saves]."""
    wait()
    _in_flight.append(_Save(name, work, _own_group()))


def wait() -> None:
    """Wait until no save is in flight; not collective, but either all ranks raise or none.

    Raises:
        CheckpointError: the save failed. Its error is raised once.
    """
    while _in_flight:
        save = _in_flight[0]
        save.ended.wait()  # if this is interrupted, the save stays in flight
        _in_flight.remove(save)
        save.result()


def finish() -> None:
    """Wait until no save is in flight, and free the host memory; not collective.

    Raises:
        CheckpointError: see `wait`.
    """
    try:
        wait()
    finally:
        if not _in_flight:
            _staging.clear()


def forget_groups() -> None:
    """Drop the background process groups, before the default group is destroyed; not collective."""
    _groups.clear()


def _own_group() -> dist.ProcessGroup:
    """Return the background group with the ranks and time-out of the group in use; create it if needed (collective)."""
    groups, group = _groups.setdefault(dist.group.WORLD, {}), group_in_use()
    if group not in groups:
        options: dict[str, Any] = {"backend": "gloo", "timeout": group_timeout()}
        groups[group] = dist.new_group(**options) if group is None else group_among(ranks_of(group), **options)
    return groups[group]
