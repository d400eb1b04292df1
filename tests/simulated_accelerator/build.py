"""Build the C++ part once for each content of its sources and each torch, into the folder `build` here."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

NAME = "simulated_accelerator_library"
SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parent / "build"
FLAGS = ["-O1", "-g0", "-std=c++20", "-Wall", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]


def missing() -> str:
    """Return why the library cannot be built here; empty if it can."""
    if sys.platform != "linux":
        return "the simulated accelerator is built on Linux only"
    if _target().exists():
        return ""
    absent = [program for program in ("g++", "ninja") if shutil.which(program) is None]
    return f"the simulated accelerator needs {' and '.join(absent)}, and there is none" if absent else ""


def library() -> ModuleType:
    """Import the library; build it first if there is none for these sources."""
    target = _target()
    if not target.exists():
        BUILT.mkdir(exist_ok=True)
        with (BUILT / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _build(target)
    spec = importlib.util.spec_from_file_location(NAME, target)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _target() -> Path:
    digest = hashlib.sha256(" ".join([torch.__version__, sys.version, *FLAGS]).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return BUILT / f"{NAME}-{digest.hexdigest()[:16]}.so"


def _build(target: Path) -> None:
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=BUILT, prefix="building-") as folder:
        # torch's headers take most of the time: they are read once, by one file that includes all sources.
        together = Path(folder) / "together.cpp"
        together.write_text("".join(f'#include "{path}"\n' for path in sorted(SOURCES.glob("*.cpp"))))
        cpp_extension.load(NAME, [str(together)], extra_cflags=FLAGS, build_directory=folder, is_python_module=False)
        (Path(folder) / f"{NAME}.so").replace(target)
