"""Measure the backend for torch.distributed.checkpoint against torch's own writers and readers.

    python benchmarks/dcp.py [--ranks 2] [--rounds 7] [--megabytes 1000] [--disk DIR] [--out DIR] [--smoke]

Ranks save a state dict of sharded fp32 tensors with `dcp.save`, each time into a new folder, and load it again with
`dcp.load`, in turn with each backend: ours; torch's default (``.distcp`` files); and torch's Hugging Face writer, which
consolidates the files, with its reader. All flush to disk, ours also computes and compares checksums. The loaded values
are compared. Writes dcp.json, prints a table. `--smoke` runs everything in seconds, with tiny tensors.
"""

import shutil
import statistics
from pathlib import Path

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp2_strategy.storage import LocalLoadPlanner, LocalSavePlanner, SafetensorsReader, SafetensorsWriter

TENSORS = 64


def save(backend: str, state: dict, path: Path) -> None:
    if backend == "ours":
        dcp.save(state, storage_writer=SafetensorsWriter(path), planner=LocalSavePlanner())
    elif backend == "dcp":
        dcp.save(state, storage_writer=FileSystemWriter(path))
    else:
        dcp.save(
            state, storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)
        )


def load(backend: str, state: dict, path: Path) -> None:
    if backend == "ours":
        dcp.load(state, storage_reader=SafetensorsReader(path), planner=LocalLoadPlanner())
    elif backend == "dcp":
        dcp.load(state, storage_reader=FileSystemReader(path))
    else:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)))


def work(rank: int, options: dict) -> None:
    harness.init_rank(rank, options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = max(8, options["megabytes"] * 10**6 // 4 // 1024 // TENSORS)
    torch.manual_seed(0)
    full = [torch.randn(rows, 1024) for _ in range(TENSORS)]
    state = {f"layer{i}.weight": distribute_tensor(tensor, mesh, [Shard(0)]) for i, tensor in enumerate(full)}
    expected = {name: tensor.to_local().clone() for name, tensor in state.items()}
    del full
    folder = Path(options["disk"])
    backends = ("ours", "dcp", "hf")
    seconds: dict[str, list[float]] = {f"{what} {each}": [] for what in ("save", "load") for each in backends}
    for turn in range(options["rounds"] + 1):
        for backend in backends:
            path = folder / backend
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir(parents=True)
            saving = harness.seconds_of(lambda backend=backend, path=path: save(backend, state, path))
            for tensor in state.values():
                tensor.to_local().zero_()
            loading = harness.seconds_of(lambda backend=backend, path=path: load(backend, state, path))
            for name, tensor in state.items():
                harness.check_equal(tensor.to_local(), expected[name], f"{backend}: {name}")
            if turn:  # the first one warms up
                seconds[f"save {backend}"].append(saving)
                seconds[f"load {backend}"].append(loading)
    harness.finish(rank, options, {"bytes": TENSORS * rows * 4096, "seconds": seconds})


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=1000)
    args = harness.parse(parser, smoke={"megabytes": 1}, scratch_folders={"disk": Path("/dev/shm/dcp")})
    options = {name: getattr(args, name) for name in ("ranks", "rounds", "smoke", "megabytes")}
    result = harness.run_on_ranks(work, options | {"disk": str(args.disk)})
    shutil.rmtree(args.disk, ignore_errors=True)
    of = result["seconds"]
    result["times ours"] = {
        f"{what} {other}": harness.ratio(of[f"{what} {other}"], of[f"{what} ours"])
        for what in ("save", "load")
        for other in ("dcp", "hf")
    }
    entry = {"ranks": args.ranks, "megabytes": args.megabytes, **harness.environment(smoke=args.smoke), **result}
    harness.merge(args.out / "dcp.json", entry, ("ranks", "megabytes", "hardware"))
    for name, times in of.items():
        print(f"{name}: {statistics.median(times):.2f} s ({min(times):.2f} - {max(times):.2f})")
    for name, (median, low, high) in result["times ours"].items():
        print(f"{name}: {median:.2f} times ours ({low:.2f} - {high:.2f})")


if __name__ == "__main__":
    main()
