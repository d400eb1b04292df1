"""smolvla as LeRobot has it: a narrower expert that joins the attention of some layers and looks at the keys of others.

The vision and language model is frozen and in evaluation; the policy walks through the layers of both decoders itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from helpers.models import VOCAB
from helpers.policies.base import (
    ACTION,
    CHUNK,
    FRONT,
    STATE,
    WRIST,
    Batch,
    Policy,
    block_mask,
    masked_mean,
    sample_time,
    sinusoidal,
)

Cache = dict[int, dict[str, torch.Tensor]]


class SmolVLMWithExpertModel(nn.Module):
    """A vision and language model, cut to its first layers, and an expert beside them."""

    def __init__(self, *, train_expert_only: bool = True, self_attn_every_n_layers: int = 2) -> None:
        super().__init__()
        text = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4}
        text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.SmolVLMConfig(
            text_config={**text, "model_type": "llama"},
            vision_config={**vision, "image_size": 8, "patch_size": 2},
            image_token_id=VOCAB - 1,
            scale_factor=2,
            tie_word_embeddings=False,
        )
        self.vlm = transformers.SmolVLMForConditionalGeneration(config)
        self.text_model.layers = self.text_model.layers[:3]
        of_expert = transformers.LlamaConfig(
            **{**text, "hidden_size": 18, "intermediate_size": 32, "num_hidden_layers": 3}
        )
        self.lm_expert = transformers.LlamaModel(of_expert)
        self.lm_expert.embed_tokens = None
        self.self_attn_every_n_layers, self.train_expert_only = self_attn_every_n_layers, train_expert_only
        width = config.text_config.num_key_value_heads * config.text_config.head_dim
        for i, layer in enumerate(self.lm_expert.layers):
            if i % self_attn_every_n_layers:  # it projects the keys and values of the other decoder
                layer.self_attn.k_proj = nn.Linear(width, 8, bias=False)
                layer.self_attn.v_proj = nn.Linear(width, 8, bias=False)
        if train_expert_only:
            self.vlm.requires_grad_(False)
        self.train()

    @property
    def text_model(self) -> nn.Module:
        return self.vlm.model.text_model

    def train(self, mode: bool = True) -> SmolVLMWithExpertModel:
        super().train(mode)
        if self.train_expert_only:
            self.vlm.eval()
        return self

    def embed_image(self, image: torch.Tensor) -> torch.Tensor:
        vision = self.vlm.model.vision_model
        return self.vlm.model.connector(vision(pixel_values=image.to(vision.dtype)).last_hidden_state)

    def embed_language_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.text_model.get_input_embeddings()(tokens)

    def forward(
        self,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        inputs_embeds: list[torch.Tensor | None],
        cache: Cache | None = None,
        fill_cache: bool = False,
    ) -> tuple[list[torch.Tensor | None], Cache]:
        models = (self.text_model, self.lm_expert)
        cache = {} if cache is None else cache
        for i in range(len(self.text_model.layers)):
            layers = [model.layers[i] for model in models]
            joint = fill_cache or i % self.self_attn_every_n_layers == 0
            run = self._joint_attention if joint else self._cross_attention
            attended = run(layers, i, inputs_embeds, attention_mask, position_ids, cache, fill_cache)
            outputs: list[torch.Tensor | None] = []
            start = 0
            for model, (layer, hidden) in enumerate(zip(layers, inputs_embeds, strict=True)):
                if hidden is None:
                    outputs.append(None)
                    continue
                own = attended[model] if len(attended) > 1 else attended[0]
                end = start + hidden.shape[1]
                own = own.to(layer.self_attn.o_proj.weight.dtype)
                out = layer.self_attn.o_proj(own[:, start:end])
                out += hidden
                residual = out.clone()
                out = layer.mlp(layer.post_attention_layernorm(out))
                out += residual
                outputs.append(out)
                start = end if len(attended) == 1 else 0
            inputs_embeds = outputs
        pairs = zip(models, inputs_embeds, strict=True)
        return [None if hidden is None else model.norm(hidden) for model, hidden in pairs], cache

    def _joint_attention(
        self,
        layers: list[Any],
        index: int,
        inputs_embeds: list[torch.Tensor | None],
        mask: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Cache,
        fill_cache: bool,
    ) -> list[torch.Tensor]:
        """Let the tokens of both decoders attend to each other."""
        found = [
            _project(layer, hidden) for layer, hidden in zip(layers, inputs_embeds, strict=True) if hidden is not None
        ]
        query, key, value = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        query, key = _rotate(query, position_ids), _rotate(key, position_ids)
        if fill_cache:
            cache[index] = {"key": key, "value": value}
        elif index in cache:
            key = torch.cat([cache[index]["key"], key], dim=1)
            value = torch.cat([cache[index]["value"], value], dim=1)
        return [_attend(query, key, value, mask)]

    def _cross_attention(
        self,
        layers: list[Any],
        index: int,
        inputs_embeds: list[torch.Tensor | None],
        mask: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Cache,
        _fill_cache: bool,
    ) -> list[torch.Tensor]:
        """Let the expert attend to the other decoder's keys and values."""
        prefix, suffix = inputs_embeds
        attended = []
        if prefix is not None:
            length = prefix.shape[1]
            query, key, value = _project(layers[0], prefix)
            query, key = _rotate(query, position_ids[:, :length]), _rotate(key, position_ids[:, :length])
            attended.append(_attend(query, key, value, mask[:, :length, :length]))
            position_ids = position_ids[:, length:]
        else:
            key, value = cache[index]["key"], cache[index]["value"]
            attended.append(key)  # stands for the prefix, which does not run
        attention = layers[1].self_attn
        query = attention.q_proj(layers[1].input_layernorm(suffix)).unflatten(-1, (-1, attention.head_dim))
        key, value = (x.flatten(2).to(attention.k_proj.weight.dtype) for x in (key, value))
        key, value = (p(x).unflatten(-1, (-1, 8)) for p, x in ((attention.k_proj, key), (attention.v_proj, value)))
        query = _rotate(query, position_ids - position_ids.min(dim=1, keepdim=True).values)
        return [*attended, _attend(query, key, value, mask[:, -suffix.shape[1] :, : key.shape[1]])]


