"""Robot policies as they come, tiny but of true shape: how each is built, and a batch, a loss and actions for it.

Input: nothing but a seed. Output: policies of LeRobot's interface (`Policy`) and of transformers', for tests that shard
them. Forwards draw their noise themselves, as the real ones do; `loss_of` and `actions_of` seed it from the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

from helpers.models import VOCAB
from helpers.policies.act import ACTPolicy
from helpers.policies.base import ACTION, CHUNK, STATE, Batch, Config, Policy, robot_batch
from helpers.policies.diffusion import DiffusionPolicy
from helpers.policies.dit import GrootPolicy, MultiTaskDiTPolicy, XVLAPolicy
from helpers.policies.pi0 import KEPT_IN_FP32, PI0Policy
from helpers.policies.smolvla import SmolVLAPolicy
from helpers.policies.vlm import BackbonePolicy, backbone_batch

__all__ = ["CASES", "Batch", "Case", "Config", "Policy", "actions_of", "backbone_batch", "batch_of", "build", "loss_of"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A policy: how it is built, how a batch for it is made, what its loss is, and which actions it takes."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch] = robot_batch
    loss: Callable[[nn.Module, Batch], torch.Tensor] = lambda policy, batch: policy(batch)[0]
    act: Callable[[nn.Module, Batch], torch.Tensor] = lambda policy, batch: policy.predict_action_chunk(batch)
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a strategy that it needs."""


def _pi0_of_transformers() -> nn.Module:
    text = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4, "vision_use_head": False, "projection_dim": 24}
    config = transformers.PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": {**text, "model_type": "gemma"},
            "vision_config": {**vision, "model_type": "siglip_vision_model"},
            "projection_dim": 24,
            "image_token_id": VOCAB - 1,
        },
        dit_config={**text, "model_type": "gemma", "hidden_size": 16, "intermediate_size": 32},
        chunk_size=CHUNK,
        max_state_dim=STATE,
        max_action_dim=ACTION,
        num_inference_steps=3,
    )
    return transformers.PI0ForConditionalGeneration(config)


def _pi0_batch(generator: torch.Generator) -> Batch:
    made = robot_batch(generator)
    ids = torch.cat([torch.full((2, 8), VOCAB - 1), made["observation.language.tokens"]], dim=1)
    mask = torch.cat([torch.ones(2, 8), made["observation.language.attention_mask"]], dim=1).long()
    images = torch.stack([made["observation.images.front"], made["observation.images.wrist"]], dim=1)
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": images, "state": made["observation.state"]}
    inputs |= {"pixel_attention_mask": torch.ones(2, 2, dtype=torch.bool)}
    return inputs | {"actions": made["action"], "seed": made["seed"]}


def _pi0_actions(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model.sample_actions(**{name: value for name, value in batch.items() if name != "actions"})


CASES: dict[str, Case] = {
    "pi0_of_transformers": Case(
        build=_pi0_of_transformers,
        batch=_pi0_batch,
        loss=lambda model, batch: model(**batch).loss,
        act=_pi0_actions,
        config={"forward_methods": ["sample_actions"]},
    ),
    "pi0": Case(build=PI0Policy),
    "pi0_recomputed": Case(build=lambda: PI0Policy(gradient_checkpointing=True)),
    "pi0_mixed": Case(
        build=lambda: PI0Policy(mixed_dtypes=True),
        config={"bf16": True, "keep_fp32": [*KEPT_IN_FP32, "action_", "state_proj"]},
    ),
    "smolvla": Case(build=SmolVLAPolicy),
    "smolvla_whole": Case(build=lambda: SmolVLAPolicy(train_expert_only=False)),
    "act": Case(build=ACTPolicy, config={"block_class_names": ACTPolicy._fsdp_wrap_modules}),
    "diffusion": Case(build=DiffusionPolicy),
    "groot": Case(build=GrootPolicy, config={"block_class_names": GrootPolicy._fsdp_wrap_modules}),
    "xvla": Case(build=XVLAPolicy, config={"block_class_names": ["TransformerBlock", "BartEncoderLayer"]}),
    "multi_task_dit": Case(build=MultiTaskDiTPolicy, config={"block_class_names": ["TransformerBlock"]}),
    "backbone": Case(build=BackbonePolicy, batch=backbone_batch),
    "backbone_mixed": Case(
        build=BackbonePolicy, batch=backbone_batch, config={"bf16": True, "keep_fp32": ["vision_tower"]}
    ),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """Build a policy with weights that follow from the seed alone."""
    torch.manual_seed(seed)
    model = CASES[name].build()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.08)
    return model.train()


def batch_of(name: str, step: int, rank: int) -> Batch:
    """Make the batch of one rank at one step."""
    return CASES[name].batch(torch.Generator().manual_seed(1000 * step + rank))


def loss_of(name: str, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of a batch, under the noise that belongs to the batch."""
    return _under_its_noise(CASES[name].loss, model, batch)


def actions_of(name: str, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a chunk of actions, under the noise that belongs to the batch."""
    return _under_its_noise(CASES[name].act, model, batch)


def _under_its_noise(run: Callable[[nn.Module, Batch], torch.Tensor], model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(int(batch["seed"]))
        return run(model, {name: value for name, value in batch.items() if name != "seed"})
