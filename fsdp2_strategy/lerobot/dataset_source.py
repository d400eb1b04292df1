"""Open the files of a data set in a local folder, or below a remote root through a cache of byte ranges on disk.

Input: a root, and paths relative to it. Output: seekable binary files.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp2_strategy.errors import DataError
from fsdp2_strategy.lerobot.byte_cache import BLOCK_BYTES, CacheFile, CacheFolder, blocks, delete
from fsdp2_strategy.lerobot.remote_requests import RemoteRoot

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_REQUEST_BLOCKS = (8 << 20) // BLOCK_BYTES


def open_source(
    root: str | os.PathLike[str], cache_dir: str | os.PathLike[str], **options: Any
) -> LocalFiles | RemoteFiles:
    """Return the files below a root: `RemoteFiles` if it is a URL, else `LocalFiles`.

    Args:
        root: a folder, or a URL that fsspec supports.
        cache_dir: folder on a local disk for the fetched bytes of remote files.
        **options: as for `RemoteFiles`.
    """
    return RemoteFiles(str(root), cache_dir, **options) if "://" in str(root) else LocalFiles(root)


class LocalFiles:
    """The files of a folder.

    Args:
        root: the folder.
    """

    fetched_bytes = 0

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def open(self, path: str) -> io.RawIOBase:
        """Open a file for reading.

        Raises:
            DataError: the file is missing, or cannot be opened.
        """
        with self._naming(path):
            return self.local(path).open("rb", buffering=0)

    def read(self, path: str) -> bytes:
        """Return the whole content of a file; raises as `open` does."""
        with self._naming(path):
            return self.local(path).read_bytes()

    def exists(self, path: str) -> bool:
        """Return whether the file exists."""
        return self.local(path).is_file()

    def size(self, path: str) -> int:
        """Return the size of a file in bytes; raises as `open` does."""
        with self._naming(path):
            return self.local(path).stat().st_size

    def location(self, path: str) -> str:
        """Return the path of a file, for messages."""
        return str(self.local(path))

    def local(self, path: str) -> Path:
        """Return the path of a file, for readers that open files by path."""
        return self.root / path

    def fetch(self, path: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing: the file is local."""

    def forget(self, path: str, ranges: Iterable[tuple[int, int]], keeping: Iterable[tuple[int, int]] = ()) -> None:
        """Do nothing: nothing is cached."""

    def drop(self, path: str) -> None:
        """Do nothing: nothing is cached."""

    def cached_bytes(self) -> int:
        """Return 0: nothing is cached."""
        return 0

    def close(self) -> None:
        """Do nothing: there is no cache to delete."""

    @contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"cannot read {self.location(path)}: {error.strerror}, expected a file of the data set. Check the "
                "root, and that the copy is whole."
            ) from error


