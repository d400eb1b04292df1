"""Parameter groups: pure, named, and without weight decay for biases and norms by what they are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.models import build
from torch import nn

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, build_mesh, build_optimizer, build_scheduler, shard_model
from fsdp2_strategy.errors import OptimizerError
from fsdp2_strategy.model.names import named_parameters


def names_by_decay(model, optimizer):
    names = {id(p): n for n, p in named_parameters(model).items()}
    found = {}
    for group in optimizer.param_groups:
        found.setdefault(group["weight_decay"], set()).update(names[id(p)] for p in group["params"])
    return found


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias_proj = nn.Linear(4, 4)  # a linear layer, whatever its name
        self.ln = nn.LayerNorm(4)
        self.norm = nn.Linear(4, 4, bias=False)  # no norm either
        self.experts_bias = nn.Parameter(torch.zeros(2, 4))


def test_biases_and_norms_are_exempt_by_what_they_are():
    model = Odd()
    exempt = {"bias_proj.bias", "ln.weight", "ln.bias", "experts_bias"}
    found = names_by_decay(model, build_optimizer(model, lr=1e-3, weight_decay=0.1))
    assert found == {0.0: exempt, 0.1: {"bias_proj.weight", "norm.weight"}}
    llama = build("llama")
    assert all("norm" in n for n in names_by_decay(llama, build_optimizer(llama, weight_decay=0.1))[0.0])


def test_patterns_replace_the_rule_and_an_empty_list_exempts_nothing():
    model = Odd()
    found = names_by_decay(model, build_optimizer(model, weight_decay=0.1, no_decay=["ln", "norm.weight"]))
    assert found[0.0] == {"ln.weight", "ln.bias", "norm.weight"}
    assert names_by_decay(model, build_optimizer(model, weight_decay=0.1, no_decay=()))[0.1] == set(
        named_parameters(model)
    )
    only = names_by_decay(model, build_optimizer(model, weight_decay=0.1, no_decay=["*.bias"]))
    assert only[0.0] == {"bias_proj.bias", "ln.bias"}


def test_groups_of_the_user_keep_their_name_and_settings():
    model = Odd()
    groups = [
        {"name": "head", "params": ["norm"], "lr": 1.0},
        {"name": "body", "params": [model.bias_proj.weight, model.bias_proj.bias], "weight_decay": 0.5},
    ]
    optimizer = build_optimizer(model, lr=0.1, weight_decay=0.01, param_groups=groups)
    shown = [(g["name"], g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
    assert shown == [("head", 1.0, 0.01, 1), ("body", 0.1, 0.5, 2), ("no_decay", 0.1, 0.0, 3)]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"params": ["missing"]}], "contains no trainable parameter"),
        ([{"params": ["ln"]}, {"params": ["ln.weight"], "name": "b"}], r"ln\.weight is in the groups 0 and 'b'"),
        ([{"params": [nn.Parameter(torch.zeros(1))]}], "1 parameter of another model"),
    ],
)
def test_groups_that_make_no_sense_are_refused(groups, message):
    with pytest.raises(OptimizerError, match=message):
        build_optimizer(Odd(), param_groups=groups)


def test_nothing_trainable_is_refused():
    with pytest.raises(OptimizerError, match="no parameter of Odd is trainable"):
        build_optimizer(Odd().requires_grad_(False))


def test_the_fused_kernel_is_used_where_there_is_one_and_any_class_works():
    assert build_optimizer(Odd()).param_groups[0]["fused"] is True
    assert build_optimizer(Odd(), optimizer_cls=torch.optim.RAdam).param_groups[0]["foreach"] is True
    assert build_optimizer(Odd(), fused=False).param_groups[0]["fused"] is False
    sgd = build_optimizer(Odd(), lr=0.1, momentum=0.9, optimizer_cls=torch.optim.SGD)
    assert sgd.param_groups[0]["momentum"] == 0.9
    waves = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    assert build_optimizer(waves, lr=0.1).param_groups[0]["foreach"] is True


def test_half_precision_training_is_said_loudly(caplog):
    build_optimizer(Odd().to(torch.bfloat16))
    assert "trainable parameters are stored in half precision" in caplog.text
    assert caplog.records[-1].levelname == "WARNING"


@pytest.mark.ranks(2)
def test_groups_are_pure_in_dtype_and_shard_size():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))

    model = Two()
    model.b.double()
    shard_model(model.a, build_mesh(1), StrategyConfig(bf16=False), is_training=True)
    shard_model(model.b, build_mesh(), StrategyConfig(bf16=False), is_training=True)
    optimizer = build_optimizer(model, lr=0.1)
    assert [len(g["params"]) for g in optimizer.param_groups] == [1, 1, 1]
    assert {g["name"] for g in optimizer.param_groups} == {"decay"}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.ranks(2)
def test_an_optimizer_made_after_an_evaluation_holds_the_sharded_parameters():
    strategy = FSDPV2Strategy(bf16=False)
    model = strategy.prepare_model(build("llama_tied"), is_training=True)
    with torch.no_grad():
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    optimizer = strategy.create_optimizer(model, lr=0.1)
    assert all(hasattr(p, "device_mesh") for g in optimizer.param_groups for p in g["params"])
    with pytest.raises(OptimizerError, match="after prepare_model"):
        strategy.create_optimizer(model, param_groups=[{"params": [nn.Parameter(torch.zeros(1))]}])
    assert dist.is_initialized()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cls", ["SGD", "Adagrad", "RMSprop", "NAdam", "Adadelta", "Adamax", "RAdam", "ASGD"])
def test_other_optimizers_step_sharded_parameters(cls):
    strategy = FSDPV2Strategy(bf16=False)
    model = strategy.prepare_model(build("mlp"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1, optimizer_cls=getattr(torch.optim, cls))
    strategy.backward(model(torch.ones(2, 7)).sum(), model, optimizer)
    assert strategy.optimizer_step(optimizer, model, None).stepped
    with pytest.raises(OptimizerError, match="Adafactor does not support sharded parameters"):
        strategy.create_optimizer(model, optimizer_cls=torch.optim.Adafactor)


def rates(name, steps=10, **options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_scheduler(optimizer, name, **options)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_are_found_by_transformers_names_and_by_those_of_vla_trainers():
    assert rates("linear", 4, num_training_steps=4) == pytest.approx([1.0, 0.75, 0.5, 0.25])
    cosine = rates("linear-warmup+cosine-decay", 11, num_training_steps=10, warmup_ratio=0.2)
    assert cosine[:3] == pytest.approx([0.0, 0.5, 1.0])
    assert cosine[-1] == pytest.approx(0.1)
    assert rates("warmup_cosine", 11, num_training_steps=10, warmup_ratio=0.2) == cosine
    assert rates("linear-warmup+constant", 4, num_warmup_steps=2) == pytest.approx([0.0, 0.5, 1.0, 1.0])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cosin", {}, "Did you mean 'cosine'"),
        ("cosine", {}, "num_training_steps"),
        ("reduce_lr_on_plateau", {}, "is unknown"),
        ("cosine", {"warmup_ratio": 0.1}, "warmup_ratio is 0.1"),
        ("cosine", {"warmup_ratio": 2.0, "num_training_steps": 10}, "ratio from 0 to 1"),
        (
            "cosine",
            {"warmup_ratio": 0.1, "num_warmup_steps": 1, "num_training_steps": 10},
            "only one of warmup_ratio",
        ),
    ],
)
def test_a_schedule_that_cannot_be_built_is_refused(name, options, message):
    with pytest.raises(OptimizerError, match=message):
        rates(name, **options)
