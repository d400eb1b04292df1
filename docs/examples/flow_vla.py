"""A small vision-language-action policy: a PaliGemma that sees and reads, and a flow-matching head that acts.

Input: an image, a state and an instruction; `Processor` makes of them what the networks take. Output: a chunk of
actions, which LeRobot's two entry points hand out whole or one by one.
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

PATCH, WIDTH, HEADS = 12, 64, 4  # what the backbone sees of an image at once; hidden states, and heads of attention
TOKENS = (SIZE // PATCH) ** 2
CHUNK, EXECUTED = 4, 2  # actions that are given at once, and how many of them are taken before the next look
DRAWS, STEPS = 2, 4  # noises that each sample is trained under at a time; steps from noise to actions
WAVES = 4  # by which the head is told the time of the flow
CAMERA = "observation.images.top"

Batch = Mapping[str, torch.Tensor]


class Processor:
    """Turn observations into what the policy takes, and its actions into the robot's; saved beside the policy.

    Args:
        stats: mean and standard deviation of images, ``"observation.state"`` and ``"action"``.
        words: those that instructions are made of.
    """

    def __init__(self, stats: Mapping[str, Mapping[str, Any]], words: Sequence[str] = WORDS) -> None:
        self.stats = {
            name: {key: torch.as_tensor(stats[name][key], dtype=torch.float32) for key in ("mean", "std")}
            for name in (CAMERA, "observation.state", "action")
        }
        self.words = ("<image>", *words)
        self._ids = {word: i for i, word in enumerate(self.words)}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return a batch of LeRobot's under VITRA's names; of an observation alone, what does not tell actions."""
        ids = torch.tensor([[0] * TOKENS + [self._ids[word] for word in text.split()] for text in batch["task"]])
        inputs = {
            "pixel_values": self._scaled(CAMERA, batch[CAMERA]),
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "current_state": self._scaled("observation.state", batch["observation.state"]),
        }
        if "action" in batch:
            inputs["actions"] = self._scaled("action", batch["action"])
            inputs["action_masks"] = ~batch["action_is_pad"]
        return inputs

    def collate(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        """Make a batch of a data set's samples."""
        return self(default_collate(samples))

    def actions(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return what the policy gave, as the robot takes it."""
        stats = self.stats["action"]
        return chosen.float().cpu() * stats["std"] + stats["mean"]

    def _scaled(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return (values - self.stats[name]["mean"]) / self.stats[name]["std"]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``processor.json``."""
        stats = {name: {key: value.tolist() for key, value in of.items()} for name, of in self.stats.items()}
        Path(folder, "processor.json").write_text(json.dumps({"stats": stats, "words": self.words[1:]}))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Read ``processor.json``."""
        return cls(**json.loads(Path(folder, "processor.json").read_text()))


class FlowBlock(nn.Module):
    """One layer of the head: the actions of a chunk look at each other, and at what the backbone has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.condition = nn.Linear(WIDTH, 2 * WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.look = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, condition: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        scale, shift = self.condition(condition).unsqueeze(1).chunk(2, dim=2)
        y = self.norm(x) * (1 + scale) + shift
        x = x + self.attention(y, y, y, need_weights=False)[0]
        looking = self.norm(x).reshape(len(seen), -1, WIDTH)  # all draws of a sample look at what was seen once
        x = x + self.look(looking, seen, seen, need_weights=False)[0].reshape(x.shape)
        return x + self.mlp(self.norm(x) * (1 + scale) + shift)


class FlowVLA(nn.Module):
    """Say what to do about an image, a state and an instruction.

    Args:
        backbone: a PaliGemma.
    """

    _fsdp_forward_methods = ("select_action", "predict_action_chunk")  # as LeRobot's policies say it

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.config = backbone, backbone.config
        told = WIDTH + len(STATE) + 1 + 2 * WAVES  # what the words have seen, the state and the time
        self.told = nn.Sequential(nn.Linear(told, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.inward, self.outward = nn.Linear(len(ACTION), WIDTH), nn.Linear(WIDTH, len(ACTION))
        self.place = nn.Parameter(0.02 * torch.randn(CHUNK, WIDTH))
        self.blocks = nn.ModuleList(FlowBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.reset()

    @classmethod
    def on(cls, backbone: Path) -> Self:
        """Begin on a backbone that was trained before."""
        return cls(transformers.PaliGemmaModel.from_pretrained(backbone))

    @classmethod
    def from_pretrained(cls, folder: Path) -> Self:
        """Load a policy that was saved, with all that its folder holds and nothing else."""
        policy = cls(transformers.PaliGemmaModel(transformers.PaliGemmaConfig.from_pretrained(folder)))
        load_model(policy, folder / "model.safetensors")
        return policy.eval()

    def forward(
        self,
        rgb: torch.Tensor,  # (batch, 3, SIZE, SIZE)
        input_ids: torch.Tensor,  # (batch, tokens): of the image, then of the instruction
        attention_mask: torch.Tensor,
        action_labels: torch.Tensor,  # (batch, CHUNK, actions)
        action_masks: torch.Tensor,  # (batch, CHUNK)
        current_state: torch.Tensor,  # (batch, states)
        data_source: list[str],
    ) -> dict[str, torch.Tensor]:
        seen = self._see(rgb, input_ids, attention_mask)
        labels, masks, state = (t.repeat_interleave(DRAWS, 0) for t in (action_labels, action_masks, current_state))
        # Noise hides what is to be learnt of images, so most draws have more of it than of actions.
        time = 0.99 * torch.rand(len(labels), 1, device=labels.device, dtype=labels.dtype) ** 4
        noisy = torch.lerp(torch.randn_like(labels), labels, time[:, :, None])
        error = (self._clean(noisy, time, state, seen) - labels).float().square() * masks[:, :, None]
        parts = error.sum(dim=(0, 1)) / masks.sum().clamp(min=1)
        return {"loss": parts.mean(), **dict(zip(ACTION, parts.detach(), strict=True))}

    @torch.no_grad()
    def predict_action_chunk(self, batch: Batch) -> torch.Tensor:
        """Return the next actions, (batch, CHUNK, actions), as the data set scales them."""
        return self._act(batch)

    @torch.no_grad()
    def select_action(self, batch: Batch) -> torch.Tensor:
        """Return the next action, (batch, actions); a look at the observation gives `EXECUTED` of them."""
        if not self._queue:
            self._queue.extend(self._act(batch)[:, :EXECUTED].unbind(1))
        return self._queue.popleft()

    def reset(self) -> None:
        """Forget what was to be done next; call it where an episode begins."""
        self._queue: deque[torch.Tensor] = deque()

    def _act(self, batch: Batch) -> torch.Tensor:
        """Go from noise to actions along the flow (Euler's method)."""
        seen = self._see(batch["pixel_values"], batch["input_ids"], batch["attention_mask"])
        state = batch["current_state"]
        x = torch.randn(len(state), CHUNK, len(ACTION), device=state.device, dtype=state.dtype)
        for step in range(STEPS):
            time = torch.full_like(state[:, :1], step / STEPS)
            velocity = (self._clean(x, time, state, seen) - x) / (1 - step / STEPS)
            x = x + velocity / STEPS
        return x

    def _see(self, rgb: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the backbone's hidden states, (batch, tokens, WIDTH)."""
        seen = self.backbone(
            pixel_values=rgb,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=torch.zeros_like(input_ids),  # image and instruction see all of each other
            use_cache=False,
        )
        return seen.last_hidden_state

    def _clean(self, x: torch.Tensor, time: torch.Tensor, state: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Say which actions noisy ones will become; the velocity of the flow points there."""
        words = seen[:, TOKENS:].mean(dim=1).repeat_interleave(len(x) // len(seen), 0)
        waves = [wave(math.pi * 2**k * time) for k in range(WAVES) for wave in (torch.sin, torch.cos)]
        condition = self.told(torch.cat([words, state, time, *waves], dim=1))
        x = self.inward(x) + self.place + condition[:, None]
        for block in self.blocks:
            x = block(x, condition, seen)
        return self.outward(self.norm(x))


def make_backbone(folder: Path) -> Path:
    """Write a tiny PaliGemma, which knows where its patches are and nothing else; the first process to finish wins."""
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
        model.vision_tower.embeddings.position_embedding.weight.data = 0.3 * _places()
        own = folder.with_name(f"{folder.name}.{os.getpid()}")
        model.save_pretrained(own)
        try:
            own.rename(folder)
        except OSError:  # another one was first
            shutil.rmtree(own)
    return folder


def _places() -> torch.Tensor:
    """Return where patches are, as waves along both axes: (TOKENS, WIDTH)."""
    n = SIZE // PATCH
    y, x = torch.meshgrid(*[(torch.arange(n) + 0.5) / n] * 2, indexing="ij")
    waves = [wave(f * axis) for f in torch.linspace(math.pi, math.pi * n, WIDTH // 4)
             for wave in (torch.cos, torch.sin) for axis in (x, y)]  # fmt: skip
    return torch.stack(waves, dim=-1).reshape(TOKENS, WIDTH)
