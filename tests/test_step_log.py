"""The numbers of a step are those of the unsharded model, the log has them, and a slow rank is named."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.log_lines import Lines
from helpers.models import batch_of, build, loss_of
from helpers.reference import CountCollectives, full_tensors
from helpers.worlds import worlds
from torch.utils.flop_counter import FlopCounterMode

from fsdp2_strategy import FSDPV2Strategy, StepResult, StrategyConfig
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.distributed import spent_time
from fsdp2_strategy.errors import ConfigError, StepError
from fsdp2_strategy.tracking import step_log, step_meter
from fsdp2_strategy.tracking.flops import _FORMULAS, FlopCount
from fsdp2_strategy.tracking.peaks import peak_of
from fsdp2_strategy.tracking.step_log import Interval
from fsdp2_strategy.tracking.step_meter import host_of, slowest_rank


def trained(steps=2, name="llama", *, num_training_steps=None, before_step=lambda: None, **config):
    """Train a small model; return the strategy, the model and the result of each step."""
    torch.manual_seed(0)
    strategy = FSDPV2Strategy(config=StrategyConfig(**{"bf16": False, **config}))
    model = strategy.prepare_model(build(name), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    options = {} if num_training_steps is None else {"num_training_steps": num_training_steps}
    scheduler = strategy.create_scheduler(optimizer, "constant", **options)
    results = []
    for step in range(steps):
        before_step()
        for micro in range(strategy.accumulated_gradient):
            batch = batch_of(name, 10 * step + micro, strategy.dp_rank)
            part = strategy.shard_sequence(batch) if strategy.sp_size > 1 else batch
            strategy.backward(loss_of(name, model, part), model, optimizer)
            result = strategy.optimizer_step(optimizer, model, scheduler)
        results.append(result)
    return strategy, model, results


def flops_of_unsharded(ranks):
    """Return the FLOPs of one micro-batch of each rank: by torch's counter, and by hand those of attention on a CPU."""
    model, total = build("llama"), 0
    config = model.config
    for rank in range(ranks):
        batch = batch_of("llama", 0, rank)
        with FlopCounterMode(display=False) as counter:
            loss_of("llama", model, batch).backward()
        rows, length = batch["input_ids"].shape
        attention = 4 * rows * length**2 * config.hidden_size  # two products; five in backward, of which one again
        total += counter.get_total_flops() + round(attention * (1 + 2.5) * config.num_hidden_layers)
    return total


# --- FLOPs -----------------------------------------------------------------------------------------------------------


def check_flops(micro_batches=1, **config):
    strategy, _, results = trained(**config)
    expected = micro_batches * flops_of_unsharded(strategy.dp_size)
    assert [result.model_flops for result in results] == [expected] * len(results)
    strategy.close()
    return expected, results


@pytest.mark.parametrize("world", worlds(1, 2, 3, usual=(2,)))
def test_flops_are_those_of_the_unsharded_model_on_all_ranks(world):
    expected, results = check_flops()
    assert {result.hardware_flops for result in results} == {expected}
    check_flops(2, gradient_accumulation_steps=2)


@pytest.mark.ranks(2)
def test_recomputation_is_no_part_of_model_flops():
    expected, results = check_flops(activation_checkpointing=True, peak_flops=1e12)
    for result in results:
        assert expected < result.hardware_flops < 4 / 3 * expected
    assert results[0].mfu is None
    assert results[1].mfu == pytest.approx(expected / results[1].seconds / 2e12)


@pytest.mark.parametrize(
    ("world", "config"),
    [
        pytest.param(2, {"tensor_parallel_size": 2}, marks=[pytest.mark.ranks(2), pytest.mark.full]),
        pytest.param(4, {"tensor_parallel_size": 2}, marks=[pytest.mark.ranks(4), pytest.mark.full]),
        pytest.param(2, {"compile_blocks": "aot_eager"}, marks=[pytest.mark.ranks(2), pytest.mark.full]),
        pytest.param(2, {"compile_blocks": True}, marks=[pytest.mark.ranks(2), pytest.mark.full]),
    ],
)
@pytest.mark.each
def test_flops_of_split_and_compiled_layers_are_those_of_the_model(world, config):
    check_flops(**config)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_ranks_that_share_sequences_count_their_parts():
    strategy, _, [result, _] = trained(sequence_parallel_size=2)
    assert result.model_flops == pytest.approx(flops_of_unsharded(1), rel=0.1) and result.samples == 2
    strategy.close()


