"""Directories that are shared with people: links, mounted disks, and files of others, in all layouts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from helpers.crashes import dies_at, removals_at_once
from helpers.folders import contents
from helpers.pool import processes
from helpers.training import strategy_for, tags
from helpers.worlds import some
from torch import nn

from fsdp2_strategy import list_checkpoints, load_checkpoint, verify_checkpoint
from fsdp2_strategy.checkpoint import deletion, directory, listing, lock
from fsdp2_strategy.checkpoint.paths import CheckpointPaths
from fsdp2_strategy.cli import main
from fsdp2_strategy.errors import CheckpointError, DamageError
from fsdp2_strategy.integrations.lerobot import LeRobotLayout
from fsdp2_strategy.integrations.trl import TrainerLayout

KINDS = ["own", "several", "lerobot", "trainer"]
FULL = pytest.mark.full
in_each_layout = pytest.mark.parametrize("kind", KINDS)
in_all_layouts = pytest.mark.parametrize("kind", some(KINDS, ["own", "lerobot"]))


class Run:
    """A tiny run that saves in one of the layouts."""

    def __init__(self, kind, folder):
        self.kind, self.folder, self.strategy = kind, folder, strategy_for()
        models = {name: self.strategy.prepare_model(nn.Linear(4, 4), is_training=True) for name in ("actor", "critic")}
        self.model = models if kind == "several" else models["actor"]
        self.layout = {
            "lerobot": LeRobotLayout(total_steps=9, batch_size=1),
            "trainer": TrainerLayout(files={"trainer_state.json": "{}", "config.json": "{}"}),
        }.get(kind)

    def tag(self, number):
        """Return a tag as the layout names them."""
        return {"lerobot": f"{number:06}", "trainer": f"checkpoint-{number}"}.get(self.kind, f"global_step{number}")

    def save(self, number, **options):
        options = {"max_num": 2, "client_state": {"saved": number}} | options
        path = self.strategy.save_ckpt(self.model, self.folder, self.tag(number), layout=self.layout, **options)
        directory.finish_removals()
        return Path(path)

    def load(self, path=None, **options):
        return self.strategy.load_ckpt(self.model, path or self.folder, **options)[1].get("saved")

    def weights(self, number):
        """Return the file of weights in a checkpoint."""
        paths = CheckpointPaths.found_in(self.folder / self.tag(number))
        return (paths.of_model("actor") if self.kind == "several" else paths).model / "model.safetensors"


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name not in (".lock", "latest", "last"))


@contextmanager
def logged(level=logging.WARNING):
    """Collect the texts of the package's log."""
    texts = []

    class Collect(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    handler = Collect(level)
    directory.logger.addHandler(handler)
    try:
        yield texts
    finally:
        directory.logger.removeHandler(handler)


def printed(command, path):
    """Return the exit status of a command, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main([command, str(path)])
    return status, out.getvalue()


# --- leftovers of a killed run ----------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
@in_each_layout
def test_what_a_killed_first_save_left_is_a_fresh_start(tmp_path, kind):
    run = Run(kind, tmp_path / "run")
    saved = run.save(1)
    for name in ("latest", "last"):
        (run.folder / name).unlink(missing_ok=True)
    leftover = saved.rename(run.folder / f".{run.tag(1)}.partial")  # the moment before the commit
    assert run.load() is None
    leftover = leftover.rename(run.folder / f".{run.tag(1)}.removed")
    assert run.load() is None
    leftover.rename(run.folder / f".{run.tag(1)}.replaced")  # between the two renames of a save that replaces it
    assert run.load() == 1


@pytest.mark.full
@pytest.mark.ranks(1)
@in_each_layout
def test_a_first_save_that_dies_anywhere_leaves_a_directory_that_loads(tmp_path, kind):
    run, died, loaded = Run(kind, tmp_path), True, set()
    for point in itertools.count():
        run.folder = tmp_path / f"{point}"
        died = dies_at(point, lambda: run.save(1))
        lock.release_all()
        loaded.add(run.load())
        assert run.save(2) and run.load() == 2
        if not died:
            break
    assert loaded == {None, 1} and point > 10


# --- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
@in_each_layout
def test_links_are_never_checkpoints_and_never_followed(tmp_path, kind):
    run = Run(kind, tmp_path / "run")
    other = Run(kind, tmp_path / "archive")
    archived = other.save(1)
    other.strategy.close()
    before = contents(archived)
    run.save(2)
    links = {
        "best": run.tag(2),  # to a checkpoint of the same directory
        "a_link": str(archived),
        run.tag(1): str(archived),  # with a name as saves choose it
        "dangling": "nowhere",
        "round": "round",
        f".{run.tag(7)}.partial": str(archived),
        f".{run.tag(7)}.removed": str(archived),
        f".{run.tag(7)}.replaced": str(archived),
    }
    for name, target in links.items():
        (run.folder / name).symlink_to(target)
    for number in (3, 4, 5):
        run.save(number)
    assert tags(run.folder) == [run.tag(4), run.tag(5)]
    assert {name: (run.folder / name).readlink().as_posix() for name in links} == links
    assert contents(archived) == before
    assert listing.read_manifest(run.folder / run.tag(5))["sequence"] == 4
    assert run.load() == 5
    with pytest.raises(CheckpointError, match=rf"{run.tag(1)} is a symbolic link, expected a new name"):
        run.save(1)
    run.save(7)  # the tag of the hidden links
    assert tags(run.folder) == [run.tag(5), run.tag(7)]
    assert {name: (run.folder / name).readlink().as_posix() for name in links} == links
    assert contents(archived) == before


@pytest.mark.ranks(1)
@in_all_layouts
def test_links_within_a_checkpoint_are_deleted_without_what_they_lead_to(tmp_path, kind):
    run = Run(kind, tmp_path / "run")
    run.save(1)
    archive = tmp_path / "archive"
    folder = run.weights(1).parent
    if folder == run.folder / run.tag(1):  # the Trainer's layout: the file, not the folder
        archive.mkdir()
        shutil.move(run.weights(1), archive)
        run.weights(1).symlink_to(archive / "model.safetensors")
    else:
        shutil.move(folder, archive)
        folder.symlink_to(archive)
    (run.folder / run.tag(1) / "notes").symlink_to(archive)
    before = contents(archive)
    assert before and run.load() == 1
    for number in (2, 3):
        run.save(number)
    assert tags(run.folder) == [run.tag(2), run.tag(3)]
    assert contents(archive) == before
    assert names_in(run.folder / run.tag(1)) == ["notes", "rotated.json"], "a link of others stays"


@pytest.mark.ranks(1)
@in_all_layouts
def test_a_directory_that_becomes_a_link_at_the_last_moment_is_not_followed(tmp_path, kind):
    run = Run(kind, tmp_path / "run")
    other = Run(kind, tmp_path / "archive")
    archived = other.save(1)
    before = contents(archived)
    run.save(1)
    opened = deletion._opened

    def swapped(path, parent=None):
        if isinstance(path, Path) and path.name.endswith(".removed"):
            path.rename(path.with_name("moved"))
            path.symlink_to(archived)
        return opened(path, parent)

    run.save(2)
    with patch.object(deletion, "_opened", swapped), logged() as texts:
        run.save(3)
    assert contents(archived) == before
    assert any("cannot delete" in text for text in texts)
    assert tags(run.folder)[-2:] == [run.tag(2), run.tag(3)]


@pytest.mark.ranks(1)
@in_all_layouts
def test_a_link_is_loaded_if_it_is_named(tmp_path, kind):
    run = Run(kind, tmp_path / "run")
    other = Run(kind, tmp_path / "archive")
    other.save(9)
    run.save(1)
    run.save(2)
    (run.folder / "best").symlink_to(run.tag(1))
    (run.folder / "far").symlink_to(tmp_path / "archive" / run.tag(9))
    (run.folder / "dangling").symlink_to("nowhere")
    assert run.load(tag="best") == run.load(run.folder / "best") == 1
    assert run.load(tag="far") == run.load(run.folder / "far") == 9
    assert main(["verify", "-q", str(run.folder / "best")]) == 0
    assert main(["inspect", "-q", str(run.folder), "--tag", "best"]) == 0
    with pytest.raises(CheckpointError, match="'dangling' is not a committed checkpoint"):
        run.load(tag="dangling")
    with pytest.raises(CheckpointError, match="best is a symbolic link"):
        run.strategy.save_ckpt(run.model, run.folder, "best", layout=run.layout)
    assert run.load() == 2


@pytest.mark.ranks(2)
@in_all_layouts
def test_a_link_in_place_of_the_runs_directory_is_resolved_once(tmp_path, kind):
    first, second = tmp_path / "first", tmp_path / "second"
    link = tmp_path / "link"
    if dist.get_rank() == 0:
        second.mkdir()
        link.symlink_to(first)  # missing so far
    dist.barrier()
    run = Run(kind, link)
    assert run.save(1) == link / run.tag(1)
    run.save(2, async_save=True)
    dist.barrier()
    if dist.get_rank() == 0:
        link.unlink()
        link.symlink_to(second)
    dist.barrier()
    run.strategy.wait_for_checkpoint()
    assert tags(first) == [run.tag(1), run.tag(2)] and tags(second) == []


# --- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
@in_all_layouts
@pytest.mark.parametrize("is_hard_link", some([False, True], [True]))
def test_copies_and_renamed_checkpoints_are_not_rotated(tmp_path, kind, is_hard_link):
    run = Run(kind, tmp_path)
    run.save(1)
    shutil.copytree(tmp_path / run.tag(1), tmp_path / "best", copy_function=os.link if is_hard_link else shutil.copy2)
    before = contents(tmp_path / "best")
    for number in (2, 3, 4):
        run.save(number)
    (tmp_path / run.tag(3)).rename(tmp_path / "kept")
    run.save(5)
    run.save(6)
    assert contents(tmp_path / "best") == before
    assert names_in(tmp_path) == sorted(["best", "kept", run.tag(5), run.tag(6)])
    assert run.load() == 6 and run.load(tag="best") == 1 and run.load(tag="kept") == 3


# --- what cannot be deleted ------------------------------------------------------------------------------------------


def cannot_delete(name, code, call="unlink"):
    """Make the deletion of a file or directory with a name fail, as of one that another host holds open."""
    original = getattr(os, call)

    def failing(path, *args, **kwargs):
        if os.fspath(path).rpartition("/")[2] == name:
            raise OSError(code, os.strerror(code), path)
        return original(path, *args, **kwargs)

    return patch.object(os, call, failing)


@pytest.mark.ranks(1)
@in_all_layouts
@pytest.mark.parametrize("code", [errno.EBUSY, pytest.param(errno.EACCES, marks=FULL)])
def test_what_cannot_be_deleted_is_retried_and_never_fails_a_save(tmp_path, kind, code):
    run = Run(kind, tmp_path)
    run.save(1)
    with cannot_delete("optimizer.safetensors" if kind == "none" else "rank00000.safetensors", code), logged() as texts:
        for number in (2, 3, 4, 4, 5, 3):  # tags that are saved again, and tags that were deleted
            run.save(number)
        assert tags(tmp_path) == [run.tag(5), run.tag(3)]
    hidden = [name for name in names_in(tmp_path) if name.startswith(".")]
    assert len(hidden) == 5 and len([text for text in texts if text.startswith("cannot delete")]) > 4
    assert directory.leftover_bytes(tmp_path) > 0
    assert run.load() == 3
    run.save(6)
    assert names_in(tmp_path) == sorted([run.tag(3), run.tag(6)])


@pytest.mark.ranks(1)
@in_all_layouts
def test_what_a_crash_left_and_cannot_be_deleted_never_fails_a_save(tmp_path, kind):
    run = Run(kind, tmp_path)
    run.save(1)
    dies_at(3, lambda: run.save(2))
    with cannot_delete("rng", errno.EBUSY, "rmdir"), cannot_delete("rank00000.safetensors", errno.EBUSY):
        run.save(2)
        run.save(3)
    assert tags(tmp_path) == [run.tag(2), run.tag(3)]
    run.save(4)
    assert names_in(tmp_path) == sorted([run.tag(3), run.tag(4)])


@pytest.mark.ranks(1)
@in_all_layouts
def test_a_checkpoint_that_cannot_be_renamed_stays_until_it_can(tmp_path, kind):
    run = Run(kind, tmp_path)
    run.save(1)
    rename = Path.rename

    def failing(path, target):
        if path.name == run.tag(1):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return rename(path, target)

    with patch.object(Path, "rename", failing), logged() as texts:
        for number in (2, 3, 4):
            run.save(number)
    assert tags(tmp_path) == [run.tag(1), run.tag(3), run.tag(4)]
    assert any(f"cannot delete {tmp_path / run.tag(1)}" in text for text in texts)
    run.save(5)
    assert tags(tmp_path) == [run.tag(4), run.tag(5)]


@pytest.mark.ranks(1)
@in_all_layouts
def test_leftovers_count_as_occupied_space(tmp_path, kind):
    run = Run(kind, tmp_path)
    run.save(1)
    size = list_checkpoints(tmp_path)[0].total_bytes
    (run.folder / run.tag(1) / "large").write_bytes(bytes(1))
    options = {"max_num": None, "max_mem": 3.5 * size / 1e9}
    with cannot_delete("rank00000.json", errno.EBUSY):
        for number in (2, 3, 4):
            run.save(number, **options)
        assert tags(tmp_path) == [run.tag(number) for number in (2, 3, 4)]
        os.truncate(next(tmp_path.glob(".*.removed")) / "large", size)  # what is left of the first checkpoint
        run.save(5, **options)
        assert tags(tmp_path) == [run.tag(4), run.tag(5)]


@pytest.mark.ranks(1)
@in_all_layouts
def test_a_mounted_directory_is_never_emptied(tmp_path, kind):
    run = Run(kind, tmp_path / "run")
    run.save(1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.txt").write_text("mine")
    inside = [run.folder / run.tag(1) / "mounted", run.weights(1).parent]
    if inside[1] == inside[0].parent:
        inside.pop()
    inside[0].mkdir()
    mounted = []
    try:
        for target in inside:
            if subprocess.run(["mount", "--bind", outside, target], check=False, capture_output=True).returncode:
                return  # no right to mount: the tests above inject the errors
            mounted.append(target)
        for number in (2, 3, 4):
            run.save(number)
        assert tags(run.folder) == [run.tag(3), run.tag(4)]
        assert contents(outside) == {"precious.txt": b"mine"}
    finally:
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for point in [each for each in points if each.startswith(str(tmp_path))]:
            subprocess.run(["umount", "-l", point], check=True)
    run.save(5)
    assert names_in(run.folder) == sorted([run.tag(4), run.tag(5)]) or names_in(run.folder / run.tag(1)) == [
        "mounted", "rotated.json",
    ]  # fmt: skip
    assert contents(outside) == {"precious.txt": b"mine"}


@pytest.mark.ranks(1)
@in_all_layouts
def test_a_file_that_is_busy_on_a_real_mount_is_deleted_later(tmp_path, kind):
    run = Run(kind, tmp_path / "run")
    run.save(1)
    outside = tmp_path / "outside"
    shutil.copyfile(run.weights(1), outside)
    before = outside.read_bytes()
    if subprocess.run(["mount", "--bind", outside, run.weights(1)], check=False, capture_output=True).returncode:
        return  # no right to mount: the tests above inject the errors
    try:
        with logged() as texts:
            for number in (2, 3, 4, 1):
                run.save(number)
        assert tags(run.folder) == [run.tag(4), run.tag(1)]
        assert any("busy" in text for text in texts)
    finally:
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for point in [each for each in points if each.startswith(str(tmp_path))]:
            subprocess.run(["umount", "-l", point], check=True)
    assert outside.read_bytes() == before
    run.save(6)
    assert names_in(run.folder) == sorted([run.tag(1), run.tag(6)])


# --- neighbours ------------------------------------------------------------------------------------------------------


def unreadable(path, code):
    """Make a directory unreadable, as another user's, or as one on a server that is gone."""
    names = {"stat", "iterdir", "open", "read_bytes"}

    def failing(original):
        def call(self, *args, **kwargs):
            inside = str(self).startswith(f"{path}/")
            if inside or (str(self) == str(path) and original.__name__ == "iterdir"):
                raise OSError(code, os.strerror(code), str(self))
            return original(self, *args, **kwargs)

        return call

    scandir = os.scandir

    def failing_scandir(at="."):
        if isinstance(at, (str, os.PathLike)) and f"{os.fspath(at)}/".startswith(f"{path}/"):
            raise OSError(code, os.strerror(code), os.fspath(at))
        return scandir(at)

    opened = os.open

    def failing_open(at, *args, **kwargs):
        if isinstance(at, (str, os.PathLike)) and os.fspath(at).startswith(f"{path}/"):
            raise OSError(code, os.strerror(code), os.fspath(at))
        return opened(at, *args, **kwargs)

    patches = patch.multiple(Path, **{name: failing(getattr(Path, name)) for name in names})
    return patches, patch.multiple(os, scandir=failing_scandir, open=failing_open)


@pytest.mark.ranks(1)
@in_all_layouts
@pytest.mark.parametrize("code", some([errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTCONN], [errno.EACCES]))
def test_neighbours_that_cannot_be_read_are_ignored(tmp_path, kind, code):
    run = Run(kind, tmp_path)
    (tmp_path / "lost+found").mkdir()
    of_paths, of_scandir = unreadable(tmp_path / "lost+found", code)
    with of_paths, of_scandir, logged() as texts:
        assert run.load() is None
        for number in (1, 2, 3):
            run.save(number)
        assert not texts or code != errno.EACCES
        assert run.load() == 3 and run.load(fallback=True) == 3
        assert tags(tmp_path) == [run.tag(2), run.tag(3)]
        assert printed("ls", tmp_path)[0] == main(["verify", "-q", str(tmp_path)]) == 0
        assert "lost" not in printed("ls", tmp_path)[1]


@pytest.mark.full
@pytest.mark.ranks(1)
@in_all_layouts
@pytest.mark.parametrize("code", some([errno.EACCES, errno.EIO], [errno.EIO]))
def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path, kind, code):
    run = Run(kind, tmp_path)
    run.save(1)
    run.save(2)
    of_paths, of_scandir = unreadable(tmp_path / run.tag(2), code)
    with of_paths, of_scandir:
        with pytest.raises(CheckpointError, match=rf"{run.tag(2)}.*{os.strerror(code)}"):
            run.load()
        assert run.load(fallback=True) == 1
    assert run.load() == 2


