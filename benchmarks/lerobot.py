"""The LeRobot reader: frames a second, rows a second, workers, memory, and bytes from an HTTP root.

    python benchmarks/lerobot.py [--rounds 7] [--only frames rows workers memory bytes] [--dir DIR] [--out DIR]
                                 [--smoke]

Frames: our reader behind our loader, without workers, against a bare PyAV loop over the very same frames in the same
order: files kept open, seek, decode to the frame, convert to an RGB array, and throw it away, or make batches of them
as a trainer needs them, (batch, 3, height, width). One thread everywhere. Rows: a data set without pictures, against
Hugging Face's streaming of the same parquet files. Workers: frames a second after the first batches, and the time until
the first batch from nothing, also after a resume. Memory: of the trainer and its workers, as the kernel counts it, with
rows so wide that they show. Bytes: what a server sends for an epoch, beside the packets and row groups that hold the
episodes, and the files that hold them.

Contestants take turns, in another order each round. Values are compared outside of the timed part: our pictures with
those of the bare loop, rows with the parquet files, batches of workers with those without, first batches with the
loader's order, batches from the server with those of local files. Data sets are written once, and kept in DIR. Writes
lerobot.json, prints tables. `--smoke` runs all of it in seconds, with small pictures and short episodes.
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
from fsdp2_strategy.lerobot import LeRobotDataset
from fsdp2_strategy.lerobot.dataset import used_bytes
from fsdp2_strategy.lerobot.generate import DatasetWriter

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.barcodes import write_barcoded
from helpers.http_server import FileServer

PARTS = ("frames", "rows", "workers", "memory", "bytes")
BATCH = 32
POOL = 16
TOP, WRIST = "observation.images.top", "observation.images.wrist"
Place = tuple[str, float]
"""A video file, and seconds in it."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the data sets, and how much of them a turn reads."""

    heights: tuple[int, int]
    """Of pictures from two cameras, and of those from one."""
    in_turn: int
    """Batches of pictures from one camera."""
    numbers: tuple[int, int, int]
    """Episodes, their length, and numbers a row."""
    rows_in_turn: int
    """Batches of rows."""
    steady: tuple[int, int]
    """Batches before those that are timed, and with them."""
    wide: tuple[int, int, int]
    """Episodes, their length, and numbers a row, where memory is measured."""
    looks: tuple[int, int]
    """Batches from one look at the memory to the next, and to the last."""
    large: tuple[int, int]
    """Length and height of episodes that are served."""


MEASURED = Sizes((240, 480), 12, (64, 300, 14), 100, (6, 18), (160, 128, 2048), (40, 240), (120, 240))
SMOKE = Sizes((48, 48), 2, (16, 40, 14), 10, (2, 4), (80, 16, 64), (4, 12), (12, 48))


# --- data sets, written once -------------------------------------------------------------------------------------


def once(root: Path, write: Callable[[Path], object]) -> Path:
    """Return a data set that is written where it is not yet; one that was left half-written has no meta/info.json."""
    if not (root / "meta" / "info.json").exists():
        shutil.rmtree(root, ignore_errors=True)
        start = time.perf_counter()
        write(root)
        print(f"wrote {root.name} in {time.perf_counter() - start:.0f} s")
    return root


def of_one_camera(root: Path) -> Path:
    """Return the same data set without its second camera."""

    def write(half: Path) -> None:
        shutil.copytree(root, half, ignore=shutil.ignore_patterns(WRIST, "info.json"))
        info = json.loads((root / "meta" / "info.json").read_text())
        del info["features"][WRIST]
        (half / "meta" / "info.json").write_text(json.dumps(info))

    return once(root.with_name(f"{root.name}-one"), write)


