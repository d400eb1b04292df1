"""LeRobot's layout of a checkpoint: what others open, what a run goes on from, and the promises of any checkpoint."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.crashes import dies_at, kill_within_a_save, removals_at_once
from helpers.models import build
from helpers.reference import full, full_parameters
from helpers.training import assert_same, full_state, strategy_for, tags, take_steps
from helpers.worlds import some
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import fsdp2_strategy.checkpoint.save as saving
from fsdp2_strategy import EMA, FSDPV2Strategy, list_checkpoints, save_checkpoint, sizes, verify_checkpoint
from fsdp2_strategy.cli import main
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.errors import CheckpointError, ConfigError
from fsdp2_strategy.integrations.lerobot import LeRobotLayout, save_policy
from fsdp2_strategy.storage import shares


@dataclass
class PolicyConfig:
    type: str = "tiny"
    hidden: int = 16

    def save_pretrained(self, folder):
        (Path(folder) / "config.json").write_text(json.dumps({"type": self.type, "hidden": self.hidden}))


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm, self.inward, self.outward = nn.LayerNorm(hidden), nn.Linear(hidden, 24), nn.Linear(24, hidden)

    def forward(self, x):
        return x + self.outward(torch.nn.functional.gelu(self.inward(self.norm(x))))


class TinyPolicy(nn.Module):
    """In LeRobot's manner, with tied weights and both kinds of buffers."""

    name = "tiny"
    config_class = PolicyConfig
    _fsdp_wrap_modules = ("Block",)
    calls = ()

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(11, config.hidden)
        self.model = nn.Sequential(*(Block(config.hidden) for _ in range(2)))
        self.head = nn.Linear(config.hidden, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.rand(config.hidden))
        self.register_buffer("angles", torch.rand(3), persistent=False)

    def forward(self, batch):
        x = self.embed(batch["state"])
        logits = self.head(self.model(x + self.mean.to(x.dtype))).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["action"].flatten()), {}

    def save_pretrained(self, folder, *, state_dict=None):
        TinyPolicy.calls += ({name: type(tensor) for name, tensor in state_dict.items()},)
        self.config.save_pretrained(folder)
        tied = {name: tensor for name, tensor in state_dict.items() if name != "head.weight"}
        save_file(tied, Path(folder) / "model.safetensors", {"format": "pt"})
        (Path(folder) / "README.md").write_text("its own")
        (Path(folder) / "config.json").write_text(json.dumps({"hidden": self.config.hidden}))


class Pipeline:
    def __init__(self, name):
        self.name, self.mean = name, torch.zeros(3)

    def save_pretrained(self, folder):
        (Path(folder) / f"{self.name}.json").write_text(json.dumps({"steps": [self.name]}))
        save_file({"mean": self.mean}, Path(folder) / f"{self.name}_step_0_normalizer.safetensors")


def layout_of(**options):
    given = {"total_steps": 100_000, "batch_size": 8, "train_config": {"seed": 1000}}
    pipelines = {"preprocessor": Pipeline("policy_preprocessor"), "postprocessor": Pipeline("policy_postprocessor")}
    return LeRobotLayout(**given | pipelines | options)


def start(seed=0, *, policy=None, shard_size=-1, **config):
    strategy = strategy_for(**config)
    torch.manual_seed(seed)
    policy = strategy.prepare_model(policy or TinyPolicy(PolicyConfig()), is_training=True, shard_size=shard_size)
    optimizer = strategy.create_optimizer(policy, lr=1e-2)
    strategy.create_scheduler(optimizer, "cosine", num_training_steps=20)
    return strategy, policy, optimizer


def train(strategy, policy, optimizer, steps):
    """Take steps on a batch that every rank has, so that the number of ranks does not matter."""

    def loss_at(step):
        generator = torch.Generator().manual_seed(step)
        batch = {name: torch.randint(0, 11, (2, 4), generator=generator) for name in ("state", "action")}
        return policy(batch)[0]

    return take_steps(strategy, policy, optimizer, map(loss_at, steps), strategy._state_of(policy).scheduler)


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.ranks(2)
def test_a_layout_takes_what_it_is_not_given_from_the_strategy(tmp_path):
    strategy, policy, optimizer = start(micro_train_batch_size=3, gradient_accumulation_steps=2)
    train(strategy, policy, optimizer, range(2))
    for name, given, expected in (
        ("filled", {}, (3, 2, 2)),
        ("given", {"batch_size": 5, "gradient_accumulation_steps": 4}, (5, 4, 4)),
    ):
        strategy.save_ckpt(policy, tmp_path / name, layout=LeRobotLayout(total_steps=9, **given))
        found = json.loads((tmp_path / name / "last/training_state/training_step.json").read_text())
        assert (found["batch_size"], found["grad_accum_steps"], found["step"]) == expected
    with pytest.raises(CheckpointError, match="batch_size of LeRobotLayout is None, expected the samples of one"):
        save_checkpoint(policy, tmp_path / "free", step=1, optimizer=optimizer, layout=LeRobotLayout(total_steps=9))


