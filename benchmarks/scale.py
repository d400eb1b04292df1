"""Measure how the cost of planning grows with ranks and tensors; one process plays one rank of thousands.

    python benchmarks/scale.py [--rounds 3] [--ranks 8 64 512 4096] [--tensors 1000 10000 100000] [--base 64 1000]
                               [--plans NAME ...] [--dcp 8 64 256] [--out DIR] [--smoke]

With torch's fake backend, the process is one rank of many; see `scale_plans`. Measured are, for all numbers of tensors
on the first number of ``--base`` ranks, and for all numbers of ranks with the second number of tensors: Python calls of
a first run, processor time of later runs, and the rounds and bytes of what ranks exchange. The plans are those of the
units of `prepare_model`, of a save (the plan of one rank, and the whole save on the coordinator), of a load (the whole
load on rank 0), of a load of a Hugging Face folder, of the data order after a resume, and of a stream to an inference
engine. An optimizer step has few exchanges of its own: they are counted for small models only. Each result is checked.

For comparison, the default planner of torch.distributed.checkpoint runs with the smallest number of tensors. Exponents
are slopes of the logarithms. Writes scale.json and scale.png, prints tables; ``--plans`` runs some plans, and keeps the
results of the others. `--smoke` runs everything in seconds, with few ranks and tensors.
"""

import json
import logging
import math
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness
import scale_plans
import torch
from scale_plans import PLANS, play
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

ROWS, COLUMNS = 8192, 16
"""Of the tensors of torch's planner."""
MANY_TENSORS = 50_000
"""From here on, one turn is timed."""
STEP_TENSORS = 100
"""Of the model that takes a step: `fully_shard` takes minutes for 10^5 tensors."""
LABELS = {
    "units": "units of `prepare_model`",
    "units, fp32": "the same in fp32",
    "units, norms in fp32": "the same with `keep_fp32`",
    "save, plan": "plan of a save, one rank",
    "save": "save, the coordinator",
    "load": "load of a checkpoint, rank 0",
    "load, Hugging Face": "load of a Hugging Face folder",
    "data order": "data order, resumed",
    "engine": "plan of a stream to an engine",
    "stream": "stream to an engine",
    "step": "optimizer step",
}


def measure(name: str, ranks: int, count: int, rounds: int) -> dict:
    """Count the calls of a plan's first run; time later runs, which may reuse what the first has found."""
    plan = scale_plans.whole_step if name == "step" else PLANS[name]
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        call = plan(ranks, count, Path(folder))
        first = scale_plans.measure(call, counts_calls=True)
        timed = [scale_plans.measure(call, counts_calls=False) for _ in range(1 if count >= MANY_TENSORS else rounds)]
    return {
        "plan": name,
        "ranks": ranks,
        "tensors": count,
        "python_calls": first.python_calls,
        "c_calls": first.c_calls,
        "rounds": timed[-1].rounds,
        "received_bytes": timed[-1].received_bytes,
        "seconds": [each.seconds for each in timed],
        "facts": timed[-1].facts,
    }


def measure_dcp(ranks: int, count: int, rounds: int) -> dict:
    """Run torch's planner: on every rank, then on the coordinator."""
    turns = []
    for _ in range(rounds):
        plans, took = [], 0.0
        for rank in range(ranks):
            play(rank, ranks)
            planner = DefaultSavePlanner()
            planner.set_up_planner(meta_tensors(ranks, count), is_coordinator=True)
            begun = time.process_time()
            plans.append(planner.create_local_plan())
            took = time.process_time() - begun
        begun = time.process_time()
        _, metadata = planner.create_global_plan(plans)
        turns.append(took + time.process_time() - begun)
    received = sum(len(pickle.dumps(plan)) for plan in plans)
    manifest_bytes = len(pickle.dumps(metadata))
    return {
        "ranks": ranks,
        "tensors": count,
        "seconds": turns,
        "received_bytes": received,
        "facts": {"manifest_bytes": manifest_bytes},
    }


