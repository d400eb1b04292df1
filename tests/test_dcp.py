"""The backend for `torch.distributed.checkpoint`: any state dict, on any mesh, as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import pickle
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.models import batch_of, build, loss_of
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp2_strategy import sizes
from fsdp2_strategy.storage import LocalLoadPlanner, LocalSavePlanner, SafetensorsReader, SafetensorsWriter
from fsdp2_strategy.storage.dcp_save import _write_item
from fsdp2_strategy.storage.shares import Share

MESHES = {1: (1,), 2: (2,), 3: (3,), 4: (2, 2)}
PLACEMENTS = {
    1: [[Shard(0)], [Shard(1)], [Replicate()]],
    2: [[Shard(0), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Replicate()]],
}


def save(state, path, **options):
    dcp.save(state, storage_writer=SafetensorsWriter(path, **options), planner=LocalSavePlanner())


def load(state, path, **options):
    dcp.load(state, storage_reader=SafetensorsReader(path), planner=LocalLoadPlanner(**options))


def mesh_of_all():
    shape = MESHES[dist.get_world_size()]
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def tensors_on(mesh, seed):
    """Tensors of several dtypes and placements, with the same full values on any mesh."""
    torch.manual_seed(seed)
    choices = PLACEMENTS[mesh.ndim]
    full = {f"w{i}": torch.randn(7 + i, 6) for i in range(5)}
    full |= {"half": torch.randn(8, 4).bfloat16(), "long": torch.randint(99, (5, 2)), "empty": torch.zeros(0, 3)}
    own = {name: distribute_tensor(t, mesh, choices[i % len(choices)]) for i, (name, t) in enumerate(full.items())}
    return own | {"plain": torch.full((3,), float(seed)), "number": torch.tensor(float(seed))}


def state_on(mesh, seed):
    return {
        "model": tensors_on(mesh, seed),
        "optim": {
            "state": {0: {"step": torch.tensor(seed), "exp_avg": tensors_on(mesh, seed + 100)["w0"]}},
            "param_groups": [{"lr": 0.1 * seed, "betas": (0.9, 0.95), "params": [0], "fused": None}],
        },
        "train_state": {"step": seed, "loss": float("inf"), "log": [1, "two", {"three": 3.0}], "none": {}},
        "of_rank": {f"rank{dist.get_rank()}": {"bytes": pickle.dumps(dist.get_rank()), "seed": seed}},
        "mixed": [torch.full((2,), float(seed)), {"name": str(seed)}],
    }


def plain(state):
    """A state with full tensors as lists, to compare."""
    if isinstance(state, torch.Tensor):
        full = state.full_tensor() if isinstance(state, DTensor) else state
        return str(full.dtype), full.tolist()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return type(state)(map(plain, state)) if isinstance(state, list | tuple) else state


def files_in(path):
    return {file.name: file.read_bytes() for file in sorted(path.glob("*.safetensors*"))}


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in MESHES])
def test_a_nested_state_comes_back(world_size, tmp_path):
    mesh = mesh_of_all()
    saved, other = state_on(mesh, 1), state_on(mesh, 2)
    save(saved, tmp_path / "it")
    dist.barrier()
    load(other, tmp_path / "it")
    assert plain(other) == plain(saved)


def saved_on_all_ranks(path):
    save({"model": tensors_on(mesh_of_all(), 3)}, path)


def loaded_on_all_ranks(path):
    other = {"model": tensors_on(mesh_of_all(), 4)}
    load(other, path)
    assert plain(other) == plain({"model": tensors_on(mesh_of_all(), 3)})


def test_any_number_of_ranks_reads_what_any_other_has_written_and_the_files_are_the_same(tmp_path, run_on):
    for ranks in MESHES:
        run_on(ranks, saved_on_all_ranks, path=tmp_path / str(ranks))
        assert files_in(tmp_path / str(ranks)) == files_in(tmp_path / "1")
    for ranks in MESHES:
        run_on(ranks, loaded_on_all_ranks, path=tmp_path / str(max(MESHES) + 1 - ranks))


@pytest.mark.ranks(2)
def test_an_asynchronous_save_in_a_thread_has_the_values_of_the_call(tmp_path):
    mesh = mesh_of_all()
    saved, other = state_on(mesh, 1), state_on(mesh, 2)
    expected = plain(saved)
    writer = SafetensorsWriter(tmp_path / "it")
    future = dcp.async_save(saved, storage_writer=writer, planner=LocalSavePlanner())
    for tensor in saved["model"].values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    future.result()
    dist.barrier()
    load(other, tmp_path / "it")
    assert plain(other) == expected


@pytest.mark.full
@pytest.mark.ranks(2)
def test_an_asynchronous_save_in_a_process_has_the_values_of_the_call(tmp_path):
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    mesh = mesh_of_all()
    saved, other = state_on(mesh, 1), state_on(mesh, 2)
    kind = AsyncCheckpointerType.PROCESS
    writer = SafetensorsWriter(tmp_path / "it")
    dcp.async_save(saved, storage_writer=writer, planner=LocalSavePlanner(), async_checkpointer_type=kind).result()
    dist.barrier()
    load(other, tmp_path / "it")
    assert plain(other) == plain(saved)


@pytest.mark.ranks(2)
def test_a_model_and_its_optimizer_go_on_as_if_nothing_had_happened(tmp_path):
    """The loop of a trainer with plain FSDP2 and DCP, whose state is nested and has a Stateful."""

    class TrainState(Stateful):
        step = 0

        def state_dict(self):
            return {"step": self.step}

        def load_state_dict(self, state):
            self.step = state["step"]

    def start(seed):
        torch.manual_seed(seed)
        model = build("llama", seed)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), TrainState()

    def steps(model, optimizer, train_state, count):
        losses = []
        for _ in range(count):
            loss = loss_of("llama", model, batch_of("llama", train_state.step, dist.get_rank()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            train_state.step += 1
            losses.append(loss.item())
        return losses

    def state_of(model, optimizer, train_state):
        own, of_optimizer = get_state_dict(model, optimizer)
        return {"model": own, "optimizer": of_optimizer, "train_state": train_state}

    run = start(0)
    steps(*run, 2)
    save(state_of(*run), tmp_path / "it")
    expected = steps(*run, 2)
    dist.barrier()
    resumed = start(1)
    steps(*resumed, 1)
    state = state_of(*resumed)
    load(state, tmp_path / "it")
    model, optimizer, train_state = resumed
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert train_state.step == 2 and steps(*resumed, 2) == expected


@pytest.mark.ranks(2)
def test_a_load_may_ask_for_some_tensors_and_by_other_names(tmp_path):
    mesh = mesh_of_all()
    save({"model": tensors_on(mesh, 1), "step": 7}, tmp_path / "it")
    dist.barrier()
    expected = plain(tensors_on(mesh, 1))
    one = {"model": {"w0": tensors_on(mesh, 2)["w0"]}}
    load(one, tmp_path / "it")
    assert plain(one["model"]) == {"w0": expected["w0"]}
    renamed = {"policy": {"net": tensors_on(mesh, 2)}}
    load(renamed, tmp_path / "it", rename={"policy.net.": "model.", "policy.": "nothing."})
    assert plain(renamed["policy"]["net"]) == expected
    called = {"W0": tensors_on(mesh, 2)["w0"]}
    load(called, tmp_path / "it", rename=lambda name: f"model.{name.lower()}")
    assert plain(called) == {"W0": expected["w0"]}
    more = {"model": {"w0": tensors_on(mesh, 2)["w0"], "new": torch.ones(2)}, "step": 0, "other": 5}
    load(more, tmp_path / "it", strict=False)
    assert plain(more) == {"model": {"w0": expected["w0"], "new": plain(torch.ones(2))}, "step": 7, "other": 5}
    cast = {"model": {"w0": tensors_on(mesh, 2)["w0"].to(torch.float64)}}
    load(cast, tmp_path / "it")
    assert torch.equal(cast["model"]["w0"].full_tensor().float(), tensors_on(mesh, 1)["w0"].full_tensor())


@pytest.mark.ranks(2)
def test_torchs_own_reader_reads_the_files_and_this_one_reads_those_of_torchs_writer(tmp_path):
    mesh = mesh_of_all()
    save(tensors_on(mesh, 1), tmp_path / "ours")
    dist.barrier()
    other = {n: t for n, t in tensors_on(mesh, 2).items() if n != "empty"}
    dcp.load(other, storage_reader=HuggingFaceStorageReader(str(tmp_path / "ours")))
    expected = {n: t for n, t in plain(tensors_on(mesh, 1)).items() if n != "empty"}
    assert plain(other) == expected
    sharded = {n: t for n, t in tensors_on(mesh, 1).items() if n in expected}
    dcp.save(sharded, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "theirs"), save_distributed=True))
    dist.barrier()
    assert len(list((tmp_path / "theirs").glob("shard-*.safetensors"))) == 2
    other = {n: t for n, t in tensors_on(mesh, 2).items() if n in expected}
    load(other, tmp_path / "theirs")
    assert plain(other) == expected
    dist.barrier()
    if dist.get_rank() == 0:
        next((tmp_path / "theirs").glob("shard-00001*")).unlink()
    dist.barrier()
    with pytest.raises(CheckpointException, match="which do not add up to the shape"):
        load(other, tmp_path / "theirs")


@pytest.mark.ranks(2)
def test_only_digests_travel_and_each_byte_is_written_once(tmp_path):
    mesh = mesh_of_all()
    sent, written = [], []
    create = LocalSavePlanner.create_local_plan
    cut = Share.cut

    def noted(planner):
        plan = create(planner)
        sent.append(plan)
        return plan

    torch.manual_seed(0)
    state = {f"shard{i}": distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)]) for i in range(100)}
    state |= {f"copy{i}": distribute_tensor(torch.randn(4096), mesh, [Replicate()]) for i in range(50)}
    with (
        patch.object(LocalSavePlanner, "create_local_plan", noted),
        patch.object(Share, "cut", lambda share, region: written.append((share.name, share.box)) or cut(share, region)),
    ):
        save(state, tmp_path / "it")
    [plan] = sent
    assert plan.items == [] and len(pickle.dumps(plan)) < 500
    everyones = [None, None]
    dist.all_gather_object(everyones, written)
    boxes = everyones[0] + everyones[1]
    assert len(boxes) == len(set(boxes)) == 2 * 100 + 50
    assert all(any(name.startswith("copy") for name, _ in own) for own in everyones), "ranks divide what all hold"


@pytest.mark.ranks(2)
def test_a_save_over_another_leaves_none_of_its_files(tmp_path):
    path = tmp_path / "it"
    with patch.multiple(sizes, MIN_FILE_LIMIT_BYTES=1, FILE_COUNT=4):
        save({"a": torch.randn(300), "b": torch.randn(200), "value": 1}, path)
    dist.barrier()
    if dist.get_rank() == 0:
        (path / "notes.txt").write_text("mine")
        save_file({"x": torch.ones(1)}, path / "adapter_model.safetensors")
        assert (path / "model.safetensors.index.json").exists()
    save({"c": torch.ones(3)}, path)
    dist.barrier()
    assert {file.name for file in path.iterdir()} == {
        "model.safetensors",
        "checksums",
        "notes.txt",
        "adapter_model.safetensors",
    }
    assert list(load_file(path / "model.safetensors")) == ["c"]
    with pytest.raises(CheckpointException, match="overwrite is False"):
        save({"c": torch.zeros(3)}, path, overwrite=False)
    assert load_file(path / "model.safetensors")["c"].sum() == 3


@pytest.mark.ranks(2)
def test_a_save_that_fails_leaves_the_files_before_and_the_next_one_works(tmp_path):
    path = tmp_path / "it"
    save({"a": torch.ones(3)}, path)
    dist.barrier()
    with patch.object(SafetensorsWriter, "write_data", side_effect=OSError("the disk is full")):
        with pytest.raises(CheckpointException, match="the disk is full"):
            save({"a": torch.zeros(3)}, path)
    state = {"a": torch.zeros(3)}
    load(state, path)
    assert state["a"].sum() == 3
    save({"a": torch.full((3,), 2.0)}, path)
    dist.barrier()
    load(state, path)
    assert state["a"].sum() == 6
    dist.barrier()
    assert not list(path.glob(".*"))


@pytest.mark.ranks(2)
def test_what_cannot_be_saved_or_loaded_is_named_on_every_rank(tmp_path):
    path, mesh = tmp_path / "it", mesh_of_all()
    own = {"own": torch.ones(2 + dist.get_rank())}
    for state, says in (
        ({"list": [{"__tuple__": [1]}]}, "cannot save list: .* are reserved"),
        ({"fn": print}, "cannot save fn: its value is a builtin_function_or_method"),
        ({"deep": {"model": nn.Linear(1, 1)}}, "cannot save deep.model: its value is a Linear"),
        ({"a.b": 1, "a": {"b": 2}}, "two values of the state dict have the name 'a.b'"),
        (own, "shapes or dtypes of the tensors on rank 1 differ"),
        ({"step": dist.get_rank()}, "cannot save step: its value differs between ranks"),
    ):
        with pytest.raises(CheckpointException, match=says):
            save(state, path)
    assert not path.exists() or not list(path.glob("*.safetensors"))
    with pytest.raises(CheckpointException, match=r"planner=LocalSavePlanner\(\)"):
        dcp.save({"a": torch.ones(1)}, storage_writer=SafetensorsWriter(path))
    with pytest.raises(CheckpointException, match="there is no folder, expected one"):
        dcp.save({"a": torch.ones(1)}, storage_writer=SafetensorsWriter(), planner=LocalSavePlanner())
    dcp.save({"a": torch.ones(3)}, storage_writer=SafetensorsWriter(), planner=LocalSavePlanner(), checkpoint_id=path)
    dist.barrier()
    for state, says in (
        ({"b": torch.ones(3)}, "the folder lacks 1 value .b. of the state dict"),
        ({"a": torch.ones(4)}, r"its shape is \[4\], and \[3\] in the folder"),
        ({"a": 5}, "the folder lacks 1 value .a."),
        ({"a": distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])}, r"its shape is \[2, 2\]"),
    ):
        with pytest.raises(CheckpointException, match=says):
            load(state, path)
    dcp.save({"n": 1, "a": torch.ones(3)}, storage_writer=SafetensorsWriter(path), planner=LocalSavePlanner())
    dist.barrier()
    with pytest.raises(CheckpointException, match=r"expected planner=LocalLoadPlanner\(\)"):
        dcp.load({"n": 0}, storage_reader=SafetensorsReader(path))
    with pytest.raises(CheckpointException, match="it has no safetensors files"):
        load({"a": torch.ones(3)}, tmp_path / "nothing")


@pytest.mark.ranks(2)
def test_damage_is_named(tmp_path):
    path = tmp_path / "it"
    save({"a": torch.randn(1000), "step": 1}, path)
    dist.barrier()
    if dist.get_rank() == 0:
        with (path / "model.safetensors").open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            file.write(b"\x99")
    dist.barrier()
    with pytest.raises(CheckpointException, match=r"cannot read a: bytes \d+ to \d+ of .*model.safetensors have the"):
        load({"a": torch.zeros(1000)}, path)
    unverified = {"a": torch.zeros(1000)}
    dcp.load(unverified, storage_reader=SafetensorsReader(path, verify=False), planner=LocalLoadPlanner())
    for text in ("[]", "{", '{"step": {"__bytes__": "%"}}', '{"step": {"__float__": "many"}}'):
        dist.barrier()
        if dist.get_rank() == 0:
            (path / "values.json").write_text(text)
        dist.barrier()
        with pytest.raises(CheckpointException, match=r"cannot (read .*values\.json|load step)"):
            load({"step": 0}, path)


@pytest.mark.ranks(1)
def test_a_folder_of_any_model_is_read_and_nothing_is_executed(tmp_path):
    save_file({"x": torch.arange(6.0).reshape(2, 3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"y": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    state = {"x": torch.zeros(2, 3), "y": torch.zeros(2)}
    load(state, tmp_path)
    assert state["x"].tolist() == [[0, 1, 2], [3, 4, 5]] and state["y"].sum() == 2
    save_file({"y": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointException, match=r"y is in .* and in .*, expected it in one file"):
        load(state, tmp_path)
    save({"step": 3, "blob": b"\x80\x04cos\nsystem"}, tmp_path / "own")
    assert json.loads((tmp_path / "own" / "values.json").read_text())["step"] == 3
    values = {"step": 0, "blob": b""}
    load(values, tmp_path / "own")
    assert values == {"step": 3, "blob": b"\x80\x04cos\nsystem"}


def save_and_compare(state, path):
    dcp.save(state, storage_writer=SafetensorsWriter(path), planner=LocalSavePlanner())
    expected = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    found = load_file(path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert not [n for n in expected if found[n].dtype != expected[n].dtype or not torch.equal(found[n], expected[n])]


@pytest.mark.ranks(2)
def test_a_save_does_not_use_the_plan_of_tensors_that_have_changed(tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    split = {"x": distribute_tensor(torch.arange(32.0).view(4, 8), mesh, [Shard(0)]), "y": torch.arange(3)}
    for state in (
        split,
        {**split, "x": split["x"] + 1},  # other values
        {**split, "x": distribute_tensor(torch.arange(32.0).view(4, 8), mesh, [Shard(1)])},
        {**split, "x": distribute_tensor(torch.arange(32.0).view(4, 8), mesh, [Replicate()])},
        {**split, "x": distribute_tensor(torch.arange(48.0).view(6, 8), mesh, [Shard(0)])},
        {**split, "x": split["x"].to(torch.bfloat16)},
        {**split, "y": torch.arange(4)},
        {**split, "z": torch.arange(3)},
        {"x": split["x"]},
        {"y": split["x"], "x": split["y"]},
        split,
    ):
        save_and_compare(state, tmp_path)


@pytest.mark.ranks(2)
def test_the_plan_of_equal_tensors_is_made_once(tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    with patch("fsdp2_strategy.storage.dcp_save._write_item", side_effect=_write_item) as planned:
        for value in range(3):
            save_and_compare({"x": distribute_tensor(torch.full((4, 16), float(value)), mesh, [Shard(0)])}, tmp_path)
    assert planned.call_count == 1
