"""The sequences on which a trainer and an engine are compared, with their padding moved to the right.

Input: sampled sequences with any padding. Output: the tensors that both models get, and their results in the layout of
the given sequences.

[Note: padding on the right] If all padding is on the right, positions count from the first token in every model, and
an attention mask does not change the log-probabilities of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from fsdp2_strategy.errors import RolloutError

ACTION = "compare trainer and engine"
"""The operation, for error messages."""


@dataclass(frozen=True)
class ComparedSequences:
    """The sequences of this rank, with their padding on the right: [Note: padding on the right]."""

    ids: torch.Tensor
    """[batch, longest]."""
    mask: torch.Tensor
    """[batch, longest], int64: 1 for tokens."""
    inputs: Mapping[str, Any]
    positions: torch.Tensor
    """[batch, length]: the position of each token of the given sequences in its row of ``ids``."""
    answer_mask: torch.Tensor
    """[batch, n], bool."""

    @classmethod
    def of(
        cls,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor | None,
        answer_mask: torch.Tensor,
        inputs: Mapping[str, Any],
    ) -> ComparedSequences:
        """Move the padding of sequences to the right; the arguments are those of `check_engine_agreement`."""
        attention_mask = torch.ones_like(sequences) if attention_mask is None else attention_mask
        mask, answers = attention_mask.bool().to(sequences.device), answer_mask.bool().to(sequences.device)
        _check_shapes(sequences, mask, answers)
        positions = mask.cumsum(1) - 1
        chosen = answers.nonzero()
        rows, columns = chosen[:, 0], chosen[:, 1] + sequences.shape[1] - answers.shape[1]
        for is_wrong, what in (
            (~mask[rows, columns], "padding, according to attention_mask"),
            (positions[rows, columns] == 0, "the first token of a sequence, which no token precedes"),
        ):
            if is_wrong.any():
                first = chosen[is_wrong][0].tolist()
                raise RolloutError(
                    f"cannot {ACTION}: answer_mask selects {first}, which is {what}; expected tokens of answers. "
                    "Correct answer_mask."
                )
        order = (~mask).long().argsort(dim=1, stable=True)
        longest = max(2, int(mask.sum(1).max()))

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.shape[:2] != sequences.shape:
                return value
            index = order.view(*order.shape, *[1] * (value.ndim - 2)).expand_as(value)
            return value.gather(1, index.to(value.device))[:, :longest]

        moved_inputs = {name: moved(value) for name, value in inputs.items()}
        return cls(moved(sequences), moved(mask).long(), moved_inputs, positions, answers)

    def in_given_layout(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values [batch, n] of the last n given tokens, of values [batch, longest - 1] of ``ids[:, 1:]``."""
        before = (self.positions[:, -self.answer_mask.shape[1] :] - 1).clamp(min=0)
        return values.gather(1, before.to(values.device))

    def follow_any(self, flags: torch.Tensor) -> torch.Tensor:
        """Return [batch, n]: whether a token before each of the last n tokens has a flag [batch, longest]."""
        so_far = flags.long().cummax(dim=1).values.bool()
        return self.in_given_layout(so_far[:, :-1])

    def prompts(self) -> list[list[int]]:
        """Return the tokens before the first compared token of each sequence, or before the last n if none is."""
        first_of_answer = self.positions.shape[1] - self.answer_mask.shape[1] + self.answer_mask.int().argmax(1)
        tokens_before = pad(self.positions + 1, (1, 0))
        ends = tokens_before.gather(1, first_of_answer[:, None]).squeeze(1).tolist()
        return [row[:end] for row, end in zip(self.ids.tolist(), ends, strict=True)]


def _check_shapes(sequences: torch.Tensor, mask: torch.Tensor, answers: torch.Tensor) -> None:
    batch, length = sequences.shape if sequences.ndim == 2 else (0, 0)
    if not batch or length < 2:
        raise RolloutError(
            f"cannot {ACTION}: sequences has the shape {list(sequences.shape)}, expected [batch, length] with at "
            "least one sequence of two tokens. Pass sampled sequences on every rank."
        )
    if mask.shape != sequences.shape:
        raise RolloutError(
            f"cannot {ACTION}: attention_mask has the shape {list(mask.shape)}, expected {list(sequences.shape)}, "
            "that of sequences. Pass the mask of these sequences."
        )
    if answers.ndim != 2 or len(answers) != batch or not 1 <= answers.shape[1] <= length:
        raise RolloutError(
            f"cannot {ACTION}: answer_mask has the shape {list(answers.shape)}, expected [{batch}, n] with n from 1 "
            f"to {length}, for the last n tokens. Pass the mask of the generated tokens."
        )
