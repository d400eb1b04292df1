"""Describe the elements of a tensor that changed, as positions and values.

Input: positions of changed elements. Output: a `TensorDifference`, which changes a tensor in place, and the same in few
bytes.

[Note: gaps] Positions are sent as the distances between them, in 16 bits each. The distance 65535 means: go on by that
many elements, without a value. So a changed element costs two bytes and its value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from fsdp2_strategy.errors import RolloutError

STEP = 2**16 - 1
"""The distance that has no value; see [Note: gaps]."""


@dataclass(frozen=True, eq=False)
class TensorDifference:
    """The elements of a tensor that changed since an earlier version; `apply_` writes them into that version."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""
    positions: torch.Tensor
    """Indices [n] of the changed elements in the flattened tensor, int64, each once."""
    values: torch.Tensor
    """New values [n] of these elements, in the dtype of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Number of bytes in which the difference is sent, at most; see [Note: gaps]."""
        return 2 * (len(self.positions) + math.prod(self.shape) // STEP) + self.values.nbytes

    @cached_property
    def encoded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The distances [m] between the sorted positions, int16 (unsigned bits), and the values [n] in that order."""
        positions, values = self.positions, self.values
        if bool((positions[1:] < positions[:-1]).any()):
            positions, order = positions.sort()
            values = values[order]
        return to_gaps(positions), values.contiguous()

    @classmethod
    def decoded(cls, shape: tuple[int, ...], gaps: torch.Tensor, values: torch.Tensor) -> TensorDifference:
        """Return the difference that was encoded; raise ValueError if its parts contradict each other."""
        positions = from_gaps(gaps)
        if len(positions) != len(values) or (len(positions) and int(positions[-1]) >= math.prod(shape)):
            raise ValueError(f"{len(positions)} positions and {len(values)} values of a tensor of shape {list(shape)}")
        return cls(shape, positions, values)

    def apply_(self, tensor: torch.Tensor) -> None:
        """Write the changed elements, cast, into the earlier version; raise RolloutError if it has another shape."""
        if tuple(tensor.shape) != tuple(self.shape):
            raise RolloutError(
                f"cannot apply a difference: the tensor has shape {list(tensor.shape)}, expected {list(self.shape)}. "
                "Send all weights again."
            )
        put(tensor, self.positions, self.values)


def put(tensor: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write values at positions of the flattened tensor, on the tensor's device and in its dtype."""
    positions, values = positions.to(tensor.device), values.to(tensor.device, tensor.dtype)
    if tensor.is_contiguous():  # not ``put_``, which raises if torch uses deterministic algorithms
        tensor.view(-1).index_copy_(0, positions, values)
    else:
        tensor.index_put_(torch.unravel_index(positions, tensor.shape), values)


def to_gaps(positions: torch.Tensor) -> torch.Tensor:
    """Return the distances between ascending positions [n], as [m] int16 with unsigned bits; see [Note: gaps]."""
    gaps = positions.diff(prepend=positions.new_zeros(1))
    if not len(gaps) or int(gaps.max()) < STEP:
        return gaps.to(torch.int16)
    steps = gaps // STEP
    ends = (steps + 1).cumsum(0) - 1
    longer = gaps.new_full((int(ends[-1]) + 1,), STEP)
    longer[ends] = gaps - steps * STEP
    return longer.to(torch.int16)


def from_gaps(gaps: torch.Tensor) -> torch.Tensor:
    """Return the ascending positions [n], int64, of distances [m]."""
    distances = gaps.to(torch.int64) & STEP
    positions = distances.cumsum(0)
    is_value = distances != STEP
    return positions if bool(is_value.all()) else positions[is_value]


Change = torch.Tensor | TensorDifference
"""What stands for a tensor of the files in a stream of changes."""
