"""The streaming example gives each frame once an epoch through kills and worlds, with the losses of a whole run."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("av")
pytest.importorskip("pyarrow")

import train_streaming
from helpers.http_server import FileServer

from fsdp2_strategy.errors import DataError

EXAMPLE = Path(train_streaming.__file__)
STEPS, BATCH, EPISODES = 20, 16, 4  # an epoch is 7 or 8 steps
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def arguments(output_dir, data, world_size, *others):
    given = {"root": data, "output_dir": output_dir, "steps": STEPS, "batch_size": BATCH // world_size}
    given |= {"save_freq": 3, "log_freq": 1, "episode_pool_size": 2, "n_action_steps": 4, "num_workers": 1}
    return [*(text for name, value in given.items() for text in (f"--{name}", str(value))), "--log_ids", *others]


def run_launched(launcher, script, *options):
    return subprocess.run([*launcher, str(script), *options], capture_output=True, text=True, timeout=240, check=False)


def run_example(arguments):
    """Run the example on ranks of the pool, which have imported torch already."""
    assert train_streaming.main(arguments) == 0


def run_and_die(arguments, batch):
    """Run the example until a batch, and lose all ranks at once, as with a host that fails."""
    train_streaming.Journal.batch = dying_at(batch)
    train_streaming.main(arguments)


def dying_at(last):
    note = train_streaming.Journal.batch

    def noted(journal, number, batch):
        note(journal, number, batch)
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)

    return noted


def lines_of(path):
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def logged(output_dir):
    return lines_of(output_dir / "log.jsonl")


def given(output_dir):
    """Return for each start of a run the samples of the batches that all of its ranks got, in their order."""
    starts = defaultdict(dict)
    for path in output_dir.glob("ids-*.jsonl"):
        _, start, rank = path.stem.split("-")
        starts[int(start)][int(rank)] = {line["batch"]: line["index"] for line in lines_of(path)}
    found = []
    for start in sorted(starts):
        of_ranks = [starts[start][rank] for rank in sorted(starts[start])]
        whole = sorted(set.intersection(*map(set, of_ranks)))
        found.append({batch: [i for of_rank in of_ranks for i in of_rank[batch]] for batch in whole})
    return found


def losses(output_dir):
    return {entry["step"]: (entry["loss"], entry["norm"], entry["lr"]) for entry in logged(output_dir)}


@pytest.fixture(scope="session")
def data(tmp_path_factory, run_on):
    root = tmp_path_factory.mktemp("robot") / "data"
    output_dir = root.parent / "generating"
    run_on(2, run_example, arguments=arguments(output_dir, root, 2, "--generate", str(EPISODES), "--steps", "0"))
    return root


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory, run_on):
    """What an undisturbed run on two ranks writes."""
    output_dir = tmp_path_factory.mktemp("undisturbed")
    run_on(2, run_example, arguments=arguments(output_dir, data, 2))
    return output_dir


@pytest.mark.full
def test_each_epoch_gives_each_frame_once_over_ranks_and_workers(whole, data):
    [batches] = given(whole)
    assert list(batches) == list(range(STEPS)) and {len(ids) for ids in batches.values()} == {BATCH}
    n = json.loads((data / "meta" / "info.json").read_text())["total_frames"]
    ids = [i for batch in batches.values() for i in batch]
    epochs = [ids[begin : begin + n] for begin in range(0, len(ids) - n + 1, n)]
    assert len(epochs) >= 2
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert epochs[0] != epochs[1]


KILLED = """
import sys, train_streaming
from test_streaming import dying_at
train_streaming.Journal.batch = dying_at(8)
train_streaming.main()
"""


@pytest.mark.full
def test_a_run_that_is_killed_on_two_ranks_goes_on_on_one_and_on_three_with_the_same_frames(
    tmp_path, data, whole, run_on
):
    [expected], output_dir = given(whole), tmp_path / "run"
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    paths = os.pathsep.join([str(EXAMPLE.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    run = run_launched(["env", f"PYTHONPATH={paths}", *TORCHRUN, "2"], script, *arguments(output_dir, data, 2))
    assert "SIGKILL" in run.stderr, run.stderr[-3000:]
    shutil.copytree(output_dir, tmp_path / "alike")

    # On as many ranks it goes on to the bit.
    run_on(2, run_example, arguments=arguments(tmp_path / "alike", data, 2))
    assert losses(tmp_path / "alike") == losses(whole)
    assert merged(given(tmp_path / "alike")) == expected

    # --batch_size is a rank's: the global batch stays that of the run.
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_on(1, run_and_die, arguments=arguments(output_dir, data, 2), batch=14)
    run_on(3, run_example, arguments=arguments(output_dir, data, 2))
    starts = given(output_dir)
    first = [min(start) for start in starts]
    assert first[0] == 0 and first[1] in (3, 6) and first[2] in (9, 12), "no start rewinds, whatever was being saved"
    assert [max(start) for start in starts] == [8, 14, STEPS - 1]
    assert merged(starts) == expected
    assert sorted(losses(output_dir)) == sorted(losses(whole))
    for step, numbers in losses(output_dir).items():
        assert numbers == pytest.approx(losses(whole)[step], rel=2e-3), step


def merged(starts):
    """Return what all starts gave by batch, which must be the same wherever two gave a batch."""
    found = {}
    for start in starts:
        for batch, ids in start.items():
            assert found.setdefault(batch, ids) == ids, batch
    return dict(sorted(found.items()))


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_run_that_is_told_to_stop_saves_and_goes_on_with_the_same_losses(tmp_path, data, whole):
    note = train_streaming.Journal.batch

    def stop_at_7(journal, number, batch):
        note(journal, number, batch)
        if number == 7 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_streaming.Journal, "batch", stop_at_7)
        assert train_streaming.main(arguments(tmp_path, data, 2)) == 128 + signal.SIGTERM
    dist.barrier()
    assert [entry["step"] for entry in logged(tmp_path)] == list(range(1, 9))
    assert train_streaming.main(arguments(tmp_path, data, 2)) == 0
    dist.barrier()
    assert [entry["step"] for entry in logged(tmp_path)] == list(range(1, STEPS + 1)), "no step ran twice"
    assert losses(tmp_path) == losses(whole)
    assert [list(start) for start in given(tmp_path)] == [list(range(8)), list(range(8, STEPS))]


@pytest.mark.full
def test_accelerate_starts_it_and_a_dummy_run_loads_the_same_and_trains_nothing(tmp_path, data, whole):
    accelerate = pytest.importorskip("accelerate.commands.launch").__name__
    launcher = [sys.executable, "-m", accelerate, "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    options = arguments(tmp_path, data, 2, "--dummy", "--steps", "12", "--log_freq", "4")
    run = run_launched(launcher, EXAMPLE, *options)
    assert run.returncode == 0, run.stderr[-3000:]
    [expected], [loaded] = given(whole), given(tmp_path)
    assert loaded == {batch: ids for batch, ids in expected.items() if batch < 12}
    reports = logged(tmp_path)
    assert [report["step"] for report in reports] == [4, 8, 12]
    assert all(report["frames_per_second"] > 0 and 0 < report["waiting_share"] <= 1 for report in reports)
    assert all("loss" not in report and report["first_batch_seconds"] > 0 for report in reports)
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "policy").exists()


@pytest.mark.full
def test_a_remote_data_set_gives_the_same_frames_and_leaves_nothing_behind(tmp_path, data, whole, run_on):
    with FileServer(data) as server:
        options = ("--dummy", "--steps", "16", "--cache_dir", str(tmp_path / "cache"))
        run_on(2, run_example, arguments=arguments(tmp_path / "run", server.url, 2, *options))
    assert given(tmp_path / "run") == [{batch: ids for batch, ids in given(whole)[0].items() if batch < 16}]
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.full
def test_the_slurm_script_starts_it_and_puts_what_is_not_through_into_the_queue_again(tmp_path, data):
    commands = {
        "srun": '[ -z "$NO_HOSTS" ] && [ "$SRUN_CPUS_PER_TASK" = 3 ] && exec "$@"',  # what srun takes, not SLURM_…
        "scontrol": f'[ "$1" = show ] && echo localhost || echo "$@" >> {tmp_path}/queue',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    job = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NUM_NODES": "1"}
    job |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "3"}
    options = [str(EXAMPLE.with_suffix(".slurm")), *arguments(tmp_path, data, 1, "--dummy", "--steps", "2")]
    bash = partial(subprocess.run, ["bash", *options], cwd=EXAMPLE.parent.parent.parent, check=False, timeout=240)
    assert bash(env=os.environ | job).returncode == 0
    assert [len(ids) for ids in given(tmp_path)[0].values()] == [BATCH, BATCH]
    assert not (tmp_path / "queue").exists()
    assert bash(env=os.environ | job | {"NO_HOSTS": "1"}).returncode == 1
    assert (tmp_path / "queue").read_text() == f"requeue {os.getpid()}\n"
    assert bash(env=os.environ | job | {"NO_HOSTS": "1", "SLURM_RESTART_COUNT": "20"}).returncode == 1
    assert (tmp_path / "queue").read_text() == f"requeue {os.getpid()}\n"


@contextmanager
def warnings_of_the_log():
    class Kept(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    lines, handler, logger = [], Kept(logging.WARNING), logging.getLogger("fsdp2_strategy")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_what_runs_short_and_what_is_ignored_is_said(tmp_path, data):
    options = arguments(tmp_path, data, 2, "--dummy", "--steps", "2", "--num_workers", "0")
    with warnings_of_the_log() as lines:
        train_streaming.main(options)
        assert not lines
        train_streaming.main([*options, "--buffer_size", "100", "--episode_pool_size", "4"])
    if dist.get_rank() == 0:
        ignored, short = lines
        assert ignored.startswith("--buffer_size is ignored")
        assert short.startswith("4 episodes do not fill the pools of all ranks, 8 in total")


@pytest.mark.full
@pytest.mark.ranks(2)
def test_what_one_rank_cannot_read_ends_all_of_them_by_name(tmp_path, data):
    def unreadable(dataset, i):
        if dist.get_rank() == 1:
            raise OSError(f"sample {i} is gone")
        return read(dataset, i)

    read = train_streaming.LeRobotDataset.__getitem__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_streaming.LeRobotDataset, "__getitem__", unreadable)
        with pytest.raises(DataError, match=r"cannot load a batch: failed on rank 1: OSError: sample .* is gone"):
            train_streaming.main(arguments(tmp_path, data, 2, "--num_workers", "0"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("opened", [1, 2])  # for what it says of itself, and for its frames
def test_what_one_rank_cannot_open_ends_all_of_them_by_name(tmp_path, data, opened):
    def no_room(dataset, *args, **options):
        opens.append(dataset)
        if dist.get_rank() == 1 and len(opens) == opened:
            raise OSError("no room")
        begin(dataset, *args, **options)

    begin, opens = train_streaming.LeRobotDataset.__init__, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_streaming.LeRobotDataset, "__init__", no_room)
        with pytest.raises(DataError, match="cannot open the data set: failed on rank 1: OSError: no room"):
            train_streaming.main(arguments(tmp_path, data, 2))


@pytest.mark.full
@pytest.mark.ranks(1)
def test_a_resume_begins_elsewhere_keeps_its_batch_and_then_goes_on_with_its_own(tmp_path, data, whole):
    own = [*arguments(tmp_path / "own", data, 2), "--resume_from", str(whole / "checkpoints"), "--steps"]
    with warnings_of_the_log() as lines:
        assert train_streaming.main([*own, str(STEPS + 2)]) == 0
    assert lines == ["the run continues with its global batch of 16 samples instead of 8 (--batch_size 8 x 1 ranks)"]
    assert [len(ids) for ids in given(tmp_path / "own")[0].values()] == [BATCH, BATCH]
    assert train_streaming.main([*own, str(STEPS + 3)]) == 0
    assert [entry["step"] for entry in logged(tmp_path / "own")] == [STEPS + 1, STEPS + 2, STEPS + 3], "no step again"
    with pytest.raises(SystemExit, match="contains no checkpoint"):
        train_streaming.main(arguments(tmp_path / "new", data, 1, "--resume_from", str(tmp_path / "nowhere")))


def test_which_data_set_must_be_said(capsys):
    for wrong in ([], ["--repo_id", "a/b", "--generate", "3"], ["--root", "https://a/b", "--generate", "3"]):
        with pytest.raises(SystemExit):
            train_streaming.parse(wrong)
    assert "pass it as --root" in capsys.readouterr().err
    assert train_streaming.parse(["--repo_id", "a/b"]).episode_pool_size == 64
