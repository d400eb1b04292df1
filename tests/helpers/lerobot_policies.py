"""LeRobot's real policies, tiny: how each is built, and a batch for it. Only in the environment of ``make peers``.

Input: a seed. Output: policies of LeRobot's own classes; what they would load from the hub is made from configurations.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import tokenizers
import torch
import transformers
from torch import nn
from torch.nn.attention.flex_attention import create_mask

STATE, ACTION, VOCAB = 4, 3, 64
Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A policy: its configuration, the steps and images of its batches, and what replaces the hub."""

    config: Mapping[str, Any]
    observations: int = 0
    """Observation steps of a batch; 0 without such a dimension."""
    actions: int = 8
    acts_on: int = 2
    """Samples of a batch from which the policy selects actions."""
    image: int = 32
    camera: str = "observation.images.top"
    text: bool = False
    task: bool = True
    extra: Callable[[int, torch.Generator], Batch] = lambda size, draw: {}
    hub: Callable[[Any], contextlib.AbstractContextManager[Any]] = lambda module: contextlib.nullcontext()
    """What replaces the hub while the policy is built."""
    run: Callable[[Any], contextlib.AbstractContextManager[Any]] = lambda module: contextlib.nullcontext()
    """What is replaced while the policy is built and runs."""
    loss: Callable[[Any, Batch], torch.Tensor] = lambda outputs, batch: (
        outputs[0] if isinstance(outputs, tuple) else outputs
    )
    reduces_itself: bool = False
    """Whether its forward reduces over the ranks, so that nothing in one process equals it."""


def features(case: Case) -> dict[str, Any]:
    from lerobot.configs.types import FeatureType, PolicyFeature

    return {
        "input_features": {
            "observation.state": PolicyFeature(type=FeatureType.STATE, shape=(STATE,)),
            case.camera: PolicyFeature(type=FeatureType.VISUAL, shape=(3, case.image, case.image)),
        },
        "output_features": {"action": PolicyFeature(type=FeatureType.ACTION, shape=(ACTION,))},
    }


def classes(name: str) -> tuple[Any, Any, Any]:
    """Return module, configuration class and policy class of a policy."""
    module = importlib.import_module(f"lerobot.policies.{name}.modeling_{name}")
    configuration = importlib.import_module(f"lerobot.policies.{name}.configuration_{name}")
    (config,) = [
        c
        for c in vars(configuration).values()
        if getattr(c, "__module__", "") == configuration.__name__ and getattr(c, "get_optimizer_preset", None)
    ][:1]
    (policy,) = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and c.__module__ == module.__name__ and getattr(c, "config_class", None) is config
    ]
    return module, config, policy


def module_of(case_name: str) -> Any:
    return classes(case_name.partition(":")[0])[0]


def build(case_name: str, seed: int = 0) -> nn.Module:
    case, name = CASES[case_name], case_name.partition(":")[0]
    module, config, policy = classes(name)
    torch.manual_seed(seed)
    with case.hub(module), case.run(module):
        built = policy(config(**features(case), device="cpu", **case.config))
        getattr(built, "_ensure_frozen_modules", lambda: None)()
        return built


def reload(case_name: str, folder: Any) -> nn.Module:
    """Load a policy as a robot does."""
    case, name = CASES[case_name], case_name.partition(":")[0]
    module, _, policy = classes(name)
    with case.hub(module), case.run(module):
        loaded = policy.from_pretrained(folder)
        getattr(loaded, "_ensure_frozen_modules", lambda: None)()
        return loaded


def batch_of(case_name: str, step: int, rank: int, size: int = 2) -> Batch:
    case = CASES[case_name]
    draw = torch.Generator().manual_seed(1000 * step + rank)
    steps = (case.observations,) if case.observations else ()
    batch: Batch = {
        "observation.state": torch.randn(size, *steps, STATE, generator=draw),
        case.camera: torch.rand(size, *steps, 3, case.image, case.image, generator=draw),
        "action": torch.rand(size, case.actions, ACTION, generator=draw) * 2 - 1,
        "action_is_pad": torch.zeros(size, case.actions, dtype=torch.bool),
    }
    if case.task:
        batch["task"] = ["reach"] * size
    if case.text:
        batch["observation.language.tokens"] = torch.randint(3, VOCAB - 1, (size, 6), generator=draw)
        batch["observation.language.attention_mask"] = torch.ones(size, 6, dtype=torch.bool)
    return batch | case.extra(size, draw)


