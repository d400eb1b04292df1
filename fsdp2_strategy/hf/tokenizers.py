"""Check a tokenizer or processor before it is saved with a model.

Input: a model and a tokenizer. Output: an error if it cannot be saved; a warning if the model cannot
embed its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sized
from typing import Any

from torch import nn

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.model.fsdp_state import class_name


def check_tokenizer(model: nn.Module, tokenizer: Any) -> None:
    """Check that a tokenizer can be saved, and warn if it has more tokens than the model has embeddings."""
    if tokenizer is None:
        return
    if not callable(getattr(tokenizer, "save_pretrained", None)):
        raise CheckpointError(
            f"cannot save the tokenizer: it is a {type(tokenizer).__name__}, expected an object with save_pretrained, "
            "or None. Load it with AutoTokenizer.from_pretrained, and check the order of the arguments."
        )
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    rows = _embedding_rows(model)
    if rows is not None and isinstance(tokenizer, Sized) and len(tokenizer) > rows:
        message = "the tokenizer has %d tokens and %s has %d embeddings: call resize_token_embeddings before training"
        log(message, len(tokenizer), class_name(model), rows, level=logging.WARNING)


def _embedding_rows(model: nn.Module) -> int | None:
    """Return the number of rows of the text embedding; None for models without one."""
    get = getattr(model, "get_input_embeddings", None)
    try:
        embedding = get() if get is not None else None
    except (NotImplementedError, AttributeError):  # transformers models without text
        return None
    weight = getattr(embedding, "weight", None)
    return weight.shape[0] if weight is not None and weight.ndim == 2 else None
