"""Which device a rank uses: the right one under each launcher, or an error that names the ranks, on all of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fsdp2_strategy.distributed import local_ranks as local_ranks_module
from fsdp2_strategy.distributed.local_ranks import LocalRank, Place, find_local_rank, local_ranks
from fsdp2_strategy.errors import MeshError


def chosen(*places):
    """Return the index of each rank's device; a place is the host, its devices, the current one and LOCAL_RANK."""
    return [local.device for local in local_ranks([Place(len(places), p[0], list(p[1]), *p[2:]) for p in places])]


def test_a_trainers_own_devices_stay():
    assert chosen(("a", "xy", 1, 0), ("a", "xy", 0, 1)) == [1, 0]
    assert chosen(("a", "xyz", 2), ("a", "xyz", 1)) == [2, 1]


def test_without_a_device_of_its_own_each_rank_gets_the_one_of_its_local_rank():
    assert chosen(("a", "xy", 0, 1), ("a", "xy", 0, 0)) == [1, 0], "current devices are the same"
    assert chosen(("a", "xy", None, 0), ("a", "xy", None, 1), ("b", "xy", None, 0)) == [0, 1, 0]
    assert chosen(("a", "xyz", None, 2)) == [2], "a trainer on one rank of several"
    assert chosen(("a", "xyz", 0, 2), ("a", "xyz", None, 1)) == [2, 1], "not all have set a device"


def test_a_local_rank_beyond_the_visible_devices_is_not_an_ordinal():
    assert chosen(("a", "x", None, 0), ("a", "y", None, 1)) == [0, 0]
    assert chosen(("a", "xy", None, 0), ("a", "xy", None, 0)) == [0, 1], "two torchruns on one host"


def test_without_a_local_rank_ranks_are_numbered_by_host_and_visible_devices():
    assert chosen(("a", "xy"), ("a", "xy"), ("b", "zw"), ("b", "zw")) == [0, 1, 0, 1]
    assert chosen(("a", "x"), ("a", "y")) == [0, 0]
    assert local_ranks([Place(2, "a", ["x", "y"]), Place(2, "a", ["x", "y"])])[1] == LocalRank(1, 2, 1)


def test_devices_without_an_identifier_are_told_apart_by_their_index():
    def of(count, *launched):
        return [
            local.device for local in local_ranks([Place(len(launched), "a", [""] * count, None, n) for n in launched])
        ]

    assert of(2, 0, 1) == [0, 1]
    assert of(1, 0, 1) == [0, 0], "torch cannot tell whether these two are the same"
    with pytest.raises(MeshError, match="ranks 1 and 2 would use the same accelerator 1 of a"):
        of(2, None, None, None)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([("a", "x", 0, 0), ("a", "x", 0, 0)], "ranks 0 and 1 would use the same accelerator x of a"),
        ([("a", "xy", 0), ("a", "xy", 0), ("a", "xy", 0)], "ranks 1 and 2 would use the same accelerator y of a"),
        ([("a", "x", None, 0), ("a", "", None, 1)], r"1 rank \(1\) of 2 see no accelerator, and the other ranks do"),
    ],
)
def test_ranks_that_cannot_have_devices_of_their_own_are_named(places, message):
    with pytest.raises(MeshError, match=message):
        chosen(*places)


