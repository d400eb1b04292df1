"""A load reads the bytes that ranks need and no others, although it reads complete checksum blocks."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.training import assert_same, full_state, strategy_for
from torch import nn

from fsdp2_strategy import load_checkpoint, save_checkpoint, sizes, verify_checkpoint
from fsdp2_strategy.errors import DamageError
from fsdp2_strategy.storage.verified_read import Reader
from fsdp2_strategy.storage.write import _cut_rows

LARGE = {"SMALL_BLOCK_BYTES": 48}
"""A size that each part of the model's tensors has on up to 4 ranks."""


def prepare(seed):
    """Shard a model whose tensors have 48 rows each, and take a step of AdamW, whose ``step`` all ranks hold."""
    torch.manual_seed(seed)
    strategy = strategy_for()
    model = strategy.prepare_model(nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Linear(48, 48)), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    strategy.backward(model(torch.ones(2, 20)).square().sum(), model, optimizer)
    strategy.optimizer_step(optimizer, model)
    return model, optimizer


def save(path):
    model, optimizer = prepare(0)
    with patch.multiple(sizes, **LARGE):
        save_checkpoint(model, path, "t", optimizer=optimizer)
    state = full_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, path / "expected.pt")
        assert verify_checkpoint(path / "t").ok
    dist.barrier()


def bytes_of_load(model, optimizer, path):
    """Load, and return how many bytes of tensors this rank read."""
    readers, original = [], Reader.__init__

    def remember(self, *args, **kwargs):
        original(self, *args, **kwargs)
        readers.append(self)

    with patch.object(Reader, "__init__", remember):
        load_checkpoint(model, path, tag="t", optimizer=optimizer)
    return sum(reader.bytes_read for reader in readers)


def load(path):
    model, optimizer = prepare(1)
    read = bytes_of_load(model, optimizer, path)
    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    assert read == sum((t.to_local() if t.ndim else t).nbytes for t in tensors)
    assert_same(full_state(model, optimizer), torch.load(path / "expected.pt"))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (2, 2),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((1, 2), (2, 1), (2, 4), (2, 3), (3, 2), (4, 3))),
    ],
)
def test_a_load_on_any_number_of_ranks_reads_each_byte_that_a_rank_needs_once(saved, loaded, tmp_path, run_on):
    run_on(saved, save, path=tmp_path)
    run_on(loaded, load, path=tmp_path)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_a_few_large_rows_are_cut_between_rows(rows):
    assert _cut_rows(0, rows, rows, sizes.SMALL_BLOCK_BYTES) == list(range(1, rows))


def load_corrupt(path, is_shared):
    """Flip a byte of rank 0's rows, or of a ``step`` that all ranks read; the error must be the same on all ranks."""
    model, optimizer = prepare(1)
    [file] = (path / "t/optimizer").glob("*.safetensors")
    if dist.get_rank() == 0:
        content = bytearray(file.read_bytes())
        content[len(content) - (1 if is_shared else 48 * 48 * 4)] ^= 1  # the file ends with the last ``step``
        file.write_bytes(content)
    dist.barrier()
    with pytest.raises(DamageError, match=f"bytes .* of {file} have the checksum"):
        bytes_of_load(model, optimizer, path)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("loaded", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_flipped_byte_is_found_in_a_block_of_its_own(loaded, is_shared, tmp_path, run_on):
    run_on(2, save, path=tmp_path)
    run_on(loaded, load_corrupt, path=tmp_path, is_shared=is_shared)
