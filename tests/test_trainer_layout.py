"""Checkpoints in the layout of transformers' Trainer: what a crash leaves, what is deleted, what is never touched."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.crashes import dies_at, removals_at_once
from helpers.models import build
from helpers.pool import processes
from helpers.reference import full_parameters
from helpers.training import assert_same, full_state, prepared, strategy_for, tags, train
from helpers.worlds import some
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

import fsdp2_strategy.storage.write as write_module
from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, list_checkpoints, sizes, verify_checkpoint
from fsdp2_strategy.checkpoint import directory
from fsdp2_strategy.cli import main
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.integrations.trl import TrainerLayout


def start(model):
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    strategy.prepare_model(model, is_training=True)
    strategy.create_optimizer(model, lr=1e-2)
    return strategy, model


def save(strategy, model, saves, step, **options):
    strategy._state_of(model).accumulation.steps = step
    layout = TrainerLayout(files={"trainer_state.json": f'{{"global_step": {step}}}'})
    return strategy.save_ckpt(model, saves, layout=layout, save_latest=False, client_state={"saved": step}, **options)


@pytest.mark.full
@pytest.mark.ranks(1)
def test_a_crash_at_any_step_on_disk_leaves_a_trainers_directory_loadable(tmp_path):
    strategy, model = start(nn.Linear(2, 2))
    for step in (1, 2):
        save(strategy, model, tmp_path / "before", step, max_num=2)
    committed_at = None
    with removals_at_once():
        for point in itertools.count():
            saves = tmp_path / f"{point}"
            shutil.copytree(tmp_path / "before", saves)
            if not dies_at(point, lambda: save(strategy, model, saves, 3, max_num=2)):  # noqa: B023
                break
            newest = strategy.load_ckpt(model, saves)[1]["saved"]
            committed_at = committed_at or (point if newest == 3 else None)
            assert newest == (3 if committed_at is not None else 2), point
            save(strategy, model, saves, 4, max_num=2)
            assert strategy.load_ckpt(model, saves)[1] == {"saved": 4}
            assert sorted(p.name for p in saves.iterdir() if p.name != ".lock") == [
                c.tag for c in list_checkpoints(saves)
            ]
            assert len(list_checkpoints(saves)) == 2
    assert committed_at is not None


@pytest.mark.ranks(2)
def test_a_directory_is_a_folder_for_from_pretrained_and_for_the_command_line(tmp_path):
    strategy, model = start(build("llama"))
    path = save(strategy, model, tmp_path, 7)
    assert path == str(tmp_path / "checkpoint-7")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["verify", path]) == 0
        assert main(["inspect", path]) == 0
    assert "transformers Trainer" in printed.getvalue()


@pytest.mark.ranks(1)
def test_a_directory_of_another_program_is_never_replaced_or_deleted(tmp_path):
    strategy, model = start(nn.Linear(2, 2))
    other = tmp_path / "checkpoint-1"
    (other / "training_state").mkdir(parents=True)
    (other / "training_state" / "optimizer_state.safetensors").touch()
    (other / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint of this package"):
        save(strategy, model, tmp_path, 1)
    for step in (2, 3, 4):
        save(strategy, model, tmp_path, step, max_num=1)
    directory.finish_removals()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != ".lock") == ["checkpoint-1", "checkpoint-4"]


# --- several files ---------------------------------------------------------------------------------------------------

SMALL_FILES = {
    "by count": {"FILE_COUNT": 4, "MIN_FILE_LIMIT_BYTES": 1},
    "by size": {"FILE_BYTES": 20_000, "FILE_COUNT": 1},
}
"""Each size that limits the files of a folder, crossed by the model and by its optimizer."""


def weight_files(folder, stem="model"):
    return sorted(path.name for path in folder.glob(f"{stem}*.safetensors"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("limits", SMALL_FILES)
@pytest.mark.parametrize("in_background", some([False, True], [True]), ids=["sync", "async"])
def test_several_files_resume_bitwise_load_by_from_pretrained_and_rotate_by_size(limits, in_background, tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    options = {"layout": TrainerLayout(), "save_latest": False, "async_save": in_background, "max_num": None}
    with patch.multiple(sizes, **SMALL_FILES[limits]):
        train(strategy, model, optimizer, scheduler, [0])
        strategy.save_ckpt(model, tmp_path, **options)
        strategy.wait_for_checkpoint()
        dist.barrier()
        [first] = list_checkpoints(tmp_path)
        limit = 2.5 * first.total_bytes / 1e9
        for step in (1, 2, 3):
            train(strategy, model, optimizer, scheduler, [step])
            expected = full_state(model, optimizer)
            strategy.save_ckpt(model, tmp_path, max_mem=limit, **options)
            strategy.wait_for_checkpoint()
            dist.barrier()
        assert tags(tmp_path) == ["checkpoint-3", "checkpoint-4"]
        path = tmp_path / "checkpoint-4"
        files, optimizer_files = weight_files(path), weight_files(path / "training_state" / "optimizer", "optimizer")
        assert len(files) > 2 and len(optimizer_files) > 2
        index = json.loads((path / "model.safetensors.index.json").read_text())
        for name in files:
            with safe_open(path / name, "pt") as file:
                held = [file.get_tensor(key) for key in file.keys()]  # noqa: SIM118  it is no mapping
            limit_bytes = SMALL_FILES[limits].get("FILE_BYTES", -(-index["metadata"]["total_size"] // 4))
            assert len(held) == 1 or sum(tensor.nbytes for tensor in held) <= limit_bytes
        assert {*index["weight_map"].values()} == {*files}
        assert verify_checkpoint(path).ok
        if dist.get_rank() == 0:  # one that is cut short is no checkpoint
            shutil.copytree(path, tmp_path / "cut" / "checkpoint-9")
            os.truncate(tmp_path / "cut" / "checkpoint-9" / files[-1], 100)
            assert not list_checkpoints(tmp_path / "cut")
        followed = train(strategy, model, optimizer, scheduler, [4, 5])
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert_same(dict(loaded.named_parameters()), {n: expected[n] for n, _ in loaded.named_parameters()})
    resumed = strategy_for()
    model, optimizer, scheduler = prepared(resumed, seed=1)
    assert resumed.load_ckpt(model, tmp_path)[0] == str(path)
    assert_same(full_state(model, optimizer), expected)
    assert train(resumed, model, optimizer, scheduler, [4, 5]) == followed


@pytest.mark.ranks(2)
def test_adapters_stay_in_one_file_for_peft(tmp_path):
    adapted = get_peft_model(build("llama"), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    strategy, model = start(adapted)
    with patch.multiple(sizes, FILE_COUNT=4, MIN_FILE_LIMIT_BYTES=1):
        path = Path(strategy.save_ckpt(model, tmp_path, layout=TrainerLayout()))
    assert weight_files(path, "adapter_model") == ["adapter_model.safetensors"]
    assert len(weight_files(path / "training_state" / "trainable")) > 2
    expected = full_parameters(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    strategy.load_ckpt(model, tmp_path)
    assert_same(full_parameters(model), expected)


def saved_once(folder):
    """Return a run that has taken a step and saved it."""
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, [0])
    strategy.save_ckpt(model, folder, layout=TrainerLayout(), save_latest=False)
    return strategy, model, optimizer, scheduler


def die_between_files(folder, in_background):
    """Save a second checkpoint, and be killed when the first of its files of weights is written and others are not."""
    strategy, *run = saved_once(folder)
    open_file, begun = write_module.opened, []

    def dying(path, flags):
        if flags & os.O_CREAT:  # to write to it
            if begun:
                os.kill(os.getpid(), signal.SIGKILL)
            begun.append(path)
        return open_file(path, flags)

    train(strategy, *run, [1])
    with patch.object(write_module, "opened", dying), patch.object(write_module, "_THREADS", 1):
        strategy.save_ckpt(run[0], folder, layout=TrainerLayout(), save_latest=False, async_save=in_background)
        strategy.wait_for_checkpoint()
    raise AssertionError("the save was complete before the kill")


@pytest.mark.full
@pytest.mark.ranks(1)
@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
def test_a_kill_between_two_files_leaves_the_checkpoint_before_it(in_background, tmp_path):
    with patch.multiple(sizes, **SMALL_FILES["by count"]):
        saves = tmp_path / "killed"
        run = processes.Process(target=killed_with, args=(current_sizes(), saves, in_background), daemon=True)
        run.start()
        run.join(60)
        assert run.exitcode == -signal.SIGKILL
        partial = directory.partial_path(saves, "checkpoint-2")
        names, whole = weight_files(partial), weight_files(saves / "checkpoint-1")
        assert names == whole and len(names) > 2
        assert 0 < sum(has_values(partial / name) for name in names) < len(names)
        assert tags(saves) == ["checkpoint-1"] and verify_checkpoint(saves / "checkpoint-1").ok

        strategy, model, optimizer, scheduler = saved_once(tmp_path / "expected")
        expected = full_state(model, optimizer)
        followed = train(strategy, model, optimizer, scheduler, [1])
        loaded = AutoModelForCausalLM.from_pretrained(saves / "checkpoint-1", dtype=torch.float32)
        assert_same(dict(loaded.named_parameters()), {n: expected[n] for n, _ in loaded.named_parameters()})
        resumed = strategy_for()
        model, optimizer, scheduler = prepared(resumed, seed=1)
        assert resumed.load_ckpt(model, saves)[0] == str(saves / "checkpoint-1")
        assert_same(full_state(model, optimizer), expected)
        assert train(resumed, model, optimizer, scheduler, [1]) == followed
        resumed.save_ckpt(model, saves, layout=TrainerLayout(), save_latest=False)
        assert tags(saves) == ["checkpoint-1", "checkpoint-2"] and not partial.exists()
        assert verify_checkpoint(saves / "checkpoint-2").ok


def has_values(path):
    """Return whether the tensors of a file are written; its header is written before them."""
    content = path.read_bytes()
    return any(content[8 + int.from_bytes(content[:8], "little") :])


def current_sizes():
    return {name: value for name, value in vars(sizes).items() if name.isupper()}


def killed_with(values, folder, in_background):
    """Run `die_between_files` in another process with the sizes of this one."""
    with patch.multiple(sizes, **values):
        die_between_files(folder, in_background)
