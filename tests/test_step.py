"""Steps: one norm, accumulation and weighting as promised, skipping alike, models that never mix."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from helpers.models import batch_of, build, loss_of, tokens
from helpers.reference import CountCollectives, Unsharded, assert_close, full_grads, full_parameters, same_on_all_ranks
from torch import nn
from torch.nn import functional as F

from fsdp2_strategy import (
    FSDPV2Strategy,
    StepError,
    StepResult,
    StrategyConfig,
    build_mesh,
    clip_grad_norm,
    shard_model,
)


def strategy_for(**config):
    return FSDPV2Strategy(config=StrategyConfig(**{"bf16": False, **config}))


@pytest.mark.ranks(2)
def test_a_norm_of_zero_clips_nothing_and_is_still_reported():
    strategy = strategy_for(max_norm=0.0)
    model = strategy.prepare_model(build("llama"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1, optimizer_cls=torch.optim.SGD)
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, 0)), model, optimizer)
    grads, before = full_grads(model), full_parameters(model)
    result = strategy.optimizer_step(optimizer, model, None)
    norm = math.sqrt(sum(g.double().square().sum().item() for g in grads.values()))
    assert result == StepResult(step=1, stepped=True, skipped=False, grad_norm=pytest.approx(norm, rel=1e-6))
    after = full_parameters(model)
    assert_close(after, {n: before[n] - 0.1 * grads[n] for n in before}, 1e-6, "parameter")


@pytest.mark.ranks(2)
def test_the_whole_step_synchronises_the_ranks_with_one_all_reduce():
    strategy = strategy_for(max_norm=0.1)
    model = strategy.prepare_model(build("llama"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, 0)), model, optimizer)
    with CountCollectives() as collectives:
        strategy.optimizer_step(optimizer, model, None)
    assert collectives.counts == {"allreduce": 1}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_on_one_rank_skips_the_step_on_all(value):
    strategy = strategy_for(max_norm=1.0)
    model = strategy.prepare_model(build("llama"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    scheduler = strategy.create_scheduler(optimizer, "linear", num_training_steps=10)
    loss = loss_of("llama", model, batch_of("llama", 0, 0))
    strategy.backward(loss * (value if dist.get_rank() == 1 else 1.0), model, optimizer)
    before = full_parameters(model)
    result = strategy.optimizer_step(optimizer, model, scheduler)
    assert (result.step, result.stepped, result.skipped) == (0, False, True)
    assert not math.isfinite(result.grad_norm)
    after = full_parameters(model)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert scheduler.last_epoch == 0
    assert all(p.grad is None for p in model.parameters())
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, 0)), model, optimizer)
    assert strategy.optimizer_step(optimizer, model, scheduler).stepped


@pytest.mark.ranks(4)
def test_one_norm_spans_meshes_dtypes_and_plain_tensors():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.sharded, self.hybrid, self.replicated, self.plain = (nn.Linear(6, 5) for _ in range(4))
            self.hybrid.double()

    model = Parts()
    for part, size in ((model.sharded, -1), (model.hybrid, 2), (model.replicated, 1)):
        shard_model(part, build_mesh(size), is_training=True, bf16=False)
    total = 0.0
    for i, parameter in enumerate(model.parameters()):
        full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)).to(parameter.dtype)
        if hasattr(parameter, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            parameter.grad = distribute_tensor(full, parameter.device_mesh, parameter.placements)
        else:
            parameter.grad = full.clone()
        total += full.double().square().sum().item()
    norm = clip_grad_norm(model, 1.0)
    assert norm == pytest.approx(math.sqrt(total), rel=1e-7)
    assert same_on_all_ranks(norm)
    assert clip_grad_norm(model.parameters()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.ranks(3)
def test_num_items_weighs_unequal_micro_batches_by_their_items():
    """The gradient is that of (sum over ranks and micro-batches) / N, whoever holds how many items."""
    world, rank = dist.get_world_size(), dist.get_rank()
    lengths = [[4, 9, 6], [12, 5, 7]]  # tokens of micro-batch a on rank r
    batches = [
        [tokens(torch.Generator().manual_seed(10 * a + r), 1, lengths[a][r]) for r in range(3)] for a in range(2)
    ]
    items = sum(n - 1 for row in lengths for n in row)
    model = build("llama").double()

    def summed(m, ids):
        return F.cross_entropy(m(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    reference = Unsharded(model, summed, lr=0.01)
    reference.step([b for row in batches for b in row], scale=world / items)
    strategy = strategy_for(train_batch_size=2 * world)
    strategy.prepare_model(model, is_training=True)
    for a in range(2):
        total = items if a else torch.tensor(items)  # a tensor will do as well
        strategy.backward(summed(model, batches[a][rank]), model, num_items_in_batch=total)
    assert_close(full_grads(model), reference.grads, 1e-6, "gradient")
    with pytest.raises(StepError, match="num_items_in_batch is 0"):
        strategy.backward(summed(model, batches[0][rank]), model, num_items_in_batch=0)


@pytest.mark.ranks(2)
def test_models_that_take_turns_never_see_each_others_state():
    def run(interleaved):
        strategy = strategy_for(max_norm=0.5, train_batch_size=4)
        pair = []
        for name, lr in (("llama", 1e-2), ("mlp", 1e-1)):
            model = strategy.prepare_model(build(name), is_training=True)
            optimizer = strategy.create_optimizer(model, lr=lr)
            pair.append((name, model, optimizer, strategy.create_scheduler(optimizer, "linear", num_training_steps=9)))

        def micro_step(name, model, optimizer, scheduler, i):
            strategy.backward(loss_of(name, model, batch_of(name, i, dist.get_rank())), model, optimizer)
            return strategy.optimizer_step(optimizer, model, scheduler, name=name)

        order = (
            [(i, part) for i in range(6) for part in pair] if interleaved else [(i, p) for p in pair for i in range(6)]
        )
        results = {name: [] for name, *_ in pair}
        for i, part in order:
            results[part[0]].append(micro_step(*part, i))
        return results, [full_parameters(model) for _, model, *_ in pair]

    together, parameters_together = run(interleaved=True)
    apart, parameters_apart = run(interleaved=False)
    assert together == apart
    for one, other in zip(parameters_together, parameters_apart, strict=True):
        assert all(torch.equal(one[n], other[n]) for n in one)
    assert [r.stepped for r in together["llama"]] == [False, True] * 3
    assert [r.grad_norm is None for r in together["mlp"]] == [True, False] * 3


@pytest.mark.ranks(1)
def test_the_step_takes_a_name_and_no_scheduler():
    strategy = strategy_for()
    model = strategy.prepare_model(build("mlp"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    with pytest.raises(StepError, match=r"no backward pass since its last step"):
        strategy.optimizer_step(optimizer, model, None)
    strategy.backward(loss_of("mlp", model, batch_of("mlp", 0, 0)), model, optimizer)
    assert strategy.optimizer_step(optimizer, model, None, "actor").stepped
    with pytest.raises(StepError, match=r"it is a AdamW, expected the nn.Module"):
        strategy.optimizer_step(model, optimizer, None)


@pytest.mark.ranks(2)
def test_an_optimizer_that_does_not_step_this_model_is_refused():
    strategy = strategy_for()
    model = build("mlp")
    early = strategy.create_optimizer(model, lr=0.1)
    strategy.prepare_model(model, is_training=True)
    other = strategy.prepare_model(build("mlp"), is_training=True)
    for optimizer in (early, strategy.create_optimizer(other, lr=0.1)):
        strategy.backward(loss_of("mlp", model, batch_of("mlp", 0, 0)), model, optimizer)
        with pytest.raises(StepError, match=r"the optimizer has 8 parameters that are not in Mlp"):
            strategy.optimizer_step(optimizer, model, None)
    with pytest.raises(StepError, match=r"cannot step 'critic': no backward pass"):
        strategy.optimizer_step(strategy._state_of(other).optimizer, other, None, "critic")


@pytest.mark.ranks(2)
def test_a_scalar_that_is_trained_later_gets_the_average_gradient():
    strategy = strategy_for()
    model = build("recurrent")
    model.temperature.requires_grad_(False)
    strategy.prepare_model(model, is_training=True)
    model.temperature.requires_grad_(True)
    strategy.backward(loss_of("recurrent", model, batch_of("recurrent", 0, dist.get_rank())), model)
    assert same_on_all_ranks(model.temperature.grad.item())


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("mode", "expected"), [("every", (9, 9)), ("last", (3, 3)), ("defer_all_reduce", (9, 3))])
def test_accumulation_communicates_what_its_mode_says(mode, expected):
    strategy = strategy_for(train_batch_size=12, grad_sync=mode)
    model = build("plain_transformer")
    del model.layers[2]
    model.embed.weight.requires_grad_(False)
    strategy.prepare_model(model, is_training=True, shard_size=2)
    with CountCollectives() as collectives:
        for i in range(3):
            strategy.backward(loss_of("plain_transformer", model, batch_of("plain_transformer", i, 0)), model)
    assert (collectives.counts["reduce_scatter_base"], collectives.counts["allreduce"]) == expected


@pytest.mark.ranks(1)
def test_a_model_that_is_gone_is_forgotten():
    strategy = strategy_for()
    model = strategy.prepare_model(build("mlp"), is_training=True)
    strategy.create_optimizer(model, lr=0.1)
    assert len(strategy._states) == 1
    import gc

    del model
    gc.collect()
    assert len(strategy._states) == 0
