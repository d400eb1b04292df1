"""Runs of other programs go on from their own checkpoints, with their losses, on any number of ranks."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import foreign as programs
from helpers.foreign import SAVED, STEPS, WRITERS, decay, loss_at, mean_loss
from helpers.models import build
from helpers.training import strategy_for

from fsdp2_strategy.checkpoint.foreign.contents import read_contents
from fsdp2_strategy.checkpoint.foreign.parameter_ids import named_optimizer
from fsdp2_strategy.checkpoint.foreign.recognise import newest_in

KINDS = {
    "nested": "a folder of torch.distributed.checkpoint",
    "flattened": "a folder of torch.distributed.checkpoint",
    "numbered": "a folder of torch.distributed.checkpoint",
    "two_folders": "a folder of torch.distributed.checkpoint",
    "torchtitan": "a checkpoint of torchtitan",
    "torchtitan_early": "a checkpoint of torchtitan",
    "prime_rl": "a checkpoint of prime-rl",
    "prime_rl_early": "a checkpoint of prime-rl",
    "verl": "a checkpoint of verl",
    "whole_named": "a file of torch.save",
    "whole_numbered": "a file of torch.save",
    "lightning": "a checkpoint of Lightning",
    "lightning_sharded": "a checkpoint of Lightning",
}
CLIENT_STATE = {
    "nested": {"step": 3, "epoch": 1},
    "flattened": {"train": {"step": 3, "epoch": 1}},
    "numbered": {"epoch": 1},
    "torchtitan": {"dataloader": {"world_size": 1}, "train_state": {"step": 3, "ntokens_seen": 960}},
    "torchtitan_early": {"train_state": {"step": 3, "ntokens_seen": 960}},
    "prime_rl": {"app": {"progress": {"step": 3, "total_tokens": 960}}},
    "prime_rl_early": {"progress": {"step": 3}},
    "whole_numbered": {"step": 3, "epoch": 1},
}
WITHOUT_SCHEDULE = ("prime_rl_early",)


def test_each_way_to_write_has_its_kind():
    assert {write.__name__ for write in WRITERS} == KINDS.keys()


@pytest.fixture(scope="module")
def written(tmp_path_factory, run_on):
    folder = tmp_path_factory.mktemp("foreign")
    run_on(2, write_all, folder=folder)
    return folder


def write_all(folder):
    programs.write_all(folder)


def resume(folder, wrote, expected_client=None):
    """Continue a run with other hyper-parameters in the program than in the checkpoint, and compare the losses."""
    strategy = strategy_for(max_norm=0.0)
    model = strategy.prepare_model(build("llama", seed=1), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.5, betas=(0.5, 0.5), weight_decay=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    options = {"optimizer": optimizer, "scheduler": scheduler, "trust": True}
    path, client_state = strategy.load_ckpt(model, folder / wrote, **options)
    assert strategy.global_step(model) == SAVED
    assert scheduler.last_epoch == SAVED
    if expected_client is not None:
        assert client_state == expected_client
    assert path.startswith(str(folder / wrote))
    losses = []
    for step in range(SAVED, STEPS):
        loss = loss_at(model, step)
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler)
        losses.append(mean_loss(loss))
    assert losses == pytest.approx(json.loads((folder / "losses.json").read_text()), rel=2e-5)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.2, 0.0}
    assert all(tuple(group["betas"]) == (0.8, 0.9) for group in optimizer.param_groups)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * decay(STEPS))


USUAL = {("torchtitan", 3), ("nested", 1), ("verl", 3), ("whole_numbered", 2)}
CASES = [
    pytest.param(wrote, ranks, marks=() if (wrote, ranks) in USUAL else pytest.mark.full, id=f"{wrote}-{ranks}")
    for index, wrote in enumerate(KINDS)
    for ranks in sorted({1 + index % 4, 3} | {ranks for kind, ranks in USUAL if kind == wrote})
]


@pytest.mark.parametrize(("wrote", "ranks"), CASES)
def test_a_run_goes_on_with_the_losses_of_the_old_program(written, run_on, wrote, ranks):
    run_on(ranks, resume, folder=written, wrote=wrote, expected_client=CLIENT_STATE.get(wrote))


def test_each_kind_is_recognised_and_read_without_a_model(written):
    names = {name for name, _ in build("llama").named_parameters()}
    for wrote, kind in KINDS.items():
        found = newest_in(written / wrote)
        assert found is not None and found.kind == kind, wrote
        contents = read_contents(found)
        assert set(contents.weights) == names, wrote
        assert contents.step == SAVED
        assert contents.training_state == ["optimizer"] + ["scheduler"] * (wrote not in WITHOUT_SCHEDULE)
        optimizer = named_optimizer(contents)
        assert set(optimizer.state) == names, wrote
        settings = optimizer.settings_by_name()
        assert settings["model.norm.weight"]["weight_decay"] == 0.0, wrote
        assert settings["lm_head.weight"]["weight_decay"] == 0.2, wrote
        for name, state in optimizer.state.items():
            assert state["exp_avg"].shape == contents.weights[name].shape, (wrote, name)
