"""Open and read regular files of bounded size, and repeat reads that fail for a transient reason.

Input: paths of files that other programs may have written. Output: their content, or an OSError whose ``strerror`` says
what is wrong with the file. This module does not import torch.

[Note: transient errors] A network file system can fail a read that would succeed a moment later, for example with
ESTALE after a failover of the server. Such a read is repeated, after the file was opened again. Each repetition is
logged and counted. EIO is repeated only once per file, because it also means that a disk is failing. Where reads go on
failing, such as in a directory of another user on a server that is gone, none is repeated for a minute: a directory is
looked at many times when checkpoints are listed.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

_T = TypeVar("_T")

_logger = logging.getLogger("fsdp2_strategy")

PAUSES = (0.1, 0.5, 2.0)
"""Seconds before each repetition of a read."""
_TRANSIENT = {errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT}
_SECONDS_WITHOUT_REPEATS = 60.0
_MOST_FAILING = 1000


def read_file(path: Path, max_bytes: int, *, follow_link: bool = False) -> bytes:
    """Return the content of a regular file."""
    with SourceFile(path, follow_link=follow_link) as file:
        if file.size > max_bytes:
            text = f"it has {file.size:,} bytes, expected at most {max_bytes:,}"
            raise OSError(errno.EFBIG, text, str(path))
        return file.read(lambda fd: _content(fd, file.size))


def size_of_file(path: Path) -> int:
    """Return the size of a regular file in bytes; a symbolic link is followed."""
    found = repeated(path, path.stat)
    _check_regular(path, found)
    return found.st_size


def repeated(path: Path, action: Callable[[], _T]) -> _T:
    """Return the result of an action on a path, which is repeated after a transient error.

    See [Note: transient errors].
    """
    return _Retries(path).run(action)


class SourceFile:
    """A regular file that is open for reading; threads may share it. Use it in a ``with`` block, or call `close`."""

    def __init__(self, path: Path, *, follow_link: bool = True) -> None:
        self.path = path
        self._follow_link = follow_link
        self._retries = _Retries(path)
        self._lock = threading.Lock()
        self._opened: list[int] = []
        self._version: tuple[int, int] | None = None
        self._retries.run(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        for fd in self._opened:
            os.close(fd)
        self._opened.clear()

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._version[0] if self._version else 0

    def read(self, action: Callable[[int], _T]) -> _T:
        """Call ``action`` with the file's descriptor, again after a transient error; see [Note: transient errors]."""
        failed: list[int] = []

        def attempt() -> _T:
            fd = self._descriptor(after=failed[-1] if failed else None)
            failed.append(fd)
            return action(fd)

        return self._retries.run(attempt)

    def _descriptor(self, after: int | None = None) -> int:
        """Return the open descriptor; open the file first, and again if ``after`` is the present one, which failed."""
        with self._lock:
            if not self._opened or self._opened[-1] == after:
                fd, found = _open_regular(self.path, follow_link=self._follow_link)
                version = (found.st_size, found.st_mtime_ns)
                if self._version not in (None, version):
                    os.close(fd)
                    raise OSError(errno.EINVAL, "it was replaced while it was read", str(self.path))
                self._version = version
                self._opened.append(fd)  # other threads may still read from the descriptors before it
            return self._opened[-1]


def read_repeats() -> int:
    """Return how often this process has repeated a read since it started."""
    return _Retries.total


class _Retries:
    """The repeated reads of one file; see [Note: transient errors]."""

    total = 0
    _lock = threading.Lock()

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_repeated_eio = False

    def run(self, attempt: Callable[[], _T]) -> _T:
        """Call ``attempt``, again after a transient error."""
        for number, pause in enumerate(() if _fails_on(self._path) else PAUSES, 1):
            try:
                return attempt()
            except OSError as error:
                if not self._may_repeat(error.errno):
                    if error.errno == errno.EIO:
                        _note_failing(self._path)
                    raise
                text = "reading %s failed with %s (%s): reading it again (%d of at most %d times)"
                name, most = errno.errorcode.get(error.errno or 0, "an error"), len(PAUSES)
                _logger.warning(text, self._path, name, error.strerror, number, 1 if error.errno == errno.EIO else most)
                time.sleep(pause)
        try:
            return attempt()
        except OSError as error:
            if error.errno in _TRANSIENT | {errno.EIO}:
                _note_failing(self._path)
            raise

    def _may_repeat(self, number: int | None) -> bool:
        with _Retries._lock:
            if number == errno.EIO and not self._has_repeated_eio:
                self._has_repeated_eio = True
            elif number not in _TRANSIENT:
                return False
            _Retries.total += 1
            return True


def _forget_lock() -> None:
    """Make a new lock in a forked child, which has no thread that would release the old one."""
    _Retries._lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)
_failing: dict[Path, float] = {}
"""Paths at and below which reads go on failing, and since when; see [Note: transient errors]."""


def _fails_on(path: Path) -> bool:
    """Return whether reads of a path, or of one of its directories, went on failing in the last minute."""
    if not _failing:
        return False
    now = time.monotonic()
    return any(now - _failing.get(each, -math.inf) < _SECONDS_WITHOUT_REPEATS for each in (path, *path.parents))


def _note_failing(path: Path) -> None:
    """Note that reads of a path go on failing, and those in its outermost directory that cannot be read, if any."""
    outermost = path
    for parent in path.parents:
        try:
            with os.scandir(parent):
                break
        except FileNotFoundError:
            break
        except OSError:
            outermost = parent
    if len(_failing) > _MOST_FAILING:
        _failing.clear()
    _failing[outermost] = time.monotonic()


def _open_regular(path: Path, *, follow_link: bool) -> tuple[int, os.stat_result]:
    # Without O_NONBLOCK, opening a named pipe waits for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_link else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_link:
            text = "it is a symbolic link, expected a regular file"
            raise OSError(errno.ELOOP, text, str(path)) from error
        raise
    try:
        found = os.fstat(fd)
        _check_regular(path, found)
    except OSError:
        os.close(fd)
        raise
    return fd, found


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def _check_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a special file")
        raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file", str(path))


def _content(fd: int, size: int) -> bytes:
    """Return the first ``size`` bytes of a file, or fewer if the file has become shorter."""
    parts: list[bytes] = []
    at = 0
    while at < size and (part := os.pread(fd, min(size - at, 1 << 30), at)):
        parts.append(part)
        at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
