"""Write mp4 files that contain several consecutive episodes.

Input: the frames of each episode. Output: files with one video stream. Its time stamps are multiples of 1/fps.

Each episode is encoded separately, so that it starts with a key frame. Its packets are then appended to the file.
Encoders use one thread, so that equal frames give equal bytes. The index is at the start of the file (faststart).
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, cast

import av
import numpy as np
from av.container import OutputContainer
from numpy.typing import NDArray

from fsdp2_strategy.errors import DataError

Codec = Literal["libx264", "libsvtav1"]

_CRF: dict[str, int] = {"libx264": 23, "libsvtav1": 30}
_PRESET: dict[str, str] = {"libx264": "veryfast", "libsvtav1": "10"}
_NAMES: dict[str, str] = {"libx264": "h264", "libsvtav1": "av1"}


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Settings of the video encoder.

    libsvtav1 logs its settings to standard error, unless the environment has ``SVT_LOG=1``.
    """

    fps: int
    codec: Codec = "libx264"
    gop: int = 2
    """Interval of key frames within an episode, in frames."""
    b_frames: int = 0
    """Maximum number of consecutive B-frames. For libsvtav1, any positive number enables B-frames without a limit."""
    crf: int | None = None
    """Constant rate factor (lower is better quality); None for the codec's default."""

    def __post_init__(self) -> None:
        for name, least in (("fps", 1), ("gop", 1), ("b_frames", 0)):
            if not isinstance(value := getattr(self, name), int) or value < least:
                raise DataError(
                    f"cannot encode videos: {name} is {value!r}, expected an integer of at least {least}. Change it."
                )
        if self.codec not in _CRF:
            raise DataError(f"cannot encode videos: codec is {self.codec!r}, expected one of {list(_CRF)}. Change it.")

    @property
    def quality(self) -> int:
        """The constant rate factor in use."""
        return _CRF[self.codec] if self.crf is None else self.crf

    @property
    def delay(self) -> int:
        """Maximum number of frames that must be decoded before the first one can be shown."""
        return 2 if self.codec == "libx264" and self.b_frames else 0

    def options(self) -> dict[str, str]:
        """Return the codec's options."""
        common = {"g": str(self.gop), "crf": str(self.quality), "preset": _PRESET[self.codec]}
        if self.codec == "libx264":
            # sc_threshold=0 allows key frames only at multiples of gop. mbtree=0 disables macroblock-tree rate control:
            # with it and B-frames, equal frames can give different bytes in different runs.
            fixed = {"sc_threshold": "0", "mbtree": "0", "threads": "1"}
            return common | fixed | {"bf": str(self.b_frames)}
        order = 2 if self.b_frames else 1
        return common | {"svtav1-params": f"pred-struct={order}:lp=1"}

    def info(self, height: int, width: int) -> dict[str, Any]:
        """Return the description of a camera's videos for ``meta/info.json``."""
        return {
            "video.height": height,
            "video.width": width,
            "video.codec": _NAMES[self.codec],
            "video.pix_fmt": "yuv420p",
            "video.fps": self.fps,
            "video.channels": 3,
            "is_depth_map": False,
            "has_audio": False,
            "video.g": self.gop,
            "video.crf": self.quality,
            "video.preset": _PRESET[self.codec],
        }


@dataclass(frozen=True)
class EncodedEpisode:
    """The video of one episode."""

    mp4: bytes
    frames: int


def encode(frames: NDArray[np.uint8], encoding: Encoding) -> EncodedEpisode:
    """Encode the frames of one episode, of shape (T, height, width, 3).

    Raises:
        DataError: the encoder rejects the size of the frames, or its options.
    """
    height, width = frames.shape[1:3]
    memory = io.BytesIO()
    try:
        with av.open(memory, "w", format="mp4") as container:
            stream = container.add_stream(encoding.codec, rate=encoding.fps, options=encoding.options())
            stream.height, stream.width, stream.pix_fmt, stream.thread_count = height, width, "yuv420p", 1
            for i, pixels in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
                frame.pts = i
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    except av.FFmpegError as error:
        raise DataError(
            f"cannot encode a video: {encoding.codec} fails on frames of {height}x{width} ({error}), expected a size "
            "and options that it supports. Change them, or the codec."
        ) from error
    return EncodedEpisode(memory.getvalue(), len(frames))


class VideoFile:
    """An mp4 file that is written episode by episode."""

    def __init__(self, path: Path, encoding: Encoding) -> None:
        self._encoding, self._frames, self._bytes = encoding, 0, 0
        self._container: OutputContainer = av.open(str(path), "w", format="mp4", options={"movflags": "faststart"})

    def bytes_with(self, episode: EncodedEpisode) -> float:
        """Estimate the size in bytes that the file would have after this episode is appended."""
        return self._bytes + len(episode.mp4)

    def append(self, episode: EncodedEpisode) -> int:
        """Append an episode; return the number of frames before it in the file."""
        start = self._frames
        with av.open(io.BytesIO(episode.mp4), "r") as source:
            stream = source.streams.video[0]
            tick = cast(Fraction, stream.time_base)
            if not self._container.streams:
                self._container.add_stream_from_template(stream, opaque=True).time_base = tick
            # A frame lasts a whole number of ticks: the muxer chooses a tick rate that is a multiple of fps.
            ticks = int(1 / (tick * self._encoding.fps))
            for i, packet in enumerate(packet for packet in source.demux(stream) if packet.size):
                # Very short episodes have a smaller delay. Use the same delay for all, so that dts always increases.
                packet.dts = (start + i - self._encoding.delay) * ticks
                packet.pts = cast(int, packet.pts) + start * ticks
                packet.stream = self._container.streams.video[0]
                self._container.mux(packet)
        self._frames, self._bytes = start + episode.frames, self._bytes + len(episode.mp4)
        return start

    def close(self) -> None:
        """Write the index and close the file."""
        self._container.close()


def encode_png(images: NDArray[np.uint8]) -> list[bytes]:
    """Encode each of the images, of shape (T, height, width, 3), as a PNG file."""
    encoder = av.CodecContext.create("png", "w")
    assert isinstance(encoder, av.VideoCodecContext)
    encoder.height, encoder.width, encoder.pix_fmt = *images.shape[1:3], "rgb24"
    encoder.thread_count = 1
    files = []
    for pixels in images:
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
        files += [bytes(packet) for packet in encoder.encode(frame)]
    return files
