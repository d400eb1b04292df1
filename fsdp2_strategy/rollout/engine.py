"""The engines by name, and the `Rollout` that holds a trainer's engine.

Input: a trainer's arguments and a model. Output: an engine that has the model's weights.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.agreement import all_or_none, any_rank, check_equal
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.process_group import group_in_use, rank, world_size
from fsdp2_strategy.errors import RolloutError, dtype_text, some
from fsdp2_strategy.model.fsdp_state import is_sharded
from fsdp2_strategy.model.ranks import on_ranks_of
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.rollout.agreement import EngineAgreement, check_engine_agreement
from fsdp2_strategy.rollout.changed_elements import Retain
from fsdp2_strategy.rollout.difference import Change
from fsdp2_strategy.rollout.protocol import Engine, RolloutEngine, check_takes_changes, engine_of
from fsdp2_strategy.rollout.sglang_engine import SGLangEngine
from fsdp2_strategy.rollout.stream import forget_changes, stream_weights, weight_checksums
from fsdp2_strategy.rollout.trainer_arguments import option
from fsdp2_strategy.rollout.transformers_engine import TransformersEngine
from fsdp2_strategy.rollout.vllm_engine import VLLMEngine
from fsdp2_strategy.sharding.shard import is_for_training

_UPDATE = "update the engine's weights"
"""The operation, for error messages."""

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


@dataclass(frozen=True)
class WeightUpdate:
    """What an update of an engine's weights sent."""

    version: str | None
    """The version that the engine has; None for an update that was not by difference."""
    is_full: bool
    """Whether all weights were sent."""
    sent_bytes: int
    """Number of bytes that this rank passed to its engine, or would have; see `TensorDifference`."""
    full_bytes: int
    """Number of bytes of all weights, in the dtypes in which they are sent."""
    retained_bytes: int
    """Number of bytes that this rank retains to find the next changes."""


