"""The task of the RL examples: add two numbers below 20, character by character, with a verifiable reward.

The right answer to "7+15=" is "22" and a newline. `warm_start` trains the initial policy of RL: a small Llama, trained
on answers of which 35 in 100 are right; the others are wrong by 1 or 10. Only the reward says which answers are right.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy import FSDPV2Strategy, token_log_probs
from fsdp2_strategy.rollout import sampled_log_probs

CHARACTERS = "0123456789+=\n_"
END, PAD = CHARACTERS.index("\n"), CHARACTERS.index("_")
PROMPT, ANSWER = len("19+19="), 4  # tokens; an answer without a newline by then is wrong

Problem = tuple[int, int]
Batch = dict[str, torch.Tensor]


def seed_of(use: str, *key: int) -> int:
    """Return the seed for one use of random numbers, a function of ``key``: seed of a run, step, data parallel rank."""
    uses = ("supervised", "problems", "answers")
    return int(np.random.SeedSequence((uses.index(use), *key)).generate_state(1)[0])


def draw_problems(count: int, random: torch.Generator) -> list[Problem]:
    return [(a, b) for a, b in torch.randint(20, (count, 2), generator=random).tolist()]


def encode_prompts(problems: list[Problem]) -> torch.Tensor:
    """Return [problems, PROMPT], padded on the left, so that generation continues at the right end."""
    return torch.tensor([_encode(f"{a}+{b}=".rjust(PROMPT, "_")) for a, b in problems])


def encode_answers(answers: list[int]) -> torch.Tensor:
    """Return [answers, ANSWER], each with its newline, padded on the right."""
    return torch.tensor([_encode(f"{answer}\n".ljust(ANSWER, "_")) for answer in answers])


def _encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def batch_of(sequences: torch.Tensor) -> Batch:
    """Return sequences [n, PROMPT + ANSWER] with masks of all tokens, and of the answers' tokens [n, ANSWER]."""
    ends = (sequences[:, PROMPT:] == END).int()
    answer_mask = ends.cumsum(1) - ends == 0  # up to and including the first newline
    attention_mask = torch.cat([sequences[:, :PROMPT] != PAD, answer_mask], dim=1)
    return {"sequences": sequences, "attention_mask": attention_mask.long(), "answer_mask": answer_mask}


def split(batch: Batch, size: int) -> Iterator[Batch]:
    """Split a batch into batches of ``size`` sequences."""
    for parts in zip(*(tensor.split(size) for tensor in batch.values()), strict=True):
        yield dict(zip(batch, parts, strict=True))


def rewards_of(batch: Batch, problems: list[Problem]) -> torch.Tensor:
    """Return [n]: 1 where the answer up to its newline is exactly the sum, else 0."""
    answers = batch["sequences"][:, PROMPT:].tolist()
    texts = ["".join(CHARACTERS[token] for token in answer).partition("\n") for answer in answers]
    right = [text + end == f"{a + b}\n" for (text, end, _), (a, b) in zip(texts, problems, strict=True)]
    return torch.tensor(right, dtype=torch.float32, device=batch["sequences"].device)


def generate(engine: Any, prompts: torch.Tensor, seed: int) -> Batch:
    """Sample one answer to each prompt at temperature 1; the same seed gives the same answers.

    The call is vLLM's, so that the engine returns the log-probabilities of the tokens that it sampled.
    """
    torch.manual_seed(seed)
    token_ids = [[token for token in prompt if token != PAD] for prompt in prompts.tolist()]
    params = {"temperature": 1.0, "max_tokens": ANSWER, "logprobs": 0}
    outputs = engine.generate(prompts=token_ids, sampling_params=params)
    return batch_of_answers(prompts, [output.outputs[0].token_ids for output in outputs], outputs)


def batch_of_answers(prompts: torch.Tensor, answers: list[list[int]], outputs: list[Any]) -> Batch:
    """Return the batch of prompts and sampled answers, with the log-probabilities in an engine's outputs."""
    padded = torch.tensor([answer + [PAD] * (ANSWER - len(answer)) for answer in answers], device=prompts.device)
    batch = batch_of(torch.cat([prompts, padded], dim=1))
    batch["engine_log_probs"] = sampled_log_probs(outputs, ANSWER).to(prompts.device)
    return batch


def log_probs_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the log-probability of each token of the answers [n, ANSWER]; collective.

    Rotary embeddings encode only distances, so padding on the left needs no position ids.
    """
    return token_log_probs(model, batch["sequences"], batch["attention_mask"], last=ANSWER)


def warm_start(strategy: FSDPV2Strategy, folder: Path, steps: int) -> None:
    """Train a small Llama on partly wrong answers, unless its folder already exists; collective."""
    if (folder / "generation_config.json").exists():  # written last
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
    train_on_answers(strategy, model, optimizer, scheduler, steps, accuracy=0.35)
    strategy.save_model(model, output_dir=folder)


def train_on_answers(
    strategy: FSDPV2Strategy,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    steps: int,
    accuracy: float,
) -> None:
    """Train a model on answers of which the share ``accuracy`` is right; collective."""
    for step in range(steps):
        batch = draw_answered_problems(strategy, step, accuracy)
        for part in split(batch, strategy.config.micro_train_batch_size):
            mask = part["answer_mask"]
            loss = -log_probs_of(model, part)[mask].sum()
            strategy.backward(loss, model, optimizer, num_items=int(mask.sum()))
            strategy.optimizer_step(optimizer, model, scheduler)


def draw_answered_problems(strategy: FSDPV2Strategy, step: int, accuracy: float) -> Batch:
    """Return this rank's problems of one optimizer step, with answers of which the share ``accuracy`` is right."""
    count = strategy.config.micro_train_batch_size * strategy.accumulated_gradient
    random = torch.Generator().manual_seed(seed_of("supervised", strategy.config.seed, step, strategy.dp_rank))
    problems = draw_problems(count, random)
    errors = torch.tensor([-10, -1, 1, 10])[torch.randint(4, (count,), generator=random)]
    errors[torch.rand(count, generator=random) < accuracy] = 0
    answers = [abs(a + b + error) for (a, b), error in zip(problems, errors.tolist(), strict=True)]
    return batch_of(torch.cat([encode_prompts(problems), encode_answers(answers)], dim=1).to(strategy.device))
