"""Meta init and loading: values equal to from_pretrained's at every world size, or a clear error on every rank."""

from __future__ import annotations

import copy
import errno
import gc
import io
import json
import mmap
import os
import pickle
import resource
import shutil
import weakref
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models import CASES, HUGGING_FACE, Mlp, build
from helpers.reference import full, resident, same_on_all_ranks
from helpers.versions import needs_new_conversions
from helpers.worlds import names_and_worlds, some
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.init import orthogonal_
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import (
    FSDPV2Strategy,
    StrategyConfig,
    build_mesh,
    init_on_meta,
    load_weights,
    save_model,
    shard_model,
)
from fsdp2_strategy.distributed import progress
from fsdp2_strategy.errors import CheckpointError, FSDP2StrategyError
from fsdp2_strategy.hf import load
from fsdp2_strategy.hf.load_plan import LoadReport
from fsdp2_strategy.hf.meta.recorded_init import recorded_tensor
from fsdp2_strategy.storage import verified_read
from fsdp2_strategy.storage.new_memory import populate
from fsdp2_strategy.storage.verified_read import Reader

WORLDS = (1, 2, 3)


def tensors_of(model):
    """Return all parameters and buffers, gathered, by name; collective."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: full(tensor).to("cpu", copy=True) for name, tensor in named}


def assert_same_values(actual, expected):
    actual, expected = tensors_of(actual), tensors_of(expected)
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


@pytest.fixture
def folder(tmp_path):
    """A small Llama, saved."""
    build("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


# --- equality with from_pretrained ------------------------------------------------------------------------------------


def prepared_equals_from_pretrained(name, folder):
    cls = type(CASES[name].build())
    expected = cls.from_pretrained(folder)
    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        model = cls.from_pretrained(folder)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert not model.training
    strategy.prepare_model(model)
    assert_same_values(model, expected)
    local = sum(p.to_local().numel() for p in model.parameters() if p.ndim)
    rows = {p: p.shape[0] for p in model.parameters() if p.ndim}
    world = dist.get_world_size()
    assert local <= sum(-(-n // world) * (p.numel() // n) for p, n in rows.items()), "more than a shard is held"


@pytest.mark.parametrize(
    ("name", "world_sizes"),
    names_and_worlds(HUGGING_FACE, WORLDS, everywhere=("llama_tied",), usual=("gpt_oss", "qwen2_vl")),
)
def test_meta_init_and_load_equal_from_pretrained_for_an_architecture(name, world_sizes, tmp_path, run_on):
    build(name).save_pretrained(tmp_path)
    for world_size in world_sizes:
        run_on(world_size, prepared_equals_from_pretrained, name=name, folder=tmp_path)


def test_a_sharded_folder_equals_one_file(tmp_path, run_on):
    build("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    run_on(2, prepared_equals_from_pretrained, name="llama", folder=tmp_path)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("name", some(["llama", "deepseek_v3"], ["deepseek_v3"]))
def test_arguments_of_from_pretrained_behave_as_usual(name, dtype, tmp_path):
    cls = type(CASES[name].build())
    if dist.get_rank() == 0:
        build(name).to(torch.bfloat16).save_pretrained(tmp_path)
    dist.barrier()
    options = {"dtype": dtype, "attn_implementation": "eager"}
    expected = cls.from_pretrained(tmp_path, **options)
    with init_on_meta():
        model = cls.from_pretrained(tmp_path, **options)
    assert model.config._attn_implementation == "eager"
    assert {n: p.dtype for n, p in model.named_parameters()} == {n: p.dtype for n, p in expected.named_parameters()}
    shard_model(model, config=StrategyConfig(bf16=False))
    report = load_weights(model)
    assert_same_values(model, expected)
    wider = {n for n, p in expected.named_parameters() if p.dtype != torch.bfloat16}
    assert {n for n in report.cast if n in dict(model.named_parameters())} == wider


@pytest.mark.ranks(2)
def test_masters_are_what_from_pretrained_then_prepare_gives(tmp_path):
    if dist.get_rank() == 0:
        build("llama").save_pretrained(tmp_path)  # fp32: bf16 rounds it, and the masters are the rounded values
    dist.barrier()
    strategy = FSDPV2Strategy(bf16=True)
    expected = strategy.prepare_model(
        LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), is_training=True
    )
    with strategy.init_model_context(meta_init=True):
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    strategy.prepare_model(model, is_training=True)
    assert next(model.parameters()).dtype == torch.float32
    assert_same_values(model, expected)


@pytest.mark.ranks(4)
def test_hybrid_sharding_reads_once_per_shard_group_and_replicas_agree(tmp_path):
    monkeypatch = pytest.MonkeyPatch()
    if dist.get_rank() == 0:
        build("qwen3_moe").save_pretrained(tmp_path)
    dist.barrier()
    expected = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path)
    with init_on_meta():
        model = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path)
    shard_model(model, build_mesh(2), StrategyConfig(bf16=False))
    readers = []
    monkeypatch.setattr(load, "Reader", lambda *a, **k: readers.append(Reader(*a, **k)) or readers[-1])
    load_weights(model)
    count = torch.tensor(sum(reader.bytes_read for reader in readers))
    dist.all_reduce(count)
    monkeypatch.undo()
    assert count.item() == sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())
    assert_same_values(model, expected)


def bytes_read():
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


@pytest.mark.ranks(3)
def test_bytes_read_are_the_bytes_of_the_shard(tmp_path):
    if dist.get_rank() == 0:
        build("mixtral").save_pretrained(tmp_path)
    dist.barrier()
    with init_on_meta():
        model = transformers.MixtralForCausalLM.from_pretrained(tmp_path)
    shard_model(model, config=StrategyConfig(bf16=False))
    load_weights(model)  # Python and torch read modules at their first use
    counts = [bytes_read()]
    for _ in range(3):
        load_weights(model)
        counts.append(bytes_read())
    read = min(after - before for before, after in pairwise(counts))  # other threads of this process may read, too
    needed = sum(p.to_local().nbytes for p in model.parameters())
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little") + 8
    slack = 4096  # what the measurement itself reads, and the process group
    assert needed + header <= read <= needed + header + slack, [read - needed - header, *counts]


def load_in_little_memory(folder):
    with init_on_meta():
        model = LlamaForCausalLM.from_pretrained(folder)
    shard_model(model, config=StrategyConfig(bf16=False))
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = resident("VmRSS")
    load_weights(model)
    shard = sum(p.to_local().nbytes for p in model.parameters())
    assert shard > 90e6
    assert resident("VmHWM") - before < shard + 64e6


@pytest.mark.full
def test_a_rank_holds_its_shard_and_little_more_while_it_loads(tmp_path, run_on):
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, vocab_size=2000, num_attention_heads=8
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    run_on(2, load_in_little_memory, folder=tmp_path)


def test_new_memory_gets_its_pages_in_few_calls_and_memory_with_values_keeps_them():
    faults = []
    for is_populated in (False, True):
        new = torch.frombuffer(mmap.mmap(-1, 2**26), dtype=torch.uint8)
        if is_populated:
            populate(new)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        new.fill_(1)
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    assert faults[1] < faults[0] / 10
    populate(new[1000:-1000])  # neither begins nor ends at a page
    assert new.unique().tolist() == [1]


@pytest.mark.ranks(2)
def test_only_a_load_into_new_memory_allocates_pages(folder):
    with init_on_meta():
        model = LlamaForCausalLM.from_pretrained(folder)
    shard_model(model, config=StrategyConfig(bf16=False))
    with patch.object(verified_read, "populate") as calls:
        load_weights(model)
        count = calls.call_count  # a read that is split into blocks calls it once per part
        assert count >= len(list(model.parameters()))
        load_weights(model)
        assert calls.call_count == count


# --- what is built, and how -------------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
def test_transformers_is_as_before_on_leaving_also_after_an_exception(folder):
    from transformers import modeling_utils

    def look():
        pretrained = modeling_utils.PreTrainedModel
        names = ("_load_pretrained_model", "_finalize_model_loading", "from_pretrained", "__init__")
        return [modeling_utils.check_and_set_device_map, torch.linspace, *(vars(pretrained).get(n) for n in names)]

    before = look()
    with init_on_meta(), init_on_meta():
        AutoModelForCausalLM.from_pretrained(folder)
    assert look() == before
    with pytest.raises(ZeroDivisionError), init_on_meta():
        raise ZeroDivisionError
    assert look() == before
    assert torch.empty(1).device.type == "cpu"
    assert not next(AutoModelForCausalLM.from_pretrained(folder).parameters()).is_meta


@pytest.mark.ranks(1)
def test_only_the_configuration_is_read_on_meta(folder):
    (folder / "model.safetensors").write_bytes(b"not a safetensors file")
    with init_on_meta():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())


class Actor(nn.Module):
    is_actor = True

    def __init__(self, path):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(path)

    def forward(self, ids):
        return self.model(ids).logits


class Critic(nn.Module):
    def __init__(self, path):
        super().__init__()
        self.backbone = transformers.AutoModel.from_pretrained(path)
        self.value_head = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
        self.norm = nn.LayerNorm(32)

    def forward(self, ids):
        return self.value_head(self.norm(self.backbone(ids).last_hidden_state))


@pytest.mark.ranks(2)
def test_a_model_built_inside_an_actor_is_loaded(folder):
    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        actor = Actor(folder)
    strategy.prepare_model(actor, is_training=True)
    assert_same_values(actor.model, LlamaForCausalLM.from_pretrained(folder))


@pytest.mark.ranks(2)
def test_a_fresh_head_is_initialised_as_its_own_init_functions_do_and_the_rest_loaded(folder):
    strategy = FSDPV2Strategy(bf16=False, seed=5)
    with strategy.init_model_context(meta_init=True):
        critic = Critic(folder)
    strategy.set_seed(7)
    strategy.prepare_model(critic, is_training=True)
    assert_same_values(critic.backbone, transformers.AutoModel.from_pretrained(folder))
    torch.manual_seed(7)
    head = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
    torch.manual_seed(7)
    for module in head:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    assert_same_values(critic.value_head, head)
    assert full(critic.norm.weight).eq(1).all() and full(critic.norm.bias).eq(0).all()
    critic(torch.ones(1, 4, dtype=torch.long)).sum().backward()


@pytest.mark.ranks(2)
def test_ranks_with_other_random_states_draw_the_same_fresh_values_and_keep_their_states(folder):
    with init_on_meta():
        critic = Critic(folder)
    shard_model(critic, config=StrategyConfig(bf16=False))
    torch.manual_seed(dist.get_rank())
    state = torch.get_rng_state()
    load_weights(critic, strict=False)
    assert same_on_all_ranks([t.sum().item() for t in tensors_of(critic.value_head).values()])
    assert torch.equal(torch.get_rng_state(), state) == bool(dist.get_rank()), "rank 0 drew, the others are as before"


@pytest.mark.ranks(2)
def test_a_head_that_replaces_the_loaded_one_is_fresh(folder):
    with init_on_meta():
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.lm_head = nn.Linear(32, 1, bias=False)
    shard_model(model, config=StrategyConfig(bf16=False))
    report = load_weights(model, strict=False)
    assert report.missing == ["lm_head.weight"]
    assert 0 < full(model.lm_head.weight).abs().max() <= 32**-0.5
    expected = LlamaForCausalLM.from_pretrained(folder)
    assert_same_values(model.model, expected.model)


@pytest.mark.ranks(2)
def test_a_part_taken_out_of_a_model_on_meta_keeps_its_values(folder):
    with init_on_meta():
        whole = AutoModelForCausalLM.from_pretrained(folder)
        part = nn.Sequential(whole.model.layers[1].mlp, whole.lm_head)
    del whole
    shard_model(part, config=StrategyConfig(bf16=False))
    load_weights(part, strict=False)
    expected = LlamaForCausalLM.from_pretrained(folder)
    assert_same_values(part, nn.Sequential(expected.model.layers[1].mlp, expected.lm_head))


@pytest.mark.ranks(2)
def test_a_missing_task_head_is_initialised_and_a_missing_layer_is_an_error(folder):
    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    strategy.prepare_model(model, is_training=True)
    assert 0 < full(model.score.weight).std() < 0.1
    with strategy.init_model_context(meta_init=True):
        model = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=3)
    with pytest.raises(
        CheckpointError, match=r"lack 9 tensors \(model\.layers\.2.*build the model outside of init_on_meta"
    ):
        strategy.prepare_model(model)


def untie(model):
    seen = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in seen:
                module._parameters[name] = nn.Parameter(parameter.detach().clone())
            seen.add(id(parameter))


def from_config_equals_its_own_init(name):
    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        model = CASES[name].build()
    strategy.set_seed(3)
    strategy.prepare_model(model, is_training=True)
    expected = CASES[name].build()
    for module in expected.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    for tensor in (*expected.parameters(), *expected.buffers()):
        tensor.__dict__.pop("_is_hf_initialized", None)
    torch.manual_seed(3)
    if hasattr(expected, "initialize_weights"):
        untie(expected)  # as when transformers initialises
        expected.initialize_weights()
        expected.tie_weights()
    else:
        for module in expected.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    actual, wanted = tensors_of(model), tensors_of(expected)
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[n], wanted[n]) for n in wanted), [n for n in wanted if not actual[n].equal(wanted[n])]


FROM_CONFIG = ("llama", "llama_tied", "gpt2", "mixtral", "mamba", "qwen2_vl", "t5", "bert", "mlp", "unet")


@pytest.mark.parametrize(
    ("name", "world_sizes"),
    names_and_worlds(FROM_CONFIG, WORLDS, everywhere=(), usual=("mixtral", "unet")),
)
def test_models_from_a_configuration_get_the_values_of_the_unsharded_init(name, world_sizes, run_on):
    for world_size in world_sizes:
        run_on(world_size, from_config_equals_its_own_init, name=name)


class Handmade(nn.Module):
    """What constructors of trainers do: raw parameters, computed buffers, explicit inits, copies."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 5)
        nn.init.zeros_(self.linear.weight)
        nn.init.constant_(self.linear.bias, 5.0)
        self.head = nn.Linear(5, 3, bias=False)
        self.head.weight.data.normal_(mean=0.0, std=1 / 6)
        self.attention = nn.MultiheadAttention(8, 2)
        self.scale = nn.Parameter(torch.full((7,), 0.5))
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.noise = nn.Parameter(torch.randn(3, 4).t() * 0.1)
        self.q = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        self.target = copy.deepcopy(self.q)
        self.orthogonal = nn.Linear(6, 6)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.truncated = nn.Linear(6, 6)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        self.identity = nn.Conv1d(4, 4, 3)
        nn.init.dirac_(self.identity.weight)
        self.imported = nn.Linear(6, 6)
        orthogonal_(self.imported.weight)  # known by its own name in this module
        self.halved = nn.Linear(4, 4)
        self.halved.weight.data = self.halved.weight.data * 0.5
        self.half = nn.Linear(4, 4).bfloat16()
        self.picked = nn.Linear(4, 4)
        self.picked.weight.data[1].zero_()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(42)
            self.register_buffer("projection", torch.randn(4))
        self.after_fork = nn.Linear(4, 4)
        state = torch.get_rng_state()
        self.alike = nn.ModuleList([nn.Linear(4, 4)])
        for _ in range(2):
            torch.set_rng_state(state)
            self.alike.append(nn.Linear(4, 4))
        constant = torch.tensor([1.0, 2.0])
        self.register_buffer("added", torch.zeros(2))
        self.added += constant
        constant *= 3
        self.register_buffer("conjugate", torch.polar(torch.ones(4), torch.arange(4.0)).conj())
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.copied = copy.deepcopy(self.normed)
        self.register_buffer("new", self.scale.new_tensor([1.5]))
        self.embed = nn.Embedding(9, 4, padding_idx=0)
        self.register_buffer("table", torch.as_tensor([[1, 2], [3, 4]]))
        self.register_buffer("mask", torch.ones(4, 4).tril().bool(), persistent=False)
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8))


