"""LoRA, with peft's own models: sharded, trained, saved, merged on the way out, streamed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from models import batch_of, build, loss_of, next_token_loss, tokens
from peft import LoraConfig, get_peft_model
from reference import (
    CountCollectives,
    Unsharded,
    assert_close,
    assert_parameters_close,
    full_grads,
    full_parameters,
    same_on_all_ranks,
)
from test_export import assert_same_files, files_of
from test_shard import Actor, MixedPrecision
from torch.distributed.fsdp import FSDPModule

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, save_model
from fsdp2_strategy.names import named_parameters
from fsdp2_strategy.offload import offload, reload
from fsdp2_strategy.rollout import stream_weights, weight_checksums

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
WORLDS = [pytest.param(n, marks=pytest.mark.ranks(n), id=f"{n}ranks") for n in (1, 2, 3, 4)]
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


def strategy_for(**config):
    return FSDPV2Strategy(config=StrategyConfig(**{"bf16": False, **config}))


def adapted(name="llama", dtype=torch.float32, *, r=3, **options):
    """Build a PEFT model whose adapters have begun to learn: those of peft begin with B = 0."""
    options = {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"], "lora_alpha": 7, **options}
    model = get_peft_model(build(name).to(dtype), LoraConfig(r=r, **options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name or "lora_embedding_A" in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.train()


def double(batch, dtype):
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def train_beside_reference(model, *, name="llama", dtype, tolerances, shard_size=-1, accumulation=1, **config):
    gradient_tolerance, parameter_tolerance = tolerances
    world, rank = dist.get_world_size(), dist.get_rank()

    def loss(m, batch):
        return loss_of(name, m, double(batch, dtype))

    unsharded = Unsharded(model, loss, max_norm=0.5, **OPTIONS)
    frozen = {n: p.detach().clone() for n, p in named_parameters(model).items() if not p.requires_grad}
    strategy = strategy_for(train_batch_size=world * accumulation, max_norm=0.5, **config)
    strategy.prepare_model(model, is_training=True, shard_size=shard_size)
    optimizer = strategy.create_optimizer(model, **OPTIONS)
    for step in range(3):
        micro = [[batch_of(name, step * accumulation + a, r) for r in range(world)] for a in range(accumulation)]
        expected_losses, expected_norm = unsharded.step([b for row in micro for b in row], scale=1 / accumulation)
        for a in range(accumulation):
            value = loss(model, micro[a][rank])
            assert value.item() == pytest.approx(expected_losses[a * world + rank], rel=gradient_tolerance)
            strategy.backward(value, model, optimizer)
            grads = full_grads(model) if a == accumulation - 1 else None
            result = strategy.optimizer_step(optimizer, model)
        assert_close(grads, unsharded.grads, gradient_tolerance, "gradient")
        assert result.grad_norm == pytest.approx(expected_norm, rel=gradient_tolerance)
        assert same_on_all_ranks(result.grad_norm)
        assert_parameters_close(full_parameters(model), full_parameters(unsharded.model), parameter_tolerance)
    now = full_parameters(model)
    assert frozen and all(torch.equal(now[n], value) for n, value in frozen.items())


# --- training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
@pytest.mark.parametrize("world", WORLDS)
def test_float64_training_equals_peft_unsharded(world, name):
    model = adapted(name, torch.float64, target_modules="all-linear").double()
    train_beside_reference(model, name=name, dtype=torch.float64, tolerances=(1e-10, 1e-10))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_moe"])
@pytest.mark.parametrize("world", WORLDS)
def test_float32_training_equals_peft_unsharded(world, name):
    model = adapted(name, target_modules=["q_proj", "qkv", "v_proj"])
    train_beside_reference(model, name=name, dtype=torch.float32, tolerances=(1e-5, 2e-4))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shard_size", [2, 1])
def test_accumulation_on_replicas_equals_peft_unsharded(shard_size):
    train_beside_reference(
        adapted(dtype=torch.float64).double(),
        dtype=torch.float64,
        tolerances=(1e-10, 1e-10),
        shard_size=shard_size,
        accumulation=2,
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "config",
    [
        {"activation_checkpointing": ["LlamaDecoderLayer"]},
        {"cpu_offload": True},
        {"prefetch_depth": 1},
        {"block_class_names": ["LlamaDecoderLayer"]},
        {"keep_fp32": ["lora_"]},
    ],
    ids=str,
)
def test_how_a_peft_model_is_sharded_changes_no_number(config):
    dtype, tolerances = (torch.float32, (1e-5, 2e-4)) if "keep_fp32" in config else (torch.float64, (1e-10, 1e-10))
    model = adapted(dtype=dtype)
    train_beside_reference(model.to(dtype), dtype=dtype, tolerances=tolerances, **config)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        {"use_rslora": True, "bias": "lora_only"},
        {"use_dora": True},
    ],
    ids=str,
)
def test_other_kinds_of_adapters_train_as_peft_does_unsharded(options):
    model = adapted(dtype=torch.float64, **options).double()
    train_beside_reference(model, dtype=torch.float64, tolerances=(1e-10, 1e-10))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("masters_in_optimizer", [False, True])
def test_bf16_base_weights_and_fp32_adapters_train_as_the_same_arithmetic_does_unsharded(masters_in_optimizer):
    model = adapted(dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    if masters_in_optimizer:  # masters begin as the bf16 weights
        for p in model.parameters():
            p.data = p.data.to(torch.bfloat16).to(p.dtype)
    reference = MixedPrecision(model)
    strategy = strategy_for(bf16=True, use_mp_opt=masters_in_optimizer)
    strategy.prepare_model(model, is_training=True)
    stored = {p.requires_grad: p.dtype for p in model.parameters()}
    assert stored == {False: torch.bfloat16, True: torch.bfloat16 if masters_in_optimizer else torch.float32}
    for r in range(2):
        expected = loss_of("llama", reference, batch_of("llama", 0, r))
        (expected / 2).backward()
        if r == dist.get_rank():
            expected_loss = expected.item()
    loss = loss_of("llama", model, batch_of("llama", 0, dist.get_rank()))
    assert loss.item() == expected_loss
    strategy.backward(loss, model)
    expected_grads = {n: p.grad for n, p in named_parameters(reference.inner).items() if p.grad is not None}
    grads = full_grads(model)
    assert {g.dtype for g in grads.values()} == {torch.float32}
    assert_close(grads, expected_grads, 1e-6, "gradient")


@pytest.mark.ranks(2)
def test_the_base_has_no_masters_no_state_and_no_gradient_traffic():
    model = adapted(dtype=torch.bfloat16)
    strategy = strategy_for(bf16=True)
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, **OPTIONS)
    loss = loss_of("llama", model, batch_of("llama", 0, dist.get_rank()))
    with ReducedElements() as reduced:
        strategy.backward(loss, model, optimizer)
    adapters = {p for p in model.parameters() if p.requires_grad}
    assert reduced.counts["reduce_scatter_base"] == 2, "one for each block, none for the root, which has no adapter"
    padded = sum(-(-p.shape[0] // 2) * 2 * p.shape[1:].numel() for p in adapters)
    assert reduced.elements == padded, "adapters alone travel"
    strategy.optimizer_step(optimizer, model)
    assert set(optimizer.state) == adapters
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in model.parameters() if p not in adapters)


class ReducedElements(CountCollectives):
    """Count what is given to reduce-scatters, too."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "reduce_scatter" in func._schema.name:
            self.elements += args[1].numel()
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bf16", [False, True])
def test_disabled_adapters_give_the_reference_before_and_between_training_steps(bf16):
    model = adapted(dtype=torch.bfloat16 if bf16 else torch.float32)
    strategy = strategy_for(bf16=bf16)
    twin_run = strategy.prepare_model(copy.deepcopy(model), is_training=True)
    base = strategy.prepare_model(build("llama").to(torch.bfloat16 if bf16 else torch.float32).train())
    ids = tokens(torch.Generator().manual_seed(1 + dist.get_rank()))
    actor = strategy.prepare_model(Actor(model), is_training=True)
    optimizers = strategy.create_optimizer(actor, lr=1e-2), strategy.create_optimizer(twin_run, lr=1e-2)
    with torch.no_grad():
        expected = base(input_ids=ids).logits
    for _ in range(3):
        with torch.no_grad(), actor.model.disable_adapter():
            reference = actor(ids)
        assert torch.equal(reference, expected)
        logits = actor(ids)
        assert not torch.equal(logits, expected)
        with torch.no_grad(), actor.model.disable_adapter():  # also between forward and backward
            assert torch.equal(actor(ids), expected)
        strategy.backward(next_token_loss(logits, ids), actor, optimizers[0])
        strategy.backward(next_token_loss(twin_run(input_ids=ids).logits, ids), twin_run, optimizers[1])
        norms = [strategy.optimizer_step(o, m).grad_norm for o, m in zip(optimizers, (actor, twin_run), strict=True)]
        assert norms[0] == norms[1]
    trained, undisturbed = full_parameters(actor.model), full_parameters(twin_run)
    assert all(torch.equal(trained[n], undisturbed[n]) for n in undisturbed)