class RemoteFiles:
    """The files below a remote root, cached on disk as they are read; see [Note: cached files] in `byte_cache`.

    The threads of a process, its forked children, and the processes that unpickle the object share one cache, in a
    folder of its own. `close` deletes the folder. If all processes end without that call, the next object with the same
    ``cache_dir`` deletes it. The remote files must not change while the object is in use.

    Args:
        url: the root, with a scheme that fsspec supports: http://, https://, s3://, hf://, file://, ...
        cache_dir: folder on a local disk.
        tries: maximum number of attempts per request.
        timeout_seconds: time limit of one request, which fetches at most 8 MiB if the server supports ranges. File
            systems of fsspec that are not asynchronous (such as hf://) use their own time limits.
        backoff_seconds: pause before the second attempt. It doubles with each attempt up to 30 seconds, and is then
            multiplied by a random factor between 0.5 and 1.5.
        storage_options: options of fsspec's file system: headers, credentials, ...

    Raises:
        DataError: no installed package supports the scheme, or the cache cannot be created.
    """

    def __init__(
        self,
        url: str,
        cache_dir: str | os.PathLike[str],
        *,
        tries: int = 5,
        timeout_seconds: float = 60.0,
        backoff_seconds: float = 0.5,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self._remote = RemoteRoot(
            url,
            tries=tries,
            timeout_seconds=timeout_seconds,
            backoff_seconds=backoff_seconds,
            storage_options=storage_options or {},
        )
        self._knows_ranges = True
        with naming_the_disk(url, cache_dir):
            self._folder = CacheFolder(cache_dir)

    @property
    def fetched_bytes(self) -> int:
        """Number of bytes of file content that this process has received."""
        return self._remote.fetched_bytes

    def open(self, path: str) -> io.RawIOBase:
        """Open a file for reading; each read fetches the bytes that are not cached.

        Raises:
            DataError: the file is missing, or cannot be fetched or cached; reads raise this too.
        """
        return _RemoteFile(self, path, self._begin(path))

    def read(self, path: str) -> bytes:
        """Return the whole content of a file, without caching it; raises as `open` does."""
        return self._remote.read(path)

    def exists(self, path: str) -> bool:
        """Return whether the file exists."""
        return self._remote.exists(path)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes; raises as `open` does."""
        with self._begin(path) as cached:
            return cached.size

    def location(self, path: str) -> str:
        """Return the URL of a file, for messages."""
        return self._remote.location(path)

    def local(self, path: str) -> None:
        """Return None: a remote file has no local path."""

    def fetch(self, path: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch the blocks of byte ranges that are not cached, ahead of reads; several threads may call it at once.

        If the file is dropped during the call, the rest is not fetched.

        Args:
            path: the file.
            ranges: first byte and end (exclusive) of each range; ends beyond the end of the file are cut off.

        Raises:
            DataError: the file is missing, or cannot be fetched or cached.
        """
        with self._begin(path) as cached, naming_the_disk(self.location(path), self._folder.path):
            for low, high in ranges:
                first, end = low // BLOCK_BYTES, blocks(min(high, cached.size))
                for begin in range(first, end, _REQUEST_BLOCKS):
                    self._fill(path, cached, begin, min(begin + _REQUEST_BLOCKS, end))

    def forget(self, path: str, ranges: Iterable[tuple[int, int]], keeping: Iterable[tuple[int, int]] = ()) -> None:
        """Remove byte ranges from the cache, and free their disk space if the file system supports it.

        Does nothing if the server does not support ranges.

        Args:
            path: the file.
            ranges: the ranges to remove, as in `fetch`.
            keeping: ranges whose blocks stay in the cache.
        """
        if not self._knows_ranges:
            return
        with self._begin(path) as cached, naming_the_disk(self.location(path), self._folder.path):
            given_up = set(_blocks_of(ranges, cached.size)).difference(_blocks_of(keeping, cached.size))
            for first in sorted(block for block in given_up if block - 1 not in given_up):
                end = next(block for block in itertools.count(first) if block not in given_up)
                cached.forget(first, end)

    def drop(self, path: str) -> None:
        """Delete the cached file, and free its disk space at once; later reads fetch it again."""
        delete(self._folder.file(path))

    def cached_bytes(self) -> int:
        """Return the disk space that the cache takes."""
        return self._folder.used_bytes()

    def close(self) -> None:
        """Delete the cache, for all processes; no file can be read afterwards."""
        self._folder.close()

    def _begin(self, path: str) -> CacheFile:
        with naming_the_disk(self.location(path), self._folder.path):
            return CacheFile.begin(self._folder.file(path), lambda: self._remote.size(path))

    def _fill(self, path: str, cached: CacheFile, begin: int, end: int) -> None:
        """Fetch the blocks that are not cached; wait for those that other threads or processes are fetching."""
        if not self._knows_ranges:
            begin, end = 0, blocks(cached.size)
        for first, stop in cached.missing(begin, end):
            with cached.locked(first, stop):
                while (missing := cached.missing(first, stop)) and not cached.is_dropped():
                    start, until = missing[0][0] * BLOCK_BYTES, min(missing[0][1] * BLOCK_BYTES, cached.size)
                    data = self._remote.range(path, start, until, cached.size)
                    if len(data) != until - start:
                        self._knows_ranges, start = False, 0
                    cached.put(start, data)


def _blocks_of(ranges: Iterable[tuple[int, int]], size: int) -> Iterator[int]:
    for low, high in ranges:
        yield from range(low // BLOCK_BYTES, blocks(min(high, size)))


class _RemoteFile(io.RawIOBase):
    """An open file of `RemoteFiles`."""

    def __init__(self, source: RemoteFiles, path: str, cached: CacheFile) -> None:
        self._source, self._path, self._cached, self._at = source, path, cached, 0
        self.name, self.size = source.location(path), cached.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = max(offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence], 0)
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(self.size - self._at, 0)]
        with naming_the_disk(self.name, self._source._folder.path):
            while len(view) and not self._cached.copy(self._at, view):
                if self._cached.is_dropped():
                    self._begin_anew()
                self._source.fetch(self._path, [(self._at, self._at + len(view))])
        self._at += len(view)
        return len(view)

    def readall(self) -> bytes:
        return self.read(max(self.size - self._at, 0)) or b""

    def close(self) -> None:
        self._cached.close()
        super().close()

    def _begin_anew(self) -> None:
        cached = self._source._begin(self._path)
        if cached.size != self.size:
            cached.close()
            raise DataError(
                f"cannot read on in {self.name}: it has {cached.size} bytes now, expected {self.size} as when it was "
                "opened. Read a revision that does not change."
            )
        self._cached.close()
        self._cached = cached


@contextmanager
def naming_the_disk(location: str, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Convert an OSError of the local disk to a `DataError` that names the remote file and the local folder."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot cache {location}: {folder} fails ({error}), expected a local disk with room for what is in use. "
            "Make room there, or give a cache_dir on another disk."
        ) from error


Source = LocalFiles | RemoteFiles
