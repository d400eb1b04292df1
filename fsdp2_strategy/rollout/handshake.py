"""The handshake of a trainer and an engine on a new socket, and the keys that authenticate what follows.

Input: a connected socket, and the secret that both ends share. Output: the keys of the socket's two directions.

[Note: handshake] Each end first says in clear text which role and protocol version it has, and whether it uses TLS. An
end of another version, or with another setting of TLS, is refused by name. With TLS, the TLS handshake follows. Then
the trainer sends a random number, and the server answers with one of its own. Each end proves that it has the secret,
with an HMAC over its role and all bytes exchanged so far, the trainer first. The roles differ, so that a proof cannot
be sent back to its sender, and the random numbers are new, so that it cannot be sent again. The secret itself is never
sent.

[Note: frame authentication] The keys of a socket are HMACs of the secret over the handshake, one for each direction. In
each direction, the parts of messages and the heartbeats are numbered, and each of them is followed by its HMAC-SHA256.
So a part that was altered, repeated, left out, or copied from another socket or session is noticed before it is used.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import ssl
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

from fsdp2_strategy.distributed.shared_secret import SharedSecret

VERSION = "05"
REQUESTS, HEARTBEATS = b"r", b"h"
TAG_BYTES = 32
CLOSED = "the connection is closed"
_NAMES = {"trainer": "fsdp2 trainer ", "engine": "fsdp2 engine v"}
"""What the greeting of each role begins with, before the version."""
_NAME_BYTES, _GREETING_BYTES = 16, 48
_ID_BYTES, _NONCE_BYTES = 16, 32
_MOST_UNREAD_BYTES = 1 << 12
_REFUSED = bytes(TAG_BYTES)


class RefusedError(Exception):
    """The other end cannot take part in the handshake, also if it is tried again."""


@dataclass(frozen=True)
class Credentials:
    """How an end authenticates the other one."""

    secret: SharedSecret
    tls: ssl.SSLContext | None


class FrameKey:
    """Authenticate what is sent in one direction of a socket; see [Note: frame authentication]."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")
        self._count = 0

    def begin(self) -> hmac.HMAC:
        """Return the MAC of the next part, to which its bytes have to be added."""
        mac = self._keyed.copy()
        mac.update(struct.pack("<Q", self._count))
        self._count += 1
        return mac

    def tag(self, content: bytes = b"") -> bytes:
        """Return the tag of the next part."""
        mac = self.begin()
        mac.update(content)
        return mac.digest()

    def matches(self, tag: bytes, content: bytes = b"") -> bool:
        """Return whether a received tag is that of the next part."""
        return hmac.compare_digest(tag, self.tag(content))


@dataclass(frozen=True)
class Keys:
    """The keys of the two directions of a socket, from the view of one end."""

    sending: FrameKey
    receiving: FrameKey


# --- both ends -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class HalfOpen:
    """A socket whose handshake is not complete."""

    socket: socket.socket
    """Replaced if TLS is used; closed by the caller after an error."""
    host: str
    """Name or address of the other end."""


def shut_down(connected: socket.socket) -> None:
    """Wake the threads that use a socket."""
    with suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)  # that of SSLSocket would go on in clear text


def greet_engine(half: HalfOpen, purpose: bytes, trainer: bytes, credentials: Credentials, deadline: float) -> Keys:
    """Run the trainer's end of the handshake; ``trainer`` is a random number, equal for both of its sockets."""
    own = _greeting("trainer", credentials)
    _send(half.socket, own, deadline)
    greeting = _read_greeting(half.socket, "engine", deadline)
    _check_tls(greeting, "engine", credentials)
    if credentials.tls is not None:
        _start_tls(half, credentials.tls, deadline, is_server=False)
    hello = purpose + trainer + secrets.token_bytes(_NONCE_BYTES)
    _send(half.socket, hello, deadline)
    transcript = own + greeting + hello + read_exactly(half.socket, _NONCE_BYTES, deadline)
    _send(half.socket, credentials.secret.mac(b"proof of the trainer", transcript), deadline)
    proof = read_exactly(half.socket, TAG_BYTES, deadline)
    if not hmac.compare_digest(proof, credentials.secret.mac(b"proof of the engine", transcript)):
        raise RefusedError(
            f"has another secret than {credentials.secret.origin}, expected the same one at both ends. Copy the file "
            "to the other host, and pass secret_file (remote_engine_secret_file) at both ends"
        )
    to_engine, to_trainer = _keys(credentials, transcript)
    return Keys(sending=to_engine, receiving=to_trainer)


