"""Mistakes in the package and in torch's FSDP2 that the simulated accelerator must see: waits that are missing.

Each row of MUTATIONS changes one line while a scenario runs on two ranks. It is caught if a detector reports something
(race), if the scenario computes other values than without the change (values), or if it raises (error). Rows of
NOT_SEEN are not caught, and say why.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import simulated_accelerator
import torch
from helpers.models import device
from helpers.mutations import mutated
from helpers.training import prepared, strategy_for, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from fsdp2_strategy import sizes, stream_weights
from fsdp2_strategy.checkpoint.training_state import optimizer_tensors
from fsdp2_strategy.distributed.generators import drawing_from, restored_generators, torch_states
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


def plain(policy=None, mesh_shape=(2,)):
    """Train with torch's FSDP2 alone: waits of the package do not cover those that are missing."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))).to(device())
    names = ("replicate", "shard") if len(mesh_shape) == 2 else ("shard",)
    mesh = init_device_mesh("sim", mesh_shape, mesh_dim_names=names)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, offload_policy=policy or OffloadPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.full((4, 32), 1.0 + step, device=device())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.to_local().detach().cpu() for parameter in model.parameters()]


def plain_training(_):
    return plain()


def replicated(_):
    return plain(mesh_shape=(2, 1))


def in_host_memory(_):
    return plain(CPUOffloadPolicy())


def drawing(_):
    """Draw numbers after blocks that leave the generators as they were."""
    found = []
    with restored_generators(1):
        torch.rand(2, device=device())
    found.append(torch.rand(4, device=device()).cpu())
    states = torch_states(device())
    torch.rand(2, device=device())
    with drawing_from(states, device()):
        found.append(torch.rand(4, device=device()).cpu())
    found.append(torch.rand(4, device=device()).cpu())
    return found


def offloading(_):
    """Offload while kernels run on the current stream, which is not the default one, and reload."""
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    stream = torch.Stream(device())
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        train(strategy, model, optimizer, scheduler, range(1))
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


def saving_large_tensors(folder):
    with patch.object(sizes, "SMALL_WRITE_BYTES", 0):
        return saving(folder)


def saving_in_the_background(folder):
    return saving(folder, async_save=True)


def streaming(_):
    strategy = strategy_for()
    model, _, _ = prepared(strategy)
    return [tensor.cpu() for _, tensor in stream_weights(model, bucket_bytes=4096)]


FSDP = "torch.distributed.fsdp._fully_shard"
COLLECTIVES, GROUP, STATE = f"{FSDP}._fsdp_collectives", f"{FSDP}._fsdp_param_group", f"{FSDP}._fsdp_state"
QUEUE = "fsdp2_strategy.model.offloading:CopyQueue"
STREAM = "fsdp2_strategy.rollout"
SAVES, WRITE, READ = (
    "fsdp2_strategy.checkpoint.background_save",
    "fsdp2_strategy.storage.write",
    "fsdp2_strategy.storage.verified_read",
)
READER = "Reader"
RANDOM = "fsdp2_strategy.distributed.generators"
ORDER = "fsdp2_strategy.distributed.device_order:DeviceOrder.enter"

