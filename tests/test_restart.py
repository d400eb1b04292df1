"""A run under torchrun that loses a rank to SIGKILL resumes by itself, with the losses of an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "train_text.py"


def launch(run_dir, config):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", str(EXAMPLE), "--config", str(config), "--run-dir", str(run_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def logged(run_dir):
    log = run_dir / "losses.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def test_a_killed_run_resumes_by_itself_with_the_same_losses(tmp_path):
    settings = yaml.safe_load(EXAMPLE.with_suffix(".yaml").read_text())
    settings["model"] |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    settings["train"] |= {"steps": 40, "save_every": 8, "sequence_length": 64}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))

    undisturbed = launch(tmp_path / "undisturbed", config)
    output, _ = undisturbed.communicate(timeout=120)
    assert undisturbed.returncode == 0, output[-3000:]

    killed = launch(tmp_path / "killed", config)
    deadline = time.monotonic() + 120
    while len(logged(tmp_path / "killed")) < 20 and time.monotonic() < deadline:
        assert killed.poll() is None, killed.communicate()[0][-3000:]
        time.sleep(0.02)
    os.kill(int((tmp_path / "killed" / "rank1.pid").read_text()), signal.SIGKILL)
    output, _ = killed.communicate(timeout=120)
    assert killed.returncode == 0, output[-3000:]

    expected = {entry["step"]: entry for entry in logged(tmp_path / "undisturbed")}
    entries = logged(tmp_path / "killed")
    assert len(entries) > len(expected) == 40, "some steps ran twice"
    assert all(entry == expected[entry["step"]] for entry in entries)
    assert "resumed from" in output

    again = launch(tmp_path / "killed", config)  # a run that is through has nothing left to train
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0 and logged(tmp_path / "killed") == entries, output[-3000:]
