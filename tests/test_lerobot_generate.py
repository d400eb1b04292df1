"""What is written as a LeRobot data set is what pyarrow, PyAV and json read back; barcodes survive codecs."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from helpers.barcodes import barcode, read_barcode, read_camera, write_barcoded
from helpers.worlds import some_rows
from lerobot_writer import DatasetWriter, episode_files, generate

from fsdp2_strategy.errors import DataError
from fsdp2_strategy.integrations.lerobot import video
from fsdp2_strategy.integrations.lerobot.dataset import LeRobotDataset

TOP, WRIST, SIDE = "observation.images.top", "observation.images.wrist", "observation.images.side"


@pytest.fixture(autouse=True)
def _quiet_encoder(monkeypatch):
    monkeypatch.setenv("SVT_LOG", "1")


def info_of(root):
    return json.loads((root / "meta/info.json").read_text(encoding="utf-8"))


def episodes_of(root):
    """Return the rows about episodes, file by file, each checked to say where it is."""
    rows = []
    for path in sorted((root / "meta/episodes").glob("*/*.parquet")):
        here = pq.read_table(path).to_pylist()
        place = (
            f"chunk-{here[0]['meta/episodes/chunk_index']:03d}/file-{here[0]['meta/episodes/file_index']:03d}.parquet"
        )
        assert path == root / "meta/episodes" / place
        rows += here
    return rows


def data_of(root, episode):
    place = {"chunk_index": episode["data/chunk_index"], "file_index": episode["data/file_index"]}
    table = pq.read_table(root / info_of(root)["data_path"].format(**place))
    return table.filter(pc.equal(table["episode_index"], episode["episode_index"]))


def video_path(root, episode, camera):
    place = {name: episode[f"videos/{camera}/{name}"] for name in ("chunk_index", "file_index")}
    return root / info_of(root)["video_path"].format(video_key=camera, **place)


def decoded(path):
    """Return the exact times and the images of a file."""
    with av.open(str(path)) as container:
        (stream,) = container.streams
        return [
            (frame.pts * stream.time_base, frame.to_ndarray(format="rgb24", **video._ONE_THREAD))
            for frame in container.decode(stream)
        ]


def packets(path):
    """Return (time shown, time decoded, is key) of each packet, in the order of the file."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        found = [packet for packet in container.demux(stream) if packet.dts is not None]
        return [(packet.pts * stream.time_base, packet.dts * stream.time_base, packet.is_keyframe) for packet in found]


def decoded_png(content):
    with av.open(io.BytesIO(content)) as container:
        (frame,) = container.decode(video=0)
        return frame.to_ndarray(format="rgb24", **video._ONE_THREAD)


# Barcodes


@pytest.mark.parametrize("size", [(32, 48), (33, 49), (64, 96), (240, 320)])
@pytest.mark.parametrize("numbers", [(0, 0, 0), (1, 2, 3), (65535, 65535, 15), (43690, 21845, 10)])
def test_barcode_is_read_as_drawn_from_every_layout(size, numbers):
    episode, frame, camera = numbers
    image = barcode(episode, frame, *size, camera=camera)
    assert image.shape == (*size, 3)
    assert image.dtype == np.uint8
    channels_first = torch.from_numpy(image).permute(2, 0, 1)
    for form in (
        image,
        image.transpose(2, 0, 1),
        image / np.float32(255),
        channels_first,
        channels_first.float() / 255,
    ):
        assert read_barcode(form) == (episode, frame)
        assert read_camera(form) == camera


def test_barcode_images_differ_by_frame_and_camera_also_beside_the_cells():
    images = [barcode(1, 5, 64, 96), barcode(1, 6, 64, 96), barcode(2, 5, 64, 96), barcode(1, 5, 64, 96, camera=1)]
    for one, other in itertools.combinations(images, 2):
        assert np.mean(one[:8] != other[:8]) > 0.5


