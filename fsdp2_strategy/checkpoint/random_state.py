"""Generators of a rank, seeded, saved and restored: torch's on the CPU and its device, Python's and NumPy's.

Input: the generators. Output: one safetensors file a rank, and back.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save


@dataclass(frozen=True)
class RngState:
    """The states of this rank's generators."""

    python: tuple[Any, ...]
    numpy: Mapping[str, Any]
    torch: Mapping[str, torch.Tensor]
    """By the kind of device."""

    @classmethod
    def now(cls) -> RngState:
        """Return them as they are now."""
        of_torch = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            of_torch["cuda"] = torch.cuda.get_rng_state()
        return cls(random.getstate(), np.random.get_state(legacy=False), of_torch)  # noqa: NPY002  users draw from it

    def content(self) -> bytes:
        """Return them as the content of a file."""
        version, words, gauss = self.python
        tensors = {
            "python.words": torch.tensor(words, dtype=torch.int64),
            "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
            "numpy.keys": torch.from_numpy(np.asarray(self.numpy["state"]["key"], dtype=np.int64)),
            "numpy.position": torch.tensor([self.numpy["state"]["pos"], self.numpy["has_gauss"]], dtype=torch.int64),
            "numpy.cached": torch.tensor([self.numpy["gauss"]], dtype=torch.float64),
        }
        tensors |= {f"torch.{device}": state for device, state in self.torch.items()}
        return save(tensors, metadata={"python.version": str(version)})


def rng_content() -> bytes:
    """Return the states of this rank's generators, as the content of a file."""
    return RngState.now().content()


def load_rng(content: bytes) -> None:
    """Put the generators of this rank into the states that were saved in a file of this content."""
    tensors = load(content)
    torch.set_rng_state(tensors["torch.cpu"])
    if "torch.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["torch.cuda"])
    gauss = tensors["python.gauss"].tolist()
    random.setstate((3, tuple(tensors["python.words"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = tensors["numpy.position"].tolist()
    keys = tensors["numpy.keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, tensors["numpy.cached"].item()))  # noqa: NPY002


@contextmanager
def forked_rng(seed: int) -> Iterator[None]:
    """Let generators draw from a seed inside, and go on afterwards as if nothing had been drawn."""
    before = rng_content()
    seed_everything(seed)
    try:
        yield
    finally:
        load_rng(before)


def derive_rng(seed: int, *, step: int, rank: int, world_size: int) -> None:
    """Seed this rank's generators for a run that goes on with another number of ranks.

    Saved states belong to ranks that no longer exist; the new ones follow from seed, step, rank and world size alone.
    """
    text = f"{seed}/{step}/{rank}/{world_size}".encode()
    seed_everything(int.from_bytes(hashlib.sha256(text).digest()[:7], "big"))


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch on every device of this rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  the legacy generator is the one that user code draws from
    torch.manual_seed(seed)
