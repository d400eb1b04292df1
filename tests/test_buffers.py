"""Buffers that change in training are equal on all ranks after each step; other models pay nothing."""

from __future__ import annotations

import logging
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.training import strategy_for
from torch import nn

from fsdp2_strategy import explain
from fsdp2_strategy.errors import CheckpointError, RolloutError, ShardError, StepError
from fsdp2_strategy.model.names import named_modules, named_parameters, persistent_buffers
from fsdp2_strategy.rollout import stream_weights


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        for dtype in (torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.complex64):
            self.register_buffer(f"own_{str(dtype)[6:]}", torch.zeros(3).to(dtype))
        self.register_buffer("lengths", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.calls = self.calls + 1  # replaced, not changed in place
        self.lengths.fill_(dist.get_rank())
        for name, buffer in self.named_buffers(recurse=False):
            if name.startswith("own_"):
                buffer.copy_(torch.full((3,), float(dist.get_rank())).to(buffer.dtype))
        return self.last(self.norm(self.first(x)))


def step(strategy, model, optimizer, seed):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed + 10 * dist.get_rank()))
    strategy.backward(model(x).square().mean(), model, optimizer)
    return strategy.optimizer_step(optimizer, model)


def prepared(**config):
    strategy = strategy_for(**config)
    torch.manual_seed(0)
    model = strategy.prepare_model(Normed(), is_training=True)
    return strategy, model, strategy.create_optimizer(model, lr=0.1)


def gathered(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


@pytest.mark.ranks(2)
def test_the_buffers_of_rank_0_are_those_of_all_ranks_after_a_step():
    strategy, model, optimizer = prepared()
    for seed in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed + 10 * dist.get_rank()))
        strategy.backward(model(x).square().mean(), model, optimizer)
        own = gathered(model.norm.running_mean.clone())[0]
        strategy.optimizer_step(optimizer, model)
        shared = gathered(model.norm.running_mean)
        assert torch.equal(shared[0], own) and torch.equal(shared[1], own)
    assert model.calls.item() == 3
    own = {name: buffer for name, buffer in model.named_buffers() if name.startswith("own_")}
    assert len(own) == 4 and all(not buffer.to(torch.complex64).any() for buffer in own.values()), own
    assert model.lengths.tolist() == [dist.get_rank()] * 2, "not persistent: computed from a rank's own values"


@pytest.mark.ranks(2)
def test_buffers_are_averaged_if_asked_for():
    strategy, model, optimizer = prepared(sync_buffers="mean")
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    strategy.backward(model(x).square().mean(), model, optimizer)
    expected = torch.stack(gathered(model.norm.running_var.clone())).mean(dim=0)
    strategy.optimizer_step(optimizer, model)
    assert torch.allclose(model.norm.running_var, expected)
    assert model.norm.num_batches_tracked.item() == 1


@pytest.mark.ranks(2)
def test_buffers_are_left_alone_if_asked_for():
    strategy, model, optimizer = prepared(sync_buffers="off")
    step(strategy, model, optimizer, 0)
    first, second = gathered(model.norm.running_mean)
    assert not torch.equal(first, second)


@pytest.mark.ranks(2)
def test_a_change_on_one_rank_alone_is_found():
    strategy, model, optimizer = prepared()
    step(strategy, model, optimizer, 0)
    if dist.get_rank() == 1:
        model.norm.running_mean.fill_(7.0)
    model.norm.eval()
    step(strategy, model, optimizer, 1)
    first, second = gathered(model.norm.running_mean)
    assert torch.equal(first, second) and not (first == 7).any()


@pytest.mark.ranks(2)
def test_models_without_changing_buffers_send_nothing_more():
    strategy = strategy_for()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model.register_buffer("table", torch.ones(4))
    model = strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    strategy.backward(model(torch.ones(2, 4)).mean(), model, optimizer)
    with (
        patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce,
        patch.object(dist, "broadcast") as broadcast,
    ):
        strategy.optimizer_step(optimizer, model)
    assert reduce.call_count == 1 and not broadcast.called


