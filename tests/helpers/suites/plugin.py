"""A pytest plugin that puts this package's trainers in the place of the published ones, and records outcomes.

Input: the options ``--trainers`` and ``--outcomes``. Output: a JSON file with the outcome and the message of each test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TRAINERS = {
    "trl": ("SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer"),
    "transformers": ("Trainer", "Seq2SeqTrainer"),
}
"""The classes that are replaced, by the module that tests import them from."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--trainers", choices=["ours", "published"], default="published")
    parser.addoption("--suite", choices=list(TRAINERS))
    parser.addoption("--outcomes", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    """Replace the trainers before a test module imports them."""
    config.stash[_OUTCOMES] = {}
    if config.getoption("--trainers") == "ours":
        replace(config.getoption("--suite"))


def replace(suite: str) -> None:
    """Replace the trainers in the module of a suite."""
    import importlib

    from fsdp2_strategy.integrations.trl import with_fsdp2

    module = importlib.import_module(suite)
    for name in TRAINERS[suite]:
        setattr(module, name, with_fsdp2(getattr(module, name)))


_OUTCOMES = pytest.StashKey[dict[str, tuple[str, str]]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    """Record the outcome of a test, and the last line of its error, whichever of its phases failed."""
    report = yield
    outcomes = item.config.stash[_OUTCOMES]
    if report.when == "call" or report.outcome != "passed":
        message = "" if call.excinfo is None else call.excinfo.exconly()
        outcomes[item.nodeid] = (report.outcome, message[-2000:])
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if path := session.config.getoption("--outcomes"):
        path.write_text(json.dumps(session.config.stash[_OUTCOMES]))
