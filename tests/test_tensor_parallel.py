"""Models whose layers are split over ranks train with the numbers of the unsharded model; what cannot be is refused."""

from __future__ import annotations

import copy
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.models import Critic, on_device
from helpers.reference import MixedPrecision, Unsharded, assert_close, full_parameters, same_on_all_ranks
from helpers.split import InFloat64, tiny_model
from helpers.tensor_parallel import (
    OPTIONS,
    batch_for,
    loss_of,
    train_beside_reference,
    whole_grads,
    whole_parameters,
)
from helpers.training import strategy_for
from helpers.versions import needs_split_layers
from helpers.worlds import some
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import dropout
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, build_mesh, explain, shard_model, token_log_probs
from fsdp2_strategy.errors import ConfigError, MeshError, ShardError, StepError
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.model.offloading import offload, reload
from fsdp2_strategy.model.ranks import ranks_per_layer
from fsdp2_strategy.parallel.tensor import check as tensor_check
from fsdp2_strategy.parallel.tensor.plan import TensorPlan, plan_tensor_parallel
from fsdp2_strategy.parallel.tensor.split import split_layers

pytestmark = [needs_split_layers, pytest.mark.filterwarnings("ignore::FutureWarning:transformers")]

DENSE = (
    "llama", "apertus", "apertus1p5_text", "arcee", "bamba", "codegen", "cohere", "cohere2", "cohere_compass_text",
    "cwm", "diffllama", "dory", "emu3", "exaone", "exaone4", "falcon_h1", "flint", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gemma4", "gemma4_text", "gpt_neox", "gptj", "granite", "granite_swa", "helium", "hunyuan_v1_dense",
    "hyperclovax", "iquestcoder", "kolibri1", "lara_mini", "lfm2", "minicpm3", "ministral", "ministral3", "mistral",
    "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid", "phi", "phi3", "phi4_multimodal", "qwen2", "qwen3", "qwen3_5",
    "seed_oss", "smollm3", "vaultgemma", "youtu",
)  # fmt: skip
EXPERTS = (
    "mixtral", "afmoe", "aria_text", "axk1", "cohere2_moe", "dbrx", "deepseek_v2", "deepseek_v3", "dots1",
    "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "hunyuan_v1_moe", "jamba", "llama4",
    "longcat_flash", "minimax_m2", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "sarvam_moe",
)  # fmt: skip
NAMES = (*DENSE, *EXPERTS)
IN_FLOAT64 = (1e-10, 1e-10)


def split_over_two(**config):
    return strategy_for(tensor_parallel_size=2, **config)