BESIDE = [
    "config.json",
    "policy_postprocessor.json",
    "policy_postprocessor_step_0_normalizer.safetensors",
    "policy_preprocessor.json",
    "policy_preprocessor_step_0_normalizer.safetensors",
    "train_config.json",
]
STATE = [
    "checksums/rank00000.json",
    "checksums/rank00001.json",
    "manifest.json",
    "optimizer/optimizer.safetensors",
    "rng/rank00000.safetensors",
    "rng/rank00001.safetensors",
    "trainer_state.json",
    "training_step.json",
]


# --- what is on disk -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_the_layout_is_lerobots_to_the_file_and_its_weights_load_strictly(tmp_path):
    run = start()
    train(*run, range(3))
    path = Path(run[0].save_ckpt(run[1], tmp_path, layout=layout_of()))
    assert path == tmp_path / "000003"
    dist.barrier()
    assert sorted(entry.name for entry in path.iterdir()) == ["pretrained_model", "training_state"]
    assert files_in(path / "pretrained_model") == sorted([*BESIDE, "model.safetensors"])
    assert files_in(path / "training_state") == STATE
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".lock", "000003", "last"]
    assert (tmp_path / "last").is_symlink() and (tmp_path / "last").readlink() == Path("000003")
    told = json.loads((path / "training_state" / "training_step.json").read_text())
    assert told == {
        "step": 3,
        "num_processes": 2,
        "dp_world_size": 2,
        "batch_size": 8,
        "grad_accum_steps": 1,
        "parallelism": {"dp_replicate": 1, "dp_shard": 2, "ring_degree": 1, "ulysses_degree": 1},
    }
    assert json.loads((path / "pretrained_model" / "train_config.json").read_text()) == {"seed": 1000}
    assert json.loads((path / "pretrained_model" / "config.json").read_text()) == {"type": "tiny", "hidden": 16}
    torch.manual_seed(1)
    robot = TinyPolicy(PolicyConfig())
    load_model(robot, path / "pretrained_model" / "model.safetensors", strict=True)
    assert robot.head.weight is robot.embed.weight
    assert_same(dict(robot.named_parameters()), full_parameters(run[1]))
    assert torch.equal(robot.mean, run[1].mean)
    assert "angles" not in load_file(path / "pretrained_model" / "model.safetensors")


@pytest.mark.parametrize(("total", "step", "name"), [(100, 5, "000005"), (30_000_000, 5, "00000005")])
def test_names_have_the_digits_of_the_last_step_and_six_at_least(total, step, name):
    assert LeRobotLayout(total_steps=total, batch_size=1).tag(step) == name


def never(tensor):
    raise AssertionError("every rank holds a whole tensor")