MUTATIONS = {
    # torch's FSDP2
    "all-gather: kernels do not wait": (
        f"{COLLECTIVES}:foreach_all_gather_copy_out", "current_stream().wait_event(all_gather_event)",
        "current_stream()",
        training),
    "all-gather: does not wait for the copy-in": (
        f"{COLLECTIVES}:foreach_all_gather", "all_gather_stream.wait_stream(all_gather_copy_in_stream)", "pass",
        training),
    "all-gather: on the current stream": (
        f"{COLLECTIVES}:foreach_all_gather", "with device_handle.stream(all_gather_stream):", "if True:", training),
    "all-gather: the event is recorded on the wrong stream": (
        f"{COLLECTIVES}:foreach_all_gather", "all_gather_stream.record_event()",
        "device_handle.Stream().record_event()",
        training),
    "all-gather: streams do not wait for the optimizer": (
        f"{STATE}:FSDPState._root_pre_forward", "_stream.wait_stream(current_stream)", "_stream", training),
    "all-gather: the next one does not wait for the copy-out": (
        f"{GROUP}:FSDPParamGroup._wait_all_gather_streams_on_event", "event is not None", "False", training),
    "reduce-scatter: does not wait for the copy-in": (
        f"{COLLECTIVES}:foreach_reduce", "reduce_scatter_stream.wait_stream(current_stream)", "pass", training),
    "reduce-scatter: the optimizer does not wait for its last kernels": (
        f"{GROUP}:FSDPParamGroup.finalize_backward", "self.device_handle.current_stream().wait_event(event)", "pass",
        plain_training),
    "reduce-scatter: the optimizer waits for neither of its events": (
        [(f"{GROUP}:FSDPParamGroup.finalize_backward", "self.device_handle.current_stream().wait_event(event)", "pass"),
         (f"{STATE}:FSDPState._root_post_backward_final_callback", ".wait_event(rs_state.event)", "")], plain_training),
    "all-reduce of replicas: does not wait for the reduce-scatter": (
        f"{COLLECTIVES}:foreach_reduce", "all_reduce_stream.wait_stream(reduce_scatter_stream)", "pass", replicated),
    "gradients in host memory: the host does not wait": (
        f"{GROUP}:FSDPParamGroup.finalize_backward", "fsdp_param.grad_offload_event.synchronize()", "pass",
        in_host_memory),
    # the package
    "offload: copies do not wait for kernels": (
        f"{QUEUE}.__enter__", "self._stream.wait_stream(torch.accelerator.current_stream())", "pass", offloading),
    "offload: the host does not wait": (f"{QUEUE}.__exit__", "self._stream.synchronize()", "pass", offloading),
    "offload: the host waits for another stream": (
        f"{QUEUE}.__exit__", "self._stream.synchronize()", "torch.accelerator.current_stream().synchronize()",
        offloading),
    "reload: kernels do not wait": (
        f"{QUEUE}.__exit__", "torch.accelerator.current_stream().wait_stream(self._stream)", "pass", offloading),
    "save: a block is written before its copy has arrived": (
        f"{WRITE}:_write", ".copy_(tensor)", ".copy_(tensor, non_blocking=True)", saving_large_tensors),
    "save: small tensors are written before their copy has arrived": (
        f"{WRITE}:_write_packed", ".copy_(flat)", ".copy_(flat, non_blocking=True)", saving),
    "load: memory of a block is used again before its copy has read it": (
        f"{READ}:{READER}._read_ranges", "values.to(read.dtype))", "values.to(read.dtype), non_blocking=True)", saving),
    "random numbers: a block does not restore the generator of the device": (
        f"{RANDOM}:set_accelerator_state", "device_module(device_type).set_rng_state(state)", "pass", drawing),
    "random numbers: a block does not draw from the states that it is given": (
        f"{RANDOM}:set_torch_states", "device_module(device.type).set_rng_state(states[1], device)", "pass", drawing),
    "save in the background: copies do not wait for kernels": (
        f"{QUEUE}.__enter__", "self._stream.wait_stream(torch.accelerator.current_stream())", "pass",
        saving_in_the_background),
    "save in the background: the host does not wait": (
        f"{QUEUE}.__exit__", "self._stream.synchronize()", "pass", saving_in_the_background),
    "save: threads copy on the default stream": (ORDER, "self.stream is not None", "False", saving),
    "save: threads use the first device": (ORDER, "set_device(self.device)", "pass", saving),
    "stream: does not wait for the gather": (f"{STREAM}.bucket:Bucket.wait", "work.wait()", "pass", streaming),
    "stream: rows are written on another stream": (
        f"{STREAM}.bucket:Bucket.start", "part.write(rows[own, self._slices[name]])",
        "torch.accelerator.set_stream(torch.Stream(rows.device)); part.write(rows[own, self._slices[name]])",
        streaming),
}  # fmt: skip

NOT_SEEN = {
    "reduce-scatter: the optimizer does not wait for its last kernels": "it also waits for the event of the collective",
    "save: threads use the first device": "making a stream the current one makes its device the current one",
}
"""Of MUTATIONS, those that no detector sees, with the reason why they are harmless."""


def outcome_of(scenario, folder):
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    return scenario(folder)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_wait_is_seen(name, tmp_path):
    *given, scenario = MUTATIONS[name]
    edits = given[0] if isinstance(given[0], list) else [given]
    expected = outcome_of(scenario, tmp_path / "expected")
    simulated_accelerator.check()
    default = torch.accelerator.current_stream()
    error, found = None, []
    try:
        with ExitStack() as stack:
            for edit in edits:
                stack.enter_context(mutated(*edit))
            found = outcome_of(scenario, tmp_path / "mutated")
    except (RuntimeError, ValueError) as raised:
        error = raised
    torch.accelerator.set_stream(default)
    torch.accelerator.synchronize()
    reports = simulated_accelerator.reports()
    same = len(found) == len(expected) and all(map(torch.equal, found, expected))
    seen = [*(["race"] if reports else []), *(["error"] if error else ["values"] * (not same))]
    assert bool(seen) == (name not in NOT_SEEN), (name, seen, error)
