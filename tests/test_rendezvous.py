"""Ranks of one attempt meet, whatever dead ones left in the store."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from fsdp2_strategy import MeshError
from fsdp2_strategy.distributed.rendezvous import fresh_store


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
    with pytest.raises(MeshError, match="rank 0 still waits for another rank after the time-out"):
        fresh_store(dist.HashStore(), 0, 2, timedelta(seconds=0.2))
