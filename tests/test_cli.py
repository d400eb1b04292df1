"""The command line: every command on a directory, on one checkpoint and on nothing; text, JSON and exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist
from helpers.training import prepared, strategy_for, train
from safetensors.torch import load_file

from fsdp2_strategy.cli import main

COMMAND = [sys.executable, "-m", "fsdp2_strategy"]


def save_runs(folder):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    for step in range(2):
        train(strategy, model, optimizer, scheduler, [step])
        strategy.save_ckpt(model, folder / "ckpts", max_num=None, client_state={"reward": 0.5})
    strategy.save_ckpt(model, folder / "ckpts", "same", max_num=None)
    strategy.save_ckpt(model, folder / "ckpts", "broken", max_num=None)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "ckpts" / "broken" / "manifest.json").unlink()
        (folder / "ckpts" / "plots").mkdir()


@pytest.fixture
def ckpts(tmp_path, run_on, capsys):
    run_on(2, save_runs, folder=tmp_path)
    capsys.readouterr()
    return tmp_path / "ckpts"


def run(capsys, *arguments):
    """Return the exit status, and what was written to standard output and standard error."""
    status = main([str(argument) for argument in arguments])
    return (status, *capsys.readouterr())


def test_ls_and_verify_show_what_is_unusable_and_why(ckpts, capsys):
    status, out, _ = run(capsys, "ls", ckpts)
    assert status == 1
    head, *usable, broken = out.splitlines()
    assert head.split() == ["seq", "checkpoint", "step", "size", "modified"]
    assert head.index("modified") == usable[0].index(" 20") + 1, "the titles stand above their columns"
    assert [line.split()[1] for line in usable] == ["global_step1", "global_step2", "same"]
    assert "broken" in broken and "UNUSABLE: manifest.json: No such file" in broken and "plots" not in out
    status, out, _ = run(capsys, "verify", "-q", ckpts)
    assert status == 1 and out.splitlines()[0] == f"{ckpts / 'broken'}: 1 problem" and "same" not in out
    assert run(capsys, "ls", "-q", ckpts)[1] == f"{broken}\n"
    assert run(capsys, "ls", ckpts / "same")[0] == run(capsys, "verify", ckpts / "same")[0] == 0
    assert run(capsys, "verify", ckpts / "broken")[0] == run(capsys, "ls", ckpts / "broken")[0] == 1


def test_json_is_one_document(ckpts, capsys):
    status, out, _ = run(capsys, "ls", "--json", ckpts)
    entries = {entry["tag"]: entry for entry in json.loads(out)}
    assert status == 1 and entries["broken"]["problem"].startswith("manifest.json") and entries["same"]["step"] == 2
    [report] = json.loads(run(capsys, "verify", "--json", ckpts / "same")[1])
    assert report == {"path": str(ckpts / "same"), "ok": True, "problems": [], "extra": [], "deleted": False}
    [content] = json.loads(run(capsys, "inspect", "--json", ckpts, "--tag", "global_step1")[1])
    assert (content["step"], content["ranks"], content["client_state"]) == (1, 2, {"reward": 0.5})
    assert content["optimizer"]["class"] == "AdamW"
    assert content["written_by"] == f"fsdp2_strategy {version('fsdp2_strategy')}"
    assert content["tensor_count"] == 84 and content["bytes_by_dtype"] == {"float32": 260052}
    names = [tensor["name"] for tensor in content["tensors"]["model"]]
    assert "model.norm.weight" in names and content["components"]["model"]["tensors"] == len(names)


def test_inspect_shows_the_newest_usable_checkpoint(ckpts, capsys):
    status, out, _ = run(capsys, "inspect", ckpts)
    first, writer, step, files, content, *_ = out.splitlines()
    assert status == 0 and first == str(ckpts / "same") and "class=AdamW" in out
    assert writer == f"written by       fsdp2_strategy {version('fsdp2_strategy')}"
    assert step == "step             2, saved on 2 ranks, each parameter split over 2"
    assert re.fullmatch(r"files            \d+ kB, modified 20[-\d]+ \d\d:\d\d", files)
    for untidy in ("lr_lambdas", "_is_initial", "_step_count", "anchor", "[]", "loss scale", "metric", "protected"):
        assert untidy not in out, untidy
    assert content == "content          21,664 parameters in 84 tensors: 260 kB float32"
    assert "  optimizer      63 tensors, 43,349 elements, 173 kB\n" in out and "model.norm.weight" not in out
    out = run(capsys, "inspect", ckpts, "--tensors")[1]
    assert "  model.norm.weight  float32  [32]" in out and "  model.embed_tokens.weight  " in out
    out = run(capsys, "inspect", ckpts, "--tensors", "*norm*")[1]
    assert "  model.norm.weight  float32  [32]" in out and "embed_tokens" not in out
    assert out.startswith(f"{ckpts / 'same'}\n\nmodel: ") and "written by" not in out
    status, _, err = run(capsys, "inspect", ckpts, "--tag", "global_step3")
    assert status == 2 and "expected one of" in err and "Did you mean 'global_step" in err


@pytest.mark.full
def test_diff_names_the_tensors_that_differ_and_by_how_much(ckpts, capsys):
    status, out, _ = run(capsys, "diff", ckpts / "global_step2", ckpts / "same")
    assert status == 0 and out.endswith(" equal, 0 different\n")
    status, out, _ = run(capsys, "diff", ckpts / "global_step1", ckpts)
    summary, *lines = out.splitlines()
    assert status == 1 and "model: model.norm.weight: " in out and "relative norm of the difference" in out
    assert summary.startswith("0 tensors equal, 84 different; largest difference 1, in optimizer: state.")
    norms = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(lines) == 84 and norms == sorted(norms, reverse=True)
    found = re.fullmatch(r".*; largest relative norm of a difference (.*), in (.*)", summary)
    assert float(found[1]) == norms[0] and lines[0].startswith(found[2])
    entries = {
        entry["name"]: entry for entry in json.loads(run(capsys, "diff", "--json", ckpts / "global_step1", ckpts)[1])
    }
    assert 0 < entries["model: model.norm.weight"]["max_abs"] < 0.1
    assert entries["optimizer: state.model.norm.weight.step"]["max_abs"] == 1.0


def test_an_export_of_a_directory_is_that_of_its_newest_checkpoint(ckpts, tmp_path, capsys):
    status, out, _ = run(capsys, "export", ckpts, tmp_path / "out")
    assert status == 0 and f"exported {ckpts / 'same'} to" in out and (tmp_path / "out" / "config.json").exists()
    status, out, _ = run(capsys, "export", ckpts, tmp_path / "1", "--tag", "global_step1", "--dtype", "bf16", "--json")
    first = {"path": str(ckpts / "global_step1"), "output": str(tmp_path / "1"), "dtype": "bfloat16"}
    assert status == 0 and json.loads(out) == [first]
    assert {tensor.dtype for tensor in load_file(tmp_path / "1/model.safetensors").values()} == {torch.bfloat16}


def change(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_an_export_compares_every_file_that_it_copies_with_its_checksum(ckpts, tmp_path, capsys):
    model = ckpts / "same/model"
    (model / "README.md").write_text("added by a person")
    for number, name in enumerate(("config.json", "generation_config.json", "model.safetensors")):
        kept = (model / name).read_bytes()
        change(model / name)
        status, _, error = run(capsys, "export", ckpts, tmp_path / f"out{number}")
        assert status == 2 and str(model / name) in error and "corrupt" in error
        assert not (tmp_path / f"out{number}").exists()
        (model / name).write_bytes(kept)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": config["rms_norm_eps"] * 2}))
    assert run(capsys, "export", ckpts, tmp_path / "out")[0] == 2
    (model / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    assert run(capsys, "export", ckpts, tmp_path / "out")[0] == 0
    assert json.loads((tmp_path / "out/config.json").read_text()) == config
    assert not (tmp_path / "out/README.md").exists(), "the manifest does not list it"


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("command", ["inspect", "diff", "export"])
def test_names_of_tensors_that_were_exchanged_are_corruption(ckpts, tmp_path, capsys, command):
    path = ckpts / "same/model/model.safetensors"
    content = path.read_bytes()
    swapped = content.replace(b"q_proj", b"_____1").replace(b"o_proj", b"q_proj").replace(b"_____1", b"o_proj")
    path.write_bytes(swapped)
    extra = {"export": [tmp_path / "out"], "diff": [ckpts / "global_step1"], "inspect": []}[command]
    status, _, error = run(capsys, command, ckpts, *extra)
    assert swapped != content and status == 2 and "corrupt" in error


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("command", ["ls", "verify", "inspect", "export"])
def test_without_a_checkpoint_every_command_says_what_there_is(ckpts, tmp_path, capsys, command):
    extra = [tmp_path / "out"] if command == "export" else []
    (tmp_path / "empty").mkdir()
    for path, said in (
        (tmp_path, f"There are checkpoints in {ckpts}."),
        (tmp_path / "no", "does not exist"),
        (tmp_path / "empty", "it is empty"),
    ):
        status, out, err = run(capsys, command, path, *extra)
        assert status == 2 and not out and said in err, err


def test_ls_does_not_import_torch_and_answers_at_once(ckpts):
    code = "import sys; from fsdp2_strategy.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    begin = os.times()
    assert (
        subprocess.run([sys.executable, "-c", code, "ls", str(ckpts)], capture_output=True, check=False).returncode == 0
    )
    end = os.times()
    spent = end.children_user + end.children_system - begin.children_user - begin.children_system
    assert spent < 2, "0.3 s of a processor; a busy machine takes longer"


@pytest.mark.full
def test_a_closed_pipe_is_no_error(ckpts):
    listing = subprocess.Popen([*COMMAND, "inspect", str(ckpts)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    listing.stdout.close()
    assert listing.stderr.read() == b"" and listing.wait() == 0
    listing.stderr.close()


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("command", ["diff", "ls", "verify"])
def test_a_closed_pipe_does_not_hide_the_status(ckpts, command):
    arguments = ["diff", ckpts / "global_step1", ckpts / "global_step2"] if command == "diff" else [command, ckpts]
    listing = subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    listing.stdout.close()
    assert b"Broken" not in listing.stderr.read() and listing.wait() == 1
    listing.stderr.close()


def test_the_version_and_the_help_of_every_argument(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"fsdp2-strategy {version('fsdp2_strategy')}\n"
    for command in ("ls", "verify", "inspect", "diff", "export", "to-dcp"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        lines = capsys.readouterr().out.splitlines()
        arguments = [line for line in lines if line.startswith("  ") and not line.startswith("     ")]
        assert all(len(line.split(maxsplit=1)) == 2 for line in arguments), arguments
