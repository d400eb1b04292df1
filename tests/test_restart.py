"""Runs under torchrun that are stopped, or lose a rank or host, go on by themselves, with the losses of a whole run."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from helpers.training import prepared, strategy_for, tags, train

from fsdp2_strategy import list_checkpoints
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.errors import StepError

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "train_text.py"
STEPS = 40


def launch(run_dir, config, *options, prefix=(), nproc=2):
    options = options or ("--standalone",)
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", str(nproc)]
    command += ["--max-restarts", "3", str(EXAMPLE), "--config", str(config), "--run-dir", str(run_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def logged(run_dir):
    log = run_dir / "losses.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{name: entry[name] for name in ("step", "loss", "grad_norm", "lr", "tokens", "epoch")} for entry in entries]


def wait_for_lines(run_dir, count, *runs):
    deadline = time.monotonic() + 400  # it ends a test that hangs, also where the machine is busy
    while len(logged(run_dir)) < count:
        assert time.monotonic() < deadline
        for run in runs:
            assert run.poll() is None, run.communicate()[0][-3000:]
        time.sleep(0.02)


def pid_of(run_dir, rank):
    return int((run_dir / f"rank{rank}.pid").read_text())


def finish(run, status=0):
    output, _ = run.communicate(timeout=400)
    assert (run.returncode == 0) == (status == 0), output[-3000:]
    return output


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    settings = yaml.safe_load(EXAMPLE.with_suffix(".yaml").read_text())
    settings["model"] |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    settings["train"] |= {"steps": STEPS, "save_every": 8, "sequence_length": 64}
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def run_example(run_dir, config):
    """Run the example on ranks of the pool, which have imported torch already."""
    example = runpy.run_path(str(EXAMPLE))
    assert example["main"](["--config", str(config), "--run-dir", str(run_dir)]) == 0


@pytest.fixture(scope="module")
def expected(config, tmp_path_factory, run_on):
    """What an undisturbed run logs, by step."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    run_on(2, run_example, run_dir=run_dir, config=config)
    entries = {entry["step"]: entry for entry in logged(run_dir)}
    assert len(entries) == STEPS
    return entries


def check(run_dir, expected):
    entries = logged(run_dir)
    assert {entry["step"] for entry in entries} == set(expected)
    assert all(entry == expected[entry["step"]] for entry in entries)
    return entries


@pytest.mark.full
def test_a_run_that_is_stopped_or_killed_goes_on_with_the_same_losses(tmp_path, config, expected, run_on):
    run = launch(tmp_path, config)
    wait_for_lines(tmp_path, 10, run)
    told = time.monotonic()
    run.send_signal(signal.SIGTERM)  # to torchrun, as a scheduler does
    finish(run, status=1)
    assert time.monotonic() - told < 30, "torchrun kills what is still there then"
    [*_, newest] = list_checkpoints(tmp_path / "checkpoints")
    [*_, last] = logged(tmp_path)
    assert newest.step == last["step"] == len(logged(tmp_path)), "no step is lost"

    run = launch(tmp_path, config)
    wait_for_lines(tmp_path, last["step"] + 5, run)
    os.kill(pid_of(tmp_path, 1), signal.SIGTERM)  # to one rank: all save and leave, and torchrun starts them again
    wait_for_lines(tmp_path, last["step"] + 14, run)
    assert len(logged(tmp_path)) == logged(tmp_path)[-1]["step"], "still no step is lost"
    os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
    output = finish(run)
    entries = check(tmp_path, expected)
    assert len(entries) > STEPS, "some steps ran twice"
    assert output.count("resumed from") == 3

    # A run that is through has nothing left to train, on any number of ranks.
    run_on(1, run_example, run_dir=tmp_path, config=config)
    assert logged(tmp_path) == entries


