"""What a micro-batch is: each form of a training loop takes the steps that it means, or is told how to say it."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from helpers.models import batch_of, build, loss_of, tokens
from helpers.reference import Unsharded, assert_close, full_parameters
from helpers.worlds import some
from torch.nn import functional as F

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.errors import StepError

# Each form of a loop: how many calls of backward come before each call of optimizer_step, and what is declared.
FORMS = {
    "each": ([1, 1, 1, 1], None),
    "two losses, or a loop": ([2, 2, 2, 2], None),
    "three losses": ([3, 3, 3, 3], None),
    "one loss, then two": ([1, 2, 1, 2], None),
    "declared loop": ([3, 3], 3),
    "declared each": ([1, 1, 1, 1, 1, 1], 3),
    "declared losses": ([2, 2, 2], 3),
}
# For two micro-batches in a step: how many losses each step sums, and what it divides them by; or the error.
BY_TWO, BY_THREE = ([2, 2], 2), ([3, 3], 3)
MEANT = {
    ("auto", "each"): BY_TWO,
    ("auto", "two losses, or a loop"): "these may be 2 micro-batches, or 2 losses of one",
    ("auto", "three losses"): ([6, 6], 2),
    ("auto", "one loss, then two"): ([3, 3], 2),
    ("auto", "declared loop"): BY_THREE,
    ("auto", "declared each"): BY_THREE,
    ("auto", "declared losses"): "all 3 micro-batches that accumulate declared were run",
    ("optimizer_step", "each"): BY_TWO,
    ("optimizer_step", "two losses, or a loop"): ([4, 4], 2),
    ("optimizer_step", "three losses"): ([6, 6], 2),
    ("optimizer_step", "one loss, then two"): ([3, 3], 2),
    ("optimizer_step", "declared loop"): "has not run all 3 micro-batches at the end of the block",
    ("optimizer_step", "declared each"): BY_THREE,
    ("optimizer_step", "declared losses"): ([6], 3),
    ("backward", "each"): BY_TWO,
    ("backward", "two losses, or a loop"): ([2, 2, 2, 2], 2),
    ("backward", "three losses"): ([6, 6], 2),
    ("backward", "one loss, then two"): ([4, 2], 2),
    ("backward", "declared loop"): BY_THREE,
    ("backward", "declared each"): BY_THREE,
    ("backward", "declared losses"): "all 3 micro-batches that accumulate declared were run",
    ("caller", "each"): ([1, 1, 1, 1], 1),
    ("caller", "two losses, or a loop"): ([2, 2, 2, 2], 1),
    ("caller", "three losses"): ([3, 3, 3, 3], 1),
    ("caller", "one loss, then two"): ([1, 2, 1, 2], 1),
    ("caller", "declared loop"): BY_THREE,
    ("caller", "declared each"): BY_THREE,
    ("caller", "declared losses"): "all 3 micro-batches that accumulate declared were run",
}


def strategy_for(**config):
    return FSDPV2Strategy(config=StrategyConfig(**{"bf16": False, **config}))


def loss_fn(model, batch):
    return loss_of("mlp", model, batch)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduction", some(["mean", "sum"], ["mean"]))
@pytest.mark.parametrize("grad_sync", some(["defer_all_reduce", "last", "every"], ["defer_all_reduce"]))
@pytest.mark.parametrize(("rule", "form"), MEANT)
def test_each_rule_takes_the_steps_that_each_form_of_a_loop_means(rule, form, grad_sync, reduction):
    settings = {"accumulation": rule, "grad_sync": grad_sync, "loss_reduction": reduction}
    strategy = strategy_for(gradient_accumulation_steps=2, max_norm=0.5, **settings)
    model = build("mlp")
    reference = Unsharded(model, loss_fn, max_norm=0.5, lr=0.1, optimizer_cls=torch.optim.SGD)
    strategy.prepare_model(model, is_training=True, shard_size=1 if grad_sync == "defer_all_reduce" else -1)
    optimizer = strategy.create_optimizer(model, lr=0.1, optimizer_cls=torch.optim.SGD)
    meant, (calls, declared) = MEANT[rule, form], FORMS[form]
    used, results = 0, []
    expectation = pytest.raises(StepError, match=meant) if isinstance(meant, str) else contextlib.nullcontext()
    with expectation, strategy.accumulate(declared) if declared else contextlib.nullcontext():
        for count in calls:
            for _ in range(count):
                strategy.backward(loss_fn(model, batch_of("mlp", used, dist.get_rank())), model, optimizer)
                used += 1
            results.append(strategy.optimizer_step(optimizer, model))
    if isinstance(meant, str):
        assert strategy.global_step(model) == 0
        assert not declared or all(p.grad is None for p in model.parameters())  # the step is abandoned
        strategy.close()
        return
    sizes, divisor = meant
    first, steps = 0, [result for result in results if result.stepped]
    assert [result.step for result in steps] == list(range(1, len(sizes) + 1))
    for size, result in zip(sizes, steps, strict=True):
        batches = [batch_of("mlp", i, rank) for i in range(first, first + size) for rank in (0, 1)]
        scale = 1 / divisor if reduction == "mean" else 1.0
        losses, norm = reference.step(batches, scale=scale)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert result.loss == pytest.approx(sum(losses) * scale / 2, rel=1e-5)
        first += size
    assert_close(full_parameters(model), full_parameters(reference.model), 1e-5, "parameter")
    strategy.close()


def summed(model, ids):
    return F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(3)
@pytest.mark.parametrize("config", [{}, {"bf16": True}, {"fp16": True}, {"grad_sync": "last"}])
def test_items_that_are_known_at_the_end_of_a_step_only_weigh_all_tokens_alike(config):
    """Micro-batches of varying lengths and numbers: the gradient is that of the mean over all tokens of the step."""
    lengths = [[4, 9, 6], [12, 5, 7], [3, 3, 8]]  # tokens of micro-batch a on rank r
    batches = [
        [tokens(torch.Generator().manual_seed(10 * a + r), 1, n) for r, n in enumerate(row)]
        for a, row in enumerate(lengths)
    ]
    items = sum(n - 1 for row in lengths for n in row)
    results = []
    for known in (True, False):
        strategy = strategy_for(max_norm=0.1, **config)
        model = strategy.prepare_model(build("llama"), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=0.1, optimizer_cls=torch.optim.SGD)
        result = None
        while result is None or result.skipped:  # in float16, until the loss scale fits to sums
            with strategy.accumulate(3):
                for row in batches:
                    ids = row[dist.get_rank()]
                    own = torch.tensor(ids.numel() - 1)
                    given = {"num_items_in_batch": items} if known else {"num_items": own}
                    strategy.backward(summed(model, ids), model, optimizer, **given)
                    own.zero_()  # the caller may reuse it
            result = strategy.optimizer_step(optimizer, model)
        results.append((result, full_parameters(model)))
        strategy.close()
    (expected, parameters), (result, own_parameters) = results
    precision = 0.02 if config.keys() & {"bf16", "fp16"} else 1e-5
    assert (result.tokens, expected.tokens) == (items, items)
    assert result.loss == pytest.approx(expected.loss, rel=precision)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=precision)
    assert_close(own_parameters, parameters, precision, "parameter")


@pytest.mark.ranks(2)
def test_numbers_of_items_that_cannot_be_meant_are_errors_on_every_rank():
    strategy = strategy_for(gradient_accumulation_steps=2)
    model = strategy.prepare_model(build("mlp"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)

    def backward(**given):
        strategy.backward(loss_fn(model, batch_of("mlp", 0, 0)), model, optimizer, **given)

    with pytest.raises(StepError, match="num_items_in_batch and num_items were passed"):
        backward(num_items=1, num_items_in_batch=2)
    for wrong in (-1, 0.5, "3", torch.ones(2)):
        with pytest.raises(StepError, match="cannot count the tokens: num_items is"):
            backward(num_items=wrong)
    backward(num_items=3)
    strategy.optimizer_step(optimizer, model)
    with pytest.raises(StepError, match="the gradients are not divided by the number of items yet"):
        strategy.clip_grad_norm(model)
    with pytest.raises(StepError, match="num_items was passed in some backward passes of this step"):
        backward()
    backward(num_items=0)
    assert strategy.optimizer_step(optimizer, model).stepped
    for ranks, given in ((2, {"num_items": 0}), (1, {} if dist.get_rank() else {"num_items": 4})):
        strategy = strategy_for()
        model = strategy.prepare_model(build("mlp"), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=0.1)
        backward(**given)
        with pytest.raises(StepError, match=f"num_items was passed on {ranks} of 2 ranks, and its sum is "):
            strategy.optimizer_step(optimizer, model)
    strategy.close()


@pytest.mark.ranks(2)
def test_a_block_of_accumulate_is_for_all_models_and_for_steps_of_any_size():
    strategy = strategy_for(gradient_accumulation_steps=4)
    models = [strategy.prepare_model(build("mlp", seed), is_training=True) for seed in (0, 1)]
    optimizers = [strategy.create_optimizer(model, lr=0.1) for model in models]
    taken = []
    for size in (1, 3, 2):
        with strategy.accumulate(size):
            for i in range(size):
                for model, optimizer in zip(models, optimizers, strict=True):  # the actor, then the critic
                    strategy.backward(loss_fn(model, batch_of("mlp", i, 0)), model, optimizer)
            taken.append([strategy.optimizer_step(o, m).stepped for o, m in zip(optimizers, models, strict=True)])
    assert taken == [[True, True]] * 3
    with strategy.accumulate(2):  # the step may follow the block
        for i in range(2):
            strategy.backward(loss_fn(models[0], batch_of("mlp", i, 0)), models[0], optimizers[0])
    assert strategy.optimizer_step(optimizers[0], models[0]).step == 4
    assert strategy.global_step(models[1]) == 3
    strategy.close()


@pytest.mark.ranks(2)
def test_a_block_that_fails_or_ends_early_leaves_no_gradients_behind(tmp_path):
    strategy = strategy_for(gradient_accumulation_steps=2)
    model = strategy.prepare_model(build("mlp"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)

    def backward():
        strategy.backward(loss_fn(model, batch_of("mlp", 0, 0)), model, optimizer)

    for wrong in (0, -1, 1.5, None):
        with (
            pytest.raises(StepError, match="expected the number of micro-batches of a step"),
            strategy.accumulate(wrong),
        ):
            pass
    with (
        pytest.raises(StepError, match="it is in a block of accumulate"),
        strategy.accumulate(2),
        strategy.accumulate(2),
    ):
        pass
    with pytest.raises(StepError, match="has not run all 3 micro-batches"), strategy.accumulate(3):
        backward()
    with pytest.raises(KeyError), strategy.accumulate(3):
        backward()
        raise KeyError("a bug of the program")
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(StepError, match="no backward pass since its last step"):
        strategy.optimizer_step(optimizer, model)
    backward()
    with pytest.raises(StepError, match="the block begins in the middle of a step"), strategy.accumulate(2):
        backward()
    assert not strategy.optimizer_step(optimizer, model).stepped
    with pytest.raises(StepError, match="no backward pass since the last call of optimizer_step"):
        strategy.optimizer_step(optimizer, model)
    backward()
    assert strategy.optimizer_step(optimizer, model).stepped
    assert math.isfinite(strategy.clip_grad_norm(model))
    strategy.close()
