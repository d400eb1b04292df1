"""The strategy in actors of Ray's own runtime: no variables, dead actors that are named and replaced, equal losses."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed: pip install '.[ray]'", allow_module_level=True)

import ray
import ray_grpo
from helpers.training import prepared, train

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.distributed import Rendezvous, RendezvousServer, process_group
from fsdp2_strategy.errors import CheckpointError, MeshError, RolloutError

pytestmark = [
    pytest.mark.full,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),  # of Ray
]

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "docs" / "examples" / "ray_grpo.py"
SECONDS = 120
"""From the death of an actor until each trainer has raised an error, on a machine whose cores other tests use, too."""


@contextlib.contextmanager
def environment():
    """Set what the processes of Ray inherit, and yield a folder for their files; at the end, none of them is left.

    The folder's name must be short: Ray makes sockets in it.
    """
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    path = [ROOT, ROOT / "tests", ROOT / "docs" / "examples"]
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # beside other tests, a nice trainer may take longer than the driver waits for it
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # otherwise Ray writes one into the home folder
    }
    try:
        with patch.dict(os.environ, variables):
            yield Path(folder)
        assert not list(Path(folder).rglob("usage_stats.json")), "Ray collects nothing"
        left = processes_in(folder)
        until = time.monotonic() + 30
        while left and time.monotonic() < until:
            time.sleep(0.1)
            left = processes_in(folder)
        assert not left
    finally:
        for process in processes_in(folder):
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def processes_in(folder):
    """Return the processes of Ray that were started with this folder in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            is_of_ray = re.search(r"ray::|site-packages/ray/", command) and "multiprocessing" not in command
            if is_of_ray and process.environ().get("RAY_TMPDIR") == folder:
                found.append(process)
    return found


@pytest.fixture(scope="module")
def runtime():
    with environment() as folder:
        options = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 * 2**20}
        ray.init(**options, logging_level="ERROR", log_to_driver=False, _temp_dir=str(folder))
        yield
        ray.shutdown()
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            gc.collect()  # processes and sockets that Ray has not closed


# --- actors ----------------------------------------------------------------------------------------------------------


class Rank:
    def join(self, rendezvous):
        """Train in two strategies, one after the other, and return what this process knows of its ranks."""
        losses = []
        for _ in range(2):
            with FSDPV2Strategy(config=StrategyConfig(bf16=False), rendezvous=rendezvous) as strategy:
                model, optimizer, scheduler = prepared(strategy, "mlp")
                losses.append([loss for loss, *_ in train(strategy, model, optimizer, scheduler, range(3), "mlp")])
                ranks = strategy.get_rank(), strategy.world_size, process_group.local_rank()
        assert losses[0] == losses[1]
        launched = [name for name in os.environ if re.match(r"(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_|TORCHELASTIC", name)]
        return ranks, launched, losses[0]

    def join_alone(self, rendezvous):
        FSDPV2Strategy(config=StrategyConfig(timeout_minutes=0.02), rendezvous=rendezvous)


def reference_losses(path):
    with FSDPV2Strategy(config=StrategyConfig(bf16=False)) as strategy:
        model, optimizer, scheduler = prepared(strategy, "mlp")
        losses = [loss for loss, *_ in train(strategy, model, optimizer, scheduler, range(3), "mlp")]
        (path / str(strategy.get_rank())).write_text(repr(losses))


def test_actors_train_without_any_variable_as_ranks_of_a_launcher_do(runtime, run_on, tmp_path):
    server = RendezvousServer(ray.util.get_node_ip_address())
    actors = [ray.remote(num_cpus=0)(Rank).remote() for _ in range(2)]
    error = ray_grpo.error_of(actors[0].join_alone.remote(Rendezvous(server.address, 0, 2)))
    assert type(error) is MeshError and "rank 0 still waits for 1 rank (1)" in str(error)
    calls = [actor.join.remote(Rendezvous(server.address, rank, 2)) for rank, actor in enumerate(actors)]
    run_on(2, reference_losses, path=tmp_path)
    for rank, (ranks, launched, losses) in enumerate(ray.get(calls)):
        assert (ranks, launched) == ((rank, 2, rank), [])
        assert repr(losses) == (tmp_path / str(rank)).read_text()


