"""Modules that are not sharded: whole on every rank, in a dtype of their own, and in every file as if they were."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models import batch_of, build, loss_of, next_token_loss, tokens
from helpers.paired import build as paired
from helpers.paired import train_beside_reference
from helpers.reference import MixedPrecision, assert_close, full_grads, full_parameters, same_on_all_ranks
from helpers.training import assert_same, full_state, train
from helpers.worlds import some, some_rows
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, explain, init_on_meta, save_model, shard_model
from fsdp2_strategy.errors import ShardError
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.sharding.plan import plan_units

MLPS = (r"model\.layers\.\d+\.mlp",)


def plan_of(model, *patterns, **options):
    return plan_units(model, StrategyConfig(ignored_modules=patterns, **options), is_training=True)


def started(name="llama", *, bf16=False, ignored=MLPS, seed=0, **config):
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=bf16, max_norm=1.0, ignored_modules=ignored, **config))
    model = strategy.prepare_model(build(name, seed), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-2, weight_decay=0.1)
    return strategy, model, optimizer


# --- what is planned -------------------------------------------------------------------------------------------------


def test_no_unit_is_made_of_or_inside_an_ignored_module():
    plan = plan_of(build("llama"), r"model\.layers\.0", r"model\.layers\.0\..*", r"model\.layers\.1\.mlp", "lm_head")
    assert [unit.name for unit in plan.ignored] == ["model.layers.0", "model.layers.1.mlp", "lm_head"]
    assert [unit.name for unit in plan.units] == ["model.embed_tokens", "model.layers.1", ""]
    held = [name for unit in (*plan.units, *plan.ignored) for name in unit.parameters]
    assert sorted(held) == sorted(n for n, _ in build("llama").named_parameters())


def test_blocks_are_found_beside_what_is_ignored():
    large = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(64, 64) for _ in range(3))})
    model = nn.ModuleDict({"vision": large, "layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(2))})
    assert [unit.name for unit in plan_of(model, "vision").units] == ["layers.0", "layers.1"]
    model = nn.ModuleDict({"vision": large, "first": nn.Linear(8, 8), "second": nn.Linear(8, 8)})
    plan = plan_units(
        model, StrategyConfig(min_unit_params=72, ignored_modules=[r"vision\.layers\.\d"]), is_training=True
    )
    assert [unit.name for unit in plan.units] == ["first", "second"]


def test_a_pattern_matches_whole_names_and_one_that_matches_nothing_or_all_is_refused():
    with pytest.raises(ShardError, match=r"the pattern 'layers' matches no module of Llama.* first names are"):
        plan_of(build("llama"), "layers")
    with pytest.raises(ShardError, match=r"Did you mean 'lm_head'\?"):
        plan_of(build("llama"), "lm_haed")
    with pytest.raises(ShardError, match=r"the pattern '\.\*' matches the model itself"):
        plan_of(build("llama"), ".*")
    with pytest.raises(ShardError, match="no parameters outside of ignored modules"):
        plan_of(build("llama"), "model", "lm_head")


def test_a_tied_parameter_is_ignored_wherever_it_is_used_or_not_at_all():
    with pytest.raises(
        ShardError, match=r"cannot ignore lm_head: .* is tied, and model\.embed_tokens, .* is not ignored"
    ):
        plan_of(build("llama_tied"), "lm_head")
    plan = plan_of(build("llama_tied"), "lm_head", r"model\.embed_tokens")
    assert [list(unit.parameters) for unit in plan.ignored] == [["model.embed_tokens.weight"]] * 2


def test_ignored_modules_that_share_a_parameter_have_one_dtype():
    first, second, third = (nn.Linear(4, 4) for _ in range(3))
    second.weight, third.bias = first.weight, second.bias
    model = nn.ModuleDict({"first": first, "second": second, "third": third, "other": nn.Linear(4, 4)})
    for parameter in (first.weight, second.bias, third.weight):
        parameter.requires_grad_(False)
    assert [u.compute_dtype for u in plan_of(model, "first", "second", "third").ignored] == [torch.float32] * 3
    first.bias.requires_grad_(False)
    assert [u.compute_dtype for u in plan_of(model, "first", "second", "third").ignored] == [torch.bfloat16] * 3


def test_keep_fp32_knows_what_is_ignored():
    model = build("llama")
    model.model.layers[0].requires_grad_(False)
    (unit,) = plan_of(model, r"model\.layers\.0\.mlp", keep_fp32=("layers.0.mlp.up_proj",)).ignored
    assert unit.compute_dtype == torch.float32
    (unit,) = plan_of(model, r"model\.layers\.0\.mlp").ignored
    assert unit.compute_dtype == torch.bfloat16


def test_explain_counts_what_is_ignored_on_every_rank():
    model = build("llama")
    text = explain(model, StrategyConfig(ignored_modules=MLPS), world_size=4, file=io.StringIO(), is_training=True)
    (line,) = [line for line in text.splitlines() if "ignored  " in line]
    assert line.split()[:6] == ["model.layers.0.mlp", "…", "model.layers.1.mlp"[-3:], "(2", "equal)", "ignored"]
    assert "fp32" in line
    sharded = explain(model, world_size=4, file=io.StringIO(), is_training=True)
    assert "ignored modules hold" in text and "ignored" not in sharded


# --- what it computes ------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_what_is_ignored_is_a_plain_tensor_whole_on_every_rank_and_may_be_used_without_its_module():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.table = nn.Embedding(96, 16), nn.Linear(16, 96)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return nn.functional.linear(x, self.table.weight, self.table.bias)

    torch.manual_seed(0)
    model = Functional()
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, ignored_modules=("table",)))
    strategy.prepare_model(model, is_training=True)
    ids = tokens(torch.Generator().manual_seed(dist.get_rank()))
    strategy.backward(next_token_loss(model(ids), ids), model)
    assert not isinstance(model.table.weight, DTensor) and isinstance(model.layers[0].weight, DTensor)
    assert model.table.weight.shape == (96, 16) and same_on_all_ranks(model.table.weight.grad.tolist())


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "ignored", "frozen"),
    [
        ("llama", r"model\.layers\.\d+\.mlp", False),
        ("llama", r"model\.layers\.0\.mlp", True),
        ("llama", r"lm_head", False),
        ("clip", "vision_model", False),
        ("clip", "vision_model", True),
        ("plain_transformer", r"layers\.0", False),
    ],
)
def test_bf16_computes_what_is_ignored_as_it_is_stored_and_the_rest_as_ever(name, ignored, frozen):
    import re

    model = build(name)
    modules = {n: m for n, m in model.named_modules() if re.fullmatch(ignored, n)}
    for module in modules.values() if frozen else ():
        module.requires_grad_(False)
    wide = () if frozen else tuple(f"{n}." for n in modules)
    reference = Wide(model, wide)
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=True, ignored_modules=(ignored,)))
    strategy.prepare_model(model, is_training=True)
    stored = {p.dtype for m in modules.values() for p in m.parameters()}
    assert stored == {torch.bfloat16 if frozen else torch.float32}
    for r in range(2):
        expected = loss_of(name, reference, batch_of(name, 0, r))
        (expected / 2).backward()
        if r == dist.get_rank():
            expected_loss = expected.item()
    loss = loss_of(name, model, batch_of(name, 0, dist.get_rank()))
    assert loss.item() == expected_loss
    strategy.backward(loss, model)
    expected_grads = {n: p.grad for n, p in named_parameters(reference.inner).items() if p.grad is not None}
    assert_close(full_grads(model), expected_grads, 1e-6, "gradient")


class Wide(MixedPrecision):
    """The arithmetic of mixed precision, where some modules are fp32: what goes in is cast, and what comes out."""

    def __init__(self, model, wide):
        super().__init__(model)
        self.wide = wide
        for name, module in self.inner.named_modules():
            if f"{name}." in wide:
                module.register_forward_pre_hook(
                    lambda _m, a, k: (to(a, torch.float32), to(k, torch.float32)), with_kwargs=True
                )
                module.register_forward_hook(lambda _m, _a, output: to(output, torch.bfloat16))

    def forward(self, *args, **inputs):
        low = {
            n: p if n.startswith(self.wide) or not p.ndim else p.to(torch.bfloat16)
            for n, p in self.inner.named_parameters()
        }
        return torch.func.functional_call(self.inner, low, args, to(inputs, torch.bfloat16))


def to(values, dtype):
    def cast(value):
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return torch.utils._pytree.tree_map(cast, values)


@pytest.mark.ranks(2)
def test_inference_holds_what_is_ignored_in_the_compute_dtype():
    model = build("llama")
    expected = copy.deepcopy(model).to(torch.bfloat16)
    expected.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
    shard_model(model, config=StrategyConfig(bf16=True, ignored_modules=MLPS))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    ids = tokens(torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)


@pytest.mark.ranks(2)
def test_integers_that_are_ignored_stay_as_they_are():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.arange(12, dtype=torch.int8).view(3, 4), requires_grad=False)

        def forward(self, x):
            return x @ self.codes.to(x.dtype).t()

    model = nn.Sequential(nn.Linear(4, 4), Quantised())
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=True, ignored_modules=("1",)))
    strategy.prepare_model(model, is_training=True)
    assert model[1].codes.dtype == torch.int8
    strategy.backward(model(torch.ones(2, 4)).float().sum(), model)


@pytest.mark.ranks(2)
def test_what_was_frozen_and_ignored_has_no_master_to_train():
    strategy, model, _ = started(bf16=True)
    model.model.layers[0].mlp.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)
    assert strategy.create_optimizer(model, lr=0.1)  # frozen after preparation: it kept its fp32
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=True, ignored_modules=MLPS))
    model = build("llama")
    model.model.layers[0].mlp.requires_grad_(False)
    strategy.prepare_model(model, is_training=True)
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="stored in half precision, expected fp32 for all"):
        strategy.create_optimizer(model, lr=0.1)


@pytest.mark.ranks(2)
def test_a_wrong_pattern_and_different_weights_are_refused_on_every_rank():
    second = dist.get_rank() == 1
    with pytest.raises(ShardError, match=r"failed on rank 1: cannot ignore modules: the pattern 'mlp'"):
        shard_model(build("llama"), config=StrategyConfig(ignored_modules=["mlp"] if second else MLPS))
    with pytest.raises(ShardError, match=r"ranks \[1\] differ from rank 0"):
        shard_model(build("llama"), config=StrategyConfig(ignored_modules=MLPS if second else ()))
    model = build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += second
    with pytest.raises(
        ShardError, match=r"\(model\.layers\.0\.mlp\.up_proj\.weight.*\) of \d+ differ between the ranks"
    ):
        shard_model(model, config=StrategyConfig(ignored_modules=MLPS))


@pytest.mark.ranks(2)
def test_a_tower_that_not_every_rank_runs_is_not_trained_where_it_is_ignored():
    frozen = build("llava")
    frozen.model.vision_tower.requires_grad_(False)
    tower = r"model\.vision_tower"
    for model, policy, match in (
        (build("llava"), "root", "would wait for the gradients of ranks without"),
        (frozen, "replicate", "holds the full parameters of ignored modules already"),
    ):
        with pytest.raises(ShardError, match=match):
            shard_model(model, config=StrategyConfig(mixed_mm_data=policy, ignored_modules=[tower]), is_training=True)
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, mixed_mm_data="root", ignored_modules=(tower,)))
    strategy.prepare_model(frozen, is_training=True)
    optimizer = strategy.create_optimizer(frozen, lr=1e-3)
    batch = batch_of("llava", 0, 0)
    if dist.get_rank():
        ids = batch["input_ids"].clamp(max=90)
        batch = {"input_ids": ids, "labels": ids}
    strategy.backward(frozen(**batch).loss, frozen, optimizer)
    assert strategy.optimizer_step(optimizer, frozen).stepped


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_ignored_within_a_unit_that_is_walked_through_is_left_to_itself(recompute):
    ignored = [r".*\.norm", r"left\.1", r"right\.2\.(inward|outward)"]
    train_beside_reference(paired(recompute=recompute), ignored_modules=ignored)

    model = paired(recompute=recompute).float()
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=True, ignored_modules=(r".*\.norm", r"left\.0\.inward")))
    strategy.prepare_model(model, is_training=True)
    seen = []
    for module in (model.right[1].norm, model.left[0].inward):
        module.register_forward_hook(lambda m, a, output: seen.append((a[0].dtype, m.weight.dtype, output.dtype)))
    strategy.backward(model(torch.ones(4, 12)).float().square().mean(), model)
    assert set(seen) == {(torch.float32, torch.float32, torch.bfloat16)}
    assert same_on_all_ranks(model.right[1].norm.weight.grad.tolist())


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "config",
    some([{"bf16": False}, {"bf16": True}, {"bf16": True, "use_mp_opt": True}], [{"bf16": True, "use_mp_opt": True}]),
    ids=str,
)
def test_a_run_goes_on_to_the_bit(tmp_path, config):
    strategy, model, optimizer = started(**config)
    train(strategy, model, optimizer, None, range(3))
    strategy.save_ckpt(model, tmp_path)
    expected = train(strategy, model, optimizer, None, range(3, 6))
    strategy, model, optimizer = started(seed=7, **config)
    assert strategy.load_ckpt(model, tmp_path)[0]
    assert train(strategy, model, optimizer, None, range(3, 6)) == expected


def save_three_steps(path):
    strategy, model, optimizer = started()
    train(strategy, model, optimizer, None, range(3))
    strategy.save_ckpt(model, path)
    state = full_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, path / "expected.pt")
    dist.barrier()


def load_it(path, ignored):
    strategy, model, optimizer = started(seed=7, ignored=ignored)
    strategy.load_ckpt(model, path)
    assert_same(full_state(model, optimizer), torch.load(path / "expected.pt"))
    train(strategy, model, optimizer, None, range(3, 4))


@pytest.mark.parametrize(
    ("world", "ignored"),
    some_rows([(1, MLPS), (3, MLPS), (2, ()), (3, ("lm_head",))], [(3, ("lm_head",))]),
)
def test_other_ranks_and_other_ignored_modules_load_the_same(tmp_path, run_on, world, ignored):
    run_on(2, save_three_steps, path=tmp_path)
    run_on(world, load_it, path=tmp_path, ignored=ignored)


@pytest.mark.ranks(2)
def test_an_export_is_that_of_the_sharded_model_and_a_model_on_meta_reads_it(tmp_path):
    strategy, model, optimizer = started()
    train(strategy, model, optimizer, None, range(2))
    expected = full_parameters(model)
    save_model(model, None, tmp_path)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same({n: p.detach() for n, p in opened.named_parameters()}, expected)
    with init_on_meta():
        other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    strategy.prepare_model(other, is_training=True)
    assert_same(full_parameters(other), expected)
    optimizer = strategy.create_optimizer(other, lr=1e-2)
    results = train(strategy, other, optimizer, None, range(2, 4))
    assert same_on_all_ranks(results[-1][1].grad_norm)
    assert same_on_all_ranks(other.model.layers[0].mlp.up_proj.weight.tolist())


@pytest.mark.ranks(2)
def test_a_trip_to_host_memory_changes_nothing():
    def run(trip):
        strategy, model, optimizer = started()
        results = []
        for step in range(3):
            results += train(strategy, model, optimizer, None, range(step, step + 1))
            if trip:
                strategy.offload_model([model])
                strategy.maybe_offload_optimizer(optimizer)
                strategy.maybe_load_optimizer(optimizer)
                strategy.reload_model([model])
        return results

    assert run(trip=True) == run(trip=False)
