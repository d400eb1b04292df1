"""Runs of other programs go on from their own checkpoints, with their losses, on any number of ranks."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from helpers import foreign as programs
from helpers.foreign import SAMPLES, SAVED, STEPS, WRITERS, decay, last_first, loss_at, mean_loss
from helpers.models import build
from helpers.training import strategy_for

from fsdp2_strategy.checkpoint.foreign.contents import read_contents
from fsdp2_strategy.checkpoint.foreign.parameter_ids import named_optimizer
from fsdp2_strategy.checkpoint.foreign.recognise import newest_in
from fsdp2_strategy.errors import CheckpointError

KINDS = {
    "nested": "a folder of torch.distributed.checkpoint",
    "flattened": "a folder of torch.distributed.checkpoint",
    "dotted": "a folder of torch.distributed.checkpoint",
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
    "dotted": {"train.step": 3},
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


USUAL = {("torchtitan", 3), ("whole_numbered", 2)}
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


# --- the same optimizer in the program -------------------------------------------------------------------------------


class Equal(torch.nn.Module):
    """Layers of equal shapes, which only the order of the groups tells apart."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, values):
        for number, layer in enumerate(self.layers):
            values = values + (number + 1) * torch.tanh(layer(values))
        return values


def loss_of_equal(model, step):
    values = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(step))
    return (model(values.chunk(dist.get_world_size())[dist.get_rank()]) - 1).square().mean()


def build_equal(seed=0):
    torch.manual_seed(seed)
    return Equal()


GROUPS = {
    "a_group_per_layer": last_first,
    "one_group": lambda model: [{"params": list(reversed(list(model.parameters())))}],
}


def save_equal(folder):
    for kind, groups in GROUPS.items():
        model = build_equal()
        optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
        losses = []
        for step in range(STEPS):
            loss = loss_of_equal(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == SAVED - 1:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": SAVED}
                torch.save(state, folder / f"{kind}.pt")
        (folder / f"{kind}.json").write_text(json.dumps(losses[SAVED:]))


def resume_equal(folder, kinds):
    for kind in kinds:
        strategy = strategy_for(max_norm=0.0)
        model = strategy.prepare_model(build_equal(seed=1), is_training=True)
        optimizer = torch.optim.AdamW(GROUPS[kind](model), lr=1e-2)
        strategy.load_ckpt(model, folder / f"{kind}.pt", optimizer=optimizer, trust=True)
        losses = []
        for step in range(SAVED, STEPS):
            loss = loss_of_equal(model, step)
            strategy.backward(loss, model, optimizer)
            strategy.optimizer_step(optimizer, model)
            losses.append(mean_loss(loss))
        assert losses == pytest.approx(json.loads((folder / f"{kind}.json").read_text()), rel=1e-6), kind


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_the_same_optimizer_has_its_state_whatever_the_order_of_the_model(tmp_path, run_on, ranks):
    run_on(1, save_equal, folder=tmp_path)
    run_on(ranks, resume_equal, folder=tmp_path, kinds=list(GROUPS))


def write_vectors(folder, ranks=2):
    """As FSDP1 without ``use_orig_params``: a group per unit of equal length, the last first."""
    model = build_equal()
    shards = [
        {"state": {}, "param_groups": [{"params": [i], "lr": 0.1, "betas": (0.9, 0.99)} for i in range(4)]}
        for _ in range(ranks)
    ]
    for number, layer in enumerate(reversed(model.layers)):
        for rank, shard in enumerate(layer.weight.detach().flatten().chunk(ranks)):
            shards[rank]["state"][number] = {"exp_avg": shard.clone(), "exp_avg_sq": shard.clone(), "step": 3.0}
    for rank in range(ranks):
        torch.save(model.state_dict(), folder / f"model_world_size_{ranks}_rank_{rank}.pt")
        torch.save(shards[rank], folder / f"optim_world_size_{ranks}_rank_{rank}.pt")


@pytest.mark.full
@pytest.mark.ranks(3)
def test_flattened_parameters_are_those_of_the_groups_of_the_same_optimizer(tmp_path):
    if dist.get_rank() == 0:
        write_vectors(tmp_path)
    dist.barrier()
    strategy = strategy_for()
    model = strategy.prepare_model(build_equal(seed=1), is_training=True)
    optimizer = torch.optim.AdamW(last_first(model, 0.1), lr=0.1)
    strategy.load_ckpt(model, tmp_path, optimizer=optimizer, trust=True)
    for parameter in model.parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"].full_tensor(), parameter.full_tensor())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=r"in 4 groups, and some, such as .*, can be in more than one of them"):
        strategy.load_ckpt(model, tmp_path, optimizer=optimizer, trust=True)
