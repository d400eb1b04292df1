"""The TCP connection between a trainer and an inference engine in another process: sessions, messages, heartbeats.

Input: an address, or a rank of the default group; headers and tensors to send. Output: the headers and tensors that the
other process sends.

[Note: sessions] A trainer opens two sockets to the server: one for requests and answers, one for heartbeats. Each of
them begins with a handshake; see [Note: handshake]. The server runs it in a thread of its own for each socket, with a
time limit, so that a socket that says nothing delays nobody. If there are too many of these sockets, the oldest one
from the address with most of them is closed. The server serves one trainer at a time. Other trainers wait in a queue,
and give up after their time-out. The server skips trainers that have given up. Nothing is pickled: a header is sent as
JSON, a tensor as its bytes. If a process dies, the operating system closes its sockets, and the other process notices
this at once.

[Note: heartbeats] At each end, a thread sends a heartbeat every second to the other end. If an end receives none for
its time-out, the other process counts as lost: it is stopped, or its host is unreachable. The thread then shuts both
sockets down, which wakes all calls that wait on them. Requests and answers have no time-out of their own.

[Note: progress] A heartbeat does not show that the other process reads and writes messages. So once a message has
begun, its next byte must be sent or received within a limit, and so must the answer to an update of weights. Between
messages there is no limit.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hmac import HMAC, compare_digest
from io import BufferedReader
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.distributed.shared_secret import shared_secret
from fsdp2_strategy.distributed.torch_internals import default_store
from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.rollout.handshake import (
    CLOSED,
    HEARTBEATS,
    REQUESTS,
    TAG_BYTES,
    VERSION,
    Credentials,
    HalfOpen,
    Keys,
    RefusedError,
    greet_engine,
    greet_trainer,
    read_exactly,
    shut_down,
)
from fsdp2_strategy.rollout.wire_values import describe, described
from fsdp2_strategy.storage.safetensors_format import memory_of

PROGRESS_SECONDS = 600.0
"""Default limit of [Note: progress]."""
_HEARTBEAT_SECONDS = 1.0
_HANDSHAKE_SECONDS = 5.0
"""Time for the whole handshake of a socket, at the server's end."""
_RETRY_SECONDS = 0.1
_REPORT_SECONDS = 10.0
"""Time between two log records about strangers."""
_BUFFER_BYTES = 1 << 20
"""Maximum number of bytes that are sent together."""
_DIRECT_BYTES = 1 << 16
"""More bytes than these are sent and received without a copy in a buffer."""
_BACKLOG = 128
"""Maximum number of trainers that wait."""
_HALF_OPEN = 64
"""Maximum number of sockets whose handshake is not complete."""
_ID_BYTES = 16
_ACCEPTED = b"accepted"
_SIZES = struct.Struct("<qq")
"""The beginning of a message: the size of its header in bytes, and the number of its tensors."""
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Errors of a socket that does not block."""


class ConnectionLostError(Exception):
    """The connection to the other process is lost, or that process violates the protocol."""


# --- addresses -------------------------------------------------------------------------------------------------------


def peer_name(address: str | None, peer: int | None) -> str:
    """Check that exactly one of an address and a rank is given, and valid; return its name for messages."""
    if (address is None) == (peer is None):
        raise RolloutError(
            f"cannot reach another process: address is {address!r} and peer is {peer!r}, expected exactly one. Set the "
            "address 'host:port', or the rank in the default group (remote_engine_address or remote_engine_rank)."
        )
    if address is not None:
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or "/" in host or not port.isdecimal():
            raise RolloutError(
                f"cannot reach another process: address is {address!r}, expected 'host:port', such as "
                "'0.0.0.0:29600'. Correct it."
            )
        return address
    if not dist.is_initialized() or not 0 <= peer < dist.get_world_size() or peer == dist.get_rank():  # type: ignore[operator]
        raise RolloutError(
            f"cannot reach another process: peer is {peer}, expected the rank of another process in the default "
            "group. Initialise the group first, or pass an address."
        )
    return f"rank {peer}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _own_hosts(store: Any) -> list[str]:
    """Return names under which other ranks reach this host, beginning with the address that routes to the store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return ["127.0.0.1"]  # a store in a file or in memory: all ranks run on this host
    hosts = [socket.gethostname()]
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing, but selects the interface
                return [str(probe.getsockname()[0]), *hosts]
    return hosts


