"""Mistakes in the package and in torch's FSDP2 that the simulated accelerator must see: waits that are missing.

Each row of MUTATIONS changes one line while a scenario runs on two ranks. It is caught if a detector reports something
(race), if the scenario computes other values than without the change (values), or if it raises (error). Rows of NOT_SEEN
are not caught, and say why.
"""

from __future__ import annotations

import pytest
import simulated_accelerator
import torch
import torch.distributed as dist
from helpers.models import batch_of, build, device, loss_of
from helpers.mutations import mutated
from helpers.training import prepared, strategy_for, train

from fsdp2_strategy import stream_weights
from fsdp2_strategy.checkpoint.training_state import optimizer_tensors
from fsdp2_strategy.model import offload, reload
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.model.offloading import _host_buffers
from fsdp2_strategy.model.placeholders import values_of

pytestmark = [pytest.mark.simulated, pytest.mark.full, pytest.mark.each, pytest.mark.ranks(2)]


# --- scenarios: each returns values in host memory --------------------------------------------------------------------


def values(model, optimizer):
    found = {**named_parameters(model), **optimizer_tensors(model, optimizer)}
    return [values_of(found[name]).detach().cpu() for name in sorted(found)]


def training(_, **config):
    strategy = strategy_for(**config)
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, range(2))
    return values(model, optimizer)


def replicated(folder):
    return training(folder, shard_size=1)


def accumulation(_):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    with strategy.accumulate(model):
        for step in range(2):
            strategy.backward(loss_of("llama", model, batch_of("llama", step, dist.get_rank())), model, optimizer)
    strategy.optimizer_step(optimizer, model, None)
    return values(model, optimizer)


def in_host_memory(folder):
    return training(folder, cpu_offload=True)


def offloading(_):
    """Offload while kernels run on the current stream, which is not the default one, and reload."""
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, range(1))
    stream = torch.Stream(device())
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    values_of(parameter).mul_(1.5)
            offload(model)
            offload(optimizer)
            away = [values_of(parameter).clone() for parameter in model.parameters()]
            reload(model)
            reload(optimizer)
        train(strategy, model, optimizer, scheduler, range(1, 2))
    torch.accelerator.current_stream().wait_stream(stream)
    _host_buffers.clear()
    return [*away, *values(model, optimizer)]


def saving(folder, **options):
    """Save on a stream that is not the default one, train on, and load."""
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    stream = torch.Stream(device())
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        train(strategy, model, optimizer, scheduler, range(1))
        strategy.save_ckpt(model, folder, "saved", **options)
        train(strategy, model, optimizer, scheduler, range(1, 2))
        strategy.wait_for_checkpoint()
        strategy.load_ckpt(model, folder, tag="saved")
        train(strategy, model, optimizer, scheduler, range(1, 2))
    torch.accelerator.current_stream().wait_stream(stream)
    return values(model, optimizer)


def saving_in_the_background(folder):
    return saving(folder, async_save=True)


def streaming(_):
    strategy = strategy_for()
    model, _, _ = prepared(strategy)
    return [tensor.cpu() for _, tensor in stream_weights(model, bucket_bytes=4096)]


def streaming_changes(_):
    strategy = strategy_for()
    model, _, _ = prepared(strategy)
    first = stream_weights(model, retain="copy")
    found = [tensor.cpu() for _, tensor in first]
    with torch.no_grad():
        for parameter in model.parameters():
            values_of(parameter).view(-1)[:1] += 1
    for _, given in stream_weights(model, since=first.version, retain="copy"):
        tensors = [given] if isinstance(given, torch.Tensor) else [given.values]
        found += [tensor.cpu() for tensor in tensors]
    return found




FSDP = "torch.distributed.fsdp._fully_shard"
COLLECTIVES, GROUP, STATE = f"{FSDP}._fsdp_collectives", f"{FSDP}._fsdp_param_group", f"{FSDP}._fsdp_state"
QUEUE, BUFFERS = ("fsdp2_strategy.model.offloading:" + name for name in ("CopyQueue", "_HostBuffers"))
STREAM = "fsdp2_strategy.rollout"
SAVES, WRITE, READ = "fsdp2_strategy.checkpoint.background_save", "fsdp2_strategy.storage.write", "fsdp2_strategy.storage.verified_read"
ORDER = "fsdp2_strategy.distributed.device_order:DeviceOrder.enter"

