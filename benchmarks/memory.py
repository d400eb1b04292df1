"""Measure peaks of host memory beside their bounds, offload and reload, and modes of gradient accumulation.

    python benchmarks/memory.py [--ranks 2] [--rounds 7] [--parameters 200] [--parts peaks moves accumulation]
                                [--dir DIR] [--out DIR] [--smoke]

A Llama of 0.16 billion fp32 parameters after a step of AdamW is saved, loaded, exported, streamed, offloaded and
reloaded. For each operation, the peak of host memory of the worst rank, in addition to what it holds before, is given
beside its bound; see `peaks`. Values are compared each time.

The AdamW state of a model with the given millions of parameters is offloaded and reloaded, in turns with copies of the
same bytes into new memory (pinned if there is an accelerator), which keep or free their sources; all values are
compared each time. Without an accelerator, ours copies nothing, so a second contestant copies as it does with one: into
memory that is as new as that of the others. After that, one
optimizer step of 8 micro-batches in each mode of accumulation, with all ranks as one shard group and, with at least 4
ranks, in groups of two (HSDP): seconds, bytes that a rank passes to collectives, peak memory; the modes' gradient norms
must agree.

Writes memory.json and memory.png, prints tables. `--smoke` runs everything in seconds, with tiny models on 4 ranks.
"""

import json
import shutil
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import harness
import peaks
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.model import offload, offloading, reload
from fsdp2_strategy.model.offloading import is_offloaded

OPERATIONS = {"away": "offload", "back": "reload"}
"""The keys of results, and what the table calls them."""
MODES = ["every", "defer_all_reduce", "last"]
LARGEST_DIFFERENCE = 0.01
"""Between the gradient norms of two modes, relative: gradients are summed in bf16, in different orders."""


class CountBytes(TorchDispatchMode):
    """Count the bytes that this rank passes to collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1].strip("_")
            inputs = args[1] if name in ("allgather_base", "reduce_scatter_base") else args[0]
            tensors = inputs if isinstance(inputs, list | tuple) else [inputs]
            self.sent[name] += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


class BareCopies:
    """Copy tensors into new host memory, and from there into new device memory."""

    def __init__(self, examples: list[torch.Tensor]) -> None:
        self.sources = [torch.empty_like(t) for t in examples]
        harness.fill(self.sources)
        pinned = torch.accelerator.is_available()
        self._pinned = [torch.empty(t.shape, pin_memory=True) for t in self.sources] if pinned else None
        self.copies: list[torch.Tensor] = []
        self.returned: list[torch.Tensor] = []

    def offload(self) -> None:
        self.copies = self._pinned or [torch.empty(t.shape) for t in self.sources]
        for target, source in zip(self.copies, self.sources, strict=True):
            target.copy_(source, non_blocking=True)
        harness.synchronize()

    def reload(self) -> None:
        for copy in self.copies:
            new = torch.empty(copy.shape, device=harness.device())
            self.returned.append(new.copy_(copy, non_blocking=True))
        harness.synchronize()


class BareMoves(BareCopies):
    """The same, and free the memory that the tensors were in."""

    def offload(self) -> None:
        super().offload()
        self.sources = []

    def reload(self) -> None:
        super().reload()
        self.sources, self.copies = self.returned, []


def named(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"tensor {i}": tensor for i, tensor in enumerate(tensors)}


def offloads(rounds: int, millions: float) -> dict:
    """Offload and reload AdamW's state, in turns with plain copies."""
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    side = int((millions * 1e6 / 4) ** 0.5)  # so large that freed memory returns to the system at once
    model = strategy.prepare_model(nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(4))), True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    strategy.backward(model(torch.ones(1, side, device=strategy.device)).mean(), model, optimizer)
    strategy.optimizer_step(optimizer, model)

    def state() -> list[torch.Tensor]:
        return [harness.local_of(t) for s in optimizer.state.values() for t in s.values() if t.ndim]

    harness.fill(state())
    bare = BareCopies(state())
    moves = BareMoves(state())
    expected = harness.digests_of(named(state())), harness.digests_of(named(bare.sources))

    def move(call: Callable[[object], None], *, copies: bool) -> None:
        with patch.object(offloading, "_needs_copies", lambda: copies):
            call(optimizer)
        harness.synchronize()

    def check_offloaded() -> None:
        if not is_offloaded(optimizer):
            raise harness.ValuesError("the optimizer's state is not offloaded")

    def of_bare(copies: BareCopies) -> tuple:
        return (
            (copies.offload, lambda: harness.check_values(harness.digests_of(named(copies.copies)), expected[1])),
            (copies.reload, lambda: harness.check_values(harness.digests_of(named(copies.returned)), expected[1])),
        )

    def of_ours(*, copies: bool) -> tuple:
        return (
            (lambda: move(offload, copies=copies), check_offloaded),
            (
                lambda: move(reload, copies=copies),
                lambda: harness.check_values(harness.digests_of(named(state())), expected[0]),
            ),
        )

    has_accelerator = torch.accelerator.is_available()
    contestants = {
        "bare copy": of_bare(bare),
        "bare copy, sources freed": of_bare(moves),
        "ours": of_ours(copies=has_accelerator),
        **({} if has_accelerator else {"ours, copying as with an accelerator": of_ours(copies=True)}),
    }
    results: dict = {key: {} for key in OPERATIONS}
    for name in harness.turn_order(list(contestants), rounds + 1):
        for kind, (call, check) in zip(results, contestants[name], strict=True):
            results[kind].setdefault(name, []).append(harness.attempt(lambda c=call: harness.turn(c), check))
        bare.copies, bare.returned = [], []
        moves.copies, moves.returned = [], []
    warm = {kind: {name: turns[1:] for name, turns in by_name.items()} for kind, by_name in results.items()}
    return {"bytes_of_a_rank": sum(t.nbytes for t in bare.sources), "results": warm}


