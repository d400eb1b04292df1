"""Data sets whose images and values tell which episode, frame and camera they are of, also after a lossy codec.

Input: these numbers, or an image. Output: a data set in LeRobot's format, an image, or its numbers.

48 cells, 6 rows of 8 in the middle of the image, are white for 1 and black for 0: 16 bits for the episode, 16 for the
frame, 4 for the camera, and 12 for a checksum of these, each with its highest bit first. The whole image has a texture
that differs from frame to frame, so that files are about as large as those of real cameras.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from lerobot_writer import DatasetWriter
from numpy.typing import NDArray

from fsdp2_strategy.errors import DataError

Image = NDArray[np.uint8]

_ROWS, _COLUMNS = 6, 8
_WIDTHS = {"episode": 16, "frame": 16, "camera": 4}
_CHECKSUM_BITS = 12
_BLACK, _WHITE, _TEXTURE = 16, 176, 64
_LEAST_CELL = 4

TASKS = ("pick up the cube", "put the cube into the box", "öffne die Schublade")


def write_barcoded(
    root: str | Path,
    lengths: Sequence[int],
    *,
    fps: int = 10,
    cameras: Sequence[str] = ("observation.images.top",),
    image_cameras: Sequence[str] = (),
    height: int = 64,
    width: int = 96,
    tasks: Sequence[str] = TASKS,
    episodes_per_data_file: int | None = 4,
    episodes_per_video_file: int | None = 3,
    **options: Any,
) -> Path:
    """Write a data set whose values identify the episode and frame that they belong to.

    ``observation.state`` is (episode, frame), ``action`` (episode + 0.5, frame + 0.5), both exact in float32.
    ``next.done`` is True for the last frame of an episode. Images are ``barcode(episode, frame, camera=...)``; cameras
    are numbered from 0, videos before images. Episode ``i`` has the task ``tasks[i % len(tasks)]``.

    Args:
        root: a folder that does not exist or is empty.
        lengths: number of frames of each episode.
        fps: frames per second.
        cameras: names of the features that are stored as video.
        image_cameras: names of the features that are stored as PNG in the tables.
        height: height of the images, an even number.
        width: width of the images, an even number.
        tasks: tasks in words.
        episodes_per_data_file: maximum number of episodes per file.
        episodes_per_video_file: maximum number of episodes per file.
        options: further arguments of ``DatasetWriter``.

    Returns:
        The folder.
    """
    image = {"shape": (height, width, 3), "names": ["height", "width", "channels"]}
    features: dict[str, dict[str, Any]] = {
        "observation.state": {"dtype": "float32", "shape": (2,), "names": ["episode", "frame"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["episode", "frame"]},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        **{name: {"dtype": "video", **image} for name in cameras},
        **{name: {"dtype": "image", **image} for name in image_cameras},
    }
    with DatasetWriter(
        root,
        fps=fps,
        features=features,
        episodes_per_data_file=episodes_per_data_file,
        episodes_per_video_file=episodes_per_video_file,
        **options,
    ) as writer:
        for episode, length in enumerate(lengths):
            state = np.stack([np.full(length, episode), np.arange(length)], axis=-1).astype(np.float32)
            frames = {"observation.state": state, "action": state + 0.5, "next.done": np.arange(length) == length - 1}
            for camera, name in enumerate([*cameras, *image_cameras]):
                images = [barcode(episode, frame, height, width, camera=camera) for frame in range(length)]
                frames[name] = np.stack(images)
            writer.add_episode(frames, tasks[episode % len(tasks)])
    return Path(root)


def barcode(episode: int, frame: int, height: int, width: int, *, camera: int = 0) -> Image:
    """Draw the image of a frame.

    Args:
        episode: below 2^16.
        frame: below 2^16.
        height: height of the image in pixels, at least 32.
        width: width of the image in pixels, at least 48.
        camera: below 16.

    Returns:
        RGB image (height, width, 3), uint8.

    Raises:
        DataError: a number does not fit, or the image is too small.
    """
    top, left, cell = _geometry(height, width)
    payload = 0
    for (name, bits), value in zip(_WIDTHS.items(), (episode, frame, camera), strict=True):
        if not 0 <= value < 1 << bits:
            raise DataError(f"cannot draw a barcode: {name} is {value}, expected 0 to {(1 << bits) - 1}. Write fewer.")
        payload = payload << bits | value
    code = payload << _CHECKSUM_BITS | _checksum(payload)
    bits_of_code = np.array([code >> i & 1 for i in reversed(range(_ROWS * _COLUMNS))]).reshape(_ROWS, _COLUMNS)
    image = _background(height, width, frame)
    cells = np.where(bits_of_code, _WHITE, _BLACK).repeat(cell, 0).repeat(cell, 1)
    image[top : top + _ROWS * cell, left : left + _COLUMNS * cell] = cells[..., None]
    grain = cell // 4
    texture = np.random.default_rng((episode, frame, camera)).integers(
        0, _TEXTURE, (-(-height // grain), -(-width // grain)), dtype=np.uint8
    )
    image += texture.repeat(grain, 0).repeat(grain, 1)[:height, :width, None]
    return image


def read_barcode(image: Any) -> tuple[int, int]:
    """Return the episode and the frame that an image encodes.

    Args:
        image: (height, width, 3) or (3, height, width), an array or a tensor: integers below 256, or floats in [0, 1].

    Raises:
        DataError: the image was not drawn by `barcode`, or was cropped, rotated or changed too much since.
    """
    episode, frame, _ = _read(image)
    return episode, frame


def read_camera(image: Any) -> int:
    """Return the camera that an image encodes; arguments and errors are those of `read_barcode`."""
    return _read(image)[2]


def _read(image: Any) -> tuple[int, int, int]:
    pixels = np.asarray(image)
    if pixels.ndim != 3 or 3 not in (pixels.shape[0], pixels.shape[-1]):
        raise DataError(
            f"cannot read a barcode: the image's shape is {pixels.shape}, expected (height, width, 3) or (3, height, "
            "width). Take one image out of a batch."
        )
    grey = pixels.mean(axis=-1 if pixels.shape[-1] == 3 else 0, dtype=np.float64)
    if np.issubdtype(pixels.dtype, np.floating):
        grey *= 255
    top, left, cell = _geometry(*grey.shape)
    edge = cell // 4  # a codec blurs the edges between cells
    cells = grey[top : top + _ROWS * cell, left : left + _COLUMNS * cell].reshape(_ROWS, cell, _COLUMNS, cell)
    means = cells[:, edge : cell - edge, :, edge : cell - edge].mean(axis=(1, 3)).ravel()
    code = int("".join("1" if mean > 128 else "0" for mean in means), 2)
    payload, checksum = code >> _CHECKSUM_BITS, code & (1 << _CHECKSUM_BITS) - 1
    if checksum != _checksum(payload) or np.abs(means - 128).min() < 24:
        raise DataError(
            f"cannot read a barcode: the checksum is {checksum}, expected {_checksum(payload)}, with cells at least "
            f"{np.abs(means - 128).min():.0f} from grey, expected 24. Give an image as barcode() draws it."
        )
    values = []
    for bits in reversed(_WIDTHS.values()):
        values.append(payload & (1 << bits) - 1)
        payload >>= bits
    camera, frame, episode = values
    return episode, frame, camera


def _geometry(height: int, width: int) -> tuple[int, int, int]:
    """Return the top and left edge of the grid of cells, and the size of a cell, in pixels."""
    cell = min(height // (_ROWS + 2), width // (_COLUMNS + 4))
    if cell < _LEAST_CELL:
        raise DataError(
            f"cannot draw or read a barcode: the image is {height}x{width}, expected at least "
            f"{(_ROWS + 2) * _LEAST_CELL}x{(_COLUMNS + 4) * _LEAST_CELL}. Use larger images."
        )
    return (height - _ROWS * cell) // 2, (width - _COLUMNS * cell) // 2, cell


def _checksum(payload: int) -> int:
    # The checksum of 0 is not 0, so that a black image is not a valid barcode.
    return zlib.crc32(payload.to_bytes(5, "big")) & (1 << _CHECKSUM_BITS) - 1


def _background(height: int, width: int, frame: int) -> Image:
    """Draw colour gradients that move from frame to frame."""
    shift = np.array([0, frame % 256, 2 * frame % 256], dtype=np.uint8)
    return np.take(_TRIANGLE, _slopes(height, width) + shift)


@lru_cache(maxsize=8)
def _slopes(height: int, width: int) -> Image:
    down, right = np.ogrid[:height, :width]
    return np.stack([2 * down + right, down + 2 * right, right - down], axis=-1).astype(np.uint8)


_TRIANGLE = (np.abs(np.arange(256) - 128) + 48).astype(np.uint8)
