"""Lock a directory of checkpoints for one run, from its first save until the run ends.

Input: a directory. Output: the lock, or an error that names the process that holds the lock. The operating system
releases the lock when the process ends, even by SIGKILL.

[Note: kind of lock] Linux has locks of the open file (``F_OFD_SETLK``). Unlike classic POSIX locks, they are not
released if the process opens and closes the file once more, for example when it copies the directory. They exclude
other runs of earlier versions, whose locks were POSIX locks. Where they do not exist, flock is used. A forked child
shares the open file, so it closes its copy at once: otherwise a worker that outlives the run would keep the lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import struct
import time
from pathlib import Path

from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.errors import CheckpointError

LOCK = ".lock"

_held: dict[Path, int] = {}

_FULL_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""C's ``struct flock`` for a lock to write all of a file."""
_TAKEN = (errno.EACCES, errno.EAGAIN)


def acquire(save_dir: Path) -> None:
    """Acquire the lock of a directory, unless this process already holds it; rank 0 calls it.

    If the file system does not support locks, log a warning and continue.
    """
    path = save_dir.resolve() / LOCK
    if path in _held:
        if _is_same_file(_held[path], path):
            return
        os.close(_held.pop(path))  # another process deleted or replaced the lock file
    while True:
        fd = _open(path)
        try:
            _lock(fd)
        except OSError as error:
            holder = os.pread(fd, 4096, 0).decode(errors="replace").strip()
            os.close(fd)
            if error.errno not in _TAKEN:
                text = "cannot lock %s (%s): make sure that no other run saves into it"
                logger.warning(text, save_dir, error.strerror)
                return
            raise CheckpointError(
                f"cannot save into {save_dir}: another run holds its lock ({holder or 'unknown'}), expected no other "
                "run. Stop that run, or save into another directory."
            ) from error
        if _is_same_file(fd, path):
            break
        os.close(fd)  # the run that held it has ended, and deleted the file, after it was opened here
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(owner).encode() + b"\n", 0)
    _held[path] = fd


def _open(path: Path) -> int:
    """Open or create the lock file; a link is not followed."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    raise CheckpointError(f"cannot save: {path} is not a regular file, expected the lock of this package. Rename it.")


def _lock(fd: int) -> None:
    """Lock an open file without waiting; see [Note: kind of lock]."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FULL_FILE)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # an old kernel does not know them
            raise
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


def is_held_elsewhere(save_dir: Path) -> bool:
    """Return whether another process holds the lock of a directory."""
    path = save_dir.resolve() / LOCK
    if path in _held:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # there is none, or it is not ours
        return False
    try:
        # This only tests the lock. If it were acquired here, a run that begins to save at this moment would fail.
        reply = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FULL_FILE)
        return bool(struct.unpack_from("h", reply)[0] != fcntl.F_UNLCK)
    except (AttributeError, OSError):
        return _is_flocked(fd)
    finally:
        os.close(fd)


def _is_flocked(fd: int) -> bool:
    """Return whether a file is locked where flock is used, which has no test without a lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _TAKEN
    return False


def release_all() -> None:
    """Release all locks that this process holds, and delete their files."""
    while _held:
        path, fd = _held.popitem()
        if _is_same_file(fd, path):
            path.unlink(missing_ok=True)
        os.close(fd)


def _close_in_child() -> None:
    """Close the copies of the locked files in a forked child; the parent keeps the locks."""
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_close_in_child)
