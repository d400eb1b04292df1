"""Send requests to a remote root, with retries and time limits; fork-safe.

Input: a URL that fsspec supports, and paths below it. Output: sizes and bytes, or an error that names the file.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fsdp2_strategy.errors import DataError
from fsdp2_strategy.extras import needed_to

with needed_to("read LeRobot's data sets"):
    import aiohttp
    import fsspec
    from fsspec.asyn import sync

_LONGEST_PAUSE_SECONDS = 30.0

_T = TypeVar("_T")


class RemoteRoot:
    """A remote root. A request raises a `DataError` at once if the file is missing, else after the last of its tries.

    ``timeout_seconds`` limits one try, which fetches up to 8 MiB or a whole file; file systems of fsspec that are not
    asynchronous (such as hf://) have their own limits. ``backoff_seconds`` is the pause before the second try; it
    doubles with each try.
    """

    def __init__(
        self,
        url: str,
        *,
        tries: int = 5,
        timeout_seconds: float = 60.0,
        backoff_seconds: float = 0.5,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.tries = tries
        self.timeout_seconds = timeout_seconds
        self.backoff_seconds = backoff_seconds
        self.storage_options = storage_options or {}
        try:
            fsspec.get_filesystem_class(fsspec.core.split_protocol(url)[0])
        except (ImportError, ValueError) as error:
            raise DataError(
                f"cannot read {url}: {error}, expected a scheme that fsspec supports. Install the package for this "
                "scheme, or pass a local folder."
            ) from error
        self._connection: tuple[int, Any, str] | None = None
        """The id of the process that opened the connection, fsspec's file system, and the root's path in it."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_connection": None}

    def location(self, path: str) -> str:
        """Return the URL of a file."""
        return f"{self.url}/{path}"

    def exists(self, path: str) -> bool:
        """Return whether the file exists; raise a `DataError` if all tries fail."""
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
                f"cannot read byte ranges of {self.location(path)}: its size is missing in the server's answer, "
                "expected a number. Copy the data set to a local disk."
            )
        return int(size)

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        return bytes(self._ask(path, "the whole file", lambda: self._call("cat_file", path)))

    def range(self, path: str, start: int, end: int, size: int) -> bytes:
        """Return bytes ``start`` to ``end`` (exclusive) of a file; all bytes if the server does not support ranges."""

        def ask() -> bytes:
            data: bytes = self._call("cat_file", path, start=start, end=end)
            if len(data) not in (end - start, size):
                raise EOFError(f"received {len(data)} bytes, expected {end - start}")
            return data

        return self._ask(path, f"bytes {start} to {end}", ask)

    def _ask(self, path: str, what: str, ask: Callable[[], _T]) -> _T:
        last: BaseException | None = None
        for tried in range(self.tries):
            if tried:
                # Not a seeded generator: its values would be the same in all forked children and after each resume.
                jitter = random.SystemRandom().uniform(0.5, 1.5)
                time.sleep(min(self.backoff_seconds * 2 ** (tried - 1), _LONGEST_PAUSE_SECONDS) * jitter)
            try:
                return ask()
            except Exception as error:
                if _is_missing(error):
                    raise DataError(
                        f"cannot read {self.location(path)}: the file is missing, expected a file of the data set. "
                        "Check the address, and that the copy is complete."
                    ) from error
                last = error.__cause__ if isinstance(error, FileNotFoundError) else error
        raise DataError(
            f"cannot read {self.location(path)}: the request for {what} failed {self.tries} times, the last time with "
            f"{type(last).__name__}({last}), expected an answer within {self.timeout_seconds} s. Check the server and "
            "the network, or increase tries or timeout_seconds."
        ) from last

    def _call(self, name: str, path: str, **arguments: Any) -> Any:
        connection = self._connection
        if connection is None or connection[0] != os.getpid():
            self._connection = connection = (os.getpid(), *fsspec.core.url_to_fs(self.url, **self.storage_options))
            _connections.append(connection)
        _, files, root = connection
        if files.async_impl:
            method, timeout = getattr(files, f"_{name}"), self.timeout_seconds
            return sync(files.loop, method, f"{root}/{path}", timeout=timeout, **arguments)
        if name == "cat_file" and type(files).cat_file is fsspec.AbstractFileSystem.cat_file:
            arguments["cache_type"] = "none"  # this method opens the file, and open files read ahead by default
        return getattr(files, name)(f"{root}/{path}", **arguments)


def _is_missing(error: Exception) -> bool:
    """Return whether the file is missing; fsspec raises FileNotFoundError for other HTTP failures too."""
    if not isinstance(error, FileNotFoundError):
        return False
    cause = error.__cause__
    return not isinstance(cause, aiohttp.ClientError | TimeoutError) or getattr(cause, "status", None) in {404, 410}


# A forked child must not use its parent's connections. It must not free them either, because their finalizers would
# remove them from the event loop that parent and child share. fsspec's cache keeps file systems alive, but a child
# clears this cache. The list below keeps them alive in the child too.
_connections: list[object] = []
