"""The rules of NCCL in docs/accelerators.md name the tests that watch them; some are watched here."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.training import prepared, strategy_for, train
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp2_strategy.checkpoint import background_save

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "accelerators.md"
NOT_WATCHED = "not watched"


def rules():
    """Return the rows of the tables of the rules: a rule, what NCCL does, and what watches it."""
    section = PAGE.read_text().split("\n## Rules of NCCL\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if not row[0].startswith(" Rule")]


def test_each_rule_names_tests_that_exist():
    assert len(rules()) > 20
    for rule, _, watch in rules():
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", watch)
        assert named or watch.startswith(NOT_WATCHED), rule
        for file, test in named:
            assert re.search(rf"^def {test}\(", (TESTS / file).read_text(), re.MULTILINE), f"{rule}: {file}::{test}"


class Collectives(TorchDispatchMode):
    """Count the collectives of this thread by the type of device of their tensors."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.counts.update({tensor.device.type for tensor in tensors})
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(2)
def test_the_thread_of_a_save_starts_collectives_of_the_host_only(tmp_path, monkeypatch):
    counted, run = Collectives(), background_save._Save._run

    def counting(save):
        with counted:
            run(save)

    monkeypatch.setattr(background_save._Save, "_run", counting)
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    for step in range(2):
        train(strategy, model, optimizer, scheduler, [step])
        strategy.save_ckpt(model, tmp_path, f"step{step}", async_save=True)
    strategy.wait_for_checkpoint()
    assert counted.counts.keys() == {"cpu"}
