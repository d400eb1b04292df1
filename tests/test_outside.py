"""Some ranks train and others use the weights: in one default group, or in processes that share none."""

from __future__ import annotations

import gc
import math
import os
import signal
import socket
import struct
import threading
import time
import traceback
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from helpers.models import CASES, VOCAB, batch_of, build
from helpers.pool import processes
from helpers.reference import CountCollectives, assert_close, full_parameters
from helpers.worlds import some
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import AutoModelForCausalLM

from fsdp2_strategy import (
    FSDPV2Strategy,
    StrategyConfig,
    build_mesh,
    build_optimizer,
    clip_grad_norm,
    load_checkpoint,
    save_checkpoint,
    save_model,
    shard_model,
    sizes,
)
from fsdp2_strategy.distributed.agreement import all_or_none, to_rank_0
from fsdp2_strategy.distributed.process_group import group_in_use, rank, world_size
from fsdp2_strategy.errors import MeshError, RolloutError, ShardError
from fsdp2_strategy.model.ranks import on_ranks_of
from fsdp2_strategy.rollout import (
    RemoteEngine,
    TransformersEngine,
    listen_at_free_port,
    serve,
    stream_weights,
    weight_checksums,
)
from fsdp2_strategy.rollout import connection as connection_module
from fsdp2_strategy.rollout import remote as remote_module
from fsdp2_strategy.rollout.connection import Connection

OPTIONS = {"lr": 0.01, "weight_decay": 0.1}
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def trained_alone(name, ranks, steps):
    """Train a model in this process on the batches of some ranks; return its parameters and the norms of its steps."""
    model = build(name)
    optimizer = build_optimizer(model, **OPTIONS)
    norms = []
    for step in range(steps):
        for number in range(ranks):
            (CASES[name].loss(model, batch_of(name, step, number)) / ranks).backward()
        norms.append(math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters())))
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model), norms


def train(model, name, number, steps):
    optimizer = build_optimizer(model, **OPTIONS)
    norms = []
    for step in range(steps):
        CASES[name].loss(model, batch_of(name, step, number)).backward()
        norms.append(clip_grad_norm(model))
        optimizer.step()
        optimizer.zero_grad()
    return norms


# --- a mesh of some of the ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [[0, 1], [[0], [1]]], ids=["fsdp", "hsdp"])
@pytest.mark.ranks(3)
def test_two_ranks_train_as_one_would_and_a_third_serves_what_they_stream(layout):
    name = "llama_tied"
    axes = ("shard",) if layout == [0, 1] else ("replicate", "shard")
    mesh = DeviceMesh("cpu", layout, mesh_dim_names=axes)  # all ranks of the default group make a mesh
    ids = batch_of(name, 9, 0)["input_ids"]
    if dist.get_rank() == 2:
        engine = TransformersEngine(build(name), dtype=None)
        received = []
        while (header := receive_object(0)) is not None:
            key, shape, dtype = header
            tensor = torch.empty(shape, dtype=dtype)
            dist.recv(tensor, 0)
            received.append((key, tensor))
        engine.update_weights(iter(received))
        send_object(engine.weight_checksums(), 0)
        send_object(engine.generate(ids, **GREEDY).tolist(), 0)
        return
    model = build(name)
    shard_model(model, mesh, StrategyConfig(bf16=False), is_training=True)
    norms = train(model, name, dist.get_rank(), 2)
    expected, expected_norms = trained_alone(name, 2, 2)
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    assert_close(full_parameters(model), expected, 1e-5, "parameter")
    for key, tensor in stream_weights(model, dtype=None):
        if dist.get_rank() == 0:
            send_object((key, tuple(tensor.shape), tensor.dtype), 2)
            dist.send(tensor, 2)
    sent = weight_checksums(stream_weights(model, dtype=None))
    own = TransformersEngine(model, dtype=None)
    own.update_weights(stream_weights(model, dtype=None))
    if dist.get_rank() == 0:
        send_object(None, 2)
        assert receive_object(2) == sent
        assert receive_object(2) == own.generate(ids, **GREEDY).tolist()


def send_object(value, peer):
    dist.send_object_list([value], peer)


def receive_object(peer):
    box = [None]
    dist.recv_object_list(box, peer)
    return box[0]


@pytest.mark.ranks(3)
def test_an_error_on_one_rank_of_a_mesh_is_raised_on_all_of_it_and_nowhere_else():
    mesh = DeviceMesh("cpu", [1, 2])
    if dist.get_rank() == 0:  # it hears nothing, and is not waited for
        return
    with pytest.raises(ShardError, match=r"cannot shard Mlp: failed on rank 1: .* or a divisor"):
        shard_model(build("mlp"), mesh, StrategyConfig(reshard_after_forward=True if dist.get_rank() == 1 else 7))
    with pytest.raises(ShardError, match=r"ranks \[1\] differ from rank 0"):
        shard_model(build("mlp"), mesh, StrategyConfig(cpu_offload=dist.get_rank() == 1))
    model = shard_model(build("llama"), mesh, is_training=True)
    with pytest.raises(RolloutError, match="bucket_bytes is 0"):
        next(stream_weights(model, bucket_bytes=dist.get_rank() - 1))
    with on_ranks_of(model):
        assert (rank(), world_size()) == (dist.get_rank() - 1, 2)
        assert to_rank_0(dist.get_rank()) == ([1, 2] if dist.get_rank() == 1 else [])
        with pytest.raises(ShardError, match="cannot fail: failed on rank 1: OSError: here"):
            with all_or_none("fail", ShardError):
                if dist.get_rank() == 2:
                    raise OSError("here")
    assert group_in_use() is None


