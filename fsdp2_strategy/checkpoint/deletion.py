"""Delete the files of a checkpoint, and keep what others have put into its directory.

Input: a directory with a hidden name; see [Note: hidden names] in `directory`. Output: a directory less, or what was
kept, and what cannot be deleted now.

[Note: files of others] An evaluation or a person may put files into a checkpoint: results, a converted model, a link, a
mounted disk. The manifest says which files are ours. Only these are deleted, and then the directories that are empty.
If anything else is left, it goes back to the name of the checkpoint, with the file `ROTATED`; or into the new
checkpoint of this name, if there is one. The manifest is deleted last, so an interrupted deletion can be continued.

Directories are opened one below the other, without following links, so a link that takes the place of a directory at
any moment is never followed. A mounted directory is not entered either, because its files belong elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fsdp2_strategy.checkpoint.listing import hidden_path, is_own_directory, read_manifest
from fsdp2_strategy.checkpoint.paths import (
    RNG,
    ROTATED,
    TRAINING_STATE,
    CheckpointPaths,
    exists,
    has_only_checkpoint_entries,
    is_directory,
)
from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.errors import DamageError

_JUNK = re.compile(r"\.nfs[0-9a-f]{8,}|\.DS_Store")
"""Names that file systems give to open files that were deleted, and a file that macOS leaves everywhere."""
_NOTE = b'{"note": "Rotation deleted the checkpoint in this directory. It kept the files that others had put there."}\n'
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def delete(path: Path, final: Path) -> bool:
    """Delete our files in a hidden directory, and move others to ``final``; return whether it is gone.

    See [Note: files of others]. Rank 0 calls it. A failure is only logged: the next save tries again.
    """
    try:
        deletion = _Deletion.of(path)
        kept = deletion.run()
        if kept:
            _move(path, final)
    except OSError as error:
        logger.warning("cannot delete %s: %s. The next save tries again.", path, error)
        return False
    if kept:
        logger.info("deleted the checkpoint %s, and kept the files of others that were in it", final)
    return True


def delete_partial(path: Path) -> bool:
    """Delete the directory of a save that did not commit, if this package made it; return whether it is gone."""
    if not _is_partial(path):
        return not exists(path, follow_symlinks=False)
    try:
        _Deletion(path, None).run()
    except OSError as error:
        logger.warning("cannot delete %s: %s. The next save tries again.", path, error)
        return False
    return True


def _is_partial(path: Path) -> bool:
    """Return whether a save made a directory: it has the folder that a save makes first, or it is empty."""
    if not has_only_checkpoint_entries(path):
        return False
    has_first = any(is_directory(path / state / RNG, follow_symlinks=False) for state in ("", TRAINING_STATE))
    return has_first or not any(each.name != TRAINING_STATE for each in path.rglob("*"))


def bytes_in(path: Path) -> int:
    """Return how much space the files of a directory take, without following links or entering mounted directories."""

    def size(fd: int, mount: str) -> int:
        with os.scandir(fd) as entries:
            found = [(each.name, each.is_dir(follow_symlinks=False)) for each in entries]
        total = 0
        for name, is_folder in found:
            with contextlib.suppress(OSError):  # what cannot be read cannot be counted
                if not is_folder:
                    total += os.stat(name, dir_fd=fd, follow_symlinks=False).st_size
                else:
                    with _opened(name, fd) as below:
                        total += size(below, mount) if _mount_of(below) == mount else 0
        return total

    try:
        with _opened(path) as fd:
            return size(fd, _mount_of(fd))
    except OSError:
        return 0


@dataclass
class _Deletion:
    """A deletion of our files in a directory, by names relative to it."""

    path: Path
    files: Collection[str] | None
    """Our files; None if all are."""
    manifest: str | None = None
    """The name of the manifest, which is deleted last; None if there is none."""
    _failures: list[OSError] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> _Deletion:
        """Find out which files of a directory are ours; raise if it is not known to be ours."""
        if not is_directory(path, follow_symlinks=False):
            raise OSError(errno.ENOTDIR, "it is not a directory", str(path))
        manifest = CheckpointPaths.found_in(path).manifest
        try:
            files = read_manifest(path)["files"]
        except DamageError:
            if exists(path / ROTATED) and not exists(manifest):
                return cls(path, ())
            if is_own_directory(path) or has_only_checkpoint_entries(path):
                return cls(path, None)
            raise OSError(errno.EPERM, "it has no valid manifest, and files of others", str(path)) from None
        return cls(path, frozenset(files), manifest.relative_to(path).as_posix())

    def run(self) -> bool:
        """Delete our files, then the manifest, then the directory; return whether files of others are left."""
        with _opened(self.path) as fd:
            mount = _mount_of(fd)
            has_others = self._delete_in(fd, "", mount)
            if self._failures:
                raise self._failures[0]
            if has_others and not exists(self.path / ROTATED, follow_symlinks=False):
                write_new(ROTATED, _NOTE, fd)
            if self.manifest is not None:
                self.files, self.manifest = {self.manifest}, None
                self._delete_in(fd, "", mount)
            if not has_others and exists(self.path / ROTATED, follow_symlinks=False):
                os.unlink(ROTATED, dir_fd=fd)
            if self._failures:
                raise self._failures[0]
        if not has_others:
            self.path.rmdir()
        return has_others

    def _delete_in(self, fd: int, prefix: str, mount: str) -> bool:
        """Delete our files in an open directory, and links in their place; return whether it has files of others."""
        with os.scandir(fd) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
        # The random states are deleted last: they show that a directory without a manifest is ours.
        found.sort(key=lambda each: each[0] in (RNG, TRAINING_STATE))
        has_others = False
        for name, is_folder in found:
            path = prefix + name
            try:
                if is_folder:
                    has_others |= self._delete_folder(fd, path, mount)
                elif self._is_ours(path) or _JUNK.fullmatch(name):
                    os.unlink(name, dir_fd=fd)
                elif path not in (ROTATED, self.manifest):
                    has_others = True
            except OSError as error:
                self._failures.append(OSError(error.errno, error.strerror, path))
        return has_others

    def _is_ours(self, path: str) -> bool:
        """Return whether a path is that of our file, or of a directory with some of our files."""
        return self.files is None or path in self.files or any(each.startswith(f"{path}/") for each in self.files)

    def _delete_folder(self, parent: int, path: str, mount: str) -> bool:
        """Delete our files in a directory, and the directory if it is empty then; return whether it has others."""
        name = path.rpartition("/")[2]
        failures = len(self._failures)
        with _opened(name, parent) as fd:
            if _mount_of(fd) != mount:
                if self._is_ours(path):
                    raise OSError(errno.EBUSY, "it is a mount point", path)
                return True
            has_others = self._delete_in(fd, f"{path}/", mount)
        if has_others or len(self._failures) > failures:
            return has_others
        if self.manifest is None or not self.manifest.startswith(f"{path}/"):
            os.rmdir(name, dir_fd=parent)
        return False


@contextmanager
def _opened(path: str | Path, parent: int | None = None) -> Iterator[int]:
    """Open a directory that is not a link."""
    fd = os.open(path, _FOLDER, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def _mount_of(fd: int) -> str:
    """Return a name for the mount of an open directory: a bind mount has the device number of what it shows."""
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        return next(line for line in lines if line.startswith("mnt_id:"))
    except (OSError, StopIteration):
        return str(os.fstat(fd).st_dev)


def write_new(path: str | Path, content: bytes, parent: int | None = None) -> None:
    """Write and fsync a file that must not exist, nor be a link; ``parent`` is an open directory."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=parent)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)