def config_of(*, smoke: bool) -> LlamaConfig:
    vocab_size, width, layers = (64, 32, 2) if smoke else (4096, 384, 8)
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=8,
    )


def accumulation(
    options: dict, shard_size: int, config: LlamaConfig, length: int = 64, until: float | None = None
) -> dict:
    """Measure optimizer steps of several micro-batches in each mode of accumulation."""
    total = options["micro_batches"] * dist.get_world_size()
    steps = {}
    for mode in MODES:
        strategy = FSDPV2Strategy(config=StrategyConfig(max_norm=1.0, train_batch_size=total, grad_sync=mode))
        torch.manual_seed(0)
        model = strategy.prepare_model(LlamaForCausalLM(config), is_training=True, shard_size=shard_size)
        optimizer = strategy.create_optimizer(model, lr=1e-3)
        steps[mode] = (strategy, model, optimizer)
    ids = torch.randint(0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(mode: str) -> float:
        strategy, model, optimizer = steps[mode]
        for _ in range(options["micro_batches"]):
            batch = ids.to(strategy.device)
            strategy.backward(model(input_ids=batch, labels=batch).loss, model, optimizer)
            result = strategy.optimizer_step(optimizer, model)
        harness.synchronize()
        return result.grad_norm

    found: dict = {}
    for mode in MODES:
        step(mode)
        with CountBytes() as counter:
            norm = step(mode)
        found[mode] = {"sent_bytes": dict(counter.sent), "grad_norm": norm, "turns": []}
        if not abs(norm / found[MODES[0]]["grad_norm"] - 1) <= LARGEST_DIFFERENCE:
            expected = found[MODES[0]]["grad_norm"]
            raise harness.ValuesError(f"the gradient norm of {mode} is {norm}, expected that of {MODES[0]}: {expected}")
    for mode in harness.turn_order(MODES, options["rounds"], until):
        found[mode]["turns"].append(harness.attempt(lambda m=mode: harness.turn(lambda: step(m))))
    return found


def peaks_config(*, smoke: bool) -> LlamaConfig:
    """Configure a Llama of 0.16 billion parameters, so that a shard is much larger than the buffers; or a tiny one."""
    config = harness.llama_config("0.4", smoke=smoke)
    config.num_hidden_layers = min(6, config.num_hidden_layers)
    return config


def host_peaks(options: dict) -> dict:
    """Measure the peak of host memory of each operation; every round begins with the same memory."""
    folder = Path(options["dir"])
    warm_up = peaks.Trained.of(peaks_config(smoke=True))
    for operation in peaks.operations(warm_up, folder / "warm").values():  # Python and torch read modules
        peaks.run(operation)
    del warm_up, operation
    trained = peaks.Trained.of(peaks_config(smoke=options["smoke"]))
    operations = peaks.operations(trained, folder)
    found: dict = {name: [] for name in operations}
    for _ in range(options["rounds"]):
        for name, operation in operations.items():
            found[name].append(peaks.run(operation))
    return {
        "weights_bytes": trained.weights_bytes,
        "state_bytes": trained.state_bytes,
        "operations": {
            name: {"bound_bytes": each.bound_bytes, "formula": each.formula, "turns": found[name]}
            for name, each in operations.items()
        },
    }


def work(rank: int, options: dict) -> None:
    harness.init_rank(rank, options)
    result: dict = {}
    if "peaks" in options["parts"]:
        result["peaks"] = host_peaks(options)
    if "moves" in options["parts"]:
        result["moves"] = offloads(options["rounds"], options["parameters"])
    sizes = [-1, 2] if options["ranks"] >= 4 else [-1]
    if "accumulation" in options["parts"]:
        result["accumulation"] = {
            str(size): accumulation(options, size, config_of(smoke=options["smoke"])) for size in sizes
        }
    harness.finish(rank, options, result)


def peaks_table(entry: dict) -> str:
    found = entry["peaks"]
    sizes = (found["weights_bytes"] / 1e6, found["state_bytes"] / 1e6)
    lines = [f"{sizes[0]:.0f} MB of weights and {sizes[1]:.0f} MB of optimizer state per rank, {entry['ranks']} ranks"]
    lines += ["", "| operation | peak, MB | bound, MB | the bound is |", "|---|---|---|---|"]
    for name, facts in found["operations"].items():
        if "error" in facts:
            lines.append(f"| {name} | {facts['error']} | | |")
            continue
        peak, bound = facts["peak_bytes"] / 1e6, facts["bound_bytes"] / 1e6
        lines.append(f"| {name} | {peak:.0f} | {bound:.0f} | {facts['formula']} |")
    return "\n".join(lines)


def moves_table(entry: dict) -> str:
    nbytes = entry["bytes_of_a_rank"]
    lines = [f"AdamW's state, {nbytes / 1e9:.2f} GB per rank, {entry['ranks']} ranks, {entry['hardware']}", ""]
    lines += ["| | s: median (min - max) | GB/s per rank | extra memory, MB | time / bare copy |"]
    lines += ["|---|---|---|---|---|"]
    for key, contestants in entry["moves"].items():
        kind = OPERATIONS[key]
        for name, facts in contestants.items():
            if failed := facts.get("error", contestants["bare copy"].get("error")):
                lines.append(f"| {kind}: {name} | {failed} | | | |")
                continue
            gb_per_second = nbytes / statistics.median(facts["seconds"]) / 1e9
            middle, low, high = harness.ratio(facts["seconds"], contestants["bare copy"]["seconds"])
            text = f"{middle:.2f} ({low:.2f} - {high:.2f})"
            peak = facts["peak_bytes"] / 1e6
            times = harness.format_times(facts["seconds"])
            lines.append(f"| {kind}: {name} | {times} | {gb_per_second:.2f} | {peak:.0f} | {text} |")
    return "\n".join(lines)


def accumulation_table(entry: dict) -> str:
    lines = [f"| accumulation of {entry['micro_batches']} | seconds per step: median (min - max) "]
    lines[-1] += "| gathered, MB | reduce-scattered, MB | all-reduced, MB | peak memory, MB |"
    lines += ["|---|---|---|---|---|---|"]
    for size, modes in entry["accumulation"].items():
        for mode, facts in modes.items():
            if "error" in facts:
                lines.append(f"| {mode}, shard size {size} | {facts['error']} | | | | |")
                continue
            sent = [facts["sent_bytes"].get(n, 0) / 1e6 for n in ("allgather_base", "reduce_scatter_base", "allreduce")]
            columns = " | ".join(f"{number:.1f}" for number in sent)
            peak = facts["peak_bytes"] / 1e6
            times = harness.format_times(facts["seconds"])
            lines.append(f"| {mode}, shard size {size} | {times} | {columns} | {peak:.0f} |")
    return "\n".join(lines)


def draw(entry: dict, path: Path) -> None:
    """Draw a bar for the peak of each operation, and a line where its bound is."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    found = {name: facts for name, facts in entry["peaks"]["operations"].items() if "error" not in facts}
    figure, axes = plt.subplots(figsize=(9.0, 3.8), layout="constrained")
    rows = range(len(found))
    bounds = [facts["bound_bytes"] / 1e6 for facts in found.values()]
    values = [facts["peak_bytes"] / 1e6 for facts in found.values()]
    bars = axes.barh(rows, values, color="#1f6fb4", label="peak of the worst rank")
    axes.vlines(bounds, [row - 0.4 for row in rows], [row + 0.4 for row in rows], color="#c0392b", label="bound")
    for bar, value, bound, facts in zip(bars, values, bounds, found.values(), strict=True):
        at = max(value, bound) + 0.01 * max(*values, *bounds)
        axes.text(at, bar.get_y() + bar.get_height() / 2, f"{value:.0f}, bound {bound:.0f}: {facts['formula']}",
                  va="center", fontsize=7)  # fmt: skip
    held = entry["peaks"]["weights_bytes"] / 1e6, entry["peaks"]["state_bytes"] / 1e6
    axes.set_yticks(rows, found, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.65 * max(*values, *bounds))
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("MB of host memory, in addition to what the rank holds", fontsize=8)
    title = f"{entry['ranks']} ranks, each with {held[0]:.0f} MB of weights and {held[1]:.0f} MB of optimizer state"
    axes.set_title(harness.SMOKE_TITLE if entry["smoke"] else title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, dpi=120)


PARTS = {"peaks": peaks_table, "moves": moves_table, "accumulation": accumulation_table}
"""The parts of the benchmark, and the function that formats the result of each."""


def summaries(measured: dict) -> dict:
    """Replace the turns of all parts by their summaries."""
    entry: dict = {}
    if "peaks" in measured:
        found = measured["peaks"]["operations"]
        operations = {name: {**facts, **harness.summary(facts.pop("turns"))} for name, facts in found.items()}
        entry["peaks"] = {**measured["peaks"], "operations": operations}
    if "moves" in measured:
        entry["bytes_of_a_rank"] = measured["moves"]["bytes_of_a_rank"]
        entry["moves"] = {
            kind: {name: harness.summary(turns) for name, turns in contestants.items()}
            for kind, contestants in measured["moves"]["results"].items()
        }
    if "accumulation" in measured:
        entry["accumulation"] = {
            size: {mode: {**facts, **harness.summary(facts.pop("turns"))} for mode, facts in modes.items()}
            for size, modes in measured["accumulation"].items()
        }
    return entry


def origin_of(entry: dict) -> dict[str, str]:
    """Return when and how an entry, or a part of it, was measured."""
    return {name: entry[name] for name in ("command", "commit", "date")}


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=max(2, torch.accelerator.device_count()))
    parser.add_argument("--parameters", type=float, default=200, help="millions of parameters of offload and reload")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches per step")
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=[*PARTS])
    smoke = {"ranks": 4, "parameters": 0.05, "micro_batches": 2}
    args = harness.parse(parser, smoke=smoke, scratch_folders={"dir": Path("/dev/shm/memory-benchmark")})
    try:
        measured = harness.run_on_ranks(work, vars(args))
    finally:
        shutil.rmtree(args.dir, ignore_errors=True)
    facts = {"ranks": args.ranks, "micro_batches": args.micro_batches, **harness.environment(smoke=args.smoke)}
    entry = {**facts, **summaries(measured), "measured": dict.fromkeys(args.parts, origin_of(facts))}
    results = args.out / "memory.json"
    for before in json.loads(results.read_text()) if results.exists() else []:  # keep the parts that were not run
        if (before["ranks"], before["hardware"]) == (entry["ranks"], entry["hardware"]):
            known = before.get("measured") or {part: origin_of(before) for part in PARTS if part in before}
            entry = {**before, **entry, "measured": {**known, **entry["measured"]}}
    harness.merge(results, entry, ("ranks", "hardware"))
    if "peaks" in args.parts:
        draw(entry, args.out / "memory.png")
    print("\n\n".join(PARTS[part](entry) for part in args.parts))


if __name__ == "__main__":
    main()
