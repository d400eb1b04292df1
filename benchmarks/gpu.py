"""Measure all of the library that an accelerator changes, and run the tests that need one, in ten minutes.

    python benchmarks/gpu.py [--parts tests step ...] [--parameters 1.5] [--minutes 9.5] [--ranks N] [--out DIR]
    python benchmarks/gpu.py --smoke  # the same code at tiny sizes, on the CPU where there is no accelerator

Each part runs in its own processes, one rank per accelerator, with its share of the time: a part that fails, crashes or
hangs does not affect the others, and one that is slow runs fewer rounds. A part compares the library with a reference
in alternating turns, and checks that both compute or move the same values. The parts in gpu_parts.py run the other
benchmarks on the device. Parts that cannot run here say why: some need two accelerators, one needs accelerate. Rates
are per rank, peaks those of the device memory, in addition to what was allocated before. Files are on a RAM disk if
there is a large one. `gpu.json` is rewritten after each part; at the end a table is printed. The exit code is 1 if a
part failed. The environment variable FSDP2_COMMIT names the commit, for a copy that git does not know.

To add a part, write a function that takes a `Job` and returns `outcome(measures, facts, errors)` or `skipped(reason)`,
and add it to PARTS.
"""

import argparse
import gc
import itertools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import gpu_parts
import harness
import torch
import torch.multiprocessing as mp
import transformers
from gpu_measuring import (
    BareCopy,
    Job,
    all_equal,
    build,
    compared,
    in_gigabytes,
    in_pairs,
    learning_rate_of,
    llama,
    min_over_ranks,
    outcome,
    state_of,
    timed,
    tokens,
    weights_of,
)
from torch import nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, stream_weights, token_log_probs
from fsdp2_strategy.logprob import linear_log_probs
from fsdp2_strategy.model import offload, reload

ROOT = Path(__file__).resolve().parents[1]
STEPS = 4  # timed together
RAM_DISK = Path("/dev/shm")
RAM_DISK_BYTES = 16 << 30
"""Free space from which files are written to the RAM disk."""
PRECISION = StrategyConfig(bf16=True, max_norm=1.0)
PEAK_TOLERANCE = 1.1
TOLERANCE = {"loss": 1e-2, "grad_norm": 0.1, "log_prob": 5e-2, "gradient": 2e-2}

# Dense bf16 TFLOP/s from datasheets. The first key that occurs in the device's name counts.
DATASHEET_TFLOPS = {
    "A100": 312, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200 NVL": 835, "H200": 989, "L40S": 362,
    "A10": 125, "L4": 121, "RTX 4090": 165, "B200": 2250, "MI300X": 1307,
}  # fmt: skip


