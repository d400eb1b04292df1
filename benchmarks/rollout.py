"""Weights to an engine: streaming against a gather of each parameter, and against a gathered state dict.

    python benchmarks/rollout.py [--rounds 7] [--ranks 2] [--large 150x2048x2048] [--small 3000x64x64] [--out DIR]
                                 [--smoke]

Each rank shards a model of so many fp32 matrices, FSDP2's units of ten each, and every rank runs through all of them in
bf16, as an engine beside each rank does: `stream_weights`; ``full_tensor()`` of each parameter, cast after, as trainers
do; torch's ``get_model_state_dict`` with ``full_state_dict``, cast tensor by tensor. What is fetched is read once, by
copying it into the memory that an engine has for it. That memory is set to zero before each turn and compared with the
weights after it, outside of the timed part. Seconds, collectives, bytes that they leave with a rank, and peak extra
memory, turn by turn. Writes rollout.json and a chart, prints a table. `--smoke` runs all of it in seconds, with small
matrices and buckets.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import harness
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2_strategy import build_mesh, stream_weights

UNIT = 10
PERIOD = 251
"""A prime below 256; bf16 can represent all integers up to there."""
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


def values_of(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the values of one matrix: integers that bf16 can represent, in another order in each matrix."""
    elements = torch.arange(math.prod(shape))
    return elements.mul_(1 + number // PERIOD).add_(number).remainder_(PERIOD).float().view(shape)


def sharded(count: int, shape: tuple[int, ...]) -> tuple[nn.Module, dict[str, str]]:
    """Return a sharded model, and the digests of its whole weights in bf16."""
    model = nn.Module()
    expected = {}
    for i in range(0, count, UNIT):
        unit = nn.Module()
        for j in range(i, min(i + UNIT, count)):
            values = values_of(j, shape)
            expected[f"unit{i // UNIT}.weight{j}"] = harness.digest_of(values.to(torch.bfloat16))
            unit.register_parameter(f"weight{j}", nn.Parameter(values))
        model.add_module(f"unit{i // UNIT}", fully_shard(unit, mesh=build_mesh()))
    return fully_shard(model, mesh=build_mesh()), expected


def each_gathered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().full_tensor().to(torch.bfloat16)


def all_gathered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).items():
        yield name, tensor.to(torch.bfloat16)


def measured(options: dict, count: int, shape: tuple[int, ...]) -> dict:
    """Bring one model's weights to an engine, each contestant in its turn."""
    model, expected = sharded(count, shape)
    engine = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, _ in model.named_parameters()}
    streams = dict(zip(CONTESTANTS, (stream_weights, each_gathered, all_gathered), strict=True))
    if options["smoke"]:
        streams["ours"] = partial(stream_weights, bucket_bytes=4096)

    def update(name: str) -> None:
        for key, tensor in streams[name](model):
            engine[key].copy_(tensor)

    def checked_turn(name: str, take: Callable[[Callable[[], None]], dict]) -> list[dict]:
        for tensor in engine.values():
            tensor.zero_()
        return harness.attempt(
            lambda: take(lambda: update(name)), lambda: harness.check_values(harness.digests_of(engine), expected)
        )

    def count_in(call: Callable[[], None]) -> dict:
        with Count() as counter:
            call()
        return {"counted": dict(counter.counted)}

    found: dict = {}
    for name in CONTESTANTS:
        outcomes = checked_turn(name, count_in)
        found[name] = {
            "counted": outcomes[0].get("counted", {}),
            "turns": [outcomes] if harness.error_of([outcomes]) else [],
        }
    for name in harness.in_turns(list(CONTESTANTS), options["rounds"]):
        found[name]["turns"].append(checked_turn(name, harness.turn))
    return found


def work(rank: int, options: dict) -> None:
    harness.become_rank(rank, options)
    cases = {kind: measured(options, *options[kind]) for kind in ("large", "small")}
    harness.finish(rank, options, cases)


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
            if failed := facts.get("error", contestants["ours"].get("error")):
                lines.append(f"{start} {failed} | | | | |")
                continue
            over = harness.ratio(facts["seconds"], contestants["ours"]["seconds"])
            counted = dict(facts["counted"])
            sent, peak = counted.pop("bytes") / 1e6, facts["peak_bytes"] / 1e6
            lines.append(
                f"{start} {harness.spread(facts['seconds'])} | {over[0]:.2f} ({over[1]:.2f} - {over[2]:.2f}) | "
                f"{sum(counted.values())} | {sent:.0f} | {peak:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--large", type=numbers, default=(150, (2048, 2048)), help="count x rows x columns")
    parser.add_argument("--small", type=numbers, default=(3000, (64, 64)), help="count x rows x columns")
    args = harness.parse(parser, smoke={"large": (12, (32, 32)), "small": (30, (8, 8))})
    found = harness.on_ranks(work, vars(args))
    entry = {"ranks": args.ranks, "large": args.large, "small": args.small, **harness.circumstances(smoke=args.smoke)}
    entry["cases"] = {
        kind: {
            name: {"counted": facts["counted"], **harness.summary(facts["turns"])}
            for name, facts in contestants.items()
        }
        for kind, contestants in found.items()
    }
    harness.merge(args.out / "rollout.json", entry, ("ranks", "hardware"))
    panels = [
        (title(entry, kind), {name: facts["seconds"] for name, facts in contestants.items() if "seconds" in facts})
        for kind, contestants in entry["cases"].items()
    ]
    harness.draw(panels, args.out / "rollout.png", smoke=args.smoke)
    print(table(entry))


if __name__ == "__main__":
    main()
