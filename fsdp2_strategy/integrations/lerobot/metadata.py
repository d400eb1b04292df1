"""Read the metadata of a LeRobot v3 data set: features, tasks, statistics, and the files of each episode.

Input: the files `meta/info.json`, `meta/stats.json` and `meta/tasks.parquet` of a source, and the columns of
`meta/episodes/*/*.parquet` that locate episodes. Output: `Metadata`. The format is documented by LeRobot (v3.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fsdp2_strategy.errors import CorruptDataError, DataError
from fsdp2_strategy.extras import needed_to
from fsdp2_strategy.integrations.lerobot.dataset_source import Source

with needed_to("read LeRobot's data sets"):
    import pyarrow as pa
    import pyarrow.parquet as pq

Column = npt.NDArray[Any]

EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_REQUIRED = ("features", "fps", "total_episodes", "total_frames", "data_path")
_LOCATION = ("episode_index", "length", "dataset_from_index", "data/chunk_index", "data/file_index")
_VIDEO_LOCATION = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")


@dataclass(frozen=True)
class Span:
    """The file and time span of an episode's video."""

    path: str
    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The metadata of a data set."""

    fps: float
    features: Mapping[str, Mapping[str, Any]]
    """The dtype, shape and names of each feature."""
    stats: Mapping[str, Mapping[str, torch.Tensor]]
    """The mean, std, min, max and further statistics of each feature over the data set, in float32; may be empty."""
    tasks: tuple[str, ...]
    info: Mapping[str, Any]
    """The content of `meta/info.json`."""
    _columns: Mapping[str, Column] = field(repr=False)

    @classmethod
    def read(cls, source: Source) -> Metadata:
        """Read a data set's metadata.

        Raises:
            DataError: the data set does not exist, is not of version 3, has no episodes, or has depth maps.
            CorruptDataError: the metadata cannot be parsed, or is inconsistent.
        """
        info = _json(source, "meta/info.json")
        version = str(info.get("codebase_version"))
        if not version.startswith("v3."):
            raise DataError(
                f"cannot read the data set at {source.location('')}: its version is {version}, expected v3. Convert it "
                "with LeRobot's conversion script."
            )
        if lacking := [name for name in _REQUIRED if info.get(name) is None]:
            raise corrupt(source, "meta/info.json", f"it lacks {', '.join(lacking)}", "the entries of LeRobot's format")
        features = info["features"]
        if depth := [key for key, feature in features.items() if _is_depth(feature)]:
            raise DataError(
                f"cannot read the data set at {source.location('')}: its features {', '.join(depth)} are depth "
                "maps, expected colour images and numbers. Use a copy of the data set without them."
            )
        videos = [key for key, feature in features.items() if feature["dtype"] == "video"]
        wanted = [*_LOCATION, *(f"videos/{key}/{name}" for key in videos for name in _VIDEO_LOCATION)]
        columns = _episodes(source, wanted, int(info["total_episodes"]), int(info.get("chunks_size", 1000)))
        if columns["length"].sum() != info["total_frames"]:
            raise CorruptDataError(
                f"cannot read the data set at {source.location('')}: its episodes have {columns['length'].sum()} "
                f"frames, expected {info['total_frames']} as in meta/info.json. Write its metadata again."
            )
        return cls(
            fps=float(info["fps"]),
            features=features,
            stats=_stats(source),
            tasks=_tasks(source),
            info=info,
            _columns=columns,
        )

    @property
    def total_episodes(self) -> int:
        """Number of episodes."""
        return len(self._columns["length"])

    @property
    def total_frames(self) -> int:
        """Total number of frames of all episodes."""
        return int(self.lengths.sum())

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of frames of each episode."""
        return self._columns["length"]

    @cached_property
    def video_keys(self) -> tuple[str, ...]:
        """Names of the features that are videos."""
        return tuple(key for key, feature in self.features.items() if feature["dtype"] == "video")

    @cached_property
    def image_keys(self) -> tuple[str, ...]:
        """Names of the features that are stored as single images in the data files."""
        return tuple(key for key, feature in self.features.items() if feature["dtype"] == "image")

    @cached_property
    def camera_keys(self) -> tuple[str, ...]:
        """Names of the features that are videos or images."""
        return self.video_keys + self.image_keys

    def data_path(self, episode: int) -> str:
        """Return the path of the file that contains an episode's rows."""
        chunk, file = (int(self._columns[f"data/{name}"][episode]) for name in ("chunk_index", "file_index"))
        return str(self.info["data_path"]).format(chunk_index=chunk, file_index=file)

    def video(self, key: str, episode: int) -> Span:
        """Return the file and time span of an episode's video."""
        chunk, file, begin, end = (self._columns[f"videos/{key}/{name}"][episode] for name in _VIDEO_LOCATION)
        path = str(self.info["video_path"]).format(video_key=key, chunk_index=int(chunk), file_index=int(file))
        return Span(path, float(begin), float(end))

    def first_index(self, episode: int) -> int:
        """Return the index of an episode's first frame in the data set."""
        return int(self._columns["dataset_from_index"][episode])

    def first_row(self, episode: int) -> int:
        """Return the first row of an episode in its data file; assumes that episodes are in ascending order there."""
        return self.first_index(episode) - self._file_begins[self.data_path(episode)]

    @cached_property
    def _file_begins(self) -> dict[str, int]:
        begins: dict[str, int] = {}
        for episode, first in enumerate(self._columns["dataset_from_index"].tolist()):
            path = self.data_path(episode)
            begins[path] = min(first, begins.get(path, first))
        return begins


