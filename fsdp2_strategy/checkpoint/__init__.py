"""Save, load, list and verify sharded checkpoints.

`save` and `load` are collective; both succeed or raise on all ranks. They combine these modules:

- Arguments of a save: `save_request`
- Files on disk: `layout`, `paths`, `directory` (commit), `lock`, `rotation`
- Content: `components`, `training_state`, `random_state`, `data_position`, `trainable_only`, `gathered_policy`
- Tensor I/O with `torch.distributed.checkpoint`, and checksums: `storage`, `reader`
- Asynchronous saves: `background_save`
- Checkpoints of other systems: `foreign_formats`
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