def test_barcode_with_one_cell_turned_is_refused():
    image = barcode(7, 130, 64, 96)
    for row, column in itertools.product(range(6), range(8)):
        damaged = image.copy()
        cell = damaged[8 + 8 * row : 16 + 8 * row, 16 + 8 * column : 24 + 8 * column]
        cell[:] = 240 if cell.mean() < 128 else 16
        with pytest.raises(DataError, match="cannot read a barcode: the checksum is"):
            read_barcode(damaged)


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((64, 96, 3), dtype=np.uint8),
        np.full((64, 96, 3), 255, dtype=np.uint8),
        np.full((64, 96, 3), 128, dtype=np.uint8),
        np.zeros((3, 64, 96), dtype=np.float32),
        barcode(7, 130, 64, 96)[::-1],
        barcode(7, 130, 64, 96)[:, ::2],
        barcode(7, 130, 64, 96)[:60, :90],
        (0.6 * barcode(7, 130, 64, 96) + 0.4 * barcode(7, 131, 64, 96)).astype(np.uint8),
        barcode(7, 130, 64, 96)[..., 0],
        barcode(7, 130, 64, 96)[None],
        barcode(7, 130, 64, 96)[:16],
    ],
)
def test_what_is_no_barcode_is_refused(image):
    with pytest.raises(DataError, match=r"cannot (draw or )?read a barcode"):
        read_barcode(image)


@pytest.mark.parametrize("numbers", [(65536, 0, 0), (0, 65536, 0), (-1, 0, 0), (0, 0, 16)])
def test_numbers_that_do_not_fit_are_refused(numbers):
    with pytest.raises(DataError, match="expected 0 to"):
        barcode(*numbers[:2], 64, 96, camera=numbers[2])


def test_images_that_are_too_small_are_refused():
    with pytest.raises(DataError, match="the image is 24x48, expected at least 32x48"):
        barcode(0, 0, 24, 48)


# Videos


@pytest.mark.parametrize(
    ("codec", "gop", "b_frames"),
    some_rows(
        [
            (codec, gop, b_frames)
            for codec in ("libx264", "libsvtav1")
            for gop, b_frames in ((1, 0), (2, 0), (4, 0), (100, 0), (100, 2), (5, 3))
        ],
        [("libx264", 5, 3), ("libsvtav1", 1, 0), ("libsvtav1", 4, 0), ("libsvtav1", 100, 2)],
    ),
)
def test_videos_hold_each_frame_at_its_time_with_key_frames_where_asked(tmp_path, codec, gop, b_frames):
    lengths = [1, 9, 1, 14, 6, 2]
    root = write_barcoded(
        tmp_path / "set",
        lengths,
        codec=codec,
        gop=gop,
        b_frames=b_frames,
        cameras=(TOP, WRIST),
        episodes_per_video_file=3,
    )
    for number, camera in enumerate((TOP, WRIST)):
        for episodes in ([0, 1, 2], [3, 4, 5]):
            paths = {video_path(root, row, camera) for row in episodes_of(root) if row["episode_index"] in episodes}
            (path,) = paths
            expected = [(episode, frame) for episode in episodes for frame in range(lengths[episode])]
            frames = decoded(path)
            assert [time for time, _ in frames] == [Fraction(i, 10) for i in range(len(expected))]
            assert [read_barcode(image) for _, image in frames] == expected
            assert {read_camera(image) for _, image in frames} == {number}
            found = packets(path)
            keys = sorted(time * 10 for time, _, is_key in found if is_key)
            assert keys == [i for i, (_, frame) in enumerate(expected) if frame % gop == 0]
            decoding = [dts for _, dts, _ in found]
            assert decoding == sorted(set(decoding))
            reordered = [pts for pts, _, _ in found] != sorted(pts for pts, _, _ in found)
            assert reordered == (codec == "libx264" and b_frames > 0)


def test_videos_are_yuv420p_with_their_index_at_the_front(tmp_path):
    root = write_barcoded(tmp_path / "set", [5, 5], gop=3, crf=30)
    (path,) = (root / "videos").rglob("*.mp4")
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")
    with av.open(str(path)) as container:
        (stream,) = container.streams
        info = info_of(root)["features"][TOP]["info"]
        assert info == {
            "video.height": stream.height,
            "video.width": stream.width,
            "video.codec": stream.codec.canonical_name,
            "video.pix_fmt": stream.pix_fmt,
            "video.fps": stream.average_rate,
            "video.channels": 3,
            "is_depth_map": False,
            "has_audio": False,
            "video.g": 3,
            "video.crf": 30,
            "video.preset": "veryfast",
        }
        assert stream.pix_fmt == "yuv420p"
        assert stream.duration * stream.time_base == 1


