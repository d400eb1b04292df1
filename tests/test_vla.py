"""Vision-language-action training: its parameter groups and schedules, as specified, and across a resume."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from helpers.training import strategy_for
from torch import nn

from fsdp2_strategy import build_optimizer, build_scheduler
from fsdp2_strategy.errors import OptimizerError
from fsdp2_strategy.integrations.vitra import (
    GROUPS,
    MultiGroupLRScheduler,
    split_modality_collator,
    vla_parameter_groups,
)
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.optim import get_constant_schedule_with_freeze_warmup


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.experts = nn.Module()
        self.experts.bias = nn.Parameter(torch.zeros(2, 4))  # a bias, though no vector


class TinyVLA(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.action_model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.cognition_token = nn.Parameter(torch.zeros(1, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids):
        hidden = self.backbone.norm(self.backbone.layer(self.backbone.embed_tokens(ids)))
        hidden = hidden + self.backbone.experts.bias.sum(0) + self.cognition_token
        return (self.action_model(hidden) * self.scale).square().mean()


def names_in(groups, model):
    names = {id(p): name for name, p in named_parameters(model).items()}
    return {group["name"]: sorted(names[id(p)] for p in group["params"]) for group in groups}


def expected(token_decays, embedding_moves, as_flattened, frozen):
    """Write the rules down once more, parameter by parameter."""
    matrices = {"backbone.layer.weight": "backbone", "action_model.0.weight": "other"}
    matrices["backbone.embed_tokens.weight"] = "other" if embedding_moves else "backbone"
    vectors = {f"backbone.{n}": "backbone" for n in ("layer.bias", "norm.weight", "norm.bias", "experts.bias")}
    vectors |= {f"action_model.{n}": "other" for n in ("0.bias", "1.weight", "1.bias")} | {"scale": "other"}
    found = {group: [] for group in GROUPS}
    for names, decay in ((matrices, not as_flattened), (vectors, False), ({"cognition_token": "other"}, token_decays)):
        for name, kind in names.items():
            if not (frozen and name.startswith("backbone")):
                found[f"{kind}_{'decay' if decay else 'no_decay'}"].append(name)
    return {group: sorted(names) for group, names in found.items()}


@pytest.mark.parametrize("switches", list(itertools.product((False, True), repeat=4)))
@pytest.mark.ranks(2)
def test_groups_are_as_specified_for_every_combination_of_switches(switches):
    token_decays, embedding_moves, as_flattened, frozen = switches
    strategy = strategy_for()
    model = TinyVLA()
    model.backbone.requires_grad_(not frozen)
    model = strategy.prepare_model(model, is_training=True)  # a shard's own dimensions do not decide
    groups = vla_parameter_groups(
        model,
        learning_rate=1e-4,
        weight_decay=0.1,
        action_model_learning_rate=1e-3,
        action_model_weight_decay=0.2,
        cognition_token_weight_decay=token_decays,
        move_word_embedding_to_action_model=embedding_moves,
        as_flattened=as_flattened,
    )
    assert [group["name"] for group in groups] == list(GROUPS)
    assert names_in(groups, model) == expected(*switches)
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(1e-4, 0.1), (1e-4, 0.0), (1e-3, 0.2), (1e-3, 0.0)]
    lists = split_modality_collator(model, token_decays, embedding_moves, verbose=False)
    if not as_flattened:
        assert [[id(p) for p in parameters] for parameters in lists] == [[id(p) for p in g["params"]] for g in groups]
    optimizer = build_optimizer(model, param_groups=[g for g in groups if g["params"]])
    assert {g["name"] for g in optimizer.param_groups} == {g["name"] for g in groups if g["params"]}


def test_the_action_models_rates_are_the_base_ones_by_default():
    groups = vla_parameter_groups(TinyVLA(), learning_rate=1e-4, weight_decay=0.1)
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(1e-4, 0.1), (1e-4, 0.0), (1e-4, 0.1), (1e-4, 0.0)]


BASE, HEAD, STEPS = 1.0, 10.0, 20


def optimizer_of(model):
    groups = vla_parameter_groups(model, learning_rate=BASE, weight_decay=0.0, action_model_learning_rate=HEAD)
    return build_optimizer(model, param_groups=groups)


def cosine(step):
    return step / 4 if step < 4 else 0.1 + 0.9 * (1 + torch.tensor((step - 4) / 16 * torch.pi).cos().item()) / 2


def multi(optimizer):
    parts = [torch.optim.SGD([{"params": torch.zeros(1), "lr": lr} for _ in range(2)]) for lr in (BASE, HEAD)]
    return MultiGroupLRScheduler(
        optimizer, get_constant_schedule_with_freeze_warmup(parts[0], 5), build_scheduler(parts[1], "constant")
    )


def by_name(name, **options):
    return lambda optimizer: build_scheduler(optimizer, name, **options)


LENGTHS = {"num_training_steps": STEPS, "warmup_ratio": 0.2}
SCHEDULES = {
    "linear-warmup+cosine-decay": (by_name("linear-warmup+cosine-decay", **LENGTHS), cosine, cosine),
    "warmup_cosine": (by_name("warmup_cosine", **LENGTHS), cosine, cosine),
    "constant": (by_name("constant"), lambda _: 1.0, lambda _: 1.0),
    "linear-warmup+constant": (by_name("linear-warmup+constant", **LENGTHS), *[lambda s: min(1.0, s / 4)] * 2),
    "warmup_constant": (by_name("warmup_constant", **LENGTHS), *[lambda s: min(1.0, s / 4)] * 2),
    "backbone-freeze-warmup": (by_name("backbone-freeze-warmup", llm_freeze_step=5), lambda s: s >= 5, lambda _: 1.0),
    "MultiGroupLRScheduler": (multi, lambda s: s >= 5, lambda _: 1.0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_as_specified_at_every_step_and_across_a_resume_at_any(name):
    make, backbone, other = SCHEDULES[name]
    states = []
    for resumed_at in (None, *range(STEPS)):
        optimizer = optimizer_of(TinyVLA())
        scheduler = make(optimizer)
        if resumed_at is not None:
            scheduler.load_state_dict(json.loads(states[resumed_at]))
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        for step in range(resumed_at or 0, STEPS):
            if resumed_at is None:
                states.append(json.dumps(scheduler.state_dict()))
            rates = [group["lr"] for group in optimizer.param_groups]
            specified = [BASE * backbone(step)] * 2 + [HEAD * other(step)] * 2
            assert rates == pytest.approx(specified, abs=1e-6) == list(scheduler.get_last_lr()), step
            optimizer.step()
            scheduler.step()


@pytest.mark.ranks(2)
def test_a_frozen_backbone_does_not_move_and_a_resumed_run_does_not_freeze_again(tmp_path):
    def make(strategy):
        torch.manual_seed(0)
        model = strategy.prepare_model(TinyVLA(), is_training=True)
        groups = vla_parameter_groups(model, learning_rate=0.1, weight_decay=0.1)
        optimizer = strategy.create_optimizer(model, param_groups=groups)
        return model, optimizer, strategy.create_scheduler(optimizer, "backbone-freeze-warmup", llm_freeze_step=3)

    def step(strategy, model, optimizer, scheduler):
        strategy.backward(model(torch.arange(8)), model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler)
        return model.backbone.layer.weight.full_tensor().clone(), model.action_model[0].weight.full_tensor().clone()

    strategy = strategy_for()
    run = make(strategy)
    before = run[0].backbone.layer.weight.full_tensor().clone(), run[0].action_model[0].weight.full_tensor().clone()
    for _ in range(3):
        now = step(strategy, *run)
        assert torch.equal(now[0], before[0]) and not torch.equal(now[1], before[1])
    strategy.save_ckpt(run[0], tmp_path, scheduler=run[2])
    after = step(strategy, *run)
    assert not torch.equal(after[0], before[0])
    again = make(strategy)
    strategy.load_ckpt(again[0], tmp_path, scheduler=again[2])
    assert all(map(torch.equal, step(strategy, *again), after))


def test_schedules_that_cannot_be_are_refused():
    optimizer = build_optimizer(TinyVLA(), lr=1.0)
    with pytest.raises(OptimizerError, match="expected one that begins with 'backbone'"):
        build_scheduler(optimizer, "backbone-freeze-warmup", llm_freeze_step=3)
    with pytest.raises(OptimizerError, match="a number of steps"):
        build_scheduler(optimizer_of(TinyVLA()), "backbone-freeze-warmup")
    with pytest.raises(OptimizerError, match="cannot schedule the group 'decay'"):
        multi(optimizer)
