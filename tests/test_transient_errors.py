"""Reads that fail for a moment are repeated; those that go on failing are an error or a fallback on all ranks."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.models import build
from helpers.training import assert_same, full_state, prepared, strategy_for, train
from helpers.worlds import some_rows
from transformers import AutoModelForCausalLM

from fsdp2_strategy import load_weights, verify_checkpoint
from fsdp2_strategy.cli import main
from fsdp2_strategy.errors import CheckpointError, DamageError
from fsdp2_strategy.storage import file_reads
from fsdp2_strategy.storage.file_reads import SourceFile, read_file


@contextmanager
def failing(call, number, times, *, on=lambda path: True):
    """Let a call of `os` fail a number of times for files that fit; yield the log of this process."""
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger, original, left = logging.getLogger("fsdp2_strategy"), getattr(os, call), [times]

    def fail(subject, *args, **kwargs):
        path = os.readlink(f"/proc/self/fd/{subject}") if isinstance(subject, int) else str(subject)  # noqa: PTH115
        if left[0] > 0 and on(path):
            left[0] -= 1
            raise OSError(number, os.strerror(number), path)
        return original(subject, *args, **kwargs)

    logger.addHandler(handler)
    try:
        with patch.object(os, call, fail), patch.object(file_reads, "PAUSES", (0.001, 0.002, 0.003)):
            yield messages
    finally:
        logger.removeHandler(handler)


def two_checkpoints(folder):
    """Save two checkpoints; return the run, its state in the second, and the directory."""
    strategy = strategy_for()
    run = model, optimizer, _ = prepared(strategy)
    train(strategy, *run, [0])
    strategy.save_ckpt(model, folder, "old")
    train(strategy, *run, [1])
    strategy.save_ckpt(model, folder, "new")
    expected = full_state(model, optimizer)
    train(strategy, *run, [2])
    return strategy, model, optimizer, expected


def on_rank(number, within):
    return lambda path: dist.get_rank() == number and within in path


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("call", "number", "times", "rank", "within"),
    some_rows(
        [
            ("preadv", errno.ESTALE, 3, 1, "new/model"),
            ("preadv", errno.EAGAIN, 3, 1, "new/optimizer"),
            ("preadv", errno.ETIMEDOUT, 1, 1, "new/model"),
            ("preadv", errno.EIO, 1, 1, "new/optimizer"),
            ("open", errno.ESTALE, 3, 1, "new/rng"),
            ("open", errno.EINTR, 2, 0, "new/manifest.json"),
            ("pread", errno.ESTALE, 2, 1, "new/trainer_state.json"),
            ("pread", errno.EIO, 1, 0, "new/checksums"),
            ("stat", errno.ESTALE, 3, 0, "new/model/config.json"),
        ],
        [("preadv", errno.ESTALE, 3, 1, "new/model"), ("open", errno.EINTR, 2, 0, "new/manifest.json")],
    ),
)
def test_a_read_that_fails_for_a_moment_does_not_go_back_a_checkpoint(call, number, times, rank, within, tmp_path):
    strategy, model, optimizer, expected = two_checkpoints(tmp_path)
    with failing(call, number, times, on=on_rank(rank, within)) as messages:
        path, _ = strategy.load_ckpt(model, tmp_path, fallback=True)
    assert Path(path).name == "new"
    assert_same(full_state(model, optimizer), expected)
    repeats = [text for text in messages if "reading it again" in text]
    assert len(repeats) == (times if dist.get_rank() == rank else 0)
    assert all(within in text and errno.errorcode[number] in text for text in repeats)
    total = f"read again: {times} time{'s' if times > 1 else ''}"
    assert [text for text in messages if text.startswith("read again")] == ([total] if dist.get_rank() == 0 else [])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("number", "times"), some_rows([(errno.ESTALE, 10**6), (errno.EIO, 2), (errno.EACCES, 1)], [(errno.EIO, 2)])
)
def test_a_read_that_goes_on_failing_on_one_rank_is_an_error_or_a_fallback_on_all(number, times, tmp_path):
    strategy, model, *_ = two_checkpoints(tmp_path)
    on = on_rank(1, "new/model/model.safetensors")
    repeats = []
    for fallback in (True, False):
        with failing("preadv", number, times, on=on) as messages, patch.dict(file_reads._failing, clear=True):
            if fallback:
                path, _ = strategy.load_ckpt(model, tmp_path, fallback=True)
                assert Path(path).name == "old"
            else:
                with pytest.raises(DamageError, match=os.strerror(number)):
                    strategy.load_ckpt(model, tmp_path)
        repeats.append(len([text for text in messages if "reading it again" in text]))
    assert repeats == [{errno.ESTALE: 3, errno.EIO: 1, errno.EACCES: 0}[number] if dist.get_rank() == 1 else 0] * 2


@pytest.mark.ranks(2)
def test_the_weights_of_a_policy_folder_are_read_again(tmp_path):
    if dist.get_rank() == 0:
        build("llama", 3).save_pretrained(tmp_path)
    dist.barrier()
    model = build("llama", 4)
    with failing("preadv", errno.ESTALE, 2, on=on_rank(1, "model.safetensors")) as messages:
        load_weights(model, tmp_path)
    assert "read again: 2 times" in messages or dist.get_rank() == 1
    same = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in model.state_dict().items())
    with failing("preadv", errno.ESTALE, 10**6, on=on_rank(1, "model.safetensors")):
        with pytest.raises(CheckpointError, match=r"rank 1.*[Ss]tale"):
            load_weights(model, tmp_path)


def save_one(folder):
    two_checkpoints(folder)


def test_verify_and_the_command_line_read_again(tmp_path, run_on, capsys):
    run_on(1, save_one, folder=tmp_path)
    with failing("preadv", errno.ESTALE, 3, on=lambda path: "new/model" in path) as messages:
        assert verify_checkpoint(tmp_path / "new").ok
    assert "read again: 3 times" in messages
    with failing("preadv", errno.EIO, 10**6, on=lambda path: "new/model" in path):
        assert "Input/output error" in verify_checkpoint(tmp_path / "new").problems[0]
    for command in ("inspect", "ls"):
        with failing("open", errno.ESTALE, 3, on=lambda path: "new/manifest.json" in path) as messages:
            assert main([command, str(tmp_path)]) == 0
        assert len(messages) == 3


def test_a_file_that_is_replaced_between_two_reads_is_an_error(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 10)
    with failing("pread", errno.ESTALE, 1), SourceFile(tmp_path / "a") as file:
        (tmp_path / "b").write_bytes(b"y" * 11)
        (tmp_path / "b").replace(tmp_path / "a")
        with pytest.raises(OSError, match="replaced while it was read"):
            file.read(lambda fd: os.pread(fd, 10, 0))
    assert read_file(tmp_path / "a", 11) == b"y" * 11
    with pytest.raises(OSError, match="at most 10"):
        read_file(tmp_path / "a", 10)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("number", "times"),
    some_rows([(errno.ESTALE, 2), (errno.ESTALE, 99), (errno.EACCES, 99)], [(errno.ESTALE, 2), (errno.EACCES, 99)]),
)
def test_a_directory_that_cannot_be_looked_at_is_not_one_without_checkpoints(number, times, tmp_path):
    strategy, model, *_ = two_checkpoints(tmp_path / "run")
    with failing("stat", number, times if dist.get_rank() == 0 else 0, on=lambda path: path == str(tmp_path / "run")):
        if times < 4:
            assert strategy.load_ckpt(model, tmp_path / "run", load_module_only=True)[0] == str(
                tmp_path / "run" / "new"
            )
        else:
            with pytest.raises(CheckpointError, match="cannot be looked at"):
                strategy.load_ckpt(model, tmp_path / "run", load_module_only=True)
    assert strategy.load_ckpt(model, tmp_path / "missing")[0] is None


def test_a_directory_that_goes_on_failing_is_looked_at_again_and_again_without_pauses(tmp_path):
    (tmp_path / "lost" / "found").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    original = os.scandir

    def scandir(path="."):
        if str(path).startswith(str(tmp_path / "lost")):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return original(path)

    inside = lambda path: path.startswith(str(tmp_path / "lost"))  # noqa: E731
    with failing("stat", errno.ESTALE, 10**6, on=inside) as messages, patch.object(os, "scandir", scandir):
        for number in range(20):
            with pytest.raises(OSError, match="Stale"):
                file_reads.repeated(tmp_path / "lost" / "found" / str(number), (tmp_path / "lost" / str(number)).stat)
    assert len(messages) == len(file_reads.PAUSES)
    with failing("stat", errno.ESTALE, 1) as messages:
        assert file_reads.repeated(tmp_path / "file", (tmp_path / "file").stat).st_size == 1
    assert len(messages) == 1, "other directories are still read again"
