"""Write episodes to numbered files, several per file.

Input: episodes, as table rows or as video. Output: files ``chunk-000/file-000``, ``chunk-000/file-001`` and so on, and
the location of each episode. An episode is never split over two files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_Episode = TypeVar("_Episode")
_Episode_contra = TypeVar("_Episode_contra", contravariant=True)


@dataclass(frozen=True)
class Location:
    """The location of an episode: the indices of its chunk and file, and its start in the file."""

    chunk: int
    file: int
    start: int
    """Number of rows or frames before the episode in the file."""


class File(Protocol[_Episode_contra]):
    """A file of episodes that is being written."""

    def bytes_with(self, episode: _Episode_contra) -> float:
        """Estimate the size in bytes that the file would have after this episode is appended."""

    def append(self, episode: _Episode_contra) -> int:
        """Append an episode; return the number of rows or frames before it in the file."""

    def close(self) -> None:
        """Finish the file."""


class RollingWriter(Generic[_Episode]):
    """Write episodes to numbered files; start a new file or chunk folder when the current one is full.

    Args:
        folder: the folder that contains the chunk folders.
        suffix: suffix of the file names.
        begin: function that opens a new file at a path.
        chunks_size: maximum number of files per chunk folder.
        max_episodes: maximum number of episodes per file; None for no limit.
        max_bytes: estimated size at which a new file is started.
    """

    def __init__(
        self,
        folder: Path,
        suffix: str,
        begin: Callable[[Path], File[_Episode]],
        *,
        chunks_size: int,
        max_episodes: int | None,
        max_bytes: int,
    ) -> None:
        self._folder, self._suffix, self._begin, self._chunks_size = folder, suffix, begin, chunks_size
        self._max_episodes, self._max_bytes = max_episodes, max_bytes
        self._n_files, self._episodes = 0, 0
        self._file: File[_Episode] | None = None

    def append(self, episode: _Episode) -> Location:
        """Append an episode, and return its location."""
        file = self._file_for(episode)
        start = file.append(episode)
        self._episodes += 1
        return Location(*divmod(self._n_files - 1, self._chunks_size), start)

    def close(self) -> None:
        """Close the current file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _file_for(self, episode: _Episode) -> File[_Episode]:
        if self._file is not None:
            if self._episodes != self._max_episodes and self._file.bytes_with(episode) < self._max_bytes:
                return self._file
            self.close()
        chunk, index = divmod(self._n_files, self._chunks_size)
        path = self._folder / f"chunk-{chunk:03d}" / f"file-{index:03d}{self._suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._begin(path)
        self._n_files, self._episodes = self._n_files + 1, 0
        return self._file


class RowsFile:
    """A parquet file with one row group per episode."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._rows = path, 0
        self._writer = pq.ParquetWriter(path, schema, compression="snappy", use_dictionary=True)

    def bytes_with(self, episode: pa.Table) -> float:
        """Estimate the size in bytes after this episode is appended, from the mean size of the rows so far."""
        size = self._path.stat().st_size
        return size + size / self._rows * len(episode)

    def append(self, episode: pa.Table) -> int:
        """Write an episode's rows; return the number of rows before them in the file."""
        start = self._rows
        self._writer.write_table(episode)
        self._rows += len(episode)
        return start

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()


class EpisodesFile:
    """A parquet file with one metadata row per episode, written by `close`. Each row contains the file's indices."""

    def __init__(self, path: Path) -> None:
        self._path, self._bytes = path, 0
        self._rows: list[dict[str, Any]] = []
        chunk, file = (
            int(name.removeprefix(kind)) for kind, name in (("chunk-", path.parent.name), ("file-", path.stem))
        )
        self._location = {"meta/episodes/chunk_index": chunk, "meta/episodes/file_index": file}

    def bytes_with(self, episode: dict[str, Any]) -> float:
        """Estimate the size in bytes from the rows in memory, because no row is written before `close`."""
        return self._bytes + _table_bytes(episode)

    def append(self, episode: dict[str, Any]) -> int:
        """Store the row in memory; return the number of rows before it in the file."""
        self._rows.append(episode | self._location)
        self._bytes += _table_bytes(episode)
        return len(self._rows) - 1

    def close(self) -> None:
        """Write all rows."""
        pq.write_table(pa.Table.from_pylist(self._rows), self._path, compression="snappy")


def write_tasks(path: Path, tasks: list[str]) -> None:
    """Write the tasks to a parquet file in the format of a pandas data frame with the tasks as its index."""

    def described(name: str | None, pandas_type: str, numpy_type: str) -> dict[str, Any]:
        kind: dict[str, Any] = {"name": name, "field_name": name, "pandas_type": pandas_type, "numpy_type": numpy_type}
        return kind | {"metadata": {"encoding": "UTF-8"} if name is None else None}

    about = {
        "index_columns": ["task"],
        "column_indexes": [described(None, "unicode", "object")],
        "columns": [described("task_index", "int64", "int64"), described("task", "unicode", "object")],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.3.3",
    }
    table = pa.table({"task_index": np.arange(len(tasks)), "task": pa.array(tasks, type=pa.string())})
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(about)}), path, compression="snappy")


def _table_bytes(row: dict[str, Any]) -> int:
    return int(pa.Table.from_pylist([row]).nbytes)
