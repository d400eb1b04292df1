"""Send requests to a remote root, with retries and time limits; safe in forked children.

Input: a URL that fsspec supports, and paths below it. Output: sizes and bytes, or an error that names the file.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp
import fsspec
from fsspec.asyn import sync

from fsdp2_strategy.errors import DataError

_LONGEST_PAUSE_SECONDS = 30.0

_T = TypeVar("_T")


class RemoteRoot:
    """A remote root; for its arguments see `fsdp2_strategy.lerobot.dataset_source.RemoteFiles`.

    Requests raise a DataError at once if the file is missing, or after the last attempt if all attempts failed.

    Attributes:
        fetched_bytes: number of bytes of file content that this process has received.
    """

    _file_system: tuple[Any, str] | None
    _lock: threading.Lock

    def __init__(
        self, url: str, *, tries: int, timeout_seconds: float, backoff_seconds: float, storage_options: dict[str, Any]
    ) -> None:
        self.url = url.rstrip("/")
        self.tries = tries
        self.timeout_seconds = timeout_seconds
        self.backoff_seconds = backoff_seconds
        self.storage_options = storage_options
        try:
            fsspec.get_filesystem_class(fsspec.core.split_protocol(url)[0])
        except (ImportError, ValueError) as error:
            raise DataError(
                f"cannot read {url}: {error}, expected a scheme that fsspec knows. Install the package that serves it, "
                "or give a local folder."
            ) from error
        self._begin_process()

    def __getstate__(self) -> dict[str, Any]:
        of_the_process = {"fetched_bytes", "_file_system", "_lock"}
        return {name: value for name, value in vars(self).items() if name not in of_the_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_process()

    def location(self, path: str) -> str:
        """Return the URL of a file."""
        return f"{self.url}/{path}"

    def exists(self, path: str) -> bool:
        """Return whether the file exists; raises only if the requests fail."""
        try:
            self._ask(path, "its size", lambda: self._call("info", path))
        except DataError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        return True

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        size = self._ask(path, "its size", lambda: self._call("info", path)["size"])
        if size is None:
            raise DataError(
                f"cannot read {self.location(path)} by ranges: the server gives no size, expected one. Copy the data "
                "set to a disk, and read it there."
            )
        return int(size)

    def read(self, path: str) -> bytes:
        """Return the whole content of a file."""
        return self._ask(path, "the whole file", lambda: self._content(path))

    def range(self, path: str, start: int, end: int, size: int) -> bytes:
        """Return bytes ``start`` to ``end`` (exclusive) of a file; all bytes if the server does not support ranges."""

        def ask() -> bytes:
            data = self._content(path, start=start, end=end)
            if len(data) not in (end - start, size):
                raise EOFError(f"{len(data)} bytes came, expected {end - start}")
            return data

        return self._ask(path, f"bytes {start} to {end}", ask)

    def _ask(self, path: str, what: str, ask: Callable[[], _T]) -> _T:
        last: BaseException | None = None
        for tried in range(self.tries):
            if tried:
                # A seeded generator would repeat its values after a resume and in forked children.
                jitter = random.SystemRandom().uniform(0.5, 1.5)
                time.sleep(min(self.backoff_seconds * 2 ** (tried - 1), _LONGEST_PAUSE_SECONDS) * jitter)
            try:
                return ask()
            except Exception as error:
                if _is_absence(error):
                    raise DataError(
                        f"cannot read {self.location(path)}: there is no such file, expected one of the data set. "
                        "Check the address, and that the copy is whole."
                    ) from error
                last = error.__cause__ if isinstance(error, FileNotFoundError) else error
        raise DataError(
            f"cannot read {self.location(path)}: {what} failed {self.tries} times, at last with "
            f"{type(last).__name__}({last}), expected an answer within {self.timeout_seconds} s. Look after the server "
            "and the way to it, or allow more tries or a longer time-out."
        ) from last

    def _content(self, path: str, **arguments: int) -> bytes:
        data: bytes = self._call("cat_file", path, **arguments)
        with self._lock:
            self.fetched_bytes += len(data)
        return data

    def _call(self, name: str, path: str, **arguments: Any) -> Any:
        with self._lock:
            if self._file_system is None:
                self._file_system = fsspec.core.url_to_fs(self.url, **self.storage_options)
                _kept.append(self._file_system)
            files, root = self._file_system
        if files.async_impl:
            method, timeout = getattr(files, f"_{name}"), self.timeout_seconds
            return sync(files.loop, method, f"{root}/{path}", timeout=timeout, **arguments)
        if name == "cat_file" and type(files).cat_file is fsspec.AbstractFileSystem.cat_file:
            arguments["cache_type"] = "none"  # this method opens the file, which reads ahead by default
        return getattr(files, name)(f"{root}/{path}", **arguments)

    def _begin_process(self) -> None:
        self.fetched_bytes = 0
        self._file_system = None
        self._lock = threading.Lock()
        _roots.add(self)


def _is_absence(error: Exception) -> bool:
    """Return whether an error means a missing file; fsspec raises FileNotFoundError for other HTTP failures too."""
    if not isinstance(error, FileNotFoundError):
        return False
    cause = error.__cause__
    return not isinstance(cause, aiohttp.ClientError | TimeoutError) or getattr(cause, "status", None) in {404, 410}


# A forked child must neither use its parent's connections nor free them: their finalizers would remove the parent's
# connections from the event loop that both processes share. fsspec's cache keeps file systems alive, but a child clears
# it. This list keeps them alive in the child too.
_kept: list[object] = []
_roots: weakref.WeakSet[RemoteRoot] = weakref.WeakSet()


def _begin_child() -> None:
    for root in list(_roots):
        root._begin_process()


os.register_at_fork(after_in_child=_begin_child)
