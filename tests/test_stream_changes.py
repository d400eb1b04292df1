"""Weights that change while a stream is half read: the next tensor is an error, or all tensors are of the call."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from helpers.training import assert_same, strategy_for
from helpers.worlds import some
from torch import nn

from fsdp2_strategy import EMA, load_weights
from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.model.names import persistent_buffers
from fsdp2_strategy.model.offloading import offload, reload
from fsdp2_strategy.rollout import stream_adapter, stream_weights

CHANGED = "cannot stream .*: its weights have changed since the stream began, expected the weights of the call"


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.Linear(4, 2)).double()


def step(strategy, model, optimizer):
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    strategy.backward(model(x).square().mean(), model, optimizer)
    strategy.optimizer_step(optimizer, model)


def prepared():
    strategy = strategy_for()
    model = strategy.prepare_model(built(), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    step(strategy, model, optimizer)
    return strategy, model, optimizer


def changes(strategy, model, optimizer, folder):
    """Return what may happen to a model between two tensors, by name."""
    ema = EMA(model, 0.5)
    with torch.no_grad():
        for average in ema.averages.values():
            average.mul_(2)
    strategy.save_ckpt(model, folder / "run")
    strategy.save_model(model, None, folder / "export")
    stack = ExitStack()

    def in_place():
        with torch.no_grad():
            model[3].weight.add_(1)

    def offloaded_load():
        offload(model)
        strategy.load_ckpt(model, folder / "run")
        reload(model)

    def reloaded_step():
        offload(model)
        reload(model)
        step(strategy, model, optimizer)

    return {
        "step": lambda: step(strategy, model, optimizer),
        "load_ckpt": lambda: strategy.load_ckpt(model, folder / "run"),
        "load_ckpt of the model": lambda: strategy.load_ckpt(model, folder / "run", load_module_only=True),
        "load_weights": lambda: load_weights(model, folder / "export"),
        "swapped in": lambda: stack.enter_context(ema.swapped_in(model)),
        "swapped out": stack.close,
        "copy_to": lambda: ema.copy_to(model),
        "in place": in_place,
        "load while offloaded": offloaded_load,
        "step after an offload": reloaded_step,
    }


@pytest.mark.parametrize("world", some([1, 2, 3], [2]))
def test_a_change_between_two_tensors_is_an_error_on_every_rank(world, run_on, tmp_path):
    run_on(world, check_changes, folder=tmp_path)


def check_changes(folder):
    strategy, model, optimizer = prepared()
    for name, change in changes(strategy, model, optimizer, folder).items():
        for since in (None, ""):
            if name.startswith("swapped") and since == "":
                continue  # it happens once
            stream = stream_weights(model, dtype=None, bucket_bytes=1, since=since)  # each tensor has its bucket
            next(stream)
            change()
            with pytest.raises(RolloutError, match=CHANGED):
                list(stream)
        stream = stream_weights(model, dtype=None)  # all in one bucket: gathered before the change
        expected = dict(stream_weights(model, dtype=None))
        first = next(stream)
        if name not in ("swapped in", "swapped out"):
            change()
            assert_same(dict([first, *stream]), expected)
            early = stream_weights(model, dtype=None)
            change()
            if name != "load_ckpt of the model":
                step(strategy, model, optimizer)
            with pytest.raises(RolloutError, match=CHANGED):
                next(early)
        stream.close()
        assert_same(dict(stream_weights(model, dtype=None, bucket_bytes=1)), dict(stream_weights(model, dtype=None)))


@pytest.mark.ranks(2)
def test_what_leaves_the_weights_as_they_are_is_no_change():
    strategy, model, _ = prepared()
    expected = dict(stream_weights(model, dtype=None))
    model.eval()
    for since in (None, ""):
        stream = stream_weights(model, dtype=None, bucket_bytes=1, since=since)
        found = [next(stream)]
        for act in (
            lambda: model(torch.ones(2, 4, dtype=torch.float64)),  # the root stays gathered
            lambda: strategy.backward(model(torch.ones(2, 4, dtype=torch.float64)).sum(), model),
            lambda: offload(model),
            lambda: reload(model),
            lambda: EMA(model).update(model),
        ):
            act()
            found.append(next(stream))
        assert_same(dict([*found, *stream]), expected)


@pytest.mark.ranks(2)
def test_buffers_that_a_forward_pass_changes_are_weights_of_the_stream():
    _, model, _ = prepared()
    assert "1.running_mean" in persistent_buffers(model)
    stream = stream_weights(model, dtype=None, bucket_bytes=1)
    next(stream)
    model.train()(torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(RolloutError, match=CHANGED):
        list(stream)


@pytest.mark.ranks(2)
def test_a_change_on_one_rank_alone_is_an_error_on_every_rank():
    _, model, _ = prepared()
    ema = EMA(model)
    stream = stream_weights(model, dtype=None, bucket_bytes=1)
    next(stream)
    if dist.get_rank():
        ema.copy_to(model)
    with pytest.raises(RolloutError, match=CHANGED):
        list(stream)
    stream = stream_weights(model, dtype=None, bucket_bytes=1)
    next(stream)
    if dist.get_rank():
        ema.copy_to(model)
        stream.close()  # an engine that does not want more, whatever the reason
    else:
        with pytest.raises(RolloutError, match=CHANGED):
            list(stream)
    dist.barrier()


@pytest.mark.ranks(2)
def test_the_stream_after_a_change_sends_everything_again():
    strategy, model, optimizer = prepared()
    first = stream_weights(model, since="")
    list(first)
    step(strategy, model, optimizer)
    second = stream_weights(model, since=first.version, bucket_bytes=1)
    next(second)
    step(strategy, model, optimizer)
    with pytest.raises(RolloutError, match=CHANGED):
        list(second)
    third = stream_weights(model, since=second.version)
    assert third.is_full
    assert_same(dict(third), dict(stream_weights(model)))


@pytest.mark.parametrize("world", [1, 2])
def test_an_adapter_streams_the_values_of_the_call(world, run_on):
    run_on(world, check_adapter)


def check_adapter():
    from peft import LoraConfig, get_peft_model

    strategy = strategy_for()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    config = LoraConfig(r=2, target_modules=["0", "1"], init_lora_weights=False)
    model = strategy.prepare_model(get_peft_model(model, config), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    expected = {name: tensor.clone() for name, tensor in stream_adapter(model)}
    stream = stream_adapter(model)
    held = dict([next(stream)])
    strategy.backward(model(torch.ones(2, 4)).square().sum(), model, optimizer)
    strategy.optimizer_step(optimizer, model)
    held |= dict(stream)
    assert_same(held, expected)
    assert any(not torch.equal(tensor, expected[name]) for name, tensor in stream_adapter(model))
    early, merged = stream_adapter(model), stream_weights(model)
    strategy.backward(model(torch.ones(2, 4)).square().sum(), model, optimizer)
    strategy.optimizer_step(optimizer, model)
    for each in (early, merged):
        with pytest.raises(RolloutError, match=CHANGED):
            next(each)
    merged = stream_weights(model, bucket_bytes=1)
    next(merged)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "base_layer" in name:
                parameter.add_(1)
    with pytest.raises(RolloutError, match=CHANGED):
        list(merged)
