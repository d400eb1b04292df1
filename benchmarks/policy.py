"""Compare saving and resuming a robot policy in LeRobot's layout with LeRobot's way.

    python benchmarks/policy.py [--rounds 7] [--hidden 1024] [--layers 17] [--ranks 2] [--where disk tmpfs]
                                [--disk DIR] [--tmpfs DIR] [--out DIR] [--smoke]

The policy has equal blocks, of 8.4 million parameters each at a width of 1024, and fp32 AdamW state. In LeRobot's way
under FSDP2, every parameter and its state are gathered, rank 0 holds all of them and writes `model.safetensors` and a
flattened `optimizer_state.safetensors`; to resume, every rank reads both files in full. Ours: `save_ckpt` with
`LeRobotLayout`, synchronous and asynchronous. "save" is the time of the call, "end" the time from its return until the
files are written.

A turn saves (all contestants force files to disk), drops the files from the page cache if they are on a disk, and loads
them. In between all weights and their state are set to zero; their checksums are compared after the load, outside of
the timed part. Bytes read are those of all ranks. Files that are mapped count in full, because the kernel does not
count reads from them. Peak memory is that of each rank minus its memory before the turn; for saves, the value in
brackets is that of the first save, including memory that is kept for the next. Writes policy.json, prints tables.
`--smoke` runs everything in seconds, with a tiny policy.
"""

import json
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.integrations.lerobot import LeRobotLayout

GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
FULL = StateDictOptions(full_state_dict=True)
PHASES = ("save", "end", "load")
LAYOUT = LeRobotLayout(total_steps=100_000, batch_size=8, train_config={"seed": 1000})


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.nn.functional.gelu(self.up_proj(x)))


class Policy(nn.Module):
    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Block(hidden) for _ in range(layers)))
        self.register_buffer("mean", torch.zeros(hidden))

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
        return self.model(batch["observation.state"] - self.mean).float().square().mean(), {}


@dataclass
class Run:
    strategy: FSDPV2Strategy
    policy: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def start(cls, hidden: int, layers: int) -> "Run":
        """Train for one step to create optimizer state."""
        strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, block_class_names=("Block",)))
        torch.manual_seed(0)
        policy = strategy.prepare_model(Policy(hidden, layers), is_training=True)
        optimizer = strategy.create_optimizer(policy, lr=1e-4)
        loss, _ = policy({"observation.state": torch.ones(4, hidden, device=strategy.device)})
        strategy.backward(loss, policy, optimizer)
        strategy.optimizer_step(optimizer, policy)
        return cls(strategy, policy, optimizer)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's current part of all weights and of their optimizer state."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.policy.named_parameters():
            state = sorted(self.optimizer.state[parameter].items())
            found |= {name: parameter, **{f"{name}.{key}": tensor for key, tensor in state}}
        return {name: harness.local_of(tensor.detach()) for name, tensor in found.items()}


# --- LeRobot's way ----------------------------------------------------------------------------------------------------


def save_as_lerobot(run: Run, folder: Path) -> None:
    """Gather on rank 0, and write one file of weights and one of optimizer state."""
    weights = get_model_state_dict(run.policy, options=GATHERED)
    state = get_optimizer_state_dict(run.policy, run.optimizer, options=GATHERED)
    if dist.get_rank() == 0:
        pretrained, training = folder / "000001" / "pretrained_model", folder / "000001" / "training_state"
        for each in (pretrained, training):
            each.mkdir(parents=True)
        save_file(weights, pretrained / "model.safetensors")
        flat = {f"{name}/{key}": tensor for name, states in state["state"].items() for key, tensor in states.items()}
        save_file(flat, training / "optimizer_state.safetensors")
        (training / "optimizer_param_groups.json").write_text(json.dumps(state["param_groups"]))
        (training / "training_step.json").write_text(json.dumps({"step": 1}))
        harness.force_to_disk(folder)
        (folder / "last").symlink_to("000001")


def load_as_lerobot(run: Run, folder: Path) -> None:
    """Read both files in full on every rank."""
    weights = load_file(folder / "last" / "pretrained_model" / "model.safetensors")
    set_model_state_dict(run.policy, weights, options=FULL)
    del weights
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(folder / "last" / "training_state" / "optimizer_state.safetensors").items():
        name, state_key = key.rsplit("/", 1)
        state.setdefault(name, {})[state_key] = tensor
    groups = json.loads((folder / "last" / "training_state" / "optimizer_param_groups.json").read_text())
    full = {"state": state, "param_groups": groups}
    set_optimizer_state_dict(run.policy, run.optimizer, full, options=FULL)


# --- ours -------------------------------------------------------------------------------------------------------------


@dataclass
class Contestant:
    save: Callable[[Run, Path], object]
    load: Callable[[Run, Path], object] = lambda run, folder: run.strategy.load_ckpt(run.policy, folder / "last")
    end: Callable[[Run], object] = lambda run: run.strategy.wait_for_checkpoint()
    turns: dict[str, list] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    maps_files: bool = False
    file_bytes: int = 0


def make_contestants() -> dict[str, Contestant]:
    return {
        "ours": Contestant(lambda run, folder: run.strategy.save_ckpt(run.policy, folder, layout=LAYOUT)),
        "ours, in the background": Contestant(
            lambda run, folder: run.strategy.save_ckpt(run.policy, folder, layout=LAYOUT, async_save=True)
        ),
        "LeRobot's way": Contestant(save_as_lerobot, load_as_lerobot, maps_files=True),
    }


