"""Run verl's workers on `FSDPV2Strategy`: an engine for verl's registry of engines.

Input: verl's configuration of a worker. Output: the same worker, whose model is sharded, stepped, offloaded, streamed
and saved by this package. verl imports this package if ``model.external_lib`` names it, and selects the engine by the
strategy ``fsdp2_strategy``:

    engine         `StrategyEngine`: the methods that verl's workers call
    checkpoints    save and load one directory, with the contents that verl's configuration selects
    settings       translate verl's configuration, and refuse what this package lacks
    names          every name of verl that the other modules use

verl must be installed. tests/test_compat_verl.py checks the names against the installed version.
"""

from __future__ import annotations

from fsdp2_strategy.extras import check_installed

check_installed("verl", "run verl's workers")

from fsdp2_strategy.integrations.verl.engine import StrategyEngine
from fsdp2_strategy.integrations.verl.settings import EngineConfig

__all__ = ["EngineConfig", "StrategyEngine"]
