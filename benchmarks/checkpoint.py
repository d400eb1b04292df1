"""Saving and loading sharded checkpoints, against the bare machine and the other ways.

    python benchmarks/checkpoint.py [--cases model-0.4 adam-0.4 model-1.5 model-small adam-small] [--ranks 2 4]
                                    [--rounds 5] [--where disk tmpfs] [--disk DIR] [--tmpfs DIR]

A turn saves (the files are forced to disk), drops them from the page cache where they are on a disk, and loads them
into the same model and optimizer, from which one value was taken to see that it comes back. `model-` is the weights
alone, `adam-` with fp32 AdamW state; 0.4 is a Llama of 0.4 billion parameters in fp32, 1.5 one of 1.5 billion in bf16,
small one of 5,000 matrices of 64 x 64. Writes checkpoint.json and checkpoint.png, prints tables.
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
    force_to_disk,
    in_turns,
    local_of,
    memory_left,
    merge,
    pieces_of,
    ratio,
    spread,
    summary,
    turn,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import load_checkpoint, save_checkpoint, shard_model
from fsdp2_strategy.hf.container import memory_of, read_into, write_from

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
CASES = ["model-0.4", "adam-0.4", "model-1.5", "model-small", "adam-small"]


class Small(nn.Module):
    """5,000 small matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(50))) for _ in range(100)
        )


def build(size: str) -> nn.Module:
    torch.manual_seed(0)
    if size == "small":
        return shard_model(Small(), bf16=False, class_names=["Sequential"])
    shape, dtype = {
        "0.4": ({"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 22}, torch.float32),
        "1.5": ({"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 29}, torch.bfloat16),
    }[size]
    config = LlamaConfig(**shape, num_attention_heads=16, num_key_value_heads=8, vocab_size=32000, dtype=dtype)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    return shard_model(model, bf16=False).to_empty(device="cpu")


@torch.no_grad()
def fill(tensors: list[torch.Tensor]) -> None:
    """Give all tensors values that differ, without the time of a generator."""
    for tensor in tensors:
        flat = local_of(tensor).reshape(-1)
        torch.arange(flat.numel(), dtype=torch.float32, out=(scratch := torch.empty(0)))
        flat.copy_(scratch.mul_(1e-6).add_(0.01))


@dataclass
class State:
    """What is saved and loaded."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None

    @classmethod
    def of(cls, case: str) -> "State":
        kind, size = case.split("-", 1)
        model = build(size)
        fill(list(model.parameters()))
        if kind == "model":
            return cls(model, None)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            moments = {key: torch.zeros_like(parameter.data) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
        fill([t for state in optimizer.state.values() for t in state.values() if t.ndim])
        return cls(model, optimizer)

    def tensors(self) -> list[torch.Tensor]:
        state = self.optimizer.state.values() if self.optimizer else ()
        return [
            local_of(t).detach() for t in [*self.model.parameters(), *(t for slots in state for t in slots.values())]
        ]

    def witnesses(self) -> list[torch.Tensor]:
        """Return one value of the model and one of the optimizer."""
        parameter = next(p for p in self.model.parameters() if local_of(p).numel())
        found = [parameter.data, self.optimizer.state[parameter]["exp_avg"]] if self.optimizer else [parameter.data]
        return [local_of(tensor).reshape(-1)[:1] for tensor in found]

    def damage(self) -> Callable[[], bool]:
        """Take values away; return what says whether they are back."""
        before = [value.clone() for value in self.witnesses()]
        for value in self.witnesses():
            value.zero_()
        return lambda: all(map(torch.equal, self.witnesses(), before))


# --- contestants ------------------------------------------------------------------------------------------------------


def raw_jobs(state: State) -> tuple[list[tuple[int, memoryview]], int]:
    """Return where in one file this rank's bytes go, one after the other, and the length of the file."""
    memories = [memory_of(t) for t in state.tensors() if t.numel()]
    sizes: list = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, sum(map(len, memories)))
    at, jobs = sum(sizes[: dist.get_rank()]), []
    for memory in memories:
        jobs += pieces_of(memory, at)
        at += len(memory)
    return jobs, sum(sizes)


def raw_write(state: State, folder: Path) -> None:
    jobs, length = raw_jobs(state)
    if dist.get_rank() == 0:
        with (folder / "raw").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, length)
    dist.barrier()
    fd = os.open(folder / "raw", os.O_WRONLY)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda job: write_from(fd, *job), jobs))
    os.fsync(fd)
    os.close(fd)


def raw_read(state: State, folder: Path) -> None:
    jobs, _ = raw_jobs(state)
    fd = os.open(folder / "raw", os.O_RDONLY)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda job: read_into(fd, *job), jobs))
    os.close(fd)


