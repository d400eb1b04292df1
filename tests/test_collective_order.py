"""The checker of the order of collectives: it names wrong programs, and passes right ones."""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from helpers import collective_record
from helpers.collective_order import mistakes
from helpers.collective_record import Call, Group, Record
from helpers.worlds import some, some_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

RunOn = Callable[..., None]


def _refused(run_on: RunOn, ranks: int, program: Callable[..., None]) -> str:
    with pytest.raises(AssertionError) as refused:
        run_on(ranks, program)
    assert "--- rank" not in str(refused.value), "a rank has failed"
    return str(refused.value)


# --- what is recorded -------------------------------------------------------------------------------------------------


def _recorded(call: Callable[[], object]) -> list[str]:
    before = len(collective_record.end().calls)
    call()
    return [each.kind for each in collective_record.end().calls[before:]]


@pytest.mark.full
@pytest.mark.ranks(2)
def test_calls_are_recorded_that_torch_makes_in_python_in_cpp_and_in_backward():
    x, group, pair = torch.ones(4), dist.group.WORLD, torch.ones(2)
    assert _recorded(lambda: dist.all_reduce(x)) == ["allreduce"]
    assert _recorded(lambda: dist.all_gather_into_tensor(x, pair)) == ["allgather_base"]
    assert _recorded(lambda: dist._broadcast_coalesced(group, [x], 1 << 20, 0)) == ["broadcast"]
    assert _recorded(lambda: functional.all_reduce(x, "sum", group) + 1) == ["allreduce"]
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(x, mesh, [Partial()])
    assert _recorded(lambda: partial.redistribute(placements=[Replicate()]).to_local() + 1) == ["allreduce"]
    assert _recorded(lambda: partial.redistribute(placements=[Shard(0)]).to_local() + 1)
    weight = torch.ones(4, requires_grad=True)
    full = DTensor.from_local(weight, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    assert _recorded(lambda: full.to_local(grad_placements=[Partial()]).sum().backward())


@pytest.mark.ranks(2)
def test_a_record_has_the_reduction_and_the_lines_that_called():
    dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX)
    functional.all_reduce(torch.ones(3), "min", dist.group.WORLD).wait()
    dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4), op=dist.ReduceOp.SUM)
    calls = collective_record.end().calls
    assert [each.agreed for each in calls] == [("float32", 3, "MAX"), ("float32", 3, "MIN"), ("float32", 2, "SUM")]
    assert all(re.fullmatch(r"tests/test_collective_order\.py:\d+", each.place) for each in calls)
    from fsdp2_strategy.distributed.agreement import any_rank

    any_rank(False)
    assert re.match(
        r"fsdp2_strategy/\S+:\d+ from tests/test_collective_order\.py:\d+", collective_record.end().calls[-1].place
    )


# --- one group --------------------------------------------------------------------------------------------------------

_kept: list[object] = []
"""Collectives in flight: gloo waits for those that are freed."""


def _one_more_on_rank_0():
    dist.barrier()
    if dist.get_rank() == 0:
        _kept.append(dist.all_reduce(torch.ones(2), async_op=True))