@pytest.mark.ranks(2)
def test_weights_are_one_file_whatever_their_size_and_no_rank_gathers(tmp_path):
    strategy, model, _ = start(policy=build("llama_tied"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sizes, "FILE_BYTES", 1000)
        patched.setattr(DTensor, "full_tensor", never)
        patched.setattr(shares, "full_tensor_of", never)
        ours = Path(strategy.save_ckpt(model, tmp_path / "ours"))
        path = Path(strategy.save_ckpt(model, tmp_path / "lerobot", layout=layout_of()))
    dist.barrier()
    assert len(list((ours / "model").glob("*.safetensors"))) > 1
    assert [p.name for p in (path / "pretrained_model").glob("model*")] == ["model.safetensors"]
    size = (path / "pretrained_model" / "model.safetensors").stat().st_size
    for rank in range(2):
        listed = json.loads((path / "training_state" / "checksums" / f"rank{rank:05d}.json").read_text())
        blocks = listed["blocks"]["pretrained_model/model.safetensors"]
        assert 0.3 < sum(end - begin for begin, end, _ in blocks) / size < 0.7, "each writes its own part"
    opened = AutoModelForCausalLM.from_pretrained(path / "pretrained_model")
    assert_same(dict(opened.named_parameters()), full_parameters(model))


class Wrapped(nn.Module):
    """A policy with one transformers model inside, whose names in the file are the policy's all the same."""

    def __init__(self):
        super().__init__()
        self.backbone, self.action_head = build("llama"), nn.Linear(32, 3)


@pytest.mark.ranks(2)
def test_a_policy_around_a_transformers_model_is_one_file_under_its_own_names(tmp_path):
    strategy, policy, _ = start(policy=Wrapped())
    expected = full_parameters(policy)
    path = Path(strategy.save_ckpt(policy, tmp_path, layout=layout_of(train_config=None)))
    dist.barrier()
    assert "config.json" not in files_in(path / "pretrained_model"), "it has none"
    torch.manual_seed(1)
    robot = Wrapped()
    load_model(robot, path / "pretrained_model" / "model.safetensors", strict=True)
    assert_same(dict(robot.named_parameters()), expected)
    other = start(1, policy=Wrapped())
    other[0].load_ckpt(other[1], tmp_path)
    assert_same(full_parameters(other[1]), expected)


@pytest.mark.ranks(1)
def test_a_training_configuration_is_an_object_a_mapping_or_a_dataclass(tmp_path):
    strategy, policy, _ = start()

    class Saves:
        def save_pretrained(self, folder):
            (Path(folder) / "train_config.json").write_text('"its own"')

    def told_of(train_config):
        path = strategy.save_ckpt(policy, tmp_path, layout=layout_of(train_config=train_config))
        return json.loads((Path(path) / "pretrained_model" / "train_config.json").read_text())

    @dataclass
    class Plain:
        steps: int = 3
        where: Path = Path("x")
        inner: tuple = ({"a": None},)

    plain = {"steps": 3, "where": "x", "inner": [{"a": None}]}
    assert told_of(Saves()) == "its own"
    assert told_of(Plain()) == told_of({"steps": 3, "where": Path("x"), "inner": ({"a": None},)}) == plain
    save_policy(policy, tmp_path / "robot", train_config=Plain())
    assert json.loads((tmp_path / "robot" / "train_config.json").read_text()) == plain
    with pytest.raises(CheckpointError, match=r"train_config\['device'\] is a device"):
        strategy.save_ckpt(policy, tmp_path, layout=layout_of(train_config={"device": torch.device("cpu")}))


# --- what a run goes on from -----------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"only_trainable": True}], ids=str)
def test_a_run_resumes_to_the_bit(tmp_path, options):
    def begin(seed):
        torch.manual_seed(0)
        policy = TinyPolicy(PolicyConfig())
        policy.model[0].requires_grad_(not options)
        run = start(seed, policy=policy)
        loader = ResumableLoader(list(range(12)), 4)
        average = run[0]._ema(run[1], start(policy=TinyPolicy(PolicyConfig()))[1])
        return run, loader, average

    run, loader, average = begin(0)
    position = iter(loader)
    next(position)
    train(*run, range(2))
    saved = run[0].save_ckpt(
        run[1], tmp_path, dataloader=loader, ema=average, client_state={"a": 1}, layout=layout_of(), **options
    )
    expected, rest = train(*run, range(2, 5)), [b.tolist() for b in position]
    averages = {n: full(t).clone() for n, t in average.averages.items()}
    dist.barrier()
    assert (Path(saved) / "pretrained_model" / "model.safetensors").exists() != bool(options)
    assert (Path(saved) / "pretrained_model" / "config.json").exists()

    run, loader, average = begin(1)
    with torch.no_grad():
        for value in average.averages.values():
            value.zero_()
    path, state = run[0].load_ckpt(run[1], tmp_path / "last", dataloader=loader, ema=average)
    assert path == saved and state == {"a": 1} and run[0].global_step(run[1]) == 2
    assert [b.tolist() for b in loader] == rest
    assert_same({n: full(t) for n, t in average.averages.items()}, averages)
    assert train(*run, range(2, 5)) == expected
    assert run[0].load_ckpt(run[1], saved)[0] == run[0].load_ckpt(run[1], tmp_path)[0] == saved


def save_for_any(path):
    run = start()
    train(*run, range(2))
    run[0].save_ckpt(run[1], path, layout=layout_of())
    state = full_state(*run[1:])
    if dist.get_rank() == 0:
        torch.save(state, path / "state")


def load_on_any(path):
    run = start(1)
    run[0].load_ckpt(run[1], path)
    assert_same(full_state(*run[1:]), torch.load(path / "state"))


@pytest.mark.full
def test_another_number_of_ranks_loads_the_same_state(tmp_path, run_on):
    run_on(2, save_for_any, path=tmp_path)
    run_on(1, load_on_any, path=tmp_path)
    run_on(3, load_on_any, path=tmp_path)


# --- commits, rotation, both layouts ---------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.ranks(1)
@pytest.mark.parametrize("tag", [pytest.param(None, id="new tag"), pytest.param("000002", id="same tag")])
def test_a_crash_at_any_step_on_disk_leaves_last_loadable(tmp_path, tag):
    run = start(policy=nn.Linear(2, 2))
    strategy, policy, _ = run

    def save(saves, step, tag=None):
        strategy._state_of(policy).accumulation.steps = step
        strategy._state_of(policy).created_scheduler = None  # steps that nobody took
        strategy.save_ckpt(policy, saves, tag, client_state={"saved": step}, max_num=2, layout=layout_of())

    save(tmp_path / "before", 1)
    save(tmp_path / "before", 2)
    committed_at = None
    with removals_at_once():
        for point in itertools.count():
            saves = tmp_path / f"{point}"
            shutil.copytree(tmp_path / "before", saves, symlinks=True)
            if not dies_at(point, lambda: save(saves, 3, tag)):  # noqa: B023
                break
            named = strategy.load_ckpt(policy, saves / "last")[1]["saved"]
            newest = strategy.load_ckpt(policy, saves)[1]["saved"]
            committed_at = committed_at or (point if newest == 3 else None)
            assert newest == (3 if committed_at is not None else 2), point
            assert named in (2, newest) and named <= newest, "a link is a hint: it may be one behind"
            save(saves, 4)
            assert strategy.load_ckpt(policy, saves / "last")[1] == {"saved": 4}
            assert len(tags(saves)) == 2
            assert [p.name for p in saves.iterdir() if p.name.startswith(".")] == [".lock"], "leftovers are swept"
    assert committed_at and point > 20


def save_for_ever(folder):
    strategy = FSDPV2Strategy(bf16=False)
    policy = strategy.prepare_model(nn.Linear(1024, 1024), is_training=True)
    for step in range(1, 1_000_000):
        strategy._state_of(policy).accumulation.steps = step
        strategy.save_ckpt(policy, folder, max_num=2, layout=layout_of(), async_save=step % 2 == 0)


@pytest.mark.full
def test_a_run_that_is_killed_while_it_saves_leaves_a_last_that_is_whole(tmp_path):
    kill_within_a_save(save_for_ever, tmp_path)
    assert verify_checkpoint(tmp_path / "last").ok
    assert all(verify_checkpoint(c.path).ok for c in list_checkpoints(tmp_path))


@pytest.mark.ranks(2)
def test_rotation_keeps_the_newest_and_last_names_it(tmp_path):
    strategy, policy, _ = start(policy=nn.Linear(4, 4))
    for step in range(1, 5):
        strategy._state_of(policy).accumulation.steps = step
        strategy._state_of(policy).created_scheduler = None  # steps that nobody took
        strategy.save_ckpt(policy, tmp_path, max_num=2, save_latest=step != 4, layout=layout_of())
        dist.barrier()
    assert tags(tmp_path) == ["000003", "000004"]
    assert (tmp_path / "last").readlink() == Path("000003"), "as asked"
    strategy.save_ckpt(policy, tmp_path, "000005", max_num=1, save_latest=False, layout=layout_of())
    dist.barrier()
    assert (tmp_path / "last").readlink() == Path("000005"), "what it named is gone"


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_directory_may_hold_checkpoints_of_both_layouts(tmp_path):
    run = start()
    strategy, policy, optimizer = run
    states = {}
    for step, layout in enumerate((None, layout_of(), None, layout_of()), start=1):
        train(*run, [step])
        path = strategy.save_ckpt(policy, tmp_path, max_num=None, layout=layout)
        states[Path(path).name] = full_state(policy, optimizer)
        dist.barrier()
        pointers = {name for name in ("last", "latest") if os.path.lexists(tmp_path / name)}
        assert pointers == ({"last"} if layout else {"latest"}), "one names the newest, and none an older one"
        dist.barrier()
    assert tags(tmp_path) == list(states) == ["global_step1", "000002", "global_step3", "000004"]
    assert strategy.load_ckpt(policy, tmp_path)[0] == str(tmp_path / "000004")
    for tag, state in states.items():
        strategy.load_ckpt(policy, tmp_path, tag=tag)
        assert_same(full_state(policy, optimizer), state)
    assert all(verify_checkpoint(c.path).ok for c in list_checkpoints(tmp_path))
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "000004" / "training_state" / "optimizer" / "optimizer.safetensors").unlink()
    dist.barrier()
    assert strategy.load_ckpt(policy, tmp_path, fallback=True)[0] == str(tmp_path / "global_step3")
    strategy.save_ckpt(policy, tmp_path, "000002", max_num=2)
    dist.barrier()
    assert tags(tmp_path) == ["global_step3", "000002"] and (tmp_path / "000002" / "model").is_dir()


