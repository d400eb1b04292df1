"""LoRA, with peft's own models: sharded, trained, saved, merged on the way out, streamed."""

from __future__ import annotations

import copy
import gc
import io
import json
import time
import warnings
from contextlib import nullcontext, redirect_stderr
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.folders import assert_same_tensors, tensors_in
from helpers.frames import keeping_frames
from helpers.models import Actor, Critic, batch_of, build, loss_of, next_token_loss, on_device, tokens
from helpers.reference import (
    CountCollectives,
    MixedPrecision,
    Unsharded,
    assert_close,
    assert_parameters_close,
    full_grads,
    full_parameters,
    same_on_all_ranks,
)
from helpers.training import assert_same, full_state, take_steps
from helpers.versions import needs_accepted_peft
from helpers.worlds import matrix, some, worlds
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from fsdp2_strategy import (
    FSDPV2Strategy,
    StrategyConfig,
    list_checkpoints,
    load_weights,
    save_model,
    shard_model,
    sizes,
)
from fsdp2_strategy.checkpoint import components
from fsdp2_strategy.cli import main
from fsdp2_strategy.errors import CheckpointError, RolloutError
from fsdp2_strategy.hf import export
from fsdp2_strategy.hf.peft import merge
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.model.offloading import offload, reload
from fsdp2_strategy.rollout import TransformersEngine, stream_adapter, stream_weights, weight_checksums
from fsdp2_strategy.storage import write
from fsdp2_strategy.storage.safetensors_format import read_header

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


def strategy_for(**config):
    return FSDPV2Strategy(config=StrategyConfig(**{"bf16": False, **config}))


def adapted(name="llama", dtype=torch.float32, *, r=3, **options):
    """Build a PEFT model whose adapters have begun to learn: those of peft begin with B = 0."""
    options = {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"], "lora_alpha": 7, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of ties, and of what cannot be merged
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
    frozen = {n: p.detach().to("cpu", copy=True) for n, p in named_parameters(model).items() if not p.requires_grad}
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


@pytest.mark.parametrize(("world", "name"), matrix((1, 2, 3, 4), ["llama", "llama_tied"], usual=["llama_tied"]))
def test_float64_training_equals_peft_unsharded(world, name):
    model = adapted(name, torch.float64, target_modules="all-linear").double()
    train_beside_reference(model, name=name, dtype=torch.float64, tolerances=(1e-10, 1e-10))


@pytest.mark.full
@pytest.mark.parametrize(("world", "name"), matrix((2, 3), ["qwen2_vl", "qwen3_moe"], usual=["qwen2_vl"]))
def test_float32_training_equals_peft_unsharded(world, name):
    model = adapted(name, target_modules=["q_proj", "qkv", "v_proj"])
    train_beside_reference(model, name=name, dtype=torch.float32, tolerances=(1e-5, 2e-4))


@pytest.mark.full
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
    some(
        [
            {"activation_checkpointing": ["LlamaDecoderLayer"]},
            {"cpu_offload": True},
            {"prefetch_depth": 1},
            {"block_class_names": ["LlamaDecoderLayer"]},
            {"keep_fp32": ["lora_"]},
        ],
        [{"cpu_offload": True}, {"keep_fp32": ["lora_"]}],
    ),
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
        {"use_dora": True},
        {"trainable_token_indices": [1, 2, 5]},
        *(
            pytest.param(options, marks=pytest.mark.full)
            for options in (
                {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
                {"use_rslora": True, "bias": "lora_only"},
                {"use_dora": True, "target_modules": ["embed_tokens", "lm_head"]},
            )
        ),
    ],
    ids=str,
)
def test_other_kinds_of_adapters_train_as_peft_does_unsharded(options):
    model = adapted(dtype=torch.float64, **options).double()
    train_beside_reference(model, dtype=torch.float64, tolerances=(1e-10, 1e-10))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checkpointed", [[], ["Qwen3MoeDecoderLayer"]], ids=str)
def test_adapted_experts_train_as_peft_does_unsharded(checkpointed):
    options = {key: value for key, value in KINDS["experts"].items() if key != "name"}
    train_beside_reference(
        adapted("qwen3_moe", **options),
        name="qwen3_moe",
        dtype=torch.float32,
        tolerances=(1e-5, 2e-4),
        activation_checkpointing=checkpointed,
    )


