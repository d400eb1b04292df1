"""LeRobot's policies in the sizes of their checkpoints, on the meta device. Only in the environment of ``make peers``.

Input: the name of a policy. Output: a module with the parameters of the policy; it cannot run.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import nn

from helpers import lerobot_policies as real


class Shell(nn.Module):
    """The parts of a policy that load weights in its constructor, under the policy's name."""

    def __init__(self, policy: Any, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        type(self).name = policy.name
        type(self)._fsdp_wrap_modules = getattr(policy, "_fsdp_wrap_modules", None)  # before LeRobot 0.6.2: not there


def shell(policy: Any, **parts: nn.Module) -> nn.Module:
    return type("Shell", (Shell,), {})(policy, **parts)


def built(name: str, **config: Any) -> nn.Module:
    _, config_class, policy = real.classes(name)
    return policy(config_class(**real.features(real.CASES[name]), device="cpu", **config))


def groot() -> nn.Module:
    inner = importlib.import_module("lerobot.policies.groot.groot_n1_7")
    config = inner.GR00TN17Config(dtype="float32", model_dtype="float32")
    return shell(real.classes("groot")[2], model=inner.GR00TN17(config, load_backbone_weights=False))


def vla_jepa() -> nn.Module:
    module = real.module_of("vla_jepa")
    inner = importlib.import_module("lerobot.policies.vla_jepa.qwen_interface")
    of_groot = importlib.import_module("lerobot.policies.groot.groot_n1_7")  # the size of Qwen3-VL-2B, in its defaults
    qwen, config = inner.Qwen3VLForConditionalGeneration, of_groot._cosmos_reason2_qwen3_vl_config()
    video = transformers.VJEPA2Config()
    with (
        patch.object(qwen, "from_pretrained", lambda *_a, **_k: qwen(config)),
        patch.object(inner.AutoProcessor, "from_pretrained", lambda *_a, **_k: real.tiny_qwen3_vl_processor()),
        patch.object(module.AutoModel, "from_pretrained", lambda *_a, **_k: transformers.VJEPA2Model(video)),
        patch.object(module.AutoVideoProcessor, "from_pretrained", lambda *_a, **_k: None),
    ):
        return built("vla_jepa")


def evo1() -> nn.Module:
    inner = importlib.import_module("lerobot.policies.evo1.evo1_model")
    config = real.classes("evo1")[1](**real.features(real.CASES["evo1"]), device="cpu", training_stage="stage2")
    size = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": config.vlm_num_layers}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151674}
    vlm = transformers.InternVLConfig(text_config={"model_type": "qwen2", **size, **heads})
    head = inner.FlowmatchingActionHead(
        action_dim=config.chunk_size * config.max_action_dim,
        horizon=config.chunk_size,
        per_action_dim=config.max_action_dim,
        state_dim=config.max_state_dim,
        state_hidden_dim=config.state_hidden_dim,
    )
    return shell(real.classes("evo1")[2], embedder=transformers.InternVLModel(vlm), action_head=head)


def molmoact2() -> nn.Module:
    module, _, policy = real.classes("molmoact2")
    return shell(policy, model=module.MolmoAct2ForConditionalGeneration(module.HFMolmoAct2Config()))


def lingbot_va() -> nn.Module:
    return built("lingbot_va")


def fastwam() -> nn.Module:
    module, _, policy = real.classes("fastwam")
    defaults = importlib.import_module("lerobot.policies.fastwam.configuration_fastwam")
    video = module.WanVideoDiT(**defaults.default_video_dit_config(7))
    action = module.ActionDiT(**defaults.default_action_dit_config(7))
    return shell(policy, mot=module.MoT(mixtures={"video": video, "action": action}))


POLICIES = {builder.__name__: builder for builder in (groot, vla_jepa, evo1, molmoact2, lingbot_va, fastwam)}


def build(name: str) -> nn.Module:
    validate = torch.distributions.Distribution.set_default_validate_args
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", FutureWarning)  # MolmoAct2 calls a function that transformers deprecates
        validate(False)  # it reads values
        stack.callback(validate, True)
        stack.enter_context(torch.device("meta"))
        return POLICIES[name]()
