"""Checkpoints of the trainable weights alone: small, exact to resume, and never beside other frozen weights."""

from __future__ import annotations

import functools
import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.frozen import Policy, folder_with, start, train
from helpers.reference import full_parameters
from helpers.training import assert_same, full_state, strategy_for
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp2_strategy import StrategyConfig, list_checkpoints, sizes
from fsdp2_strategy.cli import main
from fsdp2_strategy.distributed.mesh import build_mesh
from fsdp2_strategy.errors import CheckpointError, DamageError
from fsdp2_strategy.model.fingerprint import Fingerprint, fingerprints, local_sums
from fsdp2_strategy.sharding.shard import shard_model
from fsdp2_strategy.storage.safetensors_format import read_header


@pytest.mark.ranks(2)
@pytest.mark.parametrize("async_save", [False, True])
def test_frozen_weights_are_left_out_and_the_run_goes_on_to_the_bit(tmp_path, async_save):
    folder = folder_with(tmp_path / "base", 0)
    run = start(folder)
    train(*run, range(2))
    run[0].save_ckpt(run[1], tmp_path / "ckpts", only_trainable=True, async_save=async_save, meta={"epoch": 3})
    run[0].wait_for_checkpoint()
    [saved] = list_checkpoints(tmp_path / "ckpts")
    held = {name for file in (saved.path / "trainable").iterdir() for name in read_header(file)}
    assert held == {n for n in run[1].state_dict() if n.startswith("head.")}, "parameters and buffers of the head"
    assert not (saved.path / "model").exists(), "nothing that from_pretrained would open, with weights made up"
    assert json.loads((saved.path / "meta.json").read_text()) == {"epoch": 3}
    expected = train(*run, range(2, 5))
    again = start(folder, seed=1)
    again[0].load_ckpt(again[1], tmp_path / "ckpts")
    assert train(*again, range(2, 5)) == expected
    assert_same(full_state(*again[1:]), full_state(*run[1:]))


@pytest.mark.ranks(2)
def test_a_model_with_other_frozen_weights_gets_those_again_that_it_was_saved_with(tmp_path):
    run = start(folder_with(tmp_path / "base", 0))
    train(*run, range(2))
    run[0].save_ckpt(run[1], tmp_path / "ckpts", only_trainable=True)
    expected = full_state(*run[1:])
    other = folder_with(tmp_path / "other", 1)
    again = start(other, seed=1)
    again[0].load_ckpt(again[1], tmp_path / "ckpts")
    assert_same(full_state(*again[1:]), expected)
    # A run in another precision knows them, too.
    in_fp32 = start(tmp_path / "base", seed=1, bf16=False)
    in_fp32[0].load_ckpt(in_fp32[1], tmp_path / "ckpts")
    assert in_fp32[1].backbone.embed_tokens.weight.dtype == torch.float32


@pytest.mark.ranks(2)
def test_frozen_weights_that_are_nowhere_are_an_error_before_anything_is_touched(tmp_path):
    run = start(folder_with(tmp_path / "base", 0))
    run[0].save_ckpt(run[1], tmp_path / "ckpts", only_trainable=True)
    again = start(folder_with(tmp_path / "other", 1), seed=1)
    before = full_parameters(again[1])
    if dist.get_rank() == 0:
        (tmp_path / "base").rename(tmp_path / "away")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"backbone\.embed_tokens\.weight.*model was loaded from .*base"):
        again[0].load_ckpt(again[1], tmp_path / "ckpts")
    assert_same(full_parameters(again[1]), before)
    train(*again, range(1))
    # Where the folder has changed, that shows once it is read.
    folder_with(tmp_path / "base", 2)
    with pytest.raises(DamageError, match="no longer in"):
        again[0].load_ckpt(again[1], tmp_path / "ckpts")
    with pytest.raises(CheckpointError, match="a load failed midway"):
        train(*again, range(1))
    if dist.get_rank() == 0:
        shutil.rmtree(tmp_path / "base")
        (tmp_path / "away").rename(tmp_path / "base")
    dist.barrier()
    again[0].load_ckpt(again[1], tmp_path / "ckpts")
    assert_same(full_state(*again[1:]), full_state(*run[1:]))


