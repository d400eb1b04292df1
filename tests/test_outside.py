"""Some ranks train and others use the weights: in one default group, or in processes that share none."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from models import CASES, batch_of, build
from reference import CountCollectives, assert_close, full_parameters
from torch.distributed.device_mesh import DeviceMesh

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
)
from fsdp2_strategy.errors import MeshError, RolloutError, ShardError
from fsdp2_strategy.mesh import on_ranks_of
from fsdp2_strategy.ranks import all_or_none, group_in_use, rank, to_rank_0, world_size
from fsdp2_strategy.rollout import TransformersEngine, stream_weights, weight_checksums

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
    shard_model(model, mesh, is_training=True, bf16=False)
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
        shard_model(build("mlp"), mesh, reshard_after_forward=True if dist.get_rank() == 1 else 7)
    with pytest.raises(ShardError, match=r"ranks \[1\] differ from rank 0"):
        shard_model(build("mlp"), mesh, cpu_offload=dist.get_rank() == 1)
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
    shard_model(model, mesh, is_training=True, bf16=False)
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


@pytest.mark.parametrize("shard_size", [-1, 1])
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