def _move(path: Path, final: Path) -> None:
    """Move the files of others in a hidden directory to the name of the checkpoint, or into the directory there."""
    if not exists(final, follow_symlinks=False):
        path.rename(final)
        return
    if not is_directory(final, follow_symlinks=False):
        raise OSError(errno.EEXIST, f"it has files of others, and {final.name} is not a directory", str(path))
    _move_into(path, final)


def _move_into(path: Path, final: Path, *, is_top: bool = True) -> None:
    for source in sorted(path.iterdir()):
        target = final / source.name
        if is_top and source.name == ROTATED:
            continue
        if not exists(target, follow_symlinks=False):
            source.rename(target)
        elif all(is_directory(each, follow_symlinks=False) for each in (source, target)):
            _move_into(source, target, is_top=False)
        else:
            number = 1
            while exists(target, follow_symlinks=False):
                target, number = final / f"{source.name}.kept{number}", number + 1
            source.rename(target)
    if is_top:
        (path / ROTATED).unlink(missing_ok=True)
    path.rmdir()


def hide(path: Path, tag: str, suffix: str) -> Path:
    """Rename a checkpoint's directory to a hidden name, and return it; if it is a link, it keeps its name."""
    hidden = hidden_path(path.parent, tag, suffix)
    path.rename(hidden)
    if not is_directory(hidden, follow_symlinks=False):  # a link took its place a moment ago
        hidden.rename(path)
        raise OSError(errno.ENOTDIR, "it is not a directory", str(path))
    return hidden
