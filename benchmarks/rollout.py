"""Compare streaming weights to an engine with a gather of each parameter and with a gathered state dict.

    python benchmarks/rollout.py [--rounds 7] [--ranks 2] [--large 150x2048x2048] [--small 3000x64x64] [--out DIR]
                                 [--smoke]

The ranks shard a model of fp32 matrices with ten matrices per FSDP2 unit. Every rank gets all weights in bf16, as if it
had its own engine. Contestants: `stream_weights`; ``full_tensor()`` of each parameter with a cast afterwards, as in
many trainers; torch's ``get_model_state_dict`` with ``full_state_dict``, cast tensor by tensor. Each tensor is read
once: it is copied into the memory of an engine. This memory is set to zero before each turn and compared with the
weights after it, outside of the timed part. Results: seconds, collectives, bytes that they write on a rank, and peak
extra memory, turn by turn. Writes rollout.json and a chart, prints a table. `--smoke` runs everything in seconds, with
small matrices and buckets.
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
"""A prime below 256: bf16 represents all integers up to 256 exactly."""
CONTESTANTS = ("ours", "full_tensor() of each", "full state dict")


class CountCollectives(TorchDispatchMode):
    """Count the collectives of this rank, and the bytes that they write on it."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1].strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "wrap")):
            # Functional collectives return their result; the others write to their first argument.
            outputs = result if func.namespace == "_c10d_functional" else args[0]
            tensors = outputs if isinstance(outputs, list | tuple) else [outputs]
            self.counted[name] += 1
            self.counted["bytes"] += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return result


def values_of(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the values of one matrix: integers that bf16 represents exactly, in an order of its own."""
    elements = torch.arange(math.prod(shape))
    return elements.mul_(1 + number // PERIOD).add_(number).remainder_(PERIOD).float().view(shape)


def sharded_model(count: int, shape: tuple[int, ...]) -> tuple[nn.Module, dict[str, str]]:
    """Return a sharded model, and the digests of its full weights in bf16."""
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


def gather_each(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().full_tensor().to(torch.bfloat16)


def gather_state_dict(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).items():
        yield name, tensor.to(torch.bfloat16)


def measure(options: dict, count: int, shape: tuple[int, ...]) -> dict:
    """Copy the weights of one model to an engine with all contestants, in turns."""
    model, expected = sharded_model(count, shape)
    engine = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, _ in model.named_parameters()}
    streams = dict(zip(CONTESTANTS, (stream_weights, gather_each, gather_state_dict), strict=True))
    if options["smoke"]:
        streams["ours"] = partial(stream_weights, bucket_bytes=4096)

    def update(name: str) -> None:
        for key, tensor in streams[name](model):
            engine[key].copy_(tensor)

    def checked_turn(name: str, timer: Callable[[Callable[[], None]], dict]) -> list[dict]:
        for tensor in engine.values():
            tensor.zero_()
        return harness.attempt(
            lambda: timer(lambda: update(name)), lambda: harness.check_values(harness.digests_of(engine), expected)
        )

    def count_in(call: Callable[[], None]) -> dict:
        with CountCollectives() as counter:
            call()
        return {"counted": dict(counter.counted)}

    found: dict = {}
    for name in CONTESTANTS:
        outcomes = checked_turn(name, count_in)
        found[name] = {
            "counted": outcomes[0].get("counted", {}),
            "turns": [outcomes] if harness.error_of([outcomes]) else [],
        }
    for name in harness.turn_order(list(CONTESTANTS), options["rounds"]):
        found[name]["turns"].append(checked_turn(name, harness.turn))
    return found


def work(rank: int, options: dict) -> None:
    harness.init_rank(rank, options)
    cases = {kind: measure(options, *options[kind]) for kind in ("large", "small")}
    harness.finish(rank, options, cases)


def count_and_shape(text: str) -> tuple[int, tuple[int, ...]]:
    count, *shape = map(int, text.split("x"))
    return count, tuple(shape)


def title(entry: dict, kind: str) -> str:
    count, shape = entry[kind]
    return f"{count} tensors of {' x '.join(map(str, shape))}, {entry['ranks']} ranks"


def table(entry: dict) -> str:
    lines = [f"{entry['hardware']}, torch {entry['torch']}", ""]
    columns = [
        "",
        "s: median (min - max)",
        "time / ours (middle half)",
        "collectives",
        "gathered on a rank, MB",
        "extra memory, MB",
    ]
    lines += [f"| {' | '.join(columns)} |", "|---|---|---|---|---|---|"]
    for kind, contestants in entry["cases"].items():
        for name, facts in contestants.items():
            start = f"| {title(entry, kind)}: {name} |"
            if failed := facts.get("error", contestants["ours"].get("error")):
                lines.append(f"{start} {failed} | | | | |")
                continue
            middle, low, high = harness.ratio(facts["seconds"], contestants["ours"]["seconds"])
            counted = dict(facts["counted"])
            gathered, peak = counted.pop("bytes") / 1e6, facts["peak_bytes"] / 1e6
            lines.append(
                f"{start} {harness.format_times(facts['seconds'])} | {middle:.2f} ({low:.2f} - {high:.2f}) | "
                f"{sum(counted.values())} | {gathered:.0f} | {peak:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--large", type=count_and_shape, default=(150, (2048, 2048)), help="count x rows x columns")
    parser.add_argument("--small", type=count_and_shape, default=(3000, (64, 64)), help="count x rows x columns")
    args = harness.parse(parser, smoke={"large": (12, (32, 32)), "small": (30, (8, 8))})
    found = harness.run_on_ranks(work, vars(args))
    entry = {"ranks": args.ranks, "large": args.large, "small": args.small, **harness.environment(smoke=args.smoke)}
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
