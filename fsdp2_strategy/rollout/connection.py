"""The TCP connection between a trainer and an inference engine in another process: handshake, messages, heartbeats.

Input: an address, or a rank of the default group; headers and tensors to send. Output: the headers and tensors that the
other process sends.

[Note: sessions] A trainer opens two sockets to the server: one for requests and answers, one for heartbeats. The server
serves one trainer at a time. Other trainers wait in the queue of the listening socket, and give up after their
time-out. The server skips trainers that have given up. Nothing is pickled: a header is sent as JSON, a tensor as its
bytes. If a process dies, the operating system closes its sockets, and the other process notices this at once.

[Note: heartbeats] At each end, a thread sends one byte every second to the other end. If an end receives no byte for
its time-out, the other process counts as lost: it is stopped, or its host is unreachable. The thread then shuts both
sockets down, which wakes all calls that wait on them. Requests and answers have no time-out of their own.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import BufferedReader, BufferedWriter
from typing import Any

import torch
import torch.distributed as dist

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.distributed.torch_internals import default_store
from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.hf.safetensors_format import memory_of

_HEARTBEAT_SECONDS = 1.0
_HANDSHAKE_SECONDS = 5.0
_RETRY_SECONDS = 0.1
_BUFFER_BYTES = 1 << 20
_CLOSED = "the connection is closed"
_BACKLOG = 128
_ID_BYTES = 16
_ACCEPTED = b"fsdp2 engine v04"
_REQUESTS, _HEARTBEATS = b"r", b"h"
_OPEN_TO_ALL = b"fsdp2 trainer 04"
"""The key of every server at an address. A server for a rank has a random key, published in the default store."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")  # quantized tensors also have scales
}


class ConnectionLostError(Exception):
    """The connection to the other process is lost, or that process violates the protocol."""


# --- addresses -------------------------------------------------------------------------------------------------------


def peer_name(address: str | None, peer: int | None) -> str:
    """Check an address or a rank, and return its name for messages.

    Raises:
        RolloutError: both address and peer are given, or neither; the address is malformed; or ``peer`` is not another
            rank of an initialised default group.
    """
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
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store.host, store.port))  # sends nothing, but selects the interface
        hosts.insert(0, probe.getsockname()[0])
    return hosts


# --- the server's end ------------------------------------------------------------------------------------------------


class Listener:
    """The listening socket of a server, and the queue of waiting trainers; see [Note: sessions]."""

    def __init__(self, listening: socket.socket, key: bytes) -> None:
        self.key = key
        self._socket = listening
        self._incomplete: dict[bytes, dict[bytes, socket.socket]] = {}
        """The sockets by purpose of trainers of which one socket is still missing, by the trainer's random id."""
        self._waiting: deque[tuple[socket.socket, socket.socket]] = deque()

    @property
    def port(self) -> int:
        """The port of the listening socket."""
        return int(self._socket.getsockname()[1])

    def accept(self, timeout_seconds: float) -> Connection:
        """Wait for a trainer, however long it takes, and return the connection to it.

        Args:
            timeout_seconds: see `Connection`.
        """
        while True:
            while not self._waiting:
                self._accept_socket()
            requests, heartbeats = self._waiting.popleft()
            try:
                requests.sendall(_ACCEPTED)
                if _read(requests, len(_ACCEPTED)) == _ACCEPTED:
                    return Connection(requests, heartbeats, timeout_seconds)
            except OSError:  # this trainer has given up
                pass
            requests.close()
            heartbeats.close()

    def _accept_socket(self) -> None:
        """Accept one socket; add the trainer to the queue once both of its sockets are accepted."""
        other, _ = self._socket.accept()
        other.settimeout(_HANDSHAKE_SECONDS)
        try:
            key, trainer, purpose = (_read(other, n) for n in (_ID_BYTES, _ID_BYTES, len(_REQUESTS)))
        except OSError:
            key = b""
        if key != self.key or purpose not in (_REQUESTS, _HEARTBEATS):
            other.close()
            return
        sockets = self._incomplete.setdefault(trainer, {})
        sockets[purpose] = other
        if len(sockets) == 2:
            self._waiting.append((sockets[_REQUESTS], sockets[_HEARTBEATS]))
            del self._incomplete[trainer]
        elif len(self._incomplete) > _BACKLOG:  # close the oldest: its trainer has probably died
            for oldest in self._incomplete.pop(next(iter(self._incomplete))).values():
                oldest.close()