@pytest.mark.parametrize("fps", [1, 7, 30, 59])
def test_frames_stand_on_the_grid_of_any_rate(tmp_path, fps):
    root = write_barcoded(tmp_path / "set", [4, 3, 5], fps=fps, b_frames=1, gop=100)
    times = [time for time, _ in decoded(video_path(root, episodes_of(root)[0], TOP))]
    assert times == [Fraction(i, fps) for i in range(12)]
    starts = [(row[f"videos/{TOP}/from_timestamp"], row[f"videos/{TOP}/to_timestamp"]) for row in episodes_of(root)]
    assert starts == [(0, 4 / fps), (4 / fps, 7 / fps), (7 / fps, 12 / fps)]


@pytest.mark.parametrize("codec", ["libx264", "libsvtav1"])
def test_the_same_set_has_the_same_bytes(tmp_path, codec):
    roots = [
        write_barcoded(tmp_path / name, [12, 7, 9, 8], codec=codec, gop=50, b_frames=2, image_cameras=(SIDE,))
        for name in ("one", "two")
    ]
    contents = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()} for root in roots
    ]
    assert len(contents[0]) == 7
    assert contents[0] == contents[1]


# Tables


FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
    "precise": {"dtype": "float64", "shape": (2,)},
    "reward": {"dtype": "float32", "shape": (1,)},
    "counts": {"dtype": "int64", "shape": (2,)},
    "small": {"dtype": "int32", "shape": (1,)},
    "bytes": {"dtype": "uint8", "shape": (4,)},
    "flags": {"dtype": "bool", "shape": (2,)},
    "next.done": {"dtype": "bool", "shape": (1,)},
    "note": {"dtype": "string", "shape": (1,)},
    SIDE: {"dtype": "image", "shape": (5, 7, 3), "names": ["height", "width", "channels"]},
    WRIST: {"dtype": "image", "shape": (3, 5, 7), "names": ["channels", "height", "width"]},
    TOP: {"dtype": "video", "shape": (3, 32, 48), "names": ["channels", "height", "width"]},
}


def frames_of_all_kinds(length, seed):
    rng = np.random.default_rng(seed)
    return {
        "observation.state": rng.normal(size=(length, 3)).astype(np.float32),
        "precise": rng.normal(size=(length, 2)),
        "reward": rng.normal(size=(length, 1)).astype(np.float32),
        "counts": rng.integers(-(2**62), 2**62, (length, 2)),
        "small": rng.integers(-9, 9, length).astype(np.int32),
        "bytes": rng.integers(0, 256, (length, 4), dtype=np.uint8),
        "flags": rng.random((length, 2)) < 0.5,
        "next.done": np.arange(length) == length - 1,
        "note": [f"Ünterwegs {i}" for i in range(length)],
        SIDE: rng.integers(0, 256, (length, 5, 7, 3), dtype=np.uint8),
        WRIST: rng.integers(0, 256, (length, 3, 5, 7), dtype=np.uint8),
        TOP: np.stack([barcode(seed, i, 32, 48).transpose(2, 0, 1) for i in range(length)]),
    }


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets") / "all_kinds"
    episodes = [frames_of_all_kinds(length, seed) for seed, length in enumerate([6, 1, 11])]
    with DatasetWriter(root, fps=20, features=FEATURES, robot_type="so100") as writer:
        for i, frames in enumerate(episodes):
            writer.add_episode(frames, ["öffne", "schließe"][i % 2] if i < 2 else ["öffne"] * 4 + ["halte"] * 7)
    return root, episodes


