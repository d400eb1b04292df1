"""Provide the shared parts of all benchmarks: options, ranks, timed turns, checks of values, ratios, charts.

All contestants take turns on the same ranks, in a different order each round, so that a slow phase of the machine
affects all of them. The barriers around a turn are on the harness's own process group, separate from the contestants'
collectives. Peak memory is the kernel's VmHWM, reset before each turn, minus the memory of the process at that time. If
there is an accelerator, a turn ends when its work is done, and the peak of its memory is measured in the same way.

After the timed part of a turn, all values that it moved are checked. If the check fails, the result is an error.
"""

import argparse
import atexit
import ctypes
import faulthandler
import gc
import json
import logging
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import LlamaConfig, MixtralConfig

from fsdp2_strategy.storage.safetensors_format import memory_of

OUT = Path("runs/benchmarks")
"""Default folder for results and charts, in the working directory; `--out benchmarks/results` records them."""
PRELOADED = [
    "torch",
    "transformers.models.llama.modeling_llama",
    "fsdp2_strategy.strategy",
    "fsdp2_strategy.integrations.vitra",
]
"""Modules that take seconds to import: ranks are forked from a process that has imported them."""
PROBE_SECONDS = 60
MAX_NAMES = 2
"""Maximum number of wrong tensors that an error names."""
LEAST_ROUNDS = 3
"""Rounds that are run also if they take longer than the time that is left."""
SMOKE_TITLE = "smoke run at tiny sizes: the figures mean nothing"


# --- options ----------------------------------------------------------------------------------------------------------


def parser_of(description: str) -> argparse.ArgumentParser:
    """Create a parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for results and charts")
    parser.add_argument(
        "--smoke", action="store_true", help="run everything in seconds at tiny sizes: the figures mean nothing"
    )
    return parser


def parse(
    parser: argparse.ArgumentParser, smoke: Mapping[str, Any], scratch_folders: Mapping[str, Path] | None = None
) -> argparse.Namespace:
    """Parse the command line, and create the output folder.

    Args:
        parser: created by `parser_of`, with the benchmark's own options added.
        smoke: defaults of the benchmark's options with ``--smoke``, which runs one round.
        scratch_folders: options that name a folder for temporary data, with their defaults. With ``--smoke`` these
            folders are under ``--out`` and deleted at the end.
    """
    scratch_folders = scratch_folders or {}
    for name, folder in scratch_folders.items():
        parser.add_argument(f"--{name}", type=Path, default=folder, help=f"temporary folder, default: {folder}")
    args = parser.parse_args()
    if args.smoke:
        parser.set_defaults(rounds=1, out=OUT / "smoke", **smoke)
        scratch = parser.parse_args().out / "scratch"
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        parser.set_defaults(**{name: scratch / name for name in scratch_folders})
        args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / f"{Path(parser.prog).stem}.json"
    if results.exists() and _is_smoke(json.loads(results.read_text())) != args.smoke:
        kinds = ("measured figures", "figures of a smoke run")[:: -1 if args.smoke else 1]
        parser.error(f"cannot add {kinds[0]} to {results}: it holds {kinds[1]}. Choose another --out.")
    return args


def _is_smoke(entries: dict | list[dict]) -> bool:
    return any(entry.get("smoke", False) for entry in (entries if isinstance(entries, list) else [entries]))


# --- ranks ------------------------------------------------------------------------------------------------------------


def init_rank(rank: int, options: dict) -> None:
    """Join the benchmark's process group, with the options that `run_on_ranks` completed."""
    ranks = options["ranks"]
    torch.set_num_threads(1)
    if options["smoke"]:
        gc.freeze()  # garbage collection before each turn would take longer than the turn
    tqdm.set_lock(threading.RLock())  # the default lock is a named semaphore, which `os._exit` does not remove
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("fsdp2_strategy").setLevel(logging.ERROR)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    faulthandler.enable(os.dup(2))
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  hides the progress bars of all contestants
    backend = "gloo"
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(rank)
        kind = device().type
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    dist.init_process_group(backend, store=dist.FileStore(options["store"], ranks), rank=rank, world_size=ranks)
    harness_group()


