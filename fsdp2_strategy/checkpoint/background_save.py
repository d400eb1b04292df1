"""Save asynchronously: copy this rank's tensors to host memory, and write the copies in a background thread.

Input: tensors that the trainer changes later, and a function that writes a checkpoint. Output: copies of the tensors in
host buffers, and the error that the function raised, if any.

[Note: background saves] The background threads of all ranks use a separate process group, so that their collectives
cannot mix with the trainer's. Only one save is in flight at a time. A save fails on all ranks or on none
([Note: agreed errors] in `agreement`). If it fails, the next save, load, `wait` or `close` (of the strategy)
raises its error.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.device_order import DeviceOrder
from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.distributed.lost_ranks import add_note
from fsdp2_strategy.distributed.process_end import call_at_end
from fsdp2_strategy.distributed.process_group import (
    current_device,
    group_among,
    group_in_use,
    group_timeout,
    is_rank_0,
    on_group,
    ranks_of,
)
from fsdp2_strategy.errors import CheckpointError, FSDP2StrategyError
from fsdp2_strategy.model.offloading import CopyQueue

_ALIGNMENT = 64


class Staging:
    """Host buffers for the copies of one save. The next save reuses them, also if it saves another model."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._views: dict[tuple[int, int, torch.dtype, torch.Size], torch.Tensor] = {}
        """Views by buffer index, offset, dtype and shape. Cached: creating a view takes longer than a small copy."""
        self._first: tuple[list[tuple[torch.dtype, torch.Size]], list[torch.Tensor], int, int] = [], [], 0, 0
        """Of the first call of a save: dtypes and shapes, their views, and `_current` and `_filled_bytes` after it. The
        next save usually has the same tensors, for which finding each view would take longer than its copy."""
        self._current, self._filled_bytes = 0, 0
        """The index of the buffer that the next copy tries first, and the number of bytes in use in that buffer."""

    def begin(self) -> None:
        """Start a save, whose copies overwrite those of the previous save."""
        self._current, self._filled_bytes = 0, 0

    def copy_to_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to host memory, and return the copies once they are complete."""
        described = [(tensor.dtype, tensor.shape) for tensor in tensors]
        is_first = not self._current and not self._filled_bytes
        if is_first and self._first[0] == described:
            _, copies, self._current, self._filled_bytes = self._first
        else:
            copies = [self._allocate(tensor) for tensor in tensors]
            if is_first:
                self._first = described, copies, self._current, self._filled_bytes
        with CopyQueue() as queue:
            queue.copy_all(copies, tensors)
        return copies

    def clear(self) -> None:
        """Free the host memory."""
        self._buffers.clear()
        self._views.clear()
        self._first = [], [], 0, 0
        self.begin()

    def _allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of unused buffer bytes for a copy of ``tensor``; allocate another buffer if needed."""
        index, begin, nbytes = self._current, self._filled_bytes, tensor.nbytes
        while index < len(self._buffers) and begin + nbytes > self._buffers[index].numel():
            index, begin = index + 1, 0
        if index == len(self._buffers):
            size = max(sizes.STAGING_BYTES, nbytes)
            pinned = current_device().type != "cpu"
            self._buffers.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
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
        self._name, self._group, self._order = name, group, DeviceOrder.of_this_thread()
        self.ended = threading.Event()  # Python 3.11: an interrupted `Thread.join` marks a running thread as ended
        threading.Thread(target=self._run, name=f"save {name}").start()

    def _run(self) -> None:
        assert self._work is not None
        try:
            self._order.enter()
            with on_group(self._group):
                try:
                    self._work()
                except RuntimeError as error:
                    add_note(error, f"the save of {self._name}")
                    raise
        except BaseException as error:  # noqa: BLE001  any error ends the save; the trainer's thread raises it
            self._error = error
            if is_rank_0() or not isinstance(error, FSDP2StrategyError):  # our own errors are the same on all ranks
                message = "saving %s failed; the next save, load, wait_for_checkpoint or close raises this error: %s"
                logger.error(message, self._name, error)
        finally:
            self._work = None  # free the objects that the function refers to
            self.ended.set()

    def raise_if_failed(self) -> None:
        if isinstance(self._error, Exception) and not isinstance(self._error, FSDP2StrategyError):
            failed = CheckpointError(f"cannot save {self._name}: {self._error}")
            for note in getattr(self._error, "__notes__", []):
                failed.add_note(note)
            raise failed.with_traceback(self._error.__traceback__) from None
        if self._error is not None:
            raise self._error


def _at_exit() -> None:
    """Wait for the save in flight before the interpreter shuts down its thread pools."""
    with contextlib.suppress(Exception):  # already logged
        wait()


# concurrent.futures has registered its own at import, before this one, so the thread pools are shut down after it.
call_at_end(_at_exit)

_staging = Staging()
_in_flight: list[_Save] = []
os.register_at_fork(after_in_child=_in_flight.clear)  # a forked child lacks the thread that would end the save
_background_groups: WeakKeyDictionary[Any, dict[dist.ProcessGroup | None, dist.ProcessGroup]] = WeakKeyDictionary()
"""For each default group: the background group of each group in use; None as a key stands for the default group."""


def staging() -> Staging:
    """Return this process's host buffers. Call `wait` before overwriting them: a save in flight reads them."""
    return _staging


def save_in_background(name: str, work: Callable[[], None]) -> None:
    """Wait for the previous save, then run ``work`` in a background thread; collective as `_background_group` is."""
    wait()
    _in_flight.append(_Save(name, work, _background_group()))


def wait() -> None:
    """Wait until no save is in flight, and raise the error of a failed save once; not collective."""
    while _in_flight:
        save = _in_flight[0]
        save.ended.wait()  # if this is interrupted, the save stays in flight
        _in_flight.remove(save)
        save.raise_if_failed()


def await_end() -> None:
    """Wait until no save is in flight, and leave its error to the next call; not collective."""
    for save in list(_in_flight):
        save.ended.wait()


def finish() -> None:
    """Wait until no save is in flight, and free the host memory; not collective."""
    try:
        wait()
    finally:
        if not _in_flight:
            _staging.clear()


def forget_groups() -> None:
    """Drop the references to the background process groups, before the default group is destroyed; not collective."""
    _background_groups.clear()


def _background_group() -> dist.ProcessGroup:
    """Return the background group of the group in use; collective if none exists yet, because the call creates it."""
    groups, group = _background_groups.setdefault(dist.group.WORLD, {}), group_in_use()
    if group not in groups:
        options: dict[str, Any] = {"backend": "gloo", "timeout": group_timeout()}
        groups[group] = dist.new_group(**options) if group is None else group_among(ranks_of(group), **options)
    return groups[group]
