"""Compare log-probabilities in chunks with full logits: seconds and peak memory of forward and backward.

    python benchmarks/logprob.py [--ranks 2] [--rounds 7] [--tokens 512] [--vocabularies 32000 128000] [--out DIR]
                                 [--smoke]

The model is a sharded Llama of two layers with an untied head and vocabularies of 32,000 and 128,000 tokens. It
computes the log-probability of each token of two sequences; the backward pass starts from their mean. Contestants, in
turns: a log_softmax over the full logits, as in many trainers; cross entropy over them, which keeps one copy less; ours
in chunks. With and without gradients (the reference model of an RLHF step has none). After each turn log-probabilities
and gradients are compared with those of a log_softmax. Writes logprob.json and a chart, prints a table. `--smoke` runs
everything in seconds, with small vocabularies and short sequences.
"""

from functools import partial

import harness
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, token_log_probs

LOG_PROBS = "the log-probability of a token"
LARGEST_DIFFERENCE = 0.1 if torch.accelerator.is_available() else 1e-4  # bf16 or fp32
"""Between a log-probability and that of a log_softmax; for gradients, relative to the largest value."""


def of_full_logits(model, ids) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def of_cross_entropy(model, ids) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return -cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def in_chunks(model, ids, chunk_bytes: int = 64 << 20) -> torch.Tensor:
    return token_log_probs(model, ids, chunk_bytes=chunk_bytes)


REFERENCE = "log_softmax of full logits"
CONTESTANTS = {REFERENCE: of_full_logits, "cross entropy of full logits": of_cross_entropy, "ours": in_chunks}


class Passes:
    """Run passes of one model over one batch, and check their values."""

    def __init__(self, vocabulary: int, options: dict) -> None:
        strategy = FSDPV2Strategy(config=StrategyConfig(bf16=torch.accelerator.is_available()))
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
            pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        self.model = strategy.prepare_model(LlamaForCausalLM(config), is_training=True)
        generator = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(1, vocabulary, (2, options["tokens"]), generator=generator)
        self.ids = ids.to(strategy.device)
        self.contestants = dict(CONTESTANTS)
        if options["smoke"]:
            self.contestants["ours"] = partial(in_chunks, chunk_bytes=16 * vocabulary)  # four tokens
        self.largest_difference = 0.0
        self.run(REFERENCE, trains=True)
        self.expected = self.pop_values()

    def run(self, name: str, *, trains: bool) -> None:
        with torch.set_grad_enabled(trains):
            found = self.contestants[name](self.model, self.ids)
        if trains:
            found.mean().backward()
        self.log_probs = found.detach()

    def pop_values(self) -> dict[str, torch.Tensor]:
        """Return the values of the last pass and this rank's part of the gradients, and clear the gradients."""
        gradients = {
            n: harness.local_of(p.grad).clone() for n, p in self.model.named_parameters() if p.grad is not None
        }
        self.model.zero_grad()
        return {LOG_PROBS: self.log_probs, **gradients}

    def check(self, *, trains: bool) -> None:
        found = self.pop_values()
        if found.keys() != (self.expected.keys() if trains else {LOG_PROBS}):
            raise harness.ValuesError(
                "some gradients are missing" if trains else "a pass without gradients has left gradients"
            )
        for name, value in found.items():
            if not value.numel():
                continue
            scale = 1.0 if name == LOG_PROBS else float(self.expected[name].abs().max()) or 1.0
            difference = float((value - self.expected[name]).abs().max()) / scale
            if not difference <= LARGEST_DIFFERENCE:
                raise harness.ValuesError(f"{name} differs from that of a log_softmax by {difference:.2g}")
            if name == LOG_PROBS:
                self.largest_difference = max(self.largest_difference, difference)


def measure(vocabulary: int, options: dict) -> dict:
    passes = Passes(vocabulary, options)
    results: dict = {}
    for trains in (True, False):
        kind = "forward and backward" if trains else "forward"
        turns = {name: [] for name in passes.contestants}
        for name in harness.turn_order(list(passes.contestants), options["rounds"] + 1):
            outcomes = harness.attempt(
                lambda n=name, t=trains: harness.turn(lambda: passes.run(n, trains=t)),
                lambda t=trains: passes.check(trains=t),
            )
            turns[name].append(harness.of_device(outcomes))
        results[kind] = {name: harness.summary(of_name[1:]) for name, of_name in turns.items()}
    return {"kinds": results, "largest_difference": passes.largest_difference}


def work(rank: int, options: dict) -> None:
    harness.init_rank(rank, options)
    found = {str(v): measure(v, options) for v in options["vocabularies"]}
    harness.finish(rank, options, found)


def table(entry: dict) -> str:
    lines = [f"{entry['tokens']} tokens x 2 per rank, {entry['ranks']} ranks, {entry['hardware']}", ""]
    lines += ["| vocabulary | | s: median (min - max) | peak memory, MB | time / ours |", "|---|---|---|---|---|"]
    for vocabulary, found in entry["vocabularies"].items():
        for kind, contestants in found["kinds"].items():
            for name, facts in contestants.items():
                if failed := facts.get("error", contestants["ours"].get("error")):
                    lines.append(f"| {int(vocabulary):,} | {kind}: {name} | {failed} | | |")
                    continue
                middle, low, high = harness.ratio(facts["seconds"], contestants["ours"]["seconds"])
                text = f"{middle:.2f} ({low:.2f} - {high:.2f})"
                peak, seconds = facts["peak_bytes"] / 1e6, harness.format_times(facts["seconds"])
                lines.append(f"| {int(vocabulary):,} | {kind}: {name} | {seconds} | {peak:,.0f} | {text} |")
    largest = max(found["largest_difference"] for found in entry["vocabularies"].values())
    return "\n".join([*lines, "", f"Largest difference of a log-probability: {largest:.2g}"])


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=max(2, torch.accelerator.device_count()))
    parser.add_argument("--tokens", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_000])
    args = harness.parse(parser, smoke={"tokens": 8, "vocabularies": [320, 1280]})
    found = harness.run_on_ranks(work, vars(args))
    entry = {
        "ranks": args.ranks,
        "tokens": args.tokens,
        **harness.environment(smoke=args.smoke),
        "vocabularies": found,
    }
    harness.merge(args.out / "logprob.json", entry, ("ranks", "tokens", "hardware"))
    panels = [
        (
            f"vocabulary {int(vocabulary):,}, {kind}",
            {name: facts["seconds"] for name, facts in contestants.items() if "seconds" in facts},
        )
        for vocabulary, of_vocabulary in found.items()
        for kind, contestants in of_vocabulary["kinds"].items()
    ]
    harness.draw(panels, args.out / "logprob.png", smoke=args.smoke)
    print(table(entry))


if __name__ == "__main__":
    main()
