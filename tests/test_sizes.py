"""Sizes: read at the time of use, and those of files belong to the files."""

from __future__ import annotations

import ast
import json
import os
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import frozen
from helpers.folders import contents
from helpers.reference import full_parameters
from helpers.shrunk import SHRUNK
from helpers.training import assert_same, full_state, prepared, strategy_for, train
from helpers.worlds import some, some_rows
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp2_strategy
import fsdp2_strategy.storage.write as write_module
from fsdp2_strategy import build_mesh, list_checkpoints, sizes, verify_checkpoint
from fsdp2_strategy.checkpoint import directory, listing, paths
from fsdp2_strategy.cli import main
from fsdp2_strategy.distributed.mesh import auto_shard_size
from fsdp2_strategy.errors import DamageError
from fsdp2_strategy.hf.export import _default_file_bytes
from fsdp2_strategy.model.state import model_state
from fsdp2_strategy.sharding import shard
from fsdp2_strategy.storage import component
from fsdp2_strategy.storage.checksums import digest_of
from fsdp2_strategy.storage.output_files import file_bytes
from fsdp2_strategy.storage.regions import Region

NAMES = [name for name in vars(sizes) if name.isupper()]


@pytest.mark.full
def test_a_size_is_read_at_the_time_of_use():
    used = set()
    for file in Path(fsdp2_strategy.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "fsdp2_strategy.sizes", file
        assert not read_on_import(tree), file
        used |= {name for name in read_in(tree) if name.isupper()}
    assert used == set(NAMES)
    assert set(SHRUNK) < set(NAMES)


def read_on_import(node):
    """Return the sizes that are read when a module is imported: anywhere but in bodies of functions."""
    found = {node.attr} if is_size(node) else set()
    inside = ast.iter_child_nodes(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inside = [*node.decorator_list, node.args]
    elif isinstance(node, ast.Lambda):
        inside = [node.args]
    return found.union(*map(read_on_import, inside))


def is_size(node):
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sizes"


def read_in(tree):
    return {node.attr for node in ast.walk(tree) if is_size(node)}


def test_what_is_read_on_import_is_found():
    read = "X = sizes.A\nclass C:\n  x = sizes.B\n@f(sizes.C)\ndef f(x=sizes.D): sizes.E\ng = lambda x=sizes.F: sizes.G"
    assert read_on_import(ast.parse(read)) == set("ABCDF")


def save_in_blocks(path, size):
    with patch.object(sizes, "BLOCK_BYTES", size):
        strategy = strategy_for()
        model, optimizer, scheduler = prepared(strategy)
        train(strategy, model, optimizer, scheduler, range(2))
        strategy.save_ckpt(model, path, "t")
    written = json.loads((path / "t/checksums/rank00000.json").read_text())
    assert written["block_bytes"] == size
    if size == 2048:
        assert max(end - begin for blocks in written["blocks"].values() for begin, end, _ in blocks) <= size
    return full_state(model, optimizer)


def load_what_was_saved_in_blocks(path, size, expected):
    with patch.object(sizes, "BLOCK_BYTES", size):
        strategy = strategy_for()
        model, optimizer, _ = prepared(strategy, seed=1)
        strategy.load_ckpt(model, path)
        assert_same(full_state(model, optimizer), expected)
        assert verify_checkpoint(path / "t").ok
        if dist.get_rank() == 0:
            with patch.object(sizes, "COPY_BYTES", size):
                main(["export", str(path / "t"), str(path / f"out{size}")])
                assert (path / f"out{size}/model.safetensors").read_bytes() == (
                    path / "t/model/model.safetensors"
                ).read_bytes()
    dist.barrier()


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    some_rows([(2048, 1 << 24), (1 << 24, 2048), (2048, 1000), (5000, 512)], [(5000, 512)]),
)
def test_the_size_of_a_block_is_that_of_the_checkpoint(saved, loaded, tmp_path):
    expected = save_in_blocks(tmp_path, saved)
    load_what_was_saved_in_blocks(tmp_path, loaded, expected)


def rewrite_list(path, change):
    """Change a list of checksums, and let the manifest mean the new one."""
    name = f"{paths.CHECKSUMS}/rank00000.json"
    listed = json.loads((path / name).read_text())
    change(listed)
    content = json.dumps(listed).encode()
    (path / name).write_bytes(content)
    manifest = listing.read_manifest(path)
    manifest["files"][name], manifest["checksums"][name] = len(content), digest_of(content)
    manifest["digest"] = listing.digest_of_manifest({k: v for k, v in manifest.items() if k != "digest"})
    directory.write_json(path / paths.MANIFEST, manifest)


@pytest.mark.ranks(1)
def test_a_checkpoint_that_does_not_say_its_block_is_of_the_first_size(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy, "mlp")
    path = Path(strategy.save_ckpt(model, tmp_path, "t"))
    rewrite_list(path, lambda listed: listed.pop("block_bytes"))
    before = full_parameters(model)
    with patch.object(sizes, "BLOCK_BYTES", 512):
        strategy.load_ckpt(model, tmp_path)
    assert verify_checkpoint(path).ok
    assert_same(full_parameters(model), before)
    rewrite_list(path, lambda listed: listed.update(block_bytes=100))
    with pytest.raises(DamageError, match="has more than 100 bytes"):
        strategy.load_ckpt(model, tmp_path)
    assert not verify_checkpoint(path).ok


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["gpt_oss", "llama_tied"])  # one has tensors that need a gather
@pytest.mark.parametrize("staging", some([1000, 9000, 50_001], [9000]))
def test_an_async_save_has_the_bytes_of_a_synchronous_one_wherever_the_copy_is_cut(name, staging, tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy, name)
    train(strategy, model, optimizer, scheduler, range(2), name)
    with patch.multiple(sizes, BLOCK_BYTES=2000, STAGING_BYTES=staging, SMALL_WRITE_BYTES=100):
        strategy.save_ckpt(model, tmp_path / "sync", "t")
        strategy.save_ckpt(model, tmp_path / "async", "t", async_save=True)
        strategy.wait_for_checkpoint()
    dist.barrier()
    assert contents(tmp_path / "sync/t") == contents(tmp_path / "async/t")


