"""A diffusion policy as LeRobot has it: a 1-D convolutional UNet under a condition, and nothing that repeats."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from helpers.policies.base import ACTION, CHUNK, FRONT, STATE, WRIST, Batch, Policy, masked_mean

HORIZON = 8  # the UNet halves it once; the first actions of it are the chunk
STEPS = 10


class SpatialSoftmax(nn.Module):
    """Where each feature is, on average: [batch, channels, height, width] -> [batch, keypoints, 2]."""

    def __init__(self, channels: int, keypoints: int, size: int) -> None:
        super().__init__()
        self.nets = nn.Conv2d(channels, keypoints, 1)
        places = torch.linspace(-1, 1, size)
        grid = torch.stack(torch.meshgrid(places, places, indexing="xy"), dim=-1)
        self.register_buffer("pos_grid", grid.reshape(-1, 2))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.nets(features).flatten(2).softmax(dim=-1) @ self.pos_grid.to(features.dtype)


class DiffusionRgbEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 12, 3, 1, 1), nn.ReLU()
        )
        self.pool = SpatialSoftmax(12, 4, 4)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.out(self.pool(self.backbone(x)).flatten(1)))


class DiffusionSinusoidalPosEmb(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = x[:, None] * torch.exp(torch.arange(4) * -(math.log(10_000) / 3))
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


class DiffusionConv1dBlock(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv1d(inside, outside, 3, padding=1), nn.GroupNorm(2, outside), nn.Mish())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class DiffusionConditionalResidualBlock1d(nn.Module):
    """Two convolutions, the first scaled and shifted by the condition (FiLM)."""

    def __init__(self, inside: int, outside: int, condition: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = DiffusionConv1dBlock(inside, outside), DiffusionConv1dBlock(outside, outside)
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition, 2 * outside))
        self.residual_conv = nn.Conv1d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        scale, shift = self.cond_encoder(condition)[..., None].chunk(2, dim=1)
        return self.conv2(scale * self.conv1(x) + shift) + self.residual_conv(x)


class DiffusionConditionalUnet1d(nn.Module):
    def __init__(self, condition: int) -> None:
        super().__init__()
        self.diffusion_step_encoder = nn.Sequential(
            DiffusionSinusoidalPosEmb(), nn.Linear(8, 16), nn.Mish(), nn.Linear(16, 8)
        )
        condition += 8
        narrow, wide = 8, 16

        def block(inside: int, outside: int) -> nn.Module:
            return DiffusionConditionalResidualBlock1d(inside, outside, condition)

        self.down_modules = nn.ModuleList(
            [
                nn.ModuleList([block(ACTION, narrow), block(narrow, narrow), nn.Conv1d(narrow, narrow, 3, 2, 1)]),
                nn.ModuleList([block(narrow, wide), block(wide, wide), nn.Identity()]),
            ]
        )
        self.mid_modules = nn.ModuleList([block(wide, wide), block(wide, wide)])
        up = nn.ConvTranspose1d(narrow, narrow, 4, 2, 1)
        self.up_modules = nn.ModuleList([nn.ModuleList([block(2 * wide, narrow), block(narrow, narrow), up])])
        self.final_conv = nn.Sequential(DiffusionConv1dBlock(narrow, narrow), nn.Conv1d(narrow, ACTION, 1))

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)  # [batch, channels, time]
        time = self.diffusion_step_encoder(timestep.to(x.dtype))
        condition = torch.cat([time, condition], dim=-1)
        skips = []
        for first, second, downsample in self.down_modules:
            x = second(first(x, condition), condition)
            skips.append(x)
            x = downsample(x)
        for block in self.mid_modules:
            x = block(x, condition)
        for first, second, upsample in self.up_modules:
            x = upsample(second(first(torch.cat([x, skips.pop()], dim=1), condition), condition))
        return self.final_conv(x).transpose(1, 2)


class DiffusionModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rgb_encoder = DiffusionRgbEncoder()
        self.unet = DiffusionConditionalUnet1d(STATE + 2 * 8)
        angle = torch.linspace(0, 1, STEPS + 1)
        self.register_buffer("kept", (angle[1:] * math.pi / 2 * 0.98).cos().square(), persistent=False)

    def condition(self, batch: Batch) -> torch.Tensor:
        both = self.rgb_encoder(torch.cat([batch[FRONT], batch[WRIST]])).chunk(2)
        return torch.cat([batch["observation.state"], *both], dim=-1)

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss of each action's each number."""
        actions = F.pad(batch["action"], (0, 0, 0, HORIZON - CHUNK))
        noise, step = torch.randn_like(actions), torch.randint(0, STEPS, (len(actions),))
        kept = self.kept[step][:, None, None]
        noisy = (kept.sqrt() * actions + (1 - kept).sqrt() * noise).to(actions.dtype)
        return (self.unet(noisy, step, self.condition(batch)) - noise).square()[:, :CHUNK]

    def generate_actions(self, batch: Batch) -> torch.Tensor:
        condition = self.condition(batch)
        x = torch.randn(len(condition), HORIZON, ACTION)
        for step in (8, 4, 0):
            noise = self.unet(x, torch.full((len(x),), step), condition)
            clean = (x - (1 - self.kept[step]).sqrt() * noise) / self.kept[step].sqrt()
            kept = self.kept[step - 4] if step else self.kept.new_ones(())
            x = kept.sqrt() * clean + (1 - kept).sqrt() * noise
        return x[:, :CHUNK]


class DiffusionPolicy(Policy):
    """The diffusion policy as LeRobot has it."""

    name = "diffusion"

    def __init__(self) -> None:
        super().__init__()
        self.diffusion = DiffusionModel()

    def loss(self, batch: Batch) -> torch.Tensor:
        return masked_mean(self.diffusion.compute_loss(batch), batch)

    def sample(self, batch: Batch) -> torch.Tensor:
        return self.diffusion.generate_actions(batch)
