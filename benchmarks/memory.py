"""Memory that moves: offload and reload against bare copies; and what the modes of accumulation cost.

    python benchmarks/memory.py [--ranks 2] [--rounds 7] [--parameters 200] [--out runs/benchmarks]

The state of AdamW over a model of so many million parameters goes to host memory and comes back, in turns with copies
of the same bytes into fresh memory (pinned, beside an accelerator). Then one optimizer step of 8 micro-batches in each
mode of accumulation, on all ranks in one shard group and, from 4 ranks on, in groups of two (HSDP): seconds, bytes that
a rank sends into collectives, peak memory. Writes memory.json, prints tables.
"""

import argparse
import statistics
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from harness import (
    OUT,
    attempt,
    become_rank,
    circumstances,
    finish,
    in_turns,
    local_of,
    merge,
    on_ranks,
    ratio,
    spread,
    summary,
    turn,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, offload, reload

MICRO_BATCHES = 8
MODES = ["every", "defer_all_reduce", "last"]


class CountBytes(TorchDispatchMode):
    """Count the bytes that this rank gives to collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1].strip("_")
            given = args[1] if name in ("allgather_base", "reduce_scatter_base") else args[0]
            tensors = given if isinstance(given, list | tuple) else [given]
            self.sent[name] += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def moves(rounds: int, millions: int) -> dict:
    """Let AdamW's state go and come back, in turns with bare copies."""
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    side = int((millions * 1e6 / 4) ** 0.5)  # large enough that freed memory goes back to the system at once
    model = strategy.prepare_model(nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(4))), True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    strategy.backward(model(torch.ones(1, side, device=strategy.device)).mean(), model, optimizer)
    strategy.optimizer_step(optimizer, model)
    state = [local_of(t) for s in optimizer.state.values() for t in s.values() if t.ndim]
    sources = [torch.ones_like(t) for t in state]
    pinned = torch.cuda.is_available()
    copies: list[torch.Tensor] = []
    kept = [torch.empty(t.shape, pin_memory=True) for t in sources] if pinned else None

    def copy_away() -> None:
        targets = kept or [torch.empty(t.shape) for t in sources]
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        copies[:] = targets
        synchronize()

    def copy_back() -> None:
        fresh = []
        for there in copies:
            back = torch.empty(there.shape, device=strategy.device)
            fresh.append(back.copy_(there, non_blocking=True))
        synchronize()

    def go(call) -> None:
        call(optimizer)
        synchronize()

    contestants = {
        "bare copy": (copy_away, copy_back),
        "ours": (lambda: go(offload), lambda: go(reload)),
    }
    results: dict = {"away": {}, "back": {}}
    for name in in_turns(list(contestants), rounds + 1):
        for kind, call in zip(("away", "back"), contestants[name], strict=True):
            results[kind].setdefault(name, []).append(attempt(lambda c=call: turn(c)))
        copies.clear()
    warm = {kind: {name: turns[1:] for name, turns in by_name.items()} for kind, by_name in results.items()}
    return {"bytes_of_a_rank": sum(t.nbytes for t in sources), "results": warm}


def accumulation(rounds: int, shard_size: int) -> dict:
    """Take steps of 8 micro-batches in each mode."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8
    )
    total = MICRO_BATCHES * dist.get_world_size()
    steps = {}
    for mode in MODES:
        strategy = FSDPV2Strategy(config=StrategyConfig(max_norm=1.0, train_batch_size=total, grad_sync=mode))
        torch.manual_seed(0)
        model = strategy.prepare_model(LlamaForCausalLM(config), is_training=True, shard_size=shard_size)
        optimizer = strategy.create_optimizer(model, lr=1e-3)
        steps[mode] = (strategy, model, optimizer)
    ids = torch.randint(0, 4096, (1, 64), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(mode: str) -> float:
        strategy, model, optimizer = steps[mode]
        for _ in range(MICRO_BATCHES):
            batch = ids.to(strategy.device)
            strategy.backward(model(input_ids=batch, labels=batch).loss, model, optimizer)
            result = strategy.optimizer_step(optimizer, model)
        synchronize()
        return result.grad_norm

    found: dict = {}
    for mode in MODES:
        step(mode)
        with CountBytes() as counter:
            norm = step(mode)
        found[mode] = {"sent_bytes": dict(counter.sent), "grad_norm": norm, "turns": []}
    for mode in in_turns(MODES, rounds):
        found[mode]["turns"].append(attempt(lambda m=mode: turn(lambda: step(m))))
    return found


def work(rank: int, options: dict) -> None:
    become_rank(rank, options["ranks"], options["store"])
    result = {"moves": moves(options["rounds"], options["parameters"])}
    sizes = [-1, 2] if options["ranks"] >= 4 else [-1]
    result["accumulation"] = {str(size): accumulation(options["rounds"], size) for size in sizes}
    finish(rank, options, result)


def table(entry: dict) -> str:
    nbytes = entry["bytes_of_a_rank"]
    lines = [f"AdamW's state, {nbytes / 1e9:.2f} GB a rank, {entry['ranks']} ranks, {entry['hardware']}", ""]
    lines += ["| | s, median (least - most) | GB/s a rank | extra memory, MB | ours / bare |", "|---|---|---|---|---|"]
    for kind, contestants in entry["moves"].items():
        for name, facts in contestants.items():
            rate = nbytes / statistics.median(facts["seconds"]) / 1e9
            beside = ratio(facts["seconds"], contestants["bare copy"]["seconds"])
            text = f"{beside[0]:.2f} ({beside[1]:.2f} - {beside[2]:.2f})"
            peak = facts["peak_bytes"] / 1e6
            lines.append(f"| {kind}: {name} | {spread(facts['seconds'])} | {rate:.2f} | {peak:.0f} | {text} |")
    lines += ["", "| accumulation of 8 | s a step | gathered, MB | reduce-scattered, MB | all-reduced, MB | peak, MB |"]
    lines += ["|---|---|---|---|---|---|"]
    for size, modes in entry["accumulation"].items():
        for mode, facts in modes.items():
            sent = [facts["sent_bytes"].get(n, 0) / 1e6 for n in ("allgather_base", "reduce_scatter_base", "allreduce")]
            columns = " | ".join(f"{number:.1f}" for number in sent)
            peak = facts["peak_bytes"] / 1e6
            lines.append(f"| {mode}, shard size {size} | {spread(facts['seconds'])} | {columns} | {peak:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parameters", type=int, default=200, help="in millions")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    measured = on_ranks(work, vars(args))
    entry = {"ranks": args.ranks, **circumstances(), "bytes_of_a_rank": measured["moves"]["bytes_of_a_rank"]}
    entry["moves"] = {
        kind: {name: summary(turns) for name, turns in contestants.items()}
        for kind, contestants in measured["moves"]["results"].items()
    }
    entry["accumulation"] = {
        size: {mode: {**facts, **summary(facts.pop("turns"))} for mode, facts in modes.items()}
        for size, modes in measured["accumulation"].items()
    }
    merge(args.out / "memory.json", entry, ("ranks", "hardware"))
    print(table(entry))


if __name__ == "__main__":
    main()
