"""Which tests need newer versions of other packages than the lowest that the package supports."""

from __future__ import annotations

import inspect

import peft
import pytest
from packaging.version import Version
from transformers import core_model_loading
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from fsdp2_strategy.hf.library_internals import parallel_styles
from fsdp2_strategy.integrations.lerobot import video

NEW_CONVERSIONS = hasattr(core_model_loading, "PrefixChange")
"""Whether transformers has the weight conversions of version 5.16."""

needs_new_conversions = pytest.mark.skipif(not NEW_CONVERSIONS, reason="needs weight conversions of transformers 5.16")
needs_accepted_peft = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason=f"transformers asks for peft {MIN_PEFT_VERSION}"
)
needs_index = pytest.mark.skipif(video._PYAV < 17, reason="needs the index of key frames of PyAV 17")

ROUTERS_CHOOSE = "topk" in inspect.getsource(DeepseekV3TopkRouter.forward)
"""Whether the routers of DeepSeek choose experts; in earlier versions, the block around them does."""

needs_routers_that_choose = pytest.mark.skipif(not ROUTERS_CHOOSE, reason="needs routers that return their choice")

needs_split_layers = pytest.mark.skipif(not parallel_styles(), reason="needs tensor parallelism of transformers 5.23")
