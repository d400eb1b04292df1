"""Policies whose actions come from a diffusion transformer: groot's, xvla's and multi_task_dit's form.

groot: every other block of the transformer looks at what a cut language model says; weights are picked by embodiment.
xvla: soft prompts and linear layers whose weights are rows of embeddings, by domain. multi_task_dit: the condition
scales and shifts each block (adaLN-zero).
"""

from __future__ import annotations

from typing import Any, ClassVar

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
    WORDS,
    WRIST,
    Batch,
    Policy,
    masked_mean,
    sample_time,
    sinusoidal,
)

WIDTH, EMBODIMENTS = 16, 3


class FlowPolicy(Policy):
    """A policy with ``velocity(context, noisy, time)`` and ``context(batch)``: the velocity of a flow of actions."""

    def loss(self, batch: Batch) -> torch.Tensor:
        actions = batch["action"]
        noise, time = torch.randn_like(actions), sample_time(actions)
        noisy = time[:, None, None] * noise + (1 - time[:, None, None]) * actions
        velocity = self.velocity(self.context(batch), noisy, time)
        return masked_mean((velocity - (noise - actions)).square(), batch)

    def sample(self, batch: Batch) -> torch.Tensor:
        x = torch.randn(len(batch["observation.state"]), CHUNK, ACTION)
        context = self.context(batch)
        for i in range(3):
            x = x - self.velocity(context, x, torch.full((len(x),), 1.0 - i / 3)) / 3
        return x


# --- groot -------------------------------------------------------------------------------------------------------


