"""Give transformers 5 what LightRFT expects of transformers 4; one row each in `RENAMES`."""

from __future__ import annotations

import sys

RENAMES = {
    "AutoModelForVision2Seq": "imported; transformers 5 calls it AutoModelForImageTextToText",
    "load_in_4bit": "an argument of from_pretrained, False; transformers 5 does not take it",
    "_no_split_modules": "a list, to which LightRFT's own strategy appends; in transformers 5 it is a set",
}
"""Names of transformers 4, and what they are in transformers 5."""


def install():
    """Add the old names to transformers."""
    from transformers import AutoProcessor, PreTrainedModel  # without these, transformers replaces its module once more

    assert AutoProcessor
    transformers = sys.modules["transformers"]

    class AutoModelForVision2Seq:
        @staticmethod
        def from_pretrained(*args, load_in_4bit=False, **kwargs):
            assert not load_in_4bit
            return transformers.AutoModelForImageTextToText.from_pretrained(*args, **kwargs)

    transformers.AutoModelForVision2Seq = AutoModelForVision2Seq
    post_init = PreTrainedModel.post_init

    def with_list(self):
        post_init(self)
        self._no_split_modules = list(self._no_split_modules or ())

    PreTrainedModel.post_init = with_list
