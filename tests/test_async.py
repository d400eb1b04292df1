"""Saves behind the trainer: a snapshot, whatever it does meanwhile, and failures that are heard of."""

from __future__ import annotations

import errno
import gc
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.folders import contents, small_tokenizer
from helpers.training import assert_same, full_state, prepared, strategy_for, tags, train
from helpers.worlds import some
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from fsdp2_strategy import EMA, list_checkpoints, sizes, verify_checkpoint
from fsdp2_strategy.checkpoint import background_save
from fsdp2_strategy.checkpoint import save as saving
from fsdp2_strategy.checkpoint.storage import stage_local
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage.component import Component


class Gate:
    """Hold back what writes behind the trainer until it is opened."""

    def __init__(self, monkeypatch):
        self.opened = threading.Event()
        self.reached = threading.Event()
        write = saving.write_components

        def held(*args):
            self.reached.set()
            assert self.opened.wait(60)
            return write(*args)

        monkeypatch.setattr(saving, "write_components", held)


@pytest.mark.parametrize(
    ("name", "shard_size"),
    [
        pytest.param("llama_tied", -1, marks=[pytest.mark.ranks(3), pytest.mark.full]),
        pytest.param(
            "gpt_oss", -1, marks=[pytest.mark.ranks(3), pytest.mark.full]
        ),  # some of its tensors need a gather
        pytest.param("deepseek_v3", 2, marks=pytest.mark.ranks(4)),
        pytest.param("unet", -1, marks=[pytest.mark.ranks(1), pytest.mark.full]),
    ],
)
def test_an_async_save_is_the_moment_of_the_call_whatever_comes_after(name, shard_size, tmp_path, monkeypatch):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy, name, shard_size=shard_size)
    train(strategy, model, optimizer, scheduler, range(2), name)
    ema = EMA(model, 0.5)
    loader = ResumableLoader(range(40), 8)
    next(iter(loader))
    client_state = {"list": [1]}
    options = {"client_state": client_state, "ema": ema, "dataloader": loader}
    strategy.save_ckpt(model, tmp_path / "sync", "now", **options)
    before = full_state(model, optimizer)
    with monkeypatch.context() as patched:
        gate = Gate(patched)
        path = strategy.save_ckpt(model, tmp_path / "async", "now", async_save=True, **options)
        client_state["list"].append(2)
        train(strategy, model, optimizer, scheduler, range(2, 4), name)  # with collectives of its own
        ema.update(model)
        next(iter(loader))
        torch.rand(3), np.random.random(), random.random()  # noqa: NPY002  the generators whose states are saved
        assert gate.reached.wait(60) and not Path(path).exists()
        assert list_checkpoints(tmp_path / "async") == []
        gate.opened.set()
        strategy.wait_for_checkpoint()
    dist.barrier()
    assert contents(tmp_path / "sync" / "now") == contents(path) and verify_checkpoint(path).ok
    other, other_optimizer, other_scheduler = prepared(strategy, name, shard_size=shard_size, seed=1)
    strategy.load_ckpt(other, tmp_path / "async", optimizer=other_optimizer, scheduler=other_scheduler)
    assert_same(full_state(other, other_optimizer), before)


@pytest.mark.ranks(2)
def test_several_files_are_the_same_behind_the_trainer(tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, [0])
    with patch.multiple(sizes, FILE_COUNT=5, MIN_FILE_LIMIT_BYTES=1):
        strategy.save_ckpt(model, tmp_path / "sync", "now")
        strategy.save_ckpt(model, tmp_path / "async", "now", async_save=True)
        train(strategy, model, optimizer, scheduler, [1])
        strategy.wait_for_checkpoint()
    dist.barrier()
    assert len(list((tmp_path / "async/now/optimizer").glob("*.safetensors"))) > 3
    assert contents(tmp_path / "sync" / "now") == contents(tmp_path / "async" / "now")


