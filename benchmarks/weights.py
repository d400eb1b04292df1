"""Measure loading a Hugging Face folder into shards, and exporting one: ours, the machine's limit, other libraries.

    python benchmarks/weights.py [--sizes 0.4 1.5] [--ranks 1 2 4] [--rounds 7] [--where disk tmpfs] [--disk DIR]
                                 [--tmpfs DIR] [--only load] [--out DIR] [--smoke]

Loads start from nothing and end with a sharded model, every page of which was written to, as in an optimizer step.
Exports start from a sharded model and end with files that are forced to disk. All contestants take turns in one process
group, in a different order each round. "bare" has one file per rank, see bare.py. After each turn all values are
compared with those of the loaded folder or of the exported model, outside of the timed part. Reads from disk start with
the files dropped from the page cache; bytes read are those of read calls. Writes weights.json and weights.png, prints
tables; earlier results of other configurations stay in the file. `--smoke` runs everything in seconds, with tiny
models.
"""

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import bare
import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import StrategyConfig, init_on_meta, load_weights, save_model, shard_model
from fsdp2_strategy.storage.safetensors_format import read_header

SIZES = ["0.4", "1.5"]


# --- contestants: loading ---------------------------------------------------------------------------------------------


def prepare_bare(source: Path) -> torch.Tensor:
    """Write this rank's rows of every tensor to its own file; return them as one tensor of bytes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = []
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                full = file.get_slice(name)
                rows = full.get_shape()[0]
                a, b = (min(r * -(-rows // ranks), rows) for r in (rank, rank + 1))
                parts.append(full[a:b].reshape(-1).view(torch.uint8))
    own = torch.cat(parts)
    folder = bare_folder(source)
    folder.mkdir(exist_ok=True)
    bare.write(bare.calls_of([own]), folder)
    return own


def bare_folder(source: Path) -> Path:
    """Return the folder of the ranks' own files; the other contestants do not load it."""
    return source.with_name(f"{source.name}-bare")


def bare_read(source: Path, _marks: dict) -> torch.Tensor:
    """Read this rank's own file into new memory, and copy it to the accelerator if there is one."""
    target = harness.pinned(bare.path_in(bare_folder(source)).stat().st_size, dtype=torch.uint8)
    bare.read(bare.calls_of([target]), bare_folder(source))
    return target.to(harness.device())


def ours(folder: Path, marks: dict) -> torch.nn.Module:
    with init_on_meta():
        model = LlamaForCausalLM.from_pretrained(folder)
    shard_model(model, config=StrategyConfig(bf16=False))
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
    """Load everything on rank 0, and broadcast it with torch's state-dict functions."""
    full = LlamaForCausalLM.from_pretrained(folder).state_dict() if dist.get_rank() == 0 else {}
    model = sharded_on_meta(folder)
    model.to_empty(device=harness.device())
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def accelerate_prepare(folder: Path, _marks: dict) -> torch.nn.Module:
    """Load on rank 0, and broadcast with the function of accelerate's FSDP2 preparation."""
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
    model.to_empty(device=harness.device())
    dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(str(folder)))
    return model


LOADERS = {
    "bare": bare_read,
    "ours": ours,
    "rank 0 + broadcast": rank_0_and_broadcast,
    "accelerate": accelerate_prepare,
    "transformers distributed_config": transformers_distributed,
    "DCP Hugging Face reader": dcp_reader,
}


# --- contestants: exporting -------------------------------------------------------------------------------------------


def bare_write(model: torch.nn.Module, folder: Path) -> None:
    parts = [harness.local_of(p.detach()) for p in model.parameters()]
    if torch.accelerator.is_available():
        copies = [harness.pinned(*part.shape, dtype=part.dtype) for part in parts]
        parts = [copy.copy_(part, non_blocking=True) for copy, part in zip(copies, parts, strict=True)]
        harness.synchronize()
    bare.write(bare.calls_of(parts), folder)


def our_export(model: torch.nn.Module, folder: Path) -> None:
    save_model(model, output_dir=folder)


def our_export_to_one_file(model: torch.nn.Module, folder: Path) -> None:
    save_model(model, output_dir=folder, max_shard_size="100GB")


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
    "bare": bare_write,
    "ours": our_export,
    "ours, one file": our_export_to_one_file,
    "gather + save_file": gather_and_save,
    "DCP consolidated writer": dcp_writer,
}