@pytest.mark.ranks(2)
def test_what_we_did_not_make_is_never_touched(tmp_path):
    strategy, policy, _ = start(policy=nn.Linear(4, 4))
    if dist.get_rank() == 0:
        for name in ("pretrained_model", "training_state"):
            (tmp_path / "000000" / name).mkdir(parents=True)
        (tmp_path / "000000" / "training_state" / "optimizer_param_groups.json").write_text("{}")
        (tmp_path / "000001" / "pretrained_model").mkdir(parents=True)
        (tmp_path / "run2" / "last").mkdir(parents=True)
    dist.barrier()
    for tag in ("000000", "000001"):
        with pytest.raises(CheckpointError, match="is not a checkpoint of this package"):
            strategy.save_ckpt(policy, tmp_path, tag, layout=layout_of())
    with pytest.raises(CheckpointError, match="last exists and is not a link"):
        strategy.save_ckpt(policy, tmp_path / "run2", layout=layout_of())
    with pytest.raises(CheckpointError, match="tag is 'last'"):
        strategy.save_ckpt(policy, tmp_path, "last", layout=layout_of())
    strategy.save_ckpt(policy, tmp_path, "a", layout=layout_of())
    with pytest.raises(CheckpointError, match="last is a symbolic link"):
        strategy.save_ckpt(policy, tmp_path, "last")
    assert strategy.load_ckpt(policy, tmp_path / "last")[0] == str(tmp_path / "a")


