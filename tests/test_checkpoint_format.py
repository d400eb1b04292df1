"""What a checkpoint is on disk: a Hugging Face folder, the same bytes at every world size, verified to the last bit."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.crashes import kill_within_a_save
from helpers.folders import contents, small_tokenizer
from helpers.models import CASES, HUGGING_FACE, batch_of, build, loss_of
from helpers.pool import processes
from helpers.reference import full, full_parameters
from helpers.training import assert_same, full_state, prepared, strategy_for, tags, train
from helpers.worlds import some
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from fsdp2_strategy import (
    FSDPV2Strategy,
    StrategyConfig,
    build_mesh,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    shard_model,
    sizes,
    verify_checkpoint,
)
from fsdp2_strategy.checkpoint import directory, listing, paths
from fsdp2_strategy.checkpoint.reader import _ChecksumManifests
from fsdp2_strategy.checkpoint.storage import read_all, stored_in, targets_by_name, write_components
from fsdp2_strategy.cli import main
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.errors import CheckpointError, DamageError
from fsdp2_strategy.storage.component import Component
from fsdp2_strategy.storage.output_files import check_shared_folder, create_files, files_for
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.replicated_reads import read_requests_for
from fsdp2_strategy.storage.safetensors_format import DTYPES, read_header
from fsdp2_strategy.storage.verified_read import Reader, ReadRequest
from fsdp2_strategy.storage.write import WriteRequest, write_all

# --- the model folder ------------------------------------------------------------------------------------------------


def saved_opens_with_from_pretrained(name, folder):
    strategy = strategy_for()
    model = strategy.prepare_model(build(name), is_training=True)
    strategy.save_ckpt(model, folder, "a")
    expected = {n: full(t).clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    strategy.load_ckpt(model, folder)
    assert_same({n: full(t) for n, t in (*model.named_parameters(), *model.named_buffers())}, expected)
    if dist.get_rank() == 0:
        opened = type(CASES[name].build()).from_pretrained(folder / "a" / "model", dtype=torch.float32)
        actual = dict([*opened.named_parameters(), *opened.named_buffers()])
        assert actual.keys() == expected.keys()
        assert not [n for n in expected if not torch.equal(actual[n], expected[n])]
        assert verify_checkpoint(folder / "a").ok
    dist.barrier()


@pytest.mark.parametrize("name", some(HUGGING_FACE, ["gpt_oss", "qwen2_vl"]))
def test_the_model_folder_opens_with_from_pretrained_for_an_architecture(name, tmp_path, run_on):
    run_on(2, saved_opens_with_from_pretrained, name=name, folder=tmp_path)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = build("llama")
        self.value_head = nn.Linear(32, 1)
        self.register_buffer("mean", torch.full((2,), 3.0))

    def forward(self, **batch):
        return self.value_head(self.backbone(**batch, output_hidden_states=True).hidden_states[-1])


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_wrapper_keeps_what_is_its_own_beside_the_model(tmp_path):
    strategy = strategy_for()
    torch.manual_seed(0)
    critic = strategy.prepare_model(Critic(), is_training=True)
    strategy.save_ckpt(critic, tmp_path, "a")
    if dist.get_rank() == 0:
        assert load_file(tmp_path / "a" / "wrapper" / "model.safetensors").keys() == {
            "value_head.weight", "value_head.bias", "mean",
        }  # fmt: skip
        AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "model")
    torch.manual_seed(1)
    other = Critic()
    other.mean.zero_()
    strategy.prepare_model(other, is_training=True)
    strategy.load_ckpt(other, tmp_path)
    assert_same(full_parameters(other), full_parameters(critic))
    assert other.mean.tolist() == [3.0, 3.0]
    bare = strategy.prepare_model(build("llama", 5), is_training=True)
    with pytest.raises(CheckpointError, match="holds 1 name \\(wrapper/\\)"):
        strategy.load_ckpt(bare, tmp_path)
    strategy.load_ckpt(bare, tmp_path, load_module_strict=False)
    assert_same(full_parameters(bare), full_parameters(critic.backbone))


@pytest.mark.ranks(2)
def test_the_tokenizer_comes_from_the_models_folder_or_is_given(tmp_path):
    if dist.get_rank() == 0:
        build("llama").save_pretrained(tmp_path / "base")
        small_tokenizer().save_pretrained(tmp_path / "base")
    dist.barrier()
    strategy = strategy_for()
    with strategy.init_model_context(meta_init=True):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    strategy.prepare_model(model, is_training=True)
    strategy.save_ckpt(model, tmp_path / "ckpts", "known")
    plain = strategy.prepare_model(build("llama"), is_training=True)
    strategy.save_ckpt(plain, tmp_path / "ckpts", "given", tokenizer=small_tokenizer())
    strategy.save_ckpt(plain, tmp_path / "ckpts", "none")
    for tag in ("known", "given"):
        folder = tmp_path / "ckpts" / tag / "model"
        assert AutoTokenizer.from_pretrained(folder).get_vocab() == {"a": 0, "[UNK]": 1}
        assert (folder / "generation_config.json").is_file()
        assert verify_checkpoint(folder.parent).ok
    assert not (tmp_path / "ckpts" / "none" / "model" / "tokenizer.json").exists()


# --- the same bytes on any ranks -------------------------------------------------------------------------------------


def save_trained(folder):
    """Save a state that does not depend on the number of ranks."""
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy, "llama_tied")
    for index, parameter in enumerate(model.parameters()):
        state = {"step": torch.tensor(3.0)}
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.empty_like(parameter)
            state[key].to_local().copy_(parameter.detach().to_local() * (index + 2))
        if index != 1:  # one parameter never had a gradient
            optimizer.state[parameter] = state
    strategy.save_ckpt(model, folder, f"world{dist.get_world_size()}", optimizer=optimizer, max_num=None)


def load_as_saved(folder, tag):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy, "llama_tied")
    strategy.load_ckpt(model, folder, tag=tag, load_lr_scheduler_states=False)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        state = optimizer.state[parameter]
        assert state.keys() == (set() if index == 1 else {"step", "exp_avg", "exp_avg_sq"}), name
        for key in state.keys() - {"step"}:
            assert torch.equal(full(state[key]), full(parameter) * (index + 2)), (name, key)
    assert_same(full_parameters(model), dict(build("llama_tied").named_parameters()))


def test_files_do_not_depend_on_the_number_of_ranks_and_load_on_any(tmp_path, run_on):
    for world_size in (1, 2, 3, 4):
        run_on(world_size, save_trained, folder=tmp_path)
    for part in ("model", "optimizer"):
        expected = contents(tmp_path / "world1" / part)
        assert len(expected) >= 1
        for world_size in (2, 3, 4):
            assert contents(tmp_path / f"world{world_size}" / part) == expected
    assert verify_checkpoint(tmp_path / "world3").ok
    for world_size in (1, 2):
        run_on(world_size, load_as_saved, folder=tmp_path, tag="world3")
    AutoModelForCausalLM.from_pretrained(tmp_path / "world3" / "model")


@pytest.mark.ranks(2)
def test_float32_loads_into_bfloat16_and_is_reported(tmp_path):
    trained, *_ = prepared(strategy_for(), "llama")
    strategy_for().save_ckpt(trained, tmp_path)
    model = strategy_for(bf16=True).prepare_model(build("llama", seed=1), is_training=False)
    loaded = load_checkpoint(model, tmp_path)
    assert set(loaded.cast) == set(dict(model.named_parameters()))
    expected = {name: tensor.bfloat16() for name, tensor in full_parameters(trained).items()}
    assert_same(full_parameters(model), expected)


@pytest.mark.ranks(2)
def test_offloaded_state_saves_the_same_bytes_and_loads_without_offload(tmp_path):
    for offload in (False, True):
        strategy = strategy_for(cpu_offload=offload)
        model, optimizer, scheduler = prepared(strategy)
        train(strategy, model, optimizer, scheduler, range(2))
        strategy.save_ckpt(model, tmp_path / str(offload), "t")
        expected = full_state(model, optimizer)
    for part in ("model", "optimizer"):
        assert contents(tmp_path / "True" / "t" / part) == contents(tmp_path / "False" / "t" / part)
    other, its_optimizer, _ = prepared(strategy_for(), seed=1)
    strategy_for().load_ckpt(other, tmp_path / "True", optimizer=its_optimizer, load_lr_scheduler_states=False)
    assert_same(full_state(other, its_optimizer), expected)


# --- the container under torch's driver ------------------------------------------------------------------------------


def sharded(tensor, mesh, placements):
    """Return a sharded tensor without a collective: not all of them know all dtypes."""
    local = tensor
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            chunks = local.split(max(1, -(-local.shape[placement.dim] // mesh.size(axis))), placement.dim)
            rank = mesh.get_local_rank(axis)
            local = chunks[rank] if rank < len(chunks) else local.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def tensors_of_every_kind(mesh):
    torch.manual_seed(0)
    plain = {}
    for name, dtype in DTYPES.items():
        values = torch.randint(0, 2, (7, 3)) if dtype == torch.bool else torch.randn(7, 3).abs() * 10
        plain[f"dtype.{name}"] = (values.to(dtype), [Replicate(), Shard(0)])
    plain["columns"] = (torch.randn(5, 7, 3), [Replicate(), Shard(1)])
    plain["last"] = (torch.randn(4, 3, 5), [Replicate(), Shard(2)])
    plain["both"] = (torch.randn(6, 5), [Shard(1), Shard(0)])
    plain["short"] = (torch.randn(1, 2), [Replicate(), Shard(0)])
    plain["empty"] = (torch.empty(0, 4), [Replicate(), Shard(0)])
    plain["scalar"] = (torch.tensor(3.5), [Replicate(), Replicate()])
    plain["large"] = (torch.randn(5000, 1100), [Replicate(), Shard(0)])
    state = {name: sharded(tensor, mesh, placements) for name, (tensor, placements) in plain.items()}
    return {name: tensor for name, (tensor, _) in plain.items()}, state


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.ranks(4)
def test_any_sharding_and_dtype_is_written_and_read(tmp_path):
    mesh = build_mesh(2)
    plain, state = tensors_of_every_kind(mesh)
    everything = {**state, "buffer": torch.arange(5)}
    write_components([Component.of(tmp_path, everything)])
    dist.barrier()
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == everything.keys()
    assert not [n for n in plain if not torch.equal(bits(stored[n]), bits(plain[n]))]
    other = {name: sharded(torch.zeros_like(tensor), mesh, state[name].placements) for name, tensor in plain.items()}
    targets = targets_by_name("state", other, stored_in(tmp_path))
    read_all([r for target in targets for r in read_requests_for(*target)], None, "reading")
    assert not [n for n in state if not torch.equal(bits(other[n].to_local()), bits(state[n].to_local()))]


@pytest.mark.ranks(2)
def test_a_rank_with_nothing_to_read_and_components_of_one_folder_are_no_special_cases(tmp_path):
    one, two = torch.arange(4), torch.arange(5)
    write_components([Component.of(tmp_path, {"x": one}), Component.of(tmp_path, {"x": two}, stem="adapter")])
    dist.barrier()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], one)
    assert torch.equal(load_file(tmp_path / "adapter.safetensors")["x"], two)
    stored = {entry.name: entry for entry in read_header(tmp_path / "adapter.safetensors").values()}
    found = torch.zeros(5, dtype=torch.int64)
    requests = read_requests_for(*targets_by_name("state", {"x": found}, stored)[0])
    read_all(requests if dist.get_rank() else [], None, "reading")
    assert torch.equal(found, two if dist.get_rank() else torch.zeros_like(two))


@pytest.mark.real_sizes
def test_beyond_two_gibibytes_a_tensor_is_written_and_read_as_any_other(tmp_path):
    rows, width = 2**21 + 3, 1025
    [file] = files_for(tmp_path, "model", {"x": Region.of("x", (rows, width), torch.uint8)}, 10**12)
    create_files([file])
    [entry] = file.entries.values()
    values = torch.arange(2 * width, dtype=torch.uint8).view(2, width)
    box = ((rows - 2, 2), (0, width))
    blocks = write_all([WriteRequest(entry, box, values)], hashed=True)
    assert [block.end for block in blocks[file.path]] == [file.path.stat().st_size] == [len(file.header) + rows * width]
    assert stored_in(tmp_path) == {"x": entry}
    found = torch.zeros(2, width, dtype=torch.uint8)
    with Reader("reading") as reader:
        reader.read([ReadRequest("x", Region.of(entry, entry.shape, torch.uint8), box, found)])
    assert torch.equal(found, values)


@pytest.mark.ranks(2)
def test_a_folder_that_each_host_has_for_itself_is_an_error(tmp_path, monkeypatch):
    own = tmp_path / f"host{dist.get_rank()}"
    own.mkdir()
    split = {"a": sharded(torch.ones(6), build_mesh(2), [Shard(0)])}
    whole = {name: sharded(torch.ones(8), build_mesh(2), [Replicate()]) for name in "ab"}  # a file of each rank's own
    for state in (split, whole):
        with (
            monkeypatch.context() as patched,
            patch.multiple(sizes, FILE_COUNT=2, MIN_FILE_LIMIT_BYTES=1),
            pytest.raises(CheckpointError, match="all ranks see"),
        ):
            patched.chdir(own)
            component = Component.of(Path(), state)
            with all_or_none("save", CheckpointError):
                write_components([component])
                check_shared_folder(component.files)


@pytest.mark.ranks(2)
def test_tensors_of_another_shape_on_one_rank_are_refused_on_every_rank(tmp_path):
    model = shard_model(nn.Linear(4, 4), config=StrategyConfig(bf16=False))
    model.register_buffer("seen", torch.zeros(3 + dist.get_rank()))
    with pytest.raises(CheckpointError, match=r"ranks \[1\] differ from rank 0, expected the same names, shapes"):
        save_checkpoint(model, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == []


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_flipped_bit_anywhere_is_found_and_named(tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy, "mlp")
    train(strategy, model, optimizer, scheduler, [0], "mlp")
    strategy.save_ckpt(model, tmp_path, "a", client_state={"x": 1})
    path = tmp_path / "a"
    assert verify_checkpoint(path).ok
    for name, content in contents(path).items():
        for at in {0, len(content) // 2, len(content) - 1}:
            dist.barrier()
            if dist.get_rank() == 0:
                damaged = bytearray(content)
                damaged[at] ^= 4
                (path / name).write_bytes(damaged)
            dist.barrier()
            report = verify_checkpoint(path)
            assert not report.ok
            assert any(name in problem for problem in report.problems), (name, at, report.problems)
            with pytest.raises(CheckpointError):
                strategy.load_ckpt(model, path)
            dist.barrier()
            if dist.get_rank() == 0:
                (path / name).write_bytes(content)
    dist.barrier()
    assert verify_checkpoint(path).ok
    strategy.load_ckpt(model, path)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_damage_names_tensor_file_and_bytes_and_what_it_left_is_unusable(tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, [0])
    strategy.save_ckpt(model, tmp_path, "good", client_state={"tag": "good"})
    strategy.save_ckpt(model, tmp_path, "bad", client_state={"tag": "bad"})
    expected = full_state(model, optimizer)
    file = tmp_path / "bad" / "model" / "model.safetensors"
    entry = stored_in(file.parent)["model.layers.1.mlp.up_proj.weight"]
    dist.barrier()
    if dist.get_rank() == 0:
        with file.open("r+b") as damaged:
            damaged.seek(entry.offset)
            damaged.write(b"\x7f")
    dist.barrier()
    [problem] = verify_checkpoint(tmp_path / "bad").problems
    assert entry.name in problem and str(file) in problem and f"bytes {entry.offset} to" in problem
    with pytest.raises(DamageError, match=rf"{entry.name}.*bytes {entry.offset} to .*model\.safetensors"):
        strategy.load_ckpt(model, tmp_path)
    batch = batch_of("llama", 0, dist.get_rank())
    for use in (
        lambda: loss_of("llama", model, batch),
        lambda: strategy.save_ckpt(model, tmp_path, "next"),
        lambda: strategy.save_model(model, None, tmp_path / "export"),
    ):
        with pytest.raises(CheckpointError, match="a load failed midway"):
            use()
    _, state = strategy.load_ckpt(model, tmp_path, fallback=True)
    assert state == {"tag": "good"}
    assert_same(full_state(model, optimizer), expected)
    train(strategy, model, optimizer, scheduler, [1])
    strategy.load_ckpt(model, tmp_path, tag="bad", verify=False)  # the user's own risk


WEIGHTS = "model/model.safetensors"
FAULTS = {
    r"checksums/rank00000\.json": lambda a, b: shutil.copyfile(a / "manifest.json", b / "manifest.json"),
    "No such file": lambda a, b: (b / WEIGHTS).unlink(),
    "No such file or directory": lambda a, b: (b / "checksums" / "rank00001.json").unlink(),
    "it is 100 bytes long": lambda a, b: os.truncate(b / WEIGHTS, 100),
    "bytes long, expected": lambda a, b: (b / WEIGHTS).write_bytes((b / WEIGHTS).read_bytes() + b"0" * 8),
}


@pytest.mark.ranks(2)
def test_structure_that_does_not_fit_is_found_before_anything_is_touched(tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy, "mlp")
    for tag in ("a", "b"):
        strategy.save_ckpt(model, tmp_path, tag)
        train(strategy, model, optimizer, scheduler, [0], "mlp")
    before = full_parameters(model)
    a, b = tmp_path / "a", tmp_path / "b"
    keep = contents(b)
    for message, fault in FAULTS.items():
        dist.barrier()
        if dist.get_rank() == 0:
            fault(a, b)
        dist.barrier()
        report = verify_checkpoint(b)
        assert not report.ok and re.search(message, report.problems[0]), (message, report.problems)
        with pytest.raises(DamageError, match=message):
            strategy.load_ckpt(model, b)
        dist.barrier()
        if dist.get_rank() == 0:
            put_back(b, keep)
    dist.barrier()
    assert verify_checkpoint(b).ok
    assert_same(full_parameters(model), before)
    loss_of("mlp", model, batch_of("mlp", 0, 0))  # still usable


@pytest.mark.ranks(2)
def test_verifying_tells_all_that_is_wrong(tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy, "mlp")
    train(strategy, model, optimizer, scheduler, [0], "mlp")
    path = Path(strategy.save_ckpt(model, tmp_path))
    if dist.get_rank() == 0:
        for name, at in ((WEIGHTS, 20), ("optimizer/optimizer.safetensors", -1), (paths.TRAINER_STATE, 5)):
            content = bytearray((path / name).read_bytes())
            content[at] ^= 1
            (path / name).write_bytes(content)
        text = "\n".join(verify_checkpoint(path).problems)
        assert all(name in text for name in (WEIGHTS, "optimizer.safetensors", paths.TRAINER_STATE)), text
    dist.barrier()


LIST = "checksums/rank00001.json"


def damage_a_list(path):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    strategy.save_ckpt(model, path, "tag")
    if dist.get_rank() == 0:
        damaged = path / "tag" / LIST
        damaged.write_bytes(damaged.read_bytes().replace(b"[", b"[ ", 1))
        manifest = listing.read_manifest(path / "tag")
        manifest["files"][LIST] += 1
        manifest["digest"] = listing.digest_of_manifest(manifest)
        directory.write_json(path / "tag" / paths.MANIFEST, manifest)
    dist.barrier()


def find_the_damaged_list(path):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    before = full_parameters(model)
    for _ in range(2):
        with pytest.raises(DamageError, match=r"rank00001\.json has the checksum \w+, expected \w+"):
            strategy.load_ckpt(model, path, load_optimizer_states=False)
    assert_same(full_parameters(model), before)
    loss_of("mlp", model, batch_of("mlp", 0, 0))  # still usable


def test_a_damaged_list_is_found_before_anything_is_touched_on_any_number_of_ranks(tmp_path, run_on):
    run_on(2, damage_a_list, path=tmp_path)
    for world in (1, 2):
        run_on(world, find_the_damaged_list, path=tmp_path)


class WithScalar(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(32, 64), nn.Linear(64, 8))
        self.scale = nn.Parameter(torch.tensor(1.5))


def lists_read(path, load):
    """Return which ranks' lists of checksums this rank reads in a load."""
    read = set()
    original = _ChecksumManifests._read_blocks
    _ChecksumManifests._read_blocks = lambda self, numbers: read.update(numbers) or original(self, numbers)
    try:
        load()
    finally:
        _ChecksumManifests._read_blocks = original
    return read