class Rollout:
    """Hold a trainer's engine: set it up, update its weights, put it to sleep and wake it."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.engine: RolloutEngine | None = None
        self._engine: Engine | None = None
        """The same, with all optional members."""
        self.engine_type: str | None = None
        self._ranks_with_engine: list[int] = []
        self.args: object = None
        self._is_built_here = False
        self._dtype = dtype

    @collective
    def set_up(self, args: object, engine_type: str | RolloutEngine, actor: nn.Module | None) -> None:
        """Build the engine, or use the given one; collective."""
        with on_ranks_of(() if actor is None else actor):
            self._ranks_with_engine = self._set_up(args, engine_type, actor)
        self.args = args
        self._engine = None if self.engine is None else engine_of(self.engine)
        self._is_built_here = isinstance(engine_type, str)
        self.engine_type = engine_type if isinstance(engine_type, str) else type(engine_type).__name__

    def _set_up(self, args: object, engine_type: str | RolloutEngine, actor: nn.Module | None) -> list[int]:
        """Build or check the engine, and return the ranks that have one; collective."""
        with all_or_none("set up an inference engine", RolloutError):
            self.close()  # the old engine may hold memory or a port that the new one needs
            built: Any = engine_type
            if isinstance(engine_type, str):
                if engine_type not in ENGINES:
                    raise RolloutError(
                        f"cannot set up an engine: engine_type is {engine_type!r}, expected one of "
                        f"{', '.join(ENGINES)}, or an engine. To add an engine by name, set "
                        f"fsdp2_strategy.rollout.ENGINES[{engine_type!r}] to a function that builds it."
                    )
                built = _call_factory(engine_type, args, actor, self._dtype_of(actor))
            if built is not None:
                _check_engine(built)
        self.engine = built
        has_engine = [built is not None] * world_size()
        dist.all_gather_object(has_engine, built is not None, group=group_in_use())
        return [number for number, has in enumerate(has_engine) if has]

    def engine_or_absent(self) -> RolloutEngine:
        """Return this rank's engine, or an `AbsentEngine`; not collective."""
        if self.engine is not None:
            return self.engine
        return cast("RolloutEngine", AbsentEngine(None if self.engine_type is None else self._ranks_with_engine))

    def close(self) -> None:
        """Close and release the engine if `set_up` built it; not collective."""
        if self._is_built_here:
            engine, self.engine, self._engine, self.engine_type = self._engine, None, None, None
            self._is_built_here = False
            if engine is not None:
                engine.close()

    @collective
    def update(self, actor: nn.Module, *, verify: bool, by_difference: bool | Literal["hashes"]) -> WeightUpdate:
        """Load the actor's weights into the engine of every rank that has one; collective."""
        if self.engine_type is None:
            raise _no_engine("update weights")
        with on_ranks_of(actor), all_or_none(_UPDATE, RolloutError):
            _check_options(verify=verify, by_difference=by_difference)
            was_asleep = self.is_asleep
            self.wake_up()
            try:
                if by_difference:
                    return self._send_changes(actor, "hashes" if by_difference == "hashes" else "copy", verify=verify)
                return self._send(actor, verify=verify)
            finally:
                if was_asleep:
                    self.sleep()

    @collective
    def check_agreement(
        self, actor: nn.Module, sequences: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> EngineAgreement:
        """Compare an actor with the engine of every rank that has one; collective; see `check_engine_agreement`.

        A sleeping engine is woken, and put to sleep again.
        """
        if self.engine_type is None:
            raise _no_engine("compare trainer and engine")
        with on_ranks_of(actor):
            with all_or_none("wake the engine", RolloutError):
                was_asleep = self.is_asleep
                self.wake_up()
            try:
                return check_engine_agreement(
                    actor, self.engine, sequences, attention_mask, sent_dtype=self._dtype_of(actor), **options
                )
            finally:
                if was_asleep:
                    self.sleep()

    def _send(self, actor: nn.Module, *, verify: bool) -> WeightUpdate:
        sent = CountedStream(stream_weights(actor, dtype=self._dtype_of(actor)), hashed=verify)
        if self._engine is None:
            sent.exhaust()
        else:
            sent.pass_to(self._engine.update_weights)
            sent.check_held(self._engine)
        return WeightUpdate(None, is_full=True, sent_bytes=sent.nbytes, full_bytes=sent.nbytes, retained_bytes=0)

    def _send_changes(self, actor: nn.Module, retain: Retain, *, verify: bool) -> WeightUpdate:
        """Send what has changed since the version that the engines hold; after an error, all weights; collective."""
        try:
            update = self._send_since(actor, self._common_version(actor), retain)
            if not verify:
                return update
            try:
                self._check_held(actor)
            except RolloutError as error:  # raised on every rank
                if not any_rank(not update.is_full):
                    raise
                log("%s Sending all weights.", error, level=logging.WARNING)
                again = self._send_since(actor, "", retain)
                self._check_held(actor)
                return replace(again, sent_bytes=update.sent_bytes + again.sent_bytes)
        except BaseException:
            forget_changes(actor)  # an engine may have set its version, and still have other weights
            raise
        return update

    def _common_version(self, actor: nn.Module) -> str:
        """Return the version that all engines hold, or an empty string if they do not hold the same one; collective.

        For an actor without sharded parameters, return that of this rank's engine, because each rank streams alone.
        """
        held: str | None = None
        with all_or_none(_UPDATE, RolloutError):
            if self._engine is not None:
                check_takes_changes(self._engine)
                held = self._engine.weights_version or ""
        if not any(isinstance(parameter, DTensor) for parameter in unwrap_model(actor).parameters()):
            return held or ""
        of_ranks: list[str | None] = [None] * world_size()
        dist.all_gather_object(of_ranks, held, group=group_in_use())
        versions = {version for version in of_ranks if version is not None}  # None: a rank without an engine
        return versions.pop() if len(versions) == 1 else ""

    def _send_since(self, actor: nn.Module, since: str, retain: Retain) -> WeightUpdate:
        """Send what has changed since a version; collective."""
        with all_or_none(_UPDATE, RolloutError):
            stream = stream_weights(actor, dtype=self._dtype_of(actor), since=since, retain=retain)
            sent = CountedStream(stream, hashed=False)
            if self._engine is None:
                sent.exhaust()
            else:
                known = "" if stream.is_full else since
                sent.pass_to(partial(self._engine.update_changed_weights, since=known, version=stream.version))
        return WeightUpdate(stream.version, stream.is_full, sent.nbytes, stream.full_bytes, stream.retained_bytes)

    def _check_held(self, actor: nn.Module) -> None:
        """Raise on every rank if the weights of an engine differ from the actor's; collective."""
        expected = CountedStream(stream_weights(actor, dtype=self._dtype_of(actor)), hashed=True)
        for _ in expected:
            pass
        with all_or_none("verify the engine's weights", RolloutError):
            if self._engine is not None:
                expected.check_held(self._engine)

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
        if self._engine is not None and not self._engine.is_asleep:
            self._engine.sleep()

    def wake_up(self) -> None:
        """Wake the engine if it is asleep; not collective."""
        if self._engine is not None and self._engine.is_asleep:
            self._engine.wake_up()

    @property
    def is_asleep(self) -> bool:
        """Whether there is an engine on this rank, and it is asleep."""
        return self._engine is not None and self._engine.is_asleep


class AbsentEngine:
    """Stand for the engine on a rank that has none: false, and its attributes raise an error that says where one is.

    Args:
        ranks: the ranks that have an engine; None if none was set up.
    """

    def __init__(self, ranks: Sequence[int] | None) -> None:
        self._ranks = ranks

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        """Raise an error, except for special methods, which copy and pickle look up.

        Raises:
            RolloutError: for all other names.
        """
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        if self._ranks is None:
            raise _no_engine(f"use {name!r} of the inference engine")
        raise RolloutError(
            f"cannot use {name!r} of the inference engine: rank {rank()} holds none, expected one of "
            f"{some([str(number) for number in self._ranks], 'rank')}. Call it there, with 'if "
            "strategy.inference_engine:', and send the result to the other ranks."
        )


def _no_engine(action: str) -> RolloutError:
    return RolloutError(
        f"cannot {action}: there is no inference engine, expected one. Call setup_inference_engine first."
    )


def _call_factory(name: str, *arguments: Any) -> RolloutEngine | None:
    factory = ENGINES[name]
    if callable(factory):
        with suppress(ValueError):  # a builtin without a signature
            try:
                inspect.signature(factory).bind(*arguments)
            except TypeError as error:
                raise RolloutError(
                    f"cannot set up an engine: ENGINES[{name!r}] cannot be called with three arguments ({error}), "
                    "expected a function of (args, actor, dtype). Add the parameters; it may ignore them."
                ) from None
        return factory(*arguments)
    raise RolloutError(
        f"cannot set up an engine: ENGINES[{name!r}] is a {type(factory).__name__}, expected a function of (args, "
        "actor, dtype) that returns an engine. To use an engine that exists, pass it as engine_type."
    )


def _check_engine(engine: object) -> None:
    if isinstance(engine, type) or not isinstance(engine, RolloutEngine):
        found = f"the class {engine.__name__}" if isinstance(engine, type) else f"a {type(engine).__name__}"
        raise RolloutError(
            f"cannot set up an engine: it is {found}, expected an object with update_weights, sleep, "
            "wake_up and generate, or a name, as the second argument engine_type. See RolloutEngine."
        )


def _check_options(*, verify: bool, by_difference: object) -> None:
    """Raise on every rank if an option is wrong, or differs between ranks; collective."""
    # Without by_difference, each rank verifies its own engine, without collectives.
    options = (by_difference, bool(verify) if by_difference else None)
    check_equal(_UPDATE, options, RolloutError, "the same by_difference and verify on every rank. Pass the same ones.")
    if by_difference not in (True, False, "hashes"):
        raise RolloutError(
            f"cannot {_UPDATE}: by_difference is {by_difference!r}, expected True, False or 'hashes'. Pass one of them."
        )


class CountedStream:
    """Iterate over a stream of weights, and count the tensors that the engine takes; hash them if ``hashed``."""

    def __init__(self, stream: Iterable[tuple[str, Change]], *, hashed: bool) -> None:
        self._stream = iter(stream)
        self._hashed = hashed
        self.nbytes = 0
        """Number of bytes of what was taken and left."""
        self._checksums: dict[str, str] = {}
        self._dtypes: dict[str, str] = {}
        self._taken = 0
        self._left = 0
        self._failure: Exception | None = None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        try:
            for name, tensor in self._stream:
                if self._hashed:
                    self._dtypes[name] = dtype_text(tensor.dtype)
                    self._checksums |= weight_checksums([(name, cast("torch.Tensor", tensor))])
                self._taken += 1
                self.nbytes += tensor.nbytes
                yield name, tensor
        except Exception as failure:
            self._failure = failure
            raise

    def exhaust(self) -> None:
        """Run all collectives of the stream; raise its error, also if the engine caught it."""
        for _, tensor in self._stream:
            self._left += 1
            self.nbytes += tensor.nbytes
        if self._failure is not None:
            raise self._failure

    def pass_to(self, load: Callable[[Iterator[tuple[str, Any]]], object]) -> None:
        """Pass all tensors to an engine's method; raise if it did not take all of them."""
        try:
            load(iter(self))
        finally:
            self.exhaust()
        if self._left:
            raise RolloutError(
                f"cannot update weights: the engine took {self._taken} tensors of {self._taken + self._left}, expected "
                "all. Its update_weights must iterate over all weights."
            )

    def check_held(self, engine: Engine) -> None:
        """Raise if ``hashed``, and the checksums of the engine's weights differ from those of the stream."""
        if not self._hashed:
            return
        if (held := engine.weight_checksums()) is None:
            raise RolloutError(
                f"cannot verify the engine's weights: {engine.class_name} has no weight_checksums, expected a "
                "method that returns them. Add it, or update without verify."
            )
        wrong = [name for name, checksum in self._checksums.items() if held.get(name) != checksum]
        if not wrong:
            return
        if cast := self._cast_by(engine, wrong):
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

    def _cast_by(self, engine: Engine, names: Iterable[str]) -> dict[str, str]:
        """Return the engine's dtypes of those weights that it holds in another dtype than they were sent in."""
        try:
            held = engine.weight_dtypes() or {}
        except RolloutError:  # the weights are wrong in any case
            return {}
        shown = {name: dtype_text(held[name]) for name in names if name in held}
        return {name: dtype for name, dtype in shown.items() if dtype != self._dtypes[name]}
