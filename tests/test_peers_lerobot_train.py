"""LeRobot's own training script, unedited, with this package's accelerator and checkpoints."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.peers import skip_without_lerobot
from safetensors.torch import load_file

from fsdp2_strategy.lerobot.generate import DatasetWriter

skip_without_lerobot()

THEIRS, OURS = "lerobot.scripts.lerobot_train", "fsdp2_strategy.lerobot.train"
POLICY = {
    "type": "act", "device": "cpu", "push_to_hub": "false", "pretrained_backbone_weights": "null", "dim_model": 32,
    "n_heads": 2, "dim_feedforward": 48, "chunk_size": 8, "n_action_steps": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("lerobot") / "data"
    image = {"dtype": "video", "shape": (64, 64, 3), "names": ["height", "width", "channels"]}
    features = {
        "action": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
        "observation.state": {"dtype": "float32", "shape": (4,), "names": ["a", "b", "c", "d"]},
        "observation.images.top": image,
    }
    with DatasetWriter(root, fps=10, features=features, episodes_per_video_file=2) as writer:
        for length in (30, 25):
            draw = np.random.default_rng(length)
            episode = {"action": draw.normal(size=(length, 3)), "observation.state": draw.normal(size=(length, 4))}
            images = draw.integers(0, 255, (length, 64, 64, 3), dtype=np.uint8)
            numbers = {name: values.astype(np.float32) for name, values in episode.items()}
            writer.add_episode({**numbers, "observation.images.top": images}, task="reach")
    return root


def command(module, *options):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", module, *options]


def options_of(data, out, **more):
    policy = [f"--policy.{name}={value}" for name, value in POLICY.items()]
    run = {
        "dataset.repo_id": "me/data",
        "dataset.root": data,
        "output_dir": out,
        "batch_size": 2,
        "steps": 4,
        "seed": 1,
    }
    run |= {"save_freq": 2, "log_freq": 1, "num_workers": 0, "env_eval_freq": 0, "wandb.enable": "false", **more}
    return [*policy, *(f"--{name}={value}" for name, value in run.items())]


def figures(module, *options):
    """Run a training script; return loss, norm and learning rate of each step as it logs them."""
    run = subprocess.run(command(module, *options), capture_output=True, text=True, timeout=300, check=False)
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-4000:]
    held_out = re.findall(r"step (\d+): eval_loss=(\S+)", output)
    return re.findall(r"step:(\d+) .*?loss:(\S+) grdn:(\S+) lr:(\S+)", output) + held_out


def weights_of(folder):
    return load_file(folder / "pretrained_model/model.safetensors")


def assert_weights_agree(one, other):
    """Compare weights after four steps of at most 1e-5 each, by which rounding moves those without gradient."""
    mine, reference = weights_of(one / "checkpoints/000004"), weights_of(other / "checkpoints/000004")
    assert mine.keys() == reference.keys()
    assert max((mine[name] - reference[name]).abs().max().item() for name in mine) < 1e-5
    differences = torch.cat([(mine[name] - reference[name]).abs().flatten() for name in mine])
    assert differences.mean() < 1e-8


def kill_all_of(folder):
    """Kill the launcher and the ranks of a run, by its folder in their command lines."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


SHARDED, REPLICATED = {"parallelism.dp_shard": 2}, {"parallelism.dp_replicate": 2}


def test_lerobots_script_logs_what_it_logs_without_this_package(data, tmp_path):
    held_out = {"eval_steps": 4, "dataset.eval_split": 0.5}
    ours = figures(OURS, *options_of(data, tmp_path / "ours", **SHARDED, **held_out))
    theirs = figures(THEIRS, *options_of(data, tmp_path / "theirs", **REPLICATED, **held_out))
    assert len(ours) == 5 and ours == theirs, "four steps, and the loss on held-out episodes"
    assert_weights_agree(tmp_path / "ours", tmp_path / "theirs")


def test_gradient_accumulation_is_lerobots(data, tmp_path):
    more = {"accelerator.gradient_accumulation.steps": 2}
    ours = figures(OURS, *options_of(data, tmp_path / "ours", **SHARDED, **more))
    theirs = figures(THEIRS, *options_of(data, tmp_path / "theirs", **REPLICATED, **more))
    assert [(step, loss) for step, loss, *_ in ours] == [(step, loss) for step, loss, *_ in theirs]
    assert_weights_agree(tmp_path / "ours", tmp_path / "theirs")


def test_a_killed_run_resumes_to_the_bit_by_lerobots_command_line(data, tmp_path):
    from lerobot.common.train_utils import load_training_metadata

    figures(OURS, *options_of(data, tmp_path / "whole", **SHARDED))
    killed = tmp_path / "killed"
    run = subprocess.Popen(
        command(OURS, *options_of(data, killed, **SHARDED)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 200
    while not (killed / "checkpoints/last").exists() and time.monotonic() < until:
        time.sleep(0.02)
    kill_all_of(killed)
    run.wait()
    assert not (killed / "checkpoints/000004").exists()
    metadata = load_training_metadata(killed / "checkpoints/last/training_state")
    assert (metadata["step"], metadata["dp_world_size"], metadata["grad_accum_steps"]) == (2, 2, 1)
    assert metadata["parallelism"]["dp_shard"] == 2

    config = killed / "checkpoints/last/pretrained_model/train_config.json"
    resumed = figures(OURS, f"--config_path={config}", "--resume=true")
    assert [step for step, *_ in resumed] == ["3", "4"]
    mine, whole = weights_of(killed / "checkpoints/000004"), weights_of(tmp_path / "whole/checkpoints/000004")
    assert all((mine[name] == whole[name]).all() for name in whole)


def test_what_the_accelerator_lacks_is_an_error_that_names_it(data, tmp_path):
    options = [*options_of(data, tmp_path / "ema", **REPLICATED), "--ema.enable=true"]
    run = subprocess.run(command(OURS, *options), capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode
    assert "its configuration requests --ema.enable, expected none of these" in run.stdout + run.stderr
