"""The engines by name, and the `Rollout` that holds a trainer's engine.

Input: a trainer's arguments and a model. Output: an engine that has the model's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.errors import RolloutError, some
from fsdp2_strategy.model.fsdp_state import is_sharded
from fsdp2_strategy.model.ranks import on_ranks_of
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.rollout.protocol import RolloutEngine, Weights
from fsdp2_strategy.rollout.sglang_engine import SGLangEngine
from fsdp2_strategy.rollout.stream import stream_weights, weight_checksums
from fsdp2_strategy.rollout.trainer_arguments import option
from fsdp2_strategy.rollout.transformers_engine import TransformersEngine
from fsdp2_strategy.rollout.vllm_engine import VLLMEngine
from fsdp2_strategy.sharding.shard import is_for_training

Factory = Callable[[Any, nn.Module | None, torch.dtype | None], RolloutEngine | None]


def _transformers_engine(args: Any, actor: nn.Module | None, dtype: torch.dtype | None) -> RolloutEngine:
    if actor is None:
        raise RolloutError(
            "cannot set up an engine: actor is None, expected the model that the engine 'transformers' copies. Pass "
            "actor."
        )
    return TransformersEngine(actor, dtype=dtype, tokenizer=option(args, "pretrain", None))


ENGINES: dict[str, Factory] = {
    "transformers": _transformers_engine,
    "sglang": lambda args, _, dtype: SGLangEngine.from_args(args, dtype),
    "vllm": lambda args, _, dtype: VLLMEngine.from_args(args, dtype),
}
"""Functions that build an engine, by name. To add an engine, set ``ENGINES[name]``; the trainer passes this name.

A function receives the trainer's arguments, the actor, and the dtype of the weights. It runs on every rank, and returns
None on ranks without an engine.
"""


class Rollout:
    """Hold a trainer's engine: set it up, update its weights, put it to sleep and wake it."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.engine: RolloutEngine | None = None
        self.engine_type: str | None = None
        self.args: object = None
        self._is_built_here = False
        self._dtype = dtype
        self._was_put_to_sleep = False

    def set_up(self, args: object, engine_type: str | RolloutEngine, actor: nn.Module | None) -> None:
        """Build the engine, or use the given one; collective."""
        with (
            on_ranks_of(() if actor is None else actor),
            all_or_none("set up an inference engine", RolloutError),
        ):
            self.close()  # the old engine may hold memory or a port that the new one needs
            built: Any = engine_type
            if isinstance(engine_type, str):
                if engine_type not in ENGINES:
                    raise RolloutError(
                        f"cannot set up an engine: engine_type is {engine_type!r}, expected one of "
                        f"{', '.join(ENGINES)}, or an engine. To add an engine by name, set "
                        f"fsdp2_strategy.rollout.ENGINES[{engine_type!r}] to a function that builds it."
                    )
                built = ENGINES[engine_type](args, actor, self._dtype_of(actor))
            if built is not None:
                _check_engine(built)
        self.engine, self.args, self._was_put_to_sleep = built, args, False
        self._is_built_here = isinstance(engine_type, str)
        self.engine_type = engine_type if isinstance(engine_type, str) else type(engine_type).__name__

    def close(self) -> None:
        """Close and release the engine if `set_up` built it; not collective."""
        if self._is_built_here:
            engine, self.engine, self.engine_type, self._is_built_here = self.engine, None, None, False
            if callable(close := getattr(engine, "close", None)):
                close()

    def update(self, actor: nn.Module, *, verify: bool) -> None:
        """Load the actor's weights into the engine of every rank that has one; collective."""
        if self.engine_type is None:
            raise RolloutError(
                "cannot update weights: there is no inference engine, expected one. Call setup_inference_engine first."
            )
        with on_ranks_of(actor), all_or_none("update the engine's weights", RolloutError):
            was_asleep = self._is_asleep
            self.wake_up()
            try:
                self._send(actor, verify=verify)
            finally:
                if was_asleep:
                    self.sleep()

    def _send(self, actor: nn.Module, *, verify: bool) -> None:
        sent = CountedStream(stream_weights(actor, dtype=self._dtype_of(actor)), hashed=verify)
        try:
            if self.engine is not None:
                self.engine.update_weights(iter(sent))
        finally:
            sent.exhaust()
        if self.engine is not None:
            sent.check_complete(self.engine)

    def _dtype_of(self, actor: nn.Module | None) -> torch.dtype | None:
        """Return the dtype in which an actor's weights are sent; None for the dtypes of the shards.

        In training without half precision, frozen parameters may be stored in half precision, but FSDP2 gathers them in
        fp32. So the engine gets fp32, too.
        """
        if self._dtype is not None or actor is None or not is_sharded(actor) or not is_for_training(actor):
            return self._dtype
        widths = {p.dtype.itemsize for p in unwrap_model(actor).parameters() if p.is_floating_point()}
        return torch.float32 if min(widths) < torch.float32.itemsize == max(widths) else None

    def sleep(self) -> None:
        """Put the engine to sleep, unless it is asleep; not collective."""
        if self.engine is not None and not self._is_asleep:
            self.engine.sleep()
            self._was_put_to_sleep = True

    def wake_up(self) -> None:
        """Wake the engine if it is asleep; not collective."""
        if self.engine is not None and self._is_asleep:
            self.engine.wake_up()
            self._was_put_to_sleep = False

    @property
    def is_asleep(self) -> bool:
        """Whether there is an engine on this rank, and it is asleep."""
        return self.engine is not None and self._is_asleep

    @property
    def _is_asleep(self) -> bool:
        """Whether the engine is asleep: its own ``is_asleep`` if it has one, else whether `sleep` was called last."""
        return bool(getattr(self.engine, "is_asleep", self._was_put_to_sleep))


