"""Run LeRobot's training script, with its own command line, on the policies and checkpoints of this package.

    torchrun --nproc-per-node 8 -m fsdp2_strategy.integrations.lerobot.train --policy.type=act --dataset.repo_id=... \
        --parallelism.dp_shard=8

Input: LeRobot's options. Output: its run directory. Every rank runs this module. It needs LeRobot 0.6.
"""

from __future__ import annotations

import importlib

from fsdp2_strategy.extras import needed_to
from fsdp2_strategy.integrations.lerobot.script import run

if __name__ == "__main__":
    with needed_to("train with LeRobot's script"):
        script = importlib.import_module("lerobot.scripts.lerobot_train")
    run(script)
