"""Run a sharded policy on all ranks while rank 0 alone evaluates it in an environment.

LeRobot's training script evaluates on rank 0, and the other ranks wait for it. But a sharded policy only runs if all
ranks run it. So rank 0 sends each call of the policy to the ranks that wait, and these make the same call:

    rank 0            Evaluation.leading: the policy's methods send their arguments, then run
    the other ranks   Evaluation.wait: receives calls, and makes them, until rank 0 waits, too

Inputs are sent to all ranks, environments and results stay on rank 0. The random state of the other ranks is restored,
because only rank 0 draws random numbers for an evaluation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from fsdp2_strategy.checkpoint.random_state import load_rng, rng_content
from fsdp2_strategy.distributed.agreement import from_rank_0
from fsdp2_strategy.distributed.torch_internals import tree_map

_METHODS = (
    "eval",
    "train",
    "reset",
    "select_action",
    "predict_action_chunk",
    "decode_predicted_latents",
    "_decode_predicted_video",
)
"""Methods of a policy that LeRobot's evaluation calls, if the policy has them."""
_EVALUATE, _END = "evaluate", None


class Evaluation:
    """Evaluations of a policy on rank 0, in which the other ranks take part while they wait.

    ``weights`` returns the context of an evaluation, for example with averaged weights; ``autocast`` that of each call.
    """

    def __init__(
        self,
        device: torch.device,
        weights: Callable[[], contextlib.AbstractContextManager[Any]],
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._device, self._weights, self._autocast = device, weights, autocast
        self._lock = threading.RLock()  # LeRobot may evaluate several tasks at once, in threads
        self._is_called = False

    @contextlib.contextmanager
    def leading(self, policy: nn.Module) -> Iterator[None]:
        """Send calls of the policy to all ranks in a ``with`` block; on rank 0 only, while the others `wait`."""
        from_rank_0(_EVALUATE)
        with self._weights(), contextlib.ExitStack() as patches:
            for name in _METHODS:
                if hasattr(policy, name):
                    patches.enter_context(patch.object(policy, name, self._sent(name, getattr(policy, name))))
            try:
                yield
            finally:
                from_rank_0(_END)

    def _sent(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if self._is_called:  # a method that calls another one
                    return method(*args, **kwargs)
                self._is_called = True
                try:
                    from_rank_0((name, *_to((args, kwargs), torch.device("cpu"))))
                    return self._run(method, args, kwargs)
                finally:
                    self._is_called = False

        return call

    def wait(self, policy: nn.Module | None) -> None:
        """Wait until all ranks wait, and take part in the evaluations of rank 0 until then; collective."""
        while from_rank_0(_END) == _EVALUATE:
            assert policy is not None
            random_state = rng_content()
            with self._weights():
                while (received := from_rank_0(_END)) is not _END:
                    name, args, kwargs = received
                    self._run(getattr(policy, name), *_to((args, kwargs), self._device))
            load_rng(random_state)

    def _run(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with torch.no_grad(), self._autocast():
            return method(*args, **kwargs)


def _to(value: Any, device: torch.device) -> Any:
    return tree_map(lambda each: each.to(device) if isinstance(each, torch.Tensor) else each, value)
