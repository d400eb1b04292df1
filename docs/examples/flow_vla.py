"""A small vision-language-action policy: a PaliGemma backbone and a flow-matching action head.

Input: an image, a state and an instruction, which `Processor` converts to tensors. Output: a chunk of actions, which
LeRobot's two methods return as a chunk or one action at a time.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from safetensors.torch import load_model
from table import ACTION, SIZE, STATE, WORDS
from torch import nn
from torch.utils.data import default_collate

PATCH, WIDTH, HEADS = 12, 64, 4  # pixels of a patch's side; size of hidden states; attention heads
TOKENS = (SIZE // PATCH) ** 2
CHUNK, EXECUTED = 4, 2  # predicted actions, and how many of them are executed before the next observation
NOISE_SAMPLES, STEPS = 2, 4  # noise samples per training sample; integration steps from noise to actions
FREQUENCIES = 4  # of the embedding of the flow's time
CAMERA = "observation.images.top"

Batch = Mapping[str, torch.Tensor]


class Processor:
    """Convert observations to inputs of the policy, and its outputs to actions of the robot; saved with the policy.

    Args:
        stats: mean and standard deviation of images, ``"observation.state"`` and ``"action"``.
        words: the vocabulary of instructions.
    """

    def __init__(self, stats: Mapping[str, Mapping[str, Any]], words: Sequence[str] = WORDS) -> None:
        self.stats = {
            name: {key: torch.as_tensor(stats[name][key], dtype=torch.float32) for key in ("mean", "std")}
            for name in (CAMERA, "observation.state", "action")
        }
        self.words = ("<image>", *words)
        self._ids = {word: i for i, word in enumerate(self.words)}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return a LeRobot batch under VITRA's names, normalised; without actions if the batch has none."""
        ids = torch.tensor([[0] * TOKENS + [self._ids[word] for word in text.split()] for text in batch["task"]])
        inputs = {
            "pixel_values": self._normalise(CAMERA, batch[CAMERA]),
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "current_state": self._normalise("observation.state", batch["observation.state"]),
        }
        if "action" in batch:
            inputs["actions"] = self._normalise("action", batch["action"])
            inputs["action_masks"] = ~batch["action_is_pad"]
        return inputs

    def collate(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        """Collate samples of a data set into a batch of inputs."""
        return self(default_collate(samples))

    def actions(self, normalised: torch.Tensor) -> torch.Tensor:
        """Return the policy's actions in the robot's units."""
        stats = self.stats["action"]
        return normalised.float().cpu() * stats["std"] + stats["mean"]

    def _normalise(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return (values - self.stats[name]["mean"]) / self.stats[name]["std"]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``processor.json``."""
        stats = {name: {key: value.tolist() for key, value in values.items()} for name, values in self.stats.items()}
        Path(folder, "processor.json").write_text(json.dumps({"stats": stats, "words": self.words[1:]}))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Read ``processor.json``."""
        return cls(**json.loads(Path(folder, "processor.json").read_text()))


class FlowBlock(nn.Module):
    """A layer of the head: self-attention over the actions of a chunk, cross-attention to the backbone's states."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.cross_attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, condition: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        scale, shift = self.modulation(condition).unsqueeze(1).chunk(2, dim=2)
        y = self.norm(x) * (1 + scale) + shift
        x = x + self.attention(y, y, y, need_weights=False)[0]
        queries = self.norm(x).reshape(len(context), -1, WIDTH)  # noise samples share the context of their sample
        x = x + self.cross_attention(queries, context, context, need_weights=False)[0].reshape(x.shape)
        return x + self.mlp(self.norm(x) * (1 + scale) + shift)


class FlowVLA(nn.Module):
    """Predict actions from an image, a state and an instruction.

    Args:
        backbone: a PaliGemma.
    """

    _fsdp_forward_methods = ("select_action", "predict_action_chunk")  # as in LeRobot's policies

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.config = backbone, backbone.config
        size = WIDTH + len(STATE) + 1 + 2 * FREQUENCIES  # of the instruction, the state and the time
        self.condition_mlp = nn.Sequential(nn.Linear(size, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.action_in, self.action_out = nn.Linear(len(ACTION), WIDTH), nn.Linear(WIDTH, len(ACTION))
        self.positions = nn.Parameter(0.02 * torch.randn(CHUNK, WIDTH))
        self.blocks = nn.ModuleList(FlowBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.reset()

    @classmethod
    def on(cls, backbone: Path) -> Self:
        """Build a policy on a pretrained backbone."""
        return cls(transformers.PaliGemmaModel.from_pretrained(backbone))

    @classmethod
    def from_pretrained(cls, folder: Path) -> Self:
        """Load a saved policy from its folder; nothing else is needed."""
        policy = cls(transformers.PaliGemmaModel(transformers.PaliGemmaConfig.from_pretrained(folder)))
        load_model(policy, folder / "model.safetensors")
        return policy.eval()

    def forward(
        self,
        rgb: torch.Tensor,  # (batch, 3, SIZE, SIZE)
        input_ids: torch.Tensor,  # (batch, tokens): image, then instruction
        attention_mask: torch.Tensor,
        action_labels: torch.Tensor,  # (batch, CHUNK, actions)
        action_masks: torch.Tensor,  # (batch, CHUNK)
        current_state: torch.Tensor,  # (batch, states)
        data_source: list[str],
    ) -> dict[str, torch.Tensor]:
        context = self._encode(rgb, input_ids, attention_mask)
        labels, masks, state = (
            t.repeat_interleave(NOISE_SAMPLES, 0) for t in (action_labels, action_masks, current_state)
        )
        # With much noise, actions must be predicted from the image, so most samples have more noise than actions.
        time = 0.99 * torch.rand(len(labels), 1, device=labels.device, dtype=labels.dtype) ** 4
        noisy = torch.lerp(torch.randn_like(labels), labels, time[:, :, None])
        error = (self._denoise(noisy, time, state, context) - labels).float().square() * masks[:, :, None]
        parts = error.sum(dim=(0, 1)) / masks.sum().clamp(min=1)
        return {"loss": parts.mean(), **dict(zip(ACTION, parts.detach(), strict=True))}

    @torch.no_grad()
    def predict_action_chunk(self, batch: Batch) -> torch.Tensor:
        """Return the next actions, (batch, CHUNK, actions), normalised."""
        return self._sample(batch)

    @torch.no_grad()
    def select_action(self, batch: Batch) -> torch.Tensor:
        """Return the next action, (batch, actions); predict a new chunk after every `EXECUTED` actions."""
        if not self._queue:
            self._queue.extend(self._sample(batch)[:, :EXECUTED].unbind(1))
        return self._queue.popleft()

    def reset(self) -> None:
        """Clear the queue of actions; call this at the start of an episode."""
        self._queue: deque[torch.Tensor] = deque()

    def _sample(self, batch: Batch) -> torch.Tensor:
        """Integrate the flow from noise to actions with Euler's method."""
        context = self._encode(batch["pixel_values"], batch["input_ids"], batch["attention_mask"])
        state = batch["current_state"]
        x = torch.randn(len(state), CHUNK, len(ACTION), device=state.device, dtype=state.dtype)
        for step in range(STEPS):
            time = torch.full_like(state[:, :1], step / STEPS)
            velocity = (self._denoise(x, time, state, context) - x) / (1 - step / STEPS)
            x = x + velocity / STEPS
        return x

    def _encode(self, rgb: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the backbone's hidden states, (batch, tokens, WIDTH)."""
        output = self.backbone(
            pixel_values=rgb,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=torch.zeros_like(input_ids),  # full attention between image and instruction
            use_cache=False,
        )
        return output.last_hidden_state

    def _denoise(self, x: torch.Tensor, time: torch.Tensor, state: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Predict the actions from noisy ones; the velocity of the flow points to them."""
        instruction = context[:, TOKENS:].mean(dim=1).repeat_interleave(len(x) // len(context), 0)
        embedding = [f(math.pi * 2**k * time) for k in range(FREQUENCIES) for f in (torch.sin, torch.cos)]
        condition = self.condition_mlp(torch.cat([instruction, state, time, *embedding], dim=1))
        x = self.action_in(x) + self.positions + condition[:, None]
        for block in self.blocks:
            x = block(x, condition, context)
        return self.action_out(self.norm(x))


def make_backbone(folder: Path) -> Path:
    """Write a tiny untrained PaliGemma with fixed position embeddings; if several processes do, the first is kept."""
    if not folder.is_dir():
        torch.manual_seed(0)
        size = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": HEADS}
        size |= {"num_hidden_layers": 1}
        text = {"model_type": "gemma", "vocab_size": len(WORDS) + 1, "num_key_value_heads": HEADS}
        vision = {"model_type": "siglip_vision_model", "image_size": SIZE, "patch_size": PATCH}
        config = transformers.PaliGemmaConfig(
            text_config={**size, **text, "head_dim": WIDTH // HEADS},
            vision_config={**size, **vision, "projection_dim": WIDTH, "vision_use_head": False},
            image_token_index=0,
            projection_dim=WIDTH,
            hidden_size=WIDTH,
        )
        model = transformers.PaliGemmaModel(config)
        encoder = getattr(model.vision_tower, "vision_model", model.vision_tower)  # an inner module before 5.16
        encoder.embeddings.position_embedding.weight.data = 0.3 * _patch_positions()
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        model.save_pretrained(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(unfinished)
    return folder


def _patch_positions() -> torch.Tensor:
    """Return the sinusoidal embedding of the patches' positions on both axes: (TOKENS, WIDTH)."""
    n = SIZE // PATCH
    y, x = torch.meshgrid(*[(torch.arange(n) + 0.5) / n] * 2, indexing="ij")
    parts = [f(frequency * axis) for frequency in torch.linspace(math.pi, math.pi * n, WIDTH // 4)
             for f in (torch.cos, torch.sin) for axis in (x, y)]  # fmt: skip
    return torch.stack(parts, dim=-1).reshape(TOKENS, WIDTH)
