"""Schedules: whose they are, what a checkpoint holds of them, and the learning rate of every step after a resume."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict

import pytest
import torch
import torch.distributed as dist
from helpers.training import assert_same, full_state
from helpers.worlds import some
from test_loops import Net, data, loss_of, warnings_of
from torch.optim import lr_scheduler as schedules

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, load_checkpoint, save_checkpoint
from fsdp2_strategy.errors import CheckpointError, OptimizerError, StepError
from fsdp2_strategy.storage.json_files import as_json, check_json
from fsdp2_strategy.storage.json_values import as_json_values, from_json_values


def half(step):
    return 0.5**step


class Decay:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, step):
        return self.factor**step


TORCHS = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, half),
    "LambdaLR of an object": lambda o: schedules.LambdaLR(o, Decay(0.7)),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: schedules.StepLR(o, 2),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [1, 4, 4]),
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, total_iters=8),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 5, 1e-3),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 3),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=9),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=2), schedules.MultiStepLR(o, [1, 2])], [2]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.ExponentialLR(o, 0.9), schedules.MultiStepLR(o, [2, 4])]
    ),
}
TRANSFORMERS = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 3},
}


def started(make, name=None, lr=0.05, **optimizer):
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, max_norm=1.0))
    model = strategy.prepare_model(Net(), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=lr, **optimizer)
    if name is not None:
        return (
            strategy,
            model,
            optimizer,
            strategy.create_scheduler(optimizer, name, num_training_steps=9, num_warmup_steps=2, **make),
        )
    return strategy, model, optimizer, make(optimizer) if make else None


def train(strategy, model, optimizer, scheduler, steps):
    rates = []
    for step in steps:
        strategy.backward(loss_of(model, data(step, dist.get_rank())), model, optimizer)
        result = strategy.optimizer_step(optimizer, model, scheduler)
        rates.append((result.lr, [(group["lr"], group["betas"]) for group in optimizer.param_groups]))
    return rates


def folder_of(tmp_path, name):
    box = [str(tmp_path)]
    dist.broadcast_object_list(box)
    return f"{box[0]}/{name}".replace(" ", "_")


def resumed(tmp_path, cases):
    for name, make, arguments in cases:
        folder = folder_of(tmp_path, name)
        run = started(make, *arguments)
        train(*run, range(3))
        run[0].save_ckpt(run[1], folder)
        expected = train(*run, range(3, 7)), full_state(run[1], run[2])
        again = started(make, *arguments)
        with warnings_of() as logged:
            assert again[0].load_ckpt(again[1], folder, *again[2:])[0]
        assert not logged, (name, logged)
        assert train(*again, range(3, 7)) == expected[0], name
        assert_same(full_state(again[1], again[2]), expected[1])
        run[0].close(), again[0].close()


@pytest.mark.full
@pytest.mark.ranks(1)
def test_every_schedule_of_torch_resumes_bitwise(tmp_path):
    left_out = {"LRScheduler", "_LRScheduler", "ReduceLROnPlateau"}
    kinds = {n for n, kind in vars(schedules).items() if isinstance(kind, type) and hasattr(kind, "get_last_lr")}
    assert {name.split()[0] for name in TORCHS} == kinds - left_out
    resumed(tmp_path, [(name, make, ()) for name, make in TORCHS.items()])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(TRANSFORMERS, ["cosine_with_restarts"]))
def test_every_schedule_of_transformers_resumes_bitwise(name, tmp_path):
    resumed(tmp_path, [(name, TRANSFORMERS[name], (name,))])


@pytest.mark.ranks(2)
def test_a_schedule_that_needs_a_metric_is_stepped_by_the_program_and_saved(tmp_path):
    folder = folder_of(tmp_path, "plateau")
    strategy, model, optimizer, plateau = started(lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=0))
    strategy.backward(loss_of(model, data(0, dist.get_rank())), model, optimizer)
    with pytest.raises(StepError, match=r"cannot step the ReduceLROnPlateau with the optimizer: its step needs metric"):
        strategy.optimizer_step(optimizer, model, plateau)
    assert strategy.optimizer_step(optimizer, model).stepped
    strategy.save_ckpt(model, folder, tag="first", scheduler=plateau)  # its best metric is inf
    plateau.step(1.0)
    plateau.step(2.0)
    strategy.save_ckpt(model, folder, tag="second", scheduler=plateau)
    for tag, best, rate in (("first", math.inf, 0.05), ("second", 1.0, 0.025)):
        _, other, its_optimizer, again = started(lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=0))
        strategy.load_ckpt(other, folder, its_optimizer, again, tag=tag)
        assert (again.best, its_optimizer.param_groups[0]["lr"]) == (best, rate)
        assert again.state_dict() == (plateau.state_dict() if tag == "second" else again.state_dict())
    for name in ("reduce_lr_on_plateau", "greedy"):
        with pytest.raises(OptimizerError, match="its steps need a metric"):
            strategy.create_scheduler(optimizer, name)
    strategy.close()


@pytest.mark.ranks(2)
def test_learning_rates_that_are_tensors_resume_bitwise(tmp_path):
    folder = folder_of(tmp_path, "tensors")
    options = {"lr": torch.tensor(0.05, dtype=torch.float64), "fused": True}

    def run():
        return started(lambda o: schedules.ExponentialLR(o, 0.9), **{**options, "lr": options["lr"].clone()})

    first = run()
    train(*first, range(2))
    first[0].save_ckpt(first[1], folder)
    train(*first, range(2, 4))
    second = run()
    rate = second[2].param_groups[0]["lr"]
    second[0].load_ckpt(second[1], folder, *second[2:])
    assert second[2].param_groups[0]["lr"] is rate  # a CUDA graph may read it
    train(*second, range(2, 4))
    assert torch.equal(rate, first[2].param_groups[0]["lr"])
    assert_same(full_state(second[1], second[2]), full_state(first[1], first[2]))


def test_values_that_json_lacks_survive_it():
    values = {
        "floats": [math.inf, -math.inf, 1.5, 1e-300],
        "counter": Counter({2: 1, 4: 2}),
        "keys": {1: "a", (2, 3): "b", "__float__": "c"},
        "tensors": {"a": torch.tensor(0.1), "b": torch.tensor([1, 2]), "c": torch.tensor([math.inf, 0.1]).bfloat16()},
        "none": None,
    }
    coded = as_json_values(values)
    check_json(coded, "values")
    decoded = from_json_values(json.loads(as_json(coded)))
    tensors, expected = decoded.pop("tensors"), values.pop("tensors")
    assert decoded == values and type(decoded["counter"]) is Counter
    assert all(tensors[name].dtype == t.dtype and torch.equal(tensors[name], t) for name, t in expected.items())
    assert math.isnan(from_json_values(as_json_values(math.nan)))


@pytest.mark.ranks(2)
def test_a_schedule_that_cannot_be_saved_is_refused_at_the_first_step():
    strategy, model, optimizer, _ = started(None)
    scheduler = schedules.LambdaLR(optimizer, Decay(0.5))
    scheduler.lr_lambdas[0].module = torch.nn.Linear(1, 1)
    strategy.backward(loss_of(model, data(0, dist.get_rank())), model, optimizer)
    with pytest.raises(CheckpointError, match=r"scheduler\['lr_lambdas'\]\[0\]\['module'\] is a Linear"):
        strategy.optimizer_step(optimizer, model, scheduler)
    assert strategy.global_step(model) == 0
    strategy.close()


# --- the learning rate after a resume ---------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
@pytest.mark.parametrize("has_schedule", [True, False])
def test_the_rate_of_every_step_after_a_resume_is_what_the_call_says(has_schedule, tmp_path):
    folder = folder_of(tmp_path, "rates")
    arguments = ({}, "linear") if has_schedule else (None,)
    old = started(*arguments, lr=0.05)
    train(*old, range(4))
    old[0].save_ckpt(old[1], folder)
    old_rates = [rate for rate, _ in train(*old, range(4, 6))]

    fresh = started(*arguments, lr=0.8)
    new_rates = [rate for rate, _ in train(*fresh, range(2))]
    new = started(*arguments, lr=0.8)
    with warnings_of() as logged:
        new[0].load_ckpt(new[1], folder, load_lr_scheduler_states=False)
    assert [rate for rate, _ in train(*new, range(4, 6))] == new_rates
    assert not logged

    replaced = started(*arguments, lr=0.8)
    with warnings_of() as logged:
        replaced[0].load_ckpt(replaced[1], folder)
    assert [rate for rate, _ in train(*replaced, range(4, 6))] == old_rates
    assert dist.get_rank() or any("0.8" in text and "0.05" in text for text in logged), logged

    only_schedule = started(*arguments, lr=0.8)
    with warnings_of() as logged:
        only_schedule[0].load_ckpt(only_schedule[1], folder, load_optimizer_states=False)
    expected = old_rates if has_schedule else new_rates
    assert [rate for rate, _ in train(*only_schedule, range(4, 6))] == expected
    assert dist.get_rank() or has_schedule == any("0.8" in text and "0.05" in text for text in logged), logged


@pytest.mark.ranks(2)
def test_other_settings_that_a_checkpoint_replaces_are_logged(tmp_path):
    folder = folder_of(tmp_path, "settings")
    old = started(None, weight_decay=0.1)
    train(*old, range(1))
    old[0].save_ckpt(old[1], folder)
    new = started(None, weight_decay=0.2, betas=(0.8, 0.9))
    with warnings_of() as logged:
        new[0].load_ckpt(new[1], folder)
    assert new[2].param_groups[0]["betas"] == (0.9, 0.999)
    text = " ".join(logged)
    assert dist.get_rank() or ("weight_decay 0.2 by 0.1" in text and "betas (0.8, 0.9) by (0.9, 0.999)" in text), text


# --- whose schedule it is ---------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_second_optimizer_of_a_model_drops_the_schedule_of_the_first(tmp_path):
    folder = folder_of(tmp_path, "second")
    strategy, model, first, schedule = started({}, "linear", lr=0.05)
    train(strategy, model, first, schedule, range(2))
    second = strategy.create_optimizer(model, lr=0.4)
    strategy.backward(loss_of(model, data(2, dist.get_rank())), model, second)
    with pytest.raises(StepError, match="the LambdaLR sets the learning rates of another AdamW"):
        strategy.optimizer_step(second, model, schedule)
    assert strategy.optimizer_step(second, model).lr == 0.4
    for call in (strategy.save_ckpt, strategy.load_ckpt):
        with pytest.raises(CheckpointError, match="the LambdaLR sets the learning rates of another AdamW"):
            call(model, folder, scheduler=schedule)
    with pytest.raises(CheckpointError, match="sets the learning rates of another"):
        save_checkpoint(model, folder, optimizer=second, scheduler=schedule)
    with pytest.raises(CheckpointError, match="sets the learning rates of another"):
        load_checkpoint(model, folder, optimizer=second, scheduler=schedule)
    strategy.save_ckpt(model, folder)
    again, other, its_optimizer, _ = started(None, lr=0.4)
    again.load_ckpt(other, folder)  # no schedule was saved
    assert train(again, other, its_optimizer, None, [3])[0][0] == 0.4
    third = strategy.create_scheduler(second, "linear", num_training_steps=10)
    assert [rate for rate, _ in train(strategy, model, second, third, range(2))] == pytest.approx([0.4, 0.36])
    with pytest.raises(OptimizerError, match="sets the learning rates of another"):
        strategy.prepare((model, first, third))
    strategy.close()


@pytest.mark.ranks(2)
def test_a_schedule_that_the_program_steps_as_well_is_warned_of_once():
    strategy, model, optimizer, schedule = started({}, "linear")
    with warnings_of() as logged:
        for step in range(4):
            train(strategy, model, optimizer, schedule, [step])
            schedule.step()
    assert dist.get_rank() or [text for text in logged if "has stepped the LambdaLR 1 time since" in text] == logged
    assert dist.get_rank() or len(logged) == 1
    strategy.close()


def test_json_files_have_the_indentation_of_the_json_module():
    values = [
        {"a": 1, "b": {"c": [1, 2.5, None], "d": {}, "e": []}, "f": "text\n, with \u00e9", 3: True},
        {"b": OrderedDict(x=Counter(a=2), y=()), 1.5: [[], [[1]], {"z": (1, "2")}], None: [{}], False: 1e-300},
        [[1, 2], {"a": [{"b": 1}]}],
        {},
        [],
        "text",
        0,
        None,
        {f"layers.{n}.weight": n for n in range(30)},
    ]
    for value in values:
        assert as_json(value) == json.dumps(value, indent=1) + "\n"
    for value in (math.inf, [math.nan], {"a": {"b": -math.inf}}):
        with pytest.raises(ValueError, match="not JSON compliant"):
            as_json(value)
