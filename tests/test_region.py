"""Regions: what is arranged on descriptions equals what is arranged on tensors, box by box."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.versions import NEW_CONVERSIONS
from transformers import core_model_loading as hf
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist

from fsdp2_strategy.storage.regions import Computed, Region, assemble, sources_of


def described(*shapes):
    """Return regions over tensors of these shapes, and the tensors."""
    tensors = [torch.randn(shape) for shape in shapes]
    return [Region.of(i, t.shape, t.dtype) for i, t in enumerate(tensors)], tensors


def assert_equal(region, tensors, expected):
    assert tuple(region.shape) == tuple(expected.shape)
    assert torch.equal(assemble(region, tensors.__getitem__), expected)
    draw = random.Random(0)
    for _ in range(20):
        box = [(b := draw.randint(0, n), draw.randint(0, n - b)) for n in expected.shape]
        part = expected
        for dim, (begin, length) in enumerate(box):
            part = part.narrow(dim, begin, length)
        assert torch.equal(assemble(region, tensors.__getitem__, tuple(box)), part)


ARRANGEMENTS = {
    "cat": (lambda a, b: torch.cat([a, b], dim=1), [(4, 3), (4, 5)]),
    "cat_negative": (lambda a, b: torch.cat([a, b], -2), [(4, 3), (2, 3)]),
    "stack": (lambda a, b: torch.stack([a, b]), [(4, 3), (4, 3)]),
    "stack_inner": (lambda a, b: torch.stack([a, b], dim=-1), [(4, 3), (4, 3)]),
    "experts": (lambda a, b, c, d: torch.cat([torch.stack([a, b]), torch.stack([c, d])], 1), [(4, 3)] * 4),
    "chunk": (lambda a: torch.chunk(a, 3, dim=0)[1], [(7, 3)]),
    "split": (lambda a: a.split([2, 5], dim=0)[1].contiguous(), [(7, 3)]),
    "split_of_cat": (lambda a, b: torch.split(torch.cat([a, b]), 4)[1], [(3, 2), (6, 2)]),
    "select": (lambda a: a.select(1, 2), [(4, 3)]),
    "unbind": (lambda a: a.unbind(0)[2], [(4, 3)]),
    "squeeze": (lambda a: a.narrow(1, 1, 1).squeeze(1), [(4, 3, 2)]),
    "transpose": (lambda a: a.transpose(0, -1).contiguous(), [(4, 3, 2)]),
    "transpose_of_cat": (lambda a, b: torch.cat([a, b]).t(), [(4, 3), (2, 3)]),
    "permute": (lambda a: a.permute(2, 0, 1), [(4, 3, 2)]),
    "view": (lambda a: a.view(2, 6, 3), [(12, 3)]),
    "flatten": (lambda a: a.reshape(4, -1), [(4, 3, 2)]),
    "index": (lambda a: a[1:4, ::2], [(6, 5)]),
    "unsqueeze": (lambda a: a.unsqueeze(1), [(4, 3)]),
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_an_arrangement_moves_nothing_and_equals_the_tensors(name):
    function, shapes = ARRANGEMENTS[name]
    regions, tensors = described(*shapes)
    result = function(*regions)
    assert not any(isinstance(piece.source, Computed) for piece in result.pieces)
    assert_equal(result, tensors, function(*tensors))


COMPUTATIONS = {
    "reshape_that_copies": (lambda a: a.transpose(0, 1).reshape(-1), [(4, 3)]),
    "arithmetic": (lambda a: (a * 2 + 1).chunk(2)[1], [(4, 3)]),
    "of_several": (lambda a, b: torch.cat([a, b]).reshape(2, 3, 2).flip(1), [(4, 2), (2, 2)]),
    "several_outputs": (lambda a: torch.max(a, dim=0)[0], [(4, 3)]),
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_what_is_no_arrangement_is_computed_on_the_real_tensors(name):
    function, shapes = COMPUTATIONS[name]
    regions, tensors = described(*shapes)
    result = function(*regions)
    assert sorted(set(sources_of(result))) == list(range(len(shapes)))
    assert_equal(result, tensors, function(*tensors))


class Config:
    num_attention_heads = 2

    def get_text_config(self):
        return self


OPERATIONS = {
    "merge": (MergeModulelist(0), {"e.*.w": [(3, 2)] * 4}, ["w"]),
    "split_modulelist": (hf.SplitModulelist(0), {"w": [(4, 3, 2)]}, ["e.*.w"]),
    "concatenate": (Concatenate(1), {"a": [(4, 3, 2)], "b": [(4, 5, 2)]}, ["ab"]),
    "chunk": (Chunk(0), {"qkv": [(6, 3)]}, ["q", "k", "v"]),
    "transpose": (hf.Transpose(1, 2), {"w": [(4, 3, 2)]}, ["w"]),
    "ernie": (hf.ErnieFuseAndSplitTextVisionExperts(), {"g": [(3, 2)] * 4, "u": [(3, 2)] * 4}, ["text", "vision"]),
    "ernie_back": (hf.ErnieSplitAndDecoupleTextVisionExperts(), {"t": [(2, 6, 2)], "v": [(2, 6, 2)]}, ["g.*", "u.*"]),
}
if NEW_CONVERSIONS:
    OPERATIONS["interleave"] = (hf.Interleave(0), {"w": [(6, 3)]}, ["w"])
    OPERATIONS["permute_for_rope"] = (hf.PermuteForRope(), {"w": [(8, 3)]}, ["w"])
    OPERATIONS["conv3d"] = (hf.Conv3dToLinear(3, (2, 2, 2)), {"w": [(5, 3, 2, 2, 2)]}, ["w"])
    OPERATIONS["linear"] = (hf.LinearToConv3d(3, (2, 2, 2)), {"w": [(5, 24)]}, ["w"])


@pytest.mark.parametrize("name", OPERATIONS)
def test_transformers_conversions_run_on_regions(name):
    operation, shapes, targets = OPERATIONS[name]
    regions, tensors = described(*(shape for group in shapes.values() for shape in group))

    def run(values):
        waiting = iter(values)
        grouped = {key: [next(waiting) for _ in group] for key, group in shapes.items()}
        converted = operation.convert(
            grouped,
            source_patterns=list(shapes),
            target_patterns=targets,
            config=Config(),
            full_layer_name="",
            model=None,
        )
        return {k: v[0] if isinstance(v, list) else v for k, v in converted.items()}

    expected, result = run(tensors), run(regions)
    assert result.keys() == expected.keys()
    for key in expected:
        assert_equal(result[key], tensors, expected[key])


def test_a_region_has_no_values_and_says_so():
    (region,), _ = described((4, 3))
    with pytest.raises(TypeError, match="values of a tensor"):
        region.tolist()
    with pytest.raises(ValueError, match="cannot concatenate"):
        torch.cat([region, described((4, 5))[0][0]])


def test_a_slice_over_two_sources_is_computed_from_where_it_begins():
    [a, b], tensors = described((4,), (4,))
    assert_equal(torch.cat([a, b])[1:], tensors, torch.cat(tensors)[1:])
