"""Start VITRA's script on two ranks, as published or with the changes that docs/coming_from_vitra.md shows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from helpers.peers import peer

PAGE = Path(__file__).parents[3] / "docs" / "coming_from_vitra.md"
SCRIPT = "scripts/train.py"
RANKS = 2
CHANGES, FROM_VITRA, NEWER = "Changes to the script", "Resume a run of VITRA", "Versions of transformers"
"""Sections of the page that show changes."""


def changes():
    """Return the diffs of the script that the page shows, by the headings of its sections."""
    found = re.findall(
        rf"^## ([^\n]*)|```diff\n--- a/{SCRIPT}\n\+\+\+ b/{SCRIPT}\n(.*?)```", PAGE.read_text(), re.M | re.S
    )
    diffs, heading = {}, ""
    for title, diff in found:
        heading = title or heading
        if diff:
            diffs[heading] = diff
    return diffs


def changed_lines(diff):
    """Return how many lines a diff removes and adds."""
    return tuple(sum(line.startswith(sign) for line in diff.splitlines()) for sign in "-+")


def changed_script(folder, headings):
    """Write the script with the changes of some sections to a folder, and return its path."""
    path = Path(folder) / SCRIPT
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (peer("vitra") / SCRIPT).read_text()
    for heading in headings:
        text = with_changes(text, changes()[heading])
    path.write_text(text)
    return path


def with_changes(text, diff):
    """Apply a diff to a text; each hunk must match it in exactly one place."""
    for hunk in re.split(r"^@@.*@@\n", diff, flags=re.MULTILINE)[1:]:
        before, after = (
            "".join(f"{line[1:]}\n" for line in hunk.splitlines() if line[0] in kept) for kept in (" -", " +")
        )
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def start(
    folder, config, *, strategy="ours", seeded=None, options=None, more=(), patches=(), packages=None, name="record"
):
    """Start the script on two ranks; return the process of the launcher.

    Args:
        folder: the folder of the run.
        config: the path of its configuration.
        strategy: "ours", or "theirs" for the script as published.
        seeded: see `child.record_losses`.
        options: further arguments of our strategy.
        more: sections of the page whose changes are needed, too.
        patches: names of functions of `patches`.
        packages: a folder of packages that precede the installed ones.
        name: the name of the records and of the log.
    """
    source = peer("vitra")
    script = changed_script(folder, (CHANGES, *more)) if strategy == "ours" else source / SCRIPT
    settings = {
        "peer": str(source), "script": str(script), "record": str(Path(folder) / name), "seeded": seeded,
        "options": options or {}, "patches": list(patches),
    }  # fmt: skip
    path = Path(folder) / f"{name}.settings.json"
    path.write_text(json.dumps(settings))
    child = Path(__file__).with_name("child.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "offline"}
    environment |= {"PYTHONPATH": str(packages)} if packages else {}
    with (Path(folder) / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [*command, str(child), str(path), "--config", str(config)],
            env={**os.environ, **environment}, cwd=folder, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def run(folder, config, *, name="record", **options):
    """Run the script; return the losses of each micro-batch of each rank, or raise with what it printed."""
    process = start(folder, config, name=name, **options)
    if process.wait(timeout=400):
        raise AssertionError(f"the script failed:\n{(Path(folder) / f'{name}.log').read_text()[-8000:]}")
    return losses(folder, name)


def kill(process, folder, name="record"):
    """Kill the launcher and the ranks."""
    process.kill()
    for rank in range(RANKS):
        os.kill(int((Path(folder) / f"{name}.{rank}.pid").read_text()), signal.SIGKILL)
    process.wait()


def checkpoints(folder):
    """Return the folder with the checkpoints of a run."""
    (run_dir,) = (Path(folder) / "checkpoints").iterdir()
    return run_dir / "checkpoints"


def losses(folder, name="record"):
    """Return the recorded losses: a list of micro-batches for each rank."""
    files = [Path(folder) / f"{name}.{rank}.jsonl" for rank in range(RANKS)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
