"""Checkpoints: `layout` and `paths` (names, manifest), `directory` (commit, `lock`), `components` and `training_state`
(what is saved, with `random_state` and `data_position`, and for LeRobot `gathered_policy`), `storage` (tensors in
files, under torch's driver), `reader`, `trainable_only`, `rotation`, `background_save` (saves behind the trainer), and
`verify`.

`save` and `load` tie them together; both are collective, and end alike on every rank.
"""

from fsdp2_strategy.checkpoint.data_position import Loader
from fsdp2_strategy.checkpoint.layout import Checkpoint, list_checkpoints
from fsdp2_strategy.checkpoint.load import load_checkpoint
from fsdp2_strategy.checkpoint.save import end_saving, save_checkpoint, wait_for_save
from fsdp2_strategy.checkpoint.training_state import LoadedCheckpoint
from fsdp2_strategy.checkpoint.verify import VerifyReport, verify_checkpoint
from fsdp2_strategy.lerobot.checkpoint_layout import LeRobotLayout

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
