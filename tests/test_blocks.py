"""Which modules become units, and what `explain` says of them before anything is allocated."""

from __future__ import annotations

import io
import itertools
import re
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models import HUGGING_FACE, PlainTransformer, Recurrent, SharedBlocks, UNet, build
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, explain, find_blocks
from fsdp2_strategy.errors import MeshError, ShardError, StepError
from fsdp2_strategy.model.fsdp_state import parameter_groups
from fsdp2_strategy.sharding import known_policies
from fsdp2_strategy.sharding.blocks import class_names_of
from fsdp2_strategy.sharding.plan import plan_units
from fsdp2_strategy.sharding.shard import is_for_training


def units(model, **options):
    is_training = options.pop("is_training", True)
    return {unit.name: unit for unit in plan_units(model, StrategyConfig(**options), is_training=is_training).units}


def units_by_size(model, least):
    config = StrategyConfig(min_unit_params=least)
    return {unit.name: unit for unit in plan_units(model, config, is_training=True).units}


def test_given_class_names_decide():
    assert list(find_blocks(build("llama"), ["LlamaMLP"])) == ["model.layers.0.mlp", "model.layers.1.mlp"]


def test_a_class_name_that_matches_nothing_lists_what_exists_and_the_nearest():
    with pytest.raises(ShardError) as caught:
        find_blocks(build("llama"), ["LlamaDecoderLayr"])
    assert "class names ['LlamaDecoderLayr'] match no module of LlamaForCausalLM" in str(caught.value)
    assert "LlamaAttention, LlamaDecoderLayer" in str(caught.value)
    assert "Did you mean 'LlamaDecoderLayer'?" in str(caught.value)


def test_classes_without_an_instance_are_left_out_unless_none_has_one():
    model = build("llama")
    mlp = type(model.model.layers[0].mlp)
    assert class_names_of(model, {nn.Conv2d, mlp, nn.LSTM}) == ("LlamaMLP",)
    assert class_names_of(model, [nn.Conv2d, "LlamaMLP"]) == ("LlamaMLP",)
    assert class_names_of(model, [mlp, "LlamaMPL"]) == ("LlamaMLP", "LlamaMPL"), "names are not left out"
    assert class_names_of(model, {nn.Conv2d, nn.LSTM}) == ("Conv2d", "LSTM")
    assert class_names_of(model, nn.Conv2d) == ("Conv2d",) and class_names_of(model, None) == ()


def test_the_models_own_list_is_read_and_never_changed():
    cls = transformers.LlamaForCausalLM
    before = set(cls._no_split_modules)
    assert list(find_blocks(build("llama"))) == ["model.layers.0", "model.layers.1"]
    assert set(cls._no_split_modules) == before


def test_models_inside_a_wrapper_are_found():
    class Actor(nn.Module):
        is_actor = True

        def __init__(self):
            super().__init__()
            self.model = build("llama")

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_model = build("qwen2_vl")
            self.value_head = nn.Linear(32, 1)

    assert list(find_blocks(Actor())) == ["model.layers.0", "model.layers.1"]
    assert {type(m).__name__ for m in find_blocks(Critic()).values()} == {"Qwen2VLVisionBlock", "Qwen2VLDecoderLayer"}


def test_repeated_layers_are_the_fallback_and_sizes_the_last(caplog):
    with caplog.at_level("INFO", logger="fsdp2_strategy"):
        assert list(find_blocks(PlainTransformer())) == ["layers.0", "layers.1", "layers.2"]
    assert "the repeated layers of layers" in caplog.text
    assert set(find_blocks(UNet())) == {"down2", "middle.2", "up2"}
    assert find_blocks(UNet(), min_unit_params=10**6) == {}
    assert set(find_blocks(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))) == {"0", "2"}
    assert "rnn" in find_blocks(Recurrent())


def test_a_given_size_forces_units_by_size():
    assert list(find_blocks(build("llama"), min_unit_params=3000)) != list(find_blocks(build("llama")))
    found = units_by_size(build("llama"), 3000)
    assert {unit.kind for unit in found.values()} >= {"size", "root"}
    assert "block" not in {unit.kind for unit in found.values()}
    assert list(find_blocks(build("llama"), ["LlamaDecoderLayer"], min_unit_params=3000)) == [
        "model.layers.0",
        "model.layers.1",
    ]


def test_entries_without_a_forward_are_replaced_by_what_they_hold():
    layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8)]) for _ in range(2))
    assert list(find_blocks(nn.ModuleDict({"layers": layers}))) == [
        "layers.0.0",
        "layers.0.1",
        "layers.1.0",
        "layers.1.1",
    ]


