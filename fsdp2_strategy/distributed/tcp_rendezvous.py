"""Find the other ranks without a launcher: `Rendezvous`, and the `RendezvousServer` whose address it contains.

Input: an address, a rank and the number of ranks, which the program that started the processes passes to each of them.
Output: a store for the process group, the rank's number on its host, and its device.

[Note: devices of ranks] torchrun tells each rank its number on its host, and every rank sees all devices of the host.
Other programs start a process on any host, and often let it see one device only. So each rank writes to the store its
host and the devices that it sees, and reads those of all ranks. A rank uses the device whose index is its number among
the ranks of its host that see the same devices. All ranks compute the devices of all ranks, so that they raise the same
errors.

[Note: secret of a rendezvous] torch's store has no authentication: whoever reaches its port can read, write and delete
keys. So the server listens on one interface only, and it and the ranks share a secret. The server writes a proof of it,
so that ranks with another one raise an error at once. What the ranks exchange before the process group exists is
signed. The addresses that gloo and NCCL then publish are not.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from hmac import compare_digest
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp2_strategy.distributed.accelerator import visible_devices
from fsdp2_strategy.distributed.rendezvous import SignedStore, fresh_store
from fsdp2_strategy.distributed.shared_secret import SharedSecret, shared_secret
from fsdp2_strategy.errors import MeshError, some

_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
_CONNECT_SECONDS = 30.0
"""Time to connect to a server: it listens before anybody can know its address."""
_BACKLOG = 1024
_NONCE_BYTES = 32
_PROOF = "fsdp2_strategy/proof"
"""Key of what proves that the server has the secret; see [Note: secret of a rendezvous]."""


class RendezvousServer:
    """Serve the store at which the ranks of a process group meet; not collective: one process creates this object.

    The store ends with this object, and the ranks use it as long as they run. Create it in a process that outlives the
    ranks, such as the one that starts them: then any rank can be replaced. The server listens on the interface of
    ``host`` only, at a port that the operating system chooses while it binds the socket, so no other process can take
    the port first. Use it in a private network only; see [Note: secret of a rendezvous]. One server may be used for
    several groups, one after another.

    Args:
        host: name or address under which the ranks reach this host.
        secret: a text of at least 32 characters, such as ``secrets.token_hex(32)``, which each `Rendezvous` has, too.
            By default, the content of ``~/.config/fsdp2_strategy/engine.secret``, which is created if it does not
            exist.

    Raises:
        MeshError: ``host`` is not a name or an address of this host, or the secret cannot be used.

    Example:
        >>> server = RendezvousServer("127.0.0.1")
        >>> Rendezvous(server.address, rank=0, world_size=1).world_size
        1
    """

    def __init__(self, host: str, *, secret: str | None = None) -> None:
        shared = shared_secret(secret, None, MeshError)
        try:
            self._store = _serve(host)
            self._store.set(_PROOF, _proof(shared, secrets.token_bytes(_NONCE_BYTES)))
        except (RuntimeError, OSError) as error:
            raise MeshError(
                f"cannot open a rendezvous: host is {host!r}, expected a name or an address of this host "
                f"({_first_line(error)}). Pass the address under which the ranks reach this host."
            ) from error
        self.address = f"[{host}]:{self._store.port}" if ":" in host else f"{host}:{self._store.port}"
        """ "host:port", for `Rendezvous`."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where and as which rank a process joins a process group, if no launcher has set torchrun's variables.

    Raises:
        MeshError: the address is malformed, or ``rank`` is not in the range of ``world_size``.
    """

    address: str
    """"host:port" of a `RendezvousServer`."""
    rank: int
    """Rank of this process, from 0; every rank must be used by one process."""
    world_size: int
    """Number of ranks, equal on all of them."""
    secret: str | None = field(default=None, repr=False)
    """The secret of the server; None for the content of ``~/.config/fsdp2_strategy/engine.secret``."""

    def __post_init__(self) -> None:
        host, _, port = str(self.address).rpartition(":")
        if not host or not port.isdecimal():
            raise MeshError(
                f"cannot make a rendezvous: address is {self.address!r}, expected 'host:port'. Pass the address of a "
                "RendezvousServer."
            )
        for name, value, least, most in (
            ("world_size", self.world_size, 1, None),
            ("rank", self.rank, 0, self.world_size),
        ):
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if not is_integer or value < least or (most is not None and value >= most):
                bound = "" if most is None else f" and less than world_size {most}"
                raise MeshError(
                    f"cannot make a rendezvous: {name} is {value!r}, expected an integer of at least {least}{bound}. "
                    "Number the processes from 0."
                )


@dataclass(frozen=True, slots=True)
class LocalRank:
    """What a rank knows of its host; see [Note: devices of ranks]."""

    rank: int
    """Number of this rank among the ranks of its host, from 0."""
    count: int
    """Number of ranks on this host."""
    device: int | None
    """Index of the rank's accelerator among those that this process sees; None if it sees none."""


