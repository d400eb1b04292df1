"""``convert``, ``ls`` and ``inspect`` on the checkpoints of other programs; what is converted resumes without trust."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import foreign as programs
from helpers.foreign import SAVED, STEPS, WRITERS, Program, decay, loss_at, mean_loss
from helpers.models import build
from helpers.training import prepared, strategy_for, train
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from fsdp2_strategy import verify_checkpoint
from fsdp2_strategy.cli import main
from fsdp2_strategy.errors import CheckpointError

KINDS = [write.__name__ for write in WRITERS]
RANKS = {"torchtitan": 3, "whole_numbered": 2}


@pytest.fixture(scope="module")
def written(tmp_path_factory, run_on):
    folder = tmp_path_factory.mktemp("foreign")
    run_on(2, write_all, folder=folder)
    return folder


def write_all(folder):
    programs.write_all(folder)


def resume(folder, wrote):
    """Continue a converted run with other hyper-parameters in the program, and compare the losses."""
    strategy = strategy_for(max_norm=0.0)
    model = strategy.prepare_model(build("llama", seed=1), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.5, betas=(0.5, 0.5), weight_decay=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    strategy.load_ckpt(model, folder / f"{wrote}.out", optimizer=optimizer, scheduler=scheduler)
    assert strategy.global_step(model) == scheduler.last_epoch == SAVED
    losses = []
    for step in range(SAVED, STEPS):
        loss = loss_at(model, step)
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler)
        losses.append(mean_loss(loss))
    assert losses == pytest.approx(json.loads((folder / "losses.json").read_text()), rel=2e-5)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.2, 0.0}
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * decay(STEPS))
    strategy.save_ckpt(model, folder / f"{wrote}.out", scheduler=scheduler)


CASES = [
    pytest.param(wrote, RANKS.get(wrote, 1 + i % 4), marks=() if wrote == "torchtitan" else pytest.mark.full, id=wrote)
    for i, wrote in enumerate(KINDS)
]


@pytest.mark.parametrize(("wrote", "ranks"), CASES)
def test_a_converted_run_goes_on_without_trust_and_with_the_losses_of_the_old_program(written, run_on, wrote, ranks):
    target = written / f"{wrote}.out"
    assert main(["convert", str(written / wrote), str(target)]) == 2
    assert not target.exists()
    assert main(["convert", "--trust", "-q", str(written / wrote), str(target)]) == 0
    assert verify_checkpoint(target / f"global_step{SAVED}").ok
    run_on(ranks, resume, folder=written, wrote=wrote)


@pytest.mark.full
def test_a_small_limit_of_memory_converts_in_many_parts(written, tmp_path, monkeypatch):
    monkeypatch.setattr("fsdp2_strategy.sizes.CONVERSION_BYTES", 100)
    monkeypatch.setattr("fsdp2_strategy.sizes.MIN_FILE_LIMIT_BYTES", 5000)
    for name in ("rng", "model"):  # of a conversion that was killed
        (tmp_path / "out/.global_step3.partial" / name).mkdir(parents=True)
    assert main(["convert", "--trust", str(written / "nested"), str(tmp_path / "out")]) == 0
    assert verify_checkpoint(tmp_path / "out/global_step3").ok
    assert not (tmp_path / "out/.global_step3.partial").exists()
    assert len(list((tmp_path / "out/global_step3/model").glob("*.safetensors"))) > 3


@pytest.mark.full
def test_there_and_back_the_tensors_and_the_settings_are_the_same(written, tmp_path, capsys):
    out, back, again = (str(tmp_path / name) for name in ("out", "back", "again"))
    assert main(["convert", "--trust", str(written / "nested"), out]) == 0
    assert main(["to-dcp", out, back]) == 0
    assert main(["convert", "--trust", back, again]) == 0
    assert main(["diff", "-q", out, again]) == 0
    capsys.readouterr()
    facts = []
    for folder in (out, again):
        assert main(["inspect", "--json", folder]) == 0
        facts += json.loads(capsys.readouterr().out)
    first, second = ({name: each[name] for name in ("step", "scheduler", "parameters")} for each in facts)
    assert first == second
    settings = [[dict(sorted(own.items())) for own in each["optimizer"]["settings"]] for each in facts]
    assert all(own in settings[1] for own in settings[0])


@pytest.mark.full
def test_ls_and_inspect_name_the_kind_the_step_and_the_command(written, capsys):
    assert main(["ls", str(written / "torchtitan")]) == 0
    _, line = capsys.readouterr().out.splitlines()
    command = f"fsdp2-strategy convert {written / 'torchtitan/step-3'} TARGET --trust"
    assert line.split()[1:3] == ["step-3", "3"] and line.endswith(f"a checkpoint of torchtitan: {command}")
    assert main(["inspect", str(written / "torchtitan")]) == 0
    out = capsys.readouterr().out
    assert "written by       another system: a checkpoint of torchtitan" in out and command in out
    assert "pass --trust to read them" in out and "parameters" not in out
    assert main(["inspect", "--trust", "--tensors", "*norm*", str(written / "torchtitan")]) == 0
    out = capsys.readouterr().out
    assert "  model.norm.weight  float32  [32]" in out and "embed_tokens" not in out and "content" not in out
    assert main(["inspect", "--trust", str(written / "torchtitan")]) == 0
    out = capsys.readouterr().out
    assert "content          21,664 parameters in 84 tensors: 260 kB float32" in out
    assert "optimizer        parameters=21, settings=[{" in out and "weight_decay=0.2" in out and "last_epoch=3" in out
    assert "not convertible  1 value (dataloader.dp_rank_0)" in out
    assert main(["inspect", "--trust", "--json", str(written / "verl")]) == 0
    [facts] = json.loads(capsys.readouterr().out)
    assert (facts["written_by"], facts["step"], facts["parameters"]) == ("a checkpoint of verl", 3, 21664)


@pytest.mark.full
def test_ls_says_which_files_of_ranks_are_missing(written, tmp_path, capsys):
    for wrote in ("verl", "nested"):
        shutil.copytree(written / wrote, tmp_path / "runs", dirs_exist_ok=True)
    (tmp_path / "runs/global_step_3/actor/model_world_size_2_rank_1.pt").unlink()
    assert main(["ls", str(tmp_path / "runs")]) == 1
    _, usable, broken, _ = capsys.readouterr().out.splitlines()
    assert "a folder of torch.distributed.checkpoint" in usable
    assert "global_step_3" in broken and "it lacks 1 of 2 files of ranks" in broken


@pytest.mark.full
def test_ls_of_other_systems_does_not_import_torch(written):
    code = "import sys; from fsdp2_strategy.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    for wrote in KINDS:
        command = [sys.executable, "-c", code, "ls", str(written / wrote)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "fsdp2-strategy convert" in done.stdout, done


@pytest.mark.full
def test_a_conversion_that_fails_leaves_nothing_and_can_be_repeated(written, tmp_path, monkeypatch):
    def fail(*_arguments, **_named):
        raise CheckpointError("the disk is full")

    source, target = str(written / "nested"), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr("fsdp2_strategy.checkpoint.convert._copy_sidecars", fail)
        assert main(["convert", "--trust", source, str(target)]) == 2
    assert not target.exists()
    assert main(["convert", "--trust", source, str(target)]) == 0


def save_own(folder):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, [0])
    strategy.save_ckpt(model, folder / "ckpts")
    strategy.save_model(model, None, folder / "ckpts" / "exported")


@pytest.mark.full
def test_a_directory_with_checkpoints_of_both_lists_both_and_is_not_converted(tmp_path, run_on, capsys):
    run_on(2, save_own, folder=tmp_path)
    capsys.readouterr()
    assert main(["ls", str(tmp_path / "ckpts")]) == 0
    _, own, exported = capsys.readouterr().out.splitlines()
    assert "global_step1" in own and "a Hugging Face folder: fsdp2-strategy convert" in exported
    assert main(["convert", "--trust", str(tmp_path / "ckpts"), str(tmp_path / "out")]) == 2
    assert "it has checkpoints of this package" in capsys.readouterr().err
    assert main(["convert", "-q", str(tmp_path / "ckpts/exported"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/global_step0/model/config.json").exists()
    run_on(2, load_weights_only, folder=tmp_path)


def load_weights_only(folder):
    strategy = strategy_for()
    model, _, _ = prepared(strategy, seed=1)
    strategy.load_ckpt(model, folder / "out", load_module_only=True)
    expected, _, _ = prepared(strategy, seed=2)
    strategy.load_ckpt(expected, folder / "ckpts", load_module_only=True)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())


@pytest.mark.full
def test_what_cannot_be_converted_is_named(written, tmp_path, capsys):
    target = tmp_path / "out"
    torch.save({"optimizer": {"state": {}, "param_groups": []}, "step": 3}, tmp_path / "model.pt")
    assert main(["convert", "--trust", str(tmp_path / "model.pt"), str(target)]) == 2
    assert "without weights" in capsys.readouterr().err
    weights = {"layer.weight": torch.ones(4, 4)}
    state = {"layer.weight": {"exp_avg": torch.ones(16), "step": 3}}
    groups = [{"params": ["layer.weight"], "lr": 0.1, "betas": (0.9, 0.99)}]
    torch.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "flat.pt")
    assert main(["convert", "--trust", str(tmp_path / "flat.pt"), str(target)]) == 2
    assert "the state of layer.weight has the shape [16], expected [4, 4]" in capsys.readouterr().err
    assert main(["convert", "--trust", str(written / "nested"), str(written)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert not target.exists()


class Wrapped(torch.nn.Module):
    """A wrapper around a transformers model."""

    def __init__(self, seed):
        super().__init__()
        self.body = build("llama_tied", seed=seed)
        self.head = torch.nn.Linear(32, 1)

    def forward(self, **batch):
        return self.head(self.body(**batch, output_hidden_states=True).hidden_states[-1])


def save_wrapped(folder):
    """Write the checkpoint of a plain program."""
    model = Wrapped(seed=0)
    dcp.save({"model": model.state_dict(), "step": 5}, checkpoint_id=folder / "wrapped")
    torch.save(model.state_dict(), folder / "expected.pt")


def load_wrapped(folder):
    strategy = strategy_for()
    model = strategy.prepare_model(Wrapped(seed=1), is_training=True)
    strategy.load_ckpt(model, folder / "out", load_module_only=True)
    expected = torch.load(folder / "expected.pt")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), expected[name]), name


@pytest.mark.full
def test_a_wrapper_around_a_model_is_converted_with_all_its_weights(tmp_path, run_on, capsys):
    run_on(1, save_wrapped, folder=tmp_path)
    assert main(["convert", "--trust", "-q", str(tmp_path / "wrapped"), str(tmp_path / "out")]) == 0
    run_on(2, load_wrapped, folder=tmp_path)
    assert main(["to-dcp", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    assert main(["convert", "--trust", "-q", str(tmp_path / "back"), str(tmp_path / "again")]) == 0
    capsys.readouterr()
    path = "global_step5"
    assert main(["diff", str(tmp_path / "out" / path), str(tmp_path / "again" / path)]) == 0


def save_tied(folder):
    """Train a plain model with tied weights for two steps, and write what it has under another name of the tie."""
    program = Program(build("llama_tied"))
    program.train(range(2))
    state = program.optimizer.state_dict()
    named = list(program.model.named_parameters())
    order = [name for name, p in named if p.ndim > 1] + [name for name, p in named if p.ndim == 1]
    order = ["lm_head.weight" if name == "model.embed_tokens.weight" else name for name in order]
    optimizer = {
        "state": {order[number]: values for number, values in state["state"].items()},
        "param_groups": [{**g, "params": [order[number] for number in g["params"]]} for g in state["param_groups"]],
    }
    torch.save({"model": program.model.state_dict(), "optimizer": optimizer, "step": 2}, folder / "ckpt_2.pt")
    (folder / "losses.json").write_text(json.dumps(program.train(range(2, STEPS))))


def resume_tied(folder):
    strategy = strategy_for(max_norm=0.0)
    model = strategy.prepare_model(build("llama_tied", seed=1), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    strategy.load_ckpt(model, folder / "out", optimizer=optimizer, scheduler=scheduler)
    losses = []
    for step in range(2, STEPS):
        loss = loss_at(model, step)
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler)
        losses.append(mean_loss(loss))
    assert losses == pytest.approx(json.loads((folder / "losses.json").read_text()), rel=2e-5)


@pytest.mark.full
def test_tied_weights_have_their_state_under_any_of_their_names(tmp_path, run_on):
    run_on(1, save_tied, folder=tmp_path)
    assert main(["convert", "--trust", "-q", str(tmp_path), str(tmp_path / "out")]) == 0
    run_on(2, resume_tied, folder=tmp_path)


def test_commands_for_own_checkpoints_name_the_one_that_converts_others(written, tmp_path, capsys):
    theirs = written / "torchtitan"
    for arguments in (["verify", theirs], ["diff", theirs, theirs], ["to-dcp", theirs, tmp_path / "out"]):
        assert main(list(map(str, arguments))) == 2
        error = capsys.readouterr().err
        assert "it is a checkpoint of torchtitan" in error
        assert error.endswith(f"Convert it first: fsdp2-strategy convert {theirs / 'step-3'} TARGET --trust\n")
    (tmp_path / "notes.txt").touch()
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "it contains notes.txt" in error and "of this package" not in error and ".metadata" in error


def test_ls_offers_no_data_sets_or_single_ranks_and_reads_steps_only_with_trust(tmp_path, capsys):
    torch.save({"text": ["a"]}, tmp_path / "train.pt")
    torch.save({}, tmp_path / "rank0.pt")
    torch.save({"model": {"weight": torch.ones(2, 2)}, "step": 7}, tmp_path / "ckpt.pt")
    for trust, step in (((), "-"), (("--trust",), "7")):
        assert main(["ls", *trust, str(tmp_path)]) == 0
        _, line, *hint = capsys.readouterr().out.splitlines()
        assert line.split()[:3] == ["-", "ckpt.pt", step] and bool(hint) == (not trust)
    (tmp_path / "ckpt.pt").unlink()
    assert main(["ls", str(tmp_path)]) == 2
    assert "no checkpoint of this package or another system: it contains rank0.pt, train.pt" in capsys.readouterr().err


@pytest.mark.full
def test_sidecars_name_the_class_and_go_into_exports_of_converted_checkpoints(written, tmp_path, capsys, caplog):
    model, side = build("llama"), tmp_path / "side"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    optimizer.step()
    source = tmp_path / "theirs"
    source.mkdir()
    save_file(model.state_dict(), source / "model.safetensors")
    torch.save(optimizer.state_dict(), source / "optimizer.bin")
    torch.save({}, source / "random_states_0.pkl")
    command = ["convert", "--trust", "-q", str(source), str(tmp_path / "out")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert f"{source} has no config.json" in error and "--sidecars" in error
    model.config.save_pretrained(side)
    side_config = json.loads((side / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (side / "config.json").write_text(json.dumps(side_config))
    assert main([*command, "--sidecars", str(side)]) == 0
    ours = tmp_path / "out/global_step1"
    assert json.loads((ours / "model/config.json").read_text()) == side_config
    assert main(["convert", "--trust", "-q", str(written / "nested"), str(tmp_path / "bare")]) == 0
    with caplog.at_level("WARNING", "fsdp2_strategy"):
        assert main(["export", str(tmp_path / "bare"), str(tmp_path / "unloadable")]) == 0
    assert "without which from_pretrained fails. Pass --sidecars" in caplog.text
    assert main(["export", str(tmp_path / "bare"), str(tmp_path / "model"), "--sidecars", str(side)]) == 0
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    stored = load_file(tmp_path / "bare/global_step3/model/model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in loaded.state_dict().items() if name in stored)
