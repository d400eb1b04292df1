"""Sign the manifest of a checkpoint with a key, and check the signature; this module does not import torch.

Input: a key file, and a manifest. Output: the manifest's entry ``signature``, or an error if the entry does not match.

[Note: signature] The checksums of a checkpoint (xxh3) protect against accidents; whoever can write to the directory can
replace a file together with its checksums. With a key, each rank also computes SHA-256 digests of the blocks that it
writes, and adds them to its checksum manifest. The entry ``signature`` has the SHA-256 digests of the checksum
manifests, and an HMAC-SHA256 over the whole manifest with these digests. So the HMAC binds every byte of every file.
Only rank 0 needs the key: it checks the HMAC, and the other ranks get the manifest from it. A load without the key
ignores the signature, and compares the xxh3 checksums.

A signature says that somebody with the key wrote these files as one checkpoint. It does not say that the checkpoint is
the newest one, or which tag it had: whoever can write to the directory can delete or rename checkpoints.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp2_strategy.errors import CheckpointError, DamageError
from fsdp2_strategy.private_files import NotPrivateError, read_private_file

SIGNATURE = "signature"

_ALGORITHM = "hmac-sha256"
_MIN_KEY_BYTES, _MAX_KEY_BYTES = 32, 1 << 20


def read_key(key_file: str | Path) -> bytes:
    """Read a key; one process of a job calls it.

    The file, or the one that a link leads to, must be a regular file of this user that others can neither read nor
    write, with 32 bytes or more. Its bytes are the key, line ends included.
    """
    try:
        return read_private_file(key_file, _MIN_KEY_BYTES, _MAX_KEY_BYTES, follow_link=True)
    except NotPrivateError as problem:
        raise CheckpointError(
            f"cannot use the key file {key_file}: {problem}, expected a regular file of this user with mode 0600 and "
            f"at least {_MIN_KEY_BYTES} bytes. Make one: (umask 077; head -c 32 /dev/urandom > {key_file})."
        ) from problem


def signature_of(manifest: Mapping[str, Any], checksums: Mapping[str, str], key: bytes) -> dict[str, Any]:
    """Return the entry ``signature`` of a manifest that lacks only ``digest``; ``checksums`` has SHA-256 digests."""
    signature = {"algorithm": _ALGORITHM, "key": _name_of(key), "checksums": dict(checksums)}
    return {**signature, "hmac": _hmac_of(manifest, signature, key)}


def check_signature(path: Path, manifest: Mapping[str, Any], key: bytes) -> None:
    """Raise a `DamageError` if the manifest of the checkpoint at ``path`` was not signed with a key."""
    signature = manifest.get(SIGNATURE)
    if signature is None:
        raise _signature_error(path, "it has no signature")
    if not isinstance(signature, dict) or signature.get("algorithm") != _ALGORITHM:
        raise _signature_error(path, "its signature is of an unknown kind")
    if signature.get("key") != _name_of(key):
        named = str(signature.get("key"))[:16]
        raise _signature_error(path, f"it is signed with the key {named!r}, and this key is {_name_of(key)!r}")
    given, without = signature.get("hmac"), {name: value for name, value in signature.items() if name != "hmac"}
    expected = _hmac_of(manifest, without, key)
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(errors="replace"), expected.encode()):
        raise _signature_error(path, "its signature does not match its manifest, which has been changed")
    listed = signature.get("checksums")
    if not isinstance(listed, dict) or listed.keys() != manifest["checksums"].keys():
        raise _signature_error(path, "its signature does not have all checksum manifests")


def _signature_error(path: Path, problem: str) -> DamageError:
    return DamageError(
        f"cannot trust {path}: {problem}, expected a checkpoint that this key signed. Load another checkpoint, or load "
        "without a key file if you trust all who can write there."
    )


def sha256_of(content: bytes) -> str:
    """Return the SHA-256 digest of bytes in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def _name_of(key: bytes) -> str:
    """Return a name of the key for messages, from which nobody can compute the key."""
    return hmac.digest(key, b"fsdp2_strategy: name of a key", "sha256").hex()[:16]


def _hmac_of(manifest: Mapping[str, Any], signature: Mapping[str, Any], key: bytes) -> str:
    content = {name: value for name, value in manifest.items() if name not in ("digest", SIGNATURE)}
    text = json.dumps([content, signature], sort_keys=True)
    return hmac.digest(key, b"fsdp2_strategy: manifest\n" + text.encode(), "sha256").hex()
