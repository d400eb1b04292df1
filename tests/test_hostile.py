"""Checkpoints that somebody changed on purpose, and sealed again: an error of ours in seconds, or success."""

from __future__ import annotations

import json
import logging
import os
import socket
from dataclasses import astuple

import pytest
import torch.distributed as dist
from helpers.hostile import LAYOUTS, Run, calls, copy_good, fuzz, outcome, seal, write_manifest
from helpers.worlds import some

from fsdp2_strategy import list_checkpoints, verify_checkpoint
from fsdp2_strategy.checkpoint.paths import CheckpointPaths
from fsdp2_strategy.storage.checksums import blocks_of
from fsdp2_strategy.storage.schema import MAX_DEPTH


def write_fuzz(layout, folder, seed, count, only=None):
    logging.getLogger("fsdp2_strategy").setLevel(logging.CRITICAL)
    try:
        counts, problems = fuzz(layout, folder, seed, count, only)
    finally:
        logging.getLogger("fsdp2_strategy").setLevel(logging.NOTSET)
    (folder / f"result{dist.get_rank()}.json").write_text(json.dumps({"counts": counts, "problems": problems}))


def results(folder):
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("result*.json"))]
    for result in found:
        assert not result["problems"], "\n".join(result["problems"][:20])
    return [result["counts"] for result in found]


SEEDS = [(0, 6), pytest.param(1, 60, marks=pytest.mark.full)]
SEEDS += [pytest.param(seed, 200, marks=[pytest.mark.full, pytest.mark.sweep]) for seed in range(2, 12)]


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("seed", "count"), SEEDS)
def test_a_sealed_change_is_an_error_of_ours_or_harmless(layout, seed, count, tmp_path, run_on):
    run_on(1, write_fuzz, layout=layout, folder=tmp_path, seed=seed, count=count)
    [counts] = results(tmp_path)
    assert counts["CheckpointError"] > 0 and counts["success"] > count, counts


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_end_a_load_of_a_sealed_change_alike(layout, tmp_path, run_on):
    only = ("load_ckpt", "load_ckpt fallback")
    run_on(2, write_fuzz, layout=layout, folder=tmp_path, seed=20, count=60, only=only)
    first, second = results(tmp_path)
    assert first == second


def outcomes(run, folder, only=None):
    """Return the outcome of each call on the checkpoint ``bad`` that is not a success; raise if one is wrong."""
    found = {}
    for name, call in calls(run, folder / "work", folder / "saved" / "good").items():
        if only and name not in only:
            continue
        kind, wrong = outcome(call)
        assert not wrong, f"{name}: {kind}: {wrong}"
        if kind != "success":
            found[name] = kind
    return found


def sparse(path):
    path.touch()
    os.truncate(path, 1 << 40)


def listening(path):
    here = os.getcwd()  # noqa: PTH109  addresses of sockets are short
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(path.name)
    os.chdir(here)


def device(path):
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))
        path.open("rb").close()
    except PermissionError:
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/zero")


SPECIAL = {
    "named pipe": os.mkfifo,
    "directory": lambda path: path.mkdir(),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "device": device,
    "socket": listening,
    "sparse": sparse,
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "trainer_state.json",
        "model/model.safetensors",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("checksums/rank00000.json", "model/config.json", "rng/rank00000.safetensors")
        ),
    ],
)
def test_a_special_file_never_blocks_a_call(name, tmp_path):
    logging.getLogger("fsdp2_strategy").setLevel(logging.CRITICAL)
    run = Run("own")
    run.save(tmp_path / "saved", "good")
    for kind, make in SPECIAL.items():
        copy_good(tmp_path / "saved", tmp_path / "work")
        paths = CheckpointPaths.found_in(tmp_path / "work" / "bad")
        (paths.root / name).unlink()
        make(paths.root / name)
        if kind == "sparse" and name != "manifest.json":
            manifest = json.loads(paths.manifest.read_bytes())
            manifest["files"][name] = 1 << 40
            write_manifest(paths, manifest)
        found = outcomes(run, tmp_path)
        is_unread = kind == "sparse" and name == "model/config.json"  # a load reads no configuration
        assert ("load_ckpt" in found or is_unread) and "load_ckpt fallback" not in found, (kind, found)
        assert [c.tag for c in list_checkpoints(tmp_path / "work")][:1] == ["good"]
        assert not verify_checkpoint(paths.root).ok
    logging.getLogger("fsdp2_strategy").setLevel(logging.NOTSET)


