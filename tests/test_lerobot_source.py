"""Files of a data set: read as they are, fetched once, given up in time, and dropped while others read."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import av
import fsspec
import numpy as np
import pyarrow as pa
import pytest
from fsspec.spec import AbstractBufferedFile
from helpers.http_server import FileServer
from pyarrow import parquet

from fsdp2_strategy.errors import DataError
from fsdp2_strategy.integrations.lerobot import byte_cache
from fsdp2_strategy.integrations.lerobot.byte_cache import BLOCK_BYTES as BLOCK
from fsdp2_strategy.integrations.lerobot.dataset import used_bytes
from fsdp2_strategy.integrations.lerobot.dataset_source import LocalFiles, RemoteFiles, open_source

PATH = "videos/observation.images.top/chunk-000/file-000.mp4"
SIZE = 40 * BLOCK + 1234
CONTENT = random.Random(7).randbytes(SIZE)
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def server(tmp_path):
    file = tmp_path / "served" / PATH
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    with FileServer(tmp_path / "served") as server:
        yield server


@pytest.fixture
def remote(server, tmp_path):
    source = source_of(server, tmp_path)
    yield source


def source_of(server, tmp_path, **options):
    return RemoteFiles(server.url, tmp_path / "cache", **{"backoff_seconds": 0, "timeout_seconds": 30} | options)


def read(source, start, count, path=PATH):
    with source.open(path) as file:
        file.seek(start)
        return file.read(count)


def read_here_and_there(source, seed):
    numbers = random.Random(seed)
    with source.open(PATH) as file:
        for _ in range(100):
            start, count = numbers.randrange(SIZE), numbers.randrange(5 * BLOCK)
            file.seek(start)
            assert file.read(count) == CONTENT[start : start + count]


def fetched_blocks(server, path=PATH):
    """The blocks that the server sent, each as often as it was sent."""
    return sorted(b for s, e in server.ranges_asked.get(path, []) for b in range(s // BLOCK, -(-e // BLOCK)))


def in_children(n, work):
    """Run ``work(number)`` in forked processes at once; each is to give True."""
    answers = FORK.SimpleQueue()
    children = [
        FORK.Process(target=lambda number=number: answers.put(work(number)), daemon=True) for number in range(n)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * n
    assert all(answers.get() for _ in children)


@contextmanager
def beside(*works):
    """Run each of some functions in a thread while the block runs; raise what they raise."""
    errors = []

    def guarded(work):
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def in_threads(*works):
    with beside(*works):
        pass


# --- what is read


def test_reads_equal_the_file_anywhere(remote, server):
    random_numbers = random.Random(0)
    edges = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, SIZE - 1, SIZE, SIZE + 5, 40 * BLOCK]
    with remote.open(PATH) as file:
        assert (file.size, file.readable(), file.seekable(), file.writable()) == (SIZE, True, True, False)
        for _ in range(300):
            start = random_numbers.choice([*edges, random_numbers.randrange(SIZE)])
            count = random_numbers.choice([0, 1, 100, BLOCK, BLOCK + 1, 3 * BLOCK, SIZE])
            assert file.seek(start) == start
            assert file.read(count) == CONTENT[start : start + count]
            assert file.tell() == start + len(CONTENT[start : start + count])
        assert file.seek(-100, os.SEEK_END) == SIZE - 100
        assert file.seek(40, os.SEEK_CUR) == SIZE - 60
        assert file.read() == CONTENT[-60:]
        assert file.read(10) == b""
        file.seek(0)
        assert file.read() == CONTENT
    assert server.sent[PATH] == SIZE


def test_local_files_read_as_they_are(tmp_path):
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/info.json").write_bytes(b"{}")
    source = open_source(tmp_path, tmp_path / "cache")
    assert isinstance(source, LocalFiles)
    assert source.exists("meta/info.json")
    assert not source.exists("meta/other.json")
    assert (source.size("meta/info.json"), source.read("meta/info.json")) == (2, b"{}")
    assert source.local("meta/info.json") == tmp_path / "meta/info.json"
    with source.open("meta/info.json") as file:
        assert file.read() == b"{}"
    source.free("meta/info.json", 0, 2)
    source.drop("meta/info.json")
    assert source.read("meta/info.json") == b"{}"
    for ask in (source.open, source.read, source.size):
        with pytest.raises(DataError, match=r"cannot read .*meta/other\.json: No such file"):
            ask("meta/other.json")
    assert not (tmp_path / "cache").exists()


def test_other_schemes_read_the_same(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served/file").write_bytes(CONTENT)
    source = open_source(f"file://{tmp_path}/served", tmp_path / "cache")
    assert isinstance(source, RemoteFiles)
    assert read(source, 5 * BLOCK - 3, 10, "file") == CONTENT[5 * BLOCK - 3 :][:10]
    assert 2 * BLOCK < used_bytes(source._folder) < 3 * BLOCK
    assert source.read("file") == CONTENT
    with pytest.raises(DataError, match="the file is missing"):
        source.open("none")


class _Buffered(fsspec.AbstractFileSystem):
    """A file system whose files read ahead unless told otherwise, as those of hf:// do."""

    protocol = "buffered"
    fetched: ClassVar[list[tuple[int, int]]] = []

    def info(self, path, **_):
        return {"name": path, "size": SIZE, "type": "file"}

    def _open(self, path, mode="rb", **options):
        file = AbstractBufferedFile(self, path, mode, **options)
        file._fetch_range = file.cache.fetcher = self._fetch
        return file

    def _fetch(self, start, end):
        self.fetched.append((start, end))
        return CONTENT[start:end]