OTHER_USER = """
import os, sys
import fsdp2_strategy.cli.ls
os.setgid(65534); os.setuid(65534)
from fsdp2_strategy import list_checkpoints
from fsdp2_strategy.cli import main
assert [c.tag for c in list_checkpoints(sys.argv[1])] == [sys.argv[2]]
sys.exit(main(["ls", sys.argv[1]]))
"""


@pytest.mark.full
@pytest.mark.ranks(1)
@in_all_layouts
def test_another_user_lists_checkpoints_next_to_what_it_cannot_read(kind):
    if os.getuid() != 0:
        return  # no other user to become
    folder = Path(f"/tmp/fsdp2_shared_{os.getpid()}")  # pytest's own folders are private
    try:
        folder.mkdir()
        run = Run(kind, folder)
        run.save(1)
        (folder / "lost+found").mkdir(mode=0o700)
        (folder / ".global_step9.removed").mkdir(mode=0o700)
        command = [sys.executable, "-c", OTHER_USER, str(folder), run.tag(1)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    finally:
        shutil.rmtree(folder)


FOREIGN = {
    "web/manifest.json": '{"name": "app"}',
    "best/model/model.safetensors": "mine",
    "best/model/config.json": "{}",
    ".download.partial/model/model.safetensors": "mine",
    ".cache.removed/x": "mine",
    "data/checksums/md5.txt": "mine",
    "trainer.log": "mine",
    "manifest.json": "{}",
    "export/config.json": "{}",
    "export/model.safetensors": "mine",
    "archive/global_step1/notes": "mine",
}


@pytest.mark.full
@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", some(KINDS, ("own",)))
def test_other_directories_are_never_changed(tmp_path, kind):
    run = Run(kind, tmp_path)
    for name, content in FOREIGN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert run.load() is None and run.load(fallback=True) is None
    for number in (1, 2, 3, 3, 4):
        run.save(number)
        assert run.load() == number
    for tag in ("best", "web", "data", "export", "archive", "trainer.log"):
        with pytest.raises(CheckpointError, match=f"{tag} exists and is not a checkpoint of this package"):
            run.strategy.save_ckpt(run.model, tmp_path, tag, layout=run.layout)
    run.strategy.save_ckpt(run.model, tmp_path, "download", layout=run.layout, max_num=2)
    directory.finish_removals()
    assert {name: (tmp_path / name).read_text() for name in FOREIGN} == FOREIGN
    assert tags(tmp_path) == [run.tag(4), "download"]


# --- files of others within a checkpoint -----------------------------------------------------------------------------


EXTRA = {
    "eval_results.json": "{}",
    "hf/model.safetensors": "not even a safetensors file",
    "hf/config.json": "{}",
    ".ipynb_checkpoints/a.ipynb": "{}",
    "wandb/run/log": "text",
    "notes/deep/er/x": "",
}
JUNK = [".DS_Store", ".nfs000000000012345600000001"]


def add_extra(run, number):
    """Put files of others at the top of a checkpoint, next to the weights, and among the state; return their names."""
    path = run.folder / run.tag(number)
    paths = CheckpointPaths.found_in(path)
    extra = dict(EXTRA)
    for folder in {run.weights(number).parent, paths.state / "checksums"}:
        prefix = folder.relative_to(path).as_posix()
        prefix = "" if prefix == "." else f"{prefix}/"
        extra |= {f"{prefix}samples.txt": "mine", f"{prefix}model-00009-of-00009.safetensors": "not one"}
    for name, content in extra.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content)
    for name in JUNK:
        (path / name).write_text("")
    return extra


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", some(KINDS, ("own",)))
def test_extra_files_are_reported_and_are_no_damage(tmp_path, kind):
    run = Run(kind, tmp_path)
    run.save(1)
    run.save(2)
    extra = add_extra(run, 2)
    assert run.load() == run.load(fallback=True) == run.load(tmp_path / run.tag(2)) == 2
    report = verify_checkpoint(tmp_path / run.tag(2))
    top = {name.split("/")[0] + "/" if name in EXTRA and "/" in name else name for name in extra}
    assert report.ok and {*report.extra} == {*top, *JUNK}
    for command in ("verify", "ls", "inspect"):
        status, shown = printed(command, tmp_path)
        assert status == 0 and shown.count("eval_results.json") == shown.count("wandb/") == 1, shown
    os.truncate(run.weights(2), 20)
    assert not verify_checkpoint(tmp_path / run.tag(2)).ok, "our own files are verified"
    with pytest.raises(DamageError):
        run.load()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", some(KINDS, ("own",)))
