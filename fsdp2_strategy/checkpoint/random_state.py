"""Seed, save and restore a rank's random generators: torch's on the CPU and the accelerator, Python's and
NumPy's.

Input: the generators. Output: the content of one safetensors file per rank, and the generators restored from it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save

from fsdp2_strategy.config.arguments import check_number
from fsdp2_strategy.distributed.accelerator import accelerator_type
from fsdp2_strategy.distributed.generators import (
    accelerator_state,
    host_states,
    seed_all,
    set_accelerator_state,
    set_host_states,
)
from fsdp2_strategy.errors import ArgumentError, DamageError, shortened
from fsdp2_strategy.storage.safetensors_format import tensors_in


def rng_content() -> bytes:
    """Return the current states of this rank's generators as the content of a safetensors file."""
    (_, words, gauss), numpy, of_torch = host_states()
    tensors = {
        "python.words": torch.tensor(words, dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy.keys": torch.from_numpy(np.asarray(numpy["state"]["key"], dtype=np.int64)),
        "numpy.position": torch.tensor([numpy["state"]["pos"], numpy["has_gauss"]], dtype=torch.int64),
        "numpy.cached": torch.tensor([numpy["gauss"]], dtype=torch.float64),
        "torch.cpu": of_torch,
    }
    if (state := accelerator_state()) is not None:
        tensors[f"torch.{accelerator_type()}"] = state
    return save(tensors)


def check_rng(content: bytes, path: Path) -> None:
    """Raise a `DamageError` if the content of the file at ``path`` is not a result of `rng_content`."""
    tensors, _ = tensors_in(content, path)
    of_accelerator = {name: _TENSORS["torch.cpu"] for name in tensors if name.startswith("torch.")}
    for name, (dtype, length, largest) in (_TENSORS | of_accelerator).items():
        found = tensors.get(name)
        if found is None or found.dtype != dtype or found.ndim != 1 or (length is not None and len(found) != length):
            raise _invalid(path, f"{name} is not a vector of {dtype} of the right length")
        if largest is not None and not bool(((found >= 0) & (found <= largest)).all()):
            raise _invalid(path, f"{name} has values outside of 0 to {largest}")
    if len(tensors["python.gauss"]) > 1:
        raise _invalid(path, "python.gauss has more than one value")
    if tensors["python.words"][-1] > _WORDS or tensors["numpy.position"][0] > _WORDS:
        raise _invalid(path, f"the position of a generator exceeds {_WORDS}")
    try:
        torch.Generator().set_state(tensors["torch.cpu"])
    except (RuntimeError, TypeError) as error:
        raise _invalid(path, f"torch does not accept torch.cpu ({shortened(str(error))})") from error


def _invalid(path: Path, problem: str) -> DamageError:
    return DamageError(f"cannot read {path}: {problem}, expected states of random generators. Load another checkpoint.")


_WORDS = 624
_TENSORS: dict[str, tuple[torch.dtype, int | None, int | None]] = {
    "python.words": (torch.int64, _WORDS + 1, (1 << 32) - 1),
    "python.gauss": (torch.float64, None, None),
    "numpy.keys": (torch.int64, _WORDS, (1 << 32) - 1),
    "numpy.position": (torch.int64, 2, _WORDS),
    "numpy.cached": (torch.float64, 1, None),
    "torch.cpu": (torch.uint8, None, None),
}
"""The tensors of a file: dtype, length and largest value, if they are fixed. With an accelerator, there is one
more, named by the type of device, such as "torch.cuda"; a rank whose accelerator is of another type ignores it."""
RNG_BYTES = 1 << 20
"""Maximum size of a file."""


def load_rng(content: bytes) -> None:
    """Restore this rank's generators from the result of `rng_content`."""
    tensors = load(content)
    if (own := f"torch.{accelerator_type()}") in tensors:
        set_accelerator_state(tensors[own])
    gauss = tensors["python.gauss"].tolist()
    of_python = (3, tuple(tensors["python.words"].tolist()), gauss[0] if gauss else None)
    position, has_gauss = tensors["numpy.position"].tolist()
    keys = tensors["numpy.keys"].numpy().astype(np.uint32)
    of_numpy = ("MT19937", keys, position, has_gauss, tensors["numpy.cached"].item())
    set_host_states((of_python, of_numpy, tensors["torch.cpu"]))


def derive_seed(*numbers: int) -> int:
    """Return a seed that depends on all of the numbers."""
    text = "/".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch on all devices that this process can use; not collective.

    Raises:
        ArgumentError: ``seed`` is not an integer.
    """
    check_number("seed the generators", "seed", seed, ArgumentError, integer=True)
    seed_all(seed)