@pytest.mark.ranks(2)
def test_all_ranks_hear_at_once_what_one_was_told(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.closing(strategy_for()) as strategy:
        model, optimizer, scheduler = prepared(strategy, "mlp")
        heard = []
        for step in range(4):
            train(strategy, model, optimizer, scheduler, [step], "mlp")
            if step == 2 and strategy.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)  # schedulers and torchrun both say it
            heard.append(strategy.preempted())
            if heard[-1]:
                strategy.save_ckpt(model, tmp_path, async_save=True)
                break
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM, "a child ends as ever"
        assert heard == [False, False, True]
        assert strategy.preempted()
    assert tags(tmp_path) == ["global_step3"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.ranks(1)
def test_strategies_of_one_process_hear_the_same_until_the_last_is_closed():
    before = signal.getsignal(signal.SIGTERM)
    first, second = strategy_for(), strategy_for()
    assert not first.preempted() and not second.preempted()
    first.close()
    with pytest.raises(StepError, match="closed"):
        first.preempted()
    os.kill(os.getpid(), signal.SIGTERM)
    third = strategy_for()
    assert second.preempted() and third.preempted()
    second.close()
    assert signal.getsignal(signal.SIGTERM) is not before
    third.close()
    assert signal.getsignal(signal.SIGTERM) is before
    fourth = strategy_for()
    assert not fourth.preempted()
    fourth.close()


@pytest.mark.ranks(1)
def test_a_loaders_workers_outlive_a_sigterm_that_is_not_their_parents():
    loader = ResumableLoader(range(64), 4, num_workers=2)
    batches = iter(loader)
    seen = [next(batches), next(batches)]  # one of each worker: both have begun
    workers = multiprocessing.active_children()
    for worker in workers:
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)  # another process sends it
    time.sleep(0.2)
    seen += list(batches)
    assert sorted(torch.cat(seen).tolist()) == list(range(64))
    loader.close()
    loader = ResumableLoader(range(64), 4, num_workers=2)
    batches = iter(loader)
    next(batches)
    workers = [w for w in multiprocessing.active_children() if w not in workers]
    for worker in workers:
        with contextlib.suppress(RuntimeError):  # torch raises in the parent as soon as it hears of it
            worker.terminate()  # the parent's own is obeyed
            worker.join(10)
        with contextlib.suppress(RuntimeError):
            worker.join(10)
    assert workers and not any(worker.is_alive() for worker in workers)
    with pytest.raises(RuntimeError):
        list(batches)


# --- two hosts -----------------------------------------------------------------------------------------------------


# torchrun's own store is shared with the workers by default, and its address told in the first round alone: a torchrun
# that joins a later one waits for it in vain.
ONE_STORE_A_ROUND = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


class Hosts:
    """Two hosts in miniature: network namespaces with an address each and a wire between them; the disk is shared."""

    def __init__(self, prefix):
        self.names = [f"{prefix}-{i}" for i in range(2)]
        self.addresses = ["10.213.77.1", "10.213.77.2"]
        self.runs = []
        try:
            for name in self.names:
                self.ip("netns", "add", name)
            self.ip(
                "link", "add", "wire", "netns", self.names[0], "type", "veth", "peer", "wire", "netns", self.names[1]
            )
            for i, name in enumerate(self.names):
                self.ip("-n", name, "address", "add", f"{self.addresses[i]}/24", "dev", "wire")
                for link in ("lo", "wire"):
                    self.ip("-n", name, "link", "set", link, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")

    def ip(self, *arguments):
        return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout

    def launch(self, i, run_dir, config):
        meeting = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.addresses[0]}:29411")
        role = f"is_host={1 - i},keep_alive_interval=3"  # a host is given up after three of them: 9 seconds, not 15
        options = (*meeting, "--rdzv-id", "hosts", "--rdzv-conf", role, "--local-addr", self.addresses[i])
        inside = ("ip", "netns", "exec", self.names[i], "env", "GLOO_SOCKET_IFNAME=wire", ONE_STORE_A_ROUND)
        self.runs.append(launch(run_dir, config, *options, prefix=inside, nproc=1))
        return self.runs[-1]

    def lose(self, i, *, wire):
        """Kill all that runs on a host; with the wire cut first, nobody hears of it."""
        if not wire:
            self.ip("-n", self.names[i], "link", "set", "wire", "down")
        self.kill_all(self.names[i])
        self.runs[i].communicate(timeout=60)

    def bring_back(self, i):
        self.ip("-n", self.names[i], "link", "set", "wire", "up")

    def kill_all(self, name):
        for pid in self.ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def close(self):
        for name in self.names:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                self.kill_all(name)
                self.ip("netns", "delete", name)
        for run in self.runs:
            run.communicate()


@pytest.mark.full
@pytest.mark.parametrize("wire", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["killed", "cut off"])
def test_two_hosts_of_which_one_is_lost_and_brought_back(tmp_path, config, expected, wire):
    with contextlib.closing(Hosts(f"fsdp2-{os.getpid()}-{wire:d}")) as hosts:
        runs = [hosts.launch(i, tmp_path, config) for i in range(2)]
        wait_for_lines(tmp_path, 12, *runs)
        while not list_checkpoints(tmp_path / "checkpoints"):  # that of step 8, at the latest when step 16 is saved
            assert runs[0].poll() is None
            time.sleep(0.02)
        hosts.lose(1, wire=wire)
        assert len(logged(tmp_path)) < STEPS and runs[0].poll() is None
        hosts.bring_back(1)
        runs[1] = hosts.launch(1, tmp_path, config)
        outputs = [finish(run) for run in runs]
    assert any("resumed from" in output for output in outputs)
    check(tmp_path, expected)
