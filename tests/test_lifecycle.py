"""A strategy starts what is missing, uses what exists, and ends what it began; errors reach every rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.models import build
from helpers.worlds import some

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, build_mesh, list_checkpoints
from fsdp2_strategy.distributed import agreement
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.process_group import group_timeout
from fsdp2_strategy.distributed.torch_internals import timeout_of
from fsdp2_strategy.errors import CheckpointError, ConfigError, MeshError, OptimizerError, ShardError, StepError

ALONE = """
import os, torch, torch.distributed as dist
from fsdp2_strategy import FSDPV2Strategy, build_mesh
from fsdp2_strategy.errors import MeshError
try:
    build_mesh()
    raise SystemExit("no error")
except MeshError as error:
    assert "no process group" in str(error)
for _ in range(2):
    with FSDPV2Strategy(bf16=False) as strategy:
        assert dist.is_initialized() and strategy.world_size == 1 and strategy.is_rank_0()
        model = strategy.prepare_model(torch.nn.Linear(3, 2), is_training=True)
        model(torch.ones(1, 3)).sum().backward()
    assert not dist.is_initialized()
strategy.close()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with FSDPV2Strategy(bf16=False):
    pass
assert dist.is_initialized()
dist.destroy_process_group()
os.environ["WORLD_SIZE"] = "2"
try:
    FSDPV2Strategy()
    raise SystemExit("no error")
except MeshError as error:
    assert "RANK, MASTER_ADDR, MASTER_PORT not set" in str(error)
print("done", flush=True)
os._exit(0)
"""


WITHOUT_CLOSE = """
import atexit, sys, torch, torch.distributed as dist
atexit.register(lambda: print("group at exit:", dist.is_initialized(), flush=True))
from fsdp2_strategy import FSDPV2Strategy
strategy = FSDPV2Strategy(bf16=False)
model = strategy.prepare_model(torch.nn.Linear(3, 2), is_training=True)
optimizer = strategy.create_optimizer(model, lr=0.1)
strategy.backward(model(torch.ones(1, 3)).sum(), model, optimizer)
strategy.optimizer_step(optimizer, model)
strategy.save_ckpt(model, sys.argv[1], async_save=True)
"""


@pytest.mark.full
def test_a_program_that_never_closes_ends_cleanly_after_its_save(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_CLOSE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    folder = tmp_path / "ckpts"
    run = subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("group at exit: False") == 2, run.stdout
    assert [checkpoint.tag for checkpoint in list_checkpoints(folder)] == ["global_step1"]


FAILING = """
import pathlib, sys
import torch.distributed as dist
from torch import nn
from fsdp2_strategy import FSDPV2Strategy
folder = pathlib.Path(sys.argv[2])
class Tokenizer:
    def save_pretrained(self, _):
        raise ValueError("a bug in a tokenizer")
with FSDPV2Strategy(bf16=False) as strategy:
    model = strategy.prepare_model(nn.Linear(8, 8), is_training=True)
    strategy.create_optimizer(model, lr=0.1)
    strategy.save_ckpt(model, folder)
    if sys.argv[1] == "tokenizer":
        strategy.save_model(model, Tokenizer(), folder / "out")
    if strategy.is_rank_0():
        file = folder / "global_step0" / "model" / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    dist.barrier()
    strategy.load_ckpt(model, folder)
