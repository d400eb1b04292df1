"""Whoever reaches an engine's port or a rendezvous without the secret gets nothing, and keeps nobody out."""

from __future__ import annotations

import json
import os
import re
import reprlib
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.models import build

from fsdp2_strategy import FSDPV2Strategy, sizes
from fsdp2_strategy.distributed import Rendezvous, RendezvousServer, tcp_rendezvous
from fsdp2_strategy.distributed.shared_secret import default_secret_file, shared_secret
from fsdp2_strategy.errors import MeshError, RolloutError
from fsdp2_strategy.rollout import (
    RemoteEngine,
    SGLangEngine,
    TransformersEngine,
    VLLMEngine,
    listen_at_free_port,
    serve,
    stream_weights,
)
from fsdp2_strategy.rollout import connection as connection_module
from fsdp2_strategy.rollout import handshake as handshake_module
from fsdp2_strategy.rollout.connection import credentials_of
from fsdp2_strategy.rollout.handshake import HalfOpen, read_exactly

SECRETS = ["first secret, which is long enough", "another secret, which is long enough"]
CERTIFICATES = Path(__file__).parent / "fixtures" / "tls"


class Keeper:
    """An engine that keeps what it gets."""

    def __init__(self):
        self.held, self.called = {}, []

    def update_weights(self, weights):
        self.held = dict(weights)

    def sleep(self):
        self.called.append("sleep")

    wake_up = sleep

    def generate(self, *args, **kwargs):
        self.called.append((args, kwargs))
        return len(self.called)


@contextmanager
def serving(engine, sessions=1, address=None, **options):
    """Serve some trainers, one after another, on a thread of this process; give the address."""
    address = address or listen_at_free_port()
    thread = threading.Thread(target=lambda: [serve(engine, address, **options) for _ in range(sessions)], daemon=True)
    thread.start()
    yield address
    thread.join(20)
    assert not thread.is_alive()


def dialled(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 10)


def is_free(address):
    """Return whether a trainer gets an answer before the time of one handshake has passed."""
    began = time.monotonic()
    end = RemoteEngine(address, timeout_seconds=10)
    assert end.generate() > 0
    end.close()
    return time.monotonic() - began < 4


# --- the secret file -------------------------------------------------------------------------------------------------


def secret_file(folder, content=SECRETS[0], mode=0o600):
    path = Path(folder, "secret")
    path.write_text(content)
    path.chmod(mode)
    return path


def test_a_secret_file_that_others_can_read_or_replace_is_refused(tmp_path):
    path = secret_file(tmp_path)
    assert shared_secret(None, path, RolloutError).key == SECRETS[0].encode()
    assert SECRETS[0] not in repr(shared_secret(None, path, RolloutError))
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(path)
    os.mkfifo(pipe, 0o600)
    short = tmp_path / "short"
    short.write_text("password\n")
    short.chmod(0o600)
    for wrong, found in (
        (link, "it is a symbolic link"),
        (pipe, "it is not a regular file"),
        (tmp_path, "it is not a regular file"),
        (short, "it has 9 bytes"),
        (tmp_path / "none", "No such file"),
        ("\0", "embedded null byte"),
    ):
        for use in (lambda file: RemoteEngine("localhost:1", secret_file=file), listen_with):
            with pytest.raises(RolloutError, match=rf"cannot use the secret file .*: .*{found}.*mode 0600"):
                use(wrong)
    for mode in (0o640, 0o604, 0o660, 0o666, 0o610):
        path.chmod(mode)
        with pytest.raises(RolloutError, match=rf"its mode is {mode:04o}, expected a regular file"):
            serve(Keeper(), "localhost:1", secret_file=path)
    path.chmod(0o400)
    assert shared_secret(None, str(path), RolloutError).key
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        with pytest.raises(RolloutError, match=r"it belongs to user \d+, and this process to user \d+"):
            listen_with(path)


def listen_with(file):
    listen_at_free_port(secret_file=file)


