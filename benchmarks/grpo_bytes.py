"""Measure how many bytes of weights a GRPO run sends to its engine per step, by learning rate.

    python benchmarks/grpo_bytes.py [--rates 1e-3 1e-5 1e-6] [--steps 30] [--warm-start-steps 400] [--out DIR] [--smoke]

Runs docs/examples/grpo.py on two ranks in bf16 with fp32 masters for each learning rate, from the same initial policy.
The example sends weights by difference, and compares the checksums of all weights with the engine's in every tenth
step. Results: bytes of each step, as a share of all weights. At bf16, a changed element takes four bytes and a weight
two, so the share of changed elements is half of it, up to 50 %. Writes grpo_bytes.json and a chart, prints a table.
`--smoke` runs everything in seconds with a policy that is hardly trained.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import harness

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "grpo.py"
COLORS = ("#d1495b", "#1f6fb4", "#5b8c5a", "#999999")


def run(options: dict, rate: float, folder: Path) -> list[float]:
    """Return the sent bytes of each step, as a share of all weights; the first step sends all weights."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    command += ["--train", "--bf16", "--run-dir", str(folder / f"{rate}"), "--policy", str(folder / "policy")]
    command += ["--actor-learning-rate", str(rate), "--steps", str(options["steps"]), "--save-every", "1000"]
    command += ["--warm-start-steps", str(options["warm_start_steps"])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    lines = (folder / f"{rate}" / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    if len(entries) != options["steps"]:
        raise harness.ValuesError(f"{len(entries)} steps were logged, expected {options['steps']}")
    return [entry["sent_bytes"] / entry["full_bytes"] for entry in entries]


def draw(shares: dict[str, list[float]], path: Path, *, smoke: bool) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for (rate, of_steps), color in zip(shares.items(), COLORS, strict=False):
        axes.plot(range(1, len(of_steps) + 1), [100 * share for share in of_steps], color=color, linewidth=1.8)
        axes.annotate(
            f"learning rate {rate}", (len(of_steps), 100 * of_steps[-1]), color=color, fontsize=9,
            textcoords="offset points", xytext=(6, -3), annotation_clip=False,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_yticks([1, 3, 10, 30, 100], ["1 %", "3 %", "10 %", "30 %", "100 %"])
    axes.set_xlim(1, max(map(len, shares.values())) * 1.25)
    axes.set_xlabel("step of GRPO")
    axes.spines[["top", "right"]].set_visible(False)
    title = "Bytes sent to the engine, of all weights; the first update sends all"
    axes.set_title(harness.SMOKE_TITLE if smoke else title, fontsize=11, loc="left")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def table(entry: dict) -> str:
    lines = ["| learning rate | bytes of all weights per step: median (min - max), without the first |", "|---|---|"]
    for rate, shares in entry["shares"].items():
        later = [100 * share for share in shares[1:]]
        lines.append(f"| {rate} | {statistics.median(later):.1f} % ({min(later):.1f} - {max(later):.1f}) |")
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 1e-5, 1e-6])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-start-steps", type=int, default=400)
    args = harness.parse(parser, smoke={"rates": [1e-5], "steps": 2, "warm_start_steps": 1})
    with tempfile.TemporaryDirectory(prefix="grpo-bytes-") as folder:
        shares = {f"{rate:g}": run(vars(args), rate, Path(folder)) for rate in args.rates}
    entry = {"steps": args.steps, **harness.environment(smoke=args.smoke), "shares": shares}
    harness.merge(args.out / "grpo_bytes.json", entry, ("hardware",))
    draw(shares, args.out / "grpo_bytes.png", smoke=args.smoke)
    print(table(entry))


if __name__ == "__main__":
    main()
