"""Find out how the sequences of a model can be split, on a tiny model with the same configuration.

Input: a model and a number of ranks. Output: a `SplitPlan`. A tiny model of the same class is run on full sequences,
and by threads on their parts; logits and losses are compared. Plain, padded and packed sequences are tried.

Attention that calls the functions of transformers' registry is split. Modules that mix tokens in another way run on
full sequences (`full_sequences`). If the values still differ, all modules that mix tokens do so, and at last entire
blocks. If all this fails, the model is refused, with what was seen.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.errors import FSDP2StrategyError
from fsdp2_strategy.hf.library_internals import attention_implementation
from fsdp2_strategy.model.fsdp_state import class_name, original_class
from fsdp2_strategy.parallel.sequence.attention import calling_modules, configured_name
from fsdp2_strategy.parallel.sequence.full_sequences import computes_parts, mixes_tokens
from fsdp2_strategy.parallel.sequence.ranks import SequenceRanks, run_in_threads
from fsdp2_strategy.parallel.sequence.shard import shard_sequence
from fsdp2_strategy.parallel.sequence.split import (
    SplitPlan,
    blocks_of,
    decoder_of,
    modules_outside,
    positions_without_padding,
    split_sequences,
)
from fsdp2_strategy.parallel.tiny_config import tiny_config
from fsdp2_strategy.parallel.tiny_model import SEED, build_tiny, use_attention_of_cpu

_LENGTH = 22
_TOLERANCE = 1e-5
"""Largest relative difference of logits; models compute parts of them in float32."""
_NOISE = 0.1
"""Standard deviation of what is added to weights, so that each token depends on the tokens before it."""
_DEPENDENCE = 1e-2
"""Smallest relative change of the second half of the logits if all tokens of the first half change."""

Batch = dict[str, Any]


def plan_split(model: Any, count: int) -> SplitPlan:
    """Return how a model of transformers can split sequences over ``count`` ranks; the same on all ranks."""
    failure: Exception | None = None
    for dtype in (torch.float64, torch.float32):  # some models compute in float32 only
        try:
            cls, config = original_class(model), tiny_config(model.config)
            implementation = attention_implementation(model.config.get_text_config()) or "eager"
            use_attention_of_cpu(config, cls, configured_name(implementation))
            tiny = build_tiny(cls, config, dtype, noise=_NOISE)
            plan = _first_that_works(tiny, count)
            return dataclasses.replace(plan, padding_position=_padding_position(tiny, count))
        except Exception as error:  # noqa: BLE001  models run arbitrary code
            failure = failure or error
    return SplitPlan(refused=(("plain", f"failed: {_text(failure)}"),))


def _first_that_works(tiny: Any, count: int) -> SplitPlan:
    batches = dict(_batches(tiny.config.get_text_config(), count))
    expected = {kind: _run(tiny, batch) for kind, batch in batches.items()}
    plain = expected["plain"]
    if isinstance(plain, Exception):
        raise plain
    if _dependence(tiny, batches["plain"], plain[0]) < _DEPENDENCE:
        return SplitPlan(refused=(("plain", "shows no effect of tokens on later ones in a tiny model"),))
    found = []
    # A model around a decoder may make masks from its own tokens, such as one that lets images see all of themselves.
    is_around = decoder_of(tiny) is not tiny.base_model
    for choice, is_inside in itertools.product(_choices(tiny, batches["plain"]), (False, True)[: 1 + is_around]):
        if is_inside and choice.outside:
            continue
        plan = dataclasses.replace(choice, is_inside=is_inside)
        problems = _problems(tiny, plan, count, batches, expected)
        if "packed" in problems:
            mixing = dataclasses.replace(plan, packs=False)
            if not _problems(tiny, mixing, count, {"packed": batches["packed"]}, expected):
                plan = mixing
                del problems["packed"]
        found.append(dataclasses.replace(plan, refused=tuple(problems.items())))
        if not problems:
            break
    usable = [plan for plan in found if "plain" not in dict(plan.refused)]
    if usable:
        return min(usable, key=lambda plan: len(plan.refused))
    if "position_ids" not in inspect.signature(decoder_of(tiny).forward).parameters:
        return SplitPlan(refused=(("plain", "takes no position_ids"),))
    return SplitPlan(refused=found[-1].refused[:1])


def _dependence(tiny: Any, batch: Batch, values: torch.Tensor) -> float:
    """Return how much the second half of the logits changes if the tokens of the first half do."""
    ids = batch["input_ids"]
    half = ids.shape[1] // 2
    changed = _run(tiny, {"input_ids": torch.cat([ids[:, :half].flip(0), ids[:, half:]], dim=1)})
    if isinstance(changed, Exception):
        raise changed
    if values.shape[1] != ids.shape[1]:
        return math.inf  # `_difference` refuses the model
    return float((changed[0] - values)[:, half:].abs().max() / values.abs().max())


def _choices(tiny: Any, batch: Batch) -> Iterator[SplitPlan]:
    """Yield plans with modules that may have to run on full sequences; those that save more come first."""
    children = {
        module: (name, class_name(module))
        for block in blocks_of(tiny)
        for name, module in block.named_children()
        if not isinstance(module, nn.ModuleList)
    }
    others = {module: name for name, module in modules_outside(tiny).items()}
    observed = copy.deepcopy(tiny)
    copies = dict(zip(tiny.modules(), observed.modules(), strict=True))
    split_sequences(observed, SplitPlan())
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (args, dict(kwargs)))

    hooks = [copies[module].register_forward_pre_hook(record, with_kwargs=True) for module in (*children, *others)]
    with calling_modules() as callers, torch.no_grad():
        observed(**batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    called = {module: (copies[module], *calls[copies[module]]) for module in copies if copies[module] in calls}
    mixing = {module for module in children if module in called and mixes_tokens(*called[module])}
    attending = {module for module in mixing if callers.intersection(copies[module].modules())}
    length = batch["input_ids"].shape[1]
    outside = frozenset(
        name for module, name in others.items() if module in called and not computes_parts(*called[module], length)
    )
    for full in (
        frozenset(children[module] for module in mixing - attending),
        frozenset(children[module] for module in mixing),
        frozenset(("", class_name(block)) for block in blocks_of(tiny)),
    ):
        yield SplitPlan(full=full)
        if outside:
            yield SplitPlan(full=full, outside=outside, makes_positions=True)


def _batches(config: Any, count: int) -> Iterator[tuple[str, Batch]]:
    length = _LENGTH * max(1, -(-2 * count // _LENGTH)) + 1
    ids = torch.randint(3, min(config.vocab_size, 64), (2, length), generator=torch.Generator().manual_seed(SEED))
    yield "plain", {"input_ids": ids}
    yield "loss", {"input_ids": ids, "labels": ids.where(ids % 5 != 0, -100)}
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, -4:] = 0, 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    yield "padded", {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    packed = torch.cat([torch.arange(n) for n in (5, length // 2, length - length // 2 - 5)]).expand(2, -1)
    has_axes = "mrope_section" in str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    yield "packed", {"input_ids": ids, "position_ids": packed.expand(4, 2, -1) if has_axes else packed}


def _padding_position(tiny: Any, count: int) -> int | None:
    """Return the position that a model gives to padding by default; None if its positions count padding."""
    padded = dict(_batches(tiny.config.get_text_config(), count))["padded"]
    mask, everything = padded["attention_mask"], {"input_ids": padded["input_ids"]}

    def run(positions: torch.Tensor | None) -> tuple[Any, Any] | Exception:
        return _run(tiny, {**everything, "attention_mask": mask, "position_ids": positions})

    default, counting = run(None), run(torch.arange(mask.shape[1])[None])
    if isinstance(default, Exception) or isinstance(counting, Exception) or default[0] is None:
        return None
    if not _difference([counting], default, padded):
        return None
    for position in (0, -1):
        found = run(positions_without_padding(mask, position))
        if not isinstance(found, Exception) and not _difference([found], default, everything):
            return position
    return None


def _run(model: Any, batch: Batch) -> tuple[Any, Any] | Exception:
    """Return the logits (or hidden states) and the loss of a batch; an exception if the model cannot compute it."""
    try:
        with torch.no_grad():
            output = model(**batch, use_cache=False)
    except Exception as error:  # noqa: BLE001  models run arbitrary code
        return error
    values = getattr(output, "logits", None)
    values = getattr(output, "last_hidden_state", None) if values is None else values
    return values, getattr(output, "loss", None)


def _problems(
    tiny: Any, plan: SplitPlan, count: int, batches: dict[str, Batch], expected: dict[str, Any]
) -> dict[str, str]:
    """Return for each kind of batch what is wrong if it is split; kinds that fail for full sequences are left out."""
    copies = [copy.deepcopy(tiny) for _ in range(count)]
    for own in copies:
        split_sequences(own, plan)
    problems = {}
    for kind, batch in batches.items():
        full = expected[kind]
        if isinstance(full, Exception) or full[0] is None:
            continue

        def run(ranks: SequenceRanks, batch: Batch = batch) -> tuple[torch.Tensor, torch.Tensor | None]:
            found = _run(copies[ranks.rank], shard_sequence(batch, ranks))
            if isinstance(found, Exception):
                raise found
            return found

        try:
            parts = run_in_threads(count, run)
        except Exception as error:  # noqa: BLE001  models run arbitrary code
            problems[kind] = _reason(error)
            continue
        if problem := _difference(parts, full, batch):
            problems[kind] = problem
    return problems


def _difference(parts: list[Any], full: tuple[torch.Tensor, torch.Tensor | None], batch: Batch) -> str:
    """Return how the values of the parts differ from those of full sequences; an empty text if they do not."""
    values, loss = full
    length = batch["input_ids"].shape[1]
    found = torch.cat([part for part, _ in parts], dim=1)
    if found.shape[:1] != values.shape[:1] or found.shape[1] < length or values.shape[1] != length:
        return f"returns {list(parts[0][0].shape)} for a part and {list(values.shape)} for full sequences"
    is_token = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(batch["input_ids"]) > 0
    is_token = is_token & values.isfinite().flatten(2).all(dim=2)
    difference = (found[:, :length] - values)[is_token].abs().max() / values[is_token].abs().max()
    if not difference <= _TOLERANCE:
        return f"computes other values (relative difference {difference.item():.1e})"
    if loss is not None:
        mean = torch.stack([own for _, own in parts]).mean()
        if not abs(mean - loss) <= _TOLERANCE * abs(loss):
            return f"computes another loss ({mean.item():.6g} instead of {loss.item():.6g})"
    return ""


def _reason(error: Exception) -> str:
    if isinstance(error, RuntimeError | AssertionError | IndexError):  # of tensors whose shapes do not fit
        return f"builds masks or positions for a part, outside of its blocks ({_text(error)})"
    return f"failed: {_text(error)}"


def _text(error: object) -> str:
    text = str(error).strip().splitlines()
    name = "" if isinstance(error, FSDP2StrategyError) else f"{type(error).__name__}: "
    return name + (text[-1] if text else "no message")
