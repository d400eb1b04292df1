"""Weights by difference: what changed since a version, bit by bit, on the shards, and applied in place."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from helpers.models import CASES, FILED, HUGGING_FACE, batch_of, build
from helpers.pool import processes
from helpers.reference import CountCollectives
from helpers.worlds import some, worlds
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, build_mesh, shard_model, sizes, stream_weights
from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.model import offload
from fsdp2_strategy.model.placeholders import values_of
from fsdp2_strategy.rollout import RemoteEngine, TransformersEngine, serve, weight_checksums
from fsdp2_strategy.rollout.changed_elements import BLOCK_BYTES
from fsdp2_strategy.rollout.difference import STEP, TensorDifference, from_gaps, to_gaps

GENERATING = ["llama_tied", "phi3", "gpt2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "t5"]


def sharded(name, **options):
    model = build(name) if isinstance(name, str) else name
    is_training = options.pop("is_training", True)
    shard_model(model, build_mesh(options.pop("shard_size", -1)), StrategyConfig(**options), is_training=is_training)
    return model


@torch.no_grad()
def change(model, share, seed):
    """Change a share of the elements of each parameter, the same on all ranks, whatever its shards."""
    for i, parameter in enumerate(model.parameters()):
        local = values_of(parameter)
        shard = parameter.device_mesh.get_local_rank(-1) if isinstance(parameter, DTensor) else 0
        generator = torch.Generator().manual_seed(1000 * seed + i + 97 * shard)
        picked = torch.rand(local.shape, generator=generator) < share
        local[picked] += 1 + torch.rand(int(picked.sum()), generator=generator, dtype=torch.float32).to(local.dtype)


def follow(held, stream):
    """Apply a stream to the tensors of an engine."""
    for name, given in stream:
        if isinstance(given, TensorDifference):
            given.apply_(held[name])
        else:
            held[name] = given.clone()
    return held


def assert_equal(held, model, **options):
    expected = dict(stream_weights(model, **options))
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert held[name].dtype == tensor.dtype and torch.equal(held[name], tensor), name


@pytest.mark.parametrize("length", [0, 1, 5, 3 * STEP])
def test_positions_of_any_distance_are_sent_in_16_bits_each(length):
    for n in (0, 1, 2, 100):
        positions = torch.randperm(max(length, 1), generator=torch.Generator().manual_seed(n))[: min(n, length)].sort()[
            0
        ]
        gaps = to_gaps(positions)
        assert gaps.dtype == torch.int16 and torch.equal(from_gaps(gaps), positions)
        assert len(gaps) <= len(positions) + length // STEP
    for positions in ([STEP], [STEP - 1, 2 * STEP], [0, STEP, 3 * STEP - 1], [5 * STEP + 3]):
        assert from_gaps(to_gaps(torch.tensor(positions))).tolist() == positions


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_changes_are_written_into_tensors_of_any_layout_also_by_deterministic_algorithms(is_deterministic):
    difference = TensorDifference((3, 4), torch.tensor([1, 6, 11]), torch.tensor([1.0, 2.0, 3.0]))
    expected = torch.tensor([[0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 3]])
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        for tensor in (torch.zeros(3, 4), torch.zeros(4, 3).t(), torch.zeros(3, 8, dtype=torch.bfloat16)[:, ::2]):
            difference.apply_(tensor)
            assert torch.equal(tensor.float(), expected.float())
    finally:
        torch.use_deterministic_algorithms(before)
    scalar = torch.zeros(())
    TensorDifference((), torch.tensor([0]), torch.ones(1)).apply_(scalar)
    assert scalar == 1


@pytest.mark.parametrize("retain", ["copy", "hashes"])
@pytest.mark.parametrize("world", worlds(1, 2, 3, 4, usual=(2,)))
def test_changes_bring_weights_to_the_same_bits_as_a_full_stream(world, retain):
    for name, dtype in (("llama_tied", torch.bfloat16), ("qwen3_moe", None)):
        brought_up_to_date(name, world, dtype, retain)


@pytest.mark.full
@pytest.mark.parametrize("world", worlds(1, 2, 3, 4))
def test_changes_bring_every_architecture_to_the_same_bits_as_a_full_stream(world):
    for name, dtype in itertools.product([*HUGGING_FACE[world::4], "mlp", "unet"], [torch.bfloat16, None]):
        brought_up_to_date(name, world, dtype, "copy")


def brought_up_to_date(name, world, dtype, retain):
    """Follow a model's changes, and compare with full streams."""
    model = sharded(name, shard_size=2 if world == 4 else -1)
    options = {"dtype": dtype, "retain": retain}
    stream = stream_weights(model, since="", **options)
    assert stream.is_full
    held = follow({}, stream)
    assert_equal(held, model, dtype=dtype)
    for seed, share in enumerate((0.01, 0.0, 0.3, 1.0, 0.002)):
        change(model, share, seed)
        stream = stream_weights(model, since=stream.version, **options)
        assert not stream.is_full
        held = follow(held, stream)
        assert_equal(held, model, dtype=dtype)


