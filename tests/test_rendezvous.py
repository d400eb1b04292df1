"""Ranks of one attempt meet, whatever dead ones left in the store, and without the variables of a launcher."""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from helpers.pool import processes
from helpers.training import prepared, train

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.checkpoint import background_save
from fsdp2_strategy.checkpoint import save as saving
from fsdp2_strategy.distributed import Rendezvous, RendezvousServer, process_group, tcp_rendezvous
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.local_ranks import LocalRank, Place, local_ranks
from fsdp2_strategy.distributed.rendezvous import fresh_store
from fsdp2_strategy.errors import CheckpointError, MeshError, StepError


def meet(store, world_size, late=()):
    prefixes = {}

    def rank(r):
        if r in late:
            threading.Event().wait(0.3)
        fresh = fresh_store(store, r, world_size, timedelta(seconds=20))
        fresh.set(f"from{r}", str(r))
        prefixes[r] = [fresh.get(f"from{other}").decode() for other in range(world_size)]

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert prefixes == {r: [str(o) for o in range(world_size)] for r in range(world_size)}


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_attempts_over_one_store_never_mix(world_size):
    store = dist.HashStore()
    for _ in range(3):
        meet(store, world_size)


def test_what_dead_ranks_left_is_ignored():
    store = dist.HashStore()
    left = dist.PrefixStore("fsdp2_strategy/handshake", store)
    left.set("hello/1", "dead")
    left.set("hello/2", "dead-too")
    left.set("invitation/1", "dead old")
    left.set("invitation/2", "dead-too old")
    left.set("begun/old", "")
    meet(store, 3, late=(2,))


def test_a_rank_that_never_comes_is_given_up():
    store = dist.HashStore()
    with pytest.raises(MeshError, match=r"rank 0 still waits for 2 ranks \(1, 2\) after 0\.2 s"):
        fresh_store(store, 0, 3, timedelta(seconds=0.2))
    dist.PrefixStore("fsdp2_strategy/handshake", store).set("hello/1", "a rank that does not accept")
    dist.PrefixStore("fsdp2_strategy/handshake", store).set("hello/2", "neither")
    with pytest.raises(MeshError, match=r"rank 0 still waits for 2 ranks \(1, 2\)"):
        fresh_store(store, 0, 3, timedelta(seconds=0.2))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_two_processes_have_is_an_error_in_the_first(rank):
    store, errors = dist.HashStore(), []

    def first():
        try:
            fresh_store(store, rank, 2, timedelta(seconds=20))
        except MeshError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=first)
    waiting.start()
    while not store.check([f"fsdp2_strategy/handshake/hello/{rank}"]):
        pass
    waiting.join(0.05)
    with pytest.raises(MeshError, match="still waits"):
        fresh_store(store, rank, 2, timedelta(seconds=0.5))
    waiting.join(10)
    assert errors == [
        f"cannot start the process group: another process has started as rank {rank}, expected one process for each "
        "rank. Number the processes from 0."
    ]


# --- without a launcher ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("host", 0, 1), "address is 'host', expected 'host:port'"),
        (("host:1", 2, 2), "rank is 2, expected an integer of at least 0 and less than world_size 2"),
        (("host:1", -1, 2), "rank is -1"),
        (("host:1", True, 2), "rank is True"),
        (("host:1", 0, 0), "world_size is 0, expected an integer of at least 1"),
    ],
)
def test_a_rendezvous_that_cannot_be_is_an_error(given, message):
    with pytest.raises(MeshError, match=message):
        Rendezvous(*given)


def test_a_server_has_its_own_host_and_port():
    with pytest.raises(MeshError, match=r"host is '203\.0\.113\.1', expected a name or an address of this host"):
        with patch.object(tcp_rendezvous, "_CONNECT_SECONDS", 0.5):
            RendezvousServer("203.0.113.1")
    with pytest.raises(MeshError, match=r"host is 'nowhere\.invalid:1', expected a name"):
        RendezvousServer("nowhere.invalid:1")
    with pytest.raises(MeshError, match=r"rendezvous is a tuple, expected a Rendezvous"):
        tcp_rendezvous.meet(("127.0.0.1:1", 0, 1), timedelta(seconds=5))
    servers = [RendezvousServer("127.0.0.1") for _ in range(5)]
    assert len({server.address for server in servers}) == 5


