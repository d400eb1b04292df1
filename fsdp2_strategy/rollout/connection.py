"""A connection of two processes, one that trains and one that serves: how they meet, and what travels.

Input: an address, or a rank of the default group; headers and tensors. Output: the same at the other end.

[Note: a session] The two are the ranks of a gloo group of their own, made for one session over a store that both reach:
that of the default group, or one that stands at an address. Nothing is pickled: headers are JSON. A process that dies
closes its connection, which the other end hears of at once. Sessions are numbered in the store: a server takes one
after the other, and skips those whose trainer has left meanwhile.

[Note: beats] From beginning to end of a session, a thread of each end says every second, under a tag of its own, that
its process lives, and hears that the other does. So silence means trouble, whatever an end waits for and however long:
it breaks the connection off, and what waits on it fails. Nothing else has a time-out.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.distributed.torch_internals import default_store
from fsdp2_strategy.errors import RolloutError

_FOREVER = timedelta(days=3650)
_BEAT_SECONDS = 1.0
_LAST_SECONDS = 5.0
_TALK, _BEATS, _NOTHING = range(3)  # tags
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")  # quantized ones are more than bytes
}


# --- how the two find each other -------------------------------------------------------------------------------------


def place_of(address: str | None, peer: int | None) -> str:
    """Return what names the other process.

    Raises:
        RolloutError: both address and peer are given, or none, or they are none.
    """
    if (address is None) == (peer is None):
        raise RolloutError(
            f"cannot reach another process: address is {address!r} and peer {peer!r}, expected one of both. Give "
            "'host:port', or its rank in the default group (remote_engine_address or remote_engine_rank)."
        )
    if address is not None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise RolloutError(
                f"cannot reach another process: address is {address!r}, expected 'host:port'. Give it so."
            )
        return address
    if not dist.is_initialized() or not 0 <= peer < dist.get_world_size() or peer == dist.get_rank():  # type: ignore[operator]
        raise RolloutError(
            f"cannot reach another process: peer is {peer}, expected the rank of another in the default group. Start "
            "the group first, or give an address."
        )
    return f"rank {peer}"


_stores: dict[str, Any] = {}
"""Those that stand in this process, by address: the next trainer finds the server where the last one did."""


def store_at(address: str | None, peer: int | None, *, serves: bool, seconds: float) -> Any:
    """Return the store over which the two ends find each other.

    Raises:
        RolloutError: there is none at the address.
    """
    if address is None:
        pair = (peer, dist.get_rank()) if serves else (dist.get_rank(), peer)
        return dist.PrefixStore(f"fsdp2_strategy/engine/{pair[0]}-{pair[1]}", default_store())  # type: ignore[attr-defined]
    if serves and address in _stores:
        return _stores[address]
    host, _, port = address.rpartition(":")
    options: dict[str, Any] = {"is_master": serves, "wait_for_workers": False, "timeout": timedelta(seconds=seconds)}
    try:
        if serves:  # a store that listens by itself does so on every interface
            options["master_listen_fd"] = _listening(host.strip("[]"), int(port)).detach()
        store = dist.TCPStore(host.strip("[]"), int(port), **options)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError, OSError) as error:
        action = "serve at" if serves else "reach an engine: nobody serves at"
        raise RolloutError(
            f"cannot {action} {address} ({_first_line(error)}), expected a server of that name and port. Check the "
            "address, and whether the server has started."
        ) from error
    if serves:
        _stores[address] = store
    return store


def _listening(host: str, port: int) -> socket.socket:
    [(family, _, _, _, place), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return socket.create_server(place[:2], family=family, backlog=128)


def knock(store: Any, where: str, seconds: float) -> Link:
    """Open a session with a server; see [Note: a session]."""
    with _store_lives(where):
        number = store.add("knocks", 1)
        deadline = time.monotonic() + seconds
        while not store.check([f"{number}/taken"]):
            if time.monotonic() > deadline:
                store.set(f"{number}/left", "")
                raise RolloutError(
                    f"cannot reach an engine: {where} has not answered in {seconds:g} s, expected a server that has no "
                    "trainer. Call serve there, and end the trainer before."
                )
            time.sleep(0.01)
        store.set(f"{number}/stays", "")
        return Link(dist.PrefixStore(str(number), store), 0, seconds)  # type: ignore[attr-defined]


def next_session(store: Any, where: str, seconds: float) -> Link:
    """Wait for a trainer; see [Note: a session]."""
    while True:
        with _store_lives(where):
            number = store.add("served", 0) + 1
            while store.add("knocks", 0) < number:
                time.sleep(0.05)
            store.add("served", 1)
            store.set(f"{number}/taken", "")
            deadline = time.monotonic() + min(seconds, 5)
            while not store.check([f"{number}/stays"]):
                if time.monotonic() > deadline or store.check([f"{number}/left"]):
                    break
                time.sleep(0.01)
            else:
                with suppress(GoneError):  # it left in this moment
                    return Link(dist.PrefixStore(str(number), store), 1, seconds)  # type: ignore[attr-defined]


@contextmanager
def _store_lives(where: str) -> Iterator[None]:
    try:
        yield
    except (dist.DistError, GoneError) as error:
        raise RolloutError(
            f"cannot meet {where}: the other end is gone ({_first_line(error)}), expected both to stay. Start it again."
        ) from error


# --- what travels ----------------------------------------------------------------------------------------------------


class GoneError(Exception):
    """The other end is, or says what cannot be understood."""


class Link:
    """A connection of two processes: JSON headers and tensors; see [Note: a session] and [Note: beats].

    Args:
        store: at which the two meet.
        rank: 0 or 1.
        seconds: of silence, after which the other end counts as gone; two beats at least.
    """

    def __init__(self, store: Any, rank: int, seconds: float) -> None:
        self._other = 1 - rank
        self._seconds = max(seconds, 2 * _BEAT_SECONDS)
        self._over = threading.Event()
        self._silence: str | None = None
        self._waits: set[Future[None]] = set()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        try:
            self._group: Any = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=seconds))
        except RuntimeError as error:
            raise GoneError(_first_line(error)) from error
        self._beating.start()

    def send(self, header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a header and tensors; return when the other end has them.

        Raises:
            RolloutError: the header is too large. Nothing has been sent then.
        """
        described = [(_dtype_name(tensor), list(tensor.shape)) for tensor in tensors]
        text = json.dumps({**header, "tensors": described} if described else header).encode()
        if len(text) > sizes.HEADER_BYTES:
            raise RolloutError(
                f"cannot send a header: it is {len(text)} bytes long, expected at most {sizes.HEADER_BYTES}. "
                "Send numbers as tensors."
            )
        length = torch.tensor([len(text)], device="cpu")
        for flat in [length, torch.frombuffer(bytearray(text), dtype=torch.uint8), *map(bytes_of, tensors)]:
            self.end(self.begin(flat))

    def begin(self, flat: torch.Tensor) -> dist.Work | None:
        """Begin to send a tensor in host memory; one without elements does not travel."""
        with self._or_gone():
            return self._group.send([flat], self._other, _TALK) if flat.numel() else None

    def end(self, work: dist.Work | None) -> None:
        """Return when it has been sent."""
        if work is not None:
            with self._or_gone():
                self._wait(work)

    def receive(self) -> dict[str, Any]:
        """Return a header, whenever it comes."""
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.receive_into(length)
        with understood():
            if not 0 < int(length) <= sizes.HEADER_BYTES:
                raise ValueError(f"a header of {int(length)} bytes")
            text = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self.receive_into(text)
        with understood():
            header: dict[str, Any] = dict(json.loads(text.numpy().tobytes()))
        return header

    def receive_into(self, flat: torch.Tensor) -> None:
        """Fill a tensor in host memory."""
        if flat.numel():
            with self._or_gone():
                self._wait(self._group.recv([flat], self._other, _TALK))

    def receive_tensors(self, header: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors behind a header, on the device of this process."""
        tensors = []
        with understood():
            for dtype, shape in header.get("tensors", ()):
                flat = torch.empty(prod(shape) * _DTYPES[dtype].itemsize, dtype=torch.uint8, device="cpu")
                tensors.append(view_of(flat, dtype, shape, 0))
                self.receive_into(flat)
        return [tensor.to(current_device()) for tensor in tensors]

    def drop(self) -> None:
        """Close the connection: what waits at either end hears that the other is gone; harmless when called again."""
        self._over.set()
        nothing = torch.zeros(1, device="cpu")
        with suppress(RuntimeError):  # gloo closes a connection on which somebody has waited in vain
            self._group.recv([nothing], self._other, _NOTHING).wait(timedelta(milliseconds=1))
        if threading.current_thread() is not self._beating:
            self._beating.join(_LAST_SECONDS)  # where gloo tells it nothing, it ends by itself, after the time-out
        self._end_waits()

    def _beat(self) -> None:
        """Say that this process lives, and hear that the other does; see [Note: beats]."""
        said, heard = torch.zeros(2, 1, device="cpu").unbind()
        while not self._over.wait(_BEAT_SECONDS):
            began = time.monotonic()
            try:
                work = self._group.send([said], self._other, _BEATS)
                self._group.recv([heard], self._other, _BEATS).wait(timedelta(seconds=self._seconds))
                work.wait(_FOREVER)
            except RuntimeError:
                if time.monotonic() - began >= self._seconds:
                    self._silence = f"it has said nothing for {self._seconds:g} s"
                break
        self._end_waits()

    def _end_waits(self) -> None:
        """Let nothing wait any more: what was travelling when a connection closed, gloo would wait for in vain."""
        self._over.set()
        for ended in tuple(self._waits):
            with suppress(InvalidStateError):
                ended.set_exception(RuntimeError("the connection is closed"))

    def _wait(self, work: dist.Work) -> None:
        """Wait on another thread: this one is to hear of signals, and of the end; see `_end_waits`."""
        if not threading.main_thread().is_alive():  # no thread starts while the program ends
            work.wait(timedelta(seconds=self._seconds))
            return
        ended: Future[None] = Future()

        def wait() -> None:
            with suppress(InvalidStateError):
                try:
                    work.wait(_FOREVER)
                    ended.set_result(None)
                except RuntimeError as error:
                    ended.set_exception(error)

        self._waits.add(ended)
        if self._over.is_set():
            self._end_waits()
        threading.Thread(target=wait, daemon=True).start()
        try:
            ended.result()
        finally:
            self._waits.discard(ended)

    @contextmanager
    def _or_gone(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.drop()
            raise GoneError(self._silence or _first_line(error)) from error


@contextmanager
def understood() -> Iterator[None]:
    """Take what the other end has said, and cannot be understood, for the end of the session."""
    try:
        yield
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise GoneError(f"it does not keep to the protocol: {type(error).__name__}: {_first_line(error)}") from error


def entry_of(name: str, tensor: torch.Tensor, begin: int) -> tuple[str, str, list[int], int]:
    """Describe a tensor, whose bytes begin somewhere in a buffer: name, dtype, shape, begin."""
    return name, _dtype_name(tensor), list(tensor.shape), begin


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in host memory; its own where it lies there."""
    own = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return own.as_strided((own.numel(),), (1,)).view(torch.uint8)  # contiguous ones of one element have any stride


def view_of(flat: torch.Tensor, dtype: str, shape: Sequence[int], begin: int) -> torch.Tensor:
    """Return the tensor whose bytes begin somewhere in a buffer."""
    kind = _DTYPES[dtype]
    return flat[begin : begin + prod(shape) * kind.itemsize].view(kind).view(shape)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is its bytes and nothing more."""
    is_dense = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    return is_dense and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def packed(value: Any, what: str, tensors: list[torch.Tensor]) -> Any:
    """Return a value as JSON, its tensors put aside.

    Raises:
        RolloutError: something in it is neither.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor) and is_plain(value):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        keys = [packed(key, f"a key of {what}", tensors) for key in value]
        values = [packed(inner, f"{what}[{key!r}]", tensors) for key, inner in value.items()]
        return {"dict": list(zip(keys, values, strict=True))}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [packed(v, f"{what}[{i}]", tensors) for i, v in enumerate(value)]}
    raise RolloutError(
        f"cannot send {what}: it is a {type(value).__name__}, expected numbers, strings, None, plain dense tensors, "
        "and lists, tuples and mappings of them. Nothing is pickled between trainer and engine: convert it (a DTensor "
        "with full_tensor)."
    )


def unpacked(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value that `packed` made JSON of."""
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {unpacked(k, tensors): unpacked(v, tensors) for k, v in inner}
    return (list if kind == "list" else tuple)(unpacked(v, tensors) for v in inner)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
