"""Measure saving and loading sharded checkpoints, compared with the limit of the machine and with other libraries.

    python benchmarks/checkpoint.py [--cases model-0.4 adam-0.4 model-1.5 model-small adam-small] [--ranks 2 4]
                                    [--rounds 7] [--where disk tmpfs] [--disk DIR] [--tmpfs DIR] [--out DIR] [--smoke]

A turn saves (files are forced to disk), drops the files from the page cache if they are on a disk, and loads them into
the same model and optimizer. Before the load all tensors are set to zero; after it their checksums are compared with
those before the save, outside of the timed part. `model-` cases have weights only, `adam-` cases also fp32 AdamW state;
0.4 is a Llama of 0.4 billion fp32 parameters, 1.5 one of 1.5 billion bf16 parameters, small a model of 5,000 matrices
of 64 x 64. `tp-` is the Llama with layers split over pairs of ranks, `ep-` a Mixtral with experts divided among them;
both are sharded over the pairs, so they need 4 ranks. "bare" writes and reads one file per rank, see bare.py. "between
ranks" counts the bytes on the loopback device. Writes checkpoint.json and checkpoint.png, prints tables. `--smoke` runs
everything in seconds, with tiny models.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import bare
import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
from transformers import LlamaForCausalLM, MixtralForCausalLM

from fsdp2_strategy import StrategyConfig, build_mesh, load_checkpoint, save_checkpoint, shard_model

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
CASES = ["model-0.4", "adam-0.4", "model-1.5", "model-small", "adam-small", "tp-0.4", "ep-0.4"]
SPLIT = {"tp": {"tensor_parallel_size": 2}, "ep": {"expert_parallel_size": 2}}
"""The cases of weights whose layers or experts are divided among pairs of ranks, and then sharded."""


class SmallMatrices(nn.Module):
    """A model of many small matrices, in blocks."""

    def __init__(self, blocks: int, matrices: int, side: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(matrices))) for _ in range(blocks)
        )


def build(kind: str, size: str, *, smoke: bool) -> nn.Module:
    if kind in SPLIT:
        config = harness.mixtral_config(smoke=smoke) if kind == "ep" else harness.llama_config(size, smoke=smoke)
        with torch.device("meta"):
            model = (MixtralForCausalLM if kind == "ep" else LlamaForCausalLM)(config).to(config.dtype)
        options = dict(SPLIT[kind])
        mesh = build_mesh(tensor_parallel_size=options.pop("tensor_parallel_size", 1))
        return shard_model(model, mesh, StrategyConfig(bf16=False, **options)).to_empty(device=harness.device())
    if size == "small":
        small = SmallMatrices(4, 5, 8) if smoke else SmallMatrices(100, 50, 64)
        return shard_model(small, config=StrategyConfig(bf16=False, block_class_names=["Sequential"]))
    config = harness.llama_config(size, smoke=smoke)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(config.dtype)
    return shard_model(model, config=StrategyConfig(bf16=False)).to_empty(device=harness.device())


@dataclass
class State:
    """The model and the optimizer that are saved and loaded."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    bare_calls: list[bare.Call] = field(default_factory=list)
    host: list[torch.Tensor] = field(default_factory=list)
    """Pinned copies of the tensors, for the bare contestant on an accelerator; empty without one."""

    @classmethod
    def of(cls, case: str, *, smoke: bool) -> "State":
        kind, size = case.split("-", 1)
        model = build(kind, size, smoke=smoke)
        state = cls(model, torch.optim.AdamW(model.parameters()) if kind == "adam" else None)
        state.reset()
        return state

    def reset(self) -> None:
        """Set all tensors to the values that are saved; the optimizer gets new state tensors."""
        harness.fill(list(self.model.parameters()))
        if self.optimizer is None:
            return
        self.optimizer.state.clear()
        for parameter in self.model.parameters():
            moments = {key: torch.zeros_like(parameter.data) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
        harness.fill(
            list(self.model.parameters()) + [t for s in self.optimizer.state.values() for t in s.values() if t.ndim]
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of every tensor, by name."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter] if self.optimizer else {}
            found |= {name: parameter, **{f"{name}.{key}": tensor for key, tensor in sorted(state.items())}}
        return {name: harness.local_of(tensor.detach()) for name, tensor in found.items()}


# --- contestants ------------------------------------------------------------------------------------------------------


def prepare_bare(state: State) -> None:
    """Plan the calls of the bare contestant, outside of the timed part."""
    tensors = list(state.tensors().values())
    if torch.accelerator.is_available() and not state.host:
        state.host = [harness.pinned(*tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    state.bare_calls = bare.calls_of(state.host or tensors)


def bare_save(state: State, folder: Path) -> None:
    if state.host:
        for copy, tensor in zip(state.host, state.tensors().values(), strict=True):
            copy.copy_(tensor, non_blocking=True)
        harness.synchronize()
    bare.write(state.bare_calls, folder)


def bare_load(state: State, folder: Path) -> None:
    bare.read(state.bare_calls, folder)
    if state.host:
        for copy, tensor in zip(state.host, state.tensors().values(), strict=True):
            tensor.copy_(copy, non_blocking=True)


def save_ours(state: State, folder: Path) -> None:
    save_checkpoint(state.model, folder, "tag", optimizer=state.optimizer)


def load_ours(state: State, folder: Path, *, verify: bool = True) -> None:
    load_checkpoint(state.model, folder, tag="tag", optimizer=state.optimizer, verify=verify)


def dcp_state(state: State) -> dict:
    if state.optimizer is None:
        return {"model": get_model_state_dict(state.model)}
    return dict(zip(("model", "optim"), get_state_dict(state.model, state.optimizer), strict=True))


def dcp_save(state: State, folder: Path) -> None:
    dcp.save(dcp_state(state), checkpoint_id=folder / "dcp")  # DCP's writer forces files to disk


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
        harness.force_to_disk(folder)


def load_file_broadcast(state: State, folder: Path) -> None:
    full = load_file(folder / "model.safetensors") if dist.get_rank() == 0 else {}
    set_model_state_dict(state.model, full, options=BROADCAST)


def gather_torch_save(state: State, folder: Path) -> None:
    full = {"model": get_model_state_dict(state.model, options=FULL)}
    if state.optimizer is not None:
        full["optim"] = get_optimizer_state_dict(state.model, state.optimizer, options=FULL)
    if dist.get_rank() == 0:
        torch.save(full, folder / "full.pt")
        harness.force_to_disk(folder)


def torch_load_broadcast(state: State, folder: Path) -> None:
    full = torch.load(folder / "full.pt", mmap=True) if dist.get_rank() == 0 else {"model": {}, "optim": {}}
    set_model_state_dict(state.model, full["model"], options=BROADCAST)
    if state.optimizer is not None:
        set_optimizer_state_dict(state.model, state.optimizer, full["optim"], options=BROADCAST)


def accelerate_arguments() -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return the plugin and the accelerator for accelerate's functions: its `Accelerator` has no FSDP on CPUs."""
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
    arguments = accelerate_arguments()
    save_fsdp_model(*arguments, state.model, str(folder))
    if state.optimizer is not None:
        save_fsdp_optimizer(*arguments, state.optimizer, state.model, str(folder))


def accelerate_load(state: State, folder: Path) -> None:
    from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer

    arguments = accelerate_arguments()
    load_fsdp_model(*arguments, state.model, str(folder))
    if state.optimizer is not None:
        load_fsdp_optimizer(*arguments, state.optimizer, state.model, str(folder))


LOAD_ONLY = "ours, verify=False"
FULL_STATE = "gather + torch.save"
CONTESTANTS = {
    "bare": (bare_save, bare_load),
    "ours": (save_ours, load_ours),
    LOAD_ONLY: (save_ours, lambda state, folder: load_ours(state, folder, verify=False)),
    "DCP": (dcp_save, dcp_load),
    "DCP, Hugging Face": (hf_save, hf_load),
    "gather + save_file": (gather_save_file, load_file_broadcast),
    FULL_STATE: (gather_torch_save, torch_load_broadcast),
    "accelerate": (accelerate_save, accelerate_load),
}
WEIGHTS_ONLY = {"DCP, Hugging Face", "gather + save_file"}
OF_SPLIT = ("bare", "ours", LOAD_ONLY, "DCP")
"""The contestants for weights that are divided among ranks and sharded: DCP writes the same DTensors."""


# --- measuring --------------------------------------------------------------------------------------------------------


def contestants_of(case: str, state: State) -> list[str]:
    if case.split("-", maxsplit=1)[0] in SPLIT:
        return list(OF_SPLIT)
    return [name for name in CONTESTANTS if state.optimizer is None or name not in WEIGHTS_ONLY]


def measure(options: dict) -> dict:
    """Save and load one case with all contestants, or those of the options, in turns; collective."""
    rank, folder = dist.get_rank(), Path(options["folder"])
    state = State.of(options["case"], smoke=options["smoke"])
    expected = harness.digests_of(state.tensors())
    names = options.get("contestants") or contestants_of(options["case"], state)
    results: dict = {"save": {}, "load": {}}
    payload: list = [None] * dist.get_world_size()
    dist.all_gather_object(payload, sum(t.nbytes for t in state.tensors().values()))
    if FULL_STATE in names and harness.available_bytes() < 4 * sum(
        payload
    ):  # the file, and the full state on every rank
        names.remove(FULL_STATE)
        error = [[{"error": "the full state does not fit into this machine's memory"}]]
        results["save"][FULL_STATE] = results["load"][FULL_STATE] = error
    for name in harness.turn_order(names, options["rounds"], options.get("until")):
        save, load = CONTESTANTS[name]
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        if name == "bare":
            prepare_bare(state)
        dist.barrier()
        saved = harness.attempt(lambda s=save: harness.turn(lambda: s(state, folder)))
        if rank == 0 and options["cold"]:
            harness.drop_from_cache(folder)
        for tensor in state.tensors().values():
            tensor.zero_()
        loaded = saved
        if not harness.error_of([saved]):
            loaded = harness.attempt(
                lambda r=load: harness.turn(lambda: r(state, folder)),
                lambda: harness.check_values(harness.digests_of(state.tensors()), expected),
            )
        if harness.error_of([loaded]):
            saved = loaded  # a save whose values cannot be loaded has no time
            state.reset()
        results["save"].setdefault(name, []).append(saved)
        results["load"].setdefault(name, []).append(loaded)
    results["save"].pop(LOAD_ONLY, None)
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return {"payload_bytes": sum(payload), "results": results}


def work(rank: int, options: dict) -> None:
    harness.init_rank(rank, options)
    harness.finish(rank, options, measure(options))


def table(entry: dict) -> str:
    """Return the Markdown table of one configuration."""
    contestants = entry["contestants"]
    own, moved = contestants["ours"], "written" if entry["kind"] == "save" else "read"
    if "error" in own:
        return own["error"]
    lines = [
        f"{entry['kind']} {entry['case']} ({entry['payload_bytes'] / 1e9:.2f} GB), {entry['ranks']} ranks, "
        f"{entry['where']}",
        "",
        f"| | s: median (min - max) | time / ours: median (middle half) | peak per rank, MB | {moved} / needed | "
        "between ranks, MB |",
        "|---|---|---|---|---|---|",
    ]
    for name, facts in contestants.items():
        if "error" in facts:
            lines.append(f"| {name} | {facts['error'].splitlines()[0][:60]} | | | | |")
            continue
        middle, low, high = harness.ratio(facts["seconds"], own["seconds"])
        lines.append(
            f"| {name} | {harness.format_times(facts['seconds'])} | {middle:.2f} ({low:.2f} - {high:.2f}) | "
            f"{facts['peak_bytes'] / 1e6:.0f} | {facts[f'{moved}_bytes'] / entry['payload_bytes']:.4f} | "
            f"{facts['moved_bytes'] / 1e6:.2f} |"
        )
    if "error" not in contestants["bare"]:
        middle, low, high = harness.ratio(own["seconds"], contestants["bare"]["seconds"])
        min_ratio = min(own["seconds"]) / min(contestants["bare"]["seconds"])
        lines += ["", f"ours / bare: {middle:.2f} ({low:.2f} - {high:.2f}); min / min: {min_ratio:.2f}"]
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
    parser = harness.parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--where", nargs="+", default=["disk", "tmpfs"], choices=["disk", "tmpfs"])
    args = harness.parse(
        parser,
        smoke={"ranks": [2], "where": ["disk"]},
        scratch_folders={"disk": Path("runs/benchmark"), "tmpfs": Path("/dev/shm/benchmark")},
    )
    entries = []
    for where, case, ranks in ((w, c, r) for w in args.where for c in args.cases for r in args.ranks):
        if case.split("-")[0] in SPLIT and ranks < 4 and not args.smoke:
            continue
        scratch = args.disk if where == "disk" else args.tmpfs
        options = {
            "case": case,
            "ranks": ranks,
            "rounds": args.rounds,
            "smoke": args.smoke,
            "cold": where == "disk",
            "folder": str(scratch / "checkpoint"),
        }
        try:
            measured = harness.run_on_ranks(work, options)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        for kind, contestants in measured["results"].items():
            entry = {"kind": kind, "case": case, "ranks": ranks, "where": where}
            entry |= {"payload_bytes": measured["payload_bytes"], **harness.environment(smoke=args.smoke)}
            entry["contestants"] = {name: harness.summary(turns) for name, turns in contestants.items()}
            entries = harness.merge(args.out / "checkpoint.json", entry, ("kind", "case", "ranks", "where"))
            print(table(entry), end="\n\n", flush=True)
    harness.draw(panels(entries), args.out / "checkpoint.png", smoke=args.smoke)


if __name__ == "__main__":
    main()
