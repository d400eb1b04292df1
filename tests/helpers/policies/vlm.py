"""A policy over a vision and language model that runs as a whole: what VITRA and its kin are.

Its batches may lack images, or the labels of actions; then it learns from words alone.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from helpers.models import VOCAB, next_token_loss
from helpers.policies.base import ACTION, CHUNK, STATE, Batch, Policy, masked_mean, sample_time, sinusoidal

IMAGE = VOCAB - 1
PLACES = 4
"""Tokens of an image."""

Unlabelled = Literal["skip", "mask"]


class FlowBlock(nn.Module):
    """A block of the action head: a residual layer that takes the condition in."""

    def __init__(self, width: int, condition: int) -> None:
        super().__init__()
        self.norm, self.condition = nn.LayerNorm(width), nn.Linear(condition, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x) + self.condition(condition)[:, None])))


class ActionHead(nn.Module):
    def __init__(self, condition: int, width: int = 16) -> None:
        super().__init__()
        self.enter, self.state, self.leave = nn.Linear(ACTION, width), nn.Linear(STATE, width), nn.Linear(width, ACTION)
        self.blocks = nn.ModuleList(FlowBlock(width, condition) for _ in range(2))
        self.places = nn.Parameter(torch.randn(CHUNK, width) / 8)

    def forward(
        self, condition: torch.Tensor, state: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        x = self.enter(noisy) + self.places + self.state(state)[:, None]
        x = x + sinusoidal(time, x.shape[-1])[:, None].to(x.dtype)
        for block in self.blocks:
            x = block(x, condition)
        return self.leave(x)


class BackbonePolicy(Policy):
    """A flow of actions over PaliGemma.

    Args:
        unlabelled: what happens to a batch without labels of actions: the head does not run ("skip"), or it runs on
            zeros, its loss times zero ("mask").
    """

    name = "vla"

    def __init__(self, *, unlabelled: Unlabelled = "skip") -> None:
        super().__init__(unlabelled=unlabelled)
        text = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
        text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision |= {"image_size": 8, "patch_size": 4, "vision_use_head": False, "projection_dim": 24}
        self.backbone = transformers.PaliGemmaForConditionalGeneration(
            transformers.PaliGemmaConfig(
                text_config={**text, "model_type": "gemma"},
                vision_config={**vision, "model_type": "siglip_vision_model"},
                projection_dim=24,
                image_token_id=IMAGE,
            )
        )
        self.action_model = ActionHead(24)
        self.unlabelled = unlabelled

    def loss(self, batch: Batch) -> torch.Tensor:
        hidden = self._hidden(batch)
        loss = next_token_loss(self.backbone.lm_head(hidden), batch["input_ids"])
        if "action" in batch or self.unlabelled == "mask":
            loss = loss + self._action_loss(hidden[:, -1], batch)
        return loss

    def sample(self, batch: Batch) -> torch.Tensor:
        condition, state = self._hidden(batch)[:, -1], batch["observation.state"]
        x = torch.randn(len(state), CHUNK, ACTION).to(condition.dtype)
        for i in range(3):
            x = x - self.action_model(condition, state, x, torch.full((len(x),), 1.0 - i / 3)) / 3
        return x

    def _hidden(self, batch: Batch) -> torch.Tensor:
        inputs: dict[str, Any] = {"pixel_values": batch["pixel_values"]} if "pixel_values" in batch else {}
        types = torch.zeros_like(batch["input_ids"])
        output = self.backbone.model(input_ids=batch["input_ids"], token_type_ids=types, use_cache=False, **inputs)
        return output.last_hidden_state

    def _action_loss(self, condition: torch.Tensor, batch: Batch) -> torch.Tensor:
        labelled = "action" in batch
        actions = batch["action"] if labelled else condition.new_zeros(len(condition), CHUNK, ACTION)
        noise, time = torch.randn_like(actions), sample_time(actions.float())
        noisy = (time[:, None, None] * noise + (1 - time[:, None, None]) * actions).to(actions.dtype)
        velocity = self.action_model(condition, batch["observation.state"], noisy, time)
        if not labelled:
            return velocity.sum() * 0.0
        return masked_mean((velocity - (noise - actions)).square(), batch)


def backbone_batch(generator: torch.Generator, *, images: bool = True, actions: bool = True, batch: int = 2) -> Batch:
    """Make a batch of words and a state, with or without images and labels of actions."""
    ids = torch.randint(3, IMAGE, (batch, PLACES + 6), generator=generator)
    made = {"observation.state": torch.randn(batch, STATE, generator=generator)}
    made["seed"] = torch.randint(1 << 30, (), generator=generator)
    pixels = torch.randn(batch, 3, 8, 8, generator=generator)
    if images:
        ids[:, :PLACES] = IMAGE
        made["pixel_values"] = pixels
    if actions:
        made["action"] = torch.randn(batch, CHUNK, ACTION, generator=generator)
        made["action_is_pad"] = torch.zeros(batch, CHUNK, dtype=torch.bool)
    return made | {"input_ids": ids}
