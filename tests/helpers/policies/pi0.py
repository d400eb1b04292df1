"""pi0 as LeRobot has it: two decoders whose layers run pairwise, through a function of the module."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma import modeling_gemma

from helpers.models import VOCAB
from helpers.policies.base import (
    ACTION,
    CHUNK,
    FRONT,
    STATE,
    WRIST,
    Batch,
    Policy,
    additive,
    block_mask,
    masked_mean,
    sample_time,
    sinusoidal,
)

Cameras = list[tuple[torch.Tensor, torch.Tensor]]
"""Images of each camera, and in which samples there are any."""

KEPT_IN_FP32 = ("vision_tower", "multi_modal_projector", "input_layernorm", "post_attention_layernorm", "model.norm")
"""What the mixed form of the backbone and the expert keeps."""


def compute_layer_complete(
    layer_idx: int,
    inputs_embeds: list[torch.Tensor],
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor,
    paligemma: nn.Module,
    gemma_expert: nn.Module,
) -> list[torch.Tensor]:
    """Run one layer of both decoders with joint attention; the layers' own forward is not called."""
    models = [paligemma.model.language_model, gemma_expert.model]
    queries, keys, values = [], [], []
    for model, hidden in zip(models, inputs_embeds, strict=True):
        layer = model.layers[layer_idx]
        normed = layer.input_layernorm(hidden)
        shape = (*normed.shape[:-1], -1, layer.self_attn.head_dim)
        queries.append(layer.self_attn.q_proj(normed).view(shape).transpose(1, 2))
        keys.append(layer.self_attn.k_proj(normed).view(shape).transpose(1, 2))
        values.append(layer.self_attn.v_proj(normed).view(shape).transpose(1, 2))
    query, key, value = torch.cat(queries, dim=2), torch.cat(keys, dim=2), torch.cat(values, dim=2)
    cos, sin = models[0].rotary_emb(query.new_zeros(query.shape[0], query.shape[2], query.shape[-1]), position_ids)
    query, key = modeling_gemma.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=1)
    attention = models[0].layers[layer_idx].self_attn
    attended, _ = modeling_gemma.eager_attention_forward(
        attention, query, key, value, attention_mask, attention.scaling
    )
    attended = attended.reshape(query.shape[0], -1, query.shape[1] * attention.head_dim)
    outputs, start = [], 0
    for model, hidden in zip(models, inputs_embeds, strict=True):
        layer, end = model.layers[layer_idx], start + hidden.shape[1]
        if attended.dtype != layer.self_attn.o_proj.weight.dtype:
            attended = attended.to(layer.self_attn.o_proj.weight.dtype)
        residual = hidden + layer.self_attn.o_proj(attended[:, start:end])
        normed = layer.post_attention_layernorm(residual.clone())
        if layer.mlp.up_proj.weight.dtype == torch.bfloat16:
            normed = normed.to(torch.bfloat16)
        outputs.append(residual + layer.mlp(normed))
        start = end
    return outputs


