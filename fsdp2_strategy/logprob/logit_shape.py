"""Measure the function that a model applies to the logits of its head.

Input: a model and a batch. Output: the function.

[Note: after the head] Some models apply a function to the logits of their head: a scale or a soft cap. An additional
forward pass measures this function: the head returns known numbers, and the function follows from the logits that the
model returns for them. The function is not read from the configuration; docs/decisions.md says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.generators import restored_generators
from fsdp2_strategy.errors import LogProbError
from fsdp2_strategy.logprob.head import run_with_head
from fsdp2_strategy.model.fsdp_state import class_name, is_sharded
from fsdp2_strategy.model.state import Slot, measured_pass, model_state


@dataclass(frozen=True)
class LogitShape:
    """The function that a model applies to the logits of its head.

    It is ``cap * tanh(scale * logits / cap)`` with a soft cap, else ``scale * logits``.
    """

    scale: float = 1.0
    cap: float = math.inf

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits that the model returns for these logits of its head, computed in the same dtype."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if math.isinf(self.cap) else torch.tanh(logits / self.cap) * self.cap

    def derivative(self, shaped: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of the function where its value is ``shaped``; this may overwrite ``shaped``."""
        if math.isinf(self.cap):
            return self.scale
        return shaped.div_(self.cap).square_().neg_().add_(1.0).mul_(self.scale)


_SHAPE = Slot[tuple[bool, LogitShape]]("logit shape")
"""Whether the model was sharded when the function was measured, and the function.

The function is measured again after sharding. The forward pass is then collective, so all ranks must run it, including
ranks that measured the function before sharding.
"""


def logit_shape_of(root: nn.Module, head: nn.Linear, inputs: Mapping[str, Any]) -> LogitShape:
    """Return the function that a model applies to its logits, measured at first use: [Note: after the head]."""
    cached = model_state(root).get(_SHAPE)
    if cached is None or cached[0] != is_sharded(root):
        cached = model_state(root).set(_SHAPE, (is_sharded(root), _measure_logit_shape(root, head, inputs)))
    return cached[1]


def _measure_logit_shape(root: nn.Module, head: nn.Linear, inputs: Mapping[str, Any]) -> LogitShape:
    """Run the model with a head that returns known numbers, and fit the function to the logits of the model."""
    device = inputs["input_ids"].device
    known = torch.linspace(-1, 1, head.out_features, device=device) ** 3 * 2000

    def return_known(_hidden: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(True)  # so that logits require grad if a trained factor scales them
        return known.clone().view(1, 1, -1)  # a copy: `known` must stay the same if the model changes logits in place

    with measured_pass(), torch.no_grad(), restored_generators():
        from_head, output = run_with_head(root, head, return_known, inputs, with_output=True)
    logits = getattr(output, "logits", torch.empty(0))
    comparable = logits.shape == (1, 1, len(known)) and not logits.requires_grad
    if comparable and torch.equal(from_head[0, 0].to(known.dtype), known):
        measured = logits[0, 0].to(known.dtype)
        for shape in _candidates(known, measured):
            if torch.allclose(shape.apply(known), measured, rtol=8 * torch.finfo(logits.dtype).eps, atol=1e-6):
                return shape
    raise LogProbError(
        f"cannot compute log-probabilities: {class_name(root)} or one of its hooks changes the logits of its head, "
        "expected at most a fixed factor and a soft cap. Call linear_log_probs in its forward."
    )


def _candidates(known: torch.Tensor, measured: torch.Tensor) -> Iterator[LogitShape]:
    """Yield functions that may map ``known`` to ``measured``; the last known value is large enough to reach the cap."""
    largest = measured[-1].item()
    yield LogitShape(scale=largest / known[-1].item())
    half = (measured / largest - 0.5).abs().argmin()
    ratio = measured[half].item() / largest if largest else 0.0
    if 0 < ratio < 1:
        scale = math.atanh(ratio) * largest / known[half].item()
        yield LogitShape(float(f"{scale:.4g}"), largest)  # exact if the configured scale has 4 digits or fewer
        yield LogitShape(scale, largest)