def small(**changed):
    """Build a small Llama in float64; unlike a tiny model, it computes nothing in float32 that it would recompute."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    return on_device(LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changed})).double())


class Mlp(nn.Module):
    def __init__(self, dropped=0.0):
        super().__init__()
        self.up, self.down, self.dropped = nn.Linear(8, 16), nn.Linear(16, 8), dropped

    def forward(self, x):
        return x + dropout(self.down(self.up(x).relu()), self.dropped, training=self.training)


class Mlps(nn.Module):
    """A model that is not one of transformers."""

    PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}  # noqa: RUF012

    def __init__(self, dropped=0.0):
        super().__init__()
        self.layers = nn.ModuleList(Mlp(dropped) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def mlps(dropped=0.0):
    torch.manual_seed(0)
    return on_device(Mlps(dropped).double())


def of_mlps(model, batch):
    return model(**batch).square().mean()


def batch_of_mlps(seed):
    return on_device({"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)})


# --- training has the numbers of the unsharded model ----------------------------------------------------------------


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some((*DENSE[::3], *EXPERTS[::3], "qwen3_moe"), ["qwen3_moe"], full=NAMES[::6]))
def test_architectures_train_on_two_ranks_that_share_layers(name):
    train_beside_reference(tiny_model(name), split_over_two(max_norm=0.5), tolerances=IN_FLOAT64, steps=2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", some(NAMES, (), full=NAMES[1::3]))
def test_architectures_train_with_split_layers_that_are_sharded(name):
    train_beside_reference(tiny_model(name), split_over_two(max_norm=0.5), tolerances=IN_FLOAT64)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", some(["qwen3", "phi3", "gemma2", "mixtral", "deepseek_v3", "gpt_oss", "llama4"], ()))
def test_split_layers_may_have_replicas(name):
    train_beside_reference(tiny_model(name), split_over_two(max_norm=0.5), tolerances=IN_FLOAT64, shard_size=1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", some(["qwen3", "phi3", "mixtral", "deepseek_v3"], ()))
def test_float32_training_has_the_numbers_of_float32(name):
    train_beside_reference(tiny_model(name).float(), split_over_two(max_norm=0.5), tolerances=(1e-5, 1e-5), eps=1e-2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shard_size", some([1, 2], [1]))
@pytest.mark.parametrize("mode", some(["last", "every", "defer_all_reduce"], ()))
def test_gradients_of_norms_of_heads_are_summed_once_in_every_mode_of_accumulation(mode, shard_size):
    strategy = split_over_two(grad_sync=mode, train_batch_size=6, max_norm=0.5)
    train_beside_reference(
        tiny_model("qwen3"), strategy, tolerances=IN_FLOAT64, accumulation=3, steps=2, shard_size=shard_size
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "options",
    some(
        [
            {"cpu_offload": True},
            {"reshard_after_forward": False},
            {"prefetch_depth": 2},
        ],
        (),
    ),
    ids=str,
)
def test_how_shards_are_gathered_changes_no_number(options):
    train_beside_reference(tiny_model("qwen3"), split_over_two(**options), tolerances=IN_FLOAT64, steps=2)


@pytest.mark.ranks(2)
@pytest.mark.full
def test_recomputed_blocks_have_the_numbers_of_others():
    found = []
    for options in ({}, {"activation_checkpointing": True}):
        strategy, model = split_over_two(**options), tiny_model("qwen3")
        model.config.attention_dropout = 0.0
        strategy.prepare_model(model, is_training=True)
        torch.manual_seed(1)
        logits = model(**batch_for(model, 0)).logits
        strategy.backward(logits.square().mean(), model)
        found.append(whole_grads(model))
    assert_close(found[1], found[0], 1e-12, "gradient")


@pytest.mark.ranks(4)
@pytest.mark.full
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_each_implementation_of_experts_is_split(implementation):
    model = tiny_model("qwen3_moe").float()
    model.config._experts_implementation = implementation
    train_beside_reference(model, split_over_two(), tolerances=(1e-5, 1e-5), steps=1, eps=1e-2)


@pytest.mark.ranks(4)
@pytest.mark.full
def test_losses_that_balance_experts_have_the_gradients_of_the_unsharded_model():
    model = tiny_model("mixtral")

    def loss(model, batch):
        with InFloat64():
            output = model(**batch, output_router_logits=True)
        return output.aux_loss + 0.1 * output.logits.square().mean()

    train_beside_reference(model, split_over_two(), tolerances=IN_FLOAT64, steps=1, loss=loss)


CHANGED = {
    "tied": {"tie_word_embeddings": True},
    "padding": {"pad_token_id": 60},
    "odd vocabulary": {"vocab_size": 97},
    "odd and tied": {"vocab_size": 97, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "odd half": {"intermediate_size": 50},
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", some(CHANGED, ()))
def test_variants_of_a_model_train(kind):
    model = small(**CHANGED[kind])
    padding = model.config.pad_token_id

    def batch(seed):
        ids = batch_for(model, seed)["input_ids"]
        ids[0, :4] = torch.tensor([padding, (padding + 48) % 96, padding, 95])
        return {"input_ids": ids}

    train_beside_reference(model, split_over_two(), tolerances=IN_FLOAT64, batches=batch)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("trained", some(["norm", "q_proj", "embed"], ()))
def test_frozen_parameters_stay_and_do_not_count_in_the_norm(trained):
    model = small()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    before = full_parameters(model)
    train_beside_reference(model, split_over_two(max_norm=0.1), tolerances=IN_FLOAT64)
    after = whole_parameters(model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        n for n in before if trained in n
    }


@pytest.mark.ranks(4)
@pytest.mark.full
def test_bfloat16_training_is_close_to_that_of_the_unsharded_model():
    strategy, model = split_over_two(bf16=True), tiny_model("qwen3").float()
    batch = batch_for(model, strategy.dp_rank)
    losses = []
    for each in range(strategy.dp_size):
        reference = MixedPrecision(model)
        loss = loss_of(reference.inner, batch_for(model, each))
        loss.backward()
        losses.append({name: p.grad for name, p in reference.inner.named_parameters()})
    expected = {name: sum(of_rank[name] for of_rank in losses) / len(losses) for name in losses[0]}
    strategy.prepare_model(model, is_training=True)
    strategy.backward(loss_of(model, batch), model)
    grads = whole_grads(model)
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    assert_close(grads, expected, 0.05, "gradient")


@pytest.mark.ranks(4)
@pytest.mark.full
@pytest.mark.parametrize("passed", ["num_items", "num_items_in_batch", "num_tokens"])
def test_items_and_tokens_of_a_batch_count_once(passed):
    strategy, model = split_over_two(), small()
    reference = copy.deepcopy(model)
    counts = [5 + 2 * rank for rank in range(strategy.dp_size)]
    losses = [loss_of(reference, batch_for(model, rank)) * counts[rank] for rank in range(strategy.dp_size)]
    (sum(losses) / (strategy.dp_size if passed == "num_tokens" else sum(counts))).backward()
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, **OPTIONS)
    own = counts[strategy.dp_rank]
    loss = loss_of(model, batch_for(model, strategy.dp_rank)) * own
    strategy.backward(loss, model, optimizer, **{passed: sum(counts) if passed == "num_items_in_batch" else own})
    expected = {name: p.grad for name, p in reference.named_parameters()}
    if passed == "num_items":  # gradients are divided in the step
        norm = strategy.optimizer_step(optimizer, model).grad_norm
        assert norm == pytest.approx(sum(g.square().sum().item() for g in expected.values()) ** 0.5, rel=1e-10)
        return
    assert_close(whole_grads(model), expected, 1e-10, "gradient")
    result = strategy.optimizer_step(optimizer, model)
    assert result.tokens == sum(counts)
    divisor = strategy.dp_size if passed == "num_tokens" else sum(counts)
    assert result.loss == pytest.approx(sum(losses).item() / divisor, rel=1e-10)


# --- other models, and other ways to use one ------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.ranks(4)
def test_a_plan_of_the_user_splits_any_model():
    strategy = split_over_two(tensor_parallel_plan=Mlps.PLAN)
    model = mlps()
    train_beside_reference(model, strategy, tolerances=IN_FLOAT64, loss=of_mlps, batches=batch_of_mlps, steps=2)
    assert model.layers[0].up.weight.to_local().shape == (4, 8)
    assert model.layers[0].down.weight.to_local().shape == (4, 8)
    assert ranks_per_layer(model) == 2


@pytest.mark.ranks(2)
def test_a_plan_may_be_given_for_one_model():
    strategy = split_over_two()
    plan = {"model.layers.*.mlp.up_proj": "colwise_gather_output"}
    model = small()
    train_beside_reference(model, strategy, tolerances=IN_FLOAT64, steps=1, tensor_parallel_plan=plan)
    assert model.model.layers[1].mlp.up_proj.weight.to_local().shape == (24, 32)
    assert model.model.layers[1].mlp.gate_proj.weight.shape == (48, 32)


@pytest.mark.ranks(2)
def test_a_tied_weight_is_split_only_if_all_its_modules_split_it_in_the_same_way():
    plan = {"lm_head": "colwise_gather_output", "model.layers.*.mlp.up_proj": "colwise_gather_output"}
    model = small(tie_word_embeddings=True)
    train_beside_reference(model, split_over_two(), tolerances=IN_FLOAT64, steps=1, tensor_parallel_plan=plan)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found = plan_tensor_parallel(small(tie_word_embeddings=True), 2, plan)
    assert found.not_split == ["model.embed_tokens", "lm_head"] and "lm_head.weight" not in found.styles


def lora(model, **options):
    options = {"target_modules": ["q_proj", "o_proj", "up_proj", "down_proj", "lm_head"], **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(r=4, **options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return adapted.double()


@pytest.mark.full
@pytest.mark.ranks(4)
def test_lora_is_split_like_the_layers_that_it_adapts():
    model = lora(small())
    train_beside_reference(model, split_over_two(max_norm=0.5), tolerances=IN_FLOAT64, steps=2)
    shapes = {name: tuple(p.to_local().shape) for name, p in model.named_parameters() if "layers.0" in name}
    of = "base_model.model.model.layers.0"
    assert shapes[f"{of}.self_attn.q_proj.lora_A.default.weight"] == (2, 32)  # rows of 2 shards
    assert shapes[f"{of}.self_attn.q_proj.lora_B.default.weight"] == (8, 4)  # of 2 parts of 2 shards
    assert shapes[f"{of}.mlp.down_proj.lora_A.default.weight"] == (2, 24)
    assert shapes[f"{of}.mlp.down_proj.lora_B.default.weight"] == (16, 4)


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("saved", "tied"),
    [
        pytest.param(["embed_tokens", "lm_head", "k_proj"], False),
        pytest.param(["embed_tokens"], True, marks=pytest.mark.full),
        pytest.param(["lm_head"], True, marks=pytest.mark.full),
        pytest.param(["embed_tokens", "lm_head", "down_proj", "norm"], True, marks=pytest.mark.full),
        pytest.param(["mlp"], False, marks=pytest.mark.full),
    ],
)
def test_modules_that_an_adapter_saves_are_split_as_without_it(saved, tied):
    model = lora(small(tie_word_embeddings=tied), target_modules=["q_proj"], modules_to_save=saved)
    train_beside_reference(model, split_over_two(), tolerances=IN_FLOAT64, steps=2)
    if "embed_tokens" in saved:
        copied = model.get_input_embeddings().modules_to_save["default"]
        assert copied.weight.to_local().shape[0] == model.config.vocab_size // 2


@pytest.mark.ranks(4)
@pytest.mark.full
def test_a_wrapper_around_a_model_is_split_by_the_plan_of_the_model():
    torch.manual_seed(0)
    model = on_device(Critic(small()).double())

    def loss(critic, batch):
        return critic(batch["input_ids"]).square().mean()

    def batches(seed):
        return batch_for(model.base_model, seed)

    train_beside_reference(model, split_over_two(), tolerances=IN_FLOAT64, loss=loss, batches=batches)
    assert model.base_model.model.layers[0].mlp.down_proj.weight.to_local().shape == (16, 24)
    assert model.value_head.weight.to_local().shape[1] == 32


@pytest.mark.ranks(2)
@pytest.mark.full
def test_a_classifier_is_split_by_the_plan_of_its_decoder():
    torch.manual_seed(0)
    config = small().config
    config.num_labels = 3
    model = on_device(LlamaForSequenceClassification(config).double())

    def loss(model, batch):
        return model(**batch).logits.square().mean()

    train_beside_reference(model, split_over_two(), tolerances=IN_FLOAT64, loss=loss)
    assert model.score.weight.to_local().shape == (3, 32)


@pytest.mark.ranks(2)
@pytest.mark.full
def test_what_a_tiny_model_does_not_run_is_not_split():
    model = small()
    model.register_module("extra", nn.Linear(8, 8, dtype=torch.float64))
    plan = {**model.tp_plan, "extra": "colwise"}
    model.tp_plan = plan
    with patch("fsdp2_strategy.parallel.tensor.check.original_class", lambda _: _WithExtra):
        split_over_two().prepare_model(model, is_training=True)
    assert model.extra.weight.to_local().shape == (8, 8)
    model = small()
    model.register_module("extra", nn.Linear(8, 8, dtype=torch.float64))
    with patch("fsdp2_strategy.parallel.tensor.check.original_class", lambda _: _WithExtra):
        split_over_two().prepare_model(model, is_training=True, tensor_parallel_plan=plan)
    assert model.extra.weight.to_local().shape == (4, 8)


class _WithExtra(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.extra = nn.Linear(8, 8)


@pytest.mark.ranks(4)
@pytest.mark.full
def test_master_weights_may_be_in_the_optimizer():
    found = []
    for masters in (False, True):
        strategy, model = split_over_two(bf16=True, use_mp_opt=masters), tiny_model("qwen3").float()
        strategy.prepare_model(model, is_training=True)
        optimizer = strategy.create_optimizer(model, **OPTIONS)
        for step in range(2):
            strategy.backward(loss_of(model, batch_for(model, 10 * step + strategy.dp_rank)), model, optimizer)
            strategy.optimizer_step(optimizer, model)
        found.append({name: p.to(torch.bfloat16) for name, p in whole_parameters(model).items()})
    assert_close(found[1], found[0], 0.03, "parameter")


@pytest.mark.ranks(2)
def test_generation_and_log_probabilities_are_those_of_the_unsharded_model():
    model = small(vocab_size=97)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    ids = batch_for(model, 0)["input_ids"]
    reference = copy.deepcopy(model)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    strategy = split_over_two()
    strategy.prepare_model(model, is_training=True)
    with torch.no_grad():
        assert torch.equal(model.eval().generate(ids, **options), reference.eval().generate(ids, **options))
    found, entropies = token_log_probs(model, ids, last=9, temperature=0.7, entropy=True, chunk_bytes=4000)
    expected, of_reference = token_log_probs(reference, ids, last=9, temperature=0.7, entropy=True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(entropies, of_reference, rtol=1e-10, atol=1e-10)
    (expected.mean() + of_reference.square().mean()).backward()
    strategy.backward(found.mean() + entropies.square().mean(), model)
    assert_close(whole_grads(model), {n: p.grad for n, p in reference.named_parameters()}, 1e-10, "gradient")


@pytest.mark.ranks(4)
@pytest.mark.full
def test_a_model_for_inference_is_split():
    strategy, model = split_over_two(), small().float()
    reference = copy.deepcopy(model)
    strategy.prepare_model(model, shard_size="auto")
    batch = batch_for(model, strategy.dp_rank)
    for no_gradients in (torch.no_grad, torch.inference_mode):
        with no_gradients():
            torch.testing.assert_close(model(**batch).logits, reference(**batch).logits, rtol=1e-4, atol=1e-5)
    assert model.model.layers[0].mlp.up_proj.weight.to_local().shape == (24, 32), "replicated, because it is small"


@pytest.mark.ranks(4)
@pytest.mark.full
def test_a_split_model_may_be_offloaded():
    strategy, model = split_over_two(), small()
    strategy.prepare_model(model, is_training=True)
    before = whole_parameters(model)
    offload(model)
    reload(model)
    after = whole_parameters(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    strategy.backward(loss_of(model, batch_for(model, strategy.dp_rank)), model)
    assert whole_grads(model).keys() == before.keys()


@pytest.mark.ranks(4)
@pytest.mark.full
def test_dropout_is_equal_on_ranks_that_share_layers_and_reproducible():
    strategy = split_over_two(tensor_parallel_plan=Mlps.PLAN)
    model = strategy.prepare_model(mlps(dropped=0.5), is_training=True)
    outputs = []
    for _ in range(2):
        strategy.set_seed(3, per_rank=True)
        outputs.append(model(**batch_of_mlps(0)))
    assert torch.equal(*outputs)
    of_ranks = [torch.empty_like(outputs[0]) for _ in range(4)]
    dist.all_gather(of_ranks, outputs[0].detach().contiguous())
    assert torch.equal(of_ranks[0], of_ranks[1]) and torch.equal(of_ranks[2], of_ranks[3])
    assert not torch.equal(of_ranks[0], of_ranks[2])


class Masked(nn.Module):
    """Dropout that keeps its last mask, or uses a given one."""

    def __init__(self):
        super().__init__()
        self.dropout, self.mask, self.given = nn.Dropout(0.5), None, None

    def forward(self, x):
        self.mask = self.dropout(torch.ones_like(x)) if self.given is None else self.given
        return x * self.mask


class DroppingMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.before, self.inside, self.after = Masked(), Masked(), Masked()

    def forward(self, x):
        full = self.before(x)
        return x + self.after(self.down(self.inside(self.up(full) * self.gate(full))))


def masks_of(model, ranks=1):
    """Return the masks of a model; those of a part of the activations are concatenated."""
    masks = {}
    for name, module in model.named_modules():
        if isinstance(module, Masked):
            of_ranks = [torch.empty_like(module.mask) for _ in range(ranks)]
            dist.all_gather(of_ranks, module.mask.contiguous())
            masks[name] = of_ranks
    return masks


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recomputes", [False, True])
def test_dropout_of_split_activations_has_independent_masks_and_the_numbers_of_the_unsharded_model(recomputes):
    torch.manual_seed(0)
    model = Mlps().double()
    model.layers = nn.ModuleList(DroppingMlp() for _ in range(2)).double()
    model = on_device(model)
    unsharded = copy.deepcopy(model)
    plan = {"layers.*.up": "colwise", "layers.*.gate": "colwise", "layers.*.down": "rowwise"}
    strategy = split_over_two(tensor_parallel_plan=plan, activation_checkpointing=recomputes)
    strategy.prepare_model(model, is_training=True)
    batch = batch_of_mlps(0)
    for step in range(2):
        torch.manual_seed(5 + step)
        loss = of_mlps(model, batch)
        masks = masks_of(model, 2)
        for name, (own, other) in masks.items():
            assert torch.equal(own, other) == ("inside" not in name), name
            given = torch.cat([own, other], dim=-1) if "inside" in name else own
            unsharded.get_submodule(name.replace("_checkpoint_wrapped_module.", "")).given = given
        assert len({str(mask) for of_ranks in masks.values() for mask in of_ranks}) == 8, "no mask is used twice"
        expected = of_mlps(unsharded, batch)
        assert torch.allclose(loss, expected, rtol=1e-10)
        strategy.backward(loss, model)
        expected.backward()
        for name, gradient in whole_grads(model).items():
            expected = unsharded.get_parameter(name).grad.cpu()
            assert torch.allclose(gradient, expected, rtol=1e-8, atol=1e-12), name
    state = torch.get_rng_state()
    of_ranks = [torch.empty_like(state) for _ in range(2)]
    dist.all_gather(of_ranks, state)
    assert torch.equal(*of_ranks), "the common state is equal after the pass"


def dropping(**options):
    """Build a Llama with dropout in attention and before each LoRA matrix."""
    model = small(attention_dropout=0.5, attn_implementation="eager")
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]
    return lora(model, lora_dropout=0.5, target_modules=targets, **options).train()


@pytest.mark.ranks(2)
def test_heads_and_adapters_of_rowwise_layers_draw_independent_masks_and_all_others_common_ones():
    drawn = []

    def recorded(x, p=0.5, training=True, _inplace=False):
        out = torch.dropout(x, p, training)
        drawn.append((out == 0).double())
        return out

    model = dropping()
    strategy = split_over_two()
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    torch.manual_seed(7)
    with patch("torch.nn.functional.dropout", recorded):
        loss = loss_of(model, batch_for(model, 0))
    strategy.backward(loss, model, optimizer)  # raises if the losses differ
    strategy.optimizer_step(optimizer, model)
    # q, v, attention, o, up, down of two layers, and the head
    assert len(drawn) == 13
    for number, mask in enumerate(drawn):
        of_ranks = [torch.empty_like(mask) for _ in range(2)]
        dist.all_gather(of_ranks, mask.contiguous())
        is_split = number < 12 and number % 6 in (2, 3, 5)
        assert torch.equal(*of_ranks) != is_split, number


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_run_with_dropout_in_split_layers_resumes_bitwise(tmp_path):
    losses = []
    for is_resumed in (False, True):
        model, strategy = dropping(), split_over_two(seed=3)
        strategy.prepare_model(model, is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        if is_resumed:
            strategy.load_ckpt(model, tmp_path)
        else:
            strategy.set_seed(3, per_rank=True)
        own = []
        for step in range(2 if is_resumed else 0, 4):
            loss = loss_of(model, batch_for(model, step))
            strategy.backward(loss, model, optimizer)
            strategy.optimizer_step(optimizer, model)
            own.append(loss.item())
            if step == 1:
                strategy.save_ckpt(model, tmp_path)
        losses.append(own)
    assert losses[1] == losses[0][2:]


@pytest.mark.ranks(2)
def test_a_copy_of_a_split_module_runs_its_own_weights():
    model, mesh = mlps(), build_mesh(1, tensor_parallel_size=2)
    expected = model(**batch_of_mlps(0))
    split_layers(model, TensorPlan.of(model, 2, Mlps.PLAN), mesh["tp"])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        torch.testing.assert_close(model(**batch_of_mlps(0)), expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(copied(**batch_of_mlps(0)), batch_of_mlps(0)["x"])


@pytest.mark.ranks(2)
def test_the_skeleton_of_a_split_model_has_full_shapes_and_plain_forwards():
    model = small()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    split_over_two().prepare_model(model, is_training=True)
    skeleton = meta_skeleton(model)
    assert {name: p.shape for name, p in skeleton.named_parameters()} == shapes
    assert skeleton(torch.zeros(1, 3, dtype=torch.int64, device="meta")).logits.shape == (1, 3, 96)


# --- ranks, meshes and data -----------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_ranks_that_share_layers_are_one_data_parallel_rank():
    strategy, rank = split_over_two(micro_train_batch_size=2, train_batch_size=8), dist.get_rank()
    assert (strategy.tp_size, strategy.tp_rank, strategy.dp_size, strategy.dp_rank) == (2, rank % 2, 2, rank // 2)
    assert dist.get_process_group_ranks(strategy.tp_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(strategy.dp_group) == [rank % 2, rank % 2 + 2]
    assert dist.get_process_group_ranks(strategy.sp_group) == [rank]
    assert strategy.accumulated_gradient == 2
    data = [{"x": torch.full((1,), float(i))} for i in range(16)]
    drawn = [batch["x"].flatten().tolist() for batch in strategy.setup_dataloader(data, 2)]
    of_ranks = [None] * 4
    dist.all_gather_object(of_ranks, drawn)
    assert of_ranks[0] == of_ranks[1] and of_ranks[2] == of_ranks[3]
    assert sorted(x for of_rank in (of_ranks[0], of_ranks[2]) for batch in of_rank for x in batch) == list(range(16))


@pytest.mark.ranks(4)
def test_a_mesh_has_an_axis_for_layers_and_sizes_must_divide_the_ranks():
    mesh = build_mesh(1, tensor_parallel_size=2)
    assert mesh.mesh_dim_names == ("replicate", "shard", "tp") and mesh.shape == (2, 1, 2)
    assert build_mesh(tensor_parallel_size=2).shape == (2, 2) and build_mesh(tensor_parallel_size=4).shape == (1, 4)
    assert build_mesh(1, tensor_parallel_size=2) is mesh
    with pytest.raises(
        MeshError, match=r"tensor_parallel_size is 3, expected a divisor of the world size 4.*\[1, 2, 4\]"
    ):
        build_mesh(tensor_parallel_size=3)
    with pytest.raises(
        MeshError, match=r"shard_size is 4, expected a divisor of the 2 data.* Use one of \[1, 2\].* 8, 16"
    ):
        build_mesh(4, tensor_parallel_size=2)
    with pytest.raises(MeshError, match="tensor_parallel_size is 3, expected a divisor of the number of ranks 4"):
        FSDPV2Strategy(config=StrategyConfig(tensor_parallel_size=3))


@pytest.mark.ranks(3)
def test_some_of_all_ranks_may_share_layers():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    config = StrategyConfig(tensor_parallel_size=2, bf16=False, tensor_parallel_plan=Mlps.PLAN)
    with FSDPV2Strategy(config=config, process_group=group) as strategy:
        model = mlps()
        unsharded = Unsharded(model, of_mlps, ranks=1, **OPTIONS)
        strategy.prepare_model(model, is_training=True)
        optimizer = strategy.create_optimizer(model, **OPTIONS)
        _, norm = unsharded.step([batch_of_mlps(0)])
        strategy.backward(of_mlps(model, batch_of_mlps(0)), model, optimizer)
        assert strategy.optimizer_step(optimizer, model).grad_norm == pytest.approx(norm, rel=1e-12)
        expected = dict(unsharded.model.named_parameters())["layers.0.up.bias"].chunk(2)[strategy.tp_rank]
        own = named_parameters(model)["layers.0.up.bias"].to_local()
        torch.testing.assert_close(own, expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.full
@pytest.mark.ranks(4)
def test_other_batches_on_ranks_that_share_layers_are_an_error_on_every_rank():
    strategy = split_over_two()
    model = strategy.prepare_model(small(), is_training=True)
    ids = batch_for(model, strategy.dp_rank)["input_ids"]
    if dist.get_rank() == 3:
        ids = ids.flip(1)
    with pytest.raises(
        StepError, match=r"input_ids of rank 3 differ from those of rank 2, .* ranks 2, 3, which share lay"
    ):
        model(input_ids=ids)
    with pytest.raises(StepError, match="input 0 of rank 3 differ"):
        model(ids)
    assert all(isinstance(p, DTensor) for p in model.parameters()), "nothing is left gathered"
    assert same_on_all_ranks(model(torch.ones_like(ids), use_cache=False).logits.sum().item())


@pytest.mark.ranks(4)
def test_other_losses_on_ranks_that_share_layers_are_an_error_on_every_rank():
    """The labels are not an input of the forward, which compares inputs only."""
    strategy = split_over_two()
    model = strategy.prepare_model(small(), is_training=True)
    logits = model(input_ids=batch_for(model, strategy.dp_rank)["input_ids"]).logits
    factor = 1.5 if dist.get_rank() == 3 else 1.0
    with pytest.raises(StepError, match=r"the losses of the ranks 2, 3 are [\d.]+, [\d.]+, expected equal losses"):
        strategy.backward(logits.square().mean() * factor, model)
    strategy.backward(logits.square().mean() * (1 + 1e-6 * dist.get_rank()), model)  # rounding


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tensor_parallel_size", "expert_parallel_size", "sequence_parallel_size"])
def test_sizes_that_differ_between_ranks_are_an_error_on_every_rank(name):
    """Otherwise ranks would wait for each other while they make groups of different ranks."""
    strategy = strategy_for(**{name: 1 + dist.get_rank()})
    with pytest.raises(ConfigError, match=rf"{name} is 1 on 1 rank \(0\), 2 on 1 rank \(1\), expected the same number"):
        strategy.prepare_model(small(), is_training=True)


@pytest.mark.ranks(2)
def test_experts_of_different_numbers_of_ranks_are_an_error_on_every_rank():
    with pytest.raises(MeshError, match=r"ranks \[1\] differ from rank 0, expected the same expert_parallel_size"):
        shard_model(small(), build_mesh(), StrategyConfig(expert_parallel_size=1 + dist.get_rank()))


@pytest.mark.ranks(2)
def test_a_sum_over_ranks_counts_the_batch_of_ranks_that_share_layers_once():
    strategy = split_over_two()
    data = {"tokens": 7, "loss": torch.tensor(2.5), "ids": torch.tensor([3, 4])}
    reduced = strategy.all_reduce(data, "sum")
    assert reduced["tokens"] == 7 and isinstance(reduced["tokens"], int)
    assert reduced["loss"].item() == 2.5 and reduced["ids"].tolist() == [3, 4] and reduced["ids"].dtype == torch.int64
    assert strategy.all_reduce(7) == 7 and strategy.all_reduce(7, "max") == 7
    assert strategy_for().all_reduce(7, "sum") == 14


@pytest.mark.ranks(2)
def test_a_model_is_prepared_again_only_with_the_same_split():
    split, plain = split_over_two(), strategy_for()
    model = split.prepare_model(mlps(), tensor_parallel_plan=Mlps.PLAN)
    assert split.prepare_model(model) is model and split.prepare_model(model, tensor_parallel_plan=Mlps.PLAN) is model
    with pytest.raises(ShardError, match="already sharded with tensor_parallel_size=2, expected 1"):
        plain.prepare_model(model)
    with pytest.raises(ShardError, match=r"already sharded with tensor_parallel_plan=.*, expected \{'up': 'colwise'\}"):
        split.prepare_model(model, tensor_parallel_plan={"up": "colwise"})
    with pytest.raises(ShardError, match="already sharded with tensor_parallel_size=1, expected 2"):
        split.prepare_model(plain.prepare_model(mlps()))
    with pytest.raises(ShardError, match="already sharded with expert_parallel_size=1, expected 2"):
        strategy_for(expert_parallel_size=2).prepare_model(plain.prepare_model(mlps()))


@pytest.mark.ranks(2)
def test_an_error_in_a_split_module_names_the_module_and_its_style():
    model = split_over_two().prepare_model(mlps(), tensor_parallel_plan={"layers.*.up": "rowwise"})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as failed:
        model(**batch_of_mlps(0))
    assert "forward of layers.0.up, which the tensor-parallel plan splits by 'rowwise'" in failed.value.__notes__[0]


@pytest.mark.ranks(2)
def test_a_warning_says_that_the_plan_of_a_custom_model_is_not_checked():
    with patch.object(tensor_check, "log") as log:
        split_over_two().prepare_model(mlps(), tensor_parallel_plan=Mlps.PLAN)
    [(_, *values)] = [call.args for call in log.call_args_list if "is not checked" in call.args[0]]
    assert values == ["Mlps", "6 modules (layers.0.up, layers.0.down, layers.1.up, …)"]


# --- refusals -------------------------------------------------------------------------------------------------------

REFUSED = {
    "heads": ({"num_key_value_heads": 1}, {}, "layers.0.self_attn.k_proj over 2 ranks: it has 1 head of dimension 8"),
    "size": ({"intermediate_size": 49}, {}, "mlp.gate_proj.weight over 2 ranks: its dimension 0 has the size 49"),
    "ignored": ({}, {"ignored_modules": [r"model\.layers\.0\.mlp"]}, "cannot ignore 3 parameters .* splits them"),
    "compiled": ({}, {"compile_blocks": "eager"}, "compile_blocks was passed, which does not combine"),
    "vision": ({}, {"mixed_mm_data": "replicate"}, "mixed_mm_data='replicate' was passed, which does not combine"),
    "style": (
        {},
        {"tensor_parallel_plan": {"lm_head": "column"}},
        "its style is 'column', and transformers has no such",
    ),
    "sequences": ({}, {"tensor_parallel_plan": {"model.norm": "sequence_parallel"}}, "it splits sequences, which"),
    "name": ({}, {"tensor_parallel_plan": {"lm_hed": "colwise"}}, r"\(lm_hed\) of tensor_pa.* Did you mean 'lm_head'"),
    "module": ({}, {"tensor_parallel_plan": {"model.norm": "colwise"}}, "its style 'colwise' is for nn.Linear"),
    "outputs": (
        {},
        {"tensor_parallel_plan": {"lm_head": "colwise"}},
        "with its plan, a tiny model of its configuration has other outputs",
    ),
    "gradients": (
        {},
        {"tensor_parallel_plan": {"model.norm": "replicated_with_grad_allreduce"}},
        r"has other gradients of 1 parameter \(model.norm.weight\)",
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", some(REFUSED, ["heads", "gradients", "name"]))
def test_what_cannot_be_split_is_refused_by_name(kind):
    changed, options, says = REFUSED[kind]
    with pytest.raises(ShardError, match=says):
        shard_model(
            small(**changed),
            build_mesh(tensor_parallel_size=2),
            StrategyConfig(bf16=False, **options),
            is_training=True,
        )


@pytest.mark.ranks(2)
def test_split_layers_are_resharded_to_all_ranks_or_none():
    with patch("fsdp2_strategy.sharding.shard.check_reshard", return_value=2):  # which needs four shards of each layer
        with pytest.raises(ShardError, match="an integer as reshard_after_forward was passed, which does not combine"):
            shard_model(mlps(), build_mesh(tensor_parallel_size=2), StrategyConfig(tensor_parallel_plan=Mlps.PLAN))


@pytest.mark.ranks(2)
def test_models_that_cannot_be_split_are_refused_by_name():
    strategy = split_over_two()
    with pytest.raises(
        ShardError, match="Mlps: it has no plan for tensor parallelism, expected a model of transformers"
    ):
        strategy.prepare_model(mlps(), is_training=True)
    with pytest.raises(
        ShardError, match=r"q_proj: it is a Linear of peft, and its parameters lora_magn.* cannot be split"
    ):
        strategy.prepare_model(lora(small(), use_dora=True), is_training=True)
    with pytest.raises(ShardError, match=r"embed_tokens: it is a TrainableTokensWrapper, .* expected an embedding"):
        tokens = lora(small(), target_modules=["q_proj"], trainable_token_indices=[1, 2])
        strategy.prepare_model(tokens, is_training=True)
    with pytest.raises(ShardError, match=r"plan cannot be checked, because a tiny model .* failed: .*\(broken\)"):
        broken = small()
        broken.config.__class__ = type("LlamaConfig", (LlamaConfig,), {"from_dict": _broken})
        strategy.prepare_model(broken, is_training=True)


def test_an_old_transformers_is_refused():
    with patch("fsdp2_strategy.parallel.tensor.plan.parallel_styles", dict):
        with pytest.raises(
            ShardError, match=r"has no tensor parallelism that works with .* expected version 5.23 or newer"
        ):
            explain(small(), StrategyConfig(tensor_parallel_size=2), world_size=2, is_training=True)


@pytest.mark.ranks(2)
def test_a_tiny_model_that_the_ranks_do_not_divide_cannot_check_a_plan():
    model = small()
    with patch("fsdp2_strategy.parallel.tensor.check._tiny_model", lambda _: small(intermediate_size=49)):
        with pytest.raises(
            ShardError, match=r"cannot be checked, .*gate_proj.weight over 2 ranks: its dimension 0 has"
        ):
            shard_model(model, build_mesh(tensor_parallel_size=2))
        shard_model(model, build_mesh(tensor_parallel_size=2), StrategyConfig(tensor_parallel_plan=dict(model.tp_plan)))


def _broken(*_args, **_kwargs):
    raise ValueError("broken")


@pytest.mark.ranks(2)
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "split", "whole"),
    [("doge", "mlp.up_proj", "self_attn.q_proj"), ("gemma3n_text", "self_attn.q_proj", "mlp.up_proj")],
)
def test_only_the_parts_of_a_plan_that_work_are_split(name, split, whole):
    model = tiny_model(name)
    train_beside_reference(model, split_over_two(), tolerances=IN_FLOAT64, steps=1)
    parameters = dict(model.named_parameters())
    assert "tp" in parameters[f"model.layers.0.{split}.weight"].device_mesh.mesh_dim_names
    assert "tp" not in parameters[f"model.layers.0.{whole}.weight"].device_mesh.mesh_dim_names


# --- explain --------------------------------------------------------------------------------------------------------


def test_explain_shows_how_layers_are_split_and_what_each_rank_holds():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=1000))
    text = explain(model, StrategyConfig(tensor_parallel_size=4), world_size=8, is_training=True)
    assert "on 8 ranks, each parameter split over 2, after layers were split over 4" in text
    assert "layers     16 parameters split over 4 ranks, by the model's own plan" in text
    assert "  model.layers.*.mlp.down_proj.weight: [4096, 11008] -> [4096, 2752], dimension 1, rowwise" in text
    split = sum(p.numel() for p in model.parameters() if p.ndim > 1) // 8
    held = (split + sum(p.numel() for p in model.parameters() if p.ndim == 1) // 2) * 4
    assert f"each rank  {held / 1e6:.3g} MB parameters" in text
    with pytest.raises(MeshError, match="tensor_parallel_size is 3, expected a divisor of the world size 8"):
        explain(model, StrategyConfig(tensor_parallel_size=3), world_size=8, is_training=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(["phi3", "mixtral", "aria_text", "gpt_oss", "deepseek_v3"], ()))
def test_the_plan_knows_how_each_style_splits(name):
    model, mesh = tiny_model(name), build_mesh(1, tensor_parallel_size=2)
    plan = plan_tensor_parallel(model, 2)
    splits = plan.split_dims(model)
    split_layers(model, plan, mesh["tp"])
    for parameter_name, parameter in model.named_parameters():
        (placed,) = getattr(parameter, "placements", (None,))
        if parameter_name in splits:
            dim, is_packed = splits[parameter_name]
            assert placed.dim % parameter.ndim == dim and (getattr(placed, "split_factor", 1) == 2) == is_packed
        else:
            assert placed is None or placed.is_replicate()
