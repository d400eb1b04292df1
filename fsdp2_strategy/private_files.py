"""Read a file with a key or a secret, which nobody but its owner may have read or written.

Input: a path. Output: the content, or an error that says what is wrong with the file. Does not import torch.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


class NotPrivateError(Exception):
    """A file is not a regular file that only the user of this process can read and write; the text says why."""


def read_private_file(path: str | Path, least_bytes: int, most_bytes: int, *, follow_link: bool) -> bytes:
    """Return the content of a file.

    Args:
        path: the file.
        least_bytes: minimum size.
        most_bytes: maximum size.
        follow_link: whether the path may be a symbolic link to such a file.

    Raises:
        NotPrivateError: it cannot be read, is not a regular file, belongs to another user, gives permissions to others,
            or its size is out of bounds.
    """
    # O_NONBLOCK: a named pipe must not wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_link else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except (OSError, TypeError, ValueError) as error:
        is_link = getattr(error, "errno", None) == errno.ELOOP and not follow_link
        raise NotPrivateError("it is a symbolic link" if is_link else str(error)) from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise NotPrivateError("it is not a regular file")
        if facts.st_uid != os.geteuid():
            raise NotPrivateError(f"it belongs to user {facts.st_uid}, and this process to user {os.geteuid()}")
        if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise NotPrivateError(f"its mode is {stat.S_IMODE(facts.st_mode):04o}")
        if not least_bytes <= facts.st_size <= most_bytes:
            raise NotPrivateError(f"it has {facts.st_size} bytes")
        return os.read(descriptor, most_bytes)
    except OSError as error:
        raise NotPrivateError(str(error)) from error
    finally:
        os.close(descriptor)
