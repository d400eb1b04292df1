"""Choose a loader's data order and compute its fingerprint.

A loader accepts a saved position only if the position has the same fingerprint.

Input: a data set and a loader's arguments. Output: a function from epochs to orders, and the fingerprint (JSON values).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from fsdp2_strategy.data.orders import EpisodeOrder, GlobalOrder, MixtureOrder, Order, SequentialOrder, checked_list
from fsdp2_strategy.data.permutation import Indices
from fsdp2_strategy.errors import DataError


@dataclass(frozen=True)
class LaneLayout:
    """The batches that the lanes of each epoch's order are laid out for; see ``lanes`` in `EpisodeOrder`."""

    epoch: int
    """The first epoch with this layout."""
    batch: int
    """Number of samples of a global batch."""
    offset: int
    """Index of the first sample of ``epoch`` within its batch."""


def choose_order(
    dataset: Any,
    batch: int,
    seed: int,
    *,
    tail: str,
    shuffle: bool,
    pool: int | None,
    lanes: int,
    weights: Sequence[float] | None,
) -> tuple[dict[str, Any], Callable[[int, LaneLayout], Order]]:
    """Return the fingerprint, and a function that returns the order of an epoch, given the layout of its lanes."""
    n = len(dataset)
    facts: dict[str, Any] = {"n": n, "seed": seed, "global_batch_size": batch, "tail": tail}
    if (pool is None and lanes != 1) or (pool is not None and weights is not None):
        raise DataError(
            f"cannot order samples: pool is {pool}, lanes {lanes}, weights {weights}, expected a pool (with or without "
            "lanes), weights, or neither. Remove the arguments that do not fit."
        )
    if not shuffle:
        if pool is not None or weights is not None:
            raise DataError(
                f"cannot order samples: shuffle is False, pool {pool}, weights {weights}, expected no pool and no "
                "weights without shuffling. Remove the arguments that do not fit."
            )
        return {**facts, "shuffle": False}, lambda *_: SequentialOrder(n)
    if pool is not None:
        lengths = _episode_lengths(dataset, n)
        digest = hashlib.blake2b(lengths.tobytes(), digest_size=8).hexdigest()
        facts |= {"pool": int(pool), "lanes": int(lanes), "episodes": digest}

        def episode_order(epoch: int, layout: LaneLayout) -> Order:
            offset = (layout.offset + (epoch - layout.epoch) * n) % layout.batch if tail == "carry" else 0
            return EpisodeOrder(lengths, seed, epoch, pool, lanes=lanes, batch=layout.batch, offset=offset)

        return facts, episode_order
    if weights is not None:
        if not isinstance(dataset, ConcatDataset):
            raise DataError(
                f"cannot mix data sets: the data set is a {type(dataset).__name__}, expected a ConcatDataset with one "
                "data set for each weight. Combine them in a ConcatDataset."
            )
        parts = [len(part) for part in dataset.datasets]  # type: ignore[arg-type]
        weights = checked_list("mix data sets", "weights", weights, integers=False)
        facts |= {"lengths": parts, "weights": [float(w) for w in weights]}
        return facts, lambda epoch, _: MixtureOrder(parts, weights, seed, epoch)
    return facts, lambda epoch, _: GlobalOrder(n, seed, epoch)


def _episode_lengths(dataset: Any, n: int) -> Indices:
    given = getattr(dataset, "episode_lengths", None)
    lengths = np.asarray([] if given is None else given, dtype=np.int64)
    if lengths.sum() != n:
        raise DataError(
            f"cannot pool episodes: episode_lengths of {type(dataset).__name__} add up to {lengths.sum()}, expected "
            f"its {n} samples. Set that attribute to the length of each episode, in order."
        )
    return lengths
