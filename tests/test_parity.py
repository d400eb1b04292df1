"""Sharded training has the numbers of the unsharded model, on 1, 2, 3 and 4 ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.models import batch_of, build, loss_of
from helpers.reference import (
    Unsharded,
    assert_close,
    assert_parameters_close,
    full_grads,
    full_parameters,
    same_on_all_ranks,
)
from helpers.worlds import matrix, some, worlds

from fsdp2_strategy import FSDPV2Strategy
from fsdp2_strategy.errors import ShardError

WORLDS = (1, 2, 3, 4)
STEPS = 3
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


def train_beside_reference(
    name, *, dtype, shard_size=-1, accumulation=1, max_norm=0.0, tolerances, reshard_after_forward=True, **config
):
    """Train sharded and unsharded side by side and compare loss, gradients, norm and parameters at every step."""
    gradient_tolerance, parameter_tolerance = tolerances
    world, rank = dist.get_world_size(), dist.get_rank()
    model = build(name).to(dtype)

    def loss(m, batch):
        return loss_of(name, m, {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()})

    unsharded = Unsharded(model, loss, max_norm=max_norm, **OPTIONS)
    from fsdp2_strategy import StrategyConfig

    settings = StrategyConfig(bf16=False, train_batch_size=world * accumulation, max_norm=max_norm, **config)
    strategy = FSDPV2Strategy(config=settings)
    strategy.prepare_model(model, is_training=True, shard_size=shard_size, reshard_after_forward=reshard_after_forward)
    optimizer = strategy.create_optimizer(model, **OPTIONS)
    for step in range(STEPS):
        micro = [[batch_of(name, step * accumulation + a, r) for r in range(world)] for a in range(accumulation)]
        expected_losses, expected_norm = unsharded.step([b for row in micro for b in row], scale=1 / accumulation)
        for a in range(accumulation):
            value = loss(model, micro[a][rank])
            assert value.item() == pytest.approx(expected_losses[a * world + rank], rel=gradient_tolerance)
            strategy.backward(value, model, optimizer)
            grads = full_grads(model) if a == accumulation - 1 else None
            result = strategy.optimizer_step(optimizer, model, None)
            assert result.stepped == (a == accumulation - 1)
            assert (result.grad_norm is None) == (not result.stepped)
        assert_close(grads, unsharded.grads, gradient_tolerance, "gradient")
        assert result.grad_norm == pytest.approx(expected_norm, rel=gradient_tolerance)
        assert same_on_all_ranks(result.grad_norm)
        assert_parameters_close(full_parameters(model), full_parameters(unsharded.model), parameter_tolerance)
    assert result.step == STEPS


NAMES = ("llama", "llama_tied", "mlp", "recurrent", "shared_blocks", "unet")


@pytest.mark.parametrize(("world", "name"), matrix(WORLDS, NAMES, everywhere=("llama_tied",)))
def test_float64_training_equals_the_unsharded_model(world, name):
    train_beside_reference(name, dtype=torch.float64, max_norm=0.5, tolerances=(1e-10, 1e-10))


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        pytest.param("llama", [r"model\.layers\.0\.mlp", r".*_layernorm"], marks=pytest.mark.full),
        ("llama_tied", [r"model\.embed_tokens", "lm_head"]),
        pytest.param("shared_blocks", [r"blocks\..*\.inner"], marks=pytest.mark.full),
        pytest.param("unet", ["down1", "middle"], marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("world", worlds(*WORLDS))
def test_what_is_ignored_trains_as_if_it_were_sharded(world, name, ignored):
    train_beside_reference(
        name, dtype=torch.float64, accumulation=2, max_norm=0.5, ignored_modules=ignored, tolerances=(1e-10, 1e-10)
    )


@pytest.mark.full
@pytest.mark.ranks(4)
@pytest.mark.parametrize("mode", some(["defer_all_reduce", "last", "every"], ["defer_all_reduce"]))
def test_what_is_ignored_is_accumulated_in_every_mode(mode):
    train_beside_reference(
        "llama",
        dtype=torch.float64,
        shard_size=2,
        accumulation=3,
        max_norm=0.5,
        grad_sync=mode,
        ignored_modules=[r"model\.layers\.1"],
        tolerances=(1e-10, 1e-10),
    )


@pytest.mark.parametrize(("world", "name"), matrix(WORLDS, ["mixtral", "bert", "t5"], usual=["mixtral"]))
def test_float32_training_equals_the_unsharded_model(world, name):
    train_beside_reference(name, dtype=torch.float32, max_norm=0.5, tolerances=(1e-5, 2e-4))


@pytest.mark.parametrize("name", some(["llama_tied", "recurrent"], ["llama_tied"]))
@pytest.mark.parametrize("mode", some(["defer_all_reduce", "last", "every"], ["defer_all_reduce"]))
@pytest.mark.parametrize(
    ("world", "shard_size"),
    [
        pytest.param(4, 2, marks=pytest.mark.ranks(4), id="hsdp2x2"),
        pytest.param(4, 1, marks=[pytest.mark.ranks(4), pytest.mark.full], id="replicated4"),
        pytest.param(2, -1, marks=pytest.mark.ranks(2), id="fsdp2"),
    ],
)
def test_accumulation_equals_one_large_batch_in_every_mode(world, shard_size, mode, name):
    train_beside_reference(
        name,
        dtype=torch.float64,
        shard_size=shard_size,
        accumulation=3,
        max_norm=0.5,
        grad_sync=mode,
        tolerances=(1e-10, 1e-10),
    )


@pytest.mark.full
@pytest.mark.ranks(4)
@pytest.mark.parametrize("reshard", some([False, 2, 1, 4], [2]))
def test_reshard_after_forward_changes_no_number(reshard):
    train_beside_reference("llama", dtype=torch.float64, reshard_after_forward=reshard, tolerances=(1e-10, 1e-10))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"prefetch_depth": 2}, marks=pytest.mark.full),
        {"prefetch_depth": 1},
        {"activation_checkpointing": ["LlamaDecoderLayer"]},
        {"cpu_offload": True},
        pytest.param({"compile_blocks": "aot_eager"}, marks=pytest.mark.full),
        pytest.param(
            {"compile_blocks": "aot_eager", "activation_checkpointing": ["LlamaDecoderLayer"]}, marks=pytest.mark.full
        ),
        pytest.param({"block_class_names": ["LlamaMLP", "LlamaAttention"]}, marks=pytest.mark.full),
        {"min_unit_params": 3000, "activation_checkpointing": True},
        {"ignored_modules": [".*mlp"], "activation_checkpointing": True, "cpu_offload": True},
    ],
    ids=str,
)
def test_how_a_model_is_sharded_changes_no_number(config):
    train_beside_reference("llama", dtype=torch.float64, max_norm=0.5, tolerances=(1e-10, 1e-10), **config)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_compiled_blocks_train_with_the_default_backend():
    train_beside_reference("llama", dtype=torch.float32, compile_blocks=True, tolerances=(1e-5, 2e-4))


@pytest.mark.ranks(4)
def test_reshard_to_a_group_that_does_not_divide_the_shards_is_refused():
    strategy = FSDPV2Strategy(bf16=False)
    with pytest.raises(ShardError, match=r"reshard_after_forward is 3, expected .* divisor of the shard size 4"):
        strategy.prepare_model(build("llama"), is_training=True, reshard_after_forward=3)