def save_for_lists(path, shard_size):
    strategy = strategy_for()
    model = strategy.prepare_model(WithScalar(), True, shard_size)
    strategy.save_ckpt(model, path)
    read = lists_read(path, lambda: strategy.load_ckpt(model, path))
    rank = dist.get_rank()
    column = range(rank % shard_size, dist.get_world_size(), shard_size)
    assert {0, rank} <= read <= {0, *column}
    if shard_size == dist.get_world_size():
        assert read == {0, rank}


def load_for_lists(path, lists):
    strategy = strategy_for()
    model = strategy.prepare_model(WithScalar(), is_training=True)
    assert lists_read(path, lambda: strategy.load_ckpt(model, path)) == lists[dist.get_rank()]


def test_a_load_reads_the_lists_of_checksums_that_it_needs_alone(tmp_path, run_on):
    run_on(4, save_for_lists, path=tmp_path / "whole", shard_size=4)
    run_on(4, save_for_lists, path=tmp_path / "replicas", shard_size=2)
    run_on(2, load_for_lists, path=tmp_path / "whole", lists=[{0, 1}, {0, 2, 3}])
    run_on(1, load_for_lists, path=tmp_path / "whole", lists=[{0, 1, 2, 3}])


@pytest.mark.ranks(2)
def test_ranks_that_write_into_different_directories_are_told(tmp_path):
    """Two hosts whose disk is not shared: here each rank writes its list somewhere else."""
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    original = directory.write_checksums

    def elsewhere(partial, rank, blocks):
        digest = original(partial, rank, blocks)
        if rank == 1:
            partial.rank_file(paths.CHECKSUMS, rank).unlink()
        return digest

    directory.write_checksums = elsewhere
    try:
        with pytest.raises(CheckpointError, match=r"does not see checksums/rank00001\.json.*all hosts share"):
            strategy.save_ckpt(model, tmp_path)
    finally:
        directory.write_checksums = original
    assert tags(tmp_path) == []


