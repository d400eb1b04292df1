"""Convert time windows around a frame to rows of its episode, with padding at the ends of the episode.

Input: for each feature with a window, seconds relative to a frame. Output: rows of the episode, and a mask of the rows
that are padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fsdp2_strategy.errors import DataError, did_you_mean

Offsets = npt.NDArray[np.int64]


def offsets_of(
    delta_timestamps: Mapping[str, Sequence[float]], features: Iterable[str], fps: float, tolerance_s: float
) -> dict[str, Offsets]:
    """Convert the steps of each window from seconds to numbers of frames; see `LeRobotDataset`."""
    found = {}
    for key, seconds in delta_timestamps.items():
        if key not in features:
            raise DataError(
                f"cannot make windows: {key!r} is not a feature, expected one of {', '.join(sorted(features))}."
                f"{did_you_mean(key, features)}"
            )
        steps = np.asarray(seconds, dtype=np.float64).reshape(-1)
        offsets = np.rint(steps * fps).astype(np.int64)
        wrong = steps[np.abs(offsets / fps - steps) > tolerance_s]
        if wrong.size or not steps.size:
            found_steps = f"its steps in seconds include {wrong[:3].tolist()}" if wrong.size else "it has no steps"
            raise DataError(
                f"cannot make windows of {key!r}: {found_steps}, expected at least one step, all "
                f"multiples of 1/{fps:g} within {tolerance_s:g}. Round them, or increase tolerance_s."
            )
        found[key] = offsets
    return found


def window(frame: int, offsets: Offsets, length: int) -> tuple[Offsets, npt.NDArray[np.bool_]]:
    """Return the rows of a window, clamped to an episode of ``length`` frames, and a mask of the clamped rows."""
    rows = frame + offsets
    clamped = np.clip(rows, 0, length - 1)
    return clamped, rows != clamped
