"""What a directory without checkpoints of ours holds is said, also which call loads it; and what cannot be loaded."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.foreign import Program, decay
from helpers.logs import recorded
from helpers.models import build
from helpers.reference import full_parameters
from helpers.training import assert_same, prepared, strategy_for
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fsdp2_strategy.checkpoint.find import describe_fresh_start, find_checkpoint
from fsdp2_strategy.checkpoint.foreign import recognise as recognising
from fsdp2_strategy.checkpoint.foreign.contents import read_contents
from fsdp2_strategy.checkpoint.foreign.parameter_ids import OwnGroup, Parameter, name_parameters, named_optimizer
from fsdp2_strategy.checkpoint.foreign.recognise import (
    choose,
    describe_contents,
    incomplete_after,
    newest_in,
    recognise,
)
from fsdp2_strategy.checkpoint.foreign.stored_optimizer import StoredGroup, StoredOptimizer
from fsdp2_strategy.checkpoint.foreign.tensors import StoredTensor, read_into
from fsdp2_strategy.cli import main
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
    with pytest.raises(CheckpointError, match=r"can be in more than one of them"):
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
    with pytest.raises(CheckpointError, match=r"in 12 groups, and .* can be in more than one of them"):
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


# --- the parts of a checkpoint ---------------------------------------------------------------------------------------


def contents_of(tmp_path, state, **options):
    torch.save(state, tmp_path / "ckpt.pt")
    return read_contents(newest_in(tmp_path / "ckpt.pt"), **options)


def moments(name, value=1.0):
    return {f"{name}.exp_avg": torch.full((4, 4), value), f"{name}.step": torch.tensor(3.0)}


WEIGHTS = {"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4)}
MODEL = {f"model.{name}": value for name, value in WEIGHTS.items()}
STATE = moments("state.a.weight") | moments("state.b.weight", 2.0)
IDS = moments("state.0") | moments("state.1", 2.0)
RATES = {"param_groups.a.weight.lr": 0.1, "param_groups.b.weight.lr": 0.2}
BY_NUMBER = {"param_groups.0.lr": 0.1, "param_groups.0.params": [0, 1]}
LAYOUTS = {
    "prefix": MODEL | {f"optimizer.{key}": value for key, value in (STATE | RATES).items()},
    "prefix_below": {f"app.{k}": v for k, v in (MODEL | {f"optim.{key}": v for key, v in STATE.items()}).items()},
    "below_a_dictionary": {"state": MODEL | {f"optimizers.0.{key}": value for key, value in (STATE | RATES).items()}},
    "weights_without_prefix": WEIGHTS | {f"optimizer.{key}": value for key, value in (STATE | RATES).items()},
    "ids": MODEL | {f"optimizer.{key}": value for key, value in (IDS | BY_NUMBER).items()},
    "ids_of_one_group": MODEL
    | {f"optimizer.{key}": value for key, value in (IDS | {"param_groups.0.lr": 0.1}).items()},
    "flat_params": MODEL
    | {f"optimizer.{k}": v for k, v in (IDS | {"param_groups.0.lr": 0.1}).items()}
    | {"optimizer.param_groups.0.params.0": 0, "optimizer.param_groups.0.params.1": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wanted", [(), tuple(WEIGHTS)], ids=["convert", "load"])
def test_flat_keys_have_the_parts_of_nested_ones(tmp_path, layout, wanted):
    contents = contents_of(tmp_path, {**LAYOUTS[layout], "train.step": 3, "sched.last_epoch": 3}, wanted=wanted)
    assert contents.weights.keys() == WEIGHTS.keys()
    assert (contents.step, contents.position, contents.others) == (3, 3, ())
    optimizer = named_optimizer(contents)
    assert optimizer.state.keys() == WEIGHTS.keys()
    assert all(state.keys() == {"exp_avg", "step"} for state in optimizer.state.values())
    read = torch.empty(4, 4)
    read_into([(optimizer.state["b.weight"]["exp_avg"], read)], no_dist=True)
    assert (read == 2).all()
    if layout != "prefix_below":
        assert optimizer.settings_by_name()["a.weight"]["lr"] == 0.1


def test_several_flat_optimizers_number_parameters_in_the_order_of_the_file(tmp_path):
    state = {f"optimizers.{i}.{key}": value for i in range(12) for key, value in moments("state.0", float(i)).items()}
    state |= {f"optimizers.{i}.param_groups.0.lr": 0.1 for i in range(12)}
    weights = {f"model.{i}": torch.ones(4, 4) for i in range(12)}
    contents = contents_of(tmp_path, {**weights, **state})
    read = torch.empty(4, 4)
    for number in range(12):
        read_into([(contents.optimizer.state[number]["exp_avg"], read)], no_dist=True)
        assert (read == number).all()


def test_what_is_no_part_is_named_and_never_a_weight(tmp_path):
    unknown = {f"optimizer.{key}": value for key, value in moments("a.weight").items()}
    contents = contents_of(tmp_path, {**MODEL, **unknown, "b.weight.momentum_buffer": torch.ones(4, 4)}, wanted=WEIGHTS)
    assert contents.weights.keys() == WEIGHTS.keys()
    assert contents.others == ("optimizer.a.weight.exp_avg", "b.weight.momentum_buffer")
    contents = contents_of(tmp_path, {**MODEL, **unknown})
    assert not any("exp_avg" in name for name in contents.weights)
    assert contents.others == ("optimizer.a.weight.exp_avg",)
    with_slashes = {name.replace(".", "/"): value for name, value in {**MODEL, **unknown}.items()}
    assert contents_of(tmp_path, with_slashes).others == ("optimizer/a/weight/exp_avg",)
    averages = {f"ema.{name}": torch.zeros(4, 4) for name in WEIGHTS}
    contents = contents_of(tmp_path, {**averages, **MODEL}, wanted=WEIGHTS)
    assert all(tensor.parts[0][1].all() for tensor in contents.weights.values()), "the averages are not the weights"
    assert contents.others == tuple(averages)
    with pytest.raises(CheckpointError, match=r"the groups 0, 1 of optimizer have no params, expected the names"):
        contents_of(
            tmp_path,
            MODEL
            | {f"optimizer.{k}": v for k, v in STATE.items()}
            | {"optimizer.param_groups.0.lr": 0.1, "optimizer.param_groups.1.lr": 0.2},
        )


def test_a_buffer_among_the_weights_has_no_number(tmp_path):
    state = {number: {"exp_avg": torch.full((4, 4), float(number))} for number in range(2)}
    optimizer = {"state": state, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    for buffer, name in ((torch.zeros(3), "counts"), (torch.zeros(4, 4), "a.running_mean"), (torch.ones(1), "scale")):
        weights = {"a.weight": WEIGHTS["a.weight"], name: buffer, "b.weight": WEIGHTS["b.weight"]}
        contents = contents_of(tmp_path, {"model": weights, "optimizer": optimizer})
        assert [str(key) for key in named_optimizer(contents).state] == list(WEIGHTS)
    contents = contents_of(tmp_path, {"model": {**WEIGHTS, "c": torch.zeros(4, 4)}, "optimizer": optimizer})
    with pytest.raises(
        CheckpointError, match=r"cannot convert .*some, such as b.weight, c, can be in .*Load it with your p"
    ):
        named_optimizer(contents)


@pytest.mark.parametrize(("last_epoch", "position"), [(6, 3), (7, 7)])
def test_the_schedule_of_accelerate_takes_a_step_for_each_process(tmp_path, last_epoch, position):
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    torch.save({"last_epoch": last_epoch, "base_lrs": [0.1], "_last_lr": [0.1]}, tmp_path / "scheduler.bin")
    touch(tmp_path, "random_states_0.pkl", "random_states_1.pkl")
    contents = read_contents(newest_in(tmp_path))
    assert (contents.step, contents.position) == (position, position)


def test_the_values_in_files_per_rank_are_those_of_the_trainer(tmp_path):
    for rank in range(2):
        torch.save({"model": WEIGHTS, "step": 3, "config": {"width": 4}}, tmp_path / f"model_rank{rank}.pt")
    assert read_contents(newest_in(tmp_path)).client_state == {"step": 3, "config": {"width": 4}}


# --- loads that restore less, or something else ----------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_names_that_differ_are_reported_and_no_common_name_is_an_error(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    state = {name: p.detach().clone() for name, p in build("llama", seed=5).named_parameters()}
    first, *others = state
    on_rank_0(lambda: torch.save({"further": torch.ones(3), **{n: state[n] for n in others}}, tmp_path / "some.pt"))
    options = {"trust": True, "load_module_only": True, "load_module_strict": False}
    with recorded() as lines:
        strategy.load_ckpt(model, tmp_path / "some.pt", **options)
    if dist.get_rank() == 0:
        assert f"not in the checkpoint: 1 name ({first})" in lines and "not in the model: 1 name (further)" in lines
    on_rank_0(lambda: torch.save({f"x{n}": value for n, value in state.items()}, tmp_path / "none.pt"))
    on_rank_0(lambda: save_file({f"x{n}": value for n, value in state.items()}, tmp_path / "none.safetensors"))
    for name in ("none.pt", "none.safetensors"):
        with pytest.raises(CheckpointError, match=r"its weights are 21 names .*, expected 21 names .*Build the model"):
            strategy.load_ckpt(model, tmp_path / name, **options)


@pytest.mark.full
@pytest.mark.ranks(1)
@pytest.mark.parametrize("in_own_state", [True, False])
def test_a_schedule_with_other_learning_rates_than_the_saved_ones_is_a_warning(tmp_path, in_own_state):
    program = Program(build("llama"))
    program.train(range(2))
    state = {"model": program.model.state_dict(), "optimizer": program.optimizer.state_dict(), "step": 2}
    torch.save(state | ({"scheduler": program.scheduler.state_dict()} if in_own_state else {}), tmp_path / "ckpt.pt")
    strategy = strategy_for()
    model = strategy.prepare_model(build("llama", seed=1), is_training=True)
    for schedule, is_other in ((decay, False), (lambda step: 1 - step / 10, True)):
        optimizer = strategy.create_optimizer(model, lr=0.5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        with recorded() as lines:
            strategy.load_ckpt(model, tmp_path, optimizer=optimizer, scheduler=scheduler, trust=True)
        own = "the schedule gives the learning rate 0.008 at step 2, where the saved optimizer had 0.00333333"
        assert [line.startswith(own) for line in lines if line.startswith("the schedule gives")] == [True] * is_other


# --- damaged files ---------------------------------------------------------------------------------------------------


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(path):
    content = bytearray(path.read_bytes())
    content[40:400:7] = bytes(byte ^ 0x55 for byte in content[40:400:7])
    path.write_bytes(content)


DAMAGES = {"missing": Path.unlink, "truncated": truncate, "bytes are corrupt": change}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dcp/__0_0.distcp", "missing"),
        *(
            (name, reason)
            for name in ("dcp/.metadata", "dcp/__0_0.distcp", "pickle/optimizer.pt", "pickle/model.pt")
            for reason in ("truncated", "bytes are corrupt")
        ),
    ],
)
def test_a_damaged_file_is_named_and_a_conversion_leaves_nothing(tmp_path, capsys, name, reason):
    optimizer = {"state": {"a.weight": {"exp_avg": torch.ones(4, 4)}}, "param_groups": [{"params": ["a.weight"]}]}
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": WEIGHTS, "optimizer": optimizer}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "pickle").mkdir()
    torch.save(WEIGHTS, tmp_path / "pickle/model.pt")
    torch.save(optimizer, tmp_path / "pickle/optimizer.pt")
    DAMAGES[reason](tmp_path / name)
    source, target = tmp_path / Path(name).parent, tmp_path / "new" / "out"
    assert main(["convert", "--trust", "-q", str(source), str(target)]) == 2
    error = capsys.readouterr().err
    assert f"cannot read {tmp_path / name}: it" in error and "Copy the checkpoint again" in error
    assert reason in error or name.endswith(".metadata")
    assert not target.parent.exists()


@pytest.mark.ranks(2)
def test_a_load_names_the_damaged_file_of_any_rank(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "run")
    on_rank_0((tmp_path / "run/__1_0.distcp").unlink)
    with pytest.raises(
        CheckpointError, match=r"cannot read .*run/__1_0.distcp: it is missing, expected .*Copy the che"
    ):
        strategy.load_ckpt(model, tmp_path / "run", trust=True, load_module_only=True)
    on_rank_0(lambda: torch.save(build("llama").state_dict(), tmp_path / "ckpt.pt"))
    on_rank_0(lambda: truncate(tmp_path / "ckpt.pt"))
    with pytest.raises(
        CheckpointError, match=r"cannot read .*ckpt.pt: it is truncated, expected .*Copy the checkpoint"
    ):
        strategy.load_ckpt(model, tmp_path / "ckpt.pt", trust=True, load_module_only=True)


def test_a_neighbour_that_lacks_files_or_cannot_be_read_does_not_stop_a_fresh_start(tmp_path, monkeypatch):
    touch(tmp_path, "runs/old/model_world_size_2_rank_0.pt", "runs/new/notes/a.txt")
    assert found_in(tmp_path / "runs/next-step5") is None
    assert found_in(tmp_path) is None

    def names_in(path, original=recognising.names_in):
        if path.name == "old":
            raise CheckpointError(f"{path} cannot be read")
        return original(path)

    monkeypatch.setattr(recognising, "names_in", names_in)
    assert found_in(tmp_path / "runs/next-step5") is None and found_in(tmp_path) is None