def take_turn(run: Run, contestant: Contestant, options: dict) -> None:
    folder = Path(options["dir"]) / "checkpoints"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    expected = harness.digests_of(run.tensors())
    saved = harness.attempt(lambda: harness.turn(lambda: contestant.save(run, folder)))
    ended = harness.attempt(lambda: harness.turn(lambda: contestant.end(run)))
    contestant.file_bytes = sum(path.stat().st_size for path in folder.glob("0*/**/*") if path.is_file())
    if options["cold"]:
        harness.drop_from_cache(folder)
        dist.barrier()
    before = {name: tensor.clone() for name, tensor in run.tensors().items()}
    for tensor in run.tensors().values():
        tensor.zero_()
    loaded = harness.attempt(
        lambda: harness.turn(lambda: contestant.load(run, folder)),
        lambda: harness.check_values(harness.digests_of(run.tensors()), expected),
    )
    if harness.error_of([loaded]):
        saved = ended = loaded  # a save whose values cannot be loaded has no time
        for name, tensor in run.tensors().items():
            tensor.copy_(before[name])
    for phase, outcomes in zip(PHASES, (saved, ended, loaded), strict=True):
        contestant.turns[phase].append(outcomes)


def measure(rank: int, options: dict) -> None:
    harness.init_rank(rank, options)
    run = Run.start(options["hidden"], options["layers"])
    contestants = make_contestants()
    for name in contestants:  # warm-up: creates threads, groups and host buffers
        take_turn(run, contestants[name], options)
    first = {name: peaks_of(contestant.turns["save"]) for name, contestant in contestants.items()}
    for contestant in contestants.values():
        contestant.turns = {phase: [] for phase in PHASES}
    for name in harness.turn_order(list(contestants), options["rounds"]):
        take_turn(run, contestants[name], options)
    result: dict = {"parameters": sum(p.numel() for p in run.policy.parameters())}
    for name, contestant in contestants.items():
        phases = {phase: harness.summary(taken) | peaks_of(taken) for phase, taken in contestant.turns.items()}
        if contestant.maps_files:
            phases["load"]["read_bytes"] = contestant.file_bytes * options["ranks"]
        result[name] = {**phases, "file_bytes": contestant.file_bytes, "first_save": first[name]}
    run.strategy.close()
    harness.finish(rank, options, result)


def peaks_of(turns: list[list[dict]]) -> dict:
    """Return each rank's peak memory minus its memory before the turn, the median over all turns."""
    if harness.error_of(turns):
        return {}
    ranks = range(len(turns[0]))
    return {"peak_bytes_of_ranks": [statistics.median(taken[rank]["peak_bytes"] for taken in turns) for rank in ranks]}


def print_table(where: str, result: dict) -> None:
    saving = "save, s | time / ours | end, s | peak of ranks, MB | files, MB"
    print(f"\n| {where} | {saving} | load, s | time / ours | peak of ranks, MB | read, MB |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, facts in result.items():
        if name == "parameters":
            continue
        if failed := next((facts[phase]["error"] for phase in PHASES if "error" in facts[phase]), None):
            print(f"| {name} | {failed} |")
            continue
        cells = []
        for phase, moved in (("save", facts["file_bytes"]), ("load", facts["load"]["read_bytes"])):
            middle, low, high = harness.ratio(facts[phase]["seconds"], result["ours"][phase]["seconds"])
            cells += [harness.format_times(facts[phase]["seconds"]), f"{middle:.2f} ({low:.2f} - {high:.2f})"]
            cells += [harness.format_times(facts["end"]["seconds"])] if phase == "save" else []
            first = f" ({format_megabytes(facts['first_save'])})" if phase == "save" else ""
            cells += [format_megabytes(facts[phase]) + first, f"{moved / 1e6:.0f}"]
        print(f"| {name} | {' | '.join(cells)} |")


def format_megabytes(facts: dict) -> str:
    return " / ".join(f"{peak / 1e6:.0f}" for peak in facts["peak_bytes_of_ranks"])


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--where", nargs="+", default=["tmpfs", "disk"], choices=["tmpfs", "disk"])
    args = harness.parse(
        parser,
        smoke={"hidden": 16, "layers": 2, "where": ["disk"]},
        scratch_folders={"disk": Path("runs/policy"), "tmpfs": Path("/dev/shm/policy")},
    )
    for where in args.where:
        scratch = (args.disk if where == "disk" else args.tmpfs).absolute()
        sizes = {"hidden": args.hidden, "layers": args.layers, "ranks": args.ranks, "rounds": args.rounds}
        try:
            result = harness.run_on_ranks(
                measure, {**sizes, "smoke": args.smoke, "dir": str(scratch), "cold": where == "disk"}
            )
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        print_table(where, result)
        entry = {**harness.environment(smoke=args.smoke), **sizes, "where": where, **result}
        harness.merge(args.out / "policy.json", entry, ("where", "hidden", "layers", "ranks", "hardware"))
    print(f"\nwrote {args.out / 'policy.json'} ({result['parameters'] / 1e6:.0f} M parameters)")


if __name__ == "__main__":
    main()