@cache
def harness_group() -> dist.ProcessGroup:
    """Return the harness's process group, which no contestant uses; the first call is collective."""
    return dist.new_group(backend="gloo")


def run_on_ranks(work: Callable[[int, dict], None], options: dict) -> dict:
    """Run ``work(rank, options)`` in ``options["ranks"]`` processes; return what rank 0 passed to `finish`."""
    method = start_method()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        paths = {"store": f"{folder}/store", "results": f"{folder}/results.json"}
        mp.start_processes(work, ({**options, **paths},), nprocs=options["ranks"], start_method=method)
        return json.loads(Path(paths["results"]).read_text())


@cache
def start_method() -> str:
    """Return how ranks are started: forked from a process that has done the imports, or spawned if CUDA fails there.

    CUDA can be used in a forked process if nothing initialised it in the process that was forked. A probe tries it.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    if not torch.accelerator.is_available():
        return "forkserver"
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # `is_available` then does not initialise CUDA
    probe = context.Process(target=_use_accelerator)
    probe.start()
    probe.join(PROBE_SECONDS)
    works = probe.exitcode == 0
    probe.kill()
    return "forkserver" if works else "spawn"


def _use_accelerator() -> None:
    torch.zeros(1, device=device()).item()


def finish(rank: int, options: dict, result: dict) -> None:
    """Write the result of rank 0, wait for all ranks, and exit the process."""
    if rank == 0:
        Path(options["results"]).write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # gloo can abort while the interpreter shuts down


def device() -> torch.device:
    """Return this rank's accelerator, or the CPU if there is none."""
    found = torch.accelerator.current_accelerator()
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def synchronize() -> None:
    """Wait until the accelerator, if there is one, has done its work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def allocated() -> int | None:
    """Return the bytes of this rank's tensors on the accelerator; None if there is none."""
    return torch.accelerator.memory_allocated() if torch.accelerator.is_available() else None


def pinned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor in host memory, pinned if there is an accelerator."""
    return torch.empty(shape, dtype=dtype, pin_memory=torch.accelerator.is_available())


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def mixtral_config(*, smoke: bool) -> MixtralConfig:
    """Configure a Mixtral of 0.4 billion fp32 parameters, or a tiny one."""
    shape, vocab_size = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6}, 32000
    if smoke:
        shape, vocab_size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}, 128
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    return MixtralConfig(**shape, **heads, num_local_experts=8, vocab_size=vocab_size, dtype=torch.float32)


def llama_config(size: str, *, smoke: bool) -> LlamaConfig:
    """Configure a Llama of 0.4 billion fp32 or 1.5 billion bf16 parameters, or a tiny one of the same dtype."""
    shape, dtype = {
        "0.4": ({"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 22}, torch.float32),
        "1.5": ({"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 29}, torch.bfloat16),
    }[size]
    vocab_size = 32000
    if smoke:
        shape, vocab_size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}, 128
    return LlamaConfig(**shape, num_attention_heads=16, num_key_value_heads=8, vocab_size=vocab_size, dtype=dtype)


# --- files and memory -------------------------------------------------------------------------------------------------


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


def available_bytes() -> int:
    """Return the available memory in bytes as rank 0 reads it; collective."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = torch.tensor(int(dict(line.split(":", 1) for line in lines)["MemAvailable"].split()[0]) * 1024)
    dist.broadcast(available, 0)
    return int(available)


def proc_value(name: str, file: str = "status") -> int:
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    value = dict(line.split(":", 1) for line in lines)[name].split()
    return int(value[0]) * (1024 if value[-1] == "kB" else 1)


def loopback_bytes() -> int:
    """Return how many bytes all processes of this machine have sent to each other over the network so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


# --- values -----------------------------------------------------------------------------------------------------------


class ValuesError(Exception):
    """A contestant produced other values than expected."""


@torch.no_grad()
def fill(tensors: Sequence[torch.Tensor]) -> None:
    """Fill this rank's part of each tensor with values that differ between tensors and parts; replicas are equal."""
    ranks = dist.get_world_size()
    for i, tensor in enumerate(tensors):
        flat, rank = local_of(tensor).reshape(-1), part_of(tensor)
        # Much faster than a random generator.
        torch.arange(flat.numel(), dtype=torch.float32, out=(scratch := torch.empty(0)))
        flat.copy_(scratch.mul_(1e-6).add_(0.01 + 0.001 * (i * ranks + rank)))


