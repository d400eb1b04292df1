"""Runs of a few steps, and all that they leave behind: what resumes are compared with."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, list_checkpoints
from fsdp2_strategy.checkpoint.training_state import optimizer_tensors
from fsdp2_strategy.model.names import named_parameters
from helpers.models import batch_of, build, loss_of
from helpers.reference import full_tensors


def strategy_for(**config):
    return FSDPV2Strategy(config=StrategyConfig(**{"bf16": False, "max_norm": 1.0, **config}))


def prepared(strategy, name="llama", seed=0, shard_size=-1, lr=1e-2):
    model = strategy.prepare_model(build(name, seed), is_training=True, shard_size=shard_size)
    optimizer = strategy.create_optimizer(model, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = strategy.create_scheduler(optimizer, "cosine", num_training_steps=20, num_warmup_steps=2)
    return model, optimizer, scheduler


def take_steps(strategy, model, optimizer, losses, scheduler=None):
    """Take a step on each of this rank's losses, computed one after the other; return them with the results."""
    results = []
    for loss in losses:
        strategy.backward(loss, model, optimizer)
        results.append((loss.item(), strategy.optimizer_step(optimizer, model, scheduler)))
    return results


def train(strategy, model, optimizer, scheduler, steps, name="llama"):
    """Train on this rank's batches of some steps; return each loss, result and learning rate."""
    results = []
    for step in steps:
        loss = loss_of(name, model, batch_of(name, step, dist.get_rank()))
        [result] = take_steps(strategy, model, optimizer, [loss], scheduler)
        results.append((*result, optimizer.param_groups[0]["lr"]))
    return results


def full_state(model, optimizer):
    """Gather parameters and optimizer state; collective."""
    return full_tensors({**named_parameters(model), **optimizer_tensors(model, optimizer)})


def assert_same(actual, expected):
    """Compare tensors by name, to the bit."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    assert not [n for n in expected if not torch.equal(actual[n], expected[n])]


def tags(folder):
    """Return the tags of the checkpoints in a folder, the oldest first."""
    return [checkpoint.tag for checkpoint in list_checkpoints(folder)]
