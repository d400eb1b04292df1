"""Which frames a sample spans: steps in time as steps in frames, held at the edges of the episode.

Input: seconds before and after a frame, for each feature that wants them. Output: rows of the episode, and which
of them stand for frames that it does not have.
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
    """Return the steps of each feature in frames.

    Args:
        delta_timestamps: seconds from the sample's frame, by feature.
        features: those that there are.
        fps: frames a second.
        tolerance_s: how far a step may be from a frame, in seconds.

    Raises:
        DataError: a feature does not exist, or a step is no whole number of frames.
    """
    found = {}
    for key, seconds in delta_timestamps.items():
        if key not in features:
            raise DataError(
                f"cannot make windows: {key!r} is no feature, expected one of {', '.join(sorted(features))}."
                f"{did_you_mean(key, features)}"
            )
        steps = np.asarray(seconds, dtype=np.float64).reshape(-1)
        offsets = np.rint(steps * fps).astype(np.int64)
        wrong = steps[np.abs(offsets / fps - steps) > tolerance_s]
        if wrong.size or not steps.size:
            raise DataError(
                f"cannot make windows of {key!r}: its steps in seconds are {wrong[:3].tolist()}, expected multiples of "
                f"1/{fps:g} within {tolerance_s:g}, at least one. Round them, or raise tolerance_s."
            )
        found[key] = offsets
    return found


def window(frame: int, offsets: Offsets, length: int) -> tuple[Offsets, npt.NDArray[np.bool_]]:
    """Return the rows of a window, and which are padding: before the first or after the last of ``length`` frames."""
    rows = frame + offsets
    held = np.clip(rows, 0, length - 1)
    return held, rows != held
