"""Provide the plans of which `scale.py` and tests/test_scale.py measure the cost: one process plays one rank of many.

With torch's fake backend, a process group has any number of ranks. Collectives of tensors do nothing there. In
`Exchange`, collectives of Python objects return what they would if every other rank did the same as this one, and all
are counted. So a whole save or load runs on rank 0, with files, as do the plans of one rank alone.

A plan is a function of the number of ranks, of tensors, and of a folder. It builds what it needs, and returns the call
to measure. Each call checks its result, outside of what is counted.
"""

import contextlib
import cProfile
import gc
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import harness
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, load_weights, stream_weights
from fsdp2_strategy.checkpoint import directory, training_state
from fsdp2_strategy.checkpoint.load import load_checkpoint
from fsdp2_strategy.checkpoint.paths import CHECKSUMS, RNG
from fsdp2_strategy.checkpoint.save import save_checkpoint
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.data.orders import EpisodeOrder
from fsdp2_strategy.distributed import process_group
from fsdp2_strategy.distributed.agreement import check_equal
from fsdp2_strategy.errors import ShardError
from fsdp2_strategy.rollout.stream import weight_metadata
from fsdp2_strategy.sharding.plan import plan_units
from fsdp2_strategy.storage.component import Component
from fsdp2_strategy.storage.output_files import check_shared_folder, create_files
from fsdp2_strategy.storage.write import _group_adjacent, _runs

WIDTH, VOCABULARY = 32, 64
TENSORS_PER_LAYER, OTHER_TENSORS = 9, 3
SAMPLES_PER_TENSOR = 1000
SAMPLES_OF_A_RANK = 8
"""Of each global batch."""


# --- one rank of many -------------------------------------------------------------------------------------------------


def play(rank: int, ranks: int) -> None:
    """Join a fake process group as one of ``ranks`` ranks, in place of an earlier one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=ranks)


@dataclass
class Cost:
    """What a call costs this rank."""

    python_calls: int = 0
    c_calls: int = 0
    seconds: float = 0.0
    """Processor time, without the counting of calls."""
    rounds: int = 0
    """Collectives of this rank, except the gathers of weights and the reductions of gradients."""
    received_bytes: int = 0
    """Bytes that reach this rank in these collectives."""
    facts: dict[str, float] = field(default_factory=dict)
    """What else the plan has measured."""


class Meter:
    """Count the calls, or measure the processor time, of a ``with`` block; `pause` leaves a part of it out."""

    def __init__(self, cost: Cost, *, counts_calls: bool) -> None:
        self._cost = cost
        self._profile = cProfile.Profile() if counts_calls else None

    def __enter__(self) -> None:
        if self._profile is not None:
            self._profile.enable()
        else:
            self._begun = time.process_time()

    def __exit__(self, *_: object) -> None:
        if self._profile is None:
            self._cost.seconds += time.process_time() - self._begun
            return
        self._profile.disable()
        called = self._profile.getstats()
        self._cost.c_calls = sum(each.callcount for each in called if isinstance(each.code, str))
        self._cost.python_calls = sum(each.callcount for each in called) - self._cost.c_calls

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.__exit__()
        yield
        self.__enter__()


class Exchange:
    """Count this rank's collectives, and complete those of objects as if every rank did the same."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._original = {name: getattr(dist, name) for name in ("all_reduce", "all_gather")}

    def _received(self, nbytes: int) -> None:
        self._cost.rounds += 1
        self._cost.received_bytes += nbytes

    def gather_object(self, obj, object_gather_list=None, *_, **__):
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)
        self._received(_pickled_bytes(obj) * len(object_gather_list or ()))

    def all_gather_object(self, object_list, obj, *_, **__):
        object_list[:] = [obj] * len(object_list)
        self._received(_pickled_bytes(obj) * len(object_list))

    def broadcast_object_list(self, object_list, *_, **__):
        self._received(sum(map(_pickled_bytes, object_list)))

    def scatter_object_list(self, scatter_object_output_list, scatter_object_input_list=None, *_, **__):
        scatter_object_output_list[0] = scatter_object_input_list[0]
        self._received(_pickled_bytes(scatter_object_output_list[0]))

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        self._received(tensor.nbytes)
        if op == dist.ReduceOp.SUM:
            tensor.mul_(dist.get_world_size(group))
        return self._original["all_reduce"](tensor, op, group, async_op)

    def all_gather(self, tensor_list, tensor, *args, **kwargs):
        self._received(tensor.nbytes * len(tensor_list))
        return self._original["all_gather"](tensor_list, tensor, *args, **kwargs)