# --- behind the trainer ----------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("gather", [False, True])
def test_an_async_save_is_the_moment_of_the_call(tmp_path, gather):
    run = start()
    strategy, policy, _ = run
    train(*run, range(2))
    expected = full_parameters(policy)
    layout = layout_of(train_config={"seeds": [1]}, gather_for_save_pretrained=gather)
    opened = threading.Event()
    write = saving.write_components

    def held(*args):
        assert opened.wait(60)
        return write(*args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saving, "write_components", held)
        path = Path(strategy.save_ckpt(policy, tmp_path, layout=layout, async_save=True))
        policy.config.hidden = 99
        layout.train_config["seeds"].append(2)
        layout.preprocessor.mean += 1
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.zero_()
            policy.mean.zero_()
        opened.set()
        strategy.wait_for_checkpoint()
    dist.barrier()
    folder = path / "pretrained_model"
    assert json.loads((folder / "config.json").read_text()) == (
        {"hidden": 16} if gather else {"type": "tiny", "hidden": 16}
    )
    assert json.loads((folder / "train_config.json").read_text()) == {"seeds": [1]}
    assert not load_file(folder / "policy_preprocessor_step_0_normalizer.safetensors")["mean"].any()
    robot = TinyPolicy(PolicyConfig())
    load_model(robot, folder / "model.safetensors", strict=True)
    assert_same(dict(robot.named_parameters()), expected)
    assert robot.mean.any()
    strategy.load_ckpt(policy, tmp_path)
    assert_same(full_parameters(policy), expected)