@dataclass(frozen=True, slots=True)
class _Place:
    """What each rank writes to the store."""

    world_size: int
    host: str
    devices: list[str]
    """Identifiers of the accelerators that the process sees, in their order."""


def meet(rendezvous: Rendezvous, timeout: timedelta) -> tuple[Any, LocalRank]:
    """Wait for all ranks; return a store that only they use, and what this rank knows of its host; collective.

    Ranks that have met raise the same errors. A rank whose world size is too large waits for ranks that do not exist,
    until the time-out.
    """
    if not isinstance(rendezvous, Rendezvous):
        raise MeshError(
            f"cannot start the process group: rendezvous is a {type(rendezvous).__name__}, expected a Rendezvous. Pass "
            "Rendezvous(server.address, rank, world_size)."
        )
    host, _, port = rendezvous.address.rpartition(":")
    secret = shared_secret(rendezvous.secret, None, MeshError)
    wait = timedelta(seconds=_CONNECT_SECONDS)
    try:
        shared = _TCPStore(host.strip("[]"), int(port), is_master=False, timeout=wait, wait_for_workers=False)
    except (RuntimeError, OSError, OverflowError) as error:
        raise MeshError(
            f"cannot start the process group: rank {rendezvous.rank} does not reach {rendezvous.address} in "
            f"{_CONNECT_SECONDS:g} s ({_first_line(error)}), expected a RendezvousServer. Check the address, and that "
            "the process of the server still runs."
        ) from error
    proof = shared.get(_PROOF) if shared.check([_PROOF]) else b""
    if not compare_digest(proof, _proof(secret, proof[:_NONCE_BYTES])):
        raise MeshError(
            f"cannot start the process group: the server at {rendezvous.address} has another secret than "
            f"{secret.origin}, expected the same. Pass secret=secrets.token_hex(32) to the RendezvousServer and to "
            "each Rendezvous, and use the same version of fsdp2_strategy everywhere."
        )
    shared.set_timeout(timeout)
    store = fresh_store(shared, rendezvous.rank, rendezvous.world_size, timeout, secret)
    places = _exchange(SignedStore(store, secret), rendezvous)
    return store, local_ranks(places)[rendezvous.rank]


def _serve(host: str) -> Any:
    """Return a store whose server listens at a free port of a host's interface."""
    [(family, _, _, _, address), *_] = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    port = listening.getsockname()[1]
    return _TCPStore(  # torch alone would listen on all interfaces
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=_CONNECT_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _proof(secret: SharedSecret, nonce: bytes) -> bytes:
    return nonce + secret.mac(b"proof of the rendezvous", nonce)


def _exchange(store: SignedStore, rendezvous: Rendezvous) -> list[_Place]:
    """Write this rank's place, and return those of all ranks, in their order."""
    own = _Place(rendezvous.world_size, _host_id(), visible_devices())
    store.set(f"place/{rendezvous.rank}", json.dumps(asdict(own)))
    places: list[_Place] = []
    for rank in range(rendezvous.world_size):
        place = _Place(**json.loads(store.get(f"place/{rank}").decode()))
        if place.world_size != rendezvous.world_size:
            raise MeshError(
                f"cannot start the process group: world_size is {place.world_size} on rank {rank} and "
                f"{rendezvous.world_size} on rank {rendezvous.rank}, expected one value. Pass the same to all ranks."
            )
        places.append(place)
    return places


def _host_id() -> str:
    """Return a text that is equal for the processes of one host; containers with names of their own are hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def local_ranks(places: Sequence[_Place]) -> list[LocalRank]:
    """Return what each rank knows of its host; not collective; see [Note: devices of ranks]."""
    blind = [rank for rank, place in enumerate(places) if not place.devices]
    if blind and len(blind) < len(places):
        raise MeshError(
            f"cannot start the process group: {some(list(map(str, blind)), 'rank')} of {len(places)} see no "
            "accelerator, and the other ranks do, expected accelerators on all ranks or on none. Request the same "
            "resources for all of them (num_gpus=1 of a Ray actor)."
        )
    found: list[LocalRank] = []
    used_by: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(places):
        earlier = [other for other in places[:rank] if other.host == place.host]
        index = sum(other.devices == place.devices for other in earlier)
        count = sum(other.host == place.host for other in places)
        if place.devices:
            device = place.devices[index] if index < len(place.devices) else place.devices[-1]
            first = used_by.setdefault((place.host, device), rank)
            if first != rank:
                raise MeshError(
                    f"cannot start the process group: ranks {first} and {rank} would use the same accelerator "
                    f"{device} of {place.host.split()[0]}, expected one for each rank. Start as many ranks on a host "
                    "as it has accelerators (num_gpus=1 of a Ray actor)."
                )
        found.append(LocalRank(len(earlier), count, index if place.devices else None))
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