def handmade_equals_its_constructor():
    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        model = Handmade()
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    strategy.set_seed(11)
    strategy.prepare_model(model, is_training=True)
    torch.manual_seed(11)
    assert_same_values(model, Handmade().float())  # training keeps fp32 masters


def test_modules_get_what_their_constructors_gave_them(run_on):
    for world_size in WORLDS:
        run_on(world_size, handmade_equals_its_constructor)


@pytest.mark.ranks(1)
def test_a_nested_block_is_part_of_the_outer_one():
    def build():
        with init_on_meta():
            return Handmade()

    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        model = build()
    strategy.set_seed(11)
    strategy.prepare_model(model)
    torch.manual_seed(11)
    with strategy.device:  # whose generator draws the values
        expected = Handmade()
    assert_same_values(model, expected)


@pytest.mark.ranks(2)
def test_what_a_shard_is_cast_to_does_not_lose_what_constructors_did():
    for training in (True, False):
        models = []
        for meta_init in (True, False):
            strategy = FSDPV2Strategy(bf16=True)
            torch.manual_seed(7)
            with strategy.init_model_context(meta_init=meta_init):
                model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
            torch.manual_seed(7)
            models.append(strategy.prepare_model(model, is_training=training))
        assert_same_values(*models)


class Dependent(nn.Module):
    """Takes values from pretrained ones while it is built."""

    def __init__(self, folder, how):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.head = nn.Linear(32, 1, bias=False)
        weight = self.model.lm_head.weight
        if how == "copied":
            self.head.weight.data.copy_(weight.mean(0, keepdim=True))
        elif how == "computed":
            self.head.weight = nn.Parameter(weight[:1].clone())
        elif how == "changed":
            weight.data.mul_(0.5)
        elif how == "replaced":
            self.model.lm_head.weight = nn.Parameter(torch.zeros(weight.shape))
        elif how == "replaced by a constant":
            norm = self.model.model.norm
            norm.weight = nn.Parameter(torch.tensor([3.0] * len(norm.weight)))
        elif how == "indexed":
            self.head.weight.data[:, [0, 2]] = 0