class PaliGemmaWithExpertModel(nn.Module):
    """A vision and language model and an action expert that attend to each other in each layer."""

    def __init__(self, *, mixed_dtypes: bool = False, freeze_vision_encoder: bool = False) -> None:
        super().__init__()
        text = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
        text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision |= {"image_size": 8, "patch_size": 4, "vision_use_head": False, "projection_dim": 24}
        config = transformers.PaliGemmaConfig(
            text_config={**text, "model_type": "gemma"},
            vision_config={**vision, "model_type": "siglip_vision_model"},
            projection_dim=24,
            image_token_id=VOCAB - 1,
            attn_implementation="eager",
        )
        expert = transformers.GemmaConfig(
            **{**text, "hidden_size": 16, "intermediate_size": 32}, attn_implementation="eager"
        )
        self.paligemma = transformers.PaliGemmaForConditionalGeneration(config)
        self.gemma_expert = transformers.GemmaForCausalLM(expert)
        self.gemma_expert.model.embed_tokens = None
        self.gradient_checkpointing = False
        if mixed_dtypes:
            self.to_bfloat16_for_selected_params()
        if freeze_vision_encoder:
            self.paligemma.model.vision_tower.requires_grad_(False)

    def to_bfloat16_for_selected_params(self) -> None:
        """Bring all to bf16 but the vision tower, its projector and the norms: two dtypes in each block."""
        self.to(torch.bfloat16)
        for name, parameter in self.named_parameters():
            if any(part in name for part in KEPT_IN_FP32):
                parameter.data = parameter.data.to(torch.float32)

    def embed_image(self, image: torch.Tensor) -> torch.Tensor:
        # The tower may be fp32 beside bf16.
        return self.paligemma.model.get_image_features(image.float()).pooler_output.to(image.dtype)

    def embed_language_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.paligemma.model.language_model.embed_tokens(tokens)

    def forward(
        self,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        inputs_embeds: list[torch.Tensor | None],
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> tuple[list[torch.Tensor | None], Any]:
        # The first layer's dtype counts, as it is before that layer runs.
        dtype = self.paligemma.model.language_model.layers[0].self_attn.q_proj.weight.dtype
        prefix, suffix = (e.to(dtype) if e is not None and dtype == torch.bfloat16 else e for e in inputs_embeds)
        options = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
        options["past_key_values"] = past_key_values
        if suffix is None:
            output = self.paligemma.model.language_model.forward(inputs_embeds=prefix, **options)
            return [output.last_hidden_state, None], output.past_key_values
        if prefix is None:
            output = self.gemma_expert.model.forward(inputs_embeds=suffix, **options)
            return [None, output.last_hidden_state], None
        models = {"paligemma": self.paligemma, "gemma_expert": self.gemma_expert}
        embeds = [prefix, suffix]
        for layer_idx in range(self.paligemma.config.text_config.num_hidden_layers):
            arguments = (layer_idx, embeds, attention_mask, position_ids)
            if self.gradient_checkpointing and self.training:
                embeds = checkpoint(
                    compute_layer_complete, *arguments, use_reentrant=False, preserve_rng_state=False, **models
                )
            else:
                embeds = compute_layer_complete(*arguments, **models)
        norms = (self.paligemma.model.language_model.norm, self.gemma_expert.model.norm)
        return [norm(hidden) for norm, hidden in zip(norms, embeds, strict=True)], None


class PI0Pytorch(nn.Module):
    """The flow of pi0: from noise to a chunk of actions, given images, words and a state."""

    num_inference_steps = 3

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.paligemma_with_expert = PaliGemmaWithExpertModel(**options)
        width = self.paligemma_with_expert.gemma_expert.config.hidden_size
        self.action_in_proj, self.action_out_proj = nn.Linear(ACTION, width), nn.Linear(width, ACTION)
        self.state_proj = nn.Linear(STATE, width)
        self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)

    def embed_prefix(self, cameras: Cameras, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
        embedded = [self.paligemma_with_expert.embed_image(image) for image, _ in cameras]
        masks = [
            seen[:, None].to(mask.dtype).expand(e.shape[:2]) for e, (_, seen) in zip(embedded, cameras, strict=True)
        ]
        embedded.append(self.paligemma_with_expert.embed_language_tokens(tokens))
        padding = torch.cat([*masks, mask], dim=1)
        return torch.cat(embedded, dim=1), padding, torch.zeros_like(padding, dtype=torch.long)

    def embed_suffix(self, state: torch.Tensor, noisy_actions: torch.Tensor, time: torch.Tensor) -> Any:
        action = self.action_in_proj(noisy_actions)
        state = state.to(self.state_proj.weight.dtype)
        time_embedding = sinusoidal(time, action.shape[-1])[:, None].expand_as(action).to(action.dtype)
        action = self.action_time_mlp_in(torch.cat([action, time_embedding], dim=2))
        action = self.action_time_mlp_out(F.silu(action))
        embedded = torch.cat([self.state_proj(state)[:, None], action], dim=1)
        # Images and words attend to neither state nor actions, the state not to actions.
        blocks = torch.tensor([1, 1] + [0] * (CHUNK - 1), device=state.device).expand(len(state), -1)
        return embedded, torch.ones_like(blocks, dtype=torch.bool), blocks

    def forward(
        self, cameras: Cameras, tokens: torch.Tensor, mask: torch.Tensor, state: torch.Tensor, actions: Any
    ) -> torch.Tensor:
        """Return the loss of each action's each number."""
        # In fp32 whatever else is not, and so must be the projections that they meet.
        noise, time = torch.randn(actions.shape), sample_time(actions.float())
        noisy = time[:, None, None] * noise + (1 - time[:, None, None]) * actions
        prefix, prefix_padding, prefix_blocks = self.embed_prefix(cameras, tokens, mask)
        suffix, suffix_padding, suffix_blocks = self.embed_suffix(state, noisy, time)
        padding = torch.cat([prefix_padding, suffix_padding], dim=1)
        allowed = block_mask(padding, torch.cat([prefix_blocks, suffix_blocks], dim=1))
        (_, out), _ = self.paligemma_with_expert(
            attention_mask=additive(allowed),
            position_ids=padding.cumsum(dim=1) - 1,
            inputs_embeds=[prefix, suffix],
        )
        velocity = self.action_out_proj(out[:, -CHUNK:].to(self.action_out_proj.weight.dtype))
        # Torch 2.11 has no gradient of errors between two dtypes.
        return F.mse_loss(noise - actions, velocity.to(noise.dtype), reduction="none")

    @torch.no_grad()
    def sample_actions(
        self, cameras: Cameras, tokens: torch.Tensor, mask: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        noise = torch.randn(len(state), CHUNK, ACTION, device=state.device)
        prefix, padding, blocks = self.embed_prefix(cameras, tokens, mask)
        _, cache = self.paligemma_with_expert(
            attention_mask=additive(block_mask(padding, blocks)),
            position_ids=padding.cumsum(dim=1) - 1,
            inputs_embeds=[prefix, None],
            use_cache=True,
        )
        step = -1.0 / self.num_inference_steps
        for i in range(self.num_inference_steps):
            time = torch.full((len(state),), 1.0 + i * step, device=state.device)
            noise = noise + step * self.denoise_step(state, padding, cache, noise, time)
        return noise

    def denoise_step(
        self, state: torch.Tensor, padding: torch.Tensor, cache: Any, noisy: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        suffix, suffix_padding, suffix_blocks = self.embed_suffix(state, noisy, time)
        of_prefix = padding[:, None, :].expand(-1, suffix.shape[1], -1)
        allowed = torch.cat([of_prefix, block_mask(suffix_padding, suffix_blocks)], dim=2)
        (_, out), _ = self.paligemma_with_expert(
            attention_mask=additive(allowed),
            position_ids=padding.sum(dim=1)[:, None] + suffix_padding.cumsum(dim=1) - 1,
            inputs_embeds=[None, suffix],
            past_key_values=copy.deepcopy(cache),
        )
        return self.action_out_proj(out[:, -CHUNK:].to(self.action_out_proj.weight.dtype))


class PI0Policy(Policy):
    """pi0 as LeRobot has it."""

    name = "pi0"

    def __init__(self, *, gradient_checkpointing: bool = False, **options: Any) -> None:
        super().__init__(gradient_checkpointing=gradient_checkpointing, **options)
        self.model = PI0Pytorch(**options)
        self.model.paligemma_with_expert.gradient_checkpointing = gradient_checkpointing

    def loss(self, batch: Batch) -> torch.Tensor:
        return masked_mean(self.model(*self._observation(batch), batch["action"]), batch)

    def sample(self, batch: Batch) -> torch.Tensor:
        return self.model.sample_actions(*self._observation(batch))

    def _observation(self, batch: Batch) -> Any:
        """Return what the model takes; a camera that a batch lacks is black, and nothing looks at it."""
        words, state = batch["observation.language.tokens"], batch["observation.state"]
        black = state.new_full((len(state), 3, 8, 8), -1.0)
        cameras = [(batch.get(name, black), words.new_full((len(state),), name in batch)) for name in (FRONT, WRIST)]
        return cameras, words, batch["observation.language.attention_mask"], state