def meta_tensors(ranks: int, count: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (ranks,))
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta((ROWS, COLUMNS), (COLUMNS, 1), torch.float32))
    local = torch.empty(ROWS // ranks, COLUMNS, device="meta")
    return {f"model.layers.{i}.mlp.up_proj.weight": DTensor(local, spec, requires_grad=False) for i in range(count)}


# --- exponents --------------------------------------------------------------------------------------------------------

Quantity = Callable[[dict], float]
QUANTITIES: dict[str, Quantity] = {
    "calls": lambda entry: entry["python_calls"],
    "seconds": lambda entry: statistics.median(entry["seconds"]),
    "received_bytes": lambda entry: entry["received_bytes"],
}


def exponent(entries: list[dict], by: str, quantity: Quantity) -> float | None:
    """Return the slope of log(quantity) over log(by), by least squares; None if there is nothing to compare."""
    if len({entry[by] for entry in entries}) < 2 or not all(quantity(entry) > 0 for entry in entries):
        return None
    x, y = ([math.log(f) for f in values] for values in ([e[by] for e in entries], [quantity(e) for e in entries]))
    mean_x, mean_y = statistics.mean(x), statistics.mean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def series(entries: list[dict], plan: str, by: str, base: dict[str, int]) -> list[dict]:
    """Return the entries of a plan in which only ``by`` differs from the base, in its order."""
    fixed = "ranks" if by == "tensors" else "tensors"
    at = base["step_tensors"] if plan == "step" and fixed == "tensors" else base[fixed]
    return sorted((e for e in entries if e["plan"] == plan and e[fixed] == at), key=lambda entry: entry[by])


def exponents(entries: list[dict], base: dict[str, int]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return by plan and quantity how the quantity grows with tensors and with ranks."""
    return {
        plan: {
            name: {by: exponent(series(entries, plan, by, base), by, quantity) for by in ("tensors", "ranks")}
            for name, quantity in QUANTITIES.items()
        }
        for plan in dict.fromkeys(entry["plan"] for entry in entries)
    }


# --- output -----------------------------------------------------------------------------------------------------------


def tables(result: dict) -> str:
    """Format the exponents, and the largest cases."""
    base, entries = result["base"], result["ours"]
    lines = [
        "| plan | calls with tensors | time with tensors | calls with ranks | time with ranks "
        "| bytes with tensors | with ranks |",
        "|---|---|---|---|---|---|---|",
    ]

    def text(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    for plan, found in result["exponents"].items():
        names = ("calls", "seconds")
        cells = [text(found[name][by]) for by in ("tensors", "ranks") for name in names]
        cells += [text(found["received_bytes"][by]) for by in ("tensors", "ranks")]
        lines.append(f"| {LABELS[plan]} | {' | '.join(cells)} |")
    lines += ["", "Python calls of a first run, and seconds of processor time of a later one:", ""]
    most_ranks, most_tensors = (max(entry[by] for entry in entries) for by in ("ranks", "tensors"))
    lines += [
        f"| plan | {base['ranks']:,} ranks, {most_tensors:,} tensors "
        f"| {most_ranks:,} ranks, {base['tensors']:,} tensors | rounds | received, kB |",
        "|---|---|---|---|---|",
    ]
    for plan in result["exponents"]:
        cells = []
        for by in ("tensors", "ranks"):
            found = series(entries, plan, by, base)
            cells.append(f"{found[-1]['python_calls']:,}, {statistics.median(found[-1]['seconds']):.2f} s")
            if plan == "step":
                cells[-1] += f" ({found[-1]['tensors']} tensors)"
        cells += [f"{found[-1]['rounds']}", f"{found[-1]['received_bytes'] / 1e3:,.1f}"]
        lines.append(f"| {LABELS[plan]} | {' | '.join(cells)} |")
    lines += ["", "| the coordinator of a save: ranks | tensors | received, kB | checksum manifest of a rank, kB "]
    lines[-1] += "| commit, s | checkpoint manifest, kB |"
    lines.append("|---|---|---|---|---|---|")
    for e in (entry for entry in entries if entry["plan"] == "save"):
        facts = e["facts"]
        cells = [f"{e['ranks']:,}", f"{e['tensors']:,}", f"{e['received_bytes'] / 1e3:,.1f}"]
        cells += [f"{facts['checksum_manifest_bytes'] / 1e3:,.1f}", f"{facts['commit_seconds']:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {facts['manifest_bytes'] / 1e3:,.1f} |")
    lines += ["", "| torch's planner: ranks | tensors | planning, s | received by the coordinator, kB | metadata, kB |"]
    lines.append("|---|---|---|---|---|")
    for e in result["dcp"]:
        figures = (statistics.median(e["seconds"]), e["received_bytes"] / 1e3, e["facts"]["manifest_bytes"] / 1e3)
        lines.append(f"| {e['ranks']:,} | {e['tensors']:,} | " + " | ".join(f"{s:,.2f}" for s in figures) + " |")
    return "\n".join(lines)


def draw(result: dict, path: Path) -> None:
    """Draw seconds by tensors, seconds by ranks, and bytes by ranks: a line for each plan."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    base, entries = result["base"], result["ours"]
    figure, grid = plt.subplots(1, 3, figsize=(10.5, 4.2), layout="constrained")
    panels = [
        ("tensors", "seconds", f"seconds of processor time\non {base['ranks']:,} ranks"),
        ("ranks", "seconds", f"seconds of processor time\nfor {base['tensors']:,} tensors"),
        ("ranks", "received_bytes", f"bytes that a rank receives\nfor {base['tensors']:,} tensors"),
    ]
    colors = dict(zip(LABELS, (*plt.get_cmap("tab10").colors, "#000000"), strict=True))
    for axes, (by, name, title) in zip(grid, panels, strict=True):
        for plan, color in colors.items():
            found = [e for e in series(entries, plan, by, base) if QUANTITIES[name](e) > 0]
            if len(found) > 1:
                label = LABELS[plan].replace("`", "")
                y = [QUANTITIES[name](e) for e in found]
                axes.loglog([e[by] for e in found], y, "o-", color=color, markersize=3, linewidth=1.2, label=label)
        dcp = result["dcp"] if by == "ranks" else []
        if len(dcp) > 1:
            label = f"torch's planner of a save, {dcp[0]['tensors']:,} tensors"
            y = [QUANTITIES[name](e) for e in dcp]
            axes.loglog([e["ranks"] for e in dcp], y, "s--", color="#999999", markersize=3, linewidth=1.2, label=label)
        axes.set_xlabel(by, fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    (begin, end), low = grid[0].get_xlim(), grid[0].get_ylim()[0]
    slope = [2 * low, 2 * low * end / begin]
    grid[0].loglog([begin, end], slope, ":", color="#333333", linewidth=1, label="in proportion")
    handles = {label: line for axes in grid for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    if result["smoke"]:
        figure.suptitle(harness.SMOKE_TITLE, fontsize=9)
    figure.savefig(path, dpi=120)


def record(results: Path, base: dict[str, int], plan: str, found: list[dict], *, smoke: bool) -> dict:
    """Write the entries of a plan, and keep those of other plans with the same base; return all."""
    before = json.loads(results.read_text()) if results.exists() else {}
    known = [e for e in before["ours"] if e["plan"] != plan] if before.get("base") == base else []
    ours = sorted([*known, *found], key=lambda entry: [*LABELS].index(entry["plan"]))
    result = {**harness.environment(smoke=smoke), "base": base, "ours": ours, "exponents": exponents(ours, base)}
    result["dcp"] = before.get("dcp", [])
    results.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--tensors", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--base", type=int, nargs=2, default=[64, 1_000], help="ranks and tensors of the other cases")
    parser.add_argument("--plans", nargs="+", default=[*PLANS, "step"], choices=[*PLANS, "step"])
    parser.add_argument("--dcp", type=int, nargs="*", default=[8, 64, 256], help="ranks at which torch's planner runs")
    args = harness.parse(parser, smoke={"ranks": [2, 8], "tensors": [30, 60], "base": [8, 30], "dcp": [2, 4]})
    torch.set_num_threads(1)
    logging.getLogger("fsdp2_strategy").setLevel(logging.ERROR)
    base = {"ranks": args.base[0], "tensors": args.base[1], "step_tensors": min(STEP_TENSORS, args.base[1])}
    results = args.out / "scale.json"
    for plan in args.plans:
        pairs = [(base["ranks"], count) for count in args.tensors] + [(n, base["tensors"]) for n in args.ranks]
        if plan == "step":
            pairs = [(n, base["step_tensors"]) for n in args.ranks]
        measure(plan, min(args.ranks), min(30, *args.tensors), 1)  # Python and torch read modules at their first use
        found = [measure(plan, ranks, count, args.rounds) for ranks, count in dict.fromkeys(pairs)]
        result = record(results, base, plan, found, smoke=args.smoke)
    result["dcp"] = [measure_dcp(n, min(args.tensors), args.rounds) for n in args.dcp] or result["dcp"]
    results.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, args.out / "scale.png")
    print(tables(result))


if __name__ == "__main__":
    main()