def greet_trainer(half: HalfOpen, credentials: Credentials, deadline: float) -> tuple[bytes, bytes, Keys]:
    """Run the server's end; return the socket's purpose, the trainer's random number, and the keys."""
    own = _greeting("engine", credentials)
    try:
        greeting = _read_greeting(half.socket, "trainer", deadline)
    except _OtherVersionError:
        with suppress(OSError):
            _send(half.socket, own, deadline)
            half.socket.shutdown(socket.SHUT_WR)
            # Closing a socket with unread bytes would discard what was sent.
            read_exactly(half.socket, _MOST_UNREAD_BYTES, deadline)
        raise
    _send(half.socket, own, deadline)
    _check_tls(greeting, "trainer", credentials)
    if credentials.tls is not None:
        _start_tls(half, credentials.tls, deadline, is_server=True)
    hello = read_exactly(half.socket, 1 + _ID_BYTES + _NONCE_BYTES, deadline)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    _send(half.socket, nonce, deadline)
    transcript = greeting + own + hello + nonce
    proof = read_exactly(half.socket, TAG_BYTES, deadline)
    if not hmac.compare_digest(proof, credentials.secret.mac(b"proof of the trainer", transcript)):
        _send(half.socket, _REFUSED, deadline)
        raise RefusedError(f"has another secret than {credentials.secret.origin}")
    _send(half.socket, credentials.secret.mac(b"proof of the engine", transcript), deadline)
    purpose = hello[:1]
    if purpose not in (REQUESTS, HEARTBEATS):
        raise RefusedError("violates the protocol")
    to_engine, to_trainer = _keys(credentials, transcript)
    return purpose, hello[1 : 1 + _ID_BYTES], Keys(sending=to_trainer, receiving=to_engine)


def read_exactly(connected: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Read exactly ``nbytes`` without a buffer, because later bytes are those of the session."""
    data = b""
    while len(data) < nbytes:
        connected.settimeout(_left(deadline))
        received = connected.recv(nbytes - len(data))
        if not received:
            raise ConnectionError(CLOSED)
        data += received
    return data


class _OtherVersionError(RefusedError):
    """The other end has another version of the protocol."""


def _greeting(role: str, credentials: Credentials) -> bytes:
    mode = "plain" if credentials.tls is None else "tls"
    return f"{_NAMES[role]}{VERSION} {mode}".ljust(_GREETING_BYTES - 1).encode() + b"\n"


def _read_greeting(connected: socket.socket, role: str, deadline: float) -> bytes:
    name = read_exactly(connected, _NAME_BYTES, deadline)
    expected = _NAMES[role].encode()
    if not name.startswith(expected):
        raise RefusedError(f"is another program than a{'n' * (role == 'engine')} {role}")
    if name != expected + VERSION.encode():
        version = name[len(expected) :].decode("ascii", "replace")
        raise _OtherVersionError(
            f"has version {version!r} of the protocol, expected {VERSION!r}. Install the same version of "
            "fsdp2_strategy at both ends"
        )
    return name + read_exactly(connected, _GREETING_BYTES - _NAME_BYTES, deadline)


def _check_tls(greeting: bytes, role: str, credentials: Credentials) -> None:
    if greeting != (expected := _greeting(role, credentials)):
        raise RefusedError(
            f"says {greeting[_NAME_BYTES:].decode('ascii', 'replace').strip()!r}, expected "
            f"{expected[_NAME_BYTES:].decode().strip()!r}. Use TLS at both ends, or at neither"
        )


def _start_tls(half: HalfOpen, context: ssl.SSLContext, deadline: float, *, is_server: bool) -> None:
    try:
        wrapped = context.wrap_socket(
            half.socket,
            server_side=is_server,
            server_hostname=None if is_server else half.host,
            do_handshake_on_connect=False,
        )
        half.socket = wrapped
        wrapped.settimeout(_left(deadline))
        wrapped.do_handshake()
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise ConnectionError(CLOSED) from error
    except (ssl.SSLError, ValueError) as error:
        raise RefusedError(
            f"did not agree on TLS ({str(error).splitlines()[0]}), expected certificates that the other end trusts. "
            "Check them, and the host of the address"
        ) from error


def _keys(credentials: Credentials, transcript: bytes) -> tuple[FrameKey, FrameKey]:
    """Return the keys from the trainer to the engine, and back."""
    both = (b"key from trainer to engine", b"key from engine to trainer")
    to_engine, to_trainer = (FrameKey(credentials.secret.mac(name, transcript)) for name in both)
    return to_engine, to_trainer


def _send(connected: socket.socket, data: bytes, deadline: float) -> None:
    connected.settimeout(_left(deadline))
    connected.sendall(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the handshake took too long")
    return left
