"""Checkpoints in the layout of transformers' Trainer: what a crash leaves, what is deleted, what is never touched."""

from __future__ import annotations

import contextlib
import io
import itertools
import shutil

import pytest
import torch
from helpers.crashes import dies_at, removals_at_once
from helpers.models import build
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp2_strategy import CheckpointError, FSDPV2Strategy, StrategyConfig, TrainerLayout, list_checkpoints
from fsdp2_strategy.checkpoint import directory
from fsdp2_strategy.cli import main


def start(model):
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    strategy.prepare_model(model, is_training=True)
    strategy.create_optimizer(model, lr=1e-2)
    return strategy, model


def save(strategy, model, saves, step, **options):
    strategy._state_of(model).accumulation.steps = step
    layout = TrainerLayout(files={"trainer_state.json": f'{{"global_step": {step}}}'})
    return strategy.save_ckpt(model, saves, layout=layout, save_latest=False, client_state={"saved": step}, **options)


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