def part_of(tensor: torch.Tensor) -> int:
    """Return the number of this rank's part of a tensor: the rank, or its position in a mesh of some of the ranks."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank()
    position = 0
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            position = position * tensor.device_mesh.size(axis) + tensor.device_mesh.get_local_rank(axis)
    return position


def digest_of(tensor: torch.Tensor) -> str:
    """Return the dtype, the shape and a checksum of all bytes of this rank's part of a tensor."""
    local = local_of(tensor.detach()).cpu().contiguous()
    return f"{local.dtype} {list(local.shape)} {xxhash.xxh3_64_hexdigest(memory_of(local) if local.numel() else b'')}"


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest_of(tensor) for name, tensor in tensors.items()}


def check_values(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Compare digests by name.

    Raises:
        ValuesError: a digest differs, is missing, or is not expected.
    """
    names = [*expected, *(found.keys() - expected.keys())]
    wrong = [name for name in names if found.get(name) != expected.get(name)]
    if wrong:
        some = ", ".join(wrong[:MAX_NAMES]) + ", ..." * (len(wrong) > MAX_NAMES)
        raise ValuesError(f"{len(wrong)} of {len(names)} tensors do not have the values that were saved: {some}")


def check_equal(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Compare values, dtypes and shapes.

    Raises:
        ValuesError: they differ.
    """
    if found.dtype != expected.dtype or not torch.equal(found, expected):
        raise ValuesError(f"{name} does not have the expected values, dtype and shape")


# --- turns ------------------------------------------------------------------------------------------------------------


def seconds_of(call: Callable[[], object]) -> float:
    """Return how long a call takes on all ranks; collective."""
    dist.barrier()
    begun = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - begun


def turn(call: Callable[[], object], finish: Callable[[object], None] = id) -> dict:
    """Run one contestant on all ranks; return seconds, and this rank's peak memory and bytes read and written."""
    gc.collect()
    synchronize()
    held = allocated()
    if held is not None:
        torch.accelerator.reset_peak_memory_stats()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    resident, read, written = proc_value("VmRSS"), proc_value("rchar", "io"), proc_value("wchar", "io")
    moved = loopback_bytes()
    dist.barrier(harness_group())
    start = time.perf_counter()
    try:
        result = call()
        finish(result)
        synchronize()
    finally:
        dist.barrier(harness_group())  # also after an error: other ranks may have none
    end = time.perf_counter()
    return {
        "start": start,
        "end": end,
        "seconds": end - start,
        "peak_bytes": proc_value("VmHWM") - resident,
        "device_peak_bytes": None if held is None else torch.accelerator.max_memory_allocated() - held,
        "read_bytes": proc_value("rchar", "io") - read,
        "written_bytes": proc_value("wchar", "io") - written,
        "moved_bytes": loopback_bytes() - moved,
    }


def attempt(call: Callable[[], dict], check: Callable[[], object] = int) -> list[dict]:
    """Run a turn and check its values; return the outcome or error of every rank; collective.

    Args:
        call: the turn.
        check: raises if values are wrong. It runs no collective, because other ranks may have failed before it.
    """
    try:
        outcome = call()
        check()
    except ModuleNotFoundError as error:
        outcome = {"error": f"not installed: {error.name}"}
    except (Exception, CheckpointException) as error:  # noqa: BLE001  every error is a result
        outcome = {"error": f"{type(error).__name__}: {error}"[-600:]}
    outcomes: list = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome, harness_group())
    return outcomes


def of_device(outcomes: list[dict]) -> list[dict]:
    """Replace the peaks of host memory by those of the accelerator, if there is one."""
    for outcome in outcomes:
        if outcome.get("device_peak_bytes") is not None:
            outcome["peak_bytes"] = outcome["device_peak_bytes"]
    return outcomes


