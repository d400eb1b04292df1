"""Everyday calls of transformers, peft and torch on a sharded model: they work, or say what to call instead."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from helpers.models import Actor, build
from helpers.reference import full_parameters
from helpers.training import strategy_for
from helpers.worlds import worlds
from peft import LoraConfig, get_peft_model
from torch import nn

from fsdp2_strategy.errors import CheckpointError, ShardError
from fsdp2_strategy.model.names import named_parameters


def adapters():
    return LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")


def replace_head(model):
    model.lm_head = nn.Linear(4, 4)


REFUSED = {
    "save_pretrained": (lambda m: m.save_pretrained("x"), CheckpointError, "strategy.save_model"),
    "save_pretrained of the inner model": (lambda m: m.model.save_pretrained("x"), CheckpointError, "save_model"),
    "push_to_hub": (lambda m: m.push_to_hub("a/b"), CheckpointError, "upload_folder"),
    "resize_token_embeddings": (lambda m: m.resize_token_embeddings(999), ShardError, "999 tokens.*before prepare"),
    "get_peft_model": (lambda m: get_peft_model(m, adapters()), ShardError, "call get_peft_model"),
    "add_adapter": (lambda m: m.add_adapter(adapters()), ShardError, "before prepare_model"),
    "a new head": (replace_head, ShardError, "cannot add the module lm_head .Linear. to LlamaForCausalLM"),
    "set_input_embeddings": (lambda m: m.set_input_embeddings(nn.Embedding(4, 4)), ShardError, "before prepare_model"),
    "torch.save of the state dict": (
        lambda m: torch.save({"model": m.state_dict()}, io.BytesIO()),
        CheckpointError,
        "strategy.save_ckpt",
    ),
    "torch.save of the model": (lambda m: torch.save(m, io.BytesIO()), CheckpointError, "cannot pickle LlamaFor"),
    "pickle": (pickle.dumps, CheckpointError, "cannot pickle LlamaForCausalLM"),
    "deepcopy": (copy.deepcopy, ShardError, "Copy it before prepare_model"),
    "deepcopy of a part": (lambda m: copy.deepcopy(m.model.layers), ShardError, "cannot copy LlamaDecoderLayer"),
    "to(device)": (lambda m: m.to("meta"), ShardError, "offload_model"),
    "to_empty": (lambda m: m.to_empty(device="cpu"), ShardError, "would discard"),
    "share_memory": (lambda m: m.share_memory(), ShardError, "before prepare_model"),
}
OF_ADAPTERS = {
    "merge_and_unload": (lambda m: m.merge_and_unload(), ShardError, "save_model"),
    "unload": (lambda m: m.unload(), ShardError, "before prepare_model"),
    "merge_adapter": (lambda m: m.merge_adapter(), ShardError, "save_model"),
    "a further adapter": (lambda m: m.add_adapter("b", adapters()), ShardError, "before prepare_model"),
    "save_pretrained of adapters": (lambda m: m.save_pretrained("x"), CheckpointError, "save_model"),
}


@pytest.mark.ranks(2)
def test_calls_that_cannot_work_on_shards_say_what_to_call():
    with strategy_for() as strategy:
        adapted = get_peft_model(build("llama"), adapters())
        for cases, unsharded in ((REFUSED, build("llama")), (OF_ADAPTERS, adapted)):
            model = strategy.prepare_model(unsharded, is_training=True)
            before, names = full_parameters(model), [name for name, _ in model.named_modules()]
            for name, (call, error, text) in cases.items():
                with pytest.raises(error, match=text):
                    call(model)
                assert [name for name, _ in model.named_modules()] == names, name
            after = full_parameters(model)
            assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.ranks(2)
def test_calls_that_change_nothing_succeed():
    with strategy_for(bf16=True) as strategy:
        model = strategy.prepare_model(build("llama"), is_training=True)
        ids = torch.tensor([[1, 2, 3]])
        loss = model(ids, labels=ids).loss  # the root stays gathered, in bf16
        assert model.to("cpu") is model is model.float() is model.cpu()
        model.to(torch.float32)
        model.tie_weights()
        model.init_weights()
        model.requires_grad_(True)
        assert model.resize_token_embeddings(len(model.get_input_embeddings().weight)) is model.get_input_embeddings()
        assert model.resize_token_embeddings() is model.get_input_embeddings()
        model.lm_head = model.lm_head
        model.dropout = nn.Dropout(0.1)
        loss.backward()
        assert all(p.grad is not None for p in named_parameters(model).values())
        assert type(copy.deepcopy(model.state_dict())).__name__ == "OrderedDict"
        model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("name", ["llama", "llama_tied", "actor"])
@pytest.mark.parametrize("world", worlds(1, 2, 3, usual=(3,)))
def test_a_full_state_dict_is_loaded_into_shards(world, name):
    def make(seed):
        return Actor(build("llama", seed)) if name == "actor" else build(name, seed)

    full = {key: value.clone() for key, value in make(1).state_dict().items()}
    with strategy_for() as strategy:
        model = strategy.prepare_model(make(0), is_training=True)
        model(torch.tensor([[1, 2]]))  # the root stays gathered
        assert not any(model.load_state_dict(full))
        loaded = full_parameters(model)
        for key, value in named_parameters(make(1)).items():
            assert torch.equal(loaded[key], value), key
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({key: value for key, value in full.items() if "norm" not in key})
        with pytest.raises(RuntimeError, match=r"size mismatch|whose dimensions"):
            model.load_state_dict({key: torch.zeros(2, 2) for key in full})


@pytest.mark.ranks(2)
def test_checkpointing_that_is_enabled_later_keeps_gradients():
    ids = torch.randint(1, 30, (2, 5), generator=torch.Generator().manual_seed(dist.get_rank()))
    grads = []
    for is_enabled in (False, True):
        with strategy_for() as strategy:
            model = strategy.prepare_model(build("llama"), is_training=True)
            model.train()
            if is_enabled:
                model.gradient_checkpointing_enable()
            strategy.backward(model(ids, labels=ids, use_cache=False).loss, model, strategy.create_optimizer(model))
            grads.append({name: p.grad.full_tensor() for name, p in named_parameters(model).items()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
