"""The meter's figures are what a clock says, over all ranks; each shortage is said, once, and nothing else."""

from __future__ import annotations

import logging
import re

import pytest
import torch.distributed as dist
from shortages import shortages, warn_of_shortages

from fsdp2_strategy.tracking.throughput import Throughput

ENOUGH = {
    "ranks": 4,
    "local_ranks": 2,
    "global_batch_size": 32,
    "lanes": 8,
    "pool": 64,
    "episodes": 64,
    "batches": 100,
    "num_workers": 4,
    "cores": 8,
}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def batches_after(clock, *waits):
    for wait in waits:
        clock.now += wait
        yield wait


def measured(meter, clock, waits, *, frames, step_seconds):
    for _ in meter.over(batches_after(clock, *waits)):
        clock.now += step_seconds
        meter.count(frames)


@pytest.mark.ranks(2)
def test_the_total_is_all_ranks_frames_over_the_longest_time():
    rank, clock = dist.get_rank(), Clock()
    meter = Throughput(clock)
    # Rank 1 is slower and has fewer frames: 20 in 8 seconds, of which it waits 3; rank 0 has 40 in 4, and waits 1.
    measured(meter, clock, (5.0 + rank, 0.5 + rank, 0.5 + rank), frames=20 - 10 * rank, step_seconds=1.5 + rank)
    rates = meter.lap()
    assert [r.frames for r in rates.ranks] == [40, 20]
    assert [r.seconds for r in rates.ranks] == [4.0, 8.0]
    assert [r.frames_per_second for r in rates.ranks] == [10.0, 2.5]
    assert rates.frames_per_second == 60 / 8, "neither rank 0's times two, nor the sum of the rates"
    assert [r.waiting_share for r in rates.ranks] == [1 / 4, 3 / 8]
    assert rates.waiting_share == 3 / 8
    assert rates.first_batch_seconds == 6.0
    assert str(rates) == "7.5 frames/s in total, 2.5 to 10.0 a rank, 38% of the time waiting for data"
    assert rates == meter.total()


@pytest.mark.ranks(1)
def test_the_first_step_is_no_part_of_the_rates_and_laps_follow_each_other():
    clock = Clock()
    meter = Throughput(clock)
    before = meter.lap()
    assert before.frames_per_second == before.waiting_share == before.first_batch_seconds == 0.0
    assert str(before) == "no rate before the second step"
    steps = meter.over(batches_after(clock, 7.0, 1.0, 1.0, 2.0))
    seen = []
    for _ in steps:
        clock.now += 3.0
        meter.count(8)
        seen.append(meter.lap().ranks[0])
        clock.now += 4.0  # a save, say
    assert [r.frames for r in seen] == [0, 8, 8, 8]
    assert [r.seconds for r in seen] == [0.0, 4.0, 8.0, 9.0], "what passes between laps belongs to the later one"
    assert [r.waiting_seconds for r in seen] == [0.0, 1.0, 1.0, 2.0]
    assert {r.first_batch_seconds for r in seen} == {7.0}
    [whole] = meter.total().ranks
    assert (whole.frames, whole.seconds, whole.waiting_seconds) == (24, 25.0, 4.0)


@pytest.mark.ranks(1)
def test_a_loader_that_fails_or_ends_is_heard_through_the_meter():
    def failing():
        yield 1
        raise OSError("gone")

    meter = Throughput()
    with pytest.raises(OSError, match="gone"):
        list(meter.over(failing()))
    assert list(meter.over([])) == []


def test_a_run_that_lacks_nothing_is_not_warned():
    assert shortages(**ENOUGH) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"global_batch_size": 30}, "batch of 30 samples is not a multiple of 4 ranks"),
        ({"lanes": 6}, "6 lanes are not a multiple of 4 ranks"),
        (
            {"episodes": 63},
            "63 episodes do not fill the pools of all ranks, 64 .* at most 7 .* per lane, 56 in total",
        ),
        ({"episodes": 5}, "5 episodes do not fill the pools of all ranks, 64 .* with at most 5 lanes"),
        ({"batches": 3}, "4 workers per rank are more than the 3 batches of an epoch"),
        ({"cores": 7}, "4 workers x 2 ranks on a host are more than its 7 cores.*at most 3 per rank"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_shortage_is_said(changed, said):
    [sentence] = shortages(**ENOUGH | changed)
    assert re.search(said, sentence)


@pytest.mark.ranks(2)
def test_what_any_rank_finds_is_logged_once_by_rank_0():
    class Kept(logging.Handler):
        def __init__(self):
            super().__init__()
            self.lines = []

        def emit(self, record):
            self.lines.append((record.levelname, record.getMessage()))

    kept, logger = Kept(), logging.getLogger("fsdp2_strategy")
    logger.addHandler(kept)
    try:
        facts = ENOUGH | {"ranks": 2, "global_batch_size": 33, "cores": 8 - 4 * dist.get_rank()}  # rank 1's host has 4
        found = warn_of_shortages(**facts)
    finally:
        logger.removeHandler(kept)
    assert len(found) == 1 + dist.get_rank()
    assert [level for level, _ in kept.lines] == ["WARNING"] * (2 if dist.get_rank() == 0 else 0)
    if dist.get_rank() == 0:
        assert "33 samples" in kept.lines[0][1] and "4 cores" in kept.lines[1][1]