def test_rotation_keeps_files_of_others(tmp_path, kind):
    run = Run(kind, tmp_path)
    run.save(1)
    extra = add_extra(run, 1)
    run.save(2)
    with logged(logging.INFO) as texts:
        directory.logger.setLevel(logging.INFO)
        run.save(3)
    assert len([text for text in texts if "kept the files of others" in text]) == 1
    path = tmp_path / run.tag(1)
    kept = contents(path)
    assert json.loads(kept.pop("rotated.json"))["note"]
    assert kept == {name: content.encode() for name, content in extra.items()}
    assert tags(tmp_path) == [run.tag(2), run.tag(3)]
    assert main(["ls", str(tmp_path)]) == 0
    assert run.load() == 3 and run.load(fallback=True) == 3
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        run.load(tag=run.tag(1))
    run.save(1)  # a run that was rolled back saves the tag again
    assert run.load() == 1
    assert {name: (path / name).read_text() for name in extra} == extra
    assert not (path / "rotated.json").exists()
    assert verify_checkpoint(path).ok
    run.save(4)
    run.save(5)
    assert {name: (path / name).read_text() for name in extra} == extra
    assert tags(tmp_path) == [run.tag(4), run.tag(5)]


@pytest.mark.ranks(1)
@in_all_layouts
def test_a_tag_that_is_saved_again_keeps_files_of_others(tmp_path, kind):
    run = Run(kind, tmp_path)
    run.save(1)
    run.save(2)
    extra = add_extra(run, 2)
    run.save(2, client_state={"saved": "again"})
    path = tmp_path / run.tag(2)
    assert run.load() == "again"
    assert {name: (path / name).read_text() for name in extra} == extra
    assert {*verify_checkpoint(path).extra} >= {"eval_results.json", "hf/"}
    assert names_in(tmp_path) == sorted([run.tag(1), run.tag(2)])


