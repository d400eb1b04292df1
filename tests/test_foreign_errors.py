"""What a directory without checkpoints of ours holds is said, also which call loads it; and what cannot be loaded."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.models import build
from helpers.reference import full_parameters
from helpers.training import assert_same, prepared, strategy_for
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fsdp2_strategy.checkpoint.find import describe_fresh_start, find_checkpoint
from fsdp2_strategy.checkpoint.foreign.parameter_ids import OwnGroup, Parameter, name_parameters
from fsdp2_strategy.checkpoint.foreign.recognise import (
    choose,
    describe_contents,
    incomplete_after,
    newest_in,
    recognise,
)
from fsdp2_strategy.checkpoint.foreign.stored_optimizer import StoredGroup, StoredOptimizer
from fsdp2_strategy.checkpoint.foreign.tensors import StoredTensor
from fsdp2_strategy.errors import CheckpointError


def on_rank_0(action):
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


@pytest.mark.ranks(2)
def test_a_directory_that_holds_something_is_no_fresh_start(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    theirs = build("llama", seed=5)
    on_rank_0(lambda: theirs.save_pretrained(tmp_path / "hub"))
    with pytest.raises(
        CheckpointError, match=r"it is a Hugging Face folder with 21 weights.*load_optimizer_states=False"
    ):
        strategy.load_ckpt(model, tmp_path / "hub")
    strategy.load_ckpt(model, tmp_path / "hub", load_module_only=True)
    assert_same(full_parameters(model), {name: p.detach() for name, p in theirs.named_parameters()})
    assert strategy.load_ckpt(model, tmp_path) == (None, {}), "an export next to the checkpoints is none of the run's"
    on_rank_0(lambda: touch(tmp_path, "unknown/weights.pth.tar", "unknown/model-00001.gguf"))
    with pytest.raises(CheckpointError, match=r"holds files that look like weights \(model-00001.gguf\), of no known"):
        strategy.load_ckpt(model, tmp_path / "unknown")
    on_rank_0(lambda: touch(tmp_path, "deepspeed/zero_to_fp32.py", "deepspeed/global_step3/mp_rank_00_model_states.pt"))
    with pytest.raises(CheckpointError, match=r"holds a checkpoint of DeepSpeed.*zero_to_fp32.py, and load the result"):
        strategy.load_ckpt(model, tmp_path / "deepspeed")


def test_what_a_run_has_before_its_first_save_is_a_fresh_start(tmp_path):
    touch(tmp_path, "metrics.jsonl", "events.out.tfevents.1", "wandb/run.log", "config.yaml", "train.bin", "README.md")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 0}')
    touch(tmp_path, "training_args.bin", "profile/rank0.pt.trace.json", "tokenizer/vocab.json")
    touch(tmp_path, "eval/results.pt", "logs/rng_state.pth", "latest")
    assert describe_contents(tmp_path) is None
    assert describe_contents(tmp_path / "missing") is None
    touch(tmp_path, "step-100/.metadata", "step-20/.metadata")
    assert newest_in(tmp_path).path == tmp_path / "step-100"
    assert "holds a checkpoint of torchtitan in step-100. Load it with load_ckpt(" in describe_contents(tmp_path)


def save(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix:
            torch.save({"model": {"weight": torch.ones(2)}}, path)
        else:
            touch(path, ".metadata")


def found_in(path, tag=None):
    return find_checkpoint(path, tag, fallback=False, trust=True)[1]


@pytest.mark.parametrize(
    "name",
    ["snapshot.pt", "checkpoint.pth.tar", "run.pth", "my_run.pt", "llama-1b.pt", "3.pt", "e1s3", "model", "rank0.pt"],
)
def test_a_checkpoint_is_found_whatever_its_name(tmp_path, name):
    tmp_path /= "run"  # the names of the tests' own folders have words that count
    save(tmp_path, name)
    foreign = found_in(tmp_path)
    assert tmp_path in (foreign.path, foreign.path.parent) and foreign == recognise(foreign.path)
    assert choose(tmp_path, any_name=True) == foreign, "the command line finds the same"
    # Without trust, a file of torch.save is none unless its name says so: a run may keep statistics there.
    if "." in name and not name.startswith("checkpoint"):
        assert find_checkpoint(tmp_path, None, fallback=False, trust=False) == ([], None)
        message, level = describe_fresh_start(tmp_path, trust=False)
        assert message.endswith(f"which contains {name}") and level == logging.WARNING


@pytest.mark.parametrize(
    ("names", "newest"),
    [
        (["step-3", "step-20"], "step-20"),
        (["step_3.pt", "last.pt"], "last.pt"),
        (["epoch_0.pt", "epoch_10.pt", "epoch_9.pt"], "epoch_10.pt"),
        (["checkpoint_9", "checkpoint_10"], "checkpoint_10"),
        (["3.pt", "12.pt"], "12.pt"),
        (["epoch=0-step=2.ckpt", "epoch=0-step=2.end.ckpt"], "epoch=0-step=2.end.ckpt"),
        (["runA", "runB"], None),
        (["exp1", "exp2"], None),
        (["step-3", "final"], None),
        (["runA-step-5", "runB-step-5"], None),
        (["a.pt", "b.pt"], None),
        (["last.pt", "latest.pt"], None),
    ],
)
def test_the_newest_is_loaded_where_names_tell_and_else_none(tmp_path, names, newest):
    save(tmp_path, *names)
    if newest is not None:
        assert found_in(tmp_path).path.name == newest
    else:
        with pytest.raises(CheckpointError, match=r"cannot choose .*names do not tell which is the newest") as error:
            found_in(tmp_path)
        assert all(name in str(error.value) for name in names)


def test_files_of_ranks_are_one_checkpoint(tmp_path):
    save(tmp_path, "rank0.pt", "rank1.pt")
    assert found_in(tmp_path).kind == "a checkpoint with one file of torch.save per rank"
    (tmp_path / "rank0.pt").rename(tmp_path / "rank3.pt")
    with pytest.raises(CheckpointError, match="cannot choose"):
        found_in(tmp_path)


def test_a_path_that_misses_a_checkpoint_is_an_error(tmp_path):
    save(tmp_path / "dump/checkpoint", "step-3", "step-5")
    (tmp_path / "dump/notes.txt").write_text("")
    for path in (tmp_path / "dump", tmp_path):
        with pytest.raises(
            CheckpointError, match=r"there are checkpoints of other systems in .*dump/checkpoint\. Pass"
        ):
            found_in(path)
    for path in (tmp_path / "dump/checkpoint/step-7", tmp_path / "dump/ckpt9.pt"):
        with pytest.raises(CheckpointError, match=r"does not exist, expected the checkpoint that its name means"):
            found_in(path)
    with pytest.raises(CheckpointError, match=r"notes.txt is a file, expected a directory"):
        found_in(tmp_path / "dump/notes.txt")
    with pytest.raises(CheckpointError, match=r"'step-7' is not .* expected one of \['step-3', 'step-5'\]"):
        found_in(tmp_path / "dump/checkpoint", "step-7")
    assert found_in(tmp_path / "sft-step2") is None, "the directory of a run that has not begun"
    touch(tmp_path, "dump/checkpoint/step-9/__0_0.distcp")
    assert incomplete_after(tmp_path / "dump/checkpoint", found_in(tmp_path / "dump/checkpoint")) == ["step-9"]


@pytest.mark.ranks(2)
def test_an_error_says_what_the_checkpoint_is_and_what_it_lacks(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    dcp.save({**get_model_state_dict(model), "train_state": {"step": 4}}, checkpoint_id=tmp_path / "step-4")
    text = r"cannot load the optimizer from .*step-4: it is a checkpoint of torchtitan with 21 weights \(step 4\)"
    with pytest.raises(CheckpointError, match=text):
        strategy.load_ckpt(model, tmp_path, trust=True)
    strategy.load_ckpt(model, tmp_path, trust=True, load_optimizer_states=False)
    assert strategy.global_step(model) == 4
    other = strategy.prepare_model(build("mlp"))
    with pytest.raises(CheckpointError, match=r"its weights are 21 names \(.*\), expected 9 names"):
        strategy.load_ckpt(other, tmp_path, trust=True, load_optimizer_states=False)
    on_rank_0(lambda: torch.save({"value": 1}, tmp_path / "empty.pt"))
    with pytest.raises(CheckpointError, match=r"a file of torch.save with 0 weights .*it has no weights, expected"):
        strategy.load_ckpt(model, tmp_path / "empty.pt", trust=True, load_module_only=True)
    on_rank_0(lambda: touch(tmp_path, "ranks/model_world_size_3_rank_0.pt", "ranks/model_world_size_3_rank_2.pt"))
    with pytest.raises(CheckpointError, match=r"it lacks 1 of 3 files of ranks \(model_world_size_3_rank_1.pt\)"):
        strategy.load_ckpt(model, tmp_path / "ranks", trust=True)
    flat = {"layers.0._flat_param": torch.zeros(4)}
    on_rank_0(lambda: torch.save(flat, tmp_path / "flat.pt"))
    with pytest.raises(CheckpointError, match=r"it has FSDP1's flattened parameters"):
        strategy.load_ckpt(model, tmp_path / "flat.pt", trust=True, load_module_only=True)


# --- names of numbered parameters ------------------------------------------------------------------------------------


def numbered(*groups, decay=(0.1, 0.0)):
    """Return an optimizer whose groups have parameters of these shapes, without names."""
    state, found, begin = {}, [], 0
    for shapes, weight_decay in zip(groups, decay, strict=False):
        ids = tuple(range(begin, begin + len(shapes)))
        begin += len(shapes)
        state |= {i: {"exp_avg": StoredTensor(s, torch.float32)} for i, s in zip(ids, shapes, strict=True) if s}
        found.append(StoredGroup(ids, {"weight_decay": weight_decay}))
    return StoredOptimizer(state, tuple(found))


PARAMETERS = [
    Parameter("norm.weight", (4,)),
    Parameter("first.weight", (4, 3)),
    Parameter("first.bias", (4,)),
    Parameter("second.weight", (4, 3)),
    Parameter("second.scale", (4,)),
]


def names_of(optimizer, tmp_path, **options):
    return [list(group.params) for group in name_parameters(optimizer, PARAMETERS, tmp_path, **options).groups]


def test_the_order_of_the_model_and_the_shapes_name_numbered_parameters(tmp_path):
    every = [p.name for p in PARAMETERS]
    assert names_of(numbered([p.shape for p in PARAMETERS]), tmp_path) == [every]
    matrices, others = ["first.weight", "second.weight"], ["norm.weight", "first.bias", "second.scale"]
    assert names_of(numbered([(4, 3)] * 2, [(4,)] * 3), tmp_path) == [matrices, others]
    assert names_of(numbered([(4,)] * 3, [(4, 3)] * 2), tmp_path) == [others, matrices]
    # As the Trainer groups them: a scale decays, and no shape tells it from a bias.
    of_trainer = numbered([(4, 3), (4, 3), (4,)], [(4,)] * 2)
    assert names_of(of_trainer, tmp_path) == [[*matrices, "second.scale"], ["norm.weight", "first.bias"]]


def test_the_groups_of_the_optimizer_decide_and_ambiguity_is_an_error(tmp_path):
    stored = numbered([(4,), (4, 3), (4,)], [(4, 3), (4,)])
    with pytest.raises(CheckpointError, match=r"in groups of 3, 2, and their shapes are not|can be in more than one"):
        names_of(numbered([(4,), (4,), (4, 3)], [(4, 3), (4,)]), tmp_path)
    own = [
        OwnGroup(frozenset({"second.weight", "second.scale"}), {"weight_decay": 0.1}),
        OwnGroup(frozenset({"norm.weight", "first.weight", "first.bias"}), {"weight_decay": 0.0}),
    ]
    expected = [["norm.weight", "first.weight", "first.bias"], ["second.weight", "second.scale"]]
    assert names_of(stored, tmp_path, own_groups=own) == expected
    with pytest.raises(CheckpointError, match=r"it numbers 4 parameters without names, expected the model's 5"):
        names_of(numbered([(4,), (4, 3), (4,), (4, 3)]), tmp_path)
    unclear = [Parameter("a.weight", (4,)), Parameter("a.bias", (4,)), Parameter("norm.weight", (4,)), PARAMETERS[1]]
    with pytest.raises(CheckpointError, match=r"can be in more than one of them"):
        name_parameters(numbered([(4,), (4,)], [(4,), (4, 3)]), [*unclear[:3], unclear[3]], tmp_path)


def test_json_that_is_damaged_is_named(tmp_path):
    touch(tmp_path, "weights.pt")
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*meta.json: .*, expected JSON"):
        newest_in(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({"global_step": 4}))
    assert newest_in(tmp_path).step == 4
