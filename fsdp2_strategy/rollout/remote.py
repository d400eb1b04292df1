"""Use an inference engine in another process: the trainer's class, and the function that serves the engine there.

Input, on the trainer: weights and calls, as for any engine. Output: the results of the engine in the other process.

A request is a header followed by tensors, and so is its answer. Neither has a time-out; see [Note: heartbeats] in
`connection`.

[Note: packs] Weights are sent in packs: small tensors together in one buffer, each large tensor alone. The trainer
sends one pack while it fills the next. The server receives one pack while the engine uses the pack before it. Each
process has two buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any
from weakref import finalize

import torch
from torch import nn

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.errors import FSDP2StrategyError, RolloutError
from fsdp2_strategy.rollout.bucket import is_looked_into
from fsdp2_strategy.rollout.connection import (
    Connection,
    GoneError,
    bytes_of,
    connect,
    entry_of,
    is_plain,
    listen,
    name_of_end,
    packed,
    understood,
    unpacked,
    view_of,
)
from fsdp2_strategy.rollout.engine import ENGINES, RolloutEngine, Sent, Weights

_LEAVE_SECONDS = 1.0
_ALIGNMENT = 16
_CALLS = ("weight_checksums", "sleep", "wake_up", "generate")


class RemoteEngine:
    """The trainer's object for an engine that another process runs; not collective: one rank has it.

    Each method calls the method of the same name on the engine there, and returns its result, with tensors on this
    rank's device. Arguments and results are numbers, strings, None, tensors, and lists, tuples and mappings of them; a
    mapping is received as a dict. Key-value caches that transformers returns are not sent.

    Args:
        address: ``"host:port"`` at which the other process serves; use it if the two have no common process group.
        peer: instead, the rank of the default group that serves.
        timeout_seconds: time to connect, and time without a heartbeat after which the server counts as lost; calls may
            take longer. If the server process dies, this is noticed at once.

    Raises:
        RolloutError: no server accepts the connection. Methods raise it if the connection is lost, if the engine there
            fails, or if an argument has another type; after the last two, methods can be called again.
    """

    def __init__(self, address: str | None = None, *, peer: int | None = None, timeout_seconds: float = 60.0) -> None:
        self._where = name_of_end(address, peer)
        self._link = connect(address, peer, timeout_seconds)
        self._turn = threading.Lock()
        self._lost: str | None = None
        self._sleeps = False
        # Runs in `close`, or when this object is garbage collected, or when the program ends.
        self._goodbye = finalize(self, _leave, self._link, self._turn)

    def close(self) -> None:
        """Close the connection, so that the server can accept another trainer; from any thread; can be repeated."""
        self._lost = self._lost or "it was closed"
        self._goodbye()

    def update_weights(self, weights: Weights) -> None:
        """Send all weights to the engine, by Hugging Face name; see [Note: packs]."""
        failure: Exception | None = None
        with self._talking("update weights"):
            self._link.send({"call": "update_weights"})
            with closing(_Packing(self._link)) as packing:
                try:
                    for name, tensor in weights:
                        packing.put(name, tensor)
                except GoneError:
                    raise
                except Exception as error:  # noqa: BLE001  raised below, after the server has received it
                    failure = error
                packing.end(failure)
            with suppress(RolloutError) if failure else nullcontext():
                self._answer("update weights")
        if failure is not None:
            raise failure

    def weight_checksums(self) -> dict[str, str]:
        """Return the checksums of the engine's weights by Hugging Face name."""
        checksums: dict[str, str] = self._ask("weight_checksums")
        return checksums

    def sleep(self) -> None:
        """Put the engine to sleep: it frees its device memory."""
        self._ask("sleep")
        self._sleeps = True

    def wake_up(self) -> None:
        """Wake the engine, so that it can generate or load weights."""
        self._ask("wake_up")
        self._sleeps = False

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps: its own ``is_asleep`` if it has one, otherwise what was last called here."""
        told = self._ask("is_asleep")
        return self._sleeps if told is None else bool(told)

    def generate(self, /, *args: Any, **kwargs: Any) -> Any:
        """Generate with the engine there, with the same arguments and result."""
        return self._ask("generate", *args, **kwargs)

    def _ask(self, call: str, /, *args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        given = [packed(value, f"{call}: argument {i}", tensors) for i, value in enumerate(args)]
        named = {name: packed(value, f"{call}: argument {name}", tensors) for name, value in kwargs.items()}
        with self._talking(call):
            self._link.send({"call": call, "args": given, "kwargs": named}, tensors)
            return self._answer(call)

    def _answer(self, action: str) -> Any:
        if "error" in (answer := self._link.receive()):
            raise RolloutError(f"cannot {action}: the engine at {self._where} failed: {answer['error']}")
        tensors = self._link.receive_tensors(answer)
        with understood():
            return unpacked(answer["result"], tensors)

    @contextmanager
    def _talking(self, action: str) -> Iterator[None]:
        """Run one request and its answer, one thread at a time; an error other than `RolloutError` ends the session."""
        with self._turn:
            try:
                if self._lost is not None:
                    raise GoneError(self._lost)
                yield
            except RolloutError:
                raise
            except BaseException as failure:
                self._lost = self._lost or str(failure) or type(failure).__name__
                self._link.close()  # the server would take later messages for the rest of this one
                self._goodbye.detach()
                if not isinstance(failure, GoneError):
                    raise
                raise RolloutError(
                    f"cannot {action}: the engine at {self._where} is gone ({self._lost}), expected its answer. Start "
                    "it again, and call setup_inference_engine."
                ) from failure


def serve(
    engine: RolloutEngine, address: str | None = None, *, peer: int | None = None, timeout_seconds: float = 60.0
) -> None:
    """Serve an engine to a trainer in another process, until the trainer disconnects; not collective.

    It waits for a trainer without a time-out. To serve trainers that are restarted, call it in a loop::

        while True:
            serve(engine, "0.0.0.0:29600")

    The engine receives weights in host memory, and arguments on the device of this process. All who can connect to the
    address can use the engine, so serve in a private network only.

    Args:
        engine: any `RolloutEngine`.
        address: ``"host:port"`` to serve at; this process keeps the port until it ends.
        peer: instead, the rank of the default group that uses the engine.
        timeout_seconds: time without a heartbeat after which the trainer counts as lost; calls, and the time between
            them, may be longer.

    Raises:
        RolloutError: the address is invalid or in use, or the store of the default group is gone.
    """
    where = name_of_end(address, peer)
    link = listen(address, peer).accept(timeout_seconds)
    logger.info("serving the trainer at %s", where)
    try:
        while (request := link.receive()).get("call") != "goodbye":
            _carry_out(engine, link, request)
        link.send({"result": None})
        logger.info("the trainer at %s said goodbye", where)
    except GoneError as gone:
        logger.warning("the trainer at %s is gone: %s", where, gone)
    finally:
        link.close()


# --- the server's end ------------------------------------------------------------------------------------------------


def _carry_out(engine: RolloutEngine, link: Connection, request: Mapping[str, Any]) -> None:
    """Execute a request, and send the answer."""
    try:
        arguments = link.receive_tensors(request)
        result, tensors = None, list[torch.Tensor]()
        if request.get("call") == "update_weights":
            _update(engine, link)
        else:
            result = _call(engine, request, arguments)
        link.send({"result": packed(_without_cache(result), "the result", tensors)}, tensors)
    except GoneError:
        raise
    except Exception as failure:  # noqa: BLE001  any failure is sent to the trainer
        logger.warning("cannot %s: %s", request.get("call"), _text(failure))
        link.send({"error": _text(failure)})


def _call(engine: Any, request: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
    with understood():
        call = request["call"]
        args = [unpacked(value, tensors) for value in request["args"]]
        kwargs = {name: unpacked(value, tensors) for name, value in request["kwargs"].items()}
    if call == "is_asleep":
        return getattr(engine, call, None)
    if call not in _CALLS or not callable(method := getattr(engine, call, None)):
        raise RolloutError(f"cannot {call}: {type(engine).__name__} has no such method, expected one. Add it.")
    return method(*args, **kwargs)


def _update(engine: RolloutEngine, link: Connection) -> None:
    """Pass the received weights to the engine; also receive those that it does not take."""
    with ThreadPoolExecutor(1) as receiver:
        sent = Sent(_arriving(link, receiver), hashed=False)
        try:
            engine.update_weights(iter(sent))
        finally:
            sent.run_out()
        sent.check_arrival(engine)


def _arriving(link: Connection, receiver: ThreadPoolExecutor) -> Weights:
    """Yield the tensors of each pack while the next pack is received; see [Note: packs].

    The next pack reuses the memory of the pack before this one. A loop releases that memory when it gets the first
    tensor of this pack.
    """
    rooms = _Rooms()

    def receive() -> list[tuple[str, torch.Tensor]] | None:
        header = link.receive()
        if "pack" in header:
            with understood():
                room = rooms.take(header["bytes"])
                pack = [(name, view_of(room, *described)) for name, *described in header["pack"]]
            link.receive_into(room)
            return pack
        if "end" not in header:
            raise GoneError("it left in the middle of an update")
        if header["end"] is not None:
            raise RolloutError(f"cannot update weights: the trainer failed: {header['end']}")
        return None

    pack = receive()
    while pack is not None:
        coming = receiver.submit(receive)
        yield from pack
        pack = coming.result()


def _without_cache(result: Any) -> Any:
    """Remove a key-value cache, which transformers returns together with the sequences."""
    if not isinstance(result, Mapping):
        return result
    return {key: value for key, value in result.items() if not hasattr(value, "get_seq_length")}


class _Rooms:
    """Two buffers that are used in turn; a buffer is replaced if other tensors still use its memory."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2)]

    def take(self, nbytes: int) -> torch.Tensor:
        """Return the next buffer, cut to a length."""
        buffer = self._buffers.pop(0)
        if buffer.numel() < nbytes or is_looked_into(buffer):
            del buffer  # released before the new one is allocated
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._buffers.append(buffer)
        return buffer[:nbytes]