@pytest.mark.full
@pytest.mark.ranks(2)
def test_recomputation_of_compiled_blocks_is_not_known():
    strategy, _, results = trained(compile_blocks="aot_eager", activation_checkpointing=True)
    assert all(result.stepped and result.model_flops is None for result in results)
    strategy.close()


@pytest.mark.ranks(2)
def test_counting_changes_no_value_and_no_random_number():
    def run(seconds):
        torch.manual_seed(7)
        strategy, model, results = trained(name="gpt2", log_every_seconds=seconds)
        drawn = torch.rand(3)
        values = full_tensors(dict(model.named_parameters()))
        strategy.close()
        return values, drawn, [(r.loss, r.grad_norm) for r in results]

    (on, drawn_on, losses_on), (off, drawn_off, losses_off) = run(30.0), run(0.0)
    assert losses_on == losses_off and torch.equal(drawn_on, drawn_off)
    assert all(torch.equal(on[name], off[name]) for name in off)


def test_what_cannot_be_counted_is_unknown_and_no_error():
    def fails(*_, **__):
        raise AssertionError("a shape")

    count, weight = FlopCount(), torch.ones(2, 2, requires_grad=True)
    with patch.dict(_FORMULAS, {torch.ops.aten.mm: fails}), count.counting(is_backward=False):
        assert (weight @ weight).sum() == 8
    assert count.numbers() == (None, None)


def test_products_of_groups_are_counted():
    first, second = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(2, 16, 32, dtype=torch.bfloat16)
    formula = _FORMULAS[torch.ops.aten._grouped_mm]
    assert formula(first, second) == 2 * 8 * 16 * 32
    assert formula(torch.ones(2, 4, 16), second) == 2 * 2 * 4 * 16 * 32
    assert formula(torch.ones(4, 8), torch.ones(8, 6)) == 2 * 4 * 8 * 6


@pytest.mark.parametrize(
    ("name", "dtype", "uses_tf32", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, False, 989),
        ("NVIDIA H100 PCIe", torch.float16, False, 756),
        ("NVIDIA H100 NVL", torch.bfloat16, False, 835),
        ("NVIDIA H200", torch.float32, False, 67),
        ("NVIDIA H200", torch.float32, True, 494.5),
        ("NVIDIA H20", torch.bfloat16, False, 148),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, False, 312),
        ("NVIDIA A10G", torch.bfloat16, False, None),
        ("NVIDIA B200", torch.bfloat16, False, 2250),
        ("NVIDIA GB200", torch.bfloat16, False, 2500),
        ("NVIDIA L40S", torch.bfloat16, False, 362),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, False, 165.2),
        ("AMD Instinct MI300X", torch.bfloat16, False, 1307),
        ("AMD Instinct MI325X", torch.bfloat16, False, 1307),
        ("AMD Instinct MI250X / MI250", torch.float32, True, 47.9),
        ("NVIDIA H100 80GB HBM3", torch.float8_e4m3fn, False, None),
        ("A device of tomorrow", torch.bfloat16, False, None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet(name, dtype, uses_tf32, teraflops):
    expected = None if teraflops is None else pytest.approx(teraflops * 1e12)
    assert peak_of(name, dtype, uses_tf32=uses_tf32) == expected


# --- samples and times -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", worlds(1, 2, 3, 4, usual=(2,)))
def test_samples_and_tokens_of_all_ranks_are_counted(world):
    strategy, _, results = trained(gradient_accumulation_steps=2)
    assert [result.samples for result in results] == [2 * 2 * world] * 2
    strategy.close()


@pytest.mark.full
@pytest.mark.ranks(4)
def test_ranks_that_share_layers_count_their_samples_once():
    strategy, _, results = trained(tensor_parallel_size=2)
    assert [result.samples for result in results] == [2 * 2] * 2
    strategy.close()


@pytest.mark.ranks(2)
def test_a_given_number_of_samples_replaces_the_size_of_the_batch():
    strategy, model, _ = trained(steps=0)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    for given, expected in ((3 + dist.get_rank(), 7), (torch.tensor(5), 10)):
        strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model, num_samples=given)
        assert strategy.optimizer_step(optimizer, model).samples == expected
    with pytest.raises(StepError, match="num_samples is -1"):
        strategy.backward(loss_of("llama", model, batch_of("llama", 0, 0)), model, num_samples=-1)
    strategy.close()


