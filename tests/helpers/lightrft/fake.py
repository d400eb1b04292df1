"""Run LightRFT's tests of its FakeStrategy with our strategy in place of that class; print failures as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import types
import unittest
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[3])]


def main(peer):
    """Run the tests of ``lightrft/strategy/test_fake_strategy.py`` on one rank."""
    from fsdp2_strategy.integrations.lightrft import LightRFTStrategy, get_strategy
    from helpers.lightrft import renames, stubs

    renames.install()
    stubs.install()
    sys.path.insert(0, peer)
    package = types.ModuleType("lightrft.strategy")
    package.__path__ = [f"{peer}/lightrft/strategy"]
    fake = types.ModuleType("lightrft.strategy.fake_strategy")
    fake.FakeStrategy, fake.get_fake_strategy = LightRFTStrategy, get_strategy
    sys.modules |= {package.__name__: package, fake.__name__: fake}
    tests = importlib.import_module("lightrft.strategy.test_fake_strategy")
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(tests).run(result)
    failed = {
        ".".join(case.id().split(".")[-2:]): text.strip().splitlines()[-1]
        for case, text in result.failures + result.errors
    }
    sys.stdout.write("\n" + json.dumps({"run": result.testsRun, "failed": failed}))


if __name__ == "__main__":
    main(sys.argv[1])