def test_rows_are_read_back_as_they_were_given(all_kinds):
    root, episodes = all_kinds
    tasks = {row["task"]: row["task_index"] for row in pq.read_table(root / "meta/tasks.parquet").to_pylist()}
    said = [["öffne"] * 6, ["schließe"], ["öffne"] * 4 + ["halte"] * 7]
    start = 0
    for row, frames, task in zip(episodes_of(root), episodes, said, strict=True):
        table, length = data_of(root, row), len(task)
        for name in ("observation.state", "precise", "counts", "bytes", "flags"):
            np.testing.assert_array_equal(np.array(table[name].to_pylist(), dtype=frames[name].dtype), frames[name])
        for name in ("reward", "small", "next.done"):
            np.testing.assert_array_equal(table[name].to_numpy(), frames[name].reshape(-1))
        assert table["note"].to_pylist() == frames["note"]
        for name, images in ((SIDE, frames[SIDE]), (WRIST, frames[WRIST].transpose(0, 2, 3, 1))):
            stored = table[name].to_pylist()
            np.testing.assert_array_equal([decoded_png(image["bytes"]) for image in stored], images)
            assert [image["path"] for image in stored] == [f"frame-{i:06d}.png" for i in range(length)]
        np.testing.assert_array_equal(table["timestamp"].to_numpy(), (np.arange(length) / 20).astype(np.float32))
        assert table["frame_index"].to_pylist() == list(range(length))
        assert table["index"].to_pylist() == list(range(start, start + length))
        assert table["task_index"].to_pylist() == [tasks[text] for text in task]
        assert row["tasks"] == list(dict.fromkeys(task))
        assert (row["dataset_from_index"], row["dataset_to_index"], row["length"]) == (start, start + length, length)
        start += length


def test_values_have_the_dtypes_of_lerobots_reader_or_those_of_their_features(all_kinds):
    root, episodes = all_kinds
    as_lerobot = {"precise": torch.float32, "small": torch.int64, "bytes": torch.int64, "next.done": torch.bool}
    strict = {"precise": torch.float64, "small": torch.int32, "bytes": torch.uint8, "next.done": torch.bool}
    for reader, expected in (("lerobot", as_lerobot), ("strict", strict)):
        with contextlib.closing(LeRobotDataset(root, reader=reader, on_corrupt="skip")) as dataset:
            assert {name: dataset[2][name].dtype for name in expected} == expected
            assert {name: dataset._blank(0, 2)[name].dtype for name in expected} == expected
            assert torch.equal(
                dataset[2]["precise"], torch.from_numpy(episodes[0]["precise"][2]).to(expected["precise"])
            )


def test_columns_have_the_types_of_the_format(all_kinds):
    root, _ = all_kinds
    schema = pq.read_schema(root / "data/chunk-000/file-000.parquet")
    kinds = {field.name: field.type for field in schema}
    vector = {"observation.state": pa.float32(), "precise": pa.float64(), "counts": pa.int64(), "bytes": pa.uint8()}
    for name, kind in (vector | {"flags": pa.bool_()}).items():
        assert pa.types.is_fixed_size_list(kinds[name])
        assert (kinds[name].value_type, kinds[name].list_size) == (kind, FEATURES[name]["shape"][0])
    scalars = {"reward": pa.float32(), "small": pa.int32(), "next.done": pa.bool_(), "note": pa.string()}
    own = {"timestamp": pa.float32()} | dict.fromkeys(
        ("frame_index", "episode_index", "index", "task_index"), pa.int64()
    )
    assert {name: kinds[name] for name in scalars | own} == scalars | own
    assert kinds[SIDE] == kinds[WRIST] == pa.struct({"bytes": pa.binary(), "path": pa.string()})
    assert list(kinds) == [name for name in info_of(root)["features"] if name != TOP]
    described = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert list(described) == list(kinds)
    value = {"dtype": "float32", "_type": "Value"}
    assert described["observation.state"] == {"feature": value, "length": 3, "_type": "List"}
    assert described["reward"] == value
    assert described[SIDE] == {"_type": "Image"}


def test_info_says_what_the_format_asks_for(all_kinds):
    root, _ = all_kinds
    info = info_of(root)
    features = info.pop("features")
    assert info == {
        "codebase_version": "v3.0",
        "fps": 20,
        "total_episodes": 3,
        "total_frames": 18,
        "total_tasks": 3,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "robot_type": "so100",
        "splits": {"train": "0:3"},
    }
    for name, feature in FEATURES.items():
        assert features[name]["dtype"] == feature["dtype"]
        assert features[name]["shape"] == list(feature["shape"])
        assert features[name]["names"] == feature.get("names")
    assert features["timestamp"] == {"dtype": "float32", "shape": [1], "names": None}
    assert list(features)[-5:] == ["timestamp", "frame_index", "episode_index", "index", "task_index"]


