"""LeRobot v3 data sets: the frame that comes out is the one that was asked for, once, from wherever it is."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import io
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import av
import av.video.reformatter
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.barcodes import barcode, read_barcode, read_camera, write_barcoded
from helpers.http_server import FileServer
from helpers.versions import needs_index
from lerobot_writer import DatasetWriter

from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.errors import CorruptDataError, DataError
from fsdp2_strategy.integrations.lerobot import LeRobotDataset, prefetch, video
from fsdp2_strategy.integrations.lerobot.dataset import used_bytes
from fsdp2_strategy.integrations.lerobot.dataset_source import LocalFiles
from fsdp2_strategy.integrations.lerobot.fetching import EpisodeFetcher
from fsdp2_strategy.integrations.lerobot.prefetch import EpisodePrefetcher
from fsdp2_strategy.integrations.lerobot.video import Decoders
from fsdp2_strategy.integrations.lerobot.worker_counters import NAMES, Counts

LENGTHS = [5, 12, 7, 9, 3, 11, 8, 6]
CAMERAS = ("observation.images.top", "observation.images.wrist")


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Data sets that are written once: of several files of each kind, of every way to encode."""
    written = {}

    def get(name):
        if name not in written:
            options = {
                "gop 1": {"gop": 1},
                "gop 2": {"gop": 2},
                "long gop": {"gop": 30},
                "b frames": {"gop": 30, "b_frames": 2},
                "av1": {"gop": 2, "codec": "libsvtav1"},
            }[name]
            root = tmp_path_factory.mktemp("lerobot") / name.replace(" ", "-")
            written[name] = write_barcoded(
                root, LENGTHS, cameras=CAMERAS, episodes_per_data_file=3, episodes_per_video_file=2, **options
            )
        return written[name]

    return get


@pytest.fixture
def copied(roots, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(roots("gop 2"), tmp_path / "copy"))


