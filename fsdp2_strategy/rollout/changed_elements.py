"""Remember the weights that were sent last, and find what has changed since: bit by bit, on this rank's shard.

Input: this rank's shards. Output: the changed elements of each.

[Note: retained weights] A copy takes as many bytes as the shards in the dtype in which they are sent; at bf16, two for
each parameter, divided by the number of shards. Where that is too much, a hash of 64 bits for each block of
`BLOCK_BYTES` takes a sixteenth of it. A block whose hash differs is then sent in full, also if one element changed. Two
different blocks have equal hashes with a probability of 2^-64. Both are compared in words of eight bytes, and in parts
of ``sizes.COMPARED_BYTES``, which limits the additional memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fsdp2_strategy import sizes
from fsdp2_strategy.model.placeholders import values_of
from fsdp2_strategy.rollout.bucket import Part
from fsdp2_strategy.rollout.difference import to_gaps

Retain = Literal["copy", "hashes"]
BLOCK_BYTES = 128
"""Bytes of a block that has one hash."""
_WORD_BYTES = 8


@dataclass(frozen=True, eq=False)
class ShardChanges:
    """The elements of a shard that changed, in blocks of ``width`` elements."""

    gaps: torch.Tensor
    """Distances [m] between the changed blocks; see [Note: gaps] in `difference`."""
    values: torch.Tensor
    """The elements of these blocks, 1-d; the last block of a shard may be shorter."""
    width: int


class Retained:
    """The last version of this rank's shards, by name; see [Note: retained weights]."""

    def __init__(self, how: Retain) -> None:
        self.how = how
        self._retained: dict[str, torch.Tensor] = {}
        """Words of the copy, or hashes of the blocks."""

    @property
    def nbytes(self) -> int:
        """Number of bytes that this rank keeps."""
        return sum(words.nbytes for words in self._retained.values())

    def store(self, name: str, part: Part) -> None:
        """Remember a shard as it is now."""
        local = values_of(part.tensor).reshape(-1)
        kept = [self._kept(words) for _, words in self._words_of(local, part.dtype, local.device)]
        empty = torch.empty(0, dtype=torch.int64, device=local.device)
        self._retained[name] = torch.cat([empty, *kept])

    def changes(self, name: str, part: Part) -> ShardChanges | None:
        """Return what changed in a shard, None if that takes as many bytes as the shard; remember the new shard."""
        retained, local = self._retained[name], values_of(part.tensor).reshape(-1)
        width = self._width(part.dtype)
        blocks = [torch.empty(0, dtype=torch.int64, device=retained.device)]
        values = [torch.empty(0, dtype=part.dtype, device=retained.device)]
        used, begin, is_full = 0, 0, False
        for first_element, words in self._words_of(local, part.dtype, retained.device):
            kept = self._kept(words)
            old = retained[begin : begin + len(kept)]
            begin += len(kept)
            changed = _indices_of_true(old != kept)
            if not len(changed):
                continue
            if not is_full:
                found = changed if self.how == "hashes" else _elements_in(changed, old, words, part.dtype)
                elements = words.view(part.dtype).view(-1, width) if width > 1 else words.view(part.dtype)
                values.append(elements.index_select(0, found).flatten())
                blocks.append(found + first_element // width)
                used += len(found) * (2 + width * part.dtype.itemsize)
                is_full = used >= local.numel() * part.dtype.itemsize
            old.index_copy_(0, changed, kept.index_select(0, changed))
        if is_full:
            return None
        positions, together = torch.cat(blocks), torch.cat(values)
        padding = (int(positions[-1]) + 1) * width - local.numel() if len(positions) else 0
        if padding > 0:  # the last block is shorter
            together = together[:-padding]
        return ShardChanges(to_gaps(positions), together, width)

    def _width(self, dtype: torch.dtype) -> int:
        """Return the number of elements of a block: 1 if a copy is kept."""
        return 1 if self.how == "copy" else BLOCK_BYTES // dtype.itemsize

    def _kept(self, words: torch.Tensor) -> torch.Tensor:
        return words if self.how == "copy" else _hashes(words)

    def _words_of(
        self, local: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield parts of a shard as int64 words of the dtype in which it is sent, padded with 0, and their begin."""
        multiple = max(1, (_WORD_BYTES if self.how == "copy" else BLOCK_BYTES) // dtype.itemsize)
        step = max(1, sizes.COMPARED_BYTES // dtype.itemsize // multiple) * multiple
        for begin in range(0, local.numel(), step):
            elements = local[begin : begin + step].to(device, dtype)
            if lacking := -len(elements) % multiple:
                elements = torch.cat([elements, elements.new_zeros(lacking)])
            if elements.storage_offset() * dtype.itemsize % _WORD_BYTES:
                elements = elements.clone()
            yield begin, elements.view(torch.int64)


def _indices_of_true(mask: torch.Tensor) -> torch.Tensor:
    """Return the indices of the true elements; on a CPU by numpy, which takes a fraction of torch's time."""
    if mask.device.type != "cpu":
        return mask.nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def _elements_in(changed: torch.Tensor, old: torch.Tensor, words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the indices of the changed elements in the words with the indices ``changed``."""
    if dtype.itemsize >= _WORD_BYTES:
        elements: torch.Tensor = torch.unique_consecutive(changed // (dtype.itemsize // _WORD_BYTES))
        return elements
    in_word, bits = _WORD_BYTES // dtype.itemsize, _INTEGERS[dtype.itemsize]
    differs = old.index_select(0, changed).view(bits) != words.index_select(0, changed).view(bits)
    found = _indices_of_true(differs)
    shift = in_word.bit_length() - 1  # a division takes several times as long
    return (changed.index_select(0, found >> shift) << shift) + (found & (in_word - 1))


def _hashes(words: torch.Tensor) -> torch.Tensor:
    """Return a hash for each block of words: the sum of the words, each mixed with its index in the block.

    The mixing function is that of SplitMix64 (https://doi.org/10.1145/2660193.2660195). It maps different words to
    different numbers.
    """
    mixed = words.view(-1, BLOCK_BYTES // _WORD_BYTES)
    mixed = mixed + torch.arange(1, mixed.shape[1] + 1, device=words.device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed ^= (mixed >> shift) & (2 ** (64 - shift) - 1)
        mixed *= factor
    mixed ^= (mixed >> 31) & (2**33 - 1)
    return mixed.sum(1)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""The dtypes in which elements are compared bit by bit, by the size of an element in bytes."""