def test_a_secret_is_given_once_and_is_not_a_word(tmp_path):
    for given, found in (
        ({"secret": "password"}, "secret is 8 bytes, expected a text of at least 32 bytes"),
        ({"secret": b"x" * 64}, "secret is a bytes"),
        ({"secret": SECRETS[0], "secret_file": secret_file(tmp_path)}, "both secret and secret_file are given"),
    ):
        with pytest.raises(RolloutError, match=found) as failure:
            RemoteEngine("localhost:1", **given)
        assert "password" not in str(failure.value) and SECRETS[0] not in str(failure.value)
    with pytest.raises(MeshError, match="secret is 8 bytes"):
        RendezvousServer("127.0.0.1", secret="password")


CREATE = """
import logging, os, sys
logging.basicConfig(level="INFO")
from fsdp2_strategy.distributed.shared_secret import shared_secret
from fsdp2_strategy.errors import RolloutError
os.umask(0)
sys.stdin.readline()
print(shared_secret(None, None, RolloutError).key.decode())
"""


@pytest.mark.full
def test_processes_that_start_at_once_create_one_secret_file_of_their_user(tmp_path):
    environment = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, "-c", CREATE], env=environment, **pipes) for _ in range(4)]
    told = [process.communicate("\n", 60) for process in started]
    [text] = {out.strip() for out, _ in told}
    path = tmp_path / ".config" / "fsdp2_strategy" / "engine.secret"
    assert path.read_text().strip() == text and len(text) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["engine.secret"]
    logs = "".join(err for _, err in told)
    assert logs.count(f"created the secret file {path}") == 1 and text not in logs


def test_a_home_that_cannot_be_written_is_an_error_that_names_the_argument(tmp_path, monkeypatch):
    (tmp_path / ".config").write_text("no folder")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_secret_file().is_relative_to(tmp_path)
    with pytest.raises(RolloutError, match=r"cannot create the user's secret file .* Pass secret_file\."):
        RemoteEngine("localhost:1")


# --- the handshake ---------------------------------------------------------------------------------------------------


def test_another_secret_is_refused_at_once_and_named_without_its_text(tmp_path, caplog):
    engine, path = Keeper(), secret_file(tmp_path)
    with serving(engine, secret=SECRETS[1]) as address:
        wait_until_secret(address, SECRETS[1])
        for wrong in ({"secret_file": path}, {}):
            began = time.monotonic()
            origin = re.escape(str(wrong.get("secret_file", default_secret_file())))
            with pytest.raises(RolloutError, match=f"{address} has another secret than {origin}, expected") as failure:
                RemoteEngine(address, **wrong)
            assert time.monotonic() - began < 30 and not any(text in str(failure.value) for text in SECRETS)
        assert "refused a connection from 127.0.0.1" in caplog.text
        assert not any(text in caplog.text for text in SECRETS)
        with pytest.raises(RolloutError, match="has another secret"):
            strategy = FSDPV2Strategy(args={"remote_engine_address": address, "remote_engine_secret_file": str(path)})
            strategy.setup_inference_engine(None, "remote")
        RemoteEngine(address, secret=SECRETS[1]).close()
    assert not engine.called


def wait_until_secret(address, secret):
    until = time.monotonic() + 60
    while connection_module._listeners[address].credentials.secret.key != secret.encode():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_trainer_and_an_engine_of_other_versions_refuse_each_other_by_name(monkeypatch, caplog):
    with serving(Keeper()) as address:
        with pytest.MonkeyPatch.context() as newer:
            credentials = credentials_of()
            half = HalfOpen(dialled(address), "127.0.0.1")
            newer.setattr(handshake_module, "VERSION", "06")
            greeting = handshake_module._greeting("trainer", credentials)
        half.socket.sendall(greeting)
        assert half.socket.recv(16) == b"fsdp2 engine v05"
        half.socket.close()
        wait_for_text(caplog, "has version '06' of the protocol, expected '05'")
        RemoteEngine(address).close()
    with socket.create_server(("localhost", 0)) as other:
        for name, message in (
            (b"fsdp2 engine v06", "has version '06' of the protocol, expected '05'. Install the same version"),
            (b"SSH-2.0-OpenSSH_9", "is another program than an engine"),
        ):
            thread = threading.Thread(target=say, args=(other, name))
            thread.start()
            with pytest.raises(RolloutError, match=message):
                RemoteEngine(f"localhost:{other.getsockname()[1]}", timeout_seconds=10)
            thread.join()


def say(listening, what):
    accepted, _ = listening.accept()
    accepted.sendall(what + bytes(32))
    accepted.recv(1000)
    accepted.close()