@pytest.mark.ranks(2)
def test_transposed_layers_train_as_peft_does_unsharded():
    model = adapted("gpt2", torch.float64, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, use_dora=True)
    train_beside_reference(model.double(), name="gpt2", dtype=torch.float64, tolerances=(1e-10, 1e-10))


@pytest.mark.ranks(2)
def test_adapters_that_are_kept_in_fp32_are_computed_with_in_fp32():
    model = adapted(dtype=torch.bfloat16)
    reference = MixedPrecision(model)
    strategy = strategy_for(bf16=True, keep_fp32=["lora_"])
    strategy.prepare_model(model, is_training=True)
    seen = []
    layer = model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"]
    layer.register_forward_hook(lambda module, args, _: seen.append((args[0].dtype, module.weight.dtype)))
    for r in range(2):
        (loss_of("llama", reference, batch_of("llama", 0, r)) / 2).backward()
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model)
    assert seen == [(torch.float32, torch.float32)]
    expected = {n: p.grad for n, p in named_parameters(reference.inner).items() if p.grad is not None}
    assert_close(full_grads(model), expected, 3e-2, "gradient")


@pytest.mark.ranks(2)
def test_a_rank_whose_frames_another_thread_keeps_runs_the_adapters_as_the_other_does():
    """An adapter's dtype is read before it runs."""
    model = adapted(dtype=torch.bfloat16)
    strategy = strategy_for(bf16=True, keep_fp32=["lora_"])
    strategy.prepare_model(model, is_training=True)
    with keeping_frames() if dist.get_rank() else nullcontext(int) as release:
        for step in range(6):
            strategy.backward(loss_of("llama", model, batch_of("llama", step, dist.get_rank())), model)
            release()


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


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "config",
    some([{"bf16": False}, {"bf16": True}, {"bf16": True, "use_mp_opt": True}], [{"bf16": True, "use_mp_opt": True}]),
    ids=str,
)
def test_disabled_adapters_give_the_reference_before_and_between_training_steps(config):
    bf16 = config["bf16"]
    model = adapted(dtype=torch.bfloat16 if bf16 else torch.float32)
    strategy = strategy_for(**config)
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


@pytest.mark.full
@pytest.mark.parametrize("world", worlds(2, 3))
def test_an_export_is_what_peft_merges_and_the_model_stays_as_it_is(world, tmp_path):
    for kind in KINDS if dist.get_world_size() == 2 else ("all", "embeddings", "transposed", "experts"):
        options = KINDS[kind]
        name = options.get("name", "llama")
        strategy, model, whole = trained_a_step(adapted(**options), name, shard_size=2 if world == 4 else -1)
        merged_by_peft(whole, tmp_path / kind / "peft")
        before = full_parameters(model)
        strategy.save_model(model, None, tmp_path / kind / "out")
        assert_same_tensors(tmp_path / kind / "out", tmp_path / kind / "peft")
        after = full_parameters(model)
        assert list(before) == list(after) and all(torch.equal(after[n], value) for n, value in before.items())
        assert not any(getattr(module, "merged", False) for module in model.modules())


@pytest.mark.full
@pytest.mark.parametrize("world", worlds(2, 3, usual=(2,)))
def test_a_stream_gives_what_an_export_writes(world, tmp_path):
    for kind in ("all", "modules", "experts"):
        name = KINDS[kind].get("name", "llama")
        _, model, _ = trained_a_step(adapted(**KINDS[kind]), name, shard_size=2 if world == 4 else -1)
        for dtype, bucket_bytes in ((torch.bfloat16, 512 << 20), (None, 6000)):
            folder = tmp_path / f"{kind}{dtype}"
            save_model(model, None, folder, dtype=dtype)
            written = tensors_in(folder)
            assert weight_checksums(stream_weights(model, dtype=dtype, bucket_bytes=bucket_bytes)) == weight_checksums(
                written.items()
            )
        offload(model)
        assert weight_checksums(stream_weights(model, dtype=None)) == weight_checksums(written.items())
        save_model(model, None, tmp_path / f"{kind}away")
        assert_same_tensors(tmp_path / f"{kind}away", folder)
        reload(model)