@pytest.mark.ranks(2)
def test_buffers_of_other_sizes_are_an_error_on_every_rank():
    strategy, model, optimizer = prepared()
    model.register_buffer("queue", torch.zeros(3 + dist.get_rank()))
    with pytest.raises(StepError, match="cannot synchronise the buffer queue: it has 3 to 4 elements"):
        step(strategy, model, optimizer, 0)


@pytest.mark.ranks(2)
def test_buffers_saved_are_those_that_every_rank_evaluates_with(tmp_path):
    strategy, model, optimizer = prepared()
    step(strategy, model, optimizer, 0)
    strategy.save_ckpt(model, tmp_path)
    used = model.norm.running_mean.clone()
    step(strategy, model, optimizer, 1)
    strategy.load_ckpt(model, tmp_path)
    assert torch.equal(model.norm.running_mean, used)


def test_explain_names_changing_buffers_and_restores_them(capsys):
    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("codes", torch.ones(4))

        def forward(self, x):
            self.codes = self.codes * 2
            return self.inner(x) * self.codes

    model = nn.Sequential(Codes(), nn.BatchNorm1d(4)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    text = explain(model, run=lambda m: m(torch.randn(3, 4)), is_training=True)
    assert (
        "1.running_mean" in text
        and "4 buffers" in text
        and "0.codes" in explain(nn.Sequential(Codes()), run=lambda m: m(torch.randn(3, 4)), is_training=True)
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.ranks(2)
def test_a_save_warns_of_buffers_that_differ(tmp_path):
    strategy, model, _ = prepared()
    model.norm.running_mean.data.fill_(dist.get_rank())
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logging.getLogger("fsdp2_strategy").addHandler(handler)
    strategy.save_ckpt(model, tmp_path)
    logging.getLogger("fsdp2_strategy").removeHandler(handler)
    text = "values differ between the ranks in 1 buffer (norm.running_mean): those of rank 0 are saved"
    assert [record.getMessage() for record in records] == ([] if dist.get_rank() else [text])


class TwoBuffers(nn.Module):
    """Registers its buffers, and those of a submodule, in another order on rank 1."""

    def __init__(self, *, shares):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        shared = torch.arange(3.0)
        modules = {"one": nn.Module(), "other": nn.Module()}
        names = ["mean", "count"]
        for name, module in reversed(modules.items()) if dist.get_rank() == 1 else modules.items():
            self.add_module(name, module)
            for key in reversed(names) if dist.get_rank() == 1 else names:
                module.register_buffer(key, torch.zeros(3))
            if shares:
                module.register_buffer("shared", shared)

    def forward(self, x):
        for offset, name in enumerate(("one", "other")):
            module = getattr(self, name)
            module.mean.add_(10 * offset + 1 + dist.get_rank())
            module.count.add_(10 * offset + 5 + dist.get_rank())
        if hasattr(self.one, "shared"):
            self.one.shared.add_(1 + dist.get_rank())
        return self.layer(x)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("mode", ["broadcast", "mean"])
def test_buffers_are_paired_by_name_whatever_the_order_of_registration(mode):
    strategy = strategy_for(sync_buffers=mode)
    torch.manual_seed(0)
    model = strategy.prepare_model(TwoBuffers(shares=True), is_training=True)
    step(strategy, model, strategy.create_optimizer(model, lr=0.1), 0)
    more = 1.0 if mode == "mean" else 0.0
    expected = {"one.mean": 1.0, "one.count": 5.0, "other.mean": 11.0, "other.count": 15.0}
    assert {name: model.get_buffer(name).tolist() for name in expected} == {
        n: [v + more] * 3 for n, v in expected.items()
    }
    assert model.one.shared.tolist() == [1 + more, 2 + more, 3 + more], "registered in two modules"


@pytest.mark.ranks(2)
def test_checkpoints_pair_buffers_by_name_and_streams_refuse_another_order(tmp_path):
    strategy = strategy_for()
    torch.manual_seed(0)
    model = strategy.prepare_model(TwoBuffers(shares=False), is_training=True)
    step(strategy, model, strategy.create_optimizer(model, lr=0.1), 0)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(RolloutError, match=r"ranks \[1\] differ from rank 0"):
        next(stream_weights(model))
    strategy.save_ckpt(model, tmp_path)
    for buffer in model.buffers():
        buffer.zero_()
    strategy.load_ckpt(model, tmp_path, load_module_only=True)
    assert len(before) == 4
    for name, value in before.items():
        assert torch.equal(model.get_buffer(name), value), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["name", "dtype", "more"])
def test_buffers_with_other_names_or_dtypes_are_an_error_on_every_rank(kind, tmp_path):
    strategy, model, optimizer = prepared()
    if kind == "more" and dist.get_rank():
        model.register_buffer("mine", torch.zeros(2))
    if kind != "more":
        name = f"queue{dist.get_rank()}" if kind == "name" else "queue"
        dtype = torch.float64 if kind == "dtype" and dist.get_rank() else torch.float32
        model.register_buffer(name, torch.zeros(2, dtype=dtype))
    expected = "ranks \\[1\\] differ from rank 0, expected persistent buffers with the same names and dtypes"
    with pytest.raises(StepError, match=f"cannot synchronise the buffers: {expected}"):
        step(strategy, model, optimizer, 0)
    with pytest.raises(CheckpointError, match=f"cannot compare the buffers: {expected}"):
        strategy.save_ckpt(model, tmp_path)


@pytest.mark.ranks(2)
def test_parameters_in_another_order_are_an_error_on_every_rank():
    """FSDP2 pairs the parameters of a unit by position."""
    model = nn.Sequential()
    for name in ("b", "a") if dist.get_rank() else ("a", "b"):
        model.add_module(name, nn.Linear(4, 4))
    with pytest.raises(ShardError, match=r"ranks \[1\] differ from rank 0, expected .* in the same order"):
        strategy_for().prepare_model(model)


@pytest.mark.ranks(2)
def test_values_of_dicts_are_reduced_and_gathered_by_key():
    own = {"loss": 1.0, "accuracy": 2.0, "z": torch.ones(2)}
    given = dict(reversed(own.items())) if dist.get_rank() else own
    strategy = strategy_for()
    reduced, gathered = strategy.all_reduce(given, "max"), strategy.all_gather(given)
    assert (reduced["loss"], reduced["accuracy"]) == (1.0, 2.0)
    assert {name: value.tolist() for name, value in gathered.items()} == {
        "loss": [1.0, 1.0],
        "accuracy": [2.0, 2.0],
        "z": [1.0] * 4,
    }


@pytest.mark.ranks(2)
def test_weights_frozen_on_one_rank_only_are_an_error_on_every_rank(tmp_path):
    strategy = strategy_for()
    torch.manual_seed(0)
    model = strategy.prepare_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), is_training=True)
    model[dist.get_rank()].requires_grad_(False)
    with pytest.raises(CheckpointError, match="cannot save the trainable weights: ranks \\[1\\] differ"):
        strategy.save_ckpt(model, tmp_path, only_trainable=True)


def test_modules_and_tensors_have_the_names_and_the_order_that_torch_gives_them():
    shared, tied = nn.Linear(2, 2), nn.BatchNorm1d(2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, tied), "b": nn.ModuleList([tied, shared, nn.Linear(2, 2)])})
    model["b"][2].weight = shared.weight
    model["b"].register_buffer("own", torch.zeros(2))
    model["b"].register_buffer("derived", torch.zeros(2), persistent=False)
    model["a"].register_buffer("again", model["b"].own)
    model["b"].register_module("none", None)
    for remove_duplicate in (True, False):
        expected = list(model.named_modules(remove_duplicate=remove_duplicate))
        assert named_modules(model, remove_duplicate=remove_duplicate) == expected
    assert list(named_parameters(model).items()) == list(model.named_parameters())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name != "b.derived"}
    assert list(persistent_buffers(model).items()) == list(buffers.items())
    compiled = nn.Sequential(torch.compile(shared))
    assert [*named_parameters(compiled)] == ["0.weight", "0.bias"]