def _project(layer: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return queries, keys and values of a layer, of shape [batch, length, heads, head_dim]."""
    hidden = layer.input_layernorm(hidden).to(layer.self_attn.q_proj.weight.dtype)
    attention = layer.self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return tuple(project(hidden).unflatten(-1, (-1, attention.head_dim)) for project in projections)


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    angle = positions[..., None, None] / 10_000 ** (torch.arange(half, dtype=torch.float32) / half)
    first, second = x.float().split(half, dim=-1)
    rotated = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
    return torch.cat(rotated, dim=-1).to(x.dtype)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attend in fp32, with the keys' heads repeated; return [batch, length, width] in the dtype of the values."""
    heads = query.shape[2] // key.shape[2]
    key, of_value = (x.repeat_interleave(heads, dim=2) for x in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query.float(), key.float()) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min).softmax(dim=-1).to(value.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", weights, of_value).flatten(2)


class VLAFlowMatching(nn.Module):
    """The flow of smolvla; the state stands among images and words."""

    num_steps = 3

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.vlm_with_expert = SmolVLMWithExpertModel(**options)
        width = self.vlm_with_expert.lm_expert.config.hidden_size
        self.state_proj = nn.Linear(STATE, self.vlm_with_expert.vlm.config.text_config.hidden_size)
        self.action_in_proj, self.action_out_proj = nn.Linear(ACTION, width), nn.Linear(width, ACTION)
        self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)

    def embed_prefix(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        embedded = []
        for camera in (FRONT, WRIST):
            image = self.vlm_with_expert.embed_image(batch[camera])
            embedded.append(image * math.sqrt(image.shape[-1]))
        words = self.vlm_with_expert.embed_language_tokens(batch["observation.language.tokens"])
        state = self.state_proj(batch["observation.state"])[:, None]
        embedded += [words * math.sqrt(words.shape[-1]), state]
        mask = batch["observation.language.attention_mask"]
        images = mask.new_ones(len(mask), sum(e.shape[1] for e in embedded[:2]))
        padding = torch.cat([images, mask, mask.new_ones(len(mask), 1)], dim=1)
        blocks = torch.zeros_like(padding, dtype=torch.long)
        blocks[:, -1] = 1
        return torch.cat(embedded, dim=1), padding, blocks

    def embed_suffix(self, noisy_actions: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, ...]:
        action = self.action_in_proj(noisy_actions)
        time_embedding = sinusoidal(time, action.shape[-1])[:, None].expand_as(action).to(action.dtype)
        action = self.action_time_mlp_in(torch.cat([action, time_embedding], dim=2))
        blocks = torch.ones(action.shape[:2], dtype=torch.long)  # causal
        return self.action_time_mlp_out(F.silu(action)), blocks.bool(), blocks

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the loss of each action's each number."""
        actions = batch["action"]
        noise, time = torch.randn_like(actions), sample_time(actions)
        noisy = time[:, None, None] * noise + (1 - time[:, None, None]) * actions
        prefix, prefix_padding, prefix_blocks = self.embed_prefix(batch)
        suffix, suffix_padding, suffix_blocks = self.embed_suffix(noisy, time)
        padding = torch.cat([prefix_padding, suffix_padding], dim=1)
        (_, out), _ = self.vlm_with_expert(
            attention_mask=block_mask(padding, torch.cat([prefix_blocks, suffix_blocks], dim=1)),
            position_ids=padding.cumsum(dim=1) - 1,
            inputs_embeds=[prefix, suffix],
        )
        return F.mse_loss(noise - actions, self.action_out_proj(out[:, -CHUNK:]), reduction="none")

    def sample_actions(self, batch: Batch) -> torch.Tensor:
        noise = torch.randn(len(batch["observation.state"]), CHUNK, ACTION)
        prefix, padding, blocks = self.embed_prefix(batch)
        positions = padding.cumsum(dim=1) - 1
        allowed = block_mask(padding, blocks)
        _, cache = self.vlm_with_expert(
            attention_mask=allowed, position_ids=positions, inputs_embeds=[prefix, None], fill_cache=True
        )
        for i in range(self.num_steps):
            time = torch.full((len(noise),), 1.0 - i / self.num_steps)
            suffix, suffix_padding, suffix_blocks = self.embed_suffix(noise, time)
            of_prefix = padding[:, None, :].expand(-1, suffix.shape[1], -1)
            (_, out), _ = self.vlm_with_expert(
                attention_mask=torch.cat([of_prefix, block_mask(suffix_padding, suffix_blocks)], dim=2),
                position_ids=padding.sum(dim=1)[:, None] + suffix_padding.cumsum(dim=1) - 1,
                inputs_embeds=[None, suffix],
                cache=cache,
            )
            noise = noise - self.action_out_proj(out[:, -CHUNK:]) / self.num_steps
        return noise


class SmolVLAPolicy(Policy):
    """smolvla as LeRobot has it."""

    name = "smolvla"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.model = VLAFlowMatching(**options)

    def loss(self, batch: Batch) -> torch.Tensor:
        return masked_mean(self.model(batch), batch)

    def sample(self, batch: Batch) -> torch.Tensor:
        return self.model.sample_actions(batch)
