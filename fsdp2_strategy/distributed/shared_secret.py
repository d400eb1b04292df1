"""Load the secret that processes of one user share, to know each other in a network.

Input: a text, the path of a file, or neither. Output: the secret, and a name of its origin for messages; a log or an
error never contains the secret itself.

[Note: the secret file] The default file is in the user's home directory. The first process that needs it creates it:
under another name, complete and readable by its owner only, and then under its own name with a hard link, which fails
if another process was faster. So processes that start at once read the same secret. A file that other users could have
read or written is refused, and so is a symbolic link, which could lead to one.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fsdp2_strategy.errors import FSDP2StrategyError
from fsdp2_strategy.private_files import NotPrivateError, read_private_file

LEAST_BYTES = 32
"""Minimum length of a secret."""
_MOST_BYTES = 4096
_FIX = "Make one with: (umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > FILE)."

logger = logging.getLogger("fsdp2_strategy")


@dataclass(frozen=True)
class SharedSecret:
    """A secret, and where it comes from."""

    key: bytes = field(repr=False)
    origin: str
    """The path of its file, or the name of an argument; for messages."""

    def mac(self, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of parts, each of which is preceded by its length."""
        mac = hmac.new(self.key, digestmod="sha256")
        for part in parts:
            mac.update(len(part).to_bytes(8, "little"))
            mac.update(part)
        return mac.digest()


def default_secret_file() -> Path:
    """Return the path of the user's own secret file, which need not exist."""
    return Path.home() / ".config" / "fsdp2_strategy" / "engine.secret"


def shared_secret(secret: str | None, file: str | Path | None, error: type[FSDP2StrategyError]) -> SharedSecret:
    """Return the given secret, that of ``file``, or that of the user's own file; see [Note: the secret file]."""
    if secret is not None and file is not None:
        raise error(
            "cannot use a shared secret: both secret and secret_file are given, expected one of them. Pass one."
        )
    if secret is not None:
        if not isinstance(secret, str) or len(secret.encode()) < LEAST_BYTES:
            found = f"{len(secret.encode())} bytes" if isinstance(secret, str) else f"a {type(secret).__name__}"
            raise error(
                f"cannot use a shared secret: secret is {found}, expected a text of at least {LEAST_BYTES} bytes. Pass "
                "secrets.token_hex(32), the same to each process."
            )
        return SharedSecret(secret.encode(), "the argument secret")
    if file is not None:
        try:
            path = Path(file).expanduser()
        except (TypeError, RuntimeError) as failure:
            raise error(
                f"cannot use a secret file: its path is {file!r} ({failure}), expected the path of a file. Correct it."
            ) from failure
        return SharedSecret(_read(path, error), str(path))
    try:
        path = default_secret_file()
        if not os.path.lexists(path):
            _create(path)
    except (OSError, RuntimeError) as failure:
        raise error(
            f"cannot create the user's secret file ~/.config/fsdp2_strategy/engine.secret: {failure}, expected a home "
            f"directory with hard links that this process can write. Pass secret_file. {_FIX}"
        ) from failure
    return SharedSecret(_read(path, error), str(path))


def _create(path: Path) -> None:
    """Create the file with a random secret, unless another process creates it; see [Note: the secret file]."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(file.fileno(), 0o600)  # whatever the umask is
            file.write(secrets.token_hex(LEAST_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
            logger.info("created the secret file %s, with which trainers and engines know each other", path)
    finally:
        temporary.unlink()


def _read(path: Path, error: type[FSDP2StrategyError]) -> bytes:
    """Read a secret from a file that only this user can read and write."""
    try:
        secret = read_private_file(path, LEAST_BYTES, _MOST_BYTES, follow_link=False).strip()
        if len(secret) < LEAST_BYTES:
            raise NotPrivateError(f"it has {len(secret)} bytes besides white space")
    except NotPrivateError as problem:
        raise error(
            f"cannot use the secret file {path}: {problem}, expected a regular file of this user with mode 0600 and at "
            f"least {LEAST_BYTES} bytes. {_FIX}"
        ) from problem
    return secret
