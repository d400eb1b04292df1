"""Train a robot policy on demonstrations, kill a rank in the middle, and check that the robot has learned its task.

    python docs/examples/robot.py

It runs train_vla.py under torchrun on two ranks and kills one of them with SIGKILL; torchrun starts both again. It
fails unless the losses of repeated steps are bitwise equal and the success rate is higher at the end than at the start.
Then it loads the saved policy in this process, runs it on tables without demonstrations, and draws the figures of
docs/vla.md: success and loss over the steps, and an animation.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from flow_vla import FlowVLA, Processor
from options import make_parser
from table import SIZE, Tables
from train_vla import UNSEEN, drive

EXAMPLES = Path(__file__).parent
SHOWN = range(2 * UNSEEN, 2 * UNSEEN + 8)  # seeds of the animated tables
LOSS, STEP, SECONDS = "VLA Train/Loss", "VLA Train/Step", "VLA Train/Step Time"


def run(args: argparse.Namespace, options: Sequence[str]) -> dict[str, float]:
    """Train with a kill, compare the repeated steps, evaluate the saved policy, and return the results.

    Args:
        args: options of this program.
        options: other options, for train_vla.py.
    """
    started = time.monotonic()
    shutil.rmtree(args.run_dir, ignore_errors=True)
    kill_after = args.steps // 2 + args.save_interval // 2
    process = launch(args, options)
    kill = kill_rank_1(process, args.run_dir, kill_after)
    print(f"--- SIGKILL to rank 1 after step {kill} ---", flush=True)
    if process.wait():
        raise SystemExit("the killed run did not resume and finish")

    losses, successes = read_log(args.run_dir / "vla.jsonl"), read_log(args.run_dir / "success.jsonl")
    repeated = len(losses) - args.steps
    if repeated <= 0 or not (repeats_are_equal(losses, STEP) and repeats_are_equal(successes, "step")):
        raise SystemExit(f"repeated steps differ, or none was repeated ({repeated} steps repeated)")
    if successes[-1]["success"] <= successes[0]["success"]:
        raise SystemExit("the success rate did not increase")
    plot(losses, successes, kill, args.picture or args.run_dir / "robot.png")
    success = animate(args.run_dir / "policy", args.moving_picture or args.run_dir / "robot.gif", options)
    before, after = successes[0]["success"], successes[-1]["success"]
    results = {"before": before, "after": after, "alone": success, "again": repeated}
    print(
        "success {before:.0%} -> {after:.0%} in {steps} steps; saved policy in one process: {alone:.0%} of {shown}; "
        "{again} steps were repeated, with bitwise equal losses; {seconds:.0f} s".format(
            **results, steps=args.steps, shown=len(SHOWN), seconds=time.monotonic() - started
        )
    )
    return results


# --- train and kill --------------------------------------------------------------------------------------------------


def launch(args: argparse.Namespace, options: Sequence[str]) -> subprocess.Popen:
    """Start the trainer on two ranks, as a user would."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", str(EXAMPLES / "train_vla.py"), "--run-dir", str(args.run_dir)]
    command += ["--steps", str(args.steps), "--save-interval", str(args.save_interval), *options]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


def kill_rank_1(process: subprocess.Popen, run_dir: Path, step: int) -> int:
    """Send SIGKILL to rank 1 once ``step`` has been logged; return the last logged step."""
    while not any(record[STEP] >= step for record in read_log(run_dir / "vla.jsonl")[-1:]):
        if process.poll() is not None:
            raise SystemExit("the run ended before it could be killed")
        time.sleep(0.05)
    os.kill(int((run_dir / "rank1.pid").read_text()), signal.SIGKILL)
    return read_log(run_dir / "vla.jsonl")[-1][STEP]