def test_embedding_and_head_are_units_and_small_leftovers_go_to_the_root():
    found = units(build("llama"))
    assert [found[n].kind for n in ("model.embed_tokens", "model.layers.0", "lm_head", "")] == [
        "embedding", "block", "head", "root",
    ]  # fmt: skip
    assert list(found[""].parameters) == ["model.norm.weight"]


def test_a_root_without_parameters_does_not_count_as_another_dtype():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.policy = build("llama")
            del self.policy.model.norm

    found = units(Wrapper())
    assert "" not in found
    assert found["policy.model.layers.0"].cast_inputs == "first"
    assert not found["policy.model.embed_tokens"].stays_gathered
    assert units(PlainTransformer())["embed"].stays_gathered


def test_tied_weights_lie_in_the_root_alone():
    found = units(build("llama_tied"))
    assert list(found[""].parameters) == ["model.embed_tokens.weight", "model.norm.weight"]
    assert "lm_head" not in found


def test_shared_parameters_open_their_blocks_and_shared_modules_become_units():
    found = units(SharedBlocks())
    assert {n: u.kind for n, u in found.items() if n.startswith("blocks")} == {
        "blocks.0.outer": "split", "blocks.1": "block", "blocks.2.outer": "split",
    }  # fmt: skip
    assert "blocks.0.inner.weight" in found[""].parameters

    shared = nn.Linear(8, 8)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), shared) for _ in range(2))
    found = units(nn.ModuleDict({"blocks": blocks}))
    assert found["blocks.0.1"].kind == "shared"
    assert list(found["blocks.0.1"].parameters) == ["blocks.0.1.weight", "blocks.0.1.bias"]


def test_every_parameter_belongs_to_exactly_one_unit_or_is_replicated():
    for name in ("llama", "bert", "t5", "clip", "recurrent", "shared_blocks", "mamba", "qwen2_vl"):
        model = build(name)
        plan = plan_units(model, StrategyConfig(keep_fp32=("norm",) if name == "llama" else ()), is_training=True)
        claimed = [id(p) for u in plan.units for p in u.parameters.values()] + [id(p) for p in plan.replicated.values()]
        assert sorted(claimed) == sorted(id(p) for p in model.parameters()), name


def test_units_are_pure_in_dtype():
    found = units(build("llama"), keep_fp32=("layernorm", "model.norm"))
    assert found["model.layers.0"].compute_dtype == torch.bfloat16
    assert found["model.layers.0.input_layernorm"].compute_dtype == torch.float32
    assert found["model.layers.0.input_layernorm"].parent_dtype == torch.bfloat16
    assert found[""].compute_dtype == torch.float32

    whole = units(build("qwen2_vl"), keep_fp32=("visual",))
    assert whole["model.visual"].kind == "dtype"
    assert whole["model.visual.blocks.0"].compute_dtype == torch.float32
    assert whole["model.visual.blocks.0"].parent_dtype is None

    mixed = PlainTransformer().to(torch.bfloat16)
    mixed.layers[0].linear1.float()
    found = units(mixed, bf16=False, is_training=False)
    assert found["layers.0.linear1"].compute_dtype == torch.float32


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ShardError, match=r"pattern 'model\.nrm' matches no parameter"):
        units(build("llama"), keep_fp32=("model.nrm",))


def test_frozen_parameters_get_no_fp32_master():
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" in name)
    plan = plan_units(model, StrategyConfig(), is_training=True)
    stored = {n: plan.stored_dtype(u, p) for u in plan.units for n, p in u.parameters.items()}
    assert stored["model.layers.0.mlp.up_proj.weight"] == torch.float32
    assert stored["model.layers.1.mlp.up_proj.weight"] == torch.bfloat16


def test_explain_prints_units_bytes_ties_and_doubts_without_allocating(capsys):
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True))  # 6.6 billion
    text = explain(model, StrategyConfig(shard_size=8), world_size=64, is_training=True)
    assert capsys.readouterr().out == text + "\n"
    count = sum(p.numel() for p in model.parameters())
    assert f"parameters {count:,}" in text
    assert "model.layers.0 … 31 (32 equal)" in text
    assert f"each rank  {count * 4 / 8 / 1e9:.3g} GB parameters" in text
    assert f"{count * 8 / 8 / 1e9:.3g} GB optimizer" in text
    assert "tied       model.embed_tokens.weight = lm_head.weight" in text
    assert "root unit  model.embed_tokens.weight, model.norm.weight" in text
    assert "buffers    512 B on each rank (fp32)" in text
    assert "replicated" in explain(build("clip"), file=io.StringIO(), is_training=True)
    only_root = explain(nn.Linear(4, 4), file=io.StringIO(), is_training=True)
    assert "the root is the only unit" in only_root
    model.model.layers[:16].requires_grad_(False)
    assert "model.layers.0 … 15 (16 equal)" in explain(model, file=io.StringIO(), is_training=True)


