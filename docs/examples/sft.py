r"""Fine-tune a causal language model on conversations, sharded over ranks; a killed run resumes exactly.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 docs/examples/sft.py --run-dir runs/sft

Without --model and --data, it first makes a tiny model and conversations about sums, so this command runs on two CPU
cores. For your own model, on 8 GPUs:

    torchrun --standalone --nproc-per-node 8 docs/examples/sft.py --config docs/examples/configs/sft_8b.yaml \
        --model /models/Llama-3.1-8B-Instruct --data train.jsonl --eval-data eval.jsonl --run-dir runs/sft-8b

Each line of a data file is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}. The model
learns the tokens of the assistant's messages, each with the same weight in a step. The loss is evaluated at intervals.
At the end, the program exports a Hugging Face folder, opens it with from_pretrained, compares its log-probabilities
with those of the trained model, and prints its answer to one prompt. --explain 8 prints the sharding plan and the
memory of each of 8 ranks, and needs only config.json of the model.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from exported import check_export
from options import from_mapping, make_parser, print_plan, read_settings
from torch import nn
from train_text import byte_tokenizer

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, token_log_probs
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.distributed import all_or_none
from fsdp2_strategy.errors import DataError
from fsdp2_strategy.tracking import Metrics

TEMPLATE = """{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}\
{% generation %}{{ message.content }}<|end|>{% endgeneration %}{% else %}{{ message.content }}<|end|>{% endif %}\
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

Tokens = list[int]
Document = tuple[Tokens, list[bool]]  # tokens of a conversation, and whether the model learns to predict each of them
Row = list[Document]  # documents that share a sequence


@dataclass(frozen=True, kw_only=True)
class Training:
    """The section ``train`` of the configuration."""

    sequence_length: int
    """Tokens of a sequence; longer conversations are cut at their end."""
    packing: bool
    """Put several conversations into one sequence. Attention is masked between them, by their positions."""
    epochs: float
    lr: float
    weight_decay: float
    warmup_ratio: float
    eval_every: int
    """Steps between evaluations."""
    save_every: int
    """Steps between checkpoints."""
    max_checkpoints: int = 2
    attention: str = "sdpa"
    """``attn_implementation`` of transformers."""


# --- data ------------------------------------------------------------------------------------------------------------


def read_documents(path: Path, tokenizer: transformers.PreTrainedTokenizerBase, length: int) -> list[Document]:
    """Read and tokenize conversations; those without a token to learn in their first ``length`` tokens are left out."""
    documents = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        messages = json.loads(line).get("messages")
        if not messages:
            raise DataError(f'cannot read {path}: line {number} has no messages, expected {{"messages": [...]}}.')
        tokens, learned = tokenize(messages, tokenizer, f"{path}, line {number}")
        if any(learned[1:length]):
            documents.append((tokens[:length], [False, *learned[1:length]]))
    return documents


def tokenize(messages: list[dict], tokenizer: transformers.PreTrainedTokenizerBase, source: str) -> Document:
    """Return the tokens of a conversation, and which of them are in the assistant's messages."""

    def encode(count: int, *, prompt: bool = False) -> Tokens:
        text = tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    tokens = encode(len(messages))
    learned = [False] * len(tokens)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            start, until = encode(i, prompt=True), encode(i + 1)
            if tokens[: len(until)] != until or until[: len(start)] != start:
                raise DataError(
                    f"cannot find the assistant's tokens: in {source}, the chat template changes earlier messages when "
                    f"message {i + 1} is added. Split the conversation, or use a template that only appends."
                )
            learned[len(start) : len(until)] = [True] * (len(until) - len(start))
    return tokens, learned


def pack(documents: Sequence[Document], length: int) -> list[Row]:
    """Put documents into few sequences: the longest first, each where the most tokens are left."""
    rows: list[Row] = []
    heap: list[tuple[int, int]] = []  # (-tokens left, index of the row)
    for document in sorted(documents, key=lambda document: -len(document[0])):
        size = len(document[0])
        if heap and -heap[0][0] >= size:
            left, index = heapq.heappop(heap)
        else:
            left, index = -length, len(rows)
            rows.append([])
        rows[index].append(document)
        heapq.heappush(heap, (left + size, index))
    return rows


