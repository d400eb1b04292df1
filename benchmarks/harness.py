"""What the benchmarks share: ranks, turns with seconds, memory and bytes, ratios, and panels of a chart.

All contestants take turns in one process group, in another order each round, so that a machine that slows down slows
them all. Peak memory is the kernel's own (VmHWM, reset before each turn) above what the process held before.
"""

import ctypes
import faulthandler
import gc
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

OUT = Path("runs/benchmarks")
"""Where figures and charts go by default, in the working directory; `--out benchmarks/results` records them."""
THREADS = 4
PIECE = 16 << 20


def become_rank(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("fsdp2_strategy").setLevel(logging.ERROR)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    faulthandler.enable(os.dup(2))
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  progress bars of all contestants
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)


def on_ranks(work: Callable[[int, dict], None], options: dict) -> dict:
    """Run ``work(rank, options)`` in as many processes as the options say; return what rank 0 passed to `finish`."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        paths = {"store": f"{folder}/store", "results": f"{folder}/results.json"}
        mp.spawn(work, ({**options, **paths},), nprocs=options["ranks"])
        return json.loads(Path(paths["results"]).read_text())


def finish(rank: int, options: dict, result: dict) -> None:
    """End a rank; rank 0's result is that of all."""
    if rank == 0:
        Path(options["results"]).write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # gloo can abort an interpreter that is on its way out


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def pieces_of(memory: memoryview, offset: int) -> list[tuple[int, memoryview]]:
    """Cut memory that lies at an offset of a file into parts that threads share."""
    return [(offset + at, memory[at : at + PIECE]) for at in range(0, len(memory), PIECE)]


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def force_to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_WRONLY)
            os.fsync(fd)
            os.close(fd)


def memory_left() -> int:
    """Return the bytes that nobody uses, the same on all ranks."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    left = torch.tensor(int(dict(line.split(":", 1) for line in lines)["MemAvailable"].split()[0]) * 1024)
    dist.broadcast(left, 0)
    return int(left)


def status(name: str, file: str = "status") -> int:
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    value = dict(line.split(":", 1) for line in lines)[name].split()
    return int(value[0]) * (1024 if value[-1] == "kB" else 1)


def turn(call: Callable[[], object], finish: Callable[[object], None] = id) -> dict:
    """Run one contestant on all ranks; return seconds, and this rank's memory and bytes read and written."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    resident, read, written = status("VmRSS"), status("rchar", "io"), status("wchar", "io")
    dist.barrier()
    start = time.perf_counter()
    result = call()
    finish(result)
    dist.barrier()
    end = time.perf_counter()
    return {
        "start": start,
        "end": end,
        "seconds": end - start,
        "peak_bytes": status("VmHWM") - resident,
        "read_bytes": status("rchar", "io") - read,
        "written_bytes": status("wchar", "io") - written,
    }


def attempt(call: Callable[[], dict]) -> list[dict]:
    """Run a contestant and return every rank's outcome; one that cannot do it says why."""
    try:
        outcome = call()
    except (Exception, CheckpointException) as error:  # noqa: BLE001  whatever it says is its result
        outcome = {"error": f"{type(error).__name__}: {error}"[-600:]}
    outcomes: list = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    return outcomes


def in_turns(names: list[str], rounds: int) -> list[str]:
    """Return the names in the order of their turns: in each round another one is the first."""
    return [name for r in range(rounds) for name in names[r % len(names) :] + names[: r % len(names)]]


def error_of(turns: list[list[dict]]) -> str | None:
    return next((rank["error"] for ranks in turns for rank in ranks if "error" in rank), None)


def summary(turns: list[list[dict]]) -> dict:
    """Sum up the rounds of one contestant; one that cannot do it says why."""
    if error := error_of(turns):
        return {"error": error}
    return {
        "seconds": [ranks[0]["seconds"] for ranks in turns],
        "peak_bytes": max(rank["peak_bytes"] for ranks in turns for rank in ranks),
        "read_bytes": statistics.median(sum(rank["read_bytes"] for rank in ranks) for ranks in turns),
        "written_bytes": statistics.median(sum(rank["written_bytes"] for rank in ranks) for ranks in turns),
    }


def ratio(one: list[float], other: list[float]) -> tuple[float, float, float]:
    """Return median and middle half of one contestant's times over another's, turn by turn."""
    ratios = sorted(a / b for a, b in zip(one, other, strict=True))
    return statistics.median(ratios), ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} - {max(seconds):.2f})"


def circumstances() -> dict[str, str]:
    """Return what a figure was measured with."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def merge(results: Path, entry: dict, keys: tuple[str, ...]) -> list[dict]:
    """Put an entry into a file of results, in place of the one with the same keys; return all."""
    results.parent.mkdir(parents=True, exist_ok=True)
    entries = json.loads(results.read_text()) if results.exists() else []
    entries = [e for e in entries if any(e[key] != entry[key] for key in keys)]
    entries.append(entry)
    results.write_text(json.dumps(entries, indent=1) + "\n")
    return entries


def draw(panels: list[tuple[str, dict[str, list[float]]]], picture: Path) -> None:
    """Draw a panel of bars for each title: seconds by contestant, turn by turn."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(9.5, 2.4 * rows), layout="constrained", squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, contestants) in zip(grid.flat, panels, strict=False):
        for row, (name, seconds) in enumerate(contestants.items()):
            color = "#1f6fb4" if name == "ours" else "#c0392b" if name.startswith("raw") else "#999999"
            axes.barh(row, statistics.median(seconds), color=color)
            axes.plot(seconds, [row] * len(seconds), "k.", markersize=3)
        axes.set_yticks(range(len(contestants)), contestants, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("seconds", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=120)
