"""Tiny models of many architectures, and batches for them: transformers' from their configurations, and plain ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

VOCAB = 96
LENGTH = 12

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Case:
    """An architecture: how it is built, and how a batch for it is made."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, torch.Tensor]]
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def tokens(generator: torch.Generator, batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return on_device(torch.randint(3, VOCAB, (batch, length), generator=generator))


def _lm_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def _causal_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return next_token_loss(model(input_ids=batch["input_ids"]).logits, batch["input_ids"])


def _model_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def _hf(config: Any, auto: Any = transformers.AutoModelForCausalLM, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: auto.from_config(config(), **kwargs)


def _causal(config_cls: str, **overrides: Any) -> Case:
    def config() -> Any:
        return getattr(transformers, config_cls)(**{**_BASE, **overrides})

    return Case(_hf(config), _lm_batch, _causal_loss)


def _masked(config_cls: str, auto: str, **overrides: Any) -> Case:
    def config() -> Any:
        return getattr(transformers, config_cls)(**{**_BASE, **overrides})

    return Case(_hf(config, getattr(transformers, auto)), _lm_batch, _model_loss)


def _vision_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    labels = torch.randint(0, 3, (2,), generator=generator)
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": labels}


def _clip() -> nn.Module:
    text = {**_BASE, "projection_dim": 16, "num_hidden_layers": 2, "eos_token_id": VOCAB - 1}
    vision = {**_BASE, "image_size": 16, "patch_size": 8, "projection_dim": 16}
    text.pop("num_key_value_heads"), vision.pop("num_key_value_heads")
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def _clip_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(generator), "pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}


def _clip_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch, return_loss=True).loss


def _qwen2_vl() -> nn.Module:
    text = {**_BASE, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=VOCAB - 1,
        video_token_id=VOCAB - 2,
        vision_start_token_id=VOCAB - 3,
        vision_end_token_id=VOCAB - 4,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def _qwen2_vl_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB - 4, (2, LENGTH), generator=generator)
    ids[:, 2], ids[:, 3:5] = VOCAB - 3, VOCAB - 1  # 2 image tokens: a grid of 4 x 2 patches merged 2 x 2
    pixels = torch.randn(2 * 8, 3 * 2 * 4 * 4, generator=generator)
    grid = torch.tensor([[1, 4, 2], [1, 4, 2]])
    types = (ids == VOCAB - 1).int()
    return {"input_ids": ids, "labels": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}


def _llava() -> nn.Module:
    vision = {"image_size": 16, "patch_size": 8, "projection_dim": 16, "vocab_size": VOCAB, "hidden_size": 32}
    vision |= {
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "model_type": "clip_vision_model",
    }
    config = transformers.LlavaConfig(
        text_config={**_BASE, "model_type": "llama"}, vision_config=vision, image_token_index=VOCAB - 1
    )
    return transformers.LlavaForConditionalGeneration(config)


def _llava_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB - 1, (2, LENGTH), generator=generator)
    ids[:, 1:5] = VOCAB - 1
    return {"input_ids": ids, "labels": ids, "pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}


# --- modules that are not Hugging Face's -------------------------------------------------------------------------


class Mlp(nn.Module):
    """Layers of odd sizes, so that shards are uneven, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.second = nn.Linear(13, 5)
        self.last = nn.Linear(5, 1)
        self.register_buffer("offset", torch.linspace(0, 1, 13))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)) + self.offset.to(x.dtype))
        return self.last(torch.tanh(self.second(x)))


class PlainTransformer(nn.Module):
    """torch's own encoder layers in a ModuleList, with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 48, dropout, batch_first=True) for _ in range(3))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Actor(nn.Module):
    is_actor = True

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids).logits


class Critic(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.base_model = model
        self.value_head = nn.Linear(32, 1)

    def forward(self, ids):
        hidden = self.base_model.model(input_ids=ids).last_hidden_state
        return self.value_head(hidden).squeeze(-1)


class UNet(nn.Module):
    """A small convolutional UNet: no repeated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.middle = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, 1, 1))
        self.up2, self.up1 = nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ConvTranspose2d(16, 3, 4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.silu(self.down1(x))
        b = self.middle(F.silu(self.down2(a)))
        return self.up1(torch.cat([F.silu(self.up2(b)), a], dim=1))


class Recurrent(nn.Module):
    """An LSTM, whose weights are used without a call of their modules, a tied head and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.rnn = nn.LSTM(24, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(ids))[0]) * self.temperature