def test_file_systems_that_read_ahead_are_kept_from_it(tmp_path):
    fsspec.register_implementation("buffered", _Buffered, clobber=True)
    source = RemoteFiles("buffered://root", tmp_path / "cache")
    assert read(source, 4 * BLOCK, 10) == CONTENT[4 * BLOCK :][:10]
    assert _Buffered.fetched == [(4 * BLOCK, 5 * BLOCK)]


def test_an_unknown_scheme_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read nosuch://x: .*expected a scheme that fsspec supports"):
        open_source("nosuch://x", tmp_path)


def test_an_empty_file_is_empty(remote, server):
    (server.root / "empty").write_bytes(b"")
    with remote.open("empty") as file:
        assert (file.size, file.read(), file.read(5)) == (0, b"", b"")


def test_a_parquet_file_is_read_from_it(remote, server):
    table = pa.table({"index": list(range(200_000)), "value": random.Random(1).choices(range(1 << 40), k=200_000)})
    parquet.write_table(table, server.root / "rows.parquet", row_group_size=10_000)
    size = (server.root / "rows.parquet").stat().st_size
    with remote.open("rows.parquet") as file:
        reader = parquet.ParquetFile(file)
        assert reader.read_row_group(3).equals(table.slice(30_000, 10_000))
        assert server.sent["rows.parquet"] < size / 3
        assert reader.read().equals(table)
    assert server.sent["rows.parquet"] == size


def test_a_video_is_decoded_from_it(remote, server):
    with av.open(str(server.root / "film.mp4"), "w") as out:
        stream = out.add_stream("libx264", rate=10, options={"g": "2", "crf": "10"})
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        noise = np.random.default_rng(0)
        for _ in range(40):
            image = noise.integers(0, 256, (240, 320, 3), dtype=np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(image)))
        out.mux(stream.encode())

    def frames(file):
        with av.open(file) as film:
            video = film.streams.video[0]
            film.seek(int(2.0 / video.time_base), stream=video)
            return [(frame.pts, frame.to_ndarray(format="rgb24").tobytes()) for frame in film.decode(video)]

    with remote.open("film.mp4") as file:
        assert frames(file) == frames(str(server.root / "film.mp4"))
    assert 0 < server.sent["film.mp4"] < (server.root / "film.mp4").stat().st_size


# --- how much is fetched


def test_what_is_fetched_is_what_is_needed(remote, server):
    assert read(remote, 3 * BLOCK + 5, 2 * BLOCK) == CONTENT[3 * BLOCK + 5 :][: 2 * BLOCK]
    assert server.ranges_asked[PATH] == [(3 * BLOCK, 6 * BLOCK)]
    assert read(remote, BLOCK, 8 * BLOCK) == CONTENT[BLOCK : 9 * BLOCK]
    assert server.ranges_asked[PATH][1:] == [(BLOCK, 3 * BLOCK), (6 * BLOCK, 9 * BLOCK)]
    assert read(remote, SIZE - 1, 5) == CONTENT[-1:]
    assert server.ranges_asked[PATH][3:] == [(40 * BLOCK, SIZE)]
    assert server.sent[PATH] == 8 * BLOCK + 1234
    assert (server.requests[PATH], server.heads[PATH]) == (4, 1)