def batch_of(rows: Sequence[Row], device: torch.device) -> dict[str, torch.Tensor]:
    """Return input_ids and position_ids [rows, longest], and the mask of learned tokens [rows, longest - 1].

    Positions start at 0 in each document: so transformers masks attention between them. Padding at the right end, which
    no token attends to, continues the last document.
    """
    longest = max(sum(len(tokens) for tokens, _ in row) for row in rows)
    ids, positions, learned = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(3))
    for i, row in enumerate(rows):
        start = 0
        for tokens, of_tokens in row:
            end = start + len(tokens)
            ids[i, start:end], learned[i, start:end] = torch.tensor(tokens), torch.tensor(of_tokens)
            positions[i, start:] = torch.arange(longest - start)
            start = end
    batch = {"input_ids": ids, "position_ids": positions, "learned": learned[:, 1:].bool()}
    return {name: tensor.to(device) for name, tensor in batch.items()}


# --- training --------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the losses of the learned tokens; the logits of a whole batch never exist at once."""
    log_probs = token_log_probs(model, batch["input_ids"], position_ids=batch["position_ids"])
    return -log_probs[batch["learned"]].sum()


def learned_tokens(rows: Sequence[Row]) -> int:
    return sum(sum(learned) for row in rows for _, learned in row)


@torch.no_grad()
def evaluate(strategy: FSDPV2Strategy, model: nn.Module, rows: Sequence[Row]) -> float:
    """Return the loss per learned token over all rows; collective."""
    size = strategy.config.micro_train_batch_size
    own = rows[strategy.dp_rank :: strategy.dp_size]
    sums = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for i in range(math.ceil(len(rows) / strategy.dp_size / size)):  # as many passes on every rank
        part = own[i * size : (i + 1) * size]
        loss = loss_of(model, batch_of(part or rows[:1], strategy.device))
        if part:
            sums += sums.new_tensor([loss.item(), learned_tokens(part)])
    model.train()
    loss, tokens = strategy.all_reduce(sums, "sum").tolist()
    return loss / tokens


def train(args: argparse.Namespace, config: StrategyConfig, training: Training) -> int:
    """Train, and return the exit status; a preempted run has a status other than 0, so that it is started again."""
    with FSDPV2Strategy(config=config) as strategy:
        folder, data, eval_data = args.model, args.data, args.eval_data
        with all_or_none("make a model and data", DataError):  # no rank goes on before rank 0 has written them
            if folder is None or data is None:
                own = make_inputs(args.run_dir, write=strategy.is_rank_0())
                folder, data, eval_data = folder or own[0], data or own[1], eval_data or own[2]
        with all_or_none("read the data", DataError):
            (args.run_dir / f"rank{strategy.get_rank()}.pid").write_text(str(os.getpid()))
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            documents, eval_documents = (
                read_documents(d, tokenizer, training.sequence_length) for d in (data, eval_data)
            )
            rows = pack(documents, training.sequence_length) if training.packing else [[d] for d in documents]
            eval_rows = [[document] for document in eval_documents]
            batch_size = config.train_batch_size or config.micro_train_batch_size * strategy.dp_size
            loader = ResumableLoader(rows, batch_size, seed=config.seed, collate_fn=list)
        steps = args.steps or max(1, int(training.epochs * len(rows) / batch_size))
        strategy.print(f"{len(documents)} conversations in {len(rows)} sequences, {steps} steps of {batch_size}")

        with strategy.init_model_context(meta_init=True):  # no rank allocates the full model
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=training.attention)
        model = strategy.prepare_model(model.train(), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=training.lr, weight_decay=training.weight_decay)
        scheduler = strategy.create_scheduler(
            optimizer, "cosine", num_training_steps=steps, warmup_ratio=training.warmup_ratio
        )
        strategy.set_seed(config.seed, per_rank=True)  # dropout differs between the ranks
        resumed, _ = strategy.load_ckpt(model, args.run_dir / "checkpoints", dataloader=loader)
        if resumed:
            strategy.print(f"resumed from {resumed}")
        with Metrics("jsonl", run_id="losses", run_dir=args.run_dir, hparams=config) as metrics:
            for batch in itertools.chain.from_iterable(itertools.repeat(loader)):  # all epochs
                if strategy.global_step(model) >= steps:
                    break
                for part in micro_batches(batch, config.micro_train_batch_size):
                    loss = loss_of(model, batch_of(part, strategy.device))
                    strategy.backward(loss, model, optimizer, num_items=learned_tokens(part))
                    result = strategy.optimizer_step(optimizer, model, scheduler)
                measured = {}
                if result.stepped and (result.step % training.eval_every == 0 or result.step == steps):
                    measured = {"eval_loss": evaluate(strategy, model, eval_rows)}
                    strategy.print(f"step {result.step}: {result.loss:.3f}, evaluation {measured['eval_loss']:.3f}")
                metrics.log(result, epoch=loader.epoch, **measured)
                preempted = strategy.preempted()
                if preempted or (result.stepped and result.step % training.save_every == 0):
                    strategy.save_ckpt(
                        model,
                        args.run_dir / "checkpoints",
                        max_num=training.max_checkpoints,
                        dataloader=loader,
                        async_save=True,
                    )
                if preempted:
                    return 128 + signal.SIGTERM
        strategy.save_model(model, tokenizer, args.run_dir / "export", dtype=torch.bfloat16)
        ids = torch.tensor([eval_documents[0][0]])
        exported = check_export(model, args.run_dir / "export", ids)
        if exported is not None:
            print_answer(exported, args.run_dir / "export", eval_documents[0])
    return 0


