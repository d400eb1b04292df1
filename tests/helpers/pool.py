"""A persistent pool of ranks: processes that stay alive between tests and form process groups of any size.

Ranks are forked from one process that has imported what all of them need, which costs seconds; a job on a running rank
costs milliseconds. Each job names a test function; every rank imports its module and calls it. A rank that fails ends
its process group, one that hangs or dies is replaced.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import simulated_accelerator

from helpers import collective_order, collective_record
from helpers.collective_record import Record

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
_GROUPS_OF_A_JOB = 10_000
"""More process groups than a test makes."""
SIMULATED_DEVICES = 8

processes = mp.get_context("forkserver")
"""Starts processes of their own that need not import torch again."""

# The package itself loads its parts when they are first used: here they are named. Most ranks need the other packages
# sooner or later, and would import them one by one.
_PARTS = [f"fsdp2_strategy.{part}" for part in ("strategy", "checkpoint", "data", "rollout", "parallel", "logprob")]
_OTHERS = ["torch", "transformers.models.llama.modeling_llama", "transformers.trainer", "peft", "aiohttp"]
processes.set_forkserver_preload([*_OTHERS, *_PARTS])


@dataclass
class Job:
    """One test on the ranks of one process group."""

    file: str
    function: str
    arguments: dict[str, Any]
    world_size: int
    store: str
    """File at which the ranks of the process group meet; another file, another group."""
    sizes: dict[str, int]
    """Of `fsdp2_strategy.sizes`, that are others during the test."""
    number: int
    """How many jobs the pool has run before."""


@dataclass
class Worker:
    process: Any
    pipe: Connection


@dataclass
class RankPool:
    """Run jobs on ranks that stay alive."""

    workers: list[Worker] = field(default_factory=list)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ranks-")))
    jobs: int = 0
    groups: int = 0
    group_size: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    """Of `fsdp2_strategy.sizes`, that are others on the ranks."""
    is_simulated: bool = False
    """Whether the ranks have the simulated accelerator."""
    compares_collectives: bool = False
    """Whether the collectives of all ranks are compared after each job."""

    def run(
        self,
        file: str,
        function: str,
        arguments: dict[str, Any],
        world_size: int,
        timeout: float,
        *,
        same_collectives: bool = True,
    ) -> None:
        """Run one test function on ``world_size`` ranks; raise what the first failing rank raised.

        If no rank fails, raise if their collectives break a rule of [Note: order of collectives], unless
        ``same_collectives`` is false.
        """
        while len(self.workers) < world_size:
            ours, theirs = processes.Pipe()
            given = (theirs, len(self.workers), self.folder, self.is_simulated, self.compares_collectives)
            process = processes.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()  # so that the death of this rank ends the connection
            self.workers.append(Worker(process, ours))
        if world_size != self.group_size:
            self.groups, self.group_size = self.groups + 1, world_size
        job = Job(
            file, function, arguments, world_size, str(self.folder / f"store{self.groups}"), self.sizes, self.jobs
        )
        self.jobs += 1
        for worker in self.workers[:world_size]:
            worker.pipe.send(job)
        failures, records = self._collect(world_size, timeout)
        if failures:
            self.close()
            raise AssertionError("\n\n".join(f"--- rank {rank}\n{text}" for rank, text in failures.items()))
        is_compared = self.compares_collectives and same_collectives
        found = collective_order.mistakes([records[rank] for rank in range(world_size)]) if is_compared else []
        if found:
            self.close()
            raise AssertionError("\n".join(found))

    def _collect(self, world_size: int, timeout: float) -> tuple[dict[int, str], dict[int, Record]]:
        deadline = time.monotonic() + timeout
        failures: dict[int, str] = {}
        records: dict[int, Record] = {}
        waiting = {self.workers[rank].pipe: rank for rank in range(world_size)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)
                try:
                    text, records[rank] = pipe.recv()
                except (EOFError, OSError):
                    self.workers[rank].process.join(5)
                    text = f"the process died with exit code {self.workers[rank].process.exitcode}\n"
                    text += self._path("crash", rank).read_text()
                if text:
                    failures[rank] = text
                    deadline = min(deadline, time.monotonic() + 5)
        hanging = "did not finish: it waits for another rank, or hangs"
        failures |= {rank: f"{hanging}\n{self._stacks_of(rank)}" for rank in waiting.values()}
        return failures, records

    def _stacks_of(self, rank: int) -> str:
        """Return where a rank and the processes that it started are."""
        pid = self.workers[rank].process.pid
        for each in (pid, *_children_of(pid)):
            with suppress(OSError):
                os.kill(each, signal.SIGUSR1)
                time.sleep(0.5)  # one after the other, into one file
        return self._path("stacks", rank).read_text()

    def _path(self, kind: str, rank: int) -> Path:
        """Return the file of a rank's stacks, when it was asked for them or when it crashed."""
        return self.folder / f"{kind}{rank}"

    def close(self) -> None:
        """End all ranks; the next job starts new ones."""
        for worker in self.workers:
            worker.process.kill()
        self.workers.clear()
        self.group_size = 0


