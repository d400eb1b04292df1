"""Loops as people write them: zero_grad at the top, errors that are caught, numbers that differ between ranks."""

from __future__ import annotations

import contextlib
import copy
import logging

import pytest
import torch
import torch.distributed as dist
from helpers.reference import assert_close, full_parameters
from helpers.worlds import some, some_rows
from torch import nn

from fsdp2_strategy import FSDPV2Strategy, ResumableLoader, StrategyConfig, backward, build_optimizer, optimizer_step
from fsdp2_strategy.errors import ConfigError, StepError

SIZES = some([2, 1, 3], [2, 1])


class Raise(torch.autograd.Function):
    @staticmethod
    def forward(_context, x):
        return x.clone()

    @staticmethod
    def backward(_context, _grad):
        raise RuntimeError("out of memory in backward")


class Layer(nn.Linear):
    failing = None
    """ "forward" or "backward": the pass in which this layer raises."""

    def forward(self, x):
        if self.failing == "forward":
            raise RuntimeError("out of memory in forward")
        return torch.tanh(super().forward(Raise.apply(x) if self.failing == "backward" else x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Layer(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(8))
        self.double()

    def forward(self, x):
        x = self.inp(x) * self.scale
        for layer in self.layers:
            x = x + layer(x)
        return x


def data(index, rank):
    return torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * index + rank))


def loss_of(model, x):
    return model(x).square().mean()


@contextlib.contextmanager
def warnings_of():
    """Collect the warnings of the package's log."""
    logged = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("fsdp2_strategy").addHandler(handler)
    try:
        yield logged
    finally:
        logging.getLogger("fsdp2_strategy").removeHandler(handler)


def prepared(shard_size=-1, **config):
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, **config))
    model = Net()
    reference = copy.deepcopy(model)
    strategy.prepare_model(model, is_training=True, shard_size=shard_size)
    optimizer = strategy.create_optimizer(model, lr=0.05, weight_decay=0.1)
    return strategy, model, optimizer, reference


def plain(model, steps, fails=()):
    """Train without sharding: the step on each list of micro-batches, of all ranks; return the parameters."""
    optimizer = build_optimizer(model, lr=0.05, weight_decay=0.1)
    world = dist.get_world_size()
    for step in steps:
        for index in step:
            for rank in range(world):
                (loss_of(model, data(index, rank)) / world / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def by_optimizer(_model, optimizer):
    optimizer.zero_grad()


def in_place(_model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def by_model(model, _optimizer):
    model.zero_grad()


def by_model_in_place(model, _optimizer):
    model.zero_grad(set_to_none=False)


CLEARS = [by_optimizer, in_place, by_model, by_model_in_place]


def top_of_loop(form, grad_sync):
    shard_size = 1 if grad_sync == "defer_all_reduce" else -1
    rule = {"each": "auto", "declared": "auto", "loop": "backward"}[form]
    config = {"gradient_accumulation_steps": 3, "grad_sync": grad_sync, "accumulation": rule}
    rank, expected = dist.get_rank(), None
    for clear in CLEARS:
        strategy, model, optimizer, reference = prepared(shard_size, **config)
        expected = expected or plain(reference, [[0, 1, 2], [3, 4, 5]])
        results = []
        with warnings_of() as logged:
            for step in range(2):
                with strategy.accumulate(3) if form == "declared" else contextlib.nullcontext():
                    for index in range(3 * step, 3 * step + 3):
                        clear(model, optimizer)
                        strategy.backward(loss_of(model, data(index, rank)), model, optimizer)
                        if form == "each":
                            results.append(strategy.optimizer_step(optimizer, model))
                    if form != "each":
                        clear(model, optimizer)  # also after the last one: the step has not used it yet
                        results.append(strategy.optimizer_step(optimizer, model))
        assert sum(result.stepped for result in results) == 2
        assert_close(full_parameters(model), expected, 1e-10, "parameter")
        assert rank or (len(logged) == 1 and "zero_grad is ignored between" in logged[0]), logged
        strategy.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("form", "grad_sync"),
    some_rows(
        [(form, sync) for form in ("each", "declared", "loop") for sync in ("last", "every", "defer_all_reduce")],
        [("each", "last")],
    ),
)
def test_zero_grad_between_micro_batches_keeps_their_gradients_and_says_so_once(form, grad_sync, size, run_on):
    run_on(size, top_of_loop, form=form, grad_sync=grad_sync)


@pytest.mark.ranks(2)
def test_zero_grad_keeps_gradients_for_any_optimizer_of_the_free_functions():
    for make in (
        lambda model: build_optimizer(model, lr=0.05, weight_decay=0.1),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1),
    ):
        _, model, _, _ = prepared()
        optimizer, parameters = make(model), []
        for top in (False, True):
            for index in range(4):
                if top:
                    optimizer.zero_grad()
                backward(loss_of(model, data(index, dist.get_rank())), model, accumulation_steps=2)
                optimizer_step(optimizer, model, accumulation_steps=2)
            parameters.append(full_parameters(model))
            assert all(p.grad is None for p in model.parameters())


