"""Plans of writes: the same bytes and checksums as requests, without Python for each small tensor in each save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from helpers.training import assert_same, full_state, prepared, strategy_for, train

import fsdp2_strategy.storage.write as write_module
from fsdp2_strategy import load_checkpoint, save_checkpoint, sizes
from fsdp2_strategy.checkpoint import components
from fsdp2_strategy.storage.output_files import files_for
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.write import WritePlan, WriteRequest, write_all, write_planned

SHAPES = [(), (3,), (5, 7), (0, 2), (40, 40), (1,), (6, 8, 2), (64, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def requests_of_every_kind():
    """Return requests for whole tensors, some of their rows, and some of their columns, in three dtypes."""
    torch.manual_seed(0)
    shapes = {
        f"{dtype}{i}".removeprefix("torch."): (shape, dtype) for dtype in DTYPES for i, shape in enumerate(SHAPES)
    }
    regions = {name: Region.of(name, shape, dtype) for name, (shape, dtype) in sorted(shapes.items())}
    files = files_for(Path(), "model", regions, 5000)
    requests = []
    for number, (name, entry) in enumerate((n, e) for file in files for n, e in file.entries.items()):
        box = tuple((0, n) for n in entry.shape)
        if number % 4 == 1 and entry.shape and entry.shape[0] > 1:  # leaves a gap before the next tensor
            box = ((1, entry.shape[0] - 1), *box[1:])
        elif number % 4 == 3 and len(entry.shape) == 2 and entry.shape[1] > 1:
            box = (box[0], (0, entry.shape[1] // 2))
        values = torch.randint(-99, 99, [length for _, length in box])
        if name.endswith("2"):
            values = values.t().contiguous().t()
        tensor = values.to(torch.float64 if number % 5 == 4 else entry.dtype)
        requests.append(WriteRequest(entry, box, tensor, is_in_grid=True, is_replicated=number % 3 == 0))
    return requests


@pytest.mark.parametrize("block_bytes", [200, 1 << 20])
@pytest.mark.parametrize("is_signed", [False, True])
def test_a_plan_writes_the_bytes_and_checksums_of_its_requests(tmp_path, block_bytes, is_signed):
    requests, (one, other) = requests_of_every_kind(), (tmp_path / "one", tmp_path / "other")
    one.mkdir()
    other.mkdir()
    described = [replace(each, tensor=torch.empty_like(each.tensor, device="meta")) for each in requests]
    moved = [replace(each, entry=replace(each.entry, path=one / each.entry.path)) for each in requests]
    with patch.multiple(sizes, BLOCK_BYTES=block_bytes, SMALL_WRITE_BYTES=500, SMALL_BLOCK_BYTES=300, CACHED_BYTES=64):
        blocks = write_all(moved, hashed=True, create=True, is_signed=is_signed)
        plan = WritePlan(described)
        for _ in range(2):  # a plan can be used again
            planned = write_planned([(other, plan, [each.tensor for each in requests])], [], is_signed=is_signed)
    assert len(blocks) > 1
    for path, of_file in blocks.items():
        assert (other / path.name).read_bytes() == path.read_bytes()
        assert sorted(planned[other / path.name]) == sorted(of_file)
        assert all(bool(block.sha256) == is_signed for block in of_file)


@pytest.mark.ranks(2)
def test_the_second_save_plans_no_write_and_renders_no_configuration(tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, [0])
    save_checkpoint(model, tmp_path, "first", optimizer=optimizer)
    train(strategy, model, optimizer, scheduler, [1])
    planned, rendered = [], []
    runs, render = write_module._runs, components.write_configuration
    with (
        patch.object(write_module, "_runs", lambda request: planned.append(request) or runs(request)),
        patch.object(components, "write_configuration", lambda *given: rendered.append(given) or render(*given)),
    ):
        save_checkpoint(model, tmp_path, "second", optimizer=optimizer)
        assert not planned and not rendered
        model.config.pad_token_id = 7
        save_checkpoint(model, tmp_path, "third", optimizer=optimizer)
    expected = full_state(model, optimizer)
    assert not planned
    assert '"pad_token_id": 7' in (tmp_path / "third/model/config.json").read_text()
    second = (tmp_path / "second/model/config.json").read_text()
    assert second == (tmp_path / "first/model/config.json").read_text() and '"pad_token_id": 7' not in second
    train(strategy, model, optimizer, scheduler, [2])
    load_checkpoint(model, tmp_path, tag="third", optimizer=optimizer)
    assert_same(full_state(model, optimizer), expected)