_listeners: dict[str, Listener] = {}
"""The listeners of this process by `peer_name`; kept, so that a restarted trainer finds the same address."""


def listen(address: str | None, peer: int | None) -> Listener:
    """Return the listener for an address or a rank; reuse the listener of an earlier session.

    Raises:
        RolloutError: the address or rank is invalid; the address is in use, or is not an address of this host; or the
            store of the default group is unreachable.
    """
    where = peer_name(address, peer)
    if where not in _listeners:
        try:
            if address is None:
                _listeners[where] = Listener(_listen_on_all_interfaces(), secrets.token_bytes(_ID_BYTES))
            else:
                _listeners[where] = Listener(_listen_at(*_split(address)), _OPEN_TO_ALL)
        except (OSError, OverflowError) as error:
            raise RolloutError(
                f"cannot serve at {where}: {_first_line(error)}, expected a free port of this host. Check the address."
            ) from error
    listener = _listeners[where]
    if address is None:
        store = default_store()
        published = {"hosts": _own_hosts(store), "port": listener.port, "key": listener.key.hex()}
        try:
            store.set(_entry(dist.get_rank(), peer), json.dumps(published))
        except RuntimeError as error:
            raise RolloutError(
                f"cannot serve {where}: writing to the store of the default group failed ({_first_line(error)}), "
                "expected a reachable store. Start all ranks again."
            ) from error
    return listener


def listen_at_free_port(host: str) -> str:
    """Listen at a port that the operating system chooses, and return the address for `serve`; not collective.

    Trainers can connect at once, and wait until `serve` is called with this address in this process.

    Args:
        host: name or address of this host, under which the trainer reaches it.

    Returns:
        "host:port".

    Raises:
        RolloutError: ``host`` is not a name or an address of this host.
    """
    try:
        listening = _listen_at(host, 0)
    except OSError as error:
        raise RolloutError(
            f"cannot serve at {host}: {_first_line(error)}, expected a name or an address of this host. Pass the "
            "address under which the trainer reaches this host."
        ) from error
    listener = Listener(listening, _OPEN_TO_ALL)
    address = f"[{host}]:{listener.port}" if ":" in host else f"{host}:{listener.port}"
    _listeners[address] = listener
    return address


def _listen_at(host: str, port: int) -> socket.socket:
    [(family, _, _, _, found), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return socket.create_server(found[:2], family=family, backlog=_BACKLOG)


def _listen_on_all_interfaces() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def _entry(server: int, trainer: int | None) -> str:
    """Return the key of the default store under which a server publishes its address."""
    return f"fsdp2_strategy/engine/{server}-{trainer}"


# --- the trainer's end -----------------------------------------------------------------------------------------------


def connect(address: str | None, peer: int | None, timeout_seconds: float) -> Connection:
    """Connect to a server.

    Args:
        address: address of the server; see `peer_name`.
        peer: rank of the server; an alternative to ``address``.
        timeout_seconds: maximum time to wait until the server starts and is not serving another trainer. Also the
            time-out of the connection; see `Connection`.

    Raises:
        RolloutError: the address or rank is invalid, no server listens there, or the server does not accept this
            trainer in time.
    """
    where = peer_name(address, peer)
    deadline = time.monotonic() + timeout_seconds
    if address is not None:
        hosts, port, key = [_split(address)[0]], _split(address)[1], _OPEN_TO_ALL
    else:
        hosts, port, key = _published_address(peer, where, timeout_seconds)
    while True:
        try:
            requests, heartbeats = _shake_hands(hosts, port, where, key, deadline)
            return Connection(requests, heartbeats, timeout_seconds)
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
                f"cannot reach an engine: {where} ended the handshake ({_first_line(error)}), expected a server "
                "of an engine. Check the address, or start the server again."
            ) from error


