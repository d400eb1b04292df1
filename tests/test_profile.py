"""Traces of some optimizer steps, and a snapshot of a full memory: a file per rank, named in the log and in errors."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.logs import recorded
from helpers.models import batch_of, loss_of
from helpers.reference import CountCollectives
from helpers.training import prepared, strategy_for

from fsdp2_strategy import StrategyConfig, backward, optimizer_step
from fsdp2_strategy.distributed import torch_internals
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.errors import CheckpointError, ConfigError, StepError
from fsdp2_strategy.tracking import Profile, memory_snapshot


def take(strategy, trained, steps, micro_batches=1):
    model, optimizer, scheduler = trained
    for step in steps:
        for _ in range(micro_batches):
            strategy.backward(loss_of("llama", model, batch_of("llama", step, dist.get_rank())), model, optimizer)
            strategy.optimizer_step(optimizer, model, scheduler)


def names_in(folder):
    """Return the names of the files in a folder; not before all ranks have written theirs."""
    dist.barrier()
    names = sorted(path.name for path in Path(folder).iterdir())
    dist.barrier()
    return names


def ranges_of(path):
    """Return how often each range of a trace was run."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize(
    ("given", "steps"),
    [("10-13", (10, 13)), (" 2 - 2 ", (2, 2)), ((1, 3), (1, 3)), ([4, 9], (4, 9)), (None, None), (False, None)],
)
def test_steps_are_a_text_or_a_pair(given, steps):
    assert StrategyConfig(profile=given).profile == steps


@pytest.mark.parametrize("given", ["10:13", "13-10", "0-3", "10", 613, True, (1, 2, 3), (1.0, 2.0), "a-b", ""])
def test_other_steps_are_an_error(given):
    with pytest.raises(ConfigError, match=r"profile is .*expected the first and the last optimizer step, such as '10-"):
        StrategyConfig(profile=given)


@pytest.mark.ranks(2)
def test_each_rank_writes_a_trace_of_the_steps(tmp_path):
    folder = tmp_path / "a" / "b"
    with strategy_for(profile="2-3", profile_dir=folder, gradient_accumulation_steps=2) as strategy:
        trained = prepared(strategy)
        with recorded() as log:
            take(strategy, trained, range(3), micro_batches=2)
            strategy.save_ckpt(trained[0], tmp_path / "ckpts")
        assert names_in(folder) == [f"steps_2-3_rank{rank}.pt.trace.json.gz" for rank in range(2)]
        ranges = ranges_of(folder / f"steps_2-3_rank{dist.get_rank()}.pt.trace.json.gz")
        assert {n: c for n, c in ranges.items() if n.startswith("optimizer step ")} == {
            "optimizer step 2": 1,
            "optimizer step 3": 1,
        }
        assert ranges["backward"] == ranges["optimizer_step"] == 4
        assert ranges["FSDP::root_pre_forward"] == 4 and "save_ckpt" not in ranges
        if dist.get_rank() == 0:
            assert any("recording the optimizer steps 2 to 3" in line for line in log)
            assert any(str(folder / "steps_2-3_rank<n>.pt.trace.json.gz") in line for line in log)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
