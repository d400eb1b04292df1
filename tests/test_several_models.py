"""Models that are saved by one call have one checkpoint, and come back at the same step whatever happened between."""

from __future__ import annotations

import itertools
import json
import logging
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from helpers.crashes import dies_at, kill_within_a_save, removals_at_once
from helpers.folders import contents
from helpers.models import build
from helpers.reference import full_tensors
from helpers.training import assert_same, strategy_for, tags
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from fsdp2_strategy import EMA, list_checkpoints, load_checkpoint, save_checkpoint, verify_checkpoint
from fsdp2_strategy.checkpoint.training_state import optimizer_tensors
from fsdp2_strategy.cli import main
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.errors import ArgumentError, CheckpointError, ConfigError, DamageError
from fsdp2_strategy.model.names import named_parameters


class Run:
    """An actor and a critic that take other numbers of steps, with all that belongs to them."""

    def __init__(self, seed=0, **config):
        self.strategy = strategy_for(seed=3, **config)
        self.models, self.optimizers, self.schedulers, self.emas = {}, {}, {}, {}
        for offset, name in enumerate(("critic", "actor")):
            torch.manual_seed(seed + offset)
            model = nn.Sequential(nn.Linear(4, 7), nn.Dropout(0.2), nn.Linear(7, 3 - offset)).double()
            self.models[name] = self.strategy.prepare_model(model, is_training=True)
            optimizer = self.strategy.create_optimizer(model, lr=0.05 * (offset + 1))
            self.schedulers[name] = self.strategy.create_scheduler(optimizer, "cosine", num_training_steps=20)
            self.optimizers[name], self.emas[name] = optimizer, EMA(model, 0.5)
        self.loader = ResumableLoader(list(range(24)), 6)
        self.batches = itertools.chain.from_iterable(itertools.repeat(self.loader))

    def train(self, rounds, per_round=(("actor", 2), ("critic", 1))):
        losses = []
        for _ in range(rounds):
            batch = torch.as_tensor(next(self.batches)).double()[:, None].repeat(1, 4) / 24
            for name, steps in per_round:
                model = self.models[name]
                for _ in range(steps):
                    loss = model(batch).square().mean()
                    self.strategy.backward(loss, model)
                    self.strategy.optimizer_step(self.optimizers[name], model, self.schedulers[name])
                    self.emas[name].update(model)
                    losses.append(loss.item())
        return losses

    def save(self, folder, tag=None, **options):
        return self.strategy.save_ckpt(self.models, folder, tag, ema=self.emas, dataloader=self.loader, **options)

    def load(self, folder, **options):
        return self.strategy.load_ckpt(self.models, folder, ema=self.emas, dataloader=self.loader, **options)

    def state(self):
        found = {}
        for name, model in sorted(self.models.items()):
            tensors = {**named_parameters(model), **optimizer_tensors(model, self.optimizers[name])}
            tensors |= {f"average {n}": average for n, average in self.emas[name].averages.items()}
            found |= {f"{name} {n}": tensor for n, tensor in full_tensors(tensors).items()}
            found[f"{name} lr"] = torch.tensor([self.optimizers[name].param_groups[0]["lr"]])
            found[f"{name} steps"] = torch.tensor([self.strategy.global_step(model), self.schedulers[name].last_epoch])
        return found


def resumes_bitwise(folder, async_save):
    run = Run()
    run.train(2)
    path = run.save(folder, client_state={"round": 2}, async_save=async_save)
    assert path == str(folder / "global_step4"), "the largest number of steps"
    expected = run.state()
    losses = run.train(3)
    run.strategy.wait_for_checkpoint()
    other = Run(seed=7)
    assert other.load(folder) == (path, {"round": 2})
    assert_same(other.state(), expected)
    assert other.train(3) == losses, "dropout, data and schedules go on"
    assert_same(other.state(), run.state())
    assert [other.strategy.global_step(other.models[name]) for name in ("actor", "critic")] == [10, 5]


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("async_save", [False, True])
def test_a_resume_of_several_models_is_bitwise_exact(world, async_save, run_on, tmp_path):
    run_on(world, resumes_bitwise, folder=tmp_path, async_save=async_save)