@pytest.mark.ranks(3)
def test_a_model_on_some_ranks_is_saved_loaded_and_exported_by_them(tmp_path):
    dist.new_group([1, 2])  # ranks that know other groups agree on new ones all the same
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard"))
    if dist.get_rank() == 2:
        return
    model = shard_model(build("llama"), mesh, is_training=True)
    before = weight_checksums(stream_weights(model, dtype=None))
    for i, async_save in enumerate((False, True)):
        path = save_checkpoint(model, tmp_path / "ckpts", step=i, async_save=async_save)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        loaded = load_checkpoint(model, tmp_path / "ckpts")
        assert loaded.path == path and weight_checksums(stream_weights(model, dtype=None)) == before
    save_model(model, None, tmp_path / "out")
    whole = type(build("llama")).from_pretrained(tmp_path / "out")
    assert weight_checksums(stream_weights(whole, dtype=None)) == before


@pytest.mark.ranks(3)
def test_zero_dimensional_parameters_are_averaged_over_the_ranks_of_their_mesh():
    class Scaled(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return super().forward(x) * self.scale

    mesh = DeviceMesh("cpu", [0, 1])
    torch.manual_seed(0)
    model, plain = Scaled(), Scaled()
    plain.load_state_dict(model.state_dict())
    if dist.get_rank() == 2:
        return
    shard_model(model, mesh, StrategyConfig(bf16=False), is_training=True)
    model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
    for number in (1.0, 2.0):
        (plain(torch.full((1, 4), number)).sum() / 2).backward()
    torch.testing.assert_close(model.scale.grad, plain.scale.grad)
    expected = math.sqrt(sum(p.grad.double().square().sum().item() for p in plain.parameters()))
    assert clip_grad_norm(model) == pytest.approx(expected, rel=1e-6)


@pytest.mark.ranks(4)
def test_a_mesh_of_all_ranks_takes_no_other_group_and_no_more_collectives():
    model = shard_model(build("llama"), build_mesh(2), is_training=True)
    groups = len(dist.distributed_c10d._world.pg_names)
    train(model, "llama", dist.get_rank(), 1)  # FSDP2 has begun
    with CountCollectives() as counted:
        clip_grad_norm(model)
        assert sum(counted.counts.values()) == 1
        weight_checksums(stream_weights(model))
    with on_ranks_of(model):
        assert group_in_use() is None
    assert len(dist.distributed_c10d._world.pg_names) == groups


# --- a strategy of some of the ranks ---------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("shard_size", some([-1, 1], [-1]))
@pytest.mark.ranks(3)
def test_a_strategy_of_two_ranks_of_three_trains_and_goes_on_as_one_of_two(shard_size, tmp_path):
    name = "llama"
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        with pytest.raises(MeshError, match="rank 0 is not in process_group"):
            FSDPV2Strategy(process_group=group)
        return
    config = StrategyConfig(bf16=False, micro_train_batch_size=2, train_batch_size=8, max_norm=0.0)
    with FSDPV2Strategy(config=config, process_group=group) as strategy:
        number = strategy.get_rank()
        assert (strategy.world_size, number, strategy.accumulated_gradient) == (2, dist.get_rank() - 1, 2)
        assert strategy.is_rank_0() == (dist.get_rank() == 1)
        assert strategy.all_reduce({"a": number}, "sum") == {"a": 1}
        assert strategy.all_gather(number).tolist() == [0, 1]
        assert strategy.report_memory().count("host peak") == 1 and not strategy.preempted()
        strategy.sync_and_clear_cache()
        assert strategy.setup_dataloader(range(8), 2).sampler.num_replicas == 2
        with pytest.raises(MeshError, match=r"another strategy of this process trains on ranks \[1, 2\]"):
            FSDPV2Strategy()
        model = strategy.prepare_model(build(name), is_training=True, shard_size=shard_size)
        optimizer = strategy.create_optimizer(model, **OPTIONS)
        for micro in range(2):
            strategy.backward(CASES[name].loss(model, batch_of(name, micro, number)), model, optimizer)
            result = strategy.optimizer_step(optimizer, model)
        reference = build(name)
        own = build_optimizer(reference, **OPTIONS)
        for micro in range(2):
            for other in range(2):
                (CASES[name].loss(reference, batch_of(name, micro, other)) / 4).backward()
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in reference.parameters()))
        own.step()
        assert result.stepped and result.grad_norm == pytest.approx(norm, rel=1e-6)
        assert_close(full_parameters(model), full_parameters(reference), 1e-5, "parameter")
        kept = weight_checksums(stream_weights(model, dtype=None))
        for async_save in (False, True):
            strategy.save_ckpt(model, tmp_path, async_save=async_save)
            strategy.wait_for_checkpoint()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            path, _ = strategy.load_ckpt(model, tmp_path)
            assert path is not None and weight_checksums(stream_weights(model, dtype=None)) == kept
        engine = strategy.setup_inference_engine(None, "transformers", model)
        strategy.update_engine_weights(model, verify=True)
        assert engine.weight_checksums()
    assert group_in_use() is None and world_size() == 3


