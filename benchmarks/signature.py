"""Measure what a key costs: saves and loads of a checkpoint that is signed, compared with one that is not.

    python benchmarks/signature.py [--ranks 2] [--rounds 7] [--disk DIR] [--out DIR] [--smoke]

Ranks save fp32 weights of 1 GB and load them again, from the page cache, with and without a key in turn. Writes
signature.json, prints a table. `--smoke` runs everything in seconds, with a tiny model.
"""

import os
import shutil
import statistics
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from torch import nn

from fsdp2_strategy import StrategyConfig, load_checkpoint, save_checkpoint, shard_model


def work(rank: int, options: dict) -> None:
    harness.init_rank(rank, options)
    side, layers = (64, 2) if options["smoke"] else (2048, 64)
    model = shard_model(
        nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(layers))), config=StrategyConfig(bf16=False)
    )
    folder, key_file = Path(options["disk"]), Path(options["disk"]) / "key"
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(key_file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(os.urandom(32))
    dist.barrier()
    seconds: dict[str, list[float]] = {
        f"{what} {how}": [] for what in ("save", "load") for how in ("unsigned", "signed")
    }
    for turn in range(options["rounds"] + 1):
        for how, key in (("unsigned", None), ("signed", key_file)):
            save = harness.seconds_of(lambda key=key: save_checkpoint(model, folder / "ckpts", "one", key_file=key))
            load = harness.seconds_of(lambda key=key: load_checkpoint(model, folder / "ckpts", key_file=key))
            if turn:  # the first one warms up
                seconds[f"save {how}"].append(save)
                seconds[f"load {how}"].append(load)
    nbytes = sum(p.numel() * p.itemsize for p in model.parameters())
    harness.finish(rank, options, {"bytes": nbytes, "seconds": seconds})


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    args = harness.parse(parser, smoke={}, scratch_folders={"disk": Path("runs/signature")})
    options = {name: getattr(args, name) for name in ("ranks", "rounds", "smoke")}
    result = harness.run_on_ranks(work, options | {"disk": str(args.disk)})
    shutil.rmtree(args.disk, ignore_errors=True)
    of = result["seconds"]
    result["ratio of medians"] = {
        what: statistics.median(of[f"{what} signed"]) / statistics.median(of[f"{what} unsigned"])
        for what in ("save", "load")
    }
    entry = {"ranks": args.ranks, **harness.environment(smoke=args.smoke), **result}
    harness.merge(args.out / "signature.json", entry, ("ranks", "hardware"))
    for name, times in of.items():
        print(f"{name}: {statistics.median(times):.2f} s ({min(times):.2f} - {max(times):.2f})")
    print(f"ratios: {result['ratio of medians']}, {result['bytes'] / 1e9:.2f} GB, {torch.__version__}")


if __name__ == "__main__":
    main()