"""


@pytest.mark.parametrize("what", some(["tokenizer", "corrupt"], ()))
def test_each_rank_prints_one_traceback_which_ends_where_its_error_was_raised(what, tmp_path):
    script = tmp_path / "fail.py"
    script.write_text(FAILING)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, str(script), what, str(tmp_path / "ckpts")]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": rank}, stderr=subprocess.PIPE, text=True) for rank in "01"
    ]
    printed = [process.communicate(timeout=120)[1] for process in ranks]
    for text in printed:
        assert text.count("Traceback (most recent call last)") == 1, text
        assert "exception was the direct cause" not in text
    if what == "tokenizer":
        assert 'raise ValueError("a bug in a tokenizer")' in printed[0]
        assert all("failed on rank 0: ValueError: a bug in a tokenizer" in text for text in printed)
    else:
        assert all("have the checksum" in text for text in printed)


@pytest.mark.full
def test_a_strategy_ends_what_it_began_and_nothing_else():
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    run = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert run.stdout.endswith("done\n"), run.stdout + run.stderr
    assert "fsdp2_strategy: sharded Linear over shard 1" in run.stderr, "the log is shown where nobody set one up"


def prepared(**config):
    return FSDPV2Strategy(config=StrategyConfig(bf16=False, **config)).prepare_model(build("mlp"), is_training=True)


WRONG = {
    "config": (ConfigError, lambda: FSDPV2Strategy(max_norm=-1.0)),
    "config key": (ConfigError, lambda: StrategyConfig.from_mapping({"sed": 1})),
    "args": (ConfigError, lambda: FSDPV2Strategy(args=3)),
    "batch sizes": (ConfigError, lambda: FSDPV2Strategy(train_batch_size=3)),
    "class name": (ShardError, lambda: prepared(block_class_names=["Linea"])),
    "pattern": (ShardError, lambda: prepared(keep_fp32=["nrm"])),
    "checkpointing": (ShardError, lambda: prepared(activation_checkpointing=["Block"])),
    "group": (OptimizerError, lambda: FSDPV2Strategy().create_optimizer(prepared(), param_groups=[{"params": ["x"]}])),
    "schedule": (OptimizerError, lambda: FSDPV2Strategy().create_scheduler(torch.optim.SGD([torch.ones(1)]), "cosin")),
    "items": (StepError, lambda: FSDPV2Strategy().backward(torch.ones(1), prepared(), num_items_in_batch=-1)),
    "model": (StepError, lambda: FSDPV2Strategy().backward(torch.ones(1), "model")),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_refused_on_every_rank(case):
    error, call = WRONG[case]
    with pytest.raises(error, match=r"cannot|no unit"):
        call()
    dist.barrier()


@pytest.mark.ranks(1)
def test_an_error_is_not_hidden_by_ranks_that_are_lost(monkeypatch):
    def lose(_):
        raise RuntimeError("[gloo/pair.cc:553] Connection closed by peer")

    with monkeypatch.context() as patch:
        patch.setattr(agreement, "_sums", lose)
        with pytest.raises(ValueError, match="bad luck"), all_or_none("test", CheckpointError):
            raise ValueError("bad luck")
        with pytest.raises(RuntimeError, match="Connection closed"), all_or_none("test", CheckpointError):
            pass
        patch.setattr(agreement, "_sums", lambda own: own)  # a time-out of something else is agreed on
        with pytest.raises(CheckpointError, match="DataLoader timed out"), all_or_none("test", CheckpointError):
            raise RuntimeError("DataLoader timed out after 5 seconds")
        patch.setattr(agreement, "_sums", lambda _: pytest.fail("the ranks cannot agree any more"))
        with pytest.raises(RuntimeError, match="Timed out"), all_or_none("test", CheckpointError):
            raise RuntimeError("[gloo/unbound_buffer.cc:129] Timed out waiting 5000ms for recv operation to complete")


@pytest.mark.ranks(3)
def test_an_error_on_one_rank_is_raised_on_all_in_milliseconds():
    with pytest.raises(CheckpointError, match=r"^cannot test: failed on rank 2: ValueError: bad luck$"):
        with all_or_none("test", CheckpointError):
            if dist.get_rank() == 2:
                raise ValueError("bad luck")
    with pytest.raises(CheckpointError, match=r"^cannot test: failed on rank 0 \(and on rank 1\): ValueError: 0$"):
        with all_or_none("test", CheckpointError):
            if dist.get_rank() < 2:
                raise ValueError(dist.get_rank())
    with all_or_none("test", CheckpointError):
        pass
    with pytest.raises(MeshError, match=r"^the same everywhere$"):
        with all_or_none("test", MeshError):
            raise MeshError("the same everywhere")


@pytest.mark.ranks(2)
def test_the_groups_of_a_mesh_with_replicas_have_the_time_out_of_the_ranks_that_train():
    strategy = FSDPV2Strategy(bf16=False)
    before = group_timeout()
    groups = build_mesh(1).get_all_groups()
    assert len(groups) == 2 and {timeout_of(group, torch.device("cpu")) for group in groups} == {before}
    strategy.setup_distributed(timedelta(seconds=90))
    try:
        assert {timeout_of(group, torch.device("cpu")) for group in groups} == {timedelta(seconds=90)}
    finally:
        strategy.setup_distributed(before)


FORKED = """
import multiprocessing, os, sys, torch, torch.distributed as dist
from fsdp2_strategy import FSDPV2Strategy
from fsdp2_strategy.checkpoint.background_save import save_in_background
from fsdp2_strategy.distributed.lost_ranks import report_key
from fsdp2_strategy.distributed.torch_internals import default_store
import threading

