"""Keep the documents of packed rows apart, whatever else a batch contains.

Input: the arguments of a model of transformers. Output: the same arguments, with which the model finds the documents.

[Note: packed rows] A row is packed if a position does not follow that of the token before it. transformers keeps such
documents apart only if the model gets neither an ``attention_mask`` nor a key-value cache, which is on by default. In
all other cases, tokens attend to earlier documents, and their log-probabilities differ by a few tenths. So if a row of
a batch is packed, the cache is turned off, and the mask is left out: padding becomes documents of its own, by positions
that no other token follows. This holds for a forward of a prepared model, for `token_log_probs`, and for split
sequences. Batches without ``position_ids``, and passes with a cache of the caller, are left as they are.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.hf.library_internals import lists_blocks
from fsdp2_strategy.model.fsdp_state import class_name, original_class
from fsdp2_strategy.model.state import Slot, model_state

ARGUMENT = "sequence_shard"
"""The argument of a model's forward that says which part of split sequences a rank computes."""
running_shard: ContextVar[Any] = ContextVar("sequence_shard", default=None)
"""The part of split sequences that the running forward computes, with masks of its own; None for full sequences."""
_CACHES = ("cache", "past_key_values")
"""The argument for a key-value cache, and its name in earlier versions of transformers."""
_IS_DONE = Slot[bool]("keeps packed documents apart")


def keep_documents_apart(model: nn.Module) -> None:
    """Register hooks so that the models of transformers in a model keep packed documents apart; not collective."""
    if model_state(model).get(_IS_DONE):
        return
    model_state(model).set(_IS_DONE, True)
    for module in model.modules():
        if lists_blocks(module):
            names = list(inspect.signature(original_class(module).forward).parameters)[1:]
            if "position_ids" in names:
                module.register_forward_pre_hook(partial(_change, names), prepend=True, with_kwargs=True)


def _change(
    names: list[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if running_shard.get() is not None:
        return None  # its masks are ours
    named = dict(zip(names, args, strict=False)) | kwargs
    changed = with_documents_apart(named, has_cache="use_cache" in names)
    if changed is None:
        return None
    if named.get("use_cache"):
        log("%s: warning: use_cache is off, because rows are packed", class_name(module), level=logging.WARNING)
    return (), changed


def with_documents_apart(inputs: Mapping[str, Any], *, has_cache: bool = True) -> dict[str, Any] | None:
    """Return the arguments with which a model keeps packed documents apart; None if ``inputs`` need no change."""
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    is_apart = mask is None and (not has_cache or inputs.get("use_cache") is False)
    has_other_mask = mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2)
    is_other = ARGUMENT in inputs or any(inputs.get(name) is not None for name in _CACHES)
    if not isinstance(positions, torch.Tensor) or is_apart or has_other_mask or is_other:
        return None
    changed = positions_of_documents(positions, mask)
    if changed is None:
        return None
    return {**inputs, "position_ids": changed, "attention_mask": None} | ({"use_cache": False} if has_cache else {})


def positions_of_documents(positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return positions by which padding is documents of its own; None if no row is packed.

    Args:
        positions: [batch or 1, length]; or [4, batch, length], of which the first row counts, as in transformers. If it
            equals the second one, the times, which the places of an image share, documents begin where it decreases.
        mask: [batch, length], 0 for padding.
    """
    if positions.ndim == 3 and positions.shape[0] == 4:
        text = positions[0]
        if torch.equal(text, positions[1]):  # times
            places = torch.arange(text.shape[-1], device=text.device).expand_as(text)
            begins = torch.nn.functional.pad(text.diff(dim=-1) < 0, (1, 0))
            text = places - torch.where(begins, places, 0).cummax(dim=-1).values
        documents = positions_of_documents(text, mask)
        return None if documents is None else torch.cat([documents.expand_as(positions[1])[None], positions[1:]])
    is_other = mask is not None and (mask.ndim != 2 or mask.shape[1] != positions.shape[-1])
    if positions.ndim != 2 or positions.shape[1] < 2 or is_other:
        return None
    if mask is None:
        return positions if bool((positions.diff(dim=1) != 1).any()) else None
    positions = positions.expand(mask.shape[0], -1)
    is_token = mask.bool()
    places = torch.arange(mask.shape[1], device=mask.device).expand_as(positions)
    last = torch.where(is_token, places, -1).cummax(dim=1).values[:, :-1]  # the last token up to each place
    follows = positions[:, 1:] == positions.gather(1, last.clamp(min=0)) + 1
    if not bool((is_token[:, 1:] & (last >= 0) & ~follows).any()):
        return None
    upcoming = torch.where(is_token, places, mask.shape[1] - 1).flip(1).cummin(dim=1).values.flip(1)
    of_padding = (positions.gather(1, upcoming) == 1).to(positions.dtype)  # 0, but no token of position 1 follows it
    return torch.where(is_token, positions, of_padding)
