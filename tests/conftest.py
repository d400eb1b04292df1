"""Run tests that are marked ``ranks(n)`` on n ranks of a persistent pool, all others here."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
import inspect
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Nothing here imports torch: under xdist, the process that starts the workers runs no test.
from helpers.shrunk import FILES, SHRUNK
from helpers.simulated import CORE, runs_simulated

from fsdp2_strategy import sizes

if TYPE_CHECKING:
    from helpers.pool import RankPool

_POOL: pytest.StashKey[RankPool] = pytest.StashKey()
_SIMULATED_POOL: pytest.StashKey[RankPool] = pytest.StashKey()
_COMPARING_POOL: pytest.StashKey[RankPool] = pytest.StashKey()
_UNRECORDED_POOL: pytest.StashKey[RankPool] = pytest.StashKey()
_POOLS = (_POOL, _SIMULATED_POOL, _COMPARING_POOL, _UNRECORDED_POOL)
INTEGRATIONS = {
    "accelerate": ("test_accelerate",),
    "lerobot": ("test_compat_lerobot", "test_lerobot", "test_peers_lerobot", "test_streaming"),
    "lightrft": ("test_compat_lightrft", "test_peers_lightrft"),
    "trl": ("test_compat_transformers", "test_trainer_layout", "test_suites"),
    "verl": ("test_compat_verl",),
    "vitra": ("test_vla", "test_peers_vitra", "test_robot"),
}
"""How the files with the tests of each integration begin: ``pytest -m lerobot`` selects them."""


ONE_IN = 5
"""Of the cases of a test that `make test` leaves out, CI runs one in so many, and `make sweep` the others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "compare the collectives of all ranks after each test, as tests/helpers/collective_order.py describes"
    parser.addoption("--collective-order", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests are collected: nothing of what that makes is garbage
    if config.getoption("numprocesses", None):
        return  # only the workers of xdist run tests
    from helpers.pool import RankPool

    compares = bool(config.getoption("--collective-order"))
    config.stash[_POOL] = RankPool(compares_collectives=compares)
    config.stash[_SIMULATED_POOL] = RankPool(is_simulated=True, compares_collectives=compares)
    config.stash[_COMPARING_POOL] = RankPool(compares_collectives=True)
    config.stash[_UNRECORDED_POOL] = RankPool()


def pytest_unconfigure(config: pytest.Config) -> None:
    for pool in _POOLS:
        if pool in config.stash:
            config.stash[pool].close()


def _pool_for(config: pytest.Config, file: str, variant: str = "") -> RankPool:
    """Return the pool for tests of a file; the tests of the comparison of collectives have their own."""
    if variant == "simulated":
        return config.stash[_SIMULATED_POOL]
    return config.stash[_COMPARING_POOL if Path(file).name == "test_collective_order.py" else _POOL]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a file on one number of ranks together, in one worker of xdist.

    A change of the number costs a new process group; more than a file in a group leaves workers without work.
    """
    items[:] = [item for item in items if not (_is_shrunk(item) and item.get_closest_marker("real_sizes"))]
    seen: set[tuple[Path, str]] = set()
    items[:] = [item for item in items if _variant(item) != "simulated" or not _repeats(item, seen)]
    items.sort(key=lambda item: (_variant(item), _world_size(item)))
    _leave_to_full(items)
    _leave_to_sweep(items)
    for item in items:
        for name, files in INTEGRATIONS.items():
            if item.path.stem.startswith(files):
                item.add_marker(name)
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        if not _world_size(item) and item.get_closest_marker("full") and not _is_shrunk(item):
            continue  # long, and any worker can run it
        ranks = f"{_world_size(item)} ranks {_variant(item)}"
        item.add_marker(pytest.mark.xdist_group(f"{ranks} {item.path.stem}"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _leave_to_full(items: list[pytest.Item]) -> None:
    """Mark two of three cases of a test on ranks for CI alone."""
    short = [item for item in items if _world_size(item) and not item.get_closest_marker("full")]
    for item in _all_but_one_in(3, short):
        item.add_marker("full")
        item.add_marker("each")


def _leave_to_sweep(items: list[pytest.Item]) -> None:
    """Mark further cases of tests for `make sweep`: CI runs one in `ONE_IN`."""
    of_ci = [i for i in items if i.get_closest_marker("full") and not any(map(i.get_closest_marker, ("sweep", "each")))]
    for item in _all_but_one_in(ONE_IN, of_ci):
        item.add_marker("sweep")


def _all_but_one_in(number: int, items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases of each test but one in ``number``, chosen by name."""
    cases = defaultdict(list)
    for item in items:
        cases[item.path, getattr(item, "originalname", item.name), _variant(item)].append(item)
    for of_test in cases.values():
        of_test.sort(key=lambda item: zlib.crc32(item.name.encode()))
        yield from of_test[-(-len(of_test) // number) :]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let tests of what has sizes run with small ones, too, and core tests on the simulated accelerator."""
    import torch

    file, test = metafunc.definition.path.name, metafunc.definition.name
    needed = _world_size(metafunc.definition) if file == "test_gpu.py" else 0
    found = torch.accelerator.device_count()
    absent = f"accelerators needed: {needed}, found: {found}" if found < needed else ""
    absent_mark = [pytest.mark.skip(reason=absent)] if absent else []
    variants = [pytest.param("real", id=pytest.HIDDEN_PARAM, marks=absent_mark)]
    if file in FILES:
        variants.append(pytest.param("shrunk", marks=[pytest.mark.full, pytest.mark.shrunk]))
    if runs_simulated(file, test) and metafunc.definition.get_closest_marker("ranks"):
        full = [] if test in CORE else [pytest.mark.full]
        variants.append(pytest.param("simulated", marks=[*full, pytest.mark.each, pytest.mark.simulated]))
    if len(variants) > 1:
        metafunc.parametrize("_variant_of_test", variants, indirect=True)


def _repeats(item: pytest.Item, seen: set[tuple[Path, str]]) -> bool:
    """Return whether a case on the simulated accelerator repeats a promise: of each test there, one case runs."""
    if "simulated" not in getattr(getattr(item, "callspec", None), "params", {}).values():
        return False  # a test of the device itself
    test = item.path, getattr(item, "originalname", item.name)
    of_function = [mark for mark in getattr(item.function, "pytestmark", ()) if mark.name == "full"]
    is_long_case = len([*item.iter_markers("full")]) - len(of_function) > 1
    is_repeated = (test in seen and item.path.name != "test_gpu.py") or is_long_case
    seen.add(test)
    return is_repeated or any(map(item.get_closest_marker, ("sweep", "soak", "big")))


def _variant(item: pytest.Item) -> str:
    return next((name for name in ("shrunk", "simulated") if item.get_closest_marker(name)), "")


def _is_shrunk(item: pytest.Item) -> bool:
    return item.get_closest_marker("shrunk") is not None


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
    file = str(pyfuncitem.path)
    pool = _pool_for(pyfuncitem.config, file, _variant(pyfuncitem))
    if pyfuncitem.get_closest_marker("unrecorded") and pool.compares_collectives:
        pool = pyfuncitem.config.stash[_UNRECORDED_POOL]
    pool.run(
        file,
        pyfuncitem.originalname,
        arguments,
        world_size,
        timeout=300,
        same_collectives=pyfuncitem.get_closest_marker("differing_collectives") is None,
    )
    return True


@pytest.fixture(scope="session")
def run_on(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a call that runs a function of a test module on some ranks: for tests over several world sizes."""

    def run(world_size: int, function: Callable[..., None], **arguments: Any) -> None:
        pool = _pool_for(request.config, file := inspect.getfile(function))
        pool.run(file, function.__name__, arguments, world_size, timeout=300)

    return run


@pytest.fixture
def end_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the ranks of the pool after a test that breaks their connections."""
    yield
    for pool in _POOLS:
        request.config.stash[pool].close()


@pytest.fixture(autouse=True)
def _variant_of_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shrink the sizes for tests that run so, here and on the ranks of the pool; build the simulated accelerator."""
    variant = _variant(request.node)
    if variant == "simulated":
        import simulated_accelerator

        if reason := simulated_accelerator.missing():
            pytest.skip(reason)
    pool = request.config.stash[_POOL]
    pool.sizes = SHRUNK if variant == "shrunk" else {}
    with patch.multiple(sizes, **pool.sizes) if pool.sizes else nullcontext():
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_leftover_process_group() -> Iterator[None]:
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
