"""Export: a folder that plain transformers opens with the same values and logits, written without a gather."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import json
import os
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.folders import assert_same_tensors, small_tokenizer, tensors_in
from helpers.models import CASES, HUGGING_FACE, Mlp, batch_of, build, on_device
from helpers.reference import full, full_parameters, resident
from helpers.versions import needs_new_conversions
from helpers.worlds import names_and_worlds, some
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    core_model_loading,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import PermuteForRope, Transpose, WeightConverter

from fsdp2_strategy import (
    FSDPV2Strategy,
    StrategyConfig,
    build_mesh,
    init_on_meta,
    load_weights,
    save_model,
    shard_model,
    sizes,
)
from fsdp2_strategy.checkpoint import save_checkpoint
from fsdp2_strategy.errors import ArgumentError, CheckpointError
from fsdp2_strategy.hf import export
from fsdp2_strategy.storage import safetensors_format, write


def exported_equals_saved(name, folder):
    cls = type(CASES[name].build())
    with init_on_meta():
        model = cls.from_pretrained(folder / "saved")
    shard_model(model, config=StrategyConfig(bf16=False))
    load_weights(model)
    world_size = dist.get_world_size()
    out = folder / f"exported{world_size}"
    save_model(model, output_dir=out, max_shard_size="40KB")
    assert_same_tensors(out, folder / "saved")
    if dist.get_rank() == 0:
        opened, plain = cls.from_pretrained(out), cls.from_pretrained(folder / "saved")
        assert opened.config.to_dict() == plain.config.to_dict() | {"_name_or_path": str(out)}
        batch = batch_of(name, 0, 0)
        with torch.no_grad():
            ours, theirs = opened(**batch), plain(**batch)
        values = [v for v in theirs.to_tuple() if isinstance(v, torch.Tensor)]
        assert all(
            torch.equal(a, b) for a, b in zip(ours.to_tuple(), values, strict=False) if isinstance(a, torch.Tensor)
        )
    dist.barrier()


@pytest.mark.parametrize(
    ("name", "world_sizes"),
    names_and_worlds(HUGGING_FACE, (1, 2, 3), everywhere=("llama_tied",), usual=("deepseek_v3",)),
)
def test_an_export_equals_transformers_own_for_an_architecture(name, world_sizes, tmp_path, run_on):
    build(name).save_pretrained(tmp_path / "saved")
    for world_size in world_sizes:
        run_on(world_size, exported_equals_saved, name=name, folder=tmp_path)


@pytest.mark.ranks(2)
def test_logits_of_the_export_equal_those_of_the_trained_model(tmp_path):
    strategy = FSDPV2Strategy(bf16=False)
    model = strategy.prepare_model(build("mixtral"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    ids = on_device(torch.arange(3, 15)[None])
    strategy.backward(model(input_ids=ids, labels=ids).loss, model, optimizer)
    strategy.optimizer_step(optimizer, model)
    with torch.no_grad():
        logits = model(ids).logits
    strategy.save_model(model, None, tmp_path)
    with torch.no_grad():
        assert torch.equal(on_device(AutoModelForCausalLM.from_pretrained(tmp_path))(ids).logits, logits)


@pytest.mark.ranks(4)
def test_replicas_share_the_writing(tmp_path):
    model = build("qwen3_moe")
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path / "saved")
    shard_model(model, build_mesh(2), StrategyConfig(bf16=False))
    written = []
    patch = pytest.MonkeyPatch()
    patch.setattr(export, "write_all", lambda jobs: written.extend(jobs) or write.write_all(jobs))
    save_model(model, None, tmp_path / "out")
    patch.undo()
    dist.barrier()
    assert_same_tensors(tmp_path / "out", tmp_path / "saved")
    mine = torch.tensor(sum(job.tensor.numel() for job in written))
    total = mine.clone()
    dist.all_reduce(total)
    assert total.item() == sum(p.numel() for p in model.parameters()), "every element is written once"
    assert mine.item() < 0.5 * total.item(), "and by all"


@pytest.mark.ranks(2)
def test_the_bytes_do_not_depend_on_the_number_of_ranks(tmp_path):
    model = build("gpt_oss")
    for mesh, name in ((build_mesh(), "sharded"), (build_mesh(1), "replicated")):
        save_model(
            shard_model(build("gpt_oss"), mesh, StrategyConfig(bf16=False)),
            None,
            tmp_path / name,
            max_shard_size=60_000,
        )
    save_model(model, None, tmp_path / "unsharded", max_shard_size=60_000)
    names = sorted(p.name for p in (tmp_path / "sharded").iterdir())
    assert len(names) > 4
    for other in ("replicated", "unsharded"):
        assert names == sorted(p.name for p in (tmp_path / other).iterdir())
        assert all((tmp_path / other / n).read_bytes() == (tmp_path / "sharded" / n).read_bytes() for n in names)


@pytest.mark.parametrize("world_size", some([2, 1, 3, 4], [2]))
def test_an_export_is_as_many_files_by_default_as_let_ranks_write_at_once(world_size, tmp_path, run_on):
    build("llama_tied").save_pretrained(tmp_path / "saved")
    run_on(world_size, export_to_several_files, folder=tmp_path)


def export_to_several_files(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "saved")
    shard_model(model, config=StrategyConfig(bf16=False))
    with patch.object(sizes, "MIN_EXPORT_FILE_LIMIT_BYTES", 20_000):
        save_model(model, output_dir=folder / "out")
    index = json.loads((folder / "out/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (folder / "out").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values())) and len(files) >= dist.get_world_size()
    stored = tensors_in(folder / "out")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    assert_same_tensors(folder / "out", folder / "saved")
    if dist.get_rank() == 0:
        opened = AutoModelForCausalLM.from_pretrained(folder / "out")
        saved = AutoModelForCausalLM.from_pretrained(folder / "saved")
        assert all(torch.equal(a, b) for a, b in zip(opened.parameters(), saved.parameters(), strict=True))
        assert opened.lm_head.weight is opened.model.embed_tokens.weight
    dist.barrier()
    save_model(model, output_dir=folder / "out")  # by default one file, as the model is small
    assert [path.name for path in (folder / "out").glob("model*")] == ["model.safetensors"]


# --- precision, names, what lies beside the weights -------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_the_dtype_is_that_of_the_shards_or_the_one_asked_for(tmp_path):
    strategy = FSDPV2Strategy(bf16=True)
    model = strategy.prepare_model(build("llama"), is_training=True)
    expected = full_parameters(model)
    strategy.save_model(model, None, tmp_path / "masters")
    assert all(torch.equal(t, expected[n]) for n, t in tensors_in(tmp_path / "masters").items())
    assert json.loads((tmp_path / "masters/config.json").read_text())["dtype"] == "float32"
    strategy.save_model(model, None, tmp_path / "bf16", dtype=torch.bfloat16)
    assert all(torch.equal(t, expected[n].bfloat16()) for n, t in tensors_in(tmp_path / "bf16").items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").dtype == torch.bfloat16
    assert model.config.dtype != torch.bfloat16


@pytest.mark.ranks(2)
def test_parameters_that_a_model_keeps_in_fp32_stay_so(tmp_path):
    model = shard_model(build("deepseek_v3"), config=StrategyConfig(bf16=False))
    save_model(model, None, tmp_path, dtype=torch.bfloat16)
    dtypes = {t.dtype for n, t in tensors_in(tmp_path).items() if "e_score_correction_bias" in n}
    assert dtypes == {torch.float32}


@pytest.mark.ranks(2)
def test_a_plain_model_gives_one_file_and_nothing_else(tmp_path):
    torch.manual_seed(0)
    model = shard_model(Mlp(), config=StrategyConfig(bf16=False))
    save_model(model, None, tmp_path, max_shard_size="100B")
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    other = Mlp()
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert all(torch.equal(full(p).cpu(), dict(other.named_parameters())[n]) for n, p in model.named_parameters())


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = build("llama").model
        self.value_head = nn.Linear(32, 1)


@pytest.mark.ranks(2)
def test_a_wrapper_with_parameters_of_its_own_comes_back_under_its_own_names(tmp_path):
    model = shard_model(Critic(), config=StrategyConfig(bf16=False))
    save_model(model, None, tmp_path)
    with init_on_meta():
        other = Critic()
    shard_model(other, config=StrategyConfig(bf16=False))
    load_weights(other, tmp_path)
    assert all(torch.equal(full(a), full(b)) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.ranks(2)
def test_tokenizer_and_generation_configuration_lie_beside_the_weights(tmp_path):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    model = build("llama")
    model.generation_config.max_new_tokens = 7
    shard_model(model, config=StrategyConfig(bf16=False))
    save_model(model, PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"), tmp_path)
    dist.barrier()
    assert AutoTokenizer.from_pretrained(tmp_path)("a b a")["input_ids"] == [1, 2, 1]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert opened.generation_config.max_new_tokens == 7
    assert type(opened) is LlamaForCausalLM


@pytest.mark.ranks(2)
def test_a_variant_and_the_models_own_names_can_be_had(tmp_path):
    model = shard_model(build("mixtral"), config=StrategyConfig(bf16=False))
    save_model(model, None, tmp_path, variant="fp16", dtype=torch.float16, max_shard_size="50KB")
    assert not list(tmp_path.glob("model-*"))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, variant="fp16", dtype=torch.float16)
    assert torch.equal(opened.lm_head.weight, full(model.lm_head.weight).half().cpu())
    save_model(model, None, tmp_path / "own", save_original_format=False)
    assert set(tensors_in(tmp_path / "own")) == set(dict(model.named_parameters()))


@pytest.mark.ranks(2)
def test_pushing_happens_once_after_the_write(tmp_path):
    import huggingface_hub

    calls = []

    class Api:
        def __init__(self, **kwargs):
            calls.append(kwargs)

        def create_repo(self, repo_id, **kwargs):
            calls.append((repo_id, kwargs))
            return type("Repo", (), {"repo_id": f"me/{repo_id}"})

        def upload_folder(self, **kwargs):
            assert tensors_in(kwargs["folder_path"]), "the weights are written"
            calls.append(kwargs)

    patch = pytest.MonkeyPatch()
    patch.setattr(huggingface_hub, "HfApi", Api)
    model = shard_model(build("llama"), config=StrategyConfig(bf16=False))
    save_model(model, None, tmp_path, push_to_hub=True, repo_id="mine", private=True, token="t", commit_message="new")
    patch.undo()
    if dist.get_rank():
        assert not calls
        return
    token, (repo, options), upload = calls
    assert (token, repo, options) == ({"token": "t"}, "mine", {"private": True, "exist_ok": True})
    assert (upload["repo_id"], upload["commit_message"], upload["create_pr"]) == ("me/mine", "new", False)


# --- arrangements that are no byte ranges -----------------------------------------------------------------------------


class PermutedLlama(LlamaForCausalLM):
    """A Llama whose files hold permuted, interleaved and transposed projections."""


def mapping():
    return [
        WeightConverter("self_attn.query.weight", "self_attn.q_proj.weight", [PermuteForRope()]),
        WeightConverter("mlp.up.weight", "mlp.up_proj.weight", [core_model_loading.Interleave(0)]),
        WeightConverter("mlp.down.weight", "mlp.down_proj.weight", [Transpose(0, 1)]),
    ]


def permuted_round_trip(folder):
    register_checkpoint_conversion_mapping("PermutedLlama", mapping(), overwrite=True)
    config = build("llama").config
    torch.manual_seed(0)
    plain = PermutedLlama(config)
    world_size = dist.get_world_size()
    saved, out = folder / f"saved{world_size}", folder / f"out{world_size}"
    if dist.get_rank() == 0:
        plain.save_pretrained(saved)
    dist.barrier()
    assert "model.layers.0.mlp.down.weight" in tensors_in(saved)
    with init_on_meta():
        model = PermutedLlama.from_pretrained(saved)
    shard_model(model, config=StrategyConfig(bf16=False))
    load_weights(model)
    expected = dict(plain.named_parameters())
    assert all(torch.equal(full(p), expected[n]) for n, p in model.named_parameters())
    save_model(model, None, out)
    assert_same_tensors(out, saved)


@needs_new_conversions
def test_what_is_permuted_or_transposed_goes_both_ways(tmp_path, run_on):
    for world_size in (1, 2, 3):
        run_on(world_size, permuted_round_trip, folder=tmp_path)


def export_in_little_memory(folder):
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, vocab_size=2000, num_attention_heads=8
    )
    with init_on_meta():
        model = LlamaForCausalLM(config)
    shard_model(model, config=StrategyConfig(bf16=False))
    load_weights(model)
    assert sum(p.to_local().nbytes for p in model.parameters()) > 90e6
    for dtype in (None, torch.bfloat16):  # from memory, and through scratch buffers
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before = resident("VmRSS")
        save_model(model, None, folder / str(dtype), dtype=dtype)
        assert resident("VmHWM") - before < 64e6


@pytest.mark.full
@pytest.mark.real_sizes
def test_a_rank_holds_little_more_than_its_shard_while_it_exports(tmp_path, run_on):
    run_on(2, export_in_little_memory, folder=tmp_path)


@pytest.mark.ranks(2)
def test_a_save_verifies_tokenizer_files_that_it_copies_from_another_checkpoint(tmp_path):
    first = shard_model(build("llama"), config=StrategyConfig(bf16=False))
    save_checkpoint(first, tmp_path / "ckpts", "first", tokenizer=small_tokenizer())
    folder = tmp_path / "ckpts/first/model"
    model = shard_model(LlamaForCausalLM.from_pretrained(folder), config=StrategyConfig(bf16=False))
    save_checkpoint(model, tmp_path / "ckpts", "second")
    copied, original = tmp_path / "ckpts/second/model/tokenizer.json", folder / "tokenizer.json"
    assert copied.read_bytes() == original.read_bytes()
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "vocab.txt").write_text("added by a person")  # copied as it is: there is no checksum
        original.write_bytes(original.read_bytes().replace(b"UNK", b"unk"))
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"cannot read model/tokenizer.json: bytes .* have the checksum"):
        save_checkpoint(model, tmp_path / "ckpts", "third")


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_an_earlier_export_is_replaced_whole(tmp_path):
    model = shard_model(build("llama"), config=StrategyConfig(bf16=False))
    save_model(model, None, tmp_path, max_shard_size="20KB")
    (tmp_path / "notes.txt").write_text("mine")
    dist.barrier()
    save_model(model, None, tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json", "notes.txt"}
    dist.barrier()
    save_model(model, None, tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.ranks(2)
def test_a_write_that_fails_on_one_rank_is_an_error_on_both_and_the_earlier_export_stays(tmp_path):
    failures = (OSError(errno.EIO, os.strerror(errno.EIO)), RuntimeError("Input/output error, says another library"))
    for name, failure in itertools.product(("llama", "gpt_oss"), failures):  # with and without gathered tensors
        folder = tmp_path / f"{name}-{type(failure).__name__}"
        model = shard_model(build(name), config=StrategyConfig(bf16=False))
        save_model(model, None, folder)
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().add_(1)
        patch = pytest.MonkeyPatch()
        if dist.get_rank() == 1:

            def fail(*args, failure=failure):
                raise failure

            patch.setattr(write, "write_from", fail)
        with pytest.raises(CheckpointError, match=r"rank 1: .*Input/output error"):
            save_model(model, None, folder)
        patch.undo()
        dist.barrier()
        assert {p.name: p.read_bytes() for p in folder.glob("[!.]*")} == before
        save_model(model, None, folder)
        assert not list(folder.glob(".*"))


@pytest.mark.ranks(2)
def test_a_full_disk_is_an_error_on_both_ranks_before_anybody_writes(tmp_path):
    model = shard_model(build("llama"), config=StrategyConfig(bf16=False))
    almost_full = shutil.disk_usage(tmp_path)._replace(free=1000)
    with (
        patch.object(shutil, "disk_usage", lambda _: almost_full),
        pytest.raises(CheckpointError, match=r"has 0.000 GB free"),
    ):
        save_model(model, None, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks(2)
def test_a_full_disk_while_writing_is_an_error_on_both_ranks(tmp_path):
    def write_from(fd, offset, memory):
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        safetensors_format.write_from(fd, offset, memory)

    model = shard_model(build("llama"), config=StrategyConfig(bf16=False))
    with (
        patch.object(write, "write_from", write_from),
        pytest.raises(CheckpointError, match=r"rank 1: .*No space left on device: '.*export.partial/.*safetensors'"),
    ):
        save_model(model, None, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.ranks(2)
def test_a_folder_that_each_host_has_for_itself_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    own = tmp_path / f"host{dist.get_rank()}"
    (own / "out").mkdir(parents=True)
    model = shard_model(build("llama"), config=StrategyConfig(bf16=False))
    with (
        monkeypatch.context() as patched,
        pytest.raises(CheckpointError, match=r"rank 1: .*a folder that all ranks see"),
    ):
        patched.chdir(own)
        save_model(model, None, "out")
    assert not list((own / "out").glob("*.safetensors"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"merge_adapters": False}])
def test_the_folder_is_required_and_the_tokenizer_is_not(options, tmp_path):
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    model = strategy.prepare_model(build("llama"))
    for save in (strategy.save_model, save_model):
        with pytest.raises(
            ArgumentError, match=r"output_dir is missing, .* Call save_model\(model, output_dir='out'\)"
        ):
            save(model, **options)
        with pytest.raises(
            ArgumentError, match=r"the path '.*/out' is .* Call save_model\(model, output_dir='.*/out'\)"
        ):
            save(model, tmp_path / "out", **options)
        with pytest.raises(ArgumentError, match=r"output_dir is a dict, expected a path"):
            save(model, output_dir={}, **options)
        with pytest.raises(CheckpointError, match="cannot save the tokenizer: it is a str"):
            save(model, "out", object(), **options)
        # Only one rank makes the mistake: the other one must not wait for it.
        with pytest.raises(ArgumentError, match=r"failed on rank 1: .*output_dir is missing"):
            save(model, None, tmp_path if dist.get_rank() == 0 else None, **options)
    strategy.save_model(model, output_dir=tmp_path / "named")
    strategy.save_model(model, None, tmp_path / "positional")
    assert_same_tensors(tmp_path / "named", tmp_path / "positional")
    strategy.close()


@pytest.mark.ranks(2)
def test_wrong_arguments_are_named(tmp_path):
    model = shard_model(build("llama"), config=StrategyConfig(bf16=False))
    with pytest.raises(CheckpointError, match=r"unknown argument 'pushtohub'.*Did you mean 'push_to_hub'"):
        save_model(model, None, tmp_path, pushtohub=True)
    with pytest.raises(CheckpointError, match="max_shard_size is '5 apples'"):
        save_model(model, None, tmp_path, max_shard_size="5 apples")
    with pytest.raises(CheckpointError, match="complex128"):
        save_model(model, None, tmp_path, dtype=torch.complex128)
    with pytest.raises(CheckpointError, match=r"ranks \[1\] differ"):
        save_model(model, None, tmp_path, dtype=[torch.float32, torch.float16][dist.get_rank()])
    with init_on_meta():
        empty = shard_model(CASES["llama"].build(), config=StrategyConfig(bf16=False))
    with pytest.raises(CheckpointError, match="no values yet, expected values for all"):
        save_model(empty, None, tmp_path)
