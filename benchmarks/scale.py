"""Simulate planning and committing a save with thousands of ranks and many tensors in one process.

    python benchmarks/scale.py [--rounds 7] [--ranks 8 64 512 4096] [--tensors 1000 10000 100000] [--dcp 8 64 256]
                               [--out DIR] [--smoke]

With torch's fake backend, the process is one rank of many. The tensors are matrices on the meta device; each is split
over all ranks, which is the worst case. Measured on a rank: the layout of files, the ranges that it writes, and its
checksum manifest; the bytes that the coordinator receives from all ranks during a save; and rank 0's commit, on real
files, with the checkpoint manifest. Each plan is checked: the ranges have as many bytes as the rank holds, and none
overlap. For comparison, the default planner of torch.distributed.checkpoint runs with the smallest number of tensors.
Exponents are slopes of the logarithms. Writes scale.json and scale.png, prints tables. `--smoke` runs everything in
seconds, with few ranks and tensors.
"""

import json
import math
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2_strategy.checkpoint import directory
from fsdp2_strategy.checkpoint.paths import CHECKSUMS, RNG, CheckpointPaths
from fsdp2_strategy.distributed.equal_values import digest_numbers
from fsdp2_strategy.storage.checksums import Block
from fsdp2_strategy.storage.component import Component
from fsdp2_strategy.storage.write import _group_adjacent, _runs

ROWS, COLUMNS = 8192, 16