@pytest.mark.ranks(2)
def test_each_model_has_the_folders_of_a_single_one(tmp_path):
    run = Run()
    run.train(1)
    run.save(tmp_path, meta={"a": 1})
    critic, actor = run.models["critic"], run.models["actor"]
    options = {"async_save": False}
    run.strategy.save_ckpt(critic, tmp_path / "alone" / "critic", "one", **options)
    run.strategy.save_ckpt(actor, tmp_path / "alone" / "actor", "one", **options)
    checkpoint = tmp_path / "global_step2"
    assert {path.name for path in checkpoint.iterdir()} == {
        "actor", "critic", "rng", "checksums", "trainer_state.json", "meta.json", "manifest.json"
    }  # fmt: skip
    for name in ("actor", "critic"):
        alone = tmp_path / "alone" / name / "one"
        assert {path.name for path in (checkpoint / name).iterdir()} == {
            "model", "optimizer", "ema", "trainer_state.json"
        }  # fmt: skip
        for part in ("model", "optimizer", "ema"):
            assert contents(checkpoint / name / part) == contents(alone / part), "the same bytes"
        of_model, of_run, expected = (
            json.loads((folder / "trainer_state.json").read_text()) for folder in (checkpoint / name, checkpoint, alone)
        )
        assert {**expected, "data": of_run["data"]} == {**of_run, **of_model}
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert (manifest["format_version"], manifest["step"]) == (3, 2)
    assert manifest["models"] == {"actor": {"step": 2, "shard_size": 2}, "critic": {"step": 1, "shard_size": 2}}
    alone = json.loads((tmp_path / "alone" / "actor" / "one" / "manifest.json").read_text())
    assert alone["format_version"] == 2 and "models" not in alone, "the format of one model stays"


def save_for_others(folder):
    run = Run()
    run.train(2)
    run.save(folder)


def load_on_others(folder, expected):
    run = Run(seed=7)
    run.load(folder)
    state = run.state()
    if expected is not None:
        assert_same(state, torch.load(expected))
    elif dist.get_rank() == 0:
        torch.save(state, folder / "state.pt")
    run.save(folder / f"on{dist.get_world_size()}")


@pytest.mark.full
def test_several_models_load_on_any_number_of_ranks(run_on, tmp_path):
    run_on(2, save_for_others, folder=tmp_path)
    for world in (2, 1, 3):
        run_on(world, load_on_others, folder=tmp_path, expected=tmp_path / "state.pt" if world != 2 else None)
    for world in (1, 3):
        for name in ("actor", "critic"):
            for part in ("model", "optimizer", "ema"):
                own = tmp_path / f"on{world}" / "global_step4" / name / part
                assert contents(own) == contents(tmp_path / "global_step4" / name / part)
    assert all(verify_checkpoint(tmp_path / f"on{world}" / "global_step4").ok for world in (1, 2, 3))


@pytest.mark.ranks(2)
def test_the_order_of_the_names_and_wrappers_do_not_matter(tmp_path):
    run = Run()
    if dist.get_rank():
        run.models = dict(reversed(run.models.items()))
        run.emas = dict(reversed(run.emas.items()))
    run.train(1, per_round=[("actor", 1), ("critic", 1)])
    run.save(tmp_path)
    before = run.state()
    run.train(1, per_round=[("actor", 1), ("critic", 1)])
    run.loader = ResumableLoader(list(range(24)), 6)
    run.load(tmp_path)
    after = run.state()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.ranks(2)
def test_rotation_counts_a_tag_once_and_keeps_the_best(tmp_path):
    run = Run()
    for step in range(4):
        run.train(1)
        run.save(tmp_path, max_num=2, metric=1.0 if step == 0 else 0.0)
    run.strategy.close()
    assert tags(tmp_path) == ["global_step2", "global_step6", "global_step8"]
    assert [checkpoint.models for checkpoint in list_checkpoints(tmp_path)] == [("actor", "critic")] * 3


