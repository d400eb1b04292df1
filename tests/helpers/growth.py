"""Count what plans cost with few and many tensors and ranks, in a process that has run nothing else.

    python -m helpers.growth FEW_TENSORS MANY_TENSORS FEW_RANKS MANY_RANKS PLAN...

Input: numbers of tensors and of ranks, and names of `scale_plans.PLANS`. Output: JSON on standard output: for each plan
the costs of a first and of a later run, with few tensors and ranks, with many tensors, and with many ranks; or the
traceback of its error. What other tests leave in a process, such as filled caches of torch, changes the counts.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import scale_plans


def costs(name, ranks, count):
    """Return the costs of a first and of a later run."""
    plan = scale_plans.whole_step if name == "step" else scale_plans.PLANS[name]
    with tempfile.TemporaryDirectory() as folder:
        call = plan(ranks, count, Path(folder))
        return [asdict(scale_plans.measure(call, counts_calls=True)) for _ in range(2)]


def main():
    tensors, ranks, names = [*map(int, sys.argv[1:3])], [*map(int, sys.argv[3:5])], sys.argv[5:]
    logging.getLogger("fsdp2_strategy").setLevel(logging.CRITICAL)
    found = {}
    for name in names:
        try:
            costs(name, 2, 12)  # Python and torch read modules at their first use
            found[name] = [costs(name, *case) for case in [(ranks[0], n) for n in tensors] + [(ranks[1], tensors[0])]]
        except Exception:  # noqa: BLE001  the test shows it
            found[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
