"""The main job, as proof: train, kill a rank with SIGKILL in the middle, let it resume by itself, compare every loss.

    python docs/examples/demo.py

Two runs of train_text.py under torchrun, two ranks each: one undisturbed, one killed. The demo fails unless each loss
that the killed run logged, before the kill and after it, equals the undisturbed run's to the last bit. It draws both
into runs/demo/demo_loss.png, and lets plain transformers open the killed run's export and write some text with it.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

EXAMPLES = Path(__file__).parent
RUNS = Path("runs/demo")


def launch(run_dir: Path, config: Path) -> subprocess.Popen:
    """Start train_text.py on two ranks, as a user would."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", str(EXAMPLES / "train_text.py"), "--config", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen([*command, "--run-dir", str(run_dir)], env=environment)


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Read what a run has logged so far; a step that was run again appears again."""
    log = run_dir / "losses.jsonl"
    if not log.exists():
        return []
    lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(entry["step"], entry["loss"]) for entry in map(json.loads, lines)]


def kill_at(process: subprocess.Popen, run_dir: Path, step: int) -> int:
    """Send SIGKILL to rank 1 once the run has passed ``step``; return the last step that was logged before."""
    while not any(logged >= step for logged, _ in losses(run_dir)):
        if process.poll() is not None:
            raise SystemExit("the run ended before it could be killed")
        time.sleep(0.05)
    victim = int((run_dir / "rank1.pid").read_text())
    os.kill(victim, signal.SIGKILL)
    print(f"\n--- SIGKILL to rank 1 (process {victim}) after step {step} ---\n", flush=True)
    return max(logged for logged, _ in losses(run_dir))


def draw(undisturbed: list[tuple[int, float]], killed: list[tuple[int, float]], kill: int, picture: Path) -> None:
    """Draw both loss curves, the kill and what was run again."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    restart = next(i for i in range(1, len(killed)) if killed[i][0] <= killed[i - 1][0])
    before, after = killed[:restart], killed[restart:]
    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    axes.plot(*zip(*undisturbed, strict=True), color="#c9c9c9", linewidth=7, label="undisturbed run", zorder=1)
    axes.plot(*zip(*before, strict=True), color="#1f6fb4", linewidth=1.8, label="second run, until the kill", zorder=3)
    axes.plot(*zip(*after, strict=True), color="#d1495b", linewidth=1.8, label="second run, resumed", zorder=2)
    axes.axvline(kill, color="#333333", linewidth=1, linestyle=":")
    top = max(loss for _, loss in undisturbed)
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
    axes.set_title("Killed and resumed: the same losses, to the last bit", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130, metadata={"Software": None})


def continue_text(export: Path, prompt: str) -> str:
    """Open an export with plain transformers and let it go on with a text."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=EXAMPLES / "train_text.yaml")
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--picture", type=Path, help="by default demo_loss.png among the runs")
    args = parser.parse_args()
    args.picture = args.picture or args.runs / "demo_loss.png"
    shutil.rmtree(args.runs, ignore_errors=True)
    options = yaml.safe_load(args.config.read_text())["train"]
    started = time.monotonic()

    print("--- first run: undisturbed ---", flush=True)
    if launch(args.runs / "undisturbed", args.config).wait():
        raise SystemExit("the undisturbed run failed")
    print("\n--- second run: a rank is killed in the middle ---", flush=True)
    process = launch(args.runs / "killed", args.config)
    kill = kill_at(process, args.runs / "killed", options["steps"] // 2 + options["save_every"] // 2)
    if process.wait():
        raise SystemExit("the killed run did not finish by itself")

    expected, killed = losses(args.runs / "undisturbed"), losses(args.runs / "killed")
    by_step = dict(expected)
    different = [(step, loss, by_step[step]) for step, loss in killed if loss != by_step[step]]
    again = len(killed) - len({step for step, _ in killed})
    if different or {step for step, _ in killed} != set(by_step) or not again:
        raise SystemExit(f"the runs differ: {different[:3]}, {again} steps run again")
    draw(expected, killed, kill, args.picture)
    text = continue_text(args.runs / "killed" / "export", "import os\n\ndef ")
    print(f"\n--- the export, opened by plain transformers, goes on from 'import os\\n\\ndef ': ---\n{text}")
    first, last = expected[0][1], expected[-1][1]
    print(
        f"\nall {len(killed)} losses of the killed run equal the undisturbed run's to the last bit, {again} steps run "
        f"twice\nloss {first:.3f} -> {last:.3f} in {len(expected)} steps; picture: {args.picture}; "
        f"{time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