PLANS = {
    "bf16": {},
    "fp32": {"bf16": False},
    "fp16": {"fp16": True},
    "masters": {"use_mp_opt": True},
    "by name": {"block_class_names": ("LlamaAttention", "LlamaMLP"), "keep_fp32": ("norm",)},
    "ignored": {"ignored_modules": ("model.layers.0.mlp",), "shard_size": 1},
    "by size": {"min_unit_params": 3000, "cpu_offload": True},
    "gathered": {"reshard_after_forward": False, "shard_size": "auto"},
    "recomputed": {"activation_checkpointing": True, "reduce_in_full_precision": False},
}


def bytes_in(text, what):
    number, unit = re.search(rf"([\d.]+) (k?B) {what}", text).groups()
    return float(number) * (1000 if unit == "kB" else 1)


def most(size):
    largest = torch.tensor(float(size))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return pytest.approx(largest.item(), rel=0.01)


def local_bytes(tensors):
    held = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in held)


def gathered_bytes(model):
    """Return the bytes of parameters that units hold in another form than as shards."""
    gathered = {}
    for group in parameter_groups(model):
        for sharded in group.fsdp_params:
            own = getattr(sharded._module_info.module, sharded._module_info.param_name)
            if own is not sharded.sharded_param:
                storage = (own.to_local() if isinstance(own, DTensor) else own).untyped_storage()
                gathered[storage.data_ptr()] = storage.nbytes()
    return sum(gathered.values())


def names_of_wrappers(function):
    """Return the names under which a function and the functions around it were defined."""
    inner = [names_of_wrappers(function.__wrapped__)] if hasattr(function, "__wrapped__") else []
    return {getattr(getattr(function, "__code__", None), "co_name", ""), *itertools.chain.from_iterable(inner)}


def assert_explained(text, strategy, model, *, is_training):
    """Compare a text of `explain` with the model that `prepare_model` has sharded: units, and bytes on the ranks."""
    rows = text.split("parameters   gathered\n")[1].split("\n\n")[0].splitlines()
    counts = [int(m[1]) if (m := re.search(r"\((\d+) equal\)", row)) else 1 for row in rows if " ignored " not in row]
    assert sum(counts) == len([m for m in model.modules() if isinstance(m, FSDPModule)]), text
    meshes = {p.device_mesh.size(p.device_mesh.ndim - 1) for p in model.parameters() if isinstance(p, DTensor)}
    assert meshes == {int(re.search(r"each parameter split over (\d+)", text)[1])}
    assert bytes_in(text, "parameters") == most(local_bytes(model.parameters()))
    assert ("in host memory" in text) == strategy.config.cpu_offload
    recomputed = [m for m in model.modules() if "recomputed" in names_of_wrappers(m.forward)]
    names = re.search(r"recomputed ([\d,]+) module", text)
    assert len(recomputed) == (int(names[1]) if names else 0)
    loss = model(input_ids=torch.arange(6)[None]).logits.float().mean()
    assert bytes_in(text, "on each rank stay gathered") == most(gathered_bytes(model))
    if not is_training:
        return
    optimizer = strategy.create_optimizer(model, lr=0.1)
    strategy.backward(loss, model, optimizer)
    assert bytes_in(text, "gradients") == most(local_bytes(p.grad for p in model.parameters() if p.grad is not None))
    assert strategy.optimizer_step(optimizer, model).stepped
    held = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert bytes_in(text, "optimizer") == most(local_bytes(held))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", PLANS)
def test_a_strategy_explains_what_prepare_model_then_does(name, is_training):
    strategy = FSDPV2Strategy(config=StrategyConfig(**PLANS[name]))
    model = build("llama")
    text = strategy.explain(model, is_training, file=io.StringIO())
    strategy.prepare_model(model, is_training)
    with pytest.raises(ShardError, match="is already sharded, expected a model before prepare_model"):
        strategy.explain(model, is_training)
    assert_explained(text, strategy, model, is_training=is_training)
    strategy.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_training", [True, False])
