"""What a directory without checkpoints of ours holds is said, also which call loads it; and what cannot be loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.models import build
from helpers.reference import full_parameters
from helpers.training import assert_same, prepared, strategy_for
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fsdp2_strategy.checkpoint.foreign.parameter_ids import OwnGroup, Parameter, name_parameters
from fsdp2_strategy.checkpoint.foreign.recognise import describe_contents, newest_in
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


def names_of(optimizer, parameters=PARAMETERS, own_groups=None):
    return [list(group.params) for group in name_parameters(optimizer, parameters, Path("run"), own_groups).groups]


def test_the_order_of_the_model_and_the_shapes_name_numbered_parameters():
    every = [p.name for p in PARAMETERS]
    assert names_of(numbered([p.shape for p in PARAMETERS])) == [every]
    matrices, others = ["first.weight", "second.weight"], ["norm.weight", "first.bias", "second.scale"]
    assert names_of(numbered([(4, 3)] * 2, [(4,)] * 3)) == [matrices, others]
    assert names_of(numbered([(4,)] * 3, [(4, 3)] * 2)) == [others, matrices]
    # As the Trainer groups them: a scale decays, and no shape tells it from a bias.
    of_trainer = numbered([(4, 3), (4, 3), (4,)], [(4,)] * 2)
    assert names_of(of_trainer) == [[*matrices, "second.scale"], ["norm.weight", "first.bias"]]
    # Without a program, the weights of a checkpoint can be more than the parameters.
    assert names_of(numbered([(4, 3), (4,), (4, 3)])) == [["first.weight", "first.bias", "second.weight"]]
    with pytest.raises(CheckpointError, match=r"can be more than one of them"):
        names_of(numbered([(4, 3), (4,)]))


EQUAL = [Parameter(f"layers.{number}.weight", (4, 4)) for number in range(3)]
NAMES = [p.name for p in EQUAL]


def groups_of(*names, rates=()):
    settings = [{"lr": rate} for rate in rates] or [{"weight_decay": 0.1}, {"weight_decay": 0.0}]
    return [OwnGroup(tuple(own), each) for own, each in zip(names, settings, strict=False)]


def with_rates(optimizer, *rates):
    groups = [StoredGroup(g.params, {"lr": rate}) for g, rate in zip(optimizer.groups, rates, strict=True)]
    return StoredOptimizer(optimizer.state, tuple(groups))


def test_the_same_groups_in_the_optimizer_give_the_names_in_their_order():
    assert names_of(numbered([(4, 4)] * 3), EQUAL, groups_of(NAMES[::-1])) == [NAMES[::-1]]
    last_first = with_rates(numbered([(4, 4)], [(4, 4)], [(4, 4)], decay=(0, 0, 0)), 4.0, 2.0, 1.0)
    own = [[name] for name in NAMES[::-1]]
    assert names_of(last_first, EQUAL, groups_of(*own, rates=(4.0, 2.0, 1.0))) == own
    assert names_of(last_first, EQUAL, groups_of(*own, rates=(0.4, 0.2, 0.1))) == own
    with pytest.raises(CheckpointError, match=r"the learning rates and weight decays in another order"):
        names_of(last_first, EQUAL, groups_of(*own[::-1], rates=(1.0, 2.0, 4.0)))
    # In another order, sizes, shapes and hyper-parameters tell the groups apart.
    stored = numbered([(4,), (4, 3), (4,)], [(4, 3), (4,)])
    own = [["second.weight", "second.scale"], ["norm.weight", "first.weight", "first.bias"]]
    assert names_of(stored, own_groups=groups_of(*own)) == own[::-1]
    # A frozen parameter that only the optimizers have is one of its groups.
    assert names_of(numbered([(4, 4)] * 2), EQUAL, groups_of(NAMES[1:])) == [NAMES[1:]]


@pytest.mark.parametrize("own_groups", [None, groups_of(NAMES)], ids=["convert", "load"])
def test_names_that_are_ambiguous_are_an_error_that_says_what_helps(own_groups):
    advice = r"cannot convert .*Load it with your program and its optimizer"
    if own_groups:
        advice = r"cannot load .*Create the optimizer with the saved program's groups, in its order, and pass it"
    with pytest.raises(CheckpointError, match=advice):
        names_of(numbered([(4, 4)], [(4, 4)] * 2), EQUAL, own_groups)
    with pytest.raises(CheckpointError, match=r"in 12 groups, and .* can be more than one of them"):
        every = [Parameter(f"{number}", (4, 4)) for number in range(48)]
        names_of(numbered(*[[(4, 4)] * 4] * 12, decay=(0.1,) * 12), every, own_groups)
    with pytest.raises(CheckpointError, match=r"it numbers 4 parameters without names, expected"):
        names_of(numbered([(4, 4)] * 4), EQUAL, own_groups)
    with pytest.raises(
        CheckpointError, match=r"in groups of 3, and their shapes are not those of the model in its ord"
    ):
        names_of(numbered([(4, 4), (4,), (4, 4)]), EQUAL, own_groups)


def test_json_that_is_damaged_is_named(tmp_path):
    touch(tmp_path, "weights.pt")
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*meta.json: .*, expected JSON"):
        newest_in(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({"global_step": 4}))
    assert newest_in(tmp_path).step == 4
