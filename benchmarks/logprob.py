"""Log-probabilities in chunks against full logits: seconds and peak memory of forward and backward.

    python benchmarks/logprob.py [--ranks 2] [--rounds 7] [--tokens 512] [--out runs/benchmarks]

A sharded Llama of two layers with a head of its own, over vocabularies of 32,000 and 128,000 words, gives the
log-probability of each token of two sequences; a mean of them goes backward. In turns: a log_softmax over the full
logits, as trainers write it; cross entropy over them, which keeps one copy less; ours, in chunks. With and without
gradients (the reference model of an RLHF step has none). Writes logprob.json and a chart, prints a table.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
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
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, token_log_probs

VOCABULARIES = [32_000, 128_000]


def of_full_logits(model, ids) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def of_cross_entropy(model, ids) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return -cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def in_chunks(model, ids) -> torch.Tensor:
    return token_log_probs(model, ids, chunk_bytes=64 << 20)


CONTESTANTS = {"log_softmax of full logits": of_full_logits, "cross entropy of full logits": of_cross_entropy}
CONTESTANTS["ours"] = in_chunks


def measured(vocabulary: int, tokens: int, rounds: int) -> dict:
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=torch.cuda.is_available()))
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = strategy.prepare_model(LlamaForCausalLM(config), is_training=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(1, vocabulary, (2, tokens), generator=generator).to(strategy.device)
    values = {}

    def run(name: str, trains: bool) -> None:
        with torch.set_grad_enabled(trains):
            found = CONTESTANTS[name](model, ids)
        if trains:
            found.mean().backward()
            model.zero_grad()
        values[name] = found.detach()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    results: dict = {}
    for trains in (True, False):
        kind = "forward and backward" if trains else "forward"
        turns = {name: [] for name in CONTESTANTS}
        for name in in_turns(list(CONTESTANTS), rounds + 1):
            torch.cuda.reset_peak_memory_stats() if torch.cuda.is_available() else None
            outcomes = attempt(lambda n=name, t=trains: turn(lambda: run(n, t)))
            if torch.cuda.is_available():
                outcomes[0]["peak_bytes"] = torch.cuda.max_memory_allocated()
            turns[name].append(outcomes)
        results[kind] = {name: summary(of_name[1:]) for name, of_name in turns.items()}
    largest = max(float((values[name] - values["ours"]).abs().max()) for name in CONTESTANTS)
    return {"kinds": results, "largest_difference": largest}


def work(rank: int, options: dict) -> None:
    become_rank(rank, options["ranks"], options["store"])
    found = {str(v): measured(v, options["tokens"], options["rounds"]) for v in VOCABULARIES}
    finish(rank, options, found)


def table(entry: dict) -> str:
    lines = [f"{entry['tokens']} tokens x 2 a rank, {entry['ranks']} ranks, {entry['hardware']}", ""]
    lines += ["| vocabulary | | s, median (least - most) | peak memory, MB | time / ours |", "|---|---|---|---|---|"]
    for vocabulary, found in entry["vocabularies"].items():
        for kind, contestants in found["kinds"].items():
            for name, facts in contestants.items():
                beside = ratio(facts["seconds"], contestants["ours"]["seconds"])
                text = f"{beside[0]:.2f} ({beside[1]:.2f} - {beside[2]:.2f})"
                peak = facts["peak_bytes"] / 1e6
                lines.append(
                    f"| {int(vocabulary):,} | {kind}: {name} | {spread(facts['seconds'])} | {peak:,.0f} | {text} |"
                )
    largest = max(found["largest_difference"] for found in entry["vocabularies"].values())
    return "\n".join([*lines, "", f"Largest difference of a log-probability: {largest:.2g}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=512, help="of each sequence")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = on_ranks(work, vars(args))
    entry = {"ranks": args.ranks, "tokens": args.tokens, **circumstances(), "vocabularies": found}
    merge(args.out / "logprob.json", entry, ("ranks", "tokens", "hardware"))
    panels = [
        (f"{int(vocabulary):,} words, {kind}", {name: facts["seconds"] for name, facts in contestants.items()})
        for vocabulary, of_vocabulary in found.items()
        for kind, contestants in of_vocabulary["kinds"].items()
    ]
    draw(panels, args.out / "logprob.png")
    print(table(entry))


if __name__ == "__main__":
    main()
