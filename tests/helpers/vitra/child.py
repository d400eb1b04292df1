"""The program of a rank: run VITRA's script with our strategy, or with its own, and record the losses."""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[3])]


def main(settings, arguments):
    """Run the script that ``settings`` names."""
    sys.path.insert(0, settings["peer"])
    from helpers.vitra import patches, redirections, shims, stubs

    stubs.install()
    redirections.install()
    shims.install()
    record = Path(settings["record"])
    record.with_suffix(f".{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    record_losses(record.with_suffix(f".{os.environ['RANK']}.jsonl"), settings["seeded"])
    from vitra.training import fsdp, metrics

    redirections.install_in_vitra(fsdp, metrics)
    for name in settings["patches"]:
        getattr(patches, name)()
    if settings["options"]:
        add_options(settings["options"])
    sys.argv = [settings["script"], *arguments]
    runpy.run_path(settings["script"], run_name="__main__")


def add_options(options):
    """Pass further arguments to our strategy."""
    from fsdp2_strategy.integrations import vitra as vla

    vla.VLAFSDPStrategy = functools.partial(vla.VLAFSDPStrategy, **options)


def record_losses(path, seeded):
    """Write the loss of each micro-batch to a file, as it is computed.

    Args:
        path: the file.
        seeded: the number of the first micro-batch, if the noise of a micro-batch is to depend on its number and on the
            rank only; else None.
    """
    import torch
    from vitra.models.vla.vitra_paligemma import VITRA_Paligemma

    forward = VITRA_Paligemma.forward
    file = path.open("a")
    count = seeded or 0

    @functools.wraps(forward)
    def recorded(self, *args, **kwargs):
        nonlocal count
        if seeded is not None:
            torch.manual_seed(1000 * int(os.environ["RANK"]) + count)
        count += 1
        result = forward(self, *args, **kwargs)
        losses = {name: float(torch.as_tensor(value).detach()) for name, value in result.items()}
        file.write(json.dumps(losses) + "\n")
        file.flush()
        return result

    VITRA_Paligemma.forward = recorded


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:])
