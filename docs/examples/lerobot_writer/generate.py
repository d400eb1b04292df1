"""Write data sets in LeRobot's format v3.0, with pyarrow and PyAV only.

Input: features, and the frames of each episode. Output: a folder that LeRobot's own reader can open:

    meta/info.json, meta/stats.json, meta/tasks.parquet
    meta/episodes/chunk-000/file-000.parquet       one row per episode
    data/chunk-000/file-000.parquet                several episodes, one row group per episode
    videos/{camera}/chunk-000/file-000.mp4         several episodes

Every reader needs ``meta/info.json``. It is written last, so that an incomplete folder cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from fsdp2_strategy.errors import DataError, did_you_mean
from lerobot_writer.episode_files import EpisodesFile, RollingWriter, RowsFile, write_tasks
from lerobot_writer.features import (
    CAMERAS,
    STANDARD_COLUMNS,
    checked_feature,
    checked_values,
    column,
    schema_of,
    size_of,
)
from lerobot_writer.mp4 import Codec, EncodedEpisode, Encoding, VideoFile, encode
from lerobot_writer.stats import Stats, aggregate, feature_stats, image_stats

_DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


class DatasetWriter:
    """Write a data set, episode by episode.

    The folder is a valid data set only after ``close`` or the end of the ``with`` block. If the block ends with an
    exception, the folder stays incomplete.

    Args:
        root: path of a new or empty folder.
        fps: frames per second, an integer.
        features: the features by name, each with ``dtype``, ``shape`` and optionally ``names``. A camera has the dtype
            video or image, and the shape (height, width, 3) or (3, height, width). All other features have the dtype
            float32, float64, int32, int64, uint8, bool or string, and the shape (n,).
        robot_type: value of ``robot_type`` in ``meta/info.json``.
        codec: video codec.
        gop: interval of key frames within an episode, in frames.
        b_frames: maximum number of consecutive B-frames.
        crf: constant rate factor of the videos (lower is better quality); None for the codec's default.
        episodes_per_data_file: maximum number of episodes per data file; None for no limit.
        episodes_per_video_file: maximum number of episodes per video file; None for no limit.
        episodes_per_metadata_file: maximum number of episodes per file in ``meta/episodes``; None for no limit.
        data_files_size_in_mb: estimated size in MiB at which a new data or metadata file is started.
        video_files_size_in_mb: estimated size in MiB at which a new video file is started.
        chunks_size: maximum number of files per chunk folder.

    Raises:
        DataError: an argument is invalid, or the folder is not empty.

    Example:
        >>> import tempfile
        >>> features = {"action": {"dtype": "float32", "shape": (2,)}}
        >>> with tempfile.TemporaryDirectory() as root, DatasetWriter(root, fps=10, features=features) as writer:
        ...     writer.add_episode({"action": np.zeros((5, 2), dtype=np.float32)}, task="wait")
    """

    def __init__(
        self,
        root: str | Path,
        *,
        fps: int,
        features: Mapping[str, Mapping[str, Any]],
        robot_type: str | None = None,
        codec: Codec = "libx264",
        gop: int = 2,
        b_frames: int = 0,
        crf: int | None = None,
        episodes_per_data_file: int | None = None,
        episodes_per_video_file: int | None = None,
        episodes_per_metadata_file: int | None = None,
        data_files_size_in_mb: int = 100,
        video_files_size_in_mb: int = 200,
        chunks_size: int = 1000,
    ) -> None:
        self._encoding = Encoding(fps=fps, codec=codec, gop=gop, b_frames=b_frames, crf=crf)
        self._features = {name: checked_feature(name, feature) for name, feature in features.items()} | STANDARD_COLUMNS
        for name in self._named("video"):
            feature = self._features[name]
            feature["info"] = self._encoding.info(*size_of(feature["shape"]))
        self._root = Path(root)
        if self._root.exists() and (not self._root.is_dir() or any(self._root.iterdir())):
            raise DataError(
                f"cannot write a data set: {root} is not an empty folder, expected a new or empty one. Choose another."
            )
        self._robot_type, self._chunks_size = robot_type, chunks_size
        self._sizes = {"data_files_size_in_mb": data_files_size_in_mb, "video_files_size_in_mb": video_files_size_in_mb}
        bounds = {
            "episodes_per_data_file": episodes_per_data_file,
            "episodes_per_video_file": episodes_per_video_file,
            "episodes_per_metadata_file": episodes_per_metadata_file,
        }
        for bound, value in {**self._sizes, "chunks_size": chunks_size, **bounds}.items():
            if value is not None and value < 1:
                raise DataError(f"cannot write a data set: {bound} is {value}, expected at least 1. Increase it.")

        self._schema = schema_of(self._features)
        self._data: RollingWriter[pa.Table] = RollingWriter(
            self._root / "data",
            ".parquet",
            partial(RowsFile, schema=self._schema),
            chunks_size=chunks_size,
            max_episodes=episodes_per_data_file,
            max_bytes=data_files_size_in_mb << 20,
        )
        self._videos: dict[str, RollingWriter[EncodedEpisode]] = {
            name: RollingWriter(
                self._root / "videos" / name,
                ".mp4",
                partial(VideoFile, encoding=self._encoding),
                chunks_size=chunks_size,
                max_episodes=episodes_per_video_file,
                max_bytes=video_files_size_in_mb << 20,
            )
            for name in self._named("video")
        }
        self._episodes: RollingWriter[dict[str, Any]] = RollingWriter(
            self._root / "meta/episodes",
            ".parquet",
            EpisodesFile,
            chunks_size=chunks_size,
            max_episodes=episodes_per_metadata_file,
            max_bytes=data_files_size_in_mb << 20,
        )
        self._tasks: dict[str, int] = {}
        self._stats: dict[str, list[Stats]] = {name: [] for name in self._features if not self._is(name, "string")}
        self._n_episodes = self._n_frames = 0
        self._is_closed = self._is_broken = False

    def add_episode(self, frames: Mapping[str, Any], task: str | Sequence[str]) -> None:
        """Write one episode.

        Args:
            frames: the values of each feature, of shape (T, *shape) and in exactly its dtype; images are uint8. For
                features of shape (1,), values of shape (T,) are also accepted.
            task: the text of the task, for the episode or for each frame.

        Raises:
            DataError: the writer is closed or an earlier episode is incomplete; a feature is missing or unknown; values
                have another shape, dtype or length; ``task`` is invalid; or the encoder rejects the images. In these
                cases, no part of the episode is written.
        """
        if self._is_closed or self._is_broken:
            state = "failed during an earlier episode" if self._is_broken else "is closed"
            raise DataError(
                f"cannot add an episode: the writer {state}, expected an open writer whose episodes are complete. "
                "Write a new data set."
            )
        values = self._checked(frames)
        length = len(next(iter(values.values())))
        tasks = [task] * length if isinstance(task, str) else list(task)
        if len(tasks) != length or not all(isinstance(text, str) for text in tasks):
            raise DataError(
                f"cannot add an episode: task is {str(task)[:80]!r}, expected a string, or a sequence of {length} "
                "strings, one per frame. Change it."
            )
        videos = {name: encode(values[name], self._encoding) for name in self._videos}
        stats = {name: image_stats(values[name]) for name in self._named(*CAMERAS)}
        for text in tasks:
            self._tasks.setdefault(text, len(self._tasks))
        values |= {
            "timestamp": (np.arange(length) / self._encoding.fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, self._n_episodes),
            "index": np.arange(self._n_frames, self._n_frames + length),
            "task_index": np.array([self._tasks[text] for text in tasks]),
        }
        stats |= {name: feature_stats(values[name]) for name in self._stats if name not in stats}
        row = {"episode_index": self._n_episodes, "tasks": list(dict.fromkeys(tasks)), "length": length}
        self._is_broken = True
        row |= self._write(values, videos, length)
        for name in self._stats:
            self._stats[name].append(stats[name])
            row |= {f"stats/{name}/{key}": value.tolist() for key, value in stats[name].items()}
        self._episodes.append(row)
        self._n_episodes, self._n_frames = self._n_episodes + 1, self._n_frames + length
        self._is_broken = False

    def close(self) -> None:
        """Close all files and write the metadata; further calls do nothing.

        Raises:
            DataError: no episode was added, or an episode is incomplete.
        """
        if self._is_closed:
            return
        self._close_files()
        if self._is_broken or not self._n_episodes:
            incomplete = " and an incomplete one" if self._is_broken else ""
            raise DataError(
                f"cannot finish a data set: it has {self._n_episodes} complete episodes{incomplete}, expected at least "
                "1 complete episode and no incomplete one. Write it again."
            )
        stats = {name: aggregate(episodes) for name, episodes in self._stats.items()}
        as_lists = {name: {key: value.tolist() for key, value in of.items()} for name, of in stats.items()}
        _write_json(self._root / "meta/stats.json", as_lists)
        write_tasks(self._root / "meta/tasks.parquet", list(self._tasks))
        _write_json(self._root / "meta/info.json", self._info())

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._close_files()

    def _info(self) -> dict[str, Any]:
        return {
            "codebase_version": "v3.0",
            "fps": self._encoding.fps,
            "features": self._features,
            "total_episodes": self._n_episodes,
            "total_frames": self._n_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": self._chunks_size,
            **self._sizes,
            "data_path": _DATA_PATH,
            "video_path": _VIDEO_PATH if self._videos else None,
            "robot_type": self._robot_type,
            "splits": {"train": f"0:{self._n_episodes}"},
        }

    def _write(self, values: dict[str, Any], videos: dict[str, EncodedEpisode], length: int) -> dict[str, Any]:
        """Write an episode's rows and videos; return their locations as columns of the episode's metadata row."""
        arrays = [column(values[field.name], field.type) for field in self._schema]
        rows = self._data.append(pa.Table.from_arrays(arrays, schema=self._schema))
        row: dict[str, Any] = {
            "data/chunk_index": rows.chunk,
            "data/file_index": rows.file,
            "dataset_from_index": self._n_frames,
            "dataset_to_index": self._n_frames + length,
        }
        for name, video in videos.items():
            location = self._videos[name].append(video)
            row |= {
                f"videos/{name}/chunk_index": location.chunk,
                f"videos/{name}/file_index": location.file,
                f"videos/{name}/from_timestamp": location.start / self._encoding.fps,
                f"videos/{name}/to_timestamp": (location.start + length) / self._encoding.fps,
            }
        return row

    def _checked(self, frames: Mapping[str, Any]) -> dict[str, Any]:
        """Check the values of all features, and return them; images have their channels last."""
        expected = [name for name in self._features if name not in STANDARD_COLUMNS]
        for name in frames:
            if name not in expected:
                raise DataError(
                    f"cannot add an episode: {name!r} is not a feature, expected {expected}."
                    f"{did_you_mean(name, expected)} Add it to features, or leave it out. The writer itself "
                    "adds times and indices."
                )
        if missing := [name for name in expected if name not in frames]:
            raise DataError(f"cannot add an episode: frames lacks {missing}, expected all of {expected}. Add them.")
        values = {name: checked_values(name, self._features[name], frames[name]) for name in expected}
        lengths = {name: len(array) for name, array in values.items()}
        if len(set(lengths.values())) != 1 or not all(lengths.values()):
            raise DataError(
                f"cannot add an episode: the numbers of values are {lengths}, expected the same number for all "
                "features, at least 1. Pass one value per frame for each feature."
            )
        return values

    def _named(self, *dtypes: str) -> list[str]:
        return [name for name in self._features if self._is(name, *dtypes)]

    def _is(self, name: str, *dtypes: str) -> bool:
        return self._features[name]["dtype"] in dtypes

    def _close_files(self) -> None:
        self._is_closed = True
        for files in (self._data, *self._videos.values(), self._episodes):
            files.close()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=4, ensure_ascii=False), encoding="utf-8")