@pytest.mark.full
@pytest.mark.ranks(1)
@in_all_layouts
@pytest.mark.parametrize("again", [False, True], ids=["new tag", "same tag"])
def test_a_crash_at_any_step_on_disk_loses_no_file_of_others(tmp_path, kind, again):
    before = Run(kind, tmp_path / "before")
    before.save(1)
    extra = add_extra(before, 1)
    before.save(2)
    before.strategy.close()
    committed_at = None
    with removals_at_once():
        for point in range(1000):
            run = Run(kind, tmp_path / str(point))
            shutil.copytree(before.folder, run.folder, symlinks=True)
            number = 1 if again else 3
            if not dies_at(point, lambda: run.save(number, client_state={"saved": 3})):  # noqa: B023
                break
            loaded = run.load()
            committed_at = committed_at or (point if loaded == 3 else None)
            assert loaded == (3 if committed_at is not None else 2), point
            run.save(4)
            assert run.load() == 4
            assert {name: (run.folder / run.tag(1) / name).read_text() for name in extra} == extra, point
            assert not [name for name in names_in(run.folder) if name.startswith(".")], point
            run.strategy.close()
    assert committed_at is not None and point > 15


# --- layouts without their training state ----------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["lerobot", "trainer"])
@pytest.mark.parametrize("save_latest", [True, False])
def test_a_newest_checkpoint_without_training_state_is_an_error(tmp_path, kind, save_latest):
    run = Run(kind, tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        for number in (1, 2, 3):
            steps = number if kind else 0
            own = run.strategy._state_of(run.model).accumulation
            patched.setattr(own, "steps", steps)
            run.save(number, save_latest=save_latest, max_num=None)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(tmp_path / run.tag(3) / "training_state")
    dist.barrier()
    with pytest.raises(CheckpointError, match=rf"{run.tag(3)}.*training_state/ is missing.*Pass fallback=True"):
        run.load()
    with pytest.raises(CheckpointError, match=rf"{run.tag(3)}.*training_state/ is missing"):
        run.load(tmp_path / run.tag(3))
    with pytest.raises(CheckpointError, match=rf"'{run.tag(3)}' is not a committed checkpoint .*training_state/"):
        run.load(tag=run.tag(3))
    with logged() as texts:
        assert run.load(fallback=True) == 2
    assert dist.get_rank() or any(run.tag(3) in text for text in texts)
    status, shown = printed("ls", tmp_path)
    assert status == 1 and "UNUSABLE: training_state/ is missing" in shown
    run.save(4)
    assert run.load() == 4


@pytest.mark.ranks(1)
@in_all_layouts
def test_a_directory_that_latest_names_is_not_skipped(tmp_path, kind):
    run = Run(kind, tmp_path)
    run.save(1)
    run.save(2)
    for path in (tmp_path / run.tag(2)).iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (tmp_path / run.tag(2) / "model").mkdir()
    with pytest.raises(CheckpointError, match=f"{run.tag(2)}.*Pass fallback=True"):
        run.load()
    assert run.load(fallback=True) == 1


# --- a full disk, a disk that cannot be written, a reader during rotation --------------------------------------------


@pytest.mark.ranks(2)
@in_all_layouts
def test_a_disk_that_is_full_when_latest_is_replaced_does_not_fail_the_save(tmp_path, kind):
    run = Run(kind, tmp_path)
    run.save(1)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with patch.object(directory, "write_new", full), patch.object(Path, "symlink_to", full), logged() as texts:
        for number in (2, 3, 4):
            run.save(number)
    assert dist.get_rank() or any("is saved, but" in text and "No space left" in text for text in texts)
    assert listing.latest_tag(tmp_path) == run.tag(1)
    assert tags(tmp_path) == [run.tag(1), run.tag(3), run.tag(4)], "latest does not name what rotation deleted"
    assert run.load() == 4
    run.save(5)
    dist.barrier()
    assert listing.latest_tag(tmp_path) == run.tag(5) and tags(tmp_path) == [run.tag(4), run.tag(5)]


@pytest.mark.ranks(1)
@in_all_layouts
@pytest.mark.parametrize("tag", ["latest", "last"])
def test_a_directory_named_latest_does_not_fail_a_save(tmp_path, kind, tag):
    (tmp_path / tag).mkdir()
    (tmp_path / tag / "mine").write_text("mine")
    run = Run(kind, tmp_path)
    if (kind == "lerobot") and tag == "last":
        with pytest.raises(CheckpointError, match="last exists and is not a link"):
            run.save(1)
        return
    run.save(1)
    assert run.load() == 1 and (tmp_path / tag / "mine").read_text() == "mine"


@pytest.mark.ranks(1)
@in_all_layouts
@pytest.mark.parametrize("fallback", some([False, True], [False]))
def test_a_replaced_checkpoint_loads_from_a_file_system_that_cannot_be_written(tmp_path, kind, fallback):
    run = Run(kind, tmp_path)
    run.save(1)
    run.save(2)
    (tmp_path / run.tag(2)).rename(tmp_path / f".{run.tag(2)}.replaced")

    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with patch.multiple(Path, rename=read_only, replace=read_only, unlink=read_only, mkdir=read_only):
        assert run.load(fallback=fallback) == run.load(tag=run.tag(2)) == 2
        if kind == "lerobot":
            assert run.load(tmp_path / "last") == 2
        assert tags(tmp_path) == [run.tag(1), run.tag(2)]
        assert main(["ls", str(tmp_path)]) == main(["verify", "-q", str(tmp_path)]) == 0
    assert run.load() == 2 and names_in(tmp_path) == [run.tag(1), run.tag(2)]


@pytest.mark.ranks(1)
def test_a_replaced_checkpoint_loads_from_a_real_read_only_mount(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], check=False, capture_output=True).returncode:
        return  # no right to mount: the test above injects the errors
    try:
        run = Run("own", disk)
        run.save(1)
        run.save(2)
        lock.release_all()  # an open file
        (disk / run.tag(2)).rename(disk / f".{run.tag(2)}.replaced")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert run.load() == 2
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.ranks(2)
@in_all_layouts
@pytest.mark.parametrize("at", some(["check_structure", "read_all", "match_model"], ["read_all"]))
def test_a_load_that_meets_rotation_reads_the_list_again(tmp_path, kind, at):
    from fsdp2_strategy.checkpoint import load as loading

    run = Run(kind, tmp_path)
    run.save(1)
    dist.barrier()
    original, deleted = getattr(loading, at), []

    def rotate():
        """Commit another checkpoint, and delete the one that is being loaded."""
        copy = tmp_path / ".copy"
        shutil.copytree(tmp_path / run.tag(1), copy)
        manifest = CheckpointPaths.found_in(copy).manifest
        content = json.loads(manifest.read_text()) | {"tag": run.tag(2), "sequence": 2}
        manifest.write_text(json.dumps(content | {"digest": listing.digest_of_manifest(content)}))
        copy.rename(tmp_path / run.tag(2))
        shutil.rmtree(tmp_path / run.tag(1))

    def during(*args, **kwargs):
        if not deleted:
            deleted.append(True)
            if at == "check_structure":  # rank 0 alone calls it
                rotate()
            else:
                dist.barrier()
                if dist.get_rank() == 0:
                    rotate()
                dist.barrier()
        return original(*args, **kwargs)

    with patch.object(loading, at, during):
        path, state = run.strategy.load_ckpt(run.model, tmp_path)
    assert Path(path) == tmp_path / run.tag(2) and state == {"saved": 1}

    def vanished(path, key=None):
        shutil.rmtree(path)
        listing.read_manifest(path)

    messages = r"deleted or replaced while it was read|not a committed checkpoint"
    with patch.object(loading, "check_structure", vanished), pytest.raises(CheckpointError, match=messages):
        run.load(tag=run.tag(2))


