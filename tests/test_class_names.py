"""The names of sharded modules' classes: those of their own classes, since other libraries decide by them."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys

import pytest
import torch
from helpers.models import CASES, FAMILIES, HUGGING_FACE, batch_of, build
from helpers.worlds import some
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.conversion_mapping import get_model_conversion_mapping

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.errors import CheckpointError, FSDP2StrategyError
from fsdp2_strategy.model.fsdp_state import class_name, original_class


def names_of(model):
    return {
        name: (type(m).__name__, type(m).__qualname__, type(m).__module__, type(m).__doc__, str(type(m)), m._get_name())
        for name, m in model.named_modules()
    }


def sharded(model, **options):
    return FSDPV2Strategy(config=StrategyConfig(bf16=False)).prepare_model(model, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(CASES, FAMILIES))
def test_sharded_modules_have_the_names_of_their_classes(name):
    model = build(name)
    names, shown, classes = names_of(model), repr(model), {n: type(m) for n, m in model.named_modules()}
    sharded(model, is_training=True)
    assert names_of(model) == names and repr(model) == shown
    units = {n: m for n, m in model.named_modules() if isinstance(m, FSDPModule)}
    assert "" in units and len(units) > 1
    for each, module in model.named_modules():
        assert isinstance(module, classes[each]) and original_class(module) is classes[each]
        assert class_name(module) == classes[each].__name__
        assert (type(module) is classes[each]) == (each not in units)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(HUGGING_FACE, ("llama", "qwen2_vl", "gpt_oss", "bert")))
def test_transformers_judges_a_sharded_model_as_its_own(name):
    def judged(model):
        cls = type(model)
        mapping = [str(conversion) for conversion in get_model_conversion_mapping(model)]
        flags = cls.can_generate(), cls.is_custom_code(), cls._can_set_attn_implementation()
        signatures = [inspect.signature(model.forward), inspect.signature(cls.forward), inspect.getsourcefile(cls)]
        return mapping, flags, cls._can_set_experts_implementation(), signatures

    model = build(name)
    expected = judged(model)
    assert judged(sharded(model)) == expected


@pytest.mark.ranks(2)
def test_a_model_with_adapters_and_its_base_keep_their_names():
    model = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    names = names_of(model)
    sharded(model, is_training=True)
    assert names_of(model) == names
    assert type(model).__name__ == "PeftModelForCausalLM"
    assert model.base_model.model._get_name() == "LlamaForCausalLM"


@pytest.mark.ranks(2)
def test_hidden_states_are_recorded_in_sharded_models():
    model = build("llama").eval()
    batch = batch_of("llama", 0, 0)
    expected = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states
    found = sharded(model)(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


REGISTERED = {}


class Registered(nn.Module):
    """A class whose subclasses are registered by name."""

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        assert cls.__name__ not in REGISTERED
        REGISTERED[cls.__name__] = cls


class Head(Registered):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.ranks(2)
def test_a_class_stays_the_one_of_its_name_in_its_module_and_in_registries():
    models = [sharded(Head()) for _ in range(2)]
    assert REGISTERED["Head"] is Head is sys.modules[__name__].Head
    assert type(models[0]) is type(models[1]) is not Head
    assert type(type(models[0])()) is Head, "the class of a sharded model makes models that are not sharded"
    with pytest.raises(CheckpointError, match="cannot pickle Head"):
        pickle.dumps(models[0])
    with pytest.raises(FSDP2StrategyError, match=r"cannot .*copy"):
        copy.deepcopy(models[0])
