"""Run the code of docs/coming_from_vitra.md that writes ``weights.pt``; then load the file with VITRA's own function.

Arguments: VITRA's source, the page, the configuration of a run, a checkpoint of ours, and a ``weights.pt`` of VITRA's
own strategy. Output: one line of JSON with facts about the loaded model.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main(source, page, config, checkpoint, reference):
    from helpers.vitra import shims, stubs

    sys.path.insert(0, source)
    stubs.install()
    shims.install()
    import torch
    from vitra.models.vla_builder import build_vla, load_vla_checkpoint

    config = json.loads(Path(config).read_text())
    (code,) = re.findall(r"```python\n(.*?)```", Path(page).read_text(), re.DOTALL)
    torch.manual_seed(1)
    exec(code, {"config": config, "checkpoint": checkpoint})
    torch.manual_seed(2)
    model = build_vla(config)
    started = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loaded, theirs = load_vla_checkpoint(model, "weights.pt").state_dict(), torch.load(reference)
    differences = torch.cat([(tensor - theirs[name]).abs().flatten() for name, tensor in loaded.items()])
    facts = {
        "same names": list(loaded) == list(theirs),
        "changed": sum(not torch.equal(tensor, started[name]) for name, tensor in loaded.items()),
        "largest": differences.max().item(),
        "mean": differences.mean().item(),
    }
    sys.stdout.write(f"\n{json.dumps(facts)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
