"""The simulated accelerator: what each detector finds, and what each operator and collective refuses."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

import pytest
import simulated_accelerator
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

pytestmark = [pytest.mark.simulated, pytest.mark.ranks(1)]

LARGE = 1 << 12


def device():
    return torch.device("sim", torch.accelerator.current_device_index())


def side_stream():
    return torch.Stream(device())


def ordered_after(stream):
    """Let the current stream wait for all that ``stream`` has begun."""
    torch.accelerator.current_stream().wait_stream(stream)


def found():
    """Return the kinds of what was reported."""
    return [text.split(":")[0] for text in simulated_accelerator.reports()]


def isnan(tensor):
    return bool(tensor.isnan().all())


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_torch_takes_it_for_the_accelerator():
    assert torch.accelerator.current_accelerator().type == "sim"
    assert torch.get_device_module() is torch.sim
    assert dist.get_backend_config() == "cpu:gloo,sim:simccl"


@pytest.mark.parametrize("operation", [torch.add, torch.matmul, torch.dot, torch.Tensor.mul_])
def test_tensors_of_the_device_and_of_the_cpu_do_not_mix(operation):
    ours, theirs = torch.ones(4, device=device()), torch.ones(4)
    for pair in ((ours, theirs), (theirs, ours)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            operation(*pair)


def test_scalars_of_the_cpu_and_indices_mix_as_with_cuda():
    ours = torch.arange(4.0, device=device())
    assert (ours * torch.tensor(2.0))[torch.tensor([1, 3])].tolist() == [2.0, 6.0]


def test_foreach_operators_check_each_position():
    ours, theirs = torch.ones(4, device=device()), torch.ones(4)
    torch._foreach_add_([ours, theirs], [ours, theirs])
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch._foreach_add_([ours, theirs], [theirs, ours])


def test_modules_move_and_keep_their_parameters():
    module = nn.Linear(4, 4)
    parameter = module.weight
    value = parameter.detach().clone()
    assert module.to(device()).weight is parameter and parameter.device == device()
    module(torch.ones(2, 4, device=device())).sum().backward()
    assert parameter.grad.device == device()
    assert torch.equal(module.to("cpu").weight, value)


def test_lazily_conjugated_and_negated_tensors_are_read_as_on_the_cpu():
    def read(x):
        conjugated = x.conj()
        yield conjugated.clone()
        yield conjugated @ x
        yield conjugated.imag.clone()
        yield torch.zeros_like(x).copy_(conjugated)
        yield torch.zeros_like(x).conj().copy_(x)
        yield conjugated.cpu()

    on_host = torch.randn(4, dtype=torch.complex64)
    for ours, expected in zip(read(on_host.to(device())), read(on_host), strict=True):
        assert torch.equal(ours.cpu(), expected)


def test_an_lstm_computes_what_it_does_on_the_cpu():
    torch.manual_seed(0)
    lstm, values, results = nn.LSTM(5, 4, num_layers=2, batch_first=True), torch.randn(2, 3, 5), []
    for where in ("cpu", device()):
        lstm.to(where).zero_grad()
        output = lstm(values.to(where))[0]
        output.square().sum().backward()
        results.append([t.detach().to("cpu", copy=True) for t in (output, *(p.grad for p in lstm.parameters()))])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


def test_recomputed_activations_draw_the_same_dropout():
    from torch.utils.checkpoint import checkpoint

    weight, gradients = torch.ones(LARGE, device=device(), requires_grad=True), []
    for recomputes in (False, True):
        torch.manual_seed(1)

        def dropped(x):
            return nn.functional.dropout(x * x, 0.5).exp()

        output = checkpoint(dropped, weight, use_reentrant=False) if recomputes else dropped(weight)
        output.sum().backward()
        gradients.append(weight.grad)
        weight.grad = None
    assert torch.equal(*gradients)


def test_the_backward_pass_runs_in_another_thread():
    threads = set()

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            threads.add(threading.get_ident())
            return gradient

    Identity.apply(torch.ones(2, device=device(), requires_grad=True)).sum().backward()
    assert threads and threading.get_ident() not in threads


def test_a_device_that_does_not_exist_is_refused():
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="sim:64")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.accelerator.set_device_index(64)


def test_a_forked_child_cannot_use_it():
    torch.ones(1, device=device())
    child = os.fork()
    if not child:
        code = 1
        with suppress(RuntimeError):
            torch.ones(1, device=device())
            code = 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


# --- memory -----------------------------------------------------------------------------------------------------------


def test_fresh_memory_is_poisoned():
    assert isnan(torch.empty(LARGE, device=device()).cpu())
    assert isnan(torch.empty(LARGE, dtype=torch.bfloat16, device=device()).cpu())
    assert torch.empty(4, dtype=torch.int32, device=device()).tolist() == [-1] * 4
    assert isnan(torch.empty(LARGE).pin_memory().new_empty(LARGE, pin_memory=True))


def test_a_storage_that_was_freed_cannot_be_used_and_returns_poisoned():
    tensor = torch.ones(LARGE, device=device())
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage was freed"):
        tensor + 1
    tensor.untyped_storage().resize_(LARGE * 4)
    assert isnan(tensor.cpu())


def test_allocated_and_reserved_bytes_have_peaks():
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    tensor = torch.ones(LARGE, dtype=torch.uint8, device=device())
    assert torch.accelerator.memory_allocated() == before + LARGE
    del tensor
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + LARGE
    assert torch.accelerator.memory_reserved() >= before + LARGE
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == before
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == before


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_read_of_what_another_stream_writes_is_a_race_without_an_order():
    stream = side_stream()
    with torch.sim.stream(stream):
        value = torch.ones(LARGE, device=device())
    value + 1
    assert found() == ["RACE"]


@pytest.mark.parametrize("order", ["wait_stream", "event", "synchronize", "synchronize the device", "item"])
def test_every_order_between_streams_prevents_a_race(order):
    stream = side_stream()
    with torch.sim.stream(stream):
        value = torch.ones(LARGE, device=device())
        event = stream.record_event()
        if order == "item":
            value.sum().item()
    if order == "wait_stream":
        ordered_after(stream)
    elif order == "event":
        torch.accelerator.current_stream().wait_event(event)
    elif order == "synchronize":
        stream.synchronize()
    elif order == "synchronize the device":
        torch.accelerator.synchronize()
    value + 1
    assert found() == []


def test_an_event_orders_only_what_was_before_it():
    stream = side_stream()
    with torch.sim.stream(stream):
        event = stream.record_event()
        value = torch.ones(LARGE, device=device())
    torch.accelerator.current_stream().wait_event(event)
    value + 1
    assert found() == ["RACE"]


def test_an_overwrite_of_what_another_stream_reads_is_a_race():
    value, stream = torch.ones(LARGE, device=device()), side_stream()
    stream.wait_stream(torch.accelerator.current_stream())
    with torch.sim.stream(stream):
        total = value.sum()
    value.zero_()
    assert found() == ["RACE"]
    del total


def test_parts_of_one_memory_do_not_race_with_each_other():
    value, stream = torch.ones(2, LARGE, device=device()), side_stream()
    stream.wait_stream(torch.accelerator.current_stream())
    with torch.sim.stream(stream):
        value[0].zero_()
    value[1].zero_()
    assert found() == []
    value[:, 0].zero_()
    assert found() == ["RACE"]


@pytest.mark.parametrize("prevented_by", ["nothing", "record_stream", "an order"])
def test_an_early_reuse_of_memory_is_found(prevented_by):
    value, stream = torch.ones(LARGE, device=device()), side_stream()
    stream.wait_stream(torch.accelerator.current_stream())
    with torch.sim.stream(stream):
        total = value.sum()
    if prevented_by == "record_stream":
        value.record_stream(stream)
    del value
    if prevented_by == "an order":
        ordered_after(stream)
    again = torch.empty(LARGE, device=device())
    assert found() == (["REUSE"] if prevented_by == "nothing" else [])
    del total, again


def test_a_report_names_the_line():
    stream = side_stream()
    with torch.sim.stream(stream):
        value = torch.ones(LARGE, device=device())
    value + 1
    [report] = simulated_accelerator.reports()
    assert "test_simulated_accelerator.py" in report and "test_a_report_names_the_line" in report
    value.zero_()
    with pytest.raises(AssertionError, match="has 1 reports"):
        simulated_accelerator.check()


def test_an_event_is_not_done_at_the_first_question():
    event = torch.accelerator.current_stream().record_event()
    assert [event.query(), event.query()] == [False, True]


# --- copies -----------------------------------------------------------------------------------------------------------


def test_a_copy_from_pinned_memory_arrives_when_it_is_needed():
    source = torch.ones(LARGE).pin_memory()
    value = source.to(device(), non_blocking=True)
    assert (value + 1).cpu().eq(2).all()
    assert found() == []


def test_a_change_of_pinned_memory_before_the_copy_has_read_it_is_found():
    source = torch.ones(LARGE).pin_memory()
    value = source.to(device(), non_blocking=True)
    source.zero_()
    value + 1
    assert found() == ["HOST"]


def test_a_copy_to_pinned_memory_holds_poison_until_the_host_waits():
    value, target = torch.ones(LARGE, device=device()), torch.zeros(LARGE).pin_memory()
    target.copy_(value, non_blocking=True)
    value.add_(1)
    assert isnan(target)
    torch.accelerator.synchronize()
    assert target.eq(1).all()


def test_a_wait_for_a_stream_includes_the_copies_that_it_waited_for():
    value, target, stream = torch.ones(LARGE, device=device()), torch.zeros(LARGE).pin_memory(), side_stream()
    stream.wait_stream(torch.accelerator.current_stream())
    with torch.sim.stream(stream):
        target.copy_(value, non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    assert isnan(target)
    ordered_after(stream)
    torch.accelerator.current_stream().synchronize()
    assert target.eq(1).all()


def test_syncs_and_blocking_copies_are_counted():
    value, pinned = torch.ones(LARGE, device=device()), torch.ones(LARGE).pin_memory()
    with simulated_accelerator.counted() as none:
        pinned.copy_(value, non_blocking=True)
        pinned.to(device(), non_blocking=True)
        value.sum()
        value[torch.tensor([1, 2])]
    assert (none.syncs, none.blocking_to_host, none.blocking_to_device) == (0, 0, 1)  # the indices
    for blocking in (
        value.cpu,
        lambda: value.sum().item(),
        value.nonzero,
        lambda: value[value > 0],
        value.unique,
    ):
        with simulated_accelerator.counted() as one:
            blocking()
        assert one.blocking_to_host >= 1, blocking
    with simulated_accelerator.counted() as waits:
        torch.accelerator.synchronize()
        torch.accelerator.current_stream().synchronize()
        torch.accelerator.current_stream().record_event().synchronize()
    assert (waits.syncs, waits.blocking_to_host) == (3, 0)


# --- random numbers ---------------------------------------------------------------------------------------------------


def test_each_device_draws_from_a_generator_of_its_own():
    draws = {
        "rand": lambda where: torch.rand(4, device=where),
        "dropout": lambda where: nn.functional.dropout(torch.ones(64, device=where), 0.5),
        "randperm": lambda where: torch.randperm(8, device=where),
        "bernoulli": lambda where: torch.full((64,), 0.5, device=where).bernoulli_(),
        "multinomial": lambda where: torch.ones(8, device=where).multinomial(4),
    }
    for name, draw in draws.items():
        torch.manual_seed(3)
        host, state = torch.get_rng_state(), torch.sim.get_rng_state()
        first, second = draw(device()), draw(device())
        assert not torch.equal(first, second), name
        assert torch.equal(torch.get_rng_state(), host), name
        torch.sim.set_rng_state(state)
        assert torch.equal(draw(device()), first), name
        torch.manual_seed(3)
        assert torch.equal(draw(device()), first), name


def test_a_generator_of_the_cpu_is_refused():
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator"):
        torch.ones(4, device=device()).bernoulli_(0.5, generator=torch.Generator())
    own = torch.Generator(device())
    assert torch.rand(4, device=device(), generator=own.manual_seed(1)).equal(
        torch.rand(4, device=device(), generator=own.manual_seed(1))
    )


# --- collectives ------------------------------------------------------------------------------------------------------


def gathered(value):
    output = torch.empty(value.numel() * dist.get_world_size(), device=device())
    return output, lambda **options: dist.all_gather_into_tensor(output, value, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("waits", [True, False])
def test_the_output_of_a_collective_holds_poison_until_the_wait(waits):
    output, gather = gathered(torch.full((4,), float(dist.get_rank()), device=device()))
    work = gather(async_op=True)
    if waits:
        work.wait()
        assert output.tolist() == [0.0] * 4 + [1.0] * 4
        assert found() == []
    else:
        copy = output.clone()
        assert isnan(copy.cpu())
        assert found() == ["RACE"]
        work.wait()
        assert output.tolist() == [0.0] * 4 + [1.0] * 4


@pytest.mark.ranks(2)
def test_an_input_that_is_overwritten_before_the_wait_is_a_race():
    value = torch.ones(4, device=device())
    _, gather = gathered(value)
    work = gather(async_op=True)
    value.zero_()
    assert found() == ["RACE"]
    work.wait()


@pytest.mark.ranks(2)
def test_a_synchronous_collective_runs_on_the_current_stream():
    output, gather = gathered(torch.ones(4, device=device()))
    gather()
    assert output.tolist() == [1.0] * 8
    stream = side_stream()
    stream.wait_stream(torch.accelerator.current_stream())
    with torch.sim.stream(stream):
        gather()
    output + 1
    assert found() == ["RACE"]
    torch.accelerator.synchronize()


@pytest.mark.ranks(2)
def test_a_wait_does_not_block_the_host():
    output, gather = gathered(torch.ones(4, device=device()))
    if dist.get_rank() == 0:
        gather(async_op=True).wait()
    dist.barrier(dist.new_group(backend="gloo"))  # the other rank begins only after it
    if dist.get_rank() == 1:
        gather(async_op=True).wait()
    assert output.tolist() == [1.0] * 8


@pytest.mark.ranks(2)
def test_collectives_compute_what_those_of_gloo_do():
    rank = dist.get_rank()

    def results(where):
        value = torch.arange(4.0, device=where) + 10 * rank
        pair, total, mean, most, given, both, one, swapped, chosen = (value.clone() for _ in range(9))
        lists = [torch.empty(4, device=where) for _ in range(2)]
        dist.all_gather(lists, pair)
        dist.all_reduce(total)
        if where == "cpu":  # gloo has no mean
            mean = total / 2
        else:
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.broadcast(given, 1)
        part = torch.empty(2, device=where)
        dist.reduce_scatter_tensor(part, both)
        dist.reduce(one, 0)
        dist.all_to_all_single(torch.empty(4, device=where), swapped)
        received = torch.empty(4, device=where)
        dist.all_to_all_single(received, swapped)
        every = [torch.empty(4, device=where) for _ in range(2)] if rank == 0 else None
        dist.gather(chosen, every, 0)
        dist.scatter(chosen, [value, value + 1] if rank == 0 else None, 0)
        peer = torch.empty(4, device=where)
        for call, tensor in [(dist.send, value), (dist.recv, peer)][:: 1 if rank else -1]:
            call(tensor, 1 - rank)
        flags = torch.tensor([rank == 0, False], device=where)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        firsts = [one] if rank == 0 else []
        return [*lists, total, mean, most, given, part, *firsts, received, *(every or []), chosen, peer, flags]

    for ours, theirs in zip(results(device()), results("cpu"), strict=True):
        assert torch.equal(ours.cpu(), theirs)
    assert found() == []


@pytest.mark.ranks(2)
def test_what_nccl_refuses_is_refused():
    ones = torch.ones(4, 4, device=device())
    refused = {
        "Tensors must be contiguous": lambda: dist.all_reduce(ones.t()[:2]),
        "data type is not supported": lambda: dist.all_reduce(ones.to(torch.int16)),
        "bitwise reductions": lambda: dist.all_reduce(ones.int(), op=dist.ReduceOp.BOR),
        "AVG with Boolean": lambda: dist.all_reduce(ones.bool(), op=dist.ReduceOp.AVG),
        "same type as input": lambda: dist.all_gather_into_tensor(torch.empty(8, 4, device=device()), ones.half()),
        "world_size times input": lambda: dist.all_gather_into_tensor(torch.empty(4, 4, device=device()), ones),
        "expected all on one": lambda: dist.all_gather([ones, torch.ones(4, 4, device="sim:7")], ones),
    }
    for message, call in refused.items():
        with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
            call()
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(4), group=dist.new_group(backend="simccl"))


@pytest.mark.ranks(2)
def test_two_ranks_on_one_device_are_refused():
    torch.accelerator.set_device_index(0)
    try:
        with pytest.raises(RuntimeError, match="Duplicate GPU detected"):
            dist.all_reduce(torch.ones(1, device="sim"), group=dist.new_group(backend="simccl"))
    finally:
        torch.accelerator.set_device_index(dist.get_rank())


@pytest.mark.ranks(2)
def test_a_barrier_blocks_the_host_and_counts_as_a_sync():
    with simulated_accelerator.counted() as counters:
        dist.barrier(dist.new_group(backend="simccl"), device_ids=[dist.get_rank()])
    assert counters.syncs == 1


@pytest.mark.ranks(2)
def test_dtensors_are_gathered_on_the_device():
    mesh = dist.init_device_mesh("sim", (2,))
    full = torch.arange(8.0, device=device())
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    assert sharded.to_local().numel() == 4
    assert sharded.full_tensor().tolist() == full.tolist()
    assert found() == []


# --- elsewhere --------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_processes_of_its_environment_load_it_when_they_import_torch():
    import subprocess

    script = "import torch; print(torch.accelerator.current_accelerator(), torch.accelerator.device_count())"
    environment = simulated_accelerator.environment(devices=3)
    process = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == ["sim", "3"]


@pytest.mark.full
def test_a_forked_child_can_use_what_its_parent_has_only_loaded():
    import subprocess

    script = """
import os, torch
child = os.fork()
if not child:
    torch.ones(1, device="sim").item()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", script], env=simulated_accelerator.environment(devices=1), check=True)