def wait_for_text(caplog, text):
    until = time.monotonic() + 60
    while text not in caplog.text:
        assert time.monotonic() < until, caplog.text
        time.sleep(0.02)


def greeted(address):
    """Send what a trainer says before it proves anything; return the socket and the bytes of both ends."""
    own = handshake_module._greeting("trainer", credentials_of())
    connected = dialled(address)
    connected.sendall(own)
    other = read_exactly(connected, 48, time.monotonic() + 10)
    hello = b"r" + bytes(48)
    connected.sendall(hello)
    nonce = read_exactly(connected, 32, time.monotonic() + 10)
    return connected, own + other + hello + nonce


def test_a_proof_that_was_seen_or_sent_back_proves_nothing():
    engine, secret = Keeper(), credentials_of().secret
    with serving(engine) as address:
        first, transcript = greeted(address)
        proof = secret.mac(b"proof of the trainer", transcript)
        first.sendall(proof)
        answer = read_exactly(first, 32, time.monotonic() + 10)
        assert answer == secret.mac(b"proof of the engine", transcript) != proof
        for repeated in (proof, answer, bytes(32)):
            stranger, _ = greeted(address)  # the same words, but the server's random number is another one
            stranger.sendall(repeated)
            assert read_exactly(stranger, 32, time.monotonic() + 10) == bytes(32)
            assert stranger.recv(1) == b""
            stranger.close()
        first.close()
        assert is_free(address)


def test_an_engine_that_does_not_have_the_secret_gets_no_weights():
    with socket.create_server(("localhost", 0)) as listening:

        def pretend():
            accepted, _ = listening.accept()
            with accepted:
                greeting = read_exactly(accepted, 48, time.monotonic() + 10)
                accepted.sendall(greeting.replace(b"trainer 05", b"engine v05"))
                read_exactly(accepted, 49, time.monotonic() + 10)
                accepted.sendall(bytes(32))
                accepted.sendall(read_exactly(accepted, 32, time.monotonic() + 10))  # the trainer's own proof

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(RolloutError, match="has another secret than"):
            RemoteEngine(f"localhost:{listening.getsockname()[1]}", timeout_seconds=10)
        thread.join()


# --- frames ----------------------------------------------------------------------------------------------------------


class Wire:
    """A program between a trainer and an engine, which passes their bytes on, and changes some."""

    def __init__(self, address):
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        self.change = lambda purpose, data: data
        self.sent = {b"r": b"", b"h": b""}
        self.sockets = []
        threading.Thread(target=self._accept, args=(address,), daemon=True).start()

    def close(self):
        for each in [self.listening, *self.sockets]:
            each.close()

    def _accept(self, address):
        for purpose in (b"r", b"h"):
            ours, _ = self.listening.accept()
            theirs = dialled(address)
            self.sockets += [ours, theirs]
            for source, to, is_changed in ((ours, theirs, True), (theirs, ours, False)):
                threading.Thread(target=self._pass, args=(source, to, purpose, is_changed), daemon=True).start()

    def _pass(self, source, to, purpose, is_changed):
        try:
            while data := source.recv(1 << 16):
                if is_changed:
                    self.sent[purpose] += data
                    data = self.change(purpose, data)
                to.sendall(data)
        except OSError:
            pass
        for each in (source, to):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def flipped(data, place):
    changed = bytearray(data)
    changed[place] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("place", [0, 9, -1, -40, "repeated", "left out"])
def test_a_frame_that_is_altered_repeated_or_left_out_on_its_way_is_not_used(place, caplog):
    engine = Keeper()
    with serving(engine) as address, closing(Wire(address)) as wire:
        end = RemoteEngine(wire.address)
        end.generate(1)
        first = []

        def change(purpose, data):
            if purpose != b"r":
                return data
            if place == "repeated":
                return data + data
            if place == "left out":
                first.append(data)
                return b"" if len(first) == 1 else data
            return flipped(data, place)

        wire.change = change
        if place == "left out":
            end._connection.send({"call": "sleep", "args": [], "kwargs": {}})
            time.sleep(0.2)
        if place == "repeated":
            assert end.generate(2) == 2  # the first copy is what was sent
        else:
            with pytest.raises(RolloutError, match="is lost"):
                end.generate(2)
        end.close()
    wait_for_text(caplog, "it violates the protocol")
    assert "sleep" not in engine.called and len(engine.called) == 1 + (place == "repeated")


