"""Checkpoints: resumed to the bit, on any ranks, never lost, and errors on every rank."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.crashes import dies_at, removals_at_once
from helpers.log_lines import Lines
from helpers.models import PlainTransformer, build, next_token_loss, tokens
from helpers.reference import full, full_parameters
from helpers.training import assert_same, full_state, prepared, strategy_for, tags, train
from helpers.worlds import some
from torch import nn

import fsdp2_strategy.checkpoint.save as saving
from fsdp2_strategy import EMA, list_checkpoints, save_checkpoint, sizes, verify_checkpoint
from fsdp2_strategy.checkpoint import directory, listing
from fsdp2_strategy.checkpoint.training_state import optimizer_tensors
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage.safetensors_format import read_header

FULL = pytest.mark.full

# --- resume --------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.ranks(2)
def test_resume_is_bitwise_exact_with_dropout(tmp_path):
    def noisy(model, steps, optimizer, scheduler, strategy):
        losses = []
        for step in steps:
            ids = tokens(torch.Generator().manual_seed(7 * step + dist.get_rank()))
            loss = next_token_loss(model(ids), ids) + 0.01 * random.random() + 0.01 * np.random.rand()  # noqa: NPY002
            strategy.backward(loss, model, optimizer)
            losses.append((loss.item(), strategy.optimizer_step(optimizer, model, scheduler)))
        return losses

    def start(seed):
        strategy = strategy_for(seed=seed)
        model = strategy.prepare_model(PlainTransformer(dropout=0.3).train(), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        scheduler = strategy.create_scheduler(optimizer, "cosine", num_training_steps=20)
        strategy.set_seed(seed, per_rank=True)
        return strategy, model, optimizer, scheduler

    strategy, model, optimizer, scheduler = start(0)
    noisy(model, range(3), optimizer, scheduler, strategy)
    strategy.save_ckpt(model, tmp_path, client_state={"samples": 12, "best": [0.1, None, {"a": True}]})
    expected = noisy(model, range(3, 7), optimizer, scheduler, strategy)

    strategy, model, optimizer, scheduler = start(99)
    path, client_state = strategy.load_ckpt(model, tmp_path)
    assert path == str(tmp_path / "global_step3")
    assert client_state == {"samples": 12, "best": [0.1, None, {"a": True}]}
    assert noisy(model, range(3, 7), optimizer, scheduler, strategy) == expected


@pytest.mark.ranks(2)
def test_optimizer_and_schedule_of_the_model_are_saved_without_being_named(tmp_path):
    class Actor(nn.Module):
        is_actor = True

        def __init__(self):
            super().__init__()
            self.model = build("llama")

    strategy = strategy_for()
    actor = strategy.prepare_model(Actor(), is_training=True)
    optimizer = strategy.create_optimizer(actor, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # not made by us, but used with the model
    train(strategy, actor.model, optimizer, scheduler, range(2))
    strategy.save_ckpt(actor.model, str(tmp_path), "global_step2", 3, 1000, {"consumed_samples": 4})

    fresh = strategy.prepare_model(Actor(), is_training=True)
    other = strategy.create_optimizer(fresh, lr=1.0)
    other_scheduler = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    _, state = strategy.load_ckpt(fresh.model, str(tmp_path), optimizer=other, scheduler=other_scheduler)
    assert state == {"consumed_samples": 4}
    assert_same(full_state(fresh, other), full_state(actor, optimizer))
    assert other_scheduler.state_dict() == scheduler.state_dict()
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.0025


@pytest.mark.ranks(2)
def test_resume_goes_on_counting_and_between_boundaries_drops_nothing_but_gradients(tmp_path):
    strategy = strategy_for(train_batch_size=4)
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, range(5))  # two steps and half of a third
    assert strategy.save_ckpt(model, tmp_path) == str(tmp_path / "global_step2")
    model, optimizer, scheduler = prepared(strategy, seed=1)
    strategy.load_ckpt(model, tmp_path)
    assert strategy.global_step(model) == 2
    train(strategy, model, optimizer, scheduler, range(2))
    assert strategy.global_step(model) == 3


def resume_over_several_blocks(path):
    """Save shards of several blocks each, with optimizer, average and a large client state; load them; compare."""
    strategy = strategy_for()

    rows = 6000 * dist.get_world_size()

    def start(seed):
        torch.manual_seed(seed)
        model = strategy.prepare_model(nn.Sequential(nn.Embedding(rows, 768), nn.Linear(768, 96)), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        for step in range(2):
            ids = torch.arange(8) + 100 * step + seed
            strategy.backward(model(ids).square().sum(), model, optimizer)
            strategy.optimizer_step(optimizer, model)
        return model, optimizer, EMA(model, 0.9)

    model, optimizer, ema = start(0)
    note = {"text": "0123456789abcdef" * (9 << 17)}  # 18 MiB: a trainer state of two blocks
    written = Path(strategy.save_ckpt(model, path, "t", client_state=note, optimizer=optimizer, ema=ema))
    shard_bytes = max(p.to_local().nbytes for p in model.parameters())
    assert shard_bytes > sizes.BLOCK_BYTES, "no shard spans blocks: the test proves nothing"
    assert verify_checkpoint(written).ok
    other, other_optimizer, other_ema = start(5)
    _, state = strategy.load_ckpt(other, path, optimizer=other_optimizer, ema=other_ema)
    assert state == note
    assert_same(full_state(other, other_optimizer), full_state(model, optimizer))
    assert all(torch.equal(full(other_ema.averages[n]), full(a)) for n, a in ema.averages.items())


@pytest.mark.real_sizes
@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_of_several_blocks_load_on_the_ranks_that_saved_them(world_size, tmp_path, run_on):
    run_on(world_size, resume_over_several_blocks, path=tmp_path)


def save_at(path, shard_size):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy, "recurrent", shard_size=shard_size)
    train(strategy, model, optimizer, scheduler, range(3), "recurrent")
    state = full_state(model, optimizer)
    strategy.set_seed(0, per_rank=True)
    strategy.save_ckpt(model, path, "t", client_state={"lr": optimizer.param_groups[0]["lr"]})
    if dist.get_rank() == 0:
        torch.save(state, path / "expected.pt")
    dist.barrier()


def load_at(path, shard_size, cpu_offload):
    strategy = strategy_for(cpu_offload=cpu_offload)
    model, optimizer, scheduler = prepared(strategy, "recurrent", seed=5, shard_size=shard_size, lr=9.0)
    _, client_state = strategy.load_ckpt(model, path, tag="t")
    assert_same(full_state(model, optimizer), torch.load(path / "expected.pt"))
    assert optimizer.param_groups[0]["lr"] == client_state["lr"]
    assert scheduler.last_epoch == strategy.global_step(model) == 3
    draws = [None] * dist.get_world_size()
    dist.all_gather_object(draws, torch.rand(1).item())
    assert len(set(draws)) == len(draws), "each rank draws its own numbers"
    results = train(strategy, model, optimizer, scheduler, [3], "recurrent")
    assert results[0][1].grad_norm > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "shard_size"), [(3, -1), pytest.param(4, 2, marks=FULL), pytest.param(1, -1, marks=FULL)]
)
def test_another_world_size_and_shard_size_load_the_same_state(tmp_path, run_on, world, shard_size):
    run_on(world, save_at, path=tmp_path, shard_size=shard_size)
    for other, other_shard_size in ((1, -1), (2, -1), (4, 2), (4, -1)):
        run_on(other, load_at, path=tmp_path, shard_size=other_shard_size, cpu_offload=other == 2)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_parameters_without_gradients_frozen_ones_and_other_groupings_resume(tmp_path):
    def make(seed):
        model = build("llama", seed)
        model.spare = nn.Linear(4, 4)  # never used, never a gradient
        return strategy.prepare_model(model, is_training=True)

    strategy = strategy_for()
    model = make(0)
    optimizer = strategy.create_optimizer(model, lr=1e-2, weight_decay=0.1)
    train(strategy, model, optimizer, None, range(2))
    for parameter in model.lm_head.parameters():
        parameter.requires_grad_(False)  # frozen later: its state is kept
    train(strategy, model, optimizer, None, range(1))
    strategy.save_ckpt(model, tmp_path)
    expected = full_state(model, optimizer)
    assert "state.lm_head.weight.exp_avg" in expected
    assert not any("spare" in n for n in expected if n.startswith("state."))

    other = make(1)
    groups = [{"name": "head", "params": ["lm_head"]}, {"name": "layer0", "params": ["layers.0"], "weight_decay": 0.1}]
    with pytest.raises(CheckpointError, match="group 'layer0' has parameters that were saved with different settings"):
        regrouped = strategy.create_optimizer(other, lr=5.0, param_groups=groups)
        strategy.load_ckpt(other, tmp_path)
    regrouped = strategy.create_optimizer(other, lr=5.0, param_groups=groups[:1])
    strategy.load_ckpt(other, tmp_path)
    assert_same(full_state(other, regrouped), expected)
    assert {g["lr"] for g in regrouped.param_groups} == {1e-2}


# --- finding -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_loading_by_newest_tag_and_directory(tmp_path):
    strategy = strategy_for()
    model, _optimizer, _scheduler = prepared(strategy)
    assert strategy.load_ckpt(model, tmp_path) == (None, {})
    assert strategy.load_ckpt(model, tmp_path / "missing") == (None, {})
    for tag in ("global_step9", "b", "a"):
        strategy.save_ckpt(model, tmp_path, tag, client_state={"tag": tag})
    assert strategy.load_ckpt(model, tmp_path)[1] == {"tag": "a"}, "order is that of the commits"
    assert strategy.load_ckpt(model, tmp_path, tag="b")[1] == {"tag": "b"}
    assert strategy.load_ckpt(model, tmp_path / "global_step9")[1] == {"tag": "global_step9"}
    assert (tmp_path / "latest").read_text() == "a\n"
    strategy.save_ckpt(model, tmp_path, "c", max_num=None, save_latest=False)
    assert (tmp_path / "latest").read_text() == "a\n"
    with pytest.raises(
        CheckpointError, match=r"'global_step8' is not a committed checkpoint .*Did you mean 'global_step9'"
    ):
        strategy.load_ckpt(model, tmp_path, tag="global_step8")


@pytest.mark.full
@pytest.mark.ranks(2)
def test_damaged_checkpoints_are_never_loaded(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    for tag in ("a", "b", "c"):
        strategy.save_ckpt(model, tmp_path, tag, client_state={"tag": tag})
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "c" / "manifest.json").unlink()
        os.truncate(tmp_path / "b" / "model" / "model.safetensors", 100)
    dist.barrier()
    for path, problem in ((tmp_path, "manifest.json: No such file"), (tmp_path / "b", "it is 100 bytes long")):
        with pytest.raises(CheckpointError, match=problem):  # never an older state without a word
            strategy.load_ckpt(model, path)
    assert tags(tmp_path) == ["a"]
    assert strategy.load_ckpt(model, tmp_path, fallback=True)[1] == {"tag": "a"}
    strategy.save_ckpt(model, tmp_path, "d", client_state={"tag": "d"})
    assert strategy.load_ckpt(model, tmp_path)[1] == {"tag": "d"}


@pytest.mark.ranks(2)
def test_names_are_strict_in_both_directions(tmp_path):
    strategy = strategy_for()
    plain, *_ = prepared(strategy, "llama")
    strategy.save_ckpt(plain, tmp_path / "plain")
    more = build("llama", 1)
    more.extra = nn.Linear(3, 3)
    strategy.prepare_model(more, is_training=True)
    strategy.save_ckpt(more, tmp_path / "more")
    before = full_parameters(more)
    with pytest.raises(CheckpointError, match=r"lacks 2 names \(extra\.weight, extra\.bias\) and holds no name"):
        strategy.load_ckpt(more, tmp_path / "plain", load_module_only=True)
    assert_same(full_parameters(more), before)
    with pytest.raises(CheckpointError, match=r"lacks no name and holds 2 names \(extra\.bias, extra\.weight\)"):
        strategy.load_ckpt(plain, tmp_path / "more", load_optimizer_states=False, load_lr_scheduler_states=False)
    strategy.load_ckpt(more, tmp_path / "plain", load_module_strict=False, load_module_only=True)
    loaded = full_parameters(more)
    assert_same({n: t for n, t in loaded.items() if "extra" not in n}, full_parameters(plain))
    assert torch.equal(loaded["extra.weight"], before["extra.weight"])


@pytest.mark.ranks(2)
def test_another_shape_is_refused_before_anything_is_copied(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    strategy.save_ckpt(model, tmp_path)
    other = build("mlp", 1)
    other.last = nn.Linear(5, 2)
    strategy.prepare_model(other, is_training=True)
    before = full_parameters(other)
    shapes = r"2 tensors .* have another shape: last\.weight is \[1, 5\] there, expected \[2, 5\]; .*\. Build the model"
    with pytest.raises(CheckpointError, match=shapes):
        strategy.load_ckpt(other, tmp_path, load_module_only=True)
    assert_same(full_parameters(other), before)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_resume_never_starts_a_fresh_adam_without_being_told(tmp_path):
    strategy = strategy_for()
    model = strategy.prepare_model(build("mlp"), is_training=True)
    strategy.save_ckpt(model, tmp_path)  # no optimizer exists
    other, _optimizer, _scheduler = prepared(strategy, "mlp")
    with pytest.raises(CheckpointError, match=r"was saved without it, .* Pass load_optimizer_states=False"):
        strategy.load_ckpt(other, tmp_path)
    with pytest.raises(CheckpointError, match="load_lr_scheduler_states=False"):
        strategy.load_ckpt(other, tmp_path, load_optimizer_states=False)
    assert strategy.load_ckpt(other, tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)[0]
    unprepared = build("mlp")
    with pytest.raises(CheckpointError, match="Mlp is not sharded, expected a prepared model"):
        strategy.save_ckpt(unprepared, tmp_path)


# --- refused saves ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("client_state", "message"),
    [
        ({"loss": torch.tensor(1.0)}, r"client_state\['loss'\] is a Tensor"),
        ({"a": {"b": [1, {2}]}}, r"client_state\['a'\]\['b'\]\[1\] is a set"),
        ({"a": {3: 1}}, r"client_state\['a'\] has the key 3 of type int"),
        ({"best": float("inf")}, r"client_state\['best'\] is inf"),
        ({"n": np.int64(3)}, r"client_state\['n'\] is a int64"),
    ],
)
def test_client_state_that_json_cannot_hold_is_refused_by_key(tmp_path, client_state, message):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    with pytest.raises(CheckpointError, match=message):
        strategy.save_ckpt(model, tmp_path, client_state=client_state)
    assert list(tmp_path.iterdir()) == []
    # Bad on one rank alone: the others hear of it, with the rank.
    with pytest.raises(CheckpointError, match=r"failed on rank 1: cannot save: client_state"):
        strategy.save_ckpt(model, tmp_path, client_state=client_state if dist.get_rank() else {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tag", ["a/b", "", ".hidden", "latest", "..", 3])
def test_a_tag_that_is_no_plain_name_is_refused(tmp_path, tag):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    with pytest.raises(CheckpointError, match=f"tag is {tag!r}"):
        strategy.save_ckpt(model, tmp_path, tag)


@pytest.mark.ranks(2)
def test_a_checkpoint_that_does_not_fit_is_refused_before_writing(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.save_ckpt(model, tmp_path, "old")
    for limits in ({"max_num": 0}, {"max_num": True}, {"max_mem": 0}, {"max_mem": -1}):
        with pytest.raises(CheckpointError, match=f"{next(iter(limits))} is"):
            strategy.save_ckpt(model, tmp_path, "new", **limits)
    with pytest.raises(CheckpointError, match=r"the checkpoint takes 0\.000 GB, expected at most max_mem = 1e-06 GB"):
        strategy.save_ckpt(model, tmp_path, "new", max_mem=1e-6)
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=1000)
    try:
        with pytest.raises(CheckpointError, match=r"has 0\.000 GB free"):
            strategy.save_ckpt(model, tmp_path, "new")
    finally:
        shutil.disk_usage = usage
    dist.barrier()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "latest", "old"]
    assert strategy.load_ckpt(model, tmp_path)[0] == str(tmp_path / "old")


# --- rotation --------------------------------------------------------------------------------------------------------


def names_in(path):
    directory.finish_removals()
    dist.barrier()
    return sorted(p.name for p in path.iterdir())


@pytest.mark.ranks(2)
def test_rotation_keeps_the_newest_by_count_and_touches_nothing_else(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    if dist.get_rank() == 0:
        (tmp_path / "global_step1_export").mkdir()
        (tmp_path / "notes.txt").write_text("mine")
    dist.barrier()
    with Lines() as log:
        for step in (5, 4, 3, 2, 1):  # a run that was rolled back saves older steps: they are the newer ones
            strategy.save_ckpt(model, tmp_path, f"global_step{step}", max_num=2)
            dist.barrier()
    assert tags(tmp_path) == ["global_step2", "global_step1"]
    last = f"saved {tmp_path.resolve()}/global_step1; deleting global_step3 (max_num 2, max_mem 1000 GB)"
    assert log.lines[-1:] == ([last] if dist.get_rank() == 0 else [])
    assert len(log.lines) == (5 if dist.get_rank() == 0 else 0), "one line for each save"
    assert names_in(tmp_path) == [
        ".lock", "global_step1", "global_step1_export", "global_step2", "latest", "notes.txt",
    ]  # fmt: skip
    # What is on disk is the only list: another process, with other limits, sees the same.
    fresh = strategy_for()
    other = fresh.prepare_model(build("mlp"), is_training=True)
    fresh.save_ckpt(other, tmp_path, "x", max_num=None)
    dist.barrier()
    assert tags(tmp_path) == ["global_step2", "global_step1", "x"]
    fresh.save_ckpt(other, tmp_path, "y", max_num=1)
    dist.barrier()
    assert tags(tmp_path) == ["y"]


@pytest.mark.ranks(1)
def test_latest_never_names_what_rotation_removed(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    strategy.save_ckpt(model, tmp_path, "a", max_num=1)
    strategy.save_ckpt(model, tmp_path, "b", max_num=1, save_latest=False)
    assert (tmp_path / "latest").read_text() == "b\n"


@pytest.mark.ranks(2)
def test_a_state_that_would_be_lost_is_refused(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"scale": 1.0}

    strategy = strategy_for()
    model = strategy.prepare_model(nn.Sequential(Extra(3, 3)), is_training=True)
    with pytest.raises(CheckpointError, match="0 has an extra state"):
        strategy.save_ckpt(model, tmp_path)


@pytest.mark.ranks(2)
def test_rotation_keeps_within_max_mem_and_never_removes_the_newest(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.save_ckpt(model, tmp_path, "a")
    dist.barrier()
    size = list_checkpoints(tmp_path)[0].total_bytes
    assert size == sum(
        p.stat().st_size for p in (tmp_path / "a").rglob("*") if p.is_file() and p.name != "manifest.json"
    )
    for tag in ("b", "c", "d"):
        strategy.save_ckpt(model, tmp_path, tag, max_num=None, max_mem=2.5 * size / 1e9)
        dist.barrier()
    assert tags(tmp_path) == ["c", "d"]
    strategy.save_ckpt(model, tmp_path, "e", max_num=None, max_mem=1.01 * size / 1e9)
    dist.barrier()
    assert tags(tmp_path) == ["e"]


# --- crashes and failures --------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("tag", "files"),
    [("next", 32), ("global_step2", 32), ("next", 3)],
    ids=["new tag", "same tag", "several files"],
)
def test_a_crash_at_any_step_on_disk_leaves_the_newest_checkpoint_loadable(tmp_path, tag, files):
    """Die before each rename, fsync, removal and write of a save in turn; what then loads equals a saved state."""
    with patch.multiple(sizes, FILE_COUNT=files, MIN_FILE_LIMIT_BYTES=1 if files < 32 else sizes.MIN_FILE_LIMIT_BYTES):
        crash_at_every_step(tmp_path, tag)


def crash_at_every_step(tmp_path, tag):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy, "mlp")
    train(strategy, model, optimizer, scheduler, range(2), "mlp")
    committed_at = None
    with removals_at_once():
        for point in itertools.count():
            saves = tmp_path / f"{point}"
            strategy.save_ckpt(model, saves, "global_step1", client_state={"saved": 1}, max_num=2)
            strategy.save_ckpt(model, saves, "global_step2", client_state={"saved": 2}, max_num=2)
            if not dies_at(point, lambda: strategy.save_ckpt(model, saves, tag, client_state={"saved": 3}, max_num=2)):  # noqa: B023
                break
            _, state = strategy.load_ckpt(model, saves)
            committed_at = committed_at or (point if state == {"saved": 3} else None)
            assert state == ({"saved": 3} if committed_at is not None else {"saved": 2}), point
            strategy.save_ckpt(model, saves, "after", client_state={"saved": 4}, max_num=2)
            assert strategy.load_ckpt(model, saves)[1] == {"saved": 4}
            assert len(tags(saves)) == 2
            assert [p.name for p in saves.iterdir() if p.name.startswith(".")] == [".lock"], "leftovers are swept"
    assert committed_at is not None and point > 15


@pytest.mark.ranks(2)
def test_a_save_needs_five_all_reduces_and_a_gather_and_reads_no_manifest_of_a_neighbour_again(tmp_path, monkeypatch):
    model, *_ = prepared(strategy_for(), "mlp")
    for tag in ("a", "b"):
        save_checkpoint(model, tmp_path, tag)
    time.sleep(2 * listing._TICK_NS / 1e9)
    save_checkpoint(model, tmp_path, "c")
    calls, read = Counter(), []
    for name in ("all_reduce", "all_gather", "all_gather_object", "barrier", "broadcast", "broadcast_object_list"):
        monkeypatch.setattr(dist, name, counted(calls, name, getattr(dist, name)))
    for name in ("gather", "gather_object", "scatter_object_list"):
        monkeypatch.setattr(dist, name, counted(calls, name, getattr(dist, name)))
    monkeypatch.setattr(listing, "read_manifest", lambda path: read.append(path.name) or listed(path))
    save_checkpoint(model, tmp_path, "d", max_num=None)
    assert calls == {"all_reduce": 5, "gather_object": 1}
    assert not {"a", "b"} & {*read}
    monkeypatch.undo()
    if dist.get_rank() == 0:
        manifest = tmp_path / "b" / "manifest.json"
        content = manifest.read_bytes()
        manifest.write_bytes(content.replace(b'"step": 0', b'"step": 1'))
        assert tags(tmp_path) == ["a", "c", "d"], "a manifest that has changed is read again"
        manifest.write_bytes(content)
        assert tags(tmp_path) == ["a", "b", "c", "d"]


listed = listing.read_manifest


def counted(calls, name, call):
    def count(*args, **kwargs):
        calls[name] += 1
        return call(*args, **kwargs)

    return count


@pytest.mark.ranks(3)
@pytest.mark.parametrize("call", ["write_components", "blocks_of"])
def test_a_disk_that_fails_on_one_rank_raises_on_all_and_loses_nothing(tmp_path, call):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    strategy.save_ckpt(model, tmp_path, "old", client_state={"saved": 1})
    original = getattr(saving, call)

    def failing(*args, **kwargs):
        result = original(*args, **kwargs)
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device", "model.bin")
        return result

    setattr(saving, call, failing)
    try:
        with pytest.raises(
            CheckpointError, match=r"failed on rank 1: OSError: .*No space left on device: 'model\.bin'"
        ):
            strategy.save_ckpt(model, tmp_path, "new")
    finally:
        setattr(saving, call, original)
    dist.barrier()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "latest", "old"]
    assert strategy.load_ckpt(model, tmp_path)[1] == {"saved": 1}
    strategy.save_ckpt(model, tmp_path, "new")


@pytest.mark.ranks(2)
def test_a_real_full_disk_refuses_or_fails_on_every_rank(tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, [0])
    strategy.save_ckpt(model, tmp_path / "probe")
    disk = tmp_path / "disk"
    if dist.get_rank() == 0:
        disk.mkdir()
        pages = sum(-(-p.stat().st_size // 4096) for p in (tmp_path / "probe").rglob("*") if p.is_file())
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(pages * 4096 * 1.4)}", "tmpfs", disk], check=False)
    dist.barrier()
    if not os.path.ismount(disk):
        return  # no right to mount: the injected failures above have to do
    try:
        strategy.save_ckpt(model, disk, "old", client_state={"saved": 1})
        with pytest.raises(CheckpointError, match="GB free"):
            strategy.save_ckpt(model, disk, "new")
        # The check is only a check: let the disk be full behind its back.
        check, saving.check_space = saving.check_space, lambda *_: None
        try:
            with pytest.raises(CheckpointError, match="No space left on device"):
                strategy.save_ckpt(model, disk, "new")
        finally:
            saving.check_space = check
        assert strategy.load_ckpt(model, disk)[1] == {"saved": 1}
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.ranks(1)
def test_the_layout_on_disk_is_the_documented_one(tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy, "recurrent")
    train(strategy, model, optimizer, scheduler, range(1), "recurrent")
    strategy.save_ckpt(model, tmp_path, client_state={"a": 1})
    checkpoint = tmp_path / "global_step1"
    assert {p.name for p in checkpoint.iterdir()} == {
        "model",
        "optimizer",
        "rng",
        "checksums",
        "trainer_state.json",
        "manifest.json",
    }
    assert [p.name for p in (checkpoint / "rng").iterdir()] == ["rank00000.safetensors"]
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert (manifest["sequence"], manifest["tag"], manifest["step"]) == (1, "global_step1", 1)
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert (state["step"], state["client_state"], state["world_size"]) == (1, {"a": 1}, 1)
    assert listing.read_checkpoint(checkpoint).total_bytes == sum(manifest["files"].values())
    stored = read_header(checkpoint / "model" / "model.safetensors")
    assert "embed.weight" in stored
    assert "head.weight" not in stored, "tied weights are stored once"


# --- what a load must not do -----------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_an_optimizer_that_is_not_the_saved_one_is_refused(tmp_path):
    strategy = strategy_for()
    model = build("llama")
    model.model.requires_grad_(False)
    strategy.prepare_model(model, is_training=True)
    strategy.create_optimizer(model, lr=0.1)
    strategy.save_ckpt(model, tmp_path)
    other, *_ = prepared(strategy)
    with pytest.raises(CheckpointError, match=r"lacks 20 parameters \(model\.embed.*\) that this optimizer steps"):
        strategy.load_ckpt(other, tmp_path, load_lr_scheduler_states=False)
    strategy.create_optimizer(other, lr=0.1, optimizer_cls=torch.optim.SGD)
    with pytest.raises(CheckpointError, match="the state of AdamW, expected that of SGD"):
        strategy.load_ckpt(other, tmp_path, load_lr_scheduler_states=False)


@pytest.mark.ranks(2)
def test_loading_into_an_optimizer_that_has_state_fills_that_and_holds_nothing_twice(tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, range(2))
    strategy.save_ckpt(model, tmp_path)
    expected = full_state(model, optimizer)
    held = {n: t.to_local().data_ptr() for n, t in optimizer_tensors(model, optimizer).items() if t.ndim}
    train(strategy, model, optimizer, scheduler, range(2))
    strategy.load_ckpt(model, tmp_path)
    assert_same(full_state(model, optimizer), expected)
    assert {n: t.to_local().data_ptr() for n, t in optimizer_tensors(model, optimizer).items() if t.ndim} == held


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_schedule_loads_under_other_groups_and_without_the_optimizer(tmp_path):
    def start(**options):
        strategy = strategy_for()
        model = strategy.prepare_model(build("llama"), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=0.1, weight_decay=0.0, **options)
        scheduler = strategy.create_scheduler(optimizer, "linear", num_training_steps=20, num_warmup_steps=10)
        return strategy, model, optimizer, scheduler

    strategy, model, optimizer, scheduler = start()
    train(strategy, model, optimizer, scheduler, range(4))
    strategy.save_ckpt(model, tmp_path)
    expected = train(strategy, model, optimizer, scheduler, [4])
    strategy, model, optimizer, scheduler = start(no_decay=())
    strategy.load_ckpt(model, tmp_path)
    assert len(optimizer.param_groups) == 1
    assert train(strategy, model, optimizer, scheduler, [4]) == expected
    strategy, model, optimizer, scheduler = start()
    strategy.load_ckpt(model, tmp_path, load_optimizer_states=False)
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == pytest.approx(0.04)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mode", some(["defer_all_reduce", "last", "every"], ["defer_all_reduce"]))
@pytest.mark.parametrize("shard_size", [2, -1])
def test_loading_between_micro_batches_drops_their_gradients(tmp_path, mode, shard_size):
    strategy = strategy_for(train_batch_size=8, grad_sync=mode)
    model, optimizer, scheduler = prepared(strategy, "mlp", shard_size=shard_size)
    strategy.save_ckpt(model, tmp_path)
    expected = train(strategy, model, optimizer, scheduler, range(2), "mlp")
    strategy.load_ckpt(model, tmp_path)
    train(strategy, model, optimizer, scheduler, [7], "mlp")
    strategy.load_ckpt(model, tmp_path)
    assert train(strategy, model, optimizer, scheduler, range(2), "mlp") == expected


@pytest.mark.ranks(2)
def test_a_model_that_is_loaded_alone_leaves_the_random_state(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    strategy.save_ckpt(model, tmp_path)
    reference = strategy.prepare_model(build("mlp", 1))
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    strategy.load_ckpt(reference, tmp_path)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.ranks(3)
def test_buffers_that_differ_between_ranks_are_saved_from_one_of_them(tmp_path):
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(6))
            self.last = nn.Linear(64, 64)

        def forward(self, x):
            for norm in self.norms:
                x = norm(x)
            return self.last(x)

    strategy = strategy_for()
    model = strategy.prepare_model(Norms(), is_training=True)
    for buffer in model.buffers():
        buffer.fill_(dist.get_rank() + 1)
    strategy.save_ckpt(model, tmp_path)
    strategy.load_ckpt(model, tmp_path)
    assert {buffer.max().item() for buffer in model.buffers()} == {1}


@pytest.mark.ranks(2)
def test_what_we_did_not_make_is_never_touched(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    if dist.get_rank() == 0:
        (tmp_path / "best").mkdir()
        (tmp_path / "best" / "precious.txt").write_text("mine")
        (tmp_path / ".download.partial").write_text("mine")
        (tmp_path / ".mine.partial" / "x").mkdir(parents=True)
    dist.barrier()
    with pytest.raises(CheckpointError, match="best exists and is not a checkpoint of this package"):
        strategy.save_ckpt(model, tmp_path, "best")
    strategy.save_ckpt(model, tmp_path, "good")
    dist.barrier()
    assert names_in(tmp_path) == [".download.partial", ".lock", ".mine.partial", "best", "good", "latest"]


@pytest.mark.ranks(2)
def test_ranks_that_save_different_things_are_refused_on_every_rank(tmp_path):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy, "mlp")
    with pytest.raises(CheckpointError, match=r"ranks \[1\] differ from rank 0, expected the same directory, tag"):
        strategy.save_ckpt(model, tmp_path, f"at{dist.get_rank()}")
    with pytest.raises(CheckpointError, match=r"ranks \[1\] differ from rank 0"):
        save_checkpoint(model, tmp_path, "x", optimizer=optimizer if dist.get_rank() else None)
    assert list(tmp_path.iterdir()) == []