@pytest.mark.ranks(2)
def test_merged_weights_replace_adapters_that_were_exported_before(tmp_path):
    strategy = strategy_for()
    model = strategy.prepare_model(adapted(target_modules="all-linear"), is_training=True)
    strategy.save_model(model, None, tmp_path, merge_adapters=False)
    assert (tmp_path / "adapter_config.json").exists()
    strategy.save_model(model, None, tmp_path)
    dist.barrier()
    assert not list(tmp_path.glob("adapter_*")), "from_pretrained would apply them a second time"


def test_a_plain_model_of_peft_streams_merged():
    model = adapted(target_modules="all-linear")
    streamed = dict(stream_weights(model, dtype=None))
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    assert streamed.keys() == merged.keys() and all(torch.equal(streamed[n], t) for n, t in merged.items())


@pytest.mark.ranks(2)
def test_an_adapter_of_one_of_two_tied_weights_unties_the_export(tmp_path):
    """peft merges it into both, which is another model than the one that was trained."""
    strategy, model, _ = trained_a_step(adapted("llama_tied", target_modules=["embed_tokens", "q_proj"]), "llama_tied")
    ids = tokens(torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    strategy.save_model(model, None, tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not opened.config.tie_word_embeddings and model.config.tie_word_embeddings
    with torch.no_grad():
        assert torch.allclose(opened(ids).logits, expected, atol=1e-5)
    engine = TransformersEngine(model, dtype=None)
    engine.update_weights(stream_weights(model, dtype=None))
    with torch.no_grad():
        assert torch.equal(engine.model(ids).logits, opened(ids).logits)


def with_a_second_adapter(model):
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "o_proj"]))
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".second." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("active", [["default", "second"], ["second"]])
def test_the_active_adapters_are_merged_and_no_others(active, tmp_path):
    model = with_a_second_adapter(adapted())
    model.base_model.set_adapter(active)
    strategy, model, whole = trained_a_step(model)
    merged_by_peft(whole, tmp_path / "peft")
    strategy.save_model(model, None, tmp_path / "out")
    assert_same_tensors(tmp_path / "out", tmp_path / "peft")
    with model.disable_adapter():  # for a moment: it says nothing of what is exported
        strategy.save_model(model, None, tmp_path / "again")
    assert_same_tensors(tmp_path / "again", tmp_path / "peft")


def export_in_small_cuts(folder):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sizes, "MERGED_ROWS", 16)
        patched.setattr(sizes, "MERGED_EXPERTS", 2)
        for kind in ("all", "embeddings", "transposed", "experts", "dora"):
            model = adapted(**KINDS[kind])
            merged_by_peft(model, folder / f"peft_{kind}")
            shard_model(model, config=StrategyConfig(bf16=False))
            save_model(model, None, folder / f"{kind}{dist.get_world_size()}")


@pytest.mark.full
def test_large_weights_are_merged_in_cuts_that_are_the_same_on_any_number_of_ranks(run_on, tmp_path):
    for world_size in (1, 2, 3, 4):
        run_on(world_size, export_in_small_cuts, folder=tmp_path)
    for kind in ("all", "embeddings", "transposed", "experts", "dora"):
        expected = tensors_in(tmp_path / f"peft_{kind}")
        for world_size in (1, 2, 3, 4):
            written = tensors_in(tmp_path / f"{kind}{world_size}")
            assert written.keys() == expected.keys()
            assert all(torch.equal(t, tensors_in(tmp_path / f"{kind}1")[n]) for n, t in written.items()), kind
            # A product of 16 rows may round otherwise than that of all: by a unit in the last place of the delta.
            assert all(torch.allclose(t, expected[n], rtol=1e-6, atol=1e-7) for n, t in written.items())


