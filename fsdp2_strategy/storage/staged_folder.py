"""Replace files of a folder all at once: at any time, a reader finds all the old files or all the new ones.

Input: new files in a hidden subfolder, which may have subfolders. Output: the same files in the folder. Other files of
the folder are left alone. Not collective: one rank replaces the files.

[Note: staged folder] No file system can replace several files at once, and a folder cannot be renamed if it is a mount
point, or has files of other people. But one symbolic link can be replaced at once. So the switch has these steps; a
kill between any two of them leaves a folder that loads as before, or one that loads the new files.

1. The new files are complete in ``.export.partial/``. Hard links to the files that they replace, and to those that
   become obsolete, are made in ``.export.replaced/``.
2. The link ``.export`` is made; it points to ``.export.replaced``.
3. Each name is replaced by a link through it: ``config.json -> .export/config.json``. New names have no target yet.
4. ``.export`` is replaced by a link to ``.export.partial``: all names change at once.
5. Each link is replaced by the file that it points to, or removed if it has no target. The hidden files are deleted.

If the export is killed, the next one does step 5 first, with the files that ``.export`` points to. ``.export.lock`` is
locked meanwhile. On a file system without hard links, step 1 copies. Without symbolic links, the files are replaced one
by one, in an order in which no mixture loads; a kill between them leaves a folder that does not load.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage.json_files import fsync

_STAGED = ".export.partial"
_REPLACED = ".export.replaced"
_SWITCH = ".export"
_NEW_LINK = ".export.link"
_LOCK = ".export.lock"

_HIDDEN = frozenset({_STAGED, _REPLACED, _SWITCH, _NEW_LINK, _LOCK})
"""Names in a folder that an export in progress, or one that was killed, may have."""

_NOT_SUPPORTED = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}


class StagedFolder:
    """The hidden subfolder for the new files of a folder, and the switch to them; see [Note: staged folder].

    Use it in a ``with`` block, which deletes the subfolder at the end, and the folder itself if `create` made it and it
    is empty. All ranks may enter the block; only the rank that calls `create` changes anything.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / _STAGED
        self._lock: int | None = None
        self._is_created = False
        self._is_new = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clean_up()

    def _clean_up(self) -> None:
        """Finish or undo the switch, delete the hidden files, and release the lock; no-op if this has been done."""
        if not self._is_created:
            return
        self._is_created = False
        try:
            _finish(self.folder)
        except (OSError, CheckpointError) as failure:  # not a failure of the export: the folder loads, old or new
            logger.warning("cannot clean up %s: %s. The next export there tries again.", self.folder, failure)
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self.folder / _LOCK).unlink()
            os.close(self._lock)
            self._lock = None
        if self._is_new:
            with contextlib.suppress(OSError):  # it stays if it has files, as after `publish`
                self.folder.rmdir()

    def create(self, needed_bytes: int = 0) -> None:
        """Create the folder and the hidden subfolder; finish or undo a switch that was killed."""
        self._is_new = not os.path.lexists(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _acquire(self.folder)
        self._is_created = True
        try:
            _finish(self.folder)
            check_free_space(self.folder, needed_bytes)
            self.path.mkdir()
        except (OSError, CheckpointError):
            self._clean_up()
            raise

    def is_empty(self) -> bool:
        """Return whether the folder has no files except those of this export."""
        return {entry.name for entry in self.folder.iterdir()} <= _HIDDEN

    def publish(self, obsolete: Iterable[str] = ()) -> None:
        """Replace the folder's files by those of the subfolder, all at once; see [Note: staged folder]."""
        new = _files_in(self.path)
        for name in new:
            fsync(self.path / name)
        _fsync_folders(self.path)
        old = self._existing(new, obsolete)
        for name in new:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            switch = self._new_link(_REPLACED)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            self._replace_one_by_one(new, old)
            self._clean_up()
            return
        for name in old:
            _keep(self.folder / name, self.folder / _REPLACED / name)
        if old:
            _fsync_folders(self.folder / _REPLACED)
        switch.rename(self.folder / _SWITCH)
        fsync(self.folder)
        changed = [*old, *(name for name in new if name not in old)]  # names without a target last
        for name in changed:
            self._new_link(_target_of(self.folder, name)).rename(self.folder / name)
        for parent in {(self.folder / name).parent for name in changed}:
            fsync(parent)
        self._new_link(_STAGED).rename(self.folder / _SWITCH)
        with contextlib.suppress(OSError):  # the export stands: readers find the new files
            fsync(self.folder)
        self._clean_up()

    def _existing(self, new: Sequence[str], obsolete: Iterable[str]) -> list[str]:
        """Return the names of the files to replace or to remove."""
        found = [name for name in [*new, *sorted({*obsolete} - {*new})] if os.path.lexists(self.folder / name)]
        folders = [name for name in found if (self.folder / name).is_dir()]
        if replaced := [name for name in folders if name in new]:
            raise CheckpointError(
                f"cannot export to {self.folder}: {replaced[0]} is a folder there, expected a file or nothing. Rename "
                "it, or choose another folder."
            )
        return [name for name in found if name not in folders]

    def _new_link(self, target: str) -> Path:
        link = self.folder / _NEW_LINK
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        return link

    def _replace_one_by_one(self, new: Sequence[str], old: Sequence[str]) -> None:
        """Replace the files without links: indexes and configurations of adapters are removed first and come last."""
        entry_points = [name for name in {*new, *old} if name.endswith((".index.json", "adapter_config.json"))]
        for name in [*entry_points, *(set(old) - set(new))]:
            (self.folder / name).unlink(missing_ok=True)
        fsync(self.folder)
        for name in sorted(new, key=lambda name: name in entry_points):
            (self.path / name).replace(self.folder / name)
        fsync(self.folder)


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raise if the files do not fit on the disk; one rank calls it before the files are created."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise CheckpointError(
            f"cannot save: the files need {needed_bytes / 1e9:.3f} GB, {folder} has {free / 1e9:.3f} GB free. Free "
            "space on the disk; earlier files are deleted only after the new ones are complete."
        )