# --- the example -----------------------------------------------------------------------------------------------------

TINY = ["--steps", "16", "--save-every", "2", "--warm-start-steps", "3", "--rollout-batch-size", "8"]
TINY += ["--n-samples-per-prompt", "4", "--train-batch-size", "16", "--micro-train-batch-size", "8"]


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    return ray_grpo.arguments(["--run-dir", str(tmp_path_factory.mktemp("grpo")), *TINY])


class LenientReward:
    """A reward that answers of an untrained policy get, too."""

    def score(self, sequences, problems):
        return (sequences[:, ray_grpo.task.PROMPT] < 7).float()


@pytest.fixture(scope="module")
def first_actors(runtime, args):
    with patch.object(ray_grpo, "Reward", LenientReward):
        yield ray_grpo.Actors(args)


@pytest.fixture
def actors(first_actors):
    """All of them alive, also after a test that failed."""
    first_actors.replace_dead()
    return first_actors


def run_of(args, name, **changes):
    run = argparse.Namespace(**{**vars(args), "run_dir": args.run_dir / name, **changes})
    run.run_dir.mkdir()
    return run


def log_of(run):
    names = ("step", *ray_grpo.grpo.COMPARED)
    return [{name: entry[name] for name in names} for entry in ray_grpo.grpo.read_log(run.run_dir)]


@pytest.fixture(scope="module")
def expected(first_actors, args):
    """What an undisturbed run logs, by step."""
    run = run_of(args, "undisturbed")
    assert first_actors.train(run, {}) == []
    entries = log_of(run)
    assert [entry["step"] for entry in entries] == list(range(1, 17))
    assert all(entry["loss"] != 0 and entry["grad_norm"] > 0 for entry in entries)
    return {entry["step"]: entry for entry in entries}


@contextlib.contextmanager
def clock_of_kills():
    """Yield a list of the times at which actors are killed."""
    times, kill = [], ray.kill

    def timed(actor):
        times.append(time.monotonic())
        kill(actor)

    with patch.object(ray, "kill", timed):
        yield times


def attempt(actors, run, kill):
    """Train until a killed actor ends the attempt; return the texts of the trainers' errors, and their types."""
    with clock_of_kills() as times:
        errors = actors.attempt(run, kill)
        assert len(times) == 1 and time.monotonic() - times[0] < SECONDS, (
            "no trainer waited, and none was killed for it"
        )
    return {name: ray_grpo.text_of(error) for name, error in errors.items()}, {n: type(e) for n, e in errors.items()}


def test_a_run_that_loses_each_kind_of_actor_goes_on_with_the_same_losses(actors, args, expected):
    run = run_of(args, "killed")
    handles = dict(actors.handles)

    texts, types = attempt(actors, run, {1: "reward"})
    assert set(types.values()) <= {ray.exceptions.ActorDiedError, RuntimeError}
    assert any("ActorDiedError" in text for text in texts.values()) and len(texts) == 2
    assert actors.replace_dead() == ["reward"]

    texts, types = attempt(actors, run, {3: "trainer 1"})
    # A save that was in flight reports the lost rank, if the trainer waits for it first.
    assert types["trainer 0"] in (RuntimeError, CheckpointError)
    assert types["trainer 1"] is ray.exceptions.ActorDiedError
    assert re.search(r"Rank 0 was in .*: rank 1 did not make this call, or ended without a report", texts["trainer 0"])
    assert actors.replace_dead() == ["trainer 1"]

    address = ray.get(actors.handles["engine 0"].address.remote())
    texts, types = attempt(actors, run, {5: "engine 0"})
    # In an update, which ranks agree on, both raise the error; in `generate` only the rank of the engine, and the note
    # of the other one contains its text.
    assert types["trainer 0"] is RolloutError and types["trainer 1"] in (RolloutError, RuntimeError)
    assert all(f"the connection to the engine at {address} is lost" in text for text in texts.values())
    assert actors.replace_dead() == ["engine 0"]

    texts, types = attempt(actors, run, {7: "trainer 0"})
    assert types["trainer 1"] in (RuntimeError, CheckpointError)
    assert types["trainer 0"] is ray.exceptions.ActorDiedError
    assert "rank 0 did not make this call, or ended without a report" in texts["trainer 1"]
    assert actors.replace_dead() == ["trainer 0"]

    assert actors.attempt(run, {}) == {}
    kept = [name for name, handle in handles.items() if actors.handles[name] is handle]
    assert kept == ["engine 1"], "only what was killed is replaced"
    entries = log_of(run)
    assert all(entry == expected[entry["step"]] for entry in entries)
    assert {entry["step"] for entry in entries} == set(expected)
    assert len(entries) > len(expected), "some steps ran twice"


