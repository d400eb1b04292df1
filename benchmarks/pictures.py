"""Draw the charts of the README from recorded results: save and load beside rivals, and memory per rank.

    python benchmarks/pictures.py [--results benchmarks/results] [--out runs/benchmarks]

Input: checkpoint.json and weights.json, the 0.4 billion parameters on a RAM disk. Output: save_load.png, memory.png.
The recorded pictures are in docs/images: ``--out docs/images``.
"""

import argparse
import json
import statistics
from pathlib import Path

import harness

RECORDED = Path(__file__).parent / "results"
RIVALS = {
    "ours": "fsdp2_strategy",
    "DCP": "torch DCP",
    "accelerate": "accelerate",
    "gather + save_file": "gather on rank 0",
}
LOADERS = {"ours": "fsdp2_strategy", "accelerate": "accelerate", "rank 0 + broadcast": "rank 0 + broadcast"}
COLORS = ["#1f6fb4", "#8a8a8a", "#b5b5b5", "#d5d5d5"]


def entries_of(results: Path, **keys: object) -> list[dict]:
    entries = json.loads(results.read_text())
    return [entry for entry in entries if all(entry.get(key) == value for key, value in keys.items())]


def one(entries: list[dict]) -> dict:
    if len(entries) != 1:
        raise SystemExit(f"expected one entry of each case, got {len(entries)}")
    return entries[0]


def axes_of(count: int):
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(9.0, 2.9), layout="constrained", squeeze=False)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def caption(figure: object, entries: list[dict]) -> None:
    measured = sorted({(entry["date"], entry["commit"], entry["hardware"], entry["torch"]) for entry in entries})
    text = "; ".join(
        f"{date}, commit {commit}, {hardware}, torch {torch}" for date, commit, hardware, torch in measured
    )
    figure.supxlabel(text, fontsize=7, color="#666666")


def save_load(results: Path, out: Path) -> None:
    found = [
        one(entries_of(results / "checkpoint.json", kind=kind, case="model-0.4", ranks=2, where="tmpfs"))
        for kind in ("save", "load")
    ]
    figure, axes = axes_of(2)
    for each, entry, title in zip(axes, found, ("save", "load"), strict=True):
        seconds = [statistics.median(entry["contestants"][name]["seconds"]) for name in RIVALS]
        bars = each.barh(list(RIVALS.values()), seconds, color=COLORS)
        each.bar_label(bars, [f"{value:.2f} s" for value in seconds], padding=3, fontsize=9)
        each.invert_yaxis()
        each.set_xlim(0, 1.2 * max(seconds))
        note = "\n(only ours compares checksums)" if title == "load" else ""
        each.set_title(f"{title} {entry['payload_bytes'] / 1e9:.2f} GB, 2 ranks{note}", fontsize=9)
    caption(figure, found)
    figure.savefig(out / "save_load.png", dpi=120)


def memory(results: Path, out: Path) -> None:
    found = [
        one(entries_of(results / "weights.json", kind="load", size="0.4", ranks=ranks, where="tmpfs"))
        for ranks in (1, 2, 4)
    ]
    figure, [axes] = axes_of(1)
    width = 0.8 / len(LOADERS)
    for i, (name, label) in enumerate(LOADERS.items()):
        peaks = [entry["contestants"][name]["peak_bytes"] / 1e9 for entry in found]
        bars = axes.bar([x + i * width for x in range(len(found))], peaks, 0.92 * width, label=label, color=COLORS[i])
        axes.bar_label(bars, [f"{peak:.2f}" for peak in peaks], fontsize=8)
    for x, entry in enumerate(found):
        shard = entry["payload_bytes"] / entry["ranks"] / 1e9
        label = "the shard of a rank" if not x else None
        axes.plot([x - width / 2, x + 0.8 - width / 2], [shard, shard], "k--", linewidth=1, label=label)
    axes.set_xticks([x + width for x in range(len(found))], ["1 rank", "2 ranks", "4 ranks"])
    axes.set_ylabel("peak memory of the worst rank, GB", fontsize=8)
    axes.set_title(f"load a Hugging Face folder of {found[0]['payload_bytes'] / 1e9:.2f} GB", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    caption(figure, found)
    figure.savefig(out / "memory.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RECORDED, help="folder of the results")
    parser.add_argument("--out", type=Path, default=harness.OUT, help="folder for the pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    save_load(args.results, args.out)
    memory(args.results, args.out)


if __name__ == "__main__":
    main()
