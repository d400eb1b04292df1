"""Measure the cost of a frozen backbone, and of saving and resuming a VLA, compared with VITRA's ways.

    python benchmarks/vla.py [--rounds 7] [--hidden 1024] [--ranks 2] [--dir DIR] [--out DIR] [--smoke]

The model has a backbone of twelve layers and an action model of two, of the same width. Steps: our frozen backbone,
compared with a backbone with learning rate 0, which is VITRA's freeze: collectives and bytes of one step, optimizer
state of a rank, seconds. Checkpoints, of the frozen VLA and of one that is fully trained: ours with all weights, ours
with only the trainable weights, and VITRA's way: rank 0 gathers weights and optimizer and writes both with
`torch.save`, every rank reads both files in full. All contestants force files to disk. Before a load all weights in the
checkpoint and their optimizer state are set to zero; after it the checksums of all weights and of their state are
compared, outside of the timed part. Writes vla.json, prints tables. `--smoke` runs everything in seconds, with a tiny
VLA.
"""

import json
import shutil
import threading
from collections import Counter
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2_strategy.integrations.vitra import VLAFSDPStrategy

ONLY_TRAINABLE = "ours, trainable alone"
LABELS = {"rate 0": "learning rate 0", ONLY_TRAINABLE: "ours, only trainable weights"}
"""What tables call some keys of the results."""
GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
FULL = StateDictOptions(full_state_dict=True)


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.nn.functional.gelu(self.up_proj(x)))


