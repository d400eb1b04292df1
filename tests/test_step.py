"""Steps: one norm, accumulation and weighting as promised, skipping alike, models that never mix."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from helpers.models import batch_of, build, loss_of, tokens
from helpers.reference import CountCollectives, Unsharded, assert_close, full_grads, full_parameters, same_on_all_ranks
from helpers.worlds import some
from torch import nn
from torch.nn import functional as F

from fsdp2_strategy import FSDPV2Strategy, StepResult, StrategyConfig, build_mesh, clip_grad_norm, shard_model
from fsdp2_strategy.distributed.agreement import defer_error
from fsdp2_strategy.errors import StepError
from fsdp2_strategy.optim import accumulation_of


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
    norm, lr, loss = pytest.approx(norm, rel=1e-6), 0.1, result.loss
    assert result == StepResult(step=1, stepped=True, skipped=False, grad_norm=norm, lr=lr, loss=loss, tokens=None)
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", [{}, {"fp16": True}], ids=["fp32", "fp16"])
def test_a_loop_that_clips_itself_needs_no_second_norm_and_gets_the_same_step(precision):
    parameters, results = [], []
    for clips in (False, True):
        strategy = strategy_for(max_norm=0.0 if clips else 0.1, **precision)
        model = strategy.prepare_model(build("llama"), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=0.1, optimizer_cls=torch.optim.SGD)
        strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model, optimizer)
        with CountCollectives() as collectives:
            if clips:
                norm = strategy.clip_grad_norm(model, 0.1)
            results.append(strategy.optimizer_step(optimizer, model, None))
        assert collectives.counts == {"allreduce": 1}
        parameters.append(full_parameters(model))
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-6)
    assert norm == results[1].grad_norm
    assert_close(*parameters, 1e-6, "parameter")


@pytest.mark.ranks(2)
def test_a_norm_that_was_taken_before_more_gradients_came_is_not_used():
    strategy = strategy_for(gradient_accumulation_steps=2, accumulation="backward")
    model = strategy.prepare_model(build("llama"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    losses = [loss_of("llama", model, batch_of("llama", step, 0)) for step in range(2)]
    strategy.backward(losses[0], model, optimizer)
    first = strategy.clip_grad_norm(model)
    strategy.backward(losses[1], model, optimizer)
    expected = clip_grad_norm(model)
    assert first != pytest.approx(expected)
    assert strategy.optimizer_step(optimizer, model).grad_norm == pytest.approx(expected)


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
        shard_model(part, build_mesh(size), StrategyConfig(bf16=False), is_training=True)
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
    for wrong in (0, math.inf, math.nan):
        with pytest.raises(StepError, match=f"num_items_in_batch is {wrong}, expected"):
            strategy.backward(summed(model, batches[0][rank]), model, num_items_in_batch=wrong)


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
        with pytest.raises(StepError, match=r"the optimizer has 8 parameters not in Mlp"):
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


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("mode", "expected"), [("every", (9, 9)), ("last", (3, 3)), ("defer_all_reduce", (9, 3))])
def test_accumulation_communicates_what_its_mode_says(mode, expected):
    strategy = strategy_for(train_batch_size=12, grad_sync=mode)
    model = build("plain_transformer")
    del model.layers[2]
    model.embed.weight.requires_grad_(False)
    strategy.prepare_model(model, is_training=True, shard_size=2)
    with CountCollectives() as collectives, strategy.accumulate(3):
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


# --- loss, learning rate and tokens of a step ----------------------------------------------------------------------


def losses_of(model, sums):
    """Return losses of these values, which the parameters do not change; a value that is not finite has no gradient."""
    return [number * (1.0 + 0.0 * loss_of("mlp", model, batch_of("mlp", 0, 0))) for number in sums]


@pytest.mark.parametrize("ranks", some([1, 2, 3], [3]))
def test_a_step_reports_the_loss_and_tokens_of_the_whole_batch(ranks, run_on):
    run_on(ranks, steps_report_the_loss_and_tokens_of_the_whole_batch)


def steps_report_the_loss_and_tokens_of_the_whole_batch():
    world, rank = dist.get_world_size(), dist.get_rank()
    lengths = [[4, 9, 6], [12, 5, 7]]  # tokens of micro-batch a on rank r
    batches = [
        [tokens(torch.Generator().manual_seed(10 * a + r), 1, lengths[a][r]) for r in range(world)] for a in range(2)
    ]
    targets = [[ids.numel() - 1 for ids in row] for row in batches]
    items = sum(map(sum, targets))
    model = build("llama").double()

    def summed(ids):
        return F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    with torch.no_grad():
        sums = [[summed(ids).item() for ids in row] for row in batches]
    strategy = strategy_for(gradient_accumulation_steps=2)
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-9)
    scheduler = strategy.create_scheduler(optimizer, "linear", num_training_steps=10)

    def step(kind):
        for a in range(2):
            loss, count = summed(batches[a][rank]), targets[a][rank]
            if kind == "items":
                strategy.backward(loss, model, num_items_in_batch=items)
            elif kind == "both":  # tokens of the prompt as well
                strategy.backward(loss, model, num_items_in_batch=items, num_tokens=torch.tensor(count + 1))
            else:
                strategy.backward(loss / count, model, num_tokens=None if kind == "mean" else count)
            result = strategy.optimizer_step(optimizer, model, scheduler)
            if a == 0:
                assert (result.lr, result.loss, result.tokens) == (None, None, None)
        return result

    weighted = sum(map(sum, sums)) / items
    means = [s / n for row, counts in zip(sums, targets, strict=True) for s, n in zip(row, counts, strict=True)]
    expected = {
        "items": (weighted, items),
        "both": (weighted, items + 2 * world),
        "tokens": (sum(means) / len(means), items),
        "mean": (sum(means) / len(means), None),
    }
    for number, (kind, (loss, count)) in enumerate(expected.items()):
        result = step(kind)
        assert result.loss == pytest.approx(loss, rel=1e-7) and result.tokens == count, kind
        assert result.lr == pytest.approx(1e-9 * (10 - number) / 10)
        assert same_on_all_ranks(result)


@pytest.mark.ranks(2)
def test_loss_and_tokens_travel_with_the_gradient_norm():
    strategy = strategy_for(max_norm=0.1, gradient_accumulation_steps=2)
    model = strategy.prepare_model(build("llama"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    counts = []
    for num_tokens in (None, 5, torch.tensor(5)):
        with CountCollectives() as collectives, strategy.accumulate(2):
            for i in range(2):
                strategy.backward(loss_of("llama", model, batch_of("llama", i, 0)), model, num_tokens=num_tokens)
        counts.append(collectives.counts["allreduce"])
        with CountCollectives() as collectives:
            result = strategy.optimizer_step(optimizer, model, None)
        assert collectives.counts == {"allreduce": 1}
        assert result.tokens == (None if num_tokens is None else 20)
    assert counts == [0, 0, 0]


@pytest.mark.ranks(2)
def test_a_skipped_step_reports_its_loss_and_the_next_one_only_its_own():
    strategy = strategy_for(gradient_accumulation_steps=2)
    model = strategy.prepare_model(build("mlp"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.25)

    def step(*numbers):
        for loss in losses_of(model, numbers):
            strategy.backward(loss * (1.0 + dist.get_rank()), model, num_tokens=3)
            result = strategy.optimizer_step(optimizer, model, None)
        return result

    assert step(1.0, 2.0).loss == 2.25
    result = step(math.inf, 2.0)
    assert (result.skipped, result.loss, result.lr, result.tokens) == (True, math.inf, 0.25, 12)
    result = step(2.0, math.nan)
    assert result.skipped and math.isnan(result.loss)
    assert (step(3.0, 5.0).loss, step(1.0, 1.0).tokens) == (6.0, 12)


@pytest.mark.ranks(2)
def test_the_reported_loss_is_without_the_loss_scale():
    strategy = strategy_for(fp16=True)
    model = strategy.prepare_model(build("mlp"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    strategy.backward(losses_of(model, [1.5 + dist.get_rank()])[0].float(), model)
    assert strategy._state_of(model).accumulation.scale.value == 2**16
    assert strategy.optimizer_step(optimizer, model).loss == 2.0


@pytest.mark.ranks(2)
def test_an_accumulation_that_is_interrupted_leaves_nothing_in_the_next_step(tmp_path):
    strategy = strategy_for(gradient_accumulation_steps=2)
    model = strategy.prepare_model(build("mlp"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.25)

    def micro_step(number):
        strategy.backward(losses_of(model, [number])[0], model, num_tokens=3)
        return strategy.optimizer_step(optimizer, model)

    def step():
        micro_step(1.0)
        return micro_step(2.0)

    step()
    path = [str(tmp_path)]
    dist.broadcast_object_list(path)
    strategy.save_ckpt(model, path[0])
    micro_step(8.0)
    strategy.load_ckpt(model, path[0])
    assert (step().loss, step().tokens) == (1.5, 12)
    micro_step(8.0)
    accumulation_of(model).micro_batches = 0
    assert (step().loss, step().tokens) == (1.5, 12)
    micro_step(8.0)
    with pytest.raises(RuntimeError, match="fails"):
        loss = losses_of(model, [16.0])[0]
        loss.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("fails")))
        strategy.backward(loss, model, num_tokens=3)
    assert micro_step(2.0).loss == 5.0  # the failed backward pass does not count


@pytest.mark.ranks(2)
def test_tokens_that_only_some_ranks_count_are_unknown():
    strategy = strategy_for(gradient_accumulation_steps=2)
    model = strategy.prepare_model(build("mlp"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.25)

    def step(*arguments):
        for loss, given in zip(losses_of(model, [1.0, 1.0]), arguments, strict=True):
            strategy.backward(loss, model, **given)
            result = strategy.optimizer_step(optimizer, model)
        return result

    is_first = dist.get_rank() == 0
    assert step({"num_tokens": 3}, {"num_tokens": 4} if is_first else {}).tokens == 10
    assert step({"num_tokens": 3} if is_first else {}, {}).tokens is None
    result = step({"num_items_in_batch": 4}, {})
    assert (result.loss, result.tokens) == (1.0, 4)  # 1 x 2 ranks / 4, and 1 / 2 micro-batches
    count = torch.tensor(3)
    for loss in losses_of(model, [1.0, 1.0]):
        strategy.backward(loss, model, num_tokens=count)
        count.fill_(4)  # a counter that the caller uses again
        result = strategy.optimizer_step(optimizer, model)
    assert result.tokens == 14
    [loss] = losses_of(model, [1.0])
    for wrong, shown in ((-1, "-1"), (2.0, "2.0"), (torch.ones(2), r"a tensor of the shape \[2\]")):
        with pytest.raises(StepError, match=f"num_tokens is {shown}, expected"):
            strategy.backward(loss, model, num_tokens=wrong)


@pytest.mark.ranks(2)
def test_an_error_that_one_rank_defers_is_raised_on_all_in_the_next_step():
    strategy = strategy_for()
    model = strategy.prepare_model(build("mlp"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.25)
    before = full_parameters(model)
    strategy.backward(loss_of("mlp", model, batch_of("mlp", 0, 0)), model)
    if dist.get_rank() == 1:
        defer_error(StepError("cannot count: 3 is 4"))
    with pytest.raises(StepError, match="cannot take an optimizer step: failed on rank 1: cannot count: 3 is 4"):
        strategy.optimizer_step(optimizer, model)
    after = full_parameters(model)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert strategy.optimizer_step(optimizer, model).step == 1  # the gradients are still there