def test_a_set_without_videos_has_no_video_path(tmp_path):
    root = write_barcoded(tmp_path / "set", [3], cameras=(), image_cameras=(SIDE,))
    assert info_of(root)["video_path"] is None
    assert not (root / "videos").exists()


def test_tasks_are_the_index_of_what_pandas_would_read(all_kinds):
    root, _ = all_kinds
    table = pq.read_table(root / "meta/tasks.parquet")
    assert table.to_pydict() == {"task_index": [0, 1, 2], "task": ["öffne", "schließe", "halte"]}
    about = json.loads(table.schema.metadata[b"pandas"])
    assert about["index_columns"] == ["task"]
    assert [column["name"] for column in about["columns"]] == table.column_names
    assert [column["pandas_type"] for column in about["columns"]] == ["int64", "unicode"]


# Statistics


def expected_stats(values):
    numbers = values.astype(np.float64)
    quantiles = {f"q{round(100 * q):02d}": np.quantile(numbers, q, axis=0) for q in (0.01, 0.1, 0.5, 0.9, 0.99)}
    moments = {"mean": numbers.mean(axis=0), "std": numbers.std(axis=0)}
    return {"min": values.min(axis=0), "max": values.max(axis=0), **moments, **quantiles}


def test_statistics_are_those_of_numpy(all_kinds):
    root, episodes = all_kinds
    overall = json.loads((root / "meta/stats.json").read_text(encoding="utf-8"))
    rows = episodes_of(root)
    assert "note" not in overall
    for name, feature in FEATURES.items():
        if name == "note":
            continue
        is_camera = feature["dtype"] in ("image", "video")
        parts = []
        for frames in episodes:
            values = frames[name]
            if is_camera:
                last = values if feature["shape"][-1] == 3 else values.transpose(0, 2, 3, 1)
                values = last.reshape(-1, 3) / 255
            parts.append(values.reshape(len(values), -1))
        shape = (3, 1, 1) if is_camera else feature["shape"]
        for row, part, frames in zip(rows, parts, episodes, strict=True):
            assert row[f"stats/{name}/count"] == [len(frames[name])]
            for stat, value in expected_stats(part).items():
                np.testing.assert_allclose(row[f"stats/{name}/{stat}"], value.reshape(shape), rtol=1e-6, atol=1e-9)
        whole = expected_stats(np.concatenate(parts))
        assert overall[name]["count"] == [18]
        for stat in ("min", "max", "mean", "std"):
            np.testing.assert_allclose(overall[name][stat], whole[stat].reshape(shape), rtol=1e-6, atol=1e-9)
        for stat in ("q01", "q10", "q50", "q90", "q99"):
            mean = np.average([row[f"stats/{name}/{stat}"] for row in rows], axis=0, weights=[6, 1, 11])
            np.testing.assert_allclose(overall[name][stat], mean, rtol=1e-6, atol=1e-9)


def test_statistics_of_columns_that_the_writer_fills_in_are_there_too(all_kinds):
    overall = json.loads((all_kinds[0] / "meta/stats.json").read_text(encoding="utf-8"))
    assert overall["index"]["min"] == [0]
    assert overall["index"]["max"] == [17]
    assert overall["frame_index"]["mean"] == pytest.approx([(15 + 0 + 55) / 18])
    assert overall["next.done"]["max"] == [True]


def test_statistics_of_long_episodes_and_large_images_take_some_of_them(tmp_path):
    long, large = np.zeros((200, 4, 4, 3), np.uint8), np.zeros((2, 300, 450, 3), np.uint8)
    long[:] = np.arange(200)[:, None, None, None]
    large[:] = np.arange(300)[None, :, None, None] % 3 * 100
    features = {"long": {"dtype": "image", "shape": (4, 4, 3)}, "large": {"dtype": "image", "shape": (300, 450, 3)}}
    for name, images, expected in (
        ("long", long, [np.round(np.linspace(0, 199, 100)).mean(), 100]),
        ("large", large, [0, 2]),  # every third pixel
    ):
        with DatasetWriter(tmp_path / name, fps=10, features={name: features[name]}) as writer:
            writer.add_episode({name: images}, "look")
        (row,) = episodes_of(tmp_path / name)
        assert row[f"stats/{name}/mean"][0][0][0] * 255 == pytest.approx(expected[0])
        assert row[f"stats/{name}/count"] == [expected[1]]