def save_for_ever(kind, folder):
    run = Run(kind, folder)
    for number in range(1, 10**6):
        run.save(number % 7, max_num=1 + number % 2)
        time.sleep(0.1)


@pytest.mark.full
@in_each_layout
def test_readers_during_rotation_find_no_false_damage(tmp_path, kind, capsys):
    saver = processes.Process(target=save_for_ever, args=(kind, tmp_path), daemon=True)
    saver.start()
    strategy = strategy_for()
    reader = Run(kind, tmp_path)
    model = reader.model
    read = 0
    try:
        while read < 15:
            assert saver.is_alive()
            for checkpoint in list_checkpoints(tmp_path):
                report = verify_checkpoint(checkpoint.path, progress=False)
                gone = not checkpoint.path.exists()
                assert report.ok or gone or report.is_deleted, report.problems
                read += 1
            if read:
                assert main(["ls", "-q", str(tmp_path)]) == main(["verify", "-q", str(tmp_path)]) == 0
                assert load_checkpoint(model, tmp_path) is not None
    finally:
        os.kill(saver.pid, signal.SIGKILL)
        saver.join()
        strategy.close()


@pytest.mark.ranks(2)
def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = Run("own", "~/run")
    assert run.strategy.save_ckpt(run.model, "~/run", "a") == str(tmp_path / "run" / "a")
    dist.barrier()
    assert tags("~/run") == tags(tmp_path / "run") == ["a"]
    assert run.strategy.load_ckpt(run.model, Path("~/run"))[0] == str(tmp_path / "run" / "a")
    assert verify_checkpoint("~/run/a").ok
    assert main(["ls", "-q", "~/run"]) == 0
    run.strategy.save_model(run.model, output_dir="~/export")
    dist.barrier()
    assert (tmp_path / "export" / "model.safetensors").is_file()
    with pytest.raises(CheckpointError, match="the directory is '~nobody-here/run'"):
        run.strategy.save_ckpt(run.model, "~nobody-here/run")