@pytest.mark.ranks(4)
def test_a_strategy_of_a_group_of_all_ranks_is_one_of_all_ranks():
    with FSDPV2Strategy(process_group=dist.new_group()) as strategy, FSDPV2Strategy():
        assert strategy.world_size == 4 and group_in_use() is None
        model = strategy.prepare_model(build("llama"), is_training=True, shard_size=2)
        assert next(model.parameters()).device_mesh is build_mesh(2)


# --- an engine in another process ------------------------------------------------------------------------------------


def free_address():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


class Scoring(TransformersEngine):
    """An engine that also says how likely tokens are, and does as tests bid."""

    fault = None

    def update_weights(self, weights):
        def through():
            for i, item in enumerate(weights):
                if self.fault == "raises" and i == 3:
                    raise OSError("no room left")
                if self.fault == "dies" and i == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.fault == "stops" and i == 3:
                    return
                yield item

        super().update_weights(through())

    def generate(self, what, *args, **kwargs):
        match what:
            case "pid":
                return os.getpid()
            case "fault":
                self.fault = args[0]
                return None
            case "scores":
                with torch.no_grad():
                    return self.model(*args).logits.float().log_softmax(-1)
        return super().generate(what, *args, **kwargs)


def engine_from_configuration(name, **options):
    """Make an engine as a process does that has no trainer's model."""
    return Scoring(AutoModelForCausalLM.from_config(build(name).config), **options)


def serve_for_ever(address, name, options):
    torch.set_num_threads(1)
    engine = engine_from_configuration(name, **options)
    while True:
        serve(engine, address, timeout_seconds=20)


@pytest.fixture
def server():
    """Start processes that serve; end them."""
    started = []

    def start(address, name="llama_tied", **options):
        started.append(processes.Process(target=serve_for_ever, args=(address, name, options), daemon=True))
        started[-1].start()

    yield start
    for process in started:
        process.kill()
        process.join()


def updated_and_compared(actor, strategy, name):
    """Bring an actor's weights into its remote engine; compare what both compute, on rank 0."""
    strategy.update_engine_weights(actor, verify=True)
    own = TransformersEngine(actor)
    own.update_weights(stream_weights(actor))
    ids = batch_of(name, 9, 0)["input_ids"]
    with torch.no_grad():
        scores = actor.eval()(input_ids=ids).logits.float().log_softmax(-1)
    engine = strategy.inference_engine
    assert bool(engine) == (strategy.get_rank() == 0)
    if engine:
        assert torch.equal(engine.generate(ids, **GREEDY), own.generate(ids, **GREEDY))
        told = engine.generate(ids, **GREEDY, return_dict_in_generate=True, output_logits=True)
        expected = own.generate(ids, **GREEDY, return_dict_in_generate=True, output_logits=True)
        assert type(told) is dict and torch.equal(told["sequences"], expected.sequences)
        assert type(told["logits"]) is tuple and torch.equal(torch.stack(told["logits"]), torch.stack(expected.logits))
        if isinstance(engine, RemoteEngine):
            assert torch.equal(engine.generate("scores", ids), scores)


def train_a_step(strategy, actor, optimizer, name):
    strategy.backward(CASES[name].loss(actor, batch_of(name, 0, strategy.get_rank())), actor, optimizer)
    assert strategy.optimizer_step(optimizer, actor).stepped


@pytest.mark.ranks(3)
def test_the_third_rank_of_a_group_serves_what_two_train():
    name = "llama_tied"
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        serve(engine_from_configuration(name), peer=0)
        return
    args = {"remote_engine_rank": 2, "enable_engine_sleep": True}
    with FSDPV2Strategy(args=args, process_group=group) as strategy:
        actor = strategy.prepare_model(build(name), is_training=True)
        optimizer = strategy.create_optimizer(actor, **OPTIONS)
        with pytest.raises(RolloutError, match="remote_engine_rank is 1, and ranks 0, 1 train the actor"):
            strategy.setup_inference_engine({"remote_engine_rank": 1}, "remote", actor)
        with pytest.raises(RolloutError, match="args has neither remote_engine_address nor remote_engine_rank"):
            strategy.setup_inference_engine({"remote_engine_rnak": 2}, "remote", actor)
        strategy.setup_inference_engine(None, "remote", actor)
        if strategy.is_rank_0():
            assert strategy.inference_engine.is_asleep
            with pytest.raises(RolloutError, match="at rank 2 failed: cannot generate: the engine is asleep"):
                strategy.inference_engine.generate(batch_of(name, 0, 0)["input_ids"])
        strategy.wakeup_inference_engine()
        for _ in range(2):
            train_a_step(strategy, actor, optimizer, name)
            updated_and_compared(actor, strategy, name)


