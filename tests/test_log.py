"""The package logs by the habits of the ecosystem: a level that the program sets is kept, and prints go to stdout."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from helpers.worlds import some, some_rows

from fsdp2_strategy import StrategyConfig
from fsdp2_strategy.distributed import progress
from fsdp2_strategy.errors import size_text
from fsdp2_strategy.hf.load import _summary
from fsdp2_strategy.hf.meta.initialize import TensorWithoutValues

SCRIPT = """
import logging
{before}
from fsdp2_strategy import FSDPV2Strategy
with FSDPV2Strategy(bf16=False{arguments}) as strategy:
    strategy.print("reward", 0.5)
"""


def run(before="", arguments=""):
    """Run a program on one rank; return what it wrote to standard output and standard error."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    code = SCRIPT.format(before=before, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


LEVELS = [
    ("", "", True),
    ("", ", log_level='WARNING'", False),
    ("logging.getLogger('fsdp2_strategy').setLevel(logging.WARNING)", "", False),
    ("logging.basicConfig(level=logging.WARNING)", "", False),
    ("logging.basicConfig(level=logging.INFO)", "", True),
]


@pytest.mark.parametrize(("before", "arguments", "shows"), some_rows(LEVELS, []))
def test_the_level_is_what_the_program_says(before, arguments, shows):
    out, err = run(before, arguments)
    assert out == "reward 0.5\n"
    assert ("strategy on 1 rank: bf16 = False" in err) == shows, err


@pytest.mark.full
def test_a_program_that_configures_logging_later_has_each_record_once():
    code = """
import logging
from fsdp2_strategy import FSDPV2Strategy
with FSDPV2Strategy(bf16=False) as strategy:
    pass
logging.basicConfig(level=logging.INFO)
with FSDPV2Strategy(bf16=False, seed=1) as strategy:
    pass
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if "strategy on 1 rank" in line]
    assert len(lines) == 2 and lines[1].startswith("INFO:fsdp2_strategy:strategy on 1 rank: seed = 1"), done.stderr


@pytest.mark.parametrize(
    ("loaded", "where", "drawn", "buffers", "text"),
    [
        (30, ["base"], 0, 0, "loaded 30 tensors from base"),
        (30, ["base"], 0, 2, "loaded 30 tensors from base; computed 2 buffers"),
        (1, ["base", "other"], 1, 0, "loaded 1 tensor from base, other; initialised 1 tensor (w0), which it lacks"),
        (0, ["base"], 2, 0, "loaded no tensor from base; initialised 2 tensors (w0, w1), which it lacks"),
        (
            0,
            [],
            48,
            1,
            "initialised 48 tensors as its constructors do; no pretrained weights were loaded; computed 1 buffer",
        ),
    ],
)
def test_a_load_says_what_was_loaded_initialised_and_computed(loaded, where, drawn, buffers, text):
    module = torch.nn.Module()
    for number in range(buffers):
        module.register_buffer(f"b{number}", torch.zeros(1), persistent=False)
    without = [TensorWithoutValues(f"w{n}", torch.zeros(1), [(module, f"w{n}")], None) for n in range(drawn)]
    without += [TensorWithoutValues(f"b{n}", torch.zeros(1), [(module, f"b{n}")], None) for n in range(buffers)]
    assert _summary(loaded, where, without) == text


def test_changes_are_the_settings_that_differ_from_their_defaults():
    assert StrategyConfig().changes() == ""
    assert StrategyConfig(max_norm=1.0, bf16=False).changes() == "max_norm = 1.0, bf16 = False"


def test_off_a_terminal_progress_is_a_line_in_the_log_now_and_then(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO, logger="fsdp2_strategy"), progress.Progress("loading x", 8_000_000_000) as shown:
        for _ in range(8):
            now[0] += 8.0
            shown.update(1_000_000_000)
    assert caplog.messages == ["loading x: 4.0 GB (50%), 0.12 GB/s", "loading x: 8.0 GB (100%), 0.12 GB/s"]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="fsdp2_strategy"):
        counted = progress.Progress("training", None, unit="step", done=10)
        hidden = progress.Progress("hidden", 10, is_shown=False)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        on_terminal = progress.Progress("bar", 10)
        now[0] += 50.0
        counted.describe("epoch 2")
        for each in (counted, hidden, on_terminal):
            each.update(5)
            each.close()
    assert caplog.messages == ["epoch 2: 15 steps, 0.10 steps/s"]
    assert progress.SECONDS_BETWEEN_LINES == 30


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (764_736, "765 kB"),
        (1_650_000_000, "1.65 GB"),
        (2.5e12, "2.5 TB"),
    ],
)
def test_a_size_has_the_unit_that_fits(size_bytes, text):
    assert size_text(size_bytes) == text


@pytest.mark.each
@pytest.mark.parametrize("columns", some([60, 0], [60]))
def test_on_a_terminal_lines_stand_above_the_bar_and_one_without_columns_has_none(columns):
    """Write to a pseudo-terminal, and read what it shows."""
    script = """
import os, sys, time
from fsdp2_strategy.distributed.log import logger, show_log
from fsdp2_strategy.distributed.progress import Progress
from fsdp2_strategy import FSDPV2Strategy
from fsdp2_strategy.distributed.terminal import is_terminal
print("terminal", is_terminal())
show_log("INFO")
with Progress("training", 3, unit="step") as bar:
    for step in range(3):
        bar.update()
        logger.info("saved %d", step)
        FSDPV2Strategy.print("step", step)
    if not os.fork():  # a child neither draws the bar nor takes its lock
        bar._bar.get_lock().acquire = None
        logger.info("child")
        os._exit(0)
    assert os.wait()[1] == 0
"""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=child, stderr=child)
    os.close(child)
    shown = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while part := os.read(parent, 4096):
            shown += part
    os.close(parent)
    assert process.wait() == 0, shown.decode()
    lines = [line.rpartition("\r")[2] for line in shown.decode().replace("\r\n", "\n").split("\n")]
    assert f"terminal {columns > 0}" in lines
    for step in range(3):
        assert f"step {step}" in lines, lines
        assert any(re.fullmatch(rf"\d\d:\d\d:\d\d fsdp2_strategy: saved {step}", line) for line in lines), lines


def test_the_log_of_a_configuration_shows_paths_and_large_numbers_as_one_would_write_them():
    config = StrategyConfig(profile_dir=Path("runs/profile"), peak_flops=9.89e14, max_norm=1.0)
    assert config.changes() == "max_norm = 1.0, profile_dir = 'runs/profile', peak_flops = 9.89e+14"
    assert "* peak_flops" in str(config) and "PosixPath" not in str(config)