@pytest.mark.ranks(2)
@pytest.mark.real_sizes
def test_weights_are_merged_once_each_and_a_few_at_a_time(tmp_path):
    model = shard_model(
        adapted("qwen3_moe", **{k: v for k, v in KINDS["experts"].items() if k != "name"}),
        config=StrategyConfig(bf16=False),
    )
    merged, lists = [], []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sizes, "COMPUTED_BYTES", 1)
        own = merge._Rows.merged
        patched.setattr(merge._Rows, "merged", lambda rows: merged.append(rows.key) or own(rows))
        patched.setattr(export, "write_all", lambda jobs: lists.append(len(jobs)) or write.write_all(jobs))
        with CountCollectives() as collectives:
            save_model(model, None, tmp_path)
        adapted_weights = 2 * 3
        assert len(merged) == adapted_weights and len(lists) == adapted_weights
        gathers = collectives.counts["allreduce"]
        del merged[:]
        assert dict(stream_weights(model)) and len(merged) == adapted_weights
    plain = shard_model(build("qwen3_moe"), config=StrategyConfig(bf16=False))
    with CountCollectives() as collectives:
        save_model(plain, None, tmp_path / "plain")
    assert gathers - collectives.counts["allreduce"] == 2, "one of the adapters, one to end the phase alike"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        (
            "llama",
            {"use_dora": True, "target_modules": ["embed_tokens"]},
            r"embed_tokens.*Embedding with DoraEmbedding",
        ),
        (
            "gpt2",
            {"use_dora": True, "target_modules": ["c_fc"], "fan_in_fan_out": True},
            r"c_fc.*Linear with DoraLinear",
        ),
        ("llama", {"trainable_token_indices": [1, 2]}, r"embed_tokens.*TrainableTokensLayer"),
        ("llama", {"lora_bias": True}, r"q_proj.*Linear without a bias"),
    ],
    ids=str,
)
def test_what_cannot_be_merged_is_named_on_all_ranks(name, options, match, tmp_path):
    model = shard_model(adapted(name, **options), config=StrategyConfig(bf16=False))
    with pytest.raises(CheckpointError, match=f"cannot merge the adapters of .*{match}.*merge_adapters=False"):
        save_model(model, None, tmp_path)
    with pytest.raises(RolloutError, match="cannot merge the adapters of"):
        list(stream_weights(model))
    save_model(model, None, tmp_path, merge_adapters=False)


@pytest.mark.ranks(2)
def test_an_engine_gets_the_merged_weights_of_an_actor_and_verifies_them(tmp_path):
    strategy = strategy_for(bf16=True)
    actor = strategy.prepare_model(Actor(adapted(dtype=torch.bfloat16, target_modules="all-linear")), is_training=True)
    engine = strategy.setup_inference_engine(engine_type="transformers", actor=actor)
    assert not any("lora" in name for name, _ in engine.model.named_parameters())
    optimizer = strategy.create_optimizer(actor, lr=1e-2)
    ids = tokens(torch.Generator().manual_seed(1 + dist.get_rank()))
    strategy.backward(next_token_loss(actor(ids), ids), actor, optimizer)
    strategy.optimizer_step(optimizer, actor)
    strategy.offload_model(actor)
    strategy.update_engine_weights(actor, verify=True)
    strategy.reload_model(actor)
    strategy.save_model(actor, None, tmp_path)
    assert weight_checksums(tensors_in(tmp_path).items()) == engine.weight_checksums()
    opened = on_device(AutoModelForCausalLM.from_pretrained(tmp_path))
    sequences = engine.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(sequences, opened.generate(ids, max_new_tokens=5, do_sample=False))


@pytest.mark.ranks(2)
def test_a_wrapper_with_a_head_of_its_own_is_written_with_merged_weights(tmp_path):
    torch.manual_seed(0)
    critic = Critic(adapted())
    merged = copy.deepcopy(critic.base_model).merge_and_unload().state_dict()
    expected = {f"base_model.{n}": t for n, t in merged.items()}
    expected["value_head.weight"], expected["value_head.bias"] = (p.clone() for p in critic.value_head.parameters())
    shard_model(critic, config=StrategyConfig(bf16=False), is_training=True)
    save_model(critic, None, tmp_path)
    written = tensors_in(tmp_path)
    assert written.keys() == expected.keys() and all(torch.equal(written[n], t) for n, t in expected.items())
    with pytest.raises(CheckpointError, match=r"trains .*value_head\.weight, value_head\.bias\) as well"):
        save_model(critic, None, tmp_path / "adapters", merge_adapters=False)


