"""Lock a directory of checkpoints for one run, from its first save until the run ends.

Input: a directory. Output: the lock, or an error that names the process that holds the lock. The operating system
releases the lock when the process ends, even by SIGKILL.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import time
from pathlib import Path

from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.errors import CheckpointError

LOCK = ".lock"

_held: dict[Path, int] = {}


def acquire(save_dir: Path) -> None:
    """Acquire the lock of a directory, unless this process already holds it; rank 0 calls it.

    If the file system does not support locks, log a warning and continue.

    Raises:
        CheckpointError: another run holds the lock.
    """
    path = save_dir.resolve() / LOCK
    if path in _held:
        if path.exists() and os.fstat(_held[path]).st_ino == path.stat().st_ino:
            return
        os.close(_held.pop(path))  # another process deleted or replaced the lock file
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 4096, 0).decode(errors="replace").strip()
        os.close(fd)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            logger.warning("cannot lock %s (%s): make sure that no other run saves into it", save_dir, error.strerror)
            return
        raise CheckpointError(
            f"cannot save into {save_dir}: another run holds its lock ({holder or 'unknown'}), expected no other run. "
            "Stop that run, or save into another directory."
        ) from error
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(owner).encode() + b"\n", 0)
    _held[path] = fd


def is_held_elsewhere(save_dir: Path) -> bool:
    """Return whether another process holds the lock of a directory."""
    path = save_dir.resolve() / LOCK
    if path in _held or not path.exists():
        return False
    # F_GETLK only tests the lock. If it were acquired here, a run that begins to save at this moment would fail.
    request = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fd = os.open(path, os.O_RDONLY)
    try:
        reply = fcntl.fcntl(fd, fcntl.F_GETLK, request)
    except OSError:
        return False  # the file system does not support locks
    finally:
        os.close(fd)
    return bool(struct.unpack_from("h", reply)[0] != fcntl.F_UNLCK)


def release_all() -> None:
    """Release all locks that this process holds, and delete their files."""
    while _held:
        path, fd = _held.popitem()
        path.unlink(missing_ok=True)
        os.close(fd)