# --- the lock --------------------------------------------------------------------------------------------------------


def try_lock(folder, pipe):
    try:
        lock.acquire(folder)
        pipe.send("acquired")
    except CheckpointError as error:
        pipe.send(str(error))
    pipe.recv()


@contextmanager
def another_process(folder):
    """Return what comes of another process that acquires the lock of a directory, and lives until the block ends."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=try_lock, args=(folder, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send("end")
        process.join()


def other_finds(folder):
    with another_process(folder) as found:
        return found


@pytest.mark.full
def test_the_lock_outlives_readers_of_its_file_and_forked_children(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    lock.acquire(run)
    try:
        shutil.copytree(run, tmp_path / "copy")
        (run / ".lock").read_bytes()
        assert f'"pid": {os.getpid()}' in other_finds(run)
        child = os.fork()
        if child == 0:
            os._exit(0 if not lock._held and lock.is_held_elsewhere(run) else 1)
        assert os.waitpid(child, 0)[1] == 0
        lock.acquire(run)  # again, by the same run
        assert "another run holds its lock" in other_finds(run)
    finally:
        lock.release_all()
    assert not (run / ".lock").exists()
    with another_process(run) as found:
        assert found == "acquired" and lock.is_held_elsewhere(run)
        with pytest.raises(CheckpointError, match="another run holds its lock"):
            lock.acquire(run)
    assert not lock.is_held_elsewhere(run)


def hold_and_fork(folder, pipe):
    lock.acquire(folder)
    child = os.fork()
    if child == 0:  # as a worker of a data loader, which outlives a run that is killed
        signal.pause()
    pipe.send(child)
    signal.pause()


@pytest.mark.full
def test_a_child_that_outlives_a_killed_run_does_not_keep_its_lock(tmp_path):
    ours, theirs = processes.Pipe()
    process = processes.Process(target=hold_and_fork, args=(tmp_path, theirs), daemon=True)
    process.start()
    child = ours.recv()
    try:
        assert lock.is_held_elsewhere(tmp_path)
        process.kill()
        process.join()
        assert not lock.is_held_elsewhere(tmp_path)
        assert other_finds(tmp_path) == "acquired"
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_run_of_an_earlier_version_is_excluded_and_excludes(tmp_path):
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB); print('held')"
    )
    command = [sys.executable, "-c", f"{code}; sys.stdout.flush(); sys.stdin.read()", str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as earlier:
        assert earlier.stdout.readline() == b"held\n"
        assert lock.is_held_elsewhere(tmp_path)
        with pytest.raises(CheckpointError, match="another run holds its lock"):
            lock.acquire(tmp_path)
        earlier.stdin.close()
    lock.acquire(tmp_path)
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        assert b"BlockingIOError" in done.stderr
    finally:
        lock.release_all()


def test_flock_is_used_where_there_are_no_locks_of_open_files(tmp_path, monkeypatch):
    monkeypatch.delattr(fcntl, "F_OFD_SETLK")
    monkeypatch.delattr(fcntl, "F_OFD_GETLK")
    lock.acquire(tmp_path)
    try:
        (tmp_path / ".lock").read_bytes()
        with (tmp_path / ".lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = dict(lock._held)
        lock._held.clear()  # as in another process
        assert lock.is_held_elsewhere(tmp_path)
        with pytest.raises(CheckpointError, match="another run holds its lock"):
            lock.acquire(tmp_path)
        lock._held.update(held)
    finally:
        lock.release_all()


@pytest.mark.parametrize("what", ["link", "dangling", "folder", "fifo"])
def test_a_lock_that_is_no_file_is_an_error(tmp_path, what):
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    path = tmp_path / "run" / ".lock"
    path.parent.mkdir()
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(precious if what == "link" else "nowhere")
    with pytest.raises(CheckpointError, match="lock is not a regular file"):
        lock.acquire(path.parent)
    assert not lock.is_held_elsewhere(path.parent)
    assert precious.read_text() == "mine" and not (path.parent / "nowhere").exists()


@pytest.mark.ranks(1)
def test_a_file_system_without_locks_is_warned_of(tmp_path):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with patch.object(fcntl, "fcntl", unsupported), logged() as texts:
        lock.acquire(tmp_path)
    assert any("make sure that no other run saves into it" in text for text in texts)