@pytest.mark.ranks(2)
def test_a_step_with_one_micro_batch_and_direct_steps_clear_as_torch_does():
    strategy, model, optimizer, reference = prepared()
    rank = dist.get_rank()
    for index in range(3):
        strategy.backward(loss_of(model, data(index, rank)), model, optimizer)
        if index == 1:
            optimizer.zero_grad()  # for example because the loss is too large
            continue
        assert strategy.optimizer_step(optimizer, model).loss is not None
    assert_close(full_parameters(model), plain(reference, [[0], [2]]), 1e-10, "parameter")
    free = build_optimizer(model, lr=0.05)
    for index in range(4):  # the program steps itself
        backward(loss_of(model, data(index, rank)), model, accumulation_steps=2)
        if index % 2:
            free.step()
            free.zero_grad()
            assert all(p.grad is None for p in model.parameters())
    strategy.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("grad_sync", ["every", "last"])
def test_micro_batches_can_be_discarded_on_purpose_and_after_a_skipped_step(grad_sync):
    strategy, model, optimizer, reference = prepared(gradient_accumulation_steps=2, grad_sync=grad_sync)
    rank = dist.get_rank()

    def micro_batch(index, factor=1.0):
        strategy.backward(loss_of(model, data(index, rank)) * factor, model, optimizer)
        return strategy.optimizer_step(optimizer, model)

    micro_batch(0)
    strategy.discard_gradients(model)
    assert not micro_batch(1).stepped
    assert micro_batch(2).stepped
    micro_batch(3, float("nan"))
    assert micro_batch(4).skipped
    optimizer.zero_grad()
    micro_batch(5)
    assert micro_batch(6).stepped
    assert_close(full_parameters(model), plain(reference, [[1, 2], [5, 6]]), 1e-10, "parameter")
    strategy.close()


# --- passes that raise ------------------------------------------------------------------------------------------------


def caught(kind, layer, clears, micro_batches, grad_sync):
    shard_size = 1 if grad_sync == "defer_all_reduce" else -1
    strategy, model, optimizer, reference = prepared(
        shard_size, gradient_accumulation_steps=micro_batches, grad_sync=grad_sync
    )
    rank, steps, pending = dist.get_rank(), [], []
    with warnings_of() as logged:
        for index in range(4 * micro_batches + 1):
            model.layers[layer].failing = kind if index == micro_batches + 1 else None
            try:
                strategy.backward(loss_of(model, data(index, rank)), model, optimizer)
            except RuntimeError:
                if clears:
                    optimizer.zero_grad()
                if clears or kind == "backward":
                    pending = []
                continue
            pending.append(index)
            result = strategy.optimizer_step(optimizer, model)
            if result.stepped:
                assert result.grad_norm > 1e-3
                steps.append(pending)
                pending = []
    assert len(steps) in (3, 4)
    assert strategy.global_step(model) == len(steps)
    assert_close(full_parameters(model), plain(reference, steps), 1e-10, "parameter")
    assert rank or sum("pass has raised" in text for text in logged) == 1, logged
    strategy.close()


