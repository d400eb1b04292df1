"""Which tests need newer versions of other packages than the lowest that the package supports."""

from __future__ import annotations

import peft
import pytest
from packaging.version import Version
from transformers import core_model_loading
from transformers.integrations.peft import MIN_PEFT_VERSION

from fsdp2_strategy.lerobot import video

NEW_CONVERSIONS = hasattr(core_model_loading, "PrefixChange")
"""Whether transformers has the weight conversions of version 5.16."""

needs_new_conversions = pytest.mark.skipif(not NEW_CONVERSIONS, reason="needs weight conversions of transformers 5.16")
needs_accepted_peft = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason=f"transformers asks for peft {MIN_PEFT_VERSION}"
)
needs_index = pytest.mark.skipif(video._PYAV < 17, reason="needs the index of key frames of PyAV 17")
