"""Use an inference engine in another process: `RemoteEngine` in the trainer, and `serve` in the engine's process.

Input, in the trainer: weights and method calls, as for any engine. Output: the results of the engine in the other
process.

Requests and answers are headers followed by tensors. They have no time-out; see [Note: heartbeats] and
[Note: progress] in `connection`. The server passes only those arguments on that `requests` allows.

[Note: updates] An update is a request, one message per weight, and an end message. If the engine raises, the server
still receives the remaining weights. If the trainer's stream raises, the end message contains the error. So both ends
always reach the end message, and the server reads the next request from its beginning.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast
from weakref import finalize

import torch
import torch.distributed as dist
from torch import nn

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.agreement import error_text
from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.distributed.process_group import group_in_use, is_rank_0, ranks_of
from fsdp2_strategy.errors import RolloutError, shown
from fsdp2_strategy.rollout.connection import (
    PROGRESS_SECONDS,
    Connection,
    ConnectionLostError,
    connect,
    credentials_of,
    listen,
    peer_name,
    protocol_errors,
)
from fsdp2_strategy.rollout.difference import Change, TensorDifference
from fsdp2_strategy.rollout.engine import ENGINES, CountedStream
from fsdp2_strategy.rollout.protocol import (
    Changes,
    Engine,
    RolloutEngine,
    Weights,
    check_takes_changes,
    engine_of,
    lacks,
)
from fsdp2_strategy.rollout.requests import CALLS, check_arguments, checked_names
from fsdp2_strategy.rollout.trainer_arguments import option
from fsdp2_strategy.rollout.wire_values import checked_shape, from_json, is_plain, to_json

_LEAVE_SECONDS = 1.0
_OPTIONAL = ("weight_dtypes", "log_probs", "routed_experts")
"""Calls whose result is None if the engine does not have them."""
_MOST_CHARACTERS = 4096
"""Maximum length of the name of a weight or of a version, and of an error that is shown."""


class RemoteEngine(Engine):
    """Call an engine in another process; not collective: only one rank creates this object.

    Each method calls the method of the same name on the engine in the other process, and returns its result. Tensors in
    the result are on this rank's device. Arguments and results are numbers, strings, None, tensors, and lists, tuples
    and mappings of these; a mapping is received as a dict. The key-value caches of a result are left out.

    Args:
        address: ``"host:port"`` at which the other process serves; for processes without a common process group.
        peer: the rank of the default group that serves; an alternative to ``address``.
        timeout_seconds: time to connect, and time without a heartbeat after which the server counts as lost. Calls may
            take longer. The death of the server process is noticed at once.
        progress_seconds: time after which an update of weights fails if the engine accepts no data, or does not answer
            after the last weight, although its heartbeats arrive; None for no limit.
        secret: a text of at least 32 characters that the server has, too, such as ``secrets.token_hex(32)``. Pass it
            between processes by a channel that others cannot read, not on a command line.
        secret_file: path of a file with the secret, of this user and with mode 0600; an alternative to ``secret``. By
            default, ``~/.config/fsdp2_strategy/engine.secret``, which is created if it does not exist.
        tls: encrypt the connection, and check the server's certificate; see ``ssl.create_default_context``. The server
            needs ``tls``, too.

    Raises:
        RolloutError: no server accepts the connection, or the server has another secret or version. Methods raise
            RolloutError if the connection is lost, if the engine fails, or if the server does not allow an argument. In
            the last two cases, methods can be called again.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        peer: int | None = None,
        timeout_seconds: float = 60.0,
        progress_seconds: float | None = PROGRESS_SECONDS,
        secret: str | None = None,
        secret_file: str | Path | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._where = peer_name(address, peer)
        self._progress_seconds = _checked_limit(progress_seconds)
        credentials = credentials_of(secret, secret_file, tls)
        self._connection = connect(address, peer, credentials, timeout_seconds, self._progress_seconds)
        self._turn = threading.Lock()
        self._lost: str | None = None
        # Called by `close`, when this object is garbage collected, or at exit.
        self._process = os.getpid()
        self._finalizer = finalize(self, _disconnect, self._connection, self._turn, self._process)

    def close(self) -> None:
        """Close the connection, so that the server can accept another trainer; thread-safe and idempotent."""
        self._lost = self._lost or "it was closed"
        self._finalizer()

    def update_weights(self, weights: Weights) -> None:
        """Send all weights to the engine under their Hugging Face names; see [Note: updates]."""
        self._send_weights({"call": "update_weights"}, weights)

    def update_changed_weights(self, changes: Changes, *, since: str, version: str) -> None:
        """Send the weights that have changed since a version, or all weights; see `RolloutEngine`."""
        self._send_weights({"call": "update_changed_weights", "since": since, "version": version}, changes)

    @property
    def weights_version(self) -> str | None:  # type: ignore[override]
        """The version of the engine's weights; None if it has none, or does not take weights by difference."""
        return cast("str | None", self._ask("weights_version"))

    def _send_weights(self, request: dict[str, Any], weights: Changes) -> None:
        action = "update weights"
        failure: Exception | None = None
        with self._request(action):
            self._connection.send(request, flush=False)
            try:
                for name, given in weights:
                    if isinstance(given, TensorDifference):
                        self._connection.send({"weight": name, "shape": given.shape}, given.encoded, flush=False)
                        continue
                    if not is_plain(given):
                        raise RolloutError(
                            f"cannot send {name}: it is a {type(given).__name__} ({given.layout}, {given.dtype}, "
                            f"{given.device}), expected a plain dense tensor. Pass its full_tensor(), to_dense() or "
                            "dequantize()."
                        )
                    self._connection.send({"weight": name}, [given], flush=False)
            except ConnectionLostError:
                raise
            except Exception as error:  # noqa: BLE001  raised below, after the end message is sent
                failure = error
            self._connection.send({"end": None if failure is None else error_text(failure)})
            with suppress(RolloutError) if failure else nullcontext():
                self._receive_answer(action, self._progress_seconds)
        if failure is not None:
            raise failure

    def weight_checksums(self) -> dict[str, str]:
        """Return the checksums of the engine's weights by Hugging Face name."""
        return cast("dict[str, str]", self._ask("weight_checksums"))

    def weight_dtypes(self) -> dict[str, str] | None:
        """Return the dtypes of the engine's weights by Hugging Face name; None if the engine does not report them."""
        return cast("dict[str, str] | None", self._ask("weight_dtypes"))

    def sleep(self) -> None:
        """Put the engine to sleep, which frees its device memory."""
        self._ask("sleep")

    def wake_up(self) -> None:
        """Wake the engine, so that it can generate or load weights."""
        self._ask("wake_up")

    @property
    def is_asleep(self) -> bool:  # type: ignore[override]
        """Whether the engine is asleep: its own ``is_asleep`` if it has one, else whether `sleep` was called last."""
        return bool(self._ask("is_asleep"))

    def generate(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the engine's ``generate`` with the same arguments, and return its result."""
        return self._ask("generate", *args, **kwargs)

    def log_probs(
        self, sequences: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs: Any
    ) -> torch.Tensor | None:
        """Return the engine's log-probabilities of sequences; None if it computes none; see `RolloutEngine`."""
        return cast("torch.Tensor | None", self._ask("log_probs", sequences, attention_mask, **inputs))

    def routed_experts(
        self, sequences: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs: Any
    ) -> torch.Tensor | None:
        """Return the experts that the engine chooses for sequences; None if it does not report them."""
        return cast("torch.Tensor | None", self._ask("routed_experts", sequences, attention_mask, **inputs))

    def _ask(self, call: str, /, *args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        given = [to_json(value, f"{call}: argument {i}", tensors) for i, value in enumerate(args)]
        named = {name: to_json(value, f"{call}: argument {name}", tensors) for name, value in kwargs.items()}
        action = f"call {call}"
        with self._request(action):
            self._connection.send({"call": call, "args": given, "kwargs": named}, tensors)
            return self._receive_answer(action)

    def _receive_answer(self, action: str, within_seconds: float | None = None) -> Any:
        answer, tensors = self._connection.receive(within_seconds)
        if "error" in answer:
            text = str(answer["error"])[:_MOST_CHARACTERS]
            raise RolloutError(f"cannot {action}: the engine at {self._where} failed: {text}")
        with protocol_errors():
            return from_json(answer["result"], tensors)

    @contextmanager
    def _request(self, action: str) -> Iterator[None]:
        """Lock the connection for one request and its answer; errors other than `RolloutError` close the connection."""
        if os.getpid() != self._process:  # before the lock, which a thread of the parent may hold
            raise RolloutError(
                f"cannot {action}: the connection to the engine at {self._where} belongs to the process that this one "
                "was forked from, expected the process that opened it. Call the engine there."
            )
        with self._turn:
            try:
                if self._lost is not None:
                    raise ConnectionLostError(self._lost)
                yield
            except RolloutError:
                raise
            except BaseException as failure:
                self._lost = self._lost or str(failure) or type(failure).__name__
                self._connection.close()  # the server would read later messages as the rest of this request
                self._finalizer.detach()
                if not isinstance(failure, ConnectionLostError):
                    raise
                raise RolloutError(
                    f"cannot {action}: the connection to the engine at {self._where} is lost ({self._lost}), expected "
                    "an answer. Start the engine again, and call setup_inference_engine."
                ) from failure


def serve(
    engine: RolloutEngine,
    address: str | None = None,
    *,
    peer: int | None = None,
    timeout_seconds: float = 60.0,
    progress_seconds: float | None = PROGRESS_SECONDS,
    secret: str | None = None,
    secret_file: str | Path | None = None,
    tls: ssl.SSLContext | None = None,
    allowed_arguments: Collection[str] = (),
) -> None:
    """Serve an engine to a trainer in another process, until the trainer disconnects; not collective.

    Wait for a trainer without a time-out. To serve a trainer that is restarted, call this function in a loop::

        while True:
            serve(engine, "localhost:29600")

    The engine receives weights in host memory, and arguments on the device of this process. Only a trainer with the
    same secret can use the engine. The secret authenticates all messages, but without ``tls``, whoever can read the
    network can read the weights; see docs/threat_model.md.

    Args:
        engine: any `RolloutEngine`.
        address: ``"host:port"`` to serve at, or what `listen_at_free_port` returned; the port stays in use until this
            process ends. The socket listens on the interface of this host only: ``"localhost:29600"`` serves processes
            of this host, ``"0.0.0.0:29600"`` all networks.
        peer: the rank of the default group that uses the engine; an alternative to ``address``. The server listens on
            the interface that routes to the group's store.
        timeout_seconds: time without a heartbeat after which the trainer counts as lost. Calls, and the time between
            calls, may be longer.
        progress_seconds: time after which the trainer counts as lost if it begins a message and does not send the rest,
            or does not accept a result, although its heartbeats arrive; None for no limit.
        secret: see `RemoteEngine`.
        secret_file: see `RemoteEngine`.
        tls: encrypt the connection: a context of ``ssl.Purpose.CLIENT_AUTH`` with a certificate of this host.
        allowed_arguments: names of arguments that a trainer may pass to the engine's methods, in addition to those that
            are known, and to the parameters that the engine's own methods name. They are numbers, texts, tensors, and
            lists and mappings of these.

    Raises:
        RolloutError: the address is invalid or in use, the secret cannot be used, an argument cannot be allowed, or the
            store of the default group is unreachable.
    """
    allowed, progress_seconds = checked_names(allowed_arguments), _checked_limit(progress_seconds)
    called = engine_of(engine)
    name = f"rank {peer}" if address is None else f"connected to {address}"
    listener = listen(address, peer, {"secret": secret, "secret_file": secret_file, "tls": tls})
    connection = listener.accept(timeout_seconds, progress_seconds)
    logger.info("serving the trainer (%s)", name)
    try:
        while (request := connection.receive())[0].get("call") != "goodbye":
            _execute(called, connection, *request, allowed)
        connection.send({"result": None})
        logger.info("the trainer (%s) has disconnected", name)
    except ConnectionLostError as error:
        logger.warning("the connection to the trainer (%s) is lost: %s", name, error)
    finally:
        connection.close()


def _checked_limit(progress_seconds: float | None) -> float | None:
    """Return a limit, or None for an infinite one."""
    is_number = isinstance(progress_seconds, int | float) and not isinstance(progress_seconds, bool)
    if progress_seconds is not None and not (is_number and progress_seconds > 0):
        raise RolloutError(
            f"cannot limit the progress of messages: progress_seconds is {progress_seconds!r}, expected a number above "
            "0 or None. Pass 600, for example."
        )
    return None if progress_seconds is None or progress_seconds > threading.TIMEOUT_MAX else float(progress_seconds)


# --- the server's end ------------------------------------------------------------------------------------------------


def _execute(
    engine: Engine,
    connection: Connection,
    request: Mapping[str, Any],
    arguments: Sequence[torch.Tensor],
    allowed: Collection[str],
) -> None:
    """Execute a request, and send the result or the error."""
    call = request.get("call")
    tensors: list[torch.Tensor] = []
    try:
        result = None
        if call in ("update_weights", "update_changed_weights"):
            _update(engine, connection, request)
        else:
            result = _call(engine, request, arguments, allowed)
        connection.send({"result": to_json(_without_cache(result), "the result", tensors)}, tensors)
    except ConnectionLostError:
        raise
    except Exception as failure:  # noqa: BLE001  any failure is sent to the trainer
        text = error_text(failure)[:_MOST_CHARACTERS]
        logger.warning("cannot execute %s: %s", shown(call), text)
        connection.send({"error": text})


def _call(engine: Engine, request: Mapping[str, Any], tensors: Sequence[torch.Tensor], allowed: Collection[str]) -> Any:
    with protocol_errors():
        call = _text(request["call"])
        args = [from_json(value, tensors) for value in request["args"]]
        kwargs = {_text(name): from_json(value, tensors) for name, value in request["kwargs"].items()}
    if call == "is_asleep":
        return engine.is_asleep
    if call == "weights_version":
        return getattr(engine, call, None)
    is_lacking = call in CALLS and lacks(engine, call)
    if is_lacking and call in _OPTIONAL:
        return None
    if is_lacking or call not in CALLS:
        raise RolloutError(
            f"cannot call {shown(call)}: {engine.class_name} has no method of this name that a trainer may call, "
            "expected one. Add it to the engine."
        )
    method = getattr(engine, call)
    check_arguments(method, call, args, kwargs, allowed)
    return method(*args, **kwargs)


def _update(engine: Engine, connection: Connection, request: Mapping[str, Any]) -> None:
    """Pass the received weights to the engine; also receive the weights that the engine does not take."""
    with ThreadPoolExecutor(1) as receiver:
        stream = CountedStream(_received_weights(connection, receiver), hashed=False)

        def load(weights: Iterator[tuple[str, Any]]) -> None:
            if request["call"] == "update_weights":
                engine.update_weights(weights)
                return
            check_takes_changes(engine)
            with protocol_errors():
                versions = {name: _text(request[name]) for name in ("since", "version")}
            engine.update_changed_weights(weights, **versions)

        stream.pass_to(load)


def _received_weights(connection: Connection, receiver: ThreadPoolExecutor) -> Changes:
    """Yield the weights of one batch, in host memory, while the next batch is received."""
    is_last, following = False, receiver.submit(_receive_batch, connection)
    while not is_last:
        batch, is_last = following.result()
        if not is_last:
            following = receiver.submit(_receive_batch, connection)
        while batch:
            yield batch.popleft()


def _receive_batch(connection: Connection) -> tuple[deque[tuple[str, Change]], bool]:
    """Receive at least ``LARGE_BYTES`` of weights, or up to the end message; return weights and whether they ended."""
    batch: deque[tuple[str, Change]] = deque()
    nbytes = 0
    while nbytes < sizes.LARGE_BYTES:
        header, tensors = connection.receive()
        if "weight" in header:
            with protocol_errors():
                batch.append((_text(header["weight"]), _received(header, tensors)))
            nbytes += sum(tensor.nbytes for tensor in tensors)
        elif "end" not in header:
            raise ConnectionLostError("it sent another message in the middle of an update")
        elif header["end"] is not None:
            raise RolloutError(f"cannot update weights: the trainer failed: {str(header['end'])[:_MOST_CHARACTERS]}")
        else:
            return batch, True
    return batch, False


def _received(header: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Change:
    if "shape" in header:
        gaps, values = tensors
        return TensorDifference.decoded(tuple(checked_shape(header["shape"])), gaps, values)
    [tensor] = tensors
    return tensor


def _text(value: object) -> str:
    """Return a received name; raise ValueError if it is something else, or too long."""
    if type(value) is not str or len(value) > _MOST_CHARACTERS:
        raise ValueError(f"the name {shown(value)}")
    return value


def _without_cache(result: Any) -> Any:
    """Remove the key-value cache that transformers returns with the sequences, also from a pair with a routing."""
    if isinstance(result, tuple):
        return tuple(_without_cache(value) for value in result)
    if not isinstance(result, Mapping):
        return result
    return {key: value for key, value in result.items() if not hasattr(value, "get_seq_length")}


# --- the trainer's end -----------------------------------------------------------------------------------------------


def _disconnect(connection: Connection, turn: threading.Lock, process: int) -> None:
    """Send "goodbye" and close. If another thread is in a call, close at once, and wait briefly for it to raise.

    A forked child does nothing: the connection is its parent's, and the lock may be held by a thread of the parent.
    """
    if os.getpid() != process:
        return
    if turn.acquire(blocking=False):
        with suppress(ConnectionLostError):
            connection.send({"call": "goodbye"})
            connection.receive()
        connection.close()
    else:
        connection.close()
        if not turn.acquire(timeout=_LEAVE_SECONDS):
            return
    turn.release()


def _remote_engine(args: Any, actor: nn.Module | None, _dtype: torch.dtype | None) -> RolloutEngine | None:
    address, peer = (option(args, f"remote_engine_{name}", None) for name in ("address", "rank"))
    if address is None and peer is None:
        raise RolloutError(
            "cannot set up an engine: args has neither remote_engine_address nor remote_engine_rank, expected one of "
            "them. Set the address 'host:port' at which the engine's process serves, or its rank in the default group."
        )
    # Checked on every rank, so that all ranks raise.
    if actor is not None and peer is not None and dist.is_initialized() and peer in (own := ranks_of(group_in_use())):
        raise RolloutError(
            f"cannot set up an engine: remote_engine_rank is {peer}, and ranks {', '.join(map(str, own))} train the "
            "actor, expected another rank, which calls serve. Pass process_group=trainers to the strategy, and the "
            "rank of the engine."
        )
    peer_name(address, peer)
    if not is_rank_0():
        return None
    return RemoteEngine(
        address,
        peer=peer,
        timeout_seconds=float(option(args, "remote_engine_timeout_seconds", 60.0)),
        progress_seconds=option(args, "remote_engine_progress_seconds", PROGRESS_SECONDS),
        secret_file=option(args, "remote_engine_secret_file", None),
        tls=_client_tls(option(args, "remote_engine_tls_ca_file", None)),
    )


def _client_tls(ca_file: str | Path | None) -> ssl.SSLContext | None:
    """Return a context that trusts the certificates of a file; None without a file."""
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(Path(ca_file).expanduser()))
    except OSError as error:
        raise RolloutError(
            f"cannot use TLS: remote_engine_tls_ca_file is {str(ca_file)!r} ({error}), expected a file with "
            "certificates in PEM. Check the path."
        ) from error


ENGINES["remote"] = _remote_engine