def catch_each(micro_batches, grad_sync):
    for kind, layer in (("forward", 2), ("backward", 2), ("backward", 0)):
        for clears in (True, False):
            caught(kind, layer, clears, micro_batches, grad_sync)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("micro_batches", "grad_sync"),
    some_rows([(1, "every"), (2, "last"), (2, "every"), (2, "defer_all_reduce")], [(2, "last")]),
)
def test_steps_after_a_pass_that_raised_are_those_of_the_unsharded_loop(micro_batches, grad_sync, size, run_on):
    run_on(size, catch_each, micro_batches=micro_batches, grad_sync=grad_sync)


@pytest.mark.ranks(2)
def test_a_step_on_the_gradients_of_a_failed_backward_pass_is_refused():
    strategy, model, optimizer, _ = prepared()
    model.layers[1].failing = "backward"
    with pytest.raises(RuntimeError, match="out of memory"):
        strategy.backward(loss_of(model, data(0, 0)), model, optimizer)
    with pytest.raises(StepError, match="its last backward pass has raised"):
        strategy.optimizer_step(optimizer, model)
    model.layers[1].failing = None
    strategy.backward(loss_of(model, data(0, 0)), model, optimizer)
    assert strategy.optimizer_step(optimizer, model).stepped
    strategy.close()


# --- ranks that use other numbers -------------------------------------------------------------------------------------


def differ_in(what, rank):
    """Prepare, and let one rank use another number; return the strategy, model, optimizer, and options of backward."""
    other = rank == dist.get_world_size() - 1
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, max_norm=1.0))
    model = strategy.prepare_model(Net(), is_training=True)
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    changed = {"lr": 0.2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}
    if what in changed and other:
        settings[what] = changed[what]
    optimizer = strategy.create_optimizer(model, **settings)
    if other and what == "max_norm":
        strategy.config = strategy.config.replace(max_norm=2.0)
    if other and what == "one group's lr":
        optimizer.param_groups[-1]["lr"] = 0.3
    return strategy, model, optimizer, {"num_items_in_batch": 7 + other} if what == "num_items_in_batch" else {}


DIFFERENCES = {
    "lr": r"lr of parameter group 0 .* is 0.1 on rank 0, 0.2 on rank 1",
    "betas": r"betas of parameter group 0 .* is \(0.9, 0.95\) on rank 0, \(0.9, 0.999\) on rank 1",
    "eps": "eps of parameter group",
    "weight_decay": r"weight_decay of parameter group . \(decay\) is 0.1 on rank 0, 0.0 on rank 1",
    "max_norm": "max_norm is 1.0 on rank 0, 2.0 on rank 1",
    "one group's lr": "lr of parameter group 1 .* is 0.1 on rank 0, 0.3 on rank 1",
    "num_items_in_batch": "num_items_in_batch is 7.0 on rank 0, 8.0 on rank 1",
}


@pytest.mark.ranks(2)
def test_numbers_that_differ_between_ranks_are_errors_on_every_rank_before_the_step():
    for what, message in DIFFERENCES.items():
        strategy, model, optimizer, given = differ_in(what, dist.get_rank())
        before = full_parameters(model)
        strategy.backward(loss_of(model, data(0, dist.get_rank())), model, optimizer, **given)
        with pytest.raises(StepError, match=f"cannot step: {message}"):
            strategy.optimizer_step(optimizer, model)
        assert_close(full_parameters(model), before, 0.0, "parameter")
        strategy.close()


@pytest.mark.ranks(2)
def test_each_micro_batch_may_have_its_own_number_of_items():
    strategy, model, optimizer, _ = prepared(gradient_accumulation_steps=2)
    for numbers, message in (
        ([3, 5], None),
        ([3, 5 + dist.get_rank()], r"num_items_in_batch is \(3.0, 5.0\) on rank 0"),
    ):
        for index, number in enumerate(numbers):
            loss = loss_of(model, data(index, dist.get_rank()))
            strategy.backward(loss, model, optimizer, num_items_in_batch=number)
            last = index == len(numbers) - 1
            with pytest.raises(StepError, match=message) if last and message else contextlib.nullcontext():
                assert strategy.optimizer_step(optimizer, model).stepped == last
    strategy.close()


