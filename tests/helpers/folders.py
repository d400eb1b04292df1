"""What folders hold, for comparisons."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def contents(folder):
    """Return the bytes of each file of a folder, by its path in it."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def tensors_in(folder):
    """Return the tensors of the safetensors files of a folder."""
    state = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        state |= load_file(path)
    return state


def assert_same_tensors(actual, expected):
    """Compare the tensors of two folders, to the bit."""
    actual, expected = tensors_in(actual), tensors_in(expected)
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor) and actual[name].dtype == tensor.dtype, name


def small_tokenizer():
    """Make a tokenizer of two words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary))