@pytest.mark.ranks(2)
def test_names_that_do_not_fit_are_errors_before_anything_is_touched(tmp_path):
    run = Run()
    run.train(1)
    run.save(tmp_path / "several")
    run.strategy.save_ckpt(run.models["actor"], tmp_path / "one")
    before = run.state()
    actor, critic = run.models["actor"], run.models["critic"]
    load = run.strategy.load_ckpt
    for call, message in (
        (lambda: load(actor, tmp_path / "several"), "has the models actor, critic, expected a checkpoint of one model"),
        (lambda: load(run.models, tmp_path / "one"), "has one model without a name, expected the models actor, critic"),
        (lambda: load({"actor": actor}, tmp_path / "several"), "expected only actor, .* Pass critic, too"),
        (lambda: load({"actor": actor, "critics": critic}, tmp_path / "several"), "Did you mean 'critic'"),
        (
            lambda: load(actor, tmp_path / "several" / "global_step2" / "actor"),
            "There are checkpoints in .*global_step2",
        ),
        (lambda: load_checkpoint(actor, tmp_path / "several"), "expected a checkpoint of one model"),
        (lambda: load_checkpoint(run.models, tmp_path / "one"), "has one model without a name"),
        (lambda: load(run.models, tmp_path / "several", tag="global_step3"), "is not a committed checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=message):
            call()
    assert_same(run.state(), before)
    with torch.no_grad():
        actor[0].weight.zero_()
    load({"actor": actor}, tmp_path / "several", load_module_only=True)  # no run continues
    assert_same(run.state(), before)
    assert load(run.models, tmp_path / "nothing") == (None, {})


@pytest.mark.ranks(2)
def test_arguments_that_do_not_fit_are_errors(tmp_path):
    run = Run()
    actor, critic, optimizers = run.models["actor"], run.models["critic"], run.optimizers
    save = run.strategy.save_ckpt
    for call, message in (
        (lambda: save({}, tmp_path), "the models are an empty mapping"),
        (lambda: save({"actor": actor, "critic": actor}, tmp_path), "'actor' and 'critic' are the same model"),
        (lambda: save({"actor": actor, "critic": None}, tmp_path), "'critic' is a NoneType, expected an nn.Module"),
        (lambda: save(run.models, tmp_path, optimizer=optimizers["actor"]), "optimizer is a AdamW, expected a mapping"),
        (lambda: save(run.models, tmp_path, optimizer={"actr": optimizers["actor"]}), "Did you mean 'actor'"),
        (lambda: save(run.models, tmp_path, ema=run.emas["actor"]), "ema is a EMA, expected a mapping"),
        (lambda: save_checkpoint(run.models, tmp_path, scheduler=run.schedulers["actor"]), "scheduler is a LambdaLR"),
        (lambda: run.strategy.load_ckpt(run.models, tmp_path, optimizers["actor"]), "optimizer is a AdamW"),
        *(
            (lambda name=name: save({name: actor, "critic": critic}, tmp_path), "the name of a model is")
            for name in ("", "a/b", ".a", "..", "rng", "model", "optimizer", "training_state", "manifest.json", 3)
        ),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
    with pytest.raises(ConfigError):
        save({"actor": actor, "rng": critic}, tmp_path)
    with pytest.raises(CheckpointError, match="ranks \\[1\\] differ from rank 0"):
        save_checkpoint(run.models if dist.get_rank() else actor, tmp_path)
    assert not list(tmp_path.glob("*"))


@pytest.mark.ranks(2)
def test_models_on_other_ranks_and_on_replicas(tmp_path):
    strategy = strategy_for()
    torch.manual_seed(0)
    whole = strategy.prepare_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), is_training=True)
    replicas = strategy.prepare_model(nn.Linear(4, 4), is_training=True, shard_size=1)
    meshes = [DeviceMesh("cpu", [rank]) for rank in range(2)]
    alone = nn.Linear(4, 4)
    fully_shard(alone, mesh=meshes[dist.get_rank()])
    own = rf"'b' is on the ranks \[{dist.get_rank()}\]"
    with pytest.raises(ArgumentError, match=rf"'a' is on the ranks \[0, 1\]; {own}, expected models on the same ranks"):
        save_checkpoint({"a": whole, "b": alone}, tmp_path)
    strategy.save_ckpt({"a": whole, "b": replicas}, tmp_path)
    manifest = json.loads((tmp_path / "global_step0" / "manifest.json").read_text())
    assert {name: own["shard_size"] for name, own in manifest["models"].items()} == {"a": 2, "b": 1}
    before = full_tensors({**named_parameters(whole), **{f"b {n}": p for n, p in named_parameters(replicas).items()}})
    with torch.no_grad():
        for parameter in (*whole.parameters(), *replicas.parameters()):
            parameter.zero_()
    strategy.load_ckpt({"b": replicas, "a": whole}, tmp_path, load_module_only=True)
    after = full_tensors({**named_parameters(whole), **{f"b {n}": p for n, p in named_parameters(replicas).items()}})
    assert_same(after, before)


@pytest.mark.ranks(2)
def test_the_optimizers_of_a_call_replace_those_of_the_strategy(tmp_path):
    run = Run()
    run.train(1)
    other = run.strategy.create_optimizer(run.models["actor"], lr=0.5)
    run.strategy.save_ckpt(
        run.models, tmp_path, optimizer={"actor": other}, scheduler={"critic": run.schedulers["critic"]}
    )
    state = json.loads((tmp_path / "global_step2" / "actor" / "trainer_state.json").read_text())
    assert state["optimizer"]["settings"][0]["lr"] == 0.5
    state = json.loads((tmp_path / "global_step2" / "critic" / "trainer_state.json").read_text())
    assert state["optimizer"]["settings"][0]["lr"] < 0.1


@pytest.mark.full
@pytest.mark.ranks(2)
def test_the_free_functions_save_and_load_several_models(tmp_path):
    run = Run()
    run.train(1)
    averages = {name: ema.averages for name, ema in run.emas.items()}
    path = save_checkpoint(
        run.models, tmp_path, step={"actor": 5, "critic": 3}, optimizer=run.optimizers,
        scheduler={"actor": run.schedulers["actor"]}, ema=averages, client_state={"a": 1}, seed=4,
    )  # fmt: skip
    before = run.state()
    run.train(2)
    with pytest.raises(CheckpointError, match="cannot load the scheduler"):
        load_checkpoint(run.models, tmp_path, scheduler=run.schedulers)
    loaded = load_checkpoint(
        run.models, tmp_path, optimizer=run.optimizers, scheduler={"actor": run.schedulers["actor"]}, ema=averages
    )
    assert (loaded.path, loaded.step, loaded.client_state) == (path, 5, {"a": 1})
    assert {name: own.step for name, own in loaded.models.items()} == {"actor": 5, "critic": 3}
    after = run.state()
    assert all(torch.equal(after[n], before[n]) for n in before if "steps" not in n and n != "critic lr")


@pytest.mark.full
@pytest.mark.ranks(1)
@pytest.mark.parametrize(("tag", "every"), [(None, 5), (None, 1), ("again", 1)])
def test_a_crash_at_any_step_on_disk_never_mixes_steps(tmp_path, tag, every):
    run = Run()
    run.train(1)
    run.save(tmp_path, tag, max_num=1)
    states = {2: run.state()}
    run.train(1)
    states[4] = run.state()
    for point in itertools.count(step=every):
        folder = tmp_path.with_name(f"{tmp_path.name}{point}")
        shutil.copytree(tmp_path, folder)
        with removals_at_once():
            has_died = dies_at(point, lambda folder=folder: run.save(folder, tag, max_num=1))
        other = Run(seed=7)
        other.load(folder)
        step = other.strategy.global_step(other.models["actor"])
        assert_same(other.state(), states[step])
        assert step == 2 * other.strategy.global_step(other.models["critic"])
        with removals_at_once():
            other.save(folder, "next", max_num=1)
        assert not [path for path in folder.iterdir() if path.name.startswith(".") and path.is_dir()], "cleaned up"
        shutil.rmtree(folder)
        if not has_died:
            break
    assert point > 20


def save_for_ever(folder):
    run = Run()
    while True:
        run.train(1)
        run.save(folder, max_num=3)


@pytest.mark.full
def test_a_run_that_is_killed_between_the_models_resumes_all_of_them_at_one_step(tmp_path):
    kill_within_a_save(save_for_ever, tmp_path, committed=3)
    run = Run(seed=7)
    run.load(tmp_path)
    steps = [run.strategy.global_step(run.models[name]) for name in ("actor", "critic")]
    assert steps[0] == 2 * steps[1] and steps[0] >= 6
    assert all(verify_checkpoint(checkpoint.path).ok for checkpoint in list_checkpoints(tmp_path))


@pytest.mark.full
@pytest.mark.ranks(2)
def test_damage_in_one_model_leaves_all_unusable_and_an_older_one_is_the_fallback(tmp_path):
    run = Run()
    run.train(1)
    run.save(tmp_path)
    expected = run.state()
    run.train(1)
    run.save(tmp_path)
    if dist.get_rank() == 0:
        path = tmp_path / "global_step4" / "critic" / "model" / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        report = verify_checkpoint(tmp_path / "global_step4")
        assert len(report.problems) == 1 and "critic/model/model.safetensors" in report.problems[0]
    dist.barrier()
    run.loader = ResumableLoader(list(range(24)), 6)
    with pytest.raises(DamageError, match="critic/model"):
        run.load(tmp_path)
    for model in run.models.values():
        with pytest.raises(CheckpointError, match="values are inconsistent"):
            model(torch.ones(1, 4, dtype=torch.float64))
    run.loader = ResumableLoader(list(range(24)), 6)
    assert run.load(tmp_path, fallback=True)[0] == str(tmp_path / "global_step2")
    assert_same(run.state(), expected)


@pytest.mark.ranks(2)
def test_saving_a_tag_again_replaces_it_and_nothing_else_is_replaced(tmp_path):
    run = Run()
    run.train(1)
    run.save(tmp_path, "same")
    run.train(1)
    run.strategy.save_ckpt(run.models["actor"], tmp_path, "same")
    assert run.strategy.load_ckpt(run.models["actor"], tmp_path)[0] == str(tmp_path / "same")
    run.save(tmp_path, "same")
    if dist.get_rank() == 0:
        (tmp_path / "theirs" / "actor" / "model").mkdir(parents=True)
        (tmp_path / "theirs" / "actor" / "notes.txt").write_text("mine")
    dist.barrier()
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint of this package"):
        run.save(tmp_path, "theirs")


def save_two_of_transformers(folder):
    strategy = strategy_for()
    models = {name: strategy.prepare_model(build(name), is_training=True) for name in ("llama", "gpt2")}
    for model in models.values():
        strategy.create_optimizer(model, lr=0.1)
    strategy.save_ckpt(models, folder, "a")
    with torch.no_grad():
        for parameter in models["gpt2"].parameters():
            parameter.add_(1)
    strategy.save_ckpt(models, folder, "b")


def test_the_command_line_knows_several_models(tmp_path, capsys, run_on):
    run_on(2, save_two_of_transformers, folder=tmp_path)
    assert main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("models gpt2, llama") == 2
    assert main(["ls", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["models"] == ["gpt2", "llama"]
    assert main(["verify", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for line in (r"models +gpt2, llama", r"  gpt2/model +\d+ tensors, .*", r"  llama/model +\d+ tensors, .*"):
        assert re.search(rf"^{line}$", shown, re.MULTILINE), shown
    assert main(["inspect", "--json", str(tmp_path)]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["models"]["llama"]["step"] == 0 and found["components"].keys() == {"gpt2/model", "llama/model"}
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    shown = capsys.readouterr().out
    assert "gpt2/model: " in shown and "llama/model: " not in shown
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "it has the models gpt2, llama" in capsys.readouterr().err
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--model", "lama"]) == 2
    assert "Did you mean 'llama'" in capsys.readouterr().err
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--model", "llama", "--dtype", "bfloat16"]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(tmp_path / "b" / "gpt2" / "model")


@pytest.mark.ranks(2)
def test_trainable_weights_alone_of_several_models(tmp_path):
    run = Run()
    for model in run.models.values():
        model[0].requires_grad_(False)
    run.train(1)
    run.strategy.save_ckpt(run.models, tmp_path, only_trainable=True)
    assert (tmp_path / "global_step2" / "critic" / "trainable").is_dir()
    expected = run.state()
    run.train(1)
    run.strategy.load_ckpt(run.models, tmp_path, ema=None)
    after = run.state()
    assert all(torch.equal(after[n], expected[n]) for n in expected if "average" not in n)


# --- one call for each model -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["tags", "directories", "free function"])
def test_models_that_come_back_at_different_steps_are_named_once(kind, tmp_path):
    def where(name, step):
        same = kind != "directories"
        return (tmp_path, f"{name}{step}") if same else (tmp_path / name, f"global_step{step}")

    run = Run()
    for step in (1, 2):
        run.train(1, per_round=[("actor", 1), ("critic", 1)])
        for name in ("actor", "critic"):
            if (name, step) != ("critic", 2):  # killed
                run.strategy.save_ckpt(run.models[name], *where(name, step))

    def resume(steps):
        other, records = Run(seed=7), []
        handler = logging.Handler(logging.WARNING)
        handler.emit = records.append
        logging.getLogger("fsdp2_strategy").addHandler(handler)
        for name, step in steps.items():
            folder, tag = where(name, step)
            if kind == "free function":
                load_checkpoint(other.models[name], folder, tag=tag, optimizer=other.optimizers[name])
            else:
                other.strategy.load_ckpt(other.models[name], folder, tag=tag)
        logging.getLogger("fsdp2_strategy").removeHandler(handler)
        return [record.getMessage() for record in records if "different steps" in record.getMessage()]

    texts = resume({"actor": 2, "critic": 1})
    if dist.get_rank() == 0:
        assert len(texts) == 1
        (folder, tag), (other_folder, other_tag) = where("actor", 2), where("critic", 1)
        assert f"at step 2 ({folder / tag})" in texts[0] and f"at step 1 ({other_folder / other_tag})" in texts[0]
    assert resume({"actor": 1, "critic": 1}) == []