class Odd(nn.Module):
    """Shapes that ranks cannot divide, a dimension other than the first that is cut, and a buffer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(7, 5), (5, 6), (1, 4), (2,), (4, 3, 5), (0, 3), (300, 9)]
        self.each = nn.ParameterList([torch.randn(shape, generator=generator) for shape in shapes])
        self.register_buffer("count", torch.zeros(3))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("retain", ["copy", "hashes"])
@pytest.mark.parametrize("compared_bytes", some([64, 1 << 20], [64]))
def test_shards_of_any_length_along_any_dimension_are_compared_in_parts(retain, compared_bytes, monkeypatch):
    model = Odd()
    torch.distributed.fsdp.fully_shard(
        model,
        mesh=build_mesh(),
        shard_placement_fn=lambda p: torch.distributed.tensor.Shard(1) if p.ndim > 1 and p.shape[1] % 3 == 0 else None,
    )
    with monkeypatch.context() as patched:
        patched.setattr(sizes, "COMPARED_BYTES", compared_bytes)
        for dtype in (None, torch.bfloat16, torch.float64):
            stream = stream_weights(model, dtype=dtype, since="", retain=retain)
            held = follow({}, stream)
            for seed in range(6):
                change(model, 0.05, seed)
                model.count += dist.get_rank() + 1  # rank 0's values count
                stream = stream_weights(model, dtype=dtype, since=stream.version, retain=retain, bucket_bytes=200)
                held = follow(held, stream)
                assert_equal(held, model, dtype=dtype)


@pytest.mark.ranks(2)
def test_one_percent_of_changes_takes_three_percent_of_the_bytes_and_none_takes_none():
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
    shard_model(model, build_mesh(), StrategyConfig(block_class_names=["Linear"]), is_training=True)
    stream = stream_weights(model, since="")
    list(stream)
    change(model, 0.01, 1)
    with CountCollectives() as counter:
        stream = stream_weights(model, since=stream.version)
        sent = list(stream)
    assert all(isinstance(given, TensorDifference) for _, given in sent) and len(sent) == 4
    changed = sum(len(given.positions) for _, given in sent)
    assert 0.005 < changed / (4 * 256**2) < 0.015
    assert sum(sum(t.nbytes for t in given.encoded) for _, given in sent) == 4 * changed <= 0.03 * stream.full_bytes
    assert all(0 <= given.nbytes - 4 * len(given.positions) <= 2 for _, given in sent)
    assert not any("all_gather_into_tensor" in name for name in counter.counts), "no parameter is gathered"
    stream = stream_weights(model, since=stream.version)
    assert not stream.is_full and list(stream) == []


@pytest.mark.ranks(2)
def test_changes_of_any_share_never_take_more_bytes_than_all_weights():
    with FSDPV2Strategy(bf16=True) as strategy:
        actor = strategy.prepare_model(build("llama"), is_training=True)
        strategy.setup_inference_engine({}, TransformersEngine(actor), actor)
        for by_difference in ("hashes", True):
            strategy.update_engine_weights(actor, by_difference=by_difference)
            for seed, share in enumerate((0.001, 0.03, 0.6)):
                change(actor, share, seed)
                update = strategy.update_engine_weights(actor, by_difference=by_difference, verify=True)
                assert not update.is_full and update.sent_bytes <= update.full_bytes


@pytest.mark.ranks(2)
def test_what_is_retained_is_a_copy_of_the_shards_or_a_sixteenth_of_it():
    model = nn.Linear(512, 512, bias=False)
    shard_model(model, config=StrategyConfig(bf16=False))
    copy = stream_weights(model, since="")
    list(copy)
    hashes = stream_weights(model, since="", retain="hashes")
    list(hashes)
    assert copy.retained_bytes == 512 * 512 * 2 // 2 and hashes.retained_bytes == copy.retained_bytes * 8 // BLOCK_BYTES
    with torch.no_grad():
        values_of(model.weight)[0, 0] += 1
    [(_, sent)] = stream_weights(model, since=hashes.version, retain="hashes")
    assert len(sent.positions) == 2 * BLOCK_BYTES // 2, "a block of each rank"


@pytest.mark.ranks(2)
def test_a_change_of_sign_of_zero_and_of_one_bit_of_nan_is_a_change():
    model = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(model.weight)
    shard_model(model, config=StrategyConfig(bf16=False))
    for retain in ("copy", "hashes"):
        stream = stream_weights(model, dtype=None, since="", retain=retain)
        list(stream)
        for bits in (-(2**31), 0x7FC00000, 0x7FC00001):
            values_of(model.weight).view(torch.int32)[1, 2] = bits
            stream = stream_weights(model, dtype=None, since=stream.version, retain=retain)
            [(_, given)] = stream
            assert bits in given.values.view(torch.int32).tolist()


@pytest.mark.ranks(2)
def test_a_version_that_is_not_the_last_one_or_an_incomplete_stream_sends_all_weights():
    model = sharded("llama")
    first = stream_weights(model, since="")
    list(first)
    second = stream_weights(model, since=first.version)
    assert not second.is_full and second.version != first.version and list(second) == []
    assert stream_weights(model, since=first.version).is_full, "not the last version"
    third = stream_weights(model, since="")
    list(third)
    assert stream_weights(model, since=third.version, dtype=None).is_full, "another dtype"
    assert stream_weights(model, since="another run").is_full
    for leaving in (0, 1):
        fourth = stream_weights(model, since="")
        list(fourth)
        change(model, 0.01, 3)
        fifth = stream_weights(model, since=fourth.version)
        with contextlib.closing(fifth):
            for _ in fifth:
                if dist.get_rank() == leaving:
                    break
        sixth = stream_weights(model, since=fifth.version)
        assert sixth.is_full, "a rank left the stream early"
        list(sixth)
    list(stream_weights(model))  # without since: changes nothing
    assert not stream_weights(model, since=sixth.version).is_full


@pytest.mark.ranks(2)
def test_a_rank_that_closes_a_stream_at_once_takes_part_in_its_collectives():
    model = sharded("llama")
    for since in (None, ""):
        stream = stream_weights(model, since=since)
        with contextlib.closing(stream):
            taken = [name for name, _ in stream] if dist.get_rank() else []
        assert not taken or len(taken) == len(list(model.parameters()))
    assert stream_weights(model, since=stream.version).is_full, "rank 0 did not receive the last one"


@pytest.mark.ranks(2)
def test_ranks_that_ask_for_changes_since_other_versions_all_raise():
    model = sharded("llama")
    stream = stream_weights(model, since="")
    list(stream)
    with pytest.raises(RolloutError, match="the same model and arguments on every rank"):
        stream_weights(model, since=stream.version if dist.get_rank() else "")
    with pytest.raises(RolloutError, match="retain is 'all', expected 'copy' or 'hashes'"):
        stream_weights(model, since="", retain="all")


@pytest.mark.ranks(2)
def test_averages_and_offloaded_models_are_compared_as_they_are():
    model = sharded("llama_tied", bf16=False)
    stream = stream_weights(model, since="")
    held = follow({}, stream)
    change(model, 0.01, 0)
    offload(model)
    stream = stream_weights(model, since=stream.version)
    held = follow(held, stream)
    assert not stream.is_full
    assert_equal(held, model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(["llama", "qwen3_moe"], ["llama"]))
def test_merged_adapters_are_compared_on_the_shards(name):
    targets = ["q_proj", "v_proj"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = get_peft_model(build(name), LoraConfig(r=2, target_modules=targets))
    shard_model(model, build_mesh(), is_training=True)
    stream = stream_weights(model, since="")
    held = follow({}, stream)
    assert_equal(held, model)
    for seed in range(3):
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "lora" in parameter_name:
                    values_of(parameter).add_(0.01 * (seed + 1))
        stream = stream_weights(model, since=stream.version)
        sent = dict(stream)
        assert not stream.is_full and sent and all("q_proj" in key or "v_proj" in key for key in sent)
        assert_equal(follow(held, sent.items()), model)
    stream = stream_weights(model, merge_adapters=False, since="")
    held = follow({}, stream)
    with torch.no_grad():
        for parameter in model.parameters():
            values_of(parameter).add_(parameter.requires_grad)
    stream = stream_weights(model, merge_adapters=False, since=stream.version)
    assert list(stream) == [] and not stream.is_full, "the base model is frozen"


# --- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(GENERATING, FILED[1:3]))
def test_an_engine_writes_changes_into_its_own_layout(name):
    for dtype in (torch.bfloat16, None):
        model = sharded(name)
        engine = TransformersEngine(model)
        stream = stream_weights(model, dtype=dtype, since="")
        engine.update_changed_weights(stream, since="", version=stream.version)
        for seed, share in enumerate((0.01, 0.2, 0.0)):
            change(model, share, seed)
            since = stream.version
            stream = stream_weights(model, dtype=dtype, since=since)
            assert not stream.is_full
            engine.update_changed_weights(stream, since=since, version=stream.version)
            assert engine.weight_checksums() == weight_checksums(stream_weights(model, dtype=dtype))


class Faulty(TransformersEngine):
    """An engine that fails in an update, or in which a weight changes by itself."""

    fault = None

    def update_changed_weights(self, changes, **versions):
        def through():
            for item in changes:
                if self.fault == "raises":
                    raise OSError("no room left")
                yield item

        super().update_changed_weights(through(), **versions)
        if self.fault == "always changes" or (self.fault == "changes" and versions["since"]):
            with torch.no_grad():
                next(self.model.parameters())[0, 0] += 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_difference", some([True, "hashes"], [True]))
def test_a_strategy_sends_changes_and_all_weights_when_it_has_to(by_difference):
    with FSDPV2Strategy(bf16=True) as strategy:
        actor = strategy.prepare_model(build("llama_tied"), is_training=True)
        engine = Faulty(actor)
        strategy.setup_inference_engine({}, engine, actor)

        def update(**options):
            return strategy.update_engine_weights(actor, by_difference=by_difference, **options)

        with pytest.raises(RolloutError, match="by_difference is 'hash', expected True, False or 'hashes'"):
            strategy.update_engine_weights(actor, by_difference="hash")
        assert update(verify=True).is_full
        change(actor, 0.01, 1)
        sent = update(verify=True)
        assert not sent.is_full and 0 < sent.sent_bytes < sent.full_bytes and sent.version == engine.weights_version
        assert not update().is_full and update().sent_bytes == 0

        engine.fault = "raises" if strategy.get_rank() == 1 else None
        change(actor, 0.01, 2)
        with pytest.raises(RolloutError, match="failed on rank 1: OSError: no room left"):
            update()
        engine.fault = None
        assert update(verify=True).is_full, "the engine of rank 1 has no version"

        engine.fault = "changes" if strategy.get_rank() == 0 else None
        change(actor, 0.01, 3)
        sent = update(verify=True)
        assert sent.is_full and sent.sent_bytes > sent.full_bytes, "a checksum differed: the changes, then all weights"
        assert not update().is_full
        engine.fault = "always changes" if strategy.get_rank() == 0 else None
        with pytest.raises(RolloutError, match="cannot use the engine's weights"):
            update(verify=True)
        engine.fault = None
        assert update(verify=True).is_full, "the last update failed, although each engine has its version"

        strategy.update_engine_weights(actor)
        assert engine.weights_version is None and update().is_full, "a full update has no version"
        strategy.setup_inference_engine({}, Faulty(actor), actor)
        assert update(verify=True).is_full, "another engine"
        again = strategy.prepare_model(build("llama_tied"), is_training=True)
        assert strategy.update_engine_weights(again, by_difference=by_difference, verify=True).is_full, "another actor"


@pytest.mark.ranks(2)
def test_options_that_are_unknown_or_differ_between_ranks_are_errors_on_every_rank():
    with FSDPV2Strategy(bf16=True) as strategy:
        actor = strategy.prepare_model(build("llama"), is_training=True)
        strategy.setup_inference_engine({}, TransformersEngine(actor), actor)
        is_first = strategy.get_rank() == 0
        for options in (
            {"by_difference": is_first},
            {"by_difference": "hashes" if is_first else True},
            {"by_difference": True, "verify": is_first},
        ):
            with pytest.raises(RolloutError, match="expected the same by_difference and verify on every rank"):
                strategy.update_engine_weights(actor, **options)
        with pytest.raises(RolloutError, match="by_difference is 'hash', expected True, False or 'hashes'"):
            strategy.update_engine_weights(actor, by_difference="hash")
        strategy.update_engine_weights(actor, verify=is_first)  # full weights: each rank verifies its own engine


@pytest.mark.ranks(2)
def test_each_rank_sends_the_changes_of_an_actor_that_is_not_sharded():
    with FSDPV2Strategy(bf16=True) as strategy:
        actor = build("llama")
        strategy.setup_inference_engine({}, TransformersEngine(actor), actor)
        assert strategy.update_engine_weights(actor, by_difference=True).is_full
        change(actor, 0.01, 1)
        if strategy.get_rank() == 0:
            strategy.inference_engine.weights_version = None  # as after a restart of this engine only
        update = strategy.update_engine_weights(actor, by_difference=True, verify=True)
        assert update.is_full == (strategy.get_rank() == 0)


@pytest.mark.ranks(2)
def test_an_engine_without_versions_is_refused_on_every_rank():
    class Plain:
        def update_weights(self, weights):
            list(weights)

        def sleep(self):
            pass

        wake_up = generate = sleep

    with FSDPV2Strategy(bf16=False) as strategy:
        actor = strategy.prepare_model(build("llama"))
        strategy.setup_inference_engine({}, Plain() if strategy.get_rank() else TransformersEngine(actor), actor)
        with pytest.raises(RolloutError, match="Plain has no update_changed_weights and weights_version"):
            strategy.update_engine_weights(actor, by_difference=True)
        strategy.update_engine_weights(actor)


def test_changes_for_another_version_of_an_engine_are_refused():
    model = build("llama")
    engine = TransformersEngine(model)
    stream = stream_weights(model, since="")
    engine.update_changed_weights(stream, since="", version=stream.version)
    with pytest.raises(RolloutError, match=r"the engine has version .*, expected another"):
        engine.update_changed_weights(iter(()), since="another", version="next")
    assert engine.weights_version == stream.version
    name = next(iter(dict(model.named_parameters())))
    wrong = TensorDifference((1, 2), torch.tensor([0]), torch.ones(1))
    with pytest.raises(RolloutError, match=r"has shape \[1, 2\], expected"):
        engine.update_changed_weights(iter([(name, wrong)]), since=stream.version, version="next")
    assert engine.weights_version is None


def test_a_remote_engine_takes_changes_and_keeps_its_version_when_the_trainer_leaves():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    model = build("qwen3_moe")
    engine = TransformersEngine(model)
    thread = threading.Thread(target=lambda: [serve(engine, address) for _ in range(2)])
    thread.start()
    end = RemoteEngine(address)
    assert end.weights_version is None
    stream = stream_weights(model, since="")
    end.update_changed_weights(stream, since="", version=stream.version)
    end.close()
    end = RemoteEngine(address)
    assert end.weights_version == stream.version
    change(model, 0.01, 1)
    since, stream = stream.version, stream_weights(model, since=stream.version)
    assert not stream.is_full
    end.update_changed_weights(stream, since=since, version=stream.version)
    assert end.weights_version == stream.version
    assert end.weight_checksums() == weight_checksums(stream_weights(model))
    with pytest.raises(RolloutError, match=r"the engine has version .*, expected another"):
        end.update_changed_weights(iter([("unread", torch.ones(3))]), since="another", version="next")
    assert end.weights_version == stream.version, "nothing was written, and the connection is in step"
    end.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_trainer_connects_again_if_a_dying_server_ends_the_handshake():
    engine = TransformersEngine(build("llama"))
    dying = socket.create_server(("localhost", 0))
    address = f"localhost:{dying.getsockname()[1]}"

    def die_and_restart():
        accepted, _ = dying.accept()
        dying.close()
        accepted.close()
        serve(engine, address)

    thread = threading.Thread(target=die_and_restart)
    thread.start()
    end = RemoteEngine(address, timeout_seconds=10)
    assert end.weights_version is None
    end.close()
    thread.join(10)
    assert not thread.is_alive()


# --- kills and restarts ----------------------------------------------------------------------------------------------


def serve_for_ever(address):
    torch.set_num_threads(1)
    engine = TransformersEngine(AutoModelForCausalLM.from_config(build("llama_tied").config))
    while True:
        serve(engine, address, timeout_seconds=20)


def keep_syncing(rank, port, address, log):
    """Train and send by difference for ever; after each update, compare all checksums and write a line."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    strategy = FSDPV2Strategy(args={"remote_engine_address": address}, bf16=True)
    actor = strategy.prepare_model(build("llama_tied"), is_training=True)
    optimizer = strategy.create_optimizer(actor, lr=1e-4)
    strategy.setup_inference_engine(None, "remote", actor)
    for step in itertools.count():
        strategy.backward(CASES["llama_tied"].loss(actor, batch_of("llama_tied", step, rank)), actor, optimizer)
        strategy.optimizer_step(optimizer, actor)
        try:
            update = strategy.update_engine_weights(actor, by_difference=True)
            sent = weight_checksums(stream_weights(actor))
            held = strategy.inference_engine.weight_checksums() if rank == 0 else sent
        except RolloutError:  # the engine was killed: wait for the next one
            strategy.setup_inference_engine(None, "remote", actor)
            continue
        if rank == 0:
            with log.open("a") as file:
                print("equal" if held == sent else "different", "full" if update.is_full else "changes", file=file)