@pytest.mark.ranks(2)
def test_an_async_save_takes_few_python_calls_for_each_tensor(tmp_path):
    strategy = strategy_for()

    def calls_of(layers):
        torch.manual_seed(0)
        model = strategy.prepare_model(nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-3)
        strategy.backward(model(torch.ones(2, 4, device=strategy.device)).sum(), model, optimizer)
        strategy.optimizer_step(optimizer, model)
        strategy.save_ckpt(model, tmp_path, "first", async_save=True)
        strategy.wait_for_checkpoint()
        calls = 0

        def count(_frame, event, _argument):
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            strategy.save_ckpt(model, tmp_path, "second", async_save=True)
        finally:
            sys.setprofile(None)
        strategy.wait_for_checkpoint()
        return calls

    few, many = calls_of(10), calls_of(40)
    of_layer = (many - few) / 30
    assert of_layer < 90, f"{of_layer} calls for the 8 tensors of a layer and its optimizer"


@pytest.mark.full
@pytest.mark.ranks(2)
def test_training_beside_saves_has_the_same_losses(tmp_path):
    losses = []
    for async_save in (False, True):
        strategy = strategy_for()
        model, optimizer, scheduler = prepared(strategy)
        found = []
        for step in range(6):
            found += train(strategy, model, optimizer, scheduler, [step])
            directory = tmp_path / str(async_save)
            strategy.save_ckpt(model, directory, optimizer=optimizer, max_num=2, async_save=async_save)
        strategy.wait_for_checkpoint()
        losses.append(found)
        assert len(tags(directory)) == 2
    assert losses[0] == losses[1]
    dist.barrier()
    for tag in ("global_step5", "global_step6"):
        assert contents(tmp_path / "True" / tag) == contents(tmp_path / "False" / tag)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_the_next_save_a_load_and_close_wait_for_the_one_in_flight(tmp_path, monkeypatch):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    for come_by in (
        lambda: strategy.save_ckpt(model, tmp_path, "second"),
        lambda: strategy.load_ckpt(model, tmp_path),
        strategy.close,
    ):
        with monkeypatch.context() as patched:
            gate = Gate(patched)
            strategy.save_ckpt(model, tmp_path, "first", async_save=True)
            assert gate.reached.wait(60)
            threading.Timer(0.3, gate.opened.set).start()
            come_by()
            assert gate.opened.is_set() and "first" in tags(tmp_path)


@pytest.mark.parametrize("come_by", some(["save", "save behind", "load", "wait", "close"], ["save", "close"]))
@pytest.mark.ranks(3)
def test_a_disk_that_fails_behind_the_trainer_is_heard_of_on_every_rank_once(tmp_path, monkeypatch, come_by):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy, "mlp")
    strategy.save_ckpt(model, tmp_path, "old", client_state={"saved": 1})
    original = saving.write_components

    def failing(*args):
        blocks = original(*args)
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device", "model.bin")
        return blocks

    with monkeypatch.context() as patched:
        patched.setattr(saving, "write_components", failing)
        strategy.save_ckpt(model, tmp_path, "new", async_save=True)
        train(strategy, model, optimizer, scheduler, [0], "mlp")  # training goes on
        call = {
            "save": lambda: strategy.save_ckpt(model, tmp_path, "next"),
            "save behind": lambda: strategy.save_ckpt(model, tmp_path, "next", async_save=True),
            "load": lambda: strategy.load_ckpt(model, tmp_path),
            "wait": strategy.wait_for_checkpoint,
            "close": strategy.close,
        }[come_by]
        with pytest.raises(CheckpointError, match=r"failed on rank 1: OSError: .*No space left on device"):
            call()
    strategy.wait_for_checkpoint()
    dist.barrier()
    if come_by == "close":
        strategy = strategy_for()
        model, optimizer, scheduler = prepared(strategy, "mlp")
    assert tags(tmp_path) == ["old"] and not list(tmp_path.glob(".*.partial"))
    train(strategy, model, optimizer, scheduler, [1], "mlp")
    strategy.save_ckpt(model, tmp_path, "new", async_save=True, client_state={"saved": 2})
    assert strategy.load_ckpt(model, tmp_path)[1] == {"saved": 2}


