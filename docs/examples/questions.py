"""The task of grpo.py for a language model of your own: questions of a file, whose answers end with a number.

Input: lines such as {"question": "What is 7 times 8?", "answer": "56"}, and the folder of a model with a tokenizer. An
answer of the model gets reward 1 if its last number is the last number of "answer", else 0. The names are those of
arithmetic.py, so that grpo.py runs with both.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from arithmetic import Batch
from torch import nn

from fsdp2_strategy import token_log_probs
from fsdp2_strategy.errors import DataError
from fsdp2_strategy.rollout import sampled_log_probs

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
PAD = -1  # in prompts, before they are sent to the engine; any token of the vocabulary may be in a prompt

Problem = tuple[list[int], str]  # the tokens of a prompt, and the number that is the right answer


class Questions:
    """Questions as prompts, sampled answers as batches, and rewards.

    Args:
        data: file of questions, JSON lines.
        folder: folder with the tokenizer; its chat template, if it has one, makes the prompts.
        prompt_tokens: questions with longer prompts are left out.
        answer_tokens: maximum number of tokens of an answer.
    """

    def __init__(self, data: Path, folder: Path, prompt_tokens: int, answer_tokens: int) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.answer_tokens = answer_tokens
        lines = [json.loads(line) for line in data.read_text().splitlines()]
        problems = [(self._encode(line["question"]), last_number(line["answer"])) for line in lines]
        self.problems = [(prompt, answer) for prompt, answer in problems if len(prompt) <= prompt_tokens and answer]
        if not self.problems:
            raise DataError(
                f"cannot train: {data} contains no question with at most {prompt_tokens} tokens whose answer has a "
                "number, expected at least one."
            )

    def _encode(self, question: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            return self.tokenizer(question)["input_ids"]
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def draw_problems(self, count: int, random: torch.Generator) -> list[Problem]:
        return [self.problems[i] for i in torch.randint(len(self.problems), (count,), generator=random).tolist()]

    @staticmethod
    def encode_prompts(problems: list[Problem]) -> torch.Tensor:
        """Return [problems, longest], padded on the left, so that generation continues at the right end."""
        longest = max(len(prompt) for prompt, _ in problems)
        return torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt, _ in problems])

    def generate(self, engine: Any, prompts: torch.Tensor, seed: int) -> Batch:
        """Sample one answer to each prompt at temperature 1, by vLLM's call."""
        torch.manual_seed(seed)
        token_ids = [[token for token in prompt if token != PAD] for prompt in prompts.tolist()]
        params = {"temperature": 1.0, "max_tokens": self.answer_tokens, "logprobs": 0}
        outputs = engine.generate(prompts=token_ids, sampling_params=params)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        padded = torch.tensor([answer + [PAD] * (self.answer_tokens - len(answer)) for answer in answers])
        sequences = torch.cat([prompts, padded.to(prompts.device)], dim=1)
        return {
            "sequences": sequences.clamp(min=0),  # masked, so that any token can take the place of padding
            "attention_mask": (sequences != PAD).long(),
            "answer_mask": sequences[:, -self.answer_tokens :] != PAD,
            "engine_log_probs": sampled_log_probs(outputs, self.answer_tokens).to(prompts.device),
        }

    def rewards_of(self, batch: Batch, problems: list[Problem]) -> torch.Tensor:
        """Return [n]: 1 where the last number of the answer is right, else 0."""
        rows = zip(batch["sequences"][:, -self.answer_tokens :].tolist(), batch["answer_mask"].tolist(), strict=True)
        answers = [[token for token, is_answer in zip(*row, strict=True) if is_answer] for row in rows]
        texts = [self.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        right = [last_number(text) == expected for text, (_, expected) in zip(texts, problems, strict=True)]
        return torch.tensor(right, dtype=torch.float32, device=batch["sequences"].device)

    def log_probs_of(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the log-probability of each token of the answers [n, answer_tokens]; collective."""
        mask = batch["attention_mask"]
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # padding on the left takes no positions
        return token_log_probs(model, batch["sequences"], mask, last=self.answer_tokens, position_ids=positions)


def last_number(text: str) -> str:
    """Return the last number of a text without the commas of thousands, or "" if it has none.

    >>> last_number("7 boxes, so #### 1,200")
    '1200'
    """
    found = NUMBER.findall(text)
    return found[-1].replace(",", "") if found else ""