def _shake_hands(
    hosts: Sequence[str], port: int, where: str, key: bytes, deadline: float
) -> tuple[socket.socket, socket.socket]:
    """Open both sockets of a session, and wait until the server accepts this trainer; see [Note: sessions].

    Raises:
        RolloutError: no server listens there.
        OSError: the server ended the handshake, or did not answer before the deadline.
    """
    sockets: list[socket.socket] = []
    try:
        trainer = secrets.token_bytes(_ID_BYTES)
        for purpose in (_REQUESTS, _HEARTBEATS):
            sockets.append(_connect_to(hosts, port, where, deadline))
            sockets[-1].sendall(key + trainer + purpose)
        requests, heartbeats = sockets
        requests.settimeout(max(deadline - time.monotonic(), 0.01))
        if _read(requests, len(_ACCEPTED)) != _ACCEPTED:
            raise OSError("another program listens there")
        requests.sendall(_ACCEPTED)
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return requests, heartbeats


def _published_address(peer: int | None, where: str, timeout_seconds: float) -> tuple[list[str], int, bytes]:
    """Read the hosts, port and key of a server from the default store."""
    store, entry = default_store(), _entry(peer or 0, dist.get_rank())
    try:
        store.wait([entry], timedelta(seconds=timeout_seconds))
        published = json.loads(store.get(entry))
    except (RuntimeError, ValueError) as error:
        raise RolloutError(
            f"cannot reach an engine: {where} has not published an address in {timeout_seconds:g} s "
            f"({_first_line(error)}), expected a server. Call serve there."
        ) from error
    return published["hosts"], published["port"], bytes.fromhex(published["key"])