@pytest.mark.parametrize("how", ["copied", "computed", "changed", "replaced", "replaced by a constant", "indexed"])
@pytest.mark.ranks(1)
def test_what_depends_on_values_that_are_not_there_yet_is_an_error(folder, how):
    with init_on_meta():
        model = Dependent(folder, how)
    shard_model(model, config=StrategyConfig(bf16=False))
    with pytest.raises(CheckpointError, match=r"tensor \(head.* gives them values|was changed after from_pretrained"):
        load_weights(model, strict=False)


@pytest.mark.ranks(1)
def test_a_tensor_of_an_earlier_block_cannot_be_changed_in_a_later_one():
    with init_on_meta():
        first = nn.Linear(4, 4)
    with init_on_meta(), pytest.raises(CheckpointError, match="earlier init_on_meta block"):
        nn.init.zeros_(first.weight)
    with init_on_meta():
        second = copy.deepcopy(first)
        changed = copy.deepcopy(first)
        changed.weight.data.zero_()
    with pytest.raises(CheckpointError, match=r"tensor \(weight.* gives them values"):
        load_weights(changed)
    for layer in (first, second):
        load_weights(layer)
    assert first.weight.std() > 0 and second.weight.std() > 0


@pytest.mark.ranks(1)
def test_draws_from_a_generator_of_a_constructor_are_an_error():
    with init_on_meta():
        layer = nn.Linear(4, 4)
        nn.init.normal_(layer.bias, generator=torch.Generator().manual_seed(3))
    with pytest.raises(CheckpointError, match=r"tensor \(bias.* gives them values"):
        load_weights(layer)