# --- out: adapters alone -------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("world", worlds(2, 3, usual=(2,)))
def test_adapters_alone_are_what_peft_saves_and_peft_loads_them(world, tmp_path):
    for kind in ("all", "biases", "embeddings", "modules", "dora", "half", "experts"):
        options = KINDS[kind]
        name, folder = options.get("name", "llama"), tmp_path / kind
        model = with_a_second_adapter(adapted(**options)) if kind == "all" else adapted(**options)
        strategy, model, whole = trained_a_step(model, name, shard_size=2 if world == 4 else -1)
        strategy.save_model(model, None, folder / "out", merge_adapters=False)
        if dist.get_rank() == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                whole.save_pretrained(folder / "peft")
            for own in [".", "second"] if kind == "all" else ["."]:
                assert_same_tensors(folder / "out" / own, folder / "peft" / own)
                config = "adapter_config.json"
                ours, theirs = (json.loads((folder / w / own / config).read_text()) for w in ("out", "peft"))
                assert ours == theirs
            base = build(name).to(options.get("dtype", torch.float32))
            loaded = PeftModel.from_pretrained(base, folder / "out").state_dict()
            expected = whole.state_dict()
            missing = {n for n in expected if ".second." in n}
            assert loaded.keys() == expected.keys() - missing
            assert all(torch.equal(loaded[n], expected[n]) for n in loaded)
        dist.barrier()


@pytest.mark.ranks(2)
def test_adapters_alone_are_of_one_model_that_has_some(tmp_path):
    with pytest.raises(CheckpointError, match="LlamaForCausalLM contains 0 peft models, expected one"):
        save_model(shard_model(build("llama"), config=StrategyConfig(bf16=False)), None, tmp_path, merge_adapters=False)
    model = adapted()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    shard_model(model, config=StrategyConfig(bf16=False), is_training=True)
    with pytest.raises(CheckpointError, match=r"it trains .*model\.norm\.weight\) as well"):
        save_model(model, None, tmp_path, merge_adapters=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks(2)
def test_a_peft_model_may_be_the_actor_itself(tmp_path):
    strategy, model = strategy_for(), adapted()
    (model, optimizer, _), *_ = strategy.prepare_models_and_optimizers(model, None, None, None, {}, 10)
    ids = tokens(torch.Generator().manual_seed(1))
    strategy.backward(next_token_loss(model(input_ids=ids).logits, ids), model, optimizer)
    strategy.optimizer_step(optimizer, model)
    whole = adapted()
    for name, value in full_parameters(model).items():
        whole.get_parameter(name).data = value
    merged_by_peft(whole, tmp_path / "peft")
    strategy.save_model(model, None, tmp_path / "out")
    assert_same_tensors(tmp_path / "out", tmp_path / "peft")
    strategy.save_model(model, None, tmp_path / "adapters", merge_adapters=False)
    loaded = PeftModel.from_pretrained(build("llama"), tmp_path / "adapters").state_dict()
    assert all(torch.equal(loaded[n], t) for n, t in whole.state_dict().items())


@needs_accepted_peft
@pytest.mark.ranks(2)
def test_a_model_into_which_peft_put_adapters_is_no_other(tmp_path):
    """transformers' own ``add_adapter`` puts no PeftModel around the model."""
    model = build("llama")
    model.add_adapter(LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    whole = get_peft_model(build("llama"), LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))
    whole.load_state_dict({f"base_model.model.{n}": t.clone() for n, t in model.state_dict().items()})
    merged_by_peft(whole, tmp_path / "peft")
    shard_model(model, config=StrategyConfig(bf16=False), is_training=True)
    save_model(model, None, tmp_path / "out")
    assert_same_tensors(tmp_path / "out", tmp_path / "peft")
    save_model(model, None, tmp_path / "adapters", merge_adapters=False)
    loaded = PeftModel.from_pretrained(build("llama"), tmp_path / "adapters").state_dict()
    assert all(torch.equal(loaded[n], t) for n, t in whole.state_dict().items())


# --- checkpoints ---------------------------------------------------------------------------------------------------


def folder_with(path, seed=0):
    if dist.get_rank() == 0:
        build("llama", seed).save_pretrained(path)
    dist.barrier()
    return path


def start(folder, *, seed=0, meta_init=False, bf16=True, **options):
    """Put adapters into a model from a folder, the way that a trainer does."""
    strategy = strategy_for(bf16=bf16, max_norm=1.0)
    torch.manual_seed(seed)
    options = {"target_modules": "all-linear", **options}
    with strategy.init_model_context(meta_init=meta_init):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if bf16 else torch.float32)
        base.name_or_path = str(folder)
        actor = Actor(get_peft_model(base, LoraConfig(r=3, **options)))
    strategy.prepare_model(actor.train(), is_training=True)
    return strategy, actor, strategy.create_optimizer(actor, lr=1e-2)


