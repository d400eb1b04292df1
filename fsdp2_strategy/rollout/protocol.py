"""Define the interface of an inference engine.

Input: weights under Hugging Face names, as `stream_weights` yields them. Output: generated sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.rollout.difference import Change

Weights = Iterator[tuple[str, torch.Tensor]]
Changes = Iterator[tuple[str, Change]]


@runtime_checkable
class RolloutEngine(Protocol):
    """The interface of an inference engine, which may compute in this process or elsewhere.

    Seven members are optional. ``weight_checksums() -> dict[str, str]`` returns checksums by Hugging Face name, as the
    function `weight_checksums` computes them; an update with ``verify`` calls it. ``weight_dtypes() -> dict[str, str]``
    returns the dtypes of the weights, such as "bfloat16"; if checksums differ, the error names them. ``dtype`` is the
    dtype that the engine was built in; it is used where there are no ``weight_dtypes``. ``is_asleep``, an
    attribute or a property, says whether the engine is asleep; without it, the last call of ``sleep`` or ``wake_up``
    decides. ``close()`` is called when an engine that was built by name is no longer used.
    ``log_probs(sequences, attention_mask, *, temperature, **inputs)`` returns the log-probability of each token but the
    first, [batch, length - 1], of sequences that are padded on the right; ``routed_experts(sequences, attention_mask,
    **inputs)`` returns the indices of the chosen experts, [layers, batch, length, k]. Both may return None if the
    engine cannot compute them; `check_engine_agreement` calls them.

    An engine that takes weights by difference has two more members, both or none. ``weights_version``, an attribute or
    a property, is the version of its weights, or None if it has none; `update_weights` sets it to None before it loads
    anything. ``update_changed_weights(changes, *, since, version)`` writes tensors and differences into the weights of
    version ``since`` in place, or loads all weights if ``since`` is empty; then it sets ``weights_version``.
    """

    def update_weights(self, weights: Weights) -> object:
        """Load all weights from pairs of Hugging Face name and tensor; the engine may keep the tensors."""

    def sleep(self) -> object:
        """Free the device memory; the loaded weights must be available again after `wake_up`."""

    def wake_up(self) -> object:
        """Prepare to generate or to load weights."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate sequences."""


def check_awake(engine: Any, action: str) -> None:
    """Raise if an engine with ``is_asleep`` is asleep.

    Raises:
        RolloutError: it is asleep.
    """
    if engine.is_asleep:
        raise RolloutError(
            f"cannot {action}: the engine is asleep, expected one that is awake. Call wakeup_inference_engine."
        )


def check_takes_changes(engine: Any) -> None:
    """Raise if an engine does not take weights by difference.

    Raises:
        RolloutError: it lacks ``update_changed_weights`` or ``weights_version``.
    """
    if not (callable(getattr(engine, "update_changed_weights", None)) and hasattr(engine, "weights_version")):
        raise RolloutError(
            f"cannot update weights by difference: {type(engine).__name__} has no update_changed_weights and "
            "weights_version, expected both. Add them (see RolloutEngine), or update without by_difference."
        )


def check_allows_sleep(allows_sleep: bool) -> None:
    """Raise if an engine was not built to be put to sleep.

    Raises:
        RolloutError: ``allows_sleep`` is false.
    """
    if not allows_sleep:
        raise RolloutError(
            "cannot put the engine to sleep: it was built without allows_sleep, expected it. Pass "
            "--enable_engine_sleep, or build it with allows_sleep=True."
        )
