"""Remove gradients that no rank has computed, by numbers that travel with the all-reduce of the gradient norm.

Input: the parameters of an optimizer step. Output: numbers to sum over the ranks; and from the sums, parameters without
a gradient where no rank used the parameter. See [Note: missing gradients] in `sharding.missing_gradients`.

Each parameter has a digit in base (number of ranks + 1), which is 1 if this rank used it. The sum of the digits over
the ranks does not overflow, so several digits fit exactly into one float64: 33 on two ranks, five on a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from fsdp2_strategy.model.gradients import replicated_gradients
from fsdp2_strategy.sharding.missing_gradients import restore_gradient, unused_parameters

_EXACT_BITS = 53  # integers up to 2^53 are exact in float64


def used_numbers(parameters: Sequence[torch.Tensor], root: nn.Module, ranks: int) -> list[float]:
    """Return the numbers to sum over ``ranks`` ranks: which of the parameters this rank has gradients of."""
    unused = {id(parameter) for parameter in unused_parameters(root)}
    if (replicated := replicated_gradients(root)) is not None:
        unused |= {id(parameter) for parameter in replicated.unused_parameters()}
    used = [p.grad is not None and id(p) not in unused for p in parameters]
    length, base = _digits(ranks), ranks + 1
    numbers = []
    for begin in range(0, len(used), length):
        number = 0
        for digit in reversed(used[begin : begin + length]):
            number = number * base + digit
        numbers.append(float(number))
    return numbers


def remove_unused_gradients(
    parameters: Sequence[torch.Tensor], root: nn.Module, sums: Sequence[float], ranks: int
) -> None:
    """Set gradients to None that no rank has computed; ``sums`` are those of `used_numbers`; not collective."""
    for parameter, count in zip(parameters, _counts(sums, ranks), strict=False):
        if not count:
            parameter.grad = None
        elif parameter.grad is None:
            restore_gradient(root, parameter)


def _digits(ranks: int) -> int:
    """Return how many digits fit into a number."""
    return max(1, int(_EXACT_BITS / math.log2(ranks + 1)))


def _counts(sums: Sequence[float], ranks: int) -> list[int]:
    powers = [(ranks + 1) ** place for place in range(_digits(ranks))]
    return [number // power % (ranks + 1) for number in map(int, sums) for power in powers]
