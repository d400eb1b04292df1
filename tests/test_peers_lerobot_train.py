"""LeRobot's own training script, unedited, with this package's accelerator and checkpoints."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.peers import LACKS_ACCELERATOR, has_accelerator, skip_without_lerobot
from lerobot_writer import DatasetWriter
from safetensors.torch import load_file

skip_without_lerobot()
pytestmark = pytest.mark.skipif(not has_accelerator(), reason=LACKS_ACCELERATOR)

THEIRS, OURS = "lerobot.scripts.lerobot_train", "fsdp2_strategy.integrations.lerobot.train"
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


def weights_of(checkpoint, folder="pretrained_model"):
    return load_file(checkpoint / folder / "model.safetensors")


def assert_weights_agree(one, other, folder="pretrained_model"):
    """Compare weights after four steps. Rounding moves a weight without gradient by up to 1e-5 per step, either way."""
    mine, reference = (weights_of(run / "checkpoints/000004", folder) for run in (one, other))
    assert mine.keys() == reference.keys()
    assert max((mine[name] - reference[name]).abs().max().item() for name in mine) < 2 * 4 * 1e-5
    differences = torch.cat([(mine[name] - reference[name]).abs().flatten() for name in mine])
    assert differences.mean() < 1e-7


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


def resumed_to_the_bit(out, files):
    """Resume a run of four steps from its second; return whether it writes the same files again."""
    checkpoints = out / "checkpoints"
    whole = {file: load_file(checkpoints / "000004" / file) for file in files}
    shutil.rmtree(checkpoints / "000004")
    (checkpoints / "last").unlink()
    (checkpoints / "last").symlink_to("000002")
    figures(OURS, f"--config_path={checkpoints / 'last/pretrained_model/train_config.json'}", "--resume=true")
    again = {file: load_file(checkpoints / "000004" / file) for file in files}
    return all(torch.equal(again[file][name], whole[file][name]) for file in files for name in whole[file])


def test_averaged_weights_are_lerobots_and_resume_to_the_bit(data, tmp_path):
    pytest.importorskip("diffusers")
    more = {"ema.enable": "true", "ema.inv_gamma": 2.0}
    for module, topology, name in ((OURS, SHARDED, "ours"), (THEIRS, REPLICATED, "theirs")):
        figures(module, *options_of(data, tmp_path / name, **topology, **more))
    assert_weights_agree(tmp_path / "ours", tmp_path / "theirs", "pretrained_model_ema")
    averaged = weights_of(tmp_path / "ours/checkpoints/000004", "pretrained_model_ema")
    trained = weights_of(tmp_path / "ours/checkpoints/000004")
    assert any(not torch.equal(averaged[name], trained[name]) for name in trained)
    assert 'enable": true' in (tmp_path / "ours/checkpoints/000004/pretrained_model/train_config.json").read_text()
    files = ["pretrained_model/model.safetensors", "pretrained_model_ema/model.safetensors"]
    assert resumed_to_the_bit(tmp_path / "ours", files)


def test_adapters_train_as_with_lerobot_and_resume_to_the_bit(data, tmp_path):
    figures(OURS, *options_of(data, tmp_path / "base", **SHARDED))
    base = tmp_path / "base/checkpoints/000004/pretrained_model"
    more = {"policy.path": base, "policy.push_to_hub": "false", "peft.r": 2, "peft.target_modules": r".*linear[12]"}
    run = dict(each.removeprefix("--").split("=", 1) for each in options_of(data, tmp_path / "x"))
    run = {name: value for name, value in run.items() if not name.startswith("policy.")} | more
    for module, topology, name in ((OURS, SHARDED, "ours"), (THEIRS, REPLICATED, "theirs")):
        options = {**run, **topology, "output_dir": tmp_path / name}
        figures(module, *(f"--{key}={value}" for key, value in options.items()))
    folder = "checkpoints/000004/pretrained_model/adapter_model.safetensors"
    ours, theirs = load_file(tmp_path / "ours" / folder), load_file(tmp_path / "theirs" / folder)
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)
    assert resumed_to_the_bit(tmp_path / "ours", ["pretrained_model/adapter_model.safetensors"])


ENVIRONMENT = """
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig


class Small(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gym.spaces.Dict({
        "pixels": gym.spaces.Dict({"top": gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)}),
        "agent_pos": gym.spaces.Box(-9, 9, (4,), np.float64),
    })
    action_space = gym.spaces.Box(-9, 9, (3,), np.float32)
    render_mode = "rgb_array"

    def observe(self):
        pixels = np.full((64, 64, 3), 20 * self.count, np.uint8)
        return {"pixels": {"top": pixels}, "agent_pos": np.append(self.position, self.count)}

    def reset(self, *, seed=None, options=None):
        self.position, self.count = np.zeros(3), 0
        return self.observe(), {"is_success": False}

    def step(self, action):
        self.position, self.count = np.clip(self.position + action, -9, 9), self.count + 1
        return self.observe(), float(self.position.sum()), False, False, {"is_success": False}

    def render(self):
        return self.observe()["pixels"]["top"]


gym.register("gym_small/Small-v0", Small, max_episode_steps=10)


@EnvConfig.register_subclass("small")
@dataclass
class SmallConfig(EnvConfig):
    task: str = "Small-v0"
    features: dict = field(default_factory=lambda: {
        "action": PolicyFeature(type=FeatureType.ACTION, shape=(3,)),
        "agent_pos": PolicyFeature(type=FeatureType.STATE, shape=(4,)),
        "pixels/top": PolicyFeature(type=FeatureType.VISUAL, shape=(64, 64, 3)),
    })
    features_map: dict = field(default_factory=lambda: {
        "action": "action", "agent_pos": "observation.state", "pixels/top": "observation.images.top"
    })
    gym_kwargs = {}
"""


def rewards(module, *options):
    """Run a training script; return the losses, and the rewards of each evaluation, as it logs them."""
    run = subprocess.run(command(module, *options), capture_output=True, text=True, timeout=300, check=False)
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-4000:]
    found = re.findall(r"Suite overall aggregated: .*?'avg_sum_reward': (\S+),", output)
    return re.findall(r"step:(\d+) .*?loss:(\S+)", output), [float(each) for each in found]


@pytest.mark.parametrize("averages", [False, True])
def test_a_sharded_policy_is_evaluated_in_the_environment_as_with_lerobot(data, tmp_path, monkeypatch, averages):
    pytest.importorskip("gymnasium")
    (tmp_path / "small_environment").mkdir()
    (tmp_path / "small_environment/__init__.py").write_text(ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    more = {"env.discover_packages_path": "small_environment", "env.type": "small", "env_eval_freq": 2}
    more |= {"eval.n_episodes": 2, "eval.batch_size": 2, "eval.use_async_envs": "false"}
    if averages:
        pytest.importorskip("diffusers")
        more |= {"ema.enable": "true", "ema.decay": 0.5, "optimizer_lr": 0.01}
        more["policy.optimizer_lr"] = more.pop("optimizer_lr")
    ours = rewards(OURS, *options_of(data, tmp_path / "ours", **SHARDED, **more))
    theirs = rewards(THEIRS, *options_of(data, tmp_path / "theirs", **REPLICATED, **more))
    assert ours[0] == theirs[0], "an evaluation changes no random number of the training"
    assert len(ours[1]) == 2 and ours[1] == pytest.approx(theirs[1], rel=1e-3)


def test_what_the_accelerator_lacks_is_an_error_that_names_it(data, tmp_path):
    options = [*options_of(data, tmp_path / "lacks", **REPLICATED), "--accelerator.fsdp.ignored_modules=.*model"]
    run = subprocess.run(command(OURS, *options), capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode
    message = "its configuration requests --accelerator.fsdp.ignored_modules, expected none of these"
    assert message in run.stdout + run.stderr