def train(strategy, actor, optimizer, steps):
    """Take steps on one batch, which every rank has, so that the number of ranks does not matter."""
    batches = (tokens(torch.Generator().manual_seed(step), batch=4) for step in steps)
    return take_steps(strategy, actor, optimizer, (next_token_loss(actor(ids), ids) for ids in batches))


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize("bf16", some([False, True], [True]))
@pytest.mark.parametrize("options", some([{}, {"modules_to_save": ["lm_head"]}], [{}]), ids=str)
def test_a_checkpoint_of_adapters_alone_resumes_to_the_bit(bf16, options, tmp_path):
    folder = folder_with(tmp_path / "base")
    run = start(folder, bf16=bf16, **options)
    train(*run, range(2))
    run[0].save_ckpt(run[1].model, tmp_path / "ckpts", only_trainable=True)
    [saved] = list_checkpoints(tmp_path / "ckpts")
    held = {name for file in (saved.path / "trainable").iterdir() for name in read_header(file)}
    assert held == {n for n, p in run[1].model.named_parameters() if p.requires_grad}
    expected = train(*run, range(2, 5))
    again = start(folder, seed=1, bf16=bf16, **options)  # other adapters, had they not been loaded
    again[0].load_ckpt(again[1].model, tmp_path / "ckpts")
    assert train(*again, range(2, 5)) == expected
    assert_same(full_state(again[1].model, again[2]), full_state(run[1].model, run[2]))
    # A base model with other weights gets those of the folder.
    other = start(folder_with(tmp_path / "other", 1), seed=1, bf16=bf16, **options)
    other[0].load_ckpt(other[1].model, tmp_path / "ckpts")
    assert train(*other, range(2, 5)) == expected


def save_adapters_of_a_run(folder, ckpts):
    run = start(folder, bf16=False)
    train(*run, range(2))
    run[0].save_ckpt(run[1].model, ckpts, only_trainable=True)
    if dist.get_rank() == 0:
        state = full_state(run[1].model, run[2])
        torch.save(state, ckpts / "state")
    else:
        full_state(run[1].model, run[2])


def resume_with_adapters(folder, ckpts):
    run = start(folder, seed=1, bf16=False)
    run[0].load_ckpt(run[1].model, ckpts)
    assert_same(full_state(run[1].model, run[2]), torch.load(ckpts / "state"))


@pytest.mark.full
def test_a_checkpoint_of_adapters_alone_loads_on_any_number_of_ranks(run_on, tmp_path):
    build("llama").save_pretrained(tmp_path / "base")
    run_on(2, save_adapters_of_a_run, folder=tmp_path / "base", ckpts=tmp_path / "ckpts")
    for world_size in (1, 3, 4):
        run_on(world_size, resume_with_adapters, folder=tmp_path / "base", ckpts=tmp_path / "ckpts")


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_checkpoint_of_the_whole_resumes_to_the_bit_and_its_model_opens_as_the_base(tmp_path):
    folder = folder_with(tmp_path / "base")
    run = start(folder, bf16=False)
    train(*run, range(2))
    run[0].save_ckpt(run[1].model, tmp_path / "ckpts")
    [saved] = list_checkpoints(tmp_path / "ckpts")
    expected = train(*run, range(2, 5))
    again = start(folder_with(tmp_path / "other", 1), seed=1, bf16=False)
    again[0].load_ckpt(again[1].model, tmp_path / "ckpts")
    assert train(*again, range(2, 5)) == expected
    assert_same(full_state(again[1].model, again[2]), full_state(run[1].model, run[2]))
    opened, base = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (saved.path / "model", folder))
    assert opened.keys() == base.keys() and all(torch.equal(opened[n], t) for n, t in base.items())
    with redirect_stderr(io.StringIO()) as said:
        assert main(["export", str(saved.path), str(tmp_path / "out")]) == 2
    assert "it contains adapters" in said.getvalue() and "Pass --merge-adapters" in said.getvalue()


