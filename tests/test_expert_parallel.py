"""Models whose experts are divided among ranks train with the numbers of the unsharded model."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from helpers.reference import MixedPrecision, assert_close
from helpers.split import InFloat64, targets_of, tiny_model
from helpers.tensor_parallel import batch_for, loss_of, train_beside_reference, whole_grads, whole_parameters
from helpers.training import strategy_for
from helpers.versions import needs_split_layers
from helpers.worlds import some
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy

from fsdp2_strategy import StrategyConfig, build_mesh, explain, shard_model
from fsdp2_strategy.distributed.torch_internals import local_of
from fsdp2_strategy.errors import ConfigError, MeshError, ShardError
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.model.names import named_parameters

pytestmark = [needs_split_layers, pytest.mark.filterwarnings("ignore::FutureWarning:transformers")]

NAMES = (
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "deepseek_v4", "dots1", "dots3_note", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flint",
    "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "hy_v3", "hy_v4", "inkling2_loop_text", "inkling2_text", "inkling_text", "jamba",
    "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2_moe", "mellum", "mimo_v2_flash", "minimax", "minimax_m2",
    "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_moe", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "sarvam_mla", "sarvam_moe", "solar_open", "zaya",
)  # fmt: skip
SHARDED = (
    "afmoe", "aria_text", "axk1", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe",
    "gpt_oss", "granitemoe", "hy_v3", "lfm2_moe", "minimax_m2", "mixtral", "nemotron_h", "olmoe", "qwen2_moe",
    "qwen3_moe", "qwen3_next", "solar_open",
)  # fmt: skip
SOME = ("qwen3_moe", "gpt_oss", "deepseek_v3")
IN_FLOAT64 = (1e-10, 1e-10)
IN_FLOAT32 = (3e-5, 2e-4)
"""The tokens of an expert are summed in another order than in one process."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(NAMES, ["mixtral"], full=NAMES[::3]))
def test_architectures_train_on_two_ranks_that_divide_experts(name):
    strategy = strategy_for(expert_parallel_size=2, max_norm=0.5)
    train_beside_reference(tiny_model(name), strategy, tolerances=IN_FLOAT64, steps=2)


