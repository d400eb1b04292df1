"""Return the samples of LeRobot v3 data sets by index: numbers, time windows, and images decoded on access.

Input: a folder or remote root in LeRobot's format. Output: samples for `ResumableLoader`, which decides their order.

[Note: processes] The constructor reads only metadata. In the trainer's process, the loader calls `hold` with the
episodes of the next samples. Threads of this process extract the rows of these episodes. If the root is remote, they
also fetch the bytes of the videos. Workers decode the frames of the requested samples. Without a call of `hold`, the
process that reads a sample extracts and fetches its data itself.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.errors import CorruptDataError, DataError
from fsdp2_strategy.integrations.lerobot.dataset_source import cache_errors, open_source
from fsdp2_strategy.integrations.lerobot.fetching import EpisodeFetcher
from fsdp2_strategy.integrations.lerobot.metadata import Metadata, corrupt
from fsdp2_strategy.integrations.lerobot.prefetch import EpisodePrefetcher
from fsdp2_strategy.integrations.lerobot.rows import EpisodeRows, Rows
from fsdp2_strategy.integrations.lerobot.video import Decoders, UndecodableError, picture
from fsdp2_strategy.integrations.lerobot.windows import Offsets, offsets_of, window
from fsdp2_strategy.integrations.lerobot.worker_counters import Counts

Sample = dict[str, Any]

_MAX_DECODERS = 128
_PREFIX = "fsdp2-lerobot-"


class LeRobotDataset(Dataset[Sample]):
    """A map-style data set of LeRobot's v3 format; not collective.

    A sample is a dict with each feature of one frame under its name; camera images have the shape (C, H, W). ``"task"``
    is the text of the task. Features in ``delta_timestamps`` have an additional first dimension: the frames of the
    window. ``"<feature>_is_pad"`` (bool) is True for padding.

    Args:
        root: a folder, or a URL that fsspec supports (``https://…``, ``s3://…``, ``hf://datasets/owner/name``).
        episodes: indices of the episodes to use; by default all.
        reader: ``"lerobot"`` returns the samples of LeRobot's own reader: floating-point values in float32, integers in
            int64; episodes in ascending order, without those that do not exist, which are logged. ``"strict"`` returns
            values in the dtype of their feature; episodes in the given order, each of which must exist.
        delta_timestamps: seconds relative to the sample's frame, by feature: ``{"action": [0.0, 0.1, 0.2]}``. Steps
            outside the episode repeat its first or last frame and count as padding.
        tolerance_s: maximum seconds from a step of ``delta_timestamps`` to the nearest frame, and from the time of a
            frame to the nearest time stamp in its video.
        pool: maximum number of episodes whose rows a process keeps mapped; pass the same value to the loader.
        decoder_cache: maximum number of videos that a process keeps open; by default ``pool``, but at most 128.
        on_corrupt: ``"raise"`` raises for a sample whose files are corrupt; ``"skip"`` returns zeros with the sample's
            indices. With ``"skip"``, every sample has ``"sample_mask"`` (bool), which is False for skipped samples, and
            `counts` contains the number of skipped samples.
        video_dtype: dtype of all camera images: float32 (0 to 1) or uint8 (0 to 255).
        image_transforms: function from the images of one feature, of shape (C, H, W) or (T, C, H, W), to the images in
            the sample.
        cache_dir: folder for fetched bytes and extracted rows, which `close` or garbage collection deletes; by default
            the system's folder for temporary files.
        disk_bytes: disk space of the cache above which no further episodes are fetched ahead. By default there is no
            limit, and the cache contains up to about 2 x ``pool`` episodes.
        tries: maximum number of attempts per request to a remote root; the pauses between attempts grow.
        timeout_seconds: time limit of one attempt.
        storage_options: options of fsspec's file system: headers, credentials, ...

    Raises:
        DataError: the root contains no LeRobot v3 data set, or an argument is invalid.
        CorruptDataError: the metadata cannot be parsed, or is inconsistent.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        episodes: Sequence[int] | None = None,
        reader: Literal["lerobot", "strict"] = "lerobot",
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        tolerance_s: float = 1e-4,
        pool: int = 64,
        decoder_cache: int | None = None,
        on_corrupt: Literal["raise", "skip"] = "raise",
        video_dtype: torch.dtype = torch.float32,
        image_transforms: Callable[[torch.Tensor], torch.Tensor] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        disk_bytes: int | None = None,
        tries: int = 5,
        timeout_seconds: float = 60.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if reader not in {"lerobot", "strict"}:
            raise DataError(
                f"cannot read a data set: reader is {reader!r}, expected 'lerobot' or 'strict'. Pass one of these."
            )
        if on_corrupt not in {"raise", "skip"} or video_dtype not in {torch.float32, torch.uint8}:
            raise DataError(
                f"cannot read a data set: on_corrupt is {on_corrupt!r} and video_dtype is {video_dtype}, expected "
                "on_corrupt 'raise' or 'skip', and video_dtype torch.float32 or torch.uint8. Pass one of these."
            )
        decoder_cache = min(pool, _MAX_DECODERS) if decoder_cache is None else decoder_cache
        if pool < 1 or not 1 <= decoder_cache <= _MAX_DECODERS:
            raise DataError(
                f"cannot read a data set: pool is {pool} and decoder_cache is {decoder_cache}, expected a pool of at "
                f"least 1, and a decoder_cache of 1 to {_MAX_DECODERS}. Change them; an open video takes some MB."
            )
        self._folder = _Folder(cache_dir)
        options = {"tries": tries, "timeout_seconds": timeout_seconds, "storage_options": storage_options}
        self._source = open_source(root, self._folder.path / "files", **options)
        self.metadata = metadata = Metadata.read(self._source)
        """The data set's metadata; ``metadata.stats`` are the statistics for normalisation."""
        self._is_strict = reader == "strict"
        self._episodes = _check_episodes(episodes, metadata.total_episodes, is_strict=self._is_strict)
        self.episode_lengths: npt.NDArray[np.int64] = metadata.lengths[self._episodes]
        """Number of frames of each episode in use."""
        self._begins = np.concatenate([[0], np.cumsum(self.episode_lengths)])
        self._offsets = offsets_of(delta_timestamps or {}, metadata.features, metadata.fps, tolerance_s)
        self._tolerance_s, self._on_corrupt = tolerance_s, on_corrupt
        self._dtype, self._transform = video_dtype, image_transforms
        self._counts = Counts(self._folder.path)
        self._limits = pool, decoder_cache, disk_bytes
        self._begin_process()

    def __len__(self) -> int:
        """Return the number of frames of all episodes in use."""
        return int(self._begins[-1])

    def __getitem__(self, i: int) -> Sample:
        """Return the sample of a frame.

        Raises:
            CorruptDataError: with ``on_corrupt="raise"``, a file of the sample cannot be parsed or decoded.
            DataError: a file of the sample cannot be read or fetched.
            IndexError: there is no such frame.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        position = int(np.searchsorted(self._begins, i, side="right")) - 1
        episode, frame = int(self._episodes[position]), int(i - self._begins[position])
        try:
            sample = self._sample(episode, frame)
        except CorruptDataError as error:
            if self._on_corrupt == "raise":
                raise
            self._log_once(error)
            self._counts.add(samples_skipped=1)
            return self._blank(episode, frame) | {"sample_mask": torch.tensor(False)}
        self._counts.add(samples=1)
        return sample if self._on_corrupt == "raise" else sample | {"sample_mask": torch.tensor(True)}

    @property
    def counts(self) -> dict[str, int]:
        """Totals of this process and its workers: samples returned and skipped, frames decoded and converted."""
        return self._counts.total()

    def hold(self, now: Sequence[int], soon: Sequence[int]) -> None:
        """Start to fetch episodes, and release all others; `ResumableLoader` calls it.

        Args:
            now: the episodes of the samples that workers are loading, as positions in the list of episodes in use.
            soon: the episodes of the next samples, as positions in the same list.

        Raises:
            DataError: the episodes in ``now`` of an earlier call needed more than ``disk_bytes``.
        """
        self._prefetcher.hold(self._episodes[list(now)].tolist(), self._episodes[list(soon)].tolist())

    def pause(self) -> None:
        """End the fetching threads, so that the process can fork safely; the next `hold` starts them again."""
        self._prefetcher.pause()

    def close(self) -> None:
        """Close all files, and delete the fetched bytes and extracted rows."""
        self._prefetcher.pause()
        self._decoders.close()
        self._folder.remove()

    def _begin_process(self) -> None:
        pool, decoders, disk_bytes = self._limits
        self._rows = EpisodeRows(self._source, self.metadata, self._folder.path, pool)
        self._decoders = Decoders(self._source, decoders, self._counts)
        fetcher = EpisodeFetcher(self._source, self.metadata, self._rows)
        cached_bytes = partial(used_bytes, self._folder.path)
        self._prefetcher = EpisodePrefetcher(
            fetcher.set_wanted, fetcher.fetch, fetcher.release, cached_bytes, max_bytes=disk_bytes
        )
        self._prefetcher.end_with(self)

    def __getstate__(self) -> dict[str, Any]:
        of_the_process = {"_rows", "_decoders", "_prefetcher"}
        return {name: value for name, value in vars(self).items() if name not in of_the_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_process()

    def _sample(self, episode: int, frame: int) -> Sample:
        rows, length = self._rows[episode], int(self.metadata.lengths[episode])
        sample: Sample = {}
        for key in self.metadata.features:
            wanted, is_padding = np.asarray([frame]), None
            if key in self._offsets:
                wanted, is_padding = window(frame, self._offsets[key], length)
                sample[f"{key}_is_pad"] = torch.from_numpy(is_padding)
            if key in self.metadata.camera_keys:
                pictures = self._pictures(key, episode, rows, wanted)
                sample[key] = self._convert_images(pictures if is_padding is not None else pictures[0])
            else:
                sample[key] = _tensor(rows[key], frame if is_padding is None else wanted, is_strict=self._is_strict)
        sample["task"] = self._task(episode, int(rows["task_index"][frame]))
        return sample

    def _task(self, episode: int, number: int) -> str:
        if not 0 <= number < len(self.metadata.tasks):
            found, expected = f"its task_index is {number}", "an index in meta/tasks.parquet"
            raise corrupt(self._source, self.metadata.data_path(episode), found, expected)
        return self.metadata.tasks[number]

    def _pictures(self, key: str, episode: int, rows: Rows, wanted: Offsets) -> torch.Tensor:
        if key in self.metadata.video_keys:
            span = self.metadata.video(key, episode)
            seconds = [span.begin_seconds + int(row) / self.metadata.fps for row in wanted]
            return self._decoders.frames(span.path, seconds, self._tolerance_s)
        entries = [rows[key][int(row)].as_py() for row in wanted]
        try:
            return torch.stack([picture(entry.get("bytes") if isinstance(entry, dict) else entry) for entry in entries])
        except UndecodableError as error:
            raise corrupt(self._source, self.metadata.data_path(episode), error, f"images of {key}") from error

    def _convert_images(self, pictures: torch.Tensor) -> torch.Tensor:
        if self._dtype == torch.float32:
            pictures = pictures.to(torch.float32).div_(255)
        return pictures if self._transform is None else self._transform(pictures)

    def _blank(self, episode: int, frame: int) -> Sample:
        """Return zeros with the indices of a frame whose files are corrupt; windows are marked as padding."""
        sample: Sample = {"task": ""}
        for key, feature in self.metadata.features.items():
            steps = (len(self._offsets[key]),) if key in self._offsets else ()
            if steps:
                sample[f"{key}_is_pad"] = torch.ones(steps, dtype=torch.bool)
            if key in self.metadata.camera_keys:
                sample[key] = self._convert_images(torch.zeros(*steps, *_shape_of_picture(feature), dtype=torch.uint8))
            elif feature["dtype"] == "string":
                sample[key] = [""] * steps[0] if steps else ""
            else:
                shape = () if tuple(feature["shape"]) == (1,) else tuple(feature["shape"])
                zeros = torch.zeros((*steps, *shape), dtype=getattr(torch, feature["dtype"]))
                sample[key] = zeros if self._is_strict else _as_lerobot(zeros)
        numbers = {"episode_index": episode, "frame_index": frame, "index": self.metadata.first_index(episode) + frame}
        return sample | {key: torch.full_like(sample[key], number) for key, number in numbers.items()}

    def _log_once(self, error: CorruptDataError) -> None:
        """Log an error, unless a process of this rank has already logged one for the same file."""
        digest = blake2b(error.location.encode(), digest_size=8).hexdigest()
        with suppress(FileExistsError):
            (self._folder.path / f"reported-{digest}").touch(exist_ok=False)
            logger.warning("skipped a sample: %s", error)


class _Folder:
    """A temporary folder, deleted with this object; the constructor deletes the folders that killed processes left."""

    def __init__(self, parent: str | os.PathLike[str] | None) -> None:
        parent = Path(parent if parent is not None else tempfile.gettempdir())
        with cache_errors("a data set", parent):
            parent.mkdir(parents=True, exist_ok=True)
            for old in parent.glob(f"{_PREFIX}*"):
                _delete_if_abandoned(old)
            self.path, lock = _create_locked_folder(parent)
        self._remove: Callable[[], object] | None = weakref.finalize(self, _remove, self.path, os.getpid(), lock)

    def remove(self) -> None:
        """Delete the folder, unless this object is a worker's copy."""
        if self._remove is not None:
            self._remove()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_remove": None}


def _create_locked_folder(parent: Path) -> tuple[Path, IO[str]]:
    """Create a folder, and lock a file in it; forked workers inherit the lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = (path / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock.fileno()).st_nlink:  # 0: another process deleted the file before this one locked it
            return path, lock
        lock.close()


def used_bytes(folder: Path) -> int:
    """Return the disk space of all files below a folder, in bytes."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # another process deleted it
            total += path.stat().st_blocks * 512
    return total


def _remove(path: Path, owner: int, lock: IO[str]) -> None:
    lock.close()
    if owner == os.getpid():
        shutil.rmtree(path, ignore_errors=True)


def _delete_if_abandoned(old: Path) -> None:
    """Delete a folder, unless a running process holds its lock."""
    try:
        with (old / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
    except OSError:
        return  # in use, or another process is just creating it


def _check_episodes(episodes: Sequence[int] | None, total: int, *, is_strict: bool) -> npt.NDArray[np.int64]:
    chosen = np.arange(total) if episodes is None else np.asarray(list(episodes), dtype=np.int64)
    if not is_strict:
        exist = (chosen >= 0) & (chosen < total)
        if not exist.all():
            ignored = chosen[~exist][:5].tolist()
            logger.warning("episodes that the data set lacks are ignored: %s; it has 0 to %d", ignored, total - 1)
        chosen = np.unique(chosen[exist])
    if not chosen.size or chosen.min() < 0 or chosen.max() >= total or len(np.unique(chosen)) < len(chosen):
        raise DataError(
            f"cannot select episodes: episodes begins with {chosen[:5].tolist()}, expected at least one episode, "
            f"all from 0 to {total - 1}, and none twice. Change episodes."
        )
    return chosen


def _tensor(column: Any, rows: int | Offsets, *, is_strict: bool) -> Any:
    if isinstance(column, list):
        return column[rows] if isinstance(rows, int) else [column[row] for row in rows]
    values = torch.from_numpy(np.array(column[rows]))
    return values if is_strict else _as_lerobot(values)


def _as_lerobot(values: torch.Tensor) -> torch.Tensor:
    """Return values in the dtype of LeRobot's reader, which makes tensors from Python numbers."""
    if values.dtype == torch.bool:
        return values
    return values.to(torch.float32 if values.is_floating_point() else torch.int64)


def _shape_of_picture(feature: Mapping[str, Any]) -> tuple[int, ...]:
    first, _, last = shape = feature["shape"]
    return 3, *(shape[1:] if first < last else shape[:2])  # (C, H, W) or (H, W, C); decoded images have three channels