def rank(number, port):
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    strategy = FSDPV2Strategy(bf16=False)
    strategy.setup_distributed()
    goes_on = threading.Event()
    save_in_background("test", goes_on.wait)
    worker = multiprocessing.get_context("fork").Process(target=int)
    worker.start()
    worker.join(20)
    assert worker.exitcode == 0, worker.exitcode  # it does not wait for this process's save
    assert strategy.all_reduce(number, op="sum") == 1  # it has not ended this process's group
    reported = default_store().check([report_key(number)])
    strategy.all_reduce(1.0)
    goes_on.set()
    assert not reported

if __name__ == "__main__":
    ranks = [multiprocessing.get_context("fork").Process(target=rank, args=(i, sys.argv[1])) for i in range(2)]
    [each.start() for each in ranks]
    [each.join() for each in ranks]
    sys.exit(sum(each.exitcode for each in ranks))
"""


@pytest.mark.full
def test_the_end_of_a_process_forked_from_a_rank_is_not_the_end_of_the_rank(tmp_path):
    (script := tmp_path / "forked.py").write_text(FORKED)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    subprocess.run([sys.executable, script, str(port)], check=True, timeout=120)


WORKERS = """
import gc, multiprocessing, os, sys, threading, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
sys.path.insert(0, "tests")
from helpers.models import build
from fsdp2_strategy import FSDPV2Strategy, stream_weights
from fsdp2_strategy.checkpoint import background_save
from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.rollout import RemoteEngine, TransformersEngine, listen_at_free_port, serve

SECRET = "a secret that is long enough for this test"

def serve_model(sender):
    address = listen_at_free_port("localhost", secret=SECRET)
    sender.send(address)
    serve(TransformersEngine(build("llama")), address, secret=SECRET)

class Samples(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index % 2:
            background_save.wait()  # there is no save in this process
            try:
                engine.weight_checksums()
            except RolloutError as error:
                assert "belongs to the process that this one was forked" in str(error), error
            engine.close()
        else:  # or the objects are freed
            globals().update(strategy=None, engine=None, model=None)
            gc.collect()
        return torch.ones(3)

if __name__ == "__main__":
    receiver, sender = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve_model, args=(sender,))
    server.start()
    strategy = FSDPV2Strategy(bf16=False)
    strategy.preempted()
    model = strategy.prepare_model(build("llama"), is_training=True)
    engine = RemoteEngine(receiver.recv(), secret=SECRET)
    engine.update_weights(stream_weights(model))
    expected = engine.weight_checksums()
    goes_on = threading.Event()
    background_save.save_in_background("test", goes_on.wait)
    with engine._turn:  # as if another thread were in a call
        loader = DataLoader(Samples(), batch_size=1, num_workers=2, multiprocessing_context="fork")
        batches = iter(loader)
        assert len(list(batches)) == 4
        begun = time.monotonic()
        batches._shutdown_workers()
        seconds = time.monotonic() - begun
    assert engine.weight_checksums() == expected  # the workers have not closed this connection
    assert strategy.all_reduce(2.0, op="sum") == 2
    assert not background_save._in_flight[0].ended.is_set()
    goes_on.set()
    strategy.wait_for_checkpoint()
    engine.close()
    server.join(60)
    strategy.close()
    print("SECONDS", seconds)
"""


@pytest.mark.full
def test_a_worker_forked_during_a_save_with_an_open_engine_ends_at_once_and_changes_nothing(tmp_path):
    (script := tmp_path / "workers.py").write_text(WORKERS)
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, script], cwd=root, timeout=120, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert float(run.stdout.split("SECONDS")[1]) < 3, "a worker waited for a thread or a lock that it does not have"