@pytest.mark.ranks(2)
def test_the_memory_of_a_copy_serves_one_save_after_the_other(tmp_path, monkeypatch):
    background_save.finish()  # what a test before has left
    with monkeypatch.context() as patched:
        patched.setattr(sizes, "STAGING_BYTES", 1 << 16)
        strategy = strategy_for()
        actor, *_ = prepared(strategy)
        critic, *_ = prepared(strategy, "mistral")
        taken = []
        for _ in range(3):
            for name, model in (("actor", actor), ("critic", critic)):
                strategy.save_ckpt(model, tmp_path / name, "tag", async_save=True)
                taken.append(sorted(buffer.data_ptr() for buffer in background_save.staging()._buffers))
        strategy.wait_for_checkpoint()
        own_bytes = max(sum(p.to_local().nbytes for p in model.parameters()) for model in (actor, critic))
        total = sum(buffer.numel() for buffer in background_save.staging()._buffers)
        assert taken[1] == taken[-1] and total <= own_bytes + 2 * (1 << 16)
        strategy.close()
        assert not background_save.staging()._buffers


@pytest.mark.ranks(2)
def test_what_is_away_and_tensors_larger_than_a_slab_are_copied_all_the_same(tmp_path, monkeypatch):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, range(2))
    strategy.save_ckpt(model, tmp_path / "sync", "now")
    strategy.offload_model(model)
    strategy.maybe_offload_optimizer(optimizer)
    with monkeypatch.context() as patched:
        patched.setattr(sizes, "STAGING_BYTES", 1000)
        strategy.save_ckpt(model, tmp_path / "async", "now", async_save=True)
        strategy.reload_model(model)
        strategy.maybe_load_optimizer(optimizer)
        train(strategy, model, optimizer, scheduler, [2])
        strategy.wait_for_checkpoint()
    dist.barrier()
    assert contents(tmp_path / "sync" / "now") == contents(tmp_path / "async" / "now")
    assert verify_checkpoint(tmp_path / "async" / "now").ok
    strategy.close()


class Interrupted(Exception):
    pass


@pytest.mark.ranks(1)
def test_a_wait_that_is_interrupted_leaves_the_save_in_flight(tmp_path, monkeypatch):
    def interrupt(*_):
        raise Interrupted

    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    with monkeypatch.context() as patched:
        gate = Gate(patched)
        strategy.save_ckpt(model, tmp_path, "one", async_save=True)
        assert gate.reached.wait(60)
        before = signal.signal(signal.SIGALRM, interrupt)
        for call in (strategy.wait_for_checkpoint, lambda: strategy.save_ckpt(model, tmp_path, "two", async_save=True)):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Interrupted):
                call()
        signal.signal(signal.SIGALRM, before)
        threading.Timer(0.2, gate.opened.set).start()
        strategy.save_ckpt(model, tmp_path, "two", async_save=True)
        assert gate.opened.is_set() and tags(tmp_path)[0] == "one"
    strategy.wait_for_checkpoint()
    assert tags(tmp_path) == ["one", "two"]


@pytest.mark.ranks(2)
def test_configuration_and_tokenizer_are_those_of_the_call(tmp_path, monkeypatch):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    tokenizer = small_tokenizer()
    with monkeypatch.context() as patched:
        gate = Gate(patched)
        path = Path(strategy.save_ckpt(model, tmp_path, "now", tokenizer=tokenizer, async_save=True))
        model.config.use_cache, model.generation_config.max_new_tokens = not model.config.use_cache, 7
        tokenizer.add_tokens(["later"])
        gate.opened.set()
        strategy.wait_for_checkpoint()
    dist.barrier()
    assert AutoConfig.from_pretrained(path / "model").use_cache != model.config.use_cache
    assert GenerationConfig.from_pretrained(path / "model").max_new_tokens is None
    assert len(AutoTokenizer.from_pretrained(path / "model")) == len(tokenizer) - 1


