"""Threads of this package do their device work on the stream of the thread that started them."""

from __future__ import annotations

import ast
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers.models import batch_of, build, loss_of
from helpers.reference import full_parameters
from safetensors.torch import load_file

import fsdp2_strategy
from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, sizes
from fsdp2_strategy.checkpoint import background_save
from fsdp2_strategy.distributed import device_order
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.parallel.sequence.ranks import run_in_threads
from fsdp2_strategy.storage import verified_read, write
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.safetensors_format import Entry

HOST_ONLY = {
    "checkpoint/reader.py": "reads bytes of files and compares checksums",
    "checkpoint/verify.py": "reads bytes of files and compares checksums",
    "data/sample_fetcher.py": "waits for the trainer's process",
    "distributed/process_group.py": "destroys the process group",
    "distributed/unit_watcher.py": "reads and writes the store",
    "distributed/wait_log.py": "reads and writes the store, and logs",
    "integrations/lerobot/prefetch.py": "fetches files",
    "rollout/connection.py": "sends and receives bytes of host memory",
    "rollout/remote.py": "receives tensors in host memory",
}
"""Files that start threads which touch no tensor of a device, and what these threads do."""


def entering(monkeypatch):
    """Pretend that there is an accelerator with a current stream; return which threads set which stream."""
    stream, found = object(), {}

    def set_stream(own):
        found[threading.current_thread()].append(own)

    monkeypatch.setattr(device_order, "current_device", lambda: torch.device("cuda", 1))
    monkeypatch.setattr(device_order, "set_device", lambda device: found.update({threading.current_thread(): [device]}))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _device: stream)
    monkeypatch.setattr(torch.accelerator, "set_stream", set_stream)
    return found, [torch.device("cuda", 1), stream]


@pytest.fixture
def entered(monkeypatch):
    return entering(monkeypatch)


def noting(function, threads):
    """Return a function that also notes which thread calls it."""

    def noted(*args, **kwargs):
        threads.add(threading.current_thread())
        return function(*args, **kwargs)

    return noted


def test_threads_that_write_and_read_use_the_stream_of_the_caller(tmp_path, entered, monkeypatch):
    found, expected = entered
    threads = set()
    monkeypatch.setattr(sizes, "BLOCK_BYTES", 16)  # a thread for each tensor
    monkeypatch.setattr(write, "_write", noting(write._write, threads))
    monkeypatch.setattr(verified_read.Reader, "_execute", noting(verified_read.Reader._execute, threads))
    entries = [Entry(f"t{i}", tmp_path / f"{i}", 0, torch.float32, (4,)) for i in range(3)]
    requests = [write.WriteRequest(entry, ((0, 4),), torch.full((4,), 1.0)) for entry in entries]
    write.write_all(requests, create=True)
    filled = [torch.zeros(4) for _ in entries]
    with verified_read.Reader("read") as reader:
        reader.read(
            [
                verified_read.ReadRequest(entry.name, Region.of(entry, (4,), torch.float32), ((0, 4),), tensor)
                for entry, tensor in zip(entries, filled, strict=True)
            ]
        )
    assert all(torch.equal(tensor, torch.ones(4)) for tensor in filled)
    assert threads
    assert threads <= found.keys()
    assert all(each == expected for each in found.values())


@pytest.mark.ranks(1)
def test_a_background_save_and_threads_that_stand_for_ranks_use_the_stream_of_the_caller():
    with pytest.MonkeyPatch.context() as patched:
        found, expected = entering(patched)
        threads = set()
        background_save.save_in_background("a save", noting(lambda: None, threads))
        background_save.wait()
        run_in_threads(2, noting(lambda _ranks: None, threads))
    assert len(threads) >= 2
    assert threads <= found.keys()
    assert all(each == expected for each in found.values())


@pytest.mark.ranks(1)
def test_a_trainer_on_another_stream_saves_exports_and_loads_its_last_weights(tmp_path):
    """The simulated accelerator also reports each access that is not ordered after the trainer's."""
    device = current_device()
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    with nullcontext() if device.type == "cpu" else torch.Stream(device):
        model = strategy.prepare_model(build("llama"), is_training=True)
        optimizer = strategy.create_optimizer(model)

        def step():
            batch = {name: value.to(device) for name, value in batch_of("llama", 0, 0).items()}
            strategy.backward(loss_of("llama", model, batch), model, optimizer)
            strategy.optimizer_step(optimizer, model, None)

        step()
        strategy.save_ckpt(model, tmp_path / "checkpoints", tag="last")
        strategy.save_model(model, None, tmp_path / "exported")
        saved = {name: tensor.cpu() for name, tensor in full_parameters(model).items()}
        step()
        strategy.load_ckpt(model, tmp_path / "checkpoints")
        loaded = {name: tensor.cpu() for name, tensor in full_parameters(model).items()}
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    assert all(torch.equal(exported[name], saved[name]) for name in exported.keys() & saved.keys())


@pytest.mark.full
def test_each_thread_enters_the_order_of_its_caller_or_touches_no_device():
    root = Path(fsdp2_strategy.__file__).parent
    starting = {}
    for file in root.rglob("*.py"):
        text = file.read_text()
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        if any(ast.unparse(call.func) in ("ThreadPoolExecutor", "threading.Thread") for call in calls):
            starting[str(file.relative_to(root))] = "DeviceOrder.of_this_thread()" in text
    assert {name for name, enters in starting.items() if not enters} == HOST_ONLY.keys()
    assert sum(starting.values()) >= 4
