"""Cache fetched blocks of remote files on disk: one sparse local file per remote file, shared by processes and threads.

Input: paths of cached files, sizes of remote files, and fetched blocks. Output: the missing blocks, and cached bytes.

[Note: cached files] A cached file contains a header and the blocks of the remote file:

    byte 0                    valid byte: 1 after the size is written
    bytes 4 to 7              number of calls of `CacheFile.free`, little-endian
    bytes 8 to 15             size of the remote file, little-endian
    bytes 16 ...              one flag per block of 64 KiB: 1 if the block is cached
    next page boundary ...    the content of the remote file

Processes and threads share the file safely by five rules:

1. To fetch blocks, lock their flags. No block is then fetched twice.
2. Write the data before the flag. A crash between the two writes is then harmless.
3. To drop the file, unlink it, then truncate it. Its disk space is free at once, even if other processes have it open.
   These processes find no valid byte, and create a new file.
4. To free blocks, clear their flags, then increment the number in bytes 4 to 7, then free the disk space.
5. To read, copy the bytes, and use them only if bytes 0 to 7 are the same before and after the copy.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from fsdp2_strategy.storage.safetensors_format import write_from

BLOCK_BYTES = 64 << 10

_COUNT_OFFSET, _SIZE_OFFSET, _FLAGS_OFFSET, _PAGE_BYTES = 4, 8, 16, 4096
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE

_libc = ctypes.CDLL(None, use_errno=True)


class CacheFile:
    """An open cached file; ``size`` is that of the remote file in bytes."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self.size = fd, size
        self._data_offset = -(-(_FLAGS_OFFSET + blocks(size)) // _PAGE_BYTES) * _PAGE_BYTES

    @classmethod
    def open(cls, path: Path, request_size: Callable[[], int]) -> CacheFile:
        """Open or create a cached file; one process or thread calls ``request_size``, and the others wait."""
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                with _locked(fd, 0, 1):
                    if not _is_valid(fd) and os.fstat(fd).st_nlink:
                        write_from(fd, _SIZE_OFFSET, memoryview(request_size().to_bytes(8, "little")))
                        write_from(fd, 0, memoryview(b"\1"))
                    # If `drop` unlinks the file after this check, it also truncates it, and `is_dropped` returns True.
                    if os.fstat(fd).st_nlink:
                        size = int.from_bytes(os.pread(fd, 8, _SIZE_OFFSET), "little")
                        if _is_valid(fd):
                            return cls(fd, size)
                    os.ftruncate(fd, 0)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def is_dropped(self) -> bool:
        """Return whether the file was dropped; it must then be opened again."""
        return not _is_valid(self._fd)

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the runs (first, end) of uncached blocks from ``first`` to ``end`` (exclusive)."""
        flags = os.pread(self._fd, end - first, _FLAGS_OFFSET + first).ljust(end - first, b"\0")
        return [(first + run.start(), first + run.end()) for run in re.finditer(rb"\0+", flags)]

    @contextmanager
    def locked(self, first: int, end: int) -> Iterator[None]:
        """Lock a range of blocks to fetch or free them; wait while another process or thread has locked any of them."""
        with _locked(self._fd, _FLAGS_OFFSET + first, end - first):
            yield

    def write(self, start: int, data: bytes) -> None:
        """Write full blocks, or those up to the end of the file, from offset ``start`` on, unless it was dropped."""
        write_from(self._fd, self._data_offset + start, memoryview(data))
        write_from(self._fd, _FLAGS_OFFSET + start // BLOCK_BYTES, memoryview(b"\1" * blocks(len(data))))
        if self.is_dropped():  # `drop` truncated the file before this write
            os.ftruncate(self._fd, 0)

    def read_into(self, start: int, into: memoryview) -> bool:
        """Copy bytes from offset ``start`` on; return False if some are not cached, or were freed during the copy."""
        before = os.pread(self._fd, _SIZE_OFFSET, 0)
        if self.missing(start // BLOCK_BYTES, blocks(start + len(into))):
            return False
        copied = 0
        while copied < len(into) and (n := os.preadv(self._fd, [into[copied:]], self._data_offset + start + copied)):
            copied += n
        return copied == len(into) and not self.is_dropped() and os.pread(self._fd, _SIZE_OFFSET, 0) == before

    def free(self, first: int, end: int) -> None:
        """Remove blocks from the cache, and free their disk space if the file system supports it."""
        with self.locked(first, end), _locked(self._fd, _COUNT_OFFSET, 4):
            if self.is_dropped():
                return
            write_from(self._fd, _FLAGS_OFFSET + first, memoryview(bytes(end - first)))
            count = struct.unpack("<I", os.pread(self._fd, 4, _COUNT_OFFSET))[0]
            write_from(self._fd, _COUNT_OFFSET, memoryview(struct.pack("<I", (count + 1) % (1 << 32))))
            offset, length = self._data_offset + first * BLOCK_BYTES, (end - first) * BLOCK_BYTES
            _libc.fallocate(self._fd, _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(length))

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
    """Return the number of blocks of a file of ``size`` bytes."""
    return -(-size // BLOCK_BYTES)


def drop(path: Path) -> None:
    """Unlink and truncate a cached file, if it exists; see [Note: cached files]."""
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDWR)
        try:
            path.unlink()
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)


def _is_valid(fd: int) -> bool:
    return os.pread(fd, 1, 0) == b"\1"


@contextmanager
def _locked(fd: int, start: int, length: int) -> Iterator[None]:
    """Lock bytes of a file against all threads and processes that have opened the file separately."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    try:
        yield
    finally:  # closing the file would not unlock the bytes if a forked child also has it open
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, struct.pack("hhqqi", fcntl.F_UNLCK, os.SEEK_SET, start, length, 0))