@pytest.mark.ranks(2)
def test_what_is_copied_is_not_held(tmp_path, monkeypatch):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, [0])
    state = next(iter(optimizer.state.values()))
    average = weakref.ref(state["exp_avg"])
    with monkeypatch.context() as patched:
        gate = Gate(patched)
        strategy.save_ckpt(model, tmp_path, "now", async_save=True)
        assert gate.reached.wait(60)
        state["exp_avg"] = state["exp_avg"].clone()  # as where it moves to host memory
        gc.collect()
        assert average() is None
        gate.opened.set()
        deadline = time.monotonic() + 60
        while background_save._in_flight[0]._work is not None and time.monotonic() < deadline:
            time.sleep(0.01)
    alive = weakref.ref(model)
    del model, optimizer, scheduler, state
    gc.collect()
    assert alive() is None, "a save that has ended holds nothing"
    strategy.wait_for_checkpoint()


def test_a_copy_takes_little_more_than_what_it_copies(monkeypatch):
    monkeypatch.setattr(sizes, "STAGING_BYTES", 64 << 10)
    monkeypatch.setattr(sizes, "BLOCK_BYTES", 4 << 10)
    staging = background_save.Staging()
    tensors = {str(n): torch.randn(600 * (1 + n % 3), 16) for n in range(12)}  # 0.6 and more of a buffer each
    [component] = stage_local([Component.of(Path("folder"), tensors)], staging.copy_to_host)
    total = sum(t.nbytes for t in tensors.values())
    assert sum(buffer.numel() for buffer in staging._buffers) <= total * (1 + 1 / 16) + sizes.STAGING_BYTES
    for name, tensor in tensors.items():
        jobs = [job for job in component.write_requests() if job.entry.name == name]
        assert max(job.tensor.nbytes for job in jobs) <= sizes.BLOCK_BYTES
        assert [job.box[0][0] for job in jobs] == [sum(len(p.tensor) for p in jobs[:i]) for i in range(len(jobs))]
        assert torch.equal(torch.cat([job.tensor for job in jobs]), tensor)


def test_copies_of_other_tensors_take_the_memory_of_those_before():
    staging = background_save.Staging()
    forms = [[(2, 3), (), (0, 4), (5,)], [(2, 3), (), (7, 2), (5,), (1,)], [(2, 3)], [(2, 3), (), (7, 2), (5,), (1,)]]
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        for shapes in forms:
            tensors = [torch.randn(shape).to(dtype) for shape in shapes]
            staging.begin()
            copies = staging.copy_to_host(tensors[:2]) + staging.copy_to_host(tensors[2:])
            before = [tensor.clone() for tensor in tensors]
            for tensor in tensors:
                tensor.zero_()
            for copy, expected in zip(copies, before, strict=True):
                assert copy.dtype == dtype
                assert torch.equal(copy, expected)
    assert len(staging._buffers) == 1


@pytest.mark.ranks(2)
def test_one_process_group_serves_all_saves(tmp_path):
    groups = set()
    for n in range(3):
        strategy = strategy_for()
        model, *_ = prepared(strategy, "mlp")
        strategy.save_ckpt(model, tmp_path / str(n), async_save=True)
        strategy.close()
        groups |= {id(group) for made in background_save._background_groups.values() for group in made.values()}
    assert len(groups) == 1
    [group] = background_save._background_groups[dist.group.WORLD].values()
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=60), "the default group's"


@pytest.mark.full
def test_a_program_that_ends_without_closing_still_saves(tmp_path):
    program = f"""
        import torch
        from fsdp2_strategy import FSDPV2Strategy
        strategy = FSDPV2Strategy(bf16=False)
        model = strategy.prepare_model(torch.nn.Linear(512, 512), is_training=True)
        strategy.save_ckpt(model, {str(tmp_path)!r}, "last", async_save=True)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)
    assert [c.tag for c in list_checkpoints(tmp_path)] == ["last"] and verify_checkpoint(tmp_path / "last").ok


@pytest.mark.ranks(2)
def test_ranks_that_ask_for_different_saves_all_raise(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    with pytest.raises(CheckpointError, match=r"ranks \[1\] differ from rank 0"):
        strategy.save_ckpt(model, tmp_path, "tag", async_save=dist.get_rank() == 0)
    assert not tags(tmp_path)
