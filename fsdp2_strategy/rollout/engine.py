"""The protocol of inference engines, an engine that uses transformers, and the `Rollout` that holds a trainer's engine.

Input: weights under Hugging Face names, as `stream_weights` yields them. Output: an engine that generates with these
weights.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.errors import RolloutError, did_you_mean, some
from fsdp2_strategy.hf.conversions import recipe_for
from fsdp2_strategy.hf.library_internals import dtype_plan, mark_initialized
from fsdp2_strategy.hf.meta.init_on_meta import keep_dtypes, planned_dtypes
from fsdp2_strategy.hf.peft.merge import without_adapters
from fsdp2_strategy.hf.regions import Computed, Piece, sources_of, target_of, value_of
from fsdp2_strategy.hf.safetensors_format import Entry
from fsdp2_strategy.hf.save_plan import regions_to_write, tensors_to_write
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.hf.transformers_models import is_transformers_model
from fsdp2_strategy.hf.weights_folder import source_of_weights
from fsdp2_strategy.model.fsdp_state import class_name, is_sharded
from fsdp2_strategy.model.ranks import on_ranks_of
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.rollout.stream import stream_weights, weight_checksums
from fsdp2_strategy.sharding.shard import is_for_training

Weights = Iterator[tuple[str, torch.Tensor]]


@runtime_checkable
class RolloutEngine(Protocol):
    """The interface of an inference engine, which may compute in this process or elsewhere.

    Four members are optional. ``weight_checksums() -> dict[str, str]`` returns checksums by Hugging Face name, as the
    function `weight_checksums` computes them; an update with ``verify`` calls it. ``weight_dtypes() -> dict[str, str]``
    returns the dtypes of the weights, such as "bfloat16"; if checksums differ, the error names them. ``is_asleep``, an
    attribute or a property, says whether the engine is asleep; without it, the last call of ``sleep`` or ``wake_up``
    decides. ``close()`` is called when an engine that was built by name is no longer used.
    """

    def update_weights(self, weights: Weights) -> object:
        """Load all weights from pairs of Hugging Face name and tensor; the engine may keep the tensors."""

    def sleep(self) -> object:
        """Free the device memory; the loaded weights must be available again after `wake_up`."""

    def wake_up(self) -> object:
        """Prepare to generate or to load weights."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate sequences."""


class TransformersEngine:
    """Generate with transformers, on this rank's own full copy of a sharded model; not collective.

    The copy has no weights before the first `update_weights`. Ranks generate independently, so the number and length of
    their sequences may differ.

    Args:
        model: the model, sharded or not, or its wrapper; may be on the meta device. Its modules are copied without
            adapters, because updates contain merged weights. Later changes to its modules do not affect the copy.
        dtype: dtype of the copy's floating-point parameters; None for the dtypes of the shards. "sent": the dtype of
            the weights that an update sends, so that the engine computes with the values of the trainer; until the
            first update bfloat16. Parameters that transformers keeps in fp32 stay in fp32.

    Raises:
        RolloutError: transformers cannot generate with the model, or the stream of its weights lacks a parameter.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | Literal["sent"] | None = "sent") -> None:
        takes_sent_dtype = dtype == "sent"
        dtype = torch.bfloat16 if isinstance(dtype, str) else dtype
        root: Any = without_adapters(unwrap_model(model)).model
        if not is_transformers_model(root) or not root.can_generate():
            raise RolloutError(
                f"cannot generate: the model is a {class_name(root)}, expected a transformers model with a "
                "generate method. Use another engine."
            )

        def empty_like(original: torch.Tensor) -> torch.Tensor:
            if not isinstance(original, nn.Parameter) and not original.is_meta:
                return original.detach().clone().to(current_device())
            is_cast = dtype and isinstance(original, nn.Parameter) and original.is_floating_point()
            its_dtype = dtype if is_cast else original.dtype
            return torch.empty(original.shape, dtype=its_dtype, device=current_device())

        copied: Any = meta_skeleton(root, empty_like).eval().requires_grad_(False)
        _copy_configs(copied)
        copied.config.dtype = dtype or copied.dtype
        keep_dtypes(copied, dtype_plan(copied, dtype) if dtype else None)
        if any(buffer.is_meta for buffer in root.buffers()):
            _compute_buffers(copied)
        self.model = copied
        self._loader = _WeightLoader(self.model, takes_sent_dtype=takes_sent_dtype)
        self.is_asleep = False
        self._has_weights = False

    def update_weights(self, weights: Weights) -> None:
        """Load all weights of the model from pairs of Hugging Face name and tensor.

        If this raises while the engine is awake, `generate` raises until an update succeeds.

        Raises:
            RolloutError: the engine is asleep; or a weight is missing, unknown, repeated or has another shape.
        """
        self._check_awake("update its weights")
        self._has_weights = False
        self._loader.load(weights)
        self._has_weights = True

    def weight_checksums(self) -> dict[str, str]:
        """Return the checksums of the engine's weights by Hugging Face name."""
        return weight_checksums(stream_weights(self.model, dtype=None))

    def weight_dtypes(self) -> dict[str, str]:
        """Return the dtypes of the engine's weights by Hugging Face name, for example "bfloat16"."""
        return {name: _short(tensor.dtype) for name, tensor in stream_weights(self.model, dtype=None)}

    def sleep(self) -> None:
        """Move the copy to host memory."""
        self.model.to("cpu")
        self.is_asleep = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Move the copy back to the device."""
        self.model.to(current_device())
        self.is_asleep = False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``model.generate`` on the copy, with the same arguments and result.

        Raises:
            RolloutError: the engine is asleep, or the last update of its weights is incomplete.
        """
        self._check_awake("generate")
        if not self._has_weights:
            raise RolloutError(
                "cannot generate: the engine does not have all of its weights, expected a complete update. Call "
                "update_engine_weights first."
            )
        with torch.no_grad():
            return self.model.generate(*args, **kwargs)

    def _check_awake(self, action: str) -> None:
        if self.is_asleep:
            raise RolloutError(
                f"cannot {action}: the engine is asleep, expected one that is awake. Call wakeup_inference_engine."
            )


