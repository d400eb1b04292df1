"""What policies have in common: LeRobot's interface, the arithmetic of flows, and a batch as its loader gives it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from torch import nn

from helpers.models import VOCAB

FRONT, WRIST = "observation.images.front", "observation.images.wrist"
STATE, ACTION, CHUNK = 3, 4, 5
WORDS = 6

Batch = dict[str, torch.Tensor]


@dataclass
class Config:
    """What LeRobot calls a policy's configuration: written as ``config.json`` beside the weights."""

    type: str
    options: dict[str, Any] = field(default_factory=dict)

    def save_pretrained(self, save_directory: str | Path) -> None:
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / "config.json").write_text(json.dumps(dataclasses.asdict(self), indent=4))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Config:
        return cls(**json.loads((Path(folder) / "config.json").read_text()))


class Policy(nn.Module):
    """LeRobot's interface of a policy: the loss of a batch, actions, a folder with configuration and weights.

    Subclasses give ``loss(batch)`` and ``sample(batch)``, a chunk of actions.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[Config]] = Config
    _fsdp_wrap_modules: ClassVar[list[str] | None] = None
    _fsdp_forward_methods: ClassVar[tuple[str, ...]] = ("select_action", "predict_action_chunk")

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.config = self.config_class(self.name, options)
        self.reset()

    def reset(self) -> None:
        self._queue: deque[torch.Tensor] = deque()

    def get_optim_params(self) -> Any:
        return self.parameters()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        loss = self.loss(batch)
        return loss, {"loss": loss.item()}

    @torch.no_grad()
    def predict_action_chunk(self, batch: Batch) -> torch.Tensor:
        self.eval()
        return self.sample(batch)

    @torch.no_grad()
    def select_action(self, batch: Batch) -> torch.Tensor:
        self.eval()
        if not self._queue:
            self._queue.extend(self.sample(batch).transpose(0, 1))
        return self._queue.popleft()

    def save_pretrained(self, save_directory: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write configuration and weights; ``state_dict`` holds the weights where this process does not have them."""
        self.config.save_pretrained(save_directory)
        file = Path(save_directory) / "model.safetensors"
        if state_dict is None:
            safetensors.torch.save_model(self, str(file))
        else:
            safetensors.torch.save_file({name: t.contiguous() for name, t in state_dict.items()}, str(file))

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, strict: bool = True) -> Policy:
        policy = cls(**cls.config_class.from_pretrained(folder).options)
        safetensors.torch.load_model(policy, str(Path(folder) / "model.safetensors"), strict=strict)
        return policy.eval()


def robot_batch(generator: torch.Generator, size: int = 8, batch: int = 2) -> Batch:
    """Make what a LeRobot loader gives: cameras, words, a state, a chunk of actions and where it is padded."""
    made = {camera: torch.rand(batch, 3, size, size, generator=generator) for camera in (FRONT, WRIST)}
    made["observation.state"] = torch.randn(batch, STATE, generator=generator)
    made["observation.language.tokens"] = torch.randint(3, VOCAB - 1, (batch, WORDS), generator=generator)
    made["observation.language.attention_mask"] = torch.arange(WORDS) < torch.tensor([[WORDS - 2], [WORDS]])[:batch]
    made["action"] = torch.randn(batch, CHUNK, ACTION, generator=generator)
    made["action_is_pad"] = torch.arange(CHUNK) >= torch.tensor([[CHUNK], [CHUNK - 1]])[:batch]
    return made | {"seed": torch.randint(1 << 30, (), generator=generator)}


def masked_mean(error: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Average errors of shape [batch, chunk, action] over the actions that are none of padding."""
    kept = ~batch["action_is_pad"][..., None]
    return (error * kept).sum() / (kept.sum() * error.shape[-1]).clamp(min=1)


def sinusoidal(time: torch.Tensor, width: int, min_period: float = 4e-3, max_period: float = 4.0) -> torch.Tensor:
    """Embed times in [0, 1], of shape [batch], as sines and cosines of shape [batch, width]."""
    fraction = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=time.device)
    angle = time[:, None].double() * 2 * math.pi / (min_period * (max_period / min_period) ** fraction)
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(time.dtype)


def sample_time(actions: torch.Tensor) -> torch.Tensor:
    """Draw a time for each sample, more of them near noise."""
    time = torch.distributions.Beta(torch.tensor(1.5), torch.tensor(1.0)).sample((len(actions),))
    return (time * 0.999 + 0.001).to(actions)


def block_mask(padding: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Let each token see those of its own block and of blocks before; [batch, length] -> [batch, length, length]."""
    block = starts.cumsum(dim=1)
    return (block[:, None, :] <= block[:, :, None]) & padding[:, None, :] & padding[:, :, None]


def additive(allowed: torch.Tensor) -> torch.Tensor:
    """Turn a mask of what is allowed into what is added to scores, with a dimension for the heads."""
    return torch.where(allowed[:, None], 0.0, -2.3819763e38)