def test_a_weight_that_is_altered_on_its_way_never_reaches_the_engine(caplog):
    engine = Keeper()
    with serving(engine) as address, closing(Wire(address)) as wire:
        end = RemoteEngine(wire.address)
        wire.change = lambda purpose, data: data.replace(b"\x07" * 8, b"\x06" * 8) if purpose == b"r" else data
        with pytest.raises(RolloutError, match="is lost"):
            end.update_weights(iter([("weight", torch.full((1000,), 7, dtype=torch.uint8))]))
        end.close()
    wait_for_text(caplog, "a message was altered on its way")
    assert not engine.held


def test_frames_of_another_session_or_of_the_other_socket_are_not_accepted(monkeypatch, caplog):
    monkeypatch.setattr(connection_module, "_HEARTBEAT_SECONDS", 0.05)
    engine = Keeper()
    with serving(engine, sessions=3) as address, closing(Wire(address)) as wire, closing(Wire(address)) as other:
        end = RemoteEngine(wire.address)
        end.is_asleep  # noqa: B018  the server has read the handshake
        before = len(wire.sent[b"r"])
        end.generate("once")
        request = wire.sent[b"r"][before:]
        end.close()
        end = RemoteEngine(address)
        end._connection._output.write(request)
        end._connection._output.flush()
        with pytest.raises(RolloutError, match="is lost"):
            end.generate("twice")
        end.close()
        wait_for_text(caplog, "a message was altered on its way")
        end = RemoteEngine(other.address)
        other.change = lambda purpose, data: flipped(data, 0) if purpose == b"h" else data
        assert end._connection._closed.wait(10)
        end.close()
    wait_for_text(caplog, "a heartbeat was altered on its way")
    assert engine.called == [(("once",), {})]


# --- arguments -------------------------------------------------------------------------------------------------------


def test_a_trainer_cannot_make_an_engine_run_code_or_open_files(tmp_path):
    folder = tmp_path / "hostile"
    (folder / "custom_generate").mkdir(parents=True)
    mark = tmp_path / "mark"
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\ndef generate(*args, **kwargs): return args\n"
    (folder / "custom_generate" / "generate.py").write_text(code)
    model = build("llama_tied")
    engine = TransformersEngine(model)
    engine.update_weights(stream_weights(model))
    ids = torch.ones(1, 2, dtype=torch.long)
    positions = [ids, *[None] * 9, str(folder)]
    hostile = [
        ([ids], {"custom_generate": str(folder), "trust_remote_code": True}),
        ([ids], {"trust_remote_code": True}),
        ([ids], {"generation_config": {"custom_generate": str(folder)}}),
        ([ids], {"tokenizer": str(folder)}),
        ([ids], {"assistant_model": str(folder)}),
        ([ids], {"stopping_criteria": ["x"]}),
        ([ids], {"use_model_defaults": True}),
        ([ids], {"max_new_tokens": str(folder)}),
        ([ids], {"max_new_tokens": 2**40}),
        ([ids], {"max_new_tokens": -1}),
        ([ids], {"num_return_sequences": 10**9}),
        ([ids], {"temperature": float("inf")}),
        ([ids], {"top_p": float("nan")}),
        ([ids], {"temperature": 10**400}),
        ([ids], {"attention_mask": str(folder)}),
        ([ids], {"do_sample": "yes"}),
        ([], {"input_ids": [[1]], "sampling_params": {"custom_params": {}}}),
        ([], {"input_ids": [[1]], "sampling_params": {"n": 10**9}}),
        ([], {"prompt": "a", "sampling_params": {}, "lora_path": str(folder)}),
        ([], {"prompt": "a", "sampling_params": {}, "image_data": [str(folder)]}),
        ([], {"prompt": "a", "sampling_params": {}, "image_data": "http://169.254.169.254/"}),
        ([], {"prompts": [{"prompt": "a", "multi_modal_uuids": "x"}], "sampling_params": {}}),
        (positions, {}),
        ([ids, {"custom_generate": str(folder)}], {}),
    ]
    with serving(engine) as address:
        end = RemoteEngine(address)
        for args, kwargs in hostile:
            with pytest.raises(RolloutError, match=r"failed: cannot call generate: .*, expected") as failure:
                end.generate(*args, **kwargs)
            assert len(str(failure.value)) < 5000
        with pytest.raises(RolloutError, match=r"cannot call log_probs: the argument 'output_dir' was passed"):
            end._ask("log_probs", ids, output_dir=str(folder))
        with pytest.raises(RolloutError, match=r"cannot call log_probs: argument 0 is '.*', expected a tensor"):
            end._ask("log_probs", str(folder))
        with pytest.raises(RolloutError, match=r"cannot call sleep: the argument 'level' was passed, expected none"):
            end._ask("sleep", level=2)
        for name in ("__init__", "llm_engine", "_loader", "update", "model"):
            with pytest.raises(RolloutError, match="has no method of this name that a trainer may call"):
                end._ask(name)
        with pytest.raises(RolloutError, match=r"Did you mean 'max_new_tokens'\?"):
            end.generate(ids, max_new_token=1)
        allowed = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "do_sample": False, "top_k": 3}
        assert end.generate(ids, **allowed, eos_token_id=[5], pad_token_id=0, bad_words_ids=[[1]]).shape[1] > 2
        end.close()
    assert not mark.exists()


