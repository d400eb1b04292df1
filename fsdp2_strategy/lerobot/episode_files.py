"""Files of several episodes, a new one where the last is full.

Input: one episode after the other, as rows or as video. Output: files ``chunk-000/file-000`` and so on, and where in
them each episode stands. An episode is never in two files of a kind.
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
class Place:
    """Say where an episode stands."""

    chunk: int
    file: int
    start: int
    """How many rows or frames stand before it in the file."""


class File(Protocol[_Episode_contra]):
    """One file of episodes."""

    def bytes_with(self, episode: _Episode_contra) -> float:
        """Return how large the file is expected to be with one more episode."""

    def append(self, episode: _Episode_contra) -> int:
        """Write an episode; return how many rows or frames stand before it."""

    def close(self) -> None:
        """Finish the file."""


class Files(Generic[_Episode]):
    """Write episodes into files, a new one where the last would become too large, a new chunk where one is full.

    Args:
        folder: of all of them; the chunks are folders in it.
        suffix: of their names.
        begin: makes a file at a path.
        chunks_size: files in a chunk.
        most_episodes: in a file; None for any number.
        most_bytes: where a file is expected to reach them, the next one begins.
    """

    def __init__(
        self,
        folder: Path,
        suffix: str,
        begin: Callable[[Path], File[_Episode]],
        *,
        chunks_size: int,
        most_episodes: int | None,
        most_bytes: int,
    ) -> None:
        self._folder, self._suffix, self._begin, self._chunks_size = folder, suffix, begin, chunks_size
        self._most_episodes, self._most_bytes = most_episodes, most_bytes
        self._n_files, self._episodes = 0, 0
        self._file: File[_Episode] | None = None

    def append(self, episode: _Episode) -> Place:
        """Write an episode."""
        file = self._with_room(episode)
        start = file.append(episode)
        self._episodes += 1
        return Place(*divmod(self._n_files - 1, self._chunks_size), start)

    def close(self) -> None:
        """Finish the file that is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _with_room(self, episode: _Episode) -> File[_Episode]:
        if self._file is not None:
            is_full = self._episodes == self._most_episodes or self._file.bytes_with(episode) >= self._most_bytes
            if not is_full:
                return self._file
            self.close()
        chunk, index = divmod(self._n_files, self._chunks_size)
        path = self._folder / f"chunk-{chunk:03d}" / f"file-{index:03d}{self._suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._begin(path)
        self._n_files, self._episodes = self._n_files + 1, 0
        return self._file


class RowsFile:
    """Write the rows of episodes to a parquet file, a row group each."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._rows = path, 0
        self._writer = pq.ParquetWriter(path, schema, compression="snappy", use_dictionary=True)

    def bytes_with(self, episode: pa.Table) -> float:
        """Guess from the rows that are in."""
        size = self._path.stat().st_size
        return size + size / self._rows * len(episode)

    def append(self, episode: pa.Table) -> int:
        """Write the rows."""
        start = self._rows
        self._writer.write_table(episode)
        self._rows += len(episode)
        return start

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()


class EpisodesFile:
    """Write a row about each episode to a parquet file, all when it is complete; each says in which file it is."""

    def __init__(self, path: Path) -> None:
        self._path, self._bytes = path, 0
        self._rows: list[dict[str, Any]] = []

    def bytes_with(self, episode: dict[str, Any]) -> float:
        """Return the size in memory: what is not written yet has no other."""
        return self._bytes + _bytes_of(episode)

    def append(self, episode: dict[str, Any]) -> int:
        """Keep the row."""
        chunk, file = (int(part.rpartition("-")[2]) for part in (self._path.parent.name, self._path.stem))
        self._rows.append(episode | {"meta/episodes/chunk_index": chunk, "meta/episodes/file_index": file})
        self._bytes += _bytes_of(episode)
        return len(self._rows) - 1

    def close(self) -> None:
        """Write all rows."""
        pq.write_table(pa.Table.from_pylist(self._rows), self._path, compression="snappy")


def write_tasks(path: Path, tasks: list[str]) -> None:
    """Write the tasks as pandas writes a frame whose index they are."""

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


def _bytes_of(row: dict[str, Any]) -> int:
    return int(pa.Table.from_pylist([row]).nbytes)