def read_log(log: Path) -> list[dict[str, float]]:
    """Read the entries that a run has logged; repeated steps appear twice."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def repeats_are_equal(records: list[dict[str, float]], key: str) -> bool:
    """Return whether all records of the same step are equal, ignoring the step time."""
    first: dict[float, dict[str, float]] = {}
    without_time = [{name: value for name, value in record.items() if name != SECONDS} for record in records]
    return all(record == first.setdefault(record[key], record) for record in without_time)


# --- figures ---------------------------------------------------------------------------------------------------------


def plot(losses: list[dict[str, float]], successes: list[dict[str, float]], kill: int, picture: Path) -> None:
    """Plot success and loss over the steps, the kill, and the losses of the repeated steps before and after it."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    logged = [(record[STEP], record[LOSS]) for record in losses]
    restart = next(i for i in range(1, len(logged)) if logged[i][0] <= logged[i - 1][0])
    before, after = logged[:restart], logged[restart:]
    repeated = len(logged) - len(dict(logged))
    figure, panels = plt.subplots(2, figsize=(8, 5), layout="constrained", sharex=True, height_ratios=(1, 1))
    panels[0].plot([e["step"] for e in successes], [e["success"] for e in successes], "o-", color="#1f6fb4")
    panels[0].set_ylabel("share of tables done")
    panels[0].set_ylim(0, 1)
    panels[0].set_title("Robot policy, killed and resumed", fontsize=11, loc="left")
    steps, values = zip(*dict(logged).items(), strict=True)
    window = max(1, len(values) // 100)
    smooth = np.convolve(values, np.ones(window) / window, mode="valid")
    panels[1].plot(steps, values, color="#c9c9c9", linewidth=1)
    panels[1].plot(steps[window - 1 :], smooth, color="#1f6fb4", linewidth=1.8)
    panels[1].set_ylabel("loss")
    panels[1].set_ylim(0, 1.2 * smooth.max())
    panels[1].set_xlabel("step")
    for axes in panels:
        axes.axvline(kill, color="#333333", linewidth=1, linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].annotate("SIGKILL", (kill, 0), textcoords="offset points", xytext=(5, 6), fontsize=9)

    zoom = panels[1].inset_axes((0.54, 0.4, 0.45, 0.46))
    shown = repeated + repeated // 3
    zoom.plot(*zip(*before[-shown:], strict=True), color="#c9c9c9", linewidth=5)
    zoom.plot(*zip(*after[:shown], strict=True), color="#d1495b", linewidth=1.2)
    zoom.axvline(kill, color="#333333", linewidth=1, linestyle=":")
    zoom.set_title(f"{repeated} repeated steps: bitwise equal losses", fontsize=8, loc="left")
    zoom.tick_params(labelsize=7)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130, metadata={"Software": None})


def animate(folder: Path, moving_picture: Path, options: Sequence[str], scale: int = 3, columns: int = 4) -> float:
    """Run a saved policy on tables, write an animation, and return the share of tables that are done."""
    from PIL import Image, ImageDraw

    policy, processor = FlowVLA.from_pretrained(folder), Processor.from_pretrained(folder)
    steps: list[np.ndarray] = []  # each (tables, SIZE, SIZE, 3)
    tables = Tables(SHOWN, distractors="--no-distractors" not in options)
    done = drive(policy, processor, tables, noise_seed=0, watch=lambda now: steps.append(now.images()))
    side, line = scale * SIZE, 14  # pixels of a table, and of the text below it
    frames = []
    for images in steps:
        frame = Image.new("RGB", (columns * (side + 4), -(-len(SHOWN) // columns) * (side + line)), "white")
        for i, (image, text) in enumerate(zip(images, tables.instructions, strict=True)):
            corner = (i % columns * (side + 4), i // columns * (side + line))
            frame.paste(Image.fromarray(image).resize((side, side), Image.Resampling.NEAREST), corner)
            ImageDraw.Draw(frame).text((corner[0] + 2, corner[1] + side + 1), text, "black")
        frames.append(frame.quantize(32))
    moving_picture.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(moving_picture, save_all=True, append_images=frames[1:], duration=150, loop=0, optimize=True)
    return float(done.mean())


def arguments(command_line: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--run-dir", type=Path, default=Path("runs/robot"), help="folder of logs, checkpoints and the policy")
    add("--steps", type=int, default=2500, help="number of optimizer steps")
    add("--save-interval", type=int, default=100, help="steps between checkpoints")
    add("--picture", type=Path, help="file of the figure; by default robot.png in the run's directory")
    add("--moving-picture", type=Path, help="file of the animation; by default robot.gif in the run's directory")
    parser.epilog = "Other options are those of train_vla.py."
    return parser.parse_known_args(command_line)


if __name__ == "__main__":
    run(*arguments())