class Wrapper(Keeper):
    """A user's engine that passes everything on, as most do."""

    def generate(self, prompts, *args, seed, style=None, **kwargs):
        return super().generate(prompts, *args, seed=seed, style=style, **kwargs)


def test_an_engine_of_a_user_gets_arguments_that_its_server_names_and_no_others():
    engine = Wrapper()
    with serving(engine, allowed_arguments=["image_names"]) as address:
        end = RemoteEngine(address)
        assert end.generate(["a"], {"b": 1}, seed=3, style="plain", image_names=["c"], top_p=0.5) == 1
        for name in ("custom_generate", "image_name", "trust_remote_code", "self"):
            with pytest.raises(RolloutError, match=rf"the argument '{name}' was passed, expected .*image_names"):
                end.generate(["a"], seed=1, **{name: 1})
        with pytest.raises(RolloutError, match="3 arguments were passed by position, expected at most 2"):
            end.generate(1, 2, 3, seed=1)
        end.close()
    assert engine.called == [((["a"], {"b": 1}), {"seed": 3, "style": "plain", "image_names": ["c"], "top_p": 0.5})]
    for wrong in ("custom_generate", ["trust_remote_code"], [3], ["a b"]):
        with pytest.raises(RolloutError, match="cannot serve: allowed_arguments has"):
            serve(engine, "localhost:1", allowed_arguments=wrong)


def test_a_method_of_a_library_names_no_arguments_for_trainers():
    class Model(type(build("llama_tied"))):
        is_asleep = False

        def update_weights(self, weights): ...

        def sleep(self): ...

        wake_up = sleep

    with serving(Model(build("llama_tied").config)) as address:
        end = RemoteEngine(address)
        with pytest.raises(RolloutError, match="the argument 'custom_generate' was passed"):
            end.generate(torch.ones(1, 2, dtype=torch.long), custom_generate="x")
        end.close()


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize(
    "said",
    [
        {"call": "generate", "args": [], "kwargs": {}, "tensors": [["int8", [0]]] * 1_000_000},
        {"call": "generate", "args": [], "kwargs": {}, "tensors": [["int8", [0]]], "lies": True},
        {"call": "generate", "args": [], "kwargs": {}, "tensors": [["int8", [1 << 50]]]},
        {"call": "generate", "args": [], "kwargs": {}, "tensors": [["int8", [0, 1 << 61, 4]]]},
        {"call": "generate", "args": [], "kwargs": {}, "tensors": [["int8", [1] * 10_000]]},
        {"call": "generate", "args": [], "kwargs": {}, "tensors": [["int8", [2.0]]]},
        {"call": "generate", "args": [], "kwargs": {}, "tensors": [["int8", [True]]]},
        {"call": "generate", "args": [], "kwargs": {}, "tensors": {"int8": [1]}},
        {"call": ["generate"], "args": [], "kwargs": {}},
        {"call": "generate", "args": [{"tensor": -1}], "kwargs": {}, "tensors": [["int8", [0]]]},
        {"call": "generate", "args": [{"object": []}], "kwargs": {}},
        {"call": "generate", "args": [{"list": "ab"}], "kwargs": {}},
        {"call": "update_changed_weights", "since": 3, "version": "x"},
        {"call": "update_changed_weights", "since": "", "version": "x" * 10_000_000},
        "nested",
    ],
    ids=lambda said: reprlib.repr(said)[:60],
)
def test_a_header_that_would_cause_much_work_ends_the_session_at_once(said, caplog):
    if said == "nested":
        value = []
        for _ in range(200):
            value = {"list": [value]}
        said = {"call": "generate", "args": [value], "kwargs": {}}
    with serving(Keeper(), sessions=2) as address:
        end = RemoteEngine(address)
        text = json.dumps(said).encode()
        count = len(said.get("tensors", ())) - ("lies" in said)
        head = struct.pack("<qq", len(text), count) + text
        began = time.process_time()
        with suppress(OSError):  # the server may have closed the connection
            end._connection._output.write(head + end._connection._keys.sending.tag(head))
            end._connection._output.flush()
        with pytest.raises(RolloutError, match="is lost"):
            end.generate()
        assert time.process_time() - began < 2
        end.close()
        assert is_free(address)
    assert "it violates the protocol" in caplog.text or "in the middle of an update" in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 2000