# --- measuring --------------------------------------------------------------------------------------------------------


def check_parts(named: Sequence[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Compare this rank's part of every tensor with the files of a folder, which have these tensors and no others."""
    missing = dict(named)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                if name not in missing:
                    raise harness.ValuesError(
                        f"{path} contains {name}, which the model lacks or another file also contains"
                    )
                tensor = missing.pop(name).detach()
                harness.check_equal(harness.local_of(tensor).cpu(), file.get_slice(name)[_part_of(tensor)], name)
    if missing:
        raise harness.ValuesError(f"{folder} lacks {len(missing)} tensors, for example {next(iter(missing))}")


def _part_of(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return the slices of the full tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(begin, begin + n) for begin, n in zip(offset, shape, strict=True))


@torch.no_grad()
def touch(result: torch.nn.Module | torch.Tensor) -> None:
    """Write to every page of every shard, as the first optimizer step does."""
    for tensor in result.parameters() if isinstance(result, torch.nn.Module) else [result]:
        local = harness.local_of(tensor).reshape(-1)
        local[:: max(1, 4096 // local.element_size())] += 0


def load_turn(name: str, source: Path, expected: str) -> list[dict]:
    """Run a turn of a contestant, and check the loaded values.

    Args:
        name: the contestant.
        source: the folder to load.
        expected: the digest of this rank's bytes, for "bare".
    """
    marks: dict = {}
    loaded: list[torch.nn.Module | torch.Tensor] = []

    def end(result: torch.nn.Module | torch.Tensor) -> None:
        touch(result)
        loaded.append(result)

    def call() -> dict:
        facts = harness.turn(lambda: LOADERS[name](source, marks), end)
        tensors = loaded if name == "bare" else loaded[0].parameters()
        held_bytes = sum(harness.local_of(tensor).nbytes for tensor in tensors)
        return facts | {"core_seconds": facts["end"] - marks.get("start", facts["start"]), "held_bytes": held_bytes}

    def check() -> None:
        if name == "bare":
            harness.check_values({"bare": harness.digest_of(loaded[0])}, {"bare": expected})
        else:
            check_parts(list(loaded[0].named_parameters()), source)

    return harness.attempt(call, check)


def export_turn(name: str, model: torch.nn.Module, out: Path) -> list[dict]:
    """Run a turn of a contestant, and check the written values."""

    def call() -> dict:
        facts = harness.turn(lambda: EXPORTERS[name](model, out))
        return facts | {"core_seconds": facts["seconds"], "held_bytes": 0}

    def check() -> None:
        if name != "bare":
            check_parts(list(model.named_parameters()), out)
            return
        written = {key: harness.local_of(p.detach()).cpu() for key, p in model.named_parameters()}
        read = {key: torch.empty_like(local) for key, local in written.items()}
        bare.read(bare.calls_of(list(read.values())), out)
        for key, local in written.items():
            harness.check_equal(read[key], local, key)

    return harness.attempt(call, check)


def measure(options: dict) -> dict:
    """Load and export a folder with all contestants, or those of the options, in turns; collective."""
    rank, source, out = dist.get_rank(), Path(options["source"]), Path(options["target"])
    contestants = {"load": list(LOADERS), "export": list(EXPORTERS), **options.get("contestants", {})}
    results: dict = {}
    for kind in options["kinds"]:
        model = ours(source, {}) if kind == "export" else None
        expected = harness.digest_of(prepare_bare(source)) if kind == "load" else ""
        for name in harness.turn_order(contestants[kind], options["rounds"], options.get("until")):
            if kind == "load":
                if options["cold"] and rank == 0:
                    harness.drop_from_cache(source)
                    harness.drop_from_cache(bare_folder(source))
                outcomes = load_turn(name, source, expected)
            else:
                if rank == 0:
                    shutil.rmtree(out, ignore_errors=True)
                    out.mkdir(parents=True)
                dist.barrier()
                outcomes = export_turn(name, model, out)
            results.setdefault(kind, {}).setdefault(name, []).append(outcomes)
        del model
        dist.barrier()
        if rank == 0:
            shutil.rmtree(out, ignore_errors=True)
            shutil.rmtree(bare_folder(source), ignore_errors=True)
    return results


def work(rank: int, options: dict) -> None:
    harness.init_rank(rank, options)
    harness.finish(rank, options, measure(options))


def summarise(turns: list) -> dict:
    """Summarise the rounds of one contestant."""
    facts = harness.summary(turns)
    if "error" not in facts:
        facts["core_seconds"] = [ranks[0]["core_seconds"] for ranks in turns]
        facts["extra_bytes"] = max(rank["peak_bytes"] - rank["held_bytes"] for ranks in turns for rank in ranks)
    return facts


def table(entry: dict) -> str:
    """Return the Markdown table of one configuration."""
    contestants = entry["contestants"]
    own, bare_facts = contestants["ours"], contestants["bare"]
    if "error" in own:
        return own["error"]
    lines = [
        f"{entry['kind']}, {entry['size']} B ({entry['payload_bytes'] / 1e9:.2f} GB), {entry['ranks']} ranks, "
        f"{entry['where']}",
        "",
        "| | s: median (min - max) | time / ours: median (middle half) | peak per rank, GB |",
        "|---|---|---|---|",
    ]
    for name, facts in contestants.items():
        if "error" in facts:
            lines.append(f"| {name} | {facts['error'].splitlines()[0][:60]} | | |")
            continue
        s = facts["seconds"]
        middle, low, high = harness.ratio(s, own["seconds"])
        lines.append(
            f"| {name} | {harness.format_times(s)} | {middle:.2f} ({low:.2f} - {high:.2f}) "
            f"| {facts['peak_bytes'] / 1e9:.2f} |"
        )
    if "error" in bare_facts:
        return "\n".join(lines)
    middle, low, high = harness.ratio(own["core_seconds"], bare_facts["core_seconds"])
    lines += ["", f"ours / bare: {middle:.2f} ({low:.2f} - {high:.2f})"]
    if entry["kind"] == "load":
        lines[-1] += f"; bytes read / needed {own['read_bytes'] / entry['payload_bytes']:.4f}"
        lines[-1] += f"; memory in addition to the shard: {own['extra_bytes'] / 2**20:.0f} MiB"
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


def write_model(size: str, folder: Path, *, smoke: bool) -> int:
    """Save a model with random weights; return the bytes of its weights."""
    config = harness.llama_config(size, smoke=smoke)
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_default_dtype(config.dtype)
    with harness.device():
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="100GB")
    torch.set_default_dtype(torch.float32)
    files = folder.glob("*.safetensors")
    return sum(entry.nbytes for path in files for entry in read_header(path).values())


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", default=SIZES, choices=SIZES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--where", nargs="+", default=["disk", "tmpfs"], choices=["disk", "tmpfs"])
    parser.add_argument("--only", choices=["load", "export"])
    args = harness.parse(
        parser,
        smoke={"ranks": [2], "where": ["disk"]},
        scratch_folders={"disk": Path("runs/benchmark"), "tmpfs": Path("/dev/shm/benchmark")},
    )
    entries = []
    for where, size in ((w, s) for w in args.where for s in args.sizes):
        scratch = args.disk if where == "disk" else args.tmpfs
        options = {
            "rounds": args.rounds,
            "smoke": args.smoke,
            "cold": where == "disk",
            "kinds": [args.only] if args.only else ["load", "export"],
            "source": str(scratch / size),
            "target": str(scratch / "out"),
        }
        try:
            payload = write_model(size, scratch / size, smoke=args.smoke)
            for ranks in args.ranks:
                for kind, contestants in harness.run_on_ranks(work, {**options, "ranks": ranks}).items():
                    entry = {"kind": kind, "size": size, "ranks": ranks, "where": where, "payload_bytes": payload}
                    entry |= harness.environment(smoke=args.smoke)
                    entry["contestants"] = {name: summarise(turns) for name, turns in contestants.items()}
                    entries = harness.merge(args.out / "weights.json", entry, ("kind", "size", "ranks", "where"))
                    print(table(entry), end="\n\n", flush=True)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    harness.draw(panels(entries), args.out / "weights.png", smoke=args.smoke)


if __name__ == "__main__":
    main()