def test_an_error_that_no_replacement_cures_ends_the_run(actors, args):
    handles = dict(actors.handles)
    with pytest.raises(OSError, match="nowhere"):
        actors.train(run_of(args, "broken", policy=Path("/nowhere")), {})
    assert actors.handles == handles


def test_a_trainer_that_raises_no_error_is_killed_and_replaced(actors, args):
    """The others wait for a trainer that dies before it has joined."""
    run = run_of(args, "waiting", steps=2)
    with clock_of_kills() as times, patch.object(ray_grpo, "END_SECONDS", 1.0):
        errors = actors.attempt(run, {0: "trainer 1"})
    assert {type(error) for error in errors.values()} == {ray.exceptions.ActorDiedError} and len(errors) == 2
    assert len(times) == 2
    assert sorted(actors.replace_dead()) == ["trainer 0", "trainer 1"]
    assert actors.attempt(run, {}) == {}


def test_a_run_that_loses_actors_again_and_again_ends(actors, args):
    kills = {1: "engine 0"}
    with patch.object(ray_grpo, "MAX_RESTARTS", 0), pytest.raises((RolloutError, RuntimeError)):
        actors.train(run_of(args, "again and again"), kills)
    assert not kills


def test_an_engine_that_dies_between_two_runs_is_replaced(actors, args):
    ray.kill(actors.handles["engine 1"])
    *errors, replaced = actors.train(run_of(args, "between", steps=2), {})
    assert replaced == "replaced: engine 1"
    # Ray ends a process after `kill` returns. If the engine still gives its address, the trainers do not reach it.
    assert errors[0].startswith("engine 1: ActorDiedError") or "cannot reach an engine" in errors[0]


def test_an_engine_that_stops_to_serve_is_replaced(actors, args):
    kept = dict(actors.handles)
    broken = kept["engine 1"].serve.remote("/nowhere")
    ray.wait([broken])
    with patch.dict(actors.serving, {"engine 1": broken}):
        assert actors.replace_dead() == ["engine 1"]
        serving = actors.serving["engine 1"]
    actors.serving["engine 1"] = serving
    assert actors.attempt(run_of(args, "another engine", steps=2), {}) == {}
    assert [name for name in kept if actors.handles[name] is not kept[name]] == ["engine 1"]


def test_the_code_of_the_page_runs(runtime, tmp_path):
    page = (ROOT / "docs" / "ray.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(snippets) == 2
    names = {"__name__": "__main__", "folder": str(tmp_path)}
    for snippet in snippets:
        exec(compile(snippet, "ray.md", "exec"), names)


def test_the_example_runs_as_a_script(tmp_path):
    with environment():
        command = [sys.executable, str(EXAMPLE), "--run-dir", str(tmp_path), *TINY]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert not done.returncode, done.stderr[-3000:]
    assert "bitwise equal in all 16 steps" in done.stdout
    assert "replaced: trainer 1" in done.stdout and "replaced: engine 0" in done.stdout