def turn_order(names: list[str], rounds: int, until: float | None = None) -> Iterator[str]:
    """Yield the names in the order of their turns; each round begins with a different name.

    Args:
        names: the contestants.
        rounds: the number of rounds.
        until: a time of `time.monotonic`: no round begins that would end later if it takes as long as the longest
            round so far, but `LEAST_ROUNDS` are always run. The iteration is then collective, and rank 0 decides.
    """
    longest = 0.0
    for r in range(rounds):
        begin = time.monotonic()
        if until is not None and r >= LEAST_ROUNDS:
            is_late = torch.tensor(begin + longest > until)
            dist.broadcast(is_late, 0, harness_group())
            if is_late:
                return
        yield from names[r % len(names) :] + names[: r % len(names)]
        longest = max(longest, time.monotonic() - begin)


def error_of(turns: list[list[dict]]) -> str | None:
    return next((rank["error"] for ranks in turns for rank in ranks if "error" in rank), None)


def summary(turns: list[list[dict]]) -> dict:
    """Summarise the rounds of one contestant, or return its first error."""
    if error := error_of(turns):
        return {"error": error}
    return {
        "seconds": [ranks[0]["seconds"] for ranks in turns],
        "peak_bytes": max(rank["peak_bytes"] for ranks in turns for rank in ranks),
        "read_bytes": statistics.median(sum(rank["read_bytes"] for rank in ranks) for ranks in turns),
        "written_bytes": statistics.median(sum(rank["written_bytes"] for rank in ranks) for ranks in turns),
        "moved_bytes": statistics.median(ranks[0]["moved_bytes"] for ranks in turns),
    } | _device_peak(turns)


def _device_peak(turns: list[list[dict]]) -> dict[str, int]:
    peaks = [rank["device_peak_bytes"] for ranks in turns for rank in ranks]
    return {} if None in peaks else {"device_peak_bytes": max(peaks)}


def ratio(one: list[float], other: list[float]) -> tuple[float, float, float]:
    """Return the median and the middle half of the ratios of two contestants' times, turn by turn."""
    ratios = sorted(a / b for a, b in zip(one, other, strict=True))
    return statistics.median(ratios), ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]


def format_times(seconds: list[float], digits: int = 2) -> str:
    """Format the median, the minimum and the maximum."""
    return f"{statistics.median(seconds):.{digits}f} ({min(seconds):.{digits}f} - {max(seconds):.{digits}f})"


# --- results ----------------------------------------------------------------------------------------------------------


def environment(*, smoke: bool) -> dict[str, str | bool]:
    """Return the command, commit, date, hardware and versions of a measurement, and whether it is a smoke run."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "smoke": smoke,
        "command": " ".join(["python", *sys.argv]),
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": torch.get_device_module().get_device_name()
        if torch.accelerator.is_available()
        else f"{os.cpu_count()} CPU cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def merge(results: Path, entry: dict, keys: tuple[str, ...]) -> list[dict]:
    """Add an entry to a file of results, replacing the entry with the same keys; return all entries."""
    results.parent.mkdir(parents=True, exist_ok=True)
    entries = json.loads(results.read_text()) if results.exists() else []
    entries = [e for e in entries if any(e[key] != entry[key] for key in keys)]
    entries.append(entry)
    results.write_text(json.dumps(entries, indent=1) + "\n")
    return entries


def draw(panels: list[tuple[str, dict[str, list[float]]]], path: Path, *, smoke: bool) -> None:
    """Draw a bar chart for each panel: the median seconds of each contestant, and a dot for each turn."""
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
            color = "#1f6fb4" if name == "ours" else "#c0392b" if name.startswith("bare") else "#999999"
            axes.barh(row, statistics.median(seconds), color=color)
            axes.plot(seconds, [row] * len(seconds), "k.", markersize=3)
        axes.set_yticks(range(len(contestants)), contestants, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("seconds", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    if smoke:
        figure.suptitle(SMOKE_TITLE, fontsize=9)
    figure.savefig(path, dpi=120)
