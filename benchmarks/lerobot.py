"""Measure the LeRobot reader: frames and rows per second, workers, memory, and bytes from an HTTP root.

    python benchmarks/lerobot.py [--rounds 7] [--only frames rows workers memory bytes] [--dir DIR] [--out DIR]
                                 [--smoke]

Frames: our reader with our loader, without workers, compared with a plain PyAV loop over the same frames in the same
order. The loop keeps files open, seeks, decodes up to the frame, converts it to an RGB array, and discards it or makes
batches of shape (batch, 3, height, width) as for a trainer. All use one thread. Rows: a data set without images,
compared with Hugging Face's streaming of the same parquet files. Workers: frames per second after the first batches,
and the time from a root to the first batch, also after a resume. Memory: of the trainer and its workers, as the kernel
counts it, with rows so wide that they are visible. Bytes: what a server sends for an epoch, compared with the packets
and row groups of the episodes, and with the full files.

Contestants take turns, in a different order each round. Values are compared outside of the timed part: our images with
those of the plain loop, rows with the parquet files, batches of workers with batches without workers, first batches
with the loader's order, batches from the server with those of local files. Data sets are written once and kept in DIR.
Writes lerobot.json, prints tables. `--smoke` runs everything in seconds, with small images and short episodes.
"""

import json
import logging
import multiprocessing
import os
import re
import shutil
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import av
import harness
import numpy as np
import pyarrow.parquet as pq
import torch
from av.video.reformatter import VideoReformatter
from torch.utils.data import DataLoader

from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.integrations.lerobot import LeRobotDataset
from fsdp2_strategy.integrations.lerobot.dataset import used_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "examples"))
from helpers.barcodes import write_barcoded
from helpers.http_server import FileServer
from lerobot_writer import DatasetWriter

PARTS = ("frames", "rows", "workers", "memory", "bytes")
BATCH = 32
POOL = 16
TOP, WRIST = "observation.images.top", "observation.images.wrist"
FramePosition = tuple[str, float]
"""A video file, and a time in it in seconds."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the data sets, and the amounts that a turn reads."""

    heights: tuple[int, int]
    """Heights of the images of two cameras, and of one camera."""
    batches_per_turn: int
    """Batches of images of one camera; with two cameras a turn has half of them."""
    rows: tuple[int, int, int]
    """Number of episodes, their length, and numbers per row."""
    row_batches_per_turn: int
    """Batches of rows per turn."""
    steady: tuple[int, int]
    """Number of warm-up batches, and of warm-up and timed batches together."""
    wide_rows: tuple[int, int, int]
    """Number of episodes, their length, and numbers per row, for the measurement of memory."""
    memory_samples: tuple[int, int]
    """Batches between two samples of the memory, and until the last sample."""
    large: tuple[int, int]
    """Length and image height of the episodes that are served over HTTP."""


MEASURED = Sizes((240, 480), 12, (64, 300, 14), 100, (6, 18), (160, 128, 2048), (40, 240), (120, 240))
SMOKE = Sizes((48, 48), 2, (16, 40, 14), 10, (2, 4), (80, 16, 64), (4, 12), (12, 48))


# --- data sets, written once -------------------------------------------------------------------------------------


def write_once(root: Path, write: Callable[[Path], object]) -> Path:
    """Write a data set unless it exists, and return its root; an incomplete one has no meta/info.json."""
    if not (root / "meta" / "info.json").exists():
        shutil.rmtree(root, ignore_errors=True)
        start = time.perf_counter()
        write(root)
        print(f"wrote {root.name} in {time.perf_counter() - start:.0f} s")
    return root


def one_camera(root: Path) -> Path:
    """Return a copy of a data set without its second camera."""

    def write(target: Path) -> None:
        shutil.copytree(root, target, ignore=shutil.ignore_patterns(WRIST, "info.json"))
        info = json.loads((root / "meta" / "info.json").read_text())
        del info["features"][WRIST]
        (target / "meta" / "info.json").write_text(json.dumps(info))

    return write_once(root.with_name(f"{root.name}-one"), write)


