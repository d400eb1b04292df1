"""Register how the policies of LeRobot are sharded and run, and one of transformers that comes from there.

Input: nothing. Output: entries of `register_policy`, which `sharding.features.load_policies` imports this module for.
"""

from __future__ import annotations

from fsdp2_strategy.sharding.known_policies import register_policy

__all__ = ["register_policy"]

register_policy("act", ["ACTEncoderLayer", "ACTDecoderLayer"])
register_policy("diffusion")
register_policy("evo1", ["BasicTransformerBlock"])
register_policy("groot", ["BasicTransformerBlock", "CategorySpecificMLP", "MultiEmbodimentActionEncoder"])
register_policy("molmoact2", ["ActionExpertBlock", "MolmoAct2Embedding"])
register_policy("multi_task_dit", ["TransformerBlock"])
register_policy("pi0", ["_PiGemmaDecoderLayerBase", "GemmaDecoderLayer", "SiglipEncoderLayer"], bypassed=True)
register_policy("pi05", ["_PiGemmaDecoderLayerBase", "GemmaDecoderLayer", "SiglipEncoderLayer"], bypassed=True)
register_policy("pi0_fast", ["_PiGemmaDecoderLayerBase", "GemmaDecoderLayer", "SiglipEncoderLayer"])
register_policy("smolvla", ["LlamaDecoderLayer", "SmolVLMEncoderLayer"], bypassed=True)
register_policy("vla_jepa", ["BasicTransformerBlock", "ACBlock"])
register_policy("xvla", ["TransformerBlock"])
register_policy(
    "PI0ForConditionalGeneration", ["GemmaDecoderLayer", "SiglipEncoderLayer"], entry_points=["sample_actions"]
)