def train_beside(address, name):
    strategy = FSDPV2Strategy(args={"remote_engine_address": address})
    actor = strategy.prepare_model(build(name), is_training=True)
    optimizer = strategy.create_optimizer(actor, **OPTIONS)
    engine = strategy.setup_inference_engine(None, "remote", actor)
    for _ in range(2):
        train_a_step(strategy, actor, optimizer, name)
        updated_and_compared(actor, strategy, name)
    first, engine = engine, strategy.setup_inference_engine(None, "remote", actor)
    assert engine is not first or engine is None  # the server was let go of, and had again
    for fault, match in (("raises", "OSError: no room left"), ("stops", "were not received")):
        if engine is not None:
            engine.generate("fault", fault)
        with pytest.raises(RolloutError, match=match):
            strategy.update_engine_weights(actor)
        if engine is not None:
            with pytest.raises(RolloutError, match="does not have all of its weights"):
                engine.generate(batch_of(name, 0, 0)["input_ids"])
            engine.generate("fault", None)
        updated_and_compared(actor, strategy, name)
    strategy.close()


@pytest.mark.full
def test_a_process_that_shares_no_group_serves_trainers_one_after_the_other(server, run_on):
    address, name = free_address(), "llama_tied"
    server(address, name)
    for _ in range(2):
        run_on(2, train_beside, address=address, name=name)


def serve_actors_of_each_dtype(address, name, fixed):
    """Update a remote engine, from strategies that compute in different dtypes; compare its scores with the actor's."""
    ids = batch_of(name, 9, 0)["input_ids"]
    for config in ({"bf16": False}, {"fp16": True}, {"bf16": True}, {"bf16": False}):
        strategy = FSDPV2Strategy(args={"remote_engine_address": address} | config)
        actor = strategy.prepare_model(build(name), is_training=True)
        engine = strategy.setup_inference_engine(None, "remote", actor)
        if fixed and not config.get("bf16"):
            sent = "float16" if config.get("fp16") else "float32"
            with pytest.raises(
                RolloutError, match=rf"of \d+ in bfloat16, expected {sent}, .* Build the engine in {sent} "
            ):
                strategy.update_engine_weights(actor, verify=True)
        else:
            strategy.update_engine_weights(actor, verify=True)
            with torch.no_grad():
                scores = actor.eval()(input_ids=ids).logits.float().log_softmax(-1)
            assert engine is None or torch.equal(engine.generate("scores", ids), scores)
        strategy.close()


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}])
def test_a_remote_engine_computes_with_the_actors_numbers_or_the_error_names_both_dtypes(options, server, run_on):
    address, name = free_address(), "llama_tied"
    server(address, name, **options)
    run_on(2, serve_actors_of_each_dtype, address=address, name=name, fixed=bool(options))


class Silent:
    """An engine that reports checksums, but not its dtypes."""

    def __init__(self):
        self.held = {}

    def update_weights(self, weights):
        self.held = {name: tensor.to(torch.float16) for name, tensor in weights}

    def weight_checksums(self):
        return weight_checksums(self.held.items())

    def sleep(self): ...

    def wake_up(self): ...

    def generate(self): ...


def test_a_remote_engine_that_does_not_report_its_dtypes_is_verified():
    address = free_address()
    thread = threading.Thread(target=serve, args=(Silent(), address))
    thread.start()
    strategy = FSDPV2Strategy(args={"remote_engine_address": address})
    actor = strategy.prepare_model(build("llama"), is_training=True)
    engine = strategy.setup_inference_engine(None, "remote", actor)
    assert engine.weight_dtypes() is None
    with pytest.raises(RolloutError, match=r"21 names .* differ from those that were sent \(bfloat16\)"):
        strategy.update_engine_weights(actor, verify=True)
    strategy.close()
    thread.join()


def train_beside_one_that_dies(address, name):
    strategy = FSDPV2Strategy(args={"remote_engine_address": address})
    actor = strategy.prepare_model(build(name), is_training=True)
    engine = strategy.setup_inference_engine(None, "remote", actor)
    if engine is not None:
        engine.generate("fault", "dies")
    began = time.monotonic()
    with pytest.raises(RolloutError, match=f"the engine at {address} is lost"):
        strategy.update_engine_weights(actor)
    assert time.monotonic() - began < 30
    dist.barrier()


def train_beside_one_that_is_killed(address, name):
    strategy = FSDPV2Strategy(args={"remote_engine_address": address})
    actor = strategy.prepare_model(build(name), is_training=True)
    engine = strategy.setup_inference_engine(None, "remote", actor)
    if engine is not None:
        os.kill(engine.generate("pid"), signal.SIGKILL)
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(RolloutError, match=f"the engine at {address} is lost .* Start the engine again"):
            strategy.update_engine_weights(actor)
    if engine is not None:
        with pytest.raises(RolloutError, match=f"cannot call generate: .* engine at {address} is lost"):
            engine.generate("pid")
    assert time.monotonic() - began < 30
    dist.barrier()


@pytest.mark.parametrize("when", [train_beside_one_that_dies, train_beside_one_that_is_killed])
def test_a_server_that_is_killed_is_an_error_on_all_ranks_in_seconds(when, server, run_on):
    address = free_address()
    server(address)
    run_on(2, when, address=address, name="llama_tied")


def connect_and_die(address):
    engine = RemoteEngine(address)
    engine.generate("fault", None)
    os.kill(os.getpid(), signal.SIGKILL)


