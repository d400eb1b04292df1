"""The safetensors container: our headers are the library's, and broken files say what is wrong."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage.safetensors_format import (
    DTYPES,
    lay_out,
    memory_of,
    read_header,
    read_into,
    write_from,
)

TENSORS = {
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(3, 5).half(),
    "brain": torch.randn(4, 2).bfloat16(),
    "long": torch.arange(6).reshape(2, 3),
    "flags": torch.tensor([True, False]),
    "name with ümläut": torch.randn(2),
}


def write(path, tensors):
    prefix, entries = lay_out(path, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, {"format": "pt"})
    with path.open("wb") as file:
        file.write(prefix)
        file.truncate(len(prefix) + sum(entry.nbytes for entry in entries.values()))
    fd = os.open(path, os.O_RDWR)
    for name, tensor in tensors.items():
        write_from(fd, entries[name].offset, memory_of(tensor))
    os.close(fd)
    return entries


def test_the_safetensors_library_reads_what_is_written_at_our_offsets(tmp_path):
    write(tmp_path / "a", TENSORS)
    loaded = load_file(tmp_path / "a")
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[n], t) and loaded[n].dtype == t.dtype for n, t in TENSORS.items())


def test_offsets_are_read_as_the_safetensors_library_wrote_them(tmp_path):
    save_file(TENSORS, tmp_path / "a")
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    for name, entry in read_header(tmp_path / "a").items():
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        read_into(fd, entry.offset, memory_of(tensor))
        assert torch.equal(tensor, TENSORS[name])
    os.close(fd)


def test_a_layout_follows_from_names_dtypes_and_shapes_alone_and_is_aligned(tmp_path):
    facts = {n: (t.dtype, tuple(t.shape)) for n, t in TENSORS.items()}
    backwards = dict(reversed(list(facts.items())))
    prefix, entries = lay_out(tmp_path, facts, {})
    assert lay_out(tmp_path, backwards, {})[0] == prefix
    assert all(entry.offset % entry.dtype.itemsize == 0 for entry in entries.values())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_of_the_format_has_its_item_size(dtype, tmp_path):
    tensor = torch.zeros(3, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
    entries = write(tmp_path / "a", {"x": tensor})
    assert read_header(tmp_path / "a")["x"].nbytes == entries["x"].nbytes == 3 * dtype.itemsize


def change_header(path, change):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda p: p.unlink(), "No such file"),
        (lambda p: p.write_bytes(b""), "header would end"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "bytes long"),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "bytes long"),
        (lambda p: p.write_bytes(p.read_bytes()[:40]), "header would end"),
        (lambda p: p.write_bytes(p.read_bytes()[:8] + b"x" * 1000), "not valid JSON"),
        (lambda p: p.write_bytes((2).to_bytes(8, "little") + b"[]"), "not a JSON object"),
        (lambda p: change_header(p, lambda h: h["long"].update(dtype="I7")), "'I7'"),
        (lambda p: change_header(p, lambda h: h["long"].update(shape=[2, 4])), "has 48 bytes"),
        (lambda p: change_header(p, lambda h: h["long"].update(shape=[-2, -3])), "entry of long"),
        (lambda p: change_header(p, lambda h: h["long"].pop("shape")), "entry of long"),
        (lambda p: change_header(p, lambda h: h.pop("half")), "expected"),
        (lambda p: p.write_bytes((2**63).to_bytes(8, "little") + p.read_bytes()[8:]), "header would end"),
        (lambda p: p.write_bytes(p.read_bytes().replace(b'"half"', b'"long"')), "a name occurs twice"),
        (lambda p: p.write_bytes((9000).to_bytes(8, "little") + b"[" * 9000), "not valid JSON"),
        (lambda p: change_header(p, lambda h: h["long"].update(dtype=["I64"])), "['I64']"),
        (lambda p: change_header(p, lambda h: h["long"].update(data_offsets=[2**62, 2**62 + 48])), "begins at byte"),
        (lambda p: change_header(p, lambda h: h["half"].update(data_offsets=[0, 30])), "expected"),
    ],
)
def test_a_broken_file_is_an_error_that_names_it_and_what_is_wrong(damage, said, tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, TENSORS)
    damage(path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        read_header(path)
    assert said in str(caught.value)


def test_a_dtype_that_the_format_lacks_cannot_be_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"complex128.*dtype="):
        lay_out(tmp_path, {"x": (torch.complex128, (2,))}, {})
