"""What planning and committing a save cost at thousands of ranks and many tensors, simulated in one process.

    python benchmarks/scale.py [--rounds 7] [--ranks 8 64 512 4096] [--tensors 1000 10000 100000] [--dcp 8 64 256]
                               [--out DIR] [--smoke]

A group of torch's fake backend says that this process is one rank of many; tensors are rows of matrices on the meta
device, every one split over all ranks, which is the most that can be asked. Measured is what runs on a rank: the layout
of files, the ranges that the rank writes, its list of checksums; the bytes that arrive at the coordinator from all
ranks in all of a save; and rank 0's commit, over real files, and its manifest. Each plan is checked: the ranges are as
many bytes as the rank holds, and no two overlap. Beside it the default planner of torch.distributed.checkpoint, with
the least number of tensors. Exponents are slopes of the logarithms. Writes scale.json and scale.png, prints tables.
`--smoke` runs all of it in seconds, with few ranks and tensors.
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
from fsdp2_strategy.checkpoint.storage import Component, SafetensorsWriter
from fsdp2_strategy.hf.checksums import Block
from fsdp2_strategy.hf.write import _group_adjacent, _runs

ROWS, COLUMNS = 8192, 16


def become(rank: int, ranks: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


def tensors_of(ranks: int, count: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (ranks,))
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta((ROWS, COLUMNS), (COLUMNS, 1), torch.float32))
    local = torch.empty(ROWS // ranks, COLUMNS, device="meta")
    return {f"model.layers.{i}.mlp.up_proj.weight": DTensor(local, spec, requires_grad=False) for i in range(count)}


def seconds(call: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def plan(tensors: dict[str, torch.Tensor], folder: Path) -> tuple[object, list]:
    """Do what a rank does before it writes a byte."""
    component, planner = Component.of(folder, tensors), DefaultSavePlanner()
    planner.set_up_planner({})
    sent = SafetensorsWriter([component]).prepare_local_plan(planner.create_local_plan())
    return sent, list(_group_adjacent([run for job in component.write_requests() for run in _runs(job)]))


def check_plan(groups: list, tensors: dict[str, torch.Tensor]) -> None:
    """Compare the ranges that a rank would write with what it holds.

    Raises:
        ValuesError: they are more or fewer bytes, or overlap.
    """
    ranges = sorted((run.path, run.offset, run.end) for group in groups for run in group)
    overlap = any(a[0] == b[0] and a[2] > b[1] for a, b in pairwise(ranges))
    planned, held = (
        sum(end - begin for _, begin, end in ranges),
        sum(harness.local_of(t).nbytes for t in tensors.values()),
    )
    if overlap or planned != held:
        raise harness.ValuesError(
            f"the plan writes {planned} bytes{' that overlap' * overlap}, and the rank holds {held}"
        )


def commit(ranks: int, listed: bytes, save_dir: Path) -> tuple[float, int]:
    """Let rank 0 commit what so many ranks have left; return seconds, and the bytes of the manifest."""
    partial = CheckpointPaths.of(directory.partial_path(save_dir, "tag"), lerobot=False)
    for folder in (partial.model, *partial.per_rank_folders):
        folder.mkdir(parents=True)
    (partial.model / "model.safetensors").write_bytes(b"0")
    for rank in range(ranks):
        partial.rank_file(RNG, rank).write_bytes(b"0")
        partial.rank_file(CHECKSUMS, rank).write_bytes(listed[:1])
    facts = {"step": 1, "protected": False, "metric": None, "higher_is_better": True, "shard_size": ranks}
    took, _ = seconds(lambda: directory.commit(partial, "tag", facts, ["0" * 16] * ranks))
    return took, partial.moved_to(save_dir / "tag").manifest.stat().st_size


def measure(ranks: int, count: int, rounds: int, folder: Path) -> dict:
    become(ranks // 2, ranks)
    tensors = tensors_of(ranks, count)
    turns = []
    for _ in range(rounds):
        took, (sent, groups) = seconds(lambda: plan(tensors, folder / "model"))
        turns.append(took)
    check_plan(groups, tensors)
    blocks: dict[Path, list[Block]] = {}
    for group in groups:
        blocks.setdefault(group[0].path, []).append(Block(group[0].offset, group[-1].end, "0" * 16))
    paths = CheckpointPaths.of(folder, lerobot=False)
    (folder / CHECKSUMS).mkdir(exist_ok=True)
    directory.write_checksums(paths, 0, blocks)
    listed = paths.rank_file(CHECKSUMS, 0).read_bytes()
    plans = [sent] * ranks
    # Of each rank: its plan, its digest of what is asked for, and the digest of its list.
    message = sum(len(pickle.dumps(each)) for each in (sent, "0" * 64, "0" * 16))
    compared, _ = seconds(lambda: [p.storage_data for p in plans if p.storage_data != plans[0].storage_data])
    committed, manifest = commit(ranks, listed, folder / "commit")
    shutil.rmtree(folder / "commit")
    return {
        "ranks": ranks,
        "tensors": count,
        "plan_seconds": turns,
        "sent_bytes": message,
        "coordinator_bytes": message * ranks,
        "compare_seconds": compared,
        "list_bytes": len(listed),
        "commit_seconds": committed,
        "manifest_bytes": manifest,
    }


def measure_dcp(ranks: int, count: int, rounds: int) -> dict:
    """Run torch's planner: every rank for itself, then the coordinator for all."""
    turns = []
    for _ in range(rounds):
        plans = []
        for rank in range(ranks):
            become(rank, ranks)
            planner = DefaultSavePlanner()
            planner.set_up_planner(tensors_of(ranks, count), is_coordinator=True)
            took, own = seconds(planner.create_local_plan)
            plans.append(own)
        together, (_, metadata) = seconds(lambda planner=planner, plans=plans: planner.create_global_plan(plans))
        turns.append(took + together)
    arriving = sum(len(pickle.dumps(p)) for p in plans)
    return {
        "ranks": ranks,
        "tensors": count,
        "plan_seconds": turns,
        "sent_bytes": arriving // ranks,
        "coordinator_bytes": arriving,
        "manifest_bytes": len(pickle.dumps(metadata)),
    }


