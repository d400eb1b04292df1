"""Open the files of a data set: in a local folder, or below a remote root with a cache of byte ranges on disk.

Input: a root, and paths relative to it. Output: seekable binary files.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp2_strategy.errors import DataError
from fsdp2_strategy.integrations.lerobot.byte_cache import BLOCK_BYTES, CacheFile, blocks, drop
from fsdp2_strategy.integrations.lerobot.remote_requests import RemoteRoot

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_REQUEST_BLOCKS = (8 << 20) // BLOCK_BYTES


def open_source(
    root: str | os.PathLike[str], cache_dir: str | os.PathLike[str], **options: Any
) -> LocalFiles | RemoteFiles:
    """Return `RemoteFiles` if the root is a URL, else `LocalFiles`, which ignores the cache and the options."""
    return RemoteFiles(str(root), cache_dir, **options) if "://" in str(root) else LocalFiles(root)


class LocalFiles:
    """The files of a folder; reads raise a `DataError` if a file is missing or cannot be opened."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def open(self, path: str) -> io.RawIOBase:
        """Open a file for reading."""
        with self._data_errors(path):
            return self.local(path).open("rb", buffering=0)

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        with self._data_errors(path):
            return self.local(path).read_bytes()

    def exists(self, path: str) -> bool:
        """Return whether the file exists."""
        return self.local(path).is_file()

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        with self._data_errors(path):
            return self.local(path).stat().st_size

    def location(self, path: str) -> str:
        """Return the path of a file, for error messages."""
        return str(self.local(path))

    def local(self, path: str) -> Path:
        """Return the path of a file, for libraries that open files by path."""
        return self.root / path

    def free(self, path: str, begin: int, end: int, keep: Iterable[tuple[int, int]] = ()) -> None:
        """Do nothing: nothing is cached."""

    def drop(self, path: str) -> None:
        """Do nothing: nothing is cached."""

    @contextmanager
    def _data_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"cannot read {self.location(path)}: {error.strerror}, expected a file of the data set. Check the "
                "root, and that the copy is complete."
            ) from error


class RemoteFiles(RemoteRoot):
    """The files below a remote root; bytes that are read are cached on disk. See [Note: cached files] in `byte_cache`.

    The threads of a process, its forked children, and the processes that unpickle the object share one cache. The
    remote files must not change while the object is in use. ``cache_dir`` is on a local disk; nothing else may use it,
    and the caller deletes it. `RemoteRoot` has the options.
    """

    def __init__(self, url: str, cache_dir: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(url, **options)
        self._supports_ranges = True
        self._folder = Path(cache_dir).absolute()
        with cache_errors(url, self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)

    def open(self, path: str) -> io.RawIOBase:
        """Open a file for reading; each read fetches the bytes that are not cached, or raises a `DataError`."""
        return _RemoteFile(self, path, self._open_cached(path))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes, which is cached."""
        with self._open_cached(path) as cached:
            return cached.size

    def local(self, path: str) -> None:
        """Return None: a remote file has no local path."""

    def fetch(self, path: str, begin: int, end: int) -> None:
        """Fetch the uncached blocks of a byte range, until the file is dropped; thread-safe. ``end`` is exclusive."""
        with self._open_cached(path) as cached, cache_errors(self.location(path), self._folder):
            wanted = _blocks_of((begin, end), cached.size)
            for first in wanted[::_REQUEST_BLOCKS]:
                self._fetch_blocks(path, cached, first, min(first + _REQUEST_BLOCKS, wanted.stop))

    def free(self, path: str, begin: int, end: int, keep: Iterable[tuple[int, int]] = ()) -> None:
        """Remove the blocks of a byte range from the cache, except those of ``keep``, and free their disk space."""
        if not self._supports_ranges:
            return
        with self._open_cached(path) as cached, cache_errors(self.location(path), self._folder):
            freed = set(_blocks_of((begin, end), cached.size))
            freed.difference_update(*(_blocks_of(kept, cached.size) for kept in keep))
            for first in sorted(block for block in freed if block - 1 not in freed):
                cached.free(first, next(block for block in itertools.count(first) if block not in freed))

    def drop(self, path: str) -> None:
        """Delete the cached file, and free its disk space at once; later reads fetch the bytes again."""
        drop(self._cached_path(path))

    def _cached_path(self, path: str) -> Path:
        return self._folder / blake2b(path.encode(), digest_size=16).hexdigest()

    def _open_cached(self, path: str) -> CacheFile:
        with cache_errors(self.location(path), self._folder):
            return CacheFile.open(self._cached_path(path), lambda: super(RemoteFiles, self).size(path))

    def _fetch_blocks(self, path: str, cached: CacheFile, first: int, end: int) -> None:
        """Fetch missing blocks; wait for those that other threads or processes are fetching."""
        if not self._supports_ranges:
            first, end = 0, blocks(cached.size)
        for run in cached.missing(first, end):
            with cached.locked(*run):
                while (missing := cached.missing(*run)) and not cached.is_dropped():
                    begin, stop = missing[0][0] * BLOCK_BYTES, min(missing[0][1] * BLOCK_BYTES, cached.size)
                    data = self.range(path, begin, stop, cached.size)
                    if len(data) != stop - begin:
                        self._supports_ranges, begin = False, 0
                    cached.write(begin, data)


def _blocks_of(byte_range: tuple[int, int], size: int) -> range:
    return range(byte_range[0] // BLOCK_BYTES, blocks(min(byte_range[1], size)))


class _RemoteFile(io.RawIOBase):
    """An open file of `RemoteFiles`."""

    def __init__(self, source: RemoteFiles, path: str, cached: CacheFile) -> None:
        self._source, self._path, self._cached, self._offset = source, path, cached, 0
        self.name, self.size = source.location(path), cached.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._offset = max(offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self.size}[whence], 0)
        return self._offset

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(self.size - self._offset, 0)]
        with cache_errors(self.name, self._source._folder):
            while len(view) and not self._cached.read_into(self._offset, view):
                if self._cached.is_dropped():
                    self._open_again()
                self._source.fetch(self._path, self._offset, self._offset + len(view))
        self._offset += len(view)
        return len(view)

    def readall(self) -> bytes:
        return self.read(max(self.size - self._offset, 0)) or b""

    def close(self) -> None:
        self._cached.close()
        super().close()

    def _open_again(self) -> None:
        cached = self._source._open_cached(self._path)
        if cached.size != self.size:
            cached.close()
            raise DataError(
                f"cannot continue to read {self.name}: its size is {cached.size} bytes, expected {self.size} as when "
                "it was opened. Read a revision that does not change."
            )
        self._cached.close()
        self._cached = cached


@contextmanager
def cache_errors(location: str, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Convert an OSError of the local disk to a `DataError` that names the data and the local folder."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot cache {location}: writing to {folder} failed ({error}), expected a local disk with space for the "
            "data in use. Free space there, or pass a cache_dir on another disk."
        ) from error


Source = LocalFiles | RemoteFiles