def our_save(state: State, folder: Path) -> None:
    save_checkpoint(state.model, folder, "tag", optimizer=state.optimizer)


def our_load(state: State, folder: Path, *, verify: bool = True) -> None:
    load_checkpoint(state.model, folder, tag="tag", optimizer=state.optimizer, verify=verify)


def dcp_state(state: State) -> dict:
    if state.optimizer is None:
        return {"model": get_model_state_dict(state.model)}
    return dict(zip(("model", "optim"), get_state_dict(state.model, state.optimizer), strict=True))


def dcp_save(state: State, folder: Path) -> None:
    dcp.save(dcp_state(state), checkpoint_id=folder / "dcp")  # its writer forces files to disk


def dcp_load(state: State, folder: Path) -> None:
    loaded = dcp_state(state)
    dcp.load(loaded, checkpoint_id=folder / "dcp")
    if state.optimizer is None:
        set_model_state_dict(state.model, loaded["model"])
    else:
        set_state_dict(state.model, state.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])


def hf_save(state: State, folder: Path) -> None:
    named = dict(state.model.named_parameters())
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=dict.fromkeys(named, 1), save_distributed=True, enable_consolidation=True
    )
    dcp.save(named, storage_writer=writer)


def hf_load(state: State, folder: Path) -> None:
    dcp.load(get_model_state_dict(state.model), storage_reader=HuggingFaceStorageReader(str(folder)))


def gather_save_file(state: State, folder: Path) -> None:
    full = get_model_state_dict(state.model, options=FULL)
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in full.items()}, folder / "model.safetensors")
        force_to_disk(folder)


def load_file_broadcast(state: State, folder: Path) -> None:
    full = load_file(folder / "model.safetensors") if dist.get_rank() == 0 else {}
    set_model_state_dict(state.model, full, options=BROADCAST)


def gather_torch_save(state: State, folder: Path) -> None:
    full = {"model": get_model_state_dict(state.model, options=FULL)}
    if state.optimizer is not None:
        full["optim"] = get_optimizer_state_dict(state.model, state.optimizer, options=FULL)
    if dist.get_rank() == 0:
        torch.save(full, folder / "whole.pt")
        force_to_disk(folder)


def torch_load_broadcast(state: State, folder: Path) -> None:
    full = torch.load(folder / "whole.pt", mmap=True) if dist.get_rank() == 0 else {"model": {}, "optim": {}}
    set_model_state_dict(state.model, full["model"], options=BROADCAST)
    if state.optimizer is not None:
        set_optimizer_state_dict(state.model, state.optimizer, full["optim"], options=BROADCAST)


def accelerate_parts() -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return what accelerate's functions look at, for its `Accelerator` has no FSDP on CPUs."""
    from torch.distributed.fsdp import StateDictType

    plugin = SimpleNamespace(
        fsdp_version=2,
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        state_dict_config=None,
        cpu_ram_efficient_loading=False,
    )
    return plugin, SimpleNamespace(
        num_processes=dist.get_world_size(),
        process_index=dist.get_rank(),
        is_main_process=dist.get_rank() == 0,
        is_fsdp2=True,
        wait_for_everyone=dist.barrier,
    )


def accelerate_save(state: State, folder: Path) -> None:
    from accelerate import PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    PartialState(cpu=True)
    parts = accelerate_parts()
    save_fsdp_model(*parts, state.model, str(folder))
    if state.optimizer is not None:
        save_fsdp_optimizer(*parts, state.optimizer, state.model, str(folder))


def accelerate_load(state: State, folder: Path) -> None:
    from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer

    parts = accelerate_parts()
    load_fsdp_model(*parts, state.model, str(folder))
    if state.optimizer is not None:
        load_fsdp_optimizer(*parts, state.optimizer, state.model, str(folder))


LOAD_ALONE = "ours, verify=False"
WHOLE_STATE = "gather + torch.save"
CONTESTANTS = {
    "raw": (raw_write, raw_read),
    "ours": (our_save, our_load),
    LOAD_ALONE: (our_save, lambda state, folder: our_load(state, folder, verify=False)),
    "DCP": (dcp_save, dcp_load),
    "DCP, Hugging Face": (hf_save, hf_load),
    "gather + save_file": (gather_save_file, load_file_broadcast),
    WHOLE_STATE: (gather_torch_save, torch_load_broadcast),
    "accelerate": (accelerate_save, accelerate_load),
}
WEIGHTS_ALONE = {"DCP, Hugging Face", "gather + save_file"}


# --- measuring --------------------------------------------------------------------------------------------------------