MUTATIONS = {
    # torch's FSDP2
    "all-gather: kernels do not wait": (
        f"{COLLECTIVES}:foreach_all_gather_copy_out", "current_stream().wait_event(all_gather_event)", "current_stream()", training),
    "all-gather: does not wait for the copy-in": (
        f"{COLLECTIVES}:foreach_all_gather", "all_gather_stream.wait_stream(all_gather_copy_in_stream)", "pass", training),
    "all-gather: on the current stream": (
        f"{COLLECTIVES}:foreach_all_gather", "with device_handle.stream(all_gather_stream):", "if True:", training),
    "all-gather: the event is recorded on the wrong stream": (
        f"{COLLECTIVES}:foreach_all_gather", "all_gather_stream.record_event()", "device_handle.Stream().record_event()", training),
    "all-gather: streams do not wait for the optimizer": (
        f"{STATE}:FSDPState._root_pre_forward", "_stream.wait_stream(current_stream)", "_stream", training),
    "all-gather: the next one does not wait for the copy-out": (
        f"{GROUP}:FSDPParamGroup._wait_all_gather_streams_on_event", "event is not None", "False", training),
    "reduce-scatter: does not wait for the copy-in": (
        f"{COLLECTIVES}:foreach_reduce", "reduce_scatter_stream.wait_stream(current_stream)", "pass", training),
    "reduce-scatter: kernels do not wait for the last one": (
        f"{GROUP}:FSDPParamGroup.finalize_backward", "self.device_handle.current_stream().wait_event(event)", "pass", training),
    "reduce-scatter: the event is recorded on the wrong stream": (
        f"{COLLECTIVES}:foreach_reduce", "post_reduce_event = post_reduce_stream.record_event()",
        "post_reduce_event = device_handle.Stream().record_event()", training),
    "all-reduce of replicas: does not wait for the reduce-scatter": (
        f"{COLLECTIVES}:foreach_reduce", "all_reduce_stream.wait_stream(reduce_scatter_stream)", "pass", replicated),
    "gradients in host memory: the host does not wait": (
        f"{GROUP}:FSDPParamGroup.finalize_backward", "fsdp_param.grad_offload_event.synchronize()", "pass", in_host_memory),
    # the package
    "offload: copies do not wait for kernels": (
        f"{QUEUE}.__enter__", "self._stream.wait_stream(torch.accelerator.current_stream())", "pass", offloading),
    "offload: the host does not wait": (f"{QUEUE}.__exit__", "self._stream.synchronize()", "pass", offloading),
    "offload: the host waits for another stream": (
        f"{QUEUE}.__exit__", "self._stream.synchronize()", "torch.accelerator.current_stream().synchronize()", offloading),
    "reload: kernels do not wait": (
        f"{QUEUE}.__exit__", "torch.accelerator.current_stream().wait_stream(self._stream)", "pass", offloading),
    "offload: copies on another stream": (
        f"{QUEUE}.copy_all", "with self._stream:", "with torch.Stream(self._stream.device):", offloading),
    "offload: a pinned buffer is taken before it was read": (f"{BUFFERS}.take", "copied.synchronize()", "pass", offloading),
    "save in the background: copies do not wait for kernels": (
        f"{QUEUE}.__enter__", "self._stream.wait_stream(torch.accelerator.current_stream())", "pass", saving_in_the_background),
    "save in the background: the host does not wait": (
        f"{QUEUE}.__exit__", "self._stream.synchronize()", "pass", saving_in_the_background),
    "save: threads copy on the default stream": (ORDER, "self.stream is not None", "False", saving),
    "save: threads use the first device": (ORDER, "set_device(self.device)", "pass", saving),
    "stream: does not wait for the gather": (f"{STREAM}.bucket:Bucket.wait", "work.wait()", "pass", streaming),
    "stream: does not wait for the gather of changes": (
        f"{STREAM}.changed_buckets:ChangesBucket.gather", "work.wait()", "pass", streaming_changes),
    "stream: rows are written on another stream": (
        f"{STREAM}.bucket:Bucket.start", "part.write(rows[own, self._slices[name]])",
        "torch.accelerator.set_stream(torch.Stream(rows.device)); part.write(rows[own, self._slices[name]])", streaming),
}  # fmt: skip

NOT_SEEN = ()
"""Of MUTATIONS, those that no detector sees, with the reason."""


def outcome_of(scenario, folder):
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    return scenario(folder)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_wait_is_seen(name, tmp_path):
    path, old, new, scenario = MUTATIONS[name]
    expected = outcome_of(scenario, tmp_path / "expected")
    simulated_accelerator.check()
    default = torch.accelerator.current_stream()
    error, found = None, []
    try:
        with mutated(path, old, new):
            found = outcome_of(scenario, tmp_path / "mutated")
    except (RuntimeError, ValueError) as raised:
        error = raised
    torch.accelerator.set_stream(default)
    torch.accelerator.synchronize()
    reports = simulated_accelerator.reports()
    same = len(found) == len(expected) and all(map(torch.equal, found, expected))
    seen = [*(["race"] if reports else []), *(["error"] if error else ["values"] * (not same))]
    assert bool(seen) == (name not in NOT_SEEN)