def test_a_read_to_the_end_is_one_request(remote, server):
    with remote.open(PATH) as file:
        assert file.read() == CONTENT
    assert server.requests[PATH] == 1


def test_requests_are_of_eight_mebibytes_at_most(remote, server):
    content = random.Random(3).randbytes((20 << 20) + 99)
    (server.root / "long").write_bytes(content)
    assert read(remote, 0, len(content), "long") == content
    assert server.ranges_asked["long"] == [(0, 8 << 20), (8 << 20, 16 << 20), (16 << 20, len(content))]


def test_fetching_ahead_leaves_nothing_to_ask_for(remote, server):
    for begin, end in [(10, 20), (5 * BLOCK, 7 * BLOCK + 1), (6 * BLOCK, 6 * BLOCK), (SIZE - 1, SIZE + 10 * BLOCK)]:
        remote.fetch(PATH, begin, end)
    assert server.ranges_asked[PATH] == [(0, BLOCK), (5 * BLOCK, 8 * BLOCK), (40 * BLOCK, SIZE)]
    server.forget()
    assert read(remote, 5 * BLOCK, 3 * BLOCK) == CONTENT[5 * BLOCK : 8 * BLOCK]
    remote.fetch(PATH, 0, 5)
    assert remote.size(PATH) == SIZE
    assert not server.requests
    assert not server.heads


def test_metadata_is_read_whole_and_not_cached(remote, server):
    assert remote.read(PATH) == CONTENT
    assert (server.sent[PATH], used_bytes(remote._folder)) == (SIZE, 0)
    assert remote.exists(PATH)
    assert not remote.exists("meta/none.json")
    assert remote.location(PATH) == f"{server.url}/{PATH}"
    assert remote.local(PATH) is None


def test_processes_and_threads_fetch_nothing_twice(remote, server):
    def work(number):
        def reads(seed):
            numbers = random.Random(seed)
            for _ in range(20):
                start, count = numbers.randrange(SIZE), numbers.randrange(6 * BLOCK)
                assert read(remote, start, count) == CONTENT[start : start + count]
            assert read(remote, 0, SIZE) == CONTENT

        in_threads(*(lambda seed=seed: reads(seed) for seed in range(2 * number, 2 * number + 2)))
        return True

    in_children(3, work)
    assert fetched_blocks(server) == list(range(41))
    assert (server.sent[PATH], server.heads[PATH]) == (SIZE, 1)


def test_who_needs_what_another_fetches_waits_for_it_and_others_do_not(remote, server):
    remote.size(PATH)
    server.hang()

    def twin():
        assert read(remote, BLOCK, 2 * BLOCK) == CONTENT[BLOCK : 3 * BLOCK]

    def other():
        assert read(remote, 8 * BLOCK, BLOCK) == CONTENT[8 * BLOCK : 9 * BLOCK]

    with beside(twin, twin, twin):
        server.wait_for_request()
        with beside(other):
            server.wait_for_request()
            server.release()
    assert fetched_blocks(server) == [1, 2, 8]


def test_a_server_without_ranges_is_asked_once(server, tmp_path):
    server.ranges = False
    (server.root / "other").write_bytes(CONTENT[::-1])
    source = source_of(server, tmp_path)
    assert read(source, 7 * BLOCK, 100) == CONTENT[7 * BLOCK :][:100]
    assert read(source, 0, SIZE) == CONTENT
    assert server.requests[PATH] == 1
    in_threads(*(lambda s=s: read(source, s * BLOCK, 10, "other") for s in range(8)))
    assert server.requests["other"] == 1
    assert read(source, 3, SIZE, "other") == CONTENT[::-1][3:]
    assert server.sent == {PATH: SIZE, "other": SIZE}


# --- what fails


@pytest.mark.parametrize("how", ["500", "close", "short"])
def test_failing_requests_are_tried_again(remote, server, how):
    server.fail(4, how)
    assert read(remote, 2 * BLOCK, 3 * BLOCK) == CONTENT[2 * BLOCK : 5 * BLOCK]
    assert server.requests[PATH] == 5
    server.fail(4, how)
    assert remote.read(PATH) == CONTENT