@pytest.mark.full
def test_two_hundred_updates_with_kills_on_both_sides_leave_equal_weights(tmp_path):
    log = tmp_path / "log"
    log.touch()

    def free_port():
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            return str(probe.getsockname()[1])

    address = f"localhost:{free_port()}"

    def start(function, *args):
        process = processes.Process(target=function, args=args, daemon=True)
        process.start()
        return process

    def start_trainers():
        port = free_port()
        return [start(keep_syncing, rank, port, address, log) for rank in range(2)]

    server, trainers = start(serve_for_ever, address), start_trainers()
    try:
        for target in range(25, 225, 25):
            deadline = time.monotonic() + 120
            while len(log.read_text().splitlines()) < target:
                assert time.monotonic() < deadline and server.is_alive() and all(t.is_alive() for t in trainers)
                time.sleep(0.01)
            if target % 50:
                os.kill(server.pid, signal.SIGKILL)
                server.join()
                server = start(serve_for_ever, address)
            else:
                for trainer in trainers:
                    os.kill(trainer.pid, signal.SIGKILL)
                    trainer.join()
                trainers = start_trainers()
    finally:
        for process in (server, *trainers):
            process.kill()
            process.join()
    lines = log.read_text().splitlines()
    assert len(lines) >= 200 and all(line.startswith("equal ") for line in lines)
    full = lines.count("equal full")
    assert 5 <= full <= 9, f"all weights were sent {full} times: at the start, and after each kill"
