"""Draw the order of a trainer's samples equally on all ranks, and equally again after a resume.

Input: the data loaders of a trainer. Output: the same loaders, whose samplers draw from random states of their own.

[Note: sample order] Samplers draw from the random generators of the process (``group_by_length``,
``WeightedRandomSampler``), or from a generator that they keep over epochs. A resume in the middle of an epoch skips the
first batches of the epoch. So it must draw them from the states that the generators had at the start of the epoch, and
not from those of the checkpoint, which the rest of the training continues with. Hence a sampler draws from a copy of
rank 0's states at the start of the epoch, whenever it draws: as in the Trainer, the order follows from these states,
and then it depends neither on what else draws random numbers, nor on the rank. A checkpoint contains these states if
the sampler has drawn from them.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from fsdp2_strategy.checkpoint.random_state import load_rng, rng_content
from fsdp2_strategy.distributed.agreement import from_rank_0
from fsdp2_strategy.distributed.generators import host_states, set_host_states

_END = object()


class SampleOrder:
    """The random states that the samplers of one trainer draw from; see [Note: sample order]."""

    def __init__(self) -> None:
        self._is_training = False
        self._start: dict[str, Any] | None = None
        """The states at the start of the running epoch."""
        self._sampler: object = None
        """The sampler of the running epoch."""
        self._has_drawn = False
        """Whether the sampler has drawn from the generators of the process."""
        self._resumed: dict[str, Any] | None = None

    def follow(self, loader: Any) -> None:
        """Make the sampler of a loader that accelerate has prepared draw from these states; not collective.

        Evaluations are not affected. A stream (``IterableDataset``) has no sampler.
        """
        sampler = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
        while isinstance(sampler, BatchSamplerShard):
            sampler = sampler.batch_sampler
        if isinstance(loader.dataset, IterableDataset) or sampler is None or isinstance(sampler, list | tuple):
            return
        if getattr(type(sampler), "sample_order", None) is self:
            return
        # With `dispatch_batches`, rank 0 alone iterates.
        order, cls, is_on_all_ranks = self, type(sampler), not isinstance(loader, DataLoaderDispatcher)

        def batches(own: Any) -> Iterator[Any]:
            return order._batches(own, partial(cls.__iter__, own), is_on_all_ranks)

        # A subclass, and not a wrapper: accelerate and the Trainer look for attributes and types of the sampler.
        names = {"__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__, "sample_order": self}
        sampler.__class__ = type(cls.__name__, (cls,), {"__iter__": batches, **names})

    @contextmanager
    def of_training(self) -> Iterator[None]:
        """Apply to epochs that begin in this block; if one begins, the block is collective."""
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False

    def saved(self) -> dict[str, Any] | None:
        """Return what a checkpoint needs to continue the order, as JSON; None if nothing; not collective."""
        own = [] if self._sampler is None else _generators_of(self._sampler)
        if self._start is None or not (self._has_drawn or own):
            return None
        return {"start": self._start, "own": [_text_of(each) for each in own]}

    def resume(self, saved: dict[str, Any] | None, *, is_within_epoch: bool) -> None:
        """Begin the next epoch with the states that `saved` returned; not collective."""
        self._resumed = None
        if saved is not None:
            self._resumed = saved["start"] if is_within_epoch else {"process": None, "own": saved["own"]}

    def _batches(self, sampler: Any, iterate: Callable[[], Iterator[Any]], is_on_all_ranks: bool) -> Iterator[Any]:
        if not self._is_training:
            yield from iterate()
            return
        inside, batches = self._begin_epoch(sampler, is_on_all_ranks), iterate()
        is_first = True
        while True:
            outside, before = host_states(), inside
            set_host_states(inside)
            try:
                batch = next(batches, _END)
                inside = host_states()
                if is_first and _are_equal(outside, before):
                    outside = inside  # as without this class: most samplers draw a whole epoch at its start
            finally:
                set_host_states(outside)
            self._has_drawn, is_first = self._has_drawn or not _are_equal(inside, before), False
            if batch is _END:
                return
            yield batch

    def _begin_epoch(self, sampler: Any, is_on_all_ranks: bool) -> Any:
        """Set the sampler's own generators, and return the states of the process that it draws from."""
        own, of_process = _generators_of(sampler), rng_content()
        start: dict[str, Any] = {"process": base64.b64encode(of_process).decode()}
        start["own"] = [_text_of(each) for each in own]
        if self._resumed is not None:
            start |= {name: value for name, value in self._resumed.items() if value is not None}
            self._resumed = None
        if is_on_all_ranks:
            start = from_rank_0(start)
        self._start, self._sampler, self._has_drawn = start, sampler, False
        for generator, text in zip(own, start["own"], strict=False):
            generator.set_state(torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8))
        load_rng(base64.b64decode(start["process"]))
        states = host_states()
        load_rng(of_process)
        return states


def _generators_of(sampler: object) -> list[torch.Generator]:
    """Return the generators that a sampler, or a sampler within it, keeps."""
    found: list[torch.Generator] = []
    for value in getattr(sampler, "__dict__", {}).values():  # a class with slots keeps nothing there
        if isinstance(value, torch.Generator):
            found.append(value)
        elif isinstance(value, Sampler):
            found += _generators_of(value)
    return found


def _text_of(generator: torch.Generator) -> str:
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def _are_equal(states: Any, others: Any) -> bool:
    python, numpy, of_torch = states
    return bool(
        python == others[0]
        and numpy["state"]["pos"] == others[1]["state"]["pos"]
        and (numpy["state"]["key"] == others[1]["state"]["key"]).all()
        and torch.equal(of_torch, others[2])
    )