def test_too_many_tensors_and_deep_values_are_errors_where_they_are_sent(monkeypatch):
    monkeypatch.setattr(sizes, "MESSAGE_TENSORS", 3)
    nested = []
    nested.append(nested)
    with serving(Keeper()) as address:
        end = RemoteEngine(address)
        with pytest.raises(RolloutError, match=r"it has 4 tensors, expected at most 3\. Stack"):
            end.generate([torch.ones(1)] * 4)
        with pytest.raises(RolloutError, match="nested more than 64 times"):
            end.generate(nested)
        assert end.generate([torch.ones(1)] * 3) == 1
        end.close()


# --- availability ----------------------------------------------------------------------------------------------------


def test_silent_and_slow_strangers_keep_no_trainer_out():
    stop = threading.Event()

    def drip(connected):
        for byte in b"fsdp2 trainer 05 plain":
            if stop.wait(0.3):
                return
            try:
                connected.sendall(bytes([byte]))
            except OSError:
                return

    with serving(Keeper(), sessions=2) as address, ExitStack() as opened:
        dripper = opened.enter_context(dialled(address))
        thread = threading.Thread(target=drip, args=(dripper,))
        thread.start()
        for _ in range(30):
            opened.enter_context(dialled(address))
        assert is_free(address)
        for _ in range(3 * connection_module._HALF_OPEN):
            opened.enter_context(dialled(address))
        assert is_free(address)
        listener = connection_module._listeners[address]
        assert len(listener._half_open) <= connection_module._HALF_OPEN
        stop.set()
        thread.join()


def test_a_stranger_who_drips_is_ended_by_the_time_of_the_whole_handshake(monkeypatch):
    monkeypatch.setattr(connection_module, "_HANDSHAKE_SECONDS", 1.0)
    address = listen_at_free_port()
    with dialled(address) as connected:
        connected.settimeout(0.2)
        began, ended = time.monotonic(), None
        while ended is None and time.monotonic() - began < 60:
            try:
                connected.sendall(b"f")
                ended = time.monotonic() if connected.recv(1) == b"" else None
            except TimeoutError:
                pass
            except OSError:
                ended = time.monotonic()
    assert ended is not None and ended - began < 30


class Stopped(Keeper):
    """An engine that takes one weight, and then no more for a while."""

    def __init__(self):
        super().__init__()
        self.goes_on = threading.Event()

    def update_weights(self, weights):
        next(weights)
        self.goes_on.wait(60)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("count", [1, 40])
def test_an_engine_that_stops_reading_ends_the_update_although_its_heartbeats_arrive(count, monkeypatch):
    monkeypatch.setattr(sizes, "LARGE_BYTES", 1 << 20)
    engine = Stopped()
    with serving(engine) as address:
        end = RemoteEngine(address, progress_seconds=1.0)
        began = time.monotonic()
        weights = ((f"{i}", torch.zeros(1 << 20)) for i in range(count))
        with pytest.raises(RolloutError, match=r"is lost \(it has .* for 1 s, although its heartbeats arrive\)"):
            end.update_weights(weights)
        assert time.monotonic() - began < 20
        end.close()
        engine.goes_on.set()