# --- a policy that writes itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shard_size",
    [pytest.param(-1, marks=pytest.mark.ranks(3)), pytest.param(2, marks=[pytest.mark.ranks(4), pytest.mark.full])],
)
def test_a_policy_that_insists_writes_itself_from_all_values_on_rank_0(tmp_path, shard_size):
    run = start(shard_size=shard_size)
    strategy, policy, optimizer = run
    train(*run, range(2))
    TinyPolicy.calls = ()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DTensor, "full_tensor", never)
        path = Path(strategy.save_ckpt(policy, tmp_path, layout=layout_of(gather_for_save_pretrained=True)))
    expected = full_state(policy, optimizer)
    called = dict.fromkeys(policy.state_dict(), torch.Tensor) if dist.get_rank() == 0 else None
    assert TinyPolicy.calls == ((called,) if called else ()), "once, on rank 0, with every name and no shard"
    dist.barrier()
    assert files_in(path / "pretrained_model") == sorted([*BESIDE, "README.md", "model.safetensors"])
    assert (path / "pretrained_model" / "config.json").read_text() == '{"hidden": 16}'
    robot = TinyPolicy(PolicyConfig())
    load_model(robot, path / "pretrained_model" / "model.safetensors", strict=True)
    assert_same(dict(robot.named_parameters()), full_parameters(policy))
    manifest = json.loads((path / "training_state" / "manifest.json").read_text())
    assert {"pretrained_model/README.md", "training_state/model/model.safetensors"} <= manifest["files"].keys()
    assert verify_checkpoint(path).ok
    again = start(1, shard_size=shard_size)
    again[0].load_ckpt(again[1], tmp_path)
    assert_same(full_state(*again[1:]), expected)
    dist.barrier()
    if dist.get_rank() == 0:
        with (path / "pretrained_model" / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xff")
    dist.barrier()
    assert [p for p in verify_checkpoint(path).problems if "pretrained_model/model.safetensors" in p]


@pytest.mark.ranks(2)
def test_a_policy_that_fails_to_write_itself_fails_on_every_rank_and_commits_nothing(tmp_path):
    strategy, policy, _ = start()
    insisting = layout_of(gather_for_save_pretrained=True)

    def fails(self, folder, *, state_dict):
        (Path(folder) / "half").write_text("of it")
        raise RuntimeError("no room on the robot")

    strategy.save_ckpt(policy, tmp_path, "first", layout=insisting)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TinyPolicy, "save_pretrained", fails)
        with pytest.raises(CheckpointError, match="rank 0: RuntimeError: no room on the robot"):
            strategy.save_ckpt(policy, tmp_path, "second", layout=insisting)
    dist.barrier()
    assert tags(tmp_path) == ["first"] and not list(tmp_path.glob(".*.partial"))
    assert (tmp_path / "last").readlink() == Path("first")
    model = start(policy=nn.Linear(4, 4))[1]
    with pytest.raises(CheckpointError, match="cannot save Linear with its own save_pretrained: it has no"):
        strategy.save_ckpt(model, tmp_path, layout=insisting)
    adapted = start(policy=get_peft_model(TinyPolicy(PolicyConfig()), LoraConfig(target_modules=["inward"])))[1]
    with pytest.raises(CheckpointError, match="it has adapters, expected none"):
        strategy.save_ckpt(adapted, tmp_path, layout=insisting)


# --- adapters --------------------------------------------------------------------------------------------------------


def with_adapters(kind, base):
    config = LoraConfig(r=2, target_modules=["inward", "outward"], modules_to_save=[], init_lora_weights=False)
    return get_peft_model(base, config) if kind == "around" else inject_adapter_in_model(config, base)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["around", "injected"])
@pytest.mark.parametrize("async_save", some([False, True], [True]))
def test_a_policy_with_adapters_is_saved_as_peft_does_and_resumes_to_the_bit(tmp_path, kind, async_save):
    def begin(seed):
        torch.manual_seed(0)
        base = TinyPolicy(PolicyConfig())
        torch.manual_seed(seed)
        policy = with_adapters(kind, base)
        if kind == "injected":
            for name, parameter in policy.named_parameters():
                parameter.requires_grad_("lora_" in name)
        return start(policy=policy)

    run = begin(0)
    train(*run, range(2))
    path = Path(run[0].save_ckpt(run[1], tmp_path, layout=layout_of(), async_save=async_save))
    trained = full_parameters(run[1])
    expected = train(*run, range(2, 4))
    run[0].wait_for_checkpoint()
    dist.barrier()
    assert files_in(path / "pretrained_model") == sorted([*BESIDE, "adapter_config.json", "adapter_model.safetensors"])
    assert (path / "training_state" / "trainable" / "model.safetensors").exists()
    torch.manual_seed(0)
    base = TinyPolicy(PolicyConfig())
    robot = PeftModel.from_pretrained(base, path / "pretrained_model")
    names = {n.removeprefix("base_model.model."): p for n, p in robot.named_parameters()}
    assert_same(names, {n.removeprefix("base_model.model."): p for n, p in trained.items()})
    again = begin(1)
    again[0].load_ckpt(again[1], tmp_path)
    assert train(*again, range(2, 4)) == expected
    assert verify_checkpoint(path).ok


class PolicyWithOwnAdapters(TinyPolicy):
    """As MolmoAct2: it adapts one of its modules itself, and trains others in full."""

    def __init__(self, config):
        super().__init__(config)
        self.model = get_peft_model(self.model, LoraConfig(r=2, target_modules=["inward"], init_lora_weights=False))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("gather", [False, True])
