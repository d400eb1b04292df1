"""Compare sequences that are split over ranks with full ones: seconds and peak memory of a training step, by length.

    python benchmarks/sequence.py [--ranks 2 4] [--rounds 7] [--lengths 1024 2048 4096 8192] [--hidden 512] [--layers 4]
                                  [--budget-mb 1024] [--longest 65536] [--out DIR] [--smoke]

A Llama with as many key heads as half its query heads takes steps of forward, backward and AdamW, in fp32 (on GPUs in
bf16). Contestants, in turns: full sequences, one per rank; split sequences with ``sequence_parallel_size`` = number of
ranks, the same batch; and split sequences, one for all ranks, which is the smallest step. The first two compute the
same, so their times compare the cost of the exchanges; the last one needs the least memory. After each turn, the loss
is compared with that of full sequences, to 1e-5.

The all-to-alls of one step are counted, with their bytes, and compared with the theory: without sequence parallelism
there are none; in each layer, queries, keys and values travel together, then the result, and both again in backward.
Literature (https://arxiv.org/abs/2309.14509) has one exchange for each of the four. A rank sends batch x length x width
/ ranks elements in each, where keys and values have the width of their heads, repeated if ranks outnumber them.

At last, the longest sequence is searched whose step needs no more memory than a budget, in addition to the weights.
Writes sequence.json, prints a table. `--smoke` runs everything in seconds at tiny sizes.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import harness
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig

FULL, SAME, ONE = "full, one sequence per rank", "ours, the same batch", "ours, one sequence for all ranks"
CONTESTANTS = (FULL, SAME, ONE)
LARGEST_DIFFERENCE = 1e-2 if torch.accelerator.is_available() else 1e-5  # bf16 or fp32
"""Between two losses, relative."""
HEADS, KEY_HEADS = 8, 4


class Steps:
    """Take steps of two models with the same weights: one computes full sequences, the other one parts of them."""

    def __init__(self, options: dict) -> None:
        self.ranks = dist.get_world_size()
        self.strategies, self.models, self.optimizers = {}, {}, {}
        self.config = LlamaConfig(
            vocab_size=options["vocabulary"], hidden_size=options["hidden"], intermediate_size=3 * options["hidden"],
            num_hidden_layers=options["layers"], num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS,
            max_position_embeddings=options["longest"], pad_token_id=0,
        )  # fmt: skip
        for size in (1, self.ranks):
            strategy = FSDPV2Strategy(
                config=StrategyConfig(sequence_parallel_size=size, bf16=torch.accelerator.is_available(), max_norm=1.0)
            )
            torch.manual_seed(0)
            model = strategy.prepare_model(LlamaForCausalLM(self.config), is_training=True)
            # Without changes of the weights, all losses of a length must be equal.
            self.optimizers[size] = strategy.create_optimizer(model, lr=0.0, weight_decay=0.0)
            self.strategies[size], self.models[size] = strategy, model
        self.loss = 0.0

    def run(self, name: str, length: int) -> None:
        """Take a step, and record the mean loss over all ranks."""
        size = 1 if name == FULL else self.ranks
        strategy, model = self.strategies[size], self.models[size]
        ids = self.ids_of(length)
        ids = {FULL: ids[dist.get_rank() :][:1], SAME: ids, ONE: ids[:1]}[name].to(strategy.device)
        loss = model(**strategy.shard_sequence({"input_ids": ids, "labels": ids}), use_cache=False).loss
        strategy.backward(loss, model, self.optimizers[size])
        self.loss = strategy.optimizer_step(self.optimizers[size], model).loss

    def ids_of(self, length: int) -> torch.Tensor:
        """Return one sequence per rank, the same on all ranks."""
        generator = torch.Generator().manual_seed(length)
        return torch.randint(1, self.config.vocab_size, (self.ranks, length), generator=generator)

    def losses_of_full(self, length: int) -> dict[str, float]:
        """Return the expected loss of each contestant, from full sequences."""
        ids = self.ids_of(length)[dist.get_rank() :][:1].to(self.strategies[1].device)
        with torch.no_grad():
            loss = self.models[1](input_ids=ids, labels=ids, use_cache=False).loss.double()
        of_ranks = [torch.empty_like(loss) for _ in range(self.ranks)]
        dist.all_gather(of_ranks, loss)
        mean = torch.stack(of_ranks).mean().item()
        return {FULL: mean, SAME: mean, ONE: of_ranks[0].item()}

    def check(self, expected: float) -> None:
        if not abs(self.loss - expected) <= LARGEST_DIFFERENCE * abs(expected):
            raise harness.ValuesError(f"the loss is {self.loss:.7g} instead of {expected:.7g}")

    def turn(self, name: str, length: int, expected: dict[str, float]) -> list[dict]:
        """Take a timed step; return the outcome of every rank."""
        outcomes = harness.attempt(
            lambda: harness.turn(lambda: self.run(name, length)), lambda: self.check(expected[name])
        )
        return harness.of_device(outcomes)


@contextlib.contextmanager
def counted_exchanges() -> Iterator[list[int]]:
    """Collect the bytes that this rank passes to each all-to-all in the block."""
    sent_bytes: list[int] = []
    exchange = dist.all_to_all_single

    def counted(received: torch.Tensor, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent_bytes.append(sent.numel() * sent.element_size())
        return exchange(received, sent, *args, **kwargs)

    with patch.object(dist, "all_to_all_single", counted):
        yield sent_bytes


def exchanges_of(steps: Steps, length: int) -> dict[str, dict]:
    """Count the all-to-alls of one step of each contestant; return them per layer, with the theory."""
    found = {}
    layers, width = steps.config.num_hidden_layers, steps.config.hidden_size
    element_bytes = 2 if torch.accelerator.is_available() else 4
    key_width = width // HEADS * max(KEY_HEADS, steps.ranks)
    for name in CONTESTANTS:
        with counted_exchanges() as sent_bytes:
            steps.run(name, length)
        tokens = 0 if name == FULL else length // steps.ranks * (1 if name == ONE else steps.ranks)
        calls = 0 if name == FULL else 4
        expected_bytes = 2 * tokens * (2 * width + 2 * key_width) * element_bytes
        entry = {"calls": len(sent_bytes) / layers, "bytes": sum(sent_bytes) / layers}
        if entry != {"calls": calls, "bytes": expected_bytes}:
            entry["error"] = f"{entry}, expected {calls} calls and {expected_bytes} bytes per layer"
        equal_width = 2 * 4 * tokens * width * element_bytes
        found[name] = {**entry, "literature": {"calls": 2 * calls, "bytes": equal_width}}
    return found


def longest_of(steps: Steps, name: str, options: dict) -> dict:
    """Search the longest sequence whose step stays within the memory budget, to an eighth."""

    def fits(length: int) -> bool:
        expected = steps.losses_of_full(length) if length <= max(options["lengths"]) else None
        outcomes = harness.attempt(
            lambda: harness.turn(lambda: steps.run(name, length)),
            lambda: steps.check(expected[name]) if expected else None,
        )
        if error := harness.error_of([outcomes]):
            raise harness.ValuesError(error)
        return max(outcome["peak_bytes"] for outcome in harness.of_device(outcomes)) <= options["budget_mb"] * 1_000_000

    longest, too_long = 0, None
    length = min(options["lengths"])
    while too_long is None and length <= options["longest"]:
        if fits(length):
            longest, length = length, 2 * length
        else:
            too_long = length
    step = max(longest // 8 // steps.ranks * steps.ranks, steps.ranks)
    while longest and too_long is not None and too_long - longest > step:
        middle = (longest + too_long) // 2 // steps.ranks * steps.ranks
        if fits(middle):
            longest = middle
        else:
            too_long = middle
    return {"length": longest, "is_limited_by_memory": too_long is not None}


def turns_of(steps: Steps, length: int, rounds: int, until: float | None = None) -> dict[str, dict]:
    """Measure the steps of all contestants at one length, in turns."""
    expected = steps.losses_of_full(length)
    turns: dict[str, list] = {name: [] for name in CONTESTANTS}
    for name in harness.turn_order(list(CONTESTANTS), rounds + 1, until):  # the first round warms up
        turns[name].append(steps.turn(name, length, expected))
    return {name: harness.summary(of_name[1:]) for name, of_name in turns.items()}


def work(rank: int, options: dict) -> None:
    harness.init_rank(rank, options)
    steps = Steps(options)
    lengths = {str(length): turns_of(steps, length, options["rounds"]) for length in options["lengths"]}
    exchanges = exchanges_of(steps, min(options["lengths"]) // steps.ranks * steps.ranks)
    longest = {name: longest_of(steps, name, options) for name in (FULL, ONE)}
    harness.finish(rank, options, {"lengths": lengths, "exchanges_per_layer": exchanges, "longest": longest})


def table(entry: dict) -> str:
    shape = f"width {entry['hidden']}, {entry['layers']} layers, {entry['vocabulary']:,} words"
    lines = [f"{entry['ranks']} ranks, {shape}, {entry['hardware']}", ""]
    lines += ["| length | | s: median (min - max) | time / full | peak memory, MB |", "|---|---|---|---|---|"]
    for length, contestants in entry["lengths"].items():
        for name, facts in contestants.items():
            if failed := facts.get("error", contestants[FULL].get("error")):
                lines.append(f"| {int(length):,} | {name} | {failed} | | |")
                continue
            middle, low, high = harness.ratio(facts["seconds"], contestants[FULL]["seconds"])
            text = f"{middle:.2f} ({low:.2f} - {high:.2f})"
            peak, seconds = facts["peak_bytes"] / 1e6, harness.format_times(facts["seconds"])
            lines.append(f"| {int(length):,} | {name} | {seconds} | {text} | {peak:,.0f} |")
    lines += ["", "| per layer and step | all-to-alls | MB | in the literature |", "|---|---|---|---|"]
    for name, facts in entry["exchanges_per_layer"].items():
        theory = facts["literature"]
        text = facts.get("error", f"{facts['calls']:.0f} | {facts['bytes'] / 1e6:.3f}")
        lines.append(f"| {name} | {text} | {theory['calls']} of together {theory['bytes'] / 1e6:.3f} |")
    lines += ["", f"| longest sequence in {entry['budget_mb']:,} MB | tokens |", "|---|---|"]
    for name, facts in entry["longest"].items():
        tokens = f"{facts['length']:,}" if facts["is_limited_by_memory"] else f"at least {facts['length']:,}"
        lines.append(f"| {name} | {tokens} |")
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--budget-mb", type=int, default=1024, help="memory of a step, in addition to the weights")
    parser.add_argument("--longest", type=int, default=65536, help="longest sequence that is tried")
    smoke = {"lengths": [32, 48], "hidden": 64, "layers": 2, "vocabulary": 128, "budget_mb": 16, "longest": 2048}
    args = harness.parse(parser, smoke=smoke)
    for ranks in args.ranks:
        options = {**vars(args), "ranks": ranks}
        found = harness.run_on_ranks(work, options)
        shape = {name: options[name] for name in ("ranks", "hidden", "layers", "vocabulary", "budget_mb")}
        entry = {**shape, **harness.environment(smoke=args.smoke), **found}
        keys = ("ranks", "hidden", "layers", "vocabulary", "hardware")
        harness.merge(Path(args.out) / "sequence.json", entry, keys)
        print(table(entry), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