def put_back(path, files):
    shutil.rmtree(path)
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)


@pytest.mark.ranks(1)
def test_verifying_never_raises_for_damage(tmp_path):
    for content in ("", "[]", "{}", '{"format": "fsdp2_strategy", "format_version": 2}', "[" * 100_000):
        (tmp_path / "manifest.json").write_text(content)
        report = verify_checkpoint(tmp_path)
        assert not report.ok and report.problems
    manifest = {"format": listing.FORMAT, "format_version": listing.FORMAT_VERSION, "files": 3, "checksums": []}
    directory.write_json(tmp_path / "manifest.json", manifest | {"digest": listing.digest_of_manifest(manifest)})
    assert not verify_checkpoint(tmp_path).ok
    manifest |= {"sequence": 1, "tag": "x", "step": 1, "protected": False, "metric": None, "higher_is_better": True}
    directory.write_json(tmp_path / "manifest.json", manifest | {"digest": listing.digest_of_manifest(manifest)})
    assert "is invalid" in verify_checkpoint(tmp_path).problems[0]
    assert tags(tmp_path.parent) == []
    assert not verify_checkpoint(tmp_path / "nowhere").ok


@pytest.mark.ranks(3)
@pytest.mark.parametrize("number", some([errno.ENOSPC, errno.EIO, errno.EACCES], [errno.ENOSPC]))
@pytest.mark.parametrize(
    "owner",
    some(
        ["pwritev", "open", "fsync", "ftruncate", "write_bytes", "rename", "replace"],
        ["pwritev", "open", "fsync", "rename"],
    ),
)
def test_a_call_that_fails_on_one_rank_raises_on_all_and_loses_nothing(tmp_path, owner, number):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    strategy.save_ckpt(model, tmp_path, "old", client_state={"saved": 1})
    where = Path if owner in ("write_bytes", "rename", "replace") else os
    original = getattr(where, owner)
    one_rank = 0 if owner in ("rename", "replace") else 2

    def failing(subject, *args, **kwargs):
        if dist.get_rank() == one_rank and (owner != "open" or "partial" in str(subject)):
            raise OSError(number, os.strerror(number), str(subject))
        return original(subject, *args, **kwargs)

    expected = pytest.raises(CheckpointError, match=rf"rank {one_rank}.*{os.strerror(number)}")
    if owner == "replace":  # only that of `latest`, after the commit
        expected = contextlib.nullcontext()
    setattr(where, owner, failing)
    try:
        with expected:
            strategy.save_ckpt(model, tmp_path, "new")
    finally:
        setattr(where, owner, original)
    dist.barrier()
    assert tags(tmp_path) == (["old", "new"] if owner == "replace" else ["old"])
    assert owner == "replace" or strategy.load_ckpt(model, tmp_path)[1] == {"saved": 1}
    strategy.save_ckpt(model, tmp_path, "new", client_state={"saved": 2})
    assert strategy.load_ckpt(model, tmp_path)[1] == {"saved": 2}
    assert verify_checkpoint(tmp_path / "new").ok