def test_the_head_stays_gathered_only_for_the_backward_that_follows(is_training):
    strategy = FSDPV2Strategy(config=StrategyConfig())
    model = strategy.prepare_model(build("llama"), is_training)
    head = model.lm_head
    for with_gradients in (True, False, True):
        with torch.set_grad_enabled(with_gradients):
            loss = model(input_ids=torch.arange(6)[None]).logits.float().mean()
        assert isinstance(head.weight, DTensor) != (is_training and with_gradients)
        if is_training and with_gradients:
            loss.backward()
        assert isinstance(head.weight, DTensor)
    strategy.close()


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(4)
@pytest.mark.parametrize("arguments", [(True, -1, 2), (True, 2, False), (False, 4, 2), (False,), ()])
def test_explain_takes_the_arguments_of_prepare_model(arguments):
    strategy = FSDPV2Strategy(config=StrategyConfig(shard_size=2, use_mp_opt=True))
    model = build("llama")
    text = strategy.explain(model, *arguments, file=io.StringIO())
    strategy.prepare_model(model, *arguments)
    assert_explained(text, strategy, model, is_training=is_for_training(model))
    strategy.close()


@pytest.mark.ranks(2)
def test_explain_refuses_what_prepare_model_refuses():
    strategy = FSDPV2Strategy(config=StrategyConfig(activation_checkpointing=["LlamaDecoderLayr"]))
    for call in (strategy.explain, strategy.prepare_model):
        with pytest.raises(ShardError, match="Did you mean 'LlamaDecoderLayer'"):
            call(build("llama"), True)
        with pytest.raises(ShardError, match="reshard_after_forward is 3, expected true, false or a divisor"):
            call(build("llama"), reshard_after_forward=3)
        with pytest.raises(MeshError, match="shard_size is 3"):
            call(build("llama"), shard_size=3)
        with pytest.raises(ShardError, match=r"it is 'llama', expected an nn\.Module"):
            call("llama")
    strategy.close()
    with pytest.raises(StepError, match="it is closed"):
        strategy.explain(build("llama"))


def test_explain_refuses_a_shard_size_that_does_not_divide():
    with pytest.raises(MeshError, match=r"shard_size is 3, .* world size 8\. Use one of \[1, 2, 4, 8\]"):
        explain(build("llama"), StrategyConfig(shard_size=3), world_size=8, is_training=True)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ShardError, match="ReLU has no parameters"):
        units(nn.ReLU())


# --- what the root holds ---------------------------------------------------------------------------------------------


class Backbone(nn.Module):
    """Layers under another name than those that a policy lists."""

    def __init__(self, width=32):
        super().__init__()
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 64, batch_first=True) for _ in range(4))
        self.decoder = build("llama_tied")


class KnownPolicy(Backbone):
    name = "a_known_policy"


def warnings_of(model, **options):
    return list(plan_units(model, StrategyConfig(**options), is_training=True).warnings())


def test_a_known_policy_without_its_blocks_is_an_error_that_lists_the_module_types(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(known_policies._registered, "a_known_policy", known_policies.Policy(
            name="a_known_policy", blocks=("TransformerEncoderLayerr",)
        ))  # fmt: skip
        with pytest.raises(ShardError) as caught:
            find_blocks(KnownPolicy())
        for text in (
            "the policy a_known_policy with the blocks TransformerEncoderLayerr",
            "LlamaDecoderLayer",
            "Did you mean 'TransformerEncoderLayer'?",
            "register_policy('a_known_policy'",
        ):
            assert text in str(caught.value)
        assert "encoder.0" in find_blocks(KnownPolicy(), ["TransformerEncoderLayer"])


def test_a_root_that_holds_layers_is_reported_with_what_to_register_also_where_weights_are_tied():
    (warning,) = warnings_of(Backbone(), block_class_names=["LlamaDecoderLayer"])
    assert "besides embeddings and heads, most of them in TransformerEncoderLayer" in warning
    assert "as block_class_names, or call register_policy" in warning
    assert warning in explain(Backbone(), StrategyConfig(block_class_names=["LlamaDecoderLayer"]), is_training=True)
    assert not warnings_of(Backbone(), block_class_names=["LlamaDecoderLayer", "TransformerEncoderLayer"])
    assert not warnings_of(build("llama_tied")), "tied weights belong to the root"


@pytest.mark.full
def test_every_known_architecture_has_its_layers_outside_the_root():
    for name in set(HUGGING_FACE) - {
        "qwen2_vl",
        "llava",
    }:  # tiny vision encoders have more around the layers than in them
        assert not [text for text in warnings_of(build(name)) if "the root unit" in text], name


class Tower(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.layers = nn.ModuleList(Outer() for _ in range(blocks))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x):
        return x + sum(inner(x) for inner in self.inner)


@pytest.mark.full
def test_planning_grows_as_the_number_of_blocks_does():
    def calls(blocks):
        model, counted = Tower(blocks), Counter()
        sys.setprofile(lambda _frame, event, _argument: counted.update([event]))
        try:
            plan_units(model, StrategyConfig(), is_training=True)
        finally:
            sys.setprofile(None)
        return counted["call"]

    assert calls(600) < 2.2 * calls(300)