def _children_of(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for file in files for child in file.read_text().split()]
    return [each for child in children for each in (child, *_children_of(child))]


def _serve(pipe: Connection, rank: int, folder: Path, is_simulated: bool, compares_collectives: bool) -> None:
    """Be a rank: run jobs until the pipe closes."""
    crash, stacks = (folder / f"crash{rank}").open("w"), (folder / f"stacks{rank}").open("w")
    faulthandler.enable(crash)
    faulthandler.register(signal.SIGUSR1, stacks)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    torch._C._set_print_stack_traces_on_fatal_signal(True)  # stacks of threads without Python: on standard error
    torch.set_num_threads(1)
    _choose_device(rank, is_simulated)
    if compares_collectives:
        collective_record.start()
    gc.freeze()
    # A data loader's workers are children of this process, and forked, as in a process of one's own.
    mp.current_process()._config["daemon"] = False
    mp.set_start_method("fork", force=True)
    store = ""
    modules: dict[str, Any] = {}
    while True:
        try:
            job: Job = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            if store != job.store:
                if dist.is_initialized():
                    _end_groups()
                store = job.store
                dist.init_process_group(
                    _backend(),
                    store=dist.FileStore(store, job.world_size),
                    rank=rank,
                    world_size=job.world_size,
                    timeout=COLLECTIVE_TIMEOUT,
                )
            if job.file not in modules:
                modules[job.file] = _import(job.file)
            torch.manual_seed(0)
            # torch counts the groups that a rank has made, and names the next one by this number. After a test of a
            # part of the ranks, the numbers differ, and the ranks would wait for each other under different names.
            distributed_c10d._world.group_count = _GROUPS_OF_A_JOB * (1 + job.number)
            collective_record.begin()
            with simulated_accelerator.watched() if is_simulated else nullcontext():
                _call(getattr(modules[job.file], job.function), job)
            verdict = ""
        except BaseException:  # noqa: BLE001  the test's verdict, whatever it is
            verdict = traceback.format_exc()
        pipe.send((verdict, collective_record.end()))


def _choose_device(rank: int, is_simulated: bool) -> None:
    import torch

    if is_simulated:
        simulated_accelerator.load(devices=SIMULATED_DEVICES)
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())


def _backend() -> str:
    import torch
    import torch.distributed as dist

    if not torch.accelerator.is_available():
        return "gloo"
    device = torch.accelerator.current_accelerator().type
    return f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"


def _call(function: Callable[..., None], job: Job) -> None:
    """Call a test function with warnings as errors; then undo its patches, as pytest does in its own process only."""
    patches = [argument for argument in job.arguments.values() if isinstance(argument, pytest.MonkeyPatch)]
    with ExitStack() as stack:
        for each in patches:
            stack.callback(each.undo)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error")
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=r"(torch|transformers)\b")
        for message in IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        if job.sizes:
            stack.enter_context(patch.multiple("fsdp2_strategy.sizes", **job.sizes))
        function(**job.arguments)


def _end_groups() -> None:
    """Destroy all process groups, and let go of their meshes: those that die late take the names of new ones along.

    gloo would wait for operations that a test has abandoned until their time-out; without connections, it does not.
    """
    import torch.distributed as dist

    if "fsdp2_strategy" in sys.modules:
        from fsdp2_strategy.checkpoint.background_save import forget_groups
        from fsdp2_strategy.distributed.lost_ranks import disconnect
        from fsdp2_strategy.distributed.mesh import forget_meshes

        disconnect()
        forget_meshes()
        forget_groups()
    gc.collect()
    gc.freeze()  # what is left are modules, for the most part: half a second of every collection from now on
    dist.destroy_process_group()


# Warnings of torch and transformers about their own doings.
IGNORED_WARNINGS = (
    r"The \.grad attribute of a Tensor that is not a leaf",  # dynamo, looking at what it traces
)


def _import(file: str) -> Any:
    name = Path(file).stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
