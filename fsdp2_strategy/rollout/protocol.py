"""Define the interface of an inference engine.

Input: weights under Hugging Face names, as `stream_weights` yields them. Output: generated sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast, runtime_checkable

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


class Engine(RolloutEngine):
    """A base class for engines: the optional members of `RolloutEngine` raise, or return None for "not known".

    The package's own engines are subclasses. An engine of any other class is called through a wrapper with the same
    defaults.
    """

    dtype: Any = None
    is_asleep: bool = False
    weights_version: str | None
    """Only if there is `update_changed_weights`."""
    _has_weights: bool = True
    """Whether the last update was complete."""

    @property
    def class_name(self) -> str:
        """Name of the engine's class, for messages."""
        return type(self).__name__

    def update_changed_weights(self, *_: Any, **__: Any) -> None:
        """Raise: weights are not taken by difference."""
        check_takes_changes(self)

    def weight_checksums(self) -> dict[str, str] | None:
        """Return None: no checksums are computed."""

    def weight_dtypes(self) -> dict[str, str] | None:
        """Return None: the dtypes are not known."""

    def log_probs(self, *_: Any, **__: Any) -> torch.Tensor | None:
        """Return None: no log-probabilities are computed."""

    def routed_experts(self, *_: Any, **__: Any) -> torch.Tensor | None:
        """Return None: the choices are not reported."""

    def close(self) -> None:
        """Do nothing."""

    def _check_awake(self, action: str) -> None:
        if self.is_asleep:
            raise RolloutError(
                f"cannot {action}: the engine is asleep, expected one that is awake. Call wakeup_inference_engine."
            )

    def _check_ready(self, action: str) -> None:
        self._check_awake(action)
        if not self._has_weights:
            raise RolloutError(
                f"cannot {action}: the engine does not have all of its weights, expected a complete update. Call "
                "update_engine_weights first."
            )


class _Wrapped:
    """Pass all calls on to an engine; a member that it lacks is the default of `Engine`."""

    def __init__(self, given: RolloutEngine) -> None:
        self._given, self._sleeps, self.class_name = given, False, type(given).__name__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given if hasattr(self._given, name) else _DEFAULTS, name)

    @property
    def is_asleep(self) -> bool:
        return bool(getattr(self._given, "is_asleep", self._sleeps))

    def sleep(self) -> None:
        self._given.sleep()
        self._sleeps = True

    def wake_up(self) -> None:
        self._given.wake_up()
        self._sleeps = False


_DEFAULTS: Any = Engine()  # type: ignore[abstract]


def engine_of(given: RolloutEngine) -> Engine:
    """Return an engine that has all optional members."""
    return given if isinstance(given, Engine) else cast("Engine", _Wrapped(given))


def lacks(engine: Engine, method: str) -> bool:
    """Return whether an optional method is the default of `Engine`."""
    return getattr(getattr(engine, method), "__func__", None) is getattr(Engine, method)


def check_takes_changes(engine: Engine) -> None:
    """Raise if an engine does not take weights by difference."""
    if lacks(engine, "update_changed_weights") or not hasattr(engine, "weights_version"):
        raise RolloutError(
            f"cannot update weights by difference: {engine.class_name} has no update_changed_weights and "
            "weights_version, expected both. Add them (see RolloutEngine), or update without by_difference."
        )