def _connect_to(hosts: Sequence[str], port: int, where: str, deadline: float) -> socket.socket:
    """Connect to the first host that accepts; retry until the deadline, because the server may still be starting."""
    while True:
        failure: Exception | None = None
        for host in hosts:
            try:
                left = max(deadline - time.monotonic(), 0.01)
                return socket.create_connection((host, port), min(left, _HANDSHAKE_SECONDS))
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

    Args:
        requests: the connected socket for headers and tensors.
        heartbeats: the connected socket for heartbeats.
        timeout_seconds: time without a heartbeat after which the connection is closed. If it is shorter than two
            heartbeat intervals, two intervals are used.
    """

    def __init__(self, requests: socket.socket, heartbeats: socket.socket, timeout_seconds: float) -> None:
        self._requests, self._heartbeats = requests, heartbeats
        self._timeout_seconds = max(timeout_seconds, 2 * _HEARTBEAT_SECONDS)
        self._closed = threading.Event()
        self._in_use = threading.RLock()
        self._reason = ""
        requests.settimeout(None)
        requests.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._output = BufferedWriter(socket.SocketIO(requests, "w"), _BUFFER_BYTES)
        self._input = BufferedReader(socket.SocketIO(requests, "r"), _BUFFER_BYTES)
        threading.Thread(target=self._watch, daemon=True).start()

    def send(self, header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = (), *, flush: bool = True) -> None:
        """Send a header and tensors; the caller may change the tensors after the call.

        Args:
            header: JSON content.
            tensors: plain tensors; see `is_plain`.
            flush: False if another message follows at once, so that small messages are sent together.

        Raises:
            RolloutError: the header is too large. Nothing has been sent.
            ConnectionLostError: the connection is lost.
        """
        described = [(_dtype_name(tensor), list(tensor.shape)) for tensor in tensors]
        text = json.dumps({**header, "tensors": described} if described else header).encode()
        if len(text) > sizes.HEADER_BYTES:
            raise RolloutError(
                f"cannot send a header: it has {len(text)} bytes, expected at most {sizes.HEADER_BYTES}. Pass long "
                "lists of numbers as tensors."
            )
        # Before the header is written: an error here must not leave an incomplete message.
        memories = [memory_of(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()) for tensor in tensors]
        with self._connection_errors():
            self._output.write(struct.pack("<q", len(text)) + text)
            for memory in memories:
                self._output.write(memory)
            if flush:
                self._output.flush()

    def receive(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Wait for a header and its tensors without a time-out, and return them; the tensors are in host memory."""
        with protocol_errors(), self._connection_errors():
            [length] = struct.unpack("<q", self._read(8))
            if not 0 < length <= sizes.HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, Any] = dict(json.loads(self._read(length)))
            return header, [self._read_tensor(dtype, shape) for dtype, shape in header.get("tensors", ())]

    def _read(self, nbytes: int) -> bytes:
        data = self._input.read(nbytes)
        if len(data) < nbytes:
            raise ConnectionError(_CLOSED)
        return data

    def _read_tensor(self, dtype: str, shape: list[int]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")
        if self._input.readinto(memory_of(tensor)) < tensor.nbytes:
            raise ConnectionError(_CLOSED)
        return tensor

    def close(self) -> None:
        """Close the connection, which wakes all waiting calls at both ends; idempotent."""
        self._closed.set()
        for each in (self._requests, self._heartbeats):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._in_use:  # close only when no thread uses the descriptor: its number may be reused
            for stream in (self._output, self._input, self._requests):
                with suppress(OSError):
                    stream.close()

    def _watch(self) -> None:
        """Send and receive heartbeats; see [Note: heartbeats]."""
        last_heartbeat = time.monotonic()
        self._heartbeats.setblocking(False)
        with self._heartbeats, suppress(OSError):
            while not self._closed.wait(_HEARTBEAT_SECONDS):
                with suppress(BlockingIOError):
                    self._heartbeats.send(b".")
                with suppress(BlockingIOError):
                    if not self._heartbeats.recv(1 << 12):
                        self._reason = _CLOSED
                        break
                    last_heartbeat = time.monotonic()
                if time.monotonic() - last_heartbeat >= self._timeout_seconds:
                    self._reason = f"no heartbeat for {self._timeout_seconds:g} s"
                    break
        self.close()

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        try:
            with self._in_use:
                yield
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and not self._closed.is_set():
                raise
            self.close()
            raise ConnectionLostError(self._reason or _first_line(error)) from error


def _read(connection: socket.socket, nbytes: int) -> bytes:
    """Read exactly ``nbytes`` of a handshake, without a buffer, because later bytes belong to the session."""
    data = b""
    while len(data) < nbytes:
        received = connection.recv(nbytes - len(data))
        if not received:
            raise ConnectionError(_CLOSED)
        data += received
    return data


@contextmanager
def protocol_errors() -> Iterator[None]:
    """Raise `ConnectionLostError` if the block cannot interpret a message from the other end."""
    try:
        yield
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ConnectionLostError(f"it violates the protocol: {type(error).__name__}: {_first_line(error)}") from error


# --- values as headers and tensors -----------------------------------------------------------------------------------


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be sent as dtype, shape and bytes: dense, not on meta, not quantized, no subclass."""
    is_dense = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    return is_dense and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def to_json(value: Any, what: str, tensors: list[torch.Tensor]) -> Any:
    """Return a value as JSON content; append its tensors to ``tensors``.

    Args:
        value: the value.
        what: name of the value in error messages.
        tensors: the list to which plain tensors of the value are appended.

    Raises:
        RolloutError: the value, or a value in it, has a type that cannot be sent.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor) and is_plain(value):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        keys = [to_json(key, f"a key of {what}", tensors) for key in value]
        values = [to_json(inner, f"{what}[{key!r}]", tensors) for key, inner in value.items()]
        return {"dict": list(zip(keys, values, strict=True))}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [to_json(v, f"{what}[{i}]", tensors) for i, v in enumerate(value)]}
    raise RolloutError(
        f"cannot send {what}: it is a {type(value).__name__}, expected numbers, strings, None, plain dense tensors, "
        "and lists, tuples and mappings of them. Convert it (a DTensor with full_tensor()), because nothing is pickled."
    )


def from_json(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value that was passed to `to_json`, with its tensors on this process's device."""
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    if kind == "tensor":
        return tensors[inner].to(current_device())
    if kind == "dict":
        return {from_json(k, tensors): from_json(v, tensors) for k, v in inner}
    return (list if kind == "list" else tuple)(from_json(v, tensors) for v in inner)


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
