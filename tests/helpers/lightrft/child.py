"""The program of a rank: run LightRFT's script with our strategy, or with its own, and record the steps."""

from __future__ import annotations

import json
import os
import runpy
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[3])]


def main(settings, arguments):
    """Run the script that ``settings`` names."""
    from helpers.lightrft import engine, redirections, renames, stubs

    peer = Path(settings["peer"])
    sys.path.insert(0, str(peer))
    renames.install()  # transformers looks for packages when it is imported: before the stubs
    stubs.install()
    redirections.install()
    record = {"calls": []}
    if settings["strategy"] == "ours":
        engine.register(**settings["engine"])
        strategy = ours(peer, settings)
    else:
        strategy = theirs(settings)
    recorded(strategy, record)
    for name in settings["patches"]:
        from helpers.lightrft import patches

        getattr(patches, name)()
    sys.argv = [str(peer / settings["script"]), *arguments]
    script = runpy.run_path(sys.argv[0], run_name="__main__")
    assert script
    record["updates"] = [made.updates for made in engine.LocalEngine.made]
    Path(settings["record"]).with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(record))


def ours(peer, settings):
    """Answer ``from lightrft.strategy import get_strategy`` with our function; return the strategy's class."""
    from functools import partial

    from fsdp2_strategy.integrations import lightrft

    module = types.ModuleType("lightrft.strategy")
    module.__path__ = [str(peer / "lightrft" / "strategy")]  # models import utilities of sequence parallelism from it
    module.get_strategy = partial(lightrft.get_strategy, **settings["options"])
    module.is_engine = lightrft.is_engine
    sys.modules["lightrft.strategy"] = module
    import lightrft as package

    package.strategy = module
    if settings["order"] == "theirs":
        in_their_order(lightrft.LightRFTStrategy)
    return lightrft.LightRFTStrategy


def in_their_order(cls):
    """Draw samples in LightRFT's order, with the sampler that it passes on request."""
    from lightrft.utils import DistributedSampler

    setup = cls.setup_dataloader

    def setup_dataloader(self, dataset, batch_size, pin_memory=False, shuffle=True, collate_fn=None, drop_last=True):
        sampler = DistributedSampler(
            dataset, num_replicas=self.world_size, rank=self.get_rank(), shuffle=shuffle, seed=self.seed,
            drop_last=drop_last,
        )  # fmt: skip
        return setup(self, dataset, batch_size, pin_memory, shuffle, collate_fn, drop_last, sampler)

    cls.setup_dataloader = setup_dataloader


def theirs(settings):
    """Replace the engine of LightRFT's own strategy; return its class."""
    from helpers.lightrft.engine import ScriptedEngine

    options = {name: value for name, value in settings["engine"].items() if name != "scripted"}
    module = types.ModuleType("lightrft.strategy.sglang_utils")
    module.get_sglang_engine_for_rollout = lambda args: ScriptedEngine(**options)
    sys.modules[module.__name__] = module

    from lightrft.strategy.fsdp.fsdpv2 import FSDPV2Strategy

    return FSDPV2Strategy


def recorded(cls, record):
    """Record each call of `backward` and `optimizer_step`: losses, steps and learning rates."""
    backward, step = cls.backward, cls.optimizer_step
    losses = []

    def recorded_backward(self, loss, *args, **kwargs):
        losses.append(loss.item())
        return backward(self, loss, *args, **kwargs)

    def recorded_step(self, optimizer, model, scheduler, name="model", **kwargs):
        result = step(self, optimizer, model, scheduler, name=name, **kwargs)
        rate = optimizer.param_groups[0]["lr"]
        record["calls"].append({"name": name, "losses": list(losses), "steps": scheduler.last_epoch, "rate": rate})
        if getattr(result, "grad_norm", None) is not None:
            record["calls"][-1]["grad_norm"] = result.grad_norm
        losses.clear()
        return result

    cls.backward, cls.optimizer_step = recorded_backward, recorded_step


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:])
