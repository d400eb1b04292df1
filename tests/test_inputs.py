"""Floating inputs in half precision: they are cast where they meet a weight, and not when the model is called."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.training import strategy_for
from torch import nn
from torch.nn import functional as F

from fsdp2_strategy import StrategyConfig
from fsdp2_strategy.errors import ConfigError, ShardError


def sinusoids(t, width=16):
    angles = t[..., None] * torch.exp(-math.log(1e4) * torch.arange(width // 2) / (width // 2))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class TimeEmbedding(nn.Module):
    """A module of its own, which may be a unit, that computes sinusoids of times in their dtype."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.table = nn.Parameter(torch.zeros(1, 16))

    def forward(self, t):
        self.seen.append(t)
        return self.mlp(sinusoids(t.view(len(t))) + self.table)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.net, self.scale = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, condition, t):
        return x + self.net(self.norm(x)) * self.scale(condition)[:, None] * (t < 999)[:, None, None]


class Denoiser(nn.Module):
    """A diffusion head as they are written: times, noise, labels and weights as inputs."""

    def __init__(self, *, holds_weights=False):
        super().__init__()
        self.time = TimeEmbedding()
        self.encode, self.decode = nn.Linear(4, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        if holds_weights:
            self.positions = nn.Parameter(torch.zeros(1, 5, 16))

    def forward(self, actions, noise, t, *, weights, extra=None):
        self.seen = {"actions": actions, "noise": noise, "t": t, "weights": weights, "extra": extra}
        level = (t / 1000).view(-1, 1, 1)
        x = self.encode(level * noise + (1 - level) * actions)
        if hasattr(self, "positions"):
            x = x + self.positions
        condition = self.time(t)
        for block in self.blocks:
            x = block(x, condition, t)
        return (weights * F.mse_loss(self.decode(x), noise - actions, reduction="none").mean((1, 2))).mean()


def batch():
    generator = torch.Generator().manual_seed(0)
    actions, noise = torch.randn(2, 2, 5, 4, generator=generator)
    return {"actions": actions, "noise": noise, "t": torch.tensor([998.4, 3.3]), "weights": torch.tensor([1.001, 0.3])}


@pytest.mark.parametrize("holds_weights", [False, True])
@pytest.mark.ranks(2)
def test_times_and_labels_keep_their_values(holds_weights):
    expected = batch()
    for options in ({}, {"min_unit_params": 1}, {"block_class_names": ["Block", "TimeEmbedding"]}):
        torch.manual_seed(0)
        with strategy_for(bf16=True, **options) as strategy:
            unsharded = Denoiser(holds_weights=holds_weights)
            exact = unsharded(**batch()).item()
            model = strategy.prepare_model(unsharded, is_training=True)
            optimizer = strategy.create_optimizer(model, lr=1e-3)
            for _ in range(2):
                loss = model(**batch())
                strategy.backward(loss, model, optimizer)
                names = {"t", "weights"} if holds_weights else {"t", "weights", "actions", "noise"}
                assert all(torch.equal(model.seen[name], expected[name]) for name in names), options
                assert torch.equal(model.time.seen[-1], expected["t"])
                assert loss.dtype == torch.float32
                if not optimizer.state:
                    assert loss.item() == pytest.approx(exact, rel=2e-2)
                assert strategy.optimizer_step(optimizer, model).stepped
            model.eval()
            with torch.no_grad():
                assert model(**batch()).isfinite()


@pytest.mark.ranks(2)
def test_the_configuration_names_inputs_that_are_cast():
    for selected, cast in ((["noise", "t"], {"noise", "t"}), (True, {"noise", "t", "actions", "weights", "extra"})):
        with strategy_for(bf16=True, cast_inputs=selected) as strategy:
            model = strategy.prepare_model(Denoiser(), is_training=True)
            given = batch()
            model(given["actions"], given["noise"], given["t"], weights=given["weights"], extra={"x": torch.ones(2)})
            found = {n for n, v in model.seen.items() if (v["x"] if n == "extra" else v).dtype == torch.bfloat16}
            assert found == cast
            with pytest.raises(ShardError, match="Did you mean 'noise'"):
                strategy_for(bf16=True, cast_inputs=["nose"]).prepare_model(Denoiser())
    with pytest.raises(ConfigError, match="cast_inputs"):
        StrategyConfig(cast_inputs="noise")


class Functional(nn.Module):
    """Modules that use their weights by functions: the model itself, one within it, and recurrent layers."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.inner = Matrix()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return (self.rnn(x)[0] + self.inner(x) + x @ self.weight).sum()


class Matrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("is_root", [True, False])
@pytest.mark.ranks(2)
def test_weights_that_are_used_by_functions_get_inputs_of_their_dtype(is_root):
    with strategy_for(bf16=True) as strategy:
        for is_training in (True, False):
            made = Functional() if is_root else nn.Sequential(Matrix(), nn.LSTM(4, 4))
            model = strategy.prepare_model(made, is_training=is_training)
            with torch.set_grad_enabled(is_training):
                output = model(torch.randn(2, 3, 4))
                assert (output if is_root else output[0]).isfinite().all()


class Regression(nn.Module):
    """A model that holds a weight, with a loss."""

    def __init__(self, uses):
        super().__init__()
        self.weight, self.uses = nn.Parameter(torch.eye(4)), uses
        self.layers = nn.ModuleList([Matrix() for _ in range(2)])

    def forward(self, x, labels, old_log_probs):
        self.seen = labels, old_log_probs
        if self.uses == "number":
            x = old_log_probs[:, 0]
        return (x @ self.weight - labels).square().mean() + sum(layer(x).sum() for layer in self.layers)


@pytest.mark.ranks(2)
def test_a_model_that_holds_weights_keeps_labels_and_an_error_names_the_option():
    given = {"x": torch.ones(2, 4), "labels": torch.full((2, 4), 998.4), "old_log_probs": torch.full((4, 1), 0.001)}
    with strategy_for(bf16=True) as strategy:
        model = strategy.prepare_model(Regression("matrix"), is_training=True)
        assert model(**given).dtype == torch.float32
        assert all(
            torch.equal(seen, given[name]) for seen, name in zip(model.seen, ["labels", "old_log_probs"], strict=True)
        )
        model = strategy.prepare_model(Regression("number"), is_training=True)
        with pytest.raises(RuntimeError, match="dtype") as caught:
            model(**given)
        assert "name the input of the model in cast_inputs" in caught.value.__notes__[0]
    with strategy_for(bf16=True, cast_inputs=["old_log_probs"]) as strategy:
        strategy.prepare_model(Regression("number"), is_training=True)(**given)


class Policy(nn.Module):
    """A policy whose entry point gets states in fp32."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, batch):
        return self.select_action(batch)

    def select_action(self, batch):
        x = batch["state"]
        for layer in self.net:
            x = layer(x)
        return x, batch["t"]


@pytest.mark.ranks(2)
def test_entry_points_cast_where_weights_are():
    given = {"state": torch.randn(2, 4), "t": torch.tensor([998.4])}
    with strategy_for(bf16=True) as strategy:
        model = strategy.prepare_model(Policy().eval())
        with torch.no_grad():
            for call in (model, model.select_action):
                action, t = call(given)
                assert action.dtype == torch.bfloat16 and torch.equal(t, given["t"])
    with strategy_for(bf16=True, cast_inputs=["batch"]) as strategy:
        model = strategy.prepare_model(Policy().eval())
        with torch.no_grad():
            assert model.select_action(given)[1].item() == 1000.0