def knock_and_die(address):
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port))).sendall(b"fsdp2 trainer 04")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full
def test_a_trainer_that_is_killed_leaves_the_server_to_the_next(server):
    address, model = free_address(), build("llama_tied")
    server(address)
    for how in (connect_and_die, knock_and_die):
        trainer = processes.Process(target=how, args=(address,), daemon=True)
        trainer.start()
        trainer.join()
        assert trainer.exitcode == -signal.SIGKILL
    engine = RemoteEngine(address)
    engine.update_weights(stream_weights(model))
    assert engine.weight_checksums() == weight_checksums(stream_weights(model))


class Keeper:
    """An engine that keeps what it gets, and gives back what it is given."""

    def __init__(self):
        self.held = {}
        self.wait = 0
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def update_weights(self, weights):
        for i, (name, tensor) in enumerate(weights):
            self.began.set()
            if i % 3 == 0:
                self.held[name] = tensor

    def sleep(self):
        pass

    def wake_up(self):
        pass

    def generate(self, *args, **kwargs):
        self.began.set()
        time.sleep(self.wait)
        assert self.goes_on.wait(60)
        return self if "itself" in args else [args, kwargs]


@contextmanager
def served(engine, allowed_arguments=(), **options):
    """Serve on a thread of this process."""
    address = free_address()
    settings = options | {"allowed_arguments": allowed_arguments}
    thread = threading.Thread(target=serve, args=(engine, address), kwargs=settings)
    thread.start()
    end = RemoteEngine(address, **options)
    yield end
    end.close()
    thread.join(10)
    assert not thread.is_alive()


def call_until_interrupted(address, told):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for commands in the background
    forever = ((f"{i}", torch.zeros(5 << 20)) for i in range(10**6))
    engines = []
    try:
        for _ in range(2):
            engines.append(RemoteEngine(address))
            told.send("calls")
            with pytest.raises(KeyboardInterrupt):
                engines[-1].update_weights(forever) if len(engines) == 2 else engines[-1].generate()
            engines[-1].close()
            told.send("interrupted")
    except BaseException:
        told.send(traceback.format_exc())
        raise


def test_a_trainer_that_is_interrupted_comes_back_at_once_and_leaves_the_server_to_the_next():
    address, engine = free_address(), Keeper()
    engine.goes_on.clear()
    thread = threading.Thread(target=lambda: [serve(engine, address) for _ in range(3)])
    thread.start()
    ours, theirs = processes.Pipe()
    trainer = processes.Process(target=call_until_interrupted, args=(address, theirs), daemon=True)
    trainer.start()
    theirs.close()  # the end of the process is then an error, too
    for _ in range(2):
        assert ours.recv() == "calls" and engine.began.wait(60)
        for _ in range(2):  # Python may lose one where it runs a callback: then somebody presses the keys again
            os.kill(trainer.pid, signal.SIGINT)
            if ours.poll(25):
                break
        assert ours.poll(), "not before the engine has answered"
        assert ours.recv() == "interrupted"
        engine.goes_on.set()
        engine.began.clear()
    trainer.join()
    assert trainer.exitcode == 0
    end = RemoteEngine(address)
    end.update_weights(iter([("weight", torch.ones(3))]))
    assert engine.held["weight"].tolist() == [1, 1, 1] and end.generate(1) == [(1,), {}]
    end.close()
    thread.join(5)
    assert not thread.is_alive()


class Subclass(torch.Tensor):
    """A tensor that may mean anything."""


def test_arguments_and_results_are_what_they_were():
    given = {
        "numbers": [1, 2.5, -0.0, True, None, "text", float("inf")],
        "nested": {"a": (1, [torch.arange(6).view(2, 3)]), 3: {}},
        "tensors": [
            torch.tensor(1.5),
            torch.zeros(0, 4),
            torch.ones(3, 2, dtype=torch.bfloat16).t(),
            torch.tensor(True),
        ],
    }
    with served(Keeper(), allowed_arguments=[*given, "images"]) as engine:
        (args, kwargs) = engine.generate("prompt", **given)
        assert args == ("prompt",) and kwargs.keys() == given.keys()
        assert repr(kwargs) == repr(given)
        sparse, other = torch.eye(2).to_sparse(), torch.ones(2).as_subclass(Subclass)
        for value in (object(), torch.dtype, {1, 2}, torch.zeros(2, device="meta"), b"bytes", sparse, other):
            with pytest.raises(RolloutError, match=r"cannot send generate: argument images\[1\]: it is a"):
                engine.generate(images=[1, value])
        turned = torch.tensor([1 + 2j]).conj()
        assert turned.is_conj() and torch.equal(engine.generate(turned, turned.imag)[0][0], turned.resolve_conj())
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sizes, "HEADER_BYTES", 1000)
            with pytest.raises(RolloutError, match=r"cannot send a header: it has .* expected at most 1000"):
                engine.generate("x" * 1000)
        with pytest.raises(RolloutError, match="failed: cannot send the result: it is a Keeper"):
            engine.generate("itself")
        with pytest.raises(RolloutError, match="Keeper has no method of this name"):
            engine.weight_checksums()
        assert engine.is_asleep is False
        engine.sleep()
        assert engine.is_asleep is True
        engine.wake_up()
        assert engine.is_asleep is False
        assert engine.generate() == [(), {}]
    with pytest.raises(RolloutError, match=r"is lost \(it was closed\)"):
        engine.generate()


