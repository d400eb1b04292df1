"""Kill a rank in the middle of a training run, and check that the run resumes with the same losses.

    python docs/examples/demo.py

It runs train_text.py twice under torchrun, with two ranks each. In the second run, one rank is killed with SIGKILL, and
torchrun restarts both. The demo fails unless all losses of the second run are bitwise equal to those of the first. It
plots both in runs/demo/demo_loss.png, loads the second run's export with plain transformers, and generates text.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml
from options import make_parser

EXAMPLES = Path(__file__).parent
RUNS = Path("runs/demo")


def launch(run_dir: Path, config: Path) -> subprocess.Popen:
    """Start train_text.py on two ranks, as a user would."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", str(EXAMPLES / "train_text.py"), "--config", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen([*command, "--run-dir", str(run_dir)], env=environment)


def read_losses(run_dir: Path) -> list[tuple[int, float]]:
    """Read the steps and losses that a run has logged; repeated steps appear twice."""
    log = run_dir / "losses.jsonl"
    if not log.exists():
        return []
    lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(entry["step"], entry["loss"]) for entry in map(json.loads, lines)]


def kill_at(process: subprocess.Popen, run_dir: Path, step: int) -> int:
    """Send SIGKILL to rank 1 once ``step`` has been logged; return the last logged step."""
    while not any(logged >= step for logged, _ in read_losses(run_dir)):
        if process.poll() is not None:
            raise SystemExit("the run ended before it could be killed")
        time.sleep(0.05)
    pid = int((run_dir / "rank1.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    print(
        f"\n--- SIGKILL to rank 1 (process {pid}) after step {step}: the other rank raises an error, and torchrun "
        "starts both again ---\n",
        flush=True,
    )
    return max(logged for logged, _ in read_losses(run_dir))


def plot(uninterrupted: list[tuple[int, float]], killed: list[tuple[int, float]], kill: int, picture: Path) -> None:
    """Plot both loss curves, the kill and the repeated steps."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    restart = next(i for i in range(1, len(killed)) if killed[i][0] <= killed[i - 1][0])
    before, after = killed[:restart], killed[restart:]
    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    axes.plot(*zip(*uninterrupted, strict=True), color="#c9c9c9", linewidth=7, label="uninterrupted run", zorder=1)
    axes.plot(*zip(*before, strict=True), color="#1f6fb4", linewidth=1.8, label="second run, before the kill", zorder=3)
    axes.plot(*zip(*after, strict=True), color="#d1495b", linewidth=1.8, label="second run, resumed", zorder=2)
    axes.axvline(kill, color="#333333", linewidth=1, linestyle=":")
    top = max(loss for _, loss in uninterrupted)
    axes.annotate("SIGKILL", (kill, top), textcoords="offset points", xytext=(5, -9), fontsize=9)
    first, loss = after[0]
    axes.annotate(
        "resumed from\nthe last checkpoint",
        (first, loss),
        textcoords="offset points",
        xytext=(-66, 34),
        fontsize=9,
        ha="center",
        arrowprops={"arrowstyle": "-", "color": "#333333", "linewidth": 0.8},
    )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title("Killed and resumed: losses are bitwise equal", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130, metadata={"Software": None})


def continue_text(export: Path, prompt: str) -> str:
    """Load an export with plain transformers, and generate a continuation of ``prompt``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export)
    torch.manual_seed(0)
    tokens = model.generate(
        **tokenizer(prompt, return_tensors="pt"), max_new_tokens=120, do_sample=True, temperature=0.8
    )
    return tokenizer.decode(tokens[0])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--config", type=Path, default=EXAMPLES / "train_text.yaml", help="as for train_text.py")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of both runs")
    parser.add_argument(
        "--picture", type=Path, help="file of the figure; by default demo_loss.png in the folder of --runs"
    )
    args = parser.parse_args()
    args.picture = args.picture or args.runs / "demo_loss.png"
    shutil.rmtree(args.runs, ignore_errors=True)
    options = yaml.safe_load(args.config.read_text())["train"]
    started = time.monotonic()

    print(f"--- first run of {options['steps']} steps on two ranks: uninterrupted ---", flush=True)
    if launch(args.runs / "undisturbed", args.config).wait():
        raise SystemExit("the uninterrupted run failed")
    print("\n--- second run: one rank is killed in the middle ---", flush=True)
    process = launch(args.runs / "killed", args.config)
    kill = kill_at(process, args.runs / "killed", options["steps"] // 2 + options["save_every"] // 2)
    if process.wait():
        raise SystemExit("the killed run did not resume and finish")

    expected, killed = read_losses(args.runs / "undisturbed"), read_losses(args.runs / "killed")
    by_step = dict(expected)
    different = [(step, loss, by_step[step]) for step, loss in killed if loss != by_step[step]]
    repeated = len(killed) - len({step for step, _ in killed})
    if different or {step for step, _ in killed} != set(by_step) or not repeated:
        raise SystemExit(f"the runs differ: {different[:3]}, {repeated} steps were repeated")
    plot(expected, killed, kill, args.picture)
    text = continue_text(args.runs / "killed" / "export", "import os\n\ndef ")
    print(f"\n--- the export, loaded with plain transformers, continues 'import os\\n\\ndef ': ---\n{text}")
    first, last = expected[0][1], expected[-1][1]
    print(
        f"\nall {len(killed)} losses of the killed run are bitwise equal to those of the uninterrupted run, "
        f"{repeated} steps were repeated\nloss {first:.3f} -> {last:.3f} in {len(expected)} steps; "
        f"picture: {args.picture}; {time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
