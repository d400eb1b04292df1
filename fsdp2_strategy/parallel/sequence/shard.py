"""Split a batch between the ranks that share its sequences.

Input: a full batch, the same on all of these ranks. Output: arguments of the model: this rank's part of tokens, labels
and positions, and a `SequenceShard`, which says what the parts belong to.

[Note: shards] A rank computes the tokens of its part only, but attention needs facts of the full sequences: their
length, their padding, and where packed documents begin. These facts are in a `SequenceShard`, which is an argument of
the model's forward. Models of transformers pass unknown arguments on to their blocks. Hooks of the model and of its
blocks make it the current shard while they run, also when a block is recomputed in backward (`split`). Without this
argument, the model computes full sequences, as in ``generate``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.distributed.same_batch import compare_later, differing_names, facts_of
from fsdp2_strategy.distributed.torch_internals import is_in_backward, moved_to
from fsdp2_strategy.errors import SequenceError
from fsdp2_strategy.hf.packed_rows import ARGUMENT, positions_of_documents, running_shard
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.parallel.sequence.ranks import ProcessRanks, SequenceRanks

_IGNORED_LABEL = -100


class _Usage:
    """Whether a prepared model has computed a part; if none has, a warning is logged when the part is freed."""

    def __init__(self) -> None:
        self._computed: list[bool] = []
        # Not `__del__`: at the end of a program, it would run when the modules that it needs are gone.
        weakref.finalize(self, _warn_if_unused, self._computed)

    def __deepcopy__(self, _memo: object) -> _Usage:
        return self

    def note_computed(self) -> None:
        """Note that a prepared model has computed the part."""
        if not self._computed:
            self._computed.append(True)


def _warn_if_unused(computed: list[bool]) -> None:
    if not computed:
        log(
            "warning: a part of sequences was used by no prepared model. A model that prepare_model has not prepared "
            "computes it without the other parts, and so other values",
            level=logging.WARNING,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceShard:
    """What a rank must know of the sequences that it computes a part of; see [Note: shards]."""

    ranks: SequenceRanks
    length: int
    """Tokens of a full sequence, a multiple of the number of ranks."""
    attention_mask: torch.Tensor | None = None
    """[batch, length], 0 for padding; None if the batch had none."""
    padding_mask: torch.Tensor | None = None
    """[batch, length], 0 for padding, also for what was appended to make the parts equal; None if there is none. Causal
    attention needs no mask for padding at the end."""
    position_ids: torch.Tensor | None = None
    """[batch or 1, length], or with further rows per axis [rows, batch, length]."""
    documents: torch.Tensor | None = None
    """[batch, length]: for each token the number of its packed document; None if nothing is packed."""
    has_own_positions: bool = True
    """Whether the batch contained positions; otherwise, ``position_ids`` count from 0."""
    is_split_inside: bool = False
    """Whether the model's arguments are full sequences, which are split after images are embedded."""
    usage: _Usage = field(default_factory=_Usage)
    """One object for all copies that FSDP2 makes of arguments."""

    @property
    def local_length(self) -> int:
        """Tokens of a part."""
        return self.length // self.ranks.count

    @property
    def begin(self) -> int:
        """The first token of this rank's part."""
        return self.ranks.rank * self.local_length

    def local(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's part of a tensor with full sequences along ``dim``."""
        return tensor.narrow(dim, self.begin, self.local_length)


def current_shard() -> SequenceShard | None:
    """Return the shard that the running forward computes; None if it computes full sequences."""
    shard: SequenceShard | None = running_shard.get()
    return shard


_LENGTH = Slot[int]("length of the last split forward")


def check_recomputed(module: nn.Module, shard: SequenceShard | None) -> None:
    """Raise if a module computed a part of sequences, and computes full ones when backward runs it again."""
    if not is_in_backward():
        model_state(module).set(_LENGTH, 0 if shard is None else shard.length)
    elif model_state(module).get(_LENGTH) and shard is None:
        raise SequenceError(
            f"cannot recompute activations: {type(module).__name__} computed a part of sequences in forward, expected "
            "the same part in backward. Recompute with activation_checkpointing of the configuration, or with "
            "gradient_checkpointing_enable()."
        )


def shard_sequence(batch: Mapping[str, Any], group: dist.ProcessGroup | SequenceRanks) -> dict[str, Any]:
    """Return this rank's part of a batch, as arguments of a model that `split_sequences` has prepared; not collective.

    Each rank gets an equal part; sequences are padded to a multiple of the number of ranks. Positions are always passed
    on; by default they count from 0, and the model replaces them if its own positions leave out padding. A position
    that does not follow that of the token before it is the first of a packed document, with or without an
    ``attention_mask``. If the batch has images or other inputs that are not sequences, the model gets full sequences,
    and splits them when these inputs are embedded.

    ``labels`` are shifted before they are split. The model's loss is then the sum over this rank's part, divided by
    ``num_items_in_batch``: the mean over all ranks is the loss of the full batch. If the batch contains
    ``num_items_in_batch``, the loss is divided by this number instead of the number of labels.

    Tensors in other memory are moved to this rank's device, as FSDP2 does in a forward pass.

    Args:
        batch: the model's arguments for full sequences: ``input_ids`` or ``inputs_embeds``, [batch, length] and
            [batch, length, width]. All other tensors whose first dimensions are [batch, length] are split, too.
        group: the ranks that share the sequences, in their order.

    Raises:
        SequenceError: the batch has no sequences, or contains ``logits_to_keep`` or a cache.
    """
    batch = {name: value for name, value in batch.items() if value is not None}
    if not isinstance(group, SequenceRanks):
        batch = moved_to(current_device(), batch)
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if tokens is None or batch.keys() & {"logits_to_keep", "past_key_values"}:
        raise SequenceError(
            f"cannot split sequences: the batch has {', '.join(batch) or 'no tensors'}, expected input_ids or "
            "inputs_embeds, and neither logits_to_keep nor past_key_values. Pass full sequences."
        )
    mask = batch.get("attention_mask")
    given = batch.get("position_ids")
    positions = None if mask is None or given is None else positions_of_documents(given, mask)
    if positions is not None:  # [Note: packed rows] in `packed_rows`
        mask = None
        batch = {name: value for name, value in batch.items() if name != "attention_mask"} | {"position_ids": positions}
    if mask is not None and mask.shape != tokens.shape[:2]:
        raise SequenceError(
            f"cannot split sequences: attention_mask has the shape {list(mask.shape)}, expected "
            f"{list(tokens.shape[:2])}, [batch, length]. Pass 0 for padding and 1 for tokens; for packed documents, "
            "pass position_ids that restart, and no mask."
        )
    ranks = group if isinstance(group, SequenceRanks) else ProcessRanks(group)
    shape = tuple(tokens.shape[:2])
    missing = -shape[1] % ranks.count
    sequences = {
        name: value for name, value in batch.items() if is_sequence(value, shape[1]) and len(value) == shape[0]
    }
    is_split_inside = any(
        isinstance(value, torch.Tensor) and value.ndim > 1 and name not in sequences and name != "position_ids"
        for name, value in batch.items()
    )
    full_mask = _padded(tokens.new_ones(shape, dtype=torch.int64) if mask is None else mask, missing)
    shard = SequenceShard(
        ranks=ranks,
        length=shape[1] + missing,
        attention_mask=None if mask is None else full_mask,
        padding_mask=None if mask is None and not missing else full_mask,
        has_own_positions="position_ids" in batch,
        is_split_inside=is_split_inside,
        **_positions(batch.get("position_ids"), tokens, mask, missing, is_computed_by_model=is_split_inside),
    )
    found = dict(batch)
    for name in sequences.keys() - {"attention_mask"}:
        full = _padded(batch[name], missing, _IGNORED_LABEL if name.endswith("labels") else 0)
        # Some models flatten labels by a view.
        found[name] = full if is_split_inside and not name.endswith("labels") else shard.local(full).contiguous()
    found["attention_mask"] = full_mask
    if shard.position_ids is not None:
        positions = shard.position_ids
        found["position_ids"] = positions if is_split_inside else shard.local(positions, dim=positions.ndim - 1)
    if "labels" in batch:
        targets = batch.get("shift_labels", pad(batch["labels"], (0, 1), value=_IGNORED_LABEL)[:, 1:])
        found["shift_labels"] = shard.local(_padded(targets, missing, _IGNORED_LABEL)).contiguous()
        items = batch.get("num_items_in_batch", (targets != _IGNORED_LABEL).sum())
        found["num_items_in_batch"] = torch.as_tensor(items, device=tokens.device) / ranks.count
    return found | {ARGUMENT: shard}


def check_same_batch(batch: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Raise if a batch differs between the ranks of a group; collective over the group.

    If the batch is not a mapping, or cannot be read, the rank that has it raises, and the others return: call this
    function in `all_or_none`. Values of an accelerator are compared by the next step; but positions at once, because
    they decide in which documents attention is computed.
    """
    facts: dict[str, Any] | None = None
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    try:
        facts, later = facts_of(batch, at_once=("position_ids",))
    finally:  # also after an error: the other ranks wait for this one
        dist.all_gather_object(of_ranks, facts, group=group)
    if None in of_ranks:
        return  # the rank that failed raises
    ranks = dist.get_process_group_ranks(group)
    for rank, other in zip(ranks, of_ranks, strict=True):
        if names := differing_names(of_ranks[0], other):
            raise SequenceError(
                f"cannot split sequences: {', '.join(names)} of rank {rank} differ from those of rank {ranks[0]}, "
                f"expected the same batch on the ranks {', '.join(map(str, ranks))}, which share sequences. Draw "
                "batches by strategy.dp_rank and strategy.dp_size."
            )
    compare_later(later, len(ranks), "sequences")


def is_sequence(value: object, length: int) -> bool:
    """Return whether a value is a tensor [batch, length, ...]."""
    return isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == length


def _padded(tensor: torch.Tensor, missing: int, value: int = 0) -> torch.Tensor:
    """Append ``missing`` elements to the second dimension."""
    return pad(tensor, (*(0, 0) * (tensor.ndim - 2), 0, missing), value=value) if missing else tensor


def _positions(
    given: torch.Tensor | None,
    tokens: torch.Tensor,
    mask: torch.Tensor | None,
    missing: int,
    *,
    is_computed_by_model: bool,
) -> dict[str, Any]:
    """Return the positions and the documents of full, padded sequences."""
    if given is None and is_computed_by_model:
        return {}
    size, length = tokens.shape[:2]
    positions = torch.arange(length, device=tokens.device) if given is None else given
    positions = positions.expand(size, -1) if positions.ndim == 1 else positions  # some models need a row each
    documents = None if mask is not None or given is None else documents_of(positions, size)
    if documents is not None and missing:  # padding is a document of its own
        documents = torch.cat([documents, documents[:, -1:].expand(-1, missing) + 1], dim=1)
    return {"position_ids": pad(positions, (0, missing)), "documents": documents}


def documents_of(position_ids: torch.Tensor, batch_size: int) -> torch.Tensor | None:
    """Return for each token the number of its document [batch, length]; None if each sequence is one document.

    A document begins where a position does not follow the one before it. Of positions with several rows, the first of
    four rows counts these, as in transformers.
    """
    if position_ids.ndim == 3:
        if position_ids.shape[0] != 4:
            return None
        position_ids = position_ids[0]
    begins = position_ids.diff(dim=1) != 1
    return pad(begins.cumsum(dim=1), (1, 0)).expand(batch_size, -1) if begins.any() else None