def weights_of_many_kinds():
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (1000, 7), (), (64, 64), (0, 5), (300, 300), (17,)] * 5
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    for i, shape in enumerate(shapes):
        yield f"weight{i}", (torch.randn(shape, generator=generator) * 9).to(kinds[i % len(kinds)])


@pytest.mark.parametrize("large_bytes", [1, 10000, 1 << 20])
def test_weights_arrive_complete_and_do_not_change_while_they_are_held(large_bytes, monkeypatch):
    monkeypatch.setattr(sizes, "LARGE_BYTES", large_bytes)
    engine = Keeper()
    expected = dict(weights_of_many_kinds())
    with served(engine) as end:
        for _ in range(2):
            end.update_weights(weights_of_many_kinds())
            assert len(engine.held) == 12
            for name, tensor in engine.held.items():
                assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])


def test_a_stream_that_fails_is_no_update_and_the_next_one_is():
    engine = Scoring(build("llama_tied"))

    def failing():
        for i, item in enumerate(stream_weights(engine.model)):
            if i == 5:
                raise ValueError("not today")
            yield item

    with served(engine) as end:
        with pytest.raises(ValueError, match="not today"):
            end.update_weights(failing())
        with pytest.raises(RolloutError, match="does not have all of its weights"):
            end.generate(torch.zeros(1, 2, dtype=torch.long))
        end.update_weights(stream_weights(build("llama_tied")))
        assert end.weight_checksums() == weight_checksums(stream_weights(build("llama_tied")))


def test_a_weight_that_cannot_be_copied_to_the_host_leaves_no_incomplete_message():
    engine, copies = Keeper(), []
    copy = connection_module.memory_of

    def failing(tensor):
        copies.append(tensor)
        if len(copies) == 3:
            raise RuntimeError("out of host memory")
        return copy(tensor)

    weights = [(f"{i}", torch.full((3,), float(i))) for i in range(4)]
    with served(engine) as end:
        with pytest.MonkeyPatch.context() as patched, pytest.raises(RuntimeError, match="out of host memory"):
            patched.setattr(connection_module, "memory_of", failing)
            end.update_weights(iter(weights))
        assert end.generate(1) == [(1,), {}]
        end.update_weights(iter(weights))
        assert all(torch.equal(engine.held[name], tensor) for name, tensor in weights if name in engine.held)


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "qwen3_moe", "deepseek_v3"])
def test_an_engine_is_made_of_a_configuration_alone_also_on_meta(name):
    config, model = build(name).config, build(name)
    expected = TransformersEngine(model)
    expected.update_weights(stream_weights(model))
    with torch.device("meta"):
        described = AutoModelForCausalLM.from_config(config)
    engine = TransformersEngine(described)
    engine.update_weights(stream_weights(model))
    held, wanted = dict(engine.model.named_buffers()), dict(expected.model.named_buffers())
    assert held.keys() == wanted.keys() and all(torch.equal(held[key], wanted[key]) for key in wanted)
    ids = batch_of(name, 0, 0)["input_ids"]
    assert torch.equal(engine.generate(ids, **GREEDY), expected.generate(ids, **GREEDY))


@pytest.mark.parametrize("call", ["generate", "update_weights"])
def test_an_end_that_is_closed_in_the_middle_of_another_threads_call_breaks_it_off(call):
    engine, failures = Keeper(), []
    engine.wait = 0.5
    forever = ((f"{i}", torch.zeros(5 << 20)) for i in range(10**6))

    def in_vain(end):
        with pytest.raises(RolloutError) as failure:
            getattr(end, call)(forever if call == "update_weights" else 1)
        failures.append(str(failure.value))

    with served(engine) as end:
        thread = threading.Thread(target=in_vain, args=(end,))
        thread.start()
        time.sleep(0.2)
        end.close()
        thread.join(30)
    assert len(failures) == 1 and "is lost (it was closed)" in failures[0]


@pytest.mark.full
def test_whoever_takes_longer_than_silence_is_borne_is_waited_for(monkeypatch):
    monkeypatch.setattr(connection_module, "_HEARTBEAT_SECONDS", 0.1)

    class Slow(Keeper):
        def update_weights(self, weights):
            for i, item in enumerate(weights):
                time.sleep(0.6 if i == 1 else 0)
                self.held[item[0]] = item[1]

    def late():
        for i in range(9):
            time.sleep(0.6 if i in (0, 5) else 0)
            yield f"{i}", torch.full((300,), float(i))

    engine = Slow()
    engine.wait = 0.6
    with served(engine, timeout_seconds=0.3) as end:
        assert end.generate(1) == [(1,), {}]
        end.update_weights(late())
        assert len(engine.held) == 9 and all((tensor == int(name)).all() for name, tensor in engine.held.items())


def serve_or_generate(address, serves, told):
    """Serve, or generate once and tell it."""
    connection_module._HEARTBEAT_SECONDS = 0.1
    if serves:
        serve(Keeper(), address)
    engine = RemoteEngine(address)
    told.send(engine.generate())
    time.sleep(600)