class VLA(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.backbone = nn.ModuleList(Layer(hidden) for _ in range(12))
        self.action_model = nn.ModuleList(Layer(hidden) for _ in range(2))

    def forward(self, rgb: torch.Tensor, **_: object) -> dict[str, torch.Tensor]:
        for layer in (*self.backbone, *self.action_model):
            rgb = layer(rgb)
        return {"loss": rgb.float().square().mean()}


class CountTraffic(TorchDispatchMode):
    """Count collectives and the bytes of the full tensors that they move."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1].strip("_")
        if func.namespace == "c10d" and name in ("allgather_base", "reduce_scatter_base", "allreduce"):
            sizes = [t.nbytes for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.calls[name] += 1
            self.bytes[name] += max(sizes)
        return func(*args, **(kwargs or {}))


def strategy_for(hidden: int, run_dir: Path, *, freeze: str) -> VLAFSDPStrategy:
    """Set up a VLA whose backbone is frozen, has learning rate 0, or is trained."""
    torch.manual_seed(0)
    vla = VLA(hidden)
    vla.backbone.requires_grad_(freeze != "frozen")
    strategy = VLAFSDPStrategy(
        vla,
        device_id=dist.get_rank() if torch.accelerator.is_available() else None,
        stage="benchmark",
        epochs=1,
        max_steps=1000,
        global_batch_size=dist.get_world_size(),
        per_device_batch_size=1,
        learning_rate=1e-5,
        weight_decay=0.1,
        max_grad_norm=1.0,
        lr_scheduler_type="backbone-freeze-warmup" if freeze == "rate 0" else "constant",
        llm_freeze_step=1000 if freeze == "rate 0" else 0,
        warmup_ratio=0.0,
        reduce_in_full_precision=True,
        sharding_strategy="full-shard",
        async_save=False,
        max_num=1,
    )
    strategy.run_setup(run_dir, 1000, {Layer}, None)
    return strategy


def step(strategy: VLAFSDPStrategy, hidden: int) -> None:
    batch = torch.ones(64, hidden, device=strategy.device)
    loss = strategy.vla(batch, data_source=["action"])["loss"]
    strategy.backward(loss, strategy.vla, strategy.optimizer)
    strategy.optimizer_step(strategy.optimizer, strategy.vla, strategy.lr_scheduler)


def turns_of_steps(options: dict) -> dict:
    """Measure steps with a frozen backbone, one with learning rate 0, and a trained one, in turns; collective."""
    runs = {f: strategy_for(options["hidden"], Path(options["dir"]), freeze=f) for f in ("frozen", "rate 0", "trained")}
    traffic, state, parameters = {}, {}, {}
    for name, strategy in runs.items():
        step(strategy, options["hidden"])  # the first pass initialises FSDP2
        with CountTraffic() as counted:
            step(strategy, options["hidden"])
        traffic[name] = {kind: [counted.calls[kind], counted.bytes[kind]] for kind in sorted(counted.calls)}
        tensors = [t for states in strategy.optimizer.state.values() for t in states.values()]
        state[name] = sum(harness.local_of(t).nbytes for t in tensors)
        parameters[name] = sum(harness.local_of(p).nbytes for p in strategy.vla.parameters())
    turns: dict[str, list] = {name: [] for name in runs}
    for name in harness.turn_order(list(runs), options["rounds"], options.get("until")):
        steps = [runs[name]] * 3
        turns[name].append(
            harness.attempt(lambda steps=steps: harness.turn(lambda: [step(s, options["hidden"]) for s in steps]))
        )
    result = {"traffic": traffic, "state_bytes": state, "parameter_bytes": parameters}
    result["turns"] = {name: harness.summary(taken) for name, taken in turns.items()}
    return result


def measure_steps(rank: int, options: dict) -> None:
    harness.init_rank(rank, options)
    harness.finish(rank, options, turns_of_steps(options))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_as_vitra(strategy: VLAFSDPStrategy, folder: Path) -> None:
    """Gather on rank 0, and write two files on two threads; unlike VITRA, wait for the threads."""
    weights = get_model_state_dict(strategy.vla, options=GATHERED)
    state = get_optimizer_state_dict(strategy.vla, strategy.optimizer, options=GATHERED)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        files = {"weights.pt": weights, "optimizer.pt": state}
        threads = [threading.Thread(target=torch.save, args=(c, folder / name)) for name, c in files.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        harness.force_to_disk(folder)


def load_as_vitra(strategy: VLAFSDPStrategy, folder: Path) -> None:
    """Read both files in full on every rank."""
    weights = torch.load(folder / "weights.pt", map_location="cpu")
    set_model_state_dict(strategy.vla, weights, options=FULL)
    del weights
    state = torch.load(folder / "optimizer.pt", map_location="cpu")
    set_optimizer_state_dict(strategy.vla, strategy.optimizer, state, options=FULL)


def tensors_of(strategy: VLAFSDPStrategy) -> dict[str, torch.Tensor]:
    """Return this rank's current part of all weights and of their optimizer state."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in strategy.vla.named_parameters():
        state = sorted(strategy.optimizer.state.get(parameter, {}).items())
        found |= {name: parameter, **{f"{name}.{key}": tensor for key, tensor in state}}
    return {name: harness.local_of(tensor.detach()) for name, tensor in found.items()}


def measure_checkpoints(rank: int, options: dict) -> None:
    harness.init_rank(rank, options)
    folder = Path(options["dir"]) / "checkpoints"
    strategy = strategy_for(options["hidden"], Path(options["dir"]), freeze=options["freeze"])
    step(strategy, options["hidden"])
    ours = {
        name: lambda path, only=only: strategy.save_ckpt(strategy.vla, path, "a", only_trainable=only)
        for name, only in (("ours", False), (ONLY_TRAINABLE, True))
    }
    saves = {**ours, "VITRA's way": lambda path: save_as_vitra(strategy, path)}
    if options["freeze"] != "frozen":
        del saves[ONLY_TRAINABLE]
    turns: dict[str, dict[str, list]] = {name: {"save": [], "load": []} for name in saves}
    expected = harness.digests_of(tensors_of(strategy))
    before = {name: tensor.clone() for name, tensor in tensors_of(strategy).items()}
    frozen = {name for name, parameter in strategy.vla.named_parameters() if not parameter.requires_grad}
    sizes = {}
    for name in harness.turn_order(list(saves), options["rounds"]):
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        saved = harness.attempt(lambda name=name: harness.turn(lambda: saves[name](folder)))
        sizes[name] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        not_saved = frozen if name == ONLY_TRAINABLE else set()
        for key, tensor in tensors_of(strategy).items():
            if key not in not_saved:
                tensor.zero_()
        load = load_as_vitra if name == "VITRA's way" else lambda s, path: s.load_ckpt(s.vla, path)
        loaded = harness.attempt(
            lambda load=load: harness.turn(lambda: load(strategy, folder)),
            lambda: harness.check_values(harness.digests_of(tensors_of(strategy)), expected),
        )
        if harness.error_of([loaded]):
            saved = loaded  # a save whose values cannot be loaded has no time
            for key, tensor in tensors_of(strategy).items():
                tensor.copy_(before[key])
        turns[name]["save"].append(saved)
        turns[name]["load"].append(loaded)
    result = {
        name: {phase: harness.summary(taken) for phase, taken in phases.items()} for name, phases in turns.items()
    }
    harness.finish(rank, options, {name: {**phases, "file_bytes": sizes[name]} for name, phases in result.items()})


# --- tables -----------------------------------------------------------------------------------------------------------


def print_steps(result: dict) -> None:
    columns = "all-gathers | reduce-scatters | optimizer state per rank | parameters per rank"
    columns += " | seconds for 3 steps | time / frozen"
    print(f"\n| backbone | {columns} |")
    print("|---|---|---|---|---|---|---|")
    frozen = result["turns"]["frozen"]["seconds"]
    for name, taken in result["turns"].items():
        moved = [result["traffic"][name].get(kind, [0, 0]) for kind in ("allgather_base", "reduce_scatter_base")]
        cells = [f"{calls}, {size / 1e6:.1f} MB" for calls, size in moved]
        cells += [f"{result[kind][name] / 1e6:.1f} MB" for kind in ("state_bytes", "parameter_bytes")]
        cells += [harness.format_times(taken["seconds"]), f"{harness.ratio(taken['seconds'], frozen)[0]:.2f}"]
        print(f"| {LABELS.get(name, name)} | {' | '.join(cells)} |")


def print_checkpoints(freeze: str, result: dict) -> None:
    saving = "save, s | time / ours | peak, MB | files, MB"
    print(f"\n| backbone {freeze} | {saving} | load, s | time / ours | peak, MB | read, MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, phases in result.items():
        cells = []
        for phase, moved in (("save", phases["file_bytes"]), ("load", phases["load"].get("read_bytes", 0))):
            taken = phases[phase]
            if failed := taken.get("error", result["ours"][phase].get("error")):
                cells += [failed, "", "", ""]
                continue
            middle, low, high = harness.ratio(taken["seconds"], result["ours"][phase]["seconds"])
            cells += [harness.format_times(taken["seconds"]), f"{middle:.2f} ({low:.2f} - {high:.2f})"]
            cells += [f"{taken['peak_bytes'] / 1e6:.0f}", f"{moved / 1e6:.0f}"]
        print(f"| {LABELS.get(name, name)} | {' | '.join(cells)} |")


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=2)
    args = harness.parse(parser, smoke={"hidden": 16}, scratch_folders={"dir": Path("/dev/shm/vla")})
    options = {**vars(args), "dir": str(args.dir), "out": str(args.out)}
    results = args.out / "vla.json"
    entry = {
        **harness.environment(smoke=args.smoke),
        "hidden": args.hidden,
        "ranks": args.ranks,
        "rounds": args.rounds,
    }
    try:
        entry["steps"] = harness.run_on_ranks(measure_steps, options)
        print_steps(entry["steps"])
        for freeze in ("frozen", "trained"):
            entry[freeze] = harness.run_on_ranks(measure_checkpoints, {**options, "freeze": freeze})
            print_checkpoints(freeze, entry[freeze])
    finally:
        shutil.rmtree(args.dir, ignore_errors=True)
    harness.merge(results, json.loads(json.dumps(entry)), ("hidden", "ranks", "hardware"))
    print(f"\nwrote {results}")


if __name__ == "__main__":
    main()
