"""Run tests that are marked ``ranks(n)`` on n ranks of a persistent pool, all others here."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pool import RankPool

_POOL = pytest.StashKey[RankPool]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_POOL] = RankPool()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_POOL].close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep tests of one world size together, in one worker of xdist: a change costs a new process group."""
    items.sort(key=_world_size)
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        if not _world_size(item) and item.get_closest_marker("full"):
            continue  # long, and any worker can run it
        item.add_marker(pytest.mark.xdist_group(f"{_world_size(item)} ranks"))


def _world_size(item: pytest.Item) -> int:
    marker = item.get_closest_marker("ranks")
    return marker.args[0] if marker else 0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Send the test to the pool instead of calling it here."""
    world_size = _world_size(pyfuncitem)
    if not world_size:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    pool = pyfuncitem.config.stash[_POOL]
    pool.run(str(pyfuncitem.path), pyfuncitem.originalname, arguments, world_size, timeout=240)
    return True


@pytest.fixture(scope="session")
def run_on(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a call that runs a function of a test module on some ranks: for tests over several world sizes."""

    def run(world_size: int, function: Callable[..., None], **arguments: Any) -> None:
        pool = request.config.stash[_POOL]
        pool.run(inspect.getfile(function), function.__name__, arguments, world_size, timeout=240)

    return run


@pytest.fixture(scope="session", autouse=True)
def _no_leftover_process_group() -> Iterator[None]:
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
