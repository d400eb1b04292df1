"""Compare the tensors of two checkpoints, the command ``diff``.

Input: two checkpoints. Output: a summary; then the tensors that only one of them has or whose shape differs, and those
whose dtype or values differ, the largest relative difference first.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fsdp2_strategy import sizes
from fsdp2_strategy.checkpoint.listing import models_in
from fsdp2_strategy.checkpoint.reader import Opened, opened_with_headers
from fsdp2_strategy.checkpoint.storage import stored_in
from fsdp2_strategy.cli.found import components_in, key_of, read_newest
from fsdp2_strategy.cli.output import Output
from fsdp2_strategy.errors import counted, dtype_text
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.safetensors_format import Entry
from fsdp2_strategy.storage.verified_read import Reader, ReadRequest


def run(parsed: argparse.Namespace, output: Output) -> int:
    """Compare all tensors of two checkpoints, and verify the checksums of both; return 1 if any differs, else 0."""
    read = partial(opened_with_headers, key=key_of(parsed.key_file))
    a, b = (read_newest(path, None, read) for path in (parsed.a, parsed.b))
    tensors_a, tensors_b = _tensors(a), _tensors(b)
    differing: list[_Differing] = []
    shared = [name for name in tensors_a if name in tensors_b]
    progress = 0 if output.is_quiet else sum(tensors_a[name].nbytes + tensors_b[name].nbytes for name in shared)
    names = sorted({*tensors_a, *tensors_b})
    with Reader("comparing", a.checksums, progress) as reader_a, Reader("comparing", b.checksums, 0) as reader_b:
        for name in names:
            one, other = tensors_a.get(name), tensors_b.get(name)
            if one is None or other is None:
                only = "b" if one is None else "a"
                differing.append(_Differing(name, {"only_in": only}, f"only in {getattr(parsed, only)}"))
            elif one.shape != other.shape:
                shapes = [list(one.shape), list(other.shape)]
                differing.append(_Differing(name, {"shapes": shapes}, f"shape {shapes[0]} and {shapes[1]}"))
            else:
                difference = _compare(reader_a, one, reader_b, other)
                if not difference.elements and one.dtype == other.dtype:
                    continue
                dtypes = [dtype_text(entry.dtype) for entry in (one, other)]
                cast = f"{dtypes[0]} and {dtypes[1]}, " if dtypes[0] != dtypes[1] else ""
                facts = {"dtypes": dtypes, **vars(difference)}
                differing.append(_Differing(name, facts, f"{cast}{difference}", difference))
    differing.sort(key=lambda each: -each.difference.relative_norm if each.difference else -math.inf)
    output.line(_summary(len(names) - len(differing), differing), is_problem=bool(differing))
    for each in differing:
        output.values.append({"name": each.name, **each.facts})
        output.line(f"{each.name}: {each.text}", is_problem=True)
    return int(bool(differing))


@dataclass
class _Difference:
    """How much the values of two tensors differ."""

    elements: int
    """Number of elements that differ. Two NaNs are equal."""
    max_abs: float
    """Largest absolute difference; infinite if only one value is not finite."""
    relative_norm: float
    """Norm of the difference, divided by the norm of the first tensor."""

    def __str__(self) -> str:
        if not self.elements:
            return "equal values"
        return (
            f"{counted(self.elements, 'element')} different, by at most {self.max_abs:.3g}; "
            f"relative norm of the difference {self.relative_norm:.3g}"
        )


@dataclass
class _Differing:
    """A tensor that differs."""

    name: str
    facts: dict[str, Any]
    """For the JSON document."""
    text: str
    difference: _Difference | None = None
    """None if the values cannot be compared."""


def _summary(equal: int, differing: Sequence[_Differing]) -> str:
    """Return the number of equal and different tensors, and where the largest differences are."""
    text = f"{counted(equal, 'tensor')} equal, {len(differing):,} different"
    compared = [(each.difference, each.name) for each in differing if each.difference and each.difference.elements]
    if not compared:
        return text
    absolute, name_a = max(compared, key=lambda pair: pair[0].max_abs)
    relative, name_r = max(compared, key=lambda pair: pair[0].relative_norm)
    return (
        f"{text}; largest difference {absolute.max_abs:.3g}, in {name_a}; largest relative norm of a difference "
        f"{relative.relative_norm:.3g}, in {name_r}"
    )


def _tensors(opened: Opened) -> dict[str, Entry]:
    """Return the tensors of all components; the names begin with those of the model, if it has one, and component."""
    folders = components_in(opened.paths, models_in(opened.manifest))
    found = {part: stored_in(folder, opened.paths) for part, folder in folders.items()}
    return {f"{part}: {name}": entry for part, entries in found.items() for name, entry in entries.items()}


def _compare(reader_a: Reader, a: Entry, reader_b: Reader, b: Entry) -> _Difference:
    """Compare two tensors of equal shape, a few rows at a time, in fp64."""
    elements, max_abs, square, norm = 0, 0.0, 0.0, 0.0
    for box in _boxes(a):
        one, other = (_read(reader, entry, box) for reader, entry in ((reader_a, a), (reader_b, b)))
        if a.dtype == b.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            continue
        one, other = one.double(), other.double()
        differs = (one != other) & ~(one.isnan() & other.isnan())
        elements += int(differs.sum())
        gap = torch.where(differs, (one - other).abs().nan_to_num(nan=math.inf), 0.0)
        max_abs = max(max_abs, float(gap.max()) if gap.numel() else 0.0)
        square += float(gap.square().sum())
        norm += float(one.nan_to_num().square().sum())
    return _Difference(elements, max_abs, math.sqrt(square / norm) if norm else (math.inf if square else 0.0))


def _boxes(entry: Entry) -> Iterator[tuple[tuple[int, int], ...]]:
    """Split a tensor into ranges of rows of at most ``sizes.COPY_BYTES``."""
    if not entry.shape:
        yield ()
        return
    rows = entry.shape[0]
    at_once = max(1, rows * sizes.COPY_BYTES // max(1, entry.nbytes))
    for begin in range(0, rows, at_once):
        yield ((begin, min(at_once, rows - begin)), *((0, n) for n in entry.shape[1:]))


def _read(reader: Reader, entry: Entry, box: tuple[tuple[int, int], ...]) -> torch.Tensor:
    tensor = torch.empty([n for _, n in box], dtype=entry.dtype)
    reader.read([ReadRequest(entry.name, Region.of(entry, entry.shape, entry.dtype), box, tensor)])
    return tensor.reshape(-1)