@pytest.fixture
def server(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield lambda root, **options: stack.enter_context(FileServer(root, **options))


def where(dataset):
    """Return the episode and frame of each sample."""
    return [(e, f) for e, n in enumerate(LENGTHS) for f in range(n)]


def check(sample, episode, frame, cameras=CAMERAS):
    for number, camera in enumerate(cameras):
        assert read_barcode(sample[camera]) == (episode, frame) and read_camera(sample[camera]) == number
    assert sample["episode_index"] == episode and sample["frame_index"] == frame
    assert sample["index"] == sum(LENGTHS[:episode]) + frame
    assert sample["observation.state"][:2].tolist() == [episode, frame]


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("name", ["gop 1", "gop 2", "long gop", "b frames", "av1"])
def test_the_frame_that_comes_out_is_the_frame_asked_for(roots, name):
    with contextlib.closing(LeRobotDataset(roots(name))) as dataset:
        assert len(list((roots(name) / "data").rglob("*.parquet"))) == 3
        assert len(list((roots(name) / "videos").rglob("*.mp4"))) == 8
        asked = where(dataset)
        assert len(dataset) == len(asked) == sum(LENGTHS) and dataset.episode_lengths.tolist() == LENGTHS
        for i in np.random.default_rng(0).permutation(len(asked)).tolist():
            sample = dataset[i]
            check(sample, *asked[i])
            assert sample[CAMERAS[0]].dtype == torch.float32 and sample[CAMERAS[0]].shape[0] == 3
            assert sample["task"] == dataset.metadata.tasks[sample["task_index"]] != ""
        with pytest.raises(IndexError):
            dataset[len(dataset)]


@pytest.mark.parametrize("size", [(48, 64), (47, 63), (34, 52), (240, 320)])
@pytest.mark.parametrize("pixels", ["yuv420p", "yuvj420p", "yuv444p", "yuv420p10le", "nv12", "rgb24", "gray"])
def test_pictures_are_what_PyAV_gives_as_rgb(pixels, size):
    colours = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    frame = av.VideoFrame.from_ndarray(colours, format="rgb24").reformat(format=pixels)
    found = video._channels_first(frame, av.video.reformatter.VideoReformatter())
    assert found.is_contiguous() and found.dtype == torch.uint8
    assert (found.permute(1, 2, 0).numpy() == frame.to_ndarray(format="rgb24", **video._ONE_THREAD)).all()


def test_without_an_index_of_key_frames_frames_are_the_same_and_little_is_decoded_twice(roots, monkeypatch):
    """PyAV has no index before version 17; `_Decoder` then learns how far apart key frames are."""
    indices = [*range(12), 3, 20, 5, *range(30, 36)]
    with contextlib.closing(LeRobotDataset(roots("gop 2"))) as dataset:
        expected = [dataset[i][CAMERAS[0]] for i in indices]
    opened = video._Decoder.__init__

    def without_index(decoder, *arguments):
        opened(decoder, *arguments)
        decoder._index = None

    monkeypatch.setattr(video._Decoder, "__init__", without_index)
    with contextlib.closing(LeRobotDataset(roots("gop 2"))) as dataset:
        for i, picture in zip(indices, expected, strict=True):
            assert torch.equal(dataset[i][CAMERAS[0]], picture)
        cameras = len(dataset.metadata.video_keys)
        assert dataset.counts["frames_decoded"] <= 3 * len(indices) * cameras


def test_windows_are_exact_at_the_edges_of_episodes_and_say_what_is_padding(roots):
    steps = {"action": [-0.2, -0.1, 0.0, 0.1, 0.7], CAMERAS[1]: [-0.3, 0.0], "timestamp": [0.1]}
    offsets = {"action": [-2, -1, 0, 1, 7], CAMERAS[1]: [-3, 0], "timestamp": [1]}
    with contextlib.closing(LeRobotDataset(roots("gop 2"), delta_timestamps=steps)) as dataset:
        for i, (episode, frame) in enumerate(where(dataset)):
            sample, last = dataset[i], LENGTHS[episode] - 1
            for key, moved in offsets.items():
                wanted = [frame + offset for offset in moved]
                held = [min(max(at, 0), last) for at in wanted]
                assert sample[f"{key}_is_pad"].tolist() == [a != b for a, b in zip(wanted, held, strict=True)]
                assert sample[key].shape[0] == len(moved)
                if key == "action":
                    assert sample[key][:, :2].tolist() == [[episode + 0.5, at + 0.5] for at in held]
                if key in CAMERAS:
                    assert [read_barcode(image) for image in sample[key]] == [(episode, at) for at in held]
                if key == "timestamp":
                    assert sample[key].tolist() == pytest.approx([at / 10 for at in held])
            assert read_barcode(sample[CAMERAS[0]]) == (episode, frame)


def test_steps_that_are_no_frames_and_arguments_that_do_not_fit_are_refused(roots, tmp_path):
    root = roots("gop 2")
    LeRobotDataset(root, delta_timestamps={"action": [0.10004]}, tolerance_s=1e-4).close()
    for options, message in [
        (
            {"delta_timestamps": {"action": [0.1, 0.15]}},
            r"\[0.15\], expected at least one step, all multiples of 1/10 within 0.0001",
        ),
        ({"delta_timestamps": {"actoin": [0.0]}}, "Did you mean 'action'"),
        ({"delta_timestamps": {"action": []}}, "at least one"),
        ({"episodes": [1, 8], "reader": "strict"}, "all from 0 to 7"),
        ({"episodes": [1, 1], "reader": "strict"}, "none twice"),
        ({"episodes": [8]}, "at least one episode, all from 0 to 7"),
        ({"reader": "exact"}, "reader is 'exact', expected 'lerobot' or 'strict'"),
        ({"episodes": []}, "expected at least one"),
        ({"pool": 0}, "pool is 0"),
        ({"decoder_cache": 129}, "decoder_cache is 129"),
        ({"on_corrupt": "ignore"}, "'ignore'"),
    ]:
        with pytest.raises(DataError, match=message):
            LeRobotDataset(root, **options)
    with pytest.raises(DataError, match=r"info\.json"):
        LeRobotDataset(tmp_path)
    old = Path(shutil.copytree(root, tmp_path / "old"))
    info = json.loads((old / "meta" / "info.json").read_text())
    (old / "meta" / "info.json").write_text(json.dumps(info | {"codebase_version": "v2.1"}))
    with pytest.raises(DataError, match=r"v2\.1, expected v3"):
        LeRobotDataset(old)


def test_a_subset_of_episodes_is_numbered_through(roots):
    with contextlib.closing(LeRobotDataset(roots("gop 2"), episodes=[6, 1, 4], reader="strict")) as dataset:
        asked = [(e, f) for e in (6, 1, 4) for f in range(LENGTHS[e])]
        assert len(dataset) == len(asked) and dataset.episode_lengths.tolist() == [8, 12, 3]
        for i, (episode, frame) in enumerate(asked):
            check(dataset[i], episode, frame)


def test_episodes_are_those_of_lerobots_reader_ascending_and_only_those_that_exist(roots, caplog):
    with contextlib.closing(LeRobotDataset(roots("gop 2"), episodes=[6, 1, 99, 4])) as dataset:
        assert dataset.episode_lengths.tolist() == [LENGTHS[e] for e in (1, 4, 6)]
        check(dataset[0], 1, 0)
    assert "episodes that the data set lacks are ignored: [99]; it has 0 to 7" in caplog.text


def test_statistics_are_those_of_the_data(roots):
    with contextlib.closing(LeRobotDataset(roots("gop 2"))) as dataset:
        states = torch.stack([dataset[i]["observation.state"] for i in range(len(dataset))]).double()
        stats = dataset.metadata.stats["observation.state"]
        torch.testing.assert_close(stats["mean"].double(), states.mean(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(stats["std"].double(), states.std(0, correction=0), rtol=1e-5, atol=1e-6)
        assert stats["min"].tolist() == states.amin(0).tolist() and stats["max"].tolist() == states.amax(0).tolist()


def test_pictures_come_as_bytes_and_transformed_where_asked(roots):
    root, half = roots("gop 2"), lambda pictures: pictures[..., ::2, ::2]
    with (
        contextlib.closing(LeRobotDataset(root)) as plain,
        contextlib.closing(LeRobotDataset(root, video_dtype=torch.uint8)) as raw,
        contextlib.closing(LeRobotDataset(root, image_transforms=half)) as small,
    ):
        expected = plain[20][CAMERAS[0]]
        assert torch.equal(raw[20][CAMERAS[0]].float() / 255, expected)
        assert torch.equal(small[20][CAMERAS[0]], half(expected))


def encoded(path, ticks, codec, parameters, time_base=Fraction(1, 30)):
    """Write a video whose frames are at given ticks; return its decoders."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=30, options={"preset": "ultrafast", "crf": "18"} | parameters)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        stream.codec_context.time_base = time_base
        for i, tick in enumerate(ticks):
            frame = av.VideoFrame.from_ndarray(barcode(0, i, 64, 96), format="rgb24")
            frame.pts, frame.time_base = tick, time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return Decoders(LocalFiles(path.parent), 1, Counts(path.parent))


@pytest.mark.parametrize(
    ("codec", "parameters"),
    [
        # Frames shown before a key frame that need those before it: x265's default.
        ("libx265", {"x265-params": "keyint=10:min-keyint=10:bframes=3:b-adapt=0:open-gop=1:log-level=none"}),
        # No key frame but the first: others are whole after a while.
        ("libx264", {"x264-params": "keyint=10:intra-refresh=1:bframes=0"}),
        ("libx264", {"x264-params": "keyint=12:bframes=5:b-adapt=0:b-pyramid=normal"}),
    ],
)
def test_frames_are_exact_where_a_key_frame_is_not_enough(tmp_path, codec, parameters):
    decoders = encoded(tmp_path / "video.mp4", range(40), codec, parameters)
    for i in [*range(40), *reversed(range(40)), *np.random.default_rng(0).permutation(40).tolist()]:
        [picture] = decoders.frames("video.mp4", [i / 30], 1e-4)
        assert read_barcode(picture) == (0, i)
    decoders.close()


def test_of_the_frames_within_the_tolerance_the_nearest_comes(tmp_path):
    ticks = np.cumsum(np.random.default_rng(0).integers(20, 50, 30)).tolist()  # in ms
    decoders = encoded(tmp_path / "video.mp4", ticks, "libx264", {"g": "8"}, Fraction(1, 1000))
    for i in np.random.default_rng(1).permutation(60).tolist():
        wanted = ticks[i // 2] + (9 if i % 2 else -9)
        [picture] = decoders.frames("video.mp4", [wanted / 1000], 0.06)
        assert read_barcode(picture) == (0, i // 2)
    with pytest.raises(CorruptDataError, match="its nearest frame is at"):
        decoders.frames("video.mp4", [ticks[7] / 1000 + 0.009], 0.005)
    with pytest.raises(CorruptDataError, match="its nearest frame is at"):
        decoders.frames("video.mp4", [ticks[-1] / 1000 + 1], 0.06)
    decoders.close()


# --- in a loader ---------------------------------------------------------------------------------------------------


def drawn(loaders):
    """Return the index of each sample of an epoch, by batch, over all ranks."""
    return [torch.cat([batch["index"] for batch in parts]).tolist() for parts in zip(*loaders, strict=True)]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_frame_once_an_epoch_over_ranks_and_workers_and_none_decoded_beside(roots, workers):
    datasets = [LeRobotDataset(roots("gop 1"), pool=3) for _ in range(2)]
    options = {"pool": 3, "lanes": 2, "dp_size": 2, "num_workers": workers}
    loaders = [ResumableLoader(dataset, 6, dp_rank=rank, **options) for rank, dataset in enumerate(datasets)]
    with contextlib.ExitStack() as stack:
        for one in (*loaders, *datasets):
            stack.enter_context(contextlib.closing(one))
        seen = [drawn(loaders) for _ in range(2)]
        for loader in loaders:
            loader.close()
        ids = [i for epoch in seen for batch in epoch for i in batch]
        assert sorted(ids[: sum(LENGTHS)]) == sorted(ids[sum(LENGTHS) : 2 * sum(LENGTHS)]) == list(range(sum(LENGTHS)))
        assert ids[: sum(LENGTHS)] != ids[sum(LENGTHS) :][: sum(LENGTHS)]
        counts = [dataset.counts for dataset in datasets]
        if not workers:  # they fetch ahead
            assert sum(c["samples"] for c in counts) == len(ids)
        for count in counts:
            assert count["frames_decoded"] == count["frames_converted"] == 2 * count["samples"]


@pytest.mark.timeout(60)
def test_workers_decode_though_the_trainer_has_looked_at_a_sample_before(roots):
    with contextlib.closing(LeRobotDataset(roots("gop 2"), pool=3)) as dataset:
        check(dataset[0], 0, 0)
        assert len(dataset._decoders._open) == len(CAMERAS)
        loader = ResumableLoader(dataset, 4, pool=3, num_workers=1)
        batch = next(iter(loader))
        loader.close()
    for i, (episode, frame) in enumerate(zip(batch["episode_index"], batch["frame_index"], strict=True)):
        check({key: value[i] for key, value in batch.items()}, episode, frame)


def test_a_resume_decodes_nothing_of_what_was_delivered(roots):
    with contextlib.closing(LeRobotDataset(roots("gop 1"), pool=3)) as first:
        loader = ResumableLoader(first, 4, pool=3)
        batches = [batch["index"].tolist() for batch, _ in zip(loader, range(7), strict=False)]
        position, [rest] = loader.state_dict(), [[batch["index"].tolist() for batch in loader]]
    with contextlib.closing(LeRobotDataset(roots("gop 1"), pool=3)) as second:
        loader = ResumableLoader(second, 4, pool=3)
        loader.load_state_dict(json.loads(json.dumps(position)))
        assert not any(second.counts.values())
        assert [batch["index"].tolist() for batch in loader] == rest
        assert second.counts["frames_decoded"] == 2 * 4 * len(rest)
    assert len(batches) == 7


def test_what_is_held_is_two_pools_at_most_and_decoders_are_few(roots):
    with contextlib.closing(LeRobotDataset(roots("gop 2"), pool=2, decoder_cache=2)) as dataset:
        loader = ResumableLoader(dataset, 4, pool=2)
        for _ in range(2):
            for _ in loader:
                dataset.pause()  # so that nothing comes or goes meanwhile
                assert len(list(dataset._folder.path.glob("episode-*.arrow"))) <= 5  # a batch may span two blocks
                assert len(dataset._decoders._open) <= 2 and len(dataset._rows._mapped) <= 2


def test_data_files_of_one_row_group_or_another_order_give_the_same_rows(roots, copied):
    for path in sorted((copied / "data").rglob("*.parquet")):
        table = pq.read_table(path)
        order = np.argsort(-table["episode_index"].to_numpy(), kind="stable")
        pq.write_table(table.take(order), path)  # one group, the last episode first
    with contextlib.closing(LeRobotDataset(copied)) as dataset:
        for i, (episode, frame) in enumerate(where(dataset)):
            check(dataset[i], episode, frame)


COUNT_THREADS = """
import os, sys, threading
from fsdp2_strategy.integrations.lerobot import LeRobotDataset
count = lambda: len(os.listdir("/proc/self/task")) - threading.active_count()
before = count()
dataset = LeRobotDataset(sys.argv[1])
dataset._rows.extract(range(len(dataset.metadata.lengths)))
print(count() - before)
dataset.close()
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_no_thread_of_pyarrow_reads_a_file_that_it_could_still_hold_at_exit(copied):
    path = copied / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.take(np.argsort(-table["episode_index"].to_numpy(), kind="stable")), path)  # read as a whole
    done = subprocess.run([sys.executable, "-c", COUNT_THREADS, copied], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def rewrite(root, column, change, kind=None):
    """Change a column of the first data file, row by row, and perhaps its type."""
    path = root / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    i, values = table.column_names.index(column), [change(value) for value in table[column].to_pylist()]
    pq.write_table(table.set_column(i, column, pa.array(values, type=kind or table.schema.field(i).type)), path)


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.large_list(pa.float32()), pa.list_(pa.int32(), 2)])
def test_numbers_come_in_the_dtype_that_the_data_set_says_however_they_are_stored(copied, kind):
    rewrite(copied, "observation.state", lambda row: [int(value) for value in row], kind)
    rewrite(copied, "timestamp", lambda value: value, pa.float64())
    with contextlib.closing(LeRobotDataset(copied)) as dataset:
        for i, (episode, frame) in enumerate(where(dataset)[:8]):
            check(dataset[i], episode, frame)
            assert dataset[i]["observation.state"].dtype == dataset[i]["timestamp"].dtype == torch.float32


@pytest.mark.parametrize(
    ("column", "change", "kind", "message"),
    [
        ("action", lambda row: row[:1], pa.list_(pa.float32()), r"action of episode 0: .* shape \(5,2\)"),
        ("action", lambda row: None, pa.list_(pa.float32()), "action of episode 0"),
        ("next.done", lambda value: None, None, "next.done of episode 0: 5 values are missing"),
        ("task_index", lambda value: -1, None, r"its task_index is -1, expected an index in meta/tasks\.parquet"),
        ("task_index", lambda value: 99, None, "its task_index is 99"),
    ],
)
def test_values_that_are_not_what_the_data_set_says_are_named_or_left_out(copied, column, change, kind, message):
    rewrite(copied, column, change, kind)
    with contextlib.closing(LeRobotDataset(copied)) as dataset:
        with pytest.raises(CorruptDataError, match=rf"file-000\.parquet: {message}"):
            dataset[0]
    with contextlib.closing(LeRobotDataset(copied, on_corrupt="skip")) as dataset:
        assert not dataset[0]["sample_mask"]


@pytest.mark.parametrize("image", [None, {"bytes": None, "path": "frame.png"}, {"bytes": b"no image", "path": None}])
def test_images_that_are_none_are_named_or_left_out_as_pictures_of_their_size(tmp_path, image):
    feature = {"dtype": "image", "shape": (48, 64, 3), "names": ["h", "w", "c"]}
    with DatasetWriter(tmp_path / "images", fps=10, features={"eye": feature}) as writer:
        writer.add_episode({"eye": np.full((4, 48, 64, 3), 7, np.uint8)}, task="look")
    rewrite(tmp_path / "images", "eye", lambda row: row if row["path"] != "frame-000000.png" else image)
    with contextlib.closing(LeRobotDataset(tmp_path / "images")) as dataset:
        with pytest.raises(CorruptDataError, match="images of eye"):
            dataset[0]
    with contextlib.closing(LeRobotDataset(tmp_path / "images", on_corrupt="skip")) as dataset:
        assert [bool(dataset[i]["sample_mask"]) for i in range(4)] == [False, True, True, True]
        assert dataset[0]["eye"].shape == dataset[1]["eye"].shape == (3, 48, 64)
        assert (dataset[1]["eye"] * 255 == 7).all()


def test_tasks_are_found_beside_other_columns(copied):
    path = copied / "meta" / "tasks.parquet"
    table = pq.read_table(path)
    pq.write_table(table.add_column(0, "note", pa.array(["a note"] * len(table))), path)
    with contextlib.closing(LeRobotDataset(copied, delta_timestamps={"task_index": [0.0, 0.1]})) as dataset:
        assert dataset[0]["task"] == dataset.metadata.tasks[dataset[0]["task_index"][0]] == table["task"][0].as_py()
    pq.write_table(table.select(["task"]), path)
    with pytest.raises(CorruptDataError, match=r"tasks\.parquet: its columns are task, expected task_index"):
        LeRobotDataset(copied)


# --- remote --------------------------------------------------------------------------------------------------------


def test_a_remote_root_gives_the_same_with_ranges_or_without(roots, server, tmp_path):
    for ranges in (True, False):
        served = server(roots("gop 2"), ranges=ranges)
        with contextlib.closing(LeRobotDataset(served.url, pool=3, cache_dir=tmp_path)) as dataset:
            loader = ResumableLoader(dataset, 4, pool=3)
            asked, seen = where(dataset), 0
            for batch in loader:
                for j, index in enumerate(batch["index"].tolist()):
                    check({key: value[j] for key, value in batch.items()}, *asked[index])
                    seen += 1
            loader.close()
            assert seen >= len(dataset)
        assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Episodes of some hundred kilobytes each, sixteen to a file."""
    root = tmp_path_factory.mktemp("lerobot") / "large"
    options = {"height": 128, "width": 192, "crf": 8, "episodes_per_data_file": 16, "episodes_per_video_file": 16}
    return write_barcoded(root, [24] * 32, **options)


@pytest.mark.full
@needs_index
def test_of_a_remote_root_is_fetched_what_is_needed_and_kept_what_is_held(large, server, tmp_path):
    served = server(large)
    videos = sum(path.stat().st_size for path in large.rglob("*.mp4"))
    rows = sum(path.stat().st_size for path in (large / "data").rglob("*.parquet"))
    block = 64 << 10
    with contextlib.closing(LeRobotDataset(served.url, episodes=range(8, 16), pool=2, cache_dir=tmp_path)) as dataset:
        served.forget()
        loader, most = ResumableLoader(dataset, 4, pool=2), 0
        for _ in loader:
            dataset.pause()
            most = max(most, used_bytes(dataset._source._folder))
        loader.close()
    sent = sum(served.sent.values())
    # A quarter of the videos: and a block at each end of an episode, the index, and the rows, which share a group
    assert videos / 4 < sent < videos / 4 + 8 * 2 * block + 2 * block + rows
    episode = videos / 32 + 2 * block
    assert most < 6 * episode, "two pools, and what a batch has of a third"


@pytest.mark.full
def test_room_that_is_too_small_for_a_pool_is_an_error(large, server, tmp_path):
    served = server(large)
    with contextlib.closing(LeRobotDataset(served.url, pool=16, cache_dir=tmp_path, disk_bytes=1 << 20)) as dataset:
        loader = ResumableLoader(dataset, 4, pool=16)
        with pytest.raises(DataError, match="expected at most the 1 MB of disk_bytes"):
            for _ in loader:
                time.sleep(0.01)
        loader.close()


@pytest.mark.full
def test_with_little_room_the_next_episodes_wait(large, server, tmp_path):
    served = server(large)
    with contextlib.closing(LeRobotDataset(served.url, pool=2, cache_dir=tmp_path, disk_bytes=1)) as dataset:
        dataset._prefetcher.hold([3, 4], [5, 6])
        with pytest.raises(DataError, match="cannot cache 2 episodes"):
            while True:
                dataset._prefetcher.hold([3, 4], [5, 6])
                time.sleep(0.01)
        assert dataset._prefetcher._started == {3, 4}


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_a_remote_root_that_is_slow_and_fails_now_and_then_is_tried_again(roots, server, tmp_path, workers):
    served = server(roots("gop 2"), delay_seconds=0.01)
    with contextlib.closing(LeRobotDataset(served.url, pool=3, cache_dir=tmp_path)) as dataset:
        served.fail(3)
        loader = ResumableLoader(dataset, 4, pool=3, num_workers=workers)
        ids = [i for batch in loader for i in batch["index"].tolist()]
        loader.close()
    assert sorted(ids[: sum(LENGTHS)]) == list(range(sum(LENGTHS)))


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 1])
def test_a_remote_root_that_is_down_is_named(roots, server, tmp_path, workers):
    served = server(roots("gop 2"))
    with contextlib.closing(LeRobotDataset(served.url, tries=2, pool=3, cache_dir=tmp_path)) as dataset:
        served.fail(1 << 20)
        loader = ResumableLoader(dataset, 4, pool=3, num_workers=workers)
        with pytest.raises(DataError, match=f"cannot read {served.url}.* failed 2 times"):
            next(iter(loader))
        loader.close()


# --- damage --------------------------------------------------------------------------------------------------------


def damage(path):
    content = bytearray(path.read_bytes())
    middle = slice(len(content) // 4, 3 * len(content) // 4)
    content[middle] = bytes(len(content[middle]))
    path.write_bytes(content)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("what", ["video", "parquet", "short video", "no video"])
def test_a_damaged_file_is_named_or_left_out_and_counted(copied, what):
    data = copied / "data" / "chunk-000" / "file-001.parquet"  # episodes 3, 4, 5
    video = copied / "videos" / CAMERAS[1] / "chunk-000" / "file-001.mp4"  # episodes 2, 3
    victim = data if what == "parquet" else video
    if what == "no video":
        video.write_bytes(b"")
    elif what == "short video":
        video.write_bytes(video.read_bytes()[: video.stat().st_size // 2])
    else:
        damage(victim)
    asked = None
    with contextlib.closing(LeRobotDataset(copied)) as dataset:
        asked, wrong = where(dataset), []
        for i, (episode, frame) in enumerate(asked):
            try:
                check(dataset[i], episode, frame)
            except CorruptDataError as error:
                assert victim.name in str(error)
                wrong.append(i)
        assert wrong and {asked[i][0] for i in wrong} <= ({3, 4, 5} if what == "parquet" else {2, 3})
    with contextlib.closing(LeRobotDataset(copied, on_corrupt="skip", pool=3)) as dataset:
        loader = ResumableLoader(dataset, 4, pool=3, tail="pad")
        good, left_out = 0, []
        for batch in loader:
            for j, counts in enumerate(batch["sample_mask"].tolist()):
                if counts:
                    check({key: value[j] for key, value in batch.items()}, *asked[int(batch["index"][j])])
                    good += 1
                elif (i := int(batch["index"][j])) in wrong:
                    left_out.append(i)
                    assert (batch["episode_index"][j], batch["frame_index"][j]) == asked[i]
                    assert not any(batch[camera][j].any() for camera in CAMERAS)
        assert good == len(asked) - len(wrong) and set(left_out) == set(wrong)
        assert dataset.counts["samples_skipped"] == len(left_out)


def test_a_disk_that_fails_is_an_error_and_never_left_out(roots):
    class Failing(io.FileIO):
        def read(self, size=-1):
            raise OSError(errno.EIO, "Input/output error")

    with contextlib.closing(LeRobotDataset(roots("gop 2"), on_corrupt="skip")) as dataset:
        dataset._source.open = lambda path: Failing(roots("gop 2") / path)
        with pytest.raises(DataError, match="Check the disk") as raised:
            dataset[0]
        assert not isinstance(raised.value, CorruptDataError)


def test_a_damaged_file_is_logged_once_by_all_processes_of_a_rank(copied, caplog):
    episodes = copied / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    table, late = pq.read_table(episodes), f"videos/{CAMERAS[1]}/from_timestamp"
    begins = pa.array([second + 0.05 * (i == 2) for i, second in enumerate(table[late].to_pylist())])
    pq.write_table(table.set_column(table.column_names.index(late), late, begins), episodes)
    damage(copied / "data" / "chunk-000" / "file-001.parquet")  # episodes 3, 4, 5
    with contextlib.closing(LeRobotDataset(copied, on_corrupt="skip", pool=3)) as dataset:
        copy = pickle.loads(pickle.dumps(dataset))
        for i in range(len(dataset)):
            assert torch.equal(dataset[i]["sample_mask"], copy[i]["sample_mask"])
        dataset.hold([3, 4], [5])
        dataset.hold([], [])
        dataset.pause()
        assert dataset.counts["samples_skipped"] >= 2 * 8
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "file-001.mp4" in lines[0] and "file-001.parquet" in lines[1]


def test_a_missing_file_is_named_and_never_left_out(copied):
    (copied / "videos" / CAMERAS[0] / "chunk-000" / "file-000.mp4").unlink()
    with contextlib.closing(LeRobotDataset(copied, on_corrupt="skip")) as dataset:
        with pytest.raises(DataError, match=r"file-000\.mp4"):
            dataset[0]


def test_metadata_that_contradicts_itself_is_refused(copied):
    episodes = copied / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    pq.write_table(pq.read_table(episodes).slice(0, 4), episodes)
    with pytest.raises(CorruptDataError, match="4 episodes are described, expected 8"):
        LeRobotDataset(copied)
    episodes.write_bytes(b"no parquet")
    with pytest.raises(CorruptDataError, match="expected a parquet file"):
        LeRobotDataset(copied)
    info = json.loads((copied / "meta" / "info.json").read_text())
    (copied / "meta" / "info.json").write_text(json.dumps(info | {"features": None}))
    with pytest.raises(CorruptDataError, match=r"info\.json: it lacks features"):
        LeRobotDataset(copied)
    (copied / "meta" / "info.json").write_text("{")
    with pytest.raises(CorruptDataError, match="expected JSON"):
        LeRobotDataset(copied)


# --- what it leaves behind -----------------------------------------------------------------------------------------


def test_copies_by_pickle_read_the_same(roots):
    with contextlib.closing(LeRobotDataset(roots("gop 2"))) as dataset:
        copy = pickle.loads(pickle.dumps(dataset))
        assert torch.equal(copy[7][CAMERAS[0]], dataset[7][CAMERAS[0]])
        copy.close()  # what it shares stays
        check(dataset[7], 1, 2)
        assert dataset.counts["samples"] == 3


@pytest.mark.full
def test_one_that_is_not_closed_leaves_nothing_when_it_is_gone(large, server, tmp_path):
    served = server(large)
    before = threading.active_count()
    dataset = LeRobotDataset(served.url, pool=2, cache_dir=tmp_path)
    assert "task" in dataset[0]
    dataset.hold([0, 1], [2, 3])
    assert threading.active_count() > before
    del dataset
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "fetch episodes"]
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_what_a_killed_process_left_is_swept_by_the_next(roots, tmp_path):
    code = (
        "import sys, os, signal; from fsdp2_strategy.integrations.lerobot import LeRobotDataset; "
        "d = LeRobotDataset(sys.argv[1], cache_dir=sys.argv[2]); d[0]; os.kill(os.getpid(), signal.SIGKILL)"
    )
    with contextlib.closing(LeRobotDataset(roots("gop 2"), cache_dir=tmp_path)) as living:
        living[0]
        run = subprocess.run([sys.executable, "-c", code, str(roots("gop 2")), str(tmp_path)], check=False)
        assert run.returncode == -signal.SIGKILL and len(list(tmp_path.iterdir())) == 2
        LeRobotDataset(roots("gop 2"), cache_dir=tmp_path).close()
        assert list(tmp_path.iterdir()) == [living._folder.path]
        living[0]
    assert not list(tmp_path.iterdir())


# --- threads and processes -----------------------------------------------------------------------------------------


def test_a_child_forked_while_rows_are_extract_keeps_nobody_from_cutting(roots):
    with contextlib.closing(LeRobotDataset(roots("gop 2"))) as dataset:
        rows, begun, forked = dataset._rows, threading.Event(), threading.Event()
        extract_from = rows._extract_from

        def slowly(path, episodes):
            begun.set()
            forked.wait()
            extract_from(path, episodes)

        rows._extract_from = slowly
        thread = threading.Thread(target=rows.extract, args=([0],))
        thread.start()
        begun.wait()
        other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        other.start()
        try:
            forked.set()
            thread.join()
            with (dataset._folder.path / "data-chunk-000-file-000.parquet.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            other.kill()
            other.join()


def test_a_thread_that_waits_for_a_server_keeps_nobody_for_long(monkeypatch):
    monkeypatch.setattr(prefetch, "_PAUSE_SECONDS", 0.1)
    begun, free, released = threading.Event(), threading.Event(), []

    def fetch(_):
        begun.set()
        free.wait()

    prefetcher = EpisodePrefetcher(lambda _: None, fetch, released.append, lambda: 0, None)
    prefetcher.hold([0], [])
    begun.wait()
    prefetcher.pause()  # returns
    prefetcher.hold([1], [])
    assert not released
    free.set()
    while released != [0]:
        time.sleep(0.001)
    prefetcher.pause()


def test_episodes_that_threads_were_too_late_for_are_released_too():
    begun, free, released = threading.Semaphore(0), threading.Event(), []

    def fetch(_):
        begun.release()
        free.wait()

    prefetcher = EpisodePrefetcher(lambda _: None, fetch, released.append, lambda: 0, None)
    prefetcher.hold([0, 1, 2, 3, 4, 5], [6])
    for _ in range(4):
        begun.acquire()
    prefetcher.hold([7], [])
    assert sorted(released) == [4, 5, 6]  # whoever needed them got them by itself
    free.set()
    prefetcher.pause()
    assert sorted(released) == list(range(7))


def test_an_episode_that_cannot_be_released_keeps_no_other_waiting(caplog):
    released, fetched = [], []

    def fail(episode):
        released.append(episode)
        raise DataError("the server is gone")

    prefetcher = EpisodePrefetcher(lambda _: None, fetched.append, fail, lambda: 0, None)
    for episodes in ([0, 1], [2, 3], [4]):
        prefetcher.hold(episodes, [])
        while set(episodes) - set(fetched):
            time.sleep(0.001)
    prefetcher.pause()
    assert (
        sorted(released) == [0, 1, 2, 3]
        and "cannot delete the cached data of episode 3: the server is gone" in caplog.text
    )


def test_letting_go_asks_nothing_of_the_server(roots, server, tmp_path):
    served = server(roots("gop 2"))
    with contextlib.closing(LeRobotDataset(served.url, cache_dir=tmp_path)) as dataset:
        fetcher = EpisodeFetcher(dataset._source, dataset.metadata, dataset._rows)
        fetcher.set_wanted([0, 1, 2])
        fetcher.fetch(0)  # cuts out all three, of one file
        fetcher.set_wanted([1, 2])
        fetcher.release(0)
        fetcher.fetch(1)
        fetcher.fetch(2)
        served.forget()
        fetcher.release(1)
        fetcher.release(2)
        assert not served.heads and not served.requests
        assert not used_bytes(dataset._source._folder) and not list(dataset._folder.path.glob("episode-*"))


def test_a_worker_that_was_forked_in_the_middle_of_a_threads_fetch_can_fetch(roots):
    with contextlib.closing(LeRobotDataset(roots("gop 2"))) as dataset:
        fetcher = EpisodeFetcher(dataset._source, dataset.metadata, dataset._rows)

        def work():
            fetcher.fetch(0)
            os._exit(7)  # without the ends of this process' objects

        with fetcher._lock:  # as a thread that fetches ahead
            worker = multiprocessing.get_context("fork").Process(target=work)
            worker.start()
        worker.join(30)
        worker.kill()
        assert worker.exitcode == 7
        fetcher.release(0)


def test_rows_that_left_while_they_were_extract_leave_no_file(roots):
    with contextlib.closing(LeRobotDataset(roots("gop 2"))) as dataset:
        fetcher, extract = EpisodeFetcher(dataset._source, dataset.metadata, dataset._rows), dataset._rows.extract

        def late(episodes):
            fetcher.set_wanted([0, 3])
            extract(episodes)

        dataset._rows.extract = late
        fetcher.set_wanted([0, 1, 2])
        fetcher.fetch(0)
        assert [path.name for path in dataset._folder.path.glob("episode-*")] == ["episode-000000.arrow"]


def test_rows_that_another_released_of_are_extract_again(roots):
    with contextlib.closing(LeRobotDataset(roots("gop 2"))) as dataset:
        rows, calls = dataset._rows, []
        extract = rows.extract

        def and_gone(episodes):
            extract(episodes)
            calls.append(episodes)
            if len(calls) < 3:
                rows.delete(0)

        rows.extract = and_gone
        check(dataset[0], 0, 0)
        assert len(calls) == 3


def test_a_folder_that_is_swept_before_it_is_locked_is_made_anew(roots, tmp_path, monkeypatch):
    lock, swept = fcntl.flock, []

    def sweeping(file, how):
        if not swept:
            swept.append(Path(file.name).parent)
            shutil.rmtree(swept[0])
        lock(file, how)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", sweeping)
        dataset = LeRobotDataset(roots("gop 2"), cache_dir=tmp_path)
    with contextlib.closing(dataset):
        check(dataset[0], 0, 0)
        assert list(tmp_path.iterdir()) == [dataset._folder.path] != swept
    assert not list(tmp_path.iterdir())


# --- a full disk ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    folder, libc = tmp_path / "small", ctypes.CDLL(None, use_errno=True)
    folder.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=256k") != 0:
        pytest.skip(f"cannot mount a small file system: {errno.errorcode[ctypes.get_errno()]}")
    yield folder
    libc.umount2(os.fsencode(folder), 2)


def fill(folder):
    with contextlib.suppress(OSError), (folder / "full").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def test_a_cache_that_cannot_be_made_is_named(roots, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=f"cannot cache a data set: writing to {tmp_path}/file/cache failed"):
        LeRobotDataset(roots("gop 2"), cache_dir=tmp_path / "file" / "cache")


@pytest.mark.parametrize("kind", ["video", "image"])
def test_a_programming_error_is_never_taken_for_a_corrupt_file(roots, tmp_path, monkeypatch, kind):
    def wrong(*_: object, **__: object) -> None:
        raise TypeError("reformat() got an unexpected keyword argument 'threads'")

    root = roots("gop 2") if kind == "video" else tmp_path / "images"
    if kind == "image":
        feature = {"dtype": "image", "shape": [48, 64, 3], "names": ["height", "width", "channels"]}
        with DatasetWriter(root, fps=10, features={"eye": feature}) as writer:
            writer.add_episode({"eye": np.zeros((2, 48, 64, 3), np.uint8)}, task="look")
    monkeypatch.setattr(video, "_channels_first", wrong)
    with (
        contextlib.closing(LeRobotDataset(root, on_corrupt="skip")) as dataset,
        pytest.raises(TypeError, match="unexpected keyword"),
    ):
        dataset[0]


@pytest.mark.parametrize("on_corrupt", ["raise", "skip"])
def test_a_full_disk_is_named_and_leaves_no_sample_out(roots, small_disk, on_corrupt):
    with contextlib.closing(LeRobotDataset(roots("gop 2"), cache_dir=small_disk, on_corrupt=on_corrupt)) as dataset:
        fill(small_disk)
        with pytest.raises(
            DataError, match=rf"cannot cache the rows of episode 0: writing to {small_disk}.*No space left on device"
        ) as raised:
            dataset[0]
        assert not isinstance(raised.value, CorruptDataError)
        (small_disk / "full").unlink()
        check(dataset[0], 0, 0)


def test_counting_on_a_full_disk_is_an_error_that_can_be_caught(small_disk):
    counts = Counts(small_disk)
    fill(small_disk)
    with pytest.raises(OSError, match="No space left on device"):
        counts.add(samples=1)


def test_counts_are_told_while_another_process_begins_to_count(tmp_path):
    counts = Counts(tmp_path)
    counts.add(samples=2)
    (tmp_path / "counts-0").touch()
    assert counts.total() == dict.fromkeys(NAMES, 0) | {"samples": 2}


def test_rows_lie_in_the_file_that_all_processes_map(roots):
    with contextlib.closing(LeRobotDataset(roots("gop 2"))) as dataset:
        rows = dataset._rows[2]
        mapped = [
            line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "episode-000002" in line
        ]
        spans = [[int(end, 16) for end in addresses.split("-")] for addresses in mapped]
        for key in ("observation.state", "action", "timestamp", "index"):
            assert any(low <= rows[key].ctypes.data < high for low, high in spans), key