def exponent(entries: list[dict], by: str, what: Callable[[dict], float]) -> float:
    """Return the slope of log(what) over log(by), by least squares."""
    x, y = ([math.log(f) for f in values] for values in ([e[by] for e in entries], [what(e) for e in entries]))
    mean_x, mean_y = statistics.mean(x), statistics.mean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


QUANTITIES: dict[str, Callable[[dict], float]] = {
    "planning, s": lambda e: statistics.median(e["plan_seconds"]),
    "bytes at the coordinator": lambda e: e["coordinator_bytes"],
    "manifest, bytes": lambda e: e["manifest_bytes"],
    "list of checksums of a rank, bytes": lambda e: e["list_bytes"],
    "commit, s": lambda e: e["commit_seconds"],
}


def exponents(entries: list[dict]) -> dict[str, dict[str, float]]:
    """Return how each quantity grows with ranks, at most tensors, and with tensors, at most ranks."""
    most_ranks, most_tensors = max(e["ranks"] for e in entries), max(e["tensors"] for e in entries)
    by_ranks = [e for e in entries if e["tensors"] == most_tensors]
    by_tensors = [e for e in entries if e["ranks"] == most_ranks]
    return {
        name: {"ranks": exponent(by_ranks, "ranks", what), "tensors": exponent(by_tensors, "tensors", what)}
        for name, what in QUANTITIES.items()
    }


def tables(result: dict) -> str:
    lines = [
        "| ranks | tensors | planning, s | at the coordinator, kB | list of a rank, kB | commit, s | manifest, kB |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for e in result["ours"]:
        sizes = (e["coordinator_bytes"] / 1e3, e["list_bytes"] / 1e3, e["commit_seconds"], e["manifest_bytes"] / 1e3)
        cells = [f"{e['ranks']:,}", f"{e['tensors']:,}", f"{statistics.median(e['plan_seconds']):.2f}"]
        lines.append("| " + " | ".join([*cells, *(f"{s:.2f}" if s < 1 else f"{s:,.1f}" for s in sizes)]) + " |")
    lines += ["", "| grows as a power of | ranks | tensors |", "|---|---|---|"]
    lines += [f"| {name} | {by['ranks']:.2f} | {by['tensors']:.2f} |" for name, by in result["exponents"].items()]
    lines += ["", "| torch's planner: ranks | tensors | planning, s | at the coordinator, kB | metadata, kB |"]
    lines.append("|---|---|---|---|---|")
    for e in result["dcp"]:
        sizes = (statistics.median(e["plan_seconds"]), e["coordinator_bytes"] / 1e3, e["manifest_bytes"] / 1e3)
        lines.append(f"| {e['ranks']:,} | {e['tensors']:,} | " + " | ".join(f"{s:,.2f}" for s in sizes) + " |")
    return "\n".join(lines)


def draw(result: dict, picture: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    least = min(e["tensors"] for e in result["ours"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.2), layout="constrained")
    for axes, what, title in (
        (left, QUANTITIES["planning, s"], f"seconds of planning, {least:,} tensors"),
        (right, QUANTITIES["bytes at the coordinator"], f"bytes that arrive at the coordinator, {least:,} tensors"),
    ):
        for name, color in (("ours", "#1f6fb4"), ("dcp", "#999999")):
            entries = [e for e in result[name] if e["tensors"] == least]
            label = "ours" if name == "ours" else "torch's planner"
            axes.loglog([e["ranks"] for e in entries], [what(e) for e in entries], "o-", color=color, label=label)
        axes.set_xlabel("ranks", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    if result["smoke"]:
        figure.suptitle(harness.SMOKE_TITLE, fontsize=9)
    figure.savefig(picture, dpi=120)


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
    result = {**harness.circumstances(smoke=args.smoke), "ours": ours, "exponents": exponents(ours)}
    result["dcp"] = [measure_dcp(ranks, min(args.tensors), args.rounds) for ranks in args.dcp]
    (args.out / "scale.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, args.out / "scale.png")
    print(tables(result))


if __name__ == "__main__":
    main()