def micro_batches(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def print_answer(model: transformers.PreTrainedModel, folder: Path, document: Document) -> None:
    """Print the exported model's answer to the first prompt of a conversation, as a user of the folder gets it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens, learned = document
    prompt = torch.tensor([tokens[: learned.index(True)]])
    answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
    print(f"{tokenizer.decode(prompt[0])} -> {tokenizer.decode(answer[0, prompt.shape[1] :])}", flush=True)


# --- a model and data to try it with ---------------------------------------------------------------------------------


def make_inputs(run_dir: Path, *, write: bool) -> tuple[Path, Path, Path]:
    """Return a folder of a tiny model, and files of conversations; write them if they do not exist."""
    folder, paths = run_dir / "base", [run_dir / "train.jsonl", run_dir / "eval.jsonl"]
    run_dir.mkdir(parents=True, exist_ok=True)
    if write and not paths[-1].exists():
        tokenizer = byte_tokenizer()
        roles = ["<|system|>", "<|user|>", "<|assistant|>"]
        tokenizer.add_special_tokens({"eos_token": "<|end|>", "additional_special_tokens": roles})
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        sums = [(a, b) for a in range(40) for b in range(40)]
        order = torch.randperm(len(sums), generator=torch.Generator().manual_seed(0)).tolist()
        for path, chosen in zip(paths, (order[:-64], order[-64:]), strict=True):
            lines = [json.dumps({"messages": conversation(*sums[i])}) for i in chosen]
            path.write_text("".join(f"{line}\n" for line in lines))
    return folder, *paths


def conversation(a: int, b: int) -> list[dict[str, str]]:
    turns = [("user", f"{a}+{b}?"), ("assistant", f"{a + b}"), ("user", "twice?"), ("assistant", f"{2 * (a + b)}")]
    return [{"role": role, "content": content} for role, content in turns[: 2 if b % 2 else 4]]


def arguments(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--config", type=Path, default=Path(__file__).with_suffix(".yaml"), help="settings of strategy and training")
    add("--model", type=Path, help="Hugging Face folder with model and tokenizer; by default a tiny model is made")
    add("--data", type=Path, help="conversations to learn, JSON lines; by default conversations about sums are made")
    add("--eval-data", type=Path, help="conversations to evaluate, required with --data")
    add("--run-dir", type=Path, default=Path("runs/sft"), help="folder of logs, checkpoints and the export")
    add("--steps", type=int, help="number of optimizer steps; overrides the epochs of the configuration")
    add("--explain", type=int, metavar="RANKS", help="print the sharding plan for this many ranks, and do not train")
    args = parser.parse_args(command_line)
    if (args.data is None) != (args.eval_data is None):
        parser.error("--data and --eval-data belong together: pass both, or none of them.")
    if args.explain and args.model is None:
        parser.error("--explain describes your model: pass --model.")
    return args


def main(command_line: Sequence[str] | None = None) -> int:
    args = arguments(command_line)
    settings = read_settings(args.config, ("strategy", "train"))
    config = StrategyConfig.from_mapping(settings["strategy"])
    training = from_mapping(Training, settings["train"], args.config)
    if args.explain:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(args.model))
        print_plan(model, config, args.explain)
        return 0
    return train(args, config, training)


if __name__ == "__main__":
    os._exit(main())  # gloo's threads can abort a Python process while it exits
