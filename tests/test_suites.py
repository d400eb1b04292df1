"""The command that runs TRL's and transformers' own suites with our trainers, on a suite of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.suites import run

pytest.importorskip("trl")

TESTS = Path(__file__).parent

SUITE = """
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def trainer(folder, **arguments):
    config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **config))
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32, (4, 6))]
    args = TrainingArguments(str(folder), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **arguments)
    return Trainer(model, args, train_dataset=data)


def test_a_step(tmp_path):
    made = trainer(tmp_path)
    made.train()
    assert made.state.global_step == 1


def test_which_trainer(tmp_path):
    assert not hasattr(trainer(tmp_path), "strategy")


def test_refused(tmp_path):
    trainer(tmp_path, auto_find_batch_size=True).train()


def test_that_always_fails():
    raise ValueError("needs a network")
"""


def command(*arguments, **variables):
    path = os.pathsep.join((str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    environment = {name: value for name, value in environment.items() if value is not None}
    line = [sys.executable, "-m", "helpers.suites.run", *arguments]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_the_command_reports_expected_and_unexpected_differences(tmp_path):
    files = tmp_path / "transformers" / "tests" / "trainer"
    files.mkdir(parents=True)
    (files / "test_trainer.py").write_text(SUITE)
    (files / "test_trainer_fsdp.py").write_text("raise RuntimeError")  # of another way to shard: left out
    done = command("transformers", FSDP2_PEERS=str(tmp_path))
    assert "1 of the 3 tests that pass with its trainers pass with ours" in done.stdout, done.stdout + done.stderr
    assert "UNEXPECTED: tests/trainer/test_trainer.py::test_which_trainer" in done.stdout
    assert "expected: tests/trainer/test_trainer.py::test_refused" in done.stdout
    assert "that_always_fails" not in done.stdout.split("pass with ours")[1]
    assert done.returncode == 1
    done = command("transformers", "-k", "not which", FSDP2_PEERS=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_suites_without_a_checkout_are_skipped_by_name():
    done = command(FSDP2_PEERS=None)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [line.partition(" is not run")[0] for line in lines] == [
        "skipped: huggingface/trl",
        "skipped: huggingface/transformers",
    ]


def test_each_rule_has_a_reason_and_is_found():
    for row in json.loads(run.EXPECTED.read_text()):
        assert set(row["suite"].split()) <= set(run.FILES) and row["reason"] and row["failure"]
    theirs = {"a": ("passed", ""), "b": ("passed", ""), "c": ("failed", "x"), "d": ("passed", "")}
    ours = {"a": ("passed", ""), "b": ("failed", "cannot search hyper-parameters: ..."), "c": ("failed", "x")}
    found = run.differences("transformers", theirs, ours)
    assert found["b"][1] and found["d"] == ("the test did not run", None) and set(found) == {"b", "d"}