def _json(source: Source, path: str) -> dict[str, Any]:
    content = source.read(path)
    try:
        return dict(json.loads(content))
    except ValueError as error:
        raise corrupt(source, path, error, "JSON") from error


def _stats(source: Source) -> dict[str, dict[str, torch.Tensor]]:
    if not source.exists("meta/stats.json"):
        return {}
    return {
        key: {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}
        for key, values in _json(source, "meta/stats.json").items()
    }


def _tasks(source: Source) -> tuple[str, ...]:
    """Return the task texts in the order of ``task_index``; their column is a pandas index and can have any name."""
    path = "meta/tasks.parquet"
    table = read_parquet(source, path)
    texts = [name for name in table.column_names if name != "task_index"]
    if "task_index" not in table.column_names or not texts:
        raise corrupt(source, path, f"its columns are {', '.join(table.column_names)}", "task_index and a text")
    text = "task" if "task" in texts else texts[0]
    by_number = dict(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))
    return tuple(by_number.get(i, "") for i in range(max(by_number, default=-1) + 1))


def _episodes(source: Source, wanted: list[str], count: int, chunk_files: int) -> dict[str, Column]:
    """Return columns of all files in `meta/episodes`, in the order of episodes."""
    tables: list[pa.Table] = []
    rows = 0  # Files are found by their consecutive numbers, because some remote roots cannot be listed.
    while rows < count:
        chunk, file = divmod(len(tables), chunk_files)
        path = EPISODES_PATH.format(chunk_index=chunk, file_index=file)
        if tables and not source.exists(path):
            raise CorruptDataError(
                f"cannot read the data set at {source.location('')}: {path} is missing and only {rows} episodes "
                f"are described, expected {count}. Download the folder meta again."
            )
        tables.append(read_parquet(source, path, wanted))
        rows += tables[-1].num_rows
    if not rows:
        raise DataError(
            f"cannot read the data set at {source.location('')}: it has no episodes, expected at least one. Record "
            "some first."
        )
    table = pa.concat_tables(tables)
    columns = {name: table[name].to_numpy() for name in wanted}
    order = np.argsort(columns["episode_index"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    if rows != count or (columns["episode_index"] != np.arange(count)).any():
        raise CorruptDataError(
            f"cannot read the data set at {source.location('')}: its {rows} episodes are not numbered "
            f"consecutively, expected each number from 0 to {count - 1} once. Write its metadata again."
        )
    return columns


def read_parquet(source: Source, path: str, columns: list[str] | None = None) -> pa.Table:
    """Read columns of a parquet file, and drop the file from the cache.

    pyarrow's threads are disabled: if a thread still uses a Python file when the interpreter exits, the process aborts
    (https://github.com/apache/arrow/issues/34314).
    """
    with source.open(path) as file, parsing(source, path):
        table = pq.ParquetFile(file, pre_buffer=False).read(columns, use_threads=False)
    source.drop(path)
    if lacking := [name for name in columns or () if name not in table.column_names]:
        raise corrupt(source, path, f"it lacks the columns {', '.join(lacking)}", "those of LeRobot's format")
    return table


@contextmanager
def parsing(source: Source, path: str) -> Iterator[None]:
    """Convert errors of pyarrow and the operating system inside the block to errors that name the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # from the operating system, not from pyarrow
            raise DataError(
                f"cannot read {source.location(path)}: {error}, expected a readable file. Check the disk."
            ) from error
        raise corrupt(source, path, error, "a parquet file of LeRobot's format") from error


def corrupt(source: Source, path: str, found: object, expected: str) -> CorruptDataError:
    """Build the error for a file with invalid content. Metadata files are always needed; other files can be skipped."""
    skip = ', or skip its samples with on_corrupt="skip", or exclude its episodes with episodes='
    return CorruptDataError(
        f"cannot read {source.location(path)}: {found}, expected {expected}. Download the file again"
        f"{'' if path.startswith('meta/') else skip}.",
        location=source.location(path),
    )


def _is_depth(feature: Mapping[str, Any]) -> bool:
    info = {**(feature.get("video_info") or {}), **(feature.get("info") or {})}
    return bool(info.get("is_depth_map") or info.get("video.is_depth_map"))
