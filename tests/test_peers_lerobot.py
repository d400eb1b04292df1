"""What the table of policies says of LeRobot's classes, checked against LeRobot's own source."""

from __future__ import annotations

import ast
import importlib.util
import sys
import types

import pytest
import torch
import transformers
from helpers.models import VOCAB
from helpers.peers import lerobot_package
from torch import nn

from fsdp2_strategy import find_blocks
from fsdp2_strategy.sharding.features import load_policies
from fsdp2_strategy.sharding.known_policies import _registered

TEXT = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "pad_token_id": 0}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 8, "patch_size": 4, "vision_use_head": False, "projection_dim": 24}


def pi_gemma():
    """Import LeRobot's Gemma variants, which need nothing of LeRobot but the answer that transformers is there."""
    source = lerobot_package() / "policies" / "pi_gemma.py"
    stub = types.ModuleType("lerobot.utils.import_utils")
    stub._transformers_available = True
    packages = {name: types.ModuleType(name) for name in ("lerobot", "lerobot.utils")}
    spec = importlib.util.spec_from_file_location("pi_gemma", source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # transformers looks its classes up there
    with pytest.MonkeyPatch.context() as patched:  # keeps what transformers imports meanwhile, unlike patch.dict
        for name, replaced in {**packages, stub.__name__: stub}.items():
            patched.setitem(sys.modules, name, replaced)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["pi0", "pi05", "pi0_fast"])
def test_every_layer_of_the_real_pi_policies_is_a_block(name):
    real = pi_gemma()
    vlm = {"text_config": {**TEXT, "model_type": "gemma"}, "projection_dim": 24, "image_token_id": VOCAB - 1}
    vlm["vision_config"] = {**VISION, "model_type": "siglip_vision_model"}

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.paligemma = real.PaliGemmaForConditionalGenerationWithPiGemma(transformers.PaliGemmaConfig(**vlm))
            self.expert = real.PiGemmaForCausalLM(transformers.GemmaConfig(**TEXT, use_adarms=True, adarms_cond_dim=24))
            self.expert.model.embed_tokens = None  # as LeRobot drops it

    Policy.name = name
    with torch.device("meta"):
        policy = Policy()
    blocks = set(find_blocks(policy))
    layers = {n for n, m in policy.named_modules() if n.endswith((".layers.0", ".layers.1"))}
    assert len(layers) == 6, "two decoders and a vision encoder of two layers each"
    assert layers <= blocks
    held = {id(p) for block in blocks for p in policy.get_submodule(block).parameters()}
    in_root = [n for n, p in policy.named_parameters() if id(p) not in held]
    assert not [n for n in in_root if ".layers." in n]


def test_the_table_of_policies_names_classes_that_lerobot_or_transformers_has():
    load_policies()
    policies = lerobot_package() / "policies"
    trees = [ast.parse(path.read_text()) for path in policies.rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    defined = {cls.name for cls in classes}
    named = {
        assigned.value.value
        for cls in classes
        for assigned in cls.body
        if isinstance(assigned, ast.Assign)
        and isinstance(assigned.value, ast.Constant)
        and ast.unparse(assigned.targets[0]) == "name"
    }
    from transformers.models.gemma import modeling_gemma
    from transformers.models.llama import modeling_llama
    from transformers.models.siglip import modeling_siglip
    from transformers.models.smolvlm import modeling_smolvlm

    backbones = (modeling_gemma, modeling_llama, modeling_siglip, modeling_smolvlm)
    for name, policy in _registered.items():
        if name.isidentifier() and name.islower():
            assert name in named, f"LeRobot has no policy {name}"
            for block in policy.blocks or ():
                assert block in defined or any(hasattr(module, block) for module in backbones), (name, block)
