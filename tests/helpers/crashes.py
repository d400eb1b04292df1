"""Saves that end before their time: at each call on the disk in turn, and by a kill."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

import fsdp2_strategy.checkpoint.save as saving
from fsdp2_strategy import list_checkpoints
from fsdp2_strategy.checkpoint import directory
from helpers.pool import processes

ON_DISK = [
    (os, "fsync"),
    *((os, name) for name in ("unlink", "rmdir")),
    *((Path, name) for name in ("rename", "replace", "write_bytes", "mkdir", "symlink_to", "unlink")),
    (saving, "write_components"),
]
"""The calls by which a save changes what is on disk."""


class Killed(BaseException):
    """What a SIGKILL looks like from inside: nothing after it runs."""


class AtOnce:
    """A thread that does its work when it is started: what it does counts in the order of the save."""

    def __init__(self, target, args, name):
        self.work = lambda: target(*args)

    def start(self):
        self.work()

    def join(self):
        pass


def removals_at_once():
    """Remove old checkpoints within the save that rotates them, not behind it."""
    return patch.object(directory, "Thread", AtOnce)


def dies_at(point, save, further=()):
    """Call ``save``, and die before its call number ``point`` on the disk; say whether there was one.

    Args:
        point: number of the call.
        save: the save.
        further: owners and names of calls to count in addition to `ON_DISK`.
    """
    countdown = point

    def dying(original):
        def call(*args, **kwargs):
            nonlocal countdown
            if countdown == 0:
                raise Killed
            countdown -= 1
            return original(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for owner, name in (*ON_DISK, *further):
            patches.enter_context(patch.object(owner, name, dying(getattr(owner, name))))
        try:
            save()
        except Killed:
            return True
    return False


def kill_within_a_save(save_for_ever, folder, *, committed=2, seconds=0.0):
    """Start a process that saves for ever; kill it within a save, when the newest has at least this number."""
    run = processes.Process(target=save_for_ever, args=(folder,), daemon=True)
    run.start()
    deadline = time.monotonic() + 60
    while len(saved := list_checkpoints(folder)) < 2 or saved[-1].sequence < committed:
        assert run.is_alive() and time.monotonic() < deadline
    while not list(folder.glob(".*.partial")):
        assert run.is_alive() and time.monotonic() < deadline
    time.sleep(seconds)
    run.kill()
    run.join()
    assert run.exitcode == -signal.SIGKILL


def killed_at(point, call, folder):
    """Call ``call`` in another process, which is killed before its change number ``point`` within a folder.

    Say whether there was such a change. The calls of the operating system are counted, by whatever library makes them.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            counted = 0

            def count(event, arguments):
                nonlocal counted
                paths = [os.fsdecode(path) for path in arguments[:2] if isinstance(path, str | bytes)]
                changes = event in _CHANGES or (event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
                if changes and any(str(folder) in path for path in paths):
                    if counted == point:
                        os.kill(os.getpid(), signal.SIGKILL)
                    counted += 1

            if not dist.is_initialized():  # another test of this process has started the group
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            sys.addaudithook(count)
            call()
            status = 0
        except BaseException:  # noqa: BLE001  nothing else sees it
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), "the call failed"
    return status == signal.SIGKILL


_CHANGES = {f"os.{name}" for name in ("rename", "link", "symlink", "remove", "rmdir", "mkdir", "truncate")}