@pytest.mark.ranks(2)
def test_fingerprints_are_compared_by_the_blocks_that_they_were_made_of(tmp_path):
    with patch.object(sizes, "FINGERPRINT_ELEMENTS", 64):
        run = frozen.start(frozen.folder_with(tmp_path / "base", 0))
        frozen.train(*run, range(2))
        run[0].save_ckpt(run[1], tmp_path / "ckpts", only_trainable=True)
    [saved] = list_checkpoints(tmp_path / "ckpts")
    assert json.loads((saved.path / paths.TRAINER_STATE).read_text())["left_out"]["elements"] == 64
    again = frozen.start(tmp_path / "base", seed=1)
    again[0].load_ckpt(again[1], tmp_path / "ckpts")
    assert_same(full_state(*again[1:]), full_state(*run[1:]))


@pytest.mark.parametrize(
    ("parameters", "is_training", "world_size", "expected"),
    [
        (7e9, True, 8, -1),  # whoever trains has gradients and states to spread
        (70e9, True, 1, -1),
        (9_999_999_999, False, 8, 1),
        (10_000_000_000, False, 8, 8),
        (10_000_000_000, False, 16, 8),
        (10_000_000_000, False, 12, 6),
        (10_000_000_000, False, 9, 3),
        (10_000_000_000, False, 11, 1),
        (10_000_000_000, False, 4, 4),
        (79_999_999_999, False, 64, 8),
        (80_000_000_000, False, 64, -1),
        (0, False, 1, 1),
    ],
)
def test_a_model_is_split_over_as_few_ranks_as_its_size_needs(parameters, is_training, world_size, expected):
    assert auto_shard_size(int(parameters), is_training=is_training, world_size=world_size) == expected


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (0, 64 << 20),
        (64 << 20, 64 << 20),  # one file
        (2 << 30, 64 << 20),  # 32 files
        (16 * 10**9, 5 * 10**8),
        (160 * 10**9, 5 * 10**9),
        (1400 * 10**9, 5 * 10**9),  # more than 32, none above 5 GB
    ],
)
def test_a_checkpoint_is_split_into_as_many_files_as_let_ranks_write_at_once(total, expected):
    assert file_bytes({"x": Region.of("x", (total,), torch.uint8)}) == expected
    assert _default_file_bytes({"x": Region.of("x", (total,), torch.uint8)}) == max(expected, 256 << 20)


