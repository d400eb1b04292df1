"""``to-dcp``: what plain torch.distributed.checkpoint loads, and the run that goes on without this package."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.models import batch_of, build, loss_of
from helpers.training import prepared, strategy_for, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from fsdp2_strategy.checkpoint.listing import models_in
from fsdp2_strategy.checkpoint.reader import opened_with_headers
from fsdp2_strategy.checkpoint.stored_model import stored_model
from fsdp2_strategy.cli import main

STEPS = [2, 3, 4]


def save_run(folder, name="llama", **config):
    """Train two steps, save, and train on: the losses after the save are those to expect."""
    strategy = strategy_for(max_norm=0.0, **config)
    model, optimizer, scheduler = prepared(strategy, name)
    *_, (_, _, rate) = train(strategy, model, optimizer, scheduler, [0, 1], name)
    strategy.save_ckpt(model, folder / "ckpts", client_state={"reward": 0.5})
    results = train(strategy, model, optimizer, scheduler, STEPS, name)
    losses, rates = [loss for loss, *_ in results], [rate, *(after for *_, after in results)]
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, losses)
    if dist.get_rank() == 0:
        (folder / "expected.json").write_text(json.dumps({"losses": everywhere, "rates": rates[:-1]}))


def plain_groups(model):
    """Return the groups of a program without this package: weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def resume_plainly(folder, name="llama", flat=False):
    """Load with torch alone into a model with other weights, train on, and compare the losses."""
    model = build(name, seed=3)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optimizer = torch.optim.AdamW(plain_groups(model), lr=0.5, betas=(0.5, 0.5))
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "step": 0,
        "client_state": {"reward": 0.0},
    }
    dcp.load(state, checkpoint_id=folder / "dcp")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    assert (state["step"], state["client_state"]) == (2, {"reward": 0.5})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    schedule = {"lr_scheduler": {"last_epoch": 0, "base_lrs": [0.0, 0.0]}}
    dcp.load(schedule, checkpoint_id=folder / "dcp")
    assert schedule == {"lr_scheduler": {"last_epoch": 2, "base_lrs": [0.01, 0.01]}}
    expected = json.loads((folder / "expected.json").read_text())
    for step, rate in zip(STEPS, expected["rates"], strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        # The batches of two ranks, on one rank or two: the gradient is their mean.
        ours = range(2) if dist.get_world_size() == 1 else [dist.get_rank()]
        for rank in ours:
            loss = loss_of(name, model, batch_of(name, step, rank))
            assert loss.item() == pytest.approx(expected["losses"][rank][step - STEPS[0]], rel=1e-5)
            (loss / len(ours)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def written(tmp_path, run_on, capsys):
    run_on(2, save_run, folder=tmp_path)
    capsys.readouterr()
    assert main(["to-dcp", str(tmp_path / "ckpts"), str(tmp_path / "dcp")]) == 0
    assert "model, optimizer, lr_scheduler, step, client_state" in capsys.readouterr().out
    return tmp_path


def test_plain_torch_resumes_the_run_with_its_losses(written, run_on):
    run_on(2, resume_plainly, folder=written)


@pytest.mark.full
def test_plain_torch_resumes_on_one_rank_and_with_the_flat_state_of_the_optimizer(written, run_on):
    run_on(1, resume_plainly, folder=written)
    run_on(2, resume_plainly, folder=written, flat=True)


@pytest.mark.full
def test_a_small_limit_of_memory_makes_many_files(written, monkeypatch):
    """DCP's writer keeps in memory what a file has, until the file is complete."""
    monkeypatch.setattr("fsdp2_strategy.sizes.CONVERSION_BYTES", 20_000)
    assert main(["to-dcp", str(written / "ckpts"), str(written / "parts")]) == 0
    *file_sizes, _ = sorted(file.stat().st_size for file in (written / "parts").glob("*.distcp"))
    assert len(file_sizes) > 10 and max(file_sizes) < 100_000, "except that of all values that are no tensors"
    with warnings.catch_warnings(action="ignore"):
        states = [build("llama", seed=seed).state_dict() for seed in (4, 5)]
        for state, folder in zip(states, ("dcp", "parts"), strict=True):
            dcp.load({"model": state}, checkpoint_id=written / folder, no_dist=True)
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


@pytest.mark.full
def test_a_folder_that_is_not_empty_and_a_file_that_is_corrupt_leave_no_checkpoint(written, capsys):
    assert main(["to-dcp", str(written / "ckpts"), str(written / "dcp")]) == 2
    assert "is not empty" in capsys.readouterr().err
    file = written / "ckpts/global_step2/model/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["to-dcp", str(written / "ckpts"), str(written / "other")]) == 2
    assert "corrupt" in capsys.readouterr().err and not (written / "other").exists()


class Critic(nn.Module):
    """A wrapper with a tensor of its own around a transformers model."""

    def __init__(self, model):
        super().__init__()
        self.body = model
        self.value_head = nn.Linear(32, 1)

    def forward(self, **batch):
        return self.value_head(self.body(**batch, output_hidden_states=True).hidden_states[-1])


def save_models(folder):
    from test_lora import adapted

    strategy = strategy_for()
    kinds = {
        "tied": build("llama_tied"),
        "experts": build("qwen3_moe"),
        "vision": build("qwen2_vl"),
        "adapters": adapted(target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]),
        "critic": Critic(build("llama")),
    }
    for name, built in kinds.items():
        model = strategy.prepare_model(built, is_training=True)
        strategy.create_optimizer(model, lr=1e-2)
        strategy.save_ckpt(model, folder / name)
        if dist.get_rank() == 0:
            torch.save({key: tuple(value.shape) for key, value in model.state_dict().items()}, folder / f"{name}.pt")
        dist.barrier()


@pytest.mark.full
def test_the_names_are_those_of_the_state_dict_for_models_that_are_saved_with_others(tmp_path, run_on):
    run_on(2, save_models, folder=tmp_path)
    for name in ("tied", "experts", "vision", "adapters", "critic"):
        opened = opened_with_headers(tmp_path / name / "global_step0")
        stored = stored_model(opened.paths, opened.state_of()["optimizer"]["of_parameter"])
        expected = torch.load(tmp_path / f"{name}.pt")
        assert {key: tuple(region.shape) for key, region in stored.regions.items()} == expected, name


def save_two(folder):
    strategy = strategy_for()
    models = {name: prepared(strategy, seed=seed)[0] for seed, name in enumerate(("actor", "critic"))}
    strategy.save_ckpt(models, folder / "ckpts")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_of_several_models_is_an_entry(tmp_path, run_on):
    run_on(2, save_two, folder=tmp_path)
    assert models_in(opened_with_headers(tmp_path / "ckpts/global_step0").manifest) == ("actor", "critic")
    assert main(["to-dcp", str(tmp_path / "ckpts"), str(tmp_path / "dcp")]) == 0
    state = {name: {"model": build("llama", seed=5).state_dict(), "step": 9} for name in ("actor", "critic")}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for seed, name in enumerate(("actor", "critic")):
        expected = build("llama", seed=seed).state_dict()
        assert state[name]["step"] == 0
        assert all(torch.equal(state[name]["model"][key], value) for key, value in expected.items())


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_schedule_of_which_only_the_position_is_known_has_what_its_program_asks_for(tmp_path):
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(3):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        schedule.step()
    expected = schedule.state_dict()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": {"last_epoch": 3}}
    torch.save({**state, "step": 3}, tmp_path / "ckpt_3.pt")
    assert main(["convert", "--trust", "-q", str(tmp_path / "ckpt_3.pt"), str(tmp_path / "out")]) == 0
    assert main(["to-dcp", "-q", str(tmp_path / "out"), str(tmp_path / "dcp")]) == 0
    fresh = torch.optim.lr_scheduler.LambdaLR(torch.optim.AdamW(groups), lambda step: 1 / (step + 1))
    found = {"lr_scheduler": fresh.state_dict()}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert found["lr_scheduler"] == expected