@pytest.mark.ranks(2)
def test_times_and_memory_are_equal_on_all_ranks_and_saves_are_measured(tmp_path):
    loader, rank = ResumableLoader(range(100), 4), dist.get_rank()

    def draw():
        with spent_time.data:
            time.sleep(0.04 * rank)
        next(iter(loader))

    strategy, model, [first, second] = trained(before_step=draw)
    assert first.seconds is None and first.memory_allocated_bytes > 1e7 and first.memory_reserved_bytes is None
    assert 0.02 <= second.data_seconds <= second.seconds, "the mean of 0 and 0.04"
    strategy.save_ckpt(model, tmp_path / "ckpts")
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, rank)), model)
    third = strategy.optimizer_step(optimizer, model)
    assert 0 < third.save_seconds <= third.seconds and second.save_seconds == 0
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [vars(result) for result in (first, second, third)])
    assert of_ranks[0] == of_ranks[1]
    strategy.close()


def test_a_wait_within_another_counts_once_and_batches_are_those_of_the_loader():
    timer, now = spent_time.Timer(), iter((1.0, 4.0))
    with patch.object(spent_time, "time", SimpleNamespace(perf_counter=lambda: next(now))), timer, timer:
        pass
    assert timer.seconds == 3.0 and timer.is_used
    assert list(timer.timed([1, 2])) == [1, 2]


# --- the line --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_rank_0_logs_the_first_step_and_every_so_many_steps():
    with Lines() as log:
        strategy, _, results = trained(steps=7, log_every_steps=3, num_training_steps=10, peak_flops=1e9)
        strategy.close()
    if dist.get_rank():
        assert log.of_steps() == []
        return
    first, third, sixth, last = log.of_steps()
    assert first.startswith(f"step 1/10: loss {results[0].loss:.4f}, grad norm {results[0].grad_norm:.3f}, lr 1.00e-03")
    assert "samples/s" not in first and "memory" in first
    interval = Interval()
    for result in results[1:3]:
        interval.add(result, 2e9)
    numbers = interval.numbers()
    assert numbers["samples_per_second"] == pytest.approx(8 / (results[1].seconds + results[2].seconds))
    flops, seconds = results[1].model_flops + results[2].model_flops, results[1].seconds + results[2].seconds
    assert numbers["mfu"] == pytest.approx(flops / seconds / 2e9)
    assert third == f"step 3/10: {interval.text(10)}"
    assert "MFU" in third and "s/step" in third and third.endswith(" left")
    assert sixth.startswith("step 6/10: ") and last.startswith("step 7/10: ")


@pytest.mark.ranks(2)
def test_a_line_is_written_when_its_time_has_come():
    now = [0.0]

    def wait():
        now[0] += 10.0 if dist.get_rank() == 0 else 1000.0  # only the clock of rank 0 decides

    with Lines() as log, patch.object(step_meter, "clock", lambda: now[0]):
        strategy, _, results = trained(steps=9, log_every_seconds=25.0, before_step=wait)
        strategy.close()
    assert [result.seconds for result in results] == [None, *[10.0] * 8]
    lines = [line.partition(":")[0] for line in log.of_steps()]
    assert lines == (["step 1", "step 5", "step 8", "step 9"] if dist.get_rank() == 0 else []), log.lines


@pytest.mark.ranks(2)
def test_nothing_is_logged_of_steps_if_the_log_is_off():
    with Lines() as log, patch.object(step_meter, "LEAST_SECONDS", 0.0):
        strategy, _, results = trained(steps=3, log_every_seconds=0)
        strategy.close()
    assert log.of_steps() == [] and log.of_slow_ranks() == []
    assert results[0].model_flops is None and results[0].samples == 4