@pytest.mark.ranks(1)
def test_models_built_together_and_prepared_apart_are_what_they_were_built_as():
    with init_on_meta():
        online, other = nn.Linear(4, 4), nn.Linear(4, 4)
        target = copy.deepcopy(online)
    for model in (online, other, target):
        load_weights(model)
    assert_same_values(online, target)
    assert not torch.equal(online.weight, other.weight)


@pytest.mark.ranks(1)
def test_a_copied_or_cast_model_on_meta_is_still_initialised_by_transformers(folder):
    strategy = FSDPV2Strategy(bf16=False)
    cls = AutoModelForSequenceClassification
    for change in (copy.deepcopy, lambda model: model.bfloat16()):
        with strategy.init_model_context(meta_init=True):
            model = change(cls.from_pretrained(folder, num_labels=512, dtype=torch.float32))
        strategy.prepare_model(model)
        assert 0.018 < full(model.score.weight).float().std() < 0.022  # transformers' 0.02, not Linear's 0.1


@pytest.mark.ranks(2)
def test_a_missing_head_is_drawn_in_the_dtype_that_was_asked_for(folder):
    models = []
    for meta_init in (True, False):
        strategy = FSDPV2Strategy(bf16=True)
        torch.manual_seed(5)
        with strategy.init_model_context(meta_init=meta_init):
            model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, dtype=torch.bfloat16)
        torch.manual_seed(5)
        models.append(strategy.prepare_model(model, is_training=True))
    assert_same_values(*models)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["value", "seed", "seed that nothing draws from"])
