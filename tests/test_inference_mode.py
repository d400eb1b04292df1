"""Passes in ``torch.inference_mode()``, before, between and after passes that train: values, generation, policies."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from helpers.models import batch_of, build, loss_of
from helpers.reference import Unsharded, assert_close, full_grads, full_parameters
from helpers.worlds import matrix, some, worlds

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, stream_weights, token_log_probs
from fsdp2_strategy.distributed.torch_internals import parameters_of, unsharded_of
from fsdp2_strategy.model import offload, reload
from fsdp2_strategy.model.fsdp_state import parameter_groups

MODELS = ("llama_tied", "gemma3", "t5", "qwen2_vl", "unet", "shared_blocks")
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


def doubled(name, step, rank):
    """Make a batch whose images are float64, as the models are."""
    return {k: v.double() if v.is_floating_point() else v for k, v in batch_of(name, step, rank).items()}


def prepared(name, **config):
    """Return a strategy, a sharded model in float64 and its optimizer, and the unsharded reference."""
    strategy = FSDPV2Strategy(config=StrategyConfig(**{"bf16": False, "max_norm": 0.0, **config}))
    model = build(name).double()
    reference = Unsharded(model, lambda m, batch: loss_of(name, m, batch), **OPTIONS)
    strategy.prepare_model(model, is_training=True)
    return strategy, model, strategy.create_optimizer(model, **OPTIONS), reference


def train(name, strategy, model, optimizer, reference, step):
    """Train one step like the reference, and compare losses, gradients and parameters."""
    count = dist.get_world_size()
    losses, norm = reference.step([doubled(name, step, rank) for rank in range(count)])
    loss = loss_of(name, model, doubled(name, step, dist.get_rank()))
    strategy.backward(loss, model)
    assert loss.item() == pytest.approx(losses[dist.get_rank()], rel=1e-6)  # transformers computes some losses in fp32
    assert_close(full_grads(model), reference.grads, 1e-10, "gradient")
    assert strategy.optimizer_step(optimizer, model).grad_norm == pytest.approx(norm, rel=1e-8)


def evaluated(name, model):
    with torch.inference_mode():
        return loss_of(name, model, doubled(name, 0, 0)).item()


@pytest.mark.parametrize(("world", "name"), matrix((1, 2, 3), MODELS, usual=("llama_tied", "unet")))
def test_passes_in_inference_mode_before_and_between_steps_change_nothing(world, name):
    strategy, model, optimizer, reference = prepared(name)
    expected = loss_of(name, reference.model, doubled(name, 0, 0)).item()
    assert evaluated(name, model) == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():
        assert loss_of(name, model, doubled(name, 0, 0)).item() == pytest.approx(expected, rel=1e-6)
    for step in range(3):
        train(name, strategy, model, optimizer, reference, step)
        expected = loss_of(name, reference.model, doubled(name, 0, 0)).item()
        assert evaluated(name, model) == pytest.approx(expected, rel=1e-6)
    assert_close(full_parameters(model), dict(reference.model.named_parameters()), 1e-7, "parameter")


LAYOUTS = {
    "replicas": {"shard_size": 1},
    "both": {"shard_size": 2},
    "groups": {"reshard_after_forward": 2},
    "gathered": {"reshard_after_forward": False},
    "ahead": {"prefetch_depth": 1},
    "accumulation": {"grad_sync": "last"},
    "recomputed": {"activation_checkpointing": True},
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", some(LAYOUTS, ["both", "groups"]))
def test_each_layout_of_ranks_trains_after_inference_mode(layout):
    strategy, model, optimizer, reference = prepared("llama", **LAYOUTS[layout])
    evaluated("llama", model)
    for step in range(2):
        train("llama", strategy, model, optimizer, reference, step)
        evaluated("llama", model)
    assert not any(
        unsharded_of(parameter).is_inference()
        for group in parameter_groups(model)
        for parameter in parameters_of(group)
    )


@pytest.mark.parametrize("world", worlds(1, 2, 3, usual=(1, 2, 3)))
def test_generation_in_inference_mode_equals_the_unsharded_model_and_training_goes_on(world):
    strategy, model, optimizer, reference = prepared("llama")
    ids = doubled("llama", 0, dist.get_rank())["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for step in range(2):
        with torch.inference_mode():
            assert torch.equal(model.generate(ids, **options), reference.model.generate(ids, **options))
            found = token_log_probs(model, ids)
        torch.testing.assert_close(found, token_log_probs(reference.model, ids), rtol=1e-10, atol=1e-10)
        train("llama", strategy, model, optimizer, reference, step)


@pytest.mark.ranks(2)
def test_an_offloaded_model_that_is_reloaded_in_inference_mode_trains():
    strategy, model, optimizer, reference = prepared("llama")
    train("llama", strategy, model, optimizer, reference, 0)
    offload(model)
    offload(optimizer)
    with torch.inference_mode():
        reload(model)
        reload(optimizer)
    evaluated("llama", model)
    train("llama", strategy, model, optimizer, reference, 1)


@pytest.mark.ranks(2)
def test_a_stream_of_weights_in_inference_mode_leaves_a_model_that_trains():
    strategy, model, optimizer, reference = prepared("llama")
    before = copy.deepcopy(reference.model.state_dict())
    with torch.inference_mode():
        streamed = dict(stream_weights(model, dtype=torch.float64))
    for name, tensor in streamed.items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    for step in range(2):
        train("llama", strategy, model, optimizer, reference, step)