def rewrite(path, change_):
    """Change the JSON content of a file of a checkpoint, and seal it."""
    paths = CheckpointPaths.found_in(path)
    file, function = change_
    content = json.loads((path / file).read_bytes())
    function(content)
    seal(paths, path / file, json.dumps(content).encode())


def rewrite_header(path, file, function):
    content = (path / file).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    function(header)
    text = json.dumps(header).encode()
    seal(CheckpointPaths.found_in(path), path / file, len(text).to_bytes(8, "little") + text + content[8 + length :])


def first_of(header):
    return header[next(name for name in header if name != "__metadata__")]


def rename_first(header, name):
    header[name] = header.pop(next(each for each in header if each != "__metadata__"))


def one_byte_blocks(path):
    """Give a file of 300,000 bytes as many blocks."""
    file = path / "model" / "large.bin"
    file.write_bytes(bytes(300_000))
    seal(CheckpointPaths.found_in(path), file, file.read_bytes())

    def change_(listed):
        [block] = {astuple(each)[2] for each in blocks_of(b"\0")}
        listed["blocks"]["model/large.bin"] = [[at, at + 1, block] for at in range(300_000)]

    rewrite(path, ("checksums/rank00000.json", change_))


def strides_of_one(path):
    """Describe a file of 8 MB by the runs of one byte of two blocks."""
    file = path / "model" / "large.bin"
    seal(CheckpointPaths.found_in(path), file, bytes(8_000_000))

    def change_(listed):
        listed["blocks"]["model/large.bin"] = [[at, 8_000_000 - 1 + at, "0" * 16, 1, 2] for at in range(2)]

    rewrite(path, ("checksums/rank00000.json", change_))


def in_depth(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


HOSTILE = {
    "100,000 dimensions": lambda p: rewrite_header(
        p, "model/model.safetensors", lambda h: first_of(h).update(shape=[1] * 100_000)
    ),
    "a header entry of 5 MB": lambda p: rewrite_header(
        p, "model/model.safetensors", lambda h: first_of(h).update(dtype="F" * 5_000_000)
    ),
    "a name of 5 MB": lambda p: rewrite_header(p, "ema/ema.safetensors", lambda h: rename_first(h, "n" * 5_000_000)),
    "a name of 5 MB in the optimizer": lambda p: rewrite(
        p, ("trainer_state.json", lambda s: s["optimizer"]["of_parameter"].update({"n" * 5_000_000: 0}))
    ),
    "300,000 blocks of one byte": one_byte_blocks,
    "strides of one byte": strides_of_one,
    "a sequence that is a text": lambda p: rewrite(p, ("manifest.json", lambda m: m.update(sequence="x"))),
    "a size of 400 digits": lambda p: rewrite(p, ("manifest.json", lambda m: m["files"].update(x=10**400))),
    "a file outside": lambda p: rewrite(p, ("manifest.json", lambda m: m["files"].update({"../../etc/passwd": 1}))),
    "a shard size of 10^18": lambda p: rewrite(p, ("manifest.json", lambda m: m.update(shard_size=10**18))),
    "an empty list of ranks": lambda p: rewrite(p, ("manifest.json", lambda m: m.update(checksums={}))),
    "deep nesting": lambda p: rewrite(
        p, ("trainer_state.json", lambda s: s["client_state"].update(x=in_depth(MAX_DEPTH)))
    ),
    "a dtype that is a function": lambda p: rewrite(
        p,
        (
            "trainer_state.json",
            lambda s: s["optimizer"]["settings"][0].update(lr={"__tensor__": [1], "dtype": "load"}),
        ),
    ),
    "a method of the scheduler": lambda p: rewrite(p, ("trainer_state.json", lambda s: s["scheduler"].update(step=1))),
    "parameters among the settings": lambda p: rewrite(
        p, ("trainer_state.json", lambda s: s["optimizer"]["settings"][0].update(params=[]))
    ),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("what", some(HOSTILE, list(HOSTILE)[::3]))
def test_a_hostile_file_is_refused_in_seconds(what, tmp_path):
    logging.getLogger("fsdp2_strategy").setLevel(logging.CRITICAL)
    run = Run("own")
    run.save(tmp_path / "saved", "good")
    copy_good(tmp_path / "saved", tmp_path / "work")
    HOSTILE[what](tmp_path / "work" / "bad")
    is_large = what.startswith("300,000")  # each call takes a second
    found = outcomes(run, tmp_path, only=("verify_checkpoint", "load_ckpt") if is_large else None)
    logging.getLogger("fsdp2_strategy").setLevel(logging.NOTSET)
    assert "load_ckpt" in found, found
    assert "good" in {c.tag for c in list_checkpoints(tmp_path / "work")}
