"""Return the samples of LeRobot v3 data sets by index: numbers, time windows, and images that are decoded on access.

Input: a folder or remote root in LeRobot's format. Output: samples for `ResumableLoader`, which decides their order.

[Note: processes] The constructor reads only metadata. The loader calls `hold` in the trainer's process with
the episodes of the next samples. Threads of that process extract the rows of these episodes and, if the root is remote,
fetch the bytes of their videos. Workers decode the frames of the samples that they are asked for. Without a call of
`hold`, the process that asks for a sample extracts and fetches its data itself.
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

import av
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.errors import CorruptDataError, DataError
from fsdp2_strategy.lerobot.dataset_source import cache_errors, open_source
from fsdp2_strategy.lerobot.fetching import EpisodeFetcher
from fsdp2_strategy.lerobot.metadata import Metadata, corrupt
from fsdp2_strategy.lerobot.prefetch import EpisodePrefetcher
from fsdp2_strategy.lerobot.rows import EpisodeRows, Rows
from fsdp2_strategy.lerobot.video import Decoders, picture
from fsdp2_strategy.lerobot.windows import Offsets, offsets_of, window
from fsdp2_strategy.lerobot.worker_counters import Counts

Sample = dict[str, Any]

_MAX_DECODERS = 128
_PREFIX = "fsdp2-lerobot-"


class LeRobotDataset(Dataset[Sample]):
    """A LeRobot v3 data set that returns samples by index; not collective.

    A sample is a dict for one frame: each feature under its name and in its dtype, camera images as (C, H, W), and the
    text of its ``"task"``. A feature in ``delta_timestamps`` has an additional first dimension for the frames of its
    window, and ``"<feature>_is_pad"`` (bool) marks those that are padding.

    Args:
        root: a folder, or a URL that fsspec supports (``https://…``, ``s3://…``, ``hf://datasets/owner/name``).
        episodes: the episodes to use, in this order; by default all.
        delta_timestamps: seconds relative to the sample's frame, by feature: ``{"action": [0.0, 0.1, 0.2]}``. Steps
            outside the episode repeat its first or last frame and count as padding.
        tolerance_s: maximum deviation, in seconds, of a step from a frame and of a video's time stamp from its frame.
        pool: episodes whose rows a process keeps mapped; pass the same value as to the loader.
        decoder_cache: videos that a process keeps open; by default ``pool``, at most 128.
        on_corrupt: ``"raise"``, or ``"skip"`` to return zeros, with the right indices, for a sample that cannot be
            read. With ``"skip"``, every sample has ``"sample_mask"`` (bool), which is False for skipped samples.
            `counts` contains their number.
        video_dtype: dtype of all camera images: float32 (0 to 1) or uint8 (0 to 255).
        image_transforms: applied to the images of each feature, (C, H, W) or (T, C, H, W).
        cache_dir: folder for fetched bytes and extracted rows, which are deleted with this object; by default the
            system's folder for temporary files.
        disk_bytes: stop fetching ahead while the cache takes more disk space than this. By default there is no limit;
            the cache contains the episodes of two pools.
        tries: maximum number of attempts per request to a remote root, with growing pauses.
        timeout_seconds: time limit of one request.
        storage_options: options of fsspec's file system: headers, credentials, ...

    Raises:
        DataError: the root contains no such data set, or an argument does not fit it.
        CorruptDataError: its metadata cannot be parsed.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        episodes: Sequence[int] | None = None,
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
        if on_corrupt not in {"raise", "skip"} or video_dtype not in {torch.float32, torch.uint8}:
            raise DataError(
                f"cannot read a data set: on_corrupt is {on_corrupt!r} and video_dtype {video_dtype}, expected 'raise' "
                "or 'skip', and torch.float32 or torch.uint8. Pass one of these."
            )
        decoder_cache = min(pool, _MAX_DECODERS) if decoder_cache is None else decoder_cache
        if pool < 1 or not 1 <= decoder_cache <= _MAX_DECODERS:
            raise DataError(
                f"cannot read a data set: pool is {pool} and decoder_cache {decoder_cache}, expected at least 1, and 1 "
                f"to {_MAX_DECODERS}. Pass such numbers; an open video takes some MB in each worker."
            )
        self._folder = _Folder(cache_dir)
        options = {"tries": tries, "timeout_seconds": timeout_seconds, "storage_options": storage_options}
        self._source = open_source(root, self._folder.path / "files", **options)
        self.metadata = metadata = Metadata.read(self._source)
        """The data set's metadata; ``metadata.stats`` are the statistics for normalisation."""
        self._episodes = _check_episodes(episodes, metadata.total_episodes)
        self.episode_lengths: npt.NDArray[np.int64] = metadata.lengths[self._episodes]
        """Number of frames of each used episode."""
        self._begins = np.concatenate([[0], np.cumsum(self.episode_lengths)])
        self._offsets = offsets_of(delta_timestamps or {}, metadata.features, metadata.fps, tolerance_s)
        self._tolerance_s, self._on_corrupt = tolerance_s, on_corrupt
        self._dtype, self._transform = video_dtype, image_transforms
        self._counts = Counts(self._folder.path)
        self._limits = pool, decoder_cache, disk_bytes
        self._begin_process()

    def __len__(self) -> int:
        """Return the number of frames in the used episodes."""
        return int(self._begins[-1])

    def __getitem__(self, i: int) -> Sample:
        """Return a sample.

        Raises:
            CorruptDataError: a file of the sample cannot be parsed or decoded; only with ``on_corrupt="raise"``.
            DataError: a file of the sample cannot be read or fetched.
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
        """Start to fetch episodes, and release all others; called by `ResumableLoader`.

        Args:
            now: the present episodes, as positions in the list of used episodes.
            soon: the episodes after them, likewise.

        Raises:
            DataError: an earlier call's present episodes took more than ``disk_bytes``.
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
            fetcher.announce, fetcher.fetch, fetcher.release, cached_bytes, max_bytes=disk_bytes
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
                sample[key] = _tensor(rows[key], frame if is_padding is None else wanted)
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
        try:
            return torch.stack([picture(rows[key][int(row)].as_py()["bytes"]) for row in wanted])
        except (av.FFmpegError, TypeError, IndexError, StopIteration) as error:
            raise corrupt(self._source, self.metadata.data_path(episode), error, f"images of {key}") from error

    def _convert_images(self, pictures: torch.Tensor) -> torch.Tensor:
        if self._dtype == torch.float32:
            pictures = pictures.to(torch.float32).div_(255)
        return pictures if self._transform is None else self._transform(pictures)

    def _blank(self, episode: int, frame: int) -> Sample:
        """Return zeros and padding in place of a sample that cannot be read, with the indices of that sample."""
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
                sample[key] = torch.zeros((*steps, *shape), dtype=getattr(torch, feature["dtype"]))
        numbers = {"episode_index": episode, "frame_index": frame, "index": self.metadata.first_index(episode) + frame}
        return sample | {key: torch.full_like(sample[key], number) for key, number in numbers.items()}

    def _log_once(self, error: CorruptDataError) -> None:
        """Log an error, unless a process of this rank has already logged one for the same file."""
        digest = blake2b(error.location.encode(), digest_size=8).hexdigest()
        with suppress(FileExistsError):
            (self._folder.path / f"reported-{digest}").touch(exist_ok=False)
            logger.warning("skipped a sample: %s", error)


class _Folder:
    """A temporary folder, deleted with this object; the constructor also deletes those of killed processes."""

    def __init__(self, parent: str | os.PathLike[str] | None) -> None:
        parent = Path(parent if parent is not None else tempfile.gettempdir())
        with cache_errors("a data set", parent):
            parent.mkdir(parents=True, exist_ok=True)
            for old in parent.glob(f"{_PREFIX}*"):
                _delete_if_abandoned(old)
            self.path, lock = _create_locked_folder(parent)
        self._remove: Callable[[], object] | None = weakref.finalize(self, _remove, self.path, os.getpid(), lock)

    def remove(self) -> None:
        """Delete the folder, unless this object is a copy in a worker."""
        if self._remove is not None:
            self._remove()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_remove": None}


def _create_locked_folder(parent: Path) -> tuple[Path, IO[str]]:
    """Return a new folder and its lock file; forked workers inherit the lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = (path / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock.fileno()).st_nlink:  # 0: another process deleted it before it was locked
            return path, lock
        lock.close()


def used_bytes(folder: Path) -> int:
    """Return the size of all files below a folder, in bytes."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # deleted in the meantime
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
        return  # in use, or just being created


def _check_episodes(episodes: Sequence[int] | None, total: int) -> npt.NDArray[np.int64]:
    chosen = np.arange(total) if episodes is None else np.asarray(list(episodes), dtype=np.int64)
    if not chosen.size or chosen.min() < 0 or chosen.max() >= total or len(np.unique(chosen)) < len(chosen):
        raise DataError(
            f"cannot select episodes: the first ones are {chosen[:5].tolist()}, expected at least one, all in 0 to "
            f"{total - 1}, each once. Change episodes."
        )
    return chosen


def _tensor(column: Any, rows: int | Offsets) -> Any:
    if isinstance(column, list):
        return column[rows] if isinstance(rows, int) else [column[row] for row in rows]
    return torch.from_numpy(np.array(column[rows]))


def _shape_of_picture(feature: Mapping[str, Any]) -> tuple[int, ...]:
    first, _, last = shape = feature["shape"]
    return 3, *(shape[1:] if first < last else shape[:2])  # (C, H, W) or (H, W, C); decoded images have three channels
