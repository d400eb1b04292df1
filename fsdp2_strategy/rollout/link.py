"""A connection of two processes, one that trains and one that serves: how they meet, and what travels.

Input: an address, or a rank of the default group; headers and tensors. Output: the same at the other end.

[Note: a session] The two are the ranks of a gloo group of their own, made for one session over a store that both reach:
that of the default group, or one that stands at an address. Nothing is pickled: headers are JSON. A process that dies
closes its connection, which the other end hears of at once. Sessions are numbered in the store: a server takes one
after the other, and skips those whose trainer has left meanwhile.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.ranks import current_device

_FOREVER = 10 * 365 * 24 * 3600.0


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
        return dist.PrefixStore(f"fsdp2_strategy/engine/{pair[0]}-{pair[1]}", distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    if serves and address in _stores:
        return _stores[address]
    host, _, port = address.rpartition(":")
    options: dict[str, Any] = {"is_master": serves, "wait_for_workers": False, "timeout": timedelta(seconds=seconds)}
    try:
        store = dist.TCPStore(host, int(port), **options)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError) as error:
        action = "serve at" if serves else "reach an engine: nobody serves at"
        raise RolloutError(
            f"cannot {action} {address} ({_first_line(error)}), expected a server of that name and port. Check the "
            "address, and whether the server has started."
        ) from error
    if serves:
        _stores[address] = store
    return store


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
    """The other end is."""


class Link:
    """A connection of two processes: JSON headers and tensors; see [Note: a session]."""

    def __init__(self, store: Any, rank: int, seconds: float) -> None:
        self._other = 1 - rank
        with _or_gone():
            self._group: Any = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=seconds))

    def send(self, header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a header and tensors; return when the other end has them."""
        described = [(_dtype_name(tensor), list(tensor.shape)) for tensor in tensors]
        text = json.dumps({**header, "tensors": described} if described else header).encode()
        flats = [torch.tensor([len(text)]), torch.frombuffer(bytearray(text), dtype=torch.uint8)]
        for flat in (*flats, *map(bytes_of, tensors)):
            self.end(self.begin(flat))

    def begin(self, flat: torch.Tensor) -> dist.Work | None:
        """Begin to send a tensor in host memory; one without elements does not travel."""
        with _or_gone():
            return self._group.send([flat], self._other, 0) if flat.numel() else None

    def end(self, work: dist.Work | None) -> None:
        """Return when it has been sent."""
        if work is not None:
            with _or_gone():
                work.wait()

    def receive(self, seconds: float) -> dict[str, Any]:
        """Return a header."""
        length = torch.zeros(1, dtype=torch.int64)
        self.receive_into(length, seconds)
        text = torch.empty(int(length), dtype=torch.uint8)
        self.receive_into(text, seconds)
        header: dict[str, Any] = json.loads(text.numpy().tobytes())
        return header

    def receive_some_time(self) -> dict[str, Any]:
        """Return a header, whenever it comes: a connection tells when its other end closes."""
        header: Future[dict[str, Any]] = Future()

        def wait() -> None:
            try:
                header.set_result(self.receive(_FOREVER))
            except Exception as error:  # noqa: BLE001  raised below
                header.set_exception(error)

        # The main thread hears of signals only when it comes back to Python.
        threading.Thread(target=wait, daemon=True).start()
        while True:
            with suppress(TimeoutError):
                return header.result(0.5)

    def receive_into(self, flat: torch.Tensor, seconds: float) -> None:
        """Fill a tensor."""
        if flat.numel():
            with _or_gone():
                self._group.recv([flat], self._other, 0).wait(timedelta(seconds=seconds))

    def receive_tensors(self, header: Mapping[str, Any], seconds: float) -> list[torch.Tensor]:
        """Return the tensors behind a header, in host memory."""
        tensors = []
        for dtype, shape in header.get("tensors", ()):
            flat = torch.empty(prod(shape) * _dtype_of(dtype).itemsize, dtype=torch.uint8)
            self.receive_into(flat, seconds)
            tensors.append(view_of(flat, dtype, shape, 0))
        return tensors


@contextmanager
def _or_gone() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise GoneError(_first_line(error)) from error


def entry_of(name: str, tensor: torch.Tensor, begin: int) -> tuple[str, str, list[int], int]:
    """Describe a tensor, whose bytes begin somewhere in a buffer: name, dtype, shape, begin."""
    return name, _dtype_name(tensor), list(tensor.shape), begin


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in host memory; its own where it lies there."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def view_of(flat: torch.Tensor, dtype: str, shape: Sequence[int], begin: int) -> torch.Tensor:
    """Return the tensor whose bytes begin somewhere in a buffer."""
    kind = _dtype_of(dtype)
    return flat[begin : begin + prod(shape) * kind.itemsize].view(kind).view(shape)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def packed(value: Any, what: str, tensors: list[torch.Tensor]) -> Any:
    """Return a value as JSON, its tensors put aside.

    Raises:
        RolloutError: something in it is neither.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
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
        f"cannot send {what}: it is a {type(value).__name__}, expected numbers, strings, None, dense tensors, and "
        "lists, tuples and mappings of them. Nothing is pickled between trainer and engine: convert it."
    )


def unpacked(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value that `packed` made JSON of, its tensors on the device of this process."""
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    if kind == "tensor":
        return tensors[inner].to(current_device())
    if kind == "dict":
        return {unpacked(k, tensors): unpacked(v, tensors) for k, v in inner}
    return (list if kind == "list" else tuple)(unpacked(v, tensors) for v in inner)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
