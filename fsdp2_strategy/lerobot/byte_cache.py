"""The cache on disk for parts of remote files: one sparse local file for each, shared by processes and threads.

Input: names, sizes, and blocks as they arrive. Output: which blocks are here, and their bytes.

[Note: the cache] The file that stands for a remote one:

    byte 0            1 once the file is begun
    bytes 4 to 7      how often blocks were given up, little-endian
    bytes 8 to 15     the size of the remote file, little-endian
    bytes 16 ...      a byte a block of 64 KiB: 1 once the block is here
    from a page on    the remote file, every block at its place

Four rules make it safe to share. Who fetches blocks locks the bytes that stand for them, so nothing is fetched twice.
Data is written before the byte that stands for it, so that death in between leaves nothing wrong. Who drops the file
unlinks it, then truncates it: the disk is free though others have it open, and they find byte 0 gone and begin a new
file. Who gives up blocks takes their bytes back, then counts, then frees their disk. And a reader trusts what it has
copied only where bytes 0 to 7 are afterwards as they were before.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import secrets
import shutil
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Self

BLOCK_BYTES = 64 << 10

_COUNT_AT, _SIZE_AT, _FLAGS_AT, _PAGE_BYTES = 4, 8, 16, 4096
_PUNCH_HOLE = 0x02 | 0x01  # and keep the size

_libc = ctypes.CDLL(None, use_errno=True)


class CacheFolder:
    """A folder of cached files, which is deleted by `close`, or by who holds one beside it once nobody holds it.

    The operating system knows who does: forked children hold it with their parent, and copies by pickle on their own.

    Args:
        cache_dir: where it is made.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, cache_dir: str | os.PathLike[str]) -> None:
        self.path = Path(cache_dir).absolute() / f"files-{secrets.token_hex(8)}"
        self._hold()

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.path = state["path"]
        self._hold()

    def file(self, name: str) -> Path:
        """Return the cached file of a remote one."""
        return self.path / blake2b(name.encode(), digest_size=16).hexdigest()

    def used_bytes(self) -> int:
        """Return what the files take on disk."""
        total = 0
        for file in self.path.glob("*"):
            with suppress(FileNotFoundError):
                total += file.stat().st_blocks * 512
        return total

    def close(self) -> None:
        """Delete the folder, for everybody."""
        for file in self.path.glob("*"):
            delete(file)
        with suppress(OSError):  # somebody begins a file right now: it stays until the folder is found abandoned
            self.path.rmdir()
        self._release()

    def _hold(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(beside, fcntl.LOCK_EX)
            for other in self.path.parent.glob("files-*"):
                if other != self.path and _is_abandoned(other):
                    shutil.rmtree(other)
            self.path.mkdir(exist_ok=True)
            fd = os.open(self.path, os.O_RDONLY)
            self._release = weakref.finalize(self, os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_SH)
        finally:
            fcntl.flock(beside, fcntl.LOCK_UN)  # a child forked meanwhile keeps it open
            os.close(beside)


class CacheFile:
    """An open cached file: `begin` opens one.

    Attributes:
        size: of the remote file, in bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self.size = fd, size
        self._data_at = -(-(_FLAGS_AT + blocks(size)) // _PAGE_BYTES) * _PAGE_BYTES

    @classmethod
    def begin(cls, path: Path, ask_size: Callable[[], int]) -> CacheFile:
        """Open a file, begun where it is not.

        Args:
            path: what `CacheFolder.file` gave.
            ask_size: gives the size of the remote file; called by one process or thread, while others wait.
        """
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                with _locked(fd, 0, 1):
                    if not _is_begun(fd) and os.fstat(fd).st_nlink:
                        _write(fd, ask_size().to_bytes(8, "little"), _SIZE_AT)
                        _write(fd, bytes([1]), 0)
                    # Dropping unlinks, then truncates: unlinked after this look, it is truncated after it.
                    if os.fstat(fd).st_nlink:
                        size = int.from_bytes(os.pread(fd, 8, _SIZE_AT), "little")
                        if _is_begun(fd):
                            return cls(fd, size)
                    os.ftruncate(fd, 0)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def is_dropped(self) -> bool:
        """Say whether the file was dropped, so that one who wants it has to begin anew."""
        return not _is_begun(self._fd)

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the runs of blocks that are not here, among those from ``first`` until ``end``."""
        flags = os.pread(self._fd, end - first, _FLAGS_AT + first).ljust(end - first, b"\0")
        return [(first + run.start(), first + run.end()) for run in re.finditer(rb"\0+", flags)]

    @contextmanager
    def locked(self, first: int, end: int) -> Iterator[None]:
        """Keep others from fetching some blocks; wait for those that do."""
        with _locked(self._fd, _FLAGS_AT + first, end - first):
            yield

    def put(self, start: int, data: bytes) -> None:
        """Keep data that begins with a block, and ends with one or with the file; nothing where it was dropped."""
        _write(self._fd, data, self._data_at + start)
        _write(self._fd, bytes([1]) * blocks(len(data)), _FLAGS_AT + start // BLOCK_BYTES)
        if self.is_dropped():  # and took disk again
            os.ftruncate(self._fd, 0)

    def copy(self, start: int, into: memoryview) -> bool:
        """Copy bytes from ``start`` on; say whether they were all here."""
        before = os.pread(self._fd, _SIZE_AT, 0)
        if self.missing(start // BLOCK_BYTES, blocks(start + len(into))):
            return False
        copied = 0
        while copied < len(into) and (n := os.preadv(self._fd, [into[copied:]], self._data_at + start + copied)):
            copied += n
        return copied == len(into) and not self.is_dropped() and os.pread(self._fd, _SIZE_AT, 0) == before

    def forget(self, first: int, end: int) -> None:
        """Free the disk of some blocks, where the file system can do that; who wants them fetches them again."""
        with self.locked(first, end), _locked(self._fd, _COUNT_AT, _SIZE_AT - _COUNT_AT):
            if self.is_dropped():
                return
            _write(self._fd, bytes(end - first), _FLAGS_AT + first)
            count = struct.unpack("<I", os.pread(self._fd, 4, _COUNT_AT))[0]
            _write(self._fd, struct.pack("<I", (count + 1) % (1 << 32)), _COUNT_AT)
            where, length = self._data_at + first * BLOCK_BYTES, (end - first) * BLOCK_BYTES
            _libc.fallocate(self._fd, _PUNCH_HOLE, ctypes.c_int64(where), ctypes.c_int64(length))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def blocks(size: int) -> int:
    """Return how many blocks some bytes take."""
    return -(-size // BLOCK_BYTES)


def delete(path: Path) -> None:
    """Drop a cached file, where there is one: its disk is free at once, whoever has it open."""
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDWR)
        try:
            path.unlink()
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)


def _is_begun(fd: int) -> bool:
    return os.pread(fd, 1, 0) == b"\1"


def _write(fd: int, data: bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, at)
        rest, at = rest[written:], at + written


@contextmanager
def _locked(fd: int, start: int, length: int) -> Iterator[None]:
    """Lock bytes of an open file, against other threads and processes that opened it on their own."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    try:
        yield
    finally:  # not left to closing: a child forked meanwhile keeps it open
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, struct.pack("hhqqi", fcntl.F_UNLCK, os.SEEK_SET, start, length, 0))


def _is_abandoned(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