# Layout


def test_episodes_follow_each_other_and_never_straddle_files(tmp_path):
    lengths = [3, 1, 8, 2, 5, 4, 9, 1, 1, 6, 2]
    root = write_barcoded(
        tmp_path / "set",
        lengths,
        cameras=(TOP, WRIST),
        episodes_per_data_file=2,
        episodes_per_video_file=3,
        episodes_per_metadata_file=4,
        chunks_size=2,
    )
    rows = episodes_of(root)
    assert [row["episode_index"] for row in rows] == list(range(11))
    assert [row["length"] for row in rows] == lengths
    ends = np.cumsum(lengths).tolist()
    assert [(row["dataset_from_index"], row["dataset_to_index"]) for row in rows] == list(
        zip([0, *ends], ends, strict=False)
    )

    def places(prefix):
        return [(row[f"{prefix}/chunk_index"], row[f"{prefix}/file_index"]) for row in rows]

    def expected(most):
        return [divmod(i // most, 2) for i in range(11)]

    assert places("data") == expected(2)
    assert places(f"videos/{TOP}") == places(f"videos/{WRIST}") == expected(3)
    assert places("meta/episodes") == expected(4)
    assert sorted(path.relative_to(root).as_posix() for path in (root / "data").rglob("*.parquet")) == [
        f"data/chunk-{chunk:03d}/file-{file:03d}.parquet" for chunk, file in sorted(set(expected(2)))
    ]
    info = info_of(root)
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (11, sum(lengths), 3)
    for path, mine in itertools.groupby(rows, lambda row: video_path(root, row, TOP)):
        start = 0
        for row in mine:
            assert row[f"videos/{TOP}/from_timestamp"] == start / 10
            start += row["length"]
            assert row[f"videos/{TOP}/to_timestamp"] == start / 10
        assert len(packets(path)) == start
    for place, mine in itertools.groupby(rows, lambda row: (row["data/chunk_index"], row["data/file_index"])):
        file = pq.ParquetFile(root / info["data_path"].format(chunk_index=place[0], file_index=place[1]))
        groups = [file.read_row_group(i)["episode_index"].unique().to_pylist() for i in range(file.num_row_groups)]
        assert groups == [[row["episode_index"]] for row in mine]


def test_barcoded_values_say_where_they_belong(tmp_path):
    root = write_barcoded(tmp_path / "set", [3, 5, 2, 4], image_cameras=(SIDE,), tasks=("a", "b"))
    for episode, row in enumerate(episodes_of(root)):
        table = data_of(root, row)
        numbers = [[float(episode), float(frame)] for frame in range(row["length"])]
        assert table["observation.state"].to_pylist() == numbers
        assert table["action"].to_pylist() == [[e + 0.5, f + 0.5] for e, f in numbers]
        assert table["next.done"].to_pylist() == [False] * (row["length"] - 1) + [True]
        images = [decoded_png(image["bytes"]) for image in table[SIDE].to_pylist()]
        assert [list(read_barcode(image)) for image in images] == numbers
        assert {read_camera(image) for image in images} == {1}
        assert row["tasks"] == ["ab"[episode % 2]]


def test_files_end_before_they_outgrow_their_size(tmp_path):
    rng = np.random.default_rng(0)
    features = {
        SIDE: {"dtype": "image", "shape": (64, 96, 3)},
        TOP: {"dtype": "video", "shape": (64, 96, 3)},
    }
    with DatasetWriter(
        tmp_path / "set", fps=10, features=features, crf=1, data_files_size_in_mb=1, video_files_size_in_mb=1
    ) as writer:
        for _ in range(12):
            noise = rng.integers(0, 256, (20, 64, 96, 3), dtype=np.uint8)
            writer.add_episode({SIDE: noise, TOP: noise}, "look")
    for folder in ("data", f"videos/{TOP}"):
        sizes = [path.stat().st_size for path in sorted((tmp_path / "set" / folder).glob("*/*"))]
        assert len(sizes) > 2
        assert max(sizes) <= 1 << 20
        assert min(sizes[:-1]) > 1 << 19


def test_files_of_episodes_end_before_they_outgrow_their_size(tmp_path):
    written = episode_files.RollingWriter(
        tmp_path, ".parquet", episode_files.EpisodesFile, chunks_size=1000, max_episodes=None, max_bytes=4000
    )
    places = [written.append({"episode_index": i, "stats": [float(i)] * 100}) for i in range(10)]
    written.close()
    assert [place.file for place in places] == [0] * 4 + [1] * 4 + [2] * 2
    assert [place.start for place in places] == [0, 1, 2, 3] * 2 + [0, 1]


# Refusals


SIMPLE = {"state": {"dtype": "float32", "shape": (2,)}, "note": {"dtype": "string", "shape": (1,)}}
GOOD = {"state": np.zeros((3, 2), np.float32), "note": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": np.zeros((3, 2))}, r"'state' is float64 of shape \(3, 2\), expected float32 of shape \('T', 2\)"),
        ({"state": np.zeros((3, 3), np.float32)}, r"of shape \(3, 3\), expected"),
        ({"state": np.zeros(3, np.float32)}, r"of shape \(3,\), expected"),
        ({"state": np.zeros((2, 2), np.float32)}, "numbers of values are {'state': 2, 'note': 3}"),
        ({"note": "abc"}, "'note' is not a sequence of strings"),
        ({"note": ["a", "b", 3]}, "'note' is not a sequence of strings"),
        ({"stat": np.zeros((3, 2), np.float32)}, "'stat' is not a feature.*Did you mean 'state'"),
        ({"index": np.arange(3)}, "'index' is not a feature"),
        ({"state": None}, r"frames lacks \['state'\], expected all of"),
        ({"state": np.zeros((0, 2), np.float32), "note": []}, "expected the same number for all features, at least 1"),
    ],
)
def test_an_episode_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path, change, message):
    frames = {name: value for name, value in (GOOD | change).items() if value is not None}
    with DatasetWriter(tmp_path / "set", fps=10, features=SIMPLE) as writer:
        with pytest.raises(DataError, match=message):
            writer.add_episode(frames, "wait")
        writer.add_episode(GOOD, "go")
    assert info_of(tmp_path / "set")["total_episodes"] == 1
    assert pq.read_table(tmp_path / "set/meta/tasks.parquet")["task"].to_pylist() == ["go"]