@pytest.mark.ranks(2)
def test_ranks_make_different_files_and_begin_to_write_to_different_ones(tmp_path):
    made, opened, forced = [], [], []
    create, open_file, force = component.create_files, write_module.opened, component.force_to_disk

    def recorded(files):
        made.extend(file.path.name for file in files)
        create(files)

    def noted(path, flags):
        if flags & os.O_CREAT:  # to write to it
            opened.append(path.name)
        return open_file(path, flags)

    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, [0])
    with (
        patch.multiple(sizes, FILE_COUNT=8, MIN_FILE_LIMIT_BYTES=1),
        patch.object(component, "create_files", recorded),
        patch.object(component, "force_to_disk", lambda paths: force(paths) or forced.extend(p.name for p in paths)),
        patch.object(write_module, "opened", noted),
        patch.object(write_module, "_THREADS", 1),
    ):
        path = Path(strategy.save_ckpt(model, tmp_path, "t"))
    assert {*made, *opened} <= {*forced}, "what a rank writes it forces to disk, headers as well"
    everyones = [None, None]
    dist.all_gather_object(everyones, (made, opened))
    (made, opened), (others, others_opened) = everyones
    names = {file.name for part in ("model", "optimizer") for file in (path / part).glob("*.safetensors")}
    assert len(names) > 10 and sorted(made + others) == sorted(names), "each file is made once"
    assert made and others and opened[0] != others_opened[0]
    assert set(opened) | set(others_opened) == names
    assert len(set(opened) & set(others_opened)) > len(names) / 2, "each has a part of every tensor but of numbers"
    assert verify_checkpoint(path).ok


@pytest.mark.ranks(2)
def test_a_corrupt_index_is_corruption_and_falls_back(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    with patch.multiple(sizes, MIN_FILE_LIMIT_BYTES=1):
        for tag in ("old", "new"):
            strategy.save_ckpt(model, tmp_path, tag, client_state={"tag": tag})
    index = tmp_path / "new" / "model" / "model.safetensors.index.json"
    if dist.get_rank() == 0:
        index.write_bytes(b"x" * index.stat().st_size)
    dist.barrier()
    with pytest.raises(DamageError, match="index"):
        strategy.load_ckpt(model, tmp_path)
    assert strategy.load_ckpt(model, tmp_path, fallback=True)[1] == {"tag": "old"}


@pytest.mark.ranks(2)
def test_the_key_of_a_layout_tells_placements_meshes_and_shapes_apart():
    mesh = build_mesh()

    def key(*placements, rows=4):
        tensors = {str(n): distribute_tensor(torch.zeros(rows, 4), mesh, each) for n, each in enumerate(placements)}
        return tuple(component._layout_key(tensors))

    rows, columns, whole = [Shard(0)], [Shard(1)], [Replicate()]
    keys = [key(rows, rows), key(columns, columns), key(whole, whole), key(rows, columns), key(columns, rows)]
    keys += [key(rows, rows, rows=6), key(rows), tuple(component._layout_key({"0": torch.zeros(4, 4)}))]
    assert len(set(keys)) == len(keys)
    assert key(rows, columns) == keys[3]


@pytest.mark.ranks(2)
def test_a_layout_is_made_again_only_for_tensors_that_are_not_alike(tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, [0])
    laid_out = []
    files_for = component.files_for

    def noted(*args, **kwargs):
        laid_out.append(args[1])
        return files_for(*args, **kwargs)

    def save(tag, **changed):
        del laid_out[:]
        with patch.object(component, "files_for", noted), patch.multiple(sizes, **changed or {"FILE_COUNT": 32}):
            path = Path(strategy.save_ckpt(model, tmp_path, tag))
        dist.barrier()
        assert verify_checkpoint(path).ok
        return list(laid_out), contents(path)

    component._layouts.clear()
    component._last_seen.clear()
    made, first = save("one")
    assert made == ["model", "optimizer"]
    made, second = save("two")
    assert made == [] and {n: c for n, c in second.items() if n != "manifest.json"} == {
        n: c for n, c in first.items() if n != "manifest.json"
    }
    assert save("small files", MIN_FILE_LIMIT_BYTES=1)[0] == ["model", "optimizer"]
    model.to(torch.float64)
    model_state(model).set(shard._DTYPES, {})
    assert save("other dtype")[0] == ["model"]
    assert len(component._layouts) == 5
    strategy.load_ckpt(model, tmp_path, tag="small files")


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_is_late_to_make_its_files_keeps_nobody_from_saving(slow, tmp_path):
    create = component.create_files

    def late(files):
        if dist.get_rank() == slow:
            time.sleep(0.3)
        create(files)

    strategy = strategy_for()
    model, *_ = prepared(strategy)  # its optimizer has nothing yet: a file of which rank 0 writes no tensor
    with patch.object(component, "create_files", late):
        path = strategy.save_ckpt(model, tmp_path, "t")
    assert verify_checkpoint(path).ok
    strategy.load_ckpt(model, tmp_path)
