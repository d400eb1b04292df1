"""Plans cost in proportion to the tensors, and exchanges in proportion to the ranks; calls are counted, not timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import scale_plans
from scale_plans import PLANS, meta_model

from fsdp2_strategy import StrategyConfig
from fsdp2_strategy.sharding.plan import plan_units

TESTS = Path(__file__).parent
TENSORS, RANKS = (39, 156), (8, 512)
CALLS_OF_A_RANK = {"save": 250, "load": 100, "stream": 30}
"""Calls that a plan may make for each rank: rank 0 for its files, which are in the manifest; a stream on CPUs for its
broadcast. torch makes up to three calls for each rank in each other collective."""
BYTES_OF_A_RANK = {"save": 1100, "load": 400}
"""Bytes for each rank that rank 0 may receive."""


@cache
def grown(names, tensors, ranks):
    """Return what `helpers.growth` counts."""
    command = [sys.executable, "-m", "helpers.growth", *map(str, (*tensors, *ranks)), *names]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_growth(name, found, tensors, ranks):
    assert not isinstance(found[name], str), found[name]
    for before, more, spread in zip(*found[name], strict=True):
        for counted in ("python_calls", "c_calls"):
            base, by_tensors, by_ranks = (cost[counted] for cost in (before, more, spread))
            assert by_tensors <= 1.1 * base * tensors[1] / tensors[0], (counted, "with tensors")
            extra = CALLS_OF_A_RANK.get(name, 3 * before["rounds"]) * (ranks[1] - ranks[0])
            assert by_ranks <= 1.1 * base + extra, (counted, "with ranks")
        assert more["rounds"] == spread["rounds"] == before["rounds"]
        assert more["received_bytes"] <= 1.1 * before["received_bytes"], "plans follow from what every rank knows"
        of_a_rank = BYTES_OF_A_RANK.get(name, 32 * before["rounds"])  # digests are compared
        assert spread["received_bytes"] - before["received_bytes"] <= of_a_rank * (ranks[1] - ranks[0])


@pytest.mark.xdist_group("growth")  # one process counts for all plans
@pytest.mark.parametrize("name", PLANS)
def test_calls_grow_in_proportion_to_tensors_and_not_with_ranks(name):
    check_growth(name, grown(tuple(PLANS), TENSORS, RANKS), TENSORS, RANKS)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("name", PLANS)
def test_the_same_for_thousands_of_tensors_and_ranks(name):
    tensors, ranks = (900, 3600), (64, 4096)
    check_growth(name, grown((name,), tensors, ranks), tensors, ranks)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.xdist_group("growth")
def test_a_step_exchanges_few_numbers_at_once(ranks):
    found = grown(("step",), (21, 21), RANKS)["step"]
    _first, cost = found[0 if ranks == RANKS[0] else 2]  # the first step also has numbers of each rank, for the log
    assert cost["rounds"] == 1
    assert cost["received_bytes"] < 400 + 2 * 21, "two bytes per tensor: which have gradients, counted over the ranks"


class Nested(nn.Module):
    """Modules of two dtypes, none of which repeats in a list: all belong to the root unit."""

    def __init__(self, count):
        super().__init__()
        for i in range(count):
            setattr(self, f"linear{i}", nn.Linear(2, 2, bias=False))
            setattr(self, f"norm{i}", nn.LayerNorm(2, bias=False))
            getattr(self, f"linear{i}").weight = self.linear0.weight

    def forward(self, inputs):
        return inputs


MODELS = {
    "ignored": (lambda count: meta_model(9 * count), {"ignored_modules": [r"model\.layers\.\d+\.mlp"]}),
    "one unit": (Nested, {"keep_fp32": ["norm"], "min_unit_params": 10**9}),
    "ties in fp32": (Nested, {"bf16": False}),
}


@pytest.mark.parametrize("name", MODELS)
def test_units_of_uncommon_models_are_planned_in_proportion(name):
    build, options = MODELS[name]
    counted = []
    for count in (30, 120):
        with torch.device("meta"):
            model = build(count)
        config, cost = StrategyConfig(**options), scale_plans.Cost()
        with scale_plans.Meter(cost, counts_calls=True):
            plan_units(model, config, is_training=True)
        counted.append(cost.python_calls + cost.c_calls)
    assert counted[1] <= 4.4 * counted[0]
