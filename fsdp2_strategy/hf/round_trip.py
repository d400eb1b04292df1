"""Whether a load gives back what a save writes, decided before a byte is written.

Input: the regions that files are to hold, and the model's tensors. Output: yes or no. Touches no file.

transformers' conversions on save and on load are not always the inverse of each other. This runs the load's
conversions on the headers that the save would write, and traces every piece of every tensor from the model to the file
and on to the tensor that is written there. Both ways are affine maps of indices, so a few elements of a piece decide
for all of them. A value that is computed on save must be computed on load, too; that the two operations are inverse is
transformers' promise and is not traced.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.conversions import recipe_for
from fsdp2_strategy.hf.regions import Computed, Piece, Region, row_major, sources_of
from fsdp2_strategy.hf.safetensors_format import Entry
from fsdp2_strategy.hf.weights_folder import Origin, origin_for
from fsdp2_strategy.model.names import clean

_MOST_PARTS = 10_000
"""Parts that one piece is cut into before it counts as not traceable, which no stock conversion needs."""


def round_trips(
    copied: Any, regions: Mapping[str, Region], tensors: Mapping[str, torch.Tensor], *, converted: bool = True
) -> bool:
    """Return whether a load of files with these regions gives every tensor its own values.

    Args:
        copied: meta skeleton of the model.
        regions: what the files would hold, by name there; the sources are names of tensors.
        tensors: the model's tensors by name, each once.
        converted: whether the load passes names through transformers' conversions.
    """
    entries = {name: Entry(name, Path(), 0, region.dtype, tuple(region.shape)) for name, region in regions.items()}
    try:
        recipe = recipe_for(origin_for(copied) if converted else Origin(model=copied, files=()), entries)
    except CheckpointError:  # a conversion refuses what it is given
        return False
    if recipe.unexpected:
        return False
    own_tensors = {clean(name): tensor for name, tensor in copied.state_dict(keep_vars=True).items()}
    tied: dict[int, list[str]] = {}
    for name, tensor in own_tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    for name, tensor in tensors.items():
        aliases = tied.get(id(own_tensors.get(name)), [name])
        loaded = next((recipe.regions[alias] for alias in aliases if alias in recipe.regions), None)
        if loaded is None or loaded.shape != tensor.shape:
            return False
        if not all(_is_own(name, row_major(tensor.shape), piece, regions) for piece in loaded.pieces):
            return False
    return True


def _is_own(name: str, strides: Sequence[int], piece: Piece, written: Mapping[str, Region]) -> bool:
    """Return whether a piece of a tensor, as a load takes it from a file, holds the tensor's own values.

    Args:
        name: of the tensor.
        strides: of the tensor, in elements.
        piece: of the region that the load makes of entries of files.
        written: what each entry is written from.
    """
    if isinstance(piece.source, Computed):
        entries = itertools.chain.from_iterable(map(sources_of, piece.source.regions()))
        held = [written[entry.name] for entry in entries]
        computed = all(isinstance(p.source, Computed) for region in held for p in region.pieces)
        return computed and any(name in sources_of(region) for region in held)
    in_file = written[piece.source.name]
    waiting, parts = [piece], 0
    while waiting:
        part, parts = waiting.pop(), parts + 1
        if 0 in part.shape:
            continue
        own = sum(i * s for i, s in zip(part.start, strides, strict=True))
        steps = [s for s, n in zip(strides, part.shape, strict=True) if n > 1]
        found = _trace(part, in_file)
        if found is not None:
            if found != (name, own, steps):
                return False
            continue
        if parts > _MOST_PARTS:
            return False
        dim = max(range(len(part.shape)), key=lambda d, shape=part.shape: shape[d])  # type: ignore[misc]
        half = part.shape[dim] // 2
        waiting += [part.narrow(dim, 0, half), part.narrow(dim, half, part.shape[dim] - half)]
    return True


def _trace(part: Piece, in_file: Region) -> tuple[Any, int, list[int]] | None:
    """Return the source of a part's first element, which element it is there, and the step of each longer dimension.

    None where the part is to be cut further, since it does not map to one piece by one affine map.
    """
    shape = row_major(in_file.shape)
    longer = [(s, n) for s, n in zip(part.strides, part.shape, strict=True) if n > 1]
    last = part.offset + sum(s * (n - 1) for s, n in longer)
    for piece in in_file.pieces:
        whole = piece.shape == tuple(in_file.shape)
        dims = [d for d, n in enumerate(piece.shape) if n > 1]
        if whole and all(piece.strides[d] == shape[d] for d in dims):  # as it is: elements are counted alike
            return piece.source, piece.offset + part.offset, [s for s, _ in longer]
        first = _digits(part.offset, in_file.shape)
        each = [_digits(s, in_file.shape) for s, _ in longer]
        end = [a + sum((n - 1) * e[d] for e, (_, n) in zip(each, longer, strict=True)) for d, a in enumerate(first)]
        inside = all(b <= a and e < b + n for a, e, b, n in zip(first, end, piece.start, piece.shape, strict=True))
        if inside and end == _digits(last, in_file.shape):
            begin = piece.offset + sum((a - b) * s for a, b, s in zip(first, piece.start, piece.strides, strict=True))
            return piece.source, begin, [sum(i * s for i, s in zip(e, piece.strides, strict=True)) for e in each]
    if not longer:
        raise IndexError(f"no piece holds element {part.offset} of a region of shape {list(in_file.shape)}")
    return None


def _digits(element: int, shape: Sequence[int]) -> list[int]:
    """Return the index of an element, counted in row-major order."""
    return [element // s % n for s, n in zip(row_major(shape), shape, strict=True)]
