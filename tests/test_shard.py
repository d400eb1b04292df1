"""What `prepare_model` promises beside parity: wrappers, ties, precision, freezing, random state, errors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from models import HUGGING_FACE, PlainTransformer, batch_of, build, loss_of, next_token_loss, tokens
from reference import CountCollectives, assert_close, full, full_grads, full_parameters
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp2_strategy import (
    FSDPV2Strategy,
    MeshError,
    ShardError,
    StrategyConfig,
    build_mesh,
    shard_model,
)
from fsdp2_strategy.names import named_parameters


class Actor(nn.Module):
    is_actor = True

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids).logits


class Critic(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.base_model = model
        self.value_head = nn.Linear(32, 1)

    def forward(self, ids):
        hidden = self.base_model.model(input_ids=ids).last_hidden_state
        return self.value_head(hidden).squeeze(-1)


def strategy_for(**config):
    return FSDPV2Strategy(config=StrategyConfig(**{"bf16": False, **config}))


@pytest.mark.ranks(2)
def test_preparing_is_idempotent_and_none_passes_through():
    strategy = strategy_for()
    model = build("llama")
    assert strategy.prepare_model(None) is None
    assert strategy.prepare_model(model, is_training=True) is model
    parameters = list(model.parameters())
    assert all(isinstance(p, DTensor) for p in parameters)
    assert strategy.prepare_model(model, is_training=True) is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


@pytest.mark.ranks(2)
def test_an_actor_wrapper_shards_its_model_and_a_critic_as_a_whole():
    strategy = strategy_for()
    actor = strategy.prepare_model(Actor(build("llama")), is_training=True)
    assert isinstance(actor.model, FSDPModule)
    assert not isinstance(actor, FSDPModule)
    assert strategy.unwrap_model(actor) is actor.model
    ids = tokens(torch.Generator().manual_seed(1))
    assert torch.equal(actor(ids), actor.model(input_ids=ids).logits)

    critic = strategy.prepare_model(Critic(build("llama")), is_training=True)
    assert isinstance(critic, FSDPModule)
    assert isinstance(critic.base_model.model.layers[0], FSDPModule)
    optimizer = strategy.create_optimizer(critic, lr=1e-3)
    strategy.backward(critic(ids).square().mean(), critic, optimizer)
    assert strategy.optimizer_step(optimizer, critic, None).stepped
    assert strategy.prepare_model(critic, is_training=True) is critic


@pytest.mark.ranks(2)
def test_a_wrapper_around_an_engine_or_a_sharded_model_is_left_alone():
    class Reward(nn.Module):
        def __init__(self, base_model):
            super().__init__()
            self.base_model = base_model
            self.scale = nn.Linear(2, 2)

    strategy = strategy_for()
    engine = Reward(object())
    assert strategy.prepare_model(engine) is engine
    sharded = Reward(strategy.prepare_model(build("llama")))
    assert strategy.prepare_model(sharded) is sharded
    assert not isinstance(engine.scale.weight, DTensor)
    assert not isinstance(sharded.scale.weight, DTensor)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["llama_tied", "bert", "t5"])
def test_tied_weights_stay_one_parameter(name):
    model = build(name)
    before = {n for n, _ in model.named_parameters()}
    strategy_for().prepare_model(model, is_training=True)
    assert {n for n, _ in model.named_parameters()} == before
    if name == "llama_tied":
        assert model.lm_head.weight is model.model.embed_tokens.weight


class MixedPrecision(nn.Module):
    """The arithmetic of mixed precision, unsharded: fp32 parameters, a bf16 copy of each for every forward."""

    def __init__(self, model):
        super().__init__()
        self.inner = copy.deepcopy(model)

    def forward(self, **inputs):
        low = {n: p.to(torch.bfloat16) if p.ndim else p for n, p in self.inner.named_parameters()}
        inputs = {
            k: v.to(torch.bfloat16) if getattr(v, "dtype", None) == torch.float32 else v for k, v in inputs.items()
        }
        return torch.func.functional_call(self.inner, low, kwargs=inputs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_bf16_training_has_the_gradients_of_the_same_arithmetic_unsharded(name):
    model = build(name)
    reference = MixedPrecision(model)
    strategy = strategy_for(bf16=True)
    strategy.prepare_model(model, is_training=True)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for r in range(2):
        expected = loss_of(name, reference, batch_of(name, 0, r))
        (expected / 2).backward()
        if r == dist.get_rank():
            expected_loss = expected.item()
    loss = loss_of(name, model, batch_of(name, 0, dist.get_rank()))
    assert loss.item() == expected_loss, name
    strategy.backward(loss, model)
    expected_grads = {n: p.grad for n, p in named_parameters(reference.inner).items() if p.grad is not None}
    grads = full_grads(model)
    assert {g.dtype for g in grads.values()} == {torch.float32}
    # An encoder's output that several decoder blocks use adds up its bf16 gradients in another order.
    assert_close(grads, expected_grads, 2e-2 if name in ("t5", "bart") else 1e-6, "gradient")


@pytest.mark.ranks(2)
def test_inference_holds_bf16_and_buffers_keep_their_dtype():
    model = build("llama")
    expected = copy.deepcopy(model).to(torch.bfloat16)
    expected.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
    strategy_for(bf16=True).prepare_model(model, is_training=False)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    ids = tokens(torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)


@pytest.mark.ranks(2)
def test_keep_fp32_computes_the_named_parameters_in_fp32():
    model = build("llama")
    strategy = strategy_for(bf16=True, keep_fp32=["layernorm", "lm_head"])
    strategy.prepare_model(model, is_training=True)
    seen = {}

    def watch(name):
        def hook(module, inputs, output):
            seen[name] = (module.weight.dtype, inputs[0].dtype, output.dtype)

        return hook

    model.model.layers[0].input_layernorm.register_forward_hook(watch("norm"))
    model.model.layers[0].mlp.up_proj.register_forward_hook(watch("up"))
    model.lm_head.register_forward_hook(watch("head"))
    logits = model(input_ids=tokens(torch.Generator().manual_seed(1))).logits
    assert seen["norm"] == (torch.float32, torch.float32, torch.bfloat16)
    assert seen["up"] == (torch.bfloat16,) * 3
    assert seen["head"] == (torch.float32,) * 3
    strategy.backward(logits.float().square().mean(), model)
    assert all(g.isfinite().all() for g in full_grads(model).values())


@pytest.mark.ranks(2)
def test_a_block_of_two_dtypes_runs_without_bf16():
    model = PlainTransformer().to(torch.bfloat16)
    model.layers[0].norm1.float()
    strategy_for().prepare_model(model, is_training=False)
    assert model.layers[0].norm1.weight.dtype == torch.float32
    with torch.no_grad():
        assert model.train()(tokens(torch.Generator().manual_seed(1))).isfinite().all()


@pytest.mark.ranks(2)
def test_half_precision_weights_are_trained_as_fp32_also_without_bf16():
    model = build("llama").to(torch.bfloat16)
    strategy_for().prepare_model(model, is_training=True)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.ranks(2)
def test_frozen_units_communicate_no_gradients_and_keep_their_weights():
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "lm_head" in name)
    strategy = strategy_for(bf16=True)
    strategy.prepare_model(model, is_training=True)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert model.model.layers[1].mlp.up_proj.weight.dtype == torch.float32
    before = full_parameters(model)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    with CountCollectives() as collectives:
        strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model, optimizer)
    assert collectives.counts["reduce_scatter_base"] == 2, collectives.counts
    strategy.optimizer_step(optimizer, model, None)
    after = full_parameters(model)
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed == {n for n in before if "layers.1" in n or "lm_head" in n}
    assert all(n in changed for n, p in model.named_parameters() if p in optimizer.state)


@pytest.mark.ranks(2)
def test_freezing_after_preparation_is_honoured():
    strategy = strategy_for()
    model = strategy.prepare_model(build("llama"), is_training=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    before = full_parameters(model)
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, 0)), model, optimizer)
    strategy.optimizer_step(optimizer, model, None)
    after = full_parameters(model)
    assert {n for n in before if not torch.equal(before[n], after[n])} == {n for n in before if "layers.1" in n}


def _dropout_grads(config, prepare=lambda model: None):
    torch.manual_seed(3)
    model = PlainTransformer(dropout=0.3).train()
    prepare(model)
    strategy = strategy_for(**config)
    strategy.prepare_model(model, is_training=True)
    torch.manual_seed(5)
    ids = tokens(torch.Generator().manual_seed(dist.get_rank()))
    strategy.backward(next_token_loss(model(ids), ids), model)
    return full_grads(model)


@pytest.mark.ranks(2)
def test_activation_checkpointing_recomputes_under_the_same_dropout():
    plain = _dropout_grads({})
    recomputed = _dropout_grads({"activation_checkpointing": ["TransformerEncoderLayer"]})
    assert all(torch.equal(plain[n], recomputed[n]) for n in plain)


@pytest.mark.ranks(2)
def test_activation_checkpointing_recomputes_each_named_module():
    calls = []
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    strategy = strategy_for(activation_checkpointing=["LlamaDecoderLayer"])
    strategy.prepare_model(model, is_training=True)
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, 0)), model)
    assert len(calls) == 4
    with pytest.raises(ShardError, match=r"class names \['LlamaBlock'\] match no module"):
        strategy_for(activation_checkpointing=["LlamaBlock"]).prepare_model(build("llama"), is_training=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "config", [{}, {"activation_checkpointing": ["LlamaDecoderLayer"]}], ids=["alone", "beside ours"]
)
def test_gradient_checkpointing_that_was_enabled_earlier_keeps_working(config):
    def grads(enable, config):
        model = build("llama")
        if enable:
            model.gradient_checkpointing_enable()
        strategy = strategy_for(**config)
        strategy.prepare_model(model, is_training=True)
        strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model)
        return full_grads(model)

    plain, earlier = grads(False, {}), grads(True, config)
    assert all(torch.equal(plain[n], earlier[n]) for n in plain)


@pytest.mark.ranks(2)
def test_generate_works_before_and_after_training_steps():
    model = build("llama_tied")
    expected = copy.deepcopy(model).eval()
    strategy = strategy_for()
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.05)
    ids = tokens(torch.Generator().manual_seed(1), length=4)

    def generated(m):
        return m.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)

    model.eval()
    assert torch.equal(generated(model), generated(expected))
    model.train()
    # An evaluation between backward and step must not leave the root with weights from before the step.
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model, optimizer)
    with torch.no_grad():
        model(input_ids=ids)
    strategy.optimizer_step(optimizer, model, None)
    with torch.no_grad():
        after = model(input_ids=ids).logits
    plain = transformers.LlamaForCausalLM(expected.config)
    plain.load_state_dict({**{n: full(p) for n, p in model.state_dict().items()}})
    with torch.no_grad():
        assert torch.allclose(after, plain(input_ids=ids).logits, atol=1e-6)
        assert not torch.allclose(after, expected(input_ids=ids).logits, atol=1e-3)


@pytest.mark.ranks(2)
def test_an_in_place_operation_on_a_units_output_keeps_the_gradients():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Halves() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                x *= 0.5
            return x

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 16)

        def forward(self, x):
            return self.linear(torch.tanh(x))[:, :8]

    model = InPlace()
    expected = copy.deepcopy(model)
    x = torch.randn(4, 8)
    expected(x).square().sum().backward()
    strategy = strategy_for()
    strategy.prepare_model(model, is_training=True)
    strategy.backward(model(x).square().sum(), model)
    assert_close(full_grads(model), {n: p.grad for n, p in expected.named_parameters()}, 1e-6, "gradient")


@pytest.mark.ranks(4)
def test_hybrid_sharding_splits_over_part_of_the_ranks():
    strategy = strategy_for()
    model = strategy.prepare_model(build("llama"), is_training=True, shard_size=2)
    mesh = model.lm_head.weight.device_mesh
    assert mesh.mesh_dim_names == ("replicate", "shard")
    assert tuple(mesh.shape) == (2, 2)
    assert model.lm_head.weight.to_local().shape == (48, 32)
    assert build_mesh(2) is build_mesh(2)
    assert build_mesh(2) is mesh
    small = strategy.prepare_model(build("llama"), shard_size="auto")
    assert tuple(small.lm_head.weight.device_mesh.shape) == (4, 1)
    trained = strategy.prepare_model(build("llama"), is_training=True, shard_size="auto")
    assert tuple(trained.lm_head.weight.device_mesh.shape) == (4,)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shard_size", [3, 8, 0, -2, 1.5, True])
def test_a_shard_size_that_does_not_divide_the_world_is_refused_on_every_rank(shard_size):
    with pytest.raises(MeshError, match=r"expected a divisor of the world size 4\. Use one of \[1, 2, 4\]"):
        strategy_for().prepare_model(build("llama"), shard_size=shard_size)


@pytest.mark.ranks(2)
def test_a_wrong_class_name_is_refused_on_every_rank():
    with pytest.raises(ShardError, match="Did you mean 'LlamaDecoderLayer'"):
        strategy_for(block_class_names=["LlamaDecoderLayr"]).prepare_model(build("llama"))


@pytest.mark.ranks(3)
def test_ranks_with_different_weights_are_refused_on_every_rank():
    model = build("llama", seed=dist.get_rank() // 2)
    with pytest.raises(ShardError, match=r"parameters differ between the ranks, model\.embed_tokens\.weight first"):
        strategy_for().prepare_model(model)
    assert not isinstance(model, FSDPModule)


@pytest.mark.ranks(3)
def test_ranks_with_different_models_are_refused_on_every_rank():
    model = build("llama_tied" if dist.get_rank() == 2 else "llama")
    with pytest.raises(ShardError, match=r"ranks \[2\] built another model than rank 0"):
        strategy_for().prepare_model(model)


@pytest.mark.ranks(2)
def test_cpu_offload_and_free_functions_work_without_the_class():
    model = build("llama")
    shard_model(model, build_mesh(), is_training=True, bf16=True, cpu_offload=True, prefetch_depth=1)
    loss_of("llama", model, batch_of("llama", 0, 0)).backward()
    assert all(p.grad.device.type == "cpu" for p in model.parameters())


@pytest.mark.ranks(1)
def test_uneven_and_empty_shards_are_kept_whole():
    model = shard_model(build("mlp"), bf16=False)
    assert full(model.last.weight).shape == (1, 5)
