"""Count the floating-point operations of a model's forward and backward passes on this rank.

Input: passes that run within `FlopCount.counting`. Output: model FLOPs; hardware FLOPs, which include recomputation.

[Note: FLOPs] The numbers of operations are those of `torch.utils.flop_counter`, for matrix products, convolutions and
attention; attention counts all pairs of positions, also those that a causal mask hides. The mode only looks at shapes:
it runs each operator as it is, so values, random numbers and compiled code stay the same. Recomputation is known by the
mode of gradients, which is off in a backward pass, but on while it recomputes a forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.torch_internals import (
    TorchDispatchMode,
    attention_on_cpu,
    grouped_product,
    has_fake_tensors,
    is_compiled,
    operator_of,
)


class FlopCount:
    """The FLOPs of passes of one model on this rank; `counting` measures a pass."""

    def __init__(self) -> None:
        self.forward, self.backward, self.recomputed = 0, 0, 0
        self.has_failed = False
        """Whether an operation could not be counted; the numbers are then unknown."""
        self.is_separate = True
        """Whether recomputation is counted by itself; if not, as a part of the backward pass."""

    def numbers(self) -> tuple[float | None, float | None]:
        """Return the FLOPs without and with recomputation, None if unknown."""
        if self.has_failed:
            return None, None
        model = float(self.forward + self.backward)
        return model if self.is_separate else None, model + self.recomputed

    def add(self, other: FlopCount) -> None:
        """Add the FLOPs of other passes."""
        self.forward += other.forward
        self.backward += other.backward
        self.recomputed += other.recomputed
        self.has_failed |= other.has_failed
        self.is_separate &= other.is_separate

    @contextmanager
    def counting(self, *, is_backward: bool) -> Iterator[None]:
        """Count the operations of this block; not collective."""
        with CountingMode(self, is_backward=is_backward):
            yield


class CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add the FLOPs of each operator to a `FlopCount`; see [Note: FLOPs]."""

    supports_higher_order_operators = True

    def __init__(self, count: FlopCount, *, is_backward: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count, self._is_backward = count, is_backward

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return that torch.compile compiles within this mode, which sees the operators that compiled code calls."""
        return True

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and count it; a DTensor runs it on local tensors, which come here."""
        if DTensor in types:
            return NotImplemented
        kwargs = kwargs or {}
        out = operator(*args, **kwargs)
        packet = operator_of(operator)
        formula = _FORMULAS.get(operator if packet is None else packet)
        if formula is None and packet is None:  # of higher order: the operators that it runs do not come here
            self._count.has_failed = True
        if formula is not None and not self._count.has_failed and not has_fake_tensors(types):
            try:
                flops = int(formula(*args, **kwargs, out_val=out))
            except Exception as error:  # noqa: BLE001  the program's step must not depend on it
                self._count.has_failed = True
                log("FLOPs are not counted: %s of %s", repr(error), operator, level=logging.DEBUG)
                return out
            if not self._is_backward:
                self._count.forward += flops
            elif torch.is_grad_enabled():
                self._count.recomputed += flops
            else:
                self._count.backward += flops
        return out


def can_count(model: nn.Module) -> bool:
    """Return whether `FlopCount` can count a model: older versions of torch would not compile within its mode."""
    return hasattr(TorchDispatchMode, "ignore_compile_internals") or not any(map(is_compiled, model.modules()))


def can_separate_recomputation(model: nn.Module, *, recomputes: bool) -> bool:
    """Return whether recomputation is known: compiled code recomputes with gradients off."""
    return not (recomputes and any(map(is_compiled, model.modules())))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    shapes = (each.shape for each in (gradient, query, key, value))
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _grouped_product(first: Any, second: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the products of groups of rows, as experts compute them: one product in total, by rows.

    Groups divide the rows of the first matrix, the columns of the second, or the dimension that both share.
    """
    rows, inner, columns = first.shape[-2], first.shape[-1], second.shape[-1]
    batches = first.shape[0] if first.dim() == second.dim() == 3 else 1
    return int(2 * batches * rows * inner * columns)


def _formulas() -> dict[Any, Callable[..., Any]]:
    """Return torch's formulas by operator, and those of operators that torch's counter does not know."""
    forward, backward = attention_on_cpu()
    own: dict[Any, Callable[..., Any]] = {
        forward: _attention,
        backward: _attention_backward,
        grouped_product(): _grouped_product,
    }
    known: dict[Any, Callable[..., Any]] = FlopCounterMode(display=False).flop_registry
    return own | known


_FORMULAS = _formulas()