@pytest.mark.parametrize("how", ["500", "close", "short"])
def test_what_fails_too_often_is_named(remote, server, how):
    remote.size(PATH)
    server.fail(5, how)
    with pytest.raises(DataError) as failure:
        read(remote, 2 * BLOCK, 10)
    assert f"cannot read {server.url}/{PATH}: the request for bytes {2 * BLOCK} to {3 * BLOCK} failed 5 times" in str(
        failure.value
    )
    causes = {"500": "Internal Server Error", "close": "ContentLengthError", "short": f"received {BLOCK // 2} bytes"}
    assert causes[how] in str(failure.value)
    assert failure.value.__cause__ is not None
    assert server.requests[PATH] == 5
    assert read(remote, 2 * BLOCK, 10) == CONTENT[2 * BLOCK :][:10]


def test_pauses_grow_and_leave_the_global_generator_alone(server, tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    source = source_of(server, tmp_path, backoff_seconds=10.0)
    source.size(PATH)
    server.fail(5)
    state = random.getstate()
    with pytest.raises(DataError, match="failed 5 times"):
        read(source, 0, 1)
    assert random.getstate() == state
    for pause, middle in zip(pauses, [10, 20, 30, 30], strict=True):
        assert 0.5 * middle <= pause <= 1.5 * middle


@pytest.mark.parametrize("ask", ["open", "size", "read"])
def test_a_missing_file_is_said_at_once(server, tmp_path, ask):
    source = source_of(server, tmp_path, backoff_seconds=1000)
    with pytest.raises(DataError, match=f"cannot read {server.url}/meta/none: the file is missing"):
        getattr(source, ask)("meta/none")
    source.size(PATH)
    server.lose(PATH)
    with pytest.raises(DataError, match="the file is missing"):
        read(source, 0, 1)
    assert server.requests[PATH] == 1


def test_a_server_that_fails_to_tell_a_size_has_not_lost_the_file(remote, server, monkeypatch):
    failures = iter([True, True, False])
    handler = server._http.RequestHandlerClass
    works = handler.do_HEAD
    monkeypatch.setattr(handler, "do_HEAD", lambda self: self._head(503, 0) if next(failures) else works(self))
    server.fail(2)
    assert remote.exists(PATH)
    monkeypatch.setattr(handler, "do_HEAD", lambda self: self._head(503, 0))
    server.fail(10)
    with pytest.raises(DataError, match=r"its size failed 5 times.*Internal Server Error"):
        remote.exists(PATH)
    with pytest.raises(DataError, match="its size failed 5 times"):
        remote.open(PATH)


def test_a_server_that_hangs_is_given_up_in_time(server, tmp_path):
    source = source_of(server, tmp_path, tries=2, timeout_seconds=0.2)
    source.size(PATH)
    server.hang()
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"failed 2 times, .*Timeout.*expected an answer within 0\.2 s"):
        read(source, 0, 1)
    assert 0.4 <= time.monotonic() - begin < 10
    server.release()
    assert read(source, 0, 9) == CONTENT[:9]


def test_a_server_that_is_gone_is_named(server, tmp_path):
    with FileServer(server.root) as other:
        source = source_of(other, tmp_path, tries=2)
        read(source, 0, 1)
    assert read(source, 0, BLOCK) == CONTENT[:BLOCK]
    with pytest.raises(DataError, match=r"failed 2 times, the last time with .*Connect"):
        read(source, 0, BLOCK + 1)


# --- dropping


def test_drop_frees_the_disk_while_others_read(remote, server, tmp_path):
    with remote.open(PATH) as file:
        assert file.read() == CONTENT
        assert SIZE <= used_bytes(remote._folder) < SIZE + 3 * 4096
        kept = os.open(remote._cached_path(PATH), os.O_RDONLY)
        remote.drop(PATH)
        remote.drop(PATH)
        assert (used_bytes(remote._folder), os.fstat(kept).st_blocks) == (0, 0)
        os.close(kept)
        server.forget()
        file.seek(BLOCK)
        assert file.read(10) == CONTENT[BLOCK:][:10]
        assert fetched_blocks(server) == [1]
        assert read(remote, BLOCK, BLOCK) == CONTENT[BLOCK : 2 * BLOCK]
        assert fetched_blocks(server) == [1]
        assert used_bytes(remote._folder) < 2 * BLOCK