def _pickled_bytes(value: object) -> int:
    return len(pickle.dumps(value))


@contextlib.contextmanager
def exchange(cost: Cost) -> Iterator[None]:
    """Count collectives in a block; see `Exchange`."""
    names = [name for name in vars(Exchange) if not name.startswith("_")]
    counted = Exchange(cost)
    with patch.multiple(dist, **{name: getattr(counted, name) for name in names}):
        yield


def measure(call: Callable[[Cost, Meter], None], *, counts_calls: bool) -> Cost:
    """Run a call that a plan returned; count its calls, or else measure its processor time."""
    cost = Cost()
    meter = Meter(cost, counts_calls=counts_calls)
    if not counts_calls:
        gc.collect()  # and not again: it would look at the whole model each time
    gc.disable()
    try:
        with exchange(cost):
            call(cost, meter)
    finally:
        gc.enable()
    return cost


# --- models -----------------------------------------------------------------------------------------------------------


def meta_model(count: int) -> LlamaForCausalLM:
    """Build a Llama of about ``count`` small tensors on the meta device."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=max(1, (count - OTHER_TENSORS) // TENSORS_PER_LAYER),
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def full_values(shape: torch.Size, number: int) -> torch.Tensor:
    """Return the values of a model's tensor with this number."""
    return torch.arange(shape.numel(), dtype=torch.float32).add_(number).view(shape)


def sharded_model(count: int, *, filled: bool = True) -> LlamaForCausalLM:
    """Build a Llama whose parameters are split over all ranks, as FSDP2 does; ``filled`` with `full_values`."""
    model = meta_model(count)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                own = local_part(full_values(parameter.shape, names[id(parameter)])) if filled else None
                local = torch.zeros_like(local_part(torch.empty(parameter.shape))) if own is None else own.clone()
                shape, stride = parameter.shape, parameter.stride()
                split = DTensor.from_local(local, mesh, (Shard(0),), run_check=False, shape=shape, stride=stride)
                module._parameters[name] = nn.Parameter(split)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.ones(buffer.shape)
    return model


