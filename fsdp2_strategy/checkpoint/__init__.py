"""Save, load, list and verify sharded checkpoints.

`save` and `load` are collective; both succeed or raise on all ranks. They combine these modules:

- Arguments of a save: `save_request`
- Files on disk: `layout`, `paths`, `directory` (commit), `lock`, `rotation`
- Content: `components`, `training_state`, `random_state`, `data_position`, `trainable_only`, `gathered_policy`
- Tensor I/O with `torch.distributed.checkpoint`, and checksums: `storage`, `reader`
- Asynchronous saves: `background_save`
- Checkpoints of other systems: `foreign_formats`

Public names are imported when they are first used, so that the command ``ls`` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.import_paths import lazy_exports

if TYPE_CHECKING:
    from fsdp2_strategy.checkpoint.data_position import Loader as Loader
    from fsdp2_strategy.checkpoint.layout import Checkpoint as Checkpoint
    from fsdp2_strategy.checkpoint.layout import list_checkpoints as list_checkpoints
    from fsdp2_strategy.checkpoint.load import load_checkpoint as load_checkpoint
    from fsdp2_strategy.checkpoint.save import end_saving as end_saving
    from fsdp2_strategy.checkpoint.save import save_checkpoint as save_checkpoint
    from fsdp2_strategy.checkpoint.save import wait_for_save as wait_for_save
    from fsdp2_strategy.checkpoint.training_state import LoadedCheckpoint as LoadedCheckpoint
    from fsdp2_strategy.checkpoint.verify import VerifyReport as VerifyReport
    from fsdp2_strategy.checkpoint.verify import verify_checkpoint as verify_checkpoint
    from fsdp2_strategy.lerobot.checkpoint_layout import LeRobotLayout as LeRobotLayout

__getattr__, __dir__, __all__ = lazy_exports(__name__)
