"""Store the experts that were chosen for each token of a batch, and align them with a batch of another layout.

Input: the choices of each layer, with the token ids and the attention mask of the batch that they were made for.
Output: the choices for the tokens of another batch with the same sequences.

[Note: choices] The choices of a layer are a tensor [batch, length, k] of expert indices; -1 in all k places stands for
no choice. Padding has none, and neither has the last token of a generated sequence, which the engine sampled but never
fed to the model. The key of a choice is the sequence and the position of its token among the tokens of the sequence
that are not padding. So the choices fit a batch that is padded differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad

from fsdp2_strategy.errors import RolloutError, counted

_IDS, _MASK = "input_ids", "attention_mask"
"""Names in the mapping of `Routing.to_tensors`; no layer has them, because the names of layers contain dots."""


@dataclass(eq=False)
class Routing:
    """The experts that the routers of a model chose for each token of a batch; see [Note: choices].

    ``routing[rows]`` are the choices of some sequences: rows is a slice, a list of indices, or a tensor of indices or
    of booleans [batch].
    """

    layers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Router name -> expert indices [batch, length, k], signed integers; -1: no choice."""
    input_ids: torch.Tensor | None = None
    """[batch, length]: the tokens that the choices were made for; None if unknown. A replay compares them."""
    attention_mask: torch.Tensor | None = None
    """[batch, length], bool, False for padding; None if no token is padding."""

    def __post_init__(self) -> None:
        shapes = {name: tuple(choices.shape) for name, choices in self.layers.items()}
        wrong = [name for name, shape in shapes.items() if len(shape) != 3 or shape[:2] != self.shape]
        if wrong:
            raise RolloutError(
                f"cannot use routing: the choices of {wrong[0]} have the shape {list(shapes[wrong[0]])}, expected "
                f"[batch, length, k], with the same batch and length in all layers. Build one Routing for each batch."
            )
        for name, choices in self.layers.items():
            if choices.dtype.is_floating_point or choices.dtype in (torch.bool, torch.uint8):
                raise RolloutError(
                    f"cannot use routing: the choices of {name} are {choices.dtype}, expected signed integers, "
                    "of which -1 stands for no choice. Cast them, for example to torch.int16."
                )
        for name, tensor in ((_IDS, self.input_ids), (_MASK, self.attention_mask)):
            if tensor is not None and self.layers and tuple(tensor.shape) != self.shape:
                raise RolloutError(
                    f"cannot use routing: {name} has the shape {list(tensor.shape)}, expected {list(self.shape)}, as "
                    "the choices. Pass those of the batch that was recorded."
                )

    @property
    def shape(self) -> tuple[int, int]:
        """Batch size and length of the recorded batch."""
        if not self.layers:
            raise RolloutError(
                "cannot use routing: it has no layers, expected the choices of each router. Record a forward pass "
                "first, and use its result after the block of record_routing has ended."
            )
        batch, length = next(iter(self.layers.values())).shape[:2]
        return batch, length

    def __len__(self) -> int:
        return self.shape[0] if self.layers else 0

    def __getitem__(self, rows: slice | Sequence[int] | torch.Tensor) -> Routing:
        if isinstance(rows, int):
            raise RolloutError(
                f"cannot select sequences: rows is the number {rows}, expected a slice, a list or a tensor. Use "
                f"[{rows} : {rows} + 1]."
            )
        index: Any = rows if isinstance(rows, slice) else torch.as_tensor(rows)
        return self._map(lambda tensor: tensor[index if isinstance(index, slice) else index.to(tensor.device)])

    def to(self, device: torch.device | str) -> Routing:
        """Return the same choices on a device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Any) -> Routing:
        """Return the routing whose tensors are the results of a function of these tensors."""
        return Routing(
            {name: function(choices) for name, choices in self.layers.items()},
            None if self.input_ids is None else function(self.input_ids),
            None if self.attention_mask is None else function(self.attention_mask),
        )

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Return a mapping of plain tensors, for a file or for another process.

        The keys are the names of the routers, and "input_ids" and "attention_mask" if these are known.
        """
        others = {_IDS: self.input_ids, _MASK: self.attention_mask}
        return self.layers | {name: tensor for name, tensor in others.items() if tensor is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Routing:
        """Return the routing of a mapping such as `to_tensors` returns.

        Raises:
            RolloutError: the shapes of the tensors do not fit, or the choices are not signed integers.
        """
        layers = {name: tensor for name, tensor in tensors.items() if name not in (_IDS, _MASK)}
        mask = tensors.get(_MASK)
        return cls(layers, tensors.get(_IDS), None if mask is None else mask.bool())

    @classmethod
    def cat(cls, parts: Sequence[Routing]) -> Routing:
        """Concatenate the sequences of several batches, padded on the right to the same length.

        Raises:
            RolloutError: the parts have different layers, or only some have token ids.
        """
        if not parts:
            raise RolloutError("cannot concatenate routings: there are none, expected at least one. Pass a list.")
        longest = max(part.shape[1] for part in parts)
        different = [part for part in parts if part.layers.keys() != parts[0].layers.keys()]
        if different or len({part.input_ids is None for part in parts}) > 1:
            raise RolloutError(
                "cannot concatenate routings: they differ in their layers, or only some have token ids, expected those "
                "of one model. Record them in the same way."
            )
        has_mask = any(part.attention_mask is not None or part.shape[1] < longest for part in parts)
        return cls(
            {
                name: torch.cat([pad(p.layers[name], (0, 0, 0, longest - p.shape[1]), value=-1) for p in parts])
                for name in parts[0].layers
            },
            None if parts[0].input_ids is None else torch.cat([_padded(p.input_ids, longest) for p in parts]),
            torch.cat([_padded(p.mask(), longest) for p in parts]) if has_mask else None,
        )

    def mask(self) -> torch.Tensor:
        """Return the attention mask [batch, length], bool, of ones if there is none."""
        if self.attention_mask is not None:
            return self.attention_mask.bool()
        return torch.ones(self.shape, dtype=torch.bool, device=next(iter(self.layers.values())).device)

    def columns_for(self, input_ids: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
        """Return where the choices of the tokens of another batch are recorded; not collective.

        Args:
            input_ids: [batch, length] of the other batch; None if it has embeddings only.
            mask: [batch, length], bool, of the other batch; its length may differ from the recorded one.

        Returns:
            [batch, length], int64, on the device of the mask: indices along the recorded length; the recorded length
            itself for tokens without a choice.

        Raises:
            RolloutError: the batches have different numbers of sequences or different tokens, or more than the last
                token of a sequence was not recorded.
        """
        rows, length = self.shape
        if len(mask) != rows:
            raise RolloutError(
                f"cannot replay routing: the batch has {counted(len(mask), 'sequence')}, expected {rows}, as recorded. "
                "Select those of this micro-batch: routing[rows]."
            )
        recorded = self.mask().to(mask.device)
        nowhere = recorded.new_full((), length, dtype=torch.int64)
        positions = torch.where(recorded, recorded.cumsum(1) - 1, nowhere)
        column_of = torch.full((rows, length + 1), length, device=mask.device)  # by position in the sequence
        column_of.scatter_(1, positions, torch.arange(length, device=mask.device).expand(rows, -1))
        column_of[:, length] = length
        wanted = torch.where(mask, mask.cumsum(1) - 1, nowhere).clamp(max=length)
        columns = column_of.gather(1, wanted)
        is_missing = mask & (columns == length)
        if (most := int(is_missing.sum(1).max())) > 1:
            raise RolloutError(
                f"cannot replay routing: {most} tokens of a sequence were not recorded, expected at most one, the last "
                f"(the batch has the length {mask.shape[1]}, the recorded one {length}). Pass the attention_mask to "
                "the model, and the sequences that were generated."
            )
        if self.input_ids is not None and input_ids is not None:
            of_record = pad(self.input_ids.to(mask.device), (0, 1)).gather(1, columns)
            is_other = mask & ~is_missing & (of_record != input_ids)
            if bool(is_other.any()):
                row, column = is_other.nonzero()[0].tolist()
                raise RolloutError(
                    f"cannot replay routing: token {column} of sequence {row} is {int(input_ids[row, column])}, "
                    f"expected {int(of_record[row, column])}, as recorded. Select the sequences of this micro-batch "
                    "in the same order (routing[rows]), and pass the attention_mask to the model if they are padded."
                )
        return columns


def choice_dtype(experts: int) -> torch.dtype:
    """Return the smallest signed integer dtype that holds the indices of ``experts`` experts, and -1."""
    sizes = {torch.int8: 1 << 7, torch.int16: 1 << 15}
    return next((dtype for dtype, most in sizes.items() if experts <= most), torch.int32)


def _padded(tensor: Any, length: int) -> torch.Tensor:
    return pad(tensor, (0, length - tensor.shape[1]))