def loss_of(case_name: str, policy: nn.Module, batch: Batch, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    with CASES[case_name].run(module_of(case_name)):
        return CASES[case_name].loss(policy(dict(batch)), batch)


def actions_of(case_name: str, policy: nn.Module, batch: Batch, seed: int = 7) -> torch.Tensor:
    """Return the first action that a robot would take."""
    policy.eval()
    getattr(policy, "reset", lambda: None)()
    torch.manual_seed(seed)
    observation = {k: v for k, v in batch.items() if not k.startswith("action") or k == "action_token_id"}
    if CASES[case_name].observations:
        observation = {
            k: v[:, -1] if k.startswith("observation.") and "language" not in k else v for k, v in observation.items()
        }
    run = CASES[case_name].run(module_of(case_name))
    with torch.no_grad(), run, _tokens_as_actions(policy), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a codebook that is not trained yet
        return policy.select_action(observation)


def _tokens_as_actions(policy: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Without the hub there is no tokenizer that turns tokens into actions, so return the tokens themselves."""
    if not hasattr(policy, "detokenize_actions"):
        return contextlib.nullcontext()

    def first(tokens: torch.Tensor, action_horizon: int, action_dim: int) -> torch.Tensor:
        return tokens.float().mean(1)[:, None, None].expand(-1, action_horizon, action_dim)

    return patch.object(policy, "detokenize_actions", first)


# --- what replaces the hub -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tiny_clip(module: Any) -> Iterator[None]:
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**size, image_size=32, patch_size=16, projection_dim=32)
    text = transformers.CLIPTextConfig(**size, vocab_size=VOCAB, projection_dim=32, max_position_embeddings=16)
    with (
        patch.object(module.CLIPVisionModel, "from_pretrained", lambda *_a, **_k: transformers.CLIPVisionModel(vision)),
        patch.object(module.CLIPTextModel, "from_pretrained", lambda *_a, **_k: transformers.CLIPTextModel(text)),
    ):
        yield


@contextlib.contextmanager
def tiny_gemma(module: Any) -> Iterator[None]:
    """Give pi0, pi05 and pi0_fast small backbones."""
    real = module.PaliGemmaForConditionalGenerationWithPiGemma

    def small(config: Any) -> Any:
        vision = config.vision_config
        vision.num_hidden_layers, vision.hidden_size, vision.intermediate_size = 2, 32, 48
        vision.num_attention_heads, vision.image_size, vision.patch_size = 2, 32, 16
        config.text_config.vocab_size = config.image_token_index = VOCAB
        config.text_config.vocab_size += 1
        vision.projection_dim = config.projection_dim = config.text_config.hidden_size
        return real(config)

    def gemma(variant: str) -> Any:
        return module.GemmaConfig(
            width=32 if "300m" in variant else 48, depth=2, mlp_dim=64, num_heads=8, num_kv_heads=1, head_dim=8
        )

    with (
        patch.object(module, "get_gemma_config", gemma),
        patch.object(module, "PaliGemmaForConditionalGenerationWithPiGemma", small),
    ):
        yield


@contextlib.contextmanager
def tiny_smolvlm(module: Any) -> Iterator[None]:
    inner = importlib.import_module("lerobot.policies.smolvla.smolvlm_with_expert")
    text = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    vision = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.SmolVLMConfig(
        text_config=text,
        vision_config={**vision, "image_size": 32, "patch_size": 8},
        scale_factor=2,
        image_token_id=VOCAB - 1,
        pad_token_id=0,
    )

    class Tokenizer:
        fake_image_token_id, global_image_token_id = VOCAB - 2, VOCAB - 3

    class Processor:
        tokenizer = Tokenizer()

    with (
        patch.object(inner.AutoConfig, "from_pretrained", lambda *_a, **_k: copy.deepcopy(config)),
        patch.object(inner.AutoProcessor, "from_pretrained", lambda *_a, **_k: Processor()),
    ):
        yield


SPECIAL = ("<pad>", "<unk>", "<eos>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL += ("<|im_start|>", "<|im_end|>", "<|propri|>", "<|action|>", "<img>", "</img>", "<IMG_CONTEXT>")
QWEN_TOKENS = {f"{token[2:-2].removesuffix('_pad')}_token_id": SPECIAL.index(token) for token in SPECIAL[3:7]}
WORDS = ("reach", "Your", "task", "is", "and", "actions")
CHAT = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=list(SPECIAL[3:]),
    )


def tiny_qwen3_vl_processor() -> transformers.Qwen3VLProcessor:
    size = {"patch_size": 8, "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32}}
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**size),
        video_processor=transformers.Qwen3VLVideoProcessor(**size),
        tokenizer=tiny_tokenizer(),
        chat_template=CHAT,
    )


def tiny_qwen3_vl() -> transformers.Qwen3VLConfig:
    text = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    text |= {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 1, 1]}}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": 8, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN_TOKENS, tie_word_embeddings=True)


def tiny_qwen25_vl(**text_options: Any) -> dict[str, Any]:
    text = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, **text_options}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": 14, "window_size": 28, "fullatt_block_indexes": [1]}
    return {"text_config": text, "vision_config": vision, **QWEN_TOKENS}


def qwen_tokens(size: int, draw: torch.Generator, *, patch: int, last: Sequence[int] = ()) -> Batch:
    """Return the tokens and patches of one image of 4 x 4 patches and a text, as processors of Qwen-VL do."""
    start, end, image_token = (SPECIAL.index(f"<|{name}|>") for name in ("vision_start", "vision_end", "image_pad"))
    words = torch.randint(len(SPECIAL), VOCAB, (size, 5), generator=draw)
    image = torch.tensor([start, *[image_token] * 4, end]).expand(size, -1)
    tokens = torch.cat([image, words, torch.tensor(last, dtype=torch.long).expand(size, -1)], dim=1)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(size * 16, 3 * 2 * patch**2, generator=draw),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * size),
        "mm_token_type_ids": (tokens == image_token).int(),
    }


@contextlib.contextmanager
def tiny_groot(module: Any) -> Iterator[None]:
    """Save a base checkpoint, which GR00T finds where it would download one."""
    inner = importlib.import_module("lerobot.policies.groot.groot_n1_7")
    head = {"attention_head_dim": 8, "num_attention_heads": 4, "positional_embeddings": None, "final_dropout": True}
    with tempfile.TemporaryDirectory() as folder:
        tiny_qwen3_vl().save_pretrained(f"{folder}/backbone")
        config = inner.GR00TN17Config(
            model_name=f"{folder}/backbone",
            backbone_embedding_dim=32,
            select_layer=2,
            max_state_dim=8,
            max_action_dim=8,
            action_horizon=8,
            hidden_size=32,
            input_embedding_dim=32,
            max_seq_len=16,
            max_num_embodiments=2,
            diffusion_model_cfg={
                **head,
                "num_layers": 4,
                "norm_type": "ada_norm",
                "dropout": 0.2,
                "output_dim": 32,
                "interleave_self_attention": True,
            },
            vl_self_attention_cfg={**head, "num_layers": 2, "dropout": 0.2},
            num_inference_timesteps=2,
        )
        inner.GR00TN17(config, load_backbone_weights=False).save_pretrained(f"{folder}/base")
        with patch.object(inner, "snapshot_download", lambda *_a, **_k: f"{folder}/base"):
            yield


def groot_inputs(size: int, draw: torch.Generator) -> Batch:
    return qwen_tokens(size, draw, patch=8) | {
        "state": torch.randn(size, 1, 8, generator=draw),
        "action": torch.rand(size, 8, 8, generator=draw) * 2 - 1,
        "action_mask": torch.ones(size, 8, 8),
        "embodiment_id": torch.arange(size) % 2,
    }


@contextlib.contextmanager
def tiny_vla_jepa(module: Any) -> Iterator[None]:
    inner = importlib.import_module("lerobot.policies.vla_jepa.qwen_interface")
    video = transformers.VJEPA2Config(
        crop_size=32,
        frames_per_clip=4,
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        mlp_ratio=2,
        pred_hidden_size=32,
        pred_num_attention_heads=2,
        pred_num_hidden_layers=1,
        pred_num_mask_tokens=1,
    )
    qwen, frames = inner.Qwen3VLForConditionalGeneration, transformers.VJEPA2VideoProcessor(crop_size=32, size=32)
    with (
        patch.object(qwen, "from_pretrained", lambda *_a, **_k: qwen(tiny_qwen3_vl())),
        patch.object(inner.AutoProcessor, "from_pretrained", lambda *_a, **_k: tiny_qwen3_vl_processor()),
        patch.object(module.AutoModel, "from_pretrained", lambda *_a, **_k: transformers.VJEPA2Model(video)),
        patch.object(module.AutoVideoProcessor, "from_pretrained", lambda *_a, **_k: frames),
    ):
        yield


class Float32Torch:
    """The module torch, in which bfloat16 means float32."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def float32(module: Any) -> Any:
    """Run in fp32 what a policy casts to bf16, so that values can be compared."""
    return patch.object(module, "torch", Float32Torch())


@contextlib.contextmanager
def tiny_wall_x(module: Any) -> Iterator[None]:
    experts = [{"hidden_size": 32, "intermediate_size": size, "hidden_act": "silu"} for size in (48, 24)]
    text = {"mlp_moe": True, "num_experts": 2, "experts": experts, "dim_inputs": (32, 32)}
    config = module.Qwen2_5_VLConfig(**tiny_qwen25_vl(**text, dof_config={"arm": 8}))
    config.agent_pos_config = {"arm": 8}
    size = {"patch_size": 14, "size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}}
    processor = transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**size),
        video_processor=transformers.Qwen2VLVideoProcessor(**size),
        tokenizer=tiny_tokenizer(),
        chat_template=CHAT,
    )
    with (
        patch.object(module.Qwen2_5_VLConfig, "from_pretrained", lambda *_a, **_k: copy.deepcopy(config)),
        patch.object(module.AutoProcessor, "from_pretrained", lambda *_a, **_k: processor),
        patch.object(module, "cached_file", lambda *_a, **_k: ""),
        patch.object(module, "load_file", lambda *_a, **_k: {}),
    ):
        yield


def eo1_inputs(size: int, draw: torch.Generator) -> Batch:
    state, action = SPECIAL.index("<|propri|>"), SPECIAL.index("<|action|>")
    tokens = qwen_tokens(size, draw, patch=14, last=[state] + [action] * 8)
    return tokens | {"state_token_id": state, "action_token_id": action}


@contextlib.contextmanager
def tiny_evo1(module: Any) -> Iterator[None]:
    inner = importlib.import_module("lerobot.policies.evo1.internvl3_embedder")
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.InternVLConfig(
        vision_config={**size, "image_size": [32, 32], "patch_size": [8, 8]},
        text_config={"model_type": "qwen2", **size, "num_key_value_heads": 2, "vocab_size": VOCAB, "pad_token_id": 0},
        image_token_id=SPECIAL.index("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    with (
        patch.object(inner.AutoTokenizer, "from_pretrained", lambda *_a, **_k: tiny_tokenizer()),
        patch.object(inner.AutoModel, "from_pretrained", lambda *_a, **_k: transformers.InternVLModel(config)),
    ):
        yield


def tiny_wan_vae(*_args: Any, **_more: Any) -> nn.Module:
    """Return the same VAE each time, as policies do not save it."""
    import diffusers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return diffusers.AutoencoderKLWan(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=48,
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.0] * 48,
            latents_std=[1.0] * 48,
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
        )


def tiny_umt5(*_args: Any, **_more: Any) -> nn.Module:
    """Return the same text encoder each time, as policies do not save it."""
    size = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.UMT5EncoderModel(transformers.UMT5Config(**size, vocab_size=VOCAB)).eval()


@contextlib.contextmanager
def tiny_fastwam(module: Any) -> Iterator[None]:
    inner = importlib.import_module("lerobot.policies.fastwam.wan.components")
    with (
        patch.object(inner.AutoencoderKLWan, "from_pretrained", tiny_wan_vae),
        patch.object(inner.UMT5EncoderModel, "from_pretrained", tiny_umt5),
        patch.object(inner.AutoTokenizer, "from_pretrained", lambda *_a, **_k: tiny_tokenizer()),
    ):
        yield


@contextlib.contextmanager
def on_a_cpu(module: Any) -> Iterator[None]:
    """Ignore that a policy's autocast on CUDA does nothing on a CPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CUDA is not available")
        yield


@contextlib.contextmanager
def tiny_lingbot_va(module: Any) -> Iterator[None]:
    inner = importlib.import_module("lerobot.policies.lingbot_va.utils")
    with (
        patch.object(inner.AutoencoderKLWan, "from_pretrained", tiny_wan_vae),
        patch.object(inner.UMT5EncoderModel, "from_pretrained", tiny_umt5),
        patch.object(inner.T5TokenizerFast, "from_pretrained", lambda *_a, **_k: tiny_tokenizer()),
    ):
        yield


@contextlib.contextmanager
def dense_attention(module: Any) -> Iterator[None]:
    """Run LingBot-VA in fp32, without the compiled flex attention, which has no backward on a CPU.

    It is trained with flex attention and its masks, and run with `custom_sdpa`.
    """
    inner = importlib.import_module("lerobot.policies.lingbot_va.utils")
    flex = inner.FlexAttnFunc

    def attend(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return inner.custom_sdpa(q, k, v)
        mask = flex.cross_attention_mask if self.is_cross else flex.attention_mask
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def mask_of(mask: Any, *sizes: int, device: Any, **_more: Any) -> torch.Tensor:
        return create_mask(mask, *sizes, device=device)

    with (
        float32(inner),
        patch.object(flex, "forward", attend),
        patch.object(flex, "flex_attn", attend),
        patch.object(flex, "compiled_create_block_mask", mask_of),
    ):
        yield


@contextlib.contextmanager
def tiny_molmoact2(module: Any) -> Iterator[None]:
    """Save a base checkpoint, which MolmoAct2 finds where it would download one."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    vision = {**heads, "hidden_size": 16, "intermediate_size": 24}
    config = module.HFMolmoAct2Config(
        vit_config={**vision, "num_hidden_layers": 2, "image_default_input_size": (28, 28), "image_num_pos": 4},
        adapter_config={**vision, "vit_layers": (-1, -2), "text_hidden_size": 32},
        text_config={
            **heads,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "vocab_size": VOCAB,
            "additional_vocab_size": 8,
            "max_position_embeddings": 64,
            "use_qk_norm": True,
        },
        action_expert_config={
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 2,
            "ffn_multiple_of": 16,
            "timestep_embed_dim": 16,
        },
        image_patch_id=SPECIAL.index("<IMG_CONTEXT>"),
        image_end_token_id=SPECIAL.index("</img>"),
        eos_token_id=SPECIAL.index("<eos>"),
        flow_matching_num_steps=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        module.MolmoAct2ForConditionalGeneration(config).save_pretrained(folder)
        with patch.object(module, "_resolve_checkpoint_location", lambda *_a, **_k: folder):
            yield


def molmoact2_inputs(size: int, draw: torch.Generator) -> Batch:
    """Return tokens of an image of four patches, pooled in pairs, and of a text; actions are padded to 32."""
    image = torch.tensor([SPECIAL.index("<IMG_CONTEXT>")] * 2 + [SPECIAL.index("</img>")]).expand(size, -1)
    tokens = torch.cat([image, torch.randint(len(SPECIAL), VOCAB, (size, 5), generator=draw)], dim=1)
    actions = torch.zeros(size, 8, 32)
    actions[..., :ACTION] = torch.rand(size, 8, ACTION, generator=draw) * 2 - 1
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.rand(size, 4, 3 * 14 * 14, generator=draw) * 2 - 1,
        "image_token_pooling": torch.tensor([[0, 1], [2, 3]]).repeat(size, 1),
        "image_grids": torch.tensor([[1, 2, 0, 0]] * size),
        "image_num_crops": torch.ones(size, dtype=torch.long),
        "action": actions,
        "action_dim_is_pad": (torch.arange(32) >= ACTION).expand(size, -1),
    }


@contextlib.contextmanager
def tiny_fast(module: Any) -> Iterator[None]:
    class Tokenizer:
        vocab_size, bos_token_id, eos_token_id, pad_token_id = VOCAB, 2, 1, 0

        def __call__(self, *_args: Any, **_more: Any) -> Any:
            return {"input_ids": torch.zeros(1, 1, dtype=torch.long)}

        def encode(self, *_args: Any, **_more: Any) -> list[int]:
            return [5]

        def convert_tokens_to_ids(self, *_args: Any) -> int:
            return 6

        def batch_decode(self, tokens: Any, **_more: Any) -> list[str]:
            return ["" for _ in tokens]

        def decode(self, *_args: Any, **_more: Any) -> str:
            return ""

    with tiny_gemma(module), patch.object(module.AutoProcessor, "from_pretrained", lambda *_a, **_k: Tokenizer()):
        with patch.object(module.AutoTokenizer, "from_pretrained", lambda *_a, **_k: Tokenizer()):
            yield


RESNET = {"vision_backbone": "resnet18", "pretrained_backbone_weights": None}
FLORENCE = {
    "vision_config": {
        "model_type": "florence_vision",
        "embed_dim": (16, 16, 16, 16),
        "num_heads": (2, 2, 2, 2),
        "num_groups": (2, 2, 2, 2),
        "depths": (1, 1, 1, 1),
        "window_size": 2,
        "projection_dim": 32,
        "max_temporal_embeddings": 4,
        "max_position_embeddings": 8,
    },
    "text_config": {
        "model_type": "bart",
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
    },
    "projection_dim": 32,
}
DIFFUSION = {
    **RESNET,
    "down_dims": (32, 64),
    "horizon": 8,
    "n_action_steps": 4,
    "drop_n_last_frames": 0,
    "diffusion_step_embed_dim": 16,
    "spatial_softmax_num_keypoints": 8,
    "num_train_timesteps": 10,
}
VQBET = {
    **RESNET,
    "gpt_input_dim": 32,
    "gpt_output_dim": 32,
    "gpt_n_layer": 2,
    "gpt_n_head": 2,
    "gpt_hidden_dim": 32,
    "vqvae_embedding_dim": 16,
    "vqvae_enc_hidden_dim": 16,
    "crop_shape": (56, 56),
    "n_obs_steps": 2,
    "n_action_pred_token": 2,
    "action_chunk_size": 3,
    "dropout": 0.0,
}
PI0 = {
    "chunk_size": 8,
    "n_action_steps": 8,
    "image_resolution": (32, 32),
    "max_state_dim": 8,
    "max_action_dim": 8,
    "num_inference_steps": 2,
    "dtype": "float32",
}
WAN = {"ffn_dim": 48, "freq_dim": 16, "text_dim": 16, "num_heads": 2, "attn_head_dim": 16, "num_layers": 2, "eps": 1e-6}
GROOT = {"chunk_size": 8, "n_action_steps": 8, "max_state_dim": 8, "max_action_dim": 8, "use_bf16": False}
EVO1 = {
    "chunk_size": 8,
    "n_action_steps": 8,
    "max_state_dim": 8,
    "max_action_dim": 8,
    "max_views": 1,
    "image_resolution": (32, 32),
    "vlm_num_layers": 2,
    "vlm_dtype": "float32",
    "use_flash_attn": False,
    "embed_dim": 32,
    "hidden_dim": 32,
    "state_hidden_dim": 32,
    "num_heads": 2,
    "num_layers": 2,
    "num_inference_timesteps": 2,
}
MOLMOACT2 = {"chunk_size": 8, "n_action_steps": 8, "num_flow_timesteps": 2, "dtype": "float32"}
CASES = {
    "act": Case(
        config={
            **RESNET,
            "dim_model": 32,
            "n_heads": 2,
            "dim_feedforward": 48,
            "n_encoder_layers": 2,
            "n_vae_encoder_layers": 2,
            "latent_dim": 8,
            "chunk_size": 8,
            "n_action_steps": 8,
        }
    ),
    "diffusion": Case(config=DIFFUSION, observations=2, image=64),
    "diffusion:group_norm": Case(config={**DIFFUSION, "use_group_norm": True}, observations=2, image=64),
    "vqbet": Case(config={**VQBET, "n_vqvae_training_steps": 0}, observations=2, actions=5, image=64),
    "vqbet:codebook": Case(
        config={**VQBET, "n_vqvae_training_steps": 100}, observations=2, actions=5, image=64, reduces_itself=True
    ),
    "tdmpc": Case(
        config={
            "latent_dim": 16,
            "mlp_dim": 32,
            "state_encoder_hidden_dim": 32,
            "n_gaussian_samples": 16,
            "n_pi_samples": 4,
            "n_elites": 4,
            "cem_iterations": 2,
            "horizon": 3,
        },
        observations=4,
        actions=3,
        image=64,
        camera="observation.image",
        extra=lambda size, draw: {
            "next.reward": torch.linspace(0, 1, 3 * size).view(size, 3),
            "index": torch.arange(size),
            "observation.state_is_pad": torch.zeros(size, 4, dtype=torch.bool),
            "next.reward_is_pad": torch.zeros(size, 3, dtype=torch.bool),
        },
    ),
    "multi_task_dit": Case(
        config={
            "horizon": 8,
            "n_action_steps": 4,
            "hidden_dim": 32,
            "num_layers": 2,
            "num_heads": 2,
            "timestep_embed_dim": 16,
            "image_crop_shape": None,
            "num_train_timesteps": 10,
            "tokenizer_max_length": 6,
        },
        observations=2,
        text=True,
        hub=tiny_clip,
    ),
    "pi0": Case(config=PI0, text=True, hub=tiny_gemma),
    "pi05": Case(config=PI0, text=True, hub=tiny_gemma),
    "smolvla": Case(
        config={
            "chunk_size": 8,
            "n_action_steps": 8,
            "resize_imgs_with_padding": (32, 32),
            "max_state_dim": 8,
            "max_action_dim": 8,
            "num_steps": 2,
            "load_vlm_weights": False,
            "num_vlm_layers": 2,
            "expert_width_multiplier": 0.5,
            "train_expert_only": False,
            "freeze_vision_encoder": False,
            "tokenizer_max_length": 6,
        },
        text=True,
        hub=tiny_smolvlm,
    ),
    "xvla": Case(
        config={
            "chunk_size": 8,
            "n_action_steps": 8,
            "hidden_size": 32,
            "depth": 2,
            "num_heads": 2,
            "max_action_dim": ACTION,
            "max_state_dim": STATE,
            "action_mode": "auto",
            "num_denoising_steps": 2,
            "florence_config": FLORENCE,
            "len_soft_prompts": 4,
            "num_image_views": 1,
            "max_len_seq": 64,
        },
        text=True,
        image=64,
        extra=lambda size, draw: {
            "domain_id": torch.zeros(size, dtype=torch.long),
            "observation.language.tokens": torch.randint(
                3, VOCAB - 1, (size, 6), generator=torch.Generator().manual_seed(3)
            ),
        },
    ),
    "pi0_fast": Case(
        config={
            "chunk_size": 8,
            "n_action_steps": 8,
            "image_resolution": (32, 32),
            "max_state_dim": 8,
            "max_action_dim": 8,
            "dtype": "float32",
            "max_action_tokens": 8,
        },
        text=True,
        hub=tiny_fast,
        extra=lambda size, draw: {
            "action.tokens": torch.randint(3, VOCAB - 1, (size, 5), generator=torch.Generator().manual_seed(4)),
            "action.token_mask": torch.ones(size, 5, dtype=torch.bool),
        },
    ),
    "groot": Case(
        config={**GROOT, "tune_llm": True, "tune_visual": True},
        hub=tiny_groot,
        extra=groot_inputs,
    ),
    "groot:frozen": Case(config=GROOT, hub=tiny_groot, extra=groot_inputs),
    "vla_jepa": Case(
        config={
            "chunk_size": 4,
            "n_action_steps": 4,
            "num_action_tokens_per_timestep": 2,
            "num_embodied_action_tokens_per_instruction": 3,
            "num_inference_timesteps": 2,
            "action_hidden_size": 32,
            "action_model_type": "DiT-test",
            "action_num_layers": 2,
            "action_max_seq_len": 16,
            "num_video_frames": 4,
            "predictor_depth": 2,
            "predictor_num_heads": 2,
            "world_model_num_views": 1,
            "repeated_diffusion_steps": 2,
            "torch_dtype": "float32",
        },
        observations=4,
        actions=4,
        hub=tiny_vla_jepa,
    ),
    "wall_x": Case(
        config={"chunk_size": 8, "n_action_steps": 8, "max_state_dim": 8, "max_action_dim": 8},
        hub=tiny_wall_x,
        run=float32,
    ),
    "eo1": Case(
        config={
            "pretrained_path": "built from vlm_config",
            "vlm_config": tiny_qwen25_vl(),
            "dtype": "float32",
            "max_state_dim": 8,
            "max_action_dim": 8,
            "num_denoise_steps": 2,
        },
        extra=eo1_inputs,
    ),
    "evo1": Case(config={**EVO1, "training_stage": "stage2"}, hub=tiny_evo1),
    "evo1:frozen": Case(config={**EVO1, "training_stage": "stage1"}, hub=tiny_evo1),
    "gaussian_actor": Case(
        config={
            "freeze_vision_encoder": False,
            "num_discrete_actions": 3,
            "image_encoder_hidden_dim": 8,
            "latent_dim": 16,
        },
        image=64,
        camera="observation.image",
        task=False,
        loss=lambda outputs, batch: (
            outputs["log_prob"].mean() + (outputs["action_mean"] - batch["action"][:, 0]).square().mean()
        ),
    ),
    "molmoact2": Case(
        config={**MOLMOACT2, "train_mode_vlm": "fft"},
        hub=tiny_molmoact2,
        extra=molmoact2_inputs,
    ),
    "molmoact2:checkpointing": Case(
        config={**MOLMOACT2, "train_mode_vlm": "fft", "gradient_checkpointing": True},
        hub=tiny_molmoact2,
        extra=molmoact2_inputs,
    ),
    "molmoact2:lora": Case(
        config={**MOLMOACT2, "train_mode_vlm": "lora", "lora_rank": 4},
        hub=tiny_molmoact2,
        extra=molmoact2_inputs,
    ),
    "lingbot_va": Case(
        config={
            "attn_mode": "flex",
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "action_dim": 4,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 48,
            "num_layers": 2,
            "dtype": "float32",
            "obs_cam_keys": ["observation.images.top"],
            "height": 32,
            "width": 32,
            "frame_chunk_size": 2,
            "num_inference_steps": 2,
            "action_num_inference_steps": 2,
            "used_action_channel_ids": [0, 1, 2],
        },
        observations=8,
        acts_on=1,
        hub=tiny_lingbot_va,
        run=dense_attention,
    ),
    "fastwam": Case(
        config={
            "action_dim": ACTION,
            "proprio_dim": STATE,
            "action_horizon": 8,
            "n_action_steps": 8,
            "num_video_frames": 17,
            "image_size": (32, 32),
            "tokenizer_max_len": 6,
            "torch_dtype": "float32",
            "num_inference_steps": 2,
            "video_dit_config": {
                **WAN,
                "patch_size": [1, 2, 2],
                "in_dim": 48,
                "out_dim": 48,
                "hidden_dim": 32,
                "seperated_timestep": True,
                "video_attention_mask_mode": "first_frame_causal",
            },
            "action_dit_config": {**WAN, "action_dim": ACTION, "hidden_dim": 24},
        },
        observations=5,
        hub=tiny_fastwam,
        run=on_a_cpu,
    ),
}