# --- the trainer's end -----------------------------------------------------------------------------------------------


def _leave(link: Connection, turn: threading.Lock) -> None:
    """Send "goodbye" and close; if another thread is in a call, close at once and wait for that thread to notice."""
    if turn.acquire(blocking=False):
        with suppress(GoneError):
            link.send({"call": "goodbye"})
            link.receive()
        link.close()
    else:
        link.close()
        if not turn.acquire(timeout=_LEAVE_SECONDS):
            return
    turn.release()


class _Packing:
    """Collect tensors into packs, and send one while the next is filled; see [Note: packs]."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._buffers: list[torch.Tensor] = []
        self._entries: list[tuple[str, str, list[int], int]] = []
        self._filled = 0
        self._sender = ThreadPoolExecutor(1)
        self._sending: Future[None] | None = None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor to a pack, or send a large one alone; its memory is then read until it has been sent.

        Raises:
            RolloutError: it is not a plain dense tensor.
        """
        if not is_plain(tensor):
            raise RolloutError(
                f"cannot send {name}: it is a {type(tensor).__name__} ({tensor.layout}, {tensor.dtype}, "
                f"{tensor.device}), expected a plain dense one. Take its full_tensor(), to_dense() or dequantize()."
            )
        if tensor.nbytes >= sizes.LARGE_BYTES:
            self._send_filled()
            self._send([entry_of(name, tensor, 0)], bytes_of(tensor))
            return
        if self._filled + tensor.nbytes > sizes.PACK_BYTES:
            self._send_filled()
        if not self._buffers:
            self._buffers = [torch.empty(sizes.PACK_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2)]
        self._entries.append(entry_of(name, tensor, self._filled))
        room = view_of(self._buffers[0], *self._entries[-1][1:])
        room.copy_(tensor)
        self._filled += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

    def end(self, failure: Exception | None) -> None:
        """Send the last pack, and then the end of the update; after a failure, only the failure."""
        if failure is None:
            self._send_filled()
        self._wait()
        self._link.send({"end": None if failure is None else _text(failure)})

    def close(self) -> None:
        """End the sending thread; if it is blocked, it ends when the connection is closed."""
        self._sender.shutdown(wait=False)

    def _send_filled(self) -> None:
        if self._entries:
            self._send(self._entries, self._buffers[0][: self._filled])
            self._buffers.reverse()
            self._entries, self._filled = [], 0

    def _send(self, entries: Sequence[object], flat: torch.Tensor) -> None:
        self._wait()
        self._link.send({"pack": entries, "bytes": flat.numel()})
        self._sending = self._sender.submit(self._link.send_bytes, flat.numpy().data)

    def _wait(self) -> None:
        """Wait until the last pack has been sent."""
        if self._sending is not None:
            self._sending.result()
        self._sending = None


def _remote_engine(args: Any, _actor: nn.Module | None, _dtype: torch.dtype | None) -> RolloutEngine | None:
    def option(name: str, default: Any = None) -> Any:
        given = args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)
        return default if given is None else given

    address, peer = option("remote_engine_address"), option("remote_engine_rank")
    name_of_end(address, peer)  # on every rank, so that all ranks raise
    seconds = float(option("remote_engine_timeout_seconds", 60.0))
    return RemoteEngine(address, peer=peer, timeout_seconds=seconds) if is_rank_0() else None


ENGINES["remote"] = _remote_engine


def _text(failure: BaseException) -> str:
    return str(failure) if isinstance(failure, FSDP2StrategyError) else f"{type(failure).__name__}: {failure}"