def _compute_buffers(model: Any) -> None:
    """Compute the values of a model's buffers with transformers' ``initialize_weights``; keep the parameters."""
    for parameter in model.parameters():
        mark_initialized(parameter)
    model.initialize_weights()


def _copy_configs(model: nn.Module) -> None:
    """Copy each configuration once, and replace it in all modules that refer to it."""
    from transformers import GenerationConfig, PretrainedConfig  # noqa: PLC0415

    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PretrainedConfig | GenerationConfig):
                vars(module)[name] = copy.deepcopy(value, memo)


class _WeightLoader:
    """Load weights under Hugging Face names into an unsharded model, with the same conversions as from files.

    With ``takes_sent_dtype``, each parameter gets the dtype in which its values are sent; see `_SentDtypes`.
    """

    def __init__(self, model: Any, *, takes_sent_dtype: bool) -> None:
        copied: Any = meta_skeleton(model)
        self._model = model
        self._takes_sent_dtype = takes_sent_dtype
        regions = regions_to_write(copied, tensors_to_write(model, copied))
        nowhere = Path()
        self._expected = {name: Entry(name, nowhere, 0, r.dtype, tuple(r.shape)) for name, r in regions.items()}
        self._direct: dict[str, list[tuple[str, Piece]]] = {name: [] for name in self._expected}
        self._computed: list[tuple[str, Piece, set[str]]] = []
        recipe = recipe_for(source_of_weights(copied), self._expected).regions
        for own_name, region in recipe.items():
            for piece in region.pieces:
                if isinstance(piece.source, Computed):
                    needed = {entry.name for inner in piece.source.regions() for entry in sources_of(inner)}
                    self._computed.append((own_name, piece, needed))
                else:
                    self._direct[piece.source.name].append((own_name, piece))
        state = model.state_dict(keep_vars=True)
        reached = {id(state[own_name]) for own_name in recipe}
        if lost := [name for name, p in model.named_parameters() if id(p) not in reached]:
            raise RolloutError(
                f"cannot make an engine: {some(lost)} of {class_name(model)} are not in the stream of its weights, "
                "expected all parameters. Use another engine."
            )

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Write all weights into the model; raise if a weight is missing, unknown, repeated or has another shape."""
        # Built at each update, because `sleep` and `wake_up` move the parameters to new memory.
        state = {name: tensor.detach() for name, tensor in self._model.state_dict(keep_vars=True).items()}
        dtypes = _SentDtypes(self._model, state) if self._takes_sent_dtype else None
        missing = dict.fromkeys(self._expected)
        pending = list(self._computed)
        kept: dict[str, torch.Tensor] = {}  # received inputs of pending computations
        for name, given in weights:
            self._check(name, given, missing)
            del missing[name]
            tensor = given.contiguous()
            for own_name, piece in self._direct[name]:
                if dtypes:
                    dtypes.take(own_name, tensor.dtype)
                _write(state[own_name], piece, tensor)
            if any(name in needed for *_, needed in pending):
                kept[name] = tensor
                for own_name, piece, needed in (job for job in pending if job[2] <= kept.keys()):
                    if dtypes:
                        dtypes.take(own_name, functools.reduce(torch.promote_types, (kept[n].dtype for n in needed)))
                    _write(state[own_name], piece, _computed(piece, kept))
                pending = [job for job in pending if not job[2] <= kept.keys()]
                kept = {n: t for n, t in kept.items() if any(n in needed for *_, needed in pending)}
        if missing:
            raise RolloutError(
                f"cannot update weights: {some(list(missing))} were not received, expected all {len(self._expected)} "
                "weights. Stream the whole model."
            )
        if dtypes:
            self._model.config.dtype = dtypes.most_common()

    def _check(self, name: str, tensor: torch.Tensor, missing: Mapping[str, None]) -> None:
        if name not in missing:
            raise RolloutError(
                f"cannot update weights: {name} {'was received twice' if name in self._expected else 'is unknown'}, "
                f"expected each of {len(self._expected)} names once.{did_you_mean(name, missing)}"
            )
        if tuple(tensor.shape) != self._expected[name].shape:
            raise RolloutError(
                f"cannot update weights: {name} has shape {list(tensor.shape)}, expected "
                f"{list(self._expected[name].shape)}. Stream the model from which the engine was created."
            )


class _SentDtypes:
    """Give the parameters of a model the dtypes in which their values are sent, during one update.

    Each parameter is cast separately, because a stream may contain several dtypes: casting the whole model would round
    the values that have been received before. Parameters that transformers keeps in fp32 stay in fp32.
    """

    def __init__(self, model: Any, state: dict[str, torch.Tensor]) -> None:
        self._model = model
        self._state = state
        """The tensors that values are written into; those of cast parameters are replaced."""
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._names: dict[int, list[str]] = {}
        for name, parameter in self._parameters.items():
            self._names.setdefault(id(parameter), []).append(name)
        self._taken: set[int] = set()
        self._kept: dict[torch.dtype, dict[str, torch.dtype]] = {}

    def take(self, name: str, dtype: torch.dtype) -> None:
        """Cast a parameter to the dtype of values that will be written into it.

        If other values of this update are in it already, cast it to a dtype that can hold both.
        """
        parameter = self._parameters.get(name)
        if parameter is None or not (parameter.is_floating_point() and dtype.is_floating_point):
            return
        if id(parameter) in self._taken:
            dtype = torch.promote_types(parameter.dtype, dtype)
        self._taken.add(id(parameter))
        if dtype not in self._kept:
            self._kept[dtype] = planned_dtypes(self._parameters, dtype_plan(self._model, dtype))
        dtype = self._kept[dtype].get(name, dtype)
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
            self._state |= dict.fromkeys(self._names[id(parameter)], parameter.detach())

    def most_common(self) -> torch.dtype:
        """Return the dtype of most elements of the model's parameters."""
        counts = Counter[torch.dtype]()
        for parameter in self._model.parameters():
            counts[parameter.dtype] += parameter.numel() if parameter.is_floating_point() else 0
        return counts.most_common(1)[0][0]


def _computed(piece: Piece, arrived: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return value_of(piece.source, lambda entry: arrived[entry.name])


def _write(target: torch.Tensor, piece: Piece, value: torch.Tensor) -> None:
    view = value.as_strided(piece.shape, piece.strides, value.storage_offset() + piece.offset)
    target_of(target, piece).copy_(view, non_blocking=True)


Factory = Callable[[Any, nn.Module | None, torch.dtype | None], RolloutEngine | None]


def _transformers_engine(_args: Any, actor: nn.Module | None, dtype: torch.dtype | None) -> RolloutEngine:
    if actor is None:
        raise RolloutError(
            "cannot set up an engine: actor is None, expected the model that the engine 'transformers' copies. Pass "
            "actor."
        )
    return TransformersEngine(actor, dtype=dtype)


ENGINES: dict[str, Factory] = {"transformers": _transformers_engine}
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
