"""Compare streaming weights to an engine with a gather of each parameter, a gathered state dict, and with differences.

    python benchmarks/rollout.py [--rounds 7] [--ranks 2] [--large 150x2048x2048] [--small 3000x64x64]
                                 [--changing 75x2048x2048] [--out DIR] [--smoke]

The ranks shard a model of fp32 matrices with ten matrices per FSDP2 unit. Every rank gets all weights in bf16, as if it
had its own engine. Contestants: `stream_weights`; ``full_tensor()`` of each parameter with a cast afterwards, as in
many trainers; torch's ``get_model_state_dict`` with ``full_state_dict``, cast tensor by tensor. Each tensor is read
once: it is copied into the memory of an engine. This memory is set to zero before each turn and compared with the
weights after it, outside of the timed part.

Then a share of the elements of the model ``--changing`` gets new values before each turn, at random places, and only
the differences are sent (``since=``) and written into the engine. Contestants: 0.1, 1 and 10 % of changed elements, and
a full stream, which is copied into the engine as above. Finding, sending and writing the differences is timed. This is
measured with a copy of what was sent last and an engine on each rank or one engine in another process, which rank 0
reaches by TCP; and with hashes of blocks. After each turn, the checksums of the engine's weights are compared.

Results: seconds, collectives, bytes that they write on a rank, and peak extra memory, turn by turn. Writes rollout.json
and a chart, prints a table. `--smoke` runs everything in seconds, with small matrices and buckets.
"""

import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection

import harness
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2_strategy import build_mesh, stream_weights
from fsdp2_strategy.rollout import RemoteEngine, TensorDifference, listen_at_free_port, serve, weight_checksums

UNIT = 10
PERIOD = 251
"""A prime below 256: bf16 represents all integers up to 256 exactly."""
SHARES = {"0.1 %": 0.001, "1 %": 0.01, "10 %": 0.1}
"""Shares of elements that change before a turn."""
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


class Keeper:
    """An engine that keeps weights, and writes changes into them."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.weights_version: str | None = None

    def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name not in self.weights:
                self.weights[name] = torch.empty_like(tensor)
            self.weights[name].copy_(tensor)

    def update_changed_weights(self, changes: Iterator, *, since: str, version: str) -> None:
        if since and since != self.weights_version:
            raise harness.ValuesError(f"the engine has version {self.weights_version} instead of {since}")
        for name, given in changes:
            if isinstance(given, TensorDifference):
                given.apply_(self.weights[name])
            else:
                self.update_weights(iter([(name, given)]))
        self.weights_version = version

    def weight_checksums(self) -> dict[str, str]:
        return weight_checksums(self.weights.items())

    def sleep(self) -> None:
        """Do nothing: there is no device memory."""

    wake_up = generate = sleep


def serve_keeper(pipe: Connection) -> None:
    torch.set_num_threads(1)
    logging.getLogger("fsdp2_strategy").setLevel(logging.ERROR)
    address = listen_at_free_port("127.0.0.1")
    pipe.send(address)
    serve(Keeper(), address)


@contextlib.contextmanager
def engine_in(where: str) -> Iterator[Keeper | RemoteEngine | None]:
    """Give this rank's engine: on each rank in its process, or for rank 0 in another process; None for other ranks."""
    if where != "in another process":
        yield Keeper()
        return
    if dist.get_rank():
        yield None
        return
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=serve_keeper, args=(theirs,), daemon=True)
    process.start()
    engine = RemoteEngine(ours.recv())
    yield engine
    engine.close()
    process.join()


class Follower:
    """An engine that follows a model, whose weights change between turns."""

    def __init__(self, model: nn.Module, retain: str, engine: Keeper | RemoteEngine | None) -> None:
        self.model, self.retain, self.engine = model, retain, engine
        self.version: str | None = ""
        self.take_changes()
        self.full_bytes, self.retained_bytes = self._last.full_bytes, self._last.retained_bytes
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def change(self, share: float) -> None:
        """Give new values to a share of the elements of this rank's shards."""
        for parameter in self.model.parameters():
            local = harness.local_of(parameter.detach()).view(-1)
            places = torch.randint(len(local), (round(share * len(local)),), generator=self._generator)
            values = torch.randint(PERIOD, places.shape, generator=self._generator).float()
            local[places.to(local.device)] = values.to(local.device)

    def take_all(self) -> None:
        stream = stream_weights(self.model)
        if self.engine is None:
            deque(stream, maxlen=0)
        else:
            self.engine.update_weights(stream)

    def take_changes(self) -> None:
        self._last = stream_weights(self.model, since=self.version, retain=self.retain)
        self.sent_bytes = 0
        if self.engine is None:
            deque(self._last, maxlen=0)
        else:
            since = "" if self._last.is_full else self.version
            self.engine.update_changed_weights(self._counted(), since=since, version=self._last.version)
        self.version = self._last.version

    def _counted(self) -> Iterator:
        for name, given in self._last:
            self.sent_bytes += given.nbytes
            yield name, given

    def check(self) -> None:
        """Raise if a weight is wrong, or a stream of changes had all weights."""
        expected = weight_checksums(stream_weights(self.model))
        held = expected if self.engine is None else self.engine.weight_checksums()
        wrong = [name for name, checksum in expected.items() if held.get(name) != checksum]
        if wrong or self._last.is_full:
            raise harness.ValuesError(f"{len(wrong)} weights differ; all were sent: {self._last.is_full}")


