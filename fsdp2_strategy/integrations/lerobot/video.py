"""Decode single frames of mp4 files by their time stamps, with a bounded number of open decoders.

Input: a file that contains several episodes, and times in seconds. Output: images, uint8 of shape (T, C, H, W).

[Note: decoding] To decode a frame, all frames since the key frame before it must be decoded; only requested frames are
converted to RGB. The frames of one request are decoded in one pass in ascending order. A decoder uses one thread,
because several threads would decode frames ahead that are not needed. Parallelism comes from the loader's workers.

[Note: planes] A sample needs channels first, (C, H, W). FFmpeg can convert to planar RGB directly; packed RGB with a
transpose afterwards costs twice as much. Both give equal values if the format is in `_PLANAR`, the width is a multiple
of 16 and the height is even, as in nearly all videos. Otherwise the values may differ, so packed RGB is used.

[Note: key frames] Whether to decode on or to seek depends on whether a key frame lies between. PyAV 17 has the index of
a file's key frames. Before that, `_Decoder` learns how far apart they are: a seek that arrives at a key frame before
the current position was not needed, so it would have been faster to decode on over this distance.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fsdp2_strategy.extras import needed_to
from fsdp2_strategy.integrations.lerobot.dataset_source import Source
from fsdp2_strategy.integrations.lerobot.metadata import corrupt
from fsdp2_strategy.integrations.lerobot.worker_counters import Counts

with needed_to("decode videos"):
    import av
    import av.container
    from av.video.reformatter import VideoReformatter

_MIN_PYAV = 15
_PYAV = int(av.__version__.partition(".")[0])
if _PYAV < _MIN_PYAV:
    raise ImportError(
        f"cannot decode videos: PyAV is {av.__version__}, expected at least {_MIN_PYAV}. Install a newer version: "
        f"pip install 'av>={_MIN_PYAV}'."
    )
# Before version 17, PyAV has no option for the number of threads of a conversion, and no index of key frames.
_ONE_THREAD: dict[str, Any] = {"threads": 1} if _PYAV >= 17 else {}

_PLANAR = {"yuv420p", "yuvj420p"}
_BUFFER_BYTES = 1 << 15  # small, to fetch few bytes beyond the end of an episode
_MAX_SEEKS = 4  # key frames that `_seek` tries before it gives up
# Raise an error for corrupt data. FFmpeg would conceal it in the image by default.
_STRICT = {"err_detect": "crccheck+bitstream+buffer+explode"}


class Decoders:
    """A least-recently-used cache of open video decoders."""

    def __init__(self, source: Source, max_open: int, counts: Counts) -> None:
        self._source, self._max_open, self._counts = source, max_open, counts
        self._open: OrderedDict[str, _Decoder] = OrderedDict()
        self._process = os.getpid()

    def frames(self, path: str, seconds: Sequence[float], tolerance_s: float) -> torch.Tensor:
        """Return the frames at the given times, uint8 of shape (T, C, H, W)."""
        try:
            decoder = self._opened(path)
            before = decoder.decoded
            pictures = {second: decoder.picture(second, tolerance_s) for second in sorted(set(seconds))}
        except av.FFmpegError as error:
            self.close(path)
            raise corrupt(self._source, path, error, "a video that can be decoded") from error
        except BaseException:  # the decoder cannot continue after an error
            self.close(path)
            raise
        self._counts.add(frames_decoded=decoder.decoded - before, frames_converted=len(pictures))
        if len(seconds) == 1:  # without a copy
            return pictures[seconds[0]].unsqueeze(0)
        return torch.stack([pictures[second] for second in seconds])

    def close(self, path: str | None = None) -> None:
        """Close one file, or all files."""
        for name in [path] if path is not None else list(self._open):
            if (decoder := self._open.pop(name, None)) is not None:
                decoder.close()

    def _opened(self, path: str) -> _Decoder:
        if self._process != os.getpid():  # a forked process shares file offsets with its parent
            self._open, self._process = OrderedDict(), os.getpid()
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        while len(self._open) >= self._max_open:
            self._open.popitem(last=False)[1].close()
        self._open[path] = _Decoder(self._source, path)
        return self._open[path]


class _Decoder:
    def __init__(self, source: Source, path: str) -> None:
        self._source, self._path = source, path
        self.decoded = 0
        local, opened = source.local(path), source.open(path)
        if local is not None:  # FFmpeg reads it without Python; `open` has checked that it exists
            opened.close()
        self._file = None if local is not None else opened
        self._container = open_container(opened if local is None else str(local))
        if not self._container.streams.video:
            raise corrupt(source, path, "it contains no video stream", "one")
        self._stream = self._container.streams.video[0]
        context = self._stream.codec_context
        context.thread_count, context.options = 1, _STRICT
        self._time_base = float(self._stream.time_base or 0)
        self._index: Any = getattr(self._stream, "index_entries", None)  # None before PyAV 17
        self._key = 0  # decoding time stamp of the first packet after the last seek
        self._distance = 0  # largest distance over which decoding on is known to be faster; see [Note: key frames]
        self._reformatter = VideoReformatter()
        self._frames: Iterator[av.VideoFrame] = iter(())
        self._last: av.VideoFrame | None = None

    def close(self) -> None:
        self._frames = iter(())
        self._container.close()
        if self._file is not None:
            self._file.close()

    def picture(self, second: float, tolerance_s: float) -> torch.Tensor:
        """Return the frame at a time; faster if the times are in ascending order."""
        target = round(second / self._time_base)
        frame = self._nearest(target)
        if frame is None or abs(_pts(frame) - target) > max(tolerance_s / self._time_base, 0.5):
            found = f"its nearest frame is at {_pts(frame) * self._time_base:f}" if frame is not None else "no frame"
            raise corrupt(self._source, self._path, found, f"a frame within {tolerance_s:g} of {second:f} seconds")
        if frame.is_corrupt:
            raise corrupt(self._source, self._path, f"the frame at {second:f} seconds is corrupt", "a valid frame")
        return _channels_first(frame, self._reformatter)

    def _nearest(self, target: int) -> av.VideoFrame | None:
        """Return the frame that is nearest to a time stamp; continue decoding, or seek if necessary."""
        if self._last is None or not self._can_decode_on(_pts(self._last), target):
            position = self._last
            self._seek(target)
            if position is not None and self._key <= _pts(position) < target:
                self._distance = max(self._distance, target - self._key)
        before, frame = None, self._last
        while frame is not None and _pts(frame) < target - 1:  # 1 tick: time stamps in files are rounded
            before, frame = frame, self._next()
        self._last = frame
        if frame is None or (before is not None and target - _pts(before) < _pts(frame) - target):
            return before
        return frame

    def _seek(self, target: int) -> None:
        """Seek to a key frame from which decoding reaches a time stamp, and decode the first frame.

        In an open GOP, frames that are displayed before a key frame are stored after it and refer to earlier ones; the
        index does not record this. If the first decoded frame is after the time stamp, try earlier key frames.
        """
        start = target
        for _ in range(_MAX_SEEKS):
            self._container.seek(start, stream=self._stream, backward=True)
            self._frames = self._decode()
            self._last = self._next()
            if self._last is not None and _pts(self._last) <= target + 1:
                return
            earlier = self._key - 1
            if self._index is not None:
                key = self._index.search_timestamp(start, backward=True)
                earlier = self._index[key].timestamp - 1 if key > 0 else -1
            if earlier < 0:
                return
            start = earlier

    def _decode(self) -> Iterator[av.VideoFrame]:
        """Yield the frames from the current position on, and record where it is."""
        for number, packet in enumerate(self._container.demux(self._stream)):
            if number == 0:
                self._key = packet.dts or 0
            yield from packet.decode()

    def _next(self) -> av.VideoFrame | None:
        frame = next(self._frames, None)
        self.decoded += frame is not None
        return frame

    def _can_decode_on(self, at: int, target: int) -> bool:
        """Return whether to continue decoding from ``at``: ``target`` is not earlier, and no key frame is between."""
        if target <= at:
            return target == at
        if self._index is None:
            return target - at <= self._distance
        key = self._index.search_timestamp(target, backward=True)
        return bool(key >= 0 and self._index[key].timestamp <= at)


def _pts(frame: av.VideoFrame) -> int:
    return frame.pts if frame.pts is not None else -1


class UndecodableError(Exception):
    """Content that is not an image that FFmpeg can decode."""


def picture(content: object) -> torch.Tensor:
    """Decode the bytes of an image (PNG, JPEG) to uint8 of shape (C, H, W), or raise an `UndecodableError`."""
    if not isinstance(content, bytes):
        raise UndecodableError(f"it contains a {type(content).__name__} in place of an image's bytes")
    try:
        with open_container(io.BytesIO(content)) as container:
            frame = next(container.decode(video=0), None) if container.streams.video else None
    except av.FFmpegError as error:
        raise UndecodableError(str(error)) from error
    if frame is None:
        raise UndecodableError("it contains no image")
    return _channels_first(frame, VideoReformatter())


def open_container(file: str | io.RawIOBase | io.BytesIO) -> av.container.InputContainer:
    """Open a video or an image for reading, with a small buffer."""
    return av.open(file, "r", buffer_size=_BUFFER_BYTES)


def _channels_first(frame: av.VideoFrame, reformatter: VideoReformatter) -> torch.Tensor:
    """Convert a frame to RGB, uint8 of shape (C, H, W); see [Note: planes]."""
    if frame.format.name not in _PLANAR or frame.width % 16 or frame.height % 2:
        pixels = reformatter.reformat(frame, format="rgb24", **_ONE_THREAD).to_ndarray()
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    planes: Any = reformatter.reformat(frame, format="gbrp", **_ONE_THREAD).planes  # buffers; the type stubs omit this
    green, blue, red = (np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size) for plane in planes)
    pixels = np.empty((3, frame.height, frame.width), np.uint8)
    pixels[0], pixels[1], pixels[2] = (colour[:, : frame.width] for colour in (red, green, blue))
    return torch.from_numpy(pixels)