def test_a_trainer_that_begins_a_message_and_stops_leaves_the_engine_to_the_next(caplog):
    with serving(Keeper(), sessions=2, progress_seconds=0.5) as address:
        end = RemoteEngine(address)
        end._connection._output.write(struct.pack("<qq", 100, 0))
        end._connection._output.flush()
        wait_for_text(caplog, "it has sent nothing for 0.5 s, although its heartbeats arrive")
        end.close()
        assert is_free(address)


def test_a_limit_and_a_path_that_cannot_be_are_errors():
    for wrong in (0, -1, "600", float("nan"), True):
        for use in (RemoteEngine, lambda address, **options: serve(Keeper(), address, **options)):
            with pytest.raises(RolloutError, match=r"progress_seconds is .*, expected a number above 0 or None"):
                use("localhost:1", progress_seconds=wrong)
    for path in (3, "~nobody-of-this-name/secret"):
        with pytest.raises(RolloutError, match="cannot use a secret file: its path is"):
            RemoteEngine("localhost:1", secret_file=path)
    with serving(Keeper(), progress_seconds=float("inf")) as address:
        end = RemoteEngine(address, progress_seconds=None)
        assert end.generate() == 1
        end.close()


@pytest.mark.full
def test_a_trainer_that_thinks_between_messages_is_not_lost():
    def slow():
        for i in range(3):
            time.sleep(0.5)
            yield f"{i}", torch.full((3,), float(i))

    engine = Keeper()
    with serving(engine, progress_seconds=0.3) as address:
        end = RemoteEngine(address, progress_seconds=10)
        time.sleep(0.5)
        end.update_weights(slow())
        assert len(engine.held) == 3
        end.close()


# --- where a server listens, and TLS ---------------------------------------------------------------------------------


def test_a_server_listens_where_it_is_told_and_by_default_for_this_host_only():
    address = listen_at_free_port()
    assert address.startswith("127.0.0.1:")
    own = socket.gethostbyname(socket.gethostname())
    if not own.startswith("127."):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((own, int(address.rpartition(":")[2])), 1)


@pytest.mark.ranks(2)
def test_a_server_for_a_rank_publishes_no_key_and_listens_on_the_interface_of_the_group():
    if dist.get_rank() == 1:
        serve(Keeper(), peer=0)
        return
    end = RemoteEngine(peer=1)
    assert end.generate() == 1
    published = json.loads(dist.distributed_c10d._get_default_store().get("fsdp2_strategy/engine/1-0"))
    assert published.keys() == {"hosts", "port"}
    other = "127.0.0.2" if published["hosts"][0].startswith("127.") else "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, published["port"]), 1)
    end.close()


def contexts():
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(CERTIFICATES / "localhost.pem", CERTIFICATES / "localhost.key")
    return server, ssl.create_default_context(cafile=CERTIFICATES / "localhost.pem")


def test_weights_are_sent_over_tls(monkeypatch):
    monkeypatch.setattr(connection_module, "_HEARTBEAT_SECONDS", 0.05)
    server, client = contexts()
    engine, weights = Keeper(), {"large": torch.randn(3 << 20), "small": torch.arange(5), "empty": torch.zeros(0, 3)}
    address = listen_at_free_port("localhost", tls=server)
    with serving(engine, sessions=2, address=address):
        end = RemoteEngine(address, tls=client)
        assert end._connection._requests.version() == "TLSv1.3"
        end.update_weights(iter(weights.items()))
        assert engine.held.keys() == weights.keys()
        assert all(torch.equal(engine.held[name], tensor) for name, tensor in weights.items())
        time.sleep(0.3)
        assert end.generate(torch.zeros(3 << 20)) == 1, "heartbeats went on"
        end.close()
        args = {"remote_engine_address": address, "remote_engine_tls_ca_file": str(CERTIFICATES / "localhost.pem")}
        strategy = FSDPV2Strategy(args=args)
        assert strategy.setup_inference_engine(None, "remote").generate() == 2
        strategy.close()