@pytest.mark.ranks(2)
def test_several_models_have_lines_of_their_own():
    with Lines() as log:
        strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
        for name in ("actor", "critic"):
            model = strategy.prepare_model(build("llama"), is_training=True)
            optimizer = strategy.create_optimizer(model, lr=1e-3)
            strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model)
            strategy.optimizer_step(optimizer, model, name=name)
        strategy.close()
    if dist.get_rank() == 0:
        assert [line.partition(":")[0] for line in log.of_steps()] == ["actor", "critic"]


@pytest.mark.ranks(2)
def test_a_terminal_has_a_bar_and_no_lines():
    with patch.object(sys.stderr, "isatty", lambda: True), patch.object(step_log, "tqdm") as bar, Lines() as log:
        strategy, _, _ = trained(steps=2, num_training_steps=9)
        strategy.close()
    assert log.of_steps() == []
    if dist.get_rank() == 0:
        options = {"total": 9, "desc": "training", "unit": "step", "initial": 0, "dynamic_ncols": True}
        assert bar.call_args.kwargs == options
        assert [call.args for call in bar().update.call_args_list] == [(1,), (1,)]
        assert "loss " in bar().set_postfix_str.call_args.args[0]
        bar().close.assert_called_once()
    else:
        bar.assert_not_called()


def test_the_line_states_recomputation_waits_and_skipped_steps():
    interval = Interval()
    interval.add(result_of(1, None), None)
    interval.add(result_of(2, 4.0, data_seconds=1.5, save_seconds=0.5, model_flops=6e12, hardware_flops=8e12), 4e12)
    interval.add(result_of(2, 4.0, skipped=True, data_seconds=0.5, model_flops=6e12, hardware_flops=8e12), 4e12)
    assert interval.text(100) == (
        "loss 2.0000, grad norm 0.500, lr 1.00e-01, 2 tokens/s, 1.0 samples/s, MFU 37.5%, 50.0% with recomputation, "
        "memory 5 GB (6 GB reserved), data 2.0 s, saves 0.5 s, 4 s/step, 7 min left, 1 skipped"
    )
    assert interval.short_text() == (
        "loss 2.0000, norm 0.50, lr 1.0e-01, 2 tok/s, MFU 38%, 5 GB, data 25%, saves 6%, 1 skipped"
    )
    interval.add(result_of(3, 2.0, tokens=None, samples=None, model_flops=None, hardware_flops=None), 4e12)
    assert interval.numbers().keys() == {
        "seconds_per_step", "save_seconds", "memory_allocated_bytes", "memory_reserved_bytes",
    }  # fmt: skip


def test_an_mfu_above_100_percent_is_warned_of_once(caplog):
    log = step_log.StepLog("lines")
    with caplog.at_level("WARNING", "fsdp2_strategy"):
        for mfu in (1.0, 1.5, 2.0):
            log.add(result_of(2, 2.0, model_flops=mfu * 8e12, hardware_flops=mfu * 8e12), "model", 4e12)
            log.write()
    [record] = caplog.records
    assert "MFU is 150 %" in record.getMessage() and "4e+12 FLOP/s, is too low. Set peak_flops" in record.getMessage()


def result_of(step, seconds, *, skipped=False, **values):
    given = {"loss": 2.0, "lr": 0.1, "grad_norm": 0.5, "tokens": 8, "samples": 4}
    given |= {"memory_allocated_bytes": 5 * 10**9, "memory_reserved_bytes": 6 * 10**9}
    return StepResult(step=step, stepped=not skipped, skipped=skipped, seconds=seconds, **given | values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"log_every_seconds": -1}, "log_every_seconds is -1.0, expected at least 0. 0 logs no steps."),
        ({"log_every_steps": 0}, "log_every_steps is 0, expected an integer of at least 1"),
        ({"peak_flops": 0}, "peak_flops is 0.0, expected more than 0"),
    ],
)
def test_wrong_settings_of_the_log_are_errors(config, message):
    with pytest.raises(ConfigError, match=message):
        StrategyConfig(**config)