def image_episodes(folder: Path, codec: str, height: int) -> Path:
    """Return a data set of 16 episodes with 12 frames of two cameras, and four episodes per video file."""
    size = {"height": height, "width": height * 4 // 3}
    return write_once(
        folder / f"{codec}-{height}",
        lambda root: write_barcoded(
            root, [12] * 16, cameras=(TOP, WRIST), episodes_per_video_file=4, codec=codec, **size
        ),
    )


def row_episodes(folder: Path, episodes: int, length: int, width: int) -> Path:
    """Return a data set of numbers only, ``width`` per state, in files of about 2 MB or more."""
    features = {
        "observation.state": {"dtype": "float32", "shape": (width,)},
        "action": {"dtype": "float32", "shape": (14,)},
    }
    generator = np.random.default_rng(0)

    def write(root: Path) -> None:
        with DatasetWriter(root, fps=30, features=features, data_files_size_in_mb=max(2, width // 20)) as writer:
            for _ in range(episodes):
                state = generator.standard_normal((length, width), dtype=np.float32)
                writer.add_episode({"observation.state": state, "action": state[:, :14]}, "move")

    return write_once(folder / f"numbers-{episodes}-{length}-{width}", write)


def large_episodes(folder: Path, length: int, height: int) -> Path:
    """Return a data set of 16 episodes, with four per video file and eight per data file."""
    return write_once(
        folder / f"large-{length}-{height}",
        lambda root: write_barcoded(
            root,
            [length] * 16,
            cameras=(TOP,),
            height=height,
            width=height * 4 // 3,
            episodes_per_video_file=4,
            episodes_per_data_file=8,
            crf=8,
        ),
    )


# --- measuring ---------------------------------------------------------------------------------------------------


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the wall-clock seconds and the CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def take_turns(contestants: Mapping[str, Callable[[], tuple[float, float]]], rounds: int) -> dict[str, Any]:
    """Return each contestant's seconds, turn by turn, after a warm-up turn."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for name in [*contestants, *harness.turn_order(list(contestants), rounds)]:
        turns[name].append(contestants[name]())
    return {
        name: {"seconds": [wall for wall, _ in of[1:]], "cpu_seconds": [cpu for _, cpu in of[1:]]}
        for name, of in turns.items()
    }


def format_ratio(values: Sequence[float], form: str = ".2f") -> str:
    median, low, high = values
    return f"{median:{form}} ({low:{form}} - {high:{form}})"


def open_dataset(root: Path | str, pool: int = POOL, **options: Any) -> LeRobotDataset:
    return LeRobotDataset(root, pool=pool, video_dtype=torch.uint8, **options)


def batches(dataset: Any, count: int, **options: Any) -> Iterator[Any]:
    """Yield the first ``count`` batches of a new loader."""
    loader = ResumableLoader(dataset, BATCH, **{"pool": POOL} | options)
    try:
        while count > 0:
            for batch in loader:
                yield batch
                count -= 1
                if not count:
                    break
    finally:
        loader.close()


# --- checking ----------------------------------------------------------------------------------------------------


def digests(batch: Mapping[str, Any]) -> dict[str, str]:
    """Return a checksum of each entry of a batch."""
    return {
        key: harness.digest_of(value) if isinstance(value, torch.Tensor) else repr(value)
        for key, value in batch.items()
    }


def check_batches(found: Iterable[Mapping[str, Any]], expected: Iterable[Mapping[str, str]], name: str) -> None:
    """Compare batches with digests, up to the end of the shorter iterable."""
    for i, (batch, digest) in enumerate(zip(found, expected, strict=False)):
        if digests(batch) != digest:
            raise harness.ValuesError(f"{name}: batch {i} does not have the expected values")


def check_images(root: Path, requested: Sequence[FramePosition], count: int) -> None:
    """Compare our first batches with those of the plain loop."""
    with closing(open_dataset(root)) as dataset, closing(batches(dataset, count)) as ours:
        keys = dataset.metadata.video_keys
        bare = bare_batches(requested, len(keys), [0])
        for i, (batch, images) in enumerate(zip(ours, bare, strict=False)):
            if not all(map(torch.equal, (batch[key] for key in keys), images)):
                raise harness.ValuesError(f"{root.name}: the images of batch {i} differ from those of the plain loop")


def check_rows(batch: Mapping[str, Any], root: Path, name: str) -> None:
    """Compare a batch, or a single row, with the parquet files."""
    files = [pq.read_table(file).to_pydict() for file in sorted((root / "data").rglob("*.parquet"))]
    for key in ("observation.state", "action"):
        full = np.array([row for file in files for row in file[key]], dtype=np.float32)
        if not np.array_equal(np.asarray(batch[key], dtype=np.float32), full[np.asarray(batch["index"])]):
            raise harness.ValuesError(f"{name}: {key} differs from the files")


# --- frames ------------------------------------------------------------------------------------------------------


def frame_positions(root: Path, count: int) -> list[FramePosition]:
    """Return the frames of the first batches, in the order of the loader."""
    with closing(open_dataset(root)) as dataset:
        begins = np.concatenate([[0], np.cumsum(dataset.episode_lengths)])
        found = []
        for sample in ResumableLoader(dataset, BATCH, pool=POOL).peek(count * BATCH):
            episode = int(np.searchsorted(begins, sample, side="right")) - 1
            for key in dataset.metadata.video_keys:
                span = dataset.metadata.video(key, episode)
                seconds = span.begin_seconds + int(sample - begins[episode]) / dataset.metadata.fps
                found.append((str(root / span.path), seconds))
    return found


def bare_loop(requested: Sequence[FramePosition], decoded: list[int]) -> Iterator[Any]:
    """Decode frames with plain PyAV, one by one; add the number of decoded frames to ``decoded[0]``."""
    files: dict[str, Any] = {}
    reformatter = VideoReformatter()
    for path, seconds in requested:
        if path not in files:
            files[path] = av.open(path)
            files[path].streams.video[0].codec_context.thread_count = 1
        stream = files[path].streams.video[0]
        pts = round(seconds / stream.time_base)
        files[path].seek(pts, stream=stream)
        for frame in files[path].decode(stream):
            decoded[0] += 1
            if frame.pts >= pts:
                break
        yield reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
    for file in files.values():
        file.close()


def bare_batches(requested: Sequence[FramePosition], cameras: int, decoded: list[int]) -> Iterator[list[torch.Tensor]]:
    """Make batches of the frames as for a trainer: (batch, 3, height, width) for each camera."""
    images: list[torch.Tensor] = []
    for image in bare_loop(requested, decoded):
        images.append(torch.from_numpy(image).permute(2, 0, 1))
        if len(images) == BATCH * cameras:
            yield [torch.stack(images[camera::cameras]) for camera in range(cameras)]
            images.clear()


def timed_next(iterator: Iterator[Any], count: int) -> tuple[float, float]:
    return timed(lambda: deque(islice(iterator, count), maxlen=0))


def frames(folder: Path, rounds: int, sizes: Sizes) -> dict:
    """Measure both codecs, with small images of two cameras and large images of one; a turn reads the next batches.

    The warm-up turn opens the files and loads the rows of the episodes.
    """
    rows = {}
    for codec, (height, cameras) in product(("libx264", "libsvtav1"), zip(sizes.heights, (2, 1), strict=True)):
        root = image_episodes(folder, codec, height)
        root = root if cameras == 2 else one_camera(root)
        per_turn = sizes.batches_per_turn // cameras  # batches
        requested = frame_positions(root, per_turn * (rounds + 1))
        check_images(root, requested, per_turn)
        count, decoded = per_turn * BATCH * cameras, [0]
        bare, in_batches = bare_loop(requested, decoded), bare_batches(requested, cameras, [0])
        with closing(open_dataset(root)) as dataset, closing(batches(dataset, per_turn * (rounds + 1))) as ours:
            contestants = {
                "ours": partial(timed_next, ours, per_turn),
                "bare": partial(timed_next, bare, count),
                "bare, in batches": partial(timed_next, in_batches, per_turn),
            }
            turns = take_turns(contestants, rounds)
            decodings = {"ours": dataset.counts["frames_decoded"], "bare": decoded[0]}
        row = {
            "frames_in_a_turn": count,
            "decoded_for_one": {name: n / len(requested) for name, n in decodings.items()},
            "bytes_of_one": sum(file.stat().st_size for file in root.rglob("*.mp4")) / (16 * 12 * cameras),
            "turns": turns,
            "speed_ratio": {
                who: harness.ratio(turns[who]["seconds"], turns["ours"]["seconds"])
                for who in ("bare", "bare, in batches")
            },
        }
        name = f"{codec}, {height}x{height * 4 // 3}, {cameras} camera{'s' * (cameras - 1)}"
        rows[name] = row
        per_second = {who: count / statistics.median(of["seconds"]) for who, of in turns.items()}
        print(
            f"{name:30s}: ours {per_second['ours']:5.0f} frames/s, bare {per_second['bare']:5.0f}, in batches "
            f"{per_second['bare, in batches']:5.0f}; ours / bare {format_ratio(row['speed_ratio']['bare'])}, "
            f"/ in batches {format_ratio(row['speed_ratio']['bare, in batches'])}; decoded for one frame: ours "
            f"{row['decoded_for_one']['ours']:.2f}, bare {row['decoded_for_one']['bare']:.2f}"
        )
    return rows


# --- rows --------------------------------------------------------------------------------------------------------


def repeat(iterable: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from iterable


def rows(folder: Path, rounds: int, sizes: Sizes) -> dict:
    """Measure samples per second of a data set without images: 64 episodes of 300 frames, 28 numbers each.

    All shuffle within as many samples as 16 episodes have. Lists are single samples, all others are batches.
    """
    root = row_episodes(folder, *sizes.rows)
    count = sizes.row_batches_per_turn
    with closing(open_dataset(root)) as dataset:
        streams = {"ours": batches(dataset, 1 + count * (rounds + 1))}
        items_per_batch = {"ours": 1}
        missing = {}
        try:
            import datasets
        except ModuleNotFoundError as error:
            missing["datasets"] = {"error": f"not installed: {error.name}"}
            print(f"datasets: {missing['datasets']['error']}")
        else:
            datasets.disable_progress_bars()
            files = sorted(str(file) for file in (root / "data").rglob("*.parquet"))
            cache = str(folder / "datasets")
            shards = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=cache)
            stream = shards.shuffle(seed=0, buffer_size=POOL * sizes.rows[1])
            for form in ("torch", "numpy"):
                streams[f"datasets, {form}"] = repeat(DataLoader(stream.with_format(form), BATCH))
            streams["datasets, lists"] = repeat(stream)
            items_per_batch = {name: BATCH if name.endswith("lists") else 1 for name in streams}
        for name, of in streams.items():
            check_rows(next(of), root, name)
        calls = {name: partial(timed_next, of, count * items_per_batch[name]) for name, of in streams.items()}
        turns = take_turns(calls, rounds)
        streams["ours"].close()
    for name, of in turns.items():
        relative = harness.ratio(of["seconds"], turns["ours"]["seconds"])
        per_second = count * BATCH / statistics.median(of["seconds"])
        print(f"rows, {name:15s}: {per_second:7.0f} samples/s; its time / ours {format_ratio(relative)}")
    return {"samples": count * BATCH, "turns": turns | missing}


# --- workers -----------------------------------------------------------------------------------------------------


def first_batch(root: Path, workers: int, consumed: int) -> tuple[float, float]:
    """Return the time from a root to the first batch: metadata, loader, position, workers."""

    def start(workers: int) -> tuple[ResumableLoader, LeRobotDataset]:
        dataset = open_dataset(root)
        loader = ResumableLoader(dataset, BATCH, pool=POOL, num_workers=workers)
        loader.load_state_dict(loader.state_dict() | {"batches": consumed, "samples": consumed * BATCH})
        return loader, dataset

    def first() -> None:
        opened.extend(start(workers))
        found.append(next(iter(opened[0])))

    opened: list[Any] = []
    found: list[Mapping[str, Any]] = []
    seconds = timed(first)
    opened.extend(start(0))
    if found[0]["index"].tolist() != list(opened[2].peek(BATCH)):
        raise harness.ValuesError(f"the first batch after {consumed} batches is not the next one in the order")
    for resource in opened:
        resource.close()
    return seconds


def workers(folder: Path, rounds: int, sizes: Sizes) -> dict:
    """Measure workers with two cameras of 240x320: the speed in steady state, and the time to the first batch."""
    root = image_episodes(folder, "libx264", sizes.heights[0])
    begin, end = sizes.steady
    with closing(open_dataset(root)) as dataset:
        expected = [digests(batch) for batch in batches(dataset, begin)]

    def steady(count: int) -> tuple[float, float]:
        with closing(open_dataset(root)) as dataset:
            loaded = batches(dataset, end, num_workers=count)
            check_batches(islice(loaded, begin), expected, f"{count} workers")
            return timed(lambda: [None for _ in loaded])

    turns = take_turns({str(count): lambda count=count: steady(count) for count in (0, 1, 2)}, rounds)
    frames = (end - begin) * BATCH * 2
    for count, of in turns.items():
        relative = harness.ratio(turns["0"]["seconds"], of["seconds"])
        per_second = frames / statistics.median(of["seconds"])
        print(f"{count} workers: {per_second:6.0f} frames/s, {format_ratio(relative)} times the speed without workers")
    result: dict[str, Any] = {"frames": frames, "turns": turns, "first_batch": {}}
    for count in (0, 2):
        consumed = {"0": 0, "3 (mid-epoch)": 3, "10^6": 10**6}
        starts = take_turns(
            {name: lambda at=at, count=count: first_batch(root, count, at) for name, at in consumed.items()}, rounds
        )
        for name, of in starts.items():
            relative = harness.ratio(of["seconds"], starts["0"]["seconds"])
            print(
                f"{count} workers, first batch after {name:13s} batches: {statistics.median(of['seconds']) * 1e3:6.0f} "
                f"ms, {format_ratio(relative)} times the time without a resume"
            )
        result["first_batch"][str(count)] = starts
    return result


# --- memory ------------------------------------------------------------------------------------------------------


def memory_mappings(process: int, pattern: str = "") -> dict[str, int]:
    """Sum up the bytes of a process's memory mappings, or of those whose line in smaps contains a pattern."""
    sums = {"Rss": 0, "Pss": 0, "Private": 0}
    matches = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            matches = pattern in line
        elif matches and (found := re.match(r"(Rss|Pss|Private)(?:_Clean|(?<=Private)_Dirty)?: +(\d+) kB", line)):
            sums[found[1]] += int(found[2]) * 1024
    return sums


def loader_memory(root: Path, pool: int, count: int, step: int, last: int) -> dict[str, Any]:
    """Measure this process and its workers in the middle of an epoch; runs in a new process."""
    with closing(open_dataset(root, pool)) as dataset:
        before = memory_mappings(os.getpid())
        loader = ResumableLoader(dataset, BATCH, pool=pool, num_workers=count)
        peaks: dict[str, dict[str, float]] = {}
        for n, _ in enumerate(loader):
            if n % step == step - 1:
                children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
                for name, process in (
                    ("trainer", os.getpid()),
                    *((f"worker {i}", int(c)) for i, c in enumerate(children)),
                ):
                    found = {"all": memory_mappings(process), "rows": memory_mappings(process, "/episode-")}
                    flat = {f"{part} {kind}": n for part, of in found.items() for kind, n in of.items()}
                    peak = peaks.setdefault(name, flat)
                    peak.update({kind: max(peak[kind], n) for kind, n in flat.items()})
            if n == last:
                break
        loader.close()
        row = dataset[0]
        row_bytes = 4 * (row["observation.state"].numel() + row["action"].numel())
        episode_bytes = float(dataset.episode_lengths[0]) * row_bytes
    return {"before": before, "peaks": peaks, "pool_bytes": pool * episode_bytes}


def memory(folder: Path, _rounds: int, sizes: Sizes) -> dict:
    """Measure two workers with 1 MB of rows per episode and without images, and the memory of open decoders."""
    root = row_episodes(folder, *sizes.wide_rows)
    found = {}
    for pool in (16, 64):
        measured = in_new_process(loader_memory, root, pool, 2, *sizes.memory_samples, smoke=sizes is SMOKE)
        found[f"pool {pool}, 2 workers"] = measured
        print(
            f"pool {pool}, 2 workers: the pool's rows take {measured['pool_bytes'] / 1e6:.0f} MB; the trainer has "
            f"{measured['before']['Private'] / 1e6:.0f} MB of its own at the start"
        )
        for name, peak in measured["peaks"].items():
            mb = {kind: f"{n / 1e6:.0f}" for kind, n in peak.items()}
            print(
                f"    {name:8s}: RSS {mb['all Rss']} MB, PSS {mb['all Pss']} MB, private {mb['all Private']} MB; rows "
                f"{mb['rows Rss']}, {mb['rows Pss']}, {mb['rows Private']} MB"
            )
    for codec in ("libx264", "libsvtav1"):
        height = sizes.heights[1]
        name = f"{codec} decoders, {height}x{height * 4 // 3}"
        root = image_episodes(folder, codec, height)
        found[name] = measured = in_new_process(decoder_memory, root, smoke=sizes is SMOKE)
        print(f"{name}: {measured['bytes_per_decoder'] / 1e6:.1f} MB each")
    return found


def decoder_memory(root: Path) -> dict[str, float]:
    """Measure the memory of eight open files, four of each camera, in addition to a first open file."""
    with closing(open_dataset(root)) as dataset, closing(open_dataset(one_camera(root))) as first:
        first[0]
        before = memory_mappings(os.getpid())["Private"]
        for episode in range(16):
            dataset[12 * episode + 5]
        return {"bytes_per_decoder": (memory_mappings(os.getpid())["Private"] - before) / 8}


def in_new_process(function: Callable[..., Any], *arguments: Any, smoke: bool) -> Any:
    """Call a function in a new process, and return its result.

    With ``--smoke`` the process is forked from one that has done the imports; its memory is not meaningful.
    """
    context = multiprocessing.get_context("forkserver" if smoke else "spawn")
    context.set_forkserver_preload(harness.PRELOADED)
    with ProcessPoolExecutor(1, context, init_trainer, (multiprocessing.get_start_method(),)) as pool:
        return pool.submit(function, *arguments).result()


def init_trainer(start_method: str) -> None:
    """Initialise a new process like a trainer, whose workers use the default start method."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method(start_method, force=True)


# --- bytes -------------------------------------------------------------------------------------------------------


def needed_bytes(root: Path, episodes: Sequence[int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of the episodes' packets and row groups, and the bytes of the files that contain them."""
    with closing(open_dataset(root)) as dataset:
        metadata = dataset.metadata
        parts = {"videos": 0, "data": 0}
        files: dict[str, set[str]] = {"videos": set(), "data": set()}
        for episode in episodes:
            files["data"].add(metadata.data_path(episode))
            groups = pq.ParquetFile(root / metadata.data_path(episode)).metadata
            first, length = metadata.first_row(episode), int(metadata.lengths[episode])
            begin = 0
            for i in range(groups.num_row_groups):
                group = groups.row_group(i)
                if first < begin + group.num_rows and begin < first + length:
                    columns = [group.column(c) for c in range(group.num_columns)]
                    parts["data"] += sum(column.total_compressed_size for column in columns)
                begin += group.num_rows
            for key in metadata.video_keys:
                span = metadata.video(key, episode)
                files["videos"].add(span.path)
                with av.open(str(root / span.path)) as container:
                    stream = container.streams.video[0]
                    low, high = (round(s / stream.time_base) for s in (span.begin_seconds, span.end_seconds))
                    parts["videos"] += sum(
                        p.size for p in container.demux(stream) if p.pts is not None and low <= p.pts < high
                    )
    full_files = {part: sum((root / file).stat().st_size for file in of) for part, of in files.items()}
    meta = sum(file.stat().st_size for file in (root / "meta").rglob("*") if file.is_file())
    return parts | {"meta": meta}, full_files | {"meta": meta}


def serve_epoch(root: Path, episodes: Sequence[int], pool: int) -> dict[str, Any]:
    """Serve an epoch over HTTP; return the bytes sent, by folder, and the episodes that were fetched.

    They include episodes of the next epoch that are fetched ahead.
    """
    fetched: list[int] = []
    current: set[int] = set()
    disk_bytes, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            disk_bytes.append(used_bytes(dataset._folder.path))

    def hold(now: Sequence[int], soon: Sequence[int]) -> None:
        fetched.extend(episodes[index] for index in {*now, *soon} - current)
        current.clear()
        current.update(now, soon)
        LeRobotDataset.hold(dataset, now, soon)

    cache = root.parent / "cache"
    with closing(open_dataset(root, pool, episodes=episodes)) as local:
        loader = ResumableLoader(local, BATCH, pool=pool)
        expected = [digests(batch) for batch in loader]
        loader.close()
    options = {"episodes": episodes, "cache_dir": cache}
    with FileServer(root) as server, closing(open_dataset(server.url, pool, **options)) as dataset:
        dataset.hold = hold  # type: ignore[method-assign]
        watching = threading.Thread(target=watch)
        watching.start()
        loader = ResumableLoader(dataset, BATCH, pool=pool)
        check_batches(loader, expected, "over HTTP")
        before = -1
        while sum(server.sent.values()) > before:  # waits for files that are fetched ahead
            before = sum(server.sent.values())
            time.sleep(0.5)
        loader.close()
        done.set()
        watching.join()
        sent: dict[str, int] = {}
        for path, count in server.sent.items():
            sent[path.split("/")[0]] = sent.get(path.split("/")[0], 0) + count
        requests = sum(server.requests.values())
    return {"sent": sent, "requests": requests, "peak_disk_bytes": max(disk_bytes), "admitted": fetched}


def http_bytes(folder: Path, _rounds: int, sizes: Sizes) -> dict:
    """Measure the bytes that a server sends for an epoch of all episodes, and of a quarter of them."""
    root = large_episodes(folder, *sizes.large)
    found = {}
    for name, episodes, pool in (
        ("all episodes", range(16), 4),
        ("all episodes", range(16), 16),
        ("a quarter of them", range(1, 16, 4), 4),
    ):
        served = serve_epoch(root, list(episodes), pool)
        needed, _ = needed_bytes(root, served["admitted"])
        _, full_files = needed_bytes(root, episodes)
        row = {**served, "needed": needed, "whole_files": full_files}
        found[f"{name}, pool {pool}"] = row
        total = {kind: sum(row[kind].values()) for kind in ("needed", "sent", "whole_files")}
        print(
            f"{name}, pool {pool}: sent {total['sent'] / 1e6:.1f} MB in {row['requests']} requests for "
            f"{len(row['admitted'])} episodes, needed {total['needed'] / 1e6:.1f} MB: sent / needed "
            f"{total['sent'] / total['needed']:.3f}, full files {total['whole_files'] / 1e6:.1f} MB; at most "
            f"{row['peak_disk_bytes'] / 1e6:.1f} MB on disk"
        )
        print("    " + "; ".join(f"{part}: sent {row['sent'][part]}, needed {n}" for part, n in needed.items()))
    return found


def main() -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("SVT_LOG", "1")  # hides the start-up messages of the encoder
    parser = harness.parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS)
    args = harness.parse(parser, smoke={}, scratch_folders={"dir": Path("runs/lerobot")})
    logging.disable()  # hides the messages of the contestants
    parts = dict(zip(PARTS, (frames, rows, workers, memory, http_bytes), strict=True))
    sizes = SMOKE if args.smoke else MEASURED
    for name in args.only:
        start = time.perf_counter()
        entry = {
            **harness.environment(smoke=args.smoke),
            "part": name,
            "result": parts[name](args.dir, args.rounds, sizes),
        }
        harness.merge(args.out / "lerobot.json", json.loads(json.dumps(entry)), ("hardware", "part"))
        print(f"{name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
