"""Compute the statistics of features for ``meta/stats.json`` and ``meta/episodes``.

Input: the values of an episode, or the statistics of several episodes. Output: the minimum, maximum, mean, standard
deviation, count and five quantiles by name. They are arrays of the feature's shape; for images, of shape (3, 1, 1) and
in [0, 1]. The count has shape (1,).

As in LeRobot, the statistics of a data set are aggregated from those of its episodes. The quantiles of a data set are
the means of its episodes' quantiles, weighted by count. The statistics of an episode are exact for numbers. For images,
they are computed on a sample of the frames and, if the images are large, of the pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Stats = dict[str, NDArray[Any]]

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def feature_stats(values: NDArray[Any]) -> Stats:
    """Return the statistics of an episode's numbers, of shape (T,) or (T, n); booleans are treated as 0 or 1."""
    return _by_row(values.reshape(len(values), -1).T, count=len(values))


def image_stats(images: NDArray[np.uint8]) -> Stats:
    """Return the statistics of an episode's images, of shape (T, height, width, 3), per channel."""
    length, height, width, channels = images.shape
    n = max(min(length, 100), min(int(length**0.75), 10_000))
    every = int(max(height, width) / 150) if max(height, width) >= 300 else 1
    chosen = images[np.round(np.linspace(0, length - 1, n)).astype(int), ::every, ::every]
    stats = _by_row(chosen.reshape(-1, channels).T, count=n)
    return {name: value if name == "count" else value.reshape(channels, 1, 1) / 255 for name, value in stats.items()}


def aggregate(episodes: Sequence[Stats]) -> Stats:
    """Aggregate the statistics of a feature over several episodes."""
    counts = np.concatenate([stats["count"] for stats in episodes])

    def mean(values: NDArray[Any]) -> NDArray[Any]:
        return np.tensordot(counts / counts.sum(), values, axes=1)

    stacked = {name: np.stack([stats[name] for stats in episodes]) for name in episodes[0]}
    centre = mean(stacked["mean"])
    return {
        "min": stacked["min"].min(axis=0),
        "max": stacked["max"].max(axis=0),
        "mean": centre,
        "std": np.sqrt(mean(stacked["std"] ** 2 + (stacked["mean"] - centre) ** 2)),
        "count": counts.sum(keepdims=True),
        **{name: mean(stacked[name]) for name in QUANTILES},
    }


def _by_row(values: NDArray[Any], *, count: int) -> Stats:
    values = np.ascontiguousarray(values)
    numbers = values.astype(np.uint8) if values.dtype == bool else values
    quantiles = np.quantile(numbers, list(QUANTILES.values()), axis=1)
    return {
        "min": values.min(axis=1),
        "max": values.max(axis=1),
        "mean": numbers.mean(axis=1, dtype=np.float64),
        "std": numbers.std(axis=1, dtype=np.float64),
        "count": np.array([count]),
        **dict(zip(QUANTILES, quantiles.astype(np.float64), strict=True)),
    }