def matmul_tflops(size: int, repeats: int = 50) -> float | None:
    """Return the TFLOP/s of large bf16 matrix products, a practical peak of the accelerator; None on the CPU."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=harness.device()) for _ in range(2))
    product = torch.empty_like(a)

    def multiply() -> None:
        for _ in range(repeats):
            torch.matmul(a, b, out=product)

    turns = [timed(multiply) for _ in range(4)][1:]
    rate = repeats * 2 * size**3 / min(turn.seconds for turn in turns) / 1e12
    return rate if torch.accelerator.is_available() else None


def datasheet_tflops(name: str | None) -> float | None:
    return next((tflops for key, tflops in DATASHEET_TFLOPS.items() if re.search(rf"\b{key}\b", name or "")), None)


Loop = Callable[[torch.Tensor], tuple[torch.Tensor, float]]


def strategy_loop(model: nn.Module) -> tuple[Loop, FSDPV2Strategy, torch.optim.Optimizer]:
    strategy = FSDPV2Strategy(config=PRECISION)
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=learning_rate_of(model), weight_decay=0.1)

    def step(ids: torch.Tensor) -> tuple[torch.Tensor, float]:
        loss = model(input_ids=ids, labels=ids).loss
        strategy.backward(loss, model, optimizer)
        return loss.detach(), strategy.optimizer_step(optimizer, model).grad_norm

    return step, strategy, optimizer


def reference_loop(model: nn.Module) -> Loop:
    """Shard and train with plain torch, in the same way as the strategy."""
    mesh = init_device_mesh(harness.device().type, (get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in [*model.model.layers, model.model.embed_tokens]:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    # The backward pass begins with the head, so nothing is won by freeing it after its forward.
    fully_shard(model.lm_head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate_of(model), weight_decay=0.1, fused=True)

    def step(ids: torch.Tensor) -> tuple[torch.Tensor, float]:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def train_one_step(billions: float) -> tuple[FSDPV2Strategy, nn.Module, torch.optim.Optimizer, Callable[[], object]]:
    """Train a new model for one step to create optimizer state; return a function that takes another step, too."""
    model = build(config := llama(billions))
    step, strategy, optimizer = strategy_loop(model)
    ids = tokens(config, 1, 32)
    step(ids)
    return strategy, model, optimizer, lambda: step(ids)


# --- parts -----------------------------------------------------------------------------------------------------------


def tests(job: Job) -> dict:
    """Run the tests that need an accelerator."""
    if job.rank:
        return outcome({}, {}, [])
    files = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text()]
    report = job.scratch / "tests.xml"
    options = ["-m", "gpu and not simulated", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", "-q", *options]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    process = subprocess.run([*command, *files], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    facts = {}
    if report.exists():
        suite = ET.parse(report).getroot().find("testsuite").attrib
        counts = {name: int(suite[name]) for name in ("tests", "failures", "errors", "skipped")}
        failed = counts["failures"] + counts["errors"]
        passed = counts["tests"] - failed - counts["skipped"]
        facts = {"passed": passed, "failed": failed, "skipped": counts["skipped"]}
    output = f"{(process.stdout + process.stderr)[-3000:]}\npytest exited with {process.returncode}"
    return outcome({}, facts, [output] if process.returncode else [])


def step(job: Job) -> dict:
    """Train with the strategy, and with a reference loop in plain torch."""
    model = build(config := llama(job.billions))
    count = sum(p.numel() for p in model.parameters())
    reference = reference_loop(deepcopy(model))
    ours, *_ = strategy_loop(model)
    length = 64 if job.smoke else 2048
    size = sequences_that_fit((ours, reference), tokens(config, 1, length), limit=2 if job.smoke else 8)
    batches = tokens(config, STEPS, size, length)
    values, differences = {}, {}
    steps = {"ours": [ours(batches[0]) for _ in batches], "reference": [reference(batches[0]) for _ in batches]}
    for i, key in enumerate(("loss", "grad_norm")):
        values[key] = {name: [float(pair[i]) for pair in of] for name, of in steps.items()}
        differences[key] = max(abs(a - b) / abs(b) for a, b in zip(*values[key].values(), strict=True))

    def run_steps(loop: Loop) -> None:
        for batch in batches:
            loop(batch)

    [pair] = in_pairs([lambda: run_steps(ours)], [lambda: run_steps(reference)], job.rounds, until=job.until())
    speed = compared("tokens", batches.numel(), *pair)
    per_token = 6 * (count - config.vocab_size * config.hidden_size)
    per_token += 6 * config.num_hidden_layers * config.hidden_size * length
    peaks = {"datasheet": datasheet_tflops(device_name()), "measured matmul": matmul_tflops(256 if job.smoke else 8192)}
    measures = {"step, against a loop by hand": speed}
    for name, tflops in peaks.items():
        mfu = {side: {"value": tflops and speed[side]["value"] * per_token / tflops / 1e12} for side in steps}
        measures[f"MFU of the {name} peak"] = {"unit": "of 1", **mfu}
    facts = {
        "parameters": count,
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "sequences": size,
        "length": length,
        "flops_per_token": per_token,
        "flops": "6 x parameters without the input embedding + 6 x layers x width x length (causal: half of 12)",
        "peak_tflops": peaks,
        "largest_relative_difference": differences,
        **values,
    }
    errors = [
        f"{key} differs by {difference:.2g} between the loops"
        for key, difference in differences.items()
        if not difference <= TOLERANCE[key]
    ]
    return outcome(measures, facts, errors)


def sequences_that_fit(loops: Iterable[Loop], one: torch.Tensor, limit: int) -> int:
    """Return the number of sequences that fit on the device with a tenth left free, a power of two; collective."""
    turns = [timed(lambda loop=loop: loop(one)) for loop in [*loops] * 2]
    peak = max(turn.peak_bytes or 0 for turn in turns[len(turns) // 2 :])  # the first steps allocate state
    if not peak:
        return limit
    free = (
        0.9 * torch.get_device_module().get_device_properties(harness.device()).total_memory
        - torch.accelerator.memory_allocated()
    )
    fitting = min_over_ranks(min(limit, max(1, int(free / peak))))
    return 1 << (fitting.bit_length() - 1)


def stall(job: Job) -> dict:
    """Save asynchronously; compare with one copy of the same bytes to pinned memory."""
    strategy, model, optimizer, step = train_one_step(job.billions / 6)

    def state() -> list[torch.Tensor]:
        return [*weights_of(model), *state_of(optimizer)]

    nbytes = sum(t.nbytes for t in state())
    folder, numbers = job.scratch / "checkpoints", itertools.count()

    def save() -> None:
        strategy.save_ckpt(model, folder, f"save{next(numbers)}", max_num=1, async_save=True)

    bare, wait = BareCopy(nbytes).to_host, strategy.wait_for_checkpoint
    [pair] = in_pairs([save], [bare], job.rounds, between=wait, until=job.until())
    before = [tensor.clone() for tensor in state()]
    start = time.perf_counter()
    save()
    step()  # must not change the state that is saved
    strategy.wait_for_checkpoint()
    written = time.perf_counter() - start
    strategy.load_ckpt(model, folder)
    measure = compared("GB", nbytes / 1e9, *pair)
    seconds_per_gb = 1 / measure["ours"]["value"]
    facts = {"bytes": nbytes, "held_up_seconds_per_gb": seconds_per_gb, "seconds_until_written": written}
    errors = [] if all_equal(state(), before) else ["the loaded checkpoint differs from the state that was saved"]
    return outcome({"async save, against one pinned copy": measure}, facts, errors)


def offloading(job: Job) -> dict:
    """Offload and reload a model and an optimizer; compare with plain copies of the same bytes."""
    strategy, model, optimizer, _ = train_one_step(job.billions / 3)
    cases = {
        "strategy.offload_model": (strategy.offload_model, strategy.reload_model, model, weights_of),
        "offload(model)": (offload, reload, model, weights_of),
        "offload(optimizer)": (offload, reload, optimizer, state_of),
    }
    measures, facts, errors = {}, {}, []
    for i, (name, (move_out, move_in, subject, tensors_of)) in enumerate(cases.items()):
        before = [tensor.clone() for tensor in tensors_of(subject)]
        nbytes = sum(tensor.nbytes for tensor in before)
        copy = BareCopy(nbytes)
        calls = [partial(move_out, subject), partial(move_in, subject)]
        until = job.until((i + 1) / len(cases))
        pairs = in_pairs(calls, [copy.to_host, copy.to_device], job.rounds, until=until)
        for direction, (turns, plain) in zip(("to the host", "back"), pairs, strict=True):
            measures[f"{name} {direction}, against one pinned copy"] = compared("GB", nbytes / 1e9, turns, plain)
        allocated_before = harness.allocated()
        move_out(subject)
        freed = None if allocated_before is None else allocated_before - harness.allocated()
        move_in(subject)
        facts[name] = {"bytes": nbytes, "freed_bytes": freed}
        if not all_equal(tensors_of(subject), before):
            errors.append(f"{name} does not restore the values")
        if freed is not None and not min_over_ranks(freed > 0.95 * nbytes):
            errors.append(f"{name} freed {freed} of {nbytes} bytes on the device, expected more than 95%")
    return outcome(measures, facts, errors)


def streaming(job: Job) -> dict:
    """Copy fp32 weights as bf16 into the tensors of an engine; compare with `full_tensor` of each parameter."""
    model = build(llama(job.billions))
    FSDPV2Strategy(config=PRECISION).prepare_model(model, is_training=True)

    def full_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            yield name, parameter.detach().full_tensor().to(torch.bfloat16)

    streams = {"stream_weights": partial(stream_weights, model), "full_tensor": full_tensors}
    expected = dict(full_tensors())
    ends = dict(zip(expected, itertools.accumulate(tensor.nbytes for tensor in expected.values()), strict=True))
    nbytes = max(ends.values())
    measures, errors = {}, []
    for target, share in (("device", 0.5), ("host", 1.0)):
        memory = harness.pinned(nbytes, dtype=torch.uint8)
        if target == "device":
            memory = memory.to(harness.device())
        engine = {
            name: memory[ends[name] - tensor.nbytes : ends[name]].view(tensor.dtype).view(tensor.shape)
            for name, tensor in expected.items()
        }

        def update(name: str, engine: dict = engine) -> list[str]:
            names = []
            for key, tensor in streams[name]():
                engine[key].copy_(tensor, non_blocking=True)
                names.append(key)
            return names

        for name in streams:
            memory.zero_()
            names = update(name)
            harness.synchronize()
            copied = (tensor.to(harness.device()) for tensor in engine.values())
            if sorted(names) != sorted(expected) or not all_equal(copied, expected.values()):
                errors.append(f"{name} to the {target} has wrong names or values")
        [pair] = in_pairs(*([partial(update, name)] for name in streams), job.rounds, until=job.until(share))
        measures[f"to the {target}, against full_tensor() of each"] = compared("GB", nbytes / 1e9, *pair)
    return outcome(measures, {"bytes": nbytes, "tensors": len(expected)}, errors)


def log_probs(job: Job) -> dict:
    """Compute log-probabilities of tokens in chunks; compare with a log_softmax of the full logits.

    The peak of the head alone is compared with the one that follows from the size of a chunk.
    """
    config = llama(job.billions / 10, vocab_size=1024 if job.smoke else 128_256)
    model = build(config)
    FSDPV2Strategy(config=PRECISION).prepare_model(model, is_training=True)
    ids = tokens(config, 2, 32 if job.smoke else 4096)

    def chunked() -> torch.Tensor:
        return token_log_probs(model, ids, chunk_bytes=32 << 10 if job.smoke else None)

    def full_logits() -> torch.Tensor:
        logits = model(input_ids=ids).logits[:, :-1].float()
        return logits.log_softmax(dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    def forward(compute: Callable[[], torch.Tensor]) -> None:
        with torch.no_grad():
            compute()

    def forward_and_backward(compute: Callable[[], torch.Tensor]) -> None:
        compute().mean().backward()
        model.zero_grad()

    values, gradients = [], []
    for compute in (chunked, full_logits):
        values.append(compute())
        values[-1].mean().backward()
        gradients.append([harness.local_of(parameter.grad) for parameter in model.parameters()])
        model.zero_grad()
    deviations = torch.stack([(a - b).norm() for a, b in zip(*gradients, strict=True)])
    norms = torch.stack([gradient.norm() for gradient in gradients[1]])
    differences = {
        "log_prob": (values[0] - values[1]).abs().max().item(),
        "gradient": (deviations.norm() / norms.norm()).item(),
    }
    del values, gradients
    measures = {}
    for run, share in ((forward, 0.4), (forward_and_backward, 0.8)):
        calls = [[lambda run=run, compute=compute: run(compute)] for compute in (chunked, full_logits)]
        [pair] = in_pairs(*calls, job.rounds, until=job.until(share))
        measures[f"{run.__name__.replace('_', ' ')}, against full logits"] = compared("tokens", ids.numel(), *pair)
    facts = {"tokens": list(ids.shape), "vocabulary": config.vocab_size, "largest_difference": differences}
    wrong = [key for key, difference in differences.items() if not difference <= TOLERANCE[key]]
    errors = [f"{key} differs by {differences[key]:.2g}" for key in wrong]
    for kind, (found, predicted) in peaks_of_head(job.smoke).items():
        measures[f"peak of the head, {kind}, against the predicted one"] = in_gigabytes(found, predicted)
        if found is not None and found > PEAK_TOLERANCE * predicted:
            errors.append(f"the peak of the head, {kind}, is {found} bytes, expected {predicted}")
    return outcome(measures, facts, errors)


def peaks_of_head(smoke: bool) -> dict[str, tuple[int | None, int]]:
    """Return the peak of `linear_log_probs` on the device, and the predicted one, forward and backward."""
    count, width, vocabulary, chunk_bytes = (64, 16, 512, 32 << 10) if smoke else (8192, 2048, 128_256, 256 << 20)
    like = {"dtype": torch.bfloat16, "device": harness.device(), "requires_grad": True}
    hidden, weight = torch.randn(count, width, **like), torch.randn(vocabulary, width, **like)
    targets = torch.randint(vocabulary, (count,), device=harness.device())
    computed: list[torch.Tensor] = []

    def forward() -> None:
        hidden.grad = weight.grad = None
        computed[:] = [linear_log_probs(hidden, weight, targets, chunk_bytes=chunk_bytes)]

    def backward() -> None:
        computed[0].sum().backward()

    turns = [timed(call) for call in (forward, backward, forward, backward)][2:]  # the first calls load kernels
    predicted = predicted_peaks(count, width, vocabulary, chunk_bytes)
    return {kind: (turn.peak_bytes, predicted[kind]) for kind, turn in zip(predicted, turns, strict=True)}


def predicted_peaks(count: int, width: int, vocabulary: int, chunk_bytes: int) -> dict[str, int]:
    """Return the documented peaks of `linear_log_probs` in bf16: two chunks.

    Both also have a few numbers per token. Backward also has the gradients of the hidden states and of the weight, the
    latter in fp32, and, when it has the gradient of a chunk's logits only in bf16, its product with the hidden states.
    """
    rows = max(1, chunk_bytes // (4 * vocabulary))
    chunk = 4 * vocabulary * min(rows, count)
    return {
        "forward": 2 * chunk + 4 * 4 * count,
        "backward": max(2 * chunk, chunk // 2 + 2 * vocabulary * width)
        + (2 * count + 4 * vocabulary) * width
        + 2 * 4 * count,
    }


PARTS: dict[str, Callable[[Job], dict]] = {
    "tests": tests,
    "step": step,
    "stall": stall,
    "offload": offloading,
    "stream": streaming,
    "logprob": log_probs,
    **gpu_parts.PARTS,
}
SHARES = {"tests": 3, "step": 2, "trainer": 2}
"""Shares of the time; 1 for the other parts."""


# --- processes -------------------------------------------------------------------------------------------------------


def run_rank(rank: int, name: str, options: dict) -> None:
    """Run one rank of a part."""
    os.setpgrp()  # `kill` ends the rank with all processes that it started
    gc.freeze()  # excludes the imported modules from the garbage collections of `timed`
    harness.init_rank(rank, options)
    seconds = options["seconds"]
    job = Job(rank=rank, scratch=Path(options["scratch"]), begin=options["begin"], seconds=seconds, **options["job"])
    harness.finish(rank, options, PARTS[name](job))


def run(name: str, ranks: int, job: dict, limit_seconds: float) -> dict:
    """Run a part in its own processes, in half of the time if it can; return its result or its error."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True, dir=ram_disk()) as scratch:
        paths = {"scratch": scratch, "store": f"{scratch}/store", "results": f"{scratch}/results.json"}
        options = {"ranks": ranks, "smoke": job["smoke"], "job": job, **paths}
        options |= {"begin": start, "seconds": limit_seconds / 2}
        method = harness.start_method()
        context = mp.start_processes(run_rank, (name, options), nprocs=ranks, join=False, start_method=method)
        try:
            while not context.join(timeout=max(0.0, start + limit_seconds - time.monotonic())):
                if time.monotonic() >= start + limit_seconds:
                    raise TimeoutError(f"timed out after {limit_seconds:.0f} seconds")
            found = json.loads(Path(options["results"]).read_text())
        except BaseException as error:
            kill(context)
            if not isinstance(error, mp.ProcessRaisedException | mp.ProcessExitedException | OSError):
                raise
            found = outcome({}, {}, [str(error).strip()[-3000:]])
    return {"seconds": round(time.monotonic() - start, 1), **found}