def test_a_policy_that_builds_adapters_itself_is_saved_with_all_its_weights(tmp_path, gather):
    run = strategy, policy, _ = start(policy=PolicyWithOwnAdapters(PolicyConfig()))
    train(*run, range(2))
    ema = EMA(policy)
    layout = layout_of(gather_for_save_pretrained=gather)
    path = Path(strategy.save_ckpt(policy, tmp_path / "runs", layout=layout, ema=ema))
    save_policy(policy, tmp_path / "robot")
    trained = full_parameters(policy)
    expected = train(*run, range(2, 4))
    dist.barrier()
    assert not list(tmp_path.rglob("adapter_*"))
    for folder in (path / "pretrained_model", tmp_path / "robot"):
        robot = PolicyWithOwnAdapters(PolicyConfig(hidden=json.loads((folder / "config.json").read_text())["hidden"]))
        load_model(robot, folder / "model.safetensors", strict=True)
        assert_same(dict(robot.named_parameters()), trained)
    assert (path / "pretrained_model_ema/model.safetensors").exists() != gather
    again = start(seed=1, policy=PolicyWithOwnAdapters(PolicyConfig()))
    again[0].load_ckpt(again[1], tmp_path / "runs")
    assert train(*again, range(2, 4)) == expected


@pytest.mark.ranks(2)
def test_a_transformers_policy_with_adapters_has_its_configuration_beside_them(tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    strategy, policy, _ = start(policy=get_peft_model(build("llama"), config))
    path = Path(strategy.save_ckpt(policy, tmp_path, layout=layout_of(train_config=None)))
    folder, expected = path / "pretrained_model", full_parameters(policy)
    dist.barrier()
    assert {"config.json", "adapter_config.json", "adapter_model.safetensors"} <= set(files_in(folder))
    assert not (folder / "model.safetensors").exists()
    assert AutoConfig.from_pretrained(folder).hidden_size == 32
    assert_same(dict(PeftModel.from_pretrained(build("llama"), folder).named_parameters()), expected)
    policy.base_model.model.lm_head.weight.requires_grad_(True)
    with pytest.raises(CheckpointError, match=r"it trains .*lm_head\.weight\) as well, expected only adapters"):
        strategy.save_ckpt(policy, tmp_path, layout=layout_of())


# --- a folder for a robot --------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_mp_opt", [False, True])
@pytest.mark.parametrize("async_save", [False, True])
def test_averages_are_a_second_folder_for_robots(tmp_path, use_mp_opt, async_save):
    run = strategy, policy, _ = start(bf16=True, use_mp_opt=use_mp_opt)
    ema = EMA(policy)
    train(*run, range(2))
    ema.update(policy, 0.5)
    averages = {name: full(a) for name, a in ema.averages.items()}
    for _ in range(2):  # the second save replaces the first one
        strategy.save_ckpt(policy, tmp_path, "000002", ema=ema, layout=layout_of(), async_save=async_save)
        strategy.wait_for_checkpoint()
    folder = tmp_path / "000002/pretrained_model_ema"
    assert files_in(folder) == sorted([*BESIDE, "model.safetensors"])
    robot = TinyPolicy(PolicyConfig())
    load_model(robot, folder / "model.safetensors", strict=True)
    assert_same(dict(robot.named_parameters()), averages)
    assert_same({"mean": robot.mean}, {"mean": policy.mean})
    assert verify_checkpoint(tmp_path / "000002").ok
    before, ema = averages, EMA(policy)
    strategy.load_ckpt(policy, tmp_path, ema=ema)
    assert_same({name: full(a) for name, a in ema.averages.items()}, before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_robots_folder_holds_the_masters_or_the_dtype_that_was_asked_for(tmp_path, dtype):
    run = start(bf16=True)
    train(*run, range(2))
    pipelines = {"preprocessor": Pipeline("policy_preprocessor"), "postprocessor": Pipeline("policy_postprocessor")}
    save_policy(run[1], tmp_path, **pipelines, train_config={"seed": 1000}, dtype=dtype)
    masters = full_parameters(run[1])
    dist.barrier()
    assert files_in(tmp_path) == sorted([*BESIDE, "model.safetensors"])
    robot = TinyPolicy(PolicyConfig()).to(dtype or torch.float32)
    load_model(robot, tmp_path / "model.safetensors", strict=True)
    assert all(t.dtype == torch.float32 for t in masters.values())
    assert_same(dict(robot.named_parameters()), {n: t.to(dtype or t.dtype) for n, t in masters.items()})


@pytest.mark.ranks(2)
def test_a_robots_folder_of_a_policy_with_adapters_holds_these_alone(tmp_path):
    torch.manual_seed(0)
    run = start(policy=with_adapters("around", TinyPolicy(PolicyConfig())))
    save_policy(run[1], tmp_path)
    trained = full_parameters(run[1])
    dist.barrier()
    assert files_in(tmp_path) == ["adapter_config.json", "adapter_model.safetensors", "config.json"]
    torch.manual_seed(0)
    robot = PeftModel.from_pretrained(TinyPolicy(PolicyConfig()), tmp_path)
    assert_same(dict(robot.named_parameters()), trained)


# --- damage, the command line, refusals ------------------------------------------------------------------------------


def save_for_the_command_line(path):
    run = start()
    train(*run, range(1))
    run[0].save_ckpt(run[1], path, layout=layout_of())
    run[0].save_ckpt(run[1], path, "global_step1")
    run[0].close()


def test_the_command_line_lists_verifies_and_exports(tmp_path, run_on):
    run_on(2, save_for_the_command_line, path=tmp_path / "run")

    def told(*arguments):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            status = main([str(argument) for argument in arguments])
        return status, said.getvalue()

    status, listed = told("ls", tmp_path / "run")
    assert status == 0 and [line.split()[1] for line in listed.splitlines()[1:]] == ["000001", "global_step1"]
    assert told("verify", tmp_path / "run") == (
        0,
        f"{tmp_path}/run/000001: ok\n{tmp_path}/run/global_step1: ok\n",
    )
    saved = tmp_path / "run" / "000001" / "pretrained_model"
    for dtype in (None, "bfloat16"):
        output = tmp_path / f"robot {dtype}"
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sizes, "FILE_BYTES", 1000)
            assert told("export", saved.parent, output, *(["--dtype", dtype] if dtype else []))[0] == 0
        assert files_in(output) == files_in(saved)
        expected = load_file(saved / "model.safetensors")
        expected = {name: tensor.to(getattr(torch, dtype or "float32")) for name, tensor in expected.items()}
        assert_same(load_file(output / "model.safetensors"), expected)
        assert (output / "config.json").read_text() == (saved / "config.json").read_text()
    for name in ("model.safetensors", "policy_preprocessor.json"):
        content = (saved / name).read_bytes()
        (saved / name).write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        status, said = told("verify", saved.parent)
        assert status == 1 and f"pretrained_model/{name}" in said
        (saved / name).write_bytes(content)
    assert verify_checkpoint(saved.parent).ok


@pytest.mark.ranks(2)
def test_a_flipped_byte_is_found_when_it_is_read(tmp_path):
    strategy, policy, _ = start()
    path = Path(strategy.save_ckpt(policy, tmp_path, layout=layout_of()))
    dist.barrier()
    if dist.get_rank() == 0:
        with (path / "pretrained_model" / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            [last] = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last ^ 1]))
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"pretrained_model/model\.safetensors have the checksum"):
        strategy.load_ckpt(policy, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_steps": 0}, "total_steps is 0, expected an integer"),
        ({"batch_size": 2.0}, "batch_size is 2.0, expected an integer"),
        ({"preprocessor": "pre"}, "preprocessor is a str, expected an object with save_pretrained"),
        ({"postprocessor": 1}, "postprocessor is a int, expected an object with save_pretrained"),
        ({"train_config": 3}, "train_config is a int, expected an object with save_pretrained, a mapping"),
    ],
)
def test_what_cannot_be_laid_out_is_said(options, message):
    with pytest.raises(ConfigError, match=message):
        layout_of(**options)


