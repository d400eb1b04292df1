"""A server of files over HTTP on this machine, which counts what it sends and fails when told to.

Input: a folder. Output: its files, by ranges or whole; and what was asked for and sent, by path.
"""

from __future__ import annotations

import re
import socket
import threading
import weakref
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote

_PIECE_BYTES = 1 << 20


class FileServer:
    """Serve a folder until the end of the ``with`` block.

    Args:
        root: the folder.
        ranges: whether it honours Range; without, it sends whole files.
        delay_seconds: how long it lets each request wait.

    Attributes:
        url: where it is.
        requests: how many GETs came, by path. `heads`: how many HEADs. `sent`: how many bytes of content went.
        ranges_asked: the ranges that were asked for, by path: first byte and the one after the last.
    """

    def __init__(self, root: Path, *, ranges: bool = True, delay_seconds: float = 0.0) -> None:
        self.root, self.ranges, self.delay_seconds = root, ranges, delay_seconds
        self.requests: Counter[str] = Counter()
        self.heads: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.ranges_asked: dict[str, list[tuple[int, int]]] = {}
        self._failures: list[str] = []
        self._missing: set[str] = set()
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._closing = threading.Event()
        self._arrived = threading.Semaphore(0)
        self._http = _Http(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> FileServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._closing.set()
        self._open.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self._http.hang_up()

    def fail(self, times: int, how: str = "500") -> None:
        """Fail the next GETs.

        Args:
            times: how many.
            how: by a ``"500"``; a ``"close"`` of the connection after half of the content; or a ``"short"`` answer,
                which has half of the content and says that this is all.
        """
        with self._lock:
            self._failures += [how] * times

    def lose(self, path: str) -> None:
        """Answer 404 for a path from now on."""
        self._missing.add(path)

    def hang(self) -> None:
        """Let the content of all GETs wait from now on, until `release`."""
        self._open.clear()

    def release(self) -> None:
        """Let all that waits go on."""
        self._open.set()

    def wait_for_request(self, timeout: float = 30) -> None:
        """Return once one more GET has arrived than calls of this before."""
        assert self._arrived.acquire(timeout=timeout), "no request came"

    def forget(self) -> None:
        """Begin to count anew."""
        with self._lock:
            for counted in (self.requests, self.heads, self.sent, self.ranges_asked):
                counted.clear()
            while self._arrived.acquire(blocking=False):
                pass


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def hang_up(self) -> None:
        """Close the connections that clients keep for later."""
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that went away: tests kill them."""


def _handler(server: FileServer) -> type[BaseHTTPRequestHandler]:  # noqa: C901
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            path = self._path()
            with server._lock:
                server.heads[path] += 1
            if self._file(path) is not None:
                self._head(200, (server.root / path).stat().st_size)

        def do_GET(self) -> None:
            path = self._path()
            with server._lock:
                server.requests[path] += 1
                failure = server._failures.pop(0) if server._failures else None
            server._arrived.release()
            server._closing.wait(server.delay_seconds) if server.delay_seconds else None
            server._open.wait()
            if failure == "500":
                self._head(500, 0)
            elif (file := self._file(path)) is not None:
                self._send(path, file, failure)

        def _path(self) -> str:
            return unquote(self.path.partition("?")[0]).lstrip("/")

        def _file(self, path: str) -> Path | None:
            file = server.root / path
            if path not in server._missing and file.is_file():
                return file
            self._head(404, 0)
            return None

        def _head(self, status: int, length: int, content_range: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            if content_range:
                self.send_header("Content-Range", content_range)
            self.end_headers()

        def _send(self, path: str, file: Path, failure: str | None) -> None:
            size = file.stat().st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if server.ranges else None
            start, end = 0, size
            if asked:
                start, end = int(asked[1]), min(int(asked[2]) + 1, size) if asked[2] else size
                if failure == "short":
                    end = start + (end - start) // 2
                self._head(206, end - start, f"bytes {start}-{end - 1}/{size}")
            else:
                self._head(200, size)
            with server._lock:
                server.ranges_asked.setdefault(path, []).append((start, end))
            stop = start + (end - start) // 2 if failure == "close" else end
            with file.open("rb") as content:
                content.seek(start)
                while start < stop:
                    piece = content.read(min(_PIECE_BYTES, stop - start))
                    with server._lock:
                        server.sent[path] += len(piece)
                    self.wfile.write(piece)
                    start += len(piece)
            self.close_connection = failure == "close"

    return Handler