def init_fake_rank(rank: int, ranks: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


def tensors_of(ranks: int, count: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (ranks,))
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta((ROWS, COLUMNS), (COLUMNS, 1), torch.float32))
    local = torch.empty(ROWS // ranks, COLUMNS, device="meta")
    return {f"model.layers.{i}.mlp.up_proj.weight": DTensor(local, spec, requires_grad=False) for i in range(count)}


def timed(call: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def plan_save(tensors: dict[str, torch.Tensor], folder: Path) -> tuple[str, list]:
    """Plan a save as a rank does before it writes a byte; return what it compares, and its ranges, grouped."""
    component = Component.of(folder, tensors)
    runs = [run for request in component.write_requests() for run in _runs(request)]
    return component.digest, list(_group_adjacent(runs))


def check_plan(groups: list, tensors: dict[str, torch.Tensor]) -> None:
    """Compare the ranges that a rank would write with the tensors that it holds.

    Raises:
        ValuesError: the ranges have more or fewer bytes, or overlap.
    """
    ranges = sorted((run.path, run.offset, run.end) for group in groups for run in group)
    overlap = any(a[0] == b[0] and a[2] > b[1] for a, b in pairwise(ranges))
    planned, held = (
        sum(end - begin for _, begin, end in ranges),
        sum(harness.local_of(t).nbytes for t in tensors.values()),
    )
    if overlap or planned != held:
        raise harness.ValuesError(f"the plan writes {planned} bytes{' that overlap' * overlap}, expected {held}")


def commit(ranks: int, manifest: bytes, save_dir: Path) -> tuple[float, int]:
    """Commit on rank 0 with the files of all ranks; return seconds, and the bytes of the checkpoint manifest."""
    partial = CheckpointPaths.of(directory.partial_path(save_dir, "tag"), "own")
    for folder in (partial.model, *partial.per_rank_folders):
        folder.mkdir(parents=True)
    (partial.model / "model.safetensors").write_bytes(b"0")
    for rank in range(ranks):
        partial.rank_file(RNG, rank).write_bytes(b"0")
        partial.rank_file(CHECKSUMS, rank).write_bytes(manifest[:1])
    facts = {"step": 1, "protected": False, "metric": None, "higher_is_better": True, "shard_size": ranks}
    took, _ = timed(lambda: directory.commit(partial, "tag", facts, [("0" * 16, "")] * ranks))
    return took, CheckpointPaths.of(save_dir / "tag", "own").manifest.stat().st_size


def measure(ranks: int, count: int, rounds: int, folder: Path) -> dict:
    init_fake_rank(ranks // 2, ranks)
    tensors = tensors_of(ranks, count)
    turns = []
    for _ in range(rounds):
        took, (compared_value, groups) = timed(lambda: plan_save(tensors, folder / "model"))
        turns.append(took)
    check_plan(groups, tensors)
    blocks: dict[Path, list[Block]] = {}
    for group in groups:
        blocks.setdefault(group[0].path, []).append(Block(group[0].offset, group[-1].end, "0" * 16))
    paths = CheckpointPaths.of(folder, "own")
    (folder / CHECKSUMS).mkdir(exist_ok=True)
    directory.write_checksums(paths, 0, blocks)
    manifest = paths.rank_file(CHECKSUMS, 0).read_bytes()
    # Each rank sends the digests of its checksum manifest; sums of a few numbers show that all have the same request
    # and plan.
    message = len(pickle.dumps([("0" * 16, "0" * 64)]))
    compared, _ = timed(lambda: digest_numbers([compared_value]))
    committed, checkpoint_manifest_bytes = commit(ranks, manifest, folder / "commit")
    shutil.rmtree(folder / "commit")
    return {
        "ranks": ranks,
        "tensors": count,
        "plan_seconds": turns,
        "sent_bytes": message,
        "coordinator_bytes": message * ranks,
        "compare_seconds": compared,
        "list_bytes": len(manifest),
        "commit_seconds": committed,
        "manifest_bytes": checkpoint_manifest_bytes,
    }


def measure_dcp(ranks: int, count: int, rounds: int) -> dict:
    """Run torch's planner: on every rank, then on the coordinator."""
    turns = []
    for _ in range(rounds):
        plans = []
        for rank in range(ranks):
            init_fake_rank(rank, ranks)
            planner = DefaultSavePlanner()
            planner.set_up_planner(tensors_of(ranks, count), is_coordinator=True)
            took, local_plan = timed(planner.create_local_plan)
            plans.append(local_plan)
        global_took, (_, metadata) = timed(lambda planner=planner, plans=plans: planner.create_global_plan(plans))
        turns.append(took + global_took)
    received = sum(len(pickle.dumps(p)) for p in plans)
    return {
        "ranks": ranks,
        "tensors": count,
        "plan_seconds": turns,
        "sent_bytes": received // ranks,
        "coordinator_bytes": received,
        "manifest_bytes": len(pickle.dumps(metadata)),
    }


def exponent(entries: list[dict], by: str, quantity: Callable[[dict], float]) -> float:
    """Return the slope of log(quantity) over log(by), by least squares."""
    x, y = ([math.log(f) for f in values] for values in ([e[by] for e in entries], [quantity(e) for e in entries]))
    mean_x, mean_y = statistics.mean(x), statistics.mean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


QUANTITIES: dict[str, Callable[[dict], float]] = {
    "planning, s": lambda e: statistics.median(e["plan_seconds"]),
    "bytes at the coordinator": lambda e: e["coordinator_bytes"],
    "manifest, bytes": lambda e: e["manifest_bytes"],
    "list of checksums of a rank, bytes": lambda e: e["list_bytes"],
    "commit, s": lambda e: e["commit_seconds"],
}


LABELS = {
    "bytes at the coordinator": "bytes received by the coordinator",
    "manifest, bytes": "checkpoint manifest, bytes",
    "list of checksums of a rank, bytes": "checksum manifest of a rank, bytes",
}
"""What the table calls some keys of the results."""


def exponents(entries: list[dict]) -> dict[str, dict[str, float]]:
    """Return how each quantity grows with ranks (for the most tensors) and with tensors (for the most ranks)."""
    max_ranks, max_tensors = max(e["ranks"] for e in entries), max(e["tensors"] for e in entries)
    by_ranks = [e for e in entries if e["tensors"] == max_tensors]
    by_tensors = [e for e in entries if e["ranks"] == max_ranks]
    return {
        name: {"ranks": exponent(by_ranks, "ranks", quantity), "tensors": exponent(by_tensors, "tensors", quantity)}
        for name, quantity in QUANTITIES.items()
    }


def tables(result: dict) -> str:
    lines = [
        "| ranks | tensors | planning, s | received by the coordinator, kB | checksum manifest of a rank, kB "
        "| commit, s | checkpoint manifest, kB |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for e in result["ours"]:
        sizes = (e["coordinator_bytes"] / 1e3, e["list_bytes"] / 1e3, e["commit_seconds"], e["manifest_bytes"] / 1e3)
        cells = [f"{e['ranks']:,}", f"{e['tensors']:,}", f"{statistics.median(e['plan_seconds']):.2f}"]
        lines.append("| " + " | ".join([*cells, *(f"{s:.2f}" if s < 1 else f"{s:,.1f}" for s in sizes)]) + " |")
    lines += ["", "| exponent of growth with | ranks | tensors |", "|---|---|---|"]
    lines += [
        f"| {LABELS.get(name, name)} | {by['ranks']:.2f} | {by['tensors']:.2f} |"
        for name, by in result["exponents"].items()
    ]
    lines += ["", "| torch's planner: ranks | tensors | planning, s | received by the coordinator, kB | metadata, kB |"]
    lines.append("|---|---|---|---|---|")
    for e in result["dcp"]:
        sizes = (statistics.median(e["plan_seconds"]), e["coordinator_bytes"] / 1e3, e["manifest_bytes"] / 1e3)
        lines.append(f"| {e['ranks']:,} | {e['tensors']:,} | " + " | ".join(f"{s:,.2f}" for s in sizes) + " |")
    return "\n".join(lines)


def draw(result: dict, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    min_tensors = min(e["tensors"] for e in result["ours"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.2), layout="constrained")
    for axes, quantity, title in (
        (left, QUANTITIES["planning, s"], f"seconds of planning, {min_tensors:,} tensors"),
        (right, QUANTITIES["bytes at the coordinator"], f"bytes received by the coordinator, {min_tensors:,} tensors"),
    ):
        for name, color in (("ours", "#1f6fb4"), ("dcp", "#999999")):
            entries = [e for e in result[name] if e["tensors"] == min_tensors]
            label = "ours" if name == "ours" else "torch's planner"
            axes.loglog([e["ranks"] for e in entries], [quantity(e) for e in entries], "o-", color=color, label=label)
        axes.set_xlabel("ranks", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    if result["smoke"]:
        figure.suptitle(harness.SMOKE_TITLE, fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--tensors", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--dcp", type=int, nargs="*", default=[8, 64, 256], help="ranks at which torch's planner runs")
    args = harness.parse(parser, smoke={"ranks": [2, 8], "tensors": [10, 100], "dcp": [2, 4]})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        pairs = [(ranks, count) for ranks in args.ranks for count in args.tensors]
        ours = [measure(ranks, count, args.rounds, Path(folder)) for ranks, count in pairs]
    result = {**harness.environment(smoke=args.smoke), "ours": ours, "exponents": exponents(ours)}
    result["dcp"] = [measure_dcp(ranks, min(args.tensors), args.rounds) for ranks in args.dcp]
    (args.out / "scale.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, args.out / "scale.png")
    print(tables(result))


if __name__ == "__main__":
    main()
