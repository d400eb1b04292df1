"""Extract the table rows of each episode from the data files once, and share them with all processes of a rank.

Input: parquet files that contain several episodes each. Output: a memory-mapped Arrow file per episode, and arrays.

[Note: shared rows] A row group may contain one episode or a thousand. The first process that needs its rows decodes
it once, for all episodes that are requested together, and writes one file per episode. The other processes map these
files. So a rank has the rows of an episode in memory only once, for any number of workers; the kernel can evict them.
"""

from __future__ import annotations

import fcntl
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from fsdp2_strategy.extras import needed_to
from fsdp2_strategy.integrations.lerobot.dataset_source import Source, cache_errors
from fsdp2_strategy.integrations.lerobot.metadata import Metadata, corrupt, parsing

with needed_to("read LeRobot's data sets"):
    import pyarrow as pa
    import pyarrow.parquet as pq

_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_NUMBERS = (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean)

Rows = Mapping[str, Any]
"""Rows of an episode by feature: an array of shape (T, ...), a list of strings, or an Arrow column of images."""


class EpisodeRows:
    """The rows of episodes, by episode index; a process keeps up to ``max_mapped`` episodes mapped."""

    def __init__(self, source: Source, metadata: Metadata, folder: Path, max_mapped: int) -> None:
        self._source, self._metadata, self._folder, self._max_mapped = source, metadata, folder, max_mapped
        self._columns = [key for key, feature in metadata.features.items() if feature["dtype"] != "video"]
        self._mapped: OrderedDict[int, Rows] = OrderedDict()

    def __getitem__(self, episode: int) -> Rows:
        if episode in self._mapped:
            self._mapped.move_to_end(episode)
            return self._mapped[episode]
        table = self._map(episode)
        for old in [old for old in self._mapped if not self._path(old).exists()]:
            del self._mapped[old]  # a deleted file uses disk space until it is unmapped
        while len(self._mapped) >= self._max_mapped:
            self._mapped.popitem(last=False)
        rows = {}
        for key in table.column_names:
            try:
                rows[key] = _array(table[key], self._metadata.features[key])
            except ValueError as error:
                found, expected = f"{key} of episode {episode}: {error}", "values as described in meta/info.json"
                raise corrupt(self._source, self._metadata.data_path(episode), found, expected) from error
        self._mapped[episode] = rows
        return rows

    def extract(self, episodes: Iterable[int]) -> None:
        """Write a file for each of the episodes that has none; see [Note: shared rows]."""
        by_file: dict[str, list[int]] = {}
        for episode in episodes:
            if not self._path(episode).exists():
                by_file.setdefault(self._metadata.data_path(episode), []).append(episode)
        for path, wanted in by_file.items():
            with self._file_lock(path):
                missing = [episode for episode in wanted if not self._path(episode).exists()]
                if missing:
                    self._extract_from(path, missing)

    def delete(self, episode: int) -> None:
        """Delete the file of an episode; a process that has mapped it keeps the rows until it maps another episode."""
        self._path(episode).unlink(missing_ok=True)

    def _map(self, episode: int) -> pa.Table:
        while True:
            self.extract([episode])
            with suppress(FileNotFoundError), pa.memory_map(str(self._path(episode))) as file:  # deleted since: retry
                return pa.ipc.open_file(file).read_all()

    def _extract_from(self, path: str, episodes: Sequence[int]) -> None:
        with self._source.open(path) as opened, parsing(self._source, path):
            file = pq.ParquetFile(opened, pre_buffer=False)  # no threads: see `read_parquet`
            present = set(file.schema_arrow.names)
            if lacking := [key for key in self._columns if key not in present]:
                raise corrupt(self._source, path, f"it lacks {', '.join(lacking)}", "the features of meta/info.json")
            first_rows = {episode: self._metadata.first_row(episode) for episode in episodes}
            if missing := self._write_episodes(file, first_rows):
                numbers = file.read(["episode_index"], use_threads=False)["episode_index"].to_numpy()
                missing = self._write_episodes(file, {e: int(np.argmax(numbers == e)) for e in missing})
            footer_bytes = file.metadata.serialized_size
        self._source.free(path, 0, self._source.size(path) - footer_bytes)  # later episodes need the footer again
        if missing:
            found = f"it lacks the rows of the episodes {', '.join(map(str, missing[:5]))}"
            raise corrupt(self._source, path, found, "those that meta/episodes lists")

    def _write_episodes(self, file: pq.ParquetFile, first_rows: Mapping[int, int]) -> list[int]:
        """Write the file of each episode, given its first row; return the episodes whose rows are not there."""
        ends = {episode: first + int(self._metadata.lengths[episode]) for episode, first in first_rows.items()}
        pieces: dict[int, list[pa.Table]] = {episode: [] for episode in first_rows}
        missing = list(first_rows)
        high = 0
        for i in range(file.num_row_groups):
            low, high = high, high + file.metadata.row_group(i).num_rows
            inside = [e for e, first in first_rows.items() if first < high and low < ends[e]]
            if not inside:
                continue
            table = file.read_row_group(i, self._columns, use_threads=False)
            for episode in inside:
                first, end = first_rows[episode], ends[episode]
                pieces[episode].append(table.slice(max(first - low, 0), min(end, high) - max(first, low)))
                if end <= high and self._write(episode, pa.concat_tables(pieces.pop(episode))):
                    missing.remove(episode)
        return missing

    def _write(self, episode: int, table: pa.Table) -> bool:
        """Write the file of an episode, if ``table`` contains exactly its rows; return whether it does."""
        is_right = table["episode_index"].to_numpy() == episode
        if len(is_right) != self._metadata.lengths[episode] or not is_right.all():
            return False
        unfinished = self._path(episode).with_suffix(f".{os.getpid()}")
        with cache_errors(f"the rows of episode {episode}", self._folder):  # `parsing` would name the data file
            try:
                with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                    writer.write_table(table.combine_chunks())
                unfinished.replace(self._path(episode))
            finally:
                unfinished.unlink(missing_ok=True)
        return True

    def _path(self, episode: int) -> Path:
        return self._folder / f"episode-{episode:06d}.arrow"

    @contextmanager
    def _file_lock(self, path: str) -> Iterator[None]:
        with cache_errors(path, self._folder):
            opened = (self._folder / f"{path.replace('/', '-')}.lock").open("w")
        with opened as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:  # closing does not unlock if a forked worker has it open
                fcntl.flock(lock, fcntl.LOCK_UN)


def _array(column: pa.ChunkedArray, feature: Mapping[str, Any]) -> Any:
    """Convert numbers to an array of shape (T,) or (T, *shape), and strings to a list; return images unchanged."""
    if feature["dtype"] == "image":
        return column
    values = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # the latter copies even one chunk
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    is_list = False
    while any(is_a(values.type) for is_a in _LISTS):
        values, is_list = values.flatten(), True
    if not any(is_a(values.type) for is_a in _NUMBERS):
        return column.to_pylist()
    if values.null_count and not pa.types.is_floating(values.type):
        raise ValueError(f"{values.null_count} values are missing")
    try:
        dtype = np.dtype(feature["dtype"])
    except TypeError as error:
        raise ValueError(f"the dtype {feature['dtype']!r} is unknown") from error
    array = values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    return array.reshape(len(column), *feature["shape"]) if is_list else array