def ram_disk() -> Path | None:
    """Return the folder of the RAM disk, or None if it is small or missing."""
    try:
        return RAM_DISK if shutil.disk_usage(RAM_DISK).free >= RAM_DISK_BYTES else None
    except OSError:
        return None


def kill(context: mp.ProcessContext) -> None:
    """Kill the ranks and all processes that they started."""
    for process in context.processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


# --- main ------------------------------------------------------------------------------------------------------------


def device_name() -> str | None:
    return torch.get_device_module().get_device_name() if torch.accelerator.is_available() else None


def output_of(*command: str) -> str | None:
    """Return the output of a program; None if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def hardware() -> dict:
    properties = [torch.get_device_module().get_device_properties(i) for i in range(torch.accelerator.device_count())]
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    smi = ("nvidia-smi", "--id=0", "--format=csv,noheader")
    return {
        "device": device_name(),
        "count": len(properties),
        "memory_gb": [round(p.total_memory / 1e9, 1) for p in properties],
        "capability": [f"{p.major}.{p.minor}" for p in properties],
        "driver": output_of(*smi, "--query-gpu=driver_version"),
        "bus": output_of(*smi, "--query-gpu=pcie.link.gen.max,pcie.link.width.max"),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
    }


def environment(args: argparse.Namespace) -> dict:
    describe = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("FSDP2_COMMIT") or output_of(*describe),
        "command": " ".join(["python", *sys.argv]),
        "smoke": args.smoke,
        "ranks": args.ranks,
        "files": f"RAM disk {RAM_DISK}" if ram_disk() else f"disk of {tempfile.gettempdir()}",
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        },
    }


def table(entry: dict) -> str:
    def number(side: dict, key: str, scale: float = 1.0) -> str:
        value = side.get(key)
        return "-" if value is None else f"{value / scale:,.0f}" if value / scale >= 100 else f"{value / scale:.3g}"

    machine, versions = entry["hardware"], entry["versions"]
    device = f"{machine['count']} x {machine['device']}, {machine['memory_gb'][0]} GB" if machine["count"] else "no GPU"
    lines = [f"{entry['date'][:10]}, commit {entry['commit']}, {device}, {machine['cores']} cores, {machine['cpu']}, "]
    lines[0] += f"torch {versions['torch']}, transformers {versions['transformers']}, CUDA {versions['cuda']}, "
    lines[0] += f"ranks: {entry['ranks']}, files on the {entry['files']}."
    lines[0] += " Smoke run at tiny sizes: the figures mean nothing." if entry["smoke"] else ""
    lines += ["", "| part | measure | ours | reference | unit | time, ours / reference (middle half) | peak GB |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for part, found in entry["parts"].items():
        for name, measure in found["measures"].items():
            sides = measure["ours"], measure["reference"]
            values = " | ".join(number(side, "value") for side in sides)
            peaks = " / ".join(number(side, "peak_bytes", 1e9) for side in sides)
            times = "{:.3f} ({:.3f} - {:.3f})".format(*measure["time_ratio"]) if "time_ratio" in measure else ""
            lines.append(f"| {part} | {name} | {values} | {measure['unit']} | {times} | {peaks} |")
        if found["error"] or not found["measures"]:
            text = f"skipped: {found['skipped']}" if found["skipped"] else json.dumps(found["facts"])
            text = f"FAILED: {found['error'].splitlines()[-1]}" if found["error"] else text
            lines.append(f"| {part} | {text} | | | | | |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--parameters", type=float, default=1.5, help="parameters of the largest model, in billions")
    parser.add_argument("--rounds", type=int, default=7, help="number of pairs of turns")
    parser.add_argument("--minutes", type=float, default=9.5, help="time limit of all parts together, in minutes")
    parser.add_argument(
        "--ranks", type=int, default=max(1, torch.accelerator.device_count()), help="one per accelerator"
    )
    parser.add_argument("--smoke", action="store_true", help="run at tiny sizes, on the CPU if there is no accelerator")
    parser.add_argument("--out", type=Path, help=f"default: {harness.OUT}, with --smoke {harness.OUT / 'smoke'}")
    args = parser.parse_args()
    if not args.smoke and not torch.accelerator.is_available():
        print("gpu.py needs an accelerator; --smoke tries the script without one", file=sys.stderr)
        return 2
    job = {"billions": args.parameters, "rounds": args.rounds, "smoke": args.smoke}
    if args.smoke:
        job |= {"billions": 0.0, "rounds": 2}
    out = args.out or (harness.OUT / "smoke" if args.smoke else harness.OUT)
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    entry = {**environment(args), "parts": {}}
    for i, name in enumerate(args.parts):
        # Twice its share of the remaining time: a part that hangs leaves enough for the others.
        shares = [SHARES.get(part, 1) for part in args.parts[i:]]
        limit = (deadline - time.monotonic()) * min(1.0, 2 * shares[0] / sum(shares))
        found = entry["parts"][name] = run(name, args.ranks, job, max(0.0, limit))
        (out / "gpu.json").write_text(json.dumps(entry, indent=1) + "\n")
        state = f", FAILED: {found['error']}" if found["error"] else ""
        state += f", skipped: {found['skipped']}" if found["skipped"] else ""
        print(f"{name}: {found['seconds']} s{state}", flush=True)
    print("", table(entry), sep="\n")
    return int(any(found["error"] for found in entry["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