@pytest.mark.ranks(2)
def test_a_model_that_was_never_prepared_cannot_be_trained_on_several_ranks():
    strategy = FSDPV2Strategy(bf16=False)
    model = Net()
    optimizer = strategy.create_optimizer(model, lr=0.1)
    for call in (
        lambda: strategy.backward(loss_of(model, data(0, 0)), model, optimizer),
        lambda: strategy.optimizer_step(optimizer, model),
        lambda: strategy.clip_grad_norm(model, 1.0),
        lambda: backward(loss_of(model, data(0, 0)), model),
        lambda: optimizer_step(optimizer, model),
    ):
        with pytest.raises(StepError, match=r"Net is not sharded, so each of the 2 ranks .* Call prepare_model"):
            call()
    strategy.prepare((model, optimizer))  # the order of some trainers
    strategy.backward(loss_of(model, data(0, 0)), model, optimizer)
    assert strategy.optimizer_step(optimizer, model).stepped
    strategy.close()


@pytest.mark.ranks(2)
def test_settings_that_decide_the_collectives_of_a_step_are_compared_when_a_model_is_prepared():
    for name, values in {"gradient_accumulation_steps": (1, 2), "grad_sync": ("every", "last")}.items():
        strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, **{name: values[dist.get_rank()]}))
        with pytest.raises(ConfigError, match=rf"{name} is {values[0]} on 1 rank \(0\), {values[1]} on 1 rank \(1\)"):
            strategy.prepare_model(Net(), is_training=True)
        strategy.close()


# --- ranks that train on the same data --------------------------------------------------------------------------------


def losses_in_log(rank_of_batch, steps=7, **config):
    strategy, model, optimizer, _ = prepared(**config)
    with warnings_of() as logged:
        for step in range(steps):
            strategy.backward(loss_of(model, data(step, rank_of_batch(step))), model, optimizer)
            strategy.optimizer_step(optimizer, model)
    strategy.close()
    return [text for text in logged if "the loss was the same on all ranks" in text]


@pytest.mark.ranks(3)
def test_ranks_that_draw_the_same_batches_are_warned_of_once():
    rank = dist.get_rank()
    assert rank or len(losses_in_log(lambda _: 0)) == 1
    if rank:
        losses_in_log(lambda _: 0)
    assert losses_in_log(lambda _: rank) == []
    assert losses_in_log(lambda step: rank if step in {3, 6} else 0) == []  # by chance, now and then
    assert losses_in_log(lambda _: 0 if rank < 2 else 2) == []


@pytest.mark.full
@pytest.mark.ranks(2)
def test_loaders_whose_batches_or_data_do_not_fit_are_warned_of_once(tmp_path):
    rank, box = dist.get_rank(), [str(tmp_path)]
    dist.broadcast_object_list(box)
    whole = list(range(24))
    strategy, model, _, _ = prepared(train_batch_size=8)
    for dataset, size, warning in (
        (whole, 2, None),
        (whole, 8, None),
        (
            whole,
            4,
            "the loader has batches of 4 samples, expected 2 (micro_train_batch_size x",
        ),
        (whole[rank::2], 8, "the data set of the ResumableLoader differs between the ranks"),
        (torch.utils.data.Subset(whole, range(rank, 24, 2)), 8, "differs between the ranks"),
        (whole[: 20 + rank], 8, "differs between the ranks"),
    ):
        loader = ResumableLoader(dataset, size)
        with warnings_of() as logged:
            strategy.load_ckpt(model, box[0], dataloader=loader)
            strategy.load_ckpt(model, box[0], dataloader=loader)
        assert rank or (len(logged) == bool(warning) and all(warning in text for text in logged)), logged
    strategy.close()
