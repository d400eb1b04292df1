"""Check that a load will restore the tensors that a save writes, before any file is written.

Input: the regions that the files will contain, and the model's tensors. Output: a bool. Accesses no files.

transformers' conversions on save and on load are not always inverse to each other. This module runs the load's
conversions on the headers that the save would write. For every piece of a loaded tensor, it computes from which
elements of the files the piece is read, and which elements of the model are saved there. Both steps are affine maps of
indices, so the first element and the strides of a piece determine all its elements. A value that is computed on save
must be computed on load, too. Whether these two computations are inverse to each other is not checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.conversions import recipe_for
from fsdp2_strategy.hf.weights_folder import WeightsSource, source_of_weights
from fsdp2_strategy.model.boxes import row_major
from fsdp2_strategy.model.names import clean
from fsdp2_strategy.storage.regions import Computed, Piece, Region, sources_of
from fsdp2_strategy.storage.safetensors_format import Entry

_MAX_PARTS = 10_000
"""A piece that would be split into more parts counts as not restored. No conversion of transformers needs as many."""


def round_trips(
    skeleton: Any, regions: Mapping[str, Region], tensors: Mapping[str, torch.Tensor], *, converted: bool = True
) -> bool:
    """Return whether a load of files with these regions, whose sources are model tensors, restores every tensor."""
    entries = {name: Entry(name, Path(), 0, region.dtype, tuple(region.shape)) for name, region in regions.items()}
    try:
        recipe = recipe_for(
            source_of_weights(skeleton) if converted else WeightsSource(model=skeleton, files=()), entries
        )
    except CheckpointError:  # a conversion does not fit the tensors
        return False
    if recipe.unexpected:
        return False
    own_tensors = {clean(name): tensor for name, tensor in skeleton.state_dict(keep_vars=True).items()}
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
    """Return whether a piece of a loaded tensor is read from the place where the tensor's own values are saved."""
    if isinstance(piece.source, Computed):
        entries = itertools.chain.from_iterable(map(sources_of, piece.source.regions()))
        held = [written[entry.name] for entry in entries]
        computed = all(isinstance(p.source, Computed) for region in held for p in region.pieces)
        return computed and any(name in sources_of(region) for region in held)
    in_file = written[piece.source.name]
    waiting, count = [piece], 0
    while waiting:
        part, count = waiting.pop(), count + 1
        if 0 in part.shape:
            continue
        own = sum(i * s for i, s in zip(part.start, strides, strict=True))
        steps = [s for s, n in zip(strides, part.shape, strict=True) if n > 1]
        location = _location_in_model(part, in_file)
        if location is not None:
            if location != (name, own, steps):
                return False
            continue
        if count > _MAX_PARTS:
            return False
        dim = max(range(len(part.shape)), key=lambda d, shape=part.shape: shape[d])  # type: ignore[misc]
        half = part.shape[dim] // 2
        waiting += [part.narrow(dim, 0, half), part.narrow(dim, half, part.shape[dim] - half)]
    return True


def _location_in_model(part: Piece, in_file: Region) -> tuple[Any, int, list[int]] | None:
    """Return the location in the model of the values that are saved where a load reads ``part``.

    It is the name of a tensor, the offset of the part's first element in it, and the stride of each dimension longer
    than 1. None if the part must be split further, because no affine map takes it to one piece of ``in_file``.
    """
    file_strides = row_major(in_file.shape)
    longer = [(s, n) for s, n in zip(part.strides, part.shape, strict=True) if n > 1]
    last = part.offset + sum(s * (n - 1) for s, n in longer)
    for piece in in_file.pieces:
        covers_file = piece.shape == tuple(in_file.shape)
        dims = [d for d, n in enumerate(piece.shape) if n > 1]
        if covers_file and all(piece.strides[d] == file_strides[d] for d in dims):  # offsets map directly
            return piece.source, piece.offset + part.offset, [s for s, _ in longer]
        first = _unravel_index(part.offset, in_file.shape)
        each = [_unravel_index(s, in_file.shape) for s, _ in longer]
        end = [a + sum((n - 1) * e[d] for e, (_, n) in zip(each, longer, strict=True)) for d, a in enumerate(first)]
        inside = all(b <= a and e < b + n for a, e, b, n in zip(first, end, piece.start, piece.shape, strict=True))
        if inside and end == _unravel_index(last, in_file.shape):
            begin = piece.offset + sum((a - b) * s for a, b, s in zip(first, piece.start, piece.strides, strict=True))
            return piece.source, begin, [sum(i * s for i, s in zip(e, piece.strides, strict=True)) for e in each]
    if not longer:
        raise IndexError(f"no piece contains element {part.offset} of a region of shape {list(in_file.shape)}")
    return None


def _unravel_index(element: int, shape: Sequence[int]) -> list[int]:
    """Return the index of an element in each dimension, from its row-major offset."""
    return [element // s % n for s, n in zip(row_major(shape), shape, strict=True)]
