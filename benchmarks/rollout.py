"""Weights to an engine: streaming against a gather of each parameter, and against a gathered state dict.

    python benchmarks/rollout.py [--rounds 7] [--ranks 2] [--large 150x2048x2048] [--small 3000x64x64]
                                 [--out runs/benchmarks]

Each rank shards a model of so many fp32 matrices, FSDP2's units of ten each, and every rank runs through all of them in
bf16, as an engine beside each rank does: `stream_weights`; ``full_tensor()`` of each parameter, cast after, as trainers
do; torch's ``get_model_state_dict`` with ``full_state_dict``, cast tensor by tensor. What is fetched is read once, by
copying it into the memory that an engine has for it. Seconds, collectives, bytes that they leave with a rank, and peak
extra memory, turn by turn. Writes rollout.json and a chart, prints a table.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import (
    OUT,
    attempt,
    become_rank,
    circumstances,
    draw,
    finish,
    in_turns,
    merge,
    on_ranks,
    ratio,
    spread,
    summary,
    turn,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2_strategy import build_mesh, stream_weights

UNIT = 10
CONTESTANTS = ("ours", "full_tensor() of each", "full state dict")


class Count(TorchDispatchMode):
    """Count the collectives of this rank, and the bytes that they leave with it."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1].strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "wrap")):
            # Functional ones return their result; the others fill what they are given first.
            filled = result if func.namespace == "_c10d_functional" else args[0]
            tensors = filled if isinstance(filled, list | tuple) else [filled]
            self.counted[name] += 1
            self.counted["bytes"] += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return result


def sharded(count: int, shape: tuple[int, ...]) -> nn.Module:
    model = nn.Module()
    for i in range(0, count, UNIT):
        unit = nn.Module()
        for j in range(i, min(i + UNIT, count)):
            unit.register_parameter(f"weight{j}", nn.Parameter(torch.full(shape, 1 + j / count)))
        model.add_module(f"unit{i // UNIT}", fully_shard(unit, mesh=build_mesh()))
    return fully_shard(model, mesh=build_mesh())


def each_gathered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().full_tensor().to(torch.bfloat16)


def all_gathered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).items():
        yield name, tensor.to(torch.bfloat16)


def measured(rounds: int, count: int, shape: tuple[int, ...]) -> dict:
    """Let the contestants bring one model's weights to an engine, in turns."""
    model = sharded(count, shape)
    engine = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, _ in model.named_parameters()}
    streams = dict(zip(CONTESTANTS, (stream_weights, each_gathered, all_gathered), strict=True))

    def update(name: str) -> None:
        for key, tensor in streams[name](model):
            engine[key].copy_(tensor)

    found: dict = {}
    for name in CONTESTANTS:
        for tensor in engine.values():
            tensor.zero_()
        with Count() as counter:
            update(name)
        for i, tensor in enumerate(engine.values()):
            assert bool((tensor == torch.tensor(1 + i / count).to(torch.bfloat16)).all()), (name, i)
        found[name] = {"counted": dict(counter.counted), "turns": []}
    for name in in_turns(list(CONTESTANTS), rounds):
        found[name]["turns"].append(attempt(lambda n=name: turn(lambda: update(n))))
    return found


def work(rank: int, options: dict) -> None:
    become_rank(rank, options["ranks"], options["store"])
    cases = {kind: measured(options["rounds"], *options[kind]) for kind in ("large", "small")}
    finish(rank, options, cases)


def numbers(text: str) -> tuple[int, tuple[int, ...]]:
    count, *shape = map(int, text.split("x"))
    return count, tuple(shape)


def title(entry: dict, kind: str) -> str:
    count, shape = entry[kind]
    return f"{count} tensors of {' x '.join(map(str, shape))}, {entry['ranks']} ranks"


def table(entry: dict) -> str:
    lines = [f"{entry['hardware']}, torch {entry['torch']}", ""]
    columns = [
        "",
        "s, median (least - most)",
        "over ours (middle half)",
        "collectives",
        "MB gathered",
        "extra memory, MB",
    ]
    lines += [f"| {' | '.join(columns)} |", "|---|---|---|---|---|---|"]
    for kind, contestants in entry["cases"].items():
        for name, facts in contestants.items():
            start = f"| {title(entry, kind)}: {name} |"
            if "error" in facts:
                lines.append(f"{start} {facts['error']} | | | | |")
                continue
            over = ratio(facts["seconds"], contestants["ours"]["seconds"])
            counted = dict(facts["counted"])
            sent, peak = counted.pop("bytes") / 1e6, facts["peak_bytes"] / 1e6
            lines.append(
                f"{start} {spread(facts['seconds'])} | {over[0]:.2f} ({over[1]:.2f} - {over[2]:.2f}) | "
                f"{sum(counted.values())} | {sent:.0f} | {peak:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--large", type=numbers, default=(150, (2048, 2048)), help="count x rows x columns")
    parser.add_argument("--small", type=numbers, default=(3000, (64, 64)), help="count x rows x columns")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = on_ranks(work, vars(args))
    entry = {"ranks": args.ranks, "large": args.large, "small": args.small, **circumstances()}
    entry["cases"] = {
        kind: {name: {"counted": facts["counted"], **summary(facts["turns"])} for name, facts in contestants.items()}
        for kind, contestants in found.items()
    }
    merge(args.out / "rollout.json", entry, ("ranks", "hardware"))
    panels = [
        (title(entry, kind), {name: facts["seconds"] for name, facts in contestants.items() if "seconds" in facts})
        for kind, contestants in entry["cases"].items()
    ]
    draw(panels, args.out / "rollout.png")
    print(table(entry))


if __name__ == "__main__":
    main()