def measure_changes(options: dict, where: str, retain: str) -> dict:
    """Send the weights of one model to an engine in full and by difference, in turns."""
    model, _ = sharded_model(*options["changing"])
    with engine_in(where) as engine:
        follower = Follower(model, retain, engine)
        follower.take_changes()  # so that the first turn of a full stream is not that of all changes
        found: dict = {name: {"sent_bytes": follower.full_bytes, "turns": []} for name in ("all", *SHARES)}
        # The first round warms up.
        for name in harness.turn_order(list(found), options["rounds"] + 1, options.get("until")):
            if name != "all":
                follower.change(SHARES[name])
            take = follower.take_all if name == "all" else follower.take_changes
            found[name]["turns"].append(harness.attempt(partial(harness.turn, take), follower.check))
            if name != "all":
                found[name]["sent_bytes"] = follower.sent_bytes
    for facts in found.values():
        facts["turns"] = facts["turns"][1:]
    return {**found, "retained_bytes": follower.retained_bytes}


def work(rank: int, options: dict) -> None:
    harness.init_rank(rank, options)
    cases = {kind: measure(options, *options[kind]) for kind in ("large", "small")}
    changes = {
        f"{where}, {retain}": measure_changes(options, where, retain)
        for where, retain in (("on each rank", "copy"), ("in another process", "copy"), ("on each rank", "hashes"))
    }
    harness.finish(rank, options, {"cases": cases, "changes": changes})


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
    lines += [
        "",
        "| changed elements | s: median (min - max) | full stream / this (middle half) | bytes, % | retained, MB |",
        "|---|---|---|---|---|",
    ]
    for kind, found in entry["changes"].items():
        contestants = {name: facts for name, facts in found.items() if name != "retained_bytes"}
        for name, facts in contestants.items():
            start = f"| {title(entry, 'changing')}: {name}, {kind} |"
            if failed := facts.get("error", contestants["all"].get("error")):
                lines.append(f"{start} {failed} | | | |")
                continue
            middle, low, high = harness.ratio(contestants["all"]["seconds"], facts["seconds"])
            share = 100 * facts["sent_bytes"] / contestants["all"]["sent_bytes"]
            lines.append(
                f"{start} {harness.format_times(facts['seconds'])} | {middle:.2f} ({low:.2f} - {high:.2f}) | "
                f"{share:.2f} | {found['retained_bytes'] / 1e6:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=max(2, torch.accelerator.device_count()))
    parser.add_argument("--large", type=count_and_shape, default=(150, (2048, 2048)), help="count x rows x columns")
    parser.add_argument("--small", type=count_and_shape, default=(3000, (64, 64)), help="count x rows x columns")
    parser.add_argument("--changing", type=count_and_shape, default=(75, (2048, 2048)), help="count x rows x columns")
    smoke = {"large": (12, (32, 32)), "small": (30, (8, 8)), "changing": (10, (64, 64))}
    args = harness.parse(parser, smoke=smoke)
    found = harness.run_on_ranks(work, vars(args))
    entry = {"ranks": args.ranks, **harness.environment(smoke=args.smoke)}
    entry |= {"large": args.large, "small": args.small, "changing": args.changing}
    entry["cases"] = {
        kind: {
            name: {"counted": facts["counted"], **harness.summary(facts["turns"])}
            for name, facts in contestants.items()
        }
        for kind, contestants in found["cases"].items()
    }
    entry["changes"] = {
        kind: {
            name: {"sent_bytes": facts["sent_bytes"], **harness.summary(facts["turns"])}
            if name != "retained_bytes"
            else facts
            for name, facts in contestants.items()
        }
        for kind, contestants in found["changes"].items()
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
