"""Checkpoints: `layout` and `places` (names, manifest), `directory` (commit, `lock`), `parts` and `state` (what is
saved, with `rng`, `data`, and for LeRobot `lerobot` and `gathered`), `storage` (tensors in files, under torch's
driver), `rotation`, `background` (saves behind the trainer), and `verify`.

`save` and `load` tie them together; both are collective, and end alike on every rank.
"""

from fsdp2_strategy.checkpoint.data import Loader
from fsdp2_strategy.checkpoint.layout import Checkpoint, list_checkpoints
from fsdp2_strategy.checkpoint.lerobot import LeRobotLayout
from fsdp2_strategy.checkpoint.load import load_checkpoint
from fsdp2_strategy.checkpoint.save import end_saving, save_checkpoint, wait_for_save
from fsdp2_strategy.checkpoint.state import LoadedCheckpoint
from fsdp2_strategy.checkpoint.verify import VerifyReport, verify_checkpoint

__all__ = [
    "Checkpoint",
    "LeRobotLayout",
    "LoadedCheckpoint",
    "Loader",
    "VerifyReport",
    "end_saving",
    "list_checkpoints",
    "load_checkpoint",
    "save_checkpoint",
    "verify_checkpoint",
    "wait_for_save",
]