# --- forked children --------------------------------------------------------------------------------------------------

_of_this_process: WeakSet[Listener | Connection] = WeakSet()
"""What has sockets of this process. Shutting a socket down in a forked child would end the parent's connection."""


def _abandon_sockets() -> None:
    for each in list(_of_this_process):
        each.abandon()
    _of_this_process.clear()


def _close_copy(inherited: socket.socket) -> None:
    if (descriptor := inherited.detach()) >= 0:
        os.close(descriptor)


os.register_at_fork(after_in_child=_abandon_sockets)

# --- the server's end ------------------------------------------------------------------------------------------------


class Listener:
    """The listening socket of a server, and the queue of waiting trainers; see [Note: sessions]."""

    def __init__(self, listening: socket.socket, credentials: Credentials) -> None:
        self.credentials = credentials
        self._socket = listening
        self._half_open: dict[HalfOpen, None] = {}
        """Sockets in their handshake, the oldest first."""
        self._incomplete: dict[bytes, dict[bytes, Admitted]] = {}
        """The sockets by purpose of trainers of which one socket is still missing, by the trainer's random id."""
        self._waiting: deque[tuple[Admitted, Admitted]] = deque()
        self._changed = threading.Condition()
        """Held to change these three."""
        self._next_report = 0.0
        _of_this_process.add(self)
        threading.Thread(target=self._accept_sockets, daemon=True).start()

    @property
    def port(self) -> int:
        """The port of the listening socket."""
        return int(self._socket.getsockname()[1])

    def abandon(self) -> None:
        """Close a forked child's copy of the listening socket, so that its port is free once the parent has ended."""
        _close_copy(self._socket)

    def accept(self, timeout_seconds: float, progress_seconds: float | None) -> Connection:
        """Wait for a trainer, however long it takes; the limits are those of its `Connection`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                requests, heartbeats = self._waiting.popleft()
            try:
                deadline = time.monotonic() + _HANDSHAKE_SECONDS
                requests[0].settimeout(_HANDSHAKE_SECONDS)
                requests[0].sendall(requests[1].sending.tag(_ACCEPTED))
                if requests[1].receiving.matches(read_exactly(requests[0], TAG_BYTES, deadline), _ACCEPTED):
                    return Connection(requests, heartbeats, timeout_seconds, progress_seconds)
            except OSError:  # this trainer has given up
                pass
            requests[0].close()
            heartbeats[0].close()

    def _accept_sockets(self) -> None:
        """Accept sockets without end, and start the handshake of each."""
        while True:
            try:
                accepted, address = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                time.sleep(_RETRY_SECONDS)  # there are too many open files
                continue
            half = HalfOpen(accepted, str(address[0]))
            with self._changed:
                if len(self._half_open) >= _HALF_OPEN:
                    [(busiest, _)] = Counter(each.host for each in self._half_open).most_common(1)
                    oldest = next(each for each in self._half_open if each.host == busiest)
                    del self._half_open[oldest]
                    shut_down(oldest.socket)
                self._half_open[half] = None
            try:
                threading.Thread(target=self._admit, args=(half,), daemon=True).start()
            except RuntimeError:  # there are too many threads
                with self._changed:
                    self._half_open.pop(half, None)
                accepted.close()

    def _admit(self, half: HalfOpen) -> None:
        """Run the handshake of a socket; add the trainer to the queue once both of its sockets are admitted."""
        try:
            purpose, trainer, keys = greet_trainer(half, self.credentials, time.monotonic() + _HANDSHAKE_SECONDS)
        except (OSError, RefusedError) as error:
            half.socket.close()
            self._report(half.host, error)
            return
        finally:
            with self._changed:
                self._half_open.pop(half, None)
        closed: list[Admitted] = []
        with self._changed:
            sockets = self._incomplete.setdefault(trainer, {})
            closed += [sockets[purpose]] if purpose in sockets else []
            sockets[purpose] = (half.socket, keys)
            if len(sockets) == 2:
                self._waiting.append((sockets[REQUESTS], sockets[HEARTBEATS]))
                del self._incomplete[trainer]
                self._changed.notify()
            # The oldest have probably died.
            if len(self._incomplete) > _BACKLOG:
                closed += self._incomplete.pop(next(iter(self._incomplete))).values()
            if len(self._waiting) > _BACKLOG:
                closed += self._waiting.popleft()
        for other, _ in closed:
            other.close()

    def _report(self, host: str, error: Exception) -> None:
        """Log that a socket was refused, but not for each of many."""
        if time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + _REPORT_SECONDS
            logger.warning("refused a connection from %s to port %d: it %s", host, self.port, _first_line(error))


Admitted = tuple[socket.socket, Keys]
"""A socket of a trainer that has proved that it has the secret, and its keys."""

_listeners: dict[str, Listener] = {}
"""The listeners of this process by `peer_name`; kept, so that a restarted trainer finds the same address."""


def listen(address: str | None, peer: int | None, given: Mapping[str, Any]) -> Listener:
    """Return the listener for an address or a rank; an earlier one keeps its credentials if all ``given`` are None."""
    where = peer_name(address, peer)
    store = None if address is not None else default_store()
    hosts, port = (_own_hosts(store), 0) if address is None else ([_split(address)[0]], _split(address)[1])
    name = where if address is not None else f"{where} at {hosts[0]}"
    if name not in _listeners or any(value is not None for value in given.values()):
        credentials = credentials_of(**given)
        if name in _listeners:
            _listeners[name].credentials = credentials
        else:
            try:
                _listeners[name] = Listener(_listen_at(hosts[0], port), credentials)
            except (OSError, OverflowError) as error:
                raise RolloutError(
                    f"cannot serve at {where}: {_first_line(error)}, expected a free port of this host. Check the "
                    "address."
                ) from error
    listener = _listeners[name]
    if store is not None:
        try:
            store.set(_entry(dist.get_rank(), peer), json.dumps({"hosts": hosts, "port": listener.port}))
        except RuntimeError as error:
            raise RolloutError(
                f"cannot serve {where}: writing to the store of the default group failed ({_first_line(error)}), "
                "expected a reachable store. Start all ranks again."
            ) from error
    return listener


def credentials_of(
    secret: str | None = None, secret_file: Any = None, tls: ssl.SSLContext | None = None
) -> Credentials:
    """Load the secret, and return it with the setting of TLS."""
    if tls is not None and not isinstance(tls, ssl.SSLContext):
        raise RolloutError(
            f"cannot use TLS: tls is a {type(tls).__name__}, expected an ssl.SSLContext. Pass "
            "ssl.create_default_context(...) with your certificates."
        )
    return Credentials(shared_secret(secret, secret_file, RolloutError), tls)


def listen_at_free_port(
    host: str = "127.0.0.1",
    *,
    secret: str | None = None,
    secret_file: str | Path | None = None,
    tls: ssl.SSLContext | None = None,
) -> str:
    """Listen at a port that the operating system chooses, and return the address for `serve`; not collective.

    Trainers can connect at once, and wait until `serve` is called with this address in this process.

    Args:
        host: name or address of this host, under which the trainer reaches it. The socket listens on this interface
            only; by default, on that of processes of this host.
        secret: see `serve`.
        secret_file: see `serve`.
        tls: see `serve`.

    Returns:
        "host:port".

    Raises:
        RolloutError: ``host`` is not a name or an address of this host, or the secret cannot be used.
    """
    credentials = credentials_of(secret, secret_file, tls)
    try:
        listening = _listen_at(host, 0)
    except OSError as error:
        raise RolloutError(
            f"cannot serve at {host}: {_first_line(error)}, expected a name or an address of this host. Pass the "
            "address under which the trainer reaches this host."
        ) from error
    listener = Listener(listening, credentials)
    address = f"[{host}]:{listener.port}" if ":" in host else f"{host}:{listener.port}"
    _listeners[address] = listener
    return address


def _listen_at(host: str, port: int) -> socket.socket:
    [(family, _, _, _, found), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return socket.create_server(found[:2], family=family, backlog=_BACKLOG)


def _entry(server: int, trainer: int | None) -> str:
    """Return the key of the default store under which a server publishes its address."""
    return f"fsdp2_strategy/engine/{server}-{trainer}"


# --- the trainer's end -----------------------------------------------------------------------------------------------


def connect(
    address: str | None,
    peer: int | None,
    credentials: Credentials,
    timeout_seconds: float,
    progress_seconds: float | None,
) -> Connection:
    """Connect to a server; wait at most ``timeout_seconds`` until it starts and serves no other trainer."""
    where = peer_name(address, peer)
    deadline = time.monotonic() + timeout_seconds
    if address is not None:
        hosts, port = [_split(address)[0]], _split(address)[1]
    else:
        hosts, port = _published_address(peer, where, timeout_seconds)
    while True:
        try:
            requests, heartbeats = _open_sockets(hosts, port, where, credentials, deadline)
            return Connection(requests, heartbeats, timeout_seconds, progress_seconds)
        except RefusedError as error:
            raise RolloutError(f"cannot reach an engine: {where} {error}.") from error
        except TimeoutError as error:
            raise RolloutError(
                f"cannot reach an engine: {where} has not answered in {timeout_seconds:g} s, expected an answer. Check "
                "that the process there calls serve, and is not serving another trainer."
            ) from error
        except OSError as error:
            # A server that is killed may accept connections until the operating system has closed its socket.
            if isinstance(error, ConnectionError) and time.monotonic() + _RETRY_SECONDS < deadline:
                time.sleep(_RETRY_SECONDS)
                continue
            raise RolloutError(
                f"cannot reach an engine: {where} ended the handshake ({_first_line(error)}), expected a server of an "
                f"engine with version {VERSION!r} of the protocol. Check the address, install the same version of "
                "fsdp2_strategy at both ends, or start the server again."
            ) from error


def _open_sockets(
    hosts: Sequence[str], port: int, where: str, credentials: Credentials, deadline: float
) -> list[Admitted]:
    """Open both sockets of a session, and wait until the server accepts this trainer; see [Note: sessions]."""
    trainer = secrets.token_bytes(_ID_BYTES)
    admitted: list[Admitted] = []
    opened: list[HalfOpen] = []
    try:
        for purpose in (REQUESTS, HEARTBEATS):
            opened.append(_connect_to(hosts, port, where, deadline))
            keys = greet_engine(opened[-1], purpose, trainer, credentials, deadline)
            admitted.append((opened[-1].socket, keys))
        requests, keys = admitted[0]
        if not keys.receiving.matches(read_exactly(requests, TAG_BYTES, deadline), _ACCEPTED):
            raise RefusedError("violates the protocol, expected that it accepts this trainer. Start the server again")
        requests.sendall(keys.sending.tag(_ACCEPTED))
    except BaseException:
        for half in opened:
            half.socket.close()
        raise
    return admitted


def _published_address(peer: int | None, where: str, timeout_seconds: float) -> tuple[list[str], int]:
    """Read the hosts and port of a server from the default store, in which others may have written."""
    store, entry = default_store(), _entry(peer or 0, dist.get_rank())
    try:
        store.wait([entry], timedelta(seconds=timeout_seconds))
        published = json.loads(store.get(entry))
        hosts, port = published["hosts"], published["port"]
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts) or type(port) is not int:
            raise TypeError("what is published is no address")
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        raise RolloutError(
            f"cannot reach an engine: {where} has not published an address in {timeout_seconds:g} s "
            f"({_first_line(error)}), expected a server. Call serve there."
        ) from error
    return hosts, port


def _connect_to(hosts: Sequence[str], port: int, where: str, deadline: float) -> HalfOpen:
    """Connect to the first host that accepts; retry until the deadline, because the server may still be starting."""
    while True:
        failure: Exception | None = None
        for host in hosts:
            try:
                left = max(deadline - time.monotonic(), 0.01)
                return HalfOpen(socket.create_connection((host, port), min(left, _HANDSHAKE_SECONDS)), host)
            except (OSError, OverflowError) as error:
                failure = failure or error
        if time.monotonic() + _RETRY_SECONDS >= deadline or isinstance(failure, OverflowError):
            raise RolloutError(
                f"cannot reach an engine: no server listens at {where} ({_first_line(failure)}), expected one. Check "
                "the address, and whether the server has started."
            ) from failure
        time.sleep(_RETRY_SECONDS)


# --- a session -------------------------------------------------------------------------------------------------------


class Connection:
    """A connection that sends JSON headers and tensors; see [Note: sessions] and [Note: heartbeats].

    It is closed after ``timeout_seconds`` without a heartbeat, at least two intervals of them; ``progress_seconds`` is
    the limit of [Note: progress], None for none.
    """

    def __init__(
        self, requests: Admitted, heartbeats: Admitted, timeout_seconds: float, progress_seconds: float | None
    ) -> None:
        self._requests, self._keys = requests
        self._heartbeats, self._heartbeat_keys = heartbeats
        self._timeout_seconds = max(timeout_seconds, 2 * _HEARTBEAT_SECONDS)
        self._progress_seconds = progress_seconds
        self._closed = threading.Event()
        self._in_use = threading.RLock()
        self._reason = ""
        self._requests.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._output = _Output(self._requests)
        self._input = BufferedReader(socket.SocketIO(self._requests, "r"), _DIRECT_BYTES)
        _of_this_process.add(self)
        threading.Thread(target=self._watch, daemon=True).start()

    def send(self, header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = (), *, flush: bool = True) -> None:
        """Send JSON content and plain tensors, which may change after the call.

        Without ``flush``, another message must follow at once; small messages are then sent together. If this raises
        RolloutError, nothing has been sent.
        """
        text = json.dumps({**header, "tensors": describe(tensors)} if tensors else header).encode()
        if len(text) > sizes.HEADER_BYTES:
            raise RolloutError(
                f"cannot send a header: it has {len(text)} bytes, expected at most {sizes.HEADER_BYTES}. Pass long "
                "lists of numbers as tensors."
            )
        # Before the header is written: an error here must not leave an incomplete message.
        memories = [memory_of(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()) for tensor in tensors]
        head = _SIZES.pack(len(text), len(tensors)) + text
        nbytes = len(head) + 2 * TAG_BYTES + sum(memory.nbytes for memory in memories)
        with self._connection_errors("it has not accepted data"):
            self._requests.settimeout(self._progress_seconds)
            if nbytes + self._output.nbytes > _BUFFER_BYTES:
                self._output.flush()
            self._output.write(head)
            self._output.write(self._keys.sending.tag(head))
            if memories:
                mac = self._keys.sending.begin()
                for memory in memories:
                    for part in _parts(memory):  # few enough bytes for the processor's cache
                        mac.update(part)
                        self._output.write(part)
                self._output.write(mac.digest())
            # The other end may wait for the rest of a message only for a limited time.
            if flush or nbytes > _DIRECT_BYTES:
                self._output.flush()

    def receive(self, within_seconds: float | None = None) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Wait for a header and its tensors in host memory; ``within_seconds`` limits the time to the first byte."""
        with protocol_errors(), self._connection_errors("it has sent nothing"):
            self._requests.settimeout(within_seconds)
            self._input.peek(1)
            self._requests.settimeout(self._progress_seconds)
            size = self._read(_SIZES.size)
            length, count = _SIZES.unpack(size)
            if not 0 < length <= sizes.HEADER_BYTES or not 0 <= count <= sizes.MESSAGE_TENSORS:
                raise ValueError(
                    f"a header of {length} bytes for {count} tensors, expected at most {sizes.HEADER_BYTES} and "
                    f"{sizes.MESSAGE_TENSORS}"
                )
            text = self._read(length)
            self._check_tag(self._keys.receiving.tag(size + text))
            header = json.loads(text)
            if not isinstance(header, dict):
                raise ValueError("a header that is not a mapping")
            if not (kinds := described(header, count)):
                return header, []
            mac = self._keys.receiving.begin()
            tensors = [self._read_tensor(dtype, shape, mac) for dtype, shape in kinds]
            self._check_tag(mac.digest())
            return header, tensors

    def _read(self, nbytes: int) -> bytes:
        data = self._input.read(nbytes)
        if len(data) < nbytes:
            raise ConnectionError(CLOSED)
        return data

    def _read_tensor(self, dtype: torch.dtype, shape: list[int], mac: HMAC) -> torch.Tensor:
        """Read a tensor, and add its bytes to a MAC."""
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        for part in _parts(memory_of(tensor)):
            if self._input.readinto(part) < part.nbytes:
                raise ConnectionError(CLOSED)
            mac.update(part)
        return tensor

    def _check_tag(self, expected: bytes) -> None:
        if not compare_digest(self._read(TAG_BYTES), expected):
            raise ValueError("a message was altered on its way")

    def close(self) -> None:
        """Close the connection, which wakes all waiting calls at both ends; idempotent."""
        self._closed.set()
        for each in (self._requests, self._heartbeats):
            shut_down(each)
        with self._in_use:  # close only when no thread uses the descriptor: its number may be reused
            for stream in (self._input, self._requests):
                with suppress(OSError):
                    stream.close()

    def abandon(self) -> None:
        """Close a forked child's copies of the sockets, so that the connection stays open, and ends with the parent."""
        self._reason = "it belongs to the process that this one was forked from"
        self._closed, self._in_use = threading.Event(), threading.RLock()  # the old ones may be held by other threads
        self._closed.set()
        for each in (self._requests, self._heartbeats):
            _close_copy(each)

    def _watch(self) -> None:
        """Send and receive heartbeats; see [Note: heartbeats]."""
        last_heartbeat = time.monotonic()
        outgoing, incoming = b"", b""
        self._heartbeats.setblocking(False)
        with self._heartbeats, suppress(OSError):
            while not self._reason and not self._closed.wait(_HEARTBEAT_SECONDS):
                with suppress(*_NOT_NOW):
                    outgoing = outgoing or self._heartbeat_keys.sending.tag()
                    outgoing = outgoing[self._heartbeats.send(outgoing) :]
                with suppress(*_NOT_NOW):
                    while not self._reason:
                        received = self._heartbeats.recv(1 << 12)
                        incoming += received
                        if not received:
                            self._reason = CLOSED
                        while len(incoming) >= TAG_BYTES and not self._reason:
                            tag, incoming = incoming[:TAG_BYTES], incoming[TAG_BYTES:]
                            last_heartbeat = time.monotonic()
                            if not self._heartbeat_keys.receiving.matches(tag):
                                self._reason = "it violates the protocol: a heartbeat was altered on its way"
                if time.monotonic() - last_heartbeat >= self._timeout_seconds:
                    self._reason = self._reason or f"no heartbeat for {self._timeout_seconds:g} s"
        self.close()

    @contextmanager
    def _connection_errors(self, stalled: str) -> Iterator[None]:
        try:
            with self._in_use:
                yield
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and not self._closed.is_set():
                raise
            if isinstance(error, TimeoutError) and not self._closed.is_set():
                self._reason = f"{stalled} for {self._requests.gettimeout():g} s, although its heartbeats arrive"
            self.close()
            raise ConnectionLostError(self._reason or _first_line(error)) from error