@pytest.mark.full
@pytest.mark.ranks(2)
def test_frozen_weights_that_no_folder_holds_are_saved(tmp_path):
    """Trained before they were frozen, or out of a checkpoint: they would be lost otherwise."""
    strategy, model, optimizer = start(folder_with(tmp_path / "base", 0), bf16=False, frozen=False)
    train(strategy, model, optimizer, range(1))
    model.backbone.layers.requires_grad_(False)
    model.backbone.embed_tokens.requires_grad_(False)
    del optimizer
    strategy.save_ckpt(model, tmp_path / "full", optimizer=strategy.create_optimizer(model, lr=0.1))
    strategy.save_ckpt(model, tmp_path / "late", only_trainable=True)
    again, second, _ = start(tmp_path / "base", seed=1, bf16=False)
    again.load_ckpt(second, tmp_path / "late", load_optimizer_states=False)
    assert_same(full_parameters(second), full_parameters(model))
    # The same in a second stage, whose frozen weights are an earlier run's.
    third = start(tmp_path / "base", seed=2, bf16=False)
    third[0].load_ckpt(third[1], tmp_path / "full", load_optimizer_states=False)
    train(*third, range(1))
    third[0].save_ckpt(third[1], tmp_path / "stage", only_trainable=True)
    again, fourth, _ = start(tmp_path / "base", seed=3, bf16=False)
    again.load_ckpt(fourth, tmp_path / "stage")
    assert_same(full_parameters(fourth), full_parameters(third[1]))
    # Frozen from the start, but trained in between.
    run = start(tmp_path / "base", seed=4, bf16=False)
    run[1].backbone.norm.requires_grad_(True)
    in_between = run[0].create_optimizer(run[1], lr=0.1)
    train(run[0], run[1], in_between, range(1))
    run[1].backbone.norm.requires_grad_(False)
    run[0].save_ckpt(run[1], tmp_path / "between", only_trainable=True, optimizer=in_between)
    again, fifth, _ = start(tmp_path / "base", seed=5, bf16=False)
    again.load_ckpt(fifth, tmp_path / "between", load_optimizer_states=False)
    assert_same(full_parameters(fifth), full_parameters(run[1]))
    # What was loaded and is what the folder holds is left out all the same.
    run = start(tmp_path / "base")
    run[0].save_ckpt(run[1], tmp_path / "whole")
    run[0].load_ckpt(run[1], tmp_path / "whole")
    run[0].save_ckpt(run[1], tmp_path / "alone", only_trainable=True)
    [saved] = list_checkpoints(tmp_path / "alone")
    assert not [n for f in (saved.path / "trainable").iterdir() for n in read_header(f) if n.startswith("backbone")]


@pytest.mark.ranks(2)
def test_folders_that_cannot_be_compared_hold_nothing(tmp_path):
    """One that a rank does not see, one without safetensors files, a weight of another shape, one that is gone."""

    def saved_names(policy, tag, change=True):
        strategy = strategy_for(bf16=False)
        model = strategy.prepare_model(policy, is_training=True)
        with torch.no_grad():
            model.backbone.norm.weight.mul_(2 if change else 1)
        strategy.save_ckpt(model, tmp_path / "ckpts", tag, only_trainable=True)
        folder = tmp_path / "ckpts" / tag / "trainable"
        return {n for f in folder.iterdir() for n in read_header(f) if n.startswith("backbone")}

    base = folder_with(tmp_path / "base", 0)
    policies = [Policy(base) for _ in range(3)]
    policies[0].backbone.name_or_path = str(base if dist.get_rank() else tmp_path / "nowhere")
    policies[1].backbone.name_or_path = str(tmp_path)
    policies[2].backbone.embed_tokens = nn.Embedding(97, 32).requires_grad_(False)
    for i, policy in enumerate(policies):
        torch.manual_seed(0)
        for module in (policy.head, policy.backbone.embed_tokens):
            for parameter in module.parameters():
                nn.init.normal_(parameter)
        assert saved_names(policy, f"changed{i}") == {"backbone.norm.weight"}