def work(rank: int, ranks: int, options: dict) -> None:
    become_rank(rank, ranks, options["store"])
    folder = Path(options["folder"])
    state = State.of(options["case"])
    names = [name for name in CONTESTANTS if state.optimizer is None or name not in WEIGHTS_ALONE]
    results: dict = {"save": {}, "load": {}}
    payload: list = [None] * ranks
    dist.all_gather_object(payload, sum(t.nbytes for t in state.tensors()))
    if memory_left() < 4 * sum(payload):  # the file, and the whole state on every rank
        names.remove(WHOLE_STATE)
        error = [[{"error": "the whole state does not fit into this machine's memory"}]]
        results["save"][WHOLE_STATE] = results["load"][WHOLE_STATE] = error
    for name in in_turns(names, options["rounds"]):
        save, load = CONTESTANTS[name]
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        dist.barrier()
        results["save"].setdefault(name, []).append(attempt(lambda s=save: turn(lambda: s(state, folder))))
        if rank == 0 and options["cold"]:
            drop_from_cache(folder)
        is_back = state.damage()
        outcomes = attempt(lambda r=load: turn(lambda: r(state, folder)))
        if not is_back():
            outcomes = [{"error": "the state did not come back"}]
            fill(state.tensors())
        results["load"].setdefault(name, []).append(outcomes)
    results["save"].pop(LOAD_ALONE, None)
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        Path(options["results"]).write_text(json.dumps({"payload_bytes": sum(payload), "results": results}))
    dist.barrier()
    os._exit(0)  # gloo can abort an interpreter that is on its way out


def table(entry: dict) -> str:
    """Return one configuration's table, in Markdown."""
    contestants = entry["contestants"]
    own, moved = contestants["ours"], "written" if entry["kind"] == "save" else "read"
    if "error" in own:
        return own["error"]
    lines = [
        f"{entry['kind']} {entry['case']} ({entry['payload_bytes'] / 1e9:.2f} GB), {entry['ranks']} ranks, "
        f"{entry['where']}",
        "",
        f"| | s, median (least - most) | time / ours, median (middle half) | peak a rank, MB | {moved} / needed |",
        "|---|---|---|---|---|",
    ]
    for name, facts in contestants.items():
        if "error" in facts:
            lines.append(f"| {name} | {facts['error'].splitlines()[0][:60]} | | | |")
            continue
        middle, low, high = ratio(facts["seconds"], own["seconds"])
        lines.append(
            f"| {name} | {spread(facts['seconds'])} | {middle:.2f} ({low:.2f} - {high:.2f}) | "
            f"{facts['peak_bytes'] / 1e6:.0f} | {facts[f'{moved}_bytes'] / entry['payload_bytes']:.4f} |"
        )
    middle, low, high = ratio(own["seconds"], contestants["raw"]["seconds"])
    least = min(own["seconds"]) / min(contestants["raw"]["seconds"])
    lines += ["", f"ours / bare machine: {middle:.2f} ({low:.2f} - {high:.2f}); least / least: {least:.2f}"]
    return "\n".join(lines)


def panels(entries: list[dict]) -> list[tuple[str, dict[str, list[float]]]]:
    chosen = [e for e in entries if e["ranks"] == 2 and e["where"] == "tmpfs" and not e["case"].endswith("small")]
    chosen.sort(key=lambda e: (e["case"], e["kind"] == "load"))
    return [
        (
            f"{e['kind']} {e['case']}, {e['ranks']} ranks, {e['where']}",
            {name: facts["seconds"] for name, facts in e["contestants"].items() if "error" not in facts},
        )
        for e in chosen or entries[:2]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm/benchmark"))
    parser.add_argument("--where", nargs="+", default=["disk", "tmpfs"], choices=["disk", "tmpfs"])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    entries = []
    for where, case, ranks in ((w, c, r) for w in args.where for c in args.cases for r in args.ranks):
        place = args.disk if where == "disk" else args.tmpfs
        place.mkdir(parents=True, exist_ok=True)
        options = {
            "case": case,
            "rounds": args.rounds,
            "cold": where == "disk",
            "folder": str(place / "checkpoint"),
            "store": str(place / f"store-{os.getpid()}-{case}-{ranks}"),
            "results": str(place / "results.json"),
        }
        mp.spawn(work, (ranks, options), nprocs=ranks)
        measured = json.loads((place / "results.json").read_text())
        for kind, contestants in measured["results"].items():
            entry = {"kind": kind, "case": case, "ranks": ranks, "where": where}
            entry |= {"payload_bytes": measured["payload_bytes"], **circumstances()}
            entry["contestants"] = {name: summary(turns) for name, turns in contestants.items()}
            entries = merge(args.out / "checkpoint.json", entry, ("kind", "case", "ranks", "where"))
            print(table(entry), end="\n\n", flush=True)
        shutil.rmtree(place, ignore_errors=True)
    draw(panels(entries), args.out / "checkpoint.png")


if __name__ == "__main__":
    main()