@pytest.mark.ranks(2)
def test_short_writes_and_reads_are_gone_on_with(tmp_path, monkeypatch):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, [0])
    pwritev, preadv = os.pwritev, os.preadv
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", lambda fd, buffers, at: pwritev(fd, [buffers[0][:1000]], at))
        patched.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:1000]], at))
        strategy.save_ckpt(model, tmp_path, "a")
        expected = full_state(model, optimizer)
        train(strategy, model, optimizer, scheduler, [1])
        strategy.load_ckpt(model, tmp_path)
    assert_same(full_state(model, optimizer), expected)
    assert verify_checkpoint(tmp_path / "a").ok


def save_for_ever(folder):
    strategy = FSDPV2Strategy()
    model = strategy.prepare_model(nn.Linear(2048, 2048), is_training=True)
    path, state = strategy.load_ckpt(model, folder, load_optimizer_states=False)
    first = state.get("value", 0)
    assert all((p.full_tensor() == first).all() for p in model.parameters()) or path is None
    for value in itertools.count(first + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        strategy.save_ckpt(model, folder, f"value{value}", max_num=2, client_state={"value": value})


@pytest.mark.full
def test_a_run_that_is_killed_while_it_saves_loses_nothing_that_was_committed(tmp_path):
    committed = 0
    for milliseconds in (0, 11):
        kill_within_a_save(save_for_ever, tmp_path, committed=committed + 3, seconds=milliseconds / 1000)
        whole = list_checkpoints(tmp_path)
        assert len(whole) >= 2 and all(verify_checkpoint(c.path).ok for c in whole)
        assert whole[-1].sequence > committed
        committed = whole[-1].sequence


# --- runs and rotation -----------------------------------------------------------------------------------------------


def save_as_another_run(folder, pipe):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    try:
        strategy.save_ckpt(model, folder, "second", max_num=1)
        pipe.send("saved")
    except CheckpointError as error:
        pipe.send(str(error))


def second_run(folder):
    """Return what comes of a save by another process."""
    ours, theirs = processes.Pipe()
    run = processes.Process(target=save_as_another_run, args=(folder, theirs), daemon=True)
    run.start()
    run.join()
    assert run.exitcode == 0
    return ours.recv()


@pytest.mark.full
def test_a_second_run_on_the_same_directory_is_refused(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    strategy.save_ckpt(model, tmp_path, "first")
    in_flight = tmp_path / ".second.partial" / "model"  # as if this run were saving the tag of the second run
    in_flight.mkdir(parents=True)
    assert 'another run holds its lock ({"host": ' in second_run(tmp_path)
    assert in_flight.is_dir()
    assert tags(tmp_path) == ["first"]
    strategy.close()
    assert second_run(tmp_path) == "saved"
    assert tags(tmp_path) == ["second"]


HOLDS_THE_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.ranks(1)
def test_a_reader_leaves_a_commit_of_another_run_alone(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    strategy.save_ckpt(model, tmp_path, "tag")
    strategy.close()
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    (tmp_path / "tag").rename(tmp_path / ".tag.replaced")  # between the two renames of a tag that is saved again
    command = [sys.executable, "-c", HOLDS_THE_LOCK, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        assert strategy.load_ckpt(model, tmp_path)[0] == str(tmp_path / ".tag.replaced"), "it is not renamed back"
        other.stdin.close()
    assert strategy.load_ckpt(model, tmp_path)[0] == str(tmp_path / "tag"), "nobody is left to bring it back"


@pytest.mark.ranks(2)
def test_protected_and_best_checkpoints_stay(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    for step, (metric, protect) in enumerate([(0.5, False), (0.9, False), (0.7, True), (0.8, False), (0.6, False)]):
        strategy.save_ckpt(model, tmp_path, f"s{step}", max_num=1, metric=metric, protect=protect)
        dist.barrier()
    assert tags(tmp_path) == ["s1", "s2", "s4"]
    strategy.save_ckpt(model, tmp_path, "s5", max_num=1, metric=0.1, higher_is_better=False)
    dist.barrier()
    assert tags(tmp_path) == ["s2", "s5"]
    with pytest.raises(CheckpointError, match="metric is nan"):
        strategy.save_ckpt(model, tmp_path, "s6", metric=float("nan"))


@pytest.mark.ranks(1)
def test_removal_does_not_keep_training_waiting(tmp_path, monkeypatch):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    strategy.save_ckpt(model, tmp_path, "a", max_num=1)
    waiting = threading.Event()
    delete = directory.delete

    def slow(path, final):
        waiting.wait(60)
        delete(path, final)

    with monkeypatch.context() as patched:
        patched.setattr(directory, "delete", slow)
        strategy.save_ckpt(model, tmp_path, "b", max_num=1)
        assert tags(tmp_path) == ["b"]
        assert (tmp_path / ".a.removed").exists()
        waiting.set()
        directory.finish_removals()
    assert not (tmp_path / ".a.removed").exists()


# --- what others wrote -----------------------------------------------------------------------------------------------


def trained_once(strategy):
    model, optimizer, scheduler = prepared(strategy, "llama_tied")
    train(strategy, model, optimizer, scheduler, [0], "llama_tied")
    for parameter in model.parameters():
        parameter.grad = None
    return model, optimizer


def schedule_at_6(optimizer):
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    schedule.last_epoch = 6
    return schedule.state_dict()


def as_lightrft(folder, model, optimizer):
    dcp.save(get_model_state_dict(model), checkpoint_id=folder / "global_step7")
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder / "global_step7" / "optim_states")
    if dist.get_rank() == 0:
        torch.save({"consumed": 3}, folder / "global_step7" / "client_state.pt")
        torch.save(schedule_at_6(optimizer), folder / "global_step7" / "scheduler_state.pt")


def as_accelerate(folder, model, optimizer):
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "step7" / "pytorch_model_fsdp_0")
    state = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": state}, checkpoint_id=folder / "step7" / "optimizer_0")
    if dist.get_rank() == 0:
        torch.save(schedule_at_6(optimizer), folder / "step7" / "scheduler.bin")


def as_whole_file(folder, model, optimizer):
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save({"state_dict": state, "epoch": 3}, folder / "model.pt")


WRITERS = {"lightrft": as_lightrft, "accelerate": as_accelerate, "whole_file": as_whole_file}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrote", list(WRITERS))
def test_checkpoints_of_other_systems_load_where_they_are_trusted(tmp_path, wrote):
    strategy = strategy_for()
    model, optimizer = trained_once(strategy)
    WRITERS[wrote](tmp_path, model, optimizer)
    dist.barrier()
    other, its_optimizer, _ = prepared(strategy, "llama_tied", seed=1)
    whole = wrote == "whole_file"
    options = {"load_lr_scheduler_states": False, "load_optimizer_states": not whole}
    with pytest.raises(CheckpointError, match="Pass trust=True"):
        strategy.load_ckpt(other, tmp_path, **options)
    _, client_state = strategy.load_ckpt(other, tmp_path, trust=True, **options)
    assert client_state == {"lightrft": {"consumed": 3}, "whole_file": {"epoch": 3}}.get(wrote, {})
    assert_same(full_parameters(other), full_parameters(model))
    if not whole:
        assert_same(full_state(other, its_optimizer), full_state(model, optimizer))
        assert strategy.global_step(other) == 7
        third, its_own, _ = prepared(strategy, "llama_tied", seed=2)
        before = full_parameters(third)
        strategy.load_ckpt(third, tmp_path, trust=True, load_module=False, **options)
        assert_same(full_parameters(third), before)
        assert its_own.state
    else:
        with pytest.raises(CheckpointError, match="expected one that also has the optimizer"):
            strategy.load_ckpt(other, tmp_path, trust=True)
    with pytest.raises(CheckpointError, match=r"its weights are .* names .*, expected 9 names"):
        strategy.load_ckpt(strategy.prepare_model(build("mlp")), tmp_path, trust=True, load_optimizer_states=False)
    schedule = torch.optim.lr_scheduler.StepLR(its_optimizer, 1)
    if not whole:
        strategy.load_ckpt(other, tmp_path, scheduler=schedule, trust=True)
        assert schedule.last_epoch == 6
    else:
        with pytest.raises(CheckpointError, match=r"expected one that also has the (schedule|optimizer)"):
            strategy.load_ckpt(other, tmp_path, scheduler=schedule, trust=True)
    train(strategy, other, its_optimizer, schedule, [1], "llama_tied")


@pytest.mark.ranks(2)
def test_the_optimizer_can_be_loaded_alone(tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, [0])
    strategy.save_ckpt(model, tmp_path)
    other, its_optimizer, _ = prepared(strategy, seed=1)
    before = full_parameters(other)
    strategy.load_ckpt(other, tmp_path, load_module=False)
    assert_same(full_parameters(other), before)
    state = {n: t for n, t in full_state(other, its_optimizer).items() if n.startswith("state.")}
    assert_same(state, {n: t for n, t in full_state(model, optimizer).items() if n.startswith("state.")})


# --- the command line ------------------------------------------------------------------------------------------------


def save_two(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.save_ckpt(model, folder, "a", metric=0.5)
    strategy.save_ckpt(model, folder, "b", protect=True, tokenizer=small_tokenizer())


def test_the_command_line_lists_verifies_and_exports(tmp_path, capsys, run_on):
    run_on(2, save_two, folder=tmp_path / "ckpts")
    capsys.readouterr()
    assert main(["ls", str(tmp_path / "ckpts")]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["1", "a", "0"] and "metric 0.5" in first and "protected" in second
    assert main(["verify", str(tmp_path / "ckpts")]) == 0
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "ckpts" / "b"), str(out), "--dtype", "bfloat16"]) == 0
    opened = AutoModelForCausalLM.from_pretrained(out)
    assert opened.dtype == torch.bfloat16
    saved = load_file(tmp_path / "ckpts" / "b" / "model" / "model.safetensors")
    assert_same(dict(opened.named_parameters()), {name: tensor.bfloat16() for name, tensor in saved.items()})
    assert AutoTokenizer.from_pretrained(out).get_vocab()
    capsys.readouterr()
    assert main(["export", str(tmp_path / "ckpts" / "b"), str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err
    file = tmp_path / "ckpts" / "a" / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    failed = tmp_path / "failed"
    assert main(["export", str(tmp_path / "ckpts" / "a"), str(failed)]) == 2
    assert not failed.exists(), "what is not whole is not left behind"
    assert main(["export", str(tmp_path / "ckpts" / "b"), str(failed)]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "ckpts")]) == 1
    assert "1 problem\n" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "nothing")]) == 2