@pytest.mark.parametrize("silent", ["server", "trainer"])
def test_silence_of_the_other_end_is_heard_of_also_between_calls(silent, monkeypatch, caplog):
    monkeypatch.setattr(connection_module, "_HEARTBEAT_SECONDS", 0.1)
    address, (ours, theirs) = free_address(), processes.Pipe()
    other = processes.Process(target=serve_or_generate, args=(address, silent == "server", theirs), daemon=True)
    other.start()
    try:
        if silent == "trainer":
            thread = threading.Thread(target=serve, args=(Keeper(), address), kwargs={"timeout_seconds": 3})
            thread.start()
            assert ours.recv() == [(), {}]
            os.kill(other.pid, signal.SIGSTOP)
            thread.join(60)
            assert not thread.is_alive() and "is lost: no heartbeat for 3 s" in caplog.text
        else:
            end = RemoteEngine(address, timeout_seconds=20)
            end._connection._timeout_seconds = 3
            assert end.generate() == [(), {}]
            os.kill(other.pid, signal.SIGSTOP)
            assert end._connection._closed.wait(60), "nobody asks while it falls silent"
            for _ in range(2):
                with pytest.raises(RolloutError, match=r"is lost \(no heartbeat for 3 s\)"):
                    end.generate()
    finally:
        other.kill()


def test_a_greeting_that_is_wrong_or_incomplete_leaves_the_server_to_the_next():
    engine, address = Keeper(), free_address()
    host, port = address.split(":")
    thread = threading.Thread(target=serve, args=(engine, address))
    thread.start()
    RemoteEngine(address).close()  # it listens
    thread.join(10)
    strangers = []
    for said, answer in (
        (b"GET / HTTP/1.1" + bytes(40), b""),
        (b"fsdp2 trainer 04" + bytes(17), b"fsdp2 engine v05"),  # an older version hears which one this is
        (b"fsdp2 trainer 05 plain".ljust(47) + b"\n" + b"r" + bytes(48), b"fsdp2 engine v05"),
    ):
        strangers.append(socket.create_connection((host, int(port))))
        strangers[-1].sendall(said)
        strangers[-1].settimeout(10)
        try:
            heard = strangers[-1].recv(len(answer) or 1)
        except ConnectionResetError:  # it has not read everything
            heard = b""
        assert heard == answer
    thread = threading.Thread(target=serve, args=(engine, address))
    thread.start()
    end = RemoteEngine(address)
    assert end.generate(1) == [(1,), {}]
    end.close()
    thread.join(10)
    for stranger in strangers:
        stranger.close()


