"""Loading a Hugging Face folder into shards, and exporting one, against the bare machine and the other ways.

    python benchmarks/weights.py [--sizes 0.4 1.5] [--ranks 1 2 4] [--rounds 5] [--disk DIR] [--tmpfs DIR] [--only load]

Each contestant goes from nothing to a sharded model whose every page was written to, as a step would, or from a
sharded model to files that are forced to disk; all of them take turns in one process group, in another order each
round. Reads from disk begin with the files dropped from the page cache; bytes read are those of the read calls. Writes
weights.json and weights.png, prints tables; configurations that were measured before and not now stay in the file.
"""

import argparse
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from harness import (
    OUT,
    THREADS,
    attempt,
    become_rank,
    circumstances,
    draw,
    drop_from_cache,
    in_turns,
    local_of,
    merge,
    pieces_of,
    ratio,
    spread,
    summary,
    turn,
)
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import init_on_meta, load_weights, save_model, shard_model
from fsdp2_strategy.hf.container import memory_of, read_header, read_into, write_from

CONFIGS = {
    "0.4": ({"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 22}, torch.float32),
    "1.5": ({"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 29}, torch.bfloat16),
}


def config_of(size: str) -> LlamaConfig:
    shape, dtype = CONFIGS[size]
    return LlamaConfig(**shape, num_attention_heads=16, num_key_value_heads=8, vocab_size=32000, dtype=dtype)


# --- contestants: loading ---------------------------------------------------------------------------------------------


def raw_read(folder: Path, marks: dict) -> object:
    """Read the bytes of this rank's rows of every tensor into fresh memory."""
    entries = list(read_header(folder / "model.safetensors").values())
    fd = os.open(folder / "model.safetensors", os.O_RDONLY)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    marks["start"] = time.perf_counter()
    buffers, jobs = [], []
    for entry in entries:
        rows = entry.shape[0]
        a, b = (min(r * -(-rows // ranks), rows) for r in (rank, rank + 1))
        buffers.append(torch.empty((b - a) * (entry.nbytes // rows), dtype=torch.uint8))
        jobs += pieces_of(memory_of(buffers[-1]), entry.offset + a * (entry.nbytes // rows))
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda job: read_into(fd, *job), jobs))
    os.close(fd)
    return buffers


def ours(folder: Path, marks: dict) -> torch.nn.Module:
    with init_on_meta():
        model = LlamaForCausalLM.from_pretrained(folder)
    shard_model(model, bf16=False)
    dist.barrier()
    marks["start"] = time.perf_counter()
    load_weights(model)
    return model


def sharded_on_meta(folder: Path) -> torch.nn.Module:
    config = LlamaConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(config.dtype)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def rank_0_and_broadcast(folder: Path, _marks: dict) -> torch.nn.Module:
    """Load everything on rank 0 and let torch's state-dict functions hand it round."""
    full = LlamaForCausalLM.from_pretrained(folder).state_dict() if dist.get_rank() == 0 else {}
    model = sharded_on_meta(folder)
    model.to_empty(device="cpu")
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def accelerate_prepare(folder: Path, _marks: dict) -> torch.nn.Module:
    """Load on rank 0 and hand round as accelerate's FSDP2 preparation does, by its own function."""
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    main = dist.get_rank() == 0
    full = LlamaForCausalLM.from_pretrained(folder).state_dict() if main else {}
    model = sharded_on_meta(folder)
    return fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=main), model, full)


def transformers_distributed(folder: Path, _marks: dict) -> torch.nn.Module:
    from transformers.distributed import DistributedConfig

    return LlamaForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(fsdp_size=dist.get_world_size())
    )


def dcp_reader(folder: Path, _marks: dict) -> torch.nn.Module:
    model = sharded_on_meta(folder)
    model.to_empty(device="cpu")
    dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(str(folder)))
    return model


LOADERS = {
    "raw preadv": raw_read,
    "ours": ours,
    "rank 0 + broadcast": rank_0_and_broadcast,
    "accelerate": accelerate_prepare,
    "transformers distributed_config": transformers_distributed,
    "DCP Hugging Face reader": dcp_reader,
}


# --- contestants: exporting -------------------------------------------------------------------------------------------


def raw_write(model: torch.nn.Module, folder: Path) -> None:
    """Write this rank's bytes one after the other to its part of one file, and force them to disk."""
    path = folder / "raw"
    locals_ = [p.to_local() for p in model.parameters()]
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, sum(t.nbytes for t in locals_))
    if dist.get_rank() == 0:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, sum(sizes))
    dist.barrier()
    fd = os.open(path, os.O_WRONLY)
    jobs, at = [], sum(sizes[: dist.get_rank()])
    for tensor in locals_:
        jobs += pieces_of(memory_of(tensor), at)
        at += tensor.nbytes
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda job: write_from(fd, *job), jobs))
    os.fsync(fd)
    os.close(fd)


def our_export(model: torch.nn.Module, folder: Path) -> None:
    save_model(model, None, folder, max_shard_size="100GB")


def gather_and_save(model: torch.nn.Module, folder: Path) -> None:
    state = {}
    for name, parameter in model.named_parameters():
        full = parameter.detach().full_tensor()
        if dist.get_rank() == 0:
            state[name] = full
    if state:
        save_file(state, folder / "model.safetensors")
        with (folder / "model.safetensors").open("r+b") as file:
            os.fsync(file.fileno())


def dcp_writer(model: torch.nn.Module, folder: Path) -> None:
    names = dict.fromkeys(dict(model.named_parameters()), 1)
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=names, save_distributed=True, enable_consolidation=True
    )
    dcp.save(dict(model.named_parameters()), storage_writer=writer)


EXPORTERS = {
    "raw pwrite + fsync": raw_write,
    "ours": our_export,
    "gather + save_file": gather_and_save,
    "DCP consolidated writer": dcp_writer,
}


# --- measuring --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def touch(result: object) -> None:
    """Write to every page of every shard, as the first optimizer step does."""
    for tensor in result.parameters() if isinstance(result, torch.nn.Module) else result or ():
        local = local_of(tensor).reshape(-1)
        local[:: max(1, 4096 // local.element_size())] += 0


def load_turn(name: str, source: Path) -> dict:
    marks: dict = {}
    held: list[int] = []

    def finish(result: object) -> None:
        touch(result)
        if isinstance(result, torch.nn.Module):
            held.append(sum(local_of(p).nbytes for p in result.parameters()))

    facts = turn(lambda: LOADERS[name](source, marks), finish)
    return facts | {"core_seconds": facts["end"] - marks.get("start", facts["start"]), "held_bytes": sum(held)}


def export_turn(name: str, model: torch.nn.Module, out: Path) -> dict:
    facts = turn(lambda: EXPORTERS[name](model, out))
    return facts | {"core_seconds": facts["seconds"], "held_bytes": 0}


def work(rank: int, ranks: int, options: dict) -> None:
    become_rank(rank, ranks, options["store"])
    source, out = Path(options["source"]), Path(options["out"])
    results: dict = {}
    for kind in options["kinds"]:
        model = ours(source, {}) if kind == "export" else None
        for name in in_turns(list(LOADERS if kind == "load" else EXPORTERS), options["rounds"]):
            if kind == "load":
                if options["cold"] and rank == 0:
                    drop_from_cache(source)
                outcomes = attempt(lambda n=name: load_turn(n, source))
            else:
                if rank == 0:
                    shutil.rmtree(out, ignore_errors=True)
                    out.mkdir(parents=True)
                dist.barrier()
                outcomes = attempt(lambda n=name, m=model: export_turn(n, m, out))
            results.setdefault(kind, {}).setdefault(name, []).append(outcomes)
        del model
    if rank == 0:
        shutil.rmtree(out, ignore_errors=True)
        Path(options["results"]).write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # gloo can abort an interpreter that is on its way out


def summed_up(turns: list) -> dict:
    """Sum up the rounds of one contestant."""
    facts = summary(turns)
    if "error" not in facts:
        facts["core_seconds"] = [ranks[0]["core_seconds"] for ranks in turns]
        facts["extra_bytes"] = max(rank["peak_bytes"] - rank["held_bytes"] for ranks in turns for rank in ranks)
    return facts


def table(entry: dict) -> str:
    """Return one configuration's table, in Markdown."""
    contestants = entry["contestants"]
    own, bare = contestants["ours"], next(iter(contestants.values()))
    if "error" in own:
        return own["error"]
    lines = [
        f"{entry['kind']}, {entry['size']} B ({entry['payload_bytes'] / 1e9:.2f} GB), {entry['ranks']} ranks, "
        f"{entry['where']}",
        "",
        "| | s, median (least - most) | time / ours, median (middle half) | peak a rank, GB |",
        "|---|---|---|---|",
    ]
    for name, facts in contestants.items():
        if "error" in facts:
            lines.append(f"| {name} | {facts['error'].splitlines()[0][:60]} | | |")
            continue
        s = facts["seconds"]
        middle, low, high = ratio(s, own["seconds"])
        lines.append(
            f"| {name} | {spread(s)} | {middle:.2f} ({low:.2f} - {high:.2f}) | {facts['peak_bytes'] / 1e9:.2f} |"
        )
    middle, low, high = ratio(own["core_seconds"], bare["core_seconds"])
    lines += ["", f"ours / bare machine: {middle:.2f} ({low:.2f} - {high:.2f})"]
    if entry["kind"] == "load":
        lines[-1] += f"; bytes read / needed {own['read_bytes'] / entry['payload_bytes']:.4f}"
        lines[-1] += f"; held beyond the shard {own['extra_bytes'] / 2**20:.0f} MiB"
    return "\n".join(lines)


def panels(entries: list[dict]) -> list[tuple[str, dict[str, list[float]]]]:
    chosen = [e for e in entries if e["ranks"] == 2 and e["where"] == "tmpfs"] or entries[:2]
    chosen.sort(key=lambda e: (e["kind"] != "load", e["size"]))
    return [
        (
            f"{e['kind']}, {e['size']} B, {e['ranks']} ranks, {e['where']}",
            {name: facts["seconds"] for name, facts in e["contestants"].items() if "error" not in facts},
        )
        for e in chosen
    ]


def make(size: str, folder: Path) -> int:
    """Save a model of random weights, once; return the bytes of its weights."""
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.set_default_dtype(CONFIGS[size][1])
        LlamaForCausalLM(config_of(size)).save_pretrained(folder, max_shard_size="100GB")
        torch.set_default_dtype(torch.float32)
    return sum(entry.nbytes for entry in read_header(folder / "model.safetensors").values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm/benchmark"))
    parser.add_argument("--where", nargs="+", default=["disk", "tmpfs"], choices=["disk", "tmpfs"])
    parser.add_argument("--only", choices=["load", "export"])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "weights.json"
    entries = []
    for where in args.where:
        place = args.disk if where == "disk" else args.tmpfs
        for size in args.sizes:
            payload = make(size, place / size)
            for ranks in args.ranks:
                measured = place / "results.json"
                options = {
                    "size": size,
                    "rounds": args.rounds,
                    "cold": where == "disk",
                    "kinds": [args.only] if args.only else ["load", "export"],
                    "source": str(place / size),
                    "out": str(place / "out"),
                    "store": str(place / f"store-{os.getpid()}-{size}-{ranks}"),
                    "results": str(measured),
                }
                mp.spawn(work, (ranks, options), nprocs=ranks)
                for kind, contestants in json.loads(measured.read_text()).items():
                    entry = {"kind": kind, "size": size, "ranks": ranks, "where": where, "payload_bytes": payload}
                    entry |= circumstances()
                    entry["contestants"] = {name: summed_up(turns) for name, turns in contestants.items()}
                    entries = merge(results, entry, ("kind", "size", "ranks", "where"))
                    print(table(entry), end="\n\n", flush=True)
            shutil.rmtree(place / size)
        shutil.rmtree(place, ignore_errors=True)
    draw(panels(entries), args.out / "weights.png")


if __name__ == "__main__":
    main()