def write_foreign(folder, wrote):
    strategy = strategy_for()
    model, optimizer = trained_once(strategy)
    WRITERS[wrote](folder / wrote, model, optimizer)
    strategy.save_ckpt(model, folder / "ours", "a")


@pytest.mark.full
def test_the_command_line_exports_what_other_systems_wrote(tmp_path, capsys, run_on):
    for wrote in WRITERS:
        (tmp_path / wrote).mkdir()
        run_on(2, write_foreign, folder=tmp_path, wrote=wrote)
        ours = tmp_path / "ours" / "a" / "model"
        out = tmp_path / f"{wrote}.out"
        capsys.readouterr()
        assert main(["export", str(tmp_path / wrote), str(out)]) == 2
        assert "trust" in capsys.readouterr().err
        arguments = ["--trust", "--dtype", "bfloat16", "--sidecars", str(ours)]
        other = tmp_path / "other"
        if not other.exists():
            config = LlamaConfig(
                vocab_size=8, hidden_size=16, num_attention_heads=2, architectures=["LlamaForCausalLM"]
            )
            config.save_pretrained(other)
        assert main(["export", str(tmp_path / wrote), str(out), "--trust", "--sidecars", str(other)]) == 2
        said = capsys.readouterr().err
        assert "model.embed_tokens.weight has shape [96, 32], and [8, 16] by the configuration" in said
        assert not out.exists()
        assert main(["export", str(tmp_path / wrote), str(out), *arguments]) == 0
        opened, expected = (AutoModelForCausalLM.from_pretrained(folder) for folder in (out, ours))
        assert opened.dtype == torch.bfloat16
        values = {name: tensor.bfloat16() for name, tensor in expected.named_parameters()}
        assert_same(dict(opened.named_parameters()), values)