def test_a_server_by_rank_names_the_address_by_which_it_reaches_the_store():
    store = dist.PrefixStore("any", dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
    assert connection_module._own_hosts(store) == ["127.0.0.1", socket.gethostname()]


@pytest.mark.parametrize(
    "said",
    [
        [struct.pack("<q", -5)],
        [struct.pack("<q", 1 << 50)],
        [struct.pack("<q", 4), b"\xff\xfe{}"],
        [struct.pack("<q", 4), b"{{{{"],
        [struct.pack("<q", 2), b"[1"],
        {"x": 1},
        {"call": "generate", "args": [], "kwargs": {}, "tensors": [["load", [3]]]},
        {"call": "generate", "args": [], "kwargs": {}, "tensors": [["qint8", [3]]]},
        {"call": "generate", "args": [], "kwargs": {}, "tensors": [["int8", [-3]]]},
        {"call": "generate", "args": [], "kwargs": {}, "tensors": 3},
        {"call": "generate", "args": [{"tensor": 0}], "kwargs": {}},
        {"call": "generate", "args": [{}], "kwargs": []},
        [{"call": "update_weights"}, {"weight": "a"}],
        [{"call": "update_weights"}, {"weight": "a", "tensors": [["float32"]]}],
        [{"call": "update_weights"}, {"weight": "a", "tensors": [["float32", [-4]]]}],
        [{"call": "update_weights"}, {"call": "generate"}],
    ],
    ids=str,
)
def test_what_cannot_be_understood_ends_the_session_and_not_the_server(said, caplog):
    with served(Keeper()) as end:
        connection = end._connection
        for part in said if isinstance(said, list) else [said]:
            if isinstance(part, dict):
                connection.send(part)
            else:
                connection._output.write(part)
                connection._output.flush()
        with pytest.raises(RolloutError, match="is lost"):
            end.generate()
    assert "it violates the protocol" in caplog.text or "in the middle of an update" in caplog.text


def test_what_the_engine_says_and_cannot_be_understood_is_a_lost_engine(monkeypatch):
    with served(Keeper()) as end:
        monkeypatch.setattr(remote_module, "to_json", lambda *_: {"tensor": 7})
        with pytest.raises(RolloutError, match=r"is lost \(it violates the protocol: IndexError"):
            end.generate()


def test_a_default_device_changes_nothing():
    class Elsewhere(Keeper):
        def update_weights(self, weights):
            with torch.device("meta"):
                self.held = dict(weights)

    engine = Elsewhere()
    with served(engine) as end, torch.device("meta"):
        assert end.generate(torch.ones(2, device="cpu"))[0][0].tolist() == [1, 1]
        end.update_weights((f"{i}", torch.full((5,), i, device="cpu")) for i in range(3))
    assert [tensor.tolist() for tensor in engine.held.values()] == [[i] * 5 for i in range(3)]


@pytest.mark.ranks(1)
def test_weights_that_are_more_than_their_bytes_are_refused_and_the_next_update_is_none_the_worse():
    whole = DTensor.from_local(torch.ones(2), build_mesh(), [Replicate()])
    odd = [whole, torch.eye(2).to_sparse(), torch.ones(2, device="meta")]
    with served(Keeper()) as end:
        for tensor in odd:
            with pytest.raises(RolloutError, match=r"cannot send odd: it is a .*expected a plain dense tensor"):
                end.update_weights(iter([("fine", torch.ones(2)), ("odd", tensor)]))
        end.update_weights(iter([("fine", torch.nn.Parameter(torch.ones(2)))]))


def test_the_next_weights_are_received_while_the_engine_uses_one_and_no_more_than_these(monkeypatch):
    monkeypatch.setattr(sizes, "LARGE_BYTES", 1000)
    yielded, seen, live, count = [], [], [], 10
    read_tensor = Connection._read_tensor

    def counted(self, *described):
        tensor = read_tensor(self, *described)
        live.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    class Watching(Keeper):
        def update_weights(self, weights):
            for i, _ in enumerate(weights):
                deadline = time.monotonic() + 60
                while len(yielded) < min(i + 3, count) and time.monotonic() < deadline:
                    time.sleep(0.01)
                time.sleep(0.05)  # time for a request that must not come
                seen.append((len(yielded), sum(one() is not None for one in live) <= 3))

    def stream():
        for i in range(count):
            yielded.append(i)
            yield f"{i}", torch.zeros(6 << 20)  # more than the buffers of the sockets

    monkeypatch.setattr(Connection, "_read_tensor", counted)
    with served(Watching()) as end:
        end.update_weights(stream())
    # While the engine uses weight i, i + 1 has been received, and i + 2 is being sent.
    assert seen == [(min(i + 3, count), True) for i in range(count)]


@pytest.mark.parametrize("address", ["host", 29600, "http://host:29600"])
def test_an_address_of_another_form_is_an_error(address):
    with pytest.raises(RolloutError, match=f"address is {address!r}, expected 'host:port', such as"):
        RemoteEngine(address)


def test_what_serves_at_an_address_listens_there_alone():
    with served(Keeper()) as end, pytest.raises(ConnectionRefusedError):
        host, port = end._where.split(":")
        assert host == "localhost"
        socket.create_connection(("127.0.0.2", int(port)), 1)


def test_the_engine_is_free_when_its_trainers_end_is_dropped():
    address = free_address()
    thread = threading.Thread(target=serve, args=(Keeper(), address))
    thread.start()
    RemoteEngine(address)
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_an_address_at_a_free_port_is_known_before_it_is_served_at(host):
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    addresses = [listen_at_free_port(host) for _ in range(3)]
    assert len(set(addresses)) == 3
    for address in addresses:
        thread = threading.Thread(target=lambda: (time.sleep(0.2), serve(Keeper(), address)))  # noqa: B023
        thread.start()
        end = RemoteEngine(address, timeout_seconds=5)
        assert end.generate(1) == [(1,), {}]
        end.close()
        thread.join(10)
        assert not thread.is_alive()
    with pytest.raises(RolloutError, match=r"cannot serve at 203\.0\.113\.1: .* an address of this host"):
        listen_at_free_port("203.0.113.1")


@pytest.mark.full
def test_where_nobody_serves_and_what_is_no_place_is_an_error_that_says_so():
    address = free_address()
    with pytest.raises(RolloutError, match=f"no server listens at {address}"):
        RemoteEngine(address, timeout_seconds=1)
    for options in ({}, {"address": "localhost:1", "peer": 1}, {"address": "localhost"}, {"peer": 1}):
        with pytest.raises(RolloutError, match="cannot reach another process"):
            RemoteEngine(**options)
    with served(Keeper()) as first:
        with pytest.raises(RolloutError, match=r"has not answered in 0\.3 s, expected an answer"):
            RemoteEngine(first._where, timeout_seconds=0.3)
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        with pytest.raises(RolloutError, match="cannot serve at"):
            serve(Keeper(), f"localhost:{taken.getsockname()[1]}")


@pytest.mark.ranks(3)
def test_a_strategy_of_some_ranks_beside_one_of_all_is_an_error_and_groups_made_again_get_meshes_of_their_own():
    whole = FSDPV2Strategy()
    parts = [dist.new_group([0, 1]) for _ in range(2)]
    if dist.get_rank() < 2:
        with pytest.raises(MeshError, match="another strategy of this process trains on all ranks"):
            FSDPV2Strategy(process_group=parts[0])
        assert whole.world_size == 3
    whole.close()
    for part in parts:
        if dist.get_rank() < 2:
            with FSDPV2Strategy(process_group=part) as strategy:
                model = strategy.prepare_model(build("llama"))
                assert model(torch.zeros(1, 2, dtype=torch.long)).logits.shape == (1, 2, VOCAB)
            dist.destroy_process_group(part)