# --- collectives and slow ranks --------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_the_log_makes_no_further_collective():
    counts = []
    for config in ({"log_every_seconds": 0}, {"log_every_steps": 1}, {"log_every_seconds": 0.001}):
        with CountCollectives() as counted:
            strategy, _, _ = trained(steps=3, **config)
        strategy.close()
        counts.append(counted.counts)
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.ranks(2)
def test_a_step_that_raises_on_one_rank_leaves_the_ranks_with_equal_exchanges():
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    model = strategy.prepare_model(build("llama"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)

    def step(number):
        strategy.backward(loss_of("llama", model, batch_of("llama", number, dist.get_rank())), model, optimizer)
        return strategy.optimizer_step(optimizer, model)

    with patch.object(optimizer, "step", side_effect=MemoryError if dist.get_rank() else None):
        if dist.get_rank():
            with pytest.raises(MemoryError):
                step(0)
        else:
            step(0)
    meter = strategy._state_of(model).meter
    lengths = [None, None]
    dist.all_gather_object(lengths, len(meter.numbers()))
    assert lengths[0] == lengths[1], lengths
    strategy.close()


@pytest.mark.parametrize(
    ("busy", "expected"),
    [
        ([10.0, 13.0], 1),
        ([13.0, 10.0], 0),
        ([10.0, 11.0], None),
        ([10.0, 10.2, 9.9, 12.0], 3),
        ([10.0, 10.2, 9.9, 11.4], None),
        ([0.1, 0.1, 0.3], None),
        ([5.0], None),
    ],
)
def test_a_rank_is_slow_by_the_median_of_the_others(busy, expected):
    assert slowest_rank(busy, 20.0) == expected


class SharedClock:
    """A clock of all ranks that moves only in `work`: what a busy host adds to their times is not measured."""

    def __init__(self, path):
        self._rank, world = dist.get_rank(), dist.get_world_size()
        if not self._rank:
            path.write_bytes(bytes(8 * (1 + world)))
        dist.barrier()
        self._values = np.memmap(path, dtype=np.float64, mode="r+")

    def __call__(self):
        return float(self._values[0])

    def work(self, seconds):
        """Let time pass once all other ranks wait for this one."""
        others = [1 + rank for rank in range(dist.get_world_size()) if rank != self._rank]
        while not self._values[others].all():
            time.sleep(0.001)
        self._values[0] += seconds

    @contextmanager
    def measures(self):
        begin, end = spent_time.Timer.__enter__, spent_time.Timer.__exit__

        def begin_wait(timer):
            begin(timer)
            self._values[1 + self._rank] = timer is spent_time.other_ranks

        def end_wait(timer, *error):
            self._values[1 + self._rank] = 0
            end(timer, *error)

        with (
            patch.object(step_meter, "clock", self),
            patch.object(spent_time, "time", SimpleNamespace(perf_counter=self)),
            patch.multiple(spent_time.Timer, __enter__=begin_wait, __exit__=end_wait),
        ):
            yield


@pytest.mark.parametrize("world", worlds(2, 3, 4, usual=(2,)))
def test_a_slow_rank_is_named_once_with_its_host(world, tmp_path):
    slow, clock = world - 1, SharedClock(tmp_path / "clock")

    def work():
        if dist.get_rank() == slow:
            clock.work(10.0)

    with Lines() as log, clock.measures():
        strategy, _, _ = trained(steps=5, log_every_steps=1, before_step=work)
        name = host_of(slow)
        strategy.close()
    found = log.of_slow_ranks()
    if dist.get_rank():
        assert found == []
        return
    said = "of the last 10.0 s, it has worked 10.0 s, and the other ranks 0.0 s (median)"
    assert len(found) == 1 and found[0].startswith(f"rank {slow} on {name} is slower than the others: "), log.warnings
    assert said in found[0]


@pytest.mark.ranks(2)
def test_ranks_that_wait_for_the_same_time_are_not_named():
    now = [0.0]

    def wait():
        now[0] += 100.0  # a clock of the test: other processes of this host slow down any rank

    with Lines() as log, patch.object(step_meter, "clock", lambda: now[0]):
        strategy, _, _ = trained(steps=5, log_every_steps=1, before_step=wait)
        strategy.close()
    assert log.of_slow_ranks() == []
