"""The script that waits for an accelerator runs here, at tiny sizes: each part, and what becomes of one that fails."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import weakref
from argparse import Namespace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import simulated_accelerator
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.py"

# Parts as later work adds them, and what can go wrong with one.
BROKEN = f"""
import os, signal, subprocess, sys, time
from pathlib import Path

sys.path.insert(0, {str(SCRIPT.parent)!r})
import gpu

def fine(job):
    return gpu.outcome({{}}, {{"answer": 42}}, [])

def fails(job):
    raise ValueError("on purpose")

def crashes(job):
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(job):
    Path("pid").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    time.sleep(600)

def is_wrong(job):
    return gpu.outcome({{}}, {{"answer": 43}}, ["the answer is 43"])

run = gpu.run
gpu.run = lambda name, ranks, job, seconds: run(name, ranks, job, 3 if name == "hangs" else seconds)
gpu.PARTS |= dict(first=fine, fails=fails, crashes=crashes, hangs=hangs, is_wrong=is_wrong, last=fine)
if __name__ == "__main__":
    sys.exit(gpu.main())
"""


def run(script, *options, cwd, env=None):
    command = [sys.executable, str(script), *options]
    paths = [str(ROOT)] if env is None else [str(ROOT), env["PYTHONPATH"]]
    env = os.environ | (env or {}) | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu

    return gpu


@pytest.mark.full
def test_every_part_runs_and_reports(tmp_path, gpu):
    begin = datetime.now(UTC).replace(microsecond=0)
    done = run(SCRIPT, "--smoke", "--out", "found", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["found", "gpu.json"]
    entry = json.loads((tmp_path / "found" / "gpu.json").read_text())

    assert timedelta(0) <= datetime.fromisoformat(entry["date"]) - begin < timedelta(minutes=10)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (entry["commit"] or "").startswith(head.stdout.strip())
    assert entry["smoke"] is True
    assert entry["command"].endswith("gpu.py --smoke --out found")
    assert entry["versions"]["torch"] == torch.__version__
    assert entry["hardware"]["count"] == torch.accelerator.device_count()
    assert entry["hardware"]["cores"] == os.cpu_count()
    assert entry["hardware"]["ram_gb"] > 0

    parts, has_accelerator = entry["parts"], torch.accelerator.is_available()
    alone = max(1, torch.accelerator.device_count()) == 1
    unavailable = {"sequence", "split"} if alone else set()
    unavailable |= set() if importlib.util.find_spec("accelerate") else {"trainer"}
    check_parts(gpu, parts, done.stdout, unavailable, has_accelerator=has_accelerator)
    assert sum(parts["tests"]["facts"].values()) > 0
    if not has_accelerator:
        assert parts["tests"]["facts"].keys() == {"passed", "failed", "skipped"}
        assert parts["tests"]["facts"]["passed"] == parts["tests"]["facts"]["failed"] == 0


def check_parts(gpu, parts, printed, unavailable, *, has_accelerator):
    """Check that all parts but those that are unavailable ran, that none failed, and that the table has each."""
    assert list(parts) == list(gpu.PARTS)
    assert {name: found["error"] for name, found in parts.items()} == dict.fromkeys(gpu.PARTS)
    assert {name for name, found in parts.items() if found["skipped"]} == unavailable
    for name, found in parts.items():
        compared = [measure for measure in found["measures"].values() if "time_ratio" in measure]
        assert bool(compared) == (name not in {"tests", *unavailable})
        if found["skipped"]:
            assert f"| {name} | skipped: {found['skipped']} |" in printed
        for measure in compared:
            for side in (measure["ours"], measure["reference"]):
                assert len(side["seconds"]) == (1 if name == "trainer" else 2)
                assert side["value"] > 0
                assert (side["peak_bytes"] is None) == (not has_accelerator)
        assert f"| {name} |" in printed
    step = parts["step"]["facts"]
    assert step["loss"]["ours"][-1] < step["loss"]["ours"][0], "the loops train, so that a wrong step would show"
    assert step["flops_per_token"] > 6 * (step["parameters"] - 16 * step["width"] ** 2)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.simulated
@pytest.mark.parametrize("devices", [1, 2])
def test_every_part_runs_on_the_simulated_accelerator(tmp_path, gpu, devices):
    env = simulated_accelerator.environment(devices)
    done = run(SCRIPT, "--smoke", "--out", ".", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    entry = json.loads((tmp_path / "gpu.json").read_text())
    assert entry["hardware"]["device"] == "simulated"
    assert entry["ranks"] == entry["hardware"]["count"] == devices
    parts, is_alone = entry["parts"], devices == 1
    unavailable = {"trainer", "sequence", "split"} if is_alone else {"trainer"}
    check_parts(gpu, parts, done.stdout, unavailable, has_accelerator=True)
    reasons = {name: parts[name]["skipped"] for name in unavailable}
    if importlib.util.find_spec("accelerate"):
        assert reasons["trainer"] == "accelerate would train on the cpu, because it does not know the device sim"
    if is_alone:
        assert reasons["sequence"].endswith("at least 2 accelerators, and there is 1 rank")
        assert reasons["split"].endswith("among pairs of ranks, and their number is 1")
    # The tests of test_gpu.py take the simulated device for the real one; those for two devices are skipped on one.
    facts = parts["tests"]["facts"]
    assert facts["failed"] == 0 and facts["passed"] > 20
    assert (facts["skipped"] > 0) == is_alone


@pytest.mark.full
def test_parts_that_need_two_accelerators_run_on_two_ranks(tmp_path):
    names = ["sequence", "split", "differences"]
    done = run(SCRIPT, "--smoke", "--ranks", "2", "--out", ".", "--parts", *names, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert list(parts) == names
    for found in parts.values():
        assert found["measures"] and not found["skipped"]
    assert {facts["calls"] for facts in parts["sequence"]["facts"]["exchanges_per_layer"].values()} == {0, 4}


@pytest.mark.full
def test_a_part_that_fails_crashes_or_hangs_costs_none_of_the_others(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    names = ["first", "fails", "crashes", "hangs", "is_wrong", "last"]
    done = run("broken.py", "--smoke", "--out", ".", "--parts", *names, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert list(parts) == names
    assert parts["first"]["facts"] == parts["last"]["facts"] == {"answer": 42}
    assert parts["first"]["error"] is parts["last"]["error"] is None
    assert parts["fails"]["error"].endswith("ValueError: on purpose")
    assert parts["crashes"]["error"].endswith("signal SIGSEGV")
    assert parts["hangs"]["error"] == "timed out after 3 seconds"
    assert parts["is_wrong"]["error"] == "the answer is 43"
    assert parts["is_wrong"]["facts"] == {"answer": 43}, "what was measured is kept"
    for name in names[1:-1]:
        assert re.search(rf"^\| {name} \| FAILED: ", done.stdout, re.MULTILINE)
    stat = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z", "what it started goes on"


def test_without_an_accelerator_it_says_what_to_do(gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "out")])
    assert gpu.main() == 2
    assert capsys.readouterr().err == "gpu.py needs an accelerator; --smoke tries the script without one\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("AMD Instinct MI300X", 1307),
        ("something else", None),
        (None, None),
    ],
)
def test_the_datasheet_peak_is_that_of_the_device(gpu, name, tflops):
    assert gpu.datasheet_tflops(name) == tflops


@pytest.mark.parametrize("billions", [0.25, 0.5, 1.5, 3.0, 4.0])
def test_the_model_has_about_as_many_parameters_as_asked_for(gpu, billions):
    with torch.device("meta"):
        model = LlamaForCausalLM(gpu.llama(billions))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=0.06)


@pytest.mark.parametrize(("peak_gb", "sequences"), [(1, 8), (15, 4), (60, 1), (200, 1)])
def test_a_step_takes_as_many_sequences_as_fit_on_the_device(gpu, monkeypatch, peak_gb, sequences):
    monkeypatch.setattr(gpu, "timed", lambda _: Namespace(peak_bytes=peak_gb * 10**9))
    monkeypatch.setattr(gpu, "min_over_ranks", int)
    properties = Namespace(total_memory=141 * 10**9)
    module = Namespace(get_device_properties=lambda _: properties)
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: 36 * 10**9)
    assert gpu.sequences_that_fit([id], None, limit=8) == sequences


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_head_needs_the_memory_that_is_predicted(gpu, dtype):
    count, width, vocabulary, chunk_bytes = 512, 16, 4096, 64 * 4 * 4096
    hidden, weight = (torch.randn(n, width, dtype=dtype, requires_grad=True) for n in (count, vocabulary))
    targets = torch.randint(vocabulary, (count,))
    predicted = gpu.predicted_peaks(count, width, vocabulary, chunk_bytes)
    with LiveBytes() as forward:
        log_probs = gpu.linear_log_probs(hidden, weight, targets, chunk_bytes=chunk_bytes)
    with LiveBytes() as backward:
        log_probs.sum().backward()
    for kind, counter in (("forward", forward), ("backward", backward)):
        tolerance = 1.0 if dtype == torch.bfloat16 else gpu.PEAK_TOLERANCE
        assert 0.75 * predicted[kind] < counter.peak_bytes <= tolerance * predicted[kind], kind


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors that operations create, as long as they are alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.live_bytes, self.peak_bytes, self.counted = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages_of((args, kwargs))}
        for storage in storages_of(result):
            if storage._cdata not in given | self.counted:
                self.counted.add(storage._cdata)
                self.live_bytes += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def free(self, address, nbytes):
        self.counted.discard(address)
        self.live_bytes -= nbytes


def storages_of(tree):
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def test_turns_end_when_the_time_is_over(gpu, monkeypatch):
    monkeypatch.setattr(gpu.harness, "harness_group", lambda: None)
    monkeypatch.setattr(gpu.harness.dist, "broadcast", lambda *_: None)
    now = [0.0]
    monkeypatch.setattr(gpu.harness.time, "monotonic", lambda: now[0])

    def turns(until):
        now[0], found = 0.0, []
        for name in gpu.harness.turn_order(["a", "b"], 7, until):
            found.append(name)
            now[0] += 1.0
        return found

    assert len(turns(None)) == 14
    assert turns(10.5) == ["a", "b", "b", "a"] * 2 + ["a", "b"]
    assert len(turns(0.0)) == 2 * gpu.harness.LEAST_ROUNDS


def test_the_commit_comes_from_the_environment_where_git_is_missing(gpu, monkeypatch):
    args = Namespace(smoke=True, ranks=1)
    monkeypatch.setenv("PATH", "")
    assert gpu.environment(args)["commit"] is None
    monkeypatch.setenv("FSDP2_COMMIT", "abc")
    assert gpu.environment(args)["commit"] == "abc"