def test_an_end_without_tls_or_with_another_certificate_is_refused_by_name(caplog):
    server, client = contexts()
    address = listen_at_free_port("localhost", tls=server)
    with pytest.raises(RolloutError, match=rf"{address} says 'tls', expected 'plain'\. Use TLS at both ends"):
        RemoteEngine(address)
    with pytest.raises(RolloutError, match=r"did not agree on TLS .*certificate verify failed"):
        RemoteEngine(address, tls=ssl.create_default_context())
    plain = listen_at_free_port("localhost")
    with pytest.raises(RolloutError, match=r"says 'plain', expected 'tls'\."):
        RemoteEngine(plain, tls=client)
    with pytest.raises(RolloutError, match="tls is a bool, expected an ssl"):
        RemoteEngine(plain, tls=True)
    elsewhere = listen_at_free_port("127.0.0.1", tls=server)  # the certificate names only localhost
    with pytest.raises(RolloutError, match=r"did not agree on TLS .*IP address mismatch"):
        RemoteEngine(elsewhere, tls=client)
    silent = dialled(address)
    greeting = handshake_module._greeting("trainer", credentials_of(tls=client))
    silent.sendall(greeting)  # and no handshake of TLS
    with serving(Keeper(), address=address):
        end = RemoteEngine(address, tls=client)
        assert end.generate() == 1
        end.close()
    silent.close()
    args = {"remote_engine_address": "localhost:1", "remote_engine_tls_ca_file": "/nowhere"}
    with pytest.raises(RolloutError, match="remote_engine_tls_ca_file is '/nowhere'"):
        FSDPV2Strategy(args=args).setup_inference_engine(None, "remote")


# --- what engines trust, and the rendezvous --------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [SGLangEngine, VLLMEngine])
@pytest.mark.parametrize("given", [None, False, True])
def test_an_engine_runs_code_of_a_models_folder_only_if_the_user_says_so(engine, given, monkeypatch):
    passed = {}
    monkeypatch.setattr(engine, "__init__", lambda self, *_, **options: passed.update(options))
    args = {"pretrain": "policy"} | ({} if given is None else {"trust_remote_code": given})
    engine.from_args(args, torch.bfloat16)
    assert passed["trust_remote_code"] is bool(given)


def test_a_rendezvous_listens_on_the_interface_of_its_host_only():
    server = RendezvousServer("127.0.0.1")
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("::1", port), 1)


def meet(rendezvous, timeout_seconds=10):
    return tcp_rendezvous.meet(rendezvous, timedelta(seconds=timeout_seconds))


def test_a_rank_with_another_secret_does_not_join():
    server = RendezvousServer("127.0.0.1", secret=SECRETS[0])
    for secret, origin in ((SECRETS[1], "the argument secret"), (None, re.escape(str(default_secret_file())))):
        with pytest.raises(MeshError, match=rf"has another secret than {origin}, expected the same"):
            meet(Rendezvous(server.address, 0, 1, secret))
    assert SECRETS[0] not in repr(Rendezvous(server.address, 0, 1, SECRETS[0]))
    _, local = meet(Rendezvous(server.address, 0, 1, SECRETS[0]))
    assert (local.rank, local.count) == (0, 1)
    plain = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(MeshError, match="has another secret than"):
        meet(Rendezvous(f"127.0.0.1:{plain.port}", 0, 1))


def test_what_a_stranger_writes_in_the_store_is_named_and_not_believed():
    server = RendezvousServer("127.0.0.1")
    host, port = server.address.split(":")
    stranger = dist.PrefixStore(
        "fsdp2_strategy/handshake", dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    )
    stranger.set("hello/1", "a" * 64)
    with pytest.raises(MeshError, match=r"the value of 'hello/1' in the store was written by a process without"):
        meet(Rendezvous(server.address, 0, 2))
    stranger.set("invitation/1", "b" * 96)
    with pytest.raises(MeshError, match=r"the value of 'invitation/1' .* without the secret"):
        meet(Rendezvous(server.address, 1, 2))
    stranger.set("invitation/1", "short")
    with pytest.raises(MeshError, match=r"the value of 'invitation/1' .* without the secret"):
        meet(Rendezvous(server.address, 1, 2))