@pytest.mark.ranks(2)
def test_a_peft_model_is_sharded_block_by_block_in_an_actor_wrapper():
    strategy = strategy_for()
    actor = strategy.prepare_model(Actor(adapted()), is_training=True)
    assert strategy.unwrap_model(actor) is actor.model
    units = [n for n, m in actor.model.named_modules() if isinstance(m, FSDPModule)]
    assert "base_model.model.model.layers.0" in units and "base_model.model.model.layers.1" in units


# --- out: merged ---------------------------------------------------------------------------------------------------


def merged_by_peft(model, folder):
    """Write what peft makes of the whole model; one rank does."""
    if dist.get_rank() == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
    dist.barrier()
    return folder


def trained_a_step(model, name="llama", shard_size=-1, **config):
    """Shard a model and train it one step, so that no value is one of the beginning; return it, and it unsharded."""
    strategy = strategy_for(**config)
    whole = copy.deepcopy(model)
    strategy.prepare_model(model, is_training=True, shard_size=shard_size)
    optimizer = strategy.create_optimizer(model, **OPTIONS)
    strategy.backward(loss_of(name, model, batch_of(name, 0, 0)), model, optimizer)
    strategy.optimizer_step(optimizer, model)
    with torch.no_grad():
        for parameter_name, value in full_parameters(model).items():
            whole.get_parameter(parameter_name).data = value.clone()
    return strategy, model, whole