def test_a_server_that_has_ended_is_named():
    server = RendezvousServer("127.0.0.1")
    address = server.address
    del server
    with patch.object(tcp_rendezvous, "_CONNECT_SECONDS", 0.5):
        with pytest.raises(MeshError, match=rf"rank 1 does not reach {address} in 0\.5 s"):
            tcp_rendezvous.meet(Rendezvous(address, 1, 2), timedelta(seconds=5))


def meet_at(server, *rendezvous):
    """Let ranks meet in threads, and return what each got: its local rank, or the text of its error."""
    results = [None] * len(rendezvous)

    def rank(index):
        try:
            results[index] = tcp_rendezvous.meet(rendezvous[index], timedelta(seconds=10))[1]
        except MeshError as error:
            results[index] = str(error)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(rendezvous))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_ranks_that_differ_in_their_number_hear_of_it():
    server = RendezvousServer("127.0.0.1")
    found = meet_at(server, Rendezvous(server.address, 0, 2), Rendezvous(server.address, 1, 3))
    assert "world_size is 3 on rank 1 and 2 on rank 0" in found[0]
    assert "world_size is 2 on rank 0 and 3 on rank 1" in found[1]
    assert meet_at(server, *(Rendezvous(server.address, rank, 2) for rank in range(2))) == [
        LocalRank(0, 2, None),
        LocalRank(1, 2, None),
    ]


def test_each_rank_has_the_accelerator_that_it_sees_or_the_next_one():
    def of(*places):
        return [
            (local.rank, local.count, local.device)
            for local in local_ranks([Place(len(places), host, list(devices)) for host, devices in places])
        ]

    assert of(("a", "xy"), ("a", "xy"), ("b", "z")) == [(0, 2, 0), (1, 2, 1), (0, 1, 0)]
    assert of(("a", "x"), ("b", "x"), ("a", "y"), ("b", "y")) == [(0, 2, 0), (0, 2, 0), (1, 2, 0), (1, 2, 0)]
    assert of(("a", "xy"), ("a", "zw"), ("a", "xy")) == [(0, 3, 0), (1, 3, 0), (2, 3, 1)]
    assert of(("a", ""), ("a", ""), ("b", "")) == [(0, 2, None), (1, 2, None), (0, 1, None)]
    with pytest.raises(MeshError, match="ranks 0 and 1 would use the same accelerator x of a"):
        of(("a", "x"), ("a", "x"))
    with pytest.raises(MeshError, match="ranks 1 and 2 would use the same accelerator y of a"):
        of(("a", "xy"), ("a", "xy"), ("a", "xy"))
    with pytest.raises(MeshError, match=r"1 rank \(1\) of 3 see no accelerator, and the other ranks do"):
        of(("a", "x"), ("a", ""), ("b", "y"))


def joined(rendezvous):
    return FSDPV2Strategy(config=StrategyConfig(bf16=False, max_norm=1.0), rendezvous=rendezvous)


