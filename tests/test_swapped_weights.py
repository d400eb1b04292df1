"""Averages in place of the weights are evaluated, exported and streamed, and are never taken for the weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from helpers.reference import full_tensors
from helpers.training import assert_same, strategy_for
from torch import nn

from fsdp2_strategy import EMA, build_optimizer, load_checkpoint, load_weights, save_checkpoint
from fsdp2_strategy.errors import CheckpointError, OptimizerError, StepError
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.optim.masters import FSDPadaptOptimizer
from fsdp2_strategy.optim.step import backward
from fsdp2_strategy.rollout import stream_weights

REFUSED = "the parameters of Sequential are the averages of ema.swapped_in, expected its own weights"


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def loss_of(model, step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(3, 4, generator=generator, dtype=torch.float64)).square().mean()


def train(strategy, model, optimizer, steps, ema=None):
    for step in steps:
        strategy.backward(loss_of(model, step), model, optimizer)
        strategy.optimizer_step(optimizer, model)
        if ema is not None:
            ema.update(model)


def prepared(**config):
    strategy = strategy_for(**config)
    model = strategy.prepare_model(built(), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    ema = EMA(model, 0.5)
    train(strategy, model, optimizer, range(2), ema)
    return strategy, model, optimizer, ema


def weights_of(model):
    return full_tensors(named_parameters(model))


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_calls_that_need_the_weights_are_errors_and_change_nothing(world, run_on, tmp_path):
    run_on(world, check_refusals, folder=tmp_path)


def check_refusals(folder):
    strategy, model, optimizer, ema = prepared()
    other = strategy.prepare_model(built())
    strategy.save_ckpt(model, folder / "run")
    strategy.save_model(model, None, folder / "export")
    loss, free = loss_of(model, 5), build_optimizer(model, lr=0.1)
    own, averages = weights_of(model), copy.deepcopy(full_tensors(ema.averages))
    refused = [
        (CheckpointError, "save or load", lambda: strategy.save_ckpt(model, folder / "run", "averages")),
        (CheckpointError, "save or load", lambda: strategy.save_ckpt(model, folder / "run", "a", async_save=True)),
        (CheckpointError, "save or load", lambda: save_checkpoint(model, folder / "run", "averages")),
        (CheckpointError, "save or load", lambda: strategy.load_ckpt(model, folder / "run")),
        (CheckpointError, "save or load", lambda: strategy.load_ckpt(model, folder / "run", load_module_only=True)),
        (CheckpointError, "save or load", lambda: load_checkpoint(model, folder / "run")),
        (CheckpointError, "load Sequential", lambda: load_weights(model, folder / "export")),
        (StepError, "run backward", lambda: strategy.backward(loss, model, optimizer)),
        (StepError, "run backward", lambda: backward(loss, model)),
        (StepError, "step", free.step),
        (StepError, "begin averages", lambda: EMA(model)),
        (StepError, "update the averages", lambda: ema.update(model)),
        (StepError, "copy averages into a model", lambda: ema.copy_to(model)),
        (OptimizerError, "build an optimizer", lambda: strategy.create_optimizer(model, lr=0.1)),
        (OptimizerError, "build an optimizer", lambda: build_optimizer(model, lr=0.1)),
    ]
    with ema.swapped_in(model):
        for kind, action, call in refused:
            with pytest.raises(kind, match=f"cannot {action}: {REFUSED}"):
                call()
        ema.copy_to(other)  # another model
        assert_same(weights_of(other), weights_of(model))
    assert_same(weights_of(model), own)
    assert_same(full_tensors(ema.averages), averages)
    train(strategy, model, optimizer, [2], ema)
    strategy.save_ckpt(model, folder / "run")
    twin_strategy, twin, twin_optimizer, _ = prepared()
    train(twin_strategy, twin, twin_optimizer, [2])
    assert_same(weights_of(model), weights_of(twin))
    assert strategy.load_ckpt(other, folder / "run", load_module_only=True)[0].endswith("global_step3")
    assert_same(weights_of(other), weights_of(model))
    assert [path.name for path in sorted((folder / "run").glob("[a-z]*"))] == ["global_step2", "global_step3", "latest"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulation", ["backward", "optimizer_step"])
def test_a_step_whose_gradients_are_of_the_weights_is_refused_and_can_be_taken_afterwards(accumulation):
    strategy, model, optimizer, ema = prepared(accumulation=accumulation)
    twin_strategy, twin, twin_optimizer, _ = prepared(accumulation=accumulation)
    for each, its_model in ((strategy, model), (twin_strategy, twin)):
        each.backward(loss_of(its_model, 7), its_model)
    with ema.swapped_in(model):
        with pytest.raises(StepError, match=f"cannot step: {REFUSED}"):
            strategy.optimizer_step(optimizer, model)
        with pytest.raises(StepError, match=f"cannot step: {REFUSED}"):
            strategy.clip_grad_norm(model, 1.0)
    expected = twin_strategy.optimizer_step(twin_optimizer, twin)
    result = strategy.optimizer_step(optimizer, model)
    assert (result.step, result.stepped, result.grad_norm) == (3, True, expected.grad_norm)
    assert_same(weights_of(model), weights_of(twin))


@pytest.mark.ranks(2)
def test_a_block_on_one_rank_alone_is_an_error_on_every_rank(tmp_path):
    strategy, model, optimizer, ema = prepared()
    strategy.backward(loss_of(model, 7), model)
    block = ema.swapped_in(model)
    if dist.get_rank():
        block.__enter__()
    with pytest.raises(StepError, match=f"cannot step: {REFUSED}"):
        strategy.optimizer_step(optimizer, model)
    with pytest.raises(CheckpointError, match=f"cannot save or load: {REFUSED}"):
        strategy.save_ckpt(model, tmp_path)
    if dist.get_rank():
        block.__exit__(None, None, None)
    assert strategy.optimizer_step(optimizer, model).stepped


@pytest.mark.ranks(2)
def test_a_loss_of_averages_has_no_backward_pass_after_the_block():
    strategy, model, optimizer, ema = prepared()
    with ema.swapped_in(model):
        loss = loss_of(model, 3)
        x = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
        [gradient] = torch.autograd.grad(model(x).sum(), x)  # of an input, in the block
        reference = built()
        reference.load_state_dict(full_tensors(ema.averages))
        [expected] = torch.autograd.grad(reference(x).sum(), x)
        torch.testing.assert_close(gradient, expected)
    with pytest.raises(StepError, match=r"averages of a block of ema\.swapped_in that has ended"):
        strategy.backward(loss, model, optimizer)


@pytest.mark.ranks(2)
def test_nested_blocks_and_errors_give_the_weights_back():
    strategy, model, optimizer, ema = prepared()
    other = EMA(model, 0.9)
    own = weights_of(model)
    with pytest.raises(KeyError), ema.swapped_in(model):
        with other.swapped_in(model):
            assert_same(weights_of(model), {n: a.double() for n, a in full_tensors(other.averages).items()})
        assert_same(weights_of(model), {n: a.double() for n, a in full_tensors(ema.averages).items()})
        with pytest.raises(StepError, match="cannot run backward"):
            strategy.backward(loss_of(model, 0), model)
        raise KeyError
    assert_same(weights_of(model), own)
    train(strategy, model, optimizer, [2])


@pytest.mark.ranks(2)
def test_exports_and_streams_within_the_block_have_the_averages_also_with_masters_and_offloaded(tmp_path):
    strategy = strategy_for(bf16=True, use_mp_opt=True)
    model = strategy.prepare_model(built().float(), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    assert isinstance(optimizer, FSDPadaptOptimizer)
    ema = EMA(model, 0.5)
    for step in range(2):
        strategy.backward(model(torch.ones(2, 4) * (step + dist.get_rank())).square().mean(), model)
        strategy.optimizer_step(optimizer, model)
        ema.update(model)
    own = weights_of(model)
    with ema.swapped_in(model):
        expected = {name: average.bfloat16() for name, average in full_tensors(ema.averages).items()}
        assert_same(dict(stream_weights(model)), expected)
        strategy.save_model(model, None, tmp_path)
        strategy.offload_model(model)
        assert_same(dict(stream_weights(model)), expected)
    strategy.reload_model(model)
    assert_same(weights_of(model), own)
    opened = strategy.prepare_model(built().float())
    load_weights(opened, tmp_path)
    assert_same(weights_of(opened), expected)