def test_constructors_that_draw_differently_on_each_rank_are_an_error(what):
    with init_on_meta():
        if what == "seed":
            torch.manual_seed(dist.get_rank())
        model = nn.Linear(4, 4)
        if what == "value":
            model.bias = nn.Parameter(torch.tensor([float(dist.get_rank())] * 4))
        if what == "seed that nothing draws from":
            torch.manual_seed(dist.get_rank())
            model = nn.Sequential(model, nn.LayerNorm(4))
    shard_model(model, config=StrategyConfig(bf16=False))
    if what == "seed that nothing draws from":
        load_weights(model)
        return
    with pytest.raises(CheckpointError, match="constructors that do the same on every rank"):
        load_weights(model)


@pytest.mark.ranks(1)
def test_what_has_memory_and_no_values_stays_unreal_until_it_is_loaded(folder, tmp_path, monkeypatch):
    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def fail(*_args):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(verified_read, "read_parts_into", fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            strategy.prepare_model(model)
    with pytest.raises(CheckpointError, match="no values yet"):
        save_model(model, None, tmp_path / "export")
    strategy.prepare_model(model)
    assert_same_values(model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.mark.ranks(1)
def test_a_loaded_model_can_be_pickled(folder):
    with init_on_meta():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    load_weights(model)
    assert_same_values(pickle.loads(pickle.dumps(model)), model)


@pytest.mark.ranks(1)
def test_loading_inside_the_block_is_an_error():
    with init_on_meta():
        model = nn.Linear(4, 4)
        with pytest.raises(CheckpointError, match="inside of an init_on_meta block"):
            load_weights(model)


@pytest.mark.ranks(2)
def test_a_wrapper_with_buffers_of_its_own_is_made_real_as_a_whole(folder):
    class Reward(nn.Module):
        is_actor = True

        def __init__(self):
            super().__init__()
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            self.register_buffer("mean", torch.full((1,), 3.0))

    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        reward = Reward()
    strategy.prepare_model(reward)
    assert reward.mean == 3
    assert_same_values(reward.model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.mark.ranks(1)
def test_a_wrapper_on_meta_loads_its_own_export(folder, tmp_path):
    with init_on_meta():
        critic = Critic(folder)
    load_weights(critic, strict=False)
    save_model(critic, None, tmp_path / "critic")
    with init_on_meta():
        again = Critic(folder)
    load_weights(again, tmp_path / "critic")
    assert_same_values(again, critic)


@pytest.mark.ranks(4)
def test_replicas_share_the_reading_where_their_last_shards_are_empty(tmp_path):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for parameter in plain.parameters():
        dist.broadcast(parameter.data, src=0)
    save_model(plain, None, tmp_path)
    with init_on_meta():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    shard_model(model, build_mesh(2), StrategyConfig(bf16=False))
    load_weights(model, tmp_path)
    assert_same_values(model, plain)


@pytest.mark.ranks(2)
def test_an_explicit_init_of_a_head_after_from_pretrained_holds(folder):
    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        model.score.weight.data.fill_(0.25)
    strategy.prepare_model(model)
    assert full(model.score.weight).eq(0.25).all()


@pytest.mark.ranks(2)
def test_a_copy_of_a_model_on_meta_has_its_values(folder):
    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        actor = AutoModelForCausalLM.from_pretrained(folder)
    reference = copy.deepcopy(actor)
    expected = LlamaForCausalLM.from_pretrained(folder)
    for model in (actor, reference):
        assert_same_values(strategy.prepare_model(model), expected)


@pytest.mark.ranks(2)
def test_what_nothing_gives_values_to_is_an_error_that_names_it():
    with torch.device("meta"):
        model = Handmade()
    shard_model(model, config=StrategyConfig(bf16=False))
    with pytest.raises(CheckpointError, match=r"the files lack 14 tensors \(scale, temperature, noise"):
        load_weights(model)


@pytest.mark.ranks(2)
def test_parameters_that_escape_the_default_device_are_loaded(tmp_path):
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8),
        conv_kernel=(3, 3), conv_stride=(2, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, vocab_size=12, feat_extract_norm="layer",
    )  # fmt: skip
    plain = transformers.Wav2Vec2ForCTC(config)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path)
    dist.barrier()
    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        model = transformers.Wav2Vec2ForCTC.from_pretrained(tmp_path)
    torch.manual_seed(dist.get_rank())
    strategy.prepare_model(model)
    assert_same_values(model, transformers.Wav2Vec2ForCTC.from_pretrained(tmp_path))


@pytest.mark.ranks(2)
def test_a_missing_pooler_is_initialised_as_transformers_does(tmp_path):
    if dist.get_rank() == 0:
        build("bert").save_pretrained(tmp_path)
    dist.barrier()
    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        model = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    strategy.prepare_model(model)
    assert 0 < full(model.bert.pooler.dense.weight).std() < 0.1
    expected = transformers.BertModel.from_pretrained(tmp_path)
    assert_same_values(model.bert.encoder, expected.encoder)


class FailsOnOneRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def reset_parameters(self):
        if dist.get_rank() == 1:
            raise RuntimeError("out of memory, say")
        nn.init.zeros_(self.first.weight)


@pytest.mark.ranks(2)
def test_an_init_function_that_fails_on_one_rank_is_an_error_on_both():
    with torch.device("meta"):
        model = FailsOnOneRank()
    shard_model(model, config=StrategyConfig(bf16=False))
    with pytest.raises(CheckpointError, match=r"rank 1: .*out of memory, say"):
        load_weights(model)


@pytest.mark.ranks(2)
def test_ranks_of_which_one_is_real_are_told(folder):
    if dist.get_rank():
        model = build("llama")
    else:
        with init_on_meta():
            model = CASES["llama"].build()
    with pytest.raises(CheckpointError, match=r"ranks \[1\] differ from rank 0"):
        load_weights(model, folder)


@pytest.mark.ranks(1)
def test_nothing_to_load_from_is_an_error():
    with pytest.raises(CheckpointError, match="no path was given"):
        load_weights(shard_model(build("llama"), config=StrategyConfig(bf16=False)))


@pytest.mark.ranks(1)
def test_a_variant_beside_the_default_weights_is_the_one_that_is_loaded(tmp_path):
    build("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    other = build("llama", seed=4)
    other.save_pretrained(tmp_path, variant="fp16", max_shard_size="30KB")
    with init_on_meta():
        model = LlamaForCausalLM.from_pretrained(tmp_path, variant="fp16")
    load_weights(shard_model(model, config=StrategyConfig(bf16=False)))
    assert_same_values(model, other)


# --- names, ties, buffers, shapes -------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_a_plain_model_loads_from_its_own_names_with_buffers_and_uneven_shards(tmp_path):
    torch.manual_seed(1)
    expected = Mlp()
    expected.offset.add_(0.5)
    if dist.get_rank() == 0:
        save_file(expected.state_dict(), tmp_path / "model.safetensors")
    dist.barrier()
    with init_on_meta():
        model = Mlp()
    shard_model(model, config=StrategyConfig(bf16=False))
    report = load_weights(model, tmp_path)
    assert_same_values(model, expected)
    assert report == LoadReport(loaded=list(expected.state_dict()))
    assert_same_values(load_and_return(Mlp(), tmp_path / "model.safetensors"), expected)


def save_here(model, folder):
    """Save a transformers model on this rank; save_pretrained writes on rank 0 only."""
    model.config.save_pretrained(folder)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        state["lm_head.weight"] = model.lm_head.weight.detach()
    save_file(state, folder / "model.safetensors")


def load_and_return(model, path, **options):
    shard_model(model, config=StrategyConfig(bf16=False))
    load_weights(model, path, **options)
    return model


@pytest.mark.ranks(2)
def test_tied_weights_load_under_either_name_and_stay_tied(tmp_path):
    model = build("llama_tied")
    folder = tmp_path / str(dist.get_rank())
    save_here(model, folder)
    state = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in state
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    save_file(state, folder / "model.safetensors")
    with init_on_meta():
        loaded = LlamaForCausalLM.from_pretrained(folder)
    shard_model(loaded, config=StrategyConfig(bf16=False))
    load_weights(loaded)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same_values(loaded, model)
    state["model.embed_tokens.weight"] = state["lm_head.weight"].clone()
    save_file(state, folder / "model.safetensors")
    load_weights(loaded, folder)
    state["model.embed_tokens.weight"][-1] += 1
    state["model.norm.weight"] += 1
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="different values for the names that it is tied to"):
        load_weights(loaded, folder)
    assert_same_values(loaded, model)


@pytest.mark.ranks(2)
def test_another_folder_than_the_remembered_one_can_be_named(folder, tmp_path):
    if dist.get_rank() == 0:
        build("llama", seed=3).save_pretrained(tmp_path / "other0")
    dist.barrier()
    with init_on_meta():
        actor = Actor(folder)
    shard_model(actor, config=StrategyConfig(bf16=False))
    load_weights(actor, tmp_path / "other0")
    assert_same_values(actor.model, LlamaForCausalLM.from_pretrained(tmp_path / "other0"))


@pytest.mark.ranks(2)
def test_values_are_replaced_in_place_where_a_model_is_real(folder):
    model = build("llama", seed=9)
    shard_model(model, config=StrategyConfig(bf16=False))
    parameters = list(model.parameters())
    load_weights(model, folder)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert_same_values(model, LlamaForCausalLM.from_pretrained(folder))


@pytest.mark.ranks(2)
def test_an_unsharded_model_loads_whole(folder):
    with init_on_meta():
        model = AutoModelForCausalLM.from_pretrained(folder)
    load_weights(model)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert_same_values(model, LlamaForCausalLM.from_pretrained(folder))


@pytest.mark.ranks(2)
def test_offloaded_parameters_are_loaded_into_host_memory_and_train(folder):
    strategy = FSDPV2Strategy(config=None, bf16=False)
    strategy.config = strategy.config.replace(cpu_offload=True)
    with strategy.init_model_context(meta_init=True):
        model = AutoModelForCausalLM.from_pretrained(folder)
    strategy.prepare_model(model, is_training=True)
    assert_same_values(model, LlamaForCausalLM.from_pretrained(folder))
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    ids = torch.ones(1, 4, dtype=torch.long, device=strategy.device)
    strategy.backward(model(input_ids=ids, labels=ids).loss, model, optimizer)
    assert strategy.optimizer_step(optimizer, model).stepped


@pytest.mark.ranks(2)
def test_a_model_from_meta_trains_as_the_loaded_one(folder):
    losses = []
    for meta in (True, False):
        strategy = FSDPV2Strategy(bf16=False, max_norm=1.0)
        with strategy.init_model_context(meta_init=meta):
            model = AutoModelForCausalLM.from_pretrained(folder)
        strategy.prepare_model(model, is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        ids = torch.arange(3, 15)[None] + dist.get_rank()
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            strategy.backward(loss, model, optimizer)
            losses.append((loss.item(), strategy.optimizer_step(optimizer, model).grad_norm))
    assert losses[:3] == losses[3:]


@pytest.mark.ranks(2)
def test_a_model_goes_with_its_last_reference(folder, tmp_path):
    with init_on_meta():
        critic = Critic(folder)
    shard_model(critic, config=StrategyConfig(bf16=False))
    load_weights(critic, strict=False)
    save_model(critic, None, tmp_path / "export")
    alive = [weakref.ref(part) for part in (*critic.modules(), *critic.parameters())]
    del critic
    gc.collect()
    assert not [part for part in alive if part() is not None]


@pytest.mark.ranks(1)
def test_what_constructors_did_is_forgotten_once_it_is_done(folder):
    with init_on_meta():
        critic = Critic(folder)
    [recording] = {id(r.recording): weakref.ref(r.recording) for r in recorded_tensors_of(critic)}.values()
    load_weights(critic, strict=False)
    gc.collect()
    assert recording() is None


def recorded_tensors_of(model):
    found = (
        recorded_tensor(module, key) for module in model.modules() for key in (*module._parameters, *module._buffers)
    )
    return [recorded for recorded in found if recorded]


@pytest.mark.ranks(1)
def test_a_progress_bar_counts_the_bytes(folder, monkeypatch):
    bars = []

    class Bar(progress.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | {"file": io.StringIO(), "disable": False})
            bars.append(self)

    monkeypatch.setattr(progress, "tqdm", Bar)
    model = shard_model(build("llama"), config=StrategyConfig(bf16=False))
    load_weights(model, folder)
    needed = sum(p.to_local().nbytes for p in model.parameters())
    assert [(bar.desc, bar.n, bar.total) for bar in bars if bar.total] == [("loading LlamaForCausalLM", needed, needed)]


# --- strictness and errors --------------------------------------------------------------------------------------------


def rewrite(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.ranks(2)
def test_names_must_agree_unless_told_otherwise(folder):
    with init_on_meta():
        model = AutoModelForCausalLM.from_pretrained(folder)
    if dist.get_rank() == 0:
        rewrite(folder, lambda s: s.update(extra=s.pop("model.norm.weight")))
    dist.barrier()
    shard_model(model, config=StrategyConfig(bf16=False))
    with pytest.raises(CheckpointError, match=r"lack 1 tensor \(model\.norm\.weight\).* load with strict=False"):
        load_weights(model)
    assert next(model.parameters()).is_meta, "nothing was touched"
    report = load_weights(model, strict=False)
    assert report.missing == ["model.norm.weight"]
    assert report.unexpected == ["extra"]
    assert full(model.model.norm.weight).eq(1).all()
    dist.barrier()
    if dist.get_rank() == 0:
        rewrite(folder, lambda s: s.update({"model.norm.weight": s["extra"].clone()}))
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"contain 1 tensor \(extra\), expected only"):
        load_weights(model)


def parts(folder):
    return sorted(folder.glob("model-*.safetensors"))


def truncate(folder):
    os.truncate(parts(folder)[1], 500)


def remove(folder):
    parts(folder)[2].unlink()


def reshape(folder):
    path = parts(folder)[0]
    state = load_file(path)
    name = sorted(state)[0]
    save_file({**state, name: state[name][:-1].contiguous()}, path)


def rename_dtype(folder):
    path = parts(folder)[0]
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F31"', 1))


def lie(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(n for n, file in index["weight_map"].items() if file == parts(folder)[0].name)
    index["weight_map"][name] = parts(folder)[-1].name
    path.write_text(json.dumps(index))


def lie_about_files(folder):
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace(parts(folder)[0].stem, "model-00009-of-00009"))


def no_index(folder):
    (folder / "model.safetensors.index.json").write_text("{")


FAULTS = {
    "truncate": "bytes long",
    "remove": r"model-00003-of-\d+\.safetensors: No such file",
    "reshape": r"of the files has another shape: ",
    "rename_dtype": "'F31'",
    "lie": r"lacks .* the index lists",
    "lie_about_files": "model-00009-of-00009.safetensors",
    "no_index": "expected an index",
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_the_headers_show_is_an_error_on_every_rank_before_anything_is_touched(fault, tmp_path):
    if dist.get_rank() == 0:
        build("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    dist.barrier()
    with init_on_meta():
        model = LlamaForCausalLM.from_pretrained(tmp_path)
    dist.barrier()
    if dist.get_rank() == 0:
        globals()[fault](tmp_path)
    dist.barrier()
    shard_model(model, config=StrategyConfig(bf16=False))
    with pytest.raises(CheckpointError, match=FAULTS[fault]) as caught:
        load_weights(model)
    assert same_on_all_ranks(str(caught.value))
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.ranks(2)
def test_a_fault_that_one_rank_sees_is_an_error_on_both(folder, tmp_path):
    mine = tmp_path / str(dist.get_rank())
    shutil.copytree(folder, mine)
    with init_on_meta():
        model = LlamaForCausalLM.from_pretrained(mine)
    if dist.get_rank() == 1:
        os.truncate(mine / "model.safetensors", 500)
    shard_model(model, config=StrategyConfig(bf16=False))
    with pytest.raises(CheckpointError, match="failed on rank 1: cannot read"):
        load_weights(model)


@pytest.mark.ranks(2)
def test_ranks_that_are_given_different_files_are_told(folder, tmp_path):
    other = tmp_path / f"other{dist.get_rank()}"
    save_here(build("llama", seed=2).to([torch.float32, torch.bfloat16][dist.get_rank()]), other)
    model = build("llama")
    shard_model(model, config=StrategyConfig(bf16=False))
    with pytest.raises(CheckpointError, match=r"ranks \[1\] differ from rank 0"):
        load_weights(model, other)


@pytest.mark.ranks(1)
def test_what_has_no_safetensors_or_is_no_folder_is_an_error(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with init_on_meta(), pytest.raises(CheckpointError, match="expected safetensors files"):
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = shard_model(build("llama"), config=StrategyConfig(bf16=False))
    for path in (tmp_path / "nowhere", folder):
        with pytest.raises(CheckpointError, match=r"expected model\.safetensors or"):
            load_weights(model, path)
    with init_on_meta(), pytest.raises(FSDP2StrategyError, match="state_dict"):
        LlamaForCausalLM.from_pretrained(None, config=LlamaConfig(), state_dict={})


@pytest.mark.ranks(1)
def test_resized_models_are_errors(folder):
    with init_on_meta():
        resized = AutoModelForCausalLM.from_pretrained(folder)
        resized.resize_token_embeddings(100, mean_resizing=False)
    shard_model(resized, config=StrategyConfig(bf16=False))
    with pytest.raises(CheckpointError, match=r"resized after from_pretrained.*resize_token_embeddings"):
        load_weights(resized)


@needs_new_conversions  # transformers imports triton for this before
@pytest.mark.ranks(1)
def test_quantised_folders_are_errors(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    anywhere = patch.object(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_args, **_kwargs: None)
    with anywhere, init_on_meta(), pytest.raises(CheckpointError, match="is quantised"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.ranks(1)
def test_an_adapter_on_meta_is_an_error(folder):
    with init_on_meta():
        model = AutoModelForCausalLM.from_pretrained(folder)
        with pytest.raises(CheckpointError, match="was given an adapter"):
            # How transformers loads an adapter into a model, with peft installed.
            model._load_pretrained_model(model, None, [], None, expected_keys=["lora_A.weight"])


@pytest.mark.ranks(1)
def test_mismatched_sizes_are_initialised_where_from_pretrained_was_told_so(folder):
    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        model = AutoModelForCausalLM.from_pretrained(folder, vocab_size=100, ignore_mismatched_sizes=True)
    strategy.prepare_model(model)
    assert model.lm_head.weight.shape == (100, 32)
    assert 0 < full(model.lm_head.weight).std() < 0.1