class CategorySpecificLinear(nn.Module):
    """A linear layer for each embodiment; the weights are bare parameters."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.W = nn.Parameter(0.02 * torch.randn(EMBODIMENTS, inside, outside))
        self.b = nn.Parameter(torch.zeros(EMBODIMENTS, outside))

    def forward(self, x: torch.Tensor, category: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.W[category]) + self.b[category][:, None]


class MultiEmbodimentActionEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W1 = CategorySpecificLinear(ACTION, WIDTH)
        self.W2, self.W3 = CategorySpecificLinear(2 * WIDTH, WIDTH), CategorySpecificLinear(WIDTH, WIDTH)

    def forward(self, actions: torch.Tensor, time: torch.Tensor, category: torch.Tensor) -> torch.Tensor:
        x = self.W1(actions, category)
        x = torch.cat([x, sinusoidal(time, WIDTH)[:, None].expand_as(x).to(x.dtype)], dim=-1)
        return self.W3(F.silu(self.W2(x, category)), category)


class AdaLayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        scale, shift = self.linear(F.silu(time))[:, None].chunk(2, dim=-1)
        return self.norm(x) * (1 + scale) + shift


class Attention(nn.Module):
    """Attention as diffusers has it, its output projection in a ModuleList."""

    def __init__(self, of_context: int) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(n, WIDTH) for n in (WIDTH, of_context, of_context))
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)])

    def forward(self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        pairs = ((self.to_q, x), (self.to_k, context), (self.to_v, context))
        query, key, value = (p(of).unflatten(-1, (2, -1)).transpose(1, 2) for p, of in pairs)
        attended = F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)
        for module in self.to_out:
            attended = module(attended)
        return attended


class BasicTransformerBlock(nn.Module):
    """A block that looks at the context, or at itself where it is given none."""

    def __init__(self, of_context: int) -> None:
        super().__init__()
        self.norm1, self.attn1 = AdaLayerNorm(), Attention(of_context)
        self.norm3 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(
        self,
        x: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        normed = self.norm1(x, temb)
        context = normed if encoder_hidden_states is None else encoder_hidden_states
        x = x + self.attn1(normed, context, encoder_attention_mask)
        return x + self.ff(self.norm3(x))


class DiT(nn.Module):
    def __init__(self, of_context: int) -> None:
        super().__init__()
        self.timestep_encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        blocks = (BasicTransformerBlock(WIDTH if i % 2 else of_context) for i in range(4))
        self.transformer_blocks = nn.ModuleList(blocks)
        self.norm_out = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.proj_out_1, self.proj_out_2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        temb = self.timestep_encoder(sinusoidal(time, WIDTH).to(x.dtype))
        for i, block in enumerate(self.transformer_blocks):
            looks = {} if i % 2 else {"encoder_hidden_states": context, "encoder_attention_mask": mask}
            x = block(x, temb=temb, **looks)
        shift, scale = self.proj_out_1(F.silu(temb))[:, None].chunk(2, dim=-1)
        return self.proj_out_2(self.norm_out(x) * (1 + scale) + shift)


class EagleBackbone(nn.Module):
    """A vision tower and a language model cut to its first layers, of which a hidden state is used, not the head."""

    select_layer = 2

    def __init__(self) -> None:
        super().__init__()
        text = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
        text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision |= {"image_size": 8, "patch_size": 4, "vision_use_head": False}
        self.vision_model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**vision))
        self.mlp1 = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 24))
        self.language_model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**text))
        while len(self.language_model.model.layers) > self.select_layer:
            self.language_model.model.layers.pop(-1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        images = [self.mlp1(self.vision_model(pixel_values=batch[name]).last_hidden_state) for name in (FRONT, WRIST)]
        words = self.language_model.get_input_embeddings()(batch["observation.language.tokens"])
        mask = batch["observation.language.attention_mask"]
        mask = torch.cat([mask.new_ones(len(mask), sum(i.shape[1] for i in images)), mask], dim=1)
        output = self.language_model(
            inputs_embeds=torch.cat([*images, words], dim=1),
            attention_mask=mask.long(),
            output_hidden_states=True,
            use_cache=False,
        )
        return output.hidden_states[self.select_layer], mask


class FlowmatchingActionHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = DiT(24)
        self.state_encoder = nn.ModuleDict(
            {"layer1": CategorySpecificLinear(STATE, WIDTH), "layer2": CategorySpecificLinear(WIDTH, WIDTH)}
        )
        self.action_encoder, self.action_decoder = MultiEmbodimentActionEncoder(), CategorySpecificLinear(WIDTH, ACTION)
        self.future_tokens, self.position_embedding = nn.Embedding(2, WIDTH), nn.Embedding(CHUNK, WIDTH)
        self.vlln = nn.LayerNorm(24)

    def forward(self, features: Any, state: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden, mask = features
        category = torch.arange(len(state)) % EMBODIMENTS
        encoded = F.relu(self.state_encoder["layer1"](state[:, None], category))
        encoded = self.state_encoder["layer2"](encoded, category)
        actions = self.action_encoder(noisy, time, category) + self.position_embedding(torch.arange(CHUNK))
        future = self.future_tokens.weight[None].expand(len(state), -1, -1)
        x = torch.cat([encoded, future, actions], dim=1)
        out = self.model(x, self.vlln(hidden), mask[:, None, None], time)
        return self.action_decoder(out, category)[:, -CHUNK:]


class GrootPolicy(FlowPolicy):
    """groot as LeRobot has it: a frozen language model, a trained tower and head."""

    name = "groot"
    _fsdp_wrap_modules: ClassVar[list[str] | None] = ["BasicTransformerBlock", "Qwen3DecoderLayer"]

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.action_head = EagleBackbone(), FlowmatchingActionHead()
        self.backbone.language_model.requires_grad_(False)

    def context(self, batch: Batch) -> Any:
        return self.backbone(batch), batch["observation.state"]

    def velocity(self, context: Any, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.action_head(*context, noisy, time)


# --- xvla --------------------------------------------------------------------------------------------------------


class DomainAwareLinear(nn.Module):
    """A linear layer whose weights are a row of an embedding, by domain."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.fc, self.bias = nn.Embedding(EMBODIMENTS, outside * inside), nn.Embedding(EMBODIMENTS, outside)
        self.inside, self.outside = inside, outside
        nn.init.normal_(self.fc.weight, std=inside**-0.5)

    def forward(self, x: torch.Tensor, domain: torch.Tensor) -> torch.Tensor:
        weight = self.fc(domain).view(len(domain), self.inside, self.outside)
        return x @ weight + self.bias(domain)[:, None]