KINDS = {
    "linear": {},
    "all": {"target_modules": "all-linear", "use_rslora": True},
    "biases": {"target_modules": ["q_proj", "up_proj"], "lora_bias": False, "bias": "all"},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    "modules": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "dora": {"use_dora": True},
    "half": {"dtype": torch.bfloat16, "target_modules": "all-linear"},
    "transposed": {"name": "gpt2", "target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True},
    "vision": {"name": "qwen2_vl", "target_modules": ["qkv", "q_proj", "proj"]},
    "mixture": {"name": "mixtral", "target_modules": ["q_proj", "v_proj"]},
    "experts": {
        "name": "qwen3_moe",
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


@pytest.mark.parametrize("world", WORLDS)
def test_an_export_is_what_peft_merges_and_the_model_stays_as_it_is(world, tmp_path):
    for kind, options in KINDS.items():
        name = options.get("name", "llama")
        strategy, model, whole = trained_a_step(adapted(**options), name, shard_size=2 if world == 4 else -1)
        merged_by_peft(whole, tmp_path / kind / "peft")
        before = full_parameters(model)
        strategy.save_model(model, None, tmp_path / kind / "out")
        assert_same_files(tmp_path / kind / "out", tmp_path / kind / "peft")
        after = full_parameters(model)
        assert list(before) == list(after) and all(torch.equal(after[n], value) for n, value in before.items())
        assert not any(getattr(module, "merged", False) for module in model.modules())


@pytest.mark.parametrize("world", WORLDS)
def test_a_stream_gives_what_an_export_writes(world, tmp_path):
    for kind in ("all", "modules", "experts"):
        name = KINDS[kind].get("name", "llama")
        _, model, _ = trained_a_step(adapted(**KINDS[kind]), name, shard_size=2 if world == 4 else -1)
        for dtype, bucket_bytes in ((torch.bfloat16, 512 << 20), (None, 6000)):
            folder = tmp_path / f"{kind}{dtype}"
            save_model(model, None, folder, dtype=dtype)
            written = files_of(folder)
            assert weight_checksums(stream_weights(model, dtype=dtype, bucket_bytes=bucket_bytes)) == weight_checksums(
                written.items()
            )
        offload(model)
        assert weight_checksums(stream_weights(model, dtype=None)) == weight_checksums(written.items())
        save_model(model, None, tmp_path / f"{kind}away")
        assert_same_files(tmp_path / f"{kind}away", folder)
        reload(model)


def test_a_plain_model_of_peft_streams_merged():
    model = adapted(target_modules="all-linear")
    streamed = dict(stream_weights(model, dtype=None))
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    assert streamed.keys() == merged.keys() and all(torch.equal(streamed[n], t) for n, t in merged.items())