def test_images_that_do_not_fit_are_refused(tmp_path):
    features = {TOP: {"dtype": "video", "shape": (32, 48, 3)}}
    with DatasetWriter(tmp_path / "set", fps=10, features=features) as writer:
        for images in (np.zeros((2, 32, 48, 3)), np.zeros((2, 3, 32, 48), np.uint8), np.zeros((2, 32, 48), np.uint8)):
            with pytest.raises(DataError, match="expected uint8 of shape"):
                writer.add_episode({TOP: images}, "look")
        writer.add_episode({TOP: np.zeros((2, 32, 48, 3), np.uint8)}, "look")


def test_tasks_are_one_or_one_a_frame(tmp_path):
    with DatasetWriter(tmp_path / "set", fps=10, features=SIMPLE) as writer:
        for task in (["a", "b"], ["a", "b", 3], []):
            with pytest.raises(DataError, match="expected a string, or a sequence of 3 strings"):
                writer.add_episode(GOOD, task)
        writer.add_episode(GOOD, ["a", "b", "a"])


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"dtype": "float16", "shape": (2,)}, "has dtype 'float16', expected one of"),
        ({"shape": (2,)}, "has dtype None"),
        ({"dtype": "float32"}, r"has shape \(\), expected \(n,\)"),
        ({"dtype": "float32", "shape": (2, 2)}, "Flatten it"),
        ({"dtype": "float32", "shape": (0,)}, "Flatten it"),
        ({"dtype": "string", "shape": (2,)}, r"or \(1,\) for strings"),
        ({"dtype": "video", "shape": (64, 96)}, "Crop or scale"),
        ({"dtype": "video", "shape": (64, 96, 4)}, "Crop or scale"),
        ({"dtype": "video", "shape": (63, 96, 3)}, "Crop or scale"),
        ({"dtype": "video", "shape": (3, 64, 95)}, "Crop or scale"),
    ],
)
def test_features_that_cannot_be_written_are_refused(tmp_path, feature, message):
    with pytest.raises(DataError, match=message):
        DatasetWriter(tmp_path / "set", fps=10, features={"f": feature})