@pytest.mark.ranks(2)
def test_what_cannot_be_done_with_trainable_weights_alone_is_said(tmp_path):
    strategy, model, _ = start(folder_with(tmp_path / "base", 0))
    strategy.save_ckpt(model, tmp_path / "ckpts", only_trainable=True)
    [saved] = list_checkpoints(tmp_path / "ckpts")
    with redirect_stderr(io.StringIO()) as errors, redirect_stdout(io.StringIO()) as listed:
        assert main(["export", str(saved.path), str(tmp_path / f"out{dist.get_rank()}")]) == 2
        assert main(["ls", str(tmp_path / "ckpts")]) == 0
    assert "contains only trainable weights" in errors.getvalue()
    assert "trainable weights only" in listed.getvalue()
    with pytest.raises(CheckpointError, match="has no trainable weights"):
        strategy.save_ckpt(model.requires_grad_(False), tmp_path / "ckpts", only_trainable=True)


@functools.cache
def weight(number):
    mixed = np.array([(number + 1) * 0xBF58476D1CE4E5B9 % 2**64], dtype=np.uint64).view(np.int64) >> 29
    return (number * 0x9E3779B97F4A7C15) % 2**64 ^ int(mixed.view(np.uint64)[0]) | 1


def fingerprint(values):
    """Do it once more, element by element."""

    def digits(bits):
        size = sizes.FINGERPRINT_ELEMENTS
        total = sum(v * weight(p % size) * weight(p // size) for p, v in enumerate(bits.flatten().tolist()))
        return f"{total % 2**64:016x}"

    rounded = digits(values.to(torch.bfloat16).view(torch.int16))
    return Fingerprint("torch.float32", digits(values.view(torch.int32)), rounded)


def now(tensors):
    return fingerprints(tensors, local_sums(tensors))


class Odd(nn.Module):
    """Parameters of all dimensions, one with fewer rows than ranks, one of several blocks."""

    def __init__(self):
        super().__init__()
        shapes = [(), (5,), (7, 3), (3, 2, 4), (1, 6), (300, 1001)]
        self.all = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self):
        return sum(p.sum() for p in self.all)


@pytest.mark.parametrize(
    "shard_size",
    [
        pytest.param(-1, marks=pytest.mark.ranks(3)),
        *(pytest.param(-1, marks=[pytest.mark.ranks(n), pytest.mark.full]) for n in (1, 2)),
        pytest.param(2, marks=pytest.mark.ranks(4)),
    ],
)
def test_a_fingerprint_does_not_depend_on_how_a_tensor_is_sharded(shard_size):
    torch.manual_seed(0)
    model = Odd()
    expected = [[fingerprint(p.detach()) for p in model.all] if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(expected)
    [expected] = expected
    shard_model(model, build_mesh(shard_size), StrategyConfig(bf16=False))
    parameters = dict(model.named_parameters())
    assert list(now(parameters).values()) == expected
    with torch.no_grad():
        parameters["all.2"].add_(1e-7)
    changed = now(parameters)["all.2"]
    assert changed.exact != expected[2].exact and changed.as_bfloat16 == expected[2].as_bfloat16
    halves = {name: p.detach().to(torch.bfloat16) for name, p in parameters.items()}
    assert all(here.has_same_values(there) for here, there in zip(now(halves).values(), expected, strict=True))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_fingerprint_does_not_depend_on_the_dimension_that_is_split(dim):
    whole = torch.randn(5, 4, 7, generator=torch.Generator().manual_seed(0))
    split = distribute_tensor(whole, build_mesh(), [Shard(dim)])
    assert now({"x": split}) == {"x": fingerprint(whole)}