@pytest.mark.full
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", some(SHARDED, ["qwen3_moe"], full=SHARDED[::3]))
def test_architectures_train_with_divided_experts_that_are_sharded(name):
    strategy = strategy_for(expert_parallel_size=2, max_norm=0.5)
    train_beside_reference(tiny_model(name), strategy, tolerances=IN_FLOAT64)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [(1, 4, -1), (1, 2, 2), (2, 2, -1), (2, 4, -1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("name", some(SOME, (), SOME[:1]))
def test_experts_are_divided_in_any_shape_of_mesh(name, sizes):
    tensor, experts, shard = sizes
    strategy = strategy_for(tensor_parallel_size=tensor, expert_parallel_size=experts, max_norm=0.5)
    train_beside_reference(tiny_model(name), strategy, tolerances=IN_FLOAT64, shard_size=shard)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mode", some(["last", "every", "defer_all_reduce"], ()))
def test_gradients_of_experts_accumulate_in_every_mode(mode):
    strategy = strategy_for(expert_parallel_size=2, grad_sync=mode, train_batch_size=12, max_norm=0.5)
    train_beside_reference(
        tiny_model("qwen3_moe"), strategy, tolerances=IN_FLOAT64, accumulation=3, steps=2, shard_size=2
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "options",
    some(
        [
            {"cpu_offload": True},
            {"reshard_after_forward": False},
            {"reshard_after_forward": 2},
            {"prefetch_depth": 2},
            {"activation_checkpointing": True},
        ],
        (),
    ),
    ids=str,
)
def test_how_shards_are_gathered_changes_no_number(options):
    strategy = strategy_for(expert_parallel_size=2, **options)
    model, tolerances = tiny_model("qwen3_moe"), IN_FLOAT64
    if "activation_checkpointing" in options:  # recomputation would not be in float64
        model, tolerances = model.float(), (3e-5, 5e-3)  # Adam amplifies the rounding of small gradients
    train_beside_reference(model, strategy, tolerances=tolerances, steps=2)


@pytest.mark.ranks(4)
@pytest.mark.full
def test_float32_training_has_the_numbers_of_float32():
    strategy = strategy_for(expert_parallel_size=4, max_norm=0.5)
    train_beside_reference(tiny_model("mixtral").float(), strategy, tolerances=IN_FLOAT32)


@pytest.mark.ranks(4)
@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_bfloat16_training_is_close_to_that_of_the_unsharded_model(size):
    strategy = strategy_for(expert_parallel_size=size, bf16=True)
    model = tiny_model("mixtral").float()
    batch = batch_for(model, strategy.dp_rank)
    grads_of_ranks = []
    for each in range(strategy.dp_size):
        reference = MixedPrecision(model)
        loss_of(reference.inner, batch_for(model, each)).backward()
        grads_of_ranks.append({name: p.grad for name, p in reference.inner.named_parameters()})
    expected = {name: sum(g[name] for g in grads_of_ranks) / strategy.dp_size for name in grads_of_ranks[0]}
    strategy.prepare_model(model, is_training=True)
    strategy.backward(loss_of(model, batch), model)
    grads = whole_grads(model)
    assert all(grad.dtype == torch.float32 and grad.any() for grad in grads.values())
    assert_close(grads, expected, 0.1, "gradient")


def loss_with_balance(model, batch):
    """Return a loss outside of the model, and the model's own term for the balance of its experts."""
    with InFloat64():
        output = model(**batch, output_router_logits=True, use_cache=False)
        return cross_entropy(output.logits.flatten(0, 1), targets_of(batch).flatten()) + 0.5 * output.aux_loss


@pytest.mark.ranks(4)
@pytest.mark.full
@pytest.mark.parametrize(("name", "tensor"), [("mixtral", 1), ("qwen3_moe", 1), ("qwen3_moe", 2)])
def test_the_loss_for_the_balance_of_experts_is_that_of_each_batch(name, tensor):
    strategy = strategy_for(expert_parallel_size=4, tensor_parallel_size=tensor, max_norm=0.5)
    train_beside_reference(tiny_model(name), strategy, tolerances=IN_FLOAT64, loss=loss_with_balance)


@pytest.mark.ranks(2)
@pytest.mark.full
@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)], ids=str)
def test_items_that_are_summed_over_all_ranks_scale_the_loss_to_a_mean(sizes):
    tensor, experts = sizes
    strategy = strategy_for(tensor_parallel_size=tensor, expert_parallel_size=experts)
    model = strategy.prepare_model(tiny_model("mixtral"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    batch = batch_for(model, strategy.dp_rank)
    count = int((targets_of(batch) != -100).sum())
    items = strategy.all_reduce(count, "sum")
    strategy.backward(loss_of(model, batch) * count, model, optimizer, num_items_in_batch=items)
    grads = whole_grads(model)
    total = strategy.optimizer_step(optimizer, model).loss
    model = strategy.prepare_model(tiny_model("mixtral"), is_training=True)
    of_all = sum(int((targets_of(batch_for(model, each)) != -100).sum()) for each in range(strategy.dp_size))
    loss = loss_of(model, batch) * count * strategy.dp_size / of_all
    strategy.backward(loss, model)
    assert total == pytest.approx(strategy.all_reduce(loss.item()), rel=1e-10)
    assert_close(grads, whole_grads(model), 1e-10, "gradient")


@pytest.mark.ranks(2)
@pytest.mark.full
@pytest.mark.parametrize("trained", ["experts", "self_attn"])
def test_experts_or_all_else_may_be_frozen(trained):
    model = tiny_model("qwen3_moe")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    before = {name: p.detach().to("cpu", copy=True) for name, p in named_parameters(model).items()}
    train_beside_reference(model, strategy_for(expert_parallel_size=2, max_norm=0.1), tolerances=IN_FLOAT64)
    after = whole_parameters(model)
    assert {n for n in before if not torch.equal(before[n], after[n])} == {n for n in before if trained in n}


@pytest.mark.ranks(2)
def test_a_rank_whose_experts_get_no_token_takes_part_in_forward_and_backward():
    model = tiny_model("mixtral")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.zero_()  # equal logits: all tokens choose the same experts
    batch, plain = batch_for(model, 0), copy.deepcopy(model)
    chosen = []
    for module in plain.modules():
        if type(module).__name__ == "MixtralExperts":
            module.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    expected = plain(**batch, use_cache=False).logits
    half = model.config.num_local_experts // 2
    assert all(len((index // half).unique()) == 1 for index in chosen), "in each layer, one rank has all tokens"
    strategy = strategy_for(expert_parallel_size=2)
    strategy.prepare_model(model, is_training=True)
    found = model(**batch, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    strategy.backward(found.double().square().mean(), model)
    assert all(local_of(p.grad).isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.ranks(2)
def test_experts_generate_as_in_one_process_and_are_divided_by_number():
    model = tiny_model("qwen3_moe")
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    rank = dist.get_rank()
    ids = batch_for(model, rank)["input_ids"][:, :5]
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    count = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    strategy = strategy_for(expert_parallel_size=2)
    strategy.prepare_model(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
    held = sum(local_of(p).numel() for name, p in model.named_parameters() if ".experts." in name)
    assert held == count // 2
    copied = meta_skeleton(model)
    assert all(p.is_meta for p in copied.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(["mixtral", "gpt_oss"], ["mixtral"]))
def test_an_engine_has_all_experts(name):
    model = tiny_model(name).float()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    ids = batch_for(model, dist.get_rank())["input_ids"][:, :5]
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    strategy = strategy_for(expert_parallel_size=2)
    strategy.prepare_model(model, is_training=True)
    engine = strategy.setup_inference_engine(None, "transformers", model)
    strategy.update_engine_weights(model, verify=True)
    assert torch.equal(engine.generate(ids, max_new_tokens=4, do_sample=False), expected)
    answers = torch.ones(len(ids), 3, dtype=torch.bool)
    strategy.check_engine_agreement(model, ids, answer_mask=answers, on_disagreement="raise")


@pytest.mark.full
@pytest.mark.ranks(4)
def test_what_cannot_be_divided_is_refused_by_name():
    def refused(model, error, says, mesh=None, **options):
        with pytest.raises(error, match=says):
            config = StrategyConfig(**{"expert_parallel_size": 2, **options})
            shard_model(model, mesh or build_mesh(), config)

    refused(tiny_model("llama"), ShardError, "LlamaForCausalLM: it has no plan for expert parallelism")
    refused(
        tiny_model("mixtral"), MeshError, r"expert_parallel_size is 3, .*Use one of \[1, 2, 4\]", expert_parallel_size=3
    )
    both = build_mesh(tensor_parallel_size=4)
    refused(tiny_model("mixtral"), MeshError, r"a multiple of tensor_parallel_size 4.*Use one of \[4\]", mesh=both)
    refused(tiny_model("flex_olmo"), ShardError, "has 7 experts, expected a number that 2 ranks divide")
    refused(tiny_model("mixtral"), ConfigError, "1 with compile_blocks", compile_blocks=True)
    refused(tiny_model("mixtral"), ShardError, "they are ignored", ignored_modules=[r".*\.experts"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(tiny_model("mixtral"), LoraConfig(r=2, target_parameters=["experts.gate_up_proj"]))
    refused(adapted, ShardError, "cannot divide the experts")


def test_explain_shows_divided_experts():
    text = explain(
        tiny_model("mixtral").float(),
        StrategyConfig(expert_parallel_size=4, bf16=False),
        world_size=8,
        is_training=True,
    )
    assert "experts    divided among 4 ranks, by the model's own plan" in text
    whole = explain(tiny_model("mixtral").float(), StrategyConfig(bf16=False), world_size=8, is_training=True)
    held = [next(line for line in each.splitlines() if line.startswith("each rank")) for each in (text, whole)]
    assert held[0] == held[1], "each rank holds an eighth, however experts are divided"
    with pytest.raises(MeshError, match="expert_parallel_size is 3"):
        explain(tiny_model("mixtral"), StrategyConfig(expert_parallel_size=3), world_size=8, is_training=True)
