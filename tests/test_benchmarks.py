"""Every benchmark runs at tiny sizes, writes nothing but its output, and reports no time for values that are lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bare
import harness

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks"
NEEDS = {"lerobot": ("av", "pyarrow"), "trainer": ("accelerate",)}
DRAWN = {"checkpoint", "grpo_bytes", "logprob", "memory", "rollout", "scale", "stall", "step", "weights"}
BENCHMARKS = sorted(
    {path.stem for path in SCRIPTS.glob("*.py")}
    - {"bare", "harness", "peaks", "pictures", "scale_plans"}
    - {"gpu", "gpu_measuring", "gpu_parts"}
)
"""All scripts but the modules that they and tests share, gpu.py and its modules, which have a test file of their own,
and the script that draws recorded results."""


def in_the_repository() -> dict[Path, int]:
    """Return when each file was written that a benchmark could overwrite."""
    folders = (SCRIPTS / "results", ROOT / "docs" / "images")
    return {path: path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*")}


def errors_in(found: Any) -> Iterator[str]:
    """Give the errors of all contestants but those that are not installed."""
    if isinstance(found, dict):
        if not str(found.get("error", "not installed")).startswith("not installed"):
            yield found["error"]
        found = list(found.values())
    if isinstance(found, list):
        for part in found:
            yield from errors_in(part)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("name", BENCHMARKS)
def test_smoke(name, tmp_path):
    for module in (*NEEDS.get(name, ()), *(["matplotlib"] if name in DRAWN else [])):
        pytest.importorskip(module)
    out, work = tmp_path / "out", tmp_path / "work"
    work.mkdir()
    before = in_the_repository()
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py"), "--smoke", "--out", str(out)],
        cwd=work,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads((out / f"{name}.json").read_text())
    assert found and all(entry["smoke"] is True for entry in (found if isinstance(found, list) else [found]))
    assert not list(errors_in(found))
    pictures = {f"{name}.png"} if name in DRAWN else set()
    assert {path.name for path in out.iterdir()} == {f"{name}.json"} | pictures
    for picture in pictures:
        drawn = (out / picture).read_bytes()
        assert drawn.startswith(b"\x89PNG\r\n\x1a\n") and len(drawn) > 5000
    assert not list(work.iterdir()) and in_the_repository() == before
    assert "--smoke" in (SCRIPTS / f"{name}.py").read_text().split('"""')[1]


def test_smoke_figures_do_not_join_measured_ones(tmp_path, monkeypatch, capsys):
    def parsed(*options):
        monkeypatch.setattr(sys, "argv", ["some.py", "--out", str(tmp_path), *options])
        return harness.parse(harness.parser_of("some"), smoke={}, scratch_folders={"dir": Path("elsewhere")})

    smoke = parsed("--smoke")
    assert smoke.rounds == 1 and smoke.dir.is_relative_to(tmp_path)
    assert parsed("--smoke", "--dir", "here", "--rounds", "3").dir == Path("here")
    harness.merge(tmp_path / "some.json", {"key": 1, **harness.environment(smoke=True)}, ("key",))
    assert parsed("--smoke").smoke
    with pytest.raises(SystemExit):
        parsed()
    assert "holds figures of a smoke run" in capsys.readouterr().err
    (tmp_path / "some.json").write_text('[{"key": 1}]')  # as before there were smoke runs
    assert parsed().dir == Path("elsewhere")
    with pytest.raises(SystemExit):
        parsed("--smoke")


@pytest.mark.ranks(2)
def test_a_lost_value_is_an_error_and_no_time():
    harness.harness_group.cache_clear()
    tensor = torch.empty(100)
    harness.fill([tensor])
    expected = harness.digests_of({"weight": tensor})

    def turn_that(damage):
        def call():
            return harness.turn(lambda: damage(tensor))

        return harness.attempt(call, lambda: harness.check_values(harness.digests_of({"weight": tensor}), expected))

    def lose_one(t):
        if dist.get_rank() == 1:
            t[-1] += 1

    def fail_on_one(t):
        if dist.get_rank() == 1:
            raise ValueError("broken")

    kept, failed, lost = [turn_that(call) for call in (torch.Tensor.numel, fail_on_one, lose_one)]
    assert len(harness.summary([kept])["seconds"]) == 1
    assert harness.summary([kept, failed]) == {"error": "ValueError: broken"}
    assert "1 of 1 tensors do not have the values that were saved: weight" in harness.summary([kept, lost])["error"]
    harness.harness_group.cache_clear()


@pytest.mark.ranks(2)
def test_filled_values_differ_between_ranks_and_tensors():
    tensors = [torch.empty(8, 8), torch.empty(8, 8), torch.empty(8, 8, dtype=torch.bfloat16)]
    harness.fill(tensors)
    found: list = [None] * 2
    dist.all_gather_object(found, [harness.digest_of(tensor) for tensor in tensors])
    assert len({digest for of_rank in found for digest in of_rank}) == 6


@pytest.mark.ranks(2)
def test_bare_files_hold_the_bytes_of_their_rank(tmp_path):
    original = bare.CALL_BYTES, bare.CALL_BUFFERS
    bare.CALL_BYTES, bare.CALL_BUFFERS = 1000, 4
    try:
        tensors = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in (1, 0, 3, 5, 7, 999, 1001, 5000, 2, 2)]
        calls = bare.calls_of(tensors)
        assert all(sum(map(len, buffers)) <= 1000 and len(buffers) <= 4 for _, buffers in calls)
        for threads in (1, 3):
            bare.write(calls, tmp_path, threads=threads)
            assert bare.path_in(tmp_path).read_bytes() == torch.cat(tensors).numpy().tobytes()
            back = [torch.zeros_like(tensor) for tensor in tensors]
            bare.read(bare.calls_of(back), tmp_path, threads=threads)
            assert all(map(torch.equal, back, tensors))
        os.truncate(bare.path_in(tmp_path), 100)
        with pytest.raises(OSError, match="ends at byte 100"):
            bare.read(bare.calls_of(back), tmp_path)
    finally:
        bare.CALL_BYTES, bare.CALL_BUFFERS = original


@pytest.mark.full
def test_the_pictures_of_the_readme_are_drawn_from_the_recorded_results(tmp_path):
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(SCRIPTS / "pictures.py"), "--out", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["memory.png", "save_load.png"]
    assert all((ROOT / "docs" / "images" / path.name).exists() for path in tmp_path.glob("*.png"))