def _acquire(folder: Path) -> int | None:
    """Lock a folder for an export, and return the descriptor; None if the file system has no locks."""
    path = folder / _LOCK
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise CheckpointError(
                    f"cannot export to {folder}: another export writes into it, expected one at a time. Wait for it, "
                    "or choose another folder."
                ) from None
            logger.warning("cannot lock %s (%s): make sure that no other export writes there", folder, error.strerror)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        os.close(fd)  # the export that held the lock has just deleted the file


def _finish(folder: Path) -> None:
    """Replace each link by the file that it points to, and delete the hidden files; after a kill, too."""
    switch = folder / _SWITCH
    if switch.is_symlink():
        source = folder / switch.readlink()
        if source.name not in (_STAGED, _REPLACED) or source.parent != folder:
            raise CheckpointError(
                f"cannot export to {folder}: {switch} points to {source}, expected the hidden folder of an export. "
                "Rename the link, or choose another folder."
            )
        names = {*_files_in(folder / _STAGED), *_files_in(folder / _REPLACED)}
        kept = {name for name in names if os.path.lexists(source / name)}
        for name in sorted(names, key=lambda name: name in kept):  # names without a target first
            path = folder / name
            if not path.is_symlink() or os.readlink(path) != _target_of(folder, name):  # noqa: PTH115  text, not a path
                continue
            if name in kept:
                (source / name).rename(path)
            else:
                path.unlink()
        for parent in {(folder / name).parent for name in names}:
            if parent.is_dir():
                fsync(parent)
        switch.unlink()
    for hidden in (_STAGED, _REPLACED):
        if (folder / hidden).is_dir():
            shutil.rmtree(folder / hidden)
    (folder / _NEW_LINK).unlink(missing_ok=True)
    fsync(folder)


def _target_of(folder: Path, name: str) -> str:
    """Return the text of the link that stands for a file during a switch."""
    parent = os.path.realpath((folder / name).parent)
    return os.path.relpath(os.path.realpath(folder) + f"/{_SWITCH}/{name}", parent)


def _files_in(folder: Path) -> list[str]:
    """Return the files and links in a folder and its subfolders, by their names relative to it, sorted."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _fsync_folders(folder: Path) -> None:
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        fsync(path)


def _keep(path: Path, copy: Path) -> None:
    """Make a second name for a file; copy it on a file system without hard links."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():  # such as a file of the Hugging Face cache: its target may be relative to the folder
        copy.symlink_to(os.path.join(os.path.realpath(path.parent), os.readlink(path)))  # noqa: PTH115, PTH118
        return
    try:
        copy.hardlink_to(path)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        shutil.copy2(path, copy)
        fsync(copy)