def test_a_run_that_ends_early_writes_the_steps_that_it_took(tmp_path):
    with strategy_for(profile="1-9", profile_dir=tmp_path) as strategy:
        trained = prepared(strategy)
        take(strategy, trained, range(2))
        strategy.save_ckpt(trained[0], tmp_path.parent / "ckpts")
    assert names_in(tmp_path) == [f"steps_1-2_rank{rank}.pt.trace.json.gz" for rank in range(2)]
    ranges = ranges_of(tmp_path / f"steps_1-2_rank{dist.get_rank()}.pt.trace.json.gz")
    assert ranges["save_ckpt"] == 1 and ranges["optimizer_step"] == 2


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize("loop", ["Trainer", "VITRA"])
def test_loops_of_others_write_a_trace_of_the_steps(tmp_path, loop):
    folder = tmp_path / "traces"
    options = {"profile": "2-3", "profile_dir": folder, "log_every_seconds": 0}
    if loop == "VITRA":
        from test_vla_training import run

        strategy, _ = run(tmp_path, "resumable", save_interval=None, config=StrategyConfig(**options))
        strategy.close()
    else:
        from helpers.trainers import launched, trainer_of, write_model

        from fsdp2_strategy.integrations.trl import with_fsdp2

        with launched():
            model = write_model(tmp_path / "model")
            trainer_of("plain", lambda cls: with_fsdp2(cls, **options), model, tmp_path, max_steps=4).train()
    assert names_in(folder) == [f"steps_2-3_rank{rank}.pt.trace.json.gz" for rank in range(2)]
    ranges = ranges_of(folder / f"steps_2-3_rank{dist.get_rank()}.pt.trace.json.gz")
    assert [ranges.get(f"optimizer step {step}", 0) for step in range(1, 5)] == [0, 1, 1, 0]
    assert ranges["backward"] > 0


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_profile import prepared, strategy_for, take
strategy = strategy_for(profile="2-9", profile_dir={folder!r})
take(strategy, prepared(strategy), range(2))
raise ValueError("the loop has failed")
"""


@pytest.mark.full
def test_a_program_that_raises_without_closing_writes_its_trace(tmp_path):
    code = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "the loop has failed" in done.stderr, done.stderr
    assert ranges_of(tmp_path / "steps_2-2_rank0.pt.trace.json.gz")["backward"] == 1


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("saved", "written"), [(2, "3-3"), (4, None), (1, "2-3")])
def test_steps_are_those_of_the_whole_run_across_a_resume(tmp_path, saved, written):
    with strategy_for() as strategy:
        trained = prepared(strategy)
        take(strategy, trained, range(saved))
        strategy.save_ckpt(trained[0], tmp_path / "ckpts")
    first = 2 if written else 1
    with strategy_for(profile=f"{first}-3", profile_dir=tmp_path / "profile") as strategy:
        trained = prepared(strategy)
        with recorded() as log:
            strategy.load_ckpt(trained[0], tmp_path / "ckpts")
            take(strategy, trained, range(saved, saved + 3))
        expected = [f"steps_{written}_rank{rank}.pt.trace.json.gz" for rank in range(2)] if written else []
        assert names_in(tmp_path / "profile") == expected
        said = [line for line in log if "the steps 1 to 3 are not recorded again" in line]
        assert len(said) == (not written and dist.get_rank() == 0), log


@pytest.mark.ranks(2)
def test_a_folder_that_one_rank_cannot_write_is_an_error_on_all_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path if dist.get_rank() == 0 else tmp_path / "file" / "profile"
    with strategy_for(profile="2-3", profile_dir=folder) as strategy:
        with pytest.raises(
            ConfigError, match=r"cannot profile: failed on rank 1: .* is not writable \(Not a directory"
        ):
            prepared(strategy)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
def test_ranks_that_profile_other_steps_are_an_error_on_all(tmp_path):
    steps = "2-3" if dist.get_rank() else None
    with strategy_for(profile=steps, profile_dir=tmp_path) as strategy:
        with pytest.raises(ConfigError, match=r"profile is None on 1 rank \(0\), \(2, 3\) on 1 rank \(1\)"):
            prepared(strategy)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
def test_a_trace_that_one_rank_cannot_write_is_an_error_of_the_next_step_on_all(tmp_path):
    own = tmp_path / str(dist.get_rank())
    with strategy_for(profile="1-1", profile_dir=own) as strategy:
        trained = prepared(strategy)
        if dist.get_rank():
            own.rmdir()
            own.write_text("")
        take(strategy, trained, [0])
        with pytest.raises(StepError, match="failed on rank 1: cannot write the profile of the steps 1 to 1 on rank 1"):
            take(strategy, trained, [1])
        take(strategy, trained, [])


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
def test_another_profiler_that_runs_is_an_error_on_all(tmp_path):
    with strategy_for(profile="1-2", profile_dir=tmp_path) as strategy:
        with torch.profiler.profile():
            trained = prepared(strategy)
            with pytest.raises(StepError, match="cannot begin the profile of the steps 1 to 2 on rank 0"):
                take(strategy, trained, [0])


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
def test_a_loop_without_a_strategy_has_its_own_profile(tmp_path):
    with strategy_for() as strategy:
        model, _, _ = prepared(strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Profile("1-2", tmp_path) as profile:
            for step in range(3):
                backward(loss_of("llama", model, batch_of("llama", step, dist.get_rank())), model)
                profile.step(optimizer_step(optimizer, model))
        assert names_in(tmp_path) == [f"steps_1-2_rank{rank}.pt.trace.json.gz" for rank in range(2)]
        assert ranges_of(tmp_path / "steps_1-2_rank0.pt.trace.json.gz")["optimizer_step"] == 2


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
def test_a_profile_adds_no_collective_and_there_is_none_when_off(tmp_path):
    counts = []
    for steps in (None, "2-9"):
        with strategy_for(profile=steps, profile_dir=tmp_path) as strategy:
            trained = prepared(strategy)
            with CountCollectives() as collectives:
                take(strategy, trained, [0])
            assert (strategy._profile is None) == (steps is None)
            counts.append(collectives.counts)
    assert counts[0] == counts[1]


def fails_to_allocate(observers, wanted=3_000_000_000):
    """Do what torch does if memory is full: call the observers, then raise."""
    for observer in observers:
        observer(0, wanted, 80_000_000_000, 1_000_000)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.79 GiB.")


class RecordsAllocations:
    """Pretend that torch records the allocations of this process."""

    def __init__(self):
        self.observers, self.is_on = [], []

    def __enter__(self):
        recorder = torch_internals.MemoryRecorder(
            record=self.is_on.append,
            dump=lambda path: Path(path).write_text("snapshot"),
            on_out_of_memory=self.observers.append,
        )
        names = {"accelerator_type": lambda: "fake", "memory_recorder": lambda _: recorder}
        self.patch = patch.multiple(memory_snapshot, **names)
        self.patch.start()
        memory_snapshot._observed.clear()
        return self

    def __exit__(self, *_):
        self.patch.stop()


@pytest.mark.ranks(2)
def test_a_full_memory_leaves_a_snapshot_that_the_log_and_all_errors_name(tmp_path):
    with RecordsAllocations() as fake:
        with strategy_for(memory_snapshot=True, profile_dir=tmp_path) as strategy:
            model, _, _ = prepared(strategy)
            assert fake.is_on == [True] and len(fake.observers) == 1
            with recorded() as log:
                with pytest.raises(CheckpointError) as of_ranks:
                    with all_or_none("save", CheckpointError):
                        if dist.get_rank():
                            fails_to_allocate(fake.observers)
            path = tmp_path / "out_of_memory_rank1.pickle"
            assert f"The memory snapshot of this rank is {path}." in str(of_ranks.value)
            if dist.get_rank():
                assert path.read_text() == "snapshot"
                [line] = [line for line in log if "out of memory" in line]
                assert line.startswith("rank 1 is out of memory: 3 GB could not be allocated; the memory snapshot is ")
                assert str(path) in line
            model.model.norm.register_forward_pre_hook(lambda *_: fails_to_allocate(fake.observers))
            with recorded() as log, pytest.raises(torch.OutOfMemoryError) as own:
                loss_of("llama", model, batch_of("llama", 0, 1))
            path = tmp_path / f"out_of_memory_rank{dist.get_rank()}.pickle"
            assert own.value.__notes__ == [f"The memory snapshot of this rank is {path}."]
            assert len(log) == 1 - dist.get_rank()  # rank 1 keeps its first snapshot
        assert fake.is_on == [True, False]


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
def test_a_snapshot_without_an_accelerator_is_an_error_on_all_before_training(tmp_path):
    with strategy_for(memory_snapshot=True, profile_dir=tmp_path) as strategy:
        with pytest.raises(ConfigError, match=r"cannot record memory for memory_snapshot: .*there is none, expected"):
            prepared(strategy)


def test_a_recorder_is_only_where_torch_has_all_parts():
    memory = SimpleNamespace(_record_memory_history=lambda *_, **__: None, _dump_snapshot=lambda path: None)
    with patch("torch.get_device_module", lambda _: SimpleNamespace(memory=memory)):
        assert torch_internals.memory_recorder("odd") is None
        with patch.object(torch._C, "_odd_attachOutOfMemoryObserver", print, create=True):
            assert torch_internals.memory_recorder("odd").on_out_of_memory is print
