"""The tutorials are true: their code and their commands run, and their links lead somewhere."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.versions import needs_split_layers
from helpers.worlds import some

from fsdp2_strategy.cli.parser import _parser

pytestmark = pytest.mark.each

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PROGRAMS = ("torchrun", "python", "sbatch", "fsdp2-strategy")

# Options that make the run of a script small; the last value of an option counts.
GRPO = "--steps 1 --warm-start-steps 2 --rollout-batch-size 8 --train-batch-size 16 --micro-train-batch-size 4"
SMALL = {
    "sft.py": "--steps 2",
    "trainer_sft.py": "--config trainer.yaml",
    "grpo.py": f"{GRPO} --n-samples-per-prompt 4",
    "train_vla.py": "--steps 2 --episodes 4 --batch-size 8 --eval-interval 2 --eval-episodes 4 --save-interval 2",
    "train_streaming.py": "--steps 2 --batch_size 2 --num_workers 0",
}
# Commands of minutes: `make test-full` runs these scripts in other tests.
LONG = ("docs/examples/robot.py", "runs/grpo/check", "docs/examples/ray_grpo.py")


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(page):
    """Return the commands of a page, each as a list of arguments."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = re.sub(r" *\\\n *", " ", text).splitlines()
    return [shlex.split(line) for line in lines if line.startswith("    ") and line.split()[0] in PROGRAMS]


def script_of(command):
    """Return the script of a command and its arguments; None for a command without one."""
    where = [
        i for i, argument in enumerate(command) if argument.startswith("docs/examples/") and argument.endswith(".py")
    ]
    return (Path(command[where[0]]), command[where[0] + 1 :]) if where else None


def is_runnable(command):
    """Whether a command needs neither the user's files, nor GPUs, nor SLURM, nor minutes."""
    text = shlex.join(command)
    is_own = any(part in text for part in ("/models/", "/shared/", "hub", "--nproc-per-node 8", "streaming_droid"))
    return command[0] != "sbatch" and not is_own and not any(part in text for part in LONG)


def test_there_are_tutorials_with_commands_of_each_kind():
    assert [page.stem for page in PAGES] == ["long_sequences", "other_hardware", "rlhf", "robots", "sft"]
    found = [command[0] for page in PAGES for command in commands(page)]
    assert set(found) == set(PROGRAMS)
    assert all(any(map(is_runnable, commands(page))) for page in PAGES)
    assert all(60 <= len(page.read_text().splitlines()) <= 120 for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_tutorial_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]*))?\)", page.read_text())
    assert len(links) >= 3
    for target, anchor in links:
        text = (page.parent / target).read_text()
        headings = [re.sub(r"[^\w -]", "", line.strip("# ").lower()).replace(" ", "-")
                    for line in text.splitlines() if line.startswith("#")]  # fmt: skip
        assert not anchor or anchor in headings, (target, anchor)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_scripts_accept_the_options_in_a_tutorial(page, monkeypatch):
    """Each command is parsed by its program; the files that it names under docs/ exist."""
    monkeypatch.chdir(ROOT)
    for command in commands(page):
        assert all(Path(argument).exists() for argument in command if argument.startswith("docs/")), command
        if command[0] == "fsdp2-strategy":
            _parser().parse_args(command[1:])
            continue
        script, options = script_of(command)
        if script.stem == "ray_grpo":
            pytest.importorskip("ray")
        module = importlib.import_module(script.stem)
        strict = argparse.ArgumentParser.parse_args
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", _known(strict))
        (getattr(module, "arguments", None) or module.parse)(options)
        monkeypatch.undo()
        monkeypatch.chdir(ROOT)


def _known(strict, original=argparse.ArgumentParser.parse_known_args):
    """Return a ``parse_known_args`` that fails for options that no parser knows, unless the caller passes them on."""

    def parse(self, args=None, namespace=None):
        parsed, unknown = original(self, args, namespace)
        passes_on = self.epilog is not None and "Other options" in self.epilog
        assert not unknown or passes_on or "--config" not in self._option_string_actions, unknown
        return parsed, unknown

    return parse


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["sft", "rlhf", "other_hardware"])
def test_the_code_of_a_tutorial_runs(name, tmp_path):
    os.chdir(tmp_path)
    names, found = {}, blocks(ROOT / "docs" / "tutorials" / f"{name}.md")
    assert found
    for block in found:
        exec(compile(block, name, "exec"), names)


@pytest.mark.ranks(2)
def test_the_code_of_the_tutorial_on_long_sequences_runs(tmp_path):
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    os.chdir(folder[0])
    names = {}
    for block in blocks(ROOT / "docs" / "tutorials" / "long_sequences.md"):
        exec(compile(block, "long_sequences", "exec"), names)
    assert names["result"].stepped
    assert "sequence_parallel_size: 2" in Path("long.yaml").read_text()


def run(command, folder):
    """Run a command of a tutorial in a folder, in a small form."""
    found = script_of(command)
    if found is not None:
        script, options = found
        command = [*command, *shlex.split(SMALL.get(script.name, ""))]
        if script.name == "sft.py" and "--config" not in options:
            command += ["--config", "small.yaml"]
        if "runs/hardware" in options and "60" in options:  # it continues the command before it
            command += ["--steps", "3"]
    programs = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "python": [sys.executable],
        "fsdp2-strategy": [sys.executable, "-m", "fsdp2_strategy"],
    }
    command = [*programs[command[0]], *command[1:]]
    command = [argument.replace("docs/examples", str(ROOT / "docs" / "examples")) for argument in command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture
def place(tmp_path):
    """Return a folder with small configurations, under the names that commands use."""
    settings = (ROOT / "docs" / "examples" / "trainer_sft.yaml").read_text()
    (tmp_path / "trainer.yaml").write_text(settings.replace("max_steps: 60", "max_steps: 2"))
    settings = (ROOT / "docs" / "examples" / "sft.yaml").read_text().replace("every: 50", "every: 1")
    (tmp_path / "small.yaml").write_text(settings)
    (tmp_path / "long.yaml").write_text(settings.replace("  bf16: false", "  bf16: false\n  sequence_parallel_size: 2"))
    return tmp_path


@pytest.mark.timeout(1800)
@needs_split_layers
@pytest.mark.parametrize(
    "page", some(PAGES, (), full=[p for p in PAGES if p.stem == "sft"]), ids=lambda page: page.stem
)
def test_the_commands_of_a_tutorial_run(page, place, run_on):
    if page.stem == "sft":
        pytest.importorskip("trl")
    if page.stem == "other_hardware":  # its code writes the folders that its commands read
        run_on(1, run_blocks, page=page, folder=place)
    printed = []
    for command in filter(is_runnable, commands(page)):
        printed.append(run(command, place))
    if page.stem in ("sft", "long_sequences", "other_hardware"):
        assert any("from_pretrained opens it" in text for text in printed)
    if page.stem == "robots":
        run_on(1, run_blocks, page=page, folder=place)


def run_blocks(page, folder):
    os.chdir(folder)
    names = {}
    for block in blocks(page):
        exec(compile(block, page.stem, "exec"), names)