def _silent_group():
    """Make a group whose collectives exchange nothing: gloo ends the process if sizes differ."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    return dist.new_group(backend="fake")


def _other_kinds():
    x, rank, group = torch.ones(2), dist.get_rank(), _silent_group()
    dist.all_reduce(x, group=group) if rank == 0 else dist.broadcast(x, 0, group=group)


def _other_sizes():
    dist.all_reduce(torch.ones(4 + dist.get_rank() % 2), group=_silent_group())


def _other_dtypes():
    dtype = (torch.int32, torch.float32)[dist.get_rank() % 2]
    _kept.append(dist.all_reduce(torch.ones(4, dtype=dtype), async_op=True))


def _other_reductions():
    dist.all_reduce(torch.ones(4), op=(dist.ReduceOp.SUM, dist.ReduceOp.MAX)[dist.get_rank() % 2])


def _other_functional_reductions():
    functional.all_reduce(torch.ones(4), ("sum", "max")[dist.get_rank() % 2], dist.group.WORLD).wait()


def _other_roots():
    _kept.append(dist.broadcast(torch.ones(4), dist.get_rank() % 2, async_op=True))


PROGRAMS = [
    (_one_more_on_rank_0, r"rank 1: no further collective"),
    (_other_kinds, r"rank 0: allreduce\(float32, 2, SUM\)[^\n]*\n +rank 1: broadcast\(float32, 2, from rank 0\)"),
    (_other_sizes, r"rank 1: allreduce\(float32, 5, SUM\)"),
    (_other_dtypes, r"rank 0: allreduce\(int32, 4, SUM\)"),
    (_other_reductions, r"rank 1: allreduce\(float32, 4, MAX\)"),
    (_other_functional_reductions, r"rank 1: allreduce\(float32, 4, MAX\)"),
    (_other_roots, r"rank 1: broadcast\(float32, 4, from rank 1\)"),
]


@pytest.mark.each
@pytest.mark.parametrize("ranks", some([2, 3], [2]))
@pytest.mark.parametrize(("program", "named"), some_rows(PROGRAMS, PROGRAMS[:1]))
def test_ranks_that_begin_different_collectives_are_named(program, named, ranks, run_on):
    text = _refused(run_on, ranks, program)
    assert re.search(named, text), text
    lines = range(program.__code__.co_firstlineno, program.__code__.co_firstlineno + 8)
    assert {int(line) for line in re.findall(r"tests/test_collective_order\.py:(\d+)", text)} <= set(lines)


def _record(*calls: tuple[str, object]) -> Record:
    """Return a record of all-to-alls of the default group of two ranks, and of messages to and from rank 0 or 1."""
    group = Group("0", (0, 1), "cpu", False)
    made = []
    for kind, details in calls:
        sent, received = details if kind == "alltoall_base" else (None, None)
        peer = (details[0], 0) if kind in ("send", "recv") else None
        agreed = ("float32", details[1]) if peer else ("float32",)
        made.append(Call(group, kind, agreed, sent, received, peer, "MainThread", "here:1"))
    return Record(made, None)


@pytest.mark.full
def test_sizes_of_all_to_alls_and_of_messages_are_compared_by_pairs():  # gloo would wait for the missing elements
    uneven = [_record(("alltoall_base", ((1, 2), (1, 3)))), _record(("alltoall_base", ((3, 4), (2, 4))))]
    assert not mistakes(uneven)
    [text] = mistakes([uneven[0], _record(("alltoall_base", ((3, 4), (1, 4))))])
    assert "rank 1: alltoall_base(float32, (3, 4), (1, 4)) at here:1" in text
    assert not mistakes([_record(("send", (1, 4)), ("recv", (1, 2))), _record(("send", (0, 2)), ("recv", (0, 4)))])
    [text] = mistakes([_record(("send", (1, 4))), _record(("recv", (0, 5)))])
    assert "1 messages from rank 0 to rank 1 with tag 0 are sent, 1 received: send(float32, 4)" in text
    [text] = mistakes([_record(("send", (1, 4))), _record()])
    assert "0 received" in text


# --- several groups ---------------------------------------------------------------------------------------------------


def _in_threads(*works: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work, name=f"thread {i}") for i, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _opposite_orders_of_threads():
    groups, rank = [dist.new_group([0, 1]) for _ in range(2)], dist.get_rank()
    if rank > 1:
        return

    def run(number: int) -> None:
        time.sleep(0.5 * (number == rank))
        dist.all_reduce(torch.ones(4), group=groups[number])

    _in_threads(lambda: run(0), lambda: run(1))


def _opposite_orders_in_one_thread():
    groups, rank = [dist.new_group([0, 1]) for _ in range(2)], dist.get_rank()
    if rank < 2:
        works = [dist.all_reduce(torch.ones(4), group=groups[(i + rank) % 2], async_op=True) for i in range(2)]
        for work in works:
            work.wait()


def _opposite_orders_and_a_wait_on_one_rank():
    groups, rank = [dist.new_group([0, 1]) for _ in range(2)], dist.get_rank()
    if rank < 2:
        works = []
        for i in range(2):
            works.append(dist.all_reduce(torch.ones(4), group=groups[(i + rank) % 2], async_op=True))
            if rank == 0:
                works[-1].wait()  # the other rank has the second one in flight
        for work in works:
            work.wait()


def _threads_without_an_order():
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    if dist.get_rank() < 2:
        begins = threading.Event()

        def reduce_in_background():
            tensor = torch.ones(4)
            begins.set()
            dist.all_reduce(tensor, group=groups[1])

        other = threading.Thread(target=reduce_in_background, name="other")
        other.start()
        begins.wait()  # a thread may start late on a busy machine
        time.sleep(0.01)
        dist.all_reduce(torch.ones(4), group=groups[0])
        other.join()


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "program",
    [
        _opposite_orders_of_threads,
        _opposite_orders_in_one_thread,
        _opposite_orders_and_a_wait_on_one_rank,
        _threads_without_an_order,
    ],
)
def test_opposite_orders_of_two_groups_are_named(program, ranks, run_on):
    text = _refused(run_on, ranks, program)
    assert "contradict each other" in text
    assert len(re.findall(r"allreduce\(float32, 4, SUM\) at tests/test_collective_order\.py:\d+", text)) == 6, text
    assert len(set(re.findall(r"group (\d+) of the ranks \[0, 1\]", text))) == 2


def _circle():
    rank = dist.get_rank()
    pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (1, 2), (0, 2))}
    order = {0: ((0, 1), (0, 2)), 1: ((1, 2), (0, 1)), 2: ((0, 2), (1, 2))}[rank]
    works = [dist.all_reduce(torch.ones(4), group=pairs[pair], async_op=True) for pair in order]
    for work in works:
        work.wait()


@pytest.mark.full
def test_a_circle_of_three_groups_is_named(run_on):
    text = _refused(run_on, 3, _circle)
    assert all(f"of the ranks {pair}" in text for pair in ([0, 1], [1, 2], [0, 2]))


# --- right programs ---------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.ranks(3)
def test_overlapping_collectives_in_one_order_are_right():
    groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 1, 2])]
    mine = [group for group in groups if isinstance(group, dist.ProcessGroup)]
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in mine for _ in range(3)]
    for work in reversed(works):
        work.wait()


@pytest.mark.full
@pytest.mark.ranks(2)
def test_opposite_orders_one_after_the_other_are_right():
    first, second = dist.new_group(), dist.new_group()
    for group in (first, second, second, first):
        dist.all_reduce(torch.ones(4), group=group)
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in (first, second)]
    for work in works:
        work.wait()
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in (second, first)]
    for work in works:
        work.wait()


@pytest.mark.full
@pytest.mark.ranks(2)
def test_groups_of_the_host_may_be_used_in_any_order():
    group, rank = dist.new_group(backend="gloo"), dist.get_rank()

    def on_host() -> None:
        time.sleep(0.2 * rank)
        dist.all_reduce(torch.ones(4), group=group)

    def on_device() -> None:
        time.sleep(0.2 * (1 - rank))
        dist.all_reduce(torch.ones(4))

    other = threading.Thread(target=on_host)
    other.start()
    on_device()
    other.join()


@pytest.mark.full
@pytest.mark.ranks(2)
def test_another_thread_may_begin_collectives_while_the_main_one_waits():
    groups = [dist.new_group(), dist.new_group()]
    for group in groups:
        dist.all_reduce(torch.ones(4), group=groups[0])
        _in_threads(lambda group=group: dist.all_reduce(torch.ones(4), group=group))


@pytest.mark.full
@pytest.mark.ranks(2)
def test_messages_and_uneven_all_to_alls_are_paired():
    rank = dist.get_rank()
    sizes = [[1, 2], [3, 3]]
    sent, received = sizes[rank], [of_rank[rank] for of_rank in sizes]
    dist.all_to_all_single(torch.ones(sum(received)), torch.ones(sum(sent)), received, sent)
    work = dist.isend(torch.ones(4), 1 - rank)
    dist.recv(torch.ones(4), 1 - rank)
    work.wait()


@pytest.mark.full
@pytest.mark.ranks(2)
def test_nothing_is_compared_after_a_failure(end_ranks):
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.all_reduce(torch.ones(4), group=group)
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.ones(4), group=group)


@pytest.mark.full
@pytest.mark.differing_collectives("the marker is tested")
@pytest.mark.ranks(2)
def test_differences_on_purpose_are_marked(end_ranks):
    _one_more_on_rank_0()