SCRIPT = """
import json, os, sys
sys.path.insert(0, "tests")
import torch, torch.distributed as dist
from helpers import fake_accelerator
from fsdp2_strategy.distributed import process_group
from fsdp2_strategy.errors import MeshError

fake_accelerator.install()
rank, found = int(os.environ["RANK"]), []
for number, scenario in enumerate(json.loads(sys.argv[1])):
    kind, sees, current, launched = scenario["kind"], scenario["sees"][rank], scenario["current"], scenario["launched"]
    fake_accelerator.see(sees, current=current and current[rank])
    os.environ.pop("LOCAL_RANK", None)
    if launched:
        os.environ["LOCAL_RANK"] = str(launched[rank])
    os.environ["MASTER_PORT"] = sys.argv[2 + number]
    try:
        if kind != "started":
            backend = "cpu:gloo,fake:fakeccl" if sees else "gloo"
            dist.init_process_group(backend, timeout=process_group.timedelta(seconds=30))
        starts = process_group.start_process_group(1)
        assert starts == (kind == "started")
        group = None
        if kind == "part":
            group = dist.new_group([1])
            if rank == 0:
                found.append(None)
                continue
        if kind == "again":
            fake_accelerator.see("x", current=0)
            try:
                process_group.use_own_device(group)
            except MeshError:
                fake_accelerator.see(sees, current=current[rank])
        process_group.use_own_device(group)
        process_group.use_own_device(group)  # nothing happens
        own = process_group.current_device()
        found.append([own.type, own.index, process_group.local_rank(), dist.get_backend_config()])
    except MeshError as error:
        found.append(str(error))
    finally:
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(()))
            dist.destroy_process_group()
print("FOUND" + json.dumps(found))
"""


def scenario(kind, sees, launched=None, current=None):
    return {"kind": kind, "sees": sees, "launched": launched, "current": current}


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


STACKS_AFTER = "import faulthandler; faulthandler.dump_traceback_later(140)\n"


def run_ranks(script, *arguments, ports=0, world=2, timeout=150):
    """Run a script on ranks, again if another process has taken a port that was free."""
    for attempt in range(2):
        started = start_ranks(STACKS_AFTER + script, (*arguments, *free_ports(ports)), world)
        try:
            ended = [process.communicate(timeout=timeout) for process in started]
        except subprocess.TimeoutExpired:
            for process in started:
                process.kill()
            ended = [process.communicate() for process in started]
        if attempt or all(process.returncode == 0 for process in started):
            break
    assert [process.returncode for process in started] == [0] * world, "\n".join(err[-3000:] for _, err in ended)
    return [json.loads(out.split("FOUND")[1]) for out, _ in ended]