def save_and_export(folder, kind):
    strategy, model, _ = trained_a_step(adapted(**KINDS[kind]), KINDS[kind].get("name", "llama"))
    strategy.save_ckpt(model, folder / "ckpts")
    for name, dtype in (("same", None), ("bf16", torch.bfloat16)):
        strategy.save_model(model, None, folder / name, dtype=dtype)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_command_line_merges_adapters_as_save_model_does(kind, run_on, tmp_path):
    run_on(2, save_and_export, folder=tmp_path, kind=kind)
    [saved] = list_checkpoints(tmp_path / "ckpts")
    for name, options in (("same", []), ("bf16", ["--dtype", "bf16"])):
        out = tmp_path / f"{name}.out"
        assert main(["export", "-q", "--merge-adapters", str(saved.path), str(out), *options]) == 0
        assert_same_tensors(out, tmp_path / name)
        assert (out / "config.json").read_text() == (tmp_path / name / "config.json").read_text()


@pytest.mark.full
@pytest.mark.ranks(1)
def test_a_checkpoint_without_the_configuration_of_its_adapters_gets_it_from_a_folder(tmp_path):
    strategy, model, _ = trained_a_step(adapted(target_modules=["q_proj"]), "llama")
    with patch.object(components, "adapter_configurations", lambda _: {}):  # as in the versions before it was saved
        path = strategy.save_ckpt(model, tmp_path / "ckpts")
    strategy.save_model(model, None, tmp_path / "expected")
    strategy.save_model(model, None, tmp_path / "adapters", merge_adapters=False)
    with redirect_stderr(io.StringIO()) as said:
        assert main(["export", "--merge-adapters", str(path), str(tmp_path / "out")]) == 2
    assert "lacks wrapper/adapter_config.json" in said.getvalue() and "--sidecars" in said.getvalue()
    folder = ["--sidecars", str(tmp_path / "adapters")]
    assert main(["export", "-q", "--merge-adapters", *folder, str(path), str(tmp_path / "out")]) == 0
    assert_same_tensors(tmp_path / "out", tmp_path / "expected")
    other = json.loads((tmp_path / "adapters/adapter_config.json").read_text()) | {"r": 5}
    (tmp_path / "adapters/adapter_config.json").write_text(json.dumps(other))
    with redirect_stderr(io.StringIO()) as said:
        assert main(["export", "--merge-adapters", *folder, str(path), str(tmp_path / "no")]) == 2
    assert "with another shape" in said.getvalue()