def _check_engine(engine: object) -> None:
    if not isinstance(engine, RolloutEngine):
        raise RolloutError(
            f"cannot set up an engine: it is a {type(engine).__name__}, expected an object with update_weights, sleep, "
            "wake_up and generate. See RolloutEngine."
        )


class CountedStream:
    """Iterate over a stream of weights, and count the tensors that the engine takes; hash them if ``hashed``."""

    def __init__(self, stream: Iterable[tuple[str, torch.Tensor]], *, hashed: bool) -> None:
        self._stream = iter(stream)
        self._hashed = hashed
        self._checksums: dict[str, str] = {}
        self._dtypes: dict[str, str] = {}
        self._taken = 0
        self._left = 0
        self._failure: Exception | None = None

    def __iter__(self) -> Weights:
        while True:
            try:
                name, tensor = next(self._stream)
            except StopIteration:
                return
            except Exception as failure:
                self._failure = failure
                raise
            if self._hashed:
                self._dtypes[name] = _short(tensor.dtype)
                self._checksums |= weight_checksums([(name, tensor)])
            self._taken += 1
            yield name, tensor

    def exhaust(self) -> None:
        """Iterate over the tensors that the engine did not take, so that this rank runs all collectives of the stream.

        Raises:
            Exception: the error of the stream, also if the engine caught it.
        """
        for _ in self._stream:
            self._left += 1
        if self._failure is not None:
            raise self._failure

    def check_complete(self, engine: RolloutEngine) -> None:
        """Raise if the engine did not take all tensors; if ``hashed``, also if its checksums are wrong."""
        if self._left:
            raise RolloutError(
                f"cannot update weights: the engine took {self._taken} tensors of {self._taken + self._left}, expected "
                "all. Its update_weights must iterate over all weights."
            )
        if not self._hashed:
            return
        if (checksums := getattr(engine, "weight_checksums", None)) is None:
            raise RolloutError(
                f"cannot verify the engine's weights: {type(engine).__name__} has no weight_checksums, expected a "
                "method that returns them. Add it, or update without verify."
            )
        held: dict[str, str] = checksums()
        wrong = [name for name, checksum in self._checksums.items() if held.get(name) != checksum]
        if not wrong:
            return
        cast = self._cast_by(engine, wrong)
        if cast:
            held_in = ", ".join(sorted(set(cast.values())))
            sent_in = ", ".join(sorted({self._dtypes[name] for name in cast}))
            raise RolloutError(
                f"cannot use the engine's weights: it holds {some(list(cast), 'weight')} of {len(self._checksums)} in "
                f"{held_in}, expected {sent_in}, in which they were sent. Build the engine in {sent_in} "
                "(TransformersEngine without dtype takes the dtype that is sent), or set bf16 or fp16 of the strategy "
                "to the dtype of the engine."
            )
        raise RolloutError(
            f"cannot use the engine's weights: {some(wrong)} of {len(self._checksums)} differ from those "
            f"that were sent ({', '.join(sorted(set(self._dtypes.values())))}), expected equal ones. Update again, and "
            "check how the engine loads weights, and whether it holds them in the dtypes that were sent."
        )

    def _cast_by(self, engine: RolloutEngine, names: Iterable[str]) -> dict[str, str]:
        """Return the engine's dtypes of those weights that it holds in another dtype than they were sent in."""
        try:
            held: dict[str, str] = getattr(engine, "weight_dtypes", dict)() or {}
        except RolloutError:  # the weights are wrong in any case
            return {}
        shown = {name: _short(held[name]) for name in names if name in held}
        return {name: dtype for name, dtype in shown.items() if dtype != self._dtypes[name]}


def _short(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
