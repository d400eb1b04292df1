"""Weights that are split along several axes of a mesh, as by tensor and expert parallelism.

The placements are made by hand, and every rank knows the full model, so nothing is compared with what this package
computes itself.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.models import build
from helpers.placed import PLANS, SHAPES, differing, locals_of, mesh_of, place, placed_model, with_gradients
from helpers.worlds import some_rows
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp2_strategy import (
    EMA,
    build_optimizer,
    clip_grad_norm,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    save_model,
    sizes,
    stream_weights,
    verify_checkpoint,
    weight_checksums,
)
from fsdp2_strategy.checkpoint import wait_for_checkpoint
from fsdp2_strategy.checkpoint.training_state import optimizer_tensors
from fsdp2_strategy.distributed.torch_internals import local_of
from fsdp2_strategy.errors import DamageError, ShardError
from fsdp2_strategy.model import offload, reload
from fsdp2_strategy.model.boxes import box_of, row_major, shard_at
from fsdp2_strategy.model.fingerprint import _scattered, fingerprints, local_sums
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.model.placeholders import full_tensor_of
from fsdp2_strategy.model.shards import local_shard, replica_of, shard_size_of
from fsdp2_strategy.rollout.difference import TensorDifference
from fsdp2_strategy.storage.regions import Piece
from fsdp2_strategy.storage.verified_read import Reader

CASES = [*((name, "tp x shard") for name in PLANS), ("llama", "hsdp x tp"), ("mixtral experts", "hsdp x tp")]


def rows(*usual):
    """Return all cases: the usual ones, and others for the full run, with sizes as they are."""
    others = [pytest.mark.full, pytest.mark.real_sizes]
    return [pytest.param(*case, marks=() if case in usual else others) for case in CASES]


# --- boxes ------------------------------------------------------------------------------------------------------------


def random_placements(draw, ndim):
    """Return the sizes of a mesh, and placements as torch makes them: strided ones count the shards on their right."""
    sizes = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
    placements = []
    for at in reversed(range(len(sizes))):
        dim = draw.randrange(ndim)
        others = zip(sizes[at + 1 :], placements, strict=True)
        on_the_right = math.prod(n for n, p in others if not p.is_replicate() and p.dim == dim)
        kinds = [
            Replicate(),
            Shard(dim),
            Shard(dim),
            _StridedShard(dim, split_factor=on_the_right * draw.randint(1, 2)),
        ]
        placements.insert(0, draw.choice(kinds))
    return tuple(sizes), tuple(placements)


def random_view(draw, full):
    """Return a view as conversions make them, and others: transposed, narrowed, reshaped, in steps, expanded."""
    view = full
    for _ in range(draw.randint(0, 4)):
        dim = draw.randrange(view.ndim)
        change = draw.choice(["transpose", "narrow", "select", "reshape", "step", "unsqueeze"])
        if change == "transpose":
            view = view.transpose(dim, draw.randrange(view.ndim))
        elif change == "narrow":
            begin = draw.randrange(view.shape[dim])
            view = view.narrow(dim, begin, draw.randint(1, view.shape[dim] - begin))
        elif change == "select" and view.ndim > 1:
            view = view.select(dim, draw.randrange(view.shape[dim]))
        elif change == "reshape" and view.is_contiguous():
            rows = draw.choice([n for n in range(1, view.numel() + 1) if view.numel() % n == 0])
            view = view.view(rows, -1)
        elif change == "step":
            view = view[tuple(slice(None, None, 2 if d == dim else 1) for d in range(view.ndim))]
        elif change == "unsqueeze":
            view = view.unsqueeze(0)
    return view


def test_shards_together_have_each_element_once_and_every_view_is_found_in_them():
    draw = random.Random(0)
    for _ in range(600):
        shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(1, 3)))
        full = torch.arange(math.prod(shape)).reshape(shape)
        sizes, placements = random_placements(draw, len(shape))
        shards = [shard_at(shape, sizes, place, placements) for place in itertools.product(*map(range, sizes))]
        copies = math.prod(size for size, p in zip(sizes, placements, strict=True) if p.is_replicate())
        locals_ = [shard.of(full).clone() for shard in shards]
        elements = sorted(value for local in locals_ for value in local.flatten().tolist())
        assert elements == sorted(full.flatten().tolist() * copies), (shape, sizes, placements)
        for shard, local in zip(shards, locals_, strict=True):
            assert shard.shape == local.shape
            found = torch.full_like(full, -1)
            shard.copy_to(found, local)
            assert sorted(found[found >= 0].tolist()) == sorted(local.flatten().tolist())
            assert torch.equal(found[found >= 0], full[found >= 0])
        view = random_view(draw, full)
        piece = Piece("x", (0,) * view.ndim, tuple(view.shape), view.stride(), view.storage_offset())
        found, times = torch.full(view.shape, -1), torch.zeros(view.shape)
        for shard, local in zip(shards, locals_, strict=True):
            for part in piece.in_shard(shard):
                here = tuple(slice(s, s + n) for s, n in zip(part.start, part.shape, strict=True))
                found[here] = local.as_strided(part.shape, part.strides, part.offset)
                times[here] += 1
        assert torch.equal(found, view) and (times == copies).all(), (shape, sizes, placements, piece)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["tp x shard", "hsdp x tp"])
def test_boxes_are_what_fully_shard_makes_of_tensors_that_are_split_already(kind):
    cases = [
        ((12, 4), Shard(0)),
        ((12, 4), Shard(1)),
        ((12, 4), _StridedShard(0, split_factor=2)),
        ((3, 8), _StridedShard(1, split_factor=2)),
        ((7, 3), Shard(0)),
        ((5, 7), Shard(1)),
        ((1, 4), Shard(1)),
        ((3,), Shard(0)),
        ((5, 8, 3), _StridedShard(1, split_factor=2)),
        ((5, 3, 6), Shard(2)),
        ((3, 4, 6), Shard(0)),
        ((6, 4), Replicate()),
    ]
    mesh = mesh_of(SHAPES[kind])
    module = torch.nn.Module()
    module.each = torch.nn.ParameterList()
    fulls, splits = [], []
    for shape, placement in cases:
        fulls.append(torch.arange(float(math.prod(shape))).reshape(shape))
        splits.append(distribute_tensor(fulls[-1], mesh["tp"], [placement], src_data_rank=None))
        module.each.append(splits[-1])
    rows = [local_of(split) for split in splits]
    index, count = mesh.get_local_rank(1), mesh.size(1)
    torch.distributed.fsdp.fully_shard(module, mesh=mesh["replicate", "shard"])
    for full, parameter, own in zip(fulls, module.each, rows, strict=True):
        chunks = own.chunk(count)  # fully_shard splits the rows of the local tensor last
        expected = chunks[index] if index < len(chunks) else own[:0]
        assert torch.equal(local_of(parameter), expected)
        assert torch.equal(local_shard(parameter).of(full), expected), parameter.placements
        assert torch.equal(full_tensor_of(parameter), full), parameter.placements
        held = torch.zeros_like(full)
        local_shard(parameter).copy_to(held, torch.ones_like(expected))
        dist.all_reduce(held)
        assert (held == replica_of(parameter)[1]).all()
        assert replica_of(parameter)[1] * shard_size_of(parameter) == dist.get_world_size()


@pytest.mark.ranks(4)
def test_a_parameter_that_tensor_parallelism_leaves_alone_has_a_replica_on_each_of_its_ranks():
    mesh = mesh_of((1, 2, 2))
    plain = distribute_tensor(torch.arange(8.0), mesh["shard"], [Shard(0)], src_data_rank=None)
    assert replica_of(plain) == (mesh.get_local_rank("tp"), 2)
    sums = local_sums({"plain": plain})
    alone = local_sums({"plain": torch.arange(8.0)})
    assert fingerprints({"plain": plain}, sums) == fingerprints({"plain": torch.arange(8.0)}, alone)


def test_placements_whose_order_is_unknown_are_an_error():
    with pytest.raises(ShardError, match="multiples of the number of shards on their right"):
        shard_at((12,), (2, 2), (0, 0), (_StridedShard(0, split_factor=3), Shard(0)))
    with pytest.raises(ShardError, match="expected shards and replicas"):
        shard_at((12,), (2,), (0,), (torch.distributed.tensor.Partial(),))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def take_a_step(model, name, shape):
    optimizer = build_optimizer(model, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    with_gradients(model, name, shape, seed=7)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def training_state(name, shape):
    """Return a model after one optimizer step, with its optimizer and an average of its parameters."""
    model = placed_model(name, shape)
    average = EMA(model, decay=0.5)
    optimizer = take_a_step(model, name, shape)
    average.update(model)
    return model, optimizer, average.averages


def save_on(folder, name, shape, async_save=False):
    model, optimizer, averages = training_state(name, shape)
    save_checkpoint(model, folder, "t", step=1, optimizer=optimizer, ema=averages, async_save=async_save)
    wait_for_checkpoint()


def load_on(folder, name, shape):
    expected, its_optimizer, its_averages = training_state(name, shape)
    model = placed_model(name, shape, seed=3)
    optimizer = build_optimizer(model, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    averages = EMA(model, decay=0.5).averages
    load_checkpoint(model, folder, optimizer=optimizer, ema=averages)
    assert not differing(locals_of(named_parameters(model)), locals_of(named_parameters(expected)))
    found, wanted = optimizer_tensors(model, optimizer), optimizer_tensors(expected, its_optimizer)
    assert not differing(locals_of(found), locals_of(wanted))
    assert not differing(locals_of(averages), locals_of(its_averages))


def digests(folder):
    """Return the hash of each file with tensors: the manifests of checksums depend on the ranks."""
    files = sorted(path for path in Path(folder).rglob("*.safetensors") if "rng" not in path.parts)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.full
@pytest.mark.parametrize(("name", "kind"), rows())
def test_files_are_those_of_one_rank_and_load_in_every_other_shape(name, kind, run_on, tmp_path):
    run_on(1, save_on, folder=tmp_path / "one", name=name, shape=(1, 1, 1))
    run_on(4, save_on, folder=tmp_path / "many", name=name, shape=SHAPES[kind])
    assert digests(tmp_path / "one") == digests(tmp_path / "many")
    assert verify_checkpoint(tmp_path / "many" / "t", progress=False).ok
    for world, shape in ((4, SHAPES["tp x shard"]), (4, SHAPES["hsdp x tp"]), (3, (1, 3, 1)), (1, (1, 1, 1))):
        run_on(world, load_on, folder=tmp_path / "many", name=name, shape=shape)
    run_on(4, load_on, folder=tmp_path / "one", name=name, shape=SHAPES[kind])


@pytest.mark.parametrize(("name", "kind"), rows())
def test_an_asynchronous_save_writes_the_same_files(name, kind, run_on, tmp_path):
    run_on(4, save_on, folder=tmp_path / "sync", name=name, shape=SHAPES[kind])
    run_on(4, save_on, folder=tmp_path / "async", name=name, shape=SHAPES[kind], async_save=True)
    assert digests(tmp_path / "sync") == digests(tmp_path / "async")
    manifests = [sorted((tmp_path / kind_ / "t").rglob("checksums/*")) for kind_ in ("sync", "async")]
    for one, other in zip(*manifests, strict=True):
        listed = [json.loads(path.read_text())["blocks"] for path in (one, other)]
        tensors = [{k: v for k, v in blocks.items() if k.endswith(".safetensors")} for blocks in listed]
        assert tensors[0] == tensors[1]


def load_damaged(folder, name, shape):
    model = placed_model(name, shape, seed=3)
    with pytest.raises(DamageError, match=re.escape("down_proj.weight")):
        load_checkpoint(model, folder)


@pytest.mark.full
def test_a_flipped_byte_in_the_columns_of_any_rank_is_found(run_on, tmp_path):
    run_on(4, save_on, folder=tmp_path, name="llama", shape=SHAPES["tp x shard"])
    [path] = (tmp_path / "t" / "model").glob("*.safetensors")
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    entry = next(facts for key, facts in header.items() if key.endswith("0.mlp.down_proj.weight"))
    row_bytes = entry["shape"][1] * 4
    for column in (0, row_bytes - 1):
        damaged = bytearray(content)
        damaged[start + entry["data_offsets"][0] + 3 * row_bytes + column] ^= 1
        path.write_bytes(damaged)
        report = verify_checkpoint(tmp_path / "t", progress=False)
        assert len(report.problems) == 1 and "0.mlp.down_proj.weight" in report.problems[0]
        for world, shape in ((4, SHAPES["tp x shard"]), (3, (1, 3, 1))):
            run_on(world, load_damaged, folder=tmp_path, name="llama", shape=shape)


@pytest.mark.full
@pytest.mark.real_sizes
def test_columns_share_checksums_over_many_rows(run_on, tmp_path):
    run_on(4, save_on, folder=tmp_path, name="llama", shape=SHAPES["tp x shard"])
    [path] = sorted((tmp_path / "t").rglob("checksums/*"))[:1]
    blocks = json.loads(path.read_text())["blocks"]["model/model.safetensors"]
    strided = [block for block in blocks if len(block) > 3]
    assert strided and all(run == stride // 2 and end - begin > stride for begin, end, _, run, stride in strided)
    columns = sum(bool(re.search(r"(o|down)_proj\.weight$", key)) for key, _ in build("llama").named_parameters())
    assert len(strided) == columns, "one block for each tensor of which the rank holds columns"


def save_and_load_uneven(folder):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.arange(40.0).view(8, 5))
    place(model, mesh_of((1, 1, 3)), {"weight": Shard(1)})
    for row_bytes in (1, 5, 12, 20, 21, 100):  # a run has 8 or 4 bytes, a row has 20
        with patch.object(sizes, "STRIDED_ROW_BYTES", row_bytes):
            save_checkpoint(model, folder, f"t{row_bytes}", max_num=None)
        expected = local_of(model.weight.detach()).clone()
        local_of(model.weight.detach()).zero_()
        load_checkpoint(model, folder, tag=f"t{row_bytes}")
        assert torch.equal(local_of(model.weight), expected)


@pytest.mark.full
def test_ranks_with_columns_of_unequal_number_agree_on_their_checksums(run_on, tmp_path):
    run_on(3, save_and_load_uneven, folder=tmp_path)


# --- Hugging Face folders -------------------------------------------------------------------------------------------


def export_on(folder, name, shape):
    save_model(placed_model(name, shape), None, folder)


@pytest.mark.full
@pytest.mark.parametrize(("name", "kind"), rows(("mixtral", "tp x shard")))
def test_an_export_is_that_of_one_rank(name, kind, run_on, tmp_path):
    run_on(1, export_on, folder=tmp_path / "one", name=name, shape=(1, 1, 1))
    run_on(4, export_on, folder=tmp_path / "many", name=name, shape=SHAPES[kind])
    assert digests(tmp_path / "one") == digests(tmp_path / "many")
    run_on(4, read_own_part, folder=tmp_path / "one", name=name, shape=SHAPES[kind])


def read_own_part(folder, name, shape):
    """Load a folder: each rank reads the bytes of its own rows, columns and experts only."""
    model, expected = placed_model(name, shape, seed=3), placed_model(name, shape)
    readers, original = [], Reader.__init__

    def remember(self, *args, **kwargs):
        original(self, *args, **kwargs)
        readers.append(self)

    with patch.object(Reader, "__init__", remember), patch.object(sizes, "SHORT_READ_BYTES", 1):
        load_weights(model, folder)
    assert not differing(locals_of(named_parameters(model)), locals_of(named_parameters(expected)))
    counts = [sum(reader.bytes_read for reader in readers), sum(local_of(p).nbytes for p in model.parameters())]
    total = torch.tensor(counts)
    dist.all_reduce(total)  # replicas divide the reads
    read, needed = total.tolist()
    assert read * shape[0] == needed


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "kind"), rows(("mixtral", "tp x shard"), ("mixtral experts", "hsdp x tp")))
def test_a_stream_has_the_full_tensors_and_their_changes(name, kind, tmp_path):
    model = placed_model(name, SHAPES[kind])
    plain = build(name.split()[0])
    expected = dict(stream_weights(plain, dtype=torch.bfloat16))
    for bucket_bytes in (1, 3000, 1 << 20):
        streamed = dict(stream_weights(model, dtype=torch.bfloat16, bucket_bytes=bucket_bytes))
        assert not differing(streamed, expected)
    assert weight_checksums(streamed.items()) == weight_checksums(expected.items())
    for retain in ("copy", "hashes"):
        stream = stream_weights(model, dtype=torch.bfloat16, since="", retain=retain)
        held = {key: tensor.clone() for key, tensor in stream}
        for step in range(2):
            draw = torch.Generator().manual_seed(step)
            for parameter, own in zip(plain.parameters(), model.parameters(), strict=True):
                added = torch.rand(parameter.shape, generator=draw) < 0.05
                added[len(added) // 4 :] = False  # a changed block is sent in full if only hashes are retained
                for full, to in ((added, parameter), (local_shard(own).of(added), own)):
                    local_of(to.detach()).add_(full.to(parameter.dtype))
            stream = stream_weights(model, dtype=torch.bfloat16, since=stream.version, retain=retain)
            changed = list(stream)
            assert not stream.is_full and any(isinstance(each, TensorDifference) for _, each in changed)
            for key, each in changed:
                if isinstance(each, TensorDifference):
                    each.apply_(held[key])
                else:
                    held[key] = each.clone()
            assert not differing(held, dict(stream_weights(plain, dtype=torch.bfloat16)))


# --- adapters, offload, norms -----------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("name", "kind"), some_rows([c for c in CASES if "llama" in c[0] or "phi3" in c[0]], [("llama", "tp x shard")])
)
def test_adapters_are_merged_into_columns_as_into_full_weights(name, kind):
    def adapted(base, seed):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            model = get_peft_model(base, LoraConfig(r=2, target_modules=["o_proj", "down_proj", "qkv_proj", "q_proj"]))
        draw = torch.Generator().manual_seed(seed)
        for key, parameter in model.named_parameters():
            if "lora" in key:
                parameter.data = torch.randn(parameter.shape, generator=draw)
        return model

    plain = adapted(build(name), 1)
    expected = dict(stream_weights(plain, dtype=None))
    model = adapted(build(name), 1)
    place(model.base_model.model, mesh_of(SHAPES[kind]), PLANS[name])
    with patch.object(sizes, "MERGED_ROWS", 16):
        assert not differing(dict(stream_weights(model, dtype=None)), dict(stream_weights(plain, dtype=None)))
    assert not differing(dict(stream_weights(model, dtype=None)), expected)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "kind"), rows(("phi3", "tp x shard")))
def test_offloaded_weights_fingerprints_and_norms_are_those_of_full_tensors(name, kind):
    shape = SHAPES[kind]
    model, plain = placed_model(name, shape), build(name.split()[0])
    for blocks in (16, 1 << 16):
        with patch.object(sizes, "FINGERPRINT_ELEMENTS", blocks):
            found, expected = named_parameters(model), named_parameters(plain)
            sums = local_sums(found)
            alone = {key: p if dist.get_rank() == 0 else p[:0] for key, p in expected.items()}
            assert fingerprints(found, sums) == fingerprints(expected, local_sums(alone))
    with_gradients(model, name, shape, seed=7)
    norm = torch.cat([p.detach().double().flatten() for p in build(name.split()[0], 7).parameters()]).norm().item()
    assert clip_grad_norm(model, 0.0) == pytest.approx(norm, rel=1e-6)
    model.zero_grad()
    before = locals_of(named_parameters(model))
    expected = dict(stream_weights(model, dtype=None))
    offload(model)
    assert not differing(dict(stream_weights(model, dtype=None)), expected)
    reload(model)
    assert not differing(locals_of(named_parameters(model)), before)


@pytest.mark.parametrize("shape", [(4, 6, 10), (4, 3, 6, 10), (9, 10)], ids=str)
def test_positions_of_scattered_elements_take_little_memory(shape):
    full = torch.arange(math.prod(shape)).view(shape)
    box = ((1, shape[0] - 2), *((0, length) for length in shape[1:-1]), (3, 4))
    own = box_of(full, box)
    parts = list(_scattered(own, row_major(shape), box, at_once=8))
    assert max(len(positions) for positions, _ in parts) <= 8
    assert all(torch.equal(positions, values) for positions, values in parts)
    assert torch.equal(torch.cat([values for _, values in parts]), own.flatten())