class _Output:
    """The bytes to send on a socket, of which small ones are sent together."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = bytearray()

    @property
    def nbytes(self) -> int:
        """Number of bytes that wait for `flush`."""
        return len(self._buffer)

    def write(self, data: bytes | memoryview) -> None:
        """Send bytes, or keep them until the next `flush`."""
        if len(self._buffer) + len(data) > _BUFFER_BYTES:
            self.flush()
        if len(data) > _DIRECT_BYTES:
            self.flush()
            self._send(memoryview(data))
        else:
            self._buffer += data

    def flush(self) -> None:
        """Send all bytes."""
        with memoryview(self._buffer) as waiting:
            self._send(waiting)
        self._buffer.clear()

    def _send(self, data: memoryview) -> None:
        """Send bytes; the socket's time-out is that of each part, so that it ends only what makes no progress."""
        sent = 0
        while sent < len(data):
            sent += self._socket.send(data[sent : sent + _BUFFER_BYTES])


def _parts(memory: memoryview) -> Iterator[memoryview]:
    for start in range(0, memory.nbytes, sizes.CACHED_BYTES):
        yield memory[start : start + sizes.CACHED_BYTES]


@contextmanager
def protocol_errors() -> Iterator[None]:
    """Raise `ConnectionLostError` if the block cannot interpret a message from the other end."""
    try:
        yield
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ConnectionLostError(f"it violates the protocol: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
