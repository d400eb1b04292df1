"""Fetch the data of episodes: their rows and, if the root is remote, the byte ranges of their videos.

Input: episode indices. Output: files in the cache. A file is deleted when the last episode that needs it is released.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdp2_strategy.integrations.lerobot.dataset_source import RemoteFiles, Source
from fsdp2_strategy.integrations.lerobot.metadata import Metadata, Span
from fsdp2_strategy.integrations.lerobot.rows import EpisodeRows
from fsdp2_strategy.integrations.lerobot.video import open_container

Range = tuple[int, int]
"""The first byte and the end (exclusive) of a byte range."""

_EMPTY: Range = (0, 0)


@dataclass(frozen=True)
class _Packets:
    """Time stamps and byte offsets of a video's packets, in decoding order."""

    seconds: npt.NDArray[np.float64]
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    is_key: npt.NDArray[np.bool_]


class _Lock:
    """A lock that is free in a forked worker, also if a thread of the trainer held it at that moment."""

    def __init__(self) -> None:
        self._lock, self._process = threading.Lock(), os.getpid()

    def __enter__(self) -> None:
        if self._process != os.getpid():
            self._lock, self._process = threading.Lock(), os.getpid()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class EpisodeFetcher:
    """Fetch and release episodes; thread-safe."""

    def __init__(self, source: Source, metadata: Metadata, rows: EpisodeRows) -> None:
        self._source, self._metadata, self._rows = source, metadata, rows
        self._wanted: dict[str, set[int]] = {}
        self._packets: dict[str, _Packets] = {}
        self._ranges: dict[str, dict[int, Range]] = {}
        self._lock = _Lock()

    def set_wanted(self, episodes: Iterable[int]) -> None:
        """Set the episodes to fetch; `fetch` then extracts the rows of all these episodes in one data file together."""
        wanted: dict[str, set[int]] = {}
        for episode in episodes:
            wanted.setdefault(self._metadata.data_path(episode), set()).add(episode)
        self._wanted = wanted

    def fetch(self, episode: int) -> None:
        """Fetch the rows of an episode and, if the root is remote, its videos."""
        path = self._metadata.data_path(episode)
        with self._lock:
            self._ranges.setdefault(path, {})[episode] = _EMPTY
        together = self._wanted.get(path, set()) - {episode}
        self._rows.extract({episode, *together})
        for released in together - self._wanted.get(path, set()):
            self._rows.delete(released)
        if not isinstance(self._source, RemoteFiles):
            return
        for span in self._spans(episode):
            with self._lock:
                self._ranges.setdefault(span.path, {})[episode] = _EMPTY
            found = self._range_of(span)
            with self._lock:
                self._ranges[span.path][episode] = found
            self._source.fetch(span.path, *found)

    def release(self, episode: int) -> None:
        """Delete the cached data that only this episode needs."""
        self._rows.delete(episode)
        for path in (self._metadata.data_path(episode), *(span.path for span in self._spans(episode))):
            with self._lock:
                ranges = self._ranges.get(path, {})
                released = ranges.pop(episode, _EMPTY)
                kept = list(ranges.values())
                if not kept:
                    self._ranges.pop(path, None)
                    self._packets.pop(path, None)
            if not kept:
                self._source.drop(path)
            elif released != _EMPTY:
                self._source.free(path, *released, keep=kept)

    def _spans(self, episode: int) -> list[Span]:
        return [self._metadata.video(key, episode) for key in self._metadata.video_keys]

    def _range_of(self, span: Span) -> Range:
        """Return the byte range of an episode's packets, from the last key frame at or before its first frame."""
        packets = self._packets_of(span.path)
        if not len(packets.seconds):  # the file has no index
            return 0, self._source.size(span.path)
        first = np.flatnonzero(packets.is_key & (packets.seconds <= span.begin_seconds + 1e-6))
        low = int(first[-1]) if first.size else 0
        high = max(int(np.searchsorted(packets.seconds, span.end_seconds - 1e-6)), low + 1)
        return int(packets.begins[low:high].min()), int(packets.ends[low:high].max())

    def _packets_of(self, path: str) -> _Packets:
        if path not in self._packets:
            with self._source.open(path) as file, open_container(file) as container:
                stream = container.streams.video[0]
                entries = getattr(stream, "index_entries", ())  # before version 17, PyAV has no index of any file
                found = [(e.timestamp, e.pos, e.size, e.is_keyframe) for e in entries]
                columns = np.asarray(found, dtype=np.int64).reshape(-1, 4).T
                seconds = columns[0] * float(stream.time_base or 0)
            self._packets[path] = _Packets(seconds, columns[1], columns[1] + columns[2], columns[3].astype(bool))
        return self._packets[path]