def local_part(full: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a tensor."""
    rows = -(-len(full) // dist.get_world_size())
    begin, end = (min(len(full), rows * rank) for rank in (dist.get_rank(), dist.get_rank() + 1))
    return full[begin:end]


def check_values(model: nn.Module) -> None:
    """Compare this rank's rows with those of `full_values`.

    Raises:
        ValuesError: a parameter has other values.
    """
    for number, (name, parameter) in enumerate(model.named_parameters()):
        harness.check_equal(parameter.to_local(), local_part(full_values(parameter.shape, number)), name)


def expect(found: object, expected: object, what: str) -> None:
    """Raise ValuesError if two facts of a plan differ."""
    if found != expected:
        raise harness.ValuesError(f"{what}: {found!r}, expected {expected!r}")


# --- plans ------------------------------------------------------------------------------------------------------------

Call = Callable[[Cost, Meter], None]


def plan_of_units(ranks: int, count: int, _folder: Path, **options: object) -> Call:
    """Plan the units of a model, and compare the plan with the other ranks."""
    play(1, ranks)
    model = meta_model(count)
    config = StrategyConfig(**options)

    def call(_cost: Cost, meter: Meter) -> None:
        with meter:
            plan = plan_units(model, config, is_training=True)
            list(plan.warnings())
            check_equal("prepare a model", plan.signature(), ShardError, "the same plan.")
        missing = {name for name, _ in model.named_parameters()} ^ plan.parameters().keys()
        expect(sorted(missing)[:3], [], "parameters in no unit")

    return call


def plan_of_save(ranks: int, count: int, folder: Path) -> Call:
    """Lay out the files of a save, and find the byte ranges that this rank writes."""
    play(1, ranks)
    model = sharded_model(count)
    tensors = dict(model.named_parameters())

    def call(_cost: Cost, meter: Meter) -> None:
        with meter:
            laid_out = Component.of(folder, tensors)
            requests = laid_out.write_requests()
            groups = list(_group_adjacent([run for request in requests for run in _runs(request)]))
        expect(sorted(laid_out.entries) == sorted(tensors), True, "names in the files")
        ranges = sorted((run.path, run.offset, run.end) for group in groups for run in group)
        expect([a for a, b in pairwise(ranges) if a[0] == b[0] and a[2] > b[1]], [], "ranges that overlap")
        held = sum(harness.local_of(tensor).nbytes for tensor in tensors.values())
        expect(sum(end - begin for _, begin, end in ranges), held, "bytes to write")

    return call


def whole_save(ranks: int, count: int, folder: Path) -> Call:
    """Save a model on rank 0, the coordinator: plan, write, gather checksums, commit."""
    play(0, ranks)
    model = sharded_model(count)
    saves = iter(range(1 << 30))

    def call(cost: Cost, meter: Meter) -> None:
        path = _save(model, folder / "saves", f"save{next(saves)}", cost, meter)
        if ranks == 1:  # else the other ranks' bytes are missing
            expect(path.is_dir(), True, "a checkpoint")

    return call


def _save(model: nn.Module, folder: Path, tag: str, cost: Cost, meter: Meter) -> Path:
    commit = directory.commit

    def commit_of_all(partial_paths, *args, **kwargs):
        with meter.pause():  # the other ranks write these files
            for kind in (RNG, CHECKSUMS):
                for rank in range(1, dist.get_world_size()):
                    os.link(partial_paths.rank_file(kind, 0), partial_paths.rank_file(kind, rank))
            cost.facts["checksum_manifest_bytes"] = partial_paths.rank_file(CHECKSUMS, 0).stat().st_size
        begun = time.process_time()
        commit(partial_paths, *args, **kwargs)
        cost.facts["commit_seconds"] = time.process_time() - begun

    def check_all(files):
        files = list(files)
        with meter.pause():  # other ranks create these
            create_files(files)
        check_shared_folder(files)

    with contextlib.ExitStack() as stack:
        for module in [each for name, each in sys.modules.items() if name.startswith("fsdp2_strategy.")]:
            if getattr(module, "check_shared_folder", None) is check_shared_folder:
                stack.enter_context(patch.object(module, "check_shared_folder", check_all))
        stack.enter_context(patch.object(directory, "commit", commit_of_all))
        stack.enter_context(_as_prepared())
        stack.enter_context(meter)
        path = save_checkpoint(model, folder, tag, max_num=1, save_latest=False)
    cost.facts["manifest_bytes"] = (path / "manifest.json").stat().st_size
    return path


@contextlib.contextmanager
def _as_prepared() -> Iterator[None]:
    """Accept a model of DTensors as a prepared one: `fully_shard` takes longer than all that is measured."""
    with patch.object(training_state, "is_sharded", lambda _model: True):
        yield


def whole_load(ranks: int, count: int, folder: Path) -> Call:
    """Load a checkpoint on rank 0: find it, check its structure, match its tensors, read."""
    play(0, ranks)
    path = measured_save(sharded_model(count), folder / "loads")
    model = sharded_model(count, filled=False)

    def call(_cost: Cost, meter: Meter) -> None:
        with _as_prepared(), meter:
            load_checkpoint(model, path)
        check_values(model)

    return call


def measured_save(model: nn.Module, folder: Path) -> Path:
    cost = Cost()
    with exchange(cost):
        return _save(model, folder, "saved", cost, Meter(cost, counts_calls=False))


def plan_of_folder(ranks: int, count: int, folder: Path) -> Call:
    """Load a Hugging Face folder: match names, read this rank's rows."""
    play(1, ranks)
    model = sharded_model(count, filled=False)
    file = folder / "model.safetensors"
    full = {name: full_values(p.shape, number) for number, (name, p) in enumerate(model.named_parameters())}
    save_file(full, file, metadata={"format": "pt"})

    def call(_cost: Cost, meter: Meter) -> None:
        with meter:
            load_weights(model, folder)
        check_values(model)

    return call


def plan_of_data(ranks: int, count: int, _folder: Path) -> Call:
    """Resume in the middle of an epoch, and get this rank's next samples; plan an epoch of episodes."""
    play(1, ranks)
    samples, batch = range(count * SAMPLES_PER_TENSOR), SAMPLES_OF_A_RANK * ranks
    lengths = [SAMPLES_PER_TENSOR] * count
    first = ResumableLoader(samples, batch)
    middle = {**first.state_dict(), "batches": 2, "samples": 2 * batch}
    expected = first.peek(3 * batch)[2 * batch + SAMPLES_OF_A_RANK :][:SAMPLES_OF_A_RANK]

    def call(_cost: Cost, meter: Meter) -> None:
        with meter:
            loader = ResumableLoader(samples, batch)
            loader.load_state_dict(middle)
            found = next(iter(loader))
            order = EpisodeOrder(lengths, pool=64)
            frames = order.indices(len(order) // 2, len(order) // 2 + SAMPLES_OF_A_RANK)
        loader.close()
        expect(found.tolist(), expected.tolist(), "samples after a resume")
        expect(len({*frames.tolist()}), SAMPLES_OF_A_RANK, "frames")

    return call


def plan_of_engine(ranks: int, count: int, _folder: Path) -> Call:
    """Plan a stream of all weights to an inference engine, and compare the plan with the other ranks."""
    play(1, ranks)
    model = sharded_model(count)

    def call(_cost: Cost, meter: Meter) -> None:
        with meter:
            found = weight_metadata(model, dtype=torch.bfloat16, bucket_bytes=None, merge_adapters=False)
        expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        expect({name: shape for name, _, shape in found} == expected, True, "names and shapes of the stream")

    return call


def whole_stream(ranks: int, count: int, _folder: Path) -> Call:
    """Stream all weights to an inference engine; the collectives that gather them are torch's."""
    play(1, ranks)
    model = sharded_model(count)

    def call(_cost: Cost, meter: Meter) -> None:
        with meter:
            found = {name: tensor.shape for name, tensor in stream_weights(model, dtype=torch.bfloat16)}
        expected = {name: parameter.shape for name, parameter in model.named_parameters()}
        expect(found == expected, True, "names and shapes of the stream")

    return call


def whole_step(ranks: int, count: int, _folder: Path) -> Call:
    """Take an optimizer step; the collectives that gather weights and reduce gradients are torch's."""
    play(1, ranks)
    with patch.object(process_group, "use_own_device"):  # asks rank 0 for the place of this rank
        strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, max_norm=1.0))
    model = meta_model(count).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.01)
    with exchange(Cost()):
        model = strategy.prepare_model(model, is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-3)
    ids = torch.zeros(1, 4, dtype=torch.long)

    def call(_cost: Cost, meter: Meter) -> None:
        with meter:
            strategy.backward(model(input_ids=ids, labels=ids).loss, model, optimizer)
            stepped = strategy.optimizer_step(optimizer, model).stepped
        expect(stepped, True, "the step")

    return call


PLANS: dict[str, Callable[[int, int, Path], Call]] = {
    "units": plan_of_units,
    "units, fp32": partial(plan_of_units, bf16=False),
    "units, norms in fp32": partial(plan_of_units, keep_fp32=["norm"]),
    "save, plan": plan_of_save,
    "save": whole_save,
    "load": whole_load,
    "load, Hugging Face": plan_of_folder,
    "data order": plan_of_data,
    "engine": plan_of_engine,
    "stream": whole_stream,
}