def start_ranks(script, arguments, world):
    root = Path(__file__).parents[1]
    started, [port] = [], free_ports(1)
    for rank in range(world):
        env = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        env |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(root)}
        env["MASTER_PORT"] = port
        command = [sys.executable, "-c", script, *arguments]
        started.append(
            subprocess.Popen(command, env=env, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    return started


@pytest.mark.full
def test_two_processes_get_their_devices_or_hear_the_same_error():
    scenarios = [
        scenario("started", ["xy", "xy"], launched=[0, 1]),  # torchrun
        scenario("started", ["xy", "xy"]),  # mpirun: the host's number is in a variable of its own
        scenario("started", ["x", "y"]),  # SLURM with a GPU for each task
        scenario("started", ["x", "y"], launched=[0, 1]),  # torchrun, and a wrapper that hides the others' devices
        scenario("existing", ["xy", "xy"], launched=[0, 1]),  # without set_device
        scenario("existing", ["xy", "xy"], current=[1, 0]),
        scenario("again", ["xy", "xy"], current=[1, 0]),  # after an error that the trainer has mended
        scenario("part", ["xy", "xy"], launched=[0, 1]),
        scenario("existing", ["x", "x"], current=[0, 0]),
        scenario("started", ["x", "x"], launched=[0, 1]),
        scenario("started", ["x", ""]),
        scenario("started", ["", ""]),
    ]
    first, second = run_ranks(SCRIPT, json.dumps(scenarios), ports=len(scenarios))
    both = [
        [each if each is None or isinstance(each, str) else each[1] for each in pair]
        for pair in zip(first, second, strict=True)
    ]
    assert both[:8] == [[0, 1], [0, 1], [0, 0], [0, 0], [0, 1], [1, 0], [1, 0], [None, 1]]
    assert first[0] == ["fake", 0, 0, "cpu:gloo,fake:fakeccl"] and second[1][2] == 1, "the number on the host"
    for of_first, of_second in both[8:10]:
        assert "ranks 0 and 1 would use the same accelerator x of" in of_first and of_first == of_second
    assert "1 rank (1) of 2 see no accelerator" in both[10][0] and both[10][0] == both[10][1]
    assert first[11][0] == "cpu"


@pytest.mark.full
def test_an_accelerator_without_a_collective_backend_is_refused():
    script = """
import sys; sys.path.insert(0, "tests")
from helpers import fake_accelerator
fake_accelerator.install(with_backend=False)
fake_accelerator.see("x")
from fsdp2_strategy.distributed import process_group
from fsdp2_strategy.errors import MeshError
import os
for name in ("RANK", "WORLD_SIZE"): del os.environ[name]
try:
    process_group.start_process_group(1)
except MeshError as error:
    import json; print("FOUND" + json.dumps(str(error)))
"""
    [message] = run_ranks(script, world=1)
    assert message.startswith("cannot train on the accelerator of this process: torch has no collective backend for")
    assert "'fake', expected one of ['cuda', " in message and "mps" not in message, "gloo does not take its tensors"


@pytest.mark.full
def test_a_group_of_some_ranks_needs_no_others_if_the_default_group_is_bound_to_a_device():
    script = """
import json, os, datetime, torch, torch.distributed as dist
from torch.distributed import distributed_c10d
from fsdp2_strategy.distributed import process_group
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
bound = torch.device("cpu", 0)
dist.group.WORLD.bound_device_id = bound  # as device_id of init_process_group does
asked = []
distributed_c10d._get_split_source = lambda group: asked.append(group)  # NCCL's communicator would be split
if dist.get_rank() == 1:
    group = process_group.group_among([1])
    total = torch.ones(())
    dist.all_reduce(total, group=group)
    assert group.bound_device_id is None and dist.group.WORLD.bound_device_id == bound
dist.all_reduce(torch.zeros(()))
print("FOUND" + json.dumps(len(asked)))
"""
    assert run_ranks(script) == [0, 0]


@pytest.mark.full
def test_the_first_rank_ends_its_store_after_the_others_have_read_the_error():
    script = """
import json, os, sys, time, torch.distributed as dist
from datetime import timedelta
from fsdp2_strategy.distributed.local_ranks import Place, find_local_rank
from fsdp2_strategy.errors import MeshError
rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, is_master=rank == 0, timeout=timedelta(seconds=60))
class Slow:
    def __init__(self): self.set, self.multi_get, self.wait = store.set, store.multi_get, store.wait
    def get(self, key):
        time.sleep(2 * rank)
        return store.get(key)
try:
    find_local_rank(Slow(), rank, Place(2, "a", ["x"], 0, 0), range(2))
except MeshError as error:
    print("FOUND" + json.dumps(str(error)))
"""
    first, second = run_ranks(script, ports=1)
    assert first == second and "ranks 0 and 1 would use the same accelerator x of a" in first


def test_a_rank_that_does_not_read_the_error_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(local_ranks_module, "_READ_SECONDS", 0.2)
    store = torch.distributed.HashStore()
    store.set("place/1", json.dumps({"world_size": 2, "host": "a", "devices": ["x"]}))
    begin = time.monotonic()
    with pytest.raises(MeshError, match="ranks 0 and 1 would use the same accelerator x of a"):
        find_local_rank(store, 0, Place(2, "a", ["x"]), range(2))
    assert time.monotonic() - begin < 8  # not the 10 seconds of a program


@pytest.mark.full
def test_the_end_of_the_stores_process_is_a_named_error():
    script = """
import json, os, sys, torch.distributed as dist
from datetime import timedelta
from fsdp2_strategy.distributed import process_group
from fsdp2_strategy.errors import MeshError
os.environ["MASTER_PORT"] = sys.argv[1]
if os.environ["RANK"] == "0":
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, is_master=True, timeout=timedelta(seconds=60))
    print("FOUND" + json.dumps("ended"))
else:
    try:
        process_group.start_process_group(1)
    except MeshError as error:
        print("FOUND" + json.dumps(str(error)))
"""
    _, message = run_ranks(script, ports=1)
    assert message.startswith("cannot start the process group: rank 1 does not reach the store at 127.0.0.1:")