def train_twice(address, rank, folder):
    """Train in a process without any variable: two strategies at a time, and another one after them."""
    launched = [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")]
    assert not launched
    at = Rendezvous(address, rank, 2)
    losses = []
    for _ in range(2):
        with joined(at) as strategy:
            assert (strategy.get_rank(), strategy.world_size, process_group.local_rank()) == (rank, 2, rank)
            assert process_group.local_world_size(7) == 2
            model, optimizer, scheduler = prepared(strategy, "mlp")
            losses.append(train(strategy, model, optimizer, scheduler, range(2), "mlp"))
            joined(at).close()  # it uses the group of the first one
            assert strategy.all_reduce(1.0, "sum") == 2
            with pytest.raises(MeshError, match=f"already rank {rank} of a group of 2 that was not started there"):
                joined(Rendezvous(address, rank, 3))
        assert not dist.is_initialized()
        assert process_group.local_world_size(7) == 7
    assert losses[0] == losses[1]
    Path(folder, str(rank)).write_text("done")


def run(function, world_size, *arguments):
    """Run a function in new processes, with the address of a server, the rank and the arguments."""
    server = RendezvousServer("127.0.0.1")
    started = [
        processes.Process(target=function, args=(server.address, r, *arguments), daemon=True) for r in range(world_size)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        assert process.exitcode == 0


@pytest.mark.full
def test_processes_without_variables_train_again_and_again(tmp_path):
    run(train_twice, 2, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def fail_on_rank_2(address, rank, folder):
    """Rank 2 raises an error and stays alive, as an actor does; the others wait for it."""
    begun = 0.0
    try:
        with joined(Rendezvous(address, rank, 3)) as strategy:
            model, optimizer, scheduler = prepared(strategy, "mlp", shard_size=3)
            train(strategy, model, optimizer, scheduler, range(2), "mlp")
            begun = time.monotonic()
            if rank == 2:
                raise FileNotFoundError("an error of the program")
            with all_or_none("compute a number", StepError):  # as free functions do that are collective
                pass
    except (FileNotFoundError, RuntimeError) as error:
        heard = {"seconds": time.monotonic() - begun, "notes": getattr(error, "__notes__", [])}
        Path(folder, f"{rank}.json").write_text(json.dumps(heard))
        kept = error  # with its traceback, which refers to the model
        until = time.monotonic() + 60
        while len(list(Path(folder).iterdir())) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        del kept


@pytest.mark.full
def test_ranks_hear_of_an_error_of_a_rank_whose_process_stays_alive(tmp_path):
    run(fail_on_rank_2, 3, str(tmp_path))
    heard = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert all(each["seconds"] < 20 for each in heard), heard
    assert not heard[2]["notes"]
    notes = [note for each in heard[:2] for note in each["notes"]]
    assert len(notes) == 2 and all("was in the call to compute a number (all_reduce)" in note for note in notes), notes
    assert any("rank 2 ended with FileNotFoundError: an error of the program" in note for note in notes), notes


def die_during_a_save(address, rank, folder):
    """Rank 1 is killed in the background thread of its save, while rank 0 trains on."""
    write = saving.write_components

    def killed(*args):
        if rank == 1:
            os._exit(0)
        return write(*args)

    with pytest.raises(RuntimeError) as lost, joined(Rendezvous(address, rank, 2)) as strategy:
        model, *_ = prepared(strategy, "mlp")
        with patch.object(saving, "write_components", killed):
            strategy.save_ckpt(model, Path(folder, "ckpts"), "tag", async_save=True)
            with all_or_none("compute a number", StepError):
                background_save._in_flight[0].ended.wait(60)
    assert len(lost.value.__notes__) == 2
    first, second = lost.value.__notes__
    assert "was in the call to compute a number" in first
    assert "rank 1 did not make this call, or ended without a report" in first
    assert second.startswith("Closing the strategy then failed: cannot save ")


def lose_a_rank_in_a_save(address, rank, folder):
    strategy = joined(Rendezvous(address, rank, 2))
    model, *_ = prepared(strategy, "mlp")
    if rank == 1:
        with patch.object(saving, "write_components", lambda *_: os._exit(0)):
            strategy.save_ckpt(model, Path(folder, "ckpts"), "tag", async_save=True)
            threading.Event().wait(60)
    strategy.save_ckpt(model, Path(folder, "ckpts"), "tag", async_save=True)
    with pytest.raises(CheckpointError, match="cannot save ") as failed:
        strategy.wait_for_checkpoint()
    [note] = failed.value.__notes__
    assert "rank 1 did not make this call, or ended without a report" in note


@pytest.mark.full
@pytest.mark.parametrize("lose", [die_during_a_save, lose_a_rank_in_a_save])
def test_the_error_of_a_block_and_the_lost_rank_are_named_if_a_save_fails_too(tmp_path, lose):
    run(lose, 2, str(tmp_path))