class SharedBlocks(nn.Module):
    """Blocks that share one linear layer, and a block that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(Residual(16) for _ in range(3))
        self.blocks[2].inner.weight = self.blocks[0].inner.weight
        self.again = self.blocks[1]
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.again(x))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Cross entropy in at least fp32; transformers' own losses are fp32 also where the model is float64."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten().to(logits.device))


def _lm_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return next_token_loss(model(batch["ids"]), batch["ids"])


def _square_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def _ids(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"ids": tokens(generator)}


def _vectors(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 7, generator=generator), "y": torch.randn(4, 1, generator=generator)}


def _images(generator: torch.Generator) -> dict[str, torch.Tensor]:
    x = torch.randn(2, 3, 16, 16, generator=generator)
    return {"x": x, "y": x.flip(2)}


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MLA = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_shared_experts": 1,
}  # fmt: skip
_MAMBA = {"state_size": 8, "expand": 2}

CASES: dict[str, Case] = {
    # dense decoders, untied and tied
    "llama": _causal("LlamaConfig"),
    "llama_tied": _causal("LlamaConfig", tie_word_embeddings=True),
    "qwen2": _causal("Qwen2Config", tie_word_embeddings=True),
    "qwen3": _causal("Qwen3Config", head_dim=8),
    "gemma3": _causal("Gemma3TextConfig", head_dim=8, layer_types=["sliding_attention", "full_attention"]),
    "mistral": _causal("MistralConfig"),
    "phi3": _causal("Phi3Config"),
    "olmo2": _causal("Olmo2Config"),
    "gpt2": _causal("GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "gpt_neox": _causal("GPTNeoXConfig"),
    "opt": _causal("OPTConfig", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    "bloom": _causal("BloomConfig", n_layer=2, n_head=4),
    "falcon": _causal("FalconConfig"),
    "stablelm": _causal("StableLmConfig"),
    # mixtures of experts, latent attention
    "mixtral": _causal("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _causal("Qwen3MoeConfig", head_dim=8, **_MOE),
    "gpt_oss": _causal("GptOssConfig", head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": _causal("DeepseekV3Config", **_MLA),
    # state space
    "mamba": _causal("MambaConfig", **_MAMBA),
    "mamba2": _causal("Mamba2Config", num_heads=8, head_dim=8, n_groups=1, chunk_size=4, **_MAMBA),
    # encoders
    "bert": _masked("BertConfig", "AutoModelForMaskedLM", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "albert": _masked("AlbertConfig", "AutoModelForMaskedLM", embedding_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "modernbert": _masked("ModernBertConfig", "AutoModelForMaskedLM", global_attn_every_n_layers=2),
    "vit": Case(
        _hf(
            lambda: transformers.ViTConfig(**{**_BASE, "image_size": 16, "patch_size": 8, "num_labels": 3}),
            transformers.AutoModelForImageClassification,
        ),
        _vision_batch,
        _model_loss,
    ),
    # encoder-decoders
    "t5": _masked("T5Config", "AutoModelForSeq2SeqLM", d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0),
    "bart": _masked("BartConfig", "AutoModelForSeq2SeqLM", d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0),
    # vision and language
    "clip": Case(_clip, _clip_batch, _clip_loss),
    "qwen2_vl": Case(_qwen2_vl, _qwen2_vl_batch, _model_loss),
    "llava": Case(_llava, _llava_batch, _model_loss),
    # not Hugging Face's
    "mlp": Case(Mlp, _vectors, _square_loss),
    "plain_transformer": Case(PlainTransformer, _ids, _lm_loss),
    "unet": Case(UNet, _images, _square_loss),
    "recurrent": Case(Recurrent, _ids, _lm_loss),
    "shared_blocks": Case(SharedBlocks, _ids, _lm_loss),
}  # fmt: skip
FAMILIES = ("llama_tied", "gemma3", "gpt_oss", "deepseek_v3", "mamba2", "t5", "qwen2_vl", "unet")
"""One of each kind: decoders, experts, state spaces, encoders, images. The others run in `make test-full`."""

FILED = ("llama_tied", "gpt_oss", "deepseek_v3", "qwen2_vl")
"""One of each way in which files differ from models: tied, with fused experts, converted, renamed."""

HUGGING_FACE = [
    name for name in CASES if name not in ("mlp", "plain_transformer", "unet", "recurrent", "shared_blocks")
]


def build(name: str, seed: int = 0) -> nn.Module:
    """Build a case's model with weights that follow from the seed alone."""
    torch.manual_seed(seed)
    model = CASES[name].build()
    # Experts of some architectures come out empty or zero: every parameter gets values.
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08 + (parameter.ndim == 1) * 0.5)
    return on_device(model.train())


def device() -> torch.device:
    """Return the device of this rank: its accelerator, else the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())


def on_device(value: Any) -> Any:
    """Move a model, a tensor or the tensors of a batch to the accelerator of this rank, if it has one."""
    if not torch.accelerator.is_available():
        return value  # a model on the meta device cannot be moved
    if isinstance(value, dict):
        return {name: on_device(each) for name, each in value.items()}
    return value.to(device()) if isinstance(value, (torch.Tensor, nn.Module)) else value


def batch_of(name: str, step: int, rank: int) -> dict[str, torch.Tensor]:
    """Make the batch of one rank at one step."""
    return on_device(CASES[name].batch(torch.Generator().manual_seed(1000 * step + rank)))


def loss_of(name: str, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return CASES[name].loss(model, batch)
