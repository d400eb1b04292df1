"""The comparison of a value between ranks that travels in a sum."""

import itertools
import random

import pytest

from fsdp2_strategy.distributed.equal_values import LENGTH, digest_numbers, is_equal


def _sums(values):
    return [sum(column) for column in zip(*map(digest_numbers, values), strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 1000, 8192])
def test_equal_values_are_equal_and_one_other_value_is_noticed(ranks):
    value = ("lr", 1e-4, [1, 2, 3])
    assert is_equal(_sums([value] * ranks), ranks)
    if ranks > 1:
        assert not is_equal(_sums([value] * (ranks - 1) + [("lr", 1.0000000001e-4, [1, 2, 3])]), ranks)


def test_sums_are_exact_in_float64_in_any_order():
    generator = random.Random(0)
    values = [generator.random() for _ in range(50)]
    numbers = list(map(digest_numbers, values))
    assert all(len(own) == LENGTH for own in numbers)
    for order in itertools.islice(itertools.permutations(numbers), 20):
        assert [sum(column) for column in zip(*order, strict=True)] == _sums(values)
    assert not is_equal(_sums(values), len(values))