@pytest.mark.ranks(2)
def test_ranks_that_give_different_layouts_are_refused(tmp_path):
    strategy, policy, _ = start(policy=nn.Linear(4, 4))
    with pytest.raises(CheckpointError, match=r"ranks \[1\] differ from rank 0"):
        strategy.save_ckpt(policy, tmp_path, "a", layout=layout_of(batch_size=1 + dist.get_rank()))
    with pytest.raises(CheckpointError, match=r"ranks \[1\] differ from rank 0"):
        strategy.save_ckpt(policy, tmp_path, "a", layout=layout_of() if dist.get_rank() else None)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("adapted", [True, False])
def test_a_robots_folder_takes_no_adapters_beside_weights_and_no_weights_beside_adapters(tmp_path, adapted):
    policies = [start(policy=with_adapters("around", TinyPolicy(PolicyConfig())))[1], start()[1]]
    first, second = policies if adapted else policies[::-1]
    save_policy(first, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=r"cannot export .*: .* contains (adapter_)?model.safetensors"):
        save_policy(second, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    save_policy(first, tmp_path)


@pytest.mark.ranks(2)
def test_a_layout_of_another_kind_is_named_on_every_rank(tmp_path):
    strategy, model, _ = start(policy=build("llama"))
    for save in (partial(strategy.save_ckpt, model), partial(save_checkpoint, model)):
        with pytest.raises(CheckpointError, match="layout is 'lerobot', expected a LeRobotLayout, a TrainerLayout or"):
            save(tmp_path, layout="lerobot")
