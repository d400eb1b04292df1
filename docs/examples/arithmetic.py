"""The task of the RL examples: sums of two numbers below 20, in characters, with a reward that can be checked.

"7+15=" asks for "22" and an end of line. `warm_start` makes the policy that RL begins with: a small Llama that learns
from a careless teacher, who is right in 35 answers of 100 and slips by 1 or 10 in the others. What tells right from
wrong is the reward alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn.functional import pad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy import FSDPV2Strategy, token_log_probs

CHARACTERS = "0123456789+=\n_"
END, PAD = CHARACTERS.index("\n"), CHARACTERS.index("_")
PROMPT, ANSWER = len("19+19="), 4  # tokens; an answer that is not through by then is wrong

Problem = tuple[int, int]
Batch = dict[str, torch.Tensor]


def seed_of(use: str, *key: int) -> int:
    """Return a seed for one use of randomness, made of a key (a run's seed, a step, a rank): the same at any time."""
    uses = ("lesson", "problems", "answers")
    return int(np.random.SeedSequence((uses.index(use), *key)).generate_state(1)[0])


def draw_problems(count: int, random: torch.Generator) -> list[Problem]:
    return [(a, b) for a, b in torch.randint(20, (count, 2), generator=random).tolist()]


def encode_prompts(problems: list[Problem]) -> torch.Tensor:
    """Return [problems, PROMPT], padded on the left: generation goes on at the right end."""
    return torch.tensor([_encode(f"{a}+{b}=".rjust(PROMPT, "_")) for a, b in problems])


def encode_answers(answers: list[int]) -> torch.Tensor:
    """Return [answers, ANSWER], each with its end, padded on the right."""
    return torch.tensor([_encode(f"{answer}\n".ljust(ANSWER, "_")) for answer in answers])


def _encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def batch_of(sequences: torch.Tensor) -> Batch:
    """Return sequences [n, PROMPT + ANSWER] with the mask of their answers' tokens [n, ANSWER], and of all."""
    ends = (sequences[:, PROMPT:] == END).int()
    answer_mask = ends.cumsum(1) - ends == 0  # up to the first end, itself included
    attention_mask = torch.cat([sequences[:, :PROMPT] != PAD, answer_mask], dim=1)
    return {"sequences": sequences, "attention_mask": attention_mask.long(), "answer_mask": answer_mask}


def split(batch: Batch, size: int) -> Iterator[Batch]:
    """Cut a batch into batches of ``size`` sequences."""
    for parts in zip(*(tensor.split(size) for tensor in batch.values()), strict=True):
        yield dict(zip(batch, parts, strict=True))


def rewards_of(batch: Batch, problems: list[Problem]) -> torch.Tensor:
    """Return [n]: 1 where the answer is the sum and nothing else, 0 where it is not."""
    answers = batch["sequences"][:, PROMPT:].tolist()
    texts = ["".join(CHARACTERS[token] for token in answer).partition("\n") for answer in answers]
    right = [text + end == f"{a + b}\n" for (text, end, _), (a, b) in zip(texts, problems, strict=True)]
    return torch.tensor(right, dtype=torch.float32, device=batch["sequences"].device)


def generate(engine: Any, prompts: torch.Tensor, seed: int) -> Batch:
    """Sample one answer to each prompt at temperature 1, the same under the same seed."""
    torch.manual_seed(seed)
    mask = (prompts != PAD).long()
    sequences = engine.generate(prompts, attention_mask=mask, max_new_tokens=ANSWER, do_sample=True, top_k=0)
    return batch_of(pad(sequences, (0, PROMPT + ANSWER - sequences.shape[1]), value=PAD))


def log_probs_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the log-probability of each token of the answers [n, ANSWER]; collective.

    Rotary embeddings know distances alone: the padding on the left needs no positions of its own.
    """
    return token_log_probs(model, batch["sequences"], batch["attention_mask"], last=ANSWER)


def warm_start(strategy: FSDPV2Strategy, folder: Path, steps: int) -> None:
    """Teach a small Llama what the careless teacher answers, unless its folder is there already; collective."""
    if (folder / "generation_config.json").exists():  # what a folder gets last
        return
    config = transformers.LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=PROMPT + ANSWER,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    with strategy.init_model_context(meta_init=True):
        model = transformers.LlamaForCausalLM(config)
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01)
    scheduler = strategy.create_scheduler(optimizer, "cosine", num_training_steps=steps, warmup_ratio=0.05)
    teach(strategy, model, optimizer, scheduler, steps, careful=0.35)
    strategy.save_model(model, None, folder)


def teach(
    strategy: FSDPV2Strategy, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, steps: int, careful: float
) -> None:
    """Train a model to answer like a teacher who is right as often as ``careful`` says; collective."""
    for step in range(steps):
        batch = draw_lesson(strategy, step, careful)
        tokens = strategy.all_reduce(int(batch["answer_mask"].sum()), "sum")
        for part in split(batch, strategy.config.micro_train_batch_size):
            loss = -log_probs_of(model, part)[part["answer_mask"]].sum()
            strategy.backward(loss, model, optimizer, num_items_in_batch=tokens)
            strategy.optimizer_step(optimizer, model, scheduler)


def draw_lesson(strategy: FSDPV2Strategy, step: int, careful: float) -> Batch:
    """Return this rank's part of one optimizer step's problems, with the teacher's answers."""
    count = strategy.config.micro_train_batch_size * strategy.accumulated_gradient
    random = torch.Generator().manual_seed(seed_of("lesson", strategy.config.seed, step, strategy.get_rank()))
    problems = draw_problems(count, random)
    slips = torch.tensor([-10, -1, 1, 10])[torch.randint(4, (count,), generator=random)]
    slips[torch.rand(count, generator=random) < careful] = 0
    answers = [abs(a + b + slip) for (a, b), slip in zip(problems, slips.tolist(), strict=True)]
    return batch_of(torch.cat([encode_prompts(problems), encode_answers(answers)], dim=1).to(strategy.device))