# --- in ------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_the_base_weights_of_a_folder_load_into_a_model_with_adapters(tmp_path):
    model = adapted(target_modules="all-linear", modules_to_save=["lm_head"])
    expected = copy.deepcopy(model)
    expected.base_model.model.lm_head.original_module.weight.data = build("llama", 1).lm_head.weight.data
    other = build("llama", 1).state_dict()
    for name, parameter in expected.named_parameters():
        if not parameter.requires_grad:
            inner = name.removeprefix("base_model.model.").replace("base_layer.", "").replace("original_module.", "")
            parameter.data = other[inner].clone()
    shard_model(model, config=StrategyConfig(bf16=False))
    report = load_weights(model, folder_with(tmp_path / "base", 1))
    assert not report.unexpected and all("lora" in n or "modules_to_save" in n for n in report.missing)
    now = full_parameters(model)
    assert all(torch.equal(now[n], p) for n, p in expected.named_parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bf16", some([False, True], [True]))
@pytest.mark.parametrize(
    "options",
    some([{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens"]}], [{}]),
    ids=str,
)
def test_adapters_on_meta_are_those_that_peft_makes_and_the_base_comes_from_the_folder(options, bf16, tmp_path):
    folder = folder_with(tmp_path / "base")
    plain, meta = (start(folder, meta_init=meta_init, bf16=bf16, **options) for meta_init in (False, True))
    facts = [{n: (p.dtype, p.requires_grad) for n, p in run[1].model.named_parameters()} for run in (plain, meta)]
    assert facts[0] == facts[1]
    made, expected = full_parameters(meta[1].model), full_parameters(plain[1].model)
    if bf16:  # peft rounds fp32 adapters to the dtype of the weights and back, but not on meta
        made = {name: tensor.bfloat16().to(expected[name].dtype) for name, tensor in made.items()}
    assert_same(made, expected)
    steps = range(1) if bf16 else range(3)
    assert train(*meta, steps) == train(*plain, steps)


@pytest.mark.ranks(2)
def test_adapters_on_meta_that_need_the_base_weights_are_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"lora_magnitude_vector.* gives them values"):
        start(folder_with(tmp_path / "base"), meta_init=True, use_dora=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bf16", some([False, True], [True]))
def test_adapters_of_a_folder_load_on_meta(bf16, tmp_path):
    folder = folder_with(tmp_path / "base")
    run = start(folder, bf16=bf16)
    train(*run, range(2))
    run[0].save_model(run[1], None, tmp_path / "adapters", merge_adapters=False)
    strategy = strategy_for(bf16=bf16)
    with strategy.init_model_context(meta_init=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is a no-op", UserWarning)  # torch's; it is done once there is memory
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if bf16 else torch.float32)
        model = PeftModel.from_pretrained(base, tmp_path / "adapters", is_trainable=True)
    strategy.prepare_model(model, is_training=True)
    assert_same(full_parameters(model), full_parameters(run[1].model))


@pytest.mark.ranks(2)
def test_a_stream_leaves_nothing_of_the_merge_behind():
    from fsdp2_strategy.model import placeholders

    model = get_peft_model(build("llama"), LoraConfig(r=2, target_modules="all-linear"))
    shard_model(model, is_training=True)
    gc.collect()
    gc.disable()
    try:
        before = len(placeholders._computed)
        for _ in range(2):
            for _ in stream_weights(model):
                pass
            deadline = time.monotonic() + 60
            while len(placeholders._computed) > before and time.monotonic() < deadline:
                time.sleep(0.01)  # a thread that looks at frames keeps them for a moment
            assert len(placeholders._computed) == before
    finally:
        gc.enable()


@pytest.mark.ranks(2)
def test_an_adapter_and_the_base_weights_are_streamed_apart(tmp_path):
    base = build("llama")
    expected = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(tmp_path / str(dist.get_rank()))
    adapter = tensors_in(tmp_path / str(dist.get_rank()))
    shard_model(model, config=StrategyConfig(bf16=False), is_training=True)
    model(input_ids=tokens(torch.Generator().manual_seed(0)))  # leaves the root unit gathered
    offload(model)
    assert_same(dict(stream_weights(model, dtype=None, merge_adapters=False)), expected)
    assert adapter
    assert_same(dict(stream_adapter(model)), adapter)
    with pytest.raises(RolloutError, match=r"'other' is not in PeftModel.*'default'\. Pass adapter= with one of these"):
        next(stream_adapter(model, "other"))
    plain = shard_model(build("llama"), config=StrategyConfig(bf16=False), is_training=True)
    with pytest.raises(
        RolloutError,
        match=r"the adapter 'default': .*contains 0 peft models, expected one.*or stream_weights",
    ):
        next(stream_adapter(plain))
    next(p for n, p in model.named_parameters() if n.endswith("norm.weight")).requires_grad_(True)
    with pytest.raises(RolloutError, match=r"cannot stream the adapter 'default': .*trains .*norm.*modules_to_save"):
        next(stream_adapter(model))