def pictures(folder: Path, codec: str, height: int) -> Path:
    """Return 16 episodes of 12 frames from two cameras, four episodes a file."""
    size = {"height": height, "width": height * 4 // 3}
    return once(
        folder / f"{codec}-{height}",
        lambda root: write_barcoded(
            root, [12] * 16, cameras=(TOP, WRIST), episodes_per_video_file=4, codec=codec, **size
        ),
    )


def numbers(folder: Path, episodes: int, length: int, width: int) -> Path:
    """Return episodes of numbers alone, so many a row, about 2 MB a file."""
    features = {
        "observation.state": {"dtype": "float32", "shape": (width,)},
        "action": {"dtype": "float32", "shape": (14,)},
    }
    draws = np.random.default_rng(0)

    def write(root: Path) -> None:
        with DatasetWriter(root, fps=30, features=features, data_files_size_in_mb=max(2, width // 20)) as writer:
            for _ in range(episodes):
                state = draws.standard_normal((length, width), dtype=np.float32)
                writer.add_episode({"observation.state": state, "action": state[:, :14]}, "move")

    return once(folder / f"numbers-{episodes}-{length}-{width}", write)


def large_episodes(folder: Path, length: int, height: int) -> Path:
    """Return 16 episodes, some MB each if they have 120 frames, four in a file, and in a data file eight."""
    return once(
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
    """Return the seconds that a call takes, and those that this process computes meanwhile."""
    wall, computing = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - computing


def take_turns(contestants: Mapping[str, Callable[[], tuple[float, float]]], rounds: int) -> dict[str, Any]:
    """Return each one's seconds, turn by turn, after one turn that does not count."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for name in [*contestants, *harness.in_turns(list(contestants), rounds)]:
        turns[name].append(contestants[name]())
    return {
        name: {"seconds": [wall for wall, _ in of[1:]], "cpu_seconds": [cpu for _, cpu in of[1:]]}
        for name, of in turns.items()
    }


def shown(values: Sequence[float], form: str = ".2f") -> str:
    median, low, high = values
    return f"{median:{form}} ({low:{form}} - {high:{form}})"


def opened(root: Path | str, pool: int = POOL, **options: Any) -> LeRobotDataset:
    return LeRobotDataset(root, pool=pool, video_dtype=torch.uint8, **options)


def batches(dataset: Any, count: int, **options: Any) -> Iterator[Any]:
    """Give the first batches of a new loader."""
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
    """Return a checksum for each part of a batch."""
    return {
        key: harness.digest_of(part) if isinstance(part, torch.Tensor) else repr(part) for key, part in batch.items()
    }


def check_batches(given: Iterable[Mapping[str, Any]], expected: Iterable[Mapping[str, str]], what: str) -> None:
    """Compare batches with digests, as long as there are both."""
    for i, (batch, digest) in enumerate(zip(given, expected, strict=False)):
        if digests(batch) != digest:
            raise harness.ValuesError(f"{what}: batch {i} does not have the values that it should")


def check_pictures(root: Path, wanted: Sequence[Place], count: int) -> None:
    """Compare our first batches with those of the bare loop."""
    with closing(opened(root)) as dataset, closing(batches(dataset, count)) as ours:
        keys = dataset.metadata.video_keys
        bare = bare_batches(wanted, len(keys), [0])
        for i, (batch, pictures) in enumerate(zip(ours, bare, strict=False)):
            if not all(map(torch.equal, (batch[key] for key in keys), pictures)):
                raise harness.ValuesError(f"{root.name}: pictures of batch {i} are not those of the bare loop")


def check_rows(batch: Mapping[str, Any], root: Path, what: str) -> None:
    """Compare a batch, or a single row, with the parquet files."""
    files = [pq.read_table(file).to_pydict() for file in sorted((root / "data").rglob("*.parquet"))]
    for key in ("observation.state", "action"):
        whole = np.array([row for file in files for row in file[key]], dtype=np.float32)
        if not np.array_equal(np.asarray(batch[key], dtype=np.float32), whole[np.asarray(batch["index"])]):
            raise harness.ValuesError(f"{what}: {key} is not that of the files")


# --- frames ------------------------------------------------------------------------------------------------------


def places(root: Path, count: int) -> list[Place]:
    """Return the frames of the first batches, in the order in which the loader asks for them."""
    with closing(opened(root)) as dataset:
        begins = np.concatenate([[0], np.cumsum(dataset.episode_lengths)])
        found = []
        for sample in ResumableLoader(dataset, BATCH, pool=POOL).peek(count * BATCH):
            episode = int(np.searchsorted(begins, sample, side="right")) - 1
            for key in dataset.metadata.video_keys:
                span = dataset.metadata.video(key, episode)
                seconds = span.begin_seconds + int(sample - begins[episode]) / dataset.metadata.fps
                found.append((str(root / span.path), seconds))
    return found


def bare_loop(wanted: Sequence[Place], decoded: list[int]) -> Iterator[Any]:
    """Decode frames with PyAV alone, one after the other; count those that were decoded on the way."""
    files: dict[str, Any] = {}
    reformatter = VideoReformatter()
    for path, seconds in wanted:
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


def bare_batches(wanted: Sequence[Place], cameras: int, decoded: list[int]) -> Iterator[list[torch.Tensor]]:
    """Make batches of them as a trainer needs them: (batch, 3, height, width), one for each camera."""
    taken: list[torch.Tensor] = []
    for picture in bare_loop(wanted, decoded):
        taken.append(torch.from_numpy(picture).permute(2, 0, 1))
        if len(taken) == BATCH * cameras:
            yield [torch.stack(taken[camera::cameras]) for camera in range(cameras)]
            taken.clear()


def next_of(given: Iterator[Any], count: int) -> tuple[float, float]:
    return timed(lambda: deque(islice(given, count), maxlen=0))


def frames(folder: Path, rounds: int, sizes: Sizes) -> dict:
    """Measure both codecs, small pictures of two cameras and large ones of one; a turn is the next epoch, or two.

    In the turn that does not count files are opened and rows cut out, as for each episode once.
    """
    rows = {}
    for codec, (height, cameras) in product(("libx264", "libsvtav1"), zip(sizes.heights, (2, 1), strict=True)):
        root = pictures(folder, codec, height) if cameras == 2 else of_one_camera(pictures(folder, codec, height))
        in_turn = sizes.in_turn // cameras  # batches
        wanted = places(root, in_turn * (rounds + 1))
        check_pictures(root, wanted, in_turn)
        count, decoded = in_turn * BATCH * cameras, [0]
        bare, in_batches = bare_loop(wanted, decoded), bare_batches(wanted, cameras, [0])
        with closing(opened(root)) as dataset, closing(batches(dataset, in_turn * (rounds + 1))) as ours:
            contestants = {
                "ours": partial(next_of, ours, in_turn),
                "bare": partial(next_of, bare, count),
                "bare, in batches": partial(next_of, in_batches, in_turn),
            }
            turns = take_turns(contestants, rounds)
            decodings = {"ours": dataset.counts["frames_decoded"], "bare": decoded[0]}
        row = {
            "frames_in_a_turn": count,
            "decoded_for_one": {name: n / len(wanted) for name, n in decodings.items()},
            "bytes_of_one": sum(file.stat().st_size for file in root.rglob("*.mp4")) / (16 * 12 * cameras),
            "turns": turns,
            "speed_ratio": {
                who: harness.ratio(turns[who]["seconds"], turns["ours"]["seconds"])
                for who in ("bare", "bare, in batches")
            },
        }
        name = f"{codec}, {height}x{height * 4 // 3}, {cameras} camera{'s' * (cameras - 1)}"
        rows[name] = row
        a_second = {who: count / statistics.median(of["seconds"]) for who, of in turns.items()}
        print(
            f"{name:30s}: ours {a_second['ours']:5.0f} frames/s, bare {a_second['bare']:5.0f}, in batches "
            f"{a_second['bare, in batches']:5.0f}; ours / bare {shown(row['speed_ratio']['bare'])}, / in batches "
            f"{shown(row['speed_ratio']['bare, in batches'])}; decoded for one frame: ours "
            f"{row['decoded_for_one']['ours']:.2f}, bare {row['decoded_for_one']['bare']:.2f}"
        )
    return rows


# --- rows --------------------------------------------------------------------------------------------------------


def endless(given: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from given


def rows(folder: Path, rounds: int, sizes: Sizes) -> dict:
    """Measure samples a second of a data set without pictures: 64 episodes of 300 frames, 28 numbers each.

    All mix the frames of as many samples as 16 episodes have. Lists come one by one, all others as batches of tensors.
    """
    root = numbers(folder, *sizes.numbers)
    count = sizes.rows_in_turn
    with closing(opened(root)) as dataset:
        given = {"ours": batches(dataset, 1 + count * (rounds + 1))}
        in_batch = {"ours": 1}
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
            stream = shards.shuffle(seed=0, buffer_size=POOL * sizes.numbers[1])
            for form in ("torch", "numpy"):
                given[f"datasets, {form}"] = endless(DataLoader(stream.with_format(form), BATCH))
            given["datasets, lists"] = endless(stream)
            in_batch = {name: BATCH if name.endswith("lists") else 1 for name in given}
        for name, of in given.items():
            check_rows(next(of), root, name)
        turns = take_turns({name: partial(next_of, of, count * in_batch[name]) for name, of in given.items()}, rounds)
        given["ours"].close()
    for name, of in turns.items():
        against = harness.ratio(of["seconds"], turns["ours"]["seconds"])
        a_second = count * BATCH / statistics.median(of["seconds"])
        print(f"rows alone, {name:15s}: {a_second:7.0f} samples/s; its time / ours {shown(against)}")
    return {"samples": count * BATCH, "turns": turns | missing}


# --- workers -----------------------------------------------------------------------------------------------------


def first_batch(root: Path, workers: int, consumed: int) -> tuple[float, float]:
    """Return the time until the first batch, from a root alone: metadata, loader, position, workers."""

    def begin(workers: int) -> tuple[ResumableLoader, LeRobotDataset]:
        dataset = opened(root)
        loader = ResumableLoader(dataset, BATCH, pool=POOL, num_workers=workers)
        loader.load_state_dict(loader.state_dict() | {"batches": consumed, "samples": consumed * BATCH})
        return loader, dataset

    def first() -> None:
        held.extend(begin(workers))
        got.append(next(iter(held[0])))

    held: list[Any] = []
    got: list[Mapping[str, Any]] = []
    seconds = timed(first)
    held.extend(begin(0))
    if got[0]["index"].tolist() != list(held[2].peek(BATCH)):
        raise harness.ValuesError(f"the first batch after {consumed} is not the next one of the order")
    for one in held:
        one.close()
    return seconds


def workers(folder: Path, rounds: int, sizes: Sizes) -> dict:
    """Measure two cameras of 240x320: the steady speed, and the time to the first batch."""
    root = pictures(folder, "libx264", sizes.heights[0])
    begin, end = sizes.steady
    with closing(opened(root)) as dataset:
        expected = [digests(batch) for batch in batches(dataset, begin)]

    def steady(count: int) -> tuple[float, float]:
        with closing(opened(root)) as dataset:
            given = batches(dataset, end, num_workers=count)
            check_batches(islice(given, begin), expected, f"{count} workers")
            return timed(lambda: [None for _ in given])

    turns = take_turns({str(count): lambda count=count: steady(count) for count in (0, 1, 2)}, rounds)
    frames = (end - begin) * BATCH * 2
    for count, of in turns.items():
        against = harness.ratio(turns["0"]["seconds"], of["seconds"])
        a_second = frames / statistics.median(of["seconds"])
        print(f"{count} workers: {a_second:6.0f} frames/s, {shown(against)} times the speed without")
    result: dict[str, Any] = {"frames": frames, "turns": turns, "first_batch": {}}
    for count in (0, 2):
        consumed = {"0": 0, "3 (mid-epoch)": 3, "10^6": 10**6}
        starts = take_turns(
            {name: lambda at=at, count=count: first_batch(root, count, at) for name, at in consumed.items()}, rounds
        )
        for name, of in starts.items():
            against = harness.ratio(of["seconds"], starts["0"]["seconds"])
            print(
                f"{count} workers, first batch after {name:13s} batches: {statistics.median(of['seconds']) * 1e3:6.0f} "
                f"ms, {shown(against)} times that after none"
            )
        result["first_batch"][str(count)] = starts
    return result


# --- memory ------------------------------------------------------------------------------------------------------


def mappings(process: int, named: str = "") -> dict[str, int]:
    """Return the kernel's sums over a process's mappings whose file has something in its name, in bytes."""
    sums = {"Rss": 0, "Pss": 0, "Private": 0}
    counts = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = named in line
        elif counts and (found := re.match(r"(Rss|Pss|Private)(?:_Clean|(?<=Private)_Dirty)?: +(\d+) kB", line)):
            sums[found[1]] += int(found[2]) * 1024
    return sums


def memory_of(root: Path, pool: int, count: int, step: int, last: int) -> dict[str, Any]:
    """Measure this process and its workers in the middle of an epoch; it is a process of its own."""
    with closing(opened(root, pool)) as dataset:
        before = mappings(os.getpid())
        loader = ResumableLoader(dataset, BATCH, pool=pool, num_workers=count)
        peaks: dict[str, dict[str, float]] = {}
        for n, _ in enumerate(loader):
            if n % step == step - 1:
                children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
                for name, process in (
                    ("trainer", os.getpid()),
                    *((f"worker {i}", int(c)) for i, c in enumerate(children)),
                ):
                    found = {"all": mappings(process), "rows": mappings(process, "/episode-")}
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
    """Measure two workers with 1 MB of rows an episode and without pictures; then what open decoders take."""
    root = numbers(folder, *sizes.wide)
    found = {}
    for pool in (16, 64):
        measured = alone(memory_of, root, pool, 2, *sizes.looks, smoke=sizes is SMOKE)
        found[f"pool {pool}, 2 workers"] = measured
        print(
            f"pool {pool}, 2 workers: the pool's rows take {measured['pool_bytes'] / 1e6:.0f} MB; the trainer has "
            f"{measured['before']['Private'] / 1e6:.0f} MB of its own before"
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
        found[name] = taken = alone(decoders_of, pictures(folder, codec, height), smoke=sizes is SMOKE)
        print(f"{name}: {taken['bytes_per_decoder'] / 1e6:.1f} MB each")
    return found


def decoders_of(root: Path) -> dict[str, float]:
    """Measure what eight open files take, once one has been open: there are four of each camera."""
    with closing(opened(root)) as dataset, closing(opened(of_one_camera(root))) as first:
        first[0]
        before = mappings(os.getpid())["Private"]
        for episode in range(16):
            dataset[12 * episode + 5]
        return {"bytes_per_decoder": (mappings(os.getpid())["Private"] - before) / 8}


def alone(function: Callable[..., Any], *arguments: Any, smoke: bool) -> Any:
    """Call a function in a new process and return what it returns.

    With ``--smoke`` the process is forked from one that has the imports, which saves seconds; its memory means nothing.
    """
    context = multiprocessing.get_context("forkserver" if smoke else "spawn")
    context.set_forkserver_preload(harness.IMPORTED)
    with ProcessPoolExecutor(1, context, be_trainer, (multiprocessing.get_start_method(),)) as pool:
        return pool.submit(function, *arguments).result()


def be_trainer(start_method: str) -> None:
    """Set a new process up as a trainer is: else its workers would be started as it was itself."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method(start_method, force=True)


# --- bytes -------------------------------------------------------------------------------------------------------


def needed(root: Path, episodes: Sequence[int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of episodes' packets and row groups, and those of the files that hold some of them."""
    with closing(opened(root)) as dataset:
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
    whole = {part: sum((root / file).stat().st_size for file in of) for part, of in files.items()}
    meta = sum(file.stat().st_size for file in (root / "meta").rglob("*") if file.is_file())
    return parts | {"meta": meta}, whole | {"meta": meta}


def sent_for(root: Path, episodes: Sequence[int], pool: int) -> dict[str, Any]:
    """Serve an epoch over HTTP; return the bytes that went, by folder, and for which episodes.

    Some of the next epoch's are among them: they are fetched ahead.
    """
    admitted: list[int] = []
    held: set[int] = set()
    disk, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            disk.append(used_bytes(dataset._folder.path))

    def hold(now: Sequence[int], soon: Sequence[int]) -> None:
        admitted.extend(episodes[place] for place in {*now, *soon} - held)
        held.clear()
        held.update(now, soon)
        LeRobotDataset.hold(dataset, now, soon)

    cache = root.parent / "cache"
    with closing(opened(root, pool, episodes=episodes)) as local:
        loader = ResumableLoader(local, BATCH, pool=pool)
        expected = [digests(batch) for batch in loader]
        loader.close()
    with FileServer(root) as server, closing(opened(server.url, pool, episodes=episodes, cache_dir=cache)) as dataset:
        dataset.hold = hold  # type: ignore[method-assign]
        watching = threading.Thread(target=watch)
        watching.start()
        loader = ResumableLoader(dataset, BATCH, pool=pool)
        check_batches(loader, expected, "over HTTP")
        before = -1
        while sum(server.sent.values()) > before:  # what is fetched ahead
            before = sum(server.sent.values())
            time.sleep(0.5)
        loader.close()
        done.set()
        watching.join()
        sent: dict[str, int] = {}
        for path, count in server.sent.items():
            sent[path.split("/")[0]] = sent.get(path.split("/")[0], 0) + count
        requests = sum(server.requests.values())
    return {"sent": sent, "requests": requests, "peak_disk_bytes": max(disk), "admitted": admitted}


def bytes_(folder: Path, _rounds: int, sizes: Sizes) -> dict:
    root = large_episodes(folder, *sizes.large)
    found = {}
    for name, episodes, pool in (
        ("all episodes", range(16), 4),
        ("all episodes", range(16), 16),
        ("a quarter of them", range(1, 16, 4), 4),
    ):
        served = sent_for(root, list(episodes), pool)
        wanted, _ = needed(root, served["admitted"])
        _, whole = needed(root, episodes)
        row = {**served, "needed": wanted, "whole_files": whole}
        found[f"{name}, pool {pool}"] = row
        total = {kind: sum(row[kind].values()) for kind in ("needed", "sent", "whole_files")}
        print(
            f"{name}, pool {pool}: sent {total['sent'] / 1e6:.1f} MB in {row['requests']} requests for "
            f"{len(row['admitted'])} episodes, needed {total['needed'] / 1e6:.1f} MB: sent / needed "
            f"{total['sent'] / total['needed']:.3f}, whole files {total['whole_files'] / 1e6:.1f} MB; at most "
            f"{row['peak_disk_bytes'] / 1e6:.1f} MB on disk"
        )
        print("    " + "; ".join(f"{part}: sent {row['sent'][part]}, needed {n}" for part, n in wanted.items()))
    return found


def main() -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("SVT_LOG", "1")  # the encoder's greetings
    parser = harness.parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS)
    args = harness.parse(parser, smoke={}, places={"dir": Path("runs/lerobot")})
    logging.disable()  # the contestants'
    parts = dict(zip(PARTS, (frames, rows, workers, memory, bytes_), strict=True))
    sizes = SMOKE if args.smoke else MEASURED
    for name in args.only:
        start = time.perf_counter()
        entry = {
            **harness.circumstances(smoke=args.smoke),
            "part": name,
            "result": parts[name](args.dir, args.rounds, sizes),
        }
        harness.merge(args.out / "lerobot.json", json.loads(json.dumps(entry)), ("hardware", "part"))
        print(f"{name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