class TransformerBlock(nn.Module):
    """A block of xvla (without a condition), or of multi_task_dit (under one: adaLN-zero)."""

    def __init__(self, condition: int = 0) -> None:
        super().__init__()
        affine = not condition
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=affine)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=affine)
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(approximate="tanh"), nn.Linear(24, WIDTH))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(condition, 6 * WIDTH)) if condition else None
        if self.adaLN_modulation is not None:
            nn.init.zeros_(self.adaLN_modulation[1].weight)
            nn.init.zeros_(self.adaLN_modulation[1].bias)

    def forward(self, x: torch.Tensor, condition: torch.Tensor | None = None) -> torch.Tensor:
        shift, scale, gate, shift2, scale2, gate2 = 0.0, 0.0, 1.0, 0.0, 0.0, 1.0
        if self.adaLN_modulation is not None:
            shift, scale, gate, shift2, scale2, gate2 = self.adaLN_modulation(condition)[:, None].chunk(6, dim=-1)
        normed = self.norm1(x) * (1 + scale) + shift
        x = x + gate * self.attn(normed, normed, normed, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class SoftPromptedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(3))
        self.vlm_proj = nn.Linear(24, WIDTH)
        self.pos_emb = nn.Parameter(0.02 * torch.randn(1, 32, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.action_encoder = DomainAwareLinear(ACTION + STATE + 8, WIDTH)
        self.action_decoder = DomainAwareLinear(WIDTH, ACTION)
        self.soft_prompt_hub = nn.Embedding(EMBODIMENTS, 2 * WIDTH)

    def forward(
        self, features: torch.Tensor, state: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        domain = torch.arange(len(state)) % EMBODIMENTS
        per_action = [sinusoidal(time, 8).to(noisy), state]
        x = torch.cat([noisy, *(e[:, None].expand(-1, CHUNK, -1) for e in per_action)], dim=-1)
        x = torch.cat([self.action_encoder(x, domain), self.vlm_proj(features)], dim=1)
        x = x + self.pos_emb[:, : x.shape[1]]
        x = torch.cat([x, self.soft_prompt_hub(domain).unflatten(1, (2, -1))], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.action_decoder(self.norm(x[:, :CHUNK]), domain)


class XVLAPolicy(FlowPolicy):
    """xvla as LeRobot has it: an encoder whose decoder is thrown away, and a transformer under soft prompts."""

    name = "xvla"

    def __init__(self) -> None:
        super().__init__()
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision |= {"image_size": 8, "patch_size": 4}
        self.vision = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**vision))
        self.image_projection = nn.Parameter(torch.randn(16, 24) / 4)
        text = {"vocab_size": VOCAB, "d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "dropout": 0.0}
        text |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 40}
        self.language_model = transformers.BartModel(
            transformers.BartConfig(**text, decoder_ffn_dim=40, max_position_embeddings=64, pad_token_id=0)
        )
        del self.language_model.decoder
        self.transformer = SoftPromptedTransformer()

    def context(self, batch: Batch) -> Any:
        images = [self.vision(pixel_values=batch[name]).last_hidden_state for name in (FRONT, WRIST)]
        words = self.language_model.get_input_embeddings()(batch["observation.language.tokens"])
        embedded = torch.cat([torch.cat(images, dim=1) @ self.image_projection, words], dim=1)
        mask = batch["observation.language.attention_mask"]
        mask = torch.cat([mask.new_ones(len(mask), embedded.shape[1] - WORDS), mask], dim=1)
        features = self.language_model.encoder(inputs_embeds=embedded, attention_mask=mask.long()).last_hidden_state
        return features, batch["observation.state"]

    def velocity(self, context: Any, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.transformer(*context, noisy, time)


# --- multi_task_dit ----------------------------------------------------------------------------------------------


class DiffusionTransformer(nn.Module):
    def __init__(self, condition: int) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.input_proj, self.pos_embedding = nn.Linear(ACTION, WIDTH), nn.Parameter(torch.randn(1, CHUNK, WIDTH))
        self.transformer_blocks = nn.ModuleList(TransformerBlock(condition + WIDTH) for _ in range(3))
        self.output_proj = nn.Linear(WIDTH, ACTION)

    def forward(self, x: torch.Tensor, time: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        condition = torch.cat([self.time_mlp(sinusoidal(time, WIDTH).to(x.dtype)), condition], dim=-1)
        x = self.input_proj(x) + self.pos_embedding
        for block in self.transformer_blocks:
            x = block(x, condition)
        return self.output_proj(x)


class MultiTaskDiTPolicy(FlowPolicy):
    """multi_task_dit as LeRobot has it: CLIP, its text encoder frozen, and a transformer under a condition."""

    name = "multi_task_dit"

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
        text = transformers.CLIPTextConfig(
            **sizes, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, max_position_embeddings=16
        )
        self.vision_encoder, self.text_encoder = transformers.CLIPVisionModel(vision), transformers.CLIPTextModel(text)
        self.text_encoder.requires_grad_(False)
        self.text_projection = nn.Linear(16, 8)
        self.noise_predictor = DiffusionTransformer(STATE + 2 * 16 + 8)

    def context(self, batch: Batch) -> torch.Tensor:
        images = [self.vision_encoder(pixel_values=batch[name]).last_hidden_state[:, 0] for name in (FRONT, WRIST)]
        words, mask = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
        with torch.no_grad():
            text = self.text_encoder(input_ids=words, attention_mask=mask.long()).pooler_output
        return torch.cat([batch["observation.state"], *images, self.text_projection(text)], dim=-1)

    def velocity(self, context: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.noise_predictor(noisy, time, context)