@pytest.mark.parametrize("name", ["timestamp", "task_index", "a/b", ""])
def test_names_that_are_taken_are_refused(tmp_path, name):
    with pytest.raises(DataError, match="name that is empty, reserved"):
        DatasetWriter(tmp_path / "set", fps=10, features={name: {"dtype": "float32", "shape": (1,)}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": 0}, "fps is 0"),
        ({"fps": 29.97}, "fps is 29.97"),
        ({"gop": 0}, "gop is 0"),
        ({"b_frames": -1}, "b_frames is -1"),
        ({"codec": "mpeg2"}, "codec is 'mpeg2', expected one of"),
        ({"chunks_size": 0}, "chunks_size is 0"),
        ({"episodes_per_video_file": 0}, "episodes_per_video_file is 0"),
        ({"data_files_size_in_mb": 0}, "data_files_size_in_mb is 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        DatasetWriter(tmp_path / "set", **({"fps": 10, "features": SIMPLE} | options))
    assert not (tmp_path / "set").exists()


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "mine").write_text("precious")
    for root in (tmp_path, tmp_path / "mine"):
        with pytest.raises(DataError, match="is not an empty folder"):
            DatasetWriter(root, fps=10, features=SIMPLE)
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_closed_writer_takes_no_more_and_may_be_closed_again(tmp_path):
    writer = DatasetWriter(tmp_path / "set", fps=10, features=SIMPLE)
    writer.add_episode(GOOD, "go")
    writer.close()
    writer.close()
    with pytest.raises(DataError, match="the writer is closed"):
        writer.add_episode(GOOD, "go")
    assert info_of(tmp_path / "set")["total_episodes"] == 1


def test_an_empty_set_cannot_be_finished(tmp_path):
    with pytest.raises(DataError, match="it has 0 complete episodes"):
        DatasetWriter(tmp_path / "set", fps=10, features=SIMPLE).close()


def test_a_block_left_by_an_exception_leaves_no_set(tmp_path):
    with pytest.raises(KeyboardInterrupt), DatasetWriter(tmp_path / "set", fps=10, features=SIMPLE) as writer:
        writer.add_episode(GOOD, "go")
        raise KeyboardInterrupt
    assert not (tmp_path / "set/meta/info.json").exists()


def test_a_writer_whose_files_failed_does_not_go_on(tmp_path, monkeypatch):
    features = {"state": SIMPLE["state"], TOP: {"dtype": "video", "shape": (32, 48, 3)}}
    frames = {"state": GOOD["state"], TOP: np.zeros((3, 32, 48, 3), np.uint8)}
    writer = DatasetWriter(tmp_path / "set", fps=10, features=features)
    writer.add_episode(frames, "go")
    with monkeypatch.context() as patch:

        def fails(self, episode):
            raise OSError(28, "No space left on device")

        patch.setattr(generate.VideoFile, "append", fails)
        with pytest.raises(OSError, match="No space left"):
            writer.add_episode(frames, "go")
    with pytest.raises(DataError, match="the writer failed during an earlier episode"):
        writer.add_episode(frames, "go")
    with pytest.raises(DataError, match="1 complete episodes and an incomplete one"):
        writer.close()
    assert not (tmp_path / "set/meta/info.json").exists()


def test_frames_that_a_codec_refuses_are_a_named_error(tmp_path):
    features = {TOP: {"dtype": "video", "shape": (2, 20000, 3)}}
    with pytest.raises(DataError, match="libsvtav1 fails on frames of 2x20000"):
        with DatasetWriter(tmp_path / "set", fps=10, features=features, codec="libsvtav1") as writer:
            writer.add_episode({TOP: np.zeros((2, 2, 20000, 3), np.uint8)}, "look")
    assert not Path(tmp_path / "set/meta/info.json").exists()