def test_handles_of_other_processes_go_on_after_a_drop(remote, server):
    ours, theirs = FORK.Pipe()
    handle = remote.open(PATH)
    assert handle.read(BLOCK) == CONTENT[:BLOCK]

    def child():
        for start in iter(theirs.recv, None):
            handle.seek(start)
            theirs.send(handle.read(100) == CONTENT[start : start + 100])

    process = FORK.Process(target=child, daemon=True)
    process.start()
    for start in (0, 3 * BLOCK - 50, 0, 30 * BLOCK, 0):
        ours.send(start)
        assert ours.recv()
        remote.drop(PATH)
        assert used_bytes(remote._folder) == 0
        handle.seek(start)
        assert handle.read(100) == CONTENT[start : start + 100]
    ours.send(None)
    process.join(30)
    assert process.exitcode == 0
    handle.close()


def test_what_was_dropped_on_its_way_takes_no_disk_and_is_read_right(remote, server):
    remote.size(PATH)
    server.hang()
    handle = remote.open(PATH)
    kept = os.open(remote._cached_path(PATH), os.O_RDONLY)

    def reads():
        assert handle.read(4 * BLOCK) == CONTENT[: 4 * BLOCK]

    with beside(reads):
        server.wait_for_request()
        remote.drop(PATH)
        server.release()
    assert os.fstat(kept).st_blocks == 0
    os.close(kept)
    assert fetched_blocks(server) == sorted([*range(4)] * 2)
    assert used_bytes(remote._folder) < 4 * BLOCK + 2 * 4096
    handle.close()


def test_a_drop_within_a_copy_is_noticed(remote, monkeypatch):
    """Where a late writer made the file as long as before, what is copied is zeros."""
    assert read(remote, 0, BLOCK) == CONTENT[:BLOCK]
    copy = os.preadv

    def dropping(fd, *arguments):
        monkeypatch.setattr(os, "preadv", copy)
        remote.drop(PATH)
        os.ftruncate(fd, SIZE)
        return copy(fd, *arguments)

    with remote.open(PATH) as file:
        monkeypatch.setattr(os, "preadv", dropping)
        assert file.read(BLOCK) == CONTENT[:BLOCK]
    assert os.preadv is copy


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_drop_within_opening_is_noticed(remote, monkeypatch, is_begun):
    if is_begun:
        remote.size(PATH)
    look = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: (look(fd), monkeypatch.undo(), remote.drop(PATH))[0])
    with remote.open(PATH) as file:
        assert os.fstat is look
        assert (file.size, file.read(10)) == (SIZE, CONTENT[:10])


def test_reads_among_drops_are_right(remote, server):
    done = threading.Event()

    def drops():
        while not done.is_set():
            for _ in range(3):  # at every request, no read would ever be done
                server.wait_for_request()
            remote.drop(PATH)

    with beside(drops):
        in_threads(*(partial(read_here_and_there, remote, seed) for seed in range(2)))
        done.set()
        for _ in range(3):
            remote.read(PATH)
    remote.drop(PATH)
    assert used_bytes(remote._folder) == 0


def test_blocks_that_are_given_up_free_their_disk_and_are_fetched_again(remote, server):
    with remote.open(PATH) as file:
        assert file.read(SIZE) == CONTENT
        whole = used_bytes(remote._folder)
        remote.free(PATH, 2 * BLOCK + 5, 9 * BLOCK, keep=[(5 * BLOCK, 5 * BLOCK + 1)])
        remote.free(PATH, 30 * BLOCK, SIZE + 1)
        assert whole - used_bytes(remote._folder) == 16 * BLOCK + 4096  # the last one has a page
        server.forget()
        file.seek(0)
        assert file.read(SIZE) == CONTENT
        given_up = [b for b in range(2, 9) if b != 5] + list(range(30, 41))
        assert fetched_blocks(server) == given_up and used_bytes(remote._folder) == whole


def test_a_server_without_ranges_gives_up_nothing(server, tmp_path):
    server.ranges = False
    source = source_of(server, tmp_path)
    assert read(source, 0, 10) == CONTENT[:10]
    source.free(PATH, 0, SIZE)
    assert read(source, 0, SIZE) == CONTENT and server.requests[PATH] == 1


def test_reads_while_blocks_are_given_up_are_right(remote, server):
    done = threading.Event()

    def gives_up():
        numbers = random.Random(3)
        while not done.is_set():
            server.wait_for_request()
            first = numbers.randrange(SIZE)
            remote.free(PATH, first, first + 3 * BLOCK)

    with beside(gives_up):
        in_threads(*(partial(read_here_and_there, remote, seed) for seed in range(2)))
        done.set()
        remote.read(PATH)


