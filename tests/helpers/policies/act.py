"""ACT as LeRobot has it: a CNN with frozen batch norms, an encoder, a decoder of learned queries, a VAE.

Embeddings of positions are used through their weights, never called, and layers hold a `nn.MultiheadAttention`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from helpers.policies.base import ACTION, CHUNK, FRONT, STATE, WRIST, Batch, Policy, masked_mean

WIDTH, LATENT = 16, 4


class FrozenBatchNorm2d(nn.Module):
    """A batch norm of fixed statistics, all of them buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.1), ("running_mean", 0.05), ("running_var", 0.9)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class BasicBlock(nn.Module):
    """ResNet's block of two convolutions."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), FrozenBatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), FrozenBatchNorm2d(outside)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), FrozenBatchNorm2d(outside)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x if self.downsample is None else self.downsample(x)
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + residual)


class Backbone(nn.ModuleDict):
    """A small ResNet up to its last features: torchvision's IntermediateLayerGetter walks through its entries."""

    def __init__(self) -> None:
        stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        super().__init__({"conv1": stem, "bn1": FrozenBatchNorm2d(8), "layer1": nn.Sequential(BasicBlock(8, 8, 1))})
        self["layer2"] = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for module in self.values():
            x = module(x)
        return {"feature_map": x}


class ACTEncoderLayer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, 2, dropout=dropout)
        self.linear1, self.dropout, self.linear2 = nn.Linear(WIDTH, 24), nn.Dropout(dropout), nn.Linear(24, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(
        self, x: torch.Tensor, pos_embed: torch.Tensor, key_padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        query = x + pos_embed
        x = self.norm1(x + self.self_attn(query, query, value=x, key_padding_mask=key_padding_mask)[0])
        return self.norm2(x + self.linear2(self.dropout(F.relu(self.linear1(x)))))


class ACTDecoderLayer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, 2, dropout=dropout)
        self.multihead_attn = nn.MultiheadAttention(WIDTH, 2, dropout=dropout)
        self.linear1, self.dropout, self.linear2 = nn.Linear(WIDTH, 24), nn.Dropout(dropout), nn.Linear(24, WIDTH)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(
        self, x: torch.Tensor, encoder_out: torch.Tensor, queries: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        x = self.norm1(x + self.self_attn(x + queries, x + queries, value=x)[0])
        x = self.norm2(x + self.multihead_attn(x + queries, encoder_out + positions, value=encoder_out)[0])
        return self.norm3(x + self.linear2(self.dropout(F.relu(self.linear1(x)))))


class ACTEncoder(nn.Module):
    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ACTEncoderLayer(dropout) for _ in range(layers))

    def forward(self, x: torch.Tensor, pos_embed: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, pos_embed, mask)
        return x


class ACTDecoder(nn.Module):
    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ACTDecoderLayer(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(
        self, x: torch.Tensor, encoder_out: torch.Tensor, queries: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, encoder_out, queries, positions)
        return self.norm(x)


class ACT(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.vae_encoder = ACTEncoder(2, dropout)
        self.vae_encoder_cls_embed = nn.Embedding(1, WIDTH)
        self.vae_encoder_robot_state_input_proj = nn.Linear(STATE, WIDTH)
        self.vae_encoder_action_input_proj = nn.Linear(ACTION, WIDTH)
        self.vae_encoder_latent_output_proj = nn.Linear(WIDTH, 2 * LATENT)
        self.register_buffer("vae_encoder_pos_enc", _positions(CHUNK + 2)[None])
        self.backbone = Backbone()
        self.encoder, self.decoder = ACTEncoder(2, dropout), ACTDecoder(1, dropout)
        self.encoder_robot_state_input_proj = nn.Linear(STATE, WIDTH)
        self.encoder_latent_input_proj = nn.Linear(LATENT, WIDTH)
        self.encoder_img_feat_input_proj = nn.Conv2d(16, WIDTH, 1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(2, WIDTH)
        self.decoder_pos_embed = nn.Embedding(CHUNK, WIDTH)
        self.action_head = nn.Linear(WIDTH, ACTION)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        state = batch["observation.state"]
        mean = log_variance = None
        if self.training:
            mean, log_variance = self._encode(batch)
            latent = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        else:
            latent = state.new_zeros(len(state), LATENT)
        tokens = [self.encoder_latent_input_proj(latent), self.encoder_robot_state_input_proj(state)]
        positions = [*self.encoder_1d_feature_pos_embed.weight[:, None]]
        for camera in (FRONT, WRIST):
            features = self.encoder_img_feat_input_proj(self.backbone(batch[camera])["feature_map"])
            features = features.flatten(2).permute(2, 0, 1)  # [places, batch, width]
            tokens += [*features]
            positions += [*_positions(len(features))[:, None].to(features)]
        x, positions = torch.stack(tokens), torch.stack(positions)
        encoded = self.encoder(x, positions)
        queries = self.decoder_pos_embed.weight[:, None]
        decoded = self.decoder(encoded.new_zeros(CHUNK, len(state), WIDTH), encoded, queries, positions)
        return self.action_head(decoded.transpose(0, 1)), mean, log_variance

    def _encode(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        size = len(batch["action"])
        cls = self.vae_encoder_cls_embed.weight[None].expand(size, -1, -1)
        state = self.vae_encoder_robot_state_input_proj(batch["observation.state"])[:, None]
        x = torch.cat([cls, state, self.vae_encoder_action_input_proj(batch["action"])], dim=1)
        mask = torch.cat([torch.zeros(size, 2, dtype=torch.bool), batch["action_is_pad"]], dim=1)
        encoded = self.vae_encoder(x.transpose(0, 1), self.vae_encoder_pos_enc.transpose(0, 1).to(x), mask)[0]
        return self.vae_encoder_latent_output_proj(encoded).chunk(2, dim=-1)


def _positions(count: int) -> torch.Tensor:
    angle = torch.arange(count)[:, None] / 10_000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)


class ACTPolicy(Policy):
    """ACT as LeRobot has it."""

    name = "act"
    _fsdp_wrap_modules: ClassVar[list[str] | None] = ["ACTEncoderLayer", "ACTDecoderLayer"]

    def __init__(self, *, dropout: float = 0.1) -> None:
        super().__init__(dropout=dropout)
        self.model = ACT(dropout)

    def get_optim_params(self) -> list[dict[str, Any]]:
        backbone = [p for n, p in self.named_parameters() if n.startswith("model.backbone")]
        rest = [p for n, p in self.named_parameters() if not n.startswith("model.backbone")]
        return [{"params": rest}, {"params": backbone, "lr": 1e-5}]

    def loss(self, batch: Batch) -> torch.Tensor:
        actions, mean, log_variance = self.model(batch)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(dim=-1).mean()
        return masked_mean((actions - batch["action"]).abs(), batch) + 10.0 * divergence

    def sample(self, batch: Batch) -> torch.Tensor:
        return self.model(batch)[0]