@pytest.mark.parametrize("is_fetched_again", [True, False])
def test_blocks_given_up_within_a_copy_are_noticed(remote, monkeypatch, is_fetched_again):
    original, into = os.preadv, bytearray(BLOCK)

    def at_once(fd, buffers, offset):
        remote.free(PATH, 0, BLOCK)
        copied = original(fd, buffers, offset)
        if is_fetched_again:
            remote.fetch(PATH, 0, BLOCK)
        return copied

    with remote.open(PATH) as file:
        file.read(BLOCK)
        monkeypatch.setattr(os, "preadv", at_once)
        assert not file._cached.read_into(0, memoryview(into))
        monkeypatch.undo()
        file.seek(0)
        assert file.read(BLOCK) == CONTENT[:BLOCK]


def test_a_file_that_changed_is_not_mixed(remote, server):
    with remote.open(PATH) as file:
        file.read(10)
        (server.root / PATH).write_bytes(CONTENT[: 3 * BLOCK])
        remote.drop(PATH)
        for _ in range(2):
            with pytest.raises(DataError, match=f"its size is {3 * BLOCK} bytes, expected {SIZE}"):
                file.read(10)


# --- processes


@pytest.mark.parametrize("writes", [0, 1, 2, 3])
def test_death_within_a_fetch_leaves_nothing_wrong(remote, server, monkeypatch, writes):
    """Die before or after the size, the mark that the file is begun, the data, and the mark that they are here."""

    def child():
        write, left = byte_cache.write_from, iter(range(writes))

        def dying(fd, at, data):
            if next(left, None) is None:
                write(fd, at, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            write(fd, at, data)

        with monkeypatch.context() as patch:
            patch.setattr(byte_cache, "write_from", dying)
            read(remote, 2 * BLOCK, 2 * BLOCK)

    process = FORK.Process(target=child, daemon=True)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert read(remote, BLOCK, 4 * BLOCK) == CONTENT[BLOCK : 5 * BLOCK]
    assert read(remote, 0, SIZE) == CONTENT


def test_a_fork_after_use_makes_connections_of_its_own(remote, server):
    with remote.open(PATH) as file:
        assert file.read(10) == CONTENT[:10]

        def work(number):
            file.seek((number + 1) * BLOCK)
            right = file.read(100) == CONTENT[(number + 1) * BLOCK :][:100]
            return right and remote.read(PATH) == CONTENT

        in_children(2, work)
        assert file.tell() == 10
        assert file.read(20 * BLOCK) == CONTENT[10:][: 20 * BLOCK]
    assert fetched_blocks(server) == sorted([*range(21), *range(41), *range(41)])


def test_a_fork_in_the_midst_of_a_fetch_hangs_nobody(remote, server):
    remote.size(PATH)
    server.hang()

    with beside(lambda: read(remote, 0, BLOCK)):
        server.wait_for_request()
        child = FORK.Process(target=lambda: os._exit(read(remote, 0, BLOCK) != CONTENT[:BLOCK]), daemon=True)
        child.start()
        server.release()
        child.join(30)
        assert child.exitcode == 0
    assert fetched_blocks(server) == [0]


def test_a_copy_by_pickle_shares_the_cache(remote, server):
    assert read(remote, 0, BLOCK) == CONTENT[:BLOCK]
    copy = pickle.loads(pickle.dumps(remote))
    assert read(copy, 0, 2 * BLOCK) == CONTENT[: 2 * BLOCK]
    assert copy.location("") == f"{server.url}/"
    assert fetched_blocks(server) == [0, 1]


# --- the disk


def test_a_full_disk_is_named(server, tmp_path):
    small = tmp_path / "cache"
    small.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(small), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(f"cannot mount a small file system: {errno.errorcode[ctypes.get_errno()]}")
    try:
        source = source_of(server, tmp_path)
        with pytest.raises(
            DataError, match=rf"cannot cache {server.url}/{PATH}: writing to {small}.*No space left on device"
        ):
            read(source, 0, SIZE)
        assert server.requests[PATH] == 1
        source.drop(PATH)
        assert read(source, 0, 5 * BLOCK) == CONTENT[: 5 * BLOCK]
    finally:
        libc.umount2(os.fsencode(small), 2)


def test_a_folder_that_cannot_be_made_is_named(server, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=f"cannot cache {server.url}: writing to {tmp_path}/cache failed"):
        source_of(server, tmp_path)
